"""Draws one of the scenarios of DiLoCo, its family and other policies for each seed, for a long search."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Any, Final

from asyncdist.simulation import Fault, SimReport
from simulation import (
    async_diloco_replica_scenarios,
    async_diloco_scenarios,
    diloco_fault_scenarios,
    diloco_law_scenarios,
    diloco_replica_scenarios,
    diloco_scenarios,
    population_training_scenarios,
    saved_scenarios,
    simple_scenarios,
)

SCENARIOS: Final[tuple[Callable[..., SimReport[Any]], ...]] = (
    diloco_fault_scenarios.scenario,
    diloco_scenarios.scenario,
    diloco_scenarios.selective_scenario,
    async_diloco_scenarios.scenario,
    diloco_replica_scenarios.scenario,
    async_diloco_replica_scenarios.scenario,
    simple_scenarios.scenario,
    population_training_scenarios.scenario,
    saved_scenarios.scenario,
    diloco_law_scenarios.late,
    diloco_law_scenarios.unsound,
)


def scenario(seed: int, faults: Sequence[Fault] | None = None) -> SimReport[Any]:
    """Run the scenario that the seed draws; AssertionError if it fails."""
    return random.Random(f"family {seed}").choice(SCENARIOS)(seed, faults)
