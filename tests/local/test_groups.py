"""Tests agreements and groups: missing members, differing arguments, and members that have left."""

from __future__ import annotations

import asyncio
import itertools
from typing import Any

import pytest
from support.facts import names
from support.local import NONCE, worlds, yields

import asyncdist as ad
from asyncdist import World, tags
from asyncdist.collectives.agreement.messages import Agreed
from asyncdist.collectives.groups import Group, check_ranks
from asyncdist.errors import (
    AsyncdistError,
    ClosedError,
    DisagreementError,
    LocalProtocolError,
    RankLostError,
    RemoteError,
    StartTimeoutError,
)
from asyncdist.messaging.engine import Engine
from asyncdist.messaging.services import Services
from asyncdist.runtime.peers import Leave
from asyncdist.simulation import Delay, Kill, Network, simulate
from asyncdist.transports.local import LocalHub

NOBODY_COMES_S = 0.05


async def outcomes(*agreements: Any) -> list[Any]:
    async with asyncio.timeout(60):
        return await asyncio.gather(*agreements, return_exceptions=True)


def agree(world: World, ranks: tuple[int, ...], **options: Any) -> Any:
    options = {"values": {}, "timeout_s": 60.0, "subject": "policy", **options}
    return world.agreements.agree(ranks, options.pop("subject"), options.pop("values"), **options)


async def test_agreement_gives_the_smallest_free_number_and_the_values() -> None:
    async with worlds(4) as made:
        ranks = (2, 0, 3)
        found = await outcomes(
            *(agree(made[rank], ranks, values={"lr": "1"}, taken=((0, rank), (5, 9))) for rank in (3, 0, 2))
        )
        assert found == [Agreed(4, {"lr": "1"})] * 3


async def test_repetitions_are_told_apart() -> None:
    async with worlds(2) as made:
        for i in range(5):
            found = await outcomes(*(agree(world, (0, 1), values={"i": str(i)}) for world in made))
            assert [agreed.values for agreed in found] == [{"i": str(i)}] * 2
            assert [agreed.time for agreed in found] == [i + 1] * 2
        # One member two meetings ahead, where it only follows.
        ahead = [asyncio.ensure_future(agree(made[1], (0, 1), values={"i": str(i)})) for i in range(3)]
        await yields(10)
        for i in range(3):
            assert (await agree(made[0], (0, 1), values={"i": str(i)})).values == {"i": str(i)}
        await outcomes(*ahead)


async def test_subjects_at_the_same_time_do_not_mix() -> None:
    async with worlds(3) as made:
        found = await outcomes(
            *(agree(world, (0, 1, 2), subject=f"policy {i}", taken=((0, i - 1),)) for i in range(6) for world in made)
        )
        assert [agreed.number for agreed in found] == [i for i in range(6) for _ in range(3)]


@pytest.mark.parametrize("present", [(0,), (0, 1), (0, 2), (1,), (1, 2), (2,)])
async def test_everybody_who_came_is_told_who_did_not(present: tuple[int, ...]) -> None:
    async with worlds(3) as made:
        found = await outcomes(*(agree(made[rank], (0, 1, 2), timeout_s=NOBODY_COMES_S) for rank in present))
        for error in found:
            assert isinstance(error, StartTimeoutError)
            assert isinstance(error, TimeoutError)
            missing = tuple(sorted({0, 1, 2} - set(present)))
            assert error.missing == missing
            for rank in missing:
                assert str(rank) in str(error)


async def test_a_late_joiner_is_waited_for() -> None:
    async with worlds(2) as made:
        first = asyncio.ensure_future(agree(made[0], (0, 1), timeout_s=60))
        await yields(50)
        assert not first.done()
        await agree(made[1], (0, 1))
        assert isinstance(await first, Agreed)


@pytest.mark.parametrize(
    ("values", "name", "sentence"),
    [
        (({"lr": "1", "steps": "5"}, {"lr": "1", "steps": "6"}), "steps", "steps is 5 on rank 0 and 6 on rank 1"),
        (({"b": "1", "a": "1"}, {"b": "2", "a": "2"}), "a", "rank 1"),
        (({"lr": "1"}, {"lr": "1", "new": "x"}), "new", "nothing"),
        (({"lr": "1", "old": "x"}, {"lr": "1"}), "old", "nothing"),
    ],
)
async def test_the_first_difference_is_named_on_all_ranks(
    values: tuple[dict[str, str], ...], name: str, sentence: str
) -> None:
    async with worlds(2) as made:
        found = await outcomes(*(agree(world, (0, 1), values=values[world.rank]) for world in made))
        for error in found:
            assert type(error) is DisagreementError
            assert error.difference == name
            assert sentence in str(error)


