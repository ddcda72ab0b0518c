"""Averages saved models, in one process: uniform and greedy soups, and the mean of the latest checkpoints.

The models are memory-mapped and read one at a time. Memory is also needed for the mean, and for a copy of the model's
own weights, which is restored after an error.
"""

from __future__ import annotations

import contextlib
import logging
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import nn

from asyncdist import validation
from asyncdist.functional.soups.choosing import GreedyChoice, Soup, given_metric
from asyncdist.functional.soups.sources import ModelSource, Source, newest_sources, sources_of
from asyncdist.functional.soups.trial import (
    check_loader,
    has_nan,
    measure,
    recompute_statistics,
    warn_without_loader,
)
from asyncdist.tensors.flat_state import FlatState
from asyncdist.tensors.means import running_mean_into

logger = logging.getLogger("asyncdist.soups")


def uniform_soup(
    model: nn.Module, sources: ModelSource | Iterable[ModelSource], *, loader: Iterable[Any] | None = None
) -> Soup:
    """Write the mean of saved models into ``model``.

    The mean is accumulated in float32 or wider. Integers are copied from the first source. A source whose weights
    contain NaN is omitted with a warning.

    Args:
        model: Model with the names, shapes and dtypes of all sources, changed in place.
        sources: State dicts, paths of files of ``torch.save`` or safetensors, and folders of :func:`save_population`,
            which stand for all ranks' models in the newest checkpoint. A file may have the state dict under the key
            ``"model"``, ``"state_dict"`` or ``"model_state_dict"``.
        loader: Batches of training data from which BatchNorm statistics are recomputed. By default, they are averaged.

    Returns:
        The members of the mean, as indices into the list of sources.

    Raises:
        TypeError, ValueError: There is no source, a source has another layout (the error names the first tensor that
            differs), or all sources contain NaN. The model then has its own weights.
        FileNotFoundError: A file or a complete checkpoint does not exist.
    """
    return _uniform(_Saved(model, sources_of(sources), loader))


def lawa(
    model: nn.Module,
    sources: ModelSource | Iterable[ModelSource],
    *,
    last: int = 6,
    rank: int | None = None,
    loader: Iterable[Any] | None = None,
) -> Soup:
    """Write the mean of the latest checkpoints into ``model`` (LAWA, latest weight averaging).

    Args:
        model: Model with the layout of all checkpoints, changed in place.
        sources: Folder of :func:`save_population`, or sources as for :func:`uniform_soup`, the oldest first.
        last: Maximum number of checkpoints or, if several sources are passed, of sources in the mean.
        rank: Rank whose checkpoints are averaged, if each source is a folder of :func:`save_population`, by default all
            ranks.
        loader: Batches of training data from which BatchNorm statistics are recomputed.

    Raises:
        TypeError, ValueError, FileNotFoundError: The errors of :func:`uniform_soup`, or ``last`` or ``rank`` is out of
            range.
    """
    last = validation.count("last", last)
    return _uniform(_Saved(model, newest_sources(sources, last, rank), loader))


