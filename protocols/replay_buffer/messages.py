"""Defines the messages between a replay buffer and its clients.

Items are sent as bytes. Those of a small batch are inside the message (``data``). Those of a larger batch are a stream
of ``nbytes`` bytes that the receiving side grants (:class:`asyncdist.messaging.streams.Grant`, with the request's
number in the frame's header); ``data`` is then empty. A client numbers its requests. Each is answered once, by
``Added``, ``Drawn`` or ``Failed``.
"""

from dataclasses import dataclass

from asyncdist.messaging.streams import Cancel, Grant

#: Larger payloads are sent as streams: a frame has 64 KiB, and a long frame delays short ones.
INLINE_NBYTES_MAX = 32 << 10


@dataclass(frozen=True, slots=True)
class Open:
    """Client to server, first and repeated until it is answered: asks to be served.

    Attributes:
        entry: Number that distinguishes successive clients of the same buffer on this rank.
    """

    entry: int


@dataclass(frozen=True, slots=True)
class Welcome:
    """Server to client: accepts the client, and describes the buffer.

    Attributes:
        entry: Entry of the ``Open`` that this answers.
        capacity: Largest number of items in the buffer.
        in_flight_max: Largest number of unanswered draws of one client, and of its other unanswered requests.
        prioritized: Whether priorities count.
    """

    entry: int
    capacity: int
    in_flight_max: int
    prioritized: bool


@dataclass(frozen=True, slots=True)
class Refused:
    """Server to client, last: refuses the client instead of ``Welcome``, or after a violation, with the reason."""

    entry: int
    reason: str


@dataclass(frozen=True, slots=True)
class Declare:
    """Both directions, before the first item: describes the layout of an item in a row of bytes."""

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
    """Client to server: asks for ``count`` items; without ``waits``, also accepts fewer if the buffer holds fewer."""

    request: int
    count: int
    beta: float
    waits: bool

    def __post_init__(self) -> None:
        """Raise ValueError for a request that no correct client sends."""
        if self.count < 1:
            raise ValueError(f"count must be >= 1, got {self.count}")


@dataclass(frozen=True, slots=True)
class Update:
    """Client to server: sends ``count`` ids (int64), followed by their new priorities (float64)."""

    request: int
    count: int
    nbytes: int
    data: bytes


@dataclass(frozen=True, slots=True)
class Withdraw:
    """Client to server: the caller of a draw was cancelled. The draw is answered anyway."""

    request: int


@dataclass(frozen=True, slots=True)
class Leaving:
    """Client to server: the client will add nothing more, and waits for the answers to its requests."""


@dataclass(frozen=True, slots=True)
class Ended:
    """Server to client, last: the server ends before its clients are done.

    Attributes:
        kind, text: Exception that ended it, as in :class:`asyncdist.RemoteError`; ``kind`` is empty if it was
            cancelled.
    """

    kind: str
    text: str


@dataclass(frozen=True, slots=True)
class Bye:
    """Client to server, last: the client leaves."""


@dataclass(frozen=True, slots=True)
class Added:
    """Server to client: the requests are done; ``scores`` are the scoring hook's results, one for each request."""

    requests: tuple[int, ...]
    scores: tuple[float | None, ...]


@dataclass(frozen=True, slots=True)
class Drawn:
    """Server to client: sends ``count`` rows, followed by their ids (int64) and weights (float64)."""

    request: int
    count: int
    nbytes: int
    data: bytes


@dataclass(frozen=True, slots=True)
class Failed:
    """Server to client: a request has failed, with the reason; ``later`` if it may succeed when repeated."""

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
    | Bye
    | Added
    | Drawn
    | Failed
    | Ended
    | Grant
    | Cancel
)
