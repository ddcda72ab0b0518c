"""Computes a rank's metric from its steps' losses, and checks the metric by which a trainer's ranks are judged."""

from __future__ import annotations

from typing import Any

import torch

from asyncdist import validation
from asyncdist.protocols.metrics import NOT_MEASURED, metric_as_number
from asyncdist.protocols.misuse import is_larger_better
from asyncdist.protocols.options import MetricMode


class RunningLoss:
    """Computes the mean of the losses since the last report.

    The mean is less noisy than a single batch's loss. A policy calls this object only when a report is due. At other
    steps, no rank waits for its GPU.
    """

    def __init__(self) -> None:
        self._total: Any = 0.0
        self._count = 0

    def add(self, loss: Any, count: int = 1, *, is_negated: bool = False) -> None:
        """Add the loss of a step: a number, or a tensor with one element, which is detached.

        Args:
            loss: Loss, or a score (larger is better) if ``is_negated``.
            count: Number of steps that the loss completes, or 0 for a part of a step's loss.
            is_negated: Whether to negate the value.

        Raises:
            TypeError, ValueError: The loss is neither a number nor a tensor with one element.
        """
        if isinstance(loss, torch.Tensor) and loss.numel() == 1 and not loss.is_complex():
            # On a CPU, item() is three times as fast as adding tensors, and avoids an imprecise sum in bfloat16.
            value: Any = loss.item() if loss.is_cpu else loss.detach().float()
        else:
            value = loss if type(loss) is float else metric_as_number(loss)
        self._total = self._total - value if is_negated else self._total + value
        self._count += count

    def reset(self) -> None:
        """Drop the added losses. Must be called when the weights with which they were measured are replaced."""
        self._total, self._count = 0.0, 0

    def __call__(self) -> Any:
        """Return the mean of the losses since the last call, or :data:`NOT_MEASURED` without losses."""
        mean = metric_as_number(self._total) / self._count if self._count else NOT_MEASURED
        self.reset()
        return mean


def warning_of_judge(monitor: str | None, option: str, mode: MetricMode) -> str:
    """Return a warning if the name of the metric for judging ranks contradicts ``mode``, otherwise an empty string.

    Args:
        monitor: Name of a logged metric, or None for the training loss.
        option: Name of the option that sets ``mode``.
        mode: Which values of the metric are better.

    Raises:
        TypeError, ValueError: ``monitor`` is not a name, or the training loss would be maximised.
    """
    if monitor is None:
        if mode == "max":
            allowed = "'min' without monitor=, because ranks are judged by their training loss; pass monitor= as well"
            validation.refuse(option, mode, allowed)
        return ""
    if not isinstance(monitor, str):
        validation.refuse("monitor", monitor, "None or the name of a logged metric", TypeError)
    direction = is_larger_better(monitor)
    if direction is None or mode not in ("min", "max") or direction is (mode == "max"):
        return ""
    better, cure = ("larger", "min") if mode == "max" else ("smaller", "max")
    return (
        f"averaging: {option}={mode!r} means that a {better} value of {monitor!r} is better, but the name means the "
        f"opposite, so good ranks would be treated as bad ones; pass {option}={cure!r}"
    )