async def test_the_difference_of_a_later_rank_is_found() -> None:
    async with worlds(4) as made:
        found = await outcomes(
            *(agree(world, (0, 1, 2, 3), values={"x": "odd" if world.rank == 3 else "even"}) for world in made)
        )
        for error in found:
            assert names(error, "even", "rank 0", "odd", "rank 3")


async def test_a_leader_who_is_no_participant_compares_the_others() -> None:
    """A reserved coordinator has no options of its own and is notified of the members' options."""
    async with worlds(3) as made:
        ranks = (0, 1, 2)
        found = await outcomes(
            agree(made[2], ranks, leader=2),
            *(agree(made[rank], ranks, leader=2, values={"x": "1"}, taken=((rank, rank),)) for rank in (0, 1)),
        )
        assert found == [Agreed(2, {"x": "1"})] * 3
        found = await outcomes(
            agree(made[2], ranks, leader=2),
            *(agree(made[rank], ranks, leader=2, values={"x": str(rank)}) for rank in (0, 1)),
        )
        assert [names(error, "rank 0", "rank 1") and error.difference for error in found] == ["x"] * 3


@pytest.mark.parametrize("who", [0, 1, 2])
async def test_the_member_that_withdrew_is_named_in_the_others_errors(who: int) -> None:
    async with worlds(3) as made:
        ranks = (0, 1, 2)
        await outcomes(*(agree(world, ranks) for world in made))
        waiting = [asyncio.ensure_future(agree(world, ranks, timeout_s=None)) for world in made if world.rank != who]
        await yields(10)
        made[who].agreements.withdraw(ranks, "policy")
        for error in await outcomes(*waiting):
            assert isinstance(error, ClosedError)
            assert error.ranks == (who,)
            assert f"rank {who} left" in str(error)
        found = await outcomes(*(agree(world, ranks, timeout_s=None) for world in made if world.rank != who))
        assert all(isinstance(error, ClosedError) for error in found), "the second attempt must fail in the same way"
        assert all(isinstance(a, Agreed) for a in await outcomes(*(agree(w, ranks, subject="else") for w in made)))


@pytest.mark.parametrize("who", [0, 1])
async def test_a_rank_that_has_left_the_world_is_named(who: int) -> None:
    async with worlds(2) as made:
        other = made[1 - who]
        waiting = asyncio.ensure_future(agree(other, (0, 1), timeout_s=None))
        await yields(5)
        made[who].peers.announce(Leave())
        [error] = await outcomes(waiting)
        assert isinstance(error, ClosedError)
        assert error.ranks == (who,)
        [error] = await outcomes(agree(other, (0, 1), timeout_s=None))
        assert isinstance(error, ClosedError)


# -------------------------------------------------------------------------------------------------------------- groups


@pytest.mark.parametrize("objectors", [(0,), (1,), (2,), (0, 1), (2, 1), (0, 1, 2)])
@pytest.mark.parametrize("when", ["first", "last"])
async def test_a_member_that_objects_is_heard_by_the_others_once(objectors: tuple[int, ...], when: str) -> None:
    """Members get the objection whether they are waiting or arrive later. The next start is not affected."""
    async with worlds(3) as made:
        ranks, others = (0, 1, 2), [world for world in made if world.rank not in objectors]

        async def object_all() -> None:
            for rank in objectors:
                made[rank].agreements.object(ranks, "policy", ValueError(f"rank {rank} cannot"))
                await yields(5)

        for _ in range(2):
            if when == "first":
                await object_all()
            waiting = [asyncio.ensure_future(agree(world, ranks, timeout_s=None)) for world in others]
            await yields(5)
            if when == "last":
                await object_all()
            for error in await outcomes(*waiting):
                assert type(error) is RemoteError
                assert (error.rank, error.kind, error.text) == (objectors[0], "ValueError", error.text)
                assert error.text == f"rank {objectors[0]} cannot"
            assert await outcomes(*(agree(world, ranks, taken=((0, 2),)) for world in made)) == [Agreed(3, {})] * 3
        for world in made:
            agreements = world.agreements
            assert not agreements.led.over and not agreements.led.joins and not agreements._verdicts


