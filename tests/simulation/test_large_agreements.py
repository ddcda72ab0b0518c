"""Tests agreements of many members, which use a tree and have the same outcomes as small ones."""

from __future__ import annotations

import asyncio
import math
import random
from collections import Counter
from typing import Any

import pytest
import torch
from support.seeds import seeds
from support.steady_network import quiet

import asyncdist as ad
from asyncdist.collectives.agreement import relays
from asyncdist.errors import remote_error
from asyncdist.simulation import Fault, Kill, SimReport, Stall, simulate
from protocols import AsyncSelectiveAveragingPolicy
from simulation import killed_start_scenarios

SIZE = 24
EVERYBODY = tuple(range(SIZE))
#: Time from which messages belong to the tested operation, and its length.
BEGINS_S, ENDS_S = 100.0, 200.0


@pytest.fixture(params=[True, False], ids=["tree", "direct"])
def is_tree(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    """Let agreements of SIZE members use the tree, or the leader alone."""
    if not request.param:
        monkeypatch.setattr(relays, "DIRECT_COUNT_MAX", SIZE)
    return bool(request.param)


async def agree(world: ad.World, subject: str = "it", values: dict[str, str] | None = None, **options: Any) -> Any:
    options = {"timeout_s": None, **options}
    return await world.agreements.agree(EVERYBODY, subject, values or {}, **options)


def in_words(report: SimReport) -> list[str]:
    """Return the outcome on each rank, for comparisons."""
    return [f"{type(found).__name__}: {found}" for found in report.results]


async def outcome(agreement: Any) -> str:
    try:
        return f"{await agreement}"
    except ad.AsyncdistError as error:
        return f"{type(error).__name__}: {error}"


# -------------------------------------------------------------------------------------------------------------- counts


async def _start(world: ad.World, what: str) -> None:
    ranks = world.group.ranks
    if what == "late":
        await world.sleep(10.0 * random.Random(world.rank).random())
    if what in ("agreement", "late"):
        await world.agreements.agree(ranks, what, {"lr": "0.1"}, timeout_s=60.0, taken=((0, world.rank),))
    elif what == "group":
        await world.new_group(ranks)
    else:
        model = torch.nn.Linear(1, 1)
        policy = AsyncSelectiveAveragingPolicy(model, torch.optim.SGD(model.parameters(), lr=0.1), average_every=2)
        async with policy:
            await world.sleep(2 * ENDS_S - world.time())


@pytest.mark.parametrize(
    ("ranks", "what"),
    [
        *((ranks, what) for ranks in (17, 64) for what in ("agreement", "late", "group", "policy")),
        # At the end of a policy, there are more messages than a report keeps.
        *(
            pytest.param(1000, what, marks=[pytest.mark.slow, pytest.mark.long])
            for what in ("agreement", "late", "group")
        ),
    ],
)
def test_each_rank_exchanges_few_messages_with_few_others(ranks: int, what: str) -> None:
    async def main(world: ad.World) -> None:
        await world.sleep(BEGINS_S)
        await _start(world, what)
        await world.sleep(2 * ENDS_S - world.time())

    report = simulate(main, ranks=ranks, seed=1)
    report.value()
    messages: Counter[int] = Counter()
    peers: dict[int, set[int]] = {rank: set() for rank in range(ranks)}
    for event in report.trace:
        if event.kind == "send" and BEGINS_S <= event.time_s < ENDS_S:
            messages.update((event.a, event.b))
            peers[event.a].add(event.b)
            peers[event.b].add(event.a)
    assert max(messages.values()) <= 4 * math.ceil(math.log2(ranks)) + 16
    assert max(map(len, peers.values())) <= 3
    if what == "agreement":
        assert max(messages.values()) == 6


# ------------------------------------------------------------------------------------------------------------ outcomes


@pytest.mark.parametrize("seed", range(4))
def test_the_tree_finds_the_difference_that_a_leader_finds(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The test includes many values, and groups whose order differs from that of the ranks."""

    async def main(world: ad.World) -> str:
        rng = random.Random(seed)
        ranks = rng.sample(EVERYBODY, SIZE)
        first, share = rng.randrange(SIZE), rng.uniform(0.2, 1.0)
        values = [{"lr": str(rng.randrange(4)) if rng.random() < share else "1"} for _ in ranks]
        values[first] = {}
        mine = values[ranks.index(world.rank)]
        agreement = world.agreements.agree(ranks, "it", mine, leader=ranks[first], timeout_s=60.0)
        return await outcome(agreement)

    found = in_words(simulate(main, ranks=SIZE, seed=seed))
    monkeypatch.setattr(relays, "DIRECT_COUNT_MAX", SIZE)
    assert found == in_words(simulate(main, ranks=SIZE, seed=seed))
    assert len(set(found)) == 1 and "DisagreementError: " in found[0]


def test_exactly_the_missing_ranks_are_named(is_tree: bool) -> None:
    """This includes ranks that arrive just before the timeout, while the rank above them in the tree computes."""
    del is_tree
    missing = (5, 17, 18)

    async def main(world: ad.World) -> str:
        if world.rank in missing:
            await world.sleep(30.0)
        elif world.rank % 3 == 1 and world.rank > 1:
            await world.sleep(9.95)
        return await outcome(agree(world, timeout_s=10.0))

    report = simulate(main, ranks=SIZE, seed=1, faults=[Stall(1, 9.9, 0.3)])
    for found in map(str, report.results):
        assert found.startswith("StartTimeoutError: ") and "missing=(5, 17, 18)" in found


@pytest.mark.parametrize("who", [0, 1, 9, SIZE - 1])
def test_a_cancelled_member_ends_the_agreement_for_all(who: int, is_tree: bool) -> None:
    del is_tree

    async def main(world: ad.World) -> str:
        await world.sleep(0.01 * world.rank)
        if world.rank == 7:
            await world.sleep(20.0)
        if world.rank != who:
            return await outcome(agree(world))
        task = asyncio.ensure_future(agree(world))
        await world.sleep(5.0)
        task.cancel()
        await asyncio.wait([task])
        return "cancelled" if task.cancelled() else "not cancelled"

    report = simulate(main, ranks=SIZE, seed=who)
    (told,) = {found for rank, found in enumerate(report.results) if rank != who}
    assert told.startswith("RemoteError: ") and f"rank {who} " in told and "CancelledError" in told
    assert report.results[who] == "cancelled"


def test_who_cannot_come_tells_all_why(is_tree: bool) -> None:
    del is_tree

    async def main(world: ad.World) -> str:
        await world.sleep(random.Random(world.rank).random())
        if world.rank == 11:
            world.agreements.object(EVERYBODY, "it", ValueError("lr is -1"))
            return "objects"
        return await outcome(agree(world))

    report = simulate(main, ranks=SIZE, seed=3)
    told = remote_error(11, "ValueError", "lr is -1")
    assert Counter(report.results) == {"objects": 1, f"RemoteError: {told}": SIZE - 1}


def test_go_is_heard_though_the_leader_has_left_meanwhile(is_tree: bool) -> None:
    """Regression: a rank in between was computing; when it passed "go" on, all knew that the leader had left."""
    del is_tree

    async def main(world: ad.World) -> str:
        if world.rank == SIZE - 1:
            await world.sleep(1.0)  # the others have announced themselves
        return await outcome(agree(world, values={"lr": "1"}))

    report = simulate(main, ranks=SIZE, seed=1, faults=[Stall(1, 1.0, 20.0)])
    report.check_faults()
    assert set(report.results) == {"Agreed(number=0, values={'lr': '1'}, time=1)"}


@pytest.mark.parametrize("seed", seeds(12))
def test_after_deaths_all_survivors_get_the_same_outcome(seed: int) -> None:
    """Any rank except the leader dies, with one of its first messages or later; then the others agree again."""
    rng = random.Random(f"killed {seed}")
    killed = rng.sample(range(1, SIZE), rng.choice((1, 2, 6)))
    faults: list[Fault] = [
        Kill(rank, at_message=rng.randint(1, 4)) if rng.random() < 0.7 else Kill(rank, at_s=rng.uniform(0.0, 3e-4))
        for rank in killed
    ]

    async def main(world: ad.World) -> list[str]:
        if world.rank == SIZE - 1:
            await world.sleep(random.Random(seed).choice((0.0, 1e-4)))
        found = [await outcome(agree(world))]
        await world.sleep(1.0)
        others = tuple(rank for rank in EVERYBODY if rank not in killed)
        found.append(await outcome(world.agreements.agree(others, "then", {}, timeout_s=60.0)))
        return found

    with quiet():
        report = simulate(main, ranks=SIZE, seed=seed, faults=faults, until_s=1000.0)
    seen = [found for rank, found in enumerate(report.results) if rank not in killed]
    assert all(isinstance(found, list) for found in seen), seen
    assert {found[1] for found in seen} == {"Agreed(number=0, values={}, time=1)"}
    went_on = {found[0].startswith("Agreed(") for found in seen}
    assert len(went_on) == 1, [found[0] for found in seen]


@pytest.mark.slow
def test_ranks_killed_in_early_starts_leave_one_policy(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The test below runs more seeds, and counts their events."""
    monkeypatch.setattr(relays, "DIRECT_COUNT_MAX", 1)
    for seed in range(8):
        killed_start_scenarios.run(seed)


@pytest.mark.slow
@pytest.mark.long
def test_ranks_killed_in_a_start_over_the_tree_leave_one_policy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(relays, "DIRECT_COUNT_MAX", 1)
    seen: Counter[str] = Counter()
    for seed in range(40):
        seen += killed_start_scenarios.run(seed)
    assert seen["verdicts passed on"] > 2 and seen["verdicts lost"] > 5, seen


@pytest.mark.parametrize("who", [0, 11])
def test_late_members_are_told_why_by_a_rank_that_withdraws(is_tree: bool, who: int) -> None:
    """Regression: members that joined after the leader had withdrawn got ClosedError instead of the refusal's cause."""
    del is_tree

    async def main(world: ad.World) -> str:
        if world.rank == who:
            await world.sleep(0.005)
            world.agreements.object(EVERYBODY, "it", ValueError("lr is -1"))
            found = "objects"
        else:
            await world.sleep(random.Random(SIZE * who + world.rank).random() / 100)
            found = await outcome(agree(world))
        world.agreements.withdraw(EVERYBODY, "it")
        await world.sleep(0.1)  # A rank that leaves the world at once would send the refusal then.
        return found

    for seed in range(3):
        report = simulate(main, ranks=SIZE, seed=seed)
        told = remote_error(who, "ValueError", "lr is -1")
        assert Counter(report.results) == {"objects": 1, f"RemoteError: {told}": SIZE - 1}
