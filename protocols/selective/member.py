"""State machine of a member in a round of selective averaging: turns events into instructions.

`RoundMember` is a synchronous object without asyncio, torch or a clock, so the same events always give the same
instructions. Events are messages from the coordinator, steps, and the ends of copies and exchanges.
`protocols.selective.roles.member_roles` passes each event to the object, and carries out the returned instructions in
order. Weights are copied and changed only inside a step. `on_step` returns the actions that do so. The coordinator's
state machine is `protocols.selective.rounds`.

A member has one role at a time. `TRANSITIONS` lists all changes of its state:

========== ============================ ==================================================
State      Meaning                      Left by
========== ============================ ==================================================
IDLE       no part in a round           an assignment
CHOSEN     donor; the next step copies  a step
COPYING    donor; the weights are       the end of the copy
           being copied
GIVING     donor; the snapshot can be   the end of the round
           requested
ASKING     replacer; the round can      `Frozen`
           still change
RECEIVING  replacer; receives and adds  the complete average, or a failure
           the snapshots
COMPLETE   replacer; the next step      applying the average
           applies the average
LEAVING    declines every role          the end of the policy
LASTING    leaving; the snapshot can    the end of the round
           still be requested
OUT        has left the policy          nothing
========== ============================ ==================================================

A newer assignment, `End` or the loss of the coordinator ends any role. A message from the coordinator that does not fit
the state has arrived late, and is ignored.

On the sharded route, a member may also be a reducer. A reducer adds up one part of the donors' snapshots, and sends the
mean of that part to the replacers. A reducer works from the assignment to the end of the round, even if its own average
has been applied. It stops early if its own snapshot fails, or if it leaves before its role is complete. A replacer that
fetches parts for other replacers on its host offers those parts for the same period.
"""

import math
from collections import Counter
from collections.abc import Mapping
from enum import Enum, auto
from typing import Final, NamedTuple, TypeAlias

from asyncdist.protocols.selective.messages import (
    DONOR,
    Abandoned,
    Applied,
    Assign,
    ControlMessage,
    Decline,
    Frozen,
    Joined,
    Leave,
    Ready,
    Report,
    count_reason,
)


class State(Enum):
    """State of a member in an averaging round: its role and progress, or how far it has left the policy.

    The module's table explains the states.
    """

    IDLE = auto()
    CHOSEN = auto()
    COPYING = auto()
    GIVING = auto()
    ASKING = auto()
    RECEIVING = auto()
    COMPLETE = auto()
    LEAVING = auto()
    LASTING = auto()
    OUT = auto()


DONOR_STATES: Final = frozenset({State.CHOSEN, State.COPYING, State.GIVING, State.LASTING})
_REPLACER_STATES: Final = frozenset({State.ASKING, State.RECEIVING, State.COMPLETE})

#: States that can follow each state.
TRANSITIONS: Final[Mapping[State, frozenset[State]]] = {
    State.IDLE: frozenset({State.CHOSEN, State.ASKING, State.LEAVING}),
    State.CHOSEN: frozenset({State.COPYING, State.IDLE, State.LEAVING}),
    State.COPYING: frozenset({State.GIVING, State.IDLE, State.LEAVING}),
    State.GIVING: frozenset({State.IDLE, State.LASTING}),
    State.ASKING: frozenset({State.RECEIVING, State.COMPLETE, State.IDLE}),
    State.RECEIVING: frozenset({State.COMPLETE, State.IDLE}),
    State.COMPLETE: frozenset({State.IDLE}),
    State.LEAVING: frozenset({State.OUT}),
    State.LASTING: frozenset({State.LEAVING}),
    State.OUT: frozenset(),
}


class SendToCoordinator(NamedTuple):
    """Instruction: send a message about ``round`` to the coordinator."""

    message: ControlMessage
    round: int = 0


class EnterEpoch(NamedTuple):
    """Instruction: from now on, send and accept only messages of the coordinator with number ``epoch``."""

    epoch: int


class RefuseUpTo(NamedTuple):
    """Instruction: from now on, abort requests for this rank's weights in ``round`` and earlier rounds."""

    round: float


