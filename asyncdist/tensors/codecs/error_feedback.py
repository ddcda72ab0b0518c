"""Adds the encoding error of each difference to the next difference, so that no part of a difference is lost."""

from __future__ import annotations

import torch
from torch import Tensor

from asyncdist import validation
from asyncdist.tensors.codecs.codec import Codec, checked, piece_count


class ErrorFeedback:
    """Encodes the successive differences of one vector, and keeps the residual: the part that encoding has lost.

    This is EF14 (Seide et al. 2014; Karimireddy et al., 1901.09847). For the residual e and the difference D,
    :meth:`encode` encodes e + D, and sets e to ``decay`` * (e + D - decoded). With ``decay`` 1, the decoded
    differences and the residual add up to the sum of all differences, within rounding. MuLoCo and SparseLoCo
    (2508.15706) use a ``decay`` of 0.9 to 0.95.

    An encoded difference is assumed to be received. To undo this after a failed send, copy back a clone of ``residual``
    from before :meth:`encode`. Do the same if a difference contained a NaN or an infinity, because it makes the
    residual of its block NaN.

    Args:
        count: Number of values of the vector.
        decay: Factor of the residual, from 0 to 1.

    Attributes:
        residual: 1-D tensor of ``count`` float32 on ``device``, initially zero.
    """

    def __init__(self, count: int, *, decay: float = 1.0, device: torch.device | str = "cpu") -> None:
        self.decay = validation.fraction("decay", decay)
        self.residual = torch.zeros(validation.count("count", count, least=0), dtype=torch.float32, device=device)

    def encode(self, codec: Codec, difference: Tensor, out: Tensor, start: int = 0) -> None:
        """Encode the sum of the residual and a difference into ``out``, and update the residual.

        Args:
            codec: Codec to use, which may differ between calls.
            difference: Contiguous 1-D tensor of float32, not changed: the whole vector, or a part of it. If it is on
                another device than the residual, it is encoded there, and the residual is copied piece by piece.
            out: Contiguous 1-D tensor of ``codec.nbytes(len(difference))`` uint8 on the device of ``difference``.
            start: Index of the part's first value, the first of a codec block.

        Raises:
            ValueError: A tensor has another dtype, shape, stride or device. The residual is unchanged.
        """
        count = len(self.residual)
        if difference.ndim != 1 or not 0 <= start <= count - len(difference):
            allowed = f"1-D and within {count} values from index {start}"
            validation.refuse("difference", f"shape {tuple(difference.shape)}", allowed)
        difference, out = checked(codec, difference, out)
        residual = self.residual[start : start + len(difference)]
        step = piece_count(codec.block, difference.device)
        decoded = difference.new_empty(min(step, len(difference)))
        for first in range(0, len(difference), step):
            end = min(len(difference), first + step)
            its_bytes, kept = out[codec.nbytes(first) : codec.nbytes(end)], residual[first:end]
            error = kept.to(difference.device)  # the residual's own memory, if it is on this device
            error += difference[first:end]
            codec.encode(error, its_bytes)
            codec.decode(its_bytes, decoded[: end - first])
            error -= decoded[: end - first]
            if self.decay != 1.0:
                error *= self.decay
            if error is not kept:
                kept.copy_(error)
