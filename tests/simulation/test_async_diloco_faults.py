"""Tests asynchronous DiLoCo with lost, restarted and leaving ranks, and its checkpoints, in virtual time.

The oracle of ``async_diloco_scenarios`` also checks that each contribution of a rank that is not killed is applied
exactly once.
"""

from __future__ import annotations

import asyncio
import copy
import functools
import itertools
import logging
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from support.seeds import in_ci, seeds
from support.tokens import tokens_for
from torch import nn

import asyncdist as ad
from asyncdist.simulation import Kill, Link, Network, Restart, Uniform
from protocols import AsyncDiLoCoPolicy, AsyncDiLoCoStatistics
from simulation.async_diloco_scenarios import Plan, Record, check, noted_steps, run, seen_in

#: Two tests examine the same runs.
drawn = functools.cache(seen_in)

STEPS = (40,) * 4


def test_the_others_continue_without_a_lost_worker() -> None:
    plan = Plan(steps=STEPS, faults=(Kill(3, at_s=0.15),))
    _, record = run(plan)
    check(plan, record)
    assert 0 < len(record.lives[3, 0].infos) < 40
    assert record.outers == {0: 0} | {version: version for version in record.outers}, "no outer state may be lost"


def test_a_new_leader_continues_with_the_mirrored_momentum() -> None:
    """Each version is mirrored, and the worker with the newest anchor lives, so that nothing is lost."""
    plan = Plan(steps=STEPS, mirror_every=1, quorum=4, late="wait", faults=(Kill(0, at_s=0.15),))
    _, record = run(plan)
    oracle = check(plan, record)
    assert oracle.momenta[-1], "there must be a momentum, otherwise the test tests nothing"
    (first,) = [version for version in record.outers if version and version < 8]
    assert record.outers[first] == first


@pytest.mark.parametrize(("mirror_every", "found"), [(0, "only the initial version"), (4, "only version")])
def test_a_lost_momentum_is_logged_and_counted(mirror_every: int, found: str, caplog: pytest.LogCaptureFixture) -> None:
    plan = Plan(steps=STEPS, mirror_every=mirror_every, faults=(Kill(0, at_s=0.15),))
    with caplog.at_level(logging.WARNING, logger="protocols.async_diloco.server"):
        _, record = run(plan)
    check(plan, record)
    assert [found in each.getMessage() for each in caplog.records] == [True]
    statistics = record.lives[1, 0].statistics
    assert statistics is not None and statistics.lost_outer_state_count == 1
    assert "outer states lost" in str(statistics)


def test_two_leaders_are_lost_in_turn() -> None:
    for delay_s in (0.0, 0.0005, 0.002, 0.05):
        plan = Plan(steps=STEPS, mirror_every=1, faults=(Kill(0, at_s=0.15), Kill(1, at_s=0.15 + delay_s)))
        _, record = run(plan)
        check(plan, record)
        assert len(record.lineage) > 20


def test_a_leader_that_leaves_gives_its_anchor_and_momentum_away() -> None:
    plan = Plan(steps=(9, 17, 25, 40))
    _, record = run(plan)
    check(plan, record)
    assert len(record.outers) >= 4 and all(version == outer for version, outer in record.outers.items())


def test_an_heir_that_leaves_gives_the_anchor_away() -> None:
    """Regression: an heir that left at once took the last versions with it, and no rank logged the loss."""
    record = Record()

    async def main(world: ad.World) -> int:
        model, optimizer = made()
        policy = AsyncDiLoCoPolicy(model, optimizer, average_every=4)
        async with policy:
            await advance(policy, model, optimizer, range((20, 19, 8)[world.rank]), world.rank)
            while world.rank == 1 and policy._store.inherited is None:
                await world.progress()
            if world.rank == 2:
                await asyncio.sleep(1.0)
                await advance(policy, model, optimizer, range(8, 16), world.rank)
        return policy.statistics().version

    with noted_steps(record):
        network = Network(link=Link(latency_s=5e-3))
        versions = ad.simulate(main, ranks=3, seed=1, network=network, strict=True).results
    assert not record.lost_count
    assert versions[2] == len(record.lineage) >= 10
    assert [(0, 5)] in record.lineage and record.lineage[-1][0][0] == 2


def test_a_leader_may_withdraw_its_own_contribution() -> None:
    """Regression: a leaving regional server withdrew it, and the version that contained it failed with KeyError."""

    async def main(world: ad.World) -> int:
        model, optimizer = made()
        async with AsyncDiLoCoPolicy(model, optimizer, average_every=4) as policy:
            await advance(policy, model, optimizer, range(2), world.rank)
            member, _ = policy._opened()
            if member.server is not None:
                await member.server.freeze()
                member.contribute(*policy._captured(is_sound=True))
                member.withdraw()
                member.server.unfreeze()
            await asyncio.sleep(1.0)
            await world.progress()
        return 0 if member.server is None else member.server.version_count

    assert ad.simulate(main, ranks=2, seed=1, strict=True).results == (1, 0)


