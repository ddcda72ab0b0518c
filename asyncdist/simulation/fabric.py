"""Simulates the network: follows the transport contract, but uses all the freedom that the contract allows.

The network may delay messages, reorder messages that differ in source or tag, and complete requests late. It may choose
which sender a wildcard receive matches, and send a message eagerly or by rendezvous. It never lets a message overtake
an earlier message with the same source and tag, and never loses or duplicates a message between live ranks. All choices
are derived from the seed.
"""

from __future__ import annotations

import functools
import math
import random
from collections import deque
from collections.abc import Callable, Sequence
from typing import Final

from asyncdist.collectives.call_checker import CollectiveChecker
from asyncdist.errors import AsyncdistError, RankLostError, TruncationError
from asyncdist.simulation.arrivals import ArrivalQueue, Message
from asyncdist.simulation.faults import Fault, Join, Restart
from asyncdist.simulation.links import Interfaces, Link, Network
from asyncdist.simulation.message_faults import MessageFaults
from asyncdist.simulation.processes.losses import Liveness
from asyncdist.simulation.rank_turns import Turns
from asyncdist.simulation.scheduler import Scheduler
from asyncdist.simulation.trace import Trace
from asyncdist.transports.base import ANY_SOURCE, Buffer, as_bytes

#: Eager limits to choose from, in bytes. 0 is excluded, because programs rely on small messages being sent eagerly.
_EAGER_CHOICES: Final = (256, 4096, 65536)
#: Maximum number of objects that the ranks share.
_SHARED_COUNT_MAX: Final = 1024


class Receive:
    """Represents a receive request. :meth:`start` posts it, and may be called again after completion."""

    __slots__ = (
        "_fabric",
        "buffer",
        "cancelled",
        "dest",
        "done",
        "error",
        "matched",
        "nbytes",
        "source",
        "tag",
        "wanted",
    )

    def __init__(self, fabric: Fabric, buffer: Buffer, dest: int, wanted: int, tag: int) -> None:
        self._fabric = fabric
        self.buffer = as_bytes(buffer)
        self.dest = dest
        self.wanted = wanted
        self.tag = tag
        self.source = ANY_SOURCE
        self.nbytes = 0
        self.done = False
        self.matched = False
        self.cancelled = False
        self.error: AsyncdistError | None = None

    def test(self) -> bool:
        if self.error is not None:
            error, self.error = self.error, None
            raise error
        return self.done

    def take(self) -> tuple[int, int] | None:
        if self.done:
            return self.source, self.nbytes
        if self.error is not None:
            self.test()  # raises the error
        return None

    def start(self) -> None:
        self.done = self.matched = self.cancelled = False
        self._fabric.post(self)

    def cancel(self) -> None:
        if not self.matched and not self.done:
            self._fabric.withdraw(self)

    def fill(self, data: bytes | bytearray | memoryview) -> None:
        """Copy the data of a message, which has arrived, into the buffer."""
        self.buffer[: self.nbytes] = data


class LateReceive(Receive):
    """Represents a receive that writes its buffer only when tested. All ranks may therefore share the buffer."""

    __slots__ = ("_data",)

    def test(self) -> bool:
        return Receive.test(self) and self._write()

    def take(self) -> tuple[int, int] | None:
        return (self.source, self.nbytes) if self.test() else None

    def fill(self, data: bytes | bytearray | memoryview) -> None:
        self._data = bytes(data)  # no copy if data is bytes

    def _write(self) -> bool:
        if not self.cancelled:
            self.buffer[: self.nbytes] = self._data
        return True


class _Path:
    """Stores the state of the link between two ranks. If ``is_shared``, other links use the same network interfaces."""

    __slots__ = ("bandwidth", "draw_latency_s", "free_at", "is_shared", "last_arrival", "last_entry")

    def __init__(self, link: Link, rng: random.Random, *, is_shared: bool) -> None:
        self.is_shared = is_shared
        self.draw_latency_s = link.latency_sampler(rng)
        self.bandwidth = link.bandwidth_nbytes_per_s
        self.free_at = 0.0
        self.last_arrival: dict[int, float] = {}  # time of the last arrival, keyed by tag
        self.last_entry: dict[int, float] = {}  # time at which the last message entered the host, keyed by tag


