"""Measures models, decides which of them belong to a soup, and recomputes BatchNorm statistics of a soup.

Model soups: Wortsman et al., "Model soups: averaging weights of multiple fine-tuned models improves accuracy without
increasing inference time", 2022, arXiv:2203.05482. The greedy soup is recipe 1 of that paper. However, a model is added
only if the metric becomes strictly better.
"""

from __future__ import annotations

import contextlib
import inspect
import logging
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final, Literal, TypeAlias

import numpy as np
import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.optim.swa_utils import update_bn

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
        soup_metrics: Loss or score of each soup that was tried, keyed by ``"uniform"`` and ``"greedy"``.
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
    """Builds the greedy soup: starts with the best member, and adds each other one that strictly improves the metric.

    Args:
        metrics: Metric of each member's own weights. Members whose metric is not finite are omitted.

    Attributes:
        order: Members with a finite metric, best first. Ties are in ascending order of member number.
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


@contextlib.contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Put the model into evaluation mode during the block. Afterwards, restore each module's own mode."""
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        yield
    finally:
        for module, mode in modes:
            module.training = mode


def measure(model: nn.Module, name: str, function: Callable[[nn.Module], Any]) -> float:
    """Return the metric of the model's current weights as a float."""
    with evaluating(model):
        return as_number(name, function(model))


async def measure_async(model: nn.Module, name: str, function: Callable[[nn.Module], Any]) -> float:
    """Return the metric of the model's current weights as a float. The function may be a coroutine function."""
    with evaluating(model):
        value = function(model)
        return as_number(name, await value if inspect.isawaitable(value) else value)


def statistics_of(model: nn.Module) -> list[torch.Tensor]:
    """Return the running statistics of all BatchNorm layers, and their counters, in the order of the modules."""
    layers = _layers_of(model)
    found = [each for layer in layers for each in (layer.running_mean, layer.running_var, layer.num_batches_tracked)]
    return [each for each in found if each is not None]


def _layers_of(model: nn.Module) -> list[_BatchNorm]:
    return [module for module in model.modules() if isinstance(module, _BatchNorm)]


def check_loader(loader: Any) -> None:
    """Raise TypeError unless the loader can be iterated several times. It is read once per measurement."""
    if loader is None:
        return
    if not isinstance(loader, Iterable) or isinstance(loader, Iterator):
        raise TypeError(
            "loader must be iterable several times, such as a DataLoader or a list of batches, got "
            f"{'an iterator' if isinstance(loader, Iterable) else repr(loader)[:80]}"
        )


def recompute_statistics(model: nn.Module, loader: Iterable[Any] | None) -> None:
    """Recompute the model's BatchNorm statistics from the batches of ``loader``, or do nothing if it is None.

    Raises:
        ValueError: The loader yields no batches, from which means of 0 and variances of 1 would result.
    """
    if loader is None or not statistics_of(model):
        return
    count = 0

    def counted() -> Iterator[Any]:
        nonlocal count
        for count, batch in enumerate(loader, 1):  # noqa: B007
            yield batch

    device = next((tensor.device for tensor in model.parameters()), None)
    momenta = [(layer, layer.momentum) for layer in _layers_of(model)]
    try:
        with evaluating(model):  # restores each module's mode; update_bn would set all to the outermost module's mode
            update_bn(counted(), model, device)
    finally:
        for layer, momentum in momenta:  # after an error, update_bn leaves them None
            layer.momentum = momentum
    if not count:
        raise ValueError("loader must have at least one batch to recompute BatchNorm statistics, got no batch")


def warn_without_loader(model: nn.Module, loader: Iterable[Any] | None) -> None:
    """Log a warning if a soup's BatchNorm statistics would be the mean of the models' statistics."""
    if loader is None and statistics_of(model):
        logger.warning(
            "the model has BatchNorm layers, and a soup gets the mean of the models' statistics; pass loader= to "
            "recompute the statistics from batches of training data"
        )


def has_nan(tensors: Iterable[torch.Tensor]) -> bool:
    """Return whether any floating or complex tensor contains NaN. Infinities, as in attention masks, are allowed."""
    for tensor in tensors:
        if tensor.is_floating_point() or tensor.is_complex():
            for piece in torch.split(tensor.detach().reshape(-1), 1 << 20):
                if torch.isnan(piece).any():
                    return True
    return False
