"""Simulates one training of the benchmark ``value``, and rates the model that a user would take.

Each rank keeps its weights at some moments of virtual time, the marks: the weights after its last step that has ended
by then. Afterwards the model of each mark is chosen from the ranks' weights, and rated.
"""

from __future__ import annotations

import asyncio
import functools
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from harness import Results
from torch import Tensor

import asyncdist as ad
from asyncdist.simulation import Fault, Restart
from protocols import AsyncDiLoCoPolicy
from worth.learning import Judge, Learner, weights_of
from worth.methods import METHODS
from worth.settings import SETTINGS, START_S, STEP_S
from worth.tasks import TASKS


@dataclass(frozen=True, slots=True)
class Run:
    """Identifies one simulated training run.

    Attributes:
        value: Value of the method's tuned option.
        marks: Number of moments at which the model is rated, with equal distances; the last moment is the end.
        longer: Factor of the task's virtual seconds of training.
    """

    task: str
    setting: str
    method: str
    value: float
    seed: int
    marks: int = 1
    longer: float = 1.0

    @property
    def seconds(self) -> float:
        """Virtual seconds of training."""
        whole = TASKS[self.task].train_s * self.longer
        if METHODS[self.method].survives:
            return whole
        return whole - SETTINGS[self.setting].away_s(whole, self.seed)


@dataclass(slots=True)
class Kept:
    """Weights and counts that one rank's processes have kept.

    Attributes:
        weights: Weights, keyed by mark.
        steps: Number of steps.
        waited_s: Seconds that were not spent on computing.
    """

    weights: dict[int, Tensor]
    steps: int = 0
    waited_s: float = 0.0


async def _train(world: ad.World, run: Run, kept: list[Kept]) -> None:
    """Train one rank until the virtual time is over."""
    method, setting, own = METHODS[run.method], SETTINGS[run.setting], kept[world.rank]
    task = TASKS[run.task]
    learner = task.make(run.seed, world.rank, setting.shards, setting.rates.get(world.rank, 1.0))
    every = task.average_every
    marks_s = [START_S + run.seconds * (number + 1) / run.marks for number in range(run.marks)]
    try:
        async with method.make(learner, every, run.value) as policy:
            if world.incarnation:
                await world.safe_point()
            else:
                await asyncio.sleep(START_S - world.time())  # until all ranks have started
            await _steps(world, run, learner, policy, marks_s, own)
    except (ad.ClosedError, ad.RankLostError, ad.StartTimeoutError, ad.LateError):
        if world.time() < marks_s[-1]:
            raise  # at the end, other ranks may leave before this rank is admitted or ends


async def _steps(world: ad.World, run: Run, learner: Learner, policy: Any, marks_s: list[float], own: Kept) -> None:
    """Make steps until the time is over, and keep the weights of each mark."""
    method = METHODS[run.method]
    began_s, mark = world.time(), 0
    while marks_s[mark] < began_s:
        mark += 1
    latest = await _deployable(run, learner, policy, weights_of(learner.model))
    first = own.steps
    while mark < len(marks_s):
        learner.gradients()
        if method.averages_gradients:
            await world.safe_point()
            await ad.average_gradients(learner.model)
            learner.optimizer.step()
            info = None
        else:
            learner.optimizer.step()
            info = await (policy.step() if policy else world.safe_point())
        while mark < len(marks_s) and world.time() >= marks_s[mark]:
            own.weights[mark] = latest
            mark += 1
        if mark < len(marks_s):
            own.steps += 1
        latest = await _deployable(run, learner, policy, latest, is_new=bool(info))
    computed_s = (own.steps - first) * STEP_S * SETTINGS[run.setting].speeds.get(world.rank, 1.0)
    own.waited_s += max(0.0, marks_s[-1] - began_s - computed_s)


async def _deployable(run: Run, learner: Learner, policy: Any, latest: Tensor, *, is_new: bool = False) -> Tensor:
    """Return the weights that this rank offers to a user: its own weights, or the anchor."""
    if METHODS[run.method].deploys != "anchor":
        return weights_of(learner.model)
    if isinstance(policy, AsyncDiLoCoPolicy):
        async with policy.anchor_weights():
            return weights_of(learner.model)
    if is_new:
        async with nullcontext() if run.method.startswith("LocalSGD") else policy.anchor_weights():
            return weights_of(learner.model)
    return latest


def simulate(run: Run) -> Results:
    """Simulate a run, and return the model's quality at each mark, its held-out loss at the end, and its costs."""
    setting = SETTINGS[run.setting]
    rank_count = METHODS[run.method].ranks
    kept = [Kept({}) for _ in range(rank_count)]
    model_nbytes = _size(run.task)
    report = ad.simulate(
        _train,
        run,
        kept,
        ranks=rank_count,
        seed=run.seed,
        network=setting.network(model_nbytes),
        compute=setting.compute(rank_count),
        faults=_faults(run),
    )
    judge = TASKS[run.task].judge(run.seed)
    curve, held_out = list[float](), 0.0
    for mark in range(run.marks):
        weights, held_out = _taken(run, judge, [each.weights[mark] for each in kept if mark in each.weights])
        curve.append(judge.test(weights))
    return {
        "seconds": run.seconds,
        "curve": curve,
        "worst": max(judge.test(each.weights[run.marks - 1]) for each in kept if run.marks - 1 in each.weights),
        "held_out": held_out,
        "steps": [each.steps for each in kept],
        "models_sent": report.byte_count / rank_count / model_nbytes,
        "waited": max(each.waited_s for each in kept) / run.seconds,
    }


def _faults(run: Run) -> list[Fault]:
    """Return the faults of a run; none for a method that stops during a failure."""
    method = METHODS[run.method]
    faults = SETTINGS[run.setting].faults(run.seconds, run.seed) if method.survives else ()
    return [fault for fault in faults if method.rejoins or not isinstance(fault, Restart)]


def _taken(run: Run, judge: Judge, weights: list[Tensor]) -> tuple[Tensor, float]:
    """Return the weights of the model that a user takes, and its held-out loss."""
    deploys = METHODS[run.method].deploys
    if deploys == "anchor":
        return weights[0], judge.held_out(weights[0])
    if deploys == "mean":
        mean = torch.stack(weights).mean(0)
        return mean, judge.held_out(mean)
    losses = [judge.held_out(each) for each in weights]
    best = losses.index(min(losses))
    return weights[best], losses[best]


@functools.lru_cache(maxsize=8)
def _size(task: str) -> int:
    """Return the size of a task's model in bytes."""
    return weights_of(TASKS[task].make(0, 0, "iid", 1.0).model).nbytes


def final(run: Results) -> float:
    """Return the quality at the end."""
    return float(run["curve"][-1])


def time_to(run: Results, target: float) -> float | None:
    """Return the time of the first mark at which the quality is reached; None if it is not reached."""
    for number, quality in enumerate(run["curve"], start=1):
        if quality <= target:
            return float(run["seconds"]) * number / len(run["curve"])
    return None
