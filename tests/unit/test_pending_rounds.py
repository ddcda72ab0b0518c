"""Tests which fragments a member captures and applies, even in steps that are cancelled or whose means are late."""

from __future__ import annotations

from asyncdist.protocols.exchange.pending_rounds import PendingRound, PendingRounds
from asyncdist.protocols.exchange.schedule import Schedule


def captured(pending_rounds: PendingRounds, step: int) -> list[tuple[int, int]]:
    """Capture all fragments that can be captured in a step, and return them with their rounds."""
    pending_rounds.note_step(step)
    found = []
    while pending_rounds.can_begin():
        found.append(pending_rounds.begin(step))
    return found


def test_rounds_are_numbered_over_all_fragments() -> None:
    pending_rounds = PendingRounds(Schedule(every=4, fragment_count=2, overlap_steps=1, warmup_steps=0))
    assert [captured(pending_rounds, step) for step in (0, 1)] == [[], [(0, 1)]]
    assert pending_rounds.in_flight == {0: PendingRound(number=1, captured_at=1, applied_at=2)}
    assert pending_rounds.due_means(1) == [] and pending_rounds.due_means(2) == [(0, PendingRound(1, 1, 2))]
    pending_rounds.end(0)
    assert [captured(pending_rounds, step) for step in (2, 3)] == [[], [(1, 2)]]
    pending_rounds.end(1)
    assert [captured(pending_rounds, step) for step in (4, 5)] == [[], [(0, 3)]]


def test_a_step_that_captured_nothing_is_made_up_for() -> None:
    pending_rounds = PendingRounds(Schedule(every=1, fragment_count=1, overlap_steps=0, warmup_steps=0))
    pending_rounds.note_step(0)  # cancelled before the capture
    pending_rounds.note_step(1)
    assert pending_rounds.begin(1) == (0, 1) and not pending_rounds.can_begin(), (
        "no other round may begin while round 1 is in flight"
    )
    pending_rounds.end(0)
    assert pending_rounds.begin(1) == (0, 2)


def test_a_late_fragment_is_captured_again_only_after_its_mean() -> None:
    pending_rounds = PendingRounds(
        Schedule(every=2, fragment_count=2, overlap_steps=0, warmup_steps=0), skips_late=True
    )
    assert [captured(pending_rounds, step) for step in range(2)] == [[(0, 1)], [(1, 2)]]
    pending_rounds.end(1)
    assert [captured(pending_rounds, step) for step in range(2, 4)] == [[], []], (
        "rounds must be captured in turn, and round 0 is late"
    )
    pending_rounds.end(0)
    assert [captured(pending_rounds, step) for step in range(4, 6)] == [[(0, 3), (1, 4)], []]


def test_a_saved_state_continues_with_the_same_rounds() -> None:
    schedule = Schedule(every=3, fragment_count=3, overlap_steps=0, warmup_steps=1)
    pending_rounds, later = PendingRounds(schedule), PendingRounds(schedule)
    for step in range(2):
        for fragment, _ in captured(pending_rounds, step):
            pending_rounds.end(fragment)
    pending_rounds.note_step(2)
    later.load(pending_rounds.state())
    assert later.begin(2) == pending_rounds.begin(2) == (1, 5)


def test_another_schedule_continues_in_turn() -> None:
    """Regression: after a resume with another interval, fragment 0 was captured twice before fragment 1."""
    pending_rounds = PendingRounds(Schedule(every=10, fragment_count=2, overlap_steps=0, warmup_steps=0))
    assert [number for step in range(7) for _, number in captured(pending_rounds, step)] == [1]
    for schedule in (Schedule(6, 2, 0, 0), Schedule(10, 2, 0, 9)):
        later = PendingRounds(schedule)
        later.load(pending_rounds.state())
        numbers = []
        for step in range(7, 30):
            for fragment, number in captured(later, step):
                later.end(fragment)
                numbers.append(number)
        assert numbers == list(range(2, 2 + len(numbers))) and len(numbers) > 4


def test_all_fragments_are_captured_in_a_warm_up_that_skips() -> None:
    """Regression: with late="skip", only one fragment was captured in each step of a warm-up."""
    pending_rounds = PendingRounds(
        Schedule(every=4, fragment_count=3, overlap_steps=0, warmup_steps=2), skips_late=True
    )
    assert captured(pending_rounds, 0) == [(0, 1), (1, 2), (2, 3)]
