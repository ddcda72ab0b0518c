"""Transport for ranks started by torchrun, or by any launcher that sets RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT."""

from __future__ import annotations

import asyncio
import atexit
import itertools
import logging
import sys
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from datetime import timedelta
from typing import Any, Final, TypeVar

import torch
from torch import distributed as dist

from asyncdist import environment
from asyncdist.errors import RankLostError, TransportError
from asyncdist.launchers import detection
from asyncdist.launchers.variables import TorchRendezvous
from asyncdist.transports.base import Buffer, Capabilities, Request
from asyncdist.transports.matching import CallbackQueue, MatchedTransport, Receive, Send
from asyncdist.transports.torch_distributed import gloo_groups
from asyncdist.transports.torch_distributed.gloo_link import Link
from asyncdist.transports.torch_distributed.meeting.newcomers import NewcomerConnector, WorldEntry
from asyncdist.transports.torch_distributed.meeting.rendezvous import join_store
from asyncdist.trust.living_ranks import LivingRank
from asyncdist.wording import plural

T = TypeVar("T", Send, Receive)

logger = logging.getLogger("asyncdist.transports.torch_distributed.transport")

#: Seconds for which the ranks wait for each other at startup.
START_TIMEOUT_S = 300.0
_GROUP_TIMEOUT: Final = timedelta(seconds=60)
#: Maximum seconds for which the training thread keeps the GIL while a thread of the transport is waiting for it.
#: Python's default is 5 ms. These waits add up, because each end acquires the GIL twice for a frame and four times for
#: a large message.
_SWITCH_INTERVAL_S: Final = 0.0002
_GOODBYE_S: Final = 0.5
#: Maximum seconds for all threads to end. They need milliseconds once their connections are closed, but longer if many
#: ranks share a core: 32 ranks have thousands of threads.
_JOIN_S: Final = 30.0
#: Maximum seconds for the threads to end after the loss of a peer or another failure. A wait for data in transit may
#: then never end.
_HOPELESS_JOIN_S: Final = 0.4
_ABORT_S: Final = 0.05


