"""Tests the frame format: each value is decoded to an equal value, and malformed bytes do no harm."""

from __future__ import annotations

import dataclasses
import math
import struct
from dataclasses import dataclass
from typing import Any, Optional

import msgspec
import pytest
from hypothesis import example, given, settings, strategies as st

from asyncdist.errors import LocalProtocolError
from asyncdist.messaging import wire
from asyncdist.messaging.wire import HEADER_NBYTES, Codec, FrameError

LIMITS = settings(max_examples=150, deadline=None)


@dataclass(frozen=True, slots=True)
class Point:
    x: float
    y: float


@dataclass(frozen=True)
class Everything:
    flag: bool
    count: int
    value: float
    text: str
    data: bytes
    nothing: None
    maybe: Optional[int]  # noqa: UP045 both spellings must work
    either: int | str | None
    numbers: tuple[float, ...]
    pair: tuple[int, str]
    point: Point
    path: tuple[Point, ...]
    grid: tuple[tuple[int, ...], ...]
    maybe_point: Point | None


@dataclass(frozen=True)
class Empty:
    pass


@dataclass(frozen=True)
class One:
    value: int


@dataclass(frozen=True)
class Picky:
    value: int

    def __post_init__(self) -> None:
        if self.value < 0:
            raise RuntimeError("picky")
        if self.value == 0:
            raise ValueError("zero")


@dataclass(frozen=True)
class HoldsPicky:
    inner: Picky


counted: list[int] = []


@dataclass(frozen=True)
class Counting:
    value: int
    numbers: tuple[int, ...]

    def __post_init__(self) -> None:
        counted.append(self.value)


INTS = st.integers(-(2**63), 2**64 - 1)
FLOATS = st.floats(allow_nan=True, allow_infinity=True)
TEXT = st.text(st.characters(exclude_categories=("Cs",)), max_size=20)
POINTS = st.builds(Point, FLOATS, FLOATS)
EVERYTHING = st.builds(
    Everything,
    st.booleans(),
    INTS,
    FLOATS,
    TEXT,
    st.binary(max_size=50),
    st.none(),
    st.none() | INTS,
    INTS | TEXT | st.none(),
    st.lists(FLOATS, max_size=5).map(tuple),
    st.tuples(INTS, TEXT),
    POINTS,
    st.lists(POINTS, max_size=3).map(tuple),
    st.lists(st.lists(INTS, max_size=3).map(tuple), max_size=3).map(tuple),
    st.none() | POINTS,
)


def same(one: Any, other: Any) -> bool:
    """Return whether values and types are equal at every depth; NaN equals NaN, and zeros need the same sign."""
    if type(one) is not type(other):
        return False
    if isinstance(one, float):
        return struct.pack("<d", one) == struct.pack("<d", other) or (math.isnan(one) and math.isnan(other))
    if isinstance(one, tuple):
        return len(one) == len(other) and all(map(same, one, other))
    if dataclasses.is_dataclass(one):
        return all(same(getattr(one, f.name), getattr(other, f.name)) for f in dataclasses.fields(one))
    return bool(one == other)


def round_trip(message: Any) -> Any:
    codec = Codec(type(message))
    kind, payload = codec.encode(message)
    return codec.decoders[kind](memoryview(payload))


# ------------------------------------------------------------------------------------------------------- round trips


@pytest.mark.slow
@LIMITS
@given(EVERYTHING)
def test_every_message_comes_back_unchanged(message: Everything) -> None:
    assert same(round_trip(message), message)


def test_messages_of_no_field_and_of_one_field() -> None:
    assert round_trip(Empty()) == Empty()
    assert round_trip(One(5)) == One(5)
    assert round_trip(HoldsPicky(Picky(3))) == HoldsPicky(Picky(3))


@pytest.mark.slow
@LIMITS
@given(st.data())
def test_any_dataclass_of_supported_types(data: st.DataObject) -> None:
    """The classes are drawn too: up to five fields of types drawn from the whole supported grammar."""
    scalars = [(bool, st.booleans()), (int, INTS), (float, FLOATS), (str, TEXT), (bytes, st.binary(max_size=9))]

    def draw_type(depth: int) -> tuple[Any, st.SearchStrategy[Any]]:
        kind = data.draw(
            st.sampled_from(["scalar"] if depth == 0 else ["scalar", "many", "fixed", "optional", "class"])
        )
        if kind == "scalar":
            return data.draw(st.sampled_from(scalars))
        if kind == "class":
            return draw_class(depth - 1)
        if kind == "fixed":
            parts = [draw_type(depth - 1) for _ in range(data.draw(st.integers(1, 3)))]
            return tuple[tuple(part for part, _ in parts)], st.tuples(*(values for _, values in parts))  # type: ignore[misc]
        inner, values = draw_type(depth - 1)
        if kind == "many":
            return tuple[inner, ...], st.lists(values, max_size=3).map(tuple)
        return Optional[inner], st.none() | values  # noqa: UP045

    def draw_class(depth: int) -> tuple[Any, st.SearchStrategy[Any]]:
        parts = [draw_type(depth) for _ in range(data.draw(st.integers(0, 4)))]
        cls = dataclasses.make_dataclass(
            "Drawn", [(f"f{i}", part) for i, (part, _) in enumerate(parts)], frozen=True, slots=data.draw(st.booleans())
        )
        return cls, st.tuples(*(values for _, values in parts)).map(lambda values: cls(*values))

    _, messages = draw_class(3)
    message = data.draw(messages)
    assert same(round_trip(message), message)


