"""Tests ``world.compute``, which runs a function in a thread while the loop continues."""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import functools
import threading
from typing import Any

import pytest
import torch
from support.local import yields

import asyncdist as ad
from asyncdist.errors import BusyError


async def test_compute_runs_in_a_thread_while_the_loop_goes_on() -> None:
    async with ad.open_world(transport="local", strict=True) as world:
        release = threading.Event()

        def work(a: int, *, b: int) -> tuple[int, bool]:
            assert release.wait(60)
            return a + b, threading.current_thread() is threading.main_thread()

        task = asyncio.ensure_future(world.compute(work, 1, b=2))
        await yields(10)
        assert world.is_computing
        with pytest.raises(BusyError, match="one function at a time"):
            await world.compute(work, 1, b=2)
        assert world.is_computing
        release.set()
        assert await task == (3, False)
        assert not world.is_computing
        with pytest.raises(ZeroDivisionError):
            await world.compute(lambda: 1 // 0)
        assert await world.compute(lambda: 5) == 5


async def test_compute_carries_the_torch_modes_over() -> None:
    def modes() -> tuple[bool, bool, bool, torch.dtype]:
        product = torch.ones(2, 2) @ torch.ones(2, 2)
        return (
            torch.is_grad_enabled(),
            torch.is_inference_mode_enabled(),
            torch.is_autocast_enabled("cpu"),
            product.dtype,
        )

    async with ad.open_world(transport="local") as world:
        assert await world.compute(modes) == (True, False, False, torch.float32)
        with torch.no_grad():
            assert await world.compute(modes) == (False, False, False, torch.float32)
        with torch.inference_mode():
            assert await world.compute(modes) == (False, True, False, torch.float32)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            assert await world.compute(modes) == (True, False, True, torch.bfloat16)
        assert await world.compute(modes) == (True, False, False, torch.float32)


@pytest.mark.parametrize("simulated", [False, True])
def test_compute_makes_tensors_where_its_caller_does(simulated: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """They differ from thread to thread: the default device, the current GPU and stream, and whether GPUs cast.

    Regression: the function ran on the default stream, so that it did not wait for work on the caller's stream.
    """
    entered: list[tuple[str, Any]] = []

    def context(kind: str, value: Any) -> contextlib.AbstractContextManager[None]:
        entered.append((kind, value))
        return contextlib.nullcontext()

    async def main(world: ad.World) -> None:
        def device() -> str:
            return torch.ones(1).device.type

        assert await world.compute(device) == device() == "meta"
        with torch.device("cpu"):
            assert await world.compute(device) == "cpu"
        torch.set_autocast_enabled("cuda", True)
        with monkeypatch.context() as patch:
            patch.setattr(torch.cuda, "is_initialized", lambda: True)
            patch.setattr(torch.cuda, "current_stream", lambda: "stream of GPU 1")
            patch.setattr(torch.cuda, "stream", functools.partial(context, "stream"))
            patch.setattr(torch, "autocast", lambda kind, *, dtype, enabled: context(f"{kind} {dtype}", enabled))
            assert await world.compute(device) == "meta"
        torch.set_autocast_enabled("cuda", False)
        assert entered == [("cpu torch.bfloat16", False), ("cuda torch.float16", True), ("stream", "stream of GPU 1")]

    torch.set_default_device("meta")
    try:
        ad.simulate(main, ranks=1).value() if simulated else ad.run_local(main, ranks=1)
    finally:
        torch.set_default_device(None)


class End(StopIteration):
    pass


@pytest.mark.parametrize("simulated", [False, True])
def test_an_exception_of_a_computation_reaches_its_caller(simulated: bool) -> None:
    """StopIteration cannot be set on a future, so that ``await world.compute(next, batches)`` never ended."""

    async def main(world: ad.World) -> list[Any]:
        batches = iter([1])
        assert await world.compute(next, batches) == 1
        for error in (StopAsyncIteration(), GeneratorExit(), SystemExit(3), concurrent.futures.CancelledError()):
            with pytest.raises(type(error)) as caught:
                await world.compute(_raise, error)
            assert caught.value is error
        for stop in (StopIteration(), End(3)):
            with pytest.raises(RuntimeError, match="StopIteration") as converted:
                await world.compute(_raise, stop)
            assert converted.value.__cause__ is stop
        with pytest.raises(RuntimeError) as ended:
            await world.compute(next, batches)
        assert "world.compute(next, iterator, None)" in ended.value.__notes__[0]
        return await world.compute(list, batches)

    if simulated:
        assert ad.simulate(main, ranks=1).results == ([],)
    else:
        assert ad.run(main, transport="local") == []


def _raise(error: BaseException) -> None:
    raise error


async def test_cancelled_compute_waits_for_its_thread_each_time() -> None:
    async with ad.open_world(transport="local") as world:
        release, ended = threading.Event(), threading.Event()

        def work() -> None:
            assert release.wait(60)
            ended.set()

        task = asyncio.ensure_future(world.compute(work))
        await yields(5)
        for _ in range(3):
            task.cancel()
            await yields(5)
            assert not task.done()
            assert world.is_computing, "the function may still be writing weights"
        release.set()
        await asyncio.wait([task])
        assert task.cancelled()
        assert ended.is_set()
        assert not world.is_computing


async def test_error_after_a_cancellation_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    """Regression: it was neither raised nor logged, although the function had stopped while it wrote weights."""
    async with ad.open_world(transport="local") as world:
        release = threading.Event()

        def work() -> None:
            assert release.wait(60)
            raise ValueError("half written")

        task = asyncio.ensure_future(world.compute(work))
        await yields(5)
        task.cancel()
        await yields(5)
        release.set()
        await asyncio.wait([task])
        assert task.cancelled()
    (record,) = caplog.records
    assert record.levelname == "ERROR" and "half written" in caplog.text


async def test_sleep_and_time_go_by_the_loops_clock() -> None:
    async with ad.open_world(transport="local") as world:
        began_at = world.time()
        await world.sleep(0.02)
        assert world.time() - began_at >= 0.015
        assert world.time() == pytest.approx(asyncio.get_running_loop().time(), abs=60)
