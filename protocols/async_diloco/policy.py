"""Asynchronous DiLoCo: the leader applies each rank's difference to the anchor when it arrives, and no rank waits.

Each rank trains alone from an anchor a_v. After ``average_every`` steps (H) it sends the difference D = a_v - theta
between this anchor and its weights, and continues to train. The first member, the leader, makes one step of the outer
optimizer with D, or with the mean of the differences of ``quorum`` ranks, and sends the new anchor back. The rank
applies it in its first step after the arrival:

    theta <- a_new + (theta - theta_captured)

(Liu et al., 2401.09135; with quorum and grace period: Decoupled DiLoCo, 2604.21428.) A rank has at most one difference
in flight. With a slow leader, a rank therefore makes more steps per contribution. A slow rank makes only its own
contributions stale.

If the leader is lost, the next member continues from the newest anchor of all living members. Each contribution is
applied exactly once (:mod:`protocols.async_diloco.arrivals`).
"""

from __future__ import annotations

import math
import warnings
import zlib
from collections.abc import Coroutine, Mapping, Sequence
from dataclasses import astuple
from typing import Any, ClassVar, Final, Unpack

import torch
from torch import Tensor, nn

from asyncdist import validation
from asyncdist.protocols.async_diloco.anchor import Anchor, Contribution
from asyncdist.protocols.async_diloco.arrivals import weight_of
from asyncdist.protocols.async_diloco.blocks import Captures, Layouts
from asyncdist.protocols.async_diloco.holdings import Answer, HeldAnchor, Holdings, Outstanding
from asyncdist.protocols.async_diloco.member import AsyncMember
from asyncdist.protocols.async_diloco.messages import Applied, Arrived
from asyncdist.protocols.async_diloco.options import AsyncDiLoCoOptionNames, AsyncDiLoCoOptions
from asyncdist.protocols.async_diloco.server import ServerOptions
from asyncdist.protocols.async_diloco.statistics import AsyncDiLoCoStatistics
from asyncdist.protocols.async_diloco.timing.pace import Stopwatch
from asyncdist.protocols.declared import among, with_options
from asyncdist.protocols.diloco.options import counted_tokens
from asyncdist.protocols.diloco.policy import ELSEWHERE
from asyncdist.protocols.joining.admission import Admission
from asyncdist.protocols.joining.membership import Membership
from asyncdist.protocols.joining.policy import JoinablePolicy
from asyncdist.protocols.joining.scopes import PolicyScopes
from asyncdist.protocols.joining.state_transfer import packed, unpacked
from asyncdist.protocols.metrics import MetricSource
from asyncdist.protocols.misuse import line_of_caller
from asyncdist.protocols.options import CommonOptions, MemberOptions
from asyncdist.protocols.starting.differences import FIRST_WEIGHTS
from asyncdist.protocols.step_info import NOTHING, AverageApplied, Contributed, StepInfo
from asyncdist.tensors.byte_views import byte_view
from asyncdist.tensors.flat_state import SnapshotPool
from asyncdist.tensors.infinities import KnownInfinities, all_finite
from asyncdist.tensors.optimizers.reset import reset_optimizer_state

_ANCHOR_IS_WHOLE: Final = "DiLoCoPolicy has this option; here the anchor and each contribution are whole"
#: Options of other policies and libraries, with the names of this policy's options.
_ELSEWHERE: Final = {
    **{name: text for name, text in ELSEWHERE.items() if name not in ("matchmaking_time", "averaging_timeout")},
    **dict.fromkeys(("fragments", "fragment_pattern", "model_fragments", "fragment_sync_delay"), _ANCHOR_IS_WHOLE),
    **dict.fromkeys(("overlap_steps", "mixing", "warmup_steps", "fragment_update_alpha", "alpha"), _ANCHOR_IS_WHOLE),
    **dict.fromkeys(
        ("delay", "buffer_size", "num_updates", "N"),
        "outer_optimizer=functools.partial(protocols.DelayedNesterov, lr=0.7, delay=N) updates the momentum at every "
        "N-th contribution",
    ),
    **dict.fromkeys(("staleness", "staleness_weight", "max_staleness"), "here correct=protocols.StalenessWeight()"),
    **dict.fromkeys(("averaging_timeout", "matchmaking_time"), "here grace_s, in seconds"),
    **dict.fromkeys(("grace", "grace_period", "grace_share"), "here grace_s, in seconds, or grace_steps, in steps"),
    **dict.fromkeys(("min_replica_size", "min_replicas", "target_group_size"), "here quorum, a number of ranks"),
    **dict.fromkeys(("dylu", "dynamic_local_updates"), "here dynamic_steps=True"),
    **dict.fromkeys(("global_lr", "outer_lr", "server_lr"), "here outer_optimizer has the outer learning rate"),
    "delay_grad_averaging": "here no rank waits for others, unless late='wait'",
}
#: Name in error messages for whether a rank begins with a saved state.
_RESUMED: Final = "begins with a saved state"
_LOSES_VALUES: Final = (
    "wire='topk' without error_feedback loses the values that it does not send; pass error_feedback=0.95 or 1.0"
)


