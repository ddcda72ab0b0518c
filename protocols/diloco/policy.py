"""DiLoCo and its relatives: ranks train alone for some steps, and an outer optimizer applies their mean difference.

Every ``average_every`` steps (H), each rank i sends the difference D_i = a - theta_i between the anchor a, which is
equal on all ranks, and its own weights theta_i. The anchor makes one step of an outer optimizer with the mean
difference as its gradient, and becomes the new weights of all ranks:

    D = sum(w_i D_i) / sum(w_i),    a = outer(a, D),    theta_i = a

(DiLoCo: Douillard et al., 2311.08105.) With ``fragments`` the parts of the model take turns, and with ``overlap_steps``
(tau) and ``mixing`` (alpha) the ranks continue to train while the data moves, and then mix: theta_i = alpha theta_i +
(1 - alpha) a (Streaming DiLoCo: Douillard et al., 2501.18512). Without an outer optimizer, the weights themselves are
averaged (local SGD; with ``weights="tokens"`` federated averaging: McMahan et al., 2017).

The ranks wait for each other where a mean is applied, unless ``late="skip"``: then each rank applies a mean when it has
arrived, and keeps the progress that it has made since it captured its weights. If a rank is lost, the mean is that of
the others (:mod:`protocols.exchange.ledger`). The anchor and the outer optimizer's state stay equal on all ranks.
"""

from __future__ import annotations

import logging
import math
import warnings
import zlib
from collections.abc import Coroutine, Mapping, Sequence
from typing import Any, ClassVar, Final, NamedTuple, Unpack

import torch
from torch import Tensor, nn

from asyncdist import BusyError, ClosedError, RankLostError, validation
from asyncdist.protocols.declared import among, with_options
from asyncdist.protocols.diloco.fragment_state import FragmentState
from asyncdist.protocols.diloco.fragments import fragments_of
from asyncdist.protocols.diloco.options import DiLoCoOptionNames, DiLoCoOptions
from asyncdist.protocols.diloco.schedule import Schedule
from asyncdist.protocols.diloco.statistics import DiLoCoStatistics
from asyncdist.protocols.exchange.exchange import Exchange
from asyncdist.protocols.exchange.ledger import Verdict
from asyncdist.protocols.exchange.wire_layout import WireLayout
from asyncdist.protocols.joining.admission import Admission, newest_left, welcomed
from asyncdist.protocols.joining.membership import Membership
from asyncdist.protocols.joining.scopes import PolicyScopes
from asyncdist.protocols.metrics import MetricSource
from asyncdist.protocols.misuse import line_of_caller
from asyncdist.protocols.options import CommonOptions, MemberOptions
from asyncdist.protocols.policy import SpawnPolicy
from asyncdist.protocols.starting.differences import FIRST_WEIGHTS
from asyncdist.protocols.starting.without_lost import lost_members
from asyncdist.protocols.step_info import NOTHING, AverageApplied, StepInfo
from asyncdist.tensors.byte_views import byte_view
from asyncdist.tensors.flat_state import SnapshotPool
from asyncdist.tensors.infinities import KnownInfinities, all_finite
from asyncdist.tensors.optimizers.reset import reset_optimizer_state

logger = logging.getLogger("protocols.diloco")


class _InFlight(NamedTuple):
    """A round for which this member has captured its weights, and whose mean is not applied yet."""

    number: int
    captured_at: int
    applied_at: int


