"""Detects deadlocks between agreements: ranks that are waiting for each other in different starts.

If ranks pass different groups, each of their agreements waits forever for members that are in a different agreement.
Leaders therefore send reminders to missing members. A reminded rank may itself be waiting, in another start, for a rank
that has joined the reminded start. It then objects to both starts. A rank that serves others, such as a replay buffer,
objects to starts in which one of its clients is waiting for it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

from asyncdist.collectives.agreement.messages import (
    AgreementKey,
    Meeting,
    Objection,
    Reminder,
    Runs,
    is_in,
    runs_of,
)
from asyncdist.waits import WaitId, WaitKind
from asyncdist.wording import ranks_in_words

if TYPE_CHECKING:
    from asyncdist.messaging.engine import Engine, Timer

#: Seconds that a leader waits for members before the first reminder, and between reminders.
REMIND_AFTER_S: Final = 1.0
#: Maximum number of missing ranks that a leader reminds. One rank that detects the deadlock is enough.
_REMINDED_COUNT_MAX: Final = 16
#: Maximum number of ranks that an error lists.
_NAMED_COUNT_MAX: Final = 8


@dataclass(frozen=True, slots=True)
class Rival:
    """An operation whose other members are waiting for this rank, while this rank is waiting for one of them.

    Attributes:
        text: Description of both starts, for the error message.
        waiting: Ranks that are waiting for this rank in the rival start.
    """

    key: AgreementKey
    leader: int
    text: str
    waiting: Runs


@dataclass(slots=True, eq=False)
class OpenStart:
    """An operation that this rank is starting together with other ranks.

    Attributes:
        rivals: Rival starts that are reasons for this rank's objection, by their text.
        doubted_since: Arrival time of the first reminder of each other start, in seconds on the loop's clock.
    """

    meeting: Meeting
    have_all_joined: bool = False
    rivals: dict[str, Rival] = field(default_factory=dict)
    doubted_since: dict[AgreementKey, float] = field(default_factory=dict)
    timer: Timer | None = None


@dataclass(slots=True, eq=False)
class Duty:
    """A service for other ranks, such as a replay buffer. While it runs, this rank cannot start operations with others.

    Attributes:
        served: Function that returns the ranks that must leave the service before it ends.
        text: Description of the service, such as "serves the replay buffer 'replay'".
        doubted_since: Arrival time of the first reminder of each start, in seconds on the loop's clock.
    """

    served: Callable[[], Iterable[int]]
    text: str
    doubted_since: dict[AgreementKey, float] = field(default_factory=dict)


class Rivals:
    """Reminds ranks of operations that are waiting for them, and detects deadlocks from other ranks' reminders.

    Args:
        joins: Received join messages of the agreements that this rank leads, by agreement and member. Updated by
            :class:`LedAgreements`.
        next_occurrence: Function that counts a start that this rank does not join, and returns its agreement's key.

    Attributes:
        sent_count, received_count: Numbers of sent and received reminders. A watchdog subtracts them from its message
            counts, because reminders do not indicate progress.
    """

    def __init__(
        self,
        engine: Engine,
        rank: int,
        joins: Mapping[AgreementKey, Mapping[int, Any]],
        send: Callable[[Reminder, int], None],
        object_to: Callable[[Objection, int], None],
        next_occurrence: Callable[[AgreementKey], AgreementKey],
    ) -> None:
        self._engine = engine
        self._rank = rank
        self._joins = joins
        self._send = send
        self._object_to = object_to
        self._next_occurrence = next_occurrence
        self._starts: dict[AgreementKey, OpenStart] = {}
        self._duties: list[Duty] = []
        self._look: Timer | None = None  # timer to check starts that this rank leads but cannot join
        self.sent_count = 0
        self.received_count = 0

    @contextlib.contextmanager
    def starting(self, meeting: Meeting) -> Iterator[OpenStart]:
        """Detect deadlocks with other starts while the block runs. The block may set ``have_all_joined``."""
        start = self._starts[meeting.key] = OpenStart(meeting)
        self._remind_later(start)
        try:
            yield start
        finally:
            del self._starts[meeting.key]
            if start.timer is not None:
                start.timer.cancel()

    @contextlib.contextmanager
    def serving(self, served: Callable[[], Iterable[int]], text: str) -> Iterator[None]:
        """While the block serves other ranks, refuse operations that a served rank wants to start with this rank."""
        duty = Duty(served, text)
        self._duties.append(duty)
        self.on_waiting()
        try:
            yield
        finally:
            self._duties.remove(duty)
            if self._look is not None and not self._duties:
                self._look.cancel()
                self._look = None

    def on_waiting(self) -> None:
        """Schedule a check of whether a member is waiting for this rank in an agreement that this rank leads."""
        if self._duties and self._joins and self._look is None:
            self._look = self._engine.call_later(REMIND_AFTER_S, WaitId(WaitKind.LOOK_AT_STARTS), self._look_at_led)

    def _look_at_led(self) -> None:
        self._look = None
        for key, joins in list(self._joins.items()):
            if self._rank not in joins:
                self._object_because_of_duty(_reminder(key, joins), self._rank)
        self.on_waiting()
        self._engine.recheck()

    def _object_because_of_duty(self, reminder: Reminder, leader: int) -> None:
        """Reject a start in which clients of this rank are waiting for it: it cannot join until they have left."""
        now = self._engine.clock()
        for duty in self._duties:
            waiting = sorted(rank for rank in duty.served() if is_in(rank, reminder.present))
            if not waiting:
                duty.doubted_since.pop(reminder.key, None)
            elif now - duty.doubted_since.setdefault(reminder.key, now) >= REMIND_AFTER_S / 2:
                del duty.doubted_since[reminder.key]
                key = self._next_occurrence(reminder.key)
                text = _duty_text(self._rank, duty.text, waiting, key)
                self._object_to(Objection(key.text, "", text), leader)
                return

    def rival_of(self, key: AgreementKey, refusal: str) -> Rival | None:
        """Return the rival start that caused the ``refusal`` of this rank's start ``key``, or None."""
        return self._starts[key].rivals.get(refusal) if key in self._starts else None

    def on_reminder(self, reminder: Reminder, leader: int) -> None:
        """If this rank's start and the reminded start are waiting for each other, object to this rank's start."""
        self.received_count += leader != self._rank
        starts = self._starts.values()
        rival = find_rival(reminder, leader, self._rank, self._engine.clock(), starts)
        if rival is not None:
            (start,) = starts
            start.rivals[rival.text] = rival
            objection = Objection(start.meeting.key.text, "", rival.text, rival.waiting)
            self._object_to(objection, start.meeting.leader)
        elif not self._starts:
            self._object_because_of_duty(reminder, leader)

    def _remind_later(self, start: OpenStart) -> None:
        what = WaitId(WaitKind.REMINDER, name=start.meeting.key.text)
        start.timer = self._engine.call_later(REMIND_AFTER_S, what, self._remind, start)

    def _remind(self, start: OpenStart) -> None:
        """Remind the missing members if this rank leads ``start``. Otherwise, check the starts that this rank leads."""
        if start.have_all_joined:
            return
        meeting = start.meeting
        if meeting.leader == self._rank:
            joins = self._joins.get(meeting.key, {})
            reminder = _reminder(meeting.key, joins)
            for rank in [rank for rank in meeting.ranks if rank not in joins][:_REMINDED_COUNT_MAX]:
                self._send(reminder, rank)
                self.sent_count += 1
        else:
            for key, joins in list(self._joins.items()):
                if self._rank not in joins and key.subject == meeting.key.subject:
                    self.on_reminder(_reminder(key, joins), self._rank)
        self._remind_later(start)
        self._engine.recheck()


