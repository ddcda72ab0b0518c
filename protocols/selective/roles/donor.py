"""Carries out a donor's part in a round: copies this rank's weights inside a step, and offers the copy.

For a newcomer it copies the rest of the member's state, too, in the same step: copied later, the optimizer's state
would be that of other weights. So this step is longer by these copies; with Adam it copies three times the model.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final

from asyncdist.messaging.services import Services
from asyncdist.protocols.options import Timing
from asyncdist.protocols.own_state import OwnState
from asyncdist.protocols.parameter_stream.messages import safe_point_count
from asyncdist.protocols.parameter_stream.server import Offer, SnapshotServer
from asyncdist.protocols.selective.joining.state_transfer import StateTransfer, packed
from asyncdist.protocols.selective.member import Instructions, RoundMember, State
from asyncdist.protocols.step_info import PolicyEvent, SnapshotTaken
from asyncdist.tensors.flat_state import FlatBuffers, FlatState, SnapshotPool
from asyncdist.waits import WaitId, WaitKind

logger = logging.getLogger("protocols.selective.roles.donor")

_UNSOUND: Final = "weights are not finite"


@dataclass(frozen=True, slots=True, eq=False)
class _Copy:
    """Describes a copy of this rank's weights: of which round and iteration it is, and when it was begun."""

    round: int
    snapshot: FlatBuffers
    iteration: int
    began_at: float
    state_safe_points: int


class Donor:
    """Gives this rank's state to the rounds that ask for it, one after the other.

    Args:
        services: of this rank.
        member: decides; told when a copy is made.
        carry_out: does what ``member`` answers.
        flat, own: the model's state, and what of it others may have.
        snapshots: lends the copies.
        server: streams them.
        states: gives a newcomer the rest; None where this rank gives to no newcomer.
        whole_state: returns that rest, which is copied at once.
        on_event: told of each snapshot; None where the user does not ask.
        timing: collects the seconds that a snapshot takes.

    Attributes:
        is_held: whether a copy waits for :meth:`conclude` before it is given, since other ranks make a part of it.
        offer: the snapshot on offer; None where there is none.
        snapshot_count: of those that have been offered.
    """

    def __init__(
        self,
        services: Services,
        member: RoundMember,
        carry_out: Callable[[Instructions], None],
        *,
        flat: FlatState,
        own: OwnState,
        snapshots: SnapshotPool,
        server: SnapshotServer,
        states: StateTransfer | None,
        whole_state: Callable[[], Mapping[str, Any]],
        on_event: Callable[[PolicyEvent], None] | None,
        timing: Timing,
    ) -> None:
        self._services = services
        self._member = member
        self._carry_out = carry_out
        self._flat = flat
        self._own = own
        self._snapshots = snapshots
        self._server = server
        self._states = states
        self._whole_state = whole_state
        self._on_event = on_event
        self._timing = timing
        self._copied: tuple[FlatBuffers, float] | None = None  # a snapshot that is whole, and when it was begun
        self._held: _Copy | None = None
        self.is_held = False
        self.offer: Offer | None = None
        self.snapshot_count = 0

    def take_snapshot(self, round: int, iteration: int) -> None:
        """Copy the weights of this moment. A GPU copies them during the next steps; the engine sees when it is done.

        Raises:
            ValueError: the model is not the policy's any more; the round goes on without this rank.
        """
        began_at = self._services.time()
        snapshot = self._snapshots.acquire()
        state_safe_points = self._copy_whole_state(round) if round == self._member.admitting else 0

        copied = _Copy(round, snapshot, iteration, began_at, state_safe_points)

        def on_copied(_: object = None) -> None:
            if self.is_held:
                self._held = copied
                self._services.engine.recheck()
            else:
                self._on_copied(copied)

        try:
            copy = self._flat.start_snapshot(snapshot)
        except ValueError:
            self._give_nothing(round, snapshot)
            self._carry_out(self._member.on_copied(round, iteration, fault="its model has changed"))
            raise
        if copy is None:
            on_copied()
        else:
            self._services.engine.watch(copy, WaitId(WaitKind.ROUND_SNAPSHOT, number=round), on_copied)

    async def fault_of_copy(self) -> str:
        """Wait for the copy that is held, and say why it cannot be given; "" where it can."""
        await self._services.engine.until(lambda: self._held is not None, WaitId(WaitKind.COPY_OF_WEIGHTS))
        assert self._held is not None, "no copy is held"
        return "" if self._own.may_be_given(self._held.snapshot) else _UNSOUND

    def conclude(self, fault: str) -> None:
        """Give the copy that is held, if there is one; with ``fault``, which may be another rank's, do not."""
        held, self._held = self._held, None
        if held is not None:
            self._on_copied(held, fault)

    def _copy_whole_state(self, round: int) -> int:
        """Copy what a newcomer needs besides the weights, and return the safe points that its stream needs."""
        try:
            state = packed(self._whole_state())
        except (TypeError, ValueError) as error:
            logger.warning("a rank that was started again cannot be admitted: the optimizer's state: %s", error)
            return 0
        assert self._states is not None, "a rank that gives to no newcomer is asked to"
        self._states.offer(round, state)
        return safe_point_count(state.numel())

    def _on_copied(self, copy: _Copy, fault: str | None = None) -> None:
        """Give the copy to the round, if that goes on and all values are finite; ``fault`` says so if it is known."""
        member = self._member
        is_wanted = member.state is State.COPYING and member.round == copy.round
        if fault is None:
            fault = "" if is_wanted and self._own.may_be_given(copy.snapshot) else _UNSOUND
        is_given = is_wanted and not fault
        if is_given:
            self._copied = copy.snapshot, copy.began_at
        else:
            self._give_nothing(copy.round, copy.snapshot)
        facts = copy.round, copy.iteration
        self._carry_out(member.on_copied(*facts, fault=fault, state_safe_points=copy.state_safe_points))
        if is_given and self._on_event is not None:  # it may raise, so the coordinator has been told before
            self._on_event(SnapshotTaken(*facts, copy.snapshot.by_name()))

    def _give_nothing(self, round: int, snapshot: FlatBuffers) -> None:
        self._snapshots.release(snapshot)
        if self._states is not None:
            self._states.withdraw_up_to(round)

    def give(self, round: int) -> None:
        """Offer the snapshot that has just been copied."""
        assert self._copied is not None, f"round {round} is to be given no snapshot"
        (snapshot, began_at), self._copied = self._copied, None
        self.offer = self._server.offer(round, snapshot, self._snapshots.release)
        self.snapshot_count += 1
        self._timing.add("snapshot", self._services.time() - began_at)

    def snapshot_of(self, round: int) -> FlatBuffers | None:
        """Return the snapshot that is on offer in that round, if there is one."""
        return self.offer.snapshot if self.offer is not None and self.offer.round == round else None

    def withdraw(self) -> None:
        """Stop the streams of the snapshot on offer, if there is one, and of what a newcomer takes with it."""
        offer, self.offer = self.offer, None
        if self._states is not None:
            self._states.withdraw()
        if offer is not None:
            self._server.withdraw(offer)
