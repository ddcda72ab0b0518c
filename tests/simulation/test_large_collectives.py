"""Tests collectives of many members, which use a tree: their cost for each rank, their results, and losses."""

from __future__ import annotations

import asyncio
import functools
import math
import random
from collections import Counter
from typing import Any, Final

import numpy as np
import pytest
import torch
from support.steady_network import quiet

import asyncdist as ad
from asyncdist.collectives.algorithms import pieces
from asyncdist.collectives.algorithms.over_tree import ROW_NBYTES_MAX, TreePosition
from asyncdist.collectives.collectives import Collectives
from asyncdist.collectives.groups import Group
from asyncdist.collectives.membership import MembershipLog
from asyncdist.simulation import Kill, SimReport, simulate

#: Time from which messages belong to the tested operation, and its length.
BEGINS_S, ENDS_S = 100.0, 200.0
#: Number of elements that makes a tensor too large to be gathered as a row, and large enough to be sent in pieces.
LARGE: Final = ROW_NBYTES_MAX // 4 + 1
PIECES: Final = 2 * pieces.PIECE_NBYTES // 4 + 3
OPERATIONS: Final = ("barrier", "broadcast", "gather", "ragged", "all_gather", "sum", "mean", "large sum", "large mean")


@functools.lru_cache(1024)
def values_of(rank: int, count: int) -> np.ndarray[Any, Any]:
    """Return numbers of very different size, whose sum depends on the order."""
    rng = np.random.default_rng(rank)
    return (rng.standard_normal(count) * 10.0 ** rng.integers(-3, 4, count)).astype(np.float32)


@functools.lru_cache(8)
def total_of(size: int, count: int) -> np.ndarray[Any, Any]:
    total = values_of(0, count)
    for rank in range(1, size):
        total = total + values_of(rank, count)
    return total


async def take_part(
    collectives: Collectives, group: Group, rank: int, what: str, *, root: int = 0, count: int = 7
) -> None:
    """Call one collective, and compare its result with numpy."""
    size = group.size
    own = torch.from_numpy(values_of(rank, count).copy())
    got: Any
    if what == "barrier":
        await collectives.barrier(group)
    elif what == "broadcast":
        await collectives.broadcast(own, group, root)
        np.testing.assert_array_equal(own.numpy(), values_of(root, count))
    elif what == "gather":
        got = await collectives.gather(own, group, root)
        assert (got is None) == (rank != root)
        for number, each in enumerate(got or ()):
            np.testing.assert_array_equal(each.numpy(), values_of(number, count))
    elif what == "ragged":
        mine = torch.full((rank % 3,), rank % 251, dtype=torch.uint8)
        got = await collectives.gather_bytes(mine, [each % 3 for each in range(size)], group, root)
        if got is not None:
            assert got.tolist() == [each % 251 for each in range(size) for _ in range(each % 3)]
    elif what == "all_gather":
        for number, each in enumerate(await collectives.all_gather(own, group)):
            np.testing.assert_array_equal(each.numpy(), values_of(number, count))
    elif what.endswith("sum"):
        await collectives.all_reduce(own, group, "sum")
        np.testing.assert_array_equal(own.numpy(), total_of(size, count))
    else:
        await collectives.all_mean(own, group)
        np.testing.assert_array_equal(own.numpy(), total_of(size, count) / np.float32(size))


# -------------------------------------------------------------------------------------------------------------- counts


def counted(report: SimReport, ranks: int) -> tuple[int, int]:
    """Return the most messages that a rank has sent and received, and the most ranks with which one communicated."""
    messages: Counter[int] = Counter()
    peers: dict[int, set[int]] = {rank: set() for rank in range(ranks)}
    for event in report.trace:
        if event.kind == "send" and BEGINS_S <= event.time_s < ENDS_S:
            messages.update((event.a, event.b))
            peers[event.a].add(event.b)
            peers[event.b].add(event.a)
    return max(messages.values()), max(map(len, peers.values()))


