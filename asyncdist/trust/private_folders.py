"""Opens folders that belong to this user alone, where other users may have made one of that name first.

In a shared folder such as ``/tmp`` any user can make a folder or a symbolic link under a name that can be predicted.
So a folder is opened first, without following links, and its owner and mode are read from the descriptor. All that
happens inside goes through the descriptor: the path may lead elsewhere by then.
"""

from __future__ import annotations

import contextlib
import errno
import os
import pwd
import stat
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Final

from asyncdist.validation import printable

#: A link, a file, or a folder that this user may not enter.
_NOT_OURS: Final = (errno.ELOOP, errno.ENOTDIR, errno.EACCES)
#: How many names below a base are tried, where other users have made the first ones.
_COUNT: Final = 8


def candidates(bases: Iterable[str]) -> list[Path]:
    """Return the folders that this user's processes on this host may have, the best one first.

    The first name below each base is the usual one. The others, with a number, are for a base in which another user has
    made a folder of that name: all processes of this user find the next one without asking each other.

    Args:
        bases: Folders of this user, or of all.
    """
    names = [f"asyncdist-{os.getuid()}", *(f"asyncdist-{os.getuid()}-{n}" for n in range(2, _COUNT + 1))]
    return [Path(base, name) for base in dict.fromkeys(bases) for name in names]


class NotPrivateError(PermissionError):
    """A folder belongs to another user, or other users may enter it. The message names the folder and the reason."""


@contextlib.contextmanager
def opened(path: str | Path, *, parent: int | None = None, makes: bool = False) -> Iterator[int]:
    """Open a folder of this user alone; the context value is its descriptor.

    Args:
        path: The folder; relative to ``parent`` where that is given.
        parent: Descriptor of the folder that contains it.
        makes: Whether to make the folder if there is nothing of that name.

    Raises:
        NotPrivateError: Something of that name is there, and other users may have put anything into it.
        OSError: The folder is missing, or cannot be made.
    """
    if makes:
        with contextlib.suppress(FileExistsError):
            os.mkdir(path, mode=0o700, dir_fd=parent)
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
    finally:
        os.close(descriptor)


def _refusal(path: str | Path, found: os.stat_result) -> NotPrivateError:
    if found.st_uid != os.getuid():
        why = f"belongs to {_user(found.st_uid)}"
    elif stat.S_ISDIR(found.st_mode):
        mode = stat.S_IMODE(found.st_mode)
        who = "other users may enter it" if mode & 0o077 else "its owner may not enter it"
        why = f"has mode {mode:04o}, with which {who}; allowed: 0700"
    else:
        why = "is not a folder"
    return NotPrivateError(f"{printable(str(path))} {why}")


def _user(uid: int) -> str:
    try:
        return f"user {pwd.getpwuid(uid).pw_name}"
    except KeyError:
        return f"the user with number {uid}"
