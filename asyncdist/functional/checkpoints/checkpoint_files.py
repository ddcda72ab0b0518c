"""Writes and reads checkpoint files.

Each file is written in a private folder and then moved into the checkpoint's folder. The manifest is moved last.
:mod:`asyncdist.functional.checkpoints.population_checkpoint` describes the structure of the folder. All functions block
on disk I/O.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import logging
import math
import os
import shutil
import stat
import weakref
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Final, Literal, TypeAlias, get_args

import msgspec
import torch

from asyncdist import validation
from asyncdist._version import __version__
from asyncdist.functional.checkpoints import checkpoint_state, safetensors_model
from asyncdist.trust import new_files, torch_files

logger = logging.getLogger("asyncdist.population_checkpoint")

ModelFormat: TypeAlias = Literal["torch", "safetensors"]

_FORMAT: Final = "population checkpoint of asyncdist"
_VERSION: Final = 1
_MANIFEST: Final = "manifest.json"
_PREFIX: Final = "checkpoint-"
_PIECE_NBYTES: Final = 1 << 22
#: Maximum size of a manifest in bytes. A rank's entry takes about 150 bytes.
_MANIFEST_NBYTES_MAX: Final = 1 << 26
_FOLDER: Final = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC


class _FileEntry(msgspec.Struct, frozen=True):
    nbytes: Annotated[int, msgspec.Meta(ge=0, le=1 << 60)]
    crc32: Annotated[int, msgspec.Meta(ge=0, lt=1 << 32)]


class _RankEntry(_FileEntry, frozen=True):
    """Manifest entry of a rank: its file and, in the safetensors format, the file with its weights."""

    metric: float | None
    metric_mode: Literal["min", "max"]
    safetensors: _FileEntry | None = None
    rank: Annotated[int, msgspec.Meta(ge=0, lt=1 << 32)] | None = None
    replica_size: Annotated[int, msgspec.Meta(ge=1, le=1 << 16)] = 1


_RankEntries: TypeAlias = Annotated[list[_RankEntry], msgspec.Meta(min_length=1, max_length=1 << 16)]


def check_format(format: ModelFormat) -> None:
    """Raise ValueError if the format is unknown, and ModuleNotFoundError if its package is missing."""
    if format not in get_args(ModelFormat):
        validation.refuse("format", format, validation.one_of(get_args(ModelFormat)))
    if format == "safetensors":
        safetensors_model.check_installed()


def new_folder(place: Path) -> Path:
    """Create the folder of the next checkpoint in ``place``, and return its path."""
    place.mkdir(parents=True, exist_ok=True)
    number = max(_numbers(place), default=0) + 1
    while True:
        with contextlib.suppress(FileExistsError):  # raised if another job has just created this folder
            folder = place / _name(number)
            folder.mkdir()
            return folder
        number += 1


class FolderLock:
    """Locks the folder of an unfinished checkpoint (flock(2)), so that no other job deletes it.

    The kernel releases the lock if the process is killed. Some network drives do not support locks.
    """

    def __init__(self, folder: Path) -> None:
        self._release: Callable[[], object] = lambda: None
        with contextlib.suppress(OSError):
            descriptor = os.open(folder, _FOLDER)
            self._release = weakref.finalize(self, _unlock, descriptor)
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)

    def release(self) -> None:
        """Release the lock. Calls after the first do nothing."""
        self._release()


def _unlock(descriptor: int) -> None:
    with contextlib.suppress(OSError):  # a forked child may still have the descriptor
        fcntl.flock(descriptor, fcntl.LOCK_UN)
    os.close(descriptor)


def _is_locked(folder: Path) -> bool:
    try:
        descriptor = os.open(folder, _FOLDER)
    except OSError:
        return False
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        return False
    finally:
        os.close(descriptor)
    return False


def finish(folder: Path, entries: Sequence[Mapping[str, Any]], keep: int | None) -> None:
    """Write the manifest, which makes the checkpoint valid, and delete all but the newest ``keep`` checkpoints."""
    manifest = {"format": _FORMAT, "version": _VERSION, "asyncdist": __version__, "files": entries}
    with new_files.entered(folder, follows=False) as opened:
        _write_atomically(opened, folder / _MANIFEST, lambda path: path.write_text(json.dumps(manifest, indent=1)))
    _sync(folder)
    if keep is not None:
        _delete_old(folder, keep)


def write_rank(folder: Path, index: int, state: Mapping[str, Any], format: ModelFormat) -> dict[str, Any]:
    """Write the files of the rank at position ``index`` of the population. Return its entry in the manifest."""
    stem, entry = folder / f"rank-{index:05}", {}

    def write_model(path: Path) -> None:
        nonlocal state
        rest, tied = safetensors_model.write_model(path, state["model"])
        state = {**state, "model": rest, "tied": tied}

    with new_files.entered(folder, follows=False) as opened:
        if format == "safetensors":
            entry["safetensors"] = _write_atomically(opened, stem.with_suffix(".safetensors"), write_model)
        return {**_write_atomically(opened, stem.with_suffix(".pt"), lambda path: _save(state, path)), **entry}


def read_rank(folder: Path, index: int, entry: Mapping[str, Any]) -> dict[str, Any]:
    """Return the state written by :func:`write_rank`. Raise ValueError if a file is incomplete or damaged."""
    stem = folder / f"rank-{index:05}"
    path = stem.with_suffix(".pt")
    _check_whole(path, entry)
    with reading(path):
        state: dict[str, Any] = torch_files.load(path)
        checkpoint_state.check_parts(state)
    _read_weights(stem, entry, state)
    return state


def read_model(folder: Path, index: int, entry: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the model's state written by :func:`write_rank`, memory-mapped. The optimizer's state is not read."""
    stem = folder / f"rank-{index:05}"
    path = stem.with_suffix(".pt")
    _check_whole(path, entry)
    with reading(path):
        state: dict[str, Any] = torch_files.load(path, is_mapped=True)
        checkpoint_state.check_parts(state)
    _read_weights(stem, entry, state)
    model: Mapping[str, Any] = state["model"]
    return model


