"""Implements the member's side of a round, as a state machine that turns events into instructions.

`RoundMember` is the counterpart of `protocols.selective.rounds.RoundCoordinator`: a plain synchronous object without
asyncio, torch or a clock, so the same events give the same instructions. `protocols.selective.roles.member_roles`
passes each event (a message of the coordinator, a step, the end of a copy or of an exchange) to it, and carries out the
instructions in the given order. Copying and changing weights is only possible inside a step: these are `StepAction`
values, which `on_step` returns.

A member has one role at a time. `TRANSITIONS` lists all changes of its state:

========== ============================ ==================================================
State      Meaning                      Left by
========== ============================ ==================================================
IDLE       no part in a round           an assignment
CHOSEN     donor; the next step copies  a step
COPYING    donor; the weights are       the end of the copy, finite or not
           being copied
GIVING     donor; the snapshot is on    the end of the round
           offer
ASKING     replacer; the round can      `Frozen`
           still change
READING    replacer; adds the streams   the complete average, or a failure
COMPLETE   replacer; the next step      the application
           applies the average
LEAVING    declines every role          the end of the policy
LASTING    leaves, with its snapshot    the end of the round
           still on offer
OUT        takes no part any longer     nothing
========== ============================ ==================================================

A newer assignment, `End` and the loss of the coordinator end any role. A message of the coordinator that does not fit
the state is late, and has no effect.

On the sharded route, a member may reduce in addition to its role: it adds up one part of the donors' snapshots, and
gives the mean of that part to the replacers. It does so from the assignment to the end of the round, even if its own
average has been applied. It stops early if it fails to give, or if it leaves before it has given or taken. A replacer
that fetches parts for other ranks of its host shares them for the same time.
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
    """Names a member's activity; the module's table explains the values."""

    IDLE = auto()
    CHOSEN = auto()
    COPYING = auto()
    GIVING = auto()
    ASKING = auto()
    READING = auto()
    COMPLETE = auto()
    LEAVING = auto()
    LASTING = auto()
    OUT = auto()


class Event(Enum):
    """Names the causes of a member's changes of state."""

    CHOSEN_TO_GIVE = auto()
    CHOSEN_TO_TAKE = auto()
    FROZEN_WITH_DONORS = auto()
    FROZEN_WITHOUT_DONORS = auto()
    STEP = auto()
    COPIED = auto()
    UNSOUND = auto()
    AVERAGED = auto()
    FAILED = auto()
    APPLIED = auto()
    ROLE_ENDED = auto()
    LEAVE = auto()
    LEFT = auto()


GIVING_STATES: Final = frozenset({State.CHOSEN, State.COPYING, State.GIVING, State.LASTING})
_TAKING_STATES: Final = frozenset({State.ASKING, State.READING, State.COMPLETE})

#: The next state for each state and event. A pair that is not listed is impossible, or a late message without effect.
TRANSITIONS: Final[Mapping[tuple[State, Event], State]] = {
    (State.IDLE, Event.CHOSEN_TO_GIVE): State.CHOSEN,
    (State.IDLE, Event.CHOSEN_TO_TAKE): State.ASKING,
    (State.CHOSEN, Event.STEP): State.COPYING,
    (State.COPYING, Event.COPIED): State.GIVING,
    (State.COPYING, Event.UNSOUND): State.IDLE,
    (State.ASKING, Event.FROZEN_WITH_DONORS): State.READING,
    (State.ASKING, Event.FROZEN_WITHOUT_DONORS): State.COMPLETE,
    (State.READING, Event.AVERAGED): State.COMPLETE,
    (State.READING, Event.FAILED): State.IDLE,
    (State.COMPLETE, Event.APPLIED): State.IDLE,
    (State.COMPLETE, Event.FAILED): State.IDLE,
    **{(state, Event.ROLE_ENDED): State.IDLE for state in (GIVING_STATES | _TAKING_STATES) - {State.LASTING}},
    (State.LASTING, Event.ROLE_ENDED): State.LEAVING,
    **{(state, Event.LEAVE): State.LEAVING for state in (State.IDLE, State.CHOSEN, State.COPYING)},
    (State.GIVING, Event.LEAVE): State.LASTING,
    (State.LEAVING, Event.LEFT): State.OUT,
}


