"""DiLoCo's family under all kinds of faults at once; ``./tools/soak --diloco`` runs more seeds."""

from __future__ import annotations

import pytest
from support.seeds import seeds

from simulation.diloco_fault_scenarios import scenario


@pytest.mark.parametrize("seed", seeds(60))
def test_all_ranks_agree_on_each_round_under_faults(seed: int) -> None:
    scenario(seed)


def test_a_leader_may_leave_while_it_sends_its_state() -> None:
    """Regression: the abort of its stream arrived before its leave, and the newcomer failed instead of asking again."""
    scenario(172)
