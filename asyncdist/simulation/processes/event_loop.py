"""Provides the event loop of a simulated rank: asyncio's interface on top of :mod:`asyncdist.simulation.rank_turns`."""

from __future__ import annotations

import asyncio
import contextvars
import logging
import types
import weakref
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine, Generator
from typing import Any, Final, NoReturn, TypeVar

from asyncdist.errors import LocalProtocolError
from asyncdist.simulation.determinism.sandbox import refuse
from asyncdist.simulation.rank_turns import Turns

logger = logging.getLogger("asyncdist.simulation")

T = TypeVar("T")


@types.coroutine
def _fall_asleep() -> Generator[None, None, None]:
    """Yield once, so that all callbacks that are already ready run before the task resumes."""
    yield


class SimTask(asyncio.Task[Any]):
    """A task whose hash is a serial number, so that asyncio's sets of tasks have a deterministic order."""

    def __init__(self, coro: Coroutine[Any, Any, Any], number: int, **options: Any) -> None:
        self.number = number
        super().__init__(coro, **options)

    def __hash__(self) -> int:
        return self.number


class SimFuture(asyncio.Future[Any]):
    """A future with a deterministic hash: a number that is assigned when the hash is first needed."""

    def __hash__(self) -> int:
        loop: Any = self.get_loop()
        number: int = loop.number_of(self)
        return number


class RankLoop(Turns, asyncio.AbstractEventLoop):  # type: ignore[misc]  # its handles are not asyncio.Handle
    """The event loop that runs the tasks of one simulated rank. ``context`` has the context variables of ``main``.

    The arguments are those of :class:`~asyncdist.simulation.rank_turns.Turns`.
    """

    context: contextvars.Context
    generators: Callable[[RankLoop], list[AsyncGenerator[Any, Any]]]

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._tasks: weakref.WeakSet[SimTask] = weakref.WeakSet()
        self._numbered_count = 0
        self._exception_handler: Callable[[RankLoop, dict[str, Any]], object] | None = None

    def be_busy(self, seconds: float) -> Awaitable[None]:
        """Make the rank busy for ``seconds``. The caller must await the result at once, and resumes first."""
        self.become_busy(seconds)
        return _fall_asleep()  # awaiting a future would cost twice as much

    def event_time(self) -> float:
        """Return the same time as :meth:`time`, but do not count this call as a clock read."""
        seconds: float = self._scheduler.time()
        return seconds

    def create_future(self) -> asyncio.Future[Any]:
        return SimFuture(loop=self)

    def number_of(self, future: Any) -> int:
        """Return the number that serves as the hash of a future of this loop."""
        number: int | None = getattr(future, "number", None)
        if number is None:
            self._numbered_count += 1
            number = future.number = self._numbered_count
        return number

    def create_task(  # type: ignore[override]
        self, coro: Coroutine[Any, Any, T], *, name: str | None = None, context: contextvars.Context | None = None
    ) -> asyncio.Task[T]:
        self._scheduler.task_count += 1
        number = self._scheduler.task_count
        task = SimTask(coro, number, loop=self, name=name or f"task {number}", context=context)
        self._tasks.add(task)
        return task

    def unfinished_tasks(self) -> list[SimTask]:
        """Return the tasks that are not done, oldest first."""
        return sorted((task for task in self._tasks if not task.done()), key=lambda task: task.number)

    def is_closed(self) -> bool:
        return False

    def get_exception_handler(self) -> Callable[[RankLoop, dict[str, Any]], object] | None:  # type: ignore[override]
        """Return the exception handler that the program has set, or None."""
        return self._exception_handler

    def set_exception_handler(self, handler: Callable[[RankLoop, dict[str, Any]], object] | None) -> None:
        """Set the handler for exceptions that no task of this rank retrieves. None restores the default handler."""
        if handler is not None and not callable(handler):
            raise TypeError(f"the exception handler must be a function or None, got {handler!r}")
        self._exception_handler = handler

    def default_exception_handler(self, context: dict[str, Any]) -> None:
        """Log the exception with the rank's number."""
        super().call_exception_handler(context)

    def call_exception_handler(self, context: dict[str, Any]) -> None:
        """Call the exception handler, or drop the exception if the rank was killed."""
        if self._exception_handler is None or self.dead:
            super().call_exception_handler(context)
            return
        try:
            self._exception_handler(self, context)
        except (SystemExit, KeyboardInterrupt):
            raise
        except BaseException:
            logger.exception("rank %d: the exception handler failed; its context was: %s", self.rank, context)

    def get_task_factory(self) -> None:
        """Return None, because simulations have no task factories."""

    def set_task_factory(self, factory: Callable[..., Any] | None) -> None:
        """Raise unless ``factory`` is None."""
        if factory is not None:
            raise LocalProtocolError(
                "a task factory cannot be set in a simulation: asyncio keeps tasks in sets, whose order is "
                "deterministic only for the simulator's own tasks",
                rank=self.rank,
            )

    async def shutdown_asyncgens(self) -> None:
        """Close the remaining asynchronous generators, as asyncio does after ``main`` has ended."""
        left = self.generators(self)
        results = await asyncio.gather(*[generator.aclose() for generator in left], return_exceptions=True)
        for generator, result in zip(left, results, strict=True):
            if isinstance(result, Exception):
                message = f"an error occurred during closing of asynchronous generator {generator!r}"
                self.call_exception_handler({"message": message, "exception": result, "asyncgen": generator})

    async def shutdown_default_executor(self) -> None:
        """Do nothing, because a simulation has no executor."""


def _refusing(what: str) -> Any:
    def method(self: RankLoop, *args: Any, **kwargs: Any) -> NoReturn:
        del self, args, kwargs
        refuse(what)

    return method


def _not_for_ranks(name: str) -> Any:
    def method(self: RankLoop, *args: Any, **kwargs: Any) -> NoReturn:
        del args, kwargs
        raise LocalProtocolError(
            f"loop.{name} cannot be called in a simulation, which runs and ends the loops of all ranks itself",
            rank=self.rank,
        )

    return method


#: Methods that reach outside the simulation. They raise an error that states why, unlike asyncio's NotImplementedError.
_OUTSIDE: Final = (
    "add_reader",
    "add_signal_handler",
    "add_writer",
    "connect_accepted_socket",
    "connect_read_pipe",
    "connect_write_pipe",
    "create_connection",
    "create_datagram_endpoint",
    "create_server",
    "create_unix_connection",
    "create_unix_server",
    "getaddrinfo",
    "getnameinfo",
    "remove_reader",
    "remove_signal_handler",
    "remove_writer",
    "sendfile",
    "sock_accept",
    "sock_connect",
    "sock_recv",
    "sock_recv_into",
    "sock_recvfrom",
    "sock_recvfrom_into",
    "sock_sendall",
    "sock_sendfile",
    "sock_sendto",
    "start_tls",
    "subprocess_exec",
    "subprocess_shell",
)

for _name in _OUTSIDE:
    setattr(RankLoop, _name, _refusing(f"loop.{_name}, a socket, pipe, signal or subprocess,"))
for _name in ("run_in_executor", "set_default_executor"):
    setattr(RankLoop, _name, _refusing("a thread or process pool"))
RankLoop.call_soon_threadsafe = _refusing("a call from another thread")  # type: ignore[method-assign]
for _name in ("close", "run_forever", "run_until_complete", "stop"):
    setattr(RankLoop, _name, _not_for_ranks(_name))
