"""Warns of ranks that have been waiting for a long time, and describes the waits of tasks for reports."""

from __future__ import annotations

import asyncio
import logging
import math
import types
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Final
from weakref import WeakKeyDictionary

from asyncdist import validation
from asyncdist.errors import StallError
from asyncdist.runtime.world import World

logger = logging.getLogger("asyncdist.runtime.stall_warnings")

#: asyncio coroutines that end automatically, after a time or when a thread ends. Their futures look like futures that
#: another rank or the user completes.
_TIMED: Final = frozenset({asyncio.sleep.__code__, asyncio.to_thread.__code__})
_LIBRARIES: Final = frozenset({"asyncdist", "asyncio", "contextlib"})
#: asyncio coroutines that wait for several tasks, with the name of the call in the user's code.
_JOINS: Final = {asyncio.TaskGroup.__aexit__.__code__: "asyncio.TaskGroup", asyncio.wait.__code__: "asyncio.wait"}
#: Maximum number of tasks, and maximum depth of nested waits, in the description of a wait for several tasks.
_PART_COUNT_MAX: Final = 4
_PART_DEPTH_MAX: Final = 3
#: For a ``main`` driven by blocking code: maps its task to a function that returns the innermost frame of that code.
frame_of_caller: Final[WeakKeyDictionary[asyncio.Task[Any], Callable[[], types.FrameType | None]]] = WeakKeyDictionary()


@dataclass(frozen=True, slots=True)
class WatchdogOptions:
    """Seconds after which long waits are reported, or infinity for never. Most are options of :func:`asyncdist.run`.

    Attributes:
        collectives_alone: Whether ``stall_s`` applies only to collectives. A ``main`` that waits for messages may be a
            server.
        job_stall_s: Seconds without a step or message on any rank after which the waits of all ranks are printed.
    """

    watchdog_s: float = math.inf
    stall_s: float = math.inf
    stall_aborts: bool = False
    collectives_alone: bool = False
    job_stall_s: float = math.inf

    def __post_init__(self) -> None:
        validation.seconds("watchdog_s", self.watchdog_s, finite=False)
        validation.seconds("stall_s", self.stall_s, finite=False)
        validation.seconds("stall_s", self.job_stall_s, finite=False)


ENDLESS: Final = WatchdogOptions()


class EndWatch:
    """Warns once if ``main`` has returned, but spawned tasks that only wait prevent the rank from ending.

    The warning is logged when every task has been in the same wait for ``period_s`` seconds.
    """

    def __init__(self, world: World, period_s: float) -> None:
        self._world = world
        self._period_s = period_s
        self._seen: dict[asyncio.Task[Any], Any] = {}
        self._timer: asyncio.TimerHandle | None = None

    def begin(self) -> None:
        """Start watching after ``main`` has returned."""
        self._seen = {task: waiter_of(task) for task in self._world.spawned_tasks()}
        if self._seen and self._period_s < math.inf:
            self._timer = asyncio.get_running_loop().call_later(self._period_s, self._check)

    def end(self) -> None:
        """Stop watching after the tasks have ended, or before they are cancelled."""
        if self._timer is not None:
            self._timer.cancel()

    def _check(self) -> None:
        world = self._world
        world.services.engine.poll()
        tasks = world.spawned_tasks()
        if world.is_computing or not all(self._is_waiting(task) for task in tasks):
            self.begin()
            return
        waits = "; ".join(f"{task.get_name()}: {describe_task_wait(task, world)}" for task in tasks)
        logger.warning(
            "main of rank %d has returned, but the tasks that it spawned keep the rank from ending; they have waited "
            "for %g s: %s. If nothing ends them, leave their loops, cancel them, or close the channels that they read",
            world.rank,
            self._period_s,
            waits,
        )

    def _is_waiting(self, task: asyncio.Task[Any]) -> bool:
        waiter = waiter_of(task)
        return waiter is not None and not waiter.done() and self._seen.get(task) is waiter


