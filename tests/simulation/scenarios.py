"""Scenarios: populations of ranks under policies, everything about them drawn from one seed, and what must hold.

``scenario(seed)`` draws a plan (how many ranks, which policies on which groups with which options, when who leaves,
what network and steps are like, which faults happen), simulates it and checks it: during the run after every event,
inside every step, and at the end. What is violated is an AssertionError that names seed, rank and policy.

Nothing here computes with the code under test: averages are recomputed from the states that donors and replacers told
``on_event``, and weights are compared as bytes. Metrics are small whole numbers, so decisions do not depend on a libm.
"""

from __future__ import annotations

import asyncio
import bisect
import contextlib
import json
import logging
import math
import os
import random
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import AsyncExitStack, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final, TypeAlias
from unittest import mock

import torch
from scripts.population import State, expected_average, kept_part, same_bits
from torch import nn

import asyncdist as ad
from asyncdist.messaging.streams import WINDOW_COUNT
from asyncdist.simulation import (
    Compute,
    Corrupt,
    Delay,
    Exponential,
    Fault,
    Kill,
    Link,
    LogNormal,
    Network,
    Partition,
    SimReport,
    SlowLink,
    SlowRank,
    Stall,
    Uniform,
    simulate,
)
from asyncdist.simulation.exploration.repro_command import repeat_line
from protocols import (
    AsyncSelectiveAveragingPolicy,
    AverageAllPolicy,
    AverageApplied,
    PolicyEvent,
    SnapshotTaken,
    SpawnPolicy,
    StepInfo,
    coordinate,
    parameter_stream,
)
from protocols.ranking import STRATEGIES
from protocols.selective.rounds import RoundCoordinator
from protocols.selective.rules import decide
from protocols.selective.statistics import CoordinatorStatistics

#: No scenario takes longer than this in virtual seconds, whatever goes wrong in it.
VIRTUAL_TIME_MAX_S: Final = 1e6
#: In a second phase the start waits for ranks that are a hundred times slower.
_START_TIMEOUT_S: Final = 1e5
#: Members looked at after each event; in larger populations they take turns.
_LOOKED_AT_COUNT: Final = 8
_OUTSTANDING_COUNT_MAX: Final = 64
#: A step that waits for nobody takes some turns of the loop; anything on the network takes longer than this.
_STEP_MAX_S: Final = 1e-3
#: A deadline is judged after everything that has arrived is taken in, which a rank that trains does between its steps.
_LATE_SAFE_POINT_COUNT: Final = 10
#: One of this round, and one that the last round's streams have not let go yet.
_SNAPSHOT_COUNT_MAX: Final = 2
_FRESH: Final = 64.0

# -- the plan ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class PolicyPlan:
    """One policy: its class, members and options, and when each member leaves it."""

    kind: str
    name: str
    members: tuple[int, ...]
    options: dict[str, Any]
    reserved: int | None
    leaves: dict[int, int]


@dataclass(frozen=True, slots=True)
class Plan:
    """A scenario.

    Attributes:
        exits: rank to (step, how) of those that end before the others.
        phases: how often all policies are started and ended, one after the other.
        streams: (source, dest) of streams of the user's own.
        habits: what else the training code awaits, or does.
    """

    seed: int
    ranks: int
    steps: int
    policies: tuple[PolicyPlan, ...]
    exits: dict[int, tuple[int, str]]
    network: Network
    compute: Compute
    faults: tuple[Fault, ...]
    chunk_nbytes: int
    phases: int
    streams: tuple[int, int] | None
    habits: tuple[str, ...]

    @property
    def loses_nothing(self) -> bool:
        """Whether nobody dies and no frame is spoiled: then everything must end clean."""
        return not any(isinstance(fault, (Kill, Corrupt)) for fault in self.faults)


def draw_plan(seed: int) -> Plan:
    """Everything that ``scenario(seed)`` does."""
    rng = random.Random(f"scenario {seed}")
    ranks = rng.choices((2, 3, 4, 5, 6, 8, 12, 16, 32, 64), (8, 14, 20, 16, 14, 20, 4, 2, 0.7, 0.3))[0]
    steps = rng.randint(6, 60) if ranks <= 8 else rng.randint(4, 16)
    network, step_s = _draw_network(rng)
    phases = 2 if ranks <= 8 and steps <= 30 and rng.random() < 0.3 else 1
    policies = tuple(_draw_policies(rng, ranks, steps, step_s))
    exits = _draw_exits(rng, ranks, steps, policies) if phases == 1 else {}
    plan = Plan(
        seed=seed,
        ranks=ranks,
        steps=steps,
        policies=policies,
        exits=exits,
        network=network,
        compute=replace(_draw_compute(rng, ranks, step_s), overrun_probability=_draw_overruns(seed)),
        faults=tuple(_draw_faults(rng, ranks, steps, step_s, policies, network)),
        chunk_nbytes=rng.choice((32, 64, 256, 4096)),
        phases=phases,
        streams=_pair(rng, ranks) if not exits and rng.random() < 0.2 else None,
        habits=tuple(habit for habit in ("sleep", "safe_point", "progress", "compute", "nan") if rng.random() < 0.2),
    )
    if any(isinstance(fault, Corrupt) for fault in plan.faults):
        plan = replace(plan, streams=None)  # as with a synchronous policy: the frame that never comes is waited for
    return _calmed(plan) if seed % 20 == 10 else plan


