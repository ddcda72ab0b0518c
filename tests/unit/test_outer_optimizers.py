"""Tests which optimizers may be outer optimizers, and the options of those that may."""

from __future__ import annotations

import functools
import io
from collections.abc import Callable
from typing import Any

import pytest
import torch
from support.facts import naming
from torch import nn
from torch.optim import SGD, AdamW

from asyncdist.protocols.diloco.options import described
from asyncdist.protocols.diloco.outer_optimizers import FedAdagrad, FedAdam, FedYogi
from asyncdist.protocols.diloco.outer_step import OuterFactory, OuterStep, check_factory


class Shrinking(SGD):
    """An optimizer with weight decay under another name."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        super().step(closure)
        for each in self.param_groups[0]["params"]:
            each.mul_(0.99)


class Scaling(SGD):
    """An optimizer that changes the gradients in place."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for each in self.param_groups[0]["params"]:
            each.grad.mul_(2)
        super().step(closure)


class Keeping(SGD):
    """An optimizer that keeps the last gradient."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        super().step(closure)
        for each in self.param_groups[0]["params"]:
            self.state[each]["last"] = each.grad


WRONG: dict[str, tuple[object, type[Exception], tuple[str, ...]]] = {
    "an optimizer": (SGD(nn.Linear(2, 2).parameters(), lr=0.7), TypeError, ("has parameters already",)),
    "another model's": (lambda _: SGD(nn.Linear(2, 2).parameters(), lr=0.7), ValueError, ("other parameters",)),
    "no parameters given on": (lambda own: SGD([*own, nn.Parameter(torch.ones(1))]), ValueError, ("other parameters",)),
    "a number": (0.7, TypeError, ("0.7",)),
    "no optimizer": (lambda _: 3, TypeError, ("int",)),
    "weight decay": (functools.partial(SGD, lr=0.7, weight_decay=0.1), ValueError, ("SGD", "weight_decay=0.1")),
    "AdamW's default": (AdamW, ValueError, ("AdamW", "weight_decay=0.01")),
    "decay by another name": (Shrinking, ValueError, ("Shrinking", "weight decay")),
    "maximize": (functools.partial(SGD, lr=0.7, maximize=True), ValueError, ("maximize=True",)),
    "a closure": (torch.optim.LBFGS, ValueError, ("LBFGS", "closure")),
    "sparse only": (torch.optim.SparseAdam, ValueError, ("SparseAdam",)),
    "changed gradients": (Scaling, ValueError, ("Scaling", "gradients")),
    "kept gradients": (Keeping, ValueError, ("Keeping", "gradients")),
    "a wrong option": (functools.partial(SGD, lr=-1.0), ValueError, ("-1.0",)),
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_factories_are_refused_with_the_reason(name: str) -> None:
    factory, kind, facts = WRONG[name]
    with pytest.raises(kind, match=naming("outer_optimizer", "functools.partial(torch.optim.SGD, lr=0.7)", *facts)):
        check_factory(factory)


def test_an_outer_step_refuses_what_its_factory_makes_later() -> None:
    made = SGD([nn.Parameter(torch.ones(2))], lr=0.7)
    with pytest.raises(ValueError, match=naming("outer_optimizer", "other parameters")):
        OuterStep(lambda _: made, [torch.zeros(2)])


@pytest.mark.parametrize("kind", [FedAdam, FedYogi])
@pytest.mark.parametrize(
    ("option", "value"), [("lr", 0.0), ("lr", -1.0), ("tau", 0.0), ("betas", (0.9, 1.0)), ("betas", (-0.1, 0.9))]
)
def test_federated_optimizers_check_their_options(kind: Any, option: str, value: Any) -> None:
    with pytest.raises(ValueError, match=naming(option)):
        kind([nn.Parameter(torch.ones(2))], **{"lr": 0.1, option: value})


def test_a_federated_optimizer_evaluates_a_closure() -> None:
    parameter = nn.Parameter(torch.ones(2))
    optimizer = FedAdagrad([parameter, nn.Parameter(torch.ones(1))], lr=1.0, tau=1.0)

    def closure() -> float:
        (parameter * 2.0).sum().backward()
        return 7.0

    assert optimizer.step(closure) == 7.0
    assert parameter.tolist() == pytest.approx([1 - 2 / (5**0.5 + 1)] * 2)


class Scheduled(torch.optim.Optimizer):
    """SGD whose learning rate follows a function of the round."""

    def __init__(self, params: Any, lr: float = 1.0, schedule: Callable[[int], float] = lambda count: 1.0) -> None:
        super().__init__(params, {"lr": lr, "schedule": schedule, "round": 0})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        del closure
        for group in self.param_groups:
            group["round"] += 1
            for parameter in group["params"]:
                parameter.sub_(parameter.grad, alpha=group["lr"] * group["schedule"](group["round"]))


def test_function_options_lose_addresses_and_are_not_saved() -> None:
    """Regression: the addresses differ between processes, so ranks refused each other, and checkpoints were refused."""

    def halving() -> OuterFactory:
        return functools.partial(Scheduled, schedule=lambda count: 0.5**count)

    assert described(halving()) == described(halving()) and "halving" in described(halving())
    assert described(functools.partial(Scheduled)) != described(halving())
    one, two = (OuterStep(halving(), [torch.zeros(3)]) for _ in range(2))
    one.step([torch.ones(3)])
    state = one.state_dict()
    torch.save(state, io.BytesIO())
    assert "schedule" not in state["param_groups"][0] and state["param_groups"][0]["round"] == 1
    two.load_state_dict(state)
    two.step([torch.ones(3)])
    assert two.anchors[0].tolist() == [-0.25] * 3
