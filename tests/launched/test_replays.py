"""Tests that the simulator repeats recorded runs of real ranks: with the same decisions, and the same weights."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
from scripts.replayed_jobs import SAME
from support import mpi, warm

SCRIPT = "tests/scripts/recorded_training.py"


def record(folder: Path, transport: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    options = ["--transport", transport, "-n", "4", "--record", str(folder)]
    program = warm.command(SCRIPT, arguments, mpi.base_environment(), {})
    command = [sys.executable, "-m", "asyncdist", "run", *options, *program]
    return subprocess.run(command, capture_output=True, text=True, timeout=300, env=mpi.base_environment())


def replay(folder: Path, *words: str, given: str = "") -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "asyncdist", "replay", str(folder), *words]
    base = mpi.base_environment()  # a warm process has no standard input
    environ = {**(base if given else warm.environment(base, *warm.LIBRARIES)), **warm.HASHES}
    return subprocess.run(command, capture_output=True, text=True, timeout=300, env=environ, input=given)


def check_same(result: subprocess.CompletedProcess[str], count_min: int) -> None:
    found = SAME.search(result.stdout)
    assert result.returncode == 0 and found is not None, result.stdout + result.stderr
    assert int(found[1]) >= count_min, "too few rounds have taken place"


@pytest.mark.long
@pytest.mark.parametrize("transport", [pytest.param("mpi", marks=pytest.mark.mpi), "torch"])
def test_a_run_with_a_straggler_happens_again(tmp_path: Path, transport: str) -> None:
    options = ("120", "--collectives", "20")
    recorded = record(tmp_path, transport, *options)
    assert recorded.returncode == 0, recorded.stderr
    check_same(replay(tmp_path, SCRIPT, *options), 100)


@pytest.mark.mpi
def test_a_run_in_which_a_rank_was_killed_happens_again(tmp_path: Path) -> None:
    killed = ("4000", "--kill", "3", "60")
    recorded = record(tmp_path, "mpi", *killed)
    assert recorded.returncode
    result = replay(tmp_path, SCRIPT, *killed)
    check_same(result, 50)
    assert re.search(r"the record of ranks? .*3 ends before main \(", result.stdout)
    assert re.search(r"^ranks? .*3: no result$", result.stdout, re.MULTILINE)


@pytest.mark.mpi
@pytest.mark.long
def test_a_debugger_stops_one_rank_and_a_recording_is_a_test(tmp_path: Path) -> None:
    recorded = record(tmp_path / "run", "mpi", "30")
    assert recorded.returncode == 0, recorded.stderr
    line = Path(SCRIPT).read_text().splitlines().index("            optimizer.zero_grad()") + 1
    talk = f"p ('rank', world.rank)\nb {line}\nc\np ('iteration', iteration)\nc\np ('iteration', iteration)\nq\n"
    stopped = replay(tmp_path / "run", SCRIPT, "--rank", "3", "--pdb", "30", given=talk)
    told = re.findall(r"\('(rank|iteration)', (\d+)\)", stopped.stdout)
    assert told == [("rank", "3"), ("iteration", "0"), ("iteration", "1")], stopped.stdout + stopped.stderr
    assert stopped.returncode == 1
    assert "differs" not in stopped.stdout + stopped.stderr, (
        "a run continued from the debugger must not differ from the recording"
    )

    test = tmp_path / "tests" / "test_again.py"
    written = replay(tmp_path / "run", SCRIPT, "--to-test", str(test), "30")
    assert written.returncode == 0, written.stderr
    ran = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(test)],
        capture_output=True,
        text=True,
        timeout=300,
        env=mpi.base_environment(),
    )
    assert ran.returncode == 0 and "1 passed" in ran.stdout, ran.stdout + ran.stderr
