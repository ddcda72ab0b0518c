"""The world: a user program's view of the job, with its rank, channels, tasks, groups and clock.

:func:`asyncdist.run` and :func:`asyncdist.open_world` open and close a world. Protocols use ``world.services``.
Collective operations use ``world.collectives`` and ``world.agreements``.
"""

from __future__ import annotations

import asyncio
import builtins
import dataclasses
import functools
import os
import random
import sys
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
from asyncdist.messaging.user_requests.waiting import RequestWaiter, refuse_in_simulation
from asyncdist.messaging.user_streams import UserStreams
from asyncdist.runtime.compute import Computing
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
        engine: Numbers of polling passes, completed requests and outstanding requests.
        sent_count, received_count: Numbers of messages sent and received on channels.
        dropped: Number of undelivered messages, by reason.
        drop_examples: Description of the last undelivered message, by reason.
        stream_sent_nbytes, stream_received_nbytes: Numbers of bytes sent and received in tensor streams.
        events: Number of events of each kind in :mod:`asyncdist.recording.events` except steps and messages. Roles are
            counted by state, such as ``"role giving"``.
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
    ". A world that a notebook's cell opened belongs to that cell; call asyncdist.blocking.process_world() to open one "
    "for all cells"
)


def current_world() -> World:
    """Return the world of the rank that runs this task.

    Raises:
        RuntimeError: The code runs outside ``asyncdist.run`` and ``asyncdist.open_world``.
    """
    try:
        return _current_world.get()
    except LookupError:
        if _world_of_process is not None and _world_of_process.is_open:
            return _world_of_process
        raise RuntimeError(
            "no world is open in this task: call this inside asyncdist.run(main) or async with asyncdist.open_world()"
            + (_FOR_ALL_CELLS if hasattr(builtins, "get_ipython") else "")
        ) from None


def world_to_await(world: World | None) -> World:
    """Return ``world``, by default the current world, for a coroutine that awaits the world's operations.

    Raises:
        LocalProtocolError: The coroutine runs in another event loop than the world.
        RuntimeError: No world is open (:func:`current_world`).
    """
    world = world or current_world()
    world.services.engine.check_loop()
    return world


_world_of_process: World | None = None


def set_world_of_process(world: World | None) -> None:
    """Make ``world`` the current world of all code in this process that does not run inside another world."""
    global _world_of_process
    _world_of_process = world


def refuse_inside_a_world() -> None:
    """Raise LocalProtocolError if this code already runs inside an open world."""
    here = _current_world.get(None)
    if here is not None and here.is_open and here.process_id == os.getpid():  # A forked child is not a rank.
        lasting, way_out = "", "use it through asyncdist.current_world()"
        if here is _world_of_process:
            lasting = " until the process ends"
            way_out += ", or open another one in another process (in a notebook: restart the kernel)"
        raise LocalProtocolError(f"a world is already open{lasting}, {here!r}: {way_out}", rank=here.rank)


