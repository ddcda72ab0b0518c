"""Who waits for what, in words: where nothing is left to happen in a simulation, and where a rank stands still."""

from __future__ import annotations

import asyncio
import logging
import math
import types
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Final

from asyncdist import checks
from asyncdist.collectives import ended, shielded
from asyncdist.errors import StallError
from asyncdist.starts import Start
from asyncdist.world import World

logger = logging.getLogger("asyncdist.waits")


@dataclass(frozen=True, slots=True)
class Patience:
    """How long a rank may stand still before that is said: the options of :func:`asyncdist.run`.

    Raises:
        ValueError: no number of seconds above 0.
    """

    watchdog_s: float = math.inf
    stall_s: float = math.inf
    stall_aborts: bool = False

    def __post_init__(self) -> None:
        checks.seconds("watchdog_s", self.watchdog_s, finite=False)
        checks.seconds("stall_s", self.stall_s, finite=False)


ENDLESS: Final = Patience()
#: Functions that wait for the task that their variable ``task`` holds.
_SHOWS_ITS_TASK: Final = (shielded.__code__, ended.__code__, Start.result.__code__)


class EndWatch:
    """Says once who holds the end of a rank whose main has returned: tasks that it spawned and that wait for long.

    It says so where all of them have waited for the same thing for a whole period, since a task that moves may well end
    the others. What arrived while something blocked the loop is taken in before that is judged.

    Args:
        world: this rank's.
        period_s: how long is long, in seconds; infinity for never.
    """

    def __init__(self, world: World, period_s: float) -> None:
        self._world = world
        self._period_s = period_s
        self._seen: dict[asyncio.Task[Any], Any] = {}
        self._timer: asyncio.TimerHandle | None = None

    def begin(self) -> None:
        """Main has returned."""
        self._seen = {task: _waiter(task) for task in self._world.spawned_tasks()}
        if self._seen and self._period_s < math.inf:
            self._timer = asyncio.get_running_loop().call_later(self._period_s, self._look)

    def end(self) -> None:
        """The tasks have ended, or are being cancelled."""
        if self._timer is not None:
            self._timer.cancel()

    def _look(self) -> None:
        world = self._world
        world.engine.poll()
        tasks = world.spawned_tasks()
        if world.is_computing or not all(self._still_waits(task) for task in tasks):
            self.begin()
            return
        told = "; ".join(f"{task.get_name()}: {what_awaits(task, world)}" for task in tasks)
        logger.warning(
            "main of rank %d has returned, and the rank ends when the tasks that it spawned do; for %g s they have "
            "waited: %s. If nothing ends them, leave their loops, cancel them, or close the channel that they read",
            world.rank,
            self._period_s,
            told,
        )

    def _still_waits(self, task: asyncio.Task[Any]) -> bool:
        waiter = _waiter(task)
        return waiter is not None and not waiter.done() and self._seen.get(task) is waiter


class StallWatch:
    """Speaks up, once for each such wait, when main of a rank has waited for long for what its peers should bring.

    It sees what main awaits by itself, in ``asyncio.gather``, in an ``asyncio.TaskGroup``, or through a task. A wait
    that something else ends, as a sleep, a thread or an event of the user's, is none of these, and a collective inside
    an asynchronous generator is not seen; whether a wait has a deadline does not count.

    Args:
        world: this rank's.
        main: the task that runs it.
        period_s: how long is long, in seconds; infinity for never.
        end: is given the error that main is to end with; where it is None, a warning is all.
    """

    def __init__(
        self, world: World, main: asyncio.Task[Any] | None, period_s: float, end: Callable[[StallError], None] | None
    ) -> None:
        self._world = world
        self._main = main
        self._period_s = period_s
        self._end = end
        self._seen: list[Any] = []
        self._told: list[Any] = []
        self._timer: asyncio.TimerHandle | None = None

    def begin(self) -> None:
        """Main begins, or has not been waiting for long."""
        if self._main is not None and self._period_s < math.inf:
            self._seen = _peers_awaited(self._main, self._world, set()) or []
            self._timer = asyncio.get_running_loop().call_later(self._period_s, self._look)

    def end(self) -> None:
        """Main has returned, or is being cancelled."""
        if self._timer is not None:
            self._timer.cancel()

    def _look(self) -> None:
        before = self._seen
        self._world.engine.poll()
        self.begin()
        awaited = self._seen
        if awaited and awaited == before and awaited != self._told and not any(future.done() for future in awaited):
            self._told = awaited
            self._tell(", and ".join(dict.fromkeys(str(self._world.engine.awaited(future)) for future in awaited)))

    def _tell(self, what: str) -> None:
        assert self._main is not None, "nobody is watched"
        text = f"has waited for {self._period_s:g} s: {_with_line(self._main, what)}"
        if self._end is None:
            logger.warning("main of rank %d %s", self._world.rank, text)
        else:
            self._end(StallError(f"main {text}", rank=self._world.rank))


