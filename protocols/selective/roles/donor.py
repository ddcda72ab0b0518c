"""Copies a donor's weights inside a training step, and sends the copy to the ranks that adopt the average.

A restarted rank, and a replacer that copies a donor's whole state, also receive the donor's optimizer and policy state.
The donor copies this state in the same step as its weights, because a later copy would not match them. With Adam, the
copies take three times the size of the model.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from asyncdist.messaging.services import Services
from asyncdist.protocols.joining.state_transfer import StateTransfer, copied
from asyncdist.protocols.parameter_stream.messages import safe_point_count
from asyncdist.protocols.parameter_stream.server import Offer, SnapshotServer
from asyncdist.protocols.selective.roles.resources import RoleResources
from asyncdist.protocols.step_info import SnapshotTaken
from asyncdist.tensors.device_copy import DeviceCopy
from asyncdist.tensors.flat_state import FlatBuffers

_UNSOUND: Final = "weights are not finite"


@dataclass(frozen=True, slots=True, eq=False)
class Copy:
    """A complete or unfinished copy of this rank's weights.

    Attributes:
        state_safe_points: Number of safe points needed to send the optimizer and policy state, or 0 for weights only.
        under_way: Unfinished copy from a GPU, or None if the snapshot is complete.
    """

    round: int
    snapshot: FlatBuffers
    iteration: int
    began_at: float
    state_safe_points: int
    under_way: DeviceCopy | None


class Donor:
    """Copies this rank's weights for an averaging round, and lets the receiving ranks request the copy.

    Args:
        states: Sends the optimizer and policy state to ranks that adopt this rank's whole state. None if this rank
            never sends it.
        island: Number of the other island that requests the copies, or -1 for this rank's own island.
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
        """Start copying the current weights. On a GPU, the copy completes during the next steps.

        Args:
            with_state: Whether to copy the optimizer and policy state as well, for a restarted rank. This copy is
                complete when the method returns. If other ranks adopt this rank's whole state, this state is always
                copied.

        Raises:
            ValueError: The model has changed since the policy was created. No copy is offered.
        """
        began_at = self._services.time()
        snapshot = self._resources.own.snapshots.acquire()
        with_state = with_state or (self._resources.adopter is not None and self._states is not None)
        state_safe_points = self._offer_state(round) if with_state else 0
        try:
            under_way = self._resources.own.flat.start_snapshot(snapshot)
        except ValueError:
            self._offer_nothing(round, snapshot)
            raise
        return Copy(round, snapshot, iteration, began_at, state_safe_points, under_way)

    def _offer_state(self, round: int) -> int:
        assert self._states is not None, "a rank without a state transfer is asked for its state"
        state = copied(self._resources.state.whole_state)
        if state is None:
            return 0
        self._states.offer(round, state)
        return safe_point_count(state.numel())

    def fault_of(self, copy: Copy) -> str:
        """Return why a complete copy of the weights cannot be sent, or "" if it can."""
        return "" if self._resources.own.can_be_sent(copy.snapshot) else _UNSOUND

    def keep(self, copy: Copy) -> None:
        """Store a complete copy of the weights until `open_offer` offers it."""
        self._kept = copy

    def drop(self, copy: Copy) -> None:
        """Discard a copy, and the optimizer and policy state that belong to it."""
        self._offer_nothing(copy.round, copy.snapshot)

    def _offer_nothing(self, round: int, snapshot: FlatBuffers) -> None:
        self._resources.own.snapshots.release(snapshot)
        if self._states is not None:
            self._states.withdraw_up_to(round)

    def open_offer(self, round: int) -> None:
        """Let the receiving ranks of ``round`` request the copy that :meth:`keep` has stored."""
        copy, self._kept = self._kept, None
        assert copy is not None, f"round {round} has no snapshot to give"
        self.offer = self._server.offer(Offer(round, copy.snapshot, self._resources.own.snapshots.release))
        self.snapshot_count += 1
        self._resources.own.note_time("snapshot", self._services.time() - copy.began_at)

    def announce(self, copy: Copy) -> None:
        """Notify the user's ``on_event`` callback that this rank's weights were copied for a round."""
        events = self._resources.own.events
        if events.has_callback:
            events.deliver_now(SnapshotTaken(copy.round, copy.iteration, copy.snapshot.by_name(), self._island))

    def snapshot_of(self, round: int) -> FlatBuffers | None:
        """Return the copy of the weights that is offered in ``round``, or None if there is none."""
        return self.offer.snapshot if self.offer is not None and self.offer.round == round else None

    def withdraw(self) -> None:
        """Stop sending the offered copy of the weights, and the optimizer and policy state that belong to it."""
        offer, self.offer = self.offer, None
        if self._states is not None:
            self._states.withdraw()
        if offer is not None:
            self._server.withdraw(offer)