async def test_mistake_is_raised_on_its_rank_and_sent_to_the_others() -> None:
    async with worlds(2) as made:
        waiting = asyncio.ensure_future(agree(made[0], (0, 1)))
        with pytest.raises(TypeError, match="no size"), made[1].agreements.objecting((0, 1), "policy"):
            raise TypeError("no size" + 5000 * "!")
        [error] = await outcomes(waiting)
        assert isinstance(error, RemoteError) and error.kind == "TypeError"
        assert error.text.startswith("no size!") and len(error.text) < 1000


def test_the_first_whose_time_is_up_ends_it_for_all() -> None:
    """Regression: the rank left without notifying the others, which made a group that contained it."""

    async def main(world: World) -> tuple[int, ...]:
        await world.sleep({0: 9, 1: 0, 2: 17}[world.rank])
        with pytest.raises(StartTimeoutError) as caught:
            await world.new_group([0, 1, 2], timeout_s=10)
        assert world.time() == pytest.approx({0: 10, 1: 10, 2: 17}[world.rank], abs=0.1)
        await world.new_group([0, 1, 2], timeout_s=10)
        return caught.value.missing

    assert simulate(main, ranks=3, seed=1).results == ((2,),) * 3


@pytest.mark.parametrize("late", [0, 1, 2])
@pytest.mark.parametrize("cancelled", [0, 1, 2])
async def test_a_cancelled_member_is_not_counted_on(cancelled: int, late: int) -> None:
    """Regression: the others began without it or timed out, and its next start was matched with their previous one."""
    ranks = (0, 1, 2)
    async with worlds(3) as made:
        for _ in range(3):
            waiting = {r: asyncio.ensure_future(agree(made[r], ranks, timeout_s=None)) for r in ranks if r != late}
            if cancelled == late:
                waiting[late] = asyncio.ensure_future(agree(made[late], (*ranks,), timeout_s=None, values={"a": "b"}))
                waiting[late].cancel()  # before it has begun
                await yields(5)
                assert all(task.done() is (rank == late) for rank, task in waiting.items())
                waiting[late] = asyncio.ensure_future(agree(made[late], ranks, timeout_s=None))
                assert await outcomes(*waiting.values()) == [Agreed(0, {})] * 3
                continue
            await yields(5)
            waiting.pop(cancelled).cancel()
            await yields(5)
            waiting[late] = asyncio.ensure_future(agree(made[late], ranks, timeout_s=None))
            for error in await outcomes(*waiting.values()):
                assert isinstance(error, RemoteError) and (error.rank, error.kind) == (cancelled, "CancelledError")
            assert await outcomes(*(agree(world, ranks) for world in made)) == [Agreed(0, {})] * 3
        assert all(map(nothing_is_kept, made))


@pytest.mark.slow
async def test_member_that_arrives_after_a_timeout_leaves_nothing_kept() -> None:
    async with worlds(2) as made:
        [error] = await outcomes(agree(made[0], (0, 1), timeout_s=NOBODY_COMES_S))
        assert isinstance(error, StartTimeoutError)
        made[1].agreements.object((0, 1), "policy", ValueError("late"))
        await yields(5)
        assert not made[0].agreements.led.over
        found = await outcomes(*(agree(world, (0, 1)) for world in made))
        assert found == [Agreed(0, {})] * 2 and [agreed.time for agreed in found] == [2, 2]


def nothing_is_kept(world: World) -> bool:
    agreements = world.agreements
    return not agreements.led.over and not agreements.led.joins and not agreements._verdicts


@pytest.mark.parametrize("first", ["leaves", "objects"])
@pytest.mark.parametrize("how", ["leaves the world", "withdraws"])
async def test_refused_start_is_not_kept_for_members_that_never_arrive(first: str, how: str) -> None:
    """Regression: the leader kept refused starts forever, in order to notify members that had left."""
    async with worlds(3) as made:
        ranks = (0, 1, 2)

        async def leave() -> None:
            if how == "withdraws":
                made[2].agreements.withdraw(ranks, "policy")
            else:
                made[2].peers.leave()
            await yields(5)

        async def object_to_it() -> None:
            made[1].agreements.object(ranks, "policy", ValueError("no"))
            await yields(5)

        for act in (leave, object_to_it) if first == "leaves" else (object_to_it, leave):
            await act()
        assert not nothing_is_kept(made[0]), "rank 0 must keep the objection until it joins"
        [error] = await outcomes(agree(made[0], ranks))
        assert isinstance(error, RemoteError) and error.rank == 1
        assert nothing_is_kept(made[0])


