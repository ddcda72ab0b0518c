"""Tests replay buffers whose ranks leave, rejoin, die, arrive late, or send malformed messages."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from typing import Any

import pytest
import torch
from support.facts import naming
from support.replay import on_ranks, run
from support.seeds import seeds

import asyncdist as ad
from asyncdist.simulation.faults import Kill
from protocols import AverageAllPolicy, ReplayBuffer, serve_replay_buffer
from protocols.replay_buffer import messages, server as replay_server


def test_a_client_lost_at_its_answer_leaves_the_others_served(monkeypatch: pytest.MonkeyPatch) -> None:
    """Regression: under ``--survive`` on MPI, the send noticed the loss while the client's draws were iterated."""
    server = replay_server._Server
    send = server._send_nowait

    def lose_rank_0(self: Any, rank: int, message: Any) -> Any:
        if rank == 0 and isinstance(message, messages.Drawn):
            self._on_gone(0)
            return None
        return send(self, rank, message)

    async def client(world: ad.World, buffer: ReplayBuffer) -> None:
        if world.rank == 0:
            draws = [asyncio.ensure_future(buffer.sample(2)) for _ in range(3)]
            await asyncio.gather(*draws, return_exceptions=True)
            return
        await world.sleep(0.05)
        monkeypatch.setattr(server, "_send_nowait", lose_rank_0)
        await buffer.add(torch.zeros(2, 3))
        drawn.append(len((await buffer.sample(2)).ids))

    drawn: list[int] = []
    with contextlib.suppress(ad.ClosedError):  # rank 0, which is alive, hears that it is no client any more
        run(3, client)
    assert drawn == [2]


# -- draws that wait --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", seeds(10))
@pytest.mark.parametrize("dies", [False, True])
def test_a_draw_fails_when_those_who_add_have_left(seed: int, dies: bool) -> None:
    """Two learners wait for more items than the actors add before one leaves and the other leaves or dies."""

    async def client(world: ad.World, buffer: ReplayBuffer) -> int:
        if world.rank in (0, 1):
            await buffer.add(torch.zeros(5, 2))
            while world.rank == 1 and dies:
                await world.sleep(0.01)
            return 0
        with pytest.raises(
            ad.BusyError,
            match=r"n must be <= 10, .* 'replay', because all clients that add items have left, got 100",
        ):
            await buffer.sample(100)
        return len((await buffer.sample(10)).ids)

    faults = [Kill(1, at_s=0.5)] if dies else []
    report = ad.simulate(on_ranks(5, client), ranks=5, seed=seed, faults=faults, strict=not dies)
    assert [report.results[2], report.results[3]] == [10, 10]


@pytest.mark.parametrize("seed", seeds(10))
def test_a_client_that_leaves_is_not_kept_by_its_own_draw(seed: int) -> None:
    """Other tasks of the client may add while it is in the block, and their items are sent before it leaves."""
    draws: list[asyncio.Task[Any]] = []

    async def client(world: ad.World, buffer: ReplayBuffer) -> None:
        draws.extend(asyncio.create_task(buffer.sample(n)) for n in (30, 31))
        for _ in range(30):
            world.spawn(buffer.add(torch.zeros(1, 2)))
        await asyncio.sleep(0)

    report = ad.simulate(on_ranks(2, client, in_flight_max=2), ranks=2, seed=seed, strict=True)
    report.value()
    assert report.results[1].added == {0: 30}
    enough, too_many = draws
    assert len(enough.result().ids) == 30
    assert isinstance(too_many.exception(), ad.BusyError)


def test_a_draw_of_what_there_is_does_not_wait_behind_another() -> None:
    async def client(world: ad.World, buffer: ReplayBuffer) -> list[int]:
        await buffer.add(torch.zeros(2, 2))
        waiting = asyncio.create_task(buffer.sample(5))
        await asyncio.sleep(0)
        found = [len((await buffer.sample(9, wait=False)).ids), len((await buffer.sample(2)).ids)]
        await buffer.add(torch.zeros(3, 2))
        return [*found, len((await waiting).ids)]

    assert run(2, client)[0] == [2, 2, 5]


