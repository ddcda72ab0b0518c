"""Tests asynchronous DiLoCo with regional servers of islands and a global server, in virtual time.

The oracle of ``async_island_scenarios`` computes all weights, and checks that no contribution is applied twice. With at
most one killed rank, it also checks that no contribution is lost.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
from collections import Counter, defaultdict
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support.facts import names
from support.seeds import in_ci, seeds

import asyncdist as ad
from asyncdist.simulation import Compute, Kill, Link, Network, Uniform
from protocols import AsyncDiLoCoPolicy
from simulation.async_diloco_scenarios import OUTERS, Plan
from simulation.async_island_scenarios import Begun, IslandPlan, Made, Merged, Record, check, noted, run, seen_in
from simulation.test_async_diloco_faults import advance, made

#: Two tests examine the same runs.
drawn = functools.cache(seen_in)

SLOW = Network(link=Link(latency_s=Uniform(1e-3, 0.03), bandwidth_nbytes_per_s=1e5))
PLANS = {
    "two of two": IslandPlan(plan=Plan(steps=(60,) * 4)),
    "two of three": IslandPlan(plan=Plan(ranks=6, steps=(60,) * 6, outer="plain"), global_outer="plain"),
    "float32": IslandPlan(plan=Plan(steps=(60,) * 4, dtype=torch.float32), merge_weight=0.5),
    "a mirror with each version": IslandPlan(plan=Plan(steps=(60,) * 4, mirror_every=1)),
    "each version": IslandPlan(plan=Plan(steps=(60,) * 4), global_every=1),
    "a slow network": IslandPlan(plan=Plan(steps=(60,) * 4, network=SLOW)),
    "a slow rank": IslandPlan(plan=Plan(steps=(60, 60, 6, 60), compute=Compute(factors={2: 10.0}))),
    "a quorum in each island": IslandPlan(plan=Plan(ranks=6, steps=(60,) * 6, quorum=2)),
    "different ends": IslandPlan(plan=Plan(steps=(9, 60, 30, 21))),
}


def begun(record: Record, island: int) -> list[Begun]:
    return [event for event in record.events if isinstance(event, Begun) and event.island == island]


def lineages(record: Record) -> dict[int, dict[int, tuple[tuple[int, int], ...]]]:
    """Return the donors of each server's versions, without versions that were made after a save."""
    found: dict[int, dict[int, tuple[tuple[int, int], ...]]] = defaultdict(dict)
    for event in record.events:
        if isinstance(event, Made):
            found[event.island][event.version] = event.donors
        elif isinstance(event, Begun):
            kept = {version: each for version, each in found[event.island].items() if version <= event.elected}
            found[event.island] = kept
    return found


@pytest.mark.parametrize(
    "name", in_ci(PLANS, "two of two", "each version", "a slow network", "a quorum in each island", "different ends")
)
def test_weights_equal_the_oracles_bit_for_bit(name: str) -> None:
    _, record = run(PLANS[name])
    oracle = check(PLANS[name], record)
    assert oracle.upper.version >= 6 and all(region.version >= 6 for region in oracle.regions)
    assert sum(isinstance(event, Merged) for event in record.events) >= 6


def test_a_global_anchor_that_is_taken_whole_loses_no_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """With one island and a global SGD of rate 1, the anchors move by the sum of all differences."""
    monkeypatch.setitem(OUTERS, "whole", (1.0, 0.0, False))
    options: dict[str, Any] = {"islands": 1, "global_every": 2, "merge_weight": 1.0, "global_outer": "whole"}
    plan = IslandPlan(plan=Plan(steps=(40,) * 4, outer="plain"), **options)
    _, record = run(plan)
    oracle = check(plan, record)
    applied = [
        oracle.workers[rank].found[number] for each in oracle.regions[0].donors.values() for rank, number in each
    ]
    for place, first in enumerate(oracle.upper.anchors[0]):
        moved = first - 0.25 * np.sum([difference[place] for difference in applied], axis=0)
        assert np.array_equal(moved, oracle.regions[0].anchors[oracle.regions[0].version][place])
        assert np.array_equal(moved, oracle.upper.anchors[oracle.upper.version][place]), (
            "all changes must have been contributed"
        )


