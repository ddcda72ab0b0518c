"""Random settings for the mutants' scenarios, and checks of the invariants that must hold in every scenario."""

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

from scripts.population import Mixed, State, expected_average, flat_state, kept_part, same_bits
from torch import nn

import asyncdist as ad
from asyncdist import tags
from asyncdist.simulation import (
    Compute,
    Delay,
    Fault,
    Network,
    Partition,
    SimReport,
    SlowLink,
    SlowRank,
    Stall,
)
from asyncdist.simulation.transport import SimTransport
from asyncdist.transports.base import Transport
from protocols import (
    AverageApplied,
    PolicyEvent,
    SnapshotTaken,
    StepInfo,
)
from protocols.parameter_stream.receiver import SnapshotReceiver
from protocols.selective import rounds
from protocols.selective.selection import decide

STRATEGIES = ("mean", "weighted_mean", "best_only", "reset_weights")


# -- random settings --------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Setting:
    """The parameters of one simulated run of selective averaging.

    Attributes:
        ranks: Number of ranks.
        steps: Number of training steps on each rank.
        metrics: Metric of each rank, constant during the run.
        options: Options of the policy.
        faults: Faults of the simulation.
        first_iteration: Number of the first step.
        rebuilds: Whether training replaces a buffer in each step, as some modules do in their forward.
        width: Width of the model's layers.
        evaluates: Number of safe points on each rank between its last step and its leave of the policy.
        chunk_nbytes: Chunk size of the streams in bytes; None for the default, which exceeds every state used here.
        compute, network: Compute and network models of the simulation.
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
    """Draw a metric for each rank: some equal, some that differ by less than float32 resolves, some NaN."""
    metrics = [1.0 + rng.randrange(8) * 2.0**-40 if rng.random() < 0.5 else rng.uniform(-3, 3) for _ in range(ranks)]
    broken = rng.choice((0.0, 0.05, 0.5))
    for rank in range(ranks):
        if rng.random() < broken:
            metrics[rank] = rng.choice((math.nan, math.inf, -math.inf))
    return tuple(metrics)


def draw_options(rng: random.Random) -> dict[str, Any]:
    """Draw the options of the policy that affect a round."""
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
    """Draw faults that delay ranks and messages but kill no rank."""
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


# -- invariants -------------------------------------------------------------------------------------------------------


def expected_decision(metrics: Mapping[int, float], rules: Any) -> tuple[list[int], list[int], list[float]] | None:
    """Return the replacers, the donors and the donors' weights (sum 1) by rule 3 of docs/policy_designs.md."""
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
    """Records the policy events of all ranks in one run, and checks them against the invariants."""

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
        """Return an ``on_event`` callback for one rank. It reads states from the model, not from the event."""

        def on_event(event: PolicyEvent) -> None:
            assert rank in self.stepping, f"rank {rank} received {type(event).__name__} outside step()"
            if isinstance(event, SnapshotTaken):
                key = (event.round, rank)
                assert key not in self.snapshots, f"rank {rank} took two snapshots in round {event.round}"
                self.snapshots[key] = flat_state(model)
                self.snapshot_iterations[key] = event.iteration
            elif isinstance(event, AverageApplied):
                self._check_application(rank, event, flat_state(model))

        return on_event

    def _check_application(self, rank: int, event: AverageApplied, state: State) -> None:
        assert event.round > self.last_round.get(rank, 0), f"rank {rank} applied round {event.round} twice"
        self.last_round[rank] = event.round
        self.applied_count[rank] = self.applied_count.get(rank, 0) + 1
        assert (event.round, rank) not in self.snapshots, f"rank {rank} was donor and replacer in round {event.round}"
        if not event.donors:
            expected = flat_state(fresh_model())
            assert all(same_bits(state[name], expected[name]) for name in expected), (
                f"rank {rank} does not have fresh weights"
            )
            return
        given = {donor: self.snapshots[event.round, donor] for donor in event.donors}
        momentum = kept_part(self.before[rank], self.setting.options["momentum"])
        for name, tensor in state.items():
            average = expected_average(name, given, event.weights, event.best, self.before[rank][name], momentum)
            assert same_bits(tensor, average), (
                f"rank {rank}, round {event.round}: its {name} is not the average of the snapshots of {event.donors}"
            )

    def check_step(self, rank: int, iteration: int, info: StepInfo, model: nn.Module) -> None:
        """Check a step's result: the weights changed only if ``info`` says so, and its staleness is correct."""
        if not info:
            after, before = flat_state(model), self.before[rank]
            assert all(same_bits(after[name], before[name]) for name in before), (
                f"rank {rank}: weights changed in step {iteration}, which reported no change"
            )
        elif info.donors:
            oldest = min(self.snapshot_iterations[info.round, donor] for donor in info.donors)
            assert info.staleness_steps == max(0, iteration - oldest), (
                f"rank {rank}, round {info.round}: reported {info.staleness_steps} steps of staleness, "
                f"expected {iteration - oldest}"
            )

    def check_decision(self, metrics: Mapping[int, float], rules: Any, found: Any) -> None:
        """Check the coordinator's decision against the definition in docs/policy_designs.md."""
        self.judged.append(frozenset(metrics))
        expected = expected_decision(metrics, rules)
        assert (expected is None) == (found is None), f"metrics {dict(metrics)} gave {found}, expected {expected}"
        if expected is not None:
            self.acted_count += 1
            replacers, donors, weights = expected
            total = sum(found.weights)
            normalised = [weight / total for weight in found.weights]
            assert (list(found.replacers), list(found.donors)) == (replacers, donors), (
                f"metrics {dict(metrics)} gave {found}, expected replacers {replacers}, donors {donors}"
            )
            assert all(math.isclose(one, two, rel_tol=1e-9) for one, two in zip(normalised, weights, strict=True)), (
                f"metrics {dict(metrics)} gave weights {normalised}, expected {weights}"
            )

    def check_report(self, rank: int, iteration: int, value: float) -> None:
        """Check that the coordinator received exactly the metric that the member reported."""
        said = self.setting.metrics[rank]
        assert value == said or (value != value and said != said), (
            f"rank {rank} reported {said!r}, but {value!r} was received"
        )
        due = (iteration + 1) % self.setting.options["average_every"] == 0
        steps = range(self.setting.first_iteration, self.setting.first_iteration + self.setting.steps[rank])
        assert due and iteration in steps, f"rank {rank} never reported at iteration {iteration}"


