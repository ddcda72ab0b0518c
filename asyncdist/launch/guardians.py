"""Runs a rank so that nothing it starts outlives it, and it does not outlive its launcher. Linux only.

    python guardians.py PARENT STARTED COMMAND ARGUMENTS...

A rank of ``asyncdist run`` has two guardians above it, small processes that do nothing but wait:

    launcher (or mpirun) -> outer guardian -> inner guardian -> rank -> what the rank starts

- A guardian is a *subreaper* (prctl(2), PR_SET_CHILD_SUBREAPER): every orphan below it becomes its child, also one in a
  session of its own. When the rank has ended, in any way, the processes that it has left get SIGTERM, and SIGKILL after
  ``GRACE_S``. Only then does the guardian end, as the rank did.
- When the process above a guardian has ended, the guardian kills the rank at once and does the same.
- Each of the two does all of this, so that either may be killed. mpirun kills the process group of the one that it
  knows; the inner one is in a group of its own. Only a kill of both at once leaves processes behind.
- A signal to a guardian is passed on to the rank. The rank is in the group of the outer one, since mpirun sends all
  signals to that group: signals from mpirun, or from a terminal, reach the rank without the outer guardian. PARENT is
  the launcher's pid where it sends signals to the outer guardian alone, and 0 under mpirun.
- SIGUSR1 is blocked when the rank begins, and waits there until :mod:`asyncdist.rank_program` has a handler for it.
  A guardian that is about to begin ignores it. mpirun lets all signals through to what it starts, with their default
  actions, so a shell, which begins in a millisecond or two, sees to that before Python begins.
- Where a job is to go on when ranks die, a rank says on the descriptor STARTED (0 in other jobs) when it has joined the
  world, and when it has left it in a way that the others know of. mpirun does nothing about a rank that fails earlier,
  and the others would wait for it for ever: the outer guardian asks mpirun to end the job, as it does for a rank that
  aborts it, once for all ranks of the host. Nor does it tell the others
  of one that ends in between with an exit code: the outer guardian ends by SIGKILL then, of which they hear.
- Under ``asyncdist run`` the outer guardian of a rank on MPI reports to the launcher when it guards that rank, when the
  rank says on STARTED that it has joined the world, and how the rank has ended, before mpirun notices: mpirun's own
  words name the rank that ended first, and not the cause. On another host an agent of the launcher passes the reports
  on (:mod:`asyncdist.launch.supervision.guardian_reports`).
- Rank 0 joins the launcher's process group (``GROUP_VARIABLE``), if that has a terminal, so that rank 0 may read it.

It reads from the environment on its own which rank it guards, where the launcher is and where mpirun keeps the files of
its job, since it is a program of its own.
Only the standard library is imported, as in :mod:`asyncdist.environment`, and little of it: the guardians delay the
start of a rank by 20 ms.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import select
import signal
import sys
import time
from typing import TYPE_CHECKING, Final, NoReturn

if TYPE_CHECKING:
    from collections.abc import Callable

#: This file, to be run as a program.
PROGRAM: Final = os.path.abspath(__file__)
#: Whether guardians exist: other systems have no subreapers, and tell no process of its parent's end.
ARE_HERE: Final = sys.platform.startswith("linux")
#: What a guardian begins with under mpirun, which may pass SIGUSR1 on to it at once.
_IGNORING_SIGUSR1: Final = ("/bin/sh", "-c", "trap '' USR1; exec \"$@\"", "sh")
#: Names the process group that has the launcher's terminal in its foreground: rank 0 joins it.
GROUP_VARIABLE: Final = "ASYNCDIST_TERMINAL_GROUP"
#: Has the launcher's pid, the number of its descriptor for reports, and the token that marks
#: a report on standard error.
REPORTS_VARIABLE: Final = "ASYNCDIST_REPORTS"
_RANK_VARIABLES: Final = ("RANK", "OMPI_COMM_WORLD_RANK", "PMI_RANK", "PMIX_RANK")
#: How long a guardian waits for the launcher to read how its rank has ended.
_READ_S: Final = 1.0
#: How long processes that a rank has left may take to end by themselves.
GRACE_S: Final = 0.5
#: How long processes that were killed may take to be gone; only the kernel can hold them.
_GONE_S: Final = 5.0
_PERIOD_S: Final = 0.01
#: As in :mod:`asyncdist.rank_program`.
_OPENS_WORLD: Final = b"0"
_IN_WORLD: Final = b"1"
_ENDS_JOB: Final = b"3"
# prctl(2)
_PR_SET_PDEATHSIG: Final = 1
_PR_SET_DUMPABLE: Final = 4
_PR_SET_CHILD_SUBREAPER: Final = 36


def guarded(command: list[str], *, parent: int = 0, started: int = 0) -> list[str]:
    """Return the command line that runs ``command`` under guardians; ``command`` itself where there are none.

    Args:
        command: an absolute path and arguments.
        parent, started: see the module's text.
    """
    # Isolated and without site-packages it starts in 10 ms.
    guardian = [sys.executable, "-I", "-S", PROGRAM, str(parent), str(started), *command]
    return ([] if parent else [*_IGNORING_SIGUSR1]) + guardian if ARE_HERE else command


def end_signal() -> int:
    """Return the signal at which a guardian kills the rank and all that it has started, and ends."""
    return int(signal.SIGRTMIN)


def foreground_variables() -> dict[str, str]:
    """Return the variables that put rank 0 into the foreground of this process's terminal, from which it may read."""
    return {GROUP_VARIABLE: str(os.getpgrp())} if os.isatty(0) else {}


