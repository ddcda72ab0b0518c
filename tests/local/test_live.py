"""Tests the live table of a population that runs in one process."""

from __future__ import annotations

import io
import sys
from dataclasses import replace

import pytest
import torch
from rich.console import Console

import asyncdist as ad
from asyncdist.errors import AsyncdistError
from asyncdist.live import top
from asyncdist.live.columns import Row, screen, table
from asyncdist.live.counters import PolicyCounters, RankCounters
from asyncdist.live.hosted_table import HostedRanksTable
from protocols import AsyncSelectiveAveragingPolicy


def policies(view: HostedRanksTable) -> list[tuple[Row, PolicyCounters]]:
    return [(row, policy) for row in view.rows() if row.now is not None for policy in row.now.policies]


async def train(world: ad.World, view: HostedRanksTable | None = None) -> list[tuple[int, int, int, str]]:
    """Train with the last rank as the worst; rank 0 returns the live counters."""
    model = torch.nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    seen: list[tuple[int, int, int, str]] = []
    async with AsyncSelectiveAveragingPolicy(
        model, optimizer, average_every=5, replacement_ratio=0.5, quorum=1.0, grace_s=30.0, name="mine"
    ) as policy:
        for _ in range(9):
            await policy.step(-float(world.rank))
            await ad.barrier()
        while not await ad.all_reduce(torch.tensor(policy.statistics().replacement_count)):
            await policy.step(-float(world.rank))
        if view is not None and world.rank == 0:
            seen = [(row.rank, told.step, told.replacement_count, told.policy) for row, told in policies(view)]
        await ad.barrier()
    return seen


def test_rows_say_what_each_rank_does_and_what_it_did_last() -> None:
    view = HostedRanksTable()
    seen = ad.run_local(view.watched(train), view, ranks=2)[0]
    assert [(rank, count, name) for rank, _, count, name in seen] == [(0, 0, "mine"), (1, 1, "mine")]
    assert min(step for _, step, _, _ in seen) >= 9
    rows = policies(view)
    assert [row.rank for row, _ in rows] == [0, 1]
    assert (rows[0][1].metric, rows[1][1].metric, rows[1][1].latest.split(":")[0]) == (0.0, -1.0, "round 1")
    assert "mine" in "".join(map(str, table(view.rows(), 80).columns[1].cells))


def test_in_a_terminal_it_is_there_at_the_end(capsys: pytest.CaptureFixture[str]) -> None:
    ad.run_local(train, ranks=2, live=True)
    said = capsys.readouterr().out
    assert "replaced" in said and "2 of 2 ranks" in said


def test_without_rich_it_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "rich.live", None)
    with pytest.raises(AsyncdistError, match=r"rich.*asyncdist\[live\]"):
        ad.run_local(train, ranks=2, live=True)


@pytest.mark.parametrize("width", [20, 40, 60, 80, 100, 130])
def test_narrow_terminal_drops_columns_and_never_cuts_numbers(width: int) -> None:
    policy = PolicyCounters("a name that is long", 1340, -1.1666e-13, "idle", 65, 65, staleness_steps=29)
    counted = RankCounters(3, 4, 0, "0000abcd", 6.0, (policy,), received_nbytes=56_000, sent_nbytes=18_700, lost=(1,))
    earlier = replace(counted, time_s=1.0, policies=(replace(policy, step=700),))
    drawn = io.StringIO()
    Console(width=width, file=drawn).print(screen([Row(3, counted, earlier)], width))
    names, numbers = drawn.getvalue().splitlines()[1:]
    assert "\u2026" not in names + numbers
    shown = {"step": "1340", "step/s": "128", "metric": "-1.1666e-13", "in": "56.0k", "out": "18.7k"}
    for name, number in shown.items():
        assert (name in names.split()) == (number in numbers.split())
    assert not {"norm", "cosine", "wire"} & set(names.split()), "columns about contributions must be absent"


@pytest.mark.parametrize("width", [40, 60, 80, 100, 150, 200])
def test_table_shows_averages_of_contributions(width: int) -> None:
    of_averages = {"wire_nbytes": 66_000, "unencoded_nbytes": 256_000, "outer_norm": 0.51234, "cosine": -0.125}
    policy = PolicyCounters("", 1340, None, round=7, fragment=3, waited_for_averages_s=12.34, **of_averages)  # type: ignore[arg-type]
    counted = RankCounters(3, 4, 0, "0000abcd", 6.0, (policy, replace(policy, policy="#2", staleness_versions=2)))
    drawn = io.StringIO()
    Console(width=width, file=drawn).print(screen([Row(3, counted)], width))
    names, first, second = drawn.getvalue().splitlines()[1:]
    shown = {"norm": "0.51234", "cosine": "-0.12", "waited": "12.3s", "wire": "66.0k", "raw": "256k", "part": "3"}
    for name, number in shown.items():
        assert (name in names.split()) == (number in first.split()[1:]) == (number in second.split())
    assert (("behind" in names) == (width >= 150) and set(shown) <= set(names.split())) or width < 150


def test_table_is_printed_once_where_a_terminal_cannot_draw(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")  # a terminal, for rich
    monkeypatch.setenv("TERM", "dumb")
    monkeypatch.setattr(top, "PERIOD_S", 0.0)
    monkeypatch.setattr(top, "chosen_job", lambda command, name: "0000abcd")
    monkeypatch.setattr(top.sockets, "jobs", dict)
    assert top.run(None) == 0
    said = capsys.readouterr().out
    assert said.count("no rank has answered yet") == 1 and "has ended" not in said
