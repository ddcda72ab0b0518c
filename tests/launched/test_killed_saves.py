"""Tests that a population's newest complete checkpoint survives a save that was killed."""

from __future__ import annotations

import subprocess
import sys

from scripts import killed_saves


def test_killed_saves_leave_a_whole_population() -> None:
    said = subprocess.run(
        [sys.executable, killed_saves.__file__, "8", "1"], capture_output=True, text=True, timeout=100, check=True
    ).stdout
    assert said == "8 kills in the midst of a save, seed 1: each left a whole population\n"
