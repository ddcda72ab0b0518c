"""Tests ``parameters="trainable"``: frozen parameters are neither sent nor written, and must be equal on all ranks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import asyncdist as ad
from protocols import (
    AsyncSelectiveAveragingPolicy,
    AverageAllPolicy,
    OneSidedSelectiveAveragingPolicy,
    ReplicaAveragingPolicy,
)

SIZE, RANK, LAYERS = 64, 2, 4
TRAINED_NBYTES = LAYERS * 2 * SIZE * RANK * 4
ALL_NBYTES = TRAINED_NBYTES + LAYERS * SIZE * SIZE * 4


class Adapted(nn.Module):
    """A model with a frozen weight and a trained low-rank term, as in LoRA."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(SIZE, SIZE), requires_grad=False)
        self.down = nn.Parameter(torch.zeros(RANK, SIZE))
        self.up = nn.Parameter(torch.zeros(SIZE, RANK))

    def forward(self, inputs: Tensor) -> Tensor:
        return inputs @ self.weight.T + inputs @ self.down.T @ self.up.T


def build(number: int, seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    model = nn.Sequential(*(Adapted() for _ in range(LAYERS)))
    with torch.no_grad():
        for parameter in trained(model):
            parameter.fill_(number + 1.0)
    return model


def trained(model: nn.Module) -> list[nn.Parameter]:
    return [parameter for parameter in model.parameters() if parameter.requires_grad]


def frozen(model: nn.Module) -> Tensor:
    return torch.cat([each.detach().reshape(-1) for each in model.parameters() if not each.requires_grad])


def selective(model: nn.Module, **options: Any) -> Any:
    optimizer = torch.optim.SGD(trained(model), lr=0.0)
    options = {"replacement_ratio": 0.34, "quorum": 1.0, "cooldown": 10**9, "threshold": 0.0} | options
    return AsyncSelectiveAveragingPolicy(model, optimizer, average_every=5, **options)


def one_sided(model: nn.Module, **options: Any) -> Any:
    optimizer = torch.optim.SGD(trained(model), lr=0.0)
    options = {"replacement_mode": "threshold", "threshold_metric": -2.5, "donor_count": 2} | options
    return OneSidedSelectiveAveragingPolicy(model, optimizer, average_every=5, **options)


def of_all(model: nn.Module, **options: Any) -> Any:
    return AverageAllPolicy(model, torch.optim.SGD(trained(model), lr=0.0), average_every=5, **options)


def of_replicas(model: nn.Module, **options: Any) -> Any:
    optimizer = torch.optim.SGD(trained(model), lr=0.0)
    given = {"replacement_ratio": 0.34, "quorum": 1.0, "cooldown": 10**9, "threshold": 0.0} | options
    return ReplicaAveragingPolicy(model, optimizer, replica_size=2, average_every=5, **given)


POLICIES: dict[str, tuple[Callable[..., Any], int, float, int]] = {
    "selective": (selective, 1, 1.5, 2),
    "one-sided": (one_sided, 1, 1.5, 2),
    "all": (of_all, 1, 2.0, 1),
    "replicas": (of_replicas, 2, 1.5, 2),
}


@pytest.mark.parametrize("parameters", ["all", "trainable"])
@pytest.mark.parametrize("policy", POLICIES)
def test_a_round_moves_what_is_trained(policy: str, parameters: str) -> None:
    enter, size, mean, donor_count = POLICIES[policy]

    async def main(world: ad.World) -> Any:
        model, number = build(world.rank // size), world.rank // size
        infos = []
        async with enter(model, parameters=parameters) as entered:
            for _ in range(40):
                info = await entered.step(-1.0 - number)
                infos += [info] if info else []
        assert torch.equal(frozen(model), frozen(build(0)))
        return {float(each.detach().flatten()[0]) for each in trained(model)}, infos

    values, infos = ad.simulate(main, ranks=3 * size, seed=1).results[-1]
    assert values == {mean}
    nbytes = {"all": ALL_NBYTES, "trainable": TRAINED_NBYTES}[parameters]
    assert infos and {info.nbytes for info in infos} == {donor_count * nbytes}


def test_frozen_parameters_that_differ_are_refused_at_the_start() -> None:
    async def main(world: ad.World) -> str:
        model = build(world.rank, seed=world.rank)
        with pytest.raises(ad.DisagreementError) as caught:
            await selective(model, parameters="trainable").__aenter__()
        return str(caught.value)

    for text in ad.simulate(main, ranks=3, seed=1).results:
        assert "the hash of the parameters that are not trained is " in text and "load the same weights" in text


def test_one_value_of_a_frozen_parameter_is_enough_to_differ() -> None:
    async def main(world: ad.World) -> bool:
        model = build(0)
        if world.rank == 1:
            with torch.no_grad():
                model[3].weight[63, 63] += 1e-6  # type: ignore[index]
        try:
            await selective(model, parameters="trainable").__aenter__()
        except ad.DisagreementError:
            return True
        return False

    assert ad.simulate(main, ranks=2, seed=1).results == (True, True)


def test_a_frozen_parameter_that_is_trained_later_is_refused() -> None:
    """The parameter would otherwise differ between ranks from then on, without any warning."""

    async def main(world: ad.World) -> str:
        model = build(world.rank)
        async with of_all(model, parameters="trainable") as policy:
            for _ in range(5):
                await policy.step()
            model[2].weight.requires_grad_()
            with pytest.raises(ValueError, match=r"2\.weight") as caught:
                for _ in range(5):
                    await policy.step()
        return str(caught.value)

    (text,) = set(ad.simulate(main, ranks=2, seed=1).results)
    assert text.startswith(
        "the parameter '2.weight' is trained now, but it was not when the policy was made with parameters='trainable'"
    )


def test_values_that_cannot_be_averaged_may_be_left_out() -> None:
    """A quantised base model under LoRA: float8 is copied and hashed; int4 values are packed into bytes."""

    async def main(world: ad.World) -> bool:
        model = build(world.rank)
        for layer in model:  # type: ignore[union-attr]
            layer.weight = nn.Parameter(layer.weight.detach().to(torch.float8_e4m3fn), requires_grad=False)
            layer.packed = nn.Parameter(torch.arange(8, dtype=torch.uint8), requires_grad=False)
        async with of_all(model, parameters="trainable") as policy:
            for _ in range(5):
                info = await policy.step()
        return bool(info) and info.nbytes == TRAINED_NBYTES

    assert ad.simulate(main, ranks=2, seed=1).results == (True, True)


def test_a_model_without_trained_parameters_is_refused() -> None:
    model = nn.Linear(2, 2).requires_grad_(False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(ValueError, match="Linear"):
        AverageAllPolicy(model, optimizer, average_every=1, parameters="trainable")
    with pytest.raises(ValueError, match="parameters must be one of 'all', 'trainable', got 'some'"):
        AverageAllPolicy(model, optimizer, average_every=1, parameters="some")  # type: ignore[arg-type]
