"""Heeds SIGUSR1: the rank tells on standard error what all ranks of its host do, and goes on.

Ranks that share a process tell one after the other.
"""

from __future__ import annotations

import contextlib
import signal
import sys
import threading
from collections.abc import Callable
from types import FrameType
from typing import Any, Final, Self

from asyncdist import environment, rank_program
from asyncdist.runtime.stall_warnings import is_library

#: None where there is no such signal.
SIGNAL: Final = getattr(signal, "SIGUSR1", None)
#: What tells the story of each world that is open in this process, and is called in a child that this process forks.
_tellers: dict[object, tuple[Callable[[], str], Callable[[], None]]] = {}


def tell_on_request(owner: object, tell: Callable[[], str], forget_in_child: Callable[[], None]) -> None:
    """Print at each signal what ``tell()`` returns, if anything, until :func:`tell_no_more`; it comes to processes."""
    _tellers[owner] = tell, forget_in_child


def tell_no_more(owner: object) -> None:
    """Forget what ``owner`` has registered."""
    _tellers.pop(owner, None)


class StoryRequests:
    """Heeds the signal while it is entered, unless the program has a handler of its own for it, or is to have one.

    Does nothing outside the main thread, where Python allows no signal handlers.
    """

    def __init__(self) -> None:
        self._previous: Any = None

    def __enter__(self) -> Self:
        is_main = threading.current_thread() is threading.main_thread()
        if SIGNAL is not None and is_main and not _is_lightnings():
            found = signal.getsignal(SIGNAL)
            if found is signal.SIG_DFL or _is_of_rank_program(found):
                self._previous = found
                signal.signal(SIGNAL, _answer)
        return self

    def __exit__(self, *_: object) -> None:
        if self._previous is not None and SIGNAL is not None and signal.getsignal(SIGNAL) is _answer:
            signal.signal(SIGNAL, self._previous)


def forget_in_child() -> None:
    """Give a forked process Python's handler back, and let it not listen: it is no rank."""
    for _, forget in _tellers.values():
        forget()
    _tellers.clear()
    if SIGNAL is None:
        return
    found = signal.getsignal(SIGNAL)
    if found is _answer or _is_of_rank_program(found):
        signal.signal(SIGNAL, signal.SIG_DFL)


def _is_of_rank_program(handler: Any) -> bool:
    """Whether a handler is that with which a rank begins: of a program, which is another module than its import."""
    name: str = getattr(handler, "__qualname__", "")
    return name == rank_program.tell_no_world.__qualname__


def _is_lightnings() -> bool:
    """Whether Lightning means to save and requeue the job at this signal; it does not where there is a handler."""
    return environment.is_slurm_job() and not {"lightning", "pytorch_lightning"}.isdisjoint(sys.modules)


def _answer(_number: int, frame: FrameType | None) -> None:
    tellers = list(_tellers.values())
    if not tellers:
        while frame is not None and frame.f_back is not None and is_library(frame):
            frame = frame.f_back
        rank_program.tell_no_world(_number, frame)
        return
    texts = [_told(tell) for tell, _ in tellers]
    with contextlib.suppress(Exception):  # nothing may come of a signal that only asks
        sys.stderr.write("".join(f"asyncdist: {text}\n" for text in texts if text))
        sys.stderr.flush()


def _told(tell: Callable[[], str]) -> str:
    try:
        return tell()
    except Exception as error:
        return f"the story of a rank could not be told: {type(error).__name__}: {error}"
