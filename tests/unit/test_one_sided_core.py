"""Tests the decisions of the one-sided policy: who is replaced, who donates, and the weight of each snapshot."""

from __future__ import annotations

import json
import math
import random
from dataclasses import asdict
from typing import Any

import numpy as np
import pytest
from hypothesis import given, strategies as st
from support.facts import names

from asyncdist.collectives.one_sided import NOTIFIED_COUNT_MAX
from protocols.one_sided.selection import (
    REPLACEMENT_MODES,
    SAMPLE_COUNT,
    OneSidedRules,
    choose,
    donor_limit,
    must_replace,
    sample_count,
)
from protocols.ranking import STRATEGIES, order_worst_first, replacer_count
from protocols.selective.selection import averaging_weights

METRICS = st.dictionaries(
    st.integers(0, 11), st.one_of(st.floats(), st.integers(-3, 3).map(float)), min_size=1, max_size=12
)
RULES = st.builds(
    OneSidedRules,
    replacement_mode=st.sampled_from(("age", "threshold", "worst_ratio")),
    threshold_metric=st.integers(-2, 2).map(float),
    replacement_ratio=st.sampled_from((0.0, 0.1, 0.25, 0.5, 1.0)),
    averaging_strategy=st.sampled_from(STRATEGIES),
    metric_mode=st.sampled_from(("max", "min")),
    donor_count=st.one_of(st.none(), st.integers(1, 5)),
    donor_ratio=st.sampled_from((0.1, 0.5, 1.0)),
)


@pytest.mark.parametrize(
    ("options", "facts"),
    [
        ({"replacement_mode": "young"}, ["replacement_mode", "'young'", "'age', 'threshold', 'worst_ratio'"]),
        ({"replacement_mode": ["age"]}, ["replacement_mode", "['age']"]),
        ({"averaging_strategy": "median"}, ["averaging_strategy", "'median'", "'reset_weights'"]),
        ({"metric_mode": "up"}, ["metric_mode", "'up'", "'max', 'min'"]),
        ({"threshold_metric": math.nan}, ["threshold_metric", "nan", "finite"]),
        ({"threshold_metric": "0"}, ["threshold_metric", "'0'"]),
        ({"threshold_metric": True}, ["threshold_metric", "True"]),
        ({"replacement_ratio": 1.5}, ["replacement_ratio", "1.5", "0", "1"]),
        ({"replacement_ratio": None}, ["replacement_ratio", "None"]),
        ({"donor_ratio": 0}, ["donor_ratio", "0", "> 0 and <= 1, or None"]),
        ({"donor_ratio": math.nan}, ["donor_ratio", "nan"]),
        ({"donor_count": 0}, ["donor_count", "0", "1"]),
        ({"donor_count": 1.0}, ["donor_count", "1.0"]),
        ({"donor_count": True}, ["donor_count", "True"]),
        ({"age_range": (0, 5)}, ["age_range", "(0, 5)", "1 <= shortest <= longest"]),
        ({"age_range": (6, 5)}, ["age_range", "(6, 5)"]),
        ({"age_range": (1, 2, 3)}, ["age_range", "(1, 2, 3)"]),
        ({"age_range": 7}, ["age_range", "7"]),
        ({"age_range": (1, 2.5)}, ["age_range", "(1, 2.5)"]),
    ],
    ids=lambda value: "-".join(f"{k}={v}" for k, v in value.items()) if isinstance(value, dict) else "",
)
def test_an_option_out_of_range_is_refused(options: dict[str, Any], facts: list[str]) -> None:
    with pytest.raises(ValueError) as caught:
        OneSidedRules(**options)
    assert names(caught.value, *facts), caught.value


def test_numbers_of_numpy_become_python_s_own() -> None:
    """Members compare options as JSON text, which cannot contain numpy's numbers."""
    given_options = {
        "threshold_metric": np.float32(1),
        "replacement_ratio": np.float32(0.5),
        "donor_ratio": np.float32(0.25),
        "donor_count": np.int64(2),
        "age_range": (np.int32(3), np.int64(4)),
    }
    rules = OneSidedRules(**given_options)
    plain = OneSidedRules(
        threshold_metric=1.0, replacement_ratio=0.5, donor_ratio=0.25, donor_count=2, age_range=(3, 4)
    )
    assert json.dumps(asdict(rules)) == json.dumps(asdict(plain))


