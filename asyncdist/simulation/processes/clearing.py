"""Cleans up the unfinished tasks of killed ranks by running their ``finally`` blocks as far as possible."""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import logging
from collections.abc import Sequence
from typing import Final

from asyncdist.recording.writer import RecordOptions, file_name, remove_earlier
from asyncdist.runtime.stall_warnings import describe_task_wait, waiter_of
from asyncdist.runtime.world import World
from asyncdist.simulation.processes.event_loop import RankLoop
from asyncdist.simulation.scheduler import Scheduler
from asyncdist.waits import WaitId, WaitKind

#: Maximum number of events during the clean-up. Tasks that are still unfinished are then dropped.
_EVENT_COUNT: Final = 100_000
_CANCEL_COUNT: Final = 10


def cancel_tasks_quietly(loops: Sequence[RankLoop], scheduler: Scheduler) -> None:
    """Cancel all tasks of these event loops without logging."""
    left = [(loop, task) for loop in loops for task in loop.unfinished_tasks()]
    scheduler.stopped = False
    logging_was = logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    try:
        for loop, _ in left:
            loop.revive()
        end = scheduler.event_count + _EVENT_COUNT
        waiting = [task for _, task in left]

        def is_enough() -> bool:
            while waiting and waiting[-1].done():
                waiting.pop()
            return not waiting or scheduler.event_count >= end

        # A finally block may await something that never completes, and is then cancelled again.
        for _ in range(_CANCEL_COUNT):
            for task in waiting:
                task.cancel()
            with contextlib.suppress(Exception):
                scheduler.run(after_event=is_enough)
            if is_enough():
                break
    finally:
        logging.disable(logging_was)
        for loop in loops:
            loop.die()
        for task in [task for _, task in left] + [task for loop in loops for task in loop.unfinished_tasks()]:
            task._log_destroy_pending = False  # type: ignore[attr-defined]
            work = task.get_coro()
            if inspect.iscoroutine(work) and inspect.getcoroutinestate(work) == inspect.CORO_CREATED:
                work.close()  # the coroutine was created during cancellation and never started


def forget_earlier(world: World, options: RecordOptions | None) -> None:
    """Remove the recording of an earlier simulation with the same seed, except the new file of ``world``."""
    if options is not None:
        job = world.services.job
        remove_earlier(options.folder, job, file_name(job, world.rank, world.incarnation))


def end_recording(world: World | None, main: asyncio.Task[None] | None = None) -> None:
    """End the recording of a rank, so that the clean-up of its tasks is not recorded.

    If the rank's main task ``main`` is given, also record what it is waiting for.
    """
    if world is None or world.services.end_recording is None:
        return
    what, seconds, task = None, None, main
    if main is not None:
        what, engine = WaitId(WaitKind.STOPPED_MAIN, name=describe_task_wait(main, world)), world.services.engine
        while task is not None and seconds is None:
            waiter = waiter_of(task)
            seconds, task = engine.awaited_s(waiter), engine.settler(waiter)
    world.services.end_recording(what, seconds or 0.0)
