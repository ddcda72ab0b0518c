"""The frame format: a fixed header, then one msgpack array with the fields of a frozen dataclass.

Every frame is checked before anything is believed: its length, version, CRC32 and kind, then the type of every field.
What fails raises :class:`FrameError`, a value that says why, and never anything else, whatever the bytes. Nothing is
pickled and no frame can make this rank allocate more than its own length.

Field types: ``bool int float str bytes None``, unions of them, ``tuple[X, ...]``, ``tuple[X, Y]`` and further frozen
dataclasses. An int where a float is declared is sent as a float.
"""

from __future__ import annotations

import dataclasses
import functools
import operator
import struct
import types
import typing
import zlib
from collections.abc import Callable, Sequence
from typing import Any, Final, NamedTuple

import msgpack

from asyncdist.errors import LocalProtocolError

VERSION: Final = 1
ROUND_MAX: Final = 0xFFFFFFFF
FRAME_NBYTES_MAX: Final = 65536

#: The CRC32 of all that follows it; then version, kind, reserved, job nonce, epoch, scope, round and sequence.
_HEADER: Final = struct.Struct("<IBBHIIIIQ")
_AFTER_CRC: Final = struct.Struct("<BBHIIIIQ")
_CRC: Final = struct.Struct("<I")
HEADER_NBYTES: Final = _HEADER.size
PAYLOAD_NBYTES_MAX: Final = FRAME_NBYTES_MAX - HEADER_NBYTES

_pack: Final = msgpack.Packer(autoreset=True).pack


class FrameError(ValueError):
    """A frame that is not to be believed; the text says why."""


class Header(NamedTuple):
    """What precedes every message.

    Attributes:
        crc: CRC32 of everything after it.
        version: of the frame format.
        kind: index of the message type among those of its channel.
        reserved: zero.
        nonce: drawn once per job, so that frames of another job are strangers.
        epoch: of the coordinator (zero until one has been replaced).
        scope: whose frame this is: group, name and creation index, hashed.
        round: of the protocol; zero outside rounds.
        sequence: counts the channel's sends, so that a frame out of order is seen.
    """

    crc: int
    version: int
    kind: int
    reserved: int
    nonce: int
    epoch: int
    scope: int
    round: int
    sequence: int


#: Half the time of Header._make, which is called once per message.
_as_header: Final[Callable[[Any], Header]] = functools.partial(tuple.__new__, Header)


def encode_frame(kind: int, nonce: int, epoch: int, scope: int, round: int, sequence: int, payload: bytes) -> bytes:
    """One frame as bytes. ``payload`` is what :meth:`MessageType.encode` made."""
    body = _AFTER_CRC.pack(VERSION, kind, 0, nonce, epoch, scope, round, sequence) + payload
    return _CRC.pack(zlib.crc32(body)) + body


def decode_header(frame: memoryview) -> Header:
    """Check length, version and CRC, and return the header. The payload is ``frame[HEADER_NBYTES:]``.

    Raises:
        FrameError: the frame is not to be believed.
    """
    if len(frame) < HEADER_NBYTES:
        raise FrameError(f"{len(frame)} bytes, shorter than a header of {HEADER_NBYTES}")
    header = _as_header(_HEADER.unpack_from(frame))
    if header.version != VERSION:
        raise FrameError(f"version {header.version}, not {VERSION}")
    if header.crc != zlib.crc32(frame[_CRC.size :]):
        raise FrameError("CRC mismatch")
    return header


_Convert = Callable[[Any], Any]


