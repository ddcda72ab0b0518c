"""Makes ``time.sleep`` and the clocks of the module ``time`` use virtual time on simulated ranks.

``time.sleep(1)`` advances the rank's time by one second, during which none of its tasks, timers or callbacks run.
Messages that arrive during the sleep are received at the next await. A loop that polls a clock also advances time. More
than :data:`~asyncdist.simulation.rank_turns.READ_COUNT_MAX` reads and sleeps in one callback raise an error. Other
calls (``threading.Event.wait``, ``queue.Queue.get``, ``select.select``) block in real time and take no virtual time.
``time.localtime``, ``strftime`` and similar functions use virtual time by default, in the machine's time zone.

Outside the ranks' turns, in other threads and in forked processes, the replaced functions use real time. They also use
it if the standard library or torch calls them, to wait for real processes and files. A function that was imported by
name before the simulation (``from time import sleep``) is not replaced, and ``datetime.now`` returns real time.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import math
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any, Final

from asyncdist.simulation.determinism.sandbox import TRUSTED
from asyncdist.simulation.processes.event_loop import RankLoop

#: Initial value of ``time.time`` in a simulation: 1 January 2020.
EPOCH_S: Final = 1_577_836_800.0
#: Initial value of each clock, in seconds.
_CLOCKS: Final = {"time": EPOCH_S, "monotonic": 0.0, "perf_counter": 0.0, "process_time": 0.0, "thread_time": 0.0}
_CLOCKS_BY_ID: Final = ("clock_gettime", "clock_gettime_ns")
#: Functions of ``time`` that use the current time by default.
_OF_A_MOMENT: Final = ("localtime", "gmtime", "ctime")
#: Functions of ``time`` that use the current date by default, with the index of the date argument.
_OF_A_DATE: Final = {"asctime": 0, "strftime": 1}


@contextlib.contextmanager
def patched_clocks() -> Iterator[None]:
    """Make simulated ranks sleep and read clocks in virtual time until the context ends."""
    replacements: dict[str, Callable[..., Any]] = {"sleep": _sleeping(time.sleep)}
    for name, start_s in _CLOCKS.items():
        replacements[name] = _reading(getattr(time, name), start_s, float)
        replacements[f"{name}_ns"] = _reading(getattr(time, f"{name}_ns"), start_s, _nanoseconds)
    for name in _CLOCKS_BY_ID:
        replacements[name] = _reading_by_id(getattr(time, name))
    for name in _OF_A_MOMENT:
        replacements[name] = _of_a_moment(getattr(time, name))
    for name, date_index in _OF_A_DATE.items():
        replacements[name] = _of_a_date(getattr(time, name), date_index, time.localtime)
    originals = {name: getattr(time, name) for name in replacements}
    time.__dict__.update(replacements)
    try:
        yield
    finally:
        time.__dict__.update(originals)


def _sleeping(original: Callable[[float], None]) -> Callable[[float], None]:
    @functools.wraps(original)
    def sleep(seconds: float, /) -> None:
        loop = _calling_rank()
        # The original function raises the error for a negative or infinite duration.
        if loop is None or not 0 <= seconds < math.inf:
            original(seconds)
        else:
            loop.sleep(seconds)

    return sleep


def _reading(original: Callable[[], Any], start_s: float, of_seconds: Callable[[float], Any]) -> Callable[[], Any]:
    @functools.wraps(original)
    def clock() -> Any:
        loop = _calling_rank()
        return original() if loop is None else of_seconds(start_s + loop.time())

    return clock


def _reading_by_id(original: Callable[[int], Any]) -> Callable[[int], Any]:
    @functools.wraps(original)
    def clock(clock_id: int, /) -> Any:
        told = original(clock_id)  # raises for an unknown clock
        loop = _calling_rank()
        if loop is None:
            return told
        seconds = loop.time() + (EPOCH_S if clock_id == time.CLOCK_REALTIME else 0.0)
        return _nanoseconds(seconds) if isinstance(told, int) else seconds

    return clock


def _of_a_moment(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def tell(seconds: float | None = None, /) -> Any:
        loop = _calling_rank()
        return original(EPOCH_S + loop.time() if seconds is None and loop is not None else seconds)

    return tell


def _of_a_date(
    original: Callable[..., str], date_index: int, localtime: Callable[[float], time.struct_time]
) -> Callable[..., str]:
    @functools.wraps(original)
    def tell(*args: Any) -> str:
        loop = _calling_rank()
        date = [localtime(EPOCH_S + loop.time())] if loop is not None and len(args) == date_index else []
        return original(*args, *date)

    return tell


def _nanoseconds(seconds: float) -> int:
    return round(seconds * 1e9)


def _calling_rank() -> RankLoop | None:
    """Return the running rank's loop, or None if no rank is running or a trusted library makes the call."""
    loop = asyncio._get_running_loop()  # None in other threads and in forked processes
    if not isinstance(loop, RankLoop) or not loop.is_running():
        return None
    package = str(sys._getframe(2).f_globals.get("__name__")).partition(".")[0]
    return None if package in TRUSTED or package in sys.stdlib_module_names else loop
