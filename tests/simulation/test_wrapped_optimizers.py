"""Tests optimizers whose ``state_dict()`` is not torch's: saved, loaded, given to restarted ranks and inherited."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from support.seeds import in_ci
from torch import nn

import asyncdist as ad
from asyncdist.simulation import Kill, Restart
from asyncdist.tensors.infinities import describe_nonfinite
from asyncdist.tensors.optimizers.loading import load_named, named_state, with_values
from protocols import DiLoCoPolicy, PopulationTrainingPolicy
from protocols.diloco.outer_step import check_factory

pytorch_optimizer = pytest.importorskip("pytorch_optimizer", reason="the test extra brings pytorch-optimizer")


class Two(torch.optim.Optimizer):
    """Two optimizers of half of the parameters each, with a state of two parts."""

    def __init__(self, parameters: Any, lr: float) -> None:
        one, two = list(parameters)
        super().__init__([one, two], {"lr": lr})
        self.one, self.two = torch.optim.SGD([one], lr, momentum=0.9), torch.optim.Adam([two], lr)

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.one.step(closure)
        self.two.step(closure)

    def state_dict(self) -> dict[str, Any]:
        return {"one": self.one.state_dict(), "two": self.two.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.one.load_state_dict(state["one"])
        self.two.load_state_dict(state["two"])


def schedule_free(parameters: Any, lr: float) -> Any:
    optimizer = pytorch_optimizer.ScheduleFreeWrapper(torch.optim.AdamW(parameters, lr=lr))
    optimizer.train()
    return optimizer


WRAPPERS: dict[str, Any] = {
    "lookahead": lambda parameters, lr: pytorch_optimizer.Lookahead(torch.optim.AdamW(parameters, lr=lr)),
    "schedule-free": schedule_free,
}
KINDS: dict[str, Any] = {**WRAPPERS, "magma": pytorch_optimizer.load_optimizer("magma"), "two": Two}


def step(model: nn.Module, optimizer: torch.optim.Optimizer, count: int = 1) -> None:
    for _ in range(count):
        optimizer.zero_grad()
        model(torch.ones(2, 4).to(next(model.parameters()))).square().sum().backward()
        optimizer.step()


def made(kind: Any, lr: float = 0.01, dtype: torch.dtype = torch.float32) -> tuple[nn.Module, Any]:
    torch.manual_seed(0)
    model = nn.Linear(4, 1).to(dtype)
    return model, kind(model.parameters(), lr=lr)


@pytest.mark.parametrize("name", KINDS)
def test_the_state_of_a_wrapper_is_saved_and_loaded(name: str, tmp_path: Path) -> None:
    """Regression: such a state was saved, but load_population raised ValueError (KeyError: 'param_groups')."""

    async def main(_: ad.World) -> list[list[float]]:
        model, optimizer = made(KINDS[name])
        step(model, optimizer, 7)
        await ad.save_population(tmp_path, model, optimizer)
        again, same = made(KINDS[name])
        await ad.load_population(tmp_path, again, same)
        for each in ((model, optimizer), (again, same)):
            torch.manual_seed(1)
            step(*each, 6)
        return [each.weight.flatten().tolist() for each in (model, again)]  # type: ignore[operator,union-attr]

    one, two = ad.simulate(main, ranks=1, seed=1).results[0]
    assert one == two


def test_the_moments_of_an_inner_optimizer_are_not_rounded() -> None:
    """Regression: only the outer optimizer's own state kept the dtype of its tensors."""
    model, optimizer = made(WRAPPERS["lookahead"], dtype=torch.bfloat16)
    step(model, optimizer)
    inner = optimizer.optimizer.state[model.weight]
    inner["exp_avg"] = torch.full_like(inner["exp_avg"], 1 / 3, dtype=torch.float32)
    again, same = made(WRAPPERS["lookahead"], dtype=torch.bfloat16)
    load_named(again, same, named_state(model, optimizer))
    assert torch.equal(same.optimizer.state[again.weight]["exp_avg"], inner["exp_avg"])
    assert torch.equal(same.optimizer.state[again.weight]["exp_avg_sq"], inner["exp_avg_sq"])


