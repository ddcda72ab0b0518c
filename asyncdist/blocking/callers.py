"""Runs coroutines for code without an event loop, on the same thread.

The coroutines run in the task of the rank's main. The blocking code itself is hosted in one of two ways:

- :class:`LoopCaller`, for one rank per process: the event loop runs while a call blocks, and is suspended between
  calls. The blocking code may be a whole script.
- :class:`SwitchingCaller`, for several ranks in a thread, as in a simulation: the blocking code runs inside main on a
  separate stack (a greenlet). A blocking call switches to main's stack, and back when its value is known.
"""

from __future__ import annotations

import abc
import asyncio
import atexit
import contextlib
import contextvars
import inspect
import logging
import sys
import threading
from asyncio import _get_running_loop, _set_running_loop
from asyncio.tasks import _enter_task, _leave_task
from collections import deque
from collections.abc import Awaitable, Callable, Iterator
from contextlib import AbstractAsyncContextManager
from contextvars import ContextVar
from types import CoroutineType
from typing import Any, ParamSpec, TypeVar, cast

import greenlet

from asyncdist import rank_program
from asyncdist.blocking.begun import BegunCall, Outcome, Pause, awaited, called, outcome_of
from asyncdist.blocking.stack_bottom import call_at_bottom
from asyncdist.errors import ClosedError, LateError, LocalProtocolError
from asyncdist.functional.parallel_groups import ParallelGroups, current_groups
from asyncdist.runtime.failing.failure import end_late, uncancel
from asyncdist.runtime.failing.process_ends import end_forked_child, exit_immediately
from asyncdist.runtime.outside_loop import is_loop_running
from asyncdist.runtime.signals import Interrupts
from asyncdist.runtime.stall_warnings import frame_of_caller
from asyncdist.runtime.world import World, current_world
from asyncdist.spmd.mesh import Mesh, open_meshes

logger = logging.getLogger("asyncdist.blocking")

P = ParamSpec("P")
T = TypeVar("T")

#: The :class:`Caller` for blocking code in this context.
_current: ContextVar[Caller] = ContextVar("asyncdist_blocking_caller")
#: Function that returns this rank's :class:`Caller`, or None. Set if several ranks of this process run scripts that
#: open worlds.
ask_for_world: ContextVar[Callable[[], Caller] | None] = ContextVar("asyncdist_ask_for_world", default=None)


#: The :class:`Caller` for code outside all ``with`` blocks, if the process has a world that lasts until its end.
_of_process: Caller | None = None


def set_process_caller(caller: Caller | None) -> None:
    """Set the :class:`Caller` for code outside all ``with`` blocks. It is used while its world is open."""
    global _of_process
    _of_process = caller


def find_caller() -> Caller | None:
    """Return the :class:`Caller` for the running blocking code, or None in a coroutine, or if no world is open."""
    for caller in (_current.get(None), _of_process):
        if caller is not None and caller.is_open:
            return caller
    return None


def current_caller(what: str) -> Caller:
    """Return the :class:`Caller` for the running blocking code. Raise an error that names ``what`` if there is none."""
    caller = find_caller()
    if caller is not None:
        return caller
    if is_in_a_rank():
        raise LocalProtocolError(
            f"{what} of asyncdist.blocking cannot be called in a coroutine, because it blocks: await asyncdist.{what} "
            "instead"
        )
    thread = threading.current_thread()
    where = ""
    if thread is not threading.main_thread():
        where = f" in thread {thread.name!r} (use the thread that opened the world)"
    raise RuntimeError(
        f"{what} needs an open world, but none is open{where}: call it inside with asyncdist.blocking.open_world(), or "
        "in a main that asyncdist.blocking.run calls"
    )


def is_in_a_rank() -> bool:
    """Return whether the running code is in a rank's coroutine, and is not blocking code."""
    if find_caller() is not None:
        return False
    try:
        return current_world().is_open
    except RuntimeError:
        return False


