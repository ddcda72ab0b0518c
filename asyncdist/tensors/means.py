"""Computes elementwise weighted means of tensors that arrive in chunks or all at once.

Tensors are summed in the given order, in the accumulator's dtype (float32 or wider), and the sum is divided by the sum
of the weights. Product, sum and quotient are rounded separately, so the mean depends neither on the chunks nor on the
width of vector instructions. Two rules are added:

- **The mean of finite values is finite.** When a sum overflows, the summation continues with values and divisor scaled
  by 2^-64. Scaling by a power of two is exact here, so the mean is the same as without overflow. (Without this rule,
  two attention masks of ``finfo.min`` would add up to -inf.)
- **The mean of equal values is that value.** If an element's quotient is the same as if all tensors were equal to the
  last one, the mean is the last tensor's value. (In float32, (x + x + x) / 3 differs from x for one x in seven.) If the
  tensors differ but the quotients are equal, this changes the mean only within rounding.

Only the ratios of weights matter. Weights are scaled by a power of two, which changes no bit of the mean. Products then
underflow or overflow only if the values do. Without scaling, the products of weights near 1e-6 and values near 1e-33
would lose most of their digits. A weight below 2^-100 of the largest weight counts as 2^-100 of it.

Complex values are averaged as pairs of real and imaginary parts.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Final

import torch
from torch import Tensor

#: Number of elements processed at a time: 256 KiB of float32, which stay in a core's private cache through all passes
#: over the elements.
_PIECE_COUNT: Final = 1 << 16
#: Number of elements for which the mean of equal values is computed at a time, to limit the size of temporaries.
_STRETCH_COUNT: Final = 12 << 10
_SCALE: Final = 2.0**-64
_LARGEST: Final = {dtype: torch.finfo(dtype).max for dtype in (torch.float32, torch.float64)}
#: Magnitude of values up to which sums of 2^20 of them are finite.
_SAFE: Final = {dtype: largest * 2.0**-20 for dtype, largest in _LARGEST.items()}
_INTEGERS: Final = {torch.float32: torch.int32, torch.float64: torch.int64}
#: Largest n for which a weight may be 2^n times the first weight without the sums being scaled down.
_WEIGHT_EXPONENT_MAX: Final = 20
_WEIGHT_MIN: Final = 2.0**-100
#: Numbers n of summands for which (x + ... + x) / n is always exactly x. For n = 4, the rounding error of 3x is at most
#: half a unit in the last place of 4x. If it is exactly half a unit, 3x + x is rounded to 4x, which is even.
_EXACT_COUNTS: Final = (2, 4)


class WeightedMean:
    """Computes the weighted mean of tensors that arrive in sequence, each in chunks.

    Pass the tensors in rank order. Call :meth:`begin` for each tensor, then :meth:`add` for each of its chunks. After a
    chunk of the last tensor was added, that part of the accumulator contains the mean. The computation allocates one
    temporary piece of a chunk, or more if sums overflow.

    Args:
        count: Number of tensors.
        keeps_equal: Whether the mean of equal values is exactly that value.

    Attributes:
        is_agreed: Whether all tensors added so far contain the same infinity at each non-finite element.
    """

    def __init__(self, count: int, *, keeps_equal: bool = True) -> None:
        self._count = count
        self._keeps_equal = keeps_equal
        self.is_agreed = True
        self._weights: list[float] = []  # weights of the tensors so far, scaled by 2^-exponent
        self._exponent = 0
        self._shrinking = 1.0  # factor by which the previous sums are multiplied before the current tensor is added
        self._is_careful = False
        self._scaled: dict[int, Tensor] = {}  # masks of the scaled sums, by address of the accumulator

    def begin(self, weight: float) -> None:
        """Begin the next tensor. Its ``weight`` must be finite and above 0."""
        assert len(self._weights) < self._count, f"a mean of {self._count} tensors has all of them"
        exponent = math.frexp(weight)[1] - 1
        self._shrinking = 1.0
        if not self._weights:
            self._exponent = exponent
        elif exponent - self._exponent > _WEIGHT_EXPONENT_MAX:
            self._shrinking = max(_WEIGHT_MIN, math.ldexp(1.0, self._exponent - exponent))
            self._weights = [max(_WEIGHT_MIN, each * self._shrinking) for each in self._weights]
            self._exponent = exponent
        self._weights.append(max(_WEIGHT_MIN, math.ldexp(weight, -self._exponent)))

    def add(self, into: Tensor, chunk: Tensor | None = None) -> None:
        """Add a chunk of the current tensor to the corresponding part of an accumulator.

        Args:
            into: Contiguous 1-D slice of the accumulator, with dtype float32, complex64 or wider. The first tensor
                overwrites it.
            chunk: 1-D tensor of the same length, of any dtype that fits into the accumulator's. It is not changed. None
                if ``into`` already contains the first tensor's values.
        """
        if into.requires_grad or (chunk is not None and chunk.requires_grad):
            into, chunk = into.detach(), None if chunk is None else chunk.detach()
        into = _real(into)
        values = into if chunk is None else _real(chunk)
        count = len(into)
        if count <= _PIECE_COUNT:
            if count:
                self._add_piece(into, values)
            return
        pieces = torch.split(into, _PIECE_COUNT)
        values_pieces = pieces if values is into else torch.split(values, _PIECE_COUNT)
        for piece, its_values in zip(pieces, values_pieces, strict=True):
            self._add_piece(piece, its_values)

    def _add_piece(self, into: Tensor, values: Tensor) -> None:
        weight, place = self._weights[-1], len(self._weights)
        is_first, is_last = place == 1, place == self._count
        if is_first and is_last:  # The mean of one tensor is that tensor, whatever its weight.
            if values is not into:
                into.copy_(values)
            return
        if self._shrinking != 1.0:
            into.mul_(self._shrinking)
        wide = values if values.dtype == into.dtype else values.to(into.dtype)
        product = wide if weight == 1.0 else wide * weight
        # From the first product that is large enough to overflow a sum, all sums are checked for overflow.
        self._is_careful = self._is_careful or not _is_within(product, _SAFE[into.dtype])
        if self._is_careful:
            self._add_carefully(into, wide, product)
        elif not is_first:
            into.add_(product)
        elif product is not into:
            into.copy_(product)
        if is_last:
            self._divide(into)
            if self._keeps_equal:
                _prefer_last(into, wide, self._weights, is_careful=self._is_careful)

    def _add_carefully(self, into: Tensor, wide: Tensor, product: Tensor) -> None:
        """Add the current tensor. Scale down each sum of finite values that would overflow."""
        is_first = len(self._weights) == 1
        total = product if is_first else into + product
        leaves = torch.isfinite(wide) & ~torch.isfinite(total)
        if not is_first:
            leaves &= torch.isfinite(into)
            is_infinite = ~(torch.isfinite(into) & torch.isfinite(wide))
            self.is_agreed = self.is_agreed and not (is_infinite & (into != wide)).any()
        scaled = self._scaled_sums(into)
        if scaled is None and not leaves.any():
            into.copy_(total)
            return
        scaled = self._scaled_sums(into, make=True)
        assert scaled is not None, "it was made"
        careful = wide * (self._weights[-1] * _SCALE)
        if is_first:
            scaled.copy_(leaves)
        else:
            careful += torch.where(scaled, into, into * _SCALE)
            scaled |= leaves
        into.copy_(torch.where(scaled, careful, total))

    def _divide(self, into: Tensor) -> None:
        """Divide the weighted sum by the sum of the weights. A divisor of exactly 1 leaves the values unchanged."""
        divisor = sum(self._weights)
        if not self._is_careful:
            divide(into, divisor)
            return
        is_finite = torch.isfinite(into)
        quotient = into / divisor if divisor != 1.0 else into
        scaled = self._scaled_sums(into)
        if scaled is not None:
            quotient = torch.where(scaled, into / (divisor * _SCALE), quotient)
        largest = _LARGEST[into.dtype]  # Rounding may raise the mean of the largest values to infinity.
        into.copy_(torch.where(is_finite, quotient.clamp(-largest, largest), quotient))

    def _scaled_sums(self, into: Tensor, *, make: bool = False) -> Tensor | None:
        """Return the mask of elements of ``into`` that are scaled sums, or None if there is no mask yet."""
        storage = into.untyped_storage()
        found = self._scaled.get(storage.data_ptr())
        if found is None:
            if not make:
                return None
            found = torch.zeros(storage.nbytes() // into.itemsize, dtype=torch.bool, device=into.device)
            self._scaled[storage.data_ptr()] = found
        return found[into.storage_offset() : into.storage_offset() + len(into)]


def weighted_mean_into(
    result: Tensor, parts: Sequence[Tensor], weights: Sequence[float], *, keeps_equal: bool = True
) -> bool:
    """Write the weighted mean of ``parts``, tensors in rank order, into ``result``.

    Args:
        result: Contiguous 1-D tensor of float32, complex64 or wider, which must not be one of the parts.
        parts: One or more tensors of the result's length.
        weights: Weight of each part, finite and above 0.
        keeps_equal: Whether the mean of equal values is exactly that value.

    Returns:
        Whether all parts contain the same infinity at each non-finite element.
    """
    mean = WeightedMean(len(parts), keeps_equal=keeps_equal)
    for part, weight in zip(parts, weights, strict=True):
        mean.begin(weight)
        mean.add(result, part)
    return mean.is_agreed


def mean_into(result: Tensor, parts: Sequence[Tensor]) -> None:
    """Write the unweighted mean of two or more tensors into ``result``, bitwise as :class:`WeightedMean` does.

    ``result`` must be a contiguous 1-D tensor of dtype float32, complex64 or wider, and must not be one of ``parts``.
    """
    result, parts = _real(result), [_real(part) for part in parts]
    if not len(result):
        return
    torch.add(parts[0], parts[1], out=result)
    for part in parts[2:]:
        result += part
    if not mean_of_sum(result, parts[-1], len(parts)):
        weighted_mean_into(result, parts, [1.0] * len(parts))


def mean_of_sum(total: Tensor, last: Tensor, count: int) -> bool:
    """Divide the sum of ``count`` tensors in place. The result is bitwise equal to the mean of :func:`mean_into`.

    Args:
        total: Contiguous 1-D tensor of float32, complex64 or wider.
        last: The last of the added tensors.

    Returns:
        Whether the sum is finite. If not, ``total`` is unchanged, and the mean must be computed from all tensors.
    """
    total, last = _real(total), _real(last)
    if not _is_within(total, _LARGEST[total.dtype]):
        return False
    divide(total, count)
    _prefer_last(total, last, [1.0] * count, is_careful=False)
    return True


def divide(total: Tensor, divisor: float) -> None:
    """Divide values in place, rounding once. A divisor of exactly 1 leaves them unchanged."""
    if divisor != 1.0:
        # On CUDA, the divisor is a tensor, because CUDA would multiply by the reciprocal of a Python scalar.
        on_device = total.device.type != "cpu"
        total.div_(torch.tensor(divisor, dtype=total.dtype, device=total.device) if on_device else divisor)


def _prefer_last(mean: Tensor, last: Tensor, weights: Sequence[float], *, is_careful: bool) -> None:
    """Write the last tensor's value to each element whose mean equals the mean of copies of the last tensor."""
    if len(weights) in _EXACT_COUNTS and all(weight == 1.0 for weight in weights):
        return
    for its_mean, its_last in zip(torch.split(mean, _STRETCH_COUNT), torch.split(last, _STRETCH_COUNT), strict=True):
        if is_careful:
            of_equal = torch.empty_like(its_last)
            weighted_mean_into(of_equal, [its_last] * len(weights), weights, keeps_equal=False)
        else:
            of_equal = _mean_of_equal(its_last, weights)
        # Comparisons and `where` would take ten times as long as integer arithmetic.
        bits, last_bits = its_mean.view(_INTEGERS[mean.dtype]), its_last.view(_INTEGERS[mean.dtype])
        differs = of_equal.view(bits.dtype)
        torch.ne(bits, differs, out=differs)
        if not differs.min():
            bits *= differs
            bits -= differs.sub_(1).mul_(last_bits)  # adds the last tensor's bits to the elements that are now zero