class RefuseMeans(NamedTuple):
    """Instruction: from now on, abort requests for this rank's part of the mean in ``round`` and earlier rounds."""

    round: int


class Withdraw(NamedTuple):
    """Instruction: stop sending this rank's snapshot, and free its memory."""


class OfferSnapshot(NamedTuple):
    """Instruction: offer the snapshot taken at ``iteration`` to the ranks that receive weights in the round."""

    round: int
    iteration: int


class RequestSnapshots(NamedTuple):
    """Instruction: request the snapshots of all assigned donors, before it is known which of them are ready."""

    round: int
    assign: Assign


class Reduce(NamedTuple):
    """Instruction: request this rank's part of each donor's snapshot, and prepare to share parts on its host.

    The parts are added up only when the round's donors no longer change.
    """

    round: int
    assign: Assign


class AddUp(NamedTuple):
    """Instruction: average this rank's part of the donors' snapshots, and let other ranks request the mean."""

    round: int
    frozen: Frozen


class StopReducing(NamedTuple):
    """Instruction: stop averaging this rank's part of the snapshots, and stop sending its mean."""

    round: int


class ReceiveAverage(NamedTuple):
    """Instruction: receive and average the donors' snapshots, and then call `on_averaged` or `on_failed`."""

    round: int
    frozen: Frozen


class Discard(NamedTuple):
    """Instruction: stop receiving an average, and free its memory. The next step reports the reason to the user."""

    round: int
    reason: str


Instruction: TypeAlias = (
    SendToCoordinator
    | EnterEpoch
    | RefuseUpTo
    | RefuseMeans
    | Withdraw
    | OfferSnapshot
    | RequestSnapshots
    | Reduce
    | AddUp
    | StopReducing
    | ReceiveAverage
    | Discard
)
Instructions: TypeAlias = tuple[Instruction, ...]


class TakeSnapshot(NamedTuple):
    """Action inside a step: start copying this rank's weights, and call `on_copied` when the copy is complete."""

    round: int


class Apply(NamedTuple):
    """Action inside a step: load the new weights into this rank's model, and then call `on_applied`."""

    round: int
    frozen: Frozen


#: Actions that must be inside a step, because they copy or change weights.
StepAction: TypeAlias = TakeSnapshot | Apply