def test_values_of_a_parameter_are_found_under_a_wrappers_keys() -> None:
    """Shards of DTensors are restored by their parameters."""
    model, optimizer = made(WRAPPERS["lookahead"])
    step(model, optimizer)
    found = with_values(optimizer, optimizer.state_dict(), lambda value, parameter: parameter)
    assert found["lookahead_state"][0, 1]["slow_params"] is model.bias
    assert found["base_optimizer"]["state"][0]["exp_avg"] is model.weight
    assert found["base_optimizer"]["param_groups"] == optimizer.state_dict()["base_optimizer"]["param_groups"]


def test_a_state_that_no_load_accepts_is_refused_at_the_save(tmp_path: Path) -> None:
    class Bare(torch.optim.SGD):
        def state_dict(self) -> dict[str, Any]:
            return {"state": {}, "param_groups": [{}]}

    async def main(_: ad.World) -> None:
        with pytest.raises(TypeError, match="a state that load_population can load"):
            await ad.save_population(tmp_path, *made(Bare))

    ad.simulate(main, ranks=1, seed=1).value()


@pytest.mark.parametrize("name", in_ci(WRAPPERS, "schedule-free"))
def test_a_restarted_rank_loads_the_state_of_a_wrapper(name: str) -> None:
    """Regression: the restarted rank died of KeyError: 'state'."""

    async def main(world: ad.World) -> int:
        model, optimizer = made(WRAPPERS[name])
        async with DiLoCoPolicy(model, optimizer, average_every=20) as policy:
            for _ in range(400):
                step(model, optimizer)
                await policy.step()
        return world.incarnation

    faults = [Kill(2, at_s=0.1), Restart(2, at_s=0.15)]
    assert ad.simulate(main, ranks=4, seed=1, faults=faults).results == (0, 0, 1, 0)


@pytest.mark.parametrize("name", WRAPPERS)
def test_a_rank_inherits_the_moments_inside_a_wrapper(name: str) -> None:
    """Regression: the job died of KeyError: 'param_groups' at the first copy."""

    async def main(world: ad.World) -> tuple[int, float]:
        model, optimizer = made(WRAPPERS[name], lr=0.01 * (1 + world.rank))
        inherited = 0
        hyperparameters = {"lr": (1e-4, 1e-1)}
        async with PopulationTrainingPolicy(
            model, optimizer, average_every=20, hyperparameters=hyperparameters
        ) as policy:
            for _ in range(100):
                step(model, optimizer)
                info = await policy.step(float(world.rank))
                inherited += info.inherited is not None
        assert optimizer.param_groups[0] is optimizer.optimizer.param_groups[0]
        return inherited, optimizer.param_groups[0]["lr"] - policy.hyperparameters["lr"]

    found = ad.simulate(main, ranks=4, seed=1).results
    assert sum(count for count, _ in found) and all(difference == 0.0 for _, difference in found)


def test_a_population_refuses_a_state_without_groups() -> None:
    model, optimizer = made(Two)
    with pytest.raises(ValueError, match="must contain 'state' and 'param_groups', got Two"):
        PopulationTrainingPolicy(model, optimizer, average_every=20, hyperparameters={"lr": (1e-4, 1e-1)})


def test_an_outer_optimizer_needs_the_state_of_torch() -> None:
    """Regression: the factory was accepted, and the first restarted rank or checkpoint failed with a KeyError."""
    model, optimizer = made(torch.optim.SGD)

    def outer(parameters: Any) -> Any:
        return pytorch_optimizer.Lookahead(torch.optim.SGD(parameters, lr=0.5))

    with pytest.raises(ValueError, match="Lookahead, whose state_dict"):
        DiLoCoPolicy(model, optimizer, average_every=20, outer_optimizer=outer)


def test_moments_in_a_wrapper_that_are_not_finite_are_noticed() -> None:
    """Regression: only the wrapper's own state was tested, and the rank took part in rounds."""
    model, optimizer = made(WRAPPERS["lookahead"])
    step(model, optimizer)
    assert describe_nonfinite(None, optimizer) == ""
    optimizer.optimizer.state[model.weight]["exp_avg"].fill_(torch.nan)
    assert describe_nonfinite(None, optimizer)


def test_an_outer_optimizer_may_keep_a_tensor_for_all_parameters() -> None:
    """Regression: MADGRAD, whose state has a step count under a string key, raised a RuntimeError of torch."""
    check_factory(lambda parameters: pytorch_optimizer.MADGRAD(parameters, lr=0.1))
