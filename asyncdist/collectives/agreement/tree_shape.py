"""The shape of a binary tree of the numbers from 0 on, in which every subtree is a range of consecutive numbers.

The root is 0. The root a of the subtree with the range a to b divides the numbers after a in halves, one for each
child. A tree of N numbers has about log2 N levels.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

#: Largest number of ranks that talk to one of them directly; larger groups form a tree.
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
    """Return the ancestors of ``rank`` from the root on, and the last rank of its subtree."""
    above = []
    current, last = 0, size - 1
    while current != rank:
        above.append(current)
        current, last = next((first, end) for first, end in halves(current, last) if first <= rank <= end)
    return tuple(above), last
