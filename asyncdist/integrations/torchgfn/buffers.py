"""Runs torchgfn's replay buffers on separate ranks.

A training rank adds a container to its own buffer, and also sends it to its buffer rank, which answers with scores::

    training rank                                 buffer rank, in ReplayBufferManager.run
    Ask("DATA", nbytes, payload)       ------->   adds the container, calls the scoring function
                                       <-------   Answer(nbytes, payload)

A payload is an object that dill serializes, as in torchgfn, so the ranks of a job must trust each other. A payload that
does not fit into a message is sent as a stream after it.

A training rank has at most one pending request to a buffer rank. If its caller is interrupted, the request is completed
in the background, and the next request waits for it. A buffer rank answers requests in arrival order. Its run ends when
each of its training ranks has sent a termination signal, is lost or has left. Later requests wait for the next run.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final, TypeAlias

import torch

from asyncdist import Channel, ClosedError, Envelope, RankLostError, World, blocking, tags, validation
from asyncdist.functional.rank_layout import BufferRanks
from asyncdist.integrations.joining import join
from asyncdist.protocols.replay_buffer.messages import INLINE_NBYTES_MAX, scopes
from asyncdist.waits import WaitId, WaitKind

with validation.optional_imports(__name__, ["gfn"], "torchgfn"):
    import dill
    from gfn.containers.message import MessageType
    from gfn.containers.replay_buffer import (
        ContainerUnion as _GfnContainerUnion,
        NormBasedDiversePrioritizedReplayBuffer as _GfnDiverseReplayBuffer,
        ReplayBuffer as _GfnReplayBuffer,
    )
    from gfn.containers.replay_buffer_manager import ReplayBufferManager as _GfnReplayBufferManager
    from gfn.containers.trajectories import Trajectories
    from gfn.containers.transitions import Transitions
    from gfn.env import Env

logger = logging.getLogger("asyncdist.integrations.torchgfn")

ContainerUnion: TypeAlias = _GfnContainerUnion
#: Channel name. :func:`protocols.serve_replay_buffer` uses the same tag under another name.
_NAME: Final = "containers of torchgfn"


@dataclass(frozen=True, slots=True)
class Ask:
    """A training rank's request of the torchgfn ``MessageType`` named ``kind``.

    If ``payload`` is empty, a stream follows.
    """

    kind: str
    nbytes: int
    payload: bytes


@dataclass(frozen=True, slots=True)
class Answer:
    """A buffer rank's answer. If ``payload`` is empty, a stream follows."""

    nbytes: int
    payload: bytes


# -- a training rank --------------------------------------------------------------------------------------------------


class _Remote:
    """Mixin for torchgfn's buffers that sends added containers to a buffer rank."""

    remote_manager_rank: int | None
    remote_buffer_freq: int
    pending_container: ContainerUnion | None
    _add_counter: int

    def _use_remote(self, rank: int | None, *, timing: bool) -> None:
        self.remote_manager_rank = rank
        self._is_timed = timing
        self._request_count = 0
        self._requests_took_s = 0.0

    def add(self, training_container: ContainerUnion) -> dict[str, float] | None:
        """Add a container to this buffer and, if there is a buffer rank, collect the container for that rank.

        Every ``remote_buffer_freq``-th call sends the collected containers, and returns their scores. Other calls
        return None.
        """
        # torchgfn 2.4.1 sends in ReplayBuffer.add, but not in the add of its subclasses. The subclass's add therefore
        # gets no rank, and this method does the rest, as ReplayBuffer.add does.
        server, self.remote_manager_rank = self.remote_manager_rank, None
        try:
            super().add(training_container)  # type: ignore[misc]
        finally:
            self.remote_manager_rank = server
        if server is None:
            return None
        self._add_counter += 1
        if self.pending_container is None:
            self.pending_container = self.initialize(training_container)  # type: ignore[attr-defined]
        pending: Any = self.pending_container
        pending.extend(training_container)
        if isinstance(pending, Trajectories | Transitions):
            pending.log_probs = None
        if isinstance(pending, Trajectories):
            pending.estimator_outputs = None
        if self._add_counter % self.remote_buffer_freq:
            return None
        self.pending_container = None  # even an interrupted request is completed
        began_at_s = time.perf_counter()
        scores: dict[str, float] = _ask(server, MessageType.DATA, pending)
        self._request_count += 1
        self._requests_took_s += time.perf_counter() - began_at_s
        return scores

    def timing_log(self) -> str:
        """Return a line with the total duration of all requests to the buffer rank. Requires ``timing=True``."""
        if not self._is_timed:
            return "the replay buffer has no measured times: pass timing=True"
        return f"replay buffer: {self._request_count} requests to the buffer rank took {self._requests_took_s:.4f} s"


