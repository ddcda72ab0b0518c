"""Reads the waiting tasks that an error or a printed text lists, whatever its wording."""

from __future__ import annotations

import re

_LINE = re.compile(r"^\s*rank (\d+), (.+?): (.*)$", re.MULTILINE)


def waits_of_tasks(text: str) -> dict[tuple[int, str], str]:
    """Return the wait of each listed task, keyed by its rank and its name."""
    return {(int(rank), name): wait for rank, name, wait in _LINE.findall(text)}


def waits_of_mains(text: str) -> dict[int, str]:
    """Return the wait of the main task of each listed rank."""
    waits = waits_of_tasks(text)
    return {rank: wait for (rank, name), wait in waits.items() if name == f"main of rank {rank}"}
