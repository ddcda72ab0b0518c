"""Tests the engine's requests, over a transport whose requests complete when the test says so."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from support.local import yields
from support.scripted import ScriptedRequest, ScriptedTransport, abandon

from asyncdist.errors import AsyncdistError, RankLostError, TruncationError
from asyncdist.messaging.engine import Engine
from asyncdist.waits import WaitId, WaitKind


def named(name: str) -> WaitId:
    """Return the identity of a wait whose text is its name."""
    return WaitId(WaitKind.TASK, name=name)


# ---------------------------------------------------------------------------------------------------------- requests


async def test_request_done_at_once_never_becomes_outstanding(engine: Engine) -> None:
    request, told = ScriptedRequest(done=True), []
    engine.watch(request, named("x"), told.append)
    assert told == [None]
    assert request.test_count == 1
    assert engine.outstanding() == ()
    await engine.wait(ScriptedRequest(done=True), named("y"))


async def test_each_pass_tests_every_request_once_and_tells_once(engine: Engine) -> None:
    requests = [ScriptedRequest() for _ in range(5)]
    told: list[int] = []
    for i, request in enumerate(requests):
        engine.watch(request, named(f"number {i}"), lambda error, i=i: told.append(i))
    assert engine.outstanding() == tuple(f"number {i}" for i in range(5))
    assert engine.poll() == 0
    assert [request.test_count for request in requests] == [2] * 5
    requests[3].done = requests[1].done = True
    assert engine.poll() == 2
    assert told == [1, 3]
    assert engine.outstanding() == ("number 0", "number 2", "number 4")
    engine.poll()
    assert [request.test_count for request in requests] == [4, 3, 4, 3, 4]
    statistics = engine.statistics()
    assert (statistics.pass_count, statistics.completion_count, statistics.outstanding_count) == (3, 2, 3)


async def test_a_failed_request_tells_its_error_and_leaves_the_others(engine: Engine) -> None:
    bad, good = ScriptedRequest(), ScriptedRequest()
    told: list[Any] = []
    engine.watch(bad, named("bad"), lambda error: told.append(error))
    engine.watch(good, named("good"), lambda error: told.append(error))
    bad.error = RankLostError("gone", rank=2)
    assert engine.poll() == 1
    assert told == [bad.error]
    good.done = True
    engine.poll()
    assert told == [bad.error, None]
    engine.watch(ScriptedRequest(error=bad.error), named("at once"), told.append)
    assert told[-1] is bad.error


async def test_a_request_posted_by_a_completion_is_kept(engine: Engine) -> None:
    second, told = ScriptedRequest(), []
    first = ScriptedRequest()
    engine.watch(first, named("first"), lambda _: engine.watch(second, named("second"), told.append))
    first.done = True
    assert engine.poll() == 1
    assert engine.outstanding() == ("second",)
    second.done = True
    engine.poll()
    assert told == [None]
    assert engine.outstanding() == ()


async def test_a_completion_may_ask_for_progress_without_recursion(engine: Engine) -> None:
    depth = []
    request = ScriptedRequest()
    engine.watch(request, named("x"), lambda _: depth.append(engine.poll()))
    request.done = True
    assert engine.poll() == 1
    assert depth == [0]


async def test_a_completion_that_raises_loses_no_other_request(engine: Engine) -> None:
    requests = [ScriptedRequest() for _ in range(4)]
    done: list[int] = []

    def complete(number: int) -> None:
        done.append(number)
        if number == 1:
            raise ValueError("a handler's defect")

    for number, request in enumerate(requests):
        engine.watch(request, named(f"request {number}"), lambda _, number=number: complete(number))
    requests[0].done = requests[1].done = requests[3].done = True
    with pytest.raises(ValueError, match="a handler's defect"):
        engine.poll()
    assert (done, engine.outstanding()) == ([0, 1], ("request 2", "request 3"))
    requests[2].done = True
    assert engine.poll() == 2
    assert (done, engine.outstanding()) == ([0, 1, 2, 3], ())


async def test_a_defect_in_a_transport_loses_no_other_request(engine: Engine) -> None:
    """An exception of another library passes through ``poll``; all requests are kept."""
    requests = [ScriptedRequest() for _ in range(3)]
    for i, request in enumerate(requests):
        engine.watch(request, named(str(i)))
    requests[1].error = ZeroDivisionError()
    with pytest.raises(ZeroDivisionError):
        engine.poll()
    assert engine.outstanding() == ("0", "1", "2")
    requests[1].error = None
    for request in requests:
        request.done = True
    assert engine.poll() == 3


@pytest.mark.parametrize("completes", [True, False], ids=["would complete in that pass", "never completes"])
async def test_request_disowned_by_a_completion_leaves_its_pass(engine: Engine, completes: bool) -> None:
    """Regression: the request was still tested and counted, so that the rank's end waited for it."""
    told: list[str] = []
    before, failing, after = ScriptedRequest(), ScriptedRequest(), ScriptedRequest()

    def disown_others(_: AsyncdistError | None) -> None:
        engine.disown(before)
        engine.disown(after)
        told.append("failed")

    engine.watch(before, named("before"), lambda _: told.append("before"))
    engine.watch(failing, named("failing"), disown_others)
    engine.watch(after, named("after"), lambda _: told.append("after"))
    failing.error = RankLostError("rank 1 is gone", rank=1)
    after.done = completes
    assert engine.poll() == 1
    assert engine.is_idle
    assert engine.outstanding() == ()
    counts = before.test_count, after.test_count
    before.done = after.done = True
    assert engine.poll() == 0
    assert (before.test_count, after.test_count) == counts
    assert told == ["failed"]


