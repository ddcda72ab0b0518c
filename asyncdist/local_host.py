"""Checks and prepares this host for a job: the script, memory and standard files.

This module does not import torch, so that ranks start fast.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from asyncdist import rank_program

#: Memory that one rank and its guardian processes take before the rank imports anything, in bytes.
_RANK_NBYTES: Final = 16 << 20


class LaunchError(Exception):
    """Raised if ``asyncdist run`` cannot start the job. The message is one line for the user."""


def has_working_directory() -> bool:
    """Return whether this process's working directory still exists. Without it, loading torch ends the process."""
    try:
        os.getcwd()
    except FileNotFoundError:
        return False
    return True


def check_script(script: str) -> None:
    """Raise ``LaunchError`` unless ``script`` is a file with a Python program."""
    path = Path(script)
    if script == "-" and not path.exists():
        raise LaunchError(
            "the script must be a file, got '-': only one rank could read a program from standard input; write it to a "
            "file first: cat > script.py"
        )
    if not path.exists():
        raise LaunchError(f"the script {script!r} does not exist (looked in {Path.cwd()})")
    if path.is_dir():
        raise LaunchError(f"the script must be a file, but {script!r} is a directory")
    if not path.is_file():  # each rank reads the script, and a pipe can be read only once
        raise LaunchError(f"the script must be a regular file, but {script!r} is a pipe or a device")
    if not os.access(path, os.R_OK):
        raise LaunchError(f"the script {script!r} cannot be read by this user; change its permissions")
    error = rank_program.find_syntax_error(script)
    if error is not None:
        raise LaunchError(f"the script {script!r} is not valid Python: {error}")


@contextlib.contextmanager
def shared_file_variables() -> Iterator[dict[str, str]]:
    """Yield environment variables through which the ranks on this host share anonymous files with the launcher.

    In one file, ranks record printed errors, so that each is printed once. In the other, ranks record that they have
    run alone (:func:`report_lone_ranks`).
    """
    variables: dict[str, str] = {}
    with contextlib.ExitStack() as stack:
        for name in (rank_program.PRINTED_ERRORS_VARIABLE, rank_program.LONE_VARIABLE):
            # This system may have no anonymous files, or the container may forbid them.
            with contextlib.suppress(AttributeError, OSError):
                descriptor = os.memfd_create(name)
                stack.callback(os.close, descriptor)
                variables[name] = f"{os.getpid()} {descriptor}"
        yield variables


def report_lone_ranks(variables: dict[str, str], ranks: int) -> None:
    """Print a line if several ranks have each run alone and have all succeeded.

    Args:
        variables: Environment variables from :func:`shared_file_variables`.
    """
    _, _, descriptor = variables.get(rank_program.LONE_VARIABLE, "").partition(" ")
    if descriptor and os.fstat(int(descriptor)).st_size == ranks > 1:
        print_launcher_line(
            "no rank opened a world, so each rank ran alone: call asyncdist.run(main), or, without "
            "async def, asyncdist.blocking.run(main)"
        )


def check_ranks(ranks: int) -> None:
    """Raise ``LaunchError`` if starting ``ranks`` ranks would exhaust the host's memory."""
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    most = memory // _RANK_NBYTES
    if ranks > most:
        raise LaunchError(
            f"the number of ranks must be <= {most} on this host, got {ranks}: each rank takes {_RANK_NBYTES >> 20} "
            f"MiB before it imports anything, and the host has {memory >> 30} GiB"
        )


def open_standard_files() -> None:
    """Open /dev/null for each closed standard file, so that no file opened later gets its number."""
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        try:
            os.fstat(number)
        except OSError:
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)  # open returns the lowest free descriptor
        if getattr(sys, name) is None:
            setattr(sys, name, os.fdopen(number, "r" if number == 0 else "w", closefd=False))


def print_launcher_line(text: str) -> None:
    """Print a line of ``asyncdist run`` on standard error, as :func:`print_line` does."""
    print_line(f"asyncdist run: {text}")


def print_line(text: str) -> None:
    """Print a line on standard error. Ignore a full disk or a closed pipe, so that the job continues."""
    rank_program.write_error(f"{text}\n")


def write_output(descriptor: int, data: bytes) -> None:
    """Write data to a descriptor of this process's output. Ignore a full disk or a closed pipe."""
    with contextlib.suppress(OSError):
        while data:
            data = data[os.write(descriptor, data) :]


def available_cores() -> int:
    """Return the number of cores that this process may run on."""
    if hasattr(os, "sched_getaffinity"):  # macOS lacks this function
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def new_run_id() -> str:
    """Return a new job name for TORCHELASTIC_RUN_ID."""
    import secrets

    return f"asyncdist-{secrets.token_hex(8)}"
