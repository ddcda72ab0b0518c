"""Tests the rules by which selective DiLoCo chooses donors and weights, partly against a second definition."""

from __future__ import annotations

import math
import random
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st
from support.facts import naming

from asyncdist.protocols.exchange.ledger import Report
from asyncdist.protocols.selective_diloco.donors import AnchorScores, DonorRules, choose_donors, donor_limit, gain_of

NAN, INF = math.nan, math.inf


def report(gain: float, norm: float = 1.0, weight: float = 1.0, anchor: float = 0.0) -> Report:
    return Report(weight, norm, (anchor, anchor + gain))


def weights(reports: list[Report], **options: Any) -> dict[int, float]:
    return choose_donors(dict(enumerate(reports)), DonorRules(**options)).weights


# -- donors -----------------------------------------------------------------------------------------------------------


def test_equal_gains_give_the_reported_weights_exactly() -> None:
    reports = [report(0.1, weight=weight) for weight in (1.0, 3.0, 0.7)]
    for strategy in ("weighted_mean", "mean"):
        assert weights(reports, averaging_strategy=strategy) == {0: 1.0, 1: 3.0, 2: 0.7}


@pytest.mark.parametrize("bad", [0.0, -1e-9, -5.0, NAN, INF, -INF])
def test_a_rank_without_a_gain_is_left_out(bad: float) -> None:
    assert weights([report(1.0), report(bad), report(1.0)]) == {0: 1.0, 2: 1.0}
    assert weights([report(bad)] * 3) == {}


@pytest.mark.parametrize("norm", [NAN, INF])
def test_a_difference_that_is_not_finite_is_left_out(norm: float) -> None:
    assert weights([report(1.0), report(9.0, norm)]) == {0: 1.0}


@pytest.mark.parametrize("scores", [(), (1.0,), (1.0, 2.0, 3.0), (NAN, 1.0), (0.0, NAN), (INF, INF), (-1e308, 1e308)])
def test_a_gain_that_cannot_be_computed_is_not_a_gain(scores: tuple[float, ...]) -> None:
    assert math.isnan(gain_of(Report(1.0, 1.0, scores)))
    assert weights([report(1.0), Report(1.0, 1.0, scores)]) == {0: 1.0}


def test_weights_are_proportional_to_gains() -> None:
    assert weights([report(2.0), report(1.0, weight=3.0), report(0.5)]) == {0: 1.0, 1: 1.5, 2: 0.25}
    assert weights([report(2.0), report(1.0), report(0.5)], averaging_strategy="mean") == dict.fromkeys(range(3), 1.0)
    assert weights([report(1.0), report(2.0), report(0.5)], averaging_strategy="best_only") == {1: 1.0}


def test_a_huge_gain_counts_as_a_multiple_of_the_median() -> None:
    reports = [report(1.0), report(1.0), report(1e30), report(1.5)]
    assert weights(reports, outlier_factor=2.0) == {0: 0.5, 1: 0.5, 2: 1.0, 3: 0.75}
    assert weights([report(1.0), report(1e30)], outlier_factor=4.0) == {0: 0.25, 1: 1.0}, (
        "an outlier must be found even among two reports"
    )
    assert weights(reports, outlier_factor=INF)[0] == pytest.approx(1e-30)


def test_a_difference_far_above_the_median_norm_is_left_out() -> None:
    reports = [report(1.0, norm) for norm in (1.0, 1.2, 0.9, 3.1)]
    assert set(weights(reports)) == {0, 1, 2, 3}
    assert set(weights(reports, outlier_factor=2.0)) == {0, 1, 2}
    assert set(weights(reports, outlier_factor=INF)) == {0, 1, 2, 3}


def test_the_median_norm_is_that_of_all_ranks_not_of_the_donors() -> None:
    """Late in a training, few ranks gain. The other ranks' norms still show which difference is too large."""
    reports = [report(-1.0), report(-1.0), report(-1.0), report(5.0, 100.0)]
    assert weights(reports) == {}
    assert weights([report(-1.0, 0.0), report(-1.0, 0.0), report(1.0, 2.0)]) == {2: 1.0}, (
        "ranks without a change must have no weight"
    )


