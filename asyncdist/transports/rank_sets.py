"""Defines a set of ranks that uses one bit per rank. Python's sets use about 50 bytes per element.

Every rank stores several such sets. With Python's sets, a world of 10,000 simulated ranks would need gigabytes.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, MutableSet
from typing import Any


class RankSet(MutableSet[int]):
    """Stores a set of ranks as the bits of one integer. Iterates in ascending order.

    Attributes:
        bits: Integer whose bit r is set if rank r is in the set.
    """

    __slots__ = ("bits",)

    def __init__(self, ranks: Iterable[int] = ()) -> None:
        self.bits = 0
        if isinstance(ranks, RankSet):
            self.bits = ranks.bits
        elif isinstance(ranks, range) and ranks.step == 1:
            self.bits = ((1 << len(ranks)) - 1) << ranks.start
        else:
            for rank in ranks:
                self.bits |= 1 << rank

    @classmethod
    def of_bits(cls, bits: int) -> RankSet:
        """Return the set of ranks whose bits are set in ``bits``."""
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
        """Add a rank to the set."""
        self.bits |= 1 << rank

    def discard(self, rank: int) -> None:
        """Remove a rank from the set, if present."""
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
