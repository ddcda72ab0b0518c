"""The shape of a tree of numbers from 0 on: each has at most two children, and those below it follow it without a gap.

0 stands above all, and a number that stands above those from a to b halves those after a between its children. A tree
of N numbers has about log2 N levels.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

#: Up to so many ranks talk to one of them directly; more than these form a tree.
DIRECT_COUNT_MAX: Final = 16


def halves(rank: int, last: int) -> Iterator[tuple[int, int]]:
    """Yield the children of ``rank``, whose range ends with ``last``, each with the end of its own range."""
    first = rank + 1
    if first <= last:
        middle = first + (last - first) // 2
        yield first, middle
        if middle < last:
            yield middle + 1, last


def path_to(size: int, rank: int) -> tuple[tuple[int, ...], int]:
    """Return the ranks above ``rank`` from the top, and the last rank below it."""
    above = []
    current, last = 0, size - 1
    while current != rank:
        above.append(current)
        current, last = next((first, end) for first, end in halves(current, last) if first <= rank <= end)
    return tuple(above), last
