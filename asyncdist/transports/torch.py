"""Ranks that torchrun started, or anything else that sets RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT.

Ranks find each other through a store: that of the process group which the user has made, if there is one; else the
agent's, under torchrun; else rank 0 serves one, which a later ``init_process_group`` of the user's shares. Every key
begins with the job's name, so that a group of workers which was started again is another job, and with the number of
worlds that the rank has opened before.

Messages go through gloo (:mod:`asyncdist.transports.gloo`) and matching through
:mod:`asyncdist.transports.matching`. NCCL cannot carry them: it ignores tags, and matches by the order of issue
(pytorch#94819, #125079).
"""

from __future__ import annotations

import atexit
import functools
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, Final, Protocol

import torch
from torch import distributed as dist
from torch.distributed import PrefixStore, TCPStore  # type: ignore[attr-defined]

from asyncdist.errors import TransportError
from asyncdist.transports import gloo
from asyncdist.transports.base import (
    ANY_SOURCE,
    Buffer,
    Capabilities,
    GroupHandle,
    PersistentReceive,
    Request,
    Transport,
    as_bytes,
)
from asyncdist.transports.matching import Inbox, Matcher, OwnMessage, Receive, Send

#: How long the ranks wait for each other at the start.
START_TIMEOUT_S: Final = 300.0
#: Between two looks: a wait inside the store sees no signal.
_LOOK_S: Final = 1.0
_GROUP_TIMEOUT: Final = timedelta(seconds=60)


class Rendezvous(Protocol):
    """Where the ranks meet.

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


def is_group_initialised() -> bool:
    """Whether the user has called ``init_process_group``, so that no rendezvous is needed."""
    return dist.is_available() and dist.is_initialized()


class TorchTransport(Transport):
    """The ranks of a torch.distributed job.

    Args:
        rendezvous: where they meet; None where the user's process group says who there is.
        job: a name that no other job with this store has.
        start_timeout_s: how long to wait for the other ranks.

    Raises:
        TransportError: the ranks do not find each other; names those that did not come.
    """

    name = "torch"

    def __init__(self, rendezvous: Rendezvous | None, job: str, *, start_timeout_s: float | None = None) -> None:
        deadline = time.monotonic() + (START_TIMEOUT_S if start_timeout_s is None else start_timeout_s)
        if rendezvous is None:
            store: Any = dist.distributed_c10d._get_default_store()
            self.rank, self.size = dist.get_rank(), dist.get_world_size()
        else:
            self.rank, self.size = rendezvous.rank, rendezvous.size
            store = _connect(rendezvous, deadline)
        store = _meet(store, job, self.rank, self.size, deadline)
        self.capabilities = Capabilities(
            native_collectives=False, survives_rank_loss=True, wakes=True, tag_max=2**31 - 1, rings_from_threads=True
        )
        self._inbox = Inbox()
        self._matcher = Matcher(self._inbox)
        make_group = functools.partial(gloo.make_group, store, rank=self.rank, size=self.size, timeout=_GROUP_TIMEOUT)
        self._mesh = gloo.Mesh(make_group, self.rank, self.size, self._matcher)
        self._is_closed = False
        atexit.register(self.close_failed)  # threads that wait in gloo at the interpreter's end abort the process

    def isend(self, buffer: Buffer, dest: int, tag: int) -> Request:
        view = as_bytes(buffer)
        if dest != self.rank:
            return self._mesh.links[dest].send(view, tag)
        send = Send(self._inbox, view.nbytes)
        self._matcher.deliver(OwnMessage(self._inbox, send, self.rank, tag, view))
        self._inbox.ring()
        return send

    def irecv(self, buffer: Buffer, source: int, tag: int) -> Request:
        receive = Receive(self._matcher, buffer, source, tag)
        self._matcher.post(receive)
        return receive

    def persistent_receive(self, buffer: Buffer, tag: int) -> PersistentReceive:
        return Receive(self._matcher, buffer, ANY_SOURCE, tag)

    def new_group(self, ranks: Sequence[int], tag: int) -> GroupHandle | None:
        del ranks, tag
        return None

    def lost_ranks(self) -> frozenset[int]:
        return self._mesh.lost

    def abort(self, exit_code: int) -> None:
        self._mesh.abort(exit_code)

    def close(self) -> None:
        if not self._is_closed:
            self._is_closed = True
            atexit.unregister(self.close_failed)
            self._mesh.close()

    def close_failed(self) -> None:
        self.close()

    def set_doorbell(self, ring: Callable[[], None]) -> None:
        self._inbox.set_bell(ring)

    def set_loss_listener(self, listen: Callable[[int], None]) -> None:
        self._mesh.set_loss_listener(listen)

    def describe(self) -> str:
        return f"torch: gloo of torch {torch.__version__}, {self.size} rank{'s' if self.size > 1 else ''}"


def _connect(rendezvous: Rendezvous, deadline: float) -> Any:
    """The store, served here where nobody else does."""
    serves = rendezvous.rank == 0 and not rendezvous.is_store_served
    where = f"{rendezvous.address}:{rendezvous.port}"
    while True:
        try:
            return _store(rendezvous.address, rendezvous.port, rendezvous.size, serves)
        except RuntimeError as error:
            reason = str(error).splitlines()[0]
            if serves:
                raise TransportError(
                    f"rank 0 cannot serve the store at {where} (MASTER_ADDR, MASTER_PORT): {reason}",
                    port=rendezvous.port,
                ) from error
            if time.monotonic() >= deadline:
                raise TransportError(
                    f"rank {rendezvous.rank} found no store at {where} (MASTER_ADDR, MASTER_PORT), which "
                    f"{'the agent' if rendezvous.is_store_served else 'rank 0'} serves: {reason}"
                ) from error


@functools.cache
def _store(address: str, port: int, size: int, serves: bool) -> TCPStore:
    """Kept for the process's life: of a job's next world, this rank may be the first to come or the last to go."""
    return TCPStore(
        address,
        port,
        size,
        is_master=serves,
        timeout=timedelta(seconds=_LOOK_S),
        wait_for_workers=False,
        multi_tenant=True,
    )


def _meet(store: Any, job: str, rank: int, size: int, deadline: float) -> Any:
    """The part of the store that is this world's, once every rank has come."""
    number = store.add(f"asyncdist/{job}/worlds of {rank}", 1)
    meeting = PrefixStore(f"asyncdist/{job}/{number}", store)
    meeting.set(f"rank {rank}", f"of {size}")
    keys = [f"rank {peer}" for peer in range(size)]
    while True:
        missing = [peer for peer, key in enumerate(keys) if not meeting.check([key])]
        if not missing:
            break
        if time.monotonic() >= deadline:
            raise TransportError(
                f"rank {rank} waits for ranks {missing}, which did not come to the start of world {number} of job "
                f"{job!r}",
                missing=missing,
            )
        try:
            meeting.wait([keys[missing[0]]], timedelta(seconds=min(_LOOK_S, max(0.001, deadline - time.monotonic()))))
        except dist.DistStoreError:
            continue  # to look at the clock, and at signals
    sizes = {peer: bytes(meeting.get(key)).decode() for peer, key in enumerate(keys)}
    different = {peer: theirs for peer, theirs in sizes.items() if theirs != f"of {size}"}
    if different:
        peer, theirs = next(iter(different.items()))
        raise TransportError(f"rank {rank} is one of {size} ranks (WORLD_SIZE), rank {peer} one {theirs}", rank=peer)
    return meeting
