"""Defines what the benchmark ``value`` trains: small tasks whose quality is known exactly.

Each learner is one rank's model, optimizer and data. All ranks of a run begin with equal weights and draw data of their
own. Nothing here knows a policy.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Protocol

import torch
from torch import nn

sys.path.append(str(Path(__file__).resolve().parent.parent / "hypergrid"))  # the demo's model is trained here, too


class Learner(Protocol):
    """Trains one rank's model."""

    @property
    def model(self) -> nn.Module:
        """The model, with the same initial weights on all ranks."""

    @property
    def optimizer(self) -> torch.optim.Optimizer:
        """The model's optimizer."""

    def step(self) -> None:
        """Train for one step, in plain torch."""

    def metric(self) -> float:
        """Return the rank's own judgement of its model; larger is better."""

    def take_new_weights(self) -> None:
        """Forget what was measured with the previous weights."""

    def quality(self) -> float:
        """Return the exact quality of the model; smaller is better."""

    def fresh_model(self) -> nn.Module:
        """Return a model of the same layout with new random weights."""


class GridLearner:
    """Trains torchgfn's ``TBGFlowNet`` on the demo's HyperGrid of 8 x 8 x 8 x 8 states.

    The metric is minus the running mean of the last losses. The quality is the L1 distance between the distribution of
    the model's samples and the one that the rewards ask for: 0 is perfect, 2 the worst.
    """

    def __init__(self, seed: int, rank: int) -> None:
        from train import LOSSES_IN_METRIC, build_env, build_model, train_step

        torch.manual_seed(seed)
        self._env = build_env()
        self.model, self.optimizer = build_model(self._env)
        torch.manual_seed(1000 * (seed + 1) + rank)
        self._train_step = train_step
        self._window = LOSSES_IN_METRIC
        self._mean_loss = 0.0
        self._loss_count = 0

    def step(self) -> None:
        """Learn from one batch of sampled trajectories."""
        loss, _ = self._train_step(self._env, self.model, self.optimizer)
        self._loss_count = min(self._loss_count + 1, self._window)
        self._mean_loss += (loss - self._mean_loss) / self._loss_count

    def metric(self) -> float:
        """Return minus the running mean of the losses."""
        return -self._mean_loss

    def take_new_weights(self) -> None:
        """Begin the running mean anew."""
        self._loss_count = 0

    def fresh_model(self) -> nn.Module:
        """Return a model of the same layout with new random weights."""
        from train import build_model

        model: nn.Module = build_model(self._env)[0]
        return model

    def quality(self) -> float:
        """Return the exact L1 distance; 2, the worst value, for a model that has no finite one."""
        from evaluate import l1_distance

        distance = l1_distance(self._env, self.model)
        return distance if math.isfinite(distance) else 2.0


class SpiralLearner:
    """Trains a small classifier to tell two noisy spirals apart, from 48 points of its own.

    The metric is minus the loss on 128 held-out points, which are the same on all ranks. The quality is the share of
    4,000 further points that the model takes for the other spiral.
    """

    SHARD_COUNT: Final = 48
    HELD_OUT_COUNT: Final = 128
    TEST_COUNT: Final = 4000
    BATCH_COUNT: Final = 16

    def __init__(self, seed: int, rank: int) -> None:
        held_out, test = (torch.Generator().manual_seed(100_000 + number) for number in (2 * seed, 2 * seed + 1))
        self._held_out = _spirals(self.HELD_OUT_COUNT, held_out)
        self._test = _spirals(self.TEST_COUNT, test)
        self._shard = _spirals(self.SHARD_COUNT, torch.Generator().manual_seed(1000 * (seed + 1) + rank))
        torch.manual_seed(seed)
        self.model = self.fresh_model()
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=3e-3)
        torch.manual_seed(1000 * (seed + 1) + rank)

    def step(self) -> None:
        """Learn from one batch of the rank's own points."""
        points, labels = self._shard
        chosen = torch.randint(len(points), (self.BATCH_COUNT,))
        loss = nn.functional.cross_entropy(self.model(points[chosen]), labels[chosen])
        self.optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        self.optimizer.step()

    @torch.no_grad()
    def metric(self) -> float:
        """Return minus the loss on the held-out points."""
        points, labels = self._held_out
        return -float(nn.functional.cross_entropy(self.model(points), labels))

    def take_new_weights(self) -> None:
        """Keep nothing: each metric is measured with the weights of its moment."""

    def fresh_model(self) -> nn.Module:
        """Return a model of the same layout with new random weights."""
        return nn.Sequential(nn.Linear(2, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 2))

    @torch.no_grad()
    def quality(self) -> float:
        """Return the share of test points that are classified wrongly."""
        points, labels = self._test
        return float((self.model(points).argmax(1) != labels).float().mean())


@dataclass(frozen=True, slots=True)
class Task:
    """Describes a task of the benchmark.

    Attributes:
        title: The heading of its charts.
        quality: The name of its quality, of which less is better.
        worst: The largest quality that is shown.
        make: Makes a learner from the run's seed and the rank.
    """

    title: str
    quality: str
    worst: float
    make: Callable[[int, int], Learner]


TASKS: Final = {
    "grid": Task("GFlowNet on HyperGrid", "L1 distance to the target distribution", 2.0, GridLearner),
    "spirals": Task("classifier, 48 points a rank", "share of test points classified wrongly", 0.5, SpiralLearner),
}


def _spirals(count: int, generator: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
    """Draw points near two spirals: float32 of shape (count, 2), and the number of each point's spiral."""
    labels = torch.arange(count) % 2
    turns = torch.rand(count, generator=generator)
    angles = 2 * torch.pi * 1.25 * turns + torch.pi * labels
    radii = 0.2 + turns
    points = torch.stack([radii * angles.cos(), radii * angles.sin()], 1)
    return points + 0.06 * torch.randn(count, 2, generator=generator), labels
