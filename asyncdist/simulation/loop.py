"""The event loop of a simulated rank: what asyncio wants of one, on the turns of :mod:`asyncdist.simulation.turns`.

What would touch the world outside, threads and sockets, is refused by name.
"""

from __future__ import annotations

import asyncio
import contextvars
import types
import weakref
from collections.abc import Awaitable, Callable, Coroutine, Generator
from typing import Any, Final, NoReturn, TypeVar

from asyncdist.simulation.outside import refuse
from asyncdist.simulation.turns import Scheduler, Turns

T = TypeVar("T")


@types.coroutine
def _fall_asleep() -> Generator[None, None, None]:
    """The task's next step is the last thing that is ready now."""
    yield


class SimTask(asyncio.Task[Any]):
    """A task that a set finds by its number, not its address: asyncio cancels and returns tasks in the order of sets.

    Attributes:
        number: tasks are numbered as they are made.
    """

    def __init__(self, coro: Coroutine[Any, Any, Any], number: int, **options: Any) -> None:
        self.number = number
        super().__init__(coro, **options)

    def __hash__(self) -> int:
        return self.number


class RankLoop(Turns, asyncio.AbstractEventLoop):  # type: ignore[misc]  # its handles are no asyncio.Handle
    """The event loop of one rank.

    Args:
        scheduler: shared by all ranks.
        rank: whose loop it is.
        before_turn, enter, background: see :class:`Turns`.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        rank: int,
        *,
        before_turn: Callable[[int], None] | None,
        enter: Callable[[int], None],
        background: Callable[..., None],
    ) -> None:
        super().__init__(scheduler, rank, before_turn=before_turn, enter=enter, background=background)
        self._tasks: weakref.WeakSet[SimTask] = weakref.WeakSet()

    def be_deaf(self, seconds: float) -> Awaitable[None]:
        """Compute: get no turn for so long. To be awaited at once.

        The caller goes on first when it is over.
        """
        self.fall_deaf(seconds)
        return _fall_asleep()  # a future would cost as much again as all of this

    def create_task(  # type: ignore[override]
        self, coro: Coroutine[Any, Any, T], *, name: str | None = None, context: contextvars.Context | None = None
    ) -> asyncio.Task[T]:
        self._scheduler.task_count += 1
        number = self._scheduler.task_count
        task = SimTask(coro, number, loop=self, name=name or f"task {number}", context=context)
        self._tasks.add(task)
        return task

    def unfinished_tasks(self) -> list[SimTask]:
        """Those that are not done, in the order in which they were made."""
        return sorted((task for task in self._tasks if not task.done()), key=lambda task: task.number)

    def is_closed(self) -> bool:
        return False

    def call_soon_threadsafe(  # type: ignore[override]
        self, *args: Any, **kwargs: Any
    ) -> NoReturn:
        refuse("a call from another thread")

    def run_in_executor(  # type: ignore[override]
        self, *args: Any, **kwargs: Any
    ) -> NoReturn:
        refuse("a thread or process pool")


def _refusing(name: str) -> Any:
    def method(self: RankLoop, *args: Any, **kwargs: Any) -> NoReturn:
        del self, args, kwargs
        refuse(f"loop.{name}, a socket, pipe, signal or subprocess,")

    return method


#: What touches the world outside. asyncio's own NotImplementedError would not say why.
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
    setattr(RankLoop, _name, _refusing(_name))
