"""Tests recordings: they are read back as written, damaged or foreign files are reported, and no run is disturbed."""

from __future__ import annotations

import logging
import os
import re
import resource
import signal
import sys
import tracemalloc
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgpack
import numpy
import pytest
import torch

import asyncdist as ad
from asyncdist.errors import RankLostError
from asyncdist.recording import reader, sources, writer
from asyncdist.recording.events import CAPACITY, Event, EventLog
from asyncdist.recording.reader import RecordingError, read_recording
from asyncdist.recording.writer import RecordOptions, RecordWriter, file_name, header_of
from asyncdist.story.last_events import describe_recording
from asyncdist.transports.base import Buffer, Request
from asyncdist.transports.recorded_transport import RecordedTransport
from asyncdist.waits import WaitId


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


def header(rank: int = 0, job: str = "0000abcd", size: int = 1) -> dict[str, object]:
    return header_of(job=job, rank=rank, size=size, incarnation=0, transport="local", hostname="here")


def recorded(folder: Path, *, count: int = 3, job: str = "0000abcd", rank: int = 0, size: int = 1) -> list[Event]:
    """Write ``count`` events, each in a separate block; return them."""
    clock = Clock()
    to = RecordWriter(RecordOptions(folder), clock, rank)
    to.open(header(rank, job, size))
    events = []
    for number in range(count):
        clock.now = 100.0 + 2 * number
        events.append(Event(clock.now, "step", (0, number, 0.5)))
        to.add(*events[-1])
        to.flush()
    to.close()
    return events


def test_what_is_written_is_read(tmp_path: Path) -> None:
    events = recorded(tmp_path)
    found = read_recording(tmp_path)
    assert (found.job, found.size, found.missing) == ("0000abcd", 1, ())
    assert list(found.ranks[0].events()) == events
    assert events[1].get("iteration") == 1
    assert found.ranks[0].unix_s(102.0) - found.began_at == 2.0


def test_a_file_does_not_follow_a_planted_link(tmp_path: Path) -> None:
    """Regression: another user's link in a shared folder made a recording overwrite the file behind it."""
    precious = tmp_path / "precious"
    precious.write_text("kept")
    (tmp_path / file_name("0000abcd", 0, 0)).symlink_to(precious)
    os.link(precious, tmp_path / file_name("0000abcd", 1, 0))
    events = [recorded(tmp_path, rank=rank, size=2) for rank in range(2)]
    assert precious.read_text() == "kept"
    assert [list(each.events()) for each in read_recording(tmp_path).ranks] == events


