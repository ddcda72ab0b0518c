"""Tests DiLoCo and asynchronous DiLoCo with ``merge="radial"`` against an oracle in numpy."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import pytest
import torch
from support.facts import naming
from support.seeds import in_ci
from support.tokens import tokens_for
from torch import nn
from unit.test_radial import expected

import asyncdist as ad
from protocols import AsyncDiLoCoPolicy, DiLoCoPolicy, SelectiveDiLoCoPolicy
from simulation.training_runs import drift

OUTER = functools.partial(torch.optim.SGD, lr=0.5, momentum=0.5, nesterov=True)
EVERY, ROUNDS = 2, 50


class Model(nn.Module):
    """An embedding and two layers in float64, whose weights are equal on all ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(5, 3, dtype=torch.float64)
        self.layers = nn.ModuleList(nn.Linear(3, 4, dtype=torch.float64) for _ in range(2))
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.fill_(1.0)


async def train(world: ad.World, kind: Any, options: dict[str, Any], steps: int) -> list[list[Any]]:
    """Return the weights after each round."""
    model, found = Model(), []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    async with kind(model, optimizer, average_every=EVERY, outer_optimizer=OUTER, **options) as policy:
        for step in range(steps):
            with torch.no_grad():
                for place, parameter in enumerate(model.parameters()):
                    parameter.add_(torch.from_numpy(drift(world.rank, step, place, parameter.shape)))
            if info := await policy.step(tokens=tokens_for(policy, world.rank + 1)):
                found.append([parameter.detach().numpy().copy() for parameter in model.parameters()])
                assert info.cosine is None, "the norm of this mean does not measure the ranks' agreement"
    return found


def oracle(ranks: int, weights: list[float]) -> list[list[Any]]:
    """Return the weights after each round, computed tensor by tensor."""
    anchor = [parameter.detach().numpy().copy() for parameter in Model().parameters()]
    momentum: list[Any] = [None] * len(anchor)
    found = []
    for number in range(ROUNDS):
        for place, own in enumerate(anchor):
            given = []
            for rank in range(ranks):
                mine = own.copy()
                for step in range(number * EVERY, (number + 1) * EVERY):
                    mine += drift(rank, step, place, own.shape)
                given.append((own - mine).ravel())
            total = sum(weights)
            plain = sum(weight * each for weight, each in zip(weights, given, strict=True)) / total
            mean = (plain if place == 0 else expected(given, weights)).reshape(own.shape)
            momentum[place] = mean if momentum[place] is None else 0.5 * momentum[place] + mean
            anchor[place] = own - 0.5 * (mean + 0.5 * momentum[place])
        found.append([each.copy() for each in anchor])
    return found


@pytest.mark.parametrize("weights", in_ci(["equal", "tokens"], "tokens"))
def test_fifty_radial_rounds_equal_the_oracle(weights: str) -> None:
    options = {"merge": "radial", "weights": weights}
    results = ad.simulate(train, DiLoCoPolicy, options, EVERY * ROUNDS, ranks=3, seed=1, strict=True).results
    right = oracle(3, [1.0] * 3 if weights == "equal" else [1.0, 2.0, 3.0])
    for found in results:
        for mine, theirs in zip(found, right, strict=True):
            for one, two in zip(mine, theirs, strict=True):
                assert np.abs(one - two).max() <= 1e-12 * max(1.0, np.abs(two).max())
    assert str(results[0]) == str(results[1]) == str(results[2])


@pytest.mark.parametrize("weights", ["equal", "tokens"])
def test_asynchronous_radial_rounds_of_all_ranks_equal_diloco(weights: str) -> None:
    options: dict[str, Any] = {"merge": "radial", "weights": weights}
    one = ad.simulate(train, DiLoCoPolicy, options, 20, ranks=3, seed=1, strict=True).results
    options |= {"quorum": 3, "late": "wait"}
    two = ad.simulate(train, AsyncDiLoCoPolicy, options, 20, ranks=3, seed=1).results
    assert str(one) == str(two)


def test_a_contribution_alone_is_applied_unchanged() -> None:
    results = [
        ad.simulate(train_alone, {"merge": merge, "quorum": 1}, ranks=2, seed=3).results for merge in ("mean", "radial")
    ]
    assert results[0] == results[1]


async def train_alone(world: ad.World, options: dict[str, Any]) -> list[Any]:
    model = Model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    async with AsyncDiLoCoPolicy(model, optimizer, average_every=EVERY, **options) as policy:
        for step in range(12):
            with torch.no_grad():
                for place, parameter in enumerate(model.parameters()):
                    parameter.add_(torch.from_numpy(drift(world.rank, step, place, parameter.shape)))
            await policy.step()
    return [parameter.tolist() for parameter in model.parameters()]


@pytest.mark.parametrize("wire", ["bfloat16", "float16", "int8", "q4"])
def test_radial_means_of_encoded_differences_are_common(wire: str) -> None:
    """Encoded tensors begin at the blocks of the codec; the anchors of all ranks have the same bits."""

    async def main(world: ad.World) -> list[Any]:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Embedding(40, 20), nn.Linear(20, 30), nn.BatchNorm1d(30), nn.Linear(30, 3))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        generator = torch.Generator().manual_seed(world.rank)
        options: dict[str, Any] = {"wire": wire, "error_feedback": 0.9, "merge": "radial"}
        async with DiLoCoPolicy(model, optimizer, average_every=2, **options) as policy:
            for _ in range(8):
                with torch.no_grad():
                    for parameter in model.parameters():
                        parameter.add_(torch.randn(parameter.shape, generator=generator) / 10)
                info = await policy.step()
        assert info.outer_norm is not None and 0.5 < info.outer_norm < 20
        return [tensor.tolist() for tensor in model.state_dict().values()]

    results = ad.simulate(main, ranks=3, seed=1, strict=True).results
    assert results[0] == results[1] == results[2]


def made() -> tuple[nn.Module, torch.optim.Optimizer]:
    model = nn.Linear(2, 2)
    return model, torch.optim.SGD(model.parameters(), lr=0.1)


def test_a_radial_mean_of_whole_weights_is_refused() -> None:
    with pytest.raises(ValueError, match=naming("merge", "outer optimizer")):
        DiLoCoPolicy(*made(), average_every=2, outer_optimizer=None, merge="radial")


def test_ranks_that_merge_differently_are_named_before_any_data() -> None:
    async def main(world: ad.World) -> str:
        with pytest.raises(ad.DisagreementError) as caught:
            async with DiLoCoPolicy(*made(), average_every=2, merge="radial" if world.rank else "mean"):
                pass
        return str(caught.value)

    assert all("merge" in text for text in ad.simulate(main, ranks=2).results)


def test_selective_diloco_may_merge_radially() -> None:
    async def main(world: ad.World) -> tuple[int, ...]:
        model, optimizer = made()
        torch.nn.init.constant_(model.weight, 1.0)
        torch.nn.init.constant_(model.bias, 1.0)
        policy = SelectiveDiLoCoPolicy(model, optimizer, average_every=1, merge="radial", metric_mode="min")
        async with policy:
            with torch.no_grad():
                model.weight -= 0.5 * (world.rank - 1)
            info = await policy.step(loss=lambda: model.weight.square().sum())
        return info.donors

    assert ad.simulate(main, ranks=4, strict=True).results == ((2, 3),) * 4