def test_large_draws_take_the_servers_memory_one_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    most = 0
    send_items = replay_server._Server._send_items

    def counting(server: Any, client: Any, draw: Any) -> None:
        nonlocal most
        send_items(server, client, draw)
        most = max(most, len(client.outgoing) + len(client.streams))

    monkeypatch.setattr(replay_server._Server, "_send_items", counting)

    async def client(world: ad.World, buffer: ReplayBuffer) -> int:
        await buffer.add(torch.arange(20_000))
        samples = await asyncio.gather(*(buffer.sample(20_000) for _ in range(10)))
        return len({tuple(sample.batch[:10].tolist()) for sample in samples})

    assert run(2, client, capacity=20_000)[0] == 10
    assert most == 1


# -- entering and leaving ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("in_flight_max", [1, 64])
def test_a_server_that_begins_late_is_not_flooded_by_knocks(in_flight_max: int) -> None:
    async def main(world: ad.World) -> Any:
        if world.rank == 1:
            await world.sleep(3000)
            return await serve_replay_buffer([0], capacity=5, in_flight_max=in_flight_max)
        async with ReplayBuffer(1, start_timeout_s=6000) as buffer:
            await buffer.add(torch.zeros(1))
        return None

    report = ad.simulate(main, ranks=2, seed=1, strict=True)
    report.value()
    assert report.results[1].added == {0: 1}


@pytest.mark.parametrize("seed", seeds(20))
def test_what_one_stay_left_behind_does_not_answer_the_next_one(seed: int) -> None:
    """The large add of the first stay is abandoned.

    Regression: its answer became that of the second stay's first request.
    """

    async def main(world: ad.World) -> Any:
        if world.rank == 2:
            return await serve_replay_buffer([0, 1], capacity=100_000, score=lambda batch: float(len(batch)))
        if world.rank == 1:
            async with ReplayBuffer(2):
                await world.sleep(1)
            return None
        adding: list[asyncio.Task[Any]] = []
        with contextlib.suppress(KeyError):
            async with ReplayBuffer(2) as buffer:
                adding = [asyncio.create_task(buffer.add(torch.zeros(30_000, 2))) for _ in range(2)]
                await world.sleep(0.00001 * seed)
                raise KeyError
        async with ReplayBuffer(2) as buffer:
            scores = [await buffer.add(torch.zeros(count, 2)) for count in (1, 20_000, 2)]
        await asyncio.wait(adding)
        assert all(task.exception() is None or isinstance(task.exception(), ad.ClosedError) for task in adding)
        return scores

    report = ad.simulate(main, ranks=3, seed=seed, strict=True)
    report.value()
    assert report.results[0] == [1.0, 20_000.0, 2.0]


@pytest.mark.parametrize("seed", seeds(10))
@pytest.mark.parametrize("fails", [False, True])
def test_leaving_while_large_items_come(seed: int, fails: bool) -> None:
    """A normal exit waits for the draw, and an exception cancels it. ``strict`` reports a slot that is left over."""

    async def client(world: ad.World, buffer: ReplayBuffer) -> int:
        await buffer.add(torch.zeros(50_000, 2))
        drawing = asyncio.create_task(buffer.sample(50_000))
        await world.sleep(0.0001 * seed)
        with contextlib.suppress(KeyError):
            async with contextlib.AsyncExitStack() as stack:
                other = await stack.enter_async_context(ReplayBuffer(1, name="b"))
                await other.add(torch.zeros(50_000, 2))
                drawing_there = asyncio.create_task(other.sample(50_000))
                await world.sleep(0.0001 * seed)
                if fails:
                    raise KeyError
        await asyncio.wait([drawing_there])
        error = drawing_there.exception()
        assert error is None or (fails and isinstance(error, ad.ClosedError)), error
        return len((await drawing).ids)

    async def main(world: ad.World) -> Any:
        if world.rank == 0:
            async with ReplayBuffer(1) as buffer:
                return await client(world, buffer)
        serving = (serve_replay_buffer([0], capacity=50_000, name=name) for name in ("replay", "b"))
        return await asyncio.gather(*serving)

    report = ad.simulate(main, ranks=2, seed=seed, strict=True)
    report.value()
    assert report.results[0] == 50_000


