"""Writes files that replace earlier files, even in a folder that belongs to another user.

The owner of a folder can rename its entries at any time, and can put a symbolic link in place of a file that is being
written. Files are therefore written in a new private folder, through that folder's descriptor, and then moved. This
needs procfs. Without it, as on macOS, the private folder is used through its path.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from asyncdist.trust.private_folders import NotPrivateError

#: Flags for a folder whose entries are created and renamed. With Linux's O_PATH, permission to list the entries is not
#: needed.
_OUTER: Final = getattr(os, "O_PATH", os.O_RDONLY) | os.O_DIRECTORY | os.O_CLOEXEC
_INNER: Final = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_FILE: Final = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC


@contextlib.contextmanager
def entered(path: Path, *, follows: bool = True) -> Iterator[int]:
    """Open a folder for the body of ``with``, and yield its descriptor. If ``follows`` is true, it may be a link."""
    descriptor = os.open(path, _OUTER | (0 if follows else os.O_NOFOLLOW))
    try:
        yield descriptor
    finally:
        os.close(descriptor)


@contextlib.contextmanager
def moved_into(folder: int, path: Path) -> Iterator[Path]:
    """Yield the path of a new private folder, whose files are moved to the folder ``path`` when the context ends.

    A file or link with the same name is replaced. If the body raises, the new files are removed.

    Args:
        folder: Descriptor of the folder ``path``.
        path: Path of the folder, for error messages.

    Raises:
        NotPrivateError: Another user has replaced the new folder.
    """
    name = f".part-{secrets.token_hex(8)}"
    os.mkdir(name, 0o700, dir_fd=folder)
    try:
        inner = _open_inner(folder, path / name)
        try:
            if os.fstat(inner).st_uid != _owner_of_new_files(folder, f"{name}-owner") or os.listdir(inner):
                raise NotPrivateError(f"another user has replaced {path / name}")
            yield from _moved(inner, _path_of(inner, path / name), folder, path)
        finally:
            os.close(inner)
    finally:
        shutil.rmtree(name, ignore_errors=True, dir_fd=folder)


def _open_inner(folder: int, path: Path) -> int:
    try:
        return os.open(path.name, _INNER, dir_fd=folder)
    except OSError as error:
        raise NotPrivateError(f"another user has replaced {path}: {error.strerror}") from error


def _moved(inner: int, inner_path: Path, folder: int, path: Path) -> Iterator[Path]:
    try:
        yield inner_path
        for file in os.listdir(inner):
            os.rename(file, file, src_dir_fd=inner, dst_dir_fd=folder)
    except OSError as error:
        named = Path(os.fsdecode(error.filename)) if isinstance(error.filename, (str, bytes)) else Path()
        if error.filename2 is not None or named.parent == inner_path:
            raise OSError(error.errno, error.strerror, str(path / named.name)) from error
        raise


def _owner_of_new_files(folder: int, name: str) -> int:
    """Return the owner of files that this process creates in a folder. On NFS, this may be another user."""
    descriptor = os.open(name, _FILE, 0o600, dir_fd=folder)
    try:
        return os.fstat(descriptor).st_uid
    finally:
        os.close(descriptor)
        with contextlib.suppress(OSError):
            os.unlink(name, dir_fd=folder)


def _path_of(descriptor: int, path: Path) -> Path:
    """Return a path to an open folder that stays valid if the folder is renamed. Without procfs, return ``path``."""
    own = Path(f"/proc/self/fd/{descriptor}")
    return own if own.exists() else path
