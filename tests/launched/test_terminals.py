"""Tests that rank 0 has the standard input of ``asyncdist run``, and that keys reach each rank once."""

from __future__ import annotations

import contextlib
import fcntl
import os
import pty
import select
import signal
import subprocess
import sys
import termios
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from support import mpi

from asyncdist.launch import guardians

pytestmark = pytest.mark.skipif(not guardians.ARE_SUPPORTED, reason="without guardians ranks have no input")

#: Generous limits: they fail only tests that hang, not tests that are slow.
TIMEOUT_S = 90.0
TRANSPORTS = [pytest.param("mpi", marks=pytest.mark.mpi), "torch"]

ASKS = """
import os, pathlib, signal, sys, time
rank = int(next(os.environ[name] for name in ("RANK", "OMPI_COMM_WORLD_RANK", "PMI_RANK") if name in os.environ))
caught, secret = [], 6 * 7
if rank == 0:
    breakpoint()
    print("read", input("name? "), os.isatty(0), flush=True)
else:
    print("others read", repr(sys.stdin.read()), flush=True)
signal.signal(signal.SIGINT, lambda *_: caught.append(rank))  # pdb has set its own
pathlib.Path(f"{rank}.ready").touch()
while not caught:
    time.sleep(0.01)
time.sleep(0.5)  # a second one, if there is one, arrives meanwhile
print("caught", caught, flush=True)
"""


class Terminal:
    """A command in its own terminal, as a shell would start it.

    Args:
        words: Words of the command.
        folder: Working directory of the command.
    """

    def __init__(self, words: list[str], folder: Path) -> None:
        self.said = ""
        self._ours, theirs = pty.openpty()
        self.process = subprocess.Popen(
            words,
            cwd=folder,
            env=mpi.base_environment(),
            stdin=theirs,
            stdout=theirs,
            stderr=theirs,
            start_new_session=True,
            preexec_fn=lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0),
        )
        os.close(theirs)
        self._deadline = time.monotonic() + TIMEOUT_S

    def type(self, text: str) -> None:
        os.write(self._ours, text.encode())

    def await_text(self, text: str) -> None:
        """Wait until the command has printed this text since the last call."""
        while text not in self.said:
            assert time.monotonic() < self._deadline, self.said
            assert self._read(), self.said
        self.said = self.said.partition(text)[2]

    def finish(self) -> int:
        """Read the rest of the output, and return the exit code."""
        while self._read():
            assert time.monotonic() < self._deadline, self.said
        return self.process.wait(TIMEOUT_S)

    def _read(self) -> bool:
        if not select.select([self._ours], [], [], 1.0)[0]:
            return True
        with contextlib.suppress(OSError):  # the other end is closed
            data = os.read(self._ours, 1 << 16)
            self.said += data.decode()
            return bool(data)
        return False

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        os.close(self._ours)


@contextlib.contextmanager
def terminal(folder: Path, source: str, *options: str, is_alone: bool = False) -> Iterator[Terminal]:
    (folder / "train.py").write_text(source)
    launcher = [] if is_alone else ["-m", "asyncdist", "run", *options]
    opened = Terminal([sys.executable, *launcher, "train.py"], folder)
    try:
        yield opened
    finally:
        opened.close()


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_rank_0_debugs_in_the_terminal_whose_keys_reach_all(tmp_path: Path, transport: str) -> None:
    """Regression: breakpoint() raised BdbQuit, and the job ended."""
    with terminal(tmp_path, ASKS, "--transport", transport, "-n", "2") as job:
        job.await_text("(Pdb)")
        job.type("p 'secret', secret\n")
        job.await_text("('secret', 42)")
        job.type("c\n")
        job.await_text("name? ")
        job.type("somebody\n")
        job.await_text("read somebody True")
        while len(list(tmp_path.glob("*.ready"))) < 2:
            assert time.monotonic() < job._deadline, job.said
            time.sleep(0.02)
        job.type("\x03")
        assert job.finish() == 128 + signal.SIGINT, job.said
    assert "caught [0]\r\n" in job.said and "caught [1]\r\n" in job.said


IGNORES = """
import asyncio, time
import asyncdist as ad

async def main(world):
    await ad.barrier()
    while True:
        try:
            print("begun", flush=True)
            await world.sleep(300)
        except asyncio.CancelledError:
            print("stopping", flush=True)
            while True:
                time.sleep(0.05)

ad.run(main)
"""


@pytest.mark.parametrize(
    "transport",
    [
        "torch",
        pytest.param("none", marks=pytest.mark.long),
        pytest.param("mpi", marks=[pytest.mark.mpi, pytest.mark.long]),
    ],
)
def test_two_quick_ctrl_c_end_ranks_that_do_not_stop(tmp_path: Path, transport: str) -> None:
    """Regression: the second key within a second counted as a copy of the first, and ranks ran on for 10 s."""
    options = ("--transport", transport, "-n", "2")
    with terminal(tmp_path, IGNORES, *options, is_alone=transport == "none") as job:
        ranks = range(1 if transport == "none" else 2)
        for _ in ranks:
            job.await_text("begun")
        job.type("\x03")
        for _ in ranks:  # two signals that a rank has not handled yet would be one
            job.await_text("stopping")
        job.type("\x03")
        pressed_at = time.monotonic()
        assert job.finish() == 128 + signal.SIGINT, job.said
        assert time.monotonic() - pressed_at < 8.0, "the job must end before launchers kill its ranks, after 10 s"


COUNTS = """
import os, pathlib, sys, time
rank = next(os.environ[name] for name in ("RANK", "OMPI_COMM_WORLD_RANK", "PMI_RANK") if name in os.environ)
print(rank, len(sys.stdin.read().splitlines()), "ASYNCDIST_STDIN" in os.environ, flush=True)
if rank == "0":
    pathlib.Path("0.ready").touch()
else:
    while not pathlib.Path("0.ready").exists():  # the end of this rank ends the job
        time.sleep(0.01)
    breakpoint()
"""


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_rank_0_reads_a_pipe_to_its_end_and_the_others_nothing(tmp_path: Path, transport: str) -> None:
    """Open MPI forwards the bytes in a pipe, but not its end."""
    (tmp_path / "train.py").write_text(COUNTS)
    command = [sys.executable, "-m", "asyncdist", "run", "--transport", transport, "-n", "2", "train.py"]
    ended = subprocess.run(
        command, cwd=tmp_path, env=mpi.base_environment(), input="a\nb\n", capture_output=True, text=True, timeout=90
    )
    assert ended.returncode == 1 and {"0 2 False", "1 0 False"} <= set(ended.stdout.splitlines()), ended
    assert ended.stderr.count("bdb.BdbQuit\nThis rank has an empty standard input") == 1, ended.stderr