@pytest.mark.parametrize("how", ["leaves the world", "withdraws"])
async def test_a_meeting_without_one_who_has_left_is_not_kept(how: str) -> None:
    """A start is also forgotten if its leader arrives too late for a member that has given up and left."""
    async with worlds(3) as made:
        ranks = (0, 1, 2)
        came = asyncio.ensure_future(agree(made[2], ranks))
        await yields(5)
        came.cancel()
        made[2].peers.leave() if how == "leaves the world" else made[2].agreements.withdraw(ranks, "policy")
        await yields(5)
        for error in await outcomes(agree(made[0], ranks), agree(made[1], ranks)):
            assert isinstance(error, RemoteError) and (error.rank, error.kind) == (2, "CancelledError")
        for _ in range(3):
            for error in await outcomes(agree(made[0], ranks), agree(made[1], ranks)):
                assert isinstance(error, ClosedError) and error.ranks == (2,)
        assert nothing_is_kept(made[0])


@pytest.mark.parametrize("objector", [0, 1])
async def test_objection_reaches_later_members_after_its_leader_left(objector: int) -> None:
    """Regression: later members got the error that the leader had left, not the leader's objection."""
    async with worlds(3) as made:
        made[objector].agreements.object((0, 1, 2), "policy", ValueError("no"))
        await yields(5)
        for rank in {0, objector}:
            made[rank].peers.leave()
        await yields(5)
        late = [world for world in made if world.rank not in (0, objector)]
        for error in await outcomes(*(agree(world, (0, 1, 2), timeout_s=None) for world in late)):
            assert isinstance(error, RemoteError) and (error.rank, error.text) == (objector, "no")
        assert all(map(nothing_is_kept, (made[0], *late)))
        for error in await outcomes(*(agree(world, (0, 1, 2), timeout_s=None) for world in late)):
            assert isinstance(error, ClosedError), "the objection must be kept for one attempt only"


def test_caught_mistake_reaches_the_others_after_its_rank_left() -> None:
    async def main(world: World) -> str:
        if world.rank == 0:
            with pytest.raises(ValueError, match="got 7"):
                await ad.new_mesh({"POP": 7})
            return ""
        while 0 not in world.services.left:
            await world.safe_point()
        with pytest.raises(RemoteError, match="got 7") as caught:
            await ad.new_mesh({"POP": 3})
        return caught.value.kind

    for seed in range(10):
        assert simulate(main, ranks=3, seed=seed).results == ("", "ValueError", "ValueError")
    assert ad.run_local(main, ranks=3, strict=True) == ["", "ValueError", "ValueError"]


async def test_a_group_knows_its_ranks_and_has_a_tag_of_its_own() -> None:
    async with worlds(4) as made:
        first = await outcomes(*(made[rank].new_group([3, 1]) for rank in (1, 3)))
        second = await outcomes(*(made[rank].new_group((1, 2, 3)) for rank in (1, 2, 3)))
        assert [group.ranks for group in first] == [(3, 1)] * 2
        assert [group.index for group in first] == [1, 0]
        assert [group.size for group in second] == [3] * 3
        assert len({group.tag for group in first}) == len({group.tag for group in second}) == 1
        assert first[0].tag != second[0].tag
        third = await outcomes(*(made[rank].new_group([0, 2]) for rank in (0, 2)))
        assert third[0].tag != second[0].tag, "rank 2 is in a group with that tag, so the tag must not be reused"
        assert all(tags.COLLECTIVE_FIRST < group.tag <= tags.COLLECTIVE_LAST for group in (*first, *second, *third))


async def test_tags_of_groups_run_out_with_a_word() -> None:
    async with worlds(1) as [world]:
        assert world.peers.groups.ledger.tag_of(898) == tags.COLLECTIVE_LAST
        with pytest.raises(LocalProtocolError, match="at most 899 groups at a time"):
            world.peers.groups.ledger.tag_of(899)


@pytest.mark.parametrize(
    ("ranks", "words"),
    [
        ([], "ranks must include this rank"),
        ([0, 1, 0], "ranks must be distinct"),
        ([0, 4], "from 0 to 3, got 4"),
        ([-1, 0], "got -1"),
        ([0, True], "got True"),
        ([0, 1.0], "got 1.0"),
        ([1, 2], r"ranks must include this rank, 0, got \[1, 2\]"),
    ],
)
def test_lists_that_are_no_group_are_refused(ranks: list[Any], words: str) -> None:
    with pytest.raises(LocalProtocolError, match=words):
        check_ranks(ranks, rank=0, size=4)


