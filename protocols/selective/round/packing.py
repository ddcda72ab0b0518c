"""Packs what all ranks of a round are told alike: sets of ranks, and a number for each of them.

Every rank that is named in a round is told all donors and replacers, so a round moves as many bytes as there are ranks,
squared. As lists of numbers those were three bytes for each rank, and 16 where weights and iterations go with it; here
they are a bit for each rank, less where ranks follow each other, and nothing for numbers that are all the same. The
coordinator packs them once per round, and the frames of all recipients carry the same bytes
(`protocols.selective.round.plan`).

Pure, like the rules. Whatever the bytes, unpacking them gives ranks in ascending order, none twice, or raises
ValueError. A range is bounded, and all else by the bytes, which are those of one frame.
"""

import math
import struct
from collections.abc import Sequence
from itertools import pairwise
from typing import Final

#: The first byte of a set of ranks: how the others hold it.
_LISTED: Final = b"l"
_AS_BITS: Final = b"b"
_AS_RANGE: Final = b"r"
_RANK: Final = struct.Struct("<I")
_RANGE: Final = struct.Struct("<II")
#: A range takes nine bytes, whoever sends it: so many ranks can be in one. More are packed as bits.
RANK_COUNT_MAX: Final = 1 << 16
#: The first byte of numbers, and of weights: one for all, or one for each, in so many bytes after the smallest.
_SAME: Final = b"="
_EACH: Final = {b"B": 1 << 8, b"H": 1 << 16, b"I": 1 << 32, b"Q": 1 << 64}
_EACH_WEIGHT: Final = b"d"
_NUMBER: Final = struct.Struct("<q")
_WEIGHT: Final = struct.Struct("<d")
_BITS_OF: Final = tuple(tuple(bit for bit in range(8) if octet >> bit & 1) for octet in range(256))


def pack_ranks(ranks: Sequence[int]) -> bytes:
    """Pack ranks, ascending and none twice: as a range, as bits after the first one's place, or as a short list."""
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
    """Return the ranks that :func:`pack_ranks` has packed.

    Raises:
        ValueError: it has packed no such bytes.
    """
    form, rest = packed[:1], packed[1:]
    if form == _LISTED and rest and len(rest) % _RANK.size == 0:
        ranks = struct.unpack(f"<{len(rest) // _RANK.size}I", rest)
        if all(one < two for one, two in pairwise(ranks)):
            return ranks
        raise ValueError(f"the ranks {ranks} are not in ascending order")
    if form == _AS_RANGE and len(rest) == _RANGE.size:
        start, count = _RANGE.unpack(rest)
        if 0 < count <= RANK_COUNT_MAX:
            return tuple(range(start, start + count))
    if form == _AS_BITS and len(rest) > _RANK.size and rest[_RANK.size] and rest[-1]:
        start = 8 * _RANK.unpack_from(rest)[0]
        octets = enumerate(rest[_RANK.size :])
        return tuple(start + 8 * place + bit for place, octet in octets for bit in _BITS_OF[octet])
    if packed:
        raise ValueError(f"no set of ranks: {packed!r:.80}")
    return ()


def pack_numbers(numbers: Sequence[int]) -> bytes:
    """Pack whole numbers of 64 bits, in few bytes where they are alike."""
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
    """Return the numbers that :func:`pack_numbers` has packed; ``count`` of them, which is bounded already.

    Raises:
        ValueError: it has packed no such bytes, or another count of numbers.
    """
    form, rest = packed[:1], packed[1:]
    if not count and not packed:
        return ()
    if count and form == _SAME and len(rest) == _NUMBER.size:
        return _NUMBER.unpack(rest) * count
    layout = f"<{count}{form.decode('latin-1')}" if form in _EACH else "<"
    if count and form in _EACH and len(rest) == _NUMBER.size + struct.calcsize(layout):
        (least,) = _NUMBER.unpack_from(rest)
        return tuple(least + difference for difference in struct.unpack_from(layout, rest, _NUMBER.size))
    raise ValueError(f"no {count} numbers: {packed!r:.80}")


def pack_weights(weights: Sequence[float]) -> bytes:
    """Pack weights as they are; once where they are all the same."""
    if not weights:
        return b""
    if weights.count(weights[0]) == len(weights):
        return _SAME + _WEIGHT.pack(weights[0])
    return _EACH_WEIGHT + struct.pack(f"<{len(weights)}d", *weights)


def unpack_weights(packed: bytes, count: int) -> tuple[float, ...]:
    """Return the weights that :func:`pack_weights` has packed; ``count`` of them, which is bounded already.

    Raises:
        ValueError: it has packed no such bytes, or another count of weights, or one is negative or not finite.
    """
    form, rest = packed[:1], packed[1:]
    if not count and not packed:
        return ()
    if count and form == _SAME and len(rest) == _WEIGHT.size:
        weights = _WEIGHT.unpack(rest) * count
    elif count and form == _EACH_WEIGHT and len(rest) == count * _WEIGHT.size:
        weights = struct.unpack(f"<{count}d", rest)
    else:
        raise ValueError(f"no {count} weights: {packed!r:.80}")
    if not all(0.0 <= weight < math.inf for weight in weights):
        raise ValueError(f"the weights are {weights!r:.80}")
    return weights


def join(*parts: bytes) -> bytes:
    """Join parts of any length, each after its length."""
    return b"".join(_RANK.pack(len(part)) + part for part in parts)


def split(joined: bytes, count: int) -> list[bytes]:
    """Return the parts that :func:`join` has joined.

    Raises:
        ValueError: these are not ``count`` parts.
    """
    parts: list[bytes] = []
    start = 0
    while start + _RANK.size <= len(joined) and len(parts) < count:
        end = start + _RANK.size + _RANK.unpack_from(joined, start)[0]
        parts.append(joined[start + _RANK.size : end])
        start = end
    if start != len(joined) or len(parts) != count:
        raise ValueError(f"not {count} parts: {joined!r:.80}")
    return parts
