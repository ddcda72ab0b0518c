"""Tests how jobs end under the real mpirun: every process stops, nothing is left, and one clear error is printed.

Each rank runs under ``scripts/watched.py``, which records the rank's exit code and pid. The time limits are generous:
they only distinguish an end from a hang, since the programs would run for minutes.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from support import mpi, warm
from support.endings import failed_ranks, stopped_by
from support.local import worlds

import asyncdist as ad
from asyncdist import rank_program
from asyncdist.launchers.launcher_signals import COPIES_S
from asyncdist.messaging import wire
from asyncdist.runtime.failing import failure
from asyncdist.runtime.failing.failure_report import FailureReport, peer_failed, summarise

SCRIPTS = Path(__file__).parents[1] / "scripts"
#: Seconds until a job must have reached the point at which the test acts on it.
START_S = 60.0
#: Seconds until the job must have ended afterwards; the programs themselves would take 300 s.
END_S = 45.0


class Job:
    """A job under mpirun, and the known facts about its ranks.

    Attributes:
        stdout, stderr: Output of all ranks, once the job has ended.
        statuses: The ranks' own exit codes, in no order; the code of a rank that was killed with its watcher is
            missing.
        memory: Files of /dev/shm that ranks had mapped when they were ready, and that still exist.
    """

    def __init__(self, folder: Path, ranks: int, way: str, *, by_themselves: bool) -> None:
        self.folder, self.ranks = folder, ranks
        self.stdout = self.stderr = ""
        self.statuses: list[int] = []
        self.memory: list[str] = []
        launch = Path(ad.__file__).with_name("rank_program.py")
        base = mpi.base_environment()
        program = [launch, *warm.command(SCRIPTS / "ends.py", [folder, way], base, {})]
        watched = [SCRIPTS / "watched.py", folder, ranks if by_themselves else 0]
        command = [sys.executable, "-m", "asyncdist", "run", "-n", ranks, *watched, *program]
        with (folder / "stdout").open("wb") as out, (folder / "stderr").open("wb") as err:
            self.process = subprocess.Popen(
                [str(word) for word in command],
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=err,
                env=base,
                start_new_session=True,
            )

    def rank_pid(self, rank: int) -> int:
        """Return the process ID of a rank that has reported that it is ready."""
        return int((self.folder / f"ready.{rank}").read_text())

    def wait_ready(self) -> None:
        """Wait until every rank is ready."""
        self._wait(lambda: all((self.folder / f"ready.{rank}").exists() for rank in range(self.ranks)), START_S)

    def wait_end(self, seconds: float = END_S) -> int:
        """Return the exit code of mpirun when it and all ranks have ended without being killed."""
        self._wait(lambda: self.process.poll() is not None, seconds)
        self._wait(lambda: not self.living(), 10.0)
        self.stdout = (self.folder / "stdout").read_text(errors="replace")
        self.stderr = (self.folder / "stderr").read_text(errors="replace")
        self.statuses = [int(path.read_text()) for path in self.folder.glob("status.*")]
        named = {name for path in self.folder.glob("memory.*") for name in path.read_text().splitlines()}
        self.memory = sorted(name for name in named if Path(name).exists())
        return self.process.returncode

    def living(self) -> list[int]:
        """Return the ranks whose processes exist."""
        pids = [int(path.suffix[1:]) for path in self.folder.glob("pid.*")]
        return [pid for pid in pids if is_running(pid)]

    def _wait(self, condition: Callable[[], bool], seconds: float) -> None:
        deadline = time.monotonic() + seconds
        while not condition():
            assert time.monotonic() < deadline, f"nothing happened for {seconds:g} s\n{self.describe()}"
            time.sleep(0.02)

    def describe(self) -> str:
        texts = [f"--- {path.name}\n{path.read_text(errors='replace')}" for path in sorted(self.folder.glob("*"))]
        return f"mpirun: {self.process.poll()}, living ranks: {self.living()}\n" + "\n".join(texts)

    def close(self) -> None:
        """Kill all processes, whatever the outcome of the test."""
        mpi._kill_session(self.process.pid)
        self.process.wait()
        for pid in self.living():
            os.kill(pid, signal.SIGKILL)


def is_running(pid: int) -> bool:
    """Return whether this process exists and is not a zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in ("Z", "X")
    except (FileNotFoundError, ProcessLookupError):
        return False


