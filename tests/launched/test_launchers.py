"""Tests that ``asyncdist run`` behaves alike on MPI and torch: signals, ends, and errors before a world opens."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from support import mpi, warm

from asyncdist import local_host
from asyncdist.launch import guardians
from asyncdist.launch.supervision import mpirun_process
from asyncdist.launch.supervision.endings import JobEnds, describe_end

pytestmark = pytest.mark.skipif(not guardians.ARE_SUPPORTED, reason="without guardians mpirun alone passes signals on")

#: Generous limits: they fail only tests that hang, not tests that are slow.
TIMEOUT_S = 90.0
TRANSPORTS = [pytest.param("mpi", marks=pytest.mark.mpi), "torch"]
OWN_RANK = """
import os, pathlib, signal, sys, time
rank = int(next(os.environ[name] for name in ("RANK", "OMPI_COMM_WORLD_RANK", "PMI_RANK") if name in os.environ))
"""


@contextmanager
def running(
    folder: Path, source: str, *options: str, transport: str, ranks: int = 2, is_warm: bool = False
) -> Iterator[subprocess.Popen[str]]:
    """Run ``asyncdist run`` in a folder, where each rank creates a file ``RANK.ready``; kill the job at the end."""
    script = folder / "train.py"
    script.write_text(source)
    base = mpi.base_environment()
    program = warm.command(script, [], base, {}) if is_warm else [script]
    words = ["-m", "asyncdist", "run", "--transport", transport, "-n", str(ranks), *options, *map(str, program)]
    process = subprocess.Popen(
        [sys.executable, *words],
        cwd=folder,
        env=base,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def await_ready(folder: Path, process: subprocess.Popen[str], ranks: int = 2) -> None:
    deadline = time.monotonic() + TIMEOUT_S
    while len(list(folder.glob("*.ready"))) < ranks:
        assert time.monotonic() < deadline and process.poll() is None, "not all ranks became ready in time"
        time.sleep(0.02)


def finish(process: subprocess.Popen[str]) -> tuple[int, list[str], list[str]]:
    output, error = process.communicate(timeout=TIMEOUT_S)
    return process.returncode, sorted(output.splitlines()), error.splitlines()


HANDLES = (
    OWN_RANK
    + """
numbers = {signal.SIGUSR2, signal.SIGXCPU, signal.SIGCONT, signal.SIGALRM, signal.SIGRTMIN + 2}
caught = set()
for number in numbers:
    signal.signal(number, lambda number, _: caught.add(number))
pathlib.Path(f"{rank}.ready").touch()
while caught < numbers:
    time.sleep(0.01)
print("saved", flush=True)
"""
)


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_signals_reach_the_handlers_of_all_ranks(tmp_path: Path, transport: str) -> None:
    """Regression: on torch SIGUSR2, with which submitit preempts a job, killed the launcher and all ranks."""
    with running(tmp_path, HANDLES, transport=transport) as process:
        await_ready(tmp_path, process)
        for number in (signal.SIGUSR2, signal.SIGXCPU, signal.SIGCONT, signal.SIGALRM, signal.SIGRTMIN + 2):
            process.send_signal(number)
        assert finish(process) == (0, ["saved"] * 2, [])


WAITS = OWN_RANK + "pathlib.Path(f'{rank}.ready').touch()\ntime.sleep(600)\n"


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_a_signal_without_a_handler_ends_the_job_and_is_named(tmp_path: Path, transport: str) -> None:
    with running(tmp_path, WAITS, transport=transport) as process:
        await_ready(tmp_path, process)
        process.send_signal(signal.SIGUSR2)
        code, _, lines = finish(process)
    assert code == 128 + signal.SIGUSR2
    how = describe_end(-signal.SIGUSR2, was_passed_on=True)
    assert lines[0].partition(how)[0] in ("asyncdist run: rank 0 ", "asyncdist run: rank 1 "), lines
    assert len(lines) == 1, lines


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_a_job_stops_and_resumes_with_its_launcher(tmp_path: Path, transport: str) -> None:
    """The launcher receives the signals of Ctrl-Z and ``fg``."""
    with running(tmp_path, WAITS, transport=transport) as process:
        await_ready(tmp_path, process)
        process.send_signal(signal.SIGTSTP)
        await_state(process.pid, "T")
        process.send_signal(signal.SIGCONT)
        await_state(process.pid, "S")
        process.send_signal(signal.SIGTERM)
        assert finish(process)[0] == 128 + signal.SIGTERM


def await_state(pid: int, state: str) -> None:
    deadline = time.monotonic() + TIMEOUT_S
    while (found := Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]) != state:
        assert time.monotonic() < deadline, found
        time.sleep(0.01)


IN_A_WORLD = """
import asyncio, pathlib
import asyncdist as ad

