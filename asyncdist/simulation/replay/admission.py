"""Decides which message a receive of a replayed rank may take now."""

from __future__ import annotations

import asyncio
import itertools
from collections import Counter, deque
from collections.abc import Callable, Iterable

from asyncdist.runtime.recording import ObservedEngine
from asyncdist.simulation.replay.agenda import COLLECTIVE_TAGS, Agenda
from asyncdist.simulation.replay.log import Key, Lost, RankLog, TakenByTask
from asyncdist.simulation.replay.mailbox import Mailbox
from asyncdist.transports.base import ANY_SOURCE


class Admission:
    """Lets receives take messages that the rank has been shown, and tasks those that they took by themselves.

    Args:
        log: what the rank saw.
        mailbox: where its messages wait.
        agenda: what it sees next.
        on_late: called where a task wants to take a message by itself that is not there yet.
        on_taken: called as a message is taken.
        see_losses: shows the rank the losses that are next.
    """

    def __init__(
        self,
        log: RankLog,
        mailbox: Mailbox,
        agenda: Agenda,
        on_late: Callable[[], None],
        on_taken: Callable[[], None],
        see_losses: Callable[[], None],
    ) -> None:
        self._log = log
        self._mailbox = mailbox
        self._agenda = agenda
        self._on_late = on_late
        self._on_taken = on_taken
        self._see_losses = see_losses
        self._early = Counter(log.early)
        self._permitted: deque[Key] = deque()
        self._engine: ObservedEngine

    def open(self, engine: ObservedEngine) -> None:
        """Begin: main is about to."""
        self._engine = engine
        self._early.clear()  # the simulated start may not need all that the recorded one did

    @property
    def has_permitted(self) -> bool:
        """Whether messages have been shown that no receive has taken yet."""
        return bool(self._permitted)

    def permit(self, keys: Iterable[Key]) -> None:
        """Let receives take these messages."""
        self._permitted.extend(keys)

    def clear(self) -> None:
        """Drop what is permitted: nothing is held back any more."""
        self._permitted.clear()

    def next_key(self, source: int, tag: int) -> Key | None:
        """Return the source and tag of the message that a receive may take now; None for none."""
        for key in self._permitted:
            if fits(key, source, tag):
                return key if self._mailbox.count(key) else None
        if self._log.is_without_messages(tag) or (self._agenda.is_done and self._log.is_over):
            return self._mailbox.first(source, tag)
        for key, count in self._early.items():
            if count and fits(key, source, tag) and self._mailbox.count(key):
                return key
        if not self._agenda.is_open or self._engine._in_pass:
            return None
        return self._key_of_task(source, tag)

    def _key_of_task(self, source: int, tag: int) -> Key | None:
        """Return what a task may take by itself now: one of the messages that are next, all of which tasks took."""
        if isinstance(self._agenda.next(), Lost):
            first = next((sight for sight in self._agenda.sights() if not isinstance(sight, Lost)), None)
            if isinstance(first, TakenByTask) and fits(first.keys[0], source, tag):
                self._see_losses()  # as the task looked for this message
        late: list[TakenByTask] = []
        for sight in self._agenda.sights():
            if tag not in COLLECTIVE_TAGS and self._agenda.is_seen_at_point(sight):
                continue  # it comes after what user code takes before that safe point
            if not isinstance(sight, TakenByTask) or (late and not sight.is_beside(late[0])):
                break
            (key,) = sight.keys
            if fits(key, source, tag):
                if not late and self._mailbox.count(key):
                    return key
                late.append(sight)  # the task took all of these one right after the other, and waits for them now
        for sight in late:
            sight.late_for = asyncio.current_task(self._engine.loop)
        if late:
            self._on_late()
        return None

    def take(self, key: Key) -> bytes:
        """Take a message out."""
        if key in self._permitted:
            self._permitted.remove(key)
        elif self._early[key]:
            self._early[key] -= 1
        elif (sight := self._agenda.remove_taken(key)) is not None:
            self._leave_no_more_to_task(sight)
        self._on_taken()
        return self._mailbox.pop(key)

    def _leave_no_more_to_task(self, taken: TakenByTask) -> None:
        """Let what a task took right after this come at once: here it tests its tag less often than there."""
        for sight in itertools.takewhile(taken.is_beside, self._agenda.sights()):
            if not isinstance(sight, TakenByTask) or sight.keys[0][1] != taken.keys[0][1]:
                break
            sight.late_for = asyncio.current_task(self._engine.loop)
        self._on_late()


def fits(key: Key, source: int, tag: int) -> bool:
    """Return whether a receive of this source and tag takes such a message."""
    return key[1] == tag and source in (ANY_SOURCE, key[0])
