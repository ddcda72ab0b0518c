"""Defines the model and the memory with which a rank sends and receives weights in averaging rounds."""

from __future__ import annotations

from dataclasses import dataclass

from asyncdist.protocols.joining.state_transfer import StateAdopter, WholeState
from asyncdist.protocols.own_state import OwnState
from asyncdist.protocols.parameter_stream.parts import PartPool
from asyncdist.protocols.parameter_stream.receiver import new_ring
from asyncdist.tensors.flat_state import FlatBuffers, FlatState, SnapshotPool


class Accumulator:
    """Reference-counted buffers for one average. The last user returns them to the pool."""

    def __init__(self, pool: SnapshotPool) -> None:
        self._pool = pool
        self._use_count = 1
        self.buffers: FlatBuffers = pool.acquire()

    def hold(self) -> None:
        """Add a user of the buffers, which must call :meth:`release`."""
        self._use_count += 1

    def release(self) -> None:
        """Remove a user. The last user returns the buffers to the pool."""
        self._use_count -= 1
        if not self._use_count:
            self._pool.release(self.buffers)


class ExchangeBuffers:
    """Provides memory that successive averages reuse: accumulators, and a ring of received chunks.

    Attributes:
        read_nbytes: Number of received bytes that were read directly from the donors' memory.
        reasked_count: Number of parts requested from the donors because a reducer had failed.
    """

    def __init__(self, flat: FlatState) -> None:
        self._flat = flat
        self._pools = [SnapshotPool(flat, accumulate=True)]
        self.ring = new_ring()
        self.received_nbytes = self.read_nbytes = self.reasked_count = 0

    @property
    def in_use(self) -> int:
        """Number of accumulators (buffers of one average) in use."""
        return sum(pool.in_use for pool in self._pools)

    def acquire(self) -> Accumulator:
        """Return an accumulator (the buffers of one average) with undefined content."""
        return Accumulator(self._pools[-1])

    def release(self, accumulator: Accumulator, *, is_clean: bool) -> None:
        """Remove a user of an accumulator.

        Unless ``is_clean``, chunks may still arrive in the accumulator's memory, which is therefore not reused.
        """
        accumulator.release()
        if not is_clean:
            self._pools = [*(pool for pool in self._pools if pool.in_use), SnapshotPool(self._flat, accumulate=True)]
            self.ring = new_ring()


@dataclass(frozen=True, slots=True, eq=False)
class RoleResources:
    """Model and memory that a rank uses to send and receive weights, in its own island and in others.

    Attributes:
        own: Model and optimizer. They are checked before they are sent, and receive the averages.
        state: Optimizer and policy state, which is sent to ranks that adopt this rank's whole state.
        adopter: Adopts a donor's optimizer and policy state on a replacer. None if replacers receive only weights.
    """

    own: OwnState
    buffers: ExchangeBuffers
    parts: PartPool
    state: WholeState
    adopter: StateAdopter | None = None

    def in_use(self) -> dict[str, int]:
        """Return the number of buffers in use, by kind."""
        counts = {"snapshots": self.own.snapshots.in_use, "accumulators": self.buffers.in_use}
        return {**counts, "parts of a mean": self.parts.in_use}
