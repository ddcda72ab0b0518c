"""Tests that an optimizer's state is reset to the state after construction, and loaded by the parameters' names."""

import functools
import math
from typing import Any

import pytest
import pytorch_optimizer
import schedulefree
import torch
from torch import Tensor, nn

from asyncdist.tensors.optimizers.loading import _warn_of_order, arranged, load_named, named_state
from asyncdist.tensors.optimizers.reset import _FROM_ZEROS, reset_optimizer_state


def test_reset_restores_the_state_that_the_constructor_makes() -> None:
    """In older releases of torch, Adagrad's step needed this state, and raised KeyError: 'sum' after a reset."""

    class Older(torch.optim.Adagrad):
        def step(self, closure: Any = None) -> None:  # type: ignore[override]
            assert all("sum" in self.state[parameter] for group in self.param_groups for parameter in group["params"])
            super().step(closure)

    def trained(resets: int) -> Tensor:
        model = nn.Linear(2, 3)
        nn.init.ones_(model.weight)
        optimizer = Older(model.parameters(), lr=0.5, initial_accumulator_value=0.25)
        for _ in range(resets):
            model(torch.ones(1, 2)).sum().backward()
            optimizer.step()
            reset_optimizer_state(optimizer)
            nn.init.ones_(model.weight)
            optimizer.zero_grad()
        model(torch.ones(1, 2)).sum().backward()
        optimizer.step()
        return model.weight.detach()

    assert torch.equal(trained(2), trained(0))


NEW = {
    "schedule-free": lambda weights: schedulefree.AdamWScheduleFree(weights, lr=0.1),
    **{
        name: functools.partial(getattr(pytorch_optimizer, name), lr=0.1)
        for name in ("AdaBelief", "Adan", "Lamb", "MADGRAD", "StableAdamW")
    },
    "lookahead": lambda weights: pytorch_optimizer.Lookahead(pytorch_optimizer.StableAdamW(weights, lr=0.1)),
}


def made_steps(optimizer: Any, weights: nn.Parameter, count: int, value: float = 1.0) -> Tensor:
    """Make steps, and return the change of the weights."""
    before = weights.detach().clone()
    for _ in range(count):
        weights.grad = torch.full_like(weights, value)
        optimizer.step()
    return weights.detach() - before


@pytest.mark.parametrize("name", NEW)
def test_reset_includes_step_counts_in_parameter_groups(name: str) -> None:
    """Regression: the first updates after a reset were 0.1 to 1.5 times those of a new optimizer."""
    changes = []
    for count in (0, 50):
        weights = nn.Parameter(torch.ones(3))
        optimizer = NEW[name]([{"params": [weights], "own": 7.0}])
        if name == "schedule-free":
            optimizer.train()
        made_steps(optimizer, weights, count)
        reset_optimizer_state(optimizer)
        assert optimizer.param_groups[0]["own"] == 7.0
        with torch.no_grad():
            weights.fill_(1.0)
        changes.append(made_steps(optimizer, weights, 3))
    assert torch.allclose(*changes) and changes[0].abs().min() > 0


@pytest.mark.parametrize("name", ["Prodigy", "DAdaptAdam"])
def test_reset_repairs_an_estimated_learning_rate(name: str) -> None:
    """Regression: NaN stayed in the sums from which the learning rate is estimated. A finite estimate is kept."""
    weights = nn.Parameter(torch.ones(3))
    optimizer = getattr(pytorch_optimizer, name)([weights])
    made_steps(optimizer, weights, 20)
    (group,) = optimizer.param_groups
    estimate = group["d"]
    assert estimate > 1e-6
    made_steps(optimizer, weights, 1, float("nan"))
    reset_optimizer_state(optimizer)
    assert group["d"] == (estimate if math.isfinite(estimate) else 1e-6)
    with torch.no_grad():
        weights.fill_(1.0)
    assert made_steps(optimizer, weights, 20).isfinite().all()
    assert all(torch.as_tensor(value).isfinite().all() for key, value in group.items() if key.startswith("d"))


@pytest.mark.parametrize("kind", _FROM_ZEROS)
def test_reset_keeps_the_tensors_that_a_cuda_graph_writes(kind: Any) -> None:
    """Regression: a captured step wrote the moments into freed memory. torch makes such a step only on a GPU."""
    weight = nn.Parameter(torch.ones(3))
    options: dict[str, Any] = {"amsgrad": True} if kind in (torch.optim.Adam, torch.optim.AdamW) else {}
    options |= {"momentum": 0.9, "centered": True} if kind is torch.optim.RMSprop else {}

    def step(optimizer: torch.optim.Optimizer, scale: float = 1.0) -> list[float]:
        with torch.no_grad():
            weight.fill_(1.0)
        weight.grad = torch.tensor([1.0, -2.0, 3.0]) * scale
        optimizer.step()
        return weight.tolist()

    optimizer = kind([weight], lr=0.1, **options)
    first = step(optimizer)
    step(optimizer, scale=-5.0)
    before = dict(optimizer.state[weight])
    optimizer.param_groups[0]["capturable"] = True
    reset_optimizer_state(optimizer)
    assert before.keys() == optimizer.state[weight].keys() and len(before) >= 3
    assert all(optimizer.state[weight][name] is value for name, value in before.items())
    optimizer.param_groups[0]["capturable"] = False
    assert step(optimizer) == first
    reset_optimizer_state(optimizer)
    assert not optimizer.state


