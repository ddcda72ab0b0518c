"""Defines the messages between a replay buffer and its clients.

Items travel as bytes: those of a small batch inside the message (``data``), those of a larger one as a stream that the
receiving side grants (:class:`asyncdist.messaging.streams.Grant`, with the request's number in the frame's header);
then ``data`` is empty and ``nbytes`` says how many come. A client numbers its requests; each is answered once, by
``Added``, ``Drawn`` or ``Failed``.
"""

from dataclasses import dataclass

from asyncdist.messaging.streams import Cancel, Grant

#: Larger payloads go as streams: a frame has 64 KiB, and a long frame keeps short ones waiting.
INLINE_NBYTES_MAX = 32 << 10


@dataclass(frozen=True, slots=True)
class Open:
    """Client to server, first, and again until it is answered: asks to be served.

    Attributes:
        entry: tells the clients of one buffer apart that this rank has one after the other.
    """

    entry: int


@dataclass(frozen=True, slots=True)
class Welcome:
    """Server to client: accepts the client, and says what it may do.

    Attributes:
        entry: of the ``Open`` that this answers.
        capacity: items that the buffer holds at most.
        in_flight_max: draws of one client that may be unanswered, and as many other requests beside them.
        prioritized: whether priorities count.
    """

    entry: int
    capacity: int
    in_flight_max: int
    prioritized: bool


@dataclass(frozen=True, slots=True)
class Refused:
    """Server to client, last: it is no client (any more), and why. Replaces ``Welcome``, or answers a violation."""

    entry: int
    reason: str


@dataclass(frozen=True, slots=True)
class Declare:
    """Both ways, before the first item: says how an item lies in a row of bytes."""

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
    """Client to server: asks for ``count`` items; without ``waits`` for as many as there are."""

    request: int
    count: int
    beta: float
    waits: bool

    def __post_init__(self) -> None:
        """Refuse what no client of ours asks for."""
        if self.count < 1:
            raise ValueError(f"a draw of {self.count} items")


@dataclass(frozen=True, slots=True)
class Update:
    """Client to server: sends ``count`` ids (int64), followed by their new priorities (float64)."""

    request: int
    count: int
    nbytes: int
    data: bytes


@dataclass(frozen=True, slots=True)
class Withdraw:
    """Client to server: the caller of that draw was cancelled. The draw is answered all the same."""

    request: int


@dataclass(frozen=True, slots=True)
class Leaving:
    """Client to server: this client adds nothing more, and waits for what it has asked for."""


@dataclass(frozen=True, slots=True)
class Ended:
    """Server to client, last: the server ends, though its clients are not done.

    Attributes:
        kind, text: the exception that ended it, as in :class:`asyncdist.RemoteError`; no kind where it was cancelled.
    """

    kind: str
    text: str


@dataclass(frozen=True, slots=True)
class Bye:
    """Client to server, last: the client leaves."""


@dataclass(frozen=True, slots=True)
class Added:
    """Server to client: these requests are done; ``scores`` has what the scoring hook returned for each."""

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
    """Server to client: a request has failed, and why; ``later`` if it may succeed another time."""

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
