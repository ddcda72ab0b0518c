"""Tests how ranks in separate processes report their pending waits."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from support import mpi, torchrun
from support.endings import stopped_by

from asyncdist import rank_program
from asyncdist.launch import guardians

STANDS = """
    import asyncio, os, signal, torch
    import asyncdist as ad

    async def main(world):
        if world.rank == 0:
            await ad.barrier()
        elif world.rank == 1:
            await asyncio.Event().wait()
        group = await ad.new_group([2, 3])
        if world.rank == 2:
            asyncio.get_running_loop().call_later(0.2, os.kill, os.getpid(), signal.SIGINT)
            await world.receive_stream(torch.zeros(4), 3)
        world.spawn(asyncio.Event().wait(), name="helper")

    ad.run(main)
"""


@pytest.mark.parametrize(
    ("number", "told", "said_by_2"),
    [
        ("SIGINT", "KeyboardInterrupt", "was interrupted"),
        pytest.param("SIGTERM", "SystemExit: 143 (SIGTERM)", "was terminated (SIGTERM)", marks=pytest.mark.long),
        pytest.param("SIGHUP", "SystemExit: 129 (SIGHUP)", "was terminated (SIGHUP)", marks=pytest.mark.long),
    ],
)
def test_at_a_signal_every_rank_says_what_it_was_waiting_for(number: str, told: str, said_by_2: str) -> None:
    """Ranks that no signal has reached report, too."""
    result = torchrun.run_source(4, STANDS.replace("SIGINT", number), timeout_s=60)
    assert 0 not in result.returncodes, result.output()
    said = {line.partition("asyncdist: ")[2] for line in result.stderr.splitlines() if "was waiting for" in line}
    lines = {int(line.split()[1]): line for line in said}
    assert sorted(lines) == [0, 1, 2, 3], result.output()
    for rank, what in ((0, "barrier, in main ("), (1, "Event.wait, in main ("), (3, "helper: Event.wait")):
        assert stopped_by(lines[rank], 2, told) == [rank] and what in lines[rank], result.output()
    assert lines[2].startswith(f"rank 2 {said_by_2}"), result.output()
    assert "in main (" in lines[2]


# An mpirun that does not read its rank's output, a guardian that has the same files as the rank, and the rank.
READS_NOTHING = """
import os, subprocess, sys
read, write = os.pipe()
environ = {**os.environ, "ASYNCDIST_LAUNCHER": str(os.getpid())}
rank = [sys.executable, "-c", sys.argv[1]]
guardian = "import subprocess, sys; sys.exit(subprocess.call(sys.argv[1:]))"
sys.exit(subprocess.call([sys.executable, "-c", guardian, *rank], stdout=write, stderr=write, env=environ))
"""
IS_STOPPED = """
import os, signal, sys
from asyncdist.runtime.signals import Interrupts

with Interrupts():
    print("before", flush=True)
    signal.raise_signal(signal.SIGTERM)
    print("on standard output", flush=True)
    print("on standard error", file=sys.stderr, flush=True)
"""


@pytest.mark.skipif(not guardians.ARE_SUPPORTED, reason="no process can open the files of another")
def test_mpirun_shows_the_answer_of_a_rank_to_a_signal(tmp_path: Path) -> None:
    """Regression: Open MPI's mpirun showed nothing, because it ends its ranks without reading their output."""
    paths = tmp_path / "stdout", tmp_path / "stderr"
    with paths[0].open("wb") as out, paths[1].open("wb") as err:
        command = [sys.executable, "-c", READS_NOTHING, IS_STOPPED]
        ended = subprocess.run(command, stdout=out, stderr=err, env=mpi.base_environment(), check=False)
    said = [path.read_text() for path in paths]
    assert (ended.returncode, said) == (0, ["on standard output\n", "on standard error\n"])


@pytest.mark.skipif(not guardians.ARE_SUPPORTED, reason="no process can open the files of another")
def test_redirected_output_stays_redirected_at_a_signal(tmp_path: Path) -> None:
    """Only the rank's standard output is the launcher's."""
    sends = f"import os; os.dup2(os.open({str(tmp_path / 'own')!r}, os.O_WRONLY | os.O_CREAT), 1)\n{IS_STOPPED}"
    command = [sys.executable, "-c", READS_NOTHING, sends]
    ended = subprocess.run(command, capture_output=True, text=True, env=mpi.base_environment(), check=False)
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, "", "on standard error\n")
    assert (tmp_path / "own").read_text() == "before\non standard output\n"


def test_ctrl_c_is_one_line_in_an_import_and_else_a_traceback(tmp_path: Path) -> None:
    """Regression: each rank printed the frames of torch's import, and the lines of several ranks were mixed."""
    (tmp_path / "slow.py").write_text("raise KeyboardInterrupt")
    script = tmp_path / "train.py"
    for text, told in (("\nimport slow", "was interrupted during an import, at "), ("1\nraise KeyboardInterrupt", "")):
        script.write_text(text)
        command = rank_program.rank_command(str(script), ())
        ended = subprocess.run(command, env={"RANK": "3"}, capture_output=True, text=True, check=False)
        assert ended.returncode == 130
        if told:
            assert ended.stderr == f"asyncdist: rank 3 {told}{script}:2\n"
        else:
            assert ended.stderr.startswith("Traceback")
