"""The sockets on which the ranks of this host answer: where they lie, and how they are asked.

A job has a directory, of mode 0700, with a socket for each rank that lives here, ``RANK.PID``. A rank takes its own
away at its end, and the directory with the last one. What a killed rank leaves behind is cleared by the others when
they end, by the next job of this user, or by ``asyncdist story``.

Other users of the host may have put anything under these names. Nothing is read, made or removed in a directory
before :mod:`asyncdist.trust.private_folders` has found that it is this user's alone, and each end of a connection
checks that the other one is a process of this user.
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
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from asyncdist import environment
from asyncdist.story.facts import RankStory, from_bytes
from asyncdist.trust import private_folders

logger = logging.getLogger("asyncdist.story.sockets")

#: What is asked, or said: everything; counters; whether it answers at all; whether a signal has asked it just now;
#: that the job's standstill has been told.
STORY: Final = b"story\n"
COUNTERS: Final = b"count\n"
PULSE: Final = b"pulse\n"
ASKED: Final = b"asked\n"
YES: Final = b"1"
NO: Final = b"0"
TOLD: Final = b"told!\n"
#: Of the story that follows these.
TOLD_NBYTES_MAX: Final = 1 << 15
#: How long a rank may take to answer. One that computes answers all the same, from a thread.
ANSWER_S: Final = 1.0
#: Which directories without a socket are left alone, and how often a rank tries to make its own.
_BEGINNING_S: Final = 10.0
_TRY_COUNT: Final = 10
#: A path of a Unix socket has 108 bytes, the last one 0.
_PATH_NBYTES_MAX: Final = 107
#: A rank's own name in the directory: its number and its process; until it listens there, with a tilde.
_NAME_NBYTES: Final = len("/0123abcd/1000000.4194304~")
_NAME: Final = re.compile(r"[0-9]+\.[0-9]+~?")
#: The kernel's ucred: process, user and group.
_CREDENTIALS: Final = struct.Struct("3i")


@dataclass(frozen=True, slots=True)
class Place:
    """A rank's socket.

    Attributes:
        path: the socket.
        rank: the rank's number.
        pid: its process.
    """

    path: Path
    rank: int
    pid: int

    @property
    def state(self) -> str:
        """The state of that process, a letter as in ``ps``; "" where this system does not tell."""
        with contextlib.suppress(OSError, IndexError):
            text = Path(f"/proc/{self.pid}/stat").read_text(encoding="utf-8", errors="replace")
            return text.rpartition(")")[2].split()[0]  # the name before it may hold anything
        return ""

    @property
    def is_alive(self) -> bool:
        """Whether that process lives. One that has ended may be there until its parent asks for its exit code."""
        if self.state in ("Z", "X"):
            return False
        try:
            os.kill(self.pid, 0)
        except OSError as error:
            return isinstance(error, PermissionError)
        return True

    @property
    def is_served(self) -> bool:
        """Whether the rank listens there.

        Its name may be wrong here: a rank in another container has another number there. A process that the rank has
        started may hold the socket after the end of the rank, which counts as not served.
        """
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as client:
            client.setblocking(False)
            try:
                client.connect(str(self.path))
            except OSError as error:
                return isinstance(error, BlockingIOError)  # its queue is full
            listener = _process_at(client)
            return listener == 0 or Place(self.path, self.rank, self.pid if listener is None else listener).is_alive


def directories() -> list[Path]:
    """Return the folders in which jobs may have theirs, the best one first."""
    found = private_folders.candidates(environment.shared_directories())
    return [path for path in found if len(os.fsencode(path)) + _NAME_NBYTES <= _PATH_NBYTES_MAX]


def warn_of_refused_directories(command: str) -> None:
    """Print a line for each of these folders that is not looked into, since it is not this user's alone."""
    for base in directories():
        with contextlib.suppress(FileNotFoundError):
            try:
                with private_folders.opened(base):
                    pass
            except private_folders.NotPrivateError as error:
                print(f"asyncdist {command}: {error}: it is not looked into", file=sys.stderr, flush=True)


def listen(job: str, rank: int) -> tuple[socket.socket, Path] | None:
    """Return a socket that listens for questions about this rank, and its path; None if no folder can hold it.

    A folder that is not this user's alone is left untouched: another one is taken, and a warning says so.
    """
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
    if refused and (rank == 0 or environment.local_rank() == 0):
        other = "no folder is left for it" if opened is None else f"it is in {opened[1].parents[1]} instead"
        logger.warning("%s; so the socket for asyncdist story is not made there: %s", "; ".join(refused), other)
    return opened


def _listen_in(base: Path, job: str, rank: int) -> tuple[socket.socket, Path] | None:
    """Return what :func:`listen` does, in this folder. Raises NotPrivateError."""
    path = base / job / f"{rank}.{os.getpid()}"
    begun = path.with_name(f"{path.name}~")  # not a place yet: one at which no process listens is cleared away
    for _ in range(_TRY_COUNT):  # another rank may take an empty folder away
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


def _process_at(connection: socket.socket) -> int | None:
    """Return the process that has made the other end's socket; 0 if it has no number here, as in another container.

    None if this system does not tell.
    """
    if not hasattr(socket, "SO_PEERCRED"):
        return None
    data = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    return int(_CREDENTIALS.unpack(data)[0])


