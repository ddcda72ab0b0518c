"""Collects one rank's state for a checkpoint, and compares a loaded state with the current state."""

from __future__ import annotations

import copy
import io
import math
import random
import re
from collections import OrderedDict
from collections.abc import Callable, Mapping
from typing import Any, Final, Protocol

import numpy as np
import torch
from torch import nn

from asyncdist.functional.checkpoints import optimizer_fit
from asyncdist.functional.checkpoints.shards import shard_of
from asyncdist.tensors.compiled_names import plain_name, plain_state
from asyncdist.tensors.optimizers import loading
from asyncdist.tensors.optimizers.wrapped import class_name
from asyncdist.trust import torch_files
from asyncdist.validation import printable

_OTHER_MODEL: Final = "the checkpoint must be of a model with the same layout"


class HasState(Protocol):
    """An object with a state to save: a policy, a scheduler or a sampler."""

    def state_dict(self) -> dict[str, Any]:
        """Return the state."""


class Stateful(HasState, Protocol):
    """An object whose state can be saved and loaded."""

    def load_state_dict(self, state_dict: dict[str, Any], /) -> object:
        """Replace the state with a saved state."""


def without_wrapper(policy: Any) -> Any:
    """Return the policy of a blocking policy or of an integration's ``Averaging``, whose own methods would block."""
    return getattr(policy, "awaited", policy)


def state_of(
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None,
    policy: HasState | None,
    extra: Any,
    metric: float | None,
) -> dict[str, Any]:
    """Return this rank's state, and its entry for the manifest as "entry".

    Raise TypeError if torch could not load a part of the state.
    """
    state = {
        "model": plain_state(model.state_dict()),
        "optimizer": None if optimizer is None else _map_leaves(_plain_number, optimizer.state_dict()),
        "optimizer_class": None if optimizer is None else class_name(optimizer),
        "optimizer_names": None if optimizer is None else loading.parameter_names(model, optimizer),
        "policy": None if policy is None else _map_leaves(_plain_number, policy.state_dict()),
        "extra": _map_leaves(_plain_number, extra),
        "random": _random_states(),
    }
    for name, part in state.items():
        _check_loadable(name, part)
    try:
        torch_files.check_expanded(state)
    except ValueError as error:
        raise TypeError(f"the state cannot be saved: {error}") from None
    return {**state, "entry": _metric_entry(metric, state["policy"])}


