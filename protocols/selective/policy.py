"""Asynchronous selective averaging: the worst ranks adopt the average of the best ranks, and no rank waits for others.

This module contains the policy that each member runs. :mod:`protocols.selective.member` is the member's state machine,
and :mod:`protocols.selective.coordinator` is the coordinator's task. A round on a member has these steps:

1. Every ``average_every`` steps, the member reports its metric and continues to train.
2. The coordinator may assign the member a role. A **donor** copies its weights inside its next ``step``. A **replacer**
   requests the donors' snapshots.
3. When all donors have answered, the coordinator freezes the round: its donors no longer change. The replacer adds up
   the snapshots in rank order.
4. The replacer's next ``step`` applies the average and notifies the coordinator, which ends the round.

Invariants: Weights are changed and copied only inside ``step``. A rank has one role at a time. A round that does not
complete leaves the weights unchanged, and its reason is reported.
"""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from typing import Any, ClassVar, Self, TypeVar, Unpack

import torch
from torch import nn

from asyncdist import AsyncdistError, ClosedError, current_world, validation
from asyncdist.protocols.declared import among, with_options
from asyncdist.protocols.joining.dispatcher import Application, PolicyDispatcher
from asyncdist.protocols.joining.scopes import PolicyScopes
from asyncdist.protocols.joining.state_transfer import (
    StateSizeError,
    StateTransfer,
    check_sendable,
    cloned,
)
from asyncdist.protocols.metrics import Metric, MetricSource
from asyncdist.protocols.options import (
    AveragingOptions,
    CommonOptions,
    CoordinatorOptions,
    MeasuredOptions,
    SelectiveOptions,
)
from asyncdist.protocols.own_state import OwnState
from asyncdist.protocols.parameter_stream.parts import PartPool
from asyncdist.protocols.ported import Ported
from asyncdist.protocols.ranking import replacer_count
from asyncdist.protocols.selective.islands.layout import Island, IslandOptions
from asyncdist.protocols.selective.islands.migration import Migration, Visits
from asyncdist.protocols.selective.leadership import CoordinatorTracker, Leadership
from asyncdist.protocols.selective.member import RoundMember, State
from asyncdist.protocols.selective.messages import (
    Admitted,
    Assign,
    End,
    Frozen,
    Leave,
    PackedAssign,
    PackedFrozen,
    Rejoin,
    ReportAcknowledged,
)
from asyncdist.protocols.selective.roles.member_channels import MemberChannels
from asyncdist.protocols.selective.roles.member_roles import MemberRoles
from asyncdist.protocols.selective.roles.resources import ExchangeBuffers, RoleResources
from asyncdist.protocols.selective.selection import SelectiveRules
from asyncdist.protocols.selective.statistics import SelectiveStatistics
from asyncdist.protocols.selective.succession import CoordinatorView, Succession
from asyncdist.protocols.starting.without_lost import lost_members
from asyncdist.protocols.step_info import NOTHING, StepInfo
from asyncdist.tensors.optimizers.loading import load_named, named_state
from asyncdist.waits import WaitId, WaitKind

logger = logging.getLogger("protocols.selective.policy")

_RoleMessage = TypeVar("_RoleMessage", Assign, Frozen)