@pytest.mark.parametrize(("late", "rank"), in_ci(itertools.product(["skip", "wait"], [0, 2]), ("skip", 0), ("wait", 2)))
def test_a_restarted_rank_begins_at_the_newest_anchor(rank: int, late: str) -> None:
    plan = Plan(steps=(60,) * 4, late=late, faults=(Kill(rank, at_s=0.15), Restart(rank, at_s=0.2)))
    _, record = run(plan)
    check(plan, record)
    newcomer = record.lives[rank, 1]
    assert newcomer.version and newcomer.first[0] + len(newcomer.infos) == 60
    assert any(info for info in newcomer.infos), "the newcomer must take part"


@pytest.mark.parametrize("block", seeds(24))
def test_any_faults_keep_each_contribution(block: int) -> None:
    for seed in range(block * 4, block * 4 + 4):
        drawn(seed)


def test_a_newcomer_leads_if_the_leader_left_while_it_joined() -> None:
    """Regression: it sent its contributions to the rank that had left, and waited forever for an answer."""
    seen_in(550236)


def test_an_answer_to_a_killed_process_does_not_keep_the_leader() -> None:
    """Regression: its new process did not need the offered anchor, so the leader waited a minute to hand over."""
    seen_in(550030)


@pytest.mark.slow
def test_the_drawn_runs_have_all_kinds_of_events() -> None:
    seen: Counter[str] = Counter()
    for seed in range(16):
        report, plan, record = drawn(seed)
        seen["failover"] += len(record.outers) > 1
        seen["newcomer"] += any(incarnation and life.infos for (_, incarnation), life in record.lives.items())
        seen["lost momentum"] += any(outer < version for version, outer in record.outers.items())
        seen["several donors"] += any(len(donors) > 1 for donors in record.lineage)
        seen["fault"] += any(report.faults_fired)
        seen["wait"] += plan.late == "wait"
    assert set(seen.values()) > {0} or min(seen.values()) > 0, seen


# -- continuing later -------------------------------------------------------------------------------------------------

SAVED: dict[str, dict[str, Any]] = {
    "Nesterov": {},
    "tokens": {"weights": "tokens"},
    "residuals": {"wire": "int8", "error_feedback": 0.9},
    "no momentum": {"outer_optimizer": functools.partial(torch.optim.SGD, lr=0.5)},
}


def made() -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Linear(6, 1))
    return model, torch.optim.AdamW(model.parameters(), lr=0.05)


async def advance(policy: Any, model: nn.Module, optimizer: Any, steps: range, rank: int) -> None:
    for step in steps:
        generator = torch.Generator().manual_seed(100 * step + rank)
        x = torch.randn(8, 4, generator=generator)
        optimizer.zero_grad()
        (model(x) - x[:, :1]).square().mean().backward()
        optimizer.step()
        await asyncio.sleep(0.01 + 0.001 * rank)
        await policy.step(tokens=tokens_for(policy, 1 + (step + rank) % 3))


@pytest.mark.slow
@pytest.mark.parametrize("at", in_ci([7, 10], 7))
@pytest.mark.parametrize("kind", SAVED)
def test_a_saved_population_continues_to_the_bit(kind: str, at: int, tmp_path: Path) -> None:
    options: dict[str, Any] = {"average_every": 5, "quorum": 3, "late": "wait", **SAVED[kind]}

    async def main(world: ad.World, first: int, last: int) -> Any:
        model, optimizer = made()
        policy = AsyncDiLoCoPolicy(model, optimizer, **options)
        if first:
            await ad.load_population(tmp_path, model, optimizer, policy=policy)
        async with policy:
            await advance(policy, model, optimizer, range(first, last), world.rank)
            if last == at:
                await ad.save_population(tmp_path, model, optimizer, policy=policy)
        return [tensor.tolist() for tensor in model.state_dict().values()]

    straight = ad.simulate(main, 0, 20, ranks=3, seed=1, strict=True).results
    half = ad.simulate(main, 0, at, ranks=3, seed=1, strict=True).results
    resumed = ad.simulate(main, at, 20, ranks=3, seed=2, strict=True).results
    assert resumed == straight != half


