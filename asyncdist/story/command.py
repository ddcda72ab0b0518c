"""The command ``asyncdist story``: prints what the ranks of a job on this host say, or what a recording does."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from asyncdist.story.sockets import Place, ask, jobs
from asyncdist.story.telling import Silent, tell_job


def run(name: str | None) -> int:
    """Print the story of a job; return the exit code.

    Args:
        name: of the job, or the number of one of its processes, or of one that has started them; None for the only job.
            Or the folder of a recording.
    """
    if name is not None and Path(name).is_dir():
        return _tell_recording(name)
    found = jobs()
    places = found.get(name or "") or _of_process(name, found)
    if places is None and name is None and len(found) == 1:
        (places,) = found.values()
    if places is None:
        print(f"asyncdist story: {_refusal(name, found)}", file=sys.stderr)
        return 2
    stories = ask(places)
    silent = [Silent(each.rank, each.pid, each.is_alive) for each in places if each.rank not in stories]
    print(tell_job(stories, silent))
    return 0


def _tell_recording(folder: str) -> int:
    from asyncdist.recording.reader import RecordingError  # these import torch
    from asyncdist.story.recorded import tell_recording

    try:
        print(tell_recording(folder))
    except RecordingError as error:
        print(f"asyncdist story: {error.message}", file=sys.stderr)
        return 2
    return 0


def _refusal(name: str | None, found: Mapping[str, Sequence[Place]]) -> str:
    known = "; ".join(f"{job} ({len(places)} ranks, pid {places[0].pid} first)" for job, places in found.items())
    if not known:
        return "no job of this user runs on this host; ask on each of its hosts"
    return f"{'several jobs run here' if name is None else f'no job {name!r} runs here'}; name one: {known}"


def _of_process(name: str | None, found: Mapping[str, Sequence[Place]]) -> Sequence[Place] | None:
    """Return the job to which the process of that number belongs, or whose ranks it has started."""
    if name is None or not name.isdecimal():
        return None
    asked = int(name)
    return next((places for places in found.values() if any(asked in _line_of(each.pid) for each in places)), None)


def _line_of(pid: int) -> Iterator[int]:
    """Return a process, the one that has started it, and so on, as far as this system tells."""
    with contextlib.suppress(OSError, ValueError):
        while pid > 1:
            yield pid
            text = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
            pid = int(text.rpartition(")")[2].split()[1])  # the name before it may hold anything
