"""Implements an evolution strategy: all ranks train one model without gradients, and send each other only losses.

In each step, each rank evaluates the common weights with a few random perturbations and their mirror images. The scores
are sent in the reports of an exchange that averages only the model's buffers. Each rank then estimates the gradient,
and takes one step of the optimizer. All ranks add in the same order, so their weights stay equal. If a rank is lost,
its pairs in this round do not count.

Perturbations are never sent. Each rank draws all ranks' perturbations from the seed, the round and the ranks' numbers.
With n mirrored pairs eps, the estimated gradient of the score F at the weights theta is

    g = 1 / (2 n sigma) * sum over all pairs of (F(theta + sigma eps) - F(theta - sigma eps)) eps

(Salimans et al., 1703.03864, with mirrored sampling and, as an option, their fitness shaping by ranks.)

After the scores, a report contains a checksum of the optimizer's settings, such as the learning rate. A rank whose
settings differ from the first donor's logs a warning, because its weights will differ.
"""

from __future__ import annotations

import logging
import math
import zlib
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Final, Literal, TypeAlias, Unpack

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from asyncdist import validation
from asyncdist.protocols.declared import among, function, integer, like, number, one_of, option, with_options
from asyncdist.protocols.diloco.anchored import restored
from asyncdist.protocols.exchange.fragment import Fragment
from asyncdist.protocols.exchange.options import ExchangeOptions
from asyncdist.protocols.exchange.policy import ExchangePolicy
from asyncdist.protocols.exchange.replicas.group import Readiness
from asyncdist.protocols.exchange.schedule import Schedule
from asyncdist.protocols.metrics import Metric, MetricSource, due_metric
from asyncdist.protocols.misuse import check_evaluates, line_of_caller
from asyncdist.protocols.options import CommonOptions, MemberOptions
from asyncdist.protocols.ranking import JudgingRules, MetricMode
from asyncdist.protocols.simple.rule import drawn
from asyncdist.protocols.starting.differences import FIRST_WEIGHTS
from asyncdist.protocols.step_info import PolicyEvent, StepInfo
from asyncdist.tensors.byte_views import byte_view
from asyncdist.tensors.codecs import find_codec
from asyncdist.tensors.optimizers.weights import kept_mode
from asyncdist.tensors.optimizers.wrapped import needs_closure

logger = logging.getLogger("protocols.evolution")

#: Entries of parameter groups that do not change what a step computes.
_NO_SETTINGS: Final = frozenset(("params", "initial_lr", "foreach", "fused", "capturable", "differentiable"))
_NUMBERS: Final = (float, tuple, list)
#: Largest factor of a perturbation for which float32 sums of scaled perturbations are finite.
_LARGEST: Final = torch.finfo(torch.float32).max / 16

#: Whether perturbations are weighted by their scores, or by the ranks of their scores.
Fitness: TypeAlias = Literal["score", "rank"]

_FOREIGN_OPTIONS: Final = {
    **dict.fromkeys(
        ("popsize", "population_size", "pop_size"),
        "here pairs is the number of mirrored pairs of each rank; a step evaluates 2 * pairs * ranks weights",
    ),
    **dict.fromkeys(("stdev", "noise_stdev", "noise_std", "std", "std_init"), "here sigma is the standard deviation"),
    **dict.fromkeys(("lr", "learning_rate", "center_learning_rate"), "here the optimizer has the learning rate"),
    **dict.fromkeys(("ranking_method", "fitness_shaping"), "here fitness='rank' uses ranks instead of scores"),
    "average_every": "here each step is a round",
    "optimizer_state": "here the optimizer makes each step, so that its state is never cleared",
}


class EvolutionStrategyOptionNames(MemberOptions, total=False):
    """The options of :class:`protocols.EvolutionStrategyPolicy`."""

    sigma: float
    pairs: int
    fitness: Fitness
    seed: int
    metric: Callable[[], Metric] | None
    metric_mode: MetricMode
    on_event: Callable[[PolicyEvent], None] | None
    drain_timeout_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class EvolutionStrategyOptions(ExchangeOptions):
    """Options of an evolution strategy."""

    sigma: float = option(
        "Standard deviation of the perturbations of each parameter's values, above 0.",
        number("a number above 0", validation.SMALLEST),
        default=0.02,
        is_agreed=True,
    )
    pairs: int = option(
        "Number of mirrored pairs of perturbations that each rank evaluates in a step, from 1.",
        integer(1),
        default=4,
        is_agreed=True,
    )
    fitness: Fitness = option(
        'Values that weight the perturbations. `"score"`: the scores themselves. `"rank"`: the ranks of all scores of '
        "the step, from -0.5 to 0.5, so that outliers and the scale of the scores do not matter.",
        one_of(Fitness),
        default="score",
        is_agreed=True,
    )
    seed: int = option(
        "Seed for drawing the perturbations, an integer >= 0; must be equal on all members.",
        integer(0),
        default=0,
        is_agreed=True,
    )
    metric: Callable[[], Metric] | None = option(
        "Callable without arguments that evaluates the model's current weights; for calls of `step` without `loss` or "
        "`score`.",
        function("a callable without arguments that evaluates the model, or None"),
        default=None,
    )
    metric_mode: MetricMode = like(JudgingRules, "metric_mode")


