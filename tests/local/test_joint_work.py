"""Tests a function of several helper calls that is cancelled on one rank: the others are notified, or it completes."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import pytest
import torch
from support.facts import names
from support.local import worlds
from torch import nn

import asyncdist as ad
from asyncdist import World
from asyncdist.collectives.error_exchange import LocalResult, run_and_raise
from asyncdist.collectives.groups import free_all
from asyncdist.errors import AsyncdistError, DisagreementError, RemoteError
from asyncdist.simulation import Compute, Kill
from protocols import AverageAllPolicy

#: Moments in 14ths of the call's duration. Each of the call's exchanges contains one of them.
MOMENTS = range(1, 14)
#: So short that a call's messages take most of its time.
COMPUTE = Compute(step_s=0.0001)


@pytest.fixture(autouse=True)
def _fast_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    """Skip writes to the disk, since no test cuts the power."""
    monkeypatch.setattr(os, "fsync", lambda _: None)


def model_of(value: float) -> nn.Module:
    model = nn.Linear(2, 2)
    for parameter in model.parameters():
        nn.init.constant_(parameter, value)
    return model


async def given_up_after(seconds: float | None, call: asyncio.Future[object]) -> str:
    """Return the outcome of the call: "done", "cancelled", or the exception that it raised."""
    try:
        await asyncio.wait_for(call, seconds)
    except TimeoutError:
        return "cancelled"
    except RemoteError as error:
        return str(error)
    return "done"


@pytest.mark.parametrize("goes_on", ["barrier", "training"])
def test_members_learn_that_one_rank_gave_up_waiting_for_a_save(goes_on: str, tmp_path: Path) -> None:
    """Regression: the members waited for the save's second helper, or matched it with that rank's next call."""

    async def main(world: World) -> tuple[str, float]:
        if world.rank == 2:
            await world.sleep(1)
        save = asyncio.ensure_future(ad.save_population(tmp_path, model_of(0.0)))
        outcome = await given_up_after(0.2 if world.rank == 1 else None, save)
        told_at = world.time()
        if goes_on == "barrier":
            await ad.barrier()
        elif world.rank == 1:
            await world.sleep(300)
        return outcome, told_at

    first, cancelled, last = ad.simulate(main, ranks=3, strict=True).results
    assert cancelled == ("cancelled", pytest.approx(0.2, abs=0.01))
    for outcome, told_at in (first, last):
        assert names(outcome, "rank 1", "save_population was cancelled")
        assert told_at < 2
    assert not list(tmp_path.glob("*/manifest.json"))


@pytest.mark.parametrize("rank", [0, 1])
def test_save_cancelled_at_any_moment_is_whole_or_void_for_all(rank: int, tmp_path: Path) -> None:
    async def main(world: World, path: Path, seconds: float | None) -> tuple[str, float]:
        began_at = world.time()
        save = asyncio.ensure_future(ad.save_population(path, model_of(1.0)))
        outcome = await given_up_after(seconds if world.rank == rank else None, save)
        duration_s = world.time() - began_at
        await ad.barrier()
        return outcome, duration_s

    whole_s = ad.simulate(main, tmp_path / "whole", None, ranks=3, compute=COMPUTE, strict=True).value()[1]
    seen = set()
    for moment in MOMENTS:
        path = tmp_path / str(moment)
        report = ad.simulate(main, path, whole_s * moment / 14, ranks=3, compute=COMPUTE, strict=True)
        report.value()
        outcomes = [outcome for outcome, _ in report.results]
        others = {outcome for at, outcome in enumerate(outcomes) if at != rank}
        assert len(others) == 1, "all ranks must get the same verdict"
        is_whole = (path / "checkpoint-000001" / "manifest.json").exists()
        assert is_whole == (others == {"done"})
        seen.add((outcomes[rank], is_whole))
    assert seen >= {("cancelled", False), ("cancelled", True)}


async def roles(_: World) -> None:
    context = await ad.initialize_distributed_compute(0, 3, placement="host")
    await context.cleanup()


async def two_groups(world: World) -> None:
    for group in await world.new_groups([[0, 1, 2], [2, 1, 0]]):
        await group.free()


async def policy_of_another_model(world: World) -> None:
    model = nn.Linear(2, 3 if world.rank == 2 else 2)
    with pytest.raises(DisagreementError, match="'weight'"):
        async with AverageAllPolicy(model, torch.optim.SGD(model.parameters()), average_every=2):
            pass


@pytest.mark.parametrize("call", [roles, two_groups, policy_of_another_model])
@pytest.mark.parametrize("rank", [0, 1])
def test_call_given_up_by_one_rank_does_not_match_its_next_call(
    call: Callable[[World], Coroutine[Any, Any, None]], rank: int
) -> None:
    """Each call makes several collectives or starts. The others' part of it was matched with this rank's barrier."""

    async def main(world: World, seconds: float | None) -> float:
        began_at = world.time()
        await given_up_after(seconds if world.rank == rank else None, asyncio.ensure_future(call(world)))
        duration_s = world.time() - began_at
        assert duration_s < 1, "no rank may wait until its timeout"
        await ad.barrier()
        return duration_s

    whole_s = ad.simulate(main, None, ranks=3, strict=True).value()
    for moment in MOMENTS:
        ad.simulate(main, whole_s * moment / 14, ranks=3, strict=True, seed=moment).value()


async def test_all_groups_are_freed_if_freeing_the_first_is_cancelled() -> None:
    async with worlds(2) as (world, other):
        made, _ = await asyncio.gather(world.new_groups([[0, 1], [1, 0]]), other.new_groups([[0, 1], [1, 0]]))
        freeing = asyncio.ensure_future(free_all(made))
        await asyncio.sleep(0)
        freeing.cancel()
        with pytest.raises(asyncio.CancelledError):
            await freeing
        assert all(group.lease.is_freed for group in made)


@pytest.mark.parametrize("rank", [0, 1])
def test_load_cancelled_at_any_moment_changes_all_models_or_none(rank: int, tmp_path: Path) -> None:
    async def save(_: World) -> None:
        await ad.save_population(tmp_path, model_of(1.0), extra=torch.ones(1))

    async def main(world: World, seconds: float | None) -> tuple[str, float, float]:
        began_at, model = world.time(), model_of(0.0)
        load = asyncio.ensure_future(ad.load_population(tmp_path, model))
        outcome = await given_up_after(seconds if world.rank == rank else None, load)
        value, duration_s = next(model.parameters()).mean().item(), world.time() - began_at
        await ad.barrier()
        assert next(model.parameters()).mean().item() == value, "the weights must not change later"
        return outcome, value, duration_s

    ad.simulate(save, ranks=3, strict=True).value()
    whole_s = ad.simulate(main, None, ranks=3, compute=COMPUTE, strict=True).value()[2]
    seen = set()
    for moment in MOMENTS:
        report = ad.simulate(main, whole_s * moment / 14, ranks=3, compute=COMPUTE, strict=True)
        report.value()
        results = report.results
        assert len({value for _, value, _ in results}) == 1
        assert len({outcome for at, (outcome, _, _) in enumerate(results) if at != rank}) == 1
        seen.add((results[rank][0], results[rank][1]))
    assert seen >= {("cancelled", 0.0), ("cancelled", 1.0)}


def test_a_save_waits_for_one_that_this_rank_has_given_up(tmp_path: Path) -> None:
    async def main(world: World) -> list[str]:
        outcomes = []
        for number in range(4):
            if world.rank == 2:
                await world.sleep(0.1)
            save = asyncio.ensure_future(ad.save_population(tmp_path, model_of(number), keep=1))
            outcomes.append(await given_up_after(0.05 if world.rank == 1 and number < 3 else None, save))
        model = model_of(0.0)
        await ad.load_population(tmp_path, model)
        return [*outcomes, str(model.bias[0].item())]

    results = ad.simulate(main, ranks=3, strict=True).results
    assert results[1] == ["cancelled"] * 3 + ["done", "3.0"]
    assert len(list(tmp_path.iterdir())) == 1


@pytest.mark.parametrize("ends_by", ["error", "cancellation"])
def test_a_policy_that_cannot_settle_ends_the_save_on_all_ranks(ends_by: str, tmp_path: Path) -> None:
    """Regression: the other ranks waited for a rank whose policy refused to settle, or whose caller was cancelled."""

    class Own:
        def state_dict(self) -> dict[str, Any]:
            return {}

        async def settle(self) -> None:
            if ad.current_world().rank:
                return
            if ends_by == "error":
                raise ad.BusyError("the policy is busy")
            await asyncio.sleep(1e9)

    async def main(world: World) -> str:
        save = asyncio.ensure_future(ad.save_population(tmp_path, model_of(0.0), policy=Own()))
        try:
            return await given_up_after(0.2 if world.rank == 0 else None, save)
        except ad.BusyError as error:
            return f"busy: {error}"

    first, *others = ad.simulate(main, ranks=3, strict=True).results
    assert first == ("busy: the policy is busy" if ends_by == "error" else "cancelled")
    assert all(("BusyError" if ends_by == "error" else "CancelledError") in each for each in others), others
    assert not list(tmp_path.iterdir())


def test_rank_lost_in_a_save_is_named_and_delays_no_later_save(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Regression: the others were notified only of the cancelled exchange, and not of the lost rank."""

    async def main(world: World) -> str:
        await ad.save_population(tmp_path, model_of(1.0))
        folder = await ad.save_population(tmp_path, model_of(1.0))  # the ranks that were never lost save
        return folder.name

    for turn in range(3, 30, 2):
        fault = Kill(rank=1, at_turn=turn)
        results = ad.simulate(main, ranks=3, seed=turn, faults=[fault], compute=COMPUTE).results
        assert results[0] == results[2] and str(results[0]).startswith("checkpoint-"), (turn, results)
    assert any("because rank 1 was lost during the save" in each.getMessage() for each in caplog.records)


async def test_the_end_of_an_exchange_is_noted_even_if_it_cannot_start() -> None:
    """Regression: later work of the group waited forever for work whose exchange had not started."""

    class Failed:
        def start_sequence(self, *_: object) -> None:
            raise AsyncdistError("the job has failed")

    ends: list[str] = []
    for error, expected in ((None, AsyncdistError), (GeneratorExit(), GeneratorExit)):
        with pytest.raises(expected):
            await run_and_raise(
                Failed(),  # type: ignore[arg-type]
                None,  # type: ignore[arg-type]
                LocalResult(error=error),
                None,  # type: ignore[arg-type]
                on_end=lambda: ends.append("ended"),
            )
    assert ends == ["ended", "ended"]
