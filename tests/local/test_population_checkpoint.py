"""Tests saving and resuming a population: to the bit, on a different number of ranks, after a killed save."""

from __future__ import annotations

import errno
import functools
import json
import random
import resource
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support.facts import names
from support.saved_populations import load, made, put, save, weights_of
from torch import nn

import asyncdist as ad
from asyncdist import World
from asyncdist.errors import LocalProtocolError, RankLostError, RemoteError
from asyncdist.functional.checkpoints import checkpoint_files, checkpoint_state, manifests
from asyncdist.functional.checkpoints.checkpoint_files import ModelFormat
from asyncdist.functional.seeding import RestoredNumbers
from asyncdist.functional.soups.saved import uniform_soup
from asyncdist.simulation import Fault, Kill, Restart
from asyncdist.tensors.optimizers import loading
from protocols import AsyncSelectiveAveragingPolicy, AverageAllPolicy, OneSidedSelectiveAveragingPolicy

KINDS = [AverageAllPolicy, AsyncSelectiveAveragingPolicy, OneSidedSelectiveAveragingPolicy]


def train(model: nn.Module, optimizer: torch.optim.Optimizer) -> float:
    """Make a step that uses all random states."""
    shift = random.random() + float(np.random.random())
    optimizer.zero_grad()
    loss = (model(torch.randn(5, 4)) - shift).square().mean()
    loss.backward()
    optimizer.step()
    return -float(loss.detach())


def average_all(model: nn.Module, optimizer: torch.optim.Optimizer) -> AverageAllPolicy:
    return AverageAllPolicy(model, optimizer, average_every=3)


@pytest.mark.slow
def test_a_population_goes_on_to_the_bit(tmp_path: Path) -> None:
    async def main(world: World, first: int, last: int) -> tuple[list[list[float]], int]:
        model, optimizer = made(world.rank)
        policy = average_all(model, optimizer)
        if first:
            found = await ad.load_population(tmp_path, model, optimizer, policy=policy)
            assert (found.source, found.is_copy, found.extra) == (world.rank, False, {"epoch": first})
        async with policy:
            for _ in range(first, last):
                train(model, optimizer)
                await policy.step()
            if not first and last == 10:
                await ad.save_population(tmp_path, model, optimizer, policy=policy, extra={"epoch": last})
        return weights_of(model), policy.iteration

    straight = ad.simulate(main, 0, 20, ranks=3, seed=1, strict=True).results
    half = ad.simulate(main, 0, 10, ranks=3, seed=1, strict=True).results
    resumed = ad.simulate(main, 10, 20, ranks=3, seed=2, strict=True).results
    assert resumed == straight != half
    assert resumed[0][1] == 20


@pytest.mark.parametrize("kind", KINDS)
def test_the_state_of_a_policy_may_travel_as_json(kind: Any) -> None:
    async def main(_: World) -> tuple[dict[str, Any], dict[str, Any]]:
        model, optimizer = made()
        async with kind(model, optimizer, average_every=2) as policy:
            await policy.step(1.0)
        again = kind(model, optimizer, average_every=2)
        again.load_state_dict(json.loads(json.dumps(policy.state_dict())))
        async with again:
            return policy.state_dict(), again.state_dict()

    for saved, loaded in ad.simulate(main, ranks=2, strict=True).results:
        assert saved == loaded


@pytest.mark.parametrize("kind", KINDS)
def test_a_policy_goes_on_with_its_state(kind: Any, tmp_path: Path) -> None:
    async def main(world: World) -> tuple[dict[str, Any], dict[str, Any]]:
        model, optimizer = made()
        async with kind(model, optimizer, average_every=2, group=await world.new_group([0, 1])) as policy:
            for i in range(5):
                await policy.step(float(i + world.rank))
        await ad.save_population(tmp_path, model, optimizer, policy=policy)
        again = kind(model, optimizer, average_every=2)
        await ad.load_population(tmp_path, model, optimizer, policy=again)
        loaded = again.state_dict()
        async with again:
            await again.step(1.0)
            with pytest.raises(LocalProtocolError, match="must be called before the policy is entered"):
                again.load_state_dict(loaded)
        assert again.iteration == 6
        return policy.state_dict(), loaded

    for saved, loaded in ad.simulate(main, ranks=2, strict=True).results:
        assert saved == loaded
        assert saved["iteration"] == 5


