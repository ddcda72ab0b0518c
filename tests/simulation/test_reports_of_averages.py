"""Tests how recordings, reports, tables and events explain a job whose ranks average contributions."""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import asyncdist as ad
from asyncdist.live.counters import samples
from asyncdist.recording.events import Event
from asyncdist.recording.reader import Recording, read_recording
from asyncdist.report import sql
from asyncdist.report.page import render
from asyncdist.report.summary import summarise
from asyncdist.simulation import replay
from asyncdist.wording import size_in_words
from protocols import AverageAllPolicy, AverageApplied, Contributed, DiLoCoPolicy, SelectiveDiLoCoPolicy, StepInfo
from protocols.exchange.statistics import ExchangeStatistics

SIZE, STEPS, SLOW = 4, 24, 2
COUNT = 2 * (40 * 40 + 40)  # parameters

Seen = tuple[list[StepInfo], list[Contributed], list[StepInfo], ExchangeStatistics]


async def train(world: ad.World) -> Seen:
    """Train with two fragments in int8; rank 2 takes four times as long, and rank 3 diverges once."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(40, 40), torch.nn.Linear(40, 40))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    contributed: list[Contributed] = []
    applied: list[StepInfo] = []

    def tell(event: object) -> None:
        if isinstance(event, Contributed):
            contributed.append(event)
        elif isinstance(event, AverageApplied):
            applied.append(event.info)

    infos = []
    generator = torch.Generator().manual_seed(world.rank)
    async with DiLoCoPolicy(model, optimizer, average_every=6, fragments=2, wire="int8", on_event=tell) as policy:
        for step in range(STEPS):
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.add_(torch.randn(parameter.shape, generator=generator), alpha=0.01)
                if world.rank == 3 and step == 4:  # in the steps before round 2
                    model[1].weight.fill_(torch.nan)
            await world.sleep(0.4 if world.rank == SLOW else 0.1)
            infos.append(await policy.step(float(world.rank)))
        progress = {sample.name: sample.value for sample in samples(world.counters())}
        assert progress["contributed_bytes"] < 0.3 * progress["contributed_unencoded_bytes"]
        assert progress["waited_for_averages_seconds"] == policy.statistics().waited_s
        assert progress["cosine"] == infos[-1].cosine and progress["outer_norm"] == infos[-1].outer_norm
        assert (progress["fragment"], progress["round"], progress["staleness_versions"]) == (1, 8, 0)
    return [info for info in infos if info], contributed, applied, policy.statistics()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("averages")


@pytest.fixture(scope="module")
def results(folder: Path) -> list[Seen]:
    return ad.simulate(train, ranks=SIZE, seed=3, record=folder, strict=True).results


@pytest.fixture
def recording(folder: Path, results: list[Seen]) -> Recording:
    del results
    return read_recording(folder)


def of_kind(recording: Recording, rank: int, kind: str) -> list[Event]:
    return [event for event in recording.ranks[rank].events() if event.kind == kind]


def test_each_step_and_event_describes_its_average(results: list[Seen]) -> None:
    for rank, (infos, contributed, applied, _) in enumerate(results):
        assert [info.round for info in infos] == list(range(1, 9)) and applied == infos
        assert [info.fragment for info in infos] == [0, 1] * 4 and {info.fragment_count for info in infos} == {2}
        assert [info.version for info in infos] == [1, 1, 2, 2, 3, 3, 4, 4]
        assert {info.staleness_versions for info in infos} == {0}
        assert [info.left_out for info in infos] == [()] + [(3,)] + [()] * 6
        assert {info.unencoded_nbytes for info in infos} == {2 * COUNT}
        assert all(0 < info.wire_nbytes < 0.3 * info.unencoded_nbytes for info in infos)
        assert all(info.seconds >= info.waited_s >= 0 for info in infos)
        assert str(infos[1]).startswith("round 2, fragment 1: average of ranks 0, 1, 2 (0 steps old; without rank 3)")
        assert [(each.round, each.fragment, each.version) for each in contributed] == [
            (info.round, info.fragment, info.version - 1) for info in infos
        ]
        assert [each.iteration for each in contributed] == list(range(2, STEPS, 3))
        assert [np.isfinite(each.norm) for each in contributed] == [
            rank != 3 or each.round != 2 for each in contributed
        ]


def test_statistics_count_contributions_averages_and_waits(results: list[Seen]) -> None:
    for rank, (infos, contributed, _, found) in enumerate(results):
        assert found.average_count == found.contribution_count == 8 and found.versions == {0: 4, 1: 4}
        assert found.donated == {0: 8, 1: 8, 2: 8, 3: 7} and found.left_out == {3: 1}
        assert found.sent_nbytes == sum(each.wire_nbytes for each in contributed)
        assert found.unencoded_nbytes == 8 * 2 * COUNT
        assert found.waited_s == pytest.approx(sum(info.waited_s for info in infos))
        assert (found.waited_s < 0.5) if rank == SLOW else (found.waited_s > 8 * 3 * 0.25)
        assert found.waited_max_s == max(info.waited_s for info in infos)
        assert (found.outer_norm, found.cosine) == (infos[-1].outer_norm, infos[-1].cosine)
        lines = [re.split(r"  +", line.strip()) for line in str(found).splitlines()]
        assert ["averages by fragment", "0: 4, 1: 4"] in lines and ["averages without rank", "3: 1"] in lines


def test_a_recording_has_each_contribution_and_average(recording: Recording, results: list[Seen]) -> None:
    for rank, (infos, contributed, _, _) in enumerate(results):
        found = of_kind(recording, rank, "applied")
        names = ("round", "fragment", "version", "staleness_versions", "wire_nbytes", "unencoded_nbytes", "waited_s")
        for name in (*names, "outer_norm", "cosine"):
            assert [event.get(name) for event in found] == [getattr(info, name) for info in infos], name
        assert [tuple(event.get("left_out")) for event in found] == [info.left_out for info in infos]
        sent = of_kind(recording, rank, "contributed")
        for name in ("round", "fragment", "iteration", "version", "weight", "wire_nbytes", "unencoded_nbytes"):
            assert [event.get(name) for event in sent] == [getattr(each, name) for each in contributed], name
        assert {event.get("group") for event in sent} == {0}
        assert [event.get("value") for event in of_kind(recording, rank, "metric")] == [float(rank)] * 8


def test_a_report_says_who_was_late_who_waited_and_what_was_sent(recording: Recording, results: list[Seen]) -> None:
    summary = summarise(recording)
    averages = summary.averages
    assert [each.key.round for each in averages.rounds()] == list(range(1, 9))
    assert {each.last_rank for each in averages.rounds()} == {SLOW}
    assert {(each.contribution_count, each.applied_count) for each in averages.rounds()} == {(4, 4)}
    for rank, (_, _, _, found) in enumerate(results):
        own = averages.ranks[rank]
        assert (own.waited_s, own.waited_max_s) == (pytest.approx(found.waited_s), found.waited_max_s)
        assert (own.wire_nbytes, own.unencoded_nbytes) == (found.sent_nbytes, found.unencoded_nbytes)
        assert (own.last_count, own.left_out_count) == (8 * (rank == SLOW), rank == 3)
    lags = [rank.lag_bins.means(0.0, summary.duration_s, 1)[0] for rank in summary.ranks]
    assert np.argmax(lags) == SLOW and lags[SLOW] > 0.8
    page = render(recording)
    told = "\n".join(re.findall("<li>(.*?)</li>", page))
    assert "8 rounds of 2 fragments were averaged, and 32 averages applied." in told
    assert "Contributions that were not averaged: 1 of rank 3." in told
    assert "Rank 2 was the last in 8 of 8 rounds." in told
    wire = sum(seen[3].sent_nbytes for seen in results)
    assert f"{size_in_words(wire)} when encoded, {wire / (4 * 8 * 2 * COUNT):.1%} of" in told
    assert re.search(r"norm of the mean change went from [\d.]+ to [\d.]+, and the mean cosine", told)
    assert "no rounds" not in told and "descend from" not in told
    titles = re.findall("<h2>(.*?)</h2>", page)
    assert {"Rounds of averaging", "Mean changes", "Contributions and waits", "Stragglers"} <= set(titles)
    assert "Rounds" not in titles and not any("Ancestry" in title for title in titles)
    rows = re.findall(r"<tr>((?:<td>[^<]*</td>)+)</tr>", page)
    cells = [re.findall("<td>(.*?)</td>", row) for row in rows]
    assert [row[:5] for row in cells[:4]] == [[str(r), "8", str(int(r == 3)), str(8 * (r == 2)), "8"] for r in range(4)]


def test_queries_answer_questions_about_averages(recording: Recording, results: list[Seen]) -> None:
    last = "SELECT rank FROM contributed WHERE round = 3 ORDER BY time_s DESC LIMIT 1"
    assert list(sql.query(recording, last)[1]) == [(SLOW,)]
    waits = "SELECT rank, sum(waited_s) FROM applied GROUP BY rank ORDER BY rank"
    found = [seen[3].waited_s for seen in results]
    assert [seconds for _, seconds in sql.query(recording, waits)[1]] == pytest.approx(found)
    missing = "SELECT DISTINCT round, left_out FROM applied WHERE left_out != '[]'"
    assert list(sql.query(recording, missing)[1]) == [(2, "[3]")]


def test_a_replay_repeats_contributions_and_averages(recording: Recording, results: list[Seen]) -> None:
    again = replay(train, recording=recording)
    assert again.left_count == 0 and again.decision_count >= SIZE * 3 * 8, (
        "metrics, contributions and averages must all be replayed"
    )
    for own, seen in zip(again.report.results, results, strict=True):
        assert [(info.outer_norm, info.cosine) for info in own[0]] == [
            (info.outer_norm, info.cosine) for info in seen[0]
        ]


def test_a_step_that_applies_several_averages_records_each(tmp_path: Path) -> None:
    """Regression: only the last average of a step was counted and recorded, here one of two in each step."""

    async def main(world: ad.World) -> tuple[int, int]:
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 2))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        async with DiLoCoPolicy(model, optimizer, average_every=10, fragments=2, warmup_steps=3) as policy:
            for _ in range(3):
                await policy.step()
            (counters,) = world.counters().policies
            return counters.replacement_count, policy.statistics().average_count

    assert ad.simulate(main, ranks=2, seed=1, record=tmp_path).results == ((6, 6), (6, 6))
    recording = read_recording(tmp_path)
    assert Counter(event.get("round") for event in of_kind(recording, 0, "applied")) == Counter(range(1, 7))


def test_a_recording_has_the_gains_of_the_donors(tmp_path: Path) -> None:
    """Regression: ``StepInfo.gains`` was always empty."""

    async def main(world: ad.World) -> list[StepInfo]:
        model = torch.nn.Linear(2, 1, bias=False)
        torch.nn.init.zeros_(model.weight)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        infos = []
        async with SelectiveDiLoCoPolicy(model, optimizer, average_every=1, metric_mode="max") as policy:
            for _ in range(2):
                with torch.no_grad():
                    model.weight += world.rank - 1.0
                infos.append(await policy.step(score=lambda: model.weight.sum()))
        return infos

    results = ad.simulate(main, ranks=3, seed=1, record=tmp_path).results
    recording = read_recording(tmp_path)
    for rank, infos in enumerate(results):
        assert [info.donors for info in infos] == [(2,), (2,)] and infos[0].gains == (pytest.approx(2 / 3),)
        assert [tuple(event.get("gains")) for event in of_kind(recording, rank, "applied")] == [
            info.gains for info in infos
        ]
    assert "average of rank 2 (gains 0.667), without ranks 0, 1;" in render(recording)


def test_a_report_of_eager_steps_counts_their_rounds(tmp_path: Path) -> None:
    """The first step of a fragment contains no mean, and is not a round."""

    async def main(world: ad.World) -> int:
        model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 2))
        for parameter in model.parameters():
            torch.nn.init.ones_(parameter)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        async with DiLoCoPolicy(model, optimizer, average_every=2, fragments=2, eager=True) as policy:
            for _ in range(8):
                await policy.step()
        return policy.statistics().average_count

    assert ad.simulate(main, ranks=2, seed=1, record=tmp_path).results == (8, 8)
    rounds = summarise(read_recording(tmp_path)).averages.rounds()
    assert [(each.key.round, each.contribution_count, each.applied_count) for each in rounds if each.key.round] == [
        *((number, 2, 2) for number in range(1, 7)),
        *((number, 2, 0) for number in (7, 8)),
    ]


def test_an_average_of_all_descends_equally_from_all_ranks(tmp_path: Path) -> None:
    """Regression: the rank whose average was recorded last had the largest share.

    Each rank's copy of the donors and their weights was kept, which took 30 KB per average with 400 donors.
    """

    async def main(world: ad.World) -> None:
        model = torch.nn.Linear(2, 2)
        async with AverageAllPolicy(model, torch.optim.SGD(model.parameters(), lr=0.1), average_every=2) as policy:
            for _ in range(6):
                await policy.step()

    ad.simulate(main, ranks=4, seed=1, record=tmp_path)
    summary = summarise(read_recording(tmp_path))
    (population,) = summary.populations
    assert population.shares == pytest.approx(np.full((4, 4), 0.25))
    kept = [each.donors for each in summary.applied] + [each.weights for each in summary.applied]
    assert len(kept) == 2 * 4 * 3 and len(set(map(id, kept))) == 2, "equal tuples must be kept once"


def test_policies_on_two_groups_have_rounds_of_their_own(tmp_path: Path) -> None:
    async def main(world: ad.World) -> None:
        half = await world.new_group([0, 1] if world.rank < 2 else [2, 3])
        torch.manual_seed(0)
        model = torch.nn.Linear(2, 2)
        optimizer: Any = torch.optim.SGD(model.parameters(), lr=0.1)
        async with DiLoCoPolicy(model, optimizer, average_every=2, group=half) as policy:
            for _ in range(4):
                await policy.step()

    ad.simulate(main, ranks=4, seed=1, record=tmp_path)
    rounds = summarise(read_recording(tmp_path)).averages.rounds()
    found = sorted((each.key.group, each.key.round, each.donors) for each in rounds)
    assert found == [(0, 1, (0, 1)), (0, 2, (0, 1)), (2, 1, (2, 3)), (2, 2, (2, 3))]


def test_a_restarted_ranks_second_policy_is_not_its_first(tmp_path: Path) -> None:
    """Regression: a restarted process's policies were numbered from 0, so rounds of two policies were merged."""

    async def main(world: ad.World) -> None:
        torch.manual_seed(0)
        model = torch.nn.Linear(4, 4)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for name in ("first", "second")[bool(world.incarnation) :]:
            async with DiLoCoPolicy(model, optimizer, average_every=5, name=name) as policy:
                while policy.iteration < (20 if name == "first" else 60):
                    await world.sleep(0.1)
                    await policy.step(0.0)

    faults = [ad.Kill(2, at_s=4.0), ad.Restart(2, at_s=4.5)]
    ad.simulate(main, ranks=3, seed=3, record=tmp_path, faults=faults)
    rounds = summarise(read_recording(tmp_path)).averages.rounds()
    assert max(each.late_s for each in rounds) < 0.05
    counts = [(each.key.policy, each.contribution_count) for each in rounds]
    assert counts[:4] == [(0, 3)] * 4 and {policy for policy, _ in counts[4:]} == {1}
    assert counts[-1] == (1, 3)
