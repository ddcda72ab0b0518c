"""Identifies the source files of asyncdist, because a replay with other source files may differ."""

from __future__ import annotations

import functools
import os
import zlib
from pathlib import Path
from typing import Final

_ROOT: Final = str(Path(__file__).resolve().parents[2])


@functools.cache
def checksum_of_sources() -> int:
    """Return the CRC-32 of the names and sizes of all source files of ``asyncdist`` and ``protocols``."""
    found: list[tuple[str, int]] = []
    for package in ("asyncdist", "protocols"):
        for folder, subfolders, names in os.walk(f"{_ROOT}/{package}"):
            subfolders[:] = [name for name in subfolders if name != "__pycache__"]
            paths = [f"{folder}/{name}" for name in names if name.endswith(".py")]
            found += [(path[len(_ROOT) :], _size_of(path)) for path in paths]
    return zlib.crc32(repr(sorted(found)).encode())


def _size_of(path: str) -> int:
    try:
        return os.stat(path).st_size
    except OSError:  # for example, an editor's link to a missing file
        return 0
