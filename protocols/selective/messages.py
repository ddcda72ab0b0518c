"""Defines the messages between the members and the coordinator of a selective-averaging policy.

All fields have types that the wire codec packs and checks. `PackedAssign` and `PackedFrozen` contain data that is equal
for all ranks of a round. Each rank unpacks its own `Assign` or `Frozen` from it. The frame's header contains the round
number. Annotations are not strings, because `get_type_hints` must return plain types.
"""

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Final

from asyncdist.protocols.selective.plan import place_of, unpack_freeze, unpack_plan

#: Maximum number of distinct reasons (for declining a role or abandoning a round) that are counted separately.
REASON_LIMIT: Final = 32
DONOR: Final = "donor"
REPLACER: Final = "replacer"

#: The most recently checked tuples, which are not checked again. In a simulation, a thousand members receive the same
#: tuples.
_ascending: Final[dict[str, tuple[int, ...]]] = {}
_weights: Final[dict[str, tuple[float, ...]]] = {}


@dataclass(frozen=True, slots=True)
class Report:
    """Member to coordinator, on the metric tag: the member's metric and the durations of its steps.

    Attributes:
        iteration: Step at which `value` was measured.
        value: Metric of the member. NaN and infinities are allowed and rank worst.
        step_time_s: Seconds between recent calls of the policy's `step`, for the coordinator's deadlines.
        interval_s: Seconds since this member's previous report.
        asks: Whether the coordinator must acknowledge the report.
        host: Number that all ranks on one host share, or 0 if unknown.
    """

    iteration: int
    value: float
    step_time_s: float
    interval_s: float
    asks: bool = False
    host: int = 0


@dataclass(frozen=True, slots=True)
class ReportAcknowledged:
    """Coordinator to member: acknowledges a report in which the member has asked for an answer."""


@dataclass(frozen=True, slots=True)
class Assign:
    """Assigns the receiving rank a role in a new averaging round.

    Attributes:
        role: Role of the receiver, `DONOR` or `REPLACER`.
        donors: Ranks that send their weights, in ascending order. Empty if the replacers build fresh weights.
        replacers: Ranks that receive new weights, in ascending order.
        judged_iteration: Iteration of the receiver's report on which the decision is based. A replacer declines if it
            has applied an average since then.
        best: Donor whose integer and bool entries are copied if all donors are ready, or -1 if there is no such donor.
        admits: Whether the replacers are restarted ranks, which also receive the donor's optimizer and policy state.
        restarted: Restarted ranks in this round, with their incarnations (numbers of restarts). A later process of such
            a rank has no role in the round.
        reducers: Ranks that each add up one part of the donors' snapshots on the sharded route, in ascending order: all
            donors or replacers, or those on one host. Empty on the direct route.
        part: Index of the receiver among the reducers, which is also the number of the part that it adds up. -1 if it
            is not a reducer.
        sources: Rank from which to request each part's mean, if replacers on the receiver's host share parts. It is the
            reducer if that is on this host, otherwise the replacer that fetches the part for the host. Empty if each
            part is requested from its reducer.
        parent: Donor that the receiver copies, or -1 if all replacers take a common average.
    """

    role: str
    donors: tuple[int, ...]
    replacers: tuple[int, ...]
    judged_iteration: int
    best: int
    admits: bool = False
    restarted: tuple[tuple[int, int], ...] = ()
    reducers: tuple[int, ...] = ()
    part: int = -1
    sources: tuple[int, ...] = ()
    parent: int = -1

    def __post_init__(self) -> None:
        _check_sources(self.sources, self.reducers)
        if self.role not in (DONOR, REPLACER):
            raise ValueError(f"role must be 'donor' or 'replacer', got {self.role!r}")
        _check_ascending(self.donors)
        _check_ascending(self.reducers, "reducers")
        if not -1 <= self.part < len(self.reducers) or (self.reducers and not self.donors):
            raise ValueError(
                f"part must be from -1 to {len(self.reducers) - 1}, and reducers need donors, got part {self.part}, "
                f"the reducers {self.reducers} and the donors {self.donors}"
            )

    def is_among(self, members: tuple[int, ...], population: Sequence[int] = ()) -> bool:
        """Return whether the donors are in ``members`` or ``population``, and all other named ranks in ``members``."""
        named = *self.replacers, *self.reducers, *self.sources
        return set(members).issuperset(named) and _are_in(self.donors, members, population)


@dataclass(frozen=True, slots=True)
class PackedAssign:
    """Coordinator to each rank in a new round: the roles of all ranks, from which each rank unpacks its `Assign`.

    Attributes:
        plan: Bytes of `protocols.selective.plan.Plan.packed`, equal for all ranks.
    """

    plan: bytes
    sources: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        _check_sources(self.sources, unpack_plan(self.plan).reducers)

    def opened(self, rank: int) -> Assign | None:
        """Return the assignment of ``rank``, or None if the rank has no role in the round."""
        plan = unpack_plan(self.plan)
        place = place_of(rank, plan.named)
        if place < 0:
            return None
        at = place_of(rank, plan.replacers)
        role, parent = DONOR if at < 0 else REPLACER, plan.parents[at] if plan.parents and at >= 0 else -1
        named = plan.donors, plan.replacers, plan.judged[place], plan.best, plan.admits, plan.restarted
        return Assign(role, *named, plan.reducers, place_of(rank, plan.reducers), self.sources, parent)


@dataclass(frozen=True, slots=True)
class Ready:
    """Donor to coordinator: the copy of the sender's weights is finite, and other ranks can request it.

    Attributes:
        state_safe_points: Number of safe points that sender and receiver each need to transfer the optimizer and policy
            state to a restarted rank, or 0 without a restarted rank.
    """

    iteration: int
    state_safe_points: int = 0


