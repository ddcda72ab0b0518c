"""Tests that forged recordings are refused with one line that names the fault and the allowed values."""

from __future__ import annotations

import tracemalloc
import zlib
from pathlib import Path
from typing import Any

import msgpack
import pytest

from asyncdist.recording import schema
from asyncdist.recording.events import KINDS
from asyncdist.recording.reader import RecordingError, read_recording
from asyncdist.recording.schema import EventSchema
from asyncdist.recording.writer import RecordOptions, RecordWriter, header_of
from asyncdist.report.summary import summarise

CODES = {kind: code for code, kind in enumerate(KINDS)}
KINDS_OF_FILE = {kind: list(fields) for kind, fields in KINDS.items()}


def header(**changed: Any) -> dict[str, Any]:
    facts = header_of(job="0000abcd", rank=0, size=2, incarnation=0, transport="local", hostname="here")
    return {**facts, "clock_s": 100.0, "unix_s": 1e9, **changed}


def content_of(*events: Any) -> bytes:
    return b"".join(map(msgpack.packb, events))


def write(folder: Path, content: bytes = b"", **changed: Any) -> Path:
    block = msgpack.packb([100.0, zlib.crc32(content), content]) if content else b""
    path = folder / "x.record"
    path.write_bytes(msgpack.packb(header(**changed)) + block)
    return path


def refusal(folder: Path) -> str:
    with pytest.raises(RecordingError) as caught:
        read_recording(folder)
    assert str(caught.value).isprintable()
    return str(caught.value)


def test_every_field_of_every_event_has_a_type() -> None:
    types = schema._types_of_fields(2)
    assert all(types.get(f"{kind}.{name}", types.get(name)) for kind, names in KINDS.items() for name in names)
    assert not EventSchema(KINDS_OF_FILE, 2).unknown


@pytest.mark.parametrize(
    ("changed", "why"),
    [
        ({"size": 10**9}, "size: expected int <= 65536"),
        ({"size": 0}, "size: expected int >= 1"),
        ({"rank": 2}, "rank must be from 0 to 1 with size 2, got 2"),
        ({"rank": -1}, "rank: expected int >= 0"),
        ({"incarnation": 2**40}, "incarnation: expected int <= 1048576"),
        ({"job": "../../escaped"}, "job: expected str matching regex"),
        ({"job": "/escaped"}, "job: expected str matching regex"),
        ({"job": "index"}, "job: expected str matching regex"),  # asyncdist report would replace index.html
        ({"job": "a\n"}, "job: expected str matching regex"),
        ({"job": ".."}, "job: expected str matching regex"),
        ({"job": 'a"""\nimport os'}, "job: expected str matching regex"),
        ({"clock_s": float("nan")}, "clock_s: expected float >= -10000000000.0"),
        ({"unix_s": float("inf")}, "unix_s: expected float <= 253402300799.0"),
        ({"unix_s": 1e300}, "unix_s: expected float <= 253402300799.0"),
        ({"pid": "abc"}, "pid: expected int, got str"),
        ({"arguments": [{"a": 1}]}, "arguments[0]: expected str, got object"),
        ({"kinds": {"step": "policy"}}, "kinds[...]: expected array, got str"),
        ({"kinds": {"\x1b[2J": []}}, "kinds"),
        ({"kinds": {1: [2]}}, "kinds"),
    ],
)
def test_a_wrong_header_is_refused_with_its_field(tmp_path: Path, changed: dict[str, Any], why: str) -> None:
    path = write(tmp_path, **changed)
    assert refusal(tmp_path).startswith(f"{path} has an invalid header: ") and why in refusal(tmp_path)


@pytest.mark.parametrize(
    ("event", "why"),
    [
        ([CODES["sent"], 0, 2, 100, 8], "event 'sent', field 'dest': expected int <= 1"),
        ([CODES["sent"], 0, "1", 100, 8], "event 'sent', field 'dest': expected int, got str"),
        ([CODES["sent"], 0, 1, 100, 2**63], "event 'sent', field 'nbytes': expected int <= 9007199254740992"),
        ([CODES["sent"], 0, 1], "event 'sent' must have the fields dest, tag, nbytes, got another number of fields"),
        (
            [CODES["sent"], 0, 1, 100, 8, 9],
            "event 'sent' must have the fields dest, tag, nbytes, got another number of fields",
        ),
        ([CODES["sent"], float("inf"), 1, 100, 8], "event 'sent': expected int, got float"),
        ([CODES["step"], 0, 0, 1, float("nan")], "event 'step', field 'seconds': expected float >= 0.0"),
        ([CODES["frozen"], 0, 0, 1, [0, [1]]], "event 'frozen', field 'donors': expected int, got array"),
        ([CODES["frozen"], 0, 0, 1, [0] * 3], "event 'frozen', field 'donors': expected array of length <= 2"),
        ([CODES["reduced"], 0, 7, 4, "no hex"], "event 'reduced', field 'result': expected str matching regex"),
        ([999, 0], "an event of an unknown kind: invalid value 999"),
        (5, "an event of an unknown kind: expected array, got int"),
        ([], "an event of an unknown kind: expected array of at least length 1, got 0"),
    ],
)
def test_a_wrong_event_is_refused_with_its_field(tmp_path: Path, event: Any, why: str) -> None:
    good = [CODES["step"], 0, 0, 1, 0.5]
    path = write(tmp_path, content_of(good, event, good))
    place = path.read_bytes().rindex(b"\x93\xcb")
    assert refusal(tmp_path).startswith(f"{path} has content that no rank writes, in the block at byte {place}: {why}")


