"""Reads numbers from variables that launchers set, and collects what is wrong with them.

Only the standard library is imported, as in :mod:`asyncdist.environment`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Final

#: The variables that torch.distributed needs, and torchrun sets.
TORCH_NAMES: Final = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


def number(environ: Mapping[str, str], name: str) -> int:
    """Return a variable's number. Raises a ValueError that names it if it is none."""
    text = environ[name]
    if not re.fullmatch(r"[0-9]{1,18}", text):
        raise ValueError(f"{name}={text!r} is not a whole number of 0 or more")
    return int(text)


class Variables:
    """Reads numbers from an environment, and collects what is wrong with them for one error that names all of it."""

    def __init__(self, environ: Mapping[str, str]) -> None:
        self.values = environ
        self.problems: list[str] = []

    def has(self, name: str) -> bool:
        """Return whether a variable is set, and not empty."""
        return bool(self.values.get(name))

    def number(self, name: str) -> int | None:
        """Return a variable's number; None when it is not set, or no number."""
        if not self.has(name):
            return None
        try:
            return number(self.values, name)
        except ValueError as error:
            if str(error) not in self.problems:
                self.problems.append(str(error))
            return None

    def require(self, names: Sequence[str], *, because: str) -> None:
        """Note which of these are missing where ``because`` is set."""
        missing = [name for name in names if not self.has(name)]
        if missing:
            verb = "are" if len(missing) > 1 else "is"
            self.problems.append(
                f"{because}={self.values[because]!r} is set but {' and '.join(missing)} {verb} not: torchrun sets "
                f"them all; ASYNCDIST_TRANSPORT=local (or mpi) lets this process ignore them"
            )

    def place(self, size_name: str, rank_name: str, *, alone: bool = False) -> tuple[int | None, int | None]:
        """Read a size and a rank, checked against each other; with ``alone`` either may be set without the other."""
        for present, missing in ((size_name, rank_name), (rank_name, size_name)):
            if self.has(present) and not self.has(missing) and not alone and present not in TORCH_NAMES:
                self.problems.append(f"{present}={self.values[present]!r} is set but {missing} is not")
        size, rank = self.number(size_name), self.number(rank_name)
        if size is not None and size < 1:
            self.problems.append(f"{size_name}={size} is not a number of ranks; at least 1 is needed")
        elif size is not None and rank is not None and rank >= size:
            self.problems.append(f"{rank_name}={rank} is outside 0..{size - 1}, which {size_name}={size} allows")
        return size, rank

    def check(self) -> None:
        """Raise a ValueError that has all problems, if there are any."""
        if self.problems:
            raise ValueError("the launcher's variables do not fit together: " + "; ".join(self.problems))
