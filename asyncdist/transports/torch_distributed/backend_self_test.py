"""Tries at the start whether a backend's ``Work.is_completed()`` tells the truth.

gloo's never turns true outside of ``wait()`` (pytorch#30723), and nothing in torch's interface says which backends
are like that. So before one is polled each pair of ranks exchanges three messages in each direction:

1. one without further ado, which also makes what connections the backend makes lazily;
2. one whose receive is posted, and must be incomplete for as long as nothing has been sent;
3. one whose send is posted first: once it is said to be complete its buffer is overwritten, which must not be seen.

Each of these works must turn complete by itself, and the bytes must be there when it has. The bytes are proofs that the
sender knows the job's secret, as :func:`backends.prove_connections` exchanges over gloo. What one rank has seen is the
verdict on all of them, through the store. The ranks block meanwhile; there is no world yet.

A backend whose ``isend`` blocks for good would hang them all, so each call that starts a message runs in a thread
that can be left behind.
"""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Final, Protocol, TypeVar

from asyncdist.errors import TransportError
from asyncdist.transports.torch_distributed.meeting.sealed_store import SealedStore

_T = TypeVar("_T")

#: How long a work may take to turn complete, and a peer to come so far.
PATIENCE_S: Final = 20.0
#: Larger than what backends commonly copy at once.
_PROBE_NBYTES: Final = 1 << 20
#: How often a work that cannot be complete is asked.
_LOOK_COUNT: Final = 20
_PAUSE_S: Final = 0.0005
_FAILED: Final = "failed"


class Transit(Protocol):
    """A message under way."""

    def is_completed(self) -> bool: ...
    def land(self) -> None: ...


class Pairs(Protocol):
    """What is examined: messages between pairs of ranks."""

    def send(self, view: memoryview, dest: int) -> Transit: ...
    def receive(self, view: memoryview, source: int) -> Transit: ...


def in_time(call: Callable[[], _T], patience_s: float) -> _T:
    """Return what ``call()`` returns; it runs in a thread of its own, which is left behind where it does not return.

    Raises:
        TimeoutError: it has not returned in time.
    """
    outcome: Future[_T] = Future()

    def run() -> None:
        try:
            outcome.set_result(call())
        except BaseException as error:  # raised below, or nobody is left to hear it
            outcome.set_exception(error)

    threading.Thread(target=run, name="asyncdist-self-test", daemon=True).start()
    return outcome.result(patience_s)


class _Untrue(Exception):
    """Carries what was seen."""


class _Elsewhere(Exception):
    """Another rank has seen something."""


def examine(
    pairs: Pairs, backend: str, store: SealedStore, rank: int, size: int, *, patience_s: float = PATIENCE_S
) -> None:
    """Return when the works of ``pairs`` have been found to tell the truth, on all ranks. Blocks; all ranks enter it.

    Args:
        pairs: moves messages by the backend.
        backend: its name, for the error.
        store: the part of a store that is this examination's alone.
        rank: this one.
        size: how many there are.
        patience_s: how long a work may take to turn complete.

    Raises:
        TransportError: on every rank, if one of them found something; names the backend, the ranks, and what was seen.
    """
    seen = ""
    try:
        for pair in itertools.combinations(range(size), 2):
            for source, dest in (pair, pair[::-1]) if rank in pair else ():
                probe = _Probe(pairs, store, source, dest, patience_s)
                probe.receive() if rank == dest else probe.send()
    except _Untrue as error:
        seen = str(error)
        store.set(_FAILED, "")
    except RuntimeError as error:
        seen = f"rank {rank} got an error: {str(error).partition(chr(10))[0]}"
        store.set(_FAILED, "")
    except _Elsewhere:
        pass
    verdict = _agree(store, seen, rank, size, patience_s)
    if verdict:
        raise TransportError(
            f"torch's backend {backend!r} cannot be polled: {verdict}. gloo needs no such promise: 'torch:gloo', or "
            "'torch'",
            backend=backend,
        )


def _agree(store: SealedStore, seen: str, rank: int, size: int, patience_s: float) -> str:
    """Return what the lowest rank that has seen something saw."""
    keys = [f"seen by {peer}" for peer in range(size)]
    store.set(keys[rank], seen)
    if silent := _missing(store, keys, patience_s * size):  # each pair may have taken its time
        return seen or f"ranks {silent} did not finish the test at the start"
    verdict = next(filter(None, (bytes(store.get(key)).decode() for key in keys)), "")
    told = [f"told {peer}" for peer in range(size)]
    store.set(told[rank], "")
    if rank == 0:  # who may serve the store, and end with it
        _missing(store, told, patience_s)
    return verdict


