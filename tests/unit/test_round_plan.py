"""Tests the encoded plan that all ranks of a round receive: it is small, read back exactly, and validated."""

from __future__ import annotations

import random
from contextlib import suppress

import pytest
from hypothesis import given, strategies as st

from asyncdist.messaging import wire
from protocols.selective.messages import DONOR, REPLACER, Assign, ControlMessage, Frozen, PackedAssign, PackedFrozen
from protocols.selective.plan import (
    RANK_COUNT_MAX,
    Freeze,
    Plan,
    join,
    pack_numbers,
    pack_ranks,
    pack_weights,
    split,
    unpack_numbers,
    unpack_ranks,
    unpack_weights,
)

some_ranks = st.sets(st.one_of(st.integers(0, 70), st.integers(0, 2**20))).map(lambda ranks: tuple(sorted(ranks)))
numbers = st.lists(st.one_of(st.integers(-5, 5), st.integers(-(2**63), 2**63 - 1)), max_size=9).map(tuple)
weights = st.lists(st.one_of(st.just(1.0), st.floats(0.0, 1e300)), max_size=9).map(tuple)


@given(some_ranks)
def test_ranks_come_back(ranks: tuple[int, ...]) -> None:
    assert unpack_ranks(pack_ranks(ranks)) == ranks


@given(numbers)
def test_numbers_come_back(given_numbers: tuple[int, ...]) -> None:
    assert unpack_numbers(pack_numbers(given_numbers), len(given_numbers)) == given_numbers


@given(weights)
def test_weights_come_back(given_weights: tuple[float, ...]) -> None:
    assert unpack_weights(pack_weights(given_weights), len(given_weights)) == given_weights


@given(st.lists(st.binary(max_size=9)))
def test_parts_come_back(parts: list[bytes]) -> None:
    assert split(join(*parts), len(parts)) == parts


@given(st.binary(max_size=40), st.integers(0, 9))
def test_any_bytes_decode_to_valid_ranks_and_numbers_or_fail(packed: bytes, count: int) -> None:
    with suppress(ValueError):
        ranks = unpack_ranks(packed)
        assert list(ranks) == sorted(set(ranks)) and all(rank >= 0 for rank in ranks)
    for unpack in (unpack_numbers, unpack_weights):
        with suppress(ValueError):
            assert len(unpack(packed, count)) == count


@pytest.mark.parametrize(
    "packed",
    [
        *(b"l", b"l123", b"lAAAAAAAA", b"lBBBBAAAA"),  # no rank, half a rank, a rank twice, descending ranks
        *(b"b", b"b0000", b"b0000\0\1", b"b0000\1\0"),  # no bits, and none in the first or last octet
        *(b"r", b"r\0\0\0\0\0\0\0\0", b"r\0\0\0\0" + (RANK_COUNT_MAX + 1).to_bytes(4, "little")),
        b"xyz",
    ],
)
def test_no_set_of_ranks(packed: bytes) -> None:
    with pytest.raises(ValueError, match="ranks"):
        unpack_ranks(packed)


def test_weights_that_no_coordinator_gives_are_refused() -> None:
    for bad in (-1.0, float("inf"), float("nan")):
        for listed in ((bad,), (1.0, bad)):
            with pytest.raises(ValueError, match="weights"):
                unpack_weights(pack_weights(listed), len(listed))


def test_each_finds_its_part_in_what_all_are_told() -> None:
    plan = Plan((1, 2, 5, 7), (2, 7), (10, 20, 50, 70), 5, restarted=((5, 3),), reducers=(1, 5))
    packed = PackedAssign(plan.packed())
    named = {"best": 5, "restarted": ((5, 3),), "reducers": (1, 5)}
    assert packed.opened(1) == Assign(DONOR, (1, 5), (2, 7), 10, part=0, **named)
    assert packed.opened(5) == Assign(DONOR, (1, 5), (2, 7), 50, part=1, **named)
    assert packed.opened(7) == Assign(REPLACER, (1, 5), (2, 7), 70, **named)
    assert packed.opened(3) is None
    with_sources = PackedAssign(plan.packed(), (1, 2)).opened(2)
    assert with_sources == Assign(REPLACER, (1, 5), (2, 7), 20, sources=(1, 2), **named)