class Tell(NamedTuple):
    """Send the coordinator a message, with ``round`` in the frame's header."""

    message: ControlMessage
    round: int = 0


class EnterEpoch(NamedTuple):
    """Exchange messages of this epoch from now on, and drop messages of earlier epochs."""

    epoch: int


class RefuseUpTo(NamedTuple):
    """Abort the streams of replacers that ask for a snapshot of a round up to this one."""

    round: float


class RefuseMeans(NamedTuple):
    """Abort the streams of replacers that ask for a part of the mean of a round up to this one."""

    round: int


class Withdraw(NamedTuple):
    """Withdraw the snapshot on offer, and stop its streams."""


class Give(NamedTuple):
    """Offer the snapshot that was taken at this iteration."""

    round: int
    iteration: int


class Ask(NamedTuple):
    """Prepare the exchange of a round that is not frozen, and ask its donors, if it has any, for their snapshots."""

    round: int
    assign: Assign


class Reduce(NamedTuple):
    """Ask the donors for this member's part, and prepare to share the parts that it fetches for its host.

    Nothing is added up before the round is frozen.
    """

    round: int
    assign: Assign


class AddUp(NamedTuple):
    """Make the mean of this member's part, and offer it to the replacers."""

    round: int
    frozen: Frozen


class StopReducing(NamedTuple):
    """Stop making the mean of the part, or withdraw it."""

    round: int


class Read(NamedTuple):
    """Add up the donors' snapshots; `on_averaged` or `on_failed` reports the result."""

    round: int
    frozen: Frozen


class Discard(NamedTuple):
    """Stop the exchange and free its memory; the next step reports the reason."""

    round: int
    reason: str


Instruction: TypeAlias = (
    Tell
    | EnterEpoch
    | RefuseUpTo
    | RefuseMeans
    | Withdraw
    | Give
    | Ask
    | Reduce
    | AddUp
    | StopReducing
    | Read
    | Discard
)
Instructions: TypeAlias = tuple[Instruction, ...]


class TakeSnapshot(NamedTuple):
    """Start to copy the weights; `on_copied` reports the end of the copy."""

    round: int


class Apply(NamedTuple):
    """Apply the new weights, and then call `on_applied`."""

    round: int
    frozen: Frozen


#: Actions that are only possible inside a step, because they copy or change weights.
StepAction: TypeAlias = TakeSnapshot | Apply


