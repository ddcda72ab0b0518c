"""Defines learners and judges, and makes them for models that a loss function trains.

A learner is one rank's model, optimizer and data. All ranks of a run begin with equal weights and draw their own data.
The judge of a run rates weights on held-out data, with which a user would choose a model, and on other test data, which
the tables report. This module does not know policies.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Final, Protocol

import torch
from torch import Tensor, nn
from torch.nn.utils import parameters_to_vector, vector_to_parameters

#: Loss of a model that gives no finite loss.
WORST_LOSS: Final = 1e6


class Learner(Protocol):
    """Trains one rank's model."""

    @property
    def model(self) -> nn.Module:
        """The model, with the same initial weights on all ranks."""

    @property
    def optimizer(self) -> torch.optim.Optimizer:
        """The model's optimizer."""

    @property
    def usual_rate(self) -> float:
        """The learning rate of a rank whose rate no setting changes."""

    def gradients(self) -> None:
        """Compute the gradients of one step, from the rank's own data."""

    def held_out_loss(self) -> float:
        """Return the loss on held-out data, which are the same on all ranks."""

    def own_loss(self) -> float:
        """Return the running mean of the losses on the rank's own data."""


class Judge(Protocol):
    """Rates the weights of a run's models; smaller is better."""

    def held_out(self, weights: Tensor) -> float:
        """Return the loss on the held-out data."""

    def test(self, weights: Tensor) -> float:
        """Return the quality that the tables report, on data that no rank and no user has seen."""


def weights_of(model: nn.Module) -> Tensor:
    """Return a copy of all parameters as one vector."""
    return parameters_to_vector(model.parameters()).detach().clone()


def finite(loss: float) -> float:
    """Return the loss, or :data:`WORST_LOSS` if it is not finite."""
    return loss if math.isfinite(loss) else WORST_LOSS


class ModelLearner:
    """Trains a model on batches that a function draws."""

    def __init__(
        self, model: nn.Module, lr: float, lr_factor: float, batch: Callable[[], Tensor], held_out: Callable[[], Tensor]
    ) -> None:
        self.model, self.usual_rate = model, lr
        self.optimizer = torch.optim.AdamW(model.parameters(), lr=lr * lr_factor, weight_decay=0.01, fused=True)
        self._batch, self._held_out = batch, held_out
        self._own_loss = math.nan

    def gradients(self) -> None:
        """Compute the gradients of one step."""
        self.optimizer.zero_grad()
        loss = self._batch()
        loss.backward()  # type: ignore[no-untyped-call]
        found = loss.item()
        self._own_loss = found if math.isnan(self._own_loss) else 0.9 * self._own_loss + 0.1 * found

    @torch.no_grad()
    def held_out_loss(self) -> float:
        """Return the loss on the held-out data."""
        return finite(self._held_out().item())

    def own_loss(self) -> float:
        """Return the running mean of the losses on the rank's own data."""
        return finite(self._own_loss)


class ModelJudge:
    """Rates weights with a model of the task's kind, by two loss functions of the model."""

    def __init__(self, model: nn.Module, held_out: Callable[[nn.Module], Tensor], test: Callable[[nn.Module], Tensor]):
        self._model, self._held_out, self._test = model, held_out, test

    @torch.no_grad()
    def held_out(self, weights: Tensor) -> float:
        """Return the loss on the held-out data."""
        vector_to_parameters(weights, self._model.parameters())
        return finite(self._held_out(self._model).item())

    @torch.no_grad()
    def test(self, weights: Tensor) -> float:
        """Return the loss on the test data."""
        vector_to_parameters(weights, self._model.parameters())
        return finite(self._test(self._model).item())
