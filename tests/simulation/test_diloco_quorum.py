"""Tests DiLoCo with a quorum: rounds do not wait for late ranks, and late ranks' differences count later."""

from __future__ import annotations

import asyncio
import dataclasses
import functools
import itertools
import json
import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from scripts.population import fill, sgd
from support.facts import naming
from support.seeds import in_ci, seeds
from torch import nn

import asyncdist as ad
from asyncdist.protocols.joining.membership import Membership
from asyncdist.simulation import Compute, Kill, Restart, simulate
from protocols import AsyncDiLoCoPolicy, AverageApplied, DiLoCoPolicy, SelectiveDiLoCoPolicy, StepInfo
from simulation.diloco_quorum_scenarios import LIMIT_S, Log, Plan, draw_slow_leader_plan, run, scenario

SGD = functools.partial(torch.optim.SGD, lr=0.5, momentum=0.5, nesterov=True)


@pytest.mark.parametrize("block", seeds(8))
def test_each_difference_counts_once_under_faults(block: int) -> None:
    for seed in range(block * 5, block * 5 + 5):
        try:
            scenario(seed)
        except AssertionError as error:
            raise AssertionError(f"seed {seed}: {error}") from error


@pytest.mark.parametrize("seed", [510240, 511211])
def test_a_message_to_a_rank_that_is_still_opening_is_kept(seed: int) -> None:
    """Regression: a member that ended at once sent a message to a member whose exchange was not complete."""
    scenario(seed)


def test_a_rank_that_has_ended_may_leave_without_the_last_means() -> None:
    """Regression: rank 2 ended after one step and was then stalled until the other ranks had left with their means.

    The scenario counted these means as lost, although rank 2 needed none of them, and its own difference had counted.
    """
    _, oracle = scenario(1626)
    assert oracle is not None and oracle.used[2, 0] == 1


def test_a_mean_of_three_may_be_the_last_ranks_difference() -> None:
    """Regression: the oracle lacked the rule that the mean of equal values is that value."""
    scenario(1863)


# -- late ranks in a script -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fragments", "late"), in_ci(itertools.product([1, 2], ["wait", "skip"]), (1, "wait"), (2, "skip"))
)
def test_scripted_late_ranks_equal_the_oracle_bit_for_bit(late: str, fragments: int) -> None:
    """Rank 3 is late in steps 10 to 17, rank 1 in steps 40 to 43; all factors are powers of two."""
    plan = Plan(steps=(110,) * 4, every=2, late=late, fragments=fragments, grace_s=0.004, outer="dyadic")
    plan = dataclasses.replace(plan, stops={3: (10, 17, 0.3), 1: (40, 43, 0.5)})
    logs, oracle = run(plan)
    assert oracle is not None and sum(map(max, oracle.anchors.values())) >= 50
    assert logs[0].late[3] >= 2 and logs[0].late[1] >= 2


def test_a_rank_that_stops_for_hundreds_of_rounds_catches_up() -> None:
    plan = Plan(steps=(400, 400, 400, 100), every=1, stops={3: (10, 10, 3.0)}, grace_s=0.002)
    logs, _ = run(plan)
    late = [info for info in infos_of(logs[3]) if info.staleness_versions]
    assert max(info.staleness_versions or 0 for info in late) > 200
    donors = [info.donors for info in infos_of(logs[3])]
    assert all(3 in each for each in donors[-50:]), "rank 3 must contribute in time again"


def infos_of(log: Log) -> list[StepInfo]:
    return [event.info for _, *events in log.events for event in events if isinstance(event, AverageApplied)]


def test_step_names_the_ranks_that_were_late() -> None:
    plan = Plan(steps=(8, 8, 8, 8), every=4, stops={2: (0, 3, 0.02)})
    logs, _ = run(plan)
    first = infos_of(logs[0])[0]
    assert first.donors == (0, 1, 3) and first.left_out == (2,)
    (own, *_) = infos_of(logs[2])
    assert own.round == 2 and 2 in own.donors and own.staleness_versions == 1


