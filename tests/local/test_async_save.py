"""Tests saving a population while training continues: the saved values, who waits for the disk, and early ends."""

from __future__ import annotations

import asyncio
import logging
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import asyncdist as ad
from asyncdist import World
from asyncdist.errors import BusyError, RankLostError, RemoteError
from asyncdist.functional.checkpoints import checkpoint_files
from asyncdist.simulation import Compute, Kill
from protocols import AsyncSelectiveAveragingPolicy, AverageAllPolicy

#: In a simulation a file is written within the time of one ``world.compute``.
WRITE_S = 10.0
COMPUTE = Compute(step_s=WRITE_S)


class Tied(nn.Module):
    """A model with a shared weight, a buffer, and a view that is not contiguous."""

    def __init__(self) -> None:
        super().__init__()
        self.one = nn.Linear(64, 64, bias=False)
        self.other = nn.Linear(64, 64, bias=False)
        self.other.weight = self.one.weight
        self.norm = nn.BatchNorm1d(64)
        self.register_buffer("turned", torch.arange(6.0).reshape(2, 3).T)


def filled(value: float) -> tuple[nn.Linear, torch.optim.Optimizer]:
    model = nn.Linear(4, 4)
    for parameter in model.parameters():
        nn.init.constant_(parameter, value)
    return model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


async def loaded(path: Path) -> tuple[str, float]:
    model, optimizer = filled(-1.0)
    found = await ad.load_population(path, model, optimizer)
    return found.folder.name, next(model.parameters()).mean().item()


def newest(path: Path, ranks: int = 2) -> tuple[str, float]:
    async def main(_: World) -> tuple[str, float]:
        return await loaded(path)

    found: tuple[str, float] = ad.simulate(main, ranks=ranks, strict=True).value()
    return found


def test_save_has_the_state_at_the_call_and_delays_no_step(tmp_path: Path) -> None:
    async def main(world: World) -> tuple[int, float]:
        model, optimizer = filled(0.0)
        async with AverageAllPolicy(model, optimizer, average_every=2) as policy:
            save = await ad.async_save_population(tmp_path, model, optimizer, policy=policy)
            assert not save.done()
            for parameter in model.parameters():
                nn.init.constant_(parameter, 1.0 + world.rank)
            await policy.step()  # a step during world.compute is refused
            await policy.step()
            assert model.weight.mean() == 1.5
            count, longest_s = 0, 0.0
            while not save.done():
                began_at = world.time()
                await world.sleep(0.1)
                count, longest_s = count + 1, max(longest_s, world.time() - began_at)
        assert await save == save.folder == await save
        return count, longest_s

    report = ad.simulate(main, ranks=2, seed=1, compute=COMPUTE, strict=True)
    report.value()
    assert max(count for count, _ in report.results) > 10
    assert max(longest_s for _, longest_s in report.results) < 0.2
    assert newest(tmp_path) == ("checkpoint-000001", 0.0)


def test_main_and_a_second_save_wait_for_the_files(tmp_path: Path) -> None:
    async def main(world: World) -> None:
        for value in (1.0, 2.0):
            began_at = world.time()
            first = await ad.async_save_population(tmp_path, *filled(value), keep=1)
        assert not first.done()
        assert world.time() - began_at > WRITE_S

    ad.simulate(main, ranks=2, compute=COMPUTE, strict=True).value()
    assert newest(tmp_path) == ("checkpoint-000002", 2.0)
    assert [folder.name for folder in tmp_path.iterdir()] == ["checkpoint-000002"]


def test_blocking_code_waits_for_a_save(tmp_path: Path) -> None:
    """Regression: blocking code got an object that only a coroutine can await."""

    def main(world: ad.blocking.World) -> bool:
        save = ad.blocking.async_save_population(tmp_path, *filled(1.0))
        folder = save.wait()
        return save.done() and folder == save.folder == tmp_path / "checkpoint-000001"

    assert ad.run_local(ad.blocking.hosted(main), ranks=2, strict=True) == [True, True]


