"""Carries out a donor's part in a round: copies this rank's weights inside a step, and offers the copy.

For a newcomer it copies the rest of the member's state, too, in the same step: copied later, the optimizer's state
would belong to other weights. That step is longer by these copies; with Adam it copies three times the model.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from asyncdist.messaging.services import Services
from asyncdist.protocols.parameter_stream.messages import safe_point_count
from asyncdist.protocols.parameter_stream.server import Offer, SnapshotServer
from asyncdist.protocols.selective.joining.state_transfer import StateTransfer, copied
from asyncdist.protocols.selective.roles.resources import RoleResources
from asyncdist.protocols.step_info import SnapshotTaken
from asyncdist.tensors.device_copy import DeviceCopy
from asyncdist.tensors.flat_state import FlatBuffers

_UNSOUND: Final = "weights are not finite"


@dataclass(frozen=True, slots=True, eq=False)
class Copy:
    """Describes a copy of this rank's weights.

    Attributes:
        round: The round that asks for it.
        snapshot: The buffers that hold it, or will when `under_way` has completed.
        iteration: This rank's iteration.
        began_at: When it was begun, on the loop's clock.
        state_safe_points: The safe points that the stream of the rest of the state needs; 0 without one.
        under_way: The copy from a device; None if the snapshot is complete.
    """

    round: int
    snapshot: FlatBuffers
    iteration: int
    began_at: float
    state_safe_points: int
    under_way: DeviceCopy | None


class Donor:
    """Gives this rank's state to the rounds that ask for it, in turn.

    Args:
        services: Of this rank.
        server: Streams the snapshots.
        resources: The model, and the memory of the copies.
        states: Gives the rest of the state to a newcomer; None if this rank gives to no newcomer.
        island: The other island whose rounds these are; -1 for the rank's own.

    Attributes:
        offer: The snapshot on offer; None if there is none.
        snapshot_count: Snapshots that have been offered.
    """

    def __init__(
        self,
        services: Services,
        server: SnapshotServer,
        resources: RoleResources,
        states: StateTransfer | None,
        *,
        island: int = -1,
    ) -> None:
        self._services = services
        self._server = server
        self._resources = resources
        self._states = states
        self._island = island
        self._kept: Copy | None = None
        self.offer: Offer | None = None
        self.snapshot_count = 0

    def copy(self, round: int, iteration: int, *, with_state: bool) -> Copy:
        """Begin to copy the weights of this moment. A GPU copies them during the next steps.

        Args:
            round: The round that asks for them.
            iteration: This rank's iteration.
            with_state: Whether a newcomer takes the rest of the state, which is copied at once.

        Raises:
            ValueError: The model is not the policy's any more; nothing is given then.
        """
        began_at = self._services.time()
        snapshot = self._resources.snapshots.acquire()
        state_safe_points = self._offer_state(round) if with_state else 0
        try:
            under_way = self._resources.flat.start_snapshot(snapshot)
        except ValueError:
            self._give_nothing(round, snapshot)
            raise
        return Copy(round, snapshot, iteration, began_at, state_safe_points, under_way)

    def _offer_state(self, round: int) -> int:
        """Copy and offer the rest of the state, and return the safe points that its stream needs."""
        assert self._states is not None, "a rank that gives to no newcomer is asked to"
        state = copied(self._resources.state)
        if state is None:
            return 0
        self._states.offer(round, state)
        return safe_point_count(state.numel())

    def fault_of(self, copy: Copy) -> str:
        """Return why a complete copy cannot be given; "" if it can."""
        return "" if self._resources.own.may_be_given(copy.snapshot) else _UNSOUND

    def keep(self, copy: Copy) -> None:
        """Keep a copy for :meth:`give`."""
        self._kept = copy

    def drop(self, copy: Copy) -> None:
        """Give neither a copy nor the state that belongs to it."""
        self._give_nothing(copy.round, copy.snapshot)

    def _give_nothing(self, round: int, snapshot: FlatBuffers) -> None:
        self._resources.snapshots.release(snapshot)
        if self._states is not None:
            self._states.withdraw_up_to(round)

    def give(self, round: int) -> None:
        """Offer the copy that was kept."""
        copy, self._kept = self._kept, None
        assert copy is not None, f"round {round} is to be given no snapshot"
        self.offer = self._server.offer(round, copy.snapshot, self._resources.snapshots.release)
        self.snapshot_count += 1
        self._resources.timing.add("snapshot", self._services.time() - copy.began_at)

    def announce(self, copy: Copy) -> None:
        """Tell the user of a copy that is given."""
        events = self._resources.events
        if events.are_wanted:
            events.tell_now(SnapshotTaken(copy.round, copy.iteration, copy.snapshot.by_name(), self._island))

    def snapshot_of(self, round: int) -> FlatBuffers | None:
        """Return the snapshot that is on offer in that round, if there is one."""
        return self.offer.snapshot if self.offer is not None and self.offer.round == round else None

    def withdraw(self) -> None:
        """Stop the streams of the snapshot on offer, if there is one, and of the state that belongs to it."""
        offer, self.offer = self.offer, None
        if self._states is not None:
            self._states.withdraw()
        if offer is not None:
            self._server.withdraw(offer)
