"""Tests which ranks are replaced, by which donors and weights: exact tables, invariants and regressions."""

import math
import re
import typing
from collections import Counter
from dataclasses import FrozenInstanceError, fields, is_dataclass
from typing import Any

import pytest
from hypothesis import given, settings, strategies as st
from support.selective import STRATEGIES, rules

from protocols.ranking import order_worst_first, replacer_count
from protocols.selective import messages
from protocols.selective.messages import Applied
from protocols.selective.rounds import RoundCoordinator
from protocols.selective.selection import (
    SHARED_NBYTES_MIN,
    Decision,
    SelectiveRules,
    averaging_weights,
    decide,
    reducers_of,
    sources_of,
)

LAWS = settings(deadline=None, derandomize=True, max_examples=200)
NAN, INF = math.nan, math.inf

values = st.floats(allow_nan=True, allow_infinity=True)
all_metrics = st.lists(values, max_size=9).map(lambda listed: dict(enumerate(listed)))
all_rules = st.builds(
    SelectiveRules,
    replacement_ratio=st.floats(0.0, 1.0),
    averaging_strategy=st.sampled_from(STRATEGIES),
    metric_mode=st.sampled_from(("max", "min")),
)


# ------------------------------------------------------------------------------------------------ messages


@pytest.mark.parametrize("kind", [messages.Report, *typing.get_args(messages.ControlMessage)])
def test_messages_are_frozen_flat_and_packable(kind: type) -> None:
    assert is_dataclass(kind)
    allowed = {int, float, str, bool, bytes, tuple[int, ...], tuple[float, ...], tuple[tuple[int, int], ...]}
    hints = typing.get_type_hints(kind)
    assert set(hints) == {part.name for part in fields(kind)}
    assert set(hints.values()) <= allowed
    assert hasattr(kind, "__slots__")
    assert "round" not in hints, "the round is in the header, and must not be in the message"
    with pytest.raises((FrozenInstanceError, TypeError)):
        Applied(3).iteration = 4  # type: ignore[misc]


# ------------------------------------------------------------------------------------------------ rules


@pytest.mark.parametrize(
    ("option", "bad"),
    [
        *(
            (name, bad)
            for name in ("replacement_ratio", "quorum")
            for bad in (-0.1, 1.1, NAN, INF, True, "0.5", None, 1j)
        ),
        *(("grace_s", bad) for bad in (-1, NAN, INF, False, "1")),
        *(("round_timeout_s", bad) for bad in (0, -1, NAN, INF, True, "1", None)),
        *(("max_report_age_s", bad) for bad in (0, -1, NAN, True, "1", None)),
        *(("threshold", bad) for bad in (NAN, INF, -INF, True, "1")),
        *(("cooldown", bad) for bad in (-1, 1.5, NAN, True, "1", None)),
        *(("averaging_strategy", bad) for bad in ("median", "", None, 1)),
        *(("metric_mode", bad) for bad in ("maximum", None, True)),
        *(("route", bad) for bad in ("sharded ", "tree", "", None, 1)),
    ],
)
def test_rules_refuse_and_name_option_value_and_range(option: str, bad: object) -> None:
    with pytest.raises(ValueError, match="must be") as caught:
        SelectiveRules(**{option: bad})  # type: ignore[arg-type]
    assert re.fullmatch(rf"{option} must be .+, got {re.escape(repr(bad))}", str(caught.value))


def test_rules_accept_their_edges_as_plain_floats() -> None:
    edge = SelectiveRules(replacement_ratio=1, quorum=0, grace_s=0, max_report_age_s=INF, threshold=-3, cooldown=0)
    assert type(edge.replacement_ratio) is float
    assert type(edge.threshold) is float


# ------------------------------------------------------------------------------------------------ decide


