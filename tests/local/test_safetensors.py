"""Tests the safetensors files of a population checkpoint: the package opens them, and they load to the bit."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from torch import nn

import asyncdist as ad
from asyncdist import World
from asyncdist.errors import RemoteError
from asyncdist.functional.checkpoints.safetensors_model import read_model, write_model


class Odd(nn.Module):
    """A model with tied weights, a buffer of integers, a view that is not contiguous, and its own extra state."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.one = nn.Linear(8, 8, bias=False)
        self.other = nn.Linear(8, 8, bias=False)
        self.other.weight = self.one.weight
        self.norm = nn.BatchNorm1d(8)
        self.register_buffer("turned", torch.rand(2, 3).T)
        self.register_buffer("wide", torch.rand(2, dtype=torch.complex128))
        self.register_buffer("none", torch.empty(0, 3))
        self.words = f"seed {seed}"

    def get_extra_state(self) -> str:
        return self.words

    def set_extra_state(self, state: str) -> None:
        self.words = state


def equal(one: nn.Module, other: nn.Module) -> bool:
    mine, theirs = one.state_dict(), other.state_dict()
    return mine.keys() == theirs.keys() and all(
        torch.equal(value, theirs[name]) if isinstance(value, torch.Tensor) else value == theirs[name]
        for name, value in mine.items()
    )


@pytest.mark.parametrize("is_beside", [False, True])
def test_safetensors_opens_the_weights_and_training_resumes(is_beside: bool, tmp_path: Path) -> None:
    async def main(world: World) -> None:
        model = Odd(world.rank)
        optimizer = torch.optim.Adam(model.parameters())
        if is_beside:
            folder = await (await ad.async_save_population(tmp_path, model, optimizer, format="safetensors"))
        else:
            folder = await ad.save_population(tmp_path, model, optimizer, format="safetensors")
        file = folder / f"rank-{world.rank:05}.safetensors"
        weights = safetensors.torch.load_file(file)
        assert {"other.weight", "wide", "_extra_state"} == model.state_dict().keys() - weights.keys()
        assert torch.equal(weights["turned"], model.get_buffer("turned"))
        plain = nn.ModuleDict({"one": nn.Linear(8, 8, bias=False)})
        plain.load_state_dict({"one.weight": weights["one.weight"]})
        state = torch.load(file.with_suffix(".pt"), weights_only=True)
        assert state["tied"] == {"other.weight": "one.weight"}

        again = Odd(7)
        found = await ad.load_population(tmp_path, again, torch.optim.Adam(again.parameters()))
        assert found.source == world.rank
        assert equal(again, model)
        assert again.other.weight is again.one.weight

    ad.simulate(main, ranks=2, strict=True).value()


def test_tied_weights_load_by_safetensors_load_model(tmp_path: Path) -> None:
    model = nn.ModuleDict({"b": nn.Linear(3, 3), "a": nn.Linear(3, 3)})
    model["a"].weight = model["b"].weight
    write_model(tmp_path / "model", model.state_dict())
    again = nn.ModuleDict({"b": nn.Linear(3, 3), "a": nn.Linear(3, 3)})
    again["a"].weight = again["b"].weight
    assert safetensors.torch.load_model(again, tmp_path / "model") == (set(), [])
    assert equal(model, again)


@pytest.mark.parametrize(
    "state",
    [
        {},
        {"whole": (flat := torch.rand(10)), "begin": flat[:4], "middle": flat[2:8], "end": flat[8:]},
        {"row": torch.rand(3)[None], "column": torch.rand(3)[:, None], "half": torch.rand(3).bfloat16()},
        {"expanded": torch.rand(1, 3).expand(4, 3), "same": torch.rand(3).expand(2, 3)},
    ],
)
def test_tensors_that_overlap_or_share_come_back_as_they_were(state: dict[str, Any], tmp_path: Path) -> None:
    rest, tied = write_model(tmp_path / "model", state)
    found = read_model(tmp_path / "model", rest, tied)
    assert found.keys() == state.keys()
    assert all(torch.equal(value, found[name]) for name, value in state.items())


def test_a_negated_view_is_not_tied(tmp_path: Path) -> None:
    """Regression: a view like ``number.conj().imag`` was loaded with the sign of the memory that it shares."""
    number = torch.tensor([1 + 2j])
    written = {"imag": number.imag, "negated": number.conj().imag}
    rest, tied = write_model(tmp_path / "model.safetensors", written)
    state = read_model(tmp_path / "model.safetensors", rest, tied)
    assert {name: value.tolist() for name, value in state.items()} == {"imag": [2.0], "negated": [-2.0]}


def test_the_metadata_format_is_no_tied_name(tmp_path: Path) -> None:
    """Regression: a file with a parameter ``pt`` was refused, because its metadata has the entry format=pt."""
    model = nn.Module()
    model.pt = nn.Parameter(torch.ones(3))
    safetensors.torch.save_file(model.state_dict(), tmp_path / "model.safetensors", metadata={"format": "pt"})
    assert ad.uniform_soup(model, [tmp_path / "model.safetensors"]).members == (0,)
    shared = torch.ones(2)
    write_model(tmp_path / "tied.safetensors", {"a": shared, "format": shared})
    with safetensors.safe_open(tmp_path / "tied.safetensors", "pt") as file:
        assert file.metadata() == {"format": "pt"}


def test_torn_or_missing_weights_are_refused_without_a_change(tmp_path: Path) -> None:
    async def main(_: World) -> None:
        folder = await ad.save_population(tmp_path, nn.Linear(2, 2), format="safetensors")
        file = folder / "rank-00000.safetensors"
        content = bytearray(file.read_bytes())
        content[-1] ^= 1
        file.write_bytes(content)
        model = nn.Linear(2, 2)
        before = model.weight.clone()
        with pytest.raises(ValueError, match=r"rank-00000\.safetensors must have the .* bytes and the checksum"):
            await ad.load_population(tmp_path, model)
        file.unlink()
        with pytest.raises(FileNotFoundError, match=r"rank-00000\.safetensors"):
            await ad.load_population(tmp_path, model)
        assert torch.equal(model.weight, before)

    ad.simulate(main, ranks=1, strict=True).value()


def test_unknown_or_uninstalled_format_is_refused_on_all_ranks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def main(world: World) -> None:
        with pytest.raises(ValueError, match="format must be one of 'torch', 'safetensors', got 'pickle'"):
            await ad.save_population(tmp_path, nn.Linear(2, 2), format="pickle")  # type: ignore[arg-type]
        if world.rank == 1:
            monkeypatch.setitem(sys.modules, "safetensors.torch", None)
        kind = ModuleNotFoundError if world.rank == 1 else RemoteError
        with pytest.raises(kind, match=r"asyncdist\[safetensors\]"):
            await ad.save_population(tmp_path, nn.Linear(2, 2), format="safetensors" if world.rank else "torch")

    ad.simulate(main, ranks=2, strict=True).value()