class Four(nn.Module):
    """A model with four parameters of the same shape."""

    def __init__(self) -> None:
        super().__init__()
        for name in "abcd":
            setattr(self, name, nn.Parameter(torch.ones(2)))


def stepped(model: nn.Module, *groups: str, rate: float = 0.1) -> torch.optim.Adam:
    """Return Adam with a group for each string of names, after a step whose gradients depend on the names."""
    optimizer = torch.optim.Adam(
        [{"params": [getattr(model, name) for name in names], "lr": rate * len(names)} for names in groups]
    )
    for place, (_, parameter) in enumerate(sorted(model.named_parameters())):
        parameter.grad = torch.full((2,), float(place + 1))
    optimizer.step()
    return optimizer


@pytest.mark.parametrize("groups", [("abcd",), ("dcba",), ("abc", "d"), ("d", "cab")])
def test_moments_are_loaded_by_the_parameters_names(groups: tuple[str, ...]) -> None:
    model, other = Four(), Four()
    saved = named_state(model, stepped(model, *(("abcd",) if len(groups) == 1 else ("bca", "d"))))
    optimizer = torch.optim.Adam([{"params": [getattr(other, name) for name in names]} for names in groups])
    load_named(other, optimizer, saved)
    for place, name in enumerate("abcd"):
        assert optimizer.state[getattr(other, name)]["exp_avg"].tolist() == pytest.approx([0.1 * (place + 1)] * 2)
    assert [group["lr"] for group in optimizer.param_groups] == [pytest.approx(0.1 * len(names)) for names in groups]


def test_parameters_that_the_model_lacks_keep_their_order() -> None:
    names, own = [["", "a", ""]], [["a", "", ""]]
    state = {"state": {0: "first", 1: "a", 2: "second"}, "param_groups": [{"params": [0, 1, 2], "lr": 1.0}]}
    expected = {"state": {1: "first", 0: "a", 2: "second"}, "param_groups": [{"params": [0, 1, 2], "lr": 1.0}]}
    assert arranged(state, names, own) == expected


@pytest.mark.parametrize(
    ("names", "own", "words"),
    [
        ([["a", "b"]], [["a", "c"]], "'c' is only in this optimizer"),
        ([["a", "b"]], [["a"]], "'b' is only in the other optimizer"),
        ([["a"], ["b"]], [["a", "b"]], r"its groups have \[2\] parameters here and \[1, 1\] there"),
        ([["a", "b"], ["c", "d"]], [["a", "c"], ["b", "d"]], "some parameters are in other groups"),
    ],
)
def test_a_state_of_other_parameters_is_refused(names: Any, own: Any, words: str) -> None:
    state = {"state": {}, "param_groups": [{"params": list(range(len(group)))} for group in names]}
    with pytest.raises(ValueError, match=f"must have the same parameters in its groups.*{words}"):
        arranged(state, names, own)


def test_a_state_in_another_form_is_not_rearranged() -> None:
    state = {"state": {}, "slow_state": {}, "param_groups": [{"params": [0, 1]}]}
    assert arranged(state, [["a", "b"]], [["a", "b"]]) is state
    with pytest.raises(ValueError, match="in the same order on all ranks, since its state has 'slow_state'"):
        arranged(state, [["a", "b"]], [["b", "a"]])


def test_an_order_that_no_name_shows_is_warned_of_once(caplog: pytest.LogCaptureFixture) -> None:
    _warn_of_order.cache_clear()
    state = {"state": {}, "param_groups": [{"params": [0, 1]}]}
    arranged(state, [["a", ""]], [["", "a"]])
    assert not caplog.records
    for _ in range(2):
        arranged(state, [["", ""]], [["", ""]])
    assert len(caplog.records) == 1 and "several parameters outside the model" in caplog.text


def test_the_one_state_of_lbfgs_is_not_rearranged() -> None:
    model = Four()
    optimizer = torch.optim.LBFGS([model.a, model.b])
    arranged(optimizer.state_dict(), [["a", "b"]], [["b", "a"]])  # it has no state yet

    def closure() -> torch.Tensor:
        loss = model.a.square().sum() + model.b.sum()
        optimizer.zero_grad()
        loss.backward()
        return loss

    optimizer.step(closure)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="LBFGS must list its parameters in the same order"):
        arranged(optimizer.state_dict(), [["a", "b"]], [["b", "a"]])
