"""Tests ``asyncdist sim``: a script as ``__main__`` on simulated ranks, its output, seeds and bad input."""

from __future__ import annotations

import os
import pty
import re
import shlex
import subprocess
import sys
import termios
from collections.abc import Callable
from pathlib import Path
from typing import Literal

import pytest
from support.seeds import in_ci
from support.waits import waits_of_mains

from asyncdist import cli
from asyncdist.simulation import (
    Fault,
    Interrupt,
    Kill,
    Restart,
    SlowLink,
    SlowRank,
    Stall,
)
from asyncdist.simulation.exploration.repro_command import format_faults, read_faults
from asyncdist.simulation.run_script import Script

#: An event of the trace, with its virtual time.
LAST_EVENT = r"\n  0\.\d{9} "
SCRIPT = """
import asyncio, os, random, sys
from dataclasses import dataclass
import numpy as np
import torch
import asyncdist as ad
import beside

@dataclass(frozen=True, slots=True)
class Put:
    version: int

async def main(world, way):
    channel = world.channel(Put, tag=100)
    for _ in range(3):
        await world.safe_point()
    if way == "stuck" and world.rank == 1:
        await channel.receive()
    if way == "raise" and world.rank == 1:
        raise ValueError("boom-7")
    if way == "exit" and world.rank == 1:
        sys.exit("boom-7")
    if way == "race":
        if world.rank == 1:
            await channel.send(Put(1), dest=0)
            await channel.send(Put(2), dest=2)
        elif world.rank == 2:
            await channel.send((await channel.receive()).message, dest=0)
        elif world.rank == 0:
            await channel.receive()
            assert (await channel.receive()).message.version == 2, "the older one won"
    await ad.barrier()
    return world.rank * 10 if way == "ranks" else drawn

drawn = (random.random(), float(np.random.rand()), float(torch.rand(1)))
if __name__ == "__main__":
    way = sys.argv[1] if len(sys.argv) > 1 else ""
    print("arguments", sys.argv[1:], beside.VALUE)
    if way == "--help":
        sys.exit()
    if way == "--wrong":
        sys.exit(3)
    if way == "top":
        raise KeyError("boom-7")
    if way != "never":
        try:
            print("value", ad.run(main, way))
        except ValueError:
            if "caught" not in sys.argv:
                raise
    if way == "twice":
        ad.run(main, way)
"""


