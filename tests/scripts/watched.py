"""Run a program as a child and write down how it ended: ``watched.py FOLDER COUNT PROGRAM ARGUMENTS...``.

What mpirun sees is this process; the rank is its child, in a process group of its own, so that it gets each signal
once and from here. FOLDER/pid.CHILD appears when it starts, FOLDER/status.CHILD with its exit code (negative: by that
signal) when it has ended. It dies with this process.

Once one rank has ended with an error, mpirun kills the others, however near to their own end they are. Where COUNT is
not 0, a child's own end shows to mpirun only when so many have ended.
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
#: How long the others may take that are to end by themselves.
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
