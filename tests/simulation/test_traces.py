"""Tests traces for Perfetto that are made from recordings."""

from __future__ import annotations

import asyncio
import gzip
import itertools
import json
import math
import time
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from support.recorded_run import counted, train

import asyncdist as ad
from asyncdist.recording.reader import Recording, read_recording
from asyncdist.recording.writer import RecordOptions, RecordWriter, header_of
from asyncdist.report import tables, trace
from asyncdist.report.clock_alignment import Clocks
from asyncdist.report.trace import TraceError, write_trace
from asyncdist.waits import WaitId, WaitKind
from protocols import AsyncSelectiveAveragingPolicy


def entries_of(path: Path) -> list[dict[str, Any]]:
    with gzip.open(path, "rt") if path.suffix == ".gz" else path.open() as file:
        found: list[dict[str, Any]] = json.load(file)["traceEvents"]
    return found


def test_a_trace_has_a_track_per_rank_and_an_arrow_per_message(recording: Recording, tmp_path: Path) -> None:
    count = write_trace(recording, tmp_path / "trace.json.gz")
    entries = entries_of(tmp_path / "trace.json.gz")
    assert len(entries) == count
    kinds = counted(recording)
    names = {entry["pid"]: entry["args"]["name"] for entry in entries if entry["name"] == "process_name"}
    assert sorted(names) == [0, 1, 2, 3] and names[2].startswith("rank 2 on ")
    steps = [entry for entry in entries if entry["name"] == "policy.step"]
    assert len(steps) == kinds["step"] and all(entry["ph"] == "X" and entry["dur"] >= 0 for entry in steps)
    assert sum(entry["name"] == "applied" for entry in entries) == kinds["applied"]
    begins = {entry["id"]: entry for entry in entries if entry["ph"] == "s"}
    ends = {entry["id"]: entry for entry in entries if entry["ph"] == "f"}
    assert (len(begins), len(ends)) == (kinds["sent"], kinds["received"])
    assert ends.keys() <= begins.keys(), "each arrow that ends must also begin"
    spans = {(entry["pid"], entry["ts"], entry["name"].split(",")[0]) for entry in entries if entry["ph"] == "X"}
    for name, end in ends.items():
        assert 0 <= int(name, 16) < 2**64, "Perfetto ignores an arrow whose id is not a 64-bit number"
        begin = begins[name]
        assert begin["ts"] < end["ts"], "Perfetto ignores an arrow that points back in time"
        at = {(begin["pid"], begin["ts"], f"to {end['pid']}"), (end["pid"], end["ts"], f"from {begin['pid']}")}
        assert at <= spans, "arrows must end at the spans of their messages"


async def train_two(world: ad.World) -> None:
    async def train_one(name: str) -> None:
        model = torch.nn.Linear(2, 2)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        async with AsyncSelectiveAveragingPolicy(model, optimizer, average_every=5, name=name) as policy:
            for _ in range(40):
                await policy.step(float(world.rank))
                await asyncio.sleep(0.001)

    await asyncio.gather(train_one("one"), train_one("two"))


def test_spans_of_a_track_never_overlap_and_no_track_is_thread_0(tmp_path: Path) -> None:
    """Perfetto drops a span that overlaps another one, and takes thread 0 for the thread with the process's number."""
    ad.simulate(train_two, ranks=4, seed=3, record=tmp_path)
    recording = read_recording(tmp_path)
    write_trace(recording, tmp_path / "trace.json")
    entries = entries_of(tmp_path / "trace.json")
    tracks: dict[tuple[int, int], list[tuple[float, float]]] = {}
    for entry in entries:
        if entry["ph"] == "X":
            tracks.setdefault((entry["pid"], entry["tid"]), []).append((entry["ts"], entry["ts"] + entry["dur"]))
    for (pid, track), spans in tracks.items():
        spans.sort()
        assert all(a[1] <= b[0] + 1e-4 for a, b in itertools.pairwise(spans)), (
            f"the spans of rank {pid}, track {track} overlap"
        )
    named = {(entry["pid"], entry["tid"]): entry["args"]["name"] for entry in entries if entry["name"] == "thread_name"}
    assert tracks.keys() <= named.keys() and all(track > 0 for _, track in named)
    assert [name for (pid, _), name in named.items() if pid == 0].count("steps") > 1, (
        "overlapping steps of two tasks must be on two tracks"
    )
    assert sum(entry["name"] == "policy.step" for entry in entries) == 4 * 2 * 40


