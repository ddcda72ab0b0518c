"""Runs a rank so that its child processes end with the rank, and the rank ends with its launcher. Linux only.

    python guardians.py PARENT STARTED COMMAND ARGUMENTS...

Each rank of ``asyncdist run`` has two guardians above it, small processes that only wait:

    launcher (or mpirun) -> outer guardian -> inner guardian -> rank -> the rank's child processes

- A guardian is a *subreaper* (prctl(2), PR_SET_CHILD_SUBREAPER): every orphan below it becomes its child, even in a
  separate session. When the rank has ended, its remaining child processes get SIGTERM, and SIGKILL after ``GRACE_S``.
  Then the guardian ends with the rank's exit code or signal.
- When a guardian's parent has ended, the guardian immediately kills the rank, and then the rank's child processes.
- Both guardians do all of this. The inner guardian has its own process group, because mpirun may kill the outer
  guardian's group. Processes survive only if both guardians are killed at the same moment.
- A guardian passes signals on to the rank. The rank is in the outer guardian's process group, so signals from mpirun or
  a terminal reach it directly. PARENT is the launcher's pid if the launcher signals only the outer guardian, and 0
  under mpirun.
- SIGUSR1 is blocked in the rank until :mod:`asyncdist.rank_program` has set a handler for it.
- In jobs that continue when ranks die, a rank writes to the file descriptor STARTED (0 in other jobs) when it joins or
  leaves its world. If the rank fails before it has joined, or aborts the job, mpirun does not react, and the other
  ranks would wait forever. The outer guardian therefore asks mpirun to end the job, once per host. If the rank exits
  while it is in the world, the outer guardian kills itself with SIGKILL, because mpirun reports only such an end to the
  other ranks.
- Under ``asyncdist run`` on MPI, the outer guardian reports three events to the launcher: it has started guarding the
  rank, the rank has joined the world, and the rank has ended. The last report arrives before mpirun's own. On other
  hosts, the launcher's agent forwards the reports (:mod:`asyncdist.launch.hosts.host_agent`).

The program reads environment variables itself and imports few modules, so that it delays the start of a rank by only
20 ms.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import select
import signal
import sys
import time

TYPE_CHECKING = False  # importing typing would take 5 ms
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Final, NoReturn

#: Path of this file, which is run as a program.
PROGRAM: Final = os.path.abspath(__file__)
#: Whether this system supports guardians, which need Linux's subreapers and parent-death signals.
ARE_SUPPORTED: Final = sys.platform.startswith("linux")
#: Shell command that starts a guardian which ignores SIGUSR1 at first, because mpirun may pass that signal on at once.
_IGNORING_SIGUSR1: Final = ("/bin/sh", "-c", "trap '' USR1; exec \"$@\"", "sh")
#: Environment variable with the launcher's process group, which rank 0 joins in order to read from the terminal.
GROUP_VARIABLE: Final = "ASYNCDIST_TERMINAL_GROUP"
#: Environment variable with the launcher's pid, its file descriptor for reports, and the token that marks reports in
#: standard error.
REPORTS_VARIABLE: Final = "ASYNCDIST_REPORTS"
#: Prefix of the folder with the FIFO through which a job's guardians on this host report.
REPORTS_FOLDER: Final = "/tmp/asyncdist-reports-"
#: Number of characters of the job's token in the name of the FIFO's folder.
_NAME_LENGTH: Final = 16
_RANK_VARIABLES: Final = ("RANK", "OMPI_COMM_WORLD_RANK", "PMI_RANK", "PMIX_RANK")
#: Maximum seconds to wait for the launcher to read the report of a rank's end.
_READ_S: Final = 1.0
#: Maximum seconds for a rank's remaining child processes to end after SIGTERM.
GRACE_S: Final = 0.5
#: Maximum seconds for killed processes to end. Only the kernel can delay this.
_GONE_S: Final = 5.0
_PERIOD_S: Final = 0.01
# States that a rank reports, with the same values as in :mod:`asyncdist.rank_program`.
_OPENS_WORLD: Final = b"0"
_IN_WORLD: Final = b"1"
_ENDS_JOB: Final = b"3"
# Options of prctl(2).
_PR_SET_PDEATHSIG: Final = 1
_PR_SET_DUMPABLE: Final = 4
_PR_SET_CHILD_SUBREAPER: Final = 36
#: Option of waitpid(2) that includes children that clone(2) has created without SIGCHLD.
_WALL: Final = 0x40000000


def guarded(command: list[str], *, parent: int = 0, started: int = 0) -> list[str]:
    """Return the command line that runs ``command`` under two guardians, so that its processes end with the launcher.

    On systems other than Linux, return ``command``.
    """
    # In isolated mode (-I) and without site-packages (-S), Python starts in 10 ms.
    guardian = [sys.executable, "-I", "-S", PROGRAM, str(parent), str(started), *command]
    return ([] if parent else [*_IGNORING_SIGUSR1]) + guardian if ARE_SUPPORTED else command


def end_signal() -> int:
    """Return the signal on which a guardian process kills its rank and the rank's child processes, and then ends."""
    return int(signal.SIGRTMIN)


