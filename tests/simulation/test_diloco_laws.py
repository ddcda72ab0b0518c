"""Tests laws of DiLoCo for random options and timings; a run that is saved and resumed equals an uninterrupted one."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from support.seeds import seeds

import asyncdist as ad
from simulation import diloco_law_scenarios as laws, saved_scenarios
from simulation.diloco_law_scenarios import LateOracle


@pytest.mark.parametrize("block", seeds(8))
@pytest.mark.parametrize("scenario", [laws.late, laws.feedback, laws.unsound], ids=lambda scenario: scenario.__name__)
def test_a_law_holds_in_each_drawn_run(scenario: Callable[[int], ad.SimReport], block: int) -> None:
    for seed in range(block * 4, block * 4 + 4):
        scenario(seed)


def test_drawn_runs_have_late_means(monkeypatch: pytest.MonkeyPatch) -> None:
    oracles: list[LateOracle] = []

    class Counted(LateOracle):
        def __init__(self, fragments: int, lr: float | None) -> None:
            super().__init__(fragments, lr)
            oracles.append(self)

    monkeypatch.setattr(laws, "LateOracle", Counted)
    for seed in range(6):
        laws.late(seed)
    assert sum(oracle.late_count > 0 for oracle in oracles) >= 3


@pytest.mark.parametrize("seed", seeds(24))
def test_a_resumed_run_equals_an_uninterrupted_one(seed: int) -> None:
    saved_scenarios.scenario(seed)