class RoundMember:
    """Keeps one member's role, and turns events into instructions.

    Attributes:
        state: Activity of the member.
        round: Round of the current role; 0 without a role.
        last_round: Newest round that named this member.
        reducing: Round in which this member adds up a part or shares fetched parts; 0 for none.
        admitting: Newest round in which this member gave or took the whole state of a rank; 0 for none.
        wants_step: Whether the next step has work to do.
        newest: This member's newest report; None before the first one.
        is_joining: Whether this rank was restarted and waits for admission.
        declined: Number of refused roles, by reason.
        abandoned: Number of rounds given up as a replacer, by reason.
        unapplied_count: Number of complete averages that are never applied.
    """

    __slots__ = (
        "_adds_up",
        "_applied_iteration",
        "_frozen",
        "_judged_iteration",
        "abandoned",
        "admitting",
        "declined",
        "is_joining",
        "last_round",
        "newest",
        "reducing",
        "round",
        "state",
        "unapplied_count",
        "wants_step",
    )

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
        """Take a role in a new round, and end the role in the last round."""
        self.last_round = max(self.last_round, round)
        self._judged_iteration = max(self._judged_iteration, assign.judged_iteration)
        if self.state is State.OUT:
            return ()
        before = (
            *self._end_reducing(),
            *self._end_giving(),
            RefuseUpTo(round - 1),
            *self._end_taking(f"round {round} began"),
        )
        if self.state is State.LEAVING:
            return (*before, self._decline(round, "leaving"))
        if assign.admits:
            self.admitting = round
        if assign.role == DONOR:
            self._go(Event.CHOSEN_TO_GIVE, round)
            return (*before, *self._reduce(round, assign))
        if self._applied_iteration > assign.judged_iteration and not assign.admits:
            reason = f"replaced at iteration {self._applied_iteration}, after the judged iteration"
            return (*before, RefuseMeans(round), self._decline(round, reason))
        self._go(Event.CHOSEN_TO_TAKE, round)
        return (*before, *self._reduce(round, assign), Ask(round, assign))

    def on_frozen(self, frozen: Frozen, round: int) -> Instructions:
        """Note that the donors are fixed, so that their snapshots may be added up."""
        adds_up: Instructions = ()
        if round and self.reducing == round and not self._adds_up:  # 0 is not a round
            self._adds_up = True
            adds_up = (AddUp(round, frozen),)
        if self.state is not State.ASKING or self.round != round:
            return adds_up
        self._go(Event.FROZEN_WITH_DONORS if frozen.donors else Event.FROZEN_WITHOUT_DONORS, round)
        self._frozen = frozen
        return (*adds_up, Read(round, frozen)) if frozen.donors else adds_up

    def on_end(self, reason: str, round: int) -> Instructions:
        """Give up the role in that round."""
        if self.state is State.OUT:
            return ()
        reducing = self._end_reducing() if self.reducing == round else ()
        giving = self._end_giving() if self.round == round else ()
        return (*reducing, *giving, RefuseUpTo(round), *(self._end_taking(reason) if self.round == round else ()))

    def on_coordinator_gone(self, why: str) -> Instructions:
        """Give up the role: the coordinator is lost, has stopped or is replaced, as ``why`` says."""
        if self.state is State.OUT:
            return ()
        giving = (*self._end_reducing(), *self._end_giving())
        return (*giving, RefuseUpTo(self.last_round), *self._end_taking(f"the coordinator {why}"))

    def on_epoch(self, epoch: int, incarnation: int) -> Instructions:
        """Take part in the epoch of a new coordinator; its predecessor is gone already."""
        return (EnterEpoch(epoch), *self.on_rejoin(incarnation))

    def on_rejoin(self, incarnation: int) -> Instructions:
        """Answer a coordinator that does not know this member; a rank that waits for admission does not answer."""
        return () if self.is_joining else (self.joined(self.newest, incarnation),)

    def joined(self, newest: Report | None, incarnation: int = 0) -> Tell:
        """Return the message for a new coordinator; ``newest`` is this rank's newest report."""
        report = newest or Report(-1, 0.0, 0.0, 0.0)
        facts = self.last_round, self._applied_iteration, self._judged_iteration
        times = report.step_time_s, report.interval_s
        return Tell(Joined(*facts, report.iteration, report.value, *times, incarnation))

    # ---------------------------------------------------------------- steps, copies and exchanges

    def on_step(self) -> StepAction | None:
        """Return the action that is due in this step; None if there is none."""
        self.wants_step = False
        if self.state is State.CHOSEN:
            self._go(Event.STEP, self.round)
            return TakeSnapshot(self.round)
        if self.state is State.COMPLETE:
            assert self._frozen is not None, f"round {self.round} is complete without having been frozen"
            self.wants_step = True  # until it is applied: `model_builder` may raise, and the next step retries
            return Apply(self.round, self._frozen)
        return None

    def awaits_copy(self, round: int) -> bool:
        """Return whether the copy for that round is still needed."""
        return self.state is State.COPYING and self.round == round

    def on_copied(self, round: int, iteration: int, *, fault: str = "", state_safe_points: int = 0) -> Instructions:
        """Note that a copy is complete. No instructions are returned if its round has ended meanwhile.

        Args:
            round: Round of the copy.
            iteration: Iteration of the copy.
            fault: Reason why the copy cannot be given; "" if it can.
            state_safe_points: Value of the same name in `Ready`.
        """
        if not self.awaits_copy(round):
            return ()
        if fault:
            self._go(Event.UNSOUND)
            return (*self._end_reducing(), RefuseUpTo(round), self._decline(round, fault))
        self._go(Event.COPIED, round)
        return (Give(round, iteration), Tell(Ready(iteration, state_safe_points), round))

    def on_refused(self, round: int, reason: str) -> Instructions:
        """Give up a complete average, since the rest of the donor's state has not arrived."""
        if self.state is not State.COMPLETE or self.round != round:
            return ()
        self._go(Event.FAILED)
        return (self._discard(round, reason), Tell(Abandoned(reason), round))

    def on_averaged(self, round: int) -> bool:
        """Note that the average is complete, and return whether it is still needed."""
        if self.state is not State.READING or self.round != round:
            return False
        self._go(Event.AVERAGED, round)
        return True

    def on_failed(self, round: int, reason: str) -> Instructions:
        """Give up the round, since its exchange has failed."""
        if self.state is not State.READING or self.round != round:
            return ()
        self._go(Event.FAILED)
        return (self._discard(round, reason), Tell(Abandoned(reason), round))

    def on_applied(self, iteration: int) -> Instructions:
        """Note that the new weights are in place; reports up to this iteration are void."""
        applied = Tell(Applied(iteration), self.round)
        self._go(Event.APPLIED)
        self.wants_step = False
        self._applied_iteration = iteration
        self._frozen = None
        return (applied,)

    def on_leave(self) -> Instructions:
        """Begin to leave: roles end, but a snapshot on offer stays available until its round has ended."""
        if self.state is State.OUT:
            return ()
        instructions: list[Instruction] = []
        if self.state not in (State.GIVING, State.IDLE):  # the replacers ask the donors for this member's part
            instructions += self._end_reducing()
        instructions += self._end_taking("the policy ended")
        if self.state in (State.CHOSEN, State.COPYING):
            instructions.append(self._decline(self.round, "leaving"))
        self._go(Event.LEAVE, self.round if self.state is State.GIVING else 0)
        return (*instructions, RefuseUpTo(math.inf))

    def on_left(self) -> Instructions:
        """Finish leaving: the last streams have ended, or the timeout has passed."""
        if self.state is State.OUT:
            return ()
        instructions = (*self._end_reducing(), *self._end_giving(), Tell(Leave()))
        self._go(Event.LEFT)
        return instructions

    # ---------------------------------------------------------------- helpers

    def _go(self, event: Event, round: int = 0) -> None:
        """Change the state according to the table."""
        assert (self.state, event) in TRANSITIONS, f"{event} in {self.state} of round {self.round}"
        self.state = TRANSITIONS[self.state, event]
        self.round = round
        if self.state in (State.CHOSEN, State.COMPLETE):
            self.wants_step = True

    def _reduce(self, round: int, assign: Assign) -> Instructions:
        """Begin to reduce, or to share, if the assignment says so. There is no round 0."""
        if (assign.part < 0 and not assign.sources) or round < 1:
            return ()
        self.reducing, self._adds_up = round, assign.part < 0
        return (Reduce(round, assign),)

    def _end_reducing(self) -> Instructions:
        """Stop reducing and sharing."""
        number, self.reducing = self.reducing, 0
        return (StopReducing(number),) if number else ()

    def _end_giving(self) -> Instructions:
        """End a donor's role, if there is one."""
        if self.state not in GIVING_STATES:
            return ()
        withdraw = (Withdraw(),) if self.state in (State.GIVING, State.LASTING) else ()
        refuse = RefuseUpTo(self.round)
        self._go(Event.ROLE_ENDED)
        return (*withdraw, refuse)

    def _end_taking(self, reason: str) -> Instructions:
        """End a replacer's role before its average is applied, if there is one."""
        if self.state not in _TAKING_STATES:
            return ()
        number = self.round
        if self.state is State.COMPLETE and self._frozen is not None and self._frozen.donors:
            self.unapplied_count += 1
        self._go(Event.ROLE_ENDED)
        return (self._discard(number, reason),)

    def _discard(self, round: int, reason: str) -> Discard:
        """Count a round that is given up. The next step reports it, even if the coordinator's `End` arrives first."""
        count_reason(self.abandoned, reason)
        self._frozen = None
        self.wants_step = True
        return Discard(round, reason)

    def _decline(self, round: int, reason: str) -> Tell:
        count_reason(self.declined, reason)
        return Tell(Decline(reason), round)
