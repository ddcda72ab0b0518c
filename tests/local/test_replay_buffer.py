"""Tests replay buffers, local and simulated; ``scripts/replay.py`` tests them between real processes."""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np
import pytest
import torch
from support.facts import naming
from support.replay import on_ranks, run
from support.seeds import seeds

import asyncdist as ad
from asyncdist.simulation import Network
from asyncdist.simulation.faults import Kill, Stall
from protocols import ReplayBuffer, Sample, serve_replay_buffer
from protocols.replay_buffer import client as replay_client


def batch_of(rank: int, numbers: list[int]) -> dict[str, torch.Tensor]:
    return {"rank": torch.full((len(numbers),), rank), "number": torch.tensor(numbers, dtype=torch.int32)}


async def add_everything(world: ad.World, buffer: ReplayBuffer, count: int, size: int) -> None:
    """Add ``count`` batches of ``size`` items, all at once."""
    numbers = [[batch * size + item for item in range(size)] for batch in range(count)]
    async with asyncio.TaskGroup() as tasks:
        for some in numbers:
            tasks.create_task(buffer.add(batch_of(world.rank, some)))


# -- adding and drawing -----------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("size", [1, 7, 6000])
def test_every_item_is_stored_once_and_drawn_unchanged(size: int) -> None:
    """6,000 items of 12 bytes are sent as streams, in both directions."""
    seen: list[tuple[int, int]] = []

    def note(batch: Any) -> float:
        seen.extend(zip(batch["rank"].tolist(), batch["number"].tolist(), strict=True))
        return float(batch["number"][0])

    async def client(world: ad.World, buffer: ReplayBuffer) -> Sample:
        for batch in range(10):
            first = batch * size
            assert await buffer.add(batch_of(world.rank, list(range(first, first + size)))) == float(first)
        await ad.barrier(group=await ad.new_group([0, 1, 2]))
        return await buffer.sample(5000, wait=False)

    *samples, statistics = run(4, client, capacity=30 * size, score=note)
    expected = {(rank, number) for rank in range(3) for number in range(10 * size)}
    assert sorted(seen) == sorted(expected)
    assert statistics.added == dict.fromkeys(range(3), 10 * size)
    assert (statistics.size, statistics.evicted_count) == (30 * size, 0)
    for sample in samples:
        drawn = list(zip(sample.batch["rank"].tolist(), sample.batch["number"].tolist(), strict=True))
        assert len(drawn) == min(5000, 30 * size)
        assert set(drawn) <= expected
        assert sample.batch["number"].dtype == torch.int32
        assert (sample.weights == 1).all()


def test_clients_may_have_the_keys_of_their_dicts_in_any_order() -> None:
    """Rows may have any layout: one row of a column is contiguous according to torch, and has stride 2."""

    async def client(world: ad.World, buffer: ReplayBuffer) -> Any:
        columns = torch.tensor([[world.rank, 10.0 + world.rank], [0, 0]])
        batch = {"state": columns[:1, 0], "reward": columns[:1, 1]}
        for _ in range(2):
            await buffer.add(batch if world.rank else dict(reversed(batch.items())))
            await buffer.add(dict(reversed(batch.items())))
        await ad.barrier(group=await ad.new_group([0, 1]))
        drawn = (await buffer.sample(200, wait=False)).batch
        return set(zip(drawn["state"].tolist(), drawn["reward"].tolist(), strict=True))

    *found, statistics = run(3, client, capacity=10)
    assert found == [{(0.0, 10.0), (1.0, 11.0)}] * 2
    assert statistics.added == {0: 4, 1: 4}


@pytest.mark.parametrize("seed", seeds(20))
def test_simulated_with_tasks_that_add_and_draw_at_once(seed: int) -> None:
    async def client(world: ad.World, buffer: ReplayBuffer) -> int:
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(add_everything(world, buffer, 100, 3))
            draws = [tasks.create_task(buffer.sample(1 + 40 * index)) for index in range(5)]
        for index, draw in enumerate(draws):
            numbers = draw.result().batch["number"]
            assert len(numbers) == 1 + 40 * index
            assert 0 <= int(numbers.min()) <= int(numbers.max()) < 300
        return 1

    report = ad.simulate(on_ranks(5, client, in_flight_max=4, prioritized=True), ranks=5, seed=seed, strict=True)
    report.value()
    statistics = report.results[4]
    assert statistics.added == dict.fromkeys(range(4), 300)
    assert statistics.drawn == dict.fromkeys(range(4), 1 + 41 + 81 + 121 + 161)
    assert statistics.evicted_count == 200