class StallWatch:
    """Warns once per wait if ``main`` has been waiting for a long time.

    The watch covers waits for other ranks and for the user's own futures, events and queues. ``main`` may wait
    directly, in ``asyncio.gather``, ``asyncio.wait`` or ``asyncio.TaskGroup``, or through a task. Waits that end
    automatically, such as sleeps and waits with a timeout (``timeout_s``, ``asyncio.wait_for``), are not reported.
    ``asyncio.timeout`` is not recognized, because nothing in the task refers to it.

    Args:
        end: Function called with a StallError if ``main`` is waiting only for other ranks. Otherwise, or if ``end`` is
            None, a warning is logged.
    """

    def __init__(
        self,
        world: World,
        main: asyncio.Task[Any] | None,
        options: WatchdogOptions,
        end: Callable[[StallError], None] | None = None,
    ) -> None:
        self._world = world
        self._main = main
        self._options = options
        self._end = end
        self.is_reported_by_others: Callable[[], bool] = lambda: False
        self._seen: list[Any] = []
        self._reported: list[Any] = []
        self._timer: asyncio.TimerHandle | None = None

    def begin(self) -> None:
        """Schedule the next check of ``main``'s wait."""
        if self._main is not None and self._options.stall_s < math.inf:
            try:
                self._seen = self._awaited(self._main)
            except Exception:  # Later waits must be checked anyway.
                self._seen = []
                logger.warning("the wait of rank %d cannot be examined", self._world.rank, exc_info=True)
            self._timer = asyncio.get_running_loop().call_later(self._options.stall_s, self._check)

    def end(self) -> None:
        """Stop watching after ``main`` has returned, or before it is cancelled."""
        if self._timer is not None:
            self._timer.cancel()

    def _awaited(self, main: asyncio.Task[Any]) -> list[Any]:
        """Return the futures that ``main`` is waiting for, or an empty list if its wait must not be reported."""
        engine = self._world.services.engine
        if self._options.collectives_alone and waiter_of(main) not in engine.collective_waits:
            return []
        awaited = futures_awaited(main, self._world) or []
        return [] if any(map(engine.has_deadline, awaited)) else awaited

    def _check(self) -> None:
        before = self._seen
        self._world.services.engine.poll()
        self.begin()
        awaited = self._seen
        if awaited and awaited == before and awaited != self._reported and not any(future.done() for future in awaited):
            self._reported = awaited
            self._report(awaited)

    def _report(self, awaited: Sequence[Any]) -> None:
        assert self._main is not None, "there is no main to watch"
        known = [self._world.services.engine.awaited(future) for future in awaited]
        where = _describe_part(self._main, self._world)
        text = f"has waited for {self._options.stall_s:g} s: {where}"
        if self._end is None or None in known:
            if not self.is_reported_by_others():
                logger.warning("main of rank %d %s", self._world.rank, text)
        else:
            self._end(StallError(f"main {text}", rank=self._world.rank))


def describe_wait(main: asyncio.Task[Any] | None, world: World) -> str | None:
    """Describe the wait of ``main`` or, after it has returned, of its spawned tasks.

    Return None if ``main`` is ready to run.
    """
    if main is None or main is asyncio.current_task():
        return None
    if any(not is_library(frame) for frame in frames_of(main)):
        return None if waiter_of(main) is None else _describe_part(main, world)
    tasks = world.spawned_tasks()
    if not tasks:
        return "the other ranks, since its main has returned"
    return ", and ".join(f"{task.get_name()}: {describe_task_wait(task, world)}" for task in tasks)


def futures_awaited(waiter: Any, world: World) -> list[Any] | None:
    """Return the futures that ``waiter`` depends on, or None if ``waiter`` may complete automatically."""
    found: list[Any] = []
    seen, unvisited = {waiter}, [waiter]
    while unvisited:
        parts = _dependencies(part := unvisited.pop(), world)
        if parts is None:
            return None
        if not parts:
            found.append(part)
        for each in parts:
            if each not in seen:
                seen.add(each)
                unvisited.append(each)
    return sorted(found, key=id)


def _dependencies(waiter: Any, world: World) -> list[Any] | None:
    """Return the unfinished futures and tasks that ``waiter`` depends on directly.

    The list is empty if other code or another rank completes ``waiter``. Return None if ``waiter`` may complete
    automatically.
    """
    if world.is_computed(waiter):
        return None
    engine = world.services.engine
    if engine.awaited(waiter) is not None:
        return []
    # Only futures of asyncio.gather have this attribute.
    parts: Iterable[Any] | None = getattr(waiter, "_children", None)
    if isinstance(waiter, asyncio.Task):
        parts = _parts_of(waiter)
        if parts is None:
            return None
    elif (settler := engine.settler(waiter)) is not None:
        parts = [settler]
    elif parts is None:
        return []
    return [part for part in parts if part is not None and not part.done()] or None


