"""Who waits for what, in words: for a simulation in which nothing is left to happen, and for a rank that cannot end."""

from __future__ import annotations

import asyncio
import logging
import math
import types
from typing import Any

from asyncdist.world import World

logger = logging.getLogger("asyncdist.waits")


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


def _waiter(task: asyncio.Task[Any]) -> Any:
    """The future that ``task`` waits for; None while it is ready to run."""
    return getattr(task, "_fut_waiter", None)


def what_awaits(task: asyncio.Task[Any], world: World | None) -> str:
    """In words what a task waits for, and the line of the user's code, if any, where it does."""
    frames = _frames(task)
    if not frames or frames[0].f_lasti < 0:
        return "has not begun"
    position = next((i for i in reversed(range(len(frames))) if not _is_library(frames[i])), None)
    awaited = _waiter(task)
    what = world.engine.awaited(awaited) if world is not None and awaited is not None else None
    if position is None:
        return what or frames[-1].f_code.co_qualname
    own = frames[position]
    if what is None:
        called = [frame.f_code.co_qualname for frame in frames[position + 1 :]]
        what = next((name for name in called if not name.endswith("__")), called[0] if called else None)
    return f"{what or _name(awaited)}, in {own.f_code.co_qualname} ({own.f_code.co_filename}:{own.f_lineno})"


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
