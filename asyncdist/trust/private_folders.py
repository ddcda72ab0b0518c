"""Opens folders that only this user may enter, even if they are in shared folders such as ``/tmp``.

In a shared folder, any user can create a folder or a symbolic link with a predictable name. A folder is therefore
opened without following links, and then checked and used through its descriptor.

A process locks a folder for temporary files (flock(2)) until it removes the folder. If the process is killed, its files
would occupy memory. The next process of this user that makes such a folder therefore removes unlocked folders.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import pwd
import shutil
import stat
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from asyncdist.validation import printable

#: Error numbers for opening a link, a file, or a folder without permission.
_NOT_OURS: Final = (errno.ELOOP, errno.ENOTDIR, errno.EACCES)
#: Error numbers for writing to a full disk, or beyond the user's quota.
_NO_ROOM: Final = (errno.ENOSPC, errno.EDQUOT)
#: Number of folder names to try in each base folder, because other users may have taken some.
_COUNT: Final = 8
#: Age in seconds at which an unlocked folder is removed. A newer folder may be about to be locked by its maker.
_LEFT_S: Final = 60.0


def candidates(bases: Iterable[str]) -> list[Path]:
    """Return the possible private folders of this user below ``bases``, in order of preference.

    A process uses the first of these folders that no other user has taken, so all processes of this user choose the
    same folder.
    """
    names = [f"asyncdist-{os.getuid()}", *(f"asyncdist-{os.getuid()}-{n}" for n in range(2, _COUNT + 1))]
    return [Path(base, name) for base in dict.fromkeys(bases) for name in names]


class NotPrivateError(PermissionError):
    """Raised if a path is not a folder, belongs to another user or is open to other users."""


@contextlib.contextmanager
def opened(path: str | Path, *, parent: int | None = None, makes: bool = False) -> Iterator[int]:
    """Open a private folder for the body of ``with``, and yield its descriptor.

    Args:
        path: Path of the folder, relative to ``parent`` if given.
        parent: Descriptor of a folder.
        makes: Whether to create the folder if it does not exist. If there is no space for the body's files, the new
            folder is removed.

    Raises:
        NotPrivateError: The path exists, but is not a folder private to this user.
    """
    is_new = False
    if makes:
        with contextlib.suppress(FileExistsError):
            os.mkdir(path, mode=0o700, dir_fd=parent)
            is_new = True
    flags = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
    try:
        descriptor = os.open(path, flags, dir_fd=parent)
    except OSError as error:
        if error.errno not in _NOT_OURS:
            raise
        raise _refusal(path, os.stat(path, dir_fd=parent, follow_symlinks=False)) from error
    try:
        found = os.fstat(descriptor)
        if found.st_uid != os.getuid() or stat.S_IMODE(found.st_mode) & 0o077:
            raise _refusal(path, found)
        yield descriptor
    except OSError as error:
        if is_new and error.errno in _NO_ROOM:
            with contextlib.suppress(OSError):  # raised if another process has put a file into the folder
                os.rmdir(path, dir_fd=parent)
        raise
    finally:
        os.close(descriptor)


def _refusal(path: str | Path, found: os.stat_result) -> NotPrivateError:
    if found.st_uid != os.getuid():
        why = f"belongs to {_user(found.st_uid)}"
    elif stat.S_ISDIR(found.st_mode):
        mode = stat.S_IMODE(found.st_mode)
        who = "other users may enter it" if mode & 0o077 else "its owner may not enter it"
        why = f"must have mode 0700, got {mode:04o}: {who}"
    else:
        why = "must be a folder"
    return NotPrivateError(f"{printable(str(path))} {why}")


def _user(uid: int) -> str:
    try:
        return f"user {pwd.getpwuid(uid).pw_name}"
    except KeyError:
        return f"the user with number {uid}"


@dataclass(frozen=True, slots=True)
class TemporaryFolder:
    """Refers to a locked folder of mode 0700.

    Attributes:
        path: Path of the folder.
        lock: Descriptor that locks the folder, or None if its file system does not support locks.
    """

    path: str
    lock: int | None = None

    @staticmethod
    def make(base: str, prefix: str, name: str) -> TemporaryFolder:
        """Make the folder ``prefix + name`` in ``base``. Remove the folders of killed processes with this prefix.

        Raise OSError if the folder cannot be made or is not private.
        """
        _remove_left(base, prefix)
        path = os.path.join(base, prefix + name)
        with opened(path, makes=True) as folder:
            with contextlib.suppress(OSError):  # a network drive may not support locks
                # A process that is looking for leftover folders may have locked it for a moment. Two hosts may share
                # the folder.
                fcntl.flock(folder, fcntl.LOCK_SH)
                return TemporaryFolder(path, os.dup(folder))
            return TemporaryFolder(path)

    def remove(self) -> None:
        """Remove the folder and all files in it."""
        shutil.rmtree(self.path, ignore_errors=True)
        if self.lock is not None:
            os.close(self.lock)


def _remove_left(base: str, prefix: str) -> None:
    """Remove this user's folders whose makers were killed."""
    for path in Path(base).glob(f"{prefix}*"):
        # OSError means that the folder belongs to another user, or that its maker is still running and has locked it.
        with contextlib.suppress(OSError), opened(path) as folder:
            fcntl.flock(folder, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if time.time() - os.fstat(folder).st_mtime > _LEFT_S:
                shutil.rmtree(path, ignore_errors=True)