class ReplayBuffer(_Remote, _GfnReplayBuffer):  # type: ignore[misc]  # torchgfn has no types
    """A torchgfn buffer that also sends added containers to the rank ``remote_manager_rank``.

    The arguments are the same as for ``gfn.containers.ReplayBuffer``, with two more from torchgfn versions after 2.4.1.

    Args:
        communication_backend: Ignored, because the launcher decides between MPI and torch.distributed.
        timing: Whether to measure times for :meth:`timing_log`.
    """

    def __init__(
        self,
        env: Env,
        capacity: int = 1000,
        prioritized_capacity: bool = False,
        prioritized_sampling: bool = False,
        remote_manager_rank: int | None = None,
        remote_buffer_freq: int = 1,
        communication_backend: str = "mpi",
        timing: bool = False,
    ) -> None:
        del communication_backend
        super().__init__(env, capacity, prioritized_capacity, prioritized_sampling, None, remote_buffer_freq)
        self._use_remote(remote_manager_rank, timing=timing)


class NormBasedDiversePrioritizedReplayBuffer(_Remote, _GfnDiverseReplayBuffer):  # type: ignore[misc]
    """Version of torchgfn's buffer of this name that also sends added containers to rank ``remote_manager_rank``.

    In addition to torchgfn's arguments, it takes ``communication_backend`` and ``timing``, as :class:`ReplayBuffer`
    does.
    """

    def __init__(
        self,
        env: Env,
        capacity: int = 1000,
        cutoff_distance: float = 0.0,
        p_norm_distance: float = 1.0,
        remote_manager_rank: int | None = None,
        remote_buffer_freq: int = 1,
        communication_backend: str = "mpi",
        timing: bool = False,
    ) -> None:
        del communication_backend
        super().__init__(env, capacity, cutoff_distance, p_norm_distance, None, remote_buffer_freq)
        self._use_remote(remote_manager_rank, timing=timing)


def _ask(server: int, kind: MessageType, data: Any = None) -> Any:
    """Send a request to a buffer rank, and return the answer's data, or None for a termination signal."""
    world = join()
    payload = b"" if data is None else _packed(data)
    answer = world.call(_exchange, world.awaited, server, kind, payload)
    return None if answer is None else _unpacked(answer)


def _pending_requests(_: object) -> dict[int, asyncio.Task[Any]]:
    """Return a dict that maps each buffer rank to the task of this rank's unfinished request to it."""
    return {}


async def _exchange(world: World, server: int, kind: MessageType, payload: bytes) -> torch.Tensor | None:
    """Send a request to a buffer rank after any earlier request to it, and return the answer, or None for an EXIT.

    **Cancellation**: the request is completed in the background. Otherwise, the buffer rank could wait forever for the
    rest of the request, and the next request could receive this request's answer.
    """
    services = world.services
    services.check_peer(server)
    tasks = services.shared(_pending_requests)
    request = _request(world, server, kind, payload, after=tasks.get(server))
    task = services.spawn_service(request, name=f"request to the replay buffer on rank {server}")
    tasks[server] = task
    task.add_done_callback(lambda _: tasks.pop(server) if tasks.get(server) is task else None)
    return await services.engine.settled_by(task, asyncio.shield(task))


async def _request(
    world: World, server: int, kind: MessageType, payload: bytes, *, after: asyncio.Task[Any] | None
) -> torch.Tensor | None:
    services = world.services
    if after is not None:
        await services.engine.ended(after)
    to_server, to_clients = scopes(server, _NAME)
    channel = services.open_channel(
        Ask | Answer, tag=tags.REPLAY, scope=to_clients, peer_scope=to_server, name=f"client of {_NAME}"
    )
    errors: list[RankLostError | ClosedError] = []

    def note_end(rank: int) -> None:
        # If the rank is restarted, it is in neither services.gone nor lost_ranks() when this task continues.
        text = f"rank {rank} does not serve a replay buffer: it "
        is_lost = rank in services.lost_ranks()
        errors.append(
            RankLostError(f"{text}is lost", rank=rank) if is_lost else ClosedError(f"{text}has left", rank=rank)
        )

    services.on_gone(note_end, among=[server])
    what = WaitId(WaitKind.BUFFER_ANSWER, number=server)
    try:
        # A restarted rank may not be connected to the buffer rank yet.
        await services.engine.until(lambda: not services.is_unmet(server) or bool(errors), what)
        if server in services.gone:
            note_end(server)
        await _send(world, channel, server, lambda *sent: Ask(kind.name, *sent), payload)
        if kind is MessageType.EXIT:
            return None
        await services.engine.until(lambda: channel.is_ready or bool(errors), what)
        envelope = channel.receive_nowait()
        if envelope is None:
            raise errors[0]
        return await _receive(world, envelope)
    finally:
        services.off_gone(note_end)
        channel.close()


