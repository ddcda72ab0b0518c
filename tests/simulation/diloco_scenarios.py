"""Simulates DiLoCo and its family with faults, and compares each rank's weights after each step with an oracle.

The oracle is a second implementation of Streaming DiLoCo in numpy (Douillard et al., 2501.18512). It takes from the run
only the donors of each round, since the donors depend on the moment of a loss.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
import random
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import torch
from scripts.population import sgd
from support.tokens import tokens_for

import asyncdist as ad
from asyncdist.simulation import Fault, SimReport
from protocols import AverageApplied, DiLoCoPolicy, PolicyEvent, SelectiveDiLoCoPolicy, StepInfo
from simulation.training_runs import (
    LAYER_COUNT,
    Arrays,
    Layers,
    TrainingPlan,
    advance,
    check_steps,
    draw_compute,
    draw_faults,
    draw_network,
    draw_steps,
    drift,
    entered,
    layer_of,
    simulate_plan,
    weights_of,
    with_faults,
)

#: Learning rate, momentum and Nesterov of each outer optimizer; None averages the weights.
OUTERS: Final[dict[str, tuple[float, float, bool] | None]] = {
    "none": None,
    "default": (0.7, 0.9, True),
    "dyadic": (0.5, 0.5, True),
    "heavy ball": (0.25, 0.5, False),
}


@dataclass(frozen=True, kw_only=True)
class Plan(TrainingPlan):
    """One run, in which each rank makes 12 steps by default.

    Attributes:
        outer: Key of ``OUTERS``.
        uses_tokens: Whether the ranks report tokens, as weights.
        selects: Whether the policy is SelectiveDiLoCoPolicy, with the gains of :func:`gain`.
        wire: Codec of the differences; int8 and others have error feedback. The oracle knows only float32.
    """

    every: int = 3
    fragments: int = 1
    overlap_steps: int = 0
    mixing: float = 0.0
    warmup_steps: int = 0
    outer: str = "default"
    uses_tokens: bool = False
    wire: str = "float32"
    selects: bool = False

    @property
    def options(self) -> dict[str, Any]:
        chosen = OUTERS[self.outer]
        outer: Any = None
        if chosen is not None:
            lr, momentum, nesterov = chosen
            outer = functools.partial(torch.optim.SGD, lr=lr, momentum=momentum, nesterov=nesterov)
        return {
            "average_every": self.every,
            "outer_optimizer": outer,
            "fragments": self.fragments,
            "overlap_steps": self.overlap_steps,
            "mixing": self.mixing,
            "warmup_steps": self.warmup_steps,
            "weights": "tokens" if self.uses_tokens else "equal",
            "wire": self.wire,
            "error_feedback": None if self.wire == "float32" else 0.9,
            **({"outlier_factor": math.inf} if self.selects else {}),
        }


def gain(rank: int, number: int) -> float:
    """Return the gain that a rank reports for a round: a third of the gains are not positive."""
    return ((rank * 5 + number * 3) % 6 - 1) / 4


def tokens_of(rank: int, step: int) -> int:
    """Return the tokens of a step, whose ratio between ranks differs from round to round."""
    return rank + 1 + step % 2 * (step // 2 % 3)


async def stepped(policy: DiLoCoPolicy, rank: int, scores: Iterator[float]) -> StepInfo:
    """Make a step with some tokens; a selective policy evaluates the next scores."""
    count = tokens_for(policy, tokens_of(rank, policy.iteration))
    if isinstance(policy, SelectiveDiLoCoPolicy):
        return await policy.step(score=lambda: next(scores), tokens=count)
    return await policy.step(tokens=count)


class Record:
    """The results of all steps, the weights after them, and the donors of all applied rounds, by rank."""

    def __init__(self) -> None:
        self.infos: dict[int, list[StepInfo]] = defaultdict(list)
        self.weights: dict[int, list[Arrays]] = defaultdict(list)
        self.applied: dict[int, list[AverageApplied]] = defaultdict(list)
        self.without: set[int] = set()  # ranks whose start was ended by a loss

    def see(self, rank: int, event: PolicyEvent) -> None:
        """Record an average that a rank has applied; the callback ``on_event`` of its policy."""
        if isinstance(event, AverageApplied):
            self.applied[rank].append(event)

    def donors(self, killed: set[int]) -> tuple[dict[int, tuple[int, ...]], dict[int, int]]:
        """Return the donors of each round, and the step from which a killed rank differs from the others.

        A rank may apply a mean and die before any other rank has this mean. The others then decide the round again.
        """
        found: dict[int, tuple[int, ...]] = {}
        parted: dict[int, int] = {}
        for rank in sorted(self.applied, key=lambda rank: (rank in killed, -len(self.weights[rank]), rank)):
            for event in self.applied[rank]:
                donors = found.setdefault(event.round, event.donors)
                assert donors == event.donors or rank in killed, (
                    f"rank {rank}, round {event.round}: unexpected donors {event.donors}"
                )
                if donors != event.donors:
                    parted.setdefault(rank, event.iteration)
        return found, parted


async def train(world: ad.World, plan: Plan, record: Record) -> None:
    """Train on one rank, and record each step."""
    model = Layers(plan.dtype)
    optimizer = sgd(model)
    rank = world.rank
    kind = SelectiveDiLoCoPolicy if plan.selects else DiLoCoPolicy
    policy = kind(model, optimizer, on_event=functools.partial(record.see, rank), **plan.options)
    scores = itertools.chain.from_iterable((1.0, 1.0 + gain(rank, number)) for number in itertools.count(1))
    async with entered(policy, model, plan, world) as start:
        if start != "started":
            record.without.add(rank)
            return
        for step in range(plan.steps[rank]):
            await advance(plan, model, rank, step)
            info = await stepped(policy, rank, scores)
            record.infos[rank].append(info)
            record.weights[rank].append(weights_of(model))


class Oracle:
    """Computes the weights of all ranks step by step. ``donors`` are the donors of each round, by its number."""

    def __init__(self, plan: Plan, donors: dict[int, tuple[int, ...]], dtype: Any) -> None:
        self.plan, self.donors = plan, donors
        self.scalar = dtype
        first = [array.astype(dtype) for array in weights_of(Layers(plan.dtype))]
        self.own = {rank: [array.copy() for array in first] for rank in range(plan.ranks)}
        self.anchor = [array.copy() for array in first]
        self.buffer: list[Any] = [None] * len(first)
        self.tokens = np.zeros((plan.ranks, plan.fragments))
        self.versions = [0] * plan.fragments
        self.flight: dict[int, tuple[int, dict[int, Any]]] = {}  # by fragment: step of the application, captures
        self.captured_at: dict[int, int] = {}  # by round
        self.last_number = 0  # round that was merged last
        self.cosines: dict[int, float] = {}

    def places(self, fragment: int) -> list[int]:
        return [place for place in range(len(self.anchor)) if layer_of(place) % self.plan.fragments == fragment]

    def is_due(self, fragment: int, step: int) -> bool:
        plan = self.plan
        if step < plan.warmup_steps:
            return True
        since, offset = step + 1 - plan.warmup_steps, (fragment + 1) * plan.every // plan.fragments
        return since >= offset and (since - offset) % plan.every == 0

    def step(self, step: int) -> None:
        """Advance all ranks by one step."""
        for rank, own in self.own.items():
            for place, array in enumerate(own):
                array += drift(rank, step, place, array.shape).astype(self.scalar)
            self.tokens[rank] += tokens_of(rank, step) if self.plan.uses_tokens else 1
        self.apply(step)
        for fragment in range(self.plan.fragments):
            if self.is_due(fragment, step):
                tau = 0 if step < self.plan.warmup_steps else self.plan.overlap_steps
                taken = {
                    rank: ([own[place].copy() for place in self.places(fragment)], self.tokens[rank, fragment])
                    for rank, own in self.own.items()
                }
                self.tokens[:, fragment] = 0
                self.flight[fragment] = step + tau, taken
                self.captured_at[self.versions[fragment] * self.plan.fragments + fragment + 1] = step
        self.apply(step)

    def apply(self, step: int) -> None:
        for fragment in sorted(self.flight):
            at, taken = self.flight[fragment]
            if at <= step:
                del self.flight[fragment]
                self.merge(fragment, taken)
                self.mix(fragment, None if not self.plan.selects else self.donors.get(self.last_number, ()))

    def merge(self, fragment: int, taken: dict[int, Any]) -> None:
        self.last_number = number = self.versions[fragment] * self.plan.fragments + fragment + 1
        self.versions[fragment] += 1
        donors = self.donors.get(number, ())
        if not donors:
            return  # no living rank has applied this round
        weights = [taken[rank][1] if self.plan.uses_tokens else 1.0 for rank in donors]
        if self.plan.selects:
            gains = [gain(rank, number) for rank in donors]
            weights = [weight * own / max(gains) for weight, own in zip(weights, gains, strict=True)]
        chosen = OUTERS[self.plan.outer]
        for index, place in enumerate(self.places(fragment)):
            states = [taken[rank][0][index] for rank in donors]
            given = states if chosen is None else [self.anchor[place] - state for state in states]
            mean = self.scalar(0)
            for weight, each in zip(weights, given, strict=True):
                mean = mean + self.scalar(weight) * each
            mean = mean / self.scalar(sum(weights))
            self.anchor[place] = mean if chosen is None else self.outer(place, mean, *chosen)

    def outer(self, place: int, mean: Any, lr: float, momentum: float, nesterov: bool) -> Any:
        buffer = self.buffer[place]
        buffer = self.buffer[place] = mean if buffer is None else self.scalar(momentum) * buffer + mean
        return self.anchor[place] - self.scalar(lr) * (mean + self.scalar(momentum) * buffer if nesterov else buffer)

    def mix(self, fragment: int, donors: tuple[int, ...] | None) -> None:
        """Apply the anchor; ranks that are not among the donors, if given, keep no share of their own weights."""
        for rank, own in self.own.items():
            alpha = self.scalar(self.plan.mixing if donors is None or rank in donors else 0.0)
            for place in self.places(fragment):
                own[place] = alpha * own[place] + (self.scalar(1) - alpha) * self.anchor[place]


def run(plan: Plan, seed: int = 0) -> tuple[SimReport[Any], Record]:
    """Simulate a plan."""
    plan = dataclasses.replace(plan, steps=plan.steps or (12,) * plan.ranks)
    record = Record()
    report = simulate_plan(train, plan, plan, record, ranks=plan.ranks, seed=seed)
    check_steps(plan, record.infos, record.without)
    return report, record


def check(plan: Plan, record: Record, tolerance: Callable[[Oracle], float]) -> Oracle:
    """Compare all weights after each step with the oracle's."""
    steps = plan.steps or (12,) * plan.ranks
    donors, parted = record.donors(plan.killed)
    is_exact = tolerance is exactly
    dtype = np.float32 if is_exact and plan.dtype == torch.float32 else np.float64
    oracle = Oracle(plan, donors, dtype)
    for step in range(max(steps)):
        oracle.step(step)
        allowed = tolerance(oracle)
        for rank, weights in record.weights.items():
            if step >= min(len(weights), parted.get(rank, len(weights))):
                continue
            for place, (mine, right) in enumerate(zip(weights[step], oracle.own[rank], strict=True)):
                error = np.abs(mine - right).max()
                assert error <= allowed, (
                    f"rank {rank}, step {step}, parameter {place}: the error is {error}, allowed {allowed}"
                )
    for number, ranks in donors.items():
        at = oracle.captured_at[number]
        present = {rank for rank in range(plan.ranks) if rank not in plan.killed | record.without and steps[rank] > at}
        if plan.selects:
            assert all(gain(rank, number) > 0 for rank in ranks), (
                f"round {number}: all donors, {ranks}, must have a positive gain"
            )
            present = {rank for rank in present if gain(rank, number) > 0}
        assert present <= set(ranks), f"round {number}, captured at step {at}, lacks ranks {present - set(ranks)}"
    return oracle


