"""Offers blocks of bytes to individual ranks, and fetches blocks that other ranks offer."""

from __future__ import annotations

import asyncio
from collections.abc import Container, Coroutine
from typing import Any, Final

from torch import Tensor

from asyncdist.messaging.services import Services
from asyncdist.messaging.streams import WINDOW_COUNT
from asyncdist.protocols.exchange.fetch import Fetch, as_buffers
from asyncdist.protocols.parameter_stream.messages import PART_CHUNK_COUNT
from asyncdist.protocols.parameter_stream.parts import Part
from asyncdist.protocols.parameter_stream.server import Offer, SnapshotServer

_LABEL_COUNT: Final = 2
#: Labels that distinguish two blocks with the same number, such as an anchor and an outer state.
FIRST: Final = Part(0, _LABEL_COUNT)
SECOND: Final = Part(1, _LABEL_COUNT)


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
        # Receivers request only offered blocks, so no request for a smaller number than that of the first offered block
        # can follow.
        self._server.end_rounds(min((key[0] - 1 for key in self._offered), default=self._last))
        self._services.engine.recheck()

    def note_lost(self, living: Container[int]) -> None:
        """Stop offering blocks to ranks that are not in ``living``."""
        for receiver in {rank for _, receivers in self._offered.values() for rank in receivers if rank not in living}:
            self.note_taken(receiver)

    async def fetch(self, source: int, number: int, into: Tensor, label: Part = FIRST) -> None:
        """Receive the block with a number and a label from ``source``.

        Raises:
            RankLostError: The source is lost.
            StreamAborted: The source does not offer the block.
        """
        fetch = Fetch(self._services, self._server, number, source, into, label, self._chunk_count)
        try:
            fetch.ask()
            await fetch.whole()
        finally:
            fetch.close()

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
