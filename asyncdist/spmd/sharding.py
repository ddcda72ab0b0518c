"""Puts trees on devices and ranks, makes random generators for each, and tells which rank this process is.

This module never sends or waits.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, TypeAlias, TypeVar, cast

import numpy as np
import optree
import torch
from torch import Tensor

from asyncdist.runtime.world import World, current_world
from asyncdist.spmd.mesh import Axis, Mesh
from asyncdist.tensors import pytrees

T = TypeVar("T")

#: The name of the axis that the leading dimension is split over; None: the same on every rank.
Spec: TypeAlias = str | None

_SEED_BITS: Final = 32  # as much of a seed as torch's generator for CPUs looks at


@dataclass(frozen=True, slots=True)
class Sharding:
    """Says where :func:`tree_device_put` puts the leaves of a tree.

    Attributes:
        mesh: the mesh that has the axis.
        spec: the axis over which the leading dimension is split; None: the whole leaf on every rank.
        device: the device of the shard; the leaf's own by default.
    """

    mesh: Mesh
    spec: Spec
    device: torch.device | str | None = None


def shard(leaf: Tensor, axis: Axis, path: str) -> Tensor:
    """Return this rank's part of a leaf, as a view.

    Args:
        leaf: the whole leaf.
        axis: the axis over which its leading dimension is split.
        path: the leaf's name in the error.

    Raises:
        ValueError: the leaf has no leading dimension, or one that the axis does not divide.
    """
    if leaf.dim() == 0 or len(leaf) == 0 or len(leaf) % axis.size:
        what = "has no dimension" if leaf.dim() == 0 else f"has a leading dimension of {len(leaf)}"
        raise ValueError(
            f"{path} {what}; allowed: a positive multiple of {axis.size}, the size of axis {axis.name!r} that splits it"
        )
    count = len(leaf) // axis.size
    return leaf.narrow(0, axis.index * count, count)


def tree_device_put(tree: T, device_or_sharding: torch.device | str | Sharding) -> T:
    """Put every leaf of a tree on a device, or on each rank its shard of it.

    Args:
        tree: a tree of tensors.
        device_or_sharding: a device, or how the leading dimension is split over ranks.

    Returns:
        A tree of the same structure. Leaves that are in the right place are the same objects, shards are views.

    Raises:
        TypeError: a leaf is no dense tensor; its path is named.
        ValueError: an axis does not divide a leading dimension.
        RuntimeError: torch's own, for a device that does not exist.
    """
    leaves, spec = pytrees.flatten_tensors(tree, "tree")
    if not isinstance(device_or_sharding, Sharding):
        return cast("T", optree.tree_unflatten(spec, [leaf.to(device_or_sharding) for leaf in leaves]))
    sharding = device_or_sharding
    if sharding.spec is not None:
        axis = sharding.mesh.axis(sharding.spec)
        leaves = [shard(leaf, axis, path) for leaf, path in zip(leaves, pytrees.leaf_paths(spec, "tree"), strict=True)]
    return cast("T", optree.tree_unflatten(spec, [leaf.to(sharding.device or leaf.device) for leaf in leaves]))


def split_key_to_devices(key: int | torch.Generator, devices: Sequence[torch.device | str]) -> list[torch.Generator]:
    """Make one independent, reproducible random generator per device.

    Generator i depends on the key and on i alone, not on how many there are; all of their seeds differ. Ranks that pass
    the same key get the same generators: each takes its own, ``split_key_to_devices(7, ["cpu"] * size)[rank]``.

    Args:
        key: a number of at least 0; or a generator, from which one is drawn, so that splitting it again gives others.
        devices: the device of each generator.

    Raises:
        TypeError: the key is something else.
        ValueError: the key is negative.
        RuntimeError: torch's own, for a device that does not exist or has no generator.
    """
    if isinstance(key, torch.Generator):
        key = int(torch.randint(2**63 - 1, (), generator=key, device=key.device))
    if type(key) is not int:
        raise TypeError(f"key is {key!r}; allowed: an int of at least 0, or a torch.Generator")
    if key < 0:
        raise ValueError(f"key is {key}; allowed: an int of at least 0, or a torch.Generator")
    seeds: dict[int, int] = {}  # by what torch looks at; two that agree there would be one generator
    child = 0
    while len(seeds) < len(devices):
        seed = int(np.random.SeedSequence(key, spawn_key=(child,)).generate_state(1, np.uint64)[0])
        seeds.setdefault(seed % 2**_SEED_BITS, seed)
        child += 1
    return [torch.Generator(device).manual_seed(seed) for device, seed in zip(devices, seeds.values(), strict=True)]


def get_global_ranks(*, world: World | None = None) -> Tensor:
    """Return all ranks in order, int64 of shape [size]; split over an axis, each rank gets those of its shard."""
    return torch.arange((world or current_world()).size, device="cpu")


def get_process_id() -> int:
    """Return the calling task's rank; 0 outside any world."""
    return current_world().rank if is_dist_initialized() else 0


def is_dist_initialized() -> bool:
    """Return whether the calling task runs in a world."""
    try:
        current_world()
    except RuntimeError:
        return False
    return True