def greedy_soup(
    model: nn.Module,
    sources: ModelSource | Iterable[ModelSource],
    *,
    loss: Callable[[nn.Module], Any] | None = None,
    score: Callable[[nn.Module], Any] | None = None,
    loader: Iterable[Any] | None = None,
) -> Soup:
    """Write the greedy soup of saved models into ``model``.

    The soup starts with the best model. The others are tried in the order of their metrics. A model is added if the
    metric of the mean becomes strictly better. Each source is read two or three times.

    Args:
        model: Model with the layout of all sources, changed in place.
        sources: Saved models, as for :func:`uniform_soup`.
        loss: Function that takes the model, in evaluation mode, and returns its loss on held-out data, a number.
            Smaller is better.
        score: Like ``loss``, but larger is better. Exactly one of the two must be passed.
        loader: Batches of training data from which the BatchNorm statistics of a mean are recomputed before each
            measurement. By default, the statistics are averaged.

    Returns:
        The members of the soup and all metrics. ``kind`` is ``"best"`` if no model was added to the best one.

    Raises:
        TypeError, ValueError, FileNotFoundError: The errors of :func:`uniform_soup`, or no source has a finite metric.
    """
    name, function, direction = given_metric(loss, score)
    saved = _Saved(model, sources_of(sources), loader)
    with saved.restored_on_error():
        metrics = {}
        for member in range(len(saved.sources)):
            tensors = saved.read(member)
            metrics[member] = math.nan
            if not has_nan(tensors):
                saved.write(tensors)
                metrics[member] = measure(model, name, function)
            if not math.isfinite(metrics[member]):
                logger.warning("%s has the %s %g, so it is left out", saved.sources[member].name, name, metrics[member])
        greedy = GreedyChoice(metrics, direction)
        if len(greedy.order) > 1:
            warn_without_loader(model, loader)
        saved.add(saved.read(greedy.order[0]))
        while (candidate := greedy.candidate) is not None:
            tensors = saved.read(candidate)
            saved.show_with(tensors)
            recompute_statistics(model, loader)
            metric = measure(model, name, function)
            greedy.warn_of_distant_members(metric)
            if greedy.decide(metric):
                saved.add(tensors)
        saved.show()
        if len(greedy.members) > 1:
            recompute_statistics(model, loader)
    return greedy.result({"greedy": greedy.metric} if len(greedy.order) > 1 else {})


def _uniform(saved: _Saved) -> Soup:
    members = []
    with saved.restored_on_error():
        for member, source in enumerate(saved.sources):
            tensors = saved.read(member)
            if has_nan(tensors):
                logger.warning("the weights of %s contain NaN, so they are left out", source.name)
                continue
            saved.add(tensors)
            members.append(member)
        if not members:
            raise ValueError(f"at least one source must have weights without NaN, got {len(saved.sources)} with NaN")
        saved.show()
        if len(members) > 1:
            warn_without_loader(saved.model, saved.loader)
            recompute_statistics(saved.model, saved.loader)
    return Soup("uniform", tuple(members), None, {}, {})


class _Saved:
    """Computes the mean of saved models, and loads it into the user's model."""

    def __init__(self, model: nn.Module, sources: Sequence[Source], loader: Iterable[Any] | None) -> None:
        check_loader(loader)
        self.model = model
        self.loader = loader
        self._state = FlatState(model)
        self.sources = [each.independent_of(model) for each in sources]
        self._mean = self._state.new_buffers(accumulate=True)
        self._count = 0

    @contextlib.contextmanager
    def restored_on_error(self) -> Iterator[None]:
        """Restore the model's own weights if the block raises an exception."""
        own = self._state.new_buffers()
        self._state.snapshot(own)
        try:
            yield
        except BaseException:
            self._state.load(own)
            raise

    def read(self, member: int) -> list[torch.Tensor]:
        """Return the tensors of a saved model, one for each entry of the model."""
        return self.sources[member].tensors(self.model, self._state.entries)

    @torch.no_grad()
    def write(self, tensors: Sequence[torch.Tensor]) -> None:
        """Write the tensors of a saved model into the model."""
        for tensor, value in zip(self._state.tensors(self._mean), tensors, strict=True):
            tensor.copy_(value)

    @torch.no_grad()
    def add(self, tensors: Sequence[torch.Tensor]) -> None:
        """Add a saved model to the mean. Integers are copied from the first one."""
        for entry, view, value in zip(self._state.entries, self._mean.views, tensors, strict=True):
            if not self._count:
                view.copy_(value)
            elif entry.averaged:
                flat = view.view(-1)
                running_mean_into(flat, flat, value.detach().reshape(-1).to(flat.device), self._count)
        self._count += 1

    def show(self) -> None:
        """Write the mean into the model."""
        self._state.load(self._mean)

    @torch.no_grad()
    def show_with(self, tensors: Sequence[torch.Tensor]) -> None:
        """Write the mean with one more saved model into the model. The stored mean is unchanged."""
        self.show()
        pairs = self._state.pairs(self._mean)
        for entry, (tensor, view), value in zip(self._state.entries, pairs, tensors, strict=True):
            if entry.averaged:
                trial = torch.empty_like(view)
                values = value.detach().reshape(-1).to(view.device)
                running_mean_into(trial.view(-1), view.view(-1), values, self._count)
                tensor.copy_(trial)