@with_options(EvolutionStrategyOptionNames, CommonOptions, EvolutionStrategyOptions)
class EvolutionStrategyPolicy(ExchangePolicy):
    """Trains one model on all ranks without gradients: ranks evaluate random perturbations, and send only losses.

    ::

        def evaluate() -> float:  # each rank may have data of its own
            with torch.no_grad():
                return model(data[0]).square().mean().item()

        async with EvolutionStrategyPolicy(model, optimizer, sigma=0.05) as policy:
            for _ in range(100):
                await policy.step(loss=evaluate)

    In each step, ``evaluate`` is called 2 * ``pairs`` times, with perturbed weights in the model. Then ``step`` writes
    the estimated gradient into the parameters' ``grad``, calls ``optimizer.step()``, and restores each ``grad``. The
    policy trains the optimizer's parameters that require a gradient.

    All ranks must begin with equal weights and equal optimizer states. On equal machines, these then stay bit for bit
    equal. Floating buffers, such as BatchNorm's statistics, are averaged in each step. Integer and bool buffers are
    copied from the first rank. Changes that ``evaluate`` makes to buffers are undone.

    Args:
        model: Model that the ranks train; see :class:`SpawnPolicy`.
        optimizer: Optimizer for the model.
        options: The options below.

    Raises:
        TypeError, ValueError: An argument is invalid.
    """

    takes_metric: ClassVar[bool] = True
    calls_metric: ClassVar[bool] = True

    @validation.names_options(refused=_FOREIGN_OPTIONS)
    def __init__(
        self, model: nn.Module, optimizer: torch.optim.Optimizer, **options: Unpack[EvolutionStrategyOptionNames]
    ) -> None:
        own = self._own_options = EvolutionStrategyOptions.of(options)
        super().__init__(model, optimizer, schedule=Schedule(1, 1, 0, 0), shared=own, **among(options, MemberOptions))
        if needs_closure(optimizer):
            raise TypeError(
                "optimizer must be one whose step() needs no closure, such as SGD or Adam, because an evolution "
                f"strategy estimates one gradient per step, got {type(optimizer).__name__}"
            )
        self._metric, self._metric_mode = own.metric, own.metric_mode
        self._evaluation: MetricSource = None  # metric of the current step
        self._has_warned = self._has_warned_of_settings = False
        self._settings: int | None = None  # checksum of the optimizer's settings in this rank's last report

    def step(
        self, local_metric: MetricSource = None, *, loss: MetricSource = None, score: MetricSource = None
    ) -> Coroutine[Any, Any, StepInfo]:
        """Evaluate this rank's perturbations, and take one step of the optimizer. See :meth:`SpawnPolicy.step`.

        Args:
            loss: Callable without arguments that returns the loss of the model's current weights; smaller is better.
            score: Callable like ``loss``, for a metric whose larger values are better.
            local_metric: Callable like ``loss``; ``metric_mode`` defines which values are better.

        Raises:
            TypeError: A metric is not callable.
            ValueError: Neither the call nor the policy has a metric.
        """
        if self._first_call is None:
            self.note_call(line_of_caller())
        check_evaluates(metric=local_metric, loss=loss, score=score)
        return super().step(local_metric, loss=loss, score=score)

    async def _step(self, local_metric: MetricSource) -> StepInfo:
        self._evaluation = self._metric if local_metric is None else local_metric
        try:
            return await super()._step(None)
        finally:
            self._evaluation = None

    def _options(self) -> Mapping[str, Any]:
        return {**self._own_options.agreed(), "metric_mode": self._metric_mode}

    def _first_weights(self) -> dict[str, str]:
        """Return the checksum of the trained parameters, which must be equal on all ranks."""
        if self._was_loaded:
            return {FIRST_WEIGHTS: "saved"}  # on different kinds of machines, saved weights may differ in the last bits
        checksum = 0
        for each in self._trained():
            checksum = zlib.crc32(byte_view(each.detach().cpu().contiguous()), checksum)
        return {FIRST_WEIGHTS: f"{checksum:08x}"}

    def _make_fragments(self) -> Sequence[Fragment]:
        """Return a fragment of the model's buffers. Parameters are not exchanged."""
        buffers = dict(self.model.named_buffers())
        chosen = [index for index, entry in enumerate(self._flat.entries) if buffers.keys() & set(entry.names)]
        return [Fragment(self._layout(chosen, find_codec("float32")))]

    def _makes_rounds_alone(self) -> bool:
        return True

    def _trained(self) -> list[nn.Parameter]:
        """Return the optimizer's parameters that require a gradient, in the model's order."""
        trained = [each for group in self.optimizer.param_groups for each in group["params"] if each.requires_grad]
        places = {id(each): place for place, each in enumerate(self.model.parameters())}
        return sorted(trained, key=lambda each: places.get(id(each), len(places)))

    async def _take_scores(self, fragment: int, tensors: Sequence[Tensor]) -> tuple[float, ...]:
        """Return the scores of this rank's pairs: weights plus perturbation, then weights minus perturbation."""
        if self._evaluation is None:
            raise ValueError(
                f"step() must get a metric at iteration {self.iteration}, got None; pass step(loss=evaluate), or "
                "metric=evaluate to the policy"
            )
        own, trained, scores = self._own_options, self._trained(), list[float]()
        number, rank = self._fragments[fragment].version + 1, self._world.rank
        sign = 1.0 if self._metric_mode == "max" else -1.0
        saved = self.model.state_dict(keep_vars=True)
        loose = [each for name, each in self.model.named_buffers() if name not in saved]  # non-persistent buffers
        with kept_mode(self.optimizer), restored([*tensors, *loose]):
            centre = [each.detach().clone() for each in trained]
            for pair in range(own.pairs):
                direction = perturbation(trained, own, number, rank, pair)
                for length in (own.sigma, -own.sigma):
                    _move(trained, centre, direction, length)
                    scores.append(sign * due_metric(self._evaluation, self.iteration))
        finite = [each for each in scores if math.isfinite(each)]
        self._journal.note_metric(self.iteration, sign * sum(finite) / len(finite) if finite else math.nan)
        self._settings = checksum_of_settings(self.optimizer)
        return (*scores, float(self._settings))

    async def _write(self, fragment: int, ready: Readiness, *, is_late: bool, is_left_out: bool) -> None:
        """Write the mean of the buffers, and take a step along the estimated gradient."""
        own, mean = self._fragments[fragment], self._fragments[fragment].mean
        assert mean is not None, "there is no mean to apply"
        verdict, number = mean.verdict, own.version
        await super()._write(fragment, ready, is_late=is_late, is_left_out=is_left_out)
        if verdict.scores:
            self._compare_settings(verdict.donors[0], int(verdict.scores[0][-1]))
        scores = {rank: reported[:-1] for rank, reported in zip(verdict.donors, verdict.scores, strict=False)}
        factors = coefficients(scores, self._own_options)
        if not any(map(any, factors.values())):  # no finite scores, or no differences between them
            return
        trained = self._trained()
        estimated = estimated_gradient(trained, factors, number, self._own_options)
        gradients = [each.neg_().to(like) for each, like in zip(estimated, trained, strict=True)]
        if not all(bool(each.isfinite().all()) for each in gradients):
            logger.warning(
                "the estimated gradient of iteration %d is too large for the parameters' dtype, so that the weights "
                "stay unchanged; scale the scores down, or pass fitness='rank'",
                self.iteration,
            )
            return
        before = [each.grad for each in trained]
        try:
            for each, gradient in zip(trained, gradients, strict=True):
                each.grad = gradient
            self.optimizer.step()
        finally:
            for each, own_gradient in zip(trained, before, strict=True):
                each.grad = own_gradient

    def _compare_settings(self, donor: int, settings: int) -> None:
        """Log a warning, only once, if the optimizer's settings differ from a donor's."""
        if self._settings in (None, settings) or self._has_warned_of_settings:
            return
        self._has_warned_of_settings = True
        rates = ", ".join(f"{float(group['lr']):g}" for group in self.optimizer.param_groups if "lr" in group)
        logger.warning(
            "at iteration %d the settings of this rank's optimizer%s differ from those of rank %d, so that the weights "
            "of the two ranks differ from now on. Does a learning-rate scheduler begin again on a restarted rank? "
            "docs/evolution_strategy.md has the lines that it needs",
            self.iteration,
            rates and f" (learning rate {rates})",
            donor,
        )

    def _describe_nonfinite(self) -> str:
        """Log a warning if this rank's state is not finite, because scores cannot restore it."""
        nonfinite = super()._describe_nonfinite()
        if nonfinite and not self._has_warned:
            self._has_warned = True
            logger.warning(
                "%s. Its scores do not count, and scores cannot restore it; restart the rank, or load a checkpoint",
                nonfinite,
            )
        return ""


