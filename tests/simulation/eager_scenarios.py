"""Simulates DiLoCo with eager outer steps, and compares each rank with an oracle in numpy, without and with faults.

The oracle is the formula of Kale et al. (2502.12996): with k ranks, the outer step of round t on rank i has the input
D_i(t) / k + [D(t - 1) - D_i(t - 1) / k], and the ranks' anchors are averaged at the end.

``scenario(seed)`` draws options, kills, restarts and other faults. In all runs:

- every rank that is not killed at the end completes its training, without an exception;
- each rank's contribution is in each mean once: with an outer learning rate of 1, without momentum, the anchor without
  the part of a round that is already in it is the same on all ranks after equally many rounds;
- all ranks that end together have equal anchors.
"""

from __future__ import annotations

import asyncio
import functools
import random
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final

import numpy as np
import torch
from scripts.population import sgd

import asyncdist as ad
from asyncdist.simulation import Fault, Kill, SimReport, simulate
from protocols import DiLoCoPolicy, StepInfo
from simulation.diloco_fault_scenarios import draw_plan as draw_fault_plan
from simulation.training_runs import Arrays, Layers, drift, layer_of, weights_of

STEP_S: Final = 0.01
#: Learning rate, momentum and Nesterov of each outer optimizer.
OUTERS: Final[dict[str, tuple[float, float, bool]]] = {
    "default": (0.7, 0.9, True),
    "dyadic": (0.5, 0.5, True),
    "heavy ball": (0.25, 0.5, False),
    "plain": (1.0, 0.0, False),
}


@dataclass(frozen=True, kw_only=True)
class Plan:
    """One run.

    Attributes:
        steps: Number of steps of each rank.
        outer: Key of ``OUTERS``.
        saves_at: Steps after which all ranks call ``policy.settle()``.
        safe: Rank that no fault kills.
    """

    ranks: int = 4
    steps: tuple[int, ...] = (12,) * 4
    every: int = 3
    fragments: int = 1
    mixing: float = 0.0
    outer: str = "dyadic"
    dtype: torch.dtype = torch.float64
    wire: str = "float32"
    merge: str = "mean"
    saves_at: tuple[int, ...] = ()
    safe: int = 0
    faults: tuple[Fault, ...] = ()

    @property
    def options(self) -> dict[str, Any]:
        lr, momentum, nesterov = OUTERS[self.outer]
        outer = functools.partial(torch.optim.SGD, lr=lr, momentum=momentum, nesterov=nesterov)
        return {
            "average_every": self.every,
            "fragments": self.fragments,
            "mixing": self.mixing,
            "outer_optimizer": outer,
            "wire": self.wire,
            "merge": self.merge,
            "eager": True,
        }


@dataclass
class Life:
    """Observations of one process of a rank.

    Attributes:
        weights: Weights after each step, and at the end.
        common: By fragment and number of merged rounds: the anchor without the parts that are in it too early.
        anchors: Anchors at the end.
    """

    infos: list[StepInfo] = field(default_factory=list)
    weights: list[Arrays] = field(default_factory=list)
    common: dict[tuple[int, int], Arrays] = field(default_factory=dict)
    anchors: list[Arrays] = field(default_factory=list)
    iteration: int = 0
    rounds: int = 0
    is_late: bool = False


Lives = dict[tuple[int, int], Life]


async def train(world: ad.World, plan: Plan, lives: Lives) -> None:
    """Train on one rank, and record each step."""
    life = lives.setdefault((world.rank, world.incarnation), Life())
    model = Layers(plan.dtype)
    policy = DiLoCoPolicy(model, sgd(model), **plan.options)
    try:
        async with policy:
            while policy.iteration < plan.steps[world.rank]:
                step = policy.iteration
                with torch.no_grad():
                    for place, parameter in enumerate(model.parameters()):
                        parameter.add_(torch.from_numpy(drift(world.rank, step, place, parameter.shape)))
                await asyncio.sleep(STEP_S * (1 + 0.2 * world.rank))
                life.infos.append(await policy.step())
                _note(life, policy)
                life.weights.append(weights_of(model))
                if step in plan.saves_at:
                    await policy.settle()
                    life.weights[-1] = weights_of(model)
    except ad.LateError:
        assert world.incarnation, "the policy had ended before the first process of this rank"
        life.is_late = True
        return
    life.weights.append(weights_of(model))
    life.anchors = [[anchor.numpy().copy() for anchor in fragment.anchors] for fragment in policy._fragments]
    life.iteration, life.rounds = policy.iteration, policy._pending_rounds.last_number()


