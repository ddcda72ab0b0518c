"""What happened, in order: a digest over everything, and the last part of it in full."""

from __future__ import annotations

import hashlib
import struct
from collections import deque
from typing import Final, NamedTuple

_EVENT: Final = struct.Struct("<dBiiiq")
_FLUSH_NBYTES: Final = 1 << 16
KEPT_EVENT_COUNT: Final = 20_000
_KINDS: Final = ("send", "receive", "compute", "kill", "fault", "lost", "end")
_CODES: Final = {kind: code for code, kind in enumerate(_KINDS)}


class TraceEvent(NamedTuple):
    """One line of a trace; ``a``, ``b``, ``tag`` and ``nbytes`` as the kind uses them (sends: source and dest)."""

    time_s: float
    kind: str
    a: int
    b: int
    tag: int
    nbytes: int

    def __str__(self) -> str:
        if self.kind in ("send", "receive"):
            return f"{self.time_s:.9f} {self.kind} {self.a} -> {self.b}, tag {self.tag}, {self.nbytes} bytes"
        return f"{self.time_s:.9f} {self.kind} rank {self.a}" + (f" ({self.b})" if self.b else "")


class Trace:
    """Collects events. The digest covers all of them; the events kept are the last ``KEPT_EVENT_COUNT``."""

    def __init__(self) -> None:
        self._hash = hashlib.blake2b(digest_size=16)
        self._pending = bytearray()
        self._last: deque[tuple[float, str, int, int, int, int]] = deque(maxlen=KEPT_EVENT_COUNT)
        self._pack = _EVENT.pack

    def add(self, time_s: float, kind: str, a: int, b: int, tag: int, nbytes: int) -> None:
        """One event."""
        self._pending += self._pack(time_s, _CODES[kind], a, b, tag, nbytes)
        self._last.append((time_s, kind, a, b, tag, nbytes))
        if len(self._pending) > _FLUSH_NBYTES:
            self._hash.update(self._pending)
            self._pending.clear()

    @property
    def digest(self) -> str:
        """Of everything so far, in hex."""
        copy = self._hash.copy()
        copy.update(self._pending)
        return copy.hexdigest()

    def events(self) -> tuple[TraceEvent, ...]:
        """The last events, oldest first."""
        return tuple(TraceEvent(*event) for event in self._last)
