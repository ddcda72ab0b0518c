"""Simulated scenarios that find the mutants which the test suite's own scenario cannot find.

A scenario takes a seed and optionally faults, which replace the seed's own while a failure is being shrunk. It raises
when an invariant is violated. Expected values are computed independently of asyncdist: decisions from the definition
in docs/policy_designs.md, averages with numpy from the models, and messages by observing the simulated transport.

- ``averaging``: selective averaging with equally fast ranks and no faults. Invariants are strict, and rounds must
  succeed.
- ``trouble``: selective averaging under stalls, slow links, partitions, delays, and deadlines that are too short.
- ``lateness``: selective averaging whose messages take longer than steps, with deadlines about as long as transfers.
- ``slow_words``: only the coordinator's messages to the worst rank are delayed.
- ``asked_again``: a round continues without a late donor, and replacers request snapshots again while donors are busy.
- ``farewell``: every send waits for its receiver, and ranks leave while many sends are unfinished.
- ``leaving``: members leave in turn, and the remaining members continue to average.
- ``subgroup``: the synchronous average on some of the ranks.
- ``absent``: one member never starts the policy.
"""

from __future__ import annotations

import contextlib
import math
import random
from collections.abc import Sequence
from typing import Any
from unittest import mock

import torch
from scripts.population import Mixed, State, expected_average, flat_state
from watches import (
    STRATEGIES,
    Setting,
    Watch,
    check_bulk,
    check_dropped,
    deadlines_watched,
    decisions_watched,
    draw_faults,
    draw_metrics,
    draw_options,
    sends_watched,
)

import asyncdist as ad
from asyncdist.simulation import (
    Compute,
    Fault,
    Link,
    LogNormal,
    Network,
    SimReport,
    SlowRank,
    Stall,
    Uniform,
    simulate,
)
from protocols import (
    AsyncSelectiveAveragingPolicy,
    AverageAllPolicy,
    parameter_stream,
)

#: Limit for the virtual time of a run, in seconds. A run that takes longer hangs.
LIMIT_S = 200.0
#: Longest pause of a rank that a scenario draws, in virtual seconds.
_PAUSE_S = 0.03


# -- selective averaging ----------------------------------------------------------------------------------------------


async def train(world: ad.World, setting: Setting, watch: Watch) -> None:
    """Train on one rank. Each step changes every entry of the state by an exact amount."""
    rank = world.rank
    model = Mixed(float(10 * rank), setting.width)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0, momentum=0.5)
    remembered = {parameter: torch.full_like(parameter, 3.0) for parameter in model.parameters()}
    resets = setting.options["optimizer_state"] == "reset" or setting.options["averaging_strategy"] == "reset_weights"
    async with AsyncSelectiveAveragingPolicy(
        model, optimizer, on_event=watch.listener(rank, model), **setting.options
    ) as policy:
        for step in range(setting.steps[rank]):
            train_step(model, rank, setting)
            for parameter, memory in remembered.items():
                optimizer.state[parameter]["momentum_buffer"] = memory
            watch.before[rank] = flat_state(model)
            iteration = policy.iteration = setting.first_iteration + step
            watch.stepping.add(rank)
            info = await policy.step(setting.metrics[rank])
            watch.stepping.discard(rank)
            watch.check_step(rank, iteration, info, model)
            kept = len(optimizer.state) == len(remembered)
            assert kept != (bool(info) and resets), f"rank {rank}: optimizer state {'kept' if kept else 'lost'}, {info}"
        for _ in range(setting.evaluates):
            await world.safe_point()
        began_at = world.time()
    watch.leaving_s[rank] = world.time() - began_at


def train_step(model: Any, rank: int, setting: Setting) -> None:
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(rank + 1)
        model.norm.num_batches_tracked.add_(rank + 1)
        model.counts.add_(1)
        if setting.rebuilds:
            model.norm.running_mean = model.norm.running_mean + 1.0
        else:
            model.norm.running_mean.add_(1.0)


