"""Tests delayed Nesterov against the optimizers that it equals; ``test_outer_step.py`` tests it against numpy."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from hypothesis import given, settings, strategies as st
from support.facts import naming
from torch import Tensor, nn
from torch.optim import SGD

from asyncdist.protocols.async_diloco.delayed_nesterov import DelayedNesterov
from asyncdist.protocols.diloco.outer_step import OuterFactory, OuterStep, check_factory

EPS = torch.finfo(torch.float32).eps


def draws(seed: int, count: int, *, is_on_grid: bool = False) -> list[Tensor]:
    """Return tensors of 997 values, which are integers times 2 ** -12 on the grid, and normal otherwise."""
    generator = torch.Generator().manual_seed(seed)
    if is_on_grid:
        return [torch.randint(-4096, 4097, (997,), generator=generator) / 4096.0 for _ in range(count)]
    return [torch.randn(997, generator=generator) for _ in range(count)]


def ends(factory: OuterFactory, anchor: Tensor, differences: list[Tensor]) -> list[Tensor]:
    """Return the anchor after each step."""
    outer = OuterStep(factory, [anchor.clone()])
    found = []
    for difference in differences:
        outer.step([difference])
        found.append(outer.anchors[0].clone())
    return found


def bits(tensors: list[Tensor]) -> list[bytes]:
    return [tensor.numpy().tobytes() for tensor in tensors]


@pytest.mark.parametrize("momentum", [0.9, 0.0])
def test_a_delay_of_1_has_the_bits_of_torchs_nesterov(momentum: float) -> None:
    """This holds for any activation, and for values that are not on a grid. A fused kernel rounds differently."""
    anchor, *differences = draws(1, 51)
    nesterov = functools.partial(SGD, lr=0.07, momentum=momentum, nesterov=momentum > 0, fused=False)
    expected = ends(nesterov, anchor, differences)
    for activation in (0.0, 0.3, 1.0):
        own = functools.partial(DelayedNesterov, lr=0.07, momentum=momentum, delay=1, activation=activation)
        assert bits(ends(own, anchor, differences)) == bits(expected)


@pytest.mark.parametrize("is_on_grid", [True, False])
@pytest.mark.parametrize("activation", [0.0, 0.25])
def test_a_window_moves_like_one_step_with_its_mean(activation: float, *, is_on_grid: bool) -> None:
    """To the bit on a grid, if lr, momentum and delay are powers of two; else within one rounding per arrival.

    The activation moves a part of the momentum to earlier arrivals, but with the momentum of the window before.
    """
    delay, windows = 4, 2 if is_on_grid else 12
    anchor, *differences = draws(2, 1 + delay * windows, is_on_grid=is_on_grid)
    own = functools.partial(DelayedNesterov, lr=0.5, momentum=0.5, delay=delay, activation=activation)
    means = [sum(differences[i : i + delay][1:], differences[i]) / delay for i in range(0, len(differences), delay)]
    found = ends(own, anchor, differences)[delay - 1 :: delay]
    expected = ends(functools.partial(SGD, lr=0.5, momentum=0.5, nesterov=True), anchor, means)
    if activation:
        assert not torch.allclose(found[1], expected[1])
    elif is_on_grid:
        assert bits(found) == bits(expected)
    else:
        for number, (one, other) in enumerate(zip(found, expected, strict=True), start=1):
            assert (one - other).abs().max() <= number * delay * EPS * other.abs().max()


@settings(max_examples=40, deadline=None)
@given(st.integers(1, 6), st.integers(0, 20), st.floats(0, 0.95), st.floats(0, 1))
def test_constant_differences_move_as_far_as_synchronous_steps(
    delay: int, windows: int, momentum: float, share: float
) -> None:
    """The sum of a geometric series, in float64: with c, the earlier arrivals use the momentum of the window before."""
    anchor = torch.zeros(1, dtype=torch.float64)
    outer = OuterStep(
        functools.partial(DelayedNesterov, lr=0.1, momentum=momentum, delay=delay, activation=share / delay), [anchor]
    )
    expected = m = 0.0
    for _ in range(windows):
        for _ in range(delay):
            outer.step([torch.ones(1, dtype=torch.float64)])
        before, m = m, momentum * m + 1.0
        early = share / delay * (delay - 1)
        expected -= 0.1 * (1.0 + momentum * (early * before + (1 - early) * m))
    assert anchor.item() == pytest.approx(expected, abs=1e-12)


def test_the_sum_of_a_window_exists_only_within_it() -> None:
    made: list[torch.optim.Optimizer] = []

    def factory(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
        made.append(DelayedNesterov(parameters, lr=0.5, delay=3))
        return made[-1]

    outer = OuterStep(factory, [torch.zeros(2)])
    seen = []
    for _ in range(6):
        outer.step([torch.ones(2)])
        (state,) = made[0].state.values()
        seen.append(sorted(state))
    within = ["accumulated", "arrivals"]
    assert seen == [within, within, ["arrivals", "momentum_buffer"]] + 2 * [
        ["accumulated", "arrivals", "momentum_buffer"]
    ] + [["arrivals", "momentum_buffer"]]


def test_a_run_saved_within_a_window_resumes_to_the_bit() -> None:
    factory = functools.partial(DelayedNesterov, lr=0.07, momentum=0.9, delay=4, activation=0.1)
    check_factory(factory)
    anchor, *differences = draws(3, 30)
    whole = ends(factory, anchor, differences)
    for cut in (1, 4, 7, 18):
        outer = OuterStep(factory, [anchor.clone()])
        for difference in differences[:cut]:
            outer.step([difference])
        again = OuterStep(factory, [outer.anchors[0].clone()])
        again.load_state_dict(outer.state_dict())
        for difference in differences[cut:]:
            again.step([difference])
        assert bits([again.anchors[0]]) == bits(whole[-1:])


def test_a_saved_delay_replaces_the_factorys() -> None:
    outer = OuterStep(functools.partial(DelayedNesterov, lr=0.5, delay=4), [torch.zeros(2)])
    saved = OuterStep(functools.partial(DelayedNesterov, lr=0.5, delay=2), [torch.zeros(2)]).state_dict()
    with pytest.warns(UserWarning, match="the saved delay=2 replaces delay=4"):
        outer.load_state_dict(saved)
    assert outer.state_dict()["param_groups"][0]["delay"] == 2


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("lr", 0.0),
        ("lr", float("nan")),
        ("momentum", 1.0),
        ("momentum", -0.1),
        ("delay", 0),
        ("delay", 2.5),
        ("activation", 0.26),
        ("activation", -0.1),
    ],
)
def test_wrong_options_are_named(option: str, value: Any) -> None:
    options = {"lr": 0.1, "delay": 4, option: value}
    with pytest.raises(ValueError, match=naming(option, str(value))):
        DelayedNesterov([nn.Parameter(torch.ones(2))], **options)


def test_a_closure_is_evaluated_with_gradients() -> None:
    parameter = nn.Parameter(torch.ones(2))
    optimizer = DelayedNesterov([parameter, nn.Parameter(torch.ones(1))], lr=1.0, momentum=0.0, delay=2)

    def closure() -> float:
        (parameter * 2.0).sum().backward()
        return 7.0

    assert optimizer.step(closure) == 7.0
    assert parameter.tolist() == [0.0, 0.0]
