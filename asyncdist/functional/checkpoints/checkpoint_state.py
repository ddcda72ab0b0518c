"""Collects one rank's state for a checkpoint, and compares a loaded state with the current state."""

from __future__ import annotations

import contextlib
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

from asyncdist.functional.checkpoints import manifests
from asyncdist.functional.seeding import check_random_states, random_states
from asyncdist.tensors.compiled_names import plain_name, plain_state
from asyncdist.tensors.model_tensors import is_sharded, local_part
from asyncdist.tensors.optimizers import loading
from asyncdist.tensors.optimizers.wrapped import class_name
from asyncdist.trust import torch_files
from asyncdist.validation import printable

#: torch optimizers whose state tensors may have different shapes than the parameters.
_OTHER_SHAPES: Final = (torch.optim.Adafactor, torch.optim.LBFGS)
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
    empty = torch.empty(0, device="cpu")  # torch would write a separate record for each distinct tensor

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
    value: float | None = None
    if is_mode and type(state.get("metric")) in (int, float):
        with contextlib.suppress(OverflowError):  # raised for an integer of hundreds of digits
            value = float(state["metric"])
    return {
        "metric": value if metric is None else float(metric),
        "metric_mode": mode if is_mode else "max",
        "replica_size": _replica_size(state),
    }


def replica_size_of(policy: HasState | None) -> int:
    """Return the number of ranks of a replica under this policy, or 1 if a replica is a single rank."""
    return _replica_size(None if policy is None else policy.state_dict())


def _replica_size(policy_state: Any) -> int:
    size = policy_state.get("replica_size", 1) if isinstance(policy_state, Mapping) else 1
    return size if type(size) is int and 1 <= size <= manifests.REPLICA_SIZE_MAX else 1


def policy_state(state: dict[str, Any], sources: Mapping[int, int], *, is_copy: bool) -> dict[str, Any]:
    """Return the policy's part of a loaded state.

    If ``is_copy`` is true, omit the random state, so that this rank draws other random numbers than the saved rank.
    Also exclude its contributions to unfinished rounds, because another rank continues as the same saved rank and
    contributes them.

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
            if not isinstance(each, (int, str)):  # comparing other values as dictionary keys could take too long
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
            if (own_part := _part(value)) != (saved_part := _part(other)):
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
    _check_fit(optimizer, arranged_optimizer(model, optimizer, loaded))


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


def _check_fit(optimizer: torch.optim.Optimizer, loaded: Mapping[str, Any]) -> None:
    """Raise a ValueError that names the first entry of a loaded state that does not fit the optimizer, if any.

    ``Optimizer.load_state_dict`` compares only the numbers of parameters. It would replace the current state with a
    state of other shapes or types, and the next step would fail. For torch's optimizers except Adafactor and LBFGS, a
    tensor must have the shape of its parameter, or one element. Only the part of the state with torch's keys is
    checked, if there is one.
    """
    loaded = loading.torch_part(loaded)
    if not loaded:
        if loading.torch_part(optimizer.state_dict()):
            raise ValueError("the checkpoint's state of the optimizer has no 'state' and 'param_groups'")
        return
    for number, (own, saved) in enumerate(zip(optimizer.param_groups, loaded["param_groups"], strict=True)):
        if "lr" in own and "lr" not in saved:
            raise ValueError(f"the checkpoint's parameter group {number} of the optimizer has no 'lr'")
        for name, value in own.items():
            if name != "params" and name in saved and not _can_replace(value, saved[name]):
                raise ValueError(
                    f"the optimizer's {name!r} must be like {value!r:.40} of this optimizer, got {saved[name]!r:.40} "
                    "in the checkpoint"
                )
    parameters = [each for group in optimizer.param_groups for each in group["params"]]
    is_of_torch = type(optimizer).__module__.startswith("torch.optim.") and not isinstance(optimizer, _OTHER_SHAPES)
    for place, entries in loaded["state"].items():
        if not isinstance(place, int):
            continue  # some optimizers have entries that belong to no parameter
        if not 0 <= place < len(parameters):
            raise ValueError(
                f"the optimizer has {len(parameters)} parameters, but the checkpoint has a state of {place}"
            )
        if not isinstance(entries, Mapping):
            raise ValueError(f"the optimizer's state of parameter {place} must be a dictionary, got {entries!r:.40}")
        for name, value in entries.items():
            if problem := _problem(value, parameters[place], is_of_torch=is_of_torch):
                raise ValueError(f"the optimizer's state {name!r:.40} of parameter {place} {problem} in the checkpoint")


def _problem(value: Any, parameter: torch.Tensor, *, is_of_torch: bool) -> str:
    """Return the reason why ``value`` cannot be part of a parameter's state, or an empty string."""
    if not isinstance(value, torch.Tensor):
        return f"must be a tensor or a number, got {value!r:.40}" if is_of_torch and isinstance(value, str) else ""
    if value.is_meta and not parameter.is_meta:
        return "has no values (device meta)"
    if value.shape == parameter.shape:
        is_number = value.is_floating_point() or value.is_complex() or value.numel() == 1
        return f"must have floating-point numbers, got {value.dtype}" if is_of_torch and not is_number else ""
    if is_of_torch and value.numel() != 1:
        return f"must have the shape {tuple(parameter.shape)}, got {tuple(value.shape)}"
    is_dense = type(value) is torch.Tensor and value.layout is torch.strided and not value.is_quantized
    if is_dense and value.numel() * value.element_size() > value.untyped_storage().nbytes():
        return f"has the shape {tuple(value.shape)}, but fewer values"
    return ""


