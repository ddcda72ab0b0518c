"""Tests the pages that report recordings."""

from __future__ import annotations

import base64
import json
import math
import os
import re
import sys
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from support.recorded_run import counted, train
from support.seeds import in_ci

import asyncdist as ad
from asyncdist.recording.reader import Recording, read_recording
from asyncdist.report import commands
from asyncdist.report.page import render
from asyncdist.report.summary import summarise
from asyncdist.story.last_events import describe_recording
from protocols import AsyncSelectiveAveragingPolicy


def test_a_report_is_one_page_whose_numbers_are_those_of_the_run(recording: Recording) -> None:
    kinds = counted(recording)
    summary = summarise(recording)
    assert len(summary.applied) == kinds["applied"] and len(summary.rounds) == kinds["decided"]
    assert [rank.step_seconds.count for rank in summary.ranks] == [30] * 4
    (population,) = summary.populations
    assert [metric.count for metric in population.metrics] == [6] * 4
    sent = [event for each in recording.ranks for event in each.events() if event.kind == "sent"]
    assert summary.nbytes.sum() == sum(event.get("nbytes") for event in sent)
    assert population.shares.sum(axis=1) == pytest.approx([1.0] * 4), "the shares of a rank's weights must add up to 1"
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
    assert f"{summary.nbytes.sum() / 1024:.1f} KiB;" in page, "the page once showed 0.0 MB"
    assert page.count("<h2>") == 8
    assert [figure.keys() for figure in figures(page)] == [{"data": 0, "layout": 0}.keys()] * 7
    assert page.count("Plotly.newPlot(place") == 1, "each chart must be drawn only when the reader scrolls to it"
    assert not re.search(r"<(script|link|img)[^>]*(src|href)=", page), "the page must not need the network"


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
    assert "The first step ended 5.0 s after the first rank began" in page
    (grey,) = figures(page)[0]["layout"]["shapes"]
    assert grey["x0"] == 0 and grey["x1"] == pytest.approx(5.0, abs=0.05)
    assert "The grey part, 5 s, is the time before the first step of any rank." in page


def test_heat_maps_have_rank_0_on_top_and_legends_have_room(recording: Recording) -> None:
    """Regression: two of four maps had rank 0 at the bottom, and legends were cut off in a narrow window."""
    drawn = figures(render(recording))
    heatmaps = [figure for figure in drawn if figure["data"][0]["type"] == "heatmap"]
    assert [figure["layout"]["yaxis"]["autorange"] for figure in heatmaps] == ["reversed"] * 4
    assert {figure["data"][0]["colorbar"]["orientation"] for figure in heatmaps} == {"h"}
    assert {figure["layout"]["legend"]["orientation"] for figure in drawn} == {"h"}


@pytest.mark.parametrize("last", in_ci([-0.5, 1e30, 1e300, math.nan], -0.5, 1e300))
def test_the_scale_of_the_metric_shows_most_of_the_run(tmp_path: Path, last: float) -> None:
    """Regression: values of the first steps, or of a run that diverges at its end, hid all other values."""

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
    assert "The scale leaves out rare values; all values lie between -1e+06 and " in page


def test_a_report_of_many_ranks_has_quantiles_and_names_losses(tmp_path: Path) -> None:
    faults = (ad.Kill(rank=0, at_s=0.015),)
    ad.simulate(train, ranks=70, seed=1, record=tmp_path, faults=faults)
    page = render(read_recording(tmp_path))
    assert "The minimum, quartiles and maximum of 70 ranks" in page
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
    assert "No rank reported a metric." in page and "No policy has made two steps." in page
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
    """Regression: their metrics were one zigzag line, and weights seemed to descend from the other policy's."""

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
    assert (actor.name, critic.name) == ("actor", "critic"), "the third policy must be counted with the second"
    for rank in range(4):
        assert {value for _, value in actor.metrics[rank].rows()} == {float(rank)}
        assert {value for _, value in critic.metrics[rank].rows()} == {-float(rank)}
    assert {(each.population, each.rank) for each in summary.applied} == {(0, 0), (1, 3)}
    assert actor.shares[0, 0] == critic.shares[3, 3] == 0.0 and actor.shares[3, 3] == critic.shares[0, 0] == 1.0
    page = render(recording)
    assert "<h2>Metric of actor</h2>" in page and "<h2>Ancestry of the weights, of critic</h2>" in page


def test_a_report_names_ranks_whose_recording_ends_before_main(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["pytest"])  # the arguments of this process count towards the limit below
    ad.simulate(train, ranks=3, seed=1, record=tmp_path / "killed", faults=(ad.Kill(rank=2, at_s=0.01),))
    news = summarise(read_recording(tmp_path / "killed")).news
    assert [rank for _, rank, text in news if "recording" in text] == [2]
    ad.simulate(train, ranks=3, seed=1, record=tmp_path / "cut", record_limit_nbytes=15_000)
    news = summarise(read_recording(tmp_path / "cut")).news
    why = "its recording has reached its limit of 15000 bytes and ends here; raise record_limit_nbytes to record more"
    assert 0 in {rank for _, rank, _ in news} and {text for _, _, text in news} == {why}
    assert f"  rank 0: {why}; its last event was" in describe_recording(str(tmp_path / "cut"))


def test_a_report_names_a_jobs_stories_and_the_end_of_main(tmp_path: Path) -> None:
    async def stand_still(world: ad.World) -> None:
        world.services.events.record("told", "nothing moves for 60 s; job 1\n  rank 0 waits for rank 1")
        raise KeyError

    with pytest.raises(KeyError):
        ad.run_local(stand_still, ranks=2, record=tmp_path)
    summary = summarise(read_recording(tmp_path))
    texts = [text for _, _, text in summary.news]
    assert texts.count("nothing moves for 60 s; asyncdist story shows the full story") == 1
    assert texts.count("main ended with KeyError") == 2, (
        "the line must not end with a colon if the error has no message"
    )
    page = render(read_recording(tmp_path))
    assert "nothing moves for 60 s" in page and "rank 0 waits" not in page


def test_a_report_shows_no_absence_for_peers_of_a_new_process(tmp_path: Path) -> None:
    """Regression: the report said that the ranks that a new process met had been away."""
    faults = (ad.Kill(rank=2, at_s=0.005), ad.Restart(rank=2, at_s=0.02))
    ad.simulate(train, ranks=3, seed=3, record=tmp_path, faults=faults, until_s=60.0)
    news = {(rank, text) for _, rank, text in summarise(read_recording(tmp_path)).news}
    assert {(0, "rank 2 is there, as a new process"), (2, "rank 0 is there")} <= news


def test_nothing_follows_a_page_or_trace_that_is_piped(
    recording: Recording, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Regression: with ``-o /dev/stdout`` the line with the file's name was appended to the page."""
    folder = str(recording.ranks[0].path.parent)
    assert commands.run_trace(folder, None, os.devnull, []) == commands.run_report(folder, None, os.devnull) == 0
    assert capsys.readouterr().out == ""
    assert commands.run_trace(folder, None, str(tmp_path / "trace.gz"), []) == 0
    assert "trace.gz" in capsys.readouterr().out
