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
from typing import Literal, TypeAlias

from asyncdist.protocols.async_diloco.messages import Applications, Standing

#: How the contributions to one version are weighted.
ArrivalWeighting: TypeAlias = Literal["equal", "tokens", "rate"]


@dataclass(frozen=True, slots=True)
class Arrival:
    """A contribution that a worker has reported; see :class:`messages.Arrived`."""

    rank: int
    sequence: int
    base_version: int
    steps: int
    tokens: float
    norm: float
    speed: float = 0.0


class Handling(enum.Enum):
    """What the leader does with a reported contribution."""

    FETCH = enum.auto()  # it is new
    ANSWER = enum.auto()  # the anchor contains it
    IGNORE = enum.auto()  # it is known, or from a rank that is not a member


class Arrivals:
    """Collects the contributions until they make a version.

    Args:
        members: Living members.
        quorum: Number of members whose contributions make a version; all living members if there are fewer.
        grace_s: Seconds to wait for further contributions once there is a quorum. Without it, a version contains no
            more contributions than the quorum needs.
        applied: Sequence number of the last contribution of each rank that the anchor contains.

    Attributes:
        reported: Sequence number of the last contribution of each rank that this leader knows.
    """

    def __init__(
        self, members: Iterable[int], quorum: int, grace_s: float, applied: Mapping[int, int] | None = None
    ) -> None:
        self.members = set(members)
        self.applied = dict(applied or {})
        self.reported = dict(self.applied)
        self._quorum = quorum
        self._grace_s = grace_s
        # Both are keyed by rank and sequence number. _whole is in order of arrival, and contains the times of arrival.
        self._fetching: dict[tuple[int, int], Arrival] = {}
        self._whole: dict[tuple[int, int], tuple[Arrival, float]] = {}

    def on_arrived(self, arrival: Arrival) -> Handling:
        """Record a reported contribution."""
        self.reported[arrival.rank] = max(self.reported.get(arrival.rank, 0), arrival.sequence)
        if arrival.sequence <= self.applied.get(arrival.rank, 0):
            return Handling.ANSWER
        key = arrival.rank, arrival.sequence
        if arrival.rank not in self.members or key in self._fetching or key in self._whole:
            return Handling.IGNORE
        self._fetching[key] = arrival
        return Handling.FETCH

    def on_whole(self, arrival: Arrival, now: float) -> None:
        """Record that the leader has all bytes of a contribution."""
        key = arrival.rank, arrival.sequence
        if self._fetching.get(key) == arrival:
            del self._fetching[key]
            self._whole[key] = arrival, now

    def on_gone(self, rank: int) -> None:
        """Record that a member is lost or has left. A contribution that has arrived still counts."""
        self.members.discard(rank)
        self._fetching = {key: each for key, each in self._fetching.items() if key[0] != rank}

    def on_admitted(self, rank: int) -> None:
        """Record a new member."""
        self.members.add(rank)

    @property
    def is_empty(self) -> bool:
        """True if no reported contribution waits."""
        return not self._fetching and not self._whole

    @property
    def has_quorum(self) -> bool:
        """True if the contributions that have arrived can make a version."""
        return self._met_at() is not None

    @property
    def is_complete(self) -> bool:
        """True if contributions of all living members have arrived."""
        return bool(self._whole) and self.members <= {rank for rank, _ in self._whole}

    @property
    def decided_at(self) -> float | None:
        """Time at which the grace period of the next version ends; None without a quorum."""
        met_at = self._met_at()
        return None if met_at is None else met_at + self._grace_s

    def _needed(self) -> int:
        return min(self._quorum, len(self.members))

    def _met_at(self) -> float | None:
        """Return when the contribution that completes the quorum arrived; None if there is no quorum."""
        living = set()
        for (rank, _), (_, at) in self._whole.items():
            living |= {rank} & self.members
            if len(living) >= self._needed():
                return at
        return None

    def take(self) -> tuple[Arrival, ...]:
        """Return the contributions of the next version in the order of their ranks, and count them as applied."""
        taken: dict[int, Arrival] = {}
        for key, (arrival, _) in list(self._whole.items()):
            if not self._grace_s and taken and len(taken.keys() & self.members) >= self._needed():
                break
            if arrival.rank not in taken:  # otherwise it is of a restarted rank, whose former process contributes too
                taken[arrival.rank] = arrival
                del self._whole[key]
                self.applied[arrival.rank] = arrival.sequence
        return tuple(arrival for _, arrival in sorted(taken.items()))

    def applications(self) -> Applications:
        """Return the last contribution of each worker that the anchor contains."""
        return tuple(sorted(self.applied.items()))


def weight_of(tokens: float, steps: int, weighting: ArrivalWeighting) -> float:
    """Return the weight of a contribution of some training steps."""
    if weighting == "equal":
        return 1.0
    return tokens if weighting == "tokens" else tokens * tokens / max(1, steps)


@dataclass(frozen=True, slots=True)
class Choice:
    """The members from which a new leader takes its state.

    Attributes:
        version, holder: Version of the newest anchor of a living member, and that member.
        outer_version, outer_holder: The same for the outer optimizer's state; -1 if no member has a copy.
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
