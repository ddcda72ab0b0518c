"""What other programs read of a recording: a trace, tables, answers to queries; and what is said of wrong input."""

from __future__ import annotations

import asyncio
import base64
import csv
import errno
import gzip
import itertools
import json
import math
import os
import re
import resource
import signal
import threading
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import asyncdist as ad
from asyncdist import cli
from asyncdist.recording.events import KINDS
from asyncdist.recording.reader import Recording, read_recording
from asyncdist.recording.writer import RecordOptions, RecordWriter, header_of
from asyncdist.report import tables
from asyncdist.report.clocks import Clocks
from asyncdist.report.page import render
from asyncdist.report.summary import summarise
from asyncdist.report.trace import TraceError, write_trace
from asyncdist.story.recorded import tell_recording
from protocols import AsyncSelectiveAveragingPolicy


async def train(world: ad.World) -> int:
    model = torch.nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    async with AsyncSelectiveAveragingPolicy(model, optimizer, average_every=5, replacement_ratio=0.5) as policy:
        for _ in range(30):
            await policy.step(float(world.rank))
        return policy.statistics().replacement_count


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("recorded")
    report = ad.simulate(train, ranks=4, seed=5, record=folder)
    assert sum(report.results) > 2, "rounds take place"
    return folder


@pytest.fixture
def recording(folder: Path) -> Recording:
    return read_recording(folder)


def counted(recording: Recording) -> Counter[str]:
    return Counter(event.kind for each in recording.ranks for event in each.events())


def entries_of(path: Path) -> list[dict[str, Any]]:
    with gzip.open(path, "rt") if path.suffix == ".gz" else path.open() as file:
        found: list[dict[str, Any]] = json.load(file)["traceEvents"]
    return found


def test_a_report_is_one_page_whose_numbers_are_those_of_the_run(recording: Recording) -> None:
    kinds = counted(recording)
    summary = summarise(recording)
    assert len(summary.applied) == kinds["applied"] and len(summary.rounds) == kinds["decided"]
    assert [rank.step_seconds.count for rank in summary.ranks] == [30] * 4
    (population,) = summary.populations
    assert [metric.count for metric in population.metrics] == [6] * 4
    sent = [event for each in recording.ranks for event in each.events() if event.kind == "sent"]
    assert summary.nbytes.sum() == sum(event.get("nbytes") for event in sent)
    assert population.shares.sum(axis=1) == pytest.approx([1.0] * 4), "all of a rank's weights come from somebody"
    replaced = {applied.rank for applied in summary.applied}
    assert all((population.shares[rank, rank] == 1.0) == (rank not in replaced) for rank in range(4))
    ended = [each for each in summary.rounds if each.ended_s == each.ended_s]
    assert ended and all(
        each.began_s <= each.frozen_s <= each.ended_s for each in ended if each.frozen_s == each.frozen_s
    )
    page = render(recording)
    assert f"{kinds['decided']} of {kinds['decided']} rounds" in page
    assert f"{kinds['decided']}, with {kinds['applied']} replacements" in page
    assert 1e3 <= summary.nbytes.sum() < 1e6
    assert f"{summary.nbytes.sum() / 1e3:.3g} kB;" in page, "it was 0.0 MB"
    assert page.count("<h2>") == 8
    assert [figure.keys() for figure in figures(page)] == [{"data": 0, "layout": 0}.keys()] * 7
    assert page.count("Plotly.newPlot(place") == 1, "each is drawn when the reader comes to it"
    assert not re.search(r"<(script|link|img)[^>]*(src|href)=", page), "it needs no network"


def test_a_report_begins_with_a_summary_and_explains_its_plots(recording: Recording) -> None:
    page = render(recording)
    told = re.findall("<li>(.*?)</li>", page)
    assert page.index("<li>") < page.index("<table>")
    events = [event for each in recording.ranks for event in each.events()]
    applied = Counter(event.get("round") for event in events if event.kind == "applied")
    decided = {event.get("round"): len(event.get("replacers")) for event in events if event.kind == "decided"}
    whole = sum(0 < count == applied[number] for number, count in decided.items())
    assert whole > 0
    assert any(
        line.startswith(f"{whole} of {len(decided)} rounds ") and f" {applied.total()} replacements" in line
        for line in told
    ), told
    notes = re.findall("</h2>\n<p>(.*?)</p>", page)
    assert len(notes) == 8 and all("Look for " in note for note in notes[:-1]), notes


