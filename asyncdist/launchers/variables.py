"""Reads numbers from launchers' environment variables, and defines the description of a launch and its rendezvous."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping, Sequence
from typing import Final

from asyncdist.trust.job_secret import JobSecret

#: Variables that torchrun sets and torch.distributed requires.
TORCH_NAMES: Final = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
#: Source of a :class:`Launch` if no launcher's variable is set.
NO_LAUNCHER: Final = "no launcher"


def number(environ: Mapping[str, str], name: str) -> int:
    """Return an environment variable's value. Raise ValueError, which names it, unless the value is an integer >= 0."""
    text = environ[name]
    if not re.fullmatch(r"[0-9]{1,18}", text):
        raise ValueError(f"the variable {name} must be an integer >= 0, got {text!r}")
    return int(text)


class Variables:
    """Reads numbers from environment variables, and collects all problems so that one error can report them."""

    def __init__(self, environ: Mapping[str, str]) -> None:
        self.values = environ
        self.problems: list[str] = []

    def has(self, name: str) -> bool:
        """Return whether the variable ``name`` is set and not empty."""
        return bool(self.values.get(name))

    def number(self, name: str) -> int | None:
        """Return a variable's value, or None if it is not set or not a number."""
        if not self.has(name):
            return None
        try:
            return number(self.values, name)
        except ValueError as error:
            if str(error) not in self.problems:
                self.problems.append(str(error))
            return None

    def require(self, names: Sequence[str], *, because: str) -> None:
        """Record a problem if the variable ``because`` is set but one of the variables ``names`` is missing."""
        missing = [name for name in names if not self.has(name)]
        if missing:
            verb = "are" if len(missing) > 1 else "is"
            self.problems.append(
                f"{because}={self.values[because]!r} is set but {' and '.join(missing)} {verb} not: torchrun sets "
                f"all of them; set ASYNCDIST_TRANSPORT=local (or mpi) to ignore them"
            )

    def place(self, size_name: str, rank_name: str, *, alone: bool = False) -> tuple[int | None, int | None]:
        """Return a size and a rank, each None if unset. Record a problem if only one is set and ``alone`` is false."""
        for present, missing in ((size_name, rank_name), (rank_name, size_name)):
            if self.has(present) and not self.has(missing) and not alone and present not in TORCH_NAMES:
                self.problems.append(f"{present}={self.values[present]!r} is set but {missing} is not")
        size, rank = self.number(size_name), self.number(rank_name)
        if size is not None and size < 1:
            self.problems.append(f"{size_name} must be >= 1, got {size}")
        elif size is not None and rank is not None and rank >= size:
            self.problems.append(f"{rank_name} must be from 0 to {size - 1} with {size_name}={size}, got {rank}")
        return size, rank

    def check(self) -> None:
        """Raise ValueError with all recorded problems, if there are any."""
        if self.problems:
            raise ValueError("the launcher's environment variables are inconsistent: " + "; ".join(self.problems))


@dataclasses.dataclass(frozen=True, slots=True)
class Launch:
    """Describes how this process was started.

    Attributes:
        transport: Transport for the launcher's ranks.
        expected_size: Number of ranks that the launcher states; None if unknown.
        source: Environment variable by which the launcher was recognised, or ``GROUP_SOURCE`` or ``NO_LAUNCHER``.
    """

    transport: str
    expected_size: int | None
    rank: int
    source: str


@dataclasses.dataclass(frozen=True, slots=True)
class TorchRendezvous:
    """Describes where and how the ranks of a torch.distributed job connect to each other.

    Attributes:
        is_store_served: Whether the launcher serves the store, like torchrun's agent, instead of rank 0.
        incarnation: Number of earlier processes of this rank.
        admits_restarted: Whether restarted ranks and new processes may join the world later.
        job: Launcher's name for the job.
        empty_count: Number of ranks, always the highest ones, that have no process when the world opens.
        why_missing: Reason, for errors, why rank 0 may be at another address; "" if none is known.
        is_loopback: Whether all ranks are on this host, including those that join later.
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
