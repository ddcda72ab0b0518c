"""Tracks which process of a rank each other rank is connected to: losses, and ranks that are started again.

A rank that is started again is a new process with the same number: its *incarnation* grows by one. As with connections
of TCP, a message belongs to the two processes between which it was sent. One that was sent to an earlier process, or by
one, never reaches a later one. A rank learns of a new process in a turn of its own, after it has learned of the loss of
the one before; until then what the new one sends is held. The new process learns of a rank when that one has learned of
it. A connection of which one end closes before it has made its half is lost for the other. A rank that joins later was
dead before the beginning, to the knowledge of all.
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
    """Knows which ranks are dead, and which rank has found out what.

    Args:
        size: the number of ranks.
        network: how long it takes to find out.
        scheduler, rng, trace: of the simulation.
        on_lost: called with a rank and the one that it has found lost, before its listener is.

    Attributes:
        dead: ranks without a process.
        died_at: when these died.
        closed: ranks whose process has ended.
        known_lost: for each rank, those that it believes lost.
        stale_count: messages that were dropped since a later process has the place of the one that they were for.
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
        self.stale_count = 0
        self._incarnations = [0] * size
        self._met: dict[tuple[int, int], int] = {}  # by observer and other; 0 where not listed
        self._held: dict[tuple[int, int], list[Any]] = {}
        self._introduced: list[dict[int, int]] = [{} for _ in range(size)]  # of whom a rank is not connected to yet
        self.closed: set[int] = set()
        self._loss_listeners: list[Callable[[int], object] | None] = [None] * size
        self._return_listeners: list[Callable[[int, int], object] | None] = [None] * size

    # -- listeners --------------------------------------------------------------------------------------------------

    def set_loss_listener(self, rank: int, listen: Callable[[int], object]) -> None:
        """Call ``listen(lost)`` for each rank that ``rank`` finds lost, those of before included."""
        self._loss_listeners[rank] = listen
        for lost in sorted(self.known_lost[rank]):
            listen(lost)

    def set_return_listener(self, rank: int, listen: Callable[[int, int], object]) -> None:
        """Call ``listen(other, incarnation)`` for new processes, those of before included; it accepts them."""
        self._return_listeners[rank] = listen
        for other, incarnation in self._introduced[rank].items():
            listen(other, incarnation)

    def close(self, rank: int) -> None:
        """Note that the process of ``rank`` has ended; who waits for it to make its half of a connection finds out."""
        self.closed.add(rank)
        self._loss_listeners[rank] = self._return_listeners[rank] = None
        incarnation = self._incarnations[rank]
        for other in range(self._size if incarnation else 0):
            if other in self.known_lost[rank] and self._met.get((other, rank), 0) == incarnation:
                self._find_out(self._detect, other, rank, incarnation)

    # -- losses -----------------------------------------------------------------------------------------------------

    def kill(self, rank: int) -> list[Any]:
        """Let the process of ``rank`` be gone; its peers find out one by one. Return the messages held for it."""
        self.dead.add(rank)
        self.died_at[rank] = self._scheduler.now
        held = self._drop_held(rank)
        for observer in range(self._size):
            if observer != rank and observer not in self.dead:
                self._find_out(self._detect, observer, rank, self.connection(observer, rank)[1])
        return held

    def empty(self, rank: int) -> None:
        """Let the place of ``rank`` have no process from the beginning, which all know."""
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
            return  # it has been started again, and this rank has heard of both
        self.known_lost[observer].add(lost)
        self._trace.add(self._scheduler.now, "lost", lost, observer, 0, 0)
        listen = self._loss_listeners[observer]
        if listen is not None:
            listen(lost)
        self._on_lost(observer, lost)

    # -- ranks that are started again -------------------------------------------------------------------------------

    def incarnation_of(self, rank: int) -> int:
        """Return how often ``rank`` has been started again."""
        return self._incarnations[rank]

    def missed(self, rank: int) -> frozenset[int]:
        """Return the ranks whose processes have ended before this one, started again, was connected to them."""
        return frozenset(self.known_lost[rank] & self.closed) if self._incarnations[rank] else frozenset()

    def connection(self, source: int, dest: int) -> tuple[int, int]:
        """Return the incarnation of ``source``, and that of ``dest`` to which it is connected."""
        mine = self._incarnations[source]
        return mine, mine if source == dest else self._met.get((source, dest), 0)

    def is_stale(self, message: Any) -> bool:
        """Return whether one end of the message's connection has been started again since it was sent."""
        return self._incarnations[message.source] != message.source_incarnation or self.is_for_earlier(message)

    def is_for_earlier(self, message: Any) -> bool:
        """Return whether the process that it was sent to has been started again since."""
        return bool(self._incarnations[message.dest] != message.dest_incarnation)

    def restart(self, rank: int) -> None:
        """Let a new process have the place of ``rank``, which is dead. It knows nobody."""
        self._incarnations[rank] += 1
        self.dead.discard(rank)
        self.died_at.pop(rank)
        self.closed.discard(rank)
        self._loss_listeners[rank] = self._return_listeners[rank] = None
        self._introduced[rank] = {}
        self.stale_count += len(self._drop_held(rank))
        self.known_lost[rank] = {other for other in range(self._size) if other != rank}
        for other in range(self._size):
            if other != rank and other not in self.dead:
                self._find_out(self._meet, other, rank, self._incarnations[rank])

    def _meet(self, observer: int, other: int, incarnation: int) -> None:
        """Let ``observer`` find out that the process of ``other`` is a new one; its loss is found out before."""
        known = self.connection(observer, other)[1]
        if known == incarnation and other not in self.known_lost[observer]:
            return  # that process has introduced itself
        if self._is_there(observer, other, incarnation):
            self._detect(observer, other, known)
            self._introduce(observer, other, incarnation)

    def _introduce(self, observer: int, other: int, incarnation: int) -> None:
        """Tell ``observer`` that there is a new process of ``other``."""
        self._introduced[observer][other] = incarnation
        listen = self._return_listeners[observer]
        if listen is not None:
            listen(other, incarnation)

    def _is_there(self, observer: int, other: int, incarnation: int) -> bool:
        """Return whether both processes are there. One that has ended may have sent something before."""
        has_ended = observer in self.closed or (other in self.closed and (other, observer) not in self._held)
        return not (has_ended or {observer, other} & self.dead or self._incarnations[other] != incarnation)

    def accept(self, observer: int, other: int, incarnation: int) -> bool:
        """Make a connection; return whether ``other`` is there, and was not yet known."""
        self._introduced[observer].pop(other, None)
        if other not in self.known_lost[observer] or not self._is_there(observer, other, incarnation):
            return False
        self.known_lost[observer].discard(other)
        self._met[observer, other] = incarnation
        self._trace.add(self._scheduler.now, "met", other, observer, incarnation, 0)
        if observer in self.known_lost[other]:
            self._introduce(other, observer, self._incarnations[observer])
        return True

    def hold(self, message: Any) -> None:
        """Keep a message until its receiver has made the connection."""
        self._held.setdefault((message.source, message.dest), []).append(message)

    def take_held(self, source: int, dest: int) -> list[Any]:
        """Return the messages that ``source`` has sent to ``dest`` before that one was connected."""
        return self._held.pop((source, dest), [])
