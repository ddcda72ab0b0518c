"""The sockets on which the ranks of this host answer: where they lie, and how they are asked.

A job has a directory, of mode 0700, with a socket for each rank that lives here, ``RANK.PID``. A rank takes its own
away at its end, and the directory with the last one. What a killed rank leaves behind is cleared by the others when
they end, by the next job of this user, or by ``asyncdist story``.
"""

from __future__ import annotations

import contextlib
import os
import selectors
import socket
import stat
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from asyncdist import environment
from asyncdist.story.facts import RankStory, from_bytes

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
        """Whether some process listens there: the rank's number may be that of another process by now."""
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as client:
            client.setblocking(False)
            try:
                client.connect(str(self.path))
            except OSError as error:
                return isinstance(error, BlockingIOError)  # its queue is full
            return True


def directories() -> list[Path]:
    """Return where directories of jobs may be, the best place first."""
    bases = [*environment.runtime_directories(), tempfile.gettempdir(), "/tmp"]
    found = [Path(base, f"asyncdist-{os.getuid()}") for base in dict.fromkeys(bases)]
    return [path for path in found if len(os.fsencode(path)) + _NAME_NBYTES <= _PATH_NBYTES_MAX]


def listen(job: str, rank: int) -> tuple[socket.socket, Path] | None:
    """Return a socket that listens for questions about this rank, and its path; None where there is no place for it."""
    for base in directories():
        clear(base)
        for _ in range(_TRY_COUNT):  # another rank may take an empty directory away
            with contextlib.suppress(OSError):
                folder = base / job
                _make_private(base)
                _make_private(folder)
                path = folder / f"{rank}.{os.getpid()}"
                listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
                try:
                    begun = path.with_name(f"{path.name}~")  # no place yet: one at which nobody listens is cleared away
                    begun.unlink(missing_ok=True)
                    listener.bind(str(begun))
                    listener.listen(64)
                    listener.setblocking(False)
                    begun.replace(path)
                except OSError:
                    listener.close()
                    raise
                return listener, path
    return None


def _make_private(folder: Path) -> None:
    """Make a directory that is this user's alone. Raises OSError where it is another's."""
    folder.mkdir(mode=0o700, exist_ok=True)
    found = folder.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid() or stat.S_IMODE(found.st_mode) & 0o077:
        raise PermissionError(f"{folder} is not a directory of this user alone")


def withdraw(path: Path) -> None:
    """Take a rank's socket away, and the directory of the job if nobody else lives in it."""
    path.unlink(missing_ok=True)
    _clear_job(path.parent)
    with contextlib.suppress(OSError):  # others live there, or it is away already
        path.parent.rmdir()
        path.parent.parent.rmdir()


def clear(base: Path) -> None:
    """Take away what jobs have left of which no process lives."""
    with contextlib.suppress(OSError):
        for folder in list(base.iterdir()):
            _clear_job(folder)
        base.rmdir()


def _clear_job(folder: Path) -> None:
    with contextlib.suppress(OSError):
        found = places(folder)
        if not any(place.is_alive and place.is_served for place in found):
            for place in found:
                place.path.unlink(missing_ok=True)
            # A rank that begins has made the directory, and is about to make its socket.
            if found or time.time() - folder.stat().st_mtime > _BEGINNING_S:
                for begun in folder.glob("*~"):  # of one that was killed before it listened
                    begun.unlink()
                folder.rmdir()


def places(folder: Path) -> list[Place]:
    """Return the sockets of a job, by rank."""
    found = []
    with contextlib.suppress(OSError):
        for path in folder.iterdir():
            rank, _, pid = path.name.partition(".")
            if rank.isdecimal() and pid.isdecimal():
                found.append(Place(path, int(rank), int(pid)))
    return sorted(found, key=lambda place: (place.rank, place.pid))


def jobs() -> dict[str, list[Place]]:
    """Return the sockets of each job of this user on this host."""
    found = {}
    for base in directories():
        clear(base)
        with contextlib.suppress(OSError):
            for folder in sorted(base.iterdir()):
                if there := places(folder):
                    found[folder.name] = there
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
                ready.register(client, selectors.EVENT_READ, (place.rank, bytearray()))
                waiting += 1
        deadline = time.monotonic() + timeout_s
        while waiting and (left_s := deadline - time.monotonic()) > 0:
            for key, _ in ready.select(left_s):
                rank, data = key.data
                part = _read(key.fileobj)  # type: ignore[arg-type]
                data += part
                if not part:
                    ready.unregister(key.fileobj)
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
        client.send(question)
    except OSError:  # its process has ended, or its queue is full since it does not answer
        client.close()
        return None
    return client


def _read(client: socket.socket) -> bytes:
    try:
        return client.recv(1 << 16)
    except OSError:
        return b""
