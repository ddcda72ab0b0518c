"""Collectives on trees of tensors along a named mesh axis, with the results of ``jax.lax`` on the same inputs.

Each collective takes a tree and the name of an axis of an open mesh (:mod:`asyncdist.spmd.mesh`). For the name None, it
returns the tree unchanged, so that one training function works with and without the axis. Results are new, detached
tensors on the leaves' devices.

The ranks of the axis first compare their operations and trees. If these differ, every rank raises a DisagreementError
that names the first difference. Otherwise the ranks exchange one flat tensor per dtype.

Reductions run in rank order on every transport, so all ranks get bitwise identical results. These equal the results of
``jax.lax`` on CPUs with 64-bit types enabled, including the following details:

- Sums start from +0, so zeros of any sign add up to +0. Integer overflow wraps around. Booleans are counted, in int32.
- Sums of float16 are rounded after each addition. Sums of bfloat16 are computed in float32 and rounded once.
- A mean is the sum times the reciprocal of the number of ranks, both in the sum's dtype, because XLA rewrites the
  division. The mean of equal numbers over three ranks may therefore differ from them in the last bit. Sums of bfloat16
  are the exception: they are divided in float32. Means of int64 are float64, and means of other integers are float32.
- Minima and maxima start from an infinity, which a smaller or larger element replaces. NaN is therefore ignored, and
  among zeros of both signs the first rank's zero remains. If all elements are NaN, the infinity remains.
- Along an axis of one rank, values are unchanged, and only the dtype of a sum or mean may change.

**Ordering**: the ranks of an axis must await the same operations in the same order.
**Cancellation**: the operation continues in the background, because the other ranks take part in it, and its result is
lost. If this rank's main function returns before the other ranks have called the operation, they get a ClosedError.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Coroutine, Iterable, Iterator, Sequence
from contextvars import ContextVar
from typing import Any, Final, TypeVar

import optree
import torch
from torch import Tensor

from asyncdist.collectives.algorithms.ordered_reduce import Reduction
from asyncdist.collectives.error_exchange import LocalResult, share
from asyncdist.errors import DisagreementError, LocalProtocolError
from asyncdist.spmd.mesh import Axis, Mesh, find_axis
from asyncdist.tensors import pytrees
from asyncdist.tensors.byte_views import dtype_name

T = TypeVar("T")

#: Attribute of exceptions that were reported to all ranks of an axis. Maps the axis's subject to the number of the
#: operation that reported the exception.
_REPORTED: Final = "_asyncdist_reported"

#: Largest size in bytes of tensors that every rank reduces whole, which takes one exchange instead of two.
WHOLE_NBYTES: Final = 16 * 1024

_INTEGERS: Final = (torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)
_FLOATS: Final = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
_ORDERED: Final = (*_INTEGERS, *_FLOATS)
_SUMMED: Final = (*_ORDERED, torch.complex64, torch.complex128)

_vectorising: ContextVar[str] = ContextVar("asyncdist_vectorising", default="")


@contextlib.contextmanager
def vectorising(what: str) -> Iterator[None]:
    """Make collectives in the block raise an error that names ``what``, because vmap's tensors have no values."""
    token = _vectorising.set(what)
    try:
        yield
    finally:
        _vectorising.reset(token)


def refuse_inside_vmap(name: str) -> None:
    """Raise a LocalProtocolError that names the collective ``name`` if the caller runs inside vmap."""
    what = _vectorising.get()
    if what:
        raise LocalProtocolError(
            f"the collective {name} cannot run inside {what}, which calls its function once for all elements: use "
            "shmap_map, or reduce the result"
        )


@contextlib.contextmanager
def reporting_failure(axes: Iterable[Axis]) -> Iterator[None]:
    """Notify the other ranks along some axes if the block raises, so that their next operation fails without waiting.

    Args:
        axes: Axes along which this rank has not started its operation yet. The iterable is read again when the block
            raises. Axes along which an operation of the block has already reported the exception are skipped.
    """
    begun = {axis.subject: axis.begun_count for axis in axes}
    try:
        yield
    except GeneratorExit:  # the caller's coroutine is being closed, possibly after its event loop
        raise
    except BaseException as error:
        reported = _reported_along(error)
        for axis in axes:
            # If the job has failed, all ranks are notified anyway.
            job_continues = axis.world.services.engine.failure is None
            if job_continues and axis.size > 1 and reported.get(axis.subject, 0) <= begun[axis.subject]:
                axis.begin(functools.partial(_object, axis, error))
                _note_reported(error, axis)
        raise


