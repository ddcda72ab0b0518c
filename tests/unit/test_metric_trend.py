"""Tests the warning about a selection in the wrong direction, by the best metric's trend and by the call's names."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterable, Iterator

import pytest

from protocols.metric_trend import BlankMetrics, MetricTrend, trend_warning
from protocols.misuse import is_larger_better
from protocols.selective.rounds import RoundCoordinator
from protocols.selective.selection import SelectiveRules

COUNT = 2048


def found_at(values: Iterable[float], metric_mode: str = "max") -> int:
    """Return the number of values after which the trend counts as wrong; 0 if it never does."""
    trend = MetricTrend(metric_mode)
    for count, value in enumerate(values, start=1):
        trend.add((value,))
        if trend.take_wrong():
            return count
    return 0


def walk(draws: random.Random) -> Iterator[float]:
    place = 0.0
    for _ in range(COUNT):
        place += draws.gauss(0.0, 1.0)
        yield place


def losses(draws: random.Random, *, steps: float, noise: float) -> Iterator[float]:
    return (math.exp(-step / steps) + 0.3 + draws.gauss(0.0, noise) for step in range(COUNT))


def improving(draws: random.Random) -> Iterator[float]:
    return (-loss for loss in losses(draws, steps=50, noise=0.1))


#: Metrics without a wrong trend: they stay, wander or improve, and some become slightly worse at the end.
HARMLESS: dict[str, Callable[[random.Random], Iterable[float]]] = {
    "constant": lambda _: [0.5] * COUNT,
    "noise": lambda draws: (draws.gauss(0.0, 1.0) for _ in range(COUNT)),
    "outliers": lambda draws: (math.tan(math.pi * (draws.random() - 0.5)) for _ in range(COUNT)),
    "best of four walks": lambda draws: map(max, zip(*(walk(draws) for _ in range(4)), strict=True)),
    "cycles": lambda draws: (-(step % 8) + draws.gauss(0.0, 0.3) for step in range(COUNT)),
    "improving": improving,
    "overfitting": lambda draws: (value - step / 4000 for step, value in enumerate(improving(draws))),
    "not a number": lambda _: [math.nan] * COUNT,
}


@pytest.mark.slow
@pytest.mark.parametrize("name", HARMLESS)
def test_a_harmless_metric_is_no_wrong_trend(name: str) -> None:
    found = [found_at(HARMLESS[name](random.Random(f"{name} {seed}"))) for seed in range(100)]
    limit = 1 if name == "outliers" else 0  # for a metric without a mean, any result is allowed
    assert sum(map(bool, found)) <= limit, found


@pytest.mark.slow
def test_one_random_walk_of_a_hundred_is_a_wrong_trend_at_most() -> None:
    """A single walk may settle far below its start by chance; this test limits the rate of such walks."""
    assert sum(bool(found_at(walk(random.Random(seed)))) for seed in range(400)) <= 4


@pytest.mark.parametrize(
    ("steps", "noise", "latest"),
    [(10, 0.0, 16), (1000, 0.0, 16), (10, 0.05, 128), (50, 0.1, 512), (200, 0.1, 2048), (50, 0.01, 256)],
)
def test_a_loss_taken_for_a_score_is_found(steps: float, noise: float, latest: int) -> None:
    found = [found_at(losses(random.Random(seed), steps=steps, noise=noise)) for seed in range(5)]
    assert all(0 < count <= latest for count in found), found


def test_a_score_taken_for_a_loss_is_found() -> None:
    scores = [-loss for loss in losses(random.Random(0), steps=50, noise=0.02)]
    assert found_at(scores, "min") and not found_at(scores, "max")


def test_the_best_rank_is_watched_and_not_a_diverging_one() -> None:
    trend = MetricTrend("max")
    for step in range(COUNT):
        trend.add((-math.exp(-step / 50), -2.0 - step, math.nan))
    assert trend.take_wrong() is None


def test_a_wrong_trend_is_told_once_with_its_values() -> None:
    trend, told = MetricTrend("max"), []
    for step in range(COUNT):
        trend.add((2.0 - step / COUNT,))
        told += [wrong] if (wrong := trend.take_wrong()) else []
    assert len(told) == 1
    text = trend_warning("AsyncSelectiveAveragingPolicy, rank 0", "max", told[0])
    assert (
        "metric_mode='max' means that a larger metric is better" in text
        and "from 2 to 1.99268" in text
        and "step(loss=...)" in text
    )


def test_the_coordinator_watches_the_best_of_each_decision() -> None:
    coordinator = RoundCoordinator([0, 1], SelectiveRules(replacement_ratio=0.0, quorum=1.0))
    for step in range(16):
        for rank in (0, 1):
            coordinator.on_report(rank, step, -step - 10.0 * rank, 1.0, float(step))
    assert coordinator.trend.take_wrong() == (0.0, -15.0)


@pytest.mark.parametrize(
    ("name", "direction"),
    [
        ("loss", False),
        ("val_loss", False),
        ("losses", False),
        ("loss_value", False),
        ("Train_Loss", False),
        ("accuracy", True),
        ("eval_accuracy", True),
        ("mean_reward", True),
        ("neg_loss", None),
        ("lossless", None),
        ("loss_weight", None),
        ("metric", None),
        ("fid_score", None),
        ("", None),
    ],
)
def test_a_name_says_which_direction_is_better(name: str, direction: bool | None) -> None:
    assert is_larger_better(name) is direction


@pytest.mark.parametrize(
    ("decisions", "found_at"),
    [
        ([(math.nan, math.inf), (math.nan, -math.inf), (math.nan,)], [2]),
        ([(math.nan,)] * 9, [2]),
        ([(math.nan,), (math.nan,), (math.nan, 1.0), (math.nan,), (math.nan,)], []),
        ([(), (), (), ()], []),
    ],
    ids=["three in a row", "once", "one finite metric", "no metric"],
)
def test_metrics_that_are_never_finite_are_found_once(decisions: list[tuple[float, ...]], found_at: list[int]) -> None:
    blanks = BlankMetrics()
    found = []
    for place, metrics in enumerate(decisions):
        blanks.add(metrics)
        found += [place] if blanks.take_found() else []
    assert found == found_at
