"""Decides which rank coordinates a policy when its coordinator is lost, has stopped, or does not answer.

All ranks have the same order of succession. When a rank detects that the coordinator is lost or has stopped, the first
rank in that order becomes coordinator. If that rank has not detected the loss itself, the detecting rank nominates it.
Each new coordinator opens an *epoch*. No two ranks open the same epoch, and each rank follows the largest epoch that it
knows. All ranks therefore end up with one coordinator, even if several take over at the same time. (An epoch
corresponds to a term in Raft, Ongaro and Ousterhout 2014. No vote is needed, because no decision must outlive its
coordinator.)

`Watch` detects that the coordinator does not respond, although its rank is not reported as lost. The first members of
the succession ask for an answer in each report. One of them takes over if answers are missing or too late. This is an
adaptive failure detector (Hayashibara et al. 2004) that uses missed rounds instead of a probability.
"""

from collections import deque
from collections.abc import Sequence
from itertools import islice
from typing import Final, NamedTuple, TypeAlias

from asyncdist.messaging.wire import EPOCH_MAX
from asyncdist.protocols.selective.waiting import NOISE_S

#: Number of nominations of a rank, one per report of the nominating rank, before the next rank is nominated.
NOMINATION_COUNT_MAX: Final = 3
#: Number of members that ask the coordinator for answers. A single member would not suffice, because it may be lost or
#: slow as well.
WATCHER_COUNT: Final = 3
#: Number of reports, and of seconds, without an answer after which the first watching member takes over.
MISSED_REPORT_COUNT: Final = 3
SILENT_S: Final = 1.0
#: An answer is late if it arrives after more than this many steps. Among equally fast ranks, an answer takes two steps.
LATE_STEPS: Final = 3
#: Number of the coordinator's messages that each round waits for: assignment, freeze and end.
_ROUND_ANSWER_COUNT: Final = 3
_RECENT_COUNT: Final = 8
_LATE_COUNT: Final = 6  # number of late answers, among the recent ones, after which a member takes over


class Nominate(NamedTuple):
    """Instruction: ask ``dest``, the next rank in the succession, to become coordinator, because there is none."""

    dest: int


class Claim(NamedTuple):
    """Instruction: become the coordinator with number ``epoch``, and notify all members."""

    epoch: int


class Follow(NamedTuple):
    """Instruction: accept ``coordinator`` as the coordinator with number ``epoch``."""

    epoch: int
    coordinator: int


class Inform(NamedTuple):
    """Instruction: notify ``dest`` of the current coordinator."""

    dest: int


Step: TypeAlias = Nominate | Claim | Follow | Inform
Steps: TypeAlias = tuple[Step, ...]


class Succession:
    """State machine of one rank, which tracks the coordinator and decides which rank takes over.

    Args:
        order: Ranks that may take over, in order. They include this rank, unless it is a reserved coordinator.
        coordinator: Rank that coordinates in epoch 0.

    Attributes:
        epoch: Largest epoch (number of a coordinator) known to this rank.
        coordinator: Coordinator of that epoch, or None if it is lost or has stopped.
        is_newcomer: Whether this rank was restarted and has joined a running policy.
    """

    def __init__(self, rank: int, order: Sequence[int], coordinator: int) -> None:
        self.rank = rank
        self.epoch = 0
        self.coordinator: int | None = coordinator
        self.is_newcomer = False
        self._order = tuple(order)
        self._lost: set[int] = set()
        self._unavailable: set[int] = set()  # ranks that are lost, have left, or are not admitted yet
        self._passed_over: set[int] = set()  # ranks skipped for now, because they did not answer nominations
        self._nomination_count = 0
        self._lost_claim: tuple[int, int] | None = None  # epoch and rank of the last claim by a lost coordinator

    def on_lost(self, rank: int) -> Steps:
        """Record that a rank is lost or has stopped coordinating. Look for a new coordinator if there is none."""
        self._lost.add(rank)
        self._unavailable.add(rank)
        if rank == self.coordinator:
            self.coordinator = None
            self._passed_over.clear()
            self._nomination_count = 0
        return self._find_coordinator() if self.coordinator is None else ()

    def on_left(self, rank: int) -> Steps:
        """Record that a rank has left and cannot take over. A coordinator that leaves continues to coordinate."""
        self._unavailable.add(rank)
        return self._find_coordinator() if self.coordinator is None else ()

    def on_admitted(self, rank: int) -> None:
        """Record that a restarted rank was admitted and may take over."""
        self._lost.discard(rank)
        self._unavailable.discard(rank)

    def begin_in(self, epoch: int) -> None:
        """Start a restarted rank in ``epoch``. No rank may take over before :meth:`on_admitted` is called for it."""
        self.epoch, self.is_newcomer = epoch, True
        self._unavailable.update(self._order)
        self._unavailable.add(self.rank)

    def leave(self) -> None:
        """Never take over from now on, because this rank leaves the policy.

        If it coordinates, it continues to do so.
        """
        self._unavailable.add(self.rank)

    def on_cadence(self) -> Steps:
        """Repeat the search for a coordinator, since a message may have been lost or the nominated rank may be busy."""
        if self.coordinator is not None:
            return ()
        self._nomination_count += 1
        if self._nomination_count >= NOMINATION_COUNT_MAX:
            self._nomination_count = 0
            if (passed_over := self._next()) is not None:
                self._passed_over.add(passed_over)
        return self._find_coordinator()

    def on_nomination(self, source: int, epoch: int) -> Steps:
        """Handle a request from ``source`` to succeed the coordinator with number ``epoch``, which has stopped."""
        if epoch < self.epoch:
            return () if self.coordinator is None else (Inform(source),)
        if epoch == self.epoch or epoch > EPOCH_MAX:
            return ()
        # This rank never knew the coordinator of this epoch, which has already stopped.
        self.epoch, self.coordinator = epoch, None
        return self._find_coordinator()

    def on_suspicion(self) -> Steps:
        """Take over from a coordinator that does not answer."""
        is_due = self.coordinator not in (None, self.rank) and self.rank not in self._unavailable
        return self._claim() if is_due else ()

    def on_claim(self, epoch: int, coordinator: int, source: int) -> Steps:
        """Handle the message from ``source`` that ``coordinator`` is the coordinator with number ``epoch``."""
        if epoch < self.epoch:
            return () if self.coordinator is None else (Inform(source),)
        if (epoch == self.epoch and self.coordinator is not None) or epoch > EPOCH_MAX or coordinator == self.rank:
            return ()  # already known, or false: no other rank can claim this rank's epochs
        if coordinator in self._lost:  # the coordinator was lost after it had claimed the epoch
            self.epoch = max(self.epoch, epoch)
            self.coordinator = None
            self._lost_claim = epoch, coordinator
            return self._find_coordinator()
        # If this rank has seen that the epoch's coordinator was lost, only that rank's restarted process may make the
        # claim.
        if epoch == self.epoch and (epoch, coordinator) != self._lost_claim:
            return ()
        self.epoch, self.coordinator = epoch, coordinator
        self._passed_over.clear()
        return (Follow(epoch, coordinator),)

    def is_available(self, rank: int) -> bool:
        """Return whether, to this rank's knowledge, ``rank`` is a live member of the policy."""
        return rank not in self._unavailable

    def place(self, limit: int) -> int | None:
        """Return this rank's position, from 0, among the ranks that can take over, or None if it is >= ``limit``."""
        if self.rank == self.coordinator or self.rank in self._unavailable:
            return None
        able = (rank for rank in self._order if rank != self.coordinator and rank not in self._unavailable)
        return next((place for place, rank in enumerate(islice(able, limit)) if rank == self.rank), None)

    # ---------------------------------------------------------------- helpers

    def _next(self) -> int | None:
        for rank in self._order:
            if rank not in self._unavailable and (rank == self.rank or rank not in self._passed_over):
                return rank
        return None

    def _find_coordinator(self) -> Steps:
        rank = self._next()
        if rank is None:
            return ()
        return self._claim() if rank == self.rank else (Nominate(rank),)

    def _claim(self) -> Steps:
        """Make this rank the coordinator, with the next epoch (coordinator number) that only this rank may use.

        Do nothing above ``EPOCH_MAX``, which only forged epochs reach.
        """
        count, place = len(self._order), self._order.index(self.rank)
        epoch = self.epoch - (self.epoch - 1 - place) % count + count
        if epoch > EPOCH_MAX:
            return ()
        self.epoch = epoch
        self.coordinator = self.rank
        self._passed_over.clear()
        return (Claim(self.epoch),)


