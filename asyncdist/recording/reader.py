"""Reads recordings, which :mod:`asyncdist.recording.writer` describes, with all that can be wrong with them."""

from __future__ import annotations

import itertools
import logging
import os
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, BinaryIO, Final

import msgpack

from asyncdist.errors import AsyncdistError
from asyncdist.recording.events import KINDS, Event
from asyncdist.recording.writer import FORMAT, SUFFIX, VERSION

logger = logging.getLogger("asyncdist.recording.reader")

#: A block is some 32 KiB; a foreign file may say that it has a text of 4 GiB.
_OBJECT_NBYTES_MAX: Final = 1 << 22
#: Jobs that are named where a folder has several, the latest ones.
_JOB_COUNT_MAX: Final = 8
#: What the header must have, and of which type.
_HEADER: Final[Mapping[str, type]] = {
    **dict.fromkeys(("format", "job", "transport", "hostname", "script", "script_digest"), str),
    **dict.fromkeys(("version", "rank", "size", "incarnation"), int),
    **dict.fromkeys(("clock_s", "unix_s"), float),
    "kinds": dict,
    "arguments": list,
}


class RecordingError(AsyncdistError):
    """A recording cannot be read; the text names the file and says why."""


@dataclass(frozen=True, slots=True)
class RankRecording:
    """Holds what one process of a rank has written down.

    Attributes:
        path: of the file.
        header: its beginning; see :func:`asyncdist.recording.writer.header_of`.
        nbytes: how much was there when it was opened: a rank that goes on writes more, which is not read.
        damage: what is wrong with the end of the file; "" where nothing is.
    """

    path: Path
    header: Mapping[str, Any]
    nbytes: int = field(default=0, compare=False)
    damage: str = field(default="", compare=False)

    @property
    def rank(self) -> int:
        """The rank."""
        return int(self.header["rank"])

    @property
    def incarnation(self) -> int:
        """How often the rank had been started again."""
        return int(self.header["incarnation"])

    def unix_s(self, time_s: float) -> float:
        """Return the time of an event in seconds since 1970, as this host's clock says."""
        return float(self.header["unix_s"] + time_s - self.header["clock_s"])

    def events(self) -> Iterator[Event]:
        """Read the events, oldest first; a file may have millions. It ends where the file is damaged.

        They are the same each time, also where the rank goes on.
        """
        with self.path.open("rb") as file:
            unpacker = _unpacker(_Beginning(file, self.nbytes))
            next(unpacker)
            yield from _events(unpacker, list(self.header["kinds"]))


@dataclass(frozen=True, slots=True)
class Recording:
    """Holds what all ranks of a job have written down.

    Attributes:
        job: its name.
        size: the number of ranks.
        ranks: the files, by rank and incarnation.
        missing: ranks without a file.
    """

    job: str
    size: int
    ranks: tuple[RankRecording, ...]
    missing: tuple[int, ...]

    @property
    def began_at(self) -> float:
        """When the first rank began, in seconds since 1970."""
        return min(float(each.header["unix_s"]) for each in self.ranks)


def read_recording(folder: str | os.PathLike[str], job: str | None = None) -> Recording:
    """Open the recording of one job.

    Files that end too early, or that are damaged, count as far as they can be read; those that are no recordings at all
    are left out. Warnings say so.

    Args:
        folder: that of ``record=``.
        job: which one, where the folder has recordings of several.

    Raises:
        RecordingError: there is none that can be read, it is of several jobs, or a rank has two files.
    """
    root = Path(folder)
    if not root.is_dir():
        raise RecordingError(f"{root} is no folder; a recording is what asyncdist run --record FOLDER writes")
    paths = sorted(root.glob(f"*{SUFFIX}"))
    if not paths:
        raise RecordingError(f"{root} has no recording: no file that ends with {SUFFIX}")
    found, refused = _open_all(paths)
    if not found and refused:
        raise refused[0]
    if not found:
        raise RecordingError(f"{root} has no recording that was begun: no file that ends with {SUFFIX} has anything")
    jobs = sorted({each.header["job"]: each.header["unix_s"] for each in found}.items(), key=lambda item: item[1])
    names = [name for name, _ in jobs]
    known = ", ".join(names[-_JOB_COUNT_MAX:])
    if len(names) > _JOB_COUNT_MAX:
        known = f"{len(names) - _JOB_COUNT_MAX} more, {known}"
    if job is not None and job not in names:
        raise RecordingError(f"{root} has no recording of job {job}; those that it has, from the oldest: {known}")
    if job is None and len(names) > 1:
        raise RecordingError(
            f"{root} has recordings of {len(names)} jobs, from the oldest: {known}; say which (--job {names[-1]})"
        )
    chosen = job or names[0]
    ranks = tuple(sorted((_looked_at(each) for each in found if each.header["job"] == chosen), key=_place))
    for each, other in itertools.pairwise(ranks):
        if _place(each) == _place(other):
            raise RecordingError(
                f"rank {each.rank} has two recordings of job {chosen}, {each.path} and {other.path}: what it did would"
                " count twice; take one of them out of the folder"
            )
    for each in ranks:
        if each.damage:
            logger.warning("%s: %s", each.path, each.damage)
    for error in refused:
        logger.warning("%s; it is left out", error)
    size = max(each.header["size"] for each in ranks)
    missing = sorted(set(range(size)) - {each.rank for each in ranks})
    return Recording(chosen, size, ranks, tuple(missing))


