"""Lets code without an event loop await coroutines as calls that block, on the same thread.

A rank's coroutines run in the task of its main, in both ways to host such code:

- :class:`LoopCaller`, one rank in a process of its own: the loop runs while a call blocks, and stands still between two
  calls, as it does while an ``async def main`` computes. The code is the caller's own, and may be a whole script.
- :class:`SwitchingCaller`, where several ranks share a thread, in a simulation or on one loop: the code runs inside
  main, on a stack of its own (a greenlet), which is left when a call blocks, and entered again when it has its result.
"""

from __future__ import annotations

import abc
import asyncio
import atexit
import contextlib
import contextvars
import inspect
import logging
import os
import sys
import threading
from asyncio import _get_running_loop, _set_running_loop
from asyncio.tasks import _enter_task, _leave_task
from collections.abc import Awaitable, Callable, Iterator
from contextlib import AbstractAsyncContextManager
from contextvars import ContextVar
from types import CoroutineType
from typing import Any, NoReturn, ParamSpec, TypeVar, cast

import greenlet

from asyncdist.blocking.begun import BegunCall, Outcome, Pause, awaited, called, outcome_of
from asyncdist.blocking.idle_loop import IdleLoop
from asyncdist.errors import ClosedError, LocalProtocolError
from asyncdist.runtime.failing.process_ends import end_forked_child
from asyncdist.runtime.notebooks import is_loop_running
from asyncdist.runtime.signals import Interrupts
from asyncdist.runtime.stall_warnings import frame_of_caller
from asyncdist.runtime.world import World, current_world

logger = logging.getLogger("asyncdist.blocking")

P = ParamSpec("P")
T = TypeVar("T")

#: Of the code that runs here, where it has no event loop of its own.
_current: ContextVar[Caller] = ContextVar("asyncdist_blocking_caller")
#: Where a script that opens its world without a main is run by each of many ranks: returns the rank of this one.
ask_for_world: ContextVar[Callable[[], Caller] | None] = ContextVar("asyncdist_ask_for_world", default=None)


#: Of a world that is open as long as the process.
_of_process: Caller | None = None


def set_process_caller(caller: Caller | None) -> None:
    """Let code that is in no block use this one, as long as its world is open."""
    global _of_process
    _of_process = caller


def find_caller() -> Caller | None:
    """Return what awaits coroutines for the code that runs here; None outside of worlds without an event loop."""
    for caller in (_current.get(None), _of_process):
        if caller is not None and caller.is_open:
            return caller
    return None


def current_caller(what: str) -> Caller:
    """Return what awaits coroutines for the code that runs here.

    Args:
        what: the call that needs it, for the error.

    Raises:
        LocalProtocolError: a coroutine of a rank calls; it can await.
        RuntimeError: there is no world here; the thread is named, where it is not the main one.
    """
    caller = find_caller()
    if caller is not None:
        return caller
    if is_in_a_rank():
        raise LocalProtocolError(f"{what} blocks, and this is a coroutine: await asyncdist.{what} here")
    thread = threading.current_thread()
    where = ""
    if thread is not threading.main_thread():
        where = f", in thread {thread.name!r} (a rank's calls are made in the thread that opened its world)"
    raise RuntimeError(
        f"no world here for {what}{where}: call it inside with asyncdist.blocking.open_world(), or in what "
        "asyncdist.blocking.run calls"
    )


def is_in_a_rank() -> bool:
    """Return whether a coroutine of a rank calls, which can await."""
    if find_caller() is not None:
        return False
    try:
        return current_world().is_open
    except RuntimeError:
        return False


