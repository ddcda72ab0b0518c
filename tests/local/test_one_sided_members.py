"""Tests members of the one-sided policy on the local transport: groups, leaving members and lost ranks."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from scripts.one_sided import Ledger
from scripts.population import Mixed, clone_state, equal_states, sgd, values
from support.local import run, worlds

import asyncdist as ad
from asyncdist.collectives import one_sided
from asyncdist.collectives.version_queries import VersionQueries, VersionRecord
from asyncdist.runtime import run as runtime
from asyncdist.transports import matching
from protocols import OneSidedSelectiveAveragingPolicy, OneSidedStatistics, StepInfo
from protocols.one_sided import base as one_sided_averaging


def test_group_policy_skips_others_and_divides_by_its_donors() -> None:
    lockstep = asyncio.Barrier(3)

    async def main(world: ad.World) -> tuple[set[float], int, list[tuple[int, ...]]]:
        model = Mixed(float(world.rank))
        infos: list[StepInfo] = []
        if world.rank in (4, 1, 3):
            group = await ad.new_group([4, 1, 3])
            async with OneSidedSelectiveAveragingPolicy(
                model, sgd(model), average_every=2, replacement_mode="worst_ratio", donor_ratio=1.0, group=group
            ) as policy:
                while len(infos) < 60:
                    infos.append(await policy.step(float(world.rank)))
                    await lockstep.wait()
        else:
            for _ in range(60):
                await world.safe_point()
        return values(model, floating=True), world.statistics().stream_sent_nbytes, [i.donors for i in infos if i]

    found = run(main, 5)
    assert found[1][0] == {3.5} and set(found[1][2]) == {(3, 4)}
    assert [found[rank][0] for rank in (0, 2, 3, 4)] == [{0.0}, {2.0}, {3.0}, {4.0}]
    assert [found[rank][1] for rank in (0, 1, 2)] == [0, 0, 0] and found[3][1] > 0 < found[4][1]


def test_two_policies_in_one_program_never_hear_each_other() -> None:
    lockstep = asyncio.Barrier(3)

    async def main(world: ad.World) -> tuple[set[float], set[float]]:
        one, two = Mixed(float(world.rank)), Mixed(100.0 + world.rank)
        options = {"average_every": 2, "replacement_mode": "worst_ratio", "donor_ratio": 1.0}
        async with (
            OneSidedSelectiveAveragingPolicy(one, sgd(one), name="one", **options) as first,
            OneSidedSelectiveAveragingPolicy(two, sgd(two), name="two", metric_mode="min", **options) as second,
        ):
            for _ in range(60):
                await first.step(float(world.rank))
                await second.step(float(world.rank))
                await lockstep.wait()
        return values(one, floating=True), values(two, floating=True)

    found = run(main, 3)
    assert [one for one, _ in found] == [{1.5}, {1.0}, {2.0}]
    assert [two for _, two in found] == [{100.0}, {101.0}, {100.5}]


@pytest.mark.slow
@pytest.mark.parametrize("leaver", [0, 3])
def test_the_others_go_on_when_one_leaves(leaver: int) -> None:
    """The leaver's snapshots are removed, and no rank requests them any longer."""
    ledger, lockstep = Ledger(), asyncio.Barrier(3)

    async def main(world: ad.World) -> list[StepInfo]:
        model = Mixed(float(world.rank))
        infos = []
        async with OneSidedSelectiveAveragingPolicy(
            model,
            sgd(model),
            average_every=2,
            replacement_mode="age",
            age_range=(6, 9),
            donor_ratio=1.0,
            on_event=ledger.listener(world.rank, model),
        ) as policy:
            for _ in range(20 if world.rank == leaver else 200):
                ledger.stepping.add(world.rank)
                infos.append(await policy.step(1.0))
                ledger.stepping.discard(world.rank)
                if world.rank != leaver:
                    await lockstep.wait()
        return infos

    found = run(main, 4)
    for rank, infos in enumerate(found):
        applied = [info for info in infos if info]
        assert rank == leaver or len(applied) >= 8
        assert rank == leaver or (leaver not in applied[-1].donors and len(applied[-1].donors) == 2)
    ledger.verify()


