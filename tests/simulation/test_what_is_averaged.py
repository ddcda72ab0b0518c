"""Tests which state an average replaces, and which it leaves unchanged, with each of torch's tools around a model.

All numbers of rank r are r + 1, its metric is -r, and nothing learns. So afterwards, rank 2 has the mean of ranks 0 and
1, which is 1.5, or its own number 3. Integers are copied from the best rank, whose number is 1.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations
from torch.optim.swa_utils import AveragedModel
from torch.utils.checkpoint import checkpoint

import asyncdist as ad
from protocols import AsyncSelectiveAveragingPolicy

ROOT = Path(__file__).parents[2]
MEAN, OWN, BEST = 1.5, 3.0, 1.0


class Net(nn.Module):
    """A model with a parameter, a frozen one, one that is tied to the first, and buffers of each kind."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(2, 2)
        self.tied = nn.Linear(2, 2)
        self.tied.weight = self.first.weight
        self.frozen = nn.Parameter(torch.zeros(2), requires_grad=False)
        self.register_buffer("kept", torch.zeros(2))
        self.register_buffer("count", torch.zeros((), dtype=torch.int64))
        self.register_buffer("scratch", torch.zeros(2), persistent=False)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.tied(self.first(inputs)) + self.frozen + self.kept


def firsts(model: nn.Module) -> set[float]:
    """Return the first number of each parameter."""
    return {float(value.detach().flatten()[0]) for value in model.parameters()}


def fill(model: nn.Module, number: float) -> None:
    with torch.no_grad():
        for tensor in [*model.parameters(), *model.buffers()]:
            tensor.fill_(number)


async def replaced(
    world: ad.World,
    build: Callable[[], nn.Module],
    train: Callable[[nn.Module, torch.optim.Optimizer], None],
    **options: Any,
) -> tuple[nn.Module, torch.optim.Optimizer]:
    """Step until rank 2 has taken an average; ``train`` is called before each step."""
    model = build()
    fill(model, world.rank + 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0, momentum=0.9)
    policy = AsyncSelectiveAveragingPolicy(
        model, optimizer, average_every=5, replacement_ratio=0.34, quorum=1.0, cooldown=10**9, threshold=0.0, **options
    )
    async with policy:
        for _ in range(60):
            train(model, optimizer)
            await policy.step(-float(world.rank) - 1.0)
    assert policy.statistics().replacement_count == (world.rank == 2)
    return model, optimizer


def of_rank_2(
    build: Callable[[], nn.Module], train: Callable[[nn.Module, torch.optim.Optimizer], None], **options: Any
) -> tuple[nn.Module, torch.optim.Optimizer]:
    async def main(world: ad.World) -> Any:
        return await replaced(world, build, train, **options)

    result: tuple[nn.Module, torch.optim.Optimizer] = ad.simulate(main, ranks=3, seed=1).results[2]
    return result


