"""Refuses threads, processes, sockets and the like in a simulated rank: their results would not follow from the seed.

The event loop refuses such calls of its own. All other calls of user code are refused at their beginning, before
anything has been made, for as long as the simulation lasts and on its thread alone: :data:`_ENTRIES` lists them.
Libraries that compute may have threads and processes of their own, whose results do follow from the seed (a compiler's,
the workers of a ``DataLoader``, which hand out their batches in order), and a progress bar has a thread for its
display, as TensorBoard has one that writes. They are recognised by the calling module, the standard library apart.
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
from multiprocessing.process import BaseProcess
from typing import Any, Final, NoReturn

from asyncdist.errors import LocalProtocolError

#: Owner, name and purpose of each call. A process pool would fork before its first thread is refused; its parts, and an
#: event loop's, would complain of each other when they are thrown away half made.
_ENTRIES: Final[tuple[tuple[Any, str, str], ...]] = (
    (threading.Thread, "start", "starting a thread"),
    (socket.socket, "__init__", "a socket"),
    (BaseProcess, "start", "starting a process"),
    (ProcessPoolExecutor, "__init__", "a process pool"),
    (subprocess.Popen, "__init__", "starting a subprocess"),
    (asyncio.BaseEventLoop, "__init__", "another event loop"),
    *((os, name, f"os.{name}") for name in ("fork", "forkpty", "posix_spawn", "posix_spawnp", "system")),
)
#: Top-level packages that may make these calls, and whose clock is the real one.
TRUSTED: Final = frozenset({"numpy", "torch", "tqdm"})
#: Others that may make them: they have threads that draw, or write logs and checkpoints, and tell a rank nothing.
_TELLING_NOTHING: Final = frozenset({"lightning", "pytorch_lightning", "rich", "tensorboard"})
#: Modules that start a process or a thread only because their caller asks for it; this one is between an entry and the
#: next.
_SERVANTS: Final = ("torch.multiprocessing", "torch.distributed", "tqdm.contrib", __name__)


def refuse(what: str) -> NoReturn:
    """Raise LocalProtocolError for something that a simulated rank must not use."""
    raise LocalProtocolError(
        f"{what} is refused in a simulation: its outcome would not follow from the seed (await world.compute(fn) needs "
        "no thread there)"
    )


@contextlib.contextmanager
def refused_outside() -> Iterator[None]:
    """Let this thread start no thread and no process, and open no socket, until the context ends."""
    simulating = os.getpid(), threading.get_ident()

    def is_refused() -> bool:
        """Return whether the caller's caller is refused. A forked process does not belong to the simulation."""
        return (os.getpid(), threading.get_ident()) == simulating and not _is_trusted(sys._getframe(2))

    with contextlib.ExitStack() as stack:
        for owner, name, what in _ENTRIES:
            original = getattr(owner, name, None)
            if original is not None:  # not every system has all of them
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
    """Return whether a trusted package made the call: the first caller that is neither standard library nor servant."""
    while frame is not None:
        module = str(frame.f_globals.get("__name__"))
        package = module.partition(".")[0]
        if package not in sys.stdlib_module_names and not module.startswith(_SERVANTS):
            return package in TRUSTED or package in _TELLING_NOTHING
        frame = frame.f_back
    return False
