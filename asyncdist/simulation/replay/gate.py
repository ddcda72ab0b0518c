"""Shows one rank of a simulation what that rank of a recorded run saw, in the same order."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import sys
from collections import Counter, deque
from collections.abc import Callable, Coroutine, Iterator
from dataclasses import dataclass
from typing import Any

from asyncdist.errors import AsyncdistError, RankLostError
from asyncdist.messaging.engine import Engine, yield_to_loop
from asyncdist.messaging.polling import resolve_waiter
from asyncdist.recording.events import KINDS, Event, Field
from asyncdist.runtime.world import World
from asyncdist.simulation.processes.event_loop import RankLoop
from asyncdist.simulation.replay.log import DECISIONS, Fired, Key, Lost, Passed, RankLog, SafePoint, Sight, Taken
from asyncdist.simulation.replay.mailbox import Mailbox
from asyncdist.simulation.replay.timers import Timers
from asyncdist.simulation.scheduler import Handle
from asyncdist.transports.base import ANY_SOURCE

#: Virtual seconds between two looks for what a rank may see next. Whatever others do for it takes no time at all.
_PAUSE_S = 1e-5
#: Virtual seconds after which messages that were taken up one right after the other are shown one by one.
_PATIENCE_S = 1.0
#: Virtual seconds for which a rank whose main has ended waits for what it saw next, and then holds nothing back.
_END_PATIENCE_S = 30.0
#: Virtual seconds for which a safe point waits for what came to it without this rank's help: others may wait meanwhile.
_POINT_PATIENCE_S = 1000.0
#: So often.
_TRY_COUNT = 30


class DivergenceError(AsyncdistError):
    """A replay does something else than the recorded run: the text names rank and event."""


@dataclass(slots=True, eq=False)
class _Deadline:
    """Belongs to a task that waits for something up to a time.

    Attributes:
        what: what it waits for, in words.
        on_passed: wakes it.
        has_passed: whether that time has come.
    """

    what: str
    on_passed: Callable[[], object]
    has_passed: bool = False


class Gate:
    """Holds back what comes to a rank until its recorded turn has come.

    Args:
        rank: the rank.
        log: what it saw.
        mailbox: where its messages wait.
        loop: runs it.
        found: differences are added to it.
        may_stop: whether the record of some rank ends before its main.

    Attributes:
        iteration: the last one in which a policy's step ended; -1 before the first.
        has_stopped: whether the rank has come to the end of its record, or to that of its main.
    """

    def __init__(
        self,
        rank: int,
        log: RankLog,
        mailbox: Mailbox,
        loop: RankLoop,
        found: list[DivergenceError],
        *,
        may_stop: bool,
    ) -> None:
        self.rank = rank
        self.log = log
        self.iteration = -1
        self.has_stopped = False
        self._found = found
        self._may_stop = may_stop
        self._mailbox = mailbox
        self._loop = loop
        self._early = Counter(log.early)
        self._permitted: deque[Key] = deque()
        self._deadlines: list[_Deadline] = []
        self._timers = Timers(loop)
        self._point: SafePoint | None = None
        self._has_ended = False
        self._timer: Handle | None = None
        self._look_at_s = 0.0
        self._patient_until = 0.0
        self._yielding = 0  # the turn, while tasks run in it
        self._time = 0.0
        self._seen_count = 0
        self._engine: Engine | None = None
        self._world: World
        self._until: Callable[..., Coroutine[Any, Any, bool]]
        mailbox.ring = self._on_arrival

    def install(self, world: World) -> None:
        """Take the place of what decides when the rank sees something."""
        services, engine = world.services, world.services.engine
        self._world, self._engine, self._until = world, engine, engine.until
        engine.clock = services.time = world.time = self.read_clock
        services.events.sink = self._on_event
        engine.on_woken = self._on_woken
        replaced: Any = engine
        replaced.until, replaced.park_until = self._wait_until, self._park_until
        replaced.call_later = self._timers.call_later
        of_world: Any = world
        of_world.progress = of_world.safe_point = self._progress
        self._look_soon()

    @property
    def is_done(self) -> bool:
        """Whether all that was recorded has happened once more."""
        return not self.log.entries and self._point is None

    # -- messages ---------------------------------------------------------------------------------------------------

    def next_key(self, source: int, tag: int) -> Key | None:
        """Return the source and tag of the message that a receive may take now; None for none."""
        first = self._mailbox.first(source, tag)
        if first is None or tag not in self.log.tags or (self.is_done and self.log.is_over):
            return first
        permitted = next((key for key in self._permitted if key[1] == tag and source in (ANY_SOURCE, key[0])), None)
        if permitted is not None:
            return permitted if self._mailbox.count(permitted) else None
        early = (
            key for key, count in self._early.items() if count and key[1] == tag and source in (ANY_SOURCE, key[0])
        )
        return next((key for key in early if self._mailbox.count(key)), None)

    def take(self, key: Key) -> bytes:
        """Take a message out."""
        if key in self._permitted:
            self._permitted.remove(key)
        elif self._early[key]:
            self._early[key] -= 1
        if not self._permitted:
            self._look_soon()
        return self._mailbox.pop(key)

    def _on_arrival(self, tag: int) -> None:
        self._look_soon()
        # A tag without recorded messages is one on which the run used no messages, but collectives of MPI: none waits.
        if self._engine is None or self.is_done or tag not in self.log.tags:
            self._ring()

    def _ring(self) -> None:
        if self._doorbell is not None:
            self._doorbell()

    _doorbell: Callable[[], None] | None = None

    def set_doorbell(self, ring: Callable[[], None]) -> None:
        """Have ``ring`` called when there is something to see."""
        self._doorbell = ring

    # -- what may be seen -------------------------------------------------------------------------------------------

    def _is_possible(self, sights: list[Sight]) -> bool:
        """Whether all of these can be seen now."""
        needed: Counter[Key] = Counter(self._permitted)
        for sight in sights:
            if isinstance(sight, Taken):
                needed.update(sight.keys)
            elif not self._is_waited_for(sight):
                return False
        return all(self._mailbox.count(key) >= count for key, count in needed.items() if key[0] != self.rank)

    def _is_waited_for(self, sight: Sight) -> bool:
        """Whether there is a task, or a timer, for which a time can be over."""
        match sight:
            case Passed():
                return self._deadline(sight) is not None
            case Fired(what):
                return self._timers.has(what)
            case _:
                return True

    def _deadline(self, passed: Passed) -> _Deadline | None:
        return next((each for each in self._deadlines if each.what == passed.what), None)

    def _show(self, sight: Sight) -> None:
        self._seen_count += sight.counts
        if isinstance(sight, Taken):
            self._permitted.extend(sight.keys)
        elif isinstance(sight, Lost):
            self._mailbox.lose(sight.rank)
        elif isinstance(sight, Fired):
            if sight.has_taken and self._engine is not None:
                self._engine.poll()
            self._timers.fire(sight.what)
        else:
            deadline = self._deadline(sight)
            assert deadline is not None
            self._deadlines.remove(deadline)
            deadline.has_passed = True
            deadline.on_passed()

    @staticmethod
    def _group(sights: deque[Any], turn: int | None = None) -> list[Sight]:
        """Return the next thing to be seen, and the messages that tasks took by themselves right after it."""
        group: list[Sight] = []
        for sight in sights:
            if isinstance(sight, SafePoint) or (turn is not None and sight.turn > turn):
                break
            if group and not sight.goes_with_the_one_before:
                break
            group.append(sight)
        return group

    # -- outside of safe points -------------------------------------------------------------------------------------

    def _look_soon(self, after_s: float = _PAUSE_S) -> None:
        at_s = self._loop.time() + after_s
        if self._engine is None or (self._timer is not None and self._look_at_s <= at_s):
            return
        if self._timer is not None:
            self._timer.cancel()
        self._timer, self._look_at_s = self._loop.call_later(after_s, self._look), at_s

    def _look(self) -> None:
        """Show the next thing, unless user code has to come to a safe point first."""
        assert self._engine is not None
        self._timer = None
        self._engine.recheck()
        if self.is_done:
            self._timers.release()
            self._engine.ring()
            return
        group = self._group(self.log.entries)
        if self._point is not None or ((self._permitted or not group) and not self._has_ended):
            return
        if self._permitted or not self._is_possible(group):
            if not self._has_ended and not self._is_possible(group[:1]):
                return
            if self._loop.time() < self._patient_until:
                self._look_soon(self._patient_until - self._loop.time() + _PAUSE_S)
                return
            if not self._patient_until:
                is_first = not self._permitted and self._is_possible(group[:1])
                patience_s = _PATIENCE_S if is_first else _END_PATIENCE_S
                self._patient_until = self._loop.time() + patience_s
                self._look_soon(patience_s + _PAUSE_S)
                return
            if self._permitted or not self._is_possible(group[:1]):
                self._show_all()
                return
            group = group[:1]
        self._patient_until = 0.0
        for sight in group:
            self._show(sight)
            self.log.entries.popleft()
        self._engine.ring()
        self._look_soon()

    def _show_all(self) -> None:
        """Hold nothing back any more: main has ended, and ranks may come to their end in another order than then."""
        assert self._engine is not None
        self.log.entries.clear()
        self._permitted.clear()
        self._timers.release()
        self._engine.ring()

    # -- what user code and protocols call --------------------------------------------------------------------------

    def read_clock(self) -> float:
        """Return what the clock said then."""
        readings = self.log.clock[sys._getframe(1).f_lineno]
        while len(readings) > 1 and readings[0].seen_count < self._seen_count >= readings[1].seen_count:
            readings.popleft()  # a task has not gone on then which did so in the recorded run, as it had nothing to do
        if readings and readings[0].seen_count <= self._seen_count:
            self._time = readings.popleft().seconds
        return self._time

    async def _progress(self, budget_s: float = 0.0) -> None:
        """Make the passes, and yield as often, as the recorded safe point did."""
        del budget_s
        engine = self._engine
        assert engine is not None
        clock = self._world.virtual_clock
        if clock is not None:
            await clock.before_safe_point()
        entries = self.log.entries
        await self._until(self._has_seen_all_before, "what was seen before this safe point")
        if not entries and not self.log.is_over:
            await self._stop()
        point = entries.popleft() if entries else SafePoint()
        assert isinstance(point, SafePoint)
        self._point = point
        engine.woken_count = 0
        try:
            for turn in range(0, max(point.turn_count, 2), 2):
                await self._show_turn(point, turn)
                engine.turn = turn
                engine.poll()
                engine.turn = turn + 1
                await self._yield(point, turn + 1)
                try_count = 0
                while self._group(point.sights, turn + 1) or self._permitted:
                    await self._show_turn(point, turn + 1)
                    if not engine.poll():
                        engine.recheck()
                    if not self._group(point.sights, turn + 1) and not self._permitted:
                        break
                    if self._permitted:
                        await self._is_soon_possible([], try_count * _PATIENCE_S)
                    await yield_to_loop()
                    try_count += 1
                    if try_count > _TRY_COUNT:
                        if self._may_stop:
                            await self._stop()
                        raise self._divergence(f"{self._group(point.sights)[:1]} was seen, which does not happen now")
        finally:
            self._point = None
            self._look_soon()
        self._world.check()

    async def _yield(self, point: SafePoint, turn: int) -> None:
        """Let the rank's tasks run; what a pass took up between two of them it takes up there again."""
        assert self._engine is not None
        due = [sight for sight in point.sights if sight.turn <= turn]
        while due and (is_deadline := isinstance(due[0], Passed)) | (due[0].counts and self._is_now(due[0])):
            if not await self._is_soon_possible(due[:1], _POINT_PATIENCE_S) or not is_deadline:
                break
            self._show(due.pop(0))  # it was written down by the task that goes on in this turn
            point.sights.popleft()
            self._engine.recheck()
        self._yielding = turn
        try:
            self._loop.call_soon(self._on_woken)  # tasks that it wakes go on after this one
            await yield_to_loop()
        finally:
            self._yielding = 0

    def _on_woken(self) -> None:
        """Make the passes that were made before the task that goes on now."""
        engine, point = self._engine, self._point
        assert engine is not None
        while self._yielding and point is not None and (group := self._group(point.sights, self._yielding)):
            if not self._is_now(group[0]) or not self._is_possible(group[:1]):
                return
            for sight in group:
                self._show(sight)
                point.sights.popleft()
            engine.poll()

    def _is_now(self, sight: Sight) -> bool:
        """Whether a sight of this turn was seen before any other task went on."""
        assert self._engine is not None
        return sight.woken_count <= self._engine.woken_count

    async def _stop(self) -> None:
        """Go no further: the record of this rank, or of one that it needs, ends here."""
        self.has_stopped = True
        await self._loop.create_future()

    def _has_seen_all_before(self) -> bool:
        entries = self.log.entries
        return not entries or (isinstance(entries[0], SafePoint) and not self._permitted)

    async def _show_turn(self, point: SafePoint, turn: int) -> None:
        """Show what is to be seen up to a turn; nothing else on the rank happens meanwhile."""
        assert self._engine is not None
        while group := self._group(point.sights, turn):
            if not await self._is_soon_possible(group):
                group = group[:1]
                if turn % 2 and isinstance(group[0], Taken) and not group[0].is_of_pass:
                    pass  # what others do for it needs something of this rank: it stops when it has done that
                elif not await self._is_soon_possible(group, _POINT_PATIENCE_S):
                    return
            for sight in group:
                self._show(sight)
                point.sights.popleft()
            if any(isinstance(sight, Taken) and sight.is_of_pass for sight in group):
                if turn % 2:
                    self._engine.ring()
                if self._group(point.sights, turn):
                    self._engine.poll()

    async def _is_soon_possible(self, group: list[Sight], patience_s: float = _PATIENCE_S) -> bool:
        pause_s, waited_s = _PAUSE_S, 0.0
        while not self._is_possible(group):
            if waited_s > patience_s:
                return False
            await self._loop.be_busy(pause_s)
            waited_s += pause_s
            pause_s = min(2.0 * pause_s, _PATIENCE_S)
        return True

    def _is_waiting_for_permitted(self) -> bool:
        return any(not self._mailbox.count(key) for key in self._permitted)

    def note_sent(self) -> None:
        """Stop after the step of the task that has sent something, if what is to be seen next has not come yet."""
        point = self._point
        if point is None:
            return
        due = self._group(point.sights, self._yielding)[:1] if self._yielding else []
        if self._is_waiting_for_permitted() or (due and self._is_now(due[0]) and not self._is_possible(due)):
            self._loop.stall(3.0 * _PATIENCE_S)

    async def _wait_until(
        self, condition: Callable[[], bool], what: str = "a condition", *, deadline: float | None = None
    ) -> bool:
        """As :meth:`Engine.until`, with deadlines that pass when they did."""
        assert self._engine is not None
        if deadline is None or self.is_done:
            return await self._until(condition, what)
        with self._deadline_of(what, self._engine.recheck) as entry:
            await self._until(lambda: entry.has_passed or condition(), what)
            return not entry.has_passed or condition()

    async def _park_until(
        self, waiter: asyncio.Future[None], is_ready: Callable[[], bool], what: str, deadline: float
    ) -> bool:
        """As :meth:`Engine.park_until`, with deadlines that pass when they did."""
        del deadline
        assert self._engine is not None
        with self._deadline_of(what, functools.partial(resolve_waiter, waiter, None)) as entry:
            await self._engine.park(waiter, what)
            return not entry.has_passed or is_ready()

    @contextlib.contextmanager
    def _deadline_of(self, what: str, on_passed: Callable[[], object]) -> Iterator[_Deadline]:
        entry = _Deadline(str(what), on_passed)
        self._deadlines.append(entry)
        self._look_soon()
        try:
            yield entry
        finally:
            if entry in self._deadlines:
                self._deadlines.remove(entry)

    # -- what it does -----------------------------------------------------------------------------------------------

    def _on_event(self, time_s: float, kind: str, fields: tuple[Field, ...]) -> None:
        """Compare what the rank does with what it did."""
        assert self._engine is not None
        if kind == "step":
            self.iteration = int(fields[1])  # type: ignore[arg-type]
        if kind not in DECISIONS or self._found or self._engine.failure:
            return
        event = Event(time_s, kind, fields)
        decisions = self.log.decisions[kind]
        if not decisions:
            if self.log.is_over and not self.has_stopped:  # what comes after main's end may differ: it decides nothing
                raise self._divergence(f"no more {kind} was recorded, and now there is [{event}]")
            return
        expected = decisions.popleft()
        if _essence(expected) != _essence(event):
            raise self._divergence(f"recorded was [{expected}], and now there is [{event}]")

    def note_end(self, error: BaseException | None) -> None:
        """Compare how main ended."""
        if isinstance(error, asyncio.CancelledError):  # since the simulation is over
            return
        self.has_stopped = self._has_ended = True
        self._look_soon()
        now, recorded = "" if error is None else type(error).__name__, self.log.error.partition(":")[0]
        came_late = recorded == RankLostError.__name__ and not now  # it failed elsewhere as this main returned
        if self.log.is_over and not self._found and now != recorded and not came_late:
            self._divergence(f"its main ended with [{self.log.error}], and now with [{now}]")

    def where(self) -> str:
        """Return how far the rank has come, in words."""
        return f"after iteration {self.iteration}" if self.iteration >= 0 else "before its first step"

    def _divergence(self, what: str) -> DivergenceError:
        error = DivergenceError(f"rank {self.rank}, {self.where()}: {what}", rank=self.rank)
        self._found.append(error)
        return error


def _essence(event: Event) -> tuple[str, list[Any]]:
    """Return what a replay must repeat of an event: all but how long something took. A NaN repeats a NaN."""
    named = zip(KINDS[event.kind], event.fields, strict=False)
    plain = ((name, list(field) if isinstance(field, (tuple, list)) else field) for name, field in named)
    return event.kind, [field if field == field else "nan" for name, field in plain if name != "seconds"]
