"""Makes copies of the source tree, with or without a mutant applied."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Final

from mutant import Mutant

TOP: Final = Path(__file__).resolve().parents[2]
#: Files and folders that a run of the scenarios needs.
_COPIED: Final = (
    "asyncdist",
    "protocols",
    "tests/scripts",
    "tests/simulation",
    "tests/support",
    "tests/unit",  # scenarios of simple policies import values from there
    "tools/mutations",
)


def mutated(mutant: Mutant, top: Path = TOP) -> str:
    """Return the content of the mutant's file with the mutant's edit applied.

    Raises:
        ValueError: The text to replace is not in the file exactly once.
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
    """Copy the parts of the tree that scenarios need, without compiled modules; return the copy's top folder."""
    ignored = shutil.ignore_patterns("__pycache__", ".*cache", "_compiled")
    for name in _COPIED:
        shutil.copytree(source / name, into / name, ignore=ignored)
    if mutant is not None:
        (into / mutant.file).write_text(mutated(mutant, into))
    return into


def python_path(top: Path) -> str:
    """Return the PYTHONPATH of a process that uses the copy at ``top``."""
    return ":".join(map(str, (top, top / "tests", top / "tools" / "mutations")))
