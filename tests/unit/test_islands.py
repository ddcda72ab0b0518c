"""Tests the island policy's decisions: the division of ranks, the choice of emigrants, and their acceptance."""

import itertools
import math
import random
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings, strategies as st
from support.selective import OpenedCoordinator, rules

from protocols.joining.messages import Declined
from protocols.joining.scopes import PolicyScopes
from protocols.selective.islands.layout import Island, IslandOptions, by_host
from protocols.selective.islands.migrants import GUEST_COUNT_MAX
from protocols.selective.islands.migration import Migration
from protocols.selective.messages import Assign, End, Frozen, Joined
from protocols.selective.roster import Send
from protocols.selective.rounds import RoundCoordinator
from protocols.selective.selection import decide, reducers_of

LAWS = settings(deadline=None, derandomize=True, max_examples=60)


# -- the layout -------------------------------------------------------------------------------------------------------


@LAWS
@given(size=st.integers(2, 9), count=st.integers(1, 9), by_count=st.booleans(), first=st.integers(0, 5))
def test_every_rank_is_in_one_island_and_all_agree_which(size: int, count: int, by_count: bool, first: int) -> None:
    population = [first + 2 * place for place in range(size * count)]
    options = IslandOptions(islands=count) if by_count else IslandOptions(island_size=size)
    islands = [options.island_of(rank, population) for rank in population]
    assert all(island is not None and island.count == count for island in islands)
    for rank, island in zip(population, islands, strict=True):
        assert island is not None and rank in island.ranks and len(island.ranks) == size
        assert island.index_of(rank) == island.index and island.ranks_of(island.index) == island.ranks
        others = [other for other in population if island.is_in_other_island(other)]
        assert others == [other for other in population if other not in island.ranks]
        assert not island.is_in_other_island(first + 1)
    assert sorted(rank for index in range(count) for rank in islands[0].ranks_of(index)) == population  # type: ignore[union-attr]


@LAWS
@given(
    hosts=st.lists(st.integers(0, 4), min_size=4, max_size=24).filter(lambda found: len(found) % 4 == 0),
    seed=st.integers(0, 9),
)
def test_the_ranks_of_a_host_are_together(hosts: list[int], seed: int) -> None:
    population = random.Random(seed).sample(range(len(hosts)), len(hosts))
    ordered = by_host(population, hosts)
    assert sorted(ordered) == sorted(population)
    names = [name for name, _ in itertools.groupby(hosts[rank] for rank in ordered)]
    assert len(names) == len(set(names)), "the ranks of a host must be adjacent"
    assert names == list(dict.fromkeys(hosts[rank] for rank in population))
    for name in names:
        of_host = [rank for rank in ordered if hosts[rank] == name]
        assert of_host == [rank for rank in population if hosts[rank] == name]
    islands = [IslandOptions(island_size=2).island_of(rank, population, hosts) for rank in population]
    assert len({island.ranks for island in islands if island is not None}) == len(hosts) // 2
    assert all(island is not None and rank in island.ranks for rank, island in zip(population, islands, strict=True))


@pytest.mark.parametrize(
    ("hosts", "ordered"),
    [
        (None, range(6)),
        ((0, 0, 0, 3, 3, 3), range(6)),
        ((0, 1, 0, 1, 0, 1), (0, 2, 4, 1, 3, 5)),
        ((0, 1, 1, 0, 4, 0), (0, 3, 5, 1, 2, 4)),
    ],
)
def test_block_wise_ranks_stay_a_range(hosts: tuple[int, ...] | None, ordered: Sequence[int]) -> None:
    found = by_host(range(6), hosts)
    assert found == ordered and type(found) is type(ordered)


@pytest.mark.parametrize(
    ("options", "count", "words"),
    [
        (
            {"islands": 3},
            8,
            "islands must be one of 1, 2, 4 to divide 8 ranks into equal islands of 2 or more ranks, got 3",
        ),
        ({"islands": 8}, 8, "islands must be one of 1, 2, 4 to divide 8 ranks"),
        ({"islands": 9}, 8, "islands must be one of 1, 2, 4 to divide 8 ranks"),
        ({"island_size": 3}, 8, "island_size must be one of 2, 4, 8 to divide 8 ranks"),
        ({"island_size": 16}, 8, "island_size must be one of 2, 4, 8 to divide 8 ranks"),
        ({"islands": 2}, 7, "islands must be one of 1 to"),
    ],
)
def test_ranks_that_cannot_be_divided_are_refused_by_name(options: dict[str, int], count: int, words: str) -> None:
    with pytest.raises(ValueError) as caught:
        IslandOptions(**options).island_of(0, range(count))
    assert str(caught.value).startswith(words)


def test_without_islands_and_alone_there_is_no_island() -> None:
    assert IslandOptions().island_of(0, range(8)) is None
    assert IslandOptions(islands=4).island_of(0, range(1)) is None


# -- the decision -----------------------------------------------------------------------------------------------------


