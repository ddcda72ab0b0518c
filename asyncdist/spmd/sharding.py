"""Splits trees over the ranks of a named axis, and maps a function of one element over the split batch.

``shmap_vmap`` calls the function once, with ``torch.func.vmap``, for all elements of this rank's shard. ``shmap_map``
calls the function for each element in turn, and accepts coroutine functions that use collectives. Every rank passes the
whole arguments, computes its own shard, and gets the whole outputs.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal, TypeAlias, TypeVar, cast

import numpy as np
import optree
import torch
from torch import Tensor

from asyncdist.errors import LocalProtocolError
from asyncdist.runtime.world import World, current_world
from asyncdist.spmd.mesh import Axis, Mesh, calling_world
from asyncdist.spmd.tree_collectives import all_gather, refuse_inside_vmap, reporting_failure, vectorising
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


def _shard(leaf: Tensor, axis: Axis, path: str) -> Tensor:
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
        leaves = [_shard(leaf, axis, path) for leaf, path in zip(leaves, pytrees.leaf_paths(spec, "tree"), strict=True)]
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


def shmap_map(
    fn: Callable[..., Any], mesh: Mesh, in_specs: Spec | Sequence[Spec], out_specs: Spec | Sequence[Spec]
) -> Callable[..., Coroutine[Any, Any, Any]]:
    """Return a coroutine function that runs ``fn`` on each element of this rank's shard in turn.

    Args:
        fn: Function of one element. Its positional arguments are trees of tensors without the leading dimension. It
            returns a tree of tensors, with equal structure, shapes and dtypes for all elements. A coroutine function
            may use collectives along the mesh's axes, because all ranks of an axis process the same number of elements.
        in_specs: One spec for each argument, or one for all. An axis name splits the leading dimension of the
            argument's leaves over that axis, whose size must divide the dimension. Call i gets element i of every split
            argument. None passes the whole argument to every call. The argument must be equal on all ranks, which is
            not checked.
        out_specs: One spec for each output if ``fn`` returns a tuple, or one for all. Each output's elements are
            stacked along a new leading dimension. An axis name concatenates the outputs of that axis's ranks along this
            dimension, in axis order. With None, each rank returns only its own outputs.

    Returns:
        ``async (*args) -> outputs``. It raises ValueError or TypeError if arguments do not fit their specs or outputs
        are not tensors, and any error of :func:`asyncdist.all_gather`. If it fails on one rank, the ranks that are
        waiting for that rank's outputs get a RemoteError.

    Raises:
        TypeError: A spec is neither a name nor None.
        ValueError: No argument is split.
        LocalProtocolError: The mesh has no such axis, or belongs to a different rank.
    """
    inputs, outputs = _Specs(mesh, in_specs, "in_specs"), _Specs(mesh, out_specs, "out_specs")
    inputs.check_some_split()

    async def mapped(*args: Any) -> Any:
        waiting = outputs.axes()
        with reporting_failure(waiting.values()):
            batch = _Batch(inputs, args)
            rows: list[list[Tensor]] = []
            spec: optree.PyTreeSpec | None = None
            with mesh:
                for index in range(batch.count):
                    result = fn(*batch.element(index))
                    if inspect.isawaitable(result):
                        result = await result
                    leaves, found = pytrees.flatten_tensors(result, "output")
                    if spec is not None and found != spec:
                        raise ValueError(
                            f"the outputs of all elements must be trees of the same structure, got {found} for element "
                            f"{index} and {spec} for element 0"
                        )
                    spec = found
                    rows.append(leaves)
            assert spec is not None
            columns = [_stacked(column) for column in zip(*rows, strict=True)]
            return await outputs.gather(optree.tree_unflatten(spec, columns), waiting)

    return mapped


def shmap_vmap(
    fn: Callable[..., Any],
    mesh: Mesh,
    in_specs: Spec | Sequence[Spec],
    out_specs: Spec | Sequence[Spec],
    *,
    randomness: Literal["error", "different", "same"] = "error",
    chunk_size: int | None = None,
) -> Callable[..., Coroutine[Any, Any, Any]]:
    """Return a coroutine function that runs ``fn`` on all elements of this rank's shard at once, with vmap.

    Args:
        fn: Function of one element that uses only operations supported by ``torch.func.vmap``. It cannot be a coroutine
            function or use collectives. Reduce its outputs instead.
        in_specs: Axes over which the arguments are split, as for :func:`shmap_map`.
        out_specs: Axes along which the outputs are gathered, as for :func:`shmap_map`.
        randomness: Behaviour of random operations in ``fn``, passed to ``torch.func.vmap``.
        chunk_size: Number of elements computed at a time; all by default.

    Raises:
        LocalProtocolError: ``fn`` is a coroutine function.
        Exception: Any error that :func:`shmap_map` raises.
    """
    inputs, outputs = _Specs(mesh, in_specs, "in_specs"), _Specs(mesh, out_specs, "out_specs")
    inputs.check_some_split()
    name = f"shmap_vmap of {getattr(fn, '__qualname__', fn)}"
    if inspect.iscoroutinefunction(fn):
        raise _no_collective(name)

    async def mapped(*args: Any) -> Any:
        refuse_inside_vmap("shmap_vmap")
        waiting = outputs.axes()
        with reporting_failure(waiting.values()):
            batch = _Batch(inputs, args)
            spec: optree.PyTreeSpec | None = None

            def on_leaves(*leaves: Tensor) -> tuple[Tensor, ...]:
                nonlocal spec
                result = fn(*batch.from_leaves(leaves))
                _refuse_coroutines(result, name)
                found, spec = pytrees.flatten_tensors(result, "output")
                return tuple(found)

            with mesh, vectorising(name):
                run = torch.func.vmap(on_leaves, batch.dimensions, randomness=randomness, chunk_size=chunk_size)
                found = run(*batch.leaves)
            assert spec is not None
            return await outputs.gather(optree.tree_unflatten(spec, found), waiting)

    return mapped


class _Specs:
    """The specs of a mapped function's arguments or outputs: one spec for each value, or one for all."""

    def __init__(self, mesh: Mesh, specs: Spec | Sequence[Spec], name: str) -> None:
        self._one = specs is None or isinstance(specs, str)
        self._specs: tuple[Spec, ...] = (specs,) if specs is None or isinstance(specs, str) else tuple(specs)
        self._mesh = mesh
        self.name = name
        for spec in self._specs:
            if spec is not None and not isinstance(spec, str):
                raise TypeError(f"a spec in {name} must be the name of an axis or None, got {spec!r}")
            self.axis(spec)

    def axis(self, spec: Spec) -> Axis | None:
        return None if spec is None else self._mesh.axis(spec)

    def check_some_split(self) -> None:
        if not any(self._specs):
            raise ValueError(
                f"{self.name} must name at least one axis over which an argument is split, got {self._specs}"
            )

    def per_value(self, count: int) -> tuple[Spec, ...]:
        if self._one:
            return self._specs * count
        if len(self._specs) != count:
            raise ValueError(
                f"{self.name} must have one spec for all values, or one for each of {count}, got {len(self._specs)}"
            )
        return self._specs

    def axes(self) -> dict[str, Axis]:
        return {spec: self._mesh.axis(spec) for spec in self._specs if spec is not None}

    async def gather(self, result: Any, waiting: dict[str, Axis]) -> Any:
        """Return the concatenated outputs of all ranks, with one operation along each axis.

        If an operation fails, ``waiting`` contains the axes along which no operation has begun.
        """
        values = (result,) if self._one or type(result) is not tuple else result
        specs = self.per_value(len(values))
        whole = list(values)
        for name in dict.fromkeys(spec for spec in specs if spec is not None):
            places = [place for place, spec in enumerate(specs) if spec == name]
            del waiting[name]
            parts = await all_gather([values[place] for place in places], name, tiled=True, mesh=self._mesh)
            for place, part in zip(places, parts, strict=True):
                whole[place] = part
        return whole[0] if values is not result else tuple(whole)


