"""Reads snapshots directly from the memory of other processes on this host, instead of receiving them as streams.

A receiver asks for the address of a donor's snapshot (:class:`LocateRequest`), and the donor answers when it has the
snapshot. Before the donor reuses the memory, it revokes its token (:mod:`asyncdist.host_memory.cross_memory_attach`). A
read is therefore valid only if the token is still valid afterwards.

If a donor's memory was not tested yet, its first snapshot is streamed, and the donor's answer only serves as the test.
In an exchange (:mod:`protocols.exchange`), the ranks of a host therefore test their memory when the policy starts
(:meth:`Neighbours.introduce`): each rank sends the address of a few bytes, and the others try to read them.

If the donor's tensors are in shared memory (:mod:`asyncdist.host_memory.shared_memory`), the receiver maps this memory
and uses the tensors in place. Otherwise the receiver copies the tensors, which takes twice as long as adding them up.
"""

from __future__ import annotations

import contextlib
import logging
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Final, TypeAlias

import torch

from asyncdist import AsyncdistError, RankLostError
from asyncdist.host_memory.cross_memory_attach import AttachToken, PeerProcess
from asyncdist.host_memory.shared_memory import Address, find, order_memory
from asyncdist.messaging.channels import Channel
from asyncdist.messaging.engine import yield_to_loop
from asyncdist.messaging.services import Services
from asyncdist.messaging.streams import StreamAborted
from asyncdist.protocols.parameter_stream.messages import LocateRequest, Location, StreamMessage
from asyncdist.protocols.parameter_stream.parts import Part
from asyncdist.waits import WaitId, WaitKind

logger = logging.getLogger("protocols.parameter_stream.neighbours")

#: Index of a tensor in the snapshot, index of the first element to read, and the tensor that receives the elements.
Piece: TypeAlias = tuple[int, int, torch.Tensor]

#: Minimum size in bytes of a snapshot that is read from memory. Streaming a smaller snapshot is at least as fast.
READ_NBYTES_MIN: Final = 1 << 20
#: Number of failed reads after which a donor's memory is no longer read. One failure may only mean that the round ended
#: during the read.
TRIAL_COUNT: Final = 3
#: Slot of a :class:`Location` that no rank has asked for.
_INTRODUCTION: Final = 0
#: Number of shared memory blocks per donor that stay mapped, since mapping a block again costs page faults.
_MAPPED_COUNT: Final = 8


