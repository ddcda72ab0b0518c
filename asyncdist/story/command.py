"""Implements ``asyncdist story``: prints what a job's ranks on this host are doing, or what recorded ranks did last."""

from __future__ import annotations

import os

from asyncdist.recording.command_output import print_to, refuse
from asyncdist.story.finding import chosen_job
from asyncdist.story.formatting import describe_job
from asyncdist.story.sockets import ask, jobs


def run(name: str | None, recorded: str | None = None) -> int:
    """Print what the ranks of a job are doing, or did last, and return the exit code.

    ``name`` is the name of the job, the pid of one of its processes or of their launcher, or the folder of a recording.
    None selects the only job. ``recorded`` is the name of the job if a folder has recordings of several jobs.
    """
    if name is not None and os.path.isdir(name):  # Path.is_dir raises an error if the name is too long
        return _print_recording(name, recorded)
    if recorded is not None:
        return refuse("story", "--job needs the folder of a recording: asyncdist story DIR --job JOB")
    no_folder = "" if name is None or name.isdecimal() else f", and {name!r} is not a folder of recordings"
    job = chosen_job("story", name, no_folder)
    if job is None:
        return 2
    rank_sockets = jobs().get(job, ())
    stories = ask(rank_sockets)
    silent = [each for each in rank_sockets if each.rank not in stories]
    return print_to("story", lambda: print(describe_job(stories, silent)))


def _print_recording(folder: str, job: str | None) -> int:
    from asyncdist.recording.reader import RecordingError  # imported here, because these modules import torch
    from asyncdist.story.last_events import describe_recording

    try:
        text = describe_recording(folder, job)
    except RecordingError as error:
        return refuse("story", error.message)
    return print_to("story", lambda: print(text))
