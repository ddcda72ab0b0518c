"""The wire codecs, written a second time with numpy, one block at a time."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float32]
#: Function that encodes one block.
Encoder = Callable[[Floats], bytes]
#: Function that decodes the bytes of one block with this number of values.
Decoder = Callable[[bytes, int], Floats]

NAN = np.float32(np.nan).tobytes()


def encode_float32(block: Floats) -> bytes:
    return block.tobytes()


def decode_float32(encoded: bytes, count: int) -> Floats:
    return np.frombuffer(encoded, np.float32, count)


def encode_bfloat16(block: Floats) -> bytes:
    upper = np.empty(len(block), np.uint16)
    for place, value in enumerate(block):
        pattern = int(value.view(np.uint32))
        if np.isnan(value):
            upper[place] = 0x7FC0
        elif np.isinf(value):
            upper[place] = pattern >> 16
        else:
            sign, magnitude = pattern >> 31, pattern & 0x7FFFFFFF
            whole, rest = divmod(magnitude, 1 << 16)
            whole += rest > 0x8000 or (rest == 0x8000 and whole % 2 == 1)
            upper[place] = sign << 15 | min(whole, 0x7F7F)
    return upper.tobytes()


def decode_bfloat16(encoded: bytes, count: int) -> Floats:
    return (np.frombuffer(encoded, np.uint16, count).astype(np.uint32) << 16).view(np.float32)


def encode_int8(block: Floats) -> bytes:
    if not np.isfinite(block).all():
        return NAN + bytes(len(block))
    with np.errstate(under="ignore"):
        scale = np.abs(block).max() / np.float32(127)
        largest = np.nextafter(np.finfo(np.float32).max / np.float32(127), np.float32(0))
        scale = min(max(scale, np.finfo(np.float32).tiny), largest)
        return bytes(np.float32(scale).tobytes() + np.rint(block / scale).astype(np.int8).tobytes())


def decode_int8(encoded: bytes, count: int) -> Floats:
    return np.frombuffer(encoded, np.int8, count, 4).astype(np.float32) * np.frombuffer(encoded, np.float32, 1)


def encode_float16(block: Floats) -> bytes:
    if not np.isfinite(block).all():
        return NAN + bytes(2 * len(block))
    exponent = max(int(np.frexp(np.abs(block).max())[1]) - 1, -112) if block.any() else -112
    with np.errstate(under="ignore"):
        limited = block.astype(np.float64).clip(-(2 - 2.0**-10) * 2.0**127, (2 - 2.0**-10) * 2.0**127)
        halves = np.ldexp(limited, 14 - exponent).astype(np.float16)
    return bytes(np.float32(2.0 ** (exponent - 14)).tobytes() + halves.tobytes())


def decode_float16(encoded: bytes, count: int) -> Floats:
    scale = np.frombuffer(encoded, np.float32, 1)
    wide: NDArray[np.float64] = np.frombuffer(encoded, np.float16, count, 4).astype(np.float64) * scale
    return wide.astype(np.float32)


def encode_q4(block: Floats) -> bytes:
    if not np.isfinite(block).all():
        return NAN + bytes((len(block) + 1) // 2)
    scale = max(np.abs(block).max(), np.float32(2.0**-120))
    with np.errstate(under="ignore"):
        ratios = np.abs(block) / scale
    levels = np.where(ratios > 0, np.frexp(ratios * np.float32(2**0.5))[1] - 1 + 7, 0).clip(0, 7)
    codes = [*(levels + 8 * np.signbit(block)).tolist(), 0]  # the last one is used if the number of values is odd
    return bytes(np.float32(scale).tobytes()) + bytes(map(join, codes[::2], codes[1::2]))


def join(low: int, high: int) -> int:
    return low + 16 * high


def decode_q4(encoded: bytes, count: int) -> Floats:
    scale, levels = np.frombuffer(encoded, np.float32, 1), [0.0, *(2.0**exponent for exponent in range(-6, 1))]
    ratios = np.array(levels + [-level if level else 0.0 for level in levels], np.float32)
    codes = [code for byte in encoded[4:] for code in (byte % 16, byte // 16)]
    return ratios[codes[:count]] * scale


def encode_topk(block: Floats) -> bytes:
    """Keep 3 % of the values, the default."""
    magnitudes = np.abs(block).view(np.int32)
    order = sorted(range(len(block)), key=lambda place: (-int(magnitudes[place]), place))
    places = sorted(order[: math.ceil(0.03 * len(block))])
    return bytes(block[places].tobytes() + np.array(places, np.uint16).tobytes())


def decode_topk(encoded: bytes, count: int) -> Floats:
    values, kept = np.zeros(count, np.float32), len(encoded) // 6
    for place in range(kept):
        values[np.frombuffer(encoded, np.uint16, kept, 4 * kept)[place]] = np.frombuffer(encoded, np.float32, kept)[
            place
        ]
    return values


#: Encoder, decoder and values per block of each codec.
CODECS: dict[str, tuple[Encoder, Decoder, int]] = {
    "float32": (encode_float32, decode_float32, 1000),
    "bfloat16": (encode_bfloat16, decode_bfloat16, 1000),
    "float16": (encode_float16, decode_float16, 256),
    "int8": (encode_int8, decode_int8, 256),
    "q4": (encode_q4, decode_q4, 256),
    "topk": (encode_topk, decode_topk, 4096),
}


def encode(name: str, values: Floats) -> list[bytes]:
    """Return the encoded blocks of a vector."""
    encoder, _, block = CODECS[name]
    return [encoder(values[start : start + block]) for start in range(0, len(values), block)]


def decode(name: str, blocks: list[bytes], count: int) -> Floats:
    """Return the vector of ``count`` values that these blocks encode."""
    _, decoder, block = CODECS[name]
    lengths = [min(block, count - start) for start in range(0, count, block)]
    decoded = [decoder(encoded, length) for encoded, length in zip(blocks, lengths, strict=True)]
    return np.concatenate([np.empty(0, np.float32), *decoded])