def step(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    optimizer.zero_grad()
    model(torch.ones(2)).sum().backward()
    optimizer.step()


def test_parameters_and_persistent_buffers() -> None:
    model, _ = of_rank_2(Net, step)
    found = {name: float(value.flatten()[0]) for name, value in model.state_dict().items()}
    assert found == {
        "first.weight": MEAN,
        "first.bias": MEAN,
        "tied.weight": MEAN,
        "tied.bias": MEAN,
        "frozen": MEAN,
        "kept": MEAN,
        "count": BEST,
    }
    assert isinstance(model, Net)
    assert model.scratch.tolist() == [OWN] * 2, "a buffer that is not persistent must not be averaged"
    assert model.tied.weight is model.first.weight


def test_gradients_and_optimizer_state_stay_unless_reset() -> None:
    """Gradients stay as well, because they may be partly accumulated."""
    kept, optimizer = of_rank_2(Net, step)
    assert all(parameter.grad is not None for parameter in kept.parameters() if parameter.requires_grad)
    assert len(optimizer.state) == 3
    velocities: list[int] = []

    def count(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        velocities.append(len(optimizer.state))
        step(model, optimizer)

    _, optimizer = of_rank_2(Net, count, optimizer_state="reset")
    assert velocities.count(0) == 4, "velocities must be zero when three ranks begin, and once after the replacement"


def test_an_average_of_weights_beside_the_model_is_left_alone() -> None:
    shadows: dict[int, AveragedModel] = {}

    def train(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        if id(model) not in shadows:
            shadows[id(model)] = AveragedModel(model)
        step(model, optimizer)

    model, _ = of_rank_2(Net, train)
    assert firsts(shadows[id(model)]) == {OWN}


def test_a_schedule_goes_on() -> None:
    schedules: dict[int, Any] = {}

    def train(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        schedules.setdefault(id(model), torch.optim.lr_scheduler.StepLR(optimizer, 10))
        step(model, optimizer)
        schedules[id(model)].step()

    model, _ = of_rank_2(Net, train)
    assert schedules[id(model)].last_epoch == 60


def test_random_states_are_left_alone() -> None:
    after_training: dict[int, torch.Tensor] = {}

    def train(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        if id(model) in after_training:
            assert torch.equal(torch.get_rng_state(), after_training[id(model)])
        step(model, optimizer)
        torch.rand(1)
        after_training[id(model)] = torch.get_rng_state()

    model, _ = of_rank_2(Net, train)
    assert firsts(model) == {MEAN}


def test_mixed_precision_and_its_scale() -> None:
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)

    def train(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.bfloat16):
            loss = model(torch.ones(2)).float().sum()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()

    model, _ = of_rank_2(Net, train)
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}
    assert firsts(model) == {MEAN}
    assert scaler.get_scale() == 4.0


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_gradient_checkpointing(use_reentrant: bool) -> None:
    class Checkpointed(Net):
        def forward(self, inputs: torch.Tensor) -> torch.Tensor:
            given = inputs.requires_grad_()
            output: torch.Tensor = checkpoint(super().forward, given, use_reentrant=use_reentrant)
            return output

    model, _ = of_rank_2(Checkpointed, step)
    assert firsts(model) == {MEAN}


def test_parametrizations_are_averaged_as_what_is_stored() -> None:
    """A weight norm stores length and direction, and these are averaged, not their product."""

    def build() -> nn.Module:
        return nn.Sequential(parametrizations.weight_norm(nn.Linear(2, 2)))

    model, _ = of_rank_2(build, step)
    names = {name for name, value in model.named_parameters() if float(value.detach().flatten()[0]) == MEAN}
    assert names == {"0.bias", "0.parametrizations.weight.original0", "0.parametrizations.weight.original1"}


def test_every_row_of_the_page_names_a_test_that_is_there() -> None:
    rows = [line for line in (ROOT / "docs" / "averaged.md").read_text().splitlines() if line.startswith("| ")]
    rows = [row for row in rows if not row.startswith("| part |")]
    assert len(rows) >= 25
    for row in rows:
        named = re.findall(r"\[`(test_\w+)`\]\(\.\./(tests/[\w/]+\.py)\)", row.rsplit(" | ", 1)[1])
        assert named, row
        for test, path in named:
            assert f"def {test}(" in (ROOT / path).read_text(), row


@pytest.mark.slow
def test_a_compiled_model_computes_with_the_new_weights() -> None:
    def eager(graph: torch.fx.GraphModule, _: Any) -> Any:
        return graph.forward

    compiled: dict[int, Any] = {}

    def train(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        compiled.setdefault(id(model), torch.compile(model, backend=eager))
        optimizer.zero_grad()
        compiled[id(model)](torch.ones(2)).sum().backward()
        optimizer.step()

    model, _ = of_rank_2(Net, train)
    assert torch.equal(compiled[id(model)](torch.ones(2)), model(torch.ones(2)))
    assert firsts(model) == {MEAN}
