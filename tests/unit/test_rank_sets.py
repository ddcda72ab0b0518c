"""Tests that sets of ranks stored as bits behave like Python sets."""

from __future__ import annotations

from hypothesis import given, strategies as st

from asyncdist.transports.rank_sets import RankSet

RANKS = st.sets(st.integers(0, 300))


@given(RANKS, RANKS, st.integers(-2, 301))
def test_they_are_as_sets_of_python(some: set[int], others: set[int], rank: int) -> None:
    ranks = RankSet(some)
    assert list(ranks) == sorted(some) and len(ranks) == len(some) and bool(ranks) == bool(some)
    assert (rank in ranks) == (rank in some)
    assert ranks == some and (ranks == RankSet(others)) == (some == others)
    for each in (others, RankSet(others), frozenset(others)):
        assert (ranks & each, ranks | each, ranks - each) == (some & others, some | others, some - others)
        assert set(each) - ranks == others - some and set(each) | ranks == some | others


@given(RANKS, RANKS, st.integers(0, 301))
def test_they_change_in_place(some: set[int], others: set[int], rank: int) -> None:
    ranks = alias = RankSet(some)
    ranks |= others
    assert alias is ranks and alias == some | others
    ranks -= others
    assert alias is ranks and alias == some - others
    ranks.add(rank)
    assert alias == some - others | {rank}
    ranks.discard(rank)
    ranks.discard(rank)
    assert alias == some - others - {rank}
    assert repr(RankSet([5, 2])) == "RankSet([2, 5])"


@given(st.integers(0, 300), st.integers(0, 300))
def test_a_range_is_as_its_ranks(start: int, stop: int) -> None:
    assert RankSet(range(start, stop)) == set(range(start, stop))
    assert RankSet(range(start, stop, 3)) == set(range(start, stop, 3))
