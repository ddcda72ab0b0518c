"""Codecs that convert each value on its own: float32, which is a copy, and bfloat16."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Final

import torch
from torch import Tensor

from asyncdist.tensors.codecs.codec import checked, piece_count

_LARGEST: Final = torch.finfo(torch.bfloat16).max


@dataclass(frozen=True, slots=True)
class Float32:
    """Copies the values: 4 bytes each, no error, and all bits of NaNs are kept."""

    name: ClassVar[str] = "float32"
    for_states: ClassVar[bool] = True
    block: ClassVar[int] = 1

    def nbytes(self, count: int) -> int:
        """Return 4 bytes per value."""
        return 4 * count

    def encode(self, values: Tensor, out: Tensor) -> None:
        """Copy the values."""
        values, out = checked(self, values, out)
        out.copy_(values.view(torch.uint8))

    def decode(self, encoded: Tensor, out: Tensor) -> None:
        """Copy the values."""
        out, encoded = checked(self, out, encoded)
        out.view(torch.uint8).copy_(encoded)


@dataclass(frozen=True, slots=True)
class BFloat16:
    """Rounds each value to the nearest bfloat16, and halfway cases to even: 2 bytes per value.

    The error is at most 2^-8 of the value, or 2^-134 below 2^-126. Finite values above the largest bfloat16, 3.39e38,
    are rounded to it, since attention masks contain ``finfo(float32).min``. Infinities and NaNs are kept.
    """

    name: ClassVar[str] = "bfloat16"
    for_states: ClassVar[bool] = True
    block: ClassVar[int] = 1

    def nbytes(self, count: int) -> int:
        """Return 2 bytes per value."""
        return 2 * count

    def encode(self, values: Tensor, out: Tensor) -> None:
        """Round the values."""
        values, out = checked(self, values, out)
        for piece in torch.split(values, piece_count(1, values.device)):
            # The excess over the range is mostly 0. If it is finite, 2^-126 of it vanishes by rounding. If not, the
            # result is infinite or NaN, as the value is. `isinf` and `where` would take ten times as long.
            limited = piece.clamp(-_LARGEST, _LARGEST)
            rounded = limited.sub_(limited - piece, alpha=2.0**-126).to(torch.bfloat16)
            out[: 2 * len(piece)].copy_(rounded.view(torch.uint8))
            out = out[2 * len(piece) :]

    def decode(self, encoded: Tensor, out: Tensor) -> None:
        """Widen the values."""
        out, encoded = checked(self, out, encoded)
        for piece in torch.split(out, piece_count(1, out.device)):
            # A copy begins at an aligned address, as a view with another dtype must.
            piece.copy_(encoded[: 2 * len(piece)].clone().view(torch.bfloat16))
            encoded = encoded[2 * len(piece) :]
