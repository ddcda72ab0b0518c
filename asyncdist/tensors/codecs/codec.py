"""Defines the interface of codecs, the base class of codecs that encode blocks, and error feedback."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from itertools import pairwise
from typing import ClassVar, Final, Protocol, runtime_checkable

import torch
from torch import Tensor

from asyncdist import validation

#: Number of values processed at a time on the CPU. They take 256 KiB, and stay in a core's private cache through all
#: passes.
_PIECE_COUNT: Final = 1 << 16
#: Number of values processed at a time on other devices: 16 MiB, to limit the size of temporaries.
_DEVICE_PIECE_COUNT: Final = 1 << 22


@runtime_checkable
class Codec(Protocol):
    """Encodes float32 vectors as bytes.

    A vector consists of blocks that are encoded independently. A slice of whole blocks that begins at ``start`` is
    therefore encoded in the bytes from ``nbytes(start)`` on.
    """

    @property
    def name(self) -> str:
        """Name of the codec, as :func:`~asyncdist.tensors.codecs.find_codec` accepts it."""

    @property
    def for_states(self) -> bool:
        """Whether the codec is precise enough for whole model states, and not only for differences between states."""

    @property
    def block(self) -> int:
        """Number of values per block."""

    def nbytes(self, count: int) -> int:
        """Return the encoded size in bytes of a vector of ``count`` values."""

    def encode(self, values: Tensor, out: Tensor) -> None:
        """Encode ``values`` into ``out``.

        Args:
            values: Contiguous 1-D float32 tensor. It is not changed.
            out: Contiguous 1-D tensor of ``nbytes(len(values))`` uint8 on the device of ``values``, at any address.

        Raises:
            ValueError: A tensor has another dtype, shape, stride or device.
        """

    def decode(self, encoded: Tensor, out: Tensor) -> None:
        """Decode a vector into ``out``.

        Args:
            encoded: Contiguous 1-D uint8 tensor that :meth:`encode` has written. It is not changed.
            out: Contiguous 1-D float32 tensor with the length of the vector, on the device of ``encoded``.

        Raises:
            ValueError: A tensor has another dtype, shape, stride or device.
        """


def checked(codec: Codec, values: Tensor, encoded: Tensor) -> tuple[Tensor, Tensor]:
    """Return both tensors, detached and with stride 1. Raise ValueError if they do not fit each other or the codec."""
    for name, tensor, dtype in (("values", values, torch.float32), ("encoded", encoded, torch.uint8)):
        if tensor.dtype != dtype or tensor.ndim != 1 or not tensor.is_contiguous():
            got = f"{tensor.dtype}, shape {tuple(tensor.shape)}, stride {tensor.stride()}"
            validation.refuse(name, got, f"a contiguous 1-D tensor of {dtype}")
    if values.device != encoded.device:
        validation.refuse("encoded", f"a tensor on {encoded.device}", f"on the device of the values, {values.device}")
    if len(encoded) != codec.nbytes(len(values)):
        wanted = f"{codec.nbytes(len(values))} bytes for {len(values)} values encoded as {codec.name}"
        validation.refuse("encoded", f"{len(encoded)} bytes", wanted)
    # A view with another dtype needs stride 1. A contiguous tensor with at most one element may have any stride.
    return values.detach().as_strided((len(values),), (1,)), encoded.as_strided((len(encoded),), (1,))


def piece_count(block: int, device: torch.device) -> int:
    """Return the number of values to process at a time, a multiple of ``block``."""
    count = _PIECE_COUNT if device.type == "cpu" else _DEVICE_PIECE_COUNT
    return max(1, count // block) * block


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


class ErrorFeedback:
    """Encodes the successive differences of one vector, and keeps the residual, which is the part lost in encoding.

    This is EF14 (Seide et al. 2014; Karimireddy et al., 1901.09847). For the residual e and the difference D,
    :meth:`encode` encodes e + D, and sets e to ``decay`` * (e + D - decoded). With ``decay`` 1, the decoded
    differences and the residual add up to the sum of all differences, within rounding. MuLoCo and SparseLoCo
    (2508.15706) use a ``decay`` of 0.9 to 0.95.

    An encoded difference is assumed to be received. If a send fails, undo this by copying back a clone of ``residual``
    that was made before :meth:`encode`. Do the same if a difference contained a NaN or an infinity, because this makes
    the block's residual NaN.

    Args:
        count: Number of values of the vector.
        decay: Factor by which the new residual is multiplied, from 0 to 1.

    Attributes:
        residual: 1-D float32 tensor of ``count`` values on ``device``, initially zero.
    """

    def __init__(self, count: int, *, decay: float = 1.0, device: torch.device | str = "cpu") -> None:
        self.decay = validation.fraction("decay", decay)
        self.residual = torch.zeros(validation.count("count", count, least=0), dtype=torch.float32, device=device)

    def encode(self, codec: Codec, difference: Tensor, out: Tensor, start: int = 0) -> None:
        """Encode the sum of the residual and a difference into ``out``, and update the residual.

        Args:
            codec: Codec to use, which may differ between calls.
            difference: Contiguous 1-D tensor of float32, not changed: the whole vector, or a part of it. If it is not
                on the residual's device, it is encoded on its own device, and the residual is copied there piece by
                piece.
            out: Contiguous 1-D tensor of ``codec.nbytes(len(difference))`` uint8 on the device of ``difference``.
            start: Index of the part's first value, which must be the first value of a codec block.

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
