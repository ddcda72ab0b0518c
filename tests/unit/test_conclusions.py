"""Tests the sentences that open a hang report, computed from the facts of a job."""

from __future__ import annotations

import numpy as np
import pytest
from support.facts import names

from asyncdist.report.averages import Average, AverageKey
from asyncdist.report.conclusions import conclusions
from asyncdist.report.page import _facts_of_rounds
from asyncdist.report.series import Thinned
from asyncdist.report.summary import Applied, Population, RankSummary, Round, Summary


def job(*step_s: float, **facts: object) -> Summary:
    """Return a job whose ranks made ten steps each, in the given time, and returned."""
    size = len(step_s)
    ranks = [RankSummary() for _ in range(size)]
    for rank, seconds in zip(ranks, step_s, strict=True):
        for _ in range(10):
            rank.intervals.add(seconds)
    told: dict[str, object] = {"ends": dict.fromkeys(range(size), ""), "first_step_s": 0.5, "message_count": 1234}
    return Summary(size=size, ranks=ranks, nbytes=np.zeros((size, size)), **{**told, **facts})  # type: ignore[arg-type]


def a_round(number: int, applied_count: int, reason: str = "every replacer has answered", replacers: int = 1) -> Round:
    return Round(
        (0, 0, number), 1.0, (0,), tuple(range(replacers)), "direct", reason=reason, applied_count=applied_count
    )


def applied(count: int) -> list[Applied]:
    return [Applied(1.0, 1, 0, 0, number, (0,), (1.0,), 0) for number in range(count)]


def population(*last: float | None, shares: object = None) -> Population:
    metrics = [Thinned() for _ in last]
    for metric, value in zip(metrics, last, strict=True):
        if value is not None:
            metric.add(0.5, -100.0)
            metric.add(1.0, value)
    return Population("", metrics, np.array(np.eye(len(last)) if shares is None else shares, dtype=np.float32))


def test_a_job_that_went_well() -> None:
    summary = job(0.5, 1.0, 0.5, 0.5, rounds=[a_round(n, 1) for n in range(73)], applied=applied(73))
    shares = [[1, 0, 0, 0], [1, 0, 0, 0], [0, 0, 1, 0], [0, 0, 1, 0]]
    summary.populations.append(population(-0.5, -0.25, -0.4, -0.3, shares=shares))
    assert conclusions(summary) == [
        "Every rank returned from main.",
        "Rank 1 took 2.0 times as long per step as the other ranks (500 ms).",
        "The last metrics were between -0.5 (rank 0) and -0.25 (rank 1).",
        "73 of 73 rounds were applied by all ranks that they replaced, with 73 replacements in total.",
        "The last weights descend from 2.0 of 4 ranks, most of them from rank 0, 50%.",
        "1,234 messages were sent; no message of the program's channels was lost.",
    ]


@pytest.mark.parametrize(
    ("step_s", "told"),
    [
        ((0.5, 0.5), "No rank was slow: the median step took 500 ms on each rank."),
        ((0.5, 0.6), "No rank was slow: the median step took 500 ms, 1.20 times as long on rank 1."),
        (
            (0.01, 0.03, 0.01, 0.05),
            "Ranks 1, 3 took 3.0 to 5.0 times as long per step as the other ranks (10 ms).",
        ),
        ((2.0,), "The median step took 2.0 s."),
    ],
)
def test_slow_ranks_are_named_with_a_factor(step_s: tuple[float, ...], told: str) -> None:
    assert conclusions(job(*step_s))[1] == told


def test_a_late_start_is_explained() -> None:
    told = (
        "The first step ended 12 s after the first rank began: before it, the ranks connect, the program prepares its"
    )
    assert any(line.startswith(told) for line in conclusions(job(0.5, 0.5, first_step_s=12.5)))
    assert not any("first step" in line for line in conclusions(job(0.5, 0.5, first_step_s=0.9)))


def test_ranks_that_did_not_return_are_named() -> None:
    ends = {0: "", 1: "ValueError: broken\nin a worker", 2: None}
    assert conclusions(job(0.5, 0.5, 0.5, 0.5, ends=ends))[:3] == [
        "Rank 1 ended with ValueError: broken.",
        "Rank 2 has no end of main in the recording: killed, stopped, or still running.",
        "Rank 3 wrote no recording.",
    ]


def test_metrics_that_are_no_numbers_are_named() -> None:
    summary = job(0.5, 0.5, 0.5, populations=[population(-0.5, float("nan"), None)])
    assert conclusions(summary)[2:4] == [
        "The last metric of rank 1 was not a finite number.",
        "The last finite metric was -0.5 (rank 0).",
    ]


def test_rounds_that_were_not_applied_are_counted_by_reason() -> None:
    rounds = [a_round(1, 1), a_round(2, 1, "a donor was lost", 2), a_round(3, 0, ""), a_round(4, 0, "idle", 0)]
    told = conclusions(job(0.5, 0.5, rounds=rounds, applied=applied(2)))
    (rounds_applied,) = (line for line in told if line.startswith("1 of 4 "))
    assert names(rounds_applied, 2, 1)
    assert "Not applied by all: 1 (a donor was lost), 1 (no end in the recording)." in told


def test_replacements_are_not_averages() -> None:
    """Regression: averages of another policy were counted as replacements of ranks."""
    summary = job(0.5, 0.5, rounds=[a_round(1, 1)], applied=applied(5))
    key = AverageKey(1, 0, 0, 1)
    summary.averages._rounds[key] = Average(key, 0, applied_count=4)
    told = conclusions(summary)
    assert "1 of 1 round was applied by all ranks that they replaced, with 1 replacement in total." in told
    assert dict(_facts_of_rounds(summary))["rounds"] == "1, with 1 replacement"


def test_errors_that_are_not_shown_are_counted() -> None:
    """Regression: ranks with a fourth error were not mentioned."""
    ends = {0: "A: a", 1: "B: b", 2: "B: b", 3: "C: c", 4: "D: d", 5: "E: e", 6: ""}
    told = conclusions(job(*[0.5] * 7, ends=ends))
    assert told[:3] == ["Rank 0 ended with A: a.", "Ranks 1, 2 ended with B: b.", "Rank 3 ended with C: c."]
    assert told[3] == "Ranks 4, 5 ended with other errors."


def test_messages_that_never_arrived_are_named() -> None:
    summary = job(0.5, 0.5)
    summary.messages.sent.update({(0, 1, 40): 5, (1, 0, 40): 2})
    summary.messages.received.update({(0, 1, 40): 3, (1, 0, 40): 2})
    told = "2 messages of the program's channels never arrived: 2 from rank 0 to rank 1 on tag 40."
    assert conclusions(summary)[-1] == told
    del summary.ends[1]
    assert "never arrived" not in conclusions(summary)[-1], (
        "a message to rank 1 may have arrived, as rank 1 has no recording"
    )
