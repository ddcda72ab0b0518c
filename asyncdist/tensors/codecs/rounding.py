"""Codecs that round each value to bfloat16, or to a narrower number times the scale of the value's block."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Final

import torch
from torch import Tensor

from asyncdist.tensors.codecs.codec import BlockCodec, checked

#: Size in bytes of a scale, which is a float32 that precedes its block.
_SCALE_NBYTES: Final = 4
#: Number of fraction bits of a float32, which are below its exponent bits.
_FRACTION_BITS: Final = 23
#: Adding this number to one of the levels 1 to 7 of Q4 gives the biased exponent of the level's float32.
_Q4_BIAS: Final = 120


def _write_scale(encoded: Tensor, scale: Tensor, largest: Tensor) -> None:
    """Write each block's scale in front of the block, or NaN if the block's largest magnitude is not finite.

    If the scale is NaN, all values of the block are decoded to NaN. A finite scale could yield wrong but finite values,
    which would pass all checks at the receiver.
    """
    scale = scale + (largest - largest)  # Adds 0 or NaN. `isfinite` and `where` would take ten operations.
    encoded[:, :_SCALE_NBYTES].copy_(scale.view(torch.uint8))


def _read_scale(encoded: Tensor) -> Tensor:
    """Return the scales in front of the blocks as a column."""
    # A float32 view needs an aligned address. A copy has one.
    return encoded[:, :_SCALE_NBYTES].clone(memory_format=torch.contiguous_format).view(torch.float32)


@dataclass(frozen=True, slots=True)
class Float32:
    """Copies each value's 4 bytes without error, including all bits of NaNs."""

    name: ClassVar[str] = "float32"
    for_states: ClassVar[bool] = True
    block: ClassVar[int] = 1

    def nbytes(self, count: int) -> int:
        """Return the encoded size of ``count`` values: 4 bytes each."""
        return 4 * count

    def encode(self, values: Tensor, out: Tensor) -> None:
        """Copy the bytes of ``values`` into ``out``."""
        values, out = checked(self, values, out)
        out.copy_(values.view(torch.uint8))

    def decode(self, encoded: Tensor, out: Tensor) -> None:
        """Copy the bytes ``encoded`` into ``out``."""
        out, encoded = checked(self, out, encoded)
        out.view(torch.uint8).copy_(encoded)


@dataclass(frozen=True, slots=True)
class BFloat16(BlockCodec):
    """Rounds each value to the nearest bfloat16 (2 bytes), with ties to even.

    The error is at most 2^-8 of the value, or 2^-134 for values below 2^-126. Finite values above the largest bfloat16,
    3.39e38, are rounded to it, because attention masks contain ``finfo(float32).min``. Infinities and NaNs are kept.
    """

    name: ClassVar[str] = "bfloat16"
    for_states: ClassVar[bool] = True
    block: ClassVar[int] = 1
    _LARGEST: ClassVar[float] = torch.finfo(torch.bfloat16).max

    def _block_nbytes(self, count: int) -> int:
        return 2 * count

    def _encode_rows(self, values: Tensor, out: Tensor) -> None:
        # 2^-126 of a clamped value's excess is added to it. A finite excess vanishes in rounding, an infinite excess
        # restores the infinity, and NaN remains NaN. `isinf` and `where` would take ten times as long.
        limited = values.clamp(-self._LARGEST, self._LARGEST)
        rounded = limited.sub_(limited - values, alpha=2.0**-126).to(torch.bfloat16)
        out.copy_(rounded.view(torch.uint8))

    def _decode_rows(self, encoded: Tensor, out: Tensor) -> None:
        out.copy_(encoded.clone().view(torch.bfloat16))  # a bfloat16 view needs an aligned address; a copy has one


