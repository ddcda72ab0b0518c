"""Asynchronous PAPA: each rank is pulled towards the mean of other ranks' snapshots, and never waits for them.

Every ``average_every`` steps, rank i publishes a snapshot of its weights. In the background, it also starts reading the
newest snapshots s_j of ``donor_count`` other ranks. In the step after the last read, it moves towards the mean of all k
ranks:

    theta_i = (1 - pull) theta_i + pull * (theta_i + (k - 1) mean(s_j)) / k

theta_i denotes the rank's own weights in that step, and mean(s_j) the mean of the donors' snapshots. This mean
estimates the mean of all k - 1 other ranks that offer a snapshot. The formula equals PAPA
(:mod:`protocols.simple.population_averaging`) if all snapshots are from the same step and all other ranks are donors.
Here the snapshots are older, so a pull slightly changes the mean of all ranks.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Final, Unpack

import torch
from torch import nn

from asyncdist import validation
from asyncdist.protocols.declared import Options, among, integer, like, option, or_none, with_options
from asyncdist.protocols.metrics import MetricSource
from asyncdist.protocols.one_sided.base import OneSidedPolicy
from asyncdist.protocols.one_sided.reader import Replacement
from asyncdist.protocols.one_sided.selection import DEFAULT_DONOR_COUNT_MAX, SAMPLE_COUNT, Choice, ReadOptions
from asyncdist.protocols.one_sided.statistics import PullStatistics
from asyncdist.protocols.options import AveragingOptions, CommonOptions, MemberOptions, OptimizerState
from asyncdist.protocols.simple.population_averaging import FOREIGN_OPTIONS, PullToMean, warn_of_rounding
from asyncdist.protocols.step_info import PolicyEvent, StepInfo

_FOREIGN_OPTIONS: Final = {
    **FOREIGN_OPTIONS,
    **dict.fromkeys(
        ("center", "mean_of", "scale_with_lr"),
        "only PopulationAveragingPolicy, whose ranks wait, has it",
    ),
}


class AsyncPopulationAveragingOptions(MemberOptions, total=False):
    """Options of :class:`protocols.AsyncPopulationAveragingPolicy`."""

    average_every: int
    pull: float
    donor_count: int | None
    optimizer_state: OptimizerState
    on_event: Callable[[PolicyEvent], None] | None
    timing: dict[str, list[float]] | None
    drain_timeout_s: float
    read_timeout_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class AsyncPull(Options):
    """Options of asynchronous PAPA that determine how a rank is pulled towards the mean."""

    average_every: int = option(
        "Number of steps between snapshots: step i, counted from 0, publishes one if (i + 1) % average_every == 0, and "
        "begins to read other ranks' snapshots unless an earlier read is in progress.",
        integer(1),
        default=10,
        is_agreed=True,
    )
    pull: float = like(PullToMean, "pull")
    donor_count: int | None = option(
        "Largest number of other ranks whose snapshots are read, drawn at random each time. None: all other ranks, at "
        f"most {DEFAULT_DONOR_COUNT_MAX}.",
        or_none(integer(1, " or None")),
        default=None,
    )


@with_options(AsyncPopulationAveragingOptions, CommonOptions, AveragingOptions, ReadOptions, AsyncPull)
class AsyncPopulationAveragingPolicy(OneSidedPolicy):
    """Trains with asynchronous PAPA: each rank is pulled towards the mean of other ranks' snapshots, without waiting.

    ::

        async with AsyncPopulationAveragingPolicy(model, optimizer) as policy:
            for batch in data:
                train_step(model, optimizer, batch)
                await policy.step()

    Every ``average_every`` steps, each rank publishes a snapshot, and reads the snapshots of other ranks in the
    background. A later step moves its weights by ``pull`` towards the mean. ``StepInfo.staleness_steps`` is the age of
    the oldest snapshot. Integer and bool buffers are copied from the first donor. If a rank's weights are not finite,
    it is not a donor, and the mean of its donors replaces its weights.

    Args:
        model: Model that this rank trains; see :class:`SpawnPolicy`.
        optimizer: Optimizer for the model.
        options: The options below.

    Raises:
        TypeError, ValueError: An argument has the wrong type or is out of range.
    """

    takes_metric: ClassVar[bool] = False

    @validation.names_options(refused=_FOREIGN_OPTIONS)
    def __init__(
        self, model: nn.Module, optimizer: torch.optim.Optimizer, **options: Unpack[AsyncPopulationAveragingOptions]
    ) -> None:
        pull = self._pull = AsyncPull.of(options)
        super().__init__(
            model,
            optimizer,
            average_every=pull.average_every,
            # A momentum above 0 enables the check of this rank's own weights. _momentum() returns each pull's value.
            averaging=AveragingOptions.of({**options, "momentum": 0.5}),
            read_timeout_s=ReadOptions.of(options).read_timeout_s,
            **among(options, MemberOptions),
        )
        self._offered_count = 0  # number of ranks that offered a snapshot when donors were last drawn

    def statistics(self) -> PullStatistics:
        """Return this member's counts and durations since its start."""
        return PullStatistics(
            iteration=self.iteration,
            pull_count=self._counts["replacements"],
            donor_count=self._counts["donors"],
            snapshot_count=self._published_count,
            **self._common_statistics(),
        )

    def _prepare(self) -> None:
        super()._prepare()
        if self._group.index == 0 and len(self._group.ranks) > 1:
            warn_of_rounding(self._journal.title(), self.model.parameters(), self._pull.pull)

    def _options(self) -> Mapping[str, Any]:
        return {**self._pull.agreed(), **self._averaging.agreed(), "chunk_nbytes": self._chunk_nbytes}

    async def _train_on(self, local_metric: MetricSource, info: StepInfo) -> None:
        if self._is_due:
            self._publish(0.0)
            if self._replacement is None:
                self._counts["begun"] += 1
                await self._begin_replacement(self._counts["begun"])

    async def _attempt(self, replacement: Replacement, deadline: float) -> str:
        limit = DEFAULT_DONOR_COUNT_MAX if self._pull.donor_count is None else self._pull.donor_count
        answered_by = min(deadline, self._world.time() + self._read_timeout_s / 4)
        metrics = await self._reader.metrics(max(SAMPLE_COUNT, limit), self._random.sample, answered_by)
        offered = sorted(rank for rank, metric in metrics.items() if math.isfinite(metric))
        if not offered:
            if self._replacement is replacement:
                self._replacement = None  # no other rank has published a finite snapshot
            return ""
        self._offered_count = len(offered)
        donors = sorted(self._random.sample(offered, min(limit, len(offered))))
        return await self._read(replacement, Choice(tuple(donors), donors[0]), deadline)

    def _momentum(self) -> float:
        return 1.0 - self._pull.pull * self._offered_count / (self._offered_count + 1)
