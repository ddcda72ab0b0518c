"""Defines the codec that keeps each block's values of largest magnitude, and drops the other values."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar, Final

import torch
from torch import Tensor

from asyncdist import validation
from asyncdist.tensors.codecs.codec import BlockCodec

#: Maximum number of values per block, because the index of a value in its block is sent as 16 bits.
_BLOCK_MAX: Final = 1 << 16
_VALUE_NBYTES: Final = 4
_PLACE_NBYTES: Final = 2


@dataclass(frozen=True, slots=True)
class TopK(BlockCodec):
    """Keeps each block's values of largest magnitude. The other values are decoded to zero.

    Among equal magnitudes, the first are kept. For a vector x and the decoded vector C(x), |x - C(x)|^2 <= (1 -
    ``share``) |x|^2. A kept value takes 4 bytes as a float32, plus 2 bytes for its index in the block. As a bfloat16,
    it would take 4 bytes in total, but the bound would not hold. NaNs and infinities count as larger than all numbers,
    so a block that contains any of them also contains some after decoding.

    Use this codec with :class:`~asyncdist.tensors.codecs.ErrorFeedback`, which sends the dropped values later. Source:
    SparseLoCo (2508.15706), which keeps 1 to 3 % of blocks of 4096 values.

    Args:
        share: Fraction of the values to keep, above 0 and at most 1. For each block, the number of values is rounded
            up.
        block: Number of values per block, from 1 to 65536.
    """

    share: float = 0.03
    block: int = 4096
    name: ClassVar[str] = "topk"

    def __post_init__(self) -> None:
        allowed = "a number above 0 and at most 1"
        share = validation.real("share", self.share, allowed, low=validation.SMALLEST, high=1.0)
        block = validation.count("block", self.block)
        if block > _BLOCK_MAX:
            validation.refuse("block", block, f"an integer from 1 to {_BLOCK_MAX}")
        # Ranks compare their options as text, so 1 and 1.0 must have the same representation.
        object.__setattr__(self, "share", share)
        object.__setattr__(self, "block", block)

    def _kept_count(self, count: int) -> int:
        return math.ceil(self.share * count)

    def _block_nbytes(self, count: int) -> int:
        return self._kept_count(count) * (_VALUE_NBYTES + _PLACE_NBYTES)

    def _encode_rows(self, values: Tensor, out: Tensor) -> None:
        count = values.shape[1]
        kept, reversed_places = self._kept_count(count), _BLOCK_MAX - 1 - torch.arange(count, device=values.device)
        # Magnitudes and their bit patterns have the same order. The index in the lower bits makes all keys different.
        keys = values.abs().view(torch.int32).long().bitwise_left_shift_(16).bitwise_or_(reversed_places)
        found = keys.topk(kept, dim=1, sorted=False).values
        places = (_BLOCK_MAX - 1 - (found & (_BLOCK_MAX - 1))).sort(dim=1).values
        edge = _VALUE_NBYTES * kept
        out[:, :edge].copy_(values.gather(1, places).view(torch.uint8))
        out[:, edge:].copy_(places.to(torch.int16).view(torch.uint8))  # the conversion keeps the lower 16 bits

    def _decode_rows(self, encoded: Tensor, out: Tensor) -> None:
        edge = _VALUE_NBYTES * self._kept_count(out.shape[1])
        # Views with a wider dtype need aligned addresses. Copies have them.
        values = encoded[:, :edge].clone(memory_format=torch.contiguous_format).view(torch.float32)
        places = encoded[:, edge:].clone(memory_format=torch.contiguous_format).view(torch.int16).long()
        # Corrupted bytes may decode to wrong values. On CUDA, however, an index outside the row would end the process.
        places = places.bitwise_and_(_BLOCK_MAX - 1).clamp_(max=out.shape[1] - 1)
        out.zero_().scatter_(1, places, values)


@dataclass(frozen=True, slots=True)
class UnionOfTopK(TopK):
    """Encodes, without error, a sum or mean of vectors that were decoded by :class:`TopK`.

    A block of the sum has at most ``contribution_count`` times as many nonzero values as a block of one vector. All of
    them are kept. :class:`TopK` would drop most of them.

    Args:
        contribution_count: Maximum number of added vectors.
    """

    contribution_count: int = 1

    def _kept_count(self, count: int) -> int:
        return min(count, self.contribution_count * TopK._kept_count(self, count))