def is_of_own_user(connection: socket.socket) -> bool:
    """Return whether the process at the other end runs as this user, or as root; on Linux, which alone tells it.

    Elsewhere the mode of the folder keeps other users out.
    """
    if not hasattr(socket, "SO_PEERCRED"):
        return True
    data = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    return _CREDENTIALS.unpack(data)[1] in (os.getuid(), 0)


def withdraw(path: Path) -> None:
    """Take a rank's socket away, and the folder of the job if no other rank has a socket there."""
    with contextlib.suppress(OSError), private_folders.opened(path.parents[1]) as base:
        with private_folders.opened(path.parent.name, parent=base) as folder:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(path.name, dir_fd=folder)
            _clear_job(base, path.parent)
        os.rmdir(path.parent.name, dir_fd=base)  # fails if other ranks are there
    with contextlib.suppress(OSError):
        path.parents[1].rmdir()


def clear(base: Path) -> None:
    """Take away the sockets that ended jobs have left in this folder. Does nothing if it is not this user's alone."""
    with contextlib.suppress(OSError), private_folders.opened(base) as descriptor:
        for name in os.listdir(descriptor):
            _clear_job(descriptor, base / name)
        base.rmdir()


def _clear_job(base: int, path: Path) -> None:
    """Take away a job of which no process lives: sockets of this user with names of ours, and no other file."""
    with contextlib.suppress(OSError), private_folders.opened(path.name, parent=base) as folder:
        names = [name for name in os.listdir(folder) if _NAME.fullmatch(name) and _is_own_socket(name, folder)]
        found = _places(path, names)
        if any(place.is_served for place in found):
            return
        # A rank that begins has made the folder, and is about to make its socket.
        if found or time.time() - os.fstat(folder).st_mtime > _BEGINNING_S:
            for name in names:
                os.unlink(name, dir_fd=folder)
            os.rmdir(path.name, dir_fd=base)


def _is_own_socket(name: str, folder: int) -> bool:
    found = os.stat(name, dir_fd=folder, follow_symlinks=False)
    return stat.S_ISSOCK(found.st_mode) and found.st_uid == os.getuid()


def places(folder: Path) -> list[Place]:
    """Return the sockets of a job, by rank; none if the folder is not this user's alone."""
    with contextlib.suppress(OSError), private_folders.opened(folder) as descriptor:
        return _places(folder, [name for name in os.listdir(descriptor) if _is_own_socket(name, descriptor)])
    return []


def _places(folder: Path, names: Iterable[str]) -> list[Place]:
    found = []
    for name in names:
        rank, _, pid = name.partition(".")
        if rank.isdecimal() and pid.isdecimal():
            found.append(Place(folder / name, int(rank), int(pid)))
    return sorted(found, key=lambda place: (place.rank, place.pid))


def jobs() -> dict[str, list[Place]]:
    """Return the sockets of each job of this user on this host."""
    found: dict[str, list[Place]] = {}
    for base in directories():
        clear(base)
        with contextlib.suppress(OSError), private_folders.opened(base) as descriptor:
            for name in sorted(os.listdir(descriptor)):
                if there := places(base / name):
                    found[name] = sorted([*found.get(name, []), *there], key=lambda place: (place.rank, place.pid))
    return found


def ask(asked: Sequence[Place], timeout_s: float = ANSWER_S) -> dict[int, RankStory]:
    """Return the story of each of these ranks that answers in time. All are asked at once."""
    return dict(_decoded(exchange(asked, STORY, timeout_s)))


def exchange(asked: Sequence[Place], question: bytes, timeout_s: float = ANSWER_S) -> dict[int, bytes]:
    """Return what each of these ranks answers that does so in time. All are asked at once."""
    answers: dict[int, bytes] = {}
    with selectors.DefaultSelector() as ready, contextlib.ExitStack() as opened:
        waiting = 0
        for place in asked:
            client = _connect(place, question)
            if client is not None:
                opened.enter_context(client)
                ready.register(client, selectors.EVENT_READ, (client, place.rank, bytearray()))
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


def _decoded(answers: dict[int, bytes]) -> Iterator[tuple[int, RankStory]]:
    for rank, data in sorted(answers.items()):
        with contextlib.suppress(ValueError):  # it has ended while it answered
            yield rank, from_bytes(data)


def answers_pulse(place: Place) -> bool:
    """Return whether the thread of that rank answers at all."""
    return bool(_answer(place, PULSE))


def was_asked(place: Place) -> bool:
    """Return whether a signal has asked that rank just now, so that it tells what all do."""
    return _answer(place, ASKED) == YES


def _answer(place: Place, question: bytes) -> bytes:
    """Return one byte; none where the rank does not answer."""
    client = _connect(place, question)
    if client is None:
        return b""
    with client:
        client.settimeout(ANSWER_S)
        try:
            return client.recv(1)
        except OSError:
            return b""


def say_told(place: Place, story: str = "") -> None:
    """Tell a rank that the standstill of the job has been told, and the story, where that rank is to write it down."""
    client = _connect(place, TOLD + story.encode("utf-8", "replace")[:TOLD_NBYTES_MAX])
    if client is not None:
        client.close()


def _connect(place: Place, question: bytes) -> socket.socket | None:
    client = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    client.setblocking(False)
    try:
        client.connect(str(place.path))
        if not is_of_own_user(client):
            raise PermissionError(f"{place.path} is served by another user")
        client.send(question)
    except OSError:  # its process has ended, its queue is full since it does not answer, or it is another user's
        client.close()
        return None
    return client


def _read(client: socket.socket) -> bytes:
    try:
        return client.recv(1 << 16)
    except OSError:
        return b""
