"""How the ranks of a torch.distributed job find each other: through a store of keys and values.

Which store, in this order:

- that of the process group which the user has made;
- under torchrun, that of its agent;
- one of our own, which rank 0 serves at a port that the system chooses. It is announced at MASTER_PORT, in a server
  that rank 0 starts for that and stops before anybody goes on: so the port is free for the user's
  ``init_process_group``, which finds nothing of ours there. (torch uses the same keys again after
  ``destroy_process_group``; in a server that lived on they would lead to connections of the group before.)

Every key begins with the job's name, so that workers which were started again are another job, and with the number of
worlds that the rank has opened before.
"""

from __future__ import annotations

import contextlib
import functools
import socket
import time
from collections.abc import Sequence
from datetime import timedelta
from typing import Any, Final, Protocol

from torch import distributed as dist
from torch.distributed import PrefixStore, TCPStore  # type: ignore[attr-defined]

from asyncdist.errors import TransportError
from asyncdist.transports.gloo import reason

#: Between two looks at the clock: a wait inside the store sees no signal.
_LOOK_S: Final = 1.0
_PAUSE_S: Final = 0.02
_STORE_TIMEOUT: Final = timedelta(seconds=60)


class Rendezvous(Protocol):
    """Where the ranks meet. Equal ones are the same.

    Attributes:
        rank: this process's.
        size: how many there are.
        address: of the host with the store.
        port: of the store.
        is_store_served: whether something else serves it already, as torchrun's agent does.
    """

    @property
    def rank(self) -> int: ...
    @property
    def size(self) -> int: ...
    @property
    def address(self) -> str: ...
    @property
    def port(self) -> int: ...
    @property
    def is_store_served(self) -> bool: ...
    def __hash__(self) -> int: ...


def is_group_initialised() -> bool:
    """Whether the user has called ``init_process_group``, so that no rendezvous is needed."""
    return dist.is_available() and dist.is_initialized()


def meet(rendezvous: Rendezvous | None, job: str, rank: int, size: int, timeout_s: float) -> Any:
    """Wait for all ranks.

    Args:
        rendezvous: where; None where the user's process group has a store.
        job: a name that no other job with this store has.
        rank: this one.
        size: how many there are.
        timeout_s: how long the ranks wait for each other.

    Returns:
        The part of a store that is this world's alone.

    Raises:
        TransportError: the store cannot be served or reached, or ranks did not come; names them.
    """
    deadline = time.monotonic() + timeout_s
    if rendezvous is None:
        store = dist.distributed_c10d._get_default_store()
    elif rendezvous.is_store_served:
        store = _agents_store(rendezvous, timeout_s)
    else:
        store = _own_store(rendezvous, job, timeout_s)
    number = store.add(f"asyncdist/{job}/worlds of {rank}", 1)
    world = PrefixStore(f"asyncdist/{job}/{number}", store)
    _await_everybody(world, f"world {number} of job {job!r}", rank, size, deadline)
    return world


# Stores are kept for the process's life: of a job's next world, this rank may be the first to come or the last to go.


@functools.cache
def _agents_store(rendezvous: Rendezvous, timeout_s: float) -> Any:
    _await_server(rendezvous, time.monotonic() + timeout_s, "torchrun's agent")
    return _reach(rendezvous, rendezvous.port)


@functools.cache
def _own_store(rendezvous: Rendezvous, job: str, timeout_s: float) -> Any:
    deadline = time.monotonic() + timeout_s
    what, key = f"job {job!r}", f"asyncdist/{job}/port"
    if rendezvous.rank == 0:
        own = _serve(rendezvous, 0)
        announcement = _serve(rendezvous, rendezvous.port)
        announcement.set(key, str(own.port))
        _await_everybody(own, what, 0, rendezvous.size, deadline)
        del announcement  # which closes it; nobody has gone on
        own.set("go", "")
    else:
        own = _reach(rendezvous, _announced_port(rendezvous, key, deadline))
        _await_everybody(own, what, rendezvous.rank, rendezvous.size, deadline)
        _await_key(own, "go", deadline)
    return own


