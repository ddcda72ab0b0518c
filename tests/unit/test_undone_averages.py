"""Tests that optimizers that undo averages are reported, and others are not, even if ranks are a few steps apart."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch
from pytorch_optimizer import FTRL, Lion
from schedulefree import SGDScheduleFree  # type: ignore[import-untyped]
from support.weight_keepers import Hidden
from torch import nn

from asyncdist.tensors.optimizers.weights import AveragedStates, OptimizerWeights

SIZE, EVERY = 8, 5

Make = Callable[[Any], Any]


class Rank:
    """Trains a linear model on its own rows, whose targets differ from the other ranks' by ``difference``."""

    def __init__(self, number: int, make: Make, difference: float, dtype: torch.dtype) -> None:
        torch.manual_seed(0)
        self.model = nn.Linear(SIZE, SIZE).to(dtype)
        base = torch.randn(SIZE, SIZE)
        self._rows = torch.Generator().manual_seed(number)
        self._target = base + difference * torch.randn(SIZE, SIZE, generator=self._rows)
        self.optimizer = make(self.model.parameters())
        self.weights = OptimizerWeights(self.model, self.optimizer, AveragedStates(self.model, self.optimizer))

    def step(self) -> None:
        rows, noise = torch.randn(2, 32, SIZE, generator=self._rows)

        def loss() -> torch.Tensor:
            self.optimizer.zero_grad()
            gap: torch.Tensor = self.model(rows.to(self.model.weight.dtype)).float() - rows @ self._target - noise
            found = gap.square().mean()
            found.backward()  # type: ignore[no-untyped-call]
            return found

        if isinstance(self.optimizer, SGDScheduleFree):
            self.optimizer.train()
        loss()
        self.optimizer.step(loss)
        if self.weights.is_watching:
            self.weights.check_kept()


def train(make: Make, steps: int, *, difference: float = 0.0, dtype: torch.dtype = torch.float32) -> None:
    """Train two ranks, whose weights are averaged every :data:`EVERY` steps."""
    ranks = [Rank(number, make, difference, dtype) for number in range(2)]
    for step in range(1, steps + 1):
        for rank in ranks:
            rank.step()
        if step % EVERY == 0:
            pairs = zip(*(rank.model.parameters() for rank in ranks), strict=True)
            means = [((one.detach() + other.detach()) / 2).clone() for one, other in pairs]
            for rank in ranks:
                with rank.weights.following(), torch.no_grad():
                    for parameter, mean in zip(rank.model.parameters(), means, strict=True):
                        parameter.copy_(mean)


@pytest.mark.parametrize("difference", [pytest.param(0.0, marks=pytest.mark.slow), 1.0])
def test_undone_averages_of_near_ranks_are_reported(difference: float, caplog: pytest.LogCaptureFixture) -> None:
    """Regression: averages were undone without a warning unless ranks were over 100 steps apart."""
    train(lambda parameters: Hidden(parameters, lr=0.03), 150 if difference == 0.0 else 40, difference=difference)
    assert caplog.text.count("restored the old weights") == 2


class OwnSGD(torch.optim.SGD):
    """An optimizer that is not one of torch, so it is tested."""


class OwnAdam(torch.optim.Adam):
    """An optimizer that is not one of torch, so it is tested."""


ORDINARY: dict[str, Make] = {
    "SGD": lambda parameters: OwnSGD(parameters, lr=0.1),
    "SGD with lr 0": lambda parameters: OwnSGD(parameters, lr=0.0),
    "SGD with tiny steps": lambda parameters: OwnSGD(parameters, lr=1e-6),
    "SGD with long steps": lambda parameters: OwnSGD(parameters, lr=2.0),
    "SGD that reaches the minimum": lambda parameters: torch.optim.SGD(parameters, lr=SIZE / 2),
    "SGD that diverges": lambda parameters: OwnSGD(parameters, lr=50.0),
    "SGD with momentum": lambda parameters: OwnSGD(parameters, lr=0.5, momentum=0.99),
    "Adam": lambda parameters: OwnAdam(parameters, lr=0.3),
    "Lion": lambda parameters: Lion(parameters, lr=0.3),
    "FTRL": lambda parameters: FTRL(parameters, lr=0.3),
    "schedule-free": lambda parameters: SGDScheduleFree(parameters, lr=1.0),
    "LBFGS": lambda parameters: torch.optim.LBFGS(parameters, max_iter=4),
}


@pytest.mark.slow
@pytest.mark.parametrize("difference", [0.0, *(pytest.param(each, marks=pytest.mark.long) for each in (0.1, 3.0))])
@pytest.mark.parametrize("kind", ORDINARY)
def test_ordinary_optimizers_are_not_reported(kind: str, difference: float, caplog: pytest.LogCaptureFixture) -> None:
    steps = 40 if kind == "LBFGS" else 100  # each step of LBFGS is several
    with caplog.at_level(logging.WARNING):
        train(ORDINARY[kind], steps, difference=difference)
        train(ORDINARY[kind], steps, difference=difference, dtype=torch.bfloat16)
    assert not caplog.records
