"""Damages bytes in the ways that decoders of frames and strings get wrong."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Any, Final

import msgspec

from asyncdist.messaging import wire

#: Bytes with lengths and types in msgpack: headers that announce more data than follows, extension types, invalid
#: types.
_BOMBS: Final = (
    b"\xdd\xff\xff\xff\xff",
    b"\xdd\x7f\xff\xff\xff",
    b"\xdc\xff\xff",
    b"\xdf\xff\xff\xff\xff",
    b"\xde\xff\xff",
    b"\xc6\xff\xff\xff\xff",
    b"\xc5\xff\xff",
    b"\xdb\xff\xff\xff\xff",
    b"\xd9\xff",
    b"\xc9\xff\xff\xff\xff\x01",
    b"\xd6\xff\0\0\0\0",
    b"\xc7\x01\x05x",
    b"\xc1",
    b"\x8f",
    b"\x9f",
    b"\x91" * 600,
    b"\x81\xa1a" * 300,
    b"\xcf" + b"\xff" * 8,
    b"\xd3\x80" + b"\0" * 7,
    b"\xcb\x7f\xf8" + b"\0" * 6,
    b"\xa1\xff",
    b"\xc0",
    b"\0" * 8,
    b"\xff" * 8,
    b"9" * 5000,  # a number with too many digits
    b"[" * 3000,
)
_OCTETS: Final = (0, 1, 0x7F, 0x80, 0x90, 0x9F, 0xA0, 0xC0, 0xC1, 0xC4, 0xD9, 0xDC, 0xDE, 0xFE, 0xFF, 0x2D, 0x2C, 0x30)

_Mutation = Callable[[bytes, int, bytes], bytes]


def _flip(data: bytes, bits: int, other: bytes) -> bytes:
    if not data:
        return b"\0"
    changed = bytearray(data)
    changed[bits % len(data)] ^= 1 << (bits >> 40 & 7)
    return bytes(changed)


def _flip_some(data: bytes, bits: int, other: bytes) -> bytes:
    changed = bytearray(data)
    for _ in range(2 + (bits & 3) if data else 0):
        bits = bits >> 7 ^ bits << 11 & 0xFFFFFFFFFFFF
        changed[bits % len(data)] ^= 1 + (bits >> 20) % 255
    return bytes(changed)


def _set_octet(data: bytes, bits: int, other: bytes) -> bytes:
    if not data:
        return b"\xc0"
    changed = bytearray(data)
    changed[bits % len(data)] = _OCTETS[(bits >> 32) % len(_OCTETS)]
    return bytes(changed)


def _truncate(data: bytes, bits: int, other: bytes) -> bytes:
    return data[: bits % (len(data) + 1)]


def _delete(data: bytes, bits: int, other: bytes) -> bytes:
    start = bits % (len(data) + 1)
    return data[:start] + data[start + 1 + (bits >> 32) % 9 :]


def _repeat(data: bytes, bits: int, other: bytes) -> bytes:
    start = bits % (len(data) + 1)
    end = start + 1 + (bits >> 24) % 40
    return data[:start] + data[start:end] * (2 + (bits >> 32 & 3)) + data[end:]


def _splice(data: bytes, bits: int, other: bytes) -> bytes:
    return data[: bits % (len(data) + 1)] + other[(bits >> 24) % (len(other) + 1) :]


def _put_bomb(data: bytes, bits: int, other: bytes) -> bytes:
    start = bits % (len(data) + 1)
    bomb = _BOMBS[(bits >> 24) % len(_BOMBS)]
    return data[:start] + bomb + data[start + (len(bomb) if bits >> 40 & 1 else 0) :]


_MUTATIONS: Final[tuple[_Mutation, ...]] = (
    *(_flip, _flip_some, _set_octet, _truncate),
    *(_delete, _repeat, _splice, _put_bomb),
)
LONGEST_NBYTES: Final = wire.PAYLOAD_NBYTES_MAX


def mutate(data: bytes, bits: int, other: bytes) -> bytes:
    """Return the bytes with one random damage.

    Args:
        data: A valid or already damaged message.
        bits: 48 random bits that select the damage.
        other: A second message, from which a part may be taken.
    """
    return _MUTATIONS[bits >> 44 & 7](data, bits, other)[:LONGEST_NBYTES]


def odd_values(names: Sequence[str], rng: random.Random) -> bytes:
    """Return valid msgpack: a map with these keys, and values of any types."""
    chosen = [name for name in names if rng.random() < 0.9]
    return msgspec.msgpack.encode({name: odd_value(rng, 0) for name in chosen})


def odd_value(rng: random.Random, depth: int = 0) -> Any:
    """Return a value of any type."""
    kind = rng.randrange(12 if depth < 3 else 9)
    match kind:
        case 0:
            return None
        case 1:
            return rng.random() < 0.5
        case 2:
            return rng.choice((0, -1, 2**63, 2**64 - 1, -(2**63), rng.randrange(100)))
        case 3:
            return rng.choice((0.5, float("nan"), float("inf"), -float("inf"), 1e308))
        case 4:
            return rng.choice(("", "x", "é" * 40, "donor", "0-4", "float32"))
        case 5:
            return rng.randbytes(rng.choice((0, 1, 8, 100)))
        case 6:
            return [0] * rng.choice((0, 1, 2, 20, 3000))
        case 7:
            return [rng.randrange(2**33) for _ in range(rng.choice((0, 1, 2, 5)))]
        case 8:
            return [[1, 2]] * rng.choice((1, 3))
        case 9:
            return [odd_value(rng, depth + 1) for _ in range(rng.randrange(4))]
        case 10:
            return {str(place): odd_value(rng, depth + 1) for place in range(rng.randrange(3))}
        case _:
            return {place: odd_value(rng, depth + 1) for place in range(rng.randrange(3))}
