"""Runs the coordinator where this rank coordinates, and exchanges the messages by which another rank takes over.

:mod:`protocols.selective.succession` decides; this carries its instructions out. A :class:`Leadership` belongs to one
policy on one rank. It outlives the policy while its rank coordinates for the others, and holds no tensors.

The messages of all policies of a rank travel on one channel. A rank may be nominated, or told of a new coordinator,
after it has left the policy: it answers that it has, for which it keeps a number for each policy that it has left.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final, TypeAlias

from asyncdist import BusyError, Envelope, RankLostError, tags
from asyncdist.messaging import wire
from asyncdist.messaging.channels import Channel
from asyncdist.messaging.services import Services
from protocols.selective.coordinator import Coordinator, PolicyScopes
from protocols.selective.rules import SelectiveRules
from protocols.selective.statistics import CoordinatorStatistics
from protocols.selective.succession import (
    WATCHER_COUNT,
    Claim,
    Follow,
    Inform,
    Nominate,
    Steps,
    Succession,
    Watch,
)

logger = logging.getLogger("protocols.selective.leadership")


@dataclass(frozen=True, slots=True)
class Nomination:
    """Tells a rank that the coordinator of a policy is gone, and that it is the next; ``epoch`` is the last known."""

    policy: int
    epoch: int


@dataclass(frozen=True, slots=True)
class TakeOver:
    """Tells a member which rank coordinates in an epoch."""

    policy: int
    epoch: int
    coordinator: int


@dataclass(frozen=True, slots=True)
class Declined:
    """Answers that this rank has left the policy."""

    policy: int


SuccessionMessage: TypeAlias = Nomination | TakeOver | Declined

_UNKNOWN: Final = "after a rank that is gone"  # of whose epoch only its end is heard
#: Policies that a rank remembers to have left: those of long ago have no members any more.
LEFT_COUNT_MAX: Final = 1024


class _Board:
    """Hands the messages about coordinators to the policies of one rank, and answers for those that it has left.

    There is one for each rank.
    """

    def __init__(self, services: Services) -> None:
        self._policies: dict[int, Callable[[SuccessionMessage, int], None]] = {}
        self._left: dict[int, None] = {}  # oldest first
        self._loop = services.engine.loop
        self._channel: Channel[SuccessionMessage] = services.open_channel(
            SuccessionMessage,
            tag=tags.CONTROL,
            scope=wire.scope_of((), "coordinators of policies", 0),
            name="succession",
            handler=self._on_message,
        )

    def open(self, policy: int, handler: Callable[[SuccessionMessage, int], None]) -> None:
        """Call ``handler(message, source)`` for the messages about a policy."""
        self._policies[policy] = handler

    def close(self, policy: int) -> None:
        """Answer from now on that this rank has left the policy."""
        del self._policies[policy]
        self._left[policy] = None
        if len(self._left) > LEFT_COUNT_MAX:
            del self._left[next(iter(self._left))]

    def send(self, message: SuccessionMessage, dest: int) -> None:
        """Send, unless ``dest`` cannot be reached; what is not heard is asked for again."""
        try:
            self._channel.send_nowait(message, dest)
        except (RankLostError, BusyError) as error:
            logger.debug("%s to rank %d: %s", type(message).__name__, dest, error)

    def _on_message(self, envelope: Envelope[Any]) -> None:
        """Take a message in the loop's next turn: a pass may run while a policy carries out what it was told."""
        self._loop.call_soon(self._handle, envelope.message, envelope.source)

    def _handle(self, message: SuccessionMessage, source: int) -> None:
        handler = self._policies.get(message.policy)
        if handler is not None:
            handler(message, source)
        elif message.policy in self._left and isinstance(message, Nomination | TakeOver):
            self.send(Declined(message.policy), source)