def copy_of(state: Mapping[str, Any]) -> dict[str, Any]:
    """Return a copy of ``state`` in CPU memory. Tensors that share memory also share memory in the copy."""
    storages: dict[int, torch.UntypedStorage] = {}

    def copied(value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return copy.deepcopy(value)
        is_plain = type(value) is torch.Tensor and value.layout is torch.strided and not value.is_quantized
        if not is_plain or value.is_conj() or value.is_neg() or value.__dict__:
            return value.detach().cpu().clone()
        storage = value.untyped_storage()
        if storage._cdata not in storages:
            there: Any = torch.UntypedStorage(storage.nbytes(), device="cpu")  # type: ignore[no-untyped-call]
            storages[storage._cdata] = there.copy_(storage, False)
        whole = torch.empty(0, dtype=value.dtype, device="cpu")
        with torch.no_grad():
            whole.set_(storages[storage._cdata], value.storage_offset(), value.shape, value.stride())
        return whole.requires_grad_(value.requires_grad)

    return {name: _map_leaves(copied, part) for name, part in state.items()}


def _map_leaves(change: Callable[[Any], Any], value: Any) -> Any:
    """Return a copy of nested dicts, lists and tuples, with ``change`` applied to all their keys and leaves."""
    if type(value) in (dict, OrderedDict):
        changed = type(value)((change(key), _map_leaves(change, each)) for key, each in value.items())
        if type(value) is OrderedDict:
            vars(changed).update(vars(value))  # copies a module's version numbers, which load_state_dict reads
        return changed
    if type(value) in (list, tuple):
        return type(value)(_map_leaves(change, each) for each in value)
    return change(value)


def _plain_number(value: Any) -> Any:
    """Convert a NumPy scalar, such as a learning rate, to a Python number, which torch can load."""
    return value.item() if isinstance(value, np.generic) else value


def _check_loadable(name: str, part: Any) -> None:
    def without_contents(value: Any) -> Any:
        return torch.empty(0, device="cpu") if type(value) is torch.Tensor and not value.__dict__ else value

    buffer = io.BytesIO()
    try:
        torch.save(_map_leaves(without_contents, part), buffer)
        torch_files.check_archive(buffer)
        buffer.seek(0)
        torch.load(buffer, weights_only=True)
    except Exception as error:
        raise TypeError(
            f"{name} must have only tensors, numbers, strings, and lists and dictionaries of them, but {reason(error)}"
        ) from None


def reason(error: Exception) -> str:
    """Return the reason why a file cannot be read, as one printable line: the refused class, or the first line."""
    text = str(error).strip() or type(error).__name__
    refused = re.search(r"GLOBAL (\S+)", text)
    found = f"torch.load(weights_only=True) refuses {refused[1]}" if refused else text.splitlines()[0]
    return printable(found)[:200]


def _metric_entry(metric: float | None, policy: Any) -> dict[str, Any]:
    state = policy if isinstance(policy, Mapping) else {}
    value = state.get("metric") if metric is None else float(metric)
    return {"metric": value, "metric_mode": state.get("metric_mode") or "max", "replica_size": _replica_size(state)}


def replica_size_of(policy: HasState | None) -> int:
    """Return the number of ranks of a replica under this policy, or 1 if a replica is a single rank."""
    return _replica_size(None if policy is None else policy.state_dict())


def _replica_size(policy_state: Any) -> int:
    return policy_state.get("replica_size", 1) if isinstance(policy_state, Mapping) else 1


def policy_state(state: dict[str, Any], sources: Mapping[int, int], *, is_copy: bool) -> dict[str, Any]:
    """Return the policy's part of a loaded state.

    If ``is_copy``, omit its random state, so that its draws differ. Leave its contributions to unfinished rounds out of
    the means, because the rank that continues as the same saved rank contributes them.

    Args:
        sources: Saved rank whose role each rank takes over, for policies that store rank numbers.
    """
    changed: dict[str, Any] = {"sources": tuple(sources.items())}
    if is_copy:
        contributions = state.get("contributions", {}).items()
        changed["contributions"] = {number: {**each, "norm": math.nan} for number, each in contributions}
        changed["draws"] = None
    return {**state, **{name: value for name, value in changed.items() if name in state}}


def _random_states() -> dict[str, Any]:
    numbers: Any = np.random.get_state()
    name, words, position, has_gauss, gauss = numbers
    return {
        "python": random.getstate(),
        "numpy": (name, torch.from_numpy(words.astype(np.int64)), int(position), int(has_gauss), float(gauss)),
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else [],  # type: ignore[no-untyped-call]
    }


def set_random_states(states: Mapping[str, Any]) -> None:
    """Restore the saved random states."""
    random.setstate(states["python"])
    name, words, position, has_gauss, gauss = states["numpy"]
    np.random.set_state((name, words.numpy().astype(np.uint32), position, has_gauss, gauss))
    torch.set_rng_state(states["torch"])
    if states["cuda"] and len(states["cuda"]) == torch.cuda.device_count():
        torch.cuda.set_rng_state_all(states["cuda"])


def check_parts(state: Any) -> None:
    """Raise an error of any type unless a loaded state has all parts of :func:`state_of` and valid random states."""
    for name in ("model", "optimizer", "policy", "extra", "random"):
        if not isinstance(state, dict) or name not in state:
            raise ValueError(f"the part {name!r} of the saved state is missing")
    if not isinstance(state["model"], dict):
        raise TypeError(
            f"the part 'model' of the saved state must be a dictionary, got a {type(state['model']).__name__}"
        )
    optimizer = state["optimizer"]
    if optimizer is not None:
        for group in optimizer["param_groups"]:
            if not isinstance(group["params"], list):
                raise TypeError(f"the parameters of a group must be a list, got a {type(group['params']).__name__}")
        optimizer["state"].items()
        if (named := state.get("optimizer_names")) is not None:
            for group, names in zip(optimizer["param_groups"], named, strict=True):
                "".join(name for _, name in zip(group["params"], names, strict=True))  # raises unless all are strings
    states = state["random"]
    random.Random().setstate(states["python"])
    name, words, position, has_gauss, gauss = states["numpy"]
    if type(position) is not int or not 0 <= position <= 624:
        raise ValueError(f"the position of numpy's generator must be from 0 to 624, got {position!r:.80}")
    np.random.RandomState().set_state((name, words.numpy().astype(np.uint32), position, has_gauss, gauss))
    torch.Generator(device="cpu").set_state(states["torch"])
    if not all(isinstance(each, torch.Tensor) for each in states["cuda"]):
        raise TypeError("the saved generator states of the GPUs must be tensors")


def compare(model: nn.Module, optimizer: torch.optim.Optimizer | None, loaded: Mapping[str, Any]) -> None:
    """Raise a ValueError that names the first difference between the current and the saved state, if any."""
    here, saved = plain_state(model.state_dict()), plain_state(loaded["model"])
    for name, value in here.items():
        if name not in saved:
            raise ValueError(f"{_OTHER_MODEL}: {name!r} is in this model and not in the checkpoint")
        other = saved[name]
        if isinstance(value, torch.Tensor) != isinstance(other, torch.Tensor):
            kinds = f"is a {type(value).__name__} in this model and a {type(other).__name__} in the checkpoint"
            raise ValueError(f"{_OTHER_MODEL}: {name!r} {kinds}")
        if isinstance(value, torch.Tensor) and isinstance(other, torch.Tensor):
            if other.is_meta and not value.is_meta:
                raise ValueError(f"{_OTHER_MODEL}: {name!r} has no values in the checkpoint (device meta)")
            for what in ("shape", "dtype", "layout"):
                mine, theirs = getattr(value, what), getattr(other, what)
                if mine != theirs:
                    mine, theirs = (tuple(mine), tuple(theirs)) if what == "shape" else (mine, theirs)
                    raise ValueError(
                        f"{_OTHER_MODEL}: {name!r} has the {what} {mine} in this model and {theirs} in the checkpoint"
                    )
            if (own_part := shard_of(value)) != (saved_part := shard_of(other)):
                parts = f"is {own_part} in this model and {saved_part} in the checkpoint"
                raise ValueError(f"{_OTHER_MODEL}: {name!r} {parts}")
    for name in saved:
        if name not in here:
            raise ValueError(f"{_OTHER_MODEL}: {name!r} is in the checkpoint and not in this model")
    if optimizer is None:
        return
    if loaded["optimizer"] is None:
        raise ValueError("the checkpoint must have an optimizer's state, but it was saved without an optimizer")
    kind, other = class_name(optimizer), loaded.get("optimizer_class")
    # Files of earlier versions lack the class name, or name the class of a wrapper.
    old = None, "AcceleratedOptimizer", "LightningOptimizer", f"Fabric{kind}", f"Lightning{kind}"
    if other not in (kind, *old):
        raise ValueError(f"the checkpoint must be of an optimizer of the class {kind}, got {printable(str(other))}")
    optimizer_fit.check(optimizer, arranged_optimizer(model, optimizer, loaded))


def arranged_optimizer(model: nn.Module, optimizer: torch.optim.Optimizer, loaded: Mapping[str, Any]) -> Any:
    """Return the loaded optimizer's state in the order of this optimizer's parameters.

    Without parameter names, which files of earlier versions lack, the saved order is kept. Raise ValueError if the
    optimizers' groups have different parameters.
    """
    if loaded.get("optimizer_names") is not None:
        own = loading.parameter_names(model, optimizer)
        names = [list(map(plain_name, group)) for group in loaded["optimizer_names"]]
        return loading.arranged(loaded["optimizer"], names, own)
    counts, others = (
        [len(group["params"]) for group in state["param_groups"]]
        for state in (optimizer.state_dict(), loaded["optimizer"])
    )
    if counts != others:
        raise ValueError(
            f"the checkpoint must be of an optimizer with parameter groups of {counts} parameters, got {others}"
        )
    return loaded["optimizer"]
