"""Shows one rank of a simulation what that rank of a recorded run saw, in the same order."""

from __future__ import annotations

import asyncio
import contextvars
import functools
import math
import sys
from collections import Counter, deque
from collections.abc import Callable, Coroutine, Iterator
from typing import Any, Final

from asyncdist import tags
from asyncdist.messaging.engine import Awaited, Engine, yield_to_loop
from asyncdist.messaging.polling import resolve_waiter
from asyncdist.recording.events import Field
from asyncdist.runtime.world import World
from asyncdist.simulation.processes.event_loop import RankLoop
from asyncdist.simulation.replay.comparison import Comparison, DivergenceError, in_words
from asyncdist.simulation.replay.log import Fired, Key, Lost, Passed, RankLog, SafePoint, Sight, Taken, TakenByTask
from asyncdist.simulation.replay.mailbox import Mailbox
from asyncdist.simulation.replay.timers import Deadlines, Timers
from asyncdist.simulation.scheduler import Handle
from asyncdist.transports.base import ANY_SOURCE

_COLLECTIVE_TAGS: Final = range(tags.COLLECTIVE_FIRST, tags.COLLECTIVE_LAST + 1)
#: Virtual seconds between two looks for what a rank may see next. Whatever others do for it takes no time at all.
_PAUSE_S: Final = 1e-5
#: The longest pause between two such looks.
_PAUSE_MAX_S: Final = 0.1
#: Virtual seconds for which a rank waits for what it saw next before it is taken to have gone another way.
_PATIENCE_S: Final = 300.0
#: So often a safe point lets the rank's tasks run for it, where they have not come as far as they had then.
_TRY_COUNT: Final = 20