def test_large_add_of_a_client_that_left_blocks_no_rank() -> None:
    """Regression: the server's grant arrived after an exception had left the block, and the server waited forever."""

    async def main(world: ad.World) -> Any:
        if world.rank == 0:
            return (await serve_replay_buffer([1, 2], capacity=5)).size
        with contextlib.suppress(KeyError):
            async with ReplayBuffer(0) as buffer:
                if world.rank == 2:
                    await world.sleep(0.1)
                    return None
                adding = asyncio.create_task(buffer.add(torch.zeros(1, 30_000)))
                await asyncio.sleep(0)
                raise KeyError
        with pytest.raises(ad.ClosedError):
            await adding
        return None

    for seed in range(10):
        ad.simulate(main, ranks=3, seed=seed, strict=True).value()
    assert ad.run_local(main, ranks=3, strict=True)[0] == 0


def test_draw_does_not_wait_for_a_large_add_without_a_grant() -> None:
    """Regression: the server received the add and the client's end in one pass, and waited for the add forever."""

    async def main(world: ad.World) -> Any:
        if world.rank == 0:
            return (await serve_replay_buffer([1, 2], capacity=100)).size
        with contextlib.suppress(TimeoutError):
            async with ReplayBuffer(0) as buffer:
                if world.rank == 1:
                    async with asyncio.timeout(0):
                        await buffer.add(torch.zeros(1, 30_000))
                await world.sleep(0.1)
                with pytest.raises(ad.BusyError, match=naming("<= 0", "left")):
                    await buffer.sample(10)
        return None

    for seed in range(5):
        ad.simulate(main, ranks=3, seed=seed, strict=True, until_s=60).value()
    assert ad.run_local(main, ranks=3, strict=True)[0] == 0


@pytest.mark.slow
def test_draw_that_a_server_no_longer_grants_is_told_of_the_end() -> None:
    """Regression: the client's grant arrived at a cancelled server, and the client waited for its items forever."""

    async def main(world: ad.World, until_s: float) -> None:
        if world.rank == 0:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(until_s):
                    await serve_replay_buffer([1], capacity=5)
            return
        with pytest.raises(ad.ClosedError, match="ended before its clients"):
            async with ReplayBuffer(0) as buffer:
                await buffer.add(torch.zeros(5, 5000))
                while True:
                    await buffer.sample(5)

    for seed in range(20):
        ad.simulate(main, 0.002 + 0.00013 * seed, ranks=2, seed=seed, strict=True).value()


@pytest.mark.parametrize("row_count", [1, 100_000])
@pytest.mark.parametrize("on", [ad.run_local, ad.simulate])
def test_clients_of_a_server_that_gives_up_are_told_why(on: Any, row_count: int) -> None:
    """Clients get the error as another rank's, so that the job shows only the traceback of the cause.

    Regression: an exception of ``score`` on a large, streamed batch was raised in a server task and ended the job,
    although the same exception on a small batch could be caught.
    """

    async def main(world: ad.World) -> None:
        if world.rank == 1:
            serving = asyncio.create_task(serve_replay_buffer([0], capacity=5, score=lambda _: 1 / 0))
            with pytest.raises(ZeroDivisionError):
                await serving
            await world.sleep(0.01)
        else:
            with pytest.raises(ad.RemoteError, match="ZeroDivisionError: division by zero"):
                async with ReplayBuffer(1) as buffer:
                    await buffer.add(torch.zeros(row_count))
        await ad.barrier()

    results = on(main, ranks=2)
    if on is ad.simulate:
        results.value()


@pytest.mark.parametrize("seed", seeds(20))
def test_server_that_gives_up_and_returns_is_still_received(seed: int) -> None:
    """The notice that the server has left may overtake its reason."""

    async def main(world: ad.World) -> str:
        if world.rank == 1:
            with contextlib.suppress(KeyError):
                await serve_replay_buffer([0], capacity=5, score=lambda _: {}["x"])
            return "gave up"
        with pytest.raises(ad.RemoteError, match="KeyError: 'x'"):
            async with ReplayBuffer(1) as buffer:
                await buffer.add(torch.zeros(1))
        return "told"

    assert ad.simulate(main, ranks=2, seed=seed).results == ("told", "gave up")
    assert ad.run_local(main, ranks=2) == ["told", "gave up"]