def test_resumed_rank_may_change_from_metric_to_age() -> None:
    """Regression: such a rank was never replaced again."""

    async def main(world: World) -> int:
        model, optimizer = made()
        async with OneSidedSelectiveAveragingPolicy(
            model, optimizer, average_every=2, replacement_mode="worst_ratio"
        ) as policy:
            await policy.step(1.0)
        again = OneSidedSelectiveAveragingPolicy(model, optimizer, average_every=2, age_range=(4, 6))
        again.load_state_dict(policy.state_dict())
        async with again:
            for _ in range(40):
                await again.step(1.0)
        return again.statistics().num_replacements

    assert min(ad.simulate(main, ranks=2, strict=True).results) > 1


def test_a_copy_does_not_draw_what_its_original_draws(tmp_path: Path) -> None:
    async def main(world: World) -> int:
        model, optimizer = made()
        policy = OneSidedSelectiveAveragingPolicy(model, optimizer, average_every=2, age_range=(5, 10**6))
        if world.size == 4:
            await ad.load_population(tmp_path, model, optimizer, policy=policy)
        async with policy:
            for _ in range(4):
                await policy.step(1.0)
            if world.size == 2:
                await ad.save_population(tmp_path, model, optimizer, policy=policy)
        return int(policy.state_dict()["dies_at"])

    saved = ad.simulate(main, ranks=2, strict=True).results
    loaded = ad.simulate(main, ranks=4, strict=True).results
    assert loaded[:2] == saved
    assert len(set(loaded)) == 4


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"policy": "AverageAllPolicy"}, "'policy' must be 'AsyncSelectiveAveragingPolicy', got 'AverageAllPolicy'"),
        ({"version": 9}, "'version' must be 1, got 9"),
        ({"iteration": -1}, "iteration must be an integer >= 0, got -1"),
    ],
)
def test_a_state_that_does_not_fit_is_refused(change: dict[str, Any], words: str) -> None:
    policy = AsyncSelectiveAveragingPolicy(*made(), average_every=2)
    with pytest.raises(ValueError, match=words):
        policy.load_state_dict({**policy.state_dict(), **change})
    with pytest.raises(ValueError, match="must have the entry 'iteration'"):
        policy.load_state_dict({"policy": "AsyncSelectiveAveragingPolicy", "version": 1})
    assert policy.iteration == 0