def _calmed(plan: Plan) -> Plan:
    """One population in twenty has nothing in its way, so that averages have to come."""
    calm = {"threshold": None, "grace_s": 0.001, "round_timeout_s": 30.0, "max_report_age_s": math.inf}
    policies = tuple(
        replace(policy, leaves={}, options={**policy.options, **calm, "replacement_ratio": 0.5})
        if policy.kind == "selective"
        else policy
        for policy in plan.policies
    )
    return replace(
        plan,
        policies=policies,
        steps=max(plan.steps, 50) if plan.phases == 1 and plan.ranks <= 8 else plan.steps,
        exits={},
        network=Network(),
        compute=Compute(overrun_probability=0.0),
        faults=(),
        habits=tuple(habit for habit in plan.habits if habit != "nan"),
    )


def _pair(rng: random.Random, ranks: int) -> tuple[int, int]:
    source, dest = rng.sample(range(ranks), 2)
    return source, dest


def _draw_policies(rng: random.Random, ranks: int, steps: int, step_s: float) -> Iterator[PolicyPlan]:
    count = rng.choices((1, 2, 3), (75, 18, 7))[0] if ranks <= 16 else 1
    reserved = ranks - 1 if ranks > 2 and rng.random() < 0.25 else None
    trainers = tuple(rank for rank in range(ranks) if rank != reserved)
    for index in range(count):
        members = trainers
        if rng.random() < (0.15 if index == 0 else 0.5):
            members = tuple(rng.sample(trainers, rng.randint(1, len(trainers))))
            members = members if rng.random() < 0.3 else tuple(sorted(members))
        leaves = {}
        if rng.random() < 0.2:
            leaves = {rank: rng.randrange(steps) for rank in rng.sample(members, rng.randint(1, len(members)))}
        name = rng.choice(("", f"policy {index}"))
        if rng.random() < (0.1 if index == 0 else 0.3):
            options: dict[str, Any] = {"average_every": rng.randint(2, 6), "start_timeout_s": _START_TIMEOUT_S}
            options["optimizer_state"] = rng.choice(("keep", "reset"))
            yield PolicyPlan("all", name, members, options, None, leaves)
        else:
            yield PolicyPlan(
                "selective", name, members, _draw_options(rng, step_s), reserved if len(members) > 1 else None, leaves
            )


def _draw_options(rng: random.Random, step_s: float) -> dict[str, Any]:
    def some(chance: float, values: Sequence[Any], default: Any) -> Any:
        return rng.choice(values) if rng.random() < chance else default

    return {
        "average_every": rng.choice((1, 1, 2, 2, 3, 5)),
        "replacement_ratio": rng.choice((0.1, 0.25, 0.25, 0.5, 0.75, 1.0, some(0.3, (0.0,), 0.25))),
        "averaging_strategy": rng.choice(STRATEGIES),
        "momentum": some(0.4, (0.25, 0.5, 0.3, 1.0), 0.0),
        "threshold": some(0.3, (-2.0, 1.0, 3.0, 5.0), None),
        "cooldown": rng.choice((0, 2, 5, 20)),
        "metric_mode": rng.choice(("max", "min")),
        "optimizer_state": rng.choice(("keep", "reset")),
        "quorum": rng.choice((0.0, 0.25, 0.5, 0.8, 1.0)),
        "grace_s": rng.choice((0.0, 0.5, 2.0, 2.0, 10.0)) * step_s,
        "max_report_age_s": some(0.3, (1.5 * step_s, 6.0 * step_s, 600.0), math.inf),
        "round_timeout_s": rng.choice((step_s, 10 * step_s, 100 * step_s, 30.0, 30.0, 30.0)),
        "drain_timeout_s": rng.choice((5 * step_s, 1.0, 10.0)),
        "start_timeout_s": _START_TIMEOUT_S,
    }