def report_mark(token: str) -> bytes:
    """Return the bytes with which a report begins where it travels among the lines of ranks."""
    return f"\x1easyncdist {token} ".encode()


def reports_path(token: str) -> str:
    """Return the FIFO for reports on a host that the launcher is not on; it is there if an agent reads it.

    Containers may share /tmp, so the name has that of the host.
    """
    return f"/tmp/asyncdist-reports-{token}-{os.uname().nodename}/fifo"


def die_with_parent(parent: int) -> None:
    """Have the kernel kill this process when the process ``parent`` ends; do nothing on systems other than Linux."""
    if ARE_HERE:
        _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:  # it has ended before the kernel was told
            os._exit(1)


def adopt_orphans() -> None:
    """Become the parent of every orphan below this process, so that all of it is below for good."""
    if ARE_HERE:
        _prctl(_PR_SET_CHILD_SUBREAPER, 1)


def end_children() -> None:
    """End the children of this process, also those that become its own as their parents end, and return.

    For a process that adopts orphans, and does nothing else any more. Does nothing on systems other than Linux.
    """
    told: set[int] = set()
    deadline = time.monotonic() + GRACE_S
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # torch's handler raises an error for a worker that is killed
    while ARE_HERE and (late_s := time.monotonic() - deadline) < _GONE_S:
        while _reap() is not None:
            pass
        children = [pid for pid, parent in _parents().items() if parent == os.getpid()]
        if not children:
            return
        for pid in children:
            if late_s >= 0 or pid not in told:
                told.add(pid)
                os.kill(pid, signal.SIGKILL if late_s >= 0 else signal.SIGTERM)  # it exists: only this process reaps it
        time.sleep(_PERIOD_S)


def open_descendants(pid: int) -> list[int]:
    """Return a pidfd of each process below ``pid``; none on systems other than Linux."""
    parents = _parents() if ARE_HERE else {}
    found, pidfds = {pid}, []
    while below := {child for child, parent in parents.items() if parent in found} - found:
        found |= below
        for child in below:
            with contextlib.suppress(ProcessLookupError):
                pidfds.append(os.pidfd_open(child))
    return pidfds


def kill_all(pidfds: list[int]) -> None:
    """Kill these processes, return when they have ended, and close the pidfds."""
    for pidfd in pidfds:
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(pidfd, signal.SIGKILL)
    for pidfd in pidfds:
        select.select([pidfd], [], [], _GONE_S)
        os.close(pidfd)


def main(parent: int, started: int, command: list[str]) -> NoReturn:
    """Become the outer guardian of ``command``; see the module's text."""
    heard = _Heard(started) if started else None
    reports = _Reports()
    group = os.getpgrp()
    terminal_group = os.environ.pop(GROUP_VARIABLE, "")
    is_at_terminal = terminal_group.isdecimal() and reports.rank == "0"
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
    if parent == 0:
        signal.signal(signal.SIGUSR1, signal.SIG_DFL)  # it was ignored until here
    signals_group = parent == 0 and not is_at_terminal
    outer = _stand_guard(parent or os.getppid(), signals_group=signals_group, heard=heard, reports=reports)
    os.setpgid(0, 0)
    inner = _stand_guard(outer, signals_group=False)
    reports.close()
    with contextlib.suppress(OSError):  # the outer one has been killed, and so will this process be
        os.setpgid(0, int(terminal_group) if is_at_terminal else group)
    die_with_parent(inner)
    signal.pthread_sigmask(signal.SIG_SETMASK, {signal.SIGUSR1})
    os.execv(command[0], command)


