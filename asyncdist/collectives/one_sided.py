"""Versioned windows: a rank publishes successive copies (*versions*) of its state, which others read at any time.

A window has two slots. Version k is written into slot k mod 2 while readers use version k - 1 in the other slot. A
record describes each version and its metric. A reader first reads the newest records, and then a version by its number.
It gets the complete version or an :class:`OutdatedError`.

- If the transport has one-sided reads and all members are on one host, slots and records are in memory that all members
  map (:mod:`asyncdist.host_memory.shared_memory`). Before the owner changes a slot, it writes the number of the new
  version. A reader copies a slot, and then checks that the owner has not begun version k + 2. This is a sequence lock
  (Lameter 2005) over two buffers. It works even while the owner is computing and after it has left.
- Otherwise, the owner answers reads with messages whenever its main task awaits: with a stream of the version, or with
  an abort (:mod:`asyncdist.messaging.streams`). While a slot is being streamed, the owner does not write a new version
  into it. In small groups, an owner sends its records to all members. In large groups, readers ask for them
  (:mod:`asyncdist.collectives.version_queries`).
"""

from __future__ import annotations

import abc
import contextlib
import logging
import math
import struct
import zlib
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final, TypeAlias

import torch

from asyncdist import tags
from asyncdist.collectives.agreed_start import Start, start_together
from asyncdist.collectives.agreement.agreements import Agreements
from asyncdist.collectives.algorithms.shared_memory_reduce import map_shared_buffers
from asyncdist.collectives.groups import Group
from asyncdist.collectives.version_queries import VersionQueries, VersionRecord as VersionRecord
from asyncdist.errors import AsyncdistError, BusyError, ClosedError, RankLostError
from asyncdist.host_memory.shared_memory import SharedMemory, order_memory
from asyncdist.messaging.channels import Channel, Envelope
from asyncdist.messaging.engine import yield_to_loop
from asyncdist.messaging.outbound_streams import OutboundStream
from asyncdist.messaging.services import Services
from asyncdist.messaging.streams import CHUNK_NBYTES, Cancel, Grant, StreamAborted
from asyncdist.tensors.byte_views import byte_view, new_memory, split
from asyncdist.waits import WaitId, WaitKind

logger = logging.getLogger("asyncdist.collectives.one_sided")

Targets: TypeAlias = Sequence[memoryview]
Take: TypeAlias = Callable[[int], None]

#: Maximum number of other members to which an owner sends each version's record. In larger groups, readers ask for
#: records.
NOTIFIED_COUNT_MAX: Final = 32

#: A restarted rank's version numbers start at its number of restarts times the first constant. The second constant
#: limits the number of restarts used, so that version numbers fit into 32 bits.
_VERSION_COUNT: Final = 1_000_000
_INCARNATION_COUNT: Final = 4000

_SUBJECT: Final = "new window"


@dataclass(frozen=True, slots=True)
class Retired:
    """Notifies the other members that the sender no longer publishes any version of its state."""


@dataclass(frozen=True, slots=True)
class _Card:
    """Message with one member's data for the all-gather that opens a window."""

    data: bytes


class OutdatedError(AsyncdistError):
    """Raised if the requested version of a rank's state no longer exists.

    Has the attributes ``rank`` and ``version``.
    """


