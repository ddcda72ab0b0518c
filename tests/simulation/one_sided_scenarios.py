"""Populations under the one-sided policy, drawn from one seed, and the properties that must hold.

``scenario(seed)`` draws the options, the times at which ranks leave, the network, the steps and the faults, and
simulates them. Averages are recomputed with numpy from the reported snapshots, and weights are compared as bytes around
every step.
"""

from __future__ import annotations

import asyncio
import math
import random
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from typing import Any, Final
from unittest import mock

from scripts.one_sided import Ledger
from scripts.population import Mixed, State, fill, flat_state, identity, same_bits, sgd

import asyncdist as ad
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
    Restart,
    SimReport,
    SlowLink,
    SlowRank,
    Stall,
    Uniform,
    simulate,
)
from asyncdist.simulation.faults import KILLING
from protocols import OneSidedSelectiveAveragingPolicy, StepInfo
from protocols.one_sided import base as one_sided_averaging
from protocols.one_sided.selection import REPLACEMENT_MODES
from protocols.ranking import STRATEGIES

#: No run takes longer than this in virtual seconds, whatever fails in it.
LIMIT_S: Final = 1e5
#: A step that waits for no peer takes a few turns of the loop; a step that waits for a peer's step takes longer.
STEP_MAX_S: Final = 1e-4


@dataclass(frozen=True)
class Plan:
    """One population.

    Attributes:
        members: Ranks that are members; the others only run.
        steps: Number of steps of each rank before it leaves the policy.
        exits: Ranks whose main also ends there.
        calm: Whether there are no obstacles, so that averages must occur.
    """

    ranks: int
    members: tuple[int, ...]
    steps: tuple[int, ...]
    exits: tuple[int, ...]
    options: dict[str, Any]
    chunk_nbytes: int
    network: Network
    compute: Compute
    faults: tuple[Fault, ...]
    calm: bool


def draw_plan(seed: int) -> Plan:
    """Return all random choices of ``scenario(seed)``."""
    rng = random.Random(f"one-sided {seed}")
    ranks = rng.randint(2, 7)
    calm = seed % 4 == 0
    members = tuple(range(ranks)) if rng.random() < 0.7 else tuple(rng.sample(range(ranks), rng.randint(1, ranks)))
    steps = [rng.randint(10, 40)] * ranks
    exits: list[int] = []
    if not calm and rng.random() < 0.4:
        for rank in rng.sample(range(ranks), rng.randint(1, ranks)):
            steps[rank] = rng.randint(0, 40)
            exits += [rank] if rng.random() < 0.5 else []
    network = rng.choice(
        (
            Network(),
            Network(ranks_per_host=2),
            Network(link=Link(latency_s=Uniform(1e-4, 5e-3), bandwidth_nbytes_per_s=1e6)),
            Network(link=Link(latency_s=Exponential(0.02)), loss_detection_s=Uniform(0.0, 0.1)),
            Network(link=Link(latency_s=0.0)),
        )
    )
    factors = {rng.randrange(ranks): rng.choice((0.1, 10.0, 50.0))} if rng.random() < 0.4 else {}
    return Plan(
        ranks=ranks,
        members=members,
        steps=tuple(max(count, 30) if calm else count for count in steps),
        exits=tuple(exits),
        options=_draw_options(rng, calm=calm),
        chunk_nbytes=rng.choice((64, 128, 4096)),
        network=Network() if calm else network,
        compute=Compute() if calm else Compute(step_s=rng.choice((1e-3, LogNormal(1e-3, 1.0))), factors=factors),
        faults=() if calm or rng.random() < 0.3 else _with_restarts(seed, _draw_faults(rng, ranks)),
        calm=calm,
    )


def _draw_options(rng: random.Random, *, calm: bool) -> dict[str, Any]:
    shortest = rng.randint(1, 10)
    return {
        "average_every": rng.randint(3, 5) if calm else rng.randint(1, 4),
        "replacement_mode": rng.choice(REPLACEMENT_MODES),
        "age_range": (shortest, shortest + rng.randint(0, 10)),
        "threshold_metric": rng.choice((-1.0, 0.0, 2.0)),
        "replacement_ratio": rng.choice((0.25, 0.5, 1.0) if calm else (0.0, 0.25, 0.5, 1.0)),
        "averaging_strategy": rng.choice(STRATEGIES),
        "donor_count": rng.choice((None, None, 1, 2, 5)),
        "donor_ratio": rng.choice((0.1, 0.5, 1.0)),
        "momentum": rng.choice((0.0, 0.0, 0.25, 0.5, 1.0)),
        "metric_mode": rng.choice(("max", "min")),
        "optimizer_state": rng.choice(("keep", "reset")),
        "read_timeout_s": 30.0 if calm else rng.choice((1e-3, 0.02, 30.0)),
        "drain_timeout_s": rng.choice((0.01, 10.0)),
        "start_timeout_s": 1e4,
    }