@pytest.mark.parametrize(
    "content",
    [
        content_of([CODES["step"], 0, 0, 1, 0.5])[:-1],
        b"\xc1",
        b"\xdd\x0f\xff\xff\xff",
        b"\x91" * 100_000,
        b"\xdd\x00\x0f\xff\xff" * 600,
        b"\x93\x01\x00\xdd\x00\x0f\xff\xff",
    ],
    ids=["cut", "no type", "a long array", "nested arrays", "nested long arrays", "a long field"],
)
def test_bytes_that_claim_much_take_little_memory(tmp_path: Path, content: bytes) -> None:
    """Regression: nested arrays that claimed a million entries each were allocated in full."""
    write(tmp_path, content)
    tracemalloc.start()
    try:
        assert refusal(tmp_path)
        assert tracemalloc.get_traced_memory()[1] < 32 << 20
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize(
    "bomb", [b"\xdd\xff\xff\xff\xff", b"\xc6\xff\xff\xff\xff", b"\xdf\xff\xff\xff\xff", b"\x91" * 200_000]
)
def test_a_block_that_claims_much_ends_the_file(tmp_path: Path, bomb: bytes, caplog: pytest.LogCaptureFixture) -> None:
    path = write(tmp_path, content_of([CODES["step"], 0, 0, 1, 0.5]))
    path.write_bytes(path.read_bytes() + bomb)
    tracemalloc.start()
    try:
        (rank,) = read_recording(tmp_path).ranks
        assert len(list(rank.events())) == 1
        assert tracemalloc.get_traced_memory()[1] < 64 << 20
    finally:
        tracemalloc.stop()
    assert "block" in caplog.text


def test_events_and_fields_of_a_later_version_are_left_out(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    kinds = {**KINDS_OF_FILE, "step": [*KINDS["step"], "more"], "later": ["field"]}
    events = ([len(KINDS), 0, [1, 2]], [CODES["step"], 0, 0, 7, 0.5, "more"], [len(KINDS), 0])
    write(tmp_path, content_of(*events), kinds=kinds)
    (rank,) = read_recording(tmp_path).ranks
    assert [(event.kind, event.get("iteration"), event.get("more")) for event in rank.events()] == [("step", 7, None)]
    assert "has events that this version does not know and ignores: later" in caplog.text


@pytest.mark.parametrize(("kind", "kept_count"), [("sent", 1), ("step", 0), ("safe_point", 1), ("applied", 9)])
def test_kinds_without_fields_that_readers_need_are_left_out(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, kind: str, kept_count: int
) -> None:
    """Regression: ``asyncdist story`` ended in a traceback if a file declared too few fields of a kind."""
    kinds = {**KINDS_OF_FILE, kind: list(KINDS[kind][:kept_count])}
    write(tmp_path, content_of([CODES[kind], 0, *[None] * kept_count]), kinds=kinds)
    (rank,) = read_recording(tmp_path).ranks
    assert list(rank.events()) == []
    assert f"has events that this version does not know and ignores: {kind}" in caplog.text


def test_ranks_of_one_job_that_differ_in_its_size_are_refused(tmp_path: Path) -> None:
    for rank, size in ((0, 2), (1, 3)):
        to = RecordWriter(RecordOptions(tmp_path), lambda: 1.0, rank)
        to.open(header_of(job="0000abcd", rank=rank, size=size, incarnation=0, transport="local", hostname="here"))
        to.close()
    assert "job 0000abcd must have the same number of ranks, got 2 in " in refusal(tmp_path)


def test_a_policy_that_begins_twice_is_summarised(tmp_path: Path) -> None:
    policy = [CODES["policy"], 0, 3, "DiLoCoPolicy", "", 5, 8, 2]
    metrics = [[CODES["metric"], 0, 3, iteration, 0.5] for iteration in (1, 2)]
    write(tmp_path, content_of(policy, metrics[0], policy, metrics[1]))
    assert [each.metrics[0].count for each in summarise(read_recording(tmp_path)).populations] == [1, 1]


def test_a_block_of_the_largest_size_after_a_small_one_is_read(tmp_path: Path) -> None:
    """Regression: blocks are checked together, and the checker had room for a single block of this size."""
    sizes = [60_000, *[(1 << 20) - 100] * 4]
    small, *large = (content_of([CODES["told"], 0, "x" * size]) for size in sizes)
    path, block = write(tmp_path, small), b"".join(large)
    with path.open("ab") as file:
        file.write(msgpack.packb([101.0, zlib.crc32(block), block]))
    (found,) = read_recording(tmp_path).ranks
    assert not found.damage and [len(event.get("story")) for event in found.events()] == sizes
