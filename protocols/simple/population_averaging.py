"""Implements PAPA, PAPA-2 and EASGD, which regularly pull each rank's weights a little towards a common mean or center.

Every ``average_every`` steps, each rank i takes a step towards the mean of all k ranks:

    theta_i = (1 - pull) theta_i + pull * mean(theta_1, ..., theta_k)

The mean does not change, and the differences between the ranks shrink by the factor 1 - ``pull``. The ranks stay
different models, which can be averaged at the end (PAPA: Jolicoeur-Martineau et al., 2304.03094, with ``pull=0.01``
every 10 steps). ``pull=1`` is local SGD, or PAPA-all. With ``mean_of="pairs"``, each rank moves towards the mean of
itself and a random partner. With ``pull=1`` this is PAPA-2.

With ``center=True`` all ranks move towards a center x, and x moves towards all ranks (EASGD: Zhang, Choromanska and
LeCun, 1412.6651). The values on the right are from before the round:

    theta_i = theta_i - pull (theta_i - x)        x = x + pull * sum(theta_1 - x, ..., theta_k - x)
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal, TypeAlias, Unpack

import torch
from torch import Tensor, nn

from asyncdist import LocalProtocolError, validation
from asyncdist.protocols.declared import boolean, integer, like, number, one_of, option, with_options
from asyncdist.protocols.diloco.anchored import AnchoredPolicy
from asyncdist.protocols.exchange.fragment import Fragment
from asyncdist.protocols.exchange.layout.copies import gather, scatter
from asyncdist.protocols.exchange.layout.wire_layout import WireLayout
from asyncdist.protocols.exchange.messages import Verdict
from asyncdist.protocols.exchange.options import ExchangeOptionNames
from asyncdist.protocols.exchange.replicas.group import Readiness
from asyncdist.protocols.options import CommonOptions
from asyncdist.protocols.simple.policy import RuleFragment, SimplePolicy
from asyncdist.protocols.simple.rule import Rule, random_pair

logger = logging.getLogger("protocols.simple")

#: Largest relative difference from the mean at which a pull may be rounded away without a warning.
_ROUNDED_MAX: Final = 0.05
#: The ranks to whose mean a rank is pulled.
MeanOf: TypeAlias = Literal["all", "pairs"]

#: Hints at this policy's corresponding option, by the name of another library's option.
FOREIGN_OPTIONS: Final = {
    **dict.fromkeys(
        ("mixing", "momentum"), "here pull is the share of the mean, and 1 - pull the share of the rank's own weights"
    ),
    "alpha": "here pull is the share of the mean: 1 - alpha of the PAPA paper, and alpha of EASGD with center=True",
    **dict.fromkeys(("rho", "beta", "moving_rate"), "here pull and center=True: EASGD's alpha, beta = pull * ranks"),
    **dict.fromkeys(("tau", "communication_period"), "here average_every is the number of steps between rounds"),
    "partners": "here mean_of='pairs' pulls each rank to the mean of a random pair",
    "elastic": "here center=True pulls the ranks to a center, as EASGD does",
}


class PopulationAveragingOptions(ExchangeOptionNames, total=False):
    """The options of :class:`protocols.PopulationAveragingPolicy`."""

    average_every: int
    pull: float
    mean_of: MeanOf
    center: bool
    scale_with_lr: bool
    seed: int


@dataclass(frozen=True, slots=True, kw_only=True)
class PullToMean(Rule):
    """Moves each rank's weights a part of the way to the mean."""

    average_every: int = like(Rule, "average_every", 10)
    pull: float = option(
        "Fraction of the distance to the mean that each rank moves, above 0 and at most 1: new weights = (1 - pull) * "
        "own + pull * mean. With `center`, at most 1 / number of ranks.",
        number("a number above 0 and at most 1", validation.SMALLEST, 1.0),
        default=0.01,
        is_agreed=True,
    )
    mean_of: MeanOf = option(
        'Ranks to whose mean a rank is pulled: `"all"`, or `"pairs"` for itself and one other rank, drawn in each '
        "round (PAPA-2).",
        one_of(MeanOf),
        default="all",
        is_agreed=True,
    )
    center: bool = option(
        "Whether the ranks are pulled to a shared center instead of to their mean (EASGD). The center is pulled to all "
        "ranks.",
        boolean,
        default=False,
        is_agreed=True,
    )
    scale_with_lr: bool = option(
        "Whether `pull` is multiplied by the ratio of the current to the initial learning rate of the optimizer's "
        "first group, as in PAPA. The ratio is at most 1.",
        boolean,
        default=False,
        is_agreed=True,
    )
    seed: int = option(
        "Seed for drawing the pairs, an integer >= 0; must be equal on all members.",
        integer(0),
        default=0,
        is_agreed=True,
    )

    def __post_init__(self) -> None:
        Rule.__post_init__(self)
        if self.center and self.mean_of != "all":
            validation.refuse("mean_of", self.mean_of, "'all' with center=True, which is pulled to all ranks")
        if self.center and self.scale_with_lr:
            validation.refuse(
                "scale_with_lr", True, "False with center=True, because all ranks must move the center in the same way"
            )

    def partners(self, round: int, rank: int, members: Sequence[int]) -> Sequence[int] | None:
        """Return the random pair that contains a rank, or None for the mean of all ranks."""
        return None if self.mean_of == "all" else random_pair(self.seed, round, rank, members)

    def apply(self, own: Tensor, mean: Tensor, round: int) -> Tensor:
        """Return ``own`` moved towards ``mean``. With ``pull=1``, return ``mean`` itself."""
        del round
        return _pulled(own, mean, self.pull)


