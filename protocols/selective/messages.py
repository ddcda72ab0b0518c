"""Defines the messages between the members and the coordinator of a selective-averaging policy.

Every message is flat: ints, floats, strings, bools, bytes and tuples of ints or floats, the types that the wire codec
packs and checks. The content that is equal for all ranks of a round travels in packed form as `PackedAssign` and
`PackedFrozen`, and is checked on decoding (`protocols.selective.round.plan`). Each rank unpacks its own `Assign` or
`Frozen`. The round of a control message travels in the frame's header, never in the message, so that a frame of another
round is recognised before its body is read. Parameter streams have their own messages (`asyncdist.messaging.streams`).
This module decides nothing and imports nothing of the runtime.

Invariant: `get_type_hints` of each class returns plain types, so annotations here are real objects, never strings.
"""

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Final

from asyncdist.protocols.selective.round.plan import place_of, unpack_freeze, unpack_plan

#: Number of different reasons that are counted separately.
REASON_LIMIT: Final = 32
DONOR: Final = "donor"
REPLACER: Final = "replacer"

#: The tuples that were checked last: in a simulation a thousand members receive the same ones.
_ascending: Final[dict[str, tuple[int, ...]]] = {}
_weights: Final[dict[str, tuple[float, ...]]] = {}


@dataclass(frozen=True, slots=True)
class Report:
    """Member to coordinator, on the metric tag: the rank's metric and its pace.

    Attributes:
        iteration: Step at which `value` was measured.
        value: The metric. NaN and infinities are legal: they rank worst and are counted.
        step_time_s: Recent seconds from one call of this rank's policy to the next. Deadlines for the rank follow from
            it.
        interval_s: Seconds since this rank's previous report.
        asks: Whether the coordinator is to confirm that it has read the report.
        host: A number that ranks of one host share; 0 if unknown.
    """

    iteration: int
    value: float
    step_time_s: float
    interval_s: float
    asks: bool = False
    host: int = 0


@dataclass(frozen=True, slots=True)
class Heard:
    """Coordinator to a member whose report asks for an answer: it has read the report."""


