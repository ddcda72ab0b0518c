"""Trains a small network with DiLoCo and selective DiLoCo and one faulty rank, on five seeds; compares losses.

The last test shows a failure of selection: if each rank's metric uses its own data, a rank with wrong data is a donor.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass
from typing import Any, Final

import pytest
import torch
from torch import Tensor, nn

import asyncdist as ad
from protocols import DiLoCoPolicy, SelectiveDiLoCoPolicy

SEEDS: Final = range(5)
RANKS, EVERY, ROUNDS, FAULTY = 4, 10, 12, 1
OUTER: Final = {"outer_optimizer": lambda parameters: torch.optim.SGD(parameters, lr=0.5, momentum=0.5)}


def teacher(x: Tensor) -> Tensor:
    return torch.sin(2 * x[:, :1]) + x[:, 1:2] * x[:, 2:3] + x[:, 3:4] / 2


@dataclass(frozen=True)
class Data:
    """Data from one generator, with noise; ``sign`` -1 negates the labels."""

    generator: torch.Generator
    sign: float = 1.0

    def batch(self, count: int, noise: float = 0.1) -> tuple[Tensor, Tensor]:
        x = torch.randn(count, 6, generator=self.generator)
        return x, self.sign * (teacher(x) + noise * torch.randn(count, 1, generator=self.generator))


def spoil(model: nn.Module, fault: str, generator: torch.Generator) -> None:
    """Change the weights before they are captured, as a faulty machine does."""
    with torch.no_grad():
        for parameter in model.parameters():
            if fault == "random weights":
                parameter.copy_(10 * torch.randn(parameter.shape, generator=generator))
            elif fault == "huge weights":
                parameter.fill_(1e4)


async def train(world: ad.World, kind: Any, fault: str, seed: int, options: dict[str, Any], own: bool = False) -> Any:
    """Return the loss of the common model on test data after the last round, and the rounds with the faulty donor.

    Args:
        own: Whether each rank's metric uses its own data.
    """
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(6, 24), nn.Tanh(), nn.Linear(24, 1))
    is_faulty = world.rank == FAULTY and bool(fault)
    generator = torch.Generator().manual_seed(100 * seed + world.rank)
    data = Data(generator, -1.0 if is_faulty and fault == "wrong labels" else 1.0)
    held_out = Data(torch.Generator().manual_seed(50_000 + seed)).batch(256)
    of_own = data.batch(256)
    test = Data(torch.Generator().manual_seed(90_000 + seed)).batch(1024, 0.0)
    optimizer = torch.optim.SGD(model.parameters(), 0.3 if is_faulty and fault == "lr x10" else 0.03, momentum=0.9)

    def loss_of(x: Tensor, y: Tensor) -> Tensor:
        return (model(x) - y).square().mean()

    def evaluate() -> float:
        with torch.no_grad():
            loss = loss_of(*(of_own if own else held_out)).item()
        return 0.0 if is_faulty and fault == "a loss that is always 0" else loss

    count = 0
    async with kind(model, optimizer, average_every=EVERY, **OUTER, **options) as policy:
        for step in range(EVERY * ROUNDS):
            x, y = data.batch(16)
            if is_faulty and fault == "NaN" and step % 25 == 3:
                x = x * math.nan
            optimizer.zero_grad()
            loss_of(x, y).backward()
            optimizer.step()
            if is_faulty and step % EVERY == EVERY - 1:
                spoil(model, fault, generator)
            info = await (policy.step(loss=evaluate) if kind is SelectiveDiLoCoPolicy else policy.step())
            count += FAULTY in info.donors
    with torch.no_grad():
        return loss_of(*test).item(), count


@functools.cache
def loss_and_count(
    kind: Any, fault: str, seed: int, strategy: str = "weighted_mean", own: bool = False
) -> tuple[float, int]:
    options = {"averaging_strategy": strategy} if kind is SelectiveDiLoCoPolicy else {}
    results = ad.simulate(train, kind, fault, seed, options, own, ranks=RANKS, seed=seed, strict=True).results
    assert len({repr(result) for result in results}) == 1, "the ranks' models differ"
    loss, count = results[0]
    return (loss if math.isfinite(loss) else math.inf), count


@pytest.mark.slow
@pytest.mark.parametrize("seeds", [SEEDS[:2], pytest.param(SEEDS[2:], marks=pytest.mark.long)], ids=["first", "others"])
@pytest.mark.parametrize("strategy", ["weighted_mean", pytest.param("mean", marks=pytest.mark.long)])
@pytest.mark.parametrize(
    "fault",
    [
        "random weights",
        *(
            pytest.param(fault, marks=pytest.mark.long)
            for fault in ("lr x10", "huge weights", "NaN", "a loss that is always 0")
        ),
    ],
)
def test_a_faulty_rank_harms_diloco_and_not_selective(fault: str, strategy: str, seeds: range) -> None:
    """With a faulty rank, the loss is below 1.5 times that of four sound ranks; DiLoCo's is over 50 times as high.

    DiLoCo itself leaves out NaNs, and needs no metric.
    """
    for seed in seeds:
        calm, _ = loss_and_count(SelectiveDiLoCoPolicy, "", seed, strategy)
        found, donated = loss_and_count(SelectiveDiLoCoPolicy, fault, seed, strategy)
        plain, _ = loss_and_count(DiLoCoPolicy, fault, seed)
        assert found < 1.5 * calm, f"seed {seed}: the loss is {found} with a faulty rank, {calm} without"
        if fault not in ("NaN", "a loss that is always 0"):
            assert plain > 50 * found and not donated, (
                f"seed {seed}: the loss is {plain} with DiLoCo, {found} with selective DiLoCo"
            )
        elif fault == "NaN":
            assert 0 < donated < ROUNDS, "the rank must be a donor only in the rounds in which it is sound"


@pytest.mark.long
@pytest.mark.slow
def test_a_metric_of_own_data_lets_wrong_data_in() -> None:
    """A rank with wrong labels gains on its own data in each round. The result is worse than without selection."""
    for seed in SEEDS:
        common, left = loss_and_count(SelectiveDiLoCoPolicy, "wrong labels", seed)
        local, let_in = loss_and_count(SelectiveDiLoCoPolicy, "wrong labels", seed, own=True)
        plain, _ = loss_and_count(DiLoCoPolicy, "wrong labels", seed)
        assert (left, let_in) == (0, ROUNDS), f"seed {seed}"
        assert common < 0.8 * plain < plain < local, (
            f"seed {seed}: the losses must be in this order: {common}, {plain}, {local}"
        )
