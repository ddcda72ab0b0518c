"""Writes and reads checkpoint files.

Each file is written in a private folder and then moved into the checkpoint's folder. The manifest is moved last.
:mod:`asyncdist.functional.checkpoints.population_checkpoint` describes the structure of the folder. All functions block
on disk I/O.
"""

from __future__ import annotations

import contextlib
import copy
import fcntl
import logging
import os
import re
import shutil
import stat
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, Literal, TypeAlias, get_args

import torch

from asyncdist import validation
from asyncdist.functional.checkpoints import checkpoint_state, manifests, safetensors_model
from asyncdist.functional.checkpoints.manifests import Moment
from asyncdist.trust import new_files, torch_files

logger = logging.getLogger("asyncdist.population_checkpoint")

ModelFormat: TypeAlias = Literal["torch", "safetensors"]

#: Inode of each checkpoint's folder that simulations and replays in this process have created.
_simulated: Final = dict[Path, int]()
#: Folders of other programs about which this process has logged a warning.
_reported: Final = set[Path]()
#: Names of a checkpoint's entries besides the manifest. NFS renames a deleted file to ``.nfs...`` if it is still open.
_FILE_NAME: Final = re.compile(r"rank-\d{5,}\.(pt|safetensors)|\.part-[0-9a-f]+-owner|\.nfs[0-9a-f]+")
_FOLDER_NAME: Final = re.compile(rf"{manifests.RESTARTED}\d{{5,}}|\.part-[0-9a-f]+")
_PIECE_NBYTES: Final = 1 << 22
_FOLDER: Final = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC


def check_format(format: ModelFormat) -> None:
    """Raise ValueError if the format is unknown, and ModuleNotFoundError if its package is missing."""
    if format not in get_args(ModelFormat):
        validation.refuse("format", format, validation.one_of(get_args(ModelFormat)))
    if format == "safetensors":
        safetensors_model.check_installed()


def new_folder(place: Path, *, is_simulated: bool = False) -> Path:
    """Create the folder of the next checkpoint in ``place``, and return its path."""
    place.mkdir(parents=True, exist_ok=True)
    number = max(manifests.numbers(place), default=0) + 1
    while True:
        with contextlib.suppress(FileExistsError):  # raised if another job has just created this folder
            folder = place / manifests.name_of(number)
            folder.mkdir()
            if is_simulated:
                _simulated[folder.resolve()] = folder.stat().st_ino
            else:
                _simulated.pop(folder.resolve(), None)
            return folder
        number += 1


def is_simulated(folder: Path) -> bool:
    """Return whether a simulation or a replay in this process has begun the checkpoint in this folder."""
    with contextlib.suppress(FileNotFoundError):
        return _simulated.get(folder.resolve()) == folder.stat().st_ino
    return False


@contextlib.contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Lock the folder of an unfinished checkpoint (flock(2)) during the block, so that no other job deletes it.

    The kernel releases the lock if the process is killed. Some network drives do not support locks.
    """
    with contextlib.ExitStack() as stack:
        with contextlib.suppress(OSError):
            descriptor = os.open(folder, _FOLDER)
            stack.callback(_unlock, descriptor)
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield


def _unlock(descriptor: int) -> None:
    with contextlib.suppress(OSError):  # a forked child may still have the descriptor
        fcntl.flock(descriptor, fcntl.LOCK_UN)
    os.close(descriptor)


def is_locked(folder: Path) -> bool:
    """Return whether a process is writing into a folder."""
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


def finish(folder: Path, entries: Sequence[Mapping[str, Any]], keep: int | None, moment: Moment | None = None) -> None:
    """Write the manifest, which makes the checkpoint valid, and delete all but the newest ``keep`` checkpoints."""
    write_text(folder / manifests.MANIFEST, manifests.manifest_of(entries, moment))
    if keep is not None:
        _delete_old(folder, keep)


def write_text(path: Path, text: str) -> None:
    """Write a file of a checkpoint's folder atomically: it exists completely, or not at all."""
    with new_files.entered(path.parent, follows=False) as opened:
        _write_atomically(opened, path, lambda written: written.write_text(text))
    _sync(path.parent)