def test_each_open_policy_has_a_metric_counter_in_a_trace(tmp_path: Path) -> None:
    """Regression: the metrics of all policies were one zigzag line."""

    async def train_three(world: ad.World) -> None:
        async def train_one(name: str, value: float) -> None:
            model = torch.nn.Linear(2, 2)
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            async with AsyncSelectiveAveragingPolicy(model, optimizer, average_every=5, name=name) as policy:
                for _ in range(20):
                    await policy.step(value)

        await asyncio.gather(train_one("", 1.0), train_one("critic", 2.0), train_one("", 3.0))
        await train_one("", 4.0)

    ad.simulate(train_three, ranks=2, seed=3, record=tmp_path).value()
    write_trace(read_recording(tmp_path), tmp_path / "trace.json")
    counters: dict[str, set[float]] = {}
    for entry in entries_of(tmp_path / "trace.json"):
        if entry["ph"] == "C" and entry["pid"] == 0:
            counters.setdefault(entry["name"], set()).add(entry["args"]["metric"])
    assert counters == {"metric": {1.0, 4.0}, "metric of critic": {2.0}, "metric #2": {3.0}}


def test_messages_with_which_ranks_meet_are_not_before_the_job(tmp_path: Path) -> None:
    """These messages precede the opening of a rank's file.

    Perfetto leaves out times below 0, so arrows had no beginning.
    """
    clock = SimpleNamespace(now=100.0)
    for rank in range(2):
        writer = RecordWriter(RecordOptions(tmp_path), lambda: clock.now, rank)
        clock.now = 100.0
        if rank == 0:
            writer.note("sent", 1, 7100, 64)
        writer.note("waited", WaitId(WaitKind.OTHERS_ENDED), 5.0)
        clock.now = 100.5
        if rank == 1:
            writer.note("received", 0, 7100, 64, -2, 0)
            writer.note("received", 0, 100, 64, 3, 0)  # the sender's record is missing
        writer.open(header_of(job="0000abcd", rank=rank, size=2, incarnation=0, transport="local", hostname="here"))
        writer.close()
    recording = read_recording(tmp_path)
    write_trace(recording, tmp_path / "trace.json")
    entries = entries_of(tmp_path / "trace.json")
    assert min(entry["ts"] for entry in entries if "ts" in entry) == 0
    assert Counter(entry["ph"] for entry in entries if entry["ph"] in "sf") == {"s": 1, "f": 1}, (
        "each arrow must have both ends"
    )
    times = [row[2] for _, row in tables.rows(recording)]
    assert min(times) == 0.0 and max(times) == pytest.approx(0.5)
    assert Clocks(recording).began_at_s == pytest.approx(recording.began_at - 0.5, abs=0.1)


def test_machines_with_one_hostname_have_separate_clocks(tmp_path: Path) -> None:
    """Regression: the ranks of all hosts named localhost had one clock, so a job of 10 s seemed to last days."""
    for rank, began_s in enumerate((1e3, 9e5, 9e5, 1e3)):
        now_s = [began_s]
        writer = RecordWriter(RecordOptions(tmp_path), lambda now_s=now_s: now_s[0], rank)  # type: ignore[misc]
        writer.open(header_of(job="0000abcd", rank=rank, size=4, incarnation=0, transport="mpi", hostname="localhost"))
        for iteration in range(10):
            now_s[0] += 1.0
            writer.note("step", 0, iteration, 0.1)
        writer.close()
    recording = read_recording(tmp_path)
    clocks = Clocks(recording)
    offsets_s = [
        clocks.offset(each) + began_s for each, began_s in zip(recording.ranks, (1e3, 9e5, 9e5, 1e3), strict=True)
    ]
    assert offsets_s == pytest.approx([0.0] * 4, abs=1.0)
    assert clocks.offset(recording.ranks[0]) == clocks.offset(recording.ranks[3]), "one machine has one clock"


def test_messages_to_a_rank_without_a_recording_are_left_out(tmp_path: Path) -> None:
    """Regression: if the ranks of several hosts had sent messages to such a rank, its host was looked up: KeyError."""
    for rank in range(2):
        writer = RecordWriter(RecordOptions(tmp_path), lambda: 1e3, rank)
        hostname = f"host{rank}"
        writer.open(header_of(job="0000abcd", rank=rank, size=3, incarnation=0, transport="mpi", hostname=hostname))
        writer.note("sent", 2, 100, 8)
        writer.close()
    recording = read_recording(tmp_path)
    assert recording.missing == (2,)
    assert [Clocks(recording).offset(each) + 1e3 for each in recording.ranks] == pytest.approx([0.0] * 2, abs=1.0)


