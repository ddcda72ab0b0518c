"""Tracks the deaths and restarts of simulated ranks, and the connections between their processes.

A restarted rank is a new process with the same rank number and an *incarnation* that is higher by one. As with TCP, a
message never reaches a later process of its receiver. A rank detects a new process in one of its own turns, after it
has detected the death of the previous process. Until the rank accepts the connection, messages from the new process are
held. If one process ends before it has accepted a connection, the other process detects a loss.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

from asyncdist.simulation.distributions import draw
from asyncdist.simulation.links import Network
from asyncdist.simulation.scheduler import Scheduler
from asyncdist.simulation.trace import Trace


class Liveness:
    """Tracks which simulated ranks are dead, and which ranks have detected each death.

    Attributes:
        dead: Ranks without a process, because they were killed or have not joined yet.
        died_at: Virtual time of each dead rank's death, in seconds.
        closed: Ranks whose process ended normally.
        known_lost: For each rank, the set of ranks that it regards as lost.
    """

    def __init__(
        self,
        size: int,
        network: Network,
        scheduler: Scheduler,
        rng: random.Random,
        trace: Trace,
        on_lost: Callable[[int, int], object],
    ) -> None:
        self._size = size
        self._network = network
        self._scheduler = scheduler
        self._rng = rng
        self._trace = trace
        self._on_lost = on_lost
        self.dead: set[int] = set()
        self.died_at: dict[int, float] = {}
        self.known_lost: list[set[int]] = [set() for _ in range(size)]
        self._incarnations = [0] * size
        # Incarnation of ``other`` to which ``observer`` is connected, keyed by (observer, other). The default is 0.
        self._accepted: dict[tuple[int, int], int] = {}
        self._held: dict[tuple[int, int], list[Any]] = {}
        self._introduced: list[dict[int, int]] = [
            {} for _ in range(size)
        ]  # new processes that each rank has detected but not accepted yet
        self.closed: set[int] = set()
        self._loss_listeners: list[Callable[[int], object] | None] = [None] * size
        self._return_listeners: list[Callable[[int, int], object] | None] = [None] * size

    def set_loss_listener(self, rank: int, listen: Callable[[int], object]) -> None:
        """Call ``listen(lost)`` for each rank whose loss ``rank`` detects, including earlier losses."""
        self._loss_listeners[rank] = listen
        for lost in sorted(self.known_lost[rank]):
            listen(lost)

    def set_return_listener(self, rank: int, listen: Callable[[int, int], object]) -> None:
        """Call ``listen(other, incarnation)`` for each new process that ``rank`` detects or has detected."""
        self._return_listeners[rank] = listen
        for other, incarnation in self._introduced[rank].items():
            listen(other, incarnation)

    def close(self, rank: int) -> None:
        """Record that the process of ``rank`` has ended. Report its loss to ranks that it has not accepted yet."""
        self.closed.add(rank)
        self._loss_listeners[rank] = self._return_listeners[rank] = None
        incarnation = self._incarnations[rank]
        for other in range(self._size if incarnation else 0):
            if other in self.known_lost[rank] and self._accepted.get((other, rank), 0) == incarnation:
                self._find_out(self._detect, other, rank, incarnation)

    def kill(self, rank: int) -> list[Any]:
        """Kill the process of ``rank``, and return the messages held for it. Each peer detects the loss later."""
        self.dead.add(rank)
        self.died_at[rank] = self._scheduler.now
        held = self._drop_held(rank)
        for observer in range(self._size):
            if observer != rank and observer not in self.dead:
                self._find_out(self._detect, observer, rank, self.connection(observer, rank)[1])
        return held

    def empty(self, rank: int) -> None:
        """Mark ``rank`` as lost from the beginning, because its first process joins later."""
        self.dead.add(rank)
        self.died_at[rank] = 0.0
        for observer in range(self._size):
            if observer != rank:
                self.known_lost[observer].add(rank)

    def _drop_held(self, rank: int) -> list[Any]:
        pairs = [pair for pair in self._held if rank in pair]
        return [message for pair in pairs for message in self._held.pop(pair)]

    def _find_out(self, what: Callable[[int, int, int], object], observer: int, other: int, incarnation: int) -> None:
        seconds = draw(self._network.loss_detection_s, self._rng)
        self._scheduler.at(self._scheduler.now + seconds, what, (observer, other, incarnation))

    def _detect(self, observer: int, lost: int, incarnation: int) -> None:
        if observer in self.dead or lost in self.known_lost[observer]:
            return
        if self.connection(observer, lost)[1] != incarnation:
            return  # the rank was restarted, and the observer has been notified of its loss and return
        self.known_lost[observer].add(lost)
        self._trace.add(self._scheduler.now, "lost", lost, observer, 0, 0)
        listen = self._loss_listeners[observer]
        if listen is not None:
            listen(lost)
        self._on_lost(observer, lost)

    def incarnation_of(self, rank: int) -> int:
        """Return how often ``rank`` has been restarted."""
        return self._incarnations[rank]

    def missed(self, rank: int) -> frozenset[int]:
        """Return the ranks whose processes ended before this restarted rank was connected to them."""
        return frozenset(self.known_lost[rank] & self.closed) if self._incarnations[rank] else frozenset()

    def connection(self, source: int, dest: int) -> tuple[int, int]:
        """Return the incarnation of ``source``, and the incarnation of ``dest`` to which ``source`` is connected."""
        mine = self._incarnations[source]
        return mine, mine if source == dest else self._accepted.get((source, dest), 0)

    def is_stale(self, message: Any) -> bool:
        """Return whether the sender or the receiver has been restarted since the message was sent."""
        return self._incarnations[message.source] != message.source_incarnation or self.is_for_earlier(message)

    def is_for_earlier(self, message: Any) -> bool:
        """Return whether the receiver has been restarted since the message was sent."""
        return bool(self._incarnations[message.dest] != message.dest_incarnation)

    def restart(self, rank: int) -> None:
        """Start a new process for the dead ``rank``, without any connection."""
        self._incarnations[rank] += 1
        self.dead.discard(rank)
        self.died_at.pop(rank)
        self.closed.discard(rank)
        self._loss_listeners[rank] = self._return_listeners[rank] = None
        self._introduced[rank] = {}
        self._drop_held(rank)
        self.known_lost[rank] = {other for other in range(self._size) if other != rank}
        for other in range(self._size):
            if other != rank and other not in self.dead:
                self._find_out(self._notify_restart, other, rank, self._incarnations[rank])

    def _notify_restart(self, observer: int, other: int, incarnation: int) -> None:
        """Notify ``observer`` that ``other``'s previous process is lost, and that it has a new process."""
        known = self.connection(observer, other)[1]
        if known == incarnation and other not in self.known_lost[observer]:
            return  # the observer is already connected to the new process
        if self._do_both_exist(observer, other, incarnation):
            self._detect(observer, other, known)
            self._introduce(observer, other, incarnation)

    def _introduce(self, observer: int, other: int, incarnation: int) -> None:
        self._introduced[observer][other] = incarnation
        listen = self._return_listeners[observer]
        if listen is not None:
            listen(other, incarnation)

    def _do_both_exist(self, observer: int, other: int, incarnation: int) -> bool:
        """Return whether both processes exist. An ended process still counts while messages from it are held."""
        has_ended = observer in self.closed or (other in self.closed and (other, observer) not in self._held)
        return not (has_ended or {observer, other} & self.dead or self._incarnations[other] != incarnation)

    def accept(self, observer: int, other: int, incarnation: int) -> bool:
        """Connect ``observer`` to a process of ``other``. Return False if that process has ended or is connected."""
        self._introduced[observer].pop(other, None)
        if other not in self.known_lost[observer] or not self._do_both_exist(observer, other, incarnation):
            return False
        self.known_lost[observer].discard(other)
        self._accepted[observer, other] = incarnation
        self._trace.add(self._scheduler.now, "met", other, observer, incarnation, 0)
        if observer in self.known_lost[other]:
            self._introduce(other, observer, self._incarnations[observer])
        return True

    def hold(self, message: Any) -> None:
        """Hold a message until its receiver has accepted the connection."""
        self._held.setdefault((message.source, message.dest), []).append(message)

    def take_held(self, source: int, dest: int) -> list[Any]:
        """Remove and return the messages that ``source`` sent to ``dest`` before ``dest`` accepted the connection."""
        return self._held.pop((source, dest), [])
