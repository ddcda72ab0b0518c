"""Holds ranks in one integer, a bit for each.

Every rank of a world keeps several sets of others, those that have left among them. As sets of Python they took some 50
bytes for each rank that is in them, so that a world of 10,000 simulated ranks needed gigabytes; as bits an eighth of
one, and news of thousands of ranks are merged in a microsecond.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, MutableSet
from typing import Any


class RankSet(MutableSet[int]):
    """A set of ranks, which yields them in ascending order.

    Args:
        ranks: the ranks that are in it, from 0.

    Attributes:
        bits: bit r is set where rank r is in it.
    """

    __slots__ = ("bits",)

    def __init__(self, ranks: Iterable[int] = ()) -> None:
        self.bits = 0
        if isinstance(ranks, RankSet):
            self.bits = ranks.bits
        else:
            for rank in ranks:
                self.bits |= 1 << rank

    @classmethod
    def of_bits(cls, bits: int) -> RankSet:
        """Return the set whose ranks are the set bits of a number."""
        made = cls()
        made.bits = bits
        return made

    def __contains__(self, rank: object) -> bool:
        return isinstance(rank, int) and rank >= 0 and bool(self.bits >> rank & 1)

    def __iter__(self) -> Iterator[int]:
        rest, rank = self.bits, 0
        while rest:
            skipped = (rest & -rest).bit_length()
            rank += skipped
            rest >>= skipped
            yield rank - 1

    def __len__(self) -> int:
        return self.bits.bit_count()

    def __bool__(self) -> bool:
        return self.bits != 0

    def __eq__(self, other: object) -> bool:
        return self.bits == other.bits if isinstance(other, RankSet) else super().__eq__(other)

    def add(self, rank: int) -> None:
        """Put a rank in; nothing where it is in already."""
        self.bits |= 1 << rank

    def discard(self, rank: int) -> None:
        """Take a rank out; nothing where it is not in."""
        self.bits &= ~(1 << rank)

    def __ior__(self, others: Any) -> RankSet:
        self.bits |= RankSet(others).bits
        return self

    def __and__(self, others: Any) -> RankSet:
        return RankSet.of_bits(self.bits & RankSet(others).bits)

    def __or__(self, others: Any) -> RankSet:
        return RankSet.of_bits(self.bits | RankSet(others).bits)

    def __sub__(self, others: Any) -> RankSet:
        return RankSet.of_bits(self.bits & ~RankSet(others).bits)

    def __repr__(self) -> str:
        return f"RankSet({list(self)})"