def dependents_of_parts(tasks: Iterable[Any], world: World) -> dict[Any, list[Any]]:
    """Return all direct and indirect dependencies of ``tasks``, each with the futures and tasks that await it."""
    dependents: dict[Any, list[Any]] = {}
    unvisited = list(tasks)
    while unvisited:
        part = unvisited.pop()
        for each in _dependencies(part, world) or ():
            if each not in dependents:
                dependents[each] = []
                unvisited.append(each)
            dependents[each].append(part)
    return dependents


def _waits_for_ranks(task: Any, world: World) -> set[Any]:
    """Return the direct and indirect dependencies of ``task`` (futures and tasks) that are waiting for other ranks.

    Each of them is visited once, because thousands of collectives may each depend on the previous one.
    """
    engine = world.services.engine
    dependents = dependents_of_parts([task], world)
    reached = [part for part in (task, *dependents) if engine.awaited(part) is not None]
    found = set(reached)
    while reached:
        for each in dependents.get(reached.pop(), ()):
            if each not in found:
                found.add(each)
                reached.append(each)
    return found


def _parts_of(task: asyncio.Task[Any]) -> Iterable[Any] | None:
    """Return the futures and tasks that a task awaits, or None if the wait ends automatically, like a sleep."""
    # The variables of other frames are not read, because Python would keep the read values alive in the frame.
    frames = {frame.f_code: frame for frame in frames_of(task)}
    if not _TIMED.isdisjoint(frames):
        return None
    if of_group := frames.get(asyncio.TaskGroup.__aexit__.__code__):
        tasks: Iterable[Any] = of_group.f_locals["self"]._tasks
        return tasks
    for waits in (asyncio.wait_for, asyncio.wait):
        if (of_call := frames.get(waits.__code__)) and of_call.f_locals["timeout"] is not None:
            return None
    if of_wait := frames.get(asyncio.wait.__code__):
        return list(of_wait.f_locals["fs"])
    return [waiter_of(task)]


def waiter_of(task: asyncio.Task[Any]) -> Any:
    """Return the future that ``task`` is waiting for, or None if the task is ready to run."""
    return getattr(task, "_fut_waiter", None)


def describe_task_wait(task: asyncio.Task[Any], world: World | None) -> str:
    """Describe the wait of a task, and name the line of the user's code, if any."""
    what, frame = wait_of(task, world)
    return f"{what}, in {line_of(frame)}" if frame is not None else what


def wait_of(task: asyncio.Task[Any], world: World | None) -> tuple[str, types.FrameType | None]:
    """Describe the wait of a task, and return the frame of the user's code, if any."""
    frames = frames_of(task)
    if not frames or frames[0].f_lasti < 0:
        return "has not begun", None
    position = next((i for i in reversed(range(len(frames))) if not is_library(frames[i])), None)
    awaited, settler, what = waiter_of(task), None, None
    if world is not None:
        engine = world.services.engine
        settler = engine.settler(awaited)
        # For a collective, the name of the user's call is more useful than the awaited message.
        if settler is not None and (position is None or awaited not in engine.collective_waits):
            awaited = waiter_of(settler)
        known = engine.awaited(awaited)
        what = None if known is None else str(known)
    if position is None:
        return what or (frames[-1].f_code.co_qualname if settler is None else settler.get_name()), None
    if what is None:
        inner = frames[position + 1 :]
        called = [frame.f_code.co_qualname for frame in inner if not _awaits_for_blocking_code(frame)]
        public = (name for name in called if not name.rpartition(".")[2].startswith("_"))
        what = next(public, called[0] if called else "a blocking call" if inner else None)
    return what or (_name(awaited) if settler is None else settler.get_name()), frames[position]