def run_setting(setting: Setting, seed: int) -> tuple[SimReport[Any], Watch]:
    """Simulate a setting and check the invariants that hold in every setting."""
    watch = Watch(setting)
    with contextlib.ExitStack() as stack:
        stack.enter_context(decisions_watched(watch))
        stack.enter_context(sends_watched())
        stack.enter_context(deadlines_watched(longest_absence_s(setting)))
        if setting.chunk_nbytes is not None:
            stack.enter_context(mock.patch.object(parameter_stream.messages, "CHUNK_NBYTES", setting.chunk_nbytes))
        report = simulate(
            train,
            setting,
            watch,
            ranks=setting.ranks,
            seed=seed,
            network=setting.network,
            compute=setting.compute,
            faults=setting.faults,
            strict=True,
            until_s=LIMIT_S,
        )
    report.value()
    late = [rank for rank in range(setting.ranks) if rank not in watch.leaving_s]
    assert not late, f"ranks {late} have not ended after {LIMIT_S} s"
    check_dropped(report)
    if setting.chunk_nbytes is None:
        check_bulk(report, Mixed(0.0, setting.width))
    return report, watch


def longest_absence_s(setting: Setting) -> float:
    """Return the longest time in seconds by which a task can notice a timeout late because its rank computes or pauses.

    Two pauses can add up: one delays the timer, and a second one delays the task that the timer wakes.
    """
    factor = math.prod(max(1.0, fault.factor) for fault in setting.faults if isinstance(fault, SlowRank))
    pause_s = 2 * _PAUSE_S if setting.compute is not None else 0.0
    return factor * (0.004 + pause_s + sum(fault.duration_s for fault in setting.faults if isinstance(fault, Stall)))


def averaging(seed: int, faults: Sequence[Fault] | None = None) -> SimReport[Any]:
    """Average on equally fast ranks without faults: rounds must succeed, and quickly."""
    rng = random.Random(f"averaging {seed}")
    ranks = rng.randint(2, 6)
    setting = Setting(
        ranks=ranks,
        steps=(40,) * ranks,
        first_iteration=rng.choice((0, 0, 2**24 + 1)),
        metrics=draw_metrics(rng, ranks),
        rebuilds=rng.random() < 0.5,
        options=draw_options(rng),
        faults=tuple(faults or ()),
    )
    report, watch = run_setting(setting, seed)
    if not setting.faults:
        for rank, seconds in watch.leaving_s.items():
            assert seconds < 1.0, f"rank {rank} took {seconds:.1f} s to leave, although all ranks were present"
        check_progress(watch)
    return report


def check_progress(watch: Watch) -> None:
    """Check that the worst rank was replaced: its metric is constant, so every decision selects it."""
    setting = watch.setting
    assert watch.judged, "no round was decided in the whole run"
    if setting.options.get("threshold") is None and setting.options["replacement_ratio"] > 0:
        sign = 1 if setting.options["metric_mode"] == "max" else -1
        finite = [math.isfinite(metric) for metric in setting.metrics]
        if sum(finite) or setting.options["averaging_strategy"] == "reset_weights":
            worst = min(
                range(setting.ranks),
                key=lambda rank: (finite[rank], sign * setting.metrics[rank] if finite[rank] else 0, rank),
            )
            assert watch.applied_count.get(worst), f"rank {worst} is the worst, but was never replaced"


def trouble(seed: int, faults: Sequence[Fault] | None = None) -> SimReport[Any]:
    """Average on ranks and links that are slow and stall, so that rounds are abandoned in the middle of streams."""
    rng = random.Random(f"trouble {seed}")
    ranks = rng.randint(2, 5)
    options = draw_options(rng)
    options["replacement_ratio"] = rng.choice((0.2, 0.5))
    options["averaging_strategy"] = rng.choice(STRATEGIES[:3])
    options["round_timeout_s"] = rng.choice((0.001, 0.004, 0.02))
    options["grace_s"] = rng.choice((0.002, 0.01))
    latency = LogNormal(rng.choice((1e-5, 2e-4, 1e-3)), 1.0)
    setting = Setting(
        ranks=ranks,
        steps=tuple(rng.randint(20, 60) for _ in range(ranks)),
        metrics=draw_metrics(rng, ranks),
        chunk_nbytes=rng.choice((None, 64)),
        options=options,
        network=Network(link=Link(latency_s=latency, bandwidth_nbytes_per_s=rng.choice((1e6, 1e9)))),
        faults=draw_faults(rng, ranks) if faults is None else tuple(faults),
    )
    return run_setting(setting, seed)[0]


