"""Tests which population checkpoints are refused: odd, incomplete or hostile files, other models, unfit content."""

from __future__ import annotations

import io
import json
import os
import random
import zipfile
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support.facts import naming
from support.saved_populations import change_entries, load, made, put, put_bytes, save, weights_of
from torch import nn

import asyncdist as ad
from asyncdist import World
from asyncdist.errors import RemoteError
from asyncdist.functional.soups.saved import uniform_soup
from asyncdist.trust import torch_files


def _without_state(state: dict[str, Any]) -> None:
    state["optimizer"]["state"] = "none"


def _with_number(state: dict[str, Any]) -> None:
    state["model"][next(iter(state["model"]))] = 3


def _with_sparse(state: dict[str, Any]) -> None:
    name, weight = next(iter(state["model"].items()))
    state["model"][name] = weight.to_sparse()


def _with_meta(state: dict[str, Any]) -> None:
    state["model"]["0.weight"] = torch.empty(3, 4, device="meta")


def _with_state(**entries: Any) -> Callable[[dict[str, Any]], None]:
    """Return a function that changes the optimizer's state of the first parameter."""
    return lambda state: state["optimizer"]["state"].setdefault(0, {}).update(entries)


def _with_option(**options: Any) -> Callable[[dict[str, Any]], None]:
    return lambda state: state["optimizer"]["param_groups"][0].update(options)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (_without_state, "reading it raised AttributeError"),
        (_with_number, "is a Tensor in this model and a int in the checkpoint"),
        (_with_sparse, "has the layout torch.strided in this model and torch.sparse_coo in the checkpoint"),
        (_with_meta, r"'0.weight' has no values in the checkpoint \(device meta\)"),
        (_with_state(exp_avg=torch.zeros(7)), r"'exp_avg' of parameter 0 must have the shape \(3, 4\), got \(7,\)"),
        (_with_state(exp_avg=torch.zeros(1).expand(3, 10**7)), r"must have the shape \(3, 4\), got"),
        (_with_state(exp_avg=torch.zeros(1).expand(3, 10**12)), "it has expanded tensors of 12000000000000 bytes"),
        (_with_option(params=torch.zeros(1).expand(10**9)), "it has expanded tensors of 4000000000 bytes"),
        (_with_option(params=torch.arange(4)), "the parameters of a group must be a list, got a Tensor"),
        (
            lambda state: state.update(extra=[torch.zeros(1).expand(3 << 26)] * 5 + [torch.ones(1).expand(3 << 26)]),
            "it has expanded tensors of 1610612736 bytes",
        ),
        (_with_option(params=[0, 1, 2, (-1, -2)]), "the parameters of a group must be numbers or names, got a tuple"),
        (_with_state(exp_avg=torch.zeros(3, 4, device="meta")), "'exp_avg' of parameter 0 has no values"),
        (_with_state(exp_avg=torch.ones(3, 4, dtype=torch.int64)), "must have floating-point numbers, got torch.int64"),
        (_with_state(exp_avg="x"), "must be a tensor or a number, got 'x'"),
        (lambda state: state["optimizer"]["state"].update({0: "x"}), "of parameter 0 must be a dictionary, got 'x'"),
        (
            lambda state: state["optimizer"]["state"].update({4: {}}),
            "has 4 parameters, but the checkpoint",
        ),
        (_with_option(lr="fast"), "'lr' must be like 0.1 of this optimizer, got 'fast'"),
        (_with_option(lr=torch.zeros(2)), "'lr' must be like 0.1 of this optimizer"),
        (_with_option(betas=(0.9,)), r"'betas' must be like \(0.9, 0.999\)"),
        (_with_option(amsgrad="no"), "'amsgrad' must be like False"),
        (lambda state: state["optimizer"]["param_groups"][0].pop("lr"), "group 0 of the optimizer has no 'lr'"),
    ],
)
def test_a_whole_checkpoint_of_odd_content_changes_nothing(
    change: Callable[[dict[str, Any]], None], words: str, tmp_path: Path
) -> None:
    """Regression: an invalid file was detected only after the model, or a part of it, had been loaded."""
    folder = ad.simulate(save, tmp_path, [None], ranks=1).value()
    path, manifest = folder / "rank-00000.pt", folder / "manifest.json"
    state = torch.load(path, weights_only=True)
    change(state)
    torch.save(state, path)
    told = json.loads(manifest.read_text())
    told["files"][0] |= {"nbytes": path.stat().st_size, "crc32": zlib.crc32(path.read_bytes())}
    manifest.write_text(json.dumps(told))

    async def main(world: World) -> None:
        model, optimizer = made(5)
        before = [parameter.clone() for parameter in model.parameters()]
        with pytest.raises(ValueError, match=words):
            await ad.load_population(folder, model, optimizer)
        assert all(map(torch.equal, before, model.parameters()))

    ad.simulate(main, ranks=1).value()


