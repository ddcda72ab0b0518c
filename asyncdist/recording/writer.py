"""Writes the events of a rank to a file that can be read after a crash.

The file is a stream of MessagePack objects (https://github.com/msgpack/msgpack/blob/master/spec.md):

1. The header, a map (see :func:`header_of`).
2. Blocks, arrays of three elements: the time of the block in seconds (float 64), the CRC-32 of its content (zlib's),
   and its content (bin). The content is a stream of events. An event is an array: the index of the kind in
   :data:`~asyncdist.recording.events.KINDS`, the microseconds since the block's time, and the fields.

A block is written with one system call when it is large or old, and when the rank fails or ends. A killed process
therefore loses only about the last second, and a truncated file only its last block. If the file cannot be written, one
warning is logged and training continues.
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import logging
import os
import platform
import stat
import sys
import time
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from numbers import Integral
from pathlib import Path
from typing import Any, Final

import msgspec
import torch

from asyncdist import validation
from asyncdist._version import __version__
from asyncdist.recording.events import KINDS, Field
from asyncdist.recording.file_errors import why_not_written
from asyncdist.waits import WaitId

logger = logging.getLogger("asyncdist.recording.writer")

FORMAT: Final = "asyncdist recording"
VERSION: Final = 2
SUFFIX: Final = ".record"
LIMIT_NBYTES: Final = 1 << 28
#: Minimum duration of a recorded wait, in seconds.
WAIT_S_MIN: Final = 0.001

_BLOCK_NBYTES: Final = 1 << 15
#: Number of bytes reserved for the block that records that the size limit was reached.
_CUT_NBYTES: Final = 160
_BLOCK_AGE_S: Final = 1.0
_CODES: Final = {kind: code for code, kind in enumerate(KINDS)}
_SAFE_POINT: Final = _CODES["safe_point"]
_SENT: Final = _CODES["sent"]
_STEP: Final = _CODES["step"]
_POLICY: Final = _CODES["policy"]
_TOLD: Final = _CODES["told"]


def _plain(value: Any) -> int | float | str:
    """Convert a NumPy or torch number, or a subclass of str, because MessagePack cannot represent it."""
    if isinstance(value, str):
        return str.__str__(value)
    if hasattr(value, "item"):
        number: int | float = value.item()
        return number
    return int(value) if isinstance(value, Integral) else float(value)


_encode_into = msgspec.msgpack.Encoder(enc_hook=_plain).encode_into
_encode = msgspec.msgpack.Encoder().encode


@dataclass(frozen=True, slots=True)
class RecordOptions:
    """Stores the options of :func:`asyncdist.run` for recording. Raises TypeError or ValueError if they are invalid.

    Attributes:
        limit_nbytes: Maximum size of a rank's file.
        replaces: Whether a rank's file replaces an earlier recording of the same job and rank, as in simulations with
            equal seeds.
    """

    folder: Path
    limit_nbytes: int = LIMIT_NBYTES
    replaces: bool = False

    def __post_init__(self) -> None:
        validation.count("record_limit_nbytes", self.limit_nbytes)

    @staticmethod
    def of(folder: Any, limit_nbytes: int = LIMIT_NBYTES, *, replaces: bool = False) -> RecordOptions | None:
        """Return the options, or None if ``folder`` is None."""
        if folder is None:
            return None
        if not isinstance(folder, (str, os.PathLike)) or not os.fspath(folder):
            validation.refuse("record", folder, "the path of a folder or None", TypeError)
        return RecordOptions(Path(folder), limit_nbytes, replaces)


def file_name(job: str, rank: int, incarnation: int) -> str:
    """Return the name of a rank's file. A restarted rank writes a new file."""
    return f"{job}-rank{rank:05d}{f'.{incarnation}' if incarnation else ''}{SUFFIX}"


def remove_earlier(folder: Path, job: str, kept: str) -> None:
    """Remove the files of earlier runs of this job except ``kept``.

    Simulations with equal seeds have equal job names.
    """
    with contextlib.suppress(OSError):
        for path in folder.glob(f"{job}-rank*{SUFFIX}"):
            if path.name != kept:
                path.unlink()