@pytest.mark.parametrize(
    ("ratio", "counts"), [(1.0, [1, 2, 3, 4, 5]), (0.5, [1, 1, 1, 2, 2]), (0.29, [1] * 5), (0.01, [1] * 5)]
)
def test_at_most_a_share_of_the_ranks_are_donors(ratio: float, counts: list[int]) -> None:
    rules = DonorRules(donor_ratio=ratio)
    assert [donor_limit(count, rules) for count in range(1, 6)] == counts
    assert donor_limit(100, DonorRules(donor_ratio=0.29)) == 29
    for count, allowed in enumerate(counts, start=1):
        reports = [report(1.0 + rank) for rank in range(count)]
        assert set(weights(reports, donor_ratio=ratio)) == set(range(count - allowed, count))


def test_each_rank_that_is_left_out_has_a_reason() -> None:
    reports = [report(1.0), report(2.0), report(-0.5), report(1.0, NAN), report(NAN), report(3.0, 50.0)]
    found = choose_donors(dict(enumerate(reports)), DonorRules(donor_ratio=0.2))
    assert found.weights == {1: 1.0} and found.left_out.keys() == {0, 2, 3, 4, 5}
    for rank, fact in ((0, "larger gain than 1"), (2, "-0.5"), (3, "difference is not finite"), (5, "50")):
        assert fact in found.left_out[rank]


# -- a second definition ----------------------------------------------------------------------------------------------


