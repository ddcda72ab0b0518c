"""The services that a rank offers to protocols: the engine, channels, stream slots, background tasks and news of peers.

Protocols, streams and versioned windows are written against :class:`Services` and not against
:class:`asyncdist.World`, so that they depend on messages alone and not on how a rank starts and ends. A world has them
as ``world.services``. The runtime, which starts and ends the rank, uses the last part of the class.
"""

from __future__ import annotations

import asyncio
import functools
import logging
import os
from collections import Counter
from collections.abc import Callable, Collection, Coroutine, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Final, TypeVar

from asyncdist import tags
from asyncdist.errors import AsyncdistError, LocalProtocolError, RankLostError, RemoteProtocolError
from asyncdist.messaging import streams, wire
from asyncdist.messaging.channels import Channel, Envelope, Overflow
from asyncdist.messaging.demultiplexer import ReceivingChannel, TagDemultiplexer
from asyncdist.messaging.engine import Engine
from asyncdist.messaging.polling import clock_of
from asyncdist.recording.events import EventLog
from asyncdist.transports.rank_sets import RankSet
from asyncdist.waits import WaitId

logger = logging.getLogger("asyncdist.messaging.services")

T = TypeVar("T")

#: How many messages may wait in a protocol's channel, and how many sends may be under way.
PROTOCOL_CAPACITY: Final = 4096


@dataclass(frozen=True, slots=True)
class ChannelStatistics:
    """Counts over all channels of a rank.

    Attributes:
        sent_count: messages sent.
        received_count: messages received.
        dropped: frames that were not delivered, by reason.
        drop_examples: for each reason what was wrong with the last frame, where there is more to say.
    """

    sent_count: int
    received_count: int
    dropped: dict[str, int]
    drop_examples: dict[str, str]


class _WatchedContacts(set[int]):
    """Tells a listener of each rank that is added.

    Args:
        contacts: the ranks that are there.
        listener: called with the rank.
    """

    def __init__(self, contacts: Iterable[int], listener: Callable[[int], None]) -> None:
        super().__init__(contacts)
        self._listener = listener

    def add(self, rank: int) -> None:
        if rank not in self:
            super().add(rank)
            self._listener(rank)


