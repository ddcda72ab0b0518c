"""Population based training with rounds of selective averaging.

A round differs from selective averaging (:mod:`protocols.selective.policy`) in three ways:

1. The donors are the ranks of the best quantile, and each replacer copies only one of them. The choice depends on the
   seed, the round and the rank, so no message is needed.
2. A donor's snapshot also contains its optimizer's state and hyperparameters, as for a restarted rank
   (:mod:`protocols.joining.state_transfer`).
3. In its next step, the replacer loads the weights and the optimizer's state, and only then writes the new
   hyperparameters into the optimizer. Otherwise the donor's state would undo the new learning rate.
"""

from __future__ import annotations

import json
import logging
import zlib
from collections.abc import Callable, Coroutine, Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import Any, Final, NamedTuple, Self, TypeVar, Unpack

import torch
from torch import nn

from asyncdist import validation
from asyncdist.protocols.declared import among, shortened, with_options
from asyncdist.protocols.joining.state_transfer import cloned
from asyncdist.protocols.metrics import Metric, MetricSource
from asyncdist.protocols.options import AveragingOptions, CommonOptions, CoordinatorOptions, SelectiveOptions
from asyncdist.protocols.policy import SpawnPolicy
from asyncdist.protocols.population_training import exploring
from asyncdist.protocols.population_training.bayesian import BayesianExplore, Observations
from asyncdist.protocols.population_training.exploring import LineageEntry
from asyncdist.protocols.population_training.hyperparameters import Value
from asyncdist.protocols.population_training.options import FOREIGN_OPTIONS, ExploringOptions, PopulationTrainingOptions
from asyncdist.protocols.population_training.settings import OptimizerSettings, load_moments, schedules
from asyncdist.protocols.ranking import replacer_count
from asyncdist.protocols.selective.messages import REPLACER, Assign, Frozen
from asyncdist.protocols.selective.policy import AsyncSelectiveAveragingPolicy
from asyncdist.protocols.selective.selection import SelectiveRules
from asyncdist.protocols.step_info import StepInfo
from asyncdist.tensors.optimizers.loading import parameter_names, state_for

logger = logging.getLogger("protocols.population_training")

_RoleMessage = TypeVar("_RoleMessage", Assign, Frozen)
#: Smallest size of a sub-population, which needs best ranks, worst ranks, and ranks that migrants may replace.
_SIZE_MIN: Final = 4


class _Inheritance(NamedTuple):
    """Holds a donor's state, and the hyperparameters that this rank derives from the donor's (``inherited``)."""

    moments: Mapping[str, Any]
    inherited: dict[str, Value]
    values: dict[str, Value]
    lineage: tuple[LineageEntry, ...]
    observations: Observations
    metric: float | None


