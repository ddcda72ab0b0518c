"""Reads recordings in the format of :mod:`asyncdist.recording.writer`, up to the first damaged byte.

All headers and events are checked by :mod:`asyncdist.recording.schema`.
"""

from __future__ import annotations

import itertools
import logging
import os
import zlib
from collections import Counter
from collections.abc import Container, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, BinaryIO, Final, NamedTuple, TypeAlias

import msgpack

from asyncdist import tags
from asyncdist._version import __version__
from asyncdist.errors import AsyncdistError
from asyncdist.recording import schema
from asyncdist.recording.events import Event
from asyncdist.recording.schema import CLOCK_S_MAX, OBJECT_NBYTES_MAX, Conditions, EventError, EventSchema, Header
from asyncdist.recording.writer import FORMAT, SUFFIX, VERSION
from asyncdist.validation import printable

logger = logging.getLogger("asyncdist.recording.reader")

#: Identity of a sequence of messages: source, destination and tag.
Line: TypeAlias = tuple[int, int, int]
#: Maximum number of jobs that an error lists: the latest jobs.
_JOB_COUNT_MAX: Final = 8
#: Number of bytes to read, and to check, at a time.
_READ_NBYTES: Final = 1 << 16
_CHECK_NBYTES: Final = 1 << 16


class RecordingError(AsyncdistError):
    """Raised if a recording cannot be read. The message names the file and the reason."""


@dataclass(frozen=True, slots=True)
class RankRecording:
    """Reads the recording of one process of a rank.

    Attributes:
        nbytes: Size of the file in bytes when it was opened. Events that a running rank writes later are not read.
        damage: Description of the damage at which reading stops, or an empty string.
    """

    path: Path
    header: Header
    schema: EventSchema = field(compare=False, repr=False)
    header_nbytes: int = field(default=0, compare=False)
    nbytes: int = field(default=0, compare=False)
    damage: str = field(default="", compare=False)

    @property
    def rank(self) -> int:
        """Rank of the process."""
        return self.header.rank

    @property
    def incarnation(self) -> int:
        """Number of restarts of the rank before this process."""
        return self.header.incarnation

    def unix_s(self, time_s: float) -> float:
        """Convert the time of an event to seconds since 1970, according to the clock of the rank's host."""
        return self.header.unix_s + time_s - self.header.clock_s

    def conditions(self) -> Conditions:
        """Read the initial conditions for a replay from the header. Raise RecordingError if they are invalid."""
        with self.path.open("rb") as file:
            data = file.read(self.header_nbytes)
        try:
            return schema.read_conditions(data)
        except (ValueError, RecursionError) as error:
            why = f"{self.path} has a header from which no replay can start: {schema.why_refused(error)}"
            raise RecordingError(f"{why}; record the run again") from error

    def events(self) -> Iterator[Event]:
        """Iterate over the events, oldest first, up to the first damage. Each call yields the same events."""
        read = self.schema.reader()
        for block in self._blocks():
            if not isinstance(block, str):
                yield from read(block.content, block.time_s)

    def check(self) -> str:
        """Check the whole file. Return a description of its damage, or an empty string.

        Raise RecordingError for invalid content.
        """
        damage, waiting, nbytes = "", list[_Block](), 0
        for block in self._blocks():
            if isinstance(block, str):
                damage = block
                break
            waiting.append(block)
            nbytes += len(block.content)
            if nbytes >= _CHECK_NBYTES:
                self._check(waiting)
                waiting, nbytes = [], 0
        self._check(waiting)
        return damage

    def _check(self, blocks: Sequence[_Block]) -> None:
        """Check several blocks together, which is faster. If one is invalid, check each block separately to find it."""
        try:
            self.schema.check(b"".join([block.content for block in blocks]))
        except EventError:
            for block in blocks:
                try:
                    self.schema.check(block.content)
                except EventError as error:
                    why = f"{self.path} has content that no rank writes, in the block at byte {block.place}: {error}"
                    raise RecordingError(why) from error
            raise AssertionError("blocks were refused together, but each is valid alone") from None

    def _blocks(self) -> Iterator[_Block | str]:
        """Yield the blocks and, at the end, a description of the damage, if any."""
        limits = {"max_bin_len": OBJECT_NBYTES_MAX, "max_array_len": 3}
        limits |= dict.fromkeys(("max_str_len", "max_map_len", "max_ext_len"), 0)
        with self.path.open("rb") as file:
            file.seek(self.header_nbytes)
            part = _Part(file, self.nbytes - self.header_nbytes)
            unpacker = msgpack.Unpacker(part, read_size=_READ_NBYTES, max_buffer_size=4 * OBJECT_NBYTES_MAX, **limits)
            for count in itertools.count():
                place = self.header_nbytes + unpacker.tell()
                try:
                    block = unpacker.unpack()
                except msgpack.OutOfData:
                    if place < self.nbytes:
                        yield f"ends within a block, at byte {place}, after {count} blocks"
                    return
                except (ValueError, msgpack.UnpackException):
                    block = None
                match block:
                    case [float(time_s), int(checksum), bytes(content)] if (
                        zlib.crc32(content) == checksum and abs(time_s) <= CLOCK_S_MAX
                    ):
                        yield _Block(place, time_s, content)
                    case _:
                        yield f"damaged at byte {place}, after {count} blocks"
                        return


