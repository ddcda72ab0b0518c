"""Records the events of a rank, if requested: messages, waits, and events of protocols."""

from __future__ import annotations

import asyncio
import contextvars
import functools
import itertools
import random
import sys
from collections import defaultdict
from collections.abc import Callable
from dataclasses import asdict
from typing import Any, ClassVar, Final

import numpy
import torch

from asyncdist.messaging.engine import Engine
from asyncdist.messaging.polling import clock_of
from asyncdist.recording.events import BEFORE_WORLD, Field
from asyncdist.recording.writer import RecordOptions, RecordWriter, header_of
from asyncdist.runtime.sleeps import set_sleeps_by
from asyncdist.runtime.world import World
from asyncdist.transports.base import Transport
from asyncdist.transports.recorded_transport import RecordedTransport
from asyncdist.waits import WaitId, WaitKind

#: Seconds between two flushes of the recording to the kernel, even if nothing happens.
_FLUSH_PERIOD_S: Final = 1.0

#: Largest result of an MPI reduction, in bytes, that is recorded, so that recordings stay small.
_RESULT_NBYTES_MAX: Final = 1024

#: torch's seed at import, or the seed that the program had set before.
_FIRST_SEED: Final = torch.initial_seed()


class Recording:
    """The recording of one rank.

    Args:
        options: Options of the recording; None for no recording.
        transport: Transport of the rank.
        loop: Loop of the rank.

    Attributes:
        transport: Transport to use instead of the given one.
        engine: Engine of the rank.
    """

    def __init__(self, options: RecordOptions | None, transport: Transport, loop: asyncio.AbstractEventLoop) -> None:
        self.transport = transport
        self._loop = loop
        self._timer: asyncio.TimerHandle | None = None
        self._writer: RecordWriter | None = None
        self._recorded: RecordedEngine | None = None
        self._sent_before_count = 0  # messages sent before the world was open
        self._leave_loop: Callable[[], None] = lambda: None
        if options is not None:
            self._writer = RecordWriter(options, clock_of(loop), transport.rank)
            self.transport = RecordedTransport(transport, functools.partial(self._note_message, self._writer))
            self._recorded = RecordedEngine(self.transport, loop, self._writer)
        self.engine: Engine = self._recorded or Engine(transport, loop)

    def begin(self, world: World) -> None:
        """Begin the file, now that the job is known."""
        writer, engine, transport = self._writer, self._recorded, self.transport
        if writer is None or engine is None:
            return
        header = header_of(
            job=f"{world.services.nonce & 0xFFFFFFFF:08x}",
            rank=world.rank,
            size=world.size,
            incarnation=world.incarnation,
            transport=transport.describe(),
            hostname=world.hostname,
        )
        is_simulated = hasattr(self._loop, "rank")
        tells_sleeps = is_simulated or not transport.capabilities.shares_process  # not if ranks share a loop
        told = {"sent_before_count": self._sent_before_count, "tells_sleeps": tells_sleeps, "tells_collectives": True}
        writer.open({**header, **_conditions(world), **told})
        engine.begin()
        services = world.services
        services.events.sink = writer.add
        services.count_waits(writer.note_wait)
        services.end_recording = functools.partial(self._end, writer)
        if tells_sleeps:
            self._tell_sleeps(engine)
        if not transport.capabilities.shares_process:  # a rank of its own process can be killed
            self._tick(writer)

    def _note_message(self, writer: RecordWriter, kind: str, peer: int, tag: int, nbytes: int) -> None:
        if kind == "received":
            engine = self._recorded
            if engine is None or not engine.has_begun:
                writer.note(kind, peer, tag, nbytes, BEFORE_WORLD, 0)
            else:
                number = engine._pass_count % 65536 if engine._in_pass else -1
                writer.note(kind, peer, tag, nbytes, number, engine.turn, engine.woken_count, engine.begun_count)
        else:
            self._sent_before_count += self._recorded is None or not self._recorded.has_begun
            writer.note(kind, peer, tag, nbytes)

    def _tell_sleeps(self, engine: Engine) -> None:
        """Record when asyncio's timers fire, after which sleeping tasks continue."""
        call_at = self._loop.call_at

        def set_timer(
            what: WaitId,
            when: float,
            callback: Callable[..., object],
            args: tuple[Any, ...],
            context: contextvars.Context | None,
        ) -> asyncio.TimerHandle:
            wake = functools.partial(callback, *args)
            return call_at(when, engine.wake_by, what, wake, context=context)

        self._leave_loop = set_sleeps_by(self._loop, set_timer)

    def _tick(self, writer: RecordWriter) -> None:
        writer.flush()
        if writer.is_recording:
            self._timer = self._loop.call_later(_FLUSH_PERIOD_S, functools.partial(self._tick, writer))

    @staticmethod
    def _end(writer: RecordWriter, what: WaitId | None, seconds: float) -> None:
        if what is not None:
            writer.note("waited", what, seconds)
        writer.close()

    def note_end(self, error: BaseException | None) -> None:
        """Record the end of main; later steps may end the process."""
        self._leave_loop()
        if self._writer is not None:
            self._writer.note("over", "" if error is None else f"{type(error).__name__}: {error}"[:1000])
            self._writer.flush()

    def close(self) -> None:
        """End the file."""
        self._leave_loop()
        if self._timer is not None:
            self._timer.cancel()
        if self._writer is not None:
            self._writer.close()


