"""Runs a command on the login node of hosts made by ``tools/hosts``, and returns the ranks' reports.

    result = run(2, ["asyncdist", "run", "--hosts", "host1:2,host2:2", "train.py"]).check()

A test that calls this function is skipped, with the reason, if virtual hosts cannot be made.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

import pytest

from support import torchrun, warm
from support.mpi import ROOT, base_environment

PROGRAM = ROOT / "tools" / "namespaces" / "hosts.py"
#: Exit code of the program if virtual hosts cannot be made.
UNAVAILABLE = 77


def command(count: int, words: Sequence[object], *, rate: int | None = None) -> list[str]:
    """Return the command line that runs ``words`` on the login node of ``count`` hosts."""
    rates = [] if rate is None else ["--rate", str(rate)]
    return [sys.executable, str(PROGRAM), str(count), *rates, *map(str, words)]


def run(
    count: int, words: Sequence[object], *, rate: int | None = None, timeout_s: float = 100.0, **env: str
) -> torchrun.Result:
    """Run ``words`` on the login node of ``count`` hosts until it ends, and end all of its processes.

    Args:
        count: Number of hosts.
        words: Command and arguments.
        rate: Network rate of each host in Mbit/s; None for no limit.
        timeout_s: Wall-clock seconds for everything.
        env: Variables to add to the tests' environment.
    """
    result = torchrun.run_jobs([(command(count, words, rate=rate), env)], timeout_s)
    if result.returncodes == (UNAVAILABLE,):
        pytest.skip(result.stderr.strip())
    return result


def script(name: str, *args: object) -> list[str]:
    """Return the command that starts one of the tests' scripts warm, with its arguments."""
    return warm.command(ROOT / "tests" / "scripts" / name, args, base_environment(), {})
