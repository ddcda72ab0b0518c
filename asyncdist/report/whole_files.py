"""Writes files atomically. A file that is incomplete, for example because the disk is full, is removed."""

from __future__ import annotations

import contextlib
import errno
import os
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from asyncdist.trust import new_files

#: Maximum number of symbolic links that are followed, equal to the kernel's limit.
_LINK_COUNT_MAX: Final = 40
#: Mode of a folder such as ``/tmp``, in which all users may create files, but remove only their own.
_SHARED_MODE: Final = stat.S_ISVTX | stat.S_IWOTH


@contextlib.contextmanager
def whole_file(path: Path) -> Iterator[Path]:
    """Yield the path of a new file, which replaces ``path`` when the context ends.

    If the block raises an exception, the new file is removed and ``path`` stays unchanged. For a device or pipe, such
    as ``/dev/stdout``, or in a folder without write permission, ``path`` itself is yielded.
    """
    target = _target(path)
    if (path.exists() and not path.is_file()) or not os.access(target.parent, os.W_OK):
        yield path
        return
    with new_files.entered(target.parent) as folder, new_files.moved_into(folder, target.parent) as inner:
        yield inner / target.name


@contextlib.contextmanager
def whole_folder(folder: Path) -> Iterator[Path]:
    """Yield a temporary folder inside ``folder``, whose files are moved to ``folder`` when the context ends.

    If the block raises an exception, the temporary folder is removed, and ``folder`` too if it did not exist before.
    """
    if folder.is_symlink():
        _target(folder)
    was_there = folder.exists()
    folder.mkdir(parents=True, exist_ok=True)
    try:
        with new_files.entered(folder) as opened, new_files.moved_into(opened, folder) as inner:
            yield inner
    except BaseException:
        if not was_there:
            with contextlib.suppress(OSError):
                folder.rmdir()
        raise


def _target(path: Path) -> Path:
    """Return ``path`` with its links resolved. Raise PermissionError if another user has created a link or a pipe."""
    for _ in range(_LINK_COUNT_MAX):
        with contextlib.suppress(FileNotFoundError, NotADirectoryError):  # the folder or the file does not exist
            if is_planted(path.lstat(), path.parent.stat(), os.getuid()):
                raise PermissionError(
                    errno.EACCES, "another user created this file in a folder that all users share", str(path)
                )
        if not path.is_symlink():
            return path
        path = path.parent / path.readlink()
    raise OSError(errno.ELOOP, os.strerror(errno.ELOOP), str(path))


def is_planted(found: os.stat_result, folder: os.stat_result, user: int) -> bool:
    """Return whether a file in a shared folder is another user's link, pipe or device, which may be an attack.

    Linux itself refuses such links if ``fs.protected_symlinks`` is set. ``found`` is the status of the file itself,
    even if the file is a link.
    """
    is_shared = folder.st_mode & _SHARED_MODE == _SHARED_MODE
    return is_shared and not stat.S_ISREG(found.st_mode) and found.st_uid not in (user, folder.st_uid)