@with_options(SelectiveOptions, CommonOptions, SelectiveRules, AveragingOptions, IslandOptions, CoordinatorOptions)
class AsyncSelectiveAveragingPolicy(Ported):
    """Asynchronous selective averaging, modelled on torchgfn's policy of the same name.

    Each rank reports its metric every ``average_every`` steps. When enough members have reported, the worst of them (a
    fraction of ``replacement_ratio``) adopt the average of the others. No rank waits for another: a slow rank is judged
    by its newest report.

    ::

        async with AsyncSelectiveAveragingPolicy(model, optimizer, average_every=100) as policy:
            for batch in data:
                loss = train_step(model, optimizer, batch)
                info = await policy.step(loss=loss)

    A restarted rank (``world.incarnation`` > 0) joins the running policy with the same code. Between two rounds, it
    receives the weights, optimizer state and iteration of a healthy member. That member copies its optimizer's state in
    the same step as its weights. With Adam, these copies take three times the model's size. If several policies of this
    class are open on the same ranks, give each a ``name``. Otherwise a restarted rank raises DisagreementError.

    Args:
        model: Model to train; see :class:`SpawnPolicy`. Its floating and complex entries are averaged. Its integer and
            bool entries (such as BatchNorm's counter) are copied from the best donor.
        optimizer: Optimizer of the model. It keeps its state when weights are averaged, unless
            ``optimizer_state="reset"``.
        average_every, metric, options: The options below.

    Raises:
        TypeError, ValueError: An option, the model or the optimizer has the wrong type or an invalid value.
    """

    admits_restarted = True
    #: Whether a copy of the weights waits until other ranks' copies are complete (see :class:`MemberRoles`).
    _holds_copies: ClassVar[bool] = False

    @validation.names_options()
    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        *,
        average_every: int,
        metric: Callable[[], Metric] | None = None,
        **options: Unpack[SelectiveOptions],
    ) -> None:
        self._averaging = AveragingOptions.of(options)
        super().__init__(
            model,
            optimizer,
            average_every=average_every,
            metric=metric,
            resets_optimizer=self._averaging.resets_optimizer,
            **among(options, MeasuredOptions),
        )
        self._islands = IslandOptions.of(options)
        self._coordinators = CoordinatorOptions.of(options)
        given = {name: options.get(name) for name in ("coordinator", "successors")}
        self._islands.check_combination(self._averaging.averaging_strategy, **given)
        self._rules = replace(
            SelectiveRules.of(options), migrate_every=self._islands.migrate_every or 0, average_every=average_every
        )
        self._limit = "threshold", self._rules.threshold
        self._own = OwnState(self._flat, self._weights, self._averaging)
        self._events = self._own.events
        self._resources = RoleResources(self._own, ExchangeBuffers(self._flat), PartPool(self._flat), self)
        self._member = RoundMember()
        self._island: Island | None = None
        self._visits: Visits | None = None  # None without islands or before the policy opens
        self._roles: MemberRoles | None = None  # None before the policy opens
        self._states: StateTransfer
        self._tracker: CoordinatorTracker

    def statistics(self) -> SelectiveStatistics:
        """Return this member's counts since its start. All are 0 until the policy has started."""
        member, buffers = self._member, self._resources.buffers
        counts = SelectiveStatistics(
            iteration=self.iteration,
            abandoned=dict(member.abandoned),
            declined=dict(member.declined),
            unapplied_count=member.unapplied_count,
            last_round=member.last_round,
            reasked_count=buffers.reasked_count,
            received_nbytes=buffers.received_nbytes,
            read_nbytes=buffers.read_nbytes,
            island=None if self._island is None else self._island.index,
            migration_count=0 if self._visits is None else self._visits.snapshot_count,
            title=self._journal.title(),
        )
        if self._roles is None or self._stage not in ("open", "closed"):
            return counts
        roles, tracker = self._roles, self._tracker
        visits_nbytes = 0 if self._visits is None else self._visits.sent_nbytes
        return replace(
            counts,
            report_count=tracker.report_count,
            nonfinite_metric_count=tracker.nonfinite_count,
            snapshot_count=roles.donor.snapshot_count,
            replacement_count=roles.replacer.replacement_count,
            reduction_count=roles.reducer.reduction_count,
            sent_nbytes=roles.channels.server.sent_nbytes + visits_nbytes,
            received_nbytes=buffers.received_nbytes + roles.reducer.received_nbytes,
            read_nbytes=buffers.read_nbytes + roles.reducer.read_nbytes,
            epoch=tracker.epoch,
            coordinator_rank=tracker.coordinator,
            coordinator=tracker.statistics(),
        )

    # -- starting and leaving ---------------------------------------------------------------------------------------

    def _options(self) -> Mapping[str, Any]:
        return {
            **asdict(self._rules),
            "average_every": self.average_every,
            **self._averaging.agreed(),
            "model_nbytes": self._flat.nbytes,
            **self._coordinators.agreed(),
            **self._islands.agreed(),
        }

    async def __aenter__(self) -> Self:
        """Start the policy together with the other ranks, or join the running policy if this rank was restarted.

        Raises:
            ValueError: ``coordinator`` or a rank in ``successors`` is out of range.
        """
        world, coordinator = self._given_world or current_world(), self._coordinators.coordinator
        if coordinator is not None and coordinator >= world.size:
            validation.refuse("coordinator", coordinator, f"a rank from 0 to {world.size - 1} or None")
        members = (self._given_group or world.group).ranks
        successors = self._coordinators.successors
        if successors and not set(successors) <= set(members):
            validation.refuse("successors", successors, f"ranks of the policy's group {list(members)}")
        return await super().__aenter__()

    def _choose_members(self) -> tuple[int, ...]:
        """Return the ranks of this rank's island. Raise ValueError if the requested islands cannot be formed."""
        population = range(self._world.size) if self._group is self._world.group else self._group.ranks
        self._island = self._islands.island_of(self._world.rank, population, self._services.hosts)
        return self._group.ranks if self._island is None else self._island.ranks

    def _has_other_ranks(self) -> bool:
        """Return whether other ranks take part: other members, or a reserved coordinator."""
        return super()._has_other_ranks() or self._coordinators.coordinator not in (None, *self._group.ranks)

    def _choose_leader(self, members: tuple[int, ...]) -> int:
        first = members[0] if self._coordinators.coordinator is None else self._coordinators.coordinator
        order = itertools.chain((first,), self._coordinators.successors, members)
        return next(rank for rank in order if rank in members or rank not in self._group.ranks)

    def _takes_means(self) -> bool:
        count = replacer_count(len(self._members), self._rules.replacement_ratio)
        guest_count = int(self._island is not None)
        return self._averaging.takes_means(len(self._members) - count + guest_count if count else 0)

    async def _start(self) -> None:
        self._own.begin()
        self._services.shared(PolicyDispatcher)  # receives messages about coordinators from now on
        meeting = self._joint_start.meeting
        with self._islands.hinting_at_islands():
            agreed = await self._agree()
        population = f"{self._group.key} {type(self).__name__} {self.name}"
        scopes = PolicyScopes.of_start(meeting.ranks, agreed, population)
        self._open_at_start(scopes, meeting.leader, lost_members(self._world, self._members, meeting))

    def _open_at_start(self, scopes: PolicyScopes, coordinator: int, replaced: Sequence[int]) -> None:
        """Open a policy that starts on all members together. ``replaced`` are the lost or restarted members."""
        self._open(scopes, coordinator, replaced=replaced)

    def _open(
        self, scopes: PolicyScopes, coordinator: int, epoch: int | None = None, replaced: Sequence[int] = ()
    ) -> Leadership:
        """Open the policy's channels, start this rank's tasks, and return the object that tracks the coordinator.

        Args:
            epoch: Epoch of the coordinator, if this rank is waiting for admission to a running policy; otherwise None.
            replaced: Members that were lost before the start was agreed on, or were restarted since.
        """
        services, members = self._services, self._members
        self.start_number = scopes.policy if self._island is None else scopes.between
        states = self._states = StateTransfer(services, scopes.policy)
        channels = MemberChannels(services, scopes)
        if epoch:
            channels.enter_epoch(epoch)
        successors = self._coordinators.successors
        order = tuple(dict.fromkeys((*successors, *members))) if successors else members
        succession = Succession(services.rank, order, coordinator)
        if epoch is not None:
            succession.begin_in(epoch)
        roles = self._new_roles(channels, succession, states)
        leadership = Leadership(
            services,
            succession,
            members,
            self._rules,
            scopes,
            model_nbytes=self._flat.nbytes,
            roles=roles,
            replaced=replaced,
            migration=self._open_migration(scopes, succession),
            journal=self._journal,
        )
        for rank in replaced:
            channels.exclude(rank)
        self._begin_membership(roles, leadership)
        leadership.begin_reports(self._call_count, self._world.hostname)
        leadership.begin()
        services.spawn_service(self._listen(leadership, channels, roles), name="policy member")
        return leadership

    def _open_migration(self, scopes: PolicyScopes, succession: Succession) -> Migration | None:
        if self._island is None:
            return None
        self._visits = Visits(self._services, self._island, self._member, self._resources)
        return Migration(self._world, self._island, self._islands, scopes, self._visits, succession)

    def _new_roles(
        self, channels: MemberChannels, coordinator_view: CoordinatorView, states: StateTransfer
    ) -> MemberRoles:
        facts = self._services, self._member, channels, coordinator_view, self._resources, states, self._journal
        return MemberRoles(*facts, holds_copies=self._holds_copies)

    def _begin_membership(self, roles: MemberRoles, tracker: CoordinatorTracker) -> None:
        self._roles, self._tracker = roles, tracker
        self._services.leftover_probes.append(self._leftovers)

    @property
    def _opened(self) -> MemberRoles:
        assert self._roles is not None, "the policy has not opened"
        return self._roles

    # -- joining a running policy -----------------------------------------------------------------------------------

    async def _join(self) -> None:
        self._own.begin()
        # Other ranks must not count this rank as a member before it is admitted.
        was_admitted, self._services.is_admitted = self._services.is_admitted, False
        check_sendable(self.model, self.optimizer)
        values = self._agreed_values()
        applying = self._services.shared(PolicyDispatcher).applying(self._members, values, self._start_timeout_s)
        try:
            with applying as application:
                try:
                    welcome, coordinator = await application.welcomed()
                except ClosedError:  # all other ranks were restarted as well, so no policy is running
                    if not was_admitted:
                        raise
                    await self._start_among_newcomers()
                    return
                self._member.is_joining = True
                leadership = self._open(PolicyScopes.of_running(welcome, values), coordinator, welcome.epoch)
                try:
                    leadership.note_welcome(welcome, coordinator)
                    await self._complete_joining(application, leadership)
                except BaseException as error:
                    await self._stop(error)
                    raise
        except BaseException:
            self._stage = "closed"
            raise
        self._services.is_admitted = True
        leadership.begin_reports(self._call_count, self._world.hostname)

    async def _complete_joining(self, application: Application, leadership: Leadership) -> None:
        """Repeat the admission request and receive members' states until this rank is admitted."""
        member = self._member
        while member.is_joining:
            await application.until(lambda: not member.is_joining or member.state is State.COMPLETE)
            welcome = application.take_welcome()
            if welcome is not None:
                leadership.note_welcome(*welcome)
            if member.state is State.COMPLETE:
                await self._take_state()
                application.note_round()

    async def _take_state(self) -> None:
        """Receive the state of the member whose weights have arrived, and load the weights and the state."""
        roles, number = self._opened, self._member.round
        exchange = roles.replacer.exchange
        assert exchange is not None, f"round {number} is complete without an exchange"
        try:
            parts, _ = await roles.replacer.take_parts(exchange, exchange.donor)
        except StateSizeError:
            raise
        except (AsyncdistError, TimeoutError) as error:
            roles.abandon(number, f"the state of a member did not arrive: {error}")
            return
        if roles.replacer.exchange is not exchange or exchange.average is None:
            return  # the round has ended, so its weights are no longer available
        iteration = self.restore_whole_state(parts)
        roles.take_whole_state(exchange, iteration)
        self._journal.note_joined(number, iteration, exchange.donor)

    def whole_state(self) -> Mapping[str, Any]:
        """Return this member's optimizer and policy state, which a restarted rank receives with the weights."""
        return {"optimizer": named_state(self.model, self.optimizer), "policy": self.state_dict()}

    def restore_whole_state(self, parts: Mapping[str, Any]) -> int:
        """Load another member's optimizer and policy state, and return the iteration in that state."""
        load_named(self.model, self.optimizer, cloned(parts["optimizer"]))  # a copy, because torch keeps the tensors
        self._restore(parts["policy"])
        return self.iteration

    # -- leaving ----------------------------------------------------------------------------------------------------

    async def _stop(self, error: BaseException | None) -> None:
        """Leave the policy. Without ``error``, first wait until the roles and streams in progress have ended."""
        roles = self._opened
        if self._member.state is State.COMPLETE:
            logger.info("round %d: the policy ended before the complete average was applied", self._member.round)
        roles.leave()
        if self._visits is not None:
            self._visits.leave()
        try:
            if error is None and self._services.engine.failure is None:
                until = self._world.time() + self._averaging.drain_timeout_s
                await self._services.engine.until(self._is_quiet, WaitId(WaitKind.OWN_ROUND), deadline=until)
        finally:  # notifies the other ranks even if this task is cancelled
            roles.finish()
            if self._visits is not None:
                self._visits.close()
            self._states.close()
            roles.channels.close()
            self._tracker.leave()
            if not self._leftovers():  # drop the leak check, because it would keep the model and its buffers alive
                self._services.leftover_probes.remove(self._leftovers)

    def _is_quiet(self) -> bool:
        """Return whether this rank has no role in a round and no stream in progress."""
        member = self._member
        is_moving = self._opened.is_sending or member.reducing or self._services.slots.discarding_count
        is_visiting = self._visits is not None and not self._visits.is_quiet
        return not is_visiting and (member.state is State.OUT or not is_moving)

    def _leftovers(self) -> list[str]:
        policy = self.name or type(self).__name__
        return [f"{count} {what} of policy {policy}" for what, count in self._resources.in_use().items() if count]

    # -- one step ---------------------------------------------------------------------------------------------------

    def _begin_step(self) -> bool:
        if self._is_due or self.is_alone:
            return self._is_due
        return self._member.wants_step or self._events.are_pending or self._visits is not None

    async def _step(self, local_metric: MetricSource) -> StepInfo:
        if self.is_alone:
            if self._is_due:
                self._read_new_metric(local_metric)
            await self._world.safe_point()
            return NOTHING
        await self._world.progress()
        self._events.deliver()
        info = self._act() if self._member.wants_step else NOTHING
        if self._visits is not None:
            self._visits.on_step(self.iteration)
        if self._is_due:
            value = self._read_new_metric(local_metric)
            if value is not None:
                self._tracker.report(self.iteration, self._call_count, value)
        return info

    def _act(self) -> StepInfo:
        info = self._opened.step(self.iteration)
        return info if self._visits is None else self._visits.located(info)

    # -- the coordinator's messages ---------------------------------------------------------------------------------

    def _restricted(self, message: _RoleMessage, round: int) -> _RoleMessage:
        """Return the coordinator's message, restricted to the donors whose weights this rank uses (by default, all)."""
        del round
        return message

    async def _listen(self, leadership: Leadership, channels: MemberChannels, roles: MemberRoles) -> None:
        """Pass the coordinator's messages to ``roles`` and ``leadership`` until the channel closes."""
        own = self._world.rank
        known = self._members, () if self._island is None else self._island.population
        async for envelope in channels.control:
            if envelope.source != leadership.coordinator:
                continue  # a late message from a lost former coordinator
            match envelope.message:
                case PackedAssign() as message if (assign := message.opened(own)) and assign.is_among(*known):
                    roles.on_message(self._restricted(assign, envelope.round), envelope.round)
                case PackedFrozen() as message if (frozen := message.opened()).is_among(*known):
                    roles.on_message(self._restricted(frozen, envelope.round), envelope.round)
                case End() as end:
                    roles.on_message(end, envelope.round)
                case Leave():
                    leadership.note_stopped(envelope.source)
                case ReportAcknowledged():
                    leadership.note_answer(self._call_count)
                case Rejoin():
                    roles.rejoin()
                case Admitted(rank, incarnation):
                    leadership.note_admitted(rank, incarnation)
                    if (rank, incarnation) == (own, self._world.incarnation):
                        self._member.is_joining = False
                        self._services.engine.recheck()
                case other:
                    logger.debug("the coordinator sent a %s", type(other).__name__)