@pytest.fixture
def script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """Return the name of the script, in the current folder."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "script.py").write_text(SCRIPT)
    (tmp_path / "beside.py").write_text("VALUE = 'found'\n")
    monkeypatch.delitem(sys.modules, "beside", raising=False)
    return "script.py"


class Result:
    def __init__(self, code: object, out: str, err: str) -> None:
        self.code = code
        self.out = out
        self.err = err

    @property
    def repeat(self) -> str:
        found = re.findall(r"^repeat it: (.*)$", self.out + self.err, re.MULTILINE)
        assert len(found) == 1
        return str(found[0])

    @property
    def digest(self) -> str:
        return re.findall(r"digest of the trace: ([0-9a-f]{32})$", self.out, re.MULTILINE)[0]


Sim = Callable[..., Result]


@pytest.fixture
def sim(capsys: pytest.CaptureFixture[str]) -> Sim:
    """Return a function that runs ``asyncdist sim`` in this process."""

    def run(*words: object) -> Result:
        before = (sys.argv, list(sys.path), sys.modules["__main__"])
        capsys.readouterr()
        with pytest.raises(SystemExit) as caught:
            cli.main(["sim", *map(str, words)])
        assert (sys.argv, sys.path, sys.modules["__main__"]) == before
        return Result(caught.value.code, *capsys.readouterr())

    return run


# ------------------------------------------------------------------------------------------------------------- one run


def test_a_run_has_its_arguments_its_modules_and_a_summary(sim: Sim, script: str) -> None:
    result = sim(script, "--ranks", 5, "--seed", 7, "ranks", "--seed", "9", "--", "x")
    assert (result.code, result.err) == (0, "")
    lines = result.out.splitlines()
    assert lines[:2] == ["arguments ['ranks', '--seed', '9', '--', 'x'] found", "value 0"]
    assert lines[2:7] == [f"rank {rank}: {rank * 10}" for rank in range(5)]
    assert re.fullmatch(r"5 ranks, seed 7: 0\.\d{6} s of virtual time, \d+ messages, \d+ bytes, \d+ events", lines[7])
    assert lines[8].startswith("digest of the trace: ")
    assert lines[9].startswith("repeat it: ")
    assert len(lines) == 10


def test_a_misspelled_option_after_the_script_is_reported(sim: Sim, script: str) -> None:
    result = sim(script, "-n", 2, "--sed", 7)
    note = "asyncdist sim: --sed is passed to the script; did you mean --seed? If not, write -- before --sed\n"
    assert (result.code, result.err) == (0, note)
    assert result.out.splitlines()[0] == "arguments ['--sed', '7'] found"
    assert sim("-n", 2, "--", script, "--sed", 7).err == ""
    assert sim(script, "-n", 2, "--other", 7).err == ""


def test_options_may_stand_before_the_script(sim: Sim, script: str) -> None:
    result = sim("--ranks=5", script, "--seed=7", "ranks")
    assert (result.code, result.digest) == (0, sim(script, "-n", 5, "--seed", 7, "ranks").digest)


def test_the_script_may_follow_two_dashes_as_with_run(sim: Sim, script: str) -> None:
    """Regression: the script was taken for its own first argument, and refused."""
    result = sim("-n", 5, "--seed", 7, "--", script, "ranks", "--seed", "9", "--", "x")
    assert result.out.splitlines()[0] == "arguments ['ranks', '--seed', '9', '--', 'x'] found"
    assert result.digest == sim(script, "-n", 5, "--seed", 7, "ranks", "--seed", "9", "--", "x").digest


@pytest.mark.slow
def test_equal_neighbours_and_many_ranks_are_abbreviated(sim: Sim, script: str) -> None:
    alike = sim(script, "--ranks", 12)
    assert "\nranks 0 to 11: (" in alike.out
    different = sim(script, "--ranks", 40, "ranks").out.splitlines()
    assert different[2:12] == [*(f"rank {rank}: {rank * 10}" for rank in range(8)), "... 31 more ...", "rank 39: 390"]


HASHING = """
import os, uuid
import numpy as np
import asyncdist as ad

drawn = [np.random.default_rng().random(), str(uuid.uuid4())]

async def main(world):
    await ad.compute_and_broadcast(lambda: [*drawn, *{f"word {number}" for number in range(20)}])
    return drawn

ad.run(main)
"""


SETS_HASH_SEED = """
import os

import asyncdist as ad


async def main(world):
    os.environ["PYTHONHASHSEED"] = "4444"  # as torchgfn's set_seed does, for processes to come
    found = await ad.gather_from_all_ranks(lambda: sorted({"alpha", "beta"}))
    return None if found is None else len(found)  # rank 0 alone receives the values


ad.run(main)
"""


@pytest.mark.workers
@pytest.mark.slow
@pytest.mark.parametrize("given", in_ci(["", "5"], ""))
def test_hash_seeds_of_the_script_and_restarts_leave_no_trace(tmp_path: Path, given: str) -> None:
    """Regression: the repeat line had the script's PYTHONHASHSEED, with which the run was a different one.

    The process restarts to fix a hash seed that is not given, and printed a note before and after that.
    """
    script = tmp_path / "sets.py"
    script.write_text(SETS_HASH_SEED)
    unset = {name: text for name, text in os.environ.items() if name != "PYTHONHASHSEED"}
    ended = subprocess.run(
        [sys.executable, "-m", "asyncdist", "sim", script, "--ranks", "2", "--sed", "7"],
        env={**unset, "PYTHONHASHSEED": given} if given else unset,
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    (line,) = [line for line in ended.stdout.splitlines() if line.startswith("repeat it: ")]
    assert "4444" not in line and line.startswith("repeat it: PYTHONHASHSEED=5 " if given else "repeat it: "), line
    assert given or "PYTHONHASHSEED" not in line, line
    assert ended.stderr.count("did you mean --seed?") == 1


@pytest.mark.workers
@pytest.mark.long
def test_a_run_depends_neither_on_the_process_nor_on_the_system(tmp_path: Path) -> None:
    """Regression: the order of a set of strings, and the system's random bytes, differed between processes."""
    script = tmp_path / "hashing.py"
    script.write_text(HASHING)
    unset = {name: text for name, text in os.environ.items() if name != "PYTHONHASHSEED"}
    own, other, given = (
        subprocess.run(
            [sys.executable, "-m", "asyncdist", "sim", script, "--ranks", "2"],
            env=environ,
            capture_output=True,
            text=True,
            timeout=60,
            check=True,
        ).stdout
        for environ in (unset, {**unset, "PYTHONHASHSEED": "random"}, {**unset, "PYTHONHASHSEED": "5"})
    )
    assert own == other
    assert " PYTHONHASHSEED=5 " in given
    assert "PYTHONHASHSEED" not in own
    digests = [re.findall(r"\b([0-9a-f]{32})\b", text) for text in (own, given)]
    assert digests[0] != digests[1], "the digest must cover the messages"
    assert own.splitlines()[0] == given.splitlines()[0], "the drawn numbers must not depend on the hash seed"