# -- a buffer rank ----------------------------------------------------------------------------------------------------


class ReplayBufferManager(_GfnReplayBufferManager):  # type: ignore[misc]  # torchgfn has no types
    """Serves a replay buffer on this rank, like torchgfn's class. Subclass it, or pass a scoring function.

    Args:
        env: Environment of torchgfn.
        rank: Number of this rank.
        num_training_ranks: Number of ranks that use this buffer.
        scoring_function: Function that returns the scores of a container as a dict, which the sender's ``add`` returns.
        diverse_replay_buffer: Whether the buffer prefers diverse items.
        capacity: Maximum number of items in the buffer.
        remote_manager_rank: None, because a buffer rank does not use another buffer rank.
        communication_backend: Ignored, because the launcher decides between MPI and torch.distributed.
    """

    def __init__(
        self,
        env: Env,
        rank: int,
        num_training_ranks: int,
        scoring_function: Callable[[ContainerUnion], dict[str, float]] | None = None,
        diverse_replay_buffer: bool = False,
        capacity: int = 10000,
        remote_manager_rank: int | None = None,
        communication_backend: str = "mpi",
    ) -> None:
        del communication_backend
        if remote_manager_rank is not None:
            validation.refuse("remote_manager_rank", remote_manager_rank, "None for a ReplayBufferManager")
        self.rank = rank
        self.is_running = True
        self.exit_counter = 0
        self.num_training_ranks = num_training_ranks
        self.scoring_function = scoring_function or self.default_scoring_function
        self.diverse_replay_buffer = diverse_replay_buffer
        self.capacity = capacity
        self.remote_manager_rank = None
        self.replay_buffer: Any = (
            NormBasedDiversePrioritizedReplayBuffer(env, capacity=capacity)
            if diverse_replay_buffer
            else ReplayBuffer(env, capacity=capacity, prioritized_capacity=True)
        )

    def run(self) -> None:
        """Serve until each training rank of this buffer has sent a termination signal, is lost or has left.

        If the scoring function or ``_compute_metadata`` raises an exception, the job fails with it.
        """
        world = join()
        desk = world.awaited.services.shared(_RequestDesk)
        desk.begin_run(world, self.num_training_ranks)
        with desk.serving():
            while (asked := desk.next()) is not None:
                source, kind, data = asked
                if kind is MessageType.DATA:
                    self.replay_buffer.add(data)
                    desk.answer(source, self.scoring_function(data))
                elif kind is MessageType.GET_METADATA:
                    desk.answer(source, self._compute_metadata())
                self.exit_counter = len(desk.done)
        self.is_running = False
        logger.info("the replay buffer on rank %d has served all its training ranks", world.rank)

    @staticmethod
    def get_metadata(manager_rank: int, backend: str = "mpi") -> Any:
        """Return the value of ``_compute_metadata`` on the buffer rank ``manager_rank``. ``backend`` is ignored."""
        del backend
        return _ask(manager_rank, MessageType.GET_METADATA)

    @staticmethod
    def send_termination_signal(manager_rank: int, backend: str = "mpi") -> None:
        """Notify the buffer rank ``manager_rank`` that this rank no longer uses it. ``backend`` is ignored."""
        del backend
        _ask(manager_rank, MessageType.EXIT)


