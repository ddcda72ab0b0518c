"""Collects a rank's current waits, policies, channels and events for a report, without changing anything."""

from __future__ import annotations

import asyncio
import os
import sys
import sysconfig
import threading
import time
import types
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Final

from asyncdist.messaging.services import Services
from asyncdist.runtime.stall_warnings import (
    dependents_of_parts,
    frames_of,
    futures_awaited,
    is_library,
    line_of,
    wait_with_parts,
    waiter_of,
)
from asyncdist.runtime.world import World
from asyncdist.story.event_texts import describe_events
from asyncdist.story.facts import ChannelState, Collective, MainState, PolicyState, RankStory, Wait

#: Maximum number of event kinds in a report. Steps and roles are not counted, because the policy's line shows them.
EVENT_COUNT_MAX: Final = 3
#: Maximum number of tasks in a report, and of ranks listed for one wait.
TASK_COUNT_MAX: Final = 20
PEER_COUNT_MAX: Final = 1024
#: Folders of the interpreter and its libraries, which do not contain user code.
_LIBRARIES: Final = tuple(
    os.path.join(sysconfig.get_path(name), "") for name in ("stdlib", "platstdlib", "purelib", "platlib")
)
#: CPU usage, as a fraction of a core, from which a rank's thread counts as computing.
_BUSY_SHARE: Final = 0.1
#: Minimum seconds over which the CPU usage is measured.
_SHARE_PERIOD_S: Final = 0.2
#: Maximum number of reminders whose sends are outstanding. A rank rarely has more than a few open collective starts.
_REMINDERS_UNDER_WAY_MAX: Final = 32


class Activity:
    """Records when a rank last made progress (a step, a message or a part of a stream), and when other ranks last sent.

    A waiting collective start sends a reminder every second. Reminders are not progress, because the start may hang.
    The object must be created in the rank's own thread.

    Attributes:
        progressed_at: Time of the rank's last observed progress, in seconds on :func:`time.monotonic`'s clock.
    """

    def __init__(self, world: World) -> None:
        self._world = world
        self._counts: tuple[int, ...] = ()
        self._message_count = 0
        self._request_count = 0
        self._reminded_count = 0
        self._reminders_under_way = 0
        self._sequences: Counter[int] = Counter()
        self._first_departure_at: dict[int, float] = {}
        self.progressed_at = time.monotonic()
        self._lock = threading.Lock()
        has_clocks = hasattr(time, "pthread_getcpuclockid")
        self._clock = time.pthread_getcpuclockid(threading.get_ident()) if has_clocks else None
        self._sampled_cpu_s = self._cpu_s()
        self._sampled_at = self.progressed_at
        self._share = 0.0

    def sample(self) -> None:
        """Compare this rank's counters with the last sample, and record whether the rank has made progress."""
        if not self._lock.acquire(blocking=False):  # A signal handler has called this method during a sample.
            return
        try:
            self._sample(time.monotonic())
        except RuntimeError:  # A dictionary changed while it was read, so the rank is making progress.
            self.progressed_at = time.monotonic()
        finally:
            self._lock.release()

    def _sample(self, now: float) -> None:
        services = self._world.services
        steps = sum(probe().step for probe in tuple(services.progress_probes))
        streams = services.slots.sent_nbytes + services.slots.received_nbytes
        statistics = services.engine.statistics()
        message_count = statistics.completion_count - statistics.request_count
        counts = (message_count - self._world.agreements.rivals.received_count, steps, streams)
        has_moved = self._has_requested(statistics.request_count) or counts != self._counts
        self._counts = counts
        if has_moved:
            self.progressed_at = now
        if has_moved or message_count != self._message_count:
            self._message_count = message_count
            sequences = services.last_sequences()
            for rank, number in sequences.items():
                if number != self._sequences.get(rank):
                    self._first_departure_at[rank] = now
            self._sequences = sequences
        if now - self._sampled_at >= _SHARE_PERIOD_S:
            cpu_s = self._cpu_s()
            self._share = (cpu_s - self._sampled_cpu_s) / (now - self._sampled_at)
            self._sampled_cpu_s, self._sampled_at = cpu_s, now

    def _has_requested(self, request_count: int) -> bool:
        sent = self._world.agreements.rivals.sent_count
        new, self._request_count = request_count - self._request_count, request_count
        possible = self._reminders_under_way + sent - self._reminded_count
        self._reminded_count = sent
        self._reminders_under_way = min(max(possible - new, 0), _REMINDERS_UNDER_WAY_MAX)
        return new > possible

    def _cpu_s(self) -> float:
        return 0.0 if self._clock is None else time.clock_gettime(self._clock)

    def computes(self) -> bool:
        """Return whether the rank's thread has recently used the CPU."""
        return self._share >= _BUSY_SHARE

    def still_s(self) -> float:
        """Return how many seconds ago this rank last made progress, as observed by :meth:`sample`."""
        return time.monotonic() - self.progressed_at

    def message_ages_s(self) -> dict[int, float]:
        """Return how many seconds ago the last known message from each rank arrived."""
        now = time.monotonic()
        return {rank: round(now - at, 1) for rank, at in sorted(self._first_departure_at.items())}


