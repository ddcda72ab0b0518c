"""Asynchronous DiLoCo: the leader applies each rank's difference to the anchor when it arrives, and no rank waits.

Each rank trains alone from an anchor a_v. After ``average_every`` steps (H) it sends the difference D = a_v - theta
between this anchor and its weights to the leader, and continues training. The leader takes one step of the outer
optimizer with D, or with the mean difference of ``quorum`` ranks, and sends the new anchor back. The rank applies the
anchor in its first step after the anchor arrives:

    theta <- a_new + (theta - theta_captured)

(Liu et al., 2401.09135; with quorum and grace period: Decoupled DiLoCo, 2604.21428.) A rank has at most one difference
in flight, so it takes more steps per contribution if the leader is slow. A slow rank makes only its own contributions
stale.

With ``islands``, each island has a leader, which contributes to a global server (HALoS, 2506.04531):
:mod:`protocols.async_diloco.islands.regional`.

If the leader is lost, the next member continues from the newest anchor of all living members. Each contribution is
applied exactly once (:mod:`protocols.async_diloco.arrivals`).
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Coroutine, Mapping, Sequence
from dataclasses import astuple, replace
from typing import Any, ClassVar, Final, Unpack

import torch
from torch import Tensor, nn

from asyncdist import validation
from asyncdist.protocols.async_diloco.anchor import Anchor, Contribution, Outcome
from asyncdist.protocols.async_diloco.arrivals import weight_of
from asyncdist.protocols.async_diloco.blocks import Block, Captures, Layouts
from asyncdist.protocols.async_diloco.islands.federation import Federation, divided_anew
from asyncdist.protocols.async_diloco.member import AsyncMember
from asyncdist.protocols.async_diloco.member_store import (
    Answer,
    HeldAnchor,
    MemberStore,
    Outstanding,
    saved_outer,
    sources_of,
)
from asyncdist.protocols.async_diloco.messages import Applied, Arrived
from asyncdist.protocols.async_diloco.options import (
    FOREIGN_OPTIONS,
    AsyncDiLoCoOptionNames,
    AsyncDiLoCoOptions,
    ServerOptions,
)
from asyncdist.protocols.async_diloco.replicated import AsyncReplicatedPolicy
from asyncdist.protocols.async_diloco.statistics import AsyncDiLoCoStatistics, Progress, result_of, statistics_of
from asyncdist.protocols.async_diloco.timing import Stopwatch
from asyncdist.protocols.declared import among, with_options
from asyncdist.protocols.diloco.foreign_options import foreign_call_hint
from asyncdist.protocols.diloco.fragments import warn_of_iterates
from asyncdist.protocols.diloco.options import LOSES_VALUES, StepTokens, check_has_whole_tensors
from asyncdist.protocols.diloco.radial import embeddings_of
from asyncdist.protocols.exchange.replicas.group import Readiness
from asyncdist.protocols.joining.admission import Admission
from asyncdist.protocols.joining.membership import Membership
from asyncdist.protocols.joining.replica_layout import Replicas
from asyncdist.protocols.joining.scopes import PolicyScopes
from asyncdist.protocols.joining.state_transfer import packed, unpacked
from asyncdist.protocols.metrics import MetricSource
from asyncdist.protocols.misuse import line_of_caller
from asyncdist.protocols.options import CommonOptions, MemberOptions
from asyncdist.protocols.selective.islands.layout import Island
from asyncdist.protocols.starting.differences import FIRST_WEIGHTS, RESUMED
from asyncdist.protocols.step_info import NOTHING, StepInfo
from asyncdist.tensors.flat_state import Entry
from asyncdist.tensors.infinities import KnownInfinities, describe_nonfinite
from asyncdist.tensors.optimizers.reset import reset_optimizer_state

_OWN_STATE: Final = (
    *("captures", "base", "answer", "outstanding", "served", "outer", "sequence", "counts", "reported", "global"),
    *("rank", "sources", "replica_size", "replica_index"),
)


@with_options(AsyncDiLoCoOptionNames, CommonOptions, AsyncDiLoCoOptions)
class AsyncDiLoCoPolicy(AsyncReplicatedPolicy):
    """Trains with asynchronous DiLoCo: each rank's contribution is applied when it arrives, and no rank waits.

    ::

        async with AsyncDiLoCoPolicy(model, optimizer, average_every=100) as policy:
            for batch in data:
                train_step(model, optimizer, batch)
                await policy.step()

    All ranks must begin with equal weights. The outer optimizer moves the parameters. Floating buffers, such as
    BatchNorm's statistics, move towards the mean of each version's contributions, by the fraction of ranks that have
    contributed. Integer and bool buffers are copied from the version's first contributing rank. The inner optimizer
    keeps its state. A rank whose weights are not finite does not contribute. It receives the anchor, and its inner
    optimizer's state is cleared (``StepInfo.recovered``).

    With ``late="wait"`` and a quorum of all ranks, this policy is equivalent to :class:`DiLoCoPolicy` with the same
    outer optimizer.

    Args:
        model: Model that this rank trains; see :class:`SpawnPolicy`.
        optimizer: Inner optimizer, which trains the model.
        average_every, options: The options below.

    Raises:
        TypeError, ValueError: An argument is invalid.
    """

    progress_names: ClassVar[tuple[str, ...]] = (FIRST_WEIGHTS, RESUMED)

    @validation.names_options(refused=FOREIGN_OPTIONS, called=foreign_call_hint)
    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        *,
        average_every: int,
        **options: Unpack[AsyncDiLoCoOptionNames],
    ) -> None:
        own = self._own_options = AsyncDiLoCoOptions.of(options)
        super().__init__(
            model,
            optimizer,
            replica_size=own.replica_size,
            average_every=average_every,
            resets_optimizer=own.resets_optimizer,
            **among(options, MemberOptions),
        )
        own.check_grace(self.average_every)
        check_has_whole_tensors(own.merge, holds_shards=self._holds_shards())
        if own.wire.name == "topk" and own.error_feedback is None:
            warnings.warn(LOSES_VALUES, UserWarning, stacklevel=3)
        self._layouts: Layouts
        self._captures: Captures
        self._store: MemberStore  # set only on the first rank of a replica
        self._known_infinities: KnownInfinities
        self._alone: Anchor | None = None  # the anchor if this rank is alone
        self._island: Island | None = None  # None without islands
        self._federation: Federation | None = None  # None before the start, and without islands
        self._is_divided_anew = False  # whether the loaded checkpoint was saved with other islands
        self._global_store: MemberStore  # this rank's global anchor and its island's contribution; only with islands
        self._member: AsyncMember | None = None  # None before the start, and if this rank is alone
        self._stopwatch = Stopwatch() if own.dynamic_steps or own.grace_steps else None
        self._progress = Progress(self.average_every)
        self._step_tokens = StepTokens(own.weights)
        self._was_loaded = False

    def step(
        self,
        local_metric: MetricSource = None,
        *,
        loss: MetricSource = None,
        score: MetricSource = None,
        tokens: float | None = None,
    ) -> Coroutine[Any, Any, StepInfo]:
        """Take part in the policy once per training step. See :meth:`SpawnPolicy.step`.

        Args:
            local_metric, loss, score: Ignored.
            tokens: Number of tokens or examples of this step, for ``weights="tokens"`` or ``"rate"``. Pass it in all
                steps on all ranks, or in none. Without it, each step counts as 1.

        Raises:
            TypeError, ValueError: ``tokens`` is invalid; see :meth:`DiLoCoPolicy.step`.
        """
        if self._first_call is None:
            self.note_call(line_of_caller())
        self._progress.tokens += self._step_tokens.count(tokens, local_metric)
        return super().step(local_metric, loss=loss, score=score)

    def statistics(self) -> AsyncDiLoCoStatistics:
        """Return this rank's counts of steps and contributions."""
        server = None if self._member is None else self._member.server
        version = self._store.base.version if self._stage != "new" and self._is_first else 0
        found = statistics_of(self._journal, self._progress, server, self.iteration, version)
        return found if self._federation is None else self._federation.counted(found)

    # -- starting and leaving ---------------------------------------------------------------------------------------

    def _options(self) -> Mapping[str, Any]:
        return {"average_every": self.average_every, **self._own_options.agreed()}

    def _leading_order(self) -> Sequence[int]:
        """Return the ranks in the order in which they become the leader or, with islands, the global server."""
        return self._member_ranks() if self._island is None else tuple(reversed(self._island.population))

    def _prepare(self) -> None:
        self._replicas = Replicas(self._members, 1 if self.is_alone else self._own_options.replica_size)
        self._is_first = self._world.rank in self._member_ranks()
        self._island = self._own_options.layout.island_of(self._world.rank, self._members, self._services.hosts)
        self.admits_restarted = self._island is None
        self._own_options.check_members(len(self._member_ranks()) if self._island is None else self._island.size)
        self._known_infinities = KnownInfinities(self._flat)
        if self._replicas.size == 1:
            self._lay_out(self._flat.entries, self._parameters())
        if self.is_alone:
            held, outer = self._store.newest, self._store.outer
            self._alone = Anchor(self._layouts, self._own_options, held.block, held.version)
            if outer is not None:
                self._alone.load_outer_state(unpacked(outer[1])["outer"])
            self._saved = None

    def _lay_out(self, entries: Sequence[Entry], parameters: set[str]) -> None:
        own = self._own_options
        if own.late == "skip" or own.quorum < len(self._member_ranks()):
            warn_of_iterates(entries, "asynchronous DiLoCo")
        divisible = embeddings_of(self.model) if own.merge == "radial" else None
        self._layouts = Layouts(entries, parameters, len(self._member_ranks()), own.wire, divisible)
        self._captures = Captures(self._layouts, own.error_feedback)
        self._store = MemberStore(self._layouts, HeldAnchor(0, (), self._layouts.block_of(self._tensors())))
        if self._island is not None:
            # Sharing is safe: blocks are never changed.
            self._global_store = MemberStore(self._layouts, self._store.base)
        self._take_saved()

    def _agreed_values(self) -> dict[str, str]:
        return {**super()._agreed_values(), RESUMED: "yes" if self._saved is not None or self._was_loaded else "no"}

    def _first_weights(self) -> dict[str, str]:
        """Return the checksum of this rank's weights, equal on all ranks with the same part of the model."""
        if self._was_loaded or self._saved is not None:
            return {FIRST_WEIGHTS: "saved"}  # saved anchors may differ: the leader begins with the newest
        return {FIRST_WEIGHTS: f"{self._checksum():08x}"}

    def _open(self, membership: Membership, scopes: PolicyScopes) -> None:
        own = self._own_options
        every = len(self._member_ranks()) if own.mirror_every is None else own.mirror_every
        options = ServerOptions(own, self.average_every, every)
        if self._island is not None:
            given = self._services, scopes, membership, self._island, self._store, self._global_store, options
            federation = Federation(*given, is_divided_anew=self._is_divided_anew)
            membership, scopes = federation.membership, federation.scopes
            self._federation, self._member = federation, federation.member
        else:
            facts = self._services, scopes, membership, self._store, options
            self._member = AsyncMember(*facts)
        self._admission = self._new_admission(membership, scopes)

    def _opened(self) -> tuple[AsyncMember, Admission]:
        assert self._member is not None and self._admission is not None, "the policy has not opened"
        return self._member, self._admission

    async def _stop(self, error: BaseException | None) -> None:
        is_orderly = error is None and self._services.engine.failure is None
        try:
            if self._is_first:
                await self._leave_members(is_orderly=is_orderly)
            if self._links is not None and is_orderly:
                await self._links.replica.leave(self.iteration)
        finally:
            await self._free_replica()

    async def _leave_members(self, *, is_orderly: bool) -> None:
        member, admission = self._opened()
        try:
            if is_orderly:
                deadline = self._world.time() + self._own_options.drain_timeout_s
                self.unfreeze_state()  # other ranks, and this rank's island, may wait for a server on this rank
                await member.settled(deadline)
                if self._federation is not None:
                    await self._federation.settled(deadline)
        finally:  # notifies the other ranks even if this task is cancelled
            member.leave()
            if self._federation is not None:
                self._federation.global_member.leave()
            admission.close()

    # -- joining a running policy -----------------------------------------------------------------------------------

    def _begin_joined(self) -> None:
        self._opened()[0].begin_joined()

    def _finish_loading(self) -> None:
        """Begin with the leader's newest anchor (common weights).

        The leader's weights are not taken, because the leader contributes their progress.
        """
        state, rank, own = self._saved, self._world.rank, self._store
        assert state is not None, "the leader has sent its state"
        self._captures.clear_residuals()
        own.begin_joined(state["served"], dict(state["reported_to_leader"]).get(rank, 0))
        self._progress = Progress(self.average_every)
        self._saved = None
        with self._weights.following():
            self._captures.restore(own.base.block, self._tensors())

    def _state_with(self, followers: Sequence[Tensor]) -> dict[str, Any]:
        """Return this leader's state for a restarted rank, with the optimizer's states of this rank's followers."""
        state, server = self._whole_state(), self._opened()[0].server
        assert server is not None, "only a leader admits"
        own = dict.fromkeys(("captures", "answer", "outstanding", "reported", "global"))
        reported = tuple((rank, server.last_reported(rank)) for rank in self._member_ranks())
        given = {**own, "reported_to_leader": reported, "followers": followers}
        return {**state, "policy": {**state["policy"], **given}}

    def _state_unit_nbytes(self) -> int:
        return self._layouts.exact.nbytes  # the whole model, also on the first rank of a sharded replica

    async def _admit(self) -> None:
        """As the leader, send the state after this step to a restarted rank that has asked to join."""
        followers: Sequence[Tensor] = ()
        if self._links is not None:
            if not self._admits_replica:  # the other ranks of this replica do not know that a replica is waiting
                return
            self._admits_replica = False
            followers = await self._collect_states(self._links)
        if self._admission is None or self._member is None or not self._admission.is_asked:
            return
        server = self._member.server
        assert server is not None, "only a leader is asked"
        await server.freeze()
        if self._admission.is_asked:  # the restarted rank may have been lost meanwhile
            self._admission.admit(lambda: self._state_with(followers))
        server.unfreeze()

    # -- continuing later -------------------------------------------------------------------------------------------

    async def settle(self) -> None:
        """Stop updating the anchor (common weights) until the next step, so that the states of all ranks match.

        :func:`asyncdist.save_population` calls this method, and updates resume before it returns. The weights do not
        change. With ``late="wait"``, updates continue, because other ranks may wait for them in their steps. The leader
        then does not wait for ranks that have called this method, even without a quorum. With ``late="wait"`` and a
        quorum, all ranks must call this method before a collective operation of the training loop.

        Raises:
            BusyError: The call is inside a block of :meth:`anchor_weights`.
        """
        self._check_not_evaluating("settle()")
        if self._own_options.late == "skip":
            await self.freeze_state()
        elif self._member is not None:
            await self._member.settle()

    async def freeze_state(self) -> None:
        """Stop updating the anchor (common weights) on this rank until :meth:`unfreeze_state`.

        :func:`asyncdist.save_population` calls this method when all ranks have called :meth:`settle`. It calls
        :meth:`unfreeze_state` when all ranks have copied their states, so that no rank's anchor is newer than the
        leader's. Other calls may deadlock, because a rank in a step with ``late="wait"`` may be waiting for an update.
        """
        for member in self._serving_members():
            if member.server is not None:  # it may have been elected during the last freeze
                await member.server.freeze()

    def unfreeze_state(self) -> None:
        """Resume updating the anchor after :meth:`freeze_state` or :meth:`settle`."""
        for member in self._serving_members():
            if member.server is not None:
                member.server.unfreeze()

    def _serving_members(self) -> list[AsyncMember]:
        """Return this rank's members that may serve. With islands: one in its island, and one among all ranks."""
        members = [self._member, None if self._federation is None else self._federation.global_member]
        return [each for each in members if each is not None]

    def _own_state(self) -> dict[str, Any]:
        if self._saved is not None:
            return {name: self._saved[name] for name in _OWN_STATE}
        if self._stage == "new":
            return dict.fromkeys(_OWN_STATE)
        # load_population() sets ``sources``: the rank of the saved run that each rank continues.
        place = {"rank": self._world.rank, "sources": None, **self._replicas.place_of(self._world.rank)}
        if not self._is_first:
            return {**dict.fromkeys(_OWN_STATE), **self._progress.state(), **place}
        own, server = self._store, None if self._member is None else self._member.server
        served = None
        if server is not None and server.has_begun:
            held, outer = server.held()
            served = {**held.state(), "outer": outer}
        elif self._alone is not None:
            served = {**own.newest.state(), "outer": packed({"outer": self._alone.outer_state(), "regional": None})}
        return {
            "captures": self._captures.state_dict(),
            **own.state(served),
            **self._progress.state(),
            "global": None if self._federation is None else self._federation.state(),
            **place,
        }

    def _load_own_state(self, state: Mapping[str, Any]) -> None:
        if state["counts"] is not None:
            with validation.reading_state(type(self).__name__):
                if (outer := saved_outer(state)) is not None:
                    self._own_options.check_saved(unpacked(outer[1])["outer"])
            self._saved = state

    def _take_saved(self) -> None:
        state, rank = self._saved, self._world.rank
        if state is None:
            return
        self._was_loaded = True
        with validation.reading_state(type(self).__name__):
            self._replicas.check_saved(rank, state)
            sources = sources_of(state, rank, self._members)
            if self._island is not None and state["global"] is not None:
                anew = divided_anew(state, self._island, sources, logs=self._group.index == 0)
                state, self._is_divided_anew = anew or state, anew is not None
            if state["base"] is not None:
                self._captures.load_state_dict(state["captures"])
                self._store.load(state, sources, rank)
            if state["global"] is not None and self._island is not None:
                self._global_store.begin(state["global"])
            elif state["base"] is not None and self._island is not None:  # saved without islands
                self._is_divided_anew = True
                self._global_store = MemberStore(self._layouts, replace(self._store.newest, applied=()))
            self._progress.load(state)

    # -- the anchor in the model ------------------------------------------------------------------------------------

    async def _write_anchor(self, tensors: Sequence[Tensor]) -> None:
        """Write the newest anchor (common weights) that this rank has into the model, including its buffers."""
        if self._is_first:
            self._captures.apply(self._newest_anchor(), tensors, keeps_progress=False)
        if self._links is not None:
            with self._links.replica.step():
                await self._links.deliver(self._own_tensors())

    def _newest_anchor(self) -> Block:
        server = None if self._member is None else self._member.server
        if server is None or server.anchor is None:
            return self._store.newest.block
        return server.anchor.copy_into(self._layouts.new_block())

    # -- one step ---------------------------------------------------------------------------------------------------

    def _begin_step(self) -> bool:
        self._progress.steps += 1  # before the first await, so that a cancelled step counts
        leads = self._federation is not None or (self._member is not None and self._member.server is not None)
        if leads or self._links is not None or self._stopwatch is not None or self._store.outstanding is not None:
            return True
        return self._progress.is_due or self._progress.is_waiting

    async def _step(self, local_metric: MetricSource) -> StepInfo:
        del local_metric
        if self._links is None:
            return await self._take_step()
        with self._links.replica.step():
            return await self._take_step()

    async def _take_step(self) -> StepInfo:
        if self.is_alone:
            await self._world.safe_point()
        else:
            self.unfreeze_state()
            await self._world.progress()
        if self._stopwatch is None:
            return await self._contribute()
        self._stopwatch.on_step(self._world.time())
        try:
            return await self._contribute()
        finally:
            self._stopwatch.on_resume(self._world.time())

    async def _contribute(self) -> StepInfo:
        """Apply the anchor that answers the last contribution, if it has arrived, and contribute again if due."""
        if self.is_alone and self._store.outstanding is not None:  # loaded from a checkpoint of several ranks
            await self._apply_alone(self._store.outstanding)
        info = await self._take_answer()
        if self._progress.is_due and not self._progress.is_waiting:
            await self._capture()
            info = await self._take_answer() or info
        elif self._progress.is_due:
            self._progress.postponed_count += 1
        await self._admit()
        return info

    async def _capture(self) -> None:
        unsound = self._known_infinities.unsound_entry_of_model() or ""
        if self._links is not None:
            unsound = await self._collect(self._links, unsound)
        block, report = self._captured(is_sound=not unsound) if self._is_first else (None, None)
        if self._links is not None:
            first, *_ = await self._links.replica.gathered(None if report is None else astuple(report))
            report = Arrived(*first)
        self._progress.note_captured(report, self.iteration)
        if block is None or report is None:  # only the first rank of a replica contributes
            return
        if self._member is not None:
            self._member.contribute(block, report)
        else:
            self._store.sequence += 1
            await self._apply_alone(Outstanding(self._store.sequence, block, report))

    def _captured(self, *, is_sound: bool) -> tuple[Block, Arrived]:
        block, own = self._layouts.new_contribution(), self._store
        norm = self._captures.capture(own.base.block, self._tensors(), block[1]) if is_sound else math.nan
        speed = 0.0 if self._stopwatch is None else self._stopwatch.take()
        return block, Arrived(own.base.version, self._progress.steps, self._progress.tokens, norm, speed)

    async def _apply_alone(self, contribution: Outstanding) -> None:
        """Apply the contribution of a rank that trains alone, and store the answer that a leader would send."""
        anchor, own, rank, report = self._alone, self._store, self._world.rank, contribution.report
        assert anchor is not None, "the rank is not alone"
        own.outstanding = contribution  # stored, so that a cancelled call can be repeated
        outcome, staleness = Outcome((), (), math.nan, math.nan), max(0, anchor.version - report.base_version)
        if contribution.sequence > dict(own.newest.applied).get(rank, 0):  # else the saved anchor contains it
            weight = weight_of(report.tokens, report.steps, self._own_options.weights)
            encoded = [each.clone() for each in contribution.block[1]]  # a repeated call uses the same block
            outcome = await anchor.step([Contribution(rank, weight, report.norm, staleness, encoded)], 1)
        facts = anchor.version, ((rank, contribution.sequence),), *outcome[:2], staleness, *outcome[2:]
        block = anchor.copy_into(self._layouts.new_block())
        own.take_answer(Answer(Applied(*facts, self.average_every, 0, 0.0, 0), block))

    async def _take_answer(self) -> StepInfo:
        """Apply the answer to this rank's contribution, if it has arrived. With ``late="wait"``, wait for it."""
        if not self._progress.is_waiting:
            return NOTHING
        began_at = self._world.time()
        if self._member is not None and self._own_options.late == "wait":
            await self._member.answered()
        report = None
        if self._is_first and self._store.answer is not None:
            report = self._store.answer.report
        if self._links is not None:  # the first rank of the replica decides
            first, *_ = await self._links.replica.gathered(None if report is None else astuple(report))
            report = None if first is None else Applied(*first)
        return NOTHING if report is None else await self._apply(report, began_at)

    async def _apply(self, report: Applied, began_at: float) -> StepInfo:
        kept = None if self._own_options.resets_optimizer else self.optimizer
        links, nonfinite = self._links, describe_nonfinite(self._known_infinities, kept)
        if links is not None:
            nonfinite = (await self._agree_in_replica(links.replica, Readiness(True, nonfinite))).nonfinite
        self._reshard()
        waited_s = self._world.time() - began_at
        if self._is_first:
            answer = self._store.apply_answer()
            is_known = self._progress.was_sound and not nonfinite  # otherwise, the progress since then is unknown
            keeps_progress = self._progress.captured_at < self.iteration and is_known
            with self._weights.following():
                self._captures.apply(answer.block, self._tensors(), keeps_progress=keeps_progress)
        if links is not None:
            with self._weights.following():
                await links.deliver(self._own_tensors())
        self._progress.is_waiting = False
        if nonfinite:
            self._progress.restart()
        if self._own_options.resets_optimizer or nonfinite:
            reset_optimizer_state(self.optimizer)
        self._progress.wanted = report.steps
        wire = self._layouts.wire if self._is_first else None  # only contributing ranks send data
        info = replace(
            result_of(report),
            staleness_steps=self.iteration - self._progress.captured_at,
            seconds=self._world.time() - began_at,
            nbytes=self._layouts.exact.nbytes if self._is_first else 0,
            recovered=nonfinite,
            wire_nbytes=0 if wire is None else wire.nbytes,
            unencoded_nbytes=0 if wire is None else wire.unencoded_nbytes,
            waited_s=waited_s,
            island=-1 if self._island is None else self._island.index,
        )
        self._announce(info, report)
        return info

    def _announce(self, info: StepInfo, report: Applied) -> None:
        own = self._own_options
        event = self._progress.contributed(info.round, own.weights, info.wire_nbytes, info.unencoded_nbytes)
        self._journal.note_contributed(event)
        if own.on_event is not None:
            own.on_event(event)
        self._announce_average(own.on_event, info, report.weights)
