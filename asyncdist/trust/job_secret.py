"""Authenticates the processes of a job to each other with a shared secret.

A process seals each value that it writes for other processes with a keyed digest (HMAC, RFC 2104). It authenticates a
connection with a digest that covers the connection and its two ends. Without a secret, the key is empty, so seals
detect corrupted values but not attackers.

Secrets are stored in files that only this user can read, in the user's private folder or at a path set by the user.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import hmac
import os
import secrets
import stat
import threading
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from asyncdist.trust import private_folders

#: Minimum number of characters in a secret. Shorter secrets could be guessed.
LENGTH_MIN: Final = 16
_DIGEST: Final = "sha256"
SEAL_NBYTES: Final = hashlib.new(_DIGEST).digest_size
#: Name of the secret file for jobs on one host whose launcher sets no secret.
SHARED: Final = "secret"
_NBYTES_MAX: Final = 4096
#: Number of attempts to read or create the shared secret. Between attempts, unusable files are removed.
_ATTEMPT_COUNT: Final = 2
#: Seconds between two checks that a secret file still exists.
_RENEWAL_S: Final = 5.0


@dataclass(frozen=True, slots=True)
class JobSecret:
    """Seals values and authenticates connections with the job's secret.

    Attributes:
        key: The secret, hidden in ``repr``; empty if the job has none.
    """

    key: bytes = field(default=b"", repr=False)

    @property
    def is_missing(self) -> bool:
        """Whether the job has no secret, in which case its processes trust every process that connects to them."""
        return not self.key

    def at_port(self, port: int) -> JobSecret:
        """Derive the secret of the job whose rendezvous store is at port ``port`` of a host.

        A user's jobs may share a secret. The derived key depends on the port, so a value that another user copies to
        the store of a job at another port is not valid there. Jobs that use the same port in turn have equal keys.
        Random numbers in the ranks' greetings distinguish these jobs, so the most that values from an earlier job can
        do is make a start fail.
        """
        return self if self.is_missing else JobSecret(self._digest("port", str(port), b""))

    def seal(self, name: str, value: bytes) -> bytes:
        """Return ``value`` preceded by its seal: a digest of ``name`` and ``value`` with the job's secret."""
        return self._digest("value", name, value) + value

    def unseal(self, name: str, data: bytes) -> bytes | None:
        """Return the value in ``data``, which was sealed for ``name``, or None if the seal is not valid."""
        seal, value = data[:SEAL_NBYTES], data[SEAL_NBYTES:]
        return value if hmac.compare_digest(seal, self._digest("value", name, value)) else None

    def proof(self, connection: str, sender: int, receiver: int) -> bytes:
        """Return the digest by which ``sender`` proves to ``receiver`` that it knows the secret.

        The name ``connection`` must be unique among the connections of all jobs.
        """
        return self._digest("connection", connection, f"{sender} to {receiver}".encode())

    def _digest(self, use: str, name: str, value: bytes) -> bytes:
        head = name.encode("utf-8", "surrogateescape")
        return hmac.digest(self.key, b"%s %d " % (use.encode(), len(head)) + head + value, _DIGEST)


def draw() -> str:
    """Return a new random secret."""
    return secrets.token_hex(32)


def check(text: str, where: str) -> str:
    """Return a secret without surrounding white space. Raise ValueError, which names ``where``, if it is invalid."""
    text = text.strip()
    if not text.isprintable():
        raise ValueError(
            f"{where} must be one line of printable text, for example from: python -c 'import secrets; "
            "print(secrets.token_hex(32))'"
        )
    if len(text) < LENGTH_MIN:
        raise ValueError(
            f"{where} must have at least {LENGTH_MIN} characters, got {len(text)}, for example from: python -c 'import "
            "secrets; print(secrets.token_hex(32))'"
        )
    return text


# -- files -----------------------------------------------------------------------------------------------------------


