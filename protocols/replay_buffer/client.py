"""Client of a replay buffer: ``await buffer.add(batch)`` and ``await buffer.sample(n)`` on the training ranks.

    async def train(world):                                   # a training rank
        async with ReplayBuffer(server=3) as buffer:
            await buffer.add({"state": states, "reward": rewards})
            sample = await buffer.sample(256)
            ...

    async def serve(world):                                   # rank 3
        print(await serve_replay_buffer(clients=[0, 1, 2], capacity=100_000))

Any number of tasks may have pending requests. A request beyond the server's limit waits on the client.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Any, Final, Self

import numpy as np
import numpy.typing as npt
import torch

from asyncdist import (
    AsyncdistError,
    BusyError,
    ClosedError,
    DisagreementError,
    Envelope,
    LocalProtocolError,
    RankLostError,
    RemoteProtocolError,
    StartTimeoutError,
    World,
    current_world,
    tags,
    validation,
)
from asyncdist.messaging.channels import Channel
from asyncdist.messaging.engine import yield_to_loop
from asyncdist.messaging.outbound_streams import OutboundStream
from asyncdist.messaging.polling import resolve_waiter
from asyncdist.messaging.streams import CHUNK_NBYTES, Cancel, Grant, StreamAborted
from asyncdist.protocols.replay_buffer import messages
from asyncdist.protocols.replay_buffer.requests import (
    PendingCall,
    RequestLimit,
    abandoned_error,
    ended_error,
    late_error,
)
from asyncdist.protocols.replay_buffer.store import Batch, RowLayout
from asyncdist.protocols.replay_buffer.values import Sample, as_ids, as_priorities
from asyncdist.runtime.failing.process_ends import end_forked_child
from asyncdist.tensors.byte_views import split
from asyncdist.waits import WaitId, WaitKind

_REQUEST_COUNT: Final = 1 << 32  # the frame header has 32 bits for the request number
#: Capacity of the client's channel: no limit, because the server's ``in_flight_max`` limits the requests.
_CAPACITY: Final = _REQUEST_COUNT
_NO_PAYLOAD: Final = np.empty(0, np.uint8)
#: Seconds after which a client repeats its ``Open`` message for the first time. The delay doubles each time.
_OPEN_PERIOD_S: Final = 0.25
#: Seconds to wait for the reason why the server ended, after the server has left or aborted a stream.
_REASON_TIMEOUT_S: Final = 1.0


class ReplayBuffer:
    """Client of the replay buffer that another rank serves with :func:`protocols.serve_replay_buffer`.

    Entering ``async with ReplayBuffer(server) as buffer`` waits for the server. Leaving the block waits for pending
    requests. The server ends when its last client has left.

    Args:
        server: Rank of the server.
        name: Name of the buffer on that rank. A rank that leaves and enters again finds the same items only if another
            client has stayed.
        start_timeout_s: Seconds to wait for the server.
        world: World of the client; the current world by default.

    Raises:
        StartTimeoutError: The server did not serve a buffer with this name in time.
        DisagreementError: This rank is not one of the buffer's clients.
        LateError: This rank was restarted, and the server no longer serves the buffer.
        RankLostError, ClosedError: The server is lost, or has left or stopped. Raised by every method.
        RemoteError: An exception has ended the server, for example in its scoring hook. Raised by every method.
    """

    @validation.names_options()
    def __init__(
        self, server: int, *, name: str = "replay", start_timeout_s: float = 60.0, world: World | None = None
    ) -> None:
        self._services = (world or current_world()).services
        self._services.check_peer(server)
        if not isinstance(name, str):
            validation.refuse("name", name, "a string", TypeError)
        self._server = server
        self._name = name
        self._start_timeout_s = validation.seconds("start_timeout_s", start_timeout_s)
        self._channel: Channel[Any] | None = None
        self._welcome: messages.Welcome | None = None
        self._error: AsyncdistError | None = None
        self._calls: dict[int, PendingCall] = {}
        self._streams: dict[int, OutboundStream] = {}
        self._next_request = 0
        self._entry = 0
        self._adding_count = self._drawing_count = 0
        self._is_closed = False
        # Adds have a separate limit: they must not wait for draws, which may wait for items that these adds contain.
        self._add_limit = self._draw_limit = RequestLimit(self._services.engine, 0)
        self._own_layout: RowLayout | None = None
        self._layout: RowLayout | None = None

    async def __aenter__(self) -> Self:
        services, server = self._services, self._server
        if self._channel is not None:
            raise LocalProtocolError("a ReplayBuffer can be entered only once; create a new ReplayBuffer")
        to_server, to_clients = messages.scopes(server, self._name)
        self._channel = services.open_channel(
            messages.ReplayMessage,
            tag=tags.REPLAY,
            scope=to_clients,
            peer_scope=to_server,
            name=f"client of replay {self._name}",
            capacity=_CAPACITY,
            handler=self._on_message,
        )
        # This number differs between successive clients of one buffer on this rank, because each client sends at least
        # one message.
        self._entry = self._channel.demultiplexer.sent_count
        services.on_gone(self._on_gone, among=(server,))
        try:
            if server in services.gone and not services.is_unmet(server):
                self._on_gone(server)
            self._welcome = await self._enter()
        except BaseException:
            self._close()
            raise
        self._add_limit = RequestLimit(services.engine, self._welcome.in_flight_max)
        self._draw_limit = RequestLimit(services.engine, self._welcome.in_flight_max)
        return self

    async def _enter(self) -> messages.Welcome:
        engine, what = self._services.engine, self._awaited()
        give_up_at, period_s = self._services.time() + self._start_timeout_s, _OPEN_PERIOD_S
        while self._welcome is None and self._error is None:
            if self._services.time() >= give_up_at:
                raise StartTimeoutError(
                    f"rank {self._server} did not serve the replay buffer {self._name!r} within "
                    f"{self._start_timeout_s:g} s; await serve_replay_buffer with name={self._name!r} on that rank",
                    missing=(self._server,),
                )
            if self._services.is_unmet(self._server):  # this restarted rank has not connected to the server yet
                await engine.until(lambda: not self._services.is_unmet(self._server), what, deadline=give_up_at)
                continue
            self._send(messages.Open(self._entry))
            ask_again_at = min(give_up_at, self._services.time() + period_s)
            period_s *= 2
            await engine.until(
                lambda: self._welcome is not None or self._error is not None, what, deadline=ask_again_at
            )
        if self._error is not None:
            raise self._error
        return self._welcomed()

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._channel is None or self._is_closed:  # the block was never entered, or __aexit__ was called twice
            return
        end_forked_child(self._services.process_id, error)
        try:
            engine = self._services.engine
            if error is None and engine.failure is None:
                await engine.until(lambda: not self._adding_count, self._awaited(WaitKind.REPLAY_ANSWERS))
                self._send(messages.Leaving())
                await engine.until(
                    lambda: not (self._adding_count or self._drawing_count or self._calls),
                    self._awaited(WaitKind.REPLAY_ANSWERS),
                )
        finally:
            self._fail(
                ClosedError(
                    f"this rank has left the async with block of the replay buffer {self._name!r}; use the buffer "
                    "inside that block"
                )
            )
            self._close()

    def _awaited(self, kind: WaitKind = WaitKind.REPLAY_SERVER) -> WaitId:
        return WaitId(kind, tags.REPLAY, self._server, name=self._name)

    def _close(self) -> None:
        assert self._channel is not None
        self._is_closed = True
        for stream in self._streams.values():
            stream.stop()
        if self._server not in self._services.gone:
            with contextlib.suppress(RankLostError):
                self._channel.send_nowait(messages.Left(), self._server)
        self._services.off_gone(self._on_gone)
        self._channel.close(afterwards=self._refuse_grant)

    # -- requests ---------------------------------------------------------------------------------------------------

    async def add(self, batch: Batch, *, priorities: torch.Tensor | Sequence[float] | None = None) -> float | None:
        """Add the items of ``batch`` to the buffer, and wait until they are stored.

        Args:
            batch: Tensor of shape (n, ...), or a dict by name or a tuple of such tensors with the same n, in CPU
                memory. All batches of all clients must have the same form, names, dtypes and trailing shapes. The
                caller may change the batch after ``add`` has returned.
            priorities: Priorities of shape (n,), finite and not negative, for a prioritised buffer. By default, each
                item gets the largest priority that the buffer has had.

        Returns:
            The result of the server's scoring hook for this batch, or None without a hook.

        **Cancellation**: The items may or may not be stored.

        Raises:
            ValueError, TypeError: The batch or the priorities are invalid.
            DisagreementError: The buffer's items have a different layout. The message names the first difference.
        """
        self._welcomed()
        rows = self._layout_of(batch).pack(batch)
        count = len(rows)
        payload = rows.reshape(-1)
        if priorities is not None:
            payload = np.concatenate((payload, as_priorities(priorities, count, self._is_prioritized).view(np.uint8)))
        score: float | None = await self._change(
            lambda request, data: messages.Add(request, count, priorities is not None, len(payload), data), payload
        )
        return score

    def _layout_of(self, batch: Batch) -> RowLayout:
        """Return the layout of this client's batches. Raise ValueError if ``batch`` has a different layout."""
        own = self._own_layout
        if own is not None and own.fits(batch):
            return own
        layout = RowLayout.of(batch)
        if own is not None:
            raise ValueError(f"each batch must have the layout of the first one: {own.difference(layout)}")
        self._send(messages.declare(layout))
        self._own_layout = layout
        return layout

    async def sample(self, n: int, *, beta: float = 0.4, wait: bool = True) -> Sample:
        """Sample ``n`` items at random, with replacement.

        Args:
            n: Number of items.
            beta: Exponent of a prioritised buffer's importance weights, from 0 (no bias correction) to 1 (full
                correction).
            wait: Whether to wait until the buffer contains ``n`` items. If false, at most the available number is
                sampled.

        Raises:
            ValueError: ``n`` is below 1, or ``beta`` is out of range.
            LocalProtocolError: ``wait`` is true and ``n`` exceeds the buffer's capacity, or every priority is zero.
            BusyError: ``wait`` is false and the buffer is empty. Or ``wait`` is true, the buffer contains fewer than
                ``n`` items, and no client is expected to add more. A client that has added items is expected to add
                more until it leaves the block.
        """
        count, beta = validation.count("n", n), validation.fraction("beta", beta)
        self._drawing_count += 1
        try:
            if self._own_layout is None:  # a task that was started with this one may add items first
                await yield_to_loop()
            drawn: messages.Drawn = await self._call(
                lambda request, _: messages.Draw(request, count, beta, wait), self._draw_limit
            )
            return await self._unpack(drawn, count)
        finally:
            self._drawing_count -= 1
            self._services.engine.recheck()

    async def update_priorities(
        self, ids: torch.Tensor | Sequence[int], priorities: torch.Tensor | Sequence[float]
    ) -> None:
        """Set new priorities for sampled items, and skip items that the buffer no longer contains.

        Args:
            ids: Ids of the items, of shape (n,), from :class:`Sample`.
            priorities: New priorities of shape (n,), finite and not negative.

        Raises:
            ValueError: The buffer is not prioritised, the lengths differ, or a priority is out of range.
        """
        which = as_ids(ids)
        values = as_priorities(priorities, len(which), self._is_prioritized)
        payload = np.concatenate((which.view(np.uint8), values.view(np.uint8)))
        await self._change(lambda request, data: messages.Update(request, len(which), len(payload), data), payload)

    @property
    def capacity(self) -> int:
        """Maximum number of items in the buffer."""
        return self._welcomed().capacity

    @property
    def _is_prioritized(self) -> bool:
        return self._welcomed().prioritized

    def _welcomed(self) -> messages.Welcome:
        if self._welcome is None:
            raise LocalProtocolError(
                "a ReplayBuffer must be used inside its async with block: async with ReplayBuffer(server) as buffer"
            )
        return self._welcome

    async def _change(self, make: Callable[[int, bytes], messages.Change], payload: npt.NDArray[np.uint8]) -> Any:
        """Send a payload for the server to store, and return the server's answer.

        Args:
            make: Function that returns the request, given its number and the part of the payload sent inside the
                message.
            payload: Bytes of the items or priorities.
        """
        self._adding_count += 1
        try:
            return await self._call(make, self._add_limit, payload)
        finally:
            self._adding_count -= 1
            if not self._adding_count:
                self._services.engine.recheck()

    async def _call(
        self,
        make: Callable[[int, bytes], messages.Change | messages.Draw],
        limit: RequestLimit,
        payload: npt.NDArray[np.uint8] = _NO_PAYLOAD,
    ) -> Any:
        """Send a request when the limit of unanswered requests allows it, and return the server's answer.

        If the caller is cancelled, the request still counts as unanswered until its answer arrives.

        Args:
            make: See :meth:`_change`.
            limit: Limit of unanswered requests of this kind.
        """
        self._welcomed()
        await limit.acquire(self._awaited(WaitKind.REPLAY_ROOM))
        try:
            if self._error is not None:
                raise self._error
            request, self._next_request = self._next_request, (self._next_request + 1) % _REQUEST_COUNT
            is_inline = len(payload) <= messages.INLINE_NBYTES_MAX
            message = make(request, payload.tobytes() if is_inline else b"")
            streamed = None if is_inline else np.array(payload)  # the stream continues if the caller is cancelled
        except BaseException:  # the buffer has ended, or memory has run out
            limit.release()
            raise
        call = self._calls[request] = PendingCall(self._services.engine.loop.create_future(), streamed, limit)
        what = self._awaited()
        try:
            self._send(message)
            await self._services.engine.park(call.waiter, what)
        except asyncio.CancelledError:
            if isinstance(message, messages.Draw):
                self._send(messages.Withdraw(request))
            raise
        except AsyncdistError:  # the request was not sent, or the job has failed: no answer will arrive
            self._complete(request, None, None)
            raise
        if call.error is not None:
            raise call.error
        if isinstance(message, messages.Draw) != isinstance(call.answer, messages.Drawn):
            raise RemoteProtocolError(
                f"rank {self._server} answered the request {message!r:.80} with the wrong type of message, "
                f"{call.answer!r:.80}"
            )
        return call.answer

    async def _unpack(self, drawn: messages.Drawn, asked_count: int) -> Sample:
        nbytes = -1 if self._layout is None else drawn.count * (self._layout.nbytes + 16)
        is_whole = drawn.nbytes == nbytes and len(drawn.data) in (0, nbytes)
        if self._layout is None or not is_whole or not 0 <= drawn.count <= asked_count:
            text = (
                f"rank {self._server} sent {drawn.count} items in {drawn.nbytes} bytes, which do not fit the layout "
                f"{self._layout} or the {asked_count} requested items"
            )
            raise RemoteProtocolError(text, rank=self._server)
        is_streamed = drawn.nbytes and not drawn.data
        payload = await self._receive(drawn) if is_streamed else np.frombuffer(drawn.data, np.uint8)
        end = drawn.count * self._layout.nbytes
        ids, weights = payload[end : end + 8 * drawn.count], payload[end + 8 * drawn.count :]
        return Sample(
            self._layout.unpack(payload[:end].reshape(drawn.count, -1)),
            torch.from_numpy(ids.copy().view(np.int64)),
            torch.from_numpy(weights.copy().view(np.float64)),
        )

    async def _receive(self, drawn: messages.Drawn) -> npt.NDArray[np.uint8]:
        if self._error is not None:  # the server has ended and would not answer the grant
            raise self._error
        services = self._services
        try:
            buffer = np.empty(drawn.nbytes, np.uint8)
            targets = split(buffer.data, CHUNK_NBYTES)
            inbound = services.slots.inbound(self._server, targets, lambda slot: self._send(Cancel(slot)))
        except BaseException:  # usually MemoryError or BusyError: the server must not wait for the grant
            self._send(messages.Withdraw(drawn.request))
            raise
        with inbound as stream:
            self._send(Grant(stream.slot, drawn.nbytes, CHUNK_NBYTES), round=drawn.request)
            try:
                await stream.whole()
            except StreamAborted as error:  # the server's reason has a different tag and may arrive later
                await services.engine.until(
                    lambda: self._error is not None,
                    WaitId(WaitKind.REPLAY_END_REASON, name=self._name),
                    deadline=services.time() + _REASON_TIMEOUT_S,
                )
                failure: AsyncdistError | None = self._error
                raise failure or error from error
        return buffer

    def _send(self, message: Any, *, round: int = 0) -> None:
        assert self._channel is not None
        if self._is_closed:  # this client has sent Left, so the server ignores later messages
            return
        try:
            self._channel.send_nowait(message, self._server, round=round)
        except RankLostError as error:
            self._fail(error)

    # -- answers ----------------------------------------------------------------------------------------------------

    def _on_message(self, envelope: Envelope[messages.ReplayMessage]) -> None:
        is_entered = self._welcome or isinstance(envelope.message, messages.Welcome | messages.Refused)
        if envelope.source != self._server or not is_entered:
            self._refuse_grant(envelope)
            return  # the message is from a different rank, or for an earlier client on this rank
        match envelope.message:
            case messages.Welcome() as welcome if welcome.entry == self._entry:
                self._welcome = welcome
            case messages.Refused(entry, reason) if entry == self._entry:
                self._fail(DisagreementError(f"the replay buffer on rank {self._server} refused this rank: {reason}"))
            case messages.Declare() as message:
                self._on_declare(message)
            case messages.Added(requests, scores):
                for request, score in zip(requests, scores, strict=False):
                    self._complete(request, score, None)
            case messages.Drawn() as drawn:
                self._on_drawn(drawn)
            case messages.Failed(request, later, reason):
                self._complete(request, None, BusyError(reason) if later else LocalProtocolError(reason))
            case Grant() as grant:
                self._on_grant(grant, envelope.round)
            case Cancel(slot):
                if slot in self._streams:
                    self._streams[slot].stop()
            case messages.Ended(kind, text):
                self._fail(ended_error(self._server, self._name, kind, text))
        self._services.engine.recheck()

    def _refuse_grant(self, envelope: Envelope[messages.ReplayMessage]) -> None:
        if envelope.source == self._server:
            messages.refuse_grant(self._services, envelope)

    def _on_declare(self, message: messages.Declare) -> None:
        try:
            self._layout = messages.declared(message)
        except ValueError as error:
            self._fail(
                RemoteProtocolError(f"rank {self._server} declared an invalid layout: {error}", rank=self._server)
            )

    def _on_drawn(self, drawn: messages.Drawn) -> None:
        call = self._calls.get(drawn.request)
        if drawn.nbytes and not drawn.data and (call is None or call.waiter.done()):
            self._send(messages.Withdraw(drawn.request))  # the caller was cancelled: no grant will be sent
        self._complete(drawn.request, drawn, None)

    def _complete(self, request: int, answer: Any, error: AsyncdistError | None) -> None:
        call = self._calls.pop(request, None)
        if call is not None:
            call.answer, call.error = answer, error
            resolve_waiter(call.waiter, None)
            call.limit.release()

    def _on_grant(self, grant: Grant, request: int) -> None:
        call = self._calls.get(request)
        payload = None if call is None or call.waiter.cancelled() else call.payload
        fits = payload is not None and grant.nbytes == len(payload)
        chunks = split(payload.data, grant.chunk_nbytes) if fits and payload is not None else []
        stream = self._streams[grant.slot] = OutboundStream(self._services.slots, chunks, self._server, grant.slot)
        sending = self._stream(grant.slot, stream, bool(chunks))
        self._services.spawn_service(sending, name=f"items for rank {self._server}")

    async def _stream(self, slot: int, stream: OutboundStream, has_items: bool) -> None:
        try:
            await stream.run_notified(tags.REPLAY, aborts=not has_items)
        except RankLostError as error:
            self._fail(error)
        finally:
            if self._streams.get(slot) is stream:  # a new stream may already use the slot
                del self._streams[slot]

    def _on_gone(self, rank: int) -> None:
        if rank == self._server and self._welcome is None:
            error = abandoned_error(self._services, self._server, self._name)
            is_late = self._services.incarnation and isinstance(error, ClosedError)
            self._fail(late_error(self._server, self._name) if is_late else error)
        elif rank == self._server:
            self._services.spawn_service(
                self._wait_for_end_reason(), name=f"end reason of the replay buffer {self._name!r}"
            )

    async def _wait_for_end_reason(self) -> None:
        """Wait for the server's message that says why it ended, and fail all requests with this reason.

        The notice that the server has left may arrive before this message.
        """
        error: AsyncdistError = abandoned_error(self._services, self._server, self._name)
        try:
            await self._services.engine.until(
                lambda: self._error is not None or self._server not in self._services.left,
                WaitId(WaitKind.REPLAY_END_REASON, name=self._name),
                deadline=self._services.time() + _REASON_TIMEOUT_S,
            )
            await self._services.engine.drain()
        except AsyncdistError as failure:  # the job has failed
            error = failure
        finally:
            self._fail(error)

    def _fail(self, error: AsyncdistError) -> None:
        self._error = self._error or error
        for request in list(self._calls):
            self._complete(request, None, self._error)
