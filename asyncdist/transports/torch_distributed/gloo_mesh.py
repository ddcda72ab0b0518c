"""Makes and closes the gloo connections of a rank to all its peers."""

from __future__ import annotations

import asyncio
import itertools
import logging
import sys
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Final, TypeVar

from asyncdist.errors import RankLostError
from asyncdist.transports.matching import Matcher, Receive, Send
from asyncdist.transports.torch_distributed import gloo_groups
from asyncdist.transports.torch_distributed.gloo_link import Link
from asyncdist.transports.torch_distributed.meeting.newcomers import NewcomerConnector

T = TypeVar("T", Send, Receive)

logger = logging.getLogger("asyncdist.transports.torch_distributed.gloo_mesh")

#: Maximum seconds that the training thread keeps the GIL while a thread of the transport waits for it. Python's default
#: is 5 ms. These waits add up, because each end acquires the GIL twice for a frame and four times for a large message.
_SWITCH_INTERVAL_S: Final = 0.0002
_GOODBYE_S: Final = 0.5
#: Maximum seconds for all threads together to end. They take milliseconds once their connections are closed, but longer
#: if many ranks share a core: 32 ranks have thousands of threads.
JOIN_S: Final = 30.0
#: Maximum seconds for the threads to end after the loss of a peer or a failure. A wait for data in transit may then
#: never end.
HOPELESS_JOIN_S: Final = 0.4
_ABORT_S: Final = 0.05