def read(path: str) -> str:
    """Return the secret in a user's file. Raise ValueError if it is invalid, or if other users can read the file."""
    try:
        # Without O_NONBLOCK, opening a named pipe would block.
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError as error:
        raise ValueError(f"the secret file {path!r} cannot be read: {error.strerror}") from error
    return check(_read_open(descriptor, path), f"the file {path!r}")


def _read_open(descriptor: int, path: str) -> str:
    try:
        if problem := why_not_secret(os.fstat(descriptor), os.getuid()):
            raise ValueError(
                f"the secret file {path!r} {problem}. It must belong to this user and have mode 0600 "
                f"(chmod 600 {path}), or belong to root and have mode 0440 (in Kubernetes, set defaultMode: 0440 and "
                "an fsGroup)"
            )
        return os.read(descriptor, _NBYTES_MAX).decode("utf-8", "surrogateescape")
    finally:
        os.close(descriptor)


def why_not_secret(found: os.stat_result, reader: int) -> str:
    """Return why users other than root and the reader may know a file's content, or "" if they cannot.

    A group-readable file owned by root, such as a Kubernetes Secret, is accepted, because root decides who is in the
    group. If the reader is root, a file owned by any user is accepted.
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
    """Return the name of the secret file of the job whose ranks connect to ``port``."""
    return f"{SHARED}-{port}"


@dataclass(frozen=True, slots=True)
class KeptSecret:
    """Refers to a file that passes a job's secret to other processes. The open descriptor ``lock`` locks the file."""

    path: Path
    lock: int

    def remove(self) -> None:
        """Remove the file, and release its lock."""
        with contextlib.suppress(OSError), private_folders.opened(self.path.parent) as parent:
            os.unlink(self.path.name, dir_fd=parent)
        os.close(self.lock)


def keep(port: int, text: str, bases: Iterable[str]) -> KeptSecret | None:
    """Write a job's secret to a file, replacing any earlier file. Return None if no folder is writable."""
    for folder in private_folders.candidates(bases):
        with contextlib.suppress(OSError), private_folders.opened(folder, makes=True) as parent:
            _remove_left(parent)
            with _begun(parent, text) as (begun, descriptor):
                with contextlib.suppress(OSError):  # a network drive may not support locks
                    fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                os.rename(begun, name_of(port), src_dir_fd=parent, dst_dir_fd=parent)
                return KeptSecret(folder / name_of(port), os.dup(descriptor))
    return None


@contextlib.contextmanager
def kept(port: int, text: str, bases: Callable[[], Iterable[str]], *, renewal_s: float = _RENEWAL_S) -> Iterator[bool]:
    """Write a job's secret to a file, and remove the file when the context ends. Yield whether it could be written.

    ``/run/user/UID`` is removed when the user's last session on this host ends, and cleaners remove old files from
    ``/tmp``. A thread therefore checks regularly that the file exists, and rewrites it if it does not.
    """
    file = keep(port, text, bases())
    is_over = threading.Event()

    def renew() -> None:
        nonlocal file
        while not is_over.wait(renewal_s):
            now = tuple(bases())
            if find(name_of(port), now) is None:
                if file is not None:
                    file.remove()
                file = keep(port, text, now)

    thread = threading.Thread(target=renew, name="secret", daemon=True)
    thread.start()
    try:
        yield file is not None
    finally:
        is_over.set()
        thread.join()
        if file is not None:
            file.remove()


def _remove_left(parent: int) -> None:
    """Remove secret files that are not locked, because the processes that wrote them were killed."""
    for name in os.listdir(parent):
        port = name.removeprefix(f"{SHARED}-")
        if not port.isdecimal() or name != name_of(int(port)):
            continue
        with contextlib.suppress(OSError):  # raised if another process has locked or just removed the file
            descriptor = os.open(name, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK, dir_fd=parent)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                if os.path.samestat(os.fstat(descriptor), os.stat(name, dir_fd=parent, follow_symlinks=False)):
                    os.unlink(name, dir_fd=parent)
            finally:
                os.close(descriptor)


