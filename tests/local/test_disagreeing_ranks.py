"""Tests that each rank gets an error that names the others if ranks start a policy with different options."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from scripts.population import Mixed, sgd
from support.facts import names, naming
from support.local import run
from torch import nn

import asyncdist as ad
import protocols
from protocols import AsyncSelectiveAveragingPolicy, AverageAllPolicy, OneSidedSelectiveAveragingPolicy

# -- ranks that disagree ----------------------------------------------------------------------------------------------


async def start(world: ad.World, policy: protocols.SpawnPolicy) -> str:
    """Return the error of a start that must fail before any rank has reported."""
    try:
        async with policy:
            raise AssertionError("it started")
    except ad.DisagreementError as error:
        return str(error)
    finally:
        assert world.statistics().stream_sent_nbytes == 0


def disagree(make: Callable[[int], Any], ranks: int = 3) -> list[str]:
    """Return every rank's error when rank r starts ``make(r)``: a policy class, its options and a model."""

    async def main(world: ad.World) -> str:
        policy_class, options, model = make(world.rank)
        return await start(world, policy_class(model, sgd(model), **{"average_every": 2, **options}))

    return run(main, ranks)


@pytest.mark.parametrize(
    ("odd", "facts"),
    [
        ({"average_every": 3}, ["average_every", 2, 3]),
        ({"replacement_ratio": 0.5}, ["replacement_ratio", 0.2, 0.5]),
        ({"momentum": 0.5}, ["momentum", 0.0, 0.5]),
        ({"metric_mode": "min"}, ["metric_mode", '"max"', '"min"']),
        ({"threshold": 1.0}, ["threshold", "null", 1.0]),
        ({"optimizer_state": "reset"}, ["resets_optimizer", "false", "true"]),
        ({"grace_s": 2.0}, ["grace_s", "null", 2.0]),
        ({"name": "other"}, ["name", "(none)", "other"]),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_policies_with_different_options_are_refused_everywhere(odd: dict[str, Any], facts: list[object]) -> None:
    for text in disagree(lambda rank: (AsyncSelectiveAveragingPolicy, odd if rank == 2 else {}, Mixed())):
        assert names(text, "rank 0", "rank 2", *facts), text


def test_policies_of_different_classes_are_refused_everywhere() -> None:
    for text in disagree(lambda rank: (AsyncSelectiveAveragingPolicy if rank else AverageAllPolicy, {}, Mixed())):
        assert names(text, "the start of a policy", "AverageAllPolicy", "AsyncSelectiveAveragingPolicy"), text


def narrow(rank: int) -> nn.Module:
    return nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 3 if rank == 1 else 4))


def double(rank: int) -> nn.Module:
    return nn.Linear(2, 2, dtype=torch.float64 if rank == 2 else torch.float32)


def longer(rank: int) -> nn.Module:
    return nn.Sequential(nn.Linear(2, 2), *([nn.Linear(2, 2)] if rank == 1 else []))


def untied(rank: int) -> nn.Module:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    if rank != 1:
        model[1].weight = model[0].weight
    return model


def compiled(rank: int) -> nn.Module:
    return torch.compile(nn.Linear(2, 2), backend="eager") if rank == 1 else nn.Linear(2, 2)  # type: ignore[return-value]


def wrapped(rank: int) -> nn.Module:
    return nn.Linear(2, 2) if rank == 1 else nn.ModuleDict({"inner": nn.Linear(2, 2)})