def test_fewer_ranks_go_on_with_the_best_and_more_with_copies(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Regression: the warnings named a line of asyncdist as their place."""
    ad.simulate(save, tmp_path, [0.5, float("nan"), 2.0, 1.0], ranks=4, strict=True).value()
    assert ad.simulate(load, tmp_path, ranks=2, strict=True).results == ((2, False, 2.0), (3, False, 3.0))
    more = ad.simulate(load, tmp_path, ranks=6, strict=True).results
    assert caplog.messages[-1].endswith("states of 4 ranks, so 2 of the 6 ranks begin as copies of others")
    assert [source for source, _, _ in more] == [0, 1, 2, 3, 2, 3]
    assert [is_copy for _, is_copy, _ in more] == [False] * 4 + [True] * 2
    ad.simulate(save, tmp_path, [None] * 3, ranks=3, strict=True).value()
    assert [source for source, _, _ in ad.simulate(load, tmp_path, ranks=2).results] == [0, 1]
    assert names(caplog.messages[-1], "no finite metrics", "the first 2 of its 3 ranks")


def test_the_newest_are_kept(tmp_path: Path) -> None:
    """Regression: a folder with the name ``checkpoint-²`` raised a ValueError."""
    (tmp_path / "checkpoint-000007").mkdir()  # the folder of a save that was killed
    foreign = ["checkpoint-²", "checkpoint-٣", "checkpoint-500"]
    for name in foreign:
        (tmp_path / name).mkdir()
    for _ in range(3):
        ad.run_local(save, tmp_path, [1.0, 2.0], 2, ranks=2, strict=True)
    kept = {entry.name for entry in tmp_path.iterdir()}
    assert kept == {"checkpoint-000009", "checkpoint-000010", *foreign}
    found = ad.simulate(load, tmp_path / "checkpoint-000009", ranks=2, strict=True).results
    assert [source for source, _, _ in found] == [0, 1]


def test_old_checkpoints_are_deleted_if_the_newest_was_deleted(tmp_path: Path) -> None:
    """Regression: ValueError, if another job deleted the new checkpoint before its ranks deleted older ones."""
    for number in (1, 2, 4):
        (tmp_path / manifests.name_of(number)).mkdir()
    checkpoint_files._delete_old(tmp_path / manifests.name_of(3), keep=1)
    assert manifests.numbers(tmp_path) == [4]


def test_a_checkpoint_behind_a_link_is_not_deleted(tmp_path: Path) -> None:
    """Regression: the manifest behind a symbolic link, in a different folder, was deleted."""
    aside, place = tmp_path / "best", tmp_path / "checkpoints"
    ad.simulate(save, place, [None], 1, ranks=1).value().rename(aside)
    place.joinpath("checkpoint-000001").symlink_to(aside)
    for _ in range(3):
        ad.simulate(save, place, [None], 1, ranks=1).value()
    assert sorted(each.name for each in place.iterdir()) == ["checkpoint-000001", "checkpoint-000004"]
    assert ad.simulate(load, aside, ranks=1).results == ((0, False, 0.0),)


@pytest.mark.parametrize("is_old", [False, True])
def test_the_optimizers_parameters_may_be_in_another_order(
    is_old: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Files of earlier versions have no names: the order counts, and a warning says so."""

    async def main(world: World, is_saving: bool) -> tuple[float, float]:
        model = nn.ParameterDict({"a": torch.ones(2), "b": torch.ones(2)})
        order = [model["a"], model["b"]] if is_saving else [model["b"], model["a"]]
        optimizer = torch.optim.Adam(order)
        if not is_saving:
            await ad.load_population(tmp_path, model, optimizer)
            return tuple(float(optimizer.state[model[name]]["exp_avg"][0]) for name in "ab")  # type: ignore[return-value]
        (model["a"] + 2 * model["b"]).sum().backward()
        optimizer.step()
        await ad.save_population(tmp_path, model, optimizer)
        return 0.0, 0.0

    ad.simulate(main, True, ranks=1, strict=True).value()
    if is_old:
        put(tmp_path / "checkpoint-000001", {}, optimizer_names=None)
    found = ad.simulate(main, False, ranks=1, strict=True).value()
    assert found == pytest.approx((0.2, 0.1) if is_old else (0.1, 0.2))
    assert [names(each.message, "earlier version") for each in caplog.records] == [True] * is_old


def test_files_open_with_torch_alone(tmp_path: Path) -> None:
    ad.simulate(save, tmp_path, [1.0], None, [torch.ones(2), {"a": (1, "b")}], ranks=1, strict=True).value()
    state = torch.load(tmp_path / "checkpoint-000001" / "rank-00000.pt", weights_only=True)
    model, optimizer = made()
    model.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])
    assert state["extra"][1] == {"a": (1, "b")}