@pytest.mark.workers
@pytest.mark.long
def test_output_that_cannot_be_written_is_told_in_a_line(script: str) -> None:
    """Regression: the command ended with a traceback of its internals."""
    words = [sys.executable, "-m", "asyncdist", "sim", script, "--ranks", "2"]
    with open("/dev/full", "w") as full:
        ended = subprocess.run(words, stdout=full, stderr=subprocess.PIPE, text=True, timeout=60, check=False)
    assert ended.returncode == 2
    assert ended.stderr == "asyncdist sim: standard output cannot be written: No space left on device\n"


@pytest.mark.workers
def test_the_line_repeats_the_run_in_a_fresh_process(sim: Sim, script: str) -> None:
    first = sim(script, "--ranks", 3, "--seed", 7, "--", "--lr", "0.1 2")
    assert first.code == 0
    again = subprocess.run(first.repeat, shell=True, capture_output=True, text=True, timeout=60, check=True)
    assert (again.stdout, again.stderr) == (first.out, "")
    other = sim(script, "--ranks", 3, "--seed", 8, "--", "--lr", "0.1 2")
    assert other.digest != first.digest
    assert other.out.splitlines()[1] != first.out.splitlines()[1], "numbers drawn outside main must depend on the seed"


def test_a_failing_rank_is_told_once_with_trace_and_repeat_line(sim: Sim, script: str) -> None:
    result = sim(script, "--ranks", 3, "--seed", 7, "raise")
    assert result.code == 1
    assert result.err.startswith("asyncdist sim: rank 1 failed:\nTraceback (most recent call last):\n")
    assert result.err.count("Traceback") == 1
    assert 'File "script.py", line 20, in main' in result.err
    assert "asyncdist/" not in result.err
    assert re.search(r"ValueError: boom-7\n.*\nthe last events:\n  0\.\d{9} ", result.err)
    assert "rank 0: RankLostError: " in result.out
    assert "rank 1: ValueError: boom-7" in result.out
    assert result.repeat.endswith("sim script.py --ranks 3 --seed 7 raise")


def test_a_failing_rank_fails_the_run_of_a_script_that_succeeds(sim: Sim, script: str) -> None:
    result = sim(script, "--ranks", 3, "raise", "caught")
    assert result.code == 1
    assert result.err.count("Traceback") == 1
    assert "rank 1 failed:" in result.err


def test_a_deadlock_says_who_waits_for_whom(sim: Sim, script: str) -> None:
    result = sim(script, "--ranks", 3, "stuck")
    assert result.code == 1
    assert "asyncdist sim: the simulation failed:\nDeadlockError:" in result.err
    waits = waits_of_mains(result.err)
    assert "tag 100" in waits[1] and waits[0].startswith("barrier")
    assert re.search(LAST_EVENT, result.err)
    assert "Traceback" not in result.err
    assert "3 ranks, seed 0: 0.0" in result.out