def find_rival(reminder: Reminder, leader: int, rank: int, now: float, starts: Collection[OpenStart]) -> Rival | None:
    """If the reminded start and this rank's only open start are waiting for each other, return the former, else None.

    The result is None until a second reminder, because this rank may be about to join the reminded start. It is also
    None if this rank has several open starts, because one of them may end without the waiting members.
    """
    mine = next(iter(starts)) if len(starts) == 1 else None
    if mine is None or mine.have_all_joined:
        return None
    key, its_leader = mine.meeting.key, mine.meeting.leader
    if key.of_all_occurrences == reminder.key and its_leader == leader:
        return None
    waiting = [peer for peer in mine.meeting.ranks if is_in(peer, reminder.present)]
    if not waiting or now - mine.doubted_since.setdefault(reminder.key, now) < REMIND_AFTER_S / 2:
        return None
    if key.of_all_occurrences == reminder.key:
        text = (
            f"the leader is rank {leader} on rank {min(waiting)} and rank {its_leader} on rank {rank}; all ranks must "
            "pass the same ranks in the same order"
        )
    else:
        text = (
            f"rank {min(waiting)} starts {reminder.subject!r} and rank {rank} starts {str(key)!r}, and each waits for "
            "the other; all ranks must pass the same ranks in the same order"
        )
    return Rival(reminder.key, leader, text, runs_of(tuple(sorted(waiting))))


def _duty_text(rank: int, duty: str, waiting: Sequence[int], key: AgreementKey) -> str:
    others = sorted(key.members() - {rank})
    named = others if len(others) <= _NAMED_COUNT_MAX else "ranks"
    have, they_wait = ("has", "it waits") if len(waiting) == 1 else ("have", "they wait")
    return (
        f"rank {rank} {duty} until {ranks_in_words(waiting)} {have} left it, but {they_wait} for rank {rank} here; "
        f"start without rank {rank}: group=await asyncdist.new_group({named})"
    )


def _reminder(key: AgreementKey, joins: Iterable[int]) -> Reminder:
    return Reminder(key.of_all_occurrences.text, runs_of(tuple(sorted(joins))))