@pytest.mark.parametrize(
    ("ranks", "what"),
    [
        *((ranks, what) for ranks in (8, 17, 64) for what in ("public barrier", *OPERATIONS)),
        *(
            pytest.param(ranks, what, marks=[pytest.mark.slow, pytest.mark.long])
            for ranks, operations in ((256, ("gather", "all_gather", "large mean")), (1000, ("public barrier", "sum")))
            for what in operations
        ),
    ],
)
def test_each_rank_exchanges_few_messages_with_few_others(ranks: int, what: str) -> None:
    async def main(world: ad.World) -> None:
        await world.sleep(BEGINS_S)
        if what == "public barrier":
            await ad.barrier()
        else:
            count = LARGE if what.startswith("large") else 7
            await take_part(world.collectives, world.group, world.rank, what, root=ranks // 2, count=count)
        await world.sleep(2 * ENDS_S - world.time())

    report = simulate(main, ranks=ranks, seed=1)
    report.value()
    message_count, peer_count = counted(report, ranks)
    assert message_count <= 4 * math.ceil(math.log2(ranks)) + 16
    assert peer_count <= (ranks - 1 if ranks <= 16 else 7)
    if ranks > 16 and what in ("barrier", "broadcast", "gather", "sum"):
        assert message_count <= 6


@pytest.mark.parametrize("what", ["broadcast", "all_gather", "large mean"])
def test_no_rank_moves_a_large_tensor_more_often_than_needed(what: str) -> None:
    ranks, count = 24, PIECES if what != "all_gather" else LARGE

    async def main(world: ad.World) -> tuple[int, int]:
        await world.sleep(BEGINS_S)
        await take_part(world.collectives, world.group, world.rank, what, root=5, count=count)
        await world.sleep(2 * ENDS_S - world.time())
        return 0, 0

    report = simulate(main, ranks=ranks, seed=1)
    report.value()
    sent: Counter[int] = Counter()
    taken: Counter[int] = Counter()
    for event in report.trace:
        if event.kind == "send" and BEGINS_S <= event.time_s < ENDS_S:
            sent[event.a] += event.nbytes
            taken[event.b] += event.nbytes
    once = 4 * count * (ranks - 1 if what == "all_gather" else 1)
    most_sent, most_taken = {"broadcast": (2, 1), "all_gather": (2.6, 1), "large mean": (3, 2)}[what]
    assert max(taken.values()) <= most_taken * once + 300
    assert max(sent.values()) <= most_sent * once + 300


# ------------------------------------------------------------------------------------------------------------- results


@pytest.mark.parametrize(
    ("ranks", "count"),
    [(17, 1), (17, PIECES), (19, 2), (23, LARGE), (33, LARGE - 1), pytest.param(45, 3, marks=pytest.mark.long)],
)
def test_results_are_those_of_numpy_in_groups_of_any_order(ranks: int, count: int) -> None:
    """Reductions have the bits of a sum in the group's order."""

    async def main(world: ad.World) -> None:
        rng = random.Random(ranks)
        order = tuple(rng.sample(range(ranks), ranks))
        for root in (0, rng.randrange(ranks), ranks - 1):
            for what in OPERATIONS[:4] if count < PIECES else ("broadcast",):
                await take_part(world.collectives, world.group, world.rank, what, root=root, count=count)
        for what in OPERATIONS[4:] if count < PIECES else ("sum", "mean"):
            await take_part(world.collectives, world.group, world.rank, what, count=count)
        async with await ad.new_group(order) as group:
            own = torch.tensor([world.rank + 1.0], dtype=torch.float64)
            assert [int(each) - 1 for each in await ad.all_gather(own, group=group)] == list(order)
            got = await ad.gather(own, order[7], group=group)
            assert (got is not None) == (world.rank == order[7])
            assert got is None or [int(each) - 1 for each in got] == list(order)
            await ad.all_reduce(own, "prod", group=group)
            assert float(own) == pytest.approx(math.factorial(ranks), rel=1e-5)

    simulate(main, ranks=ranks, seed=ranks, strict=True).value()


def test_equal_reductions_have_equal_messages() -> None:
    """Regression: the first bytes of a result were whatever the memory had held before."""

    async def main(world: ad.World) -> None:
        await world.collectives.all_reduce(torch.ones(100_000), world.group, "sum")

    assert len({simulate(main, ranks=18, seed=3).trace_digest for _ in range(4)}) == 1


def test_a_mean_of_the_largest_values_is_finite() -> None:
    """The sum that passes from rank to rank overflows, and all ranks notice this."""

    async def main(world: ad.World) -> None:
        values = torch.full((LARGE,), 3e38)
        await world.collectives.all_mean(values, world.group)
        assert (values == torch.full((LARGE,), 3e38)).all()

    simulate(main, ranks=18, strict=True).value()


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int64, torch.float16, torch.bool, torch.complex64])
@pytest.mark.parametrize("op", ["sum", "prod", "min", "max"])
def test_reductions_of_all_dtypes_are_those_of_small_groups(dtype: torch.dtype, op: Any) -> None:
    if dtype.is_complex and op in ("min", "max"):
        return
    count = ROW_NBYTES_MAX + 1

    async def main(world: ad.World) -> tuple[bytes, ...]:
        found = []
        for length in (3, count):
            values = torch.from_numpy(values_of(world.rank % 8, length) * 50).to(dtype)
            await ad.all_reduce(values, op)
            found.append(values.view(torch.uint8).numpy().tobytes())
        return tuple(found)

    with pytest.MonkeyPatch.context() as patch:
        of_tree = simulate(main, ranks=17, strict=True).results
        patch.setattr("asyncdist.collectives.algorithms.by_messages.DIRECT_COUNT_MAX", 17)
        assert of_tree == simulate(main, ranks=17, strict=True).results


