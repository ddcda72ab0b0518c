"""Loads another rank's optimizer state without rounding it, and maps it to this rank's parameters by name.

In a state, torch numbers the parameters in the order in which the optimizer lists them. On different ranks, this order
may differ, so the names that the model gives to the parameters are sent with the state.

Some optimizers store a part of their state in the parameter groups, such as step counts (schedule-free optimizers, and
those of pytorch_optimizer) or an estimated learning rate (Prodigy). ``defaults`` does not distinguish this state from
settings, because such optimizers also put its initial values there. Entries that are arguments of a constructor are
therefore considered settings.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import logging
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any, Final

import torch
from torch import Tensor, nn

from asyncdist.tensors.compiled_names import plain_name
from asyncdist.tensors.model_tensors import is_sharded, local_part
from asyncdist.tensors.optimizers.wrapped import class_name, unwrapped, wrapped_optimizers

logger = logging.getLogger("asyncdist.tensors.optimizers.loading")

#: Key that marks this rank's shard of a DTensor in a state.
_SHARD: Final = "asyncdist shard"
#: Entries that are settings even if the optimizer's constructor does not name them.
_SETTINGS: Final = frozenset(("params", "param_names", "lr", "betas", "momentum", "eps", "weight_decay", "train_mode"))
#: Entries that torch's learning rate schedulers write.
_SCHEDULED: Final = frozenset(("initial_lr", "max_lr", "min_lr", "base_momentum", "max_momentum", "swa_lr"))
_ALLOWED: Final = "the optimizer must have the same parameters in its groups as the optimizer whose state it loads"


def parameter_names(model: nn.Module, optimizer: Any) -> list[list[str]]:
    """Return the names of an optimizer's parameters in the model, by group, without prefixes of ``torch.compile``.

    The name is "" if the model lacks the parameter.
    """
    names = {id(each): plain_name(name) for name, each in model.named_parameters()}
    return [[names.get(id(each), "") for each in group["params"]] for group in optimizer.param_groups]


def named_state(model: nn.Module, optimizer: Any) -> dict[str, Any]:
    """Return an optimizer's state, with the optimizer's class and its parameters' names, for :func:`load_named`."""
    names, state = parameter_names(model, optimizer), optimizer.state_dict()
    if any(map(is_sharded, _parameters(optimizer))):
        state = _with_marked_shards(state)
    return {"class": class_name(optimizer), "state": state, "names": names}


def load_named(model: nn.Module, optimizer: Any, saved: Mapping[str, Any]) -> None:
    """Load another rank's :func:`named_state`.

    Raise ValueError if the other optimizer has a different class or different parameters.
    """
    state = state_for(model, optimizer, saved)
    if any(map(is_sharded, _parameters(optimizer))):
        state = with_values(optimizer, state, _own_shard)
    load_exactly(optimizer, state)