@dataclass(frozen=True)
class Real:
    value: float


@dataclass(frozen=True)
class RealFirst:
    value: float | int
    values: tuple[float | int | None, ...] = ()


def test_an_int_where_a_float_is_declared_travels_as_a_float() -> None:
    found = round_trip(Real(3))
    assert type(found.value) is float
    assert found.value == 3.0
    with pytest.raises(LocalProtocolError, match=r"cannot send the message Real\(value=10+"):
        Codec(Real).encode(Real(10**400))
    with pytest.raises(LocalProtocolError, match=r"Expected `float`, got `bool` - at `\$.value`"):
        Codec(Real).encode(Real(True))


def test_a_list_travels_as_the_tuple_that_is_declared() -> None:
    assert same(round_trip(RealFirst(1, [1, 0.5])), RealFirst(1, (1, 0.5)))  # type: ignore[arg-type]


def test_an_int_stays_exact_where_a_union_allows_it_in_any_order() -> None:
    message = RealFirst(2**60 + 1, (2**60 + 1, 0.5, None, 2))
    assert same(round_trip(message), message)


@pytest.mark.parametrize("value", [2**64, -(2**63) - 1, 10**30])
def test_ints_beyond_64_bits_are_refused(value: int) -> None:
    with pytest.raises(LocalProtocolError):
        Codec(One).encode(One(value))
    assert round_trip(One(7)) == One(7), "a failed encoding must not affect the next one"


@pytest.mark.parametrize(
    ("message", "words"),
    [
        (One("5"), r"One\(value='5'\): Expected `int`, got `str` - at `\$.value`"),  # type: ignore[arg-type]
        (One(True), r"One\(value=True\): Expected `int`, got `bool`"),
        (One(5.5), "Expected `int`, got `float`"),  # type: ignore[arg-type]
        (One(None), "Expected `int`, got `None`"),  # type: ignore[arg-type]
        (Point("1", 2.0), r"Expected `float`, got `str` - at `\$.x`"),  # type: ignore[arg-type]
        (HoldsPicky(Point(1.0, 2.0)), r"`\$.inner`"),  # type: ignore[arg-type]
    ],
)
def test_value_of_the_wrong_type_is_refused_before_it_is_sent(message: Any, words: str) -> None:
    with pytest.raises(LocalProtocolError, match=words):
        Codec(type(message)).encode(message)


@pytest.mark.parametrize("change", [{"numbers": ("1",)}, {"pair": (1, "x", 2)}, {"pair": (1, 2)}, {"text": "\ud800"}])
def test_a_wrong_value_deep_inside_is_refused(change: dict[str, Any]) -> None:
    good = Everything(True, 1, 1.0, "", b"", None, None, None, (1.0,), (1, ""), Point(0.0, 0.0), (), ((),), None)
    Codec(Everything).encode(good)
    with pytest.raises(LocalProtocolError):
        Codec(Everything).encode(dataclasses.replace(good, **change))


def test_parts_shared_with_the_last_message_are_not_rechecked() -> None:
    counted.clear()
    codec, numbers = Codec(Counting), tuple(range(5))
    for value in range(3):
        message = Counting(value, numbers)
        counted.clear()
        _, payload = codec.encode(message)
        assert len(counted) == (value == 0), "only the first encoding may check its result, which makes another message"
        assert codec.decoders[0](payload) == message


@pytest.mark.parametrize(
    ("first", "then"),
    [
        (RealFirst(1.0, (1.0,)), RealFirst("1.0", (1.0,))),  # type: ignore[arg-type]
        (RealFirst(1.0, (1.0,)), RealFirst(1.0, ("1.0",))),  # type: ignore[arg-type]
        (RealFirst(1.0, (1.0,)), RealFirst(True, (1.0,))),
    ],
)
def test_what_differs_from_the_last_message_is_checked(first: RealFirst, then: RealFirst) -> None:
    codec = Codec(RealFirst)
    codec.encode(first)
    with pytest.raises(LocalProtocolError):
        codec.encode(then)