@pytest.mark.parametrize("size", range(1, 70))
def test_the_places_of_all_members_make_one_tree(size: int) -> None:
    ranks = tuple(random.Random(size).sample(range(100), size))
    top = ranks[size // 3]
    positions = {rank: TreePosition.of(Group(ranks, index, 9, None), top) for index, rank in enumerate(ranks)}
    assert [rank for rank, position in positions.items() if position.parent is None] == [top]
    for rank, position in positions.items():
        assert len(position.children) <= 2
        assert all(positions[child].parent == rank for child, _, _ in position.children)
        below = [number for _, first, last in position.children for number in range(first, last + 1)]
        assert below == list(range(position.number + 1, position.last + 1))


@pytest.mark.parametrize(
    ("what", "counts"),
    [(what, (3, wrong)) for what in ("gather", "all_gather", "sum", "broadcast") for wrong in (1, 4, LARGE, PIECES)]
    + [(what, (PIECES, PIECES - pieces.PIECE_NBYTES // 4)) for what in ("sum", "mean", "broadcast")],
)
def test_sizes_that_differ_are_refused(what: str, counts: tuple[int, int]) -> None:
    """This works even if calls are not compared, as between processes."""

    async def main(world: ad.World) -> None:
        collectives = _unchecked(world)
        own = torch.zeros(counts[world.rank == 11])
        if what == "broadcast":
            await collectives.broadcast(own, world.group, 2)
        elif what == "gather":
            await collectives.gather(own, world.group, 2)
        elif what == "all_gather":
            await collectives.all_gather(own, world.group)
        elif what == "sum":
            await collectives.all_reduce(own, world.group, "sum")
        else:
            await collectives.all_mean(own, world.group)

    with quiet():
        report = simulate(main, ranks=18, seed=3, return_exceptions=True)
    errors = Counter(type(error) for error in report.results)
    assert errors[ad.LocalProtocolError] + errors[ad.TruncationError] >= 1, report.results
    assert set(errors) <= {ad.LocalProtocolError, ad.TruncationError, ad.RankLostError, type(None)}


# -------------------------------------------------------------------------------------------------------------- losses


def _unchecked(world: ad.World) -> Collectives:
    """Return collectives that notice losses and leaving ranks only by their own messages, as while a world opens."""
    made = Collectives(world.services.engine, world.rank, world.services.spawn_service, MembershipLog())
    made._checker = None
    return made


async def _meets_a_loss(world: ad.World, seed: int, victim: int, *, hears: bool) -> str:
    rng = random.Random(seed)
    what, root = rng.choice(OPERATIONS), rng.choice((0, victim, rng.randrange(world.size)))
    count = rng.choice((1, 7, LARGE)) if what != "broadcast" else rng.choice((1, PIECES))
    collectives = world.collectives if hears else _unchecked(world)
    await world.sleep(1.0 - world.time() + random.Random(seed * 1000 + world.rank).uniform(0.0, 2e-3))
    try:
        for _ in range(3 if hears else 1):  # a rank that has given up once enters no further collective
            await take_part(collectives, world.group, world.rank, what, root=root, count=count)
    except ad.RankLostError as error:
        assert error.rank == victim
        return "lost"
    finally:
        await world.sleep(2.0 - world.time())  # the victim is killed before it ends
    return "value"


@pytest.mark.parametrize("hears", [True, False], ids=["told", "not told"])
@pytest.mark.parametrize("part", [0, *(pytest.param(part, marks=pytest.mark.long) for part in range(1, 8))])
def test_after_a_death_each_rank_has_a_result_or_the_dead_rank(part: int, hears: bool) -> None:
    """The victim is at the top, in the middle or at the bottom of the tree, at any moment of any collective."""
    ends: Counter[str] = Counter()
    for seed in range(part * 20, part * 20 + 20):
        rng = random.Random(seed)
        size = rng.choice((17, 18, 23, 31))
        victim = rng.choice((0, 1, 2, size // 2, size - 1, rng.randrange(size)))
        kill = Kill(victim, at_s=1.0 + rng.uniform(0.0, 3e-3))

        async def main(world: ad.World, seed: int = seed, victim: int = victim) -> str:
            return await _meets_a_loss(world, seed, victim, hears=hears)

        with quiet():
            report = simulate(main, ranks=size, seed=seed, faults=[kill])
        assert report.faults_fired == (1,)
        living = [result for rank, result in enumerate(report.results) if rank != victim]
        assert set(living) <= {"lost", "value"}, f"seed {seed}: {living}"
        ends.update(living)
    assert ends["lost"] > 50
    assert ends["value"] > 5


@pytest.mark.parametrize("what", ["broadcast", "barrier", "large sum"])
def test_a_member_that_has_left_is_named_by_all_who_need_it(what: str) -> None:
    """A broadcast reaches the ranks that are not below the rank in the tree, as in small groups."""
    leaver = 1  # half of the other ranks are below it in the tree

    async def main(world: ad.World) -> str:
        if world.rank == leaver:
            return "left"
        try:
            count = LARGE if what == "large sum" else 1
            await take_part(world.collectives, world.group, world.rank, what, count=count)
        except ad.ClosedError as error:
            assert error.rank == leaver
            return "named"
        finally:
            await world.sleep(1.0)  # the others take part meanwhile
        return "value"

    ends = Counter(simulate(main, ranks=20, strict=True).results)
    assert ends["left"] == 1
    assert ends["named"] == 19 if what != "broadcast" else ends["named"] > 0
    assert ends["named"] + ends["value"] == 19


def test_a_cancelled_call_continues_in_the_background_in_order() -> None:
    """Half of the other ranks are below rank 1 in the tree: they all get the bytes, and the next call gets its own."""

    async def main(world: ad.World) -> list[float]:
        first, second = torch.tensor([world.rank + 1.0]), torch.tensor([world.rank + 100.0])
        if world.rank == 0:
            await world.sleep(1.0)
        elif world.rank == 1:
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(0.5):
                    await ad.broadcast(first)
        if world.rank != 1:
            await ad.broadcast(first)
        await ad.broadcast(second)
        return [float(first), float(second)]

    results = simulate(main, ranks=20, strict=True).results
    assert all(result == [1.0, 100.0] for result in results)
