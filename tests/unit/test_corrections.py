"""Tests corrections of stale differences against numpy in float64, and the properties that their papers name."""

from __future__ import annotations

import math
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import pytest
import torch
from hypothesis import assume, given, settings, strategies as st
from support.facts import naming
from torch import Tensor

from asyncdist.protocols.async_diloco.corrections import CGAD, HeLoCo, StalenessWeight, correct_tensors

Array: TypeAlias = npt.NDArray[np.float64]

SIZE = 257
#: Differences in every direction relative to the momentum, with numbers of many magnitudes.
ANGLES = st.floats(0.0, math.pi)
SCALES = st.floats(-4, 4).map(lambda power: 10.0**power)


def heloco(d: Array, m: Array, c_ok: float, k_s: float, k_d: float, kappa: float, beta_max: float) -> Array:
    """Return algorithm 2 of the paper for one tensor, with its small constant at 0; ``m`` is the running mean."""
    u, v = d / np.linalg.norm(d), m / np.linalg.norm(m)
    c = float(u @ v)
    conf = np.linalg.norm(d) / (np.linalg.norm(d) + kappa * np.linalg.norm(m))
    if c >= c_ok:
        return d
    if c < 0:
        return d - min(k_s * -c * conf, beta_max) * c * np.linalg.norm(d) * v
    share = min(k_d * (1 - c) * conf, 1.0)
    mixed = (1 - share) * u + share * v
    return np.linalg.norm(d) * mixed / np.linalg.norm(mixed)