def test_guest_gives_if_it_is_better_than_all_replaced_ranks() -> None:
    metrics = {0: 1.0, 1: 2.0, 2: 3.0, 3: 4.0}
    found = decide(metrics, rules(replacement_ratio=0.5), {9: 2.5})
    assert found is not None
    assert (found.donors, found.replacers, found.best, found.guests) == ((2, 3, 9), (0, 1), 3, (9,))
    for worse in (2.0 - 1e-9, math.nan, math.inf):
        without = decide(metrics, rules(replacement_ratio=0.5), {9: worse})
        assert without == decide(metrics, rules(replacement_ratio=0.5))


def test_best_guest_gives_alone_as_the_best_and_weighs_its_gain() -> None:
    metrics = {0: 1.0, 1: 2.0, 2: 3.0}
    found = decide(metrics, rules(averaging_strategy="best_only"), {9: 5.0})
    assert found is not None and (found.donors, found.guests, found.best) == ((9,), (9,), 9)
    found = decide(metrics, rules(averaging_strategy="weighted_mean"), {9: 5.0, 8: 0.5})
    assert found is not None and (found.donors, found.weights) == ((1, 2, 9), (1.0, 2.0, 4.0))


@LAWS
@given(
    values=st.lists(st.floats(-9, 9) | st.sampled_from([math.nan, math.inf]), min_size=1, max_size=8),
    guests=st.lists(st.floats(-9, 9) | st.just(math.nan), max_size=3),
    strategy=st.sampled_from(["mean", "weighted_mean", "best_only"]),
    mode=st.sampled_from(["max", "min"]),
    ratio=st.sampled_from([0.0, 0.25, 0.5, 1.0]),
)
def test_guests_change_nothing_but_the_donors(
    values: list[float], guests: list[float], strategy: str, mode: str, ratio: float
) -> None:
    settings = rules(averaging_strategy=strategy, metric_mode=mode, replacement_ratio=ratio)
    metrics, from_elsewhere = dict(enumerate(values)), {100 + place: value for place, value in enumerate(guests)}
    found, alone = decide(metrics, settings, from_elsewhere), decide(metrics, settings)
    if found is None:
        assert alone is None
        return
    assert set(found.guests) == set(found.donors) & from_elsewhere.keys()
    assert all(math.isfinite(from_elsewhere[rank]) for rank in found.guests)
    if alone is not None:
        assert found.replacers == alone.replacers
        assert set(found.donors) - set(found.guests) <= set(alone.donors) or strategy == "weighted_mean"
    for route in ("direct", "sharded"):
        assert not set(reducers_of(found, route, 1 << 30)) & set(found.guests)


# -- the coordinator --------------------------------------------------------------------------------------------------


def joined(value: float = 9.0, *, step_s: float = 0.5, incarnation: int = 0, last_round: int = 0) -> Joined:
    return Joined(last_round, -1, -1, 70, value, step_s, 1.0, incarnation)


def coordinator_with(guests: dict[int, Joined], **options: Any) -> tuple[RoundCoordinator, list[Send]]:
    coordinator = OpenedCoordinator(range(4), rules(**{"migrate_every": 1, **options}))
    for rank, each in guests.items():
        coordinator.migrants.invite(rank, 0)
        assert coordinator.on_joined(rank, each, 0.0) == ()
    sends: list[Send] = []
    for rank in range(4):
        sends += coordinator.on_report(rank, 9, float(rank), 0.5, 0.0)
    return coordinator, sends


def test_a_guest_is_a_donor_of_one_round_and_then_forgotten() -> None:
    coordinator, sends = coordinator_with({70: joined()})
    donors = (1, 2, 3, 70)
    assert [send.dest for send in sends] == [0, 1, 2, 3, 70]
    assert sends[-1].message == Assign("donor", donors, (0,), 70, 70)
    for rank in donors:
        sends = list(coordinator.on_ready(rank, 1, 9, 1.0))
    (send,) = sends
    assert isinstance(send.message, Frozen) and send.message.donors == donors and send.message.best == 70
    ends = coordinator.on_applied(0, 1, 20, 2.0)
    assert [(send.dest, type(send.message)) for send in ends] == [(rank, End) for rank in range(4)] + [(70, End)]
    statistics = coordinator.statistics()
    assert statistics.guests == ((1, 70),) and 70 not in statistics.reports
    assert coordinator.on_ready(70, 1, 9, 3.0) == ()
    ((reason, count),) = coordinator.statistics().ignored.items()
    assert reason.startswith("Ready") and count == 1
    sends = [send for rank in range(4) for send in coordinator.on_report(rank, 30, float(rank), 0.5, 3.0)]
    assert {send.dest for send in sends} == set(range(4))


def test_a_guest_has_no_role_in_two_rounds_of_one_number() -> None:
    """Regression: only the guest remembered the last round of a lost coordinator, whose successor reused the number."""
    _, sends = coordinator_with({70: joined(last_round=33)})
    assert {send.round for send in sends} == {34}


def test_the_best_emigrates_every_so_many_decisions() -> None:
    coordinator, _ = coordinator_with({}, migrate_every=2, replacement_ratio=0.0)
    assert coordinator.migrants.take_emigrant() is None
    for rank in range(4):
        coordinator.on_report(rank, 19, -float(rank), 0.5, 1.0)
    assert coordinator.migrants.take_emigrant() == (0, 0)
    assert coordinator.migrants.take_emigrant() is None
    assert coordinator.statistics().emigrant_count == 1