def test_a_file_does_not_replace_an_earlier_recording(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Regression: a job with the name of an earlier job deleted its recording without a warning."""
    first, path = recorded(tmp_path, count=1), tmp_path / file_name("0000abcd", 0, 0)
    assert not caplog.text
    others = [recorded(tmp_path, count=count) for count in (2, 3)]
    paths = [path, *(path.with_name(f"{path.stem}-{number}{path.suffix}") for number in (2, 3))]
    assert sorted(tmp_path.iterdir()) == sorted(paths) and caplog.text.count(str(path)) == 2
    with pytest.raises(RecordingError, match="0000abcd"):
        read_recording(tmp_path)
    for each, events in zip(paths, [first, *others], strict=True):
        alone = tmp_path / str(len(events))
        alone.mkdir()
        each.rename(alone / each.name)
        assert list(read_recording(alone).ranks[0].events()) == events


def test_a_recording_does_not_wait_for_the_reader_of_a_pipe(tmp_path: Path) -> None:
    """Regression: a rank waited forever for a reader of the pipe that another user had made in a shared folder."""
    os.mkfifo(tmp_path / file_name("0000abcd", 0, 0))
    assert recorded(tmp_path) == list(read_recording(tmp_path).ranks[0].events())


def test_safe_points_are_written_in_order_with_the_next_event(tmp_path: Path) -> None:
    clock = Clock()
    to = RecordWriter(RecordOptions(tmp_path), clock, 0)
    to.open(header(size=2))
    to.begin_safe_point(7)
    to.end_safe_point(2)
    to.note("step", 0, 0, 0.5)  # this step contains no events, so its beginning and end are one event
    to.begin_safe_point(8)
    to.note("received", 1, 7000, 24)
    to.end_safe_point(3)
    to.begin_safe_point(9)  # no event between two of them
    to.note("sent", 1, 7000, 24)
    assert not list(read_recording(tmp_path).ranks[0].events())
    to.end_safe_point(4)  # the sends are recorded now, even if this rank is killed
    expected = [
        ("safe_point", (True, 2, 7)),
        ("step", (0, 0, 0.5)),
        ("safe_point", (False, 0, 8)),
        ("received", (1, 7000, 24)),
        ("safe_point", (True, 3)),
        ("safe_point", (False, 0, 9)),
        ("sent", (1, 7000, 24)),
        ("safe_point", (True, 4)),
    ]
    assert [(event.kind, event.fields) for event in read_recording(tmp_path).ranks[0].events()] == expected
    to.begin_safe_point(9)
    to.end_safe_point(5)
    to.close()
    last = list(read_recording(tmp_path).ranks[0].events())[-1]
    assert (last.kind, last.fields) == ("safe_point", (True, 5, 9)), "closing must write the pending safe point"


def test_safe_points_alone_fill_blocks_and_none_follow_the_end(tmp_path: Path) -> None:
    to = RecordWriter(RecordOptions(tmp_path, limit_nbytes=100_000), Clock(), 0)
    to.open(header())

    def pass_safe_points(count: int) -> None:
        for _ in range(count):
            to.begin_safe_point(0)
            to.end_safe_point(1)

    pass_safe_points(10_000)
    assert len(list(read_recording(tmp_path).ranks[0].events())) > 1_000, (
        "safe points must be written without another event"
    )
    pass_safe_points(20_000)
    assert not to.is_recording, "recording must stop at the limit"
    tracemalloc.start()
    try:
        pass_safe_points(20_000)
        assert tracemalloc.get_traced_memory()[0] < 10_000
    finally:
        tracemalloc.stop()


def test_a_file_is_one_stream_of_messagepack(tmp_path: Path) -> None:
    """Any MessagePack reader can read a recording, as its module's documentation says."""
    recorded(tmp_path)
    with next(tmp_path.iterdir()).open("rb") as file:
        head, *blocks = msgpack.Unpacker(file)
    assert head["version"] == writer.VERSION
    kinds = list(head["kinds"])
    first = msgpack.unpackb(blocks[0][2])
    assert [kinds[first[0]], *first[2:]] == ["step", 0, 0, 0.5]


@pytest.mark.parametrize("cut", [1, 5, 60])
def test_a_torn_file_is_read_up_to_its_last_whole_block(
    tmp_path: Path, cut: int, caplog: pytest.LogCaptureFixture
) -> None:
    events = recorded(tmp_path)
    path = next(tmp_path.iterdir())
    os.truncate(path, path.stat().st_size - cut)
    assert list(read_recording(tmp_path).ranks[0].events()) == events[: -1 if cut < 20 else -2]
    assert re.search(r"ends within a block, at byte \d+, after [12] blocks", caplog.text)


def test_notebook_recording_has_no_script_or_kernel_arguments(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Regression: a report began with 'job 0000abcd: , 1 rank', and another showed ' -f kernel.json' as the script."""
    monkeypatch.setattr(sys, "argv", ["ipykernel_launcher.py", "-f", "kernel.json"])
    monkeypatch.setattr(sys.modules["__main__"], "__file__", None)
    recorded(tmp_path)
    (rank,) = read_recording(tmp_path).ranks
    assert (rank.header.script, rank.header.arguments) == ("", [])
    assert describe_recording(str(tmp_path)).startswith("job 0000abcd: no script, 1 rank, recorded for")


def test_a_module_is_recorded_with_its_name(monkeypatch: pytest.MonkeyPatch) -> None:
    main = sys.modules["__main__"]
    monkeypatch.setattr(main, "__spec__", ModuleSpec("package.train", None))
    assert header()["module"] == "package.train"
    monkeypatch.setattr(main, "__spec__", None)
    assert header()["module"] == ""


def test_a_forked_child_writes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Regression: a DataLoader worker whose data set read the time wrote its rank's events a second time."""
    clock = Clock()
    to = RecordWriter(RecordOptions(tmp_path), clock, 0)
    to.open(header())
    to.note("step", 0, 0, 0.5)
    monkeypatch.setattr(os, "getpid", lambda: 1)  # as in a forked child, which has a copy of the unwritten events
    clock.now += 2
    to.note("clock", 1.0, 7)
    to.close()
    assert not to.is_recording and not list(read_recording(tmp_path).ranks[0].events())


def test_records_written_after_the_opening_are_not_read(tmp_path: Path) -> None:
    """A report reads each file several times, and records written in between must not appear in some of the passes."""
    clock = Clock()
    to = RecordWriter(RecordOptions(tmp_path), clock, 0)
    to.open(header())
    to.note("metric", 0, 4, 1.0)
    to.flush()
    found = read_recording(tmp_path)
    for number in range(3000):  # more than is read at once
        clock.now += 1.1  # each in a separate block
        to.note("metric", 0, 5 + number, 1.0)
    to.close()
    (rank,) = found.ranks
    assert [event.get("iteration") for event in rank.events()] == [4]
    (rank,) = read_recording(tmp_path).ranks
    assert len(list(rank.events())) == 3001


def test_a_file_that_ends_between_two_blocks_is_whole(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    recorded(tmp_path)
    read_recording(tmp_path)
    assert caplog.text == ""


def test_what_is_no_recording_is_left_out_of_one(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    events = recorded(tmp_path, size=2)
    torn, foreign = tmp_path / f"0000abcd-rank00001{writer.SUFFIX}", tmp_path / f"a{writer.SUFFIX}"
    torn.write_bytes(next(tmp_path.glob("*rank00000*")).read_bytes()[:100])
    foreign.write_bytes(b"a text that somebody has put there")
    found = read_recording(tmp_path)
    assert (list(found.ranks[0].events()), found.missing) == (events, (1,))
    assert (
        f"{torn} ends within its header, because its rank was killed when it began; the file is ignored" in caplog.text
    )
    assert f"{foreign} must be a recording of asyncdist, but it has other content; the file is ignored" in caplog.text


def test_a_damaged_block_is_told(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    events = recorded(tmp_path)
    path = next(tmp_path.iterdir())
    data = bytearray(path.read_bytes())
    data[-3] ^= 0xFF
    path.write_bytes(data)
    assert list(read_recording(tmp_path).ranks[0].events()) == events[:-1]
    assert "damaged at byte" in caplog.text
    assert "after 2 blocks" in caplog.text


def test_recordings_of_several_jobs_are_told_apart(tmp_path: Path) -> None:
    recorded(tmp_path)
    events = recorded(tmp_path, job="0000ffff", count=1)
    with pytest.raises(RecordingError, match="recordings of 2 jobs, from the oldest: 0000abcd, 0000ffff"):
        read_recording(tmp_path)
    assert list(read_recording(tmp_path, "0000ffff").ranks[0].events()) == events
    with pytest.raises(RecordingError, match="no recording of job 1"):
        read_recording(tmp_path, "1")


def test_of_many_jobs_the_latest_are_named_and_one_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    times = iter(range(20))
    monkeypatch.setattr(writer.time, "time", lambda: float(next(times)))
    for number in range(20):
        recorded(tmp_path, job=f"{number:08x}")
    with pytest.raises(RecordingError, match="20 jobs, from the oldest: 12 more, 0000000c, ") as caught:
        read_recording(tmp_path)
    assert len(re.findall("0000[0-9a-f]{4}", str(caught.value))) == 8 + 1
    looked: list[object] = []
    blocks = reader.RankRecording._blocks
    monkeypatch.setattr(reader.RankRecording, "_blocks", lambda each: looked.append(each) or blocks(each))
    assert read_recording(tmp_path, "00000003").job == "00000003"
    assert len(looked) == 1, "the search must not read other, possibly large, files"


def test_a_copy_of_a_file_does_not_count_twice(tmp_path: Path) -> None:
    recorded(tmp_path, rank=0, size=2)
    recorded(tmp_path, rank=1, size=2)
    copy = tmp_path / "copy of rank 1.record"
    copy.write_bytes((tmp_path / "0000abcd-rank00001.record").read_bytes())
    told = (
        f"rank 1 must have one recording of job 0000abcd, got {tmp_path}/0000abcd-rank00001.record and "
        f"{copy}; move one of them out of the folder"
    )
    with pytest.raises(RecordingError, match=re.escape(told)):
        read_recording(tmp_path)
    copy.unlink()
    assert [each.rank for each in read_recording(tmp_path).ranks] == [0, 1]


def test_ranks_without_a_file_are_named(tmp_path: Path) -> None:
    recorded(tmp_path, rank=1, size=3)
    assert read_recording(tmp_path).missing == (0, 2)


@pytest.mark.parametrize(
    ("data", "told"),
    [
        (b"a text that somebody has put there", "must be a recording of asyncdist"),
        (msgpack.packb({"format": "of another program"}), "must be a recording of asyncdist"),
        (
            msgpack.packb({"format": writer.FORMAT, "version": 7, "asyncdist": "9.9"}),
            rf"must have format version 2 for asyncdist {ad.__version__}, got 7; read it with asyncdist '9\.9'",
        ),
        (
            msgpack.packb({"format": writer.FORMAT, "version": writer.VERSION, "job": 3}),
            "invalid header: job: expected str, got int",
        ),
        (msgpack.packb({"format": writer.FORMAT, "version": writer.VERSION})[:-4], "ends within its header"),
    ],
)
def test_what_is_no_recording_is_refused_by_name(tmp_path: Path, data: bytes, told: str) -> None:
    path = tmp_path / f"x{writer.SUFFIX}"
    path.write_bytes(data)
    with pytest.raises(RecordingError, match=told) as raised:
        read_recording(tmp_path)
    assert str(path) in str(raised.value)


def test_a_recording_of_another_version_is_read_with_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    to = RecordWriter(RecordOptions(tmp_path), Clock(), 0)
    to.open({**header(), "asyncdist": "9.9"})
    to.note("timer", WaitId("kind_of_tomorrow", number=3), 0, 0, 0)
    to.close()
    (event,) = read_recording(tmp_path).ranks[0].events()
    assert str(event.wait) == "kind kind_of_tomorrow, number 3"
    assert f"was written by asyncdist 9.9, but this is asyncdist {ad.__version__}" in caplog.text


def test_sources_are_told_apart_by_names_and_sizes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sources, "_ROOT", str(tmp_path))
    (tmp_path / "protocols").mkdir()
    one, other = tmp_path / "protocols" / "one.py", tmp_path / "protocols" / "other.py"
    one.write_text("a")
    checksum = sources.checksum_of_sources.__wrapped__
    first = checksum()
    (tmp_path / "protocols" / "notes.txt").write_text("a")
    assert checksum() == first
    one.write_text("ab")
    longer = checksum()
    one.rename(other)
    assert len({first, longer, checksum()}) == 3
    (tmp_path / "protocols" / ".#other.py").symlink_to("user@host.1")  # an editor's lock
    checksum()


def test_an_empty_or_missing_folder_is_refused(tmp_path: Path) -> None:
    with pytest.raises(RecordingError, match="has no recording, because no file"):
        read_recording(tmp_path)
    with pytest.raises(RecordingError, match=r"the recording must be a folder, got .*/missing"):
        read_recording(tmp_path / "missing")


def test_full_disk_causes_one_warning_and_keeps_earlier_records(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    clock = Clock()
    to = RecordWriter(RecordOptions(tmp_path), clock, 0)
    to.open(header())
    to.note("step", 0, 0, 0.5)
    to.flush()
    write = os.pwrite
    monkeypatch.setattr(writer.os, "pwrite", lambda file, data, offset: write(file, data[:7], offset))
    for _ in range(3):
        to.note("step", 0, 1, 0.5)
        to.flush()
    to.close()
    assert len(caplog.records) == 1
    assert "the disk may be full" in caplog.text
    assert len(list(read_recording(tmp_path).ranks[0].events())) == 1


def test_the_reason_is_recorded_if_the_disk_is_full(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Regression: the reason was written behind a hole, so that the file looked damaged."""
    to = RecordWriter(RecordOptions(tmp_path), Clock(), 0)
    to.open(header())
    to.note("step", 0, 0, 0.5)
    to.flush()
    limit, soft_hard = next(tmp_path.iterdir()).stat().st_size + 200, resource.getrlimit(resource.RLIMIT_FSIZE)
    previous = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, soft_hard[1]))  # as on a disk with 200 free bytes
    try:
        for number in range(100):
            to.note("step", 0, number, 0.5)
        to.close()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, soft_hard)
        signal.signal(signal.SIGXFSZ, previous)
    (found,) = read_recording(tmp_path).ranks
    step, cut = found.events()
    assert (step.kind, cut.kind, found.damage) == ("step", "cut", "")
    assert cut.get("why") in caplog.text


def test_a_folder_that_cannot_be_made_costs_one_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "file").write_text("")
    to = RecordWriter(RecordOptions(tmp_path / "file"), Clock(), 3)
    to.open(header())
    to.note("step", 0, 0, 0.5)
    to.close()
    assert [record.levelno for record in caplog.records] == [logging.WARNING]
    assert "the recording of rank 3" in caplog.text


def test_a_file_ends_at_its_limit(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    to = RecordWriter(RecordOptions(tmp_path, limit_nbytes=4000), Clock(), 0)
    to.open(header())
    for number in range(1000):
        to.note("step", 0, number, 0.5)
        to.flush()
    assert not to.is_recording
    assert "has reached its limit of 4000 bytes" in caplog.text
    assert 1000 < next(tmp_path.iterdir()).stat().st_size <= 4000
    *steps, cut = read_recording(tmp_path).ranks[0].events()
    assert {event.kind for event in steps} == {"step"}
    assert cut.kind == "cut" and cut.get("why") in caplog.text, (
        "the log must give the reason for the cut, which is not a kill"
    )


def test_header_without_room_leaves_an_empty_file(tmp_path: Path) -> None:
    to = RecordWriter(RecordOptions(tmp_path, limit_nbytes=100), Clock(), 0)
    to.open(header())
    to.close()
    with pytest.raises(RecordingError, match="are empty"):
        read_recording(tmp_path)


def test_a_rank_keeps_its_latest_events_alone() -> None:
    log = EventLog(Clock())
    for number in range(CAPACITY + 3):
        log.add("lost", number)
    assert [event.get("rank") for event in log.latest()] == list(range(3, CAPACITY + 3))


def test_wrong_options_are_named() -> None:
    with pytest.raises(TypeError, match="record must be the path of a folder or None, got 3"):
        RecordOptions.of(3)
    with pytest.raises(ValueError, match="record_limit_nbytes must be an integer >= 1, got 0"):
        RecordOptions.of("somewhere", 0)
    assert RecordOptions.of(None) is None


def test_what_is_no_text_is_written_with_backslashes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Bytes of arguments and file names that are not UTF-8 are escaped, so that they do not end a run."""
    monkeypatch.setattr("sys.argv", ["train.py", os.fsdecode(b"caf\xe9")])
    to = RecordWriter(RecordOptions(tmp_path), Clock(), 0)
    to.open(header())
    to.note("step", 0, 1, 0.5)
    to.note("over", f"FileNotFoundError: {os.fsdecode(bytes([0xE9])) * 3}")
    to.note("step", 0, 2, 0.5)
    to.close()
    found = read_recording(tmp_path).ranks[0]
    assert (found.header.arguments, found.damage) == (["caf\\udce9"], "")
    assert [event.fields[-1] for event in found.events()] == [0.5, "FileNotFoundError: " + 3 * "\\udce9", 0.5]


def test_a_name_of_a_subclass_of_str_is_recorded(tmp_path: Path) -> None:
    """Regression: the event of a policy with such a name raised ValueError."""

    class Name(str):
        def __str__(self) -> str:
            raise NotImplementedError

    to = RecordWriter(RecordOptions(tmp_path), Clock(), 0)
    to.open(header())
    for name in (Name("mine"), Name("a\udce4")):
        to.note("policy", 0, "Policy", name, 1, 1, 1)
    to.close()
    (rank,) = read_recording(tmp_path).ranks
    assert [event.get("name") for event in rank.events()] == ["mine", "a\\udce4"]


def test_numbers_of_numpy_and_torch_are_recorded(tmp_path: Path) -> None:
    """Regression: such a number in an event ended the training with a TypeError."""
    to = RecordWriter(RecordOptions(tmp_path), Clock(), 0)
    to.open(header())
    to.note("step", numpy.int64(3), torch.tensor(4), numpy.float32(0.5))
    to.close()
    (event,) = read_recording(tmp_path).ranks[0].events()
    assert event.fields == (3, 4, 0.5)


def test_a_loss_that_a_send_meets_is_written_before_that_send() -> None:
    """A replay then knows the loss in time, and the send fails there, too."""
    told: list[str] = []

    def start_send(buffer: Buffer, dest: int, tag: int) -> Request | None:
        told.append("lost")
        raise RankLostError(f"rank {dest} is gone", rank=dest)

    inner: Any = SimpleNamespace(start_send=start_send)
    transport = RecordedTransport(inner, lambda kind, peer, tag, nbytes: told.append(kind))
    with pytest.raises(RankLostError):
        transport.start_send(b"word", 1, 40)
    assert told == ["lost", "sent"]
