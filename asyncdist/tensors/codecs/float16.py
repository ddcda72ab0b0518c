"""Defines the codec that rounds values to half precision, with a power of two as the scale of each block."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Final

import torch
from torch import Tensor

from asyncdist.tensors.codecs.blocks import SCALE_NBYTES, BlockCodec, read_scale, write_scale

#: Number of fraction bits of a float32, which are below its exponent bits.
_FRACTION_BITS: Final = 23
#: Largest biased exponent of a finite float32.
_EXPONENT_MAX: Final = 254
#: Exponent of a block's largest magnitude after scaling. The magnitude is then below 2^15, and float16 ends at 65504.
_ROOM: Final = 14
#: The largest float32 with the 11 significant bits of a float16. Larger values would round to infinity.
_LARGEST: Final = torch.finfo(torch.float16).max * 2.0**112


@dataclass(frozen=True, slots=True)
class Float16(BlockCodec):
    """Rounds each value to the nearest float16 times its block's scale, with ties to even.

    A block has 256 values. Its scale is the power of two that brings the largest magnitude between 2^14 and 2^15, so
    that no finite value overflows. The error of a value is at most 2^-11 of the value, or 2^-39 of the block's largest
    magnitude, whichever is larger. A largest magnitude below 2^-112 counts as 2^-112. Finite values above 3.401e38, the
    largest float32 with 11 significant bits, are rounded to it. Blocks with NaNs or infinities are decoded to NaN.
    Including 4 bytes per block for the scale, a value takes 2.016 bytes.

    Source: IEEE 754 binary16, with the scale of loss scaling (1710.03740) chosen per block.
    """

    name: ClassVar[str] = "float16"
    block: ClassVar[int] = 256

    def _block_nbytes(self, count: int) -> int:
        return SCALE_NBYTES + 2 * count

    def _encode_rows(self, values: Tensor, out: Tensor) -> None:
        scratch = values.abs()
        largest = scratch.amax(dim=1, keepdim=True)
        exponent = (largest.view(torch.int32) >> _FRACTION_BITS).clamp(min=_ROOM + 1)
        scale = ((exponent - _ROOM) << _FRACTION_BITS).view(torch.float32)
        inverse = ((_EXPONENT_MAX + _ROOM - exponent) << _FRACTION_BITS).view(torch.float32)
        write_scale(out, scale, largest)
        torch.clamp(values, -_LARGEST, _LARGEST, out=scratch).mul_(inverse)
        out[:, SCALE_NBYTES:].copy_(scratch.to(torch.float16).view(torch.uint8))

    def _decode_rows(self, encoded: Tensor, out: Tensor) -> None:
        # A float16 view needs an aligned address, which a copy has.
        halves = encoded[:, SCALE_NBYTES:].clone(memory_format=torch.contiguous_format).view(torch.float16)
        torch.mul(halves, read_scale(encoded), out=out)