async def _object(axis: Axis, error: BaseException) -> None:
    """Notify the axis's other ranks that this rank cannot take part in their next operation because of ``error``."""
    axis.world.agreements.object(axis.group.ranks, axis.subject, error)


def _note_reported(error: BaseException, axis: Axis) -> None:
    """Record in ``error`` that the newest operation along ``axis`` reports this error to all ranks of the axis."""
    vars(error).setdefault(_REPORTED, {})[axis.subject] = axis.begun_count


def _reported_along(error: BaseException) -> dict[str, int]:
    """Map each axis's subject to the number of the newest operation that reported ``error`` or a cause of it."""
    reported: dict[str, int] = {}
    todo: list[BaseException | None] = [error]
    seen: set[int] = set()
    while todo:
        found = todo.pop()
        if found is None or id(found) in seen:
            continue
        seen.add(id(found))
        for subject, number in vars(found).get(_REPORTED, {}).items():
            reported[subject] = max(number, reported.get(subject, 0))
        todo += [found.__cause__, found.__context__, *getattr(found, "exceptions", ())]
    return reported


def psum(tree: T, axis_name: str | None = None, *, mesh: Mesh | None = None) -> Coroutine[Any, Any, T]:
    """Sum each leaf over the ranks of an axis. Awaitable.

    Args:
        tree: Tree of boolean, integer, floating or complex tensors. Its structure, shapes and dtypes must be equal
            on all ranks of the axis.
        axis_name: Name of an axis of the mesh; None to return the tree unchanged.
        mesh: Mesh with the axis; by default the mesh opened last.

    Raises:
        TypeError: A leaf is not a dense tensor, or its dtype is not supported.
        LocalProtocolError: The mesh has no such axis, this rank is not in the mesh, or the caller runs inside vmap.
        DisagreementError: The ranks call different operations or pass different trees.
        ClosedError: A rank of the axis has left.
        RankLostError: A rank of the mesh is lost.
    """
    return _reduce("psum", tree, axis_name, mesh, _sum, _SUMMED)


def pmean(tree: T, axis_name: str | None = None, *, mesh: Mesh | None = None) -> Coroutine[Any, Any, T]:
    """Average each leaf over the ranks of an axis. Awaitable, with the arguments and errors of :func:`psum`."""
    return _reduce("pmean", tree, axis_name, mesh, _mean, _SUMMED)


def pmin(tree: T, axis_name: str | None = None, *, mesh: Mesh | None = None) -> Coroutine[Any, Any, T]:
    """Take each leaf's elementwise minimum over an axis. Awaitable; like :func:`psum`, but leaves cannot be complex."""
    return _reduce("pmin", tree, axis_name, mesh, _min, _ORDERED)


def pmax(tree: T, axis_name: str | None = None, *, mesh: Mesh | None = None) -> Coroutine[Any, Any, T]:
    """Take each leaf's elementwise maximum over an axis. Awaitable; like :func:`psum`, but leaves cannot be complex."""
    return _reduce("pmax", tree, axis_name, mesh, _max, _ORDERED)


