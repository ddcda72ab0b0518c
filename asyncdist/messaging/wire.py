"""Frame format of messages: a header of fixed size, then one msgpack map with the fields of a frozen dataclass.

A receiver checks the CRC32 of a frame, then the *route*, and then the type of every field. The route identifies the
job, the format version, the channel and the message type. msgspec takes a fifth of the time that Python code would need
to check the types. A failed check raises :class:`FrameError`. Nothing is pickled, and no frame can make this rank
allocate more memory than the frame's length.
"""

from __future__ import annotations

import dataclasses
import functools
import struct
import types
import typing
import zlib
from collections.abc import Callable, Sequence
from typing import Any, Final, NamedTuple, TypeAlias, TypeVar

import msgspec

from asyncdist._version import FRAME_VERSION
from asyncdist.errors import LocalProtocolError
from asyncdist.messaging import _crc32

VERSION: Final = FRAME_VERSION
ROUND_MAX: Final = 0xFFFFFFFF
EPOCH_MAX: Final = 0xFFFFFFFF
FRAME_NBYTES_MAX: Final = 65536

#: Size of the header: 4 bytes for the CRC32 of all following bytes, 16 for the route, 4 for the round, and 8 for the
#: sequence number. The byte order is the native order, which must be equal on all hosts.
HEADER_NBYTES: Final = 32
_ROUTE: Final = struct.Struct("=BBHIII")
PAYLOAD_NBYTES_MAX: Final = FRAME_NBYTES_MAX - HEADER_NBYTES

# The compiled module keeps these copies of the constants as C integers.
_HEADER_NBYTES: Final = HEADER_NBYTES
_PAYLOAD_NBYTES_MAX: Final = PAYLOAD_NBYTES_MAX
#: Largest payload, in bytes, for which a compiled loop is faster than a slice assignment.
_COPY_LOOP_NBYTES_MAX: Final = _crc32.LOOP_NBYTES_MAX

T = TypeVar("T")
Decode: TypeAlias = Callable[[Any], Any]

_encode: Final = msgspec.msgpack.Encoder().encode