class _RequestDesk:
    """Receives a buffer rank's requests, one at a time, and sends the answers.

    There is one desk per rank. From its first run on, it collects requests at all times, even between two runs.

    Attributes:
        done: Ranks that have sent an EXIT to the current run. Their later requests wait for the next run.
    """

    def __init__(self, services: Any) -> None:
        self._services = services
        self._requests: deque[Envelope[Ask]] = deque()  # oldest first
        to_server, to_clients = scopes(services.rank, _NAME)
        self._channel: Channel[Any] = services.open_channel(
            Ask | Answer,
            tag=tags.REPLAY,
            scope=to_server,
            peer_scope=to_clients,
            name=_NAME,
            handler=self._requests.append,
        )
        services.on_returned(self._drop_requests)
        self.done: set[int] = set()
        self._world: blocking.World  # set by begin_run
        self._client_count = 0
        self._seen: set[int] = set()  # ranks that have sent a request to the current run
        self._asked_by: tuple[int, int] | None = None  # rank and incarnation that sent the current request

    def begin_run(self, world: blocking.World, client_count: int) -> None:
        """Start a run, in which ranks that have ended the previous run may take part again."""
        self._world = world
        self._client_count = client_count
        self._seen.clear()
        self._asked_by = None
        self.done.clear()
        for rank in {envelope.source for envelope in self._requests} & set(self._services.gone):
            self._drop_requests(rank)

    def _drop_requests(self, rank: int) -> None:
        """Drop requests of the lost process of ``rank``. Otherwise its new process could receive their answers."""
        kept = [envelope for envelope in self._requests if envelope.source != rank]
        self._requests.clear()
        self._requests.extend(kept)
        self.done.discard(rank)

    def serving(self) -> contextlib.AbstractContextManager[None]:
        """Return a context in which this rank refuses operations that a client wants to start with it."""
        return self._world.awaited.agreements.rivals.serving(self._possible_senders, "serves a replay buffer")

    def _possible_senders(self) -> list[int]:
        """Return the ranks that may still send requests."""
        others = self.done | self._services.shared(BufferRanks).ranks | {self._world.rank}
        return [rank for rank in range(self._world.size) if rank not in others]

    def _is_over(self) -> bool:
        gone = self._services.gone
        ended = self.done.union(rank for rank in self._seen if rank in gone)
        return len(ended) >= self._client_count or all(rank in gone for rank in self._possible_senders())

    def next(self) -> tuple[int, MessageType, Any] | None:
        """Wait for the next request. Return its sender, kind and data, or None when all clients have ended."""
        return self._world.call(self._next)

    async def _next(self) -> tuple[int, MessageType, Any] | None:
        def found() -> int | None:
            """Return the index of the oldest request from a rank that has not ended the current run."""
            return next((place for place, each in enumerate(self._requests) if each.source not in self.done), None)

        what = WaitId(WaitKind.BUFFER_USERS)
        while True:
            await self._services.engine.until(lambda: self._is_over() or found() is not None, what)
            if self._is_over():
                return None
            place = found()
            if place is None:  # its sender was lost meanwhile
                continue
            envelope = self._requests[place]
            del self._requests[place]
            source, kind = envelope.source, MessageType[envelope.message.kind]
            self._seen.add(source)
            self._asked_by = source, self._services.restarted.get(source, 0)
            if kind is MessageType.EXIT:
                self.done.add(source)
                return source, kind, None
            try:
                payload = await _receive(self._world.awaited, envelope)
            except RankLostError:
                self._world.check()  # raises the job's error if the whole job has failed
                continue
            return source, kind, _unpacked(payload) if len(payload) else None

    def answer(self, dest: int, data: Any) -> None:
        """Send an answer to the rank that sent the request, unless its process is lost."""
        if self._asked_by == (dest, self._services.restarted.get(dest, 0)):
            with contextlib.suppress(RankLostError):
                self._world.call(_send, self._world.awaited, self._channel, dest, Answer, _packed(data))
        self._world.check()


# -- both ranks -------------------------------------------------------------------------------------------------------


def _packed(data: Any) -> bytes:
    # torchgfn's Message.serialize makes a list of the bytes: 145 ms instead of 2.4 ms for 2 MB.
    packed: bytes = dill.dumps(data)
    return packed


def _unpacked(payload: torch.Tensor) -> Any:
    return dill.loads(payload.numpy())


async def _send(world: World, channel: Any, dest: int, make: Callable[[int, bytes], Any], payload: bytes) -> None:
    if len(payload) <= INLINE_NBYTES_MAX:
        await channel.send(make(len(payload), payload), dest)
        return
    await channel.send(make(len(payload), b""), dest)
    await world.send_stream(torch.frombuffer(bytearray(payload), dtype=torch.uint8), dest)


async def _receive(world: World, envelope: Envelope[Any]) -> torch.Tensor:
    message = envelope.message
    if len(message.payload) == message.nbytes:
        return torch.frombuffer(bytearray(message.payload or b"\0"), dtype=torch.uint8)[: message.nbytes]
    payload = torch.empty(message.nbytes, dtype=torch.uint8, device="cpu")
    return await world.receive_stream(payload, envelope.source)
