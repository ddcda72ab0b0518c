"""Records the events of a simulation: a digest of all of them, and the last ones in full.

The digest also covers the contents of messages. An event holds only a message's size.
"""

from __future__ import annotations

import hashlib
import struct
from collections import deque
from types import SimpleNamespace
from typing import Final, NamedTuple

try:
    import cython
except ImportError:  # needed to compile, not to run
    cython = SimpleNamespace(compiled=False)

_EVENT: Final = struct.Struct("<dBiiiq")
if not cython.compiled:  # compiled code uses a C function
    _pack = _EVENT.pack
_FLUSH_NBYTES: Final = 1 << 16
KEPT_EVENT_COUNT: Final = 20_000
_KINDS: Final = ("send", "receive", "compute", "kill", "fault", "lost", "end", "restart", "met", "join")
_CODES: Final = {kind: code for code, kind in enumerate(_KINDS)}


class TraceEvent(NamedTuple):
    """Describes one event; its kind gives ``a``, ``b``, ``tag`` and ``nbytes`` their meaning (sends: source, dest)."""

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
    """Collects events. The digest covers all of them; the events kept are the last ``KEPT_EVENT_COUNT``."""

    def __init__(self) -> None:
        self._has_ended = False
        self._hash = hashlib.blake2b(digest_size=16)
        self._pending = bytearray()
        self._contents_hash = hashlib.blake2b(digest_size=16)
        self._contents = bytearray()  # contents that are not yet in the hash
        self._flushed: deque[bytes] = deque(maxlen=1 + KEPT_EVENT_COUNT * _EVENT.size // _FLUSH_NBYTES)

    def add(self, time_s: float, kind: str, a: int, b: int, tag: int, nbytes: int) -> None:
        """Add one event."""
        if self._has_ended:
            return
        pending = self._pending
        pending += _pack(time_s, _CODES[kind], a, b, tag, nbytes)
        if len(pending) > _FLUSH_NBYTES:
            self._hash.update(pending)
            self._flushed.append(bytes(pending))
            pending.clear()

    def add_content(self, data: bytes | bytearray | memoryview) -> None:
        """Add the bytes of the last sent message to the digest."""
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
        """Return the hexadecimal digest of all events and message contents so far."""
        copy = self._hash.copy()
        copy.update(self._pending)
        contents = self._contents_hash.copy()
        contents.update(self._contents)
        copy.update(contents.digest())
        return copy.hexdigest()

    def tail(self) -> bytes:
        """Return the last events, packed; :func:`unpack` unpacks them."""
        data = b"".join((*self._flushed, self._pending))
        return data[-KEPT_EVENT_COUNT * _EVENT.size :]

    def events(self) -> tuple[TraceEvent, ...]:
        """Return the last events, oldest first."""
        return unpack(self.tail())


def unpack(data: bytes) -> tuple[TraceEvent, ...]:
    """Return the events of a :meth:`Trace.tail`, oldest first."""
    return tuple(TraceEvent(time_s, _KINDS[code], *rest) for time_s, code, *rest in _EVENT.iter_unpack(data))
