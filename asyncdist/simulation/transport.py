"""Connects one rank to the simulated network: the transport of a simulated rank."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, Final

from asyncdist.simulation.fabric import Fabric, LateReceive, Receive
from asyncdist.tags import TAG_MAX
from asyncdist.transports.base import (
    ANY_SOURCE,
    Buffer,
    Capabilities,
    PersistentReceive,
    Request,
    Transport,
)

_CAPABILITIES: Final = Capabilities(
    native_collectives=False,
    survives_rank_loss=True,
    wakes=True,
    misses_wakes=False,
    tag_max=TAG_MAX,
    shares_process=True,
)


class SimTransport(Transport):
    """Sends and receives one rank's messages over the simulated network, which all ranks share."""

    name = "sim"

    def __init__(self, fabric: Fabric, rank: int, call_soon: Callable[..., object]) -> None:
        self._fabric = fabric
        self._call_soon = call_soon
        self.rank = rank
        self.collective_checker = fabric.collective_checker
        self.job_nonce = fabric.job_nonce
        self.size = fabric.size
        self.incarnation = fabric.liveness.incarnation_of(rank)
        self.may_return = fabric.has_restarts
        self.capabilities = _CAPABILITIES

    @property
    def hostname(self) -> str:
        return f"host{self._fabric.network.host_of(self.rank)}"

    @property
    def local_rank(self) -> int:
        return self._fabric.network.local_rank_of(self.rank)

    def isend(self, buffer: Buffer, dest: int, tag: int) -> Request:
        return self._fabric.send(buffer, self.rank, dest, tag)

    def start_send(self, buffer: Buffer, dest: int, tag: int) -> Request | None:
        message = self._fabric.send(buffer, self.rank, dest, tag)
        return None if message.done or message.test() else message

    def irecv(self, buffer: Buffer, source: int, tag: int) -> Request:
        receive = Receive(self._fabric, buffer, self.rank, source, tag)
        self._fabric.post(receive)
        return receive

    def persistent_receive(self, buffer: Buffer, tag: int) -> PersistentReceive:
        return LateReceive(self._fabric, buffer, self.rank, ANY_SOURCE, tag)

    def shared(self, make: Any, *args: Any, **kwargs: Any) -> Any:
        return self._fabric.shared(make, *args, **kwargs)

    def lost_ranks(self) -> frozenset[int]:
        return self._fabric.lost_ranks(self.rank)

    def missed_ranks(self) -> frozenset[int]:
        return self._fabric.missed_ranks(self.rank)

    def abort(self, exit_code: int) -> None:
        """Do nothing, because the simulation ends when every rank has ended."""

    def close(self) -> None:
        self._fabric.close(self.rank)

    def close_failed(self) -> None:
        if self.incarnation:  # the other ranks may continue without a restarted rank
            self._fabric.kill(self.rank)

    def set_arrival_callback(self, ring: Callable[[], None]) -> None:
        self._fabric.set_arrival_callback(self.rank, ring)

    def set_loss_listener(self, listen: Callable[[int], None]) -> None:
        # The rank's own loop calls the listener, because a busy rank cannot detect a loss.
        self._fabric.liveness.set_loss_listener(self.rank, partial(self._call_soon, listen))

    def set_return_listener(self, listen: Callable[[int, int], None]) -> None:
        self._fabric.liveness.set_return_listener(self.rank, partial(self._call_soon, listen))

    def accept(self, rank: int, incarnation: int) -> bool:
        return self._fabric.accept(self.rank, rank, incarnation)

    def describe(self) -> str:
        return f"sim: {self.size} ranks in virtual time"
