"""Runs a user's function in a worker thread while the loop runs, or at a random virtual time in a simulation."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import sys
import threading
import types
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Final, TypeVar, cast

import torch

from asyncdist.errors import BusyError
from asyncdist.messaging.engine import VirtualClock

logger = logging.getLogger("asyncdist.runtime.compute")

T = TypeVar("T")

_AT_THE_END: Final = (
    "a coroutine cannot raise StopIteration; await world.compute(next, iterator, None), which returns None at the end"
)
_AUTOCAST_KINDS: Final = ("cpu", "cuda")


class Computing:
    """Runs functions of the user in a worker thread, one at a time, and lets tasks wait for their results."""

    def __init__(self, rank: int, loop: asyncio.AbstractEventLoop, wake: Callable[[Callable[[], None]], None]) -> None:
        self.is_under_way = False
        self._rank = rank
        self._loop = loop
        self._wake = wake
        self._executor: ThreadPoolExecutor | None = None
        self._is_closed = False
        self._awaited: tuple[object, ...] = ()
        self._waiter: asyncio.Future[None]
        self._turn = asyncio.Lock()
        self._thread: int | None = None

    def settles(self, future: object) -> bool:
        """Return whether ``future`` belongs to the call of :meth:`run` that is in progress."""
        return any(future is each for each in self._awaited)

    def frame(self) -> types.FrameType | None:
        """Return the current frame of the function in the worker thread, or None if no function is running."""
        return sys._current_frames().get(self._thread) if self.is_under_way and self._thread is not None else None

    async def run(self, clock: VirtualClock | None, fn: Callable[[], T]) -> T:
        """Run ``fn`` in a thread and return its result. In a simulation, ``clock`` runs ``fn`` at a virtual time."""
        if self.is_under_way:
            raise BusyError(
                "world.compute() can run one function at a time, but another one is running; await it first",
                rank=self._rank,
            )
        self.is_under_way = True
        try:
            return await self._call(clock, fn)
        except RuntimeError as error:
            if str(error) == "coroutine raised StopIteration":
                error.add_note(_AT_THE_END)
            raise
        finally:
            self.is_under_way = False
            self._awaited = ()

    async def run_in_turn(self, clock: VirtualClock | None, fn: Callable[[], T]) -> T:
        """Run ``fn`` after all functions that were passed to this method earlier."""
        async with self._turn:
            return await self.run(clock, fn)

    async def _call(self, clock: VirtualClock | None, fn: Callable[[], T]) -> T:
        # The exception of fn is returned as a value. A future cannot store StopIteration, and asyncio would treat
        # concurrent.futures.CancelledError, an ordinary error here, as a cancellation of this task.
        call = functools.partial(caught, in_these_modes(fn))
        future = self._in_thread(call) if clock is None else clock.run_concurrently(call)
        has_ended = False

        def end() -> None:
            nonlocal has_ended
            has_ended = True
            if not self._waiter.done():
                self._waiter.set_result(None)

        self._wait_anew(future)
        future.add_done_callback(lambda _: self._wake(end))
        try:
            await self._waiter
        except asyncio.CancelledError:
            while not has_ended:
                self._wait_anew(future)
                # The task was cancelled again. Only the first cancellation is raised, below.
                with contextlib.suppress(asyncio.CancelledError):
                    await self._waiter
            if (error := future.result()[1]) is not None:  # No caller gets this exception.
                logger.error("rank %d: a function raised after its call was cancelled", self._rank, exc_info=error)
                del error
            raise
        returned, error = future.result()
        if error is not None:
            try:
                raise error
            finally:
                del error  # Without this, the error's traceback and this frame would refer to each other.
        return cast(T, returned)

    def _wait_anew(self, future: object) -> None:
        self._waiter = self._loop.create_future()
        self._awaited = future, self._waiter

    def _in_thread(self, call: Callable[[], T]) -> asyncio.Future[T]:
        if self._executor is None:
            self._executor = ThreadPoolExecutor(max_workers=1, thread_name_prefix=f"asyncdist-{self._rank}")

        def call_here() -> T:
            self._thread = threading.get_ident()
            return call()

        try:
            return self._loop.run_in_executor(self._executor, call_here)
        except RuntimeError as error:
            if self._is_closed or "cannot schedule new futures" not in str(error):
                raise
            # The program has ended, and Python starts no more threads. A save that was begun is completed here.
            future: asyncio.Future[T] = self._loop.create_future()
            future.set_result(call())
            return future

    def close(self) -> None:
        """Start no more threads. A function that is still running continues in the background."""
        self._is_closed = True
        if self._executor is not None:
            self._executor.shutdown(wait=False)


def caught(fn: Callable[[], T]) -> tuple[T | None, BaseException | None]:
    """Call ``fn`` and return a pair of its result and its exception, one of which is None."""
    try:
        return fn(), None
    except BaseException as error:
        return None, error


def default_device() -> torch.device:
    """Return torch's default device. In torch 2.8, its getter fails after ``torch.set_default_device(None)``."""
    try:
        return torch.get_default_device()
    except AttributeError:
        return torch.device("cpu")


def in_these_modes(fn: Callable[[], T]) -> Callable[[], T]:
    """Return a function that calls ``fn``, possibly in another thread, with the calling thread's current torch modes.

    The modes are grad, inference and autocast mode, the default device, and the CUDA stream, which selects the GPU.
    """
    with_grad, with_inference, device = torch.is_grad_enabled(), torch.is_inference_mode_enabled(), default_device()
    autocast = [(kind, torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)) for kind in _AUTOCAST_KINDS]
    cuda_stream = torch.cuda.current_stream() if torch.cuda.is_initialized() else None  # type: ignore[no-untyped-call]

    def call() -> T:
        with contextlib.ExitStack() as stack:
            stack.enter_context(torch.inference_mode(with_inference))
            stack.enter_context(torch.set_grad_enabled(with_grad and not with_inference))
            for kind, is_enabled, dtype in autocast:
                # torch would warn about autocast for a GPU if there is no GPU.
                if kind == "cpu" or is_enabled or torch.is_autocast_enabled(kind):
                    stack.enter_context(torch.autocast(kind, dtype=dtype, enabled=is_enabled))
            if device != default_device():  # An active device context slows every operator.
                stack.enter_context(device)
            if cuda_stream is not None:  # also selects the stream's device
                stack.enter_context(torch.cuda.stream(cuda_stream))
            return fn()

    return call
