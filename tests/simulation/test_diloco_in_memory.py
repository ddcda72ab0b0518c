"""Tests DiLoCo's scenarios with ranks that use each other's contributions in shared memory, as on one host."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from support.seeds import seeds

from protocols.exchange.rounds import MemberRound, RoundTransfers
from protocols.parameter_stream.neighbours import Reading
from simulation import diloco_fault_scenarios, diloco_quorum_scenarios, diloco_scenarios
from simulation.diloco_scenarios import Plan, Record, run
from simulation.read_scenarios import shared_memory

STATES, DIFFERENCES, CODED = Plan(outer="none"), Plan(), Plan(wire="int8")


def run_in_memory(plan: Plan, monkeypatch: pytest.MonkeyPatch) -> tuple[Record, int, int]:
    """Run a plan in shared memory; return the record and the numbers of parts read and of slices merged in place."""
    part_count = slice_count = 0
    view, merge = Reading.view, RoundTransfers.merge

    def counted_view(self: Reading, *args: Any) -> Any:
        nonlocal part_count
        part = view(self, *args)
        part_count += part is not None
        return part

    def counted_merge(self: RoundTransfers, own: MemberRound) -> None:
        nonlocal slice_count
        slice_count += len(own.read_in_place)
        merge(self, own)

    monkeypatch.setattr(Reading, "view", counted_view)
    monkeypatch.setattr(RoundTransfers, "merge", counted_merge)
    with shared_memory():
        return run(plan)[1], part_count, slice_count


@pytest.mark.parametrize("plan", [STATES, DIFFERENCES, CODED], ids=["states", "differences", "int8"])
def test_memory_and_streams_give_the_same_bits(plan: Plan, monkeypatch: pytest.MonkeyPatch) -> None:
    streamed = run(plan)[1]
    in_memory, part_count, slice_count = run_in_memory(plan, monkeypatch)
    assert part_count > 0 and (slice_count > 0) == (plan is not STATES)
    for rank, weights in streamed.weights.items():
        for mine, others in zip(weights, in_memory.weights[rank], strict=True):
            assert all(map(np.array_equal, mine, others))


SCENARIOS: dict[str, Callable[[int], object]] = {
    "losses": diloco_scenarios.scenario,
    "all faults": diloco_fault_scenarios.scenario,
    "quorum": diloco_quorum_scenarios.scenario,
}


@pytest.mark.parametrize("name", SCENARIOS)
@pytest.mark.parametrize("seed", seeds(8))
def test_ranks_in_shared_memory_agree_under_faults(name: str, seed: int) -> None:
    with shared_memory():
        SCENARIOS[name](seed)
