"""Copies values between a model's tensors and flat vectors, and measures and encodes them.

An :class:`Encoder` encodes a rank's contributions: a fragment's values, or their differences from reference weights (an
anchor). If all parameters of a vector with a codec are on one CUDA device, their values are computed and encoded there,
piece by piece, and the host receives encoded bytes. With error feedback, the encoding errors are copied in both
directions. The pieces limit the additional memory on the device.
"""

from __future__ import annotations

import functools
import math
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Final, TypeAlias

import torch
from torch import Tensor

from asyncdist.protocols.exchange.layout.wire_layout import Scratch, Vector, WireLayout
from asyncdist.tensors.byte_views import byte_view, flat_bytes
from asyncdist.tensors.codecs import Codec, ErrorFeedback, piece_count
from asyncdist.tensors.flat_state import is_finite

#: Device types on which contributions are encoded. On other types, codecs are not known to give the same bytes.
_DEVICE_TYPES: Final = ("cuda",)
_NORM_MAX: Final = 2.0**400  # replaces larger norms, so that sums of their squares are finite
_PIECE_COUNT: Final = 1 << 16  # number of elements whose norm is computed at a time if their squares overflow


def norm_of(flat: Tensor) -> float:
    """Return the L2 norm of a flat tensor. It is finite if and only if all values are finite.

    In float32, the squares of values above 1.8e19 overflow, for example in a mask that contains ``finfo.min``.
    """
    norm = float(torch.linalg.vector_norm(flat).item())
    if math.isinf(norm):
        if not is_finite(flat):
            return norm
        largest = torch.linalg.vector_norm(flat, ord=math.inf)
        scaled = (torch.linalg.vector_norm(piece / largest).item() for piece in torch.split(flat, _PIECE_COUNT))
        norm = math.hypot(*scaled) * float(largest.item())
    return min(norm, _NORM_MAX)


def gather(vector: Vector, tensors: Sequence[Tensor], flat: Tensor) -> None:
    """Copy the model's tensors into a flat tensor. bfloat16 values become float32."""
    for index, first, end in vector.places:
        flat[first:end].copy_(values_of(vector, tensors[index]))


def subtract(vector: Vector, anchor: Tensor, tensors: Sequence[Tensor], flat: Tensor) -> None:
    """Write the differences between an anchor and the model's tensors into a flat tensor.

    The model trains from the anchor rounded to the tensors' dtypes, so the differences are measured from the rounded
    anchor. Otherwise they would contain the rounding errors, and each round would move the anchor to the nearest value
    of the dtype.
    """
    for index, first, end in vector.places:
        own = values_of(vector, tensors[index])
        torch.sub(rounded(anchor[first:end], own.dtype), own.to(flat), out=flat[first:end])


def rounded(values: Tensor, dtype: torch.dtype) -> Tensor:
    """Return values rounded to the dtype of a model's tensor, in their own dtype. Equal dtypes need no copy."""
    return values.to(dtype).to(values.dtype)


def as_written(vector: Vector, flat: Tensor, tensors: Sequence[Tensor]) -> Tensor:
    """Return the values that the model's tensors have after :func:`scatter`, in the dtype of ``flat``.

    If no tensor of the vector has a narrower dtype, this is ``flat`` itself.
    """
    dtypes = [tensors[index].dtype.to_real() for index, *_ in vector.places]
    if all(dtype == flat.dtype for dtype in dtypes):
        return flat
    found = flat.clone()
    for (_, first, end), dtype in zip(vector.places, dtypes, strict=True):
        found[first:end] = rounded(found[first:end], dtype)
    return found


def scatter(vector: Vector, flat: Tensor, tensors: Sequence[Tensor]) -> None:
    """Copy a flat tensor into the model's tensors, rounding each value once to the tensor's dtype."""
    for index, first, end in vector.places:
        write(vector, flat[first:end], tensors[index])


def write(vector: Vector, values: Tensor, tensor: Tensor) -> None:
    """Copy an entry's part of a flat tensor into the model's tensor."""
    if vector.role == "copied":
        values = values.view(tensor.dtype)
    elif tensor.is_complex():
        values = torch.complex(values[0::2], values[1::2])  # view_as_complex would need an even offset
    tensor.copy_(values.view(tensor.shape))


def values_of(vector: Vector, tensor: Tensor) -> Tensor:
    """Return the values of a model's tensor as a 1-D tensor of the same dtype.

    Copied entries are returned as bytes.
    """
    if vector.role == "copied":
        return flat_bytes(tensor.detach().cpu().contiguous())
    if tensor.is_complex():
        return torch.view_as_real(tensor.detach().resolve_conj()).reshape(-1)
    return tensor.detach().reshape(-1)


def checksum_of(vectors: Iterable[Vector], tensors: Sequence[Tensor]) -> int:
    """Return a checksum of the values of some vectors of a model. It does not depend on the tensors' device."""
    checksum = 0
    for vector in vectors:
        flat = vector.new_flat()
        gather(vector, tensors, flat)
        checksum = zlib.crc32(byte_view(flat), checksum)
    return checksum


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
        """Return a function that computes each piece's first index and values. On the host, there is only one piece."""
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