def by_numpy(reports: list[Report], strategy: str, ratio: float, factor: float) -> dict[int, float]:
    """Return the weights as numpy computes them from arrays over all ranks."""
    scores = np.array([each.scores for each in reports])
    norms, own = np.array([each.norm for each in reports]), np.array([each.weight for each in reports])
    gains = scores[:, 1] - scores[:, 0]
    moved = norms[np.isfinite(norms) & (norms > 0)]
    limit = factor * np.median(moved) if len(moved) else np.inf
    are_good = np.isfinite(norms) & np.isfinite(gains) & (gains > 0) & (norms <= limit)
    keys = np.where(are_good, gains, -np.inf)
    count = 1 if strategy == "best_only" else max(1, math.floor(round(ratio * len(reports), 9)))
    order = sorted(range(len(reports)), key=lambda rank: (keys[rank], rank))[-count:]
    chosen = np.array([rank for rank in sorted(order) if are_good[rank]], dtype=int)
    if not len(chosen):
        return {}
    shares = np.ones(len(chosen))
    if strategy == "weighted_mean":
        low = np.sort(gains[chosen])[(len(chosen) - 1) // 2]
        bounded = np.minimum(gains[chosen], factor * low)
        shares = bounded / bounded.max()
    return {int(rank): float(own[rank] * share) for rank, share in zip(chosen, shares, strict=True)}


def drawn(chance: random.Random) -> list[Report]:
    found = []
    for _ in range(chance.randint(1, 8)):
        anchor = chance.choice([0.0, chance.uniform(-5, 5)])
        moved = chance.choice([anchor + chance.choice([0.25, 0.5, -0.25]), chance.uniform(-6, 6), 1e9, NAN, INF, -INF])
        norm = chance.choice([1.0, chance.uniform(0.0, 5.0), 1e6, NAN, INF, 0.0])
        found.append(Report(chance.choice([1.0, chance.uniform(0.1, 9.0)]), norm, (anchor, moved)))
    return found


@pytest.mark.parametrize("strategy", ["weighted_mean", "mean", "best_only"])
def test_the_rules_equal_a_second_definition(strategy: str) -> None:
    chance, counts = random.Random(7), set()
    for number in range(3000):
        reports, ratio, factor = drawn(chance), chance.choice([1.0, 0.5, 0.25]), chance.choice([1.0, 3.0, INF])
        found = weights(reports, averaging_strategy=strategy, donor_ratio=ratio, outlier_factor=factor)
        with np.errstate(invalid="ignore"):
            right = by_numpy(reports, strategy, ratio, factor)
        assert found == right, f"number {number}: {reports}"
        counts.add(len(found))
    assert counts == {0, 1} if strategy == "best_only" else counts >= {0, 1, 2, 3, 4, 5}


# -- laws -------------------------------------------------------------------------------------------------------------

numbers = st.floats(allow_nan=True, allow_infinity=True)
reports_of_all = st.lists(
    st.builds(Report, st.floats(1e-3, 1e6), numbers, st.one_of(st.tuples(numbers, numbers), st.just(()))), max_size=7
)


@settings(max_examples=300, deadline=None)
@given(reports_of_all, st.sampled_from(["weighted_mean", "mean", "best_only"]), st.sampled_from([1.0, 3.0, INF]))
def test_whatever_ranks_report_the_choice_is_sound(reports: list[Report], strategy: Any, factor: float) -> None:
    rules = DonorRules(averaging_strategy=strategy, outlier_factor=factor)
    found = choose_donors(dict(enumerate(reports)), rules)
    assert found.weights.keys() | found.left_out.keys() == set(range(len(reports)))
    assert not found.weights.keys() & found.left_out.keys()
    for rank, weight in found.weights.items():
        assert 0 < weight <= reports[rank].weight and math.isfinite(reports[rank].norm)
        if any(each.scores for each in reports):  # otherwise, the fragment consists of buffers
            assert reports[rank].scores[1] > reports[rank].scores[0]


@settings(max_examples=200, deadline=None)
@given(st.lists(st.floats(0.01, 2.0), min_size=3, max_size=7), numbers, st.floats(0.0, 1e300), st.randoms())
def test_one_rank_that_lies_has_a_bounded_share(gains: list[float], lie: float, norm: float, chance: Any) -> None:
    """Its weight times its norm is at most the factor squared times that of the smallest median donor."""
    honest = [report(gain, chance.uniform(0.5, 1.0)) for gain in gains]
    reports = dict(enumerate([*honest, Report(1.0, norm, (0.0, lie))]))
    found = choose_donors(reports, DonorRules(outlier_factor=3.0)).weights
    lying = found.get(len(gains), 0.0) * norm
    sizes = sorted(found[rank] for rank in range(len(gains)))
    assert lying <= 3.0 * sizes[len(sizes) // 2] * 3.0 * 1.0 * (1 + 1e-9)
    assert all(rank in found for rank in range(len(gains)))


# -- options and warnings ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "facts"),
    [
        ({"averaging_strategy": "best"}, ("averaging_strategy", "weighted_mean", "best_only")),
        ({"averaging_strategy": "reset_weights"}, ("averaging_strategy", "weighted_mean")),
        ({"donor_ratio": 0}, ("donor_ratio", "> 0 and <= 1")),
        ({"donor_ratio": 1.5}, ("donor_ratio", "> 0 and <= 1")),
        ({"donor_ratio": NAN}, ("donor_ratio", "> 0 and <= 1")),
        ({"outlier_factor": 0.5}, ("outlier_factor", ">= 1")),
        ({"outlier_factor": NAN}, ("outlier_factor", ">= 1")),
    ],
)
def test_an_option_out_of_range_is_refused(options: dict[str, Any], facts: tuple[str, ...]) -> None:
    with pytest.raises(ValueError, match=naming(*facts)):
        DonorRules(**options)


def test_different_scores_of_one_anchor_are_found_once() -> None:
    scores = AnchorScores()
    unequal = [report(0.1, anchor=-1.0), report(0.1, anchor=-1.5), report(NAN, anchor=-1.2)]
    equal = [report(0.1, anchor=-1.0), report(0.2, anchor=-1.0 + 1e-6), report(0.2, anchor=NAN), Report(1.0, 1.0)]
    assert [scores.add(each) for each in (unequal, unequal, equal, unequal, unequal)] == [None] * 5
    assert scores.add(unequal) == (-1.5, -1.0)
    assert scores.add(unequal) is None
    assert AnchorScores().add([]) is None
