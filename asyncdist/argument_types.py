"""Functions for argparse's ``type=`` that convert the values of command-line options."""

from __future__ import annotations

import argparse
import math


def count(text: str, least: int = 1) -> int:
    """Convert a string to an integer of ``least`` or more."""
    if not (text.isascii() and text.isdecimal() and len(text) <= 12 and int(text) >= least):
        raise argparse.ArgumentTypeError(f"must be an integer >= {least}, got {text!r}")
    return int(text)


def port(text: str) -> int:
    """Convert a string to the number of a TCP port."""
    if not (text.isascii() and text.isdecimal() and 0 < int(text[:6]) < 65536 and len(text) < 6):
        raise argparse.ArgumentTypeError(f"must be an integer from 1 to 65535, got {text!r}")
    return int(text)


def whole(text: str) -> int:
    """Convert a string to an integer, which may be negative."""
    try:
        return int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"must be an integer, got {text!r}") from None


def seconds(text: str) -> float:
    """Convert a string to a finite, non-negative number of seconds."""
    try:
        number = float(text)
    except ValueError:
        number = math.nan
    if not 0 <= number < math.inf:
        raise argparse.ArgumentTypeError(f"must be >= 0 seconds and finite, got {text!r}")
    return number


def folder(text: str) -> str:
    """Return the name of a folder, which need not exist."""
    if not text:
        raise argparse.ArgumentTypeError("the folder must have a name, got ''")
    return text
