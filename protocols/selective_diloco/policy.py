"""Implements selective DiLoCo: each rank's difference is weighted by its gain on held-out data.

Each rank measures its gain: how much a step along its difference improves the anchor's held-out metric. The leader of
the exchange chooses the donors and their weights from the ranks' reported scores
(:mod:`protocols.selective_diloco.donors`). In all other respects, the policy works like DiLoCo
(:mod:`protocols.diloco.policy`).

The metric is evaluated twice, with trial weights in the rank's own model: at the anchor, which is equal on all ranks,
and after a *trial step*. A trial step moves the anchor by a share of this rank's change in one fragment. With k donors,
the share is 1 / k, as in their mean. A trial step of the whole difference would be misleading. Late in training, noise
often makes each rank's own weights worse than the anchor, although the mean of all differences improves the anchor. The
harm from noise is proportional to the square of the share, but the gain from progress only to the share. If the donors'
noise is independent, a trial step of share 1 / k has 1 / k of the gain of the mean.

The ranks of a replica measure together, each with trial weights in its part of the model.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Final, Unpack

import torch
from torch import Tensor, nn

from asyncdist import validation
from asyncdist.protocols.declared import Options, among, function, like, option, with_options
from asyncdist.protocols.diloco.anchored import restored
from asyncdist.protocols.diloco.foreign_options import FOREIGN_OPTIONS, foreign_call_hint
from asyncdist.protocols.diloco.options import DiLoCoOptionNames, DiLoCoOptions
from asyncdist.protocols.diloco.policy import DiLoCoPolicy
from asyncdist.protocols.exchange.fragment import Fragment
from asyncdist.protocols.exchange.layout.copies import as_written, gather, scatter
from asyncdist.protocols.exchange.ledger import Report
from asyncdist.protocols.exchange.messages import Verdict
from asyncdist.protocols.metrics import Metric, MetricSource, due_metric
from asyncdist.protocols.misuse import check_evaluates, line_of_caller
from asyncdist.protocols.options import CommonOptions
from asyncdist.protocols.ranking import JudgingRules, MetricMode
from asyncdist.protocols.selective_diloco.donors import (
    AnchorScores,
    DifferenceStrategy,
    DonorRules,
    choose_donors,
    donor_limit,
    gain_of,
)
from asyncdist.protocols.step_info import StepInfo
from asyncdist.tensors.optimizers.weights import kept_mode

logger = logging.getLogger("protocols.selective_diloco")

_CALLABLE: Final = "a callable without arguments that evaluates the model on held-out data, or None"


class SelectiveDiLoCoOptionNames(DiLoCoOptionNames, total=False):
    """The options of :class:`protocols.SelectiveDiLoCoPolicy`, except ``average_every``."""

    metric: Callable[[], Metric] | None
    metric_mode: MetricMode
    averaging_strategy: DifferenceStrategy
    donor_ratio: float
    outlier_factor: float


@dataclass(frozen=True, slots=True, kw_only=True)
class TrialOptions(Options):
    """Options for measuring how much a rank's difference improves a held-out metric."""

    metric: Callable[[], Metric] | None = option(
        "Callable without arguments that evaluates the model's current weights on held-out data, the same on all "
        "ranks; for calls of `step` without `loss` or `score`.",
        function(_CALLABLE),
        default=None,
    )
    metric_mode: MetricMode = like(JudgingRules, "metric_mode")


_FOREIGN_OPTIONS = {
    name: reason for name, reason in FOREIGN_OPTIONS.items() if name not in SelectiveDiLoCoOptionNames.__annotations__
}
_FOREIGN_OPTIONS["replacement_ratio"] = "here donor_ratio is the largest share of ranks whose differences are averaged"