def _pulled(own: Tensor, mean: Tensor, pull: float) -> Tensor:
    return mean if pull == 1.0 else (mean - own).mul_(pull).add_(own)


def warn_of_rounding(title: str, parameters: Iterable[Tensor], pull: float) -> None:
    """Log a warning if the parameters' dtype, such as bfloat16, rounds away pulls of weights over 5 % from the mean."""
    for each in parameters:
        least = torch.finfo(each.dtype).eps / 2 / pull if each.is_floating_point() and each.requires_grad else 0.0
        if least > _ROUNDED_MAX:
            logger.warning(
                "%s: pull=%s does not change weights of %s that differ from the mean by less than %.0f %%, because the "
                "change is rounded away; train float32 weights, with torch.autocast, or use a larger pull less often",
                title,
                pull,
                str(each.dtype).removeprefix("torch."),
                100 * least,
            )
            return


@with_options(PopulationAveragingOptions, CommonOptions, PullToMean)
class PopulationAveragingPolicy(SimplePolicy, AnchoredPolicy):
    """Trains with PAPA: every ``average_every`` steps, each rank's weights move a little towards the mean of all ranks.

    ::

        async with PopulationAveragingPolicy(model, optimizer) as policy:
            for batch in data:
                train_step(model, optimizer, batch)
                await policy.step()

    Floating buffers, such as BatchNorm's statistics, move in the same way. Integer and bool buffers are copied from the
    first contributing rank. Each rank keeps its optimizer's state. A rank whose weights are not finite does not
    contribute, and its weights are replaced by the mean of the other ranks.

    With ``center=True`` (EASGD), the parameters are pulled to a center, which is equal on all ranks and is the result
    of training (see :meth:`anchor_weights`). All ranks must begin with equal parameters. Parameters that are not finite
    are replaced by the center.

    Args:
        model: Model that this rank trains; see :class:`SpawnPolicy`.
        optimizer: Optimizer for the model.
        options: The options below.

    Raises:
        TypeError, ValueError: An argument is invalid.
    """

    @validation.names_options(refused=FOREIGN_OPTIONS)
    def __init__(
        self, model: nn.Module, optimizer: torch.optim.Optimizer, **options: Unpack[PopulationAveragingOptions]
    ) -> None:
        self._pull = PullToMean.of(options)
        super().__init__(model, optimizer, self._pull, options)
        self._first_lr: float | None = None  # None until the start

    def _prepare(self) -> None:
        if self._pull.scale_with_lr and self._first_lr is None:
            group = self.optimizer.param_groups[0]
            self._first_lr = float(group.get("initial_lr", group["lr"]))
            if not self._first_lr > 0.0:
                validation.refuse("the optimizer's lr", self._first_lr, "above 0 at the start, with scale_with_lr=True")
        super()._prepare()
        if self._group.index == 0 and len(self._group.ranks) > 1:
            warn_of_rounding(self._journal.title(), self.model.parameters(), self._pull.pull)

    def _new_fragment(self, layout: WireLayout) -> Fragment:
        if not self._pull.center:
            return _PulledFragment(layout, self._pull)
        count, pull = len(self._members), self._pull.pull
        if pull * count > 1.0:
            validation.refuse("pull", pull, f"at most 1 / {count} with center=True on {count} ranks")
        return _CenterFragment(layout, self._pull, self._tensors())

    async def _write(self, fragment: int, ready: Readiness, *, is_late: bool, is_left_out: bool) -> None:
        own = self._fragments[fragment]
        if isinstance(own, _PulledFragment) and self._pull.scale_with_lr and self._first_lr is not None:
            own.scale = min(1.0, float(self.optimizer.param_groups[0]["lr"]) / self._first_lr)
        await super()._write(fragment, ready, is_late=is_late, is_left_out=is_left_out)

    def _makes_rounds_alone(self) -> bool:
        return self._pull.center

    def _own_state(self) -> dict[str, Any]:
        return {**super()._own_state(), "first_lr": self._first_lr}

    def _load_own_state(self, state: Mapping[str, Any]) -> None:
        super()._load_own_state(state)
        self._first_lr = state.get("first_lr")

    def _check_common(self) -> None:
        if not self._pull.center:
            raise LocalProtocolError(
                "anchor_weights() needs a center, which PopulationAveragingPolicy has only with center=True; "
                "asyncdist.average_models(model) replaces the ranks' weights by their mean"
            )

    async def _write_anchor(self, tensors: Sequence[Tensor]) -> None:
        for fragment in self._fragments:
            fragment.restore(tensors)