class Neighbours:
    """Tracks which processes' memory this rank can read, and requests the addresses of their snapshots.

    Attributes:
        channel: Channel of the snapshot server, set by the server. It may deliver early messages before it is set.
    """

    channel: Channel[StreamMessage]

    def __init__(self, services: Services) -> None:
        self._services = services
        self._is_possible = services.shares_memory
        self._readable: set[int] = set()
        self._failures: Counter[int] = Counter()
        self._asked: dict[int, Reading] = {}  # by slot: readings that are waiting for an answer
        self._mapped: dict[int, dict[bytes, torch.Tensor]] = {}  # by donor and packed address, last used at the end
        self._last_slot = 0
        self._card: AttachToken | None = None

    def introduce(self, ranks: Iterable[int], nbytes: int) -> None:
        """Let ``ranks`` test now whether they can read this process's memory, if they are on the same host.

        Args:
            nbytes: Size in bytes of the largest snapshot. Nothing is sent if snapshots are too small to be read.
        """
        hosts, me = self._services.hosts, self._services.rank
        if not self._is_possible or nbytes < READ_NBYTES_MIN:
            return
        self._card = card = AttachToken()
        location = Location(_INTRODUCTION, card.pid, card.address, card.token, (card.address,))
        for rank in ranks:
            if rank != me and (hosts is None or hosts[rank] == hosts[me]):
                with contextlib.suppress(AsyncdistError):  # a rank that is lost, for example, needs no address
                    self.channel.send_nowait(location, rank)

    def ask(self, donor: int, nbytes: int, *, round: int, mean_of: Part | None = None) -> Reading | None:
        """Request the memory address of a donor's snapshot, or of the mean of a part on its reducer.

        Args:
            mean_of: Part whose mean is requested, or None for a donor's snapshot.

        Returns:
            Reader of the memory, or None if the snapshot must be streamed. The caller must finish the reader.

        Raises:
            RankLostError: The donor or reducer is lost.
            BusyError: The queue of outgoing messages is full.
        """
        if not self._is_possible or nbytes < READ_NBYTES_MIN or self._failures[donor] >= TRIAL_COUNT:
            return None
        self._last_slot -= 1
        self.channel.send_nowait(LocateRequest(self._last_slot, *(mean_of or ())), donor, round=round)
        reading = self._asked[self._last_slot] = Reading(self._services, self, donor, self._last_slot)
        return reading if donor in self._readable else None

    def on_location(self, donor: int, location: Location) -> None:
        """Pass a donor's answer to the :class:`Reading` that is waiting for it. If that was closed, ignore the answer.

        Also test the memory of a rank that introduces itself.

        The handler of the stream channel, ``SnapshotServer.on_message``, calls this method.
        """
        if location.slot == _INTRODUCTION:
            reading = Reading(self._services, self, donor, _INTRODUCTION)
        elif location.slot in self._asked and self._asked[location.slot].donor == donor:
            reading = self._asked.pop(location.slot)
        else:
            return
        reading.on_location(location)
        if reading.process is not None:
            self._readable.add(donor)
        elif location.tensors:
            self.note_failure(donor)

    def note_failure(self, donor: int) -> None:
        """Count a failed read of a donor's memory, and stream its next snapshot.

        After ``TRIAL_COUNT`` failures, all its snapshots are streamed.
        """
        self._readable.discard(donor)
        self._failures[donor] += 1

    def note_success(self, donor: int) -> None:
        """Reset a donor's number of failed reads, because one of its snapshots was read completely."""
        del self._failures[donor]

    def memory_of(self, donor: int, packed: bytes) -> torch.Tensor | None:
        """Return a donor's shared memory as a tensor, mapping it first if necessary, or None if it cannot be mapped."""
        mapped = self._mapped.setdefault(donor, {})
        memory = mapped.pop(packed, None)
        if memory is None:
            try:
                memory = find(Address.unpack(packed))
            except OSError as error:
                logger.debug("the shared memory of rank %d cannot be mapped: %s", donor, error)
                return None
            while len(mapped) >= _MAPPED_COUNT:
                del mapped[next(iter(mapped))]
        mapped[packed] = memory
        return memory

    def close(self, slot: int) -> None:
        """Drop the pending request with this slot, so that its answer is ignored."""
        self._asked.pop(slot, None)

    def release(self) -> None:
        """Unmap the donors' shared memory when the policy ends. A reading in progress keeps the memory that it uses."""
        self._mapped.clear()

    def forget(self, rank: int) -> None:
        """Forget what is known about a restarted rank's previous process, and drop pending requests to that process."""
        self._readable.discard(rank)
        self._mapped.pop(rank, None)
        del self._failures[rank]
        for slot in [slot for slot, reading in self._asked.items() if reading.donor == rank]:
            del self._asked[slot]