def test_what_is_frozen_comes_back_with_the_timeout() -> None:
    freeze = Freeze((1, 5), (1.0, 0.5), (10, 12), 5, (1,))
    assert PackedFrozen(freeze.packed(), 3.0).opened() == Frozen((1, 5), (1.0, 0.5), (10, 12), 5, 3.0, (1,))
    fresh = Freeze((), (), (), -1)
    assert PackedFrozen(fresh.packed(), 3.0).opened() == Frozen((), (), (), -1, 3.0)


def test_plans_that_do_not_fit_together_are_refused() -> None:
    good = Plan((1, 2, 5), (2,), (10, 20, 50), 5)
    parts = split(good.packed(), 8)
    assert PackedAssign(join(*parts)) == PackedAssign(good.packed())
    for place, bad in (
        (0, b""),  # no head
        (1, b""),  # no rank is in the list
        (1, pack_ranks((1, 2))),  # two ranks are in the list, with three iterations
        (2, pack_ranks((3,))),  # of three listed ranks the fourth is replaced
        (3, pack_numbers((1, 2))),
        (4, pack_ranks((1,))),  # the number of restarts is missing
        (6, b"x"),
        (7, pack_numbers((2,))),  # rank 2 is replaced, so that it gives nothing
        (7, pack_numbers((1, 5))),  # two parents of one rank
    ):
        with pytest.raises(ValueError):
            PackedAssign(join(*parts[:place], bad, *parts[place + 1 :]))
    with pytest.raises(ValueError, match="donors"):
        PackedAssign(Plan((1, 2), (1, 2), (1, 1), reducers=(1,)).packed())
    with pytest.raises(ValueError, match="sources"):
        PackedAssign(good.packed(), (1,))
    with pytest.raises(ValueError, match="parts"):
        PackedAssign(good.packed() + b"x")
    freeze = Freeze((1, 5), (1.0, 1.0), (1, 1), 5)
    with pytest.raises(ValueError, match="timeout"):
        PackedFrozen(freeze.packed(), float("nan"))
    with pytest.raises(ValueError, match="weights"):
        PackedFrozen(freeze._replace(weights=(1.0,) * 2 + (2.0,)).packed(), 1.0)


def test_damaged_bytes_are_refused_or_say_something_that_fits() -> None:
    rng, codec = random.Random(7), wire.Codec(ControlMessage)
    donors = tuple(rank for rank in range(100) if rank % 4)
    replacers = tuple(rank for rank in range(100) if not rank % 4)
    iterations = tuple(range(100))
    assign = PackedAssign(Plan(tuple(range(100)), replacers, iterations, 99, reducers=donors).packed())
    frozen = PackedFrozen(Freeze(donors, tuple(map(float, donors)), iterations[:75], 99, donors).packed(), 1.0)
    opened_count = 0
    for _ in range(2000):
        kind, payload = codec.encode(rng.choice((assign, frozen)))
        damaged = bytearray(payload)
        damaged[rng.randrange(len(damaged))] ^= 1 << rng.randrange(8)
        try:
            message = codec.decoders[kind](bytes(damaged))
        except Exception:  # Inbox counts such errors
            continue
        opened_count += 1
        if isinstance(message, PackedAssign):
            for rank in (0, 1, 99, 100):
                message.opened(rank)
        else:
            message.opened()
    assert opened_count


def test_round_of_a_thousand_ranks_takes_a_few_hundred_bytes() -> None:
    """Regression: as lists of numbers the first message took 3,000 bytes, and the second at least 9,000."""
    named = tuple(range(1000))
    replacers = tuple(random.Random(1).sample(named, 250))
    donors = tuple(sorted(set(named) - set(replacers)))
    plan = Plan(named, tuple(sorted(replacers)), (50,) * 1000, 999)
    assert len(plan.packed()) < 220
    assert len(Freeze(donors, (1.0,) * 750, (51,) * 750, 999).packed()) < 220