def open_transport(rendezvous: TorchRendezvous | None, *, granted_tags: range = range(0)) -> TorchTransport:
    """Connect this rank to the other ranks of its job.

    Args:
        rendezvous: Address and settings by which the ranks find each other, or None if the user's process group defines
            the ranks.
        granted_tags: Stream tags, on which each receive names its source and is large enough for its message.

    Raises:
        TransportError: The ranks do not find each other. The message names the missing ranks.
    """
    if rendezvous is None:
        rank, size, is_loopback = dist.get_rank(), dist.get_world_size(), False
    else:
        rank, size, is_loopback = rendezvous.rank, rendezvous.size, rendezvous.is_loopback
    groups: Sequence[Any] = ()
    entry: WorldEntry | None = None
    trusts_network = False
    living = _claim(rendezvous)
    if size > 1 and rendezvous is not None and rendezvous.admits_restarted:
        entry = WorldEntry(rendezvous, START_TIMEOUT_S)
        groups = entry.groups
    elif size > 1:
        store = join_store(rendezvous, rank, size, START_TIMEOUT_S)
        groups = gloo_groups.make_gloo_groups(store, rank, size, _GROUP_TIMEOUT, is_loopback=is_loopback)
        gloo_groups.prove_connections(groups, rank, size, _GROUP_TIMEOUT, store)
        trusts_network = store.secret.is_missing
    if living is not None:
        living.begin()
    transport = TorchTransport(groups, rank, size, entry, granted_tags=granted_tags, living=living)
    transport.trusts_network = trusts_network
    # A thread that still waits in gloo when the interpreter exits would abort the process.
    atexit.register(transport.close_failed)
    return transport


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

    Owns the links to all peers and their gloo groups, and connects ranks that join later.

    Args:
        groups: Groups for frames and for large messages of all ranks that began the world. Empty if this rank has no
            peers or joined later.
        entry: How this process entered a world that other ranks may join later, or None if no rank may join later.
        granted_tags: Stream tags, on which each receive names its source and is large enough for its message.
        living: Registration of this process for its rank, or None.
    """

    name = "torch"

    def __init__(
        self,
        groups: Sequence[Any],
        rank: int,
        size: int,
        entry: WorldEntry | None = None,
        *,
        granted_tags: range = range(0),
        living: LivingRank | None = None,
    ) -> None:
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
        super().__init__(rank, size, CallbackQueue(), capabilities)
        self._granted_tags = granted_tags
        self._living = living
        self._is_closed = False
        self._listen_to_returns: Callable[[int, int], None] | None = None
        self._links: dict[int, Link] = {}
        self._groups = list(groups)
        self._pairs: dict[int, list[Any]] = {}  # groups of two ranks, by peer
        self._replaced: list[tuple[Link, list[Any]]] = []
        self._incarnations: dict[int, int] = {}  # incarnations of processes that have joined later
        self._announced: dict[int, int] = {}
        self._connected: dict[int, tuple[int, list[Any]]] = {}  # connected processes that have not been accepted yet
        self._lost: frozenset[int] = frozenset()
        self._missed: frozenset[int] = frozenset()
        self._vacant: frozenset[int] = frozenset()  # ranks that have not had a process yet
        self._late_places = range(0) if entry is None else entry.late_places
        self._connector: NewcomerConnector | None = None
        self._switch_interval_s = sys.getswitchinterval()
        if size > 1:
            sys.setswitchinterval(min(self._switch_interval_s, _SWITCH_INTERVAL_S))
        if groups:
            control, bulk = groups
            peers = [peer for peer in range(size) if peer != rank and peer not in self._late_places]
            self._links = {peer: Link(peer, peer, control, bulk, self._matcher, self._on_lost) for peer in peers}
        if entry is not None:
            self._admit_newcomers(entry)

    def _admit_newcomers(self, entry: WorldEntry) -> None:
        self.incarnation, self.job_nonce, self.may_return = entry.incarnation, entry.nonce, True
        self._vacant = self._lost = entry.vacant
        self._connector = NewcomerConnector(
            entry, self._callbacks, self._on_announced, self._on_connected, self._on_missed
        )
        if entry.incarnation:
            self._lost = frozenset(range(self.size)) - {self.rank}
            for peer in self._lost.difference(self._late_places):
                self._announced[peer] = 0
                self._connector.request(peer, 0, welcomes=False)
        self._connector.start()

    def _start_send(self, view: memoryview, dest: int, tag: int) -> Request:
        link = self._links.get(dest)
        if link is None:
            return self._unmet(Send(self._callbacks, view.nbytes), dest)
        return link.send_granted(view, tag) if tag in self._granted_tags else link.send(view, tag)

    def irecv(self, buffer: Buffer, source: int, tag: int) -> Request:
        if tag in self._granted_tags and source != self.rank:
            link = self._links.get(source)
            if link is None:
                return self._unmet(Receive(self._matcher, buffer, source, tag), source)
            return link.receive_granted(buffer, tag)
        return super().irecv(buffer, source, tag)

    def _unmet(self, request: T, rank: int) -> T:
        """Fail a request for a rank to which this rank is not connected yet."""
        why = (
            f"no process of rank {rank} has joined yet"
            if rank in self._vacant
            else f"rank {rank} is not connected yet to rank {self.rank}"
        )
        request.error = RankLostError(why, rank=rank)
        return request

    def lost_ranks(self) -> frozenset[int]:
        return self._lost

    def missed_ranks(self) -> frozenset[int]:
        return self._missed

    def vacant_ranks(self) -> frozenset[int]:
        return self._vacant

    def set_arrival_callback(self, ring: Callable[[], None]) -> None:
        self._callbacks.set_bell(ring)

    def _on_lost(self, rank: int, error: RankLostError) -> None:
        del error
        self._lost |= {rank}
        self._listen(rank)
        if self._announced.get(rank, 0) > self._incarnations.get(rank, 0):
            self._want(rank)

    def describe(self) -> str:
        return f"torch: gloo of torch {torch.__version__}, {plural(self.size, 'rank')}"

    # -- ranks that join later --------------------------------------------------------------------------------------

    def set_return_listener(self, listen: Callable[[int, int], None]) -> None:
        self._listen_to_returns = listen
        for rank, (incarnation, _) in self._connected.items():
            self._notify_return(rank, incarnation)

    def _notify_return(self, rank: int, incarnation: int) -> None:
        if self._listen_to_returns is not None:  # The listener polls, so it must not be called inside a poll.
            asyncio.get_running_loop().call_soon(self._listen_to_returns, rank, incarnation)

    def _on_announced(self, newcomer: tuple[int, int]) -> None:
        rank, incarnation = newcomer
        self._vacant -= {rank}
        if incarnation > max(self._announced.get(rank, 0), self._incarnations.get(rank, 0)):
            was_sought = rank in self._announced
            self._announced[rank] = incarnation
            if rank in self._lost:
                self._want(rank, was_sought=was_sought)

    def _want(self, rank: int, *, was_sought: bool = False) -> None:
        if self._connector is not None:
            welcomes = was_sought or rank in self._links or rank in self._late_places
            self._connector.request(rank, self._announced[rank], welcomes=welcomes)

    def _on_connected(self, connection: tuple[int, int, list[Any]]) -> None:
        rank, incarnation, groups = connection
        if self._connector is None or self._announced.get(rank) != incarnation:
            _close_groups(groups)
            return
        if rank in self._connected:  # The process was lost before it was accepted.
            _close_groups(self._connected[rank][1])
        self._connected[rank] = incarnation, groups
        self._missed -= {rank}
        self._notify_return(rank, incarnation)

    def _on_missed(self, process: tuple[int, int]) -> None:
        rank, incarnation = process
        if rank not in self._links and self._announced.get(rank) == incarnation:
            self._missed |= {rank}

    def accept(self, rank: int, incarnation: int) -> bool:
        if rank not in self._lost or self._connected.get(rank, (None,))[0] != incarnation:
            return False
        _, (control, bulk) = self._connected.pop(rank)
        earlier = self._links.get(rank)
        if earlier is not None:
            earlier.drops_messages = True
            earlier.stop()
            self._replaced.append((earlier, self._pairs.pop(rank, [])))
        for link, _ in self._replaced:
            if link.has_ended:
                link.release()
        self._replaced = [each for each in self._replaced if not each[0].has_ended]
        self._matcher.admit(rank)
        self._pairs[rank] = [control, bulk]
        self._incarnations[rank] = incarnation
        self._lost -= {rank}
        self._links[rank] = Link(rank, int(rank > self.rank), control, bulk, self._matcher, self._on_lost)
        return True

    # -- the end ----------------------------------------------------------------------------------------------------

    def abort(self, exit_code: int) -> None:
        for link in self._live():
            link.abort(exit_code)
        time.sleep(_ABORT_S)

    def close(self) -> None:
        self._close(_JOIN_S)

    def close_failed(self) -> None:
        self._close(_HOPELESS_JOIN_S)

    def _close(self, join_s: float) -> None:
        if not self._is_closed:
            self._is_closed = True
            atexit.unregister(self.close_failed)
            self._close_links(join_s)
            if self._living is not None:
                self._living.end()

    def _close_links(self, join_s: float) -> None:
        """Exchange goodbyes with all peers, close the connections, and wait ``join_s`` seconds for the threads."""
        lost, self._listen = self._lost, lambda _: None
        self._listen_to_returns = None
        if self._connector is not None:
            self._connector.close()
            self._connector = None
        arrived = threading.Event()
        self._callbacks.set_bell(arrived.set)
        for link in self._live():
            link.send_goodbye()
        deadline = time.monotonic() + _GOODBYE_S
        while any(not link.has_sent_goodbye for link in self._live()) and time.monotonic() < deadline:
            arrived.wait(deadline - time.monotonic())
            arrived.clear()
            self._callbacks.empty()
        pairs = [*self._pairs.values(), *(groups for _, groups in self._connected.values())]
        _close_groups(itertools.chain(self._groups, *pairs, *(groups for _, groups in self._replaced)))
        sys.setswitchinterval(self._switch_interval_s)
        closed_at = time.monotonic()
        alive = []
        links = [*self._links.values(), *(link for link, _ in self._replaced)]
        for link in links:
            is_lost = link.error is not None and not link.has_sent_goodbye
            alive += link.join(closed_at + (_HOPELESS_JOIN_S if is_lost else join_s))
            link.drops_messages = True
        if alive:
            logger.warning("threads that wait for gloo did not end: %s", ", ".join(alive))
        self._callbacks.empty()  # fails the remaining requests
        self._lost = lost  # a peer that has closed its connections in the meantime has left
        for link in links:
            if link.has_ended:
                link.release()
        self._links = {}
        self._groups = []
        self._pairs = {}
        self._replaced = []
        self._connected = {}

    def _live(self) -> list[Link]:
        return [link for link in self._links.values() if link.error is None]


def _close_groups(groups: Iterable[Any]) -> None:
    for group in groups:
        gloo_groups.close_connections(group)
