"""Prints what commands have to say of jobs and recordings; a reader may have gone, as ``head`` has with enough."""

from __future__ import annotations

import io
import os
import sys
from collections.abc import Callable

from asyncdist.validation import printable


def print_to(command: str, write: Callable[[], None]) -> int:
    """Print what ``write`` does; return the exit code. What its reader does not want is dropped.

    What standard output's encoding lacks, as a letter of a script's name, is printed with backslashes.

    Args:
        command: of asyncdist, which a refusal names.
        write: prints to standard output.
    """
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")
    try:
        write()
        sys.stdout.flush()
    except OSError as error:
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, 1)  # Python flushes the rest when it ends, and would fail again
        os.close(null)
        if not isinstance(error, BrokenPipeError):
            return refuse(command, f"standard output cannot be written: {error.strerror}")
    return 0


def refuse(command: str, error: object) -> int:
    """Print in one line why a command of asyncdist does nothing; return its exit code."""
    print(f"asyncdist {command}: {printable(str(error))}", file=sys.stderr)
    return 2
