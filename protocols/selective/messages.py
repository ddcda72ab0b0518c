"""Defines the messages between the members and the coordinator of a selective-averaging policy.

Every message is flat: ints, floats, strings, bools, bytes and tuples of ints or floats, which is all that the wire
codec packs and checks. What all ranks of a round are told alike travels as `PackedAssign` and `PackedFrozen`, in few
bytes, and is unpacked and checked when it is decoded (`protocols.selective.round.plan`). `Assign` and `Frozen` are what
one rank makes of it. The round that a control message belongs to travels in the frame's header, never in the message,
so that a frame of another round is recognised before its body is read. Parameter streams have their own vocabulary
(`asyncdist.messaging.streams`). This module decides nothing and imports nothing of the runtime.

Invariant: `get_type_hints` of each class gives plain types, so annotations here are real objects, never strings.
"""

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Final

from asyncdist.protocols.selective.round.plan import place_of, unpack_freeze, unpack_plan

#: Different reasons that are counted by themselves.
REASON_LIMIT: Final = 32
DONOR: Final = "donor"
REPLACER: Final = "replacer"

#: What was found right last: in a simulation a thousand members are told the same tuples.
_ascending: Final[dict[str, tuple[int, ...]]] = {}
_weights: Final[dict[str, tuple[float, ...]]] = {}


@dataclass(frozen=True, slots=True)
class Report:
    """Member to coordinator, on the metric tag: how well this rank does.

    Attributes:
        iteration: The step that `value` was measured at.
        value: The metric. NaN and infinities are legal: they rank worst and are counted.
        step_time_s: How long it takes lately from one call of this rank's policy to the next. Deadlines that
            wait for the rank are made from it.
        interval_s: The time since this rank's report before.
        asks: Whether the coordinator is to say that it has read this.
        host: A number that ranks of one host share; 0 where it is not known.
    """

    iteration: int
    value: float
    step_time_s: float
    interval_s: float
    asks: bool = False
    host: int = 0


@dataclass(frozen=True, slots=True)
class Heard:
    """Coordinator to a member whose report asks for it: it attends to its task."""


