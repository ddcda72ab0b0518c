"""The codec that rounds values to half precision, with a power of two as the scale of each block."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Final

import torch
from torch import Tensor

from asyncdist.tensors.codecs.blocks import SCALE_NBYTES, BlockCodec, read_scale, write_scale

#: Biased exponents of float32: the number of fraction bits before them, and their largest value for a finite number.
_FRACTION_BITS: Final = 23
_EXPONENT_MAX: Final = 254
#: The scale brings a block's largest magnitude to at least 2^14, and below 2^15: float16 ends at 65504.
_ROOM: Final = 14


@dataclass(frozen=True, slots=True)
class Float16(BlockCodec):
    """Rounds each value to the nearest float16 times its block's scale, and halfway cases to even.

    A block has 256 values. Its scale is the power of two that brings the largest magnitude between 2^14 and 2^15, so
    that no finite value overflows. The error of a value is at most 2^-11 of the value, or 2^-39 of the block's largest
    magnitude if that is more. A largest magnitude below 2^-112 counts as 2^-112. A block needs 4 bytes and 2 per value:
    2.016 bytes per value. Blocks with NaNs or infinities are decoded to NaN. Source: IEEE 754 binary16; the scale is
    that of loss scaling (1710.03740), chosen per block.
    """

    name: ClassVar[str] = "float16"
    block: ClassVar[int] = 256

    def _block_nbytes(self, count: int) -> int:
        return SCALE_NBYTES + 2 * count

    def _encode_rows(self, values: Tensor, out: Tensor) -> None:
        scratch = values.abs()
        largest = scratch.amax(dim=1, keepdim=True)
        exponent = (largest.view(torch.int32) >> _FRACTION_BITS).clamp(_ROOM + 1, _EXPONENT_MAX)
        scale = ((exponent - _ROOM) << _FRACTION_BITS).view(torch.float32)
        inverse = ((_EXPONENT_MAX + _ROOM - exponent) << _FRACTION_BITS).view(torch.float32)
        write_scale(out, scale, largest)
        torch.mul(values, inverse, out=scratch)
        out[:, SCALE_NBYTES:].copy_(scratch.to(torch.float16).view(torch.uint8))

    def _decode_rows(self, encoded: Tensor, out: Tensor) -> None:
        # A copy begins at an aligned address, as a view with another dtype must.
        halves = encoded[:, SCALE_NBYTES:].clone(memory_format=torch.contiguous_format).view(torch.float16)
        torch.mul(halves, read_scale(encoded), out=out)