@pytest.mark.slow
def test_a_fast_client_waits_in_place_of_filling_the_server() -> None:
    """There are a hundred thousand adds at once, but never more than four in transit, however busy the server is."""
    unanswered = most = 0

    async def client(world: ad.World, buffer: ReplayBuffer) -> None:
        nonlocal unanswered, most
        send = buffer._channel.send_nowait

        def counting(message: Any, dest: int, **options: Any) -> None:
            nonlocal unanswered, most
            unanswered += type(message).__name__ == "Add"
            most = max(most, unanswered)
            send(message, dest, **options)

        buffer._channel.send_nowait = counting

        async def add(number: int) -> None:
            nonlocal unanswered
            await buffer.add(batch_of(0, [number]))
            unanswered -= 1

        async with asyncio.TaskGroup() as tasks:
            for number in range(2000):
                tasks.create_task(add(number))

    _, statistics = run(2, client, in_flight_max=4)
    assert statistics.added == {0: 2000}
    assert most <= 4


def test_more_adds_are_in_flight_than_a_channel_holds() -> None:
    """Regression: with ``in_flight_max`` above 4096, a client of a slow server raised BusyError."""
    count = 5000

    async def client(world: ad.World, buffer: ReplayBuffer) -> None:
        await world.sleep(1.0)
        await add_everything(world, buffer, count, 1)

    network, stall = Network(eager_nbytes=1), Stall(1, 0.5, 10.0)
    main = on_ranks(2, client, in_flight_max=count)
    statistics = ad.simulate(main, ranks=2, seed=1, network=network, faults=[stall]).results[1]
    assert statistics.added == {0: count}


def test_a_draw_waits_until_there_are_enough() -> None:
    async def client(world: ad.World, buffer: ReplayBuffer) -> list[int]:
        if world.rank == 0:
            return [len((await buffer.sample(5)).batch["number"]), len((await buffer.sample(9)).batch["number"])]
        with pytest.raises(ad.BusyError, match="'replay' has no items yet"):
            await buffer.sample(3, wait=False)
        for number in range(9):
            await buffer.add(batch_of(1, [number]))
            await world.sleep(0.001)
        return [len((await buffer.sample(100, wait=False)).ids)]

    assert run(3, client)[:2] == [[5, 9], [9]]