@pytest.mark.parametrize("seed", seeds(10))
def test_lone_client_that_added_nothing_does_not_await_itself(seed: int) -> None:
    async def client(world: ad.World, buffer: ReplayBuffer) -> int:
        with pytest.raises(ad.BusyError, match=r"n must be <= 0, .* 'replay', because no other client exists, got 5"):
            await buffer.sample(5)
        drawing = world.spawn(buffer.sample(5))
        await buffer.add(torch.zeros(5, 2))
        return len((await drawing).ids)

    assert ad.simulate(on_ranks(2, client), ranks=2, seed=seed, strict=True).results[0] == 5


@pytest.mark.parametrize("seed", range(5))
def test_draws_that_all_clients_await_warn_once_and_deadlock(seed: int, caplog: pytest.LogCaptureFixture) -> None:
    """Regression: all clients hung silently in ``sample``, with none left to add."""

    async def client(world: ad.World, buffer: ReplayBuffer) -> None:
        await buffer.add(torch.zeros(5, 2))
        await asyncio.gather(buffer.sample(100), buffer.sample(200 + world.rank))

    with pytest.raises(ad.DeadlockError, match=r"task [0-9]+: the replay buffer 'replay' on rank 2"):
        ad.simulate(on_ranks(3, client), ranks=3, seed=seed).value()
    (said,) = (record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING)
    assert said == (
        "replay buffer 'replay' on rank 2 contains 10 items; all of its clients have waited for more items for 10 s, "
        "and no client has added any: rank 0 for 100 and 200, rank 1 for 100 and 201. Add items first, request fewer "
        "items, or pass wait=False"
    )


@pytest.mark.parametrize(("pause_s", "count"), [(9.0, 0), (30.0, 1)])
def test_late_adding_task_is_waited_for_and_its_items_are_drawn(
    pause_s: float, count: int, caplog: pytest.LogCaptureFixture
) -> None:
    async def client(world: ad.World, buffer: ReplayBuffer) -> int:
        await buffer.add(torch.zeros(1, 2))
        drawing = world.spawn(buffer.sample(8))
        while world.rank == 0 and not drawing.done():
            await world.sleep(pause_s)
            await buffer.add(torch.zeros(1, 2))
        return len((await drawing).ids)

    report = ad.simulate(on_ranks(3, client), ranks=3, seed=0)
    assert report.results[:2] == (8, 8)
    assert len([record for record in caplog.records if record.levelno >= logging.WARNING]) == count


@pytest.mark.parametrize("adds", [False, True])
def test_draw_during_another_ranks_long_training_does_not_warn(adds: bool, caplog: pytest.LogCaptureFixture) -> None:
    async def client(world: ad.World, buffer: ReplayBuffer) -> None:
        await buffer.add(torch.zeros(5, 2))
        if world.rank == 0:
            await buffer.sample(11)
            return
        for _ in range(6):
            await world.sleep(60)
            await (buffer.add(torch.zeros(1, 2)) if adds else buffer.sample(3))
        await buffer.add(torch.zeros(6, 2))

    ad.simulate(on_ranks(3, client), ranks=3, seed=0).value()
    assert [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING] == []


# -- foreign messages -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(5))
def test_unlike_items_are_not_stored_after_the_refusal(seed: int) -> None:
    """The items have the length of the others' items, so only their declaration distinguishes them."""

    async def client(world: ad.World, buffer: ReplayBuffer) -> None:
        if world.rank == 1:
            await buffer.add(torch.ones(3))
            await world.sleep(1)
            sample = await buffer.sample(50, wait=False)
            assert (sample.batch == 1).all()
            return
        await world.sleep(0.5)
        with pytest.raises(ad.DisagreementError, match="int32"):
            await asyncio.gather(*(buffer.add(torch.ones(1, dtype=torch.int32)) for _ in range(5)))

    report = ad.simulate(on_ranks(3, client), ranks=3, seed=seed, strict=True)
    report.value()
    assert report.results[2].added == {0: 0, 1: 3}


