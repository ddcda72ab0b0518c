"""Prints the output of commands, whose reader may close it early, as ``head`` does."""

from __future__ import annotations

import io
import os
import sys
from collections.abc import Callable

from asyncdist.validation import printable


def print_to(command: str, write: Callable[[], None]) -> int:
    """Call ``write``, and return the exit code. Output is dropped after its reader has closed it.

    Characters that the encoding of standard output lacks are printed as backslash escapes.

    Args:
        command: Name of the command, for an error message.
        write: Prints to standard output.
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
    """Print in one line why a command fails; return its exit code."""
    print(f"asyncdist {command}: {printable(str(error))}", file=sys.stderr)
    return 2