@dataclass(frozen=True)
class Note:
    number: int


def test_a_report_explains_a_late_start_and_misses_no_message(tmp_path: Path) -> None:
    async def train_late(world: ad.World) -> None:
        channel = world.channel(Note, tag=100)
        for number in range(3):
            if world.rank == 0:
                await channel.send(Note(number), 1)
            else:
                await channel.receive()
        await world.sleep(5.0)
        await train(world)

    ad.simulate(train_late, ranks=2, seed=1, record=tmp_path)
    page = render(read_recording(tmp_path))
    assert "messages were sent; no message of the program&#x27;s channels was lost." in page
    assert "The first step ended 5 s after the first rank began" in page
    (grey,) = figures(page)[0]["layout"]["shapes"]
    assert grey["x0"] == 0 and grey["x1"] == pytest.approx(5.0, abs=0.05)
    assert "The grey part, 5 s, is before the first step of any rank." in page


def test_heat_maps_have_rank_0_on_top_and_legends_have_room(recording: Recording) -> None:
    """Regression: two of four had it at the bottom, and legends were cut off in a narrow window."""
    drawn = figures(render(recording))
    heatmaps = [figure for figure in drawn if figure["data"][0]["type"] == "heatmap"]
    assert [figure["layout"]["yaxis"]["autorange"] for figure in heatmaps] == ["reversed"] * 4
    assert {figure["data"][0]["colorbar"]["orientation"] for figure in heatmaps} == {"h"}
    assert {figure["layout"]["legend"]["orientation"] for figure in drawn} == {"h"}


@pytest.mark.parametrize("last", [-0.5, 1e30, math.nan])
def test_the_scale_of_the_metric_shows_most_of_the_run(tmp_path: Path, last: float) -> None:
    """Regression: values of the first steps, or of a run that diverges at its end, hid all others."""

    async def train_with_outliers(world: ad.World) -> None:
        model = torch.nn.Linear(2, 2)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        async with AsyncSelectiveAveragingPolicy(model, optimizer, average_every=1) as policy:
            for step in range(200):
                await policy.step(-1e6 if step < 2 else last if step > 190 and world.rank else -1.0 + 0.002 * step)

    ad.simulate(train_with_outliers, ranks=2, seed=1, record=tmp_path)
    page = render(read_recording(tmp_path))
    low, high = figures(page)[0]["layout"]["yaxis"]["range"]
    assert -6.0 < low < -0.9 and -0.7 < high < 6.0
    assert "The scale leaves out the rarest values, of which there are some between -1e+06 and " in page


def test_a_report_of_many_ranks_has_quantiles_and_names_losses(tmp_path: Path) -> None:
    faults = (ad.Kill(rank=0, at_s=0.015),)
    ad.simulate(train, ranks=70, seed=1, record=tmp_path, faults=faults)
    page = render(read_recording(tmp_path))
    assert "Of 70 ranks: least, quartiles, most" in page
    assert "rank 0 is lost" in page and re.search(r"rank \d+ coordinates \(epoch \d+\)", page)
    assert len(page) < 8e6


def figures(page: str) -> list[Any]:
    found = re.findall(r'<div class="figure"[^>]*><script type="application/json">(.*?)</script></div>', page)
    return [json.loads(figure) for figure in found]


def test_a_report_without_a_policy_has_no_empty_plots(tmp_path: Path) -> None:
    async def meet(world: ad.World) -> None:
        await ad.barrier()

    ad.simulate(meet, ranks=2, seed=1, record=tmp_path)
    page = render(read_recording(tmp_path))
    assert "No metric was given." in page and "No policy has made two steps." in page
    assert [figure["layout"]["xaxis"]["title"]["text"] for figure in figures(page)] == ["to rank"]


