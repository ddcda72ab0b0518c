"""Serves a replay buffer to its clients, in one coroutine that usually runs on a separate rank.

A draw is answered when the buffer contains enough items, and fails if no remaining client is expected to add them. If
all clients are waiting to draw more items than the buffer contains, the server logs a warning and continues to wait.
The server ends when every client has left or is lost. A client that violates the protocol is refused, and the others
are still served.

Memory is bounded: ``capacity`` items, ``in_flight_max`` small requests per client, and one large batch per client in
each direction. Clients that are faster than the server wait.
"""

from __future__ import annotations

import functools
import logging
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from numbers import Real
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import torch

from asyncdist import BusyError, Envelope, RankLostError, RemoteProtocolError, World, tags
from asyncdist.collectives.agreement.rival_starts import REMIND_AFTER_S
from asyncdist.messaging import wire
from asyncdist.messaging.channels import Channel
from asyncdist.messaging.outbound_streams import OutboundStream
from asyncdist.messaging.services import Services
from asyncdist.messaging.streams import CHUNK_NBYTES, Cancel, Grant, StreamAborted
from asyncdist.protocols.replay_buffer import messages
from asyncdist.protocols.replay_buffer.clients import (
    Client,
    EarlyClients,
    all_wait_to_draw,
    describe_draws,
    may_add_more,
)
from asyncdist.protocols.replay_buffer.store import Batch, ReplayStore, RowLayout
from asyncdist.protocols.replay_buffer.values import ReplayStatistics, check_clients, check_options
from asyncdist.runtime.world import world_to_await
from asyncdist.tensors.byte_views import split
from asyncdist.tensors.serialization import name_and_message
from asyncdist.waits import WaitId, WaitKind

logger = logging.getLogger("protocols.replay_buffer.client")

#: Function that scores an added batch. The client's ``add`` call returns the score.
Score = Callable[[Batch], float | int | torch.Tensor | None]
IN_FLIGHT_MAX: Final = 64
#: Seconds until a warning is logged when all clients are waiting to draw more items than the buffer contains.
_PATIENCE_S: Final = 10.0
#: Maximum number of items, and of bytes, in a request. Larger values could overflow when sizes are computed.
_COUNT_MAX: Final = 1 << 32
_PAYLOAD_NBYTES_MAX: Final = 1 << 60


async def serve_replay_buffer(
    clients: Sequence[int],
    *,
    capacity: int,
    prioritized: bool = False,
    alpha: float = 0.6,
    score: Score | None = None,
    in_flight_max: int = IN_FLIGHT_MAX,
    seed: int = 0,
    name: str = "replay",
    world: World | None = None,
) -> ReplayStatistics:
    """Serve a replay buffer to ``clients`` until the last client has left.

    Args:
        clients: Ranks that may use the buffer, possibly including this rank.
        capacity: Maximum number of items. If the buffer is full, new items replace the oldest.
        prioritized: Whether to sample items in proportion to priority^alpha (Schaul et al. 2016) instead of uniformly.
        alpha: Exponent of the priorities; 0 ignores them.
        score: Function that is called with each added batch, and blocks this rank's event loop. ``add`` returns its
            result to the sender. If it raises an exception, the server ends with this exception, and the clients raise
            RemoteError.
        in_flight_max: Maximum number of a client's unanswered adds and updates, and of its unanswered draws. Further
            requests wait on the client.
        seed: Random seed for sampling.
        name: Name of the buffer, if this rank serves several.
        world: World of the server; the current world by default.

    Returns:
        Counts of the items that were added, sampled and dropped.

    Raises:
        ValueError, TypeError: An argument is out of range, ``clients`` is empty, or ``score`` did not return a number.
        LocalProtocolError: This rank already serves a buffer with this name.
        BaseException: The exception that ``score`` raised.
    """
    world = world_to_await(world)
    check_clients(clients, world)
    check_options(capacity, prioritized, alpha, score, in_flight_max, seed, name)
    store = ReplayStore(capacity, alpha=alpha if prioritized else None, seed=seed)
    server = _Server(world.services, tuple(clients), store, score, in_flight_max, name)
    if not world.is_in_main:
        return await server.serve()
    with world.agreements.rivals.serving(server.silent_clients, f"serves the replay buffer {name!r}"):
        return await server.serve()


