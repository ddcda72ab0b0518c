"""Tests running a job: the values and errors of ``run``, tasks, leftovers and shutdown."""

from __future__ import annotations

import asyncio
import contextvars
import importlib.util
import logging
import math
import os
import signal
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from support import torchrun
from support.facts import names
from support.local import yields

import asyncdist as ad
from asyncdist.errors import ClosedError, LocalProtocolError, RankLostError
from asyncdist.runtime import hosting, run
from asyncdist.runtime.hosting import host_rank
from asyncdist.runtime.story.answering import WaitReporter
from asyncdist.story import sockets
from asyncdist.transports.local import LocalHub, LocalTransport

NO_UVLOOP = importlib.util.find_spec("uvloop") is None
LOOPS = ["asyncio", pytest.param("uvloop", marks=pytest.mark.skipif(NO_UVLOOP, reason="uvloop is not installed"))]


@dataclass(frozen=True, slots=True)
class Number:
    value: int


# ----------------------------------------------------------------------------------------------------- values, options


@pytest.mark.parametrize("loop", LOOPS)
def test_run_returns_the_value_of_main(loop: Any) -> None:
    kinds = []

    async def main(world: ad.World, a: int, b: str) -> tuple[Any, ...]:
        kinds.append(type(asyncio.get_running_loop()).__module__.split(".")[0])
        return world.rank, world.size, a, b

    assert ad.run(main, 5, "x", loop=loop) == (0, 1, 5, "x")
    assert ad.run(main, 5, "x", transport="local", ranks=3, loop=loop) == (0, 3, 5, "x")
    assert ad.run_local(main, 5, "x", ranks=3, loop=loop) == [(rank, 3, 5, "x") for rank in range(3)]
    assert set(kinds) == {loop}


async def nothing(world: ad.World) -> None:
    del world


def plain(world: ad.World) -> None:
    del world


@pytest.mark.parametrize("way", ["run", "run_local", "simulate"])
async def test_ranks_are_hosted_inside_a_running_loop_as_outside(way: str) -> None:
    """Inside a running loop, as in a notebook, ranks have its context variables and torch modes, and change neither."""
    setting = contextvars.ContextVar("setting", default="outside")

    async def main(world: ad.World, number: int) -> tuple[Any, ...]:
        seen = setting.get(), torch.is_grad_enabled()
        setting.set("main")
        await ad.barrier()
        if number < 0:
            raise ValueError(f"rank {world.rank}")
        return *seen, world.rank + number

    def values(number: int) -> list[Any]:
        if way == "simulate":
            return list(ad.simulate(main, number, ranks=2).results)
        if way == "run_local":
            return ad.run_local(main, number, ranks=2)
        return [ad.run(main, number), ad.run(main, number + 1, transport="local", ranks=2)]

    setting.set("cell")
    with torch.no_grad():
        is_enabled = way == "simulate"  # simulated ranks begin like processes
        assert values(5) == [("cell", is_enabled, 5), ("cell", is_enabled, 6)]
        assert not torch.is_grad_enabled()
    assert setting.get() == "cell"
    if way != "simulate":
        with pytest.raises(ValueError, match="rank 0"):
            values(-5)