def _draw_faults(rng: random.Random, ranks: int) -> Iterator[Fault]:
    for kind in rng.sample((Kill, Kill, Stall, SlowRank, SlowLink, Partition, Delay, Corrupt), rng.randint(1, 3)):
        at_s = rng.uniform(0.0, 0.04)
        rank, other = rng.sample(range(ranks), 2)
        if kind is Kill:
            at = rng.choice(({"at_s": at_s}, {"at_turn": rng.randint(1, 400)}, {"at_message": rng.randint(1, 150)}))
            yield Kill(rank, **at)
        elif kind is Stall:
            yield Stall(rank, at_s, rng.choice((0.005, 0.05, 0.5)))
        elif kind is SlowRank:
            yield SlowRank(rank, at_s, rng.choice((2.0, 10.0, 100.0)))
        elif kind is SlowLink:
            yield SlowLink(rank, other, at_s, rng.choice((10.0, 100.0)))
        elif kind is Partition:
            yield Partition((rank,), at_s, at_s + rng.choice((0.002, 0.02, 0.2)))
        elif kind is Delay:
            yield Delay(rank, other, rng.randint(1, 60), rng.choice((0.002, 0.02, 0.5)))
        else:
            yield Corrupt(rank, other, rng.randint(6, 60), rng.randrange(64))


def _with_restarts(seed: int, faults: Iterator[Fault]) -> tuple[Fault, ...]:
    """Restart some of the killed ranks, which the policy continues to count as lost; uses a separate generator."""
    rng = random.Random(f"restarts of {seed}")
    drawn = tuple(faults)
    kills = [fault for fault in drawn if isinstance(fault, Kill) and rng.random() < 0.7]
    times = [(fault.at_s or 0.02) + rng.choice((1e-6, 1e-3, 0.01)) for fault in kills]
    return (*drawn, *(Restart(fault.rank, at_s=at_s) for fault, at_s in zip(kills, times, strict=True)))


class Watch(Ledger):
    """A ledger with counts, and the properties that must hold around each step."""

    def __init__(self, plan: Plan) -> None:
        super().__init__()
        self.plan = plan
        self.seen: Counter[str] = Counter()

    def check_step(self, rank: int, info: StepInfo, iteration: int, applied_before: int, state: State) -> None:
        """Check that weights changed if and only if the result is truthy, and that the result matches the events."""
        mine = self.by(rank)
        assert bool(info) == (len(mine) == applied_before + 1), (
            f"rank {rank} returned {info!r} after {len(mine)} applications"
        )
        if not info:
            assert all(same_bits(state[name], self.before[rank][name]) for name in state), (
                f"rank {rank} changed weights, but returned {info}"
            )
            assert info.donors == () and bool(info.round) == bool(info.abandoned)
            self.seen[f"abandoned: {info.abandoned.partition(':')[0].rstrip('0123456789 ')}"] += bool(info.abandoned)
            return
        event = mine[-1]
        assert (info.round, info.donors, event.iteration) == (event.round, event.donors, iteration)
        assert not info.weights or math.isclose(sum(info.weights), 1.0)
        ages = [iteration - self.iterations[key] for key in zip(event.donors, event.versions, strict=True)]
        assert info.staleness_steps == max([0, *ages])
        self.seen["applied"] += 1
        self.seen[f"strategy {self.plan.options['averaging_strategy']}"] += 1
        self.seen[f"mode {self.plan.options['replacement_mode']}"] += 1


def fresh() -> Mixed:
    return Mixed(64.0)


async def _main(world: ad.World, watch: Watch) -> int:
    plan = watch.plan
    rng = random.Random(f"training of rank {world.rank}")
    is_of_all = len(plan.members) == plan.ranks
    if world.rank not in plan.members or (world.incarnation and not is_of_all):
        for _ in range(5):
            await world.safe_point()
        return 0
    model = Mixed(float(world.rank))
    optimizer, objects, applied = sgd(model), identity(model), len(watch.by(world.rank))
    async with AsyncExitStack() as stack:
        try:
            policy = OneSidedSelectiveAveragingPolicy(
                model,
                optimizer,
                **plan.options,
                group=None if is_of_all else await world.new_group(plan.members),
                model_builder=fresh,
                on_event=watch.listener(world.rank, model),
            )
            await stack.enter_async_context(policy)
        except (ad.ClosedError, ad.RankLostError, ad.StartTimeoutError, ad.LateError):
            assert any(isinstance(fault, (*KILLING, Corrupt)) for fault in plan.faults)
            watch.seen["starts that a loss ended"] += 1
            return 0
        watch.seen["came back"] += bool(world.incarnation)
        first = policy.iteration
        for step in range(first, plan.steps[world.rank]):
            await _step(world, watch, policy, model, step, rng)
        state = flat_state(model)
        await stack.aclose()
        assert all(same_bits(tensor, state[name]) for name, tensor in flat_state(model).items()), (
            "leaving must not change the weights"
        )
    assert identity(model) == objects
    statistics = policy.statistics()
    assert statistics.total_iterations == max(first, plan.steps[world.rank])
    events = watch.by(world.rank)[applied:]
    assert statistics.num_replacements == len(events) <= statistics.agents_killed
    assert statistics.averaging_ranks == sum(len(event.donors) for event in events)
    watch.seen["torn"] += statistics.torn_read_count
    watch.seen["lost"] += statistics.lost_read_count
    for reason, count in statistics.unpublished.items():
        watch.seen[f"unpublished: {reason}"] += count
    if world.rank in plan.exits:
        sys.exit(0)
    return statistics.num_replacements


