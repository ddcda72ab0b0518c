"""Checks the actions of each member of a simulated population, and the outcome for the whole population."""

from __future__ import annotations

import asyncio
import bisect
import math
import random
from collections import Counter
from dataclasses import dataclass, field
from typing import Any, Final

import torch
from scripts.population import Roles, State, expected_average, kept_part, same_bits
from torch import nn

import asyncdist as ad
from asyncdist.messaging.streams import WINDOW_COUNT
from asyncdist.simulation import (
    Corrupt,
)
from asyncdist.simulation.faults import KILLING
from protocols import (
    AsyncSelectiveAveragingPolicy,
    AverageApplied,
    PolicyEvent,
    SnapshotTaken,
    SpawnPolicy,
    StepInfo,
)
from simulation.population_plan import Plan, PolicyPlan

#: Number of members that are checked after each event; in larger populations they are checked in turn.
_LOOKED_AT_COUNT: Final = 8
_OUTSTANDING_COUNT_MAX: Final = 64
#: A step that waits for no rank takes a few turns of the loop; any operation over the network takes longer than this.
_STEP_MAX_S: Final = 1e-3
#: A deadline is checked after all arrived messages are received, which a training rank does between its steps.
_LATE_SAFE_POINT_COUNT: Final = 10
#: One buffer for this round, and one that the last round's streams still use.
_SNAPSHOT_COUNT_MAX: Final = 2
_FRESH: Final = 64.0


# -- what a rank trains -----------------------------------------------------------------------------------------------


class Tiny(nn.Module):
    """A small model with three floating widths, tied weights, an integer and a bool buffer, made of raw parameters."""

    counts: torch.Tensor
    flags: torch.Tensor

    def __init__(self, value: float) -> None:
        super().__init__()
        self.embed = nn.Parameter(torch.full((2, 3), value))
        self.head = self.embed
        self.wide = nn.Parameter(torch.full((5,), value, dtype=torch.float64))
        self.low = nn.Parameter(torch.full((3,), value, dtype=torch.bfloat16))
        self.bias = nn.Parameter(torch.full((4,), value))
        self.register_buffer("counts", torch.full((2,), int(value), dtype=torch.int64))
        self.register_buffer("flags", torch.full((3,), bool(int(value) % 2), dtype=torch.bool))


class Replica:
    """A model, its optimizer, and access to its memory without torch."""

    def __init__(self, value: float) -> None:
        self.model = model = Tiny(value)
        self.optimizer = torch.optim.SGD([model.embed, model.wide], lr=0.1, momentum=0.9)
        self.tensors: dict[str, tuple[torch.Tensor, ...]] = {
            "float32": (model.embed, model.bias),
            "float64": (model.wide,),
            "bfloat16": (model.low,),
            "int64": (model.counts,),
            "bool": (model.flags,),
        }
        self._memory = [
            (tensor.detach().view(torch.int16) if name == "bfloat16" else tensor.detach()).numpy()
            for name, tensors in self.tensors.items()
            for tensor in tensors
        ]

    def train(self, rng: random.Random) -> None:
        """Change all weights as an optimizer's step would, to exact numbers."""
        embed, bias, wide, half, counts, flags = self._memory
        if not self.is_finite:
            return  # the rank has diverged; an average may restore it
        embed += rng.randint(-3, 3)
        bias *= 0.5
        wide += 0.25
        half[rng.randrange(3)] = 0x3F80 + rng.randrange(64)  # values from 1 to 1.5
        counts += 1
        flags ^= True
        self.optimizer.state[self.model.embed]["momentum_buffer"] = 1

    @property
    def is_finite(self) -> bool:
        """Return whether all weights are finite."""
        return math.isfinite(self._memory[0][0, 0])

    def diverge(self) -> None:
        """Set a weight to NaN, as after a bad batch."""
        self._memory[0].fill(math.nan)

    def to_bytes(self) -> bytes:
        """Return all weights as bytes."""
        return b"".join([memory.tobytes() for memory in self._memory])

    def flat(self) -> State:
        """Return the weights in the policies' layout: by dtype, each memory once."""
        return {
            name: torch.cat([tensor.detach().flatten() for tensor in tensors]) for name, tensors in self.tensors.items()
        }