#: Name in error messages for the number of completed rounds of each fragment.
_ROUNDS: Final = "rounds completed"
#: Options of other libraries, with the names of this policy's options.
_ELSEWHERE: Final = {
    **dict.fromkeys(
        ("sync_every", "local_sgd_steps", "target_batch_size", "H"),
        "here average_every is the number of inner steps per round",
    ),
    "fragment_sync_delay": "here overlap_steps is the number of steps between capture and application",
    **dict.fromkeys(("fragment_update_alpha", "alpha"), "here mixing is the share of the rank's own weights"),
    **dict.fromkeys(
        ("should_quantize", "grad_compression", "state_averaging_compression"),
        "here wire='int8' or another codec encodes the data",
    ),
    **dict.fromkeys(("use_bucketization", "bucket_cap_mb"), "data is always sent in slices, one for each rank"),
    "inner_optimizer": "here optimizer, the second argument, is the inner optimizer",
    "model_fragments": "here fragment_pattern lists the names of the modules of each fragment",
    **dict.fromkeys(("backup_device", "pin_memory"), "here the anchor is always in host memory"),
    **dict.fromkeys(
        ("manager", "accelerator", "dht", "run_id"), "the ranks are those of group, by default all ranks of the job"
    ),
    **dict.fromkeys(
        ("matchmaking_time", "averaging_timeout"),
        "a round has no time limit; it waits for all ranks that are neither lost nor have left",
    ),
    "use_local_updates": "here ranks always make local updates",
    "batch_size_per_step": "here step(tokens=n) reports the size of a step, for weights='tokens'",
    "average_state_every": "here parameters and floating buffers are averaged in each round",
    **dict.fromkeys(
        ("metric", "metric_mode", "replacement_ratio", "averaging_strategy"),
        "here all ranks are averaged, whatever their metrics; AsyncSelectiveAveragingPolicy chooses by metric",
    ),
    "momentum": "outer_optimizer=functools.partial(torch.optim.SGD, lr=0.7, momentum=0.9) sets the outer momentum, and "
    "mixing the share of the rank's own weights",
}
_LOSES_VALUES: Final = (
    "wire='topk' without error_feedback loses the values that it does not send; pass error_feedback=0.95 or 1.0"
)