def test_the_lag_scale_of_a_report_of_one_rank_begins_at_0(tmp_path: Path) -> None:
    ad.simulate(train, ranks=1, seed=1, record=tmp_path)
    heatmaps = [figure["data"][0] for figure in figures(render(read_recording(tmp_path)))]
    assert all(each["zmax"] > 0 for each in heatmaps if each["type"] == "heatmap" and "zmax" in each)


def test_a_replacement_of_a_rank_with_a_nan_metric_is_drawn(tmp_path: Path) -> None:
    async def train_one_in_vain(world: ad.World) -> None:
        model = torch.nn.Linear(2, 2)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        async with AsyncSelectiveAveragingPolicy(model, optimizer, average_every=5) as policy:
            for _ in range(20):
                await policy.step(-3.0 + world.rank if world.rank else math.nan)

    ad.simulate(train_one_in_vain, ranks=4, seed=1, record=tmp_path)
    recording = read_recording(tmp_path)
    assert {each.rank for each in summarise(recording).applied} == {0}
    marks = next(each for each in figures(render(recording))[0]["data"] if each["name"] == "replaced")
    heights = memoryview(base64.b64decode(marks["y"]["bdata"])).cast("f")
    assert len(heights) == len(summarise(recording).applied) and set(heights) == {-2.0}


def test_a_report_distinguishes_two_policies_open_at_once(tmp_path: Path) -> None:
    """Regression: their metrics were one zigzag line, and the weights of one were said to live in the other."""

    async def train_two(world: ad.World) -> None:
        def policy(name: str) -> AsyncSelectiveAveragingPolicy:
            model = torch.nn.Linear(2, 2)
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            return AsyncSelectiveAveragingPolicy(model, optimizer, average_every=5, name=name)

        async with policy("actor") as actor:
            async with policy("critic") as critic:
                for _ in range(30):
                    await actor.step(float(world.rank))
                    await critic.step(-float(world.rank))
            async with policy("later") as later:
                await later.step(0.0)

    ad.simulate(train_two, ranks=4, seed=2, record=tmp_path)
    recording = read_recording(tmp_path)
    summary = summarise(recording)
    actor, critic = summary.populations
    assert (actor.name, critic.name) == ("actor", "critic"), "the third one follows the second"
    for rank in range(4):
        assert {value for _, value in actor.metrics[rank].rows()} == {float(rank)}
        assert {value for _, value in critic.metrics[rank].rows()} == {-float(rank)}
    assert {(each.population, each.rank) for each in summary.applied} == {(0, 0), (1, 3)}
    assert actor.shares[0, 0] == critic.shares[3, 3] == 0.0 and actor.shares[3, 3] == critic.shares[0, 0] == 1.0
    page = render(recording)
    assert "<h2>Metric of actor</h2>" in page and "<h2>Whose weights live in whom, of critic</h2>" in page


def test_a_report_names_ranks_whose_recording_ends_before_main(tmp_path: Path) -> None:
    ad.simulate(train, ranks=3, seed=1, record=tmp_path / "killed", faults=(ad.Kill(rank=2, at_s=0.01),))
    news = summarise(read_recording(tmp_path / "killed")).news
    assert [rank for _, rank, text in news if "recording" in text] == [2]
    ad.simulate(train, ranks=3, seed=1, record=tmp_path / "cut", record_limit_nbytes=15_000)
    news = summarise(read_recording(tmp_path / "cut")).news
    why = "its recording has reached 15000 bytes, and ends here; record_limit_nbytes allows more"
    assert 0 in {rank for _, rank, _ in news} and {text for _, _, text in news} == {why}
    assert f"  rank 0: {why}; its last event was" in tell_recording(str(tmp_path / "cut"))


