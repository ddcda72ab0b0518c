"""Runs a command on the login node of some hosts that ``tools/hosts`` makes; the reports of ranks come back.

    result = run(2, ["asyncdist", "run", "--hosts", "host1:2,host2:2", "train.py"]).check()

A test that calls this is skipped, with the reason, where hosts cannot be made.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

import pytest

from support import torchrun, warm
from support.mpi import ROOT, base_environment

PROGRAM = ROOT / "tools" / "namespaces" / "hosts.py"
#: Exit code of the program where hosts cannot be made.
UNAVAILABLE = 77


def command(count: int, words: Sequence[object], *, rate: int | None = None) -> list[str]:
    """Return the command line that runs ``words`` on the login node of so many hosts."""
    rates = [] if rate is None else ["--rate", str(rate)]
    return [sys.executable, str(PROGRAM), str(count), *rates, *map(str, words)]


def run(
    count: int, words: Sequence[object], *, rate: int | None = None, timeout_s: float = 100.0, **env: str
) -> torchrun.Result:
    """Run ``words`` on the login node of so many hosts until that has ended; nothing of it lives on.

    Args:
        count: how many hosts.
        words: a command.
        rate: Mbit/s of each host's card; None for no limit.
        timeout_s: of wall-clock time, for everything.
        env: added to the environment of the tests.
    """
    result = torchrun.run_jobs([(command(count, words, rate=rate), env)], timeout_s)
    if result.returncodes == (UNAVAILABLE,):
        pytest.skip(result.stderr.strip())
    return result


def script(name: str, *args: object) -> list[str]:
    """Return what to start as one of the tests' scripts with its arguments: it starts warm."""
    return warm.command(ROOT / "tests" / "scripts" / name, args, base_environment(), {})