@dataclass(frozen=True, slots=True)
class Recording:
    """Represents the recording of a job: the files of all its ranks, ordered by rank and incarnation."""

    job: str
    size: int
    ranks: tuple[RankRecording, ...]
    missing: tuple[int, ...]

    @property
    def began_at(self) -> float:
        """Time at which the first rank began, in seconds since 1970."""
        return min(each.header.unix_s for each in self.ranks)

    @property
    def restarted(self) -> frozenset[int]:
        """Ranks that have files from several processes."""
        counts = Counter(each.rank for each in self.ranks)
        return frozenset(rank for rank, count in counts.items() if count > 1)


def read_recording(folder: str | os.PathLike[str], job: str | None = None) -> Recording:
    """Open the recording of one job, and check each event.

    Truncated or damaged files are read up to the damage, and files that are not recordings are ignored. A warning is
    logged in both cases.

    Args:
        folder: Folder of the recording, as passed to ``record=``.
        job: Name of the job, if the folder has recordings of several jobs.

    Raises:
        RecordingError: No recording can be read, the job is ambiguous, a rank has two files, or a file has content that
            no rank writes.
    """
    root = Path(folder)
    if not root.is_dir():
        raise RecordingError(f"the recording must be a folder, got {root}; asyncdist run --record FOLDER writes one")
    paths = sorted(root.glob(f"*{SUFFIX}"))
    if not paths:
        raise RecordingError(f"{root} has no recording, because no file in it ends with {SUFFIX}")
    found, refused = _open_all(paths)
    if not found and refused:
        raise refused[0]
    if not found:
        raise RecordingError(f"{root} has no recording, because all its files that end with {SUFFIX} are empty")
    chosen = _chosen_job(root, found, job)
    ranks = tuple(sorted((_examined(each) for each in found if each.header.job == chosen), key=_place))
    for each, other in itertools.pairwise(ranks):
        if _place(each) == _place(other):
            raise RecordingError(
                f"rank {each.rank} must have one recording of job {chosen}, got {each.path} and {other.path}; move one "
                "of them out of the folder"
            )
        if each.header.size != other.header.size:
            raise RecordingError(
                f"all recordings of job {chosen} must have the same number of ranks, got {each.header.size} in "
                f"{each.path} and {other.header.size} in {other.path}"
            )
    for each in ranks:
        if each.damage:
            logger.warning("%s: %s", printable(str(each.path)), each.damage)
    for error in refused:
        logger.warning("%s; the file is ignored", printable(str(error)))
    size = ranks[0].header.size
    missing = sorted(set(range(size)) - {each.rank for each in ranks})
    recording = Recording(chosen, size, ranks, tuple(missing))
    if (told := other_version_warning(recording)) is not None:
        logger.warning("%s; waits of unknown kinds are shown by their keys", printable(told))
    return recording


def other_version_warning(recording: Recording) -> str | None:
    """Return a sentence that names both versions if another version of asyncdist wrote the recording, or None."""
    for each in recording.ranks:
        if each.header.asyncdist != __version__:
            return f"{each.path} was written by asyncdist {each.header.asyncdist}, but this is asyncdist {__version__}"
    return None


def _chosen_job(root: Path, found: Sequence[RankRecording], job: str | None) -> str:
    """Return the job to read. Raise RecordingError if ``job`` does not exist, or is None and there are several jobs."""
    jobs = sorted({each.header.job: each.header.unix_s for each in found}.items(), key=lambda item: item[1])
    names = [name for name, _ in jobs]
    known = ", ".join(names[-_JOB_COUNT_MAX:])
    if len(names) > _JOB_COUNT_MAX:
        known = f"{len(names) - _JOB_COUNT_MAX} more, {known}"
    if job is not None and job not in names:
        raise RecordingError(f"{root} has no recording of job {job}; its jobs, from the oldest: {known}")
    if job is None and len(names) > 1:
        raise RecordingError(
            f"{root} has recordings of {len(names)} jobs, from the oldest: {known}; choose one with --job, as in --job "
            f"{names[-1]}"
        )
    return job or names[0]