@pytest.mark.parametrize(
    ("count", "ratio", "expected"),
    [
        (4, 0.25, 1),
        (4, 0.2, 1),
        (4, 0.01, 1),
        (4, 0.375, 2),
        (4, 0.37, 1),
        (4, 0.99, 3),
        (2, 0.5, 1),
        (3, 0.5, 2),
        (10, 0.45, 5),
        (50, 0.29, 15),
        (1, 0.5, 0),
        (0, 0.5, 0),
        (1, 1.0, 0),
    ],
)
def test_replacer_count_rounds_half_up(count: int, ratio: float, expected: int) -> None:
    assert replacer_count(count, ratio) == expected


def test_defect_11_ratio_0_replaces_nobody() -> None:
    assert replacer_count(8, 0.0) == 0
    assert decide(dict(enumerate([1.0, 2.0, 3.0])), rules(replacement_ratio=0.0)) is None


@pytest.mark.parametrize("strategy", ["mean", "weighted_mean", "best_only"])
def test_defect_11_ratio_1_leaves_a_donor(strategy: str) -> None:
    assert replacer_count(8, 1.0) == 7
    decision = decide(dict(enumerate([1.0, 3.0, 2.0])), rules(replacement_ratio=1.0, averaging_strategy=strategy))
    assert decision is not None
    assert (decision.donors, decision.replacers, decision.best) == ((1,), (0, 2), 1)
    assert sum(decision.weights) > 0


def test_order_is_total_and_puts_what_is_not_finite_first() -> None:
    metrics = {5: 2.0, 0: 1.0, 3: NAN, 1: INF, 4: 1.0, 2: -INF}
    assert order_worst_first(metrics, "max") == (1, 2, 3, 0, 4, 5)
    assert order_worst_first(metrics, "min") == (1, 2, 3, 5, 0, 4)
    assert order_worst_first({5: NAN, 7: INF, 2: -INF}) == (2, 5, 7)


@pytest.mark.parametrize("bad", [NAN, INF, -INF])
@pytest.mark.parametrize("mode", ["max", "min"])
@pytest.mark.parametrize("strategy", ["mean", "weighted_mean", "best_only"])
def test_defect_13_nan_is_never_taken_as_best(bad: float, mode: str, strategy: str) -> None:
    decision = decide({0: 1.0, 1: bad, 2: 2.0}, rules(metric_mode=mode, averaging_strategy=strategy))
    assert decision is not None
    assert decision.replacers == (1,)
    assert decision.best == (2 if mode == "max" else 0)
    assert all(map(math.isfinite, decision.weights))


def test_more_diverged_ranks_than_replacers_have_no_role() -> None:
    decision = decide({0: NAN, 1: INF, 2: 5.0, 3: 4.0}, rules())
    assert decision == Decision(donors=(2, 3), replacers=(0,), weights=(1.0, 1.0), best=2)


def test_nobody_to_give_or_to_take_is_no_action() -> None:
    assert decide({}, rules()) is None
    assert decide({0: 1.0}, rules()) is None
    assert decide({0: NAN, 1: INF}, rules()) is None
    assert decide({0: NAN}, rules(averaging_strategy="reset_weights")) is None


def test_reset_needs_no_donor() -> None:
    reset = rules(averaging_strategy="reset_weights")
    assert decide({0: 2.0, 1: 1.0}, reset) == Decision((), (1,), (), -1)
    assert decide({0: NAN, 1: NAN}, reset) == Decision((), (0,), (), -1)


def test_mean_of_ranks_1_2_3_weighs_them_exactly_evenly() -> None:
    assert decide(dict(enumerate([0.0, 1.0, 2.0, 3.0])), rules()) == Decision((1, 2, 3), (0,), (1.0, 1.0, 1.0), 3)


def test_defect_06_weighted_mean_favours_the_best() -> None:
    metrics = {0: 0.0, 1: 1.0, 2: 2.0, 3: 4.0}
    for mode, listed in (("max", metrics), ("min", {rank: -value for rank, value in metrics.items()})):
        decision = decide(listed, rules(averaging_strategy="weighted_mean", metric_mode=mode))
        assert decision == Decision(donors=(1, 2, 3), replacers=(0,), weights=(1.0, 2.0, 4.0), best=3)