def _can_replace(own: Any, saved: Any) -> bool:
    """Return whether a saved option of an optimizer can replace the optimizer's current value ``own``."""
    if own is None or saved is None or isinstance(own, bool):
        return own is None or saved is None or isinstance(saved, bool)
    if _is_number(own):
        return _is_number(saved)
    if isinstance(own, Sequence) and not isinstance(own, str):
        if not isinstance(own, tuple):
            return isinstance(saved, Sequence) and not isinstance(saved, str)
        return isinstance(saved, (tuple, list)) and len(own) == len(saved) and all(map(_can_replace, own, saved))
    return isinstance(saved, str) if isinstance(own, str) else True


def _is_number(value: Any) -> bool:
    is_tensor = isinstance(value, torch.Tensor) and value.numel() == 1 and not value.is_meta
    return is_tensor or (isinstance(value, (int, float)) and not isinstance(value, bool))


def _part(tensor: Any) -> str:
    """Describe which part of a tensor this rank has, for comparisons and errors."""
    if not is_sharded(tensor):
        return "whole"
    mesh, placements = tensor.device_mesh, ", ".join(map(str, tensor.placements))
    return f"the shard {mesh.get_coordinate()} of {tuple(mesh.shape)}, placed by {placements}"


def moved_model(own: Mapping[str, Any], loaded: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return a loaded state dict with its shards on the meshes of the tensors with the same names in ``own``."""
    if not any(map(is_sharded, own.values())):
        return loaded
    state: Any = copy.copy(loaded)  # also copies the modules' version numbers, an attribute of the dict
    state.update((name, _moved(loaded[name], tensor)) for name, tensor in own.items() if is_sharded(tensor))
    return state  # type: ignore[no-any-return]


def moved_optimizer(optimizer: torch.optim.Optimizer, state: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return a loaded optimizer's state with its shards on the meshes of the parameters that they belong to."""
    if not any(is_sharded(each) for group in optimizer.param_groups for each in group["params"]):
        return state
    return loading.with_values(optimizer, state, _moved)


def _moved(loaded: Any, own: Any) -> Any:
    """Return the loaded shard on the mesh of ``own``, or any other value unchanged.

    A loaded DTensor belongs to the device mesh of the job that saved it, whose process groups do not exist here. Torch
    cannot copy it into a DTensor of another mesh, even if both are the same shard.
    """
    if not is_sharded(loaded):
        return loaded
    return type(own).from_local(
        local_part(loaded),
        own.device_mesh,
        loaded.placements,
        run_check=False,
        shape=loaded.shape,
        stride=loaded.stride(),
    )
