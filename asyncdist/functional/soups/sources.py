"""Reads the weights of saved models, one at a time. Files of torch and safetensors are memory-mapped."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, TypeAlias

import torch
from torch import nn

from asyncdist import validation
from asyncdist.functional.checkpoints import checkpoint_files, checkpoint_state, manifests, safetensors_model
from asyncdist.tensors.compiled_names import plain_name, plain_state
from asyncdist.tensors.flat_state import Entry
from asyncdist.trust import torch_files

#: A saved model: a file of torch or safetensors, a folder of save_population, or a state dict in memory.
ModelSource: TypeAlias = str | os.PathLike[str] | Mapping[str, Any]

_ALLOWED: Final = (
    "a state dict, the path of a .pt or .safetensors file, or the path of a folder that save_population has written"
)
#: Keys under which training programs save a state dict in a larger dictionary.
_KEYS: Final = ("model", "state_dict", "model_state_dict")


@dataclass(frozen=True, slots=True)
class Source:
    """A saved model: its name for errors, a function that reads its state dict, and the dict if it is in memory."""

    name: str
    read: Callable[[], Mapping[str, Any]]
    held: Mapping[str, Any] | None = None

    def independent_of(self, model: nn.Module) -> Source:
        """Return a source whose tensors do not change with ``model``: a copy if they share the model's memory."""
        own = {_address(each) for each in (*model.parameters(), *model.buffers())}
        if self.held is None or not any(
            isinstance(each, torch.Tensor) and _address(each) in own for each in self.held.values()
        ):
            return self
        copied = {name: each.clone() if isinstance(each, torch.Tensor) else each for name, each in self.held.items()}
        return Source(self.name, lambda: copied, copied)

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


def sources_of(given: ModelSource | Iterable[ModelSource]) -> list[Source]:
    """Return the saved models in order. A folder stands for the models of all ranks in its newest checkpoint.

    Raises:
        TypeError, ValueError: There is no model, or a value is not a source.
        FileNotFoundError: A file does not exist, or a folder has no complete checkpoint.
    """
    return _models_in(_named(given), None)


def newest_sources(given: ModelSource | Iterable[ModelSource], last: int, rank: int | None) -> list[Source]:
    """Return the models of the ``last`` newest checkpoints in a folder of save_population, the oldest first.

    Args:
        given: The folder. Of several sources, which must be oldest first, the last ``last`` are used.
        rank: Rank whose models are returned, or None for all ranks.
    """
    if rank is not None:
        rank = validation.count("rank", rank, least=0, besides=" or None")
    if isinstance(given, (str, os.PathLike)) and Path(given).is_dir():
        checkpoints = manifests.find_last(Path(given), last)
        return [model for folder, manifest in checkpoints for model in _of_checkpoint(folder, manifest, rank)]
    return _models_in(_named(given)[-last:], rank)


def _named(given: ModelSource | Iterable[ModelSource]) -> list[tuple[str, ModelSource]]:
    """Return the sources, which are not checked, and their names for errors."""
    if isinstance(given, (str, os.PathLike)):
        return [("sources", given)]
    if isinstance(given, (Mapping, nn.Module)) or not isinstance(given, Iterable):
        validation.refuse("sources", type(given).__name__, f"a sequence; each is {_ALLOWED}", TypeError)
    return [(f"sources[{place}]", each) for place, each in enumerate(given)]


def _models_in(named: Sequence[tuple[str, ModelSource]], rank: int | None) -> list[Source]:
    if not named:
        raise ValueError(f"sources must have at least one model, got no model; each source is {_ALLOWED}")
    return [model for name, source in named for model in _models_of(name, source, rank)]


def _models_of(name: str, source: ModelSource, rank: int | None) -> list[Source]:
    """Return the models of one source. For a folder, return the models of ``rank``, or of all ranks if it is None."""
    if isinstance(source, (str, os.PathLike)):
        path = Path(source)
        if path.is_dir():
            return _of_checkpoint(*manifests.find_newest(path), rank)
        if not path.is_file():
            raise FileNotFoundError(f"{path} must be {_ALLOWED}, but it does not exist")
        model = Source(str(path), lambda: _read_file(path))
    elif isinstance(source, Mapping):
        model = Source(name, lambda: source, source)
    else:
        validation.refuse(name, type(source).__name__, _ALLOWED, TypeError)
    if rank is not None:
        raise ValueError(f"rank must be None unless each source is a folder of save_population, got {rank!r}")
    return [model]


def _of_checkpoint(folder: Path, manifest: Mapping[str, Any], rank: int | None) -> list[Source]:
    def source(saved: int, entry: Mapping[str, Any]) -> Source:
        read = functools.partial(checkpoint_files.read_rank, folder, entry, is_mapped=True)
        return Source(f"rank {saved} of {folder}", lambda: read()["model"])

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