def test_a_grace_period_lets_a_late_rank_count() -> None:
    plan = Plan(steps=(8, 8, 8, 8), every=4, stops={2: (0, 3, 0.02)})
    with_grace = infos_of(run(dataclasses.replace(plan, grace_s=0.1))[0][0])[0]
    assert with_grace.donors == (0, 1, 2, 3) and not with_grace.left_out


@pytest.mark.parametrize("options", [{}, {"fragments": 2, "overlap_steps": 1}, {"mixing": 0.5}])
def test_a_quorum_of_all_ranks_changes_no_bit(options: dict[str, Any]) -> None:
    plan = Plan(steps=(24,) * 4, every=4, quorum=None, outer="default", stops={2: (3, 9, 0.05)}, **options)
    (without, _), (of_all, _) = run(plan), run(dataclasses.replace(plan, quorum=4))
    for rank in range(4):
        pairs = zip(without[rank].weights, of_all[rank].weights, strict=True)
        assert all((mine == theirs).all() for one, two in pairs for mine, theirs in zip(one, two, strict=True))
        assert without[rank].donors == of_all[rank].donors


# -- one slow rank ----------------------------------------------------------------------------------------------------


async def counts(world: ad.World, time_s: float, options: dict[str, Any] | None) -> tuple[int, int, list[int]]:
    """Return this rank's numbers of steps and averages in a fixed time, and its blocks of memory over time."""
    model = torch.nn.Linear(40, 40)
    torch.nn.init.constant_(model.weight, 1.0)
    torch.nn.init.constant_(model.bias, 0.0)
    optimizer, end = torch.optim.SGD(model.parameters(), 0.1), world.time() + time_s
    step_count = average_count = 0
    blocks: list[int] = []
    if options is None:
        while world.time() < end:
            await world.safe_point()
            step_count += 1
        return step_count, 0, blocks
    async with DiLoCoPolicy(model, optimizer, average_every=10, drain_timeout_s=1.0, **options) as policy:
        assert policy._exchange is not None
        transfers = policy._exchange._transfers
        while world.time() < end:
            average_count += bool(await policy.step())
            step_count += 1
            blocks.append(len(transfers._in_use) + sum(map(len, transfers._free.values())))
    return step_count, average_count, blocks


@functools.cache
def steps_alone(time_s: float, slow: int) -> tuple[int, ...]:
    """Return the steps that each rank makes in a fixed time without a policy, if one rank is 100 times slower."""
    compute = Compute(step_s=0.01, factors={slow: 100.0})
    return tuple(steps for steps, _, _ in simulate(counts, time_s, None, ranks=4, compute=compute).results)


@pytest.mark.parametrize("late", ["wait", "skip"])
def test_no_rank_waits_for_one_that_is_100_times_slower(late: str) -> None:
    """The slow rank lags by more than 100 rounds, and no rank's memory grows meanwhile."""
    compute = Compute(step_s=0.01, factors={3: 100.0})
    alone = steps_alone(15.0, 3)
    results = simulate(counts, 15.0, {"quorum": 3, "late": late}, ranks=4, compute=compute).results
    for rank in range(3):
        step_count, average_count, blocks = results[rank]
        assert step_count >= 0.98 * alone[rank]
        assert average_count >= 0.97 * alone[rank] / 10, "rounds must not have the slow rank's pace"
        assert max(blocks[500:]) <= max(blocks[:500]) <= 6
    assert results[3][1] >= 1, "the slow rank must take part"


def test_a_rank_that_leaves_before_others_are_done_says_so(caplog: pytest.LogCaptureFixture) -> None:
    compute = Compute(step_s=0.01, factors={3: 1000.0})
    with caplog.at_level(logging.WARNING, logger="protocols.exchange"):
        simulate(counts, 5.0, {"quorum": 3, "late": "wait"}, ranks=4, compute=compute)
    assert any("drain_timeout_s" in each.getMessage() for each in caplog.records)


