"""Implements an evolution strategy: all ranks train one model without gradients, and send each other only losses.

In each step, each rank evaluates the common weights with a few random perturbations and their mirror images. The scores
are sent in the reports of an exchange, whose data are only the model's buffers. Each rank then estimates the gradient
(:mod:`protocols.evolution.perturbations`), and makes one step of the optimizer. All ranks add in the same order, so
their weights stay equal. If a rank is lost, its pairs of the round do not count.

After the scores, a report contains a checksum of the optimizer's settings, such as the learning rate. A rank whose
settings differ from the first donor's logs a warning, because its weights will differ.
"""

from __future__ import annotations

import logging
import math
import zlib
from collections.abc import Coroutine, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, ClassVar, Final, Unpack

import torch
from torch import Tensor, nn

from asyncdist import validation
from asyncdist.protocols.declared import among, with_options
from asyncdist.protocols.diloco.anchored import restored
from asyncdist.protocols.evolution.options import (
    FOREIGN_OPTIONS,
    EvolutionStrategyOptionNames,
    EvolutionStrategyOptions,
)
from asyncdist.protocols.evolution.perturbations import coefficients, estimated_gradient, perturbation
from asyncdist.protocols.exchange.fragment import Fragment
from asyncdist.protocols.exchange.policy import ExchangePolicy
from asyncdist.protocols.exchange.replicas.group import Readiness
from asyncdist.protocols.exchange.schedule import Schedule
from asyncdist.protocols.metrics import MetricSource, due_metric
from asyncdist.protocols.misuse import check_evaluates, line_of_caller
from asyncdist.protocols.options import CommonOptions, MemberOptions
from asyncdist.protocols.starting.differences import FIRST_WEIGHTS
from asyncdist.protocols.step_info import StepInfo
from asyncdist.tensors.byte_views import byte_view
from asyncdist.tensors.codecs import find_codec
from asyncdist.tensors.optimizers.weights import kept_mode
from asyncdist.tensors.optimizers.wrapped import needs_closure

logger = logging.getLogger("protocols.evolution")

#: Entries of parameter groups that do not change what a step computes.
_NO_SETTINGS: Final = frozenset(("params", "initial_lr", "foreach", "fused", "capturable", "differentiable"))
_NUMBERS: Final = (float, tuple, list)


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

    All ranks must begin with equal weights and equal states of the optimizer. They then stay equal to the bit on equal
    machines. Floating buffers, such as BatchNorm's statistics, are averaged in each step. Integer and bool buffers are
    copied from the first rank. Changes of buffers by ``evaluate`` are undone.

    Args:
        model: Model that the ranks train; see :class:`SpawnPolicy`.
        optimizer: Optimizer for the model.
        options: The options below.

    Raises:
        TypeError, ValueError: An argument is invalid.
    """

    takes_metric: ClassVar[bool] = True
    calls_metric: ClassVar[bool] = True

    @validation.names_options(refused=FOREIGN_OPTIONS)
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
        self._settings: int | None = None  # checksum of the optimizer's settings when this rank reported last

    def step(
        self, local_metric: MetricSource = None, *, loss: MetricSource = None, score: MetricSource = None
    ) -> Coroutine[Any, Any, StepInfo]:
        """Evaluate this rank's perturbations, and make one step of the optimizer. See :meth:`SpawnPolicy.step`.

        Args:
            loss: Callable without arguments that returns the loss of the model's current weights; smaller is better.
            score: Callable like ``loss``, for a metric whose larger values are better.
            local_metric: Callable like ``loss``; ``metric_mode`` defines which values are better.

        Raises:
            TypeError: A metric is not callable.
            ValueError: The call and the policy have no metric.
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
            return {FIRST_WEIGHTS: "saved"}  # on unequal machines, saved weights may differ in the last bits
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
        """Write the mean of the buffers, and make a step along the estimated gradient."""
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
        with _gradients(trained, gradients):
            self.optimizer.step()

    def _compare_settings(self, donor: int, settings: int) -> None:
        """If the optimizer's settings differ from those of a donor, log a warning. Log it only once."""
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


@contextmanager
def _gradients(trained: Sequence[nn.Parameter], gradients: Sequence[Tensor]) -> Iterator[None]:
    before = [each.grad for each in trained]
    try:
        for each, gradient in zip(trained, gradients, strict=True):
            each.grad = gradient
        yield
    finally:
        for each, own in zip(trained, before, strict=True):
            each.grad = own
