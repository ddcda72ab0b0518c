"""Judges reminders of other agreements, where a rank makes one start after the other. Nothing here waits or sends.

Tasks of a rank may ask for several starts at once, and each rank makes them in an order of its own. Two ranks then wait
for each other, each in the start that is behind on the other one. All agreements have an order, which is the same on
all ranks: a rank that is reminded of an earlier one that it is about to start comes to its own again later. One that is
reminded of an agreement that it is not about to start objects, if it waits for one of those that do.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final

from asyncdist.collectives.agreement_messages import AgreementKey, Reminder, Runs, ranks_of

#: How long a leader waits for a member before it sends a reminder, and between two of them. Most have come long before.
REMIND_AFTER_S: Final = 1.0
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
        key: of the agreement.
        ranks: its members.
        rival: set when a member waits for this rank in another agreement while this rank waits for it: the key of that
            agreement, its members, and a sentence about both.
        behind: set when this rank has asked the leader to postpone it: the key for all occurrences of what comes first.
        doubted_since: when this rank was first reminded of another agreement that it is not about to start, by the key
            for all occurrences.
        reminds: the timer for the next reminders.
    """

    key: AgreementKey
    ranks: Sequence[int]
    rival: tuple[AgreementKey, Runs, str] | None = None
    behind: AgreementKey | None = None
    doubted_since: dict[AgreementKey, float] = field(default_factory=dict)
    reminds: asyncio.TimerHandle = field(init=False)

    def on_reminder(self, reminder: Reminder, rank: int, now: float, *, is_ahead: bool) -> tuple[str, str]:
        """Judge a reminder of another agreement.

        An objection waits for a second reminder: the first may have crossed a word of this rank, or a task of it may be
        just about to start that agreement.

        Args:
            reminder: of the other members.
            rank: this rank.
            now: on the loop's clock.
            is_ahead: whether this rank is about to start that agreement.

        Returns:
            Kind and text of the objection to this agreement; both empty where there is none.
        """
        nothing = "", ""
        if self.rival is not None or self.behind is not None or reminder.key == self.key.of_all_occurrences:
            return nothing
        if is_ahead:
            if _place(reminder.key) > _place(self.key):
                return nothing
            self.behind = reminder.key
            return POSTPONED, f"rank {rank} comes to {reminder.subject!r} first"
        entangled = ranks_of(reminder.present).intersection(self.ranks)
        if not entangled or now - self.doubted_since.setdefault(reminder.key, now) < REMIND_AFTER_S / 2:
            return nothing
        text = (
            f"rank {min(entangled)} starts {reminder.subject!r}, rank {rank} "
            f"{str(self.key)!r}, and each waits for the other; "
            "allowed: equal ranks, in one order, on all of them"
        )
        self.rival = reminder.key, reminder.members, text
        return "", text


def _place(key: AgreementKey) -> tuple[Runs, str]:
    """Return what orders agreements, the same on all ranks."""
    return key.ranks, key.subject
