"""Makes private gloo groups, checks that the connected processes know the job's secret, and closes connections.

asyncdist sends its messages only over gloo. NCCL is unsuitable, because it ignores tags and matches messages in the
order of the calls (pytorch#94819, #125079).

gloo looks up the ranks in the store and then connects to them. Both steps run in C++, where a thread cannot be
interrupted, and are slow to detect that a process has ended. :func:`make_agreed_groups` therefore does the waiting for
the store itself, so that a check can end the wait.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, Final

import torch
from torch import distributed as dist
from torch.distributed import PrefixStore, Store  # type: ignore[attr-defined]

from asyncdist.errors import TransportError
from asyncdist.transports.torch_distributed.meeting.stores import PAUSE_PER_RANK_S, SealedStore, reason, text_of
from asyncdist.transports.torch_distributed.sockets import configured_sockets

_POISON_TAG: Final = 0x7FFFFFFE
_PROOF_TAG: Final = 0x7FFFFFFC
_LOOPBACK: Final = "127.0.0.1"
#: Seconds between two reads of the store, in addition to ``PAUSE_PER_RANK_S``.
_PAUSE_S: Final = 0.01
_ALL, _SOME = "all ranks are connected", "not all ranks are connected"


def close_connections(group: Any) -> None:
    """Close every connection of the group by letting a wait time out, after which gloo closes them."""
    with contextlib.suppress(RuntimeError):
        group.recv_anysource([torch.zeros(1, dtype=torch.uint8, device="cpu")], _POISON_TAG).wait(
            timedelta(milliseconds=1)
        )


def prove_connections(groups: Sequence[Any], rank: int, size: int, timeout: timedelta, store: SealedStore) -> None:
    """Check, over each connection of new gloo groups, that the process at the other end knows the job's secret.

    gloo accepts any process that reaches its port and sends a connection's number. A process without the secret cannot
    send a valid proof, and the groups are then abandoned.

    Args:
        timeout: Timeout for receiving all proofs.
        store: Part of the store through which the processes connected. Its prefix identifies their connections.

    Raises:
        TransportError: A process, named in the message, did not send a valid proof.
    """
    if store.secret.is_missing:
        return
    deadline = time.monotonic() + timeout.total_seconds()
    peers = [peer for peer in range(size) if peer != rank]
    for number, group in enumerate(groups):
        name = f"{store.prefix}{number}"
        own = [_as_tensor(store.secret.proof(name, rank, peer)) for peer in peers]
        theirs = [torch.zeros_like(tensor) for tensor in own]
        receives = [group.recv([tensor], peer, _PROOF_TAG) for tensor, peer in zip(theirs, peers, strict=True)]
        sends = [group.send([tensor], peer, _PROOF_TAG) for tensor, peer in zip(own, peers, strict=True)]
        for peer, receive, tensor in zip(peers, receives, theirs, strict=True):
            try:
                receive.wait(_until(deadline))
            except RuntimeError as error:
                raise TransportError(
                    f"the process at place {peer} of {size} did not prove that it knows the job's secret: "
                    f"{reason(error)}"
                ) from error
            if not torch.equal(tensor, _as_tensor(store.secret.proof(name, peer, rank))):
                raise TransportError(
                    f"the process at place {peer} of {size} does not know the job's secret; give all ranks the same "
                    "ASYNCDIST_JOB_SECRET_FILE"
                )
        for send in sends:
            send.wait(_until(deadline))


def _until(deadline: float) -> timedelta:
    """Return the time until ``deadline``, but at least 1 ms, because gloo replaces 0 by its own default timeout."""
    return timedelta(seconds=max(0.001, deadline - time.monotonic()))


def _as_tensor(data: bytes) -> torch.Tensor:
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)


def make_gloo_groups(store: Any, rank: int, size: int, timeout: timedelta, *, is_loopback: bool = False) -> list[Any]:
    """Make the gloo groups for frames and large messages, on the loopback interface if ``is_loopback`` is true."""
    with configured_sockets():
        return [
            make_gloo_group(store, name, rank, size, timeout, is_loopback=is_loopback) for name in ("control", "bulk")
        ]


def make_gloo_group(
    store: Any, name: str, rank: int, size: int, timeout: timedelta, *, is_loopback: bool = False
) -> Any:
    """Make one private gloo group. Raise TransportError if torch has no gloo, or the ranks cannot connect."""
    if not (dist.is_available() and dist.is_gloo_available()):
        raise TransportError(
            f"the torch transport needs gloo, but torch {torch.__version__} was built without it; install another "
            "build of torch"
        )
    try:
        if not is_loopback:
            return dist.ProcessGroupGloo(PrefixStore(name, store), rank, size, timeout)
        options = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
        options._devices = [dist.ProcessGroupGloo.create_device(hostname=_LOOPBACK)]
        options._timeout = timeout
        return dist.ProcessGroupGloo(PrefixStore(name, store), rank, size, options)
    except RuntimeError as error:
        raise TransportError(
            f"gloo could not connect the {size} ranks ({reason(error)}). It uses the network interface of this host's "
            "name; to choose another, set GLOO_SOCKET_IFNAME"
        ) from error


def make_agreed_groups(
    store: SealedStore,
    rank: int,
    size: int,
    *,
    connect_s: float,
    timeout_s: float,
    is_loopback: bool = False,
    check: Callable[[], object] = lambda: None,
) -> list[Any]:
    """Make the gloo groups on all ranks or on none, even if ranks end in the meantime. The ranks decide together.

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
        groups = make_gloo_groups(watched, rank, size, connecting, is_loopback=is_loopback)
        prove_connections(groups, rank, size, connecting, store)
        store.set(f"connected/{rank}", "")
        watched.wait([f"connected/{peer}" for peer in range(size)])
        if _decide(store, _ALL) != _ALL:
            raise TransportError("another rank could not connect to all ranks")
    except BaseException as error:
        if _decide(store, _SOME) == _ALL:  # Another rank has just decided that all ranks are connected.
            return groups
        for group in groups:
            close_connections(group)
        if watched.error is not None and watched.error is not error:
            raise watched.error from None
        raise
    return groups


def _decide(store: Any, decision: str) -> str:
    """Record whether all ranks are connected, unless another rank has decided. Return the final decision."""
    return bytes(store.compare_set("decision", "", decision)).decode()


class _WatchedStore(Store):
    """Forwards gloo's calls to another store. While it is waiting, it calls ``look``, which may raise an error.

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