def find(name: str, bases: Iterable[str]) -> str | None:
    """Return the secret in the file ``name`` of this user's private folders, or None if there is none."""
    for folder in private_folders.candidates(bases):
        with contextlib.suppress(OSError, ValueError), private_folders.opened(folder) as parent:
            return _read_in(parent, name)
    return None


def _read_in(parent: int, name: str) -> str:
    """Return the secret in a file of a private folder. Raise OSError or ValueError if there is none."""
    descriptor = os.open(name, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW, dir_fd=parent)
    return check(_read_open(descriptor, name), name)


def shared(bases: Iterable[str]) -> str | None:
    """Return the secret that this user's processes on this host share, or None if no base folder is writable.

    Raises:
        ValueError: A base folder is writable, but the secret cannot be stored in it, for example because other users
            have taken all possible names of this user's private folder. Without a secret, these users could join this
            user's jobs.
    """
    bases = tuple(dict.fromkeys(bases))
    for _ in range(_ATTEMPT_COUNT):
        found = find(SHARED, bases)
        if found is None and _share(draw(), bases):
            found = find(SHARED, bases)
        if found is not None:
            return found
        _remove_unusable(SHARED, bases)
    writable = [base for base in bases if os.path.isdir(base) and os.access(base, os.W_OK | os.X_OK)]
    if writable:
        raise ValueError(
            f"the secret that this user's jobs on this host share cannot be stored: {why_not_stored(writable)}"
        )
    return None


def why_not_stored(bases: Iterable[str]) -> str:
    """Return the reason why no secret can be written to this user's private folders below ``bases``, and the remedy."""
    reasons = dict.fromkeys(map(_why_unusable, private_folders.candidates(bases)))
    return (
        f"{'; '.join(reasons)}. Write a secret to a file that only you can read, and set ASYNCDIST_JOB_SECRET_FILE to "
        "its path"
    )


def _why_unusable(folder: Path) -> str:
    try:
        with private_folders.opened(folder, makes=True) as parent, _begun(parent, draw()):
            return f"{folder} has no valid secret"
    except private_folders.NotPrivateError as error:
        return str(error)
    except OSError as error:
        return f"{folder.parent}: {error.strerror}"


def _remove_unusable(name: str, bases: Iterable[str]) -> None:
    """Remove files with this name that contain no valid secret, for example after a power loss."""
    for folder in private_folders.candidates(bases):
        with contextlib.suppress(OSError), private_folders.opened(folder) as parent:
            with contextlib.suppress(OSError):  # a network drive may not support locks
                fcntl.flock(parent, fcntl.LOCK_EX)  # held until the folder is closed
            try:
                _read_in(parent, name)
            except (ValueError, OSError) as error:
                if isinstance(error, ValueError) or error.errno in (errno.ELOOP, errno.EACCES):
                    os.unlink(name, dir_fd=parent)


def _share(text: str, bases: Iterable[str]) -> bool:
    """Write the shared secret unless it already exists. Return False if no folder is writable."""
    for folder in private_folders.candidates(bases):
        with contextlib.suppress(OSError), private_folders.opened(folder, makes=True) as parent:
            with _begun(parent, text) as (begun, _), contextlib.suppress(FileExistsError):
                os.link(begun, SHARED, src_dir_fd=parent, dst_dir_fd=parent)
            return True
    return False


@contextlib.contextmanager
def _begun(parent: int, text: str) -> Iterator[tuple[str, int]]:
    """Create a file with a temporary name. Yield the name and a descriptor. The body renames or links the file."""
    begun = f"{SHARED}.{secrets.token_hex(8)}"
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW
    descriptor = os.open(begun, flags, 0o600, dir_fd=parent)
    try:
        os.write(descriptor, text.encode())
        os.fsync(descriptor)  # without this, a power loss could leave an empty file with the final name
        yield begun, descriptor
    finally:  # also reached if the disk is full
        with contextlib.suppress(FileNotFoundError):
            os.unlink(begun, dir_fd=parent)
        os.close(descriptor)
