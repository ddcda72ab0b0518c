"""Creates, reaches and authenticates torch's key-value stores, through which the processes of a job find each other.

torch's stores have no authentication, so any process that reaches a store's port can read and write all keys.
:class:`SealedStore` writes each value with a seal (:class:`asyncdist.trust.job_secret.JobSecret`), and ignores values
without a valid seal.
"""

from __future__ import annotations

import contextlib
import logging
import math
import re
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from datetime import timedelta
from typing import Any, Final

from torch.distributed import Store, TCPStore  # type: ignore[attr-defined]

from asyncdist import environment
from asyncdist.launchers import addresses, detection
from asyncdist.trust.job_secret import JobSecret
from asyncdist.validation import printable

logger = logging.getLogger("asyncdist.transports.torch_distributed.meeting.stores")

TIMEOUT: Final = timedelta(seconds=60)
#: Seconds added to the timeout for connecting, so that torch's own, more precise error is raised first.
_MARGIN_S: Final = 1.0
#: Seconds for which ``get`` waits for a value with a valid seal.
_TIMEOUT_S: Final = 60.0
_PAUSE_S: Final = 0.01
#: Seconds per rank that are added to the pause between two reads of the store when all ranks may be reading it
#: repeatedly, because the store answers only about ten thousand requests per second.
PAUSE_PER_RANK_S: Final = 0.0005
#: Minimum seconds between two reports of refused values.
_REPORT_PERIOD_S: Final = 60.0
#: Expected value that a read passes to ``compare_set``. It never equals a sealed value, which is longer.
_NOTHING: Final = "?"
#: Maximum number of times that ``compare_set`` overwrites a value without a valid seal, which another process may keep
#: writing.
_ATTEMPT_COUNT: Final = 8


def reason(error: RuntimeError) -> str:
    """Return the message of a torch error without source location, advice and stack trace."""
    text = str(error).partition("\n")[0].partition(". This is typically")[0]
    return re.sub(r"^\[[^]]*\.(cc|cpp|h):\d+\] ", "", text)


def serve(address: str, port: int, *, size: int | None = None, is_open: bool = False) -> Any:
    """Serve a store on one address of this host, or on all its addresses.

    Args:
        address: Address to which the other processes connect. If it is a host name, the store listens on all addresses.
        port: Port of the store, or 0 to let the system choose one.
        size: Number of processes, or None if unknown.
        is_open: Whether to listen on all addresses, for processes that reach the host at different addresses.
    """
    listener = None if is_open else addresses.listen_at(address, port)
    shares_process = port != 0  # If the user's program serves a store on this port, share it.
    listening: dict[str, Any] = {}
    if listener is not None:
        port = listener.getsockname()[1]
        listening["master_listen_fd"] = listener.detach()
    return TCPStore(
        address, port, size, True, TIMEOUT, wait_for_workers=False, multi_tenant=shares_process, **listening
    )


def answered(
    connect: Callable[[], Any],
    timeout_s: float,
    *,
    notice_s: float = math.inf,
    notice: Callable[[], object] = lambda: None,
) -> Any:
    """Return the store that ``connect`` connects to, unless it takes too long.

    If the process that listens at the port does not answer, torch's client waits forever and ignores signals. (A web
    server, for example, would wait for the end of a line.) ``connect`` is therefore called in a separate thread, which
    is abandoned after the timeout.

    Args:
        timeout_s: Timeout in seconds, which ``connect`` should also observe.
        notice_s: Seconds after which ``notice`` is called.

    Raises:
        RuntimeError: ``connect`` did not return in time, or raised this error.
    """
    connected: Future[Any] = Future()

    def try_to_connect() -> None:
        try:
            connected.set_result(connect())
        except BaseException as error:
            connected.set_exception(error)

    threading.Thread(target=try_to_connect, name="asyncdist-store", daemon=True).start()
    if notice_s < timeout_s:
        with contextlib.suppress(TimeoutError):
            return connected.result(notice_s)
        notice()
        timeout_s -= notice_s
    with contextlib.suppress(TimeoutError):
        return connected.result(timeout_s + _MARGIN_S)
    raise RuntimeError("the process that listens there does not answer; another program may use the port")


def text_of(store: Any, key: str) -> str:
    """Return a value of any store as a string. Wait until the store has the value."""
    return bytes(store.get(key)).decode()


