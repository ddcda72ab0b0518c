"""Base class and functions of the codecs that encode blocks of values with a scale in front of each block.

A block with a NaN or an infinity has the scale NaN, so that all of its values are decoded to NaN. Otherwise, they could
be decoded to wrong but finite values, which would pass every check of the receiver.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from itertools import pairwise
from typing import ClassVar, Final

import torch
from torch import Tensor

from asyncdist.tensors.codecs.codec import checked, piece_count

#: Size in bytes of a scale, a float32 in front of its block.
SCALE_NBYTES: Final = 4


class BlockCodec(ABC):
    """Base class that divides vectors into blocks. Subclasses encode matrices with one block per row."""

    __slots__ = ()
    name: ClassVar[str]
    for_states: ClassVar[bool] = False

    @property
    @abstractmethod
    def block(self) -> int:
        """Number of values per block. The last block of a vector may be shorter."""

    @abstractmethod
    def _block_nbytes(self, count: int) -> int:
        """Return the encoded size in bytes of a block of ``count`` >= 1 values."""

    @abstractmethod
    def _encode_rows(self, values: Tensor, out: Tensor) -> None:
        """Encode each row of a contiguous float32 matrix into the corresponding row of a uint8 matrix."""

    @abstractmethod
    def _decode_rows(self, encoded: Tensor, out: Tensor) -> None:
        """Decode each row of a uint8 matrix into the corresponding row of a contiguous float32 matrix."""

    def nbytes(self, count: int) -> int:
        """Return the encoded size in bytes of a vector of ``count`` values."""
        blocks, rest = divmod(count, self.block)
        return (blocks * self._block_nbytes(self.block) if blocks else 0) + (self._block_nbytes(rest) if rest else 0)

    def encode(self, values: Tensor, out: Tensor) -> None:
        """Encode ``values`` into ``out``, block by block."""
        for rows, encoded_rows in self._matrices(*checked(self, values, out)):
            self._encode_rows(rows, encoded_rows)

    def decode(self, encoded: Tensor, out: Tensor) -> None:
        """Decode ``encoded`` into ``out``, block by block."""
        for rows, encoded_rows in self._matrices(*checked(self, out, encoded)):
            self._decode_rows(encoded_rows, rows)

    def _matrices(self, values: Tensor, encoded: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield views of values and their bytes: matrices with one block per row, then the shorter last block."""
        block, count = self.block, len(values)
        whole = count - count % block
        edges = sorted({*range(0, whole, piece_count(block, values.device)), whole, count})
        for start, stop in pairwise(edges):
            width = min(block, stop - start)
            its_bytes = encoded[self.nbytes(start) : self.nbytes(stop)]
            yield values[start:stop].view(-1, width), its_bytes.view(-1, self._block_nbytes(width))


def write_scale(encoded: Tensor, scale: Tensor, largest: Tensor) -> None:
    """Write each block's scale in front of the block, or NaN if the block's largest magnitude is not finite."""
    scale = scale + (largest - largest)  # Adds 0 or NaN. `isfinite` and `where` would take ten operations.
    encoded[:, :SCALE_NBYTES].copy_(scale.view(torch.uint8))


def read_scale(encoded: Tensor) -> Tensor:
    """Return the scales in front of the blocks as a column."""
    # A float32 view needs an aligned address, which a copy has.
    return encoded[:, :SCALE_NBYTES].clone(memory_format=torch.contiguous_format).view(torch.float32)
