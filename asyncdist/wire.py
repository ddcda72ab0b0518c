"""The frame format: a fixed header, then one msgpack map with the fields of a frozen dataclass.

Every frame is checked before anything is believed: its CRC32, then its *route*, which says whose it is and of which
version and kind, then the type of every field. What fails raises :class:`FrameError`, a value that says why, and never
anything else, whatever the bytes. Nothing is pickled and no frame can make this rank allocate more than its own length.

msgspec packs, unpacks and checks, straight into the dataclass, at a fifth of the time of msgpack and checks in Python.
"""

from __future__ import annotations

import dataclasses
import functools
import struct
import types
import typing
import zlib
from collections.abc import Callable, Sequence
from typing import Any, Final, NamedTuple, TypeAlias

import msgspec

from asyncdist.errors import LocalProtocolError

VERSION: Final = 2
ROUND_MAX: Final = 0xFFFFFFFF
FRAME_NBYTES_MAX: Final = 65536

#: The CRC32 of all that follows it; the route; round and sequence.
_HEADER: Final = struct.Struct("<I16sIQ")
_AFTER_CRC: Final = struct.Struct("<16sIQ")
_CRC: Final = struct.Struct("<I")
_ROUTE: Final = struct.Struct("<BBHIII")
HEADER_NBYTES: Final = _HEADER.size
PAYLOAD_NBYTES_MAX: Final = FRAME_NBYTES_MAX - HEADER_NBYTES

Decode: TypeAlias = Callable[[Any], Any]

_encode: Final = msgspec.msgpack.Encoder().encode


class FrameError(ValueError):
    """A frame that is not to be believed; the text says why."""


class Route(NamedTuple):
    """The part of the header that all frames of one sender, channel and message type have in common.

    Attributes:
        version: of the frame format.
        kind: index of the message type among those of its channel.
        reserved: zero.
        nonce: drawn once per job, so that frames of another job are strangers.
        epoch: of the coordinator (zero until one has been replaced).
        scope: whose frame this is: group, name and creation index, hashed.
    """

    version: int
    kind: int
    reserved: int
    nonce: int
    epoch: int
    scope: int


def pack_route(kind: int, nonce: int, epoch: int, scope: int) -> bytes:
    """A route as the 16 bytes that it takes in a header; a receiver finds the channel by them in one look."""
    return _ROUTE.pack(VERSION, kind, 0, nonce, epoch, scope)


def unpack_route(route: bytes) -> Route:
    """What the 16 bytes say."""
    return Route._make(_ROUTE.unpack(route))


def encode_frame(route: bytes, round: int, sequence: int, payload: bytes) -> bytes:
    """One frame.

    Args:
        route: of :func:`pack_route`.
        round: of the protocol; zero outside rounds.
        sequence: counts the channel's sends, so that a frame out of order is seen.
        payload: what :meth:`Codec.encode` made.
    """
    body = _AFTER_CRC.pack(route, round, sequence) + payload
    return _CRC.pack(zlib.crc32(body)) + body


def decode_header(frame: memoryview) -> tuple[int, bytes, int, int]:
    """Check length and CRC. The payload is ``frame[HEADER_NBYTES:]``.

    Returns:
        CRC, route, round and sequence.

    Raises:
        FrameError: the frame is not to be believed.
    """
    if len(frame) < HEADER_NBYTES:
        raise FrameError(f"{len(frame)} bytes, shorter than a header of {HEADER_NBYTES}")
    header: tuple[int, bytes, int, int] = _HEADER.unpack_from(frame)
    if header[0] != zlib.crc32(frame[_CRC.size :]):
        raise FrameError("CRC mismatch")
    return header


class Codec:
    """The message types of one channel, each known on the wire by its index.

    Fields are ``bool int float str bytes None``, unions of them, ``tuple[X, ...]``, ``tuple[X, Y]`` and further frozen
    dataclasses. An int where a float is declared arrives as a float, a list where a tuple is declared as a tuple.

    Args:
        message_types: one frozen dataclass, or a union of them.

    Raises:
        TypeError: one is no frozen dataclass, or a field's type cannot travel.
    """

    def __init__(self, message_types: Any) -> None:
        union = typing.get_origin(message_types) in (typing.Union, types.UnionType)
        classes = typing.get_args(message_types) if union else (message_types,)
        #: Of each kind, in order.
        self.decoders: tuple[Decode, ...] = tuple(map(_decoder, classes))
        self._by_type = {cls: (kind, self.decoders[kind]) for kind, cls in enumerate(classes)}

    def encode(self, message: Any) -> tuple[int, bytes]:
        """Kind and payload of ``message``.

        Raises:
            LocalProtocolError: it is none of the channel's types, a field holds a value of the wrong type, or the
                message is above the limit.
        """
        entry = self._by_type.get(type(message))
        if entry is None:
            names = ", ".join(cls.__name__ for cls in self._by_type)
            raise LocalProtocolError(f"this channel carries {names}, not {type(message).__name__}")
        kind, decode = entry
        try:
            payload = _encode(message)
            decode(payload)  # what the receiver will do; it is the quickest check of the fields, and misses nothing
        except Exception as error:  # a wrong type, an int beyond 64 bits, a lone surrogate, a __post_init__
            raise LocalProtocolError(f"cannot send {message!r:.200}: {error}") from error
        if len(payload) > PAYLOAD_NBYTES_MAX:
            raise LocalProtocolError(
                f"{type(message).__name__} takes {len(payload)} bytes; a message may have {PAYLOAD_NBYTES_MAX} "
                "(send_stream carries more)",
                nbytes=len(payload),
                limit_nbytes=PAYLOAD_NBYTES_MAX,
            )
        return kind, payload


def _decoder(cls: Any) -> Decode:
    if not (isinstance(cls, type) and dataclasses.is_dataclass(cls) and cls.__dataclass_params__.frozen):  # type: ignore[attr-defined]
        raise TypeError(f"a message is a frozen dataclass; {cls!r} is none")
    try:
        return _checked_decoder(cls)
    except RecursionError:
        raise TypeError(f"{cls.__name__} contains itself; only types of bounded depth can travel") from None


@functools.cache
def _checked_decoder(cls: type[Any]) -> Decode:
    """Once for each class: the same few are opened again on every channel, and their hints take 100 us to read."""
    _check_fields(cls)
    return msgspec.msgpack.Decoder(cls).decode


def _check_fields(cls: type[Any]) -> None:
    """Raise TypeError for a field whose type is not one of the few that travel."""
    hints = typing.get_type_hints(cls)
    for field in dataclasses.fields(cls):
        _check_type(hints[field.name], f"{cls.__name__}.{field.name}")


def _check_type(annotation: Any, where: str) -> None:
    origin = typing.get_origin(annotation)
    if annotation in (bool, int, float, str, bytes, None, type(None)):
        return
    if dataclasses.is_dataclass(annotation) and isinstance(annotation, type):
        _check_fields(annotation)
    elif origin in (tuple, typing.Union, types.UnionType):
        for argument in typing.get_args(annotation):
            if argument is not Ellipsis:
                _check_type(argument, where)
    else:
        raise TypeError(f"{where}: a value of type {annotation!r} cannot travel in a message")


def scope_of(group: Sequence[int], name: str, index: int) -> int:
    """The 32-bit scope of the ``index``-th user of ``name`` on ``group``; equal on all ranks."""
    return _scope_of(tuple(group), name, index)


@functools.lru_cache(1024)  # writing down a group of thousands takes a millisecond
def _scope_of(group: tuple[int, ...], name: str, index: int) -> int:
    return zlib.crc32(repr((group, name, index)).encode())
