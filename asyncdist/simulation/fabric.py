"""The simulated medium: obeys the transport contract, and uses every freedom that it leaves.

It may delay, reorder across sources and tags, complete requests late, choose among the senders that a wildcard receive
could take, and make a send eager or rendezvous. It may not overtake within one (source, tag), nor lose or duplicate a
message between live ranks. All choices are drawn from the seed, in the order of virtual time, so a run is a function of
its arguments.

The module is compiled where that can be done; see :mod:`asyncdist.compiled`.
"""

from __future__ import annotations

import math
import random
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Final

from asyncdist.collectives.call_checker import CollectiveChecker
from asyncdist.errors import AsyncdistError, RankLostError, TruncationError
from asyncdist.simulation.faults import Corrupt, Delay, Fault, Kill, Partition, SlowLink
from asyncdist.simulation.models import Link, Network, draw, sampler
from asyncdist.simulation.scheduler import Scheduler, Turns
from asyncdist.simulation.trace import Trace
from asyncdist.tags import BULK_FIRST, BULK_LAST, COLLECTIVE_FIRST, COLLECTIVE_LAST, TAG_MAX
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

#: Every known transport takes small messages before their receive is posted, and programs count on it.
_EAGER_CHOICES: Final = (256, 4096, 65536)


class _Message:
    """A send, and what travels."""

    __slots__ = ("data", "dest", "done", "eager", "error", "left_at", "nbytes", "source", "tag")

    cancelled: Final = False

    def __init__(self, data: bytes | bytearray | memoryview, nbytes: int, source: int, dest: int, tag: int) -> None:
        self.data = data
        self.nbytes = nbytes
        self.source = source
        self.dest = dest
        self.tag = tag
        self.eager = False
        self.done = False
        self.left_at = 0.0
        self.error: AsyncdistError | None = None

    def test(self) -> bool:
        if self.error is not None:
            raise self.error
        return self.done

    def cancel(self) -> None:
        """A message once sent is on its way."""