def _missing(store: SealedStore, keys: Sequence[str], patience_s: float) -> list[int]:
    """Return the positions of the keys that no rank has set in time."""
    deadline = time.monotonic() + patience_s
    while not store.check(list(keys)) and time.monotonic() < deadline:
        time.sleep(_PAUSE_S)
    return [number for number, key in enumerate(keys) if not store.check([key])]


class _Probe:
    """Three messages from one rank to another, seen from either."""

    def __init__(self, pairs: Pairs, store: SealedStore, source: int, dest: int, patience_s: float) -> None:
        self._pairs = pairs
        self._store = store
        self._source = source
        self._dest = dest
        self._patience_s = patience_s
        self._sent = f"rank {source}'s send to rank {dest}"
        self._received = f"rank {dest}'s receive from rank {source}"

    def send(self) -> None:
        """Do the sender's part."""
        self._leaves(self._start(self._content(1)))
        self._await("posted", self._dest)
        self._leaves(self._start(self._content(2)))
        content = self._content(3)
        transit = self._start(content)
        is_free = self._look(transit)
        if is_free:
            content[:] = bytes(len(content))
        self._say("sent")
        if not is_free:
            self._leaves(transit)

    def receive(self) -> None:
        """Do the receiver's part."""
        self._arrives(*self._post(), 1)
        transit, buffer = self._post()
        if self._look(transit):
            raise _Untrue(f"{self._received} was said to be complete before anything was sent")
        self._say("posted")
        self._arrives(transit, buffer, 2)
        self._await("sent", self._source)
        self._arrives(*self._post(), 3)

    def _post(self) -> tuple[Transit, memoryview]:
        buffer = memoryview(bytearray(_PROBE_NBYTES))
        return self._in_time(lambda: self._pairs.receive(buffer, self._source), self._received), buffer

    def _start(self, content: memoryview) -> Transit:
        return self._in_time(lambda: self._pairs.send(content, self._dest), self._sent)

    def _in_time(self, start: Callable[[], Transit], what: str) -> Transit:
        try:
            return in_time(start, self._patience_s)
        except TimeoutError as error:
            limit = f"{self._patience_s:g} s"
            raise _Untrue(f"{what} blocked: the call that starts it did not return within {limit}") from error

    def _content(self, number: int) -> memoryview:
        place = f"{self._store.prefix}message {number}"
        block = self._store.secret.proof(place, self._source, self._dest)
        return memoryview(bytearray(block * (_PROBE_NBYTES // len(block))))

    def _leaves(self, transit: Transit) -> None:
        self._until(transit.is_completed, lambda: f"{self._sent} was not said to be complete within")

    def _arrives(self, transit: Transit, buffer: memoryview, number: int) -> None:
        def is_there() -> bool:
            transit.land()
            return buffer == self._content(number)

        def complain() -> str:
            bytes_are = "its bytes had come" if is_there() else "its bytes had not come either"
            return f"{self._received} was not said to be complete ({bytes_are}) within"

        self._until(transit.is_completed, complain)
        if not is_there():
            raise _Untrue(f"{self._received} was said to be complete, and the bytes of that rank were not there")

    def _look(self, transit: Transit) -> bool:
        """Whether it is said to be complete, for a while."""
        for _ in range(_LOOK_COUNT):
            if transit.is_completed():
                return True
            time.sleep(_PAUSE_S)
        return False

    def _key(self, word: str) -> str:
        return f"{word} {self._source} to {self._dest}"

    def _say(self, word: str) -> None:
        self._store.set(self._key(word), "")

    def _await(self, word: str, peer: int) -> None:
        # Twice as long as for a work, which says more about what is wrong.
        patience_s = 2 * self._patience_s
        self._until(
            lambda: self._store.check([self._key(word)]),
            lambda: f"rank {peer} did not go on with the test in",
            patience_s,
        )

    def _until(
        self, condition: Callable[[], bool], complain: Callable[[], str], patience_s: float | None = None
    ) -> None:
        patience_s = self._patience_s if patience_s is None else patience_s
        deadline = time.monotonic() + patience_s
        while not condition():
            if self._store.check([_FAILED]):
                raise _Elsewhere
            if time.monotonic() >= deadline:
                raise _Untrue(f"{complain()} {patience_s:g} s")
            time.sleep(_PAUSE_S)