class MessageType:
    """Packs and unpacks one frozen dataclass.

    Raises:
        TypeError: ``cls`` is no frozen dataclass, or a field's type cannot travel.
    """

    def __init__(self, cls: type[Any]) -> None:
        if not (dataclasses.is_dataclass(cls) and cls.__dataclass_params__.frozen):  # type: ignore[attr-defined]
            raise TypeError(f"a message is a frozen dataclass; {cls!r} is none")
        fields = dataclasses.fields(cls)
        hints = typing.get_type_hints(cls)
        annotations = [hints[field.name] for field in fields]
        self.cls = cls
        self._names = tuple(field.name for field in fields)
        typed = [(a, f"{cls.__name__}.{name}") for a, name in zip(annotations, self._names, strict=True)]
        try:
            self._to_wire = tuple(_converter(annotation, where, outward=True) for annotation, where in typed)
            self._from_wire = tuple(_converter(annotation, where, outward=False) for annotation, where in typed)
        except RecursionError:
            raise TypeError(f"{cls.__name__} contains itself; only types of bounded depth can travel") from None
        # Most messages hold plain scalars: comparing the types of all fields at once is the whole check then.
        self._plain = tuple(annotations) if all(a in (bool, int, float, str, bytes) for a in annotations) else None
        self._values = _field_getter(self._names)

    def encode(self, message: Any) -> bytes:
        """The payload for ``message``.

        Raises:
            LocalProtocolError: a field holds a value of the wrong type, or the message is above the limit.
        """
        values = self._values(message)
        if tuple(map(type, values)) != self._plain:
            try:
                values = tuple(convert(value) for convert, value in zip(self._to_wire, values, strict=True))
            except FrameError as error:
                raise LocalProtocolError(f"cannot send {message!r}: {error}") from None
        try:
            payload: bytes = _pack(values)
        except (
            OverflowError,
            ValueError,
            UnicodeError,
        ) as error:  # an int beyond 64 bits, a lone surrogate, deep nesting
            raise LocalProtocolError(f"cannot send {self.cls.__name__}: {error}") from error
        if len(payload) > PAYLOAD_NBYTES_MAX:
            raise LocalProtocolError(
                f"{self.cls.__name__} takes {len(payload)} bytes; a message may have {PAYLOAD_NBYTES_MAX} "
                "(send_stream carries more)",
                nbytes=len(payload),
                limit_nbytes=PAYLOAD_NBYTES_MAX,
            )
        return payload

    def decode(self, payload: memoryview) -> Any:
        """The message in ``payload``.

        Raises:
            FrameError: it does not decode, or a field has the wrong type.
        """
        try:
            values = msgpack.unpackb(payload, use_list=False)
        except Exception as error:  # the library's errors share no base; the bytes are a stranger's
            raise FrameError(f"msgpack: {type(error).__name__} {error}".rstrip()) from None
        if type(values) is not tuple or len(values) != len(self._names):
            raise FrameError(f"not the {len(self._names)} fields of {self.cls.__name__}")
        try:
            if tuple(map(type, values)) != self._plain:
                values = tuple(convert(value) for convert, value in zip(self._from_wire, values, strict=True))
            return self.cls(*values)
        except FrameError:
            raise
        except Exception as error:  # a __post_init__, its own or a nested one's, met values that it refuses
            raise FrameError(f"{self.cls.__name__}: {type(error).__name__} {error}") from None


def _field_getter(names: Sequence[str]) -> Callable[[Any], tuple[Any, ...]]:
    if len(names) > 1:
        return operator.attrgetter(*names)
    if names:
        return lambda message: (getattr(message, names[0]),)
    return lambda _message: ()


def _converter(annotation: Any, where: str, *, outward: bool) -> _Convert:
    """A function that checks one value against ``annotation`` and turns it into, or from, its form on the wire."""
    if annotation is float:
        return _float_converter(where)
    if annotation in (bool, int, str, bytes, None, type(None)):
        return _scalar_converter(annotation if annotation is not None else type(None), where)
    origin = typing.get_origin(annotation)
    if origin in (typing.Union, types.UnionType):
        return _union_converter(annotation, where, outward=outward)
    if origin is tuple:
        return _tuple_converter(typing.get_args(annotation), where, outward=outward)
    if dataclasses.is_dataclass(annotation) and isinstance(annotation, type):
        return _nested_converter(annotation, where, outward=outward)
    raise TypeError(f"{where}: a value of type {annotation!r} cannot travel in a message")


def _float_converter(where: str) -> _Convert:
    def convert(value: Any) -> float:
        if type(value) not in (float, int):
            raise FrameError(f"{where} is {type(value).__name__}, not float")
        try:
            return float(value)
        except OverflowError:
            raise FrameError(f"{where} is too large for a float") from None

    return convert