def pair(angle: float, length: float, momentum_length: float, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Return a difference and a momentum of given lengths, with an angle between them."""
    one, other = np.linalg.qr(np.random.default_rng(seed).standard_normal((SIZE, 2)))[0].T
    turned = math.cos(angle) * one + math.sin(angle) * other
    return torch.tensor(length * turned, dtype=torch.float32), torch.tensor(momentum_length * one, dtype=torch.float32)


def cosine(one: Tensor, other: Tensor) -> float:
    return torch.nn.functional.cosine_similarity(one.double(), other.double(), dim=0).item()


# -- HeLoCo -----------------------------------------------------------------------------------------------------------


@settings(max_examples=150, deadline=None)
@given(
    angle=ANGLES, length=SCALES, momentum_length=SCALES, momentum=st.floats(0, 0.99), kappa=st.floats(0, 10),
    turn=st.floats(0, 3), shrink=st.floats(0, 3), shrink_max=st.floats(0, 1), threshold=st.floats(0, 1),
)  # fmt: skip
def test_heloco_equals_numpy(
    angle: float, length: float, momentum_length: float, momentum: float, kappa: float, turn: float, shrink: float,
    shrink_max: float, threshold: float,
) -> None:  # fmt: skip
    difference, m = pair(angle, length, momentum_length)
    assume(min(abs(cosine(difference, m) - threshold), abs(math.cos(angle))) > 1e-5)  # on one side of each branch
    expected = heloco(
        difference.double().numpy(), (1 - momentum) * m.double().numpy(), threshold, shrink, turn, kappa, shrink_max
    )
    correct = HeLoCo(
        momentum=momentum, threshold=threshold, turn=turn, shrink=shrink, shrink_max=shrink_max, kappa=kappa
    )
    before = m.clone()
    found = correct(difference, m, 3)
    assert np.abs(found.double().numpy() - expected).max() <= 4e-6 * length
    assert torch.equal(m, before)


@settings(max_examples=100, deadline=None)
@given(angle=ANGLES, length=SCALES, momentum_length=SCALES)
def test_heloco_keeps_or_shortens_and_never_turns_away(angle: float, length: float, momentum_length: float) -> None:
    difference, m = pair(angle, length, momentum_length)
    before = difference.clone()
    found = HeLoCo()(difference, m, 0)
    old, new = cosine(before, m), cosine(found, m)
    assume(min(abs(old - 0.2), abs(old)) > 1e-5)
    if old >= 0.2:
        assert torch.equal(found, before)
    assert new >= old - 1e-6
    norms = torch.linalg.vector_norm(found).item() / torch.linalg.vector_norm(before).item()
    assert norms <= 1 + 1e-6
    if old >= 0:
        assert norms == pytest.approx(1, abs=1e-6)
    else:  # at most half of the opposing part is removed
        assert torch.dot(found, m) <= 1e-5 * length * momentum_length
        assert torch.dot(found, m) >= torch.dot(before, m)


def test_heloco_needs_a_momentum_and_a_difference() -> None:
    for difference, momentum in (
        (torch.ones(3), None),
        (torch.ones(3), torch.zeros(3)),
        (torch.zeros(3), torch.ones(3)),
        (torch.empty(0), torch.empty(0)),
    ):
        before = difference.clone()
        assert torch.equal(HeLoCo()(difference, momentum, 5), before)


def test_heloco_leaves_differences_that_are_not_finite() -> None:
    difference = torch.tensor([1.0, math.nan])
    assert HeLoCo()(difference, torch.ones(2), 0) is difference


def test_momentum_changes_only_helocos_confidence() -> None:
    """Kappa 0 trusts each difference fully, so the length of the momentum does not matter."""
    found = []
    for momentum, kappa in ((0.0, 0.0), (0.99, 0.0), (0.0, 3.0), (0.99, 3.0)):
        difference, m = pair(1.5, 1.0, 2.0)
        found.append(HeLoCo(momentum=momentum, kappa=kappa)(difference, m, 0))
    assert torch.equal(found[0], found[1])
    angles = [cosine(each, pair(1.5, 1.0, 2.0)[1]) for each in found]
    assert angles[2] < angles[3] < angles[0]


# -- weights ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("staleness", [0, 1, 3, 7, 100])
def test_staleness_weights_equal_the_notebooks(staleness: int) -> None:
    """``get_sync_weight`` of the notebook of Liu et al., for 4 workers."""
    base = np.sqrt(4) / 4
    for correct, weight in (
        (StalenessWeight(power=0, scale=4**-0.5), base),
        (StalenessWeight(scale=4**-0.5), base * 1 / (1 + staleness) ** 0.5),
        (StalenessWeight(), 1 / (1 + staleness) ** 0.5),
    ):
        assert correct.weight(staleness) == pytest.approx(weight)
        assert torch.equal(correct(torch.ones(2), None, staleness), torch.full((2,), float(weight)))


def test_cgads_weight_falls_from_1_to_0_at_the_cutoff() -> None:
    correct = CGAD(decay=0.1, cutoff=8)
    weights = [correct.weight(staleness) for staleness in range(12)]
    gate = [math.exp(-0.1 * age) * 0.5 * (1 + math.cos(math.pi * age / 8)) for age in range(8)]
    assert weights == pytest.approx([*gate, 0, 0, 0, 0])
    assert weights[0] == 1.0
    assert sorted(weights, reverse=True) == weights
    given = torch.randn(5)
    assert torch.equal(correct(given.clone(), torch.ones(5), 0), given)
    assert not correct(given.clone(), None, 8).any()
    assert torch.equal(correct(given.clone(), None, 3), given * weights[3])


# -- tensors of a flat vector -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("is_in_place", [True, False])
def test_each_tensor_is_corrected_alone(*, is_in_place: bool) -> None:
    calls: list[tuple[list[float], list[float] | None, int]] = []

    def correct(difference: Tensor, momentum: Tensor | None, staleness: int) -> Tensor:
        calls.append((difference.tolist(), None if momentum is None else momentum.tolist(), staleness))
        return difference.mul_(2) if is_in_place else difference * 2

    flat, momentum = torch.arange(5.0), torch.arange(10.0, 15.0)
    correct_tensors(correct, flat, momentum, [(0, 2), (2, 5)], 4)
    correct_tensors(correct, flat, None, [(3, 5)], 0)
    assert calls == [
        ([0.0, 1.0], [10.0, 11.0], 4),
        ([2.0, 3.0, 4.0], [12.0, 13.0, 14.0], 4),
        ([6.0, 8.0], None, 0),
    ]
    assert flat.tolist() == [0, 2, 4, 12, 16]
    assert momentum.tolist() == [10, 11, 12, 13, 14]


def test_opposite_and_aligned_tensors_are_told_apart() -> None:
    """As a whole, the difference is aligned with the momentum, and would pass unchanged."""
    momentum = torch.tensor([3.0, 4.0, 30.0, 40.0])
    flat = torch.tensor([-3.0, -4.0, 30.0, 40.0])
    assert torch.equal(HeLoCo()(flat.clone(), momentum, 0), flat)
    correct_tensors(HeLoCo(), flat, momentum, [(0, 2), (2, 4)], 0)
    assert flat[2:].tolist() == [30, 40]
    assert 0 > flat[0].item() > -3


def test_a_correction_of_another_shape_is_refused() -> None:
    with pytest.raises(ValueError, match=naming("correct", "(2,)", "(1,)")):
        correct_tensors(lambda d, _m, _s: d[:1], torch.ones(2), None, [(0, 2)], 0)


# -- wrong options ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "options", "option"),
    [
        (StalenessWeight, {"power": -1}, "power"),
        (StalenessWeight, {"scale": 0}, "scale"),
        (CGAD, {"decay": -0.1, "cutoff": 8}, "decay"),
        (CGAD, {"decay": 0.1, "cutoff": 0}, "cutoff"),
        (HeLoCo, {"momentum": 1.0}, "momentum"),
        (HeLoCo, {"threshold": 1.5}, "threshold"),
        (HeLoCo, {"turn": -1}, "turn"),
        (HeLoCo, {"shrink": math.inf}, "shrink"),
        (HeLoCo, {"shrink_max": 2}, "shrink_max"),
        (HeLoCo, {"kappa": math.nan}, "kappa"),
    ],
)
def test_wrong_options_are_named(kind: Any, options: dict[str, float], option: str) -> None:
    with pytest.raises(ValueError, match=naming(option, options[option])):
        kind(**options)


# -- momentum look-ahead ----------------------------------------------------------------------------------------------


def test_momentum_look_ahead_is_nesterov_at_each_arrival() -> None:
    """The rule: m <- mu m + (1 - mu) D, a <- a - lr m, and the ranks receive a - lr mu m.

    Each difference is measured from weights that were sent, so only the sent weights matter. They move like the
    parameter of torch's Nesterov momentum with the learning rate lr (1 - mu): 0.07 for the usual 0.7 and 0.9.
    """
    lr, mu = 0.7, 0.9
    generator = np.random.default_rng(3)
    anchor = generator.standard_normal(SIZE)
    momentum = np.zeros(SIZE)
    parameter = torch.nn.Parameter(torch.tensor(anchor))
    nesterov = torch.optim.SGD([parameter], lr=lr * (1 - mu), momentum=mu, nesterov=True)
    for _ in range(40):
        difference = generator.standard_normal(SIZE)
        momentum = mu * momentum + (1 - mu) * difference
        anchor = anchor - lr * momentum
        parameter.grad = torch.tensor(difference)
        nesterov.step()
        np.testing.assert_allclose(parameter.detach().numpy(), anchor - lr * mu * momentum, rtol=0, atol=1e-12)
