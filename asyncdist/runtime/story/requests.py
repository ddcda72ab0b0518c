"""Handles SIGUSR1: prints the waits of all ranks of this host on standard error, and continues."""

from __future__ import annotations

import contextlib
import signal
import sys
import threading
from collections.abc import Callable
from types import FrameType
from typing import Any, Final, Self

from asyncdist import rank_program
from asyncdist.launchers import detection
from asyncdist.runtime.stall_warnings import is_library

#: Number of the signal, or None if the operating system has no SIGUSR1.
SIGNAL: Final = getattr(signal, "SIGUSR1", None)
#: Functions of each open world of this process: one returns its report, and the other is called in forked children.
_tellers: dict[object, tuple[Callable[[], str], Callable[[], None]]] = {}


def tell_on_request(owner: object, tell: Callable[[], str], forget_in_child: Callable[[], None]) -> None:
    """Print the string that ``tell()`` returns, unless it is empty, at each SIGUSR1 until :func:`unregister_report`."""
    _tellers[owner] = tell, forget_in_child


def unregister_report(owner: object) -> None:
    """Remove the functions that ``owner`` has registered."""
    _tellers.pop(owner, None)


class StoryRequests:
    """Context manager that handles SIGUSR1, unless the program or Lightning handles the signal."""

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
    """Restore Python's default handler, and close the sockets of this process's ranks. Called in a forked child."""
    for _, forget in _tellers.values():
        forget()
    _tellers.clear()
    if SIGNAL is None:
        return
    found = signal.getsignal(SIGNAL)
    if found is _answer or _is_of_rank_program(found):
        signal.signal(SIGNAL, signal.SIG_DFL)


def _is_of_rank_program(handler: Any) -> bool:
    """Return whether a signal handler is the initial one of :mod:`asyncdist.rank_program`."""
    name: str = getattr(handler, "__qualname__", "")
    return name == rank_program.report_without_world.__qualname__


def _is_lightnings() -> bool:
    """Return whether Lightning would requeue the job on SIGUSR1 if no other handler is set."""
    return detection.is_slurm_job() and not {"lightning", "pytorch_lightning"}.isdisjoint(sys.modules)


def _answer(_number: int, frame: FrameType | None) -> None:
    tellers = list(_tellers.values())
    if not tellers:
        while frame is not None and frame.f_back is not None and is_library(frame):
            frame = frame.f_back
        rank_program.report_without_world(_number, frame)
        return
    texts = [_told(tell) for tell, _ in tellers]
    with contextlib.suppress(Exception):  # A report must never end a run.
        sys.stderr.write("".join(f"asyncdist: {text}\n" for text in texts if text))
        sys.stderr.flush()


def _told(tell: Callable[[], str]) -> str:
    try:
        return tell()
    except Exception as error:
        return f"the waits of a rank could not be reported: {type(error).__name__}: {error}"
