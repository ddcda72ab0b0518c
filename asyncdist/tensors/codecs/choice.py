"""Finds a codec by its name."""

from __future__ import annotations

from typing import Final

from asyncdist.tensors.codecs.casts import BFloat16, Float32
from asyncdist.tensors.codecs.codec import Codec
from asyncdist.tensors.codecs.int8 import Int8
from asyncdist.validation import one_of, refuse

_CODECS: Final[dict[str, Codec]] = {codec.name: codec for codec in (Float32(), BFloat16(), Int8())}


def find_codec(wire: str | Codec) -> Codec:
    """Return the codec with this name, or ``wire`` itself if it is a codec. Raise ValueError for other values."""
    if isinstance(wire, str) and wire in _CODECS:
        return _CODECS[wire]
    if isinstance(wire, str) or not isinstance(wire, Codec):
        refuse("wire", wire, f"{one_of(_CODECS)}, or a codec")
    return wire