def exactly(_: Oracle) -> float:
    return 0.0


def within(oracle: Oracle) -> float:
    """Return 1e-12 for float64, and for float32 two roundings of the largest weight per round."""
    if oracle.plan.dtype == torch.float64:
        return 1e-12
    largest = max(float(np.abs(array).max()) for array in (*oracle.anchor, *oracle.own[0]))
    return 2 * float(np.finfo(np.float32).eps) * max(1.0, largest) * (2 + sum(oracle.versions))


def draw_plan(seed: int) -> Plan:
    """Return a run with drawn options, network and faults."""
    rng = random.Random(f"diloco {seed}")
    ranks = rng.randint(2, 5)
    every = rng.randint(2, 6)
    fragments = rng.choice((1, 1, rng.randint(1, min(LAYER_COUNT, every))))
    steps = rng.randint(8, 16)
    network = draw_network(rng)
    return Plan(
        ranks=ranks,
        steps=draw_steps(rng, ranks, steps),
        every=every,
        fragments=fragments,
        overlap_steps=rng.choice((0, rng.randrange(every))),
        mixing=rng.choice((0.0, 0.0, 0.5, 0.25)),
        warmup_steps=rng.choice((0, 0, rng.randint(1, 4))),
        outer=rng.choice(tuple(OUTERS)),
        uses_tokens=rng.random() < 0.2,
        network=network,
        compute=draw_compute(rng, ranks),
        faults=tuple(draw_faults(rng, ranks)),
    )


