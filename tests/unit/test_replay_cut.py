"""Tests where a replay cuts the records of ranks that a signal killed, and of ranks notified of that afterwards."""

from __future__ import annotations

import pytest

from asyncdist.recording.events import Event
from asyncdist.simulation.replay.log import cut_at_signals

TAG = 40
STEP = Event(2.0, "step", (0, 0, 0.1))
INTERRUPTED = Event(4.0, "interrupted", ())
OVER = Event(6.0, "over", ("SystemExit: 143",))
RETURNED = Event(6.0, "over", ("",))


def received(source: int, tag: int = TAG) -> Event:
    return Event(1.0, "received", (source, tag, 8, 1, 0, 0))


def sent(dest: int, tag: int = TAG) -> Event:
    return Event(1.0, "sent", (dest, tag, 8))


@pytest.mark.parametrize(("marks_signal", "count"), [(True, 3), (False, 2)])
def test_rank_ended_by_a_signal_is_shown_the_earlier_events(marks_signal: bool, count: int) -> None:
    """If the signal was raised in user code, its position is unknown: it is somewhere after the last step."""
    events = [received(0), STEP, received(0), *([INTERRUPTED] if marks_signal else []), received(0), OVER]
    assert cut_at_signals({0: [sent(0), sent(0), sent(0)], 1: events})[1] == events[:count]


def test_second_signal_raised_in_user_code_is_not_the_first() -> None:
    assert cut_at_signals({0: [STEP, received(0), OVER, INTERRUPTED]}) == {0: [STEP]}


def test_without_a_signal_all_is_shown() -> None:
    """A message is shown even if its sender was killed before it could record the send."""
    records = {0: [sent(1)], 1: [received(0), received(0), STEP, RETURNED]}
    assert cut_at_signals(records) == records


@pytest.mark.parametrize("is_written", [True, False])
def test_nobody_sees_what_was_sent_after_the_signal(is_written: bool) -> None:
    """No rank sees messages sent after the signal, or their consequences, whether or not the sender recorded them."""
    records = {
        0: [sent(1), INTERRUPTED, *([sent(1)] if is_written else []), OVER],
        1: [received(0, TAG + 1), received(0), STEP, received(0), sent(2), RETURNED],
        2: [received(1), STEP, RETURNED],
        3: [STEP, RETURNED],
    }
    records[0].insert(0, sent(1, TAG + 1))
    assert cut_at_signals(records) == {0: records[0][:2], 1: records[1][:3], 2: [], 3: records[3]}
