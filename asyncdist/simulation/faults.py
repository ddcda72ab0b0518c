"""Describes the faults of a simulation: killed, slow and restarted ranks, and delayed or corrupted messages.

A fault plan is a list of faults. The simulation's report counts how often each fault fired, so that a test can check
that all faults fired.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any, Final, Literal, TypeAlias

from asyncdist import validation
from asyncdist.simulation.distributions import check_number, store
from asyncdist.simulation.links import check_ranks

_COUNTS: Final = frozenset({"at_turn", "at_message", "number"})
_NUMBERS: Final = frozenset({"at_s", "until_s", "duration_s", "factor"})


class _Checked:
    """Checks the numbers of a fault. Raises an error if one is out of range, and converts NumPy numbers."""

    __slots__ = ()

    def __post_init__(self) -> None:
        for field in fields(self):  # type: ignore[arg-type]
            name, value = field.name, getattr(self, field.name)
            if value is None and field.default is None:
                continue
            if name in _COUNTS:
                store(self, name, validation.count(f"{self!r}: {name}", value))
            elif name in _NUMBERS:
                store(self, name, check_number(f"{self!r}: {name}", value))


@dataclass(frozen=True, slots=True)
class Kill(_Checked):
    """Kills the process of ``rank`` at ``at_s``, at its ``at_turn``-th turn, or at its ``at_message``-th send.

    A turn is one iteration of the rank's event loop. With ``at_message``, the message is not sent, and a task that
    awaits the send never resumes.
    """

    rank: int
    at_s: float | None = None
    at_turn: int | None = None
    at_message: int | None = None

    def __post_init__(self) -> None:
        given = [name for name in ("at_s", "at_turn", "at_message") if getattr(self, name) is not None]
        if len(given) != 1:
            raise ValueError(
                f"{type(self).__name__} must have exactly one of at_s, at_turn and at_message, got {self!r}"
            )
        _Checked.__post_init__(self)


@dataclass(frozen=True, slots=True)
class Stall(_Checked):
    """Suspends the process of ``rank`` at ``at_s`` for ``duration_s``, whether the rank is computing or waiting."""

    rank: int
    at_s: float
    duration_s: float


@dataclass(frozen=True, slots=True)
class SlowRank(_Checked):
    """Makes computations and turns of ``rank`` take ``factor`` times as long from ``at_s`` on.

    A computation in progress is not slowed. A turn, in which a rank receives and answers messages, takes at most 2
    microseconds. Slowing a rank that only answers messages is therefore hardly noticeable for factors below a few
    hundred. A later process of the rank is also slow, after a :class:`Restart` or a :class:`Join`.
    """

    rank: int
    at_s: float
    factor: float


@dataclass(frozen=True, slots=True)
class SlowLink(_Checked):
    """Makes messages from ``source`` to ``dest`` take ``factor`` times as long from ``at_s`` on."""

    source: int
    dest: int
    at_s: float
    factor: float


@dataclass(frozen=True, slots=True)
class Partition(_Checked):
    """Separates ``ranks`` from all other ranks from ``at_s`` on. Messages between them are held until ``until_s``."""

    ranks: tuple[int, ...]
    at_s: float
    until_s: float

    def __post_init__(self) -> None:
        ranks: Any = self.ranks
        if not isinstance(ranks, Sequence):
            raise TypeError(f"the ranks of {type(self).__name__} must be a tuple of ranks, got {ranks!r}")
        _Checked.__post_init__(self)
        if self.until_s < self.at_s:
            raise ValueError(f"until_s must be >= at_s={self.at_s} in {type(self).__name__}, got {self.until_s}")


@dataclass(frozen=True, slots=True)
class Delay(_Checked):
    """Delays message ``number`` from ``source`` to ``dest``, counted from 1, and later messages with the same tag.

    ``source`` and ``dest`` may be equal, because a coordinator also sends reports to itself.
    """

    source: int
    dest: int
    number: int
    duration_s: float


@dataclass(frozen=True, slots=True)
class Corrupt(_Checked):
    """Changes one byte of framed message ``number`` from ``source`` to ``dest``, counted from 1.

    Frames have checksums. Tensors in streams and collectives are sent without frames, and are not counted.
    """

    source: int
    dest: int
    number: int
    byte: int = 0

    def __post_init__(self) -> None:
        _Checked.__post_init__(self)
        if type(self.byte) is not int:
            raise ValueError(f"byte must be an integer in Corrupt, got {self.byte!r}")


@dataclass(frozen=True, slots=True)
class Interrupt(_Checked):
    """Sends a signal to ``rank`` at ``at_s``: SIGTERM, as a batch scheduler does, or SIGINT, as Ctrl-C does.

    The first signal cancels the rank's current await and notifies its peers (:func:`asyncdist.run`). The rank ends with
    ``SystemExit(143)`` or KeyboardInterrupt, and the other ranks with RankLostError. A second signal kills the process.
    """

    rank: int
    at_s: float
    signal: Literal["SIGTERM", "SIGINT"] = "SIGTERM"

    def __post_init__(self) -> None:
        _Checked.__post_init__(self)
        if self.signal not in ("SIGTERM", "SIGINT"):
            raise ValueError(f"signal must be 'SIGTERM' or 'SIGINT' in Interrupt, got {self.signal!r}")


@dataclass(frozen=True, slots=True)
class Restart(_Checked):
    """Starts a new process of the killed ``rank`` at ``at_s``, which runs ``main`` from the beginning.

    The fault fires only if the rank is dead and another rank is still running. The new process has a
    ``world.incarnation`` that is higher by one, and its result becomes the rank's result.
    """

    rank: int
    at_s: float


@dataclass(frozen=True, slots=True)
class Join(_Checked):
    """Leaves ``rank`` without a process until ``at_s``, when its first process joins the job.

    Until then, the other ranks regard the rank as lost. If another rank is still running at ``at_s``, the process joins
    like a restarted process, with ``world.incarnation`` 1.
    """

    rank: int
    at_s: float


#: Faults of one rank's process that happen at a given time. :class:`Kill` may instead happen at a turn or message.
RankFault: TypeAlias = Kill | Restart | Join | Interrupt | Stall | SlowRank
Fault: TypeAlias = RankFault | SlowLink | Partition | Delay | Corrupt
#: Faults that end a rank's process without an exception. They explain a RankLostError on the other ranks.
KILLING: Final = (Kill,)


def check_plan(faults: Sequence[Fault], size: int) -> None:
    """Raise TypeError or ValueError if a fault plan cannot be carried out on ``size`` ranks."""
    given: Any = faults
    if not isinstance(given, Sequence):
        raise TypeError(f"faults must be a list of faults, got {faults!r}")
    for fault in faults:
        if not isinstance(fault, Fault):
            raise TypeError(f"each entry of faults must be a fault, got {fault!r}")
        ranks = _ranks_of(fault)
        check_ranks(repr(fault), ranks, size)
        if isinstance(fault, Partition) and not 0 < len(set(ranks)) < size:
            raise ValueError(f"the ranks of a Partition must be some of the {size} ranks, but not all, got {fault!r}")
    joins = [fault.rank for fault in faults if isinstance(fault, Join)]
    for fault in faults:
        if isinstance(fault, Join) and joins.count(fault.rank) > 1:
            raise ValueError(f"faults must have at most one Join for each rank, got another Join: {fault!r}")
        if isinstance(fault, Join) and len(joins) == size:
            raise ValueError(f"faults must leave at least one of the {size} ranks without a Join, got {fault!r}")


def _ranks_of(fault: Fault) -> Sequence[int]:
    if isinstance(fault, Partition):
        return fault.ranks
    return [getattr(fault, name) for name in ("rank", "source", "dest") if hasattr(fault, name)]
