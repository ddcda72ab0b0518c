"""Ranks that torchrun started, or anything else that sets RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT.

They find each other in :mod:`asyncdist.transports.meeting`; messages go through gloo (:mod:`asyncdist.transports.gloo`)
and are matched with receives in :mod:`asyncdist.transports.matching`. NCCL cannot carry them: it ignores tags, and
matches by the order of issue (pytorch#94819, #125079).
"""

from __future__ import annotations

import atexit
import functools
import logging
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Final

import torch
from torch import distributed as dist

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
from asyncdist.transports.meeting import Rendezvous, meet

logger = logging.getLogger("asyncdist.transports.torch")

#: How long the ranks wait for each other at the start.
START_TIMEOUT_S = 300.0
_GROUP_TIMEOUT: Final = timedelta(seconds=60)
_GLOO_ALONE: Final = "The backend that carries messages is gloo: 'torch:gloo', or 'torch'"


def check_backend(name: str) -> None:
    """Refuse a backend of torch.distributed that carries no messages.

    Raises:
        ValueError: it is not gloo; says what is wrong with it.
    """
    if name == "gloo":
        return
    registered = [known for known in dist.Backend.backend_list if known != dist.Backend.UNDEFINED]
    if name not in registered:
        raise ValueError(
            f"transport is 'torch:{name}'; this torch has registered {', '.join(registered)}. {_GLOO_ALONE}"
        )
    if name == "nccl":
        raise ValueError(
            "transport is 'torch:nccl', but NCCL ignores tags and matches messages by the order of issue, so it cannot "
            f"carry channels. {_GLOO_ALONE}"
        )
    raise ValueError(f"transport is 'torch:{name}', whose messages nothing here can await. {_GLOO_ALONE}")


class TorchTransport(Transport):
    """The ranks of a torch.distributed job.

    Args:
        rendezvous: where they meet; None where the user's process group says who there is.
        start_timeout_s: how long to wait for the other ranks.

    Raises:
        TransportError: the ranks do not find each other; names those that did not come.
    """

    name = "torch"

    def __init__(self, rendezvous: Rendezvous | None, *, start_timeout_s: float | None = None) -> None:
        if rendezvous is None:
            self.rank, self.size = dist.get_rank(), dist.get_world_size()
        else:
            self.rank, self.size = rendezvous.rank, rendezvous.size
        timeout_s = START_TIMEOUT_S if start_timeout_s is None else start_timeout_s
        store = meet(rendezvous, self.rank, self.size, timeout_s) if self.size > 1 else None
        self.capabilities = Capabilities(
            native_collectives=False,
            survives_rank_loss=True,
            wakes=True,
            tag_max=2**31 - 1,
            misses_wakes=False,
            rings_from_threads=True,
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
        try:
            self.close()
        except TransportError as error:  # there is a failure already, and it is the one to be told
            logger.warning("%s", error)

    def set_doorbell(self, ring: Callable[[], None]) -> None:
        self._inbox.set_bell(ring)

    def set_loss_listener(self, listen: Callable[[int], None]) -> None:
        self._mesh.set_loss_listener(listen)

    def describe(self) -> str:
        return f"torch: gloo of torch {torch.__version__}, {self.size} rank{'s' if self.size > 1 else ''}"
