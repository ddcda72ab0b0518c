"""Defines the valid content of a recording. Each header and each event is checked against it.

A recording is untrusted input: another version, a damaged disk or an attacker may have produced it. msgspec decodes the
bytes directly into the types below and rejects everything else, so a few bytes cannot allocate gigabytes.
"""

from __future__ import annotations

import functools
import operator
import re
from collections.abc import Callable, Mapping, Sequence
from types import GenericAlias
from typing import Annotated, Any, Final, Literal, NoReturn, TypeAlias

import msgpack
import msgspec
from msgspec import Meta, Struct

from asyncdist.recording.events import COUNT_MAX, KINDS, Event
from asyncdist.validation import printable

#: Maximum number of ranks of a job.
SIZE_MAX: Final = 1 << 16
#: Maximum size of a header or a block, in bytes. Writers produce blocks of 32 KiB, or larger blocks for long events.
OBJECT_NBYTES_MAX: Final = 1 << 22
#: Maximum times on a monotonic clock (some 300 years) and on the wall clock (the year 9999), in seconds.
CLOCK_S_MAX: Final = 1e10
_UNIX_S_MAX: Final = 253402300799.0

Count: TypeAlias = Annotated[int, Meta(ge=0, le=COUNT_MAX)]
Text: TypeAlias = Annotated[str, Meta(max_length=1 << 20)]
Seconds: TypeAlias = Annotated[float, Meta(ge=0, le=CLOCK_S_MAX)]
Clock: TypeAlias = Annotated[float, Meta(ge=-CLOCK_S_MAX, le=CLOCK_S_MAX)]
#: A number that every table format can represent. NaN and infinity are allowed, because a run may diverge.
Number: TypeAlias = Annotated[int, Meta(ge=-(1 << 53), le=1 << 53)] | float
#: Fields of a :class:`asyncdist.waits.WaitId`. A recording of another version may contain other kinds of waits.
_Wait: TypeAlias = tuple[
    Annotated[str, Meta(pattern=r"^[a-z][a-z_]{0,63}\Z")],
    Count | None,
    Annotated[int, Meta(ge=0, lt=SIZE_MAX)] | None,
    Annotated[int, Meta(ge=-(1 << 53), le=1 << 53)] | None,
    Text,
]
#: Value of a field that this version does not know.
_Other: TypeAlias = bool | int | float | Text | list[int | float] | None
#: Name of a job, which is the prefix of its files. If any name were valid, a forged recording could replace any file
#: ``NAME.html``.
_Job: TypeAlias = Annotated[str, Meta(pattern=r"^[0-9a-f]{8}\Z")]
_Name: TypeAlias = Annotated[str, Meta(pattern=r"^[a-z][a-z_]{0,31}\Z")]


class RecordedCapabilities(Struct, frozen=True):
    """Stores the capabilities of a recorded rank's transport (:class:`asyncdist.transports.base.Capabilities`)."""

    native_collectives: bool
    survives_rank_loss: bool
    tag_max: Count
    shares_process: bool = False
    one_sided_reads: bool = False
    shares_memory: bool = False
    written_share: Annotated[float, Meta(ge=0, le=1)] = 0.0


class RandomStates(Struct, frozen=True):
    """Stores the initial states of a rank's random generators, as Python, numpy and torch return them.

    ``numpy`` is None if numpy's global generator is not an MT19937.
    """

    python: tuple[
        Literal[3],
        Annotated[list[Annotated[int, Meta(ge=0, lt=1 << 32)]], Meta(min_length=625, max_length=625)],
        float | None,
    ]
    numpy: (
        tuple[
            Literal["MT19937"],
            Annotated[bytes, Meta(min_length=2496, max_length=2496)],
            Annotated[float, Meta(ge=0, le=624)],
            Annotated[float, Meta(ge=0, le=1)],
            float,
        ]
        | None
    )
    torch: Annotated[bytes, Meta(max_length=1 << 16)]

    def __post_init__(self) -> None:
        if self.python[1][-1] > 624:
            raise ValueError(f"the position in random.python must be from 0 to 624, got {self.python[1][-1]}")


