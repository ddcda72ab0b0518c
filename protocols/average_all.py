"""Synchronous averaging of all ranks, as a baseline: every rank waits for the slowest rank.

The members continue with the mean of their weights (local SGD, or federated averaging with equal weights: McMahan et
al., 2017).

If a waiting step is cancelled after all members have agreed on the average, the step applies the average before it
raises the cancellation. If the step is cancelled earlier, no member averages: ``step`` raises RemoteError on the other
members, and all members try again at the next due step. If a member has left, ``step`` raises ClosedError on the
others.

The average is a collective. A round of :mod:`protocols.exchange` would survive the loss of members, but take longer.
With 4 ranks on one host and 64 MiB of weights, a round takes 64 ms of CPU time per rank, and the collective takes 42
ms. A round also computes the norm of each contribution (6 ms), and copies the mean (10 ms), because the mean may be
freed before the step applies it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Unpack

import torch
from torch import nn

from asyncdist import ClosedError, validation
from asyncdist.collectives.agreed_start import Start, start_together
from asyncdist.functional.averaging import average_state, prepare_average
from asyncdist.protocols.declared import among, with_options
from asyncdist.protocols.journal import format_table
from asyncdist.protocols.metrics import MetricSource
from asyncdist.protocols.options import AverageAllOptions, AveragingOptions, CommonOptions, MemberOptions
from asyncdist.protocols.own_state import announce_average
from asyncdist.protocols.ported import Ported
from asyncdist.protocols.step_info import NOTHING, StepInfo
from asyncdist.tensors.flat_state import SnapshotPool
from asyncdist.tensors.optimizers.reset import reset_optimizer_state
from asyncdist.wording import ranks_in_words, size_in_words


@dataclass(frozen=True, slots=True)
class AverageAllStatistics:
    """Counts of one member's steps and averages.

    Attributes:
        iteration: Number of steps, including those before a resume.
        seconds: Seconds spent on averages, including the wait for the slowest member.
        nbytes: Total size in bytes of the averaged weights.
    """

    iteration: int
    average_count: int
    seconds: float
    nbytes: int
    title: str = ""

    def __str__(self) -> str:
        """Return a table of the counts."""
        rows = [
            ("iteration", self.iteration),
            ("averages applied", self.average_count),
            ("time spent on averages", f"{self.seconds:.2f} s"),
            ("averaged", size_in_words(self.nbytes)),
        ]
        return format_table(self.title, rows)


@with_options(AverageAllOptions, CommonOptions, AveragingOptions)
class AverageAllPolicy(Ported):
    """Replaces every member's weights with the mean over the group, every ``average_every`` steps.

    Floating and complex entries are averaged. Integer and bool entries are copied from the first member. A metric
    passed to ``step`` is ignored. No member is left out, so a NaN or infinite value on one member spreads to all
    members, without a warning.

    Args:
        model: Model that this rank trains; see :class:`SpawnPolicy`.
        optimizer: Optimizer for the model.
        average_every, options: The options below.

    Raises:
        TypeError, ValueError: An argument is invalid.
        ClosedError: A member has left; raised by ``step``.
    """

    takes_metric: ClassVar[bool] = False

    @validation.names_options()
    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        *,
        average_every: int,
        **options: Unpack[AverageAllOptions],
    ) -> None:
        averaging = AveragingOptions.of(options)
        members = among(options, MemberOptions)
        resets = self._resets_optimizer = averaging.resets_optimizer
        super().__init__(model, optimizer, average_every=average_every, resets_optimizer=resets, **members)
        self._on_event = averaging.on_event
        self._snapshots = SnapshotPool(self._flat)
        self._layout = self._flat.new_buffers(accumulate=True, device="meta")
        self._round = 0
        self._average_count, self._average_s = 0, 0.0

    def statistics(self) -> AverageAllStatistics:
        """Return this member's counts of steps and averages."""
        count, nbytes = self._average_count, self._average_count * self._layout.nbytes
        return AverageAllStatistics(self.iteration, count, self._average_s, nbytes, self._journal.title())

    def _options(self) -> Mapping[str, Any]:
        return {"average_every": self.average_every, "resets_optimizer": self._resets_optimizer}

    def _own_state(self) -> dict[str, Any]:
        return {"round": self._round}

    def _load_own_state(self, state: Mapping[str, Any]) -> None:
        self._round = validation.count("round", state["round"], least=0)

    async def _start(self) -> None:
        members = self._group.ranks
        await self._agree()
        left_s = self._joint_start.left_s(self._start_timeout_s)
        self._own_group = await self._world.peers.groups.new_group(members, left_s, part_of=self._joint_start)
        self._subject = f"averaging of policy {self._own_group.number}"
        self._own_group.lease.subjects.append(self._subject)
        prepare_average(self.model, self._flat, self._world)

    async def _stop(self, error: BaseException | None) -> None:
        del error
        self._world.agreements.withdraw(self._group.ranks, self._subject)
        try:
            await self._own_group.free()
        finally:  # once freed, the group no longer uses the model's memory
            self._world.scratch.forget(self.model)

    def _begin_step(self) -> bool:
        return self._is_due and not self.is_alone

    async def _step(self, local_metric: MetricSource) -> StepInfo:
        del local_metric
        if self.is_alone or not self._is_due:
            await self._world.safe_point()
            return NOTHING
        world, members = self._world, self._group.ranks
        try:
            await world.safe_point()
            self._flat.tensors(self._layout)  # raises ValueError if the model's layout has changed
        except (asyncio.CancelledError, ValueError) as error:
            # Tell the other members that this rank misses the agreement, so that all ranks number the next agreement
            # equally.
            why = error if isinstance(error, ValueError) else None
            world.agreements.decline(world.agreements.next_request(members, self._subject), why)
            raise
        # After the agreement, no member may stop before the average is complete, or the others would wait forever.
        name = "average of all"
        return await start_together(
            world.services,
            world.agreements,
            members,
            self._subject,
            self._average_together,
            _keep,
            name=name,
            is_held=True,
        )

    async def _average_together(self, start: Start[StepInfo]) -> StepInfo:
        began_at = self._world.time()
        try:
            await start.agree({}, timeout_s=None)
        except ClosedError as error:
            left = error.facts.get("ranks")
            if not left:
                raise
            raise ClosedError(
                f"no average of all is possible, because {ranks_in_words(left)} left the policy: make the same number "
                "of steps on all ranks, or use DiLoCoPolicy with outer_optimizer=None, which averages the remaining "
                "ranks",
                ranks=left,
            ) from None
        self._round += 1
        with self._weights.following():
            await average_state(self.model, self._flat, self._own_group, world=self._world)
        if self._resets_optimizer:
            reset_optimizer_state(self.optimizer)
        size, seconds = self._group.size, self._world.time() - began_at
        self._average_count, self._average_s = self._average_count + 1, self._average_s + seconds
        info = StepInfo(
            averaged_this_iteration=True,
            round=self._round,
            donors=self._group.ranks,
            weights=(1.0 / size,) * size,
            seconds=seconds,
            nbytes=self._layout.nbytes,
        )
        weights = (1.0,) * size
        announce_average(self._on_event, self._flat, self._snapshots, self.iteration, info, weights)
        return info


async def _keep(info: StepInfo) -> None:
    """Do nothing. An applied average remains valid if the caller is cancelled."""
    del info
