# cython: boundscheck=False, wraparound=False
"""Computes the CRC32 of messages. If this module is compiled, small messages use lookup tables, and others zlib."""

from __future__ import annotations

import itertools
import sys
import zlib
from array import array
from typing import Any, Final

_ONES: Final = 0xFFFFFFFF
#: Largest size, in bytes, for which the compiled loop is faster than zlib, or 0 if this module is not compiled.
_LOOP_NBYTES_MAX: Final = 0 if __file__.endswith(".py") or sys.byteorder != "little" else 256
LOOP_NBYTES_MAX: Final = _LOOP_NBYTES_MAX


def _remainders() -> array[int]:
    """Return the CRC32 table of eight rows. Row n has the remainder of each byte value followed by n zero bytes."""
    first = [~zlib.crc32(bytes([byte]), 0xFFFFFFFF) & 0xFFFFFFFF for byte in range(256)]
    rows = [first]
    for _ in range(7):
        # The directive wraparound=False forbids index -1.
        rows.append([crc >> 8 ^ first[crc & 0xFF] for crc in rows[len(rows) - 1]])
    return array("I", itertools.chain(*rows))


_REMAINDERS: Final = _remainders()


def _after_word(crc: int) -> int:
    """Return the CRC after four more bytes, which the caller has XORed into ``crc``."""
    return (
        _REMAINDERS[768 + (crc & 0xFF)]
        ^ _REMAINDERS[512 + (crc >> 8 & 0xFF)]
        ^ _REMAINDERS[256 + (crc >> 16 & 0xFF)]
        ^ _REMAINDERS[crc >> 24]
    )


def _after_long(crc: int, value: int) -> int:
    """Return the CRC after the eight bytes of ``value``, given the CRC ``crc`` of the preceding bytes."""
    value ^= crc
    return (
        _REMAINDERS[1792 + (value & 0xFF)]
        ^ _REMAINDERS[1536 + (value >> 8 & 0xFF)]
        ^ _REMAINDERS[1280 + (value >> 16 & 0xFF)]
        ^ _REMAINDERS[1024 + (value >> 24 & 0xFF)]
        ^ _REMAINDERS[768 + (value >> 32 & 0xFF)]
        ^ _REMAINDERS[512 + (value >> 40 & 0xFF)]
        ^ _REMAINDERS[256 + (value >> 48 & 0xFF)]
        ^ _REMAINDERS[value >> 56]
    )


def of_frame(longs: Any, octets: Any, nbytes: int) -> int:
    """Return the CRC of a message, given as eight-byte words and as bytes.

    Its first four bytes, the CRC field, are skipped.
    """
    if nbytes > _LOOP_NBYTES_MAX:
        return zlib.crc32(octets[4:nbytes])
    crc = _after_word(_ONES ^ longs[0] >> 32)
    for position in range(1, nbytes // 8):
        crc = _after_long(crc, longs[position])
    for position in range(nbytes // 8 * 8, nbytes):
        crc = _REMAINDERS[(crc ^ octets[position]) & 0xFF] ^ crc >> 8
    return crc ^ _ONES


def of_header_and_payload(words: Any, after_crc: Any, payload: bytes) -> int:
    """Return the CRC of a header and its payload. The header's first four bytes, the CRC field, are skipped."""
    if len(payload) > _LOOP_NBYTES_MAX:
        return zlib.crc32(payload, zlib.crc32(after_crc))
    crc = _ONES
    for position in range(1, len(words)):
        crc = _after_word(crc ^ words[position])
    nbytes = len(payload)
    for position in range(0, nbytes - 3, 4):
        word = payload[position + 3]
        word = word << 8 | payload[position + 2]
        word = word << 8 | payload[position + 1]
        crc = _after_word(crc ^ (word << 8 | payload[position]))
    for position in range(nbytes // 4 * 4, nbytes):
        crc = _REMAINDERS[(crc ^ payload[position]) & 0xFF] ^ crc >> 8
    return crc ^ _ONES
