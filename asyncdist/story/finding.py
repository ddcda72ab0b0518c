"""Finds the job on this host that a user names."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Final

from asyncdist.rank_program import PROGRAM
from asyncdist.recording.command_output import refuse
from asyncdist.story.sockets import RankSocket, jobs, state_and_parent, warn_of_refused_directories

#: Maximum number of characters of a job's command that are shown.
_COMMAND_LENGTH_MAX: Final = 60
#: Maximum number of digits of a pid. Python refuses to convert more than 4,300 digits.
_PID_LENGTH_MAX: Final = 20


def chosen_job(command: str, name: str | None, hint: str = "") -> str | None:
    """Return the job that :func:`find_job` finds for ``command``, or print why it finds none, and ``hint``."""
    warn_of_refused_directories(command)
    try:
        return find_job(name)
    except LookupError as error:
        refuse(command, f"{error}{hint}")
        return None


def find_job(name: str | None) -> str:
    """Return the name of a job on this host. Raise LookupError with a list of the jobs unless exactly one matches.

    ``name`` is the name of the job, or the pid of one of its processes or of their launcher. None selects the only job.
    """
    found = jobs()
    if name is None and len(found) == 1:
        return next(iter(found))
    if name is not None and name in found:
        return name
    is_pid = name is not None and name.isdecimal() and len(name) <= _PID_LENGTH_MAX
    job = job_of_process(int(name), found) if name is not None and is_pid else None
    if job is None:
        raise LookupError(_refusal(name, found))
    return job


def job_of_process(pid: int, found: Mapping[str, Sequence[RankSocket]]) -> str | None:
    """Return the job that has a process, or a descendant of the process, as a rank, or None if there is no such job.

    If a rank of one job has started another job, the first job's launcher is an ancestor of both jobs' ranks. For this
    launcher, the first job is returned.
    """
    distances = {job: _distance(pid, rank_sockets) for job, rank_sockets in found.items()}
    nearest = min(distances, key=distances.__getitem__, default="")
    return nearest if nearest and distances[nearest] < math.inf else None


def _distance(pid: int, rank_sockets: Sequence[RankSocket]) -> float:
    """Return the number of generations from a process to its nearest rank, or infinity if no rank descends from it."""
    lines = (list(_line_of(each.pid)) for each in rank_sockets)
    return min((float(line.index(pid)) for line in lines if pid in line), default=math.inf)


def _refusal(name: str | None, found: Mapping[str, Sequence[RankSocket]]) -> str:
    known = "; ".join(f"{job} ({_described(rank_sockets)})" for job, rank_sockets in found.items())
    if not known:
        which = "" if name is None else f" {name!r}"
        return f"no job{which} of this user runs on this host; if it runs on another host, run this command there"
    return f"{'several jobs run here' if name is None else f'no job {name!r} runs here'}; name one: {known}"


def _described(rank_sockets: Sequence[RankSocket]) -> str:
    first = rank_sockets[0].pid
    words: list[str] = []
    with contextlib.suppress(OSError):
        line = Path(f"/proc/{first}/cmdline").read_text(encoding="utf-8", errors="replace")
        words = [word for word in line.split("\0")[1:] if word != PROGRAM]
    what = " ".join(words).strip()
    if len(what) > _COMMAND_LENGTH_MAX:
        what = f"{what[:_COMMAND_LENGTH_MAX]}..."
    return f"{what + ', ' if what else ''}{len(rank_sockets)} ranks, pid {first} first"


def _line_of(pid: int) -> Iterator[int]:
    """Yield the pids of a process, its parent, its grandparent, and so on."""
    while pid > 1:
        yield pid
        _, pid = state_and_parent(pid)
