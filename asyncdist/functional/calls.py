"""Provides requests and replies between ranks, on one message tag."""

from __future__ import annotations

import asyncio
import contextlib
import inspect
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Final, Generic, Self, TypeVar

from asyncdist.collectives.groups import Group
from asyncdist.errors import AsyncdistError, ClosedError, LocalProtocolError, RankLostError, RemoteError
from asyncdist.messaging import wire
from asyncdist.messaging.channels import Channel, Envelope
from asyncdist.runtime.failing.process_ends import end_forked_child
from asyncdist.runtime.world import World, world_to_await
from asyncdist.tensors.serialization import name_and_message
from asyncdist.waits import WaitId, WaitKind

#: Minimum number of unread messages at which a rank stops receiving.
_CAPACITY: Final = 1024

AskT = TypeVar("AskT")
AnswerT = TypeVar("AnswerT")


@dataclass(frozen=True, slots=True)
class _Failed:
    """Message with the exception that the answering function has raised, instead of an answer."""

    kind: str
    words: str


@dataclass(frozen=True, slots=True)
class _Left:
    """Message that notifies another rank that the sender no longer answers."""


def _failed(error: BaseException) -> _Failed:
    return _Failed(type(error).__name__, name_and_message(error)[1])


class Calls(Generic[AskT, AnswerT]):
    """Lets ranks ask each other questions. Each participating rank enters it as an async context manager.

    ::

        async with ad.Calls(Ask, Answer, tag=50, answer=lambda ask, source: Answer(2 * ask.number)) as calls:
            reply = await calls.ask(Ask(21), dest=1)
            await ad.barrier()                            # others may still be asking this rank

    Questions are answered while this rank awaits something, for example ``world.safe_point()``. If ``answer`` is a
    coroutine function, several questions are answered concurrently.

    Args:
        ask_type: Frozen dataclass for questions.
        answer_type: Frozen dataclass for answers, different from ``ask_type``.
        tag: Tag of the messages, as for :meth:`asyncdist.World.channel`.
        answer: Function or coroutine function that takes a question and the asking rank, and returns the answer. None
            if this rank only asks.

    Raises:
        TypeError: The types are equal, or have fields that cannot be sent.
        LocalProtocolError: The tag is in use or reserved. Raised when the context is entered.
    """

    def __init__(
        self,
        ask_type: type[AskT],
        answer_type: type[AnswerT],
        *,
        tag: int,
        answer: Callable[[AskT, int], Awaitable[AnswerT] | AnswerT] | None = None,
        group: Group | None = None,
        world: World | None = None,
    ) -> None:
        if ask_type is answer_type:
            raise TypeError(f"ask_type and answer_type must be different dataclasses, got {ask_type.__name__} for both")
        self._types = ask_type, answer_type
        self._tag = tag
        self._answer = answer
        self._group = group
        self._given_world = world
        self._world: World | None = None
        self._count = 0
        self._waiting: dict[int, tuple[int, asyncio.Future[Any]]] = {}
        self._not_answering: set[int] = set()  # ranks that no longer answer
        self._channel: Channel[Any] | None = None
        self._reader: asyncio.Task[None]

    async def __aenter__(self) -> Self:
        ask_type, answer_type = self._types
        self._world = world = world_to_await(self._given_world)  # this object may be entered in other worlds later
        kind: Any = ask_type | answer_type | _Failed | _Left
        name = f"calls of {ask_type.__name__}"
        # Each rank must have room for the notices of all others, which this rank sends without waiting when it leaves.
        capacity = max(_CAPACITY, len((self._group or world.group).ranks))
        self._channel = world.channel(kind, tag=self._tag, name=name, capacity=capacity, group=self._group)
        self._not_answering.clear()  # this object may have been entered before
        world.services.on_gone(self._on_gone)
        self._reader = world.services.spawn_service(self._read(self._channel), name=name)
        return self

    async def __aexit__(
        self, _: type[BaseException] | None, error: BaseException | None, __: TracebackType | None
    ) -> None:
        channel, world = self._channel, self._world
        if channel is None or world is None:  # the block was not entered, or has ended
            return
        end_forked_child(world.process_id, error)
        self._channel = None
        self._reader.cancel()
        world.services.off_gone(self._on_gone)
        for number in list(self._waiting):
            self._fail(
                number, ClosedError("this rank has left the async with block of its calls, so no answer will arrive")
            )
        for rank in (self._group or world.group).ranks:
            if rank != world.rank and rank not in self._not_answering and rank not in world.services.gone:
                with contextlib.suppress(ClosedError, RankLostError):  # the rank is lost, or its main has returned
                    channel.send_nowait(_Left(), rank)
        channel.close()

    async def ask(self, question: AskT, dest: int) -> AnswerT:
        """Send a question to rank ``dest``, and return its answer.

        **Cancellation**: the answer is dropped when it arrives.

        Raises:
            RemoteError: The answering function raised an exception, its answer cannot be sent, or rank ``dest`` has no
                ``answer``.
            ClosedError: Rank ``dest`` has left its block, or ``ask`` was called outside the ``async with`` block.
            RankLostError: Rank ``dest`` is lost, or the job has failed.
        """
        channel, world = self._channel, self._world
        if channel is None or world is None:
            raise ClosedError("ask() must be called inside the async with block of the calls")
        if dest in self._not_answering:
            raise self._gone(dest)
        self._count = number = self._count % wire.ROUND_MAX + 1
        waiter: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self._waiting[number] = dest, waiter
        try:
            await channel.send(question, dest, round=number)
            what = WaitId(WaitKind.ANSWER, self._tag, dest)
            await world.services.engine.park(waiter, what)
            answer: AnswerT = waiter.result()
            return answer
        finally:
            self._waiting.pop(number, None)
            if waiter.done() and not waiter.cancelled():
                waiter.exception()  # the send may have failed, too; asyncio would log an unretrieved exception

    async def _read(self, channel: Channel[Any]) -> None:
        while True:
            envelope = await channel.receive()
            if isinstance(envelope.message, _Left):
                self._not_answering.add(envelope.source)
                self._on_gone(envelope.source)
            elif isinstance(envelope.message, self._types[0]):
                assert self._world is not None, "it was entered"
                name = f"an answer to rank {envelope.source}"
                self._world.services.spawn_service(self._reply(channel, envelope), name=name)
            else:
                self._handle_answer(envelope)

    def _handle_answer(self, envelope: Envelope[Any]) -> None:
        dest, waiter = self._waiting.get(envelope.round, (-1, None))
        if waiter is None or waiter.done() or dest != envelope.source:
            return  # No task is waiting for this answer.
        if isinstance(envelope.message, _Failed):
            failed = envelope.message
            words = f"rank {dest} failed to answer: {failed.kind}: {failed.words}"
            waiter.set_exception(RemoteError(words, rank=dest))
        else:
            waiter.set_result(envelope.message)

    async def _reply(self, channel: Channel[Any], envelope: Envelope[Any]) -> None:
        try:
            if self._answer is None:
                raise LocalProtocolError(
                    "this rank cannot answer, because its Calls object was created without answer="
                )
            answer: Any = self._answer(envelope.message, envelope.source)
            if inspect.isawaitable(answer):
                answer = await answer
            if not isinstance(answer, self._types[1]):
                raise TypeError(f"answer= must return a {self._types[1].__name__}, got {answer!r:.80}")
        except Exception as error:
            answer = _failed(error)
        except asyncio.CancelledError as error:
            task = asyncio.current_task()
            if task is None or task.cancelling():  # this task was cancelled, not only one that answer= awaits
                raise
            answer = _failed(error)
        # The asking rank may be lost, or one of the two ranks may have left its block.
        with contextlib.suppress(ClosedError, RankLostError):
            try:
                await channel.send(answer, envelope.source, round=envelope.round)
            except (ClosedError, RankLostError):
                raise
            except Exception as error:  # the answer has a field that cannot be sent
                await channel.send(_failed(error), envelope.source, round=envelope.round)

    def _gone(self, rank: int) -> AsyncdistError:
        """Return the error of questions to a rank that is gone, or no longer answers."""
        if rank not in self._not_answering:
            return RankLostError(f"rank {rank} is gone and did not answer", rank=rank)
        words = f"rank {rank} no longer answers, because it has left the async with block of its calls"
        return ClosedError(words, rank=rank)

    def _on_gone(self, rank: int) -> None:
        for number, (dest, _) in list(self._waiting.items()):
            if dest == rank:
                self._fail(number, self._gone(rank))

    def _fail(self, number: int, error: AsyncdistError) -> None:
        _, waiter = self._waiting[number]
        if not waiter.done():
            waiter.set_exception(error)