class Ended:
    """Runs a job to its end and keeps its output.

    Args:
        way: Argument of ``scripts/ends.py``.
        ranks: Number of ranks.
        act: Function that acts on the job when all ranks are ready.
        by_themselves: Whether every rank must end without mpirun, which otherwise kills ranks that end slightly later
            than the first.
    """

    def __init__(
        self, way: str, ranks: int, act: Callable[[Job], object] | None = None, *, by_themselves: bool = False
    ) -> None:
        mpi.require_mpi()
        with tempfile.TemporaryDirectory(prefix="asyncdist-test-") as name:
            job = Job(Path(name), ranks, way, by_themselves=by_themselves)
            try:
                if act is not None:
                    job.wait_ready()
                    act(job)
                self.code = job.wait_end()
                self.stdout, self.stderr, self.statuses = job.stdout, job.stderr, job.statuses
                self.memory = job.memory
                self.story = job.describe()
                if by_themselves:
                    killed = {-signal.SIGKILL, -signal.SIGTERM}
                    assert len(self.statuses) == ranks and not killed & {*self.statuses}, self.story
            finally:
                job.close()

    def check_failed(self) -> None:
        """Check that mpirun and every rank that could report have ended with an error, without shared memory left."""
        assert self.code != 0, self.story
        assert all(status != 0 for status in self.statuses), self.story
        assert not self.memory, (self.memory, self.story)

    def check_told_once(self, text: str, rank: int) -> None:
        """Check that the failed rank has printed one traceback, and each other rank one line."""
        assert self.stderr.count("Traceback") == 1, self.story
        assert rank in failed_ranks(self.stderr), self.story
        assert self.stderr.count(f"\n{text}") == 1 or self.stderr.count(f"| {text}") == 1, self.story


# -- a failure somewhere ----------------------------------------------------------------------------------------------


@pytest.mark.mpi
def test_an_exception_on_one_rank_ends_the_job_and_is_told_once() -> None:
    ended = Ended("raises", 3, by_themselves=True)
    ended.check_failed()
    ended.check_told_once("ValueError: boom-7", rank=1)
    assert stopped_by(ended.stderr, 1, "ValueError: boom-7") == [0, 2], ended.story


class WithoutText(Exception):
    def __str__(self) -> str:
        raise AttributeError("reason")


@pytest.mark.mpi
@pytest.mark.long
def test_an_exception_with_text_that_cannot_be_sent_ends_the_job() -> None:
    ended = Ended("raises_at_length", 2, by_themselves=True)
    ended.check_failed()
    assert stopped_by(ended.stderr, 1, "ValueError: xxx") == [0] and "x... (100000 " in ended.stderr, ended.story


@pytest.mark.parametrize(
    ("error", "summary"),
    [
        (ValueError("no caf\udce9\nat all"), r"ValueError: no caf\udce9"),
        (ExceptionGroup("", [ValueError("x" * 10)] * 9000), "ValueError: xxxxxxxxxx; ValueError: "),
        (WithoutText(), "WithoutText: (its __str__ raised AttributeError)"),
    ],
)
def test_what_peers_are_told_of_a_failure_can_always_travel(error: Exception, summary: str) -> None:
    assert summarise(error).startswith(summary)
    assert len(summarise(error).encode()) < 2000


