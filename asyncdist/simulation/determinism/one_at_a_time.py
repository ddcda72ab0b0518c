"""Lets one simulation run at a time: it replaces functions of modules, and swaps states that belong to the process."""

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
    """Wait until no other thread simulates, and let none begin until this ends.

    Raises:
        LocalProtocolError: this is inside a simulation, which would wait for itself.
    """
    if _is_inside.get():
        raise LocalProtocolError("a simulation is running already: no simulation inside a simulation")
    with _lock:
        token = _is_inside.set(True)
        try:
            yield
        finally:
            _is_inside.reset(token)