@pytest.mark.parametrize("ranks", [1, 3])
def test_all_ranks_may_begin_anew_where_there_is_no_checkpoint(ranks: int, tmp_path: Path) -> None:
    async def main(world: World) -> int:
        model, optimizer = made()
        try:
            found = await ad.load_population(tmp_path / "none", model, optimizer)
        except FileNotFoundError as error:
            assert "must contain a complete population checkpoint, but it contains no checkpoint" in str(error)
            await ad.save_population(tmp_path / "none", model, optimizer, extra=1)
            return 0
        return int(found.extra)

    assert ad.simulate(main, ranks=ranks, strict=True).results == (0,) * ranks
    assert ad.simulate(main, ranks=ranks, strict=True).results == (1,) * ranks


def test_a_learning_rate_that_numpy_computed_is_loaded_again(tmp_path: Path) -> None:
    rates = np.logspace(-4, -2, 2)

    async def save_it(world: World) -> None:
        model, optimizer = made()
        optimizer.param_groups[0].update(lr=rates[world.rank], betas=(np.float32(0.5), 0.9), name=np.str_("w"))
        await ad.save_population(tmp_path, model, optimizer, extra={"rates": [rates[0]], np.int64(3): "three"})

    async def load_it(world: World) -> None:
        model, optimizer = made()
        found = await ad.load_population(tmp_path, model, optimizer)
        group = optimizer.param_groups[0]
        assert (group["lr"], group["betas"], group["name"]) == (rates[world.rank], (0.5, 0.9), "w")
        assert found.extra == {"rates": [rates[0]], 3: "three"}
        assert type(group["lr"]) is type(found.extra["rates"][0]) is float

    ad.simulate(save_it, ranks=2, strict=True).value()
    ad.simulate(load_it, ranks=2, strict=True).value()


class Prepared:
    """An optimizer in a wrapper, as Accelerate's."""

    __module__ = "accelerate.optimizer"

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer = optimizer

    def __getattr__(self, name: str) -> Any:
        return getattr(self.optimizer, name)


@pytest.mark.parametrize("wraps", [(True, True), (True, False), (False, True)])
def test_the_class_inside_a_prepared_optimizer_counts(wraps: tuple[bool, bool], tmp_path: Path) -> None:
    """Regression: another class was loaded, and one side that was not prepared was refused."""

    def prepared(optimizer: torch.optim.Optimizer, place: int) -> Any:
        return Prepared(optimizer) if wraps[place] else optimizer

    async def main(world: World) -> None:
        model, optimizer = made()
        train(model, optimizer)
        await ad.save_population(tmp_path, model, prepared(optimizer, 0))
        other, same = made(seed=1)
        before = weights_of(other)
        with pytest.raises(ValueError, match="an optimizer of the class SGD, got Adam"):
            await ad.load_population(tmp_path, other, prepared(torch.optim.SGD(other.parameters(), lr=0.1), 1))
        assert weights_of(other) == before
        await ad.load_population(tmp_path, other, prepared(same, 1))
        assert weights_of(other) == weights_of(model)

    ad.simulate(main, ranks=1, strict=True).value()


def compiled(seed: int, part: str) -> tuple[nn.Module, torch.optim.Optimizer]:
    """Return a model with BatchNorm, of which nothing, a layer or the whole is compiled, and its optimizer."""
    torch.manual_seed(seed)
    layer: Any = nn.Linear(4, 3)
    first: Any = torch.compile(layer, backend="eager") if part == "layer" else layer
    plain = nn.Sequential(first, nn.BatchNorm1d(3))
    model: Any = torch.compile(plain, backend="eager") if part == "whole" else plain
    return model, torch.optim.Adam(reversed([*model.parameters()]) if part == "layer" else model.parameters(), lr=0.1)