@pytest.mark.slow
def test_leaving_at_a_busy_moment_leaves_nothing_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each rank leaves at another moment, with pending reads in both directions; ``strict`` finds leftovers."""
    monkeypatch.setattr(one_sided_averaging, "CHUNK_NBYTES", 64)
    monkeypatch.setattr(matching, "EAGER_NBYTES", 16)
    readers: list[list[bool]] = []
    for shift in range(12):

        async def main(world: ad.World, shift: int = shift) -> bool:
            model = Mixed(float(world.rank))
            async with OneSidedSelectiveAveragingPolicy(
                model, sgd(model), average_every=1, replacement_mode="age", age_range=(1, 2), donor_ratio=1.0
            ) as policy:
                for _ in range(6 + shift + 3 * world.rank):
                    await policy.step(1.0)
                is_reading = policy._replacement is not None
            for _ in range(30):
                await world.safe_point()
            return is_reading

        readers.append(run(main, 3))
    assert any(any(ranks) for ranks in readers), "no rank left during a read, so the test tests nothing"


class Died(Exception):
    """Raised on a rank that is lost, in order to end its main."""


@pytest.mark.slow
@pytest.mark.parametrize("long_stream", [pytest.param(False, marks=pytest.mark.long), True])
def test_reader_of_a_lost_donor_keeps_its_weights(long_stream: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """It dies while it is read from, or between reads: the read is given up and counted, and later ones do without."""
    monkeypatch.setattr(runtime, "GRACE_S", 0.2)
    dead: list[int] = []
    if long_stream:
        monkeypatch.setattr(one_sided_averaging, "CHUNK_NBYTES", 64)
        monkeypatch.setattr(matching, "EAGER_NBYTES", 16)
        answer = one_sided.StreamedWindow._answer

        async def die_in_the_midst(self: Any, found: Any, *, refused: bool) -> None:
            sending = asyncio.ensure_future(answer(self, found, refused=refused))
            await asyncio.sleep(0)  # the first of more than fifty chunks leave
            if self._services.rank == 3 and found.key[0] == 0 and not refused:
                self._services.engine.transport._hub.lose(3)
                dead.append(3)
            await sending

        monkeypatch.setattr(one_sided.StreamedWindow, "_answer", die_in_the_midst)
    ledger = Ledger()
    told: dict[int, list[StepInfo]] = {0: [], 1: [], 2: [], 3: []}
    counts: dict[int, OneSidedStatistics] = {}

    async def main(world: ad.World) -> None:
        model = Mixed(float(world.rank), width=64)
        async with OneSidedSelectiveAveragingPolicy(
            model,
            sgd(model),
            average_every=2,
            replacement_mode="worst_ratio",
            donor_ratio=1.0,
            on_event=ledger.listener(world.rank, model),
        ) as policy:
            for step in range(200):
                if world.rank == 3 and (dead if long_stream else step == 30):
                    world._transport._hub.lose(3)  # type: ignore[attr-defined]
                    raise Died
                before = clone_state(model)
                ledger.stepping.add(world.rank)
                info = await policy.step(float(world.rank))
                ledger.stepping.discard(world.rank)
                assert info or equal_states(clone_state(model), before)
                told[world.rank].append(info)
            counts[world.rank] = policy.statistics()

    with pytest.raises((Died, ad.RankLostError)):
        run(main, 4)
    assert [len(told[rank]) for rank in (0, 1, 2)] == [200, 200, 200]
    assert len(told[3]) < 200, "the donor never died, so the test tests nothing"
    applied = [info for info in told[0] if info]
    assert 3 not in applied[-1].donors and any(info.donors == (1, 2) for info in applied)
    if long_stream:
        assert counts[0].lost_read_count >= 1
        assert any("rank 3" in info.abandoned for info in told[0])
    assert ledger.verify() >= 3


async def test_a_loss_that_a_later_question_notices_is_not_awaited(monkeypatch: pytest.MonkeyPatch) -> None:
    """Regression: under ``--survive`` on MPI, a send may notice the loss of a rank that was asked just before."""
    async with worlds(3) as (first, _, third):
        mine, theirs = VersionQueries(first.services), VersionQueries(third.services)
        record = VersionRecord(1, 0, 0.5)
        theirs.open(7, lambda: record)
        send = mine._send

        def lose_rank_1(message: Any, rank: int) -> bool:
            if rank == 2:
                mine._on_gone(1)
            return send(message, rank)

        monkeypatch.setattr(mine, "_send", lose_rank_1)
        async with asyncio.timeout(10):
            assert await mine.ask(7, [1, 2]) == {2: record}
