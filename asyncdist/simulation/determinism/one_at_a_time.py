"""Allows only one simulation at a time in a process, because a simulation patches functions process-wide."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from contextvars import ContextVar
from typing import Final

from asyncdist.errors import LocalProtocolError

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