# -- what is checked --------------------------------------------------------------------------------------------------


@dataclass(slots=True, eq=False)
class Member:
    """One rank's part in one policy, with checks."""

    watch: Watch
    number: int
    plan: PolicyPlan
    rank: int
    replica: Replica
    policy: SpawnPolicy
    world: ad.World
    selective: AsyncSelectiveAveragingPolicy | None = None
    in_step: bool = False
    last_round: int = 0
    before: State | None = None
    event: AverageApplied | None = None
    weights: bytes = b""
    trained_count: int = 0
    fresh_count: int = 0
    roles: Roles = field(init=False)

    def __post_init__(self) -> None:
        self.roles = Roles(self.rank)

    def __str__(self) -> str:
        return f"rank {self.rank}, policy {self.number} ({self.plan.kind} on {list(self.plan.members)})"

    def on_event(self, event: PolicyEvent) -> None:
        """Check an event; called by the policy, inside its step."""
        check, watch = self.watch.check, self.watch
        check(self.in_step, f"{self} reported {type(event).__name__} outside its step")
        if self.plan.kind == "selective":
            self.roles.see(event)
        watch.seen[f"told of {type(event).__name__}"] += 1
        if isinstance(event, SnapshotTaken | AverageApplied):
            self._check_state(event)

    def _check_state(self, event: SnapshotTaken | AverageApplied) -> None:
        check, watch = self.watch.check, self.watch
        state = {name: tensor.clone() for name, tensor in event.state.items()}
        now = self.replica.flat()
        key = (self.number, event.round, self.rank)
        for name, tensor in state.items():
            if not same_bits(tensor, now[name]):
                check(False, f"{self} reported the {name} state {tensor}, but its model has {now[name]}")
        if isinstance(event, SnapshotTaken):
            # the rank's previous process had rounds, too
            is_known = key in watch.snapshots and not self.world.incarnation
            check(not is_known, f"{self} took two snapshots in round {event.round}")
            check(event.round > self.last_round, f"{self} was a donor in round {event.round} after {self.last_round}")
            watch.snapshots[key] = state
            watch.seen["snapshots"] += 1
        else:
            check(event.round > self.last_round, f"{self} applied round {event.round} after {self.last_round}")
            is_known = key in watch.snapshots and not self.world.incarnation
            check(not is_known, f"{self} was donor and replacer in round {event.round}")
            check(self.event is None, f"{self} applied twice in one step")
            self.event = event
            if self.plan.kind == "selective":
                self._verify(event, state)
            else:
                self._verify_all(event, state)
            watch.seen["applied"] += 1
        self.last_round = event.round

    def _verify(self, event: AverageApplied, state: State) -> None:
        """Check that the weights are exactly the rank-ordered average of one snapshot of each donor."""
        check, options = self.watch.check, self.plan.options
        check(event.donors == tuple(sorted(set(event.donors))), f"{self}: donors {event.donors} out of order")
        check(self.rank not in event.donors, f"{self} is its own donor")
        self.watch.seen[f"strategy {options['averaging_strategy']}"] += 1
        if options["averaging_strategy"] == "reset_weights":
            check(not event.donors, f"{self}: fresh weights must have no donors, got {event.donors}")
            fresh = Replica(_FRESH + self.fresh_count).flat()
            check(all(same_bits(state[name], fresh[name]) for name in fresh), f"{self} does not have the fresh weights")
            return
        check(bool(event.donors), f"{self}: the average has no donors")
        if options["averaging_strategy"] == "best_only":
            check(
                event.donors == (event.best,),
                f"{self}: the donors are {event.donors}, but the best rank is {event.best}",
            )
        if options["averaging_strategy"] == "mean":
            check(set(event.weights) == {1.0}, f"{self}: a mean must have weights of 1, got {event.weights}")
        given = {}
        for donor in event.donors:
            found = self._given_by(donor, event.round)
            check(found is not None, f"{self}: donor {donor} took no snapshot in round {event.round}")
            given[donor] = found or {}
        check(event.best in given, f"{self}: the best donor {event.best} is not among {event.donors}")
        momentum = kept_part(self.before, options["momentum"])
        self.watch.seen["applied with momentum"] += bool(momentum)
        for name, tensor in state.items():
            own = None if self.before is None else self.before[name]
            expected = expected_average(name, given, event.weights, event.best, own, momentum)
            if momentum == 1.0 and own is not None and own.is_floating_point():
                expected = own
            if not same_bits(tensor, expected):
                check(
                    False,
                    f"{self}, round {event.round}, {name}: {tensor.tolist()} is not {expected.tolist()}, the average "
                    f"of {event.donors} with weights {event.weights} and momentum {momentum}",
                )

    def _given_by(self, donor: int, round_number: int) -> State | None:
        """Return the snapshot of a donor in a round.

        If a frame is damaged, a rank may miss a start that the others make. Its next start, under another number, makes
        it a member of the same population.
        """
        of_one, plan = len(self.watch.plan.policies), self.watch.plan
        is_spoiled = any(isinstance(fault, Corrupt) for fault in plan.faults)
        others = range(self.number % of_one, of_one * plan.phases, of_one) if is_spoiled else ()
        keys = [(number, round_number, donor) for number in (self.number, *others)]
        return next((self.watch.snapshots[key] for key in keys if key in self.watch.snapshots), None)

    def _verify_all(self, event: AverageApplied, state: State) -> None:
        """Check that the weights are the average of all members' weights at the beginning, in the group's order."""
        members = self.plan.members
        self.watch.check(event.donors == members, f"{self} must average all members, but averaged {event.donors}")
        given = {place: self.watch.entered[self.number, event.round, rank] for place, rank in enumerate(members)}
        self.watch.seen["applied by average_all"] += 1
        for name, tensor in state.items():
            expected = expected_average(name, given, (1.0,) * len(members), 0, None, 0.0)
            if not same_bits(tensor, expected):
                self.watch.check(False, f"{self}, round {event.round}, {name}: {tensor} is not {expected}")

    def build_fresh(self) -> nn.Module:
        """Return a model with new weights; the option ``model_builder``."""
        self.fresh_count += 1
        return Tiny(_FRESH + self.fresh_count)

    def train(self, rng: random.Random) -> None:
        """Change the weights as the user's training does."""
        self.replica.train(rng)
        self.trained_count += 1
        self.weights = self.replica.to_bytes()

    async def step(self, metric: Any) -> StepInfo:
        """Make one checked ``policy.step``."""
        check, watch, replica = self.watch.check, self.watch, self.replica
        if self.plan.options.get("momentum"):
            self.before = replica.flat()
        elif self.plan.kind == "all":
            watch.entered[self.number, self.last_round + 1, self.rank] = replica.flat()
        before = replica.to_bytes()
        had_diverged, had_state = not replica.is_finite, bool(replica.optimizer.state)
        self.event = None
        loop: Any = asyncio.get_running_loop()
        began_at, busy_s = self.world.time(), loop.busy_s
        self.in_step = True
        try:
            info = await self.policy.step(metric)
        finally:
            self.in_step = False
            self.weights = replica.to_bytes()
        waited_s = self.world.time() - began_at - (loop.busy_s - busy_s)
        if self.plan.kind == "selective" and waited_s > _STEP_MAX_S * loop.slowness:
            check(False, f"{self} waited {waited_s} s inside its step")
        event: AverageApplied | None = self.event
        if event is not None:
            told = (event.round, event.donors)
            check(bool(info) and (info.round, info.donors) == told, f"{self} returned {info}, but its event was {told}")
            check(
                not info.weights or abs(sum(info.weights) - 1.0) < 1e-9,
                f"{self}: the weights must add up to 1, got {info.weights}",
            )
            check(info.staleness_steps >= 0 and info.seconds >= 0.0, f"{self} returned {info!r}")
            has_reduced = info.route == "sharded" and self._has_reduced()  # a reducer may also have added up everything
            check(bool(info.nbytes) == bool(info.donors) or has_reduced, f"{self} returned {info!r}")
            watch.seen[f"applied on the {info.route or 'no'} route"] += bool(info.donors)
            self._check_optimizer(info, had_diverged=had_diverged, had_state=had_state)
        elif info or self.weights != before:
            check(False, f"{self} had no event, but returned {info}, and its weights changed: {self.weights != before}")
        if info.abandoned:
            check(info.round > 0 and not info, f"{self}: {info!r}")
            watch.seen[f"abandoned: {reason_kind(info.abandoned)}"] += 1
        return info

    def _has_reduced(self) -> bool:
        return self.selective is not None and self.selective.statistics().reduction_count > 0

    def _check_optimizer(self, info: StepInfo, *, had_diverged: bool, had_state: bool) -> None:
        """Check the optimizer's reset, and that an average leaves nothing of a diverged state."""
        options = self.plan.options
        resets = options["optimizer_state"] == "reset" or options.get("averaging_strategy") == "reset_weights"
        keeps = bool(options.get("momentum")) or (had_state and not resets)
        recovers = self.plan.kind == "selective" and had_diverged and keeps and bool(info.donors)
        self.watch.check(
            bool(info.recovered) == recovers, f"{self} had diverged: {had_diverged}, but returned {info!r}"
        )
        self.watch.seen["recovered"] += recovers
        state = self.replica.optimizer.state
        if resets or recovers:
            self.watch.check(not state, f"{self}: the optimizer's state must be cleared")
        elif self.trained_count:
            self.watch.check(bool(state), f"{self}: the optimizer's state must be kept")

    def check_untouched(self, when: str) -> None:
        """Check that only the training code changes weights outside of steps."""
        if self.weights and not self.in_step and self.replica.to_bytes() != self.weights:
            self.watch.check(False, f"{self}: weights changed {when}")

    def look(self) -> None:
        """Check the properties that hold between any two events; called often, so it calls no methods."""
        policy = self.selective
        if policy is None:
            return
        roles, resources = policy._roles, policy._resources
        if roles is not None:
            offer, exchange = roles.donor.offer, roles.replacer.exchange
            if offer is not None and exchange is not None:
                self.watch.check(False, f"{self} is a donor in {offer} and a replacer in {exchange}")
        is_frugal = len(resources.own.snapshots._used) <= _SNAPSHOT_COUNT_MAX >= resources.parts.in_use
        accumulator_count = 0
        for pool in resources.buffers._pools:  # a generator expression would take twice as long
            accumulator_count += len(pool._used)
        if not is_frugal or accumulator_count > _SNAPSHOT_COUNT_MAX:
            counts = tuple(resources.in_use().values())
            self.watch.check(False, f"{self} holds {counts} snapshots, accumulators and parts of a mean")


