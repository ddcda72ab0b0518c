"""Finds the job of this host that a user means."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Final

from asyncdist.rank_program import PROGRAM
from asyncdist.story.sockets import Place, jobs

#: Letters of a command that tell one job from another.
_COMMAND_LENGTH_MAX: Final = 60


def find_job(name: str | None) -> str:
    """Return the name of a job that runs here.

    Args:
        name: of the job, or the number of one of its processes, or of one that has started them; None for the only job.

    Raises:
        LookupError: there is none, or there are several; the text names them.
    """
    found = jobs()
    if name is None and len(found) == 1:
        return next(iter(found))
    if name is not None and name in found:
        return name
    job = job_of_process(int(name), found) if name is not None and name.isdecimal() else None
    if job is None:
        raise LookupError(_refusal(name, found))
    return job


def job_of_process(pid: int, found: Mapping[str, Sequence[Place]]) -> str | None:
    """Return the job to which that process belongs, or whose ranks it has started; None where there is none."""
    return next((job for job, places in found.items() if any(pid in _line_of(each.pid) for each in places)), None)


def _refusal(name: str | None, found: Mapping[str, Sequence[Place]]) -> str:
    known = "; ".join(f"{job} ({_described(places)})" for job, places in found.items())
    if not known:
        which = "" if name is None else f" {name!r}"
        return f"no job{which} of this user runs on this host; ask on each of its hosts"
    return f"{'several jobs run here' if name is None else f'no job {name!r} runs here'}; name one: {known}"


def _described(places: Sequence[Place]) -> str:
    """Return how many ranks a job has here and what one of them runs."""
    first = places[0].pid
    words: list[str] = []
    with contextlib.suppress(OSError):
        line = Path(f"/proc/{first}/cmdline").read_text(encoding="utf-8", errors="replace")
        words = [word for word in line.split("\0")[1:] if word != PROGRAM]
    what = " ".join(words).strip()
    if len(what) > _COMMAND_LENGTH_MAX:
        what = f"{what[:_COMMAND_LENGTH_MAX]}..."
    return f"{what + ', ' if what else ''}{len(places)} ranks, pid {first} first"


def _line_of(pid: int) -> Iterator[int]:
    """Return a process, the one that has started it, and so on, as far as this system tells."""
    with contextlib.suppress(OSError, ValueError):
        while pid > 1:
            yield pid
            text = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
            pid = int(text.rpartition(")")[2].split()[1])  # the name before it may hold anything