async def test_wait_raises_the_error_of_its_request(engine: Engine) -> None:
    request = ScriptedRequest()
    task = asyncio.ensure_future(engine.wait(request, named("x")))
    await yields(1)
    request.error = TruncationError("too large", message_nbytes=2, buffer_nbytes=1)
    engine.poll()
    with pytest.raises(TruncationError):
        await task


async def test_a_cancelled_wait_leaves_the_request_with_the_engine(engine: Engine) -> None:
    request = ScriptedRequest()
    task = asyncio.ensure_future(engine.wait(request, named("a large send")))
    await yields(1)
    task.cancel()
    await asyncio.wait([task])
    assert engine.outstanding() == ("a large send",)
    assert request.cancel_calls == 0
    request.done = True
    assert engine.poll() == 1
    assert engine.outstanding() == ()


async def test_a_deadline_leaves_the_request_with_the_engine(engine: Engine) -> None:
    request = ScriptedRequest()
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0):
            await engine.wait(request, named("a large send"))
    assert engine.outstanding() == ("a large send",)


# ------------------------------------------------------------------------------------------------ abandoned receives


async def test_abandoned_uncancellable_receive_keeps_its_message(engine: Engine, transport: ScriptedTransport) -> None:
    await abandon(engine, bytearray(8))
    buffer, request = transport.posted[0]
    assert request.cancel_calls == 1
    assert engine.outstanding() == ("receive from 1, tag 5",)
    target = bytearray(8)
    task = asyncio.ensure_future(engine.receive(target, 1, 5))
    await yields(2)
    assert len(transport.posted) == 1, "a second receive must not be posted, as it could take the first one's message"
    buffer[:3] = b"abc"
    request.arrive(1, 3)
    engine.poll()
    assert await task == (1, 3)
    assert target[:3] == b"abc"
    assert engine.outstanding() == ()


async def test_an_abandoned_receive_that_ends_empty_makes_way(engine: Engine, transport: ScriptedTransport) -> None:
    await abandon(engine, bytearray(8))
    task = asyncio.ensure_future(engine.receive(bytearray(8), 1, 5))
    await yields(1)
    transport.posted[0][1].done = transport.posted[0][1].cancelled = True
    engine.poll()
    await yields(2)
    assert len(transport.posted) == 2
    transport.posted[1][1].arrive(1, 2)
    engine.poll()
    assert await task == (1, 2)


async def test_several_abandoned_receives_keep_their_order(engine: Engine, transport: ScriptedTransport) -> None:
    tasks = [asyncio.ensure_future(engine.receive(bytearray(10 + i), 1, 5)) for i in range(4)]
    await yields(1)
    for task in tasks:
        task.cancel()
    await asyncio.wait(tasks)
    for i, (buffer, request) in enumerate(transport.posted):
        buffer[0] = i
        request.arrive(1, 1)
    engine.poll()
    assert engine.outstanding() == ("unreceived message from 1, tag 5",) * 4
    for i in range(4):
        target = bytearray(1)
        assert await engine.receive(target, 1, 5) == (1, 1)
        assert target[0] == i
    assert len(transport.posted) == 4
    assert engine.outstanding() == ()


async def test_message_that_arrives_during_cancellation_is_kept(engine: Engine, transport: ScriptedTransport) -> None:
    task = asyncio.ensure_future(engine.receive(bytearray(8), 1, 5))
    await yields(1)
    buffer, request = transport.posted[0]
    buffer[:2] = b"hi"
    request.arrive(1, 2)
    engine.poll()  # completes the waiter; the task has not run yet
    task.cancel()
    await asyncio.wait([task])
    target = bytearray(4)
    if task.cancelled():
        assert await engine.receive(target, 1, 5) == (1, 2)
        assert target == b"hi\0\0"
        assert engine.outstanding() == ()


async def test_truncated_message_of_an_abandoned_receive_is_logged(
    engine: Engine, transport: ScriptedTransport
) -> None:
    await abandon(engine, bytearray(1))
    transport.posted[0][1].error = TruncationError("too large", message_nbytes=9, buffer_nbytes=1)
    engine.poll()
    with pytest.raises(TruncationError):
        await engine.receive(bytearray(100), 1, 5)
    task = asyncio.ensure_future(engine.receive(bytearray(100), 1, 5))
    await yields(1)
    transport.posted[1][1].arrive(1, 4)
    engine.poll()
    assert await task == (1, 4)


async def test_kept_message_too_large_for_the_next_buffer_names_sizes(
    engine: Engine, transport: ScriptedTransport
) -> None:
    await abandon(engine, bytearray(100))
    transport.posted[0][1].arrive(1, 100)
    engine.poll()
    with pytest.raises(TruncationError, match=r"100 bytes.*10 bytes") as caught:
        await engine.receive(bytearray(10), 1, 5)
    assert (caught.value.message_nbytes, caught.value.buffer_nbytes) == (100, 10)


async def test_a_kept_empty_message_fits_every_buffer(engine: Engine, transport: ScriptedTransport) -> None:
    for i, (first, second) in enumerate(((0, 0), (5, 0), (0, 5))):
        await abandon(engine, bytearray(first))
        transport.posted[i][1].arrive(1, 0)
        engine.poll()
        assert await engine.receive(bytearray(second), 1, 5) == (1, 0)