def test_a_report_names_a_jobs_stories_and_the_end_of_main(tmp_path: Path) -> None:
    async def stand_still(world: ad.World) -> None:
        world.services.events.record("told", "nothing moves for 60 s; job 1\n  rank 0 waits for rank 1")
        raise KeyError

    with pytest.raises(KeyError):
        ad.run_local(stand_still, ranks=2, record=tmp_path)
    summary = summarise(read_recording(tmp_path))
    texts = [text for _, _, text in summary.news]
    assert texts.count("nothing moves for 60 s: asyncdist story has what was told") == 1
    assert texts.count("main ended with KeyError") == 2, "the text of an error without a message had a colon"
    page = render(read_recording(tmp_path))
    assert "nothing moves for 60 s" in page and "rank 0 waits" not in page


def test_a_report_shows_no_absence_for_peers_of_a_new_process(tmp_path: Path) -> None:
    """Regression: the report said of the ranks that a new process met that they had been away."""
    faults = (ad.Kill(rank=2, at_s=0.005), ad.Restart(rank=2, at_s=0.02))
    ad.simulate(train, ranks=3, seed=3, record=tmp_path, faults=faults, until_s=60.0)
    news = {(rank, text) for _, rank, text in summarise(read_recording(tmp_path)).news}
    assert {(0, "rank 2 is there, as a new process"), (2, "rank 0 is there")} <= news


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
    assert ends.keys() <= begins.keys(), "what has come was sent"
    spans = {(entry["pid"], entry["ts"], entry["name"].split(",")[0]) for entry in entries if entry["ph"] == "X"}
    for name, end in ends.items():
        assert 0 <= int(name, 16) < 2**64, "Perfetto leaves out an arrow that is no such number"
        begin = begins[name]
        assert begin["ts"] < end["ts"], "Perfetto leaves out an arrow that would lead back in time"
        at = {(begin["pid"], begin["ts"], f"to {end['pid']}"), (end["pid"], end["ts"], f"from {begin['pid']}")}
        assert at <= spans, "arrows end at the spans of their messages"


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
    """Perfetto drops a span that overlaps another one, and takes thread 0 for the one with the process's number."""
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
        assert all(a[1] <= b[0] + 1e-4 for a, b in itertools.pairwise(spans)), f"rank {pid}, track {track}"
    named = {(entry["pid"], entry["tid"]): entry["args"]["name"] for entry in entries if entry["name"] == "thread_name"}
    assert tracks.keys() <= named.keys() and all(track > 0 for _, track in named)
    assert [name for (pid, _), name in named.items() if pid == 0].count("steps") > 1, "steps of two tasks overlap"
    assert sum(entry["name"] == "policy.step" for entry in entries) == 4 * 2 * 40


def test_each_open_policy_has_a_metric_counter_in_a_trace(tmp_path: Path) -> None:
    """Regression: the metrics of all of them were one zigzag line."""

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
    """They come before a rank's file is opened: Perfetto leaves out what has a time below 0, and their arrows ended."""
    clock = SimpleNamespace(now=100.0)
    for rank in range(2):
        writer = RecordWriter(RecordOptions(tmp_path), lambda: clock.now, rank)
        clock.now = 100.0
        if rank == 0:
            writer.note("sent", 1, 7100, 64)
        writer.note("waited", "the others", 5.0)
        clock.now = 100.5
        if rank == 1:
            writer.note("received", 0, 7100, 64, -2, 0)
            writer.note("received", 0, 100, 64, 3, 0)  # of what was sent nothing is known
        writer.open(header_of(job="0000abcd", rank=rank, size=2, incarnation=0, transport="local", hostname="here"))
        writer.close()
    recording = read_recording(tmp_path)
    write_trace(recording, tmp_path / "trace.json")
    entries = entries_of(tmp_path / "trace.json")
    assert min(entry["ts"] for entry in entries if "ts" in entry) == 0
    assert Counter(entry["ph"] for entry in entries if entry["ph"] in "sf") == {"s": 1, "f": 1}, "both ends or none"
    times = [row[2] for _, row in tables.rows(recording)]
    assert min(times) == 0.0 and max(times) == pytest.approx(0.5)
    assert Clocks(recording).began_at_s == pytest.approx(recording.began_at - 0.5, abs=0.1)


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
    assert all(abs(entry["ts"]) < 1e6 * 3600 for entry in added), "the same clock"
    assert not any("torch: " in str(entry.get("args")) for entry in entries), "all ranks are of this process"
    alone = tmp_path / "alone"
    ad.simulate(train, ranks=1, seed=5, record=alone)
    write_trace(read_recording(alone), tmp_path / "alone.json", [tmp_path / "torch.json"])
    names = [entry["args"]["name"] for entry in entries_of(tmp_path / "alone.json") if entry["name"] == "process_name"]
    assert any(name.startswith("rank 0, torch: ") for name in names)
    (tmp_path / "foreign.json").write_text('{"traceEvents": 3}')
    with pytest.raises(TraceError, match=r"foreign\.json is no trace of torch's profiler"):
        write_trace(recording, tmp_path / "x.json", [tmp_path / "foreign.json"])


