"""Judges reminders of other agreements, where a rank makes one start after the other. Nothing here waits or sends.

Tasks of a rank may ask for several starts at once, and each rank makes them in an order of its own. Two ranks then wait
for each other, each in the start that is behind on the other one. All agreements have an order, which is the same on
all ranks: a rank that is reminded of an earlier one that it is about to start comes to its own again later. One that is
reminded of an agreement that it is not about to start objects, if it waits for one of those that do.

That order alone is not enough where tasks make several starts, one after the other. A rank may be in a start that the
others come to after another one, and for that one they may need this rank. So a rank that has waited for some seconds
goes on to a start of its own in which it has waited for less, and comes back later; the order holds between starts in
which a rank has waited for equally many rounds.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Final

from asyncdist.collectives.agreement_messages import AgreementKey, Meeting, Reminder, Runs, ranks_of

#: How long a leader waits for a member before it sends a reminder, and between two of them. Most have come long before.
REMIND_AFTER_S: Final = 1.0
#: A rank that has waited in a start for so long goes on to another one, in which it has waited for fewer such rounds.
#: This is no multiple of the time between reminders: otherwise two ranks might miss each other in round after round.
ROUND_S: Final = 2.5
#: No objection.
_NOTHING: Final = "", ""
#: What the objection of a rank says that comes later, and the verdict that answers it.
POSTPONED: Final = "(postponed)"


class Postponed(Exception):
    """This rank comes to a start later, and first to another one; raised by :meth:`Agreements.meet`.

    Attributes:
        behind: the key of that one for all occurrences.
    """

    def __init__(self, behind: AgreementKey) -> None:
        super().__init__(f"behind {behind}")
        self.behind = behind


@dataclass(slots=True)
class Alone:
    """The one agreement that this rank starts with ``alone``.

    Attributes:
        meeting: this agreement.
        since: when this rank came to it, on the loop's clock.
        rival: set when a member waits for this rank in another agreement while this rank waits for it: the key of that
            agreement, its members, and a sentence about both.
        behind: set when this rank has asked the leader to postpone it: the key for all occurrences of what comes first.
        doubted_since: when this rank was first reminded of another agreement that it is not about to start, by the key
            for all occurrences.
        reminds: the timer for the next reminders.
    """

    meeting: Meeting
    since: float
    rival: tuple[AgreementKey, Runs, str] | None = None
    behind: AgreementKey | None = None
    doubted_since: dict[AgreementKey, float] = field(default_factory=dict)
    reminds: asyncio.TimerHandle = field(init=False)

    @property
    def key(self) -> AgreementKey:
        """The key of the agreement."""
        return self.meeting.key

    def on_reminder(self, reminder: Reminder, rank: int, now: float, ahead: Iterable[Meeting]) -> tuple[str, str]:
        """Judge a reminder of another agreement.

        An objection waits for a second reminder: the first may have crossed a word of this rank, or a task of it may be
        just about to start that agreement. Nor does a rank object that has other starts to make, since it may come to
        that agreement after one of these.

        Args:
            reminder: of the other members.
            rank: this rank.
            now: on the loop's clock.
            ahead: what this rank is about to start.

        Returns:
            Kind and text of the objection to this agreement; both empty where there is none.
        """
        if self._is_decided or self._is_same(reminder.key):
            return _NOTHING
        others = list(ahead)
        meant = [meeting for meeting in others if meeting.key.of_all_occurrences == reminder.key]
        if meant:
            is_first = min(map(_place, meant)) < _place(self.meeting, now - self.since)
            return self._postpone(reminder.key, rank) if is_first else _NOTHING
        entangled = ranks_of(reminder.present).intersection(self.meeting.ranks)
        if others or not entangled:
            return _NOTHING
        if now - self.doubted_since.setdefault(reminder.key, now) < REMIND_AFTER_S / 2:
            return _NOTHING
        text = (
            f"rank {min(entangled)} starts {reminder.subject!r}, rank {rank} "
            f"{str(self.key)!r}, and each waits for the other; "
            "allowed: equal ranks, in one order, on all of them"
        )
        self.rival = reminder.key, reminder.members, text
        return "", text

    def on_round(self, rank: int, now: float, ahead: Iterable[Meeting]) -> tuple[str, str]:
        """Judge whether it is time for one of ``ahead``; see :meth:`on_reminder`."""
        others = [meeting for meeting in ahead if not self._is_same(meeting.key)]
        first = min(others, key=_place, default=None)
        if first is None or self._is_decided or _place(first)[0] >= _place(self.meeting, now - self.since)[0]:
            return _NOTHING
        return self._postpone(first.key, rank)

    @property
    def _is_decided(self) -> bool:
        return self.rival is not None or self.behind is not None

    def _is_same(self, key: AgreementKey) -> bool:
        return key.of_all_occurrences == self.key.of_all_occurrences

    def _postpone(self, behind: AgreementKey, rank: int) -> tuple[str, str]:
        self.behind = behind.of_all_occurrences
        return POSTPONED, f"rank {rank} comes to {str(behind)!r} first"


def _place(meeting: Meeting, waiting_s: float = 0.0) -> tuple[int, Runs, str]:
    """Return what orders agreements: the rounds that this rank has waited, then what is the same on all ranks."""
    return int((meeting.waited_s + waiting_s) / ROUND_S), meeting.key.ranks, meeting.key.subject
