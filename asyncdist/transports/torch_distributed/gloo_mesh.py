"""Makes the links over gloo to all peers and the groups below them, and closes them."""

from __future__ import annotations

import contextlib
import logging
import sys
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any, Final

import torch
from torch import distributed as dist
from torch.distributed import PrefixStore  # type: ignore[attr-defined]

from asyncdist.errors import RankLostError, TransportError
from asyncdist.transports.matching import Matcher
from asyncdist.transports.torch_distributed.failures import reason
from asyncdist.transports.torch_distributed.gloo import Link
from asyncdist.transports.torch_distributed.keepalive import probed_connections

logger = logging.getLogger("asyncdist.transports.torch_distributed.gloo_mesh")

_POISON_TAG: Final = 0x7FFFFFFE
#: How long the training thread may keep the GIL from a thread that has something to hand over. Python's 5 ms add up:
#: a frame takes the GIL twice, a large message four times at each end.
_SWITCH_INTERVAL_S: Final = 0.0002
_GOODBYE_S: Final = 0.5
#: How long the threads may take to end, together. They need milliseconds once their connections are closed, but where
#: 32 ranks share two cores each has a hundred threads, which end one after the other.
JOIN_S: Final = 30.0
#: The same of a peer that is lost, or where the job has failed: a wait for bytes that were on their way may never end.
HOPELESS_JOIN_S: Final = 0.4
_ABORT_S: Final = 0.05


class Mesh:
    """The links to all peers, and the two groups below them.

    Args:
        make_group: makes a gloo group of all ranks, given a name that is the same on all of them.
        rank: this one.
        size: how many there are.
        matcher: takes what comes.

    Raises:
        TransportError: the groups cannot be made.
    """

    def __init__(self, make_group: Callable[[str], Any], rank: int, size: int, matcher: Matcher) -> None:
        self._callbacks = matcher.callbacks
        self._listen: Callable[[int], None] = lambda _: None
        self.lost: frozenset[int] = frozenset()
        self.links: dict[int, Link] = {}
        self._groups: list[Any] = []
        self._switch_interval_s = sys.getswitchinterval()
        if size > 1:
            sys.setswitchinterval(min(self._switch_interval_s, _SWITCH_INTERVAL_S))
            with probed_connections():
                control, bulk = make_group("control"), make_group("bulk")
            self._groups = [control, bulk]
            peers = (peer for peer in range(size) if peer != rank)
            self.links = {peer: Link(peer, control, bulk, matcher, self._on_lost) for peer in peers}

    def set_loss_listener(self, listen: Callable[[int], None]) -> None:
        """Have ``listen(rank)`` called on the loop for each lost peer; at once for those that are lost already."""
        self._listen = listen
        for rank in sorted(self.lost):
            listen(rank)

    def _on_lost(self, rank: int, error: RankLostError) -> None:
        del error
        self.lost |= {rank}
        self._listen(rank)

    def abort(self, exit_code: int) -> None:
        """End the processes of all peers."""
        for link in self._live():
            link.abort(exit_code)
        time.sleep(_ABORT_S)

    def close(self, join_s: float = JOIN_S) -> None:
        """Say goodbye, wait for the peers to do so, and close the connections.

        Args:
            join_s: how long to wait for the threads. Those that do not end are warned of: what they were for is over.
        """
        self._listen = lambda _: None
        arrived = threading.Event()
        self._callbacks.set_bell(arrived.set)
        for link in self._live():
            link.say_goodbye()
        deadline = time.monotonic() + _GOODBYE_S
        while any(not link.said_goodbye for link in self._live()) and time.monotonic() < deadline:
            arrived.wait(deadline - time.monotonic())
            arrived.clear()
            self._callbacks.empty()
        for group in self._groups:
            _close_connections(group)
        sys.setswitchinterval(self._switch_interval_s)
        closed_at = time.monotonic()
        alive = []
        for link in self.links.values():
            is_lost = link.error is not None and not link.said_goodbye
            alive += link.join(closed_at + (HOPELESS_JOIN_S if is_lost else join_s))
        if alive:
            logger.warning("threads that wait for gloo did not end: %s", ", ".join(alive))
        self.links = {}
        self._groups = []

    def _live(self) -> list[Link]:
        return [link for link in self.links.values() if link.error is None]


def _close_connections(group: Any) -> None:
    """Close every connection of the group, as a wait that times out does (pytorch wraps gloo's own behaviour)."""
    with contextlib.suppress(RuntimeError):
        group.recv_anysource([torch.zeros(1, dtype=torch.uint8, device="cpu")], _POISON_TAG).wait(
            timedelta(milliseconds=1)
        )


def make_group(store: Any, name: str, rank: int, size: int, timeout: timedelta) -> Any:
    """Make a private gloo group.

    Raises:
        TransportError: this torch has no gloo, or the ranks do not reach each other.
    """
    if not (dist.is_available() and dist.is_gloo_available()):
        raise TransportError(f"torch {torch.__version__} was built without gloo, which the torch transport needs")
    try:
        return dist.ProcessGroupGloo(PrefixStore(name, store), rank, size, timeout)
    except RuntimeError as error:
        raise TransportError(
            f"gloo found no way between the {size} ranks ({reason(error)}); it uses the interface of this host's name, "
            "or the one in GLOO_SOCKET_IFNAME"
        ) from error
