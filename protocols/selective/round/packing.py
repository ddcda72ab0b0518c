"""Packs sets of ranks and lists of numbers into few bytes, for the messages of a round.

Every rank in a round receives the list of all donors and replacers, so the bytes of a round grow with the square of the
number of ranks. The packed form takes one bit per rank instead of up to 16 bytes, and less for consecutive ranks.
Unpacking arbitrary bytes either returns a valid result or raises ValueError.
"""

import math
import struct
from collections.abc import Sequence
from itertools import pairwise
from typing import Final

#: First byte of a packed set of ranks, which identifies the format of the other bytes.
_LISTED: Final = b"l"
_AS_BITS: Final = b"b"
_AS_RANGE: Final = b"r"
_RANK: Final = struct.Struct("<I")
_RANGE: Final = struct.Struct("<II")
#: Maximum length of a packed range, because nine bytes could otherwise claim a huge range. Longer ranges become bit
#: masks.
RANK_COUNT_MAX: Final = 1 << 16
#: First byte of packed numbers: all are equal, or the integer type of their differences from the smallest number.
_SAME: Final = b"="
_EACH: Final = {b"B": 1 << 8, b"H": 1 << 16, b"I": 1 << 32, b"Q": 1 << 64}
_EACH_WEIGHT: Final = b"d"
_NUMBER: Final = struct.Struct("<q")
_WEIGHT: Final = struct.Struct("<d")
_BITS_OF: Final = tuple(tuple(bit for bit in range(8) if octet >> bit & 1) for octet in range(256))


def pack_ranks(ranks: Sequence[int]) -> bytes:
    """Pack distinct ascending ranks as a range, as a bit mask or as a list, whichever is shorter."""
    if not ranks:
        return b""
    if ranks[-1] - ranks[0] == len(ranks) - 1 < RANK_COUNT_MAX:
        return _AS_RANGE + _RANGE.pack(ranks[0], len(ranks))
    first = ranks[0] // 8
    if _RANK.size * (len(ranks) - 1) < ranks[-1] // 8 - first + 1:
        return _LISTED + struct.pack(f"<{len(ranks)}I", *ranks)
    bits = bytearray(ranks[-1] // 8 - first + 1)
    for rank in ranks:
        bits[(rank >> 3) - first] |= 1 << (rank & 7)
    return _AS_BITS + _RANK.pack(first) + bits


def unpack_ranks(packed: bytes) -> tuple[int, ...]:
    """Return the ranks that :func:`pack_ranks` has packed. Raise ValueError for other bytes."""
    form, rest = packed[:1], packed[1:]
    if form == _LISTED and rest and len(rest) % _RANK.size == 0:
        ranks = struct.unpack(f"<{len(rest) // _RANK.size}I", rest)
        if all(one < two for one, two in pairwise(ranks)):
            return ranks
        raise ValueError(f"ranks must be in ascending order, got {ranks!r:.80}")
    if form == _AS_RANGE and len(rest) == _RANGE.size:
        start, count = _RANGE.unpack(rest)
        if 0 < count <= RANK_COUNT_MAX:
            return tuple(range(start, start + count))
    if form == _AS_BITS and len(rest) > _RANK.size and rest[_RANK.size] and rest[-1]:
        start = 8 * _RANK.unpack_from(rest)[0]
        octets = enumerate(rest[_RANK.size :])
        return tuple(start + 8 * place + bit for place, octet in octets for bit in _BITS_OF[octet])
    if packed:
        raise ValueError(f"the bytes {packed!r:.80} are not a packed set of ranks")
    return ()


def pack_numbers(numbers: Sequence[int]) -> bytes:
    """Pack 64-bit integers. The smaller their range, the fewer bytes they take."""
    if not numbers:
        return b""
    least = min(numbers)
    spread = max(numbers) - least
    if spread == 0:
        return _SAME + _NUMBER.pack(least)
    form = next(form for form, limit in _EACH.items() if spread < limit)
    differences = struct.pack(f"<{len(numbers)}{form.decode()}", *(number - least for number in numbers))
    return form + _NUMBER.pack(least) + differences


def unpack_numbers(packed: bytes, count: int) -> tuple[int, ...]:
    """Return the ``count`` numbers that :func:`pack_numbers` has packed. Raise ValueError for other bytes."""
    form, rest = packed[:1], packed[1:]
    if not count and not packed:
        return ()
    if count and form == _SAME and len(rest) == _NUMBER.size:
        return _NUMBER.unpack(rest) * count
    layout = f"<{count}{form.decode('latin-1')}" if form in _EACH else "<"
    if count and form in _EACH and len(rest) == _NUMBER.size + struct.calcsize(layout):
        (least,) = _NUMBER.unpack_from(rest)
        return tuple(least + difference for difference in struct.unpack_from(layout, rest, _NUMBER.size))
    raise ValueError(f"the bytes {packed!r:.80} are not {count} packed numbers")


def pack_weights(weights: Sequence[float]) -> bytes:
    """Pack weights as 64-bit floats, or as a single float if all are equal."""
    if not weights:
        return b""
    if weights.count(weights[0]) == len(weights):
        return _SAME + _WEIGHT.pack(weights[0])
    return _EACH_WEIGHT + struct.pack(f"<{len(weights)}d", *weights)


def unpack_weights(packed: bytes, count: int) -> tuple[float, ...]:
    """Return the ``count`` weights that :func:`pack_weights` has packed. Raise ValueError for other bytes."""
    form, rest = packed[:1], packed[1:]
    if not count and not packed:
        return ()
    if count and form == _SAME and len(rest) == _WEIGHT.size:
        weights = _WEIGHT.unpack(rest) * count
    elif count and form == _EACH_WEIGHT and len(rest) == count * _WEIGHT.size:
        weights = struct.unpack(f"<{count}d", rest)
    else:
        raise ValueError(f"the bytes {packed!r:.80} are not {count} packed weights")
    if not all(0.0 <= weight < math.inf for weight in weights):
        raise ValueError(f"weights must be finite and >= 0, got {weights!r:.80}")
    return weights


def join(*parts: bytes) -> bytes:
    """Concatenate byte strings, each preceded by its length."""
    return b"".join(_RANK.pack(len(part)) + part for part in parts)


def split(joined: bytes, count: int) -> list[bytes]:
    """Return the ``count`` byte strings that :func:`join` has joined. Raise ValueError for other bytes."""
    parts: list[bytes] = []
    start = 0
    while start + _RANK.size <= len(joined) and len(parts) < count:
        end = start + _RANK.size + _RANK.unpack_from(joined, start)[0]
        parts.append(joined[start + _RANK.size : end])
        start = end
    if start != len(joined) or len(parts) != count:
        raise ValueError(f"the bytes {joined!r:.80} are not {count} parts")
    return parts
