"""Tests that a coordinator is suspected if, and only if, its answers are missing or late."""

from __future__ import annotations

import math

import pytest

from protocols.selective.succession import MISSED_REPORT_COUNT, SILENT_S, Watch


def suspicions(answers_s: list[float | None], *, step_s: float = 0.1, interval_s: float = 0.5, place: int = 0) -> int:
    """Report at each interval, with these times until the answer, and count the suspicions."""
    watch, count = Watch(), 0
    for index, answer_s in enumerate(answers_s):
        now = index * interval_s
        step = round(now / step_s)
        watch.on_report(step, interval_s, now)
        count += watch.suspicion(place) is not None
        if answer_s is not None:
            watch.on_answer(step + math.ceil(answer_s / step_s), now + answer_s)
    return count


@pytest.mark.parametrize("place", [0, 1, 2])
def test_silence_is_suspected_after_some_reports_and_some_time(place: int) -> None:
    needed = MISSED_REPORT_COUNT * (1 + place)
    assert suspicions([None] * (needed + 1), interval_s=SILENT_S, place=place) == 1
    assert suspicions([None] * needed, interval_s=SILENT_S, place=place) == 0
    assert suspicions([None] * needed, interval_s=60.0, place=place) == 0, (
        "the rank's own long steps must not count as silence"
    )
    assert suspicions([None] * 50, interval_s=SILENT_S / 100, place=place) == 0, (
        "a process that stops for a short time must not be suspected"
    )


def test_an_answer_ends_the_silence() -> None:
    assert suspicions([None, 0.1, None, None, 0.1] * 10, step_s=SILENT_S, interval_s=SILENT_S) == 0


def test_answers_are_late_by_the_steps_of_the_rank_that_waits() -> None:
    assert suspicions([0.1] * 50) == 0
    assert suspicions([0.2] * 50) == 0, "answers within one equal step must not be suspected"
    assert suspicions([0.35] * 50) > 0
    assert suspicions([0.35, 0.35, 0.1, 0.1] * 20) == 0, "occasional late answers must not be suspected"
    assert suspicions([0.35] * 50, step_s=0.2) == 0
    assert suspicions([0.35] * 50, interval_s=5.0) == 0, "late answers that delay no round must not be suspected"
    assert suspicions([0.09] * 50, step_s=0.001, interval_s=0.005) == 0, (
        "delays that are usual on a busy host must not be suspected"
    )


def test_another_coordinator_is_judged_anew() -> None:
    watch = Watch()
    for index in range(20):
        watch.on_report(5 * index, 0.1, index * 0.1)
    assert watch.suspicion(0) == "has not answered for 1.9 s"
    watch.begin()
    assert watch.suspicion(0) is None


def test_a_pause_of_the_rank_that_waits_is_no_silence() -> None:
    """All ranks evaluate for ten seconds after each report, and this rank returns slightly before the coordinator."""
    watch = Watch()
    now = 0.0
    for index in range(400):
        interval_s = 10.0 if index % 20 == 1 else 0.01
        now += interval_s
        watch.on_report(index, interval_s, now)
        assert watch.suspicion(0) is None
        if index % 20 not in range(8):  # an answer is requested before the pause, and missing in some steps after it
            watch.on_answer(index + 1, now)


def test_reply_that_waits_for_the_asking_rank_is_not_late() -> None:
    """An evaluation follows each report, and the answer is read after it."""
    watch = Watch()
    for index in range(50):
        watch.on_report(20 * index, 2.2, 2.2 * index)
        assert watch.suspicion(0) is None
        watch.on_answer(20 * index + 1, 2.2 * index + 2.0)


def test_an_answer_that_nothing_asked_for_is_ignored() -> None:
    watch = Watch()
    watch.on_answer(500, 5.0)
    assert watch.suspicion(0) is None
