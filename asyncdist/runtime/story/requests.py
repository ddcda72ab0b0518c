"""Handles SIGUSR1 by printing the waits of all ranks on this host on standard error. The ranks continue."""

from __future__ import annotations

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
#: Two functions for each open world of this process. The first returns its report, the second is called in forked
#: children.
_reports: dict[object, tuple[Callable[[], str], Callable[[], None]]] = {}


def register_report(owner: object, report: Callable[[], str], forget_in_child: Callable[[], None]) -> None:
    """Print the string that ``report()`` returns, unless it is empty, at each SIGUSR1 until it is unregistered."""
    _reports[owner] = report, forget_in_child


def unregister_report(owner: object) -> None:
    """Remove the functions that ``owner`` has registered."""
    _reports.pop(owner, None)


class StoryRequests:
    """Handles SIGUSR1 inside the ``with`` block, unless the program or Lightning handles the signal."""

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
    for _, forget in _reports.values():
        forget()
    _reports.clear()
    if SIGNAL is None:
        return
    found = signal.getsignal(SIGNAL)
    if found is _answer or _is_of_rank_program(found):
        signal.signal(SIGNAL, signal.SIG_DFL)


def _is_of_rank_program(handler: Any) -> bool:
    """Return whether ``handler`` is the handler that :mod:`asyncdist.rank_program` sets while no world is open."""
    name: str = getattr(handler, "__qualname__", "")
    return name == rank_program.report_without_world.__qualname__


def _is_lightnings() -> bool:
    """Return whether Lightning would requeue the job on SIGUSR1 if no other handler were set."""
    return detection.is_slurm_job() and not {"lightning", "pytorch_lightning"}.isdisjoint(sys.modules)


def _answer(_number: int, frame: FrameType | None) -> None:
    reports = list(_reports.values())
    if not reports:
        while frame is not None and frame.f_back is not None and is_library(frame):
            frame = frame.f_back
        rank_program.report_without_world(_number, frame)
        return
    texts = [_report_or_error(report) for report, _ in reports]
    rank_program.write_error("".join(f"asyncdist: {text}\n" for text in texts if text))


def _report_or_error(report: Callable[[], str]) -> str:
    try:
        return report()
    except Exception as error:
        return f"the waits of a rank could not be reported: {type(error).__name__}: {error}"
