"""Decides, on the leader, which contributions make the next version of the anchor (common weights).

Nothing here communicates. A contribution is identified by its worker's rank and sequence number. A restarted rank
continues the sequence of its former process. A worker repeats its contribution to each new leader until it receives an
anchor that contains it. The leader therefore compares the contribution's number with the rank's last applied number, so
that each contribution is applied once.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Literal, NamedTuple, TypeAlias

from asyncdist.protocols.async_diloco.messages import Applications

#: Weighting of the contributions to one version: equal, by tokens, or by tokens times tokens per step.
ArrivalWeighting: TypeAlias = Literal["equal", "tokens", "rate"]


@dataclass(frozen=True, slots=True)
class Arrival:
    """A contribution that a worker has reported. See :class:`messages.Arrived`.

    Attributes:
        rank: Rank of the worker; on the global server, the number of its island (group of ranks).
        source: Rank that offers the contribution's bytes.
    """

    rank: int
    sequence: int
    base_version: int
    steps: int
    tokens: float
    norm: float
    speed: float = 0.0
    source: int = -1


class Handling(enum.Enum):
    """Names the leader's action for a reported contribution."""

    FETCH = enum.auto()  # for a new contribution
    ANSWER = enum.auto()  # for a contribution that the anchor already contains
    IGNORE = enum.auto()  # for a contribution that was reported before, or whose rank is not a member


class Quorum(NamedTuple):
    """Describes a set of contributions that suffice for a new version of the anchor (common weights).

    Attributes:
        reported_at: Time at which the first of these contributions was reported.
        met_at: Time at which the last of these contributions had arrived.
    """

    ranks: frozenset[int]
    reported_at: float
    met_at: float


class Arrivals:
    """Collects contributions on the leader until they suffice for a new version of the anchor.

    Args:
        quorum: Number of members whose contributions a version needs. If fewer members are alive, it needs all of them.
        applied: Sequence number of each rank's last contribution that the anchor contains.

    Attributes:
        reported: Sequence number of each rank's last reported contribution.
        settling: Members that take no steps for now; a version does not need their contributions.
    """

    def __init__(self, members: Iterable[int], quorum: int, applied: Mapping[int, int] | None = None) -> None:
        self.members = set(members)
        self.applied = dict(applied or {})
        self.reported = dict(self.applied)
        self.settling: set[int] = set()
        self._quorum = quorum
        # Contributions whose bytes are still being fetched, by rank and sequence number, each with the time of its
        # report. Contributions whose bytes have arrived are in _received, in order of arrival, with both times.
        self._fetching: dict[tuple[int, int], tuple[Arrival, float]] = {}
        self._received: dict[tuple[int, int], tuple[Arrival, float, float]] = {}
        self._taken: dict[int, int] = {}  # contributions to the version in progress: sequence number by rank

    def on_arrived(self, arrival: Arrival, now: float) -> Handling:
        """Record a reported contribution, and return how the leader handles it."""
        self.reported[arrival.rank] = max(self.reported.get(arrival.rank, 0), arrival.sequence)
        if arrival.sequence <= self.applied.get(arrival.rank, 0):
            return Handling.ANSWER
        key = arrival.rank, arrival.sequence
        is_known = key in self._fetching or key in self._received or key in self._taken.items()
        if arrival.rank not in self.members or is_known:
            return Handling.IGNORE
        self._fetching[key] = arrival, now
        return Handling.FETCH

    def on_received(self, arrival: Arrival, now: float) -> None:
        """Record that all bytes of a contribution have arrived."""
        key = arrival.rank, arrival.sequence
        found, reported_at = self._fetching.get(key, (None, now))
        if found == arrival:
            del self._fetching[key]
            self._received[key] = arrival, reported_at, now

    def on_gone(self, rank: int) -> None:
        """Remove a member that is lost or has left. Its contributions that have arrived still count."""
        self.members.discard(rank)
        self._fetching = {key: each for key, each in self._fetching.items() if key[0] != rank}

    def forget(self, rank: int, source: int | None = None) -> None:
        """Drop a worker's unapplied contributions or, with ``source``, only contributions being fetched from it."""
        fetching = self._fetching.items()
        self._fetching = {key: each for key, each in fetching if key[0] != rank or source not in (None, each[0].source)}
        if source is None:
            self._received = {key: each for key, each in self._received.items() if key[0] != rank}

    def is_awaited(self, arrival: Arrival) -> bool:
        """Return whether the leader still waits for the bytes of a contribution."""
        found, _ = self._fetching.get((arrival.rank, arrival.sequence), (None, 0.0))
        return found == arrival

    def on_admitted(self, rank: int) -> None:
        """Add a restarted rank to the members."""
        self.members.add(rank)

    @property
    def is_complete(self) -> bool:
        """True if contributions from all living members that are taking steps have arrived."""
        return bool(self._received) and self.members - self.settling <= {rank for rank, _ in self._received}

    def _needed(self) -> int:
        awaited = self.members - self.settling
        return min(self._quorum, len(awaited) or min(1, len(self.members)))

    def quorum(self) -> Quorum | None:
        """Return the ranks whose contributions make the next anchor version, or None if too few have arrived."""
        ranks, reported_at = set(), float("inf")
        for (rank, _), (_, reported, at) in self._received.items():
            reported_at = min(reported_at, reported)
            ranks.add(rank)
            if len(ranks & self.members) >= self._needed():
                return Quorum(frozenset(ranks), reported_at, at)
        return None

    def take(self, *, takes_all: bool) -> tuple[Arrival, ...]:
        """Remove and return the contributions for the next version, sorted by rank.

        The caller must call :meth:`note_applied` when the anchor contains them.

        Args:
            takes_all: Whether to take all contributions that have arrived, as after a grace period, instead of only
                those that the quorum needs.
        """
        taken: dict[int, Arrival] = {}
        for key, (arrival, *_) in list(self._received.items()):
            if not takes_all and taken and len(taken.keys() & self.members) >= self._needed():
                break
            if arrival.rank not in taken:  # a restarted rank may have two: one is from its former process
                taken[arrival.rank] = arrival
                del self._received[key]
        self._taken = {rank: arrival.sequence for rank, arrival in taken.items()}
        return tuple(arrival for _, arrival in sorted(taken.items()))

    def note_applied(self) -> None:
        """Record that the anchor contains the contributions that :meth:`take` has returned."""
        self.applied.update(self._taken)
        self._taken = {}

    def applications(self) -> Applications:
        """Return the sequence number of each worker's last contribution that the anchor contains."""
        return tuple(sorted(self.applied.items()))


def weight_of(tokens: float, steps: int, weighting: ArrivalWeighting) -> float:
    """Return the weight of a contribution of ``steps`` training steps with ``tokens`` tokens."""
    if weighting == "equal":
        return 1.0
    return tokens if weighting == "tokens" else tokens * tokens / max(1, steps)


def newest(versions: Mapping[int, int], me: int) -> tuple[int, int]:
    """Return the newest version of the anchor, or of the outer optimizer's state, and a member that has it.

    Versions are comparable, because each leader begins with the newest anchor of all living members. Among equal
    versions, the leader ``me`` prefers its own copy, then the lowest rank's.

    Args:
        versions: Version that each living member has reported, by rank.
    """
    holder = max(versions, key=lambda rank: (versions[rank], rank == me, -rank))
    return versions[holder], holder
