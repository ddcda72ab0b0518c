"""Prevents simulated ranks from using threads, processes and sockets, whose results would not be deterministic.

The calls in :data:`_ENTRIES` raise on the simulation's thread. Some libraries may start threads and processes, because
their results are deterministic (a compiler, ``DataLoader`` workers) or do not reach the program (progress bars,
TensorBoard). A trusted library is recognised by the first calling module outside the standard library.

A process runs one simulation at a time, because a simulation patches functions process-wide.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures.process import ProcessPoolExecutor
from contextvars import ContextVar
from multiprocessing.process import BaseProcess
from typing import Any, Final, NoReturn

from asyncdist.errors import LocalProtocolError

#: Owner, name and description of each refused call. Objects are refused on construction, because partly constructed
#: objects log errors.
_ENTRIES: Final[tuple[tuple[Any, str, str], ...]] = (
    (threading.Thread, "start", "starting a thread"),
    (socket.socket, "__init__", "a socket"),
    (BaseProcess, "start", "starting a process"),
    (ProcessPoolExecutor, "__init__", "a process pool"),
    (subprocess.Popen, "__init__", "starting a subprocess"),
    (asyncio.BaseEventLoop, "__init__", "another event loop"),
    *((os, name, f"os.{name}") for name in ("fork", "forkpty", "posix_spawn", "posix_spawnp", "system")),
)
#: Top-level packages that may start threads and processes and read the real clock in a simulation.
TRUSTED: Final = frozenset({"numpy", "torch", "tqdm"})
#: Other packages that may start threads. Their threads only display progress bars or write logs and checkpoints.
_DISPLAY_ONLY: Final = frozenset({"lightning", "pytorch_lightning", "rich", "tensorboard"})
#: Modules that start processes or threads for a caller. The caller determines whether this is allowed.
_DELEGATES: Final = ("torch.multiprocessing", "torch.distributed", "tqdm.contrib", __name__)
_lock: Final = threading.Lock()
_is_inside: Final[ContextVar[bool]] = ContextVar("asyncdist_is_simulating", default=False)


@contextlib.contextmanager
def one_at_a_time() -> Iterator[None]:
    """Wait until no other thread runs a simulation. Raise LocalProtocolError if the caller is inside a simulation."""
    if _is_inside.get():
        raise LocalProtocolError(
            "a simulation cannot be started inside another simulation, and a simulation is already running in this "
            "thread"
        )
    with _lock:
        token = _is_inside.set(True)
        try:
            yield
        finally:
            _is_inside.reset(token)


def refuse(what: str) -> NoReturn:
    """Raise LocalProtocolError for a call that a simulated rank must not make."""
    raise LocalProtocolError(
        f"{what} cannot be used in a simulation, because its result would not follow from the seed; await "
        "world.compute(fn), which runs fn without a thread there"
    )


@contextlib.contextmanager
def refused_outside() -> Iterator[None]:
    """Make code on this thread raise if it uses threads, processes or sockets, until the context ends."""
    simulating = os.getpid(), threading.get_ident()

    def is_refused() -> bool:
        """Return whether untrusted code on the simulation's thread, not in a forked process, called the function."""
        return (os.getpid(), threading.get_ident()) == simulating and not _is_trusted(sys._getframe(2))

    with contextlib.ExitStack() as stack:
        for owner, name, what in _ENTRIES:
            original = getattr(owner, name, None)
            if original is not None:  # some operating systems lack some of these functions
                setattr(owner, name, _guarded(original, what, is_refused))
                stack.callback(setattr, owner, name, original)
        yield


def _guarded(original: Callable[..., Any], what: str, is_refused: Callable[[], bool]) -> Callable[..., Any]:
    @functools.wraps(original)
    def guarded(*args: Any, **kwargs: Any) -> Any:
        if is_refused():
            if args and isinstance(args[0], asyncio.BaseEventLoop):
                args[0]._closed = True  # type: ignore[attr-defined]  # else its __del__ would complain
            refuse(what)
        return original(*args, **kwargs)

    return guarded


def _is_trusted(frame: Any) -> bool:
    """Return whether the innermost caller outside the standard library and :data:`_DELEGATES` is a trusted package."""
    while frame is not None:
        module = str(frame.f_globals.get("__name__"))
        package = module.partition(".")[0]
        if package not in sys.stdlib_module_names and not module.startswith(_DELEGATES):
            return package in TRUSTED or package in _DISPLAY_ONLY
        frame = frame.f_back
    return False