def test_weighted_mean_is_uniform_when_nobody_gains() -> None:
    decision = decide(dict.fromkeys(range(4), 7.0), rules(averaging_strategy="weighted_mean"))
    assert decision == Decision((1, 2, 3), (0,), (1.0, 1.0, 1.0), 3)


def test_weighted_mean_measures_from_worst_finite_participant() -> None:
    decision = decide({0: NAN, 1: 1.0, 2: 2.0, 3: 4.0}, rules(averaging_strategy="weighted_mean"))
    assert decision == Decision(donors=(2, 3), replacers=(0,), weights=(1.0, 3.0), best=3), (
        "rank 1 would have weight 0, so it must not be a donor"
    )


def test_weighted_mean_survives_metrics_of_any_size() -> None:
    weighted = rules(averaging_strategy="weighted_mean")
    for worst, middle, best in ((-1.7e308, 0.0, 1.7e308), (0.0, 5e-324, 1e-323), (0.0, 1e40, 2e40)):
        decision = decide({0: worst, 1: middle, 2: best}, weighted)
        assert decision is not None
        assert decision.donors == (1, 2)
        assert decision.weights[1] == 2 * decision.weights[0]
        assert 0.25 <= decision.weights[1] <= 1.0


def test_best_only_has_one_donor() -> None:
    decision = decide({0: 1.0, 1: 9.0, 2: 3.0, 3: 9.0}, rules(averaging_strategy="best_only", replacement_ratio=0.5))
    assert decision == Decision(donors=(3,), replacers=(0, 2), weights=(1.0,), best=3)


def test_threshold_must_be_crossed_by_the_worst() -> None:
    metrics = {0: 1.0, 1: 2.0}
    assert decide(metrics, rules(threshold=1.0)) is None
    assert decide(metrics, rules(threshold=1.5)) is not None
    assert decide(metrics, rules(threshold=2.0, metric_mode="min")) is None
    assert decide(metrics, rules(threshold=1.5, metric_mode="min")) is not None
    assert decide({0: NAN, 1: 2.0}, rules(threshold=-100.0)) is not None


@pytest.mark.slow
@LAWS
@given(all_metrics, all_rules)
def test_law_decisions_are_sound(metrics: dict[int, float], options: SelectiveRules) -> None:
    decision = decide(metrics, options)
    if decision is None:
        return
    assert len(decision.replacers) == replacer_count(len(metrics), options.replacement_ratio)
    assert 1 <= len(decision.replacers) <= len(metrics) - 1
    assert list(decision.donors) == sorted(set(decision.donors))
    assert list(decision.replacers) == sorted(set(decision.replacers))
    assert not set(decision.donors) & set(decision.replacers)
    assert len(decision.weights) == len(decision.donors)
    if options.averaging_strategy == "reset_weights":
        assert (decision.donors, decision.best) == ((), -1)
        return
    assert all(math.isfinite(metrics[rank]) for rank in decision.donors)
    assert all(0 < weight < INF for weight in decision.weights)
    assert 0 < sum(decision.weights) < INF
    assert decision.best in decision.donors
    assert max(decision.weights) == decision.weights[decision.donors.index(decision.best)]
    finite = [value for value in metrics.values() if math.isfinite(value)]
    assert metrics[decision.best] == (max(finite) if options.metric_mode == "max" else min(finite))


