"""One-sided selective averaging: each rank decides when to be replaced, and reads the snapshots of other ranks.

There is no coordinator and there are no common rounds. A replacement on a member has four steps:

1. Every ``average_every`` steps, the member publishes its metric and a snapshot of its state, and continues to train.
2. When its age or its metric meets the criterion (``replacement_mode``), the member decides to replace its weights.
3. It samples other members as donors, and averages their newest snapshots in rank order.
4. In its next ``step``, the average replaces its weights.

The base class implements these steps (:mod:`protocols.one_sided.base`).
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any, Final, Unpack

import torch
from torch import nn

from asyncdist import validation
from asyncdist.protocols.declared import among, with_options
from asyncdist.protocols.metric_trend import BlankMetrics, MetricTrend, blank_warning, trend_warning
from asyncdist.protocols.metrics import MetricSource
from asyncdist.protocols.one_sided import selection
from asyncdist.protocols.one_sided.base import OneSidedPolicy
from asyncdist.protocols.one_sided.reader import Replacement, UnreadableError
from asyncdist.protocols.one_sided.selection import OneSidedRules, ReadOptions
from asyncdist.protocols.one_sided.statistics import OneSidedStatistics
from asyncdist.protocols.options import AveragingOptions, CommonOptions, MeasuredOptions, OneSidedOptions
from asyncdist.protocols.ported import Ported
from asyncdist.protocols.step_info import StepInfo

logger = logging.getLogger("protocols.one_sided.policy")

_NEVER: Final = 1 << 62


@with_options(OneSidedOptions, CommonOptions, OneSidedRules, AveragingOptions, ReadOptions)
class OneSidedSelectiveAveragingPolicy(OneSidedPolicy, Ported):
    """Selective averaging without a coordinator, after torchgfn's one-sided policies.

    Each rank publishes a snapshot of its weights and its metric every ``average_every`` steps. A rank decides to
    replace its weights when its age or its metric meets the criterion (``replacement_mode``). It then reads the newest
    snapshots of other ranks (its donors), and its next ``step`` applies their average.

    ::

        async with OneSidedSelectiveAveragingPolicy(model, optimizer, average_every=50, age_range=(200, 600)) as policy:
            for batch in data:
                loss = train_step(model, optimizer, batch)
                info = await policy.step(loss=loss)

    Args:
        model: Model to train; see :class:`SpawnPolicy`. Its floating and complex entries are averaged. Its integer and
            bool entries (such as BatchNorm's counter) are copied from the best donor.
        optimizer: Optimizer of the model. It keeps its state when weights are replaced, unless
            ``optimizer_state="reset"``.
        average_every, options: The options below. A step that replaces the weights does not publish, since its metric
            belongs to the old weights. In a group of more than 33 ranks, a rank compares itself with a new random
            sample of other ranks each time. The sample has 32 ranks, or more if the rank needs more donors.

    Raises:
        TypeError, ValueError: An option, the model or the optimizer is invalid.
    """

    @validation.names_options()
    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        *,
        average_every: int,
        **options: Unpack[OneSidedOptions],
    ) -> None:
        super().__init__(
            model,
            optimizer,
            average_every=average_every,
            averaging=AveragingOptions.of(options),
            read_timeout_s=ReadOptions.of(options).read_timeout_s,
            **among(options, MeasuredOptions),
        )
        rules = self._rules = OneSidedRules.of(options)
        self._limit = "threshold_metric", rules.threshold_metric if rules.replacement_mode == "threshold" else None
        self._trend = MetricTrend(rules.metric_mode)
        self._blanks = BlankMetrics()
        self._step_count = 0
        self._born_at = 0
        self._dies_at = _NEVER

    # -- the user's calls, beyond SpawnPolicy's ---------------------------------------------------------------------

    def statistics(self) -> OneSidedStatistics:
        """Return this member's number of steps, and its other counts and durations since it started or resumed."""
        return OneSidedStatistics(
            total_iterations=self._step_count,
            agents_killed=self._counts["killed"],
            num_replacements=self._counts["replacements"],
            averaging_ranks=self._counts["donors"],
            age=self._step_count - self._born_at,
            version=self._published_count,
            nonfinite_metric_count=self._counts["nonfinite"],
            **self._common_statistics(),
        )

    def print_stats(self) -> None:
        """Print this member's counts as a table."""
        self._print(self.statistics().format_counts())

    def print_time(self) -> None:
        """Print a table of the seconds that this member spent taking snapshots, reading them and applying averages."""
        self._print(self.statistics().format_times())

    def _print(self, table: str) -> None:
        print(f"{self._journal.title()}\n{table}", flush=True)

    # -- starting and leaving ---------------------------------------------------------------------------------------

    def _options(self) -> Mapping[str, Any]:
        return {
            **asdict(self._rules),
            "average_every": self.average_every,
            **self._averaging.agreed(),
            "chunk_nbytes": self._chunk_nbytes,
        }

    def _takes_means(self) -> bool:
        others = self._group.size - 1
        return self._averaging.takes_means(min(others, selection.donor_limit(self._group.size, self._rules)))

    async def _start(self) -> None:
        await super()._start()
        # A loaded policy keeps its lifetime, unless it was saved with a `replacement_mode` that does not use the age.
        has_life = self._rules.replacement_mode != "age" or self._dies_at != _NEVER
        if self._draws is None or not has_life:
            self._begin_life()

    def _finish_loading(self) -> None:
        super()._finish_loading()
        self._begin_life()

    def _own_state(self) -> dict[str, Any]:
        counts = {"step_count": self._step_count, "born_at": self._born_at, "dies_at": self._dies_at}
        return {**counts, **super()._own_state()}

    def _load_own_state(self, state: Mapping[str, Any]) -> None:
        for name in ("step_count", "born_at", "dies_at"):
            setattr(self, f"_{name}", validation.count(name, state[name], least=0))
        super()._load_own_state(state)

    # -- one step ---------------------------------------------------------------------------------------------------

    def _begin_step(self) -> bool:
        self._step_count += 1
        return self._is_due or super()._begin_step()

    async def _step(self, local_metric: MetricSource) -> StepInfo:
        if self.is_alone and self._is_due:
            self._read_new_metric(local_metric)
        return await super()._step(local_metric)

    def _may_be_due(self) -> bool:
        return self._is_due or self._step_count >= self._dies_at

    async def _train_on(self, local_metric: MetricSource, info: StepInfo) -> None:
        if not info:
            metric = self._read_new_metric(local_metric) if self._is_due else None
            if metric is not None:
                self._publish(metric)
            if self._replacement is None and self._is_replacement_due(metric is not None):
                # If this replacement fails, a rank that is judged by its age tries again after `average_every` steps.
                self._dies_at = self._step_count + self.average_every if self._dies_at != _NEVER else _NEVER
                await self._begin_replacement(self._counts["killed"] + 1)

    def _watch_metric(self, metric: float) -> None:
        """Log a warning once if the metric is repeatedly not finite or, on the first member, becomes worse."""
        self._blanks.add((metric,))
        if self._blanks.take_found():
            logger.warning("%s", blank_warning(self._journal.title(), "this rank's metric"))
        if self._group.index == 0:
            self._trend.add((metric,))
            if (wrong := self._trend.take_wrong()) is not None and not self._journal.is_direction_certain:
                logger.warning("%s", trend_warning(self._journal.title(), self._metric_mode, wrong))

    def _publish(self, metric: float) -> None:
        self._watch_metric(metric)
        self._counts["nonfinite"] += not abs(metric) < float("inf")
        super()._publish(metric)

    def _is_replacement_due(self, is_measured: bool) -> bool:
        mode = self._rules.replacement_mode
        if mode == "age":
            return self._step_count >= self._dies_at
        if mode == "threshold":  # "threshold" needs only the rank's own metric
            rank, own = self._world.rank, self._own_metric
            return is_measured and own is not None and selection.must_replace(rank, {rank: own}, self._rules)
        return is_measured

    def _begin_life(self) -> None:
        self._born_at = self._step_count
        if self._rules.replacement_mode == "age":
            self._dies_at = self._born_at + self._random.randint(*self._rules.age_range)

    def _note_applied(self) -> None:
        self._begin_life()

    async def _attempt(self, replacement: Replacement, deadline: float) -> str:
        rank, count_max = self._world.rank, selection.sample_count(self._group.size, self._rules)
        answered_by = min(deadline, self._world.time() + self._read_timeout_s / 4)
        own_metric = self._own_metric
        metrics = await self._reader.metrics(count_max, self._random.sample, answered_by)
        if own_metric is not None:
            metrics[rank] = own_metric
        if self._rules.replacement_mode == "worst_ratio" and not selection.must_replace(rank, metrics, self._rules):
            if self._replacement is replacement:
                self._replacement = None  # this rank is not among the worst, so it keeps its weights
            return ""
        self._counts["killed"] = replacement.round
        choice = selection.choose(rank, metrics, self._group.size, self._rules, self._random.sample)
        if choice is None and self._group.size - 1 > count_max:
            raise UnreadableError(f"none of the {count_max} ranks that were drawn can be a donor")
        if choice is None:
            return "no other rank can be a donor"
        return await self._read(replacement, choice, deadline)
