"""Measures a model with trial weights, and recomputes its BatchNorm statistics."""

from __future__ import annotations

import contextlib
import inspect
import logging
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.optim.swa_utils import update_bn

from asyncdist.functional.soups.choosing import as_number

logger = logging.getLogger("asyncdist.soups")


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


def has_statistics(model: nn.Module) -> bool:
    """Return whether the model has BatchNorm layers with running statistics."""
    return bool(statistics_of(model))


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
    if loader is None or not has_statistics(model):
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
    if loader is None and has_statistics(model):
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
