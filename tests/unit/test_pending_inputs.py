"""Tests which events a replayed rank may see, and when."""

from __future__ import annotations

import zlib
from collections import deque
from types import SimpleNamespace
from typing import Any

import pytest

from asyncdist.simulation.replay.log import Entry, RankLog, Reading, ReceivedByTask, ReceivedMessages, SafePoint
from asyncdist.simulation.replay.pending_inputs import Mailbox, PendingInputs


def inputs_of(*entries: Entry, woken_count: int = 0) -> PendingInputs:
    log = RankLog(deque(entries), tags={1}, is_over=True)
    loop: Any = SimpleNamespace(time=lambda: 0.0)
    inputs = PendingInputs(log, Mailbox(), loop)
    engine: Any = SimpleNamespace(woken_count=0, begun_count=0, turn=0, _in_pass=False)
    inputs.open(engine)
    engine.woken_count = woken_count
    return inputs


@pytest.mark.parametrize(
    ("woken_count", "woken_before_point", "is_seen"),
    [
        (0, 0, True),  # main has slept, and reached its safe point before the task that waits for the message
        (2, 2, True),
        (0, 1, False),  # this task, or main, has continued before
        (1, 2, False),
    ],
)
def test_message_that_ended_no_wait_is_seen_at_the_safe_point(
    woken_count: int, woken_before_point: int, is_seen: bool
) -> None:
    first, second = (ReceivedMessages(0, woken_count, 0, 0.0, [(source, 1)]) for source in (2, 3))
    inputs = inputs_of(first, second, SafePoint(woken_before_point), woken_count=woken_count)
    assert inputs.is_received_at_point(first) == is_seen
    assert inputs.is_received_at_point(second) == is_seen


def test_events_without_a_safe_point_after_them_are_not_delayed() -> None:
    by_task = ReceivedByTask(0, 0, 0, 0.0, [(2, 1)])
    assert not inputs_of(by_task, SafePoint(0)).is_received_at_point(by_task)
    last = ReceivedMessages(0, 0, 0, 0.0, [(2, 1)])
    assert not inputs_of(last).is_received_at_point(last)


def test_clock_read_after_a_message_is_shown_the_message_first() -> None:
    """Regression: the reading task had been started earlier, and continued because of the message's content."""
    message = ReceivedMessages(0, 0, 0, 0.0, [(2, 1)])
    inputs = inputs_of(message)

    def read() -> float:
        return inputs.read_clock()

    key = zlib.crc32(f"{read.__qualname__}+1".encode()) & 0xFFFF
    inputs.log.clock[key].extend([Reading(1.0, 0, 0), Reading(2.0, 1, 1)])
    shown: list[ReceivedMessages] = []

    def catch_up(seen_count: int) -> None:
        assert seen_count == 1, "only one message may be shown"
        shown.append(message)
        inputs.remove(message)

    inputs.catch_up = catch_up
    assert (read(), shown) == (1.0, [])
    assert (read(), shown) == (2.0, [message])


@pytest.mark.parametrize(
    ("keys", "woken_before_point", "is_alone"),
    [
        ([(2, 1), (3, 1)], 1, True),  # a timeout had already woken one of the tasks that both messages wake
        ([(2, 1), (3, 1)], 2, False),
        ([(2, 1), (3, 1)], 0, False),
        ([(2, 1)], 1, False),  # the message wakes no other task
    ],
)
def test_one_of_two_woken_before_a_safe_point_may_continue(
    keys: list[tuple[int, int]], woken_before_point: int, is_alone: bool
) -> None:
    pending = ReceivedMessages(0, 0, 0, 0.0, keys)
    inputs = inputs_of(SafePoint(woken_before_point))
    assert inputs.wakes_one_before_point(pending) == is_alone


def test_user_takes_precede_the_events_seen_at_the_safe_point() -> None:
    deferred, by_task = ReceivedMessages(0, 1, 0, 0.0, [(2, 1)]), ReceivedByTask(0, 1, 1, 0.0, [(3, 1)])
    inputs = inputs_of(deferred, by_task, SafePoint(1), woken_count=1)
    assert inputs.is_received_at_point(deferred)
    assert inputs.first_late() is None, "no task waits for the message, so it must not count as late"
    task: Any = object()
    by_task.late_for = task
    assert inputs.first_late() is by_task