@dataclass(frozen=True, slots=True)
class Decline:
    """Donor or replacer to coordinator: the sender declines its role in the round, for the given reason."""

    reason: str


@dataclass(frozen=True, slots=True)
class Frozen:
    """Describes a frozen round: its donors no longer change, so the receiver may add up their snapshots.

    `donors`, `weights` and `iterations` have one item for each donor, in ascending order of ranks. This is the order of
    summation.

    Attributes:
        donors: Ranks that send their weights. Empty if the replacers build fresh weights.
        weights: Unnormalised weight of each donor. The receiver divides by their sum.
        best: Donor whose integer and bool entries are copied unchanged, or -1 if there is no such donor.
        timeout_s: Seconds, from the receipt of this message, in which the receiver must complete its average.
        reducers: Ranks that will each average one part of the snapshots for the others.
    """

    donors: tuple[int, ...]
    weights: tuple[float, ...]
    iterations: tuple[int, ...]
    best: int
    timeout_s: float
    reducers: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        _check_ascending(self.donors)
        _check_ascending(self.reducers, "reducers")
        if not len(self.donors) == len(self.weights) == len(self.iterations):
            raise ValueError(
                f"donors, weights and iterations must be of equal length, got {self.donors}, {self.weights} and "
                f"{self.iterations}"
            )
        if self.weights is not _weights.get("newest"):
            if not all(0.0 <= weight < math.inf for weight in self.weights):
                raise ValueError(f"weights must be finite and >= 0, got {self.weights}")
            _weights["newest"] = self.weights
        if not self.timeout_s >= 0.0:
            raise ValueError(f"timeout_s must be >= 0, got {self.timeout_s}")

    def is_among(self, members: tuple[int, ...], population: Sequence[int] = ()) -> bool:
        """Return whether the donors are in ``members`` or ``population``, and the reducers in ``members``."""
        return set(members).issuperset(self.reducers) and _are_in(self.donors, members, population)


@dataclass(frozen=True, slots=True)
class PackedFrozen:
    """Coordinator to replacers and reducers: the round's donors no longer change. Each rank unpacks a `Frozen`.

    Attributes:
        freeze: Bytes of `protocols.selective.plan.Freeze.packed`, equal for all ranks.
    """

    freeze: bytes
    timeout_s: float

    def __post_init__(self) -> None:
        unpack_freeze(self.freeze)
        if not self.timeout_s >= 0.0:
            raise ValueError(f"timeout_s must be >= 0, got {self.timeout_s}")

    def opened(self) -> Frozen:
        """Return the `Frozen` that this message contains."""
        freeze = unpack_freeze(self.freeze)
        facts = freeze.donors, freeze.weights, freeze.iterations, freeze.best
        return Frozen(*facts, self.timeout_s, freeze.reducers)


@dataclass(frozen=True, slots=True)
class Applied:
    """Replacer to coordinator: the sender has loaded new weights, which invalidate its reports up to `iteration`."""

    iteration: int


@dataclass(frozen=True, slots=True)
class Abandoned:
    """Replacer to coordinator: the sender abandons the round for the given reason, and keeps its weights."""

    reason: str


@dataclass(frozen=True, slots=True)
class End:
    """Coordinator to a rank in the round: the receiver's role has ended. It discards an average it has not applied."""

    reason: str


@dataclass(frozen=True, slots=True)
class Leave:
    """Member to coordinator: the sender leaves the policy. Coordinator to member: the coordinator stops."""


@dataclass(frozen=True, slots=True)
class Joined:
    """Member to a new coordinator: the member's state, without which the coordinator cannot assign it a role.

    Attributes:
        last_round: Newest round in which the member had a role. The coordinator continues with higher numbers.
        applied_iteration: Iteration of the member's last average, which invalidates its reports up to that iteration.
            -1 without an average.
        judged_iteration: Iteration of the member's newest report that led to a round, or -1 if there is none.
        iteration, value, step_time_s, interval_s: Fields of the newest report. ``iteration`` is -1 without a report.
    """

    last_round: int
    applied_iteration: int
    judged_iteration: int
    iteration: int
    value: float
    step_time_s: float
    interval_s: float
    incarnation: int = 0


@dataclass(frozen=True, slots=True)
class Rejoin:
    """Coordinator to a member whose `Joined` message has not arrived: asks the member to send it again."""


def count_reason(counts: Counter[str], reason: str) -> None:
    """Count a reason. After `REASON_LIMIT` distinct reasons, all further reasons are counted as "other"."""
    counts[reason if reason in counts or len(counts) < REASON_LIMIT else "other"] += 1


def _are_in(donors: tuple[int, ...], members: tuple[int, ...], population: Sequence[int]) -> bool:
    return all(rank in population for rank in set(donors).difference(members))


def _check_sources(sources: tuple[int, ...], reducers: tuple[int, ...]) -> None:
    if sources and len(sources) != len(reducers):
        raise ValueError(f"sources must name one rank for each reducer, got {sources} for the reducers {reducers}")


def _check_ascending(ranks: tuple[int, ...], what: str = "donors") -> None:
    if _ascending.get(what) is ranks:
        return
    if all(one < two for one, two in pairwise(ranks)):
        _ascending[what] = ranks
    else:
        raise ValueError(f"the {what} must be in ascending order, got {ranks}")


@dataclass(frozen=True, slots=True)
class Admitted:
    """Coordinator to all members: the restarted `rank` has received a member's state, and is now a member."""

    rank: int
    incarnation: int


ControlMessage = (
    PackedAssign
    | Ready
    | Decline
    | PackedFrozen
    | Applied
    | Abandoned
    | End
    | Leave
    | Joined
    | Rejoin
    | ReportAcknowledged
    | Admitted
)