class Leadership:
    """Knows who coordinates one policy, and coordinates it when it is this rank's turn.

    Args:
        services: of this rank.
        members: ranks of the policy's group.
        order: these, in the order in which they take over.
        coordinator: the rank that begins.
        rules, scopes: of the policy.
        stream_safe_points: as for :class:`Coordinator`.
        on_gone: called with the reason, as "is gone", when the coordinator is.
        on_new: called with the epoch and the rank when another one, or this rank, takes over.
        is_reserved: whether this rank is no member, and coordinates only in :meth:`serve_reserved`.
    """

    def __init__(
        self,
        services: Services,
        members: Sequence[int],
        order: Sequence[int],
        coordinator: int,
        rules: SelectiveRules,
        scopes: PolicyScopes,
        *,
        stream_safe_points: int,
        on_gone: Callable[[str], None],
        on_new: Callable[[int, int], None],
        is_reserved: bool = False,
    ) -> None:
        self._services = services
        self._members = tuple(members)
        # Of all ranks of the world no list is made: each of thousands of ranks would have one.
        is_world = len(members) == services.size
        self._everybody = range(services.size) if is_world else dict.fromkeys((*members, coordinator))
        self._rules = rules
        self._scopes = scopes
        self._stream_safe_points = stream_safe_points
        self._on_gone = on_gone
        self._on_new = on_new
        self._succession = Succession(services.rank, order, coordinator)
        self._has_left = self._is_reserved = is_reserved
        self._is_closed = False
        self._predecessor = _UNKNOWN
        self._watch = Watch()
        self._serving: Coordinator | None = None
        self._served: CoordinatorStatistics | None = None
        self._board = services.shared(_Board)
        self._board.open(scopes.policy, self._on_message)
        services.on_gone(self._on_peer)
        if services.rank == coordinator:
            self._serve(epoch=0, members=self._members)

    @staticmethod
    def listen(services: Services) -> None:
        """Take messages about coordinators from now on: others may have started where this rank's start fails."""
        services.shared(_Board)

    def begin(self) -> None:
        """Take note of the ranks that have gone since the start was agreed on."""
        for rank in sorted(self._services.gone):
            self._note_peer(rank)

    @property
    def coordinator(self) -> int | None:
        """The rank that coordinates, as far as this rank knows; None when it is gone."""
        return self._succession.coordinator

    @property
    def epoch(self) -> int:
        """Of the coordinator; it grows whenever another rank takes over."""
        return self._succession.epoch

    def statistics(self) -> CoordinatorStatistics | None:
        """Return what has been decided here; None where this rank has never coordinated."""
        return self._serving.statistics() if self._serving is not None else self._served

    def note_stopped(self, rank: int) -> None:
        """Note that the coordinator has stopped, as it says."""
        if rank == self._succession.coordinator:
            self._lose("has stopped", rank)

    def on_report(self, step: int, interval_s: float) -> bool:
        """Look after the coordinator; called before each report of this rank.

        Goes on looking for one while there is none, and takes over from one that does not attend to its task.

        Args:
            step: the number of this rank's step.
            interval_s: the time since its report before.

        Returns:
            whether the report is to ask the coordinator for an answer.
        """
        if self._succession.coordinator is None:
            self._carry_out(self._succession.on_cadence())
        place = self._succession.place(WATCHER_COUNT)
        if place is None or self._succession.coordinator is None:
            return False
        self._watch.on_report(step, interval_s, self._services.time())
        why = self._watch.suspicion(place)
        if why is not None:
            self._predecessor = f"after rank {self._succession.coordinator}, which {why}"
            self._carry_out(self._succession.on_suspicion())
        return why is None

    def note_answer(self, step: int) -> None:
        """Note that the coordinator has read a report that asked for an answer; ``step`` as in :meth:`on_report`."""
        self._watch.on_answer(step, self._services.time())

    async def serve_reserved(self) -> CoordinatorStatistics:
        """Coordinate in the caller's task until every member has left, or another rank has taken over."""
        assert self._serving is not None, "this rank is no reserved coordinator"
        return await self._run(self._serving)

    def leave(self) -> None:
        """Take part no longer. A coordinator that runs here serves the others until they have left."""
        self._has_left = True
        self._succession.leave()
        self._on_gone = lambda _: None  # it was the policy's, which has the model
        self._on_new = lambda *_: None
        if self._serving is None:
            self._close()

    def _close(self) -> None:
        if not self._is_closed:
            self._is_closed = True
            self._services.off_gone(self._on_peer)
            self._board.close(self._scopes.policy)

    # -- news -------------------------------------------------------------------------------------------------------

    def _on_peer(self, rank: int) -> None:
        self._services.engine.loop.call_soon(self._note_peer, rank)

    def _note_peer(self, rank: int) -> None:
        """Note that a rank is lost, or that its main has returned; a coordinator goes on serving after that."""
        if rank not in self._everybody or self._is_closed:
            return
        if rank in self._services.left:
            self._carry_out(self._succession.on_left(rank))
        elif rank == self._succession.coordinator:
            self._lose("is gone", rank)
        else:
            self._carry_out(self._succession.on_lost(rank))

    def _lose(self, why: str, rank: int) -> None:
        steps = self._succession.on_lost(rank)
        logger.info("rank %d, the coordinator, %s", rank, why)
        self._predecessor = f"after rank {rank}, which {why}"
        self._on_gone(why)
        self._carry_out(steps)

    def _on_message(self, message: SuccessionMessage, source: int) -> None:
        if source not in self._everybody:
            logger.debug("rank %d, which is no member, sent a %s", source, type(message).__name__)
            return
        match message:
            case Declined():
                if self._serving is not None:
                    self._serving.note_left(source)
                self._carry_out(self._succession.on_left(source))
            case Nomination(_, epoch) if self._has_left and not self._serves_in(epoch):
                self._board.send(Declined(self._scopes.policy), source)
            case Nomination(_, epoch):
                self._carry_out(self._succession.on_nomination(source, epoch))
            case TakeOver(_, epoch, coordinator) if coordinator in self._everybody:
                self._carry_out(self._succession.on_claim(epoch, coordinator, source))

    def _serves_in(self, epoch: int) -> bool:
        """Whether this rank coordinates, in this epoch or a later one."""
        return self._serving is not None and epoch <= self.epoch

    def _carry_out(self, steps: Steps) -> None:
        policy = self._scopes.policy
        for step in steps:
            match step:
                case Nominate(dest):
                    self._board.send(Nomination(policy, self.epoch), dest)
                case Inform(dest):
                    self._inform(dest)
                case Follow(epoch, coordinator):
                    self._follow(epoch, coordinator)
                case Claim(epoch):
                    self._claim(epoch)

    def _follow(self, epoch: int, coordinator: int) -> None:
        if self._serving is not None:
            logger.info("rank %d coordinates now, in place of this rank", coordinator)
            self._serving.stop(self._inform)
        if self._has_left:
            self._board.send(Declined(self._scopes.policy), coordinator)
        else:
            self._predecessor = _UNKNOWN
            self._watch.begin()
            self._on_new(epoch, coordinator)

    def _inform(self, rank: int) -> None:
        """Tell a rank that still addresses this one who coordinates now."""
        if self.coordinator is not None:
            self._board.send(TakeOver(self._scopes.policy, self.epoch, self.coordinator), rank)

    def _claim(self, epoch: int) -> None:
        services = self._services
        members = [rank for rank in self._members if self._succession.is_available(rank)]
        if self._serving is not None:  # in an epoch that others have left behind
            self._serving.stop(self._inform)
        self._serve(epoch=epoch, members=members)
        for rank in self._everybody:
            if rank != services.rank and rank not in services.gone:
                self._board.send(TakeOver(self._scopes.policy, epoch, services.rank), rank)
        logger.warning("this rank coordinates now, %s", self._predecessor)
        self._on_new(epoch, services.rank)

    def _serve(self, *, epoch: int, members: Sequence[int]) -> None:
        self._serving = Coordinator(
            self._services,
            members,
            self._rules,
            self._scopes,
            epoch=epoch,
            stream_safe_points=self._stream_safe_points,
        )
        if not self._is_reserved:
            self._services.spawn_service(self._run(self._serving), name="coordinator")

    async def _run(self, coordinator: Coordinator) -> CoordinatorStatistics:
        try:
            await coordinator.serve(is_reserved=self._is_reserved)
            return coordinator.statistics()
        finally:
            if self._serving is coordinator:
                self._serving, self._served = None, coordinator.statistics()
                if self._has_left:
                    self._close()
