"""Runs a program as a child and records how it ended: ``watched.py FOLDER COUNT PROGRAM ARGUMENTS...``.

mpirun sees this process; the rank is its child, in a separate process group, so that it gets each signal once, from
this process. FOLDER/pid.CHILD appears when the child starts, and FOLDER/status.CHILD with its exit code (negative: the
signal) when it has ended. The child dies with this process.

When one rank has ended with an error, mpirun kills the others, even if they are about to end. If COUNT is not 0, mpirun
sees a child's end only when COUNT children have ended.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import sys
import time
from pathlib import Path
from types import FrameType

PR_SET_PDEATHSIG = 1
#: Seconds that the other children may take to end.
LINGER_S = 30.0


def main() -> None:
    folder, count, program = Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3:]
    child = os.fork()
    if child == 0:
        os.setpgid(0, 0)
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        os.execv(sys.executable, [sys.executable, *program])

    def forward(number: int, _frame: FrameType | None) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(child, number)

    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, forward)
    (folder / f"pid.{child}").touch()
    _, status = os.waitpid(child, 0)
    code = os.waitstatus_to_exitcode(status)
    partial = folder / f"partial.{child}"
    partial.write_text(str(code))
    partial.rename(folder / f"status.{child}")
    deadline = time.monotonic() + LINGER_S
    while len([*folder.glob("status.*")]) < count and time.monotonic() < deadline:
        time.sleep(0.005)
    if code < 0:
        signal.signal(-code, signal.SIG_DFL) if -code not in (signal.SIGKILL, signal.SIGSTOP) else None
        os.kill(os.getpid(), -code)
    os._exit(code)


main()