def draw_selective_plan(seed: int) -> Plan:
    """Return the drawn run of a seed with SelectiveDiLoCoPolicy, and with options that it allows."""
    plan = draw_plan(seed)
    overlap_steps = min(plan.overlap_steps, plan.every // plan.fragments)
    outer = "default" if plan.outer == "none" else plan.outer
    return dataclasses.replace(plan, selects=True, overlap_steps=overlap_steps, outer=outer)


def scenario(seed: int, faults: Sequence[Fault] | None = None) -> SimReport[Any]:
    """Run one seed; AssertionError if a weight differs, or a rank is stuck."""
    report, *_ = seen_in(seed, faults)
    return report


def selective_scenario(seed: int, faults: Sequence[Fault] | None = None) -> SimReport[Any]:
    """Run one seed with SelectiveDiLoCoPolicy; AssertionError if a weight differs, or a rank is stuck."""
    report, *_ = seen_in(seed, faults, draw_selective_plan)
    return report


def seen_in(
    seed: int, faults: Sequence[Fault] | None = None, draw: Callable[[int], Plan] = draw_plan
) -> tuple[SimReport[Any], Plan, Oracle]:
    """Run one seed, and return its counts for the test of coverage."""
    plan = with_faults(draw(seed), faults)
    report, record = run(plan, seed)
    return report, plan, check(plan, record, within)