def lateness(seed: int, faults: Sequence[Fault] | None = None) -> SimReport[Any]:
    """Average over links far slower than a step, with deadlines about as long as streams and messages take."""
    rng = random.Random(f"lateness {seed}")
    ranks = rng.randint(2, 4)
    latencies_s = [rng.choice((1e-5, 1e-3, 1e-2)) for _ in range(2)]
    links = {
        (source, dest): Link(latency_s=LogNormal(rng.choice(latencies_s), 1.0))
        for source in range(ranks)
        for dest in range(ranks)
        if source != dest
    }
    options = draw_options(rng) | {"average_every": 1, "replacement_ratio": 0.5, "threshold": None}
    options["averaging_strategy"] = rng.choice(("mean", "best_only"))
    options["round_timeout_s"] = max(latencies_s) * rng.uniform(1.0, 8.0)
    setting = Setting(
        ranks=ranks,
        steps=(60,) * ranks,
        metrics=tuple(float(metric) for metric in rng.sample(range(100), ranks)),
        evaluates=rng.randint(0, 5),
        width=64,
        chunk_nbytes=512,
        options=options,
        network=Network(links=links, eager_nbytes=rng.choice((256, 65536))),
        faults=tuple(faults or ()),
    )
    return run_setting(setting, seed)[0]


def slow_words(seed: int, faults: Sequence[Fault] | None = None) -> SimReport[Any]:
    """Delay the coordinator's messages to the worst rank, so that donors finish a round before it has begun there."""
    rng = random.Random(f"slow_words {seed}")
    ranks = rng.randint(3, 5)
    worst = rng.randint(1, ranks - 1)
    options = draw_options(rng) | {"average_every": 1, "replacement_ratio": 0.2, "threshold": None}
    options["averaging_strategy"] = rng.choice(STRATEGIES[:3])
    options["round_timeout_s"] = rng.uniform(0.001, 0.01)
    order = sorted((float(metric) for metric in rng.sample(range(100), ranks)), reverse=options["metric_mode"] == "min")
    late = Link(latency_s=LogNormal(rng.uniform(0.005, 0.05), 1.0))
    setting = Setting(
        ranks=ranks,
        steps=(80,) * ranks,
        metrics=(*order[1 : worst + 1], order[0], *order[worst + 1 :]),
        evaluates=rng.randint(0, 5),
        options=options,
        network=Network(links={(0, worst): late}),
        faults=tuple(faults or ()),
    )
    return run_setting(setting, seed)[0]


def asked_again(seed: int, faults: Sequence[Fault] | None = None) -> SimReport[Any]:
    """Leave out a donor that reaches its safe point too late; the replacer then requests the other snapshots again.

    Snapshots are too large to be sent before the receiver is ready. A donor that computes meanwhile can therefore
    receive the second, small grant before it notices that its first stream has been sent. Both use the same slot.
    """
    rng = random.Random(f"asked_again {seed}")
    ranks = rng.randint(4, 6)
    replacer = rng.randint(1, ranks - 1)
    options = draw_options(rng) | {"average_every": 1, "replacement_ratio": 1 / ranks, "threshold": None}
    options["averaging_strategy"] = rng.choice(("mean", "weighted_mean"))
    options["round_timeout_s"] = rng.uniform(0.01, 0.04)
    options["grace_s"] = 0.002
    sign = 1.0 if options["metric_mode"] == "max" else -1.0
    setting = Setting(
        ranks=ranks,
        steps=(150,) * ranks,
        metrics=tuple(sign * (0.0 if rank == replacer else 1.0 + rng.random()) for rank in range(ranks)),
        width=64,
        options=options,
        compute=Compute(pause_probability=0.2, pause_s=Uniform(0.01, _PAUSE_S)),
        network=Network(eager_nbytes=256),
        faults=tuple(faults or ()),
    )
    return run_setting(setting, seed)[0]


