"""Records what happens on a rank, where its user wants that: messages, waits, and what protocols tell."""

from __future__ import annotations

import asyncio
import contextvars
import functools
import random
import sys
from collections.abc import Callable
from dataclasses import asdict
from typing import Any, Final

import numpy
import torch

from asyncdist.messaging.engine import Engine
from asyncdist.messaging.services import clock_of
from asyncdist.recording.events import BEFORE_WORLD
from asyncdist.recording.observer import Observer
from asyncdist.recording.writer import RecordOptions, RecordWriter, header_of
from asyncdist.runtime.sleeps import set_sleeps_by
from asyncdist.runtime.world import World
from asyncdist.transports.base import Transport
from asyncdist.transports.recorded import RecordedTransport
from asyncdist.waits import WaitId

#: What is there is handed to the kernel so often, also while nothing happens.
_FLUSH_PERIOD_S: Final = 1.0

#: Longer results of MPI's reductions are not written down: a recording is to be small beside what is trained.
_RESULT_NBYTES_MAX: Final = 1024

#: Of torch as it was imported, or what the program had seeded it with before it imported this.
_FIRST_SEED: Final = torch.initial_seed()


class Recording:
    """Writes down one rank's life.

    Args:
        options: None where nothing is to be written.
        transport: the rank's.
        loop: runs the rank.

    Attributes:
        transport: to be used in place of the one given.
    """

    def __init__(self, options: RecordOptions | None, transport: Transport, loop: asyncio.AbstractEventLoop) -> None:
        self.transport = transport
        self._loop = loop
        self._timer: asyncio.TimerHandle | None = None
        self._writer: RecordWriter | None = None
        self._engine: Engine | None = None
        self._sent_before_count = 0  # before the world was open
        self._leave_loop: Callable[[], None] = lambda: None
        if options is not None:
            self._writer = RecordWriter(options, clock_of(loop), transport.rank)
            self.transport = RecordedTransport(transport, functools.partial(self._note_message, self._writer))

    def begin(self, world: World) -> None:
        """Begin the file, since the job is known."""
        writer, transport = self._writer, self.transport
        if writer is None:
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
        tells_sleeps = is_simulated or not transport.capabilities.shares_process  # else ranks share the loop
        told = {"sent_before_count": self._sent_before_count, "tells_sleeps": tells_sleeps, "tells_collectives": True}
        writer.open({**header, **_conditions(world), **told})
        services, engine = world.services, world.services.engine
        engine.woken_count = engine.begun_count = 0  # a replay opens the world in another way
        services.events.sink = writer.add
        services.count_waits(writer.note_wait)
        services.end_recording = functools.partial(self._end, writer)
        engine.observer = _Recorder(writer, engine, is_native=transport.capabilities.native_collectives)
        engine.clock = services.time = world.time = functools.partial(self._read_clock, writer, services.time)
        self._engine = engine
        if tells_sleeps:
            self._tell_sleeps(engine)
        if not transport.capabilities.shares_process:  # which cannot be killed without the writer's process
            self._tick(writer)

    def _note_message(self, writer: RecordWriter, kind: str, peer: int, tag: int, nbytes: int) -> None:
        if kind == "received":
            engine = self._engine
            if engine is None:
                writer.note(kind, peer, tag, nbytes, BEFORE_WORLD, 0)
            else:
                number = engine._pass_count % 65536 if engine._in_pass else -1
                writer.note(kind, peer, tag, nbytes, number, engine.turn, engine.woken_count, engine.begun_count)
        else:
            self._sent_before_count += self._engine is None
            writer.note(kind, peer, tag, nbytes)

    def _tell_sleeps(self, engine: Engine) -> None:
        """Note when asyncio's timers fire: what sleeps goes on right after that."""
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

    @staticmethod
    def _read_clock(writer: RecordWriter, clock: Callable[[], float]) -> float:
        seconds = clock()
        writer.add(seconds, "clock", (seconds, sys._getframe(1).f_lineno))
        return seconds

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
        """Write down how main ended; what follows may end the process."""
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


class _Recorder(Observer):
    """Writes down what the engine tells.

    Args:
        writer: of the rank's events.
        engine: counts places.
        is_native: whether MPI carries collectives, and reduces in an order of its own.
    """

    def __init__(self, writer: RecordWriter, engine: Engine, *, is_native: bool) -> None:
        super().__init__()
        self._writer = writer
        self._engine = engine
        self._is_native = is_native

    def on_safe_point_begun(self, woken_count: int) -> None:
        self._writer.begin_safe_point(woken_count)

    def on_safe_point_ended(self, turn: int) -> None:
        self._writer.end_safe_point(turn)

    def on_deadline(self, what: WaitId) -> None:
        self._writer.note("deadline", what, self._engine.turn, self._engine.woken_count)

    def on_timer(self, what: WaitId) -> None:
        engine = self._engine
        self._writer.note("timer", what, engine.turn, engine.woken_count, engine.begun_count)

    def on_collective_ended(self, tag: int) -> None:
        self._writer.note("collective", tag, self._engine.turn, self._engine.woken_count)

    def on_collective_failed(self) -> None:
        self._writer.note("failed", self._engine.turn, self._engine.woken_count)

    def on_reduced(self, tag: int, result: memoryview) -> None:
        if self._is_native:
            nbytes = len(result)
            self._writer.note("reduced", tag, nbytes, result.hex() if nbytes <= _RESULT_NBYTES_MAX else "")

    def measured(self, what: WaitId, value: int) -> int:
        self._writer.note("measured", what, value)
        return value


def _conditions(world: World) -> dict[str, Any]:
    """Return what a replay needs to know of the rank beside its events, for the header."""
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
