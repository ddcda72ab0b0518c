"""Tests the saved states of DiLoCo, and ranks whose options, first weights or rounds differ."""

from __future__ import annotations

import asyncio
import functools
from pathlib import Path
from typing import Any

import pytest
import torch
from scripts.population import Mixed, clone_state, equal_states, sgd
from support.facts import names, naming
from support.seeds import in_ci
from support.tokens import tokens_for
from torch import nn

import asyncdist as ad
from protocols import DiLoCoPolicy

HALF = functools.partial(torch.optim.SGD, lr=0.5, momentum=0.5, nesterov=True)

# -- saved states -----------------------------------------------------------------------------------------------------

SAVED: dict[str, dict[str, Any]] = {
    "default": {},
    "local SGD": {"outer_optimizer": None},
    "tokens": {"weights": "tokens"},
    "in flight": {"fragments": 2, "overlap_steps": 4, "mixing": 0.5},
    "residuals": {"wire": "int8", "error_feedback": 0.9, "overlap_steps": 2},
    "local SGD in flight": {"outer_optimizer": None, "overlap_steps": 3},
    "warm-up": {"warmup_steps": 9, "fragments": 2},
}


def made() -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Linear(6, 1))
    return model, torch.optim.AdamW(model.parameters(), lr=0.05)


async def advance(policy: Any, model: nn.Module, optimizer: Any, steps: range, rank: int) -> None:
    for step in steps:
        generator = torch.Generator().manual_seed(100 * step + rank)
        x = torch.randn(8, 4, generator=generator)
        optimizer.zero_grad()
        (model(x) - x[:, :1]).square().mean().backward()
        optimizer.step()
        await policy.step(tokens=tokens_for(policy, 1 + (step + rank) % 3))


@pytest.mark.slow
@pytest.mark.parametrize("at", [7, pytest.param(10, marks=pytest.mark.long)])
@pytest.mark.parametrize("kind", in_ci(SAVED, "tokens", "in flight", "residuals", "local SGD in flight", "warm-up"))
def test_a_saved_population_continues_to_the_bit(kind: str, at: int, tmp_path: Path) -> None:
    options = {"average_every": 5, **SAVED[kind]}

    async def main(world: ad.World, first: int, last: int) -> Any:
        model, optimizer = made()
        policy = DiLoCoPolicy(model, optimizer, **options)
        if first:
            await ad.load_population(tmp_path, model, optimizer, policy=policy)
        async with policy:
            await advance(policy, model, optimizer, range(first, last), world.rank)
            if last == at:
                await ad.save_population(tmp_path, model, optimizer, policy=policy)
        return [tensor.tolist() for tensor in model.state_dict().values()]

    straight = ad.simulate(main, 0, 20, ranks=3, seed=1, strict=True).results
    half = ad.simulate(main, 0, at, ranks=3, seed=1, strict=True).results
    resumed = ad.simulate(main, at, 20, ranks=3, seed=2, strict=True).results
    assert resumed == straight != half


def test_a_state_in_flight_is_saved_after_settle() -> None:
    async def main(world: ad.World) -> Any:
        model, optimizer = made()
        async with DiLoCoPolicy(model, optimizer, average_every=4, overlap_steps=3) as policy:
            await advance(policy, model, optimizer, range(4), world.rank)
            with pytest.raises(ad.BusyError, match="settle"):
                policy.state_dict()
            before = clone_state(model)
            await policy.settle()
            state = policy.state_dict()
            assert equal_states(before, clone_state(model)), "settle() must not change weights"
            await advance(policy, model, optimizer, range(4, 8), world.rank)
        again, other = made()
        again.load_state_dict(before)
        loaded = DiLoCoPolicy(again, other, average_every=4, overlap_steps=3)
        loaded.load_state_dict(state)
        assert str(loaded.state_dict()) == str(state), (
            "a state that was loaded but never entered must be returned unchanged"
        )
        return None

    ad.simulate(main, ranks=2, strict=True)


def test_a_state_of_other_options_is_refused() -> None:
    async def main(world: ad.World) -> Any:
        model, optimizer = made()
        async with DiLoCoPolicy(model, optimizer, average_every=4, fragments=2) as policy:
            state = policy.state_dict()
        again, other = made()
        with pytest.raises(ValueError, match=naming("fragments", 1, 2)):
            DiLoCoPolicy(again, other, average_every=4).load_state_dict(state)

    ad.simulate(main, ranks=2, strict=True)


