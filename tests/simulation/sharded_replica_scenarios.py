"""Simulates replicas whose ranks each have a part of the model, drawn from a seed, and checks their properties.

The parts are plain modules, of different sizes on each rank of a replica, so that torch.distributed is not needed.
Values encode the replica, the iteration and the index of a rank, so that a mixture cannot look like an average.
"""

from __future__ import annotations

import math
import operator
import random
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeAlias
from unittest import mock

import numpy as np
import torch
from torch import nn

import asyncdist as ad
from asyncdist.simulation import (
    Compute,
    Delay,
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
from protocols import AverageApplied, ReplicaAveragingPolicy, SnapshotTaken, StepInfo
from protocols.parameter_stream import messages

LIMIT_S = 3e4


class OfPlainShards(ReplicaAveragingPolicy):
    """Accepts a plain module as one rank's part of a model."""

    def _holds_shards(self) -> bool:
        return True


class Part(nn.Module):
    """The part of the rank at ``place``; ``sizes`` differ between ranks of one replica, and may be 0."""

    def __init__(self, place: int, sizes: Sequence[int]) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(sizes[place]))
        self.bias = nn.Parameter(torch.zeros(place + 1, 3))
        self.register_buffer("count", torch.zeros(2, dtype=torch.int64))

    def fill(self, value: float) -> None:
        with torch.no_grad():
            self.weight.fill_(value)
            self.bias.fill_(value + 0.5)
        if math.isfinite(value):
            self.count.fill_(int(value))


@dataclass(frozen=True, slots=True)
class Plan:
    """The random choices of one seed."""

    replicas: int
    size: int
    steps: int
    sizes: tuple[int, ...]
    options: dict[str, Any]
    chunk_nbytes: int
    spoiled: float
    network: Network
    compute: Compute
    faults: tuple[Fault, ...]
    calm: bool


def draw_plan(seed: int) -> Plan:
    """Return all random choices of ``scenario(seed)``."""
    rng = random.Random(f"sharded replicas {seed}")
    replicas, size, calm = rng.randint(2, 4), rng.randint(2, 3), seed % 4 == 0
    ranks = replicas * size
    swap_every = rng.choice((1, 2, 3))
    network = rng.choice(
        (
            Network(),
            Network(ranks_per_host=size),
            Network(link=Link(latency_s=Uniform(1e-4, 5e-3), bandwidth_nbytes_per_s=1e6)),
            Network(link=Link(latency_s=0.0)),
        )
    )
    factors = {rng.randrange(ranks): rng.choice((0.1, 10.0, 50.0))} if rng.random() < 0.5 else {}
    strategy = rng.choice(("mean", "weighted_mean", "best_only"))
    return Plan(
        replicas=replicas,
        size=size,
        steps=rng.randint(30, 60),
        sizes=tuple(rng.choice((0, 1, 40, 300)) for _ in range(size)),
        options={
            "replica_size": size,
            "swap_every": swap_every,
            "average_every": swap_every * rng.randint(1, 5),
            "replacement_ratio": rng.choice((0.25, 0.5, 0.75)),
            "averaging_strategy": strategy,
            "momentum": rng.choice((0.0, 0.0, 0.25)),
            "optimizer_state": rng.choice(("keep", "reset")),
            "route": rng.choice(("auto", "direct", "sharded")),
            "quorum": rng.choice((0.5, 1.0)),
            "round_timeout_s": 30.0 if calm else rng.choice((0.01, 0.1, 30.0)),
            "drain_timeout_s": rng.choice((0.01, 10.0)),
            "start_timeout_s": 1e4,
        },
        chunk_nbytes=rng.choice((64, 128, 4096)),
        spoiled=0.0 if calm else rng.choice((0.0, 0.02, 0.1)),
        network=Network() if calm else network,
        compute=Compute(overrun_probability=0.0)
        if calm
        else Compute(step_s=rng.choice((1e-3, LogNormal(1e-3, 1.0))), factors=factors),
        faults=() if calm or rng.random() < 0.3 else tuple(_draw_faults(rng, ranks)),
        calm=calm,
    )