def test_list_changed_since_the_last_message_is_checked() -> None:
    codec, numbers = Codec(RealFirst), [1.0]
    codec.encode(RealFirst(1.0, numbers))  # type: ignore[arg-type]
    numbers.append("2.0")  # type: ignore[arg-type]
    with pytest.raises(LocalProtocolError):
        codec.encode(RealFirst(1.0, numbers))  # type: ignore[arg-type]


def test_immutable_message_to_many_ranks_is_packed_once() -> None:
    codec = Codec(RealFirst | One)
    numbers = RealFirst(0.0, (1.0, 2.0))
    kind, payload = codec.encode(numbers)
    codec.encode(numbers)
    assert codec.encode(numbers)[1] is codec.encode(numbers)[1]
    assert codec.encode(numbers) == (kind, payload)
    assert codec.encode(One(1)) != codec.encode(One(2)), "another message must be packed anew"
    assert codec.encode(numbers) == (kind, payload)
    nothing: Codec = Codec(One)
    for _ in range(3):
        with pytest.raises(LocalProtocolError, match=r"One.*got NoneType"):
            nothing.encode(None)
    changing: Any = [1.0, 2.0]
    message = RealFirst(0.0, changing)
    for _ in range(3):
        assert codec.encode(message) == (kind, payload)
    changing.append(3.0)
    assert codec.encode(message)[1] == codec.encode(RealFirst(0.0, (1.0, 2.0, 3.0)))[1]
    changing.append("a text")
    with pytest.raises(LocalProtocolError):
        codec.encode(message)


@dataclass
class NotFrozen:
    value: int


@dataclass(frozen=True)
class HasList:
    values: list[int]


@dataclass(frozen=True)
class HasAny:
    value: Any


@dataclass(frozen=True)
class HasBareTuple:
    value: tuple  # type: ignore[type-arg]


@dataclass(frozen=True)
class Vector:
    x: float
    y: float


@dataclass(frozen=True)
class Ambiguous:
    """Both types are maps on the wire, so the receiver could not distinguish them."""

    value: Point | Vector | None


@dataclass(frozen=True)
class Tree:
    children: tuple[Tree, ...]


@pytest.mark.parametrize(
    "cls",
    [NotFrozen, HasList, HasAny, HasBareTuple, int, dict, "Point", Ambiguous, Tree],
    ids=lambda cls: getattr(cls, "__name__", str(cls)),
)
def test_what_cannot_travel_is_refused_when_the_type_is_declared(cls: Any) -> None:
    with pytest.raises(TypeError):
        Codec(cls)


def test_a_message_above_the_limit_names_both_numbers() -> None:
    @dataclass(frozen=True)
    class Blob:
        data: Any

    Blob.__annotations__["data"] = bytes
    entry = Codec(Blob)
    limit = wire.PAYLOAD_NBYTES_MAX
    overhead = len(entry.encode(Blob(bytes(60_000)))[1]) - 60_000
    _, largest = entry.encode(Blob(bytes(limit - overhead)))
    assert len(largest) + HEADER_NBYTES == wire.FRAME_NBYTES_MAX
    with pytest.raises(LocalProtocolError) as caught:
        entry.encode(Blob(bytes(limit - overhead + 1)))
    assert (caught.value.nbytes, caught.value.limit_nbytes) == (limit + 1, limit)
    assert str(limit + 1) in str(caught.value)
    assert str(limit) in str(caught.value)


def test_a_codec_tells_its_types_apart_and_refuses_others() -> None:
    codec = Codec(One | Point | Empty)
    for message in (One(1), Point(1.0, 2.0), Empty()):
        kind, payload = codec.encode(message)
        assert same(codec.decoders[kind](memoryview(payload)), message)
    with pytest.raises(LocalProtocolError, match="One, Point, Empty, got Picky"):
        codec.encode(Picky(1))
    assert len(codec.decoders) == 3


# ------------------------------------------------------------------------------------------------------ hostile bytes


def frame_of(payload: bytes, kind: int = 0) -> bytes:
    return bytes(wire.FrameWriter(wire.pack_route(kind, nonce=1, epoch=0, scope=2)).frame(3, 4, payload))


def read(frame: bytes) -> wire.FrameReader:
    reader = wire.FrameReader(bytearray(frame) + bytes(-len(frame) % 8))
    reader.open(len(frame))
    return reader