class Header(Struct, frozen=True, kw_only=True):
    """Defines the header of a rank's file, as :func:`asyncdist.recording.writer.header_of` writes it.

    Attributes:
        asyncdist: Version of asyncdist.
        sources: Checksum of asyncdist's source files (:mod:`asyncdist.recording.sources`); None in earlier recordings.
        script, script_digest, arguments: Path of the program, its SHA-256 and its arguments.
        clock_s, unix_s: The same moment on the event clock and on the wall clock, in seconds.
        kinds: Field names of the events of each kind, keyed by kind.
    """

    job: _Job
    rank: Count
    size: Annotated[int, Meta(ge=1, le=SIZE_MAX)]
    incarnation: Annotated[int, Meta(ge=0, le=1 << 20)]
    transport: Text
    hostname: Text
    pid: Annotated[int, Meta(ge=0, le=1 << 32)]
    asyncdist: Annotated[str, Meta(max_length=80)]
    sources: Annotated[int, Meta(ge=0, lt=1 << 32)] | None = None
    script: Text
    module: Text = ""
    script_digest: Annotated[str, Meta(pattern=r"^([0-9a-f]{64})?\Z")]
    arguments: list[Text]
    clock_s: Clock
    unix_s: Annotated[float, Meta(ge=0, le=_UNIX_S_MAX)]
    kinds: Annotated[dict[_Name, Annotated[list[_Name], Meta(max_length=64)]], Meta(max_length=256)]

    def __post_init__(self) -> None:
        if self.rank >= self.size:
            raise ValueError(f"rank must be from 0 to {self.size - 1} with size {self.size}, got {self.rank}")


class Conditions(Struct, frozen=True, kw_only=True):
    """Stores the initial conditions of a rank, read from the header of its file. A replay starts with them.

    Attributes:
        hosts: For each rank, the lowest rank on its host. None if all ranks are on one host.
        first_seed: torch's initial seed at import, or None if it is not recorded.
        sent_before_count: Number of messages sent before the world was open.
        tells_sleeps: Whether the file records when asyncio's timers fired.
    """

    torch: Text
    nonce: int
    capabilities: RecordedCapabilities
    thread_count: Annotated[int, Meta(ge=1, le=4096)]
    random: RandomStates
    size: Annotated[int, Meta(ge=1, le=SIZE_MAX)]
    hosts: list[Annotated[int, Meta(ge=0, lt=SIZE_MAX)]] | None = None
    first_seed: int | None = None
    sent_before_count: Count = 0
    tells_sleeps: bool = False

    def __post_init__(self) -> None:
        if self.hosts is not None and (len(self.hosts) != self.size or max(self.hosts) >= self.size):
            raise ValueError(
                f"hosts must have {self.size} entries, each of them a rank from 0 to {self.size - 1}, "
                f"got {self.hosts!r:.80}"
            )


class Preamble(Struct, frozen=True):
    """Defines the part of a header that identifies a recording and the version of its format."""

    format: Any = None
    version: Any = None
    asyncdist: Any = None


read_header: Final = msgspec.msgpack.Decoder(Header).decode
read_conditions: Final = msgspec.msgpack.Decoder(Conditions).decode
read_preamble: Final = msgspec.msgpack.Decoder(Preamble).decode

#: Number of fields that are always present, for kinds of events whose last fields are optional.
_REQUIRED_COUNTS: Final[Mapping[str, int]] = {"safe_point": 2, "received": 3, "applied": 10}
_OFFSET: Final = Annotated[int, Meta(ge=-(10**16), le=10**16)]


