"""Reads the snapshots of ranks on this host in their own memory: their loops do nothing for it, and no byte is sent.

A receiver asks where the round's snapshot of a donor lies (:class:`LocateRequest`), in place of a stream. The donor
answers once, when it has the snapshot, and may compute from then on. Whether a donor can be read is found out in the
first round with it, in which its snapshot is streamed and the answer is only tried.

A piece that was read counts if the donor's token still lies where it was (:mod:`asyncdist.host_memory
.cross_memory_attach`): the donor takes it back before it uses the memory for anything else. So what is read is the
snapshot of that round, or nothing.
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

#: Smaller snapshots are streamed: one message is as quick as an answer and a system call.
READ_NBYTES_MIN: Final = 1 << 20
#: Rounds in which it is tried whether a donor can be read: a snapshot may be withdrawn before the first trial.
TRIAL_COUNT: Final = 3


class Neighbours:
    """Knows whose memory this rank can read, and what it has asked for.

    Args:
        services: of this rank.
        channel: of the policy's parameter streams.
    """

    def __init__(self, services: Services, channel: Channel[StreamMessage]) -> None:
        self._services = services
        self._channel = channel
        self._is_possible = services.shares_memory
        self._readable: set[int] = set()
        self._failures: Counter[int] = Counter()
        self._asked: dict[int, Reading] = {}  # by slot
        self._last_slot = 0

    def ask(self, donor: int, nbytes: int, *, round: int, mean_of: Part | None = None) -> Reading | None:
        """Ask a donor where its snapshot lies, or a reducer where its mean does.

        Args:
            donor: the rank.
            nbytes: that are to be read.
            round: goes into the frame's header.
            mean_of: the part whose mean is asked for; None for a donor's snapshot.

        Returns:
            The reading, to be closed; None where the snapshot has to be streamed, this time or always.

        Raises:
            RankLostError: the rank is gone.
            BusyError: thousands of messages have not left yet.
        """
        if not self._is_possible or nbytes < READ_NBYTES_MIN or self._failures[donor] >= TRIAL_COUNT:
            return None
        self._last_slot -= 1
        self._channel.send_nowait(LocateRequest(self._last_slot, *(mean_of or ())), donor, round=round)
        reading = self._asked[self._last_slot] = Reading(self._services, self, donor, self._last_slot)
        return reading if donor in self._readable else None

    def on_location(self, donor: int, location: Location) -> None:
        """Take an answer; one that nobody waits for any more is dropped."""
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
        """Stream the next snapshot of a donor that could not be read, and after some failures all that follow.

        One that has just withdrawn its snapshot cannot be told from one that is out of reach.
        """
        self._readable.discard(donor)
        self._failures[donor] += 1

    def note_success(self, donor: int) -> None:
        """Forget the failures of a donor whose snapshot has been read whole."""
        del self._failures[donor]

    def close(self, slot: int) -> None:
        """Drop the answer that was asked for under that slot."""
        self._asked.pop(slot, None)

    def forget(self, rank: int) -> None:
        """Begin anew with a rank that has been started again."""
        self._readable.discard(rank)
        del self._failures[rank]
        for slot in [slot for slot, reading in self._asked.items() if reading.donor == rank]:
            del self._asked[slot]


class Reading:
    """Reads one snapshot of one donor.

    Args:
        services, neighbours: of this rank.
        donor: the rank.
        slot: the number of the request.

    Attributes:
        donor: as given.
        process: the donor's; None before it has answered, and where it cannot be read.
        received_nbytes: read so far.
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
        """Take the donor's answer."""
        self._tensors = location.tensors
        if location.tensors:
            try:
                process = PeerProcess(location.pid, location.address, location.token)
                for address in filter(None, location.tensors):  # memory that a device has pinned may be out of reach
                    process.read(address, self._trial.data_ptr(), self._trial.nbytes)
            except OSError as error:  # of another host, or not allowed
                logger.debug("rank %d cannot be read: %s", self.donor, error)
            else:
                self.process = process
        self._services.engine.recheck()

    async def located(self, *, deadline: float | None) -> None:
        """Wait until it is known where the snapshot lies.

        Raises:
            TimeoutError: the deadline passed.
            RankLostError: the donor is gone.
            StreamAborted: the donor gives none, or it cannot be read any more.
        """
        gone = self._services.gone
        if not await self._services.engine.until(
            lambda: self._tensors is not None or self.donor in gone,
            WaitId(WaitKind.DONOR_SNAPSHOT, number=self.donor),
            deadline=deadline,
        ):
            raise TimeoutError(f"rank {self.donor} has not said in time where its snapshot lies")
        if self._tensors is None:
            raise RankLostError(f"rank {self.donor} is gone", rank=self.donor)
        if self.process is None:
            raise self._aborted("gave no snapshot" if not self._tensors else "can be read no more")

    def read(self, number: int, first: int, into: torch.Tensor) -> None:
        """Read a piece of the snapshot.

        Args:
            number: of the tensor in the snapshot, which is flat.
            first: the element of it that the piece begins with.
            into: takes the piece: flat, of the snapshot's dtype, and of this process's own memory.

        Raises:
            StreamAborted: the donor has withdrawn its snapshot, or has ended.
        """
        assert self.process is not None and self._tensors is not None, "nothing is located"
        try:
            self.process.read(self._tensors[number] + first * into.itemsize, into.data_ptr(), into.nbytes)
        except (OSError, IndexError) as error:
            self._neighbours.note_failure(self.donor)
            raise self._aborted(f"has withdrawn its snapshot, or cannot be read: {error}") from error
        self.received_nbytes += into.nbytes
        self._services.read_nbytes += into.nbytes

    def complete(self) -> None:
        """Note that all has been read."""
        self._neighbours.note_success(self.donor)

    def close(self) -> None:
        """Expect no answer any more."""
        self._neighbours.close(self._slot)

    def _aborted(self, what: str) -> AsyncdistError:
        return StreamAborted(f"rank {self.donor} {what}", rank=self.donor, received_nbytes=self.received_nbytes)


class PartReading:
    """Reads a part of a snapshot, or the mean of one, and has the face of the stream that would bring it.

    Args:
        reading: of the snapshot, or of the mean.
        pieces: number of the tensor, first element, and where they go, one piece after the other.
    """

    def __init__(self, reading: Reading, pieces: Sequence[tuple[int, int, torch.Tensor]]) -> None:
        self._reading = reading
        self._pieces = pieces

    @property
    def received_nbytes(self) -> int:
        """Read so far."""
        return self._reading.received_nbytes

    async def whole(self, *, deadline: float | None = None) -> None:
        """Read all of it, and let the loop run after each piece. Raises as :meth:`Reading.located` and ``read``."""
        await self._reading.located(deadline=deadline)
        for piece in self._pieces:
            self._reading.read(*piece)
            await yield_to_loop()
        self._reading.complete()

    def finish(self, cancel: object = None) -> None:
        """Expect no answer any more; nobody need be told."""
        del cancel
        self._reading.close()