@pytest.mark.parametrize("format", ["torch", "safetensors"])
@pytest.mark.parametrize("is_old", [False, True])
@pytest.mark.parametrize("parts", [("whole", ""), ("", "whole"), ("layer", "whole")])
def test_a_compiled_model_fits_a_plain_one(
    parts: tuple[str, str], is_old: bool, format: ModelFormat, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Regression: the names that torch.compile had changed were saved, and the plain model did not fit."""

    async def main(world: World) -> None:
        model, optimizer = compiled(0, parts[0])
        for parameter in model.parameters():
            parameter.grad = torch.full_like(parameter, float(parameter.numel()))
        optimizer.step()
        with monkeypatch.context() as patched:
            if is_old:
                patched.setattr(checkpoint_state, "plain_state", lambda state: state)
                patched.setattr(loading, "plain_name", lambda name: name)
            folder = await ad.save_population(tmp_path, model, optimizer, format=format)
        saved = checkpoint_files.read_rank(folder, manifests.find_newest(folder)[1]["files"][0])["model"]
        assert any("_orig_mod" in name for name in saved) == (is_old and parts[0] != "")
        other, same = compiled(1, parts[1])
        await ad.load_population(tmp_path, other, same)
        assert weights_of(other) == weights_of(model)
        pairs = zip(model.parameters(), other.parameters(), strict=True)
        assert all(optimizer.state[one]["exp_avg"].equal(same.state[two]["exp_avg"]) for one, two in pairs)
        soup, _ = compiled(2, parts[1])
        uniform_soup(soup, tmp_path)
        assert weights_of(soup) == weights_of(model)

    ad.simulate(main, ranks=1, strict=True).value()


class FabricModule(nn.Module):
    """Wraps a module under the names of Lightning's Fabric, whose state dict has the wrapped module's names."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self._forward_module = self._original_module = module

    def state_dict(self, *args: Any, **options: Any) -> Any:
        return self._original_module.state_dict(*args, **options)

    def load_state_dict(self, *args: Any, **options: Any) -> Any:
        return self._original_module.load_state_dict(*args, **options)


@pytest.mark.parametrize("is_saved_wrapped", [False, True])
def test_a_model_of_fabric_fits_a_plain_one(is_saved_wrapped: bool, tmp_path: Path) -> None:
    """Regression: the optimizer was refused, as if it had other parameters, and a soup raised KeyError."""

    async def main(world: World) -> None:
        model, optimizer = made(0)
        train(model, optimizer)
        await ad.save_population(tmp_path, FabricModule(model) if is_saved_wrapped else model, optimizer)
        other, same = made(1)
        wrapped = other if is_saved_wrapped else FabricModule(other)
        await ad.load_population(tmp_path, wrapped, same)
        assert weights_of(other) == weights_of(model)
        pairs = zip(model.parameters(), other.parameters(), strict=True)
        assert all(optimizer.state[one]["exp_avg"].equal(same.state[two]["exp_avg"]) for one, two in pairs)
        train(other, same)
        uniform_soup(wrapped, tmp_path)
        assert weights_of(other) == weights_of(model)

    ad.simulate(main, ranks=1, strict=True).value()


@pytest.mark.slow
@pytest.mark.long
def test_rank_killed_in_a_save_leaves_a_whole_population(tmp_path: Path) -> None:
    """The rank is killed at every fourth turn of the loop: the newest checkpoint is the new one or the previous one."""
    ad.simulate(save, tmp_path, [1.0, 1.0, 1.0], ranks=3, strict=True).value()
    loaded = set()
    for turn in range(1, 100, 4):
        fault = Kill(rank=turn % 3, at_turn=turn // 3 + 1)
        report = ad.simulate(save, tmp_path, [1.0, 1.0, 1.0], 1, ranks=3, seed=turn, faults=[fault])
        assert all(
            result is None or isinstance(result, (Path, RankLostError, RemoteError)) for result in report.results
        )
        folder = ad.simulate(newest, tmp_path, ranks=3, strict=True).results[0]
        loaded.add(folder.name)
    assert len(loaded) > 2, "too few saves were complete"


async def newest(world: World, path: Path) -> Path:
    return (await ad.load_population(path, *made())).folder


@pytest.mark.parametrize("format", ["torch", "safetensors"])
def test_save_on_a_full_disk_names_the_file_and_leaves_no_part(
    format: ModelFormat, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Regression: torch reported an unexpected position, and the partial file filled the disk for later saves.

    The complete file with the weights stayed, too.
    """
    save = checkpoint_files._save
    monkeypatch.setattr(checkpoint_files, "_save", lambda state, path: save(state, Path("/dev/full")))
    state = {"model": {"weight": torch.ones(1 << 16)}}
    with pytest.raises(OSError, match=r"No space left on device: '.*rank-00000.pt'") as raised:
        checkpoint_files.write_rank(tmp_path, 0, state, format)
    assert raised.value.errno == errno.ENOSPC and not list(tmp_path.iterdir())


def test_a_system_error_of_safetensors_names_the_file(tmp_path: Path) -> None:
    """Regression: SafetensorError did not name the file that could not be written."""
    state = {"model": {"weight": torch.ones(1 << 16)}}
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, before[1]))
    try:
        with pytest.raises(OSError, match=r"'.*rank-00000.safetensors'") as raised:
            checkpoint_files.write_rank(tmp_path, 0, state, "safetensors")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert raised.value.errno == errno.EFBIG and not list(tmp_path.iterdir())


@pytest.mark.parametrize("format", ["torch", "safetensors"])
def test_a_save_changes_no_file_through_planted_links(
    format: ModelFormat, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Regression: the owner of the folder planted ``rank-00000.pt.part``, and the save overwrote the link's target."""
    victim, folder = tmp_path / "victim", tmp_path / "checkpoint-000001"
    victim.write_text("precious")
    folder.mkdir()
    name = "rank-00000.pt" if format == "torch" else "rank-00000.safetensors"
    for each in (f"{name}.part", name):
        (folder / each).symlink_to(victim)
    (tmp_path / "own").mkdir()
    (tmp_path / "own" / name).symlink_to(victim)
    sync = checkpoint_files._sync

    def swapped(path: Path) -> None:
        """Sync, after the owner of the folder has replaced the new folder by another one."""
        if (tmp_path / "own").exists():
            (part,) = folder.glob(".part-*")
            part.rename(tmp_path / "taken")
            (tmp_path / "own").rename(part)
        sync(path)

    monkeypatch.setattr(checkpoint_files, "_sync", swapped)
    checkpoint_files.write_rank(folder, 0, {"model": {"weight": torch.ones(4)}}, format)
    assert victim.read_text() == "precious" and not (folder / name).is_symlink()


def test_no_checkpoint_is_written_or_deleted_through_a_link(tmp_path: Path) -> None:
    """Regression: the owner of the parent folder put a link instead of the checkpoint's folder."""
    home, folder = tmp_path / "home", tmp_path / "checkpoint-000001"
    home.mkdir()
    (home / "manifest.json").write_text("precious")
    folder.symlink_to(home)
    for write in (
        lambda: checkpoint_files.write_rank(folder, 0, {"model": {}}, "torch"),
        lambda: checkpoint_files.finish(folder, [], None),
    ):
        with pytest.raises(OSError, match="checkpoint-000001"):
            write()
    assert [file.name for file in home.iterdir()] == ["manifest.json"]
    assert (home / "manifest.json").read_text() == "precious"


@pytest.mark.slow
@pytest.mark.parametrize(("ranks", "saver"), [(2, 0), (3, 2)])
def test_checkpoints_go_on_after_all_ranks_were_restarted(ranks: int, saver: int, tmp_path: Path) -> None:
    """Regression: no rank saved any more, because each left it to ranks that were never lost."""

    async def main(world: World) -> list[int]:
        model, optimizer = made(0)
        policy = AsyncSelectiveAveragingPolicy(model, optimizer, average_every=3)
        saved = []
        async with policy:
            while (step := policy.iteration) < 70:
                await world.sleep(0.1)
                await policy.step(1.0)
                if step % 10 == 9:
                    folder = await ad.save_population(tmp_path, model, optimizer, policy=policy, extra=step)
                    saved += [step] if folder != tmp_path else []
        return saved

    async def resumed(world: World) -> Any:
        found = await ad.load_population(tmp_path, *made(1))
        return found.extra, found.source, found.is_copy

    faults: list[Fault] = [Kill(0, at_s=1.0), Restart(0, at_s=2.0), Kill(1, at_s=4.0), Restart(1, at_s=5.0)]
    results = ad.simulate(main, ranks=ranks, seed=1, faults=faults).results
    assert 59 in results[saver] and 69 in results[saver]
    files = json.loads((manifests.find_newest(tmp_path)[0] / "manifest.json").read_text())["files"]
    assert [entry["rank"] for entry in files] == [saver], "the others were restarted"
    assert ad.simulate(resumed, ranks=ranks).results == tuple((69, rank, False) for rank in range(ranks))


def test_a_checkpoint_of_some_ranks_names_its_sources(tmp_path: Path) -> None:
    """Regression: the source was the place of the file in the checkpoint, not the rank that had saved it."""

    async def save_some(world: World) -> None:
        if world.rank:
            group = await ad.new_group([1, 2])
            model, optimizer = made(world.rank)
            await ad.save_population(tmp_path, model, optimizer, extra=world.rank, group=group)

    async def load_all(_: World) -> tuple[int, int]:
        model, optimizer = made()
        found = await ad.load_population(tmp_path, model, optimizer)
        return found.source, found.extra

    ad.simulate(save_some, ranks=3, strict=True)
    assert ad.simulate(load_all, ranks=3, strict=True).results == ((1, 1), (2, 2), (1, 1))


def test_huge_metrics_of_a_replica_are_compared() -> None:
    """Regression: the sum of the metrics of a replica's ranks raised OverflowError."""
    metrics = [1.0, 1.0, 1.5e308, 1.5e308]
    files = [{"metric": metric, "metric_mode": "max", "replica_size": 2} for metric in metrics]
    assert manifests.plan(files, 2) == [2, 3]


@pytest.fixture
def generator() -> Iterator[np.random.BitGenerator]:
    """Return numpy's global bit generator, which is a PCG64 during the test."""
    before = np.random.get_bit_generator()
    np.random.set_bit_generator(np.random.PCG64(1))
    yield np.random.get_bit_generator()
    np.random.set_bit_generator(before)


@pytest.mark.parametrize("kind", ["PCG64", "PCG64DXSM", "Philox", "SFC64"])
@pytest.mark.usefixtures("generator")
def test_another_generator_of_numpy_continues(kind: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Regression: save_population, and integrations that compare random states, failed with KeyError or ValueError."""
    np.random.set_bit_generator(getattr(np.random, kind)(1))
    expected = []

    async def main(world: ad.World, *, loads: bool) -> None:
        if loads:
            await ad.load_population(tmp_path, nn.Linear(1, 1))
            return
        np.random.normal()  # stores the second number of a pair
        await ad.save_population(tmp_path, nn.Linear(1, 1))
        restored = RestoredNumbers(None)
        restored.note()
        assert restored.are_unchanged
        expected.extend([np.random.normal(), np.random.rand(), np.random.randint(9)])
        assert not restored.are_unchanged

    ad.run_local(functools.partial(main, loads=False), ranks=1)
    ad.run_local(functools.partial(main, loads=True), ranks=1)
    assert [np.random.normal(), np.random.rand(), np.random.randint(9)] == expected and not caplog.records
    np.random.set_bit_generator(np.random.MT19937(1))
    ad.run_local(functools.partial(main, loads=True), ranks=1)
    assert names(caplog.text, kind, "MT19937")
