"""Tests the guardians of a rank: which processes end together, and that either guardian may be killed."""

from __future__ import annotations

import contextlib
import errno
import os
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from asyncdist.launch import guardians, local_ranks

pytestmark = pytest.mark.skipif(not guardians.ARE_SUPPORTED, reason="there are no subreapers")

#: Generous limits: they fail only tests that hang, not tests that are slow.
TIMEOUT_S = 60.0

# Four children that would survive: in the rank's group, in their own session, and orphans of both kinds that ignore
# SIGTERM.
RANK = """
import os, pathlib, signal, subprocess, sys, time
folder = pathlib.Path(sys.argv[1])

def child(seconds, *, leaves=False, ignores_sigterm=False):
    if os.fork():
        return
    if leaves:
        os.setsid()
    if ignores_sigterm:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        if os.fork():
            os._exit(0)
    (folder / f"{os.getpid()}.child").touch()
    time.sleep(seconds)
    os._exit(0)

child(600)
child(600, leaves=True)
child(600, ignores_sigterm=True)
child(600, leaves=True, ignores_sigterm=True)
while len(list(folder.glob("*.child"))) < 4:
    time.sleep(0.01)
signal.signal(signal.SIGUSR1, lambda *_: print("heard", flush=True))
signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGUSR1})
(folder / f"{os.getpid()}.rank").touch()
"""
WAITS = RANK + "while True:\n    time.sleep(1)\n"


@contextlib.contextmanager
def guarded(folder: Path, source: str, *, parent: int = 0) -> Iterator[subprocess.Popen[str]]:
    command = guardians.guarded([sys.executable, "-c", source, str(folder)], parent=parent)
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, process_group=0)
    try:
        yield process
    finally:
        process.kill()
        process.communicate(timeout=TIMEOUT_S)
        wait_until(lambda: not living(folder), "everything has ended")