@with_options(SelectiveDiLoCoOptionNames, CommonOptions, DiLoCoOptions, TrialOptions, DonorRules)
class SelectiveDiLoCoPolicy(DiLoCoPolicy):
    """Trains with DiLoCo, but averages only differences that improve a held-out metric, weighted by their gain.

    ::

        def evaluate() -> float:  # the same data on all ranks
            with torch.no_grad():
                return loss_function(model(held_out_inputs), held_out_targets).item()

        async with SelectiveDiLoCoPolicy(model, optimizer, average_every=100) as policy:
            for batch in data:
                train_step(model, optimizer, batch)
                await policy.step(loss=evaluate)

    When a rank's contribution is due, the policy calls ``evaluate`` twice: first with the common anchor in the model,
    then with the anchor after a step along the rank's difference. With k donors, this step is 1 / k of the difference.
    The improvement is the rank's gain. Ranks without a gain, and ranks with an unusually large difference, are left out
    of the round, but receive the new weights. If all ranks are left out, all return to the anchor, and the outer
    optimizer takes no step.

    ``evaluate`` must give the same result on all ranks for equal weights. A metric on each rank's own data would favour
    ranks with easy data.

    Args:
        model: Model that this rank trains; see :class:`SpawnPolicy`.
        optimizer: Inner optimizer, which trains the model.
        average_every, options: The options below.

    Raises:
        TypeError, ValueError: An argument is invalid.
    """

    takes_metric: ClassVar[bool] = True
    calls_metric: ClassVar[bool] = True

    @validation.names_options(refused=_FOREIGN_OPTIONS, called=foreign_call_hint)
    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        *,
        average_every: int,
        **options: Unpack[SelectiveDiLoCoOptionNames],
    ) -> None:
        self._rules, trials = DonorRules.of(options), TrialOptions.of(options)
        super().__init__(model, optimizer, average_every=average_every, **among(options, DiLoCoOptionNames))
        self._check_combination()
        self._metric, self._metric_mode = trials.metric, trials.metric_mode
        self._sign = 1.0 if trials.metric_mode == "max" else -1.0
        self._evaluation: MetricSource = None  # metric of the current step
        self._anchor_scores = AnchorScores()
        # With BatchNorm, scores of equal weights differ between ranks, because each rank has its own statistics.
        has_statistics = any(getattr(each, "running_mean", None) is not None for each in model.modules())
        own = self._own_options
        self._compares_scores = not has_statistics and own.late == "wait" and own.quorum is None

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
            loss: Callable without arguments that returns the model's loss on held-out data; smaller is better. It is
                called twice when this rank's contribution is due, with trial weights in the model.
            score: Callable like ``loss``, for a metric whose larger values are better.
            local_metric: Callable like ``loss``; ``metric_mode`` defines which values are better.
            tokens: Number of tokens or examples of this step, for ``weights="tokens"``. Pass it in all steps on all
                ranks, or in none. Without it, each step counts as 1.

        Raises:
            TypeError: A metric is not callable.
            ValueError: A contribution is due without a metric, or ``tokens`` is refused by :meth:`DiLoCoPolicy.step`.
        """
        if self._first_call is None:
            self.note_call(line_of_caller())
        check_evaluates(metric=local_metric, loss=loss, score=score)
        return super().step(local_metric, loss=loss, score=score, tokens=tokens)

    async def _step(self, local_metric: MetricSource) -> StepInfo:
        self._evaluation = self._metric if local_metric is None else local_metric
        try:
            return await super()._step(None)
        finally:
            self._evaluation = None

    def _check_combination(self) -> None:
        """Raise ValueError if an option of DiLoCo makes it impossible to measure gains."""
        own = self._own_options
        if own.outer_optimizer is None:
            raise ValueError(
                "outer_optimizer must be a factory, got None: a gain is measured from the anchor, which only an outer "
                "optimizer has. To average the weights, pass functools.partial(torch.optim.SGD, lr=1.0)"
            )
        if own.eager:
            validation.refuse(
                "eager", own.eager, "False, since eager ranks have no common anchor whose metric they could judge"
            )
        longest = self.average_every // own.fragments
        if own.overlap_steps > longest:
            allowed = (
                f"at most average_every // fragments ({longest}), since no other fragment may be in flight while the "
                "gain of a difference is measured"
            )
            validation.refuse("overlap_steps", own.overlap_steps, allowed)

    def _options(self) -> Mapping[str, Any]:
        return {**super()._options(), "metric_mode": self._metric_mode, **self._rules.agreed()}

    async def _take_scores(self, fragment: int, tensors: Sequence[Tensor]) -> tuple[float, ...]:
        """Return the score of the anchor (common weights), and the score after a trial step.

        Return () if the fragment has no parameters, or if the weights of a rank of the replica are not finite.
        """
        parameters = self._known_infinities.without(dict(self.model.named_parameters(remove_duplicate=False)))
        if all(parameters.isdisjoint(self._flat.entries[index].names) for index in self._chosen[fragment]):
            return ()
        count = 1 if self._exchange is None else len(self._exchange.members()) // self._replicas.size
        if self._known_infinities.unsound_entry_of_model() is not None:
            count = 0
        if self._replica is not None:  # the replica's ranks may know of different lost ranks
            count = await self._replica.smallest(count)
        if not count:
            return ()
        if self._evaluation is None:
            raise ValueError(
                f"step() must get a metric at iteration {self.iteration}, because a contribution is due, got None; "
                "pass step(loss=evaluate), or metric=evaluate to the policy"
            )
        share = 1.0 / donor_limit(count, self._rules)
        try:
            with kept_mode(self.optimizer):
                metrics = await self._measure(fragment, tensors, share)
        finally:
            self._reshard()
        self._journal.note_metric(self.iteration, metrics[0])
        return self._sign * metrics[0], self._sign * metrics[1]

    async def _measure(self, chosen: int, tensors: Sequence[Tensor], share: float) -> tuple[float, float]:
        """Return the metric of the anchor, and the metric after a trial step of one fragment.

        The model's parameters and buffers are restored, even after an exception.

        Args:
            chosen: Index of the fragment whose difference is tried.
            share: Length of the trial step as a share of the difference.
        """
        fragment = self._fragments[chosen]
        moved = _trial_weights(fragment, tensors, share)
        with restored(tensors):
            for each in self._fragments:
                each.restore(tensors)
            await self._complete(range(len(self._fragments)), tensors)
            at_anchor = await self._evaluate()
            with torch.no_grad():
                for vector, flat in zip(fragment.layout.stepped, moved, strict=True):
                    scatter(vector, flat, tensors)
            await self._complete([chosen], tensors)
            return at_anchor, await self._evaluate()

    async def _evaluate(self) -> float:
        """Return the metric of the model's current weights, as the mean of the replica's ranks."""

        def evaluate() -> float:
            return due_metric(self._evaluation, self.iteration)

        return evaluate() if self._replica is None else await self._replica.mean(evaluate)

    def weigh(self, reports: Mapping[int, Report]) -> Mapping[int, float]:
        """Return the donors' weights, and log why each other rank is left out. Called on the leader."""
        if self._compares_scores and (scores := self._anchor_scores.add(reports.values())) is not None:
            logger.warning(
                "%s: the ranks have equal weights, but their metrics differ, from %g to %g. Evaluate the same held-out "
                "data on all ranks: metrics of each rank's own data favour the ranks with easy data",
                self._journal.title(),
                *sorted(self._sign * each for each in scores),
            )
        choice = choose_donors(reports, self._rules)
        for rank, reason in choice.left_out.items():
            logger.info("%s: rank %d is left out: %s", self._journal.title(), rank, reason)
        return choice.weights

    def _gains_of(self, verdict: Verdict) -> tuple[float, ...]:
        return tuple(gain_of(Report(1.0, 0.0, scores)) for scores in verdict.scores)

    def _takes_whole(self, verdict: Verdict) -> bool:
        """Return whether this rank takes the new weights without ``mixing``, because its difference was left out."""
        return self._world.rank not in (*verdict.donors, *verdict.late)


@torch.no_grad()
def _trial_weights(fragment: Fragment, tensors: Sequence[Tensor], share: float) -> list[Tensor]:
    """Return anchor + share * (own - base) for each vector of parameters.

    The base is the anchor, or for a late rank the older anchor from which it has trained.
    """
    found = []
    for vector, anchor, base in zip(fragment.layout.stepped, fragment.anchors, fragment.bases, strict=True):
        own = vector.new_flat()
        gather(vector, tensors, own)
        start = as_written(vector, base, tensors)
        if start is not anchor:
            own.sub_(start).add_(anchor)
        found.append(torch.lerp(anchor, own, share, out=own))
    return found
