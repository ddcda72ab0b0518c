"""Offers bytes to other ranks, and requests bytes that other ranks offer, such as slices of a mean, or an anchor."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Container, Coroutine
from typing import Any, Final

import torch
from torch import Tensor

from asyncdist import RankLostError
from asyncdist.messaging.engine import yield_to_loop
from asyncdist.messaging.services import Services
from asyncdist.messaging.streams import WINDOW_COUNT, InboundStream, StreamAborted
from asyncdist.protocols.parameter_stream.messages import PART_CHUNK_COUNT
from asyncdist.protocols.parameter_stream.neighbours import Reading
from asyncdist.protocols.parameter_stream.parts import Part
from asyncdist.protocols.parameter_stream.receiver import ask_for_part, cancel_stream
from asyncdist.protocols.parameter_stream.server import Offer, SnapshotServer
from asyncdist.tensors.flat_state import FlatBuffers

logger = logging.getLogger("protocols.exchange.fetch")

_LABEL_COUNT: Final = 2
#: Labels that distinguish two blocks with the same number, such as an anchor and an outer state.
FIRST: Final = Part(0, _LABEL_COUNT)
SECOND: Final = Part(1, _LABEL_COUNT)
#: Maximum number of requests for the same bytes to a living rank. The caller gets the error of the last request.
REQUEST_COUNT_MAX: Final = 8


class Fetch:
    """Requests bytes from another rank. Repeats the request if the source's memory could not be read directly.

    Args:
        server: This rank's server on the channel through which the source offers the bytes.
        number: Number under which the source offers the bytes.
        into: uint8 tensor that receives the bytes.
        chunk_count: Number of chunks in which the source usually sends the bytes.

    Attributes:
        is_whole: Whether all bytes have been received or read.
    """

    def __init__(
        self,
        services: Services,
        server: SnapshotServer,
        number: int,
        source: int,
        into: Tensor,
        label: Part,
        chunk_count: int,
    ) -> None:
        self._services = services
        self._server = server
        self._number = number
        self._source = source
        self._into = into
        self._label = label
        self._chunk_count = chunk_count
        self._stream: InboundStream | Reading | None = None
        self.is_whole = False

    def ask(self) -> None:
        """Send the request to the source."""
        self._stream = ask_for_part(
            self._services,
            self._server,
            self._source,
            as_buffers(self._into),
            self._label,
            sizes={},
            round=self._number,
            of_mean=True,
            chunk_count=self._chunk_count,
        )
        self.is_whole = self._stream is None  # there are no bytes, as in a model with only empty tensors

    def renew(self) -> None:
        """Request the bytes again, unless they have arrived."""
        if not self.is_whole:
            self.close()
            self.ask()

    async def whole(self, *, in_place: bool = False) -> Tensor:
        """Wait until the bytes have arrived, and return them.

        Args:
            in_place: Whether the result may be the source's memory, if this rank has mapped it. The bytes may then be
                used only if :meth:`check` succeeds afterwards.

        Raises:
            RankLostError: The source is lost.
            StreamAborted: The source does not offer the bytes.
        """
        count = 0
        while True:
            count += 1
            try:
                return await self._arrival(in_place)
            except StreamAborted:
                if count == REQUEST_COUNT_MAX or self._source in self._services.gone:
                    raise
                self.renew()
                await yield_to_loop()

    async def _arrival(self, in_place: bool) -> Tensor:
        if self._stream is None:
            assert self.is_whole, "the bytes were not requested"
            return self._into
        if in_place and isinstance(self._stream, Reading):
            await self._stream.located()
            found = self._stream.view(0, 0, self._into.nbytes)
            if found is not None:
                return found
        await self._stream.whole()
        self.complete()
        return self._into

    async def ready(self) -> None:
        """Wait until :meth:`piece` can return any range of the bytes. Raises the errors of :meth:`whole`."""
        if isinstance(self._stream, Reading):
            await self._stream.located()
        elif not self.is_whole:
            await self.whole()

    def piece(self, first: int, end: int, scratch: Tensor) -> Tensor:
        """Return the bytes from ``first`` to ``end``, read into ``scratch`` if necessary.

        The bytes may be used only if :meth:`check` succeeds afterwards.
        """
        if not isinstance(self._stream, Reading):
            return self._into[first:end]
        found = self._stream.view(0, first, end - first)
        if found is None:
            found = scratch[: end - first]
            self._stream.read(0, first, found)
        return found

    def check(self) -> None:
        """Check that the source has not withdrawn the bytes.

        Raises:
            StreamAborted: The source has withdrawn the bytes.
        """
        if isinstance(self._stream, Reading):
            self._stream.check()

    def complete(self) -> None:
        """Record that all bytes have been received or read."""
        if self._stream is not None:
            if isinstance(self._stream, Reading):
                self._stream.complete()
            self.is_whole = True
            self.close()

    def close(self) -> None:
        """Ask the source to stop sending, unless all bytes have arrived."""
        stream, self._stream = self._stream, None
        if stream is not None:
            channel, number = self._server.channel, self._number
            stream.finish(lambda stream: cancel_stream(self._services, channel, stream, number))


def as_buffers(part: Tensor) -> FlatBuffers:
    """Return a uint8 tensor as buffers that a :class:`SnapshotServer` can offer."""
    return FlatBuffers((), {torch.uint8: part}, ())


class Offers:
    """Offers and fetches blocks of bytes on one channel. A block is identified by a number and a label.

    Args:
        is_overlapped: Whether ranks train during transfers. Equal on all members.
    """

    def __init__(self, services: Services, scope: int, *, is_overlapped: bool) -> None:
        self._services = services
        self._server = SnapshotServer(services, scope)
        # A training rank sends one window of chunks per safe point (call that lets messages move). A waiting rank sends
        # smaller chunks.
        self._chunk_count = WINDOW_COUNT if is_overlapped else PART_CHUNK_COUNT
        self._offered: dict[tuple[int, Part], tuple[Offer, set[int]]] = {}
        self._last = 0  # largest number of a block that was offered
        self._tasks: set[asyncio.Task[Any]] = set()

    @property
    def is_idle(self) -> bool:
        """True if no receiver still needs an offered block."""
        return not self._offered

    def offer(self, number: int, memory: Tensor, receiver: int, label: Part = FIRST) -> None:
        """Offer the bytes of ``memory`` to ``receiver``. The caller must not change them afterwards."""
        key, self._last = (number, label), max(self._last, number)
        if key not in self._offered:
            offer = Offer(number, as_buffers(memory), lambda _: None, mean_of=label, chunk_count=self._chunk_count)
            self._offered[key] = self._server.offer(offer, ends_earlier=False), set()
        self._offered[key][1].add(receiver)

    def note_taken(self, receiver: int, number: int | None = None) -> None:
        """Record that a rank has the blocks with ``number`` or, if ``number`` is None, needs no blocks."""
        for key, (offer, receivers) in list(self._offered.items()):
            if number is None or key[0] == number:
                receivers.discard(receiver)
                if not receivers:
                    del self._offered[key]
                    self._server.withdraw(offer)
        # Receivers request only offered blocks, so requests for numbers below the first offered block's can no longer
        # arrive.
        self._server.end_rounds(min((key[0] - 1 for key in self._offered), default=self._last))
        self._services.engine.recheck()

    def note_lost(self, living: Container[int]) -> None:
        """Stop offering blocks to ranks that are not in ``living``."""
        for receiver in {rank for _, receivers in self._offered.values() for rank in receivers if rank not in living}:
            self.note_taken(receiver)

    async def fetch(self, source: int, number: int, into: Tensor, name: str, label: Part = FIRST) -> bool:
        """Receive the block with the given number and label from ``source``.

        Returns:
            False if the source is lost or does not offer the block. This is logged with the block's ``name``.
        """
        fetch = Fetch(self._services, self._server, number, source, into, label, self._chunk_count)
        try:
            fetch.ask()
            await fetch.whole()
        except (RankLostError, StreamAborted) as error:
            logger.info("%s of rank %d did not arrive: %s", name, source, error)
            return False
        finally:
            fetch.close()
        return True

    def spawn(self, coroutine: Coroutine[Any, Any, None], name: str) -> asyncio.Task[None]:
        """Start a task of this object, which :meth:`close` cancels."""
        task = self._services.spawn_service(coroutine, name=name)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    def admit(self, rank: int) -> None:
        """Allow messages to and from the new process of a restarted rank."""
        self._server.channel.admit(rank)

    def close(self) -> None:
        """Cancel all tasks, and stop offering blocks."""
        for task in list(self._tasks):
            task.cancel()
        for offer, _ in self._offered.values():
            self._server.withdraw(offer)
        self._offered.clear()
        self._server.close()
