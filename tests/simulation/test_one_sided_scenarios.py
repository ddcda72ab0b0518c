"""Tests the one-sided policy in hundreds of populations; ``one_sided_scenarios.py`` describes the runs and checks."""

from __future__ import annotations

from collections import Counter

import pytest

from asyncdist.simulation import Fault, Interrupt, Join, explore
from protocols.one_sided.selection import REPLACEMENT_MODES
from protocols.ranking import STRATEGIES
from simulation.one_sided_scenarios import Tally, draw_plan, scenario

pytestmark = pytest.mark.timeout(900)  # the first test that needs the observations runs all seeds

SEED_COUNT = 240
#: All faults except one that ends a job, and one that affects starts: the policy admits no rank later.
FAULTS = tuple(f"fault {kind.__name__}" for kind in Fault.__args__ if kind not in (Interrupt, Join))
OTHER = (
    "abandoned: a donor is lost",
    "abandoned: a donor was not read",
    "abandoned: no other rank can be a donor",
    "abandoned: a snapshot was overwritten while it was read",
    "starts that a loss ended",
    "unpublished: a reader still uses the memory of an earlier snapshot",
    "unpublished: weights are not finite (the metric is published, as NaN)",
)


@pytest.fixture(scope="module")
def seen() -> Counter[str]:
    """Run all seeds once, and return the observations."""
    tally = Tally()
    digests = {tally.add(seed) for seed in range(SEED_COUNT)}
    tally.seen["digests"] = len(digests)
    return tally.seen


def test_the_first_seeds_keep_every_invariant(pytestconfig: pytest.Config) -> None:
    explore(scenario, range(pytestconfig.getoption("seeds")), processes=1, quiet=True).check()


@pytest.mark.long
@pytest.mark.slow
def test_every_seed_keeps_every_invariant(seen: Counter[str]) -> None:
    assert seen["digests"] == SEED_COUNT, "two seeds gave the same run"
    assert seen["applied"] >= 1000
    assert seen["populations in which averages had to come"] >= 20


@pytest.mark.long
@pytest.mark.slow
@pytest.mark.parametrize("what", [*FAULTS, *OTHER])
def test_it_happened_in_some_seed(seen: Counter[str], what: str) -> None:
    assert seen[what] >= 1, f"only these events occurred: {', '.join(sorted(+seen))}"


@pytest.mark.long
@pytest.mark.slow
@pytest.mark.parametrize("mode", REPLACEMENT_MODES)
def test_every_mode_replaced(seen: Counter[str], mode: str) -> None:
    assert seen[f"mode {mode}"] >= 100


@pytest.mark.long
@pytest.mark.slow
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_every_strategy_was_applied_and_verified(seen: Counter[str], strategy: str) -> None:
    assert seen[f"strategy {strategy}"] >= 100


@pytest.mark.long
@pytest.mark.slow
def test_weights_are_those_of_the_snapshots_that_were_averaged(seen: Counter[str]) -> None:
    """Metrics change in every step; weights are recomputed from the metrics that were published with the snapshots."""
    assert seen["weights of several donors"] >= 20


@pytest.mark.slow
@pytest.mark.long
def test_a_seed_repeats_to_the_digest() -> None:
    """Donors are drawn from the world's own generator, so the seed determines them."""
    seeds = [seed for seed in range(300, 340) if draw_plan(seed).ranks <= 4][:8]
    first = [scenario(seed).trace_digest for seed in seeds]
    assert first == [scenario(seed).trace_digest for seed in seeds]