def all_gather(
    tree: T, axis_name: str | None, *, axis: int = 0, tiled: bool = False, mesh: Mesh | None = None
) -> Coroutine[Any, Any, T]:
    """Gather each leaf from all ranks of an axis, in axis order, on every rank. Awaitable.

    Args:
        tree: Tree of tensors of any dtype. Its structure, shapes and dtypes must be equal on all ranks of the axis.
        axis_name: Name of an axis of the mesh; None to return the tree unchanged.
        axis: Dimension along which the ranks' leaves are combined; negative values count from the end.
        tiled: Whether to concatenate the leaves along this dimension instead of stacking them along a new one.
        mesh: Mesh with the axis; by default the mesh opened last.

    Raises:
        ValueError: A leaf does not have the dimension ``axis``.
        Exception: Any error that :func:`psum` raises.
    """
    refuse_inside_vmap("all_gather")
    if axis_name is None:
        return _unchanged(tree)
    place = find_axis(axis_name, mesh)
    leaves, outline = pytrees.outline(tree)
    trouble = _foreign("all_gather", outline)
    if trouble is None:
        for leaf, path in zip(leaves, pytrees.leaf_paths(outline.spec, "tree"), strict=True):
            count = leaf.dim() + (not tiled)
            if not -count <= axis < count:
                allowed = f"axis must be from {-count} to {count - 1}" if count else "tiled must be False"
                trouble = ValueError(f"{allowed} for {path} of shape {list(leaf.shape)}, got axis={axis}, {tiled=}")
                break
    what = f"all_gather, axis {axis}{', tiled' if tiled else ''}"
    return _perform(place, what, outline, trouble, functools.partial(_gather_leaves, place, leaves, axis, tiled))


def _reduce(
    name: str, tree: T, axis_name: str | None, mesh: Mesh | None, fold: Reduction, dtypes: Sequence[torch.dtype]
) -> Coroutine[Any, Any, T]:
    refuse_inside_vmap(name)
    if axis_name is None:
        return _unchanged(tree)
    place = find_axis(axis_name, mesh)
    leaves, outline = pytrees.outline(tree)
    trouble = _foreign(name, outline)
    if trouble is None:
        wrong = outline.first_leaf(lambda kind: kind[0] not in dtypes)
        if wrong is not None:
            allowed = ", ".join(dtype_name(dtype) for dtype in dtypes)
            trouble = TypeError(f"{wrong[0]} must be a dense tensor of {allowed} for {name}, got {wrong[1]}")
    return _perform(place, name, outline, trouble, functools.partial(_reduce_leaves, place, leaves, fold))


async def _unchanged(tree: T) -> T:
    return tree


def _foreign(name: str, outline: pytrees.Outline) -> Exception | None:
    wrong = outline.first_leaf(pytrees.is_foreign)
    return None if wrong is None else TypeError(f"{wrong[0]} must be a dense tensor for {name}, got {wrong[1]}")


async def _perform(
    axis: Axis,
    what: str,
    outline: pytrees.Outline,
    trouble: Exception | None,
    exchange: Callable[[], Coroutine[Any, Any, list[Tensor]]],
) -> Any:
    """Agree on the operation with the axis's other ranks, exchange the leaves, and return the resulting tree.

    Args:
        what: Operation and its options, equal on all ranks of the axis.
        trouble: Error to raise for this rank's arguments; None if they are valid.
        exchange: Coroutine function that returns the resulting leaves.
    """
    engine = axis.world.services.engine
    engine.check_loop()
    axis.world.check()
    agree = functools.partial(_agree, axis, what, outline)
    if trouble is not None:
        # Despite the error, this rank compares trees, so that ranks with a different tree raise DisagreementError.
        axis.begin(agree)
        _note_reported(trouble, axis)
        raise trouble

    async def agree_and_exchange() -> list[Tensor]:
        await agree()
        return await exchange()

    try:
        leaves = await engine.shielded(axis.begin(agree_and_exchange), axis.group.tag)
    except Exception as error:
        _note_reported(error, axis)
        raise
    return optree.tree_unflatten(outline.spec, leaves)


async def _agree(axis: Axis, what: str, outline: pytrees.Outline) -> None:
    """Wait until all ranks of the axis have called the same operation with trees of equal structure.

    The ranks first compare digests of their trees. If these differ, the ranks exchange the trees' outlines (structure,
    shapes and dtypes), and every rank raises a DisagreementError with the same first difference.
    """
    if axis.size == 1:
        return
    ranks = axis.group.ranks
    values = {"operation": what, "tree": outline.digest}
    try:
        bound_to = axis.group.lease.bound_to
        await axis.world.agreements.agree(ranks, axis.subject, values, timeout_s=None, bound_to=bound_to)
    except DisagreementError as error:
        if error.facts.get("difference") != "tree":
            raise
    else:
        return
    path, sentence = pytrees.first_difference(*await _two_different_trees(axis, outline))
    raise DisagreementError(
        f"the trees for {what} along {axis.name!r} must be equal on all ranks, but {sentence}", difference=path
    )


