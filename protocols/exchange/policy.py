"""Base class of the policies whose ranks exchange contributions in rounds, without metrics and without a coordinator.

In each step, :class:`ExchangePolicy` captures this rank's contributions to the fragments that are due
(:mod:`protocols.exchange.flights`), and applies the means that have arrived and are due. The exchange moves the data
and handles lost ranks (:mod:`protocols.exchange.exchange`). A :class:`~protocols.exchange.fragment.Fragment` contains
the state of a fragment, and defines what is sent and how a mean is applied.

Restarted ranks join with the leader's whole state. Checkpoints contain the means that are not applied yet.
"""

from __future__ import annotations

import abc
import logging
import math
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, ClassVar, Final, Unpack

import torch
from torch import Tensor, nn

from asyncdist import BusyError
from asyncdist.protocols.exchange.exchange import Exchange
from asyncdist.protocols.exchange.flights import Flight, Flights
from asyncdist.protocols.exchange.fragment import Fragment
from asyncdist.protocols.exchange.ledger import Report, Verdict, reported_weights
from asyncdist.protocols.exchange.options import ExchangeOptions
from asyncdist.protocols.exchange.rounds import has_merged
from asyncdist.protocols.exchange.schedule import Schedule
from asyncdist.protocols.exchange.statistics import ExchangeStatistics, statistics_of
from asyncdist.protocols.joining.admission import Admission
from asyncdist.protocols.joining.membership import Membership
from asyncdist.protocols.joining.policy import JoinablePolicy
from asyncdist.protocols.joining.scopes import PolicyScopes
from asyncdist.protocols.metrics import MetricSource
from asyncdist.protocols.options import MemberOptions
from asyncdist.protocols.starting.differences import FIRST_WEIGHTS
from asyncdist.protocols.step_info import NOTHING, AverageApplied, Contributed, StepInfo, together
from asyncdist.tensors.byte_views import byte_view
from asyncdist.tensors.flat_state import SnapshotPool
from asyncdist.tensors.infinities import KnownInfinities, all_finite
from asyncdist.tensors.optimizers.reset import reset_optimizer_state

logger = logging.getLogger("protocols.exchange.policy")

#: Name in error messages for the number of completed rounds of each fragment.
_ROUNDS: Final = "rounds completed"


