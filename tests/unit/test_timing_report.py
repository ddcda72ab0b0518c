"""Tests load balance and step times against their definitions in numpy."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import asyncdist as ad

DRAW = np.random.default_rng(0)
EVEN = [{"train": DRAW.random(5).tolist(), "sample": DRAW.random(3).tolist()} for _ in range(4)]


def test_work_and_waiting(capsys: pytest.CaptureFixture[str]) -> None:
    report = ad.report_load_imbalance(EVEN, 4)
    for row in report.steps:
        table = np.array([timing[row.step] for timing in EVEN])
        assert row.useful_s == pytest.approx(table.mean(axis=0).sum())
        assert row.waiting_s == pytest.approx((table.max(axis=0) - table.mean(axis=0)).sum())
        assert row.imbalance == pytest.approx(1 - table.mean(axis=0).sum() / table.max(axis=0).sum())
        assert (row.ranks, row.missing, row.remark) == ((0, 1, 2, 3), (), "")
    assert [row.step for row in report.steps] == ["train", "sample"]
    printed = capsys.readouterr().out
    assert printed == f"{report}\n"
    assert f"{report.steps[0].useful_s:.4f}" in printed and f"{report.steps[1].waiting_s:.4f}" in printed


def test_times(capsys: pytest.CaptureFixture[str]) -> None:
    report = ad.report_time_info(EVEN)
    assert len(report.times) == 8
    for row in report.times:
        assert row.total_s == pytest.approx(np.sum(EVEN[row.rank][row.step]))
        assert row.mean_s == pytest.approx(np.mean(EVEN[row.rank][row.step]))
    for step in report.steps:
        totals = [np.sum(timing[step.step]) for timing in EVEN]
        assert (step.max_s, step.mean_s) == (pytest.approx(max(totals)), pytest.approx(np.mean(totals)))
    assert capsys.readouterr().out == f"{report}\n"


def test_steps_that_some_ranks_lack_and_unequal_lengths_are_said() -> None:
    timings = [{"a": [1.0, 2.0, 9.0]}, {"a": [3.0, 2.0], "b": 4}, {"b": [2.0]}, {}]
    report = ad.report_load_imbalance(timings)
    a, b = report.steps
    assert (a.useful_s, a.waiting_s, a.iteration_count, a.iteration_count_max) == (4.0, 1.0, 2, 3)
    assert (a.ranks, a.missing) == ((0, 1), (2, 3))
    assert a.remark == "not on ranks 2, 3; first 2 of up to 3 iterations"
    assert (b.useful_s, b.waiting_s, b.missing, b.remark) == (3.0, 1.0, (0, 3), "not on ranks 0, 3")
    assert a.remark in str(report) and b.remark in str(report)
    times = ad.report_time_info(timings)
    assert [(row.rank, row.step, row.total_s, row.iteration_count) for row in times.times] == [
        (0, "a", 12.0, 3),
        (1, "a", 5.0, 2),
        (1, "b", 4.0, 1),
        (2, "b", 2.0, 1),
    ]
    assert [(row.step, row.max_s, row.mean_s, row.missing) for row in times.steps] == [
        ("a", 12.0, 8.5, (2, 3)),
        ("b", 4.0, 3.0, (0, 3)),
    ]
    assert "not on ranks 2, 3" in str(times)


def test_equal_times_are_no_waiting() -> None:
    """Regression: the mean of three times 0.1 exceeds 0.1, so the table showed -0.0000."""
    (row,) = ad.report_load_imbalance([{"train": 0.1}] * 3).steps
    assert (row.waiting_s, row.imbalance) == (0.0, 0.0)


def test_no_iterations() -> None:
    row = ad.report_load_imbalance([{"a": []}, {"a": [1.0]}]).steps[0]
    assert (row.useful_s, row.waiting_s, row.imbalance) == (0.0, 0.0, 0.0)
    assert np.isnan(ad.report_time_info([{"a": []}]).times[0].mean_s)
    assert ad.report_load_imbalance([{}]).steps == ()


def test_world_size_says_how_many_of_them_are_ranks() -> None:
    assert ad.report_load_imbalance(EVEN, 2).steps[0].ranks == (0, 1)


@pytest.mark.parametrize(
    ("arguments", "kind", "words"),
    [
        (({"a": [1.0]},), TypeError, "all_timing_dict must be a list with one dict per rank, got a dict"),
        (([{"a": [1.0]}, None],), TypeError, "the timing of rank 1 must be a dict, got a NoneType"),
        (
            ([{"a": [1.0, "slow"]}],),
            TypeError,
            "the durations of step 'a' of rank 0 must be numbers of seconds, got 'slow'",
        ),
        (([{"a": [1.0]}], 2), ValueError, "world_size must be from 1 to 1, the number of ranks with timings, got 2"),
        (([],), ValueError, "got 0"),
    ],
)
def test_what_is_no_timing(arguments: tuple[Any, ...], kind: type[Exception], words: str) -> None:
    for call in (ad.report_load_imbalance, ad.report_time_info):
        with pytest.raises(kind) as caught:
            call(*arguments)
        assert words in str(caught.value)
