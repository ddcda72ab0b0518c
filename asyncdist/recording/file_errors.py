"""Describes why a file cannot be written."""

from __future__ import annotations

from pathlib import Path


def why_not_written(error: OSError) -> str:
    """Return why a file cannot be written: another file in its place, a missing folder, or the OS's message."""
    if error.filename is None:
        return error.strerror or str(error)
    path = Path(error.filename2 or error.filename)  # A copy writes its second file.
    if isinstance(error, IsADirectoryError):
        return f"{str(path)!r} is a folder"
    if isinstance(error, FileExistsError | NotADirectoryError):
        return f"{str(_blocking_file(path))!r} is a file, not a folder"
    if isinstance(error, FileNotFoundError) and not path.parent.is_dir():
        return f"there is no folder {str(path.parent)!r}"
    return f"{str(path)!r}: {error.strerror}"


def _blocking_file(path: Path) -> Path:
    for each in (path, *path.parents):
        if each.exists() and not each.is_dir():
            return each
    return path