@pytest.mark.parametrize(
    ("record", "words"),
    [
        ("compressed", "it has compressed records, which torch.save does not write"),
        ("overlapping", "its records are larger than the file"),
        ("bytearray", "it has a bytearray"),
        ("BYTEARRAY", "it has a bytearray"),
        ("hidden", "its list of records is not where torch.save writes it"),
    ],
)
@pytest.mark.parametrize("read", [torch_files.load, lambda path: uniform_soup(nn.Linear(1, 1), path)])
def test_a_file_that_would_fill_the_memory_is_not_read(
    record: str, words: str, read: Callable[[Path], Any], tmp_path: Path
) -> None:
    """Regression: a file of 12 KB filled 6 GiB, and later one whose pickle's name had capitals, or with two lists."""
    torch.save({"weight": torch.zeros(1, 1), "bias": torch.zeros(1)}, tmp_path / "good.pt")
    path = tmp_path / "bad.pt"
    large = b"\x80\x02cbuiltins\nbytearray\n\x8a\x05" + (6 << 30).to_bytes(5, "little") + b"\x85R."
    compression = zipfile.ZIP_DEFLATED if record == "compressed" else zipfile.ZIP_STORED
    with zipfile.ZipFile(tmp_path / "good.pt") as good, zipfile.ZipFile(path, "w", compression) as bad:
        for name in good.namelist():
            is_changed = record.lower() == "bytearray" and name.endswith("data.pkl")
            bad.writestr(name.upper() if record.isupper() else name, large if is_changed else good.read(name))
        if record == "overlapping":
            bad.writestr("data", bytes(9000))
            bad.infolist().extend([bad.getinfo("data")] * 3)
    if record == "hidden":
        hide_records(path, tmp_path / "good.pt")
    with pytest.raises(ValueError, match=words):
        read(path)


def hide_records(path: Path, good: Path) -> None:
    """Write compressed records that only torch finds, where the archive's end says, and the records of ``good``."""
    shown, hidden = io.BytesIO(), io.BytesIO()
    for buffer, compression in ((shown, zipfile.ZIP_STORED), (hidden, zipfile.ZIP_DEFLATED)):
        buffer.write(b"PK\x03\x04" + bytes(2000) if buffer is hidden else b"")
        with zipfile.ZipFile(good) as source, zipfile.ZipFile(buffer, "w", compression) as target:
            for name in source.namelist():
                target.writestr(name, source.read(name))
    start, end = zipfile.ZipFile(hidden).start_dir, hidden.getvalue().rindex(b"PK\x05\x06")
    records, directory = shown.getvalue()[: (at := zipfile.ZipFile(shown).start_dir)], shown.getvalue()[at:-22]
    assert len(directory) == end - start < len(records) < 2000
    data = bytearray(hidden.getvalue()[:end] + directory + hidden.getvalue()[end:])
    data[len(directory) : len(directory) + len(records)] = records  # Python adds the first list's size to offsets
    path.write_bytes(data)


def test_a_bytearray_in_an_old_file_is_refused(tmp_path: Path) -> None:
    torch.save({"a": bytearray(3)}, tmp_path / "old.pt", _use_new_zipfile_serialization=False)
    with pytest.raises(ValueError, match="it has a bytearray"):
        torch_files.load(tmp_path / "old.pt")
    torch.save({"a": torch.ones(2)}, tmp_path / "old.pt", _use_new_zipfile_serialization=False)
    assert torch.equal(torch_files.load(tmp_path / "old.pt", is_mapped=True)["a"], torch.ones(2))


def test_what_no_load_would_accept_is_refused_in_extra(tmp_path: Path) -> None:
    with pytest.raises(TypeError, match=r"extra must have only tensors, numbers, strings, .* bytearray"):
        ad.simulate(save, tmp_path, [1.0], None, bytearray(3), ranks=1, strict=True).value()
    with pytest.raises(TypeError, match="the state cannot be saved: it has expanded tensors of 4294967296 bytes"):
        ad.simulate(save, tmp_path, [1.0], None, torch.zeros(1).expand(1 << 30), ranks=1, strict=True).value()


def test_a_named_pipe_in_a_checkpoint_is_not_waited_for(tmp_path: Path) -> None:
    folder = ad.simulate(save, tmp_path, [None], ranks=1).value()
    folder.joinpath("rank-00000.pt").unlink()
    os.mkfifo(folder / "rank-00000.pt")
    with pytest.raises(ValueError, match=r"rank-00000\.pt must be a regular file"):
        ad.simulate(load, tmp_path, ranks=1).value()


