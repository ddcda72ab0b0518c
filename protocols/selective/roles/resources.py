"""Defines the model and the memory with which a rank sends and receives weights in averaging rounds."""

from __future__ import annotations

from dataclasses import dataclass

from asyncdist.protocols.applier import Applier
from asyncdist.protocols.joining.state_transfer import StateAdopter, WholeState
from asyncdist.protocols.options import Timing
from asyncdist.protocols.own_state import OwnState
from asyncdist.protocols.parameter_stream.parts import PartPool
from asyncdist.protocols.selective.roles.exchange_buffers import ExchangeBuffers
from asyncdist.protocols.step_info import UserEvents
from asyncdist.tensors.flat_state import FlatState, SnapshotPool


@dataclass(frozen=True, slots=True, eq=False)
class RoleResources:
    """Model and memory that a rank uses to send and receive weights, in its own island and in others.

    Attributes:
        own: Model and optimizer. They are checked before they are sent, and receive the averages.
        state: Optimizer and policy state, which is sent to ranks that adopt this rank's whole state.
        adopter: Adopts a donor's optimizer and policy state on a replacer. None if replacers receive only weights.
    """

    flat: FlatState
    own: OwnState
    snapshots: SnapshotPool
    buffers: ExchangeBuffers
    parts: PartPool
    applier: Applier
    timing: Timing
    events: UserEvents
    state: WholeState
    adopter: StateAdopter | None = None

    @classmethod
    def of(cls, flat: FlatState, own: OwnState, timing: Timing, events: UserEvents, state: WholeState) -> RoleResources:
        """Create the object for a model, without allocating buffers before they are needed."""
        snapshots = SnapshotPool(flat)
        applier = Applier(flat, own, snapshots, events)
        return cls(flat, own, snapshots, ExchangeBuffers(flat), PartPool(flat), applier, timing, events, state)

    def in_use(self) -> dict[str, int]:
        """Return the number of buffers in use, by kind."""
        counts = {"snapshots": self.snapshots.in_use, "accumulators": self.buffers.in_use}
        return {**counts, "parts of a mean": self.parts.in_use}
