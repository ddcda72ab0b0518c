"""Reads numbers from variables that launchers set, and describes the launch and where the ranks meet.

No library but the standard one is imported, as in :mod:`asyncdist.environment`.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping, Sequence
from typing import Final, Literal

from asyncdist.trust.job_secret import JobSecret

#: The variables that torch.distributed needs, and torchrun sets.
TORCH_NAMES: Final = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
#: The source of a :class:`Launch` where no variable tells of a launcher.
NO_LAUNCHER: Final = "no launcher"


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


@dataclasses.dataclass(frozen=True, slots=True)
class Launch:
    """How this process was started.

    Attributes:
        transport: The transport that belongs to the launcher.
        expected_size: The number of ranks the launcher says it started; None when it does not say.
        rank: This process's rank by the launcher.
        source: The variable that told of it, ``GROUP_SOURCE`` or ``NO_LAUNCHER``.
    """

    transport: Literal["mpi", "torch", "local"]
    expected_size: int | None
    rank: int
    source: str


@dataclasses.dataclass(frozen=True, slots=True)
class TorchRendezvous:
    """Describes where the ranks of a torch.distributed job meet.

    Attributes:
        rank: This process's rank.
        size: The number of ranks.
        address: The address of the host with the store.
        port: The port of the store.
        is_store_served: Whether the launcher serves the store, as torchrun's agent does; else rank 0 does.
        incarnation: How often the launcher had started this rank again before.
        admits_restarted: Whether ranks may join the world later: those that are killed and started again, or new ones.
        job: What the launcher calls the job.
        empty_count: How many places, the highest, have no process when the world begins.
        why_missing: Why rank 0 may be at another address, for errors; empty where nothing is known of that.
        secret: The secret of the job.
        is_loopback: Whether all ranks, those that come later included, are on this host.
    """

    rank: int
    size: int
    address: str
    port: int
    is_store_served: bool
    incarnation: int = 0
    admits_restarted: bool = False
    job: str = ""
    empty_count: int = 0
    why_missing: str = ""
    secret: JobSecret = dataclasses.field(default=JobSecret(), repr=False, compare=False)
    is_loopback: bool = False
