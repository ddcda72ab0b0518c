"""Coordinates selective averaging: receives messages, asks the decision core, and sends what it answers.

It runs on the group's first rank, beside that rank's training, or on a reserved rank that trains nothing. On a
training rank it only gets its turn at that rank's safe points, so its answers are as late as that rank's step is long.

It belongs to the world, not to the policy: a rank may leave the policy while its coordinator serves the others, until
the last member has left.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from dataclasses import fields
from typing import Any, assert_never

from asyncdist import Envelope, RankLostError, World, current_world, tags, validation
from asyncdist.collectives.agreement_messages import Agreed
from asyncdist.messaging import wire
from asyncdist.messaging.channels import Channel
from asyncdist.messaging.services import Services
from protocols.policy import START
from protocols.selective.messages import (
    Abandoned,
    Applied,
    Assign,
    ControlMessage,
    Decline,
    End,
    Frozen,
    Leave,
    Ready,
    Report,
)
from protocols.selective.rounds import RoundCoordinator, Send
from protocols.selective.rules import SelectiveRules
from protocols.selective.statistics import CoordinatorStatistics


async def coordinate(
    members: Sequence[int], *, world: World | None = None, start_timeout_s: float = 60.0
) -> CoordinatorStatistics:
    """Coordinate one policy on a reserved rank, which is no member and trains nothing.

    The members name this rank as ``coordinator=`` of their policy. Returns when all of them have left.

    Args:
        members: the ranks of the policy's group, in the group's order.
        world: the current one by default.
        start_timeout_s: how long the start waits for the last member.

    Raises:
        TypeError, ValueError: ``members`` is no list of ranks, names one twice or this one, or is empty; the timeout is
            out of range.
        StartTimeoutError, DisagreementError: as the policy's start on the members.

    **Cancellation**: the members are told, and train on without averaging; each of them warns of it.
    """
    world = world or current_world()
    _check_members(members, world)
    validation.seconds("start_timeout_s", start_timeout_s)
    ranks = (*members, world.rank)
    agreed = await world.agreements.agree(ranks, START, {}, leader=world.rank, timeout_s=start_timeout_s)
    options = {
        key.removeprefix("option "): json.loads(value)
        for key, value in agreed.values.items()
        if key.startswith("option ")
    }
    rules = SelectiveRules(**{entry.name: options[entry.name] for entry in fields(SelectiveRules)})
    scopes = PolicyScopes(ranks, agreed)
    coordinator = Coordinator(
        world.services, members, rules, scopes, stream_safe_points=int(options["stream_safe_points"])
    )
    await coordinator.serve(is_reserved=True)
    return coordinator.statistics()


class PolicyScopes:
    """Holds the scopes of one policy, equal on all of its ranks.

    Args:
        ranks: those that agreed to start it, in that order.
        agreed: the result of the agreement.
    """

    def __init__(self, ranks: tuple[int, ...], agreed: Agreed) -> None:
        self.to_members = wire.scope_of(ranks, "members of a policy", agreed.time)
        self.to_coordinator = wire.scope_of(ranks, "coordinator of a policy", agreed.time)


class Coordinator:
    """Carries out what the decision core answers; it owns two channels and the core.

    Args:
        services: of the coordinator's rank.
        members: ranks of the policy's group.
        rules: its options.
        scopes: of the policy.
        stream_safe_points: see :class:`RoundCoordinator`.
    """

    def __init__(
        self,
        services: Services,
        members: Sequence[int],
        rules: SelectiveRules,
        scopes: PolicyScopes,
        *,
        stream_safe_points: int,
    ) -> None:
        self._services = services
        self._core = RoundCoordinator(members, rules, stream_safe_points=stream_safe_points)
        self._gone = [rank for rank in members if rank in services.gone]
        services.on_gone(self._gone.append)
        self._reports: Channel[Report] = services.open_channel(
            Report, tag=tags.METRIC, scope=scopes.to_coordinator, name="metric reports", overflow="latest"
        )
        self._control: Channel[ControlMessage] = services.open_channel(
            ControlMessage,
            tag=tags.CONTROL,
            scope=scopes.to_coordinator,
            peer_scope=scopes.to_members,
            name="coordinator",
        )

    async def serve(self, *, is_reserved: bool = False) -> None:
        """Coordinate until every member has left or is lost.

        Args:
            is_reserved: whether a user awaits this, and may cancel it while the members go on: they are told then.
        """
        core, services = self._core, self._services
        try:
            while not core.finished:
                # Everything that has come is heard before any deadline is judged: this rank may have been computing.
                while (heard := self._next_envelope()) is not None:
                    if sends := self._hear(heard):
                        self._send(sends)
                while self._gone:
                    self._send(core.on_lost(self._gone.pop(0), services.time()))
                deadline = core.next_deadline()
                if deadline is not None and services.time() >= deadline:
                    self._send(core.on_time(services.time()))
                elif not core.finished:
                    await services.engine.until(self._has_work, "reports and answers of members", deadline=deadline)
        except asyncio.CancelledError:
            if is_reserved and services.engine.failure is None:  # donors would wait in vain for the end of their round
                self._send(core.on_stop())
            raise
        finally:
            services.off_gone(self._gone.append)
            self._reports.close()
            self._control.close()

    def statistics(self) -> CoordinatorStatistics:
        """Return what has been decided so far."""
        return self._core.statistics()

    def _has_work(self) -> bool:
        return self._control.is_ready or self._reports.is_ready or bool(self._gone)

    def _next_envelope(self) -> Envelope[Any] | None:
        return self._control.receive_nowait() or self._reports.receive_nowait()

    def _hear(self, envelope: Envelope[Report | ControlMessage]) -> Sequence[Send]:
        core, now = self._core, self._services.time()
        rank, number = envelope.source, envelope.round
        match envelope.message:
            case Report() as report:  # nearly all are; a pattern with its fields takes five times as long
                return core.on_report(rank, report.iteration, report.value, report.step_time_s, now)
            case Ready(iteration):
                return core.on_ready(rank, number, iteration, now)
            case Decline(reason):
                return core.on_decline(rank, number, reason, now)
            case Applied(iteration):
                return core.on_applied(rank, number, iteration, now)
            case Abandoned(reason):
                return core.on_abandoned(rank, number, reason, now)
            case Leave():
                return core.on_leave(rank, now)
            case Assign() | Frozen() | End():
                return ()  # these go the other way
            case unknown:
                assert_never(unknown)

    def _send(self, sends: Sequence[Send]) -> None:
        for send in sends:
            try:
                self._control.send_nowait(send.message, send.dest, round=send.round)
            except RankLostError:
                self._gone.append(send.dest)


def _check_members(members: Any, world: World) -> None:
    others = f"the ranks of a policy's group, from 0 to {world.size - 1}, each once and without rank {world.rank}"
    if isinstance(members, str) or not isinstance(members, Sequence):
        validation.refuse("members", members, others, TypeError)
    wrong = [rank for rank in members if type(rank) is not int or not 0 <= rank < world.size or rank == world.rank]
    if wrong or not members or len(set(members)) != len(members):
        validation.refuse("members", members, others)
