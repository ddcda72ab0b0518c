"""Simulates asynchronous DiLoCo with faults, and compares each rank's weights after each step with an oracle.

The oracle is a second implementation in numpy. It takes from the run only the order of events: the donors of each
version, and the step in which a rank has applied a version. It computes all weights itself.
"""

from __future__ import annotations

import asyncio
import functools
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, Final

import numpy as np
import torch
from scripts.population import sgd

import asyncdist as ad
from asyncdist.protocols.async_diloco.anchor import Anchor, Contribution, Outcome
from asyncdist.simulation import (
    Compute,
    Fault,
    Kill,
    Network,
    SimReport,
    simulate,
)
from protocols import AsyncDiLoCoPolicy, AsyncDiLoCoStatistics, StepInfo
from simulation.diloco_scenarios import Arrays, Layers, drift, weights_of

#: Learning rate, momentum and Nesterov of each outer optimizer. Products with the dyadic ones are exact.
OUTERS: Final[dict[str, tuple[float, float, bool]]] = {
    "default": (0.07, 0.9, True),
    "dyadic": (0.5, 0.5, True),
    "plain": (0.25, 0.0, False),
}


@dataclass(frozen=True, kw_only=True)
class Plan:
    """One run.

    Attributes:
        steps: Iteration at which each rank ends.
        uses_tokens: Whether rank r reports r + 1 tokens per step, as weights.
    """

    ranks: int = 4
    steps: tuple[int, ...] = ()
    every: int = 3
    outer: str = "dyadic"
    quorum: int = 1
    grace_s: float = 0.0
    late: str = "skip"
    mirror_every: int | None = None
    uses_tokens: bool = False
    dtype: torch.dtype = torch.float64
    step_s: float = 0.01
    network: Network = field(default_factory=Network)
    compute: Compute = field(default_factory=Compute)
    faults: tuple[Fault, ...] = ()

    @property
    def options(self) -> dict[str, Any]:
        lr, momentum, nesterov = OUTERS[self.outer]
        return {
            "average_every": self.every,
            "outer_optimizer": functools.partial(torch.optim.SGD, lr=lr, momentum=momentum, nesterov=nesterov),
            "quorum": self.quorum,
            "grace_s": self.grace_s,
            "late": self.late,
            "mirror_every": self.mirror_every,
            "weights": "tokens" if self.uses_tokens else "equal",
        }

    @property
    def killed(self) -> set[int]:
        return {fault.rank for fault in self.faults if isinstance(fault, Kill)}


@dataclass
class Life:
    """The steps of one process of a rank.

    Attributes:
        first: Iteration, and weights, at which the process has begun.
        infos, weights: Result of each step, and the weights after it.
        version: Version of the anchor from which it has begun.
    """

    first: tuple[int, Arrays] = (0, [])
    infos: list[StepInfo] = field(default_factory=list)
    weights: list[Arrays] = field(default_factory=list)
    version: int = 0
    statistics: AsyncDiLoCoStatistics | None = None


class Record:
    """The lives of all processes, by rank and incarnation, and the lineage of the anchor's versions.

    Attributes:
        lineage: For each version from 1, the rank and the weight of each finite contribution.
    """

    def __init__(self) -> None:
        self.lives: dict[tuple[int, int], Life] = defaultdict(Life)
        self.without: set[int] = set()  # ranks whose start was ended by a loss
        self.late: set[int] = set()  # restarted ranks that found no running policy
        self.lineage: list[list[tuple[int, float]]] = []

    def note(self, version: int, given: Sequence[Contribution]) -> None:
        del self.lineage[version - 1 :]
        self.lineage.append([(each.rank, each.weight) for each in given if np.isfinite(each.norm)])


@contextmanager
def noted_steps(record: Record) -> Iterator[None]:
    """Record each step of an anchor, on whichever rank."""
    step = Anchor.step

    async def noting(self: Anchor, contributions: Sequence[Contribution], member_count: int) -> Outcome:
        record.note(self.version + 1, contributions)
        return await step(self, contributions, member_count)

    try:
        Anchor.step = noting  # type: ignore[method-assign]
        yield
    finally:
        Anchor.step = step  # type: ignore[method-assign]