@pytest.mark.slow
@LAWS
@given(st.lists(values, min_size=1, max_size=9, unique=True), st.data(), all_rules)
def test_law_permuting_ranks_permutes_the_decision(listed: list[float], data: Any, options: SelectiveRules) -> None:
    finite = [value for value in listed if math.isfinite(value)]  # non-finite values are tied
    renamed = data.draw(st.permutations(range(len(finite))))
    one = decide(dict(enumerate(finite)), options)
    other = decide({renamed[rank]: value for rank, value in enumerate(finite)}, options)
    if one is None or other is None:
        assert one is other
        return
    assert {renamed[rank] for rank in one.replacers} == set(other.replacers)
    assert {renamed[rank]: weight for rank, weight in zip(one.donors, one.weights, strict=True)} == dict(
        zip(other.donors, other.weights, strict=True)
    )
    assert other.best == (renamed[one.best] if one.best >= 0 else -1)


@pytest.mark.slow
@LAWS
@given(all_metrics, all_rules)
def test_law_min_mirrors_max(metrics: dict[int, float], options: SelectiveRules) -> None:
    mirrored = SelectiveRules(
        replacement_ratio=options.replacement_ratio,
        averaging_strategy=options.averaging_strategy,
        metric_mode="min" if options.metric_mode == "max" else "max",
    )
    assert decide(metrics, options) == decide({rank: -value for rank, value in metrics.items()}, mirrored)


@pytest.mark.slow
@LAWS
@given(st.dictionaries(st.integers(0, 50), st.floats(-1e6, 1e6), min_size=1), st.sampled_from(STRATEGIES))
def test_law_weights_sum_to_something(metrics: dict[int, float], strategy: str) -> None:
    weights = averaging_weights(metrics, sorted(metrics), averaging_strategy=strategy)
    assert len(weights) == len(metrics)
    assert min(weights) >= 0
    assert sum(weight / sum(weights) for weight in weights) == pytest.approx(1.0)


# ------------------------------------------------------------------------------------------------ routes

MIB = 1 << 20


def routed(donor_count: int, replacer_count: int, route: str = "sharded", nbytes: int = 64 * MIB) -> tuple[int, ...]:
    donors = tuple(range(donor_count))
    replacers = tuple(range(donor_count, donor_count + replacer_count))
    weights = (1.0,) * donor_count
    return reducers_of(Decision(donors, replacers, weights, donor_count - 1), route, nbytes)


@LAWS
@given(st.integers(1, 200), st.integers(1, 200))
def test_on_the_sharded_route_no_rank_moves_two_models(donor_count: int, replacer_count: int) -> None:
    """Each rank's parts are counted one by one, as they are sent."""
    reducers = routed(donor_count, replacer_count)
    assert bool(reducers) == (donor_count > 1 or replacer_count > 1)
    if not reducers:
        return
    donors, replacers = range(donor_count), range(donor_count, donor_count + replacer_count)
    assert reducers in (tuple(donors), tuple(replacers))
    sent, received = [0] * (donor_count + replacer_count), [0] * (donor_count + replacer_count)
    for reducer in reducers:
        for source, dest in (*((donor, reducer) for donor in donors), *((reducer, rank) for rank in replacers)):
            if source != dest:
                sent[source] += 1
                received[dest] += 1
    assert max(*sent, *received) < 2 * len(reducers)
    assert sum(sent) == (donor_count + replacer_count - 1) * len(reducers)