@pytest.mark.parametrize("at_s", in_ci([0.15, 0.2, 0.25, 0.3], 0.15, 0.25))
def test_the_next_of_an_island_follows_a_lost_regional_server(at_s: float) -> None:
    plan = IslandPlan(plan=Plan(ranks=6, steps=(60,) * 6, mirror_every=1, faults=(Kill(0, at_s=at_s),)))
    _, record = run(plan)
    check(plan, record)
    first, second, *_ = begun(record, 0)  # further ones begin when ranks leave at the end
    assert (first.version, second.has_reference) == (0, True) and second.version > 2
    statistics = record.lives[1].statistics
    assert statistics is not None and statistics.merge_count and not statistics.lost_progress_count


@pytest.mark.parametrize("at_s", in_ci([0.15, 0.2, 0.25, 0.3], 0.2, 0.3))
def test_a_lost_global_server_loses_no_contribution(at_s: float) -> None:
    plan = IslandPlan(plan=Plan(ranks=6, steps=(60,) * 6, mirror_every=1, faults=(Kill(5, at_s=at_s),)))
    _, record = run(plan)
    check(plan, record)
    assert [event.elected > 0 for event in begun(record, -1)] == [False, True]
    assert not any(record.lives[rank].statistics.lost_outer_state_count for rank in range(5))


def test_an_island_that_is_lost_whole_does_no_harm() -> None:
    for lost in ((0, 1), (2, 3)):
        faults = tuple(Kill(rank, at_s=0.2) for rank in lost)
        plan = IslandPlan(plan=Plan(steps=(60,) * 4, faults=faults))
        _, record = run(plan)
        check(plan, record)
        for rank in {0, 1, 2, 3} - set(lost):
            assert len(record.lives[rank].infos) == 60
            assert record.lives[rank].infos[-5:] and any(record.lives[rank].infos[-5:])


def test_a_global_anchor_is_not_left_to_a_rank_that_leaves() -> None:
    """Regression: in seed 20044, the global server gave its anchor to a rank that left at once."""
    seen_in(20044)


@pytest.mark.parametrize("block", seeds(12))
def test_any_faults_keep_each_contribution(block: int) -> None:
    for seed in range(block * 4, block * 4 + 4):
        drawn(seed)


@pytest.mark.slow
def test_the_drawn_runs_have_all_kinds_of_events() -> None:
    seen: Counter[str] = Counter()
    for seed in range(16):
        _, plan, record, _ = drawn(seed)
        seen["next regional server"] += any(len(begun(record, island)) > 1 for island in range(plan.islands))
        seen["next global server"] += len(begun(record, -1)) > 1
        seen["merge at the beginning"] += any(each.version == each.elected + 1 for each in begun(record, 0))
        seen["global version"] += any(isinstance(each, Made) and each.island < 0 for each in record.events)
    assert len(seen) == 4 and min(seen.values()) > 0, seen


@pytest.mark.parametrize("at", in_ci(range(6, 12), 6, 9, 11))
def test_contributions_under_way_are_saved_and_applied_once(at: int, tmp_path: Path) -> None:
    record = Record(dict.fromkeys(range(4), 0))
    options: dict[str, Any] = {"average_every": 2, "islands": 2, "global_every": 2}

    async def main(world: ad.World, first: int, last: int) -> int:
        model, optimizer = made()
        policy = AsyncDiLoCoPolicy(model, optimizer, **options)
        if first:
            await ad.load_population(tmp_path, model, optimizer, policy=policy)
        async with policy:
            await advance(policy, model, optimizer, range(first, last), world.rank)
            if last == at:
                await ad.save_population(tmp_path, model, optimizer, policy=policy)
                return 0
        return policy._store.sequence

    with noted(record):
        ad.simulate(main, 0, at, ranks=4, seed=at, network=SLOW, strict=True)
        made_count = ad.simulate(main, at, 60, ranks=4, seed=2, network=SLOW, strict=True).results
    kept = lineages(record)
    donors = [each for island in (0, 1) for made_by in kept[island].values() for each in made_by]
    assert Counter(donors) == Counter((rank, each) for rank in range(4) for each in range(1, made_count[rank] + 1))
    sent = [each for made_by in kept[-1].values() for each in made_by]
    assert max(Counter(sent).values()) == 1 and len(sent) >= 4
    for island in (0, 1):
        assert max(version for other, version in sent if other == island) >= max(kept[island]), (
            "all versions must have been contributed"
        )