def receive(codec: Codec, frame: bytes) -> Any:
    """Decode a frame as the receiving end of a channel does, or raise FrameError."""
    reader = read(frame)
    route = reader.route()
    if route.version != wire.VERSION or route.kind >= len(codec.decoders):
        raise FrameError("no such route")
    try:
        return codec.decoders[route.kind](reader.payload)
    except Exception as error:
        raise FrameError(str(error)) from error


VICTIM = Codec(Everything | HoldsPicky | Empty)


def test_a_header_comes_back_unchanged() -> None:
    route = wire.pack_route(255, 2**32 - 1, 2**32 - 2, 2**32 - 3)
    frame = wire.FrameWriter(route).frame(2**32 - 4, 2**64 - 1, b"payload")
    for reader in (read(frame), read(frame).copy()):
        assert (reader.round, reader.sequence, bytes(reader.payload)) == (2**32 - 4, 2**64 - 1, b"payload")
        assert (reader.key, reader.stamp) == wire.keys_of(route)
        assert reader.route() == wire.unpack_route(route)
    assert wire.unpack_route(route) == (wire.VERSION, 255, 0, 2**32 - 1, 2**32 - 2, 2**32 - 3)
    assert frame[HEADER_NBYTES:] == b"payload"


def test_every_flip_of_a_byte_and_every_truncation_is_noticed() -> None:
    kind, payload = VICTIM.encode(HoldsPicky(Picky(77)))
    frame = frame_of(payload, kind=kind)
    assert receive(VICTIM, frame) == HoldsPicky(Picky(77))
    for position in range(len(frame)):
        for mask in (1, 0x80, 0xFF):
            bad = bytearray(frame)
            bad[position] ^= mask
            with pytest.raises(FrameError):
                receive(VICTIM, bytes(bad))
    for length in range(len(frame)):
        with pytest.raises(FrameError):
            receive(VICTIM, frame[:length])
    with pytest.raises(FrameError):
        receive(VICTIM, frame + b"\0")


@LIMITS
@given(st.binary(max_size=200))
def test_random_bytes_are_no_frame(data: bytes) -> None:
    with pytest.raises(FrameError):
        receive(VICTIM, data)


@pytest.mark.slow
@settings(max_examples=500, deadline=None)
@given(st.binary(max_size=100), st.integers(0, 255))
@example(b"\x81\xa5inner\x81\xa5value\x00", 1)  # a nested dataclass that refuses its value
@example(b"\x81\xa5inner\x81\xa5value\xff", 1)
@example(b"\xdf\xff\xff\xff\xff", 0)
@example(b"\x81\xa7numbers\xdd\xff\xff\xff\xff", 0)
@example(b"\xc1", 0)
@example(b"\x91" * 2000, 0)
@example(b"\xdd\xff\xff\xff\xff", 0)
@example(b"\xc6\xff\xff\xff\xff", 0)
@example(b"\xd6\xff\0\0\0\0", 0)  # a timestamp
@example(b"\xc7\x01\x05x", 0)  # an extension type
@example(b"\x81\x90\x90", 0)  # a map with an invalid key
@example(b"\x91\xa1\xff", 0)  # invalid UTF-8
def test_payload_with_a_valid_checksum_raises_only_frame_errors(payload: bytes, kind: int) -> None:
    try:
        message = receive(VICTIM, frame_of(payload, kind=kind))
    except FrameError:
        return
    assert type(message) in (Everything, HoldsPicky, Empty)
    assert (
        payload == VICTIM.encode(message)[1]
        or message == Empty()
        or same(message, receive(VICTIM, frame_of(payload, kind=kind)))
    )


FIELD_NAMES = [field.name for cls in (Everything, HoldsPicky, Picky) for field in dataclasses.fields(cls)]
VALUES = st.recursive(
    st.none() | st.booleans() | INTS | FLOATS | TEXT | st.binary(max_size=9),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(TEXT, inner, max_size=2),
    max_leaves=12,
)


@pytest.mark.slow
@settings(max_examples=300, deadline=None)
@given(st.dictionaries(st.sampled_from(FIELD_NAMES), VALUES), st.sampled_from([0, 1, 2]))
def test_well_formed_wrong_types_raise_only_frame_errors(values: dict[str, Any], kind: int) -> None:
    try:
        message = receive(VICTIM, frame_of(msgspec.msgpack.encode(values), kind=kind))
    except FrameError:
        return
    assert same(round_trip(message), message), "an accepted message must be one that could have been sent"


def test_scopes_differ_in_group_name_and_index() -> None:
    scopes = {
        wire.scope_of(group, name, index) for group in ((0, 1), (1, 0), (0,)) for name in "ab" for index in (1, 2)
    }
    assert len(scopes) == 12
    assert wire.scope_of([0, 1], "a", 1) == wire.scope_of((0, 1), "a", 1)
    assert all(0 <= scope < 2**32 for scope in scopes)