def test_a_state_of_radial_means_needs_its_wire_and_merge() -> None:
    """Regression: the error named neither option, although one of them was the cause."""

    async def main(world: ad.World) -> None:
        options: dict[str, Any] = {"average_every": 4, "merge": "radial", "wire": "int8"}
        async with DiLoCoPolicy(*made(), **options) as policy:
            state = policy.state_dict()
        for other in ({"merge": "mean"}, {"wire": "bfloat16"}):
            again = DiLoCoPolicy(*made(), **{**options, **other})
            again.load_state_dict(state)
            with pytest.raises(ValueError, match=naming("wire", "merge")):
                async with again:
                    pass

    ad.simulate(main, ranks=1)


# -- ranks that differ ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "options",
    [
        {"average_every": 6},
        {"outer_optimizer": None},
        {"outer_optimizer": HALF},
        {"fragments": 2},
        {"fragment_pattern": "strided"},
        {"fragment_pattern": [["embed", "norm", "wide", "head", "counts", "flags", "nothing"]]},
        {"overlap_steps": 1},
        {"mixing": 0.5},
        {"wire": "bfloat16"},
        {"error_feedback": 0.9},
        {"weights": "tokens"},
        {"warmup_steps": 3},
        {"optimizer_state": "reset"},
    ],
    ids=lambda options: next(iter(options)),
)
def test_options_that_differ_are_named_before_any_data(options: dict[str, Any]) -> None:
    async def main(world: ad.World) -> str:
        model = Mixed(1.0)
        chosen = {"average_every": 4, "fragment_pattern": "balanced", **(options if world.rank == 1 else {})}
        policy = DiLoCoPolicy(model, sgd(model), **chosen)
        with pytest.raises(ad.DisagreementError) as caught:
            async with policy:
                pass
        return str(caught.value)

    for text in ad.simulate(main, ranks=3).results:
        assert names(text, next(iter(options))), text


def test_codecs_with_other_settings_differ() -> None:
    """Regression: only the codec's name was compared, so that ranks misread each other's data."""

    async def main(world: ad.World) -> str:
        model = Mixed(1.0)
        wire = ad.tensors.codecs.TopK(share=0.1 if world.rank else 0.2)
        policy = DiLoCoPolicy(model, sgd(model), average_every=4, wire=wire, error_feedback=0.9)
        with pytest.raises(ad.DisagreementError) as caught:
            async with policy:
                pass
        return str(caught.value)

    assert all(names(text, "wire", "0.1", "0.2") for text in ad.simulate(main, ranks=2).results)


def test_another_first_weight_is_an_error() -> None:
    async def main(world: ad.World) -> str:
        model = Mixed(1.0)
        if world.rank == 1:
            with torch.no_grad():
                model.wide.bias[1] = 2.0
        with pytest.raises(ad.DisagreementError) as caught:
            async with DiLoCoPolicy(model, sgd(model), average_every=4):
                pass
        return str(caught.value)

    assert all(names(text, "first weights", "torch.manual_seed") for text in ad.simulate(main, ranks=3).results)


def test_ranks_that_continue_from_different_rounds_differ() -> None:
    """Regression: without an outer optimizer, such ranks waited for each other's rounds forever."""

    async def main(world: ad.World) -> str:
        model = Mixed(1.0)
        options: dict[str, Any] = {"average_every": 1, "outer_optimizer": None}
        async with DiLoCoPolicy(model, sgd(model), **options) as policy:
            await policy.step()
        again = DiLoCoPolicy(model, sgd(model), **options)
        if world.rank:
            again.load_state_dict(policy.state_dict())
        with pytest.raises(ad.DisagreementError) as caught:
            async with again:
                pass
        return str(caught.value)

    found = ad.simulate(main, ranks=2).results
    assert all(names(text, "rounds completed", "a resume on more ranks") for text in found)


@pytest.mark.parametrize("weights", ["equal", "tokens"])
def test_several_captures_in_one_step_after_cancelled_steps(weights: str) -> None:
    """Regression: the second capture had no tokens, and its weight of 0 was refused."""

    async def main(world: ad.World) -> int:
        model, optimizer = made()
        async with DiLoCoPolicy(model, optimizer, average_every=1, weights=weights) as policy:
            for _ in range(2 + world.rank):
                with pytest.raises(TimeoutError):
                    async with asyncio.timeout(0):
                        await policy.step(tokens=tokens_for(policy, 3))
            for _ in range(4 - world.rank):
                await policy.step(tokens=tokens_for(policy, 3))
            return policy.statistics().average_count

    for ranks in (1, 2):
        assert ad.simulate(main, ranks=ranks, seed=1, strict=True).results == (6,) * ranks