@pytest.mark.parametrize(
    ("hostile", "words"),
    [
        ([messages.Add(0, 1, False, 1 << 60, b"")], "1152921504606846976 bytes"),
        ([messages.Add(0, -1, False, -8, b"")], "-8 bytes"),
        ([messages.Update(0, 1 << 58, 1 << 60, b"")], "1152921504606846976 bytes"),
        ([messages.Draw(number, 900, 0.4, True) for number in range(5)], "more than in_flight_max=4 outstanding draws"),
        (
            [messages.Add(number, 9000, False, 72_000, b"") for number in range(6)],
            "more than in_flight_max=4 outstanding adds",
        ),
        ([messages.Declare("list", ("a",), ("float32",), ((1,),))], "invalid layout"),
        ([messages.Declare("tuple", ("0",), ("float32",), ((1 << 61,),))], "invalid layout"),
        ([messages.Declare("tuple", ("0",), ("float32",), ((0, 1 << 62),))], "invalid layout"),
        ([messages.Add(0, 1 << 60, False, 1 << 63, b"")], "9223372036854775808 bytes"),
        ([messages.Update(0, 1 << 59, 1 << 63, b"")], "9223372036854775808 bytes"),
        ([messages.Add(0, 1 << 59, False, 1 << 62, b"")], "4611686018427387904 bytes"),
        ([messages.Add(1 << 32, 9000, False, 72_000, b"")], "request 4294967296"),
    ],
)
def test_a_hostile_client_is_refused_and_the_others_are_served(hostile: list[Any], words: str) -> None:
    async def client(world: ad.World, buffer: ReplayBuffer) -> None:
        await buffer.add(torch.ones(1, 2))
        await ad.barrier(group=await ad.new_group([0, 1]))
        if world.rank == 0:
            assert buffer._channel is not None
            for message in hostile:
                buffer._channel.send_nowait(message, 2)
            with pytest.raises(ad.DisagreementError, match=words):
                while True:
                    await buffer.add(torch.zeros(1, 2))
        await ad.barrier(group=await ad.new_group([0, 1]))
        if world.rank == 1:
            await buffer.add(torch.ones(5, 2))
            assert len((await buffer.sample(6)).ids) == 6

    *_, statistics = ad.run_local(on_ranks(3, client, in_flight_max=4), ranks=3)
    assert statistics.added[1] == 6


def test_priorities_of_any_floating_dtype_and_those_too_large() -> None:
    async def client(world: ad.World, buffer: ReplayBuffer) -> list[int]:
        await buffer.add(torch.arange(3), priorities=torch.tensor([0, 1, 0], dtype=torch.bfloat16, requires_grad=False))
        with pytest.raises(ad.LocalProtocolError, match=naming("1e+200", 1000)):
            await buffer.add(torch.arange(1), priorities=[1e200])
        with pytest.raises(ad.LocalProtocolError, match=r"each priority must be .*finite, got 1e\+200"):
            await buffer.update_priorities([0], [1e200])
        return (await buffer.sample(9, wait=False)).batch.tolist()

    found, statistics = run(2, client, prioritized=True, alpha=2.0)
    assert set(found) == {1}
    assert statistics.added == {0: 3}


def test_who_waits_for_room_hears_of_a_failure_elsewhere() -> None:
    """Regression: code that caught the error of its other request waited forever on an asyncio lock."""
    caught: list[BaseException | Any] = []

    async def main(world: ad.World) -> None:
        if world.rank == 1:
            await serve_replay_buffer([0], capacity=5, in_flight_max=1)
        elif world.rank == 0:
            async with ReplayBuffer(1) as buffer:
                await buffer.add(torch.zeros(1))
                drawing = (buffer.sample(5) for _ in range(3))
                caught.extend(await asyncio.gather(*drawing, return_exceptions=True))
        else:
            await world.sleep(1.0)
            raise KeyError("elsewhere")

    with pytest.raises(KeyError, match="elsewhere"):
        ad.simulate(main, ranks=3, seed=0).value()
    assert [error.rank for error in caught] == [2] * 3 and all("'elsewhere'" in str(error) for error in caught)