class Watch:
    """The observations of one simulation; all ranks share this object, because they share the process.

    Attributes:
        seen: Number of occurrences of each kind of event.
        snapshots: State that each donor offered, by (policy number, round, donor).
        entered: State with which each member entered a synchronous average, by (policy number, round, member).
        heard_at: Times of each rank's safe points.
        members: Members whose policy is open.
        past: members whose policy has ended.
        violation: The first violated property.
    """

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self.seen: Counter[str] = Counter()
        self.snapshots: dict[tuple[int, int, int], State] = {}
        self.entered: dict[tuple[int, int, int], State] = {}
        self.members: list[Member] = []
        self.past: list[Member] = []
        self.heard_at: list[list[float]] = [[] for _ in range(plan.ranks)]
        self.violation: AssertionError | None = None
        self._loops: dict[int, asyncio.AbstractEventLoop] = {}
        self._may_die = [fault.rank for fault in plan.faults if isinstance(fault, KILLING)]
        self._first = 0
        self._turn = 0
        self._is_thorough = plan.seed % 8 == 0
        self._outstanding_count_max = _OUTSTANDING_COUNT_MAX * plan.ranks

    def check(self, holds: bool, what: str) -> None:
        """Raise an error, here and after this event, if a property does not hold."""
        if not holds:
            self.violation = self.violation or AssertionError(f"seed {self.plan.seed}: {what}")
            raise self.violation

    def open(self, world: ad.World) -> None:
        """Record that a rank's main begins."""
        self._loops[world.rank] = asyncio.get_running_loop()
        clock: Any = world.services.engine.virtual_clock
        clock.before_safe_point = _StopWatch(clock, world, self.heard_at[world.rank]).before_safe_point

    def check_in_time(self, deadline: float, now: float, what: str) -> None:
        """Check that the coordinator could not act earlier: few safe points have passed since the deadline."""
        loop: Any = asyncio.get_running_loop()
        rank = loop.rank
        chances = bisect.bisect(self.heard_at[rank], now) - bisect.bisect(self.heard_at[rank], deadline)
        stalled_until = deadline + loop.busy_s + _STEP_MAX_S * loop.slowness  # for a coordinator that does not compute
        late = chances > _LATE_SAFE_POINT_COUNT or (not self.heard_at[rank] and now > stalled_until)
        if late:
            self.check(False, f"{what} at {now}, {now - deadline} s and {chances} safe points late")

    def after_event(self) -> None:
        """Check the whole population, or a part of it."""
        if self.violation is not None:
            raise self.violation
        members = self.members
        if len(members) > _LOOKED_AT_COUNT:
            self._first = first = (self._first + _LOOKED_AT_COUNT) % len(members)
            members = members[first : first + _LOOKED_AT_COUNT]
        for member in members:
            member.look()
        if self._is_thorough and members:
            self._turn += 1
            member = members[self._turn % len(members)]
            member.check_untouched("outside a step")
            count = member.world.services.engine.statistics().outstanding_count
            if count > self._outstanding_count_max:
                self.check(False, f"{member}: {count} requests are outstanding")
            ring = member.selective._resources.buffers.ring.nbytes if member.selective is not None else 0
            if ring > (WINDOW_COUNT + 1) * self.plan.chunk_nbytes:  # the window, and the chunks that are read at a time
                self.check(False, f"{member} holds {ring} bytes of received chunks")
        if self._may_die:
            self._note_deaths()

    def _note_deaths(self) -> None:
        for rank in list(self._may_die):
            loop = self._loops.get(rank)
            if loop is not None and getattr(loop, "dead", False):
                self._may_die.remove(rank)
                for role in self._roles(rank):
                    self.seen[f"killed {role}"] += 1

    def _roles(self, rank: int) -> set[str]:
        """Return the current roles of a rank in all of its policies."""
        lead = {plan.members[0] if plan.reserved is None else plan.reserved for plan in self.plan.policies}
        roles = {"anybody", *(["coordinator"] if rank in lead else [])}
        for member in self.members:
            policy = member.selective
            if member.rank == rank and policy is not None and policy._roles is not None:
                held = policy._roles
                offer, exchange = held.donor.offer, held.replacer.exchange
                if offer is not None and offer.streams:
                    roles.add("donor mid-stream")
                if exchange is not None and exchange.task is not None:
                    roles.add("replacer mid-exchange")
                if policy._member.reducing:
                    roles.add("reducer")
        return roles


class _StopWatch:
    """Records when a rank reaches its safe points."""

    def __init__(self, clock: Any, world: ad.World, heard_at: list[float]) -> None:
        self._before_safe_point = clock.before_safe_point
        self._world = world
        self._first_departure_at = heard_at

    async def before_safe_point(self) -> None:
        await self._before_safe_point()
        self._first_departure_at.append(self._world.time())


def reason_kind(reason: str) -> str:
    """Return a reason without its numbers."""
    for start in ("the stream from rank", "round", "replaced at iteration", "the state of a member did not arrive"):
        if reason.startswith(start):
            tail = reason.partition("did not complete: ")[2]
            words = {"aborted": "aborted", "is gone": "donor lost", "in time": "timed out", "slots": "no slot"}
            kind = next((name for text, name in words.items() if text in tail), tail)
            return f"{start} ...{kind and ' ' + kind}"
    return reason
