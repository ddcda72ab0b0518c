"""Helpers with which one rank computes for all, all ranks compute for one, or one rank runs first.

Each helper is collective in its group, by default the whole world. An exception in a rank's function is raised
unchanged on that rank, and as a RemoteError with rank, type and message on every other member. A value of a type that
cannot be sent also causes these errors. Values arrive with their exact type and content
(:mod:`asyncdist.tensors.serialization` lists the types), tensors in CPU memory.

All helpers also work with a single rank. **Cancellation** of a member is reported to the others like an exception.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from contextlib import asynccontextmanager
from typing import Any, Final, TypeVar, overload

import numpy as np
import torch

from asyncdist import validation
from asyncdist.collectives.collectives import Collectives
from asyncdist.collectives.error_exchange import (
    Call,
    LocalResult,
    ResultHeader,
    attempt,
    collect,
    exchange_headers,
    raise_first_error,
    run_and_raise,
    share,
    share_payload,
)
from asyncdist.collectives.groups import Group, check_group
from asyncdist.errors import LocalProtocolError
from asyncdist.functional.collectives import resolve_group
from asyncdist.runtime.world import World
from asyncdist.spmd.mesh import calling_world
from asyncdist.tensors import serialization

T = TypeVar("T")
U = TypeVar("U")

_SCALARS: Final = (bool, int, float, complex)


def is_distributed() -> bool:
    """Return whether this task runs in a world of several ranks. Outside ``run`` and ``open_world``, return False."""
    world = calling_world()
    return world is not None and world.size > 1


def is_main_process(*, group: Group | None = None) -> bool:
    """Return whether this rank is the first of ``group``, by default of the world. Outside a world, return True."""
    world = calling_world()
    if group is not None:
        check_group(group)
    if world is None:
        return True
    return world.rank == (group or world.group).ranks[0]


@overload
async def compute_and_broadcast(
    fn: Callable[[], Awaitable[T]], *, root: int | None = None, group: Group | None = None, world: World | None = None
) -> T: ...


@overload
async def compute_and_broadcast(
    fn: Callable[[], T], *, root: int | None = None, group: Group | None = None, world: World | None = None
) -> T: ...


async def compute_and_broadcast(
    fn: Callable[[], Any],
    *,
    root: int | None = None,
    group: Group | None = None,
    world: World | None = None,
) -> Any:
    """Compute a value on one rank, and return it on all. Other ranks get an equal value of the same type.

    Args:
        fn: Function or coroutine function without arguments, called only on ``root``.
        root: World rank of a member, by default the group's first.
        group: Ranks that get the value, by default all.
        world: World of the call, by default the current one.

    Raises:
        RemoteError: ``fn`` raised an exception on ``root``, or its result cannot be sent. ``root`` raises the exception
            itself.
        LocalProtocolError: This rank, or ``root``, is not in the group.
    """
    world, group, root = _resolve_group(world, group, root)
    is_root = world.rank == root
    outcome = await attempt(fn if is_root else None, checks=_checks(group, root, None, fn=fn))

    async def tell(collectives: Collectives) -> bytes:
        headers = await exchange_headers(collectives, group, outcome, Call("compute_and_broadcast", root))
        raise_first_error(headers)
        return await share_payload(collectives, group, outcome, headers[group.ranks.index(root)])

    payload = await run_and_raise(world.collectives, group, outcome, tell)
    return outcome.value if is_root else serialization.decode(payload)


@overload
async def gather_from_all_ranks(
    fn: Callable[[], Awaitable[T]],
    world_size: int | None = None,
    *,
    root: int | None = None,
    group: Group | None = None,
    world: World | None = None,
) -> list[T] | None: ...


@overload
async def gather_from_all_ranks(
    fn: Callable[[], T],
    world_size: int | None = None,
    *,
    root: int | None = None,
    group: Group | None = None,
    world: World | None = None,
) -> list[T] | None: ...


async def gather_from_all_ranks(
    fn: Callable[[], Any],
    world_size: int | None = None,
    *,
    root: int | None = None,
    group: Group | None = None,
    world: World | None = None,
) -> list[Any] | None:
    """Compute a value on every rank, and return all values on ``root`` and None on other ranks.

    Args:
        fn: Function or coroutine function without arguments, called on every member.
        world_size: None or the group's size, for compatibility with torchgfn.
        root: Rank that gets the values, in the group's order, by default the group's first.
        group: Ranks that compute, by default all.
        world: World of the call, by default the current one.

    Raises:
        RemoteError: ``fn`` raised an exception on another member, or its result cannot be sent. The error names the
            first such member in the group's order, which raises the exception itself.
        LocalProtocolError: This rank, or ``root``, is not in the group.
        ValueError: ``world_size`` is not the group's size.
    """
    world, group, root = _resolve_group(world, group, root)
    outcome = await attempt(fn, checks=_checks(group, root, world_size, fn=fn))
    return await _gather(world, group, Call("gather_from_all_ranks", root), outcome)


@overload
async def gather_scalar_from_all_ranks(
    fn: Callable[[], Awaitable[T]],
    world_size: int | None = None,
    *,
    root: int | None = None,
    group: Group | None = None,
    world: World | None = None,
) -> list[T] | None: ...


@overload
async def gather_scalar_from_all_ranks(
    fn: Callable[[], T],
    world_size: int | None = None,
    *,
    root: int | None = None,
    group: Group | None = None,
    world: World | None = None,
) -> list[T] | None: ...


async def gather_scalar_from_all_ranks(
    fn: Callable[[], Any],
    world_size: int | None = None,
    *,
    root: int | None = None,
    group: Group | None = None,
    world: World | None = None,
) -> list[Any] | None:
    """Compute one number on every rank. Return all numbers on ``root``, and None on other ranks.

    A number is a bool, int, float or complex, a NumPy scalar, or a tensor with one element. It keeps its type. The
    arguments and the other errors are the same as for :func:`gather_from_all_ranks`.

    Raises:
        TypeError: ``fn`` did not return a number on this rank. The other members get RemoteError.
    """
    world, group, root = _resolve_group(world, group, root)
    outcome = await attempt(fn, _encode_scalar, checks=_checks(group, root, world_size, fn=fn))
    return await _gather(world, group, Call("gather_scalar_from_all_ranks", root), outcome)


@overload
async def reduce_and_broadcast(
    fn1: Callable[[], Awaitable[T]],
    fn2: Callable[[list[T]], Awaitable[U]],
    world_size: int | None = None,
    *,
    root: int | None = None,
    group: Group | None = None,
    world: World | None = None,
) -> U: ...


@overload
async def reduce_and_broadcast(
    fn1: Callable[[], Awaitable[T]],
    fn2: Callable[[list[T]], U],
    world_size: int | None = None,
    *,
    root: int | None = None,
    group: Group | None = None,
    world: World | None = None,
) -> U: ...


@overload
async def reduce_and_broadcast(
    fn1: Callable[[], T],
    fn2: Callable[[list[T]], Awaitable[U]],
    world_size: int | None = None,
    *,
    root: int | None = None,
    group: Group | None = None,
    world: World | None = None,
) -> U: ...


@overload
async def reduce_and_broadcast(
    fn1: Callable[[], T],
    fn2: Callable[[list[T]], U],
    world_size: int | None = None,
    *,
    root: int | None = None,
    group: Group | None = None,
    world: World | None = None,
) -> U: ...


# Without this overload, mypy rejects generic functions such as ``sum`` for a list of T.
@overload
async def reduce_and_broadcast(
    fn1: Callable[[], Any],
    fn2: Callable[[Iterable[Any]], U],
    world_size: int | None = None,
    *,
    root: int | None = None,
    group: Group | None = None,
    world: World | None = None,
) -> U: ...


async def reduce_and_broadcast(
    fn1: Callable[[], Any],
    fn2: Callable[[list[Any]], Any],
    world_size: int | None = None,
    *,
    root: int | None = None,
    group: Group | None = None,
    world: World | None = None,
) -> Any:
    """Compute a value on every rank, reduce all values on one, and return the result on all.

    Args:
        fn1: Function or coroutine function without arguments, called on every member.
        fn2: Function or coroutine function, called only on ``root`` with the list of values in the group's order.
        world_size: None or the group's size, for compatibility with torchgfn.
        root: Rank that reduces, by default the group's first.
        group: Ranks that take part, by default all.
        world: World of the call, by default the current one.

    Raises:
        RemoteError: A function raised an exception on another member, or its result cannot be sent. That member raises
            the exception itself.
        LocalProtocolError: This rank, or ``root``, is not in the group.
        ValueError: ``world_size`` is not the group's size.
    """
    world, group, root = _resolve_group(world, group, root)
    outcome = await attempt(fn1, checks=_checks(group, root, world_size, fn1=fn1, fn2=fn2))

    async def gather_and_reduce(collectives: Collectives) -> tuple[LocalResult, list[ResultHeader], bytes]:
        headers, payloads = await collect(collectives, group, outcome, Call("reduce_and_broadcast", root))
        reduced, payload = LocalResult(), b""
        if not any(header.has_error for header in headers):
            if payloads is not None:
                reduced = await attempt(lambda: fn2([serialization.decode(part) for part in payloads]))
                reduced.raise_if_cancelled()  # A loss of a member cancels this sequence of collectives.
            header, payload = await share(collectives, group, reduced, root)
            headers = [header]
        return reduced, headers, payload

    reduced, headers, payload = await run_and_raise(world.collectives, group, outcome, gather_and_reduce)
    if reduced.error is not None:
        raise reduced.error
    raise_first_error(headers)
    return reduced.value if world.rank == root else serialization.decode(payload)


@asynccontextmanager
async def zero_first(is_main: bool, *, group: Group | None = None, world: World | None = None) -> AsyncIterator[None]:
    """Run the block first on the ranks where ``is_main`` is true, and then on the others.

    For example, with ``async with zero_first(world.rank == 0)``, rank 0 downloads a file, which the other ranks then
    find. ``is_main`` may be true on several ranks, for example on one rank per host. In the block, collectives of the
    group raise DisagreementError, because its members enter the block at different times.

    Raises:
        RemoteError: The block raised an exception on a rank where ``is_main`` is true, so the other ranks do not enter
            their blocks. An exception in the block of another rank affects only that rank.
        LocalProtocolError: ``is_main`` is false on all ranks, or this rank is not in the group.
        TypeError: ``is_main`` is not a bool.
    """
    world, group = resolve_group(world, group)
    call = Call("zero_first")
    checked = await attempt(None, checks=[functools.partial(_check_is_main, is_main)])
    if checked.error is not None:
        await _exchange(world, group, checked, call)
    if is_main:
        error: BaseException | None = None
        try:
            yield
        except BaseException as caught:
            error = caught
        await _exchange(world, group, LocalResult(payload=b"", error=error), call)
        return
    headers = await _exchange(world, group, LocalResult(), call)
    raise_first_error(headers)
    if not any(header.has_value for header in headers):
        raise LocalProtocolError(
            f"is_main must be True on at least one of the ranks {list(group.ranks)}, got False on all"
        )
    yield


@asynccontextmanager
async def zero_only(
    *, root: int | None = None, group: Group | None = None, world: World | None = None
) -> AsyncIterator[bool]:
    """Let one rank do some work while the others wait.

    ``async with zero_only() as is_main:`` enters the block on all ranks, because a ``with`` statement cannot skip its
    block. Put the work of rank ``root`` under ``if is_main:``. At the end of the block, all members wait for each
    other.

    Args:
        root: Rank on which ``is_main`` is true, by default the group's first.
        group: Ranks that take part, by default all.
        world: World of the call, by default the current one.

    Raises:
        RemoteError: The block raised an exception on another member. That member raises the exception itself.
        LocalProtocolError: This rank, or ``root``, is not in the group.
    """
    world, group, root = _resolve_group(world, group, root)
    call = Call("zero_only", root)
    if root not in group.ranks:
        await _exchange(world, group, await attempt(None, checks=_checks(group, root, None)), call)
    error: BaseException | None = None
    try:
        yield world.rank == root
    except BaseException as caught:
        error = caught
    raise_first_error(await _exchange(world, group, LocalResult(payload=b"", error=error), call))


async def _gather(world: World, group: Group, call: Call, outcome: LocalResult) -> list[Any] | None:
    work = functools.partial(collect, group=group, outcome=outcome, call=call)
    headers, payloads = await run_and_raise(world.collectives, group, outcome, work)
    raise_first_error(headers)
    return None if payloads is None else [serialization.decode(payload) for payload in payloads]


async def _exchange(world: World, group: Group, outcome: LocalResult, call: Call) -> list[ResultHeader]:
    work = functools.partial(exchange_headers, group=group, outcome=outcome, call=call)
    return await run_and_raise(world.collectives, group, outcome, work)


def _resolve_group(world: World | None, group: Group | None, root: int | None) -> tuple[World, Group, int]:
    world, group = resolve_group(world, group)
    given = group.ranks[0] if root is None else root
    (number,) = validation.whole_numbers((given,)) or (given,)
    return world, group, number


def _checks(group: Group, root: Any, world_size: Any, **functions: Any) -> list[Callable[[], None]]:
    """Return functions that check a helper's arguments. Their errors are reported to all members."""

    def check_root() -> None:
        if type(root) is not int or root not in group.ranks:
            raise LocalProtocolError(f"root must be one of the ranks {list(group.ranks)}, got {root!r:.80}", root=root)

    return [
        check_root,
        *(functools.partial(_check_callable, name, fn) for name, fn in functions.items()),
        functools.partial(check_world_size, world_size, group),
    ]


def _encode_scalar(value: Any) -> bytes:
    is_scalar = (
        type(value) in _SCALARS
        or isinstance(value, np.generic)
        or (isinstance(value, torch.Tensor) and value.numel() == 1)
    )
    if not is_scalar:
        raise TypeError(
            "fn must return a bool, int, float or complex, a numpy scalar, or a tensor with one element, got a "
            f"{serialization.type_name(type(value))}: {value!r:.80}"
        )
    return serialization.encode(value)


def _check_is_main(is_main: object) -> None:
    if type(is_main) is not bool:
        raise TypeError(f"is_main must be True or False, got {is_main!r:.80}")


def _check_callable(name: str, fn: Any) -> None:
    if not callable(fn):
        what = "a coroutine" if inspect.iscoroutine(fn) else repr(fn)
        raise TypeError(f"{name} must be a function or coroutine function, got {what:.80}")


def check_world_size(world_size: int | None, group: Group) -> None:
    """Raise ValueError unless ``world_size`` is None or the group's size."""
    if world_size is not None and world_size != group.size:
        raise ValueError(f"world_size must be None or the group's size {group.size}, got {world_size!r}")
