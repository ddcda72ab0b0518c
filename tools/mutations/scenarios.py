"""Scenarios for the defects where the suite's own do not look, and the invariants that find them.

Each takes a seed and, when a plan is being shrunk, the faults to use in place of those that the seed draws. It raises
when an invariant is broken. What is expected is computed here by other means than the program's: the decision from the
definition in the design, the average with numpy from the models themselves, and what the medium carries is watched
from outside.

- ``averaging``: selective averaging, with even ranks and no faults: the strict invariants, and that it gets anywhere.
- ``trouble``: the same under stalls, slow links, partitions, delays, and deadlines that are too short.
- ``lateness``: the same where messages take longer than steps, and deadlines are as short as what they are for.
- ``slow_words``: the coordinator's words to the worst rank come late, and nothing else does.
- ``asked_again``: donors are busy when the round is frozen without one of them, and their replacers ask anew.
- ``farewell``: every send waits for its receiver; ranks leave with many of them under way.
- ``leaving``: members that leave one after the other; those that stay go on averaging.
- ``subgroup``: the synchronous average on a part of the ranks.
- ``absent``: a member that does not come to the start.
"""

from __future__ import annotations

import contextlib
import math
import random
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from typing import Any
from unittest import mock

import torch
from scripts.population import Mixed, State, expected_average, flat_state, kept_part, same_bits
from torch import nn