def test_a_threshold_is_one_that_must_not_be_crossed() -> None:
    rules = OneSidedRules(replacement_mode="threshold", threshold_metric=1.5)
    for metric, dies in (
        (1.4, True),
        (1.5, False),
        (2.0, False),
        (math.nan, True),
        (math.inf, True),
        (-math.inf, True),
    ):
        assert must_replace(3, {3: metric}, rules) == dies, metric
    losses = OneSidedRules(replacement_mode="threshold", threshold_metric=1.5, metric_mode="min")
    for metric, dies in ((1.4, False), (1.5, False), (1.6, True), (math.nan, True)):
        assert must_replace(3, {3: metric}, losses) == dies, metric


def test_nobody_dies_of_a_metric_by_age() -> None:
    assert not must_replace(0, {0: math.nan, 1: 9.0}, OneSidedRules(replacement_mode="age"))


@pytest.mark.slow
@given(METRICS, RULES)
def test_the_worst_ratio_is_the_one_of_the_selective_core(metrics: dict[int, float], rules: OneSidedRules) -> None:
    replaced = {rank for rank in metrics if must_replace(rank, metrics, rules)}
    if rules.replacement_mode == "worst_ratio":
        assert len(replaced) == replacer_count(len(metrics), rules.replacement_ratio)
        assert replaced == set(order_worst_first(metrics, rules.metric_mode)[: len(replaced)])
        assert len(replaced) < len(metrics)


@pytest.mark.parametrize(
    ("members", "options", "count"),
    [
        (4, {}, 2),
        (5, {}, 2),
        (2, {}, 1),
        (3, {"donor_ratio": 0.1}, 1),
        (10, {"donor_ratio": 0.7}, 7),
        (50, {"donor_ratio": 0.58}, 29),  # the product in binary is slightly below
        (4, {"donor_ratio": 1.0}, 4),
        (4, {"donor_count": 3}, 3),
        (4, {"donor_count": 3, "donor_ratio": 0.1}, 3),
        (17, {}, 8),
        (1000, {}, 8),
        (1000, {"donor_ratio": 0.5}, 500),
        (1000, {"donor_count": 20}, 20),
    ],
)
def test_how_many_are_drawn(members: int, options: dict[str, Any], count: int) -> None:
    assert donor_limit(members, OneSidedRules(**options)) == count


def test_small_groups_are_read_whole_and_larger_ones_by_sample() -> None:
    assert SAMPLE_COUNT == NOTIFIED_COUNT_MAX, "a group whose members are all notified must be read as a whole"
    for mode in REPLACEMENT_MODES:
        for options in ({}, {"donor_count": 2}, {"donor_ratio": 1.0}):
            rules = OneSidedRules(replacement_mode=mode, **options)
            assert all(sample_count(members, rules) >= members - 1 for members in range(2, SAMPLE_COUNT + 2))
            assert sample_count(1000, rules) >= donor_limit(1000, rules)
    assert sample_count(1000, OneSidedRules()) == 16
    assert sample_count(1000, OneSidedRules(donor_count=2)) == 8
    assert sample_count(1000, OneSidedRules(replacement_mode="worst_ratio")) == 32
    assert sample_count(1000, OneSidedRules(replacement_mode="threshold", donor_count=50)) == 50


@pytest.mark.slow
@given(METRICS, RULES, st.integers(0, 11), st.randoms(use_true_random=False))
def test_a_choice_keeps_the_rules(
    metrics: dict[int, float], rules: OneSidedRules, rank: int, rng: random.Random
) -> None:
    choice = choose(rank, metrics, 12, rules, rng.sample)
    if rules.averaging_strategy == "reset_weights":
        assert choice is not None and (choice.donors, choice.best) == ((), -1)
        return
    able = {r for r in metrics if r != rank and math.isfinite(metrics[r]) and not must_replace(r, metrics, rules)}
    assert (choice is None) == (not able)
    if choice is None:
        return
    assert choice.donors == tuple(sorted(set(choice.donors))) and set(choice.donors) <= able
    assert choice.best in choice.donors
    weights = [choice.weight(metrics[donor]) for donor in choice.donors]
    # a gain can be 2^1074 times as large as another, whose weight is then 0
    assert all(0.0 <= weight <= 2.0**20 for weight in weights)
    assert choice.weight(metrics[choice.best]) > 0.0
    expected = 1 if rules.averaging_strategy == "best_only" else min(donor_limit(12, rules), len(able))
    if rules.averaging_strategy == "weighted_mean":
        assert len(choice.donors) <= expected
    else:
        assert len(choice.donors) == expected and set(weights) == {1.0}
    assert all(choice.weight(metric) == 0.0 for metric in (math.nan, math.inf, -math.inf))
    sign = 1.0 if rules.metric_mode == "max" else -1.0
    assert all(sign * metrics[choice.best] >= sign * metrics[donor] for donor in choice.donors)


