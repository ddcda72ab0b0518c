"""Arranges the ranks of a world in a binary tree, along which messages reach all ranks in few hops.

The root is rank 0, and every subtree is a range of consecutive ranks. Lost ranks are omitted. Their children become
children of the closest living ancestor, or of the lowest living rank. Ranks are notified of a loss at different times,
and temporarily see different trees. Messages along the tree must therefore tolerate duplicates, and must be sent again
to new neighbours.
"""

from __future__ import annotations

from collections.abc import Iterator

from asyncdist.collectives.agreement.tree_shape import halves, path_to


class SpanningTree:
    """Parent, children and subtree of one rank in the tree.

    Attributes:
        level: Depth of this rank in the tree if no rank is lost.
        first, last: First and last rank of this rank's subtree, which may include lost ranks.
    """

    def __init__(self, size: int, rank: int) -> None:
        self._size = size
        self._rank = rank
        self._lost: set[int] = set()
        self._above, self._own_last = path_to(size, rank)
        self.level = len(self._above)
        self._arrange()

    def on_lost(self, rank: int) -> None:
        """Remove a lost rank from the tree."""
        self._lost.add(rank)
        if rank in self.neighbours:
            self._arrange()

    @property
    def neighbours(self) -> tuple[int, ...]:
        """This rank's parent in the tree, if it has one, and its children."""
        return self.children if self.parent is None else (self.parent, *self.children)

    def _arrange(self) -> None:
        living = [rank for rank in reversed(self._above) if rank not in self._lost]
        root = next(rank for rank in range(self._rank + 1) if rank == self._rank or rank not in self._lost)
        self.first, self.last = self._rank, self._own_last
        if living:
            self.parent: int | None = living[0]
        elif root != self._rank:
            self.parent = root
        else:
            self.parent = None
            self.first, self.last = 0, self._size - 1
        if self.parent is None and self._rank:
            tops: Iterator[int] = self._living_below(0, self._size - 1)
            self.children: tuple[int, ...] = tuple(
                rank for rank in (*tops, *self._living_children(self._rank, self._own_last)) if rank != self._rank
            )
        else:
            self.children = tuple(self._living_children(self._rank, self._own_last))

    def _living_children(self, rank: int, last: int) -> Iterator[int]:
        """Yield the living children of ``rank``. Each lost child is replaced by its own living children."""
        for first, end in halves(rank, last):
            yield from self._living_below(first, end)

    def _living_below(self, rank: int, last: int) -> Iterator[int]:
        if rank in self._lost:
            yield from self._living_children(rank, last)
        else:
            yield rank
