"""What a replayed rank may see, and when."""

from __future__ import annotations

from collections import Counter, deque
from types import SimpleNamespace
from typing import Any

import pytest

from asyncdist.simulation.replay.agenda import Agenda
from asyncdist.simulation.replay.log import Entry, RankLog, SafePoint, Taken, TakenByTask
from asyncdist.simulation.replay.mailbox import Mailbox


def agenda_of(*entries: Entry, woken_count: int = 0) -> Agenda:
    tags = frozenset({1})
    log = RankLog(deque(entries), Counter(), {}, {}, tags, is_over=True, error="", is_native=False)
    nobody: Any = SimpleNamespace(has=lambda what: False)
    agenda = Agenda(log, Mailbox(), nobody, nobody, lambda: 0.0)
    engine: Any = SimpleNamespace(woken_count=0, turn=0)
    agenda.open(engine)
    engine.woken_count = woken_count
    return agenda


@pytest.mark.parametrize(
    ("woken_count", "woken_before_point", "is_seen"),
    [
        (0, 0, True),  # main has slept, and come to its safe point before the task that waits for the message
        (2, 2, True),
        (0, 1, False),  # that task, or main, has gone on before
        (1, 2, False),
    ],
)
def test_a_message_that_ended_no_wait_before_a_safe_point_is_seen_there(
    woken_count: int, woken_before_point: int, is_seen: bool
) -> None:
    first, second = (Taken(0, woken_count, 0, 0.0, [(source, 1)]) for source in (2, 3))
    agenda = agenda_of(first, second, SafePoint(woken_before_point), woken_count=woken_count)
    assert agenda.is_seen_at_point(first) == is_seen
    assert agenda.is_seen_at_point(second) == is_seen


def test_what_a_task_takes_by_itself_and_what_no_safe_point_follows_is_not_put_off() -> None:
    by_task = TakenByTask(0, 0, 0, 0.0, [(2, 1)])
    assert not agenda_of(by_task, SafePoint(0)).is_seen_at_point(by_task)
    last = Taken(0, 0, 0, 0.0, [(2, 1)])
    assert not agenda_of(last).is_seen_at_point(last)
