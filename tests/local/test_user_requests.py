"""Tests waits for a program's own events and works; tests/launched/test_awaiting.py tests those for MPI requests."""

from __future__ import annotations

import asyncio
import sys
import threading
import types
import warnings
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
    """A work like that of gloo's ``irecv``: it completes only inside ``wait``, which must be called once."""

    def __init__(self, error: Exception | None = None) -> None:
        super().__init__()
        self.error = error
        self.wait_count = 0
        self.arrived = threading.Event()

    def is_completed(self) -> bool:
        return self.wait_count > 0 and self.arrived.is_set()

    def get_future(self) -> Any:
        raise RuntimeError("Work::getFuture not implemented.")

    def wait(self, *_: Any) -> bool:
        self.wait_count += 1
        assert self.arrived.wait(30)
        if self.error is not None:
            raise self.error
        return True


class PolledWork(Work):
    """A work like that of gloo's and NCCL's collectives, which is polled, and whose ``wait`` raises its error."""

    def is_completed(self) -> bool:
        return self.arrived.is_set()

    def get_future(self) -> Any:
        return object()


class Status:
    """Status of a test: like MPI's, it is empty for an inactive request."""

    source = tag = 0


class Request:
    """A request like mpi4py's: it becomes null when a test has completed it, or inactive if it is persistent."""

    def __init__(self, value: Any = None) -> None:
        self.value = value
        self.is_active = True
        self.has_arrived = False

    def __bool__(self) -> bool:
        return self.is_active

    def test(self, status: Status | None) -> tuple[bool, Any]:
        if self.is_active and not self.has_arrived:
            return False, None
        if status is not None:
            status.source = status.tag = 0 if self.is_active else -1
        self.is_active = self.has_arrived = False
        return True, self.value


class Prequest(Request):
    """A persistent request, which has been started."""

    def __bool__(self) -> bool:
        return True


@pytest.fixture
def fake_mpi(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let ``Request`` be the requests of mpi4py, which cannot be imported here because MPI would start."""
    names = {"Request": Request, "Prequest": Prequest, "Status": Status, "ANY_SOURCE": -1, "ANY_TAG": -1}
    monkeypatch.setitem(sys.modules, "mpi4py.MPI", types.SimpleNamespace(**names))  # type: ignore[arg-type]


async def ticks(count: int) -> None:
    for _ in range(count):
        await asyncio.sleep(0)


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


@pytest.mark.usefixtures("fake_mpi")
async def test_waitany_returns_each_of_several_completed_results() -> None:
    """Regression: a request whose handle had become null was skipped, although its result was not returned."""
    requests = [Request(value) for value in "abc"]
    async with ad.progress() as progress:
        waiting = asyncio.ensure_future(progress.waitany(requests))
        await ticks(2)
        requests[0].has_arrived = requests[2].has_arrived = True
        results = [await waiting]
        requests[1].has_arrived = True
        results += [await progress.waitany(requests), await progress.waitany(requests)]
        assert results == [(0, "a"), (2, "c"), (1, "b")]
        with pytest.raises(ad.LocalProtocolError, match=r"REQUEST_NULL"):
            await progress.waitany(requests)


@pytest.mark.usefixtures("fake_mpi")
async def test_results_beside_a_failed_request_are_kept(caplog: pytest.LogCaptureFixture) -> None:
    kept = Request("kept")
    kept.has_arrived = True
    async with ad.progress() as progress:
        with pytest.raises(RuntimeError, match="device lost"):
            await progress.wait([kept, Event(RuntimeError("device lost"))])
        assert not kept
        assert await progress.wait(kept) == "kept"
    assert not caplog.messages


@pytest.mark.usefixtures("fake_mpi")
async def test_second_waiter_leaves_a_persistent_request_started_again() -> None:
    """Regression: the second task removed the entry of the next wait, whose result was lost."""
    request = Prequest()

    async def wait_twice() -> None:
        await progress.wait(request)
        request.is_active = True
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.001):  # waits at once, unlike wait_for, which makes a task
                await progress.wait(request)

    async with ad.progress() as progress:
        tasks = [asyncio.ensure_future(wait_twice()), asyncio.ensure_future(progress.wait(request))]
        await ticks(2)
        request.has_arrived = True
        await asyncio.gather(*tasks)
        request.has_arrived = True
        while request.is_active:  # noqa: ASYNC110 - it completes while no task waits for it
            await asyncio.sleep(0)
        await progress.wait(request)


@pytest.mark.usefixtures("fake_mpi")
async def test_waitany_returns_stored_results_before_it_refuses_others() -> None:
    requests = [Prequest(), Prequest()]
    async with ad.progress() as progress:
        waiting = asyncio.ensure_future(progress.waitany(requests))
        await ticks(2)
        requests[0].has_arrived = requests[1].has_arrived = True
        assert await waiting == (0, None)
        assert await progress.waitany(requests) == (1, None)
        with pytest.raises(ad.LocalProtocolError, match="inactive"):
            await progress.waitany(requests)


async def test_an_event_that_is_recorded_again_is_awaited_again() -> None:
    """Regression: if no wait had returned its first result, the next wait returned at once."""
    cancelled, other = Event(), _done()
    async with ad.progress() as progress:
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(progress.wait(cancelled), 0.001)
        left = _done()
        assert await progress.waitany([other, left]) == (0, None)
        cancelled.is_done = True
        await asyncio.sleep(0.005)
        for event in (cancelled, left):
            event.is_done = False  # recorded again
            waiting = asyncio.ensure_future(progress.wait(event))
            await ticks(3)
            assert not waiting.done()
            event.is_done = True
            await waiting


async def test_waits_for_completed_requests_let_other_tasks_run() -> None:
    async with ad.progress() as progress:
        done = _done()
        for wait, argument in ((progress.wait, done), (progress.waitany, [done]), (progress.wait, [done])):
            task = asyncio.ensure_future(ticks(1))
            for _ in range(4 * 64):
                await wait(argument)
            assert task.done()


async def test_polled_works_are_waited_for_once_after_they_complete() -> None:
    """``wait`` raises the error and orders the device's stream; ``Work.exception`` is deprecated."""
    good, bad = PolledWork(), PolledWork(RuntimeError("Connection closed by peer"))
    async with ad.progress() as progress:
        waiting = asyncio.ensure_future(progress.wait(good))
        await ticks(3)
        assert good.wait_count == 0
        good.arrived.set()
        bad.arrived.set()
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            await waiting
            with pytest.raises(RuntimeError, match="closed by peer"):
                await progress.wait(bad)
    assert good.wait_count == bad.wait_count == 1


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
    assert "(1 x an event (Event), 1 x an event (Event), whose result no wait has returned)" in line


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