def test_room_granted_to_a_cancelled_request_serves_the_next() -> None:
    async def client(world: ad.World, buffer: ReplayBuffer) -> list[int]:
        await buffer.add(torch.zeros(5, 2))
        tasks = [asyncio.create_task(buffer.sample(1)) for _ in range(4)]
        await asyncio.sleep(0)
        await asyncio.wait([tasks[0]])  # the room belongs to the next task, which has not run yet
        tasks[1].cancel()
        return [len(sample.ids) for sample in await asyncio.gather(*tasks[2:])]

    assert run(2, client, in_flight_max=1)[0] == [1, 1]


def test_a_request_that_could_not_be_sent_is_not_waited_for() -> None:
    """Regression: such a request kept its slot, and leaving the block waited for its answer forever."""

    async def client(world: ad.World, buffer: ReplayBuffer) -> list[int]:
        wide = {f"a column with a long name, number {number}": torch.zeros(1) for number in range(3000)}
        for _ in range(2):
            with pytest.raises(ad.LocalProtocolError, match="cannot send"):
                await buffer.sample(1 << 64, wait=False)
            with pytest.raises(ad.LocalProtocolError, match="Declare"):
                await buffer.add(wide)
        await buffer.add(torch.arange(1))
        return (await buffer.sample(1)).batch.tolist()

    assert run(2, client, in_flight_max=1)[0] == [0]


def trained_beside(server: int, *, is_policy_outside: bool) -> Any:
    """Return a main whose policy has all ranks as members, although one rank serves a replay buffer."""

    async def main(world: ad.World) -> float:
        if world.rank == server:
            await serve_replay_buffer([rank for rank in range(world.size) if rank != server], capacity=10)
            return 0.0
        began_at = world.time()
        model = torch.nn.Linear(2, 1)
        policy = AverageAllPolicy(model, torch.optim.SGD(model.parameters(), lr=0.1), average_every=10)
        blocks: list[Any] = [policy, ReplayBuffer(server)] if is_policy_outside else [ReplayBuffer(server), policy]
        others = [rank for rank in range(world.size) if rank != server]
        told = (
            f"rank {server} serves the replay buffer 'replay' until .* left it, but .* for rank {server} here; "
            rf"start without rank {server}: group=await asyncdist.new_group\(\[{', '.join(map(str, others))}\]\)"
        )
        async with contextlib.AsyncExitStack() as stack:
            with pytest.raises(ad.DisagreementError, match=told):
                for block in blocks:
                    await stack.enter_async_context(block)
            waited_s = world.time() - began_at
            if is_policy_outside:  # the server waits for it
                await stack.enter_async_context(blocks[1])
        return waited_s

    return main


@pytest.mark.parametrize("is_policy_outside", [True, False])
@pytest.mark.parametrize("server", [0, 2])
def test_a_policy_of_all_ranks_beside_a_server_is_refused(server: int, is_policy_outside: bool) -> None:
    """Regression: the start waited for 60 s, and its error did not name the remedy."""
    main = trained_beside(server, is_policy_outside=is_policy_outside)
    assert max(ad.simulate(main, ranks=3, seed=1, strict=True).results) < 5.0


def test_a_server_that_is_still_used_does_not_refuse_a_policy() -> None:
    """A task of a client uses the buffer for a while, and its server joins the policy afterwards."""

    async def main(world: ad.World) -> None:
        model = torch.nn.Linear(2, 1)
        policy = AverageAllPolicy(model, torch.optim.SGD(model.parameters(), lr=0.1), average_every=10)
        if world.rank == 0:
            await serve_replay_buffer([1], capacity=10)
        else:
            world.spawn(warm_up(world))
        async with policy:
            pass

    async def warm_up(world: ad.World) -> None:
        async with ReplayBuffer(0) as buffer:
            for _ in range(40):
                await buffer.add(torch.zeros(1))
                await world.sleep(0.2)

    ad.simulate(main, ranks=2, seed=1, strict=True).value()


def test_a_start_that_times_out_names_the_argument_group() -> None:
    async def main(world: ad.World) -> None:
        if world.rank:
            await world.sleep(3.0)
            return
        model = torch.nn.Linear(2, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with pytest.raises(ad.StartTimeoutError, match=naming("rank 1", "1 s", "group=")):
            await AverageAllPolicy(model, optimizer, average_every=10, start_timeout_s=1.0).__aenter__()

    ad.simulate(main, ranks=2, seed=1).value()