def test_groups_compare_by_identity() -> None:
    one, other = (Group((0, 1), 0, 7101, None) for _ in range(2))
    assert one != other
    assert len({one, other}) == 2


@pytest.mark.slow
def test_what_is_said_of_a_large_group_stays_short() -> None:
    """A list of ten thousand ranks takes 49 KB in every message: rank 0 once received 490 MB before it started."""

    async def meet(world: World) -> None:
        await world.agreements.agree(world.group.ranks, "policy", {}, timeout_s=60.0)

    def longest(ranks: int) -> int:
        report = simulate(meet, ranks=ranks)
        report.value()
        return max(event.nbytes for event in report.trace if event.kind == "send")

    assert longest(200) <= longest(20) + 8, "the length of an agreement's messages must not grow with the group"


async def test_subjects_name_each_rank_of_the_group_all_the_same() -> None:
    async with worlds(6) as made:
        found = await outcomes(*(agree(made[rank], (0, 1, 2, 5), timeout_s=NOBODY_COMES_S) for rank in (0, 1, 2)))
        assert {error.missing for error in found} == {(5,)} and all(names(error, "0-2,5") for error in found)


# ---------------------------------------------------------------------------------------------------- lists that differ


@pytest.mark.parametrize(
    "lists",
    [
        {0: [[0, 1]], 1: [[1, 0]]},
        {0: [[0, 1]], 1: [[0, 1, 2]], 2: [[0, 1, 2]]},
        {0: [[0, 1, 2]], 1: [[0, 1, 2]], 2: [[1, 2]]},
        {0: [[0, 1], [0, 1, 2]], 1: [[0, 1, 2], [0, 1]], 2: [[0, 1, 2]]},
    ],
    ids=str,
)
def test_lists_that_differ_are_told_at_once(lists: dict[int, list[list[int]]]) -> None:
    """Regression: each rank waited a minute for the other, and then reported that the other had not arrived."""

    async def main(world: World) -> None:
        with pytest.raises(DisagreementError) as caught:
            for ranks in lists[world.rank]:
                await ad.new_group(ranks)
        assert caught.value.facts["difference"] == "ranks"

    for seed in range(10):
        report = simulate(main, ranks=len(lists), seed=seed, strict=True)
        assert report.results == (None,) * len(lists)
        assert report.virtual_time_s < 10


def test_rank_that_waits_in_another_group_is_waited_for() -> None:
    async def main(world: World) -> int:
        if world.rank == 1:
            await asyncio.sleep(20)
        groups = [await ad.new_group(ranks) for ranks in ([1, 3], [2, 3, 0]) if world.rank in ranks]
        return len(groups)

    report = simulate(main, ranks=4, strict=True)
    assert report.results == (1, 1, 1, 2)
    assert report.virtual_time_s > 20


def test_who_starts_what_is_named_where_lists_differ() -> None:
    async def main(world: World) -> str:
        with pytest.raises(DisagreementError) as caught:
            await ad.new_group([0, 1, 2] if world.rank else [0, 1])
        return str(caught.value)

    told = simulate(main, ranks=3).results
    both = (
        "rank 0 starts 'new group on ranks 0-1' and rank 1 starts 'new group on ranks 0-2', and each waits for the "
        "other"
    )
    assert [both in text for text in told] == [True] * 3


@pytest.mark.parametrize("late", [0, 1, 2])
def test_a_rank_that_computes_for_long_is_waited_for(late: int) -> None:
    async def main(world: World) -> int:
        if world.rank == late:
            await asyncio.sleep(30)
        first = await ad.new_group([0, 1, 2])
        if world.rank:
            await ad.new_group([2, 1])
        return first.tag

    report = simulate(main, ranks=3, strict=True)
    assert len(set(report.results)) == 1 and isinstance(report.results[0], int)


def test_a_verdict_that_is_late_is_no_disagreement() -> None:
    """Rank 0 has gone on, and waits for rank 1 in the next group; this one waits for rank 0's verdict in the first."""

    async def main(world: World) -> list[tuple[int, ...]]:
        groups = [await ad.new_group(ranks) for ranks in ([0, 1], [2, 0, 1]) if world.rank in ranks]
        assert nothing_is_kept(world)
        return [group.ranks for group in groups]

    report = simulate(main, ranks=3, faults=[Delay(source=0, dest=1, number=1, duration_s=20)], strict=True)
    assert report.results == ([(0, 1), (2, 0, 1)], [(0, 1), (2, 0, 1)], [(2, 0, 1)])
    report.check_faults()
    assert report.virtual_time_s > 20


