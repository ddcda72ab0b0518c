"""Runs Python on several ranks under the real mpirun of this interpreter's environment.

    result = run_ranks(3, "tests/support/some_program.py", "--option", timeout_s=60)
    result = run_source(2, '''
        import asyncdist as ad
        from support.mpi import report

        async def main(world):
            report(world.rank, world.size)

        ad.run(main)
    ''')
    assert result.check().reports == {0: 2, 1: 2}

- The command is ``python -m asyncdist run`` of the interpreter that runs the tests, so library and mpirun match, with
  Open MPI and with MPICH. The ranks can import ``asyncdist``, ``protocols`` and this package.
- ``report(rank, value)`` in a rank returns one JSON value per rank as ``result.reports[rank]``.
- ``result.check()`` fails the test with all output unless the exit code is 0 (or ``check(returncode=...)``).
- At the timeout, all started processes are killed, and the call raises AssertionError with the output so far.
- Without MPI the calling test is skipped; a broken or mixed installation is a failure.
- Ranks start warm, see ``support.warm``: each takes 0.3 s of a core, instead of 1.7 s with an import of torch.
- A test that uses this module has the mark ``mpi``; MPI is hidden from other tests (``conftest.py``).
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import signal
import subprocess
import sys
import tempfile
import textwrap
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from asyncdist.launch import mpirun
from support import warm

ROOT = Path(__file__).resolve().parents[2]
REPORTS = "ASYNCDIST_TEST_REPORTS"


@dataclass(frozen=True, slots=True)
class Result:
    """The outcome of a job under mpirun.

    Attributes:
        returncode: Exit code of mpirun.
        stdout: Output of all ranks, mixed.
        stderr: Errors of all ranks and of mpirun.
        seconds: Wall-clock time.
        reports: Values that the ranks passed to ``report``, by rank.
    """

    returncode: int
    stdout: str
    stderr: str
    seconds: float
    reports: Mapping[int, Any] = field(default_factory=dict)

    def check(self, *, returncode: int | None = 0) -> Result:
        """Fail unless the job ended with this code (None: with any code except 0). Returns itself."""
        if self.returncode != returncode and not (returncode is None and self.returncode != 0):
            wanted = "a failure" if returncode is None else returncode
            raise AssertionError(f"mpirun ended with {self.returncode}, expected {wanted}\n{self.output()}")
        return self

    def output(self) -> str:
        """Return everything that was printed, for an error message."""
        return f"--- stdout\n{self.stdout}\n--- stderr\n{self.stderr}"


def run_ranks(
    ranks: int,
    script: str | os.PathLike[str],
    *args: object,
    timeout_s: float = 100.0,
    env: Mapping[str, str] | None = None,
    interrupt_when: str | None = None,
    survive: bool = False,
) -> Result:
    """Run a Python script on ``ranks`` ranks under mpirun.

    Args:
        ranks: Number of processes.
        script: Path of the script.
        args: Arguments of the script.
        timeout_s: Wall-clock seconds for everything.
        env: Variables to add to this process's environment.
        interrupt_when: Text in the job's stdout upon which SIGINT is sent to mpirun.
        survive: Whether the job continues when ranks die; on an MPI that cannot, the calling test is skipped.
    """
    require_mpi()
    if survive:
        require_survival()
    with tempfile.TemporaryDirectory(prefix="asyncdist-test-") as folder:
        paths = Path(folder, "stdout"), Path(folder, "stderr")
        reports = Path(folder, "reports")
        reports.mkdir()
        base = base_environment()
        environ = {**base, REPORTS: str(reports), **(env or {})}
        program = warm.command(script, args, base, env or {})
        command = [sys.executable, "-m", "asyncdist", "run", "-n", str(ranks), *["--survive"] * survive, *program]
        began_at = time.monotonic()
        with paths[0].open("wb") as out, paths[1].open("wb") as err:
            # files instead of pipes: a leftover rank that holds a pipe must not hang the test
            process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=out, stderr=err, env=environ, cwd=ROOT, start_new_session=True
            )
        finished = _await_end(process, began_at + timeout_s, interrupt_when, paths[0])
        stdout, stderr = (path.read_text(errors="replace") for path in paths)
        values = {int(path.stem): json.loads(path.read_text()) for path in sorted(reports.glob("*.json"))}
        result = Result(process.returncode, stdout, stderr, time.monotonic() - began_at, values)
        if not finished:
            raise AssertionError(f"{script} on {ranks} ranks did not end in {timeout_s:g} s\n{result.output()}")
        return result


def run_source(ranks: int, source: str, *args: object, **options: Any) -> Result:
    """Call ``run_ranks`` with a program given as text."""
    with tempfile.TemporaryDirectory(prefix="asyncdist-test-") as folder:
        script = Path(folder, "program.py")
        script.write_text(textwrap.dedent(source))
        return run_ranks(ranks, script, *args, **options)


def report(rank: int, value: Any) -> None:
    """Pass ``value`` (JSON) from a rank to the test; the last value counts."""
    folder = Path(os.environ[REPORTS])
    partial = folder / f"{rank}.partial"
    partial.write_text(json.dumps(value))
    partial.rename(folder / f"{rank}.json")


def require_mpi() -> None:
    """Skip the calling test if MPI is not installed."""
    import pytest  # the ranks do not need it

    reason = _why_no_mpi()
    if reason:
        pytest.skip(reason)


def require_survival() -> None:
    """Skip the calling test on an MPI whose jobs end when a rank dies."""
    import pytest

    if not mpirun.can_survive(mpirun.find_installation(os.environ)):
        pytest.skip("jobs of this MPI end when a rank dies")


@functools.cache
def flavour() -> str:
    """Return the MPI that runs the jobs, ``"openmpi"`` or ``"mpich"``; empty if there is none."""
    return mpirun.find_installation(os.environ).library or ""


@functools.cache
def _why_no_mpi() -> str:
    installation = mpirun.find_installation(os.environ)
    if installation.library is None and not installation.launchers:
        return f"no MPI is installed: {installation.version}"
    return ""


def base_environment() -> dict[str, str]:
    """Return this process's environment for a separate job that can import this package."""
    # The test may itself run under a launcher, whose variables do not apply to the job.
    foreign = ("OMPI_COMM_WORLD", "PMIX_", "PMI_", "TORCHELASTIC_", "RANK", "WORLD_SIZE", "MASTER_")
    inherited = {k: v for k, v in os.environ.items() if not k.startswith(foreign)}
    paths = [str(ROOT), str(ROOT / "tests"), *filter(None, [inherited.get("PYTHONPATH")])]
    return {**inherited, "PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": "1"}