@pytest.mark.parametrize(
    ("spoil", "kind", "words"),
    [
        (lambda folder: (folder / "manifest.json").write_text("{"), ValueError, "must be the manifest"),
        (
            lambda folder: (folder / "rank-00000.pt").write_bytes(b"abc"),
            ValueError,
            "must have the .* bytes and the checksum of its manifest, got 3 bytes",
        ),
        (lambda folder: (folder / "rank-00000.pt").unlink(), FileNotFoundError, "rank-00000.pt"),
        (lambda folder: change_version(folder), ValueError, "must have the checkpoint version 1, got 2"),
        (lambda folder: change_entries(folder, nbytes=-1), ValueError, r"Expected `int` >= 0 - at `\$\[0\].nbytes`"),
        (lambda folder: change_entries(folder, safetensors="x"), ValueError, "Expected `object | null`, got `str`"),
        (lambda folder: change_entries(folder, metric=10**400), ValueError, "must describe the file of each rank"),
        (
            lambda folder: put(folder, [1]),
            ValueError,
            "reading it raised ValueError: the part 'model'",
        ),
        (lambda folder: put(folder, {}, random={}), ValueError, "reading it raised KeyError: 'python'"),
        (
            lambda folder: put(folder, {}, random=RANDOM),
            ValueError,
            "position of numpy's generator must be from 0 to 624, got 625",
        ),
        (
            lambda folder: put(folder, {}, random={**RANDOM, "numpy": numpy_text("Philox", buffer_pos=-1)}),
            ValueError,
            "position of numpy's generator must be from 0 to 4, got -1",
        ),
        (
            lambda folder: put(folder, {}, random={**RANDOM, "numpy": numpy_text("PCG64", bit_generator="shuffle")}),
            ValueError,
            "numpy's generator must be one of numpy's, got 'shuffle'",
        ),
        (lambda folder: put(folder, {}, random={**RANDOM, "numpy": "[]"}), ValueError, "reading it raised TypeError"),
        (lambda folder: put(folder, {}, optimizer=[]), ValueError, "reading it raised TypeError"),
        (lambda folder: put_bytes(folder, b"no archive"), ValueError, "rank-00000.pt must be the file of a rank"),
    ],
)
def test_incomplete_checkpoint_is_refused_and_changes_nothing(
    spoil: Any, kind: type[Exception], words: str, tmp_path: Path
) -> None:
    ad.simulate(save, tmp_path, [1.0, 2.0], ranks=2, strict=True).value()
    spoil(tmp_path / "checkpoint-000001")

    async def main(world: World) -> list[list[float]]:
        model, optimizer = made()
        before = weights_of(model)
        with pytest.raises(kind if world.rank == 0 else RemoteError, match=words):
            await ad.load_population(tmp_path, model, optimizer)
        assert weights_of(model) == before
        return before

    ad.simulate(main, ranks=2, strict=True).value()


RANDOM = {
    "python": random.getstate(),
    "numpy": ("MT19937", torch.zeros(624, dtype=torch.int64), 625, 0, 0.0),
    "torch": torch.get_rng_state(),
    "cuda": [],
}


def numpy_text(kind: str, **fields: Any) -> str:
    state: Any = np.random.RandomState(getattr(np.random, kind)(1)).get_state(legacy=False)
    return json.dumps({**state, **fields}, default=np.ndarray.tolist)


def change_version(folder: Path) -> None:
    manifest = json.loads((folder / "manifest.json").read_text())
    (folder / "manifest.json").write_text(json.dumps({**manifest, "version": 2}))


def test_another_model_is_told_by_its_first_difference(tmp_path: Path) -> None:
    ad.simulate(save, tmp_path, [1.0], ranks=1, strict=True).value()
    with pytest.raises(
        ValueError, match=r"same layout: '0.weight' has the shape \(5, 4\) in this model and \(3, 4\) in the checkpoint"
    ):
        ad.simulate(load, tmp_path, 5, ranks=1, strict=True).value()


def test_what_cannot_be_saved_is_refused_on_all_ranks(tmp_path: Path) -> None:
    async def main(world: World) -> None:
        for unfit in (Path("x"), lambda: None):
            extra = {"f": unfit} if world.rank == 1 else None
            with pytest.raises(TypeError if world.rank == 1 else RemoteError, match="extra"):
                await ad.save_population(tmp_path, *made(), extra=extra)
        with pytest.raises(ValueError, match=naming("keep", 0)):
            await ad.save_population(tmp_path, *made(), keep=0)
        with pytest.raises(FileNotFoundError, match="only 2 unfinished checkpoints"):
            await ad.load_population(tmp_path, *made())

    ad.simulate(main, ranks=2, strict=True).value()


