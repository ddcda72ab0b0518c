"""Writes what happens on a rank to a file, in a form that is read back after a crash.

The file of a rank is one stream of MessagePack (https://github.com/msgpack/msgpack/blob/master/spec.md):

1. a map, the header: see :func:`header_of`;
2. arrays of three, the blocks: the time of the block in seconds (float 64), the CRC-32 of its content (zlib's), and its
   content (bin), which is itself a stream of arrays, the events: the place of the kind in
   :data:`~asyncdist.recording.events.KINDS`, the microseconds since the block's time, and the fields.

A block is written by one call of the kernel, when it is large or old, and when the rank fails or ends. So a process
that is killed loses about the last second, and a file that ends within a block loses that block alone.

No run is ended or held up by its recorder: where a file cannot be written, one warning says so, and training goes on.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import os
import platform
import sys
import time
import zlib
from collections.abc import Callable
from dataclasses import dataclass
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
#: Of the files of a recording.
SUFFIX: Final = ".record"
LIMIT_NBYTES: Final = 1 << 28
#: Waits that were shorter are not recorded.
WAIT_S_MIN: Final = 0.001

_BLOCK_NBYTES: Final = 1 << 15
#: What the limit leaves for the block that says that it is reached.
_CUT_NBYTES: Final = 160
_BLOCK_AGE_S: Final = 1.0
_CODES: Final = {kind: code for code, kind in enumerate(KINDS)}
_SAFE_POINT: Final = _CODES["safe_point"]
_SENT: Final = _CODES["sent"]
_STEP: Final = _CODES["step"]
_POLICY: Final = _CODES["policy"]
_TOLD: Final = _CODES["told"]
_encode_into = msgspec.msgpack.Encoder().encode_into
_encode = msgspec.msgpack.Encoder().encode


@dataclass(frozen=True, slots=True)
class RecordOptions:
    """Says what is written down of a run: options of :func:`asyncdist.run`.

    Attributes:
        folder: where the files are written; it is made where there is none.
        limit_nbytes: the size at which the file of a rank ends, in bytes.

    Raises:
        TypeError: the folder is no path.
        ValueError: the limit is no whole number above 0.
    """

    folder: Path
    limit_nbytes: int = LIMIT_NBYTES

    def __post_init__(self) -> None:
        validation.count("record_limit_nbytes", self.limit_nbytes)

    @staticmethod
    def of(folder: Any, limit_nbytes: int = LIMIT_NBYTES) -> RecordOptions | None:
        """Return the options; None without a folder."""
        if folder is None:
            return None
        if not isinstance(folder, (str, os.PathLike)) or not os.fspath(folder):
            validation.refuse("record", folder, "the path of a folder, or None", TypeError)
        return RecordOptions(Path(folder), limit_nbytes)


def file_name(job: str, rank: int, incarnation: int) -> str:
    """Return the name of a rank's file; a process in the place of one that was lost has a file of its own."""
    return f"{job}-rank{rank:05d}{f'.{incarnation}' if incarnation else ''}{SUFFIX}"


def remove_earlier(folder: Path, job: str, kept: str) -> None:
    """Remove the files that another run of this name has left, but one. Simulations of one seed have one name."""
    with contextlib.suppress(OSError):
        for path in folder.glob(f"{job}-rank*{SUFFIX}"):
            if path.name != kept:
                path.unlink()


def header_of(*, job: str, rank: int, size: int, incarnation: int, transport: str, hostname: str) -> dict[str, Any]:
    """Return what stands at the beginning of a rank's file; the runtime adds what replays need.

    Args:
        job: names the job; equal on all of its ranks.
        rank, size, incarnation: of the world.
        transport: what carries the messages, in words.
        hostname: of the rank.
    """
    script = getattr(sys.modules.get("__main__"), "__file__", None) or ""
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
        "script_digest": _digest_of(script),
        "arguments": [readable(word) for word in sys.argv[1:]] if script else [],  # a notebook's are its kernel's
    }


def readable(text: str) -> str:
    """Return a text that UTF-8 can hold: bytes of a path or of an argument that were no UTF-8 become backslashes."""
    return text.encode("utf-8", "backslashreplace").decode("utf-8")


def _readable_fields(fields: tuple[Field, ...]) -> list[Field]:
    return [_readable_field(field) for field in fields]


def _readable_field(field: Field) -> Field:
    if isinstance(field, WaitId):
        return field._replace(name=readable(field.name))
    return readable(field) if isinstance(field, str) else field


def _digest_of(path: str) -> str:
    try:
        return hashlib.sha256(Path(path).read_bytes()).hexdigest() if path else ""
    except OSError:
        return ""