def test_a_loop_without_end_is_told_as_a_deadlock_is(sim: Sim, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Regression: the error had a traceback of the simulator, and lacked the last events."""
    monkeypatch.setattr("asyncdist.simulation.rank_turns.TURN_COUNT_MAX", 1000)
    script = tmp_path / "loops.py"
    script.write_text(
        "import asyncio\n"
        "import asyncdist\n"
        "async def main(world):\n"
        "    await world.safe_point()\n"
        "    while world.rank == 1:\n"
        "        await asyncio.sleep(0)\n"
        "asyncdist.run(main)\n"
    )
    result = sim(script, "--ranks", 2)
    assert result.code == 1
    assert "\nEndlessLoopError: rank 1 " in result.err
    assert re.match(r"sleep, in main \(.*loops.py:6\)", waits_of_mains(result.err)[1])
    assert re.search(LAST_EVENT, result.err)
    assert "Traceback" not in result.err
    assert "2 ranks, seed 0: 0.0" in result.out


@pytest.mark.parametrize(
    ("way", "code", "words"),
    [
        ("exit", 1, ["rank 1 failed:\nboom-7\n"]),
        ("top", 1, ["the script failed:\nTraceback", "in <module>\n    raise KeyError", "KeyError: 'boom-7'"]),
        ("--help", 0, ["exited before asyncdist.run, so nothing was simulated"]),
        ("--wrong", 3, ["exited before asyncdist.run, so nothing was simulated"]),
        ("never", 2, ["'script.py' must call asyncdist.run on the main thread"]),
        ("twice", 2, ["'script.py' must call asyncdist.run exactly once"]),
    ],
)
def test_a_script_may_end_in_many_ways(sim: Sim, script: str, way: str, code: int, words: list[str]) -> None:
    result = sim(script, "--ranks", 3, "--", way)
    assert result.code == code
    assert [word for word in words if word not in result.err] == []
    assert code == 1 or result.err.count("\n") == 1


def test_a_script_with_a_syntax_error_is_refused_in_a_line(sim: Sim, script: str) -> None:
    Path("broken.py").write_text("async def main(:\n")
    result = sim("broken.py", "--ranks", 2)
    assert result.code == 2
    assert re.fullmatch(r"asyncdist sim: .*'broken\.py'.*line 1: .*async def main\(:\n", result.err)


# -------------------------------------------------------------------------------------------------------------- faults


def test_faults_fire_and_are_repeated(sim: Sim, script: str) -> None:
    plan = [SlowRank(2, 0.0, 50.0), Stall(1, 0.0, 0.5)]
    Path("plan.json").write_text(format_faults(plan))
    result = sim(script, "--ranks", 3, "--faults", "plan.json")
    assert (result.code, result.err) == (0, "")
    assert "faults fired: 1 x SlowRank(rank=2, at_s=0.0, factor=50.0), 1 x Stall(" in result.out
    words = shlex.split(result.repeat)
    assert read_faults(words[words.index("--faults") + 1], ranks=3) == tuple(plan)
    assert sim(*words[words.index("sim") + 1 :]).out == result.out
    assert result.digest != sim(script, "--ranks", 3).digest


def test_a_fault_that_did_not_fire_fails_the_run(sim: Sim, script: str) -> None:
    result = sim(script, "--ranks", 3, "--faults", format_faults([SlowRank(2, 0.0, 5.0), Stall(1, 9.0, 0.5)]))
    assert result.code == 1
    assert result.err == "asyncdist sim: these faults did not fire: Stall(rank=1, at_s=9.0, duration_s=0.5)\n"


@pytest.mark.parametrize("signal", ["SIGTERM", "SIGINT"])
def test_a_ranks_signal_ends_the_job_and_not_the_simulation(
    sim: Sim, script: str, signal: Literal["SIGTERM", "SIGINT"]
) -> None:
    result = sim(script, "--ranks", 3, "--faults", format_faults([Interrupt(0, 0.0, signal)]))
    assert result.code == 1
    told = {"SIGTERM": "exit code 143", "SIGINT": "KeyboardInterrupt"}[signal]
    assert re.search(rf"asyncdist sim: rank 0 .*\n{told}\n", result.err)
    assert "ranks 1 to 2: RankLostError: rank 0 " in result.out
    assert "1 x Interrupt(rank=0, at_s=0.0" in result.out


def test_a_killed_rank_is_told_apart(sim: Sim, script: str) -> None:
    result = sim(script, "--ranks", 3, "--faults", format_faults([Kill(2, at_s=0.0)]))
    assert result.code == 1
    assert "rank 2: killed" in result.out
    assert "RankLostError: rank 2 " in result.out


def test_a_restarted_ranks_result_is_that_of_its_last_process(sim: Sim, tmp_path: Path) -> None:
    (tmp_path / "again.py").write_text(
        "import asyncio\nimport asyncdist\n"
        "async def main(world):\n    await asyncio.sleep(1)\n    return f'process {world.incarnation}'\n"
        "asyncdist.run(main)\n"
    )
    plan = [Kill(1, at_s=0.1), Restart(1, at_s=0.2), Kill(2, at_s=0.1), Restart(2, at_s=0.2), Kill(2, at_s=0.3)]
    result = sim(tmp_path / "again.py", "--ranks", 3, "--faults", format_faults(plan))
    assert (result.code, result.err) == (0, "")
    assert "rank 0: 'process 0'\nrank 1: 'process 1'\nrank 2: killed\n" in result.out


# ----------------------------------------------------------------------------------------------------------- many seeds


@pytest.mark.slow
def test_exploring_stops_at_the_first_seed_that_fails(sim: Sim, script: str) -> None:
    first = next(seed for seed in range(3, 1000) if sim(script, "--ranks", 3, "--seed", seed, "race").code)
    result = sim(script, "--ranks", 3, "--seed", 3, "--explore", 1000, "--processes", 1, "race")
    assert result.code == 1
    assert f"{first - 2} seeds in " in result.out
    assert f"seed {first} failed: AssertionError: the older one won" in result.err
    assert result.err.count("arguments") == 0, "the output of the script must not be shown"
    assert result.repeat.endswith(f"sim script.py --ranks 3 --seed {first} race")
    words = shlex.split(result.repeat)
    again = sim(*words[words.index("sim") + 1 :])
    assert again.code == 1
    assert "AssertionError: the older one won" in again.err


@pytest.mark.workers
@pytest.mark.long
def test_exploring_in_processes_shrinks_the_plan(sim: Sim, script: str) -> None:
    plan = [SlowRank(0, 0.0, 2.0), Kill(2, at_s=0.00012345), SlowLink(0, 1, 0.0, 3.0)]
    options = ["--ranks", 3, "--faults", format_faults(plan), "--explore", 8, "--processes", 2]
    result = sim(script, *options, "ranks")
    assert result.code == 1
    assert "seed 0 failed: RankLostError" in result.err
    assert "faults: 1 of 3 needed: Kill(rank=2, at_s=0.0)" in result.err
    assert '--faults \'[{"kind": "Kill", "rank": 2, "at_s": 0.0}]\' ranks' in result.repeat


@pytest.mark.parametrize(
    "plan",
    [
        [Interrupt(0, 0.0)],
        [Interrupt(0, 0.0, "SIGINT")],
        [Interrupt(1, 0.0)],
        [Interrupt(2, 0.0), Interrupt(2, 1e-7)],
    ],
    ids=["SIGTERM", "SIGINT", "another rank", "twice"],
)
def test_exploring_continues_after_a_planned_signal_ends_a_job(sim: Sim, script: str, plan: list[Fault]) -> None:
    """Regression: the first seed failed with the exit that the plan causes, and SIGINT interrupted the exploration."""
    result = sim(script, "--ranks", 3, "--faults", format_faults(plan), "--explore", 4, "--processes", 1, "ranks")
    assert (result.code, result.err) == (0, "")
    assert result.out.startswith("4 seeds in ") and f"Interrupt {4 * len(plan)}" in result.out


def test_a_fault_that_did_not_fire_fails_the_seed(sim: Sim, script: str) -> None:
    plan = format_faults([SlowRank(2, 0.0, 5.0), Stall(1, 9.0, 0.5)])
    result = sim(script, "--ranks", 3, "--faults", plan, "--explore", 8, "--processes", 1)
    assert result.code == 1
    assert re.search(r"seed 0 .*AssertionError: all faults .* with seed 0 these did not: Stall\(", result.err)
    assert "faults: 1 of 2 needed: Stall(rank=1, at_s=9.0, duration_s=0.0)" in result.err


def test_exploring_without_a_failure(sim: Sim, script: str) -> None:
    result = sim(script, "--ranks", 3, "--explore", 12, "--processes", 1, "ranks")
    assert (result.code, result.err) == (0, "")
    assert re.fullmatch(r"12 seeds .*\b12 different .*\n", result.out)


@pytest.mark.workers
@pytest.mark.long
def test_a_terminal_gets_a_progress_bar(script: str) -> None:
    own, other = pty.openpty()
    termios.tcsetwinsize(other, (24, 100))
    words = [sys.executable, "-m", "asyncdist", "sim", script, "--ranks", "2", "--explore", "9", "--processes", "1"]
    process = subprocess.Popen([*words, "ranks"], stdout=subprocess.PIPE, stderr=other, text=True)
    os.close(other)
    shown = b""
    try:
        while part := os.read(own, 4096):
            shown += part
    except OSError:  # on Linux, this error means that no process writes to the terminal any longer
        pass
    output, _ = process.communicate(timeout=60)
    os.close(own)
    assert process.returncode == 0
    assert "9 seeds in" in output
    assert re.search(rb"100%.*9/9 \[00:00<00:00, [0-9.]+ seeds/s, 9 different", shown)


# ------------------------------------------------------------------------------------------------------------ bad input


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["script.py"], "required before the script: -n/--ranks"),
        (["--ranks", "2"], "required: script"),
        (["script.py", "--ranks"], "expected one argument"),
        (["script.py", "--ranks", "0"], "--ranks: must be an integer >= 1, got '0'"),
        (["script.py", "--ranks", "many"], "--ranks: must be an integer >= 1, got 'many'"),
        (["nothing.py", "--ranks", "2"], "'nothing.py' does not exist"),
        ([".", "--ranks", "2"], "'.' is a directory"),
        (["script.py", "--ranks", "2", "--seed", "x"], "argument --seed: must be an integer, got 'x'"),
        (["script.py", "--ranks", "2", "--explore", "0"], "argument --explore: must be an integer >= 1, got '0'"),
        (["script.py", "--ranks", "2", "--processes", "2"], "--processes needs --explore"),
        (
            ["script.py", "--ranks", "2", "--explore", "3", "--processes", "0"],
            "argument --processes: must be an integer >= 1, got '0'",
        ),
        (
            ["--frob", "script.py", "--ranks", "2"],
            "--frob",
        ),
        (
            ["script.py", "--ranks", "2", "--explore", "3", "--processes", "1", "never"],
            "asyncdist.run",
        ),
        (["script.py", "--ranks", "2", "--explore", "3", "--processes", "1", "twice"], "exactly once"),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(sim: Sim, script: str, words: list[str], expected: str) -> None:
    result = sim(*words)
    assert result.code == 2
    assert expected in result.err
    assert result.err.count("\n") == 1
    assert "value" not in result.out or "twice" in words


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        (b"Kill rank 1", "'plan.json' is not valid JSON"),
        (b'{"kind": "Kill"}', "'plan.json' must be a list of faults, got dict"),
        (b"\xff\xfe", "'plan.json' cannot be read"),
        (None, "'plan.json' cannot be read: No such file"),
    ],
)
def test_a_file_that_is_no_plan_is_one_line(sim: Sim, script: str, content: bytes | None, expected: str) -> None:
    if content is not None:
        Path("plan.json").write_bytes(content)
    result = sim(script, "--ranks", 2, "--faults", "plan.json")
    assert (result.code, result.out) == (2, "")
    assert expected in result.err
    assert result.err.count("\n") == 1


def test_a_script_as_a_scenario_keeps_its_silence_and_its_plan(script: str, capfd: pytest.CaptureFixture[str]) -> None:
    plan = (SlowRank(2, 0.0, 5.0),)
    report = Script(script, ("ranks",), 3, plan)(7)
    assert (report.results, report.faults) == ((0, 10, 20), plan)
    assert Script(script, ("ranks",), 3, plan)(7, ()).faults == ()
    assert capfd.readouterr() == ("", "")
