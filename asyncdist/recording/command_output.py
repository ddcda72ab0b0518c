"""Prints the output of commands, even if the reader closes the pipe early, as ``head`` does."""

from __future__ import annotations

import io
import os
import sys
from collections.abc import Callable

from asyncdist.validation import printable


def print_to(command: str, write: Callable[[], None]) -> int:
    """Call ``write``, which prints to standard output, and return the exit code of ``command``.

    Output is discarded once its reader has closed the pipe. Unencodable characters become backslash escapes.
    """
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")
    why = write_out(write)
    return 0 if why is None else refuse(command, why)


def write_out(write: Callable[[], object]) -> str | None:
    """Call ``write``, which prints to standard output, and flush the output. Return why this failed, or None.

    Output is discarded once its reader has closed the pipe.
    """
    try:
        write()
        sys.stdout.flush()
    except OSError as error:
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, 1)  # prevents a second error when Python flushes the output at exit
        os.close(null)
        if not isinstance(error, BrokenPipeError):
            return f"standard output cannot be written: {error.strerror}"
    return None


def refuse(command: str, error: object) -> int:
    """Print a one-line error message for a command, and return the command's exit code."""
    print(f"asyncdist {command}: {printable(str(error))}", file=sys.stderr)
    return 2