def collect(
    world: World, main: asyncio.Task[Any], activity: Activity, frame: types.FrameType | None = None
) -> RankStory:
    """Return a report of a rank's waits, policies, channels and events.

    If the rank's loop is blocked, ``frame`` is the current frame of the rank's thread, otherwise None.
    """
    services = world.services
    vacant = services.lost_ranks() & services.engine.transport.vacant_ranks()
    events = [each for each in services.events.latest() if each.kind != "lost" or each.get("rank") not in vacant]
    state, line, inner_line = _state(main, activity, frame)
    has_main = state in ("awaits", "returned")
    listed = [task for task in world.spawned_tasks()[:TASK_COUNT_MAX] if task is not main and waiter_of(task)]
    return RankStory(
        rank=world.rank,
        size=world.size,
        pid=os.getpid(),
        hostname=world.hostname,
        job=services.job,
        program=sys.argv[0] if sys.argv else "",
        state=state,
        line=line,
        inner_line=inner_line,
        still_s=activity.still_s(),
        waits=(
            *((_wait("main", main, world),) if has_main else ()),
            *(_wait(task.get_name(), task, world) for task in listed),
        ),
        policies=tuple(_policies(services)),
        started=dict(world.peers.attendance.started()),
        channels=tuple(_channels(services)),
        unread=tuple(services.early_frames()),
        heard=activity.message_ages_s(),
        lost=tuple(sorted(services.lost_ranks() - vacant)),
        vacant=tuple(sorted(vacant)),
        left=tuple(sorted(services.left)),
        events=describe_events(events, services.events.now(), EVENT_COUNT_MAX),
        has_further_tasks=has_main and _has_further_tasks(world, [main, *listed]),
    )


def _state(main: asyncio.Task[Any], activity: Activity, frame: types.FrameType | None) -> tuple[MainState, str, str]:
    """Return the state of ``main``, its current line of user code, and its innermost line if that is different."""
    if frame is None:
        has_returned = all(is_library(each) for each in frames_of(main))
        return "returned" if has_returned else "awaits", "", ""
    while is_library(frame) and frame.f_back is not None and "/asyncdist/runtime/story/" in frame.f_code.co_filename:
        frame = frame.f_back  # Skip the frames of the signal handler.
    users = next((each for each in _outwards(frame) if _is_users(each)), frame)
    inner_line = "" if users is frame else line_of(frame)
    return "computes" if activity.computes() else "blocks", line_of(users), inner_line


def _outwards(frame: types.FrameType | None) -> Iterator[types.FrameType]:
    while frame is not None:
        yield frame
        frame = frame.f_back


def _is_users(frame: types.FrameType) -> bool:
    path = frame.f_code.co_filename
    return not is_library(frame) and not path.startswith((*_LIBRARIES, "<frozen"))


# -- waits ------------------------------------------------------------------------------------------------------------


