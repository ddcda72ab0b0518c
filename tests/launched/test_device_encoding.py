"""Tests that contributions of a model on a device are encoded there, on a stand-in that CPUs have."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

TESTS = Path(__file__).parent.parent


def test_contributions_encoded_on_a_device_have_equal_bits() -> None:
    command = [sys.executable, "scripts/encoding_on_a_device.py"]
    done = subprocess.run(command, cwd=TESTS, capture_output=True, text=True, timeout=170, check=False)
    assert (done.returncode, done.stdout) == (0, "equal\n"), done.stderr