class World:
    """One rank of a running job.

    Attributes:
        rank: Number of this rank, from 0.
        size: Number of ranks.
        process_id: ID of the process that hosts this rank.
        local_rank: Index of this rank among the ranks on its host, from 0, as assigned by the launcher.
        group: Group of all ranks.
        time: Function that returns the loop's time in seconds since an arbitrary start.
        services: Interface for protocols: channels on reserved tags, background tasks, stream slots.
        collectives: Collectives of this rank. :mod:`asyncdist.functional` is built on them.
        agreements: Agreements of this rank, which precede every collective operation.
        scratch: Scratch memory that successive collectives on one model reuse.
        peers: State of the other ranks, for the runtime.
        warns_if_alone: Whether a policy warns that nothing is averaged, because this is the only rank of a program that
            no launcher has started.
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
        self.warns_if_alone = False
        self._engine = services.engine
        self._transport = services.engine.transport
        self._nonce = nonce
        self._task_group: asyncio.TaskGroup | None = None
        self._main: asyncio.Task[Any] | None = None
        wake_by = services.engine.wake_by
        self._computing = Computing(self.rank, loop, functools.partial(wake_by, WaitId(WaitKind.COMPUTE)))
        self._file_work = Computing(self.rank, loop, functools.partial(wake_by, WaitId(WaitKind.FILE_WORK)))
        self._models_in_use: list[object] = []
        self._streams_scope = wire.scope_of(group.ranks, "streams", 0)
        services.openers[self._streams_scope] = lambda: self._streams

    def __repr__(self) -> str:
        return f"<World rank {self.rank} of {self.size}, {self._transport.name}>"

    @property
    def incarnation(self) -> int:
        """Number of restarts of this rank: 0 for an initial process, 1 or more for a restarted or late process.

        If the rank had no process when the job started, its first process has number 1. A process with a number above 0
        does not belong to the group of all ranks, so collectives need a new group. Policies that support restarts admit
        the process (:class:`protocols.AsyncSelectiveAveragingPolicy`). Ranks that are not yet connected to the process
        count as lost. If the process fails before a policy or a group has admitted it, the job continues without the
        rank.
        """
        return self._transport.incarnation

    @property
    def transport_name(self) -> str:
        """Name of the transport, such as ``"local"`` or ``"mpi"``."""
        return self._transport.name

    @property
    def hostname(self) -> str:
        """Name of this rank's host. In a simulation, ``"host0"``, ``"host1"``, ... as defined by the network."""
        return self._transport.hostname

    @property
    def device(self) -> torch.device:
        """Device of this rank: the visible GPU with index ``local_rank``, or the CPU if there is no GPU.

        If a host has more ranks than GPUs, several ranks share a GPU.
        """
        count = torch.cuda.device_count()
        return torch.device("cuda", self.local_rank % count) if count else torch.device("cpu")

    @property
    def is_simulated(self) -> bool:
        """Whether this rank is simulated. Files that it writes are real, and shared with all other ranks."""
        return self._engine.virtual_clock is not None

    @property
    def shares_memory(self) -> bool:
        """Whether other ranks on this host, if there are any, can map this rank's memory."""
        return self.size > 1 and self._transport.capabilities.shares_memory

    def describe(self) -> str:
        """Return a one-line description of the transport, its library and the ranks, for reports."""
        return self._transport.describe()

    # -- time and progress ------------------------------------------------------------------------------------------

    async def sleep(self, seconds: float) -> None:
        """Wait for ``seconds`` while other tasks run."""
        self._engine.check_loop()
        self.check()
        await asyncio.sleep(seconds)
        self.check()

    def safe_point(self) -> Coroutine[Any, Any, None]:
        """Poll the outstanding requests once, and yield once to the rank's other tasks.

        Raises:
            RankLostError: Another rank has failed, which ends the job.
        """
        self._engine.check_loop()
        return self._engine.safe_point()

    def progress(self, budget_s: float = PROGRESS_BUDGET_S) -> Coroutine[Any, Any, None]:
        """Poll the outstanding requests repeatedly, until a poll completes nothing or the time is up.

        The call yields to other tasks between polls, and at least once.

        Args:
            budget_s: Maximum time in seconds. A poll in progress is completed.

        Raises:
            RankLostError: Another rank has failed, which ends the job.
        """
        self._engine.check_loop()
        return self._engine.safe_point(budget_s)

    def check(self) -> None:
        """Raise the error that ended the job, if any."""
        if self._engine.failure is not None:
            raise self._engine.failure

    async def compute(self, fn: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Run ``fn`` in a worker thread while the loop keeps running. torch releases the GIL inside its operators.

        The thread has the caller's grad, inference and autocast modes, torch's default device and the current GPU.
        While ``fn`` runs, ``policy.step`` raises BusyError, because ``fn`` may be changing weights. A simulation starts
        no thread. It calls ``fn`` at a random moment of the simulated computing time.

        **Cancellation**: the call still waits until ``fn`` has finished, because a thread cannot be stopped and may be
        writing weights. An exception of ``fn`` is then logged.

        Raises:
            BusyError: Another ``compute`` of this rank is running.
            RuntimeError: ``fn`` raised StopIteration, which a coroutine cannot raise. Instead of ``next(iterator)``,
                run ``await world.compute(next, iterator, None)``, which returns None at the end of the data.
            BaseException: Any other exception of ``fn``.
        """
        self._engine.check_loop()
        return await self._computing.run(self._engine.virtual_clock, functools.partial(fn, *args, **kwargs))

    async def do_file_work(self, fn: Callable[[], T], *, model: object = None) -> T:
        """Run ``fn``, which copies a state or accesses a file, in a second worker thread, one call at a time.

        **Cancellation**: the call still waits until ``fn`` has finished. Until then, policies of ``model`` refuse to
        step.
        """
        self._engine.check_loop()
        self._models_in_use.append(model)
        try:
            return await self._file_work.run_in_turn(self._engine.virtual_clock, fn)
        finally:
            self._models_in_use.remove(model)

    @property
    def is_computing(self) -> bool:
        """Whether ``world.compute`` or a file operation is running in a worker thread."""
        return self._computing.is_under_way or self._file_work.is_under_way

    def is_in_use(self, model: object) -> bool:
        """Return whether a worker thread may be using the weights of ``model``."""
        if self._models_in_use and any(each is model for each in self._models_in_use):
            return True
        return self._computing.is_under_way

    def is_computed(self, future: object) -> bool:
        """Return whether ``future`` belongs to a function that is running in a worker thread."""
        return self._computing.settles(future) or self._file_work.settles(future)

    def frame_of(self, future: object) -> types.FrameType | None:
        """Return the current frame of the worker thread whose function completes ``future``, or None if unknown."""
        each = self._computing if self._computing.settles(future) else self._file_work
        return each.frame() if each.settles(future) else None

    def generator(self, purpose: str) -> random.Random:
        """Return a random generator seeded by the job, the rank and ``purpose``.

        In a simulation, the simulation's seed determines the numbers.
        """
        return random.Random(f"{self._nonce} {self.rank} {purpose}")

    # -- tasks ------------------------------------------------------------------------------------------------------

    def spawn(self, coroutine: Coroutine[Any, Any, T], *, name: str | None = None) -> asyncio.Task[T]:
        """Start a background task. This rank waits for the task before it ends, and a failure of the task ends the job.

        A task that runs forever prevents the rank from ending. Leave its loop, cancel it, or close the channel that it
        reads. If ``main`` has returned and all remaining tasks are waiting, a warning is logged (``watchdog_s`` of
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
        """Open a channel to all ranks that open a channel with the same tag, name and group.

        The n-th such channel of a rank is connected to the n-th such channel of each other rank. A tag is bound to one
        message type or name until all its channels are closed on this rank.

        Args:
            message_type: Frozen dataclass or union of frozen dataclasses. :mod:`asyncdist.messaging.wire` lists the
                field types.
            tag: Tag from 0 to 7000 or from 12097 to 32767.
            name: Name of the channel, by default the name of the message type.
            capacity: Number of unread messages at which the tag stops receiving. A rank then waits in ``send`` as soon
                as 1024 of its messages have not been received. If two ranks both send more messages than that to each
                other before they receive, they wait forever. Receive in another task instead.
            group: Ranks that use the channel, by default all ranks.

        Raises:
            LocalProtocolError: The tag is not free.
            TypeError: The message type has a field that cannot be sent.
            ValueError: ``capacity`` is below 1.
        """
        capacity = min(validation.count("capacity", capacity), sys.maxsize)  # the largest length of a mailbox
        name = name or str(getattr(message_type, "__name__", message_type))
        if group is not None:
            check_open(group)
        ranks = (group or self.group).ranks
        return self.services.open_user_channel(message_type, tag=tag, name=name, ranks=ranks, capacity=capacity)

    async def send_stream(self, tensor: torch.Tensor, dest: int) -> None:
        """Send a tensor of any size directly into the receiver's buffer. The receiver calls ``receive_stream``.

        Args:
            tensor: Contiguous CPU tensor that must not change until the call returns.
            dest: Rank of the receiver.

        **Ordering**: the n-th stream from one rank to another is received by the n-th receive.

        **Cancellation**: if ``dest`` has not called ``receive_stream`` yet, nothing is sent, and its later call
        receives the next stream. Otherwise, ``dest`` is notified, and the tensor is in use until outstanding chunks
        have been sent.

        Raises:
            LocalProtocolError: The receiver expects a different size.
            ClosedError: The receiver has cancelled.
            RankLostError: The receiver's ``main`` has returned, or the receiver is lost.
        """
        self._engine.check_loop()
        await self._streams.send(tensor, dest)

    async def receive_stream(self, tensor: torch.Tensor, source: int) -> torch.Tensor:
        """Receive a stream into ``tensor`` in place, and return ``tensor``.

        Args:
            tensor: Contiguous CPU tensor of the same size as the sender's tensor.
            source: Rank of the sender.

        **Cancellation**: the sender is asked to stop, and the tensor is in use until it has answered. If the whole
        stream was already sent, it is lost, and its ``send_stream`` returns normally.

        Raises:
            RemoteProtocolError: The sender has cancelled, or sends a different size.
            RankLostError: The sender's ``main`` has returned, or the sender is lost.
        """
        self._engine.check_loop()
        return await self._streams.receive(tensor, source)

    @functools.cached_property
    def _streams(self) -> UserStreams:
        return UserStreams(self.services, self._streams_scope)

    # -- requests of mpi4py and torch --------------------------------------------------------------------------------

    def wait(self, request: Any, status: Any = None) -> Coroutine[Any, Any, Any]:
        """Wait until a request that the program has started with mpi4py or torch has completed. Return its result.

        Arguments, results, ownership and cancellation are the same as for :meth:`asyncdist.Progress.wait`. In worlds on
        torch and in local worlds, requests are tested every millisecond.

        Raises:
            LocalProtocolError: This rank is simulated or replayed, or the request cannot be awaited.
            RankLostError: Another rank has failed, which ends the job.
            Exception: An error of the request or of its type, as in :meth:`asyncdist.Progress.wait`.
        """
        return self._requests.wait(request, status)

    def waitany(self, requests: Sequence[Any], status: Any = None) -> Coroutine[Any, Any, tuple[int, Any]]:
        """Wait until one request of a list has completed. Return its index and its result.

        See :meth:`asyncdist.Progress.waitany` and :meth:`wait`.
        """
        return self._requests.waitany(requests, status)

    @functools.cached_property
    def _requests(self) -> RequestWaiter:
        if self.is_simulated:
            refuse_in_simulation("world.wait")
        return RequestWaiter(self._engine, "this world")

    # -- groups -----------------------------------------------------------------------------------------------------

    async def new_group(self, ranks: Sequence[int], *, timeout_s: float = GROUP_TIMEOUT_S) -> Group:
        """Make a group of ``ranks``. All of them must call this method with the same list.

        About 900 groups can exist at a time, and each uses a communicator if the backend has communicators. To release
        a group and its communicator, call ``await group.free()``, or use the group as an asynchronous context manager.

        **Ordering**: tasks of a rank may request different groups concurrently, in any order. Several requests with the
        same list are matched in the order in which each rank makes them.

        Args:
            ranks: Members, including this rank.
            timeout_s: Seconds to wait for the last member to join. Each member then has the same time, but at least 5
                s, to finish making other groups.

        Raises:
            LocalProtocolError: The list is not a valid group, or this rank is not in it.
            ValueError: The timeout is not a finite number of seconds above 0.
            DisagreementError: Two ranks are waiting for each other with different lists, or in a different order.
            StartTimeoutError: Some members did not join in time. Or all members joined, but one of them was still
                making another group or blocked its loop. In the second case, this rank has freed the group, but other
                members may still have it.

        **Cancellation**: while members are missing, the others get RemoteError. After all have joined, the group is
        made and freed before the cancellation is raised.
        """
        self._engine.check_loop()
        return await self.peers.groups.new_group(ranks, timeout_s)

    async def new_groups(self, lists: Iterable[Sequence[int]], *, timeout_s: float = GROUP_TIMEOUT_S) -> list[Group]:
        """Make several groups one after another. If one cannot be made, free the earlier groups.

        The members of the later groups get RemoteError.

        Args:
            lists: Members of each group, including this rank.
            timeout_s: Seconds for all groups together.

        Raises:
            AsyncdistError: A group cannot be made (:meth:`new_group`).

        **Cancellation**: groups that have been made are freed.
        """
        self._engine.check_loop()
        return await self.peers.groups.new_groups(lists, timeout_s)

    def counters(self) -> RankCounters:
        """Return this rank's counters: steps, metric, role, messages, bytes. This method is thread-safe.

        Waits are counted only after the first call.
        """
        self.services.count_waits()
        return counters_of(self.services)

    def statistics(self) -> WorldStatistics:
        """Return the counts of messages, requests, streams and events since the world was opened."""
        return WorldStatistics(
            engine=self._engine.statistics(),
            **dataclasses.asdict(self.services.channel_totals()),
            stream_sent_nbytes=self.services.slots.sent_nbytes,
            stream_received_nbytes=self.services.slots.received_nbytes,
            events=dict(self.services.events.counts),
        )

    # -- for the runtime --------------------------------------------------------------------------------------------

    @property
    def is_open(self) -> bool:
        """Whether the world is open, because ``main`` or a task that it has spawned is running."""
        return self._task_group is not None

    def attach_tasks(self, task_group: asyncio.TaskGroup | None) -> None:
        """Set the task group in which ``spawn`` starts tasks, or None to let ``spawn`` raise ClosedError."""
        self._task_group = task_group
        self._main = asyncio.current_task()

    @property
    def is_in_main(self) -> bool:
        """Whether the caller is the rank's ``main``, not a spawned task."""
        return self._main is not None and asyncio.current_task() is self._main

    def spawned_tasks(self) -> list[asyncio.Task[Any]]:
        """Return the unfinished tasks that ``spawn`` has started, sorted by name."""
        # A TaskGroup has no public list of its tasks.
        tasks: set[asyncio.Task[Any]] = getattr(self._task_group, "_tasks", set())
        return sorted(tasks, key=lambda task: (len(task.get_name()), task.get_name()))

    def refuse_streams(self) -> None:
        """Stop sending streams, and notify other ranks that are waiting for a stream."""
        self._streams.refuse_all()

    def give_up_requests(self) -> list[str]:
        """Stop testing the program's mpi4py and torch requests. Return a description of the unfinished requests."""
        left = self._requests.close() if "_requests" in self.__dict__ else None
        return [] if left is None else [f"requests of this program: {left}"]

    def close(self) -> None:
        """Cancel all receives of this rank, and start no more worker threads."""
        if "_streams" in self.__dict__:  # The attribute exists only if a stream was sent or received.
            self._streams.close()
        self.peers.close()
        self.services.close()
        self._computing.close()
        self._file_work.close()