def _open_all(paths: Sequence[Path]) -> tuple[list[RankRecording], list[RecordingError]]:
    """Return the files that can be read and hold something, and why others cannot be read."""
    found, refused = [], []
    for path in paths:
        try:
            each = _open(path)
        except RecordingError as error:
            refused.append(error)
        else:
            found += [each] if each is not None else []
    return found, refused


def _place(each: RankRecording) -> tuple[int, int]:
    return each.rank, each.incarnation


class _Beginning:
    """Reads so many bytes of a file, and no more."""

    def __init__(self, file: BinaryIO, nbytes: int) -> None:
        self._file = file
        self._left = nbytes

    def read(self, nbytes: int) -> bytes:
        """Return the next bytes, so many at most; none at the end."""
        data = self._file.read(min(nbytes, self._left))
        self._left -= len(data)
        return data


def _unpacker(file: BinaryIO | _Beginning) -> msgpack.Unpacker:
    return msgpack.Unpacker(file, max_buffer_size=4 * _OBJECT_NBYTES_MAX, max_bin_len=_OBJECT_NBYTES_MAX)


def _open(path: Path) -> RankRecording | None:
    """Read a file's header; None where nothing was written."""
    if not path.stat().st_size:
        return None
    try:
        with path.open("rb") as file:
            header = _checked(path, next(_unpacker(file)))
    except StopIteration:
        raise RecordingError(f"{path} ends within its header: its rank was killed as it began") from None
    except OSError as error:
        raise RecordingError(f"{path} cannot be read: {error}") from error
    except (ValueError, msgpack.exceptions.UnpackException, RecursionError):
        raise RecordingError(f"{path} is no recording of asyncdist") from None
    return RankRecording(path, header)


def _looked_at(each: RankRecording) -> RankRecording:
    """Look whether a file's blocks are whole: that reads all of it, so it is done for those of the chosen job alone."""
    damage = ""
    try:
        with each.path.open("rb") as file:
            nbytes = os.fstat(file.fileno()).st_size
            unpacker = _unpacker(_Beginning(file, nbytes))
            next(unpacker)
            for block in _blocks(unpacker, nbytes):
                if isinstance(block, str):
                    damage = block
    except OSError as error:
        raise RecordingError(f"{each.path} cannot be read: {error}") from error
    return replace(each, nbytes=nbytes, damage=damage)


def _checked(path: Path, header: Any) -> Mapping[str, Any]:
    if not isinstance(header, dict) or header.get("format") != FORMAT:
        raise RecordingError(f"{path} is no recording of asyncdist")
    if header.get("version") != VERSION:
        raise RecordingError(
            f"{path} has version {header.get('version')!r} of the format, written by asyncdist "
            f"{header.get('asyncdist')!r}; this one reads version {VERSION}"
        )
    for name, kind in _HEADER.items():
        if not isinstance(header.get(name), kind):
            raise RecordingError(f"{path}: {name} of its header is {header.get(name)!r:.80}, no {kind.__name__}")
    unknown = [kind for kind, fields in header["kinds"].items() if list(KINDS.get(kind, ()))[: len(fields)] != fields]
    if unknown:
        logger.warning("%s has events that this version does not know, and leaves out: %s", path, ", ".join(unknown))
    return header


def _blocks(unpacker: msgpack.Unpacker, nbytes: int) -> Iterator[tuple[float, bytes] | str]:
    """Yield each block's time and content; at the end what is wrong with the file's ``nbytes`` bytes, if it is."""
    count = 0
    while True:
        place = unpacker.tell()
        try:
            block = unpacker.unpack()
        except msgpack.exceptions.OutOfData:
            if place < nbytes:
                yield f"ends within a block, at byte {place}, after {count} blocks"
            return
        except (ValueError, msgpack.exceptions.UnpackException):
            yield f"damaged at byte {place}, after {count} blocks"
            return
        match block:
            case [float(time_s), int(checksum), bytes(content)] if zlib.crc32(content) == checksum:
                count += 1
                yield time_s, content
            case _:
                yield f"damaged at byte {place}, after {count} blocks"
                return


def _events(unpacker: msgpack.Unpacker, kinds: list[str]) -> Iterator[Event]:
    for block in _blocks(unpacker, 0):
        if isinstance(block, str):
            return
        time_s, content = block
        inner = msgpack.Unpacker(max_buffer_size=len(content) or 1, use_list=False)
        inner.feed(content)
        for code, offset_us, *fields in inner:
            kind = kinds[code]
            if kind in KINDS:
                yield Event(time_s + offset_us * 1e-6, kind, tuple(fields))
