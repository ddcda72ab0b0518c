"""Tests how policies read the iteration numbers that ported scripts pass."""

from __future__ import annotations

import pytest

from asyncdist.integrations.torchgfn.script_iterations import ScriptIterations


def due(numbers: list[int], *, every: int, iteration: int = 0) -> tuple[list[int], int]:
    """Return the positions of the due calls, and the policy's iteration after the last one."""
    caller, places = ScriptIterations(every), []
    for place, number in enumerate(numbers):
        iteration, is_due = caller.translate(number, iteration)
        places += [place] * is_due
        iteration += 1
    return places, iteration


@pytest.mark.parametrize(
    ("numbers", "every", "places", "iteration"),
    [
        ([*range(10)], 4, [3, 7], 10),
        ([*range(6), *range(6)], 4, [3, 9], 12),
        ([0, 100, 200], 100, [1, 2], 201),
        ([*range(5)] * 4, 10, [10], 20),
        ([0] * 6, 3, [3], 6),
        ([5, 5, 6], 3, [0, 1], 8),
        ([1 << 24], 2, [], (1 << 24) + 1),
    ],
    ids=["plain", "epochs", "skipping", "short-epochs", "one-batch", "repeated", "late"],
)
def test_due_calls_follow_the_numbers(numbers: list[int], every: int, places: list[int], iteration: int) -> None:
    assert due(numbers, every=every) == (places, iteration)


@pytest.mark.parametrize("number", [0, 7, 67])
def test_a_resumed_policy_continues_at_any_number(number: int) -> None:
    """The policy has made 67 steps; the script continues to count these, or begins or continues an epoch."""
    places, iteration = due([*range(number, number + 10)], every=10, iteration=67)
    assert iteration == 77
    assert places == [9 - number % 10]
