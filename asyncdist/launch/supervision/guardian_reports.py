"""Receives reports from the guardians of ranks on this host, for a launcher on another host.

The guardians write to a FIFO, which this process reads. Reports in a rank's output could be lost, because mpirun no
longer reads its ranks' output when it stops them.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import threading
from collections.abc import Callable
from typing import Final

from asyncdist.launch import guardians

#: Line that makes the reading thread end.
_OVER: Final = b"over\n"


class GuardianReports:
    """Reads one job's reports on this host in a thread, which calls ``tell``, and sends signals to the guardians."""

    def __init__(self, token: str, tell: Callable[[str], object]) -> None:
        self._tell = tell
        self._pidfds: dict[int, int] = {}
        self._path = guardians.reports_path(token)
        self._reader: threading.Thread | None = None
        with contextlib.suppress(OSError):  # without a FIFO, guardians write reports to their ranks' output
            os.mkdir(os.path.dirname(self._path), mode=0o700)
            os.mkfifo(self._path, mode=0o600)
            # Opened also for writing, so that the reader does not see an end of file.
            self._fifo = os.open(self._path, os.O_RDWR | os.O_CLOEXEC)
            self._reader = threading.Thread(target=self._read, name="reports", daemon=True)
            self._reader.start()

    def send_signal(self, rank: int, number: int) -> None:
        """Send a signal to the guardian of a rank on this host, if the guardian is alive."""
        with contextlib.suppress(KeyError, ProcessLookupError):
            signal.pidfd_send_signal(self._pidfds[rank], number)

    def close(self) -> None:
        """Deliver the reports that have been written so far, and remove the FIFO."""
        if self._reader is not None:
            os.write(self._fifo, _OVER)
            self._reader.join()
            os.close(self._fifo)
        shutil.rmtree(os.path.dirname(self._path), ignore_errors=True)

    def _read(self) -> None:
        with open(self._fifo, "rb", closefd=False) as lines:
            for line in iter(lines.readline, _OVER):
                rank, what, number = line.decode().split()
                if what == "guarded":
                    with contextlib.suppress(ProcessLookupError):  # the guardian has just ended
                        self._pidfds[int(rank)] = os.pidfd_open(int(number))
                elif what == "ended" and int(rank) in self._pidfds:
                    os.close(self._pidfds.pop(int(rank)))
                self._tell(line.decode().rstrip("\n"))