def _announced_port(rendezvous: Rendezvous, key: str, deadline: float) -> int:
    """What rank 0 says at MASTER_PORT. The server there may first be that of a group which is being destroyed."""
    while True:
        _await_server(rendezvous, deadline, "rank 0")
        try:
            announcement = _reach(rendezvous, rendezvous.port)
            if _await_key(announcement, key, deadline):
                return int(announcement.get(key))
        except (RuntimeError, TransportError) as error:
            if time.monotonic() >= deadline:
                raise TransportError(f"{_who_waits(rendezvous)}: {error}", missing=[0]) from error
        if time.monotonic() >= deadline:
            raise TransportError(f"{_who_waits(rendezvous)}, which has not come there", missing=[0])
        time.sleep(_PAUSE_S)


def _who_waits(rendezvous: Rendezvous) -> str:
    return f"rank {rendezvous.rank} waits for rank 0 at {_place(rendezvous, rendezvous.port)}"


def _serve(rendezvous: Rendezvous, port: int) -> Any:
    try:
        return TCPStore(
            rendezvous.address,
            port,
            rendezvous.size,
            True,
            _STORE_TIMEOUT,
            wait_for_workers=False,
            multi_tenant=port != 0,
        )
    except RuntimeError as error:
        raise TransportError(
            f"rank 0 cannot serve a store at {_place(rendezvous, port)}: {reason(error)}", port=port
        ) from error


def _reach(rendezvous: Rendezvous, port: int) -> Any:
    try:
        return TCPStore(rendezvous.address, port, rendezvous.size, False, _STORE_TIMEOUT, wait_for_workers=False)
    except RuntimeError as error:
        raise TransportError(
            f"rank {rendezvous.rank} cannot use the store at {_place(rendezvous, port)}: {reason(error)}", port=port
        ) from error


def _place(rendezvous: Rendezvous, port: int) -> str:
    known = " (MASTER_ADDR, MASTER_PORT)" if port == rendezvous.port else ""
    return f"{rendezvous.address}:{port}{known}"


def _await_server(rendezvous: Rendezvous, deadline: float, whose: str) -> None:
    """Look until somebody listens. The store's own way to wait sees no signal, and complains aloud."""
    while True:
        try:
            socket.create_connection((rendezvous.address, rendezvous.port), timeout=_LOOK_S).close()
            return
        except OSError as error:
            if time.monotonic() >= deadline:
                raise TransportError(
                    f"rank {rendezvous.rank} waits for {whose}, but nobody serves a store at "
                    f"{_place(rendezvous, rendezvous.port)}: {error}",
                    port=rendezvous.port,
                ) from error
        time.sleep(_PAUSE_S)


def _await_key(store: Any, key: str, deadline: float) -> bool:
    """Whether somebody has set it before the deadline."""
    while not store.check([key]):
        if time.monotonic() >= deadline:
            return False
        _look(store, key, deadline)
    return True


def _look(store: Any, key: str, deadline: float) -> None:
    """Wait a little for the key, then let the caller see the clock, and signals."""
    with contextlib.suppress(dist.DistStoreError):
        store.wait([key], timedelta(seconds=min(_LOOK_S, max(0.001, deadline - time.monotonic()))))


def _await_everybody(store: Any, what: str, rank: int, size: int, deadline: float) -> None:
    """Come, and wait for the others; all must count alike."""
    keys = [f"rank {peer}" for peer in range(size)]
    missing = [peer for peer in range(size) if peer != rank]
    try:
        store.set(keys[rank], f"of {size}")
        while missing := [peer for peer in missing if not store.check([keys[peer]])]:
            if time.monotonic() >= deadline:
                raise TransportError(f"{_who_is_missing(rank, missing)} to the start of {what}", missing=missing)
            _look(store, keys[missing[0]], deadline)
    except RuntimeError as error:
        # Whoever serves the store has ended; its deadline may have come a moment before ours.
        raise TransportError(
            f"{_who_is_missing(rank, missing)} to the start of {what} before the store closed: {reason(error)}",
            missing=missing,
        ) from error
    _check_sizes([bytes(store.get(key)).decode() for key in keys], rank, size)


def _who_is_missing(rank: int, missing: Sequence[int]) -> str:
    return f"rank {rank} waits for ranks {missing}, which did not come"


def _check_sizes(sizes: Sequence[str], rank: int, size: int) -> None:
    for peer, theirs in enumerate(sizes):
        if theirs != f"of {size}":
            raise TransportError(
                f"rank {rank} is one of {size} ranks (WORLD_SIZE), rank {peer} one {theirs}", rank=peer
            )
