"""Asks the ranks on this host, over Unix sockets, for their counters and for descriptions of what they are doing.

A job has a directory of mode 0700 with a socket ``RANK.PID`` for each living rank on this host. A rank removes its
socket when it ends, and the last rank also removes the directory. Other ranks of the job, the next job of this user or
``asyncdist story`` remove the socket of a killed rank.

Other users of the host may have created files with these names. Before a directory is used,
:mod:`asyncdist.trust.private_folders` checks that it is private to this user. Each end of a connection checks that the
other end is a process of this user.
"""

from __future__ import annotations

import contextlib
import logging
import os
import re
import selectors
import socket
import stat
import struct
import sys
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from asyncdist import environment
from asyncdist.launchers import detection
from asyncdist.story.facts import RankStory, from_bytes
from asyncdist.trust import private_folders

logger = logging.getLogger("asyncdist.story.sockets")

#: Requests to a rank's socket, the answers YES and NO, and REPORTED, which says that missing progress was reported.
STORY: Final = b"story\n"
COUNTERS: Final = b"count\n"
PULSE: Final = b"pulse\n"
ASKED: Final = b"asked\n"
YES: Final = b"1"
NO: Final = b"0"
REPORTED: Final = b"told!\n"
#: Maximum length of the report that follows REPORTED, in bytes.
REPORT_NBYTES_MAX: Final = 1 << 15
#: Seconds that a rank may take to answer. A separate thread answers even while the rank computes.
ANSWER_S: Final = 1.0
#: Minimum age, in seconds, at which a directory without a socket is removed.
_BEGINNING_S: Final = 10.0
#: Maximum number of ranks that are asked at once. The limit on open file descriptors is often 1,024.
_ASKED_COUNT_MAX: Final = 512
_TRY_COUNT: Final = 10
#: Maximum length of a Unix socket's path in bytes, without the terminating 0.
_PATH_NBYTES_MAX: Final = 107
#: Maximum length in bytes of a socket's path below its base folder: job, rank, pid, and a tilde until the rank listens.
_NAME_NBYTES: Final = len("/0123abcd/1000000.4194304~")
_NAME: Final = re.compile(r"[0-9]+\.[0-9]+~?")
#: Layout of the kernel's struct ucred: process, user and group.
_CREDENTIALS: Final = struct.Struct("3i")


def state_and_parent(pid: int) -> tuple[str, int]:
    """Return a process's state, a letter as in ``ps``, and its parent's pid, or ("", 0) if the system hides them."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
        state, parent = text.rpartition(")")[2].split()[:2]  # the program's name, before ")", may be any text
        return state, int(parent)
    except (OSError, ValueError):
        return "", 0


@dataclass(frozen=True, slots=True)
class RankSocket:
    """Stores the path of a rank's socket, which contains the rank and its pid."""

    path: Path
    rank: int
    pid: int

    @property
    def state(self) -> str:
        """State of the process, a letter as in ``ps``, or "" if the system does not show it."""
        return state_and_parent(self.pid)[0]

    @property
    def is_alive(self) -> bool:
        """Whether the process is alive. A zombie, which has ended but still has an entry in ``ps``, is not."""
        if self.state in ("Z", "X"):
            return False
        try:
            os.kill(self.pid, 0)
        except OSError as error:
            return isinstance(error, PermissionError)
        return True

    @property
    def is_served(self) -> bool:
        """Whether the rank listens on the socket, even if the rank runs in another container."""
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as client:
            client.setblocking(False)
            try:
                client.connect(str(self.path))
            except OSError as error:
                return isinstance(error, BlockingIOError)  # connecting would block, because the socket's queue is full
            listener, _ = _credentials(client) or (self.pid, 0)
            # The pid is 0 if the process is in another container.
            return listener == 0 or RankSocket(self.path, self.rank, listener).is_alive


def directories() -> list[Path]:
    """Return the folders that may contain the directories of jobs, the preferred folder first."""
    found = private_folders.candidates(environment.shared_directories())
    return [path for path in found if len(os.fsencode(path)) + _NAME_NBYTES <= _PATH_NBYTES_MAX]


def warn_of_refused_directories(command: str) -> None:
    """Print a line for each folder that is skipped because it is not private to this user."""
    for base in directories():
        with contextlib.suppress(FileNotFoundError):
            try:
                with private_folders.opened(base):
                    pass
            except private_folders.NotPrivateError as error:
                print(f"asyncdist {command}: {error}; this folder is skipped", file=sys.stderr, flush=True)