async def train_to_nan(world: ad.World) -> None:
    model = torch.nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    async with AsyncSelectiveAveragingPolicy(model, optimizer, average_every=5) as policy:
        for step in range(20):
            await policy.step((0.5, math.nan, math.inf, -math.inf)[(world.rank + step // 5) % 4])


def refuse_constant(name: str) -> None:
    raise ValueError(f"JSON has no {name}")


def test_a_trace_of_metrics_that_are_no_finite_numbers_is_json(tmp_path: Path) -> None:
    ad.simulate(train_to_nan, ranks=2, seed=1, record=tmp_path)
    write_trace(read_recording(tmp_path), tmp_path / "trace.json")
    read = json.loads((tmp_path / "trace.json").read_text(), parse_constant=refuse_constant)["traceEvents"]
    assert {entry["name"] for entry in read} >= {"metric nan", "metric inf", "metric -inf"}
    assert {entry["args"]["metric"] for entry in read if entry["name"] == "metric"} == {0.5}


def test_profiler_traces_are_added_with_own_processes_and_times(recording: Recording, tmp_path: Path) -> None:
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        torch.ones(3) + 1
    profile.export_chrome_trace(str(tmp_path / "torch.json"))
    own = {entry["name"] for entry in json.loads((tmp_path / "torch.json").read_text())["traceEvents"]}
    plain = write_trace(recording, tmp_path / "plain.json")
    both = write_trace(recording, tmp_path / "both.json", [tmp_path / "torch.json"])
    entries = entries_of(tmp_path / "both.json")
    assert both > plain and "aten::add" in own
    added = [entry for entry in entries if entry["name"] == "aten::add"]
    assert added and all(entry["pid"] >= 1_000_000 for entry in added)
    assert all(abs(entry["ts"]) < 1e6 * 3600 for entry in added), "torch's events must use the ranks' clock"
    assert not any("torch: " in str(entry.get("args")) for entry in entries), (
        "no entry may contain 'torch: ', as all ranks are of this process"
    )
    alone = tmp_path / "alone"
    ad.simulate(train, ranks=1, seed=5, record=alone)
    write_trace(read_recording(alone), tmp_path / "alone.json", [tmp_path / "torch.json"])
    names = [entry["args"]["name"] for entry in entries_of(tmp_path / "alone.json") if entry["name"] == "process_name"]
    assert any(name.startswith("rank 0, torch: ") for name in names)


@pytest.mark.parametrize(
    "name, content, why",
    [
        ("foreign.json", b'{"traceEvents": 3}', "TypeError"),
        ("deep.json", b"[" * 100_000, "RecursionError"),
        ("cut.json.gz", gzip.compress(b"[]" * 1000)[:-9], "EOFError"),
        ("damaged.json.gz", gzip.compress(b"[]")[:10] + b"\xff" * 20, "error: Error -3 while decompressing"),
        ("large.json", b'[{"ph": "X", "ts": 1%s}]' % (b"0" * 400), "OverflowError"),
        ("infinite.json", b'[{"ph": "X", "ts": 1}, {"ts": 1e999}]', "finite number, got inf"),
        ("bomb.json.gz", gzip.compress(b" " * 5000), "it has more than 0 MiB, uncompressed"),
    ],
)
def test_a_file_that_is_no_profile_is_refused(
    name: str, content: bytes, why: str, recording: Recording, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(trace, "_PROFILE_NBYTES_MAX", 200_000 if name == "deep.json" else 4000)
    (tmp_path / name).write_bytes(content)
    with pytest.raises(TraceError, match=rf"{name} must be a trace of torch's profiler, .*{why}"):
        write_trace(recording, tmp_path / "x.json", [tmp_path / name])
    assert not (tmp_path / "x.json").exists()


def test_spans_and_counter_names_take_little_time() -> None:
    """Regression: a recording of 1 MB with overlapping steps or many open policies took minutes."""
    tracks, names = trace._Tracks(0), trace._CounterNames()
    began_s = time.process_time()
    spans = [list(tracks._added(trace.STEPS, "step", 0.0, 1e3 + n, {}))[-1] for n in range(10_000)]
    for policy in range(10_000):
        names.open(policy, "same")
    assert time.process_time() - began_s < 3.0
    assert len({span["tid"] for span in spans}) == 10_000 and len({names.name_of(n) for n in range(10_000)}) == 10_000


def test_a_closed_policys_counter_name_is_used_again() -> None:
    names = trace._CounterNames()
    for policy in range(4):
        names.open(policy, "" if policy < 3 else "a #2")
    names.open(4, "a")
    names.open(5, "a")
    assert [names.name_of(n) for n in (0, 1, 2)] == ["metric", "metric #2", "metric #3"]
    assert [names.name_of(n) for n in (3, 4, 5)] == ["metric of a #2", "metric of a", "metric of a #3"]
    names.close(1)
    names.close(1)
    names.open(6, "")
    names.open(0, "b")
    assert [names.name_of(n) for n in (6, 0, 1)] == ["metric #2", "metric of b", "metric"]