@dataclass(frozen=True, slots=True)
class Assign:
    """One rank's part in a round, and the start of it: replacers ask the donors as soon as they read it.

    Attributes:
        role: `DONOR` or `REPLACER`, for the receiver.
        donors: All ranks that are to give, ascending; empty if weights are to be built anew.
        replacers: All ranks that are to take, ascending.
        judged_iteration: Iteration of the receiver's report that the decision used. A replacer that has applied an
            average since then can decline.
        best: Donor whose integer and bool entries are taken if all donors are ready; -1 for none.
        admits: Whether the replacer is a newcomer, which also takes the donor's optimizer and policy state.
        restarted: Restarted ranks among the above, with their incarnations: the round belongs to these processes, not
            to later ones of the same ranks.
        reducers: On the sharded route, the ranks that each add up one part of the donors' snapshots, ascending: all
            donors or all replacers, or those of one host. Empty on the direct route.
        part: Index of the receiver among the reducers, which is the number of its part; -1 for none.
        sources: For each part, the rank that the receiver takes the mean from, if several replacers share its host: the
            reducer if that is on this host, otherwise the replacer that fetches the part for the host. Empty if each
            part is taken from its reducer.
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

    def __post_init__(self) -> None:
        """Raise ValueError for values that no coordinator sends."""
        _check_sources(self.sources, self.reducers)
        if self.role not in (DONOR, REPLACER):
            raise ValueError(f"role must be 'donor' or 'replacer', got {self.role!r}")
        _check_ascending(self.donors)
        _check_ascending(self.reducers, "reducers")
        if not -1 <= self.part < len(self.reducers) or (self.reducers and not self.donors):
            raise ValueError(f"part {self.part} of the reducers {self.reducers}, with the donors {self.donors}")

    def is_among(self, members: tuple[int, ...], population: Sequence[int] = ()) -> bool:
        """Return whether all named ranks are in ``members``; a donor may also be in ``population``."""
        named = *self.replacers, *self.reducers, *self.sources
        return set(members).issuperset(named) and _are_in(self.donors, members, population)


@dataclass(frozen=True, slots=True)
class PackedAssign:
    """Coordinator to each rank named in a round, equal for all but for `sources`. Each rank finds its own part.

    Attributes:
        plan: Bytes of `protocols.selective.round.plan.Plan.packed`.
        sources: Field of `Assign`.
    """

    plan: bytes
    sources: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        """Raise ValueError for bytes that are not a plan."""
        _check_sources(self.sources, unpack_plan(self.plan).reducers)

    def opened(self, rank: int) -> Assign | None:
        """Return the part of a rank; None if it has no part."""
        plan = unpack_plan(self.plan)
        place = place_of(rank, plan.named)
        if place < 0:
            return None
        role = DONOR if place_of(rank, plan.replacers) < 0 else REPLACER
        named = plan.donors, plan.replacers, plan.judged[place], plan.best, plan.admits, plan.restarted
        return Assign(role, *named, plan.reducers, place_of(rank, plan.reducers), self.sources)


@dataclass(frozen=True, slots=True)
class Ready:
    """Donor to coordinator: its finite snapshot is available to all replacers.

    Attributes:
        iteration: Iteration of the snapshot.
        state_safe_points: Number of safe points that each end needs to transfer the rest of the state to a newcomer; 0
            without a newcomer.
    """

    iteration: int
    state_safe_points: int = 0


@dataclass(frozen=True, slots=True)
class Decline:
    """Donor or replacer to coordinator: it takes no part in the round, for this reason."""

    reason: str


@dataclass(frozen=True, slots=True)
class Frozen:
    """One rank's view of a frozen round: its donors no longer change, and their snapshots may be added up.

    The first three tuples are parallel, ascending by rank, which is the order of the sum.

    Attributes:
        donors: Ranks that give; empty if the replacer builds fresh weights instead.
        weights: Unnormalised weights; the receiver divides by their sum.
        iterations: Step at which each donor took its snapshot.
        best: Donor whose integer and bool entries are taken unchanged; -1 for none.
        timeout_s: Seconds that the receiving replacer may take from the moment when it reads this.
        reducers: Assigned reducers that still add up their parts.
    """

    donors: tuple[int, ...]
    weights: tuple[float, ...]
    iterations: tuple[int, ...]
    best: int
    timeout_s: float
    reducers: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        """Raise ValueError for values that no coordinator sends."""
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
            raise ValueError(f"the timeout is {self.timeout_s} s")

    def is_among(self, members: tuple[int, ...], population: Sequence[int] = ()) -> bool:
        """Return whether all named ranks are in ``members``; a donor may also be in ``population``."""
        return set(members).issuperset(self.reducers) and _are_in(self.donors, members, population)


@dataclass(frozen=True, slots=True)
class PackedFrozen:
    """Coordinator to replacers and reducers: `Frozen`, equal for all but for `timeout_s`.

    Attributes:
        freeze: Bytes of `protocols.selective.round.plan.Freeze.packed`.
        timeout_s: Field of `Frozen`.
    """

    freeze: bytes
    timeout_s: float

    def __post_init__(self) -> None:
        """Raise ValueError for bytes that are not a freeze, and for a negative timeout."""
        unpack_freeze(self.freeze)
        if not self.timeout_s >= 0.0:
            raise ValueError(f"the timeout is {self.timeout_s} s")

    def opened(self) -> Frozen:
        """Return the unpacked message."""
        freeze = unpack_freeze(self.freeze)
        facts = freeze.donors, freeze.weights, freeze.iterations, freeze.best
        return Frozen(*facts, self.timeout_s, freeze.reducers)


@dataclass(frozen=True, slots=True)
class Applied:
    """Replacer to coordinator: new weights are in place since `iteration`, which voids its reports up to then."""

    iteration: int


@dataclass(frozen=True, slots=True)
class Abandoned:
    """Replacer to coordinator: it keeps its own weights in this round, for this reason."""

    reason: str


@dataclass(frozen=True, slots=True)
class End:
    """Coordinator to a rank named in a round: its part is over. An average that is not yet applied never will be."""

    reason: str


@dataclass(frozen=True, slots=True)
class Leave:
    """Member to coordinator: this rank leaves the policy. A coordinator that stops sends it to the members."""


@dataclass(frozen=True, slots=True)
class Joined:
    """Member to a new coordinator: its state, which the coordinator needs before it names the member in a round.

    Attributes:
        last_round: Newest round that named this rank; the coordinator continues with higher numbers.
        applied_iteration: Iteration of its last average, -1 for none; its reports up to then are void.
        judged_iteration: Iteration of its newest report that a decision with a round has used; -1 for none.
        iteration, value, step_time_s, interval_s: Its newest report; the iteration is -1 if there is none.
        incarnation: Number of restarts of its process.
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
    """Coordinator to a member that reports without having joined: send `Joined` again."""


def count_reason(counts: Counter[str], reason: str) -> None:
    """Count a reason, which may contain numbers. Beyond `REASON_LIMIT` different ones, the others share a count."""
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
    """Coordinator to every member: a process of that rank has taken a member's state, and counts from now on."""

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
    | Heard
    | Admitted
)

METRIC_TYPES: Final[tuple[type, ...]] = (Report,)
CONTROL_TYPES: Final[tuple[type, ...]] = (
    *(PackedAssign, Ready, Decline, PackedFrozen, Applied, Abandoned, End, Leave),
    *(Joined, Rejoin, Heard, Admitted),
)