@dataclass(frozen=True, slots=True)
class Float16(BlockCodec):
    """Rounds each value to the nearest float16 times its block's scale, with ties to even.

    A block has 256 values. Its scale is the power of two that brings the largest magnitude between 2^14 and 2^15, so
    that no finite value overflows. The error of a value is at most 2^-11 of the value, or 2^-39 of the block's largest
    magnitude, whichever is larger. A largest magnitude below 2^-112 counts as 2^-112. Finite values above 3.401e38, the
    largest float32 with 11 significant bits, are rounded to it. Blocks with NaNs or infinities are decoded to NaN.
    Including 4 bytes per block for the scale, a value takes 2.016 bytes.

    Source: IEEE 754 binary16, with a scale as in loss scaling (1710.03740), but chosen per block.
    """

    name: ClassVar[str] = "float16"
    block: ClassVar[int] = 256
    #: Largest biased exponent of a finite float32.
    _EXPONENT_MAX: ClassVar[int] = 254
    #: Exponent of a block's largest magnitude after scaling. The magnitude is then below 2^15; float16 ends at 65504.
    _ROOM: ClassVar[int] = 14
    #: The largest float32 with the 11 significant bits of a float16. Larger values would round to infinity.
    _LARGEST: ClassVar[float] = torch.finfo(torch.float16).max * 2.0**112

    def _block_nbytes(self, count: int) -> int:
        return _SCALE_NBYTES + 2 * count

    def _encode_rows(self, values: Tensor, out: Tensor) -> None:
        scratch = values.abs()
        largest = scratch.amax(dim=1, keepdim=True)
        exponent = (largest.view(torch.int32) >> _FRACTION_BITS).clamp(min=self._ROOM + 1)
        scale = ((exponent - self._ROOM) << _FRACTION_BITS).view(torch.float32)
        inverse = ((self._EXPONENT_MAX + self._ROOM - exponent) << _FRACTION_BITS).view(torch.float32)
        _write_scale(out, scale, largest)
        torch.clamp(values, -self._LARGEST, self._LARGEST, out=scratch).mul_(inverse)
        out[:, _SCALE_NBYTES:].copy_(scratch.to(torch.float16).view(torch.uint8))

    def _decode_rows(self, encoded: Tensor, out: Tensor) -> None:
        # A float16 view needs an aligned address. A copy has one.
        halves = encoded[:, _SCALE_NBYTES:].clone(memory_format=torch.contiguous_format).view(torch.float16)
        torch.mul(halves, _read_scale(encoded), out=out)


@dataclass(frozen=True, slots=True)
class Int8(BlockCodec):
    """Rounds each value to the nearest multiple of its block's scale, with ties to even.

    A block has 256 values. Its scale is its largest magnitude / 127, at least 2^-126. The error of a value is at most
    half of the scale, plus 2^-16 of the scale from float32 rounding. Blocks with NaNs or infinities are decoded to NaN.
    Including 4 bytes per block for the scale, a value takes 1.016 bytes. The relative L2 error of normally distributed
    values is 0.7 %.

    Source: Dettmers et al., 8-bit optimizers via block-wise quantization (2110.02861).
    """

    name: ClassVar[str] = "int8"
    block: ClassVar[int] = 256
    _LEVEL_MAX: ClassVar[int] = 127
    #: Smallest scale: the smallest normal float32. With it, blocks of zeros or of denormal values need no special case.
    _SCALE_MIN: ClassVar[float] = torch.finfo(torch.float32).tiny
    #: Largest scale: the largest float32 whose product with 127 is finite.
    _SCALE_MAX: ClassVar[float] = float.fromhex("0x1.020406p+121")

    def _block_nbytes(self, count: int) -> int:
        return _SCALE_NBYTES + count

    def _encode_rows(self, values: Tensor, out: Tensor) -> None:
        scratch = values.abs()
        largest = scratch.amax(dim=1, keepdim=True)
        # The divisor is a tensor, because CUDA would multiply by the reciprocal of a Python scalar.
        scale = largest.div(torch.full_like(largest, self._LEVEL_MAX)).clamp_(self._SCALE_MIN, self._SCALE_MAX)
        _write_scale(out, scale, largest)
        torch.div(values, scale, out=scratch).round_()
        out[:, _SCALE_NBYTES:].view(torch.int8).copy_(scratch)

    def _decode_rows(self, encoded: Tensor, out: Tensor) -> None:
        torch.mul(encoded[:, _SCALE_NBYTES:].view(torch.int8), _read_scale(encoded), out=out)


