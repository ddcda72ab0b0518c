"""Detects ranks that wait for each other in different starts.

If members name different groups, each of their agreements waits for the other members forever. Therefore a leader sends
reminders to missing members. A rank that receives a reminder of one start while it waits, in another start, for a rank
that has joined the first, objects to both. A rank that serves others in its main (a replay buffer) objects to a start
in which one of its clients waits for it.
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

#: Seconds that a leader waits for a member before the first reminder, and between two reminders.
REMIND_AFTER_S: Final = 1.0
#: Maximum number of missing ranks that a leader reminds: one that detects the problem is enough.
_REMINDED_COUNT_MAX: Final = 16
#: Maximum number of ranks that an error lists.
_NAMED_COUNT_MAX: Final = 8


@dataclass(frozen=True, slots=True)
class Rival:
    """A start for which a member waits while this rank waits for that member in another one.

    Attributes:
        key: Key of the rival's agreement, for all occurrences.
        leader: Leader of the rival's agreement.
        text: Description of both starts.
        waiting: Members that wait for this rank in the rival.
    """

    key: AgreementKey
    leader: int
    text: str
    waiting: Runs


@dataclass(slots=True, eq=False)
class OpenStart:
    """A start of this rank that is not over.

    Attributes:
        meeting: Meeting of its agreement.
        have_all_come: Whether all members have joined.
        rivals: Rivals because of which this rank has objected to the start, by their text.
        doubted_since: Time of the first reminder of each other start, on the loop's clock, by that start's key.
        timer: Timer of the next reminders.
    """

    meeting: Meeting
    have_all_come: bool = False
    rivals: dict[str, Rival] = field(default_factory=dict)
    doubted_since: dict[AgreementKey, float] = field(default_factory=dict)
    timer: Timer | None = None


@dataclass(slots=True, eq=False)
class Duty:
    """Work for other ranks that keeps this rank from joining any start.

    Attributes:
        served: Returns the ranks without which the work does not end.
        text: Description of the work, such as "serves the replay buffer 'replay'".
        doubted_since: Time of the first reminder of each start, on the loop's clock, by the start's key.
    """

    served: Callable[[], Iterable[int]]
    text: str
    doubted_since: dict[AgreementKey, float] = field(default_factory=dict)


class Rivals:
    """Sends the reminders of one rank, and judges the reminders of others.

    Args:
        engine: Engine of this rank.
        rank: This rank.
        joins: Joins of the agreements that this rank leads; a view that changes.
        send: Sends a reminder to a rank.
        object_to: Objects to an agreement that the given rank leads.
        next_occurrence: Counts an attempt at an agreement that this rank does not join, and returns its key.

    Attributes:
        sent_count, received_count: Numbers of reminders. A watchdog subtracts them, since reminders are sent all the
            time while ranks wait.
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
        self._look: Timer | None = None  # for starts that this rank leads but does not join because of a duty
        self.sent_count = 0
        self.received_count = 0

    @contextlib.contextmanager
    def starting(self, meeting: Meeting) -> Iterator[OpenStart]:
        """Look for rivals of ``meeting`` while the body runs, which sets ``have_all_come``."""
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
        """While the body runs, object to starts in which a served rank waits for this rank.

        The body runs in the rank's main, so this rank joins no start before its end.

        Args:
            served: Returns the ranks without which the body does not end.
            text: Description of the work, such as "serves the replay buffer 'replay'".
        """
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
        """Note that other ranks may wait in a start that this rank leads."""
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
        """Object to a start if this rank's duty waits for one of the waiting members; see :func:`find_rival`."""
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
        """Return this rank's rival because of which ``key`` was refused with the given text; or None."""
        return self._starts[key].rivals.get(refusal) if key in self._starts else None

    def on_reminder(self, reminder: Reminder, leader: int) -> None:
        """Object if members of the reminded start and this rank wait for each other.

        Args:
            reminder: Reminder of another start.
            leader: Leader of that start, which has sent the reminder.
        """
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
        """Send reminders of ``start`` to missing members, and check other starts that wait for this rank."""
        if start.have_all_come:
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
    """Judge a reminder of a start that this rank may not have joined.

    A rank objects only after a second reminder, because the first may have crossed its join, or one of its tasks may be
    about to join. A rank with several open starts does not object, since it may join the reminded start after any of
    them. The waiting members may also have joined this rank's own start, in another task; then its leader ignores the
    objection.

    Args:
        reminder: Reminder of another start.
        leader: Leader that has sent it.
        rank: This rank.
        now: Time on the loop's clock.
        starts: Open starts of this rank.

    Returns:
        The rival of this rank's only open start; None if there is none.
    """
    mine = next(iter(starts)) if len(starts) == 1 else None
    if mine is None or mine.have_all_come:
        return None
    key, its_leader = mine.meeting.key, mine.meeting.leader
    if key.of_all_occurrences == reminder.key and its_leader == leader:
        return None
    waiting = [peer for peer in mine.meeting.ranks if is_in(peer, reminder.present)]
    if not waiting or now - mine.doubted_since.setdefault(reminder.key, now) < REMIND_AFTER_S / 2:
        return None
    if key.of_all_occurrences == reminder.key:
        text = f"its leader is rank {leader} on rank {min(waiting)} and rank {its_leader} on rank {rank}"
    else:
        text = (
            f"rank {min(waiting)} starts {reminder.subject!r} and rank {rank} starts {str(key)!r}, "
            "so each waits for the other; all ranks must pass the same ranks in the same order"
        )
    return Rival(reminder.key, leader, text, runs_of(tuple(sorted(waiting))))


def _duty_text(rank: int, duty: str, waiting: Sequence[int], key: AgreementKey) -> str:
    """Describe why a start waits for a rank that will not join, and what to do."""
    others = sorted(key.members() - {rank})
    named = others if len(others) <= _NAMED_COUNT_MAX else "ranks"
    have, they_wait = ("has", "it waits") if len(waiting) == 1 else ("have", "they wait")
    return (
        f"rank {rank} {duty} until {ranks_in_words(waiting)} {have} left it, and {they_wait} for rank {rank} here; "
        f"start it without rank {rank}: group=await asyncdist.new_group({named})"
    )


def _reminder(key: AgreementKey, joins: Iterable[int]) -> Reminder:
    return Reminder(key.of_all_occurrences.text, runs_of(tuple(sorted(joins))))
