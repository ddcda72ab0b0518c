"""Codecs for the wire: encode vectors of float32 in fewer bytes, with a stated error, and decode them.

Codecs are pure functions without any transport. All of them are deterministic: equal values give equal bytes, and equal
bytes give equal values, on the CPU and on CUDA devices. On a CUDA device they run on that device and never wait for it.

========== ================ ========================================================================================
name       bytes per value  error of a decoded value
========== ================ ========================================================================================
float32    4                none
bfloat16   2                2^-8 of the value
int8       1.016            half of the block's scale, where the scale is the block's largest magnitude / 127
========== ================ ========================================================================================
"""

from asyncdist.tensors.codecs.choice import find_codec
from asyncdist.tensors.codecs.codec import Codec
from asyncdist.tensors.codecs.error_feedback import ErrorFeedback

__all__ = ["Codec", "ErrorFeedback", "find_codec"]
