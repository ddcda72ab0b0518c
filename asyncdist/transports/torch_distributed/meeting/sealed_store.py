"""Makes a store of torch.distributed believable: a value counts if a process with the job's secret has written it.

torch's store asks nobody who he is: any process that reaches its port reads and writes each key. Here each value is
written with a seal (:class:`asyncdist.trust.job_secret.JobSecret`), and one without a sound seal counts as absent. So
garbage neither names a newcomer nor ends a thread. Who reaches the port can still delete values, so that ranks that
meet or join do not find each other.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, Final

from torch.distributed import Store  # type: ignore[attr-defined]

from asyncdist import environment
from asyncdist.trust.job_secret import JobSecret
from asyncdist.validation import printable

logger = logging.getLogger("asyncdist.transports.torch_distributed.meeting.sealed_store")

#: How long a value that is there, without a sound seal, may take to become sound; as torch's store waits for one.
_TIMEOUT_S: Final = 60.0
_PAUSE_S: Final = 0.01
#: A process reports refused values once in so many seconds.
_REPORT_PERIOD_S: Final = 60.0
#: What a read expects to find: no sealed value is as short.
_NOTHING: Final = "?"
#: How often a value without a sound seal is replaced, where another process writes it again and again.
_ATTEMPT_COUNT: Final = 8


class Refusals:
    """Reports values that were refused: the first at once, then as a number, once a minute at most.

    Args:
        clock: Returns seconds.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._guard = threading.Lock()
        self._seen: dict[str, bytes] = {}
        self._count = 0
        self._quiet_until = float("-inf")

    def note(self, key: str, value: bytes) -> None:
        """Count a refused value, unless it is the one that was refused under this key before."""
        with self._guard:
            if self._seen.get(key) == value:
                return
            self._seen[key] = value
            self._count += 1
            now = self._clock()
            if now < self._quiet_until:
                return
            count, self._count, self._quiet_until = self._count, 0, now + _REPORT_PERIOD_S
        # Rank 0 finds nothing refused where the others cannot read the port that it has announced.
        level = logging.WARNING if environment.local_rank() in (None, 0, 1) else logging.INFO
        more = f" and {count - 1} more" if count > 1 else ""
        logger.log(
            level,
            "the store of this job has a value%s that no process with the job's secret has written, and it is ignored: "
            "'%s'. Another program writes there, or this rank has another secret than the others: give all ranks the "
            "same %s (docs/trust.md)",
            more,
            printable(key)[:80],
            environment.SECRET_FILE_VARIABLE,
        )


class SealedStore(Store):
    """The part of a store that belongs to the processes with one secret.

    It has the methods of torch's stores that asyncdist and gloo use, with text or bytes as values.

    Args:
        inner: A store of torch.
        secret: The job's.
        prefix: Begins each key, and belongs to what a seal holds for.
        refusals: Reports the refused values of all parts.

    Attributes:
        secret: The job's.
        prefix: Names this part; no other part of this job has it.
    """

    def __init__(self, inner: Any, secret: JobSecret, prefix: str = "", refusals: Refusals | None = None) -> None:
        super().__init__()
        self._inner = inner
        self.secret = secret
        self.prefix = prefix
        self._refusals = Refusals() if refusals is None else refusals
        self._sound: set[str] = set()

    def part(self, name: str) -> SealedStore:
        """Return the part of this store with the keys that begin with ``name`` and a slash."""
        return SealedStore(self._inner, self.secret, f"{self.prefix}{name}/", self._refusals)

    def clone(self) -> SealedStore:
        """Return the same store over a connection of its own."""
        return SealedStore(self._inner.clone(), self.secret, self.prefix, self._refusals)

    def set(self, key: str, value: Any) -> None:
        """Write a value."""
        self._inner.set(self.prefix + key, self._seal(key, value))

    def get(self, key: str) -> bytes:
        """Return a value, when one with a sound seal is there.

        Raises:
            RuntimeError: There is none within a minute, or the store has closed.
        """
        give_up_at = time.monotonic() + _TIMEOUT_S
        while (value := self._read(key)) is None:
            if time.monotonic() >= give_up_at:
                raise RuntimeError(f"the store has no value of this job for {key!r}")
            time.sleep(_PAUSE_S)
        return value

    def check(self, keys: Sequence[str]) -> bool:
        """Return whether all of these keys have values with sound seals."""
        if not self._inner.check([self.prefix + key for key in keys]):
            return False
        for key in keys:
            if key not in self._sound:
                if self._read(key) is None:
                    return False
                self._sound.add(key)
        return True

    def compare_set(self, key: str, expected: str, desired: str) -> bytes:
        """Write ``desired`` if the value is ``expected``; an empty one means that there is no sound value. Return it.

        A value without a sound seal is replaced where none is expected.
        """
        mine = self._seal(key, desired)
        before: Any = self._seal(key, expected) if expected else ""
        for _ in range(_ATTEMPT_COUNT):
            found = bytes(self._inner.compare_set(self.prefix + key, before, mine))
            value = self._unseal(key, found)
            if value is not None or expected:
                return value or b""
            before = found
        return b""

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        """Return when all of these keys have values with sound seals.

        Raises:
            RuntimeError: Some have none in time.
        """
        give_up_at = time.monotonic() + (_TIMEOUT_S if timeout is None else timeout.total_seconds())
        while not self.check(keys):
            if time.monotonic() >= give_up_at:
                raise RuntimeError(f"the store has no values of this job for {', '.join(map(repr, keys)):.200}")
            time.sleep(_PAUSE_S)

    def why_absent(self, key: str) -> str:
        """Return a cause for an error about a key without a sound value; empty if nothing is written there."""
        name = self.prefix + key
        if not self._inner.check([name]) or self._read(key) is not None:
            return ""
        return (
            f". What is written there has another secret than this rank: give all ranks the same "
            f"{environment.SECRET_FILE_VARIABLE} (docs/trust.md)"
        )

    def _read(self, key: str) -> bytes | None:
        """Return the value that is there now; None if there is none with a sound seal.

        ``get`` of torch's stores waits for a value, and sees no signal then: another process may have deleted the value
        since it was seen. A comparison with a value that never is there does not wait.
        """
        found = bytes(self._inner.compare_set(self.prefix + key, _NOTHING, _NOTHING))
        return None if found == _NOTHING.encode() else self._unseal(key, found)

    def _seal(self, key: str, value: Any) -> bytes:
        return self.secret.seal(self.prefix + key, value.encode() if isinstance(value, str) else bytes(value))

    def _unseal(self, key: str, data: bytes) -> bytes | None:
        value = self.secret.unseal(self.prefix + key, data)
        if value is None:
            self._refusals.note(self.prefix + key, data[:64])
        return value