@pytest.mark.parametrize(
    ("build", "facts"),
    [
        (compiled, ["torch.compile", "'_orig_mod.'", "rank 1", "on all ranks or on none"]),
        (wrapped, ["wrapped", "'inner.'", "rank 1"]),
        (narrow, ["the models differ: '1.weight'", "(3, 2)", "(4, 2)", "rank 1"]),
        (double, ["'weight'", "float64", "float32", "rank 2"]),
        (longer, ["'1.weight'", "rank 1"]),
        (untied, ["weight'", "rank 1"]),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
@pytest.mark.parametrize("policy_class", [AsyncSelectiveAveragingPolicy, AverageAllPolicy])
def test_differing_models_are_refused_with_the_first_difference(
    policy_class: Any, build: Callable[[int], nn.Module], facts: list[str]
) -> None:
    for text in disagree(lambda rank: (policy_class, {}, build(rank))):
        assert all(fact in text for fact in facts), text


def test_models_that_differ_under_a_reserved_coordinator() -> None:
    async def main(world: ad.World) -> str:
        if world.rank == 2:
            with pytest.raises(ad.DisagreementError) as caught:
                await protocols.coordinate([0, 1])
            return str(caught.value)
        group = await ad.new_group([0, 1])
        model = narrow(world.rank)
        policy = AsyncSelectiveAveragingPolicy(model, sgd(model), average_every=1, coordinator=2, group=group)
        return await start(world, policy)

    texts = run(main, 3)
    assert all("'1.weight'" in text for text in texts[:2]), texts
    assert "model is " in texts[2], texts


@pytest.mark.parametrize("size", [2, 3])
def test_reserved_coordinator_and_missing_group_name_both_lists(size: int) -> None:
    """Regression: after a minute each rank's error said that the other, which was waiting too, had not arrived."""

    async def main(world: ad.World) -> None:
        others = "1,0" if size == 2 else "1-2,0"
        lists = rf"rank 0 starts '.*{others}' and rank [12] starts '.* on ranks 0-{size - 1}'.*group="
        with pytest.raises(ad.DisagreementError, match=lists):
            if world.rank == 0:
                await protocols.coordinate(range(1, size))
            model = narrow(world.rank)
            async with AsyncSelectiveAveragingPolicy(model, sgd(model), average_every=1, coordinator=0):
                raise AssertionError("it started")
        await ad.barrier()  # a rank that gets the error first must not leave before the others have it

    for seed in range(10):
        report = ad.simulate(main, ranks=size, seed=seed)
        assert report.results == (None,) * size
        assert report.virtual_time_s < 5


@pytest.mark.parametrize("size", [2, 3])
def test_members_that_name_different_coordinators_are_told_both(size: int) -> None:
    """Regression: after a minute each rank's error said that the others had not arrived."""

    async def main(world: ad.World) -> None:
        model = narrow(0)
        words = r"the leader is rank [01] on rank \d and rank [01] on rank \d; .* pass equal group= and coordinator="
        with pytest.raises(ad.DisagreementError, match=words):
            async with AsyncSelectiveAveragingPolicy(
                model, sgd(model), average_every=1, coordinator=min(1, world.rank)
            ):
                raise AssertionError("it started")
        async with AsyncSelectiveAveragingPolicy(model, sgd(model), average_every=1):
            pass  # the next start is the same one on all ranks

    for seed in range(10):
        report = ad.simulate(main, ranks=size, seed=seed)
        assert report.results == (None,) * size
        assert report.virtual_time_s < 5


@pytest.mark.parametrize("kind", [AsyncSelectiveAveragingPolicy, AverageAllPolicy, OneSidedSelectiveAveragingPolicy])
def test_policy_with_unequal_groups_on_ranks_names_both_lists(kind: type[protocols.SpawnPolicy]) -> None:
    async def main(world: ad.World) -> None:
        group = await ad.new_group([0, 1]) if world.rank < 2 else None
        model = narrow(world.rank)
        with pytest.raises(ad.DisagreementError, match=r"on ranks 0-1' and rank 1 starts '.* on ranks 0-2'.*group="):
            async with kind(model, sgd(model), average_every=1, group=None if world.rank else group):
                raise AssertionError("it started")
        await ad.barrier()

    report = ad.simulate(main, ranks=3)
    assert report.results == (None,) * 3
    assert report.virtual_time_s < 5


@pytest.mark.parametrize("timeout_s", [None, 0, -1.0, math.inf, math.nan, "3"])
def test_a_timeout_that_is_no_duration_is_refused_by_each_start(timeout_s: Any) -> None:
    async def main(world: ad.World) -> None:
        words = naming("timeout_s", repr(timeout_s), 0)
        with pytest.raises(ValueError, match=words):
            await world.new_group([0, 1], timeout_s=timeout_s)
        with pytest.raises(ValueError, match=words):
            await ad.new_mesh({"DP": 2}, timeout_s=timeout_s)

    run(main, 2)


def test_uncoordinated_members_are_refused_before_any_message() -> None:
    """Regression: a list without members raised KeyError, and other wrong lists caused a timeout after a minute."""
    wrong: list[tuple[Any, type[Exception]]] = [
        *(([], ValueError), ([0, 0], ValueError), ([0, 2], ValueError), ([0, -1], ValueError), ([0, 1], ValueError)),
        *((["0"], ValueError), ([0.0], ValueError), (0, TypeError), ("0", TypeError), (None, TypeError)),
    ]

    async def main(world: ad.World) -> None:
        if world.rank == 1:
            for members, kind in wrong:
                with pytest.raises(
                    kind,
                    match=naming(
                        "members", repr(members), "a list of distinct ranks from 0 to 1", "without this rank, 1"
                    ),
                ):
                    await protocols.coordinate(members)
            with pytest.raises(ValueError, match=naming("start_timeout_s", -1)):
                await protocols.coordinate([0], start_timeout_s=-1)
            assert not world.statistics().sent_count
        await ad.barrier()

    run(main, 2)


@pytest.mark.parametrize("kind", [AsyncSelectiveAveragingPolicy, AverageAllPolicy])
@pytest.mark.parametrize("who", [0, 2])
@pytest.mark.parametrize("is_caught", [False, True])
def test_failed_policy_blocks_others_only_until_its_rank_ends(
    kind: type[protocols.SpawnPolicy], who: int, is_caught: bool
) -> None:
    async def main(world: ad.World) -> None:
        model = Mixed()
        if world.rank == who and not is_caught:
            kind(model, sgd(model), average_every=0)
        if world.rank == who:
            with pytest.raises(ValueError, match=naming("average_every", 0)):
                kind(model, sgd(model), average_every=0)
            return
        error, word = (ad.ClosedError, "") if is_caught else (ad.RankLostError, "average_every .*0")
        with pytest.raises(error, match=rf"rank {who} .*{word}"):
            async with kind(model, sgd(model), average_every=1):
                raise AssertionError("it started")

    for seed in range(10):
        report = ad.simulate(main, ranks=3, seed=seed, return_exceptions=True)
        assert report.virtual_time_s < 5
        for rank, result in enumerate(report.results):
            assert type(result) is (type(None) if is_caught else ValueError if rank == who else ad.RankLostError)


@pytest.mark.parametrize("missing", [{0}, {1, 3}, {0, 1}, {0, 1, 3}], ids=str)
def test_a_policy_made_on_some_ranks_only_names_the_missing_ones(missing: set[int]) -> None:
    waiting: set[int] = set(range(4)) - missing

    async def main(world: ad.World) -> ad.StartTimeoutError | None:
        if world.rank in missing:
            while waiting:
                await world.safe_point()
            return None
        model = Mixed()
        policy = AsyncSelectiveAveragingPolicy(model, sgd(model), average_every=1, start_timeout_s=0.2)
        try:
            async with policy:
                raise AssertionError("it started")
        except ad.StartTimeoutError as error:
            return error
        finally:
            waiting.discard(world.rank)

    errors = [error for error in run(main, 4) if error is not None]
    assert len(errors) == 4 - len(missing)
    for error in errors:
        assert error.missing == tuple(sorted(missing)) and names(error, *missing, "0.2 s")
        assert isinstance(error, TimeoutError)


def test_leader_that_is_later_than_the_timeout_is_told_of_it() -> None:
    async def main(world: ad.World) -> tuple[int, ...]:
        model = Mixed()
        if world.rank == 0:
            await asyncio.sleep(2.0)
        policy = AsyncSelectiveAveragingPolicy(model, sgd(model), average_every=1, start_timeout_s=0.2)
        with pytest.raises(ad.StartTimeoutError, match="rank 0") as caught:
            async with policy:
                raise AssertionError("it started")
        await ad.barrier()
        return caught.value.missing

    assert ad.simulate(main, ranks=3, seed=1).results == ((0,),) * 3


def test_a_late_joiner_is_waited_for() -> None:
    async def main(world: ad.World) -> int:
        model = Mixed()
        for _ in range(200 if world.rank == 1 else 0):
            await world.safe_point()
        async with AsyncSelectiveAveragingPolicy(model, sgd(model), average_every=1) as policy:
            await policy.step(1.0)
        return policy.iteration

    assert run(main, 3) == [1, 1, 1]


def test_rank_that_has_ended_is_named_at_the_start_of_a_policy() -> None:
    async def main(world: ad.World) -> str:
        if world.rank == 1:
            return ""
        model = Mixed()
        with pytest.raises(ad.ClosedError) as caught:
            async with AsyncSelectiveAveragingPolicy(model, sgd(model), average_every=1, start_timeout_s=1000):
                pass
        return str(caught.value)

    texts = run(main, 3)
    assert all("rank 1 left" in text for text in (texts[0], texts[2])), texts


def test_policy_refuses_a_foreign_group_and_unknown_coordinator() -> None:
    async def main(world: ad.World) -> None:
        model = Mixed()
        group = await ad.new_group([world.rank])
        elsewhere = ad.Group((1 - world.rank,), 0, group.tag, None)
        with pytest.raises(ad.LocalProtocolError, match=rf"group must include this rank, {world.rank}, got the ranks"):
            async with AsyncSelectiveAveragingPolicy(model, sgd(model), average_every=1, group=elsewhere):
                pass
        with pytest.raises(ValueError, match=naming("coordinator", 9, 0, 1)):
            async with AsyncSelectiveAveragingPolicy(model, sgd(model), average_every=1, coordinator=9):
                pass

    run(main, 2)