def _peers_awaited(waiter: Any, world: World, seen: set[int]) -> list[Any] | None:
    """What must come from peers before ``waiter`` is done, besides what was ``seen``; None if something else may."""
    if id(waiter) in seen:
        return []
    seen.add(id(waiter))
    if world.engine.awaited(waiter) is not None:
        return [waiter]
    parts: Iterable[Any] = getattr(waiter, "_children", ())  # of asyncio.gather
    if isinstance(waiter, asyncio.Task):
        frames = {frame.f_code: frame.f_locals for frame in _frames(waiter)}
        if of_others := next((frames[code] for code in _SHOWS_ITS_TASK if code in frames), None):
            parts = [of_others["task"]]
        elif of_group := frames.get(asyncio.TaskGroup.__aexit__.__code__):
            parts = of_group["self"]._tasks
        else:
            parts = [_waiter(waiter)]
    found: list[Any] = []
    has_parts = False
    for part in parts:
        if part is not None and not part.done():
            awaited = _peers_awaited(part, world, seen)
            if awaited is None:
                return None
            has_parts = True
            found += awaited
    return sorted(found, key=id) if has_parts else None


def _waiter(task: asyncio.Task[Any]) -> Any:
    """The future that ``task`` waits for; None while it is ready to run."""
    return getattr(task, "_fut_waiter", None)


def what_awaits(task: asyncio.Task[Any], world: World | None) -> str:
    """In words what a task waits for, and the line of the user's code, if any, where it does."""
    frames = _frames(task)
    if not frames or frames[0].f_lasti < 0:
        return "has not begun"
    position = next((i for i in reversed(range(len(frames))) if not _is_library(frames[i])), None)
    start = next((frame.f_locals["task"] for frame in frames if frame.f_code is Start.result.__code__), None)
    awaited = _waiter(task if start is None else start)
    what = world.engine.awaited(awaited) if world is not None and awaited is not None else None
    if position is None:
        return what or frames[-1].f_code.co_qualname
    if what is None:
        called = [frame.f_code.co_qualname for frame in frames[position + 1 :]]
        what = next((name for name in called if not name.endswith("__")), called[0] if called else None)
    return _with_line(task, what or _name(awaited))


def _with_line(task: asyncio.Task[Any], what: str) -> str:
    """``what``, and the line of the user's code, if any, in which ``task`` stands."""
    own = next((frame for frame in reversed(_frames(task)) if not _is_library(frame)), None)
    return f"{what}, in {own.f_code.co_qualname} ({own.f_code.co_filename}:{own.f_lineno})" if own else what


def _name(awaited: Any) -> str:
    if isinstance(awaited, asyncio.Task):
        return awaited.get_name()
    gathered = getattr(awaited, "_children", None)
    return f"all of {', '.join(map(_name, gathered))}" if gathered else "a future of its own"


def _frames(task: asyncio.Task[Any]) -> list[types.FrameType]:
    """Where a task stands, from its coroutine in to what that awaits; ``Task.get_stack`` has the first alone."""
    frames = []
    coroutine: Any = task.get_coro()
    while (frame := getattr(coroutine, "cr_frame", None)) is not None:
        frames.append(frame)
        coroutine = coroutine.cr_await
    return frames


def _is_library(frame: types.FrameType) -> bool:
    return str(frame.f_globals.get("__name__")).partition(".")[0] in ("asyncdist", "asyncio", "contextlib")