def foreground_variables() -> dict[str, str]:
    """Return the environment variables that let rank 0 read from this process's terminal."""
    return {GROUP_VARIABLE: str(os.getpgrp())} if os.isatty(0) else {}


def report_mark(token: str) -> bytes:
    """Return the mark that distinguishes guardian processes' reports from the output lines of ranks."""
    return f"\x1easyncdist {token} ".encode()


def reports_path(token: str) -> str:
    """Return the path of this host's FIFO for reports. It contains the host's name, because containers may share /tmp.

    The path contains only the token's first part. The other parts name other folders, and another user who knew these
    names could create them first.
    """
    return f"{REPORTS_FOLDER}{reports_name(token)}/fifo"


def reports_name(token: str) -> str:
    """Return the name, after ``REPORTS_FOLDER``, of the folder of this host's FIFO."""
    return f"{token[:_NAME_LENGTH]}-{os.uname().nodename}"


def die_with_parent(parent: int) -> None:
    """Make the kernel kill this process when the process ``parent`` ends. Works only on Linux."""
    if ARE_SUPPORTED:
        _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:
            os._exit(1)


def adopt_orphans() -> None:
    """Make this process the parent of every orphan among its descendants. Works only on Linux."""
    if ARE_SUPPORTED:
        _prctl(_PR_SET_CHILD_SUBREAPER, 1)


def end_children() -> None:
    """End all descendants of this process, including orphans that it adopts in the meantime. Works only on Linux.

    A child that belongs to another user, such as a command run by sudo, cannot be ended and is not waited for.
    """
    terminated: set[int] = set()
    foreign: set[int] = set()
    deadline = time.monotonic() + GRACE_S
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # torch's handler would raise an error for a killed data worker
    while ARE_SUPPORTED and (late_s := time.monotonic() - deadline) < _GONE_S:
        try:
            while os.waitpid(-1, os.WNOHANG | _WALL)[0]:
                pass
        except ChildProcessError:  # a process without children has no descendants that could become its children
            return
        children = {pid for pid, parent in _parents().items() if parent == os.getpid()} - foreign
        if not children:
            return
        for pid in children:
            if late_s >= 0 or pid not in terminated:
                terminated.add(pid)
                try:
                    # The pid cannot have been reused, because only this process reaps its children.
                    os.kill(pid, signal.SIGKILL if late_s >= 0 else signal.SIGTERM)
                except PermissionError:
                    foreign.add(pid)
        time.sleep(_PERIOD_S)


