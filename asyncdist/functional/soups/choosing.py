"""Decides which models belong to a soup, given only their metrics.

Model soups: Wortsman et al., "Model soups: averaging weights of multiple fine-tuned models improves accuracy without
increasing inference time", 2022, arXiv:2203.05482. The greedy soup is recipe 1 of that paper. However, a model is added
only if the metric becomes strictly better.
"""

from __future__ import annotations

import inspect
import logging
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final, Literal, TypeAlias

import numpy as np
import torch

logger = logging.getLogger("asyncdist.soups")

#: Whether the smallest or the largest metric is best: "min" for a loss, "max" for a score.
Direction: TypeAlias = Literal["min", "max"]
SoupKind: TypeAlias = Literal["best", "uniform", "greedy"]
SOUP_KINDS: Final = ("uniform", "greedy")


@dataclass(frozen=True, slots=True)
class Soup:
    """Describes the weights that one of the soup functions has written into a model.

    A *member* is a rank for :func:`best_of_population`, otherwise an index into the list of sources.

    Attributes:
        kind: ``"best"`` for one member's weights, ``"uniform"`` for the mean of all members, ``"greedy"`` for the mean
            of the members that the greedy soup accepted.
        members: Members whose weights are in the mean, in the order in which they were added.
        metric: Loss or score of the weights, or None if it was not measured.
        metrics: Loss or score of each member's own weights, or NaN if the weights contain NaN.
        soup_metrics: Loss or score of each soup that was tried, by ``"uniform"`` and ``"greedy"``.
    """

    kind: SoupKind
    members: tuple[int, ...]
    metric: float | None
    metrics: Mapping[int, float]
    soup_metrics: Mapping[str, float]


def is_better(metric: float, other: float, direction: Direction) -> bool:
    """Return whether ``metric`` is finite and strictly better than ``other``."""
    return math.isfinite(metric) and (metric < other if direction == "min" else metric > other)


class GreedyChoice:
    """Builds the greedy soup: starts with the best member, and adds a member if the metric becomes strictly better.

    Args:
        metrics: Metric of each member's own weights. Members whose metric is not finite are omitted.

    Attributes:
        order: Members with a finite metric, best first. Members with equal metrics are in ascending order.
        members: Members of the soup, in the order in which they were added.

    Raises:
        ValueError: No member has a finite metric.
    """

    def __init__(self, metrics: Mapping[int, float], direction: Direction) -> None:
        sign = 1.0 if direction == "min" else -1.0
        finite = [member for member, metric in metrics.items() if math.isfinite(metric)]
        self.order = sorted(finite, key=lambda member: (sign * metrics[member], member))
        if not self.order:
            raise ValueError(f"at least one model must have a finite metric, got {list(metrics.values())}")
        self._direction: Direction = direction
        self._metrics = metrics
        self._next = 1
        self._has_warned = False
        self.members = [self.order[0]]
        self.metric = metrics[self.order[0]]

    @property
    def candidate(self) -> int | None:
        """The member to try next, or None if all members were tried."""
        return self.order[self._next] if self._next < len(self.order) else None

    def decide(self, metric: float) -> bool:
        """Add the candidate if ``metric``, measured with the candidate in the soup, is better.

        Return whether it was added.
        """
        candidate = self.order[self._next]
        self._next += 1
        if not is_better(metric, self.metric, self._direction):
            return False
        self.members.append(candidate)
        self.metric = metric
        return True

    def result(self, soups: Mapping[str, float]) -> Soup:
        """Return the best of three candidates: the best member, the uniform soup and the greedy soup.

        Args:
            soups: Metric of each soup that was tried, by name.
        """
        kind: SoupKind = "best"
        members, metric = self.members[:1], self._metrics[self.order[0]]
        for name, found in (("greedy", self.members), ("uniform", self.order)):
            if name in soups and is_better(soups[name], metric, self._direction):
                kind, members, metric = name, found, soups[name]  # type: ignore[assignment]
        return Soup(kind, tuple(members), metric, dict(self._metrics), dict(soups))

    def warn_of_distant_members(self, metric: float) -> None:
        """Log a warning, once, if the mean of several members is worse than every single member."""
        worst = self._metrics[self.order[-1]]
        if self._has_warned or metric == worst or is_better(metric, worst, self._direction):
            return
        self._has_warned = True
        logger.warning(
            "a mean of several of the %d models has the metric %g, worse than the worst model's %g: the models "
            "probably do not share a trajectory, so their mean is not a useful model",
            len(self.order),
            metric,
            worst,
        )


def given_metric(
    loss: Callable[..., Any] | None, score: Callable[..., Any] | None
) -> tuple[str, Callable[..., Any], Direction]:
    """Return the name, the function and the direction of the metric that was passed as ``loss`` or ``score``."""
    if (loss is None) == (score is None):
        raise TypeError(
            "exactly one of loss and score must be passed: a function of the model, smaller is better for loss and "
            f"larger is better for score; got {'neither' if loss is None else 'both'}"
        )
    name, function = ("score", score) if loss is None else ("loss", loss)
    if not callable(function):
        raise TypeError(f"{name} must be a function of the model, got {function!r:.80}")
    return name, _of_model(name, function), "min" if name == "loss" else "max"


def _of_model(name: str, function: Callable[..., Any]) -> Callable[[Any], Any]:
    """Return a function of the model. A function without arguments, as for ``step(loss=evaluate)``, is also accepted.

    The weights to evaluate are in the caller's model, so that such a function sees them. If the first parameter has a
    default, it is assumed to be another option, so the function is called without the model.
    """
    try:
        signature = inspect.signature(function)
    except ValueError:  # some builtins have no signature
        return function
    first = next(iter(signature.parameters.values()), None)
    takes_model = first is not None and first.default is first.empty and first.kind is not first.KEYWORD_ONLY
    try:
        signature.bind(*(None,) * takes_model)
    except TypeError:
        allowed = "callable with the model as its only argument, or without arguments"
        raise TypeError(f"{name} must be {allowed}, got {function!r:.80}{signature}") from None
    return function if takes_model else lambda _: function()


def as_number(name: str, value: Any) -> float:
    """Return ``value``, the result of the function called ``name``, as a float.

    Raises:
        TypeError: The value is not a single real number.
    """
    found = value.detach() if isinstance(value, torch.Tensor) else value
    if isinstance(found, (torch.Tensor, np.ndarray, np.generic)) and math.prod(found.shape) == 1:
        found = found.item()
    if isinstance(found, bool) or not isinstance(found, (int, float)):
        raise TypeError(f"{name} must return one real number, got {value!r:.80}")
    return float(found)
