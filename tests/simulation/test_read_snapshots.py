"""Tests populations whose ranks read each other's snapshots in memory; ``read_scenarios.py`` describes them."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest

from protocols.parameter_stream.neighbours import Reading
from simulation.read_scenarios import scenario

SEEDS = range(40)


@pytest.fixture
def read(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """Return the state that was read, and the way of reading."""
    counted: Counter[str] = Counter()
    piece, part = Reading.read, Reading.whole

    def read_piece(self: Reading, *args: Any) -> None:
        counted["pieces"] += 1
        piece(self, *args)

    async def read_part(self: Reading, **kwargs: Any) -> None:
        counted["parts"] += 1
        await part(self, **kwargs)

    monkeypatch.setattr(Reading, "read", read_piece)
    monkeypatch.setattr(Reading, "whole", read_part)
    return counted


@pytest.mark.slow
def test_nothing_breaks_in_the_first_seeds(read: Counter[str]) -> None:
    """The test below runs all seeds, and counts the reads in them."""
    for seed in SEEDS[:8]:
        scenario(seed)
    assert read["pieces"] and read["parts"]


@pytest.mark.slow
@pytest.mark.long
def test_nothing_breaks_where_snapshots_are_read(read: Counter[str]) -> None:
    for seed in SEEDS:
        scenario(seed)
    assert read["pieces"] > 300 and read["parts"] > 30