def wait_with_parts(
    task: asyncio.Task[Any], world: World, depth: int = _PART_DEPTH_MAX, for_ranks: Collection[Any] | None = None
) -> tuple[str, types.FrameType | None]:
    """Describe what a task is waiting for, and return the innermost frame of the user's code in it, or None.

    If the task is waiting for other tasks, as in ``asyncio.gather``, describe the waits of those tasks. ``for_ranks``
    contains the tasks that are waiting for other ranks, or is None if it is not computed yet.
    """
    what, frame = wait_of(task, world)
    joined = _joined(task, world) if depth and frame is not None else None
    if joined is None:
        return what, frame
    for_ranks = _waits_for_ranks(task, world) if for_ranks is None else for_ranks
    return _describe_parts(*joined, world, depth, for_ranks), frame


def _joined(task: asyncio.Task[Any], world: World) -> tuple[str, Iterable[Any]] | None:
    """Return the name of a wait for other tasks, and these tasks, or None if ``task`` is not waiting for tasks."""
    frames, waiter = frames_of(task), waiter_of(task)
    position = next(i for i in reversed(range(len(frames))) if not is_library(frames[i]))
    called = frames[position + 1 :]
    if called:
        join = _JOINS.get(called[0].f_code)
        parts = _parts_of(task) if join is not None else None
        return None if join is None or parts is None else (join, parts)
    if isinstance(waiter, asyncio.Task):
        return waiter.get_name(), [waiter]
    gathered: Iterable[Any] | None = getattr(waiter, "_children", None)
    is_librarys = world.services.engine.settler(waiter) is not None
    return None if gathered is None or is_librarys else ("asyncio.gather", gathered)


def _describe_parts(join: str, parts: Iterable[Any], world: World, depth: int, for_ranks: Collection[Any]) -> str:
    """Describe the waits of the awaited tasks. Waits for other ranks are first, and equal waits are combined."""
    counts: dict[tuple[bool, str], int] = {}
    for part in parts:
        if part is not None and not part.done():
            key = part not in for_ranks, _describe_part(part, world, depth - 1, for_ranks)
            counts[key] = counts.get(key, 0) + 1
    texts = [f"{text} ({counts[key]} tasks)" if counts[key] > 1 else text for key in sorted(counts) for text in key[1:]]
    more = [f"and {len(texts) - _PART_COUNT_MAX} more"] if len(texts) > _PART_COUNT_MAX else []
    return f"{join} [{'; '.join([*texts[:_PART_COUNT_MAX], *more])}]" if texts else join


def _describe_part(
    part: Any, world: World, depth: int = _PART_DEPTH_MAX, for_ranks: Collection[Any] | None = None
) -> str:
    if not isinstance(part, asyncio.Task):
        return str(world.services.engine.awaited(part) or _name(part))
    is_waiting = waiter_of(part) is not None
    what, frame = wait_with_parts(part, world, depth, for_ranks) if is_waiting else ("about to run", None)
    return f"{what}, in {line_of(frame)}" if frame is not None else what


def line_of(frame: types.FrameType) -> str:
    """Return the function, file and line of a frame, such as ``"main (train.py:12)"``."""
    return f"{frame.f_code.co_qualname} ({frame.f_code.co_filename}:{frame.f_lineno})"


def _name(awaited: Any) -> str:
    if isinstance(awaited, asyncio.Task):
        return awaited.get_name()
    gathered = getattr(awaited, "_children", None)
    return "a future of its own that it awaits" if gathered else "a future of its own"


def frames_of(task: asyncio.Task[Any]) -> list[types.FrameType]:
    """Return a task's frames, outermost first. If blocking code drives the task, the first frame is that code's."""
    of_caller = frame_of_caller.get(task)
    frame = None if of_caller is None else of_caller()
    while frame is not None and is_library(frame):
        frame = frame.f_back
    frames = [] if frame is None else [frame]
    coroutine: Any = task.get_coro()
    while (frame := getattr(coroutine, "cr_frame", None)) is not None:
        frames.append(frame)
        coroutine = coroutine.cr_await
    return frames


def _awaits_for_blocking_code(frame: types.FrameType) -> bool:
    """Return whether a frame belongs to :mod:`asyncdist.blocking`, whose function names do not describe waits."""
    return str(frame.f_globals.get("__name__")).startswith("asyncdist.blocking.")


def is_library(frame: types.FrameType) -> bool:
    """Return whether a frame belongs to asyncdist, its protocols or asyncio."""
    return str(frame.f_globals.get("__name__")).partition(".")[0] in _LIBRARIES
