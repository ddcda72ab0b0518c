"""Packs the messages that all ranks of a round receive: `Plan` at the start, `Freeze` when its donors are final.

Every rank in a round receives the list of all donors and replacers, so the bytes of a round grow with the square of the
number of ranks. The packed form takes one bit per rank instead of up to 16 bytes, and less for consecutive ranks.
Unpacking arbitrary bytes either returns a consistent description or raises ValueError.
"""

import functools
import math
import struct
from bisect import bisect_left
from collections.abc import Sequence
from itertools import pairwise
from typing import Final, NamedTuple

#: First byte of a packed set of ranks, which identifies the format of the other bytes.
_LISTED: Final = b"l"
_AS_BITS: Final = b"b"
_AS_RANGE: Final = b"r"
_RANK: Final = struct.Struct("<I")
_RANGE: Final = struct.Struct("<II")
#: Maximum length of a packed range, because nine bytes could otherwise claim a huge range. Longer ranges become bit
#: masks.
RANK_COUNT_MAX: Final = 1 << 16
#: First byte of packed numbers. It says that all are equal, or gives the integer type of their differences from the
#: smallest number.
_SAME: Final = b"="
_EACH: Final = {b"B": 1 << 8, b"H": 1 << 16, b"I": 1 << 32, b"Q": 1 << 64}
_EACH_WEIGHT: Final = b"d"
_NUMBER: Final = struct.Struct("<q")
_WEIGHT: Final = struct.Struct("<d")
_BITS_OF: Final = tuple(tuple(bit for bit in range(8) if octet >> bit & 1) for octet in range(256))


def pack_ranks(ranks: Sequence[int]) -> bytes:
    """Pack distinct ascending ranks as a range, as a bit mask or as a list, whichever is shorter."""
    if not ranks:
        return b""
    if ranks[-1] - ranks[0] == len(ranks) - 1 < RANK_COUNT_MAX:
        return _AS_RANGE + _RANGE.pack(ranks[0], len(ranks))
    first = ranks[0] // 8
    if _RANK.size * (len(ranks) - 1) < ranks[-1] // 8 - first + 1:
        return _LISTED + struct.pack(f"<{len(ranks)}I", *ranks)
    bits = bytearray(ranks[-1] // 8 - first + 1)
    for rank in ranks:
        bits[(rank >> 3) - first] |= 1 << (rank & 7)
    return _AS_BITS + _RANK.pack(first) + bits


def unpack_ranks(packed: bytes) -> tuple[int, ...]:
    """Return the ranks that :func:`pack_ranks` has packed. Raise ValueError for other bytes."""
    form, rest = packed[:1], packed[1:]
    if form == _LISTED and rest and len(rest) % _RANK.size == 0:
        ranks = struct.unpack(f"<{len(rest) // _RANK.size}I", rest)
        if all(one < two for one, two in pairwise(ranks)):
            return ranks
        raise ValueError(f"ranks must be in ascending order, got {ranks!r:.80}")
    if form == _AS_RANGE and len(rest) == _RANGE.size:
        start, count = _RANGE.unpack(rest)
        if 0 < count <= RANK_COUNT_MAX:
            return tuple(range(start, start + count))
    if form == _AS_BITS and len(rest) > _RANK.size and rest[_RANK.size] and rest[-1]:
        start = 8 * _RANK.unpack_from(rest)[0]
        octets = enumerate(rest[_RANK.size :])
        return tuple(start + 8 * place + bit for place, octet in octets for bit in _BITS_OF[octet])
    if packed:
        raise ValueError(f"the bytes {packed!r:.80} are not a packed set of ranks")
    return ()


def pack_numbers(numbers: Sequence[int]) -> bytes:
    """Pack 64-bit integers. The smaller their range, the fewer bytes they take."""
    if not numbers:
        return b""
    least = min(numbers)
    spread = max(numbers) - least
    if spread == 0:
        return _SAME + _NUMBER.pack(least)
    form = next(form for form, limit in _EACH.items() if spread < limit)
    differences = struct.pack(f"<{len(numbers)}{form.decode()}", *(number - least for number in numbers))
    return form + _NUMBER.pack(least) + differences


def unpack_numbers(packed: bytes, count: int) -> tuple[int, ...]:
    """Return the ``count`` numbers that :func:`pack_numbers` has packed. Raise ValueError for other bytes."""
    form, rest = packed[:1], packed[1:]
    if not count and not packed:
        return ()
    if count and form == _SAME and len(rest) == _NUMBER.size:
        return _NUMBER.unpack(rest) * count
    layout = f"<{count}{form.decode('latin-1')}" if form in _EACH else "<"
    if count and form in _EACH and len(rest) == _NUMBER.size + struct.calcsize(layout):
        (least,) = _NUMBER.unpack_from(rest)
        return tuple(least + difference for difference in struct.unpack_from(layout, rest, _NUMBER.size))
    raise ValueError(f"the bytes {packed!r:.80} are not {count} packed numbers")


def pack_weights(weights: Sequence[float]) -> bytes:
    """Pack weights as 64-bit floats, or as a single float if all are equal."""
    if not weights:
        return b""
    if weights.count(weights[0]) == len(weights):
        return _SAME + _WEIGHT.pack(weights[0])
    return _EACH_WEIGHT + struct.pack(f"<{len(weights)}d", *weights)


def unpack_weights(packed: bytes, count: int) -> tuple[float, ...]:
    """Return the ``count`` weights that :func:`pack_weights` has packed. Raise ValueError for other bytes."""
    form, rest = packed[:1], packed[1:]
    if not count and not packed:
        return ()
    if count and form == _SAME and len(rest) == _WEIGHT.size:
        weights = _WEIGHT.unpack(rest) * count
    elif count and form == _EACH_WEIGHT and len(rest) == count * _WEIGHT.size:
        weights = struct.unpack(f"<{count}d", rest)
    else:
        raise ValueError(f"the bytes {packed!r:.80} are not {count} packed weights")
    if not all(0.0 <= weight < math.inf for weight in weights):
        raise ValueError(f"weights must be finite and >= 0, got {weights!r:.80}")
    return weights


def join(*parts: bytes) -> bytes:
    """Concatenate byte strings, each preceded by its length."""
    return b"".join(_RANK.pack(len(part)) + part for part in parts)


def split(joined: bytes, count: int) -> list[bytes]:
    """Return the ``count`` byte strings that :func:`join` has joined. Raise ValueError for other bytes."""
    parts: list[bytes] = []
    start = 0
    while start + _RANK.size <= len(joined) and len(parts) < count:
        end = start + _RANK.size + _RANK.unpack_from(joined, start)[0]
        parts.append(joined[start + _RANK.size : end])
        start = end
    if start != len(joined) or len(parts) != count:
        raise ValueError(f"the bytes {joined!r:.80} are not {count} parts")
    return parts


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
        parents: Donor that each replacer copies, in the order of the replacers. Empty if all replacers take a common
            average.
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
