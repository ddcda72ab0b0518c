"""Defines the codec that rounds values to 4 bits: a sign and one of 7 powers of two, or zero."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Final

import torch
from torch import Tensor

from asyncdist.tensors.codecs.blocks import SCALE_NBYTES, BlockCodec, read_scale, write_scale

_LEVEL_MAX: Final = 7
#: Adding this number to a level gives the biased exponent of the level's float32.
_BIAS: Final = 127 - _LEVEL_MAX
_FRACTION_BITS: Final = 23
#: Smallest scale. It keeps the lowest level a normal float32, so that blocks of zeros need no special case.
_SCALE_MIN: Final = 2.0**-120


@dataclass(frozen=True, slots=True)
class Q4(BlockCodec):
    """Rounds each value to E3M0: a sign and a level L from 1 to 7 for 2^(L-7) of the block's scale, or L = 0 for zero.

    A block has 256 values. Its scale is its largest magnitude, at least 2^-120. The level is the nearest on a
    logarithmic scale. Magnitudes above 2^-6.5 of the block's scale change by a factor of at most sqrt(2), and smaller
    magnitudes become zero. Two values share a byte, with the first in the lower 4 bits. Blocks with NaNs or infinities
    are decoded to NaN. Including 4 bytes per block for the scale, a value takes 0.516 bytes. The relative L2 error of
    normally distributed values is 20 %.

    Source: Streaming DiLoCo (2501.18512), which found no loss when differences were sent in this format.
    """

    name: ClassVar[str] = "q4"
    block: ClassVar[int] = 256

    def _block_nbytes(self, count: int) -> int:
        return SCALE_NBYTES + (count + 1) // 2

    def _encode_rows(self, values: Tensor, out: Tensor) -> None:
        largest = values.abs().amax(dim=1, keepdim=True)
        scale = largest.clamp(min=_SCALE_MIN)
        write_scale(out, scale, largest)
        # The exponent of sqrt(2) times a ratio is the ratio's binary logarithm, rounded to the nearest integer.
        exponents = values.div(scale).mul_(2.0**0.5).view(torch.int32).bitwise_right_shift_(_FRACTION_BITS)
        count = values.shape[1]
        codes = torch.zeros(len(values), count + count % 2, dtype=torch.uint8, device=values.device)
        signs = torch.empty(values.shape, dtype=torch.uint8, device=values.device)
        signs.copy_(exponents >> 8).bitwise_and_(8)
        codes[:, :count].copy_(exponents).clamp_(min=_BIAS).sub_(_BIAS).bitwise_or_(signs)  # copy_ keeps the low 8 bits
        pairs = codes.view(torch.int16)  # the first value is in the lower byte
        out[:, SCALE_NBYTES:].copy_(pairs | (pairs >> 4))

    def _decode_rows(self, encoded: Tensor, out: Tensor) -> None:
        pairs = _CPU_PAIRS if encoded.is_cpu else _pairs(encoded.device)
        places = encoded[:, SCALE_NBYTES:].int()
        ratios = pairs.index_select(0, places.view(-1)).view(torch.float32).view(len(encoded), -1)
        torch.mul(ratios[:, : out.shape[1]], read_scale(encoded), out=out)


def _pairs(device: torch.device) -> Tensor:
    """Return, for each of the 256 bytes, the ratios of its two values as one complex number."""
    place = torch.arange(256, dtype=torch.int32, device=device)
    codes = torch.stack((place & 15, place >> 4), dim=1)
    levels, signs = codes & 7, (codes & 8) << 28
    ratios = torch.where(levels > 0, ((levels + _BIAS) << _FRACTION_BITS) | signs, 0)
    return ratios.view(torch.complex64).view(-1)


_CPU_PAIRS: Final = _pairs(torch.device("cpu"))
