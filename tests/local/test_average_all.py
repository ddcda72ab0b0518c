"""Tests ``AverageAllPolicy``, and the behaviour that all policies share through ``SpawnPolicy``."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
import torch
from scripts.population import (
    Mixed,
    clone_state,
    equal_states,
    fill,
    identity,
    sgd,
    values,
)
from support.local import run
from support.policies import fill_gradients

import asyncdist as ad
from protocols import (
    AverageAllPolicy,
    SpawnPolicy,
    StepInfo,
)

# -- AverageAllPolicy -------------------------------------------------------------------------------------------------


def test_average_all_gives_the_mean_and_the_first_ranks_integers() -> None:
    events: list[Any] = []

    async def main(world: ad.World) -> tuple[set[float], set[float], list[StepInfo]]:
        model = Mixed(float(world.rank + 1))
        optimizer = sgd(model, momentum=0.9)
        objects = identity(model)
        infos = []
        async with AverageAllPolicy(
            model, optimizer, average_every=3, on_event=events.append if world.rank == 1 else None
        ) as policy:
            infos += [await policy.step(world.rank) for _ in range(9)]
        assert identity(model) == objects
        return values(model, floating=True), values(model, floating=False), infos

    results = run(main, 4)
    for floating, integers, infos in results:
        assert floating == {2.5} and integers == {1.0}
        assert [bool(info) for info in infos] == [False, False, True] * 3
        assert infos[2].donors == (0, 1, 2, 3) and infos[2].weights == (0.25,) * 4 and infos[2].round == 1
    assert [event.round for event in events] == [1, 2, 3] and events[0].best == 0


def test_average_all_statistics_count_averages_and_print_a_table() -> None:
    async def main(world: ad.World) -> str:
        model = Mixed(float(world.rank))
        async with AverageAllPolicy(model, sgd(model), average_every=3, name="all") as policy:
            for _ in range(7):
                await policy.step()
        statistics = policy.statistics()
        assert (statistics.iteration, statistics.average_count) == (7, 2)
        assert statistics.nbytes > 0 and statistics.nbytes % 2 == 0
        assert statistics.seconds >= 0.0
        return str(statistics)

    for rank, text in enumerate(run(main, 2)):
        title, *lines = text.splitlines()
        assert title == f"AverageAllPolicy 'all', rank {rank}"
        assert [line.split() for line in lines[:2]] == [["iteration", "7"], ["averages", "applied", "2"]]


def test_average_all_on_a_sub_group_divides_by_its_size() -> None:
    async def main(world: ad.World) -> set[float]:
        model = Mixed(float(world.rank))
        if world.rank in (1, 2, 4):
            group = await ad.new_group([1, 2, 4])
            async with AverageAllPolicy(model, sgd(model), average_every=1, group=group) as policy:
                await policy.step()
        return values(model, floating=True)

    third = {float(torch.tensor(7.0) / torch.tensor(3.0)), 7.0 / 3.0}
    assert run(main, 5) == [{0.0}, third, third, {3.0}, third]


@pytest.mark.parametrize("leaver", range(3))
def test_average_all_tells_the_others_who_has_left(leaver: int) -> None:
    async def main(world: ad.World) -> str:
        model = Mixed(float(world.rank))
        async with AverageAllPolicy(model, sgd(model), average_every=1) as policy:
            for _ in range(2 if world.rank == leaver else 5):
                try:
                    await policy.step()
                except ad.ClosedError as error:
                    return str(error)
        return ""

    texts = run(main, 3)
    assert texts[leaver] == ""
    heard = [text for rank, text in enumerate(texts) if rank != leaver]
    assert f"rank {leaver} left" in heard[0] and all("left" in text for text in heard), heard


def test_average_all_members_learn_which_rank_left_and_trains_on() -> None:
    heard: list[str] = []

    async def main(world: ad.World) -> None:
        model = Mixed(float(world.rank))
        async with AverageAllPolicy(model, sgd(model), average_every=1) as policy:
            await policy.step()
            if world.rank != 1:
                with pytest.raises(ad.ClosedError) as caught:
                    await policy.step()
                heard.append(str(caught.value))
        while len(heard) < 2:
            await world.safe_point()

    run(main, 3)
    assert any("rank 1 left" in text for text in heard) and all("left" in text for text in heard)


def test_average_all_resets_the_optimizer_and_skips_a_lone_rank() -> None:
    async def main(world: ad.World) -> None:
        model = Mixed(1.0)
        optimizer = sgd(model, momentum=0.9)
        async with AverageAllPolicy(model, optimizer, average_every=1, optimizer_state="reset") as policy:
            fill_gradients(model)
            optimizer.step()
            start = clone_state(model)
            info = await policy.step()
            assert bool(info) == (world.size > 1)
            assert bool(optimizer.state) == (world.size == 1)
            assert equal_states(clone_state(model), start)

    run(main, 2)
    run(main, 1)


# -- SpawnPolicy ------------------------------------------------------------------------------------------------------


class CountingPolicy(SpawnPolicy):
    """The least that a policy can be."""

    opened = closed = 0

    async def _step(self, local_metric: Any) -> StepInfo:
        await self._world.safe_point()
        return StepInfo()

    async def _start(self) -> None:
        self.opened += 1

    async def _stop(self, error: BaseException | None) -> None:
        self.closed += 1

    def _options(self) -> dict[str, Any]:
        return {}


def test_spawn_policy_counts_steps_and_guards_them() -> None:
    async def main(world: ad.World) -> None:
        model = fill(Mixed(), 1.0)
        policy = CountingPolicy(model, sgd(model), average_every=1)
        with pytest.raises(ad.ClosedError):
            await policy.step()
        async with policy:
            await policy.step()
            first = asyncio.create_task(policy.step())
            await asyncio.sleep(0)
            with pytest.raises(ad.BusyError):
                await policy.step()
            await first
            assert policy.iteration == 2
        with pytest.raises(ad.ClosedError):
            await policy.step()
        with pytest.raises(ad.LocalProtocolError):
            async with policy:
                pass
        assert (policy.opened, policy.closed) == (1, 1)
        with pytest.raises(TypeError):
            SpawnPolicy(model, sgd(model), average_every=1)  # type: ignore[abstract]

    run(main, 2)
