"""Writes files that are there as a whole or not at all: what a full disk has cut short is taken away."""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
import shutil
import stat
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Final

#: As many links as the kernel follows.
_LINK_COUNT_MAX: Final = 40
#: The mode of a folder in which each user may make files, and none may remove those of others, such as ``/tmp``.
_SHARED_MODE: Final = stat.S_ISVTX | stat.S_IWOTH


@contextlib.contextmanager
def whole_file(path: Path) -> Iterator[Path]:
    """Give the path to write to: a file beside ``path`` that takes its place when the block has ended.

    Where the block fails there is no such file, and what was at ``path`` before stays. What is no file, as
    ``/dev/stdout``, and a file in a folder that takes no other are written to directly.

    Raises:
        OSError: the file cannot take that place.
    """
    target = _target(path)
    if (path.exists() and not path.is_file()) or not os.access(target.parent, os.W_OK):
        yield path
        return
    beside = target.with_name(f"{target.name}.{secrets.token_hex(8)}.part")
    try:
        os.close(os.open(beside, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666))
        yield beside
        beside.replace(target)
    except BaseException as error:
        with contextlib.suppress(OSError):
            beside.unlink()
        if isinstance(error, OSError) and error.filename == str(beside):
            error.filename = str(path)
        raise


@contextlib.contextmanager
def whole_folder(folder: Path) -> Iterator[Path]:
    """Give a folder inside ``folder``, which is made, whose files are moved up when the block has ended.

    Where the block fails nothing is left of it, nor of ``folder`` where that was not there before.

    Raises:
        OSError: the folder cannot be made, or a file not moved.
    """
    if folder.is_symlink():
        _target(folder)
    was_there = folder.exists()
    folder.mkdir(parents=True, exist_ok=True)
    try:
        inner = Path(tempfile.mkdtemp(prefix=".part-", dir=folder))
        try:
            yield inner
            for file in inner.iterdir():
                file.replace(folder / file.name)
        finally:
            shutil.rmtree(inner, ignore_errors=True)
    except BaseException:
        if not was_there:
            with contextlib.suppress(OSError):
                folder.rmdir()
        raise


def _target(path: Path) -> Path:
    """Return the path to which links lead from ``path``; itself if it is not a link.

    Raises:
        PermissionError: Another user has put a link or the like there, to have a file of this user overwritten.
        OSError: The links lead in a circle.
    """
    for _ in range(_LINK_COUNT_MAX):
        with contextlib.suppress(FileNotFoundError, NotADirectoryError):  # the folder is missing, or nothing is there
            if is_planted(path.lstat(), path.parent.stat(), os.getuid()):
                raise PermissionError(errno.EACCES, "another user has put it into a folder of all users", str(path))
        if not path.is_symlink():
            return path
        path = path.parent / path.readlink()
    raise OSError(errno.ELOOP, os.strerror(errno.ELOOP), str(path))


def is_planted(found: os.stat_result, folder: os.stat_result, user: int) -> bool:
    """Return whether a link, pipe or the like in a folder of all users may be there to mislead this user.

    Linux decides likewise which links it follows, if ``fs.protected_symlinks`` is set.

    Args:
        found: What is there, links not followed.
        folder: The folder.
        user: The number of this user.
    """
    is_shared = folder.st_mode & _SHARED_MODE == _SHARED_MODE
    return is_shared and not stat.S_ISREG(found.st_mode) and found.st_uid not in (user, folder.st_uid)
