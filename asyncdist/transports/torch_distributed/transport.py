"""Transport for ranks started by torchrun, or by any launcher that sets RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT."""

from __future__ import annotations

import atexit
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Final

import torch
from torch import distributed as dist

from asyncdist import environment
from asyncdist.errors import TransportError
from asyncdist.launchers import detection
from asyncdist.launchers.variables import TorchRendezvous
from asyncdist.transports.base import Buffer, Capabilities, Request
from asyncdist.transports.matching import CallbackQueue, MatchedTransport, Receive, Send
from asyncdist.transports.torch_distributed import gloo_groups, gloo_mesh
from asyncdist.transports.torch_distributed.meeting.newcomers import NewcomerConnector, WorldEntry
from asyncdist.transports.torch_distributed.meeting.rendezvous import join_store
from asyncdist.trust.living_ranks import LivingRank
from asyncdist.wording import plural

#: Seconds that the ranks wait for each other at startup.
START_TIMEOUT_S = 300.0
_GROUP_TIMEOUT: Final = timedelta(seconds=60)


def _rank_and_size(rendezvous: TorchRendezvous | None) -> tuple[int, int]:
    if rendezvous is None:
        return dist.get_rank(), dist.get_world_size()
    return rendezvous.rank, rendezvous.size


def _claim(rendezvous: TorchRendezvous | None) -> LivingRank | None:
    """Register this process for its rank on this host. Raise TransportError if another process runs as this rank."""
    if rendezvous is None or rendezvous.size == 1:
        return None
    job = f"{rendezvous.address} {rendezvous.port} {rendezvous.job}"
    claim = LivingRank(job, rendezvous.rank, environment.shared_directories())
    pid = claim.other()
    if pid is not None:
        other = f"process {pid} of this host" if pid else "a process of another container of this host"
        raise TransportError(
            f"the job already has a rank {rendezvous.rank} (RANK, MASTER_PORT): {other} runs as that rank, so this "
            "process is refused. A separate job needs another MASTER_PORT, or a launcher",
            rank=rendezvous.rank,
        )
    return claim


class TorchTransport(MatchedTransport):
    """Sends messages between the ranks of a torch.distributed job, over gloo.

    Args:
        rendezvous: Address and settings by which the ranks find each other, or None if the user's process group defines
            the ranks.
        granted_tags: Stream tags, on which each receive names its source and is large enough for its message.
        start_timeout_s: Seconds to wait for the other ranks, by default 300.

    Raises:
        TransportError: The ranks do not find each other. The message names the missing ranks.
    """

    name = "torch"

    def __init__(
        self,
        rendezvous: TorchRendezvous | None,
        *,
        granted_tags: range = range(0),
        start_timeout_s: float | None = None,
    ) -> None:
        rank, size = _rank_and_size(rendezvous)
        timeout_s = START_TIMEOUT_S if start_timeout_s is None else start_timeout_s
        connector = None
        callbacks = CallbackQueue()
        groups: Sequence[object] = ()
        trusts_network = False
        self._living = _claim(rendezvous)
        if size > 1 and rendezvous is not None and rendezvous.admits_restarted:
            entry = WorldEntry(rendezvous, timeout_s)
            self.incarnation, self.job_nonce, groups = entry.incarnation, entry.nonce, entry.groups
            connector = NewcomerConnector(
                entry.common,
                entry.store,
                rank,
                entry.incarnation,
                entry.process,
                callbacks,
                running=entry.running,
                size=size,
                late_places=range(size - rendezvous.empty_count, size),
                vacant=entry.vacant,
                is_loopback=rendezvous.is_loopback,
            )
        elif size > 1:
            store = join_store(rendezvous, rank, size, timeout_s)
            is_loopback = rendezvous is not None and rendezvous.is_loopback
            groups = gloo_groups.make_gloo_groups(store, rank, size, _GROUP_TIMEOUT, is_loopback=is_loopback)
            gloo_groups.prove_connections(groups, rank, size, _GROUP_TIMEOUT, store)
            trusts_network = store.secret.is_missing
        capabilities = Capabilities(
            native_collectives=False,
            survives_rank_loss=True,
            wakes=True,
            tag_max=2**31 - 1,
            misses_wakes=False,
            rings_from_threads=True,
            shares_memory=True,
            written_share=1.0,
            logs_losses=not detection.names_lost_ranks(),
        )
        super().__init__(rank, size, callbacks, capabilities)
        if self._living is not None:
            self._living.begin()
        self.trusts_network = trusts_network
        self.may_return = connector is not None
        self._granted_tags = granted_tags
        self._mesh = gloo_mesh.Mesh(groups, rank, size, self._matcher, connector)
        self._is_closed = False
        # A thread that still waits in gloo when the interpreter exits would abort the process.
        atexit.register(self.close_failed)

    def _start_send(self, view: memoryview, dest: int, tag: int) -> Request:
        link = self._mesh.links.get(dest)
        if link is None:
            return self._mesh.unmet(Send(self._callbacks, view.nbytes), dest)
        return link.send_granted(view, tag) if tag in self._granted_tags else link.send(view, tag)

    def irecv(self, buffer: Buffer, source: int, tag: int) -> Request:
        if tag in self._granted_tags and source != self.rank:
            link = self._mesh.links.get(source)
            if link is None:
                return self._mesh.unmet(Receive(self._matcher, buffer, source, tag), source)
            return link.receive_granted(buffer, tag)
        return super().irecv(buffer, source, tag)

    def lost_ranks(self) -> frozenset[int]:
        return self._mesh.lost

    def missed_ranks(self) -> frozenset[int]:
        return self._mesh.missed

    def vacant_ranks(self) -> frozenset[int]:
        return self._mesh.vacant

    def abort(self, exit_code: int) -> None:
        self._mesh.abort(exit_code)

    def close(self) -> None:
        self._close(gloo_mesh.JOIN_S)

    def close_failed(self) -> None:
        self._close(gloo_mesh.HOPELESS_JOIN_S)

    def _close(self, join_s: float) -> None:
        if not self._is_closed:
            self._is_closed = True
            atexit.unregister(self.close_failed)
            self._mesh.close(join_s)
            if self._living is not None:
                self._living.end()

    def set_arrival_callback(self, ring: Callable[[], None]) -> None:
        self._callbacks.set_bell(ring)

    def set_loss_listener(self, listen: Callable[[int], None]) -> None:
        self._mesh.set_loss_listener(listen)

    def set_return_listener(self, listen: Callable[[int, int], None]) -> None:
        self._mesh.set_return_listener(listen)

    def accept(self, rank: int, incarnation: int) -> bool:
        return self._mesh.accept(rank, incarnation)

    def describe(self) -> str:
        return f"torch: gloo of torch {torch.__version__}, {plural(self.size, 'rank')}"
