"""Maps a function of one element over a batch that is split among the ranks of a named axis.

``shmap_vmap`` calls the function once, with ``torch.func.vmap``, for all elements of this rank's shard. ``shmap_map``
calls the function for each element in turn, and accepts coroutine functions that use collectives. Every rank passes the
whole arguments, computes its own shard, and gets the whole outputs.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Coroutine, Sequence
from typing import Any, Literal

import optree
import torch
from torch import Tensor

from asyncdist.errors import LocalProtocolError
from asyncdist.spmd.mesh import Axis, Mesh
from asyncdist.spmd.sharding import Spec, shard
from asyncdist.spmd.tree_collectives import all_gather, refuse_inside_vmap, reporting_failure, vectorising
from asyncdist.tensors import pytrees


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
            argument. None passes the whole argument to every call. It must be equal on all ranks, which is not checked.
        out_specs: One spec for each output if ``fn`` returns a tuple, or one for all. Each output's elements are
            stacked along a new leading dimension. An axis name concatenates the outputs of that axis's ranks along this
            dimension, in axis order. With None, each rank returns only its own outputs.

    Returns:
        ``async (*args) -> outputs``. It raises ValueError or TypeError if arguments do not fit their specs or outputs
        are not tensors, and any error of :func:`asyncdist.all_gather`. If it fails on one rank, the ranks that wait for
        that rank's outputs get a RemoteError.

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
                leaves = [shard(leaf, axis, path) for leaf, path in zip(leaves, paths, strict=True)]
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
