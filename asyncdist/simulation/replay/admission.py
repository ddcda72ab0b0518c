"""Decides which message a replayed rank's receive may take now."""

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
    """Lets receives take the messages that the rank was shown, or that a task took without a polling pass.

    Args:
        log: The rank's record.
        mailbox: The rank's messages that it has not received yet.
        agenda: The rank's remaining observations.
        on_late: Called if a task tries to take a message that has not arrived yet.
        on_taken: Called when a message is taken.
        see_losses: Shows the rank its next losses.
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
        """Begin; main starts next."""
        self._engine = engine
        self._early.clear()  # the simulated start may need fewer messages than the recorded one

    @property
    def has_permitted(self) -> bool:
        """Whether some messages were shown to the rank and not taken yet."""
        return bool(self._permitted)

    def permit(self, keys: Iterable[Key]) -> None:
        """Let receives take these messages."""
        self._permitted.extend(keys)

    def clear(self) -> None:
        """Forget the permitted messages, because nothing is held back from now on."""
        self._permitted.clear()

    def next_key(self, source: int, tag: int) -> Key | None:
        """Return the key of the message that a receive may take now; None if there is none."""
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
        """Return the key of the message that a task may take without a polling pass now; None if there is none."""
        if isinstance(self._agenda.next(), Lost):
            first = next((sight for sight in self._agenda.sights() if not isinstance(sight, Lost)), None)
            if isinstance(first, TakenByTask) and fits(first.keys[0], source, tag):
                self._see_losses()  # the rank saw them when the task looked for this message
        late: list[TakenByTask] = []
        for sight in self._agenda.sights():
            if tag not in COLLECTIVE_TAGS and self._agenda.is_seen_at_point(sight):
                continue  # user code takes its messages before that safe point first
            if not isinstance(sight, TakenByTask) or (late and not sight.is_beside(late[0])):
                break
            (key,) = sight.keys
            if fits(key, source, tag):
                if not late and self._mailbox.count(key):
                    return key
                late.append(sight)  # the task took all late messages in turn, and waits for them now
        for sight in late:
            sight.late_for = asyncio.current_task(self._engine.loop)
        if late:
            self._on_late()
        return None

    def take(self, key: Key) -> bytes:
        """Remove and return the data of a message."""
        if key in self._permitted:
            self._permitted.remove(key)
        elif self._early[key]:
            self._early[key] -= 1
        elif (sight := self._agenda.remove_taken(key)) is not None:
            self._leave_no_more_to_task(sight)
        self._on_taken()
        return self._mailbox.pop(key)

    def _leave_no_more_to_task(self, taken: TakenByTask) -> None:
        """Deliver the messages that the task took right after this one: in a replay, it tests its tag less often."""
        for sight in itertools.takewhile(taken.is_beside, self._agenda.sights()):
            if not isinstance(sight, TakenByTask) or sight.keys[0][1] != taken.keys[0][1]:
                break
            sight.late_for = asyncio.current_task(self._engine.loop)
        self._on_late()


def fits(key: Key, source: int, tag: int) -> bool:
    """Return whether a receive with this source and tag takes a message with this key."""
    return key[1] == tag and source in (ANY_SOURCE, key[0])
