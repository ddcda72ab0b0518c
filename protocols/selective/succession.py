"""Decides which rank coordinates a policy when its coordinator is lost, stops, or does not attend to its task.

`Succession` is one rank's view: a plain synchronous object that turns news into instructions, like
`protocols.selective.member`. All ranks know the order of succession. When a rank learns that the coordinator is gone,
it looks for the first rank of that order which can take over: if that is itself it claims the task, else it nominates
that rank, which may not have heard of the loss or may have left the policy.

Each claim opens an *epoch*. The epochs of one rank are its own: no two ranks ever claim the same one. The largest epoch
that a rank has heard of counts, so ranks that have claimed at the same time, or a coordinator that was only slow, end
up with one coordinator: the others learn of a larger epoch and follow. (The term of Raft, Ongaro and Ousterhout 2014,
without the vote: nothing that a coordinator decides has to outlive it, since weights change on members only.)

`Watch` judges, on a member, whether the coordinator attends to its task. A coordinator answers at the safe points of
its rank. Where that rank's steps are long, where it does something else, or where its host has no connection any more,
rounds wait for it although nothing says that it is lost. So the first members of the succession ask with each report
for an answer, and one of them takes over when it is missing, or when most answers come so late that rounds are lost by
it. No clock of another rank is read, and no fixed time is the measure: an answer is late by the steps and reports of
the member that waits for it. So a pause of its own, as for an evaluation, is no silence of the coordinator. That is the
idea of an adaptive failure detector (Hayashibara et al. 2004), with missed rounds in place of a probability. A false
suspicion costs the round under way, and no more: the coordinator that was suspected becomes a member.
"""

from collections import deque
from collections.abc import Sequence
from itertools import islice
from typing import Final, NamedTuple, TypeAlias

from asyncdist.messaging.wire import EPOCH_MAX
from asyncdist.protocols.selective.waiting import NOISE_S

#: So often is a rank nominated, once in each of the nominating rank's cadences, until the next in the order is.
NOMINATION_COUNT_MAX: Final = 3
#: So many members ask for answers. More than one: the first may be lost, or have long steps, at the same time.
WATCHER_COUNT: Final = 3
#: Reports in a row, and the seconds, without an answer after which the first of them takes over; the next ones wait
#: for a multiple of it. Rounds are lost from the second report on; processes that share cores are away for a while.
MISSED_REPORT_COUNT: Final = 3
SILENT_S: Final = 1.0
#: An answer is late after more steps of this rank than that: one passes here and one there where they are equally long.
LATE_STEPS: Final = 3
#: A round needs so many answers of the coordinator: the assignment, the freeze, and the end.
_ROUND_ANSWER_COUNT: Final = 3
_RECENT_COUNT: Final = 8
_LATE_COUNT: Final = 6  # of the recent answers


class Nominate(NamedTuple):
    """Tell a rank that the coordinator is gone, and that it is the next."""

    dest: int


class Claim(NamedTuple):
    """Coordinate from now on, in this epoch, and tell all members."""

    epoch: int


class Follow(NamedTuple):
    """Take part in the epoch of another rank that coordinates."""

    epoch: int
    coordinator: int


class Inform(NamedTuple):
    """Tell a rank, which has missed it, which rank coordinates now."""

    dest: int


Step: TypeAlias = Nominate | Claim | Follow | Inform
Steps: TypeAlias = tuple[Step, ...]