def _note(life: Life, policy: DiLoCoPolicy) -> None:
    for number, each in enumerate(policy._fragments):
        rests = each._rest  # type: ignore[attr-defined]
        found = [(anchor - rest).numpy() for anchor, rest in zip(each.anchors, rests, strict=True)]
        life.common.setdefault((number, each.version), found)


def run(plan: Plan, seed: int = 0) -> tuple[SimReport[Any], Lives]:
    """Simulate a plan, and check that each rank ended as it must."""
    lives: Lives = {}
    report = simulate(train, plan, lives, ranks=plan.ranks, seed=seed, faults=plan.faults, until_s=1000.0)
    report.value()  # raises the exception of any rank
    for rank in set(range(plan.ranks)) - report.killed_ranks:
        life = lives[rank, max(incarnation for each, incarnation in lives if each == rank)]
        assert life.anchors or life.is_late, f"rank {rank} did not complete its training"
    return report, lives


class Oracle:
    """Computes the weights of all ranks step by step, without faults, in the dtype of the run."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self.scalar = np.float32 if plan.dtype == torch.float32 else np.float64
        first = [array.astype(self.scalar) for array in weights_of(Layers(plan.dtype))]
        ranks = range(plan.ranks)
        self.own = [[array.copy() for array in first] for _ in ranks]
        self.anchor = [[array.copy() for array in first] for _ in ranks]
        self.momentum: list[list[Any]] = [[None] * len(first) for _ in ranks]
        self.share = [[np.zeros_like(array) for array in first] for _ in ranks]  # D_i(t - 1) / k
        self.mean = [np.zeros_like(array) for array in first]  # D(t - 1)
        self.inputs: list[Arrays] = []  # of each rank in the last round, by the fragment's parameters
        self.differences: list[Arrays] = []

    def step(self, step: int) -> bool:
        """Advance all ranks by one step; return whether it had an outer step."""
        plan = self.plan
        for rank, own in enumerate(self.own):
            for place, array in enumerate(own):
                array += drift(rank, step, place, array.shape).astype(self.scalar)
        place = (step + 1) % plan.every
        due = [
            each for each in range(plan.fragments) if (each + 1) * plan.every // plan.fragments % plan.every == place
        ]
        for fragment in due:
            self.outer(fragment)
        if step in plan.saves_at:
            self.settle()
        return bool(due)

    def outer(self, fragment: int) -> None:
        plan, k = self.plan, self.scalar(self.plan.ranks)
        *factors, nesterov = OUTERS[plan.outer]
        lr, beta = map(self.scalar, factors)
        alpha = self.scalar(plan.mixing)
        places = [place for place in range(len(self.mean)) if layer_of(place) % plan.fragments == fragment]
        self.inputs, self.differences = [], []
        for rank in range(plan.ranks):
            self.inputs.append([])
            self.differences.append([])
            for place in places:
                difference = self.anchor[rank][place] - self.own[rank][place]
                given = difference / k + (self.mean[place] - self.share[rank][place])
                held = self.momentum[rank][place]
                held = self.momentum[rank][place] = given if held is None else beta * held + given
                moved = self.anchor[rank][place] - lr * (given + beta * held if nesterov else held)
                self.anchor[rank][place] = moved
                self.own[rank][place] = alpha * self.own[rank][place] + (self.scalar(1) - alpha) * moved
                self.share[rank][place] = difference / k
                self.inputs[-1].append(given)
                self.differences[-1].append(difference)
        for index, place in enumerate(places):
            total = self.scalar(0)
            for rank in range(plan.ranks):
                total = total + self.differences[rank][index]
            self.mean[place] = total / k

    def settle(self) -> None:
        """Replace all anchors by their mean, and keep each rank's progress."""
        k = self.scalar(self.plan.ranks)
        for place in range(len(self.mean)):
            total = self.scalar(0)
            for anchor in self.anchor:
                total = total + anchor[place]
            mean = total / k
            for own, anchor in zip(self.own, self.anchor, strict=True):
                own[place] = mean + (own[place] - anchor[place])
                anchor[place] = mean.copy()