def checksum_of_settings(optimizer: torch.optim.Optimizer) -> int:
    """Return a checksum of the numbers in the optimizer's parameter groups, for example of the learning rate.

    The order of the groups does not matter.
    """
    found = []
    for group in optimizer.param_groups:
        values = {name: each.tolist() if isinstance(each, Tensor) else each for name, each in group.items()}
        numbers = {name: each for name, each in values.items() if name not in _NO_SETTINGS}
        numbers |= {name: float(each) for name, each in numbers.items() if isinstance(each, int | float)}
        found.append(repr([(name, each) for name, each in sorted(numbers.items()) if isinstance(each, _NUMBERS)]))
    return zlib.crc32("".join(sorted(found)).encode())


@torch.no_grad()
def _move(trained: Sequence[Tensor], centre: Sequence[Tensor], direction: Sequence[Tensor], length: float) -> None:
    """Write centre + length * direction into the parameters."""
    for tensor, at, values in zip(trained, centre, direction, strict=True):
        moved = at.to(values.dtype) + length * values.to(at.device)
        tensor.copy_(moved)


@torch.no_grad()
def perturbation(
    tensors: Sequence[Tensor], options: EvolutionStrategyOptions, round: int, rank: int, pair: int
) -> list[Tensor]:
    """Return standard normal values with each tensor's shape, on the CPU, in float32 or wider.

    For a complex tensor, the real and the imaginary parts are standard normal.
    """
    number = rank * options.pairs + pair
    generator = torch.Generator().manual_seed(int(drawn(options.seed, round, 1, first=number)))
    found = []
    for each in tensors:
        shape = (*each.shape, 2) if each.is_complex() else each.shape
        values = torch.randn(shape, generator=generator, dtype=_wide(each).to_real(), device="cpu")
        found.append(torch.view_as_complex(values) if each.is_complex() else values)
    return found


