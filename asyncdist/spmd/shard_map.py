"""Runs a function of one element over a batch that is split among the ranks of a named axis.

``shmap_vmap`` calls the function once, with ``torch.func.vmap``, for all elements of this rank's shard. ``shmap_map``
calls it for one element after the other and awaits it if it is a coroutine function, so it may use collectives. Every
rank passes whole arguments, takes its part of them, and gets whole outputs back.
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
from asyncdist.spmd.tree_collectives import all_gather, refuse_inside_vmap, telling_failure, vectorising
from asyncdist.tensors import pytrees


def shmap_map(
    fn: Callable[..., Any], mesh: Mesh, in_specs: Spec | Sequence[Spec], out_specs: Spec | Sequence[Spec]
) -> Callable[..., Coroutine[Any, Any, Any]]:
    """Run ``fn`` on one element after the other of this rank's shard.

    Args:
        fn: takes positional arguments, trees of tensors without the leading dimension; returns a tree of tensors, equal
            in structure, shapes and dtypes for all elements. May be a coroutine function; the mesh is open inside, and
            all ranks of an axis have equally many elements.
        mesh: this rank's.
        in_specs: one per argument, or one for all. The leading dimension of all leaves of an argument is split over the
            named axis, whose size must divide it; the elements of all such arguments run in step. An argument with None
            is passed whole to every call and must be the same on all ranks, which is not checked.
        out_specs: one per output where ``fn`` returns a tuple, or one for all. An output's elements are stacked along a
            new leading dimension, and those of the ranks of the named axis are joined along it, in the axis's order;
            with None every rank keeps its own.

    Returns:
        ``async (*args) -> outputs``. It raises ValueError and TypeError for arguments that do not fit their specs or
        outputs that are no tensors (named by path), and what :func:`asyncdist.all_gather` does. An exception on one
        rank is a RemoteError on those that wait for its outputs, along the axes of ``out_specs``.

    Raises:
        TypeError: a spec is neither a name nor None.
        ValueError: no argument is split.
        LocalProtocolError: the mesh has no such axis, or belongs to another rank.
    """
    inputs, outputs = _Specs(mesh, in_specs, "in_specs"), _Specs(mesh, out_specs, "out_specs")
    inputs.check_some_split()

    async def mapped(*args: Any) -> Any:
        waiting = outputs.axes()
        with telling_failure(waiting.values()):
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
                            f"the output of element {index} is {found}, that of element 0 {spec}; allowed: one tree"
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
    """Run ``fn`` on all elements of this rank's shard at once, with ``torch.func.vmap``.

    Args:
        fn: as for :func:`shmap_map`, of tensor operations that vmap knows; no coroutine function, and without
            collectives: reduce what it returns instead.
        mesh: as for :func:`shmap_map`.
        in_specs: as for :func:`shmap_map`.
        out_specs: as for :func:`shmap_map`.
        randomness: what random operations do inside, as in ``torch.func.vmap``.
        chunk_size: elements at a time; all by default.

    Returns and Raises: as :func:`shmap_map`; also LocalProtocolError where ``fn`` uses a collective.
    """
    inputs, outputs = _Specs(mesh, in_specs, "in_specs"), _Specs(mesh, out_specs, "out_specs")
    inputs.check_some_split()
    name = f"shmap_vmap of {getattr(fn, '__qualname__', fn)}"
    if inspect.iscoroutinefunction(fn):
        raise _no_collective(name)

    async def mapped(*args: Any) -> Any:
        refuse_inside_vmap("shmap_vmap")
        waiting = outputs.axes()
        with telling_failure(waiting.values()):
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
    """Holds the specs of arguments or outputs, one each or one for all."""

    def __init__(self, mesh: Mesh, specs: Spec | Sequence[Spec], name: str) -> None:
        self._one = specs is None or isinstance(specs, str)
        self._specs: tuple[Spec, ...] = (specs,) if specs is None or isinstance(specs, str) else tuple(specs)
        self._mesh = mesh
        self.name = name
        for spec in self._specs:
            if spec is not None and not isinstance(spec, str):
                raise TypeError(f"{name} holds {spec!r}; allowed: the name of an axis, or None")
            self.axis(spec)

    def axis(self, spec: Spec) -> Axis | None:
        return None if spec is None else self._mesh.axis(spec)

    def check_some_split(self) -> None:
        if not any(self._specs):
            raise ValueError(
                f"{self.name} is {self._specs}; allowed: at least one axis, over whose ranks something is split"
            )

    def per_value(self, count: int) -> tuple[Spec, ...]:
        if self._one:
            return self._specs * count
        if len(self._specs) != count:
            raise ValueError(
                f"{self.name} has {len(self._specs)} specs for {count} values; allowed: one each, or one for all"
            )
        return self._specs

    def axes(self) -> dict[str, Axis]:
        """Return each axis along which outputs are gathered, by name."""
        return {spec: self._mesh.axis(spec) for spec in self._specs if spec is not None}

    async def gather(self, result: Any, waiting: dict[str, Axis]) -> Any:
        """Join the outputs of the ranks, those along one axis together.

        Args:
            result: the outputs of this rank.
            waiting: the axes along which gathering has not begun; each is removed when it begins.
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
    """Holds this rank's part of the arguments of one call, as flat leaves."""

    def __init__(self, specs: _Specs, args: Sequence[Any]) -> None:
        self.leaves: list[Tensor] = []
        self.dimensions: tuple[int | None, ...] = ()
        self._trees: list[tuple[int, optree.PyTreeSpec]] = []
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
            self._trees.append((len(leaves), tree))
        if len(set(counts.values())) != 1:
            found = ", ".join(f"{count} of {path}" for path, count in counts.items())
            raise ValueError(
                f"the elements on this rank are {found or 'none'}; allowed: equally many of each, and some"
            )
        self.count = next(iter(counts.values()))

    def from_leaves(self, leaves: Sequence[Tensor]) -> list[Any]:
        """Return the arguments of one call, made of these leaves."""
        args, start = [], 0
        for count, tree in self._trees:
            args.append(optree.tree_unflatten(tree, leaves[start : start + count]))
            start += count
        return args

    def element(self, index: int) -> list[Any]:
        """Return the arguments for one element."""
        pairs = zip(self.leaves, self.dimensions, strict=True)
        return self.from_leaves([leaf if dimension is None else leaf[index] for leaf, dimension in pairs])


def _stacked(column: Sequence[Tensor]) -> Tensor:
    kinds = {(leaf.dtype, tuple(leaf.shape)) for leaf in column}
    if len(kinds) > 1:
        raise ValueError(f"the elements' outputs differ: {sorted(map(str, kinds))}; allowed: one dtype and shape")
    return torch.stack(list(column))


def _no_collective(name: str) -> LocalProtocolError:
    return LocalProtocolError(
        f"{name}: a collective, and any other coroutine, cannot run inside vmap, which calls its function once for all "
        "elements; use shmap_map, or reduce what it returns"
    )


def _refuse_coroutines(result: Any, name: str) -> None:
    coroutines = [leaf for leaf in optree.tree_leaves(result) if inspect.iscoroutine(leaf)]
    for coroutine in coroutines:
        coroutine.close()
    if coroutines:
        raise _no_collective(name)
