"""Shape of the binary tree along which the messages of large groups are relayed.

The nodes are numbers from 0, the root. Every subtree is a range of consecutive numbers. The smallest number of a range
is its root. The other numbers form two halves, one for each child.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

#: Largest size of a group whose members exchange messages with one member directly. Larger groups use a tree.
DIRECT_COUNT_MAX: Final = 16


def halves(rank: int, last: int) -> Iterator[tuple[int, int]]:
    """Yield each child of ``rank`` and the last rank of its subtree. ``last`` is the last rank below ``rank``."""
    first = rank + 1
    if first <= last:
        middle = first + (last - first) // 2
        yield first, middle
        if middle < last:
            yield middle + 1, last


def path_to(size: int, rank: int) -> tuple[tuple[int, ...], int]:
    """Return the ancestors of ``rank``, beginning at the root, and the last rank of its subtree."""
    above = []
    current, last = 0, size - 1
    while current != rank:
        above.append(current)
        current, last = next((first, end) for first, end in halves(current, last) if first <= rank <= end)
    return tuple(above), last