class _Reports:
    """Reports to the launcher: in its pipe if it runs on this host, else in the FIFO of its agent here.

    Where neither exists, a marked line on standard error says how the rank has ended. mpirun reads nothing more of its
    ranks once it stops them, so such a line may be lost.

    Attributes:
        rank: The rank's number, as the launcher's variables say it.
    """

    def __init__(self) -> None:
        self.rank = next((os.environ[name] for name in _RANK_VARIABLES if os.environ.get(name)), "")
        pid, descriptor, self._token = (os.environ.pop(REPORTS_VARIABLE, "") or "- - ").split(" ")
        self._pipe = _open_fifo(reports_path(self._token)) if pid.isdecimal() else None
        if pid.isdecimal() and self._pipe is None and int(pid) in _ancestors():
            with contextlib.suppress(OSError):  # it has just ended
                self._pipe = os.open(f"/proc/{pid}/fd/{descriptor}", os.O_WRONLY | os.O_CLOEXEC)

    def write(self, what: str, number: int) -> None:
        """Write one report; of the end of a rank that has failed, wait a moment until the launcher has read it."""
        report = f"{self.rank} {what} {number}\n".encode()
        with contextlib.suppress(OSError):  # nobody reads there any longer
            if self._pipe is not None:
                os.write(self._pipe, report)
                if what == "ended" and number:
                    _await_reader(self._pipe)
            elif self._token and what == "ended":
                os.write(2, report_mark(self._token) + report)

    def close(self) -> None:
        """Close the pipe in a process that reports nothing."""
        if self._pipe is not None:
            os.close(self._pipe)


def _open_fifo(path: str) -> int | None:
    """Open a FIFO of this user that a process reads, for writing; None if there is none."""
    try:
        return os.open(path, os.O_WRONLY | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError:
        return None


def _await_reader(pipe: int) -> None:
    """Wait until what is in the pipe has been read; a while at most."""
    import array  # takes time, which only a failure should cost
    import fcntl
    import termios

    deadline = time.monotonic() + _READ_S
    unread = array.array("i", [1])
    while unread[0] and time.monotonic() < deadline:
        fcntl.ioctl(pipe, termios.FIONREAD, unread)
        time.sleep(0.001)


def _ancestors() -> list[int]:
    """Return the process that has started this one, the one that has started that, and so on."""
    found = [os.getppid()]
    with contextlib.suppress(OSError, ValueError):
        while found[-1] > 1:
            found.append(_parent_of(found[-1]))
    return found


def _parent_of(pid: int) -> int:
    with open(f"/proc/{pid}/stat", "rb") as file:
        return int(file.read().rpartition(b")")[2].split()[1])  # a name may hold anything


class _Heard:
    """Reads what a rank writes to ``started``. This process gets SIGIO when there is something to read.

    Args:
        started: The descriptor for the rank.
    """

    def __init__(self, started: int) -> None:
        import fcntl  # takes time, which only a job that survives losses should cost

        self._pipe, write = os.pipe()
        os.dup2(write, started)
        os.close(write)
        os.set_blocking(self._pipe, False)
        fcntl.fcntl(self._pipe, fcntl.F_SETOWN, os.getpid())
        fcntl.fcntl(self._pipe, fcntl.F_SETFL, fcntl.fcntl(self._pipe, fcntl.F_GETFL) | os.O_ASYNC)
        self._last = b""

    def last(self) -> bytes:
        """Return the last word of the rank; b"" if it has said nothing."""
        with contextlib.suppress(BlockingIOError):  # nothing has been written since
            self._last = os.read(self._pipe, 1024)[-1:] or self._last
        return self._last


def _stand_guard(
    parent: int, *, signals_group: bool, heard: _Heard | None = None, reports: _Reports | None = None
) -> int:
    """Fork; this process stays behind as a guardian and never returns. Returns the guardian's pid in the child.

    Args:
        parent: the process that started this one; the guardian acts when it is gone.
        signals_group: whether the parent sends its signals to the group of guardian and rank.
        heard: The rank's words about its world, if the parent is to end the job of one that has not joined it.
        reports: tells the launcher of the rank.
    """
    own = os.getpid()
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)
    _prctl(_PR_SET_PDEATHSIG, signal.SIGCHLD)  # wakes the guardian, which then looks
    child = os.fork()
    if child != 0:
        _guard(child, parent, signals_group=signals_group, heard=heard, reports=reports)
    return own