class VersionedWindow(abc.ABC):
    """Publishes versions (copies) of this rank's state, and reads the versions that other ranks publish.

    Made by :func:`open_versioned_window`.

    Attributes:
        version: Number of the newest version that this rank has published, or :attr:`first` before that.
        first: Number before the first version of this process: 0 unless the rank was restarted.
    """

    version: int = 0
    first: int = 0

    @abc.abstractmethod
    def begin(self) -> torch.Tensor | None:
        """Return the memory for the next version of this rank's state: a 1-D uint8 tensor to fill and then publish.

        The call invalidates the older version in this memory. A second call returns the same memory. The result is None
        while readers still use the memory.
        """

    @abc.abstractmethod
    def publish(self, iteration: int, metric: float) -> VersionRecord:
        """Publish the version that the caller wrote into the memory from :meth:`begin`, and return its record."""

    async def published_by(self, rank: int, *, deadline: float = math.inf) -> VersionRecord | None:
        """Return the record of a member's newest version, or None if it has none or does not answer in time."""
        return (await self.published_by_each((rank,), deadline=deadline)).get(rank)

    @abc.abstractmethod
    async def published_by_each(self, ranks: Sequence[int], *, deadline: float = math.inf) -> dict[int, VersionRecord]:
        """Return the record of each rank's newest version, in order of ``ranks``. Omit ranks without a version."""

    @abc.abstractmethod
    async def read(self, rank: int, record: VersionRecord, targets: Targets, take: Take, *, deadline: float) -> None:
        """Read the first bytes of a version that ``rank`` has published into the buffers ``targets``.

        Args:
            record: Record of the version, as returned by ``published_by``.
            targets: Buffers for the chunks, in order, of ``chunk_nbytes`` each except the last. Chunks i and i +
                ``streams.WINDOW_COUNT`` may share a buffer.
            take: Function called with the index of each chunk after its arrival. If ``read`` raises, all chunks must be
                discarded, because they may belong to different versions.

        **Cancellation**: the targets may still be written until the owner has answered.

        Raises:
            OutdatedError: The version no longer exists.
            RankLostError: The owner is lost.
            TimeoutError: The deadline has passed.
        """

    @abc.abstractmethod
    async def close(self, deadline: float | None) -> None:
        """Close the window on this rank, without waiting for the other members.

        Args:
            deadline: Time on the loop's clock until which current reads may continue, in seconds, or None to end them
                now.
        """


def maps_windows(services: Services) -> bool:
    """Return whether ranks on one host map each other's windows.

    If so, all ranks open a window together. No rank opens it later, because such transports do not restart ranks.
    """
    return services.engine.transport.capabilities.one_sided_reads


async def open_versioned_window(
    services: Services,
    agreements: Agreements,
    group: Group,
    nbytes: int,
    *,
    scope: int,
    chunk_nbytes: int = CHUNK_NBYTES,
    timeout_s: float = 60.0,
) -> VersionedWindow:
    """Open a window for publishing and reading states. All members of ``group`` must pass equal arguments.

    Args:
        nbytes: Size of one version in bytes. Each rank stores two versions.
        chunk_nbytes: Size of the chunks of a read, in bytes.

    Raises:
        StartTimeoutError: A member did not join in time. The other members may have opened the window.
    """
    if group.size > 1 and maps_windows(services):

        async def make(start: Start[list[torch.Tensor] | None]) -> list[torch.Tensor] | None:
            await start.agree({}, timeout_s=timeout_s)
            return await _map_memories(services, group, _SharedWindow.window_nbytes(nbytes), scope)

        # Each window's agreement has its own name, because tasks may open windows for the same ranks in any order.
        subject = f"{_SUBJECT} {scope:x}"
        try:
            memories = await start_together(services, agreements, group.ranks, subject, make, _drop, name=_SUBJECT)
        finally:
            agreements.forget(group.ranks, subject)
        if memories is not None:
            return _SharedWindow(services, group, memories, nbytes)
    return StreamedWindow(services, group.ranks, nbytes, scope=scope, chunk_nbytes=chunk_nbytes)


async def _drop(memories: list[torch.Tensor] | None) -> None:
    """Do nothing, because the memory is released when the last rank unmaps it."""


async def _map_memories(services: Services, group: Group, nbytes: int, scope: int) -> list[torch.Tensor] | None:
    """Return all members' shared memory in the group's order.

    Return None if a member has none or is on another host.
    """
    memory = None
    with contextlib.suppress(OSError):  # Raised if this system has too little shared memory, or none.
        memory = SharedMemory(nbytes)
    received: dict[int, deque[bytes]] = {rank: deque() for rank in group.ranks if rank != services.rank}
    channel: Channel[_Card] = services.open_channel(
        _Card, tag=tags.CONTROL, scope=scope, name="addresses of exposed state"
    )

    async def all_gather(card: torch.Tensor) -> list[torch.Tensor]:
        own = bytes(byte_view(card))
        for rank in received:
            channel.send_nowait(_Card(own), rank)
        while not all(received.values()):
            envelope = await channel.receive()
            received[envelope.source].append(envelope.message.data)
        cards = (own if rank == services.rank else received[rank].popleft() for rank in group.ranks)
        return [torch.frombuffer(bytearray(data), dtype=torch.uint8) for data in cards]

    try:
        return await map_shared_buffers(memory, group, all_gather)
    finally:
        channel.close()


