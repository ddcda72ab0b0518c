"""The interface of codecs, the check of their arguments, and the number of values that they process at a time."""

from __future__ import annotations

from typing import Final, Protocol, runtime_checkable

import torch
from torch import Tensor

from asyncdist.validation import refuse

#: Number of values that are processed at a time: 256 KiB on the CPU, which stay in a core's private cache during all
#: passes, and 16 MiB on other devices, which bound the temporary memory there.
_PIECE_COUNT: Final = 1 << 16
_DEVICE_PIECE_COUNT: Final = 1 << 22


@runtime_checkable
class Codec(Protocol):
    """Encodes vectors of float32 as bytes.

    A vector consists of blocks that are encoded independently. Slices of a vector whose borders are multiples of the
    block are encoded to the corresponding slices of the encoded vector: ``nbytes(start)`` is the place of the slice
    that begins at ``start``.
    """

    @property
    def name(self) -> str:
        """The name by which :func:`~asyncdist.tensors.codecs.find_codec` finds the codec."""

    @property
    def for_states(self) -> bool:
        """Whether the error is small enough for whole states; other codecs are for differences only."""

    @property
    def block(self) -> int:
        """Number of values of a block."""

    def nbytes(self, count: int) -> int:
        """Return the number of bytes of an encoded vector of ``count`` values."""

    def encode(self, values: Tensor, out: Tensor) -> None:
        """Write the encoded values into ``out``.

        Args:
            values: Contiguous 1-D tensor of float32; not changed.
            out: Contiguous 1-D tensor of ``nbytes(len(values))`` uint8 on the device of ``values``. It may begin at
                any address.

        Raises:
            ValueError: If a tensor has another dtype, shape, stride or device.
        """

    def decode(self, encoded: Tensor, out: Tensor) -> None:
        """Write the values of an encoded vector into ``out``.

        Args:
            encoded: Contiguous 1-D tensor of uint8 that :meth:`encode` has written; not changed.
            out: Contiguous 1-D tensor of float32, with as many elements as the vector, on the device of ``encoded``.

        Raises:
            ValueError: If a tensor has another dtype, shape, stride or device.
        """


def checked(codec: Codec, values: Tensor, encoded: Tensor) -> tuple[Tensor, Tensor]:
    """Return a vector and its encoded bytes, detached and with stride 1. Raise ValueError if they do not fit."""
    for name, tensor, dtype in (("values", values, torch.float32), ("encoded", encoded, torch.uint8)):
        if tensor.dtype != dtype or tensor.ndim != 1 or not tensor.is_contiguous():
            got = f"{tensor.dtype}, shape {tuple(tensor.shape)}, stride {tensor.stride()}"
            refuse(name, got, f"a contiguous 1-D tensor of {dtype}")
    if values.device != encoded.device:
        refuse("encoded", f"a tensor on {encoded.device}", f"on the device of the values, {values.device}")
    if len(encoded) != codec.nbytes(len(values)):
        wanted = f"{codec.nbytes(len(values))} bytes for {len(values)} values encoded as {codec.name}"
        refuse("encoded", f"{len(encoded)} bytes", wanted)
    # A contiguous tensor with at most one element may have any stride, but a view with another dtype needs stride 1.
    return values.detach().as_strided((len(values),), (1,)), encoded.as_strided((len(encoded),), (1,))


def piece_count(block: int, device: torch.device) -> int:
    """Return the number of values to process at a time, a multiple of ``block``."""
    count = _PIECE_COUNT if device.type == "cpu" else _DEVICE_PIECE_COUNT
    return max(1, count // block) * block
