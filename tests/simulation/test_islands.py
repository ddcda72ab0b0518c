"""Tests islands: each is a separate population, and its best rank donates to a round of another island."""

from __future__ import annotations

import asyncio
import random
import re
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from support.seeds import in_ci
from torch import nn

import asyncdist as ad
from asyncdist.recording.reader import read_recording
from asyncdist.simulation import Kill, Network, Restart, replay, simulate
from protocols import (
    AsyncSelectiveAveragingPolicy,
    StepInfo,
)
from simulation.island_scenarios import COMPUTE, Ended, Given, population, scenario, train

# -- what it is for ---------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("migration", [pytest.param("ring", marks=pytest.mark.long), "random"])
def test_the_best_weights_spread_over_all_islands(migration: str) -> None:
    """The best rank of each island donates to the next island, so the best weights of all reach all islands."""
    options = {"islands": 4, "averaging_strategy": "best_only", "migration": migration, "steps": 250}
    ended = population(16, **options).results
    assert {one.value for one in ended} == {15.0}
    apart = population(16, **{**options, "migrate_every": 10**6}).results
    assert [max(one.value for one in apart[first : first + 4]) for first in range(0, 16, 4)] == [3.0, 7.0, 11.0, 15.0]
    assert not any(one.migrants for one in apart)


class _Scattered(Network):
    """A network in which ranks are assigned to hosts in turn, as by ``mpirun --map-by node``."""

    def host_of(self, rank: int) -> int:
        return rank % 2


async def _islands_of(world: ad.World) -> tuple[int | None, set[int]]:
    """Return the number of this rank's island, and its ranks."""
    model = nn.Linear(2, 1)
    policy = AsyncSelectiveAveragingPolicy(
        model, torch.optim.SGD(model.parameters(), lr=0.1), average_every=2, replacement_ratio=0.5,
        island_size=4, migrate_every=10**6,
    )  # fmt: skip
    async with policy:
        for _ in range(40):
            await policy.step(float(world.rank))
        return policy.statistics().island, set(policy._members)


def test_an_island_holds_ranks_of_one_host(tmp_path: Path) -> None:
    """A replay knows the hosts as well."""
    network = _Scattered(ranks_per_host=1)
    recorded = simulate(_islands_of, ranks=8, network=network, strict=True, record=tmp_path)
    assert recorded.results == tuple(
        (rank % 2, {rank % 2, 2 + rank % 2, 4 + rank % 2, 6 + rank % 2}) for rank in range(8)
    )
    assert replay(_islands_of, recording=read_recording(tmp_path)).report.results == recorded.results


