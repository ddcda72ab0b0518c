"""Tests that refused operations in a simulation leave an interpreter that can exit."""

from __future__ import annotations

import subprocess
import sys


def test_what_a_refused_pool_leaves_is_an_interpreter_that_ends() -> None:
    """Regression: the interpreter hung at its exit, as the pool had forked before its thread was refused."""
    program = """
import asyncdist as ad
from concurrent.futures import ProcessPoolExecutor

async def main(world):
    with ProcessPoolExecutor(2) as pool:
        return pool.submit(int).result()

print(ad.simulate(main, ranks=2, return_exceptions=True).results[0])
"""
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=300, check=False)
    assert (ended.returncode, ended.stderr) == (0, "")
    assert ended.stdout.startswith("a process pool ")