async def _two_different_trees(axis: Axis, outline: pytrees.Outline) -> tuple[list[pytrees.Lines], list[int]]:
    """Return the lines of the first rank's tree and of the first tree that differs from it, and their ranks."""
    collectives, group = axis.world.collectives, axis.group
    digest = torch.frombuffer(bytearray.fromhex(outline.digest), dtype=torch.uint8)
    first, *others = await collectives.all_gather(digest, group)
    index = next(index for index, other in enumerate(others, 1) if not torch.equal(first, other))
    ranks = [group.ranks[0], group.ranks[index]]
    own = LocalResult(payload=pytrees.lines_to_text(outline.lines).encode())
    shared = [await share(collectives, group, own, rank) for rank in ranks]
    return [pytrees.lines_from_text(text.decode()) for _, text in shared], ranks


async def _gather_leaves(axis: Axis, leaves: Sequence[Tensor], dim: int, tiled: bool) -> list[Tensor]:
    flats = {}
    for dtype, flat in pytrees.pack(leaves).items():
        flats[dtype] = torch.stack(await axis.world.collectives.all_gather(flat, axis.group))
    stacks = pytrees.unpack(flats, leaves)
    return [torch.cat(list(each), dim) if tiled else each.movedim(0, dim).contiguous() for each in stacks]


async def _reduce_leaves(axis: Axis, leaves: Sequence[Tensor], fold: Reduction) -> list[Tensor]:
    """Reduce in rank order. Every rank reduces a small flat tensor whole, but only a part of a large one."""
    collectives, group = axis.world.collectives, axis.group
    flats = pytrees.pack(leaves)
    for dtype, flat in flats.items():
        if axis.size == 1:
            flats[dtype] = fold([flat])
        elif flat.nbytes <= WHOLE_NBYTES:
            flats[dtype] = fold(await collectives.all_gather(flat, group))
        else:
            flats[dtype] = await collectives.reduce_in_order(flat, group, fold)
    return pytrees.unpack(flats, leaves)


def _sum(parts: Sequence[Tensor]) -> Tensor:
    dtype = torch.int32 if parts[0].dtype == torch.bool else parts[0].dtype
    if len(parts) == 1:
        return parts[0].to(dtype)
    if dtype.is_complex:  # torch multiplies complex addends by 1 + 0j, which turns infinities into NaN
        return torch.view_as_complex(_sum([torch.view_as_real(part) for part in parts]))
    total = torch.zeros_like(parts[0], dtype=torch.float32 if dtype == torch.bfloat16 else dtype)
    for part in parts:
        total += part
    return total.to(dtype)


def _mean(parts: Sequence[Tensor]) -> Tensor:
    dtype, total = parts[0].dtype, _sum(parts)
    if dtype in _INTEGERS:
        total = total.to(torch.float64 if dtype == torch.int64 else torch.float32)
    if len(parts) == 1:
        return total
    if dtype == torch.bfloat16:
        return (total.float() / len(parts)).to(dtype)
    real = total.real.dtype if total.is_complex() else total.dtype
    return total * torch.tensor(1 / len(parts), dtype=real, device="cpu")


def _min(parts: Sequence[Tensor]) -> Tensor:
    return _extreme(parts, torch.lt, torch.inf)


def _max(parts: Sequence[Tensor]) -> Tensor:
    return _extreme(parts, torch.gt, -torch.inf)


def _extreme(parts: Sequence[Tensor], precedes: Callable[[Tensor, Tensor], Tensor], instead_of_nan: float) -> Tensor:
    if len(parts) == 1:
        return parts[0]
    found = parts[0]
    if found.is_floating_point():
        found = torch.where(found.isnan(), instead_of_nan, found)
    for part in parts[1:]:
        found = torch.where(precedes(part, found), part, found)
    return found
