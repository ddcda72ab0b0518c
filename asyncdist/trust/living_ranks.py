"""Detects whether another process of this user on this host is running as the same rank of the same job.

While its world is open, a rank holds a kernel lock (fcntl(2), F_SETLK) on a file in its user's private folder. The lock
ends with the rank's process, and forked children do not inherit it. The file of a killed rank remains until a later
rank of this user locks and removes it.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import struct
import sys
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Final

from asyncdist.trust import private_folders

#: The kernel's struct flock on 64-bit Linux: type, whence, start, length, pid.
_FLOCK: Final = struct.Struct("hhqqi4x")
_PREFIX: Final = "rank-"
#: File whose content identifies a host. All containers on the host see the same content.
_BOOT: Final = Path("/proc/sys/kernel/random/boot_id")
#: Age in seconds at which an unlocked file of another rank is removed.
_STALE_S: Final = 3600.0


class LivingRank:
    """Registers this process as a rank of a job on this host.

    Args:
        job: Name of the job, unique on this host.
        bases: Base folders for :func:`private_folders.candidates`.
    """

    def __init__(self, job: str, rank: int, bases: Iterable[str]) -> None:
        place = ""
        with contextlib.suppress(OSError):  # jobs on other hosts or in other network namespaces may have the same name
            place = f"{_BOOT.read_text()} {os.readlink('/proc/self/ns/net')}"
        digest = hashlib.sha256(f"{place} {job}".encode("utf-8", "surrogateescape")).hexdigest()[:16]
        self._name = f"{_PREFIX}{digest}.{rank}"
        self._bases = tuple(bases)
        self._descriptor: int | None = None

    def other(self) -> int | None:
        """Return the pid of another process that is running as this rank, 0 if it is in another container, or None."""
        if not sys.platform.startswith("linux") or self._descriptor is not None:
            return None
        for folder in private_folders.candidates(self._bases):
            with contextlib.suppress(OSError), private_folders.opened(folder) as parent:
                descriptor = os.open(self._name, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=parent)
                try:
                    asked = fcntl.fcntl(descriptor, fcntl.F_GETLK, _FLOCK.pack(fcntl.F_WRLCK, os.SEEK_SET, 0, 0, 0))
                finally:
                    os.close(descriptor)
                kind, _, _, _, pid = _FLOCK.unpack(asked)
                return None if kind == fcntl.F_UNLCK else pid
        return None

    def begin(self) -> None:
        """Register this process. Do nothing if no folder is writable."""
        for folder in private_folders.candidates(self._bases) if self._descriptor is None else ():
            with contextlib.suppress(OSError), private_folders.opened(folder, makes=True) as parent:
                self._remove_stale(parent)
                self._descriptor, self._folder = _locked(self._name, parent, os.O_CREAT), folder
                return

    def _remove_stale(self, parent: int) -> None:
        for name in os.listdir(parent):
            # This rank's own file is skipped, because closing any of its descriptors would release the lock.
            if not name.startswith(_PREFIX) or name == self._name:
                continue
            with contextlib.suppress(OSError):
                if time.time() - os.stat(name, dir_fd=parent, follow_symlinks=False).st_mtime < _STALE_S:
                    continue
                descriptor = _locked(name, parent)
                if descriptor is not None:
                    os.unlink(name, dir_fd=parent)
                    os.close(descriptor)

    def end(self) -> None:
        """Unregister this process."""
        if self._descriptor is None:
            return
        with contextlib.suppress(OSError), private_folders.opened(self._folder) as parent:
            os.unlink(self._name, dir_fd=parent)
        os.close(self._descriptor)
        self._descriptor = None
        with contextlib.suppress(OSError):
            self._folder.rmdir()


def _locked(name: str, parent: int, flags: int = 0) -> int | None:
    """Open and lock a file, and return its descriptor, or None if another process has locked or removed it."""
    descriptor = os.open(name, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC | flags, 0o600, dir_fd=parent)
    try:
        fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        there = os.stat(name, dir_fd=parent, follow_symlinks=False)
        if os.path.samestat(there, os.fstat(descriptor)):
            return descriptor
    except OSError:
        pass
    os.close(descriptor)
    return None