class _Batch:
    """This rank's shard of the arguments of one call to a mapped function, as a flat list of leaves."""

    def __init__(self, specs: _Specs, args: Sequence[Any]) -> None:
        self.leaves: list[Tensor] = []
        self.dimensions: tuple[int | None, ...] = ()
        given: Any = tuple(args)
        self._tree: optree.PyTreeSpec = optree.tree_structure(given)
        counts: dict[str, int] = {}
        for place, (value, spec) in enumerate(zip(args, specs.per_value(len(args)), strict=True)):
            axis = specs.axis(spec)
            leaves, tree = pytrees.flatten_tensors(value, f"argument {place}")
            if axis is not None:
                paths = pytrees.leaf_paths(tree, f"argument {place}")
                leaves = [_shard(leaf, axis, path) for leaf, path in zip(leaves, paths, strict=True)]
                counts.update({path: len(leaf) for path, leaf in zip(paths, leaves, strict=True)})
            self.leaves += leaves
            self.dimensions += (None if axis is None else 0,) * len(leaves)
        if len(set(counts.values())) != 1:
            found = ", ".join(f"{count} of {path}" for path, count in counts.items())
            raise ValueError(
                f"all split arguments must have the same number of elements and at least one, got {found or 'none'} on "
                "this rank"
            )
        self.count = next(iter(counts.values()))

    def from_leaves(self, leaves: Sequence[Tensor]) -> Any:
        """Return the mapped function's arguments, rebuilt from a flat list of leaves."""
        return optree.tree_unflatten(self._tree, leaves)

    def element(self, index: int) -> Any:
        """Return the mapped function's arguments for the element with this index."""
        pairs = zip(self.leaves, self.dimensions, strict=True)
        return self.from_leaves([leaf if dimension is None else leaf[index] for leaf, dimension in pairs])


def _stacked(column: Sequence[Tensor]) -> Tensor:
    kinds = {(leaf.dtype, tuple(leaf.shape)) for leaf in column}
    if len(kinds) > 1:
        raise ValueError(f"all elements' outputs must have the same dtype and shape, got {sorted(map(str, kinds))}")
    return torch.stack(list(column))


def _no_collective(name: str) -> LocalProtocolError:
    return LocalProtocolError(
        f"{name}: a collective or other coroutine cannot run inside vmap, which calls its function once for all "
        "elements: use shmap_map, or reduce the result"
    )


def _refuse_coroutines(result: Any, name: str) -> None:
    coroutines = [leaf for leaf in optree.tree_leaves(result) if inspect.iscoroutine(leaf)]
    for coroutine in coroutines:
        coroutine.close()
    if coroutines:
        raise _no_collective(name)
