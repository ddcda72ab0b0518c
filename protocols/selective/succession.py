"""Decides which rank coordinates a policy when its coordinator is lost, has stopped, or does not answer.

`Succession` is one rank's view: a plain synchronous object that turns events into instructions, like
`protocols.selective.member`. All ranks know the order of succession. A rank that learns that the coordinator is gone
looks for the first rank of that order that can take over. If that is the rank itself, it claims the task. Otherwise it
nominates the other rank, which may not know of the loss or may have left the policy.

Each claim opens an *epoch*. Every rank has its own epochs: no two ranks ever claim the same one. The largest epoch that
a rank knows of counts. Ranks that have claimed at the same time, or a coordinator that was only slow, thus end up with
one coordinator: the others learn of a larger epoch and follow. (This is the term of Raft, Ongaro and Ousterhout 2014,
without the vote: no decision of a coordinator has to outlive it, since weights change on members only.)

`Watch` judges, on a member, whether the coordinator is responsive. A coordinator answers at the safe points of its
rank. If that rank has long steps, does something else, or is on a host that has lost its connection, rounds wait for it
although it is not reported as lost. The first members of the succession therefore ask for an answer in each report. One
of them takes over if the answer is missing, or if most answers are so late that rounds are lost. This uses no clock of
another rank and no fixed time: the lateness of an answer is measured in steps and reports of the member that waits for
it. A pause of the member itself, as for an evaluation, therefore does not count as silence of the coordinator. That is
the idea of an adaptive failure detector (Hayashibara et al. 2004), with missed rounds instead of a probability. A false
suspicion costs only the round in progress: the suspected coordinator becomes a member.
"""

from collections import deque
from collections.abc import Sequence
from itertools import islice
from typing import Final, NamedTuple, TypeAlias

from asyncdist.messaging.wire import EPOCH_MAX
from asyncdist.protocols.selective.waiting import NOISE_S

#: Number of times that a rank is nominated, once per report of the nominating rank, before the next rank is.
NOMINATION_COUNT_MAX: Final = 3
#: Number of members that ask for answers: more than one, since the first may be lost or slow at the same time.
WATCHER_COUNT: Final = 3
#: Number of consecutive reports and of seconds without an answer after which the first watcher takes over; the others
#: wait for a multiple. Rounds are lost from the second report on, but processes that share cores pause at times.
MISSED_REPORT_COUNT: Final = 3
SILENT_S: Final = 1.0
#: An answer is late after more than this number of steps. With equal steps, one passes on each of the two ranks.
LATE_STEPS: Final = 3
#: Number of answers of the coordinator in a round: the assignment, the freeze, and the end.
_ROUND_ANSWER_COUNT: Final = 3
_RECENT_COUNT: Final = 8
_LATE_COUNT: Final = 6  # of the recent answers


class Nominate(NamedTuple):
    """Notify a rank that the coordinator is gone, and that it is the next one."""

    dest: int


class Claim(NamedTuple):
    """Coordinate from now on, in this epoch, and notify all members."""

    epoch: int


class Follow(NamedTuple):
    """Take part in the epoch of another coordinator."""

    epoch: int
    coordinator: int


class Inform(NamedTuple):
    """Notify a rank of the present coordinator, which it does not know yet."""

    dest: int


Step: TypeAlias = Nominate | Claim | Follow | Inform
Steps: TypeAlias = tuple[Step, ...]


