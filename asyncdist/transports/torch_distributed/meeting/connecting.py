"""Makes gloo groups for all ranks or for none, even if ranks end in the meantime.

gloo looks up the ranks in the store and then connects to them. Both steps run in C++, where a thread cannot be
interrupted, and detect the end of a process late. This module therefore waits for the store itself, so that a check can
end the wait.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, Final

from torch.distributed import Store  # type: ignore[attr-defined]

from asyncdist.errors import TransportError
from asyncdist.transports.torch_distributed import gloo_groups
from asyncdist.transports.torch_distributed.meeting.sealed_store import PAUSE_PER_RANK_S, SealedStore, text_of

#: Seconds between two reads of the store, in addition to ``PAUSE_PER_RANK_S``.
_PAUSE_S: Final = 0.01
_ALL, _SOME = "all ranks are connected", "not all ranks are connected"


def make_gloo_groups(
    store: SealedStore,
    rank: int,
    size: int,
    *,
    connect_s: float,
    timeout_s: float,
    is_loopback: bool = False,
    check: Callable[[], object] = lambda: None,
) -> list[Any]:
    """Make the groups for frames and for large messages. The ranks decide together whether all of them succeeded.

    Args:
        store: Part of the store that only this attempt uses.
        connect_s: gloo's timeout for connecting, in seconds, once all ranks have arrived.
        timeout_s: Timeout for all other steps, in seconds.
        check: Function that is called repeatedly while waiting, and raises an error to give up.

    Raises:
        TransportError: A rank could not make the groups or has given up. The caller may retry.
    """
    deadline = time.monotonic() + timeout_s

    def look() -> None:
        check()
        if store.check(["decision"]) and text_of(store, "decision") != _ALL:
            raise TransportError("another rank could not connect to all ranks")
        if time.monotonic() >= deadline:
            raise TransportError(f"not all of the {size} ranks arrived within {timeout_s:g} s")

    watched = _WatchedStore(store, look, _PAUSE_S + size * PAUSE_PER_RANK_S)
    groups: list[Any] = []
    try:
        connecting = timedelta(seconds=connect_s)
        groups = gloo_groups.make_gloo_groups(watched, rank, size, connecting, is_loopback=is_loopback)
        gloo_groups.prove_connections(groups, rank, size, connecting, store)
        store.set(f"connected/{rank}", "")
        watched.wait([f"connected/{peer}" for peer in range(size)])
        if _decide(store, _ALL) != _ALL:
            raise TransportError("another rank could not connect to all ranks")
    except BaseException as error:
        if _decide(store, _SOME) == _ALL:  # Another rank has just decided that all ranks are connected.
            return groups
        for group in groups:
            gloo_groups.close_connections(group)
        if watched.error is not None and watched.error is not error:
            raise watched.error from None
        raise
    return groups


def _decide(store: Any, decision: str) -> str:
    """Record whether all ranks are connected, unless another rank has decided. Return the final decision."""
    return bytes(store.compare_set("decision", "", decision)).decode()


class _WatchedStore(Store):
    """Store that forwards gloo's calls to another store. While it waits, it calls ``look``, which may raise an error.

    Attributes:
        error: Error raised by ``look``, which gloo replaces with its own error, or None.
    """

    def __init__(self, store: Any, look: Callable[[], object], pause_s: float) -> None:
        super().__init__()
        self._inner = store
        self._look = look
        self._pause_s = pause_s
        self.error: BaseException | None = None

    def set(self, key: str, value: Any) -> None:
        self._inner.set(key, value)

    def get(self, key: str) -> bytes:
        return bytes(self._inner.get(key))

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        del timeout
        while not self._inner.check(keys):
            try:
                self._look()
            except BaseException as error:
                self.error = error
                raise
            time.sleep(self._pause_s)
