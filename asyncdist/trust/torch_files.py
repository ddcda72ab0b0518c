"""Reads untrusted files in the format of ``torch.save`` without exhausting memory."""

from __future__ import annotations

import io
import mmap
import struct
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import IO, Any, Final

import torch

from asyncdist.trust import torch_pickles

#: First bytes of a file written by torch 1.6 or newer, by which ``torch.load`` recognises it.
_ARCHIVE: Final = b"PK\x03\x04"
#: Maximum total size of the tensors that are larger than their memory (expanded tensors).
_EXPANDED_NBYTES_MAX: Final = 1 << 30
#: Maximum total number of items in lists and dictionaries that occur repeatedly.
_REPEATED_COUNT_MAX: Final = 1_000_000
_CONTAINERS: Final = (Mapping, list, tuple, set, frozenset)
#: The end record of an archive: its mark, the size and offset of the list of records, and the size of a comment.
_END: Final = struct.Struct("<4s8xIIH")
#: The locator, which precedes the end record: its mark, and the offset of the end record for large archives.
_WIDE_LOCATOR: Final = struct.Struct("<4s4xQ4x")
#: The end record for large archives.
_WIDE_END: Final = struct.Struct("<4s36xQQ")
#: Number of pickles at the beginning of a file written by an older torch.
_PICKLE_COUNT: Final = 5


def load(path: Path, *, is_mapped: bool = False) -> Any:
    """Return the content of a file that may have been written by ``torch.save``.

    Args:
        is_mapped: Whether tensors are memory-mapped. Files written by torch before 1.6 cannot be mapped, and are read.

    Raises:
        ValueError: Loading the file could take more memory than its size. ``torch.save`` never writes such a file for
            tensors, numbers, strings, and lists and dictionaries of these.
        Exception: The file is not one that ``torch.load`` can read.
    """
    with path.open("rb") as file:
        is_archive = file.read(len(_ARCHIVE)) == _ARCHIVE
        if is_archive:
            check_archive(file)
        else:
            with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
                for _ in range(_PICKLE_COUNT):
                    torch_pickles.check(data)
    content = torch.load(path, map_location="cpu", weights_only=True, mmap=is_mapped and is_archive)
    check_expanded(content)
    storages = {each.untyped_storage()._cdata: each.untyped_storage().nbytes() for each in _plain_tensors(content)}
    if sum(storages.values()) > path.stat().st_size:
        raise ValueError("its tensors are larger than the file")
    return content


def check_expanded(content: Any) -> None:
    """Raise ValueError if tensors that are larger than their memory (expanded tensors) exceed 1 GiB in total.

    A file stores only the memory, so a copy of such a tensor could be much larger than the file. Also raise ValueError
    if the same lists and dictionaries are contained in others so often that a copy could be much larger.
    """
    nbytes = 0
    for tensor in _plain_tensors(content):
        own = tensor.numel() * tensor.element_size()
        nbytes += own if own > tensor.untyped_storage().nbytes() else 0
    if nbytes > _EXPANDED_NBYTES_MAX:
        raise ValueError(
            f"it has expanded tensors of {nbytes} bytes, and at most {_EXPANDED_NBYTES_MAX} are allowed; clone them"
        )


def _plain_tensors(content: Any) -> list[torch.Tensor]:
    """Return each tensor that has memory, once. Raise ValueError if the same containers occur in others too often."""
    found: dict[int, torch.Tensor] = {}
    counts: dict[int, int] = {}  # number of items in each container, including the containers in it, by its id
    begun = set[int]()
    left, item_count = [content], 0
    while left:
        container = left[-1]
        items = _items_of(container)
        inner = [each for each in items if isinstance(each, _CONTAINERS)]
        missing = [each for each in inner if id(each) not in counts]
        if missing and id(container) not in begun:
            begun.add(id(container))
            left += missing
            continue
        left.pop()
        if id(container) in counts:
            continue
        count = counts[id(container)] = len(items) + sum(counts.get(id(each), 0) for each in inner)
        item_count += len(items)
        if missing or count > item_count + _REPEATED_COUNT_MAX:  # items are missing in a cycle
            raise ValueError("it has lists or dictionaries that contain each other too often")
        found |= {id(each): each for each in items if isinstance(each, torch.Tensor) and _is_plain(each)}
    return list(found.values())


def _items_of(container: Any) -> list[Any]:
    """Return the values of a dictionary, the items of a list, tuple or set, or the argument itself."""
    if isinstance(container, Mapping):
        return list(container.values())
    return list(container) if isinstance(container, _CONTAINERS) else [container]


def _is_plain(tensor: torch.Tensor) -> bool:
    has_type = type(tensor) in (torch.Tensor, torch.nn.Parameter)
    return has_type and tensor.layout is torch.strided and not tensor.is_meta


def check_archive(file: IO[bytes]) -> None:
    """Raise ValueError if loading a file in the format of ``torch.save`` could take more memory than its size."""
    nbytes = file.seek(0, io.SEEK_END)
    _check_directory(file, nbytes)
    with zipfile.ZipFile(file) as archive:
        records = archive.infolist()
        if any(each.compress_type != zipfile.ZIP_STORED for each in records):
            raise ValueError("it has compressed records, which torch.save does not write")
        if sum(each.file_size for each in records) > nbytes:
            raise ValueError("its records are larger than the file")
        for each in records:
            if each.filename.lower().endswith("data.pkl"):  # torch ignores the case of names
                torch_pickles.check(io.BytesIO(archive.read(each)))


def _check_directory(file: IO[bytes], nbytes: int) -> None:
    """Raise ValueError unless an archive's list of records ends where the end record begins.

    Python reads the list directly before the end record, and torch reads it at the offset that the end record states.
    In any other archive, they could read different lists.
    """
    at = nbytes - _END.size
    mark, size, offset, comment_nbytes = _read(file, _END, at)
    has_wide, where = _read(file, _WIDE_LOCATOR, at - _WIDE_LOCATOR.size)
    if has_wide == b"PK\x06\x07":  # torch then uses only the 64-bit end record
        at -= _WIDE_LOCATOR.size + _WIDE_END.size
        mark_of_wide, size, offset = _read(file, _WIDE_END, at)
        mark = mark if mark_of_wide == b"PK\x06\x06" and where == at else b""
    if mark != b"PK\x05\x06" or comment_nbytes or offset + size != at:
        raise ValueError("its list of records is not where torch.save writes it")


def _read(file: IO[bytes], structure: struct.Struct, place: int) -> tuple[Any, ...]:
    file.seek(max(place, 0))
    return structure.unpack(file.read(structure.size).ljust(structure.size, b"\0"))
