"""Copies of the source tree, with a mutant applied or without."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Final

from table import Mutant

TOP: Final = Path(__file__).resolve().parents[2]
#: What a run of the scenarios needs.
_COPIED: Final = ("asyncdist", "protocols", "tests/scripts", "tests/simulation", "tests/support", "tools/mutations")


def mutated(mutant: Mutant, top: Path = TOP) -> str:
    """The text of the mutant's file with the replacement made.

    Raises:
        ValueError: the old text is not in the file exactly once.
    """
    text = (top / mutant.file).read_text()
    count = text.count(mutant.old)
    if count != 1:
        raise ValueError(
            f"its old text is in {mutant.file} {count} times, not once; bring tools/mutations/table.py up to date:\n"
            f"{mutant.old}"
        )
    return text.replace(mutant.old, mutant.new)


def copy_tree(source: Path, into: Path, mutant: Mutant | None = None) -> Path:
    """A copy that runs the scenarios, interpreted; returns its top."""
    ignored = shutil.ignore_patterns("__pycache__", ".*cache", "_compiled")
    for name in _COPIED:
        shutil.copytree(source / name, into / name, ignore=ignored)
    if mutant is not None:
        (into / mutant.file).write_text(mutated(mutant, into))
    return into


def python_path(top: Path) -> str:
    """What PYTHONPATH must be for a process that uses the copy."""
    return ":".join(map(str, (top, top / "tests", top / "tools" / "mutations")))
