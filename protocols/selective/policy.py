"""Asynchronous selective averaging: the worst ranks take the average of the good ones, and no rank waits for another.

This is the member's side: :mod:`protocols.selective.member` is its state machine, and the policy carries the
instructions out. :mod:`protocols.selective.coordinator` is the other side; :mod:`protocols.selective.rules` decides.
A round, as a member sees it:

1. every ``average_every`` steps it reports its metric, and goes on training;
2. at some time the coordinator assigns it a role. A **donor** takes a snapshot of its state inside its next ``step``
   and reports it; a **replacer** asks the donors, as many at once as its window holds, and each snapshot streams as
   soon as it exists;
3. when all donors have answered, the coordinator freezes the round. The replacer adds up in rank order what streams in,
   and asks on; progress is made at the safe points of both. Where not all donors are in it, it asks these anew;
4. at the replacer's next ``step`` the average is in place: weights change, and the coordinator is told;
5. ``End`` closes the round for everyone named in it; the donor's snapshot is free again.

Invariants: weights change only inside ``step``; a snapshot is taken only inside ``step``; a rank has one role at a
time; a round that does not complete leaves the weights untouched and says why.
"""

from __future__ import annotations

import logging
import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from typing import Any, Final, Literal, Self, assert_never

import torch
from torch import nn

from asyncdist import AsyncdistError, Group, World, current_world, validation
from asyncdist.messaging import wire
from asyncdist.tensors.flat_state import FlatBuffers, SnapshotPool
from protocols.applier import Applier, NewWeights
from protocols.metrics import Metric, MetricSource
from protocols.options import AveragingOptions, AveragingStrategy, ModelBuilder, Timing
from protocols.own_state import OwnState
from protocols.parameter_stream import Offer, safe_point_count
from protocols.policy import SpawnPolicy
from protocols.selective.coordinator import PolicyScopes
from protocols.selective.exchange import Exchange, ExchangeBuffers
from protocols.selective.joining.state_transfer import StateTransfer, packed, unpacked
from protocols.selective.leadership import Leadership
from protocols.selective.member import (
    Apply,
    Ask,
    Discard,
    Give,
    Instructions,
    Read,
    RefuseUpTo,
    RoundMember,
    State,
    TakeSnapshot,
    Tell,
    Withdraw,
)
from protocols.selective.member_channels import MemberChannels
from protocols.selective.messages import Admitted, Assign, End, Frozen, Heard, Leave, Rejoin, Report
from protocols.selective.rules import SelectiveRules
from protocols.selective.statistics import SelectiveStatistics
from protocols.step_info import NOTHING, PolicyEvent, SnapshotTaken, StepInfo

logger = logging.getLogger("protocols.selective.policy")

#: A newcomer takes a state of so many bytes, and so many times its model's.
_STATE_NBYTES_MAX: Final = 64 << 20
_STATE_MODEL_COUNT_MAX: Final = 16


