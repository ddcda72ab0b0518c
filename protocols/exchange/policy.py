"""Base class of policies that average model fragments in rounds, without metrics and without a coordinator.

In each step, :class:`ExchangePolicy` captures this rank's contributions to the fragments that are due
(:mod:`protocols.exchange.schedule`), and applies the means that have arrived and are due. The exchange transfers
the data and handles lost ranks (:mod:`protocols.exchange.exchange`). A
:class:`~protocols.exchange.fragment.Fragment` contains the state of a fragment, and defines what is sent and how a mean
is applied.

Restarted ranks join with the leader's whole state. Checkpoints include means that have not been applied yet.
"""

from __future__ import annotations

import abc
import contextlib
import math
from collections.abc import Mapping, Sequence, Set
from dataclasses import replace
from typing import Any, ClassVar, Unpack

import torch
from torch import Tensor, nn

from asyncdist import BusyError, validation
from asyncdist.collectives.agreement.messages import Agreed
from asyncdist.protocols.exchange.exchange import Exchange
from asyncdist.protocols.exchange.fragment import ENTRIES, Fragment, Mean, checksum_of_anchors, restore, state_of
from asyncdist.protocols.exchange.layout.wire_layout import WireLayout
from asyncdist.protocols.exchange.ledger import Chosen, Quorum, Report, reported_weights, verdict_alone
from asyncdist.protocols.exchange.messages import Verdict
from asyncdist.protocols.exchange.options import ExchangeOptions
from asyncdist.protocols.exchange.replicas.division import ReplicaParts, write_parts
from asyncdist.protocols.exchange.replicas.group import Readiness, joined_replica
from asyncdist.protocols.exchange.rounds import copy_encoded, has_merged
from asyncdist.protocols.exchange.schedule import PendingRound, PendingRounds, Schedule
from asyncdist.protocols.exchange.statistics import ExchangeStatistics, result_of, statistics_of
from asyncdist.protocols.joining.admission import Admission
from asyncdist.protocols.joining.membership import Membership
from asyncdist.protocols.joining.replica_layout import SINGLE, Replicas
from asyncdist.protocols.joining.replicated import ReplicatedPolicy
from asyncdist.protocols.joining.scopes import PolicyScopes
from asyncdist.protocols.metrics import MetricSource
from asyncdist.protocols.options import MemberOptions
from asyncdist.protocols.starting.differences import FIRST_WEIGHTS, ROUNDS, STEPS
from asyncdist.protocols.step_info import NOTHING, Contributed, StepInfo, together
from asyncdist.protocols.wrappers import check_replica_group
from asyncdist.tensors.codecs import Codec
from asyncdist.tensors.infinities import KnownInfinities, describe_nonfinite
from asyncdist.tensors.optimizers.reset import reset_optimizer_state