def _open_all(paths: Sequence[Path]) -> tuple[list[RankRecording], list[RecordingError]]:
    """Return the recordings in the files that can be read and are not empty, and an error for each other file."""
    found, refused, schemas = [], [], dict[Any, EventSchema]()
    for path in paths:
        try:
            each = _open(path, schemas)
        except RecordingError as error:
            refused.append(error)
        else:
            found += [each] if each is not None else []
    return found, refused


def _place(each: RankRecording) -> tuple[int, int]:
    return each.rank, each.incarnation


class _Part:
    """Reads at most ``nbytes`` bytes of a file, from its current position."""

    def __init__(self, file: BinaryIO, nbytes: int) -> None:
        self._file = file
        self._left = nbytes

    def read(self, nbytes: int) -> bytes:
        """Return the next ``nbytes`` bytes, or fewer at the end."""
        data = self._file.read(min(nbytes, self._left))
        self._left -= len(data)
        return data


def _open(path: Path, schemas: dict[Any, EventSchema]) -> RankRecording | None:
    """Read the header of a file, and return its recording, or None if it is empty. ``schemas`` is a cache."""
    if not path.is_file():
        raise RecordingError(f"{path} must be a file")
    try:
        with path.open("rb") as file:
            if not os.fstat(file.fileno()).st_size:
                return None
            unpacker = msgpack.Unpacker(file, read_size=_READ_NBYTES, max_buffer_size=4 * OBJECT_NBYTES_MAX)
            unpacker.skip()
            header_nbytes = unpacker.tell()
            file.seek(0)
            data = file.read(header_nbytes)
    except msgpack.OutOfData:
        raise RecordingError(f"{path} ends within its header, because its rank was killed when it began") from None
    except OSError as error:
        raise RecordingError(f"{path} cannot be read: {error}") from error
    except (ValueError, msgpack.UnpackException):
        raise RecordingError(f"{path} must be a recording of asyncdist, but it has other content") from None
    header = _checked(path, data)
    key = header.size, tuple((name, tuple(fields)) for name, fields in header.kinds.items())
    if key not in schemas:
        schemas[key] = EventSchema(header.kinds, header.size)
    events = schemas[key]
    if events.unknown:
        names = ", ".join(events.unknown)
        logger.warning("%s has events that this version does not know and ignores: %s", printable(str(path)), names)
    return RankRecording(path, header, events, header_nbytes)


def _examined(each: RankRecording) -> RankRecording:
    """Check all blocks of a file, and return its recording, with the current size and any damage."""
    try:
        each = replace(each, nbytes=each.path.stat().st_size)
        return replace(each, damage=each.check())
    except OSError as error:
        raise RecordingError(f"{each.path} cannot be read: {error}") from error


def _checked(path: Path, data: bytes) -> Header:
    try:
        preamble = schema.read_preamble(data)
    except (ValueError, RecursionError):
        preamble = schema.Preamble()
    if preamble.format != FORMAT or len(data) > OBJECT_NBYTES_MAX:
        raise RecordingError(f"{path} must be a recording of asyncdist, but it has other content")
    if preamble.version != VERSION:
        raise RecordingError(
            f"{path} must have format version {VERSION} for asyncdist {__version__}, got {preamble.version!r:.80}; "
            f"read it with asyncdist {preamble.asyncdist!r:.80}, which wrote it"
        )
    try:
        return schema.read_header(data)
    except (ValueError, RecursionError) as error:
        raise RecordingError(f"{path} has an invalid header: {schema.why_refused(error)}") from error


class _Block(NamedTuple):
    """Block of a file: its offset in bytes, its time, and its undecoded events."""

    place: int
    time_s: float
    content: bytes


class MessageCounts:
    """Counts sent and received messages. A restarted rank's counts include all of its processes."""

    def __init__(self) -> None:
        self.sent: Final = Counter[Line]()
        self.received: Final = Counter[Line]()

    def add(self, rank: int, event: Event) -> None:
        """Count an event ``sent`` or ``received`` of ``rank``, unless the event belongs to a policy."""
        tag = int(event.get("tag"))
        if not tags.is_for_users(tag):
            return
        if event.kind == "sent":
            self.sent[rank, int(event.get("dest")), tag] += 1
        else:
            self.received[int(event.get("source")), rank, tag] += 1

    def lost(self, ranks: Container[int]) -> list[tuple[int, Line]]:
        """Return the numbers of messages that were sent to ``ranks`` but not received, largest first."""
        lost = ((count - self.received[line], line) for line, count in self.sent.items() if line[1] in ranks)
        return sorted((each for each in lost if each[0] > 0), reverse=True)
