"""Runs a user's function alongside the rank's loop: in a worker thread or, simulated, at a drawn virtual time.

One function runs at a time. It may change weights, so a policy checks for it before it changes them.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import sys
import threading
import types
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Final, NamedTuple, Protocol, TypeVar, cast

import torch

from asyncdist.errors import BusyError

T = TypeVar("T")

_AT_THE_END: Final = "no coroutine can raise StopIteration; await world.compute(next, iterator, None) gives None"
_AUTOCAST_DEVICE_KINDS: Final = ("cpu", "cuda")


class TorchModes(NamedTuple):
    """The modes that torch keeps per thread.

    Attributes:
        grad: Whether gradients are recorded.
        inference: Whether inference mode is on.
        autocast: For each kind of device: its name, whether autocast is enabled, and the dtype that it casts to.
        default_device: Device of new tensors.
        cuda_device: Index of the GPU that "cuda" means; None if this process uses no GPU.
    """

    grad: bool
    inference: bool
    autocast: tuple[tuple[str, bool, torch.dtype], ...]
    default_device: torch.device
    cuda_device: int | None


class VirtualClock(Protocol):
    """Charges the computing time of user code, if time is virtual."""

    def before_safe_point(self) -> Awaitable[None]:
        """Charge the rank's computing time since its last safe point, during which nothing else of the rank runs.

        The result must be awaited at once.
        """

    def run_beside(self, call: Callable[[], T]) -> asyncio.Future[T]:
        """Call ``call`` at some moment during one ``World.compute``, while the rank's loop keeps running.

        The future is settled with the result at the end of the computing time.
        """


class Computing:
    """Runs the functions of one rank.

    Args:
        rank: This rank.
        loop: Loop of the rank, which keeps running.
        wake: Calls its argument, which resumes a task after its function has ended.

    Attributes:
        is_under_way: Whether a function is running.
    """

    def __init__(self, rank: int, loop: asyncio.AbstractEventLoop, wake: Callable[[Callable[[], None]], None]) -> None:
        self.is_under_way = False
        self._rank = rank
        self._loop = loop
        self._wake = wake
        self._executor: ThreadPoolExecutor | None = None
        self._awaited: tuple[object, ...] = ()
        self._waiter: asyncio.Future[None]
        self._turn = asyncio.Lock()
        self._thread: int | None = None

    def settles(self, future: object) -> bool:
        """Return whether the current :meth:`run` awaits ``future``, so that it ends with its function."""
        return any(future is each for each in self._awaited)

    def frame(self) -> types.FrameType | None:
        """Return the current frame of the function that runs in a thread; None if none runs."""
        return sys._current_frames().get(self._thread) if self.is_under_way and self._thread is not None else None

    async def run(self, clock: VirtualClock | None, fn: Callable[[], T]) -> T:
        """See :meth:`World.compute`; ``clock`` is the simulation's."""
        if self.is_under_way:
            raise BusyError("only one compute at a time is allowed, and another one is running", rank=self._rank)
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
        """Call :meth:`run` after all functions that were passed earlier have ended."""
        async with self._turn:
            return await self.run(clock, fn)

    async def _call(self, clock: VirtualClock | None, fn: Callable[[], T]) -> T:
        # Exceptions of fn are passed as values: a future cannot hold StopIteration, and asyncio's would turn the
        # CancelledError of concurrent.futures, an error like any other, into a cancellation of this task.
        call = functools.partial(caught, functools.partial(call_in_modes, torch_modes(), fn))
        future = self._in_thread(call) if clock is None else clock.run_beside(call)
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
                with contextlib.suppress(asyncio.CancelledError):  # cancelled again; raised below in any case
                    await self._waiter
            raise
        returned, error = future.result()
        if error is not None:
            try:
                raise error
            finally:
                del error  # its traceback refers to this frame
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

        return self._loop.run_in_executor(self._executor, call_here)

    def close(self) -> None:
        """Start no further threads; a function that still runs is abandoned."""
        if self._executor is not None:
            self._executor.shutdown(wait=False)


def caught(fn: Callable[[], T]) -> tuple[T | None, BaseException | None]:
    """Call ``fn``; return its result and its exception, one of which is None."""
    try:
        return fn(), None
    except BaseException as error:
        return None, error


def default_device() -> torch.device:
    """Return the device of new tensors; torch 2.8's own function fails after ``torch.set_default_device(None)``."""
    try:
        return torch.get_default_device()
    except AttributeError:
        return torch.device("cpu")


def torch_modes() -> TorchModes:
    """Return the modes that torch keeps for the calling thread."""
    return TorchModes(
        torch.is_grad_enabled(),
        torch.is_inference_mode_enabled(),
        tuple(
            (kind, torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)) for kind in _AUTOCAST_DEVICE_KINDS
        ),
        default_device(),
        torch.cuda.current_device() if torch.cuda.is_initialized() else None,  # type: ignore[no-untyped-call]
    )


def call_in_modes(modes: TorchModes, fn: Callable[[], T]) -> T:
    """Call ``fn`` in modes that :func:`torch_modes` returned in another thread."""
    with contextlib.ExitStack() as stack:
        stack.enter_context(torch.inference_mode(modes.inference))
        stack.enter_context(torch.set_grad_enabled(modes.grad and not modes.inference))
        for kind, is_enabled, dtype in modes.autocast:
            if kind == "cpu" or is_enabled or torch.is_autocast_enabled(kind):  # torch may warn if there is no GPU
                stack.enter_context(torch.autocast(kind, dtype=dtype, enabled=is_enabled))
        if modes.default_device != default_device():  # a device's context slows every operator down
            stack.enter_context(modes.default_device)
        if modes.cuda_device is not None:
            stack.enter_context(torch.cuda.device(modes.cuda_device))
        return fn()