@dataclass(frozen=True, slots=True)
class Assign:
    """One rank's part in a round, and the start of it: replacers ask the donors as soon as they read it.

    Attributes:
        role: `DONOR` or `REPLACER`, for that rank.
        donors: All ranks asked to give, ascending; empty when weights are to be built anew.
        replacers: All ranks asked to take, ascending.
        judged_iteration: The iteration of the receiver's own report that the decision used, so that a replacer which
            has applied an average since can decline.
        best: The donor whose integer and bool entries are taken if all donors are ready; -1 when there is none.
        admits: Whether the replacer is a newcomer, which takes the donor's optimizer and policy state too.
        restarted: Those of the ranks above that have been started again, with their incarnations: the round is theirs,
            and not that of a later process in the place of one.
        reducers: On the sharded route the ranks that each add up one part of the donors' snapshots, ascending: all
            donors or all replacers, or those of one host. Empty on the direct route.
        part: Which part the receiver adds up: its place among the reducers, -1 for none.
        sources: Where replacers share the receiver's host, and it is one of them, for each part the rank that it takes
            the mean from: the reducer, where that is on this host, or the replacer that fetches it there for all.
            Empty where each part comes from its reducer.
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
        """Refuse what no coordinator of ours decides."""
        _check_sources(self.sources, self.reducers)
        if self.role not in (DONOR, REPLACER):
            raise ValueError(f"there is no role {self.role!r}")
        _check_ascending(self.donors)
        _check_ascending(self.reducers, "reducers")
        if not -1 <= self.part < len(self.reducers) or (self.reducers and not self.donors):
            raise ValueError(f"part {self.part} of the reducers {self.reducers}, with the donors {self.donors}")

    def is_among(self, members: tuple[int, ...], population: Sequence[int] = ()) -> bool:
        """Return whether every rank named is one of ``members``; a donor may also be another one of ``population``."""
        named = *self.replacers, *self.reducers, *self.sources
        return set(members).issuperset(named) and _are_in(self.donors, members, population)


@dataclass(frozen=True, slots=True)
class PackedAssign:
    """Coordinator to each rank named in a round: the same for all, but for `sources`. Each finds its part by its rank.

    Attributes:
        plan: Of `protocols.selective.round.plan.Plan.packed`.
        sources: As of `Assign`.
    """

    plan: bytes
    sources: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        """Refuse bytes of which no part can be made."""
        _check_sources(self.sources, unpack_plan(self.plan).reducers)

    def opened(self, rank: int) -> Assign | None:
        """Return the part of a rank; None where it has none."""
        plan = unpack_plan(self.plan)
        place = place_of(rank, plan.named)
        if place < 0:
            return None
        role = DONOR if place_of(rank, plan.replacers) < 0 else REPLACER
        named = plan.donors, plan.replacers, plan.judged[place], plan.best, plan.admits, plan.restarted
        return Assign(role, *named, plan.reducers, place_of(rank, plan.reducers), self.sources)


@dataclass(frozen=True, slots=True)
class Ready:
    """Donor to coordinator: a finite snapshot, taken at `iteration`, is there for all who have asked, or will ask.

    Attributes:
        iteration: As said.
        state_safe_points: How many safe points each end needs for what a newcomer takes besides; 0 where none does.
    """

    iteration: int
    state_safe_points: int = 0


@dataclass(frozen=True, slots=True)
class Decline:
    """Donor or replacer to coordinator: it takes no part in the round, and why."""

    reason: str


@dataclass(frozen=True, slots=True)
class Frozen:
    """What a replacer or reducer is told when a round cannot change any more: what the donors send may be added.

    The three tuples run in parallel, ascending by rank, which is the order of the reduction.

    Attributes:
        donors: Ranks that give; empty when the replacer builds fresh weights instead.
        weights: Unnormalised; the receiver divides by the sum of the weights that arrived.
        iterations: The step at which each donor took its snapshot.
        best: The donor whose integer and bool entries are taken as they are; -1 when there is none.
        timeout_s: How long the receiving replacer may take, counted from the moment it reads this.
        reducers: Those of the assigned reducers that still add up their part.
    """

    donors: tuple[int, ...]
    weights: tuple[float, ...]
    iterations: tuple[int, ...]
    best: int
    timeout_s: float
    reducers: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        """Refuse what no coordinator of ours decides."""
        _check_ascending(self.donors)
        _check_ascending(self.reducers, "reducers")
        if not len(self.donors) == len(self.weights) == len(self.iterations):
            raise ValueError(f"{self.donors}, {self.weights} and {self.iterations} do not run in parallel")
        if self.weights is not _weights.get("newest"):
            if not all(0.0 <= weight < math.inf for weight in self.weights):
                raise ValueError(f"the weights are {self.weights}")
            _weights["newest"] = self.weights
        if not self.timeout_s >= 0.0:
            raise ValueError(f"the timeout is {self.timeout_s} s")

    def is_among(self, members: tuple[int, ...], population: Sequence[int] = ()) -> bool:
        """Return whether every rank named is one of ``members``; a donor may also be another one of ``population``."""
        return set(members).issuperset(self.reducers) and _are_in(self.donors, members, population)


@dataclass(frozen=True, slots=True)
class PackedFrozen:
    """Coordinator to replacers and reducers: `Frozen`, the same for all but for `timeout_s`.

    Attributes:
        freeze: Of `protocols.selective.round.plan.Freeze.packed`.
        timeout_s: As of `Frozen`.
    """

    freeze: bytes
    timeout_s: float

    def __post_init__(self) -> None:
        """Refuse bytes that say nothing, and what no coordinator of ours decides."""
        unpack_freeze(self.freeze)
        if not self.timeout_s >= 0.0:
            raise ValueError(f"the timeout is {self.timeout_s} s")

    def opened(self) -> Frozen:
        """Return what it says."""
        freeze = unpack_freeze(self.freeze)
        facts = freeze.donors, freeze.weights, freeze.iterations, freeze.best
        return Frozen(*facts, self.timeout_s, freeze.reducers)


@dataclass(frozen=True, slots=True)
class Applied:
    """Replacer to coordinator: new weights are in place since `iteration`; its reports up to then are void."""

    iteration: int


@dataclass(frozen=True, slots=True)
class Abandoned:
    """Replacer to coordinator: it keeps its own weights in this round, and why."""

    reason: str


@dataclass(frozen=True, slots=True)
class End:
    """Coordinator to a rank named in a round: it is over for that rank. An average not applied never will be."""

    reason: str


@dataclass(frozen=True, slots=True)
class Leave:
    """Member to coordinator: this rank ends its part in the policy for good. A coordinator that stops says it too."""


@dataclass(frozen=True, slots=True)
class Joined:
    """Member to a coordinator that has taken over: what that one has to know of it before it takes part in a round.

    Attributes:
        last_round: The newest round that this rank was named in; the coordinator goes on with higher numbers.
        applied_iteration: Where it took its last average, -1 for none; its reports up to then are void.
        judged_iteration: That of its newest report which an acting decision used, -1 for none.
        iteration, value, step_time_s, interval_s: Its newest report; the iteration is -1 if there is none.
        incarnation: How often its process has been started again.
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
    """Coordinator to a member that reports and whose `Joined` has not come: say it again."""


def count_reason(counts: Counter[str], reason: str) -> None:
    """Count a reason, which may hold numbers: beyond `REASON_LIMIT` different ones they are counted together."""
    counts[reason if reason in counts or len(counts) < REASON_LIMIT else "other"] += 1


def _are_in(donors: tuple[int, ...], members: tuple[int, ...], population: Sequence[int]) -> bool:
    return all(rank in population for rank in set(donors).difference(members))


def _check_sources(sources: tuple[int, ...], reducers: tuple[int, ...]) -> None:
    if sources and len(sources) != len(reducers):
        raise ValueError(f"the sources {sources} of the reducers {reducers}")


def _check_ascending(ranks: tuple[int, ...], what: str = "donors") -> None:
    if _ascending.get(what) is ranks:
        return
    if all(one < two for one, two in pairwise(ranks)):
        _ascending[what] = ranks
    else:
        raise ValueError(f"the {what} {ranks} are not in ascending order")


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