class Caller(abc.ABC):
    """Awaits coroutines in the task of a rank's main.

    Attributes:
        world: of that rank.
        on_opened: called where the code opens its world, which is open before, as in a simulation; the first time.
    """

    world: World

    def __init__(self) -> None:
        self.is_open = False
        self.on_opened: Callable[[], None] | None = None
        self._at_end: list[Callable[[], None]] = []
        self._is_calling = False
        self._thread = threading.get_ident()

    def call(self, fn: Callable[P, Awaitable[T]], /, *args: P.args, **kwargs: P.kwargs) -> T:
        """Call ``fn`` in the task of main, await what it returns, if that can be awaited, and return what comes of it.

        Raises:
            ClosedError: the world is closed.
            LocalProtocolError: in another thread than the rank's, or inside another such call.
            BaseException: what was raised there; what ended the job.
        """
        if not self.is_open or self._is_calling or threading.get_ident() != self._thread:
            self._refuse()
        self._is_calling = True
        try:
            return cast(T, self._await_in_main(fn, args, kwargs))
        finally:
            self._is_calling = False

    def note_opened(self) -> None:
        """Note that the code opens its world."""
        on_opened, self.on_opened = self.on_opened, None
        if on_opened is not None:
            on_opened()

    def at_end(self, fn: Callable[[], None]) -> None:
        """Call ``fn`` when the code has ended without an error, before the world is left; the last one first."""
        self._at_end.append(fn)

    @property
    def registered(self) -> tuple[Callable[[], None], ...]:
        """What is called at the end; the last one is called first."""
        return tuple(self._at_end)

    def forget(self, fn: Callable[[], None]) -> None:
        """Do not call ``fn`` at the end."""
        if fn in self._at_end:
            self._at_end.remove(fn)

    def end(self) -> None:
        """Call what was registered for the end."""
        while self._at_end:
            self._at_end.pop()()

    def _refuse(self) -> NoReturn:
        if not self.is_open:
            raise ClosedError("this world is closed")
        if self._is_calling:
            raise LocalProtocolError(
                "a blocking call inside another one, which is under way: await the coroutine here", rank=self.world.rank
            )
        raise LocalProtocolError(
            f"a blocking call in thread {threading.current_thread().name!r}: a rank's calls are made in the thread "
            "that opened its world",
            rank=self.world.rank,
        )

    @abc.abstractmethod
    def _await_in_main(self, fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call ``fn`` in the task of main, await what it returns where that can be awaited, and return its value."""


@contextlib.contextmanager
def entered(awaited: AbstractAsyncContextManager[T], caller: Caller) -> Iterator[T]:
    """Enter an asynchronous context for the length of a block.

    A block that is thrown away, since its rank has failed, is not left: the world is closed then.
    """

    def leave(kind: type[BaseException] | None, *error: Any) -> bool | None:
        is_thrown_away = kind is GeneratorExit and not caller.is_open
        return None if is_thrown_away else caller.call(awaited.__aexit__, kind, *error)

    with contextlib.ExitStack() as exits:
        given = caller.call(awaited.__aenter__)
        exits.push(leave)
        yield given


# -- one rank in a process of its own ---------------------------------------------------------------------------------


class LoopCaller(Caller):
    """Runs a loop of its own while a call blocks.

    Args:
        open_world: makes the context in which the rank is hosted; it is given what signals do meanwhile.
    """

    def __init__(self, open_world: Callable[[Interrupts], AbstractAsyncContextManager[World]]) -> None:
        super().__init__()
        self._open_world = open_world
        self._interrupts = Interrupts(spares_process=is_loop_running())
        self._runner = asyncio.Runner(loop_factory=IdleLoop)
        self._context = contextvars.copy_context()  # main's
        self._loop: IdleLoop
        self._host: asyncio.Task[Outcome[None]]
        self._next: BegunCall | None = None  # handed to main
        self._awaited: BegunCall | None = None  # None after an interrupt, where main still runs the call
        self._waiter: asyncio.Future[None]  # main waits for it while there is no call
        self._is_ended = False  # there will be no call any more
        self._is_stopped = False  # main was cancelled while there was no call; the block hears of it in its next one
        self._error: BaseException | None = None  # that of the block, with which main ends
        self._is_over = False

    def open(self) -> None:
        """Open the world. Raises what keeps it from opening."""
        self._interrupts.__enter__()
        try:
            with aside():
                self._loop = loop = cast(IdleLoop, self._runner.get_loop())
                self._waiter = self._pause()
                opened: asyncio.Future[None] = loop.create_future()
                self._host = loop.create_task(self._host_rank(opened), name="main", context=self._context)
                self._interrupts.cancel_on_first(loop, [self._host])
                loop.run_until_complete(asyncio.wait((self._host, opened), return_when=asyncio.FIRST_COMPLETED))
            if self._host.done():
                self._host.result().result()
        except BaseException:
            self._end()
            raise
        self.world.services.engine.is_loop_idle = self._is_idle
        self.is_open = True
        atexit.register(self._close_at_exit)
        self.world.services.engine.transport.on_finalize(self._close_before_finalize)

    def listen(self) -> None:
        """Raise signals where the block is from now on, one that has come already included."""
        self._interrupts.raises_at_once = True
        if self._interrupts.withdraw():
            self._interrupts.check()

    def _close_at_exit(self) -> None:
        logger.warning(
            "the world of rank %d was never left: use it as with asyncdist.blocking.open_world() as world, or let "
            "asyncdist.blocking.process_world() end it with the process",
            self.world.rank,
        )
        self.close(None)

    def _close_before_finalize(self) -> None:
        """Leave the world, since the program itself ends MPI, after which this rank could send nothing."""
        try:
            self.close(None)
        except BaseException as error:  # MPI calls this, and could not pass the error on
            sys.excepthook(type(error), error, error.__traceback__)  # which knows what has been reported
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(1)

    def close(self, error: BaseException | None) -> None:
        """Leave the world, or end it with the error of the block. Raises what main ends with, if it is another one.

        A world that has been left already, because the program has ended MPI, is not left again.
        """
        end_forked_child(self.world.process_id, error)
        if self._is_over:
            return
        given = error
        if error is None:
            try:
                self.end()
            except BaseException as caught:
                error = caught
        self._interrupts.raises_at_once = False
        atexit.unregister(self._close_at_exit)
        self.is_open = False
        self._error = error
        try:
            with aside():
                self._is_ended = True
                self._wake_main()
                while not self._host.done():
                    self._loop.run_until_complete(asyncio.wait((self._host,)))
            ended = self._host.result()
        finally:
            self._end()
        if ended.error is not None and ended.error is not given:
            raise ended.error

    def _end(self) -> None:
        self._is_over = True
        try:
            with aside():
                self._runner.close()
        finally:
            self._interrupts.__exit__()

    def _await_in_main(self, fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if self._is_stopped:
            self._is_stopped = False
            raise self._what_stops() or asyncio.CancelledError()
        interrupts = self._interrupts
        interrupts.raises_at_once = False
        running = _get_running_loop()
        if running is not None:
            _set_running_loop(None)
        try:
            value = self._begin(fn, args, kwargs)
            if type(value) is BegunCall:
                value = self._finish(value)
        except BaseException:
            interrupts.raises_at_once = True
            if interrupts.received is not None:
                self._raise_if_stopped()
            raise
        finally:
            if running is not None:
                _set_running_loop(running)
            interrupts.raises_at_once = True
        if interrupts.received is not None:
            self._raise_if_stopped()
        return value

    def _begin(self, fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call ``fn`` as main would, and run what it returns until it waits for something: most steps do not.

        Returns:
            Its value, or a :class:`BegunCall`.
        """
        loop = self._loop
        if self._waiter.done():  # main runs another call still, after an interrupt
            return BegunCall(called(fn, args, kwargs), None)
        _set_running_loop(loop)
        _enter_task(loop, self._host)
        try:
            return self._context.run(self._step_in_context, fn, args, kwargs)
        finally:
            _leave_task(loop, self._host)
            _set_running_loop(None)

    def _step_in_context(self, fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Do what :meth:`_begin` does, where main's context, loop and task are the current ones."""
        made = fn(*args, **kwargs)
        if type(made) is not CoroutineType:
            if not inspect.isawaitable(made):
                return made
            made = awaited(made)
        try:
            waits_for = made.send(None)
            if waits_for is None and self._is_idle():
                waits_for = made.send(None)
        except StopIteration as ended:
            return ended.value
        return BegunCall(made, waits_for)

    def _is_idle(self) -> bool:
        """Whether a turn of the loop, which stands still now, would run nothing, so that a call need not yield.

        A turn takes 30 us, as the code between two calls leaves nothing of the loop in the caches.
        """
        loop = self._loop
        return not loop.is_running() and not loop.has_work(self.world.services.engine.spared_tick)

    def _finish(self, begun: BegunCall) -> Any:
        """Let main go on with a call; return its value."""
        self._awaited = self._next = begun
        self._wake_main()
        try:
            # Main stops the loop. With a future to complete it turned once more: 20 us of 60, in cold caches.
            while not begun.outcomes:
                if self._host.done():  # a second signal was raised inside the loop of a notebook's rank
                    raise self._what_stops() or ClosedError("this world has ended")
                self._loop.run_forever()
            return begun.outcomes[0].result()
        finally:
            self._awaited = None

    def _raise_if_stopped(self) -> None:
        """Raise what a signal raises that has come too late to end the call by itself.

        From here on signals are raised where the block is; the next call may be hours away, or wait for nothing.
        """
        if self._interrupts.withdraw() or self._is_stopped:
            self._is_stopped = False
            error = self._what_stops()
            assert error is not None, "a signal has come"
            raise error

    def _pause(self) -> Pause:
        return Pause(self._loop, self._note_cancellation)

    def _note_cancellation(self) -> bool:
        self._is_stopped = not self._is_over
        return self._is_over

    def _wake_main(self) -> None:
        if not self._waiter.done():
            self._waiter.set_result(None)

    async def _host_rank(self, opened: asyncio.Future[None]) -> Outcome[None]:
        """Be the main of the rank, until the block has ended."""
        task = asyncio.current_task()
        assert task is not None, "this is one"
        frame_of_caller[task] = sys._getframe  # on whose stack the loop runs

        async def host() -> None:
            async with self._open_world(self._interrupts) as world:
                self.world = world
                opened.set_result(None)
                await self._serve()

        return await outcome_of(host())

    async def _serve(self) -> None:
        """Await what the block calls, one after the other, until it ends; end with its error."""
        while True:
            while self._next is None and not self._is_ended:
                self._waiter = self._pause()
                try:
                    await self._waiter
                except asyncio.CancelledError:
                    if self._is_over:
                        raise
                    self._is_stopped = True
            begun, self._next = self._next, None
            if begun is None:
                break
            begun.is_cancelled, self._is_stopped = self._is_stopped, False
            try:
                outcome = Outcome(await begun)
            except GeneratorExit:  # main is thrown away
                raise
            except asyncio.CancelledError as error:
                outcome = Outcome(error=self._what_stops() or error)
            except BaseException as error:
                outcome = Outcome(error=error)
            begun.outcomes.append(outcome)
            if self._awaited is begun:
                self._loop.stop()
        if self._error is not None:
            raise self._error
        if self._is_stopped:
            raise asyncio.CancelledError

    def _what_stops(self) -> BaseException | None:
        """Return why main is cancelled: because of a signal, or because the job has failed."""
        return self._interrupts.error(self.world.rank) or self.world.services.engine.failure


@contextlib.contextmanager
def aside() -> Iterator[None]:
    """Let a loop run in this thread, beside one that stands still meanwhile: a notebook's, of which this is a cell."""
    running = _get_running_loop()
    _set_running_loop(None)
    try:
        yield
    finally:
        _set_running_loop(running)


# -- several ranks in a thread ----------------------------------------------------------------------------------------


class SwitchingCaller(Caller):
    """Runs code on a stack of its own, inside main of a rank whose loop is running.

    Args:
        world: of the rank.
        is_of_script: whether the code is the whole script, which opens this world itself.
    """

    def __init__(self, world: World, *, is_of_script: bool = False) -> None:
        super().__init__()
        self.world = world
        self.is_of_script = is_of_script
        self._main: greenlet.greenlet

    async def run(self, fn: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Call ``fn``, and await what it calls meanwhile; return what it returns."""
        return cast(T, await self._serve(greenlet.greenlet(fn), *args, **kwargs))

    async def go_on(self, stack: greenlet.greenlet) -> object:
        """Let code go on that has asked for its world in :func:`ask_for_world`; return what it returns."""
        return await self._serve(stack, self)

    async def _serve(self, stack: greenlet.greenlet, *args: Any, **kwargs: Any) -> object:
        task, here = asyncio.current_task(), greenlet.getcurrent()
        assert task is not None, "main is one"
        self._main = stack.parent = here
        token = _current.set(self)
        stack.gr_context = here.gr_context  # the task's: a variable that is set on one stack is so on both
        frame_of_caller[task] = lambda: stack.gr_frame
        self.is_open = True
        try:
            asked = stack.switch(*args, **kwargs)
            while not stack.dead:
                asked = stack.switch(await outcome_of(asked))
            return asked
        finally:
            self.is_open = False
            _current.reset(token)
            del frame_of_caller[task]

    def _await_in_main(self, fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return self._main.switch(called(fn, args, kwargs)).result()
