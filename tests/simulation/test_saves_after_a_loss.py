"""Tests saving a population after the loss of a rank, and loading it on a restarted rank."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from support.seeds import in_ci
from torch import nn

import asyncdist as ad
from asyncdist.simulation import Fault, Kill, Network, Restart, simulate
from protocols import DiLoCoPolicy

RANKS, LOST, STEPS = 4, 0, 60
SURVIVORS = [1, 2, 3]
LOSS = Kill(LOST, at_s=0.105)


def made() -> tuple[torch.nn.Linear, torch.optim.Optimizer, DiLoCoPolicy]:
    torch.manual_seed(0)
    model = torch.nn.Linear(3, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return model, optimizer, DiLoCoPolicy(model, optimizer, average_every=5)


def saved_ranks(folder: Path) -> list[int]:
    return [entry["rank"] for entry in json.loads((folder / "manifest.json").read_text())["files"]]


async def train(world: ad.World, folder: Path, save_beside: bool = False) -> list[float]:
    """Train, save every 10 steps, and return the weights at the last save."""
    model, optimizer, policy = made()
    with contextlib.suppress(FileNotFoundError):
        await ad.load_population(folder, model, optimizer, policy=policy)
    save = ad.async_save_population if save_beside else ad.save_population
    pending: list[ad.PendingSave] = []
    async with policy:
        while policy.iteration < STEPS:
            with torch.no_grad():
                model.weight += 0.01 * (world.rank + 1)
            await world.sleep(0.01)
            await policy.step()
            if policy.iteration % 10 == 0:
                found = await save(folder, model, optimizer, policy=policy, extra=policy.iteration)
                pending = [] if isinstance(found, Path) else [found]
        for each in pending:
            await each
    return model.weight.flatten().tolist()


@pytest.mark.parametrize(
    ("detection_s", "save_beside"), in_ci(itertools.product([0.0, 0.15], [False, True]), (0.0, True), (0.15, False))
)
def test_survivors_save_and_a_new_job_loads(tmp_path: Path, detection_s: float, save_beside: bool) -> None:
    """Regression: the first save after a loss raised RankLostError unless it had a group."""
    network = Network(loss_detection_s=detection_s)
    report = simulate(train, tmp_path, save_beside, ranks=RANKS, seed=1, faults=[LOSS], network=network)
    weights = [report.results[rank] for rank in SURVIVORS]
    assert all(weights), report
    newest = max(tmp_path.glob("checkpoint-*"))
    assert saved_ranks(newest) == SURVIVORS

    async def load(world: ad.World) -> tuple[list[float], int, int]:
        model, optimizer, policy = made()
        found = await ad.load_population(tmp_path, model, optimizer, policy=policy)
        return model.weight.flatten().tolist(), found.extra, policy.iteration

    loaded = simulate(load, ranks=len(SURVIVORS), seed=2, strict=True).results
    assert list(loaded) == [(each, STEPS, STEPS) for each in weights]


@pytest.mark.parametrize("block", [0, *(pytest.param(block, marks=pytest.mark.long) for block in (1, 2, 3))])
def test_survivors_load_whenever_a_rank_is_lost(block: int, tmp_path: Path) -> None:
    """Regression: a loss before or during ``load_population`` ended the job. A rank is killed at each of 120 turns."""
    simulate(train, tmp_path, ranks=RANKS, seed=1, strict=True).value()

    async def resume(world: ad.World) -> tuple[int, int]:
        model, optimizer, policy = made()
        found = await ad.load_population(tmp_path, model, optimizer, policy=policy)
        async with policy:
            while policy.iteration < STEPS + 10:
                await policy.step()
        return found.source, policy.iteration

    for turn in range(1 + block, 121, 4):
        lost = turn // 4 % RANKS
        network = Network(loss_detection_s=0.0 if turn % 8 < 4 else 0.002)
        report = simulate(resume, ranks=RANKS, seed=turn, faults=[Kill(lost, at_turn=turn)], network=network)
        for rank, result in enumerate(report.results):
            if rank != lost:
                assert isinstance(result, tuple) and result[1] == STEPS + 10, (turn, report.results)


def test_a_given_group_that_lost_a_member_is_refused(tmp_path: Path) -> None:
    async def main(world: ad.World) -> str:
        model, optimizer, _ = made()
        async with await ad.new_group(range(RANKS)) as group:
            await world.sleep(1.0)
            with pytest.raises(ad.RankLostError) as caught:
                await ad.save_population(tmp_path, model, optimizer, group=group)
        with pytest.raises(ad.RankLostError) as of_all:
            await ad.average_models(model)
        assert caught.value.rank == of_all.value.rank == LOST
        assert "Pass await ad.surviving_group(group) as the group of this call" in str(caught.value)
        return str(of_all.value)

    texts = simulate(main, ranks=RANKS, seed=1, faults=[LOSS]).results
    expected = "the group [0, 1, 2, 3]. Pass await ad.surviving_group() as the group of this call"
    assert all(expected in texts[rank] for rank in SURVIVORS)


@pytest.mark.parametrize(("prepare_s", "restart_s"), in_ci([(0.0, 0.25), (0.3, 0.11)], (0.3, 0.11)))
def test_a_restarted_rank_joins_without_loading(tmp_path: Path, prepare_s: float, restart_s: float) -> None:
    """Regression: its ``load_population`` raised RankLostError, although the named rank was alive.

    The others save without waiting for it, even while it prepares its data.
    """

    async def main(world: ad.World, end: int) -> tuple[int, int, Path]:
        model, optimizer, policy = made()
        with contextlib.suppress(FileNotFoundError):
            await ad.load_population(tmp_path, model, optimizer, policy=policy)
        if world.incarnation:
            await world.sleep(prepare_s)
        async with policy:
            begun, folder = policy.iteration, Path()
            while policy.iteration < end:
                await world.sleep(0.01)
                await policy.step()
                if policy.iteration % 10 == 0:
                    folder = await ad.save_population(tmp_path, model, optimizer, policy=policy)
        return world.incarnation, begun, folder

    first = simulate(main, 10, ranks=RANKS, seed=1, strict=True)
    assert first.results == ((0, 0, tmp_path / "checkpoint-000001"),) * RANKS
    faults: list[Fault] = [LOSS, Restart(LOST, at_s=restart_s)]
    results = simulate(main, 2 * STEPS, ranks=RANKS, seed=1, faults=faults, network=Network()).results
    newest = max(tmp_path.glob("checkpoint-*"))
    assert results[1:] == ((0, 10, newest),) * len(SURVIVORS)
    assert saved_ranks(newest) == SURVIVORS
    incarnation, begun, folder = results[LOST]
    assert incarnation == 1 and begun > 10 and folder in (tmp_path, newest)


class OwnPolicy:
    """An object whose state may change between two steps, as that of a policy."""

    def __init__(self, *, settles_s: float = 0.0, freezes_s: float = 0.0, uses_barrier: bool = False) -> None:
        self.settles_s, self.freezes_s, self.uses_barrier = settles_s, freezes_s, uses_barrier
        self.freeze_count = 0

    def state_dict(self) -> dict[str, Any]:
        return {}

    async def settle(self) -> None:
        if self.uses_barrier:
            await ad.barrier()
        await asyncio.sleep(self.settles_s)

    async def freeze_state(self) -> None:
        self.freeze_count += 1
        await asyncio.sleep(self.freezes_s)

    def unfreeze_state(self) -> None:
        self.freeze_count -= 1


async def outcome_of_save(policy: OwnPolicy, path: Path, timeout_s: float | None = None) -> str:
    try:
        async with asyncio.timeout(timeout_s):
            return (await ad.save_population(path, nn.Linear(2, 2), policy=policy)).name
    except (ad.AsyncdistError, TimeoutError) as error:
        return type(error).__name__


def test_a_rank_that_is_lost_while_states_are_taken_is_left_out(tmp_path: Path) -> None:
    async def main(world: ad.World) -> tuple[str, int]:
        policy = OwnPolicy(freezes_s=0.5)
        return await outcome_of_save(policy, tmp_path), policy.freeze_count

    report = ad.simulate(main, ranks=3, seed=1, faults=[Kill(2, at_s=0.2)], until_s=100.0)
    assert report.results == (("checkpoint-000001", 0), ("checkpoint-000001", 0), None)


def test_a_policy_whose_settle_fails_by_a_loss_ends_the_save(tmp_path: Path) -> None:
    async def main(world: ad.World) -> str:
        await asyncio.sleep(0.1 if world.rank != 2 else 10.0)
        return await outcome_of_save(OwnPolicy(uses_barrier=True), tmp_path)

    report = ad.simulate(main, ranks=3, seed=1, faults=[Kill(2, at_s=0.3)], until_s=100.0)
    assert report.results == ("RankLostError", "RankLostError", None)


def test_a_cancelled_save_after_a_loss_does_not_wait_for_others(tmp_path: Path) -> None:
    async def main(world: ad.World) -> float:
        await asyncio.sleep(0.5)
        if world.rank == 0:
            assert await outcome_of_save(OwnPolicy(settles_s=1e6), tmp_path, timeout_s=2.0) == "TimeoutError"
            return world.time()
        await asyncio.sleep(100.0)
        return 0.0

    report = ad.simulate(main, ranks=3, seed=1, faults=[Kill(2, at_s=0.2)], until_s=1000.0)
    assert report.results[0] == pytest.approx(2.5, abs=0.1)


@pytest.mark.parametrize("is_cancelled", [False, True])
def test_survivors_are_notified_of_an_error_of_settle(is_cancelled: bool, tmp_path: Path) -> None:
    """Regression: the failed rank did not join the other survivors, which waited for it for 60 seconds."""

    class Fails:
        is_failing = True

        def state_dict(self) -> dict[str, Any]:
            return {}

        async def settle(self) -> None:
            if self.is_failing and ad.current_world().rank == 1:
                if is_cancelled:
                    await asyncio.sleep(1e9)
                raise ad.BusyError("the policy is busy")

    async def main(world: ad.World) -> tuple[str, float, list[int]]:
        await world.sleep(1.0 + 0.1 * world.rank)
        policy, model, began_at = Fails(), made()[0], world.time()
        found = "nothing"
        try:
            async with asyncio.timeout(0.5 if world.rank == 1 else None):
                await ad.save_population(tmp_path, model, policy=policy)
        except (ad.AsyncdistError, TimeoutError) as error:
            found = f"{type(error).__name__}: {error}"
        took_s = world.time() - began_at
        async with await ad.surviving_group() as group:
            assert group.ranks == tuple(SURVIVORS), "later starts are the same on all ranks"
        policy.is_failing = False
        return found, took_s, saved_ranks(await ad.save_population(tmp_path, model, policy=policy))

    results = simulate(main, ranks=RANKS, seed=1, faults=[LOSS], network=Network()).results
    (first, _, _), *others = (results[rank] for rank in SURVIVORS)
    assert first.startswith("TimeoutError" if is_cancelled else "BusyError"), first
    for found, took_s, saved in others:
        assert ("CancelledError" if is_cancelled else "BusyError") in found and found.startswith("RemoteError"), found
        assert took_s < 2.0 and saved == SURVIVORS
