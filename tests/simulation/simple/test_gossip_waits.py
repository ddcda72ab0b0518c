"""Measures how far a slow rank delays the others under gossip, for the table of docs/simple/gossip.md."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import pytest
import torch
from torch import nn

import asyncdist as ad
from asyncdist.simulation import Compute, simulate
from protocols import GossipPolicy, OneSidedSelectiveAveragingPolicy, PopulationAveragingPolicy

PAGE: Final = Path(__file__).parents[3] / "docs" / "simple" / "gossip.md"
RANKS, UNTIL_S, SLOW = 16, 60.0, 5
NEVER_WAITS: Final[dict[str, Any]] = {"age_range": (10, 10), "donor_count": 1, "momentum": 0.5}
#: Policies of the table's rows, by their names in the table.
ROWS: Final[dict[str, tuple[Any, dict[str, Any]]]] = {
    "the mean of all ranks": (PopulationAveragingPolicy, {"pull": 1.0}),
    '`"ring"`': (GossipPolicy, {"topology": "ring"}),
    '`"random"`': (GossipPolicy, {"topology": "random"}),
    '`"exponential"`': (GossipPolicy, {"topology": "exponential"}),
    "one-sided, below": (OneSidedSelectiveAveragingPolicy, NEVER_WAITS),
}


async def train(world: ad.World, name: str) -> int:
    """Return the number of steps in 60 s."""
    model, count = nn.Linear(2, 1), 0
    policy, options = ROWS[name]
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    async with policy(model, optimizer, average_every=10, drain_timeout_s=0.01, **options) as own:
        while world.time() < UNTIL_S:
            await (own.step(0.0) if own.takes_metric else own.step())
            count += 1
    return count


def steps_of(name: str, kind: str) -> list[int]:
    """Return the steps of all ranks but the slow one, whose steps take 1 s instead of 0.1 s, or of ranks that pause."""
    compute = Compute(step_s=0.1, overrun_probability=0.0)
    changes: dict[str, Any] = {"pause_probability": 0.02, "pause_s": 0.9}
    compute = replace(compute, **({"factors": {SLOW: 10.0}} if kind == "slow" else changes))
    found = simulate(train, name, ranks=RANKS, until_s=4000.0, compute=compute).results
    return [count for rank, count in enumerate(found) if rank != SLOW]


@pytest.mark.long
def test_the_page_has_the_measured_steps() -> None:
    rows = dict(re.findall(r"^\| (.*?) \| (\d+ to \d+ \| \d+) \|$", PAGE.read_text(), re.MULTILINE))
    assert rows == measured()


def measured() -> dict[str, str]:
    found = {}
    for name in ROWS:
        slow, pausing = steps_of(name, "slow"), steps_of(name, "pauses")
        found[name] = f"{min(slow)} to {max(slow)} | {sum(pausing) // len(pausing)}"
        print(f"| {name} | {found[name]} |", flush=True)
    return found


@pytest.mark.long
def test_a_slow_rank_is_some_rounds_behind_at_most() -> None:
    """In an exponential graph, a rank is at most log2 rounds ahead of any other rank."""
    slow = steps_of('`"exponential"`', "slow")
    assert min(slow) == 60 and max(slow) <= 60 + 4 * 10