def _draw_faults(rng: random.Random, ranks: int) -> Iterator[Fault]:
    for kind in rng.sample((Kill, Kill, Stall, SlowRank, SlowLink, Partition, Delay), rng.randint(1, 3)):
        at_s = rng.uniform(0.0, 0.08)
        rank, other = rng.sample(range(ranks), 2)
        if kind is Kill:
            yield Kill(rank, **rng.choice(({"at_s": at_s}, {"at_turn": rng.randint(200, 3000)})))
        elif kind is Stall:
            yield Stall(rank, at_s, rng.choice((0.005, 0.05, 0.5)))
        elif kind is SlowRank:
            yield SlowRank(rank, at_s, rng.choice((2.0, 10.0, 100.0)))
        elif kind is SlowLink:
            yield SlowLink(rank, other, at_s, rng.choice((10.0, 100.0)))
        elif kind is Partition:
            yield Partition((rank,), at_s, at_s + rng.choice((0.002, 0.02, 0.2)))
        else:
            yield Delay(rank, other, rng.randint(1, 100), rng.choice((0.002, 0.02, 0.5)))


#: The floating values of a part, in order, and its integer counts.
State: TypeAlias = tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]


def state_of(model: Part) -> State:
    floats = torch.cat([model.weight, model.bias.reshape(-1)]).detach()
    return floats.numpy().copy(), model.count.numpy().copy()


def is_equal(one: State, two: State) -> bool:
    return all(a.tobytes() == b.tobytes() for a, b in zip(one, two, strict=True))


@dataclass(slots=True)
class Applied:
    """One application on one rank: its step, the event, and the state before and after."""

    step: int
    info: StepInfo
    event: AverageApplied
    own: State
    state: State
    has_optimizer_state: bool


@dataclass(slots=True)
class Watch:
    """The actions of the ranks of a simulation."""

    plan: Plan
    #: The iteration and the values of each offered snapshot, by round and rank.
    snapshots: dict[tuple[int, int], tuple[int, State]] = field(default_factory=dict)
    applied: dict[int, list[Applied]] = field(default_factory=dict)
    infos: dict[int, list[tuple[int, StepInfo]]] = field(default_factory=dict)
    lost: set[int] = field(default_factory=set)
    seen: Counter[str] = field(default_factory=Counter)

    def note_snapshot(self, rank: int, event: SnapshotTaken) -> None:
        assert (event.round, rank) not in self.snapshots, f"rank {rank} took two snapshots in round {event.round}"
        state = event.state["float32"].numpy().copy(), event.state["int64"].numpy().copy()
        self.snapshots[event.round, rank] = event.iteration, state

    def verify(self) -> None:
        """Check that every application is exact, complete on all ranks of a replica, and at one iteration."""
        size = self.plan.size
        for (number, rank), (iteration, _) in self.snapshots.items():
            of_leader = self.snapshots.get((number, rank - rank % size))
            assert of_leader is None or of_leader[0] == iteration, (
                f"rank {rank} captured its part at another iteration than its replica's first rank"
            )
            if rank % size == 0 and not self.lost.intersection(range(rank, rank + size)):
                missing = [each for each in range(rank, rank + size) if (number, each) not in self.snapshots]
                assert not missing, (
                    f"round {number}: rank {rank} contributed its part, but ranks {missing} of its replica did not"
                )
        for first in range(0, self.plan.replicas * size, size):
            ranks = range(first, first + size)
            applied = [self.applied.get(rank, []) for rank in ranks]
            told = [self.infos.get(rank, []) for rank in ranks]
            # the rank may have been lost between the actions of two of its replica's ranks
            if self.lost.intersection(ranks):
                assert max(map(len, applied)) - min(map(len, applied)) <= 1
            else:
                assert len(set(map(len, applied))) == 1, (
                    f"ranks {ranks} of one replica applied different numbers of averages: {list(map(len, applied))}"
                )
                assert all(each == told[0] for each in told), f"ranks {ranks} of one replica received different events"
            for together in zip(*applied, strict=False):
                for place, each in enumerate(together):
                    self._verify_one(first + place, place, each, together[0])

    def _verify_one(self, rank: int, place: int, each: Applied, of_leader: Applied) -> None:
        plan, event, first = self.plan, each.event, of_leader.event
        assert (each.step, event.round, event.weights) == (of_leader.step, first.round, first.weights)
        assert (each.step + 1) % plan.options["swap_every"] == 0
        assert event.donors == tuple(donor + place for donor in first.donors) and event.best == first.best + place
        assert (each.info.donors, each.info.round) == (first.donors, event.round)
        assert each.info.recovered == of_leader.info.recovered
        given = [self.snapshots[event.round, donor] for donor in event.donors]
        assert [taken_at for taken_at, _ in given] == [self.snapshots[event.round, donor][0] for donor in first.donors]
        momentum = 0.0 if each.info.recovered else plan.options["momentum"]
        floats = [values.astype(np.float64) for _, (values, _) in given]
        expected = sum(map(operator.mul, event.weights, floats)) / sum(event.weights)
        if momentum:
            expected = momentum * each.own[0].astype(np.float64) + (1 - momentum) * expected
        assert np.allclose(each.state[0], expected, rtol=1e-6, atol=1e-2), (
            f"rank {rank}, round {event.round}: wrong average"
        )
        assert np.array_equal(each.state[1], self.snapshots[event.round, event.best][1][1])
        assert each.has_optimizer_state == (plan.options["optimizer_state"] == "keep" and not each.info.recovered)
        self.seen["applied"] += 1
        self.seen["averages of several"] += len(event.donors) > 1
        self.seen["recovered"] += bool(each.info.recovered)
        self.seen[f"route {each.info.route}"] += 1


