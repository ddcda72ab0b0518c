"""Tests waits for a program's own events and works; tests/launched/test_awaiting.py tests those for MPI requests."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import pytest
import torch.distributed as dist

import asyncdist as ad


class Event:
    """An event like ``torch.cuda.Event``, which is done when the test says so."""

    def __init__(self, error: Exception | None = None) -> None:
        self.is_done = False
        self.error = error
        self.query_count = 0

    def query(self) -> bool:
        self.query_count += 1
        if self.error is not None:
            raise self.error
        return self.is_done


class Work(dist.Work):
    """A work like those of gloo's ``irecv``: it completes only inside ``wait``, which must be called once."""

    def __init__(self, error: Exception | None = None) -> None:
        super().__init__()
        self.error = error
        self.wait_count = 0
        self.arrived = threading.Event()

    def is_completed(self) -> bool:
        return self.wait_count > 0 and self.arrived.is_set()

    def exception(self) -> Exception | None:
        return self.error

    def get_future(self) -> Any:
        raise RuntimeError("Work::getFuture not implemented.")

    def wait(self, *_: Any) -> bool:
        self.wait_count += 1
        assert self.arrived.wait(30)
        if self.error is not None:
            raise self.error
        return True


async def test_events_are_awaited_one_by_one_or_together() -> None:
    async with ad.progress() as progress:
        first, second = Event(), Event()
        waiting = asyncio.ensure_future(progress.wait([first, second]))
        anyone = asyncio.ensure_future(progress.waitany([first, second]))
        await asyncio.sleep(0)
        second.is_done = True
        assert await anyone == (1, None)
        assert not waiting.done()
        first.is_done = True
        assert await waiting == [None, None]
        assert await progress.wait(first) is None
        assert await progress.wait([]) == []


async def test_nothing_is_tested_while_no_request_is_outstanding() -> None:
    async with ad.progress() as progress:
        event = Event()
        waiting = asyncio.ensure_future(progress.wait(event))
        await asyncio.sleep(0)
        event.is_done = True
        await waiting
        passes = progress._engine.statistics().pass_count
        assert passes > 0
        for _ in range(5):
            await asyncio.sleep(0)
        assert progress._engine.statistics().pass_count == passes


async def test_failed_request_of_a_list_is_told_after_all_others() -> None:
    async with ad.progress() as progress:
        last = Event()
        waiting = asyncio.ensure_future(progress.wait([Event(RuntimeError("device lost")), last]))
        for _ in range(3):
            await asyncio.sleep(0)
        assert not waiting.done()
        last.is_done = True
        with pytest.raises(RuntimeError, match="device lost"):
            await waiting


async def test_cancelled_wait_for_a_work_leaves_one_thread_to_it() -> None:
    async with ad.progress() as progress:
        good, bad = Work(), Work(RuntimeError("Connection closed by peer"))
        for _ in range(3):
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(progress.wait([good, bad]), 0.001)
        good.arrived.set()
        bad.arrived.set()
        await progress.wait(good)
        with pytest.raises(RuntimeError, match="closed by peer"):
            await progress.wait(bad)
        assert good.wait_count == bad.wait_count == 1
        await progress.wait(good)  # a completed work is not waited for again
        assert good.wait_count == 1


async def test_the_end_of_progress_names_unfinished_requests_once(caplog: pytest.LogCaptureFixture) -> None:
    never, kept = Event(), Event()
    async with ad.progress() as progress:
        waits = [asyncio.ensure_future(progress.wait(each)) for each in (never, kept)]
        await asyncio.sleep(0)
        waits[1].cancel()
        kept.is_done = True
        for _ in range(3):
            await asyncio.sleep(0)
    with pytest.raises(ad.ClosedError, match=r"progress\(\) was closed while a task"):
        await waits[0]
    with pytest.raises(ad.ClosedError, match=r"progress\(\) is closed: wait"):
        await progress.wait(never)
    [line] = caplog.messages
    assert "(1 x an event (Event), 1 x an event (Event), completed after its wait was cancelled)" in line


async def test_a_world_awaits_events_and_reports_abandoned_ones(caplog: pytest.LogCaptureFixture) -> None:
    async with ad.open_world() as world:
        event = Event()
        asyncio.get_running_loop().call_later(0.002, setattr, event, "is_done", True)
        await world.wait(event)
        assert await world.waitany([event]) == (0, None)
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(world.wait(Event()), 0.001)
    assert caplog.messages == ["rank 0 ended with requests of this program: 1 x an event (Event)"]


@pytest.mark.parametrize("call", ["world", "progress"])
def test_simulated_ranks_are_refused_by_name(call: str) -> None:
    async def main(world: ad.World) -> None:
        if call == "world":
            await world.wait(Event())
        async with ad.progress():
            pass

    with pytest.raises(ad.LocalProtocolError, match=rf"{call}.* cannot be used in a simulation or a replay"):
        ad.simulate(main, ranks=1, seed=0)


async def nothing() -> None:
    pass


async def test_what_cannot_be_awaited_is_refused_by_name() -> None:
    coroutine = nothing()
    async with ad.progress() as progress:
        for value, kind, text in (
            (None, TypeError, "request must be an mpi4py.MPI.Request, a torch.distributed.Work, an event .*got None"),
            (Event, TypeError, "got <class"),
            (coroutine, TypeError, "await this coroutine directly"),
            (progress, ad.LocalProtocolError, "this Progress belongs to asyncdist"),
        ):
            with pytest.raises(kind, match=text):
                await progress.wait(value)
        with pytest.raises(TypeError, match="requests must be a list of one or more requests, got \\[\\]"):
            await progress.waitany([])
        with pytest.raises(TypeError, match="status must be None for an event"):
            await progress.wait(_done(), object())
        with pytest.raises(TypeError, match="status must be None or a list of 1 items, got 5"):
            await progress.wait([_done()], 5)
    await coroutine


def test_progress_of_another_loop_is_refused() -> None:
    async def enter() -> ad.Progress:
        return await context.__aenter__()

    context = ad.progress()
    with asyncio.Runner() as runner:
        progress = runner.run(enter())
        with pytest.raises(ad.LocalProtocolError, match="belongs to another event loop"):
            asyncio.run(progress.wait(_done()))
        runner.run(context.__aexit__(None, None, None))


def _done() -> Event:
    event = Event()
    event.is_done = True
    return event