class AsyncSelectiveAveragingPolicy(SpawnPolicy):
    """Asynchronous selective averaging (after torchgfn's policy of that name; see the module's text).

    Every ``average_every`` steps a rank reports its metric. When enough members have, the coordinator lets the worst
    ``replacement_ratio`` of them take the average of the others. No rank waits for another: a straggler is judged by
    its newest report.

    ::

        async with AsyncSelectiveAveragingPolicy(model, optimizer, average_every=100) as policy:
            for batch in data:
                loss = train_step(model, optimizer, batch)
                info = await policy.step(-loss)

    Args:
        model: see :class:`SpawnPolicy`. Its floating and complex entries are averaged; integer and bool ones
            (BatchNorm's counter) are taken from the best donor.
        optimizer: keeps its state when weights are averaged, unless ``optimizer_state="reset"``.
        average_every: the cadence of reports, in steps.
        replacement_ratio: how many are replaced, 0 to 1: round-half-up(ratio * n) of n participants, at least 1 and at
            most n - 1; none if the ratio is 0.
        averaging_strategy: ``"mean"``; ``"weighted_mean"``, weights proportional to metric minus the worst
            participant's; ``"best_only"``; ``"reset_weights"``, fresh weights of ``model_builder`` in place of an
            average.
        momentum: 0 to 1: new = momentum * own + (1 - momentum) * average, own being the weights at that moment. Where
            these or the optimizer's state are not finite, nothing of both is kept (``StepInfo.recovered``).
        threshold: a round acts only if the worst metric is worse than it.
        cooldown: with a threshold: iterations before the next round may act.
        model_builder: for ``"reset_weights"``: returns a model of the same layout, or the pair (model, optimizer).
            Called once when the policy is made, too, to compare the layouts.
        metric: see :class:`SpawnPolicy`.
        metric_mode: ``"max"`` if larger is better, ``"min"`` if smaller is. NaN and infinities rank worst and never
            donate.
        optimizer_state: ``"keep"``, or ``"reset"``: cleared in place whenever weights are replaced. ``reset_weights``
            always clears it.
        quorum: fraction of live members that must have reported before ``grace_s`` begins to run.
        grace_s: seconds that the others get to report; by default as long as that delays no later round.
        max_report_age_s: older reports do not count.
        round_timeout_s: bound on a round's exchange, to which the safe points that it needs are added.
        drain_timeout_s: how long leaving waits for streams under way.
        start_timeout_s: how long the start waits for the last member.
        coordinator: the rank that runs :func:`protocols.coordinate`; the group's first member by default.
        successors: members that take over when the coordinator is lost or stops, the first one first; after these, and
            by default, the others in the group's order.
        on_event: told of each snapshot and each application, inside ``step``; of the snapshot of a model in CUDA memory
            when it has been copied, at one of the next safe points.
        timing: collects seconds by name (``snapshot``, ``apply``), in the form of torchgfn's option.
        name, group, world: see :class:`SpawnPolicy`.

    Raises:
        TypeError, ValueError: an option, the model or the optimizer is not what it should be.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        *,
        average_every: int,
        replacement_ratio: float = 0.2,
        averaging_strategy: AveragingStrategy = "mean",
        momentum: float = 0.0,
        threshold: float | None = None,
        cooldown: int = 200,
        model_builder: ModelBuilder | None = None,
        metric: Callable[[], Metric] | None = None,
        metric_mode: Literal["max", "min"] = "max",
        optimizer_state: Literal["keep", "reset"] = "keep",
        quorum: float = 0.5,
        grace_s: float | None = None,
        max_report_age_s: float = 600.0,
        round_timeout_s: float = 30.0,
        drain_timeout_s: float = 10.0,
        start_timeout_s: float = 60.0,
        coordinator: int | None = None,
        successors: Sequence[int] = (),
        on_event: Callable[[PolicyEvent], None] | None = None,
        timing: dict[str, list[float]] | None = None,
        name: str = "",
        group: Group | None = None,
        world: World | None = None,
    ) -> None:
        super().__init__(
            model,
            optimizer,
            average_every=average_every,
            metric=metric,
            name=name,
            group=group,
            world=world,
            start_timeout_s=start_timeout_s,
        )
        self._rules = SelectiveRules(
            replacement_ratio=replacement_ratio,
            averaging_strategy=averaging_strategy,
            metric_mode=metric_mode,
            threshold=threshold,
            cooldown=cooldown,
            quorum=quorum,
            grace_s=grace_s,
            max_report_age_s=max_report_age_s,
            round_timeout_s=round_timeout_s,
        )
        self._averaging = AveragingOptions(
            averaging_strategy=averaging_strategy,
            momentum=momentum,
            optimizer_state=optimizer_state,
            model_builder=model_builder,
            on_event=on_event,
            timing=timing,
            drain_timeout_s=drain_timeout_s,
        )
        self._own = OwnState(self._flat, optimizer, self._averaging)
        self._coordinator_rank = (
            None if coordinator is None else validation.count("coordinator", coordinator, least=0, besides=", or None")
        )
        self._successors = validation.ranks("successors", successors)
        self._timing = Timing(timing)
        self._snapshots = SnapshotPool(self._flat)
        self._applier = Applier(self._flat, self._own, self._snapshots, on_event)
        self._buffers = ExchangeBuffers(self._flat)
        self._member = RoundMember()
        self._copied: tuple[FlatBuffers, float] | None = None  # a snapshot that is whole, and when it was begun
        self._offer: Offer | None = None
        self._exchange: Exchange | None = None
        self._given_up = NOTHING
        self._leadership: Leadership
        self._channels: MemberChannels
        self._newest_report: Report | None = None
        self._counts: Counter[str] = Counter()
        self._reported_at = 0.0
        self._reported_call = -1
        self._states: StateTransfer
        self._is_joining = False

    # -- the user's calls, beyond SpawnPolicy's ---------------------------------------------------------------------

    def statistics(self) -> SelectiveStatistics:
        """Return what this member has done so far; before and during the start, nothing."""
        has_started = self._stage in ("open", "closed") and not self.is_alone
        return SelectiveStatistics(
            iteration=self.iteration,
            report_count=self._counts["reports"],
            nonfinite_metric_count=self._counts["nonfinite"],
            snapshot_count=self._counts["snapshots"],
            replacement_count=self._counts["replacements"],
            abandoned=dict(self._member.abandoned),
            declined=dict(self._member.declined),
            unapplied_count=self._member.unapplied_count,
            last_round=self._member.last_round,
            sent_nbytes=self._channels.server.sent_nbytes if has_started else 0,
            received_nbytes=self._buffers.received_nbytes,
            epoch=self._leadership.epoch if has_started else 0,
            coordinator_rank=self._leadership.coordinator if has_started else None,
            coordinator=self._leadership.statistics() if has_started else None,
        )

    # -- starting and leaving ---------------------------------------------------------------------------------------

    def _options(self) -> Mapping[str, Any]:
        return {
            **asdict(self._rules),
            "average_every": self.average_every,
            **self._averaging.agreed(),
            "stream_safe_points": safe_point_count(self._flat.nbytes),
            "coordinator": self._coordinator_rank,
            "successors": self._successors,
        }

    async def __aenter__(self) -> Self:
        """As :class:`SpawnPolicy`. Raises ValueError, also on one rank, for a coordinator or successor out of range."""
        world = self._given_world or current_world()
        if self._coordinator_rank is not None and self._coordinator_rank >= world.size:
            validation.refuse("coordinator", self._coordinator_rank, f"a rank from 0 to {world.size - 1}")
        members = (self._given_group or world.group).ranks
        if self._successors and not set(self._successors) <= set(members):
            validation.refuse("successors", self._successors, f"members of the policy's group, {list(members)}")
        return await super().__aenter__()

    def _has_company(self) -> bool:
        """Whether other ranks take part; a reserved coordinator serves a lone member too, until it has left."""
        return super()._has_company() or self._coordinator_rank not in (None, *self._group.ranks)

    def _choose_leader(self) -> int:
        return super()._choose_leader() if self._coordinator_rank is None else self._coordinator_rank

    async def _start(self) -> None:
        services = self._services
        self._own.begin()
        Leadership.listen(services)
        meeting = self._joint_start.meeting
        scopes = PolicyScopes(meeting.ranks, await self._agree())
        self._open(scopes, meeting.leader, replaced=self._world.agreements.incarnations.replaced(meeting.key))

    def _open(
        self, scopes: PolicyScopes, coordinator: int, epoch: int | None = None, replaced: Sequence[int] = ()
    ) -> None:
        """Open the channels, and take part.

        Args:
            scopes: of the policy.
            coordinator: its rank.
            epoch: its epoch, where this rank waits to be admitted.
            replaced: members that were lost since they agreed, and in whose place there is a new process.
        """
        world, services, members = self._world, self._services, self._group.ranks
        self._states = StateTransfer(services, wire.scope_of((), f"states of policy {scopes.policy}", 0))
        self._channels = MemberChannels(services, scopes)
        if epoch:
            self._channels.enter_epoch(epoch)
        self._leadership = Leadership(
            services,
            members,
            tuple(dict.fromkeys((*self._successors, *members))) if self._successors else members,
            coordinator,
            self._rules,
            scopes,
            stream_safe_points=safe_point_count(self._flat.nbytes),
            on_gone=self._on_coordinator_gone,
            on_new=self._on_new_coordinator,
            on_admitted=self._admit,
            epoch=epoch,
            replaced=replaced,
        )
        for rank in replaced:
            self._channels.exclude(rank)
        self._leadership.begin()
        services.leftover_probes.append(self._leftovers)
        self._reported_at, self._reported_call = world.time(), self.iteration - self._skipped_count - 1
        self._listener = services.spawn_service(self._listen(), name="policy member")

    async def _join(self) -> None:
        """Take all of a member's state, and then part in the policy that runs on the other ranks."""
        self._own.begin()
        self._is_joining = True
        Leadership.listen(self._services)
        values = self._agreed_values()
        application = Leadership.apply(self._services, values, self._group.ranks, self._start_timeout_s)
        is_open = False
        try:
            while self._is_joining:
                await application.until(lambda: not self._is_joining or self._member.state is State.COMPLETE)
                welcome = application.take_welcome()
                if welcome is not None:
                    if not is_open:
                        self._open(PolicyScopes.of_running(welcome[0], values), welcome[1], welcome[0].epoch)
                        is_open = True
                    self._leadership.note_welcome(*welcome)
                if self._member.state is State.COMPLETE:
                    await self._take_state()
        except BaseException as error:
            self._stage = "closed"
            if is_open:
                await self._stop(error)
            raise
        finally:
            application.close()
        self._services.is_admitted = True
        self._reported_at, self._reported_call = self._world.time(), self.iteration - self._skipped_count - 1

    async def _take_state(self) -> None:
        """Take the rest of the state whose weights have come, and put all of it in place."""
        exchange, number = self._exchange, self._member.round
        assert exchange is not None, f"round {number} is complete without an exchange"
        try:
            state = await self._states.take(
                exchange.donor,
                number,
                nbytes_max=_STATE_NBYTES_MAX + _STATE_MODEL_COUNT_MAX * self._flat.nbytes,
                deadline=self._world.time() + self._rules.round_timeout_s,
            )
            parts = unpacked(state)
        except (AsyncdistError, TimeoutError) as error:
            self._carry_out(self._member.on_refused(number, f"the state of a member did not come: {error}"))
            return
        if self._exchange is not exchange or exchange.average is None:
            return  # the round has ended meanwhile
        self._member.on_step()
        self.optimizer.load_state_dict(parts["optimizer"])
        self._flat.load(exchange.average)
        self._restore(parts["policy"])
        self._buffers.accumulators.release(exchange.average)
        self._exchange = None
        self._carry_out(self._member.on_applied(self.iteration))

    async def _stop(self, error: BaseException | None) -> None:
        """Leave the policy. Streams under way are finished first, unless ``error`` makes that pointless."""
        if self._member.state is State.COMPLETE:
            logger.info("round %d: the average had arrived and was not applied; the policy ended", self._member.round)
        self._carry_out(self._member.on_leave())
        try:
            if error is None and self._services.engine.failure is None:
                deadline = self._world.time() + self._averaging.drain_timeout_s
                await self._services.engine.until(self._is_quiet, "the end of its part in a round", deadline=deadline)
        finally:  # cancelled or not: the others must hear of it
            self._carry_out(self._member.on_left())
            self._states.withdraw()
            self._channels.close()
            self._leadership.leave()
            if not self._leftovers():  # it would keep model and buffers for the life of the world
                self._services.leftover_probes.remove(self._leftovers)

    def _is_quiet(self) -> bool:
        """Whether nothing of a round is left: no role, no stream of ours, nothing being discarded."""
        if self._member.state is State.OUT:
            return True
        is_giving = self._member.state is State.LASTING or not self._channels.server.is_idle
        return not is_giving and not self._services.slots.discarding_count

    def _leftovers(self) -> list[str]:
        counts = {"snapshots": self._snapshots.in_use, "accumulators": self._buffers.accumulators.in_use}
        policy = self.name or type(self).__name__
        return [f"{count} {what} of policy {policy}" for what, count in counts.items() if count]

    # -- one step ---------------------------------------------------------------------------------------------------

    async def _step(self, local_metric: MetricSource) -> StepInfo:
        if self.is_alone:
            if self._is_due():
                self._read_metric(local_metric)
            await self._world.safe_point()
            return NOTHING
        await self._world.progress()
        info = self._act() if self._member.wants_step else NOTHING
        if self._is_due():
            self._report(local_metric)
        return info

    def _act(self) -> StepInfo:
        """Do what waits for ``step``, and report a round that was given up since the last one."""
        given_up, self._given_up = self._given_up, NOTHING
        match self._member.on_step():
            case TakeSnapshot(round):
                self._take_snapshot(round)
            case Apply(_, frozen):
                return self._apply(frozen)
        return given_up

    def _report(self, local_metric: MetricSource) -> None:
        value = self._read_metric(local_metric)
        now = self._world.time()
        call = self.iteration - self._skipped_count  # messages are answered once in a call, not in an iteration
        interval_s = now - self._reported_at
        step_s = interval_s / max(1, call - self._reported_call)
        self._reported_at, self._reported_call = now, call
        asks = self._leadership.on_report(call, interval_s)
        report = Report(self.iteration, value, step_s, interval_s, asks)
        self._newest_report = report
        self._counts["reports"] += 1
        self._counts["nonfinite"] += not math.isfinite(value)
        coordinator = self._leadership.coordinator
        if coordinator is not None and not self._channels.report(report, coordinator):
            self._counts["skipped reports"] += 1

    def _take_snapshot(self, round: int) -> None:
        """Copy the weights of this moment. A GPU copies them during the next steps; the engine sees when it is done."""
        began_at, iteration = self._world.time(), self.iteration
        snapshot = self._snapshots.acquire()
        if round == self._member.admitting:
            self._give_state(round)

        def on_copied(_: object = None) -> None:
            self._on_copied(round, snapshot, iteration, began_at)

        copy = self._flat.start_snapshot(snapshot)
        if copy is None:
            on_copied()
        else:
            self._services.engine.watch(copy, f"a snapshot for round {round}", on_copied)

    def _give_state(self, round: int) -> None:
        """Copy what a newcomer needs besides the weights."""
        try:
            state = packed({"optimizer": self.optimizer.state_dict(), "policy": self.state_dict()})
        except (TypeError, ValueError) as error:
            logger.warning("a rank that was started again cannot be admitted: the optimizer's state: %s", error)
        else:
            self._states.offer(round, state)

    def _on_copied(self, round: int, snapshot: FlatBuffers, iteration: int, began_at: float) -> None:
        """Give the snapshot to the round, if that goes on and if all values are finite."""
        member = self._member
        is_wanted = member.state is State.COPYING and member.round == round
        is_sound = is_wanted and self._own.may_be_given(snapshot)
        if is_sound:
            self._copied = snapshot, began_at
        else:
            self._snapshots.release(snapshot)
        self._carry_out(member.on_copied(round, iteration, is_sound=is_sound))
        if is_sound and self._averaging.on_event is not None:  # it may raise, so the coordinator has been told before
            self._averaging.on_event(SnapshotTaken(round, iteration, snapshot.by_name()))

    def _apply(self, frozen: Frozen) -> StepInfo:
        """Put the new weights in place."""
        exchange = self._exchange
        assert exchange is not None, "weights to be replaced without an exchange"
        began_at = self._world.time()
        new = NewWeights(
            round=exchange.round,
            donors=frozen.donors,
            weights=frozen.weights,
            iterations=frozen.iterations,
            best=frozen.best,
            average=exchange.average,
            began_at=exchange.assigned_at,
            nbytes=exchange.nbytes,
            coordinator=exchange.coordinator,
        )
        info = self._applier.apply(new, self.iteration, self._world.time)
        if exchange.average is not None:
            self._buffers.accumulators.release(exchange.average)
        self._timing.add("apply", self._world.time() - began_at)
        self._exchange = None
        self._counts["replacements"] += 1
        self._carry_out(self._member.on_applied(self.iteration))
        self._applier.announce(new, self.iteration)
        return info

    def _admit(self, rank: int, incarnation: int) -> None:
        """Exchange messages with a process that was started again, and has been admitted, if it still has its place."""
        if self._services.restarted.get(rank, 0) == incarnation:
            self._channels.admit(rank)

    # -- events, and what they lead to ------------------------------------------------------------------------------

    async def _listen(self) -> None:
        """Hand the coordinator's messages to the state machine."""
        member = self._member
        async for envelope in self._channels.control:
            if envelope.source != self._leadership.coordinator:
                continue  # its loss was known before its last messages were read
            match envelope.message:
                case Assign() as assign if assign.is_among(self._group.ranks):
                    for restarted in assign.restarted:
                        self._admit(*restarted)
                    self._carry_out(member.on_assign(assign, envelope.round))
                case Frozen() as frozen if frozen.is_among(self._group.ranks):
                    self._carry_out(member.on_frozen(frozen, envelope.round))
                case End(reason):
                    self._carry_out(member.on_end(reason, envelope.round))
                case Leave():
                    self._leadership.note_stopped(envelope.source)
                case Heard():
                    self._leadership.note_answer(self.iteration - self._skipped_count)
                case Rejoin() if not self._is_joining:
                    self._carry_out((member.joined(self._newest_report, self._world.incarnation),))
                case Admitted(rank, incarnation):
                    self._leadership.note_admitted(rank, incarnation)
                    if (rank, incarnation) == (self._world.rank, self._world.incarnation):
                        self._is_joining = False
                        self._services.engine.recheck()
                case other:
                    logger.debug("the coordinator sent a %s", type(other).__name__)

    def _on_coordinator_gone(self, why: str) -> None:
        self._carry_out(self._member.on_coordinator_gone(why))

    def _on_new_coordinator(self, epoch: int, rank: int) -> None:
        """End what an earlier coordinator has begun, and take part in what the new one decides."""
        self._carry_out(self._member.on_coordinator_gone("is replaced"))
        self._channels.enter_epoch(epoch)
        if not self._is_joining:
            self._carry_out((self._member.joined(self._newest_report, self._world.incarnation),))

    def _carry_out(self, instructions: Instructions) -> None:
        for instruction in instructions:
            match instruction:
                case Tell(message, round):
                    if self._leadership.coordinator is not None:
                        self._channels.tell(message, self._leadership.coordinator, round)
                case RefuseUpTo(round):
                    self._channels.server.end_rounds(round)
                case Give(round, _):
                    self._give(round)
                case Withdraw():
                    offer, self._offer = self._offer, None
                    self._states.withdraw()
                    if offer is not None:
                        self._channels.server.withdraw(offer)
                case Ask(round, donors, best):
                    coordinator = self._leadership.coordinator
                    assert coordinator is not None, f"round {round} has no coordinator"
                    channel = self._channels.server.channel
                    self._exchange = Exchange(self._services, channel, self._buffers, round, coordinator)
                    if donors:
                        self._exchange.ask_early(donors, best)
                case Read(_, frozen):
                    self._begin_to_read(frozen)
                case Discard(round, reason):
                    self._discard(round, reason)
                case TakeSnapshot() | Apply():
                    raise AssertionError(f"{instruction} outside step")
                case unknown:
                    assert_never(unknown)

    def _give(self, round: int) -> None:
        """Offer the snapshot that has just been copied."""
        assert self._copied is not None, f"round {round} is to be given no snapshot"
        (snapshot, began_at), self._copied = self._copied, None
        self._offer = self._channels.server.offer(round, snapshot, self._snapshots.release)
        self._counts["snapshots"] += 1
        self._timing.add("snapshot", self._world.time() - began_at)

    def _begin_to_read(self, frozen: Frozen) -> None:
        exchange = self._exchange
        assert exchange is not None, "a round is frozen without an exchange"
        exchange.task = self._services.spawn_service(
            self._read(exchange, frozen), name=f"exchange of round {exchange.round}"
        )

    async def _read(self, exchange: Exchange, frozen: Frozen) -> None:
        """Average the donors' snapshots, in rank order, and tell the state machine how it ended."""
        try:
            receiver = await exchange.run(frozen)
            if not receiver.mean.is_agreed:
                entry = self._own.unsound_entry(receiver.accumulator)
                self._fail(exchange, f"the donors differ in infinite values, as of {entry!r}")
            elif self._member.on_averaged(exchange.round):
                exchange.average = receiver.accumulator
        except (AsyncdistError, TimeoutError) as error:
            self._fail(exchange, f"the stream from rank {exchange.donor} did not complete: {error}")
        finally:
            exchange.close()

    def _fail(self, exchange: Exchange, reason: str) -> None:
        exchange.task = None  # it is the caller, and ends by itself
        instructions = self._member.on_failed(exchange.round, reason)
        if instructions:
            logger.info("round %d: abandoned, %s", exchange.round, reason)
        self._carry_out(instructions)

    def _discard(self, round: int, reason: str) -> None:
        """Free what the exchange holds. The next step says so, although the coordinator's ``End`` may come before."""
        exchange, self._exchange = self._exchange, None
        assert exchange is not None, f"round {round} is given up without an exchange"
        exchange.discard()
        self._given_up = StepInfo(
            round=round, abandoned=reason, nbytes=exchange.nbytes, coordinator=exchange.coordinator
        )