@pytest.mark.mpi
@pytest.mark.long
def test_a_mistake_of_all_ranks_is_printed_once() -> None:
    ended = Ended("raises_everywhere", 4)
    ended.check_failed()
    told = re.findall(r"^asyncdist: rank (\d) ", ended.stderr, re.M)
    assert sorted(told) == list("0123"), ended.story  # a slow rank is notified before it reaches this point
    assert ended.stderr.count("Traceback") == len(failed_ranks(ended.stderr)) >= 1, ended.story


@pytest.mark.mpi
@pytest.mark.parametrize(
    ("way", "words"),
    [
        ("takes_no_world", r"takes_no_world \(PLACE\) .*takes_no_world\(world\)"),
        ("is_no_coroutine_function", r"is_no_coroutine_function \(PLACE\): if .*asyncdist\.blocking\.run\(main\).*"),
    ],
)
@pytest.mark.long
def test_a_main_that_cannot_be_called_is_named_in_one_line(way: str, words: str) -> None:
    """Regression: each rank printed a traceback, or one whose last line was the runtime's."""
    ended = Ended(way, 3)
    ended.check_failed()
    lines = [line for line in ended.stderr.splitlines() if "TypeError: main " in line]
    assert len(lines) == 3, ended.story
    pattern = words.replace("PLACE", r".*ends\.py:\d+")
    assert all(re.search(f" {pattern}$", line) for line in lines), ended.story
    assert "Traceback" not in ended.stderr and "run.py" not in ended.stderr, ended.story


@pytest.mark.mpi
@pytest.mark.long
def test_ranks_of_different_versions_name_both_in_one_line_each() -> None:
    """Regression: each rank printed a traceback of the runtime."""
    ended = Ended("of_another_version", 3)
    ended.check_failed()
    said = re.findall(
        r"^asyncdist: rank (\d) stopped: .*, but rank \1 runs (.*) and rank (\d) runs (.*)$", ended.stderr, re.M
    )
    here, there = f"asyncdist {ad.__version__}, frames {wire.VERSION}", f"asyncdist 9.9.9, frames {wire.VERSION}"
    assert sorted(said) == [("0", here, "1", there), ("1", there, "0", here), ("2", here, "1", there)], ended.story
    assert "Traceback" not in ended.stderr, ended.story


@pytest.mark.mpi
@pytest.mark.long
def test_a_misspelt_name_keeps_pythons_suggestion() -> None:
    """The report of Python 3.11's own ``traceback`` has no suggestion."""
    ended = Ended("misspells_everywhere", 2)
    ended.check_failed()
    said = "NameError: name 'trainin_loss' is not defined. Did you mean: 'training_loss'?"
    assert ended.stderr.count(f"\n{said}\n") == ended.stderr.count("Traceback") >= 1, ended.story
    assert "run.py" not in ended.stderr, ended.story