class _Server:
    def __init__(
        self,
        services: Services,
        clients: tuple[int, ...],
        store: ReplayStore,
        score: Score | None,
        in_flight_max: int,
        name: str,
    ) -> None:
        self._services = services
        self._store = store
        self._score = score
        self._in_flight_max = in_flight_max
        self._name = name
        self._layout: RowLayout | None = None
        self._row_nbytes = 0
        self._has_lost_one = False
        self._has_warned = False
        self._has_ended = False
        self._failure: Exception | None = None
        self._added: Counter[int] = Counter()
        self._drawn: Counter[int] = Counter()
        self._stale_update_count = 0
        self._clients = {rank: Client(rank, is_done=rank in services.gone) for rank in clients}
        to_server, to_clients = messages.scopes(services.rank, name)
        # Capacity for all requests, and for each client's ``Open``, ``Declare``, grants, cancels, withdrawals and
        # ``Left``.
        capacity = 2 * (len(clients) + 1) * (2 * in_flight_max + 32)
        self._channel: Channel[Any] = services.open_channel(
            messages.ReplayMessage,
            tag=tags.REPLAY,
            scope=to_server,
            peer_scope=to_clients,
            name=f"replay {name}",
            capacity=capacity,
        )
        self._early_clients = services.shared(EarlyClients)
        services.on_gone(self._on_gone, among=clients)

    async def serve(self) -> ReplayStatistics:
        channel = self._channel
        try:
            for early in self._early_clients.take(self._name):
                self._handle(early)
            while not self._is_finished():
                # If the last client has left, a pending ``Open`` is meant for the next buffer with this name.
                while not self._is_finished() and (envelope := channel.receive_nowait()) is not None:
                    self._handle(envelope)
                self._has_lost_one = False
                if self._failure is not None:
                    raise self._failure
                self._answer_all()
                if not self._is_finished():
                    await self._wait_for_clients()
        except BaseException as error:
            reason = name_and_message(error) if isinstance(error, Exception) else ("", type(error).__name__)
            for client in self._clients.values():
                self._send_if_open(client, messages.Ended(*reason))
            raise
        finally:
            self._has_ended = True
            for client in self._clients.values():
                self._finish(client)
            self._services.off_gone(self._on_gone)
            channel.close(afterwards=functools.partial(self._early_clients.on_message, self._name))
        return ReplayStatistics(
            added={rank: self._added[rank] for rank in self._clients},
            drawn={rank: self._drawn[rank] for rank in self._clients},
            size=self._store.size,
            evicted_count=self._store.evicted_count,
            stale_update_count=self._stale_update_count,
        )

    def silent_clients(self) -> list[int]:
        """Return the clients that have not left and have sent no message for ``REMIND_AFTER_S`` seconds."""
        silent_since = self._services.time() - REMIND_AFTER_S
        waiting = (client for client in self._clients.values() if not client.is_done)
        return [client.rank for client in waiting if client.last_message_at < silent_since]

    async def _wait_for_clients(self) -> None:
        engine, what = self._services.engine, WaitId(WaitKind.REPLAY_CLIENTS, tags.REPLAY, name=self._name)

        def clients() -> Iterator[int]:
            return (rank for rank, each in self._clients.items() if not each.is_done)

        if not self._has_warned and all_wait_to_draw(self._clients.values(), self._store.size):
            if await engine.until(self._has_work, what, deadline=self._services.time() + _PATIENCE_S, peers=clients):
                return
            self._has_warned = True
            logger.warning(
                "replay buffer %r on rank %d contains %d items; all of its clients have waited for more items for %g "
                "s, and no client has added any: %s. Add items first, request fewer items, or pass wait=False",
                self._name,
                self._services.rank,
                self._store.size,
                _PATIENCE_S,
                describe_draws(self._clients.values(), self._store.size),
            )
        await engine.until(self._has_work, what, peers=clients)

    def _is_finished(self) -> bool:
        return all(client.is_done for client in self._clients.values())

    def _has_work(self) -> bool:
        return self._channel.is_ready or self._has_lost_one or self._failure is not None or self._is_finished()

    def _on_gone(self, rank: int) -> None:
        if rank in self._clients:
            self._finish(self._clients[rank])
            self._clients[rank] = Client(rank, is_done=True)  # a restarted rank may reuse message numbers
            self._has_lost_one = True  # other clients' draws may no longer be answerable

    def _finish(self, client: Client) -> None:
        client.is_open, client.is_done = False, True
        client.draws.clear()
        client.large.clear()
        client.answers.clear()
        client.outgoing.clear()
        for stream in client.streams.values():
            stream.stop()
        self._services.engine.recheck()

    # -- messages of clients ----------------------------------------------------------------------------------------

    def _handle(self, envelope: Envelope[messages.ReplayMessage]) -> None:
        client = self._clients.get(envelope.source)
        if client is None:
            if isinstance(envelope.message, messages.Open):
                reason = (
                    f"rank {envelope.source} is not a client of the replay buffer {self._name!r} on rank "
                    f"{self._services.rank}; the clients are {sorted(self._clients)}"
                )
                self._send_nowait(envelope.source, messages.Refused(envelope.message.entry, reason))
            messages.refuse_grant(self._services, envelope)
            return
        client.last_message_at = self._services.time()
        if isinstance(envelope.message, messages.Open):
            self._admit(client, envelope.message.entry)
        elif client.is_refused and isinstance(envelope.message, messages.Left):
            client.is_done = True
        elif client.is_open or isinstance(envelope.message, Grant):  # each grant is answered, if only by an abort
            try:
                self._handle_request(client, envelope)
            except RemoteProtocolError as error:
                self._reject(client, str(error))
        # Ignore other messages. They are for an earlier buffer, or were sent before the client knew of its refusal.

    def _admit(self, client: Client, entry: int) -> None:
        if client.rank in self._services.gone or entry == client.entry:  # a repeated ``Open``, which was answered
            return
        self._finish(client)
        self._clients[client.rank] = Client(client.rank, entry, is_open=True, last_message_at=client.last_message_at)
        prioritized = self._store.alpha is not None
        welcome = messages.Welcome(entry, self._store.capacity, self._in_flight_max, prioritized)
        self._send_if_open(self._clients[client.rank], welcome)

    def _reject(self, client: Client, reason: str) -> None:
        self._send_if_open(client, messages.Refused(client.entry, reason))
        was_done = client.is_done
        self._finish(client)
        client.is_refused, client.is_done = True, was_done

    def _handle_request(self, client: Client, envelope: Envelope[messages.ReplayMessage]) -> None:
        match envelope.message:
            case messages.Declare() as message:
                self._on_declare(client, message)
            case messages.Add() | messages.Update() as message:
                self._on_payload(client, message)
            case messages.Draw() as message:
                self._on_draw(client, message)
            case messages.Withdraw(request):
                self._on_withdraw(client, request)
            case Grant() as grant:
                self._on_grant(client, grant, envelope.round)
            case Cancel(slot):
                if slot in client.streams:
                    client.streams[slot].stop()
            case messages.Leaving():
                client.is_leaving = True
            case messages.Left():
                self._finish(client)

    def _on_declare(self, client: Client, message: messages.Declare) -> None:
        try:
            layout = messages.declared(message)
        except ValueError as error:
            raise _violation(client, f"declared an invalid layout: {error}") from error
        if self._layout is None:
            self._layout, self._row_nbytes = layout, layout.nbytes
        difference = self._layout.difference(layout)
        if difference is not None:
            self._reject(client, f"its items differ from those in {self._name!r}: {difference}")
        client.has_declared = True

    def _on_payload(self, client: Client, message: messages.Change) -> None:
        """Store a payload that the message contains, or queue the request until its payload can be streamed."""
        if isinstance(message, messages.Add) and not client.has_declared:
            raise _violation(client, "added items before it declared their layout")
        _, expected = self._sizes(message)
        if message.count < 0 or message.nbytes != expected or len(message.data) not in (0, expected):
            what = f"{message.nbytes} bytes, {len(message.data)} of them inside the message, for {message.count} items"
            raise _violation(client, f"sent {what}, whose size must be {expected} bytes")
        is_small = message.count <= _COUNT_MAX and message.nbytes <= _PAYLOAD_NBYTES_MAX
        if not is_small or not 0 <= message.request <= wire.ROUND_MAX:
            limits = f"{_PAYLOAD_NBYTES_MAX} bytes and request {wire.ROUND_MAX}"
            what = f"{message.nbytes} bytes in request {message.request}"
            raise _violation(client, f"sent {what}, which exceeds the limits of {limits}")
        if len(message.data) == expected:
            self._store_payload(client, message, np.frombuffer(message.data, np.uint8))
            return
        if len(client.large) == self._in_flight_max:
            raise RemoteProtocolError(
                f"rank {client.rank} has more than in_flight_max={self._in_flight_max} outstanding adds"
            )
        client.large.append(message)
        self._receive_next(client)

    def _sizes(self, message: messages.Change) -> tuple[int, int]:
        """Return the size in bytes of a payload's items or ids, and of the whole payload including priorities."""
        if isinstance(message, messages.Update):
            return 8 * message.count, 16 * message.count
        end = message.count * self._row_nbytes
        return end, end + 8 * message.count * message.has_priorities

    def _store_payload(self, client: Client, message: messages.Change, payload: npt.NDArray[np.uint8]) -> None:
        end, nbytes = self._sizes(message)
        priorities = payload[end:].view(np.float64) if nbytes > end or isinstance(message, messages.Update) else None
        if priorities is not None and not (np.isfinite(priorities) & (priorities >= 0)).all():
            self._fail(client, message.request, "a priority is not finite or below zero")
            return
        rows = payload[:end].reshape(message.count, end // max(1, message.count))
        try:
            if isinstance(message, messages.Update):
                assert priorities is not None
                self._stale_update_count += self._store.update(payload[:end].view(np.int64), priorities)
            else:
                self._store.add(rows, priorities)
                self._added[client.rank] += message.count
        except ValueError as error:  # a priority is too large
            self._fail(client, message.request, str(error))
            return
        client.answers.append((message.request, self._score_of(rows) if isinstance(message, messages.Add) else None))

    def _score_of(self, rows: npt.NDArray[np.uint8]) -> float | None:
        assert self._layout is not None, "items without a layout"
        value: object = None if self._score is None else self._score(self._layout.unpack(rows))
        if value is None:
            return None
        if isinstance(value, Real) or (isinstance(value, torch.Tensor) and value.numel() == 1):
            return float(value)
        raise TypeError(f"score must return a number, a tensor of one element or None, got a {type(value).__name__}")

    def _receive_next(self, client: Client) -> None:
        if client.large and not client.is_receiving:
            client.is_receiving = True
            self._services.spawn_service(
                self._receive(client, client.large.popleft()), name=f"replay items of rank {client.rank}"
            )

    async def _receive(self, client: Client, message: messages.Change) -> None:
        try:
            if client.is_open:  # if the client has left, its rank's next client may reuse the number
                self._store_received(client, message, await self._receive_payload(client, message))
        except StreamAborted:
            self._fail(client, message.request, "withdrawn")
        except (BusyError, MemoryError) as error:
            reason = f"cannot allocate {message.nbytes} bytes on rank {self._services.rank}: {error}"
            self._fail(client, message.request, reason, later=True)
        except RankLostError:
            self._finish(client)
        except RemoteProtocolError as error:
            self._reject(client, str(error))
        finally:
            client.is_receiving = False
        self._receive_next(client)
        self._answer_all()  # draws of other clients may wait for these items

    async def _receive_payload(self, client: Client, message: messages.Change) -> npt.NDArray[np.uint8]:
        buffer = np.empty(message.nbytes, np.uint8)
        targets = split(buffer.data, CHUNK_NBYTES)
        rank, slots = client.rank, self._services.slots
        with slots.inbound(rank, targets, lambda slot: self._send_nowait(rank, Cancel(slot))) as stream:
            grant = Grant(stream.slot, message.nbytes, CHUNK_NBYTES)
            self._channel.send_nowait(grant, rank, round=message.request)
            await stream.whole()
        return buffer

    def _store_received(self, client: Client, message: messages.Change, buffer: npt.NDArray[np.uint8]) -> None:
        """Store a streamed payload. If ``score`` raises an exception, end the server with it."""
        try:
            self._store_payload(client, message, buffer)
        except Exception as error:
            if self._has_ended:
                raise
            self._failure = self._failure or error
            self._services.engine.recheck()

    # -- drawing ----------------------------------------------------------------------------------------------------

    def _on_draw(self, client: Client, message: messages.Draw) -> None:
        if message.waits and message.count > self._store.capacity:
            reason = (
                f"n must be <= {self._store.capacity}, the capacity of the replay buffer {self._name!r}, got "
                f"{message.count}"
            )
            self._fail(client, message.request, reason)
        elif not self._store.size and not message.waits:
            self._fail(client, message.request, f"the replay buffer {self._name!r} has no items yet", later=True)
        elif len(client.draws) == self._in_flight_max:
            raise RemoteProtocolError(
                f"rank {client.rank} has more than in_flight_max={self._in_flight_max} outstanding draws"
            )
        else:
            client.draws.append(message)

    def _on_withdraw(self, client: Client, request: int) -> None:
        client.outgoing.pop(request, None)
        for draw in client.draws:
            if draw.request == request:
                client.draws.remove(draw)
                self._fail(client, request, "withdrawn")
                return

    def _answer_all(self) -> None:
        """Confirm all added items, and answer all draws for which the buffer contains enough items."""
        for client in self._clients.values():
            if client.answers:
                requests, scores = zip(*client.answers, strict=True)
                client.answers.clear()
                self._send_if_open(client, messages.Added(requests, scores))
        may_grow = may_add_more(self._clients.values())
        for client in self._clients.values():
            if client.draws:
                self._answer_draws(client, may_grow)

    def _answer_draws(self, client: Client, may_grow: bool) -> None:
        """Answer this client's draws if there are enough items. Stream one large draw at a time to save memory."""
        size = self._store.size
        waiting: deque[messages.Draw] = deque()
        for draw in tuple(client.draws):  # a send may notice that the client is lost, and clear its draws
            if not client.is_open:
                return
            if draw.waits and draw.count > size:
                if may_grow:
                    waiting.append(draw)
                else:
                    is_alone = len(self._clients) == 1
                    who = "no other client exists" if is_alone else "all clients that add items have left"
                    reason = (
                        f"n must be <= {size}, the number of items in the replay buffer {self._name!r}, because {who}, "
                        f"got {draw.count}"
                    )
                    self._fail(client, draw.request, reason, later=True)
            elif client.outgoing or client.streams:
                waiting.append(draw)
            else:
                self._send_items(client, draw)
        if client.is_open:
            client.draws = waiting

    def _send_items(self, client: Client, draw: messages.Draw) -> None:
        assert self._layout is not None, "items without a layout"
        count = min(draw.count, self._store.size)
        try:
            drawn = self._store.sample(count, beta=draw.beta)
        except ValueError as error:  # all priorities are zero
            self._fail(client, draw.request, str(error))
            return
        if not client.layout_sent:
            client.layout_sent = True
            self._send_if_open(client, messages.declare(self._layout))
        self._drawn[client.rank] += count
        parts = (drawn.rows.reshape(-1), drawn.ids.view(np.uint8), drawn.weights.view(np.uint8))
        payload = np.concatenate(parts)
        inline = len(payload) <= messages.INLINE_NBYTES_MAX
        if not inline:
            client.outgoing[draw.request] = payload
        data = payload.tobytes() if inline else b""
        self._send_if_open(client, messages.Drawn(draw.request, count, len(payload), data))

    def _on_grant(self, client: Client, grant: Grant, request: int) -> None:
        if grant.slot in client.streams:
            raise _violation(client, f"granted slot {grant.slot} twice")
        payload = client.outgoing.pop(request, None)
        chunks = []
        if payload is not None and grant.nbytes == len(payload):
            chunks = split(payload.data, grant.chunk_nbytes)
        stream = OutboundStream(self._services.slots, chunks, client.rank, grant.slot)
        client.streams[grant.slot] = stream
        self._services.spawn_service(self._send(client, grant.slot, stream, bool(chunks)), name="drawn items")

    async def _send(self, client: Client, slot: int, stream: OutboundStream, has_items: bool) -> None:
        try:
            await stream.run_notified(tags.REPLAY, aborts=not has_items)
        except RankLostError:
            self._finish(client)
        finally:
            if client.streams.get(slot) is stream:  # a new stream may already use the slot
                del client.streams[slot]
        self._answer_all()

    # -- answering --------------------------------------------------------------------------------------------------

    def _fail(self, client: Client, request: int, reason: str, *, later: bool = False) -> None:
        self._send_if_open(client, messages.Failed(request, later, reason))

    def _send_if_open(self, client: Client, message: Any) -> None:
        if client.is_open:  # otherwise the next client on that rank could receive this message
            self._send_nowait(client.rank, message)

    def _send_nowait(self, rank: int, message: Any) -> None:
        try:
            self._channel.send_nowait(message, rank)
        except RankLostError as error:
            logger.info("replay buffer %r: %s", self._name, error)
            if rank in self._clients:
                self._finish(self._clients[rank])


def _violation(client: Client, what: str) -> RemoteProtocolError:
    return RemoteProtocolError(f"rank {client.rank} {what}", rank=client.rank)