def _types_of_fields(size: int) -> Mapping[str, Any]:
    """Return the types of event fields for ``size`` ranks, keyed by field name or by ``kind.field``."""
    rank = Annotated[int, Meta(ge=0, lt=size)]
    rank_or_none = Annotated[int, Meta(ge=-1, lt=size)]
    ranks = Annotated[list[rank], Meta(max_length=size)]
    return {
        **dict.fromkeys(("policy", "round", "iteration", "epoch", "incarnation", "line"), Count),
        **dict.fromkeys(("average_every", "model_nbytes", "ranks", "nbytes", "tag"), Count),
        **dict.fromkeys(("fragment", "version", "wire_nbytes", "unencoded_nbytes"), Count),
        "staleness_versions": Count | None,
        **dict.fromkeys(("turn", "turns", "woken", "begun"), Count),
        **dict.fromkeys(("class_name", "name", "state", "reason", "error", "why", "story"), Text),
        **dict.fromkeys(("rank", "source", "dest", "group"), rank),
        "donor": rank_or_none,
        "coordinator": rank_or_none | None,
        "staleness_steps": Count | None,
        "route": Text | None,
        **dict.fromkeys(("donors", "replacers", "left_out"), ranks),
        "gains": Annotated[list[float], Meta(max_length=size)],
        **dict.fromkeys(("weight", "norm"), Number),
        **dict.fromkeys(("outer_norm", "cosine"), float | None),
        "weights": Annotated[list[Annotated[float, Meta(ge=0, le=1e6)]], Meta(max_length=size)] | None,
        **dict.fromkeys(("seconds", "waited_s"), Seconds),
        "clock.seconds": Clock,
        "value": Number,
        "measured.value": Annotated[int, Meta(ge=-(1 << 53), le=1 << 53)] | bool,
        "pass": Annotated[int, Meta(ge=-2, le=1 << 16)],
        "has_ended": bool,
        "checksum": Annotated[int, Meta(ge=0, lt=1 << 32)] | None,
        **dict.fromkeys(("waited_for", "inherited", "chosen"), Text),
        "what": _Wait,
        "result": Annotated[str, Meta(pattern=r"^([0-9a-f]{2})*\Z", max_length=1 << 16)],
    }


#: Creates an event from a tuple in half the time of the constructor. A recording may have millions of events.
_new_event: Final = functools.partial(tuple.__new__, Event)


class EventError(Exception):
    """Raised if a block has invalid content. The message names the event, the field and the allowed values."""