class Succession:
    """Keeps one rank's view of who coordinates.

    Args:
        rank: this rank.
        order: ranks that may take over, the first one first; with this rank, unless it is a reserved coordinator.
        coordinator: the rank that coordinates in epoch 0.

    Attributes:
        epoch: the largest that this rank has heard of.
        coordinator: the rank that coordinates in it; None when that one is gone.
        is_newcomer: Whether this rank was started again and has begun in an epoch under way.
    """

    def __init__(self, rank: int, order: Sequence[int], coordinator: int) -> None:
        self.rank = rank
        self.epoch = 0
        self.coordinator: int | None = coordinator
        self.is_newcomer = False
        self._order = tuple(order)
        self._lost: set[int] = set()
        self._unavailable: set[int] = set()  # lost, left, or out of the policy
        self._passed_over: set[int] = set()  # for now: they do not answer
        self._nomination_count = 0
        self._lost_claim: tuple[int, int] | None = None  # the last claim of a rank that was lost here: epoch and rank

    def on_lost(self, rank: int) -> Steps:
        """Note that a rank was lost, or as the coordinator has stopped."""
        self._lost.add(rank)
        self._unavailable.add(rank)
        if rank == self.coordinator:
            self.coordinator = None
            self._passed_over.clear()
            self._nomination_count = 0
        return self._seek() if self.coordinator is None else ()

    def on_left(self, rank: int) -> Steps:
        """Note that a rank cannot take over, since it has left the policy. As the coordinator it goes on."""
        self._unavailable.add(rank)
        return self._seek() if self.coordinator is None else ()

    def on_admitted(self, rank: int) -> None:
        """Note that a new process in the place of a rank takes part, and may take over."""
        self._lost.discard(rank)
        self._unavailable.discard(rank)

    def begin_in(self, epoch: int) -> None:
        """Begin in an epoch that is under way. Who takes part, and may take over, is told by :meth:`on_admitted`."""
        self.epoch, self.is_newcomer = epoch, True
        self._unavailable.update(self._order)
        self._unavailable.add(self.rank)

    def leave(self) -> None:
        """Claim nothing from now on: this rank leaves the policy. As the coordinator it goes on."""
        self._unavailable.add(self.rank)

    def on_cadence(self) -> Steps:
        """Go on looking, while there is no coordinator: a message may have been lost, or the next rank may be busy."""
        if self.coordinator is not None:
            return ()
        self._nomination_count += 1
        if self._nomination_count >= NOMINATION_COUNT_MAX:
            self._nomination_count = 0
            if (passed_over := self._next()) is not None:
                self._passed_over.add(passed_over)
        return self._seek()

    def on_nomination(self, source: int, epoch: int) -> Steps:
        """Answer a rank that knows of no coordinator. If none is known here either, this rank is looking already."""
        if epoch < self.epoch:
            return () if self.coordinator is None else (Inform(source),)
        if epoch == self.epoch or epoch > EPOCH_MAX:
            return ()
        self.epoch, self.coordinator = epoch, None  # of a coordinator that this rank has not heard of, and that is gone
        return self._seek()

    def on_suspicion(self) -> Steps:
        """Take the task over from a coordinator that does not attend to it; it may do so again later."""
        is_due = self.coordinator not in (None, self.rank) and self.rank not in self._unavailable
        return self._claim() if is_due else ()

    def on_claim(self, epoch: int, coordinator: int, source: int) -> Steps:
        """Note which rank coordinates in an epoch, as ``source`` says."""
        if epoch < self.epoch:
            return () if self.coordinator is None else (Inform(source),)
        if (epoch == self.epoch and self.coordinator is not None) or epoch > EPOCH_MAX or coordinator == self.rank:
            return ()  # known, or not to be believed: this rank alone claims for itself
        if coordinator in self._lost:  # it has claimed, and died
            self.epoch = max(self.epoch, epoch)
            self.coordinator = None
            self._lost_claim = epoch, coordinator
            return self._seek()
        # A coordinator that was gone here is none any more, unless its process was started again, and is met only now.
        if epoch == self.epoch and (epoch, coordinator) != self._lost_claim:
            return ()
        self.epoch, self.coordinator = epoch, coordinator
        self._passed_over.clear()
        return (Follow(epoch, coordinator),)

    def is_available(self, rank: int) -> bool:
        """Return whether a rank may take part, as far as is known."""
        return rank not in self._unavailable

    def place(self, limit: int) -> int | None:
        """Return this rank's place, from 0, among those that can take over from the coordinator; None from a limit."""
        if self.rank == self.coordinator or self.rank in self._unavailable:
            return None
        able = (rank for rank in self._order if rank != self.coordinator and rank not in self._unavailable)
        return next((place for place, rank in enumerate(islice(able, limit)) if rank == self.rank), None)

    # ---------------------------------------------------------------- helpers

    def _next(self) -> int | None:
        """Return the rank whose turn it is to take over; None when no rank is left that can, as far as is known."""
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
        """Open the next epoch that is this rank's own; after the last one, of which only a lie can tell, none."""
        count, place = len(self._order), self._order.index(self.rank)
        epoch = self.epoch - (self.epoch - 1 - place) % count + count
        if epoch > EPOCH_MAX:
            return ()
        self.epoch = epoch
        self.coordinator = self.rank
        self._passed_over.clear()
        return (Claim(self.epoch),)


class Watch:
    """Remembers when one member asked the coordinator for an answer, and how long the latest answers took."""

    def __init__(self) -> None:
        self._asked_at: float | None = None  # with the first report since the last answer
        self._asked_in = 0  # the step of that report
        self._missed_count = 0  # later reports than that one
        self._silent_s = 0.0  # between that one and the newest, without pauses of this rank
        self._interval_s = 0.0
        self._late: deque[bool] = deque(maxlen=_RECENT_COUNT)

    def begin(self) -> None:
        """Forget all: another rank coordinates."""
        self._asked_at = None
        self._late.clear()

    def on_report(self, step: int, interval_s: float, now: float) -> None:
        """Note a report that asks for an answer, the number of this rank's step, and the time between reports."""
        usual_s = min(interval_s, self._interval_s)  # a pause makes one interval long
        self._interval_s = interval_s
        if self._asked_at is None:
            self._asked_at, self._asked_in = now, step
            self._missed_count, self._silent_s = 0, 0.0
        else:
            self._missed_count += 1
            self._silent_s += usual_s

    def on_answer(self, step: int, now: float) -> None:
        """Note that the coordinator has read a report, and the number of this rank's step in which that was heard."""
        if self._asked_at is None:
            return
        took_s, self._asked_at = now - self._asked_at, None
        is_long = took_s > NOISE_S and step - self._asked_in > LATE_STEPS
        self._late.append(is_long and _ROUND_ANSWER_COUNT * took_s > self._interval_s)

    def suspicion(self, place: int) -> str | None:
        """Return why this rank is to take over, as "has not answered for 2.1 s", or None.

        Args:
            place: This rank's place among the watchers, from 0.
        """
        is_silent = self._silent_s >= SILENT_S * (1 + place) and self._missed_count >= MISSED_REPORT_COUNT * (1 + place)
        if is_silent and self._asked_at is not None:
            return f"has not answered for {self._silent_s:.2g} s"
        return "answers too late" if sum(self._late) >= _LATE_COUNT else None