@with_options(DiLoCoOptionNames, CommonOptions, DiLoCoOptions)
class DiLoCoPolicy(SpawnPolicy):
    """DiLoCo, Streaming DiLoCo, local SGD, and methods with another outer optimizer.

    ::

        async with DiLoCoPolicy(model, optimizer, average_every=100) as policy:
            for batch in data:
                train_step(model, optimizer, batch)
                await policy.step()

    All ranks must begin with equal weights. The outer optimizer moves the parameters. Floating buffers, such as
    BatchNorm's statistics, are averaged. Integer and bool buffers are copied from the first contributing rank. The
    inner optimizer keeps its state. A rank whose weights are not finite does not contribute. It gets the others' mean,
    and its inner optimizer's state is cleared (``StepInfo.recovered``).

    If ranks end their training after different numbers of steps, the others continue without them.

    Args:
        model: Model that this rank trains; see :class:`SpawnPolicy`.
        optimizer: Inner optimizer, which trains the model.
        average_every, options: The options below.

    Raises:
        TypeError, ValueError: An argument has the wrong type or is out of range.
    """

    takes_metric: ClassVar[bool] = False
    admits_restarted: ClassVar[bool] = True

    @validation.names_options(refused=_ELSEWHERE)
    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        *,
        average_every: int,
        **options: Unpack[DiLoCoOptionNames],
    ) -> None:
        own = self._own_options = DiLoCoOptions.of(options)
        self._resets_optimizer = own.optimizer_state == "reset"
        super().__init__(
            model,
            optimizer,
            average_every=average_every,
            resets_optimizer=self._resets_optimizer,
            **among(options, MemberOptions),
        )
        own.check_beside(self.average_every)
        if own.wire.name == "topk" and own.error_feedback is None:
            warnings.warn(_LOSES_VALUES, UserWarning, stacklevel=3)
        self._chosen = fragments_of(self._flat.entries, own.fragments, own.fragment_pattern)
        self._layout_buffers = self._flat.new_buffers(device="meta")
        self._skips = own.late == "skip"
        self._schedule = Schedule(self.average_every, own.fragments, own.overlap_steps, own.warmup_steps)
        self._fragments: list[FragmentState] = []
        self._known_infinities: KnownInfinities
        self._saved: Mapping[str, Any] | None = None
        self._exchange: Exchange | None = None  # None before the start, and if this rank is alone
        self._admission: Admission | None = None
        self._is_admitting = False
        self._snapshots = SnapshotPool(self._flat)
        self._in_flight: dict[int, _InFlight] = {}  # by fragment
        self._captured = [0] * own.fragments  # number of contributions by fragment
        self._owed: list[int] = []  # fragments that are due but not captured, in turn; several after cancelled steps
        self._tokens = [0.0] * own.fragments  # since each fragment's previous contribution
        self._average_count, self._waited_s, self._sent_nbytes = 0, 0.0, 0

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
            ValueError: ``tokens`` is not finite and above 0.
        """
        if self._first_call is None:
            self.note_call(line_of_caller())
        allowed = "a finite number > 0 (of a tensor, tokens.item())"
        count = 1.0 if tokens is None else validation.real("tokens", tokens, allowed, low=1e-9)
        self._tokens = [each + count for each in self._tokens]
        return super().step(local_metric, loss=loss, score=score)

    def statistics(self) -> DiLoCoStatistics:
        """Return this member's counts so far."""
        return DiLoCoStatistics(
            iteration=self.iteration,
            average_count=self._average_count,
            waited_s=self._waited_s,
            sent_nbytes=self._sent_nbytes,
            title=self._journal.title(),
        )

    # -- starting and leaving ---------------------------------------------------------------------------------------

    def _options(self) -> Mapping[str, Any]:
        return {"average_every": self.average_every, **self._own_options.agreed()}

    def _agreed_values(self) -> dict[str, str]:
        checksum = 0
        for fragment in self._fragments:
            for anchor in fragment.anchors:
                checksum = zlib.crc32(byte_view(anchor), checksum)
        rounds = [fragment.version for fragment in self._fragments]
        return {**super()._agreed_values(), _ROUNDS: str(rounds), FIRST_WEIGHTS: f"{checksum:08x}"}

    async def _start(self) -> None:
        agreed = await self._agree()
        meeting = self._joint_start.meeting
        scopes = PolicyScopes(meeting.ranks, agreed)
        lost = lost_members(self._world, self._members, meeting)
        members = [rank for rank in self._members if rank not in lost]
        self._open(Membership(self._services, scopes, members, known=self._members), scopes)

    def _open(self, membership: Membership, scopes: PolicyScopes) -> None:
        values = _without_progress(self._agreed_values())
        is_overlapped = self._own_options.overlap_steps > 0
        self._exchange = Exchange(self._services, scopes, membership, self._fragments, is_overlapped=is_overlapped)
        self._admission = Admission(self._services, membership, scopes, self._members, values)

    def _opened(self) -> tuple[Exchange, Admission]:
        assert self._exchange is not None and self._admission is not None, "the policy has not opened"
        return self._exchange, self._admission

    # -- beginning again with a new model ---------------------------------------------------------------------------

    def _can_begin_again(self) -> bool:
        """Return True if there is an anchor, from which the new model begins."""
        return self._own_options.outer_optimizer is not None

    def take_model_of(self, other: SpawnPolicy) -> bool:
        """Use the model of ``other`` from now on, as :meth:`SpawnPolicy.take_model_of`, and set it to the anchor."""
        if not super().take_model_of(other):
            return False
        with self._weights.following():
            for fragment in self._fragments:
                fragment.restore(self._tensors())
        return True

    # -- joining a running policy -----------------------------------------------------------------------------------

    async def _join(self) -> None:
        """Join the policy that runs on the other ranks, with its leader's state."""
        # Until it is admitted, other ranks must not count this rank as a member.
        was_admitted, self._services.is_admitted = self._services.is_admitted, False
        deadline = self._world.time() + self._start_timeout_s
        values = _without_progress(self._agreed_values())
        left = newest_left(self._services, self._members, values)  # later also the policy of a repeated attempt
        try:
            while not await self._has_joined(deadline, values, left, may_start=was_admitted):
                logger.info("the leader was lost during this rank's admission, which is repeated")
        except BaseException:
            self._stage = "closed"
            raise
        self._services.is_admitted = True

    async def _has_joined(self, deadline: float, values: Mapping[str, str], left: int, *, may_start: bool) -> bool:
        """Try once to join; return False if the leader is lost while it sends its state."""
        try:
            welcome, leader = await welcomed(self._services, self._members, values, self._start_timeout_s, left)
        except ClosedError:  # all other ranks were restarted as well, so no policy is running
            if not may_start:
                raise
            await self._start_among_newcomers()
            return True
        scopes = PolicyScopes.of_running(welcome, values)
        members = [rank for rank, _ in welcome.members]
        admitted = dict(welcome.members)
        self._open(
            Membership(self._services, scopes, members, known=self._members, admitted=admitted, leader=leader), scopes
        )
        exchange, admission = self._opened()
        try:
            self._restore_whole(await admission.take_state(self._flat.nbytes, deadline))
        except RankLostError:
            await self._stop(None)
            return False
        except BaseException as error:
            await self._stop(error)
            raise
        exchange.begin_joined(
            [each.number for fragment, each in self._in_flight.items() if not self._has_merged(fragment, each.number)]
        )
        return True

    def _whole_state(self) -> dict[str, Any]:
        """Return this rank's state after the current step: what a newcomer needs to continue as this rank."""
        weights = self._flat.new_buffers()
        self._flat.snapshot(weights)
        policy = {**self.state_dict(), "iteration": self.iteration + 1}
        return {"weights": weights.by_name(), "optimizer": self.optimizer.state_dict(), "policy": policy}

    def _restore_whole(self, state: Mapping[str, Any]) -> None:
        """Load another rank's state, except its residuals and token counts."""
        weights = self._flat.new_buffers()
        for name, tensor in weights.by_name().items():
            tensor.copy_(state["weights"][name])
        self.optimizer.load_state_dict(state["optimizer"])
        with self._weights.following():
            self._flat.load(weights)
        self._restore(state["policy"])
        self._take_saved()
        self._tokens = [0.0] * len(self._fragments)
        for fragment in self._fragments:
            fragment.clear_residuals()

    def _prepare(self) -> None:
        """Lay out the fragments and copy their anchors from the model, or load them from a saved state."""
        own, tensors = self._own_options, self._tensors()
        self._known_infinities = KnownInfinities(self._flat)
        parameters = {name for name, _ in self.model.named_parameters(remove_duplicate=False)}
        count = len(self._members)
        self._fragments = [
            FragmentState(
                WireLayout(self._flat.entries, chosen, parameters, count, own.wire),
                own.outer_optimizer,
                own.error_feedback,
                tensors,
                keeps_captured=own.late == "skip",
            )
            for chosen in self._chosen
        ]
        self._take_saved()

    def _take_saved(self) -> None:
        """Load the state that :meth:`load_state_dict` or another rank has given, if any."""
        if self._saved is not None:
            for own_fragment, state in zip(self._fragments, self._saved["fragments"], strict=False):
                own_fragment.load_state_dict(state)
            for fragment, *flight, pending in self._saved["in_flight"]:
                self._in_flight[fragment] = _InFlight(*flight)
                if pending is not None:
                    self._fragments[fragment].restore_pending(pending)
            self._saved = None

    async def _stop(self, error: BaseException | None) -> None:
        exchange, admission = self._opened()
        try:
            if error is None and self._services.engine.failure is None:
                await exchange.settled(self._world.time() + self._own_options.drain_timeout_s)
        finally:  # notifies the other ranks even if this task is cancelled
            exchange.leave()
            admission.close()

    # -- continuing later -------------------------------------------------------------------------------------------

    async def settle(self) -> None:
        """Wait until this rank has the means of all rounds in flight, so that :meth:`state_dict` can save them.

        :func:`asyncdist.save_population` calls this method. The weights do not change.
        """
        for fragment, flight in self._in_flight.items():
            await self._merged(fragment, flight.number)

    def _own_state(self) -> dict[str, Any]:
        if self._stage == "new" and self._saved is not None:
            return {name: self._saved[name] for name in ("fragments", "captured", "tokens", "owed", "in_flight")}
        for fragment, flight in self._in_flight.items():
            if not self._has_merged(fragment, flight.number) and not self._is_admitting:
                raise BusyError(f"await policy.settle() before state_dict(): round {flight.number} is in flight")
        return {
            "fragments": [fragment.state_dict() for fragment in self._fragments],
            "captured": list(self._captured),
            "tokens": list(self._tokens),
            "owed": list(self._owed),
            "in_flight": [
                (
                    fragment,
                    *flight,
                    self._fragments[fragment].pending() if self._has_merged(fragment, flight.number) else None,
                )
                for fragment, flight in self._in_flight.items()
            ],
        }

    def _load_own_state(self, state: Mapping[str, Any]) -> None:
        count = len(state["fragments"]) or len(self._chosen)
        if count != len(self._chosen):
            raise ValueError(f"the state must have {len(self._chosen)} fragments, as this policy, got {count}")
        self._saved = state
        self._tokens, self._owed = list(state["tokens"]), list(state["owed"])
        self._captured = list(state["captured"])

    # -- one step ---------------------------------------------------------------------------------------------------

    async def _step(self, local_metric: MetricSource) -> StepInfo:
        del local_metric
        world, step = self._world, self.iteration
        # Before the first await, since a cancelled step captures nothing.
        self._owed += [each for each in self._schedule.due(step) if not self._skips or self._is_in_turn(each)]
        if self.is_alone:
            await world.safe_point()
            if self._own_options.outer_optimizer is None:
                self._owed.clear()
                return NOTHING
        else:
            await world.progress()
        info = await self._apply_due(step)
        while self._owed and self._owed[0] not in self._in_flight:
            while self._owed and self._owed[0] not in self._in_flight:
                self._capture(self._owed.pop(0), step)
            info = await self._apply_due(step) or info
        await self._admit()
        return info

    async def _admit(self) -> None:
        """Admit a restarted rank that has asked for it, as the leader, with the state after this step."""
        if self._exchange is None or self._admission is None or not self._admission.is_asked:
            return
        if not self._skips:
            await self._exchange.shared()
        # Meanwhile a rank may have been lost, so that a census is in progress.
        if not self._exchange.holds_means and self._admission.is_asked:
            self._is_admitting = True
            try:
                self._admission.admit(self._whole_state)
            finally:
                self._is_admitting = False

    def _is_in_turn(self, fragment: int) -> bool:
        """Return whether a fragment's next round is the first that is neither captured nor owed.

        Rounds are retired in the order of their numbers, so they must be captured in this order.
        """
        counts = [count + self._owed.count(each) for each, count in enumerate(self._captured)]
        return fragment not in self._owed and fragment == counts.index(min(counts))

    def _tensors(self) -> Sequence[Tensor]:
        return self._flat.tensors(self._layout_buffers)

    def _has_merged(self, fragment: int, number: int) -> bool:
        """Return whether this rank has the mean of a round of the fragment."""
        return (number - 1) // len(self._fragments) < self._fragments[fragment].version

    async def _merged(self, fragment: int, number: int) -> None:
        """Wait until this rank has the mean of a round."""
        if self._exchange is not None and not self._has_merged(fragment, number):
            await self._exchange.merged(number)

    def _capture(self, fragment: int, step: int) -> None:
        """Capture this member's contribution to the fragment's next round."""
        own, number = self._fragments[fragment], self._captured[fragment] * len(self._fragments) + fragment + 1
        self._captured[fragment] += 1
        if self._has_merged(fragment, number):  # this rank was admitted while the others captured the round
            self._in_flight[fragment] = _InFlight(number, step, self._schedule.applied_at(step))
            return
        weight = self._tokens[fragment] if self._own_options.weights == "tokens" else 1.0
        self._tokens[fragment] = 0.0
        exchange, layout = self._exchange, own.layout
        encoded = layout.new_encoded() if exchange is None else exchange.new_encoded(fragment)
        norm = self._contribution(own, encoded)
        if exchange is None:
            is_finite = math.isfinite(norm)
            verdict = Verdict(1, (self._world.rank,), (weight,), (norm,)) if is_finite else Verdict(1, (), (), ())
            own.merge(verdict, encoded if is_finite else ())
        else:
            self._sent_nbytes += layout.nbytes
            exchange.contribute(number, encoded, weight, norm)
        self._in_flight[fragment] = _InFlight(number, step, self._schedule.applied_at(step))

    def _contribution(self, fragment: FragmentState, encoded: Sequence[Tensor]) -> float:
        """Encode this member's contribution and return its norm; NaN if the model is not finite."""
        if self._known_infinities.unsound_entry_of_model() is not None:
            return math.nan
        return fragment.capture(self._tensors(), encoded)

    async def _apply_due(self, step: int) -> StepInfo:
        """Apply all means that are due in this step; wait for those that have not arrived, unless ``late="skip"``."""
        info = NOTHING
        due = [each for each in self._in_flight.items() if each[1].applied_at <= step]
        for fragment, flight in sorted(due):
            if self._skips and not self._has_merged(fragment, flight.number):
                continue
            began_at = self._world.time()
            await self._merged(fragment, flight.number)
            info = self._apply(fragment, flight, began_at)
        return info

    def _apply(self, fragment: int, flight: _InFlight, began_at: float) -> StepInfo:
        """Write a fragment's merged mean into the model."""
        own, number = self._fragments[fragment], flight.number
        assert own.mean is not None, f"round {number} has no mean"
        trouble = self._trouble()
        with self._weights.following():
            if self._skips and flight.applied_at < self.iteration and not trouble:
                own.apply_late(self._tensors())
            else:
                own.apply(self._tensors(), 0.0 if trouble else self._own_options.mixing)
            if trouble:  # otherwise the other fragments would make this one non-finite in the next training step
                for each in self._fragments:
                    each.restore(self._tensors())
        if self._resets_optimizer or trouble:
            reset_optimizer_state(self.optimizer)
        del self._in_flight[fragment]
        if self._exchange is not None:
            self._exchange.note_applied(fragment)
        waited_s = self._world.time() - began_at
        self._average_count, self._waited_s = self._average_count + 1, self._waited_s + waited_s
        verdict = own.mean.verdict
        self._announce(number, verdict)
        total = sum(verdict.weights)
        return StepInfo(
            averaged_this_iteration=True,
            round=number,
            donors=verdict.donors,
            weights=tuple(weight / total for weight in verdict.weights),
            staleness_steps=self.iteration - flight.captured_at,
            seconds=waited_s,
            nbytes=own.layout.nbytes,
            recovered=trouble,
            fragment=fragment,
            wire_nbytes=own.layout.nbytes,
            outer_norm=own.mean.norm,
            cosine=own.mean.cosine,
        )

    def _trouble(self) -> str:
        """Describe the part of this rank's weights or optimizer that is not finite; return "" if all is finite."""
        name = self._known_infinities.unsound_entry_of_model()
        if name is not None:
            return f"{name!r} was not finite"
        if not self._resets_optimizer and not all_finite(dict(self.optimizer.state)):
            return "the optimizer's state was not finite"
        return ""

    def _announce(self, number: int, verdict: Verdict) -> None:
        if self._own_options.on_event is None:
            return
        state = self._snapshots.acquire()
        try:
            self._flat.snapshot(state)
            best = verdict.donors[0] if verdict.donors else -1
            event = AverageApplied(number, verdict.donors, verdict.weights, best, self.iteration, state.by_name())
            self._own_options.on_event(event)
        finally:
            self._snapshots.release(state)


def _without_progress(values: Mapping[str, str]) -> dict[str, str]:
    """Return the values that a restarted rank must share with the members, whose rounds and anchor have advanced."""
    return {name: value for name, value in values.items() if name not in (FIRST_WEIGHTS, _ROUNDS)}
