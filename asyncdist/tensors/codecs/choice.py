"""Finds a codec by its name."""

from __future__ import annotations

from typing import Final

from asyncdist.tensors.codecs.casts import BFloat16, Float32
from asyncdist.tensors.codecs.codec import Codec
from asyncdist.tensors.codecs.float16 import Float16
from asyncdist.tensors.codecs.int8 import Int8
from asyncdist.tensors.codecs.q4 import Q4
from asyncdist.tensors.codecs.topk import TopK, UnionOfTopK
from asyncdist.validation import one_of, refuse

_ALL: Final[tuple[Codec, ...]] = (Float32(), BFloat16(), Float16(), Int8(), Q4(), TopK())
_CODECS: Final = {codec.name: codec for codec in _ALL}


def find_codec(wire: str | Codec) -> Codec:
    """Return the codec with this name, or ``wire`` itself if it is a codec, such as ``TopK(share=0.01)``.

    Raises:
        ValueError: ``wire`` is neither a codec nor the name of one.
    """
    if isinstance(wire, str) and wire in _CODECS:
        return _CODECS[wire]
    if isinstance(wire, (str, type)) or not isinstance(wire, Codec):
        refuse("wire", wire, f"{one_of(_CODECS)}, or a codec")
    return wire


def codec_of_means(codec: Codec, contribution_count: int, count: int) -> Codec:
    """Return the codec for the weighted mean of vectors that ``codec`` has decoded.

    The mean of top-k vectors is sent without a second error, because its codec keeps the values of all vectors. With
    the other codecs, the mean is encoded like a contribution, which adds the codec's error a second time.

    Args:
        contribution_count: Maximum number of averaged vectors.
        count: Number of elements of the mean.
    """
    if not isinstance(codec, TopK) or contribution_count == 1:
        return codec
    union = UnionOfTopK(codec.share, codec.block, contribution_count=contribution_count)
    exact = _CODECS["float32"]
    return union if union.nbytes(count) < exact.nbytes(count) else exact
