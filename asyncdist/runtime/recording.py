"""Records what happens on a rank, where its user wants that: messages, waits, and what protocols tell."""

from __future__ import annotations

import asyncio
import functools

from asyncdist.messaging.services import Services, clock_of
from asyncdist.recording.writer import RecordOptions, RecordWriter, header_of
from asyncdist.runtime.world import World
from asyncdist.transports.base import Transport
from asyncdist.transports.recorded import RecordedTransport

#: What is there is handed to the kernel so often, also while nothing happens.
_FLUSH_PERIOD_S = 1.0


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
        if options is not None:
            self._writer = RecordWriter(options, clock_of(loop), transport.rank)
            self.transport = RecordedTransport(transport, self._writer.note)

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
        writer.open(header)
        world.services.events.sink = writer.add
        world.services.engine.on_waited = functools.partial(self._note_wait, writer, world.services)
        if not transport.capabilities.shares_process:  # which cannot be killed without the writer's process
            self._tick(writer)

    def _note_wait(self, writer: RecordWriter, services: Services, what: str, seconds: float) -> None:
        """Write down a wait of the user's tasks; services of protocols wait all the time."""
        if not services.is_service(asyncio.current_task()):
            writer.note_wait(what, seconds)

    def _tick(self, writer: RecordWriter) -> None:
        writer.flush()
        if writer.is_recording:
            self._timer = self._loop.call_later(_FLUSH_PERIOD_S, functools.partial(self._tick, writer))

    def note_end(self, error: BaseException | None) -> None:
        """Write down how main ended; what follows may end the process."""
        if self._writer is not None:
            self._writer.note("over", "" if error is None else f"{type(error).__name__}: {error}"[:1000])
            self._writer.flush()

    def close(self) -> None:
        """End the file."""
        if self._timer is not None:
            self._timer.cancel()
        if self._writer is not None:
            self._writer.close()
