"""Tests that weights kept by an optimizer follow the model's, moments do not, and unknown entries are reported once."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch
from pytorch_optimizer import FTRL, SaRA
from support.weight_keepers import FlatMaster, Hidden, Lookahead, MasterList, Masters
from torch import Tensor, nn

from asyncdist.tensors.optimizers.reset import reset_optimizer_state
from asyncdist.tensors.optimizers.weights import AveragedStates, OptimizerWeights
from asyncdist.tensors.optimizers.wrapped import wrapped_optimizers

NEW = 1.25


def build(dtype: torch.dtype = torch.float32) -> nn.Module:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8, bias=False), nn.Linear(8, 8, bias=False), nn.Linear(8, 4)).to(dtype)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(10.0).add_(30.0)
    return model


def train(model: nn.Module, optimizer: Any, steps: int = 7) -> None:
    generator = torch.Generator().manual_seed(1)
    for _ in range(steps):
        for parameter in model.parameters():
            parameter.grad = torch.randn(parameter.shape, generator=generator).to(parameter.dtype)
        optimizer.step()


def stand(model: nn.Module, optimizer: Any, steps: int = 12) -> None:
    """Step without a gradient and with learning rate 0: only an optimizer's own weights can move the model."""
    for each in wrapped_optimizers(optimizer):
        for group in each.param_groups:
            group["lr"] = 0.0
    for _ in range(steps):
        for parameter in model.parameters():
            parameter.grad = torch.zeros_like(parameter)
        optimizer.step()


def replace(model: nn.Module, weights: OptimizerWeights) -> None:
    with weights.following(), torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(NEW)


def values(model: nn.Module) -> Tensor:
    return torch.cat([each.detach().float().reshape(-1) for each in model.parameters()])


def is_new(model: nn.Module) -> bool:
    return bool((values(model) - NEW).abs().max() < 1e-6)


def held(model: nn.Module, optimizer: Any, *, is_reset: bool = False) -> OptimizerWeights:
    return OptimizerWeights(model, optimizer, AveragedStates(model, optimizer), is_reset=is_reset)


KEEPERS: dict[str, Callable[[nn.Module], Any]] = {
    "masters in the state": lambda model: Masters(model.parameters(), lr=0.01),
    "masters in a list": lambda model: MasterList(model.parameters(), lr=0.01),
    "a flat master": lambda model: FlatMaster(model.parameters(), lr=0.01),
    "lookahead": lambda model: Lookahead(torch.optim.SGD(model.parameters(), lr=0.01)),
    "wrapped twice": lambda model: Lookahead(Masters(model.parameters(), lr=0.01)),
}