class ProcessHandle:
    """Refers to one process, so that no signal reaches a later process with the same pid. Linux only.

    The kernel guarantees this for a pidfd. Without pidfds, the process's start time is compared before each signal.
    Pidfds are missing on Linux before 5.3, in some containers, and in Pythons built for older systems.

    Raises:
        ProcessLookupError: The process has ended.
    """

    def __init__(self, pid: int) -> None:
        self._pid = pid
        self._pidfd: int | None = None
        self._start = _start_of(pid)
        if not self._start:
            raise ProcessLookupError(f"process {pid} has ended")
        if hasattr(os, "pidfd_open") and hasattr(signal, "pidfd_send_signal"):
            try:
                self._pidfd = os.pidfd_open(pid)
            except ProcessLookupError:
                raise
            except OSError:  # the kernel has no pidfds, or the container forbids them
                pass

    def send(self, number: int) -> bool:
        """Send a signal to the process. Return False if it has ended, or belongs to another user (as under sudo)."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            if self._pidfd is not None:
                signal.pidfd_send_signal(self._pidfd, number)
                return True
            if _start_of(self._pid) == self._start:
                os.kill(self._pid, number)
                return True
        return False

    def wait(self, timeout_s: float) -> None:
        """Wait until the process has ended, or until the timeout has passed."""
        if self._pidfd is not None:
            poller = select.poll()  # select() refuses descriptors from 1024 on
            poller.register(self._pidfd, select.POLLIN)
            poller.poll(timeout_s * 1000)
            return
        deadline = time.monotonic() + timeout_s
        while _start_of(self._pid) == self._start and time.monotonic() < deadline:
            time.sleep(_PERIOD_S)

    def close(self) -> None:
        """Close the pidfd, if there is one."""
        if self._pidfd is not None:
            os.close(self._pidfd)


def open_descendants(pid: int) -> list[ProcessHandle]:
    """Return a handle for each descendant of the process ``pid``, or [] on systems other than Linux."""
    parents = _parents() if ARE_SUPPORTED else {}
    found, handles = {pid}, []
    while below := {child for child, parent in parents.items() if parent in found} - found:
        found |= below
        for child in below:
            with contextlib.suppress(ProcessLookupError):
                handles.append(ProcessHandle(child))
    return handles


def kill_all(handles: list[ProcessHandle]) -> None:
    """Kill the processes that belong to this user, wait until they have ended, and close all handles."""
    for handle in [handle for handle in handles if handle.send(signal.SIGKILL)]:
        handle.wait(_GONE_S)
    for handle in handles:
        handle.close()


def main(parent: int, started: int, command: list[str]) -> NoReturn:
    """Run ``command`` as a rank under two guardians: this process, and one between this process and the rank."""
    states = _RankStates(started) if started else None
    reports = _Reports()
    group = os.getpgrp()
    terminal_group = os.environ.pop(GROUP_VARIABLE, "")
    is_at_terminal = terminal_group.isdecimal() and reports.rank == "0"
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
    if parent == 0:
        signal.signal(signal.SIGUSR1, signal.SIG_DFL)  # the shell has made this process ignore the signal
    signals_group = parent == 0 and not is_at_terminal
    outer = _fork_guardian(parent or os.getppid(), signals_group=signals_group, states=states, reports=reports)
    os.setpgid(0, 0)
    inner = _fork_guardian(outer, signals_group=False)
    reports.close()
    with contextlib.suppress(OSError):  # raised if the outer guardian was killed; the inner one kills this process
        os.setpgid(0, int(terminal_group) if is_at_terminal else group)
    die_with_parent(inner)
    signal.pthread_sigmask(signal.SIG_SETMASK, {signal.SIGUSR1})
    os.execv(command[0], command)


class _Reports:
    """Sends reports about a rank to the launcher's pipe, to the FIFO of the launcher's agent, or to standard error."""

    def __init__(self) -> None:
        self.rank = next((os.environ[name] for name in _RANK_VARIABLES if os.environ.get(name)), "")
        pid, descriptor, self._token = (os.environ.pop(REPORTS_VARIABLE, "") or "- - ").split(" ")
        self._pipe = _open_fifo(reports_path(self._token)) if pid.isdecimal() else None
        if pid.isdecimal() and self._pipe is None and int(pid) in _ancestors():
            with contextlib.suppress(OSError):  # raised if the launcher has just ended
                self._pipe = os.open(f"/proc/{pid}/fd/{descriptor}", os.O_WRONLY | os.O_CLOEXEC)

    def write(self, what: str, number: int) -> None:
        """Write one report. If the rank has failed, wait briefly for the launcher to read the report."""
        report = f"{self.rank} {what} {number}\n".encode()
        with contextlib.suppress(OSError):  # raised if no process reads the pipe
            if self._pipe is not None:
                os.write(self._pipe, report)
                if what == "ended" and number:
                    _await_reader(self._pipe)
            elif self._token and what == "ended":
                os.write(2, report_mark(self._token) + report)

    def close(self) -> None:
        if self._pipe is not None:
            os.close(self._pipe)


def _open_fifo(path: str) -> int | None:
    """Open a FIFO for writing, or return None if no process reads it."""
    try:
        return os.open(path, os.O_WRONLY | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError:
        return None


def _await_reader(pipe: int) -> None:
    """Wait, for at most ``_READ_S`` seconds, until the content of the pipe has been read."""
    import array  # imported only here to save time, because few guardians need it: only those of failed ranks
    import fcntl
    import termios

    deadline = time.monotonic() + _READ_S
    unread = array.array("i", [1])
    while unread[0] and time.monotonic() < deadline:
        fcntl.ioctl(pipe, termios.FIONREAD, unread)
        time.sleep(0.001)


def _ancestors() -> list[int]:
    found = [os.getppid()]
    with contextlib.suppress(OSError, ValueError):
        while found[-1] > 1:
            found.append(_parent_of(found[-1]))
    return found


def _parent_of(pid: int) -> int:
    return int(_facts_of(pid)[1])


def _start_of(pid: int) -> bytes:
    """Return the start time of a process in kernel ticks, or b"" if the process has ended."""
    try:
        facts = _facts_of(pid)
    except OSError:
        return b""
    return b"" if facts[0] in b"ZX" else facts[19]


def _facts_of(pid: int) -> list[bytes]:
    """Return the fields of /proc/PID/stat (proc(5)), starting with the third, the state. May raise OSError."""
    with open(f"/proc/{pid}/stat", "rb") as file:
        return file.read().rpartition(b")")[2].split()  # the name before the last ")" may contain ")"


class _RankStates:
    """Reads the states that a rank writes to the file descriptor ``started``. SIGIO announces new states."""

    def __init__(self, started: int) -> None:
        import fcntl  # imported only here to save time, because only jobs that survive losses need it

        self._pipe, write = os.pipe()
        os.dup2(write, started)
        os.close(write)
        os.set_blocking(self._pipe, False)
        fcntl.fcntl(self._pipe, fcntl.F_SETOWN, os.getpid())
        fcntl.fcntl(self._pipe, fcntl.F_SETFL, fcntl.fcntl(self._pipe, fcntl.F_GETFL) | os.O_ASYNC)
        self._last = b""

    def last(self) -> bytes:
        """Return the last state that the rank has reported, or b"" before the first report."""
        with contextlib.suppress(BlockingIOError):  # raised if the rank has reported no new state
            self._last = os.read(self._pipe, 1024)[-1:] or self._last
        return self._last


def _fork_guardian(
    parent: int, *, signals_group: bool, states: _RankStates | None = None, reports: _Reports | None = None
) -> int:
    """Fork. The parent becomes a guardian and never returns. In the child, return the guardian's pid.

    Args:
        parent: Process whose end makes the guardian kill the rank.
        signals_group: Whether ``parent`` sends signals to the whole process group of the guardian and the rank.
    """
    own = os.getpid()
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)
    _prctl(_PR_SET_PDEATHSIG, signal.SIGCHLD)  # wakes the guardian when its parent ends
    child = os.fork()
    if child != 0:
        _guard(child, parent, signals_group=signals_group, states=states, reports=reports)
    return own


def _guard(
    child: int, parent: int, *, signals_group: bool, states: _RankStates | None, reports: _Reports | None
) -> NoReturn:
    def on_state() -> None:
        if states is not None and reports is not None and states.last() not in (b"", _OPENS_WORLD):
            reports.write("joined", child)

    if reports is not None:
        reports.write("guarded", os.getpid())
    status = _wait(child, parent, on_state, signals_group=signals_group)
    if status is None:
        os.kill(child, signal.SIGKILL)
        _, status = os.waitpid(child, 0)
    elif reports is not None:  # a guardian that kills its rank does not report the rank's end
        reports.write("ended", os.waitstatus_to_exitcode(status))
    end_children()
    code = os.waitstatus_to_exitcode(status)
    if code and states is not None and os.getppid() == parent:
        code = _handle_failure(code, parent, states)
    _end_as(code)


def _handle_failure(code: int, parent: int, states: _RankStates) -> int:
    """Handle the failure of a rank for which the other ranks would wait. Return the guardian's exit code.

    If the rank has not joined the world, or aborts the job, mpirun is asked to end the job. If the rank exits while it
    is in the world, the returned code makes mpirun notice the rank's death.
    """
    state = states.last()
    if state in (b"", _OPENS_WORLD):
        how = f"exit code {code}" if code > 0 else f"signal {-code}"
        os.write(2, f"asyncdist: a rank ended before it had joined the other ranks ({how}); ending the job\n".encode())
    if state in (b"", _OPENS_WORLD, _ENDS_JOB):
        if _is_first_to_ask():
            os.kill(parent, signal.SIGTERM)
    elif state == _IN_WORLD and code > 0:
        os.write(2, f"asyncdist: a rank ended with exit code {code} without leaving its world\n".encode())
        return -signal.SIGKILL
    return code


def _is_first_to_ask() -> bool:
    """Return whether this guardian is the first to ask mpirun to end. A second request would end mpirun too early."""
    folder = os.environ.get("PMIX_SERVER_TMPDIR", "")  # mpirun creates and removes this folder
    try:
        os.close(os.open(os.path.join(folder, "asyncdist-ends"), os.O_CREAT | os.O_EXCL | os.O_CLOEXEC))
    except FileExistsError:
        return False
    except OSError:  # the folder does not exist, so guardians cannot coordinate
        return True
    return True


def _wait(child: int, parent: int, on_state: Callable[[], None], *, signals_group: bool) -> int | None:
    """Wait for the child to end, and return its wait status. Return None if the guardian must kill the child."""
    while os.getppid() == parent:
        received = signal.sigwaitinfo(signal.valid_signals())
        if received.si_signo == end_signal():
            return None
        if received.si_signo == signal.SIGCHLD:
            ended = dict(iter(_reap, None))
            if child in ended:
                return ended[child]
        elif received.si_signo == signal.SIGIO and received.si_code > 0:  # the kernel sends codes above 0
            on_state()
        elif not (signals_group and (received.si_pid == parent or received.si_code > 0)):  # sent only to this process
            os.kill(child, received.si_signo)
    return None


def _reap() -> tuple[int, int] | None:
    """Return the pid and wait status of a child that has ended, or None if no child has."""
    try:
        pid, status = os.waitpid(-1, os.WNOHANG)
    except ChildProcessError:
        return None
    return (pid, status) if pid else None


def _parents() -> dict[int, int]:
    """Map each process's pid to its parent's pid. With hidepid=1 (proc(5)), other users' processes are missing."""
    found = {}
    for entry in filter(str.isdecimal, os.listdir("/proc")):
        with contextlib.suppress(OSError):
            found[int(entry)] = _parent_of(int(entry))
    return found


def _end_as(code: int) -> NoReturn:
    """End this process with exit code ``code``, or by signal ``-code`` if ``code`` is negative."""
    if code < 0:
        _prctl(_PR_SET_DUMPABLE, 0)  # avoids a second core file in addition to the rank's
        if -code != signal.SIGKILL:
            signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
        signal.pthread_sigmask(signal.SIG_SETMASK, ())
    os._exit(code if code >= 0 else 128 - code)


def _prctl(option: int, value: int) -> None:
    ctypes.CDLL(None).prctl(option, int(value))


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3:])
