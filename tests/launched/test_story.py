"""Tests the reports that ranks write on SIGUSR1, in any state, and for ``asyncdist story``."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from support import mpi, torchrun

from asyncdist import rank_program
from asyncdist.launch import guardians, local_ranks

STARTS = pytest.mark.parametrize(
    "start",
    [pytest.param(mpi.run_source, marks=pytest.mark.mpi, id="mpi"), pytest.param(torchrun.run_source, id="torch")],
)

#: Lets a program wait until a report on all ranks was printed.
HEARS = """
    import sys
    from types import SimpleNamespace

    said = []
    sys.stderr = SimpleNamespace(write=lambda text: [said.append(text), sys.__stderr__.write(text)], flush=lambda: None)

    async def told(world):
        while not any("asyncdist: job" in text for text in said):
            await world.sleep(0.01)
"""
ASKED = (
    HEARS
    + """
    import asyncio, os, signal, sys, time
    from support.mpi import report
    import asyncdist as ad

    def load():
        os.kill(os.getpid(), signal.SIGUSR1)
        time.sleep(0.01)

    async def helper():
        await asyncio.Event().wait()

    async def main(world):
        task = world.spawn(helper(), name="helper")
        await ad.barrier()  # each can be asked now
        if world.rank == 0:
            load()
            await told(world)
            process = await asyncio.create_subprocess_exec(
                sys.executable, "-m", "asyncdist", "story", str(os.getpid()), stdout=-1, stderr=-1
            )
            report(0, [part.decode() for part in await process.communicate()])
        await ad.barrier()
        task.cancel()

    ad.run(main)
"""
)


@STARTS
def test_a_rank_in_a_blocking_call_and_all_ranks_of_a_job(start: Callable[..., Any]) -> None:
    if start is mpi.run_source:
        mpi.require_mpi()
    result = start(2, ASKED).check()
    said = result.stderr
    assert re.search(r"^asyncdist: job [0-9a-f]{8}: .*program\.py, 2 ranks", said, re.M), said
    line = 7 + HEARS.count("\n")
    assert re.search(rf"^  rank 0 .* in load \(.*program\.py:{line}\)", said, re.M), said
    assert re.search(r"^  rank 1 .*\brank 0\b.*: barrier", said, re.M), said
    told, errors = result.reports[0]
    assert errors == "" and re.match(r"job [0-9a-f]{8}: .*program\.py, 2 ranks", told), errors
    assert re.search(r"^  rank 1 .*\brank 0\b.*: barrier, .* in main \(", told, re.M), told
    assert re.search(r"\bhelper .*: Event.wait, in helper \(", told), told


ALL_ASKED = (
    HEARS
    + """
    import os, signal
    import torch
    import asyncdist as ad

    async def main(world):
        pids = await ad.all_gather(torch.tensor(os.getpid()))
        if world.rank == 0:
            for pid in map(int, pids):
                os.kill(pid, signal.SIGUSR1)
            await told(world)
        await ad.barrier()

    ad.run(main)
"""
)


@STARTS
def test_ranks_that_are_asked_together_do_not_each_tell_a_part(start: Callable[..., Any]) -> None:
    """A launcher asks all ranks at once, by passing the signal on to all of them."""
    if start is mpi.run_source:
        mpi.require_mpi()
    said = start(3, ALL_ASKED).check().stderr
    stories = said.split("asyncdist: ")[1:]
    assert stories and all(re.match(r"job [0-9a-f]{8}: .*program\.py, 3 ranks", each) for each in stories), said


COLD = """
    import os, signal
    import asyncdist as ad

    async def main(world):
        os.kill(os.getpid(), signal.SIGUSR1)

    os.kill(os.getpid(), signal.SIGUSR1)
    ad.run(main)
    os.kill(os.getpid(), signal.SIGUSR1)
"""


@pytest.mark.mpi
@pytest.mark.long
def test_a_rank_of_asyncdist_run_heeds_the_signal_at_all_times() -> None:
    mpi.require_mpi()
    result = mpi.run_source(1, COLD, env={"PYTHONHASHSEED": "1"}).check()  # it starts cold
    before, inside, after = [line for line in result.stderr.splitlines() if line.startswith("asyncdist: rank 0")]
    no_world = r"asyncdist: rank 0 [^(]*program\.py"
    assert re.match(rf"{no_world}:8", before) and re.match(rf"{no_world}:10", after), result.output()
    assert re.search(r"rank 0 \(of 1, pid \d+\) .* in main \([^ ]*program.py:6\)", inside), result.output()


EARLY = """
    import os, pathlib, signal, sys, threading, time
    import asyncdist as ad

    has_asked = pathlib.Path(sys.argv[1], "asked")

    def ask():
        os.kill(os.getpid(), signal.SIGUSR1)
        has_asked.touch()

    async def main(world):
        pass

    if os.environ["RANK"] == "0":
        threading.Timer(0.3, ask).start()
    else:
        while not has_asked.exists():
            time.sleep(0.01)
        time.sleep(0.2)
    ad.run(main)
    if os.environ["RANK"] == "0":
        sys.stderr.write("over\\n")
