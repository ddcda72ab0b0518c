"""Converts a rank's metric, which may be a number, a tensor or a callable, to a float."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, Final, TypeAlias

import numpy as np
import torch

#: Metric passed to ``step``, or a callable that returns the metric and is called only when a report is due.
Metric: TypeAlias = float | int | torch.Tensor
MetricSource: TypeAlias = Metric | Callable[[], Metric] | None

#: Result of a callable metric if there is no new measurement. Nothing is then reported.
NOT_MEASURED: Final[Any] = object()


def given_metric(
    local_metric: MetricSource, loss: MetricSource, score: MetricSource, metric_mode: str
) -> tuple[MetricSource, bool]:
    """Return the metric passed to ``step``, and whether its direction is opposite to ``metric_mode``.

    Raises:
        TypeError: More than one metric was passed.
    """
    given = {"local_metric": local_metric, "loss": loss, "score": score}
    names = [name for name, value in given.items() if value is not None]
    if len(names) > 1:
        raise TypeError(f"only one of local_metric, loss and score may be passed to step(), got {' and '.join(names)}")
    is_opposite = names == (["score"] if metric_mode == "min" else ["loss"])
    return (given[names[0]] if names else None), is_opposite


def mean_of(metrics: Sequence[float]) -> float:
    """Return the mean of the metrics, which is NaN or infinite if a metric is not finite."""
    try:
        return math.fsum(metrics) / len(metrics)
    except (OverflowError, ValueError):  # the sum is too large, or contains infinities of both signs
        return sum(metric / len(metrics) for metric in metrics)


def negated(source: MetricSource) -> Callable[[], float]:
    """Return a callable that returns the negated metric."""
    return lambda: -due_metric(source, 0)


def measured(source: MetricSource) -> tuple[MetricSource, bool]:
    """Return the metric, after calling it if it is callable, and whether it is a new measurement."""
    given = source() if callable(source) and not isinstance(source, torch.Tensor) else source
    return given, given is not NOT_MEASURED


def due_metric(source: MetricSource, iteration: int) -> float:
    """Return a metric as a float, after calling it if it is callable.

    Raises:
        TypeError: The metric is not a number.
        ValueError: No metric was passed, or the metric is a complex tensor or a tensor of several numbers.
    """
    if source is None:
        raise ValueError(
            f"step() must get a metric at iteration {iteration}, where one is due, got None; pass a number or a "
            "callable"
        )
    return metric_as_number(source() if callable(source) and not isinstance(source, torch.Tensor) else source)


def metric_as_number(value: Any) -> float:
    """Convert a metric to a float. Detach it first if it is a tensor.

    Raises:
        TypeError: The value is not a number.
        ValueError: The value is a tensor of several numbers, or a complex tensor.
    """
    if isinstance(value, torch.Tensor):
        if value.numel() != 1 or value.is_complex():
            raise ValueError(
                f"metric must be one real number, got a tensor of shape {tuple(value.shape)} and dtype {value.dtype}"
            )
        return float(value.detach())
    try:
        if isinstance(value, (str, bytes, bytearray)) or np.iscomplexobj(value):  # numpy would drop imaginary parts
            raise TypeError
        if isinstance(value, np.ndarray):
            value = value.reshape(())
        return float(value)
    except (TypeError, ValueError, OverflowError):
        raise TypeError(
            f"metric must be a number, a 0-d tensor, or a callable that returns one, got {value!r:.80}"
        ) from None