@dataclass(frozen=True, slots=True)
class Q4(BlockCodec):
    """Rounds each value to E3M0: a sign and a level L from 1 to 7 for 2^(L-7) of the block's scale, or L = 0 for zero.

    A block has 256 values. Its scale is its largest magnitude, at least 2^-120. The level is the nearest one on a
    logarithmic scale. Magnitudes above 2^-6.5 of the block's scale change by a factor of at most sqrt(2), and smaller
    magnitudes become zero. Two values share a byte, with the first in the lower 4 bits. Blocks with NaNs or infinities
    are decoded to NaN. Including 4 bytes per block for the scale, a value takes 0.516 bytes. The relative L2 error of
    normally distributed values is 20 %.

    Source: Streaming DiLoCo (2501.18512), which found no loss when differences were sent in this format.
    """

    name: ClassVar[str] = "q4"
    block: ClassVar[int] = 256
    #: Smallest scale. It keeps the lowest level a normal float32, so that blocks of zeros need no special case.
    _SCALE_MIN: ClassVar[float] = 2.0**-120

    def _block_nbytes(self, count: int) -> int:
        return _SCALE_NBYTES + (count + 1) // 2

    def _encode_rows(self, values: Tensor, out: Tensor) -> None:
        largest = values.abs().amax(dim=1, keepdim=True)
        scale = largest.clamp(min=self._SCALE_MIN)
        _write_scale(out, scale, largest)
        # The exponent of sqrt(2) times a ratio is the ratio's binary logarithm, rounded to the nearest integer.
        exponents = values.div(scale).mul_(2.0**0.5).view(torch.int32).bitwise_right_shift_(_FRACTION_BITS)
        count = values.shape[1]
        codes = torch.zeros(len(values), count + count % 2, dtype=torch.uint8, device=values.device)
        signs = torch.empty(values.shape, dtype=torch.uint8, device=values.device)
        signs.copy_(exponents >> 8).bitwise_and_(8)
        # copy_ keeps the low 8 bits.
        codes[:, :count].copy_(exponents).clamp_(min=_Q4_BIAS).sub_(_Q4_BIAS).bitwise_or_(signs)
        pairs = codes.view(torch.int16)  # the first value is in the lower byte
        out[:, _SCALE_NBYTES:].copy_(pairs | (pairs >> 4))

    def _decode_rows(self, encoded: Tensor, out: Tensor) -> None:
        pairs = _CPU_Q4_PAIRS if encoded.is_cpu else _q4_pairs(encoded.device)
        places = encoded[:, _SCALE_NBYTES:].int()
        ratios = pairs.index_select(0, places.view(-1)).view(torch.float32).view(len(encoded), -1)
        torch.mul(ratios[:, : out.shape[1]], _read_scale(encoded), out=out)


def _q4_pairs(device: torch.device) -> Tensor:
    """Return, for each of the 256 possible bytes, the ratios of its two values to the scale, as one complex number."""
    place = torch.arange(256, dtype=torch.int32, device=device)
    codes = torch.stack((place & 15, place >> 4), dim=1)
    levels, signs = codes & 7, (codes & 8) << 28
    ratios = torch.where(levels > 0, ((levels + _Q4_BIAS) << _FRACTION_BITS) | signs, 0)
    return ratios.view(torch.complex64).view(-1)


_CPU_Q4_PAIRS: Final = _q4_pairs(torch.device("cpu"))
