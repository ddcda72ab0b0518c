"""Reads snapshots directly from the memory of other processes on this host, without sending them.

Instead of a stream, a receiver asks for the address of a donor's snapshot (:class:`LocateRequest`). The donor answers
once, when it has the snapshot; the read itself needs nothing from the donor's event loop. In the first round with a
donor, its snapshot is streamed, and the answer only serves to try whether its memory can be read.

A piece counts as read only if the donor's token was still valid after the read (:mod:`asyncdist.host_memory
.cross_memory_attach`). The donor revokes its token before it uses the memory for anything else. A read therefore yields
the snapshot of the right round, or fails.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Sequence
from typing import Final

import torch

from asyncdist import AsyncdistError, RankLostError
from asyncdist.host_memory.cross_memory_attach import PeerProcess
from asyncdist.messaging.channels import Channel
from asyncdist.messaging.engine import yield_to_loop
from asyncdist.messaging.services import Services
from asyncdist.messaging.streams import StreamAborted
from asyncdist.protocols.parameter_stream.messages import LocateRequest, Location, StreamMessage
from asyncdist.protocols.parameter_stream.parts import Part
from asyncdist.waits import WaitId, WaitKind

logger = logging.getLogger("protocols.parameter_stream.neighbours")

#: Smaller snapshots are streamed: one message is as fast as an answer and a system call.
READ_NBYTES_MIN: Final = 1 << 20
#: Number of failures after which a donor is no longer read. One is not enough: its snapshot may just have been
#: withdrawn.
TRIAL_COUNT: Final = 3


class Neighbours:
    """Tracks the ranks whose memory this rank can read, and its pending requests."""

    def __init__(self, services: Services, channel: Channel[StreamMessage]) -> None:
        self._services = services
        self._channel = channel
        self._is_possible = services.shares_memory
        self._readable: set[int] = set()
        self._failures: Counter[int] = Counter()
        self._asked: dict[int, Reading] = {}  # by slot
        self._last_slot = 0

    def ask(self, donor: int, nbytes: int, *, round: int, mean_of: Part | None = None) -> Reading | None:
        """Ask a donor for the address of its snapshot, or a reducer for that of its mean.

        Args:
            donor: Rank of the donor or reducer.
            nbytes: Number of bytes to read.
            round: Round of the snapshot, carried in the frame's header.
            mean_of: Part whose mean is requested; None for a donor's snapshot.

        Returns:
            The reading, which the caller closes; None if the snapshot must be streamed, this time or always.

        Raises:
            RankLostError: The rank is gone.
            BusyError: Thousands of messages have not left yet.
        """
        if not self._is_possible or nbytes < READ_NBYTES_MIN or self._failures[donor] >= TRIAL_COUNT:
            return None
        self._last_slot -= 1
        self._channel.send_nowait(LocateRequest(self._last_slot, *(mean_of or ())), donor, round=round)
        reading = self._asked[self._last_slot] = Reading(self._services, self, donor, self._last_slot)
        return reading if donor in self._readable else None

    def on_location(self, donor: int, location: Location) -> None:
        """Pass a donor's answer to its reading; drop the answer if the reading was closed."""
        reading = self._asked.get(location.slot)
        if reading is None or reading.donor != donor:
            return
        del self._asked[location.slot]
        reading.on_location(location)
        if reading.process is not None:
            self._readable.add(donor)
        elif location.tensors:
            self.note_failure(donor)

    def note_failure(self, donor: int) -> None:
        """Stream the next snapshot of a donor that could not be read; after ``TRIAL_COUNT`` failures, stream all.

        A donor that has just withdrawn its snapshot cannot be distinguished from a donor whose memory is out of reach.
        """
        self._readable.discard(donor)
        self._failures[donor] += 1

    def note_success(self, donor: int) -> None:
        """Forget the failures of a donor whose snapshot was read completely."""
        del self._failures[donor]

    def close(self, slot: int) -> None:
        """Drop the pending request of ``slot``."""
        self._asked.pop(slot, None)

    def forget(self, rank: int) -> None:
        """Forget whether a restarted rank could be read, and drop the requests to it."""
        self._readable.discard(rank)
        del self._failures[rank]
        for slot in [slot for slot, reading in self._asked.items() if reading.donor == rank]:
            del self._asked[slot]


