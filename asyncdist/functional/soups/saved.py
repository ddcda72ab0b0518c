"""Averages saved models, in one process: uniform and greedy soups, and the mean of the latest checkpoints.

The models are memory-mapped and read one at a time. Memory is also needed for the mean, and for a copy of the model's
own weights, which is restored after an error.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import math
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, TypeAlias

import torch
from torch import nn

from asyncdist import validation
from asyncdist.functional.checkpoints import checkpoint_files, checkpoint_state, manifests, safetensors_model
from asyncdist.functional.soups.choosing import (
    GreedyChoice,
    Soup,
    check_loader,
    given_metric,
    has_nan,
    measure,
    recompute_statistics,
    warn_without_loader,
)
from asyncdist.tensors.compiled_names import plain_name, plain_state
from asyncdist.tensors.flat_state import Entry, FlatState
from asyncdist.tensors.means import running_mean_into
from asyncdist.trust import torch_files

logger = logging.getLogger("asyncdist.soups")

#: A saved model: a file written by torch or safetensors, a folder written by save_population, or a state dict.
ModelSource: TypeAlias = str | os.PathLike[str] | Mapping[str, Any]

_ALLOWED: Final = (
    "a state dict, the path of a .pt or .safetensors file, or the path of a folder that save_population has written"
)
#: Keys under which training programs save a state dict in a larger dictionary.
_KEYS: Final = ("model", "state_dict", "model_state_dict")


def uniform_soup(
    model: nn.Module, sources: ModelSource | Iterable[ModelSource], *, loader: Iterable[Any] | None = None
) -> Soup:
    """Write the mean of saved models into ``model``.

    The mean is accumulated in float32 or wider. Integers are copied from the first source. A source whose weights
    contain NaN is omitted with a warning.

    Args:
        model: Model with the names, shapes and dtypes of all sources, changed in place.
        sources: State dicts, paths of files written by ``torch.save`` or safetensors, and folders written by
            :func:`save_population`, which stand for all ranks' models in the newest checkpoint. A file may have the
            state dict under the key ``"model"``, ``"state_dict"`` or ``"model_state_dict"``.
        loader: Batches of training data from which BatchNorm statistics are recomputed. By default, they are averaged.

    Returns:
        The members of the mean, as indices into the list of sources.

    Raises:
        TypeError, ValueError: There is no source, a source has another layout (the error names the first tensor that
            differs), or all sources contain NaN. The model is then left unchanged.
        FileNotFoundError: A file or a complete checkpoint does not exist.
    """
    return _uniform(_Saved(model, _sources_of(sources), loader))


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
        sources: Folder written by :func:`save_population`, or sources as for :func:`uniform_soup`, the oldest first.
        last: Maximum number of checkpoints or, if several sources are passed, of sources in the mean.
        rank: Rank whose checkpoints are averaged, if each source is a folder written by :func:`save_population`. By
            default, all ranks.
        loader: Batches of training data from which BatchNorm statistics are recomputed.

    Raises:
        TypeError, ValueError, FileNotFoundError: The errors of :func:`uniform_soup`, or ``last`` or ``rank`` is out of
            range.
    """
    last = validation.count("last", last)
    return _uniform(_Saved(model, _sources_of(sources, last, rank), loader))


def greedy_soup(
    model: nn.Module,
    sources: ModelSource | Iterable[ModelSource],
    *,
    loss: Callable[[nn.Module], Any] | None = None,
    score: Callable[[nn.Module], Any] | None = None,
    loader: Iterable[Any] | None = None,
) -> Soup:
    """Write the greedy soup of saved models into ``model``.

    The soup starts with the best model. The others are tried in the order of their metrics, and each one that strictly
    improves the metric of the mean is added. Each source is read two or three times.

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
    saved = _Saved(model, _sources_of(sources), loader)
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

    def __init__(self, model: nn.Module, sources: Sequence[_Source], loader: Iterable[Any] | None) -> None:
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
        """Write into the model the mean with one more saved model. Do not change the stored mean."""
        self.show()
        pairs = self._state.pairs(self._mean)
        for entry, (tensor, view), value in zip(self._state.entries, pairs, tensors, strict=True):
            if entry.averaged:
                trial = torch.empty_like(view)
                values = value.detach().reshape(-1).to(view.device)
                running_mean_into(trial.view(-1), view.view(-1), values, self._count)
                tensor.copy_(trial)


@dataclass(frozen=True, slots=True)
class _Source:
    """A saved model: its name for errors, a function that reads its state dict, and the dict if it is in memory."""

    name: str
    read: Callable[[], Mapping[str, Any]]
    held: Mapping[str, Any] | None = None

    def independent_of(self, model: nn.Module) -> _Source:
        """Return a source whose tensors do not change with ``model``: a copy if they share the model's memory."""
        own = {_address(each) for each in (*model.parameters(), *model.buffers())}
        if self.held is None or not any(
            isinstance(each, torch.Tensor) and _address(each) in own for each in self.held.values()
        ):
            return self
        copied = {name: each.clone() if isinstance(each, torch.Tensor) else each for name, each in self.held.items()}
        return _Source(self.name, lambda: copied, copied)

    def tensors(self, model: nn.Module, entries: Sequence[Entry]) -> list[torch.Tensor]:
        """Return the tensor of each entry of the model. Raise ValueError if the saved model has a different layout."""
        state = dict(plain_state(self.read()))
        names = [list(map(plain_name, entry.names)) for entry in entries]
        for alike in names:
            known = next((name for name in alike if name in state), None)
            if known is not None:  # A file may contain only one of the names of tied weights.
                state.update((name, state[known]) for name in alike if name not in state)
        try:
            checkpoint_state.compare(model, None, {"model": state})
        except ValueError as error:
            raise ValueError(f"{self.name} does not fit the model: {error}") from None
        return [state[first] for first, *_ in names]