class Services:
    """The services of one rank.

    Attributes:
        rank: this rank, from 0.
        size: the number of ranks.
        incarnation: how often this rank has been started again.
        may_return: whether lost ranks are started again.
        survives_loss: whether the others go on when a rank is lost.
        is_admitted: whether the others count on this rank, so that its failure ends the job. A rank that was started
            again is admitted by the first policy or group that takes it.
        nonce: identifies the job.
        hosts: for each rank the first one on its host; None where that is not known, or all are on one host. It is the
            same on all ranks, unless one was lost while they met.
        time: a function without arguments that returns seconds on the loop's clock, from an arbitrary start.
        engine: polls the requests of this rank.
        slots: the slots of the bulk streams that this rank receives, and the bytes of all its streams.
        gone: ranks that have left or are lost.
        restarted: ranks whose process is not the first one that this rank has met, each with its incarnation. Protocols
            that admit no such rank take it for gone.
        left: ranks that have stopped: main has returned there, or they have answered a failure elsewhere.
        sent_to: ranks to which this one has sent messages on channels (of those with ``counts_contacts``).
        heard_from: ranks from which such messages have come.
        progress_probes: functions that tell what a policy has done so far, as a
            :class:`~asyncdist.live.counters.PolicyCounters`; they only read, since another thread may ask.
        last_progress: what the policy said that was closed last.
        events: what has happened on this rank lately.
        read_nbytes: bytes that were read in the memory of other ranks.
        waited_s: how long the user's tasks have waited, all together, since :meth:`count_waits`; services of protocols
            wait all the time.
        end_recording: ends what is written down of this rank, as the death of its process does; given a text and the
            seconds for which main has waited for that, where it is to be told. A simulated rank dies alone.
        reports_in_turn: whether this rank replays one of a process of its own, which waits before it reports how it
            failed: a lower rank may report the same.
        leftover_probes: functions that name what a protocol has not cleared away; they are asked at the end.

    Args:
        engine: this rank's.
        loop: runs this rank.
        nonce: identifies the job; a frame of another job is dropped.
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
        self._met: set[int] = set()  # by this process, if it has been started again
        self.slots = streams.Slots(engine, self.restarted)
        self.left = RankSet()
        self.sent_to: set[int] = set()
        self.heard_from: set[int] = set()
        self.progress_probes: list[Callable[[], Any]] = []
        self.last_progress: Any = None
        self.leftover_probes: list[Callable[[], Sequence[str]]] = []
        self.events = EventLog(clock_of(loop))
        self.end_recording: Callable[[WaitId | None, float], None] | None = None
        self.reports_in_turn = False
        self.read_nbytes = 0
        self.waited_s = 0.0
        self._on_waited: Callable[[WaitId, float], None] | None = None
        self._loop = loop
        self.nonce = nonce
        self._returned = RankSet()  # ranks whose main has returned
        self._demultiplexers: dict[int, TagDemultiplexer] = {}
        self._tags = tags.TagRegistry()
        self._scope_counts: Counter[tuple[tuple[int, ...], str]] = Counter()
        self._gone_listeners: list[tuple[Callable[[int], None], RankSet | None]] = []
        self._returned_listeners: list[Callable[[int], None]] = []
        self._defect_listeners: list[Callable[[BaseException], None]] = []
        self._tasks: set[asyncio.Task[Any]] = set()
        self._shared: dict[Callable[[Services], Any], Any] = {}

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
        """Open a protocol's channel, on any tag.

        Args:
            message_types: a frozen dataclass, or a union of them.
            tag: reserved ones included.
            scope: one that only this protocol's ranks use.
            name: for reports.
            capacity: messages that may wait here, and sends that may be under way.
            overflow: what happens beyond that; see :mod:`asyncdist.messaging.channels`.
            peer_scope: what the messages sent here are addressed to, where two roles talk to each other; ``scope`` by
                default.
            handler: called with each message as it arrives, inside a pass, in place of a mailbox.
            epoch: of the first messages, where the protocol has epochs; see :meth:`Channel.enter_epoch`.
            earlier_handler: called with each message of an earlier epoch; without it these are only counted.
            admits_restarted: whether messages go to a rank that is started again while the channel is open, though it
                has sent none; see :meth:`Channel.on_restarted`.
            counts_contacts: whether the ranks that it exchanges messages with are in :attr:`sent_to` and
                :attr:`heard_from`.
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
        """Open a channel of a user's program; see :meth:`asyncdist.World.channel`.

        Raises:
            LocalProtocolError: the tag is not free.
            TypeError: the message type cannot travel.
        """
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
        """Return an error if all others of ``ranks`` are gone for good, and some of them lost."""
        if len(self.gone) < len(ranks) - 1 or self.may_return:
            return None
        lost = self.lost_ranks().intersection(ranks)
        if not lost or not all(rank in self.gone for rank in ranks if rank != self.rank):
            return None
        return RankLostError(f"{name}: nobody is left who could send: rank {min(lost)} is lost", rank=min(lost))

    def next_scope(self, ranks: Sequence[int], name: str) -> int:
        """Return a scope for the next user of ``name`` on ``ranks``; it is equal on all ranks that count alike."""
        key = (tuple(ranks), name)
        self._scope_counts[key] += 1
        return wire.scope_of(key[0], name, self._scope_counts[key])

    def _demultiplexer(self, tag: int, *, is_users: bool) -> TagDemultiplexer:
        found = self._demultiplexers.get(tag)
        if found is None:
            found = self._demultiplexers[tag] = TagDemultiplexer(
                self.engine, tag, self.nonce, is_users=is_users, sent_to=self.sent_to, heard_from=self.heard_from
            )
        return found

    def shared(self, make: Callable[[Services], T]) -> T:
        """Return what ``make(self)`` has returned the first time: an object that this rank has once."""
        if make not in self._shared:
            self._shared[make] = make(self)
        found: T = self._shared[make]
        return found

    # -- tasks ------------------------------------------------------------------------------------------------------

    def spawn_service(self, coroutine: Coroutine[Any, Any, T], *, name: str | None = None) -> asyncio.Task[T]:
        """Start a task of a protocol. The rank awaits it after main has returned, and cancels it on failure."""
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
        """Call ``listener(error)`` when a service task fails: no other task awaits it, and the error must be seen."""
        self._defect_listeners.append(listener)

    def count_waits(self, on_waited: Callable[[WaitId, float], None] | None = None) -> None:
        """Count from now on how long the user's tasks wait; it costs each wait a microsecond.

        Args:
            on_waited: Called with what such a task has waited for, and the seconds.
        """
        self._on_waited = on_waited or self._on_waited
        self.engine.on_waited = self._note_wait

    def _note_wait(self, what: WaitId, seconds: float) -> None:
        if not self.is_service(asyncio.current_task()):
            self.waited_s += seconds
            if self._on_waited is not None:
                self._on_waited(what, seconds)

    @property
    def task_count(self) -> int:
        """The number of service tasks that are still running."""
        return len(self._tasks)

    def is_service(self, task: asyncio.Task[Any] | None) -> bool:
        """Return whether :meth:`spawn_service` has started that task."""
        return task in self._tasks

    def cancel_tasks(self) -> None:
        """Cancel all service tasks."""
        for task in list(self._tasks):
            task.cancel()

    # -- peers ------------------------------------------------------------------------------------------------------

    def check_peer(self, rank: int) -> None:
        """Refuse a number that is not a rank.

        Raises:
            LocalProtocolError: there is no such rank.
            RankLostError: the job has failed.
        """
        if type(rank) is not int or not 0 <= rank < self.size:
            raise LocalProtocolError(f"rank {rank!r} does not exist; ranks go from 0 to {self.size - 1}", rank=rank)
        if self.engine.failure is not None:
            raise self.engine.failure

    def lost_ranks(self) -> frozenset[int]:
        """Return the ranks that ended without leaving."""
        return self.engine.transport.lost_ranks()

    def left_world(self) -> frozenset[int]:
        """Return the ranks that have left, also before this rank, which was started again, was connected to them."""
        return self.engine.transport.missed_ranks().union(self.left)

    def is_unmet(self, rank: int) -> bool:
        """Return whether ``rank`` is lost here only since this rank, which was started again, is not connected yet."""
        if not self.incarnation or rank == self.rank or rank in self._met:
            return False
        return rank not in self.engine.transport.vacant_ranks()

    def on_gone(self, listener: Callable[[int], None], *, among: Iterable[int] | None = None) -> None:
        """Call ``listener(rank)`` for each rank, or each ``among`` them, that leaves or is lost from now on."""
        self._gone_listeners.append((listener, None if among is None else RankSet(among)))

    def off_gone(self, listener: Callable[[int], None]) -> None:
        """Stop calling ``listener``."""
        self._gone_listeners = [each for each in self._gone_listeners if each[0] != listener]

    def on_returned(self, listener: Callable[[int], None]) -> None:
        """Call ``listener(rank)`` for each lost rank in whose place a new process is from now on."""
        self._returned_listeners.append(listener)

    def off_returned(self, listener: Callable[[int], None]) -> None:
        """Stop calling ``listener``."""
        if listener in self._returned_listeners:
            self._returned_listeners.remove(listener)

    # -- for the runtime --------------------------------------------------------------------------------------------

    def tell_gone(self, ranks: RankSet) -> None:
        """Call the listeners of :meth:`on_gone`; ``ranks`` have been added to :attr:`gone`."""
        for listener, among in list(self._gone_listeners):
            for rank in ranks if among is None else ranks & among:
                listener(rank)
        for demultiplexer in self._demultiplexers.values():
            if demultiplexer.is_users:
                demultiplexer.on_gone()
        self.engine.recheck()  # now: what the listeners noted is waited for

    def note_restarted(self, rank: int, incarnation: int) -> None:
        """Forget what belongs to the process before: its frames that no channel has taken are dropped and counted.

        A process that has itself been started again comes to know most others after it has opened channels. These are
        nobody's in whose place another one was known before.
        """
        is_replaced = not self.incarnation or rank in self._met
        self._met.add(rank)
        self.restarted[rank] = incarnation
        self._returned.discard(rank)
        if is_replaced:
            for demultiplexer in self._demultiplexers.values():
                demultiplexer.on_restarted(rank)

    def tell_returned(self, rank: int) -> None:
        """Call the listeners of :meth:`on_returned`."""
        self.events.add("returned", rank, self.restarted.get(rank, 0))
        for listener in list(self._returned_listeners):
            listener(rank)
        self.engine.recheck()

    def note_returned(self, ranks: RankSet) -> list[tuple[int, int]]:
        """Note that main has returned on ``ranks``, which read users' messages no more.

        Returns:
            The tags on which messages may be under way that a rank has to drop, each with the rank; none the second
            time.
        """
        new = ranks - self._returned
        self._returned |= new
        return [(each.tag, rank) for each in self._demultiplexers.values() for rank in each.on_left(new)] if new else []

    @property
    def contacts(self) -> set[int]:
        """Ranks with which this one has exchanged messages."""
        return self.sent_to | self.heard_from

    def forget_returned(self, rank: int) -> None:
        """Forget that main has returned on ``rank``: it is lost."""
        self._returned.discard(rank)

    def watch_contacts(self, listener: Callable[[int], None]) -> None:
        """Call ``listener(rank)`` when the first message comes from a rank, of whom none has come before."""
        self.heard_from = _WatchedContacts(self.heard_from, listener)
        for demultiplexer in self._demultiplexers.values():
            demultiplexer.receiver.contacts = self.heard_from

    def stop_reading(self) -> None:
        """Drop users' messages from now on: main has returned on this rank."""
        for demultiplexer in self._demultiplexers.values():
            demultiplexer.leave()

    def drop_messages(self, tag: int) -> None:
        """Drop users' messages on a tag, which this rank may never have opened; main has returned here."""
        if tags.is_for_users(tag):
            self._demultiplexer(tag, is_users=True).leave()

    @property
    def is_sending(self) -> bool:
        """Whether messages on a user's channels have not left yet."""
        return any(each.under_way_count for each in self._demultiplexers.values() if each.is_users)

    def leftovers(self, spoiled_tags: Collection[int] = ()) -> list[str]:
        """Describe what a clean end does not leave behind; for ``spoiled_tags`` see :meth:`Engine.outstanding`."""
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
        """Return the channels of the user's program that are open, each with its tag."""
        users = [each for each in list(self._demultiplexers.values()) if each.is_users]
        return [(each.tag, channel) for each in users for channel in each.channels()]

    def last_sequences(self) -> Counter[int]:
        """Return a number for each rank from which messages have come; it changes with each of them."""
        found: Counter[int] = Counter()
        for each in list(self._demultiplexers.values()):
            for channel in each.channels():
                found.update(channel.inbox.last_sequences())
        return found

    def early_frames(self) -> list[str]:
        """Describe, for each tag, what has arrived for channels that are not open here."""
        return [each.early.describe() for each in self._demultiplexers.values() if each.early_count]

    def close(self) -> None:
        """Take back the receives of all channels."""
        for demultiplexer in self._demultiplexers.values():
            demultiplexer.close()

    def channel_statistics(self) -> ChannelStatistics:
        """Return the counts over all channels since the rank was started."""
        dropped: Counter[str] = Counter()
        drop_examples: dict[str, str] = {}
        sent_count = received_count = 0
        for demultiplexer in self._demultiplexers.values():
            dropped.update(demultiplexer.dropped)
            drop_examples.update(demultiplexer.drop_examples)
            sent_count += demultiplexer.sent_count
            received_count += demultiplexer.received_count
        return ChannelStatistics(sent_count, received_count, dict(dropped), drop_examples)