class Mesh:
    """Owns the links to all peers and their gloo groups, and connects ranks that join later.

    Args:
        groups: Groups for frames and for large messages of all ranks that began the world. Empty if this rank has no
            peers or joined later.
        connector: Object that connects to ranks that join later or are restarted, or None if such ranks are not
            allowed.

    Attributes:
        vacant: Ranks that have not had a process yet.
    """

    def __init__(
        self,
        groups: Sequence[Any],
        rank: int,
        size: int,
        matcher: Matcher,
        connector: NewcomerConnector | None = None,
    ) -> None:
        self._rank = rank
        self._matcher = matcher
        self._callbacks = matcher.callbacks
        self._connector = connector
        self._listen: Callable[[int], None] = lambda _: None
        self._listen_to_returns: Callable[[int, int], None] | None = None
        self.lost: frozenset[int] = frozenset()
        self.links: dict[int, Link] = {}
        self._groups = list(groups)
        self._pairs: dict[int, list[Any]] = {}  # groups of two ranks, by peer
        self._replaced: list[tuple[Link, list[Any]]] = []
        self._incarnations: dict[int, int] = {}  # incarnations of processes that joined later
        self._announced: dict[int, int] = {}
        self._connected: dict[int, tuple[int, list[Any]]] = {}  # connected processes that have not been accepted yet
        self.missed: frozenset[int] = frozenset()
        self.vacant: frozenset[int] = frozenset()
        self._switch_interval_s = sys.getswitchinterval()
        if size > 1:
            sys.setswitchinterval(min(self._switch_interval_s, _SWITCH_INTERVAL_S))
        late_places = () if connector is None else connector.late_places
        if groups:
            control, bulk = groups
            peers = [peer for peer in range(size) if peer != rank and peer not in late_places]
            self.links = {peer: Link(peer, peer, control, bulk, matcher, self._on_lost) for peer in peers}
        if connector is not None:
            self.vacant = self.lost = connector.vacant
            if connector.incarnation:
                self.lost = frozenset(range(size)) - {rank}
                for peer in self.lost.difference(late_places):
                    self._announced[peer] = 0
                    connector.request(peer, 0, welcomes=False)
            connector.start(self._on_announced, self._on_connected, self._on_missed)

    def set_loss_listener(self, listen: Callable[[int], None]) -> None:
        """Call ``listen(rank)`` on the loop for each lost peer, immediately for peers that are already lost."""
        self._listen = listen
        for rank in sorted(self.lost):
            listen(rank)

    def _on_lost(self, rank: int, error: RankLostError) -> None:
        del error
        self.lost |= {rank}
        self._listen(rank)
        if self._announced.get(rank, 0) > self._incarnations.get(rank, 0):
            self._want(rank)

    # -- ranks that join later --------------------------------------------------------------------------------------

    def set_return_listener(self, listen: Callable[[int, int], None]) -> None:
        """Call ``listen(rank, incarnation)`` on the loop when this rank has been connected to a new process."""
        self._listen_to_returns = listen
        for rank, (incarnation, _) in self._connected.items():
            self._notify_return(rank, incarnation)

    def _notify_return(self, rank: int, incarnation: int) -> None:
        if self._listen_to_returns is not None:  # The listener polls, so it must not be called inside a poll.
            asyncio.get_running_loop().call_soon(self._listen_to_returns, rank, incarnation)

    def _on_announced(self, newcomer: tuple[int, int]) -> None:
        rank, incarnation = newcomer
        self.vacant -= {rank}
        if incarnation > max(self._announced.get(rank, 0), self._incarnations.get(rank, 0)):
            was_sought = rank in self._announced
            self._announced[rank] = incarnation
            if rank in self.lost:
                self._want(rank, was_sought=was_sought)

    def _want(self, rank: int, *, was_sought: bool = False) -> None:
        if self._connector is not None:
            welcomes = was_sought or rank in self.links or rank in self._connector.late_places
            self._connector.request(rank, self._announced[rank], welcomes=welcomes)

    def _on_connected(self, connection: tuple[int, int, list[Any]]) -> None:
        rank, incarnation, groups = connection
        if self._connector is None or self._announced.get(rank) != incarnation:
            _close(groups)
            return
        if rank in self._connected:  # That process was lost before it was accepted.
            _close(self._connected[rank][1])
        self._connected[rank] = incarnation, groups
        self.missed -= {rank}
        self._notify_return(rank, incarnation)

    def _on_missed(self, process: tuple[int, int]) -> None:
        rank, incarnation = process
        if rank not in self.links and self._announced.get(rank) == incarnation:
            self.missed |= {rank}

    def accept(self, rank: int, incarnation: int) -> bool:
        """Replace the lost process of ``rank`` by its newly connected process. Return False if none is connected."""
        if rank not in self.lost or self._connected.get(rank, (None,))[0] != incarnation:
            return False
        _, (control, bulk) = self._connected.pop(rank)
        earlier = self.links.get(rank)
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
        self.lost -= {rank}
        self.links[rank] = Link(rank, int(rank > self._rank), control, bulk, self._matcher, self._on_lost)
        return True

    def unmet(self, request: T, rank: int) -> T:
        """Fail a request for a rank to which this rank is not connected yet."""
        why = (
            f"no process of rank {rank} has joined yet"
            if rank in self.vacant
            else f"rank {rank} is not connected yet to rank {self._rank}"
        )
        request.error = RankLostError(why, rank=rank)
        return request

    def abort(self, exit_code: int) -> None:
        """End the processes of all peers."""
        for link in self._live():
            link.abort(exit_code)
        time.sleep(_ABORT_S)

    def close(self, join_s: float = JOIN_S) -> None:
        """Exchange goodbyes with all peers, close the connections, and wait ``join_s`` seconds for the threads."""
        lost, self._listen = self.lost, lambda _: None
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
        _close(itertools.chain(self._groups, *pairs, *(groups for _, groups in self._replaced)))
        sys.setswitchinterval(self._switch_interval_s)
        closed_at = time.monotonic()
        alive = []
        links = [*self.links.values(), *(link for link, _ in self._replaced)]
        for link in links:
            is_lost = link.error is not None and not link.has_sent_goodbye
            alive += link.join(closed_at + (HOPELESS_JOIN_S if is_lost else join_s))
            link.drops_messages = True
        if alive:
            logger.warning("threads that wait for gloo did not end: %s", ", ".join(alive))
        self._callbacks.empty()  # fails the remaining requests
        self.lost = lost  # a peer that has closed its connections meanwhile has left
        for link in links:
            if link.has_ended:
                link.release()
        self.links = {}
        self._groups = []
        self._pairs = {}
        self._replaced = []
        self._connected = {}

    def _live(self) -> list[Link]:
        return [link for link in self.links.values() if link.error is None]


def _close(groups: Iterable[Any]) -> None:
    for group in groups:
        gloo_groups.close_connections(group)
