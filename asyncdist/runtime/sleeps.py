"""Intercepts the timers of asyncio's ``sleep``, ``timeout``, ``wait_for`` and ``wait``, for recordings and replays.

A replay fires each timer at its position in the recording. Timers that code sets directly on the loop are not
intercepted.
"""

from __future__ import annotations

import asyncio
import contextvars
import itertools
from collections.abc import Callable
from typing import Any

from asyncdist.waits import WaitId, WaitKind

#: Function that sets a timer. Its arguments are the timer's identity, its deadline in seconds on the loop's clock, a
#: callback, the callback's arguments, and the callback's context.
SetTimer = Callable[[WaitId, float, Callable[..., object], tuple[Any, ...], contextvars.Context | None], Any]


def set_sleeps_by(loop: asyncio.AbstractEventLoop, set_timer: SetTimer) -> Callable[[], None]:
    """Let ``set_timer`` set the timers of asyncio's own functions. Return a function that restores the loop."""
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