def _address(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _sources_of(
    given: ModelSource | Iterable[ModelSource], last: int | None = None, rank: int | None = None
) -> list[_Source]:
    """Return the saved models in order. A folder stands for the models of all ranks in its newest checkpoint.

    Args:
        last: Number of sources to use, counted from the end. For a single folder, the models of its ``last`` newest
            checkpoints are returned, the oldest first.
        rank: Rank whose models are returned, or None for all ranks.

    Raises:
        TypeError, ValueError: There is no model, or a value is not a source.
        FileNotFoundError: A file does not exist, or a folder has no complete checkpoint.
    """
    if rank is not None:
        rank = validation.count("rank", rank, least=0, besides=" or None")
    if last is not None and isinstance(given, (str, os.PathLike)) and Path(given).is_dir():
        checkpoints = manifests.find_last(Path(given), last)
        return [model for folder, manifest in checkpoints for model in _of_checkpoint(folder, manifest, rank)]
    named = _named(given)[-(last or 0) :]
    if not named:
        raise ValueError(f"sources must have at least one model, got no model; each source is {_ALLOWED}")
    return [model for name, source in named for model in _models_of(name, source, rank)]


def _named(given: ModelSource | Iterable[ModelSource]) -> list[tuple[str, ModelSource]]:
    """Return the sources, which are not checked, and their names for errors."""
    if isinstance(given, (str, os.PathLike)):
        return [("sources", given)]
    if isinstance(given, (Mapping, nn.Module)) or not isinstance(given, Iterable):
        validation.refuse("sources", type(given).__name__, f"a sequence; each is {_ALLOWED}", TypeError)
    return [(f"sources[{place}]", each) for place, each in enumerate(given)]


def _models_of(name: str, source: ModelSource, rank: int | None) -> list[_Source]:
    """Return the models of one source. For a folder, return the models of ``rank``, or of all ranks if it is None."""
    if isinstance(source, (str, os.PathLike)):
        path = Path(source)
        if path.is_dir():
            return _of_checkpoint(*manifests.find_newest(path), rank)
        if not path.is_file():
            raise FileNotFoundError(f"{path} must be {_ALLOWED}, but it does not exist")
        model = _Source(str(path), lambda: _read_file(path))
    elif isinstance(source, Mapping):
        model = _Source(name, lambda: source, source)
    else:
        validation.refuse(name, type(source).__name__, _ALLOWED, TypeError)
    if rank is not None:
        raise ValueError(f"rank must be None unless each source is a folder of save_population, got {rank!r}")
    return [model]


def _of_checkpoint(folder: Path, manifest: Mapping[str, Any], rank: int | None) -> list[_Source]:
    def source(saved: int, entry: Mapping[str, Any]) -> _Source:
        read = functools.partial(checkpoint_files.read_rank, folder, entry, is_mapped=True)
        return _Source(f"rank {saved} of {folder}", lambda: read()["model"])

    ranks = [manifests.saved_rank(entry, index) for index, entry in enumerate(manifest["files"])]
    models = list(map(source, ranks, manifest["files"]))
    if rank is None:
        return models
    if rank not in ranks:
        raise ValueError(f"rank must be one of {ranks}, the ranks of {folder}, got {rank}")
    return [models[ranks.index(rank)]]


def _read_file(path: Path) -> Mapping[str, Any]:
    if path.suffix == ".safetensors":
        with checkpoint_files.reading(path, "a file of safetensors"):
            return safetensors_model.read_foreign(path)
    with checkpoint_files.reading(path, "a state dict saved by torch.save"):
        state: Any = torch_files.load(path, is_mapped=True)
        if not isinstance(state, Mapping):
            raise TypeError(f"it contains a {type(state).__name__}")
        for key in _KEYS:
            if isinstance(state.get(key), Mapping):
                return state[key]  # type: ignore[no-any-return]
        return state
