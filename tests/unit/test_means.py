"""Tests elementwise means against numpy: chunks, order, overflow and equal values."""

from __future__ import annotations

import math
import operator
from collections.abc import Sequence
from fractions import Fraction
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings, strategies as st
from scripts.population import expected_mean
from torch import Tensor

from asyncdist.tensors.means import WeightedMean, mean_into

LAWS = settings(deadline=None, derandomize=True, max_examples=100)
WIDE = (torch.float32, torch.float64, torch.complex64)
FLOATS = (torch.float16, torch.bfloat16, *WIDE)


def mean_of(parts: Sequence[Tensor], weights: Sequence[float], edges: Sequence[int] = ()) -> Tensor:
    """Return the mean of the parts, which are added in turn, each cut at the edges."""
    wide = torch.promote_types(parts[0].dtype, torch.float32)
    total, mean = torch.full(parts[0].shape, math.nan, dtype=wide), WeightedMean(len(parts))
    for part, weight in zip(parts, weights, strict=True):
        mean.begin(weight)
        for start, stop in pairwise(sorted({0, len(part), *edges})):
            mean.add(total[start:stop], part[start:stop])
    return total


def bits(tensor: Tensor) -> bytes:
    return tensor.contiguous().view(torch.uint8).numpy().tobytes()


def samples(dtype: torch.dtype, count: int, seed: int, *, spread: float = 1.0) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    wide = torch.promote_types(dtype, torch.float32)
    return [(spread * torch.randn(997, generator=generator, dtype=wide)).to(dtype) for _ in range(count)]


@pytest.mark.slow
@pytest.mark.parametrize("dtype", FLOATS)
@LAWS
@given(
    st.integers(0, 10_000),
    st.lists(st.sampled_from([1.0, 0.1, 3.7, 1e3]), min_size=1, max_size=5),
    st.lists(st.integers(0, 997), max_size=12),
)
def test_law_chunks_change_no_bit(dtype: torch.dtype, seed: int, weights: list[float], cuts: list[int]) -> None:
    parts = samples(dtype, len(weights), seed)
    assert bits(mean_of(parts, weights, cuts)) == bits(mean_of(parts, weights))


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@LAWS
@given(
    st.integers(0, 10_000),
    st.one_of(
        st.integers(2, 7).map(lambda count: [1.0] * count),
        st.lists(st.floats(1e-3, 1e3), min_size=2, max_size=5),
    ),
    st.sampled_from([1.0, 0.9]),
)
def test_law_the_mean_is_that_of_numpy_also_where_sums_overflow(
    dtype: torch.dtype, seed: int, weights: list[float], largest: float
) -> None:
    """A third of the elements is ordinary, a third near the dtype's largest values, and a third equal in all parts."""
    parts = samples(dtype, len(weights), seed)
    for part in parts:
        part[::3] = part[::3].clamp(-1, 1) * torch.finfo(dtype).max * largest
        part[1::3] = parts[0][1::3]
    with np.errstate(all="ignore"):
        expected = expected_mean([part.numpy() for part in parts], weights)
    found = mean_of(parts, weights)
    assert found.isfinite().all()
    assert bits(found) == expected.tobytes()
    assert torch.equal(found[1::3], parts[0][1::3])
    if set(weights) == {1.0}:
        at_once = torch.empty_like(found)
        mean_into(at_once, parts)
        assert bits(at_once) == bits(found)