@pytest.mark.parametrize("is_reset", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", KEEPERS)
def test_new_weights_stay(kind: str, dtype: torch.dtype, is_reset: bool, caplog: pytest.LogCaptureFixture) -> None:
    model = build(dtype)
    optimizer = KEEPERS[kind](model)
    train(model, optimizer)
    weights = held(model, optimizer, is_reset=is_reset)
    replace(model, weights)
    if is_reset:
        reset_optimizer_state(optimizer)
    stand(model, optimizer)
    assert is_new(model)
    weights.check_kept()
    assert not caplog.records


@pytest.mark.parametrize("kind", KEEPERS)
def test_without_following_the_old_weights_return(kind: str) -> None:
    """The optimizers above do keep weights: otherwise the test above would prove nothing."""
    model = build()
    optimizer = KEEPERS[kind](model)
    train(model, optimizer)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(NEW)
    stand(model, optimizer)
    assert not is_new(model)


def test_a_master_keeps_what_the_weights_round_away() -> None:
    """Otherwise an average of a bfloat16 model would undo all updates that are smaller than its last digit."""
    model = nn.Linear(4, 4, bias=False).bfloat16()
    nn.init.constant_(model.weight, 1.0)
    with torch.no_grad():
        model.weight[0] = 2.0
    optimizer = Masters(model.parameters(), lr=1.0)
    for _ in range(3):
        model.weight.grad = torch.full_like(model.weight, 2**-11)
        optimizer.step()
    assert model.weight.unique().tolist() == [1.0, 2.0], "three updates below bfloat16's last place must add up"
    finer = optimizer.state[model.weight]["finer"]
    with held(model, optimizer).following(), torch.no_grad():
        model.weight[1:] = 4.0
    assert torch.equal(finer[1:], torch.full((3, 4), 4.0 - 3 * 2**-11))
    with held(model, optimizer).following(), torch.no_grad():
        model.weight[1:] = 2**-8
    assert torch.equal(finer[1:], torch.full((3, 4), 2**-8)), (
        "low bits that would round to other weights must be cleared"
    )


def test_origins_move_with_the_weights_and_compensations_vanish() -> None:
    model = build()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    first, second, *_ = parameters = list(model.parameters())
    for parameter in parameters:
        optimizer.state[parameter] = {
            "x0": parameter.detach() + 3.0,
            "kahan_comp": torch.full_like(parameter, 0.5),
            "p0": parameter.detach() + 1.0,
        }
    start = optimizer.state[second]["p0"].clone()
    replace(model, held(model, optimizer))
    assert torch.allclose(optimizer.state[first]["x0"], torch.full((8, 8), NEW + 3.0), atol=1e-5)
    assert not optimizer.state[first]["kahan_comp"].any()
    assert torch.equal(optimizer.state[second]["p0"], start), (
        "Prodigy's first weights must be kept, as they only measure a distance"
    )


@pytest.mark.parametrize(
    "make",
    [
        lambda parameters: torch.optim.SGD(parameters, lr=0.01, momentum=0.9, weight_decay=0.1),
        lambda parameters: torch.optim.Adam(parameters, lr=0.01, weight_decay=0.1, amsgrad=True),
        lambda parameters: torch.optim.AdamW(parameters, lr=0.01, weight_decay=0.1),
        lambda parameters: torch.optim.Adagrad(parameters, lr=0.01, initial_accumulator_value=30.0),
        lambda parameters: torch.optim.RMSprop(parameters, lr=0.01, momentum=0.9, centered=True),
        lambda parameters: torch.optim.Rprop(parameters, lr=0.01),
        lambda parameters: torch.optim.ASGD(parameters, lr=0.01),
        lambda parameters: torch.optim.LBFGS(parameters, lr=0.01),
    ],
    ids=["sgd", "adam", "adamw", "adagrad", "rmsprop", "rprop", "asgd", "lbfgs"],
)
def test_moments_stay_to_the_bit(make: Any, caplog: pytest.LogCaptureFixture) -> None:
    model = build()
    optimizer = make(model.parameters())

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss: Tensor = 0.5 * torch.stack([each.square().sum() for each in model.parameters()]).sum()
        loss.backward()  # the gradient equals the weights
        return loss

    for _ in range(5):
        optimizer.step(closure)
    before = {key: value.clone() for state in optimizer.state.values() for key, value in tensors_of(state)}
    weights = held(model, optimizer)
    replace(model, weights)
    after = {key: value for state in optimizer.state.values() for key, value in tensors_of(state)}
    mean_of_weights = {"ax"} if isinstance(optimizer, torch.optim.ASGD) else set()
    for key, value in before.items():
        assert torch.equal(value, after[key]) or key in mean_of_weights, key
    stand(model, optimizer, 0)
    assert is_new(model)
    assert not [record for record in caplog.records if "'ax'" not in record.getMessage()]


def tensors_of(state: dict[str, Any]) -> list[tuple[str, Tensor]]:
    return [(key, value) for key, value in state.items() if isinstance(value, Tensor)]


def test_zeros_are_no_mirror_of_zeros() -> None:
    """A bias without a gradient is zero, and so are its moments, which are not copies of it."""
    model = build()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
            optimizer.state[parameter]["velocity"] = torch.zeros_like(parameter)
    replace(model, held(model, optimizer))
    assert not any(state["velocity"].any() for state in optimizer.state.values())


def test_state_that_follows_the_weights_unknown_is_reported_once(caplog: pytest.LogCaptureFixture) -> None:
    model = build()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for parameter in model.parameters():
        optimizer.state[parameter]["mean_of_late"] = parameter.detach() + 0.1
    weights = held(model, optimizer)
    for _ in range(2):
        weights.look()
        with weights.following():
            pass
    assert [record.getMessage() for record in caplog.records] == [
        "'mean_of_late' in the state of SGD follows the weights but was not recognised: averages do not update it, and "
        'it may distort or undo them. Pass optimizer_state="reset" to the policy, which clears it at each average'
    ]
    caplog.clear()
    with held(model, optimizer, is_reset=True).following():
        pass
    assert not caplog.records, "an optimizer that is cleared anyway must not cause a warning"


def test_masters_of_a_new_state_are_not_reported(caplog: pytest.LogCaptureFixture) -> None:
    """Regression: a restarted rank warned of masters that belong to the weights that it was about to take."""
    others = build(torch.bfloat16), build(torch.bfloat16)
    donor, own = (Masters(model.parameters(), lr=0.1) for model in others)
    train(others[0], donor)
    own.load_state_dict(donor.state_dict())
    with (
        OptimizerWeights(others[1], own, AveragedStates(others[1], own)).following(has_new_state=True),
        torch.no_grad(),
    ):
        others[1].load_state_dict(others[0].state_dict())
    assert not caplog.records
    before = values(others[1]).clone()
    stand(others[1], own)
    assert torch.equal(values(others[1]), before)


def test_an_optimizer_that_puts_the_old_weights_back_is_reported(caplog: pytest.LogCaptureFixture) -> None:
    model = build()
    optimizer = Hidden(model.parameters(), lr=0.01)
    train(model, optimizer)
    weights = held(model, optimizer)
    replace(model, weights)
    assert weights.is_watching
    weights.check_kept()
    assert not weights.is_watching and not caplog.records, (
        "the new weights were kept, so the check must end without a warning"
    )
    train(model, optimizer, 1)
    replace(model, weights)
    train(model, optimizer, 1)
    weights.check_kept()
    weights.check_kept()
    assert weights.is_watching and not caplog.records, "the check must wait for another step"
    train(model, optimizer, 1)
    weights.check_kept()
    assert not weights.is_watching
    assert [record.levelno for record in caplog.records] == [logging.WARNING]
    assert "Hidden after averages restored the old weights" in caplog.text
    replace(model, weights)
    assert not weights.is_watching, "the warning must appear only once"


def test_a_rank_that_trains_alike_and_is_behind_is_not_reported(caplog: pytest.LogCaptureFixture) -> None:
    """Regression: a rank one step behind was reported, since SGD's step from its old weights gives its current ones."""
    model = build()
    optimizer = type("OwnSGD", (torch.optim.SGD,), {})(model.parameters(), lr=0.1)
    weights = held(model, optimizer)
    before = values(model)
    for count in range(8):
        if count % 3 == 1:
            with weights.following(), torch.no_grad():
                nn.utils.vector_to_parameters(before, model.parameters())
        before = values(model)
        for parameter in model.parameters():
            parameter.grad = parameter.detach() - 3.0
        optimizer.step()
        if weights.is_watching:
            weights.check_kept()
    assert not caplog.records


def test_reset_reports_another_optimizer_that_trains_the_model(caplog: pytest.LogCaptureFixture) -> None:
    model = build()
    first, second = (torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9) for _ in range(2))
    weights = held(model, first, is_reset=True)
    weights.begin()
    for optimizer in (first, first, second):
        train(model, optimizer, 2)
        assert not caplog.records
        replace(model, weights)
    assert "policy.optimizer = new_optimizer" in caplog.text
    weights.end()
    caplog.clear()
    weights = held(model, first, is_reset=True)
    weights.begin()
    weights.change(second)
    train(model, second, 2)
    replace(model, weights)
    assert not caplog.records
    weights.end()
    assert not second._optimizer_step_post_hooks and not first._optimizer_step_post_hooks  # type: ignore[attr-defined]


