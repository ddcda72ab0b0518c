"""Tests starts that several tasks of a rank request at once, in a different order on each rank."""

from __future__ import annotations

import asyncio
import itertools
import random
import time
from typing import Any

import pytest
import torch

import asyncdist as ad
from asyncdist import World
from asyncdist.errors import AsyncdistError
from protocols import AverageAllPolicy, OneSidedSelectiveAveragingPolicy

LISTS = ([0, 1], [1, 0], [0, 1, 2], [2, 1], [1, 2], [2, 0, 1])


def nothing_is_kept(world: World) -> bool:
    agreements = world.agreements
    return not (agreements.led.joins or agreements._verdicts or len(agreements.led.over) or agreements._ahead)


def test_groups_that_tasks_ask_for_in_any_order_are_made() -> None:
    """Regression: two ranks got an error for waiting for each other, though each was about to continue."""

    async def main(world: World, orders: list[list[int]]) -> tuple[Any, ...]:
        lists = [LISTS[i] for i in orders[world.rank] if world.rank in LISTS[i]]
        groups = await asyncio.gather(*(world.new_group(ranks) for ranks in lists))
        assert len({group.tag for group in groups}) == len(lists)
        await asyncio.gather(*(ad.barrier(group=group) for group in groups))
        assert nothing_is_kept(world)
        return tuple(sorted((group.ranks, group.number) for group in groups))

    orders = list(itertools.permutations(range(len(LISTS))))
    for seed in range(60):
        chosen = [orders[(seed * 251 * (rank + 1) + rank * 97) % len(orders)] for rank in range(3)]
        report = ad.simulate(main, chosen, ranks=3, seed=seed, strict=True)
        assert report.virtual_time_s < 0.1
        numbers: dict[Any, set[str]] = {}
        for ranks, number in itertools.chain(*report.results):
            numbers.setdefault(ranks, set()).add(number)
        assert all(len(found) == 1 for found in numbers.values()) and len(numbers) == len(LISTS)


@pytest.mark.parametrize("leaders", [([0, 1], [1, 0]), ([1, 0], [0, 1])], ids=str)
def test_ranks_that_wait_for_a_leader_that_has_not_come_go_on(leaders: tuple[list[int], list[int]]) -> None:
    """Regression: each rank waited a minute for the decision on a group that the other rank leads."""

    async def main(world: World) -> float:
        lists = leaders if world.rank == 0 else leaders[::-1]
        await asyncio.gather(*map(world.new_group, lists))
        return world.time()

    report = ad.simulate(main, ranks=2, strict=True)
    assert report.virtual_time_s < 0.1


def test_differing_lists_are_reported_to_ranks_awaiting_a_leader() -> None:
    async def main(world: World) -> None:
        with pytest.raises(ad.DisagreementError):
            await world.new_group([1, 0] if world.rank == 0 else [0, 1])

    assert ad.simulate(main, ranks=2, strict=True).virtual_time_s < 5


def test_rank_late_for_one_group_awaits_one_late_for_another() -> None:
    """Regression: rank 1 waited for rank 2 in one group only, but rank 2's error said that each waits for the other."""

    async def main(world: World) -> None:
        async def make(ranks: list[int], late: int, late_s: float) -> None:
            if world.rank == late:
                await asyncio.sleep(late_s)
            if world.rank in ranks:
                await ad.new_group(ranks)

        await asyncio.gather(make([0, 1, 2], 0, 10), make([1, 2], 2, 5))

    for seed in range(10):
        assert ad.simulate(main, ranks=3, seed=seed, strict=True).results == (None,) * 3


