"""Decides, on the leader, which contributions make the next version of the anchor. All functions are pure.

A contribution is identified by its worker's rank and sequence number. The numbers of a restarted rank continue after
those of its former process. The worker repeats a contribution to each new leader until it has an anchor that contains
the contribution. The leader therefore compares it with the last contribution of this rank that the anchor contains, so
that each contribution is applied exactly once.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Literal, NamedTuple, TypeAlias

from asyncdist.protocols.async_diloco.messages import Applications, Standing

#: Weights of the contributions to one version.
ArrivalWeighting: TypeAlias = Literal["equal", "tokens", "rate"]


@dataclass(frozen=True, slots=True)
class Arrival:
    """A contribution that a worker has reported; see :class:`messages.Arrived`.

    Attributes:
        rank: Rank of the worker; on the global server, the number of an island.
        source: Rank that offers the contribution.
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
    """Lists the ways in which the leader can handle a reported contribution."""

    FETCH = enum.auto()  # the contribution is new
    ANSWER = enum.auto()  # the anchor already contains the contribution
    IGNORE = enum.auto()  # the contribution is known, or its rank is not a member


class Quorum(NamedTuple):
    """Describes the contributions that suffice for a version.

    Attributes:
        ranks: Ranks that have contributed.
        reported_at: Time at which the first rank of this version reported its contribution.
        met_at: Time at which the quorum was met: the last needed contribution had arrived.
    """

    ranks: frozenset[int]
    reported_at: float
    met_at: float


class Arrivals:
    """Collects contributions until they suffice for a version.

    Args:
        members: Living members.
        quorum: Number of members whose contributions make a version; if fewer members live, the number of living
            members.
        applied: Sequence number of the last contribution of each rank that the anchor contains.

    Attributes:
        reported: Sequence number of the last contribution of each rank that this leader knows.
        settling: Members that make no steps at present; the leader does not wait for their contributions.
    """

    def __init__(self, members: Iterable[int], quorum: int, applied: Mapping[int, int] | None = None) -> None:
        self.members = set(members)
        self.applied = dict(applied or {})
        self.reported = dict(self.applied)
        self.settling: set[int] = set()
        self._quorum = quorum
        # Keys are rank and sequence number, and values contain the time of the report. _whole is in the order of
        # arrival, and its values also contain the time of arrival.
        self._fetching: dict[tuple[int, int], tuple[Arrival, float]] = {}
        self._whole: dict[tuple[int, int], tuple[Arrival, float, float]] = {}

    def on_arrived(self, arrival: Arrival, now: float) -> Handling:
        """Record a reported contribution."""
        self.reported[arrival.rank] = max(self.reported.get(arrival.rank, 0), arrival.sequence)
        if arrival.sequence <= self.applied.get(arrival.rank, 0):
            return Handling.ANSWER
        key = arrival.rank, arrival.sequence
        if arrival.rank not in self.members or key in self._fetching or key in self._whole:
            return Handling.IGNORE
        self._fetching[key] = arrival, now
        return Handling.FETCH

    def on_whole(self, arrival: Arrival, now: float) -> None:
        """Record that the leader has all bytes of a contribution."""
        key = arrival.rank, arrival.sequence
        found, reported_at = self._fetching.get(key, (None, now))
        if found == arrival:
            del self._fetching[key]
            self._whole[key] = arrival, reported_at, now

    def on_gone(self, rank: int) -> None:
        """Record that a member is lost or has left. A contribution that has arrived still counts."""
        self.members.discard(rank)
        self._fetching = {key: each for key, each in self._fetching.items() if key[0] != rank}

    def forget(self, rank: int, source: int | None = None) -> None:
        """Drop a worker's unapplied contributions; if ``source`` is given, only those that have not been received."""
        fetching = self._fetching.items()
        self._fetching = {key: each for key, each in fetching if key[0] != rank or source not in (None, each[0].source)}
        if source is None:
            self._whole = {key: each for key, each in self._whole.items() if key[0] != rank}

    def is_awaited(self, arrival: Arrival) -> bool:
        """Return whether the bytes of a contribution are still wanted."""
        found, _ = self._fetching.get((arrival.rank, arrival.sequence), (None, 0.0))
        return found == arrival

    def on_admitted(self, rank: int) -> None:
        """Record a new member."""
        self.members.add(rank)

    @property
    def is_empty(self) -> bool:
        """True if no reported contribution waits to be applied."""
        return not self._fetching and not self._whole

    @property
    def is_complete(self) -> bool:
        """True if contributions of all living members have arrived."""
        return bool(self._whole) and self.members - self.settling <= {rank for rank, _ in self._whole}

    def _needed(self) -> int:
        awaited = self.members - self.settling
        return min(self._quorum, len(awaited) or min(1, len(self.members)))

    def quorum(self) -> Quorum | None:
        """Return the quorum for the next version; None if too few contributions have arrived."""
        ranks, reported_at = set(), float("inf")
        for (rank, _), (_, reported, at) in self._whole.items():
            reported_at = min(reported_at, reported)
            ranks.add(rank)
            if len(ranks & self.members) >= self._needed():
                return Quorum(frozenset(ranks), reported_at, at)
        return None

    def take(self, *, takes_all: bool) -> tuple[Arrival, ...]:
        """Return the contributions of the next version in the order of their ranks, and count them as applied.

        Args:
            takes_all: Whether the version contains all contributions that have arrived, as after a grace period.
                Otherwise, it contains only the contributions that the quorum needs.
        """
        taken: dict[int, Arrival] = {}
        for key, (arrival, *_) in list(self._whole.items()):
            if not takes_all and taken and len(taken.keys() & self.members) >= self._needed():
                break
            if arrival.rank not in taken:  # otherwise a restarted rank's former process has contributed too
                taken[arrival.rank] = arrival
                del self._whole[key]
                self.applied[arrival.rank] = arrival.sequence
        return tuple(arrival for _, arrival in sorted(taken.items()))

    def applications(self) -> Applications:
        """Return the last contribution of each worker that is part of the anchor."""
        return tuple(sorted(self.applied.items()))


def weight_of(tokens: float, steps: int, weighting: ArrivalWeighting) -> float:
    """Return the weight of a contribution of ``steps`` training steps with ``tokens`` tokens."""
    if weighting == "equal":
        return 1.0
    return tokens if weighting == "tokens" else tokens * tokens / max(1, steps)


@dataclass(frozen=True, slots=True)
class Choice:
    """Names the members from which a new leader takes its state.

    Attributes:
        version, holder: Version of the newest anchor among the living members, and a member that has it.
        outer_version, outer_holder: Version of the newest copy of the outer optimizer's state, and a member that has
            it; -1 if no member has a copy.
    """

    version: int
    holder: int
    outer_version: int
    outer_holder: int


def choose(standings: Mapping[int, Standing], me: int) -> Choice:
    """Choose the newest anchor, and the newest copy of the outer optimizer's state, among the members' standings.

    The versions of all members belong to one lineage, because each leader begins with the newest anchor of all living
    members. The leader ``me`` prefers its own copies, and otherwise the lowest rank.
    """

    def newest(version: Mapping[int, int]) -> int:
        return max(version, key=lambda rank: (version[rank], rank == me, -rank))

    holder = newest({rank: own.version for rank, own in standings.items()})
    outer_holder = newest({rank: own.outer_version for rank, own in standings.items()})
    outer_version = standings[outer_holder].outer_version
    return Choice(standings[holder].version, holder, outer_version, outer_holder if outer_version >= 0 else -1)