def farewell(seed: int, faults: Sequence[Fault] | None = None) -> SimReport[Any]:
    """Make every send wait for its receiver, so that sends accumulate at the coordinator; all must arrive."""
    rng = random.Random(f"farewell {seed}")
    ranks = rng.randint(2, 4)
    setting = Setting(
        ranks=ranks,
        steps=(rng.randint(5, 40),) * ranks,
        metrics=draw_metrics(rng, ranks),
        options=draw_options(rng) | {"average_every": 1},
        network=Network(link=Link(latency_s=LogNormal(1e-3, 0.5)), eager_nbytes=0),
        faults=tuple(faults or ()),
    )
    return run_setting(setting, seed)[0]


def leaving(seed: int, faults: Sequence[Fault] | None = None) -> SimReport[Any]:
    """Let most members leave early. The two that stay are a quorum of the remaining members and continue to average."""
    rng = random.Random(f"leaving {seed}")
    ranks = rng.randint(4, 8)
    stay = rng.sample(range(ranks), 2)
    setting = Setting(
        ranks=ranks,
        steps=tuple(80 if rank in stay else rng.randint(5, 20) for rank in range(ranks)),
        metrics=tuple(float(metric) for metric in rng.sample(range(100), ranks)),
        evaluates=rng.randint(0, 5),
        options={**draw_options(rng), "replacement_ratio": 0.5, "threshold": None, "quorum": rng.uniform(0.3, 1.0)},
        faults=tuple(faults or ()),
    )
    report, watch = run_setting(setting, seed)
    assert frozenset(stay) in watch.judged, f"ranks {stay} stayed, but decided no round among them"
    return report


# -- the rest ---------------------------------------------------------------------------------------------------------


def subgroup(seed: int, faults: Sequence[Fault] | None = None) -> SimReport[Any]:
    """Run AverageAllPolicy on some of the ranks: they must hold their mean, and the other ranks stay unchanged."""
    rng = random.Random(f"subgroup {seed}")
    ranks = rng.randint(2, 6)
    members = tuple(sorted(rng.sample(range(ranks), rng.randint(2, ranks))))
    steps = rng.randint(1, 4)

    async def main(world: ad.World) -> list[State]:
        model = Mixed(float(world.rank))
        states = [flat_state(model)]
        if world.rank in members:
            group = await world.new_group(members)
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            async with AverageAllPolicy(model, optimizer, average_every=1, group=group) as policy:
                for _ in range(steps):
                    await policy.step()
                    states.append(flat_state(model))
        return states

    with sends_watched():
        report = simulate(main, ranks=ranks, seed=seed, strict=True, faults=tuple(faults or ()), until_s=LIMIT_S)
    report.value()
    check_dropped(report)
    given = {rank: report.results[rank][0] for rank in members}
    for rank, states in enumerate(report.results):
        assert len(states) == (steps + 1 if rank in members else 1), f"rank {rank} did not take its steps"
        for state in states[1:]:
            for name, tensor in state.items():
                mean = expected_average(name, given, (1.0,) * len(members), members[0], None, 0.0)
                assert torch.allclose(tensor, mean), (
                    f"rank {rank} has {tensor.tolist()[0]} in {name}; the mean of {members} is {mean.tolist()[0]}"
                )
    return report


def absent(seed: int, faults: Sequence[Fault] | None = None) -> SimReport[Any]:
    """Let one rank never start a policy: the start must fail on the others when its timeout expires."""
    rng = random.Random(f"absent {seed}")
    ranks = rng.randint(2, 5)
    missing = rng.randrange(ranks)
    timeout_s = rng.uniform(0.1, 2.0)

    async def main(world: ad.World) -> float:
        model = Mixed(1.0)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        if world.rank == missing:
            await world.sleep(60.0)
            return 0.0
        began_at = world.time()
        policy = AsyncSelectiveAveragingPolicy(model, optimizer, average_every=1, start_timeout_s=timeout_s)
        try:
            async with policy:
                raise AssertionError(f"rank {world.rank} started without rank {missing}")
        except ad.StartTimeoutError:
            return world.time() - began_at

    report = simulate(main, ranks=ranks, seed=seed, faults=tuple(faults or ()), until_s=LIMIT_S)
    report.value()
    for rank, seconds in enumerate(report.results):
        assert seconds is not None, f"rank {rank} still waits for rank {missing}"
        assert seconds < timeout_s + 10.0, (
            f"rank {rank} waited {seconds:.1f} s for rank {missing}, expected {timeout_s:.1f}"
        )
    return report
