"""Defines the messages between a replay buffer's server and its clients.

Items are sent as bytes: small batches inside the message (``data``), larger ones as a stream of ``nbytes`` bytes after
the receiver has sent a :class:`asyncdist.messaging.streams.Grant`. A client numbers its requests. The server answers
each request once, with ``Added``, ``Drawn`` or ``Failed``.
"""

from dataclasses import dataclass

from asyncdist.messaging.streams import Cancel, Grant

#: Maximum size in bytes of a payload inside a message. Larger payloads are streamed. A frame has at most 64 KiB, and a
#: long frame delays the short frames behind it.
INLINE_NBYTES_MAX = 32 << 10


@dataclass(frozen=True, slots=True)
class Open:
    """Client to server, repeated until answered: asks the server to accept this client.

    Attributes:
        entry: Number that distinguishes successive clients of the same buffer on one rank.
    """

    entry: int


@dataclass(frozen=True, slots=True)
class Welcome:
    """Server to client: accepts the client, and describes the buffer.

    Attributes:
        in_flight_max: Maximum number of the client's unanswered draws, and of its unanswered adds and updates.
    """

    entry: int
    capacity: int
    in_flight_max: int
    prioritized: bool


@dataclass(frozen=True, slots=True)
class Refused:
    """Server to client, as the last message: rejects a client that enters, or that has violated the protocol."""

    entry: int
    reason: str


@dataclass(frozen=True, slots=True)
class Declare:
    """Both directions, before the first item: declares the batches' form, and each field's name, dtype and shape."""

    form: str
    names: tuple[str, ...]
    dtypes: tuple[str, ...]
    shapes: tuple[tuple[int, ...], ...]


@dataclass(frozen=True, slots=True)
class Add:
    """Client to server: adds ``count`` items, followed by their priorities (float64) if ``has_priorities``."""

    request: int
    count: int
    has_priorities: bool
    nbytes: int
    data: bytes


@dataclass(frozen=True, slots=True)
class Draw:
    """Client to server: asks for ``count`` items. If ``waits`` is false, fewer items are accepted."""

    request: int
    count: int
    beta: float
    waits: bool

    def __post_init__(self) -> None:
        if self.count < 1:
            raise ValueError(f"count must be >= 1, got {self.count}")


@dataclass(frozen=True, slots=True)
class Update:
    """Client to server: sets the priorities of ``count`` items. The payload is their ids, then the float64 values."""

    request: int
    count: int
    nbytes: int
    data: bytes


@dataclass(frozen=True, slots=True)
class Withdraw:
    """Client to server: withdraws a draw whose caller was cancelled. The server still answers the draw."""

    request: int


@dataclass(frozen=True, slots=True)
class Leaving:
    """Client to server: the client will add no more items, and waits for the answers to its requests."""


@dataclass(frozen=True, slots=True)
class Ended:
    """Server to client, as the last message: the server ended while it still had clients.

    Attributes:
        kind: Class name of the exception that has ended the server; "" if the server was cancelled.
    """

    kind: str
    text: str


@dataclass(frozen=True, slots=True)
class Left:
    """Client to server, as the last message: the client leaves."""


@dataclass(frozen=True, slots=True)
class Added:
    """Server to client: adds or updates are complete. ``scores`` has the scoring hook's result for each request."""

    requests: tuple[int, ...]
    scores: tuple[float | None, ...]


@dataclass(frozen=True, slots=True)
class Drawn:
    """Server to client: answers a draw with ``count`` rows, followed by their ids (int64) and weights (float64)."""

    request: int
    count: int
    nbytes: int
    data: bytes


@dataclass(frozen=True, slots=True)
class Failed:
    """Server to client: a request has failed. If ``later`` is true, it may succeed when repeated."""

    request: int
    later: bool
    reason: str


ReplayMessage = (
    Open
    | Welcome
    | Refused
    | Declare
    | Add
    | Draw
    | Update
    | Withdraw
    | Leaving
    | Left
    | Added
    | Drawn
    | Failed
    | Ended
    | Grant
    | Cancel
)
