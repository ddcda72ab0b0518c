"""Arranges the ranks of a world in a tree, along which news reaches all of them in few hops.

Each rank has at most two children, and the ranks below it have consecutive numbers: rank 0 stands above all, and a rank
that stands above the ranks from a to b halves those after a between its children. A tree of N ranks has about log2 N
levels.

A rank that is lost is left out: its children belong to the first rank above it that lives. Where no rank above them
lives, they belong to the lowest rank that lives, which then is the root. Ranks that hear of a loss at different times
see different trees for a while, so what travels along the tree has to bear being sent twice, and is sent again to new
neighbours.
"""

from __future__ import annotations

from collections.abc import Iterator

from asyncdist.collectives.agreement.tree_shape import halves, path_to


class SpanningTree:
    """Knows the neighbours of one rank in the tree.

    Args:
        size: the number of ranks.
        rank: this one.

    Attributes:
        parent: the rank above this one; None for the root.
        children: the ranks right below this one.
        level: the number of ranks above this one in a tree that has lost none.
        first, last: this rank answers for itself and the ranks below it, which are those from ``first`` to ``last``
            except lost ones.
    """

    def __init__(self, size: int, rank: int) -> None:
        self._size = size
        self._rank = rank
        self._lost: set[int] = set()
        self._above, self._own_last = path_to(size, rank)
        self.level = len(self._above)
        self._arrange()

    def on_lost(self, rank: int) -> bool:
        """Leave a rank out from now on; return whether the neighbours of this rank have changed."""
        before = self.neighbours
        self._lost.add(rank)
        if rank in before:
            self._arrange()
        return self.neighbours != before

    @property
    def neighbours(self) -> tuple[int, ...]:
        """The parent, if there is one, and the children."""
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
        """Yield the living ranks right below ``rank``, whose range ends with ``last``; through lost ones."""
        for first, end in halves(rank, last):
            yield from self._living_below(first, end)

    def _living_below(self, rank: int, last: int) -> Iterator[int]:
        if rank in self._lost:
            yield from self._living_children(rank, last)
        else:
            yield rank
