"""Keeps secrets in files that this user alone can read.

Those of asyncdist lie in the folder of this user on this host (:func:`private_folders.candidates`), so all processes
of the user on the host find them, and no other user's.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import secrets
import stat
import threading
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from asyncdist.trust import job_secret, private_folders

#: The secret of jobs of one host whose launcher gives them none.
SHARED: Final = "secret"
_NBYTES_MAX: Final = 4096
#: The second time, an unusable file has been removed.
_ATTEMPT_COUNT: Final = 2
#: The pause between two looks whether a kept secret is still there.
_RENEWAL_S: Final = 5.0


def read(path: str) -> str:
    """Return the secret in a file of the user's.

    Raises:
        ValueError: The file cannot be read, other users can read it, or it has no secret; says what to do.
    """
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)  # a named pipe has no writer
    except OSError as error:
        raise ValueError(f"the secret's file {path!r} cannot be read: {error.strerror}") from error
    return job_secret.check(_read_open(descriptor, path), f"the file {path!r}")


def _read_open(descriptor: int, path: str) -> str:
    try:
        if problem := why_not_secret(os.fstat(descriptor), os.getuid()):
            raise ValueError(
                f"the secret's file {path!r} {problem}; allowed: a file of this user of mode 0600 (chmod 600 {path}), "
                "or one of root of mode 0440, as in Kubernetes with defaultMode: 0440 and an fsGroup"
            )
        return os.read(descriptor, _NBYTES_MAX).decode("utf-8", "surrogateescape")
    finally:
        os.close(descriptor)


def why_not_secret(found: os.stat_result, reader: int) -> str:
    """Return why a file is not known to root and the reader alone; empty if it is.

    A file of root's that a group may read is believed: root has said who is in the group. The files of a Secret of
    Kubernetes are such, and a reader that is not root could not open them otherwise. Root may name a file of any user,
    for example one of the host in a container.

    Args:
        found: Owner and mode of the file.
        reader: The number of the user whose process reads it.
    """
    mode = stat.S_IMODE(found.st_mode)
    if not stat.S_ISREG(found.st_mode):
        return "is not a regular file"
    if found.st_uid not in (reader, 0) and reader != 0:
        return f"belongs to the user with number {found.st_uid}"
    if mode & (0o037 if found.st_uid == 0 else 0o077):
        return f"has mode {mode:04o}, so other users can open it"
    return ""


def name_of(port: int) -> str:
    """Return the name under which the launcher of a job keeps its secret for ranks that join at this port."""
    return f"{SHARED}-{port}"


@dataclass(frozen=True, slots=True)
class KeptSecret:
    """Is a secret of asyncdist that this process keeps for others.

    Attributes:
        path: Its file.
        lock: A descriptor that holds a lock on the file, so that no other process takes it for one that was left.
    """

    path: Path
    lock: int

    def remove(self) -> None:
        """Remove the file."""
        with contextlib.suppress(OSError), private_folders.opened(self.path.parent) as parent:
            os.unlink(self.path.name, dir_fd=parent)
        os.close(self.lock)


def keep(port: int, text: str, bases: Iterable[str]) -> KeptSecret | None:
    """Write the secret of the job whose ranks join at this port, in place of an earlier one; return None if that fails.

    Secrets of other ports whose launchers were killed are removed.

    Args:
        port: The port.
        text: The secret.
        bases: The folders to try.
    """
    for folder in private_folders.candidates(bases):
        with contextlib.suppress(OSError), private_folders.opened(folder, makes=True) as parent:
            _remove_left(parent)
            with _begun(parent, text) as (begun, descriptor):
                with contextlib.suppress(OSError):  # a network drive may have no locks
                    fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                os.rename(begun, name_of(port), src_dir_fd=parent, dst_dir_fd=parent)
                return KeptSecret(folder / name_of(port), os.dup(descriptor))
    return None


class RenewedSecret:
    """Keeps the secret of a job until it is removed, even if the folder of its file is removed before.

    ``/run/user/UID`` goes with the last session of its user on this host, and a cleaner removes old files of ``/tmp``.
    So a thread looks again and again, and writes the file anew if it is missing.

    Args:
        port: The port at which ranks join the job.
        text: The secret.
        bases: Returns the folders to try.
        renewal_s: Seconds between two looks.
    """

    def __init__(
        self, port: int, text: str, bases: Callable[[], Iterable[str]], *, renewal_s: float = _RENEWAL_S
    ) -> None:
        self._port = port
        self._text = text
        self._bases = bases
        self._renewal_s = renewal_s
        self._is_removed = threading.Event()
        self._kept = keep(port, text, bases())
        self._thread = threading.Thread(target=self._renew, name="secret", daemon=True)
        self._thread.start()

    def _renew(self) -> None:
        while not self._is_removed.wait(self._renewal_s):
            bases = tuple(self._bases())
            if find(name_of(self._port), bases) is None:
                if self._kept is not None:
                    self._kept.remove()
                self._kept = keep(self._port, self._text, bases)

    def remove(self) -> None:
        """Remove the file."""
        self._is_removed.set()
        self._thread.join()
        if self._kept is not None:
            self._kept.remove()


def _remove_left(parent: int) -> None:
    """Remove secrets that :func:`keep` has written in processes that were killed: none of these has a lock now."""
    for name in os.listdir(parent):
        port = name.removeprefix(f"{SHARED}-")
        if not port.isdecimal() or name != name_of(int(port)):
            continue
        with contextlib.suppress(OSError):  # another process keeps it, or has just removed it
            descriptor = os.open(name, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK, dir_fd=parent)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                if os.path.samestat(os.fstat(descriptor), os.stat(name, dir_fd=parent, follow_symlinks=False)):
                    os.unlink(name, dir_fd=parent)
            finally:
                os.close(descriptor)


def find(name: str, bases: Iterable[str]) -> str | None:
    """Return the secret of asyncdist with this name; None if there is none."""
    for folder in private_folders.candidates(bases):
        with contextlib.suppress(OSError, ValueError), private_folders.opened(folder) as parent:
            return _read_in(parent, name)
    return None


def _read_in(parent: int, name: str) -> str:
    """Return the secret with this name in a folder of this user. Raises OSError or ValueError if there is none."""
    descriptor = os.open(name, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW, dir_fd=parent)
    return job_secret.check(_read_open(descriptor, name), name)


def shared(bases: Iterable[str]) -> str | None:
    """Return the secret that this user's processes on this host share, which the first one draws.

    None if no folder can hold it.
    """
    bases = tuple(bases)
    for _ in range(_ATTEMPT_COUNT):
        found = find(SHARED, bases)
        if found is None and _share(job_secret.draw(), bases):
            found = find(SHARED, bases)
        if found is not None:
            return found
        _remove_unusable(SHARED, bases)
    return None


def _remove_unusable(name: str, bases: Iterable[str]) -> None:
    """Remove the files of this name that have no secret, as after a loss of power.

    The ranks of a job do so at the same moment: under the lock none removes the file by which another one has replaced
    it.
    """
    for folder in private_folders.candidates(bases):
        with contextlib.suppress(OSError), private_folders.opened(folder) as parent:
            with contextlib.suppress(OSError):  # a network drive may have no locks
                fcntl.flock(parent, fcntl.LOCK_EX)  # until the folder is closed
            try:
                _read_in(parent, name)
            except (ValueError, OSError) as error:
                if isinstance(error, ValueError) or error.errno in (errno.ELOOP, errno.EACCES):
                    os.unlink(name, dir_fd=parent)


def _share(text: str, bases: Iterable[str]) -> bool:
    """Write the secret that all jobs share, unless there is one; return whether a folder could hold it."""
    for folder in private_folders.candidates(bases):
        with contextlib.suppress(OSError), private_folders.opened(folder, makes=True) as parent:
            with _begun(parent, text) as (begun, _), contextlib.suppress(FileExistsError):
                os.link(begun, SHARED, src_dir_fd=parent, dst_dir_fd=parent)
            return True
    return False


@contextlib.contextmanager
def _begun(parent: int, text: str) -> Iterator[tuple[str, int]]:
    """Write a file that gets its own name in the body, so that no process finds a part of it.

    Args:
        parent: The folder.
        text: The content.

    Yields:
        The name of the file until then, and a descriptor of it.
    """
    begun = f"{SHARED}.{secrets.token_hex(8)}"
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW
    descriptor = os.open(begun, flags, 0o600, dir_fd=parent)
    try:
        os.write(descriptor, text.encode())
        os.fsync(descriptor)  # otherwise a loss of power can leave an empty file of that name
        yield begun, descriptor
    finally:  # on a full disk too
        with contextlib.suppress(FileNotFoundError):
            os.unlink(begun, dir_fd=parent)
        os.close(descriptor)