# -- one-sided --------------------------------------------------------------------------------------------------------

#: Format of a record in the window, and of the following CRC, which detects a record that is being written.
_RECORD: Final = struct.Struct("<Qqd")
_CRC: Final = struct.Struct("<I")
#: A window begins with the number of the version that is being written, followed by two records. Each of them has its
#: own cache line.
_LINE_NBYTES: Final = 64
_RECORD_OFFSETS: Final = (_LINE_NBYTES, 2 * _LINE_NBYTES)
_HEAD_NBYTES: Final = 3 * _LINE_NBYTES
#: A closed window stores this number as the version being written, which makes all its versions outdated.
_RETIRED: Final = 1 << 62


class _SharedWindow(VersionedWindow):
    """Versioned window in shared memory. Readers copy a version without the owner's help."""

    def __init__(self, services: Services, group: Group, memories: Sequence[torch.Tensor], nbytes: int) -> None:
        self._services = services
        self._memories = {rank: byte_view(memory) for rank, memory in zip(group.ranks, memories, strict=True)}
        self._writing = self._memories[services.rank][:8].cast("Q")
        stride = _aligned(nbytes)
        self._offsets = (_HEAD_NBYTES, _HEAD_NBYTES + stride)
        self._slots = [memories[group.index][start : start + nbytes] for start in self._offsets]
        self._closed = False

    @staticmethod
    def window_nbytes(nbytes: int) -> int:
        return _HEAD_NBYTES + 2 * _aligned(nbytes)

    def begin(self) -> torch.Tensor | None:
        version = self.version + 1
        self._writing[0] = version
        order_memory()
        return self._slots[version % 2]

    def publish(self, iteration: int, metric: float) -> VersionRecord:
        record = VersionRecord(self.version + 1, iteration, metric)
        packed = _RECORD.pack(record.version, iteration, metric)
        start = _RECORD_OFFSETS[record.version % 2]
        order_memory()
        own = self._memories[self._services.rank]
        own[start : start + _RECORD.size + _CRC.size] = packed + _CRC.pack(zlib.crc32(packed))
        order_memory()
        self.version = record.version
        return record

    async def published_by_each(self, ranks: Sequence[int], *, deadline: float = math.inf) -> dict[int, VersionRecord]:
        del deadline  # A memory copy needs no deadline.
        found = {rank: self._newest_of(rank) for rank in ranks}
        return {rank: record for rank, record in found.items() if record is not None}

    def _newest_of(self, rank: int) -> VersionRecord | None:
        if rank in self._services.gone:
            return None
        writing, records = self._read_versions(rank)
        if writing >= _RETIRED or not records:
            return None
        return max(records, key=lambda record: record.version)

    async def read(self, rank: int, record: VersionRecord, targets: Targets, take: Take, *, deadline: float) -> None:
        del deadline  # A memory copy needs no deadline.
        memory, offset = self._memories[rank], self._offsets[record.version % 2]
        for index, target in enumerate(targets):
            target[:] = memory[offset : offset + len(target)]
            self._services.read_nbytes += len(target)
            offset += len(target)
            take(index)
            await yield_to_loop()
        writing, records = self._read_versions(rank)
        if writing >= record.version + 2 or not any(_same(record, other) for other in records):
            raise OutdatedError(
                f"rank {rank} wrote version {min(writing, _RETIRED)} while this rank read the previous one; read again",
                rank=rank,
                version=record.version,
            )

    def _read_versions(self, rank: int) -> tuple[int, list[VersionRecord]]:
        """Return the number of the version that ``rank`` is writing, and the records of its complete versions."""
        order_memory()
        head = bytes(self._memories[rank][:_HEAD_NBYTES])
        order_memory()
        records = []
        for start in _RECORD_OFFSETS:
            packed = head[start : start + _RECORD.size]
            if _CRC.unpack_from(head, start + _RECORD.size)[0] == zlib.crc32(packed):
                records.append(VersionRecord(*_RECORD.unpack(packed)))
        return int.from_bytes(head[:8], "little"), records

    async def close(self, deadline: float | None) -> None:
        del deadline
        if not self._closed:
            self._closed = True
            self._writing[0] = _RETIRED
            order_memory()
            self._writing.release()
            self._slots.clear()
            self._memories.clear()


