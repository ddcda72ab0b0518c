"""Tests shrinking: only the faults that a failure needs remain, with numbers as simple as the failure allows."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given, strategies as st

from asyncdist.simulation import (
    Delay,
    Fault,
    Kill,
    Partition,
    SlowRank,
    Stall,
)
from asyncdist.simulation.exploration.explore import signature_of
from asyncdist.simulation.exploration.shrink import minimize, shrink, simplify


def plan_of(numbers: Sequence[int]) -> tuple[Fault, ...]:
    return tuple(Stall(number, 0.0, 1.0) for number in numbers)


@pytest.mark.slow
@given(st.integers(1, 40), st.data())
def test_shrinking_finds_the_faults_that_are_needed_together(size: int, data: st.DataObject) -> None:
    needed = data.draw(st.sets(st.integers(0, size - 1), min_size=1))
    tried: list[Sequence[Fault]] = []

    def fails(plan: Sequence[Fault]) -> bool:
        tried.append(plan)
        return needed <= {fault.rank for fault in plan if isinstance(fault, Stall)}

    assert minimize(plan_of(range(size)), fails) == plan_of(sorted(needed))
    # Zeller's bound for the worst case, with a margin for rounding.
    assert len(tried) <= size * size + 3 * size + 10


@pytest.mark.parametrize(
    ("fault", "limits", "simplest"),
    [
        (Kill(1, at_s=0.45678), {}, Kill(1, at_s=0.0)),
        (Kill(1, at_s=0.45678), {"at_s": 0.4}, Kill(1, at_s=0.5)),
        (Kill(1, at_s=0.44321), {"at_s": 0.441}, Kill(1, at_s=0.443)),
        (Kill(1, at_turn=137), {}, Kill(1, at_turn=1)),
        (Kill(1, at_turn=137), {"at_turn": 131}, Kill(1, at_turn=140)),
        (Kill(3, at_message=137), {"at_message": 90}, Kill(3, at_message=100)),
        (SlowRank(2, 0.1234, 3.14159), {}, SlowRank(2, 0.0, 3.0)),
        (Partition((1, 2), 0.1234, 0.5678), {"at_s": 0.12}, Partition((1, 2), 0.12, 0.6)),
        (Delay(1, 2, 57, 0.777), {"number": 55, "duration_s": 0.5}, Delay(1, 2, 60, 0.8)),
    ],
)
def test_numbers_are_simplified_as_far_as_it_still_fails(
    fault: Fault, limits: dict[str, float], simplest: Fault
) -> None:
    def fails(plan: Sequence[Fault]) -> bool:
        return all(getattr(plan[0], name) >= limit for name, limit in limits.items())

    assert simplify([fault], fails) == (simplest,)


def test_a_fault_needless_once_the_others_are_simple_is_left_out() -> None:
    """The first fault compensates for the second fault's unusual time."""

    def fails(plan: Sequence[Fault]) -> bool:
        stalls = [fault for fault in plan if isinstance(fault, Stall)]
        found = next((stall.duration_s for stall in stalls if stall.rank == 2), 0.0)
        return found == 1.0 or (found > 1.0 and len(stalls) > 1)

    plan = [Stall(1, 0.0, 3.0), Stall(2, 0.0, 1.04)]
    assert simplify(minimize(plan, fails), fails) == (Stall(1, 0.0, 0.0), Stall(2, 0.0, 1.0))
    assert shrink(plan, fails) == (Stall(2, 0.0, 1.0),)


@pytest.mark.parametrize(
    ("one", "other", "same"),
    [
        (AssertionError("rank 3 holds 2 roles"), AssertionError("rank 12 holds 7 roles"), True),
        (AssertionError("lost: [1, 2, 3]"), AssertionError("lost: [7]"), True),
        (AssertionError("at 0.25 s\nassert 1 == 2"), AssertionError("at 1e-06 s\nassert 4 == 5"), True),
        (AssertionError("one story"), AssertionError("another story"), False),
        (AssertionError("one story"), ValueError("one story"), False),
        (ValueError("one story"), ValueError("another story"), True),
        (ExceptionGroup("a", [ValueError(), KeyError()]), ExceptionGroup("b", [KeyError(), ValueError()]), True),
        (ExceptionGroup("a", [ValueError()]), ExceptionGroup("a", [KeyError()]), False),
    ],
)
def test_failures_are_equal_by_class_and_assertions_by_text(one: Exception, other: Exception, same: bool) -> None:
    assert (signature_of(one) == signature_of(other)) == same