class _PulledFragment(RuleFragment):
    """Pulls the model to the mean by ``scale`` times the option ``pull``."""

    _rule: PullToMean
    scale = 1.0

    def moved(self, own: Tensor, mean: Tensor, number: int) -> Tensor:
        del number
        return _pulled(own, mean, self._rule.pull * self.scale)


class _CenterFragment(RuleFragment):
    """Pulls the model's parameters to a center instead of to the mean, and the center to all ranks.

    Each rank computes the center from the round's mean, so that the center is equal on all ranks and is never sent.

    Args:
        tensors: The model's tensors, from which the first center is copied.
    """

    _rule: PullToMean

    def __init__(self, layout: WireLayout, rule: PullToMean, tensors: Sequence[Tensor]) -> None:
        super().__init__(layout, rule)
        self._centers = {place: each.new_flat() for place, each in enumerate(layout.vectors) if each.role == "stepped"}
        for place, center in self._centers.items():
            gather(layout.vectors[place], tensors, center)

    @property
    def anchors(self) -> tuple[Tensor, ...]:
        """Center to which all ranks are pulled, as one flat tensor per dtype."""
        return tuple(self._centers.values())

    @torch.no_grad()
    def merge(self, verdict: Verdict, encoded: Sequence[Sequence[Tensor]]) -> None:
        """Move the center towards the mean of the contributing ranks. This rank will be pulled to the old center."""
        super().merge(verdict, encoded)
        rate = self._rule.pull * len(verdict.donors)
        for place in self._centers.keys() & self._values.keys():
            center, mean = self._centers[place], self._values[place]
            self._values[place] = center
            self._centers[place] = (mean - center).mul_(rate).add_(center)

    @torch.no_grad()
    def restore(self, tensors: Sequence[Tensor]) -> None:
        """Write the center into the model's parameters."""
        for place, center in self._centers.items():
            scatter(self.layout.vectors[place], center, tensors)

    def state_dict(self) -> dict[str, Any]:
        """Return a copy of the fragment's state, including the center."""
        names = self.layout.checksum_of_names()
        return {**super().state_dict(), "names": names, "center": [each.clone() for each in self.anchors]}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load a result of :meth:`state_dict`, including the center."""
        self.layout.check_names(state)
        super().load_state_dict(state)
        self._load_center(state)

    def shared_state(self) -> dict[str, Any]:
        """Return a copy of the state that is equal on all ranks, including the center."""
        return {**super().shared_state(), "center": [each.clone() for each in self.anchors]}

    def load_shared_state(self, state: Mapping[str, Any]) -> None:
        """Load the :meth:`shared_state` of another rank."""
        super().load_shared_state(state)
        self._load_center(state)

    @torch.no_grad()
    def _load_center(self, state: Mapping[str, Any]) -> None:
        if [each.shape for each in state["center"]] != [each.shape for each in self.anchors]:
            raise ValueError("the state's center must have the sizes of this model's parameters")
        for center, saved in zip(self.anchors, state["center"], strict=True):
            center.copy_(saved)
