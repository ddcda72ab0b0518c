"""Gives each rank in a thread its own torch modes: grad mode, inference mode, autocast and CUDA stream.

torch stores these modes per thread. Without this module, a rank that awaits under ``no_grad`` would disable gradients
for the thread's other ranks. The current CUDA stream also determines the current GPU.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Generator, Iterator
from contextlib import contextmanager
from contextvars import Context, ContextVar, copy_context
from typing import Any, Final, NamedTuple, TypeAlias

import torch

_DEVICES: Final = ("cpu", "cuda")
_HAS_CUDA: Final = torch.backends.cuda.is_built()  # type: ignore[no-untyped-call]
#: Guards of inference mode. They are kept alive, because deleting a guard would change the thread's mode.
_kept: Final[list[Any]] = []


class _Casts(NamedTuple):
    """Holds a thread's autocast settings for the CPU and for CUDA."""

    enabled: tuple[bool, ...] = (False, False)
    dtypes: tuple[torch.dtype, ...] = (torch.bfloat16, torch.float16)
    caches: bool = True


#: Torch modes of a thread: whether gradients are recorded, whether inference mode is on, the number of nested autocast
#: contexts, the autocast settings, and the CUDA stream (None before CUDA is used). They are stored as a plain tuple,
#: because every switch between ranks creates one.
Modes: TypeAlias = tuple[bool, bool, int, _Casts, torch.cuda.Stream | None]
#: Torch modes of a new thread.
FRESH: Final[Modes] = (True, False, 0, _Casts(), None)


def modes_now(casts_outside: _Casts | None = None) -> Modes:
    """Return the current thread's torch modes.

    Args:
        casts_outside: Autocast settings outside any autocast context, if known. If not, they are queried, which is
            slow.
    """
    torch.autocast_increment_nesting()
    depth = torch.autocast_decrement_nesting()
    casts = _casts_now() if depth or casts_outside is None else casts_outside
    stream = torch.cuda.current_stream() if _HAS_CUDA and torch.cuda.is_initialized() else None  # type: ignore[no-untyped-call]
    return torch.is_grad_enabled(), torch.is_inference_mode_enabled(), depth, casts, stream


def _casts_now() -> _Casts:
    return _Casts(
        tuple(map(torch.is_autocast_enabled, _DEVICES)),
        tuple(map(torch.get_autocast_dtype, _DEVICES)),
        torch.is_autocast_cache_enabled(),
    )


class RankModes:
    """Stores the torch modes of all ranks that share a thread, and switches the thread between ranks.

    Args:
        size: Number of ranks.
        first: Initial modes of each rank, except that the CUDA stream is the caller's.
    """

    def __init__(self, size: int, first: Modes) -> None:
        self.outside = size
        self.current = size
        now = modes_now()
        self._first: Modes = (*first[:4], now[4])
        self._modes = [self._first] * size + [now]
        self._casts_outside = _Casts() if first[2] else first[3]
        self._guard: Any = None

    def switch(self, rank: int) -> None:
        """Save the current rank's torch modes, and set the thread to the modes of ``rank``."""
        current = self.current
        if rank == current:
            return
        modes = self._modes
        modes[current] = now = modes_now(self._casts_outside)
        self.current = rank
        if modes[rank] != now:
            self._set(modes[rank], now)

    def reset(self, rank: int) -> None:
        """Set the torch modes of ``rank``, which must not be the current rank, to the initial modes."""
        self._modes[rank] = self._first

    def restore(self) -> None:
        """Restore the torch modes that the thread had before the ranks were started. This must be the last call."""
        self.switch(self.outside)
        if self._guard is not None:
            _kept.append(self._guard)

    def _set(self, modes: Modes, now: Modes) -> None:
        grad, inference, depth, casts, stream = modes
        depth_now = now[2]
        # Inference mode is set first, because leaving it resets the other modes.
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
        if stream != now[4]:  # the stream is None in a process that does not use CUDA yet
            torch.cuda.set_stream(torch.cuda.default_stream(0) if stream is None else stream)
        if depth or depth_now:
            torch.clear_autocast_cache()  # The autocast cache may contain outdated casts of another rank's weights.


# -- on an asyncio event loop -----------------------------------------------------------------------------------------

#: The torch modes of all ranks, and the rank whose modes apply to tasks that are created in this context.
_rank_here: ContextVar[tuple[RankModes, int]] = ContextVar("asyncdist_rank_modes")


class _InItsModes(Coroutine[Any, Any, Any]):
    """Wraps a coroutine. Before each resumption, switches the thread to the torch modes of the coroutine's rank."""

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
        raise NotImplementedError("this coroutine must be run by a task; it cannot be awaited")

    def __getattr__(self, name: str) -> Any:  # asyncio reads the coroutine's frame and name to describe a task
        return getattr(self._coroutine, name)


def _create_task(loop: asyncio.AbstractEventLoop, coroutine: Any, **options: Any) -> asyncio.Task[Any]:
    """Create a task with the torch modes of the rank that creates it. This function is the loop's task factory."""
    context = options.get("context")
    place = _rank_here.get(None) if context is None else context.get(_rank_here)
    return asyncio.Task(coroutine if place is None else _InItsModes(coroutine, *place), loop=loop, **options)


@contextmanager
def of_ranks(loop: asyncio.AbstractEventLoop, size: int) -> Iterator[list[Context]]:
    """Give each rank on an event loop its own torch modes, initially those of the caller.

    Yields one context per rank, in which the rank's first task must be started. The loop must run nothing else.
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
