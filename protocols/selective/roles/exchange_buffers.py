"""Keeps the memory that a replacer's exchanges use in turn, and counts the bytes they receive."""

from __future__ import annotations

from asyncdist.protocols.parameter_stream.receiver import new_ring
from asyncdist.tensors.flat_state import FlatBuffers, FlatState, SnapshotPool


class Accumulator:
    """Shares the buffers of one average among their users. The exchange that creates it is the first user.

    Args:
        pool: Gets the buffers back from the last user.

    Attributes:
        buffers: Flat tensors in the accumulation dtypes.
    """

    def __init__(self, pool: SnapshotPool) -> None:
        self._pool = pool
        self._use_count = 1
        self.buffers: FlatBuffers = pool.acquire()

    def hold(self) -> None:
        """Add a user of the buffers, until :meth:`release`."""
        self._use_count += 1

    def release(self) -> None:
        """Remove a user; the last one returns the buffers to the pool."""
        self._use_count -= 1
        if not self._use_count:
            self._pool.release(self.buffers)


class ExchangeBuffers:
    """Keeps accumulators and a ring of chunks.

    Args:
        flat: State of the policy's model.

    Attributes:
        ring: Memory for chunks that cannot be received into an accumulator.
        received_nbytes: Number of bytes received by all exchanges, including abandoned ones.
        read_nbytes: Number of these bytes that were read in the donors' memory.
        reasked_count: Number of parts of means that donors were asked for, because their reducer had failed.
    """

    def __init__(self, flat: FlatState) -> None:
        self._flat = flat
        self._pools = [SnapshotPool(flat, accumulate=True)]
        self.ring = new_ring()
        self.received_nbytes = self.read_nbytes = self.reasked_count = 0

    @property
    def in_use(self) -> int:
        """Number of accumulators in use."""
        return sum(pool.in_use for pool in self._pools)

    def acquire(self) -> Accumulator:
        """Return an accumulator with undefined content."""
        return Accumulator(self._pools[-1])

    def release(self, accumulator: Accumulator, *, is_clean: bool) -> None:
        """Take an accumulator back.

        Args:
            accumulator: The accumulator.
            is_clean: Whether no chunk can arrive in the accumulator or the ring any longer. Otherwise the next exchange
                gets new memory.
        """
        accumulator.release()
        if not is_clean:
            self._pools = [*(pool for pool in self._pools if pool.in_use), SnapshotPool(self._flat, accumulate=True)]
            self.ring = new_ring()