async def main(world):
    await ad.barrier()
    pathlib.Path(f"{world.rank}.ready").touch()
    await asyncio.Event().wait()

ad.run(main)
"""


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_ctrl_c_is_130_and_a_line_of_each_rank(tmp_path: Path, transport: str) -> None:
    """Regression: on MPI the exit code was 1, after "rank 1 was terminated (SIGTERM)" and a block of mpirun's."""
    with running(tmp_path, IN_A_WORLD, transport=transport, is_warm=True) as process:
        await_ready(tmp_path, process)
        process.send_signal(signal.SIGINT)
        code, _, lines = finish(process)
    assert code == 130 and len(lines) == 2, lines
    assert any("interrupted" in line for line in lines), lines
    for rank, line in enumerate(sorted(lines)):
        assert line.startswith(f"asyncdist: rank {rank} "), lines
        assert "Event.wait, in main (" in line, lines


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_an_error_that_all_make_before_a_world_is_told_once(tmp_path: Path, transport: str) -> None:
    """Regression: each rank printed a traceback without its number, mixed with the tracebacks of other ranks."""
    with running(tmp_path, OWN_RANK + "import no_such_module\n", transport=transport, ranks=3) as process:
        code, _, lines = finish(process)
    assert code == 1 and lines.count("Traceback (most recent call last):") == 1, lines
    teller = lines[0].removeprefix("asyncdist: ").removesuffix(" failed:")
    last = "ModuleNotFoundError: No module named 'no_such_module'"
    for line in lines[lines.index(last) + 1 :]:  # mpirun may end a rank before it has printed its own line
        if not line.startswith("asyncdist run: rank"):
            assert line.endswith(f" failed in the same way as {teller}: {last}"), lines
    assert transport == "mpi" or sum(f"failed in the same way as {teller}" in line for line in lines) == 2, lines


KILLED = """
import os, pathlib
import asyncdist as ad

async def main(world):
    await ad.barrier()
    pathlib.Path(f"{world.rank}.ready").touch()
    if world.rank == 1 or @:
        os.kill(os.getpid(), 9)
    await ad.barrier()

ad.run(main)
"""
BY_THE_KERNEL = describe_end(-signal.SIGKILL)


@pytest.mark.mpi
@pytest.mark.parametrize("ranks", [2, pytest.param(1, marks=pytest.mark.long)])
def test_a_surviving_job_whose_ranks_are_all_killed_has_failed(tmp_path: Path, ranks: int) -> None:
    """Regression: the exit code was 0, and nothing was printed."""
    mpi.require_mpi()
    mpi.require_survival()
    killed = KILLED.replace("@", "True")
    with running(tmp_path, killed, "--survive", transport="mpi", ranks=ranks, is_warm=True) as process:
        code, _, lines = finish(process)
    said = [line for line in lines if line.startswith("asyncdist run: ")]
    expected = [f"asyncdist run: rank {rank} {BY_THE_KERNEL}" for rank in range(ranks)]
    assert (code, said[:-1], len(said)) == (137, expected, ranks + 1), lines


@pytest.mark.mpi
def test_a_kill_is_named_above_what_follows_from_it(tmp_path: Path) -> None:
    """Regression: the lines of two ranks that mpirun had stopped preceded the cause."""
    mpi.require_mpi()
    killed = KILLED.replace("@", "False")
    with running(tmp_path, killed, transport="mpi", ranks=3, is_warm=True) as process:
        code, _, lines = finish(process)
    cure = mpi.flavour() == "openmpi"
    assert code == 137 and lines[0].startswith(f"asyncdist run: rank 1 {BY_THE_KERNEL}"), lines
    assert ("--survive" in lines[0]) == cure, lines
    if cure:
        assert not any("prterun" in line for line in lines), lines


def test_an_mpirun_that_cannot_start_is_one_line(tmp_path: Path) -> None:
    """Regression: it was a traceback, and the launcher's thread kept its signals blocked."""
    before, mpirun = signal.pthread_sigmask(signal.SIG_BLOCK, ()), str(tmp_path / "mpirun")
    with pytest.raises(local_host.LaunchError, match=f"{re.escape(mpirun)} cannot be started: .*No such file"):
        mpirun_process.run(mpirun, ["mpirun"], os.environ, JobEnds(1))
    assert signal.pthread_sigmask(signal.SIG_BLOCK, ()) == before