@contextlib.contextmanager
def decisions_watched(watch: Watch) -> Iterator[None]:
    """Check each report that the coordinator receives and each decision that it makes, within the block."""
    on_report = rounds.RoundCoordinator.on_report

    def checked_decide(metrics: Mapping[int, float], rules: Any, *guests: Any, **facts: Any) -> Any:
        found = decide(metrics, rules, *guests, **facts)
        watch.check_decision(metrics, rules, found)
        return found

    def checked_on_report(self: Any, rank: int, iteration: int, value: float, *rest: Any, **facts: Any) -> Any:
        watch.check_report(rank, iteration, value)
        return on_report(self, rank, iteration, value, *rest, **facts)

    with (
        mock.patch.object(rounds, "decide", checked_decide),
        mock.patch.object(rounds.RoundCoordinator, "on_report", checked_on_report),
    ):
        yield


class WatchedSend:
    """Wraps a send that did not complete immediately; checks that its buffer stays unchanged until it completes."""

    def __init__(self, request: Any, buffer: Any, where: str) -> None:
        self._request = request
        self._bytes = memoryview(buffer)
        self._checksum = zlib.crc32(self._bytes)
        self._where = where

    def test(self) -> bool:
        done = bool(self._request.test())
        assert not done or self._checksum == zlib.crc32(self._bytes), (
            f"{self._where}: its buffer changed while it was being sent"
        )
        return done

    @property
    def is_forgotten(self) -> bool:
        """Return whether the send is still in progress. A send to a lost peer has failed and does not count."""
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
    """Check within the block that buffers stay unchanged while sent, and that no rank closes with unfinished sends."""
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
        assert not left, f"when the transport was closed, {left[0]} and {len(left) - 1} more were in progress"
        close(self)

    with (
        mock.patch.object(SimTransport, "isend", checked_isend),
        mock.patch.object(SimTransport, "start_send", Transport.start_send),
        mock.patch.object(SimTransport, "close", checked_close),
    ):
        yield


@contextlib.contextmanager
def deadlines_watched(slack_s: float) -> Iterator[None]:
    """Check within the block that no replacer waits for a stream more than ``slack_s`` seconds past its deadline."""
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


def check_bulk(report: SimReport[Any], model: nn.Module) -> None:
    """Check that each bulk message has all parameters of one dtype, or is an abort."""
    sizes = {0, *(tensor.nbytes for tensor in flat_state(model).values())}
    for event in report.trace:
        if event.kind == "send" and tags.BULK_FIRST <= event.tag <= tags.BULK_LAST:
            assert event.nbytes in sizes, (
                f"a bulk message has {event.nbytes} bytes, not a multiple of a dtype: {sorted(sizes)}"
            )


def check_dropped(report: SimReport[Any]) -> None:
    """Check that receivers dropped only frames that arrived for a closed channel."""
    for rank, statistics in enumerate(report.statistics):
        for why in statistics.dropped if statistics is not None else ():
            assert why in ("closed scope", "closed lane"), f"rank {rank} dropped a frame: {why}"
