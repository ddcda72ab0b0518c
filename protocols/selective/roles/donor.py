"""Carries out a donor's part in a round: copies this rank's weights inside a step, and offers the copy.

For a newcomer, the donor also copies the rest of its state in the same step: a later copy of the optimizer's state
would not match the weights. These copies make the step longer; with Adam they are three times the size of the model.
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
        round: Round that asks for the copy.
        snapshot: Buffers of the copy, which are complete when `under_way` has completed.
        iteration: This rank's iteration.
        began_at: Time of its start on the loop's clock, in seconds.
        state_safe_points: Number of safe points for the stream of the rest of the state; 0 without such a stream.
        under_way: Copy from a device in progress; None if the snapshot is complete.
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
        services: Services of this rank.
        server: Streams the snapshots.
        resources: The model, and the memory of the copies.
        states: Gives the rest of the state to newcomers; None if this rank gives to no newcomer.
        island: Number of the other island that the rounds belong to; -1 for this rank's own island.

    Attributes:
        offer: The snapshot on offer; None if there is none.
        snapshot_count: Number of snapshots that have been offered.
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
        """Begin to copy the present weights. A GPU completes the copy during the next steps.

        Args:
            round: Round that asks for the copy.
            iteration: This rank's iteration.
            with_state: Whether to copy the rest of the state for a newcomer, too, before returning.

        Raises:
            ValueError: The model has changed since the policy was made; nothing is given.
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
        """Copy and offer the rest of the state; return the number of safe points for its stream."""
        assert self._states is not None, "a rank without a state transfer is asked for its state"
        state = copied(self._resources.state)
        if state is None:
            return 0
        self._states.offer(round, state)
        return safe_point_count(state.numel())

    def fault_of(self, copy: Copy) -> str:
        """Return the reason why a complete copy cannot be given; "" if it can."""
        return "" if self._resources.own.may_be_given(copy.snapshot) else _UNSOUND

    def keep(self, copy: Copy) -> None:
        """Keep a copy for :meth:`give`."""
        self._kept = copy

    def drop(self, copy: Copy) -> None:
        """Discard a copy, and the state that belongs to it."""
        self._give_nothing(copy.round, copy.snapshot)

    def _give_nothing(self, round: int, snapshot: FlatBuffers) -> None:
        self._resources.snapshots.release(snapshot)
        if self._states is not None:
            self._states.withdraw_up_to(round)

    def give(self, round: int) -> None:
        """Offer the copy that was kept."""
        copy, self._kept = self._kept, None
        assert copy is not None, f"round {round} has no snapshot to give"
        self.offer = self._server.offer(round, copy.snapshot, self._resources.snapshots.release)
        self.snapshot_count += 1
        self._resources.timing.add("snapshot", self._services.time() - copy.began_at)

    def announce(self, copy: Copy) -> None:
        """Notify the user of a copy that is given."""
        events = self._resources.events
        if events.are_wanted:
            events.tell_now(SnapshotTaken(copy.round, copy.iteration, copy.snapshot.by_name(), self._island))

    def snapshot_of(self, round: int) -> FlatBuffers | None:
        """Return the snapshot on offer in that round; None if there is none."""
        return self.offer.snapshot if self.offer is not None and self.offer.round == round else None

    def withdraw(self) -> None:
        """Stop the streams of the snapshot on offer, and of the state that belongs to it, if there are any."""
        offer, self.offer = self.offer, None
        if self._states is not None:
            self._states.withdraw()
        if offer is not None:
            self._server.withdraw(offer)
