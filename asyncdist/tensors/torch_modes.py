"""Gives each rank of a thread torch's modes of its own: grad mode, inference mode and autocast.

torch keeps them for each thread. Ranks that share one would share them too: one that awaits under ``no_grad`` would
take the gradients of all others, and two that leave it in the order in which they came would leave it on for good.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Generator, Iterator
from contextlib import contextmanager
from contextvars import Context, ContextVar, copy_context
from typing import Any, Final, NamedTuple, TypeAlias

import torch

_DEVICES: Final = ("cpu", "cuda")
#: Inference modes that nobody leaves: dropped, they would set the thread's mode back.
_kept: Final[list[Any]] = []


class _Casts(NamedTuple):
    """Holds the settings of autocast."""

    enabled: tuple[bool, ...] = (False, False)
    dtypes: tuple[torch.dtype, ...] = (torch.bfloat16, torch.float16)
    caches: bool = True


#: Whether gradients are recorded; whether it is inference mode; how many contexts of autocast it is inside; what they
#: do. A plain tuple: one is made at each switch.
Modes: TypeAlias = tuple[bool, bool, int, _Casts]
#: What a process begins with.
FRESH: Final[Modes] = (True, False, 0, _Casts())


def modes_now(casts_outside: _Casts | None = None) -> Modes:
    """Return the thread's modes.

    Args:
        casts_outside: what autocast does outside of any context, where that is known: it takes longest to ask.
    """
    torch.autocast_increment_nesting()
    depth = torch.autocast_decrement_nesting()
    casts = _casts_now() if depth or casts_outside is None else casts_outside
    return torch.is_grad_enabled(), torch.is_inference_mode_enabled(), depth, casts


def _casts_now() -> _Casts:
    return _Casts(
        tuple(map(torch.is_autocast_enabled, _DEVICES)),
        tuple(map(torch.get_autocast_dtype, _DEVICES)),
        torch.is_autocast_cache_enabled(),
    )


class RankModes:
    """Keeps the modes of all ranks of a thread; those of one of them, or of the outside, are the thread's.

    Args:
        size: number of ranks.
        first: what each of them begins with.
    """

    def __init__(self, size: int, first: Modes) -> None:
        self.outside = size
        self.current = size
        self._first = first
        self._modes = [first] * size + [modes_now()]
        self._casts_outside = _Casts() if first[2] else first[3]
        self._guard: Any = None

    def switch(self, rank: int) -> None:
        """Make the modes of ``rank`` the thread's."""
        current = self.current
        if rank == current:
            return
        modes = self._modes
        modes[current] = now = modes_now(self._casts_outside)
        self.current = rank
        if modes[rank] != now:
            self._set(modes[rank], now)

    def reset(self, rank: int) -> None:
        """Let ``rank``, whose modes are not the thread's, begin anew."""
        self._modes[rank] = self._first

    def restore(self) -> None:
        """Give the thread back what it had; the last call."""
        self.switch(self.outside)
        if self._guard is not None:
            _kept.append(self._guard)

    def _set(self, modes: Modes, now: Modes) -> None:
        """Set the modes, inference mode first: its guard sets the others back to what they were when it was made."""
        grad, inference, depth, casts = modes
        depth_now = now[2]
        if self._guard is not None:
            self._guard.__exit__(None, None, None)
            self._guard = None
        if torch.is_inference_mode_enabled() != inference:
            self._guard = torch._C._InferenceMode(inference)
            self._guard.__enter__()
        torch.set_grad_enabled(grad)
        for device, enabled, dtype in zip(_DEVICES, casts.enabled, casts.dtypes, strict=True):
            torch.set_autocast_enabled(device, enabled)
            torch.set_autocast_dtype(device, dtype)
        torch.set_autocast_cache_enabled(casts.caches)
        for _ in range(depth - depth_now):
            torch.autocast_increment_nesting()
        for _ in range(depth_now - depth):
            torch.autocast_decrement_nesting()
        if depth or depth_now:
            torch.clear_autocast_cache()  # weights that another rank has cast may have changed since


# -- on a loop of asyncio ---------------------------------------------------------------------------------------------

#: Whose modes the tasks that begin here have.
_rank_here: ContextVar[tuple[RankModes, int]] = ContextVar("asyncdist_rank_modes")


class _InItsModes(Coroutine[Any, Any, Any]):
    """A coroutine that finds its rank's modes whenever it is resumed; everything else is its own."""

    __slots__ = ("_coroutine", "_modes", "_rank")

    def __init__(self, coroutine: Any, modes: RankModes, rank: int) -> None:
        self._coroutine = coroutine
        self._modes = modes
        self._rank = rank

    def send(self, value: Any, /) -> Any:
        if self._modes.current != self._rank:
            self._modes.switch(self._rank)
        return self._coroutine.send(value)

    def throw(self, *error: Any) -> Any:
        self._modes.switch(self._rank)
        return self._coroutine.throw(*error)

    def close(self) -> None:
        self._modes.switch(self._rank)
        self._coroutine.close()

    def __await__(self) -> Generator[Any, Any, Any]:
        raise NotImplementedError("a task runs it; nobody awaits it")

    def __getattr__(self, name: str) -> Any:  # its frame and its name, for those who look at tasks
        return getattr(self._coroutine, name)


def _create_task(loop: asyncio.AbstractEventLoop, coroutine: Any, **options: Any) -> asyncio.Task[Any]:
    """Make a task that has the modes of the rank which makes it: a task factory."""
    context = options.get("context")
    place = _rank_here.get(None) if context is None else context.get(_rank_here)
    return asyncio.Task(coroutine if place is None else _InItsModes(coroutine, *place), loop=loop, **options)


@contextmanager
def of_ranks(loop: asyncio.AbstractEventLoop, size: int) -> Iterator[list[Context]]:
    """Give ranks on a loop, which nothing else runs on, modes of their own; they begin with the caller's.

    Yields:
        For each rank the context in which its first task is to begin.
    """
    contexts = [copy_context() for _ in range(size)]
    if size == 1:
        yield contexts
        return
    modes = RankModes(size, modes_now())
    for rank, context in enumerate(contexts):
        context.run(_rank_here.set, (modes, rank))
    loop.set_task_factory(_create_task)
    try:
        yield contexts
    finally:
        modes.restore()
