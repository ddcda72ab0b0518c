"""What a simulated rank has not: threads, sockets and whatever else would not follow from the seed.

The event loop refuses its own ways out. Threads and sockets that user code makes without it are refused where they
begin, for as long as the simulation lasts and on its thread alone. Libraries that compute may start threads of their
own, whose results do follow (a compiler's, a data loader's): they are told by who calls, the standard library apart.
"""

from __future__ import annotations

import contextlib
import functools
import socket
import sys
import threading
from collections.abc import Iterator
from typing import Any, Final, NoReturn

from asyncdist.errors import LocalProtocolError

#: Top-level packages that may start threads.
_TRUSTED: Final = frozenset({"numpy", "torch"})


def refuse(what: str) -> NoReturn:
    """Raise for what a simulated rank has not."""
    raise LocalProtocolError(
        f"{what} is refused in a simulation: its outcome would not follow from the seed (await world.compute(fn) runs "
        "inline there)"
    )


@contextlib.contextmanager
def refused_outside() -> Iterator[None]:
    """Until it ends, this thread starts no thread and opens no socket."""
    simulating = threading.get_ident()
    start, open_socket = threading.Thread.start, socket.socket.__init__

    @functools.wraps(start)
    def start_or_refuse(thread: threading.Thread) -> None:
        if threading.get_ident() == simulating and not _is_trusted(sys._getframe(1)):
            refuse(f"starting the thread {thread.name!r}")
        start(thread)

    @functools.wraps(open_socket)
    def open_or_refuse(opened: socket.socket, *args: Any, **kwargs: Any) -> None:
        if threading.get_ident() == simulating and not _is_trusted(sys._getframe(1)):
            refuse("a socket")
        open_socket(opened, *args, **kwargs)

    with contextlib.ExitStack() as stack:
        for owner, name, original, ours in (
            (threading.Thread, "start", start, start_or_refuse),
            (socket.socket, "__init__", open_socket, open_or_refuse),
        ):
            setattr(owner, name, ours)
            stack.callback(setattr, owner, name, original)
        yield


def _is_trusted(frame: Any) -> bool:
    """Whether the first caller that is not of the standard library belongs to a package that may."""
    while frame is not None:
        package = str(frame.f_globals.get("__name__")).partition(".")[0]
        if package not in sys.stdlib_module_names:
            return package in _TRUSTED
        frame = frame.f_back
    return False