def _draw_exits(
    rng: random.Random, ranks: int, steps: int, policies: Sequence[PolicyPlan]
) -> dict[int, tuple[int, str]]:
    trainers = sorted({rank for policy in policies for rank in policy.members})
    if rng.random() < 0.7 or ranks < 2:
        return {}
    leavers = rng.sample(trainers, rng.randint(1, max(1, len(trainers) // 2)))
    return {rank: (rng.randrange(steps), rng.choice(("return", "exit"))) for rank in leavers}


def _draw_network(rng: random.Random) -> tuple[Network, float]:
    """The network, and how long a step takes: from far above its latencies to far below."""
    detection = rng.choice((0.0, Uniform(0.0, 0.02), Uniform(0.0, 1.0)))
    kind = rng.choice(("fast", "fast", "hosts", "hosts", "slow", "wide", "instant"))
    if kind == "hosts":
        return Network(ranks_per_host=rng.randint(1, 4), loss_detection_s=detection), 1e-3
    links = {
        "fast": Link(),
        "slow": Link(latency_s=Uniform(1e-4, 5e-3), bandwidth_nbytes_per_s=1e7),
        "wide": Link(latency_s=Exponential(0.02), bandwidth_nbytes_per_s=1e6),
        "instant": Link(latency_s=0.0),
    }
    step_s = {"slow": rng.choice((1e-3, 0.01)), "wide": rng.choice((1e-3, 0.02, 0.1))}.get(kind, 1e-3)
    return Network(link=links[kind], loss_detection_s=detection), step_s


def _draw_compute(rng: random.Random, ranks: int, step_s: float) -> Compute:
    duration = rng.choice((LogNormal(step_s, 0.2), Uniform(0.0, 2 * step_s), step_s, LogNormal(step_s, 1.0)))
    factors = {}
    if rng.random() < 0.35:
        factors = {rank: rng.choice((0.1, 3.0, 10.0, 50.0)) for rank in rng.sample(range(ranks), rng.randint(1, 2))}
    return Compute(
        step_s=duration,
        factors=factors,
        pause_probability=rng.choice((0.005, 0.05)) if rng.random() < 0.2 else 0.0,
        pause_s=rng.choice((50 * step_s, Exponential(500 * step_s))),
    )


def _draw_overruns(seed: int) -> float:
    """Of a generator of its own: what else is drawn does not change with it."""
    return random.Random(f"overruns of scenario {seed}").choice((0.0, 0.0, 0.0, 0.05))


def _draw_faults(
    rng: random.Random, ranks: int, steps: int, step_s: float, policies: Sequence[PolicyPlan], network: Network
) -> Iterator[Fault]:
    """None for two in five scenarios, else up to three.

    No single message takes so long that the end of a rank, which waits some seconds for the last ones, goes without it.
    """
    is_slow = isinstance(network.link.latency_s, (Uniform, Exponential))
    if rng.random() < 0.4:
        return
    kinds: tuple[type, ...] = (Kill, Kill, Stall, SlowRank, SlowLink, Partition, Delay)
    if all(policy.kind == "selective" for policy in policies):
        # A spoiled frame never comes, and a synchronous policy waits for it: that hang is no news.
        kinds = (*kinds, Corrupt, Corrupt)
    span_s = 1.2 * steps * step_s
    for kind in rng.sample(kinds, rng.randint(1, 3)):
        at_s = rng.random() * span_s
        source, dest = _pair(rng, ranks)
        lead = [policy.reserved if policy.reserved is not None else policy.members[0] for policy in policies]
        if kind is Kill:
            victim = rng.choice((source, source, rng.choice(lead)))
            at = rng.choice(("at_s", "at_turn", "at_message", "at_message"))
            when: dict[str, Any] = {
                "at_s": at_s,
                "at_turn": rng.randint(1, 20 * steps),
                "at_message": rng.randint(1, 8 * steps),
            }
            yield Kill(victim, **{at: when[at]})
        elif kind is Stall:
            yield Stall(source, at_s, rng.choice((5, 50, 500)) * step_s)
        elif kind is SlowRank:
            yield SlowRank(source, at_s, rng.choice((2.0, 10.0, 100.0)))
        elif kind is SlowLink:
            yield SlowLink(source, dest, at_s, rng.choice((3.0, 10.0) if is_slow else (10.0, 1000.0)))
        elif kind is Partition:
            cut = tuple(rng.sample(range(ranks), rng.randint(1, max(1, ranks // 2))))
            yield Partition(cut, at_s, at_s + rng.choice((2, 20, 200)) * step_s)
        elif kind is Delay:
            dest = rng.choice([rank for rank in (dest, rng.choice(lead)) if rank != source])
            yield Delay(source, dest, rng.randint(1, 60), min(2.0, rng.choice((2, 20, 500)) * step_s))
        else:
            dest = rng.choice([rank for rank in {dest, *lead} if rank != source] or [dest])
            yield Corrupt(source, dest, rng.randint(1, 2 * steps), rng.randrange(64))


# -- what a rank trains -----------------------------------------------------------------------------------------------


class Tiny(nn.Module):
    """Three floating widths, tied weights, an integer and a bool buffer. Made of raw parameters: cheap to build."""

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
    """A model, its optimizer, and its memory seen past torch."""

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
        """One optimizer's step, so to speak: other numbers everywhere, all of them exact."""
        embed, bias, wide, half, counts, flags = self._memory
        if not self.is_finite:
            return  # diverged; an average may save it
        embed += rng.randint(-3, 3)
        bias *= 0.5
        wide += 0.25
        half[rng.randrange(3)] = 0x3F80 + rng.randrange(64)  # 1 to 1.5
        counts += 1
        flags ^= True
        self.optimizer.state[self.model.embed]["momentum_buffer"] = 1

    @property
    def is_finite(self) -> bool:
        """Whether it has not diverged."""
        return math.isfinite(self._memory[0][0, 0])

    def diverge(self) -> None:
        """NaN, as after a bad batch."""
        self._memory[0].fill(math.nan)

    def to_bytes(self) -> bytes:
        """The weights, all of them."""
        return b"".join([memory.tobytes() for memory in self._memory])

    def flat(self) -> State:
        """As policies tell it: by dtype, each memory once."""
        return {
            name: torch.cat([tensor.detach().flatten() for tensor in tensors]) for name, tensors in self.tensors.items()
        }


# -- what is checked --------------------------------------------------------------------------------------------------


@dataclass(slots=True, eq=False)
class Member:
    """One rank's part in one policy, watched."""

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

    def __str__(self) -> str:
        return f"rank {self.rank}, policy {self.number} ({self.plan.kind} on {list(self.plan.members)})"

    def on_event(self, event: PolicyEvent) -> None:
        """Told by the policy, inside its step."""
        check, watch = self.watch.check, self.watch
        check(self.in_step, f"{self} told of {type(event).__name__} outside its step")
        state = {name: tensor.clone() for name, tensor in event.state.items()}
        now = self.replica.flat()
        key = (self.number, event.round, self.rank)
        for name, tensor in state.items():
            if not same_bits(tensor, now[name]):
                check(False, f"{self} tells of the {name} state {tensor}, and its model's is {now[name]}")
        if isinstance(event, SnapshotTaken):
            check(key not in watch.snapshots, f"{self} took two snapshots in round {event.round}")
            check(event.round > self.last_round, f"{self} donates in round {event.round} after {self.last_round}")
            watch.snapshots[key] = state
            watch.seen["snapshots"] += 1
        else:
            check(event.round > self.last_round, f"{self} applied round {event.round} after {self.last_round}")
            check(key not in watch.snapshots, f"{self} gave and took in round {event.round}")
            check(self.event is None, f"{self} applied twice in one step")
            self.event = event
            if self.plan.kind == "selective":
                self._verify(event, state)
            else:
                self._verify_all(event, state)
            watch.seen["applied"] += 1
        self.last_round = event.round

    def _verify(self, event: AverageApplied, state: State) -> None:
        """The weights are exactly the rank-ordered average of one snapshot of each donor."""
        check, options = self.watch.check, self.plan.options
        check(event.donors == tuple(sorted(set(event.donors))), f"{self}: donors {event.donors} out of order")
        check(self.rank not in event.donors, f"{self} is its own donor")
        self.watch.seen[f"strategy {options['averaging_strategy']}"] += 1
        if options["averaging_strategy"] == "reset_weights":
            check(not event.donors, f"{self}: fresh weights from donors {event.donors}")
            fresh = Replica(_FRESH + self.fresh_count).flat()
            check(all(same_bits(state[name], fresh[name]) for name in fresh), f"{self}: not the fresh weights")
            return
        check(bool(event.donors), f"{self}: an average of nobody")
        if options["averaging_strategy"] == "best_only":
            check(event.donors == (event.best,), f"{self}: {event.donors} in place of the best one, {event.best}")
        if options["averaging_strategy"] == "mean":
            check(set(event.weights) == {1.0}, f"{self}: a mean with weights {event.weights}")
        given = {}
        for donor in event.donors:
            found = self.watch.snapshots.get((self.number, event.round, donor))
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

    def _verify_all(self, event: AverageApplied, state: State) -> None:
        """The weights are the average of what all members had when they entered this step, in the group's order."""
        members = self.plan.members
        self.watch.check(event.donors == members, f"{self}: averaged {event.donors}")
        given = {place: self.watch.entered[self.number, event.round, rank] for place, rank in enumerate(members)}
        self.watch.seen["applied by average_all"] += 1
        for name, tensor in state.items():
            expected = expected_average(name, given, (1.0,) * len(members), 0, None, 0.0)
            if not same_bits(tensor, expected):
                self.watch.check(False, f"{self}, round {event.round}, {name}: {tensor} is not {expected}")

    def build_fresh(self) -> nn.Module:
        """``model_builder``: other weights each time."""
        self.fresh_count += 1
        return Tiny(_FRESH + self.fresh_count)

    def train(self, rng: random.Random) -> None:
        """The user's own change of weights."""
        self.replica.train(rng)
        self.trained_count += 1
        self.weights = self.replica.to_bytes()

    async def step(self, metric: Any) -> StepInfo:
        """One ``policy.step``, watched."""
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
            check(bool(info) and (info.round, info.donors) == told, f"{self} says {info}, and told {told}")
            check(not info.weights or abs(sum(info.weights) - 1.0) < 1e-9, f"{self}: weights {info.weights}")
            check(info.staleness_steps >= 0 and info.seconds >= 0.0, f"{self} says {info!r}")
            check(bool(info.nbytes) == bool(info.donors), f"{self} says {info!r}")
            self._check_optimizer(info, had_diverged=had_diverged, had_state=had_state)
        elif info or self.weights != before:
            check(False, f"{self} told nothing, says {info}, and its weights changed: {self.weights != before}")
        if info.abandoned:
            check(info.round > 0 and not info, f"{self}: {info!r}")
            watch.seen[f"abandoned: {reason_kind(info.abandoned)}"] += 1
        return info

    def _check_optimizer(self, info: StepInfo, *, had_diverged: bool, had_state: bool) -> None:
        """What is reset, and that nothing of a rank that has diverged survives an average."""
        options = self.plan.options
        resets = options["optimizer_state"] == "reset" or options.get("averaging_strategy") == "reset_weights"
        keeps = bool(options.get("momentum")) or (had_state and not resets)
        recovers = self.plan.kind == "selective" and had_diverged and keeps and bool(info.donors)
        self.watch.check(bool(info.recovered) == recovers, f"{self} had diverged: {had_diverged}, and says {info!r}")
        self.watch.seen["recovered"] += recovers
        state = self.replica.optimizer.state
        if resets or recovers:
            self.watch.check(not state, f"{self}: the optimizer's state survived")
        elif self.trained_count:
            self.watch.check(bool(state), f"{self}: the optimizer's state is gone")

    def check_untouched(self, when: str) -> None:
        """Outside step nobody but the training code changes weights."""
        if self.weights and not self.in_step and self.replica.to_bytes() != self.weights:
            self.watch.check(False, f"{self}: weights changed {when}")

    def look(self) -> None:
        """What holds between any two events. Called after each of them, so it asks no method."""
        policy = self.selective
        if policy is None:
            return
        if policy._offer is not None and policy._exchange is not None:
            self.watch.check(False, f"{self} gives in {policy._offer} and takes in {policy._exchange}")
        if len(policy._snapshots._used) > _SNAPSHOT_COUNT_MAX or len(policy._buffers.accumulators._used) > 1:
            self.watch.check(
                False,
                f"{self}: {policy._snapshots.in_use} snapshots and {policy._buffers.accumulators.in_use} accumulators",
            )


class Watch:
    """What one simulation has shown so far; all ranks share it, since they share the process.

    Attributes:
        seen: how often each thing happened.
        snapshots: (policy number, round, donor) to the state that it gave.
        entered: (policy number, round, member) to the state with which it came to a synchronous average.
        heard_at: by rank, the times of its safe points.
        members: at work.
        past: members whose policy has ended.
        violation: the first thing that did not hold.
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
        self._may_die = [fault.rank for fault in plan.faults if isinstance(fault, Kill)]
        self._first = 0
        self._turn = 0
        self._is_thorough = plan.seed % 8 == 0
        self._outstanding_count_max = _OUTSTANDING_COUNT_MAX * plan.ranks

    def check(self, holds: bool, what: str) -> None:
        """Raise, here and after this event, if it does not."""
        if not holds:
            self.violation = self.violation or AssertionError(f"seed {self.plan.seed}: {what}")
            raise self.violation

    def open(self, world: ad.World) -> None:
        """A rank's main begins."""
        self._loops[world.rank] = asyncio.get_running_loop()
        clock = world.virtual_clock
        assert clock is not None, "not in a simulation"
        world.virtual_clock = _StopWatch(clock, world, self.heard_at[world.rank])

    def check_in_time(self, deadline: float, now: float, what: str) -> None:
        """The coordinator that acts now had no chance to do so when it was time: a few safe points, and no more."""
        loop: Any = asyncio.get_running_loop()
        rank = loop.rank
        chances = bisect.bisect(self.heard_at[rank], now) - bisect.bisect(self.heard_at[rank], deadline)
        stalled_until = deadline + loop.busy_s + _STEP_MAX_S * loop.slowness  # of a coordinator that computes nothing
        late = chances > _LATE_SAFE_POINT_COUNT or (not self.heard_at[rank] and now > stalled_until)
        if late:
            self.check(False, f"{what} at {now}, {now - deadline} s and {chances} safe points after its time")

    def after_event(self) -> None:
        """The whole population, or a part of it."""
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
            member.check_untouched("in an event that is no step")
            count = member.world.services.engine.statistics().outstanding_count
            if count > self._outstanding_count_max:
                self.check(False, f"{member}: {count} requests outstanding")
            ring = member.selective._buffers.ring.nbytes if member.selective is not None else 0
            if ring > WINDOW_COUNT * self.plan.chunk_nbytes:
                self.check(False, f"{member}: {ring} bytes of received chunks")
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
        """What a rank is in this moment, in all its policies."""
        lead = {plan.members[0] if plan.reserved is None else plan.reserved for plan in self.plan.policies}
        roles = {"anybody", *(["coordinator"] if rank in lead else [])}
        for member in self.members:
            policy = member.selective
            if member.rank == rank and policy is not None:
                if policy._offer is not None and policy._offer.streams:
                    roles.add("donor mid-stream")
                if policy._exchange is not None and policy._exchange.task is not None:
                    roles.add("replacer mid-exchange")
        return roles


class _StopWatch:
    """Notes when a rank comes to its safe points."""

    def __init__(self, clock: Any, world: ad.World, heard_at: list[float]) -> None:
        self._clock = clock
        self._world = world
        self._heard_at = heard_at

    async def before_safe_point(self) -> None:
        await self._clock.before_safe_point()
        self._heard_at.append(self._world.time())

    def run_beside(self, call: Any) -> Any:
        return self._clock.run_beside(call)


def reason_kind(reason: str) -> str:
    """A reason without its numbers."""
    for start in ("the stream from rank", "round", "replaced at iteration"):
        if reason.startswith(start):
            tail = reason.partition("did not complete: ")[2]
            words = {"gave up": "aborted", "is gone": "donor lost", "in time": "timed out", "slots": "no slot"}
            kind = next((name for text, name in words.items() if text in tail), tail)
            return f"{start} ...{kind and ' ' + kind}"
    return reason


# -- one run ----------------------------------------------------------------------------------------------------------


async def _main(world: ad.World, watch: Watch) -> int:
    """What every rank runs; returns the steps that it took."""
    plan = watch.plan
    watch.open(world)
    rng = random.Random(f"{plan.seed} rank {world.rank}")
    if plan.streams is not None and world.rank in plan.streams:
        world.spawn(_stream(watch, world, *plan.streams), name="the user's own streams")
    groups: dict[tuple[int, ...], ad.Group] = {world.group.ranks: world.group}
    step_count = 0
    for phase in range(plan.phases):
        step_count += await _live(watch, world, phase, groups, rng)
    return step_count


_Part: TypeAlias = tuple["Member", AsyncExitStack]


async def _live(
    watch: Watch, world: ad.World, phase: int, groups: dict[tuple[int, ...], ad.Group], rng: random.Random
) -> int:
    """Start all policies of this rank, train, and end them."""
    exit_at, how = watch.plan.exits.get(world.rank, (watch.plan.steps, "end"))
    coordinators: list[asyncio.Task[None]] = []
    async with AsyncExitStack() as everything:
        mine: list[_Part] = []
        for number, plan in enumerate(watch.plan.policies):
            if world.rank == plan.reserved:
                task = world.spawn(_coordinate(watch, world, plan), name=f"coordinator of policy {number}")
                coordinators.append(task)
            elif world.rank in plan.members:
                with _starting(watch):
                    member = await _join(watch, world, number + len(watch.plan.policies) * phase, plan, groups)
                    stack = await everything.enter_async_context(AsyncExitStack())
                    await stack.enter_async_context(member.policy)
                    watch.members.append(member)
                    mine.append((member, stack))
        for step in range(exit_at):
            for member, stack in list(mine):
                if member.plan.leaves.get(world.rank) == step:
                    mine.remove((member, stack))
                    await _close(member, stack)
            if not mine:
                break
            await _train(watch, world, mine, rng)
        for member, _ in mine:
            member.check_untouched("before the policy ended")
        if how == "exit":
            sys.exit(0)
    for member, _ in mine:
        member.check_untouched("while the policy ended")
        watch.members.remove(member)
        watch.past.append(member)
    if coordinators:
        await asyncio.wait(coordinators)
    return exit_at


async def _stream(watch: Watch, world: ad.World, source: int, dest: int) -> None:
    """Bulk of the user's own, beside the policies' streams: the same slots, another scope."""
    sizes = random.Random(f"{watch.plan.seed} streams")
    try:
        for number in range(5):
            count = sizes.randint(0, 3000)
            if world.rank == source:
                await world.send_stream(torch.full((count,), float(number)), dest)
            else:
                found = await world.receive_stream(torch.empty(count), source)
                watch.check(bool((found == number).all()), f"stream {number} from {source} to {dest} is {found}")
                watch.seen["user's streams"] += 1
    except ad.AsyncdistError:
        if watch.plan.loses_nothing:
            raise


async def _coordinate(watch: Watch, world: ad.World, plan: PolicyPlan) -> None:
    with _starting(watch):
        await coordinate(plan.members, world=world, start_timeout_s=plan.options["start_timeout_s"])


@contextmanager
def _starting(watch: Watch) -> Iterator[None]:
    """A policy whose start a loss has ended is done without."""
    try:
        yield
    except (ad.ClosedError, ad.RankLostError, ad.StartTimeoutError):
        if watch.plan.loses_nothing:
            raise
        watch.seen["starts that a loss ended"] += 1


async def _join(
    watch: Watch, world: ad.World, number: int, plan: PolicyPlan, groups: dict[tuple[int, ...], ad.Group]
) -> Member:
    replica = Replica(float(world.rank))
    if plan.members not in groups:
        groups[plan.members] = await world.new_group(plan.members)
    member = Member(watch, number, plan, world.rank, replica, None, world)  # type: ignore[arg-type]
    options = {**plan.options, "name": plan.name, "group": groups[plan.members], "world": world}
    options["on_event"] = member.on_event
    if plan.kind == "all":
        member.policy = AverageAllPolicy(replica.model, replica.optimizer, **options)
    else:
        options["coordinator"] = plan.reserved
        options["model_builder"] = member.build_fresh
        member.policy = member.selective = AsyncSelectiveAveragingPolicy(replica.model, replica.optimizer, **options)
    return member


async def _close(member: Member, stack: AsyncExitStack) -> None:
    member.check_untouched("before it left the policy")
    await stack.aclose()
    member.check_untouched("while it left the policy")


async def _train(
    watch: Watch,
    world: ad.World,
    mine: list[_Part],
    rng: random.Random,
) -> None:
    habits = watch.plan.habits
    for member, stack in list(mine):
        member.check_untouched("between its steps")
        if "compute" in habits and rng.random() < 0.1:
            await world.compute(member.train, rng)
        else:
            member.train(rng)
        if "nan" in habits and rng.random() < 0.03:
            member.replica.diverge()
            member.weights = member.replica.to_bytes()
        try:
            await member.step(_draw_metric(rng))
        except (ad.ClosedError, ad.RankLostError) as error:
            watch.check(member.plan.kind == "all", f"{member} got {error!r}")
            watch.seen["member gone from average_all"] += 1
            mine.remove((member, stack))
            await stack.aclose()
    if "sleep" in habits and rng.random() < 0.1:
        await world.sleep(rng.random() * 0.01)
    if "safe_point" in habits and rng.random() < 0.2:
        await world.safe_point()
    if "progress" in habits and rng.random() < 0.2:
        await world.progress()


def _draw_metric(rng: random.Random) -> Any:
    value = rng.choice((math.nan, math.inf, -math.inf)) if rng.random() < 0.03 else float(rng.randint(-4, 8))
    form = rng.random()
    if form < 0.1:
        return torch.tensor(value)
    return (lambda: value) if form < 0.2 else value


@dataclass(frozen=True, slots=True)
class Examined:
    """A scenario's outcome: what the simulator reports, and what was seen."""

    report: SimReport
    seen: Counter[str] = field(repr=False)


def scenario(seed: int, faults: Sequence[Fault] | None = None) -> SimReport:
    """Run and check the scenario of ``seed``; with other faults than its own, if some are given.

    Raises:
        AssertionError: something that must always hold did not.
        DeadlockError: some rank waits for ever.
    """
    return examine(seed, faults).report


def examine(seed: int, faults: Sequence[Fault] | None = None) -> Examined:
    """As :func:`scenario`, and tell what happened in it."""
    plan = draw_plan(seed)
    if faults is not None:
        plan = replace(plan, faults=tuple(faults))
    watch = Watch(plan)
    with _chunks_of(plan.chunk_nbytes), _gates_watched(watch), _no_hidden_errors(watch):
        report = simulate(
            _main,
            watch,
            ranks=plan.ranks,
            seed=seed,
            network=plan.network,
            compute=plan.compute,
            faults=plan.faults,
            strict=not any(isinstance(fault, Corrupt) for fault in plan.faults),
            until_s=VIRTUAL_TIME_MAX_S,
            after_event=watch.after_event,
        )
    if watch.violation is not None:
        raise watch.violation
    _check_end(watch, report)
    if plan.loses_nothing:
        _check_accounts(watch)
    _check_that_averages_come(watch)
    _count(watch, report)
    # What has been judged here is no failure for `explore`, either.
    results = [None if _ends_before_an_answer(plan, result) else result for result in report.results]
    return Examined(replace(report, results=tuple(results)), watch.seen)


def _check_end(watch: Watch, report: SimReport) -> None:
    plan = watch.plan
    killed = {fault.rank for fault in plan.faults if isinstance(fault, Kill)}
    for rank, result in enumerate(report.results):
        who = f"seed {plan.seed}: rank {rank}"
        if result is None:
            assert rank in killed, f"{who} had not ended after {report.virtual_time_s} s"
        elif isinstance(result, SystemExit):
            assert plan.exits.get(rank, (0, ""))[1] == "exit" and not result.code, f"{who} exited with {result.code}"
        elif isinstance(result, BaseException):
            waits = any(policy.kind == "all" for policy in plan.policies)
            if _ends_before_an_answer(plan, result):
                continue
            if plan.loses_nothing or not waits or not isinstance(result, ad.RankLostError):
                raise AssertionError(f"{who} failed: {result!r}") from result


def _ends_before_an_answer(plan: Plan, error: Any) -> bool:
    """A grant may be minutes on its way over a link that is slowed down; a rank waits for its answer within a bound."""
    slowed = any(isinstance(fault, SlowLink) and fault.factor >= 1000 for fault in plan.faults)
    return slowed and isinstance(error, ad.LocalProtocolError) and "stream slots" in str(error)


def _check_that_averages_come(watch: Watch) -> None:
    """Where nothing is in the way, somebody has been replaced in the end."""
    plan = watch.plan
    compute = plan.compute
    hindered = bool(plan.faults or plan.exits or compute.factors)
    hindered = hindered or compute.pause_probability > 0 or bool(compute.overrun_probability)
    if hindered or "nan" in plan.habits or isinstance(plan.network.link.latency_s, (Uniform, Exponential)):
        return
    replaced: Counter[int] = Counter()
    for member in (*watch.past, *watch.members):
        if member.selective is not None:
            replaced[member.number % len(plan.policies)] += member.selective.statistics().replacement_count
    for number, policy in enumerate(plan.policies):
        options = policy.options
        needed = 5 * options["average_every"] + 4 * len(policy.members)
        if policy.kind == "all" or policy.leaves or len(policy.members) < 2 or plan.steps < needed:
            continue
        is_quick = options["grace_s"] <= 0.002 and options["round_timeout_s"] == 30.0
        acts = options["threshold"] is None and options["replacement_ratio"] > 0
        if is_quick and acts and options["max_report_age_s"] >= 600.0:
            watch.seen["populations in which averages had to come"] += 1
            assert replaced[number] > 0, f"seed {plan.seed}: policy {number} replaced nobody in {plan.steps} steps"


def _check_accounts(watch: Watch) -> None:
    """Where nothing is lost, the coordinator's count of averages is the sum of its members'."""
    applied: Counter[tuple[int, int]] = Counter()
    counted: dict[int, CoordinatorStatistics] = {}
    for member in (*watch.past, *watch.members):
        if member.selective is not None and not member.selective.is_alone:
            statistics = member.selective.statistics()
            applied[member.number, member.rank] = statistics.replacement_count
            if statistics.coordinator is not None:
                counted[member.number] = statistics.coordinator
    for number, coordinator in counted.items():
        assert coordinator.rounds_decided - coordinator.rounds_ended in (0, 1), f"rounds overlap: {coordinator}"
        for rank, count in coordinator.applied.items():
            assert count == applied[number, rank], (
                f"seed {watch.plan.seed}: policy {number}: rank {rank} applied {applied[number, rank]} averages, and "
                f"its coordinator knows of {count}: {coordinator}"
            )


def _count(watch: Watch, report: SimReport) -> None:
    seen = watch.seen
    for fault, fired in zip(report.faults, report.faults_fired, strict=True):
        seen[f"fault {type(fault).__name__}"] += bool(fired)
    for member in (*watch.past, *watch.members):
        if not isinstance(member.policy, AsyncSelectiveAveragingPolicy) or member.policy.is_alone:
            continue
        statistics = member.policy.statistics()
        for reason, count in statistics.abandoned.items():
            seen[f"abandoned: {reason_kind(reason)}"] += count
        for reason, count in statistics.declined.items():
            seen[f"declined: {reason_kind(reason)}"] += count
        if statistics.coordinator is not None:
            seen["rounds"] += statistics.coordinator.rounds_decided
            for left in statistics.coordinator.left_out:
                seen[f"left out: {reason_kind(left.reason)}"] += 1
    for statistics_ in report.statistics:
        for why, count in (statistics_.dropped if statistics_ is not None else {}).items():
            seen[f"dropped: {why if 'CRC' in why or 'closed' in why else 'other'}"] += count


@contextmanager
def _chunks_of(nbytes: int) -> Iterator[None]:
    """Let tiny models travel in several chunks too."""
    with mock.patch.object(parameter_stream, "CHUNK_NBYTES", nbytes):
        yield


@contextmanager
def _gates_watched(watch: Watch) -> Iterator[None]:
    """Count how often each gate of the decision made a difference."""
    judge, end = RoundCoordinator._judge, RoundCoordinator._end
    ended_at: dict[RoundCoordinator, float] = {}

    def watched(self: RoundCoordinator, sends: list[Any], now: float) -> None:
        rules, seen = self._rules, watch.seen
        live = [self._members[rank] for rank in self._live_ranks()]
        known = {r: m.report for r, m in self._members.items() if m.live and m.report is not None}
        metrics = {r: e.value for r, e in known.items() if now - e.received_at <= rules.max_report_age_s}
        seen["gate max_report_age_s"] += len(metrics) < len(known)
        seen["gate grace_s"] += not all(member.fresh for member in live)
        seen["gate quorum"] += 0 < rules.quorum < 1 and not all(member.fresh for member in live)
        decision = decide(metrics, rules)
        if rules.threshold is not None:
            seen["gate threshold"] += decision is None and decide(metrics, replace(rules, threshold=None)) is not None
            seen["gate cooldown"] += decision is not None and self._is_cooling_down()
        watch.check(self._round is None, "a decision while a round is under way")
        if self._quorum_since is not None:
            due_at = max(self._quorum_since + rules.grace_s, ended_at.get(self, 0.0))
            watch.check_in_time(due_at, now, "a decision")
        decided = self._rounds_decided
        judge(self, sends, now)
        watch.check(self._rounds_decided == decided or self._round is not None, "a round was counted and not begun")

    def end_watched(self: RoundCoordinator, sends: list[Any], state: Any, reason: str, now: float) -> None:
        ended_at[self] = now
        watch.check_in_time(state.deadline, now, f"round {state.number} ended, {reason},")
        end(self, sends, state, reason, now)

    RoundCoordinator._judge = watched  # type: ignore[method-assign]
    RoundCoordinator._end = end_watched  # type: ignore[method-assign]
    try:
        yield
    finally:
        RoundCoordinator._judge = judge  # type: ignore[method-assign]
        RoundCoordinator._end = end  # type: ignore[method-assign]


class _Listener(logging.Handler):
    def __init__(self, watch: Watch) -> None:
        super().__init__(logging.ERROR)
        self._watch = watch

    def emit(self, record: logging.LogRecord) -> None:
        with contextlib.suppress(AssertionError):
            self._watch.check(False, f"an error that nobody awaits: {record.getMessage()}: {record.exc_info}")


@contextmanager
def _no_hidden_errors(watch: Watch) -> Iterator[None]:
    """What a loop logs as an error, a task's exception that nobody retrieved, is a violation."""
    errors, listener = logging.getLogger("asyncdist.simulation"), _Listener(watch)
    quiet = [logging.getLogger(name) for name in ("asyncdist", "protocols")]
    levels = [logger.level for logger in quiet]
    errors.addHandler(listener)
    for logger in quiet:
        logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        errors.removeHandler(listener)
        for logger, level in zip(quiet, levels, strict=True):
            logger.setLevel(level)


@dataclass(frozen=True, slots=True)
class Recorder:
    """A scenario for ``explore`` that writes down what was seen: one line of JSON per seed, a file per process.

    Attributes:
        folder: of the files.
    """

    folder: str

    def __call__(self, seed: int, faults: Sequence[Fault] | None = None) -> SimReport:
        """As :func:`scenario`."""
        examined = examine(seed, faults)
        if faults is None:
            with (Path(self.folder) / f"{os.getpid()}.jsonl").open("a") as file:
                file.write(json.dumps({"seed": seed, **examined.seen}) + "\n")
        return examined.report

    def repeat_line(self, seed: int, faults: Sequence[Fault] | None) -> str:
        """How to repeat a seed without this."""
        return repeat_line(scenario, seed, faults)

    def seen(self) -> Counter[str]:
        """The sum over all seeds so far."""
        total: Counter[str] = Counter()
        for path in Path(self.folder).glob("*.jsonl"):
            for line in path.read_text().splitlines():
                total.update({key: count for key, count in json.loads(line).items() if key != "seed"})
        return total
