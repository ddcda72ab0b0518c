"""Runs the case of the grid that a seed draws, for a long search."""

from __future__ import annotations

import random
from typing import Final

from simulation.grid.axes import exported
from simulation.grid.cover import drawn
from simulation.grid.oracles import check

#: Answer of :func:`run` for a case that one clear error refuses.
REFUSED: Final = "refused"


def run(seed: int) -> str:
    """Run a case, and return "", :data:`REFUSED`, or the case and its failure."""
    chance = random.Random(f"grid {seed}")
    case = drawn(chance.choice(exported()), chance, share=chance.choice((0.15, 0.3, 0.5)))
    try:
        return REFUSED if check(case) else ""
    except Exception as error:  # noqa: BLE001 any error is a failure
        return f"{case}\n    {type(error).__name__}: {error}"
