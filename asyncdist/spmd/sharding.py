"""Places trees on devices or splits them over ranks, and makes a random generator for each device.

No function in this module communicates with other ranks.
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
from asyncdist.spmd.mesh import Axis, Mesh, calling_world
from asyncdist.tensors import pytrees

T = TypeVar("T")

#: Name of the axis over which a value's leading dimension is split, or None if every rank has the whole value.
Spec: TypeAlias = str | None

_SEED_BITS: Final = 32  # torch's CPU generator ignores the higher bits of a seed


@dataclass(frozen=True, slots=True)
class Sharding:
    """Describes how :func:`tree_device_put` distributes the leaves of a tree over ranks.

    Attributes:
        spec: Name of the axis over which the leading dimension is split; None to place the whole leaf on every rank.
        device: Device of the shards; by default the leaf's device.
    """

    mesh: Mesh
    spec: Spec
    device: torch.device | str | None = None


def shard(leaf: Tensor, axis: Axis, path: str) -> Tensor:
    """Return this rank's shard of a leaf, whose leading dimension is split over an axis, as a view.

    Raises:
        ValueError: The leading dimension is not a positive multiple of the axis's size, or the leaf has no dimension.
    """
    if leaf.dim() == 0 or len(leaf) == 0 or len(leaf) % axis.size:
        what = "a tensor without dimensions" if leaf.dim() == 0 else f"{len(leaf)}"
        raise ValueError(
            f"the leading dimension of {path} must be a positive multiple of {axis.size}, the size of axis "
            f"{axis.name!r}, got {what}"
        )
    count = len(leaf) // axis.size
    return leaf.narrow(0, axis.index * count, count)


def tree_device_put(tree: T, device_or_sharding: torch.device | str | Sharding) -> T:
    """Move every leaf of a tree to a device, or take this rank's shard of every leaf.

    Args:
        tree: Tree of dense tensors.
        device_or_sharding: Device for whole leaves, or :class:`Sharding` over the ranks of a mesh.

    Returns:
        A tree of the same structure. Leaves that are already on the device are not copied, and their shards are views.

    Raises:
        TypeError: A leaf is not a dense tensor.
        ValueError: A leading dimension is not a positive multiple of the axis's size.
        RuntimeError: The device does not exist (raised by torch).
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
    """Return an independent, reproducible random generator for each device.

    Generator i depends only on the key and on i, and all seeds differ. Ranks that pass the same key get the same
    generators, from which each rank can select one: ``split_key_to_devices(7, ["cpu"] * size)[rank]``.

    Args:
        key: Integer >= 0, or generator from which each call takes a new random key.
        devices: Device of each new generator.

    Raises:
        TypeError: The key is neither an int nor a generator.
        ValueError: The key is negative.
        RuntimeError: A device does not exist or has no generator (raised by torch).
    """
    if isinstance(key, torch.Generator):
        key = int(torch.randint(2**63 - 1, (), generator=key, device=key.device))
    if type(key) is not int:
        raise TypeError(f"key must be an integer >= 0 or a torch.Generator, got {key!r:.80}")
    if key < 0:
        raise ValueError(f"key must be an integer >= 0 or a torch.Generator, got {key}")
    seeds: dict[int, int] = {}  # keyed by the bits that torch uses, because equal bits would give equal generators
    child = 0
    while len(seeds) < len(devices):
        seed = int(np.random.SeedSequence(key, spawn_key=(child,)).generate_state(1, np.uint64)[0])
        seeds.setdefault(seed % 2**_SEED_BITS, seed)
        child += 1
    return [torch.Generator(device).manual_seed(seed) for device, seed in zip(devices, seeds.values(), strict=True)]


def get_global_ranks(*, world: World | None = None) -> Tensor:
    """Return the ranks 0, 1, ... as an int64 tensor of shape [size], for example to see which rank has which shard."""
    return torch.arange((world or current_world()).size, device="cpu")


def get_process_id() -> int:
    """Return the calling task's rank, or 0 outside any world."""
    world = calling_world()
    return 0 if world is None else world.rank


def is_dist_initialized() -> bool:
    """Return whether the calling task runs in a world."""
    return calling_world() is not None