class Succession:
    """Keeps one rank's view of the coordinator and its succession.

    Args:
        rank: This rank.
        order: Ranks that may take over, in this order; they include this rank, unless it is a reserved coordinator.
        coordinator: Rank that coordinates in epoch 0.

    Attributes:
        epoch: Largest epoch that this rank knows of.
        coordinator: Coordinator of that epoch; None if it is gone.
        is_newcomer: Whether this rank was restarted and has begun in a later epoch.
    """

    def __init__(self, rank: int, order: Sequence[int], coordinator: int) -> None:
        self.rank = rank
        self.epoch = 0
        self.coordinator: int | None = coordinator
        self.is_newcomer = False
        self._order = tuple(order)
        self._lost: set[int] = set()
        self._unavailable: set[int] = set()  # lost, left, or out of the policy
        self._passed_over: set[int] = set()  # for now, because they do not answer
        self._nomination_count = 0
        self._lost_claim: tuple[int, int] | None = None  # the last claim of a rank that was lost here: epoch and rank

    def on_lost(self, rank: int) -> Steps:
        """Note that a rank was lost, or that it has stopped as the coordinator."""
        self._lost.add(rank)
        self._unavailable.add(rank)
        if rank == self.coordinator:
            self.coordinator = None
            self._passed_over.clear()
            self._nomination_count = 0
        return self._seek() if self.coordinator is None else ()

    def on_left(self, rank: int) -> Steps:
        """Note that a rank has left the policy and cannot take over. If it coordinates, it continues to do so."""
        self._unavailable.add(rank)
        return self._seek() if self.coordinator is None else ()

    def on_admitted(self, rank: int) -> None:
        """Note that a restarted rank takes part, and may take over."""
        self._lost.discard(rank)
        self._unavailable.discard(rank)

    def begin_in(self, epoch: int) -> None:
        """Begin in an epoch in progress. :meth:`on_admitted` then names the ranks that take part and may take over."""
        self.epoch, self.is_newcomer = epoch, True
        self._unavailable.update(self._order)
        self._unavailable.add(self.rank)

    def leave(self) -> None:
        """Claim nothing from now on, since this rank leaves the policy. If it coordinates, it continues to do so."""
        self._unavailable.add(self.rank)

    def on_cadence(self) -> Steps:
        """Continue to look for a coordinator: a message may have been lost, or the next rank may be busy."""
        if self.coordinator is not None:
            return ()
        self._nomination_count += 1
        if self._nomination_count >= NOMINATION_COUNT_MAX:
            self._nomination_count = 0
            if (passed_over := self._next()) is not None:
                self._passed_over.add(passed_over)
        return self._seek()

    def on_nomination(self, source: int, epoch: int) -> Steps:
        """Answer a rank that knows of no coordinator. If this rank knows of none either, it already looks for one."""
        if epoch < self.epoch:
            return () if self.coordinator is None else (Inform(source),)
        if epoch == self.epoch or epoch > EPOCH_MAX:
            return ()
        self.epoch, self.coordinator = epoch, None  # its coordinator is gone, and this rank never knew it
        return self._seek()

    def on_suspicion(self) -> Steps:
        """Take over from a coordinator that does not answer; it may coordinate again later."""
        is_due = self.coordinator not in (None, self.rank) and self.rank not in self._unavailable
        return self._claim() if is_due else ()

    def on_claim(self, epoch: int, coordinator: int, source: int) -> Steps:
        """Handle a message of ``source`` that a rank coordinates in an epoch."""
        if epoch < self.epoch:
            return () if self.coordinator is None else (Inform(source),)
        if (epoch == self.epoch and self.coordinator is not None) or epoch > EPOCH_MAX or coordinator == self.rank:
            return ()  # known, or false: only this rank itself can claim for it
        if coordinator in self._lost:  # it was lost after its claim
            self.epoch = max(self.epoch, epoch)
            self.coordinator = None
            self._lost_claim = epoch, coordinator
            return self._seek()
        # A lost coordinator does not coordinate any longer, unless its rank was restarted and this rank meets it only
        # now.
        if epoch == self.epoch and (epoch, coordinator) != self._lost_claim:
            return ()
        self.epoch, self.coordinator = epoch, coordinator
        self._passed_over.clear()
        return (Follow(epoch, coordinator),)

    def is_available(self, rank: int) -> bool:
        """Return whether a rank may take part, as far as is known."""
        return rank not in self._unavailable

    def place(self, limit: int) -> int | None:
        """Return this rank's place, from 0, in the present order of succession; None if it is >= ``limit``."""
        if self.rank == self.coordinator or self.rank in self._unavailable:
            return None
        able = (rank for rank in self._order if rank != self.coordinator and rank not in self._unavailable)
        return next((place for place, rank in enumerate(islice(able, limit)) if rank == self.rank), None)

    # ---------------------------------------------------------------- helpers

    def _next(self) -> int | None:
        """Return the rank whose turn it is to take over; None if no rank is known that can."""
        for rank in self._order:
            if rank not in self._unavailable and (rank == self.rank or rank not in self._passed_over):
                return rank
        return None

    def _seek(self) -> Steps:
        rank = self._next()
        if rank is None:
            return ()
        return self._claim() if rank == self.rank else (Nominate(rank),)

    def _claim(self) -> Steps:
        """Open the next epoch of this rank; do nothing beyond the last one, which only false claims can reach."""
        count, place = len(self._order), self._order.index(self.rank)
        epoch = self.epoch - (self.epoch - 1 - place) % count + count
        if epoch > EPOCH_MAX:
            return ()
        self.epoch = epoch
        self.coordinator = self.rank
        self._passed_over.clear()
        return (Claim(self.epoch),)


class Watch:
    """Tracks one member's requests for answers, and the delays of the latest answers."""

    def __init__(self) -> None:
        self._asked_at: float | None = None  # time of the first report since the last answer
        self._asked_in = 0  # the step of that report
        self._missed_count = 0  # number of reports after that one
        self._silent_s = 0.0  # from that report to the newest one, without pauses of this rank
        self._interval_s = 0.0
        self._late: deque[bool] = deque(maxlen=_RECENT_COUNT)

    def begin(self) -> None:
        """Forget everything, because another rank coordinates."""
        self._asked_at = None
        self._late.clear()

    def on_report(self, step: int, interval_s: float, now: float) -> None:
        """Note a report that asks for an answer.

        Args:
            step: Number of this rank's step.
            interval_s: Seconds since this rank's previous report.
            now: The present time.
        """
        usual_s = min(interval_s, self._interval_s)  # a pause makes one interval long
        self._interval_s = interval_s
        if self._asked_at is None:
            self._asked_at, self._asked_in = now, step
            self._missed_count, self._silent_s = 0, 0.0
        else:
            self._missed_count += 1
            self._silent_s += usual_s

    def on_answer(self, step: int, now: float) -> None:
        """Note that the coordinator has read a report.

        Args:
            step: Number of this rank's step in which the answer was received.
            now: The present time.
        """
        if self._asked_at is None:
            return
        took_s, self._asked_at = now - self._asked_at, None
        is_long = took_s > NOISE_S and step - self._asked_in > LATE_STEPS
        self._late.append(is_long and _ROUND_ANSWER_COUNT * took_s > self._interval_s)

    def suspicion(self, place: int) -> str | None:
        """Return the reason to take over, such as "has not answered for 2.1 s"; None if there is none.

        Args:
            place: This rank's place among the watchers, from 0.
        """
        is_silent = self._silent_s >= SILENT_S * (1 + place) and self._missed_count >= MISSED_REPORT_COUNT * (1 + place)
        if is_silent and self._asked_at is not None:
            return f"has not answered for {self._silent_s:.2g} s"
        return "answers too late" if sum(self._late) >= _LATE_COUNT else None
