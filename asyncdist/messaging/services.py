"""Services of a rank for protocols: engine, channels, stream slots, background tasks, peer notifications.

Protocols use :class:`Services`, which every world has as ``world.services``, instead of :class:`asyncdist.World`. They
therefore depend only on messaging, not on the code that starts and ends a rank.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import os
import sys
from collections import Counter
from collections.abc import Callable, Collection, Coroutine, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Final, TypeVar

from asyncdist import tags
from asyncdist.errors import AsyncdistError, ClosedError, LocalProtocolError, RankLostError, RemoteProtocolError
from asyncdist.messaging import streams, wire
from asyncdist.messaging.channels import Channel, Envelope, Overflow
from asyncdist.messaging.demultiplexer import ReceivingChannel, TagDemultiplexer
from asyncdist.messaging.engine import Engine
from asyncdist.messaging.flow_control import Credit, TagFlow
from asyncdist.messaging.polling import clock_of
from asyncdist.recording.events import EventLog
from asyncdist.transports.rank_sets import RankSet
from asyncdist.waits import WaitId

logger = logging.getLogger("asyncdist.messaging.services")

T = TypeVar("T")

#: Default maximum number of messages in the mailbox of a protocol's channel, and of sends in progress on it.
PROTOCOL_CAPACITY: Final = 4096


def event_clock_of(loop: asyncio.AbstractEventLoop) -> Callable[[], float]:
    """Return the clock for events. Reading it takes no virtual time, unlike many reads of a simulated loop's clock.

    A recorded simulation reads this clock more often, and is therefore the same run as an unrecorded one.
    """
    clock: Callable[[], float] | None = getattr(loop, "event_time", None)
    return clock_of(loop) if clock is None else clock


@dataclass(frozen=True, slots=True)
class ChannelTotals:
    """Counts of the messages sent, received and dropped on all channels of a rank."""

    sent_count: int
    received_count: int
    dropped: dict[str, int]
    drop_examples: dict[str, str]


class _WatchedContacts(set[int]):
    """A set of ranks that calls ``listener`` with each newly added rank."""

    def __init__(self, contacts: Iterable[int], listener: Callable[[int], None]) -> None:
        super().__init__(contacts)
        self._listener = listener

    def add(self, rank: int) -> None:
        if rank not in self:
            super().add(rank)
            self._listener(rank)


class Services:
    """Provides a rank's protocols with messaging, background tasks, and notifications about other ranks.

    Attributes:
        incarnation: Number of restarts of this rank.
        may_return: Whether lost ranks are restarted.
        survives_loss: Whether the other ranks continue when a rank is lost.
        is_admitted: Whether the failure of this rank ends the job. False after a restart until a policy or a group
            admits the rank.
        nonce: Number that identifies the job. Messages of other jobs are dropped.
        job: Name of the job for people and files, equal on all ranks: eight hexadecimal digits of the nonce.
        hosts: Lowest rank on the host of each rank, indexed by rank. None if the hosts are unknown, or all ranks share
            one host. Equal on all ranks, unless a rank was lost while the ranks connected.
        slots: Slots of the streams that this rank receives, and byte counts of all its streams.
        gone: Ranks that have left or are lost.
        restarted: Number of restarts of each rank that was restarted after this rank was connected to it. Protocols
            that do not admit restarted ranks treat these ranks as lost.
        left: Ranks that have stopped, because ``main`` has returned on them or because a rank has failed.
        sent_to: Ranks to which this rank has sent messages on channels with ``counts_contacts``.
        received_from: Ranks from which messages on channels with ``counts_contacts`` have arrived.
        progress_probes: Thread-safe functions that return the progress of a policy as a
            :class:`~asyncdist.live.counters.PolicyCounters`.
        last_progress: Progress of the most recently closed policy.
        events: Recent events on this rank.
        read_nbytes: Number of bytes read from the memory of other ranks.
        waited_s: Total seconds that the user's tasks have waited since :meth:`count_waits` was called.
        end_recording: Function that ends this rank's recording as if its process had died. Its arguments are the
            identity of ``main``'s wait, or None if it need not be recorded, and the wait's duration in seconds.
        reports_in_turn: Whether this rank replays a rank that had its own process. Such a rank delays its failure
            report, because a lower rank may report the same failure.
        leftover_probes: Functions that describe a protocol's unreleased resources, called at the end of the rank.
        openers: Functions that open the channels on ``tags.PARAM`` that open on first use, by scope.
    """

    def __init__(self, engine: Engine, loop: asyncio.AbstractEventLoop, nonce: int) -> None:
        self.rank = engine.transport.rank
        self.size = engine.transport.size
        self.process_id = os.getpid()
        self.incarnation = engine.transport.incarnation
        self.may_return = engine.transport.may_return
        self.survives_loss = engine.transport.capabilities.survives_rank_loss
        self.is_admitted = not self.incarnation
        self.hosts: Sequence[int] | None = engine.transport.hosts
        self.time = engine.clock
        self.engine = engine
        self.gone = RankSet()
        self.restarted: dict[int, int] = {}
        self._met: set[int] = set()  # ranks to which this restarted process is connected
        self.slots = streams.Slots(engine, self.restarted)
        self.left = RankSet()
        self.sent_to: set[int] = set()
        self.received_from: set[int] = set()
        self.progress_probes: list[Callable[[], Any]] = []
        self.last_progress: Any = None
        self.leftover_probes: list[Callable[[], Sequence[str]]] = []
        self.openers: dict[int, Callable[[], object]] = {}
        self.events = EventLog(event_clock_of(loop))
        self.end_recording: Callable[[WaitId | None, float], None] | None = None
        self.reports_in_turn = False
        self.read_nbytes = 0
        self.waited_s = 0.0
        self._on_waited: Callable[[WaitId, float], None] | None = None
        self._loop = loop
        self.nonce = nonce
        self.job = f"{nonce & 0xFFFFFFFF:08x}"
        self._returned = RankSet()  # ranks whose ``main`` has returned
        self._demultiplexers: dict[int, TagDemultiplexer] = {}
        self._credits: Channel[Credit] | None = None  # opened with the first channel of the user's program
        self._tags = tags.TagRegistry()
        self._scope_counts: Counter[tuple[str, str]] = Counter()
        self._gone_listeners: list[tuple[Callable[[int], None], RankSet | None]] = []
        self._returned_listeners: list[Callable[[int], None]] = []
        self._defect_listeners: list[Callable[[BaseException], None]] = []
        self._tasks: set[asyncio.Task[Any]] = set()
        self._shared: dict[Callable[[Services], Any], Any] = {}

    @property
    def shares_memory(self) -> bool:
        """Whether ranks are separate processes that can access each other's memory if they are on one host."""
        return self.engine.transport.capabilities.shares_memory

    # -- channels ---------------------------------------------------------------------------------------------------

    def open_channel(
        self,
        message_types: Any,
        *,
        tag: int,
        scope: int,
        name: str,
        capacity: int = PROTOCOL_CAPACITY,
        overflow: Overflow = "error",
        peer_scope: int | None = None,
        handler: Callable[[Envelope[Any]], None] | None = None,
        epoch: int | None = None,
        earlier_handler: Callable[[Envelope[Any]], None] | None = None,
        admits_restarted: bool = False,
        counts_contacts: bool = True,
    ) -> Channel[Any]:
        """Open a channel for messages of a protocol.

        Args:
            scope: Number that identifies the messages of this protocol's ranks on the tag.
            capacity: Maximum number of messages in the mailbox, and of sends in progress.
            overflow: Effect of a full mailbox: ``"error"`` fails the channel, ``"latest"`` keeps only the newest
                message of each source, ``"stall"`` stops receiving on the tag.
            peer_scope: Scope of sent messages, if the receivers have a different role and therefore a different scope.
                By default ``scope``.
            handler: Function called with each arriving message, during a polling pass, or None to queue messages in the
                mailbox.
            epoch: First epoch (number of the coordinator), or None for a protocol without epochs.
            earlier_handler: Function called with each message of an earlier epoch, or None to drop and count these
                messages.
            admits_restarted: Whether messages may be sent to a restarted rank that has not sent a message yet.
            counts_contacts: Whether senders and receivers of messages are added to :attr:`sent_to` and
                :attr:`received_from`.
        """
        codec = wire.Codec(message_types)
        demultiplexer = self._demultiplexer(tag, is_users=overflow == "stall")
        return Channel(
            demultiplexer,
            codec,
            scope,
            name=name,
            capacity=capacity,
            overflow=overflow,
            peer_scope=peer_scope,
            handler=handler,
            left=self._returned if demultiplexer.is_users else (),
            epoch=epoch,
            earlier_handler=earlier_handler,
            admits_restarted=admits_restarted or demultiplexer.is_users,
            counts_contacts=counts_contacts,
        )

    def open_user_channel(
        self, message_type: type[T], *, tag: int, name: str, ranks: Sequence[int], capacity: int
    ) -> Channel[T]:
        """Open a channel for the user's program. Implements :meth:`asyncdist.World.channel`.

        Raises:
            LocalProtocolError: The tag is not free.
            TypeError: The message type has a field that cannot be sent.
        """
        wire.Codec(message_type)  # This raises TypeError before the tag is claimed.
        demultiplexer = self._demultiplexers.get(tag)
        if demultiplexer is not None and not demultiplexer.channels():
            self._tags.release(tag)
        self._tags.claim(tag, f"channel {name!r}")
        scope = self.next_scope(ranks, f"channel {tag} {name}")
        channel = self.open_channel(message_type, tag=tag, scope=scope, name=name, capacity=capacity, overflow="stall")
        channel.name_senders(lambda: (other for other in ranks if other != self.rank and other not in self.gone))
        channel.lost_senders = functools.partial(self._lost_senders, name, ranks)
        if self.gone:
            channel.on_gone()
        return channel

    def _lost_senders(self, name: str, ranks: Sequence[int]) -> RankLostError | None:
        """If all other ranks have left or are lost, and at least one is lost, return an error, otherwise None."""
        if len(self.gone) < len(ranks) - 1 or self.may_return:
            return None
        lost = self.lost_ranks().intersection(ranks)
        if not lost or not all(rank in self.gone for rank in ranks if rank != self.rank):
            return None
        return RankLostError(f"{name}: no rank is left that can send, because rank {min(lost)} is lost", rank=min(lost))

    def next_scope(self, ranks: Sequence[int], name: str) -> int:
        """Return a new number for messages about ``name`` among ``ranks``.

        The nth such number is equal on all ranks.
        """
        group = tuple(ranks)
        key = (wire.text_of(group), name)
        self._scope_counts[key] += 1
        return wire.scope_of(group, name, self._scope_counts[key])

    def _demultiplexer(self, tag: int, *, is_users: bool) -> TagDemultiplexer:
        found = self._demultiplexers.get(tag)
        if found is None:
            flow = None
            if is_users:
                self._credits = self._credits or self._open_credits()
                is_limited = self.engine.holds_sends
                flow = TagFlow(tag, self.rank, self.send_credit, gone=self.gone, is_limited=is_limited)
            found = self._demultiplexers[tag] = TagDemultiplexer(
                self.engine,
                tag,
                self.nonce,
                flow=flow,
                sent_to=self.sent_to,
                received_from=self.received_from,
                openers=self.openers if tag == tags.PARAM else {},
            )
        return found

    def _open_credits(self) -> Channel[Credit]:
        return self.open_channel(
            Credit,
            tag=tags.CONTROL,
            scope=wire.scope_of(range(self.size), "flow control", 0),
            name="flow control",
            capacity=sys.maxsize,  # A credit must never raise BusyError.
            handler=self._on_credit,
            admits_restarted=True,
            counts_contacts=False,
        )

    def send_credit(self, tag: int, rank: int) -> None:
        """Allow ``rank`` to send further messages on ``tag``, a tag of the user's program.

        Do nothing if ``rank`` is lost.
        """
        assert self._credits is not None, f"a credit for tag {tag}, on which no channel was opened"
        with contextlib.suppress(RankLostError, ClosedError):
            self._credits.send_nowait(Credit(tag), rank)

    def _on_credit(self, envelope: Envelope[Credit]) -> None:
        demultiplexer = self._demultiplexers.get(envelope.message.tag)
        if demultiplexer is not None and demultiplexer.flow is not None:
            demultiplexer.flow.on_credit(envelope.source)

    def shared(self, make: Callable[[Services], T]) -> T:
        """Return the object that ``make(self)`` returns. It is made once per rank and then reused."""
        if make not in self._shared:
            self._shared[make] = make(self)
        found: T = self._shared[make]
        return found

    # -- tasks ------------------------------------------------------------------------------------------------------

    def spawn_service(self, coroutine: Coroutine[Any, Any, T], *, name: str | None = None) -> asyncio.Task[T]:
        """Start a background task. The rank awaits it after ``main`` has returned, and cancels it after a failure."""
        task = self._loop.create_task(coroutine, name=name)
        self._tasks.add(task)
        task.add_done_callback(self._on_task_done)
        return task

    def _on_task_done(self, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        error = None if task.cancelled() else task.exception()
        if error is not None:
            logger.debug("service %s ended with %r", task.get_name(), error)
            expected = isinstance(error, AsyncdistError) and not isinstance(error, RemoteProtocolError)
            for listener in () if expected else self._defect_listeners:
                listener(error)
        self.engine.recheck()

    def on_defect(self, listener: Callable[[BaseException], None]) -> None:
        """Call ``listener(error)`` if a service task fails, because no task awaits service tasks."""
        self._defect_listeners.append(listener)

    def count_waits(self, on_waited: Callable[[WaitId, float], None] | None = None) -> None:
        """Measure the waits of the user's tasks, at the cost of a microsecond per wait."""
        self._on_waited = on_waited or self._on_waited
        self.engine.on_waited = self._note_wait

    def _note_wait(self, what: WaitId, seconds: float) -> None:
        if not self.is_service(asyncio.current_task()):
            self.waited_s += seconds
            if self._on_waited is not None:
                self._on_waited(what, seconds)

    @property
    def task_count(self) -> int:
        """Number of running service tasks."""
        return len(self._tasks)

    def is_service(self, task: asyncio.Task[Any] | None) -> bool:
        """Return whether :meth:`spawn_service` has started ``task``."""
        return task in self._tasks

    def cancel_tasks(self) -> None:
        """Cancel all service tasks."""
        for task in list(self._tasks):
            task.cancel()

    # -- peers ------------------------------------------------------------------------------------------------------

    def check_peer(self, rank: int) -> None:
        """Raise LocalProtocolError if ``rank`` is not a valid rank, and the job's error if the job has failed."""
        if type(rank) is not int or not 0 <= rank < self.size:
            raise LocalProtocolError(f"rank must be from 0 to {self.size - 1}, got {rank!r}", rank=rank)
        if self.engine.failure is not None:
            raise self.engine.failure

    def lost_ranks(self) -> frozenset[int]:
        """Return the ranks whose processes ended without leaving the world."""
        return self.engine.transport.lost_ranks()

    def left_world(self) -> frozenset[int]:
        """Return the ranks that have left the world, even if they left before this restarted rank was connected."""
        return self.engine.transport.missed_ranks().union(self.left)

    def is_unmet(self, rank: int) -> bool:
        """Return whether ``rank`` counts as lost only because this restarted process has not connected to it yet."""
        if not self.incarnation or rank == self.rank or rank in self._met:
            return False
        return rank not in self.engine.transport.vacant_ranks()

    def on_gone(self, listener: Callable[[int], None], *, among: Iterable[int] | None = None) -> None:
        """Call ``listener(rank)`` for each rank, or each rank in ``among``, that leaves or is lost from now on."""
        self._gone_listeners.append((listener, None if among is None else RankSet(among)))

    def off_gone(self, listener: Callable[[int], None]) -> None:
        """Stop notifying ``listener`` of departures and losses."""
        self._gone_listeners = [each for each in self._gone_listeners if each[0] != listener]

    def on_returned(self, listener: Callable[[int], None]) -> None:
        """Call ``listener(rank)`` for each lost rank that is restarted later."""
        self._returned_listeners.append(listener)

    def off_returned(self, listener: Callable[[int], None]) -> None:
        """Stop notifying ``listener`` of restarts."""
        if listener in self._returned_listeners:
            self._returned_listeners.remove(listener)

    # -- for the runtime --------------------------------------------------------------------------------------------

    def notify_gone(self, ranks: RankSet) -> None:
        """Notify listeners, channels and waiting tasks of the ranks that were just added to :attr:`gone`."""
        for listener, among in list(self._gone_listeners):
            for rank in ranks if among is None else ranks & among:
                listener(rank)
        for demultiplexer in self._demultiplexers.values():
            if demultiplexer.is_users:
                demultiplexer.on_gone(ranks)
        self.engine.recheck()  # Tasks may be waiting for changes that the listeners have made.

    def note_restarted(self, rank: int, incarnation: int) -> None:
        """Record a restart of ``rank``, and drop the undelivered messages of its previous process.

        If this process was itself restarted and never connected to that previous process, no message is dropped.
        """
        is_replaced = not self.incarnation or rank in self._met
        self._met.add(rank)
        self.restarted[rank] = incarnation
        self._returned.discard(rank)
        for demultiplexer in self._demultiplexers.values():
            if is_replaced:
                demultiplexer.on_restarted(rank)
            elif demultiplexer.flow is not None:
                demultiplexer.flow.on_connected(rank)

    def notify_returned(self, rank: int) -> None:
        """Notify the listeners of :meth:`on_returned` of the restart of ``rank``."""
        self.events.add("returned", rank, self.restarted.get(rank, 0))
        for listener in list(self._returned_listeners):
            listener(rank)
        self.engine.recheck()

    def note_returned(self, ranks: RankSet) -> list[tuple[int, int]]:
        """Record that ``main`` has returned on ``ranks``.

        Return (tag, rank) pairs for which messages of this rank may still be in transit.
        """
        new = ranks - self._returned
        self._returned |= new
        return [(each.tag, rank) for each in self._demultiplexers.values() for rank in each.on_left(new)] if new else []

    @property
    def contacts(self) -> set[int]:
        """Ranks to which this rank has sent messages, or from which messages have arrived."""
        return self.sent_to | self.received_from

    def forget_returned(self, rank: int) -> None:
        """Remove a lost ``rank`` from the ranks on which ``main`` has returned."""
        self._returned.discard(rank)

    def watch_contacts(self, listener: Callable[[int], None]) -> None:
        """Call ``listener(rank)`` when the first message from a rank arrives."""
        self.received_from = _WatchedContacts(self.received_from, listener)
        for demultiplexer in self._demultiplexers.values():
            demultiplexer.receiver.contacts = self.received_from

    def stop_reading(self) -> None:
        """Drop the user's messages that arrive from now on. Called when ``main`` has returned on this rank."""
        for demultiplexer in self._demultiplexers.values():
            demultiplexer.leave()

    def drop_messages(self, tag: int) -> None:
        """Drop the user's messages on ``tag``, even without an open channel. Called when ``main`` has returned."""
        if tags.is_for_users(tag):
            self._demultiplexer(tag, is_users=True).leave()

    @property
    def is_sending(self) -> bool:
        """Whether any message sent on the user's channels has not left this rank yet."""
        return any(each.under_way_count for each in self._demultiplexers.values() if each.is_users)

    def leftovers(self, spoiled_tags: Collection[int] = ()) -> list[str]:
        """Describe unfinished requests, unread messages, streams and tasks. At the end of a rank, they are errors."""
        requests = Counter(self.engine.outstanding(spoiled_tags))
        found = [f"request: {what}" if n == 1 else f"{n} requests: {what}" for what, n in requests.items()]
        for demultiplexer in self._demultiplexers.values():
            tag = demultiplexer.tag
            found += [
                f"{channel.unread_count} unread messages in {channel.name}, tag {tag}"
                for channel in demultiplexer.channels()
                if channel.unread_count
            ]
            if demultiplexer.early_count:
                found.append(f"{demultiplexer.early_count} messages on tag {tag} for channels that were never opened")
        if count := self.slots.unanswered_count:
            found.append(f"{count} stream slots, {self.slots.discarding_count} of them discarding")
        found += [f"task {task.get_name()}" for task in self._tasks]
        for probe in self.leftover_probes:
            found += probe()
        return found

    def users_channels(self) -> list[tuple[int, ReceivingChannel]]:
        """Return the open channels of the user's program, each preceded by its tag."""
        users = [each for each in list(self._demultiplexers.values()) if each.is_users]
        return [(each.tag, channel) for each in users for channel in each.channels()]

    def last_sequences(self) -> Counter[int]:
        """Return, for each sender, a number that increases with each message from the sender."""
        found: Counter[int] = Counter()
        for each in list(self._demultiplexers.values()):
            for channel in each.channels():
                found.update(channel.inbox.last_sequences())
        return found

    def early_frames(self) -> list[str]:
        """Describe the stored messages for unopened channels, with one string for each tag."""
        return [each.early.describe() for each in self._demultiplexers.values() if each.early_count]

    def close(self) -> None:
        """Cancel the receives of all channels."""
        for demultiplexer in self._demultiplexers.values():
            demultiplexer.close()

    def channel_totals(self) -> ChannelTotals:
        """Return the numbers of messages sent, received and dropped on all channels since the start of the rank."""
        dropped: Counter[str] = Counter()
        drop_examples: dict[str, str] = {}
        sent_count = received_count = 0
        for demultiplexer in self._demultiplexers.values():
            dropped.update(demultiplexer.dropped)
            drop_examples.update(demultiplexer.drop_examples)
            sent_count += demultiplexer.sent_count
            received_count += demultiplexer.received_count
        return ChannelTotals(sent_count, received_count, dict(dropped), drop_examples)