def _scalar_converter(expected: type[Any], where: str) -> _Convert:
    def convert(value: Any) -> Any:
        if type(value) is not expected:
            raise FrameError(f"{where} is {type(value).__name__}, not {expected.__name__}")
        return value

    return convert


def _union_converter(annotation: Any, where: str, *, outward: bool) -> _Convert:
    members = sorted(typing.get_args(annotation), key=lambda member: member is float)  # which would take ints as well
    arrays = [m for m in members if typing.get_origin(m) is tuple or dataclasses.is_dataclass(m)]
    if len(arrays) > 1:
        raise TypeError(f"{where}: only one of {annotation} may be a tuple or dataclass; on the wire they look alike")
    choices = [_converter(member, where, outward=outward) for member in members]

    def convert(value: Any) -> Any:
        for choice in choices:
            try:
                return choice(value)
            except FrameError:
                continue
        raise FrameError(f"{where} is {type(value).__name__}, not {annotation}")

    return convert


def _tuple_converter(arguments: tuple[Any, ...], where: str, *, outward: bool) -> _Convert:
    open_ended = len(arguments) == 2 and arguments[1] is Ellipsis
    items = [_converter(a, where, outward=outward) for a in (arguments[:1] if open_ended else arguments)]

    def convert(value: Any) -> tuple[Any, ...]:
        if type(value) is not tuple:
            raise FrameError(f"{where} is {type(value).__name__}, not tuple")
        if open_ended:
            return tuple(map(items[0], value))
        if len(value) != len(items):
            raise FrameError(f"{where} has {len(value)} items, not {len(items)}")
        return tuple(item(v) for item, v in zip(items, value, strict=True))

    return convert


def _nested_converter(cls: type[Any], where: str, *, outward: bool) -> _Convert:
    inner = MessageType(cls)

    def to_wire(value: Any) -> tuple[Any, ...]:
        if type(value) is not cls:
            raise FrameError(f"{where} is {type(value).__name__}, not {cls.__name__}")
        return tuple(convert(v) for convert, v in zip(inner._to_wire, inner._values(value), strict=True))

    def from_wire(value: Any) -> Any:
        if type(value) is not tuple or len(value) != len(inner._names):
            raise FrameError(f"{where} is not the {len(inner._names)} fields of {cls.__name__}")
        return cls(*(convert(v) for convert, v in zip(inner._from_wire, value, strict=True)))

    return to_wire if outward else from_wire


class Codec:
    """The message types of one channel, each known on the wire by its index.

    Args:
        message_types: one frozen dataclass, or a union of them.
    """

    def __init__(self, message_types: Any) -> None:
        union = typing.get_origin(message_types) in (typing.Union, types.UnionType)
        members = typing.get_args(message_types) if union else (message_types,)
        self._types = tuple(MessageType(cls) for cls in members)
        self._kinds = {entry.cls: (kind, entry.encode) for kind, entry in enumerate(self._types)}

    def encode(self, message: Any) -> tuple[int, bytes]:
        """Kind and payload of ``message``.

        Raises:
            LocalProtocolError: it is none of the channel's types, or cannot be encoded.
        """
        try:
            kind, encode = self._kinds[type(message)]
        except KeyError:
            names = ", ".join(entry.cls.__name__ for entry in self._types)
            raise LocalProtocolError(f"this channel carries {names}, not {type(message).__name__}") from None
        return kind, encode(message)

    def decode(self, kind: int, payload: memoryview) -> Any:
        """The message of that kind.

        Raises:
            FrameError: unknown kind, or the payload is not that message.
        """
        if kind >= len(self._types):
            raise FrameError(f"kind {kind}, of {len(self._types)} known")
        return self._types[kind].decode(payload)


def scope_of(group: Sequence[int], name: str, index: int) -> int:
    """The 32-bit scope of the ``index``-th user of ``name`` on ``group``; equal on all ranks."""
    return zlib.crc32(repr((tuple(group), name, index)).encode())