def _read_weights(stem: Path, entry: Mapping[str, Any], state: dict[str, Any]) -> None:
    if entry.get("safetensors") is not None:
        path = stem.with_suffix(".safetensors")
        _check_whole(path, entry["safetensors"])
        with reading(path):
            state["model"] = safetensors_model.read_model(path, state["model"], state["tied"])


@contextlib.contextmanager
def reading(path: Path, allowed: str = "the file of a rank in a population checkpoint") -> Iterator[None]:
    """Convert any error about the content of the file ``path`` to a ValueError that names the file."""
    try:
        yield
    except (OSError, ImportError, MemoryError):
        raise
    except Exception as error:
        raise ValueError(
            f"{path} must be {allowed}, but reading it raised {type(error).__name__}: {checkpoint_state.reason(error)}"
        ) from error


def _save(state: Mapping[str, Any], path: Path) -> None:
    with path.open("wb") as file:
        torch.save(dict(state), file)


def _write_atomically(folder: int, path: Path, write: Callable[[Path], object]) -> dict[str, Any]:
    """Write a file in a private folder, move it to ``path``, and return its size and checksum.

    If writing fails, delete the file.
    """
    try:
        with new_files.moved_into(folder, path.parent) as inner:
            written = inner / path.name
            write(written)
            _sync(written)
            return {"nbytes": written.stat().st_size, "crc32": _crc_of(written)}
    except Exception as error:
        cause = _cause_of(error)
        if cause is not None and cause.filename is None:
            raise OSError(cause.errno, cause.strerror, str(path)) from error
        raise


def _cause_of(error: BaseException | None) -> OSError | None:
    """Return the OSError that caused ``error``, if any. torch raises a different error if it cannot close a file."""
    while error is not None and not isinstance(error, OSError):
        error = error.__context__
    return error


def _check_whole(path: Path, entry: Mapping[str, Any]) -> None:
    found = path.stat()
    if not stat.S_ISREG(found.st_mode):  # opening a named pipe would block
        raise ValueError(f"{path} must be a regular file")
    nbytes = found.st_size
    if nbytes != entry["nbytes"] or _crc_of(path) != entry["crc32"]:
        instead = "another checksum" if nbytes == entry["nbytes"] else f"{nbytes} bytes"
        raise ValueError(
            f"{path} must have the {entry['nbytes']} bytes and the checksum of its manifest, got {instead}"
        )


def _crc_of(path: Path) -> int:
    crc = 0
    with path.open("rb") as file:
        while piece := file.read(_PIECE_NBYTES):
            crc = zlib.crc32(piece, crc)
    return crc


