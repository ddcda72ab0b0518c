"""DiLoCo and its relatives: ranks train alone for some steps, and an outer optimizer applies their mean difference.

Every ``average_every`` steps (H), each rank i sends the difference D_i = a - theta_i between the anchor a and its own
weights theta_i. The anchor is equal on all ranks. An outer optimizer moves the anchor by one step with the mean
difference as its gradient. The anchor becomes the new weights of all ranks:

    D = sum(w_i D_i) / sum(w_i),    a = outer(a, D),    theta_i = a

(DiLoCo: Douillard et al., 2311.08105.) With ``fragments``, parts of the model are averaged in turn. With
``overlap_steps`` (tau) and ``mixing`` (alpha) the ranks train while the data moves, and then mix: theta_i = alpha
theta_i + (1 - alpha) a (Streaming DiLoCo: Douillard et al., 2501.18512). Without an outer optimizer, the weights
themselves are averaged (local SGD; with ``weights="tokens"`` federated averaging: McMahan et al., 2017).

The ranks wait for each other when a mean is applied. With ``late="skip"``, each rank instead applies a mean after the
mean arrives, and keeps the progress made since it captured its weights. If a rank is lost, the remaining ranks are
averaged (:mod:`protocols.exchange.ledger`).
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Coroutine, Mapping, Sequence
from dataclasses import replace
from typing import Any, Unpack

import torch
from torch import Tensor, nn

from asyncdist import LocalProtocolError, validation
from asyncdist.protocols.declared import among, with_options
from asyncdist.protocols.diloco.anchored import AnchoredPolicy
from asyncdist.protocols.diloco.eager import AnchorMean, EagerFragment
from asyncdist.protocols.diloco.foreign_options import FOREIGN_OPTIONS, foreign_call_hint
from asyncdist.protocols.diloco.fragment_state import FragmentState
from asyncdist.protocols.diloco.fragments import fragments_of, warn_of_iterates
from asyncdist.protocols.diloco.options import (
    LEAST_TOKENS,
    LOSES_VALUES,
    DiLoCoOptionNames,
    DiLoCoOptions,
    StepTokens,
    check_has_whole_tensors,
)
from asyncdist.protocols.diloco.radial import embeddings_of
from asyncdist.protocols.exchange.fragment import Fragment, Mean
from asyncdist.protocols.exchange.layout.wire_layout import Scratch
from asyncdist.protocols.exchange.ledger import Report
from asyncdist.protocols.exchange.messages import Verdict
from asyncdist.protocols.exchange.policy import ExchangePolicy
from asyncdist.protocols.exchange.schedule import PendingRound, Schedule
from asyncdist.protocols.metrics import MetricSource
from asyncdist.protocols.misuse import line_of_caller
from asyncdist.protocols.options import CommonOptions, MemberOptions
from asyncdist.protocols.policy import SpawnPolicy
from asyncdist.protocols.step_info import StepInfo
from asyncdist.tensors.flat_state import Entry


@with_options(DiLoCoOptionNames, CommonOptions, DiLoCoOptions)
class DiLoCoPolicy(ExchangePolicy, AnchoredPolicy):
    """Trains with DiLoCo, Streaming DiLoCo, local SGD, or another method of the family.

    ::

        async with DiLoCoPolicy(model, optimizer, average_every=100) as policy:
            for batch in data:
                train_step(model, optimizer, batch)
                await policy.step()

    All ranks must begin with equal weights. The outer optimizer moves the parameters. Floating buffers, such as
    BatchNorm's statistics, are averaged. Integer and bool buffers are copied from the first contributing rank. The
    inner optimizer keeps its state. A rank whose weights are not finite does not contribute. It receives the other
    ranks' mean, and its inner optimizer's state is cleared (``StepInfo.recovered``).

    If some ranks end training earlier, the others continue without them.

    Args:
        model: Model that this rank trains; see :class:`SpawnPolicy`.
        optimizer: Inner optimizer, which trains the model.
        average_every, options: The options below.

    Raises:
        TypeError, ValueError: An argument is invalid.
    """

    @validation.names_options(refused=FOREIGN_OPTIONS, called=foreign_call_hint)
    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        *,
        average_every: int,
        **options: Unpack[DiLoCoOptionNames],
    ) -> None:
        own = self._own_options = DiLoCoOptions.of(options)
        own.check_combination(validation.count("average_every", average_every))
        # With ``eager``, a mean is applied one round after the contributions to it.
        overlap_steps = average_every if own.eager else own.overlap_steps
        schedule = Schedule(average_every, own.fragments, overlap_steps, own.warmup_steps)
        super().__init__(
            model,
            optimizer,
            schedule=schedule,
            shared=own,
            skips_late=own.late == "skip",
            replica_size=own.replica_size,
            quorum=own.quorum,
            grace_s=own.grace_s,
            **among(options, MemberOptions),
        )
        check_has_whole_tensors(own.merge, holds_shards=self._holds_shards())
        if own.wire.name == "topk" and own.error_feedback is None:
            warnings.warn(LOSES_VALUES, UserWarning, stacklevel=3)
        self._chosen = fragments_of(self._whole_entries(), own.fragments, own.fragment_pattern)
        self._step_tokens = StepTokens(own.weights)
        self._tokens = [0.0] * own.fragments  # tokens since each fragment's last contribution
        # By fragment: round whose mean its next eager step applies, and the seconds that a step has waited for the
        # mean.
        self._arrived_means: dict[int, tuple[PendingRound, float]] = {}
        self._anchor_means: list[AnchorMean] = []  # by fragment; empty without eager
        self._settled_at = 0  # last round after which the anchors were averaged
        if own.eager:
            self._numbers_per_round = 1 + own.fragments

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
            local_metric, loss, score: Metric of this rank for reports and the live table. It is read in steps that
                capture a contribution, and does not affect the averages.
            tokens: Number of tokens or examples of this step, for ``weights="tokens"``. Pass it in all steps on all
                ranks, or in none. Without it, each step counts as 1.

        Raises:
            TypeError: ``weights`` is ``"tokens"``, and the number of tokens is passed by position.
            ValueError: ``tokens`` is not a finite number above 0, is missing in some steps, or is passed although
                ``weights`` is ``"equal"``.
        """
        if self._first_call is None:
            self.note_call(line_of_caller())
        count = self._step_tokens.count(tokens, None if self.takes_metric else local_metric)
        self._tokens = [each + count for each in self._tokens]
        return super().step(local_metric, loss=loss, score=score)

    # -- hooks of ExchangePolicy --------------------------------------------------------------------------------------

    def _options(self) -> Mapping[str, Any]:
        return {"average_every": self.average_every, **self._own_options.agreed()}

    def _make_fragments(self) -> Sequence[FragmentState]:
        own, tensors, scratch = self._own_options, self._tensors(), Scratch()
        if own.eager or own.late == "skip":
            warn_of_iterates(self._flat.entries, "eager=True" if own.eager else 'late="skip"')
        divisible = embeddings_of(self.model) if own.merge == "radial" else None
        layouts = [self._layout(chosen, own.wire, divisible) for chosen in self._chosen]
        if own.eager:
            assert own.outer_optimizer is not None, "an eager step is a step of the outer optimizer"
            factory, decay, mixing = own.outer_optimizer, own.error_feedback, own.mixing
            eager = [EagerFragment(layout, factory, decay, tensors, scratch, mixing=mixing) for layout in layouts]
            self._anchor_means = [AnchorMean(each) for each in eager]
            return eager
        return [
            FragmentState(
                layout,
                own.outer_optimizer,
                own.error_feedback,
                tensors,
                scratch,
                mixing=own.mixing,
                keeps_captured=own.late == "skip",
                keeps_base=self._quorum is not None,
            )
            for layout in layouts
        ]

    def _whole_entries(self) -> Sequence[Entry]:
        """Return the model's entries with the shapes of whole tensors, even if this rank has only shards."""
        whole = {name: tuple(each.shape) for name, each in self.model.named_parameters(remove_duplicate=False)}
        shapes = whole if self._flat.mesh_ranks else {}
        return [replace(each, shape=shapes.get(each.names[0], each.shape)) for each in self._flat.entries]

    def _makes_rounds_alone(self) -> bool:
        return self._own_options.outer_optimizer is not None

    def _take_weight(self, fragment: int) -> float:
        tokens, self._tokens[fragment] = self._tokens[fragment], 0.0
        # After a cancelled step, a fragment may be contributed again without new tokens, but a weight must be above 0.
        return max(tokens, LEAST_TOKENS) if self._own_options.weights == "tokens" else 1.0

    def _own_state(self) -> dict[str, Any]:
        own = {**super()._own_state(), "tokens": list(self._tokens)}
        return {**own, "settled_at": self._settled_at} if self._own_options.eager else own

    def _load_own_state(self, state: Mapping[str, Any]) -> None:
        super()._load_own_state(state)
        self._tokens = list(state["tokens"])
        self._settled_at = state.get("settled_at", 0)

    def _forget_own(self) -> None:
        super()._forget_own()
        self._tokens = [0.0] * len(self._tokens)

    # -- the anchor in the model --------------------------------------------------------------------------------------

    def _check_common(self) -> None:
        own = self._own_options
        if own.outer_optimizer is None:
            raise LocalProtocolError(
                "anchor_weights() needs an anchor, which DiLoCoPolicy has only with an outer_optimizer, got None; "
                "without it, evaluate the model after a step() that has applied an average, when all ranks are equal"
            )
        if own.eager and not self.is_alone and self._settled_at != self._pending_rounds.last_number():
            raise LocalProtocolError(
                "anchor_weights() needs an anchor that is equal on all ranks, but with eager=True the ranks' anchors "
                "differ after a round; call await policy.settle() on all ranks first"
            )

    async def _write_anchor(self, tensors: Sequence[Tensor]) -> None:
        for fragment in self._fragments:
            fragment.restore(tensors)
        if self._replica is not None and self._parts is not None:
            with self._replica.step():
                await self._complete(range(self._fragment_count), tensors)

    # -- eager outer steps --------------------------------------------------------------------------------------------

    def _exchanged(self) -> Sequence[Fragment]:
        return [each for fragment in self._fragments for each in (fragment, *self._anchor_means)]

    async def _apply_due(self, step: int) -> list[StepInfo]:
        """Wait for the means that are due. With ``eager``, they are applied in the next round of their fragments."""
        if not self._own_options.eager:
            return await super()._apply_due(step)
        for fragment, pending in self._pending_rounds.due_means(step):
            began_at = self._world.time()
            await self._merged(pending.number)
            self._arrived_means[fragment] = pending, self._world.time() - began_at
            self._pending_rounds.end(fragment)
        return []

    async def _begin_round(self, step: int) -> list[StepInfo]:
        if not self._own_options.eager:
            return await super()._begin_round(step)
        began_at, fragment = self._world.time(), self._pending_rounds.next()[0]
        own = self._fragments[fragment]
        mean = own.mean  # the mean of the previous round
        await self._capture(step)
        arrived = self._arrived_means.pop(fragment, None)
        pending = PendingRound(0, step, step) if arrived is None else arrived[0]
        ready = await self._readiness(fragment, pending.number)
        await self._write(fragment, ready, is_late=False, is_left_out=False)
        if mean is None or arrived is None:  # the first eager step applies only this rank's share
            ready = ready._replace(norm=None, has_cosine=False)
            count = 0 if fragment in self._unsound_captures else 1
            mean = Mean(Verdict(1, (self._world.rank,) * count, (1.0,) * count, (0.0,) * count))
        info = self._info_of(fragment, pending, mean, ready)
        seconds, waited_s = self._world.time() - began_at, 0.0 if arrived is None else arrived[1]
        info = replace(info, seconds=seconds + waited_s, waited_s=waited_s, staleness_versions=int(arrived is not None))
        if arrived is None:
            info = replace(info, left_out=(), nbytes=0)
        self._announce_average(self._shared.on_event, info, mean.verdict.weights)
        return [info]

    async def settle(self) -> None:
        """Wait for the means of this rank's unfinished rounds. With ``eager``, also average the ranks' anchors.

        All ranks must call this method after the same number of steps. :func:`asyncdist.save_population` calls it. With
        ``eager``, each rank's parameters are shifted by the change of its anchor. Otherwise no weights change.

        Raises:
            BusyError: The call is inside a block of :meth:`anchor_weights`.
        """
        await super().settle()
        await self._average_anchors()

    async def _conclude(self) -> None:
        await self._average_anchors()

    async def _average_anchors(self) -> None:
        """Replace the anchors by their mean over the ranks that call this method after the same round."""
        exchange, last = self._exchange, self._pending_rounds.last_number()
        if exchange is None or not self._anchor_means or self._settled_at == last:
            return
        self._reshard()
        tensors, first = self._tensors(), self._number_in_exchange(last) + 1
        place_count = len(self._fragments) * self._numbers_per_round
        is_sound = self._known_infinities.unsound_entry_of_model() is None
        for number, each in enumerate(self._anchor_means, first):
            if each.number != number:  # the numbers are equal if a cancelled call has already contributed
                version, place = divmod(number - 1, place_count)
                encoded = exchange.new_encoded(place)
                norm = each.capture(tensors, encoded)
                each.number, each.version = number, version
                exchange.contribute(number, encoded, Report(1.0, norm if is_sound else math.nan))
        for number, _ in enumerate(self._anchor_means, first):
            await exchange.merged(number)
        with self._weights.following():
            for each in self._anchor_means:
                each.apply(tensors)
        for number, _ in enumerate(self._anchor_means, first):
            exchange.note_applied((number - 1) % place_count)
        self._settled_at = last
        await self._share(range(len(self._fragments)), tensors)

    # -- restart with a new model -----------------------------------------------------------------------------------

    def _can_begin_again(self) -> bool:
        return self._own_options.outer_optimizer is not None

    def take_model_of(self, other: SpawnPolicy) -> bool:
        """Adopt the model of ``other`` and set its weights to the anchor. See :meth:`SpawnPolicy.take_model_of`."""
        if not super().take_model_of(other):
            return False
        with self._weights.following():
            for fragment in self._fragments:
                fragment.begin_again(self._tensors())
        return True
