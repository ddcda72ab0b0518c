"""Codecs that encode vectors of float32 in fewer bytes for sending, with a bounded error, and decode them.

Codecs do not depend on transports. They are deterministic on the CPU and on CUDA devices. Equal values give equal
bytes, and equal bytes give equal values, except for the bits of NaNs. CUDA tensors are processed on their device,
without waiting for it. Only float32 and bfloat16 are precise enough for whole states. All other codecs are for
differences.

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

Averaging ranks send encoded contributions, and then the encoded mean. A contribution has the error stated above, which
error feedback sends later. The mean of decoded contributions has a codec of its own (:func:`codec_of_means`) and a
second error, which is not sent later:

======== ======================= =================================================================
name     bytes per value of mean error of a value of the mean
======== ======================= =================================================================
topk     6 * share * ranks, <= 4 none
others   as a contribution       as a contribution, relative to the mean
======== ======================= =================================================================
"""

from asyncdist.tensors.codecs.choice import codec_of_means, find_codec
from asyncdist.tensors.codecs.codec import Codec, piece_count
from asyncdist.tensors.codecs.error_feedback import ErrorFeedback
from asyncdist.tensors.codecs.topk import TopK

__all__ = ["Codec", "ErrorFeedback", "TopK", "codec_of_means", "find_codec", "piece_count"]
