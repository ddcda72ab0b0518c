"""Codecs that encode float32 vectors in fewer bytes for sending, with a bounded error, and decode them.

Codecs do not depend on transports. They are deterministic on the CPU and on CUDA devices. Equal values give equal
bytes, and equal bytes give equal values, except for the bits of NaNs. CUDA tensors are processed on their device,
without waiting for it. Only float32 and bfloat16 are precise enough for whole model states. All other codecs are for
differences between states.

======== =============== =======================================================================
name     bytes per value error of a decoded value
======== =============== =======================================================================
float32  4               none
bfloat16 2               2^-8 of the value
float16  2.016           2^-11 of the value, or 2^-39 of the block's largest magnitude
int8     1.016           half of the block's scale, which is its largest magnitude / 127
q4       0.516           a factor of sqrt(2), or 2^-6.5 of the block's largest magnitude
topk     6 * share       none, but only the largest values of each block are kept
======== =============== =======================================================================

Ranks that average send encoded contributions, and then the encoded mean. A contribution has the error stated above,
which error feedback sends later. The mean of the decoded contributions has its own codec (:func:`codec_of_means`) and a
second error, which is not sent later:

======== ======================= =================================================================
name     bytes per value of mean error of a value of the mean
======== ======================= =================================================================
topk     6 * share * ranks, <= 4 none
others   as a contribution       as a contribution, relative to the mean
======== ======================= =================================================================
"""

from __future__ import annotations

from typing import Final

from asyncdist.tensors.codecs.codec import Codec, ErrorFeedback, piece_count
from asyncdist.tensors.codecs.rounding import Q4, BFloat16, Float16, Float32, Int8
from asyncdist.tensors.codecs.topk import TopK, UnionOfTopK
from asyncdist.validation import one_of, refuse

__all__ = ["Codec", "ErrorFeedback", "TopK", "codec_of_means", "find_codec", "piece_count"]

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