@with_options(
    PopulationTrainingOptions, ExploringOptions, CommonOptions, SelectiveRules, AveragingOptions, CoordinatorOptions
)
class PopulationTrainingPolicy(AsyncSelectiveAveragingPolicy):
    """Trains a population of models (PBT): the worst ranks copy the best ranks, and change the hyperparameters.

    ::

        def evaluate() -> float:  # the same data on all ranks
            with torch.no_grad():
                return loss_function(model(held_out_inputs), held_out_targets).item()

        async with PopulationTrainingPolicy(
            model, optimizer, average_every=100, hyperparameters={"lr": (1e-4, 1e-1)}
        ) as policy:
            for batch in data:
                train_step(model, optimizer, batch)
                info = await policy.step(loss=evaluate)

    Each rank trains its own model with its own hyperparameters, and reports a metric every ``average_every`` steps.
    When enough ranks have reported, each rank in the worst ``quantile`` copies the weights, the optimizer's state and
    the hyperparameters of a rank in the best ``quantile``. It then changes the hyperparameters, and continues at its
    own iteration. No rank waits for another.

    Args:
        model: Model to train; see :class:`SpawnPolicy`.
        optimizer: Optimizer of the model, of the same class and with the same parameters in its groups on all ranks.
        average_every, metric, options: The options below.

    Raises:
        TypeError, ValueError: An argument is invalid, or the optimizer lacks a hyperparameter.
    """

    @validation.names_options(refused=FOREIGN_OPTIONS)
    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        *,
        average_every: int,
        metric: Callable[[], Metric] | None = None,
        **options: Unpack[PopulationTrainingOptions],
    ) -> None:
        self._own_options = own = ExploringOptions.of(options)
        super().__init__(
            model,
            optimizer,
            average_every=average_every,
            metric=metric,
            replacement_ratio=own.quantile,
            averaging_strategy="best_only",
            optimizer_state="reset",  # cleared before the donor's state is loaded
            route="direct",
            **among(options, SelectiveOptions),
        )
        self._rules = replace(self._rules, copies_one=True)
        self._resources = replace(self._resources, adopter=self)
        self._settings = OptimizerSettings(optimizer, own.hyperparameters, own.lr_scheduler)
        own.check_factors()  # last, so that a wrong name is reported first
        self._spaces = own.spaces
        self._values: dict[str, Value] = dict(own.initial)
        self._lineage: tuple[LineageEntry, ...] = ()
        self._window = own.explore.window if isinstance(own.explore, BayesianExplore) else 0
        self._observations = Observations(self._window)
        self._sign = 1.0 if self._metric_mode == "max" else -1.0
        self._has_warned_of_loss = False
        self._parent = (0, -1)  # round, and the donor that this rank copies in the round

    @property
    def hyperparameters(self) -> Mapping[str, Any]:
        """Current hyperparameters of this rank, by name. They change only inside ``step``.

        Before ``async with``, the mapping contains only the option ``initial`` or a loaded state.
        """
        return MappingProxyType(self._values)

    def lineage(self) -> tuple[LineageEntry, ...]:
        """Return the hyperparameters with which this rank's current weights were trained, oldest first.

        A replaced rank takes over the donor's history. At most 1000 entries are kept: the first and the newest ones.
        """
        return self._lineage

    def step(
        self, local_metric: MetricSource = None, *, loss: MetricSource = None, score: MetricSource = None
    ) -> Coroutine[Any, Any, StepInfo]:
        """Take part in the policy once per training step. See :meth:`SpawnPolicy.step`."""
        for given in (local_metric, loss, score):
            if isinstance(given, torch.Tensor) and given.requires_grad:
                self._warn_of_loss()
        return super().step(local_metric, loss=loss, score=score)

    def _warn_of_loss(self) -> None:
        if not self._has_warned_of_loss:
            self._has_warned_of_loss = True
            logger.warning(
                "%s: the metric is a training loss (a tensor that requires a gradient). Ranks are compared by it, but "
                "it is measured on each rank's own batch, and may depend on the rank's own hyperparameters. Pass a "
                "function that evaluates the model on the same held-out data on all ranks: step(loss=evaluate)",
                self._journal.title(),
            )

    # -- starting and continuing ------------------------------------------------------------------------------------

    def _options(self) -> Mapping[str, Any]:
        groups = []
        for names in parameter_names(self.model, self.optimizer):  # a copied optimizer state is matched by names
            checksum = zlib.crc32("\n".join(sorted(names)).encode())
            groups.append(f"{len(names)} parameters with the names {checksum:08x}")
        spaces = {name: shortened(space.agreed()) for name, space in self._spaces.items()}
        mine = {"optimizer": [type(self.optimizer).__name__, *sorted(groups)], "hyperparameters": spaces}
        return {**super()._options(), **self._own_options.agreed(), **mine}

    def _prepare(self) -> None:
        super()._prepare()
        self._divide()
        if not self.has_loaded:
            self._values.update(exploring.first_values(self._own_options, self._world.rank))
            self._lineage = (LineageEntry(self.iteration, self._world.rank, 0, -1, dict(self._values)),)
        self._settings.write(self._values)

    def _divide(self) -> None:
        periods, ranks = self._own_options.periods, self._group.ranks
        if not periods or self.is_alone:
            return
        size = len(ranks) // len(periods)
        if size * len(periods) != len(ranks) or size < _SIZE_MIN:
            validation.refuse(
                "periods",
                periods,
                f"numbers of rounds for sub-populations of equal size, of at least {_SIZE_MIN} of "
                f"the {len(ranks)} ranks",
            )
        count = replacer_count(size, self._own_options.quantile)
        if 3 * count > size:
            validation.refuse(
                "quantile",
                self._own_options.quantile,
                f"a share of which three times the rounded number of ranks fits into a sub-population of {size} ranks, "
                "or 0",
            )
        divided = tuple(tuple(ranks[first : first + size]) for first in range(0, len(ranks), size))
        self._rules = replace(
            self._rules, periods=periods, sub_populations=divided, round_iterations=self.average_every
        )

    def _place_of(self, rank: int) -> int:
        """Return the index of a rank's sub-population, or 0 without sub-populations."""
        found = (place for place, ranks in enumerate(self._rules.sub_populations) if rank in ranks)
        return next(found, 0)

    async def __aenter__(self) -> Self:
        """Start the policy together with the other ranks, or join the running policy if this rank was restarted."""
        await super().__aenter__()
        self._journal.note_hyperparameters(0, self.iteration, -1, {}, self._values)
        return self

    def _change_optimizer(self, optimizer: torch.optim.Optimizer) -> None:
        own = self._own_options
        scheduler = own.lr_scheduler if schedules(own.lr_scheduler, optimizer) else None
        settings = OptimizerSettings(optimizer, own.hyperparameters, scheduler)
        super()._change_optimizer(optimizer)
        self._settings = settings
        self._settings.write(self._values)

    def take_optimizer_of(self, other: SpawnPolicy) -> None:
        """Train the model with the optimizer and the scheduler of ``other``."""
        if other.optimizer is not self.optimizer:
            super()._change_optimizer(other.optimizer)
        assert isinstance(other, PopulationTrainingPolicy), other
        self._take_settings_of(other)

    def take_model_of(self, other: SpawnPolicy) -> bool:
        """Use the model, the optimizer and the scheduler of ``other``. See :meth:`SpawnPolicy.take_model_of`."""
        if not isinstance(other, PopulationTrainingPolicy) or not super().take_model_of(other):
            return False
        self._take_settings_of(other)
        self._observations = Observations(self._window, self._observations.entries)  # another model had the last metric
        return True

    def _take_settings_of(self, other: PopulationTrainingPolicy) -> None:
        self._own_options = replace(self._own_options, lr_scheduler=other._own_options.lr_scheduler)
        self._settings = other._settings
        self._settings.write(self._values)

    def _own_state(self) -> dict[str, Any]:
        return {
            "hyperparameters": json.dumps(self._values),
            "lineage": exploring.pack_lineage(self._lineage),
            "observations": self._observations.packed(),
        }

    def _load_own_state(self, state: Mapping[str, Any]) -> None:
        values, lineage = self._values_in(state), exploring.unpack_lineage(state["lineage"])
        self._observations = Observations.unpacked(state["observations"], self._window)
        self._values.clear()
        self._values.update(values)
        self._lineage = lineage

    def _values_in(self, state: Mapping[str, Any]) -> dict[str, Value]:
        values = json.loads(state["hyperparameters"])
        if values.keys() != self._spaces.keys():
            raise ValueError(
                f"a state must have the hyperparameters {', '.join(self._spaces)}, got {', '.join(values)}"
            )
        return {name: space.clipped(values[name]) for name, space in self._spaces.items()}

    def restore_whole_state(self, parts: Mapping[str, Any]) -> int:
        """Load another member's optimizer state and policy state, and return its iteration.

        This rank's scheduled values are kept, because its schedulers are not changed.
        """
        own = self._settings.scheduled()
        iteration = super().restore_whole_state(parts)
        self._settings.put_scheduled(own)
        self._settings.write(self._values)
        return iteration

    # -- one round --------------------------------------------------------------------------------------------------

    def _restricted(self, message: _RoleMessage, round: int) -> _RoleMessage:
        if not message.donors:
            return message
        donor = self._donor(message, round)
        if isinstance(message, Assign):
            is_copier = message.role == REPLACER and not message.admits
            self._parent = (round, message.parent)
            return replace(message, donors=(donor,), best=donor) if is_copier else message
        if self._member.admitting == round:
            return message
        iteration = message.iterations[message.donors.index(donor)]
        return replace(message, donors=(donor,), weights=(1.0,), iterations=(iteration,), best=donor)

    def _donor(self, message: Assign | Frozen, round: int) -> int:
        """Return the donor that this rank copies: the assigned donor, or else preferably one of its sub-population."""
        parent = message.parent if isinstance(message, Assign) else self._parent[1] if self._parent[0] == round else -1
        if parent in message.donors:
            return parent
        rank, place = self._world.rank, self._place_of(self._world.rank)
        own = tuple(donor for donor in message.donors if self._place_of(donor) == place)
        return exploring.donor_for(own or message.donors, rank, round, self._own_options.seed)

    def _read_metric(self, given: MetricSource) -> float:
        value = super()._read_metric(given)
        if self._window:
            self._observations.note(self._world.rank, self.iteration, self._sign * value, self._values)
        return value

    def obstacle(self, parts: Mapping[str, Any]) -> str:
        """Return why the donor's optimizer state does not fit, for example after one rank has changed its optimizer."""
        try:
            state_for(self.model, self.optimizer, parts["optimizer"])
        except ValueError as error:
            return str(error)
        return ""

    def prepare(self, parts: Mapping[str, Any], donor: int, round: int) -> _Inheritance:
        """Return the donor's state and new hyperparameters for :meth:`adopt`. Leave this rank unchanged."""
        state, theirs = parts["policy"], cloned(parts["optimizer"])  # torch keeps the given tensors
        moments = state_for(self.model, self.optimizer, theirs)
        inherited = self._values_in(state)
        known = Observations.unpacked(state["observations"], self._window)
        observations = self._observations.inherited(known, self.iteration - state["iteration"])
        metric = None if state["metric"] is None else self._sign * state["metric"]
        own, theirs_at = self._place_of(self._world.rank), self._place_of(donor)
        if own == theirs_at:
            values = exploring.explored(
                self._own_options,
                inherited,
                self._world.rank,
                round,
                known=observations.entries,
                iteration=self.iteration,
                metric=metric,
            )
        else:  # hyperparameters move only to sub-populations that evolve more often
            periods = self._own_options.periods
            values = dict(inherited if periods[theirs_at] > periods[own] else self._values)
        entry = LineageEntry(self.iteration, self._world.rank, round, donor, values)
        lineage = exploring.extended(exploring.unpack_lineage(state["lineage"]), entry)
        return _Inheritance(moments, inherited, values, lineage, observations, state["metric"])

    def adopt(self, prepared: _Inheritance, info: StepInfo) -> StepInfo:
        """Load the donor's state, and then write the new hyperparameters, which the donor's state would undo."""
        load_moments(self.optimizer, prepared.moments, self._own_options.hyperparameters)
        self._settings.write(prepared.values)
        self._values.update(prepared.values)
        self._lineage, self._observations = prepared.lineage, prepared.observations
        self._journal.metric = prepared.metric  # the donor's metric counts until this rank reports
        return replace(info, hyperparameters=dict(prepared.values), inherited=prepared.inherited)