class Refusals:
    """Logs values without a valid seal: the first immediately, and later values as a count, at most once a minute."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._guard = threading.Lock()
        self._seen: dict[str, bytes] = {}
        self._count = 0
        self._quiet_until = float("-inf")

    def note(self, key: str, value: bytes) -> None:
        """Count a value without a valid seal, unless it equals the last such value of this key."""
        with self._guard:
            if self._seen.get(key) == value:
                return
            self._seen[key] = value
            self._count += 1
            now = self._clock()
            if now < self._quiet_until:
                return
            count, self._count, self._quiet_until = self._count, 0, now + _REPORT_PERIOD_S
        # Local rank 1 logs a warning, too, because rank 0 may see no invalid value if only the other ranks have the
        # wrong secret.
        level = logging.WARNING if detection.local_rank() in (None, 0, 1) else logging.INFO
        more = f" and {count - 1} more" if count > 1 else ""
        logger.log(
            level,
            "the store of this job has a value%s without a valid seal, which is ignored: "
            "'%s'. Another program writes to the store, or this rank's secret differs from the others': give all "
            "ranks the same %s (docs/trust.md)",
            more,
            printable(key)[:80],
            environment.SECRET_FILE_VARIABLE,
        )


class SealedStore(Store):
    """Part of a torch store that accepts only values that were written with the job's secret.

    It has those methods of torch's stores that asyncdist and gloo use. Values are strings or bytes.

    Attributes:
        secret: Secret of the job.
        prefix: Prefix of each key. It is unique among the parts of this job's store, and the seals include it.
    """

    def __init__(self, inner: Any, secret: JobSecret, prefix: str = "", refusals: Refusals | None = None) -> None:
        super().__init__()
        self._inner = inner
        self.secret = secret
        self.prefix = prefix
        self._refusals = Refusals() if refusals is None else refusals
        self._sound: set[str] = set()

    def part(self, name: str) -> SealedStore:
        """Return the part of this store whose keys begin with ``name`` and a slash."""
        return SealedStore(self._inner, self.secret, f"{self.prefix}{name}/", self._refusals)

    def clone(self) -> SealedStore:
        """Return the same store over a separate connection."""
        return SealedStore(self._inner.clone(), self.secret, self.prefix, self._refusals)

    def set(self, key: str, value: Any) -> None:
        """Write a value with its seal."""
        self._inner.set(self.prefix + key, self._seal(key, value))

    def get(self, key: str) -> bytes:
        """Wait for a value with a valid seal, and return it. Raise RuntimeError after a minute."""
        give_up_at = time.monotonic() + _TIMEOUT_S
        while (value := self._read(key)) is None:
            if time.monotonic() >= give_up_at:
                raise RuntimeError(f"the store has no value of this job for {key!r}")
            time.sleep(_PAUSE_S)
        return value

    def check(self, keys: Sequence[str]) -> bool:
        """Return whether all ``keys`` have values with valid seals."""
        if not self._inner.check([self.prefix + key for key in keys]):
            return False
        for key in keys:
            if key not in self._sound:
                if self._read(key) is None:
                    return False
                self._sound.add(key)
        return True

    def compare_set(self, key: str, expected: str, desired: str) -> bytes:
        """Write ``desired`` if the present value is ``expected``. Return the new value. "" means no value."""
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
        """Wait until all ``keys`` have values with valid seals. Raise RuntimeError after the timeout."""
        give_up_at = time.monotonic() + (_TIMEOUT_S if timeout is None else timeout.total_seconds())
        while not self.check(keys):
            if time.monotonic() >= give_up_at:
                raise RuntimeError(f"the store has no values of this job for {', '.join(map(repr, keys)):.200}")
            time.sleep(_PAUSE_S)

    def why_absent(self, key: str) -> str:
        """Return a sentence, for errors, that says why the key's value is ignored, or "" if it is not ignored."""
        name = self.prefix + key
        if not self._inner.check([name]) or self._read(key) is not None:
            return ""
        return (
            f". The value there was written with another secret than this rank's: give all ranks the same "
            f"{environment.SECRET_FILE_VARIABLE} (docs/trust.md)"
        )

    def _read(self, key: str) -> bytes | None:
        """Return the current value, or None if there is no value with a valid seal.

        This method uses ``compare_set``, because ``get`` of torch's stores waits if another process has deleted the
        value.
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