class ObservedEngine(Engine):
    """Counts the positions at which a rank receives something: a recording holds them, and a replay compares them.

    Attributes:
        has_begun: Whether the world is open; positions are not needed before.
        woken_count: The number of waits for messages of channels and for conditions that have ended since the last safe
            point began, of collectives that have begun, ended without a message or failed since, and of calls of
            :meth:`wake_by`. Waits for requests do not count: no task waits for a request that is done at once.
        begun_count: The number of waits that count and have begun since the last safe point began.
    """

    tells_sends: ClassVar[bool] = True

    def __init__(self, transport: Transport, loop: asyncio.AbstractEventLoop) -> None:
        super().__init__(transport, loop)
        self.has_begun = False
        self.begun_count = 0
        self._send_counts: defaultdict[tuple[WaitKind, int, int], itertools.count[int]] = defaultdict(
            functools.partial(itertools.count, 1)
        )

    def begin(self) -> None:
        """Count from now on; before, a replay differs, since it opens the world in another way."""
        self.has_begun = True
        self.woken_count = self.begun_count = 0

    def name_send(self, kind: WaitKind, dest: int, tag: int) -> WaitId | None:
        return WaitId(kind, tag, dest, next(self._send_counts[kind, dest, tag])) if self.has_begun else None

    def note_collective_begun(self) -> None:
        self.woken_count += 1

    def _note_safe_point_begun(self) -> None:
        self.turn = self.woken_count = self.begun_count = 0

    def _note_wait_begun(self, counts: bool) -> None:
        self.begun_count += counts

    def _note_wait_ended(self, counts: bool) -> None:
        self.woken_count += counts


class RecordedEngine(ObservedEngine):
    """An engine that records everything that a replay must repeat.

    Args:
        transport: Transport of the rank.
        loop: Loop of the rank.
        writer: Writer of its events.
    """

    def __init__(self, transport: Transport, loop: asyncio.AbstractEventLoop, writer: RecordWriter) -> None:
        super().__init__(transport, loop)
        self._writer = writer
        self._is_native = transport.capabilities.native_collectives  # MPI chooses the order of reductions
        self._unrecorded_clock, self.clock = self.clock, self._read_clock

    def _read_clock(self) -> float:
        seconds = self._unrecorded_clock()
        if self.has_begun:
            self._writer.add(seconds, "clock", (seconds, sys._getframe(1).f_lineno))
        return seconds

    def wake_by(self, what: WaitId, wake: Callable[[], object]) -> None:
        if self.has_begun:
            self._note_timer(what)
            self.loop.call_soon(self._note_wait_ended, True)  # just before the task's next step
        wake()

    def measured(self, what: WaitId, value: int) -> int:
        self._note("measured", what, value)
        return value

    def note_reduced(self, tag: int, result: memoryview) -> None:
        if self._is_native:
            nbytes = len(result)
            self._note("reduced", tag, nbytes, result.hex() if nbytes <= _RESULT_NBYTES_MAX else "")

    async def note_collective(self, tag: int) -> None:
        self._note("collective", tag, self.turn, self.woken_count)
        self.woken_count += 1

    async def note_failed(self) -> None:
        if self.failure is None:
            self._note("failed", self.turn, self.woken_count)
            self.woken_count += 1

    def _note_safe_point_begun(self) -> None:
        if self.has_begun:
            self._writer.begin_safe_point(self.woken_count)
        self.turn = self.woken_count = self.begun_count = 0

    def _note_safe_point_ended(self) -> None:
        if self.has_begun:
            self._writer.end_safe_point(self.turn)

    def _note_deadline(self, what: WaitId) -> None:
        self._note("deadline", what, self.turn, self.woken_count)

    def _note_timer(self, what: WaitId) -> None:
        self._note("timer", what, self.turn, self.woken_count, self.begun_count)

    def _note(self, kind: str, *fields: Field) -> None:
        if self.has_begun:
            self._writer.note(kind, *fields)


def _conditions(world: World) -> dict[str, Any]:
    """Return the facts about the rank that a replay needs besides its events, for the header."""
    version, numbers, gauss = random.getstate()
    numpy_state: Any = numpy.random.get_state()
    return {
        "nonce": world.services.nonce,
        "hosts": None if world.services.hosts is None else list(world.services.hosts),
        "capabilities": asdict(world.services.engine.transport.capabilities),
        "thread_count": torch.get_num_threads(),
        "first_seed": _FIRST_SEED,
        "random": {
            "python": [version, list(numbers), gauss],
            "numpy": [numpy_state[0], numpy_state[1].tobytes(), *map(float, numpy_state[2:])],
            "torch": torch.get_rng_state().numpy().tobytes(),
        },
    }