def test_tables_have_every_event(recording: Recording, tmp_path: Path) -> None:
    files = tables.export_csv(recording, tmp_path / "tables")
    kinds = counted(recording)
    assert {file.stem for file in files} == {*kinds, "ranks"}
    for file in files:
        with file.open(newline="") as opened:
            header, *content = csv.reader(opened)
        assert tuple(header) == tables.columns_of(file.stem)
        assert len(content) == (4 if file.stem == "ranks" else kinds[file.stem])
        if file.stem == "applied":
            donors = [json.loads(row[header.index("donors")]) for row in content]
            assert all(0 <= donor < 4 for each in donors for donor in each) and any(donors)


def test_parquet_has_the_same_rows(recording: Recording, tmp_path: Path) -> None:
    parquet = pytest.importorskip("pyarrow.parquet", reason="pyarrow is not installed", exc_type=ImportError)
    tables.export_parquet(recording, tmp_path)
    metrics = parquet.read_table(tmp_path / "metric.parquet").to_pylist()
    assert len(metrics) == counted(recording)["metric"] and metrics[0].keys() == set(tables.columns_of("metric"))


def test_parquet_has_what_the_first_rows_of_a_table_have_not(tmp_path: Path) -> None:
    """Regression: export raised ArrowNotImplementedError if the first averages of a table had no coordinator."""
    parquet = pytest.importorskip("pyarrow.parquet", reason="pyarrow is not installed", exc_type=ImportError)
    writer = RecordWriter(RecordOptions(tmp_path / "run"), lambda: 100.0, 0)
    writer.open(header_of(job="0000abcd", rank=0, size=4, incarnation=0, transport="local", hostname="here"))
    for number in range(10_001):
        coordinator, route = (3, "direct") if number == 10_000 else (None, None)
        writer.note("applied", 0, number, number, [0], None, None, 0.5, 8, coordinator, route)
    writer.close()
    tables.export_parquet(read_recording(tmp_path / "run"), tmp_path / "tables")
    last = parquet.read_table(tmp_path / "tables" / "applied.parquet").slice(10_000).to_pylist()[0]
    assert (last["coordinator"], last["route"], last["weights"]) == (3, "direct", None)


def test_a_query_is_answered(recording: Recording) -> None:
    names, found = tables.query(recording, "SELECT rank, count(*) AS steps FROM step GROUP BY rank ORDER BY rank")
    assert (names, list(found)) == (["rank", "steps"], [(rank, 30) for rank in range(4)])
    joined = "SELECT applied.rank FROM applied JOIN ranks ON applied.rank = ranks.rank WHERE nbytes > 0"
    assert len(list(tables.query(recording, joined)[1])) == counted(recording)["applied"]
    for statement in ("SELECT * FROM nothing", "nonsense"):
        with pytest.raises(tables.QueryError, match="policy, step, "):
            tables.query(recording, statement)
    with pytest.raises(tables.QueryError, match=r"loss; .*step: rank, incarnation, "):
        tables.query(recording, "SELECT loss FROM step")
    assert {"rank", "incarnation", "time_s", *KINDS["step"]} == set(tables.columns_of("step"))


def run(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, str, str]:
    with pytest.raises(SystemExit) as ended:
        cli.main(words)
    out, err = capsys.readouterr()
    return int(ended.value.code or 0), out, err