class Fabric:
    """Simulates the network: carries the messages of all ranks, and applies faults to messages and links.

    When a fault fires, ``on_fired`` is called with the fault's index in the plan. When a fault kills a rank,
    ``on_kill`` is called with the rank and the fault's index.
    """

    def __init__(
        self,
        size: int,
        network: Network,
        faults: Sequence[Fault],
        scheduler: Scheduler,
        rng: random.Random,
        trace: Trace,
        on_fired: Callable[[int], None],
        on_kill: Callable[[int, int], None],
    ) -> None:
        self.size = size
        self.network = network
        self._scheduler = scheduler
        self._rng = rng
        self._trace = trace
        self._faults = MessageFaults(size, faults, on_fired, on_kill)
        self._eager_nbytes = rng.choice(_EAGER_CHOICES) if network.eager_nbytes is None else network.eager_nbytes
        self._is_pushed = (
            rng.random() < 0.5
        )  # whether a large message waits for an idle sender, instead of being fetched by the receiver
        self._paths: list[dict[int, _Path]] = [{} for _ in range(size)]
        self._posted: list[dict[int, deque[Receive]]] = [{} for _ in range(size)]
        self._unexpected: list[dict[int, ArrivalQueue]] = [{} for _ in range(size)]
        self._doorbells: list[Callable[[], None] | None] = [None] * size
        self.liveness = Liveness(size, network, scheduler, rng, trace, self.fail_sends)
        self._known_lost = self.liveness.known_lost
        self._dead = self.liveness.dead
        self._died_at = self.liveness.died_at
        self.job_nonce = rng.getrandbits(32)
        self.collective_checker = CollectiveChecker()
        self.shared = functools.lru_cache(_SHARED_COUNT_MAX)(lambda make, *args, **kwargs: make(*args, **kwargs))
        self.message_count = 0
        self.byte_count = 0
        self._muted = False
        self._all_ranks = frozenset(range(size))
        self._has_message_faults = self._faults.has_message_faults
        self._has_link_faults = self._faults.has_link_faults
        self.has_restarts = any(isinstance(fault, (Restart, Join)) for fault in faults)
        self._turns: list[Turns] = []
        self._has_interfaces = network.host_bandwidth_nbytes_per_s is not None
        self._interfaces = Interfaces(network, size)
        self._take_in = self._arrive  # methods are bound once, because binding them for each message would be slower
        self._take_whole = self._arrive_whole
        self._begin = self._rendezvous
        self._travel = self._transfer
        self._finish = self._complete

    def connect(self, turns: Sequence[Turns]) -> None:
        """Store the :class:`Turns` of all ranks, which delay the handling of a message until its rank is idle."""
        self._turns = list(turns)

    def send(self, buffer: Buffer, source: int, dest: int, tag: int) -> Message:
        data = buffer if type(buffer) is bytes or type(buffer) is bytearray else as_bytes(buffer)
        nbytes = len(data)
        message = Message(data, nbytes, source, dest, tag)
        if not self._muted:
            self.message_count += 1
            self.byte_count += nbytes
        if dest in self._known_lost[source]:
            message.error = RankLostError(f"rank {dest} is gone", rank=dest)
            return message
        if self.has_restarts:
            message.source_incarnation, message.dest_incarnation = self.liveness.connection(source, dest)
        if nbytes <= self._eager_nbytes:
            message.data = bytes(data)  # no copy if data is bytes
            message.eager = message.done = True
        if self._muted:
            return message
        delay = 0.0
        if self._has_message_faults and source not in self._dead:
            message.data, delay = self._faults.apply(source, dest, tag, message.data)
        if source in self._dead:
            message.done = False  # The sender was killed during this send, so its tasks may not resume.
            return message
        arrival = self._arrival(message, delay)
        scheduler = self._scheduler
        self._trace.add(scheduler.time(), "send", source, dest, tag, nbytes)
        self._trace.add_content(message.data)
        if self._has_interfaces and self._path(source, dest).is_shared:
            scheduler.at(arrival, self._enter, (message,))
        else:
            scheduler.at(arrival, self._take_in, (message,))
        return message

    def _path(self, source: int, dest: int) -> _Path:
        path = self._paths[source].get(dest)
        if path is None:
            network = self.network
            is_shared = self._has_interfaces and network.host_of(source) != network.host_of(dest)
            path = _Path(network.between(source, dest), self._rng, is_shared=is_shared)
            self._paths[source][dest] = path
        return path

    def _carry(self, path: _Path, source: int, dest: int, nbytes: int, latency: float) -> float:
        """Queue bytes behind earlier bytes on the link, and return the time at which the last byte arrives.

        All faults of links act here. Between hosts, return the time at which the first byte arrives, because the
        receiving interface adds the transfer time.
        """
        now = self._scheduler.time()
        transfer = nbytes / path.bandwidth
        if self._has_link_faults:
            factor = self._faults.link_factor((source, dest), now)
            latency *= factor
            transfer *= factor
        begins_at = path.free_at if path.free_at > now else now
        if path.is_shared:
            begins_at = self._interfaces.leave(source, begins_at, nbytes)
        path.free_at = begins_at + transfer
        arrival = (begins_at if path.is_shared else path.free_at) + latency
        if self._has_link_faults:
            arrival = self._faults.after_partitions((source, dest), now, arrival)
        return arrival

    def _enter(self, message: Message) -> None:
        if self.has_restarts and self.liveness.is_stale(message):
            self.fail_send(message)
            return
        path = self._paths[message.source][message.dest]
        nbytes = message.nbytes if message.eager else 64
        done_at = self._interfaces.enter(message.dest, self._scheduler.time(), nbytes)
        last = path.last_entry.get(message.tag, -1.0)
        if done_at <= last:  # a small message must not overtake a large message that the interface carries
            done_at = math.nextafter(last, math.inf)
        path.last_entry[message.tag] = done_at
        self._scheduler.at(done_at, self._take_in, (message,))

    def _enter_whole(self, receive: Receive, message: Message) -> None:
        done_at = self._interfaces.enter(message.dest, self._scheduler.time(), message.nbytes)
        self._scheduler.at(done_at, self._take_whole, (receive, message))

    def _arrival(self, message: Message, delay: float) -> float:
        message.left_at = self._scheduler.time()
        path = self._path(message.source, message.dest)
        nbytes = message.nbytes if message.eager else 64
        arrival = self._carry(path, message.source, message.dest, nbytes, path.draw_latency_s() + delay)
        last = path.last_arrival.get(message.tag, -1.0)
        if arrival <= last:  # messages of one (source, tag) never overtake each other
            arrival = math.nextafter(last, math.inf)
        path.last_arrival[message.tag] = arrival
        return arrival

    def _arrive(self, message: Message) -> None:
        if message.dest in self._dead:
            self.fail_send(message)
            return
        if self.has_restarts and self._is_held(message):
            return
        if self._dead and message.left_at > self._died_at.get(message.source, math.inf):
            return  # the sender was killed while it was blocked, before it reached this send
        posted = self._posted[message.dest].get(message.tag)
        if posted:
            for receive in posted:
                if receive.wanted == ANY_SOURCE or receive.wanted == message.source:
                    posted.remove(receive)
                    receive.matched = True
                    if message.eager:
                        self._complete(receive, message)
                    else:
                        self._turns[message.dest].call_when_idle(self._begin, (receive, message))
                    return
        self._keep(message)
        self._ring(message.dest)  # the receiver's next poll may post a receive for this message

    def _is_held(self, message: Message) -> bool:
        """Drop or hold a message if its sender and receiver are not connected. Return whether this has happened."""
        if self.liveness.is_stale(message):
            self.fail_send(message)
            return True
        if message.dest in self.liveness.closed:
            self._refuse(message)
            return True
        if message.source in self._known_lost[message.dest]:
            self.liveness.hold(message)
            return True
        return False

    def _refuse(self, message: Message) -> None:
        """Fail a send to a process that has ended, unless the send has already completed."""
        if not message.done:
            message.error = RankLostError(f"rank {message.dest} is gone", rank=message.dest)
            self._ring(message.source)

    def _keep(self, message: Message) -> None:
        """Queue a message that no posted receive matches."""
        unexpected = self._unexpected[message.dest]
        inbox = unexpected.get(message.tag)
        if inbox is None:
            inbox = unexpected[message.tag] = ArrivalQueue()
        inbox.add(message)

    def post(self, receive: Receive) -> None:
        waiting = self._unexpected[receive.dest].get(receive.tag)
        if waiting is not None and not waiting.is_empty():
            message = waiting.take(receive.wanted, self._rng)
            if message is not None:
                receive.matched = True
                if message.eager:
                    self._complete(receive, message, True)
                else:
                    self._rendezvous(receive, message)
                return
        if receive.wanted in self._known_lost[receive.dest]:
            receive.error = RankLostError(f"rank {receive.wanted} is gone", rank=receive.wanted)
            return
        posted = self._posted[receive.dest].get(receive.tag)
        if posted is None:
            posted = self._posted[receive.dest][receive.tag] = deque()
        posted.append(receive)

    def _rendezvous(self, receive: Receive, message: Message) -> None:
        """Request the data of a large message from its sender after the message has matched a receive."""
        if message.dest in self._dead:
            self.fail_send(message)
        elif self._is_pushed:
            self._turns[message.source].call_when_idle(self._travel, (receive, message))
        else:
            self._transfer(receive, message)

    def _transfer(self, receive: Receive, message: Message) -> None:
        if self.has_restarts and self.liveness.is_stale(message):
            self._complete(receive, message)
            return
        path = self._paths[message.source][message.dest]
        complete_at = self._carry(path, message.source, message.dest, message.nbytes, 2 * path.draw_latency_s())
        if path.is_shared:
            self._scheduler.at(complete_at, self._enter_whole, (receive, message))
        else:
            self._scheduler.at(complete_at, self._take_whole, (receive, message))

    def _arrive_whole(self, receive: Receive, message: Message) -> None:
        """Complete a large message's receive only once the receiver, which copies the last bytes itself, is idle."""
        self._turns[message.dest].call_when_idle(self._finish, (receive, message))

    def fail_send(self, message: Message) -> None:
        """Fail a send that no receive will match: at once, or when the sender detects the loss of ``dest``."""
        source, dest = message.source, message.dest
        is_stale = self.has_restarts and self.liveness.is_stale(message)
        if message.done or source in self._dead:
            return
        if is_stale or dest in self._known_lost[source]:
            message.error = RankLostError(f"rank {dest} is gone", rank=dest)
            self._ring(source)
        else:
            self._keep(message)

    def _complete(self, receive: Receive, message: Message, is_running: bool = False) -> None:
        """Complete a receive whose data has arrived. ``is_running`` is true if the receiver is just posting it."""
        is_stale = self.has_restarts and self.liveness.is_stale(message)
        if message.dest in self._dead or (is_stale and self.liveness.is_for_earlier(message)):
            self.fail_send(message)
            return
        if (is_stale or message.source in self._dead) and not message.eager:
            receive.error = RankLostError(f"rank {message.source} is gone", rank=message.source)
            self._ring(message.dest)
            return
        receive.source = message.source
        receive.nbytes = message.nbytes
        if message.nbytes > receive.buffer.nbytes:
            receive.error = TruncationError.of(message.nbytes, receive.buffer.nbytes, message.source)
        else:
            receive.fill(message.data)
            receive.done = True
        self._trace.add(self._scheduler.time(), "receive", message.source, message.dest, message.tag, message.nbytes)
        if not is_running:
            self._ring(message.dest)
        if not message.done:
            message.done = True
            self._ring(message.source)

    def withdraw(self, receive: Receive) -> None:
        posted = self._posted[receive.dest].get(receive.tag)
        if posted and receive in posted:
            posted.remove(receive)
            receive.done = receive.cancelled = True
            self._ring(receive.dest)

    def kill(self, rank: int) -> None:
        """Kill the process of ``rank``. Each peer detects the loss at a different time."""
        self._doorbells[rank] = None
        self._posted[rank].clear()
        for message in self.liveness.kill(rank):
            self.fail_send(message)

    def fail_sends(self, observer: int, lost: int) -> None:
        """Fail the pending sends of ``observer`` to ``lost``, and its pending receives from ``lost``."""
        error = RankLostError(f"rank {lost} is gone", rank=lost)
        for posted in self._posted[observer].values():
            for receive in [receive for receive in posted if receive.wanted == lost]:
                posted.remove(receive)
                receive.error = error
        for queue in self._unexpected[lost].values():
            for message in queue.of(observer):
                if not message.done:
                    message.error = error
        self._ring(observer)

    def restart(self, rank: int) -> None:
        """Start a new process for the dead ``rank``. Each peer connects to this process separately."""
        unheard = self._unexpected[rank]
        self._paths[rank], self._posted[rank], self._unexpected[rank] = {}, {}, {}
        for paths in self._paths:
            paths.pop(rank, None)
        self.liveness.restart(rank)
        for queue in unheard.values():
            for source in range(self.size):
                for message in queue.drop(source):
                    self.fail_send(message)

    def accept(self, observer: int, other: int, incarnation: int) -> bool:
        """Connect ``observer`` to a new process of ``other``. Return False if it is dead or already connected."""
        if not self.liveness.accept(observer, other, incarnation):
            return False
        for queue in self._unexpected[observer].values():  # drop messages of the previous process
            for message in queue.drop(other):
                self.fail_send(message)
        arrival = self._scheduler.now
        for message in self.liveness.take_held(other, observer):
            self._scheduler.at(arrival, self._take_in, (message,))
            arrival = math.nextafter(arrival, math.inf)  # preserves the order of the held messages
        return True

    def mute(self) -> None:
        """Stop sending messages, because the remaining tasks are only being cleaned up."""
        self._muted = True

    def set_arrival_callback(self, rank: int, ring: Callable[[], None]) -> None:
        self._doorbells[rank] = ring

    def lost_ranks(self, observer: int) -> frozenset[int]:
        return self._all_ranks if self._muted else frozenset(self._known_lost[observer])

    def missed_ranks(self, rank: int) -> frozenset[int]:
        return self.liveness.missed(rank)

    def close(self, rank: int) -> None:
        self._doorbells[rank] = None
        self._posted[rank].clear()
        self.liveness.close(rank)
        if self.has_restarts:
            for queue in self._unexpected[rank].values():
                for source in range(self.size):
                    for message in queue.drop(source):
                        self._refuse(message)

    def _ring(self, rank: int) -> None:
        ring = self._doorbells[rank]
        if ring is not None:
            ring()
