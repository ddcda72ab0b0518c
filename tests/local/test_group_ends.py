"""Tests freed groups: who may still use them, when their tags are reused, and what remains in memory."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from support.local import eventually, worlds

import asyncdist as ad
from asyncdist import World
from asyncdist.collectives.groups import Group
from asyncdist.collectives.membership import MembershipLog
from asyncdist.errors import ClosedError, LocalProtocolError, RemoteError, StartTimeoutError
from asyncdist.runtime.group_creation import GroupCreation
from asyncdist.runtime.peers import Leave
from asyncdist.tensors.model_cache import MODEL_COUNT_MAX, Scratch
from protocols import AsyncSelectiveAveragingPolicy, AverageAllPolicy

WORDS = r"the group \[0, 1\] was freed on this rank"


async def make(*made: World) -> list[Group]:
    return list(await asyncio.gather(*(world.new_group([world.rank for world in made]) for world in made)))


def nothing_is_kept(world: World) -> bool:
    attendance = world.peers.attendance
    return not (
        world.peers.groups.ledger._entries
        or world.peers.groups.ledger._early
        or attendance._freed
        or attendance.spoiled_tags
    )


async def test_tag_is_reused_once_all_members_have_freed_the_group() -> None:
    async with worlds(2) as made:
        first = await make(*made)
        await first[0].free()
        second = await make(*made)
        assert second[0].tag == second[1].tag != first[0].tag, (
            "rank 1 may still use the first group, so its tag must not be reused"
        )
        await first[1].free()
        await first[1].free()  # again: nothing
        await eventually(lambda: len(made[0].peers.groups.ledger._entries) == 1)
        assert [group.tag for group in await make(*made)] == [first[0].tag] * 2


async def test_what_was_freed_leaves_nothing() -> None:
    async with worlds(3) as made:
        for _ in range(3):
            groups = await make(*made)
            await asyncio.gather(
                *(w.collectives.barrier(group) for w, group in zip(made, groups, strict=True)),
            )
            await asyncio.gather(*(group.free() for group in groups))
            await eventually(lambda: all(map(nothing_is_kept, made)))
        assert not any(world.peers.attendance.started() for world in made)


@pytest.mark.parametrize(
    "start",
    [
        pytest.param(lambda: ad.new_mesh({"POP": 2, "DP": 2}), id="mesh"),
        pytest.param(lambda: ad.new_parallel_groups(2), id="parallel groups"),
    ],
)
def test_first_group_is_freed_if_the_second_cannot_be_made(
    start: Callable[[], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    new_group = GroupCreation.new_group

    async def or_none(groups: GroupCreation, ranks: Sequence[int], *args: Any, **kwargs: Any) -> ad.Group:
        if groups._services.rank == 1:
            raise StartTimeoutError("rank 1 makes none", missing=())
        return await new_group(groups, ranks, *args, **kwargs)

    monkeypatch.setattr(GroupCreation, "new_group", or_none)

    async def main(world: World) -> tuple[str, bool]:
        try:
            await start()
            came_to = "made"
        except StartTimeoutError as error:
            came_to = f"waited for {error.missing}"
        except RemoteError as error:
            came_to = f"waited for what {error}"
        await world.sleep(2000 - world.time())
        return came_to, bool(world.peers.groups.ledger.numbers_in_use())

    results = ad.simulate(main, ranks=4, strict=True).results
    assert all(came_to.startswith("waited for") and not holds_one for came_to, holds_one in results), results


def test_groups_already_made_are_freed_on_cancellation() -> None:
    async def main(world: World) -> int:
        if world.rank == 0:
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(world.new_groups([[0, 1], [0, 2]]), 5)
        if world.rank == 1:
            with pytest.raises(TypeError):
                await world.new_groups([[0, 1], None])  # type: ignore[list-item]
        await world.sleep(10)
        return len(world.peers.groups.ledger.numbers_in_use())

    assert ad.simulate(main, ranks=3, strict=True).results == (0, 0, 0)


def test_cost_of_a_free_grows_linearly_with_the_members(monkeypatch: pytest.MonkeyPatch) -> None:
    """Regression: each member examined all members at each notice, half the run time of 128 simulated ranks."""
    asked: list[int] = []
    started_before_leaving = MembershipLog.started_before_leaving

    def counted(self: MembershipLog, group: Group, rank: int) -> int | None:
        asked.append(rank)
        return started_before_leaving(self, group, rank)

    async def main(world: World) -> None:
        await (await world.new_group(range(world.size))).free()

    monkeypatch.setattr(MembershipLog, "started_before_leaving", counted)
    ad.simulate(main, ranks=16, strict=True).value()
    assert len(asked) <= 3 * 16 * 16


def of(model: torch.nn.Module) -> Any:
    return model, torch.optim.SGD(model.parameters(), lr=0.1)


@pytest.mark.parametrize("seed", range(5))
def test_freed_group_is_refused_by_name_on_every_member(seed: int) -> None:
    async def main(world: World) -> None:
        group = await ad.new_group([0, 1])
        waiting = asyncio.ensure_future(ad.barrier(group=group)) if world.rank == 1 else None
        if world.rank == 0:
            await world.sleep(1)
            await group.free()
            model = torch.nn.Linear(1, 1)
            for call in (
                ad.barrier(group=group),
                ad.all_reduce(torch.ones(1), group=group),
                ad.gather_from_all_ranks(lambda: 1, group=group),
                ad.average_models(model, group),
                ad.new_mesh({"DP": 2}, group=group),
                AverageAllPolicy(*of(model), average_every=1, group=group).__aenter__(),
                AsyncSelectiveAveragingPolicy(*of(model), average_every=1, group=group).__aenter__(),
                group.__aenter__(),
            ):
                with pytest.raises(ClosedError, match=WORDS):
                    await call
            with pytest.raises(ClosedError, match=WORDS):
                world.channel(ad.WorldStatistics, tag=100, group=group)
        else:
            assert waiting is not None
            for call in (waiting, ad.barrier(group=group), ad.gather_from_all_ranks(lambda: 1, group=group)):
                with pytest.raises(ClosedError, match=r"rank 0 has freed the group \[0, 1\]") as caught:
                    await call
                assert caught.value.facts["rank"] == 0
        await group.free()
        assert (await ad.new_group([0, 1])).tag != group.tag, (
            "a message of that barrier may still arrive, so the tag must not be reused"
        )

    assert ad.simulate(main, ranks=2, seed=seed, strict=True).value() is None


def test_collective_begun_before_the_free_completes() -> None:
    """A collective whose caller was cancelled completes too, since the other members depend on it."""

    async def main(world: World) -> float:
        group = await ad.new_group([0, 1])
        values = torch.full((1000,), float(world.rank))
        if world.rank == 1:
            task = asyncio.ensure_future(ad.broadcast(values, 1, group=group))
            await asyncio.sleep(0)
            task.cancel()
            await group.free()
            return 1.0
        await world.sleep(5)
        result = await ad.broadcast(values, 1, group=group)
        await group.free()
        return float(result[-1])

    assert ad.simulate(main, ranks=2, strict=True).results == (1.0, 1.0)


@pytest.mark.parametrize("seed", range(5))
def test_group_is_freed_as_soon_as_its_last_collective_ends(seed: int) -> None:
    """Regression: the task that frees the group was woken just before the collective ended, and never again."""

    async def main(world: World) -> float:
        group = await ad.new_group([0, 1])
        task = asyncio.ensure_future(ad.all_gather(torch.ones(10), group=group))
        await asyncio.sleep(0)
        task.cancel()
        await group.free()
        freed_at_s = world.time()
        await world.sleep(100)
        return freed_at_s

    assert all(freed_at_s < 1 for freed_at_s in ad.simulate(main, ranks=2, seed=seed, strict=True).results)


def test_what_is_kept_of_models_is_bounded() -> None:
    """Each model uses one or two file descriptors in shared memory: 400 models once used 427."""
    models = [torch.nn.Linear(1, 1) for _ in range(MODEL_COUNT_MAX + 10)]
    scratch = Scratch()
    for model in models:
        scratch.give_back(model, "state", object())
    scratch.give_back(models[10], "gradients", object())
    assert len(scratch._kept) == MODEL_COUNT_MAX
    scratch.give_back(models[0], "state", object())
    assert scratch.take(models[10], "state") is not None, (
        "the model was used most recently but one, so its memory must be kept"
    )
    assert scratch.take(models[11], "state") is None
    scratch.forget(models[10])
    assert scratch.take(models[10], "gradients") is None


async def test_who_leaves_the_world_has_freed_its_groups() -> None:
    async with worlds(2) as made:
        [group, _] = await make(*made)
        made[1].peers.announce(Leave())
        await group.free()
        await eventually(lambda: nothing_is_kept(made[0]))


async def test_the_group_of_the_world_cannot_be_freed() -> None:
    async with worlds(1) as [world]:
        for group in (world.group, Group.seen_from_outside([1, 2])):
            with pytest.raises(LocalProtocolError, match="cannot be freed"):
                await group.free()


def test_a_group_whose_start_was_cancelled_after_go_is_freed() -> None:
    """The others would wait in it for a rank that does not know of it."""

    async def main(world: World) -> str:
        if world.rank == 1:
            with pytest.raises(ad.StartTimeoutError):
                await world.new_group([0, 1], timeout_s=1)
            return ""
        group = await world.new_group([0, 1])
        with pytest.raises(ClosedError) as caught:
            await ad.barrier(group=group)
        return str(caught.value.message)

    faults = [ad.simulation.Delay(source=0, dest=1, number=2, duration_s=20)]
    said = ad.simulate(main, ranks=2, faults=faults, strict=True).results[0]
    assert said.startswith("rank 1 has "), said


def test_successive_policies_and_meshes_keep_no_group_or_subject() -> None:
    async def main(world: World) -> tuple[int, int, int]:
        model = torch.nn.Linear(1, 1)
        for i in range(5):
            async with AverageAllPolicy(*of(model), average_every=1) as policy:
                for _ in range(i):
                    assert await policy.step()
            mesh = await ad.new_mesh({"POP": 1, "DP": 2})
            assert await ad.psum(torch.ones(1), "DP", mesh=mesh) == 2
            await mesh.free()
            await mesh.free()
            with pytest.raises(ClosedError, match=r"the mesh 'POP': 1, 'DP': 2 of ranks \[0, 1\] was freed"):
                await ad.psum(torch.ones(1), "DP", mesh=mesh)
        while world.peers.groups.ledger.numbers_in_use():
            await world.safe_point()
        subjects = set(world.agreements._counts) | set(world.agreements.absences.withdrawn)
        assert not [key for key in subjects if "axis" in str(key) or "averaging" in str(key)], subjects
        return len(world.peers.groups.ledger._entries), len(subjects), len(world.scratch._kept)

    assert ad.simulate(main, ranks=2, strict=True).results == ((0, 2, 0),) * 2