def _mean_of_equal(values: Tensor, weights: Sequence[float]) -> Tensor:
    """Return the mean, including rounding errors, of tensors that all equal ``values``. No sum may overflow."""
    if weights[0] == weights[1] == 1.0:
        total, others = values + values, weights[2:]
    else:
        total, others = values * weights[0], weights[1:]
    for weight in others:
        total += values if weight == 1.0 else values * weight
    divide(total, sum(weights))
    return total


def _is_within(values: Tensor, bound: float) -> bool:
    """Return whether all values are finite and at most ``bound`` in magnitude.

    ``bound`` must exceed the square root of the dtype's largest value.
    """
    # Computing the sum of squares takes a fifth of the time of `aminmax`. It is finite for values up to 1e18, and never
    # for NaN.
    if math.isfinite(torch.dot(values, values).item()):
        return True
    low, high = torch.aminmax(values)
    return -bound <= low.item() and high.item() <= bound


def _real(tensor: Tensor) -> Tensor:
    """Return a flat tensor unchanged if it is real. If it is complex, return a view of it as real numbers."""
    return torch.view_as_real(tensor).view(-1) if tensor.is_complex() else tensor


def mixed(one: Tensor, other: Tensor, share: float) -> Tensor:
    """Return ``share * one + (1 - share) * other`` for real tensors of the same dtype.

    Both products and the sum are rounded separately, and the sum is clamped to the interval between the tensors. Equal
    values therefore remain equal, and finite values remain finite.
    """
    total = (one * share).add_(other * (1.0 - share))
    return total.clamp_(torch.minimum(one, other), torch.maximum(one, other))


def running_mean_into(result: Tensor, mean: Tensor, values: Tensor, count: int) -> None:
    """Write into ``result`` the mean of ``count`` tensors and one more tensor, computed with :func:`mixed`.

    Args:
        result: Contiguous 1-D tensor of the mean's dtype, which may be ``mean``.
        mean: Contiguous 1-D tensor of float32, complex64 or wider.
        values: 1-D tensor of the same length, of any dtype that fits into the mean's.
        count: Number of tensors in ``mean``.
    """
    result, mean, values = _real(result), _real(mean), _real(values)
    share = count / (count + 1)
    for into, before, its_values in zip(
        torch.split(result, _PIECE_COUNT),
        torch.split(mean, _PIECE_COUNT),
        torch.split(values, _PIECE_COUNT),
        strict=True,
    ):
        into.copy_(mixed(before, its_values.to(before.dtype), share))