@pytest.mark.parametrize(
    ("at", "late"),
    in_ci(
        itertools.product(range(5, 11), ["skip", "wait"]),
        *((6, "skip"), (7, "wait"), (8, "skip"), (9, "wait"), (10, "skip"), (10, "wait")),
    ),
)
def test_contributions_under_way_are_saved_and_applied_once(at: int, late: str, tmp_path: Path) -> None:
    record, network = Record(), Network(link=Link(latency_s=Uniform(1e-3, 0.03)))

    async def main(world: ad.World, first: int, last: int) -> int:
        model, optimizer = made()
        policy = AsyncDiLoCoPolicy(model, optimizer, average_every=2, late=late)
        if first:
            await ad.load_population(tmp_path, model, optimizer, policy=policy)
        async with policy:
            await advance(policy, model, optimizer, range(first, last), world.rank)
            if last == at:
                await ad.save_population(tmp_path, model, optimizer, policy=policy)
                return 0
        return policy._store.sequence

    with noted_steps(record):
        ad.simulate(main, 0, at, ranks=3, seed=at, network=network, strict=True)
        made_count = ad.simulate(main, at, 60, ranks=3, seed=2, network=network, strict=True).results
    counts = Counter(each for donors in record.lineage for each in donors)
    assert counts == Counter((rank, each) for rank in range(3) for each in range(1, made_count[rank] + 1))
    assert min(made_count) >= 3


@pytest.mark.parametrize("slice_s", [0.0, 0.01])
def test_a_save_of_waiting_ranks_has_all_contributions(
    slice_s: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Regression: a state saved during the computation of a version counted contributions that its anchor lacked."""
    monkeypatch.setattr("asyncdist.protocols.async_diloco.anchor._YIELD_NBYTES", 0)
    monkeypatch.setattr("asyncdist.protocols.async_diloco.anchor.yield_to_loop", lambda: asyncio.sleep(slice_s))
    outer, steps = functools.partial(torch.optim.SGD, lr=1.0), 4

    async def main(world: ad.World, is_resumed: bool) -> float:
        model = nn.Linear(8, 8, bias=False)
        nn.init.zeros_(model.weight)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        policy = AsyncDiLoCoPolicy(model, optimizer, average_every=1, late="wait", outer_optimizer=outer, correct=None)
        if is_resumed:
            await ad.load_population(tmp_path, model, optimizer, policy=policy)
        async with policy:
            for _ in range(1 if is_resumed else steps):
                await asyncio.sleep(0.003 * world.rank)
                with torch.no_grad():
                    model.weight.add_(0.0 if is_resumed else world.rank + 1.0)
                await policy.step()
            if not is_resumed:
                await ad.save_population(tmp_path, model, optimizer, policy=policy)
        return model.weight[0, 0].item()

    ad.simulate(main, False, ranks=2, seed=1, strict=True)
    resumed = ad.simulate(main, True, ranks=2, seed=1, strict=True).results
    assert resumed == (steps * (1.0 + 2.0),) * 2


@pytest.mark.parametrize("seed", in_ci(range(6), 0, 3, 5))
def test_a_leader_that_saves_before_others_keeps_its_momentum(seed: int, tmp_path: Path) -> None:
    """Regression: the leader saved its state, and then made versions for ranks that had not yet called the save."""
    network = Network(link=Link(latency_s=Uniform(1e-3, 0.03)))

    async def main(world: ad.World, first: int, last: int) -> AsyncDiLoCoStatistics:
        model, optimizer = made()
        policy = AsyncDiLoCoPolicy(model, optimizer, average_every=2, late="wait")
        if first:
            await ad.load_population(tmp_path, model, optimizer, policy=policy)
        async with policy:
            for step in range(first, last):
                await asyncio.sleep(0.02 * world.rank)
                await advance(policy, model, optimizer, range(step, step + 1), world.rank)
            if not first:
                await ad.save_population(tmp_path, model, optimizer, policy=policy)
        return policy.statistics()

    ad.simulate(main, 0, 10, ranks=3, seed=seed, network=network, strict=True)
    resumed = ad.simulate(main, 10, 20, ranks=3, seed=seed, network=network, strict=True).results
    assert [each.lost_outer_state_count for each in resumed] == [0, 0, 0]


@pytest.mark.parametrize(("first", "late"), [(0, "skip"), (0, "wait"), (1, "wait")])
def test_a_rank_with_an_older_checkpoint_contributes_again(first: int, late: str) -> None:
    """Regression: its contributions were ignored until their numbers were larger than those in the leader's anchor."""
    saved: dict[int, Any] = {}
    saves_at = {first: 100, 1 - first: 20}

    async def main(world: ad.World, is_resumed: bool) -> list[tuple[int, ...]]:
        model, optimizer = made()
        policy = AsyncDiLoCoPolicy(model, optimizer, average_every=5, late=late, quorum=2)
        if is_resumed:
            model.load_state_dict(saved[world.rank][0])
            policy.load_state_dict(saved[world.rank][1])
        found = []
        async with policy:
            for step in range(40 if is_resumed else 101):
                await asyncio.sleep(0.01)
                info = await policy.step()
                if info:
                    found.append(info.donors)
                if not is_resumed and step + 1 == saves_at[world.rank]:
                    await policy.settle()
                    saved[world.rank] = copy.deepcopy((model.state_dict(), policy.state_dict()))
        return found

    ad.simulate(main, False, ranks=2, seed=1)
    results = ad.simulate(main, True, ranks=2, seed=1).results
    assert sum(1 - first in donors for found in results for donors in found) >= 4, results