def coefficients(scores: Mapping[int, Sequence[float]], options: EvolutionStrategyOptions) -> dict[int, list[float]]:
    """Return the factor of each perturbation in the estimated gradient, by rank and pair.

    If a score of a pair is not finite, or its factor is too large for float32, the factor is 0 and the pair is not
    counted.

    Args:
        scores: Scores by rank; larger is better. Each pair has two: with the perturbation added to the weights, then
            subtracted.
    """
    if not scores:
        return {}
    table = np.array([scores[rank] for rank in sorted(scores)], dtype=np.float64).reshape(len(scores), -1, 2)
    counts = np.isfinite(table).all(axis=2)
    if options.fitness == "rank":
        table[counts] = _centred_ranks(table[counts])
    with np.errstate(over="ignore", invalid="ignore"):
        differences = table[:, :, 0] - table[:, :, 1]
        counts &= np.abs(differences / (2 * options.sigma)) <= _LARGEST
    factors = np.zeros(table.shape[:2])
    factors[counts] = differences[counts] / (2 * max(1, np.count_nonzero(counts)) * options.sigma)
    return {rank: row.tolist() for rank, row in zip(sorted(scores), factors, strict=True)}


def _centred_ranks(values: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return the rank of each value in sorted order, scaled to -0.5 to 0.5. Equal values have equal ranks."""
    _, places, counts = np.unique(values, return_inverse=True, return_counts=True)
    positions = np.cumsum(counts) - (counts + 1) / 2  # counted from 0; equal values share their mean position
    ranks: NDArray[np.float64] = positions[places].reshape(values.shape) / max(1, values.size - 1) - 0.5
    return ranks


@torch.no_grad()
def estimated_gradient(
    tensors: Sequence[Tensor], factors: Mapping[int, Sequence[float]], round: int, options: EvolutionStrategyOptions
) -> list[Tensor]:
    """Return the estimated gradient of the score for each tensor, on the CPU, in float32 or wider.

    Terms are added in the order of ``factors``, so that all ranks get the same bits.
    """
    found = [torch.zeros(each.shape, dtype=_wide(each), device="cpu") for each in tensors]
    for rank, row in factors.items():
        for pair, factor in enumerate(row):
            if factor:
                for total, values in zip(found, perturbation(tensors, options, round, rank, pair), strict=True):
                    total.add_(values, alpha=factor)
    return found


def _wide(tensor: Tensor) -> torch.dtype:
    if tensor.is_complex():
        return torch.promote_types(tensor.dtype, torch.complex64)
    return torch.float64 if tensor.dtype == torch.float64 else torch.float32