@pytest.mark.parametrize("how", ["cancelled", "time is up"])
@pytest.mark.parametrize("rank", [0, 1])
def test_a_start_that_is_postponed_may_be_given_up_at_any_moment(rank: int, how: str) -> None:
    """Another start of its kind is made afterwards, and nothing of the abandoned one is kept."""

    async def main(world: World, at_s: float) -> tuple[list[str], str]:
        lists = [[0, 1, 2], [1, 0]] if world.rank == 0 else [[1, 0], [0, 1, 2]]
        starts = []
        for ranks in lists if world.rank < 2 else [[0, 1, 2]]:
            gives_up = world.rank == rank and ranks == [1, 0]
            timeout_s = at_s if gives_up and how == "time is up" else 60
            starts.append(asyncio.ensure_future(world.new_group(ranks, timeout_s=timeout_s)))
            if gives_up and how == "cancelled":
                asyncio.get_running_loop().call_later(at_s, starts[-1].cancel)
        if world.rank == 2:
            await world.sleep(3)  # the first start is postponed, and waits for this rank
        found = await asyncio.gather(*starts, return_exceptions=True)
        again = await world.new_group([1, 0]) if world.rank < 2 else await world.new_group([2])
        await ad.barrier()
        assert nothing_is_kept(world), (world.rank, vars(world.agreements))
        came_to = sorted(type(one).__name__ for one in found)
        return came_to, again.number if world.rank < 2 else ""

    for seed, at_s in enumerate([0.5, 0.999, *(1 + i * 2e-5 for i in range(15)), 1.001, 1.5, 2.9, 3.0, 3.0005]):
        report = ad.simulate(main, at_s, ranks=3, seed=seed, strict=True)
        assert report.results[0][1] == report.results[1][1]
        assert report.results[2][0] == ["Group"]


@pytest.mark.parametrize("blocked_s", [2, 20])
def test_rank_blocked_past_its_timeout_gets_the_others_group(blocked_s: float) -> None:
    """Regression: its error said that some ranks had not finished other starts; the others had a group without it."""

    async def main(world: World, moment_s: float) -> str:
        if world.rank == 0:
            await world.sleep(0.5)
            return (await world.new_group([0, 1])).number
        start = asyncio.ensure_future(world.new_group([0, 1], timeout_s=1))
        await world.sleep(moment_s)
        time.sleep(blocked_s)  # noqa: ASYNC251 - it computes
        return (await start).number

    for step in range(25):
        report = ad.simulate(main, 0.5 + step * 4e-6, ranks=2, seed=step, strict=True)
        assert isinstance(report.value(), str) and len(set(report.results)) == 1


def test_policies_entered_in_overlapping_groups_all_start() -> None:
    """Regression: the policies' groups were requested in a different order on each rank."""

    async def train(world: World, group: ad.Group, kind: Any, value: float) -> float:
        model = torch.nn.Linear(1, 1, bias=False)
        torch.nn.init.constant_(model.weight, value)
        async with kind(model, torch.optim.SGD(model.parameters()), average_every=1, group=group) as policy:
            await policy.step(1.0)
        return float(model.weight.detach())

    async def main(world: World) -> list[float]:
        lists = ([0, 1, 2], [2, 1], [1, 0])
        groups = [await world.new_group(ranks) for ranks in lists if world.rank in ranks]
        jobs = [
            train(world, group, kind, float(world.rank))
            for group in groups
            for kind in (AverageAllPolicy, OneSidedSelectiveAveragingPolicy)
        ]
        found = await asyncio.gather(*jobs)
        return found[::2]

    for seed in range(20):
        results = ad.simulate(main, ranks=3, seed=seed).results
        assert results == ([1.0, 0.5], [1.0, 1.5, 0.5], [1.0, 1.5]), seed