async def train(world: ad.World, plan: Plan, record: Record) -> None:
    """Train on one rank, and record each step."""
    model, rank = Layers(plan.dtype), world.rank
    life = record.lives[rank, world.incarnation]
    policy = AsyncDiLoCoPolicy(model, sgd(model), **plan.options)
    try:
        await policy.__aenter__()
    except ad.RankLostError:
        assert plan.killed
        record.without.add(rank)
        return
    except (ad.ClosedError, ad.LateError):
        assert world.incarnation
        record.late.add(rank)
        return
    life.first, life.version = (policy.iteration, weights_of(model)), policy.statistics().version
    while policy.iteration < plan.steps[rank]:
        with torch.no_grad():
            for place, parameter in enumerate(model.parameters()):
                parameter.add_(torch.from_numpy(drift(rank, policy.iteration, place, parameter.shape)).to(plan.dtype))
        await asyncio.sleep(plan.step_s * (1 + 0.2 * rank))
        info = await policy.step(tokens=rank + 1)
        life.infos.append(info)
        life.weights.append(weights_of(model))
    before = weights_of(model)
    await policy.__aexit__(None, None, None)
    life.statistics = policy.statistics()
    assert all(map(np.array_equal, before, weights_of(model))), "the weights changed outside step"


class Worker:
    """The oracle's copy of one process: it trains, captures its differences, and applies the versions that it gets."""

    def __init__(self, oracle: Oracle, rank: int, life: Life) -> None:
        self.oracle, self.rank, self.life = oracle, rank, life
        self.base = oracle.anchors[life.version]
        self.own = [array.copy() for array in (self.base if life.version else oracle.anchors[0])]
        self.captured: Arrays = []
        self.captured_at = -1
        self.step, self.since, self.tokens = 0, 0, 0.0
        self.is_outstanding = False

    def contribution(self) -> tuple[Arrays, float]:
        """Train up to the next capture; return the difference and the number of tokens."""
        while self.step < len(self.life.infos):
            found = self.next_step()
            if found is not None:
                return found
        raise AssertionError(f"rank {self.rank} has made no further contribution")

    def next_step(self) -> tuple[Arrays, float] | None:
        """Make one step, and compare the weights; return the contribution if there is one."""
        plan, info, iteration = self.oracle.plan, self.life.infos[self.step], self.life.first[0] + self.step
        for place, array in enumerate(self.own):
            array += drift(self.rank, iteration, place, array.shape).astype(array.dtype)
        self.since += 1
        self.tokens += self.rank + 1
        found = None
        if info and self.is_outstanding:
            self.apply(info.round, iteration)
            info = StepInfo()
        if self.since >= plan.every and not self.is_outstanding:
            self.captured, self.captured_at = [array.copy() for array in self.own], iteration
            found = [base - own for base, own in zip(self.base, self.own, strict=True)], self.tokens
            self.since, self.tokens, self.is_outstanding = 0, 0.0, True
        if info:  # with late="wait", the version contains the contribution that was just captured
            assert found is not None, f"rank {self.rank}, step {iteration}: applied {info.round} without contribution"
            self.oracle.pending[self.rank] = found
            return self.later(info.round, iteration, found)
        self.compare(iteration)
        self.step += 1
        return found

    def later(self, version: int, iteration: int, found: tuple[Arrays, float]) -> tuple[Arrays, float]:
        """Apply the version when it is known."""
        self.oracle.later[self.rank] = version, iteration
        return found

    def complete(self) -> None:
        """Apply a version that has become known."""
        version, iteration = self.oracle.later.pop(self.rank)
        self.apply(version, iteration)
        self.compare(iteration)
        self.step += 1

    def apply(self, version: int, iteration: int) -> None:
        self.base, self.is_outstanding = self.oracle.anchors[version], False
        if self.captured_at == iteration:
            self.own = [array.copy() for array in self.base]
        else:
            self.own = [
                own - (captured - new) for own, captured, new in zip(self.own, self.captured, self.base, strict=True)
            ]

    def compare(self, iteration: int) -> None:
        for place, (mine, right) in enumerate(zip(self.life.weights[self.step], self.own, strict=True)):
            error = np.abs(mine - right).max()
            allowed = self.oracle.tolerance
            assert error <= allowed, f"rank {self.rank}, step {iteration}, parameter {place}: {error} > {allowed}"


