"""Asynchronous selective averaging: the worst ranks take the average of the good ones, and nobody waits.

The member's side; :mod:`protocols.selective.coordinator` is the other one and :mod:`protocols.selective.rules` decides.
A round, as a member sees it:

1. every ``average_every`` steps it reports its metric, and goes on training;
2. some day the coordinator assigns it a role. A **donor** snapshots its state inside its next ``step`` and says so; a
   **replacer** asks the donors, as many at once as its window holds, and a snapshot streams as soon as there is one;
3. when all donors have answered, the coordinator freezes the round. The replacer adds up in rank order what streams in,
   and asks on; progress is made at the safe points of both. Where not all donors are in it, it asks these anew;
4. at the replacer's next ``step`` the average is in place: weights change, and the coordinator is told;
5. ``End`` closes the round for everyone named in it; the donor's snapshot is free again.

Invariants: weights change only inside ``step``; a snapshot is taken only inside ``step``; a rank has one role at a
time; a round that does not complete leaves the weights untouched and says why.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from typing import Any, Literal, Self

import torch
from torch import nn

from asyncdist import AsyncdistError, BusyError, Group, RankLostError, World, current_world, tags, validation
from asyncdist.messaging.channels import Channel
from asyncdist.tensors.flat_state import FlatBuffers, SnapshotPool
from protocols.applier import Applier, NewWeights
from protocols.options import AveragingOptions, AveragingStrategy, ModelBuilder, Timing
from protocols.own_state import OwnState
from protocols.parameter_stream import ChunkRing, Offer, SnapshotReceiver, SnapshotServer, safe_point_count
from protocols.policy import Metric, MetricSource, SpawnPolicy
from protocols.selective.coordinator import Coordinator, PolicyScopes
from protocols.selective.messages import (
    DONOR,
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
from protocols.selective.rounds import CoordinatorStatistics
from protocols.selective.rules import SelectiveRules
from protocols.step_info import NOTHING, PolicyEvent, SnapshotTaken, StepInfo

logger = logging.getLogger("protocols.selective.policy")


@dataclass(frozen=True, slots=True)
class SelectiveStatistics:
    """What a member has done so far.

    Attributes:
        iteration: steps taken.
        report_count: metrics sent.
        nonfinite_metric_count: of these, NaN or infinite.
        snapshot_count: snapshots taken as a donor.
        replacement_count: rounds applied.
        abandoned: rounds given up as a replacer, by reason.
        declined: roles refused, by reason.
        unapplied_count: averages that were complete when the policy ended, or was told to forget them.
        last_round: the newest round this rank was named in.
        sent_nbytes: streamed as a donor.
        received_nbytes: streamed as a replacer, abandoned rounds included.
        coordinator: on the coordinator's rank what it has decided, else None.
    """

    iteration: int
    report_count: int
    nonfinite_metric_count: int
    snapshot_count: int
    replacement_count: int
    abandoned: Mapping[str, int]
    declined: Mapping[str, int]
    unapplied_count: int
    last_round: int
    sent_nbytes: int
    received_nbytes: int
    coordinator: CoordinatorStatistics | None


@dataclass(slots=True, eq=False)
class _DonorRole:
    """From ``Assign`` to ``End``. A step starts to copy the weights; there is an offer when they are copied."""

    round: int
    is_copying: bool = False
    offer: Offer | None = None


@dataclass(slots=True, eq=False)
class _ReplacerRole:
    """From ``Assign`` until the average is applied or given up. ``nbytes`` are those of intakes that have ended."""

    round: int
    assigned_at: float
    frozen: Frozen | None = None
    exchange: asyncio.Task[None] | None = None
    intake: SnapshotReceiver | None = None
    average: FlatBuffers | None = None
    complete: bool = False
    nbytes: int = 0


class AsyncSelectiveAveragingPolicy(SpawnPolicy):
    """Asynchronous selective averaging (after torchgfn's policy of that name; see the module's text).

    Every ``average_every`` steps a rank reports its metric. When enough members have, the coordinator lets the worst
    ``replacement_ratio`` of them take the average of the others. Nobody waits for anybody: a straggler is judged by its
    newest report.

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
        grace_s: seconds that the others get to report.
        max_report_age_s: older reports do not count.
        round_timeout_s: bound on a round's exchange, to which the safe points that it needs are added.
        drain_timeout_s: how long leaving waits for streams under way.
        start_timeout_s: how long the start waits for the last member.
        coordinator: the rank that runs :func:`protocols.coordinate`; the group's first member by default.
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
        grace_s: float = 1.0,
        max_report_age_s: float = 600.0,
        round_timeout_s: float = 30.0,
        drain_timeout_s: float = 10.0,
        start_timeout_s: float = 60.0,
        coordinator: int | None = None,
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
        self._timing = Timing(timing)
        self._snapshots = SnapshotPool(self._flat)
        self._applier = Applier(self._flat, self._own, self._snapshots, on_event)
        self._accumulators = SnapshotPool(self._flat, accumulate=True)
        self._ring = ChunkRing()
        self._donor: _DonorRole | None = None
        self._replacer: _ReplacerRole | None = None
        self._needs_step = False
        self._given_up = NOTHING
        self._coordinator_gone = False
        self._leaving = False
        self._applied_iteration = -1
        self._coordinator: Coordinator | None = None
        self._counts: Counter[str] = Counter()
        self._abandoned: Counter[str] = Counter()
        self._declined: Counter[str] = Counter()
        self._last_round = 0
        self._reported_at = 0.0
        self._reported_iteration = -1

    # -- the user's calls, beyond SpawnPolicy's ---------------------------------------------------------------------

    def statistics(self) -> SelectiveStatistics:
        """What this member has done so far."""
        return SelectiveStatistics(
            iteration=self.iteration,
            report_count=self._counts["reports"],
            nonfinite_metric_count=self._counts["nonfinite"],
            snapshot_count=self._counts["snapshots"],
            replacement_count=self._counts["replacements"],
            abandoned=dict(self._abandoned),
            declined=dict(self._declined),
            unapplied_count=self._counts["unapplied"],
            last_round=self._last_round,
            sent_nbytes=self._desk.sent_nbytes if self._stage != "new" and not self.is_alone else 0,
            received_nbytes=self._counts["received"],
            coordinator=self._coordinator.statistics() if self._coordinator is not None else None,
        )

    # -- starting and leaving ---------------------------------------------------------------------------------------

    def _options(self) -> Mapping[str, Any]:
        return {
            **asdict(self._rules),
            "average_every": self.average_every,
            **self._averaging.agreed(),
            "stream_safe_points": safe_point_count(self._flat.nbytes),
            "coordinator": self._coordinator_rank,
        }

    async def __aenter__(self) -> Self:
        """As :class:`SpawnPolicy`. Raises ValueError, also on one rank, for a coordinator that is no rank."""
        size = (self._given_world or current_world()).size
        if self._coordinator_rank is not None and self._coordinator_rank >= size:
            validation.refuse("coordinator", self._coordinator_rank, f"a rank from 0 to {size - 1}")
        return await super().__aenter__()

    def _has_company(self) -> bool:
        """A reserved coordinator waits for a lone member too, and serves until it has left."""
        return super()._has_company() or self._coordinator_rank not in (None, *self._group.ranks)

    def _choose_leader(self) -> int:
        return super()._choose_leader() if self._coordinator_rank is None else self._coordinator_rank

    async def _start(self) -> None:
        world, members = self._world, self._group.ranks
        self._own.begin()
        meeting = self._joint_start.meeting
        self._leader = meeting.leader
        scopes = PolicyScopes(meeting.ranks, await self._agree())
        if world.rank == self._leader:
            safe_points = safe_point_count(self._flat.nbytes)
            self._coordinator = Coordinator(world, members, self._rules, scopes, stream_safe_points=safe_points)
            world.spawn_service(self._coordinator.serve(), name="coordinator")
        self._reports: Channel[Report] = world.open_channel(
            Report,
            tag=tags.METRIC,
            scope=scopes.to_members,
            peer_scope=scopes.to_coordinator,
            name="metric reports, out",
        )
        self._control: Channel[ControlMessage] = world.open_channel(
            ControlMessage, tag=tags.CONTROL, scope=scopes.to_members, peer_scope=scopes.to_coordinator, name="control"
        )
        self._desk = SnapshotServer(world, scopes.to_members)
        world.on_gone(self._on_gone)
        world.leftover_probes.append(self._leftovers)
        self._reported_at = world.time()
        self._listener = world.spawn_service(self._listen(), name="policy member")

    async def _stop(self, error: BaseException | None) -> None:
        """Leave the policy. Streams under way are finished first, unless ``error`` makes that pointless."""
        self._leaving = True
        if self._replacer is not None:
            if self._replacer.complete:
                logger.info(
                    "round %d: the average had arrived and was not applied; the policy ended", self._replacer.round
                )
            self._give_up("the policy ended")
        if self._donor is not None and self._donor.offer is None:
            self._decline(self._donor.round, "leaving")
            self._donor = None
        self._desk.end_rounds(math.inf)
        try:
            if error is None and self._world.engine.failure is None:
                deadline = self._world.time() + self._averaging.drain_timeout_s
                await self._world.engine.until(self._is_quiet, "the end of its part in a round", deadline=deadline)
        finally:  # cancelled or not: the others must hear of it
            self._end_donor_role()
            self._tell(Leave())
            self._control.close()
            self._reports.close()
            self._world.off_gone(self._on_gone)
            if not self._leftovers():  # it would keep model and buffers for the life of the world
                self._world.leftover_probes.remove(self._leftovers)

    def _is_quiet(self) -> bool:
        """Whether nothing of a round is left: no role, no stream of ours, nothing being discarded."""
        if self._coordinator_gone:
            return True
        return self._donor is None and self._desk.is_idle and not self._world.slots.discarding_count

    def _leftovers(self) -> list[str]:
        found = []
        if self._snapshots.in_use:
            found.append(f"{self._snapshots.in_use} snapshots of policy {self.name or type(self).__name__}")
        if self._accumulators.in_use:
            found.append(f"{self._accumulators.in_use} accumulators of policy {self.name or type(self).__name__}")
        return found

    # -- one step ---------------------------------------------------------------------------------------------------

    async def _step(self, local_metric: MetricSource) -> StepInfo:
        if self.is_alone:
            if self._is_due():
                self._read_metric(local_metric)
            await self._world.safe_point()
            return NOTHING
        await self._world.progress()
        info = self._act() if self._needs_step else NOTHING
        if self._is_due():
            self._report(local_metric)
        return info

    def _act(self) -> StepInfo:
        """What the roles wait for ``step`` to do."""
        self._needs_step = False
        donor, replacer = self._donor, self._replacer
        if donor is not None and not donor.is_copying:
            self._take_snapshot(donor)
        given_up, self._given_up = self._given_up, NOTHING
        return self._apply(replacer) if replacer is not None and replacer.complete else given_up

    def _report(self, local_metric: MetricSource) -> None:
        value = self._read_metric(local_metric)
        now = self._world.time()
        steps = max(1, self.iteration - self._reported_iteration)
        report = Report(self.iteration, value, (now - self._reported_at) / steps)
        self._reported_at, self._reported_iteration = now, self.iteration
        self._counts["reports"] += 1
        if not math.isfinite(value):
            self._counts["nonfinite"] += 1
        if not self._coordinator_gone:
            try:
                self._reports.send_nowait(report, self._leader)
            except RankLostError:
                self._on_gone(self._leader)
            except (
                BusyError
            ):  # thousands of reports unheard: the coordinator does not listen, and a newer one will count
                self._counts["skipped reports"] += 1

    def _take_snapshot(self, role: _DonorRole) -> None:
        """Copy the weights of this moment. From a GPU that goes on behind the next steps; the engine sees its end."""
        role.is_copying = True
        began_at, iteration = self._world.time(), self.iteration
        snapshot = self._snapshots.acquire()
        copy = self._flat.start_snapshot(snapshot)
        if copy is None:
            self._offer_snapshot(role, snapshot, iteration, began_at)
        else:
            self._world.engine.watch(
                copy,
                f"a snapshot for round {role.round}",
                lambda _: self._offer_snapshot(role, snapshot, iteration, began_at),
            )

    def _offer_snapshot(self, role: _DonorRole, snapshot: FlatBuffers, iteration: int, began_at: float) -> None:
        if self._donor is not role:  # the round has ended while a device copied
            self._snapshots.release(snapshot)
            return
        if not self._own.may_be_given(snapshot):
            self._snapshots.release(snapshot)
            self._end_donor_role()
            self._decline(role.round, "weights are not finite")
            return
        role.offer = self._desk.offer(role.round, snapshot, self._snapshots.release)
        self._counts["snapshots"] += 1
        self._timing.add("snapshot", self._world.time() - began_at)
        if self._averaging.on_event is not None:
            self._averaging.on_event(SnapshotTaken(role.round, iteration, snapshot.by_name()))
        self._tell(Ready(iteration), round=role.round)

    def _apply(self, role: _ReplacerRole) -> StepInfo:
        """New weights, in place."""
        frozen = role.frozen
        assert frozen is not None, f"round {role.round} is complete without having been frozen"
        began_at = self._world.time()
        new = NewWeights(
            round=role.round,
            donors=frozen.donors,
            weights=frozen.weights,
            iterations=frozen.iterations,
            best=frozen.best,
            average=role.average,
            began_at=role.assigned_at,
            nbytes=role.nbytes,
        )
        info = self._applier.apply(new, self.iteration, self._world.time)
        if role.average is not None:
            self._accumulators.release(role.average)
        self._timing.add("apply", self._world.time() - began_at)
        self._replacer = None
        self._applied_iteration = self.iteration
        self._counts["replacements"] += 1
        self._tell(Applied(self.iteration), round=role.round)
        self._applier.announce(new, self.iteration)
        return info

    # -- what the coordinator says ----------------------------------------------------------------------------------

    async def _listen(self) -> None:
        async for envelope in self._control:
            match envelope.message:
                case Assign() as assign:
                    self._on_assign(assign, envelope.round)
                case Frozen() as frozen:
                    self._on_frozen(frozen, envelope.round)
                case End(reason):
                    self._on_end(reason, envelope.round)
                case Leave():
                    self._go_on_alone("has stopped")
                case other:
                    logger.debug("the coordinator sent a %s", type(other).__name__)

    def _on_assign(self, assign: Assign, round: int) -> None:
        self._last_round = max(self._last_round, round)
        self._end_donor_role()
        self._desk.end_rounds(round - 1)
        self._give_up(f"round {round} began")
        if self._leaving:
            self._decline(round, "leaving")
        elif assign.role == DONOR:
            self._donor = _DonorRole(round)
            self._needs_step = True
        elif self._applied_iteration > assign.judged_iteration:
            self._decline(round, f"replaced at iteration {self._applied_iteration}, after the one that was judged")
        else:
            self._replacer = _ReplacerRole(round, self._world.time())
            if assign.donors:
                self._ask_early(self._replacer, assign)

    def _on_frozen(self, frozen: Frozen, round: int) -> None:
        role = self._replacer
        if role is None or role.round != round or role.frozen is not None:
            return
        role.frozen = frozen
        if frozen.donors:
            role.exchange = self._world.spawn_service(self._exchange(role, frozen), name=f"exchange of round {round}")
        else:
            role.complete = self._needs_step = True

    def _on_end(self, reason: str, round: int) -> None:
        if self._donor is not None and self._donor.round == round:
            self._end_donor_role()
        self._desk.end_rounds(round)
        if self._replacer is not None and self._replacer.round == round:
            self._give_up(reason)

    # -- the replacer's exchange ------------------------------------------------------------------------------------

    def _ask_early(self, role: _ReplacerRole, assign: Assign) -> None:
        """Ask the donors before they are ready. Who of them is lost or has no room matters when the round is frozen."""
        intake = self._begin_intake(role, assign.donors, assign.best)
        try:
            intake.ask()
        except AsyncdistError as error:
            logger.info("round %d: not asked early, %s", role.round, error)
            self._end_intake(role)

    def _begin_intake(self, role: _ReplacerRole, donors: tuple[int, ...], best: int) -> SnapshotReceiver:
        accumulator = self._accumulators.acquire()
        role.intake = SnapshotReceiver(
            self._world, self._desk.channel, accumulator, self._ring, donors=donors, best=best, round=role.round
        )
        return role.intake

    async def _exchange(self, role: _ReplacerRole, frozen: Frozen) -> None:
        """Average the donors' snapshots, in rank order."""
        intake = role.intake
        if intake is None or intake.donors != frozen.donors or intake.best != frozen.best:
            self._end_intake(role)
            intake = self._begin_intake(role, frozen.donors, frozen.best)
        try:
            await intake.run(frozen.weights, deadline=self._world.time() + frozen.timeout_s)
            if not intake.mean.is_agreed:
                entry = self._own.unsound_entry(intake.accumulator)
                self._abandon(role, f"the donors differ in infinite values, as of {entry!r}")
            elif self._replacer is role:
                role.average = intake.accumulator
                role.complete = self._needs_step = True
        except (AsyncdistError, TimeoutError) as error:
            self._abandon(role, f"the stream from rank {intake.donor} did not complete: {error}")
        finally:
            self._end_intake(role)

    def _end_intake(self, role: _ReplacerRole) -> None:
        """The exchange is over, or nobody wants it any more."""
        intake, role.intake = role.intake, None
        if intake is not None:
            intake.close()
            role.nbytes += intake.received_nbytes
            self._counts["received"] += intake.received_nbytes
            if role.average is not intake.accumulator:
                self._release_accumulator(intake.accumulator)

    def _release_accumulator(self, average: FlatBuffers) -> None:
        """Back to the pool, or out of it while chunks that nobody wants any more may still land there."""
        self._accumulators.release(average)
        if self._world.slots.discarding_count:
            self._accumulators = SnapshotPool(self._flat, accumulate=True)
            self._ring = ChunkRing()

    def _abandon(self, role: _ReplacerRole, reason: str) -> None:
        """Give up the round that is being exchanged; the next step says so."""
        if self._replacer is role:
            self._replacer = None
            self._end_intake(role)
            self._note_given_up(role, reason)
            logger.info("round %d: abandoned, %s", role.round, reason)
            self._tell(Abandoned(reason), round=role.round)

    def _give_up(self, reason: str) -> None:
        """The coordinator, or the end of the policy, takes the role away."""
        role, self._replacer = self._replacer, None
        if role is None:
            return
        if role.exchange is not None and not role.complete:
            role.exchange.cancel()
        self._end_intake(role)
        self._note_given_up(role, reason)
        if role.average is not None:
            self._counts["unapplied"] += 1
            self._release_accumulator(role.average)

    def _note_given_up(self, role: _ReplacerRole, reason: str) -> None:
        """The next step says so, although the coordinator's ``End`` may come before it."""
        self._abandoned[reason] += 1
        self._given_up = StepInfo(round=role.round, abandoned=reason, nbytes=role.nbytes)
        self._needs_step = True

    def _end_donor_role(self) -> None:
        role, self._donor = self._donor, None
        if role is not None:
            if role.offer is not None:
                self._desk.withdraw(role.offer)
            self._desk.end_rounds(role.round)

    # -- telling ----------------------------------------------------------------------------------------------------

    def _tell(self, message: ControlMessage, *, round: int = 0) -> None:
        if self._coordinator_gone or self._world.engine.failure is not None:
            return
        try:
            self._control.send_nowait(message, self._leader, round=round)
        except RankLostError:
            self._on_gone(self._leader)

    def _decline(self, round: int, reason: str) -> None:
        self._declined[reason] += 1
        self._tell(Decline(reason), round=round)

    def _on_gone(self, rank: int) -> None:
        """A coordinator that is lost ends the averaging, not the training."""
        if rank == self._leader and rank not in self._world.left:
            self._go_on_alone("is gone")

    def _go_on_alone(self, why: str) -> None:
        """Nobody decides any more; ``why`` says what the coordinator has done."""
        if self._coordinator_gone:
            return
        self._coordinator_gone = True
        if self._stage != "closed":
            logger.warning("rank %d, the coordinator, %s: this rank trains on without averaging", self._leader, why)
        self._end_donor_role()
        self._desk.end_rounds(math.inf)
        self._give_up(f"the coordinator {why}")
