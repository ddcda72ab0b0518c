"""Tests that the others are warned of a rank that leaves a policy early, but not when a training ends."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import pytest
from scripts.population import Mixed, sgd
from support.seeds import in_ci

import asyncdist as ad
from asyncdist.simulation import simulate
from protocols import AsyncSelectiveAveragingPolicy, DiLoCoPolicy, SpawnPolicy
from protocols.selective.roster import Departures

POLICIES: dict[str, Callable[..., SpawnPolicy]] = {
    "diloco": DiLoCoPolicy,
    "overlapped": lambda *args, **options: DiLoCoPolicy(
        *args, overlap_steps=2, fragments=2, fragment_pattern="balanced", **options
    ),
    "selective": AsyncSelectiveAveragingPolicy,
}


def departed(
    caplog: pytest.LogCaptureFixture,
    kind: str,
    *,
    steps: Callable[[int], int],
    step_s: Callable[[int], float],
    limit_s: float = float("inf"),
) -> list[str]:
    """Train on four simulated ranks, and return the warnings of ranks that have left."""

    async def main(world: ad.World) -> None:
        model = Mixed(float(world.rank if kind == "selective" else 0))
        async with POLICIES[kind](model, sgd(model), average_every=5) as policy:
            for _ in range(steps(world.rank)):
                if world.time() > limit_s:
                    break
                await world.sleep(step_s(world.rank))
                await policy.step(*[float(world.rank)] * (kind == "selective"))

    simulate(main, ranks=4, seed=1)
    return [text for each in caplog.records if "has left" in (text := each.getMessage())]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "leaver"), in_ci(itertools.product(POLICIES, [0, 2]), ("diloco", 2), ("overlapped", 0), ("selective", 2))
)
def test_a_rank_that_leaves_early_is_reported_once(caplog: pytest.LogCaptureFixture, kind: str, leaver: int) -> None:
    """Regression: only the statistics of the others showed that a rank took part no longer."""
    [text] = departed(caplog, kind, steps=lambda rank: 12 if rank == leaver else 60, step_s=lambda _: 0.5)
    assert f"rank {leaver} has left" in text and "continue to average without it" in text


@pytest.mark.slow
@pytest.mark.parametrize(
    ("slow", "kind"),
    in_ci(itertools.product([1.0, 10.0], POLICIES), (10.0, "diloco"), (1.0, "selective"), (1.0, "overlapped")),
)
def test_a_normal_end_is_not_reported(caplog: pytest.LogCaptureFixture, kind: str, slow: float) -> None:
    assert not departed(caplog, kind, steps=lambda _: 43, step_s=lambda rank: 1.0 + (slow - 1) * (rank > 1))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("slow", "kind"),
    in_ci(itertools.product([1.0, 10.0], POLICIES), (1.0, "diloco"), (1.0, "selective"), (10.0, "overlapped")),
)
def test_an_end_after_equal_times_is_not_reported(caplog: pytest.LogCaptureFixture, kind: str, slow: float) -> None:
    steps, step_s = (lambda _: 10_000), (lambda rank: 0.2 + 0.2 * (slow - 1) * (rank > 1))
    assert not departed(caplog, kind, steps=steps, step_s=step_s, limit_s=45.0)


def test_reports_that_arrive_after_the_departure_count() -> None:
    departures = Departures(average_every=5)
    departures.add(1, 4, now=0.0)
    departures.note_report(1, 99)
    departures.on_decision([104, 109], now=100.0)
    assert departures.take_early() == []
    departures.on_decision([110], now=200.0)
    assert departures.take_early() == [], "a rank that trains alone averages nothing"
    departures.on_decision([104, 110], now=9.9)
    assert departures.take_early() == []
    departures.on_decision([104, 110], now=10.0)
    assert departures.take_early() == [1] and departures.take_early() == []