@pytest.mark.parametrize(
    ("donor_count", "replacer_count", "nbytes", "is_sharded"),
    [
        (3, 1, 1000 * MIB, False),
        (6, 2, 16 * MIB - 1, False),
        (6, 2, 16 * MIB, True),
        (1, 1, 1000 * MIB, False),
        (1, 2, 1000 * MIB, False),
        (1, 35, 2 * MIB, True),
        (96, 32, MIB, True),
        (96, 32, MIB // 2, True),
        (24, 8, MIB, False),
        (24, 8, MIB // 16, True),
        (12, 4, 1, False),
    ],
)
def test_auto_chooses_by_donors_replacers_and_model(
    donor_count: int, replacer_count: int, nbytes: int, is_sharded: bool
) -> None:
    assert bool(routed(donor_count, replacer_count, "auto", nbytes)) == is_sharded
    assert not routed(donor_count, replacer_count, "direct", nbytes)


@pytest.mark.parametrize(("nbytes", "count"), [(1, 1), (MIB, 16), (1000 * MIB, 96)])
def test_auto_rotates_few_reducers_for_a_small_model(nbytes: int, count: int) -> None:
    decision = Decision(tuple(range(96)), tuple(range(96, 128)), (1.0,) * 96, 0)
    rounds = [reducers_of(decision, "auto", nbytes, turn) for turn in range(96)]
    assert {len(reducers) for reducers in rounds} == {count}
    assert all(tuple(sorted(set(reducers))) == reducers for reducers in rounds)
    assert Counter(rank for reducers in rounds for rank in reducers) == dict.fromkeys(range(96), count)


@pytest.mark.parametrize(
    ("listed", "nbytes", "is_sharded"),
    [
        ([7, 7, 9, 9], 65 * MIB, True),  # two models instead of one each way
        ([7, 7, 9, 9], 63 * MIB, False),
        ([7, 7, 7, 7], 1000 * MIB, False),
        ([1, 2, 3, 4], 33 * MIB, True),  # three models instead of one
        ([1, 2, 3, 4], 31 * MIB, False),
    ],
)
def test_auto_looks_at_the_networks_of_hosts(listed: list[int], nbytes: int, is_sharded: bool) -> None:
    decision, hosts = Decision((0, 1, 2), (3,), (1.0,) * 3, 0), dict(enumerate(listed))
    assert bool(reducers_of(decision, "auto", nbytes, 0, hosts)) == is_sharded
    assert reducers_of(decision, "auto", nbytes, 0, {}) == ()


def moved(decision: Decision, reducers: tuple[int, ...], hosts: dict[int, int]) -> tuple[float, float, float]:
    """Return the traffic of all ranks, of the busiest rank and of the busiest host's network, in model sizes."""
    sent, received = Counter[int](), Counter[int]()
    sent_by, received_by = Counter[int](), Counter[int]()
    for reducer in reducers:
        pairs = *((donor, reducer) for donor in decision.donors), *((reducer, rank) for rank in decision.replacers)
        for source, dest in pairs:
            sent[source] += source != dest
            received[dest] += source != dest
            sent_by[hosts[source]] += hosts[source] != hosts[dest]
            received_by[hosts[dest]] += hosts[source] != hosts[dest]
    count = len(reducers)
    busiest = max(*sent.values(), *received.values()) / count
    return sent.total() / count, busiest, max(*sent_by.values(), *received_by.values(), 0) / count


@pytest.mark.parametrize("replacer", range(4))
def test_donors_of_the_larger_host_reduce_to_spare_the_network(replacer: int) -> None:
    """The network carries two models directly, 4/3 if all donors reduce, and one if one host's donors reduce."""
    donors, hosts = tuple(rank for rank in range(4) if rank != replacer), {0: 5, 1: 5, 2: 6, 3: 6}
    decision = Decision(donors, (replacer,), (1.0,) * 3, donors[0])
    reducers = reducers_of(decision, "sharded", MIB, 0, hosts)
    assert reducers == ((2, 3) if replacer < 2 else (0, 1))
    assert moved(decision, reducers, hosts) == (3, 1, 1)
    assert moved(decision, donors, hosts)[2] == pytest.approx(4 / 3)


@LAWS
@given(st.lists(st.integers(1, 4), min_size=3, max_size=24), st.integers(1, 23))
def test_known_hosts_bound_network_load_and_two_models_per_rank(listed: list[int], replacer_count: int) -> None:
    replacer_count = min(replacer_count, len(listed) - 1)
    replacers, donors = tuple(range(replacer_count)), tuple(range(replacer_count, len(listed)))
    decision, hosts = Decision(donors, replacers, (1.0,) * len(donors), donors[-1]), dict(enumerate(listed))
    everywhere = reducers_of(decision, "sharded", 1)  # too small to be shared by ranks of a host
    reducers = reducers_of(decision, "sharded", 1, 0, hosts)
    total, busiest, network = moved(decision, reducers, hosts)
    assert set(reducers) <= set(everywhere) and total == pytest.approx(len(listed) - 1)
    assert busiest <= 2 and network <= moved(decision, everywhere, hosts)[2] + 1e-9


def test_auto_counts_one_fetch_for_all_replacers_of_a_host() -> None:
    """Six replacers on one host fetch the only donor's model: five of its six parts once, and not six times."""
    decision, hosts = Decision((6,), tuple(range(6)), (1.0,), 6), {6: 2, **dict.fromkeys(range(6), 1)}
    assert reducers_of(decision, "auto", 13 * MIB, 0, hosts) == tuple(range(6)), (
        "one model instead of six must pass each link"
    )
    assert reducers_of(decision, "auto", 12 * MIB, 0, hosts) == ()


@LAWS
@given(st.lists(st.integers(1, 4), min_size=2, max_size=24), st.integers(1, 23))
def test_each_part_comes_to_each_host_once(listed: list[int], replacer_count: int) -> None:
    replacer_count = min(replacer_count, len(listed) - 1)
    replacers, donors = tuple(range(replacer_count)), tuple(range(replacer_count, len(listed)))
    decision, hosts = Decision(donors, replacers, (1.0,) * len(donors), donors[-1]), dict(enumerate(listed))
    reducers = reducers_of(decision, "sharded", MIB, 0, hosts)
    found = sources_of(decision, reducers, 1000 * MIB, hosts)
    for place, reducer in enumerate(reducers):
        for host in set(listed):
            here = [rank for rank in replacers if hosts[rank] == host]
            if len(here) < 2 or all(hosts[each] == host for each in reducers):
                assert not found.keys() & set(here)
                continue
            (source,) = {found[rank][place] for rank in here}
            assert source == reducer if hosts[reducer] == host else source in here
    for rank, sources in found.items():
        fetched = sum(source == rank != reducer for source, reducer in zip(sources, reducers, strict=True))
        distant = sum(hosts[reducer] != hosts[rank] for reducer in reducers)
        assert abs(fetched - distant / sum(hosts[each] == hosts[rank] for each in replacers)) < 1


def test_what_is_small_is_not_shared() -> None:
    decision, hosts = Decision((2, 3), (0, 1), (1.0, 1.0), 3), {0: 1, 1: 1, 2: 2, 3: 2}
    assert sources_of(decision, (2, 3), SHARED_NBYTES_MIN, hosts) == {0: (0, 1), 1: (0, 1)}
    assert sources_of(decision, (2, 3), SHARED_NBYTES_MIN - 1, hosts) == {}
    assert sources_of(decision, (2, 3), SHARED_NBYTES_MIN, {}) == {}
    assert sources_of(decision, (), SHARED_NBYTES_MIN, hosts) == {}


def test_hosts_that_some_have_not_told_are_not_known() -> None:
    coordinator = RoundCoordinator(range(3), rules())
    for rank, host in ((0, 5), (1, 6), (2, 0)):
        coordinator.roster.note_host(rank, host)
    assert coordinator.roster.hosts_of((0, 1)) == {0: 5, 1: 6}
    assert coordinator.roster.hosts_of((0, 1, 2)) == {}


def test_fresh_weights_have_no_route() -> None:
    assert reducers_of(Decision((), (0, 1, 2), (), -1), "sharded", MIB) == ()


def test_assignments_with_impossible_reducers_are_refused() -> None:
    for reducers, part in (((1, 0), 0), ((0, 1), 2), ((0, 1), -2), ((), 0)):
        with pytest.raises(ValueError, match="reducers"):
            messages.Assign("donor", (0, 1), (2,), 9, 1, reducers=reducers, part=part)
    with pytest.raises(ValueError, match="reducers"):
        messages.Frozen((0, 1), (1.0, 1.0), (1, 1), 1, 3.0, (1, 0))
