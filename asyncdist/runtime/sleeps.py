"""Finds the timers that asyncio sets for a rank's tasks: those of ``sleep``, ``timeout``, ``wait_for`` and ``wait``.

Recordings tell when each fires, and a replay lets it fire then. Timers that code sets on the loop by itself are not
among them.
"""

from __future__ import annotations

import asyncio
import contextvars
import itertools
from collections.abc import Callable
from typing import Any

from asyncdist.waits import WaitId, WaitKind

#: Sets a timer, given its identity, its time on the loop's clock in seconds, a function, its arguments and its context.
SetTimer = Callable[[WaitId, float, Callable[..., object], tuple[Any, ...], contextvars.Context | None], Any]


def set_sleeps_by(loop: asyncio.AbstractEventLoop, set_timer: SetTimer) -> Callable[[], None]:
    """Have ``set_timer`` set the timers of asyncio's own functions instead of the loop; their numbers tell them apart.

    Args:
        loop: of one rank alone.
        set_timer: returns a handle, which can be cancelled.

    Returns:
        What undoes this.
    """
    replaced: Any = loop
    call_at, call_later, numbers = loop.call_at, loop.call_later, itertools.count()

    def at(when: float, callback: Callable[..., object], *args: Any, context: contextvars.Context | None = None) -> Any:
        if not _is_of_asyncio(callback):
            return call_at(when, callback, *args, context=context)
        return set_timer(WaitId(WaitKind.SLEEP, number=next(numbers)), when, callback, args, context)

    def later(
        delay: float, callback: Callable[..., object], *args: Any, context: contextvars.Context | None = None
    ) -> Any:
        if not _is_of_asyncio(callback):
            return call_later(delay, callback, *args, context=context)
        return at(loop.time() + delay, callback, *args, context=context)

    def undo() -> None:
        replaced.call_at, replaced.call_later = call_at, call_later

    replaced.call_at, replaced.call_later = at, later
    return undo


def _is_of_asyncio(callback: Callable[..., object]) -> bool:
    return str(getattr(callback, "__module__", None)).startswith("asyncio.")