class Gate:
    """Holds back what comes to a rank until its recorded turn has come.

    Args:
        rank: the rank.
        log: what it saw.
        mailbox: where its messages wait.
        loop: runs it.
        found: differences are added to it.
        is_cut_off: returns whether a rank goes no further, since its record ends, or that of one that it needs.

    Attributes:
        comparison: of what it does with what it did.
        has_stopped: whether the rank has come to the end of its record, or to that of its main.
        progress_count: how often it has seen something, or come to a safe point.
    """

    def __init__(
        self,
        rank: int,
        log: RankLog,
        mailbox: Mailbox,
        loop: RankLoop,
        found: list[DivergenceError],
        is_cut_off: Callable[[int], bool],
    ) -> None:
        self.rank = rank
        self.log = log
        self.comparison = Comparison(rank, log, found)
        self.has_stopped = False
        self.progress_count = 0
        self._progressed_at = 0.0
        self._goes_no_further = False
        self._is_cut_off = is_cut_off
        self._mailbox = mailbox
        self._loop = loop
        self._early = Counter(log.early)
        self._permitted: deque[Key] = deque()
        self._deadlines = Deadlines()
        self._timers = Timers(loop)
        self._point: SafePoint | None = None
        self._has_ended = False
        self._timer: Handle | None = None
        self._look_at_s = 0.0
        self._put_off: Sight | None = None
        self._turn = 0
        self._time = 0.0
        self._seen_count = 0
        self._sent_count = 0
        self._waiters: dict[asyncio.Task[Any] | None, asyncio.Future[None]] = {}
        self._woken_late: set[asyncio.Task[Any] | None] = set()  # by what they had taken by themselves, without a wait
        self._is_frozen = False
        self._frozen_until = self._thaws_at_s = 0.0
        self._main: asyncio.Task[Any] | None = None  # the task that has come to a safe point last
        self._engine: Engine | None = None
        self._context = contextvars.copy_context()
        self._world: World
        self._engine_park: Callable[..., Coroutine[Any, Any, None]]
        self._until: Callable[..., Coroutine[Any, Any, bool]]
        mailbox.ring = self._on_arrival

    def install(self, world: World) -> None:
        """Take the place of what decides when the rank sees something."""
        services, engine = world.services, world.services.engine
        self._world, self._engine, self._until, self._engine_park = world, engine, engine.until, engine.park
        self._context = contextvars.copy_context()
        self._sent_count = engine.woken_count = 0
        self._early.clear()  # the simulated start may not need all that the recorded one did
        engine.clock = services.time = world.time = self.read_clock
        services.events.sink = self._on_event
        engine.on_woken = self._on_woken
        replaced: Any = engine
        replaced.until, replaced.park_until, replaced.park = self._wait_until, self._park_until, self._park
        replaced.call_later = self._timers.call_later
        of_world: Any = world
        of_world.progress = of_world.safe_point = self._progress
        self._look_soon()

    @property
    def is_done(self) -> bool:
        """Whether all that was recorded has happened once more."""
        return not self.log.entries and self._point is None

    @property
    def has_stopped_at_cut(self) -> bool:
        """Whether it goes no further, since its record ends, or that of a rank that it needs."""
        return self._goes_no_further or (self.has_stopped and not self.log.is_over)

    @property
    def is_at_cut(self) -> bool:
        """Whether it may wait for ever, since its record ends before its main, or has stopped for that."""
        return self.has_stopped_at_cut or (self.is_done and not self.log.is_over)

    def awaited_ranks(self) -> set[int]:
        """Return the ranks that have to send something before it goes on.

        Of the collectives that a backend carried by itself the record has no messages, but the replay needs them.
        """
        engine, sight = self._engine, self._next()
        missing = self._missing_sources(sight)
        if engine is None or (sight is not None and missing and self._is_due(sight, engine.woken_count)):
            return missing
        waits = [engine.awaited(waiter) for waiter in self._waiters.values()]
        unrecorded = [
            peer
            for what in waits
            if isinstance(what, Awaited) and what.tag in _COLLECTIVE_TAGS and what.tag not in self.log.tags
            for peer in what.peers()
        ]
        return missing.union(unrecorded)

    # -- messages ---------------------------------------------------------------------------------------------------

    def next_key(self, source: int, tag: int) -> Key | None:
        """Return the source and tag of the message that a receive may take now; None for none."""
        first = self._mailbox.first(source, tag)
        if tag not in self.log.tags or (self.is_done and self.log.is_over):
            return first
        for key in self._permitted:
            if key[1] == tag and source in (ANY_SOURCE, key[0]):
                return key if self._mailbox.count(key) else None
        for key, count in self._early.items():
            if count and key[1] == tag and source in (ANY_SOURCE, key[0]) and self._mailbox.count(key):
                return key
        return None if self._engine is None or self._engine._in_pass else self._key_of_task(source, tag)

    def _key_of_task(self, source: int, tag: int) -> Key | None:
        """Return what a task may take by itself now: one of the messages that are next, all of which tasks took."""
        late: list[TakenByTask] = []
        for sight in self._sights():
            if not isinstance(sight, TakenByTask) or (late and not sight.is_beside(late[0])):
                break
            (key,) = sight.keys
            if key[1] == tag and source in (ANY_SOURCE, key[0]):
                if not late and self._mailbox.count(key):
                    return key
                late.append(sight)  # the task took all of these one right after the other, and waits for them now
        if late:
            for sight in late:
                sight.late_for = asyncio.current_task(self._loop)
            self._freeze_if_late()
        return None

    def take(self, key: Key) -> bytes:
        """Take a message out."""
        if key in self._permitted:
            self._permitted.remove(key)
        elif self._early[key]:
            self._early[key] -= 1
        else:
            sights = self._all_sights()
            taken = next((sight for sight in sights if isinstance(sight, TakenByTask) and sight.keys == [key]), None)
            if taken is not None:
                sights.remove(taken)
                self._note_progress()
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

    def note_sent(self, tag: int) -> None:
        """Count a message that the rank sends: what it sees next may have its place after that."""
        self._sent_count += not (self.log.is_native and tag in _COLLECTIVE_TAGS)
        self._freeze_if_late()

    # -- what may be seen -------------------------------------------------------------------------------------------

    def _all_sights(self) -> deque[Any]:
        return self.log.entries if self._point is None else self._point.sights

    def _sights(self) -> Iterator[Sight]:
        """Yield what is to be seen before user code comes to its next safe point, or ends this one."""
        for sight in self._all_sights():
            if isinstance(sight, SafePoint) or (self._point is not None and sight.turn > self._turn):
                return
            yield sight

    def _next(self) -> Sight | None:
        return next(self._sights(), None)

    def _is_due(self, sight: Sight, woken_count: int) -> bool:
        """Whether its place has come: as many waits have ended, and messages were sent, as before it then."""
        if not isinstance(sight, Taken) and not self._is_possible(sight):
            return False  # this rank has to do something for it, and not another one
        if isinstance(sight, Passed):  # the wait that ends by it was counted before
            woken_count += 1
        return sight.woken_count <= woken_count and sight.sent_count <= self._sent_count

    def _is_possible(self, sight: Sight) -> bool:
        match sight:
            case Taken():
                return not self._missing_sources(sight)
            case Passed(what=what):
                return self._deadlines.has(what)
            case Fired(what=what):
                return self._timers.has(what)
            case _:
                return True

    def _missing_sources(self, sight: Sight | None) -> set[int]:
        """Return the ranks whose messages of a sight have not come."""
        if not isinstance(sight, Taken):
            return set()
        return {key[0] for key, count in self._keys_with(sight).items() if self._mailbox.count(key) < count}

    def _keys_with(self, first: Taken) -> Counter[Key]:
        """Return the messages of a sight, and of those after it that a task took in the step that follows, if any."""
        keys = Counter(first.keys)
        for sight in self._sights():
            if isinstance(sight, TakenByTask) and sight is not first:
                if (
                    sight.sent_count > max(first.sent_count, self._sent_count)
                    or sight.woken_count > first.woken_count + 1
                ):
                    break
                keys.update(sight.keys)
            elif sight is not first:
                break
        return keys

    @staticmethod
    def _is_left_to_task(sight: Sight) -> bool:
        """Whether a task is to take it by itself; that one has not tried to do so yet."""
        return isinstance(sight, TakenByTask) and sight.late_for is None

    def _must_be_there(self, sight: Sight, woken_count: int) -> bool:
        """Whether it is possible, or will be without this rank, before the rank's next step."""
        if isinstance(sight, TakenByTask):
            woken_count += 1
        return self._is_due(sight, woken_count)

    def _show(self, sight: Sight) -> None:
        """Let the rank see something, and do at once what follows from it."""
        assert self._engine is not None
        self._all_sights().remove(sight)
        self._note_progress()
        self._seen_count += sight.counts
        match sight:
            case Taken(keys=keys):
                self._permitted.extend(keys)
                self._engine.poll()
                task = sight.late_for if isinstance(sight, TakenByTask) else None
                if task is not None and (waiter := self._waiters.get(task)) is not None and waiter.done():
                    self._woken_late.add(task)
            case Lost(rank=rank):
                self._mailbox.lose(rank)
            case Fired(what=what):
                self._timers.fire(what)
            case Passed(what=what):
                self._deadlines.expire(what)

    def _catch_up(self) -> None:
        """Show all whose place has come, as far as it is possible."""
        assert self._engine is not None
        while (sight := self._next()) is not None and self._is_due(sight, self._engine.woken_count):
            if self._permitted and self._engine.poll() == 0 and self._permitted:
                return
            if not self._is_possible(sight) or self._is_left_to_task(sight):
                return
            self._show(sight)

    def _on_woken(self, counts: bool) -> None:
        """Make the passes that were made before the task that goes on now."""
        assert self._engine is not None
        if self._is_done_with_turns():
            return
        self._catch_up()
        task = asyncio.current_task(self._loop)
        if task in self._woken_late:
            self._woken_late.remove(task)
            self._engine.woken_count -= counts
        self._freeze_if_late(counts)

    def _is_done_with_turns(self) -> bool:
        return self.is_done and not self._permitted

    def _note_progress(self) -> None:
        self._progressed_at = self._loop.time()
        self.progress_count += 1

    # -- waiting for other ranks ------------------------------------------------------------------------------------

    def _freeze_if_late(self, woken_count: int = 0) -> None:
        """Let nothing run on this rank after the step under way, if a message that comes next is not there yet.

        The rank that sends it needs nothing more of this one for that, since it had nothing more then.
        """
        sight, engine = self._next(), self._engine
        if sight is None or engine is None or self._is_frozen or self._is_main_running():
            return
        if self._must_be_there(sight, engine.woken_count + woken_count) and not self._is_possible(sight):
            self._is_frozen = True
            self._frozen_until = self._loop.time() + _PATIENCE_S
            self._stay_frozen(_PAUSE_S)
            self._loop.attend(self._thaw, ())  # before anything else, when it is not busy any more

    def _stay_frozen(self, pause_s: float) -> None:
        sight = self._next()
        if sight is None or self._is_possible(sight) or self._loop.time() > self._frozen_until:
            return
        self._loop.stall(pause_s)
        self._thaws_at_s = max(self._thaws_at_s, self._loop.time()) + pause_s
        next_pause_s = min(1.5 * pause_s, _PAUSE_MAX_S)
        self._loop._scheduler.at(self._thaws_at_s - pause_s / 8, self._stay_frozen, (next_pause_s,))

    def _thaw(self) -> None:
        """Show what the rank was frozen for, before anything else runs on it."""
        assert self._engine is not None
        self._is_frozen = False
        before = asyncio._get_running_loop()
        asyncio._set_running_loop(self._loop)
        try:
            self._context.run(self._catch_up)
        except Exception as error:
            self._engine.fail(error)
        finally:
            asyncio._set_running_loop(before)

    def _is_main_running(self) -> bool:
        """Whether what runs now comes to a safe point, which waits by itself for what it is to see."""
        return self._main is not None and asyncio.current_task(self._loop) is self._main

    # -- outside of safe points -------------------------------------------------------------------------------------

    def _look_soon(self, after_s: float = _PAUSE_S) -> None:
        at_s = self._loop.time() + after_s
        if self._engine is None or (self._timer is not None and self._look_at_s <= at_s):
            return
        if self._timer is not None:
            self._timer.cancel()
        self._timer, self._look_at_s = self._loop.call_later(after_s, self._look), at_s

    def _look(self) -> None:
        """Show what is next, unless user code has to come to a safe point first."""
        assert self._engine is not None
        self._timer = None
        if self.is_done:
            self._timers.release()
            self._engine.ring()
            return
        if self._point is not None:
            return
        self._catch_up()
        sight = self._next()
        if sight is None and self._has_ended:
            self._show_all()
        elif sight is not None and self._is_possible(sight) and not self._permitted:
            # Its place has not come, and the rank waits: some task has gone on in another order.
            if sight is not self._put_off:
                self._put_off = sight
                self._look_soon(_PATIENCE_S)
            elif self._loop.time() >= self._progressed_at + _PATIENCE_S:
                self._show(sight)
                self._look_soon()
            else:
                self._look_soon(self._progressed_at + _PATIENCE_S + _PAUSE_S - self._loop.time())
        elif sight is not None and self._has_ended:
            if self._loop.time() >= self._progressed_at + _PATIENCE_S:
                self._show_all()
            else:
                self._look_soon(self._progressed_at + _PATIENCE_S + _PAUSE_S - self._loop.time())

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
        self._main = asyncio.current_task()
        clock = self._world.virtual_clock
        if clock is not None:
            await clock.before_safe_point()
        while self._is_frozen:
            await yield_to_loop()
        await self._see_all_before()
        entries = self.log.entries
        if not entries and not self.log.is_over:
            await self._stop()
        point = entries.popleft() if entries else SafePoint()
        assert isinstance(point, SafePoint)
        self._point = point
        engine.woken_count = self._sent_count = 0
        self._woken_late.clear()
        self._note_progress()
        try:
            for turn in range(0, max(point.turn_count, 2), 2):
                await self._see_turn(turn)
                engine.poll()
                self._set_turn(turn + 1)
                await self._wait_for_next()
                self._loop.call_soon(self._on_turn)  # tasks that it wakes go on after this one
                await yield_to_loop()
                await self._see_turn(turn + 1)
        finally:
            self._point = None
            self._look_soon()
        await self._wait_for_next()
        self._world.check()

    def _set_turn(self, turn: int) -> None:
        assert self._engine is not None
        self._turn = self._engine.turn = turn

    def _on_turn(self) -> None:
        if self._point is not None and not self._is_frozen:
            self._catch_up()

    async def _see_all_before(self) -> None:
        """See what was seen before this safe point, and has not been seen yet."""
        assert self._engine is not None
        while (sight := self._next()) is not None or self._permitted:
            if sight is not None and self._is_due(sight, self._engine.woken_count) and not self._is_left_to_task(sight):
                await self._see(sight)
            elif not await self._until_changed(sight):
                if sight is None:
                    break
                await self._see(sight)
        for _ in range(_TRY_COUNT):
            point = self.log.entries[0] if self.log.entries else None
            if not isinstance(point, SafePoint) or (
                point.woken_count <= self._engine.woken_count and point.sent_count <= self._sent_count
            ):
                return
            await yield_to_loop()

    async def _until_changed(self, sight: Sight | None) -> bool:
        """Let others run until something else is next; return False if it never is."""
        assert self._engine is not None
        for try_count in range(_TRY_COUNT):
            self._engine.poll()
            self._engine.recheck()
            if try_count:
                await self._loop.be_busy(_PAUSE_S * 2.0**try_count)
            await yield_to_loop()
            if self._next() is not sight or (sight is None and not self._permitted):
                return True
            if sight is None or self._is_left_to_task(sight):
                continue
            if self._is_due(sight, self._engine.woken_count) and self._is_possible(sight):
                return True
        return False

    async def _see_turn(self, turn: int) -> None:
        """See all that was seen up to a turn of this safe point."""
        assert self._engine is not None
        self._set_turn(turn)
        while (sight := self._next()) is not None:
            is_due = self._is_due(sight, self._engine.woken_count) and not self._is_left_to_task(sight)
            if is_due or not turn % 2 or not await self._until_changed(sight):
                await self._see(sight)

    async def _wait_for_next(self) -> None:
        """Let nothing run before what is seen next is there."""
        assert self._engine is not None
        while (sight := self._next()) is not None and self._must_be_there(sight, self._engine.woken_count):
            await self._until_possible(sight)
            if not isinstance(sight, Passed):
                return
            self._show(sight)  # it was written down by the task that goes on in this turn
            self._engine.recheck()

    async def _see(self, sight: Sight) -> None:
        """See something as soon as it is possible; nothing else on the rank happens meanwhile."""
        while not await self._until_possible(sight):
            if any(map(self._is_cut_off, self._missing_sources(sight))):
                await self._stop()
            if self._progressed_at < self._loop.time() - _TRY_COUNT * _PATIENCE_S:
                raise self.comparison.divergence(in_words(sight))
        if sight is self._next():
            self._show(sight)

    async def _until_possible(self, sight: Sight) -> bool:
        pause_s, waited_s = _PAUSE_S, 0.0
        while sight is self._next() and not self._is_possible(sight):
            if waited_s > _PATIENCE_S:
                return False
            await self._loop.be_busy(pause_s)
            waited_s += pause_s
            pause_s = min(1.5 * pause_s, _PAUSE_MAX_S)
        return True

    async def _stop(self) -> None:
        """Go no further: the record of this rank, or of one that it needs, ends here."""
        self.has_stopped = self._goes_no_further = True
        await self._loop.create_future()

    async def _park(
        self, waiter: asyncio.Future[None], what: str = "a wake-up", *, is_of_request: bool = False
    ) -> None:
        """As :meth:`Engine.park`."""
        task = asyncio.current_task()
        if task is self._main:
            self._main = None  # for this wait: what the rank sees meanwhile is not seen at a safe point
        self._freeze_if_late()
        self._waiters[task] = waiter
        try:
            await self._engine_park(waiter, what, is_of_request=is_of_request)
        finally:
            del self._waiters[task]

    async def _wait_until(
        self, condition: Callable[[], bool], what: str = "a condition", *, deadline: float | None = None
    ) -> bool:
        """As :meth:`Engine.until`, with deadlines that pass when they did."""
        assert self._engine is not None
        if deadline is None or self.is_done:
            return await self._until(condition, what)
        with self._deadlines.waiting(what, self._engine.recheck) as entry:
            self._look_soon()
            await self._until(lambda: entry.has_passed or condition(), what)
            return not entry.has_passed or condition()

    async def _park_until(
        self, waiter: asyncio.Future[None], is_ready: Callable[[], bool], what: str, deadline: float
    ) -> bool:
        """As :meth:`Engine.park_until`, with deadlines that pass when they did."""
        del deadline
        assert self._engine is not None
        with self._deadlines.waiting(what, functools.partial(resolve_waiter, waiter, None)) as entry:
            self._look_soon()
            await self._engine.park(waiter, what)
            return not entry.has_passed or is_ready()

    # -- what it does -----------------------------------------------------------------------------------------------

    def _on_event(self, time_s: float, kind: str, fields: tuple[Field, ...]) -> None:
        assert self._engine is not None
        if not self._engine.failure:
            self.comparison.on_event(time_s, kind, fields, self.has_stopped)

    def note_end(self, error: BaseException | None) -> None:
        """Compare how main ended."""
        if not isinstance(error, asyncio.CancelledError):  # since the simulation is over
            self.has_stopped = self._has_ended = True
            self._look_soon()
        self.comparison.on_end(error)

    def missing(self) -> tuple[float, str]:
        """Return when the event was that came next in the recorded run, on the rank's clock, and what it was."""
        sight = self._next()
        entry = sight if sight is not None else next(iter(self.log.entries), None)
        time_s = math.inf if entry is None else entry.time_s
        return time_s, f"rank {self.rank}, {self.comparison.where()}: {in_words(sight)}"