def _aligned(nbytes: int) -> int:
    return -(-nbytes // _LINE_NBYTES) * _LINE_NBYTES


def _same(one: VersionRecord, two: VersionRecord) -> bool:
    metrics = one.metric == two.metric or (math.isnan(one.metric) and math.isnan(two.metric))
    return metrics and (one.version, one.iteration) == (two.version, two.iteration)


# -- answered by the owner --------------------------------------------------------------------------------------------


@dataclass(slots=True, eq=False)
class _Answer:
    """A stream that sends one version of the state to one reader. ``key`` is the reader's rank and stream slot."""

    version: int
    key: tuple[int, int]
    stream: OutboundStream


class StreamedWindow(VersionedWindow):
    """Versioned window whose owner answers each read with a stream of messages or, once it is closed, with an abort.

    Args:
        ranks: All ranks that may open the window. A restarted rank can open it again.
        nbytes: Size of one version in bytes.
        scope: Number that identifies the window's messages, equal on all ranks.
        is_followed: Whether the caller adds and removes members, and notifies them of the window's end.
        is_newcomer: Whether this rank opens the window later than the others. If so, it starts without other members.
    """

    def __init__(
        self,
        services: Services,
        ranks: Sequence[int],
        nbytes: int,
        *,
        scope: int,
        chunk_nbytes: int,
        is_followed: bool = False,
        is_newcomer: bool = False,
    ) -> None:
        self._services = services
        self._is_followed = is_followed
        self._others = tuple(rank for rank in ranks if rank != services.rank)
        self._nbytes = nbytes
        self._chunk_nbytes = chunk_nbytes
        self._slots = [new_memory(nbytes).zero_() for _ in range(2)]
        # Version numbers must differ from the numbers of the previous process, whose records may still be in use.
        self.version = self.first = services.incarnation % _INCARNATION_COUNT * _VERSION_COUNT
        self._begun = False
        self._closed = False
        self._answers: list[_Answer] = []
        self._scope = scope
        self._version_queries = services.shared(VersionQueries) if len(self._others) > NOTIFIED_COUNT_MAX else None
        self._record: VersionRecord | None = None  # record of the newest version
        if self._version_queries is not None:
            self._version_queries.open(scope, lambda: self._record)
        self._newest: dict[int, VersionRecord] = {}
        #: Ranks that publish no version now, including lost ranks until their new process is admitted.
        self._retired: set[int] = {*services.gone, *(self._others if is_newcomer else ())}
        services.on_gone(self.retire, among=self._others)
        self._reports: Channel[VersionRecord | Retired] = services.open_channel(
            VersionRecord | Retired, tag=tags.METRIC, scope=scope, name="published versions", handler=self._on_report
        )
        self._reads: Channel[Grant | Cancel] = services.open_channel(
            Grant | Cancel, tag=tags.PARAM, scope=scope, name="reads of exposed state", handler=self._on_read
        )

    def retire(self, rank: int) -> None:
        """Stop reading the versions of ``rank``, which is lost or has left."""
        self._retired.add(rank)
        self._newest.pop(rank, None)

    def begin(self) -> torch.Tensor | None:
        version = self.version + 1
        is_read = any(answer.version == version - 2 and not answer.stream.has_left for answer in self._answers)
        if self._services.engine.measured(WaitId(WaitKind.VERSION_IN_USE, number=self._scope), is_read):
            return None
        self._begun = True
        return self._slots[version % 2]

    def publish(self, iteration: int, metric: float) -> VersionRecord:
        self.version += 1
        self._begun = False
        self._record = record = VersionRecord(self.version, iteration, metric)
        self._notify(record, self._others)
        return record

    def _notify(self, message: VersionRecord | Retired, ranks: Sequence[int]) -> None:
        for rank in ranks if self._version_queries is None else ():
            if rank not in self._retired:
                try:
                    self._reports.send_nowait(message, rank)
                except RankLostError as error:
                    logger.debug("not sent: %s", error)
                except BusyError:  # The rank does not receive messages now. Newer records will follow.
                    logger.debug("rank %d receives no version records now", rank)

    def _on_report(self, envelope: Envelope[VersionRecord | Retired]) -> None:
        if isinstance(envelope.message, VersionRecord):
            self._newest[envelope.source] = envelope.message
        else:
            self.retire(envelope.source)

    async def published_by_each(self, ranks: Sequence[int], *, deadline: float = math.inf) -> dict[int, VersionRecord]:
        known = [rank for rank in ranks if rank not in self._retired]
        if self._version_queries is not None:
            return await self._version_queries.ask(self._scope, known, deadline=deadline)
        return {rank: self._newest[rank] for rank in known if rank in self._newest}

    async def read(self, rank: int, record: VersionRecord, targets: Targets, take: Take, *, deadline: float) -> None:
        services, version = self._services, record.version

        def cancel(slot: int) -> None:
            # A lost Cancel is harmless, because the chunks are discarded. The window may have been closed before.
            if rank not in self._retired:
                with contextlib.suppress(BusyError, ClosedError):
                    self._reads.send_nowait(Cancel(slot), rank, round=version)

        try:
            with services.slots.inbound(rank, targets, cancel) as stream:
                grant = Grant(stream.slot, sum(map(len, targets)), self._chunk_nbytes)
                self._reads.send_nowait(grant, rank, round=version)
                async for index in stream.chunks(deadline=deadline):
                    take(index)
        except StreamAborted as error:
            raise OutdatedError(
                f"rank {rank} no longer has version {version}, or is leaving; read a newer version",
                rank=rank,
                version=version,
            ) from error

    def admit(self, rank: int) -> None:
        """Start reading versions of ``rank``, which has opened the window, and let it read this rank's versions."""
        self._reports.admit(rank)
        self._reads.admit(rank)
        if rank in self._retired:
            self._retired.remove(rank)
            if self._record is not None:
                self._notify(self._record, (rank,))

    # -- the owner's end --------------------------------------------------------------------------------------------

    def _on_read(self, envelope: Envelope[Grant | Cancel]) -> None:
        message, version = envelope.message, envelope.round
        key = (envelope.source, message.slot)
        if isinstance(message, Cancel):
            for answer in self._answers:
                if answer.key == key:
                    answer.stream.stop()
            return
        chunks = self._chunks(message, version)
        answer = _Answer(version, key, OutboundStream(self._services.slots, chunks, *key))
        if chunks:
            self._answers.append(answer)
        self._services.spawn_service(self._answer(answer, refused=not chunks), name=f"read by rank {key[0]}")

    def _has(self, version: int) -> bool:
        is_previous = version == self.version - 1 and not self._begun
        return not self._closed and version > self.first and (version == self.version or is_previous)

    def _chunks(self, grant: Grant, version: int) -> list[memoryview]:
        """Return the chunks that ``grant`` requests, or an empty list if the version or the sizes are invalid."""
        is_sound = 0 < grant.nbytes <= self._nbytes and grant.chunk_nbytes == self._chunk_nbytes
        if not is_sound or not self._has(version):
            return []
        return split(byte_view(self._slots[version % 2])[: grant.nbytes], grant.chunk_nbytes)

    async def _answer(self, answer: _Answer, *, refused: bool) -> None:
        try:
            await (answer.stream.abort() if refused else answer.stream.run())
        except RankLostError as error:
            logger.debug("not answered: %s", error)
        finally:
            if answer in self._answers:
                self._answers.remove(answer)
            self._services.engine.recheck()

    async def close(self, deadline: float | None) -> None:
        if self._closed:
            return
        self._closed = True
        if not self._is_followed:
            self._notify(Retired(), self._others)
        if self._version_queries is not None:
            self._version_queries.close(self._scope)
        self._services.off_gone(self.retire)
        self._reports.close()
        try:
            if deadline is not None:
                await self._services.engine.until(
                    lambda: not self._answers, WaitId(WaitKind.LAST_READS), deadline=deadline
                )
        finally:
            for answer in self._answers:
                answer.stream.stop()
            self._slots.clear()
            self._reads.close(afterwards=self._on_read)