def test_weights_that_stand_still_need_no_step(caplog: pytest.LogCaptureFixture) -> None:
    model = build()
    weights = held(model, torch.optim.SGD(model.parameters(), lr=0.1), is_reset=True)
    weights.begin()
    replace(model, weights)
    replace(model, weights)
    assert not caplog.records


def test_a_reset_reaches_wrapped_optimizers() -> None:
    model = build()
    inner = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    optimizer = Lookahead(inner)
    train(model, optimizer)
    inner.state["a name of its own"] = {"count": 3}  # type: ignore[index]
    assert len(inner.state) == 5
    reset_optimizer_state(optimizer)
    assert list(inner.state.values()) == [{"count": 3}]
    assert all("slow_params" in state and not state["slow_momentum"].any() for state in optimizer.state.values())
    train(model, optimizer)  # the step needs the entries that the constructor made


def test_a_reset_keeps_the_masks_of_a_constructor() -> None:
    """Regression: the step of SaRA after a reset raised KeyError: 'mask'."""
    model = build()
    optimizer = SaRA(model.parameters(), lr=0.01, threshold=30.0)
    train(model, optimizer)
    masks = [optimizer.state[each]["mask"] for each in model.parameters()]
    before = values(model)
    reset_optimizer_state(optimizer)
    assert all(optimizer.state[each].keys() == {"mask"} for each in model.parameters())
    assert all(optimizer.state[each]["mask"] is mask for each, mask in zip(model.parameters(), masks, strict=True))
    train(model, optimizer)
    assert not torch.equal(values(model), before)


def test_ftrl_keeps_the_average(caplog: pytest.LogCaptureFixture) -> None:
    """Regression: FTRL computes the weights from its state, and undid each average one step later."""
    model = build()
    optimizer = FTRL(model.parameters(), lr=0.05, beta=0.5, lambda_1=0.01, lambda_2=0.1)
    train(model, optimizer, 1)
    weights = held(model, optimizer)
    with weights.following(), torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.linspace(-1.0, 1.0, parameter.numel()).view_as(parameter))
    before = values(model)
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    assert torch.allclose(values(model), before, atol=1e-6)
