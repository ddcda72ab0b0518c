"""Gives a user's program its view of the job: its rank, channels, tasks, groups, and the passing of time.

:func:`asyncdist.run` and :func:`asyncdist.open_world` make a world and end it; :mod:`asyncdist.runtime.run` tells how.
Protocols use ``world.services``, and what ranks do together, ``world.collectives`` and ``world.agreements``; they never
see the transport. What the runtime knows of the other ranks is in ``world.peers``.
"""

from __future__ import annotations

import asyncio
import builtins
import functools
import os
import random
import types
from collections.abc import Callable, Coroutine, Iterable, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any, Final, ParamSpec, TypeVar

import torch

from asyncdist import validation
from asyncdist.collectives.groups import Group, check_open
from asyncdist.errors import ClosedError, LocalProtocolError
from asyncdist.live.counters import RankCounters, counters_of
from asyncdist.messaging import wire
from asyncdist.messaging.channels import Channel
from asyncdist.messaging.engine import PROGRESS_BUDGET_S as PROGRESS_BUDGET_S, EngineStatistics
from asyncdist.messaging.services import Services
from asyncdist.messaging.user_streams import UserStreams
from asyncdist.runtime.compute import Computing, VirtualClock
from asyncdist.runtime.peers import Peers
from asyncdist.tensors.model_cache import Scratch
from asyncdist.waits import WaitId, WaitKind

P = ParamSpec("P")
T = TypeVar("T")

