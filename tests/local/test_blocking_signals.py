"""Tests signals that arrive just as a blocking call ends: they are raised when it returns, and nothing hangs."""

from __future__ import annotations

import asyncio
import dis
import gc
import selectors
import signal
import sys
from collections.abc import Awaitable, Callable, Iterator
from types import FrameType
from typing import Any

import pytest

import asyncdist as ad

#: The instructions after which Python runs handlers of signals.
_CHECKING = {dis.opmap[name] for name in ("RESUME", "CALL", "CALL_FUNCTION_EX", "JUMP_BACKWARD")}

KINDS = [(signal.SIGINT, KeyboardInterrupt), (signal.SIGTERM, SystemExit)]


async def quick() -> int:
    return 1


async def yielding() -> int:
    await asyncio.sleep(0)
    return 1


async def waiting() -> int:
    await asyncio.sleep(1e-4)
    return 1


@pytest.mark.parametrize(("number", "kind"), KINDS, ids=["SIGINT", "SIGTERM"])
def test_signal_after_the_loops_last_turn_is_raised_on_return(
    number: signal.Signals, kind: type[BaseException], monkeypatch: pytest.MonkeyPatch
) -> None:
    run_forever = asyncio.SelectorEventLoop.run_forever
    seen: list[str] = []

    def then_signal(loop: asyncio.SelectorEventLoop) -> None:
        run_forever(loop)
        monkeypatch.undo()
        signal.raise_signal(number)

    with ad.blocking.open_world() as world:
        monkeypatch.setattr(asyncio.SelectorEventLoop, "run_forever", then_signal)
        with pytest.raises(kind):
            world.call(waiting)
            seen.append("went on")
        assert [world.call(waiting), world.call(quick)] == [1, 1], (
            "the interrupt has been raised, and must cancel nothing else"
        )
    assert not seen


def test_signal_as_a_call_begins_names_no_function_of_asyncdist() -> None:
    """Regression: the report named an internal function: 'was waiting for outcome_of'."""

    async def struck() -> None:
        signal.raise_signal(signal.SIGINT)
        await asyncio.sleep(60)

    with pytest.raises(KeyboardInterrupt) as raised, ad.blocking.open_world() as world:
        world.call(struck)
    (note,) = raised.value.__notes__
    assert note.startswith("rank 0 was waiting for a blocking call, in test_signal_as_a_call_begins"), note


def test_signal_in_a_call_that_runs_no_loop_is_raised_at_its_end() -> None:
    async def struck() -> None:
        signal.raise_signal(signal.SIGINT)

    with ad.blocking.open_world() as world:
        with pytest.raises(KeyboardInterrupt):
            world.call(struck)
        assert world.call(waiting) == 1


def test_cancelling_main_as_a_call_ends_stops_the_next_call() -> None:
    """Regression: the cancellation ended main inside a call that had not begun, so that nothing stopped the loop."""

    async def cancelled_at_the_end() -> int:
        task, loop = asyncio.current_task(), asyncio.get_running_loop()
        assert task is not None
        future = loop.create_future()

        def go_on_and_be_cancelled() -> None:
            future.add_done_callback(lambda _: task.cancel())  # after main has gone on, in the same turn
            future.set_result(None)

        await asyncio.sleep(0.001)  # this is run by the loop from here on
        loop.call_soon(go_on_and_be_cancelled)
        await future
        return 1

    with ad.blocking.open_world() as world:
        assert world.call(cancelled_at_the_end) == 1
        with pytest.raises(asyncio.CancelledError):
            world.call(quick)
        assert world.call(waiting) == 1


def test_a_signal_as_the_world_opens_is_raised_in_the_block(monkeypatch: pytest.MonkeyPatch) -> None:
    run = asyncio.SelectorEventLoop.run_until_complete
    seen: list[str] = []

    def then_signal(loop: asyncio.SelectorEventLoop, awaited: Any) -> Any:
        result = run(loop, awaited)
        monkeypatch.undo()
        signal.raise_signal(signal.SIGINT)
        return result

    monkeypatch.setattr(asyncio.SelectorEventLoop, "run_until_complete", then_signal)
    with pytest.raises(KeyboardInterrupt), ad.blocking.open_world():
        seen.append("entered")
    assert not seen


class Planted:
    """Raises a signal at one of the moments at which Python runs handlers of signals, counted from the start.

    Args:
        at: Number of the moment, from 0.
        number: Number of the signal.

    Attributes:
        count: Number of moments reached.
    """

    def __init__(self, at: int, number: signal.Signals = signal.SIGINT) -> None:
        self.count = 0
        self._at = at
        self._number = number
        self._before: dict[FrameType, int] = {}

    def enter_frame(self, frame: FrameType, _event: str, _arg: object) -> Any:
        self._before.pop(frame.f_back, None)  # type: ignore[arg-type]  # no handler is run at the return to it
        frame.f_trace_opcodes = True
        return self._trace

    def _trace(self, frame: FrameType, event: str, _arg: object) -> Any:
        if event == "opcode":
            before = self._before.get(frame)
            self._before[frame] = frame.f_code.co_code[frame.f_lasti]
            if before in _CHECKING:
                self.count += 1
                if self.count > self._at:
                    sys.settrace(None)
                    signal.raise_signal(self._number)
        return self._trace


@pytest.fixture
def no_collections() -> Iterator[None]:
    """Disable garbage collection, since Python 3.11 may run a finaliser in a half-made frame, which breaks tracing."""
    gc.collect()
    gc.disable()
    yield
    gc.enable()