@given(METRICS, st.sampled_from(("max", "min")), st.integers(0, 11))
def test_weights_are_in_the_ratios_of_the_selective_core(metrics: dict[int, float], mode: str, rank: int) -> None:
    """If all ranks are drawn and no snapshot is newer, the weights and excluded donors equal the selective core's."""
    rules = OneSidedRules(averaging_strategy="weighted_mean", metric_mode=mode, donor_count=12)
    choice = choose(rank, metrics, 12, rules, lambda ranks, count: list(ranks))
    donors = [other for other in sorted(metrics) if other != rank and math.isfinite(metrics[other])]
    if choice is None:
        assert not donors
        return
    expected = averaging_weights(metrics, donors, averaging_strategy="weighted_mean", metric_mode=mode)
    found = [choice.weight(metrics[donor]) if donor in choice.donors else 0.0 for donor in donors]
    for one, two in zip(found, expected, strict=True):
        assert math.isclose(one / max(found), two / max(expected), rel_tol=1e-9, abs_tol=1e-300)


def test_a_newer_metric_weighs_as_what_it_is() -> None:
    rules = OneSidedRules(averaging_strategy="weighted_mean", donor_count=3)
    choice = choose(0, {0: 1.0, 1: 2.0, 2: 4.0}, 3, rules, lambda ranks, count: list(ranks))
    assert choice is not None and choice.donors == (1, 2) and choice.floor == 1.0
    assert [choice.weight(metric) for metric in (2.0, 4.0, 3.5, 1.0, 0.0, -7.0)] == [1.0, 3.0, 2.5, 0.0, 0.0, 0.0]
    assert choice.weight(1e300) <= 2.0**20, "a weight must not be so large that float32 overflows"
    losses = OneSidedRules(averaging_strategy="weighted_mean", donor_count=3, metric_mode="min")
    choice = choose(0, {0: 4.0, 1: 2.0, 2: 1.0}, 3, losses, lambda ranks, count: list(ranks))
    assert choice is not None and [choice.weight(m) for m in (2.0, 1.0, 4.0, 5.0)] == [2.0, 3.0, 0.0, 0.0]


def test_nobody_better_than_the_worst_weighs_evenly() -> None:
    rules = OneSidedRules(averaging_strategy="weighted_mean", donor_count=3)
    choice = choose(0, {0: 5.0, 1: 2.0, 2: 2.0}, 3, rules, lambda ranks, count: list(ranks))
    assert choice is not None and choice.donors == (1, 2) and choice.weight(2.0) == choice.weight(3.0) == 1.0


def test_one_who_has_not_been_judged_yet_may_be_replaced() -> None:
    """The rank is replaced by age, before its first report: it has no metric of its own."""
    for strategy in STRATEGIES:
        choice = choose(0, {1: 3.0, 2: 1.0}, 3, OneSidedRules(averaging_strategy=strategy), random.Random(1).sample)
        assert choice is not None, strategy


def test_donors_are_drawn_evenly() -> None:
    rng = random.Random(7)
    counts = dict.fromkeys(range(1, 5), 0)
    for _ in range(2000):
        choice = choose(0, dict.fromkeys(range(5), 1.0), 5, OneSidedRules(donor_count=2), rng.sample)
        assert choice is not None and len(choice.donors) == 2
        for donor in choice.donors:
            counts[donor] += 1
    assert all(800 < count < 1200 for count in counts.values()), counts