def test_round_waits_no_longer_for_a_guest_than_for_its_donors() -> None:
    alone, _ = coordinator_with({})
    slow, sends = coordinator_with({70: joined(step_s=1.05)})
    assert 70 in [send.dest for send in sends], "the round must wait for a guest half as fast as its hosts"
    assert slow.next_deadline() == alone.next_deadline()
    for rank in (1, 2, 3):
        slow.on_ready(rank, 1, 9, 1.0)
    deadline = slow.next_deadline()
    assert deadline is not None
    (frozen,) = [send.message for send in slow.on_time(deadline) if isinstance(send.message, Frozen)]
    assert frozen.donors == (1, 2, 3)
    _, sends = coordinator_with({70: joined(step_s=20.0)})
    assert 70 not in [send.dest for send in sends], "the round must not wait for a guest much slower than its hosts"


def test_guest_giving_alone_is_awaited_as_the_slowest_replacer() -> None:
    coordinator, sends = coordinator_with({70: joined(step_s=1.05)}, averaging_strategy="best_only")
    assert [send.dest for send in sends] == [0, 70]
    assert coordinator.next_deadline() == 0.5 + 8.0 / 4


@pytest.mark.parametrize("how", ["lost", "left", "declined"])
def test_a_guest_that_is_gone_costs_a_round_no_more_than_a_donor(how: str) -> None:
    coordinator, _ = coordinator_with({70: joined()})
    for rank in (1, 2, 3):
        coordinator.on_ready(rank, 1, 9, 1.0)
    if how == "lost":
        sends = coordinator.on_lost(70, 1.0)
    elif how == "left":
        sends = coordinator.on_leave(70, 1.0)
    else:
        sends = coordinator.on_decline(70, 1, "weights are not finite", 1.0)
    (frozen,) = [send.message for send in sends if isinstance(send.message, Frozen)]
    assert frozen.donors == (1, 2, 3)
    assert [left.rank for left in coordinator.statistics().left_out] == [70]
    assert coordinator.on_applied(0, 1, 20, 2.0)
    assert not coordinator.finished


def test_lost_guest_is_forgotten_and_an_old_one_is_not_asked() -> None:
    coordinator = OpenedCoordinator(range(2), rules(migrate_every=1, max_report_age_s=5.0))
    for rank, at in ((70, 0.0), (71, -6.0), (72, 0.0), (73, 0.0)):
        coordinator.migrants.invite(rank, 0)
        if rank < 72:
            coordinator.on_joined(rank, joined(), at)
    assert coordinator.on_lost(70, 0.0) == coordinator.on_lost(72, 0.0) == ()
    # the first is lost, the second is another process, the third was not invited
    for rank, incarnation in ((72, 0), (73, 1), (74, 0)):
        coordinator.on_joined(rank, joined(incarnation=incarnation), 0.0)
    ((reason, count),) = coordinator.statistics().ignored.items()
    assert reason.startswith("Joined") and count == 3
    sends = [send for rank in range(2) for send in coordinator.on_report(rank, 9, float(rank), 0.5, 0.0)]
    assert {send.dest for send in sends} == {0, 1}


def test_few_guests_wait_and_the_newest_ones() -> None:
    coordinator, sends = coordinator_with({rank: joined(float(rank)) for rank in range(70, 70 + 2 * GUEST_COUNT_MAX)})
    asked = [send.dest for send in sends if send.dest >= 70]
    assert asked == list(range(70 + GUEST_COUNT_MAX, 70 + 2 * GUEST_COUNT_MAX))
    assert coordinator.migrants.end_messages() == [Send(rank, 1, End("the coordinator is replaced")) for rank in asked]


def test_a_world_in_one_island_has_a_ring_of_one() -> None:
    island = IslandOptions(islands=1).island_of(3, range(4))
    assert island == Island(0, 4, range(4)) and not any(map(island.is_in_other_island, range(-1, 6)))


def test_a_rank_that_has_left_gets_messages_after_its_restart() -> None:
    """Regression: the rank got no announcement of an emigrant until the end of the job."""
    sent: list[int] = []
    services: Any = SimpleNamespace(
        rank=0,
        gone=set(),
        restarted={},
        shared=lambda _: SimpleNamespace(send=lambda _, dest: sent.append(dest)),
    )
    options = IslandOptions(islands=2)
    island = options.island_of(0, range(4))
    assert island is not None
    nothing: Any = None
    world: Any = SimpleNamespace(services=services)
    migration = Migration(world, island, options, PolicyScopes(1, 2), nothing, nothing)
    for rank, restarts in ((2, 0), (None, 1), (2, 1), (None, 2)):
        if rank is not None:
            migration.on_message(Declined(0), rank, is_serving=True)
        services.restarted[2] = restarts
        migration.emigrate(0, 0)
    assert sent == [3, 2, 3, 3, 2]  # the declined announcement is sent to rank 3 instead
