"""Measures DiLoCo on ranks of different speeds: losses after equal virtual time, and after equal numbers of steps.

The experiment is from the notebook of Liu et al. (2401.09135): four ranks, whose steps take 0.58, 0.75, 1.51 and 3.33
s, learn to classify a mixture of 32 Gaussians in 512 dimensions into 4 classes, with AdamW and H = 20 steps between
contributions. The network has 256 hidden units instead of 65,000, and each rank draws new examples all the time, so
that it cannot memorise them.

The ranks are simulated. The training is real torch; the virtual time of a step is constant. The figures therefore do
not depend on the machine's speed, and equal seeds give equal figures. The loss is computed on 4096 other examples, with
rank 0's weights after its last average. For the method "one rank", rank 0 trains alone.

In the notebook, all methods make the same total number of steps. Under synchronous DiLoCo, the ranks wait for the
slowest rank, and make 30 % of the steps that asynchronous ranks make in the same time. The table has both comparisons,
each with the best tried outer learning rate.
"""

from __future__ import annotations

import asyncio
import functools
import statistics
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, Final

import simulations
import torch
from harness import Results, Row
from torch import Tensor, nn
from torch.nn import functional

import asyncdist as ad
from asyncdist.simulation import Compute
from protocols import AsyncDiLoCoPolicy, DelayedNesterov, DiLoCoPolicy, StalenessWeight

RANKS: Final = ()
#: Seconds per step of each rank.
STEPS_S: Final = (0.58, 0.75, 1.51, 3.33)
RANK_COUNT: Final = len(STEPS_S)
AVERAGE_EVERY: Final = 20
BATCH_COUNT: Final = 32
#: Training begins at this virtual time, after the collective start.
START_S: Final = 1.0
#: Steps per second of all ranks together: under DiLoCo, and if no rank waits.
SYNC_RATE: Final = RANK_COUNT / max(STEPS_S)
ASYNC_RATE: Final = sum(1 / step_s for step_s in STEPS_S)


@dataclass(frozen=True, slots=True)
class Settings:
    """Amount of work to simulate.

    Attributes:
        train_s: Virtual seconds of training.
        seeds: Number of seeds, which change the task, the first weights and the examples.
        dimensions: Length of an example.
        tries_all: Whether all outer learning rates of a method are tried, or only the middle one.
    """

    train_s: float
    seeds: int
    dimensions: int = 512
    tries_all: bool = True


FULL: Final = Settings(999.0, seeds=5)
QUICK: Final = Settings(333.0, seeds=2, dimensions=128, tries_all=False)


# -- the methods ------------------------------------------------------------------------------------------------------

Policy = AbstractAsyncContextManager[Any]
SGD = functools.partial(torch.optim.SGD, momentum=0.9, nesterov=True)


def _sync(model: nn.Module, optimizer: torch.optim.Optimizer, lr: float) -> Policy:
    return DiLoCoPolicy(model, optimizer, average_every=AVERAGE_EVERY, outer_optimizer=functools.partial(SGD, lr=lr))


def _naive(model: nn.Module, optimizer: torch.optim.Optimizer, lr: float, scale: float = RANK_COUNT**-0.5) -> Policy:
    """Update the momentum at each contribution. By default, contributions have the notebook's weight."""
    return AsyncDiLoCoPolicy(
        model,
        optimizer,
        average_every=AVERAGE_EVERY,
        outer_optimizer=functools.partial(SGD, lr=lr),
        correct=StalenessWeight(power=0.0, scale=scale),
        dynamic_steps=False,
    )


def _delayed(model: nn.Module, optimizer: torch.optim.Optimizer, lr: float, *, dynamic_steps: bool = False) -> Policy:
    return AsyncDiLoCoPolicy(
        model,
        optimizer,
        average_every=AVERAGE_EVERY,
        outer_optimizer=functools.partial(DelayedNesterov, lr=lr, momentum=0.9, delay=RANK_COUNT),
        dynamic_steps=dynamic_steps,
    )