def seconds_waited(main: asyncio.Task[Any], world: World) -> float:
    """Return the seconds that ``main`` has been waiting for other ranks, or 0 if it is not waiting for them."""
    ages = map(world.services.engine.awaited_s, futures_awaited(main, world) or ())
    return max((age for age in ages if age is not None), default=0.0)


def _has_further_tasks(world: World, listed: Sequence[asyncio.Task[Any]]) -> bool:
    """Return whether any spawned task or task with user code is neither in ``listed`` nor awaited by a task in it."""
    tasks = asyncio.all_tasks(world.services.engine.loop)
    # Mains of other ranks that share the loop, with the tasks that they await, cannot help this rank either.
    mains = [task for task in tasks if any(frame.f_code.co_name == "host_rank" for frame in frames_of(task)[:1])]
    known = {*listed, *mains}
    known.update(dependents_of_parts(known, world))
    further = tasks - known
    return not further.isdisjoint(world.spawned_tasks()) or any(
        not all(map(is_library, frames_of(task))) for task in further
    )


def _wait(who: str, task: asyncio.Task[Any], world: World) -> Wait:
    engine = world.services.engine
    what, frame = wait_with_parts(task, world)
    futures = futures_awaited(task, world)
    if futures is None:
        does = str(what) if waiter_of(task) is not None else ""
        if (thread_line := _line_of_thread(task, world)) is not None:
            does = f"{does}, whose thread is in {thread_line}"
        return Wait(who, does, line_of(frame) if frame else "", ends_by_itself=True)
    known = [(engine.awaited(future), engine.awaited_s(future)) for future in futures]
    ages = [age for _, age in known if age is not None]
    peers: dict[int, None] = {}
    for future in futures:
        peers.update(dict.fromkeys(_first(engine.awaited_peers(future))))
    tags = [awaited.tag for awaited, _ in known if awaited is not None and awaited.tag is not None]
    collective = _collective(task, world)
    return Wait(
        who,
        str(what),
        line_of(frame) if frame else "",
        max(ages, default=None),
        tuple(sorted(peers)),
        tags[0] if tags else None,
        ends_by_itself=False,
        collective=collective,
        has_deadline=any(map(engine.has_deadline, futures)),
    )


def _line_of_thread(task: asyncio.Task[Any], world: World) -> str | None:
    frame = world.frame_of(waiter_of(task))
    users = next((each for each in _outwards(frame) if _is_users(each)), None)
    return None if users is None else line_of(users)


def _first(ranks: Iterable[int]) -> list[int]:
    return [rank for rank, _ in zip(ranks, range(PEER_COUNT_MAX), strict=False)]


def _collective(task: asyncio.Task[Any], world: World) -> Collective | None:
    """Return the oldest unfinished collective if the task is waiting in a collective, or None."""
    engine = world.services.engine
    if not any(future in engine.collective_waits for future in _waiters(task, engine)):
        return None
    for group, number in world.peers.attendance.under_way():
        return Collective(group.tag, number, tuple(group.ranks[:PEER_COUNT_MAX]))
    return None


def _waiters(task: asyncio.Task[Any], engine: Any) -> Iterator[Any]:
    """Yield the future that a task is waiting for, then the future that this future depends on, and so on."""
    seen: set[int] = set()
    waiter = waiter_of(task)
    while waiter is not None and id(waiter) not in seen:
        seen.add(id(waiter))
        yield waiter
        next_task = waiter if isinstance(waiter, asyncio.Task) else engine.settler(waiter)
        waiter = None if next_task is None else waiter_of(next_task)


# -- the rest ----------------------------------------------------------------------------------------------------------


def _policies(services: Services) -> Iterator[PolicyState]:
    for probe in tuple(services.progress_probes):
        probed = probe()
        yield PolicyState(probed.policy, probed.step, probed.metric, probed.round, probed.role, probed.coordinator)


def _channels(services: Services) -> Iterator[ChannelState]:
    for tag, channel in services.users_channels():
        counts = channel.statistics()
        yield ChannelState(
            channel.name, tag, counts.sent_count, counts.received_count, channel.unread_count, channel.inbox.is_full
        )