class Reading:
    """Reads a snapshot, a mean, or a part of one, from the memory of another process on this host.

    Attributes:
        pieces: Pieces that :meth:`whole` reads. None until the caller has set them.
        process: Process of the donor. None until the donor has answered, or if its memory cannot be read.
    """

    def __init__(self, services: Services, neighbours: Neighbours, donor: int, slot: int) -> None:
        self._services = services
        self._neighbours = neighbours
        self._slot = slot
        self._tensors: tuple[int, ...] | None = None
        self._trial = torch.empty(1, dtype=torch.uint8, device="cpu")
        self._memory: torch.Tensor | None = None  # the donor's shared memory, if it is mapped
        self._start = 0  # address of the shared memory in the donor's process
        self.donor = donor
        self.pieces: Sequence[Piece] | None = None
        self.process: PeerProcess | None = None
        self.received_nbytes = 0

    def on_location(self, location: Location) -> None:
        """Store the donor's answer, and test whether the memory of each tensor can be read."""
        self._tensors = location.tensors
        if location.tensors:
            try:
                process = PeerProcess(location.pid, location.address, location.token)
                for address in filter(None, location.tensors):  # some devices' pinned memory cannot be read
                    process.read(address, self._trial.data_ptr(), self._trial.nbytes)
            except OSError as error:  # the process is on another host, or reading is not allowed
                logger.debug("the memory of rank %d cannot be read: %s", self.donor, error)
            else:
                self.process = process
                if location.memory:
                    self._memory, self._start = self._neighbours.memory_of(self.donor, location.memory), location.start
        self._services.engine.recheck()

    async def whole(self, *, deadline: float | None = None) -> None:
        """Read all pieces, and :meth:`complete` the reading. Other tasks run after each piece.

        Raises the errors of :meth:`located` and :meth:`read`.
        """
        assert self.pieces is not None, "whole() before the pieces are set"
        await self.located(deadline=deadline)
        for piece in self.pieces:
            self.read(*piece)
            await yield_to_loop()
        self.complete()

    async def located(self, *, deadline: float | None = None) -> None:
        """Wait until the donor has answered with the snapshot's address.

        Raises:
            TimeoutError: The deadline has passed.
            RankLostError: The donor is lost.
            StreamAborted: The donor has no snapshot for the round, or its memory can no longer be read.
        """
        gone = self._services.gone
        if not await self._services.engine.until(
            lambda: self._tensors is not None or self.donor in gone,
            WaitId(WaitKind.DONOR_SNAPSHOT, number=self.donor),
            deadline=deadline,
        ):
            raise TimeoutError(f"rank {self.donor} did not send the address of its snapshot in time")
        if self._tensors is None:
            raise RankLostError(f"rank {self.donor} is gone", rank=self.donor)
        if self.process is None:
            raise self._aborted("gave no snapshot" if not self._tensors else "can no longer be read")

    def read(self, number: int, first: int, into: torch.Tensor) -> None:
        """Read a piece of the snapshot.

        Args:
            number: Index of the flat tensor in the snapshot.
            first: Index of the piece's first element in that tensor.
            into: Flat CPU tensor of the snapshot's dtype that receives the piece.

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

    def view(self, number: int, first: int, nbytes: int) -> torch.Tensor | None:
        """Return bytes of the snapshot in the donor's shared memory, or None if they are not in shared memory.

        The caller may use the bytes only if :meth:`check` succeeds afterwards.

        Args:
            number: Index of the flat tensor in the snapshot.
            first: Index of the first byte in that tensor.
        """
        if self._memory is None or self._tensors is None or number >= len(self._tensors):
            return None
        begin = self._tensors[number] + first - self._start
        if begin < 0 or begin + nbytes > len(self._memory):
            return None
        self.received_nbytes += nbytes
        self._services.read_nbytes += nbytes
        return self._memory[begin : begin + nbytes]

    def check(self) -> None:
        """Check that the memory returned by :meth:`view` is still valid.

        Raises:
            StreamAborted: The donor has withdrawn its snapshot, or has ended.
        """
        assert self.process is not None, "check() before located()"
        order_memory()
        try:
            self.process.check()
        except OSError as error:
            self._neighbours.note_failure(self.donor)
            raise self._aborted(f"has withdrawn its snapshot, or cannot be read: {error}") from error

    def complete(self) -> None:
        """Record that the whole snapshot was read successfully."""
        self._neighbours.note_success(self.donor)

    def finish(self, cancel: object = None) -> None:
        """Drop the request for the snapshot's address. Unlike a stream, send no cancel message."""
        del cancel
        self._neighbours.close(self._slot)

    def _aborted(self, what: str) -> AsyncdistError:
        return StreamAborted(f"rank {self.donor} {what}", rank=self.donor, received_nbytes=self.received_nbytes)
