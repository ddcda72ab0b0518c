"""Tests the reports that a rank's guardian process sends to the launcher."""

from __future__ import annotations

import fcntl
import os
import resource
import select
import signal
import threading
from collections.abc import Iterator

import pytest

from asyncdist.launch import guardians

pytestmark = pytest.mark.skipif(not guardians.ARE_SUPPORTED, reason="there are no guardians")


@pytest.mark.parametrize(("code", "waits"), [(-9, True), (1, True), (0, False)])
def test_a_failure_is_reported_until_it_has_been_read(code: int, waits: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise mpirun stops the other ranks first, and their lines precede the cause."""
    monkeypatch.setattr(guardians, "_READ_S", 60.0)
    monkeypatch.setenv("RANK", "3")
    monkeypatch.delenv(guardians.REPORTS_VARIABLE, raising=False)
    read, write = os.pipe()
    reports = guardians._Reports()
    reports._pipe = write
    writer = threading.Thread(target=reports.write, args=("ended", code), daemon=True)
    writer.start()
    assert select.select([read], [], [], 30.0)[0]
    writer.join(0.1 if waits else 30.0)
    assert writer.is_alive() == waits
    assert os.read(read, 100) == f"3 ended {code}\n".encode()
    writer.join(30.0)
    assert not writer.is_alive()
    reports.close()
    os.close(read)


def test_a_report_that_is_not_read_holds_no_guardian(monkeypatch: pytest.MonkeyPatch) -> None:
    """A stopped launcher reads nothing."""
    monkeypatch.setattr(guardians, "_READ_S", 0.05)
    read, write = os.pipe()
    os.write(write, b"unread\n")
    guardians._await_reader(write)
    os.close(write)
    os.close(read)


def test_processes_that_a_user_may_not_see_are_passed_over(monkeypatch: pytest.MonkeyPatch) -> None:
    """Regression: each job on a host whose /proc has hidepid=1 ended with a traceback and exit code 1."""
    parent_of = guardians._parent_of

    def hide_the_first(pid: int) -> int:
        if pid == 1:
            raise PermissionError(1, "Operation not permitted", "/proc/1/stat")
        return parent_of(pid)

    monkeypatch.setattr(guardians, "_parent_of", hide_the_first)
    parents = guardians._parents()
    assert parents[os.getpid()] == os.getppid() and 1 not in parents


@pytest.fixture
def _sigchld() -> Iterator[None]:
    before = signal.getsignal(signal.SIGCHLD)
    yield
    signal.signal(signal.SIGCHLD, before)


@pytest.mark.usefixtures("_sigchld")
def test_a_child_of_another_user_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Regression: a command of sudo that a successful rank had left ended the job with PermissionError and code 1."""
    sent = []

    def kill(pid: int, number: int) -> None:
        sent.append((pid, number))
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(os, "kill", kill)
    monkeypatch.setattr(os, "waitpid", lambda *_: (0, 0))
    monkeypatch.setattr(guardians, "_parents", lambda: {7: os.getpid()})
    monkeypatch.setattr(guardians, "GRACE_S", 60.0)
    guardians.end_children()
    assert sent == [(7, signal.SIGTERM)]


@pytest.mark.usefixtures("_sigchld")
def test_proc_is_not_read_for_a_process_without_children(monkeypatch: pytest.MonkeyPatch) -> None:
    """Reading /proc takes long on a host with many processes."""

    def waitpid(*_: int) -> tuple[int, int]:
        raise ChildProcessError

    monkeypatch.setattr(os, "waitpid", waitpid)
    monkeypatch.setattr(guardians, "_parents", lambda: pytest.fail("it has read /proc"))
    guardians.end_children()


@pytest.mark.parametrize("has_pidfd", [True, False])
def test_processes_of_other_users_are_not_waited_for(monkeypatch: pytest.MonkeyPatch, *, has_pidfd: bool) -> None:
    """Regression: PermissionError when ``launch_subprocesses`` stopped a rank that had started a command of sudo."""

    def refuse(*_: int) -> None:
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(os, "kill", refuse)
    if has_pidfd and hasattr(signal, "pidfd_send_signal"):
        monkeypatch.setattr(signal, "pidfd_send_signal", refuse)
    else:
        monkeypatch.delattr(os, "pidfd_open", raising=False)
    handle = guardians.ProcessHandle(os.getppid())
    monkeypatch.setattr(handle, "wait", lambda _: pytest.fail("it waits for a process that has got no signal"))
    guardians.kill_all([handle])


@pytest.mark.skipif(not hasattr(os, "pidfd_open"), reason="there are no pidfds")
def test_end_is_awaited_among_many_open_files() -> None:
    """Regression: select() refuses descriptors from 1024 on, and its ValueError hid the cause of a failed launch."""
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    if limits[1] < 2048:
        pytest.skip("this process may not open enough files")
    handle = guardians.ProcessHandle(os.getpid())
    assert handle._pidfd is not None
    low = handle._pidfd
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(limits[0], 2048), limits[1]))
    try:
        handle._pidfd = fcntl.fcntl(low, fcntl.F_DUPFD_CLOEXEC, 1500)
        handle.wait(0.0)
        handle.close()
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
        os.close(low)