def test_model_that_no_load_would_accept_is_refused_at_the_save(tmp_path: Path) -> None:
    class Located(nn.Linear):
        def get_extra_state(self) -> Path:
            return tmp_path

    async def main(world: World) -> None:
        with pytest.raises(
            TypeError, match=r"^model must have only .* torch.load\(weights_only=True\) refuses pathlib"
        ):
            await ad.save_population(tmp_path, Located(2, 1))

    ad.simulate(main, ranks=1, strict=True).value()


def test_checkpoint_of_another_optimizer_is_refused_unchanged(tmp_path: Path) -> None:
    async def main(world: World) -> None:
        model, optimizer = made()
        await ad.save_population(tmp_path, model, optimizer)
        other = made(seed=1)[0]
        before = weights_of(other)
        with pytest.raises(ValueError, match="an optimizer of the class SGD, got Adam"):
            await ad.load_population(tmp_path, other, torch.optim.SGD(other.parameters(), lr=0.1))
        assert weights_of(other) == before

    ad.simulate(main, ranks=1, strict=True).value()


def test_the_check_of_a_large_state_writes_few_records(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Regression: each tensor had a record in a file in memory; 1,000 parameters blocked the event loop for 1 s."""
    counts, check = [], torch_files.check_archive

    def check_and_count(file: Any) -> None:
        counts.append(len(zipfile.ZipFile(file).namelist()))
        check(file)

    async def main(world: World) -> None:
        monkeypatch.setattr(torch_files, "check_archive", check_and_count)
        await ad.save_population(tmp_path, nn.Sequential(*(nn.Linear(1, 1) for _ in range(50))))
        monkeypatch.undo()

    ad.simulate(main, ranks=1, strict=True).value()
    assert counts and max(counts) < 20


class Foreign:
    """An object that is saved as a policy, whose state and attributes have the names of a policy's."""

    def __init__(self, state: dict[str, Any], iteration: Any = None, completed_rounds: Any = ()) -> None:
        self.state, self.iteration, self.completed_rounds = state, iteration, completed_rounds

    def state_dict(self) -> dict[str, Any]:
        return self.state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.state = state_dict


@pytest.mark.parametrize(
    ("state", "entry"),
    [
        ({"metric": "accuracy"}, (None, "max", 1)),
        ({"metric": True, "metric_mode": None}, (None, "max", 1)),
        ({"metric": 10**400, "metric_mode": "min"}, (None, "min", 1)),
        ({"metric": 0.5, "metric_mode": "maximize"}, (None, "max", 1)),
        ({"metric": 3, "metric_mode": "min", "replica_size": 2}, (3.0, "min", 2)),
        ({"metric": 0.5, "metric_mode": ["min"], "replica_size": "2"}, (None, "max", 1)),
        ({"metric": torch.ones(2), "replica_size": True}, (None, "max", 1)),
        ({"replica_size": 0}, (None, "max", 1)),
    ],
)
def test_unsuitable_keys_of_a_foreign_state_are_ignored(
    state: dict[str, Any], entry: tuple[Any, ...], tmp_path: Path
) -> None:
    """Regression: no checkpoint of such an object could be loaded, because its manifest was refused."""

    async def main(world: World) -> None:
        folder = await ad.save_population(tmp_path, nn.Linear(1, 1), policy=Foreign(state))
        manifest = json.loads((folder / "manifest.json").read_text())
        assert tuple(manifest["files"][0][name] for name in ("metric", "metric_mode", "replica_size")) == entry
        loaded = Foreign({})
        await ad.load_population(tmp_path, nn.Linear(1, 1), policy=loaded)
        assert list(loaded.state) == list(state)

    ad.simulate(main, ranks=1, strict=True).value()


@pytest.mark.parametrize("attributes", [(-1,), (True,), (1 << 61,), (3, 5), (3, ["a"]), (3, [1, 2])])
def test_unsuitable_iterations_of_an_object_are_ignored(attributes: tuple[Any, ...], tmp_path: Path) -> None:
    """Regression: a checkpoint of an object with the iteration -1 or True could not be loaded."""

    async def main(world: World) -> None:
        folder = await ad.save_population(tmp_path, nn.Linear(1, 1), policy=Foreign({"a": 1}, *attributes))
        assert ("moment" in json.loads((folder / "manifest.json").read_text())) == (attributes == (3, [1, 2]))
        await ad.load_population(tmp_path, nn.Linear(1, 1), policy=Foreign({}))

    ad.simulate(main, ranks=1, strict=True).value()