@pytest.mark.parametrize("late", ["wait", pytest.param("skip", marks=pytest.mark.long)])
def test_a_leader_that_is_100_times_slower_abdicates(late: str) -> None:
    """Regression: rounds waited for the leader's steps, so that the others made a tenth of theirs."""
    compute = Compute(step_s=0.01, factors={0: 100.0})
    alone = steps_alone(40.0, 0)
    results = simulate(counts, 40.0, {"quorum": 3, "late": late}, ranks=4, compute=compute).results
    for rank in range(1, 4):
        step_count, average_count, _ = results[rank]
        assert step_count >= 0.9 * alone[rank]
        assert average_count >= 0.9 * alone[rank] / 10
    assert results[0][1] >= 1, "the slow rank must take part"


def abdications(plan: Plan, seed: int, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Run a plan against the oracle, and return the ranks that have abdicated."""
    found: list[int] = []
    abdicate = Membership.abdicate

    def note(self: Membership) -> None:
        found.append(self._services.rank)
        abdicate(self)

    monkeypatch.setattr(Membership, "abdicate", note)
    run(plan, seed)
    return found


def test_slow_leaders_abdicate_in_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks 0 and 1 are slow, rank 2 follows them and is lost, and the others continue."""
    stops = {0: (0, 100, 0.3), 1: (0, 100, 0.4)}
    plan = Plan(ranks=5, steps=(14, 12, 300, 300, 300), every=2, quorum=2, stops=stops, faults=(Kill(2, at_s=4.5),))
    assert abdications(plan, 0, monkeypatch)[:2] == [0, 1]


@pytest.mark.parametrize("quorum", in_ci([1, 2, 3], 2))
def test_equally_fast_ranks_seldom_abdicate(quorum: int, monkeypatch: pytest.MonkeyPatch) -> None:
    assert len(abdications(Plan(steps=(80,) * 4, every=2, quorum=quorum), 0, monkeypatch)) <= 1


@pytest.mark.parametrize("block", seeds(6))
def test_no_fault_beside_slow_leaders_counts_a_difference_twice(block: int) -> None:
    for seed in range(block * 5, block * 5 + 5):
        try:
            run(draw_slow_leader_plan(seed), seed)
        except AssertionError as error:
            raise AssertionError(f"seed {seed}: {error}") from error


# -- losses, restarts, saved states -----------------------------------------------------------------------------------


@pytest.mark.parametrize("lost", [0, 1])
def test_a_loss_during_the_grace_period_does_not_end_the_round(lost: int) -> None:
    """Ranks 0 to 2 have contributed at 0.042 s, and the grace period is half over when the leader, or a donor, dies."""
    plan = Plan(
        steps=(12,) * 4, every=4, stops={3: (0, 3, 0.3)}, quorum=2, grace_s=0.2, faults=(Kill(lost, at_s=0.14),)
    )
    logs, oracle = run(plan)
    assert oracle is not None
    first = infos_of(logs[2])[0]
    assert first.donors == tuple(sorted({0, 1, 2} - {lost})) and 3 in first.left_out


@pytest.mark.parametrize("slow", [3, 0])
def test_a_restarted_rank_joins_beside_a_slow_rank(slow: int) -> None:
    """Regression: the leader waited to admit until the slow rank had all means, while the others made new ones.

    A slow leader abdicates only after it has admitted the rank that has asked it.
    """
    rounds: dict[tuple[int, int], list[int]] = {}
    versions: dict[tuple[int, int], list[torch.Tensor]] = {}

    async def main(world: ad.World) -> None:
        model = torch.nn.Linear(3, 3, dtype=torch.float64)
        for parameter in model.parameters():
            torch.nn.init.constant_(parameter, 1.0)
        own = rounds.setdefault((world.rank, world.incarnation), [])
        options: dict[str, Any] = {"quorum": 2, "grace_s": 0.005, "outer_optimizer": SGD, "drain_timeout_s": 60.0}
        async with DiLoCoPolicy(model, torch.optim.SGD(model.parameters(), 0.1), average_every=2, **options) as policy:
            while policy.iteration < (12 if world.rank == slow else 200):
                with torch.no_grad():
                    model.weight.add_((world.rank + 1) / 64)
                await asyncio.sleep(0.5 if world.rank == slow else 0.01)
                if info := await policy.step():
                    own.append(info.round)
                    anchors = [anchor.clone() for anchor in policy._fragments[0].anchors]
                    expected = versions.setdefault((0, info.version), anchors)
                    assert all(map(torch.equal, expected, anchors)), f"the anchors of version {info.version} differ"

    faults = (Kill(1, at_s=0.1), Restart(1, at_s=0.15))
    simulate(main, ranks=4, faults=faults, until_s=LIMIT_S).value()
    assert len(rounds[1, 1]) > 10 and rounds[1, 1] == sorted(set(rounds[1, 1]))


@pytest.mark.parametrize(
    ("ranks", "late"), in_ci([(3, "wait"), (3, "skip"), (2, "wait"), (2, "skip")], (3, "skip"), (2, "wait"))
)
def test_a_saved_state_continues_although_a_rank_was_late(ranks: int, late: str, tmp_path: Path) -> None:
    """Rank 2 is behind when the ranks save; it has a base and an old anchor.

    Regression: as many ranks as the quorum could not resume.
    """

    async def main(world: ad.World, end: int, slow_s: float) -> tuple[int, list[float]]:
        model = torch.nn.Linear(2, 1, bias=False, dtype=torch.float64)
        torch.nn.init.constant_(model.weight, 1.0)
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        options: dict[str, Any] = {"quorum": 2, "grace_s": 0.01, "late": late, "outer_optimizer": SGD}
        policy = DiLoCoPolicy(model, optimizer, average_every=4, **options)
        if end > 12:
            await ad.load_population(tmp_path, model, optimizer, policy=policy)
        async with policy:
            while policy.iteration < (6 if world.rank == 2 and end == 12 else end):
                with torch.no_grad():
                    model.weight.add_((world.rank + 1) / 64)
                await asyncio.sleep(slow_s if world.rank == 2 else 0.01)
                await policy.step()
            await policy.settle()
            await ad.save_population(tmp_path, model, optimizer, policy=policy)
            version = policy._fragments[0].version
        return version, [value for anchor in policy._fragments[0].anchors for value in anchor.tolist()]

    first = simulate(main, 12, 0.2, ranks=3, until_s=LIMIT_S).results
    assert first[0][0] == first[1][0] >= 3
    if ranks == 2:  # the two ranks with the best metrics continue
        (manifest,) = tmp_path.glob("*/manifest.json")
        facts = json.loads(manifest.read_text())
        for entry, metric in zip(facts["files"], (1.0, 0.0, 2.0), strict=True):
            entry["metric"] = metric
        manifest.write_text(json.dumps(facts))
    second = simulate(main, 32, 0.01, ranks=ranks, until_s=LIMIT_S).results
    newest = max(version for version, _ in second)
    assert newest >= first[0][0] + 4
    anchors = [anchor for version, anchor in second if version == newest]
    assert len(anchors) >= 2 and all(anchor == anchors[0] for anchor in anchors)


@pytest.mark.parametrize("kind", [DiLoCoPolicy, AsyncDiLoCoPolicy])
def test_ranks_that_settle_may_wait_for_a_late_rank(kind: type[DiLoCoPolicy] | type[AsyncDiLoCoPolicy]) -> None:
    """Without the call of settle, rank 2 waits for a quorum, and the others wait for rank 2 in the barrier."""

    async def main(world: ad.World, settles: bool) -> int:
        model, count = torch.nn.Linear(2, 1, bias=False), 0
        torch.nn.init.constant_(model.weight, 1.0)
        async with kind(
            model, torch.optim.SGD(model.parameters(), 0.1), average_every=4, quorum=2, late="wait"
        ) as policy:
            for step in range(40):
                await asyncio.sleep(0.01 * (1 + world.rank))
                count += bool(await policy.step())
                if step % 5 == 4:
                    if settles:
                        await policy.settle()
                    await ad.barrier()
        return count

    assert min(simulate(main, True, ranks=3, seed=1, until_s=LIMIT_S).results) >= 8
    with pytest.raises(ad.DeadlockError):
        simulate(main, False, ranks=3, seed=1, until_s=LIMIT_S).value()


# -- selective DiLoCo -------------------------------------------------------------------------------------------------


def test_selective_diloco_chooses_among_the_ranks_in_time() -> None:
    infos: dict[int, list[StepInfo]] = {}

    async def main(world: ad.World) -> None:
        model = torch.nn.Linear(1, 1, bias=False)
        torch.nn.init.constant_(model.weight, 1.0)
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        options: dict[str, Any] = {"quorum": 3, "outer_optimizer": functools.partial(torch.optim.SGD, lr=1.0)}
        async with SelectiveDiLoCoPolicy(model, optimizer, average_every=4, **options) as policy:
            for _ in range(6 if world.rank == 3 else 16):
                with torch.no_grad():
                    model.weight.add_(0.125 if world.rank == 1 else -0.125)  # rank 1 moves away from 0
                await asyncio.sleep(0.05 if world.rank == 3 else 0.01)
                info = await policy.step(loss=lambda: model.weight.abs().item())
                if info:
                    infos.setdefault(world.rank, []).append(info)

    simulate(main, ranks=4, until_s=LIMIT_S).value()
    first = infos[0][0]
    assert first.donors == (0, 2) and first.left_out == (1, 3)
    assert infos[3][0].staleness_versions and infos[3][0].round > 1


# -- wrong options ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("quorum", [5, 100])
def test_a_quorum_above_the_number_of_members_is_refused(quorum: int) -> None:
    async def main(_: ad.World) -> None:
        model = torch.nn.Linear(1, 1)
        async with DiLoCoPolicy(model, torch.optim.SGD(model.parameters()), average_every=4, quorum=quorum):
            raise AssertionError("it started")

    with pytest.raises(ValueError, match=naming("quorum", "from 1 to the number of members (4)", str(quorum))):
        simulate(main, ranks=4).value()


def test_ranks_with_different_quorums_are_told_apart() -> None:
    async def main(world: ad.World) -> None:
        model = torch.nn.Linear(1, 1)
        torch.nn.init.constant_(model.weight, 1.0)
        torch.nn.init.constant_(model.bias, 1.0)
        optimizer = torch.optim.SGD(model.parameters())
        async with DiLoCoPolicy(model, optimizer, average_every=4, quorum=2 + world.rank % 2):
            raise AssertionError("it started")

    with pytest.raises(ad.AsyncdistError, match="quorum"):
        simulate(main, ranks=4).value()


@pytest.mark.parametrize("seed", seeds(24))
@pytest.mark.parametrize(
    "options",
    in_ci([{}, {"quorum": 2, "late": "skip"}, {"fragments": 2}], {"quorum": 2, "late": "skip"}, {"fragments": 2}),
    ids=str,
)
def test_a_rank_that_settles_early_holds_nobody(seed: int, options: dict[str, Any]) -> None:
    """Regression: with several fragments, the others waited forever for a rank that had called settle()."""

    async def main(world: ad.World) -> int:
        model = nn.Sequential(nn.Linear(8, 4), nn.Linear(4, 1))
        fill(model, 1.0)
        async with DiLoCoPolicy(model, sgd(model), average_every=5, **{"quorum": 3, **options}) as policy:
            for step in range(40):
                fill(model, world.rank + step / 64)
                await policy.step()
                if step in (24, 39):
                    await policy.settle()
                    await ad.barrier()
        return policy.iteration

    compute = Compute(step_s=0.01, factors={3: 1.7})
    assert simulate(main, ranks=4, seed=seed, compute=compute).results == (40, 40, 40, 40)