class EventSchema:
    """Decodes the blocks of one file into checked events.

    ``kinds`` maps the kinds of events in the file to their fields. Kinds that this version does not know are ignored,
    and ``unknown`` lists them.
    """

    def __init__(self, kinds: Mapping[str, Sequence[str]], size: int) -> None:
        self.unknown = [name for name, fields in kinds.items() if not _is_known(name, fields)]
        self._fields = {
            name: (*KINDS[name], *fields[len(KINDS[name]) :]) if name not in self.unknown else tuple(fields)
            for name, fields in kinds.items()
        }
        #: Name of the kind of events with each index in the file, or None for an ignored kind.
        self._names = tuple(None if name in self.unknown else name for name in kinds)
        types = _types_of_fields(size)
        structs = [self._struct_of(place, name, types) for place, name in enumerate(kinds)]
        event: Any = functools.reduce(operator.or_, structs) if structs else Literal[0]
        events: Any = GenericAlias(list, (event,))
        self._check = msgspec.msgpack.Decoder(events).decode
        self._counter = _unpacker()

    def _struct_of(self, place: int, name: str, types: Mapping[str, Any]) -> type[Struct]:
        """Return the struct type for events of one kind: an array of kind index, time offset and fields."""
        is_known = name not in self.unknown
        required = _required_count(name) if is_known else 0
        fields: list[Any] = [("offset_us", _OFFSET)]
        for number, field in enumerate(self._fields[name]):
            known = is_known and number < len(KINDS[name])
            kind = types.get(f"{name}.{field}", types.get(field)) if known else _Other
            fields.append((f"field_{number}", kind) if number < required else (f"field_{number}", kind | None, None))
        options: Any = {"tag": place, "array_like": True, "forbid_unknown_fields": True, "gc": False}
        return msgspec.defstruct(name, fields, **options)

    def check(self, content: bytes) -> None:
        """Check all events in the content of one or several blocks. Raise EventError if one is invalid."""
        try:
            self._check(b"\xdd" + self._count(content).to_bytes(4) + content)
        except (ValueError, RecursionError) as error:
            self._counter = _unpacker()  # The previous unpacker may have stopped inside the content.
            self._refuse(content, error)

    def reader(self) -> Callable[[bytes, float], list[Event]]:
        """Return a function that decodes a block's content and time into the events of known kinds."""
        unpacker, names = _unpacker(), self._names

        def read(content: bytes, time_s: float) -> list[Event]:
            unpacker.feed(content)
            return [
                _new_event((time_s + event[1] * 1e-6, name, event[2:]))
                for event in unpacker
                if (name := names[event[0]]) is not None
            ]

        return read

    def _count(self, content: bytes) -> int:
        """Return the number of complete objects, which the decoder needs. The decoder refuses an incomplete object."""
        self._counter.feed(content)
        count = 0
        try:
            while True:
                self._counter.skip()
                count += 1
        except msgpack.OutOfData:
            return count

    def _refuse(self, content: bytes, error: Exception) -> NoReturn:
        found = re.match(r"(?P<what>.*) - at `\$\[(?P<event>\d+)\](\[(?P<field>\d+)\])?", str(error), re.DOTALL)
        if found is None:
            raise EventError("the content must be a list of events") from error
        name = self._name_of(content, int(found["event"]))
        place = int(found["field"] or 0) - 2
        field = f", field {self._fields[name][place]!r}" if name and 0 <= place < len(self._fields[name]) else ""
        if name and not found["field"]:
            raise EventError(
                f"event {name!r} must have the fields {', '.join(self._fields[name])}, got another number of fields"
            ) from error
        event = f"event {name!r}{field}" if name else "an event of an unknown kind"
        raise EventError(f"{event}: {_describe(found['what'])}") from error

    def _name_of(self, content: bytes, number: int) -> str:
        """Return the kind of the event with this index, or an empty string if the kind is unknown."""
        unpacker = _unpacker()
        unpacker.feed(content)
        try:
            for _ in range(number):
                unpacker.skip()
            unpacker.read_array_header()
            code = unpacker.unpack()
        except (ValueError, msgpack.UnpackException):
            return ""
        names = tuple(self._fields)
        return names[code] if type(code) is int and 0 <= code < len(names) else ""


def _unpacker() -> msgpack.Unpacker:
    """Return an unpacker for objects of one block. It also accepts a large block after smaller ones."""
    limits = dict.fromkeys(("max_str_len", "max_bin_len", "max_array_len", "max_ext_len"), OBJECT_NBYTES_MAX)
    return msgpack.Unpacker(
        max_buffer_size=2 * OBJECT_NBYTES_MAX, use_list=False, max_map_len=OBJECT_NBYTES_MAX // 2, **limits
    )


def _is_known(name: str, fields: Sequence[str]) -> bool:
    """Return whether this version knows a kind of events. Optional fields may be missing, and there may be new ones."""
    if name not in KINDS or len(fields) < _required_count(name):
        return False
    return all(theirs == ours for theirs, ours in zip(fields, KINDS[name], strict=False))


def _required_count(name: str) -> int:
    return _REQUIRED_COUNTS.get(name, len(KINDS[name]))


def why_refused(error: Exception) -> str:
    """Return msgspec's description of an invalid header: the field, the expected value and the actual value."""
    found = re.match(r"(?P<what>.*) - at `\$\.(?P<where>[^`]*)`$", str(error), re.DOTALL)
    if found is None:
        return _describe(str(error))
    return f"{printable(found['where'])}: {_describe(found['what'])}"


def _describe(what: str) -> str:
    words = printable(what.replace("`", ""))
    return f"{words[:1].lower()}{words[1:]}" if words else "unreadable"