def listen(job: str, rank: int) -> tuple[socket.socket, Path] | None:
    """Return a listening socket for requests to this rank, and its path, or None if no private folder can hold it."""
    refused: list[str] = []
    opened = None
    for base in directories():
        clear(base)
        try:
            opened = _listen_in(base, job, rank)
        except private_folders.NotPrivateError as error:
            refused.append(str(error))
        if opened is not None:
            break
    if refused and (rank == 0 or detection.local_rank() == 0):
        other = "no other folder can hold it" if opened is None else f"it is in {opened[1].parents[1]} instead"
        logger.warning("%s; the socket for asyncdist story is not created there: %s", "; ".join(refused), other)
    return opened


def _listen_in(base: Path, job: str, rank: int) -> tuple[socket.socket, Path] | None:
    """Create a socket for :func:`listen` in a folder, or return None. Raise NotPrivateError if the folder is unsafe."""
    path = base / job / f"{rank}.{os.getpid()}"
    # The socket is renamed once it listens, because other processes remove sockets on which no process listens.
    begun = path.with_name(f"{path.name}~")
    for _ in range(_TRY_COUNT):  # another rank may remove the folder while it is empty
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            with (
                private_folders.opened(base, makes=True) as outer,
                private_folders.opened(job, parent=outer, makes=True) as folder,
            ):
                with contextlib.suppress(FileNotFoundError):
                    os.unlink(begun.name, dir_fd=folder)
                listener.bind(str(begun))
                listener.listen(64)
                listener.setblocking(False)
                os.rename(begun.name, path.name, src_dir_fd=folder, dst_dir_fd=folder)
                return listener, path
        except private_folders.NotPrivateError:
            listener.close()
            raise
        except OSError:
            listener.close()
    return None


def _credentials(connection: socket.socket) -> tuple[int, int] | None:
    """Return the pid and the user of the process at the other end, or None if the system does not show them."""
    if not hasattr(socket, "SO_PEERCRED"):
        return None
    data = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    pid, user, _ = _CREDENTIALS.unpack(data)
    return pid, user


def is_of_own_user(connection: socket.socket) -> bool:
    """Return whether the process at the other end runs as this user or root, or the system does not show its user."""
    credentials = _credentials(connection)
    return credentials is None or credentials[1] in (os.getuid(), 0)


def withdraw(path: Path) -> None:
    """Remove a rank's socket, and the job's folder if no other rank has a socket there."""
    with contextlib.suppress(OSError), private_folders.opened(path.parents[1]) as base:
        with private_folders.opened(path.parent.name, parent=base) as folder:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(path.name, dir_fd=folder)
            _clear_job(base, path.parent)
        os.rmdir(path.parent.name, dir_fd=base)  # fails if other ranks have sockets there
    with contextlib.suppress(OSError):
        path.parents[1].rmdir()


def clear(base: Path) -> None:
    """Remove the sockets of ended jobs from this folder if the folder is private to this user."""
    with contextlib.suppress(OSError), private_folders.opened(base) as descriptor:
        for name in os.listdir(descriptor):
            _clear_job(descriptor, base / name)
        base.rmdir()


def _clear_job(base: int, path: Path) -> None:
    """Remove the sockets and the folder of a job without living processes. Other files are kept."""
    with contextlib.suppress(OSError), private_folders.opened(path.name, parent=base) as folder:
        names = [name for name in os.listdir(folder) if _NAME.fullmatch(name) and _is_own_socket(name, folder)]
        found = _rank_sockets(path, names)
        if any(peer.is_served for peer in found):
            return
        # A young empty folder belongs to a rank that is about to create its socket.
        if found or time.time() - os.fstat(folder).st_mtime > _BEGINNING_S:
            for name in names:
                os.unlink(name, dir_fd=folder)
            os.rmdir(path.name, dir_fd=base)


def _is_own_socket(name: str, folder: int) -> bool:
    found = os.stat(name, dir_fd=folder, follow_symlinks=False)
    return stat.S_ISSOCK(found.st_mode) and found.st_uid == os.getuid()