async def _step(
    world: ad.World,
    watch: Watch,
    policy: OneSidedSelectiveAveragingPolicy,
    model: Mixed,
    step: int,
    rng: random.Random,
) -> None:
    """Change the weights as training would, and make one checked step."""
    if rng.random() < 0.02 and not watch.plan.calm:
        fill(model, math.nan)
    else:
        model.embed.weight.data.add_(rng.randint(-3, 3))
        model.counts.add_(1)
    metric = float(rng.randint(-3, 3) + world.rank)
    if rng.random() < 0.05:
        metric = rng.choice((math.nan, math.inf, -math.inf))
    rank = world.rank
    watch.before[rank] = flat_state(model)
    applied_before = len(watch.by(rank))
    loop: Any = asyncio.get_running_loop()
    began_at, busy_s = world.time(), loop.busy_s
    watch.stepping.add(rank)
    watch.told.setdefault(rank, []).append(metric)
    info = await policy.step(metric)
    watch.stepping.discard(rank)
    waited_s = world.time() - began_at - (loop.busy_s - busy_s)
    assert waited_s <= STEP_MAX_S * loop.slowness, f"rank {rank} waited {waited_s} s inside its step"
    watch.check_step(rank, info, step, applied_before, flat_state(model))


def scenario(seed: int, faults: Sequence[Fault] | None = None) -> SimReport:
    """Run one seed; AssertionError if a property is violated."""
    report, _ = run(seed, faults)
    return report


def run(seed: int, faults: Sequence[Fault] | None = None) -> tuple[SimReport, Watch]:
    """Run one seed, and return the observations."""
    plan = draw_plan(seed)
    plan_faults = plan.faults if faults is None else tuple(faults)
    watch = Watch(plan)
    with mock.patch.object(one_sided_averaging, "CHUNK_NBYTES", plan.chunk_nbytes):
        report = simulate(
            _main,
            watch,
            ranks=plan.ranks,
            seed=seed,
            network=plan.network,
            compute=plan.compute,
            faults=plan_faults,
            strict=not any(isinstance(fault, (*KILLING, Corrupt)) for fault in plan_faults),
            until_s=LIMIT_S,
        )
    killed = {fault.rank for fault in plan_faults if isinstance(fault, KILLING)}
    for rank, result in enumerate(report.results):
        if isinstance(result, BaseException) and not (rank in plan.exits and isinstance(result, SystemExit)):
            raise AssertionError(f"seed {seed}: rank {rank} ended by {result!r}") from result
        assert result is not None or rank in killed or rank in plan.exits, f"seed {seed}: rank {rank} has not ended"
    watch.verify(momentum=plan.options["momentum"])
    if plan.options["averaging_strategy"] == "weighted_mean":
        watch.seen["weights of several donors"] += watch.verify_weights(plan.options["metric_mode"])
    for (rank, version), iteration in watch.iterations.items():
        due = (iteration + 1) % plan.options["average_every"] == 0
        assert due, f"seed {seed}: rank {rank} published version {version} at iteration {iteration}"
    watch.seen["published"] += len(watch.snapshots)
    if plan.calm and len(plan.members) > 1 and _has_to_replace(plan):
        watch.seen["populations in which averages had to come"] += 1
        assert watch.applied, f"seed {seed}: no rank was replaced"
    return report, watch


def _has_to_replace(plan: Plan) -> bool:
    """Return whether averages must occur: by age because each lifetime is short, or because two ranks have a metric."""
    return plan.options["replacement_mode"] in ("age", "worst_ratio")


@dataclass
class Tally:
    """The observations of many seeds."""

    seen: Counter[str] = field(default_factory=Counter)

    def add(self, seed: int) -> str:
        """Run one seed, and return its digest."""
        report, watch = run(seed)
        self.seen += watch.seen
        for fault, count in zip(report.faults, report.faults_fired, strict=True):
            self.seen[f"fault {type(fault).__name__}"] += bool(count)
        return report.trace_digest
