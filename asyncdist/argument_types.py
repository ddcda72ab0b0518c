"""Splits a command line into the words of the command and of its script, and converts options for argparse."""

from __future__ import annotations

import argparse
import math
from collections.abc import Sequence


def count(text: str, least: int = 1) -> int:
    """Convert a string to an integer that is at least ``least``."""
    if not (text.isascii() and text.isdecimal() and len(text) <= 12 and int(text) >= least):
        raise argparse.ArgumentTypeError(f"must be an integer >= {least}, got {text!r}")
    return int(text)


def port(text: str) -> int:
    """Convert a string to the number of a TCP port."""
    if not (text.isascii() and text.isdecimal() and 0 < int(text[:6]) < 65536 and len(text) < 6):
        raise argparse.ArgumentTypeError(f"must be an integer from 1 to 65535, got {text!r}")
    return int(text)


def whole(text: str) -> int:
    """Convert a string to an integer, possibly negative."""
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
    """Return the name of a folder, which may not exist yet. Refuse an empty name."""
    if not text:
        raise argparse.ArgumentTypeError("the folder must have a name, got ''")
    return text


def split_words(
    arguments: Sequence[str], valued: Sequence[str], flags: Sequence[str] = (), names: int = 1
) -> tuple[list[str], list[str]]:
    """Split a command line into the command's words and the script's words.

    The command's options may appear before or after the script's name. The script's words begin at the first word that
    is neither an option of the command nor the script's name. After ``--``, the next word is the script's name unless a
    name preceded it.

    Args:
        arguments: Words of the command line.
        valued: Options of the command that take a value.
        flags: Options of the command without a value.
        names: Number of positional words, of which the last is the script's name. They are the first of the returned
            words, because argparse accepts an optional positional argument only directly after the previous one.
    """
    own: list[str] = []
    named: list[str] = []
    words = list(arguments)
    while words:
        word = words[0]
        if word == "--":
            return named + words[1 : 1 + names] + own, words[1 + names :]
        if word in valued:
            own += words[:2]
            del words[:2]
        elif names or word in flags or word.partition("=")[0] in valued:
            is_name = not word.startswith("-")
            names -= is_name
            (named if is_name else own).append(words.pop(0))
        else:
            break
    return named + own, words