GROUP_TIMEOUT_S: Final = 60.0


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
        events: how often each kind of event has happened: those of :mod:`asyncdist.recording.events`, steps and
            messages apart; of roles each state by itself, as in ``"role giving"``.
    """

    engine: EngineStatistics
    sent_count: int
    received_count: int
    dropped: dict[str, int]
    drop_examples: dict[str, str]
    stream_sent_nbytes: int
    stream_received_nbytes: int
    events: dict[str, int] = field(default_factory=dict)


_current_world: ContextVar[World] = ContextVar("asyncdist_current_world")


_FOR_ALL_CELLS: Final = (
    ". A world that a cell of a notebook has opened is that cell's; world = asyncdist.blocking.process_world() opens "
    "one for all cells"
)


def current_world() -> World:
    """Return the world of the rank that runs this task.

    Raises:
        RuntimeError: called outside ``asyncdist.run`` and ``asyncdist.open_world``.
    """
    try:
        return _current_world.get()
    except LookupError:
        if _world_of_process is not None and _world_of_process.is_open:
            return _world_of_process
        raise RuntimeError(
            "no world here: call this inside asyncdist.run(main) or async with asyncdist.open_world()"
            + (_FOR_ALL_CELLS if hasattr(builtins, "get_ipython") else "")
        ) from None


_world_of_process: World | None = None


def set_world_of_process(world: World | None) -> None:
    """Let code in any context find this world, as long as it is open and nothing else is."""
    global _world_of_process
    _world_of_process = world


def refuse_inside_a_world() -> None:
    """Raise LocalProtocolError where the code of a rank would open a second world."""
    here = _current_world.get(None)
    if here is not None and here.is_open and here.process_id == os.getpid():  # a forked child is no rank
        lasting, way_out = "", "use that one, as asyncdist.current_world() returns it"
        if here is _world_of_process:
            lasting = " until the process ends"
            way_out += ", or, for another one, another process (in a notebook: restart the kernel)"
        raise LocalProtocolError(f"a world is open here already{lasting}, {here!r}: {way_out}", rank=here.rank)


class World:
    """Represents one rank of a running job.

    Attributes:
        rank: this rank, from 0.
        size: the number of ranks.
        process_id: the process that hosts it.
        local_rank: this rank's number among those of its host, from 0, as its launcher has it.
        group: the group of all ranks.
        time: a function without arguments that returns seconds on the loop's clock, from an arbitrary start.
        services: what protocols use in place of this class: channels on reserved tags, background tasks, stream slots.
        collectives: the collectives of this rank, below :mod:`asyncdist.functional`.
        agreements: what ranks agree on before they do it together.
        scratch: memory that is kept between collectives on one model.
        peers: what the runtime knows of the other ranks, and tells them of this one.
        virtual_clock: in a simulation, what computing costs.

    Args:
        services: of this rank.
        loop: runs this rank.
        nonce: identifies the job.
        group: the group of all ranks.
    """

    def __init__(self, services: Services, loop: asyncio.AbstractEventLoop, *, nonce: int, group: Group) -> None:
        self.rank = services.rank
        self.size = services.size
        self.process_id = services.process_id
        self.local_rank = services.engine.transport.local_rank
        self.group = group
        self.time = services.time
        self.services = services
        self.peers = Peers(services, group)
        self.collectives = self.peers.collectives
        self.agreements = self.peers.agreements
        self.scratch = Scratch()
        self.virtual_clock: VirtualClock | None = None
        self._engine = services.engine
        self._transport = services.engine.transport
        self._nonce = nonce
        self._task_group: asyncio.TaskGroup | None = None
        self._main: asyncio.Task[Any] | None = None
        wake_by = services.engine.wake_by
        self._computing = Computing(self.rank, loop, functools.partial(wake_by, WaitId(WaitKind.COMPUTE)))
        self._file_work = Computing(self.rank, loop, functools.partial(wake_by, WaitId(WaitKind.FILE_WORK)))
        self._models_in_use: list[object] = []

    def __repr__(self) -> str:
        return f"<World rank {self.rank} of {self.size}, {self._transport.name}>"

    @property
    def incarnation(self) -> int:
        """Which process of its place this is: 0 for one of the beginning, 1 or more for one that has come later.

        It counts how often the rank was started again; the first process of a place that was empty at the beginning has
        1 too.

        A process with a higher number joins ranks that go on without it. The group of all ranks has ended with the one
        before: collectives and groups need a group made since. It is admitted to policies that can do that, see
        :class:`protocols.AsyncSelectiveAveragingPolicy`. Ranks that it has not met yet are among the lost ones. An
        error that ends it before a policy or a group has taken it is no failure of the job: it is lost once more.
        """
        return self._transport.incarnation

    @property
    def transport_name(self) -> str:
        """The name of the transport: ``"local"``, ``"mpi"``, ..."""
        return self._transport.name

    @property
    def hostname(self) -> str:
        """The name of this rank's host; in a simulation ``"host0"``, ``"host1"``, ... as its network says."""
        return self._transport.hostname

    @property
    def device(self) -> torch.device:
        """The device of this rank: the GPU whose index is ``local_rank``, of those that it sees; the CPU without one.

        Where ranks of a host are more than GPUs, they share them; a rank that sees one GPU has that.
        """
        count = torch.cuda.device_count()
        return torch.device("cuda", self.local_rank % count) if count else torch.device("cpu")

    @property
    def is_simulated(self) -> bool:
        """Whether this is a rank of a simulation: what it writes, it writes for real, and beside all others."""
        return self.virtual_clock is not None

    @property
    def shares_memory(self) -> bool:
        """Whether there are other ranks, which may map this one's memory where they are on its host."""
        return self.size > 1 and self._transport.capabilities.shares_memory

    def describe(self) -> str:
        """Return one line for reports: transport, library, ranks."""
        return self._transport.describe()

    # -- time and progress ------------------------------------------------------------------------------------------

    async def sleep(self, seconds: float) -> None:
        """Let other tasks run for so many seconds."""
        self.check()
        await asyncio.sleep(seconds)
        self.check()

    def safe_point(self) -> Coroutine[Any, Any, None]:
        """Make one pass over what is outstanding, and yield once to the rank's other tasks, if there are any.

        Raises:
            RankLostError: a peer has failed, and with it the job.
        """
        return self._engine.safe_point()

    def progress(self, budget_s: float = PROGRESS_BUDGET_S) -> Coroutine[Any, Any, None]:
        """Make passes, and yield after each, until one completes nothing or the budget is spent; at least one yield.

        Args:
            budget_s: seconds; a pass under way is finished first.

        Raises:
            RankLostError: a peer has failed, and with it the job.
        """
        return self._engine.safe_point(budget_s)

    def check(self) -> None:
        """Raise what ended the job, if anything did."""
        if self._engine.failure is not None:
            raise self._engine.failure

    async def compute(self, fn: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Run ``fn`` in a worker thread while the loop goes on; torch gives up the GIL inside its operators.

        The caller's grad, inference and autocast modes, torch's default device and the current GPU hold in the thread.
        Meanwhile ``policy.step`` raises BusyError, since ``fn`` may be changing weights. A simulation starts no thread:
        it calls ``fn`` at a moment that it draws, within the time that this takes there.

        **Cancellation**: waits for ``fn`` all the same; a thread cannot be stopped, and it may be writing weights.

        Raises:
            BusyError: another ``compute`` of this rank is under way.
            RuntimeError: ``fn`` raised StopIteration, the error's cause: no coroutine can raise that. So use
                ``await world.compute(next, iterator, None)``, which returns None at the end of the data.
            BaseException: what else ``fn`` raised.
        """
        return await self._computing.run(self.virtual_clock, functools.partial(fn, *args, **kwargs))

    async def do_file_work(self, fn: Callable[[], T], *, model: object = None) -> T:
        """Run ``fn``, which copies a state, reads a file or writes one, in a thread beside that of :meth:`compute`.

        One after the other. **Cancellation**: as of :meth:`compute`.

        Args:
            fn: the function.
            model: the model whose weights it reads; its policies refuse steps meanwhile.
        """
        self._models_in_use.append(model)
        try:
            return await self._file_work.run_in_turn(self.virtual_clock, fn)
        finally:
            self._models_in_use.remove(model)

    @property
    def is_computing(self) -> bool:
        """Whether a ``compute``, or work on files, is under way."""
        return self._computing.is_under_way or self._file_work.is_under_way

    def is_in_use(self, model: object) -> bool:
        """Whether a thread may be changing the weights of ``model``, or is reading them."""
        return self._computing.is_under_way or (bool(self._models_in_use) and self._is_in_file_work(model))

    def _is_in_file_work(self, model: object) -> bool:
        return any(each is model for each in self._models_in_use)

    def is_computed(self, future: object) -> bool:
        """Whether ``future`` is what the ``compute`` or the work on files that is under way waits for."""
        return self._computing.settles(future) or self._file_work.settles(future)

    def frame_of(self, future: object) -> types.FrameType | None:
        """Return where the function stands, in its thread, for whose end ``future`` waits; None where none is known."""
        each = self._computing if self._computing.settles(future) else self._file_work
        return each.frame() if each.settles(future) else None

    def generator(self, purpose: str) -> random.Random:
        """Return a generator whose draws follow from the job, the rank and ``purpose`` alone.

        In a simulation they thus follow from the seed. No other random state is touched.
        """
        return random.Random(f"{self._nonce} {self.rank} {purpose}")

    # -- tasks ------------------------------------------------------------------------------------------------------

    def spawn(self, coroutine: Coroutine[Any, Any, T], *, name: str | None = None) -> asyncio.Task[T]:
        """Start a task that belongs to this rank's job: it is awaited at the end, and its failure is the job's.

        A task that never ends keeps the rank from ending: leave its loop, cancel it, or close the channel that it
        reads. A warning is logged where such tasks only wait after main has returned (``watchdog_s`` of
        :func:`asyncdist.run`).
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
            group: the ranks that use it; all by default.

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
        return self.services.open_user_channel(message_type, tag=tag, name=name, ranks=ranks, capacity=capacity)

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
            ClosedError: the receiver gave up.
            RankLostError: the receiver is gone: it has returned, or is lost.
        """
        await self._streams.send(tensor, dest)

    async def receive_stream(self, tensor: torch.Tensor, source: int) -> torch.Tensor:
        """Receive into ``tensor``, in place; returns it.

        **Cancellation**: the sender is told to stop; the tensor is in use until it has answered. A stream that
        it had sent whole by then is lost, and its ``send_stream`` returns as if that had been received.

        Raises:
            RemoteProtocolError: the sender gave up, or sends another size.
            RankLostError: the sender is gone.
        """
        return await self._streams.receive(tensor, source)

    @functools.cached_property
    def _streams(self) -> UserStreams:
        return UserStreams(self.services, wire.scope_of(self.group.ranks, "streams", 0))

    # -- groups -----------------------------------------------------------------------------------------------------

    async def new_group(self, ranks: Sequence[int], *, timeout_s: float = GROUP_TIMEOUT_S) -> Group:
        """Make a group. Collective among ``ranks``, which all pass the same list; the others take no part.

        There is room for some 900 groups at a time, and each takes a communicator where the backend has them:
        ``await group.free()``, or the group as an asynchronous context manager, gives them back.

        **Ordering**: tasks of a rank may ask for groups of different ranks at once, in any order. Of groups of equal
        ranks, in equal order, the first one that a rank asks for is the first one of every rank.

        Args:
            ranks: the members, this rank among them.
            timeout_s: how long to wait for the last member, and for the turn of this group on all of them; for the turn
                at least 5 s.

        Raises:
            LocalProtocolError: the list is not a group, or this rank is not in it.
            ValueError: the timeout is not a finite number of seconds above 0.
            DisagreementError: two ranks wait for each other with different lists, or in another order.
            StartTimeoutError: some members did not come in time. Or all came, and one of them was still making another
                group, or blocked its loop; then the others may have the group, and this rank has freed it.

        **Cancellation**: while members are missing, the others get RemoteError. Once all have come the group is made,
        and given back, before the cancellation is raised.
        """
        return await self.peers.groups.new_group(ranks, timeout_s)

    async def new_groups(self, lists: Iterable[Sequence[int]], *, timeout_s: float = GROUP_TIMEOUT_S) -> list[Group]:
        """Make several groups, one after the other. Where one cannot be made, those before it are freed.

        The members of those after it get RemoteError.

        Args:
            lists: the members of each, this rank among them.
            timeout_s: for all of them together.

        Raises:
            AsyncdistError: as :meth:`new_group`.

        **Cancellation**: as of :meth:`new_group`; the groups that have been made are freed.
        """
        return await self.peers.groups.new_groups(lists, timeout_s)

    def counters(self) -> RankCounters:
        """Return what this rank has done so far: steps, metric, role, messages, bytes; any thread may ask.

        Waits are counted from the first time on that somebody asks.
        """
        self.services.count_waits()
        return counters_of(self.services)

    def statistics(self) -> WorldStatistics:
        """Return the counts since the world was opened."""
        of_channels = self.services.channel_statistics()
        return WorldStatistics(
            engine=self._engine.statistics(),
            sent_count=of_channels.sent_count,
            received_count=of_channels.received_count,
            dropped=of_channels.dropped,
            drop_examples=of_channels.drop_examples,
            stream_sent_nbytes=self.services.slots.sent_nbytes,
            stream_received_nbytes=self.services.slots.received_nbytes,
            events=dict(self.services.events.counts),
        )

    # -- for the runtime --------------------------------------------------------------------------------------------

    @property
    def is_open(self) -> bool:
        """Whether main may run."""
        return self._task_group is not None

    def attach_tasks(self, task_group: asyncio.TaskGroup | None) -> None:
        """Make ``spawn`` start its tasks in ``task_group``, or refuse to start any where that is None."""
        self._task_group = task_group
        self._main = asyncio.current_task()

    @property
    def is_in_main(self) -> bool:
        """Whether the rank's main calls, and no task that it has spawned."""
        return self._main is not None and asyncio.current_task() is self._main

    def spawned_tasks(self) -> list[asyncio.Task[Any]]:
        """Return the tasks that ``spawn`` has started and that have not ended, by name."""
        # A TaskGroup has no public way to list them.
        tasks: set[asyncio.Task[Any]] = getattr(self._task_group, "_tasks", set())
        return sorted(tasks, key=lambda task: (len(task.get_name()), task.get_name()))

    def refuse_streams(self) -> None:
        """Send no stream any more; a peer that waits for one gets an abort."""
        self._streams.refuse_all()

    def close(self) -> None:
        """Take back all receives, and start no thread any more."""
        if "_streams" in self.__dict__:  # a stream was sent or received
            self._streams.close()
        self.peers.close()
        self.services.close()
        self._computing.close()
        self._file_work.close()
