"""Implements PAPA, which regularly moves each rank's weights a little towards the mean of all ranks.

Every ``average_every`` steps, each rank i takes a step towards the mean of all k ranks:

    theta_i = (1 - pull) theta_i + pull * mean(theta_1, ..., theta_k)

The mean itself does not change, and the differences between the ranks shrink by the factor 1 - ``pull``, so that the
ranks stay different models that can still be averaged at the end (PAPA: Jolicoeur-Martineau et al., 2304.03094, with
``pull=0.01`` every 10 steps). ``pull=1`` is local SGD, or PAPA-all.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Unpack

import torch
from torch import Tensor, nn

from asyncdist import validation
from asyncdist.protocols.declared import number, option, whole, with_options
from asyncdist.protocols.exchange.options import ExchangeOptionNames
from asyncdist.protocols.options import CommonOptions
from asyncdist.protocols.simple.policy import SimplePolicy
from asyncdist.protocols.simple.rule import Rule

_ELSEWHERE: Final = {
    **dict.fromkeys(
        ("mixing", "momentum"), "here pull is the share of the mean, and 1 - pull the share of the rank's own weights"
    ),
    "alpha": "here pull is the share of the mean: 1 - alpha of the PAPA paper",
}


class PopulationAveragingOptions(ExchangeOptionNames, total=False):
    """The options of :class:`protocols.PopulationAveragingPolicy`."""

    average_every: int
    pull: float


@dataclass(frozen=True, slots=True, kw_only=True)
class PullToMean(Rule):
    """Moves each rank a share of the way to the mean."""

    average_every: int = option(
        "Number of steps between averages: step i, counted from 0, averages if (i + 1) % average_every == 0.",
        whole(1),
        default=10,
        is_agreed=True,
    )
    pull: float = option(
        "Share of the way to the mean that each rank moves, above 0 and at most 1: new weights = (1 - pull) * own + "
        "pull * mean.",
        number("a number above 0 and at most 1", validation.SMALLEST, 1.0),
        default=0.01,
        is_agreed=True,
    )

    def apply(self, own: Tensor, mean: Tensor, round: int) -> Tensor:
        """Return ``own`` moved towards ``mean``; with ``pull=1``, ``mean`` itself."""
        del round
        return mean if self.pull == 1.0 else (mean - own).mul_(self.pull).add_(own)


@with_options(PopulationAveragingOptions, CommonOptions, PullToMean)
class PopulationAveragingPolicy(SimplePolicy):
    """Trains with PAPA: every ``average_every`` steps, each rank's weights move a little towards the mean of all ranks.

    ::

        async with PopulationAveragingPolicy(model, optimizer) as policy:
            for batch in data:
                train_step(model, optimizer, batch)
                await policy.step()

    Floating buffers, such as BatchNorm's statistics, move in the same way. Integer and bool buffers are copied from the
    first contributing rank. Each rank keeps its optimizer's state. A rank whose weights are not finite does not
    contribute, and its weights are replaced by the mean of the other ranks.

    Args:
        model: Model that this rank trains; see :class:`SpawnPolicy`.
        optimizer: Optimizer for the model.
        options: The options below.

    Raises:
        TypeError, ValueError: An argument has the wrong type or is out of range.
    """

    @validation.names_options(refused=_ELSEWHERE)
    def __init__(
        self, model: nn.Module, optimizer: torch.optim.Optimizer, **options: Unpack[PopulationAveragingOptions]
    ) -> None:
        super().__init__(model, optimizer, PullToMean.of(options), options)