def test_several_buffer_ranks_serve_their_own_clients() -> None:
    async def main(world: ad.World) -> Any:
        if world.rank >= 4:
            clients = (0, 1) if world.rank == 4 else (2, 3)
            return await serve_replay_buffer(clients, capacity=50)
        async with ReplayBuffer(4 + world.rank // 2) as buffer:
            await add_everything(world, buffer, 5, 2)
            drawn = await buffer.sample(20)
        return set(drawn.batch["rank"].tolist())

    *clients, first, second = ad.run_local(main, ranks=6, strict=True)
    assert first.added == {0: 10, 1: 10}
    assert second.added == {2: 10, 3: 10}
    assert all(ranks <= ({0, 1} if rank < 2 else {2, 3}) for rank, ranks in enumerate(clients))


def test_two_buffers_of_one_rank_and_one_after_the_other() -> None:
    async def main(world: ad.World) -> Any:
        if world.rank == 1:
            both = await asyncio.gather(
                serve_replay_buffer([0], capacity=5, name="a"), serve_replay_buffer([0], capacity=5, name="b")
            )
            return [*both, await serve_replay_buffer([0], capacity=5, name="a")]
        for number in range(2):
            async with ReplayBuffer(1, name="a") as buffer:
                await buffer.add(torch.full((2,), number))
                if number == 0:
                    async with ReplayBuffer(1, name="b") as other:
                        await other.add(torch.ones(3, 3))
                    first = (await buffer.sample(2)).batch
        return first

    first, (one, two, three) = ad.run_local(main, ranks=2, strict=True)
    assert set(first.tolist()) == {0}
    assert [statistics.added for statistics in (one, two, three)] == [{0: 2}, {0: 3}, {0: 2}]


@pytest.mark.slow
def test_priorities_travel_and_can_be_changed() -> None:
    async def client(world: ad.World, buffer: ReplayBuffer) -> list[set[int]]:
        async def drawn(n: int) -> set[int]:
            return {int(value) for _ in range(20) for value in (await buffer.sample(n)).batch}

        found = []
        await buffer.add(torch.arange(4), priorities=torch.tensor([0.0, 1.0, 0.0, 0.0]))
        found.append(await drawn(4))
        await buffer.update_priorities([0, 1, 3], [2.0, 0.0, 2.0])
        found.append(await drawn(4))
        await buffer.add(torch.arange(8000), priorities=torch.cat([torch.zeros(7999), torch.ones(1)]))
        await buffer.update_priorities(torch.arange(4), torch.zeros(4))
        found.append(await drawn(5000))
        await buffer.update_priorities(torch.arange(8004), torch.arange(8004) == 4)
        found.append(await drawn(5000))
        return found

    found, statistics = run(2, client, prioritized=True, capacity=9000)
    assert found == [{1}, {0, 3}, {7999}, {0}]
    assert statistics.stale_update_count == 0


# -- ends -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", seeds(10))
@pytest.mark.parametrize("size", [1, 4000])
def test_cancelled_requests_leave_nothing_behind(seed: int, size: int) -> None:
    """Each request is stored whole or not at all; ``strict`` reports any leftovers."""

    async def client(world: ad.World, buffer: ReplayBuffer) -> int:
        done = 0
        for number in range(30):
            request: Any = (
                buffer.sample(1 + number * size // 10) if number % 3 == 2 else buffer.add(torch.zeros(size, 2))
            )
            task = asyncio.create_task(request)
            await world.sleep(0.00002 * number)
            task.cancel()
            await asyncio.wait([task])
            done += not task.cancelled()
        await buffer.add(torch.ones(1, 2))
        return done

    report = ad.simulate(on_ranks(4, client, capacity=100_000), ranks=4, seed=seed, strict=True)
    report.value()
    assert all(count % size == 1 % size for count in report.results[3].added.values())


@pytest.mark.parametrize("at", [5, 40, 90])
@pytest.mark.parametrize("seed", range(5))
def test_a_client_that_dies_does_not_keep_the_server(seed: int, at: int) -> None:
    async def client(world: ad.World, buffer: ReplayBuffer) -> None:
        for _ in range(40):
            await buffer.add(torch.zeros(5000 if world.rank == 1 else 1, 2))
            await buffer.sample(3000, wait=False)

    report = ad.simulate(on_ranks(4, client, capacity=9000), ranks=4, seed=seed, faults=[Kill(1, at_turn=at)])
    statistics = report.results[3]
    assert statistics.added[0] == statistics.added[2] == 40
    assert statistics.added[1] < 200_000


@pytest.mark.parametrize("seed", range(5))
def test_clients_of_a_server_that_dies_are_told(seed: int) -> None:
    async def client(world: ad.World, buffer: ReplayBuffer) -> int:
        added = 0
        with pytest.raises((ad.ClosedError, ad.RankLostError)):
            while True:
                await buffer.add(torch.zeros(3000, 4))
                added += 1
        with pytest.raises((ad.ClosedError, ad.RankLostError)):
            await buffer.sample(1)
        return added

    report = ad.simulate(on_ranks(3, client), ranks=3, seed=seed, faults=[Kill(2, at_turn=60)])
    assert [report.results[rank] >= 0 for rank in (0, 1)] == [True, True]


def test_an_exception_in_the_block_does_not_wait_for_answers() -> None:
    async def main(world: ad.World) -> Any:
        if world.rank == 1:
            return await serve_replay_buffer([0], capacity=5)
        with pytest.raises(KeyError):
            async with ReplayBuffer(1) as buffer:
                waiting = asyncio.create_task(buffer.sample(3))
                await asyncio.sleep(0)
                raise KeyError("mine")
        with pytest.raises(ad.ClosedError, match="this rank has left the async with block"):
            await waiting
        return None

    ad.run_local(main, ranks=2, strict=True)


# -- bad input --------------------------------------------------------------------------------------------------------


def test_wrong_arguments_are_named() -> None:
    async def client(world: ad.World, buffer: ReplayBuffer) -> None:
        assert buffer.capacity == 1000
        await buffer.add(torch.ones(3, 2))
        for batch, words in (
            (torch.ones(3, 3), "must have the layout of the first one"),
            (torch.ones(2, 2).double(), "float64"),
        ):
            with pytest.raises(ValueError, match=words):
                await buffer.add(batch)
        with pytest.raises(ValueError, match=naming("n", 0, 1)):
            await buffer.sample(0)
        with pytest.raises(
            ad.LocalProtocolError, match="n must be <= 1000, the capacity of the replay buffer 'replay', got 1001"
        ):
            await buffer.sample(1001)
        for beta in (2, "x"):
            with pytest.raises(ValueError, match=naming("beta", repr(beta), 0, 1)):
                await buffer.sample(1, beta=beta)  # type: ignore[arg-type]
        for n in (True, 1.0, "3"):
            with pytest.raises(ValueError, match=naming("n", repr(n), 1)):
                await buffer.sample(n)  # type: ignore[arg-type]
        assert len((await buffer.sample(np.int64(3))).ids) == 3  # type: ignore[arg-type]
        with pytest.raises(ValueError, match="priorities must be None"):
            await buffer.add(torch.ones(1, 2), priorities=[1.0])
        with pytest.raises(ValueError, match="uniform sampling"):
            await buffer.update_priorities([0], [1.0])
        with pytest.raises(ad.LocalProtocolError, match="can be entered only once"):
            await buffer.__aenter__()

    run(2, client)


def test_wrong_priorities_are_named() -> None:
    async def client(world: ad.World, buffer: ReplayBuffer) -> None:
        for wrong, words in (([1.0], "got 1 for 2"), ([1.0, -1.0], "-1.0"), ([1.0, torch.nan], "nan")):
            with pytest.raises(ValueError, match=words):
                await buffer.add(torch.ones(2), priorities=wrong)
        with pytest.raises(TypeError, match=naming("priorities", "'ab'", "one number for each item")):
            await buffer.add(torch.ones(2), priorities="ab")  # type: ignore[arg-type]
        for ids in ([1.7, 2], torch.tensor([1.0, 2.0])):
            with pytest.raises(ValueError, match=naming("ids", "integers from Sample.ids")):
                await buffer.update_priorities(ids, [1.0, 1.0])  # type: ignore[arg-type]
        with pytest.raises(TypeError, match=naming("ids", "'ab'")):
            await buffer.update_priorities("ab", [1.0, 1.0])  # type: ignore[arg-type]
        await buffer.add(torch.ones(2), priorities=[0, 0])
        with pytest.raises(ad.LocalProtocolError, match="zero"):
            await buffer.sample(1)

    run(2, client, prioritized=True)


@pytest.mark.parametrize(
    ("options", "facts"),
    [
        ({"clients": []}, ["clients must have at least one rank, got none"]),
        ({"clients": [0, 0]}, ["clients must be a list of distinct ranks from 0 to 1, got [0, 0]"]),
        ({"clients": [5]}, ["clients", [5], 0, 1]),
        ({"clients": 0}, ["clients", 0, 1]),
        ({"clients": None}, ["clients", None, 0, 1]),
        ({"clients": "01"}, ["clients", "'01'"]),
        ({"alpha": "x"}, ["alpha must be >= 0 and finite, got 'x'"]),
        ({"seed": "x"}, ["seed", "'x'", 0]),
        ({"seed": -1}, ["seed", -1, 0]),
        ({"score": 5}, ["score must be None or a function that takes a batch, got 5"]),
        ({"prioritized": "no"}, ["prioritized must be True or False, got 'no'"]),
        ({"capacity": 0}, ["capacity", 0, 1]),
        ({"in_flight_max": 1.5}, ["in_flight_max", 1.5]),
        ({"alpha": -1}, ["alpha", -1, 0]),
        ({"name": 3}, ["name must be a string, got 3"]),
    ],
)
def test_a_server_refuses_wrong_options(options: dict[str, Any], facts: list[object]) -> None:
    async def main(world: ad.World) -> None:
        with pytest.raises((ValueError, TypeError), match=naming(*facts)):
            await serve_replay_buffer(**{"clients": [0], "capacity": 5, **options})

    ad.run_local(main, ranks=2, strict=True)


def test_non_client_rank_and_unlike_items_are_refused() -> None:
    async def main(world: ad.World) -> None:
        if world.rank == 3:
            await serve_replay_buffer([0, 1], capacity=5)
        elif world.rank == 2:
            with pytest.raises(
                ad.DisagreementError,
                match=r"rank 2 is not a client of the replay buffer 'replay' on rank 3; the clients are \[0, 1\]",
            ):
                async with ReplayBuffer(3):
                    pass
        else:
            async with ReplayBuffer(3) as buffer:
                if world.rank == 0:
                    await buffer.add(torch.ones(2))
                await ad.barrier(group=await ad.new_group([0, 1]))
                if world.rank == 1:
                    with pytest.raises(ad.DisagreementError, match="float64"):
                        await buffer.add(torch.ones(2).double())

    ad.run_local(main, ranks=4, strict=True)


@pytest.mark.parametrize("seconds", ["5", 0, float("nan"), None])
def test_a_timeout_that_is_no_time_is_refused(seconds: Any) -> None:
    async def main(world: ad.World) -> None:
        with pytest.raises(ValueError, match=naming("start_timeout_s", repr(seconds), 0)):
            ReplayBuffer(0, start_timeout_s=seconds)

    ad.run_local(main, ranks=1, strict=True)


def test_a_server_that_never_serves_is_named() -> None:
    async def main(world: ad.World) -> None:
        if world.rank == 0:
            with pytest.raises(ad.StartTimeoutError, match=r"rank 1 did not serve the replay buffer 'x' within 0\.3 s"):
                async with ReplayBuffer(1, name="x", start_timeout_s=0.3):
                    pass
        await ad.barrier()

    ad.run_local(main, ranks=2)


def test_a_score_may_be_a_number_of_numpy() -> None:
    async def client(world: ad.World, buffer: ReplayBuffer) -> None:
        assert await buffer.add(torch.ones(2)) == 0.5

    run(2, client, score=lambda _: np.float32(0.5))


def test_a_score_that_is_no_number_ends_the_job() -> None:
    async def client(world: ad.World, buffer: ReplayBuffer) -> None:
        await buffer.add(torch.ones(2))

    with pytest.raises(TypeError, match="score must return a number, a tensor of one element or None, got a str"):
        run(2, client, score=lambda _: "good")


def test_requests_without_memory_do_not_hinder_later_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    """Regression: the server kept the items of such a draw, and all later draws of the client waited forever."""

    class NoMemory:
        def __getattr__(self, name: str) -> Any:
            return getattr(np, name)

        def empty(self, *_: Any) -> Any:
            raise MemoryError

        array = empty

    async def client(world: ad.World, buffer: ReplayBuffer) -> int:
        items = torch.zeros(100, 1000)
        await buffer.add(items)
        monkeypatch.setattr(replay_client, "np", NoMemory())
        with pytest.raises(MemoryError):
            await buffer.sample(100)
        with pytest.raises(MemoryError):
            await buffer.add(items)
        monkeypatch.setattr(replay_client, "np", np)
        await buffer.add(items)
        return len((await buffer.sample(200)).ids)

    assert run(2, client, in_flight_max=1)[0] == 200


def test_a_client_between_two_servers_is_not_forgotten() -> None:
    """Regression: between two servers, its messages were dropped. It repeated them too seldom to be in time."""

    async def main(world: ad.World) -> float | None:
        if world.rank == 1:
            for _ in range(2):
                await serve_replay_buffer([0], capacity=10)
                await world.sleep(35.0)
            return None
        async with ReplayBuffer(1) as buffer:
            await buffer.add(torch.zeros(1))
        with pytest.raises(ad.StartTimeoutError):
            async with ReplayBuffer(1, start_timeout_s=5.0):
                pass
        async with ReplayBuffer(1) as buffer:
            await buffer.add(torch.zeros(1))
            return world.time()

    entered_at, _ = ad.simulate(main, ranks=2, seed=1, strict=True).results
    assert entered_at == pytest.approx(35.0, abs=0.1)


def test_a_client_that_gave_up_between_servers_is_not_waited_for() -> None:
    ends = list[float]()

    async def main(world: ad.World) -> list[int]:
        if world.rank == 2:
            served = []
            for _ in range(2):
                served.append((await serve_replay_buffer([0, 1], capacity=10)).size)
                ends.append(world.time())
                await world.sleep(10.0)
            return served
        async with ReplayBuffer(2) as buffer:
            await buffer.add(torch.zeros(1))
        await world.sleep(1.0)
        with pytest.raises(ad.StartTimeoutError):  # rank 0 is killed before
            async with ReplayBuffer(2, start_timeout_s=1.0 if world.rank else 60.0):
                pass
        await world.sleep(20.0)
        return []

    faults = [Kill(0, at_s=5.0)]
    assert ad.simulate(main, ranks=3, seed=1, faults=faults).results[2] == [2, 0]
    assert 20.0 < ends[1] < 25.0, "client 1 was expected until its end"


def test_a_draw_without_a_stream_slot_does_not_hinder_later_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    """Regression: the server kept the items of such a draw, and all later draws of the client waited forever."""

    async def client(world: ad.World, buffer: ReplayBuffer) -> int:
        await buffer.add(torch.zeros(100, 1000))

        def refuse(_: object) -> None:
            raise ad.BusyError("all slots are in use")

        with monkeypatch.context() as patched:
            patched.setattr(world.services.slots, "take", refuse)
            with pytest.raises(ad.BusyError):
                await buffer.sample(100)
        return len((await buffer.sample(100)).ids)

    assert run(2, client)[0] == 100
