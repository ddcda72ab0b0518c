"""Writes files that are there as a whole or not at all: what a full disk has cut short is taken away."""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path


@contextlib.contextmanager
def whole_file(path: Path) -> Iterator[Path]:
    """Give the path to write to: a file beside ``path`` that takes its place when the block has ended.

    Where the block fails there is no such file, and what was at ``path`` before stays. What is no file, as
    ``/dev/stdout``, and a file in a folder that takes no other are written to directly.

    Raises:
        OSError: the file cannot take that place.
    """
    target = path.resolve()
    if (path.exists() and not path.is_file()) or not os.access(target.parent, os.W_OK):
        yield path
        return
    beside = target.with_name(f"{target.name}.{os.getpid()}.part")
    try:
        yield beside
        beside.replace(target)
    except BaseException as error:
        with contextlib.suppress(OSError):
            beside.unlink()
        if isinstance(error, OSError) and error.filename == str(beside):
            error.filename = str(path)
        raise


@contextlib.contextmanager
def whole_folder(folder: Path) -> Iterator[Path]:
    """Give a folder inside ``folder``, which is made, whose files are moved up when the block has ended.

    Where the block fails nothing is left of it, nor of ``folder`` where that was not there before.

    Raises:
        OSError: the folder cannot be made, or a file not moved.
    """
    was_there = folder.exists()
    folder.mkdir(parents=True, exist_ok=True)
    try:
        inner = Path(tempfile.mkdtemp(prefix=".part-", dir=folder))
        try:
            yield inner
            for file in inner.iterdir():
                file.replace(folder / file.name)
        finally:
            shutil.rmtree(inner, ignore_errors=True)
    except BaseException:
        if not was_there:
            with contextlib.suppress(OSError):
                folder.rmdir()
        raise
