"""Finds starts in which ranks wait for each other, each in a different one.

Members that name different groups cannot be compared: each of their agreements waits for the others, for ever. So a
leader reminds those that have not come. A rank that is reminded of one start, and waits in another one for a rank that
has come to the first, objects to both. A rank that serves others in its main (a replay buffer), and is reminded of a
start in which one of these waits for it, objects to that start.
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
    ranks_in_words,
    runs_of,
)
from asyncdist.waits import WaitId, WaitKind

if TYPE_CHECKING:
    from asyncdist.messaging.engine import Engine, Timer

#: How long a leader waits for a member before it sends a reminder, and between two of them. Most have come long before.
REMIND_AFTER_S: Final = 1.0
#: A leader reminds at most this many of the missing ranks: one that sees what is wrong suffices.
_REMINDED_COUNT_MAX: Final = 16
#: Ranks that an error lists one by one.
_NAMED_COUNT_MAX: Final = 8


@dataclass(frozen=True, slots=True)
class Rival:
    """A start for which a member waits while this rank waits for that member in another one.

    Attributes:
        key: of the rival's agreement, for all occurrences.
        leader: the rank that decides about it.
        text: a sentence about both.
        waiting: members that wait for this rank in it.
    """

    key: AgreementKey
    leader: int
    text: str
    waiting: Runs


@dataclass(slots=True, eq=False)
class OpenStart:
    """A start of this rank that is not over.

    Attributes:
        meeting: of its agreement.
        have_all_come: whether all members have: it waits for nobody's word any more.
        rivals: those because of which this rank has objected to it, by text.
        doubted_since: when this rank was first reminded of another start, on the loop's clock, by that one's key.
        timer: for the next reminders.
    """

    meeting: Meeting
    have_all_come: bool = False
    rivals: dict[str, Rival] = field(default_factory=dict)
    doubted_since: dict[AgreementKey, float] = field(default_factory=dict)
    timer: Timer | None = None


@dataclass(slots=True, eq=False)
class Duty:
    """Work for other ranks, before whose end this rank comes to no start.

    Attributes:
        served: returns the ranks that this rank waits for until then.
        text: what this rank does, as in "serves the replay buffer 'replay'".
        doubted_since: when this rank was first reminded of a start, on the loop's clock, by the start's key.
    """

    served: Callable[[], Iterable[int]]
    text: str
    doubted_since: dict[AgreementKey, float] = field(default_factory=dict)


class Rivals:
    """Sends the reminders of one rank, and judges those of others.

    Args:
        engine: of this rank.
        rank: this rank.
        joins: by agreement that this rank leads, the members that have come so far; it changes meanwhile.
        send: sends a reminder to a rank.
        object_to: objects to an agreement that the given rank leads.
        next_occurrence: counts an attempt at an agreement that this rank does not come to, and returns its key.

    Attributes:
        sent_count, received_count: of reminders. They come all the time while ranks wait in a start, and mean nothing
            to a watchdog that looks whether the job moves.
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
        self._look: Timer | None = None  # for starts that this rank leads and does not come to, because of a duty
        self.sent_count = 0
        self.received_count = 0

    @contextlib.contextmanager
    def starting(self, meeting: Meeting) -> Iterator[OpenStart]:
        """Look for rivals of ``meeting`` in the body, which sets ``have_all_come`` when they have."""
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
        """Object, while the body runs, to starts in which a rank waits for this one that this one waits for.

        The body runs in the rank's main, so that this rank comes to no start before its end.

        Args:
            served: returns the ranks without which the body does not end.
            text: what this rank does, as in "serves the replay buffer 'replay'".
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
        """Note that others may wait in a start that this rank leads."""
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
        """Object to a start whose members wait for this rank, which waits for one of them; see :func:`find_rival`."""
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
        """Return the rival because of which ``key`` was refused with these words, if this rank has found it."""
        return self._starts[key].rivals.get(refusal) if key in self._starts else None

    def on_reminder(self, reminder: Reminder, leader: int) -> None:
        """Object to a start of this rank, if others wait for this rank in another one and it would wait for them.

        Args:
            reminder: of that other start.
            leader: the rank that leads it, which has sent the reminder.
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
        """Remind the members that have not come to ``start``, and this rank of those that wait for it elsewhere."""
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
    """Judge a reminder of a start that this rank has perhaps not come to.

    An objection waits for a second reminder: the first may have crossed a word of this rank, or a task of it may be
    just about to start that one. Nor does a rank object that is in several starts, since it may come to that one after
    any of these. Those that wait for it there may have come to its own start, too, in another task: then that one's
    leader, which knows, ignores the objection.

    Args:
        reminder: of the other members.
        leader: the rank that has sent it.
        rank: this rank.
        now: on the loop's clock.
        starts: of this rank.

    Returns:
        The rival of the one start that this rank is in; None where there is none.
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
            f"rank {min(waiting)} starts {reminder.subject!r}, rank {rank} {str(key)!r}, "
            "and each waits for the other; allowed: equal ranks, in one order, on all of them"
        )
    return Rival(reminder.key, leader, text, runs_of(tuple(sorted(waiting))))


def _duty_text(rank: int, duty: str, waiting: Sequence[int], key: AgreementKey) -> str:
    """Say why a start waits for a rank that does not come, and what to do."""
    others = sorted(key.members() - {rank})
    named = others if len(others) <= _NAMED_COUNT_MAX else "ranks"
    have, they_wait = ("has", "it waits") if len(waiting) == 1 else ("have", "they wait")
    return (
        f"rank {rank} {duty} until {ranks_in_words(waiting)} {have} left it, and {they_wait} for rank {rank} here; "
        f"start it without rank {rank}: group=await asyncdist.new_group({named})"
    )


def _reminder(key: AgreementKey, joins: Iterable[int]) -> Reminder:
    return Reminder(key.of_all_occurrences.text, runs_of(tuple(sorted(joins))))