def write_rank(folder: Path, index: int, state: Mapping[str, Any], format: ModelFormat) -> dict[str, Any]:
    """Write the files of the rank at position ``index`` of the population. Return its entry in the manifest."""
    stem, entry = folder / manifests.stem_of(index), {}

    def write_model(path: Path) -> None:
        nonlocal state
        rest, tied = safetensors_model.write_model(path, state["model"])
        state = {**state, "model": rest, "tied": tied}

    with new_files.entered(folder, follows=False) as opened:
        if format == "safetensors":
            entry["safetensors"] = _write_atomically(opened, stem.with_suffix(".safetensors"), write_model)
        try:
            return {**_write_atomically(opened, stem.with_suffix(".pt"), lambda path: _save(state, path)), **entry}
        except BaseException:
            if entry:  # the weights alone are useless
                with contextlib.suppress(OSError):
                    os.unlink(stem.with_suffix(".safetensors").name, dir_fd=opened)
            raise


def read_rank(folder: Path, entry: Mapping[str, Any], *, is_mapped: bool = False) -> dict[str, Any]:
    """Return the state written by :func:`write_rank`, memory-mapped if ``is_mapped``.

    Raise ValueError if a file is incomplete or damaged.
    """
    stem: Path = folder / entry["stem"]
    path = stem.with_suffix(".pt")
    _check_whole(path, entry)
    with reading(path):
        state: dict[str, Any] = torch_files.load(path, is_mapped=is_mapped)
        checkpoint_state.check_parts(state)
    if entry.get("safetensors") is not None:
        path = stem.with_suffix(".safetensors")
        _check_whole(path, entry["safetensors"])
        with reading(path):
            state["model"] = safetensors_model.read_model(path, state["model"], state["tied"])
    return state


def read_extra(folder: Path, entry: Mapping[str, Any]) -> Any:
    """Return the ``extra`` of a file written by :func:`write_rank`. Other parts of the file are not copied."""
    path = folder / f"{entry['stem']}.pt"
    _check_whole(path, entry)
    with reading(path):
        return copy.deepcopy(torch_files.load(path, is_mapped=True)["extra"])


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


def _delete_old(newest: Path, keep: int) -> None:
    """Delete unfinished checkpoints, and all complete checkpoints except the ``keep`` newest. Follow no symbolic links.

    A checkpoint that another job is writing is kept, and a warning is logged. The same holds for a folder that contains
    other files but no manifest of a population checkpoint, because another program may have written it. A simulation
    keeps all checkpoints that no simulation in this process has written, in addition to its own ``keep`` newest.
    """
    place, own_number = newest.parent, manifests.number_of(newest.name)
    folders = [place / manifests.name_of(number) for number in manifests.numbers(place) if number < own_number]
    older = [folder for folder in folders if not folder.is_symlink()]
    if is_simulated(newest):
        older = [folder for folder in older if is_simulated(folder)]
    older = [folder for folder in older if _is_own(folder)]
    whole = [folder for folder in older if (folder / manifests.MANIFEST).is_file()]
    outdated = whole[: max(0, len(whole) - (keep - 1))]
    for folder in older:
        if folder in whole and folder not in outdated:
            continue
        if folder not in whole and is_locked(folder):
            logger.warning("another job is writing %s, and both delete old checkpoints: give each job a folder", folder)
            continue
        try:
            # The manifest is deleted first, so that a partly deleted checkpoint is not valid.
            with contextlib.suppress(FileNotFoundError), new_files.entered(folder, follows=False) as opened:
                os.unlink(manifests.MANIFEST, dir_fd=opened)
        except PermissionError as error:
            logger.warning("cannot delete the old checkpoint %s (%s); delete it yourself", folder, error.strerror)
            continue
        shutil.rmtree(folder, ignore_errors=True)  # rmtree does not follow links either


def _is_own(folder: Path) -> bool:
    """Return whether a folder is a population checkpoint, or has only entries of an unfinished one.

    If not, log a warning, once for each folder.
    """
    if manifests.is_ours(folder):
        return True  # the user may have added files
    try:
        with os.scandir(folder) as entries:
            other = next((entry.name for entry in entries if not _is_of_checkpoint(entry)), None)
    except OSError:  # another job may have deleted the folder
        return False
    if other is not None and folder.resolve() not in _reported:
        _reported.add(folder.resolve())
        text = "%s is not deleted, because %r in it is not of a population checkpoint: save into a folder of your own"
        logger.warning(text, folder, other)
    return other is None


def _is_of_checkpoint(entry: os.DirEntry[str]) -> bool:
    if entry.is_dir(follow_symlinks=False):
        return _FOLDER_NAME.fullmatch(entry.name) is not None
    return _FILE_NAME.fullmatch(entry.name) is not None