class Caller(abc.ABC):
    """Awaits coroutines for blocking code, in the task of a rank's main.

    Attributes:
        on_opened: Function to call when the blocking code opens its world, if that world is already open, as in a
            simulation.
        ends: Functions to call before the world closes without an error, oldest first.
    """

    world: World

    def __init__(self) -> None:
        self.is_open = False
        self.on_opened: Callable[[], None] | None = None
        self.ends: list[Callable[[], None]] = []
        self._is_calling = False
        self._thread = threading.current_thread()  # only this thread may call (identifiers of ended threads are reused)

    def call(self, fn: Callable[P, Awaitable[T]], /, *args: P.args, **kwargs: P.kwargs) -> T:
        """Call ``fn`` in main's task and return its value. If the value is awaitable, await it and return the result.

        Raises:
            ClosedError: The world is closed.
            LocalProtocolError: Called in a thread other than the rank's, or inside another blocking call. If the rank's
                thread has ended, the calling thread becomes the rank's.
            BaseException: The exception that ``fn`` raised, or the error that ended the job.
        """
        if not self.is_open or self._is_calling or threading.current_thread() is not self._thread:
            self._check_can_call()
        self._is_calling = True
        try:
            return cast(T, self._await_in_main(fn, args, kwargs))
        finally:
            self._is_calling = False

    def note_opened(self) -> None:
        """Call ``on_opened``, unless it was called before. Called when the blocking code opens its world."""
        on_opened, self.on_opened = self.on_opened, None
        if on_opened is not None:
            on_opened()

    def end(self) -> None:
        """Call the functions in ``ends``, the newest first."""
        while self.ends:
            self.ends.pop()()

    def _check_can_call(self) -> None:
        """Raise the error for a call that is not possible now.

        If the rank's thread has ended, make this thread the rank's.
        """
        if not self.is_open:
            raise ClosedError("this world is closed")
        caller = threading.current_thread()
        if not self._thread.is_alive():
            self._thread = caller
        elif caller is not self._thread:
            raise LocalProtocolError(
                f"a blocking call cannot be made in thread {caller.name!r}; make it in the thread that opened the "
                "world",
                rank=self.world.rank,
            )
        if self._is_calling:
            raise LocalProtocolError(
                "a blocking call cannot be made inside another blocking call; await the coroutine instead",
                rank=self.world.rank,
            )

    @abc.abstractmethod
    def _await_in_main(self, fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Implement :meth:`call` after its arguments and thread have been checked."""


@contextlib.contextmanager
def entered(awaited: AbstractAsyncContextManager[T], caller: Caller) -> Iterator[T]:
    """Enter an asynchronous context manager in a ``with`` statement.

    Its ``__aexit__`` is skipped if the rank has failed.
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
    """Runs blocking code as the only rank of a process. While a call blocks, this rank's event loop runs."""

    def __init__(self, open_world: Callable[[Interrupts], AbstractAsyncContextManager[World]]) -> None:
        super().__init__()
        self._open_world = open_world
        self._interrupts = Interrupts(spares_process=is_loop_running())
        self._runner = asyncio.Runner(loop_factory=asyncio.SelectorEventLoop)  # uvloop would need 30 us for each start
        self._context = contextvars.copy_context()
        self._loop: asyncio.AbstractEventLoop
        self._host: asyncio.Task[Outcome[None]]
        self._begun: deque[BegunCall] = deque()  # the calls that main continues next
        self._awaited: BegunCall | None = None  # the call whose end stops the loop, or None after an interrupt
        self._waiter: asyncio.Future[None]  # main waits for this future between calls
        self._is_ended = False  # whether the ``with`` block has ended, so that main must end
        self._is_stopped = False  # whether main was cancelled between calls, so that the next call raises the reason
        self._error: BaseException | None = None  # the ``with`` block's error, which main raises when it ends
        self._is_over = False

    def open(self) -> None:
        """Open the world, or raise the error that prevents it."""
        self._interrupts.__enter__()
        try:
            with without_running_loop():
                self._loop = loop = self._runner.get_loop()
                self._waiter = self._pause()
                opened: asyncio.Future[None] = loop.create_future()
                self._context.run(_current.set, self)  # for a policy's callbacks, which run in main
                self._host = loop.create_task(self._host_rank(opened), name="main", context=self._context)
                self._interrupts.cancel_on_first(loop, [self._host])
                loop.run_until_complete(asyncio.wait((self._host, opened), return_when=asyncio.FIRST_COMPLETED))
            if self._host.done():
                self._host.result().result()
        except BaseException:
            self._end()
            raise
        self.is_open = True
        atexit.register(self._close_at_exit)
        self.world.services.engine.transport.on_finalize(self._close_before_finalize)

    def listen(self) -> None:
        """From now on, let a signal raise its error in the ``with`` block, even if the signal has already arrived."""
        self._interrupts.raises_at_once = True
        if self._interrupts.withdraw():
            self._interrupts.check()

    def signalled(self) -> BaseException | None:
        """Return the exception that a received signal has raised or will raise, or None."""
        return self._interrupts.error(self.world.rank)

    def _close_at_exit(self) -> None:
        logger.warning(
            "the world of rank %d was never left: open it in a block, with asyncdist.blocking.open_world() as world, "
            "or use asyncdist.blocking.process_world(), which leaves it when the process ends",
            self.world.rank,
        )
        self.close(None)

    def _close_before_finalize(self) -> None:
        """Leave the world before the program finalizes MPI, because this rank could not send messages afterwards."""
        try:
            self.close(None)
        except BaseException as error:  # MPI calls this method, and does not propagate errors
            rank_program.call_excepthook(error)  # prints only errors not yet reported
            exit_immediately(1)

    def close(self, error: BaseException | None) -> None:
        """End main, and the world, with the ``error`` of the ``with`` block, unless main has ended.

        Raise any other error of main, or SystemExit if ``error`` says that this restarted rank was too late.
        """
        end_forked_child(self.world.process_id, error)
        if self._is_over:
            return
        given = error
        if not self._is_calling:  # at the interpreter's exit, the rank's thread may still run, if it is a daemon
            self._thread = threading.current_thread()
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
            with without_running_loop():
                self._is_ended = True
                self._wake_main()
                while not self._host.done():
                    self._loop.run_until_complete(asyncio.wait((self._host,)))
            ended = self._host.result()
        finally:
            self._end()
        if isinstance(given, LateError):
            end_late(given)
        if ended.error is not None and ended.error is not given:
            raise ended.error

    def _end(self) -> None:
        self._is_over = True
        try:
            with without_running_loop():
                self._runner.close()
        finally:
            self._interrupts.__exit__()

    def _await_in_main(self, fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if self._is_stopped:
            self._is_stopped = False
            raise self._cancellation_cause() or asyncio.CancelledError()
        interrupts = self._interrupts
        interrupts.raises_at_once = False
        running, context = _get_running_loop(), self._context
        try:
            if running is not None:
                _set_running_loop(None)
            meshes, groups = open_meshes.get(), current_groups.get()
            if context.get(open_meshes) is not meshes or context.get(current_groups) is not groups:
                context.run(_share, meshes, groups)
            value = self._begin(fn, args, kwargs)
            if type(value) is BegunCall:
                value = self._finish(value)
        except BaseException:
            interrupts.raises_at_once = True
            if interrupts.received is not None:
                self._raise_if_stopped()
            raise
        finally:
            interrupts.raises_at_once = True
            _set_running_loop(running)
        if interrupts.received is not None:
            self._raise_if_stopped()
        if context.get(open_meshes) is not meshes or context.get(current_groups) is not groups:
            _share(context[open_meshes], context.get(current_groups))
        return value

    def _begin(self, fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run a call in main's context. Return its value, or a :class:`BegunCall` as soon as it has to wait."""
        loop = self._loop
        if self._waiter.done():  # main is still running a call that was interrupted
            return BegunCall(called(fn, args, kwargs), None)
        work = self.world.services.engine.loop_work
        assert work is not None, "the world has opened in an asyncio loop"
        try:
            _set_running_loop(loop)
            _enter_task(loop, self._host)
            work.is_running = False
            return self._context.run(self._step_in_context, fn, args, kwargs)
        finally:
            work.is_running = True
            # A signal handler of the program may raise an error after any function call, so no further function is
            # called here.
            try:  # noqa: SIM105
                _leave_task(loop, self._host)
            except RuntimeError:  # main was not made the current task yet
                pass
            _set_running_loop(None)

    def _step_in_context(self, fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Implement :meth:`_begin` inside main's context, with main's loop and task as the current loop and task."""
        made = fn(*args, **kwargs)
        if type(made) is not CoroutineType:
            if not inspect.isawaitable(made):
                return made
            made = awaited(made)
        try:
            waits_for = made.send(None)
        except StopIteration as ended:
            return ended.value
        return BegunCall(made, waits_for)

    def _finish(self, begun: BegunCall) -> Any:
        try:
            self._awaited = begun
            self._begun.append(begun)
            self._wake_main()
            # Main stops the loop when the call ends. Waiting for a future would take another iteration of the loop,
            # which takes 20 of the call's 60 us with cold caches.
            while not begun.outcomes:
                if self._host.done():  # a second signal in a notebook has ended main
                    raise self._cancellation_cause() or ClosedError("the world has ended during this call")
                self._loop.run_forever()
        except BaseException:
            # A signal handler of the program, or another task of the loop, has raised this error. Later calls, and the
            # end of the world, would wait for the call.
            if begun in self._begun:
                begun.is_cancelled = True
            elif not begun.outcomes:
                self._host.cancel()
            raise
        finally:
            self._awaited = None
        return begun.outcomes[0].result()

    def _raise_if_stopped(self) -> None:
        """Raise the error of a signal that arrived too late to interrupt this call."""
        if self._interrupts.withdraw() or self._is_stopped:
            self._is_stopped = False
            error = self._cancellation_cause()
            assert error is not None, "a signal has arrived"
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
        """Run as the rank's main until the ``with`` block has ended."""
        task = asyncio.current_task()
        assert task is not None, "this coroutine runs in a task"
        frame_of_caller[task] = sys._getframe  # the thread's current stack is the blocking code's

        async def host() -> None:
            async with self._open_world(self._interrupts) as world:
                self.world = world
                world.services.engine.serves_blocking_code = True
                opened.set_result(None)
                await self._serve()

        return await outcome_of(host())

    async def _serve(self) -> None:
        """Await the calls of the ``with`` block in turn until it ends. Raise the exception that ended it."""
        while True:
            while not self._begun and not self._is_ended:
                self._waiter = self._pause()
                try:
                    await self._waiter
                except asyncio.CancelledError:
                    if self._is_over:
                        raise
                    self._is_stopped = True
            if not self._begun:
                break
            begun = self._begun.popleft()
            if self._is_stopped:
                begun.is_cancelled, self._is_stopped = True, False
            try:
                outcome = Outcome(await begun)
            except GeneratorExit:  # main's coroutine is being closed
                raise
            except asyncio.CancelledError as error:
                uncancel()  # the next call is not being cancelled
                outcome = Outcome(error=self._cancellation_cause() or error)
            except BaseException as error:
                outcome = Outcome(error=error)
            begun.outcomes.append(outcome)
            if self._awaited is begun:
                self._loop.stop()
        if self._error is not None:
            raise self._error
        if self._is_stopped:
            raise asyncio.CancelledError

    def _cancellation_cause(self) -> BaseException | None:
        """Return the error that caused main's cancellation: a signal's error, or the job's failure."""
        return self._interrupts.error(self.world.rank) or self.world.services.engine.failure


def _share(meshes: tuple[Mesh, ...], groups: ParallelGroups[Any] | None) -> None:
    """Set the context variables that blocking code shares with the coroutines it calls in another context."""
    open_meshes.set(meshes)
    current_groups.set(groups)


@contextlib.contextmanager
def without_running_loop() -> Iterator[None]:
    """Allow another event loop to run in this thread, even inside a notebook, whose own loop is running."""
    running = _get_running_loop()
    _set_running_loop(None)
    try:
        yield
    finally:
        _set_running_loop(running)


# -- several ranks in a thread ----------------------------------------------------------------------------------------


class SwitchingCaller(Caller):
    """Runs blocking code or a script on a separate stack, inside the main of a rank whose event loop is running."""

    def __init__(self, world: World, *, is_of_script: bool = False) -> None:
        super().__init__()
        self.world = world
        self.is_of_script = is_of_script
        self._main: greenlet.greenlet

    async def run(self, fn: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Run ``fn``, await the coroutines of its blocking calls, and return its value."""
        return cast(T, await self._serve(greenlet.greenlet(call_at_bottom), fn, *args, **kwargs))

    async def continue_stack(self, stack: greenlet.greenlet) -> object:
        """Continue the code on ``stack``, which is waiting in :data:`ask_for_world`, and return the code's value."""
        return await self._serve(stack, self)

    async def _serve(self, stack: greenlet.greenlet, *args: Any, **kwargs: Any) -> object:
        task, here = asyncio.current_task(), greenlet.getcurrent()
        assert task is not None, "main runs in a task"
        self._main = stack.parent = here
        token = _current.set(self)
        stack.gr_context = here.gr_context  # both stacks share the task's context variables
        frame_of_caller[task] = lambda: stack.gr_frame
        self.is_open = True
        try:
            asked = stack.switch(*args, **kwargs)
            while not stack.dead:
                outcome = await outcome_of(asked)
                if isinstance(outcome.error, asyncio.CancelledError):
                    uncancel()  # the next call is not being cancelled
                asked = stack.switch(outcome)
            return asked
        finally:
            self.is_open = False
            _current.reset(token)
            del frame_of_caller[task]

    def _await_in_main(self, fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return self._main.switch(called(fn, args, kwargs)).result()
