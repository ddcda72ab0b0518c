"""Tests the decisions of selective averaging against a second implementation of its definition, in numpy."""

from __future__ import annotations

import numpy as np
import pytest

from protocols.ranking import order_worst_first
from protocols.selective.selection import Decision, SelectiveRules, averaging_weights, decide

DRAWS = range(300)


def metrics_of(draw: int) -> np.ndarray:
    """Return small integers, with ties, and some non-finite values: sums and differences are exact."""
    generator = np.random.default_rng(draw)
    metrics = generator.integers(-4, 5, generator.integers(2, 10)).astype(float)
    metrics[generator.random(len(metrics)) < 0.1] = generator.choice([np.nan, np.inf, -np.inf])
    return metrics


def ordered(metrics: np.ndarray, sign: float) -> np.ndarray:
    """Return ranks from worst to best: non-finite metrics are worst, and ties are ordered by rank."""
    return np.argsort(np.where(np.isfinite(metrics), sign * metrics, -np.inf), kind="stable")


def gains(metrics: np.ndarray, donors: np.ndarray, sign: float) -> np.ndarray:
    """Return each donor's distance to the worst finite participant; all are equal if no metric is finite."""
    above = sign * metrics[donors] - (sign * metrics[np.isfinite(metrics)]).min()
    return above if above.any() else np.ones(len(donors))


@pytest.mark.parametrize(("mode", "sign"), [("max", 1.0), ("min", -1.0)])
@pytest.mark.parametrize("strategy", ["mean", "weighted_mean", "best_only"])
def test_a_decision_is_the_definition(strategy: str, mode: str, sign: float) -> None:
    acted = 0
    for draw in DRAWS:
        metrics = metrics_of(draw)
        ratio, size = float(np.random.default_rng(draw).integers(0, 9)) / 8, len(metrics)
        rules = SelectiveRules(replacement_ratio=ratio, averaging_strategy=strategy, metric_mode=mode)
        found = decide(dict(enumerate(metrics.tolist())), rules)
        count = int(np.clip(np.floor(ratio * size + 0.5), 1, size - 1)) if ratio else 0
        order = ordered(metrics, sign)
        able = order[count:][np.isfinite(metrics[order[count:]])]
        if not count or not len(able):
            assert found is None
            continue
        donors = np.sort(able[-1:] if strategy == "best_only" else able)
        weights = gains(metrics, donors, sign) if strategy == "weighted_mean" else np.ones(len(donors))
        giving = weights > 0
        replacers = tuple(np.sort(order[:count]).tolist())
        expected = Decision(tuple(donors[giving].tolist()), replacers, tuple(weights[giving].tolist()), int(able[-1]))
        assert found == expected, metrics
        acted += 1
    assert acted > 200


@pytest.mark.parametrize(("mode", "sign"), [("max", 1.0), ("min", -1.0)])
def test_weights_are_how_far_a_donor_is_above_the_worst(mode: str, sign: float) -> None:
    for draw in DRAWS:
        metrics = metrics_of(draw)
        donors = np.flatnonzero(np.isfinite(metrics))
        if not len(donors):
            continue
        listed = dict(enumerate(metrics.tolist()))
        found = averaging_weights(listed, donors.tolist(), averaging_strategy="weighted_mean", metric_mode=mode)
        assert np.array_equal(found, gains(metrics, donors, sign)), metrics
        assert np.array_equal(order_worst_first(listed, mode), ordered(metrics, sign))
        for strategy in ("mean", "best_only"):
            even = averaging_weights(listed, donors.tolist(), averaging_strategy=strategy, metric_mode=mode)
            assert np.array_equal(even, np.ones(len(donors)))
