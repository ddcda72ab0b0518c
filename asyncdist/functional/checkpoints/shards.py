"""Compares how loaded tensors and this rank's tensors are sharded, and moves loaded shards to this rank's mesh.

A loaded DTensor belongs to the device mesh of the job that saved it, whose process groups do not exist here. Torch
cannot copy it into a DTensor of another mesh, even if both are the same shard.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

import torch

from asyncdist.tensors.model_tensors import is_sharded, local_part
from asyncdist.tensors.optimizers.loading import with_values


def shard_of(tensor: Any) -> str:
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
    return with_values(optimizer, state, _moved)


def _moved(loaded: Any, own: Any) -> Any:
    """Return the loaded shard on the mesh of ``own``, or any other value unchanged."""
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
