"""Transports the messages of a replay. They arrive at once, but a rank receives them only at the recorded points."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence

from asyncdist.errors import TruncationError
from asyncdist.recording.schema import Conditions, Header
from asyncdist.simulation.replay.admission import Admission, fits
from asyncdist.simulation.replay.gate import Gate
from asyncdist.simulation.replay.log import Key
from asyncdist.simulation.replay.pending_inputs import Mailbox, gone
from asyncdist.transports.base import (
    ANY_SOURCE,
    Buffer,
    Capabilities,
    PersistentReceive,
    Request,
    Transport,
    as_bytes,
)


class ReplayTransport(Transport):
    """Transports the messages of a replayed rank. The simulated transport ``inner`` does everything else."""

    def __init__(
        self, inner: Transport, gate: Gate, mailboxes: Sequence[Mailbox], header: Header, conditions: Conditions
    ) -> None:
        capabilities = conditions.capabilities
        self._inner = inner
        self._gate = gate
        self._mailboxes = mailboxes
        self._own = mailboxes[inner.rank]
        self._hostname = header.hostname
        self.name = inner.name
        self.rank, self.size = inner.rank, inner.size
        self.job_nonce = conditions.nonce
        self.hosts = conditions.hosts
        self.capabilities = Capabilities(
            native_collectives=capabilities.native_collectives,  # the members of a group must agree on this
            survives_rank_loss=capabilities.survives_rank_loss,
            wakes=True,
            misses_wakes=False,
            tag_max=capabilities.tag_max,
            shares_process=True,
            shares_memory=capabilities.shares_memory,
            written_share=capabilities.written_share,
        )

    def isend(self, buffer: Buffer, dest: int, tag: int) -> Request:
        self._gate.deliver_losses()
        is_lost = dest in self._own.lost
        if not is_lost:
            self._mailboxes[dest].put(self.rank, tag, bytes(as_bytes(buffer)))
        self._gate.note_sent(tag)
        return _Sent(dest if is_lost else None)

    def irecv(self, buffer: Buffer, source: int, tag: int) -> Request:
        return _Receive(self._gate.admission, self._own.lost, as_bytes(buffer), source, tag)

    def persistent_receive(self, buffer: Buffer, tag: int) -> PersistentReceive:
        return _Receive(self._gate.admission, self._own.lost, as_bytes(buffer), ANY_SOURCE, tag)

    def lost_ranks(self) -> frozenset[int]:
        return frozenset(self._own.lost)

    def set_loss_listener(self, listen: Callable[[int], None]) -> None:
        self._own.listen = listen
        for rank in sorted(self._own.lost):
            listen(rank)

    def set_arrival_callback(self, ring: Callable[[], None]) -> None:
        self._gate.set_arrival_callback(ring)

    @property
    def hostname(self) -> str:
        return self._hostname

    @property
    def local_rank(self) -> int:
        return self._inner.local_rank

    def abort(self, exit_code: int) -> None:
        self._inner.abort(exit_code)

    def close(self) -> None:
        self._inner.close()

    def close_failed(self) -> None:
        self._inner.close_failed()

    def describe(self) -> str:
        return f"replay of {self.size} ranks"


class _Sent:
    """A send that has completed, because its message is already in the receiver's mailbox.

    If the sender has been notified of the loss of its receiver ``lost``, the send fails.
    """

    cancelled = False
    source = -1
    nbytes = 0

    def __init__(self, lost: int | None) -> None:
        self._lost = lost

    def test(self) -> bool:
        if self._lost is not None:
            raise gone(self._lost)
        return True

    def cancel(self) -> None:
        pass


class _Receive:
    """A receive that completes when the rank may receive its message, or fails when the rank is notified of a loss."""

    def __init__(self, admission: Admission, lost: Collection[int], buffer: memoryview, source: int, tag: int) -> None:
        self._admission = admission
        self._lost = lost
        self._buffer = buffer
        self._from = source
        self._tag = tag
        self.cancelled = False
        self.source = -1
        self.nbytes = 0

    def take(self) -> tuple[int, int] | None:
        key = self._admission.next_key(self._from, self._tag)
        if key is None:
            return None
        data = self._admission.take(key)
        if len(data) > self._buffer.nbytes:
            raise TruncationError.of(len(data), self._buffer.nbytes, key[0])
        self._buffer[: len(data)] = data
        self.source, self.nbytes = key[0], len(data)
        return self.source, self.nbytes

    def start(self) -> None:
        self.cancelled = False

    def is_for(self, key: Key) -> bool:
        """Return whether this receive matches a message with this source and tag."""
        return not self.cancelled and fits(key, self._from, self._tag)

    def test(self) -> bool:
        if self.cancelled or self.take() is not None:
            return True
        if self._from in self._lost:
            raise gone(self._from)
        return False

    def cancel(self) -> None:
        self.cancelled = True
