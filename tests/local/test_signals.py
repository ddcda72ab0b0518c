"""Tests the effects of signals on ranks: Ctrl-C, SIGTERM and SIGHUP."""

from __future__ import annotations

import asyncio
import io
import os
import signal
import sys
from typing import Any

import pytest

import asyncdist as ad
from asyncdist.runtime import run
from asyncdist.runtime.failing import process_ends
from asyncdist.runtime.signals import Interrupts


@pytest.mark.parametrize("loop", ["asyncio", "uvloop"])
async def test_each_ctrl_c_in_a_notebook_cancels_a_main_that_awaits(loop: run.LoopName) -> None:
    """Regression: the second Ctrl-C was raised only when the loop had something to run, and cancelled nothing."""
    if loop == "uvloop":
        pytest.importorskip("uvloop")
    cancelled_count = 0

    async def main(world: ad.World) -> None:
        nonlocal cancelled_count
        for _ in range(3):
            asyncio.get_running_loop().call_later(0.05, os.kill, os.getpid(), signal.SIGINT)
            try:
                async with asyncio.timeout(10):
                    await asyncio.Event().wait()
            except asyncio.CancelledError:
                cancelled_count += 1

    with pytest.raises(KeyboardInterrupt):
        ad.run_local(main, ranks=1, loop=loop)
    assert cancelled_count == 3


@pytest.mark.parametrize(("number", "ends"), [(signal.SIGINT, KeyboardInterrupt), (signal.SIGTERM, SystemExit)])
@pytest.mark.parametrize("ranks", [1, 2])
def test_signal_while_main_blocks_until_its_return_is_raised(
    number: signal.Signals, ends: type[BaseException], ranks: int
) -> None:
    """Regression: a job of one rank returned its value: Ctrl-C had no effect in a notebook or a loop over runs."""

    async def main(world: ad.World) -> int:
        if world.rank == 0:
            signal.raise_signal(number)
        return 5

    with pytest.raises(ends):
        ad.run_local(main, ranks=ranks)


@pytest.mark.parametrize(
    ("number", "default"), [(signal.SIGINT, signal.default_int_handler), (signal.SIGTERM, signal.SIG_DFL)]
)
def test_a_handler_set_by_c_code_is_replaced_by_the_default(
    number: signal.Signals, default: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Regression: TypeError at the end of the run, because Python does not know such a handler."""
    before = signal.getsignal(number)
    replace = signal.signal
    with monkeypatch.context() as patched:
        patched.setattr(signal, "signal", lambda *arguments: replace(*arguments) and None)
        interrupts = Interrupts()
        interrupts.__enter__()
    interrupts.__exit__()
    assert signal.signal(number, before) is default


@pytest.mark.parametrize("handler", [signal.SIG_DFL, signal.SIG_IGN, print], ids=["default", "ignored", "handled"])
def test_a_hangup_ends_main_unless_ignored_or_handled(handler: Any) -> None:
    """Regression: ranks whose terminal closed were killed: they neither left the job nor reported their waits."""

    async def main(world: ad.World) -> str:
        for _ in range(2):  # a shell sends it again
            signal.raise_signal(signal.SIGHUP)
        await world.sleep(0.01)
        return "slept"

    before = signal.signal(signal.SIGHUP, handler)
    try:
        if handler is signal.SIG_DFL:
            with pytest.raises(SystemExit) as ended:
                ad.run_local(main, ranks=1)
            assert ended.value.code == 128 + signal.SIGHUP
            assert ended.value.__notes__[0].startswith("rank 0 was waiting for World.sleep")
        else:
            assert ad.run_local(main, ranks=1) == ["slept"]
        assert signal.getsignal(signal.SIGHUP) is handler
    finally:
        signal.signal(signal.SIGHUP, before)


def test_main_that_catches_its_signals_cancellation_returns() -> None:
    async def main(world: ad.World) -> str:
        signal.raise_signal(signal.SIGINT)
        try:
            await asyncio.sleep(100)
        except asyncio.CancelledError:
            return "saved"
        return "slept"

    assert ad.run_local(main, ranks=1) == ["saved"]


def test_signal_after_the_end_of_everything_stops_nothing() -> None:
    """The signal arrives between the end of the loop and the removal of the handlers."""
    loop = asyncio.new_event_loop()
    with Interrupts() as interrupts:
        interrupts.cancel_on_first(loop, [loop.create_task(asyncio.sleep(0))])
        loop.run_until_complete(asyncio.sleep(0))
        loop.close()
        signal.raise_signal(signal.SIGINT)
    assert interrupts.received == signal.SIGINT


def test_a_process_ends_although_a_signal_interrupts_a_print(monkeypatch: pytest.MonkeyPatch) -> None:
    """Regression: flushing the output raised RuntimeError in the script, which then ran on."""
    ends: list[int] = []
    exit_process: Any = process_ends.exit_immediately

    class Interrupted(io.RawIOBase):
        def writable(self) -> bool:
            return True

        def write(self, data: Any) -> int:
            exit_process(130)
            return len(data)

    monkeypatch.setattr(os, "_exit", ends.append)
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(io.BufferedWriter(Interrupted())))
    print("saving", flush=True)
    assert ends == [130]