@contextlib.asynccontextmanager
async def trained(
    rank: int, folder: Path, first: int, last: int, *, islands: int, global_every: int = 2
) -> AsyncIterator[AsyncDiLoCoPolicy]:
    """Train from step ``first``, and save at the end, or from the saved state. The policy is open in the block."""
    model, optimizer = made()
    policy = AsyncDiLoCoPolicy(model, optimizer, average_every=2, islands=islands, global_every=global_every)
    if first:
        await ad.load_population(folder, model, optimizer, policy=policy)
    async with policy:
        await advance(policy, model, optimizer, range(first, last), rank)
        if not first:
            await ad.save_population(folder, model, optimizer, policy=policy)
        yield policy


@pytest.mark.parametrize(("ranks", "islands"), in_ci([(8, 4), (6, 2), (8, 1), (8, 2)], (6, 2), (8, 2)))
def test_a_job_resumes_with_other_islands(
    ranks: int, islands: int, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Regression: versions of the old islands were compared with those of the new ones, and wrong warnings logged."""

    async def main(world: ad.World, islands: int, first: int, last: int) -> tuple[int, int]:
        async with trained(world.rank, tmp_path, first, last, islands=islands) as policy:
            pass
        statistics = policy.statistics()
        return statistics.lost_progress_count, statistics.merge_count

    ad.simulate(main, 2, 0, 20, ranks=8, seed=1, network=SLOW)
    caplog.clear()
    results = ad.simulate(main, islands, 20, 60, ranks=ranks, seed=2, network=SLOW).results
    texts = [record.getMessage() for record in caplog.records if record.name == "protocols.async_diloco.islands"]
    assert [names(text, "2", "4", str(islands), str(ranks // islands)) for text in texts] == [True] * (
        (ranks, islands) != (8, 2)
    )
    assert not any(lost for lost, _ in results)
    size = ranks // islands
    assert all(any(merged for _, merged in results[first : first + size]) for first in range(0, ranks, size))


def test_ranks_of_another_island_do_not_contribute_its_progress(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Regression: after a loss, as many islands of as many ranks began, but with other ranks, and counted as equal."""

    async def main(world: ad.World, first: int, last: int) -> None:
        async with trained(world.rank, tmp_path, first, last, islands=2):
            pass

    ad.simulate(main, 0, 40, ranks=6, seed=1, network=SLOW, faults=[Kill(0, at_s=0.4)])
    caplog.clear()
    ad.simulate(main, 40, 60, ranks=6, seed=2, network=SLOW)
    texts = [record.getMessage() for record in caplog.records if record.name == "protocols.async_diloco.islands"]
    assert len(texts) == 1 and "other islands (2 of 3 ranks)" in texts[0]


def test_other_islands_before_a_global_version_begin_anew(tmp_path: Path) -> None:
    """Regression: each of them contributed the whole progress of its old island, so that some counted twice."""

    async def main(world: ad.World, islands: int, first: int, last: int) -> tuple[int, int]:
        async with trained(world.rank, tmp_path, first, last, islands=islands, global_every=100) as policy:
            assert policy._federation is not None
            server = policy._federation.member.server
            if server is None or server.anchor is None:
                return 0, 0
            return policy._federation._regional._measured_from, server.anchor.version

    ad.simulate(main, 2, 0, 20, ranks=8, seed=1, network=SLOW)
    results = ad.simulate(main, 4, 20, 40, ranks=8, seed=2, network=SLOW).results
    servers = [result for result in results if result != (0, 0)]
    assert len(servers) == 4 and all(0 < measured_from < version for measured_from, version in servers)


@pytest.mark.parametrize("late", ["skip", "wait"])
def test_ranks_may_leave_directly_after_a_save(late: str, tmp_path: Path) -> None:
    """Regression: the save had frozen the global server, and the server of its island waited forever for its answer."""

    async def main(world: ad.World) -> None:
        model, optimizer = made()
        async with AsyncDiLoCoPolicy(model, optimizer, average_every=2, islands=2, global_every=2, late=late) as policy:
            await advance(policy, model, optimizer, range(8), world.rank)
            await ad.save_population(tmp_path, model, optimizer, policy=policy)
            await asyncio.sleep(0.002 if world.rank == 3 else 0.0)

    assert ad.simulate(main, ranks=4, seed=0, strict=True).virtual_time_s < 10.0


@pytest.mark.parametrize("at_ms", in_ci([97, 100, 103], 100))
def test_a_new_regional_server_begins_during_a_save(at_ms: int, tmp_path: Path) -> None:
    """Regression: it waited for the global server, which did not answer until the end of the save."""

    async def main(world: ad.World) -> int:
        model, optimizer = made()
        options: dict[str, Any] = {"average_every": 2, "islands": 2, "global_every": 1, "late": "wait"}
        async with AsyncDiLoCoPolicy(model, optimizer, **options) as policy:
            for step in range(10):
                await asyncio.sleep(0.01)
                await policy.step()
                if step == 6:
                    await ad.save_population(tmp_path, model, optimizer, policy=policy)
        return policy.iteration

    network, faults = Network(link=Link(latency_s=1e-3)), [Kill(0, at_s=at_ms / 1000)]
    report = ad.simulate(main, ranks=4, seed=3, network=network, faults=faults, until_s=100.0)
    assert report.results == (None, 10, 10, 10)


def test_leaving_ranks_do_not_wait_forever_for_an_election(monkeypatch: pytest.MonkeyPatch) -> None:
    """Regression: drain_timeout_s did not limit the wait for a regional server that waits for the global server."""
    monkeypatch.setattr("asyncdist.protocols.async_diloco.server.Server.on_register", lambda *_: None)

    async def main(world: ad.World) -> None:
        model, optimizer = made()
        async with AsyncDiLoCoPolicy(model, optimizer, average_every=2, islands=2, drain_timeout_s=1.0) as policy:
            await advance(policy, model, optimizer, range(1), world.rank)  # without a contribution

    assert ad.simulate(main, ranks=4, seed=1).virtual_time_s < 10.0


def test_a_state_without_islands_is_the_first_global_anchor(tmp_path: Path) -> None:
    """Regression: the global anchor began with each rank's weights, so that islands merged changes that none made."""
    outer = functools.partial(torch.optim.SGD, lr=0.5)
    islands: dict[str, Any] = {
        "islands": 1,
        "global_every": 1,
        "global_optimizer": functools.partial(torch.optim.SGD, lr=1.0),
    }

    async def main(world: ad.World, options: dict[str, Any]) -> float:
        model = torch.nn.Linear(1, 1, bias=False)
        torch.nn.init.zeros_(model.weight)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
        policy = AsyncDiLoCoPolicy(model, optimizer, average_every=4, outer_optimizer=outer, **options)
        if options:
            await ad.load_population(tmp_path, model, optimizer, policy=policy)
        async with policy:
            for _ in range(40 if options else 22):
                with torch.no_grad():
                    model.weight.add_(0.0 if options else 0.01)
                await policy.step()
            if not options:
                await ad.save_population(tmp_path, model, optimizer, policy=policy)
        return model.weight.item()

    ad.simulate(main, {}, ranks=2, seed=1)
    for weight in ad.simulate(main, islands, ranks=2, seed=1).results:
        assert weight == pytest.approx(0.22, abs=1e-6)