@pytest.mark.parametrize("when", ["opening", "block"])
async def test_an_open_world_that_is_too_late_ends_with_one_line(
    when: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Regression: a restarted rank that ended as documented for run failed with a traceback."""

    def open_here(*_: Any, **__: Any) -> Any:
        raise ad.LateError("this rank comes too late")

    if when == "opening":
        monkeypatch.setattr(run, "_open_here", open_here)
    with pytest.raises(SystemExit) as ended:
        async with ad.open_world():
            open_here()
    assert ended.value.code == 0
    (line,) = capsys.readouterr().err.splitlines()
    assert "this rank comes too late" in line


async def test_call_that_cannot_run_inside_a_loop_names_one_that_can(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match=r"asyncdist\.run\(main, transport='local', ranks=2\)"):
        async with ad.open_world(ranks=2):
            pass
    for name, value in torchrun.rank_environment(0, 2, 29500).items():
        monkeypatch.setenv(name, value)
    with pytest.raises(RuntimeError, match=r"async with asyncdist\.open_world\(\) as world: await main\(world\)"):
        ad.run(nothing)


@pytest.mark.parametrize("is_blocked", [False, True])
async def test_ctrl_c_inside_a_loop_ends_the_ranks_and_not_the_process(is_blocked: bool) -> None:
    """The first Ctrl-C cancels main at its next await; a main without an await ends at the second one."""
    ended = []

    def interrupt() -> None:
        handler: Any = signal.getsignal(signal.SIGINT)
        os.kill(os.getpid(), signal.SIGINT)
        while handler.__self__.received is None:
            time.sleep(0.001)

    def compute() -> None:
        os.kill(os.getpid(), signal.SIGINT)
        while True:
            time.sleep(0.001)

    async def main(world: ad.World) -> None:
        try:
            if is_blocked:
                interrupt()
                compute()
            await ad.barrier()
            if world.rank == 0:
                interrupt()
            await world.sleep(300)
        finally:
            ended.append(world.rank)

    before = signal.getsignal(signal.SIGINT)
    with pytest.raises(KeyboardInterrupt):
        ad.run_local(main, ranks=2)
    assert len(ended) == (1 if is_blocked else 2), "the other rank must not begin after the interrupt"
    assert signal.getsignal(signal.SIGINT) == before
    assert ad.run_local(nothing, ranks=1) == [None]


def test_the_torch_transport_names_the_variables_that_it_misses(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("RANK", "0")
    with pytest.raises(ValueError, match="not set: WORLD_SIZE, MASTER_ADDR, MASTER_PORT"):
        ad.run(nothing, transport="torch")


# ------------------------------------------------------------------------------------------------------- current_world


def test_current_world_is_each_ranks_own_in_all_of_its_tasks() -> None:
    async def seen() -> ad.World:
        await yields(3)
        return ad.current_world()

    async def main(world: ad.World) -> None:
        assert ad.current_world() is world
        assert await asyncio.create_task(seen()) is world
        assert await world.spawn(seen()) is world
        assert await world.compute(contextvars.copy_context().run, ad.current_world) is world

    ad.run_local(main, ranks=3, strict=True)
    with pytest.raises(RuntimeError, match=r"asyncdist\.run"):
        ad.current_world()


async def test_open_world_is_a_world_of_one_and_ends_with_its_block() -> None:
    async with ad.open_world(transport="local", strict=True) as world:
        assert (world.rank, world.size, world.transport_name) == (0, 1, "local")
        assert ad.current_world() is world
        channel = world.channel(Number, tag=5)
        await channel.send(Number(1), 0)
        assert (await channel.receive()).message == Number(1)
        assert "local" in repr(world)
        assert "1 rank in this process" in world.describe()
    with pytest.raises(RuntimeError):
        ad.current_world()
    with pytest.raises(ClosedError, match="closed"):
        world.spawn(asyncio.sleep(0))
    with pytest.raises(ZeroDivisionError):
        async with ad.open_world(transport="local"):
            raise ZeroDivisionError


# -------------------------------------------------------------------------------------------------------------- errors


def test_an_error_of_main_comes_out_as_it_is() -> None:
    async def main(world: ad.World) -> None:
        if world.rank == 1:
            raise KeyError("mine")
        await world.sleep(3600)

    for ranks in (2, 3):
        with pytest.raises(KeyError, match="mine"):
            ad.run_local(main, ranks=ranks)


async def test_notebook_shows_no_exception_group() -> None:
    """IPython searches all contexts for an exception group; it then does not end the cell properly."""
    first = KeyError("first")
    for raised in (ValueError("main"), StopAsyncIteration(), StopIteration(), RankLostError("other", rank=3)):
        with pytest.raises(type(raised)) as caught:
            async with ad.open_world(transport="local") as world:
                try:
                    raise first
                except KeyError:
                    world.spawn(asyncio.sleep(300))
                    raise raised  # noqa: B904 the context is what is tested
        assert caught.value is raised
        assert raised.__context__ is first and not raised.__suppress_context__, (
            "the exception must keep the user's own chain"
        )
        assert first.__context__ is None

    async def waits(world: ad.World) -> None:
        if world.rank == 0:
            raise ValueError("boom")
        await world.sleep(300)

    with pytest.raises(RankLostError, match="boom") as lost:
        results = await _hosts(waits, 2)
        assert isinstance(results[0], ValueError)
        assert results[0].__context__ is None
        raise results[1]
    assert not isinstance(lost.value.__context__, BaseExceptionGroup)


async def _hosts(main: Any, ranks: int) -> list[Any]:
    """Return each rank's value or exception, for ranks of one hub on this loop."""
    hub = LocalHub(ranks)
    outcomes = await asyncio.gather(*(host_rank(main, (), hub.transport(rank)) for rank in range(ranks)))
    return [outcome.error or outcome.value for outcome in outcomes]


def test_an_error_of_a_spawned_task_comes_out_in_a_group() -> None:
    async def fail(after: int) -> None:
        await yields(after)
        raise ValueError(f"after {after}")

    async def main(world: ad.World) -> None:
        world.spawn(fail(3))
        await asyncio.sleep(3600)

    with pytest.raises(ExceptionGroup) as caught:
        ad.run_local(main, ranks=1)
    assert [str(error) for error in caught.value.exceptions] == ["after 3"]

    async def both(world: ad.World) -> None:
        world.spawn(fail(0))
        await yields(1)
        raise KeyError("main's own")

    with pytest.raises((ExceptionGroup, KeyError)):
        ad.run_local(both, ranks=1)


def test_spawned_tasks_are_awaited_and_give_their_values() -> None:
    async def work(count: int) -> int:
        await yields(count)
        done.append(count)
        return count * 2

    async def main(world: ad.World) -> int:
        world.spawn(work(50))
        return await world.spawn(work(5), name="five")

    done: list[int] = []
    assert ad.run_local(main, ranks=1, strict=True) == [10]
    assert done == [5, 50]


@pytest.mark.parametrize(
    "wait",
    [
        lambda world, channel: channel.receive(),
        lambda world, channel: channel.receive(timeout_s=3600),
        lambda world, channel: world.services.engine.receive(bytearray(5), 1, 99),
        lambda world, channel: world.receive_stream(torch.zeros(5), 1),
        lambda world, channel: world.send_stream(torch.zeros(5), 1),
        lambda world, channel: ad.barrier(),
        lambda world, channel: ad.new_group([0, 1]),
        lambda world, channel: world.sleep(3600),
        lambda world, channel: asyncio.sleep(3600),
        lambda world, channel: asyncio.Event().wait(),
    ],
    ids=["receive", "timed", "raw", "receive_stream", "send_stream", "barrier", "new_group", "sleep", "plain", "event"],
)
def test_a_peers_failure_ends_every_kind_of_wait(wait: Any) -> None:
    """Wherever a rank waits, it stops with RankLostError naming the peer that failed."""
    seen: list[BaseException] = []

    async def main(world: ad.World) -> None:
        channel = world.channel(Number, tag=5)
        if world.rank == 1:
            await yields(20)
            raise ZeroDivisionError("rank 1's own")
        try:
            await wait(world, channel)
        except BaseException as error:
            seen.append(error)
            raise

    with pytest.raises(ZeroDivisionError, match="rank 1's own"):
        ad.run_local(main, ranks=2)
    assert len(seen) == 1
    if isinstance(seen[0], RankLostError):
        assert seen[0].rank == 1
        assert "ZeroDivisionError: rank 1's own" in str(seen[0])
    else:
        assert isinstance(seen[0], asyncio.CancelledError)


@pytest.mark.parametrize("point", ["progress", "safe_point", "sleep", "check"])
def test_a_rank_that_trains_stops_at_its_next_safe_point(point: str) -> None:
    steps = []

    async def main(world: ad.World) -> None:
        if world.rank == 1:
            raise ZeroDivisionError
        with pytest.raises(RankLostError):
            while True:
                steps.append(None)
                await yields(1)
                if point == "check":
                    world.check()
                else:
                    await (world.sleep(0) if point == "sleep" else getattr(world, point)())
        raise RuntimeError("stopped")

    with pytest.raises((ZeroDivisionError, RuntimeError)):
        ad.run_local(main, ranks=2)
    assert 1 <= len(steps) < 10_000


# ----------------------------------------------------------------------------------------------------------- leftovers


async def leave_a_message(world: ad.World) -> None:
    channel = world.channel(Number, tag=5)
    await channel.send(Number(1), world.rank)
    await world.progress()


async def leave_an_early_frame(world: ad.World) -> None:
    world.channel(Number, tag=5).close()
    channel = world.channel(Number, tag=5)
    world.channel(Number, tag=5)
    scope = channel.scope
    channel._outbox.use_routes(channel._routes_of(scope ^ 1))
    await channel.send(Number(1), world.rank)
    await world.progress()


async def leave_a_slot(world: ad.World) -> None:
    world.services.slots.take(0)


async def leave_an_abandoned_message(world: ad.World) -> None:
    task = asyncio.ensure_future(world.services.engine.receive(bytearray(10), world.rank, 99))
    await yields(1)
    world.services.engine.transport.isend(b"x", world.rank, 99)
    world.services.engine.poll()
    task.cancel()
    await asyncio.wait([task])
    if not task.cancelled():
        world.services.slots.take(0)


async def leave_a_probe(world: ad.World) -> None:
    world.services.leftover_probes.append(lambda: ["a snapshot of policy p"])


@pytest.mark.parametrize(
    ("leave", "words"),
    [
        (leave_a_message, "1 .* Number, tag 5"),
        (leave_an_early_frame, "1 .* tag 5 "),
        (leave_a_slot, "1 stream slots"),
        (leave_an_abandoned_message, "unreceived message from 0, tag 99|stream slots"),
        (leave_a_probe, "a snapshot of policy p"),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
@pytest.mark.parametrize("ranks", [1, 2])
def test_what_is_left_over_is_named(leave: Any, words: str, ranks: int, caplog: pytest.LogCaptureFixture) -> None:
    async def main(world: ad.World) -> str:
        if world.rank == 0:
            await leave(world)
        return "value"

    with caplog.at_level(logging.WARNING):
        assert ad.run_local(main, ranks=ranks) == ["value"] * ranks
    assert caplog.records
    with pytest.raises(LocalProtocolError, match=f"rank 0 .*({words})"):
        ad.run_local(main, ranks=ranks, strict=True)


def test_failed_strict_end_does_not_make_the_others_wait() -> None:
    async def main(world: ad.World) -> None:
        if world.rank == 0:
            await leave_a_slot(world)

    began_at = time.monotonic()
    with pytest.raises(LocalProtocolError):
        ad.run_local(main, ranks=2, strict=True)
    assert time.monotonic() - began_at < run.GRACE_S


def test_a_clean_run_leaves_nothing_and_logs_nothing(caplog: pytest.LogCaptureFixture) -> None:
    async def main(world: ad.World) -> int:
        channel = world.channel(Number, tag=5)
        for dest in range(world.size):
            await channel.send(Number(world.rank), dest)
        total = 0
        for _ in range(world.size):
            total += (await channel.receive()).message.value
        await ad.barrier()
        return total

    with caplog.at_level(logging.WARNING):
        assert ad.run_local(main, ranks=4, strict=True) == [6] * 4
    assert not caplog.records


def test_services_are_waited_for_and_cancelled_on_failure() -> None:
    ended: list[str] = []

    async def serve(world: ad.World) -> None:
        try:
            await world.services.engine.until(lambda: len(world.services.left) == world.size - 1)
            ended.append("served")
        except (asyncio.CancelledError, RankLostError):
            ended.append("stopped")
            raise

    async def main(world: ad.World, fails: bool) -> None:
        if world.rank == 0:
            world.services.spawn_service(serve(world), name="coordinator")
            await yields(1)
        elif fails:
            await yields(10)
            raise ZeroDivisionError
        else:
            await yields(50)

    ad.run_local(main, False, ranks=2, strict=True)
    assert ended == ["served"]
    with pytest.raises(ZeroDivisionError):
        ad.run_local(main, True, ranks=2)
    assert ended == ["served", "stopped"]


def test_an_error_right_after_the_handshake_ends_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """Regression: no rank was notified of the error, and the others waited forever."""
    exporter = hosting._exporter

    def fail(world: ad.World, *args: Any) -> Any:
        if world.rank == 1:
            raise RuntimeError("can't start new thread")
        return exporter(world, *args)

    async def main(world: ad.World) -> None:
        async with asyncio.timeout(10):
            await ad.barrier()

    monkeypatch.setattr(hosting, "_exporter", fail)
    with pytest.raises(RuntimeError, match="can't start new thread"):
        ad.run_local(main, ranks=2)


@pytest.mark.parametrize("refused", ["listen", "thread", "metrics"])
def test_a_rank_runs_without_reports_that_the_system_refuses(
    refused: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Regression: the rank failed, and on MPI the others waited forever."""

    def refuse(*_: Any) -> Any:
        raise OSError("refused") if refused == "listen" else RuntimeError("can't start new thread")

    async def main(world: ad.World) -> None:
        if refused == "metrics":
            return
        task = asyncio.current_task()
        assert task is not None
        reporter = WaitReporter(world, task, math.inf)
        reporter.begin()
        reporter.end()
        assert reporter._path is None

    with monkeypatch.context() as patched:
        if refused == "listen":
            patched.setattr(sockets, "listen", refuse)
        else:
            patched.setattr(threading.Thread, "start", refuse)
        ad.run(main, transport="local", metrics=9000 if refused == "metrics" else None)
    (record,) = caplog.records
    assert names(record.getMessage(), "rank 0")
    assert ("refused" if refused == "listen" else "can't start new thread") in record.getMessage()


def test_ranks_that_end_early_do_not_end_the_others() -> None:
    async def main(world: ad.World) -> int:
        channel = world.channel(Number, tag=5)
        if world.rank == 0:
            return 0
        for i in range(200):
            await channel.send(Number(i), 3 - world.rank)
            assert (await channel.receive()).message == Number(i)
        assert 0 in world.services.gone
        return world.rank

    assert ad.run_local(main, ranks=3, strict=True) == [0, 1, 2]


# ----------------------------------------------------------------------------------------------------------- processes


def test_an_error_that_raises_its_own_cause_again_ends_its_rank() -> None:
    """The two errors then refer to each other, as cause and as context."""

    async def main(world: ad.World) -> None:
        if world.rank == 0:
            try:
                try:
                    raise ValueError("first")
                except ValueError as error:
                    raise KeyError("second") from error
            except KeyError as second:
                assert second.__cause__ is not None
                raise second.__cause__  # noqa: B904 - as many programs do
        await ad.barrier()

    with pytest.raises(ValueError, match="first"):
        ad.run_local(main, ranks=2)


def test_time_passes_within_a_millisecond() -> None:
    async def main(world: ad.World) -> bool:
        times = []
        for _ in range(100):
            times.append(world.time())
            await asyncio.sleep(0)
        return times == sorted(set(times))

    assert all(ad.run_local(main, ranks=2))


@pytest.mark.parametrize(("ranks", "host_count"), [(3, 1), (5, 2), (20, 3)])
def test_ranks_know_who_shares_a_host(ranks: int, host_count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks exchange their hosts when they connect, unless there is only one host."""

    async def main(world: ad.World) -> Sequence[int] | None:
        return world.services.hosts

    monkeypatch.setattr(LocalTransport, "hostname", property(lambda transport: f"h{transport.rank % host_count}"))
    expected = None if host_count == 1 else tuple(rank % host_count for rank in range(ranks))
    assert ad.run_local(main, ranks=ranks) == [expected] * ranks
