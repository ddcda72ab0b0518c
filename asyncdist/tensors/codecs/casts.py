"""Codecs that convert each value separately: float32, which is a copy, and bfloat16."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Final

import torch
from torch import Tensor

from asyncdist.tensors.codecs.codec import checked, piece_count

_LARGEST: Final = torch.finfo(torch.bfloat16).max


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
class BFloat16:
    """Rounds each value to the nearest bfloat16 (2 bytes), with ties to even.

    The error is at most 2^-8 of the value, or 2^-134 for values below 2^-126. Finite values above the largest bfloat16,
    3.39e38, are rounded to it, because attention masks contain ``finfo(float32).min``. Infinities and NaNs are kept.
    """

    name: ClassVar[str] = "bfloat16"
    for_states: ClassVar[bool] = True
    block: ClassVar[int] = 1

    def nbytes(self, count: int) -> int:
        """Return the encoded size of ``count`` values: 2 bytes each."""
        return 2 * count

    def encode(self, values: Tensor, out: Tensor) -> None:
        """Write ``values``, rounded to bfloat16, into ``out``."""
        values, out = checked(self, values, out)
        for piece in torch.split(values, piece_count(1, values.device)):
            # 2^-126 of a clamped value's excess is added to it. A finite excess vanishes by rounding, an infinite one
            # restores the infinity, and NaN remains. `isinf` and `where` would take ten times as long.
            limited = piece.clamp(-_LARGEST, _LARGEST)
            rounded = limited.sub_(limited - piece, alpha=2.0**-126).to(torch.bfloat16)
            out[: 2 * len(piece)].copy_(rounded.view(torch.uint8))
            out = out[2 * len(piece) :]

    def decode(self, encoded: Tensor, out: Tensor) -> None:
        """Write the values of ``encoded``, converted to float32, into ``out``."""
        out, encoded = checked(self, out, encoded)
        for piece in torch.split(out, piece_count(1, out.device)):
            # A bfloat16 view needs an aligned address, which a copy has.
            piece.copy_(encoded[: 2 * len(piece)].clone().view(torch.bfloat16))
            encoded = encoded[2 * len(piece) :]
