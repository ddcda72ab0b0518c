"""Requests bytes that another rank offers, such as a slice of a contribution or of a mean, or a whole anchor."""

from __future__ import annotations

from typing import Final

import torch
from torch import Tensor

from asyncdist.messaging.engine import yield_to_loop
from asyncdist.messaging.services import Services
from asyncdist.messaging.streams import InboundStream, StreamAborted
from asyncdist.protocols.parameter_stream.neighbours import Reading
from asyncdist.protocols.parameter_stream.parts import Part
from asyncdist.protocols.parameter_stream.receiver import ask_for_part, cancel_stream
from asyncdist.protocols.parameter_stream.server import SnapshotServer
from asyncdist.tensors.flat_state import FlatBuffers

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