import asyncdist as ad
from asyncdist import tags
from asyncdist.simulation import (
    Compute,
    Delay,
    Fault,
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
from asyncdist.simulation.transport import SimTransport
from asyncdist.transports.base import Transport
from protocols import (
    AsyncSelectiveAveragingPolicy,
    AverageAllPolicy,
    AverageApplied,
    PolicyEvent,
    SnapshotTaken,
    StepInfo,
    parameter_stream,
)
from protocols.parameter_stream import SnapshotReceiver
from protocols.selective import rounds
from protocols.selective.rules import decide

STRATEGIES = ("mean", "weighted_mean", "best_only", "reset_weights")
#: Virtual seconds that no run of these takes, whatever goes wrong in it.
LIMIT_S = 200.0
#: The longest pause that a scenario draws for ranks that pause, in virtual seconds.
_PAUSE_S = 0.03


# -- what a seed draws ------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Setting:
    """One run of selective averaging.

    Attributes:
        ranks: how many.
        steps: of each rank.
        metrics: of each rank, for the whole run.
        options: of the policy.
        faults: of the simulation.
        first_iteration: the number of the first step.
        rebuilds: whether training replaces a buffer in each step, as some modules do in their forward.
        width: of the model.
        evaluates: safe points of each rank after its last step, before it leaves the policy.
        chunk_nbytes: of the streams; None for the real size, above any state here.
        compute, network: of the simulation.
    """

    ranks: int
    steps: tuple[int, ...]
    metrics: tuple[float, ...]
    options: Mapping[str, Any]
    faults: tuple[Fault, ...]
    first_iteration: int = 0
    rebuilds: bool = False
    width: int = 4
    evaluates: int = 0
    chunk_nbytes: int | None = None
    compute: Compute | None = None
    network: Network | None = None


def draw_metrics(rng: random.Random, ranks: int) -> tuple[float, ...]:
    """One for each rank: different ones that float32 cannot tell apart, some equal, some that are no numbers."""
    metrics = [1.0 + rng.randrange(8) * 2.0**-40 if rng.random() < 0.5 else rng.uniform(-3, 3) for _ in range(ranks)]
    broken = rng.choice((0.0, 0.05, 0.5))
    for rank in range(ranks):
        if rng.random() < broken:
            metrics[rank] = rng.choice((math.nan, math.inf, -math.inf))
    return tuple(metrics)


def draw_options(rng: random.Random) -> dict[str, Any]:
    """Options of the policy that decide what a round does."""
    strategy = rng.choice(STRATEGIES)
    options: dict[str, Any] = {
        "average_every": rng.randint(1, 4),
        "averaging_strategy": strategy,
        "replacement_ratio": rng.choice((0.0, 0.2, 0.25, 0.5, 0.9, 1.0)),
        "metric_mode": rng.choice(("max", "min")),
        "momentum": rng.choice((0.0, 0.0, 0.25, 0.5)),
        "optimizer_state": rng.choice(("keep", "keep", "reset")),
    }
    if strategy == "reset_weights" or rng.random() < 0.3:
        options["model_builder"] = fresh_model
    if rng.random() < 0.2:
        options["threshold"] = rng.uniform(-2, 2)
        options["cooldown"] = rng.randint(0, 10)
    return options


def fresh_model() -> nn.Module:
    return Mixed(1000.0)


def draw_faults(rng: random.Random, ranks: int) -> tuple[Fault, ...]:
    """Nothing that kills: what is late must do no harm."""
    plan: list[Fault] = []
    for _ in range(rng.randint(1, 5)):
        rank, other = rng.sample(range(ranks), 2)
        at_s = rng.uniform(0.0, 0.06)
        kinds = (
            Stall(rank, at_s, rng.choice((0.02, 0.2, 3.0))),
            SlowRank(rank, at_s, rng.uniform(2, 20)),
            SlowLink(rank, other, at_s, rng.choice((10.0, 100.0, 1000.0))),
            Partition((rank,), at_s, at_s + rng.choice((0.01, 0.1, 1.0))),
            Delay(rank, other, rng.randint(1, 60), rng.choice((0.005, 0.05, 0.5))),
        )
        plan.append(rng.choice(kinds))
    return tuple(plan)


# -- what must hold ---------------------------------------------------------------------------------------------------


def expected_decision(metrics: Mapping[int, float], rules: Any) -> tuple[list[int], list[int], list[float]] | None:
    """Replacers, donors and their weights, summing to one: docs/architecture.md, section 8, number 3."""
    count = len(metrics)
    ratio = Fraction(str(rules.replacement_ratio))
    if count < 2 or ratio == 0:
        return None
    replaced = min(max(math.floor(ratio * count + Fraction(1, 2)), 1), count - 1)
    sign = 1 if rules.metric_mode == "max" else -1
    broken = sorted(rank for rank, value in metrics.items() if not math.isfinite(value))
    sound = sorted((sign * value, rank) for rank, value in metrics.items() if math.isfinite(value))
    order = broken + [rank for _, rank in sound]
    if rules.threshold is not None and not broken and sound[0][0] >= sign * rules.threshold:
        return None
    replacers, left = sorted(order[:replaced]), order[replaced:]
    if rules.averaging_strategy == "reset_weights":
        return replacers, [], []
    donors = sorted(rank for rank in left if rank not in broken)
    if not donors:
        return None
    if rules.averaging_strategy == "best_only":
        return replacers, [left[-1]], [1.0]
    gains = {rank: Fraction(1) for rank in donors}
    if rules.averaging_strategy == "weighted_mean":
        gained = {rank: Fraction(sign * metrics[rank]) - Fraction(sound[0][0]) for rank in donors}
        gains = {rank: gain for rank, gain in gained.items() if gain} or gains
    total = sum(gains.values())
    return replacers, list(gains), [float(gain / total) for gain in gains.values()]


@dataclass
class Watch:
    """What the ranks of one run told, and the checks of it."""

    setting: Setting
    snapshots: dict[tuple[int, int], State] = field(default_factory=dict)
    snapshot_iterations: dict[tuple[int, int], int] = field(default_factory=dict)
    before: dict[int, State] = field(default_factory=dict)
    stepping: set[int] = field(default_factory=set)
    last_round: dict[int, int] = field(default_factory=dict)
    applied_count: dict[int, int] = field(default_factory=dict)
    judged: list[frozenset[int]] = field(default_factory=list)
    acted_count: int = 0
    leaving_s: dict[int, float] = field(default_factory=dict)

    def listener(self, rank: int, model: nn.Module) -> Callable[[PolicyEvent], None]:
        """The policy's ``on_event`` on one rank. The states are the model's own, not those of the event."""

        def on_event(event: PolicyEvent) -> None:
            assert rank in self.stepping, f"rank {rank}: round {event.round} touched the model outside step()"
            if isinstance(event, SnapshotTaken):
                key = (event.round, rank)
                assert key not in self.snapshots, f"rank {rank}: two snapshots in round {event.round}"
                self.snapshots[key] = flat_state(model)
                self.snapshot_iterations[key] = event.iteration
            else:
                self._check_application(rank, event, flat_state(model))

        return on_event

    def _check_application(self, rank: int, event: AverageApplied, state: State) -> None:
        assert event.round > self.last_round.get(rank, 0), f"rank {rank}: round {event.round} is applied twice"
        self.last_round[rank] = event.round
        self.applied_count[rank] = self.applied_count.get(rank, 0) + 1
        assert (event.round, rank) not in self.snapshots, f"rank {rank} gives and takes in round {event.round}"
        if not event.donors:
            expected = flat_state(fresh_model())
            assert all(same_bits(state[name], expected[name]) for name in expected), f"rank {rank}: not fresh weights"
            return
        given = {donor: self.snapshots[event.round, donor] for donor in event.donors}
        momentum = kept_part(self.before[rank], self.setting.options["momentum"])
        for name, tensor in state.items():
            average = expected_average(name, given, event.weights, event.best, self.before[rank][name], momentum)
            assert same_bits(tensor, average), (
                f"rank {rank}, round {event.round}: its {name} is no average of the snapshots of {event.donors}"
            )

    def check_step(self, rank: int, iteration: int, info: StepInfo, model: nn.Module) -> None:
        """After each step: nothing changed if it says so, and ages are right."""
        if not info:
            after, before = flat_state(model), self.before[rank]
            assert all(same_bits(after[name], before[name]) for name in before), (
                f"rank {rank}: weights changed in step {iteration}, which says that nothing did"
            )
        elif info.donors:
            oldest = min(self.snapshot_iterations[info.round, donor] for donor in info.donors)
            assert info.staleness_steps == max(0, iteration - oldest), (
                f"rank {rank}, round {info.round}: {info.staleness_steps} steps old, and it is {iteration - oldest}"
            )

    def check_decision(self, metrics: Mapping[int, float], rules: Any, found: Any) -> None:
        """What the core decided, against the definition."""
        self.judged.append(frozenset(metrics))
        expected = expected_decision(metrics, rules)
        assert (expected is None) == (found is None), f"of {dict(metrics)} it makes {found}, not {expected}"
        if expected is not None:
            self.acted_count += 1
            replacers, donors, weights = expected
            total = sum(found.weights)
            normalised = [weight / total for weight in found.weights]
            assert (list(found.replacers), list(found.donors)) == (replacers, donors), (
                f"of {dict(metrics)} it makes {found}, not replacers {replacers}, donors {donors}"
            )
            assert all(math.isclose(one, two, rel_tol=1e-9) for one, two in zip(normalised, weights, strict=True)), (
                f"of {dict(metrics)} it makes weights {normalised}, not {weights}"
            )

    def check_report(self, rank: int, iteration: int, value: float) -> None:
        """The coordinator hears exactly what the member said."""
        said = self.setting.metrics[rank]
        assert value == said or (value != value and said != said), f"rank {rank} reported {said!r}, heard is {value!r}"
        due = (iteration + 1) % self.setting.options["average_every"] == 0
        steps = range(self.setting.first_iteration, self.setting.first_iteration + self.setting.steps[rank])
        assert due and iteration in steps, f"rank {rank} never reported at iteration {iteration}"


@contextlib.contextmanager
def decisions_watched(watch: Watch) -> Iterator[None]:
    """Look at what the coordinator hears and decides."""
    on_report = rounds.RoundCoordinator.on_report

    def checked_decide(metrics: Mapping[int, float], rules: Any) -> Any:
        found = decide(metrics, rules)
        watch.check_decision(metrics, rules, found)
        return found

    def checked_on_report(self: Any, rank: int, iteration: int, value: float, *rest: Any) -> Any:
        watch.check_report(rank, iteration, value)
        return on_report(self, rank, iteration, value, *rest)

    with (
        mock.patch.object(rounds, "decide", checked_decide),
        mock.patch.object(rounds.RoundCoordinator, "on_report", checked_on_report),
    ):
        yield


class WatchedSend:
    """A send that was not done at once, with a checksum of its buffer."""

    def __init__(self, request: Any, buffer: Any, where: str) -> None:
        self._request = request
        self._bytes = memoryview(buffer)
        self._checksum = zlib.crc32(self._bytes)
        self._where = where

    def test(self) -> bool:
        done = bool(self._request.test())
        assert not done or self._checksum == zlib.crc32(self._bytes), f"{self._where}: its buffer changed under way"
        return done

    @property
    def is_forgotten(self) -> bool:
        """Whether it is still under way; not with a lost peer, whose sends have failed."""
        try:
            return not self._request.test()
        except ad.RankLostError:
            return False

    def __getattr__(self, name: str) -> Any:
        return getattr(self._request, name)

    def __str__(self) -> str:
        return self._where


@contextlib.contextmanager
def sends_watched() -> Iterator[None]:
    """Buffers stay as they are from the send to its completion, and no rank closes with sends under way."""
    isend, close = SimTransport.isend, SimTransport.close
    sends: dict[int, list[WatchedSend]] = {}

    def checked_isend(self: Any, buffer: Any, dest: int, tag: int) -> Any:
        request = isend(self, buffer, dest, tag)
        if request.test():
            return request
        send = WatchedSend(request, buffer, f"rank {self.rank}: send to {dest}, tag {tag}")
        sends.setdefault(self.rank, []).append(send)
        return send

    def checked_close(self: Any) -> None:
        left = [send for send in sends.get(self.rank, ()) if send.is_forgotten]
        assert not left, f"{left[0]}, and {len(left) - 1} more, were under way when the transport was closed"
        close(self)

    with (
        mock.patch.object(SimTransport, "isend", checked_isend),
        mock.patch.object(SimTransport, "start_send", Transport.start_send),
        mock.patch.object(SimTransport, "close", checked_close),
    ):
        yield


@contextlib.contextmanager
def deadlines_watched(slack_s: float) -> Iterator[None]:
    """Check that a replacer waits for a stream until its deadline, plus at most the time that it may itself be busy."""
    run = SnapshotReceiver.run

    async def checked(intake: SnapshotReceiver, weights: Sequence[float], *, deadline: float) -> None:
        world = ad.current_world()
        try:
            await run(intake, weights, deadline=deadline)
        finally:
            late_s = world.time() - deadline
            assert late_s <= slack_s, f"rank {world.rank} waited {late_s:.3f} s past the deadline of its exchange"

    with mock.patch.object(SnapshotReceiver, "run", checked):
        yield


def check_bulk(report: SimReport, model: nn.Module) -> None:
    """Parameters travel together: each bulk message is the whole of one dtype, or an abort."""
    sizes = {0, *(tensor.nbytes for tensor in flat_state(model).values())}
    for event in report.trace:
        if event.kind == "send" and tags.BULK_FIRST <= event.tag <= tags.BULK_LAST:
            assert event.nbytes in sizes, f"a bulk message of {event.nbytes} bytes; whole dtypes have {sorted(sizes)}"


def check_dropped(report: SimReport) -> None:
    """Frames may come for a channel that is closed. Nothing else makes a receiver drop one."""
    for rank, statistics in enumerate(report.statistics):
        for why in statistics.dropped if statistics is not None else ():
            assert why in ("closed scope", "closed lane"), f"rank {rank} dropped a frame: {why}"


# -- selective averaging ----------------------------------------------------------------------------------------------


async def train(world: ad.World, setting: Setting, watch: Watch) -> None:
    """One rank's training: each step changes every entry of the state, exactly."""
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


def run_setting(setting: Setting, seed: int) -> tuple[SimReport, Watch]:
    """Simulate it under all invariants that hold in any setting."""
    watch = Watch(setting)
    with contextlib.ExitStack() as stack:
        stack.enter_context(decisions_watched(watch))
        stack.enter_context(sends_watched())
        stack.enter_context(deadlines_watched(longest_absence_s(setting)))
        if setting.chunk_nbytes is not None:
            stack.enter_context(mock.patch.object(parameter_stream, "CHUNK_NBYTES", setting.chunk_nbytes))
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
    assert not late, f"after {LIMIT_S} s ranks {late} have not ended"
    check_dropped(report)
    if setting.chunk_nbytes is None:
        check_bulk(report, Mixed(0.0, setting.width))
    return report, watch


def longest_absence_s(setting: Setting) -> float:
    """A bound on how long a rank computes before a task of it sees that its time is up.

    It may pause twice: the timer is late by one pause, and the task that it wakes may have its turn after the next one.
    """
    factor = math.prod(max(1.0, fault.factor) for fault in setting.faults if isinstance(fault, SlowRank))
    pause_s = 2 * _PAUSE_S if setting.compute is not None else 0.0
    return factor * (0.004 + pause_s + sum(fault.duration_s for fault in setting.faults if isinstance(fault, Stall)))


def averaging(seed: int, faults: Sequence[Fault] | None = None) -> SimReport:
    """Even ranks, nothing goes wrong: rounds must come to their end, and soon."""
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
            assert seconds < 1.0, f"rank {rank} took {seconds:.1f} s to leave, and everybody was there"
        check_progress(watch)
    return report


def check_progress(watch: Watch) -> None:
    """The worst rank's metric is the same throughout, so it must have been replaced."""
    setting = watch.setting
    assert watch.judged, "nothing was decided in the whole run"
    if setting.options.get("threshold") is None and setting.options["replacement_ratio"] > 0:
        sign = 1 if setting.options["metric_mode"] == "max" else -1
        finite = [math.isfinite(metric) for metric in setting.metrics]
        if sum(finite) or setting.options["averaging_strategy"] == "reset_weights":
            worst = min(
                range(setting.ranks),
                key=lambda rank: (finite[rank], sign * setting.metrics[rank] if finite[rank] else 0, rank),
            )
            assert watch.applied_count.get(worst), f"rank {worst} is the worst, and was never replaced"


def trouble(seed: int, faults: Sequence[Fault] | None = None) -> SimReport:
    """Ranks and links are slow and stall; rounds are abandoned in the middle of streams."""
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


def lateness(seed: int, faults: Sequence[Fault] | None = None) -> SimReport:
    """Some links are far slower than a step, with deadlines about as long as the streams and messages take."""
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


def slow_words(seed: int, faults: Sequence[Fault] | None = None) -> SimReport:
    """What the coordinator says to the worst rank comes late: its round is over for the donors before it has begun."""
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


def asked_again(seed: int, faults: Sequence[Fault] | None = None) -> SimReport:
    """A donor that does not come to its safe point in time is left out, and the replacer asks the others anew.

    They may have computed since they sent their snapshots, too large to leave without a receiver: so they hear of the
    second grant, which is small, before they know that the first stream has left. The slot of both is the same.
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


def farewell(seed: int, faults: Sequence[Fault] | None = None) -> SimReport:
    """No message is small enough to leave at once, and they pile up before the coordinator: all of them arrive."""
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


def leaving(seed: int, faults: Sequence[Fault] | None = None) -> SimReport:
    """Most members leave early. Two stay, and are a quorum of those that are there."""
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
    assert frozenset(stay) in watch.judged, f"ranks {stay} stayed, and nothing was decided among them"
    return report


# -- the rest ---------------------------------------------------------------------------------------------------------


def subgroup(seed: int, faults: Sequence[Fault] | None = None) -> SimReport:
    """AverageAllPolicy on some of the ranks gives these their mean, and leaves the others alone."""
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


def absent(seed: int, faults: Sequence[Fault] | None = None) -> SimReport:
    """One rank does not come to the start of a policy: the others are told so in time."""
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
        assert seconds < timeout_s + 10.0, f"rank {rank} waited {seconds:.1f} s for rank {missing}, not {timeout_s:.1f}"
    return report
