"""Decides which message a receive of a replayed rank may return."""

from __future__ import annotations

import asyncio
import itertools
from collections import Counter, deque
from collections.abc import Callable, Iterable

from asyncdist.simulation.replay.log import COLLECTIVE_TAGS, Key, RankLost, ReceivedByTask
from asyncdist.simulation.replay.pending_inputs import PendingInputs
from asyncdist.transports.base import ANY_SOURCE


class Admission:
    """Admits messages to a replayed rank's receives in the recorded order.

    A receive may return a message that the recorded rank had received by this point, either in a polling pass or
    directly in a task. ``on_late`` is called if a task tries to receive a message that has not arrived yet, and
    ``on_taken`` when a message is received.
    """

    def __init__(
        self,
        inputs: PendingInputs,
        on_late: Callable[[], None],
        on_taken: Callable[[], None],
        deliver_losses: Callable[[], None],
    ) -> None:
        self._log = inputs.log
        self._mailbox = inputs.mailbox
        self._inputs = inputs
        self._on_late = on_late
        self._on_taken = on_taken
        self._deliver_losses = deliver_losses
        self._early = Counter(inputs.log.early)
        self._permitted: deque[Key] = deque()

    def open(self) -> None:
        """Start admitting messages in the recorded order, just before ``main`` starts."""
        self._early.clear()  # drops messages recorded before ``main``, because a replay may need fewer of them

    @property
    def has_permitted(self) -> bool:
        """Whether a message that the rank may receive has not been received yet."""
        return bool(self._permitted)

    def permit(self, keys: Iterable[Key]) -> None:
        """Allow the rank to receive one message for each pair of source and tag in ``keys``."""
        self._permitted.extend(keys)

    def clear(self) -> None:
        """Forget which messages the rank may receive, because it may receive all messages from now on."""
        self._permitted.clear()

    def next_key(self, source: int, tag: int) -> Key | None:
        """Return the source and tag of the message that a receive may return now, or None."""
        for key in self._permitted:
            if fits(key, source, tag):
                return key if self._mailbox.count(key) else None
        if self._log.is_without_messages(tag) or (self._inputs.is_done and self._log.is_over):
            return self._mailbox.first(source, tag)
        for key, count in self._early.items():
            if count and fits(key, source, tag) and self._mailbox.count(key):
                return key
        if not self._inputs.is_open or self._inputs.engine._in_pass:
            return None
        return self._key_of_task(source, tag)

    def _key_of_task(self, source: int, tag: int) -> Key | None:
        """Return the key of a message that a task may now receive outside a polling pass, or None."""
        if isinstance(self._inputs.next(), RankLost):
            first = next((pending for pending in self._inputs.upcoming() if not isinstance(pending, RankLost)), None)
            if isinstance(first, ReceivedByTask) and fits(first.keys[0], source, tag):
                # In the recorded run, the rank detected losses when it tested for this message.
                self._deliver_losses()
        late: list[ReceivedByTask] = []
        for pending in self._inputs.upcoming():
            if tag not in COLLECTIVE_TAGS and self._inputs.is_received_at_point(pending):
                continue  # the message is received at the user's next safe point instead
            if not isinstance(pending, ReceivedByTask) or (late and not pending.is_same_point(late[0])):
                break
            (key,) = pending.keys
            if fits(key, source, tag):
                if not late and self._mailbox.count(key):
                    return key
                late.append(pending)  # in the recorded run, the task received these messages in turn without waiting
        for pending in late:
            pending.late_for = asyncio.current_task(self._inputs.loop)
        if late:
            self._on_late()
        return None

    def take(self, key: Key) -> bytes:
        """Receive a message: remove it, and return its data."""
        if key in self._permitted:
            self._permitted.remove(key)
        elif self._early[key]:
            self._early[key] -= 1
        elif (pending := self._inputs.remove_received_by_task(key)) is not None:
            self._deliver_rest_by_polling(pending)
        self._on_taken()
        return self._mailbox.pop(key)

    def _deliver_rest_by_polling(self, taken: ReceivedByTask) -> None:
        """Let polling deliver the messages that the recorded task received next. A replayed task tests less often."""
        for pending in itertools.takewhile(taken.is_same_point, self._inputs.upcoming()):
            if not isinstance(pending, ReceivedByTask) or pending.keys[0][1] != taken.keys[0][1]:
                break
            pending.late_for = asyncio.current_task(self._inputs.loop)
        self._on_late()


def fits(key: Key, source: int, tag: int) -> bool:
    """Return whether a receive with this source and tag matches a message with this key."""
    return key[1] == tag and source in (ANY_SOURCE, key[0])