def wait_until(condition: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + TIMEOUT_S
    while not condition():
        assert time.monotonic() < deadline, f"after {TIMEOUT_S:g} s, this is still not true: {what}"
        time.sleep(0.01)


def living(folder: Path) -> list[str]:
    return [path.name for path in folder.iterdir() if fields(int(path.stem))[0] not in "ZX"]


def fields(pid: int) -> list[str]:
    """Return fields of /proc/PID/stat, beginning with the state: state, parent, group."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return ["X", "0", "0"]


def rank_of(folder: Path) -> int:
    wait_until(lambda: bool(list(folder.glob("*.rank"))), "the rank runs")
    return int(next(folder.glob("*.rank")).stem)


@pytest.mark.parametrize(
    ("end", "code"),
    [("", 0), ("sys.exit(7)", 7), ("os.kill(os.getpid(), 9)", -9), ("os.abort()", -signal.SIGABRT)],
    ids=["returns", "exits", "is killed", "aborts"],
)
def test_processes_left_by_a_rank_end_even_in_an_own_session(tmp_path: Path, end: str, code: int) -> None:
    with guarded(tmp_path, RANK + end) as process:
        assert process.wait(TIMEOUT_S) == code
        assert living(tmp_path) == []


def test_a_guardian_reports_that_its_rank_has_joined_the_world() -> None:
    rank = "import os; os.write(199, b'0'); os.write(199, b'1'); input()"
    told, tell = os.pipe()
    env = {**os.environ, "RANK": "3", guardians.REPORTS_VARIABLE: f"{os.getpid()} {tell} token"}
    command = guardians.guarded([sys.executable, "-c", rank], parent=os.getpid(), started=199)
    with subprocess.Popen(command, stdin=subprocess.PIPE, env=env) as process, open(told, "rb", buffering=0) as reports:

        def report() -> str:
            assert select.select([reports], [], [], TIMEOUT_S)[0], "no report was printed in time"
            return " ".join(reports.readline().decode().split()[:2])

        assert [report(), report()] == ["3 guarded", "3 joined"]
        assert process.poll() is None
        process.communicate(b"\n", timeout=TIMEOUT_S)
        assert report() == "3 ended"
    os.close(tell)


@pytest.mark.parametrize("victim", ["outer", "inner"])
def test_either_guardian_may_be_killed(tmp_path: Path, victim: str) -> None:
    with guarded(tmp_path, WAITS) as process:
        inner = int(fields(rank_of(tmp_path))[1])
        assert int(fields(inner)[1]) == process.pid
        os.kill(process.pid if victim == "outer" else inner, signal.SIGKILL)
        assert process.wait(TIMEOUT_S) == -signal.SIGKILL
        assert victim == "outer" or living(tmp_path) == []
        wait_until(lambda: not living(tmp_path), "the other one has ended all")


def test_a_rank_ends_with_what_has_started_its_guardians(tmp_path: Path) -> None:
    command = guardians.guarded([sys.executable, "-c", WAITS, str(tmp_path)])
    launcher = f"import subprocess; subprocess.run({command!r})"
    with subprocess.Popen([sys.executable, "-c", launcher]) as process:
        rank_of(tmp_path)
        process.kill()
    wait_until(lambda: not living(tmp_path), "nothing is left of a killed launcher's rank")


def test_a_launchers_signals_are_passed_on_and_end_all_processes(tmp_path: Path) -> None:
    with guarded(tmp_path, WAITS, parent=os.getpid()) as process:
        rank_of(tmp_path)
        process.send_signal(signal.SIGUSR1)
        assert process.stdout is not None and process.stdout.readline() == "heard\n"
        process.send_signal(guardians.end_signal())
        assert process.wait(TIMEOUT_S) == -signal.SIGKILL
        assert living(tmp_path) == []


def test_a_stopped_guardian_ends_its_rank() -> None:
    """Regression: after SIGSTOP to a guardian, the first process that ps shows, Ctrl-C did not end asyncdist run."""
    ended = threading.Event()
    command = [sys.executable, "-S", "-c", "import time; time.sleep(600)"]
    process = local_ranks.start(command, dict(os.environ), rank=0, ended=ended.set)
    process.send_signal(signal.SIGSTOP)
    process.end()
    assert ended.wait(TIMEOUT_S)


def test_signals_of_mpirun_reach_the_rank_once_by_its_group(tmp_path: Path) -> None:
    with guarded(tmp_path, WAITS) as process:
        assert int(fields(rank_of(tmp_path))[2]) == process.pid
        process.send_signal(signal.SIGUSR1)  # its parent is mpirun, which would pass the signal on a second time
        os.killpg(process.pid, signal.SIGUSR1)
        assert process.stdout is not None and process.stdout.readline() == "heard\n"
        os.killpg(process.pid, signal.SIGTERM)
        output, _ = process.communicate(timeout=TIMEOUT_S)
    assert (process.returncode, output) == (-signal.SIGTERM, "")


@pytest.mark.parametrize("guardian", ["outer", "inner"])
def test_a_foreign_signal_to_a_guardian_reaches_the_rank(tmp_path: Path, guardian: str) -> None:
    """Regression: SIGTERM to the outer guardian under mpirun, the first process that ps shows, had no effect."""
    with guarded(tmp_path, WAITS) as process:
        inner = int(fields(rank_of(tmp_path))[1])
        told = str(process.pid if guardian == "outer" else inner)
        subprocess.run(["kill", "-USR1", told], check=True)
        assert process.stdout is not None and process.stdout.readline() == "heard\n"
        subprocess.run(["kill", "-TERM", told], check=True)
        assert process.wait(TIMEOUT_S) == -signal.SIGTERM
        assert living(tmp_path) == []


def test_a_rank_has_the_signals_and_the_files_that_it_was_given(tmp_path: Path) -> None:
    source = """
import os, signal
blocked = [each.name for each in signal.pthread_sigmask(signal.SIG_BLOCK, ())]
print(blocked, signal.getsignal(signal.SIGCHLD) is signal.SIG_DFL)
print(sorted(map(int, os.listdir("/proc/self/fd")))[:3], signal.getsignal(signal.SIGHUP) is signal.SIG_IGN)
"""
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN), signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    try:
        with guarded(tmp_path, source) as process:
            output, _ = process.communicate(timeout=TIMEOUT_S)
    finally:
        signal.signal(signal.SIGHUP, before[0])
        signal.signal(signal.SIGCHLD, before[1])
    assert output.splitlines() == ["['SIGUSR1'] True", "[0, 1, 2] True"]


@pytest.fixture(params=["there are pidfds", "Python has no pidfds", "the kernel has no pidfds"])
def pidfds(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(pid: int) -> int:
        raise OSError(errno.ENOSYS, f"no pidfd of {pid}")

    if request.param == "Python has no pidfds":
        monkeypatch.delattr(os, "pidfd_open")
    elif request.param == "the kernel has no pidfds":
        monkeypatch.setattr(os, "pidfd_open", refuse)


@pytest.mark.usefixtures("pidfds")
def test_descendants_are_killed_with_and_without_pidfds() -> None:
    """Regression: without pidfds, as on Linux 4.18, a job on MPI and launch_subprocesses ended with OSError."""
    with subprocess.Popen(["/bin/sh", "-c", "sleep 60 & echo; wait"], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.readline()
        handles = [guardians.ProcessHandle(process.pid), *guardians.open_descendants(process.pid)]
        assert len(handles) == 2
        guardians.kill_all(handles)
        assert process.wait() == -signal.SIGKILL
    with pytest.raises(ProcessLookupError):
        guardians.ProcessHandle(process.pid)


@pytest.mark.usefixtures("pidfds")
def test_a_handle_of_an_ended_process_sends_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    with subprocess.Popen(["/bin/sh", "-c", "read line"], stdin=subprocess.PIPE) as process:
        handle = guardians.ProcessHandle(process.pid)
        assert process.stdin is not None
        process.stdin.close()
        process.wait()
        handle.wait(30.0)
    monkeypatch.setattr(guardians, "_start_of", lambda _: b"later")  # another process has the pid
    monkeypatch.setattr(os, "kill", lambda *_: pytest.fail("another process would get the signal"))
    handle.send(signal.SIGTERM)
    handle.close()