class ExchangePolicy(ReplicatedPolicy):
    """Base class of policies that average model fragments in rounds. Subclasses define fragments and weights.

    A rank whose weights are not finite does not contribute. It takes the other ranks' mean without mixing in its own
    weights, and its optimizer's state is cleared (``StepInfo.recovered``). If ranks end their training after different
    numbers of steps, the others continue without them.

    With ``replica_size``, all ranks of a replica apply the same means in the same steps. Under DDP, each rank exchanges
    one part of the model, and sends the result to the other ranks of its replica. Under `fully_shard`, each rank
    exchanges its shards.

    Args:
        schedule: Steps in which each fragment is contributed and its mean is applied.
        shared: Options that all exchange-based policies have.
        skips_late: Whether a step skips a mean that is due but has not arrived.
        replica_size: Number of consecutive ranks that train one replica of the model together.
        quorum: Number of contributions for which a round waits, or None for all. Requires fragments with anchors.
        grace_s: Seconds to wait for further contributions when the quorum is reached.
        options: Options of :class:`SpawnPolicy`.
    """

    progress_names: ClassVar[tuple[str, ...]] = (FIRST_WEIGHTS, ROUNDS, STEPS)

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        *,
        schedule: Schedule,
        shared: ExchangeOptions,
        skips_late: bool = False,
        replica_size: int = 1,
        quorum: int | None = None,
        grace_s: float = 0.0,
        **options: Unpack[MemberOptions],
    ) -> None:
        every, resets = schedule.every, shared.resets_optimizer
        super().__init__(
            model, optimizer, replica_size=replica_size, average_every=every, resets_optimizer=resets, **options
        )
        self._shared = shared
        self._pending_rounds = PendingRounds(replace(schedule, every=self.average_every), skips_late=skips_late)
        self._fragment_count = schedule.fragment_count
        self._numbers_per_round = 1  # exchange rounds per fragment round; see _exchanged()
        self._fragments: list[Fragment] = []
        self._given_quorum, self._grace_s = quorum, grace_s
        self._quorum: Quorum | None = None
        self._was_loaded = False  # whether a saved state was loaded; its versions may differ by rank
        self._is_compared = False  # whether the replica's ranks were found to have equal weights
        self._parts: ReplicaParts | None = None  # parts of the replica's ranks, under DDP
        self._known_infinities: KnownInfinities
        self._saved: Mapping[str, Any] | None = None  # kept until a start succeeds, as a failed start may be repeated
        self._exchange: Exchange | None = None  # None before the start, and if this rank is alone
        self._is_admitting = False
        self._unsound_captures: set[int] = set()  # fragments whose last contribution was not finite
        self._found_finite_at = self._recovered_at = -1  # last steps that found weights finite, or replaced them
        self._unfinished: set[int] = set()  # rounds in flight that the last settle() could not end

    def statistics(self) -> ExchangeStatistics:
        """Return this member's counts since its start."""
        return statistics_of(self._journal.averages, self.iteration, self._journal.title())

    # -- for subclasses ---------------------------------------------------------------------------------------------

    @abc.abstractmethod
    def _make_fragments(self) -> Sequence[Fragment]:
        """Return the fragments, i.e. the parts of the model that are averaged separately.

        Each entry of the model is in at most one fragment.
        """

    def _exchanged(self) -> Sequence[Fragment]:
        """Return the fragments and other objects that the exchange averages, in the order of their rounds.

        A subclass may add ``self._numbers_per_round - 1`` further objects after each fragment. Their rounds may be
        skipped.
        """
        return self._fragments

    async def _conclude(self) -> None:
        """Finish the policy together with the other members. Called when it closes without an error."""

    def _layout(self, chosen: Sequence[int], codec: Codec, divisible: Set[str] | None = None) -> WireLayout:
        """Return the layout in which this rank sends its part of the next fragment. Called once per fragment.

        Args:
            chosen: Indices of the fragment's entries.
            codec: Codec of the parameters.
            divisible: Names of the parameters that may be cut into pieces, or None if all may be.
        """
        entries, size, rank = self._flat.entries, self._replicas.size, self._world.rank
        parameters = self._known_infinities.without(dict(self.model.named_parameters(remove_duplicate=False)))
        donor_count = len(self._members) // size
        if size == 1 or self._holds_shards():
            return WireLayout(entries, chosen, parameters, donor_count, codec, divisible)
        self._parts = self._parts or ReplicaParts(size, self._replicas.index(rank))
        return self._parts.divide(entries, chosen, parameters, donor_count, codec, divisible)

    def _take_weight(self, fragment: int) -> float:
        """Return the weight (> 0) of the contribution that this rank is capturing."""
        del fragment
        return 1.0

    async def _take_scores(self, fragment: int, tensors: Sequence[Tensor]) -> tuple[float, ...]:
        """Return the values that :meth:`weigh` needs for the next contribution, in addition to weight and norm.

        All ranks of a replica call this method together. If it raises, the contribution is made in a later step.
        """
        del fragment, tensors
        return ()

    def weigh(self, reports: Mapping[int, Report]) -> Mapping[int, float]:
        """Return the weight of each member whose contribution is averaged, by rank.

        Must be a pure function of the reports by rank, equal on all members. Ranks that are missing from the result are
        left out of the mean. A rank with a weight must have reported a finite norm.
        """
        return reported_weights(reports)

    def _takes_whole(self, verdict: Verdict) -> bool:
        """Return whether a mean replaces all of this rank's weights, even if they are finite."""
        del verdict
        return False

    def partners(self, number: int, rank: int, members: Sequence[int]) -> Chosen:
        """Return the members whose contributions ``rank`` averages in a round, or None if all members share one mean.

        The result may map these members to factors by which their weights are multiplied. Must be a pure function,
        equal on all members. A rank waits only for these members.
        """
        del number, rank, members
        return None

    def _makes_rounds_alone(self) -> bool:
        """Return whether even a single member runs averaging rounds, as an outer optimizer requires."""
        return False

    def _forget_own(self) -> None:
        """Drop state that concerns only the rank whose whole state this rank has just loaded."""
        for fragment in self._fragments:
            fragment.forget_own()

    # -- starting and leaving ---------------------------------------------------------------------------------------

    def _prepare(self) -> None:
        """Create the fragments from the model, and load a saved state."""
        self._known_infinities = KnownInfinities(self._flat)
        self._replicas = Replicas(self._members, 1 if self.is_alone else self._replica_size)
        self._parts = None
        waits = not self._pending_rounds.skips_late
        self._quorum = Quorum.of_members(len(self._members), self._given_quorum, self._grace_s, waits)
        self._pending_rounds.in_any_order = self._quorum is not None
        self._fragments = list(self._make_fragments())
        self._take_saved()
        if self.is_alone:
            self._contribute_again()

    def _agreed_values(self) -> dict[str, str]:
        # With a quorum, saved versions may differ between ranks. Late ranks receive the newest state.
        rounds = "saved" if self._may_be_late() else str([fragment.version for fragment in self._fragments])
        return {**super()._agreed_values(), ROUNDS: rounds, STEPS: self._pending_rounds.step_to_agree(self.iteration)}

    @property
    def completed_rounds(self) -> tuple[int, ...]:
        """Number of rounds of each fragment. Empty with a quorum, because late ranks receive the newest state."""
        return () if self._quorum is not None else tuple(fragment.version for fragment in self._fragments)

    def _may_be_late(self) -> bool:
        """Return whether ranks' reference weights may differ, as in a checkpoint saved while a quorum was in use."""
        return self._quorum is not None and self._was_loaded

    def _first_weights(self) -> dict[str, str]:
        """Return the checksum of this rank's anchors (reference weights), which must be equal on the other replicas."""
        return {} if self._may_be_late() else {FIRST_WEIGHTS: f"{checksum_of_anchors(self._fragments):08x}"}

    async def _agree(self) -> Agreed:
        if self.keeps_replicas:
            check_replica_group(self.model, self._replicas.replica_ranks(self._world.rank), self._world)
        agreed = await super()._agree()
        self._pending_rounds.catch_up(self.iteration, agreed.marks)
        if self.keeps_replicas:
            start = self._joint_start
            facts = self._world, start, self._replicas, self._flat, self._first_weights()
            await self._free_replica()  # a restarted rank may have a group from a failed attempt to join
            self._replica = await joined_replica(*facts, start.left_s(self._start_timeout_s))
        return agreed

    def _start_mark(self) -> int | None:
        waits_for_all = self._quorum is None and not self._pending_rounds.skips_late
        return self._pending_rounds.mark(self.iteration) if waits_for_all and self.iteration else super()._start_mark()

    def _open(self, membership: Membership, scopes: PolicyScopes) -> None:
        facts = self._services, scopes, membership, self._exchanged()
        self._exchange = Exchange(
            *facts,
            is_overlapped=self._pending_rounds.is_overlapped,
            skips_late=self._pending_rounds.skips_late,
            weigh=self.weigh,
            partners=self.partners,
            replicas=self._replicas,
            quorum=self._quorum,
        )
        self._admission = self._new_admission(membership, scopes)
        if not membership.is_joining:  # a restarted rank loads the leader's state instead
            self._contribute_again()

    def _opened(self) -> tuple[Exchange, Admission]:
        assert self._exchange is not None and self._admission is not None, "the policy has not opened"
        return self._exchange, self._admission

    async def _stop(self, error: BaseException | None) -> None:
        exchange, admission = self._opened()
        is_orderly = error is None and self._services.engine.failure is None
        try:
            try:
                if is_orderly:
                    await self._conclude()
                    await exchange.settled(self._world.time() + self._shared.drain_timeout_s)
            finally:  # notifies the other ranks even if this task is cancelled
                exchange.leave()
                admission.close()
            if self._replica is not None and is_orderly:
                await self._replica.leave(self.iteration)
        finally:
            await self._free_replica()

    # -- joining a running policy -----------------------------------------------------------------------------------

    def _begin_joined(self) -> None:
        in_flight = self._pending_rounds.in_flight.values()
        missing = [self._number_in_exchange(each.number) for each in in_flight if not self._has(each.number)]
        self._opened()[0].begin_joined(missing)

    def _finish_loading(self) -> None:
        self._take_saved()
        self._saved = None
        self._forget_own()

    async def _admit(self) -> None:
        """If a restarted rank has asked to join, admit it with this leader's state after this step."""
        if self._exchange is None or self._admission is None or not self._admission.is_asked:
            return
        has_quorum = self._quorum is not None  # with a quorum, a restarted rank can send these means to others
        if not self._pending_rounds.skips_late and not has_quorum:
            await self._exchange.shared()
        # A rank may have been lost during the wait. No rank is admitted while the members report after the loss.
        if (has_quorum or not self._exchange.holds_means) and self._admission.is_asked:
            self._admission.admit(self._whole_state)

    def _whole_state(self) -> dict[str, Any]:
        self._is_admitting = True
        try:
            return super()._whole_state()
        finally:
            self._is_admitting = False

    # -- continuing later -------------------------------------------------------------------------------------------

    async def settle(self) -> None:
        """Wait for the means of this rank's unfinished rounds, so that :meth:`state_dict` can save them.

        :func:`asyncdist.save_population` calls this method. The weights do not change. With ``late="skip"``, all ranks
        must call it: a round has no mean until all ranks have contributed, so the state contains this rank's
        contribution instead. With a quorum and ``late="wait"``, all ranks must call it before a collective operation of
        the training loop. Rounds do not wait for this rank between the call and its next step.
        """
        self._check_not_evaluating("settle()")
        if self._quorum is not None and self._exchange is not None:
            self._exchange.pause()
            for pending in list(self._pending_rounds.in_flight.values()):
                await self._merged(pending.number)
            return
        pending_rounds, count, self._unfinished = self._pending_rounds, self._fragment_count, set()
        captured = pending_rounds.captured
        if pending_rounds.may_differ and self._exchange is not None:
            numbers = [self._number_in_exchange(pending.number) for pending in pending_rounds.in_flight.values()]
            captured = await self._exchange.settle(numbers, captured)
        for fragment, pending in list(pending_rounds.in_flight.items()):
            if (pending.number - 1) // count < captured[fragment]:
                await self._merged(pending.number)
            else:
                self._unfinished.add(pending.number)

    def _own_state(self) -> dict[str, Any]:
        if self._stage == "new" and self._saved is not None:
            return {name: self._saved[name] for name in ENTRIES if name in self._saved}
        in_flight = {fragment: self._pending_round(fragment) for fragment in self._pending_rounds.in_flight}
        arrived = [fragment for fragment, pending in in_flight.items() if self._has(pending.number)]
        for fragment, pending in in_flight.items():
            if fragment not in arrived and not self._is_admitting and pending.number not in self._unfinished:
                raise BusyError(f"await policy.settle() before state_dict(): round {pending.number} is in flight")
        return {
            **state_of(self._fragments, self._pending_rounds, in_flight, arrived),
            **(SINGLE.place_of(0) if self._stage == "new" else self._replicas.place_of(self._world.rank)),
            "contributions": {} if self._is_admitting else self._contributions(),
        }

    def _contributions(self) -> dict[int, dict[str, Any]]:
        """Return a copy of this rank's contribution to each round that :meth:`settle` could not complete."""
        exchange, missing = self._exchange, [each for each in sorted(self._unfinished) if not self._has(each)]
        if exchange is None:
            return {}
        return {each: exchange.contribution_state(self._number_in_exchange(each)) for each in missing}

    def _load_own_state(self, state: Mapping[str, Any]) -> None:
        count = len(state["fragments"]) or self._fragment_count
        if count != self._fragment_count:
            raise ValueError(f"the state must have {self._fragment_count} fragments, like this policy, got {count}")
        self._pending_rounds.load(state)
        self._saved = state

    def _take_saved(self) -> None:
        """Load the state that :meth:`load_state_dict` or another rank has provided, if any."""
        if self._saved is None:
            return
        with validation.reading_state(type(self).__name__):
            if self._saved["fragments"]:
                self._replicas.check_saved(self._world.rank, self._saved)
            self._saved = {**self._saved, "contributions": dict(self._saved["contributions"])}
            restore(self._saved, self._fragments, self._pending_rounds)
            self._was_loaded = any(fragment.version for fragment in self._fragments)

    def _contribute_again(self) -> None:
        """Offer the contributions from a checkpoint again. Their rounds had not ended when it was saved."""
        saved, self._saved = self._saved, None
        for number, state in sorted(() if saved is None else saved["contributions"].items()):
            encoded = self._new_encoded((number - 1) % self._fragment_count)
            copy_encoded(state["encoded"], encoded)
            self._contribute(number, encoded, Report(state["weight"], state["norm"], tuple(state["scores"])))

    # -- one step ---------------------------------------------------------------------------------------------------

    def _begin_step(self) -> bool:
        pending_rounds = self._pending_rounds
        pending_rounds.note_step(self.iteration)  # before any await: if the step is cancelled, its fragments remain due
        self._unfinished.clear()
        if pending_rounds.in_flight or pending_rounds.can_begin() or self._replica is not None:
            return True
        return self._admission is not None and self._admission.is_asked

    async def _step(self, local_metric: MetricSource) -> StepInfo:
        with contextlib.nullcontext() if self._replica is None else self._replica.step():
            return await self._take_step(local_metric)

    async def _take_step(self, local_metric: MetricSource) -> StepInfo:
        world, step, pending_rounds = self._world, self.iteration, self._pending_rounds
        if self.is_alone:
            await world.safe_point()
            if not self._makes_rounds_alone():
                pending_rounds.drop_uncontributed()
                return NOTHING
        else:
            await world.progress()
        if pending_rounds.can_begin() or pending_rounds.due_means(step):
            self._reshard()
        applied = await self._apply_due(step) if pending_rounds.in_flight else []
        if pending_rounds.can_begin():
            if local_metric is not None:
                self._read_new_metric(local_metric)
            while pending_rounds.can_begin():
                while pending_rounds.can_begin():
                    applied += await self._begin_round(step)
                # Without overlap, the new rounds' means are due in this step. A further round may then begin.
                applied += await self._apply_due(step)
        await (self._admit() if self._replica is None else self._admit_replica(self._replica))
        return together(applied) if applied else NOTHING

    async def _begin_round(self, step: int) -> list[StepInfo]:
        """Contribute to the next averaging round. Return the results of averages that had to be applied first."""
        await self._capture(step)
        return []

    async def _capture(self, step: int) -> None:
        tensors = self._tensors()  # raises if the model's layout has changed; the fragment then remains due
        fragment, number = self._pending_rounds.next()
        own, exchange = self._fragments[fragment], self._exchange
        # If this rank was admitted while the other ranks contributed to this round, it already has the round's mean.
        is_past, is_behind = self._quorum is None and self._has(number), False
        scores = () if is_past else await self._take_scores(fragment, tensors)
        if self._quorum is not None and exchange is not None:
            number, is_behind = exchange.next_open(fragment), exchange.is_behind(fragment)
            self._pending_rounds.skip_to(number)
        if is_past:
            self._pending_rounds.begin(step, own.applied_version, waits=is_behind)
            own.advance(0)
            return
        encoded = self._new_encoded(fragment)
        # A non-finite parameter of the fragment makes the norm non-finite, so only the other entries are checked here.
        unsound = self._known_infinities.unsound_entry_of_model(own.measured_entries)
        norm = math.nan if unsound is not None else own.capture(tensors, encoded)  # may raise for lack of memory
        self._pending_rounds.begin(step, own.applied_version, waits=is_behind)
        weight, is_finite = self._take_weight(fragment), math.isfinite(norm)
        self._found_finite_at = step if is_finite else -1
        (self._unsound_captures.discard if is_finite else self._unsound_captures.add)(fragment)
        if own.anchors and self._recovered_at == step:  # the weights are the anchor's, so the difference is 0
            norm, is_finite = math.nan, False
        own.advance(len(self._first_ranks()) if is_finite else 0)
        version = own.version if self._quorum is None else own.applied_version
        self._contribute(number, encoded, Report(weight, norm, scores))
        facts = number, fragment, step, version, weight, norm, own.layout.nbytes, own.layout.unencoded_nbytes
        self._journal.note_contributed(event := Contributed(*facts))
        if self._shared.on_event is not None:
            self._shared.on_event(event)

    def _first_ranks(self) -> set[int]:
        """Return the living members, or the first rank of each replica if replicas have several ranks."""
        members = (self._world.rank,) if self._exchange is None else self._exchange.members()
        return {self._replicas.replica_ranks(rank)[0] for rank in members}

    def _new_encoded(self, fragment: int) -> list[Tensor]:
        if self._exchange is None:
            return self._fragments[fragment].layout.new_encoded()
        return self._exchange.new_encoded(fragment * self._numbers_per_round)

    def _contribute(self, number: int, encoded: Sequence[Tensor], report: Report) -> None:
        """Offer a contribution to the other ranks, or merge it if this rank is alone."""
        if self._exchange is not None:
            self._exchange.contribute(self._number_in_exchange(number), encoded, report)
            return
        verdict = verdict_alone(report, self.weigh({self._world.rank: report}))
        mean = [[each] for each in encoded] if verdict.donors else ()
        self._fragments[(number - 1) % self._fragment_count].merge(verdict, mean)

    async def _apply_due(self, step: int) -> list[StepInfo]:
        """Apply all means that are due in this step. Wait for missing means, unless late means are skipped."""
        applied = []
        for fragment, pending in self._pending_rounds.due_means(step):
            began_at = self._world.time()
            if not self._pending_rounds.skips_late or pending.waits:
                await self._merged(pending.number)
            pending = self._pending_round(fragment)
            ready = await self._readiness(fragment, pending.number)
            if ready.has_mean:
                applied.append(await self._apply(fragment, pending, began_at, ready))
        return applied

    async def _readiness(self, fragment: int, number: int) -> Readiness:
        """Return the joint report of this rank's replica: whether all ranks have a round's mean and finite weights."""
        has_mean, mean = self._has(number), self._fragments[fragment].mean
        if not has_mean and self._replica is None:
            return Readiness(False, "")
        own = Readiness(has_mean, self._describe_nonfinite())
        if mean is not None:
            own = own._replace(norm=mean.norm, norms=mean.verdict.norms, has_cosine=mean.cosine is not None)
        if self._parts is not None and not own.nonfinite and not self._is_compared:
            own = own._replace(checksum=self._parts.checksum(fragment, self._tensors()))
        return own if self._replica is None else await self._agree_in_replica(self._replica, own)

    async def _apply(self, fragment: int, pending: PendingRound, began_at: float, ready: Readiness) -> StepInfo:
        """Write a fragment's received mean into the model, in the same step as the other ranks of the replica."""
        mean = self._fragments[fragment].mean
        assert mean is not None, f"round {pending.number} has no mean"
        waited_s = self._world.time() - began_at
        is_late = self._pending_rounds.skips_late and pending.applied_at < self.iteration
        await self._write(fragment, ready, is_late=is_late, is_left_out=self._takes_whole(mean.verdict))
        self._pending_rounds.end(fragment)
        if self._exchange is not None:
            self._exchange.note_applied(fragment * self._numbers_per_round)
        info = self._info_of(fragment, pending, mean, ready)
        info = replace(info, seconds=self._world.time() - began_at, waited_s=waited_s)
        if info:
            self._announce_average(self._shared.on_event, info, mean.verdict.weights)
        return info

    async def _write(self, fragment: int, ready: Readiness, *, is_late: bool, is_left_out: bool) -> None:
        """Write a fragment's new values into the model, and reset the optimizer if necessary."""
        own, nonfinite, tensors = self._fragments[fragment], ready.nonfinite, self._tensors()
        self._is_compared, self._found_finite_at = True, -1
        self._recovered_at = self.iteration if nonfinite else self._recovered_at
        is_whole = bool(nonfinite) or is_left_out or fragment in self._unsound_captures
        with self._weights.following():
            own.apply(tensors, is_late=is_late, is_whole=is_whole)
            if nonfinite:  # other fragments that are not finite would make this one non-finite in the next step
                for each in self._fragments:
                    each.begin_again(tensors)
        await self._share(range(self._fragment_count) if nonfinite else [fragment], tensors)
        if self._shared.resets_optimizer or nonfinite:
            reset_optimizer_state(self.optimizer)
        if is_left_out:  # the encoding error of a bad contribution would affect the next one
            own.forget_own()

    def _info_of(self, fragment: int, pending: PendingRound, mean: Mean, ready: Readiness) -> StepInfo:
        own, count, number, staleness = self._fragments[fragment], self._fragment_count, pending.number, 0
        if self._quorum is not None:  # the anchor may move both before the contribution and before this step
            number = (own.version - 1) * count + fragment + 1
            staleness = own.version - 1 - pending.base_version
        return replace(
            result_of(own, mean, ready, self._replicas, self._first_ranks()),
            round=number,
            fragment=fragment,
            fragment_count=count,
            staleness_steps=self.iteration - pending.captured_at,
            staleness_versions=staleness,
            gains=self._gains_of(mean.verdict),
        )

    def _gains_of(self, verdict: Verdict) -> tuple[float, ...]:
        """Return how much each donor's contribution improves the metric on held-out data. Empty if not measured."""
        del verdict
        return ()

    async def _share(self, fragments: Sequence[int], tensors: Sequence[Tensor]) -> None:
        """Under DDP, copy into this rank's model the parts that the replica's other ranks have updated."""
        if self._replica is not None and self._parts is not None:
            received = await self._parts.share(self._replica, fragments, tensors)
            with self._weights.following():
                write_parts(received, tensors)

    async def _complete(self, fragments: Sequence[int], tensors: Sequence[Tensor]) -> None:
        """Copy each rank's part of trial weights (weights that are only evaluated) to the other ranks of its replica.

        Trial weights are removed after their evaluation, so the optimizer's state does not change.
        """
        if self._replica is not None and self._parts is not None:
            write_parts(await self._parts.share(self._replica, fragments, tensors), tensors)
        self._reshard()

    def _has(self, number: int) -> bool:
        if self._quorum is None or self._exchange is None:
            return has_merged(self._fragments, number)
        return self._exchange.has_merged(number)

    def _pending_round(self, fragment: int) -> PendingRound:
        """Return a model fragment's contribution whose mean is not yet applied, and the round in which it counts."""
        pending = self._pending_rounds.in_flight[fragment]
        if self._quorum is None or self._exchange is None:
            return pending
        return self._pending_rounds.move(fragment, self._exchange.latest(pending.number))

    async def _merged(self, number: int) -> None:
        if self._exchange is not None:
            await self._exchange.merged(self._number_in_exchange(number))

    def _number_in_exchange(self, number: int) -> int:
        return (number - 1) * self._numbers_per_round + 1

    def _tensors(self) -> Sequence[Tensor]:
        return self._flat.tensors(self._layout_buffers)

    def _describe_nonfinite(self) -> str:
        """Describe the part of this rank's weights or optimizer that is not finite. Return "" if all is finite."""
        optimizer = None if self._shared.resets_optimizer else self.optimizer
        is_known = self._found_finite_at == self.iteration  # this step has already checked the weights
        return describe_nonfinite(None if is_known else self._known_infinities, optimizer)