def _rounded_up(nbytes: int) -> int:
    return -(-nbytes // 8) * 8


class FrameError(ValueError):
    """Raised if a received message fails a check. ``reason`` names the check without values from the message."""

    def __init__(self, reason: str, particulars: str = "") -> None:
        super().__init__(particulars or reason)
        self.reason = reason


class Route(NamedTuple):
    """Part of a message's header that identifies the job, the channel and the message type.

    Attributes:
        nonce: Random number of the job. Messages of other jobs are dropped.
        epoch: Number of the protocol's coordinator, or 0 for protocols without one. Messages of earlier coordinators
            are dropped.
        scope: Scope of the channel: a hash of its group, name and creation index.
    """

    version: int
    kind: int
    reserved: int
    nonce: int
    epoch: int
    scope: int


def pack_route(kind: int, nonce: int, epoch: int, scope: int) -> bytes:
    """Pack a route, which identifies a message's job, channel and type, into 16 bytes."""
    return _ROUTE.pack(VERSION, kind, 0, nonce, epoch, scope)


@functools.lru_cache(1024)  # All ranks of a simulation have the same routes.
def pack_routes(kind_count: int, nonce: int, epoch: int, scope: int) -> tuple[bytes, ...]:
    """Return the packed route of each message type of a channel."""
    return tuple(pack_route(kind, nonce, epoch, scope) for kind in range(kind_count))


def unpack_route(route: bytes) -> Route:
    """Unpack a route, which identifies a message's job, channel and type, from 16 bytes."""
    return Route._make(_ROUTE.unpack(route))


def keys_of(route: bytes) -> tuple[int, int]:
    """Return a packed route as two integers: its key (scope and message type), and its stamp (epoch and nonce).

    The scope and the epoch are the upper 32 bits. :func:`stamp_of` returns only the stamp.
    """
    words = memoryview(route).cast("I")
    return words[3] << 32 | words[0], stamp_of(words[1], words[2])


def stamp_of(nonce: int, epoch: int) -> int:
    """Return the stamp of routes with this nonce and this epoch."""
    return epoch << 32 | nonce


class FrameWriter:
    """Makes messages with the same route (job, channel and message type), each in a new buffer."""

    def __init__(self, route: bytes) -> None:
        self._header = bytearray(4) + route + bytes(12)
        view = memoryview(self._header)
        self._after_crc = view[4:]
        self._words = view.cast("I")
        self._longs = view.cast("Q")

    def frame(self, round: int, sequence: int, payload: bytes) -> bytearray:
        """Return a message with its header, which has this round and sequence number.

        ``payload`` is the encoded message.
        """
        self._words[5] = round
        self._longs[3] = sequence
        self._words[0] = _crc32.of_header_and_payload(self._words, self._after_crc, payload)
        return self._header + payload


class FrameBuffer:
    """Writes messages of the same route and size into one buffer. Each message overwrites the previous message."""

    def __init__(self, route: bytes, buffer: bytearray, payload_nbytes: int) -> None:
        view = memoryview(buffer)
        self._nbytes = HEADER_NBYTES + payload_nbytes
        self._payload = view[HEADER_NBYTES : self._nbytes]
        self._octets = view
        self._words = view.cast("I")
        self._longs = view.cast("Q")
        self._route = memoryview(bytearray(route)).cast("I")

    def write(self, round: int, sequence: int, payload: bytes) -> None:
        """Write a header with this round and sequence number, and the encoded message, into the buffer."""
        for position in range(4):
            self._words[1 + position] = self._route[position]
        self._words[5] = round
        self._longs[3] = sequence
        if len(payload) > _COPY_LOOP_NBYTES_MAX:
            self._payload[:] = payload
        else:
            for position in range(len(payload)):
                self._octets[_HEADER_NBYTES + position] = payload[position]
        self._words[0] = _crc32.of_frame(self._longs, self._octets, self._nbytes)


class FrameReader:
    """Checks messages that are received into one buffer. The attributes describe the last opened message.

    Attributes:
        buffer: Memory into which the messages are received.
        nbytes: Size of the last opened message in bytes, including its header.
        key, stamp: Two integers that identify the message's route (see :func:`keys_of`).
        payload: Encoded message, valid until the next one is received into the buffer.
    """

    def __init__(self, buffer: bytearray | memoryview) -> None:
        self.buffer = memoryview(buffer)
        self._octets = self.buffer
        self._words = self.buffer.cast("I")
        self._longs = self.buffer.cast("Q")
        self.nbytes = -1
        self.payload = self.buffer[:0]
        self.key = self.stamp = self.round = self.sequence = 0

    def open(self, nbytes: int) -> None:
        """Read the header of a message of ``nbytes`` bytes. Raise FrameError if the length or the CRC is wrong."""
        if nbytes != self.nbytes:  # Consecutive frames often have the same length.
            if nbytes < _HEADER_NBYTES:
                raise FrameError("too short", f"{nbytes} bytes, shorter than a header of {HEADER_NBYTES}")
            self.payload = self.buffer[HEADER_NBYTES:nbytes]
            self.nbytes = nbytes
        if self._words[0] != _crc32.of_frame(self._longs, self._octets, nbytes):
            raise FrameError("CRC mismatch")
        kind, nonce, epoch, scope = self._words[1], self._words[2], self._words[3], self._words[4]
        self.key = scope << 32 | kind
        self.stamp = epoch << 32 | nonce
        self.round = self._words[5]
        self.sequence = self._longs[3]

    def route(self) -> Route:
        """Return the route of the last opened message, which identifies its job, channel and message type."""
        return unpack_route(bytes(self.buffer[4:20]))

    def copy(self) -> FrameReader:
        """Return a reader with a copy of the last opened message."""
        buffer = bytearray(_rounded_up(self.nbytes))
        buffer[: self.nbytes] = self.buffer[: self.nbytes]
        copy = FrameReader(buffer)
        copy.open(self.nbytes)
        return copy


_SCALARS: Final = frozenset((bool, int, float, str, bytes))
#: Sentinel for "no previous message", because a caller may pass None, which must be rejected.
_NOTHING: Final = object()


class Codec:
    """Encodes the messages of one channel to bytes, and decodes them. Message types are identified by their index.

    The type of a field is ``bool``, ``int``, ``float``, ``str``, ``bytes``, ``None``, a union or tuple of these, or a
    frozen dataclass. An int in a float field arrives as a float, and a list in a tuple field as a tuple.

    Args:
        message_types: Frozen dataclass, or union of frozen dataclasses.

    Raises:
        TypeError: A type is not a frozen dataclass, or the type of a field cannot be sent.
    """

    def __init__(self, message_types: Any) -> None:
        union = typing.get_origin(message_types) in (typing.Union, types.UnionType)
        classes = typing.get_args(message_types) if union else (message_types,)
        #: Decoders in the order of the message types.
        self.decoders: tuple[Decode, ...] = tuple(map(_decoder, classes))
        #: The decoders, keyed by the lower 32 bits of the keys of the message types' routes (:func:`keys_of`).
        self.decoders_by_key = _decoders_by_key(self.decoders)
        self._by_type = _kinds_of(classes)
        self._last_type: type[Any] | None = None
        self._kind = -1
        self._plain_fields: tuple[tuple[str, type[Any]], ...] | None = None
        self._checked: Any = None
        # The last message is cached, because a broadcast sends the same message to many ranks in turn.
        self._last: Any = _NOTHING
        self._last_encoded = (-1, b"")
        self._last_is_fixed = False

    def encode(self, message: Any) -> tuple[int, bytes]:
        """Return the index of the message's type, and the encoded message.

        Raises:
            LocalProtocolError: The message is not of the channel's types, a field holds a value of the wrong type, or
                the message is too large.
        """
        if message is self._last:
            if self._last_is_fixed:
                return self._last_encoded
            self._last_is_fixed = _is_fixed(message)
        else:
            self._last_is_fixed = False
        if type(message) is not self._last_type:  # Consecutive messages often have the same type.
            entry = self._by_type.get(type(message))
            if entry is None:
                raise self._no_type_of_ours(message)
            self._kind, self._plain_fields = entry
            self._last_type = type(message)
        try:
            payload = _encode(message)
            if not self._is_plain(message) and not self._is_like_checked(message):
                decoded = self.decoders[self._kind](payload)  # The receiver makes the same check.
                self._checked = (
                    message if decoded == message else None
                )  # they differ if a tuple field holds a list, which may change later
        except Exception as error:  # wrong type, int over 64 bits, or an error of __post_init__
            raise LocalProtocolError(f"cannot send the message {message!r:.200}: {error}") from error
        if len(payload) > _PAYLOAD_NBYTES_MAX:
            raise LocalProtocolError(
                f"a {type(message).__name__} must take at most {PAYLOAD_NBYTES_MAX} bytes, got {len(payload)}; use "
                "send_stream for larger data",
                nbytes=len(payload),
                limit_nbytes=PAYLOAD_NBYTES_MAX,
            )
        self._last = message
        self._last_encoded = (self._kind, payload)
        return self._last_encoded

    def _is_plain(self, message: Any) -> bool:
        """Return whether each field's value has exactly the declared type, so that the receiver will accept it."""
        if self._plain_fields is None:
            return False
        for name, cls in self._plain_fields:  # noqa: SIM110 -- a generator expression takes longer
            if type(getattr(message, name)) is not cls:
                return False
        return True

    def _is_like_checked(self, message: Any) -> bool:
        """Return whether ``message`` needs no check, because all its fields match those of the last checked message.

        Two fields match if they are the same object, or scalars of the same type. This saves decoding the tuple of
        ranks that many messages share, which takes 60 us for a thousand ranks.
        """
        checked = self._checked
        if type(checked) is not type(message):
            return False
        for name in checked.__dataclass_fields__:
            value, known = getattr(message, name), getattr(checked, name)
            if value is not known and (type(value) is not type(known) or type(value) not in _SCALARS):
                return False
        return True

    def _no_type_of_ours(self, message: Any) -> LocalProtocolError:
        names = ", ".join(cls.__name__ for cls in self._by_type)
        return LocalProtocolError(f"the message must be of type {names}, got {type(message).__name__}")


def _is_fixed(value: Any) -> bool:
    """Return whether a message or a field's value is deeply immutable. A tuple that contains a list is not."""
    if type(value) in _SCALARS or value is None:
        return True
    if type(value) is tuple:
        return all(map(_is_fixed, value))
    parameters = getattr(type(value), "__dataclass_params__", None)
    if parameters is None or not parameters.frozen:
        return False
    return all(_is_fixed(getattr(value, name)) for name in value.__dataclass_fields__)


def _decoder(cls: Any) -> Decode:
    if not (isinstance(cls, type) and dataclasses.is_dataclass(cls) and cls.__dataclass_params__.frozen):  # type: ignore[attr-defined]
        raise TypeError(f"a message type must be a frozen dataclass, got {cls!r}")
    return _checked_decoder(cls)


@functools.cache
def _checked_decoder(cls: type[Any]) -> Decode:
    """Return the decoder of a message type. It is cached, because creating a decoder takes 100 us."""
    _check_fields(cls)
    return msgspec.msgpack.Decoder(cls).decode


@functools.cache
def _plain_fields(cls: type[Any]) -> tuple[tuple[str, type[Any]], ...] | None:
    """Return the name and type of each field, or None if the receiver checks more than these types."""
    hints = typing.get_type_hints(cls)
    fields = tuple((field.name, hints[field.name]) for field in dataclasses.fields(cls))
    is_plain = all(kind in (bool, int, float, str, bytes) for _, kind in fields) and not hasattr(cls, "__post_init__")
    return fields if is_plain else None


@functools.cache  # the channels of all ranks of a simulation share this
def _kinds_of(classes: tuple[Any, ...]) -> dict[type[Any], tuple[int, Any]]:
    """Return the index and the plain fields of each message type."""
    return {cls: (kind, _plain_fields(cls)) for kind, cls in enumerate(classes)}


@functools.cache  # the channels of all ranks of a simulation share this
def _decoders_by_key(decoders: tuple[Decode, ...]) -> dict[int, Decode]:
    return {keys_of(pack_route(kind, 0, 0, scope=0))[0]: decode for kind, decode in enumerate(decoders)}


def _check_fields(cls: type[Any], holders: tuple[type[Any], ...] = ()) -> None:
    """Raise TypeError if a field's type cannot be sent. ``holders`` are the classes that contain ``cls``."""
    if cls in holders:  # In compiled code, Python's recursion limit would not stop the recursion.
        raise TypeError(f"{cls.__name__} must not contain itself, because a message type must have bounded depth")
    hints = typing.get_type_hints(cls)
    for field in dataclasses.fields(cls):
        _check_type(hints[field.name], f"{cls.__name__}.{field.name}", (*holders, cls))


def _check_type(annotation: Any, where: str, holders: tuple[type[Any], ...]) -> None:
    origin = typing.get_origin(annotation)
    if annotation in (bool, int, float, str, bytes, None, type(None)):
        return
    if dataclasses.is_dataclass(annotation) and isinstance(annotation, type):
        _check_fields(annotation, holders)
    elif origin in (tuple, typing.Union, types.UnionType):
        for argument in typing.get_args(annotation):
            if argument is not Ellipsis:
                _check_type(argument, where, holders)
    else:
        name = annotation.__qualname__ if isinstance(annotation, type) else str(annotation)
        raise TypeError(
            f"the type of {where} must be bool, int, float, str, bytes, None, or a union, tuple or frozen dataclass of "
            f"these, got {name}. Use tuple[X, ...] instead of a list, send_stream for tensors, and "
            "compute_and_broadcast for dicts, sets and arrays"
        )


def cached_for_ranks(function: Callable[[tuple[int, ...]], T]) -> Callable[[tuple[int, ...]], T]:
    """Cache the results of a function whose argument is a tuple of ranks. The latest tuple is recognised by identity.

    Hashing thousands of ranks takes 0.1 ms, and each of a simulation's ranks would do it several times.
    """
    cached = functools.lru_cache(64)(function)
    latest: tuple[tuple[int, ...], T] | None = None

    @functools.wraps(function)
    def find(ranks: tuple[int, ...]) -> T:
        nonlocal latest
        found = latest
        if found is None or found[0] is not ranks:
            latest = found = ranks, cached(ranks)
        return found[1]

    return find


@cached_for_ranks
def text_of(group: tuple[int, ...]) -> str:
    """Return the group as a string. Unlike a tuple, a string stores its hash."""
    return repr(group)


def scope_of(group: Sequence[int], name: str, index: int) -> int:
    """Return a 32-bit hash of a group, a name and an index. It identifies a channel equally on all ranks."""
    return _scope_of(text_of(tuple(group)), name, index)


@functools.lru_cache(1024)  # Encoding a group of thousands of ranks is slow.
def _scope_of(group: str, name: str, index: int) -> int:
    return zlib.crc32(f"({group}, {name!r}, {index!r})".encode())
