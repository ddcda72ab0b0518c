"""Reads untrusted files of ``torch.save`` without exhausting memory."""

from __future__ import annotations

import io
import mmap
import pickletools
import zipfile
from pathlib import Path
from typing import IO, Any, Final

import torch

#: First bytes of a file of torch 1.6 or newer, by which ``torch.load`` recognises it.
_ARCHIVE: Final = b"PK\x03\x04"
#: Number of pickles at the beginning of a file of an older torch.
_PICKLE_COUNT: Final = 5


def load(path: Path, *, is_mapped: bool = False) -> Any:
    """Return the content of a file of ``torch.save``.

    Args:
        is_mapped: Whether tensors are memory-mapped. Files of torch before 1.6 cannot be mapped, and are read.

    Raises:
        ValueError: The file could take more memory than its size. ``torch.save`` writes no such file from tensors,
            numbers, strings, and lists and dictionaries of these.
        Exception: The file has other content.
    """
    with path.open("rb") as file:
        is_archive = file.read(len(_ARCHIVE)) == _ARCHIVE
        if is_archive:
            check_archive(file)
        else:
            with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
                for _ in range(_PICKLE_COUNT):
                    _check_pickle(data)
    return torch.load(path, map_location="cpu", weights_only=True, mmap=is_mapped and is_archive)


def check_archive(file: IO[bytes]) -> None:
    """Raise ValueError if a file of ``torch.save`` could take more memory than its size."""
    nbytes = file.seek(0, io.SEEK_END)
    with zipfile.ZipFile(file) as archive:
        records = archive.infolist()
        if any(each.compress_type != zipfile.ZIP_STORED for each in records):
            raise ValueError("it has compressed records, which torch.save does not write")
        if sum(each.file_size for each in records) > nbytes:
            raise ValueError("its records are larger than the file")
        for each in records:
            if each.filename.endswith("data.pkl"):
                _check_pickle(io.BytesIO(archive.read(each)))


def _check_pickle(data: Any) -> None:
    """Raise ValueError if a pickle has a bytearray, because a few bytes of pickle can create a huge bytearray.

    Args:
        data: Binary file, which is read to the end of the pickle.
    """
    for code, value, _ in pickletools.genops(data):
        if code.name == "GLOBAL" and str(value).endswith(" bytearray"):
            raise ValueError("it has a bytearray, which must be a tensor of uint8 or bytes")