class ExchangePolicy(JoinablePolicy):
    """Base class of policies on the exchange. A subclass makes the fragments, and chooses the schedule and the weights.

    A rank whose weights are not finite does not contribute. It takes the others' mean whole, and its optimizer's state
    is cleared (``StepInfo.recovered``). If ranks end their training after different numbers of steps, the others
    continue without them.

    Args:
        schedule: Steps in which the fragments are due.
        shared: Values of the options that all policies on the exchange have.
        skips_late: Whether a step skips a mean that has not arrived when it is due.
        options: Options of :class:`SpawnPolicy`.
    """

    progress_names: ClassVar[tuple[str, ...]] = (FIRST_WEIGHTS, _ROUNDS)

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        *,
        schedule: Schedule,
        shared: ExchangeOptions,
        skips_late: bool = False,
        **options: Unpack[MemberOptions],
    ) -> None:
        resets = shared.resets_optimizer
        super().__init__(model, optimizer, average_every=schedule.every, resets_optimizer=resets, **options)
        self._shared = shared
        schedule = replace(schedule, every=self.average_every)  # as an int
        self._flights = Flights(schedule, skips_late=skips_late)
        self._fragment_count = schedule.fragment_count
        self._is_overlapped = schedule.overlap_steps > 0
        self._layout_buffers = self._flat.new_buffers(device="meta")
        self._fragments: list[Fragment] = []
        self._known_infinities: KnownInfinities
        self._saved: Mapping[str, Any] | None = None
        self._exchange: Exchange | None = None  # None before the start, and if this rank is alone
        self._admission: Admission | None = None
        self._is_admitting = False
        self._snapshots = SnapshotPool(self._flat)

    def statistics(self) -> ExchangeStatistics:
        """Return this member's counts so far."""
        return statistics_of(self._journal.averages, self.iteration, self._journal.title())

    # -- for subclasses ---------------------------------------------------------------------------------------------

    @abc.abstractmethod
    def _make_fragments(self) -> Sequence[Fragment]:
        """Return new fragments, which contain each entry of the model at most once; called by :meth:`_prepare`."""

    def _take_weight(self, fragment: int) -> float:
        """Return the weight, above 0, of this rank's contribution that is captured now."""
        del fragment
        return 1.0

    def _take_scores(self, fragment: int, tensors: Sequence[Tensor]) -> tuple[float, ...]:
        """Return the values, besides weight and norm, that :meth:`weigh` needs of the contribution captured next.

        If this method raises, the contribution is captured in a later step.

        Args:
            tensors: The model's tensors.
        """
        del fragment, tensors
        return ()

    def weigh(self, reports: Mapping[int, Report]) -> Mapping[int, float]:
        """Return the weight of each donor by rank; a pure function of the reports by rank, equal on all members.

        Ranks that are missing in the result are left out. A donor's norm must be finite.
        """
        return reported_weights(reports)

    def _takes_whole(self, verdict: Verdict) -> bool:
        """Return whether this rank keeps nothing of its own weights when it applies a mean, even if they are finite."""
        del verdict
        return False

    def partners(self, number: int, rank: int, members: Sequence[int]) -> Sequence[int] | None:
        """Return the members whose contributions to a round a rank averages, or None if all share one mean.

        A pure function, equal on all members. A rank waits for its partners only.
        """
        del number, rank, members
        return None

    def _acts_alone(self) -> bool:
        """Return whether a rank without other members averages as well, as with an outer optimizer."""
        return False

    def _forget_own(self) -> None:
        """Drop the state that belongs to another rank alone, after its whole state was loaded."""
        for fragment in self._fragments:
            fragment.forget_own()

    # -- starting and leaving ---------------------------------------------------------------------------------------

    def _prepare(self) -> None:
        """Make the fragments from the model, and load a saved state."""
        self._known_infinities = KnownInfinities(self._flat)
        self._fragments = list(self._make_fragments())
        self._take_saved()

    def _agreed_values(self) -> dict[str, str]:
        rounds = [fragment.version for fragment in self._fragments]
        values = {**super()._agreed_values(), _ROUNDS: str(rounds)}
        checksum, anchors = 0, [anchor for fragment in self._fragments for anchor in fragment.anchors]
        for anchor in anchors:
            checksum = zlib.crc32(byte_view(anchor), checksum)
        return {**values, FIRST_WEIGHTS: f"{checksum:08x}"}

    def _open(self, membership: Membership, scopes: PolicyScopes) -> None:
        is_overlapped = self._is_overlapped
        self._exchange = Exchange(
            self._services,
            scopes,
            membership,
            self._fragments,
            is_overlapped=is_overlapped,
            weigh=self.weigh,
            partners=self.partners,
        )
        self._admission = self._new_admission(membership, scopes)

    def _opened(self) -> tuple[Exchange, Admission]:
        assert self._exchange is not None and self._admission is not None, "the policy has not opened"
        return self._exchange, self._admission

    async def _stop(self, error: BaseException | None) -> None:
        exchange, admission = self._opened()
        try:
            if error is None and self._services.engine.failure is None:
                await exchange.settled(self._world.time() + self._shared.drain_timeout_s)
        finally:  # notifies the other ranks even if this task is cancelled
            exchange.leave()
            admission.close()

    # -- joining a running policy -----------------------------------------------------------------------------------

    def _opened_admission(self) -> Admission:
        return self._opened()[1]

    def _begin_joined(self) -> None:
        flights = self._flights.in_flight.values()
        self._opened()[0].begin_joined([each.number for each in flights if not self._has(each.number)])

    def _take_whole(self) -> None:
        self._take_saved()
        self._forget_own()

    async def _admit(self) -> None:
        """Admit a restarted rank that has asked for it, as the leader, with the state after this step."""
        if self._exchange is None or self._admission is None or not self._admission.is_asked:
            return
        if not self._flights.skips_late:
            await self._exchange.shared()
        # Meanwhile a rank may have been lost, so that a census is in progress.
        if not self._exchange.holds_means and self._admission.is_asked:
            self._is_admitting = True
            try:
                self._admission.admit(self._whole_state)
            finally:
                self._is_admitting = False

    # -- continuing later -------------------------------------------------------------------------------------------

    async def settle(self) -> None:
        """Wait until this rank has the means of all rounds in flight, so that :meth:`state_dict` can save them.

        :func:`asyncdist.save_population` calls this method. The weights do not change.
        """
        for flight in self._flights.in_flight.values():
            await self._merged(flight.number)

    def _own_state(self) -> dict[str, Any]:
        if self._stage == "new" and self._saved is not None:
            return {name: self._saved[name] for name in ("fragments", "captured", "owed", "in_flight")}
        flights = self._flights.in_flight
        for flight in flights.values():
            if not self._has(flight.number) and not self._is_admitting:
                raise BusyError(f"await policy.settle() before state_dict(): round {flight.number} is in flight")
        return {
            "fragments": [fragment.state_dict() for fragment in self._fragments],
            **self._flights.state(),
            "in_flight": [
                (fragment, *flight, self._fragments[fragment].pending() if self._has(flight.number) else None)
                for fragment, flight in flights.items()
            ],
        }

    def _load_own_state(self, state: Mapping[str, Any]) -> None:
        count = len(state["fragments"]) or self._fragment_count
        if count != self._fragment_count:
            raise ValueError(f"the state must have {self._fragment_count} fragments, as this policy, got {count}")
        self._saved = state
        self._flights.load(state)

    def _take_saved(self) -> None:
        """Load the state that :meth:`load_state_dict` or another rank has given, if any."""
        if self._saved is not None:
            for own_fragment, state in zip(self._fragments, self._saved["fragments"], strict=False):
                own_fragment.load_state_dict(state)
            for fragment, *flight, pending in self._saved["in_flight"]:
                self._flights.in_flight[fragment] = Flight(*flight)
                if pending is not None:
                    self._fragments[fragment].restore_pending(pending)
            self._saved = None

    # -- one step ---------------------------------------------------------------------------------------------------

    async def _step(self, local_metric: MetricSource) -> StepInfo:
        world, step, flights = self._world, self.iteration, self._flights
        flights.note_step(step)  # before the first await, since a cancelled step captures nothing
        if self.is_alone:
            await world.safe_point()
            if not self._acts_alone():
                flights.forget_owed()
                return NOTHING
        else:
            await world.progress()
        applied = await self._apply_due(step)
        if local_metric is not None and flights.can_begin():
            self._read_new_metric(local_metric)
        while flights.can_begin():
            while flights.can_begin():
                self._capture(step)
            applied += await self._apply_due(step)
        await self._admit()
        return together(applied) if applied else NOTHING

    def _has(self, number: int) -> bool:
        """Return whether this rank has the mean of a round."""
        return has_merged(self._fragments, number)

    async def _merged(self, number: int) -> None:
        """Wait until this rank has the mean of a round."""
        if self._exchange is not None:
            await self._exchange.merged(number)

    def _tensors(self) -> Sequence[Tensor]:
        return self._flat.tensors(self._layout_buffers)

    def _capture(self, step: int) -> None:
        """Capture this member's contribution to the next round."""
        tensors = self._tensors()  # raises if the model's layout has changed; the fragment is then still owed
        fragment, number = self._flights.next()
        is_past = self._has(number)  # this rank was admitted while the others captured the round
        scores = () if is_past else self._take_scores(fragment, tensors)
        self._flights.begin(step)
        if is_past:
            return
        own, weight, exchange = self._fragments[fragment], self._take_weight(fragment), self._exchange
        encoded = own.layout.new_encoded() if exchange is None else exchange.new_encoded(fragment)
        norm = math.nan if self._unsound() is not None else own.capture(tensors, encoded)
        facts = number, fragment, step, own.version, weight, norm, own.layout.nbytes, own.layout.unencoded_nbytes
        if exchange is None:
            chosen = self.weigh({self._world.rank: Report(weight, norm, scores)})
            verdict = Verdict(1, tuple(chosen), tuple(chosen.values()), (norm,) * len(chosen))
            own.merge(verdict, encoded if chosen else ())
        else:
            exchange.contribute(number, encoded, weight, norm, scores)
        event = Contributed(*facts)
        self._journal.note_contributed(event)
        if self._shared.on_event is not None:
            self._shared.on_event(event)

    async def _apply_due(self, step: int) -> list[StepInfo]:
        """Apply all means that are due in this step; wait for those that have not arrived, unless they are skipped."""
        applied = []
        for fragment, flight in self._flights.due(step):
            if self._flights.skips_late and not self._has(flight.number):
                continue
            began_at = self._world.time()
            await self._merged(flight.number)
            applied.append(self._apply(fragment, flight, began_at))
        return applied

    def _apply(self, fragment: int, flight: Flight, began_at: float) -> StepInfo:
        """Write a fragment's merged mean into the model."""
        own, trouble, tensors = self._fragments[fragment], self._trouble(), self._tensors()
        assert own.mean is not None, f"round {flight.number} has no mean"
        waited_s = self._world.time() - began_at
        is_left_out = self._takes_whole(own.mean.verdict)
        is_late = self._flights.skips_late and flight.applied_at < self.iteration
        with self._weights.following():
            own.apply(tensors, is_late=is_late, is_whole=bool(trouble) or is_left_out)
            if trouble:  # otherwise the other fragments would make this one non-finite in the next training step
                for each in self._fragments:
                    each.restore(tensors)
        if self._shared.resets_optimizer or trouble:
            reset_optimizer_state(self.optimizer)
        if is_left_out:  # the encoding error of a bad contribution would spoil the next one
            own.forget_own()
        self._flights.end(fragment)
        if self._exchange is not None:
            self._exchange.note_applied(fragment)
        verdict = own.mean.verdict
        total = sum(verdict.weights)
        members = (self._world.rank,) if self._exchange is None else self._exchange.members()
        info = StepInfo(
            averaged_this_iteration=True,
            round=flight.number,
            donors=verdict.donors,
            weights=tuple(weight / total for weight in verdict.weights),
            staleness_steps=self.iteration - flight.captured_at,
            seconds=self._world.time() - began_at,
            nbytes=own.layout.mean_nbytes,
            recovered=trouble,
            fragment=fragment,
            wire_nbytes=own.layout.nbytes,
            outer_norm=own.mean.norm,
            cosine=own.mean.cosine,
            unencoded_nbytes=own.layout.unencoded_nbytes,
            waited_s=waited_s,
            fragment_count=self._fragment_count,
            version=own.version,
            staleness_versions=0,  # a fragment is captured again only after its mean was applied
            left_out=() if verdict.taker >= 0 else tuple(sorted(set(members) - set(verdict.donors))),
        )
        self._announce(info, verdict)
        return info

    def _unsound(self) -> str | None:
        """Return the name of an entry of the model with an unexpected non-finite value, or None."""
        return self._known_infinities.unsound_entry_of_model()

    def _trouble(self) -> str:
        """Describe the part of this rank's weights or optimizer that is not finite; return "" if all is finite."""
        name = self._unsound()
        if name is not None:
            return f"{name!r} was not finite"
        if not self._shared.resets_optimizer and not all_finite(dict(self.optimizer.state)):
            return "the optimizer's state was not finite"
        return ""

    def _announce(self, info: StepInfo, verdict: Verdict) -> None:
        if self._shared.on_event is None:
            return
        state = self._snapshots.acquire()
        try:
            self._flat.snapshot(state)
            best = verdict.donors[0] if verdict.donors else -1
            facts = info.round, info.donors, verdict.weights, best, self.iteration
            self._shared.on_event(AverageApplied(*facts, state.by_name(), info=info))
        finally:
            self._snapshots.release(state)
