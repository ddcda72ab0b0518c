"""Makes private folders for temporary files, and removes the folders of killed processes.

A process locks its folder (flock(2)) until it removes the folder. If the process is killed, its files would occupy
memory. The next process of this user that makes such a folder therefore removes unlocked folders.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from asyncdist.trust import private_folders

#: Age in seconds from which an unlocked folder is removed. The maker of a newer folder may be about to lock it.
_LEFT_S: Final = 60.0


@dataclass(frozen=True, slots=True)
class TemporaryFolder:
    """A locked folder of mode 0700.

    Attributes:
        path: Path of the folder.
        lock: Descriptor that locks the folder, or None if its file system does not support locks.
    """

    path: str
    lock: int | None = None

    @staticmethod
    def make(base: str, prefix: str, name: str) -> TemporaryFolder:
        """Make the folder ``prefix + name`` in ``base``, and remove folders with this prefix of killed processes.

        Raise OSError if the folder cannot be made or is not private.
        """
        _remove_left(base, prefix)
        path = os.path.join(base, prefix + name)
        with private_folders.opened(path, makes=True) as folder:
            with contextlib.suppress(OSError):  # a network drive may not support locks
                # A process that looks for left folders may have locked it for a moment. Two hosts may share the folder.
                fcntl.flock(folder, fcntl.LOCK_SH)
                return TemporaryFolder(path, os.dup(folder))
            return TemporaryFolder(path)

    def remove(self) -> None:
        """Remove the folder and all files in it."""
        shutil.rmtree(self.path, ignore_errors=True)
        if self.lock is not None:
            os.close(self.lock)


def _remove_left(base: str, prefix: str) -> None:
    """Remove the folders of this user whose maker was killed."""
    for path in Path(base).glob(f"{prefix}*"):
        # An OSError means that the folder belongs to another user, or that its maker is running and has locked it.
        with contextlib.suppress(OSError), private_folders.opened(path) as folder:
            fcntl.flock(folder, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if time.time() - os.fstat(folder).st_mtime > _LEFT_S:
                shutil.rmtree(path, ignore_errors=True)