@dataclass(frozen=True, slots=True)
class Method:
    """Describes a training method to compare.

    Attributes:
        make: Function that returns a policy for a model, an optimizer and an outer learning rate; None if rank 0 trains
            alone.
        lrs: Outer learning rates to try. The table shows the best one.
        rate: Total steps per second of all ranks.
    """

    make: Callable[[nn.Module, torch.optim.Optimizer, float], Policy] | None
    lrs: tuple[float, ...]
    rate: float = ASYNC_RATE


METHODS: Final = {
    "one rank": Method(None, (0.0,), 1 / STEPS_S[0]),
    "DiLoCo": Method(_sync, (0.35, 0.7, 1.4), SYNC_RATE),
    "async, Nesterov": Method(_naive, (0.07, 0.14, 0.35)),
    "async, Nesterov, DiLoCo's lr": Method(functools.partial(_naive, scale=1.0), (0.7,)),
    "async, delayed Nesterov": Method(_delayed, (0.35, 0.7, 1.4)),
    "async, delayed Nesterov, dynamic steps": Method(functools.partial(_delayed, dynamic_steps=True), (0.35, 0.7, 1.4)),
}


# -- the task ---------------------------------------------------------------------------------------------------------


class Gaussians:
    """Mixture of 32 Gaussians, eight for each of four classes, with centres of length 1."""

    CLUSTERS: Final = 32
    CLASSES: Final = 4

    def __init__(self, seed: int, dimensions: int, deviation: float = 0.5) -> None:
        self._deviation = deviation
        generator = torch.Generator().manual_seed(seed)
        self._centres = functional.normalize(torch.randn(self.CLUSTERS, dimensions, generator=generator))

    def draw(self, count: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        """Return examples and their classes."""
        clusters = torch.randint(self.CLUSTERS, (count,), generator=generator)
        return self._near(clusters, generator), clusters // (self.CLUSTERS // self.CLASSES)

    def draw_of(self, classes: Tensor, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        """Return one example of each of the given classes, and the classes."""
        per_class = self.CLUSTERS // self.CLASSES
        within = torch.randint(per_class, (len(classes),), generator=generator)
        return self._near(classes * per_class + within, generator), classes

    def _near(self, clusters: Tensor, generator: torch.Generator) -> Tensor:
        noise = torch.randn(len(clusters), self._centres.shape[1], generator=generator)
        return self._centres[clusters] + self._deviation * noise


class Learner:
    """Model and inner optimizer of a rank, and its own examples."""

    def __init__(self, seed: int, rank: int, dimensions: int) -> None:
        self._task = Gaussians(seed, dimensions)
        self._generator = torch.Generator().manual_seed(1000 * (seed + 1) + rank)
        self._others = self._task.draw(4096, torch.Generator().manual_seed(500 + seed))
        torch.manual_seed(seed)  # equal first weights on all ranks
        self.model = nn.Sequential(nn.Linear(dimensions, 256), nn.ReLU(), nn.Linear(256, Gaussians.CLASSES))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=2e-4, weight_decay=0.01)
        self.taken = [parameter.detach().clone() for parameter in self.model.parameters()]

    def step(self) -> None:
        """Make one step of training."""
        examples, classes = self._task.draw(BATCH_COUNT, self._generator)
        self.optimizer.zero_grad()
        functional.cross_entropy(self.model(examples), classes).backward()  # type: ignore[no-untyped-call]
        self.optimizer.step()

    @torch.no_grad()
    def take(self) -> None:
        """Store the current weights for the next evaluation."""
        for own, parameter in zip(self.taken, self.model.parameters(), strict=True):
            own.copy_(parameter)

    @torch.no_grad()
    def loss(self) -> float:
        """Return the loss of the stored weights."""
        names = [name for name, _ in self.model.named_parameters()]
        examples, classes = self._others
        outputs = torch.func.functional_call(self.model, dict(zip(names, self.taken, strict=True)), (examples,))
        return functional.cross_entropy(outputs, classes).item()


# -- one run ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Run:
    """Identifies one simulated training run."""

    method: str
    lr: float
    seed: int
    settings: Settings


@dataclass(frozen=True, slots=True)
class Ended:
    """The results of a rank.

    Attributes:
        losses: Losses after as many steps of all ranks as under DiLoCo, and at the end of the time.
        staleness: Staleness of each of the rank's contributions, in versions.
    """

    losses: tuple[float, ...]
    steps: int
    staleness: tuple[int, ...]


async def _train(world: ad.World, run: Run) -> Ended:
    """Train one rank until the virtual time is over."""
    make, rate = METHODS[run.method].make, METHODS[run.method].rate
    learner = Learner(run.seed, world.rank, run.settings.dimensions)
    step_count, losses, staleness = 0, list[float](), list[int]()
    marks_s = [run.settings.train_s * SYNC_RATE / rate, run.settings.train_s]
    if make is None and world.rank:
        return Ended((), 0, ())
    async with nullcontext() if make is None else make(learner.model, learner.optimizer, run.lr) as policy:
        await asyncio.sleep(START_S - world.time())  # until all ranks have started
        while len(losses) < len(marks_s):
            learner.step()
            info = await (policy.step() if policy else world.safe_point())
            while len(losses) < len(marks_s) and world.time() - START_S >= marks_s[len(losses)]:
                losses.append(learner.loss() if world.rank == 0 else 0.0)
            step_count += 1
            if info:
                staleness.append(max(0, info.staleness_versions))  # -1 if unknown
            if info or policy is None:
                learner.take()
    return Ended(tuple(losses), step_count, tuple(staleness))


def simulate(run: Run) -> Results:
    """Simulate a run, and return its losses, steps and staleness."""
    factors = {rank: step_s / STEPS_S[0] for rank, step_s in enumerate(STEPS_S)}
    compute = Compute(step_s=STEPS_S[0], factors=factors, overrun_probability=0.0)
    report = ad.simulate(_train, run, ranks=RANK_COUNT, seed=run.seed, compute=compute)
    ended = report.results
    stale = [each for rank in ended for each in rank.staleness[1:]]  # dynamic steps begin after the first contribution
    equal_steps, equal_time = ended[0].losses
    return {
        "equal_steps": equal_steps,
        "equal_time": equal_time,
        "steps": sum(rank.steps for rank in ended),
        "staleness": statistics.mean(stale) if stale else 0.0,
        "staleness_max": max(stale, default=0),
    }


# -- all of them ------------------------------------------------------------------------------------------------------


def measure(settings: Settings) -> Results:
    """Return the figures of each seed's run, keyed by method and outer learning rate."""
    runs = [
        Run(name, lr, seed, settings)
        for name, method in METHODS.items()
        for lr in _tried(method, settings)
        for seed in range(settings.seeds)
    ]
    results: Results = {name: {str(lr): [] for lr in _tried(method, settings)} for name, method in METHODS.items()}
    for run, figures in simulations.simulated(simulate, runs):
        results[run.method][str(run.lr)].append(figures)
    return results


def _tried(method: Method, settings: Settings) -> tuple[float, ...]:
    middle = len(method.lrs) // 2
    return method.lrs if settings.tries_all else method.lrs[middle : middle + 1]


def rows(results: Results) -> list[Row]:
    """Return the table's rows: medians over seeds, with the best and the worst seed, at each row's best rate."""
    found = []
    for method, of_lr in results.items():
        runs, *_ = of_lr.values()
        found += [
            Row(f"{method}: loss, equal time", _best(of_lr, "equal_time"), f"{runs[0]['steps']} steps"),
            Row(f"{method}: loss, equal steps", _best(of_lr, "equal_steps")),
            Row(f"{method}: versions old", f"{_mean(runs, 'staleness'):.1f}, at most {_most(runs)}"),
        ]
    return found


def _best(of_lr: dict[str, list[Results]], figure: str) -> str:
    medians = {lr: statistics.median(run[figure] for run in runs) for lr, runs in of_lr.items()}
    lr = min(medians, key=lambda each: medians[each])
    values = sorted(run[figure] for run in of_lr[lr])
    chosen = f", lr {lr}" if float(lr) else ""
    return f"{medians[lr]:.3f} ({values[0]:.3f} to {values[-1]:.3f}){chosen}"


def _mean(runs: list[Results], figure: str) -> float:
    return float(statistics.mean(run[figure] for run in runs))


def _most(runs: list[Results]) -> int:
    return int(max(run["staleness_max"] for run in runs))


if __name__ == "__main__":
    simulations.main(measure, full=FULL, quick=QUICK)