@pytest.mark.parametrize("local_rank", [0, 1])
def test_only_the_first_rank_of_a_host_prints_the_whole_failure(
    local_rank: int, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Regression: each rank printed a traceback, most of whose lines were the runtime's."""

    async def main(world: ad.World) -> None:
        raise AssertionError(f"{world} was opened")

    monkeypatch.setattr(sys, "excepthook", sys.excepthook)
    monkeypatch.setattr(failure, "_report", FailureReport())
    monkeypatch.setenv("LOCAL_RANK", str(local_rank))
    with pytest.raises(ValueError, match="must be one of") as caught:
        ad.run(main, transport="mpii")
    sys.excepthook(caught.type, caught.value, caught.tb)
    told = capsys.readouterr().err
    if local_rank:
        line = f"{caught.traceback[0].path}:{caught.traceback[0].lineno + 1}"
        assert told == f"asyncdist: local rank 1, {line}: ValueError: {caught.value}\n"
    else:
        assert told.startswith("Traceback") and told.count('File "') == 1, told
    sys.excepthook(ValueError, ValueError("another one"), None)
    assert capsys.readouterr().err == "ValueError: another one\n"


async def test_a_mistake_that_was_heard_of_is_told_in_a_line(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "excepthook", sys.excepthook)
    monkeypatch.setattr(failure, "_report", FailureReport())
    async with worlds(2) as (_, world):
        world.services.engine.fail(peer_failed(0, "ValueError: boom-7"))
        assert await failure._rank_with_same_error(world, ValueError("boom-8")) is None
        assert await failure._rank_with_same_error(world, TypeError("boom-7")) is None
        assert await failure._rank_with_same_error(world, peer_failed(0, "ValueError: boom-7")) is None
        assert capsys.readouterr().err == ""
        error = ValueError("boom-7\nand more")
        first_rank = await failure._rank_with_same_error(world, error)
        assert first_rank == 0
        failure._print_same_error(world.rank, first_rank, error)
        assert capsys.readouterr().err == "asyncdist: rank 1 failed in the same way as rank 0: ValueError: boom-7\n"


@pytest.fixture(autouse=True)
def sigint() -> Iterator[Any]:
    """The handler before a test: after a failure that ends a process, a Ctrl-C kills it."""
    before = signal.getsignal(signal.SIGINT)
    yield before
    signal.signal(signal.SIGINT, before)


def test_a_ctrl_c_that_comes_after_the_report_adds_no_traceback(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The launcher sends Ctrl-C to all ranks. One rank ends first, and the others are about to report that."""
    monkeypatch.setattr(sys, "excepthook", sys.excepthook)
    report = FailureReport()
    for told, error in enumerate((peer_failed(0, "KeyboardInterrupt"), KeyboardInterrupt())):
        report.print_line(f"line {told}", error)
        with pytest.raises(KeyboardInterrupt) as caught:
            try:
                raise error
            finally:
                raise KeyboardInterrupt
        sys.excepthook(caught.type, caught.value, caught.tb)
        assert signal.getsignal(signal.SIGINT) is signal.SIG_DFL
    assert capsys.readouterr().err == "asyncdist: line 0\nasyncdist: line 1\n"
    sys.excepthook(KeyboardInterrupt, KeyboardInterrupt(), None)
    assert capsys.readouterr().err == "KeyboardInterrupt\n"


def test_ctrl_c_in_a_session_stays_an_exception_after_a_failure(
    sigint: Any, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "excepthook", sys.excepthook)
    monkeypatch.setattr(sys, "ps1", ">>> ", raising=False)
    FailureReport().print_line("line", ValueError())
    sys.excepthook(KeyError, KeyError("a"), None)
    assert signal.getsignal(signal.SIGINT) is sigint is not signal.SIG_DFL
    assert capsys.readouterr().err == "asyncdist: line\nKeyError: 'a'\n"


def test_a_ctrl_c_during_the_report_adds_no_traceback(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        "import signal, sys\nsys.excepthook = lambda *_: signal.raise_signal(signal.SIGINT)\nraise ValueError\n"
    )
    ended = subprocess.run([sys.executable, rank_program.PROGRAM, script], capture_output=True, timeout=60)
    assert (ended.returncode, ended.stderr) == (1, b"")


@pytest.mark.mpi
@pytest.mark.long
def test_mistakes_that_differ_are_all_told() -> None:
    ended = Ended("raises_its_own_everywhere", 2)
    ended.check_failed()
    for rank in range(2):
        assert rank in failed_ranks(ended.stderr), ended.story
        assert f"ValueError: boom-{rank}" in ended.stderr, ended.story


@pytest.mark.mpi
@pytest.mark.long
def test_an_exception_reaches_ranks_that_wait_in_a_policys_start() -> None:
    ended = Ended("raises_before_a_policy_of_others", 2, by_themselves=True)
    ended.check_failed()
    ended.check_told_once("ValueError: boom-7", rank=1)


@pytest.mark.mpi
def test_a_blocking_peer_is_aborted_after_the_grace_period() -> None:
    ended = Ended("raises_beside_a_blocked_peer", 2)
    ended.check_failed()
    ended.check_told_once("ValueError: boom-7", rank=1)
    assert re.search(r"rank 1: .*\[0\] .*\b1 s\b", ended.stderr), ended.story


@pytest.mark.mpi
@pytest.mark.long
def test_a_task_that_fails_in_the_background_ends_the_job() -> None:
    """test_ends_in_process.py tests this without processes; here mpirun ends as well."""
    ended = Ended("background_task_fails", 2, by_themselves=True)
    ended.check_failed()
    assert ended.stderr.count("ValueError: boom-7") == 2, ended.story  # the traceback, and rank 0's line
    assert failed_ranks(ended.stderr) == [1], ended.story
    assert stopped_by(ended.stderr, 1, "ValueError: boom-7") == [0], ended.story
    assert "run.py" not in ended.stderr and "taskgroups.py" not in ended.stderr, ended.story


@pytest.mark.mpi
@pytest.mark.parametrize("way", ["shards_fail_in_the_function", "shards_fail_behind_it"])
@pytest.mark.long
def test_a_failure_inside_a_population_s_function_is_told_once(way: str) -> None:
    """The others are notified twice: by the function's collective, and by the general notice of a failure."""
    ended = Ended(way, 3)
    ended.check_failed()
    assert ended.stderr.count("ValueError: boom-7") == 3, ended.story  # the traceback, and two lines
    assert failed_ranks(ended.stderr) == [2], ended.story
    assert stopped_by(ended.stderr, 2, "ValueError: boom-7") == [0, 1], ended.story
    assert "CancelledError" not in ended.stderr, ended.story


@pytest.mark.mpi
@pytest.mark.parametrize("way", ["raises_keyboard_interrupt", "raises_cancelled"])
@pytest.mark.long
def test_interrupts_and_cancellations_of_ones_own_making(way: str) -> None:
    ended = Ended(way, 2, by_themselves=True)
    ended.check_failed()
    assert stopped_by(ended.stderr, 1) == [0], ended.story
    assert ended.stderr.count("Traceback") == (1 if way == "raises_cancelled" else 0), ended.story


@pytest.mark.mpi
@pytest.mark.long
def test_sys_exit_zero_is_a_rank_that_leaves_early() -> None:
    ended = Ended("exits_0", 3, by_themselves=True)
    assert ended.code == 0 and ended.statuses == [0, 0, 0], ended.story
    assert "Traceback" not in ended.stderr, ended.story


@pytest.mark.mpi
@pytest.mark.long
def test_sys_exit_with_a_code_ends_the_job_with_an_error() -> None:
    ended = Ended("exits_3", 2, by_themselves=True)
    ended.check_failed()
    assert 3 in ended.statuses, ended.story
    assert stopped_by(ended.stderr, 1, "SystemExit: 3") == [0], ended.story
    assert "Traceback" not in ended.stderr, ended.story


@pytest.mark.mpi
def test_a_killed_rank_ends_the_rest() -> None:
    ended = Ended("killed", 3)
    ended.check_failed()


@pytest.mark.mpi
@pytest.mark.long
def test_a_large_average_that_loses_a_member_holds_no_rank() -> None:
    """Before the loss, another member leaves during an average.

    This average completes, and the next names the member.
    """
    ended = Ended("killed_in_an_average", 3)
    ended.check_failed()
    assert ended.stdout.count("told of rank 2") == 2, ended.story
    ended = Ended("raises_in_an_average", 3)
    ended.check_failed()
    assert ended.stderr.count("ValueError: boom-7") >= 2, ended.story
    assert stopped_by(ended.stderr, 1).count(0) == 1, ended.story


@pytest.mark.mpi
def test_a_rank_that_returns_early_leaves_the_others_averaging() -> None:
    ended = Ended("returns_early", 3, by_themselves=True)
    assert ended.code == 0 and ended.statuses == [0, 0, 0], ended.story
    assert sorted(line for line in ended.stdout.splitlines() if line.startswith("value")) == [
        "value 0: 3",
        "value 1: 0",
        "value 2: 0",
    ], ended.story


# -- signals ----------------------------------------------------------------------------------------------------------


PLACES = (
    "steps",
    pytest.param("streams", marks=pytest.mark.long),
    "policy_streams",
    pytest.param("policy_start", marks=pytest.mark.long),
    "before_run",
    "alone_in_the_handshake",
)


@pytest.mark.mpi
@pytest.mark.parametrize("place", PLACES)
def test_ctrl_c_anywhere_ends_everything(place: str) -> None:
    """Ctrl-C acts as in a terminal: mpirun, which ``asyncdist run`` has become, gets SIGINT and ends the ranks."""
    ended = Ended(place, 2, lambda job: os.kill(job.process.pid, signal.SIGINT))
    ended.check_failed()
    assert "Traceback" not in ended.stderr or place in ("before_run", "alone_in_the_handshake"), ended.story


def test_ctrl_c_during_the_cleanup_of_a_failed_rank_is_silent() -> None:
    """Regression: the peer had received the signal slightly earlier, and printed a traceback from torch's callbacks."""
    program = """
import atexit, os, signal
from asyncdist.runtime.failing.failure_report import FailureReport
atexit.register(os.kill, os.getpid(), signal.SIGINT)
FailureReport().print_line("rank 0 stopped", ValueError())
"""
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=END_S)
    assert (ended.returncode, ended.stderr) == (-signal.SIGINT, "asyncdist: rank 0 stopped\n")


@pytest.mark.mpi
def test_sigterm_to_mpirun_ends_everything() -> None:
    ended = Ended("steps", 2, lambda job: os.kill(job.process.pid, signal.SIGTERM))
    ended.check_failed()


@pytest.mark.mpi
@pytest.mark.parametrize(
    ("place", "number"),
    [
        pytest.param("steps", signal.SIGINT, marks=pytest.mark.long),
        ("steps", signal.SIGTERM),
        pytest.param("policy_streams", signal.SIGTERM, marks=pytest.mark.long),
        ("policy_start", signal.SIGINT),
    ],
)
def test_a_signal_to_one_rank_ends_the_job(place: str, number: signal.Signals) -> None:
    ended = Ended(place, 2, lambda job: os.kill(job.rank_pid(1), number), by_themselves=True)
    ended.check_failed()
    assert "Traceback" not in ended.stderr, ended.story


@pytest.mark.mpi
@pytest.mark.parametrize(("place", "rank"), [("before_run", 0), ("held_in_the_handshake", 1)])
def test_a_signal_to_one_rank_during_its_set_up_ends_the_job(place: str, rank: int) -> None:
    ended = Ended(place, 2, lambda job: os.kill(job.rank_pid(rank), signal.SIGINT))
    ended.check_failed()
    assert ("rank 1 was interrupted" in ended.stderr) == (rank == 1), ended.story


@pytest.mark.mpi
@pytest.mark.long
def test_a_signal_while_mpi_starts_ends_the_job_after_the_start() -> None:
    def act(job: Job) -> None:
        time.sleep(2.0)  # by now, rank 1 is most likely inside MPI's set-up; any other place is fine, too
        os.kill(job.rank_pid(1), signal.SIGINT)
        time.sleep(0.5)
        (job.folder / "go").touch()

    ended = Ended("late_to_the_handshake", 2, act)
    ended.check_failed()


@pytest.mark.mpi
def test_the_second_signal_ends_a_rank_that_ignores_the_first() -> None:
    def twice(job: Job) -> None:
        os.kill(job.rank_pid(1), signal.SIGINT)
        time.sleep(COPIES_S + 0.1)
        assert is_running(job.rank_pid(1)), "the first signal must only make the rank drain, but ended it"
        os.kill(job.rank_pid(1), signal.SIGINT)

    ended = Ended("blocked", 2, twice)
    ended.check_failed()
    # Under MPICH, the rank asks mpirun to end the job, and mpirun may kill the rank before it has ended.
    assert 130 in (ended.code, *ended.statuses), ended.story
