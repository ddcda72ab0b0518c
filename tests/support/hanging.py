"""Starts jobs that hang, and reads their reports."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from support import mpi, warm

#: The first words of a report on a job that stands still.
STANDSTILL = "asyncdist: no rank here has made a step or received a message for "
#: Seconds until a job reports: all jobs start at the same time, and may stand still for a second because of that.
STALL_S = 5
RANK_COUNT = 3


def tell_hangs(
    transport: str,
    script: str,
    names: Sequence[str],
    options: Mapping[str, Sequence[str]],
    timeout_s: float,
    until: Callable[[], bool] = lambda: True,
) -> dict[str, str]:
    """Run one job for each name, all at once, until each has reported that it stands still; return the reports.

    Args:
        transport: Transport, ``"mpi"`` or ``"torch"``.
        script: Path of the script, whose argument is the name of the hang.
        names: Names of the hangs.
        options: Options of ``asyncdist run`` for some of the names.
        timeout_s: Wall-clock seconds after which the reports so far are returned.
        until: Function that is called when all have reported; while it returns False, the jobs continue.
    """
    base = mpi.base_environment()
    program = warm.command(script, (), base, {})
    with tempfile.TemporaryDirectory(prefix="asyncdist-test-") as folder, contextlib.ExitStack() as stack:
        processes = []
        paths = {name: Path(folder, name) for name in names}
        for name, path in paths.items():
            output = stack.enter_context(path.open("wb"))
            asked = ["--transport", transport, "--stall-s", str(STALL_S), *options.get(name, ())]
            command = [sys.executable, "-m", "asyncdist", "run", *asked, "-n", str(RANK_COUNT), *program, name]
            processes.append(
                subprocess.Popen(
                    command,
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=subprocess.STDOUT,
                    env=base,
                    cwd=mpi.ROOT,
                    start_new_session=True,
                )
            )
        deadline = time.monotonic() + timeout_s
        try:
            while not (all(map(_has_told, paths.values())) and until()) and time.monotonic() < deadline:
                time.sleep(0.1)
        finally:
            for process in processes:
                mpi._kill_session(process.pid)
                process.wait()
        return {name: path.read_text(errors="replace") for name, path in paths.items()}


def _has_told(path: Path) -> bool:
    """Return whether the report is complete: it is written at once."""
    return STANDSTILL in path.read_text(errors="replace")


def line_of(script: str, mark: str) -> str:
    """Return the location that a comment marks, as in ``hangs.py:12)``."""
    lines = Path(mpi.ROOT, script).read_text().splitlines()
    [number] = [i for i, line in enumerate(lines, 1) if line.endswith(f"# {mark}")]
    return f"{os.path.basename(script)}:{number})"


def story_of(told: str) -> str:
    """Return the story alone, without the other printed lines."""
    assert told.count(STANDSTILL) == 1, told or "nothing was printed"
    lines = told[told.index(STANDSTILL) :].splitlines()
    return "\n".join([lines[0], *(line for line in lines[1:] if line.startswith("  "))])
