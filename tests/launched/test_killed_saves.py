"""A population's newest whole checkpoint outlives a save that was killed."""

from __future__ import annotations

import re
import subprocess
import sys

from scripts import killed_saves


def test_a_save_that_is_killed_at_any_moment_leaves_a_whole_population() -> None:
    said = subprocess.run(
        [sys.executable, killed_saves.__file__, "8", "1"], capture_output=True, text=True, timeout=100, check=True
    ).stdout
    found = re.fullmatch(r"8 kills, (\d+) in the midst of a save, seed 1: each left a whole population\n", said)
    assert found and int(found[1]) > 0, said
