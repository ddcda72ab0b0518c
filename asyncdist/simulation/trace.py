"""Records the events of a simulation: a digest of all events and message contents, and the last events."""

from __future__ import annotations

import hashlib
import struct
from collections import deque
from types import SimpleNamespace
from typing import Final, NamedTuple

try:
    import cython
except ImportError:  # Cython is needed to compile the module, not to run it
    cython = SimpleNamespace(compiled=False)

_EVENT: Final = struct.Struct("<dBiiiq")
if not cython.compiled:  # compiled code packs events with a C function
    _pack = _EVENT.pack
_FLUSH_NBYTES: Final = 1 << 16
KEPT_EVENT_COUNT: Final = 20_000
_KINDS: Final = ("send", "receive", "compute", "kill", "fault", "lost", "end", "restart", "met", "join")
_CODES: Final = {kind: code for code, kind in enumerate(_KINDS)}


class TraceEvent(NamedTuple):
    """One event of a simulation. The meaning of ``a``, ``b``, ``tag`` and ``nbytes`` depends on the event's kind.

    For a send or a receive, ``a`` is the source and ``b`` the destination. Otherwise ``a`` is usually a rank.
    """

    time_s: float
    kind: str
    a: int
    b: int
    tag: int
    nbytes: int

    def __str__(self) -> str:
        if self.kind in ("send", "receive"):
            return f"{self.time_s:.9f} {self.kind} {self.a} -> {self.b}, tag {self.tag}, {self.nbytes} bytes"
        if self.kind == "fault":
            return f"{self.time_s:.9f} fault {self.a} of the plan"
        return f"{self.time_s:.9f} {self.kind} rank {self.a}" + (f" ({self.b})" if self.b else "")


class Trace:
    """Computes a digest of all events, and stores the last ``KEPT_EVENT_COUNT`` events."""

    def __init__(self) -> None:
        self._has_ended = False
        self._hash = hashlib.blake2b(digest_size=16)
        self._pending = bytearray()
        self._contents_hash = hashlib.blake2b(digest_size=16)
        self._contents = bytearray()  # message contents that are not in the hash yet
        self._flushed: deque[bytes] = deque(maxlen=1 + KEPT_EVENT_COUNT * _EVENT.size // _FLUSH_NBYTES)

    def add(self, time_s: float, kind: str, a: int, b: int, tag: int, nbytes: int) -> None:
        """Add an event to the digest and to the last events."""
        if self._has_ended:
            return
        pending = self._pending
        pending += _pack(time_s, _CODES[kind], a, b, tag, nbytes)
        if len(pending) > _FLUSH_NBYTES:
            self._hash.update(pending)
            self._flushed.append(bytes(pending))
            pending.clear()

    def add_content(self, data: bytes | bytearray | memoryview) -> None:
        """Add the content of the most recently sent message to the digest."""
        if self._has_ended:
            return
        contents = self._contents
        if len(data) <= _FLUSH_NBYTES:
            contents += data
            if len(contents) <= _FLUSH_NBYTES:
                return
            data = b""
        self._contents_hash.update(contents)
        contents.clear()
        self._contents_hash.update(data)

    def end(self) -> None:
        """Ignore all further events."""
        self._has_ended = True

    @property
    def digest(self) -> str:
        """Hexadecimal digest of all events and message contents so far."""
        copy = self._hash.copy()
        copy.update(self._pending)
        contents = self._contents_hash.copy()
        contents.update(self._contents)
        copy.update(contents.digest())
        return copy.hexdigest()

    def tail(self) -> bytes:
        """Return the last events in the packed form that :func:`unpack` reads."""
        data = b"".join((*self._flushed, self._pending))
        return data[-KEPT_EVENT_COUNT * _EVENT.size :]

    def events(self) -> tuple[TraceEvent, ...]:
        """Return the last events, oldest first."""
        return unpack(self.tail())


def unpack(data: bytes) -> tuple[TraceEvent, ...]:
    """Unpack the events that :meth:`Trace.tail` returned, oldest first."""
    return tuple(TraceEvent(time_s, _KINDS[code], *rest) for time_s, code, *rest in _EVENT.iter_unpack(data))