class Reading:
    """Reads one snapshot of one donor.

    Args:
        services: This rank's services.
        neighbours: Tracker that made the request.
        donor: Rank of the donor.
        slot: Number of the request.

    Attributes:
        donor: Rank of the donor.
        process: Donor's process; None until the donor has answered, or if its memory cannot be read.
        received_nbytes: Number of bytes read so far.
    """

    def __init__(self, services: Services, neighbours: Neighbours, donor: int, slot: int) -> None:
        self._services = services
        self._neighbours = neighbours
        self._slot = slot
        self._tensors: tuple[int, ...] | None = None
        self._trial = torch.empty(1, dtype=torch.uint8, device="cpu")
        self.donor = donor
        self.process: PeerProcess | None = None
        self.received_nbytes = 0

    def on_location(self, location: Location) -> None:
        """Store the donor's answer, and try to read a byte of each tensor."""
        self._tensors = location.tensors
        if location.tensors:
            try:
                process = PeerProcess(location.pid, location.address, location.token)
                for address in filter(None, location.tensors):  # memory pinned by a device may be out of reach
                    process.read(address, self._trial.data_ptr(), self._trial.nbytes)
            except OSError as error:  # the process is on another host, or reading is not allowed
                logger.debug("the memory of rank %d cannot be read: %s", self.donor, error)
            else:
                self.process = process
        self._services.engine.recheck()

    async def located(self, *, deadline: float | None) -> None:
        """Wait until the donor has answered with the snapshot's address.

        Raises:
            TimeoutError: The deadline passed.
            RankLostError: The donor is gone.
            StreamAborted: The donor has no snapshot for the round, or its memory can no longer be read.
        """
        gone = self._services.gone
        if not await self._services.engine.until(
            lambda: self._tensors is not None or self.donor in gone,
            WaitId(WaitKind.DONOR_SNAPSHOT, number=self.donor),
            deadline=deadline,
        ):
            raise TimeoutError(f"rank {self.donor} did not answer with the address of its snapshot in time")
        if self._tensors is None:
            raise RankLostError(f"rank {self.donor} is gone", rank=self.donor)
        if self.process is None:
            raise self._aborted("gave no snapshot" if not self._tensors else "can no longer be read")

    def read(self, number: int, first: int, into: torch.Tensor) -> None:
        """Read a piece of the snapshot.

        Args:
            number: Index of the flat tensor in the snapshot.
            first: Index of the piece's first element in that tensor.
            into: Flat tensor that receives the piece, of the snapshot's dtype, in this process's own memory.

        Raises:
            StreamAborted: The donor has withdrawn its snapshot, or has ended.
        """
        assert self.process is not None and self._tensors is not None, "read() before located()"
        try:
            self.process.read(self._tensors[number] + first * into.itemsize, into.data_ptr(), into.nbytes)
        except (OSError, IndexError) as error:
            self._neighbours.note_failure(self.donor)
            raise self._aborted(f"has withdrawn its snapshot, or cannot be read: {error}") from error
        self.received_nbytes += into.nbytes
        self._services.read_nbytes += into.nbytes

    def complete(self) -> None:
        """Note that the whole snapshot was read."""
        self._neighbours.note_success(self.donor)

    def close(self) -> None:
        """Drop the request; a later answer is ignored."""
        self._neighbours.close(self._slot)

    def _aborted(self, what: str) -> AsyncdistError:
        return StreamAborted(f"rank {self.donor} {what}", rank=self.donor, received_nbytes=self.received_nbytes)


class PartReading:
    """Reads one part of a snapshot, or the mean of a part, with the interface of an inbound stream.

    Args:
        reading: Reading of the snapshot or of the mean.
        pieces: For each piece, the index of its tensor, the index of its first element, and the receiving tensor.
    """

    def __init__(self, reading: Reading, pieces: Sequence[tuple[int, int, torch.Tensor]]) -> None:
        self._reading = reading
        self._pieces = pieces

    @property
    def received_nbytes(self) -> int:
        """Number of bytes read so far."""
        return self._reading.received_nbytes

    async def whole(self, *, deadline: float | None = None) -> None:
        """Read all pieces, and yield to the loop after each. Raises as :meth:`Reading.located` and ``read``."""
        await self._reading.located(deadline=deadline)
        for piece in self._pieces:
            self._reading.read(*piece)
            await yield_to_loop()
        self._reading.complete()

    def finish(self, cancel: object = None) -> None:
        """Drop the request. The source needs no cancel message."""
        del cancel
        self._reading.close()
