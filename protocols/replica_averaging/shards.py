"""Selective averaging of sharded replicas: each rank averages its shards with its counterparts in other replicas.

The k-th ranks of all replicas are *counterparts*, which have the same shards of the model. Shards are sent only between
counterparts. The first rank of a replica is its leader, which exchanges messages with the coordinator. The other ranks,
its followers, receive these messages at *swap points*, steps in which all ranks of the replica wait for each other. At
a swap point, each rank reports whether its part of an average is complete. The leader decides whether all ranks of the
replica apply the average, abandon it or take a snapshot.

Invariants: The ranks of a replica take their snapshots for a round at the same iteration. They apply an average at the
same iteration, from the same donors with the same weights, or not at all.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from typing import Any, Final, NamedTuple

from asyncdist import AsyncdistError, Envelope, Group, World, reduce_and_broadcast, tags
from asyncdist.messaging import wire
from asyncdist.messaging.channels import Channel
from asyncdist.protocols.joining.scopes import PolicyScopes
from asyncdist.protocols.joining.state_transfer import StateTransfer
from asyncdist.protocols.metrics import MetricSource, mean_of
from asyncdist.protocols.replica_averaging.members import FollowingMember, LeaderEvent, LeadingMember
from asyncdist.protocols.selective.member import Apply, State, TakeSnapshot
from asyncdist.protocols.selective.messages import ControlMessage, Leave
from asyncdist.protocols.selective.policy import AsyncSelectiveAveragingPolicy
from asyncdist.protocols.selective.roles.member_channels import MemberChannels
from asyncdist.protocols.selective.succession import ReportedCoordinator
from asyncdist.protocols.step_info import NOTHING, StepInfo
from asyncdist.protocols.wrappers import reshard

#: Actions of a replica at a swap point (a step in which its ranks wait for each other), in addition to handling the
#: coordinator's messages.
NOTHING_MORE: Final = 0
SNAPSHOT: Final = 1
APPLICATION: Final = 2


class Status(NamedTuple):
    """Reports a rank's state to its replica's leader at a swap point, where the replica's ranks wait for each other.

    Attributes:
        metric: Metric of the rank, or None if no metric is due or the rank has no new measurement.
        assignment_count: Number of received assignments. The following fields refer to the last assignment.
        is_complete: Whether the rank's part of the average is complete.
        failure: Reason why the rank has abandoned its part, or "".
        nonfinite: Description of the rank's non-finite state, or "". Checked if the part is complete.
    """

    metric: float | None
    assignment_count: int
    is_complete: bool
    failure: str
    nonfinite: str


class Decision(NamedTuple):
    """Sends the leader's decision to the replica's other ranks at a swap point, where all wait for each other.

    Attributes:
        events: Events of the leader's state machine since the last swap point.
        action: NOTHING_MORE, SNAPSHOT or APPLICATION.
        nonfinite: Description of the replica's non-finite state before the average was applied, or "".
    """

    events: tuple[LeaderEvent, ...]
    action: int
    iteration: int
    nonfinite: str
    info: dict[str, Any]
    coordinator: int | None
    epoch: int


class CounterpartChannels(MemberChannels):
    """Provides the channels of a follower (not a replica's first rank), which sends nothing to the coordinator."""

    def send_to_coordinator(self, message: ControlMessage, coordinator: int, round: int) -> None:
        """Do nothing: the leader receives this rank's status when the ranks of the replica next wait for each other."""


class ShardAveraging(AsyncSelectiveAveragingPolicy):
    """Averages one rank's shards with its counterparts, the ranks of other replicas that have the same shards.

    Call :meth:`place` before ``async with``.
    """

    keeps_replicas = True
    _holds_copies = True

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._leading: LeadingMember | None = None
        self._following: FollowingMember | None = None
        self._reported_coordinator = ReportedCoordinator()  # coordinator that the leader has reported to this follower
        self._replica: Group
        self._counterparts: Mapping[int, int]
        self._ending: Channel[Leave]
        self._has_leader_left = False

    def place(self, world: World, replica: Group, counterparts: Group, leaders: Sequence[int]) -> None:
        """Set the ranks of this replica, leader first, this rank's counterparts in all replicas, and all leaders."""
        self._given_group, self._given_world, self._replica = counterparts, world, replica
        self._counterparts = dict(zip(leaders, counterparts.ranks, strict=True))
        if world.rank == replica.ranks[0]:
            self._member = self._leading = LeadingMember()
        else:
            self._member = self._following = FollowingMember()

    # -- starting and leaving ---------------------------------------------------------------------------------------

    def _takes_means(self) -> bool:
        return self._leading is not None and super()._takes_means()  # only the leader warns

    def _open_at_start(self, scopes: PolicyScopes, coordinator: int, replaced: Sequence[int]) -> None:
        self._ending = self._services.open_channel(
            Leave,
            tag=tags.CONTROL,
            scope=wire.scope_of(self._replica.ranks, f"end of replica {self._replica.number}", 0),
            name="the end of a replica's policy",
            handler=self._on_leader_left,
        )
        if self._leading is not None:
            super()._open_at_start(scopes, coordinator, replaced)
            return
        states = self._states = StateTransfer(self._services, scopes.policy)
        channels = CounterpartChannels(self._services, scopes)
        roles = self._new_roles(channels, self._reported_coordinator, states)
        self._begin_membership(roles, self._reported_coordinator)

    async def _stop(self, error: BaseException | None) -> None:
        self._opened.conclude("leaving")
        try:
            await super()._stop(error)
        finally:
            if self._leading is not None and self._services.engine.failure is None:
                for rank in self._replica.ranks[1:]:
                    self._notify_follower(rank)
            self._ending.close()

    def _notify_follower(self, rank: int) -> None:
        """Notify a follower that it may leave, because its shards are no longer requested."""
        try:
            self._ending.send_nowait(Leave(), rank)
        except AsyncdistError:  # the follower is lost or is already leaving
            return

    def _on_leader_left(self, _: Envelope[Leave]) -> None:
        self._has_leader_left = True
        self._services.engine.recheck()

    def _is_quiet(self) -> bool:
        return self._has_leader_left or super()._is_quiet()

    # -- steps ------------------------------------------------------------------------------------------------------

    def _begin_step(self) -> bool:
        return self._is_due or not self.is_alone  # the ranks of a replica wait for each other in each step

    async def _step(self, local_metric: MetricSource) -> StepInfo:
        assert callable(local_metric), "the policy of the replicas reads the metric"
        if self.is_alone:
            if self._is_due:
                local_metric()
            await self._world.safe_point()
            return NOTHING
        return await self._swap(local_metric)

    async def _swap(self, local_metric: Callable[[], Any]) -> StepInfo:
        """Send this rank's status to the leader, and execute the leader's decision."""
        reshard(self.model)
        decided = await self._exchange(functools.partial(self._status, local_metric), self._decide)
        decision = Decision(*decided)
        info = StepInfo(**decision.info)
        if self._following is not None:
            info = self._follow(decision, info)
        self._events.deliver()
        self._opened.replacer.announce()
        if decision.action == SNAPSHOT:
            fault = await self._exchange(functools.partial(self._copy, decision.iteration), self._first_fault)
            self._opened.conclude(fault)
        return info

    async def _exchange(self, fn: Callable[[], Any], decide: Callable[[list[Any]], Any]) -> Any:
        """Call ``fn`` on all ranks, pass the results to ``decide`` on the leader, and return its result everywhere."""
        return await reduce_and_broadcast(fn, decide, group=self._replica, world=self._world)

    def _status(self, local_metric: Callable[[], Any]) -> tuple[Any, ...]:
        metric = local_metric() if self._is_due else None
        following = self._following
        if following is None:
            return tuple(Status(metric, 0, False, "", ""))
        is_complete = following.state is State.COMPLETE
        nonfinite = self._own.describe_nonfinite() if is_complete else ""
        return tuple(Status(metric, following.assignment_count, is_complete, following.failure, nonfinite))

    async def _decide(self, gathered: list[tuple[Any, ...]]) -> tuple[Any, ...]:
        member = self._leading
        assert member is not None, "only the leader decides"
        await self._world.progress()
        statuses = [Status(*each) for each in gathered]
        followers = [each for each in statuses[1:] if each.assignment_count == member.assignment_count]
        self._abandon_with(followers)
        roles, tracker = self._opened, self._tracker
        action, nonfinite, info = NOTHING_MORE, "", roles.replacer.take_abandoned()
        # The followers repeat these events before the action. Later events belong to the next swap point: the report
        # below may make this rank the coordinator, which ends the member's round.
        events, coordinator, epoch = member.take_events(), tracker.coordinator, tracker.epoch
        if member.state is State.CHOSEN:
            action, snapshot = SNAPSHOT, member.on_step()
            assert isinstance(snapshot, TakeSnapshot), f"{snapshot} of a chosen member"
            roles.take_snapshot(snapshot, self.iteration)
        elif member.state is State.COMPLETE and self._are_complete(followers):
            action, application = APPLICATION, member.on_step()
            assert isinstance(application, Apply), f"{application} of a complete member"
            nonfinite = next(
                filter(None, [self._own.describe_nonfinite(), *(each.nonfinite for each in followers)]), ""
            )
            info = roles.apply(application, self.iteration, nonfinite)
        if statuses[0].metric is not None:  # nothing is reported unless the leader has a measurement
            metrics = [math.nan if each.metric is None else each.metric for each in statuses]
            mean = self._read_metric(mean_of(metrics))
            tracker.report(self.iteration, self._call_count, mean)
        return tuple(Decision(events, action, self.iteration, nonfinite, asdict(info), coordinator, epoch))

    def _are_complete(self, followers: Sequence[Status]) -> bool:
        return len(followers) == self._replica.size - 1 and all(each.is_complete for each in followers)

    def _abandon_with(self, followers: Sequence[Status]) -> None:
        for failure in [each.failure for each in followers if each.failure][:1]:
            self._opened.abandon(self._member.round, failure)

    def _follow(self, decision: Decision, info: StepInfo) -> StepInfo:
        member = self._following
        assert member is not None, "the leader does not follow"
        self.iteration = decision.iteration
        self._reported_coordinator.follow(decision.epoch, decision.coordinator)
        roles = self._opened
        for instructions in member.repeat(decision.events, self._counterparts):
            roles.carry_out(instructions)
        roles.replacer.take_abandoned()  # discarded: all ranks report the leader's reason
        if decision.action == APPLICATION:
            application = member.on_step()
            assert isinstance(application, Apply), f"{application} where the leader applied round {info.round}"
            own = roles.apply(application, self.iteration, decision.nonfinite)
            assert own.round == info.round, f"round {own.round} where the leader applied round {info.round}"
            return replace(info, nbytes=own.nbytes)
        return info

    async def _copy(self, iteration: int) -> str:
        if self._following is not None:
            snapshot = self._following.on_step()
            assert isinstance(snapshot, TakeSnapshot), f"{snapshot} where the leader took a snapshot"
            self._opened.take_snapshot(snapshot, iteration)
        return await self._opened.fault_of_copy()

    def _first_fault(self, faults: list[str]) -> str:
        return next(filter(None, faults), "")
