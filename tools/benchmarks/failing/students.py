"""The models of the benchmark ``goodput``: models that only count steps, and small ones that learn."""

from __future__ import annotations

import random
from typing import Protocol

import torch
from harness import optimizer_of
from staleness import HELD_OUT_COUNT, Learner, Shard
from torch import nn
from torch.nn import functional


class Student(Protocol):
    """The model of one process."""

    @property
    def model(self) -> nn.Module:
        """The model, with the same initial weights on all ranks."""

    @property
    def optimizer(self) -> torch.optim.Optimizer:
        """The optimizer of the model."""

    def step(self) -> None:
        """Make one step of training."""

    def score(self) -> float:
        """Return the value by which ranks are compared; larger is better."""

    def loss(self) -> float:
        """Return the loss that is reported."""


class Idle:
    """A model that does not learn. Any rank may be the best or the worst."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.model: nn.Module = nn.Linear(4, 4)
        self.optimizer = optimizer_of(self.model)

    def step(self) -> None:
        """Do nothing."""

    def score(self) -> float:
        """Return a random number."""
        return random.random()

    def loss(self) -> float:
        """Return 0."""
        return 0.0


class Classifier:
    """Learns the mixture of Gaussians of the benchmark ``staleness``; all ranks have the same kind of data.

    Args:
        seed: Seed of the task and of the first weights.
        source: Number of the process, from which its examples are drawn.
    """

    WIDTH = 32

    def __init__(self, seed: int, source: int) -> None:
        self._learner = Learner(seed, self.WIDTH)
        task = self._learner.task
        shares = torch.full((task.CLASSES,), 1 / task.CLASSES, dtype=torch.float64)
        self._shard = Shard(task, shares, 100_000 * (seed + 1) + source)
        self._others = task.draw(HELD_OUT_COUNT, torch.Generator().manual_seed(900 + seed))
        self.model, self.optimizer = self._learner.model, self._learner.optimizer

    def step(self) -> None:
        """Make one step of training."""
        self._learner.step(*self._shard.draw())

    def score(self) -> float:
        """Return the negative loss on held-out examples."""
        return -self._learner.loss()

    @torch.no_grad()
    def loss(self) -> float:
        """Return the loss on examples that do not determine the score."""
        examples, classes = self._others
        return functional.cross_entropy(self.model(examples), classes).item()
