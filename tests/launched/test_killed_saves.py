"""Tests that a population's newest complete checkpoint survives a save that was killed."""

from __future__ import annotations

from scripts import killed_saves
from support import torchrun


def test_killed_saves_leave_a_whole_population() -> None:
    said = torchrun.run_alone(killed_saves.__file__, 8, 1).check().stdout
    assert said == "8 kills in the midst of a save, seed 1: each left a whole population\n"
