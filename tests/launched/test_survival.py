"""Tests jobs on MPI that continue when ranks die: real kills, even during a transfer, and how such jobs end."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from scripts import killed_members, killed_starts, lost_members
from support import mpi
from support.endings import failed_ranks, lost_ranks, stopped_by

from asyncdist.launch import mpirun
from asyncdist.recording.reader import read_recording

pytestmark = pytest.mark.mpi
SEED = 227
SCRIPTS = Path(__file__).parents[1] / "scripts"


def run(story: str, *args: object, ranks: int = 3, **options: Any) -> mpi.Result:
    return mpi.run_ranks(ranks, SCRIPTS / "surviving.py", story, *args, timeout_s=60, survive=True, **options)


def test_members_killed_at_any_moment_leave_others_averaging() -> None:
    """Ranks 0 and 2 are killed together. `./tools/soak --kills` continues with other seeds, and checks times."""
    print(f"seed {SEED}: {killed_members.plan(SEED)}")
    killed_members.check(*killed_members.run(SEED))


def test_each_operation_on_a_killed_rank_says_that_it_is_lost() -> None:
    """Regression: a small message to the lost rank counted as sent, so a question to it waited forever."""
    result = mpi.run_ranks(3, SCRIPTS / "lost_members.py", timeout_s=60, survive=True).check()
    expected = dict.fromkeys(result.reports[1], f"RankLostError {lost_members.VICTIM}")
    assert len(expected) == 18 and result.reports == {1: expected, 2: expected}
    assert result.stderr == "rank 0 is lost; the job continues with 2 of 3 ranks\n"


@pytest.mark.parametrize(
    ("story", "victim"),
    [
        ("in_a_stream_of_its_sender", 0),
        pytest.param("in_a_stream_of_its_receiver", 1, marks=pytest.mark.long),
    ],
)
def test_a_death_during_a_large_stream_ends_that_stream_alone(story: str, victim: int) -> None:
    reports = run(story).check().reports
    live = sorted({0, 1, 2} - {victim})
    found = [[reports[rank][0], *reports[rank][1:]] for rank in live]
    assert found == [[f"RankLostError {victim}", live, float(sum(live))], [None, live, float(sum(live))]]


@pytest.mark.long
def test_a_failure_ends_the_job_as_it_does_elsewhere() -> None:
    result = run("fails_after_a_death").check(returncode=None)
    assert result.stderr.count("Traceback") == 1 and failed_ranks(result.stderr) == [1]
    assert stopped_by(result.stderr, 1, "ValueError: boom-7") == [2]
    assert "after the world" not in result.stdout


@pytest.mark.long
def test_a_rank_left_alone_ends_well_even_with_mpi4py_loaded() -> None:
    result = run("with_mpi4py_of_its_own").check()
    assert (result.reports, result.stdout) == ({0: "alone"}, "after the world\n")


def test_a_job_without_a_loss_ends_with_the_programs_code() -> None:
    """A rank that has not ended when another ends with 5 is stopped by mpirun."""
    result = run("ends_well", 5, ranks=2).check(returncode=5)
    assert set(result.stdout.splitlines()) == {"after the world"}
    ends = "ended with exit code 5\n"
    assert result.stderr in {f"asyncdist run: {ranks} {ends}" for ranks in ("ranks 0, 1", "rank 0", "rank 1")}


def test_an_exit_that_nobody_was_told_of_is_a_death() -> None:
    """Open MPI does not report a process that has ended with an exit code."""
    result = run("exits").check()
    ended, lost = sorted(result.stderr.splitlines())
    assert ended == "asyncdist: a rank ended with exit code 3 without leaving its world"
    assert lost_ranks(lost) == [1] and "2 of 3" in lost


def test_ranks_that_disagree_end_the_job() -> None:
    result = run("of_another_version", ranks=2).check(returncode=None)
    assert result.stderr.count(" stopped: ") == 2 and "without leaving" not in result.stderr


def test_a_rank_that_dies_before_mpi_has_started_ends_the_job() -> None:
    """The others would otherwise wait for it in MPI_Init forever."""
    result = run("before_mpi").check(returncode=None)
    assert "asyncdist: a rank ended before it had joined the other ranks (signal 9); ending the job" in result.stderr


@pytest.mark.parametrize(("victim", "moment"), [pytest.param(0, 1e-6, marks=pytest.mark.long), (1, 0.005)])
def test_a_death_while_the_world_opens_is_a_loss_or_one_line(victim: int, moment: float) -> None:
    """Regression: each of the others failed with a traceback, and their guardians asked mpirun more than once to end.

    tests/scripts/killed_starts.py draws further moments.
    """
    end = json.dumps((victim, moment))
    result = mpi.run_ranks(
        4, SCRIPTS / "killed_starts.py", timeout_s=60, survive=True, env={killed_starts.END_VARIABLE: end}
    )
    if result.returncode:
        assert re.fullmatch(r"asyncdist: a rank .*\(signal 14\).*\n", result.stderr)
    else:
        assert lost_ranks(result.stderr) == [victim] and result.stderr.count("\n") == 1


def test_the_others_open_their_world_without_a_lost_rank() -> None:
    """The lost rank had opened its world."""
    result = run("lost_in_the_handshake").check()
    assert result.reports == {1: [0], 2: [0]}
    assert lost_ranks(result.stderr) == [0] and result.stderr.count("\n") == 1


@pytest.mark.long
def test_each_world_has_its_own_recording_and_random_numbers(tmp_path: Path) -> None:
    """Regression: the second world got the name of the first one, and silently replaced its recording."""
    script = tmp_path / "two_worlds.py"
    script.write_text(
        "import sys\n"
        "import asyncdist as ad\n"
        "from support import mpi\n"
        "async def main(world: ad.World) -> float:\n"
        "    await ad.barrier()\n"
        "    return world.generator('test').random()\n"
        "if __name__ == '__main__':\n"
        "    drawn = [ad.run(main, record=sys.argv[1]) for _ in range(2)]\n"
        "    mpi.report(0, drawn) if drawn[0] is not None else None\n"
    )
    result = mpi.run_ranks(2, script, tmp_path / "runs", timeout_s=60, survive=True).check()
    jobs = {path.name.partition("-")[0] for path in (tmp_path / "runs").iterdir()}
    assert len(jobs) == 2 and all(read_recording(tmp_path / "runs", job).missing == () for job in jobs)
    assert len(set(result.reports[0])) == 2


def test_the_user_ends_a_job_that_has_lost_a_rank() -> None:
    result = run("interrupted", interrupt_when="ready").check(returncode=None)
    assert "after the world" not in result.stdout and "Traceback" not in result.stderr


def test_an_mpi_that_cannot_says_so_in_one_line() -> None:
    mpi.require_mpi()
    installation = mpirun.find_installation(os.environ)
    if mpirun.can_survive(installation):
        pytest.skip("this one can; tests/unit/test_launch.py has those that cannot")
    script = str(SCRIPTS / "surviving.py")
    command = [sys.executable, "-m", "asyncdist", "run", "-n", "2", "--survive", script]
    ended = subprocess.run(command, env=mpi.base_environment(), capture_output=True, text=True, timeout=60, check=False)
    assert ended.returncode == 2 and ended.stdout == ""
    assert ended.stderr.startswith("asyncdist run: --survive: ") and ended.stderr.count("\n") == 1
    assert installation.version in ended.stderr