class RecordWriter:
    """Writes the events of one rank.

    What comes before :meth:`open` is kept until then.

    Args:
        options: where to, and how much.
        clock: returns the time of events in seconds.
        rank: for the warning.
    """

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
        self._is_at_safe_point = False  # one has begun, which is not written down yet
        self._woken_count = 0
        self._turn_count = -1  # of a safe point whose end is not written down yet
        self._has_sent = False

    @property
    def is_recording(self) -> bool:
        """Whether events are still written down."""
        return not self._is_over

    def open(self, header: dict[str, Any]) -> None:
        """Begin the file. The header is completed by the time, on the clock of events and of the world."""
        name = file_name(header["job"], header["rank"], header["incarnation"])
        clocks = {"clock_s": self._clock(), "unix_s": time.time()}
        try:
            self._options.folder.mkdir(parents=True, exist_ok=True)
            path = self._options.folder / name
            self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o644)
        except OSError as error:
            self._give_up(f"cannot be written: {why_not_written(error)}")
            return
        self._write(_encode({**header, **clocks}))

    def add(self, time_s: float, kind: str, fields: tuple[Field, ...]) -> None:
        """Write an event down, later."""
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
        except UnicodeEncodeError:  # the name of a file in an error's text, for example
            del block[begin:]  # what was encoded of it
            _encode_into((code, int((time_s - self._block_began_at) * 1e6), *_readable_fields(fields)), block, -1)
        # What was told is of use where the process is killed next.
        if self._is_block_due(time_s) or (self._has_sent and code in (_STEP, _POLICY)) or code == _TOLD:
            self.flush()

    def _is_block_due(self, time_s: float) -> bool:
        return len(self._block) >= _BLOCK_NBYTES or time_s - self._block_began_at >= _BLOCK_AGE_S

    def note(self, kind: str, *fields: Field) -> None:
        """Write an event down that happens now."""
        self.add(self._clock(), kind, fields)

    def begin_safe_point(self, woken_count: int) -> None:
        """Note that a safe point begins, and how many waits had ended. It is written down with the next event."""
        if self._is_over:
            return
        if self._turn_count >= 0:  # there was no event since: safe points alone
            time_s = self._clock()
            self._add_safe_point(time_s)
            if self._is_block_due(time_s):
                self.flush()
        self._is_at_safe_point, self._woken_count = True, woken_count

    def end_safe_point(self, turn_count: int) -> None:
        """Note that a safe point has ended, and how many passes and yields were made. It is written down likewise.

        Messages that were sent are flushed: what other ranks have seen of this one is known even if it is killed now.
        """
        if self._is_over:
            return
        self._turn_count = turn_count
        if self._has_sent:
            self.flush()

    def _add_safe_point(self, time_s: float) -> None:
        """Write down that a safe point has begun, that it has ended, or both at once where nothing happened in it."""
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
        """Write down that a task has waited."""
        if seconds >= WAIT_S_MIN:
            self.note("waited", what, seconds)

    def flush(self) -> None:
        """Hand what is there to the kernel, which keeps it even if this process is killed."""
        if self._turn_count >= 0 and not self._is_over:
            self._add_safe_point(self._clock())
        if self._block and self._file is not None:
            self._has_sent = False
            block, self._block = self._block, bytearray()
            self._write(_encode((self._block_began_at, zlib.crc32(block), block)))

    def close(self) -> None:
        """End the file."""
        self.flush()
        self._end()

    def _write(self, data: bytes) -> None:
        if os.getpid() != self._process_id:  # a forked child, as a DataLoader's worker: it is no rank
            self._end()
        if self._file is None:
            return
        if self._nbytes + len(data) > self._options.limit_nbytes - _CUT_NBYTES:
            self._give_up(
                f"has reached {self._options.limit_nbytes} bytes, and ends here; record_limit_nbytes allows more"
            )
            return
        try:
            written = os.write(self._file, data)
            if written != len(data):
                raise OSError(f"{written} of {len(data)} bytes were written; the disk may be full")
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
        """Write down why the file ends, where there is room for that: else it looks as that of a killed rank does."""
        if self._file is None:
            return
        content = _encode((_CODES["cut"], 0, why))
        data = _encode((self._clock(), zlib.crc32(content), content))
        with contextlib.suppress(OSError):
            if os.write(self._file, data) != len(data):
                os.ftruncate(self._file, self._nbytes)

    def _end(self) -> None:
        self._is_over = True
        self._block = bytearray()
        file, self._file = self._file, None
        if file is not None:
            with contextlib.suppress(OSError):
                os.close(file)