def warm_environment() -> dict[str, str]:
    """Return the variables with which ranks start warm, with the training libraries imported."""
    return warm.environment(base_environment(), *warm.LIBRARIES)


def _await_end(process: subprocess.Popen[bytes], deadline: float, interrupt_when: str | None, stdout: Path) -> bool:
    """Return whether the job ended on its own; otherwise kill its processes."""
    finished = True
    try:
        while process.poll() is None:
            if time.monotonic() > deadline:
                finished = False
                _stop(process)
                break
            if interrupt_when is not None and interrupt_when in stdout.read_text(errors="replace"):
                process.send_signal(signal.SIGINT)
                interrupt_when = None
            time.sleep(0.02)
    finally:
        _kill_session(process.pid)  # ranks are in their own process groups, but in mpirun's session
        process.wait()
    return finished


def _stop(process: subprocess.Popen[bytes]) -> None:
    """Let mpirun remove its shared memory, and then kill the session."""
    process.terminate()
    try:
        process.wait(5)
    except subprocess.TimeoutExpired:
        process.kill()


def _kill_session(session: int) -> None:
    """Kill the remaining processes of the session in which mpirun was started."""
    for pid in _processes_of(session):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def _processes_of(session: int) -> list[int]:
    if not os.path.isdir("/proc/self"):
        listing = subprocess.run(["ps", "-A", "-o", "pid=,sess="], capture_output=True, text=True, check=False).stdout
        pairs = [line.split() for line in listing.splitlines()]
        return [int(pid) for pid, sid in pairs if sid == str(session)]
    found = []
    for entry in Path("/proc").iterdir():
        with contextlib.suppress(OSError, ValueError):
            pid = int(entry.name)
            fields = (entry / "stat").read_text().rpartition(")")[2].split()  # the name may contain any characters
            if fields[3] == str(session):
                found.append(pid)
    return found