def test_failed_write_is_logged_and_raised_where_save_is_awaited(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    write_rank = checkpoint_files.write_rank

    def full(folder: Path, index: int, *args: Any) -> Any:
        if folder.name == "checkpoint-000002" and index == 1:
            raise OSError(28, "No space left on device")
        return write_rank(folder, index, *args)

    monkeypatch.setattr(checkpoint_files, "write_rank", full)

    async def main(world: World) -> None:
        await ad.save_population(tmp_path, *filled(1.0))
        save = await ad.async_save_population(tmp_path, *filled(2.0))
        with pytest.raises(OSError if world.rank == 1 else RemoteError, match="No space left"):
            await save
        await ad.async_save_population(tmp_path, *filled(3.0))
        assert (await loaded(tmp_path))[1] == 3.0, "save must wait for the save in progress"

    ad.simulate(main, ranks=2, strict=True).value()
    lines = [record.getMessage() for record in caplog.records if record.levelno == logging.ERROR]
    assert len(lines) == 2
    assert all("checkpoint-000002 was not saved: " in line for line in lines)


def test_a_job_that_fails_gives_the_save_up_and_says_so(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    async def main(world: World) -> None:
        await ad.save_population(tmp_path, *filled(1.0))
        await ad.async_save_population(tmp_path, *filled(2.0))
        raise ValueError("the training has failed")

    with pytest.raises(ValueError, match="the training has failed"):
        ad.simulate(main, ranks=2, compute=COMPUTE).value()
    assert "checkpoint-000002 was abandoned" in caplog.text
    assert newest(tmp_path) == ("checkpoint-000001", 1.0)


async def test_saved_copy_shares_tensors_as_the_model_and_is_exact(tmp_path: Path) -> None:
    async def main(_: World) -> None:
        model = Tied()
        extra = {"conjugated": torch.tensor([1 + 2j]).conj(), "grad": torch.ones(2, requires_grad=True)}
        plain = await ad.save_population(tmp_path / "plain", model, extra=extra)
        beside = await (await ad.async_save_population(tmp_path / "beside", model, extra=extra))
        one, other = (torch.load(folder / "rank-00000.pt", weights_only=True) for folder in (plain, beside))
        assert list(one["model"]) == list(other["model"])
        assert one["model"]._metadata == other["model"]._metadata
        for name, tensor in one["model"].items():
            assert torch.equal(tensor, other["model"][name])
            assert tensor.stride() == other["model"][name].stride()
        assert other["model"]["one.weight"].data_ptr() == other["model"]["other.weight"].data_ptr()
        assert torch.equal(one["extra"]["conjugated"], other["extra"]["conjugated"])
        assert other["extra"]["grad"].requires_grad

    ad.simulate(main, ranks=1, strict=True).value()


@pytest.mark.slow
def test_rank_killed_during_a_save_leaves_a_whole_population(tmp_path: Path) -> None:
    async def main(world: World, value: float) -> None:
        save = await ad.async_save_population(tmp_path, *filled(value), keep=2)
        for _ in range(100):
            await world.sleep(0.0001)
        await save

    async def first(_: World) -> None:
        await ad.save_population(tmp_path, *filled(-1.0))

    ad.simulate(first, ranks=3, strict=True).value()
    before, outcomes = -1.0, set()
    for turn in range(1, 240, 12):
        report = ad.simulate(main, float(turn), ranks=3, seed=turn, faults=[Kill(rank=turn % 3, at_turn=turn // 3 + 1)])
        assert all(result is None or isinstance(result, (RankLostError, RemoteError)) for result in report.results)
        found = newest(tmp_path, ranks=3)[1]
        assert found in (before, turn)
        outcomes.add(found == turn)
        before = found
    assert outcomes == {False, True}


# -- alongside other tasks of a rank ---------------------------------------------------------------------------------


@pytest.mark.parametrize("is_async", [False, True])
def test_one_task_saves_while_another_one_trains_another_model(tmp_path: Path, *, is_async: bool) -> None:
    """Regression: a step of the other task's policy was refused for a ``world.compute`` that no program had called."""
    saved: list[Path] = []

    async def train(name: str) -> None:
        model, optimizer = filled(1.0)
        async with AsyncSelectiveAveragingPolicy(model, optimizer, average_every=3, name=name) as policy:
            for step in range(30):
                await policy.step(float(step))
                if name == "critic" and step % 10 == 9:
                    if is_async:
                        await ad.async_save_population(tmp_path, model, optimizer, policy=policy)
                    else:
                        saved.append(await ad.save_population(tmp_path, model, optimizer, policy=policy))

    async def main(_: World) -> None:
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(train("actor"))
            tasks.create_task(train("critic"))

    ad.run_local(main, ranks=2, strict=True)
    report = ad.simulate(main, ranks=2, seed=3, compute=COMPUTE, strict=True)
    assert report.results == (None, None)
    assert len(list(tmp_path.glob("checkpoint-*"))) == 6
    assert len(saved) == (0 if is_async else 12)


def test_policy_of_a_model_being_saved_refuses_other_tasks_steps(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    writing, may_end = threading.Event(), threading.Event()
    _hold_the_disk(monkeypatch, writing, may_end)

    async def main(_: World) -> None:
        model, optimizer = filled(1.0)
        async with AverageAllPolicy(model, optimizer, average_every=1) as policy:
            save = asyncio.create_task(ad.save_population(tmp_path, model, optimizer, policy=policy))
            while not writing.is_set():  # noqa: ASYNC110
                await asyncio.sleep(0.001)
            with pytest.raises(BusyError, match="a save reads them"):
                await policy.step()
            may_end.set()
            await save
            await policy.step()

    ad.run_local(main, ranks=1, strict=True)


def test_rank_whose_save_was_given_up_learns_that_the_job_failed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Regression: the rank polled its file without a pause, so its loop was blocked and memory grew."""
    writing, may_end = threading.Event(), threading.Event()
    _hold_the_disk(monkeypatch, writing, may_end)

    async def fail(world: World) -> None:
        while not writing.is_set():  # noqa: ASYNC110
            await asyncio.sleep(0.001)
        if world.rank == 0:  # whose save is cancelled by this, and waits for its file
            asyncio.get_running_loop().call_later(0.3, may_end.set)
        else:
            await asyncio.sleep(0.1)
        raise ZeroDivisionError(f"on rank {world.rank}")

    async def main(world: World) -> None:
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(ad.save_population(tmp_path, *filled(1.0)))
            tasks.create_task(fail(world))

    rescue = threading.Timer(20.0, may_end.set)
    rescue.start()
    try:
        with pytest.raises(ExceptionGroup):
            ad.run_local(main, ranks=2)
    finally:
        rescue.cancel()


def _hold_the_disk(monkeypatch: pytest.MonkeyPatch, writing: threading.Event, may_end: threading.Event) -> None:
    """Let files be written only when ``may_end`` is set; ``writing`` is set when one is to be."""
    write_rank = checkpoint_files.write_rank

    def held(*args: Any) -> Any:
        writing.set()
        assert may_end.wait(30.0)
        return write_rank(*args)

    monkeypatch.setattr(checkpoint_files, "write_rank", held)
