"""Records a rank's messages, waits and protocol events for analysis and replay."""

from __future__ import annotations

import asyncio
import contextvars
import functools
import itertools
import random
import sys
import zlib
from collections import defaultdict
from collections.abc import Callable
from dataclasses import asdict
from types import FrameType
from typing import Any, ClassVar, Final, cast

import numpy
import torch

from asyncdist.messaging.engine import Engine
from asyncdist.messaging.services import event_clock_of
from asyncdist.recording.events import BEFORE_WORLD, Field
from asyncdist.recording.sources import checksum_of_sources
from asyncdist.recording.writer import RecordOptions, RecordWriter, header_of
from asyncdist.runtime.world import World
from asyncdist.tensors.serialization import name_and_message
from asyncdist.transports.base import Transport
from asyncdist.transports.recorded_transport import RecordedTransport
from asyncdist.waits import WaitId, WaitKind

#: Seconds between two writes of the recording to its file.
_FLUSH_PERIOD_S: Final = 1.0

#: Maximum size in bytes of a recorded result of an MPI reduction, to keep recordings small.
_RESULT_NBYTES_MAX: Final = 1024

#: torch's seed at the time asyncdist is imported.
_FIRST_SEED: Final = torch.initial_seed()
#: Keys of clock readings, by the function that read the clock and by its line relative to the function's first line.
_READING_KEYS: Final[dict[tuple[str, int], int]] = {}
#: Function that sets a timer. Its arguments are the timer's identity, its deadline in seconds on the loop's clock, a
#: callback, the callback's arguments, and the callback's context.
SetTimer = Callable[[WaitId, float, Callable[..., object], tuple[Any, ...], contextvars.Context | None], Any]


class Recording:
    """Records one rank to a file, if requested, and provides the transport and the engine of the recorded rank."""

    def __init__(self, options: RecordOptions | None, transport: Transport, loop: asyncio.AbstractEventLoop) -> None:
        self.transport = transport
        self._loop = loop
        self._timer: asyncio.TimerHandle | None = None
        self._writer: RecordWriter | None = None
        self._recorded: RecordedEngine | None = None
        self._sent_before_count = 0  # number of messages sent before the world was open
        self._leave_loop: Callable[[], None] = lambda: None
        if options is not None:
            self._writer = RecordWriter(options, event_clock_of(loop), transport.rank)
            note = functools.partial(self._note_message, self._writer)
            self.transport = cast("Transport", RecordedTransport(transport, note))
            self._recorded = RecordedEngine(self.transport, loop, self._writer)
        self.engine: Engine = self._recorded or Engine(transport, loop)

    def begin(self, world: World) -> None:
        """Begin the file with a header that describes the job and the open ``world``."""
        writer, engine, transport = self._writer, self._recorded, self.transport
        if writer is None or engine is None:
            return
        header = header_of(
            job=world.services.job,
            rank=world.rank,
            size=world.size,
            incarnation=world.incarnation,
            transport=transport.describe(),
            hostname=world.hostname,
        )
        is_simulated = hasattr(self._loop, "rank")
        # Sleeps cannot be recorded if several ranks share a loop.
        tells_sleeps = is_simulated or not transport.capabilities.shares_process
        facts = {"sent_before_count": self._sent_before_count, "tells_sleeps": tells_sleeps}
        writer.open({**header, **_conditions(world), **facts, "sources": checksum_of_sources()})
        engine.begin()
        services = world.services
        services.events.sink = writer.add
        services.count_waits(writer.note_wait)
        services.end_recording = functools.partial(self._end, writer)
        if tells_sleeps:
            self._record_sleeps(engine)
        # A rank with its own process can be killed, so its file is written regularly.
        if not transport.capabilities.shares_process:
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

    def _record_sleeps(self, engine: Engine) -> None:
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
        """Record that ``main`` has ended, and flush the file: the process may end before the rank has shut down."""
        self._leave_loop()
        if self._writer is not None:
            text = "" if error is None else f"{type(error).__name__}: {name_and_message(error)[1]}"
            self._writer.note("over", text[:1000])
            self._writer.flush()

    def close(self) -> None:
        """Finish the recording's file."""
        self._leave_loop()
        if self._timer is not None:
            self._timer.cancel()
        if self._writer is not None:
            self._writer.close()