@pytest.mark.slow
async def test_rank_lost_before_a_world_was_opened_is_known_in_it() -> None:
    hub = LocalHub(2)
    hub.lose(0)
    engine = Engine(hub.transport(1), asyncio.get_running_loop())
    engine.start()
    services = Services(engine, engine.loop, NONCE)
    world = World(services, engine.loop, nonce=NONCE, group=Group((0, 1), 1, tags.COLLECTIVE_FIRST, None))
    with pytest.raises(RankLostError, match="rank 0"):
        async with asyncio.timeout(60):
            await world.new_group([0, 1])
    engine.stop()


def test_rank_lost_at_any_moment_of_a_start_is_named_alike() -> None:
    """Regression: a send just before the world was notified of the loss raised the transport's own error."""

    async def main(world: World) -> str:
        try:
            for _ in range(3):
                await ad.new_group([0, 1, 2])
        except AsyncdistError as error:
            return f"{type(error).__name__}: {error.message}"
        return "made"

    found = set()
    for victim, turn, seed in itertools.product((0, 2), range(1, 10), range(8)):
        faults = [Kill(rank=victim, at_turn=turn)]
        report = simulate(main, ranks=3, seed=seed, faults=faults, network=Network(loss_detection_s=0.0))
        found |= {(victim, report.results[rank]) for rank in range(3) if rank != victim}
    said = "RankLostError: new group on ranks 0-2 failed: rank {} is lost"
    assert {(victim, told) for victim, told in found if told != "made"} == {(0, said.format(0)), (2, said.format(2))}


def test_start_timeout_reports_the_wait_of_the_first_to_give_up() -> None:
    """Regression: each rank's error named its own timeout_s, such as 30 s after a wait of 1 s."""

    async def main(world: World) -> str:
        if world.rank == 2:
            await world.sleep(10)
        with pytest.raises(StartTimeoutError) as caught:
            await world.new_group([0, 1, 2], timeout_s=1 if world.rank else 30)
        return str(caught.value)

    report = simulate(main, ranks=3)
    assert all(names(said, "rank 2", "1 s") for said in report.results[:2]), report.results
    assert "rank 2 joined too late, because the other ranks waited only 1 s" in report.results[2]


@pytest.mark.parametrize("tidies_up_s", [0.0, 1.0])
def test_a_task_that_fails_beside_a_start_is_what_is_raised(tidies_up_s: float) -> None:
    """Regression: the error was that of the start which the failing task had cancelled, not the task's own."""

    async def main(world: World) -> None:
        async def fail() -> None:
            await asyncio.sleep(0.1)
            raise ValueError("the disk is full")

        if world.rank == 1:
            world.spawn(fail())
        if world.rank == 2:
            await world.sleep(50)
        try:
            await ad.new_group([0, 1, 2])
        finally:
            await asyncio.sleep(tidies_up_s)

    report = simulate(main, ranks=3, seed=1, return_exceptions=True)
    with pytest.raises(ExceptionGroup) as caught:
        report.value()
    assert caught.value is report.results[1]
    assert [repr(error) for error in caught.value.exceptions] == ["ValueError('the disk is full')"]
    assert [str(report.results[rank]) for rank in (0, 2)] == [
        "rank 1 failed: ValueError: the disk is full [rank=1]"
    ] * 2


async def test_leader_cancelled_after_the_decision_keeps_nothing() -> None:
    async with worlds(2) as (leader, member):
        leading = asyncio.ensure_future(leader.agreements.agree((0, 1), "a game", {}, timeout_s=None))
        await yields(3)
        member.agreements.object((0, 1), "a game", ValueError("no"))
        while not leader.agreements._verdicts:
            leader.services.engine.poll()
        leading.cancel()
        await asyncio.wait([leading])
        assert nothing_is_kept(leader) and nothing_is_kept(member)


def test_groups_that_are_made_together_have_tags_of_their_own() -> None:
    """Regression: two groups that a rank's tasks made concurrently shared one tag."""

    async def main(world: World) -> set[int]:
        return {group.tag for group in await asyncio.gather(*map(ad.new_group, ([0, 1], [1, 0], [0, 1])))}

    for seed in range(10):
        for tags_of_rank in simulate(main, ranks=2, seed=seed, strict=True).results:
            assert len(tags_of_rank) == 3
