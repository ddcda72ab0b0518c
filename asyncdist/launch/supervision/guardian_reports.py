"""Receives reports from the guardians (supervising processes) of this host's ranks, for a launcher on another host.

The guardians write to a FIFO, which this process reads. Reports in a rank's output could be lost, because mpirun stops
reading output when it stops the ranks.
"""

from __future__ import annotations

import contextlib
import errno
import glob
import os
import shutil
import threading
import time
from collections.abc import Callable
from typing import Final

from asyncdist.launch import guardians
from asyncdist.trust import private_folders

#: Line that makes the reading thread end.
_OVER: Final = b"over\n"
#: Age in seconds from which a folder whose FIFO no process reads is removed. Newer FIFOs may not have been opened yet.
_LEFT_S: Final = 60.0


class GuardianReports:
    """Calls ``forward`` in a thread with each report of a job's guardians on this host, and sends them signals."""

    def __init__(self, token: str, forward: Callable[[str], object]) -> None:
        self._forward = forward
        self._guardians: dict[int, guardians.ProcessHandle] = {}
        self._path = guardians.reports_path(token)
        self._reader: threading.Thread | None = None
        _remove_left()
        with contextlib.suppress(OSError):  # without a FIFO, guardians write to their ranks' output
            os.mkdir(os.path.dirname(self._path), mode=0o700)
            os.mkfifo(self._path, mode=0o600)
            # O_RDWR keeps a writer open, so that the reader never sees an end of file.
            self._fifo = os.open(self._path, os.O_RDWR | os.O_CLOEXEC)
            self._reader = threading.Thread(target=self._read, name="reports", daemon=True)
            self._reader.start()

    def send_signal(self, rank: int, number: int) -> None:
        """Send a signal to the guardian process of a rank on this host, if the guardian is alive."""
        with contextlib.suppress(KeyError):
            self._guardians[rank].send(number)

    def close(self) -> None:
        """Process the reports that have already been written, and remove the FIFO."""
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
                    with contextlib.suppress(ProcessLookupError):  # raised if the guardian has just ended
                        self._guardians[int(rank)] = guardians.ProcessHandle(int(number))
                elif what == "ended" and int(rank) in self._guardians:
                    self._guardians.pop(int(rank)).close()
                self._forward(line.decode().rstrip("\n"))


def _remove_left() -> None:
    """Remove the report folders of this user's jobs whose host agents were killed."""
    for path in glob.glob(f"{guardians.REPORTS_FOLDER}*"):
        # An OSError means that the folder belongs to another user, or that its agent has just removed it.
        with contextlib.suppress(OSError), private_folders.opened(path) as folder:
            is_old = time.time() - os.fstat(folder).st_mtime > _LEFT_S
            if is_old and not _is_read(folder):
                shutil.rmtree(path, ignore_errors=True)


def _is_read(folder: int) -> bool:
    """Return whether a process has opened the FIFO in this folder for reading."""
    try:
        os.close(os.open("fifo", os.O_WRONLY | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=folder))
    except OSError as error:
        return error.errno not in (errno.ENXIO, errno.ENOENT)
    return True