class ObservedEngine(Engine):
    """Engine that counts a rank's waits. A replay uses the counts to deliver each message at its recorded position.

    Attributes:
        has_begun: Whether the world is open. Earlier events are not counted.
        woken_count: Number of wake-ups since ``safe_point`` was last called: ends of waits for messages and conditions,
            collectives that began, failed or ended without a message, and calls of :meth:`wake_by`.
        begun_count: Number of waits for messages and conditions that have begun since ``safe_point`` was last called.
    """

    notes_sends: ClassVar[bool] = True

    def __init__(self, transport: Transport, loop: asyncio.AbstractEventLoop) -> None:
        super().__init__(transport, loop)
        self.has_begun = False
        self.begun_count = 0
        self._send_counts: defaultdict[tuple[WaitKind, int, int], itertools.count[int]] = defaultdict(
            functools.partial(itertools.count, 1)
        )

    def begin(self) -> None:
        """Start counting. Earlier events are not counted, because a replay opens the world in a different way."""
        self.has_begun = True
        self.woken_count = self.begun_count = 0

    def name_send(self, kind: WaitKind, dest: int, tag: int) -> WaitId | None:
        return WaitId(kind, tag, dest, next(self._send_counts[kind, dest, tag])) if self.has_begun else None

    def try_safe_point(self) -> bool:
        return False  # Every call of safe_point must be recorded.

    def note_collective_begun(self) -> None:
        self.woken_count += 1

    def _note_safe_point_begun(self) -> None:
        self.turn = self.woken_count = self.begun_count = 0

    def _note_wait_begun(self, counts: bool) -> None:
        self.begun_count += counts

    def _note_wait_ended(self, counts: bool) -> None:
        self.woken_count += counts


class RecordedEngine(ObservedEngine):
    """Engine that records all events that a replay must repeat."""

    def __init__(self, transport: Transport, loop: asyncio.AbstractEventLoop, writer: RecordWriter) -> None:
        super().__init__(transport, loop)
        self._writer = writer
        self._is_native = transport.capabilities.native_collectives  # MPI chooses the order of its reductions
        self._unrecorded_clock, self.clock = self.clock, self._read_clock

    def _read_clock(self) -> float:
        seconds = self._unrecorded_clock()
        if self.has_begun:
            self._writer.add(seconds, "clock", (seconds, key_of_reading(sys._getframe(1))))
        return seconds

    def wake_by(self, what: WaitId, wake: Callable[[], object]) -> None:
        if self.has_begun:
            self._note_timer(what)
            self.loop.call_soon(self._note_wait_ended, True)  # Count the wait just before the task's next step.
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


def key_of_reading(frame: FrameType) -> int:
    """Return the key of a clock reading in ``frame``.

    The key depends on the function that reads the clock, and on the line within that function. Edits of other functions
    do not change the key, so that earlier recordings can still be replayed.
    """
    code = frame.f_code
    place = code.co_qualname, (frame.f_lineno or 0) - code.co_firstlineno  # generated code may have no lines
    key = _READING_KEYS.get(place)
    if key is None:
        name, line = place
        key = _READING_KEYS[place] = zlib.crc32(f"{name}+{line}".encode()) & 0xFFFF
    return key


def set_sleeps_by(loop: asyncio.AbstractEventLoop, set_timer: SetTimer) -> Callable[[], None]:
    """Let ``set_timer`` set the timers of asyncio's ``sleep``, ``timeout``, ``wait_for`` and ``wait``.

    A replay fires each timer at its position in the recording. Timers that code sets directly on the loop are not
    changed.

    Returns:
        A function that restores the loop.
    """
    replaced: Any = loop
    call_at, call_later, numbers = loop.call_at, loop.call_later, itertools.count()

    def at(when: float, callback: Callable[..., object], *args: Any, context: contextvars.Context | None = None) -> Any:
        if not _is_of_asyncio(callback):
            return call_at(when, callback, *args, context=context)
        return set_timer(WaitId(WaitKind.SLEEP, number=next(numbers)), when, callback, args, context)

    def later(
        delay: float, callback: Callable[..., object], *args: Any, context: contextvars.Context | None = None
    ) -> Any:
        if not _is_of_asyncio(callback):
            return call_later(delay, callback, *args, context=context)
        return at(loop.time() + delay, callback, *args, context=context)

    def undo() -> None:
        replaced.call_at, replaced.call_later = call_at, call_later

    replaced.call_at, replaced.call_later = at, later
    return undo


def _is_of_asyncio(callback: Callable[..., object]) -> bool:
    return str(getattr(callback, "__module__", None)).startswith("asyncio.")


def _conditions(world: World) -> dict[str, Any]:
    """Return the data that a replay needs in addition to the events, such as capabilities and random states."""
    version, numbers, gauss = random.getstate()
    numpy_state: Any = numpy.random.get_state(legacy=False)
    if numpy_state["bit_generator"] == "MT19937":
        own, others = numpy_state["state"], (numpy_state["has_gauss"], numpy_state["gauss"])
        numpy_fields = ["MT19937", own["key"].tobytes(), *map(float, (own["pos"], *others))]
    else:
        numpy_fields = None  # a replay does not repeat the numbers of other generators
    return {
        "nonce": world.services.nonce,
        "hosts": None if world.services.hosts is None else list(world.services.hosts),
        "capabilities": asdict(world.services.engine.transport.capabilities),
        "thread_count": torch.get_num_threads(),
        "first_seed": _FIRST_SEED,
        "random": {
            "python": [version, list(numbers), gauss],
            "numpy": numpy_fields,
            "torch": torch.get_rng_state().numpy().tobytes(),
        },
    }
