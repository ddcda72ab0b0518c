"""Encodes a rank's contributions: a fragment's values, or their differences from reference weights (an anchor).

If all parameters of a vector with a codec are on one CUDA device, their values are computed and encoded there, piece by
piece, and the host receives encoded bytes. With error feedback, the encoding errors are copied in both directions. The
pieces limit the additional memory on the device.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Final, TypeAlias

import torch
from torch import Tensor

from asyncdist.protocols.exchange.layout.copies import gather, norm_of, rounded, subtract, values_of
from asyncdist.protocols.exchange.layout.wire_layout import Scratch, Vector, WireLayout
from asyncdist.tensors.codecs import Codec, ErrorFeedback, piece_count

#: Types of devices on which contributions are encoded. On others, codecs are not known to give the same bytes.
_DEVICE_TYPES: Final = ("cuda",)


#: Function that computes the first index and the values of each piece of a vector.
_Pieces: TypeAlias = Callable[[], Iterable[tuple[int, Tensor]]]


class Encoder:
    """Encodes the contributions of one fragment, and keeps their encoding errors.

    Args:
        decay: Decay of the error feedback; None for no error feedback.
        scratch: Memory for values before they are encoded.
    """

    def __init__(self, layout: WireLayout, decay: float | None = None, scratch: Scratch | None = None) -> None:
        self._layout = layout
        self._scratch = Scratch() if scratch is None else scratch
        self._feedback: dict[int, ErrorFeedback] = {}  # by index of the vector
        if decay is not None:
            self._feedback = {
                place: ErrorFeedback(vector.count, decay=decay)
                for place, vector in enumerate(layout.vectors)
                if vector.codec is not None
            }

    @property
    def residuals(self) -> list[Tensor]:
        """Encoding errors, one flat tensor in host memory for each vector with a codec. Empty without feedback."""
        return [each.residual for each in self._feedback.values()]

    @torch.no_grad()
    def encode(self, tensors: Sequence[Tensor], encoded: Sequence[Tensor], anchors: Sequence[Tensor] = ()) -> float:
        """Write a contribution into ``encoded``, one tensor for each vector, and return its L2 norm.

        If the norm is not finite, the contribution must not be used. The encoding errors are then unchanged.

        Args:
            tensors: The model's tensors.
            anchors: Reference weights for each vector of parameters, from which the differences are measured. Empty to
                encode the parameters themselves.
        """
        norm, given = 0.0, iter(anchors)
        with_feedback: list[tuple[ErrorFeedback, Codec, _Pieces, Tensor]] = []
        for place, (vector, into) in enumerate(zip(self._layout.vectors, encoded, strict=True)):
            anchor = next(given, None) if vector.role == "stepped" else None
            pieces = self._pieces(vector, tensors, anchor, into)
            for start, values in pieces():
                if vector.role == "stepped":
                    norm = math.hypot(norm, norm_of(values))
                if vector.codec is not None and place not in self._feedback:
                    _encode(vector.codec, start, values, into)
            if vector.codec is not None and place in self._feedback:
                with_feedback.append((self._feedback[place], vector.codec, pieces, into))
        if math.isfinite(norm):
            for feedback, codec, pieces, into in with_feedback:
                for start, values in pieces():
                    _encode(codec, start, values, into, feedback)
        return norm

    def _pieces(self, vector: Vector, tensors: Sequence[Tensor], anchor: Tensor | None, into: Tensor) -> _Pieces:
        """Return a function of the first index and the values of each piece. On the host, all values are one piece."""
        device = _common_device(vector, tensors)
        if vector.codec is not None and device is not None and device.type in _DEVICE_TYPES:
            return functools.partial(_device_pieces, vector, vector.codec, tensors, anchor, device)
        flat = vector.values_of(into, self._scratch)
        if anchor is None:
            gather(vector, tensors, flat)
        else:
            subtract(vector, anchor, tensors, flat)
        return lambda: [(0, flat)]


def _device_pieces(
    vector: Vector, codec: Codec, tensors: Sequence[Tensor], anchor: Tensor | None, device: torch.device
) -> Iterator[tuple[int, Tensor]]:
    """Compute the values of a vector on the device of the model's tensors, piece by piece."""
    step = piece_count(codec.block, device)
    for start in range(0, vector.count, step):
        stop = min(start + step, vector.count)
        flat = torch.zeros(stop - start, dtype=vector.dtype, device=device)  # gaps between entries stay 0
        if anchor is not None:
            flat.copy_(anchor[start:stop])
        for index, first, end in vector.places:
            low, high = max(first, start), min(end, stop)
            if low < high:
                own = values_of(vector, tensors[index])[low - first : high - first]
                into = flat[low - start : high - start]
                if anchor is None:
                    into.copy_(own)
                else:
                    torch.sub(rounded(into, own.dtype), own.to(flat.dtype), out=into)
        yield start, flat


def _encode(codec: Codec, start: int, values: Tensor, encoded: Tensor, feedback: ErrorFeedback | None = None) -> None:
    """Encode the values from index ``start`` of a vector into their part of the encoded vector."""
    into = encoded[codec.nbytes(start) : codec.nbytes(start + len(values))]
    out = into if values.is_cpu else torch.empty(len(into), dtype=into.dtype, device=values.device)
    if feedback is None:
        codec.encode(values, out)
    else:
        feedback.encode(codec, values, out, start)
    if out is not into:
        into.copy_(out)


def _common_device(vector: Vector, tensors: Sequence[Tensor]) -> torch.device | None:
    """Return the device of all tensors of a vector, or None if they are on several devices."""
    devices = {tensors[index].device for index, *_ in vector.places}
    return devices.pop() if len(devices) == 1 else None