class RoundMember:
    """State machine of one member: tracks its role in an averaging round, and turns events into instructions.

    Attributes:
        round: Number of the current role's round, or 0 without a role.
        last_round: Number of the newest round in which this member was assigned a role.
        reducing: Number of the round in which this member averages a part for others or shares fetched parts, or 0.
        admitting: Number of the newest round in which this member sent or received the optimizer and policy state, or
            0.
        wants_step: Whether the next step must copy or change weights, or report a failed round. Set when the state
            becomes CHOSEN or COMPLETE (``_become``), and when a round is abandoned (``_discard``).
        is_joining: Whether this rank was restarted and is waiting for admission.
        declined: Number of declined roles, by reason.
        abandoned: Number of rounds abandoned as a replacer, by reason.
        unapplied_count: Number of complete averages that were discarded.
    """

    def __init__(self) -> None:
        self.state = State.IDLE
        self.round = 0
        self.last_round = 0
        self.reducing = 0
        self.admitting = 0
        self.wants_step = False
        self.newest: Report | None = None
        self.is_joining = False
        self.declined: Counter[str] = Counter()
        self.abandoned: Counter[str] = Counter()
        self.unapplied_count = 0
        self._frozen: Frozen | None = None
        self._adds_up = False
        self._applied_iteration = self._judged_iteration = -1

    # ---------------------------------------------------------------- the coordinator's messages

    def on_assign(self, assign: Assign, round: int) -> Instructions:
        """Begin or decline the assigned role in a new averaging round, and end the role in the previous round."""
        self.last_round = max(self.last_round, round)
        self._judged_iteration = max(self._judged_iteration, assign.judged_iteration)
        if self.state is State.OUT:
            return ()
        before = (
            *self._end_reducing(),
            *self._end_donor_role(),
            RefuseUpTo(round - 1),
            *self._end_replacer_role(f"round {round} began"),
        )
        if self.state is State.LEAVING:
            return (*before, self._decline(round, "leaving"))
        if assign.admits:
            self.admitting = round
        if assign.role == DONOR:
            self._become(State.CHOSEN, round)
            return (*before, *self._reduce(round, assign))
        if self._applied_iteration > assign.judged_iteration and not assign.admits:
            reason = f"replaced at iteration {self._applied_iteration}, after the judged iteration"
            return (*before, RefuseMeans(round), self._decline(round, reason))
        self._become(State.ASKING, round)
        return (*before, *self._reduce(round, assign), RequestSnapshots(round, assign))

    def on_frozen(self, frozen: Frozen, round: int) -> Instructions:
        """Start adding up the donors' snapshots, because the list of the round's donors is now final."""
        adds_up: Instructions = ()
        if round and self.reducing == round and not self._adds_up:  # 0 means that there is no round
            self._adds_up = True
            adds_up = (AddUp(round, frozen),)
        if self.state is not State.ASKING or self.round != round:
            return adds_up
        self._become(State.RECEIVING if frozen.donors else State.COMPLETE, round)
        self._frozen = frozen
        return (*adds_up, ReceiveAverage(round, frozen)) if frozen.donors else adds_up

    def on_end(self, reason: str, round: int) -> Instructions:
        """End this member's role in ``round``, because the coordinator has ended the round."""
        if self.state is State.OUT:
            return ()
        reducing = self._end_reducing() if self.reducing == round else ()
        ended = self._end_donor_role() if self.round == round else ()
        return (*reducing, *ended, RefuseUpTo(round), *(self._end_replacer_role(reason) if self.round == round else ()))

    def on_coordinator_gone(self, why: str) -> Instructions:
        """End the current role, because the coordinator is lost, has stopped or was replaced.

        Args:
            why: Reason for reports, such as "is gone".
        """
        if self.state is State.OUT:
            return ()
        ended = (*self._end_reducing(), *self._end_donor_role())
        return (*ended, RefuseUpTo(self.last_round), *self._end_replacer_role(f"the coordinator {why}"))

    def on_epoch(self, epoch: int, incarnation: int) -> Instructions:
        """Follow the new coordinator with number ``epoch``, and send it this member's state."""
        return (EnterEpoch(epoch), *self.on_rejoin(incarnation))

    def on_rejoin(self, incarnation: int) -> Instructions:
        """Send this member's state to a coordinator that lacks it, unless this rank is waiting for admission."""
        return () if self.is_joining else (self.joined(self.newest, incarnation),)

    def joined(self, newest: Report | None, incarnation: int = 0) -> SendToCoordinator:
        """Return the instruction to send this member's state and its newest report to a new coordinator."""
        report = newest or Report(-1, 0.0, 0.0, 0.0)
        facts = self.last_round, self._applied_iteration, self._judged_iteration
        times = report.step_time_s, report.interval_s
        return SendToCoordinator(Joined(*facts, report.iteration, report.value, *times, incarnation))

    # ---------------------------------------------------------------- steps, copies and exchanges

    def on_step(self) -> StepAction | None:
        """Return the action that this training step must take, such as copying the weights, or None."""
        self.wants_step = False
        if self.state is State.CHOSEN:
            self._become(State.COPYING, self.round)
            return TakeSnapshot(self.round)
        if self.state is State.COMPLETE:
            assert self._frozen is not None, f"round {self.round} is complete without having been frozen"
            self.wants_step = True  # if `model_builder` raises, the next step tries again
            return Apply(self.round, self._frozen)
        return None

    def awaits_copy(self, round: int) -> bool:
        """Return whether ``round`` still needs the copy of this rank's weights that is being made."""
        return self.state is State.COPYING and self.round == round

    def on_copied(self, round: int, iteration: int, *, fault: str = "", state_safe_points: int = 0) -> Instructions:
        """Offer the complete copy of the weights, or decline the role if the copy has a fault.

        Do nothing if the round has already ended.

        Args:
            fault: Reason why the copy cannot be sent, such as non-finite values. "" if it can be sent.
        """
        if not self.awaits_copy(round):
            return ()
        if fault:
            self._become(State.IDLE)
            return (*self._end_reducing(), RefuseUpTo(round), self._decline(round, fault))
        self._become(State.GIVING, round)
        return (OfferSnapshot(round, iteration), SendToCoordinator(Ready(iteration, state_safe_points), round))

    def on_averaged(self, round: int) -> bool:
        """Record that the average is complete. Return False if ``round`` has ended without it."""
        if self.state is not State.RECEIVING or self.round != round:
            return False
        self._become(State.COMPLETE, round)
        return True

    def on_failed(self, round: int, reason: str) -> Instructions:
        """Abandon the round, because its average could not be received, or cannot be applied."""
        if self.state not in (State.RECEIVING, State.COMPLETE) or self.round != round:
            return ()
        self._become(State.IDLE)
        return (self._discard(round, reason), SendToCoordinator(Abandoned(reason), round))

    def on_applied(self, iteration: int) -> Instructions:
        """Record that the new weights are loaded. They invalidate this rank's reports up to ``iteration``."""
        assert self.state is State.COMPLETE, f"an average was applied in state {self.state.name}"
        applied = SendToCoordinator(Applied(iteration), self.round)
        self._become(State.IDLE)
        self.wants_step = False
        self._applied_iteration = iteration
        self._frozen = None
        return (applied,)

    def on_leave(self) -> Instructions:
        """Start leaving the policy: end all roles, but keep a finished snapshot until its round has ended."""
        if self.state is State.OUT:
            return ()
        instructions: list[Instruction] = []
        if self.state not in (State.GIVING, State.IDLE):  # replacers then request this reducer's part from the donors
            instructions += self._end_reducing()
        instructions += self._end_replacer_role("the policy ended")
        if self.state in (State.CHOSEN, State.COPYING):
            instructions.append(self._decline(self.round, "leaving"))
        if self.state is State.GIVING:
            self._become(State.LASTING, self.round)
        else:
            self._become(State.LEAVING)
        return (*instructions, RefuseUpTo(math.inf))

    def on_left(self) -> Instructions:
        """Finish leaving the policy, after the last streams have ended or the timeout has passed."""
        if self.state is State.OUT:
            return ()
        instructions = (*self._end_reducing(), *self._end_donor_role(), SendToCoordinator(Leave()))
        self._become(State.OUT)
        return instructions

    # ---------------------------------------------------------------- helpers

    def _become(self, state: State, round: int = 0) -> None:
        assert state in TRANSITIONS[self.state], f"{state} after {self.state} of round {self.round}"
        self.state = state
        self.round = round
        if self.state in (State.CHOSEN, State.COMPLETE):
            self.wants_step = True

    def _reduce(self, round: int, assign: Assign) -> Instructions:
        if (assign.part < 0 and not assign.sources) or round < 1:
            return ()
        self.reducing, self._adds_up = round, assign.part < 0
        return (Reduce(round, assign),)

    def _end_reducing(self) -> Instructions:
        number, self.reducing = self.reducing, 0
        return (StopReducing(number),) if number else ()

    def _end_donor_role(self) -> Instructions:
        if self.state not in DONOR_STATES:
            return ()
        withdraw = (Withdraw(),) if self.state in (State.GIVING, State.LASTING) else ()
        refuse = RefuseUpTo(self.round)
        self._become(State.LEAVING if self.state is State.LASTING else State.IDLE)
        return (*withdraw, refuse)

    def _end_replacer_role(self, reason: str) -> Instructions:
        if self.state not in _REPLACER_STATES:
            return ()
        number = self.round
        if self.state is State.COMPLETE and self._frozen is not None and self._frozen.donors:
            self.unapplied_count += 1
        self._become(State.IDLE)
        return (self._discard(number, reason),)

    def _discard(self, round: int, reason: str) -> Discard:
        count_reason(self.abandoned, reason)
        self._frozen = None
        self.wants_step = True
        return Discard(round, reason)

    def _decline(self, round: int, reason: str) -> SendToCoordinator:
        count_reason(self.declined, reason)
        return SendToCoordinator(Decline(reason), round)