class Oracle:
    """Computes all anchors in the order of their versions, and all weights."""

    def __init__(self, plan: Plan, record: Record, tolerance: float) -> None:
        self.plan, self.tolerance = plan, tolerance
        self.anchors: list[Arrays] = [weights_of(Layers(plan.dtype))]
        self.buffer: Arrays = []
        self.applied: list[Arrays] = []  # all differences
        self.pending: dict[int, Any] = {}
        self.later: dict[int, tuple[int, int]] = {}
        self.workers = {
            rank: Worker(self, rank, life) for (rank, incarnation), life in record.lives.items() if not incarnation
        }
        for donors in record.lineage:
            self.make_version(donors)
            for rank in list(self.later):
                if self.later[rank][0] < len(self.anchors):
                    self.workers[rank].complete()
        for worker in self.workers.values():
            while worker.step < len(worker.life.infos):
                worker.next_step()

    def make_version(self, donors: Sequence[tuple[int, float]]) -> None:
        given = [(self.workers[rank].contribution(), weight) for rank, weight in donors]
        self.applied += [difference for (difference, _), _ in given]
        if not given:
            self.anchors.append(self.anchors[-1])
            return
        lr, momentum, nesterov = OUTERS[self.plan.outer]
        scalar = self.anchors[0][0].dtype.type
        weights = [scalar(tokens if self.plan.uses_tokens else 1.0) for (_, tokens), _ in given]
        assert [float(weight) for weight in weights] == [weight for _, weight in donors]
        mean = []
        for place in range(len(self.anchors[0])):
            total: Any = scalar(0)
            for ((difference, _), _), weight in zip(given, weights, strict=True):
                total = total + weight * difference[place]
            mean.append(total / scalar(sum(weights)))
        if not self.buffer:
            self.buffer = mean
        else:
            self.buffer = [scalar(momentum) * own + new for own, new in zip(self.buffer, mean, strict=True)]
        if not momentum:
            change = mean
        elif nesterov:
            change = [new + scalar(momentum) * own for new, own in zip(mean, self.buffer, strict=True)]
        else:
            change = self.buffer
        self.anchors.append([own - scalar(lr) * each for own, each in zip(self.anchors[-1], change, strict=True)])


def run(plan: Plan, seed: int = 0) -> tuple[SimReport, Record]:
    """Simulate a plan, and check that each contribution of a rank that was not killed is applied exactly once."""
    plan = replace(plan, steps=plan.steps or (18,) * plan.ranks)
    record = Record()
    with noted_steps(record):
        report = simulate(
            train,
            plan,
            record,
            ranks=plan.ranks,
            seed=seed,
            network=plan.network,
            compute=plan.compute,
            faults=plan.faults,
            strict=not plan.killed,
            until_s=1e4,
        )
    for rank, result in enumerate(report.results):
        if isinstance(result, BaseException) and rank not in plan.killed:
            raise AssertionError(f"rank {rank} ended with {result!r}") from result
    counts = Counter(rank for donors in record.lineage for rank, _ in donors)
    for (rank, _), life in record.lives.items():
        if rank not in plan.killed | record.without:
            assert life.statistics is not None, f"rank {rank} has not ended"
            assert life.first[0] + len(life.infos) == plan.steps[rank]
            made = life.statistics.contribution_count
            assert counts[rank] == made, f"rank {rank}: {made} contributions, of which {counts[rank]} were applied"
    return report, record


def check(plan: Plan, record: Record, tolerance: float = 0.0) -> Oracle:
    """Compare all weights after each step with the oracle's. For runs without failover."""
    return Oracle(replace(plan, steps=plan.steps or (18,) * plan.ranks), record, tolerance)