def _sync(path: Path) -> None:
    """Wait until a file, or the entries of a folder, are on disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _name(number: int) -> str:
    return f"{_PREFIX}{number:06}"


def _numbers(place: Path) -> list[int]:
    """Return the numbers of all checkpoint folders in ``place``, complete or not."""
    ends = [entry.name.removeprefix(_PREFIX) for entry in place.glob(f"{_PREFIX}*") if entry.is_dir()]
    return sorted(int(end) for end in ends if end.isdecimal() and _name(int(end)) == _PREFIX + end)


def _delete_old(newest: Path, keep: int) -> None:
    """Delete unfinished checkpoints, and all complete checkpoints except the ``keep`` newest. Follow no symbolic links.

    A checkpoint that another job is writing is kept, and a warning is logged.
    """
    older = [newest.parent / _name(number) for number in _numbers(newest.parent)]
    older = [folder for folder in older if folder.name < newest.name and not folder.is_symlink()]
    whole = [folder for folder in older if (folder / _MANIFEST).is_file()]
    for folder in older:
        if folder not in whole and _is_locked(folder):
            logger.warning("another job is writing %s, and both delete old checkpoints: give each job a folder", folder)
        elif folder not in whole[len(whole) - (keep - 1) :]:
            # The manifest is deleted first, so that a partly deleted checkpoint is not valid.
            with contextlib.suppress(FileNotFoundError), new_files.entered(folder, follows=False) as opened:
                os.unlink(_MANIFEST, dir_fd=opened)
            shutil.rmtree(folder, ignore_errors=True)  # rmtree does not follow links either


def find_newest(path: Path) -> tuple[Path, dict[str, Any]]:
    """Return the newest complete checkpoint in a folder and its manifest. Raise FileNotFoundError without one."""
    if (path / _MANIFEST).is_file():
        return path, _read_manifest(path)
    folders = [path / _name(number) for number in reversed(_numbers(path))] if path.is_dir() else []
    for folder in folders:
        if (folder / _MANIFEST).is_file():
            return folder, _read_manifest(folder)
        logger.warning("%s is unfinished and is ignored", folder)
    found = f"it contains only {len(folders)} unfinished checkpoints" if folders else "it contains no checkpoint"
    if path.name.startswith(_PREFIX) and path.is_dir():
        found = "it is an unfinished checkpoint"
    raise FileNotFoundError(f"{path} must contain a complete population checkpoint, but {found}")


def find_last(path: Path, count: int) -> list[tuple[Path, dict[str, Any]]]:
    """Return the newest ``count`` complete checkpoints in a folder and their manifests, oldest first."""
    if (path / _MANIFEST).is_file():
        return [find_newest(path)]
    folders = [path / _name(number) for number in _numbers(path)]
    found = [folder for folder in folders if (folder / _MANIFEST).is_file()][-count:]
    return [(folder, _read_manifest(folder)) for folder in found] or [find_newest(path)]


def _read_manifest(folder: Path) -> dict[str, Any]:
    try:
        with (folder / _MANIFEST).open("rb") as file:
            data = file.read(_MANIFEST_NBYTES_MAX + 1)
        manifest: Any = json.loads(data) if len(data) <= _MANIFEST_NBYTES_MAX else None
    except (ValueError, RecursionError):
        manifest = None
    if not isinstance(manifest, dict) or manifest.get("format") != _FORMAT:
        raise ValueError(
            f"{folder / _MANIFEST} must be the manifest of a population checkpoint, but it has other content"
        )
    if manifest.get("version") != _VERSION:
        raise ValueError(f"{folder} must have the checkpoint version {_VERSION}, got {manifest.get('version')!r:.80}")
    try:
        msgspec.convert(manifest.get("files"), _RankEntries)
    except (ValueError, OverflowError) as error:
        raise ValueError(f"{folder / _MANIFEST} must describe the file of each rank: {error}") from error
    return manifest


def saved_rank(entry: Mapping[str, Any], index: int) -> int:
    """Return the rank that saved the file at position ``index``, which is ``index`` itself in older manifests."""
    rank = entry.get("rank")
    return index if rank is None else int(rank)


def plan(files: Sequence[Mapping[str, Any]], size: int) -> list[int]:
    """Return, for each of ``size`` ranks, the saved rank whose file it loads.

    The ranks with the best metrics are chosen, and repeated if there are too few. If the saved population had replicas
    of several ranks, whole replicas are chosen by the mean metric of their ranks.
    """
    count: int = files[0].get("replica_size", 1)
    if size == len(files):
        return list(range(size))
    if len(files) % count or size % count:
        count = 1  # No whole replicas can be chosen, so choose single ranks.
    units = [files[first : first + count] for first in range(0, len(files), count)]
    return [unit * count + place for unit in _chosen(units, size // count) for place in range(count)]


def _chosen(units: Sequence[Sequence[Mapping[str, Any]]], size: int) -> list[int]:
    """Return, for each of ``size`` replicas, the saved replica that it loads.

    A replica is a list of its ranks' entries.
    """

    def quality(source: int) -> tuple[bool, float]:
        values = [each["metric"] for each in units[source]]
        if any(value is None or not -math.inf < value < math.inf for value in values):
            return False, 0.0
        value = math.fsum(values) / len(values)
        return True, -value if units[source][0]["metric_mode"] == "min" else value

    best_first = sorted(range(len(units)), key=quality, reverse=True)
    if size < len(units):
        if not any(quality(source)[0] for source in best_first):
            count = len(units[0])
            logger.warning(
                "the checkpoint has no finite metrics by which the best ranks could be chosen, so only the first %d of "
                "its %d ranks are loaded",
                size * count,
                len(units) * count,
            )
        return sorted(best_first[:size])
    return [*range(len(units)), *(best_first[i % len(units)] for i in range(size - len(units)))]