def _guard(child: int, parent: int, *, signals_group: bool, heard: _Heard | None, reports: _Reports | None) -> NoReturn:
    def on_word() -> None:
        if heard is not None and reports is not None and heard.last() not in (b"", _OPENS_WORLD):
            reports.write("joined", child)

    if reports is not None:
        reports.write("guarded", os.getpid())
    status = _wait(child, parent, on_word, signals_group=signals_group)
    if status is None:
        os.kill(child, signal.SIGKILL)
        _, status = os.waitpid(child, 0)
    elif reports is not None:  # a rank that its guardian ends, since what started it has ended, is not a cause
        reports.write("ended", os.waitstatus_to_exitcode(status))
    end_children()
    code = os.waitstatus_to_exitcode(status)
    if code and heard is not None and os.getppid() == parent:
        code = _tell_of_failure(code, parent, heard)
    _end_as(code)


def _tell_of_failure(code: int, parent: int, heard: _Heard) -> int:
    """See to it that the other ranks do not wait for one that has ended so; return how to end."""
    news = heard.last()
    if news in (b"", _OPENS_WORLD):
        how = f"exit code {code}" if code > 0 else f"signal {-code}"
        os.write(2, f"asyncdist: a rank ended before it had joined the others ({how}); the job ends\n".encode())
    if news in (b"", _OPENS_WORLD, _ENDS_JOB):
        if _is_first_to_ask():
            os.kill(parent, signal.SIGTERM)
    elif news == _IN_WORLD and code > 0:
        os.write(2, f"asyncdist: a rank ended with exit code {code} without leaving its world\n".encode())
        return -signal.SIGKILL
    return code


def _is_first_to_ask() -> bool:
    """Return whether no other guardian has asked mpirun to end the job: at a second signal it ends before its ranks."""
    folder = os.environ.get("PMIX_SERVER_TMPDIR", "")  # mpirun makes it for the job, and removes it
    try:
        os.close(os.open(os.path.join(folder, "asyncdist-ends"), os.O_CREAT | os.O_EXCL | os.O_CLOEXEC))
    except FileExistsError:
        return False
    except OSError:  # nothing is known of the others
        return True
    return True


def _wait(child: int, parent: int, on_word: Callable[[], None], *, signals_group: bool) -> int | None:
    """Return how the child has ended; None if the guardian has to end it.

    Args:
        child, parent, signals_group: See :func:`_stand_guard`.
        on_word: Is called when the rank may have said something.
    """
    while os.getppid() == parent:
        came = signal.sigwaitinfo(signal.valid_signals())
        if came.si_signo == end_signal():
            return None
        if came.si_signo == signal.SIGCHLD:
            ended = dict(iter(_reap, None))
            if child in ended:
                return ended[child]
        elif came.si_signo == signal.SIGIO and came.si_code > 0:  # from the kernel
            on_word()
        elif not (signals_group and (came.si_pid == parent or came.si_code > 0)):  # above 0: from the kernel
            os.kill(child, came.si_signo)
    return None


def _reap() -> tuple[int, int] | None:
    """Return pid and status of a child that has ended; None where none has."""
    try:
        pid, status = os.waitpid(-1, os.WNOHANG)
    except ChildProcessError:
        return None
    return (pid, status) if pid else None


def _parents() -> dict[int, int]:
    """Return the parent of every process that this user may see: hidepid=1 of proc(5) hides those of other users."""
    found = {}
    for entry in filter(str.isdecimal, os.listdir("/proc")):
        with contextlib.suppress(OSError):
            found[int(entry)] = _parent_of(int(entry))
    return found


def _end_as(code: int) -> NoReturn:
    """End with that exit code, or by that signal if it is negative."""
    if code < 0:
        _prctl(_PR_SET_DUMPABLE, 0)  # one core file is enough
        if -code != signal.SIGKILL:
            signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
        signal.pthread_sigmask(signal.SIG_SETMASK, ())
    os._exit(code if code >= 0 else 128 - code)


def _prctl(option: int, value: int) -> None:
    ctypes.CDLL(None).prctl(option, int(value))


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3:])
