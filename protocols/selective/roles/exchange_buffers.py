"""Keeps the memory that a replacer's exchanges use one after the other, and counts what they receive."""

from __future__ import annotations

from asyncdist.protocols.parameter_stream.receiver import new_ring
from asyncdist.tensors.flat_state import FlatBuffers, FlatState, SnapshotPool


class Accumulator:
    """Lends the buffers in which one average is made to all who use them; who makes the average is the first.

    Args:
        pool: gets the buffers back from the last one.

    Attributes:
        buffers: flat tensors in the accumulation dtypes.
    """

    def __init__(self, pool: SnapshotPool) -> None:
        self._pool = pool
        self._use_count = 1
        self.buffers: FlatBuffers = pool.acquire()

    def hold(self) -> None:
        """Use the buffers until :meth:`release`."""
        self._use_count += 1

    def release(self) -> None:
        """Use the buffers no more."""
        self._use_count -= 1
        if not self._use_count:
            self._pool.release(self.buffers)


class ExchangeBuffers:
    """Keeps accumulators and a ring of chunks.

    Args:
        flat: the state of the policy's model.

    Attributes:
        ring: for chunks that cannot land in an accumulator.
        received_nbytes: by all exchanges, abandoned ones included.
        read_nbytes: of these, read in the donors' memory.
        reasked_count: parts of means that donors were asked for, since their reducer had failed.
    """

    def __init__(self, flat: FlatState) -> None:
        self._flat = flat
        self._pools = [SnapshotPool(flat, accumulate=True)]
        self.ring = new_ring()
        self.received_nbytes = self.read_nbytes = self.reasked_count = 0

    @property
    def in_use(self) -> int:
        """The number of accumulators in use."""
        return sum(pool.in_use for pool in self._pools)

    def acquire(self) -> Accumulator:
        """Return an accumulator with undefined content."""
        return Accumulator(self._pools[-1])

    def release(self, accumulator: Accumulator, *, is_clean: bool) -> None:
        """Take an accumulator back.

        Args:
            accumulator: which one.
            is_clean: whether nothing can land in it, or in the ring, any more; else the next exchange gets new memory.
        """
        accumulator.release()
        if not is_clean:
            self._pools = [*(pool for pool in self._pools if pool.in_use), SnapshotPool(self._flat, accumulate=True)]
            self.ring = new_ring()