def check(plan: Plan, lives: Lives, *, is_exact: bool) -> Oracle:
    """Compare all weights after each step, and at the end, with the oracle's."""
    oracle = Oracle(plan)
    for step in range(plan.steps[0]):
        oracle.step(step)
        _compare(plan, lives, oracle, step, is_exact)
    oracle.settle()
    _compare(plan, lives, oracle, plan.steps[0], is_exact)
    for rank in range(plan.ranks):
        assert all(map(_is_equal, lives[rank, 0].anchors, lives[0, 0].anchors)), (
            f"the anchor of rank {rank} differs from that of rank 0"
        )
    return oracle


def _compare(plan: Plan, lives: Lives, oracle: Oracle, step: int, is_exact: bool) -> None:
    largest = max(float(np.abs(array).max()) for own in (*oracle.own, *oracle.anchor) for array in own)
    eps = float(np.finfo(oracle.scalar).eps)
    allowed = 0.0 if is_exact else 4 * eps * max(1.0, largest) * (2 + step)
    for rank in range(plan.ranks):
        for place, (mine, right) in enumerate(zip(lives[rank, 0].weights[step], oracle.own[rank], strict=True)):
            error = np.abs(mine - right).max()
            assert error <= allowed, (
                f"rank {rank}, step {step}, parameter {place}: the error is {error}, allowed {allowed}"
            )


def _is_equal(mine: Arrays, theirs: Arrays) -> bool:
    return all(map(np.array_equal, mine, theirs))


# -- faults -----------------------------------------------------------------------------------------------------------


def draw_plan(seed: int) -> Plan:
    """Return a run with drawn options and faults."""
    rng = random.Random(f"eager {seed}")
    drawn = draw_fault_plan(seed)
    every = rng.choice((1, 2, 4))
    return Plan(
        ranks=drawn.ranks,
        steps=drawn.steps,
        every=every,
        fragments=rng.randint(1, every) if rng.random() < 0.4 else 1,
        mixing=rng.choice((0.0, 0.0, 0.5)),
        outer="plain",
        safe=drawn.safe,
        faults=drawn.faults,
    )


def scenario(seed: int, faults: Sequence[Fault] | None = None) -> SimReport[Any]:
    """Run one seed; AssertionError if the ranks do not agree."""
    plan = draw_plan(seed)
    if faults is not None:
        plan = replace(plan, faults=tuple(faults))
    report, lives = run(plan, seed)
    ended = {key: life for key, life in lives.items() if life.anchors}
    _check_common(ended)
    last: dict[tuple[int, int], tuple[tuple[int, int], Life]] = {}
    for key, life in ended.items():
        other, theirs = last.setdefault((life.iteration, life.rounds), (key, life))
        assert all(map(_is_equal, life.anchors, theirs.anchors)), f"the anchors of {key} and {other} differ at the end"
    return report


def _check_common(ended: Lives) -> None:
    """Compare the parts of the anchors that all ranks have after equally many rounds."""
    found: dict[tuple[int, int], tuple[tuple[int, int], Arrays]] = {}
    for key, life in ended.items():
        for place, mine in life.common.items():
            other, theirs = found.setdefault(place, (key, mine))
            for one, two in zip(mine, theirs, strict=True):
                error = np.abs(one - two).max()
                assert error < 1e-9, f"fragment and version {place}: {key} and {other} differ by {error}"


def kills(plan: Plan) -> int:
    """Return the number of kills in a plan."""
    return sum(isinstance(fault, Kill) for fault in plan.faults)