class _Receive:
    __slots__ = (
        "_medium",
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

    def __init__(self, medium: Fabric, buffer: Buffer, dest: int, wanted: int, tag: int) -> None:
        self._medium = medium
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
            self.test()  # raises it
        return None

    def start(self) -> None:
        self.done = self.matched = self.cancelled = False
        self._medium.post(self)

    def cancel(self) -> None:
        if not self.matched and not self.done:
            self._medium.withdraw(self)


class _ArrivalQueue:
    """Messages of one tag that have come to one rank, and that nobody has asked for yet."""

    def __init__(self) -> None:
        self._by_source: dict[int, deque[_Message]] = {}
        self._sources: list[int] = []  # those with a message, in any order

    def is_empty(self) -> bool:
        return not self._sources

    def add(self, message: _Message) -> None:
        """The last of its source."""
        of_source = self._by_source.setdefault(message.source, deque())
        if not of_source:
            self._sources.append(message.source)
        of_source.append(message)

    def of(self, source: int) -> Iterable[_Message]:
        """Those of ``source``, oldest first."""
        return self._by_source.get(source, ())

    def take(self, wanted: int, rng: random.Random) -> _Message | None:
        """The first of a source: of any, drawn, for a wildcard."""
        sources = self._sources
        if wanted != ANY_SOURCE:
            if not self._by_source.get(wanted):
                return None
            position = sources.index(wanted)
        else:
            position = int(rng.random() * len(sources)) if len(sources) > 1 else 0
        of_source = self._by_source[sources[position]]
        message = of_source.popleft()
        if not of_source:
            sources[position] = sources[-1]
            sources.pop()
        return message


class _Path:
    """From one rank to another."""

    __slots__ = ("bandwidth", "draw_latency_s", "free_at", "last_arrival")

    def __init__(self, link: Link, rng: random.Random) -> None:
        self.draw_latency_s = sampler(link.latency_s, rng)
        self.bandwidth = link.bandwidth_nbytes_per_s
        self.free_at = 0.0
        self.last_arrival: dict[int, float] = {}


class Fabric:
    """What all simulated transports of one run share.

    Args:
        size: number of ranks.
        network: links and freedoms.
        faults: those of the plan that concern messages are carried out here.
        scheduler: the clock.
        rng: all choices.
        trace: is told of every message.
        on_fired: is told the position in the plan of a fault that happened.
        on_kill: a rank is to die, by the fault at that position.
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
        self._on_fired = on_fired
        self._on_kill = on_kill
        self._eager_nbytes = rng.choice(_EAGER_CHOICES) if network.eager_nbytes is None else network.eager_nbytes
        self._is_pushed = rng.random() < 0.5  # large messages, by a sender that must not compute; else they are fetched
        self._paths: list[dict[int, _Path]] = [{} for _ in range(size)]
        self._posted: list[dict[int, deque[_Receive]]] = [{} for _ in range(size)]
        self._unexpected: list[dict[int, _ArrivalQueue]] = [{} for _ in range(size)]
        self._doorbells: list[Callable[[], None] | None] = [None] * size
        self._listeners: list[Callable[[int], object] | None] = [None] * size
        self._known_lost: list[set[int]] = [set() for _ in range(size)]
        self._dead: set[int] = set()
        self._died_at: dict[int, float] = {}
        self._sent_counts = [0] * size
        self._pair_counts: dict[tuple[int, int], int] = {}
        self._frame_counts: dict[tuple[int, int], int] = {}
        self.job_nonce = rng.getrandbits(32)
        self.collective_checker = CollectiveChecker()
        self.message_count = 0
        self.byte_count = 0
        self._muted = False
        self._everybody = frozenset(range(size))
        plan = list(enumerate(faults))
        self._kills: dict[tuple[int, int], int] = {}
        self._delays: dict[tuple[int, int, int], list[tuple[int, Delay]]] = {}
        self._corruptions: dict[tuple[int, int, int], list[tuple[int, Corrupt]]] = {}
        for index, fault in plan:
            match fault:
                case Kill(rank, at_message=int(number)):
                    self._kills.setdefault((rank, number), index)  # a rank dies once
                case Delay(source, dest, number):
                    self._delays.setdefault((source, dest, number), []).append((index, fault))
                case Corrupt(source, dest, number):
                    self._corruptions.setdefault((source, dest, number), []).append((index, fault))
        self._slow_links = [(index, f) for index, f in plan if isinstance(f, SlowLink)]
        self._partitions = [(index, f) for index, f in plan if isinstance(f, Partition)]
        self._has_message_faults = bool(self._kills or self._delays or self._corruptions)
        self._has_link_faults = bool(self._slow_links or self._partitions)
        self._turns: list[Turns] = []
        self._take_in = self._arrive  # one bound method for all messages
        self._take_whole = self._arrive_whole
        self._begin = self._rendezvous
        self._travel = self._transfer
        self._finish = self._complete

    def connect(self, turns: Sequence[Turns]) -> None:
        """These are the ranks' turns: what needs the attention of a rank that computes waits for its next one."""
        self._turns = list(turns)

    # -- sending ----------------------------------------------------------------------------------------------------

    def send(self, buffer: Buffer, source: int, dest: int, tag: int) -> _Message:
        data = buffer if type(buffer) is bytes or type(buffer) is bytearray else as_bytes(buffer)
        nbytes = len(data)
        message = _Message(data, nbytes, source, dest, tag)
        if not self._muted:
            self.message_count += 1
            self.byte_count += nbytes
        if dest in self._known_lost[source]:
            message.error = RankLostError(f"rank {dest} is gone", rank=dest)
            return message
        if nbytes <= self._eager_nbytes:
            message.data = bytes(data)  # no copy of bytes
            message.eager = message.done = True
        if self._muted:
            return message
        delay = 0.0
        if self._has_message_faults and source not in self._dead:
            delay = self._apply_message_faults(message)
        if source in self._dead:
            message.done = False  # the rank has died with this send, or before: whoever awaits it goes no further
            return message
        arrival = self._arrival(message, delay)
        scheduler = self._scheduler
        self._trace.add(scheduler.time(), "send", source, dest, tag, nbytes)
        self._trace.add_content(message.data)
        scheduler.at(arrival, self._take_in, (message,))
        return message

    def _arrival(self, message: _Message, delay: float) -> float:
        message.left_at = now = self._scheduler.time()
        source, dest = message.source, message.dest
        path = self._paths[source].get(dest)
        if path is None:
            path = self._paths[source][dest] = _Path(self.network.between(source, dest), self._rng)
        latency = path.draw_latency_s() + delay
        transfer = (message.nbytes if message.eager else 64) / path.bandwidth
        if self._has_link_faults:
            factor = self._link_factor((source, dest), now)
            latency *= factor
            transfer *= factor
        path.free_at = sent_at = (path.free_at if path.free_at > now else now) + transfer
        arrival = sent_at + latency
        if self._has_link_faults:
            arrival = self._after_partitions((source, dest), now, arrival)
        last = path.last_arrival.get(message.tag, -1.0)
        if arrival <= last:  # never overtake within one source and tag
            arrival = math.nextafter(last, math.inf)
        path.last_arrival[message.tag] = arrival
        return arrival

    def _arrive(self, message: _Message) -> None:
        if message.dest in self._dead:
            self._fail_send(message)
            return
        if self._dead and message.left_at > self._died_at.get(message.source, math.inf):
            return  # its sender died while it blocked, before it came to send this
        posted = self._posted[message.dest].get(message.tag)
        if posted:
            for receive in posted:
                if receive.wanted == ANY_SOURCE or receive.wanted == message.source:
                    posted.remove(receive)
                    receive.matched = True
                    if message.eager:
                        self._complete(receive, message)
                    else:
                        self._turns[message.dest].attend(self._begin, (receive, message))
                    return
        self._keep(message)
        self._ring(message.dest)  # a lane posts its receive when it is polled

    def _keep(self, message: _Message) -> None:
        """Nobody has asked for it yet."""
        unexpected = self._unexpected[message.dest]
        inbox = unexpected.get(message.tag)
        if inbox is None:
            inbox = unexpected[message.tag] = _ArrivalQueue()
        inbox.add(message)

    # -- receiving --------------------------------------------------------------------------------------------------

    def post(self, receive: _Receive) -> None:
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

    def _rendezvous(self, receive: _Receive, message: _Message) -> None:
        """A large message and a receive have met, and the receiver knows: it says so to the sender."""
        if message.dest in self._dead:
            self._fail_send(message)
        elif self._is_pushed:
            self._turns[message.source].attend(self._travel, (receive, message))
        else:
            self._transfer(receive, message)

    def _transfer(self, receive: _Receive, message: _Message) -> None:
        """Only now the bytes of a large message travel, behind what their link has to carry."""
        pair = (message.source, message.dest)
        path = self._paths[message.source][message.dest]
        now = self._scheduler.time()
        latency = 2 * path.draw_latency_s()
        transfer = message.nbytes / path.bandwidth
        if self._has_link_faults:
            factor = self._link_factor(pair, now)
            latency *= factor
            transfer *= factor
        path.free_at = sent_at = (path.free_at if path.free_at > now else now) + transfer
        complete_at = sent_at + latency
        if self._has_link_faults:
            complete_at = self._after_partitions(pair, now, complete_at)
        self._scheduler.at(complete_at, self._take_whole, (receive, message))

    def _arrive_whole(self, receive: _Receive, message: _Message) -> None:
        """The bytes of a large message are there: only its receiver can take the last of them."""
        self._turns[message.dest].attend(self._finish, (receive, message))

    def _fail_send(self, message: _Message) -> None:
        """Nobody will take it any more; its sender is told when it knows that ``dest`` is lost."""
        source, dest = message.source, message.dest
        if message.done or source in self._dead:
            return
        if dest in self._known_lost[source]:
            message.error = RankLostError(f"rank {dest} is gone", rank=dest)
            self._ring(source)
        else:
            self._keep(message)

    def _complete(self, receive: _Receive, message: _Message, is_running: bool = False) -> None:
        """The bytes are there; ``is_running`` if the receiver posts this moment, and needs no bell."""
        if message.dest in self._dead:
            self._fail_send(message)
            return
        if message.source in self._dead and not message.eager:
            receive.error = RankLostError(f"rank {message.source} is gone", rank=message.source)
            self._ring(message.dest)
            return
        receive.source = message.source
        receive.nbytes = message.nbytes
        if message.nbytes > receive.buffer.nbytes:
            receive.error = TruncationError.of(message.nbytes, receive.buffer.nbytes, message.source)
        else:
            receive.buffer[: message.nbytes] = message.data
            receive.done = True
        self._trace.add(self._scheduler.time(), "receive", message.source, message.dest, message.tag, message.nbytes)
        if not is_running:
            self._ring(message.dest)
        if not message.done:
            message.done = True
            self._ring(message.source)

    def withdraw(self, receive: _Receive) -> None:
        posted = self._posted[receive.dest].get(receive.tag)
        if posted and receive in posted:
            posted.remove(receive)
            receive.done = receive.cancelled = True
            self._ring(receive.dest)

    # -- faults -----------------------------------------------------------------------------------------------------

    def _apply_message_faults(self, message: _Message) -> float:
        """Faults that name a message by its number. Returns its extra delay in seconds."""
        source, pair = message.source, (message.source, message.dest)
        self._sent_counts[source] += 1
        kill = self._kills.get((source, self._sent_counts[source]))
        if kill is not None:
            self._on_kill(source, kill)
            return 0.0
        number = self._pair_counts[pair] = self._pair_counts.get(pair, 0) + 1
        if not _is_raw(message.tag):
            framed = self._frame_counts[pair] = self._frame_counts.get(pair, 0) + 1
            corruptions = self._corruptions.get((*pair, framed))
            if corruptions is not None and message.nbytes:
                changed = bytearray(message.data)
                for index, corruption in corruptions:
                    place = corruption.byte % message.nbytes
                    changed[place] = (changed[place] + 0x55) % 256  # also where two of them meet in one byte
                    self._on_fired(index)
                message.data = bytes(changed)
        delay_s = 0.0
        for index, delay in self._delays.get((*pair, number), ()):
            delay_s += delay.duration_s
            self._on_fired(index)
        return delay_s

    def _link_factor(self, pair: tuple[int, int], now: float) -> float:
        """What slowed links make of the time of a message that leaves ``now``."""
        factor = 1.0
        for index, fault in self._slow_links:
            if (fault.source, fault.dest) == pair and now >= fault.at_s:
                factor *= fault.factor
                self._on_fired(index)
        return factor

    def _after_partitions(self, pair: tuple[int, int], now: float, arrival: float) -> float:
        """When a message arrives that would be under way from ``now`` to ``arrival``.

        One that a partition holds back may come into the next one, whatever their order in the plan.
        """
        between = [
            (index, fault)
            for index, fault in self._partitions
            if now < fault.until_s and (pair[0] in fault.ranks) != (pair[1] in fault.ranks)
        ]
        for index, fault in sorted(between, key=lambda entry: entry[1].at_s):
            if arrival > fault.at_s:
                self._on_fired(index)
                arrival = max(arrival, fault.until_s)
        return arrival

    def kill(self, rank: int) -> None:
        """The process of ``rank`` is gone; its peers find out one by one."""
        self._dead.add(rank)
        self._died_at[rank] = self._scheduler.now
        self._doorbells[rank] = None
        self._posted[rank].clear()
        for dest in range(self.size):
            if dest != rank and dest not in self._dead:
                seconds = draw(self.network.loss_detection_s, self._rng)
                self._scheduler.at(self._scheduler.now + seconds, self._detect, (dest, rank))

    def _detect(self, observer: int, lost: int) -> None:
        if observer in self._dead:
            return
        self._known_lost[observer].add(lost)
        self._trace.add(self._scheduler.now, "lost", lost, observer, 0, 0)
        error = RankLostError(f"rank {lost} is gone", rank=lost)
        for posted in self._posted[observer].values():
            for receive in [receive for receive in posted if receive.wanted == lost]:
                posted.remove(receive)
                receive.error = error
        for messages in self._unexpected[lost].values():
            for message in messages.of(observer):
                if not message.done:
                    message.error = error
        listen = self._listeners[observer]
        if listen is not None:
            listen(lost)
        self._ring(observer)

    def mute(self) -> None:
        """Nothing is sent any more: what still runs is only being cleared away."""
        self._muted = True

    # -- the ends ---------------------------------------------------------------------------------------------------

    def set_doorbell(self, rank: int, ring: Callable[[], None]) -> None:
        self._doorbells[rank] = ring

    def set_loss_listener(self, rank: int, listen: Callable[[int], object]) -> None:
        self._listeners[rank] = listen

    def lost_ranks(self, observer: int) -> frozenset[int]:
        return self._everybody if self._muted else frozenset(self._known_lost[observer])

    def close(self, rank: int) -> None:
        self._doorbells[rank] = None
        self._listeners[rank] = None
        self._posted[rank].clear()

    def _ring(self, rank: int) -> None:
        ring = self._doorbells[rank]
        if ring is not None:
            ring()


def _is_raw(tag: int) -> bool:
    """Whether messages of that tag have no frame, and so no CRC."""
    return BULK_FIRST <= tag <= BULK_LAST or COLLECTIVE_FIRST <= tag <= COLLECTIVE_LAST


class SimTransport(Transport):
    """One rank's end of the :class:`Fabric`.

    Args:
        medium: shared by all ranks.
        rank: whose end it is.
        call_soon: calls a function in a turn of the rank's loop, in its context.
    """

    name = "sim"

    def __init__(self, medium: Fabric, rank: int, call_soon: Callable[..., object]) -> None:
        self._medium = medium
        self._call_soon = call_soon
        self.rank = rank
        self.collective_checker = medium.collective_checker
        self.job_nonce = medium.job_nonce
        self.size = medium.size
        self.capabilities = Capabilities(
            native_collectives=False,
            survives_rank_loss=True,
            wakes=True,
            misses_wakes=False,
            tag_max=TAG_MAX,
            shares_process=True,
        )

    @property
    def hostname(self) -> str:
        return f"host{self._medium.network.host_of(self.rank)}"

    def isend(self, buffer: Buffer, dest: int, tag: int) -> Request:
        return self._medium.send(buffer, self.rank, dest, tag)

    def start_send(self, buffer: Buffer, dest: int, tag: int) -> Request | None:
        message = self._medium.send(buffer, self.rank, dest, tag)
        return None if message.done or message.test() else message

    def irecv(self, buffer: Buffer, source: int, tag: int) -> Request:
        receive = _Receive(self._medium, buffer, self.rank, source, tag)
        self._medium.post(receive)
        return receive

    def persistent_receive(self, buffer: Buffer, tag: int) -> PersistentReceive:
        return _Receive(self._medium, buffer, self.rank, ANY_SOURCE, tag)

    def new_group(self, ranks: Sequence[int], tag: int) -> GroupHandle | None:
        del ranks, tag
        return None

    def lost_ranks(self) -> frozenset[int]:
        return self._medium.lost_ranks(self.rank)

    def abort(self, exit_code: int) -> None:
        """The simulation ends when every rank has."""

    def close(self) -> None:
        self._medium.close(self.rank)

    def set_doorbell(self, ring: Callable[[], None]) -> None:
        self._medium.set_doorbell(self.rank, ring)

    def set_loss_listener(self, listen: Callable[[int], None]) -> None:
        # Told in a turn of the rank's own, as a poll would tell it: a rank that computes is deaf.
        self._medium.set_loss_listener(self.rank, partial(self._call_soon, listen))

    def describe(self) -> str:
        return f"sim: {self.size} ranks in virtual time"
