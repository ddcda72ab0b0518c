"""Tests that a replacement of the one-sided policy costs the same with many ranks as with some dozens."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch

import asyncdist as ad
from asyncdist.collectives import one_sided
from asyncdist.collectives.version_queries import VersionQueries, VersionRecord
from asyncdist.simulation import Kill, SimReport, Stall, simulate
from protocols import OneSidedSelectiveAveragingPolicy, OneSidedStatistics
from protocols.one_sided.selection import AGE_SAMPLE_COUNT, DEFAULT_DONOR_COUNT_MAX, SAMPLE_COUNT

PUBLICATION_COUNT = 10


def trained(ranks: int, steps: int = 10 * PUBLICATION_COUNT, **options: Any) -> SimReport:
    """Train with a publication every ten steps; return the statistics of all ranks."""

    async def main(world: ad.World) -> OneSidedStatistics:
        model = torch.nn.Linear(4, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        async with OneSidedSelectiveAveragingPolicy(model, optimizer, average_every=10, **options) as policy:
            for _ in range(steps):
                await policy.step(float(world.rank))
            return policy.statistics()

    return simulate(main, ranks=ranks, seed=ranks, strict=True)


def messages_of_a_rank(ranks: int, **options: Any) -> tuple[float, list[OneSidedStatistics]]:
    """Return how many messages a rank sends beyond start and end, and its outcome."""
    report, idle = trained(ranks, **options), trained(ranks, steps=0, **options)
    members = list(report.results)
    assert sum(member.num_replacements for member in members) >= ranks / 5, "too few replacements to judge by"
    return (report.message_count - idle.message_count) / ranks, members


@pytest.mark.slow
@pytest.mark.parametrize(
    ("options", "ranks", "limit"),
    [
        # Regression: the numbers were 70, 250 and 1,033 with 8, 32 and 128 ranks.
        *(({"donor_count": 2}, ranks, limit) for ranks, limit in ((8, 90), (64, 120))),
        *(pytest.param({"donor_count": 2}, *each, marks=pytest.mark.long) for each in ((32, 270), (128, 120))),
        # Regression: with half of 128 ranks as donors, read in turn, no rank was replaced within this number of steps.
        *(({}, ranks, limit) for ranks, limit in ((8, 90), (32, 270))),
        pytest.param({}, 128, 150, marks=pytest.mark.long),
    ],
)
def test_messages_of_a_rank_do_not_grow_with_the_group(options: dict[str, Any], ranks: int, limit: int) -> None:
    count, members = messages_of_a_rank(ranks, **options)
    assert count <= limit
    replacements = sum(member.num_replacements for member in members)
    donors = sum(member.averaging_ranks for member in members)
    assert donors <= replacements * options.get("donor_count", DEFAULT_DONOR_COUNT_MAX)


@pytest.mark.slow
@pytest.mark.long
def test_the_worst_are_judged_by_a_sample_in_a_large_group() -> None:
    counts = []
    for ranks in (64, 128):
        count, members = messages_of_a_rank(ranks, replacement_mode="worst_ratio", replacement_ratio=0.2)
        counts.append(count)
        replaced = [rank for rank, member in enumerate(members) if member.num_replacements]
        # Rank r is better than r others. A rank better than 5 of 8 is among the worst fifth of 32 once in a million.
        assert set(range(ranks // 16)) <= set(replaced) and max(replaced) < 5 * ranks // 8
    assert counts[1] <= 1.2 * counts[0] and counts[1] <= (2 * SAMPLE_COUNT + 20) * PUBLICATION_COUNT


def ranks_asked(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, ...]]:
    """Return the ranks that are asked from now on, for one record or for several."""
    asked: list[tuple[int, ...]] = []
    ask = VersionQueries.ask

    async def ask_and_note(self: VersionQueries, window: int, ranks: Sequence[int], **options: Any) -> Any:
        asked.append(tuple(ranks))
        return await ask(self, window, ranks, **options)

    monkeypatch.setattr(VersionQueries, "ask", ask_and_note)
    return asked


def test_small_groups_are_told_and_larger_ones_ask_a_few(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = ranks_asked(monkeypatch)
    trained(5, steps=30, age_range=(12, 20))
    assert not asked
    ranks = one_sided.NOTIFIED_COUNT_MAX + 2
    report = trained(ranks, steps=30, age_range=(12, 20), donor_count=2)
    judged = [each for each in asked if len(each) > 1]
    assert judged and {len(each) for each in judged} == {AGE_SAMPLE_COUNT}
    assert len(set(judged)) > len(judged) / 2, "the candidates must be drawn anew each time"
    assert len([each for each in asked if len(each) == 1]) <= 2 * sum(each.agents_killed for each in report.results)
    again = trained(ranks, steps=30, age_range=(12, 20), donor_count=2)
    assert again.trace_digest == report.trace_digest


def test_who_is_gone_or_has_closed_its_window_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(one_sided, "NOTIFIED_COUNT_MAX", 0)

    async def main(world: ad.World) -> tuple[dict[int, VersionRecord], dict[int, VersionRecord], float]:
        window = await one_sided.open_versioned_window(*(world.services, world.agreements, world.group), 8, scope=5)
        if world.rank != 2:
            assert window.begin() is not None
            window.publish(7, float(world.rank))
        if world.rank == 3:
            await window.close(None)
        await world.sleep(1.0)
        before = world.time()
        first = await window.published_by_each((3, 2, 1)) if world.rank == 0 else {}
        duration_s = world.time() - before
        await world.sleep(2.0)  # rank 1 is killed meanwhile, and rank 2 is busy from then on
        second = await window.published_by_each((1, 2), deadline=world.time() + 1.0) if world.rank == 0 else {}
        await world.sleep(100.0)
        await window.close(None)
        return first, second, duration_s

    report = simulate(main, ranks=4, seed=1, faults=(Kill(1, at_s=2.0), Stall(2, 2.5, 50.0)))
    first, second, duration_s = report.results[0]
    assert first == {1: VersionRecord(1, 7, 1.0)} and second == {}
    assert duration_s < 0.1