"""


def test_before_the_world_is_open(tmp_path: Any) -> None:
    """By default, the signal would end the process."""
    result = torchrun.run_source(2, EARLY, tmp_path).check()
    said, _, after = result.stderr.partition("over\n")
    assert re.search(r"asyncdist: rank 0 has not opened a world, or has closed it; it is at [^ ]+:\d+", said), said
    assert after == ""


def test_a_rank_that_is_asked_before_it_can_answer_goes_on(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """Regression: the signal ended the rank, and with it the job."""
    script, ended = tmp_path / "train.py", threading.Event()
    script.write_text("")
    process = local_ranks.start(rank_program.rank_command(str(script), ()), dict(os.environ), rank=0, ended=ended.set)
    process.send_signal(signal.SIGUSR1)
    assert ended.wait(60) and process.returncode == 0
    said = capfd.readouterr().err
    assert said.startswith("asyncdist: ") and said.count("\n") == 1
    assert signal.SIGUSR1 not in signal.pthread_sigmask(signal.SIG_BLOCK, ())


# The launcher receives the signal as soon as it runs its own code.
ASKS_LAUNCHER = """
import os, runpy, signal, sys

class Asks:
    def find_spec(self, name, *_):
        if name == "asyncdist.cli":
            os.kill(os.getpid(), signal.SIGUSR1)

sys.meta_path.insert(0, Asks())
runpy.run_module("asyncdist", run_name="__main__", alter_sys=True)
"""
STARTS_OF_LAUNCHER = [
    pytest.param((), "asyncdist run: no rank has started yet", marks=pytest.mark.mpi, id="mpi"),
    pytest.param(("--transport", "torch"), "asyncdist: rank 0 ", id="torch"),
]


@pytest.mark.parametrize(("options", "answer"), STARTS_OF_LAUNCHER)
def test_a_launcher_that_is_asked_while_it_imports_goes_on(tmp_path: Path, options: Sequence[str], answer: str) -> None:
    """Regression: the launcher ended with 138, and there was no job."""
    if not options:
        mpi.require_mpi()
    (tmp_path / "train.py").write_text("print('runs')")
    command = [sys.executable, "-c", ASKS_LAUNCHER, "run", "-n", "1", *options, "train.py"]
    ended = subprocess.run(
        command, cwd=tmp_path, env=mpi.base_environment(), capture_output=True, text=True, check=False, timeout=100
    )
    assert (ended.returncode, ended.stdout) == (0, "runs\n"), ended.stderr
    assert ended.stderr.startswith(answer)


RUNS_MPIRUN = """
import os, sys
from asyncdist.launch.supervision import endings, mpirun_process

command = ["sh", "-c", "kill -USR1 $$; echo lives"]
sys.exit(mpirun_process.run("/bin/sh", command, os.environ, endings.JobEnds(1)))
"""


def test_an_mpirun_that_is_asked_while_it_begins_goes_on() -> None:
    """Regression: mpirun ended before it had a handler."""
    ended = subprocess.run(
        [sys.executable, "-c", RUNS_MPIRUN], env=mpi.base_environment(), capture_output=True, text=True, check=False
    )
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, "lives\n", "")


@pytest.mark.skipif(not guardians.ARE_SUPPORTED, reason="there are no guardians")
def test_a_guardian_under_mpirun_is_asked_while_it_begins() -> None:
    """Regression: the guardian ended, and mpirun ended the job."""
    command = guardians.guarded(["/bin/true"])
    before = command[: command.index(sys.executable)]
    asked = subprocess.run([*before, "/bin/sh", "-c", "kill -USR1 $$; echo lives"], capture_output=True, check=False)
    assert (asked.returncode, asked.stdout) == (0, b"lives\n")


LAST = """
import os, signal

class Last:
    def __del__(self, kill=os.kill, pid=os.getpid(), number=signal.SIGUSR1):
        kill(pid, number)

last = Last()
"""


def test_a_request_while_the_interpreter_ends_kills_no_rank(tmp_path: Path) -> None:
    """Regression: the signal killed the rank, and mpirun ended a job that had succeeded."""
    script = tmp_path / "train.py"
    script.write_text(LAST)
    ended = subprocess.run(rank_program.rank_command(str(script), ()), capture_output=True, text=True, check=False)
    assert (ended.returncode, ended.stderr) == (0, "")


OWN = """
    import os, signal
    import asyncdist as ad

    async def main(world):
        os.kill(os.getpid(), signal.SIGUSR1)

    signal.signal(signal.SIGUSR1, lambda *_: print("the program's own"))
    ad.run(main)
    os.kill(os.getpid(), signal.SIGUSR1)
"""


def test_a_handler_of_the_program_stays() -> None:
    result = torchrun.run_source(1, OWN).check()
    assert (result.stdout, result.stderr) == ("the program's own\n" * 2, "")


FORKED = """
    import os, pathlib, signal, time
    import asyncdist as ad
    from asyncdist.story import sockets

    def listens(pid, path):
        bound = f"{path}~"  # it is renamed once it listens, and the kernel keeps the first name
        known = [line.split() for line in open("/proc/net/unix") if line.rstrip().endswith(bound)]
        # Of another test that looks for jobs there may be a connection, which has the same name, and does not listen.
        [inode] = [inode for _, _, _, flags, _, _, inode, _ in known if int(flags, 16) & 1 << 16]
        links = [os.path.realpath(each) for each in pathlib.Path(f"/proc/{pid}/fd").iterdir()]
        return any(link.endswith(f"socket:[{inode}]") for link in links)

    async def main(world):
        places = [place for places in sockets.jobs().values() for place in places]
        [place] = [place for place in places if place.pid == os.getpid()]
        reader, writer = os.pipe()
        child = os.fork()
        if not child:
            os.write(writer, b"!")
            time.sleep(600)
        os.read(reader, 1)
        print(listens(os.getpid(), place.path), listens(child, place.path))
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)

    ad.run(main)
"""


@pytest.mark.skipif(not os.path.exists("/proc/net/unix"), reason="needs Linux")
def test_a_child_of_a_rank_does_not_listen_in_its_place() -> None:
    """Regression: a killed rank seemed to live as long as its child did."""
    assert torchrun.run_source(1, FORKED).check().stdout == "True False\n"