async def _main(world: ad.World, watch: Watch) -> int:
    plan, rank = watch.plan, world.rank
    place, replica = rank % plan.size, rank // plan.size
    model, events = Part(place, plan.sizes), []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0, momentum=0.9)

    def on_event(event: Any) -> None:
        if isinstance(event, SnapshotTaken):
            watch.note_snapshot(rank, event)
        elif isinstance(event, AverageApplied):
            events.append(event)

    try:
        async with OfPlainShards(model, optimizer, on_event=on_event, **plan.options) as policy:
            for step in range(plan.steps):
                _train(watch, model, optimizer, rank, step)
                metric = float(random.Random(f"{replica} {step}").randint(-3, 3) + place)
                own, count = state_of(model), len(events)
                info = await policy.step(metric)
                state = state_of(model)
                assert bool(info) == (len(events) == count + 1), (
                    f"rank {rank} returned {info!r} with {len(events)} events"
                )
                assert info or is_equal(own, state), (
                    f"rank {rank} changed weights at step {step}, but returned {info!r}"
                )
                if info:
                    has_state = any("momentum_buffer" in each for each in optimizer.state.values())
                    watch.applied.setdefault(rank, []).append(Applied(step, info, events[-1], own, state, has_state))
                if info or info.abandoned:
                    watch.infos.setdefault(rank, []).append((step, replace(info, nbytes=0)))
                    watch.seen[f"abandoned: {info.abandoned.partition(':')[0].rstrip('0123456789 ')}"] += not info
    except (ad.RankLostError, ad.ClosedError, ad.RemoteError, ad.StartTimeoutError) as error:
        assert any(isinstance(fault, Kill) for fault in plan.faults), error
        watch.lost.add(rank)
        watch.seen["replicas that a loss ended"] += 1
        return 0
    statistics = policy.statistics()
    assert statistics.replacement_count == len(watch.applied.get(rank, []))
    assert statistics.snapshot_count == sum(donor == rank for _, donor in watch.snapshots)
    return statistics.replacement_count


def _train(watch: Watch, model: Part, optimizer: torch.optim.Optimizer, rank: int, step: int) -> None:
    """Set the weights to a value that encodes replica, step and index; sometimes one rank's weights are not finite."""
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    is_spoiled = random.Random(f"spoiled {rank} {step}").random() < watch.plan.spoiled
    model.fill(math.nan if is_spoiled else float(rank * 4096 + step * 16))


def scenario(seed: int, faults: Sequence[Fault] | None = None) -> SimReport:
    """Run one seed; AssertionError if a property is violated."""
    return run(seed, faults)[0]


def run(seed: int, faults: Sequence[Fault] | None = None) -> tuple[SimReport, Watch]:
    """Run one seed, and return the observations."""
    plan = draw_plan(seed)
    plan = plan if faults is None else replace(plan, faults=tuple(faults))
    watch = Watch(plan)
    with mock.patch.object(messages, "CHUNK_NBYTES", plan.chunk_nbytes):
        report = simulate(
            _main,
            watch,
            ranks=plan.replicas * plan.size,
            seed=seed,
            network=plan.network,
            compute=plan.compute,
            faults=plan.faults,
            strict=not any(isinstance(fault, Kill) for fault in plan.faults),
            until_s=LIMIT_S,
        )
    killed = {fault.rank for fault in plan.faults if isinstance(fault, Kill)}
    watch.lost |= killed
    for rank, result in enumerate(report.results):
        if isinstance(result, BaseException):
            raise AssertionError(f"seed {seed}: rank {rank} ended by {result!r}") from result
        assert result is not None or rank in killed, f"seed {seed}: rank {rank} has not ended"
    watch.verify()
    if plan.calm:
        watch.seen["calm populations"] += 1
        assert watch.applied, f"seed {seed}: no replica applied an average"
    return report, watch