@pytest.mark.parametrize("ranks_per_host", [None, 1, 2, 3, 4])
def test_ranks_that_lie_host_by_host_are_divided_in_their_order(ranks_per_host: int | None) -> None:
    found = simulate(_islands_of, ranks=8, network=Network(ranks_per_host=ranks_per_host), strict=True).results
    assert found == tuple((rank // 4, {*range(4 * (rank // 4), 4 * (rank // 4) + 4)}) for rank in range(8))


@pytest.mark.slow
def test_a_donor_from_elsewhere_stays_where_it_is_and_is_told() -> None:
    ended = population(8, islands=2).results
    stats = [one.stats for one in ended]
    assert [each.island for each in stats] == [0] * 4 + [1] * 4
    assert ended[0].migrants == {7} and not any(one.migrants for one in ended[4:])
    assert ended[7].value == 7.0 and stats[7].migration_count >= 3
    told = next(str(info) for info in ended[0].infos if info.migrants)
    assert "7 from another island" in told
    first, second = stats[0].coordinator, stats[4].coordinator
    assert first is not None and second is not None
    assert first.guests and {rank for _, rank in first.guests} == {7} and not second.guests
    assert abs(second.emigrant_count - second.decision_count // 2) <= 1
    assert set(first.reports) == {0, 1, 2, 3}
    assert stats[7].coordinator is None and stats[7].coordinator_rank == 4


def test_islands_of_two_and_one_island_alone() -> None:
    ended = population(4, islands=2, replacement_ratio=0.5).results
    assert ended[0].migrants == {3}
    alone = population(4, islands=1).results
    assert not any(one.migrants for one in alone) and {one.stats.island for one in alone} == {0}


@pytest.mark.slow
def test_one_run_is_a_function_of_its_arguments() -> None:
    first, second = (population(8, island_size=4, migration="random", seed=9, steps=40) for _ in range(2))
    assert first.trace_digest == second.trace_digest


@pytest.mark.slow
@pytest.mark.parametrize("ratio", [0.25, 0.75])
def test_both_routes_give_the_same_weights(ratio: float) -> None:
    """There is one round in each island, after the second island has sent its best rank, for which the round waits."""

    async def main(world: ad.World, route: str) -> tuple[bytes, StepInfo | None]:
        model = nn.Linear(64, 1, bias=False)
        torch.manual_seed(world.rank)
        nn.init.normal_(model.weight)
        options = {"threshold": 1e9, "cooldown": 10**9, "quorum": 1.0, "grace_s": 10.0, "migrate_every": 1}
        policy = AsyncSelectiveAveragingPolicy(
            model, torch.optim.SGD(model.parameters(), lr=0.1), average_every=30, replacement_ratio=ratio,
            route=route, islands=2, **options,
        )  # fmt: skip
        told = None
        async with policy:
            if world.rank < 6:
                await asyncio.sleep(1.0)
            for _ in range(200):
                info = await policy.step(float(world.rank))
                told = info if info and told is None else told
        return bytes(model.weight.detach().numpy().data), told

    direct, sharded = (
        simulate(main, route, ranks=12, seed=4, compute=COMPUTE, strict=True).results for route in ("direct", "sharded")
    )
    assert [weights for weights, _ in direct] == [weights for weights, _ in sharded]
    told = [info for _, info in sharded[:6] if info is not None]
    assert told and all(info.migrants == (11,) and info.route == "sharded" for info in told)


def test_a_group_has_islands_in_its_own_order() -> None:
    async def main(world: ad.World) -> tuple[int | None, set[int]]:
        group = await ad.new_group([6, 1, 4, 3, 2, 5]) if world.rank else None
        if group is None:
            return None, set()
        model = nn.Linear(2, 2)
        migrants: set[int] = set()
        async with AsyncSelectiveAveragingPolicy(
            model, torch.optim.SGD(model.parameters(), lr=0.1), average_every=2, group=group, islands=2, migrate_every=1
        ) as policy:
            for _ in range(60):
                migrants.update((await policy.step(float(world.rank))).migrants)
        return policy.statistics().island, migrants

    found = simulate(main, ranks=7, seed=2, strict=True).results
    assert [island for island, _ in found] == [None, 0, 1, 1, 0, 1, 0]
    assert found[2][1] == {6} and found[1][1] <= {5}


# -- what goes wrong --------------------------------------------------------------------------------------------------


def test_ranks_that_cannot_be_divided_are_refused_on_all_of_them() -> None:
    async def main(world: ad.World) -> str:
        with pytest.raises(ValueError) as caught:
            await train(world, {}, 1, 0, islands=3)
        return str(caught.value)

    (text,) = set(simulate(main, ranks=8, strict=True).results)
    assert re.search(r"islands .* 1, 2, 4\b.*\b8 ranks\b.* 3$", text)


def test_ranks_that_differ_in_their_islands_do_not_start() -> None:
    async def main(world: ad.World) -> str:
        try:
            await train(world, {}, 1, 0, islands=2 if world.rank % 4 else 4, start_timeout_s=5.0)
        except ad.AsyncdistError as error:
            return type(error).__name__
        return "started"

    found = simulate(main, ranks=8, strict=True).results
    assert "started" not in found and "DisagreementError" in found


def test_waiting_for_ranks_of_another_island_names_the_option() -> None:
    """The missing ranks have started in another island."""

    async def main(world: ad.World) -> str:
        model, islands = nn.Linear(1, 1), 2 if world.rank < 3 else 3
        options = {"average_every": 1, "islands": islands, "start_timeout_s": 5.0}
        try:
            async with AsyncSelectiveAveragingPolicy(model, torch.optim.SGD(model.parameters()), **options):
                await world.sleep(6.0)
        except ad.StartTimeoutError as error:
            return f"{error.missing} {error.message}"
        return ""

    words = simulate(main, ranks=6).results
    assert "(2,)" in words[3] and "all ranks must have the same islands, which is 3 on this rank" in words[3]
    assert {*words[:3], *words[4:]} == {""}, "the other ranks must start"


def test_islands_with_other_models_exchange_nothing(caplog: pytest.LogCaptureFixture) -> None:
    async def main(world: ad.World) -> set[int]:
        model = nn.Linear(4 + world.rank // 4, 1)
        migrants: set[int] = set()
        async with AsyncSelectiveAveragingPolicy(
            model, torch.optim.SGD(model.parameters(), lr=0.1), average_every=2, islands=2, migrate_every=1
        ) as policy:
            for _ in range(60):
                migrants.update((await policy.step(float(world.rank))).migrants)
        return migrants

    assert simulate(main, ranks=8, strict=True).results == (set(),) * 8
    assert "has a different model or options" in caplog.text


@pytest.mark.slow
@pytest.mark.parametrize("victim", in_ci([7, 4, 0], 7, 0))
def test_rounds_and_migrations_continue_after_a_death(victim: int) -> None:
    """The victim is the emigrant, its island's coordinator, or the coordinator of the island to which it donates."""
    report = population(8, [Kill(victim, at_s=0.5)], islands=2, steps=200)
    report.check_faults()
    for rank, ended in enumerate(report.results):
        if rank != victim:
            assert isinstance(ended, Ended)
            late = [info for info in ended.infos if info.abandoned]
            assert len(late) <= 2, late
    hosts = [report.results[rank] for rank in range(4) if rank != victim]
    assert set().union(*(ended.migrants for ended in hosts)) - {victim}
    assert any(info.migrants for ended in hosts for info in ended.infos[-3:]), "migration must continue to the end"


@pytest.mark.slow
def test_an_island_that_is_lost_is_passed_over() -> None:
    """The ring skips it: the last island donates to the first, and the first to the third."""
    faults = [Kill(rank, at_s=0.4) for rank in (2, 3)]
    report = population(6, faults, islands=3, steps=200, metric_mode="min", replacement_ratio=0.5)
    report.check_faults()
    assert {0, 1} & (report.results[5].migrants | report.results[4].migrants)


@pytest.mark.slow
def test_an_island_that_has_left_the_policy_is_passed_over() -> None:
    async def main(world: ad.World) -> set[int]:
        ended = await train(
            world, given, 20 if world.rank in (2, 3) else 200, world.rank // 2,
            islands=3, metric_mode="min", replacement_ratio=0.5,
        )  # fmt: skip
        await ad.barrier()
        return ended.migrants

    given: Given = {}
    found = simulate(main, ranks=6, seed=3, compute=COMPUTE, strict=True).results
    assert {0, 1} & (found[4] | found[5])


@pytest.mark.slow
def test_a_rank_that_is_invited_while_it_leaves_says_so() -> None:
    """Ranks leave at different times, each while it is invited: no rank waits, and nothing is left over."""
    for seed in range(4):
        rng = random.Random(seed)
        steps = [rng.randrange(10, 80) for _ in range(12)]
        given: Given = {}

        async def main(world: ad.World, steps: Sequence[int] = steps, given: Given = given) -> Ended:
            return await train(world, given, steps[world.rank], world.rank // 3, islands=4, migrate_every=1)

        report = simulate(main, ranks=12, seed=seed, compute=COMPUTE, strict=True)
        assert all(isinstance(ended, Ended) for ended in report.results)


@pytest.mark.slow
def test_a_restarted_rank_joins_its_island_and_gives_to_others() -> None:
    faults = [Kill(7, at_s=0.3), Restart(7, at_s=0.6)]
    report = population(8, faults, islands=2, steps=300)
    report.check_faults()
    back = report.results[7]
    assert isinstance(back, Ended) and back.stats.island == 1
    assert back.value > 4.0, "the newcomer must have the weights of its own island"


@pytest.mark.slow
@pytest.mark.parametrize("first", [0, *(pytest.param(first, marks=pytest.mark.long) for first in (10, 20, 30))])
def test_every_average_is_the_one_of_its_donors_whatever_fails(first: int) -> None:
    """``island_scenarios`` has the checks; no rank hangs, and nothing is left over."""
    reports = [scenario(seed) for seed in range(first, first + 10)]
    assert sum(len(one.migrants) for report in reports for one in report.results if isinstance(one, Ended)) > 10
    assert any(report.faults_fired for report in reports)


# -- what it costs ----------------------------------------------------------------------------------------------------


@pytest.mark.long
@pytest.mark.slow
def test_messages_per_rank_do_not_grow_with_the_number_of_ranks() -> None:
    """This test counts rounds; ``test_large_worlds.py`` tests starts and ends."""
    counts = {}
    for ranks in (64, 512):
        short, long = (population(ranks, island_size=32, steps=steps) for steps in (10, 40))
        rounds = max(one.stats.coordinator.rounds_ended for one in long.results if one.stats.coordinator is not None)
        assert rounds >= 5
        assert any(one.migrants for one in long.results)
        counts[ranks] = (long.message_count - short.message_count) / ranks / rounds
    assert counts[512] <= 1.05 * counts[64] <= 64