def header_of(*, job: str, rank: int, size: int, incarnation: int, transport: str, hostname: str) -> dict[str, Any]:
    """Return the header of a rank's file. The runtime adds the conditions for replays."""
    main = sys.modules.get("__main__")
    script, spec = getattr(main, "__file__", None) or "", getattr(main, "__spec__", None)
    return {
        "format": FORMAT,
        "version": VERSION,
        "kinds": {kind: list(fields) for kind, fields in KINDS.items()},
        "job": job,
        "rank": rank,
        "size": size,
        "incarnation": incarnation,
        "transport": transport,
        "hostname": hostname,
        "pid": os.getpid(),
        "asyncdist": __version__,
        "torch": str(torch.__version__),
        "python": platform.python_version(),
        "script": readable(os.path.abspath(script)) if script else "",
        "module": readable(spec.name) if spec is not None else "",
        "script_digest": _digest_of(script),
        "arguments": [readable(word) for word in sys.argv[1:]]
        if script
        else [],  # in a notebook, sys.argv has the kernel's arguments
    }


def readable(text: str) -> str:
    """Return a string that UTF-8 can encode. Undecodable bytes of a path or argument become backslash escapes."""
    return text.encode("utf-8", "backslashreplace").decode("utf-8")


def _readable_fields(fields: tuple[Field, ...]) -> list[Field]:
    return [_readable_field(field) for field in fields]


def _readable_field(field: Field) -> Field:
    if isinstance(field, WaitId):
        return field._replace(name=readable(field.name))
    return readable(field) if isinstance(field, str) else field


def _is_own_file(path: Path) -> bool:
    """Return whether ``path`` is a file of this user with content, and not a link."""
    try:
        found = path.lstat()
    except FileNotFoundError:
        return False
    return stat.S_ISREG(found.st_mode) and found.st_nlink == 1 and found.st_uid == os.geteuid() and found.st_size > 0


def _digest_of(path: str) -> str:
    try:
        return hashlib.sha256(Path(path).read_bytes()).hexdigest() if path else ""
    except OSError:
        return ""


