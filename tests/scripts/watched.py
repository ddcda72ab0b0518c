"""Run a program as a child and write down how it ended: ``watched.py FOLDER PROGRAM ARGUMENTS...``.

What mpirun sees is this process; the rank is its child, in a process group of its own, so that it gets each signal
once and from here. FOLDER/pid.CHILD appears when it starts, FOLDER/status.CHILD with its exit code (negative: by that
signal) when it has ended. It dies with this process.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import sys
from pathlib import Path
from types import FrameType

PR_SET_PDEATHSIG = 1


def main() -> None:
    folder, program = Path(sys.argv[1]), sys.argv[2:]
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
    if code < 0:
        signal.signal(-code, signal.SIG_DFL) if -code not in (signal.SIGKILL, signal.SIGSTOP) else None
        os.kill(os.getpid(), -code)
    os._exit(code)


main()
