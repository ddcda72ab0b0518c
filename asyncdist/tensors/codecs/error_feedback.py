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

    def encode(self, codec: Codec, difference: Tensor, out: Tensor) -> None:
        """Encode the sum of the residual and a difference into ``out``, and update the residual.

        Args:
            codec: Codec to use, which may differ between calls.
            difference: Contiguous 1-D tensor of ``count`` float32 on the device of the residual, not changed.
            out: Contiguous 1-D tensor of ``codec.nbytes(count)`` uint8 on the same device.

        Raises:
            ValueError: A tensor has another dtype, shape, stride or device. The residual is unchanged.
        """
        count, residual = len(self.residual), self.residual
        if difference.shape != residual.shape:
            validation.refuse("difference", f"shape {tuple(difference.shape)}", f"of shape {tuple(residual.shape)}")
        if difference.device != residual.device:
            validation.refuse("difference", f"a tensor on {difference.device}", f"on {residual.device}")
        difference, out = checked(codec, difference, out)
        step = piece_count(codec.block, residual.device)
        decoded = residual.new_empty(min(step, count))
        for start in range(0, count, step):
            stop = min(count, start + step)
            its_bytes, error = out[codec.nbytes(start) : codec.nbytes(stop)], residual[start:stop]
            error += difference[start:stop]
            codec.encode(error, its_bytes)
            codec.decode(its_bytes, decoded[: stop - start])
            error -= decoded[: stop - start]
            if self.decay != 1.0:
                error *= self.decay
