"""A rank's view of the job: who it is, its channels, its tasks, and the passing of time.

A world owns the rank's engine, lanes, tags, groups and slots. It is made by :func:`asyncdist.run` or
:func:`asyncdist.open_world`, which also end it; :mod:`asyncdist.runtime.run` has that story. Protocols are built on the
second half of the class (``open_channel``, ``agreements``, ``slots``, ``spawn_service``); they never see the transport.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import random
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterable, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, Final, ParamSpec, TypeVar

import torch

from asyncdist import tags, validation
from asyncdist.collectives.agreed_start import Start
from asyncdist.collectives.agreement import Agreements
from asyncdist.collectives.agreement_messages import Inquiry, Join, Objection, Reminder, Verdict, Withdraw
from asyncdist.collectives.group_ledger import Freed, GroupLedger
from asyncdist.collectives.groups import Group, check_open, check_ranks, short
from asyncdist.collectives.membership import MembershipLog
from asyncdist.collectives.nonblocking import Collectives, shielded
from asyncdist.errors import (
    AsyncdistError,
    BusyError,
    ClosedError,
    LocalProtocolError,
    RankLostError,
    RemoteProtocolError,
    StartTimeoutError,
)
from asyncdist.messaging import streams, wire
from asyncdist.messaging.channels import Channel, Envelope, Overflow, TagDemultiplexer
from asyncdist.messaging.engine import PROGRESS_BUDGET_S, Engine, EngineStatistics, yield_to_loop
from asyncdist.messaging.tensor_streams import UserStreams
from asyncdist.runtime.compute import Computing, VirtualClock
from asyncdist.tensors.model_cache import Scratch
from asyncdist.transports.base import Transport

logger = logging.getLogger("asyncdist.runtime.world")

P = ParamSpec("P")
T = TypeVar("T")

#: Messages that may wait in a protocol's channel, and sends that may be under way.
PROTOCOL_CAPACITY: Final = 4096
_GROUP_TIMEOUT_S: Final = 60.0
#: For how long a rank that is about to block keeps its loop to itself: an idle leader answers in less than 1 ms.
_HOLD_S: Final = 0.005


@dataclass(frozen=True, slots=True)
class Leave:
    """Sent to every peer: this rank's main has returned; it starts nothing collective any more.

    Attributes:
        started: how many collectives it has started, by the group's tag.
        lost: ranks that it knows to be lost.
    """

    started: tuple[tuple[int, int], ...] = ()
    lost: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Failed:
    """Sent to every peer: this rank has failed, and with it the job."""

    summary: str


@dataclass(frozen=True, slots=True)
class Farewell:
    """This rank has stopped: its answer to :class:`Failed`, or its end where losing a rank does not end the job.

    Attributes:
        started, lost: as of :class:`Leave`, which may have been spoiled, and dropped; None in a job that has failed:
            that is what the peers are to hear, and not that a member is missing.
    """

    started: tuple[tuple[int, int], ...] | None = None
    lost: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Unheard:
    """Answer to :class:`Leave`: messages for the leaver may be under way on a tag that it has never opened.

    It opens that tag and drops them, since some backends complete a large send only when it is received.
    """

    tag: int


@dataclass(frozen=True, slots=True)
class WorldStatistics:
    """Counts since the world was opened.

    Attributes:
        engine: passes, completions, outstanding requests.
        sent_count: messages sent on channels.
        received_count: messages received from channels.
        dropped: frames not delivered, by reason.
        drop_examples: what was wrong with the last one of each reason, where there is more to say.
        stream_sent_nbytes: bytes of bulk streams sent.
        stream_received_nbytes: bytes of bulk streams received.
    """

    engine: EngineStatistics
    sent_count: int
    received_count: int
    dropped: dict[str, int]
    drop_examples: dict[str, str]
    stream_sent_nbytes: int
    stream_received_nbytes: int


_current_world: ContextVar[World] = ContextVar("asyncdist_current_world")


def current_world() -> World:
    """The world of the rank that runs this task.

    Raises:
        RuntimeError: called outside ``asyncdist.run`` and ``asyncdist.open_world``.
    """
    try:
        return _current_world.get()
    except LookupError:
        raise RuntimeError(
            "no world here: call this inside asyncdist.run(main) or async with asyncdist.open_world()"
        ) from None


class World:
    """One rank of a running job. See the module's text.

    Attributes:
        rank: this rank, from 0.
        size: the number of ranks.
        group: all of them.
        engine: polls this rank's requests.
        slots: of the bulk streams that this rank receives.
        scratch: memory that is kept between collectives on one model.
        gone: ranks that have left or are lost.
        left: ranks that have stopped: main has returned there, or they have answered a failure elsewhere.
        attendance: who takes part in which collective.
        answered: ranks that have answered a failure, or failed themselves.
        leftover_probes: functions that name what a protocol has not cleared away, asked at the end.
        time: a function without arguments: seconds on the loop's clock, from an arbitrary start.
        virtual_clock: in a simulation, what computing costs.
    """

    def __init__(
        self, transport: Transport, loop: asyncio.AbstractEventLoop, *, nonce: int, group: Group, engine: Engine
    ) -> None:
        self.rank = transport.rank
        self.size = transport.size
        self.group = group
        self.engine = engine
        self.slots = streams.Slots(engine)
        self.scratch = Scratch()
        self.stream_sent_nbytes = 0
        self.stream_received_nbytes = 0
        self.gone: set[int] = set()
        self.left: set[int] = set()
        self._returned: set[int] = set()  # ranks whose main has returned
        self._has_returned = False
        self.answered: set[int] = set()
        self.leftover_probes: list[Callable[[], Sequence[str]]] = []
        self.time: Callable[[], float] = loop.time
        self.virtual_clock: VirtualClock | None = None
        self._transport = transport
        self._loop = loop
        self._nonce = nonce
        self._lanes: dict[int, TagDemultiplexer] = {}
        self._tags = tags.TagRegistry()
        self._scope_counts: Counter[tuple[tuple[int, ...], str]] = Counter()
        self._closed_counts: Counter[str] = Counter()
        self._gone_listeners: list[Callable[[int], None]] = []
        self._failure_listeners: list[Callable[[int, str], None]] = []
        self._defect_listeners: list[Callable[[BaseException], None]] = []
        self._group_starts: list[Start[Group]] = []  # the first one has its turn
        self._task_group: asyncio.TaskGroup | None = None
        self._services: set[asyncio.Task[Any]] = set()
        self._computing = Computing(self.rank, loop)
        self._system: Channel[Any] = self.open_channel(
            Join | Verdict | Withdraw | Leave | Failed | Farewell | Objection | Reminder | Inquiry | Unheard | Freed,
            tag=tags.CONTROL,
            scope=wire.scope_of(group.ranks, "system", 0),
            name="system",
            handler=self._on_system,
        )
        self.agreements = Agreements(engine, self._system, self.rank)
        self.attendance = MembershipLog()
        self.group_ledger = GroupLedger(self.attendance, self._free_group, self._forget_group)
        self.collectives = Collectives(engine, self.rank, self.spawn_service, self.attendance)
        transport.set_loss_listener(self.mark_lost)

    def __repr__(self) -> str:
        return f"<World rank {self.rank} of {self.size}, {self._transport.name}>"

    @property
    def transport_name(self) -> str:
        """``"local"``, ``"mpi"``, ..."""
        return self._transport.name

    @property
    def hostname(self) -> str:
        """Of the host that this rank is on; in a simulation ``"host0"``, ``"host1"``, ... as its network says."""
        return self._transport.hostname

    @property
    def shares_memory(self) -> bool:
        """Whether there are other ranks, which may map this one's memory where they are on its host."""
        return self.size > 1 and self._transport.capabilities.shares_memory

    def describe(self) -> str:
        """One line for reports: transport, library, ranks."""
        return self._transport.describe()

    # -- time and progress ------------------------------------------------------------------------------------------

    async def sleep(self, seconds: float) -> None:
        """Let others run for so long."""
        self.check()
        await asyncio.sleep(seconds)
        self.check()

    async def safe_point(self) -> None:
        """One pass over what is outstanding and one yield to the rank's other tasks.

        Raises:
            RankLostError: a peer has failed, and with it the job.
        """
        if self.virtual_clock is not None:
            await self.virtual_clock.before_safe_point()
        self.engine.poll()
        await yield_to_loop()
        self.check()

    def progress(self, budget_s: float = PROGRESS_BUDGET_S) -> Coroutine[Any, Any, None]:
        """Pass and yield in turn until a pass completes nothing or the budget is spent; at least one yield always.

        Args:
            budget_s: seconds; a pass under way is finished first.

        Raises:
            RankLostError: a peer has failed, and with it the job.
        """
        clock = self.virtual_clock
        return self.engine.progress(budget_s, before=clock.before_safe_point if clock is not None else None)

    def check(self) -> None:
        """Raise what ended the job, if anything did."""
        if self.engine.failure is not None:
            raise self.engine.failure

    async def compute(self, fn: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Run ``fn`` in a worker thread while the loop goes on; torch gives up the GIL inside its operators.

        The caller's grad, inference and CPU autocast modes hold in the thread. Meanwhile ``policy.step`` raises
        BusyError, since ``fn`` may be changing weights. A simulation starts no thread: it calls ``fn`` at a moment that
        it draws, within the time that this takes there.

        **Cancellation**: waits for ``fn`` all the same; a thread cannot be stopped, and it may be writing weights.

        Raises:
            BusyError: another ``compute`` of this rank is under way.
            RuntimeError: ``fn`` raised StopIteration, the error's cause: no coroutine can raise that. So use
                ``await world.compute(next, iterator, None)``, which returns None at the end of the data.
            BaseException: what else ``fn`` raised.
        """
        return await self._computing.run(self.virtual_clock, functools.partial(fn, *args, **kwargs))

    @property
    def is_computing(self) -> bool:
        """Whether a ``compute`` is under way."""
        return self._computing.is_under_way

    def generator(self, purpose: str) -> random.Random:
        """A generator of this rank's own: what it draws follows from the job, the rank and ``purpose`` alone.

        In a simulation it thus follows from the seed. Nobody else's random state is touched.
        """
        return random.Random(f"{self._nonce} {self.rank} {purpose}")

    # -- tasks ------------------------------------------------------------------------------------------------------

    def spawn(self, coroutine: Coroutine[Any, Any, T], *, name: str | None = None) -> asyncio.Task[T]:
        """Start a task that belongs to this rank's job: it is awaited at the end, and its failure is the job's.

        One that never ends keeps the rank from ending: it is to be left, cancelled, or its channel closed. Where such
        tasks do nothing but wait, main having returned, that is warned of (``watchdog_s`` of :func:`asyncdist.run`).
        """
        if self._task_group is None:
            coroutine.close()
            raise ClosedError("this world is closed")
        task = self._task_group.create_task(coroutine, name=name)
        task.add_done_callback(self._on_spawned_done)
        return task

    def _on_spawned_done(self, task: asyncio.Task[Any]) -> None:
        if not task.cancelled() and task.exception() is not None:
            self.agreements.on_own_failure()

    def spawned_tasks(self) -> list[asyncio.Task[Any]]:
        """What ``spawn`` has started and has not ended, by name."""
        tasks: set[asyncio.Task[Any]] = getattr(self._task_group, "_tasks", set())  # a TaskGroup shows them to nobody
        return sorted(tasks, key=lambda task: (len(task.get_name()), task.get_name()))

    def spawn_service(self, coroutine: Coroutine[Any, Any, T], *, name: str | None = None) -> asyncio.Task[T]:
        """Start a task of a protocol's own.

        The world waits for it after main has returned, and cancels it on failure.
        """
        task = self._loop.create_task(coroutine, name=name)
        self._services.add(task)
        task.add_done_callback(self._on_service_done)
        return task

    def _on_service_done(self, task: asyncio.Task[Any]) -> None:
        self._services.discard(task)
        error = None if task.cancelled() else task.exception()
        if error is not None:
            logger.debug("service %s ended with %r", task.get_name(), error)
            expected = isinstance(error, AsyncdistError) and not isinstance(error, RemoteProtocolError)
            for listener in () if expected else self._defect_listeners:
                listener(error)
        self.engine.recheck()

    # -- messages ---------------------------------------------------------------------------------------------------

    def channel(
        self,
        message_type: type[T],
        *,
        tag: int,
        name: str | None = None,
        capacity: int = 1024,
        group: Group | None = None,
    ) -> Channel[T]:
        """Open a channel. Ranks that open it under the same tag, name and group, equally often, hear each other.

        A tag belongs to one message type or name until all channels on it are closed here.

        Args:
            message_type: a frozen dataclass, or a union of them; see :mod:`asyncdist.messaging.wire` for the field
                types.
            tag: 0 to 7000 or 12097 to 32767.
            name: the message type's by default.
            capacity: messages that may wait here before this tag stops taking more.
            group: who uses it; everybody by default.

        Raises:
            LocalProtocolError: the tag is not free.
            TypeError: the message type cannot travel.
            ValueError: capacity below 1.
        """
        capacity = validation.count("capacity", capacity)
        name = name or str(getattr(message_type, "__name__", message_type))
        if group is not None:
            check_open(group)
        ranks = (group or self.group).ranks
        lane = self._lanes.get(tag)
        if lane is not None and not lane.channels():
            self._tags.release(tag)
        self._tags.claim(tag, f"channel {name!r}")
        scope = self.next_scope(ranks, f"channel {tag} {name}")
        return self.open_channel(message_type, tag=tag, scope=scope, name=name, capacity=capacity, overflow="stall")

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
    ) -> Channel[Any]:
        """A protocol's channel on any tag.

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
        """
        codec = wire.Codec(message_types)
        lane = self._lane(tag, is_users=overflow == "stall")
        return Channel(
            lane,
            codec,
            scope,
            name=name,
            capacity=capacity,
            overflow=overflow,
            peer_scope=peer_scope,
            handler=handler,
            left=self._returned if lane.is_users else (),
        )

    def _lane(self, tag: int, *, is_users: bool) -> TagDemultiplexer:
        lane = self._lanes.get(tag)
        if lane is None:
            lane = self._lanes[tag] = TagDemultiplexer(self.engine, tag, self._nonce, is_users=is_users)
        return lane

    def next_scope(self, ranks: Sequence[int], name: str) -> int:
        """A scope for the next user of ``name`` on ``ranks``; equal on all ranks that count alike."""
        key = (tuple(ranks), name)
        self._scope_counts[key] += 1
        return wire.scope_of(key[0], name, self._scope_counts[key])

    async def send_stream(self, tensor: torch.Tensor, dest: int) -> None:
        """Send a tensor of any size straight into the buffer of ``dest``'s ``receive_stream``.

        Args:
            tensor: contiguous, in CPU memory. It must not change until this returns.
            dest: the receiving rank.

        **Ordering**: the n-th stream between two ranks meets the n-th receive.
        **Cancellation**: before ``dest`` receives, nothing has been sent, and its receive meets the next stream. After
        that ``dest`` gets an abort; the tensor is in use until what is under way has left.

        Raises:
            LocalProtocolError: the receiver expects another size.
            RankLostError: the receiver is gone.
        """
        await self._streams.send(tensor, dest)

    async def receive_stream(self, tensor: torch.Tensor, source: int) -> torch.Tensor:
        """Receive into ``tensor``, in place; returns it.

        **Cancellation**: the sender is told to stop; the tensor is in use until it has answered.

        Raises:
            RemoteProtocolError: the sender gave up, or sends another size.
            RankLostError: the sender is gone.
        """
        return await self._streams.receive(tensor, source)

    def refuse_streams(self) -> None:
        """This rank sends no stream any more: whoever waits for one gets an abort."""
        self._streams.refuse_all()

    @functools.cached_property
    def _streams(self) -> UserStreams:
        return UserStreams(self, wire.scope_of(self.group.ranks, "streams", 0))

    # -- groups -----------------------------------------------------------------------------------------------------

    async def new_group(self, ranks: Sequence[int], *, timeout_s: float = _GROUP_TIMEOUT_S) -> Group:
        """Make a group. Collective among ``ranks``, which all pass the same list; the others take no part.

        There is room for some 900 groups at a time, and each takes a communicator where the backend has them:
        ``await group.free()``, or the group as an asynchronous context manager, gives them back.

        **Ordering**: a rank makes one group after the other, those that its tasks ask for together in the order in
        which they do. Ranks that are in several of them make these in the same order.

        Args:
            ranks: the members, this rank among them.
            timeout_s: how long to wait for this rank's turn and for the last member.

        Raises:
            LocalProtocolError: the list is no group, or this rank is not in it.
            ValueError: the timeout is no finite number of seconds above 0.
            DisagreementError: two ranks wait for each other with different lists, or in another order.
            StartTimeoutError: some members did not come in time, or this rank was still making another group; then the
                others get RemoteError.

        **Cancellation**: while members are missing, the others get RemoteError. Once all have come the group is made,
        and given back, before the cancellation is raised.
        """
        members = check_ranks(ranks, rank=self.rank, size=self.size)
        validation.seconds("timeout_s", timeout_s)

        async def make(start: Start[Group]) -> Group:
            async with self._turn(start, timeout_s):  # two at once would be given one tag
                taken = self.group_ledger.taken()
                agreed = await start.agree({}, timeout_s=timeout_s, taken=taken, alone=True)
                tag = self.group_ledger.tag_of(agreed.number)
                native = None
                if self._transport.capabilities.native_collectives:
                    await self.assemble(members, "new communicator")
                    native = self._transport.new_group(members, tag)
                return self.group_ledger.open(members, self.rank, tag, agreed.time, native)

        return await self.start_together(
            members, "new group", make, Group.free, name=f"new group of {len(members)} ranks"
        )

    @contextlib.asynccontextmanager
    async def _turn(self, start: Start[Group], timeout_s: float) -> AsyncIterator[None]:
        """Wait until this rank has made the groups that it was asked for before."""
        starts = self._group_starts
        starts.append(start)
        try:
            what = f"the turn of {start.meeting}, behind {starts[0].meeting}"
            deadline = start.meeting.began_at + timeout_s
            if not await self.engine.until(lambda: starts[0] is start, what, deadline=deadline):
                raise StartTimeoutError(
                    f"{start.meeting}: rank {self.rank} waited for {timeout_s:g} s to finish {starts[0].meeting} first",
                    missing=(),
                )
            yield
        finally:
            starts.remove(start)
            self.engine.recheck()

    async def new_groups(self, lists: Iterable[Sequence[int]], *, timeout_s: float = _GROUP_TIMEOUT_S) -> list[Group]:
        """Make several groups, one after the other. Where one cannot be made, those before it are freed.

        Args:
            lists: the members of each, this rank among them.
            timeout_s: for all of them together.

        Raises:
            AsyncdistError: as :meth:`new_group`.
        """
        made: list[Group] = []
        give_up_at = self.time() + timeout_s
        try:
            for ranks in lists:
                made += [await self.new_group(ranks, timeout_s=max(round(give_up_at - self.time(), 3), 0.001))]
        except AsyncdistError:
            for group in made:
                await group.free()
            raise
        return made

    async def start_together(
        self,
        ranks: Sequence[int],
        subject: str,
        work: Callable[[Start[T]], Coroutine[Any, Any, T]],
        give_back: Callable[[T], Awaitable[object]],
        *,
        name: str,
        leader: int | None = None,
        is_held: bool = False,
    ) -> T:
        """Do what the ranks have agreed to do together, to its end; see :mod:`asyncdist.collectives.agreed_start`.

        Args:
            ranks, subject, leader: what they agree on, see :meth:`Agreements.agree`.
            work: is given the start, and first awaits its :meth:`Start.agree`.
            give_back: is given what came of the work where the caller has given up.
            name: of the task that does it, for reports.
            is_held: whether a caller that gives up hears the leader's word first, since it must not be done later.
        """
        start = Start(self.agreements, self.agreements.next_meeting(ranks, subject, leader), give_back)
        task = self.spawn_service(start.run(work), name=name)
        return await start.result(task, is_held=is_held)

    async def _free_group(self, group: Group) -> None:
        """What :meth:`Group.free` does."""
        if group.lease.is_freed or self.engine.failure is not None:
            return
        group.lease.is_freed = True
        await shielded(self.spawn_service(self._end_group(group), name=f"the end of a group of {group.size} ranks"))

    async def _end_group(self, group: Group) -> None:
        what = f"the collectives of the group {short(group.ranks)} that this rank has started"
        await self.engine.until(lambda: not self.collectives.is_busy(group), what)
        freed = self.group_ledger.free(group)
        for rank in group.ranks:
            if rank != self.rank and rank not in self.gone:
                with contextlib.suppress(RankLostError):
                    self._system.send_nowait(freed, rank)

    def _forget_group(self, group: Group) -> None:
        for subject in group.lease.subjects:
            self.agreements.forget(group.ranks, subject)
        if self._transport.collective_checker is not None:
            self._transport.collective_checker.forget(group.ranks, group.key, self.rank)

    async def assemble(self, ranks: Sequence[int], what: str) -> None:
        """Return when all ``ranks`` are here, and what follows at once may block until all of them have entered it.

        None enters before every loop has got as far as this: so that nobody blocks while another one computes. A rank
        that has come keeps its loop to itself for a moment, since a task of it may be about to compute; after that,
        and in all cases where two ranks compute again and again, a loop may be blocked for the length of one step.

        Args:
            ranks: who have agreed on it: only a failure of the job may keep one of them away, or cancel this.
            what: what follows; equal on all ranks.
        """
        if len(ranks) > 1:
            await self.agreements.agree(ranks, what, {}, timeout_s=None, hold_s=_HOLD_S)

    # -- leaving and failing ----------------------------------------------------------------------------------------

    def on_gone(self, listener: Callable[[int], None]) -> None:
        """``listener(rank)`` when a peer has left or is lost."""
        self._gone_listeners.append(listener)

    def off_gone(self, listener: Callable[[int], None]) -> None:
        """Tell ``listener`` no more."""
        if listener in self._gone_listeners:
            self._gone_listeners.remove(listener)

    def on_failure(self, listener: Callable[[int, str], None]) -> None:
        """``listener(rank, summary)`` when a peer has failed."""
        self._failure_listeners.append(listener)

    def on_defect(self, listener: Callable[[BaseException], None]) -> None:
        """``listener(error)`` when a service has failed: nobody awaits it, and it must not end in silence."""
        self._defect_listeners.append(listener)

    def mark_gone(self, rank: int, *, of_a_failure: bool = False, is_lost: bool = False) -> None:
        """``rank`` takes part in nothing any more; ``of_a_failure``: another one's, of which all will hear soon."""
        if rank not in self.gone:
            self.gone.add(rank)
            if not of_a_failure:
                self.agreements.on_gone(rank, is_lost=is_lost)
                self.group_ledger.on_gone()
            for listener in list(self._gone_listeners):
                listener(rank)
            self.engine.recheck()  # now: what the listeners noted is waited for

    def mark_lost(self, rank: int) -> None:
        """``rank`` has died, perhaps after its main had returned: what it still served, a coordinator, goes now."""
        self.left.discard(rank)
        self._returned.discard(rank)
        self.gone.discard(rank)
        self.attendance.on_lost(rank)
        self.mark_gone(rank, is_lost=True)

    def _on_system(self, envelope: Envelope[Any]) -> None:
        """What the runtimes say to each other."""
        source = envelope.source
        match envelope.message:
            case Join() as join:
                self.agreements.on_join(join, source)
            case Verdict() as verdict:
                self.agreements.on_verdict(verdict)
            case Objection() as objection:
                self.agreements.on_objection(objection, source)
            case Reminder() as reminder:
                self.agreements.on_reminder(reminder)
            case Inquiry() as inquiry:
                self.agreements.on_inquiry(inquiry)
            case Withdraw(subject):
                self.agreements.on_withdraw(subject, source)
            case Freed() as freed:
                self.group_ledger.on_freed(freed, source)
            case Leave(started, lost):
                self._on_left(source, started, lost)
                self.mark_gone(source)
            case Failed(summary):
                self.answered.add(source)
                for listener in self._failure_listeners:
                    listener(source, summary)
            case Farewell(started, lost):
                self.answered.add(source)
                self.left.add(source)
                if started is not None:
                    self._on_left(source, started, lost)
                self.mark_gone(source, of_a_failure=started is None)
            case Unheard(tag):
                if self._has_returned and tags.is_for_users(tag):
                    self._lane(tag, is_users=True).leave()
        self.engine.recheck()

    def _on_left(self, rank: int, started: Sequence[tuple[int, int]], lost: Sequence[int]) -> None:
        """Main has returned on ``rank``."""
        self.left.add(rank)
        self.attendance.on_left(rank, dict(started), lost)
        if rank not in self._returned:
            self._returned.add(rank)
            for lane in self._lanes.values():
                if lane.on_left(rank):
                    self._system.send_nowait(Unheard(lane.tag), rank)

    def leave(self) -> None:
        """Tell every peer that main has returned here, and before it what else they have to know of this rank.

        The farewell that follows says it again: one frame of the two may be spoiled, and dropped.
        """
        self._has_returned = True
        for lane in self._lanes.values():
            lane.leave()
        self.agreements.leave()
        self.announce(Leave(self.attendance.started(), self.attendance.lost))

    def announce(self, message: Leave | Failed | Farewell) -> None:
        """Tell every peer that can still hear it."""
        lost = self._transport.lost_ranks()
        for rank in range(self.size):
            if rank != self.rank and rank not in lost:
                with contextlib.suppress(RankLostError, BusyError):
                    self._system.send_nowait(message, rank)

    @property
    def service_count(self) -> int:
        """Tasks of protocols that are still running."""
        return len(self._services)

    def cancel_services(self) -> None:
        """End them."""
        for task in list(self._services):
            task.cancel()

    def check_peer(self, rank: int) -> None:
        """Refuse what is no rank.

        Raises:
            LocalProtocolError: there is no such rank.
            RankLostError: the job has failed.
        """
        if type(rank) is not int or not 0 <= rank < self.size:
            raise LocalProtocolError(f"rank {rank!r} does not exist; ranks go from 0 to {self.size - 1}", rank=rank)
        self.check()

    @property
    def is_sending(self) -> bool:
        """Whether messages on a user's channels have not left yet."""
        return any(lane.under_way_count for lane in self._lanes.values() if lane.is_users)

    @property
    def is_open(self) -> bool:
        """Whether main may run."""
        return self._task_group is not None

    def attach_tasks(self, task_group: asyncio.TaskGroup | None) -> None:
        """Where ``spawn`` puts its tasks; None when it may not any more."""
        self._task_group = task_group

    def leftovers(self) -> list[str]:
        """What a clean end does not leave behind, in words."""
        requests = Counter(self.engine.outstanding())
        found = [f"request: {what}" if n == 1 else f"{n} requests: {what}" for what, n in requests.items()]
        for lane in self._lanes.values():
            found += [
                f"{c.unread_count} unread messages in {c.name}, tag {lane.tag}"
                for c in lane.channels()
                if c.unread_count
            ]
            if lane.early_count:
                found.append(f"{lane.early_count} messages on tag {lane.tag} for channels that were never opened")
        if count := self.slots.unanswered_count:
            found.append(f"{count} stream slots, {self.slots.discarding_count} of them discarding")
        found += [f"task {task.get_name()}" for task in self._services]
        for probe in self.leftover_probes:
            found += probe()
        return found

    def early_frames(self) -> list[str]:
        """What has arrived for channels that are not open here, in words, by tag."""
        return [lane.describe_early() for lane in self._lanes.values() if lane.early_count]

    def close_lanes(self) -> None:
        """Take the receives back."""
        if "_streams" in self.__dict__:  # somebody has streamed
            self._streams.close()
        for lane in self._lanes.values():
            lane.close()
        self._computing.close()

    def statistics(self) -> WorldStatistics:
        """Counts since the world was opened."""
        dropped: Counter[str] = Counter()
        drop_examples: dict[str, str] = {}
        sent = received = 0
        for lane in self._lanes.values():
            dropped.update(lane.dropped)
            drop_examples.update(lane.drop_examples)
            sent += lane.sent_count
            received += lane.received_count
        return WorldStatistics(
            engine=self.engine.statistics(),
            sent_count=sent,
            received_count=received,
            dropped=dict(dropped),
            drop_examples=drop_examples,
            stream_sent_nbytes=self.stream_sent_nbytes,
            stream_received_nbytes=self.stream_received_nbytes,
        )
