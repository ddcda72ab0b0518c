"""Packs the messages that all ranks of a round receive: `Plan` at the start, `Freeze` when its donors are final.

Unpacking arbitrary bytes either returns a consistent description or raises ValueError.
"""

import functools
import struct
from bisect import bisect_left
from collections.abc import Sequence
from typing import Final, NamedTuple

from asyncdist.protocols.selective.round.packing import (
    join,
    pack_numbers,
    pack_ranks,
    pack_weights,
    split,
    unpack_numbers,
    unpack_ranks,
    unpack_weights,
)

#: `struct` format of `best` and `admits`.
_HEAD: Final = struct.Struct("<q?")
_BEST: Final = struct.Struct("<q")
#: Number of unpacked plans to cache. In a simulation, a thousand ranks unpack the same bytes.
_KEPT_COUNT: Final = 16


class Plan(NamedTuple):
    """The roles of all ranks in an averaging round, as the coordinator sends them to each of these ranks.

    Attributes:
        replacers: Ranks that receive new weights. The other named ranks are donors.
        judged: For each named rank, the iteration of the report on which the decision is based.
        best: Donor with the best metric, or -1 if there are no donors.
        admits: Whether the replacers are restarted ranks that receive a whole state.
        reducers: Ranks that each add up one part of the snapshots. Empty if each replacer averages whole snapshots.
        parents: Donor that each replacer copies, in the order of the replacers. Empty if all donors are for all
            replacers.
    """

    named: tuple[int, ...]
    replacers: tuple[int, ...]
    judged: tuple[int, ...]
    best: int = -1
    admits: bool = False
    restarted: tuple[tuple[int, int], ...] = ()
    reducers: tuple[int, ...] = ()
    parents: tuple[int, ...] = ()

    @property
    def donors(self) -> tuple[int, ...]:
        """Ranks that send their weights in the round, in ascending order."""
        return _without(self.named, self.replacers)

    def packed(self) -> bytes:
        """Return the plan as bytes, from which `unpack_plan` restores it."""
        places = {rank: place for place, rank in enumerate(self.named)}
        return join(
            _HEAD.pack(self.best, self.admits),
            pack_ranks(self.named),
            pack_ranks([places[rank] for rank in self.replacers]),
            pack_numbers(self.judged),
            pack_ranks([rank for rank, _ in self.restarted]),
            pack_numbers([incarnation for _, incarnation in self.restarted]),
            pack_ranks(self.reducers),
            pack_numbers(self.parents),
        )


class Freeze(NamedTuple):
    """Final donors of a round and how to average them, equal for all ranks.

    Attributes:
        donors: Ranks whose snapshots are averaged, in ascending order.
        iterations: Step at which each donor took its snapshot.
        best: Donor with the best metric, or -1 if there are no donors.
        reducers: Ranks that each add up one part of the snapshots. Empty if each replacer averages whole snapshots.
    """

    donors: tuple[int, ...]
    weights: tuple[float, ...]
    iterations: tuple[int, ...]
    best: int
    reducers: tuple[int, ...] = ()

    def packed(self) -> bytes:
        """Return the object as bytes, from which `unpack_freeze` restores it."""
        numbers = pack_weights(self.weights), pack_numbers(self.iterations)
        return join(_BEST.pack(self.best), pack_ranks(self.donors), *numbers, pack_ranks(self.reducers))


@functools.lru_cache(_KEPT_COUNT)
def unpack_plan(packed: bytes) -> Plan:
    """Return the plan that :meth:`Plan.packed` has packed. Raise ValueError for other bytes."""
    head, named_, places, judged, restarted, incarnations, reducers_, copied = split(packed, 8)
    best, admits = _unpack(_HEAD, head)
    named, reducers, again = map(unpack_ranks, (named_, reducers_, restarted))
    chosen = unpack_ranks(places)
    if not named or (chosen and chosen[-1] >= len(named)):
        raise ValueError(
            f"a plan must have at least one rank and each replacer among them, got {len(named)} ranks and the "
            f"replacers at {chosen!r:.80}"
        )
    if reducers and len(chosen) == len(named):
        raise ValueError(f"a round with reducers must have donors, got the reducers {reducers!r:.80} and no donors")
    parents = unpack_numbers(copied, len(chosen) if copied else 0)
    replacers = tuple(named[place] for place in chosen)
    if not set(parents) <= set(named) - set(replacers):
        raise ValueError(f"each rank that is copied must be a donor, got {parents!r:.80}")
    return Plan(
        named,
        replacers,
        unpack_numbers(judged, len(named)),
        best,
        bool(admits),
        tuple(zip(again, unpack_numbers(incarnations, len(again)), strict=True)),
        reducers,
        parents,
    )


@functools.lru_cache(_KEPT_COUNT)
def unpack_freeze(packed: bytes) -> Freeze:
    """Return the `Freeze` that :meth:`Freeze.packed` has packed. Raise ValueError for other bytes."""
    head, donors_, weights, iterations, reducers = split(packed, 5)
    donors = unpack_ranks(donors_)
    numbers = unpack_weights(weights, len(donors)), unpack_numbers(iterations, len(donors))
    (best,) = _unpack(_BEST, head)
    return Freeze(donors, *numbers, best, unpack_ranks(reducers))


def place_of(rank: int, ranks: Sequence[int]) -> int:
    """Return the index of a rank in an ascending sequence, or -1 if it is not in the sequence."""
    place = bisect_left(ranks, rank)
    return place if place < len(ranks) and ranks[place] == rank else -1


@functools.lru_cache(_KEPT_COUNT)
def _without(ranks: tuple[int, ...], others: tuple[int, ...]) -> tuple[int, ...]:
    left_out = frozenset(others)
    return tuple(rank for rank in ranks if rank not in left_out)


def _unpack(layout: struct.Struct, packed: bytes) -> tuple[int, ...]:
    if len(packed) != layout.size:
        raise ValueError(f"a packed value must have {layout.size} bytes, got {len(packed)}")
    return layout.unpack(packed)