def rank_sockets(folder: Path) -> list[RankSocket]:
    """Return the sockets of a job, sorted by rank, or [] if the folder is not private to this user."""
    with contextlib.suppress(OSError), private_folders.opened(folder) as descriptor:
        return _rank_sockets(folder, [name for name in os.listdir(descriptor) if _is_own_socket(name, descriptor)])
    return []


def _rank_sockets(folder: Path, names: Iterable[str]) -> list[RankSocket]:
    found = []
    for name in names:
        rank, _, pid = name.partition(".")
        if rank.isdecimal() and pid.isdecimal():
            found.append(RankSocket(folder / name, int(rank), int(pid)))
    return sorted(found, key=lambda peer: (peer.rank, peer.pid))


def jobs() -> dict[str, list[RankSocket]]:
    """Return the sockets of each job of this user on this host."""
    found: dict[str, list[RankSocket]] = {}
    for base in directories():
        clear(base)
        with contextlib.suppress(OSError), private_folders.opened(base) as descriptor:
            for name in sorted(os.listdir(descriptor)):
                if there := rank_sockets(base / name):
                    found[name] = sorted([*found.get(name, []), *there], key=lambda peer: (peer.rank, peer.pid))
    return found


def ask(asked: Sequence[RankSocket], timeout_s: float = ANSWER_S) -> dict[int, RankStory]:
    """Ask all ranks concurrently what they are doing. Return the answers that arrive in time, keyed by rank."""
    stories = {}
    for rank, data in sorted(exchange(asked, STORY, timeout_s).items()):
        with contextlib.suppress(ValueError):  # the rank ended while it answered
            stories[rank] = from_bytes(data)
    return stories


def exchange(asked: Sequence[RankSocket], question: bytes, timeout_s: float = ANSWER_S) -> dict[int, bytes]:
    """Send a request to all ranks concurrently. Return the answers that arrive in time, keyed by rank.

    More than 512 ranks are asked in several groups, because each open socket takes a file descriptor.
    """
    answers: dict[int, bytes] = {}
    for first in range(0, len(asked), _ASKED_COUNT_MAX):
        answers |= _exchange(asked[first : first + _ASKED_COUNT_MAX], question, timeout_s)
    return answers


def _exchange(asked: Sequence[RankSocket], question: bytes, timeout_s: float) -> dict[int, bytes]:
    answers: dict[int, bytes] = {}
    # Other selectors need a file descriptor of their own, and may therefore raise an error.
    with selectors.PollSelector() as ready, contextlib.ExitStack() as opened:
        waiting = 0
        for peer in asked:
            client = _connect(peer, question)
            if client is not None:
                opened.enter_context(client)
                ready.register(client, selectors.EVENT_READ, (client, peer.rank, bytearray()))
                waiting += 1
        deadline = time.monotonic() + timeout_s
        while waiting and (left_s := deadline - time.monotonic()) > 0:
            for key, _ in ready.select(left_s):
                client, rank, data = key.data
                part = _read(client)
                data += part
                if not part:
                    ready.unregister(client)
                    waiting -= 1
                    answers[rank] = bytes(data)
    return answers


def answers_pulse(peer: RankSocket) -> bool:
    """Return whether the rank's thread that answers requests responds."""
    return exchange([peer], PULSE) == {peer.rank: YES}


def were_asked(asked: Sequence[RankSocket]) -> bool:
    """Return whether a signal has just asked one of the ranks to print what all ranks of the job are doing."""
    return YES in exchange(asked, ASKED).values()


def notify_reported(peer: RankSocket, story: str = "") -> None:
    """Notify a rank that the job's lack of progress was already reported. ``story`` is the report to record."""
    client = _connect(peer, REPORTED + story.encode("utf-8", "replace")[:REPORT_NBYTES_MAX])
    if client is not None:
        client.close()


def _connect(peer: RankSocket, question: bytes) -> socket.socket | None:
    try:
        client = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    except OSError:  # no file descriptor is free
        return None
    client.setblocking(False)
    try:
        client.connect(str(peer.path))
        if not is_of_own_user(client):
            raise PermissionError(f"{peer.path} is served by another user")
        client.send(question)
    except OSError:  # the rank has ended, belongs to another user, or has a full queue because it does not answer
        client.close()
        return None
    return client


def _read(client: socket.socket) -> bytes:
    try:
        return client.recv(1 << 16)
    except OSError:
        return b""