def state_for(model: nn.Module, optimizer: Any, saved: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the state from another rank's :func:`named_state`, rearranged in the order of this rank's parameters.

    Raise ValueError if the other optimizer has a different class or different parameters.
    """
    own, theirs = class_name(optimizer), saved["class"]
    if own != theirs:  # torch would load the state, and a later step would fail or compute wrong values
        raise ValueError(f"the optimizer must have the class {theirs} of the optimizer whose state it loads, got {own}")
    return arranged(saved["state"], saved["names"], parameter_names(model, optimizer))


def _parameters(optimizer: Any) -> list[Tensor]:
    return [each for group in optimizer.param_groups for each in group["params"]]


def _with_marked_shards(node: Any) -> Any:
    """Replace each DTensor in an optimizer's state by a dict that has this rank's shard and marks it as a shard."""
    if isinstance(node, Tensor):
        return {_SHARD: local_part(node)} if is_sharded(node) else node
    if isinstance(node, Mapping):
        return {key: _with_marked_shards(value) for key, value in node.items()}
    return [_with_marked_shards(value) for value in node] if isinstance(node, list) else node


def _own_shard(value: Any, parameter: Any) -> Any:
    """Convert a marked shard to a DTensor that is sharded like its parameter. Return any other value unchanged."""
    if not isinstance(value, Mapping) or _SHARD not in value:
        return value
    layout = parameter.device_mesh, parameter.placements
    shard = value[_SHARD].to(parameter.device)
    return type(parameter.data).from_local(shard, *layout, shape=parameter.shape, stride=parameter.stride())


def with_values(optimizer: Any, state: Mapping[str, Any], change: Callable[[Any, Any], Any]) -> Mapping[str, Any]:
    """Return a state in which ``change(value, parameter)`` replaces each value that belongs to a parameter.

    The key of a parameter's values is the parameter's number or, in some wrappers, a pair: the number of the group, and
    the number of the parameter in the group.
    """
    places: dict[Any, Any] = dict(enumerate(_parameters(optimizer)))
    for number, group in enumerate(optimizer.param_groups):
        places.update(((number, place), parameter) for place, parameter in enumerate(group["params"]))

    def changed(node: Any) -> Any:
        if not isinstance(node, Mapping):
            return node
        found = {}
        for key, value in node.items():
            if key in places and isinstance(value, Mapping):
                found[key] = {name: change(each, places[key]) for name, each in value.items()}
            else:
                found[key] = changed(value)
        return found

    return changed(state)  # type: ignore[no-any-return]


def torch_part(state: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the part of an optimizer's state that has torch's keys "state" and "param_groups".

    This is the whole state or, for a wrapper, the state of the optimizer inside it, which wrappers such as
    pytorch_optimizer's Lookahead store under their own key. Return an empty dictionary if there is no such part, or
    several.
    """
    if _is_of_torch(state):
        return state
    inner = [part for value in state.values() if isinstance(value, Mapping) and (part := torch_part(value))]
    return inner[0] if len(inner) == 1 else {}


def with_groups(state: Mapping[str, Any], groups: Sequence[Mapping[str, Any]]) -> Mapping[str, Any]:
    """Return a state with other parameter groups in its :func:`torch_part`."""
    part = torch_part(state)

    def replaced(node: Any) -> Any:
        if node is part:
            return {**part, "param_groups": groups}
        return {key: replaced(value) for key, value in node.items()} if isinstance(node, Mapping) else node

    return replaced(state)  # type: ignore[no-any-return]


def _is_of_torch(state: Mapping[str, Any]) -> bool:
    return "state" in state and "param_groups" in state


def _torch_parts(state: Any) -> Iterator[Mapping[str, Any]]:
    """Yield a state, if it has torch's keys, and the states of inner optimizers in it."""
    if isinstance(state, Mapping):
        if _is_of_torch(state):
            yield state
        for value in state.values():
            yield from _torch_parts(value)


def arranged(
    state: Mapping[str, Any], names: Sequence[Sequence[str]], own: Sequence[Sequence[str]]
) -> Mapping[str, Any]:
    """Return an optimizer's state, rearranged in the order of another optimizer's groups and parameters.

    Args:
        state: State as returned by ``state_dict()``.
        names: Names of the parameters in ``state``, by group.
        own: Names of the parameters of the other optimizer, by group. Parameters without a name keep their order, and
            a warning is logged if a group has several.

    Raises:
        ValueError: The groups have different parameters. Also raised if the state must be rearranged, but has entries
            that torch does not define, or is a single state for all parameters (as in LBFGS).
    """
    if any(list(group).count("") > 1 for group in own):
        _warn_of_order()
    if [*map(list, names)] == [*map(list, own)]:
        return state
    left = list(range(len(names)))
    chosen = []
    for group in own:
        place = next((each for each in left if sorted(names[each]) == sorted(group)), None)
        if place is None:
            raise ValueError(f"{_ALLOWED}, but {_difference(names, own)}")
        left.remove(place)
        chosen.append(place)
    if left:
        raise ValueError(f"{_ALLOWED}, but {_difference(names, own)}")
    if state.keys() != {"state", "param_groups"}:
        other = min(map(str, state.keys() - {"state", "param_groups"}), default="no 'param_groups'")
        raise ValueError(
            f"the optimizer must list its parameters in the same order on all ranks, since its state has {other!r} in "
            "addition to that of torch, and cannot be rearranged"
        )
    if state["state"] and any("line_search_fn" in group for group in state["param_groups"]):
        raise ValueError(
            "LBFGS must list its parameters in the same order as the optimizer whose state it loads, since it keeps "
            "one state for all of them, which cannot be rearranged"
        )
    groups: list[dict[str, Any]] = []
    moved: dict[int, int] = {}
    for group, place in zip(own, chosen, strict=True):
        found = state["param_groups"][place]
        indices = _in_order(found["params"], names[place], group)
        first = len(moved)
        moved.update({index: first + offset for offset, index in enumerate(indices)})
        kept = {key: value for key, value in found.items() if key not in ("params", "param_names")}
        groups.append({**kept, "params": list(range(first, first + len(indices)))})
    return {"state": {moved.get(key, key): value for key, value in state["state"].items()}, "param_groups": groups}


@functools.cache  # one warning per process
def _warn_of_order() -> None:
    logger.warning(
        "the optimizer has several parameters outside the model in one group. They have no names, so a loaded state is "
        "given to them by their order: list them in the same order on all ranks and in all runs"
    )


def _in_order(indices: Sequence[int], names: Sequence[str], own: Sequence[str]) -> list[int]:
    by_name: dict[str, list[int]] = {}
    for index, name in zip(indices, names, strict=True):
        by_name.setdefault(name, []).append(index)
    return [by_name[name].pop(0) for name in own]


def _difference(names: Sequence[Sequence[str]], own: Sequence[Sequence[str]]) -> str:
    saved, here = ({name for group in groups for name in group if name} for groups in (names, own))
    for name in sorted(here - saved):
        return f"{name!r} is only in this optimizer"
    for name in sorted(saved - here):
        return f"{name!r} is only in the other optimizer"
    sizes, others = ([len(group) for group in groups] for groups in (own, names))
    if sorted(sizes) != sorted(others):
        return f"its groups have {sizes} parameters here and {others} there"
    return "some parameters are in other groups"


@torch.inference_mode(False)  # the state is used after the caller's inference mode has ended
def load_exactly(optimizer: Any, state: Mapping[str, Any]) -> None:
    """Call ``optimizer.load_state_dict(state)``, but keep the dtype of each tensor in the state.

    torch converts all floating-point tensors of the state to the dtype of their parameter, which would round the
    float32 moments of bfloat16 weights.
    """
    optimizer.load_state_dict(dict(state))
    optimizers = wrapped_optimizers(optimizer)
    if len(optimizers) == 1:
        _restore_dtypes(optimizer, torch_part(state).get("state", {}))
    else:  # it is unknown which part belongs to which optimizer, so the values decide
        for part in _torch_parts(state):
            for each in optimizers:
                _restore_dtypes(each, part["state"], must_match=True)


def _restore_dtypes(optimizer: Any, state: Mapping[Any, Any], *, must_match: bool = False) -> None:
    """Replace each tensor that was converted to another dtype by the tensor in ``state``.

    If ``must_match`` is true, keep tensors that are not conversions of the tensors in ``state``.
    """
    parameters = _parameters(optimizer)
    for place, entries in state.items():
        stored = optimizer.state.get(parameters[place]) if isinstance(place, int) and place < len(parameters) else None
        if not isinstance(stored, dict) or not isinstance(entries, Mapping):
            continue
        for name, value in entries.items():
            now = stored.get(name)
            if name == "step" or not isinstance(value, Tensor) or not isinstance(now, Tensor):
                continue  # load_state_dict keeps the dtype of step counts, or converts them as the GPU needs
            if now.dtype != value.dtype and (not must_match or _is_conversion(now, value)):
                stored[name] = value.to(now.device)


def _is_conversion(now: Tensor, value: Tensor) -> bool:
    own, other = local_part(now), local_part(value)
    return torch.equal(own, other.to(own))


def setting_names(optimizer: Any) -> frozenset[str]:
    """Return the names of settings in the parameter groups of an optimizer and of the optimizers that it wraps."""
    found = {*_SETTINGS, *_SCHEDULED}
    for each in wrapped_optimizers(unwrapped(optimizer)):
        kind: Any = type(each)
        found |= _arguments_of(kind)
    return frozenset(found)


@functools.cache
def _arguments_of(kind: Any) -> frozenset[str]:
    """Return the names of the parameters of the constructors of a class and its base classes."""
    found = set[str]()
    for constructor in (vars(each)["__init__"] for each in kind.__mro__ if "__init__" in vars(each)):
        with contextlib.suppress(TypeError, ValueError):  # a compiled constructor may have no signature
            found.update(inspect.signature(constructor).parameters)
    return frozenset(found)


def load_group_state(optimizer: Any, groups: Iterable[Mapping[str, Any]], settings: Collection[str] = ()) -> None:
    """Copy another optimizer's state into the parameter groups. Tensors are changed in place, and settings are kept.

    Args:
        groups: Parameter groups in the state of an optimizer of the same class.
        settings: Names of further entries to keep.
    """
    kept = setting_names(optimizer).union(settings)
    for own, theirs in zip(optimizer.param_groups, groups, strict=True):
        for name in theirs.keys() - kept:
            _put(own, name, theirs[name])


def _put(group: dict[str, Any], name: str, new: Any) -> None:
    old = group.get(name)
    if isinstance(old, Tensor) and isinstance(new, Tensor) and old.shape == new.shape:
        old.copy_(new)  # a CUDA graph may read the tensor's memory
    elif isinstance(new, Tensor):
        group[name] = new.to((old if isinstance(old, Tensor) else group["params"][0]).device)
    else:
        group[name] = new