class ReportedCoordinator:
    """Stores the current coordinator, as reported by other ranks, on a rank that never coordinates."""

    def __init__(self) -> None:
        self.coordinator: int | None = None
        self.epoch = self.report_count = self.nonfinite_count = 0

    def follow(self, epoch: int, coordinator: int | None) -> None:
        """Store a new coordinator and its number ``epoch``, or None if there is no coordinator at present."""
        self.epoch, self.coordinator = epoch, coordinator

    def statistics(self) -> None:
        """Return None, because this rank never coordinates."""

    def report(self, iteration: int, call: int, value: float) -> None:
        """Do nothing, because another rank reports for this rank."""

    def leave(self) -> None:
        """Do nothing, because this rank does not watch or replace the coordinator."""


#: Object that knows the current coordinator.
CoordinatorView: TypeAlias = Succession | ReportedCoordinator


class Watch:
    """Detects that a policy's coordinator does not answer this member, or answers too late."""

    def __init__(self) -> None:
        self._asked_at: float | None = None  # time of the first report since the last answer
        self._asked_in = 0  # step of the first report since the last answer
        self._missed_count = 0  # number of further reports without an answer
        self._silent_s = 0.0  # seconds without an answer, not counting this rank's own pauses
        self._interval_s = 0.0
        self._late: deque[bool] = deque(maxlen=_RECENT_COUNT)

    def begin(self) -> None:
        """Discard all observations, because another rank now coordinates."""
        self._asked_at = None
        self._late.clear()

    def on_report(self, step: int, interval_s: float, now: float) -> None:
        """Record that this rank sends a report that asks for an answer."""
        usual_s = min(interval_s, self._interval_s)  # a pause lengthens only one of the two intervals
        self._interval_s = interval_s
        if self._asked_at is None:
            self._asked_at, self._asked_in = now, step
            self._missed_count, self._silent_s = 0, 0.0
        else:
            self._missed_count += 1
            self._silent_s += usual_s

    def on_answer(self, step: int, now: float) -> None:
        """Record that the coordinator has answered a report. ``step`` is this rank's current step."""
        if self._asked_at is None:
            return
        took_s, self._asked_at = now - self._asked_at, None
        is_long = took_s > NOISE_S and step - self._asked_in > LATE_STEPS
        self._late.append(is_long and _ROUND_ANSWER_COUNT * took_s > self._interval_s)

    def suspicion(self, place: int) -> str | None:
        """Return the reason to take over, such as "has not answered for 2.1 s", or None to keep the coordinator."""
        is_silent = self._silent_s >= SILENT_S * (1 + place) and self._missed_count >= MISSED_REPORT_COUNT * (1 + place)
        if is_silent and self._asked_at is not None:
            return f"has not answered for {self._silent_s:.2g} s"
        return "answers too late" if sum(self._late) >= _LATE_COUNT else None