class RecordWriter:
    """Writes the events of one rank to its file. Events before :meth:`open` are kept in memory until then."""

    def __init__(self, options: RecordOptions, clock: Callable[[], float], rank: int) -> None:
        self._options = options
        self._clock = clock
        self._rank = rank
        self._file: int | None = None
        self._is_over = False
        self._nbytes = 0
        self._block = bytearray()
        self._process_id = os.getpid()
        self._block_began_at = clock()
        self._is_at_safe_point = False  # whether the beginning of safe_point must still be recorded
        self._woken_count = 0
        self._turn_count = -1  # number of turns of a safe_point whose end must still be recorded, or -1
        self._has_sent = False

    @property
    def is_recording(self) -> bool:
        """Whether events are still recorded."""
        return not self._is_over

    def open(self, header: dict[str, Any]) -> None:
        """Create the file, and write the header with the current time on the event clock and on the wall clock."""
        name = file_name(header["job"], header["rank"], header["incarnation"])
        clocks = {"clock_s": self._clock(), "unix_s": time.time()}
        try:
            self._options.folder.mkdir(parents=True, exist_ok=True)
            path = self._free_path(self._options.folder / name)
            self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644)
        except OSError as error:
            self._give_up(f"cannot be written: {why_not_written(error)}")
            return
        self._write(_encode({**header, **clocks}))

    def _free_path(self, path: Path) -> Path:
        """Return ``path``, or a path with a number if ``path`` is an earlier recording. Remove anything else there.

        In a shared folder, another user may have created a link or a pipe with this name.
        """
        if not self._options.replaces and _is_own_file(path):
            numbered = (path.with_name(f"{path.stem}-{number}{path.suffix}") for number in itertools.count(2))
            free = next(each for each in numbered if not _is_own_file(each))
            logger.warning("%s is a recording of an earlier job with this name; this job writes %s", path, free.name)
            path = free
        path.unlink(missing_ok=True)
        return path

    def add(self, time_s: float, kind: str, fields: tuple[Field, ...]) -> None:
        """Add an event to the current block, which is written later."""
        if self._is_over:
            return
        block = self._block
        if not block:
            self._block_began_at = time_s
        code = _CODES[kind]
        if self._is_at_safe_point or self._turn_count >= 0:
            self._add_safe_point(time_s)
        if code == _SENT and fields[0] != self._rank:
            self._has_sent = True
        begin = len(block)
        try:
            _encode_into((code, int((time_s - self._block_began_at) * 1e6), *fields), block, -1)
        except UnicodeEncodeError:  # for example, an error message with a file name
            del block[begin:]  # removes the part that was already encoded
            _encode_into((code, int((time_s - self._block_began_at) * 1e6), *_readable_fields(fields)), block, -1)
        # A report that the job is making no progress is written immediately, because the process may be killed soon.
        if self._is_block_due(time_s) or (self._has_sent and code in (_STEP, _POLICY)) or code == _TOLD:
            self.flush()

    def _is_block_due(self, time_s: float) -> bool:
        return len(self._block) >= _BLOCK_NBYTES or time_s - self._block_began_at >= _BLOCK_AGE_S

    def note(self, kind: str, *fields: Field) -> None:
        """Add an event at the current time."""
        self.add(self._clock(), kind, fields)

    def begin_safe_point(self, woken_count: int) -> None:
        """Record, before the next event, that a ``safe_point`` call has begun after ``woken_count`` ended waits."""
        if self._is_over:
            return
        if self._turn_count >= 0:  # no event was recorded since the last safe_point
            time_s = self._clock()
            self._add_safe_point(time_s)
            if self._is_block_due(time_s):
                self.flush()
        self._is_at_safe_point, self._woken_count = True, woken_count

    def end_safe_point(self, turn_count: int) -> None:
        """Record the end of a ``safe_point`` call, immediately if the rank has sent messages.

        Otherwise, it is recorded before the next event.
        """
        if self._is_over:
            return
        self._turn_count = turn_count
        if self._has_sent:
            self.flush()

    def _add_safe_point(self, time_s: float) -> None:
        """Record the beginning or the end of a ``safe_point`` call, or both as one event if it had no other events."""
        block = self._block
        if not block:
            self._block_began_at = time_s
        at_us, turn_count = int((time_s - self._block_began_at) * 1e6), self._turn_count
        if not self._is_at_safe_point:
            _encode_into((_SAFE_POINT, at_us, True, turn_count), block, -1)
        elif turn_count >= 0:
            _encode_into((_SAFE_POINT, at_us, True, turn_count, self._woken_count), block, -1)
        else:
            _encode_into((_SAFE_POINT, at_us, False, 0, self._woken_count), block, -1)
        self._is_at_safe_point, self._turn_count = False, -1

    def note_wait(self, what: WaitId, seconds: float) -> None:
        """Record a task's wait, unless it is shorter than :data:`WAIT_S_MIN`."""
        if seconds >= WAIT_S_MIN:
            self.note("waited", what, seconds)

    def flush(self) -> None:
        """Pass all events to the kernel, which keeps them even if this process is killed."""
        if self._turn_count >= 0 and not self._is_over:
            self._add_safe_point(self._clock())
        if self._block and self._file is not None:
            self._has_sent = False
            block, self._block = self._block, bytearray()
            self._write(_encode((self._block_began_at, zlib.crc32(block), block)))

    def close(self) -> None:
        """Write the remaining events, and close the file."""
        self.flush()
        self._end()

    def _write(self, data: bytes) -> None:
        if os.getpid() != self._process_id:  # a forked child, such as a DataLoader's worker, is not a rank
            self._end()
        if self._file is None:
            return
        if self._nbytes + len(data) > self._options.limit_nbytes - _CUT_NBYTES:
            self._give_up(
                f"has reached its limit of {self._options.limit_nbytes} bytes and ends here; raise record_limit_nbytes"
                " to record more"
            )
            return
        try:
            written = os.pwrite(self._file, data, self._nbytes)
            if written != len(data):
                raise OSError(f"only {written} of {len(data)} bytes were written; the disk may be full")
        except OSError as error:
            with contextlib.suppress(OSError):
                os.ftruncate(self._file, self._nbytes)
            self._give_up(f"ends here: {why_not_written(error)}")
        else:
            self._nbytes += written

    def _give_up(self, why: str) -> None:
        logger.warning("the recording of rank %d in %s %s", self._rank, self._options.folder, why)
        if self._nbytes:
            self._write_cut(why)
        self._end()

    def _write_cut(self, why: str) -> None:
        """Record why the file ends, if there is space. Without the reason, the rank would seem to have been killed."""
        if self._file is None:
            return
        content = _encode((_CODES["cut"], 0, why))
        data = _encode((self._clock(), zlib.crc32(content), content))
        with contextlib.suppress(OSError):
            if os.pwrite(self._file, data, self._nbytes) != len(data):
                os.ftruncate(self._file, self._nbytes)

    def _end(self) -> None:
        self._is_over = True
        self._block = bytearray()
        file, self._file = self._file, None
        if file is not None:
            with contextlib.suppress(OSError):
                os.close(file)