def test_tasks_that_make_groups_in_turn_do_not_await_each_other() -> None:
    """Regression: a third of these runs timed out, or reported that ranks wait for each other.

    A rank waited in a group that the others would make only after a second group, in which they waited for this rank.
    """

    def sequences(rng: random.Random) -> list[list[tuple[int, ...]]]:
        lists = {tuple(sorted(rng.sample(range(4), rng.randint(2, 4)))) for _ in range(10)}
        order = rng.sample(sorted(lists), len(lists))
        return [order[first::3] for first in range(3)]

    async def main(world: World, seed: int) -> dict[tuple[int, ...], str]:
        made = {}
        delays = random.Random(f"{seed} {world.rank}")

        async def task(lists: list[tuple[int, ...]]) -> None:
            for ranks in lists:
                if world.rank in ranks:
                    await world.sleep(delays.random() / 1000)
                    group = await world.new_group(ranks)
                    await ad.barrier(group=group)
                    made[ranks] = group.number

        await asyncio.gather(*map(task, sequences(random.Random(seed))))
        await ad.barrier()
        assert nothing_is_kept(world)
        return made

    for seed in range(40):
        report = ad.simulate(main, seed, ranks=4, seed=seed, strict=True)
        numbers: dict[Any, str] = {}
        for made in report.results:
            assert all(numbers.setdefault(ranks, number) == number for ranks, number in made.items())
        assert report.virtual_time_s < 0.5, seed


def test_error_of_one_start_ends_the_start_postponed_behind_it() -> None:
    async def main(world: World) -> list[str]:
        lists = [[0, 1, 2], [1, 0]] if world.rank == 0 else [[1, 0], [0, 1, 2]]
        starts = [world.new_group(ranks, timeout_s=5) for ranks in lists if world.rank < 2]
        found = await asyncio.gather(*starts, return_exceptions=True)
        assert all(isinstance(one, (ad.Group, AsyncdistError)) for one in found)
        return [type(one).__name__ for one in found]

    first, second, _ = ad.simulate(main, ranks=3, strict=True).results
    assert first == second[::-1]


def test_concurrent_tasks_get_the_same_group_on_all_ranks() -> None:
    """Regression: a policy's group on one rank was a mesh's group on another rank."""

    async def main(world: World, order: list[list[int]]) -> dict[str, str]:
        async def late(i: int, start: Any) -> Any:
            await world.sleep(0.0003 * order[world.rank][i])
            return await start()

        async def policy() -> AverageAllPolicy:
            model = torch.nn.Linear(1, 1)
            made = AverageAllPolicy(model, torch.optim.SGD(model.parameters()), average_every=1)
            return await made.__aenter__()

        starts = [
            lambda: ad.new_mesh({"POP": 2, "DP": 2}),
            lambda: ad.new_parallel_groups(2),
            lambda: ad.new_group(range(4)),
            policy,
        ]
        mesh, parallel, group, average = await asyncio.gather(*(late(i, one) for i, one in enumerate(starts)))
        found = {
            "DP": mesh.axis("DP").group,
            "model": parallel.model,
            "POP": mesh.axis("POP").group,
            "data": parallel.data,
            "group": group,
            "policy": average._own_group,
        }
        assert len({one.key for one in found.values()}) == len(found)
        await average.__aexit__(None, None, None)
        for one in (mesh, group, parallel.model, parallel.pipeline, parallel.data):
            await one.free()
        await ad.barrier()
        await world.sleep(1)
        assert nothing_is_kept(world) and not world.peers.groups.ledger.numbers_in_use()
        assert not [key for key in world.agreements._counts if key.subject.startswith("new group for")]
        return {name: one.number for name, one in found.items()}

    for seed in range(12):
        order = [[(seed * 7 + rank * 3 + i * (rank + 1)) % 5 for i in range(5)] for rank in range(4)]
        results = ad.simulate(main, order, ranks=4, seed=seed, strict=True).results
        for name, pairs in {
            "DP": (0, 1, 2, 3),
            "model": (0, 1, 2, 3),
            "POP": (0, 2, 1, 3),
            "data": (0, 2, 1, 3),
        }.items():
            numbers = [results[rank][name] for rank in pairs]
            assert numbers[::2] == numbers[1::2], (seed, name)
        for name in ("group", "policy"):
            assert len({found[name] for found in results}) == 1, (seed, name)