def test_the_commands(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run(capsys, "query", str(folder), "SELECT max(iteration) FROM step")
    assert (code, out) == (0, "max(iteration)\n29\n")
    code, out, _ = run(capsys, "trace", str(folder), "-o", str(tmp_path / "t.json"))
    assert code == 0 and "open it at https://ui.perfetto.dev" in out and (tmp_path / "t.json").exists()
    code, out, _ = run(capsys, "report", str(folder), "-o", str(tmp_path / "r.html"))
    assert code == 0 and "open it in a browser" in out and "<h1>Job " in (tmp_path / "r.html").read_text()
    code, out, _ = run(capsys, "export", str(folder), "-o", str(tmp_path / "tables"))
    assert code == 0 and "step.csv" in out


A_FILE = "; -o takes a file, in a folder that is there"
A_FOLDER = "; -o takes a folder, which is made if it is not there"


@pytest.mark.parametrize(
    ("command", "out", "said"),
    [
        ("report", "folder", "the page cannot be written: '{}/folder' is a folder" + A_FILE),
        ("report", "none/page", "the page cannot be written: there is no folder '{}/none'" + A_FILE),
        ("report", "file/more/page", "the page cannot be written: '{}/file' is a file, and no folder" + A_FILE),
        ("trace", "folder", "the trace cannot be written: '{}/folder' is a folder" + A_FILE),
        ("trace", "none/trace.gz", "the trace cannot be written: there is no folder '{}/none'" + A_FILE),
        ("export", "file", "the tables cannot be written: '{}/file' is a file, and no folder" + A_FOLDER),
        ("report", "full", "the page cannot be written: No space left on device" + A_FILE),
    ],
)
def test_what_cannot_be_written_is_told_in_words(
    command: str, out: str, said: str, folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Regression: the line was Python's: [Errno 21] Is a directory."""
    (tmp_path / "folder").mkdir()
    (tmp_path / "file").touch()
    (tmp_path / "full").symlink_to("/dev/full")
    code, _, err = run(capsys, command, str(folder), "-o", str(tmp_path / out))
    assert (code, err) == (2, f"asyncdist {command}: {said.format(tmp_path)}\n")


@pytest.mark.parametrize(
    ("command", "out"),
    [
        (["report"], "page.html"),
        (["trace"], "job.trace.json.gz"),
        (["trace"], "job.trace.json"),
        (["export"], "tables"),
        (["export", "--format", "parquet"], "tables"),
    ],
)
def test_a_full_disk_leaves_the_old_file_and_no_partial_one(
    command: list[str], out: str, folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Regression: half a page stayed, in the place of a whole one from before."""
    if "parquet" in command:
        pytest.importorskip("pyarrow.parquet", reason="pyarrow is not installed", exc_type=ImportError)

    def run_on_small_disk() -> None:
        limit, most = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (500, most))
        try:
            code, told, err = run(capsys, *command, str(folder), "-o", str(tmp_path / out))
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (limit, most))
        assert (code, told, err.count("\n")) == (2, "", 1), err
        assert os.strerror(errno.EFBIG) in err

    run_on_small_disk()
    assert not list(tmp_path.iterdir())
    assert run(capsys, *command, str(folder), "-o", str(tmp_path / out))[0] == 0
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    run_on_small_disk()
    assert before and {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()} == before


def test_an_empty_name_is_refused(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for command in ("report", "trace", "export"):
        code, _, err = run(capsys, command, str(folder), "-o", "")
        assert code == 2 and "'' is no name; without -o the name is that of the job" in err


#: Fails in its second row.
OVERFLOW = "SELECT abs(-9223372036854775807 - value) FROM json_each('[0, 1]')"


@pytest.mark.parametrize(
    ("statement", "why"),
    [
        ("SELECT lacking", "no such column: lacking"),
        (OVERFLOW, "integer overflow"),
        ("SELECT '\udcff'", "it is no UTF-8"),
        ("SELECT 1; SELECT 2", "You can only execute one statement at a time"),
        ("", "it asks for no rows"),
    ],
)
def test_a_query_that_is_refused_is_one_line(
    statement: str, why: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code, _, err = run(capsys, "query", str(folder), statement)
    assert (code, err.count("\n")) == (2, 1)
    assert err.startswith(f"asyncdist query: the query is refused: {why}")


@pytest.mark.parametrize(
    "statement",
    [
        "ATTACH 'made.db' AS other",
        "VACUUM INTO 'made.db'",
        "PRAGMA query_only = OFF",
        "PRAGMA journal_mode = WAL",
        "CREATE TEMP TABLE more (x)",
        "DELETE FROM step",
        "DROP TABLE step",
        "SELECT load_extension('x')",
    ],
)
def test_a_query_only_reads_and_leaves_no_file(
    statement: str, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Regression: ATTACH and VACUUM INTO were refused, and left an empty file."""
    monkeypatch.chdir(tmp_path)
    code, _, err = run(capsys, "query", str(folder), statement)
    assert (code, err.count("\n")) == (2, 1)
    assert "allowed: one SELECT, which changes nothing and makes no file" in err
    assert not list(tmp_path.iterdir())


def test_names_in_an_answer_are_not_obeyed_by_a_terminal(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run(capsys, "query", str(folder), "SELECT 'a' || char(27) || '[2J', 'two' || char(10) || 'lines'")
    assert code == 0 and out.endswith('a\\x1b[2J,"two\nlines"\n')


def test_a_job_of_too_many_ranks_has_no_report_but_tables(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Regression: tables of all pairs of a million ranks were begun."""
    monkeypatch.chdir(tmp_path)
    to = RecordWriter(RecordOptions(tmp_path / "run"), lambda: 1.0, 0)
    to.open(header_of(job="0000abcd", rank=0, size=65536, incarnation=0, transport="local", hostname="here"))
    to.note("sent", 65535, 100, 8)
    to.close()
    code, _, err = run(capsys, "report", str(tmp_path / "run"))
    assert (code, err.count("\n")) == (2, 1) and "has 65536 ranks; allowed in a report: 2048" in err
    assert run(capsys, "query", str(tmp_path / "run"), "SELECT dest FROM sent")[:2] == (0, "dest\n65535\n")


def test_text_that_is_not_utf8_is_shown_with_backslashes(recording: Recording) -> None:
    assert list(tables.query(recording, "SELECT CAST(x'61ff' AS TEXT)")[1]) == [("a\\xff",)]


@pytest.mark.parametrize("words", [("report",), ("trace",), ("export",), ("query", "SELECT 1")])
def test_a_folder_without_a_recording_is_one_line(
    words: tuple[str, ...], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command, *rest = words
    code, out, err = run(capsys, command, str(tmp_path), *rest)
    assert (code, out) == (2, "")
    assert err.startswith(f"asyncdist {command}: {tmp_path} ") and err.count("\n") == 1


def test_ctrl_c_ends_a_long_query_with_one_line(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    timer = threading.Timer(0.3, signal.pthread_kill, (threading.main_thread().ident, signal.SIGINT))
    read = tables.rows

    def rows(*arguments: Any) -> Any:
        timer.start()  # from now on the command is in SQLite, or on the way to it
        return read(*arguments)

    monkeypatch.setattr(tables, "rows", rows)
    numbers = "WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n LIMIT 1000000000) SELECT count(*) FROM n"
    assert run(capsys, "query", str(folder), numbers) == (130, "", "asyncdist query: interrupted\n")


@pytest.mark.parametrize("words", [("report",), ("trace",), ("export",), ("query", "SELECT 1")])
def test_ctrl_c_while_a_recording_is_read_is_one_line(
    words: tuple[str, ...], folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*_: object) -> Recording:
        raise KeyboardInterrupt

    monkeypatch.setattr("asyncdist.recording.reader.read_recording", interrupted)
    command, *rest = words
    assert run(capsys, command, str(folder), *rest) == (130, "", f"asyncdist {command}: interrupted\n")
