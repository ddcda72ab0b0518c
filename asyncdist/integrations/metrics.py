"""Makes a rank's metric of the losses of its steps."""

from __future__ import annotations

import math
from typing import Any

import torch

from asyncdist.protocols.metrics import metric_as_number


class RunningLoss:
    """Is the mean of the losses since it was last asked for: a batch's own says little of a rank.

    A policy asks for it when a report is due, so no step waits for a GPU because of it.
    """

    def __init__(self) -> None:
        self._total: Any = 0.0
        self._count = 0

    def add(self, loss: Any, count: int = 1, *, is_negated: bool = False) -> None:
        """Add the loss of a step.

        Args:
            loss: A number, or a tensor with one element, whose graph is not kept.
            count: The number of steps to which it belongs: 0 for a part of a step's loss.
            is_negated: Whether its sign is changed: a score, of which a larger one is better.

        Raises:
            TypeError, ValueError: it is something else.
        """
        try:
            if isinstance(loss, torch.Tensor):
                # On a CPU it takes a third of what an addition of tensors does. A bfloat16 sum would soon stand still.
                value: Any = loss.item() if loss.is_cpu else loss.detach().float()
            else:
                value = loss
            self._total = self._total - value if is_negated else self._total + value
        except (TypeError, ValueError, RuntimeError):
            metric_as_number(loss)  # says what it should be
            raise
        self._count += count

    def reset(self) -> None:
        """Forget what was added: the weights are others now."""
        self._total, self._count = 0.0, 0

    def __call__(self) -> float:
        """Return the mean, infinity where nothing was added, and begin anew."""
        mean = metric_as_number(self._total) / self._count if self._count else math.inf
        self.reset()
        return mean
