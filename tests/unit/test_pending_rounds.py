"""Tests which fragments a member captures and applies, even in steps that are cancelled or whose means are late."""

from __future__ import annotations

from asyncdist.protocols.exchange.schedule import PendingRound, PendingRounds, Schedule


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


def test_members_with_different_rounds_catch_up_in_one_step() -> None:
    """One member has contributed to a round more, and the other one is two steps behind and uses the same schedule."""
    schedule = Schedule(every=4, fragment_count=2, overlap_steps=2, warmup_steps=0)
    ahead, behind = PendingRounds(schedule), PendingRounds(schedule)
    ahead.load({"captured": [4, 3], "owed": []})
    ahead.in_flight[0] = PendingRound(7, 14, 16)  # captured late, since step 14 is not due
    behind.load({"captured": [3, 3], "owed": []})
    behind.in_flight[1] = PendingRound(6, 11, 13)
    marks = sorted((ahead.mark(15), behind.mark(13)))
    assert marks[0] < marks[1] < 0
    ahead.catch_up(15, marks)
    behind.catch_up(13, marks)
    assert [number for _, (number, *_) in ahead.due_means(15)] == [7]
    assert [number for _, (number, *_) in behind.due_means(13)] == [6]
    ahead.end(0)
    behind.end(1)
    found: dict[int, list[int]] = {}
    for rounds, first in ((ahead, 15), (behind, 13)):
        for step in range(first, 24):
            rounds.note_step(step)
            for fragment, _ in rounds.due_means(step):
                rounds.end(fragment)
            while rounds.can_begin():
                fragment, number = rounds.begin(step)
                found.setdefault(number, []).append(step)
                if rounds.in_flight[fragment].applied_at == step:
                    rounds.end(fragment)
    assert ahead.captured == behind.captured
    assert [found[number] for number in sorted(found)][-4:] == [[17, 17], [19, 19], [21, 21], [23, 23]]


def test_members_with_equal_rounds_have_equal_marks() -> None:
    schedule = Schedule(every=4, fragment_count=1, overlap_steps=3, warmup_steps=0)
    one, two = PendingRounds(schedule), PendingRounds(schedule)
    one.load({"captured": [2], "owed": []})
    two.load({"captured": [2], "owed": []})
    two.in_flight[0] = PendingRound(2, 7, 10)
    assert one.mark(11) == two.mark(9), "a round in flight as scheduled does not make a difference"
    assert one.mark(12) != one.mark(11)