def of_all_sizes(dtype: torch.dtype, count: int, seed: int) -> Tensor:
    """Return finite values with random bits, so of every exponent and subnormal, beginning with the extremes."""
    info = torch.finfo(dtype)
    extremes = torch.tensor([0.0, -0.0, info.smallest_normal, info.min, info.max], dtype=dtype)
    tiniest = torch.zeros(1, dtype=dtype)
    tiniest.view(torch.uint8)[0] = 1  # the least significant bit
    draws = np.random.default_rng(seed).integers(0, 256, 2 * count * info.bits // 8, dtype=np.uint8)
    drawn = torch.from_numpy(draws).view(dtype)
    return torch.cat([tiniest, extremes, drawn[drawn.isfinite()]])[:count]


WEIGHTS = st.one_of(
    st.integers(1, 40).map(lambda count: [1.0] * count),
    st.lists(st.floats(1e-3, 1e3), min_size=1, max_size=6),
    st.lists(st.floats(-300, 300).map(lambda exponent: 10.0**exponent), min_size=1, max_size=6),
    st.lists(st.sampled_from([1e-300, 1e-6, 3e-6, 1.0, 1e300]), min_size=1, max_size=6),
)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
@LAWS
@given(st.integers(0, 10_000), WEIGHTS)
def test_law_the_mean_of_equal_values_is_that_value(dtype: torch.dtype, seed: int, weights: list[float]) -> None:
    """Regression: one in seven means of three equal float32 values was off by a unit in the last place.

    Values near 1e-33 with weights near 1e-6 changed by one part in a million, since their products are subnormal.
    """
    part = of_all_sizes(dtype, 200, seed)
    assert bits(mean_of([part] * len(weights), weights).to(dtype)) == bits(part)
    if len(weights) > 1:
        wide = part.to(torch.promote_types(dtype, torch.float32))
        at_once = torch.empty_like(wide)
        mean_into(at_once, [wide] * len(weights))
        assert bits(at_once.to(dtype)) == bits(part)


@pytest.mark.parametrize("sign", [1.0, -1.0])
@pytest.mark.parametrize("count", [2, 3, 4, 5, 8])
def test_mean_of_equal_values_for_each_float32_mantissa(count: int, sign: float) -> None:
    values = sign * torch.arange(1 << 23, 1 << 24, dtype=torch.int32).float()
    result = torch.empty_like(values)
    mean_into(result, [values] * count)
    assert torch.equal(result, values)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@settings(LAWS, max_examples=60)
@given(st.integers(0, 10_000), WEIGHTS, st.booleans())
def test_law_the_mean_is_near_the_exact_one(
    dtype: torch.dtype, seed: int, weights: list[float], is_small: bool
) -> None:
    """The mean of values and weights of all magnitudes is near the one computed with fractions."""
    weights = weights[:6]
    count, info = len(weights), torch.finfo(dtype)
    parts = [of_all_sizes(dtype, 30, seed + place) for place in range(count)]
    if is_small:
        parts = [part.clamp(-64 * info.tiny, 64 * info.tiny) for part in parts]
    found = mean_of(parts, weights)
    assert found.isfinite().all()
    tiniest = Fraction(info.tiny) * Fraction(info.eps)
    fractions = [Fraction(weight) for weight in weights]
    for place, mean in enumerate(found.tolist()):
        values = [Fraction(part[place].item()) for part in parts]
        exact = sum(map(operator.mul, fractions, values), Fraction()) / sum(fractions)
        bound = 3 * (count + 1) * (Fraction(info.eps) * max(map(abs, values)) + tiniest)
        assert abs(Fraction(mean) - exact) <= bound, (place, mean, [float(value) for value in values])


@pytest.mark.parametrize("dtype", WIDE)
@pytest.mark.parametrize("count", [2, 3, 4, 7])
def test_masks_of_the_smallest_finite_value_stay_what_they_are(dtype: torch.dtype, count: int) -> None:
    """Regression: the sum of two masks was -inf and was applied, after which no rank could be a donor."""
    real = dtype.to_real()
    smallest = torch.finfo(real).min
    mask = torch.tensor([smallest, -smallest, 0.0, 1.5], dtype=real).repeat(2).view(dtype)
    weights = [2.5, *[1.0] * (count - 1)]
    assert torch.equal(mean_of([mask] * count, [1.0] * count), mask)
    assert torch.equal(mean_of([mask] * count, weights), mask)
    result = torch.empty_like(mask)
    mean_into(result, [mask] * count)
    assert torch.equal(result, mask)


def test_sums_that_leave_the_range_and_come_back() -> None:
    large = torch.finfo(torch.float32).max
    rows = torch.tensor([[large, large, -large, -large, 5.0], [large, large, large, -large, -large]]).T.contiguous()
    parts = [row.clone() for row in rows]
    found = mean_of(parts, [1.0] * 5)
    assert found[0] == 1.0 and float(found[1]) == pytest.approx(large / 5)
    result = torch.empty(2)
    mean_into(result, parts)
    assert bits(result) == bits(found)


def test_what_is_not_finite_stays_so_and_spoils_no_other_element() -> None:
    parts = [torch.tensor([math.inf, -math.inf, math.nan, 1.0, math.inf, 3e38]) for _ in range(3)]
    parts[2][4] = -math.inf
    for found in (mean_of(parts, [1.0] * 3), mean_of(parts, [1.5, 1.0, 2.0]), torch.empty(6)):
        if found[3] != 1.0:
            mean_into(found, parts)
        assert found[:2].tolist() == [math.inf, -math.inf]
        assert found[2].isnan() and found[4].isnan()
        assert found[3] == 1.0 and found[5] == parts[0][5]


@pytest.mark.parametrize("weights", [[1e-300, 1e300], [1e300, 1e-300], [1e-6, 1.0, 1e300, 1e-300]])
def test_infinities_that_all_tensors_hold_stay_for_any_weights(weights: list[float]) -> None:
    """Regression: a weight that rounds to zero in float32 turned an infinity into NaN."""
    mask = torch.tensor([-math.inf, math.inf, 1.0])
    total, mean = torch.empty(3), WeightedMean(len(weights))
    for weight in weights:
        mean.begin(weight)
        mean.add(total, mask)
    assert torch.equal(total, mask) and mean.is_agreed


def test_product_sum_and_quotient_round_apart_and_keep_chunks() -> None:
    parts, weights = samples(torch.float32, 2, 0), [0.1, 0.6]
    kept = [part.clone() for part in parts]
    one, two = (part.numpy() * np.float32(weight) for part, weight in zip(parts, weights, strict=True))
    assert bits(mean_of(parts, weights)) == ((one + two) / np.float32(sum(weights))).tobytes()
    assert all(torch.equal(part, before) for part, before in zip(parts, kept, strict=True))


def test_first_tensor_needs_no_zeros_and_keeps_the_sign_of_zero() -> None:
    found = mean_of([torch.tensor([-0.0, 1.0, 2.0])], [1.0])
    assert found.tolist() == [0.0, 1.0, 2.0]
    assert math.copysign(1.0, found[0].item()) == -1.0


def test_the_first_tensor_may_lie_in_the_accumulator() -> None:
    parts = samples(torch.float32, 3, 1)
    parts[0][:3] = torch.finfo(torch.float32).max
    parts[2][:3] = torch.finfo(torch.float32).max
    for weights in ([1.0, 1.0, 1.0], [0.3, 7.0, 2.0]):
        total, mean = parts[0].clone(), WeightedMean(3)
        mean.begin(weights[0])
        mean.add(total)
        for part, weight in zip(parts[1:], weights[1:], strict=True):
            mean.begin(weight)
            mean.add(total, part)
        assert bits(total) == bits(mean_of(parts, weights))


def test_tensors_that_require_gradients_are_averaged_as_they_are() -> None:
    parts: list[Any] = [part.requires_grad_() for part in samples(torch.float32, 2, 0)]
    found = mean_of(parts, [1.0, 1.0])
    assert not found.requires_grad and torch.equal(found, (parts[0] + parts[1]).detach() / 2)


def test_more_than_one_piece_is_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    parts = samples(torch.float32, 3, 5)
    parts[0][::2] = parts[1][::2] = torch.finfo(torch.float32).max
    whole = mean_of(parts, [1.0] * 3)
    monkeypatch.setattr("asyncdist.tensors.means._PIECE_COUNT", 10)
    assert bits(mean_of(parts, [1.0] * 3)) == bits(whole)
