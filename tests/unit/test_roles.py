"""Tests rank layouts without a world: by arithmetic, by host, by hand. With a world: ``helpers.cases_roles``."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
from hypothesis import given, settings, strategies as st
from support.facts import names

import asyncdist as ad
from asyncdist import RankLayout
from asyncdist.simulation import Network


def check_roles(layout: RankLayout) -> None:
    """Check the invariants of a layout by a second implementation."""
    roles = [*layout.training_ranks, *layout.buffer_ranks] + [layout.coordinator] * (layout.coordinator is not None)
    assert sorted(roles) == list(range(layout.world_size))
    assert {len(group) for group in layout.agent_groups} == {layout.agent_group_size}
    assert sorted(itertools.chain(*layout.agent_groups)) == list(layout.training_ranks)
    if layout.clients:
        assert sorted(itertools.chain(*layout.clients.values())) == list(layout.training_ranks)
        assert all(layout.clients.values())
    for rank in range(layout.world_size):
        group, buffer = layout.agent_group_of(rank), layout.buffer_of(rank)
        assert (group is not None) == (rank in layout.training_ranks)
        assert group is None or rank in layout.agent_groups[group]
        assert buffer is None or rank in layout.clients[buffer]


def test_arithmetic() -> None:
    layout = RankLayout.arithmetic(11, 3, 2)
    assert layout.agent_groups == ((0, 1, 2, 3), (4, 5, 6, 7))
    assert layout.clients == {8: (0, 3, 6), 9: (1, 4, 7), 10: (2, 5)}
    assert (layout.buffer_of(4), layout.buffer_of(9), layout.agent_group_of(9)) == (9, None, None)


def test_arithmetic_around_a_coordinator() -> None:
    layout = RankLayout.arithmetic(6, 1, 2, coordinator=0)
    assert layout.agent_groups == ((1, 2), (3, 4)) and layout.clients == {5: (1, 2, 3, 4)}


@pytest.mark.slow
@settings(max_examples=200, deadline=None)
@given(st.data())
def test_every_plan_that_is_possible_can_be_made(data: st.DataObject) -> None:
    size = data.draw(st.integers(1, 24))
    coordinator = data.draw(st.none() | st.integers(0, size - 1)) if size > 1 else None
    rest = size - (coordinator is not None)
    buffers = data.draw(st.integers(0, rest // 2))
    training = rest - buffers
    groups = data.draw(st.sampled_from([n for n in range(1, training + 1) if training % n == 0]))
    hosts = data.draw(st.lists(st.sampled_from("abcd"), min_size=size, max_size=size))
    for layout in (
        RankLayout.arithmetic(size, buffers, groups, coordinator=coordinator),
        RankLayout.by_host(hosts, buffers, groups, coordinator=coordinator),
    ):
        check_roles(layout)
        assert (layout.coordinator, len(layout.clients), len(layout.agent_groups)) == (coordinator, buffers, groups)


def test_by_host_keeps_groups_and_buffers_at_home() -> None:
    """Two hosts have six ranks, assigned in turn: each has one buffer, and two agent groups of its own."""
    layout = RankLayout.by_host(["a", "b"] * 5 + ["a", "b"], 2, 2)
    assert layout.agent_groups == ((0, 2, 4, 6, 8), (1, 3, 5, 7, 9))
    assert layout.clients == {10: (0, 2, 4, 6, 8), 11: (1, 3, 5, 7, 9)}


def test_by_host_with_more_hosts_than_buffers() -> None:
    """A rank without a buffer on its host is served by the one with the fewest clients."""
    layout = RankLayout.by_host(["a", "a", "a", "b", "b", "c"], 2, 1)
    check_roles(layout)
    hosts = dict(enumerate("aaabbc"))
    assert {hosts[buffer] for buffer in layout.clients} == {"a", "b"}
    for buffer, ranks in layout.clients.items():
        assert {hosts[rank] for rank in ranks} <= {hosts[buffer], "c"}


def test_a_host_for_every_rank() -> None:
    layout = RankLayout.by_host("abcdef", 3, 1)
    check_roles(layout)
    assert sorted(map(len, layout.clients.values())) == [1, 1, 1]


def test_it_can_be_read() -> None:
    assert str(RankLayout.arithmetic(6, 1, 2, coordinator=5)).splitlines() == [
        "6 ranks: 4 train, 1 buffer",
        "agent group 0: ranks 0, 1",
        "agent group 1: ranks 2, 3",
        "buffer rank 4: serves ranks 0-3",
        "coordinator: rank 5",
    ]


@pytest.mark.parametrize(
    ("arguments", "facts"),
    [
        ((4, 0, 3), ["num_agent_groups must be one of 1, 2, 4 with 4 training ranks", "got 3"]),
        ((7, 1, 4), ["num_agent_groups", 4, 6, "1, 2, 3, 6"]),
        ((4, 3, 1), ["num_remote_buffers must be from 0 to 2 with 4 ranks", "got 3"]),
        ((4, 9, 1), ["num_remote_buffers", 9, 4, 0, 2]),
        ((1, 1, 1), ["num_remote_buffers", 1, 0]),
        ((4, -1, 1), ["num_remote_buffers", -1, 0]),
        ((4, 1.0, 1), ["num_remote_buffers", 1.0]),
        ((4, 0, 0), ["num_agent_groups", 0, 1]),
        ((0, 0, 1), ["world_size", 0, 1]),
        ((True, 0, 1), ["world_size", True]),
    ],
)
def test_numbers_that_do_not_fit(arguments: tuple[Any, ...], facts: list[object]) -> None:
    with pytest.raises(ValueError) as caught:
        RankLayout.arithmetic(*arguments)
    assert names(caught.value, *facts)
    if isinstance(arguments[0], int) and arguments[0] > 1:
        with pytest.raises(ValueError) as caught:
            RankLayout.by_host(["host"] * arguments[0], *arguments[1:])
        assert names(caught.value, *facts)


def test_a_coordinator_that_leaves_nobody_to_train() -> None:
    with pytest.raises(ValueError, match="the coordinator is the only one of 1 ranks"):
        RankLayout.arithmetic(1, coordinator=0)
    with pytest.raises(ValueError, match=r"num_remote_buffers .* with 1 ranks besides the coordinator.*got 1"):
        RankLayout.arithmetic(2, 1, coordinator=0)
    with pytest.raises(ValueError, match="coordinator must be a rank from 0 to 1 or None, got 2"):
        RankLayout.arithmetic(2, coordinator=2)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ((2, (), {}), "agent_groups must have at least one group"),
        ((2, ((0, 1), ()), {}), "agent group 1 must have at least one rank"),
        ((3, ((0, 1), (2,)), {}), "agent groups must have equal sizes, got [2, 1]"),
        ((2, ((0, 2),), {}), "each rank of the layout must be from 0 to 1, got 2"),
        ((2, ((0, 1, 1),), {}), "each rank must have exactly one role, but rank 1 would have several"),
        ((3, ((0, 1),), {1: (0,), 2: (1,)}), "rank 1 "),
        ((3, ((0, 1),), {}), "each rank must have exactly one role, but rank 2 would have none"),
        ((3, ((0, 1),), {2: ()}), "buffer rank 2 must have at least one training rank as a client"),
        ((4, ((0, 1),), {2: (0, 1), 3: ()}), "rank 3 "),
        ((3, ((0, 1),), {2: (0, 2)}), "the clients of buffer rank 2 must be training ranks, got rank 2"),
        ((3, ((0, 1),), {2: (0,)}), "each training rank must have exactly one buffer, but rank 1 would have 0"),
        ((4, ((0, 1),), {2: (0, 1), 3: (1,)}), "but rank 1 would have 2"),
        ((3, ((0,),), {1: (0,), 2: (0,)}), "at most one buffer for each of its 1 training ranks, got 2"),
        ((2, ((0,),), {}, 0), "rank 0 "),
    ],
)
def test_plans_by_hand_that_do_not_fit(arguments: tuple[Any, ...], words: str) -> None:
    with pytest.raises(ValueError) as caught:
        RankLayout(*arguments)
    assert words in str(caught.value)


def test_a_simulated_network_says_which_ranks_share_a_host() -> None:
    """The operating system would name the single host that simulates all ranks."""

    async def main(world: ad.World) -> tuple[str, tuple[tuple[int, ...], ...]]:
        ranks = await ad.initialize_distributed_compute(num_remote_buffers=2, num_agent_groups=2, placement="host")
        return world.hostname, ranks.layout.agent_groups

    report = ad.simulate(main, ranks=8, seed=1, network=Network(ranks_per_host=4), strict=True)
    assert report.results == tuple((f"host{rank // 4}", ((0, 1, 2), (4, 5, 6))) for rank in range(8))


def test_layouts_with_other_orders_in_a_group_are_refused() -> None:
    """Regression: the order was not compared, and the ranks waited for a minute for groups of other ranks."""

    async def main(world: ad.World) -> float:
        began_s = world.time()
        layout = RankLayout(2, ((1, 0) if world.rank else (0, 1),), {})
        with pytest.raises(ad.DisagreementError, match="layout"):
            await ad.initialize_distributed_compute(layout=layout)
        return world.time() - began_s

    assert max(ad.simulate(main, ranks=2, seed=1).results) < 1.0
