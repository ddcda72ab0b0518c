"""Runs a user's function beside the rank's loop: in a worker thread or, simulated, at a drawn moment of virtual time.

One function runs at a time. It may be changing weights, so a policy asks before it changes them.
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
    """Holds the modes that torch keeps per thread.

    Attributes:
        grad: whether gradients are recorded.
        inference: whether it is inference mode.
        autocast: kind of device, whether autocast is enabled for it, and the dtype that it casts to.
        default_device: where new tensors lie.
        cuda_device: the index of the GPU that "cuda" means; None where this process uses none.
    """

    grad: bool
    inference: bool
    autocast: tuple[tuple[str, bool, torch.dtype], ...]
    default_device: torch.device
    cuda_device: int | None


class VirtualClock(Protocol):
    """Says how much time user code takes, where time is not real."""

    def before_safe_point(self) -> Awaitable[None]:
        """Let the time pass that the rank has computed since its last safe point; nothing else of it runs meanwhile.

        To be awaited at once.
        """

    def run_beside(self, call: Callable[[], T]) -> asyncio.Future[T]:
        """Call ``call`` at some moment of the time that one ``World.compute`` takes; the rank's loop runs meanwhile.

        The future has what it returns when that time is over.
        """


class Computing:
    """Runs the functions of one rank.

    Args:
        rank: this rank.
        loop: of the rank; it goes on meanwhile.
        wake: calls what it is given, which lets the task go on after a function that has ended.

    Attributes:
        is_under_way: whether a function is being run.
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
        """Whether ``future`` is awaited by the ``run`` that is under way, which ends when its function does."""
        return any(future is each for each in self._awaited)

    def frame(self) -> types.FrameType | None:
        """Return where the function that is run in a thread stands; None where none is."""
        return sys._current_frames().get(self._thread) if self.is_under_way and self._thread is not None else None

    async def run(self, clock: VirtualClock | None, fn: Callable[[], T]) -> T:
        """See :meth:`World.compute`; ``clock`` is the simulation's."""
        if self.is_under_way:
            raise BusyError("one compute at a time: another one is under way on this rank", rank=self._rank)
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
        """Do as :meth:`run`, after the functions that were given before."""
        async with self._turn:
            return await self.run(clock, fn)

    async def _call(self, clock: VirtualClock | None, fn: Callable[[], T]) -> T:
        # What fn raises is carried as a value: a future cannot hold StopIteration, and asyncio's would turn the
        # CancelledError of concurrent.futures, an error like any other, into the cancellation of this task.
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
                with contextlib.suppress(asyncio.CancelledError):  # cancelled again; it is raised below in any case
                    await self._waiter
            raise
        returned, error = future.result()
        if error is not None:
            try:
                raise error
            finally:
                del error  # its traceback holds this frame
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
        """Start no thread any more; a function that still runs is abandoned."""
        if self._executor is not None:
            self._executor.shutdown(wait=False)


def caught(fn: Callable[[], T]) -> tuple[T | None, BaseException | None]:
    """Call ``fn``; return its result, or what it raises, as values."""
    try:
        return fn(), None
    except BaseException as error:
        return None, error


def default_device() -> torch.device:
    """Return the device of new tensors: torch 2.8 fails to, after ``torch.set_default_device(None)``."""
    try:
        return torch.get_default_device()
    except AttributeError:
        return torch.device("cpu")


def torch_modes() -> TorchModes:
    """Return the caller's modes that torch keeps per thread."""
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
    """Call ``fn`` in the modes that ``torch_modes`` has found in another thread."""
    with contextlib.ExitStack() as stack:
        stack.enter_context(torch.inference_mode(modes.inference))
        stack.enter_context(torch.set_grad_enabled(modes.grad and not modes.inference))
        for kind, is_enabled, dtype in modes.autocast:
            if kind == "cpu" or is_enabled or torch.is_autocast_enabled(kind):  # torch may warn where no GPU is
                stack.enter_context(torch.autocast(kind, dtype=dtype, enabled=is_enabled))
        if modes.default_device != default_device():  # a device's context slows every operator down
            stack.enter_context(modes.default_device)
        if modes.cuda_device is not None:
            stack.enter_context(torch.cuda.device(modes.cuda_device))
        return fn()
