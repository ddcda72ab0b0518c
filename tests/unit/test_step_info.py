"""Tests the result of a step that has applied several averages."""

from __future__ import annotations

from protocols import StepInfo
from protocols.step_info import together

ONE = StepInfo(True, round=5, donors=(0, 1), weights=(0.5, 0.5), staleness_steps=2, seconds=0.5, nbytes=80, fragment=0)
TWO = StepInfo(True, round=6, donors=(1,), weights=(1.0,), staleness_steps=1, seconds=0.25, nbytes=20, fragment=1)


def test_one_average_is_the_result() -> None:
    assert together([ONE]) is ONE and ONE.parts == ()


def test_several_averages_are_added_up_and_kept_as_parts() -> None:
    info = together([ONE, TWO])
    assert info and info.parts == (ONE, TWO)
    assert (info.nbytes, info.seconds, info.staleness_steps) == (100, 0.75, 2)
    assert (info.round, info.fragment, info.donors, info.weights) == (6, 1, (1,), (1.0,))
    assert str(info) == f"{ONE}; {TWO}"


def test_the_outer_norm_is_that_of_all_fragments() -> None:
    one, two = StepInfo(True, outer_norm=3.0, cosine=0.5), StepInfo(True, outer_norm=4.0, cosine=0.25)
    info = together([one, two])
    assert info.outer_norm == 5.0 and info.cosine is None
    assert together([ONE, TWO]).outer_norm is None
