"""Populations whose ranks read each other's snapshots in memory, as processes of one host do: see ``scenarios.py``.

Simulated ranks are one process, which may read its own memory. So the same plans as in ``test_scenarios.py`` are
carried out once more, with faults and all, and everything is checked that is checked there.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from typing import Any

import pytest

from asyncdist.simulation.transport import SimTransport
from protocols.parameter_stream import neighbours
from protocols.parameter_stream.neighbours import PartReading, Reading
from simulation.scenarios import scenario

SEEDS = range(40)


@pytest.fixture
def read(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """What was read, and in which way."""
    counted: Counter[str] = Counter()
    init, piece, part = SimTransport.__init__, Reading.read, PartReading.whole

    def as_a_process(self: SimTransport, *args: Any, **kwargs: Any) -> None:
        init(self, *args, **kwargs)
        self.capabilities = dataclasses.replace(self.capabilities, shares_memory=True)

    def read_piece(self: Reading, *args: Any) -> None:
        counted["pieces"] += 1
        piece(self, *args)

    async def read_part(self: PartReading, **kwargs: Any) -> None:
        counted["parts"] += 1
        await part(self, **kwargs)

    monkeypatch.setattr(SimTransport, "__init__", as_a_process)
    monkeypatch.setattr(Reading, "read", read_piece)
    monkeypatch.setattr(PartReading, "whole", read_part)
    monkeypatch.setattr(neighbours, "READ_NBYTES_MIN", 1)
    return counted


@pytest.mark.slow
def test_nothing_breaks_where_snapshots_are_read(read: Counter[str]) -> None:
    for seed in SEEDS:
        scenario(seed)
    assert read["pieces"] > 300 and read["parts"] > 30
