"""Collects one rank's state for a checkpoint, and compares a loaded state with the current state."""

from __future__ import annotations

import copy
import io
import math
import re
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, Protocol

import numpy as np
import torch
from torch import nn

from asyncdist.functional.checkpoints import manifests, optimizer_fit
from asyncdist.functional.checkpoints.random_states import check_random_states, random_states
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
        "random": random_states(),
    }
    for name, part in state.items():
        _check_loadable(name, part)
    if optimizer is not None:
        try:
            _check_optimizer(state["optimizer"], state["optimizer_names"])
        except Exception as error:
            raise TypeError(f"optimizer must have a state that load_population can load, but {reason(error)}") from None
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
    empty = torch.empty(0, device="cpu")  # torch would write a record for each of several tensors

    def without_contents(value: Any) -> Any:
        return empty if type(value) is torch.Tensor and not value.__dict__ else value

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
    """Return a rank's metric and replica size for the manifest.

    A foreign object's state may have the same keys with other meanings. Values that a manifest cannot have are ignored.
    """
    state = policy if isinstance(policy, Mapping) else {}
    mode = "max" if state.get("metric_mode") is None else state["metric_mode"]
    is_mode = isinstance(mode, str) and mode in ("min", "max")
    value = _number(state.get("metric")) if is_mode else None
    return {
        "metric": value if metric is None else float(metric),
        "metric_mode": mode if is_mode else "max",
        "replica_size": _replica_size(state),
    }


def _number(value: Any) -> float | None:
    try:
        return float(value) if type(value) in (int, float) else None
    except OverflowError:
        return None


def replica_size_of(policy: HasState | None) -> int:
    """Return the number of ranks of a replica under this policy, or 1 if a replica is a single rank."""
    return _replica_size(None if policy is None else policy.state_dict())


def _replica_size(policy_state: Any) -> int:
    size = policy_state.get("replica_size", 1) if isinstance(policy_state, Mapping) else 1
    return size if type(size) is int and 1 <= size <= manifests.REPLICA_SIZE_MAX else 1


def policy_state(state: dict[str, Any], sources: Mapping[int, int], *, is_copy: bool) -> dict[str, Any]:
    """Return the policy's part of a loaded state.

    If ``is_copy``, omit its random state, so that its draws differ. Leave its contributions to unfinished rounds out of
    the means, because the rank that continues as the same saved rank contributes them.

    Args:
        sources: Saved rank whose role each rank takes over, for policies that store rank numbers.
    """
    changed: dict[str, Any] = {"sources": tuple(sources.items())}
    if is_copy:
        changed["draws"] = None
    if is_copy and isinstance(contributions := state.get("contributions"), Mapping):
        changed["contributions"] = {number: {**each, "norm": math.nan} for number, each in contributions.items()}
    return {**state, **{name: value for name, value in changed.items() if name in state}}


def check_parts(state: Any) -> None:
    """Raise an error of any type unless a loaded state has all parts of :func:`state_of` and valid random states."""
    for name in ("model", "optimizer", "policy", "extra", "random"):
        if not isinstance(state, dict) or name not in state:
            raise ValueError(f"the part {name!r} of the saved state is missing")
    if not isinstance(state["model"], dict):
        raise TypeError(
            f"the part 'model' of the saved state must be a dictionary, got a {type(state['model']).__name__}"
        )
    if state["optimizer"] is not None:
        _check_optimizer(state["optimizer"], state.get("optimizer_names"))
    check_random_states(state["random"])


def _check_optimizer(state: dict[str, Any], names: Sequence[Sequence[str]] | None) -> None:
    """Raise an error of any type if an optimizer's state is malformed, or does not fit the parameters' names.

    Optimizers may define their own state. Only the part with torch's keys is then checked, if there is one.
    """
    if not isinstance(state, dict):
        raise TypeError(f"the state of an optimizer must be a dictionary, got a {type(state).__name__}")
    part = loading.torch_part(state)
    if not part:
        return
    for group in part["param_groups"]:
        if not isinstance(group["params"], list):
            raise TypeError(f"the parameters of a group must be a list, got a {type(group['params']).__name__}")
        for each in group["params"]:
            if not isinstance(each, (int, str)):  # as keys, other values could take too long
                raise TypeError(f"the parameters of a group must be numbers or names, got a {type(each).__name__}")
    part["state"].items()
    for group, named in zip(part["param_groups"], names or (), strict=names is not None):
        "".join(name for _, name in zip(group["params"], named, strict=True))  # raises unless all are strings


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
        [len(group["params"]) for group in loading.torch_part(state).get("param_groups", ())]
        for state in (optimizer.state_dict(), loaded["optimizer"])
    )
    if counts != others:
        raise ValueError(
            f"the checkpoint must be of an optimizer with parameter groups of {counts} parameters, got {others}"
        )
    return loaded["optimizer"]