@pytest.mark.slow
@pytest.mark.skipif(sys.version_info >= (3, 13), reason="Python 3.13 reports few instructions to settrace")
@pytest.mark.usefixtures("no_collections")
@pytest.mark.parametrize("called", [quick, yielding, waiting])
def test_signal_at_any_moment_of_a_call_is_raised_by_it_once(called: Callable[[], Awaitable[int]]) -> None:
    tracing, at, was_reached = sys.gettrace(), 0, True
    while was_reached:
        planted, outcome = Planted(at), "went on"
        with ad.blocking.open_world() as world:
            world.call(waiting)
            try:
                sys._getframe().f_trace_opcodes = True  # from Python 3.12 on settrace asks whether any frame has this
                sys.settrace(planted.enter_frame)
                world.call(called)
            except KeyboardInterrupt:
                outcome = "raised"
            finally:
                sys.settrace(tracing)
            assert [world.call(waiting), world.call(quick)] == [1, 1]
        was_reached = planted.count > at
        assert outcome == ("raised" if was_reached else "went on"), f"moment {at}"
        at += 1
    assert at > 5


@pytest.mark.slow
@pytest.mark.parametrize("called", [quick, yielding, waiting])
def test_a_signal_in_a_finaliser_hangs_no_later_call(
    called: Callable[[], Awaitable[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Python swallows exceptions of finalisers, and the signal is raised in one just before and after a call."""
    monkeypatch.setattr(sys, "unraisablehook", lambda _: None)
    at, count, raised_count, thresholds = 0, 1, 0, gc.get_threshold()

    def on_collection(_phase: str, _info: object) -> None:
        nonlocal count
        count += 1
        if count == at + 1:
            signal.raise_signal(signal.SIGINT)

    while count > at:
        with ad.blocking.open_world() as world:
            world.call(waiting)
            count = 0
            gc.callbacks.append(on_collection)
            try:
                gc.set_threshold(1, 10_000, 10_000)
                world.call(called)
            except KeyboardInterrupt:
                raised_count += 1
            finally:
                gc.callbacks.remove(on_collection)
                gc.set_threshold(*thresholds)
            assert [world.call(waiting), world.call(quick)] == [1, 1], f"moment {at}"
        at += 1
    assert raised_count


class Late(Exception):
    """An error of a program's own signal handler."""


async def forever(ended: list[str]) -> None:
    try:
        await asyncio.get_running_loop().create_future()
    finally:
        ended.append("cancelled")


async def cancelling_count() -> int:
    task = asyncio.current_task()
    return 0 if task is None else task.cancelling()


@pytest.mark.parametrize("call_count", [0, 2])
@pytest.mark.parametrize("turn_count", [0, 3])
def test_an_error_out_of_the_loop_cancels_the_call(
    turn_count: int, call_count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Regression: the call continued, and the next call or the end of the world waited for it forever.

    A signal handler of the program raises such an error while the loop waits for events.
    """
    select, ended = selectors.DefaultSelector.select, list[str]()
    turns = iter(range(turn_count))

    def then_raise(selector: Any, timeout: float | None = None) -> Any:
        if next(turns, None) is None:
            monkeypatch.undo()
            raise Late
        return select(selector, 0)

    with pytest.raises(KeyError), ad.blocking.open_world() as world:
        monkeypatch.setattr(selectors.DefaultSelector, "select", then_raise)
        with pytest.raises(Late):
            world.call(forever, ended)
        assert [world.call(waiting) for _ in range(call_count)] == [1] * call_count
        assert not call_count or world.call(cancelling_count) == 0, "a task group in a later call would read it"
        raise KeyError
    assert ended == ["cancelled"]


@pytest.mark.parametrize("error", [SystemExit(5), KeyboardInterrupt()], ids=repr)
def test_the_exit_of_another_task_cancels_the_call(error: BaseException) -> None:
    """Regression: the world waited forever for the call when it closed."""
    ended = list[str]()

    async def exiting() -> None:
        asyncio.get_running_loop().call_soon(exit_now)
        await forever(ended)

    def exit_now() -> None:
        raise error

    with pytest.raises(type(error)), ad.blocking.open_world() as world:
        world.call(exiting)
    assert ended == ["cancelled"]


@pytest.mark.slow
@pytest.mark.skipif(sys.version_info >= (3, 13), reason="Python 3.13 reports few instructions to settrace")
@pytest.mark.usefixtures("no_collections")
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # a coroutine may not be awaited
def test_an_error_at_any_moment_of_a_call_hangs_no_later_call() -> None:
    """Regression: after an error of the program's own signal handler, later calls raised RuntimeError.

    The call had made main the current task, and had not ended that.
    """

    def raise_late(*_: object) -> None:
        raise Late

    handler, tracing, at, was_reached = signal.signal(signal.SIGUSR1, raise_late), sys.gettrace(), 0, True
    try:
        while was_reached:
            planted = Planted(at, signal.SIGUSR1)
            with ad.blocking.open_world() as world:
                try:
                    sys._getframe().f_trace_opcodes = True
                    sys.settrace(planted.enter_frame)
                    world.call(quick)
                except Late:
                    pass
                finally:
                    sys.settrace(tracing)
                assert asyncio._get_running_loop() is None, f"moment {at}"
                if at % 2:  # otherwise, the end of the world is next
                    assert [world.call(waiting), world.call(quick)] == [1, 1], f"moment {at}"
            was_reached = planted.count > at
            at += 1
    finally:
        signal.signal(signal.SIGUSR1, handler)
    assert at > 5
