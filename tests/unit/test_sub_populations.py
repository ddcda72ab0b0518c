"""Tests who copies whom in sub-populations with different periods, against a port of the rules of MF-PBT to numpy."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from protocols.selective.plan import Plan, unpack_plan
from protocols.selective.rounds import RoundCoordinator
from protocols.selective.selection import SelectiveRules, decide, parents_of


def once(number: int) -> range:
    return range(number, number + 1)


def oracle(scores: Any, size: int, periods: tuple[int, ...], number: int) -> dict[int, int]:
    """Return the network's parent of each replaced agent, from the text of 2506.03225: quarters, larger is better."""
    count, share = len(scores), size // 4
    best_first = np.lexsort((-np.arange(count), -scores))
    parents: dict[int, int] = {}
    evolving = [place for place, period in enumerate(periods) if number % period == 0]
    ranked = {place: [each for each in best_first if each // size == place] for place in evolving}
    for place in evolving:
        for worst, best in zip(ranked[place][-share:], ranked[place][:share], strict=True):
            parents[int(worst)] = int(best)
    for place in evolving:
        outside = [each for each in best_first if each // size != place]
        for agent in ranked[place][2 * share : 3 * share]:
            while outside and int(outside[0]) in parents:  # differs: an agent that is replaced is not copied
                outside.pop(0)
            if outside and agent not in parents.values() and scores[agent] < scores[outside[0]]:
                parents[int(agent)] = int(outside.pop(0))
    return parents


@given(
    seed=st.integers(0, 10_000),
    size=st.sampled_from([4, 8, 12]),
    periods=st.lists(st.integers(1, 5), min_size=1, max_size=4),
    number=st.integers(1, 60),
)
@settings(max_examples=100, deadline=None, derandomize=True)
def test_parents_are_those_of_the_paper(seed: int, size: int, periods: list[int], number: int) -> None:
    scores = np.random.default_rng(seed).permutation(size * len(periods)).astype(float)
    ranks = [tuple(range(first, first + size)) for first in range(0, len(scores), size)]
    found = parents_of(dict(enumerate(scores.tolist())), ranks, periods, once(number), quantile=0.25, metric_mode="max")
    assert found == oracle(scores, size, tuple(periods), number)
    assert not found.keys() & set(found.values()), "no rank may have two roles"
    lower = parents_of(
        dict(enumerate((-scores).tolist())), ranks, periods, once(number), quantile=0.25, metric_mode="min"
    )
    assert lower == found


METRICS = st.dictionaries(st.integers(0, 11), st.sampled_from([0.0, 1.0, 2.0, math.nan, math.inf]), min_size=2)


@given(metrics=METRICS, number=st.integers(1, 12), quantile=st.sampled_from([0.0, 0.1, 0.25, 0.4, 0.5]))
@settings(max_examples=100, deadline=None, derandomize=True)
def test_decisions_are_sound_for_any_reports(metrics: dict[int, float], number: int, quantile: float) -> None:
    ranks = (tuple(range(4)), tuple(range(4, 8)), tuple(range(8, 12)))
    rules = SelectiveRules(
        replacement_ratio=quantile,
        averaging_strategy="best_only",
        copies_one=True,
        periods=(1, 2, 3),
        sub_populations=ranks,
    )
    decision = decide(metrics, rules, numbers=once(number))
    if decision is None:
        return
    assert quantile > 0 and len(decision.parents) == len(decision.replacers)
    assert set(decision.parents) == set(decision.donors) and not set(decision.donors) & set(decision.replacers)
    assert all(math.isfinite(metrics[rank]) for rank in decision.donors)
    for rank in decision.replacers:
        assert number % (rank // 4 + 1) == 0, "the sub-population of the rank must evolve"
    for rank, parent in zip(decision.replacers, decision.parents, strict=True):
        is_better = math.isfinite(metrics[rank]) and metrics[rank] >= metrics[parent]
        assert rank // 4 == parent // 4 or not is_better


def test_one_sub_population_is_population_based_training() -> None:
    metrics = {rank: float(rank) for rank in range(8)}
    assert parents_of(metrics, [tuple(range(8))], [1], once(1), quantile=0.25, metric_mode="max") == {1: 7, 0: 6}
    assert parents_of(metrics, [tuple(range(8))], [2], once(1), quantile=0.25, metric_mode="max") == {}


def test_a_plan_with_a_parent_that_gives_nothing_is_refused() -> None:
    plan = Plan((1, 2, 5, 7), (2, 7), (9, 9, 9, 9), 5, parents=(5, 1))
    assert unpack_plan(plan.packed()) == plan
    with pytest.raises(ValueError, match="must be a donor"):
        unpack_plan(plan._replace(parents=(5, 2)).packed())


def test_a_period_that_has_passed_between_two_decisions_counts() -> None:
    metrics = {rank: float(rank) for rank in range(4)}
    for numbers, evolves in ((range(4, 6), False), (range(5, 9), True), (range(7, 12), False), (range(6, 30), True)):
        found = parents_of(metrics, [tuple(range(4))], [6], numbers, quantile=0.25, metric_mode="max")
        assert bool(found) == evolves, numbers


def test_the_number_of_a_round_continues_under_a_new_coordinator() -> None:
    """Round 6, in which ranks 4 to 7 evolve, is the third after a resume."""
    divided = (tuple(range(4)), tuple(range(4, 8)))
    settings: Any = {"averaging_strategy": "best_only", "copies_one": True, "replacement_ratio": 0.25, "quorum": 1.0}
    rules = SelectiveRules(**settings, periods=(7, 6), sub_populations=divided, round_iterations=5)
    coordinator = RoundCoordinator(range(8), rules)
    for number in (4, 5, 6):
        assert coordinator.statistics().rounds_decided == 0
        for rank in range(8):
            coordinator.on_report(rank, 5 * number - 1, float(rank), 0.1, 1.0 * number)
    assert coordinator.statistics().rounds_decided == 1