_OWN_STATE: Final = ("captures", "base", "answer", "outstanding", "served", "sequence", "counts", "reported")


@with_options(AsyncDiLoCoOptionNames, CommonOptions, AsyncDiLoCoOptions)
class AsyncDiLoCoPolicy(JoinablePolicy):
    """Asynchronous DiLoCo: each rank's contribution is applied when it arrives, and no rank waits for others.

    ::

        async with AsyncDiLoCoPolicy(model, optimizer, average_every=100) as policy:
            for batch in data:
                train_step(model, optimizer, batch)
                await policy.step()

    All ranks must begin with equal weights. The outer optimizer moves the parameters. Floating buffers, such as
    BatchNorm's statistics, move towards the mean of each version's contributions, by the share of the ranks that have
    contributed. Integer and bool buffers are copied from the version's first contributing rank. The inner optimizer
    keeps its state. A rank whose weights are not finite does not contribute. It gets the anchor, and its inner
    optimizer's state is cleared (``StepInfo.recovered``).

    With ``late="wait"`` and a quorum of all ranks, it equals :class:`DiLoCoPolicy` with the same outer optimizer.

    Args:
        model: Model that this rank trains; see :class:`SpawnPolicy`.
        optimizer: Inner optimizer, which trains the model.
        average_every, options: The options below.

    Raises:
        TypeError, ValueError: An argument has the wrong type or is out of range.
    """

    progress_names: ClassVar[tuple[str, ...]] = (FIRST_WEIGHTS, _RESUMED)

    @validation.names_options(refused=_ELSEWHERE)
    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        *,
        average_every: int,
        **options: Unpack[AsyncDiLoCoOptionNames],
    ) -> None:
        own = self._own_options = AsyncDiLoCoOptions.of(options)
        self._resets_optimizer = own.optimizer_state == "reset"
        super().__init__(
            model,
            optimizer,
            average_every=average_every,
            resets_optimizer=self._resets_optimizer,
            **among(options, MemberOptions),
        )
        own.check_grace(self.average_every)
        if own.wire.name == "topk" and own.error_feedback is None:
            warnings.warn(_LOSES_VALUES, UserWarning, stacklevel=3)
        self._layout_buffers = self._flat.new_buffers(device="meta")
        self._layouts: Layouts
        self._captures: Captures
        self._holdings: Holdings
        self._known_infinities: KnownInfinities
        self._alone: Anchor | None = None  # the anchor if this rank is alone
        self._member: AsyncMember | None = None  # None before the start, and if this rank is alone
        self._admission: Admission | None = None
        self._snapshots = SnapshotPool(self._flat)
        self._stopwatch = Stopwatch() if own.dynamic_steps or own.grace_steps else None
        self._steps = 0  # since the last capture
        self._steps_wanted = self.average_every  # until the next capture
        self._tokens = 0.0  # since the last capture
        self._captured_at = 0
        self._reported: Arrived | None = None  # the last contribution
        self._contribution_count = 0
        self._saved: Mapping[str, Any] | None = None
        self._was_loaded = False
        self._postponed_count = 0

    def step(
        self,
        local_metric: MetricSource = None,
        *,
        loss: MetricSource = None,
        score: MetricSource = None,
        tokens: float | None = None,
    ) -> Coroutine[Any, Any, StepInfo]:
        """Take part in the policy once per training step; see :meth:`SpawnPolicy.step`.

        Args:
            local_metric, loss, score: Ignored.
            tokens: Number of tokens or examples of this step, for ``weights="tokens"``; 1 by default.

        Raises:
            TypeError: ``weights`` is ``"tokens"``, and a positional number was given instead of ``tokens``.
            ValueError: ``tokens`` is not finite and above 0.
        """
        if self._first_call is None:
            self.note_call(line_of_caller())
        self._tokens += counted_tokens(tokens, local_metric, self._own_options.weights)
        return super().step(local_metric, loss=loss, score=score)

    def statistics(self) -> AsyncDiLoCoStatistics:
        """Return this member's counts so far."""
        server = None if self._member is None else self._member.server
        count, staleness, losses, grace_s = 0, 0, 0, 0.0
        if server is not None:
            count, staleness, losses = server.applied_count, server.staleness_sum, server.lost_outer_state_count
            grace_s = server.grace_sum_s / max(1, server.version_count)
        counts = self._journal.averages
        has_holdings = self._stage != "new"
        return AsyncDiLoCoStatistics(
            iteration=self.iteration,
            version=self._holdings.base.version if has_holdings else 0,
            contribution_count=self._contribution_count,
            average_count=counts.applied_count,
            postponed_count=self._postponed_count,
            waited_s=counts.waited_s,
            sent_nbytes=counts.wire_nbytes,
            applied_count=count,
            mean_staleness=staleness / max(1, count),
            mean_grace_s=grace_s,
            lost_outer_state_count=losses,
            title=self._journal.title(),
        )

    # -- starting and leaving ---------------------------------------------------------------------------------------

    def _options(self) -> Mapping[str, Any]:
        return {"average_every": self.average_every, **self._own_options.agreed()}

    def _prepare(self) -> None:
        """Lay out the vectors, and copy the anchor from the model."""
        own, count = self._own_options, len(self._members)
        own.check_members(count)
        self._known_infinities = KnownInfinities(self._flat)
        parameters = self._known_infinities.without(dict(self.model.named_parameters(remove_duplicate=False)))
        self._layouts = Layouts(self._flat.entries, parameters, count, own.wire)
        self._captures = Captures(self._layouts, own.error_feedback)
        self._holdings = Holdings(HeldAnchor(0, (), self._layouts.block_of(self._tensors())))
        self._take_saved()
        if self.is_alone:
            held, outer = self._holdings.newest, self._holdings.outer
            self._alone = Anchor(self._layouts, own, held.block, held.version)
            if outer is not None:
                self._alone.load_outer_state(unpacked(outer[1]))

    def _agreed_values(self) -> dict[str, str]:
        values = super()._agreed_values()
        if self._was_loaded:  # the ranks' anchors differ then, and the leader begins with the newest one
            return {**values, _RESUMED: "yes", FIRST_WEIGHTS: "saved"}
        checksum = 0
        for anchor in self._layouts.stepped(self._holdings.base.block[1]):
            checksum = zlib.crc32(byte_view(anchor), checksum)
        return {**values, _RESUMED: "no", FIRST_WEIGHTS: f"{checksum:08x}"}

    def _open(self, membership: Membership, scopes: PolicyScopes) -> None:
        own = self._own_options
        every = len(self._members) if own.mirror_every is None else own.mirror_every
        options = ServerOptions(own, self.average_every, every)
        self._member = AsyncMember(
            self._services,
            scopes,
            membership,
            self._layouts,
            self._holdings,
            options,
            is_overlapped=own.late == "skip",
        )
        self._admission = self._new_admission(membership, scopes)

    def _opened(self) -> tuple[AsyncMember, Admission]:
        assert self._member is not None and self._admission is not None, "the policy has not opened"
        return self._member, self._admission

    async def _stop(self, error: BaseException | None) -> None:
        member, admission = self._opened()
        try:
            if error is None and self._services.engine.failure is None:
                await member.settled(self._world.time() + self._own_options.drain_timeout_s)
        finally:  # notifies the other ranks even if this task is cancelled
            member.leave()
            admission.close()

    # -- joining a running policy -----------------------------------------------------------------------------------

    def _opened_admission(self) -> Admission:
        return self._opened()[1]

    def _begin_joined(self) -> None:
        self._opened()[0].begin_joined()

    def _take_whole(self) -> None:
        """Begin at the leader's newest anchor, not at its weights: the leader contributes their progress itself."""
        state, rank, own = self._saved, self._world.rank, self._holdings
        assert state is not None, "the leader has sent its state"
        self._captures.clear_residuals()
        own.base = self._anchor_of(state["served"])
        own.outer = own.base.version, state["served"]["outer"].clone()
        own.outstanding = own.answer = own.inherited = None  # of a state that this newcomer has loaded itself
        self._steps, self._steps_wanted, self._tokens = 0, self.average_every, 0.0
        self._captured_at, self._reported = 0, None
        own.sequence = dict(state["reported_to_leader"]).get(rank, 0)
        self._saved = None
        with self._weights.following():
            self._captures.restore(own.base.block, self._tensors())

    def _whole_state(self) -> dict[str, Any]:
        """Return the weights, the optimizer's state, and the anchor, as the leader."""
        state, server = super()._whole_state(), self._opened()[0].server
        assert server is not None, "only a leader admits"
        own = dict.fromkeys(("captures", "answer", "outstanding", "reported"))
        reported = tuple((rank, server.last_reported(rank)) for rank in self._members)
        return {**state, "policy": {**state["policy"], **own, "reported_to_leader": reported}}

    async def _admit(self) -> None:
        """Admit a restarted rank that has asked for it, as the leader, with the state after this step."""
        if self._admission is None or self._member is None or not self._admission.is_asked:
            return
        server = self._member.server
        assert server is not None, "only a leader is asked"
        await server.freeze()
        if self._admission.is_asked:  # meanwhile the newcomer may have been lost
            self._admission.admit(self._whole_state)
        server.thaw()

    # -- continuing later -------------------------------------------------------------------------------------------

    async def settle(self) -> None:
        """Make no further version of the anchor until the next step, so that :meth:`state_dict` fits the other ranks'.

        :func:`asyncdist.save_population` calls this method. The weights do not change. With ``late="wait"``, versions
        are made, because other ranks may wait for them inside their steps.
        """
        is_skipping = self._own_options.late == "skip"
        if self._member is not None and self._member.server is not None and is_skipping:
            await self._member.server.freeze()

    def _own_state(self) -> dict[str, Any]:
        if self._saved is not None:
            return {name: self._saved[name] for name in _OWN_STATE}
        if self._stage == "new":
            return dict.fromkeys(_OWN_STATE)
        own, server = self._holdings, None if self._member is None else self._member.server
        served = None
        if server is not None and server.has_begun:
            held, outer = server.held()
            served = {**_saved_anchor(held), "outer": outer}
        elif self._alone is not None:
            served = {**_saved_anchor(own.newest), "outer": packed(self._alone.outer_state())}
        return {
            "captures": self._captures.state_dict(),
            "base": _saved_anchor(own.base),
            "answer": None if own.answer is None else own.answer.state(),
            "outstanding": None if own.outstanding is None else own.outstanding.state(),
            "served": served,
            "sequence": own.sequence,
            "counts": (self._steps, self._steps_wanted, self._tokens, self._captured_at),
            "reported": None if self._reported is None else astuple(self._reported),
        }

    def _load_own_state(self, state: Mapping[str, Any]) -> None:
        if state["base"] is not None:
            self._saved = state

    def _take_saved(self) -> None:
        """Load the state that :meth:`load_state_dict` has given, if any."""
        state, own, layouts = self._saved, self._holdings, self._layouts
        if state is None:
            return
        self._was_loaded = True
        self._captures.load_state_dict(state["captures"])
        own.base, own.sequence = self._anchor_of(state["base"]), state["sequence"]
        if state["served"] is not None:
            own.inherited = self._anchor_of(state["served"])
            own.outer = own.inherited.version, state["served"]["outer"].clone()
        if state["answer"] is not None:
            own.answer = Answer.of(state["answer"], layouts)
        if state["outstanding"] is not None:
            own.outstanding = Outstanding.of(state["outstanding"], layouts)
        self._steps, self._steps_wanted, self._tokens, self._captured_at = state["counts"]
        if state["reported"] is not None:
            self._reported = Arrived(*state["reported"])
        self._saved = None

    def _anchor_of(self, state: Mapping[str, Any]) -> HeldAnchor:
        applied = tuple((rank, sequence) for rank, sequence in state["applied"])
        return HeldAnchor(state["version"], applied, self._layouts.loaded_anchor(state["values"]))

    # -- one step ---------------------------------------------------------------------------------------------------

    async def _step(self, local_metric: MetricSource) -> StepInfo:
        del local_metric
        self._steps += 1  # before the first await, since a cancelled step counts as well
        if self._member is None:
            await self._world.safe_point()
        else:
            if self._member.server is not None:
                self._member.server.thaw()
            await self._world.progress()
        if self._stopwatch is None:
            return await self._contribute()
        self._stopwatch.on_step(self._world.time())
        try:
            return await self._contribute()
        finally:
            self._stopwatch.on_resume(self._world.time())

    async def _contribute(self) -> StepInfo:
        """Apply the answer to the last contribution if it has arrived, and capture the next one if it is due."""
        info = await self._take_answer()
        if self._steps >= self._steps_wanted and self._holdings.outstanding is None:
            await self._capture()
            info = await self._take_answer() or info
        elif self._steps >= self._steps_wanted:
            self._postponed_count += 1
        await self._admit()
        return info

    def _tensors(self) -> Sequence[Tensor]:
        return self._flat.tensors(self._layout_buffers)

    async def _capture(self) -> None:
        """Capture this rank's contribution, and offer it to the leader."""
        block, own = self._layouts.new_contribution(), self._holdings
        norm = math.nan
        if self._known_infinities.unsound_entry_of_model() is None:
            norm = self._captures.capture(own.base.block, self._tensors(), block[1])
        speed = 0.0 if self._stopwatch is None else self._stopwatch.take()
        report = self._reported = Arrived(own.base.version, self._steps, self._tokens, norm, speed)
        self._steps, self._tokens, self._captured_at = 0, 0.0, self.iteration
        self._contribution_count += 1
        if self._member is not None:
            self._member.contribute(block, report)
        else:
            await self._apply_alone(block[1], report)

    async def _apply_alone(self, encoded: Sequence[Tensor], report: Arrived) -> None:
        """Make the next version of the anchor from this rank's contribution alone."""
        anchor, own, rank = self._alone, self._holdings, self._world.rank
        assert anchor is not None, "the rank is not alone"
        own.sequence += 1
        weight = weight_of(report.tokens, report.steps, self._own_options.weights)
        outcome = await anchor.step([Contribution(rank, weight, report.norm, 0, encoded)], 1)
        block = anchor.copy_into(self._layouts.new_block())
        own.take_answer(
            Answer(Applied(anchor.version, (), *outcome[:2], 0, *outcome[2:], self.average_every, 0, 0.0), block)
        )

    async def _take_answer(self) -> StepInfo:
        """Apply the anchor with this rank's contribution if it has arrived; with ``late="wait"``, wait for it."""
        began_at = self._world.time()
        if self._holdings.outstanding is not None and self._own_options.late == "wait":
            assert self._member is not None, "a rank that is alone has no contribution without an answer"
            await self._member.answered()
        return NOTHING if self._holdings.answer is None else self._apply(began_at)

    def _apply(self, began_at: float) -> StepInfo:
        """Write the new anchor into the model."""
        tensors, trouble = self._tensors(), self._trouble()
        answer = self._holdings.apply_answer()
        report, wire = answer.report, self._layouts.wire
        waited_s = self._world.time() - began_at
        with self._weights.following():
            keeps_progress = self._captured_at < self.iteration and not trouble
            self._captures.apply(answer.block, tensors, keeps_progress=keeps_progress)
        if self._resets_optimizer or trouble:
            reset_optimizer_state(self.optimizer)
        self._steps_wanted = report.steps
        total = sum(report.weights)
        info = StepInfo(
            averaged_this_iteration=True,
            round=report.version,
            donors=report.donors,
            weights=tuple(weight / total for weight in report.weights),
            staleness_steps=self.iteration - self._captured_at,
            seconds=self._world.time() - began_at,
            nbytes=self._layouts.exact.nbytes,
            recovered=trouble,
            fragment=0,
            wire_nbytes=wire.nbytes,
            outer_norm=None if math.isnan(report.norm) else report.norm,
            cosine=None if math.isnan(report.cosine) else report.cosine,
            unencoded_nbytes=wire.unencoded_nbytes,
            waited_s=waited_s,
            fragment_count=1,
            version=report.version,
            staleness_versions=report.staleness,
            grace_s=report.grace_s,
        )
        self._announce(info, report)
        return info

    def _announce(self, info: StepInfo, report: Applied) -> None:
        """Record the contribution, whose round is known now, and the event of its application."""
        own, wire, on_event = self._reported, self._layouts.wire, self._own_options.on_event
        assert own is not None, "an anchor is applied after a contribution"
        weight = weight_of(own.tokens, own.steps, self._own_options.weights)
        facts = info.round, 0, self._captured_at, own.base_version, weight, own.norm, wire.nbytes, wire.unencoded_nbytes
        event = Contributed(*facts)
        self._journal.note_contributed(event)
        if on_event is None:
            return
        on_event(event)
        state = self._snapshots.acquire()
        try:
            self._flat.snapshot(state)
            best = report.donors[0] if report.donors else -1
            names = state.by_name()
            on_event(AverageApplied(info.round, info.donors, report.weights, best, self.iteration, names, info=info))
        finally:
            self._snapshots.release(state)

    def _trouble(self) -> str:
        """Describe the part of this rank's weights or optimizer that is not finite; return "" if all is finite."""
        name = self._known_infinities.unsound_entry_of_model()
        if name is not None:
            return f"{name!r} was not finite"
        if not self._resets_optimizer and not all_finite(dict(self.optimizer.state)):
            return "the optimizer's state was not finite"
        return ""


def _saved_anchor(held: HeldAnchor) -> dict[str, Any]:
    values = [value.clone() for value in held.block[1]]
    return {"version": held.version, "applied": held.applied, "values": values}
