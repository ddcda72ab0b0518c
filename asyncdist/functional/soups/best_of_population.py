"""Gives every rank the best model of the population: the best rank's model, or a mean of several ranks' models.

Each rank measures its own model, and then all ranks measure the same means. To compute a mean, the ranks broadcast
their weights in turn, in pieces. In addition to the model, a rank needs memory for a copy of its own weights, for the
mean, and for one piece.

The rank with the best model decides, because it has measured both the best model and the means on the same data. The
other ranks also measure the means, so that different data on the ranks is detected.
"""

from __future__ import annotations

import functools
import json
import logging
import math
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from typing import Any, Final

import torch
from torch import nn

from asyncdist import validation
from asyncdist.collectives.groups import Group
from asyncdist.errors import DisagreementError, LocalProtocolError
from asyncdist.functional.collectives import resolve_group
from asyncdist.functional.joint_work import SURVIVORS_TIMEOUT_S, JointWork
from asyncdist.functional.main_process import reduce_and_broadcast
from asyncdist.functional.soups.choosing import (
    SOUP_KINDS,
    GreedyChoice,
    Soup,
    check_loader,
    given_metric,
    has_nan,
    measure_async,
    recompute_statistics,
    statistics_of,
    warn_without_loader,
)
from asyncdist.runtime.world import World
from asyncdist.tensors.bucket import Bucket
from asyncdist.tensors.flat_state import Fingerprint, FlatState, first_difference
from asyncdist.tensors.means import running_mean_into

logger = logging.getLogger("asyncdist.soups")

#: Number of elements per broadcast, 16 MiB of float32.
_PIECE_COUNT: Final = 1 << 22
#: Relative and absolute difference between the ranks' metrics of equal weights above which a warning is logged.
_TOLERANCE: Final = (1e-2, 1e-8)


async def best_of_population(
    model: nn.Module,
    *,
    loss: Callable[[nn.Module], Any] | None = None,
    score: Callable[[nn.Module], Any] | None = None,
    soups: Sequence[str] = SOUP_KINDS,
    loader: Iterable[Any] | None = None,
    group: Group | None = None,
    world: World | None = None,
) -> Soup:
    """Write the best weights of the population into every rank's model, and return how they were chosen.

    All ranks of ``group`` must call this function, after the policy has ended. The candidates are the model of each
    rank, the mean of all models (the uniform soup), and the greedy soup. The greedy soup starts with the best model.
    The other models are tried in the order of their metrics, and each one that strictly improves the metric is added.

    Floating and complex parameters and persistent buffers are averaged in float32 or wider. Integers, such as
    BatchNorm's counter, are copied from the best model. A model whose metric is not finite, or whose weights contain
    NaN, is omitted. The optimizer's state is not changed.

    Args:
        model: Model with the same names, shapes, dtypes and tied weights on all members, changed in place.
        loss: Function or coroutine function that takes the model, in evaluation mode, and returns its loss, a number.
            Smaller is better. It must use the same held-out data on every rank, and no collectives. A function without
            parameters evaluates ``model``.
        score: Like ``loss``, but larger is better. Exactly one of the two must be passed.
        soups: Soups to try: ``"uniform"``, ``"greedy"``, both or none.
        loader: Batches of training data, equal on all ranks, from which a soup's BatchNorm statistics are recomputed
            before each measurement. By default, a soup has the mean of the models' statistics.
        group: Ranks that take part, by default all that were never lost.
        world: World of the call, by default the current one.

    Returns:
        The kind of the chosen weights, the ranks whose weights they contain, and all metrics. Equal on all ranks.

    Raises:
        DisagreementError: The models, or the arguments, differ between ranks.
        TypeError, ValueError: An argument is wrong, the function returned no number, or no model has a finite metric.
            The other members get RemoteError.
        LocalProtocolError: This rank is not in the group, or was restarted and no group was passed.
        RankLostError: A member was lost during the call. To choose among the remaining models, call the function again.

    If the call raises an error, the model keeps its own weights. **Cancellation**: the others get RemoteError.
    """
    is_default_group = group is None
    world, group = resolve_group(world, group)
    if is_default_group:
        if world.incarnation:
            raise LocalProtocolError(
                f"rank {world.rank} was restarted, so the other ranks do not wait for it here; pass group=, for "
                "example a new_group of all ranks, on every rank"
            )
        if world.peers.attendance.loss_count:
            group = await world.peers.groups.surviving_group(world.group, SURVIVORS_TIMEOUT_S)
    try:
        search = _Search(world, group, model, (loss, score), soups, loader)
        await search.joint.begin(search.prepare, search.work)
        return await search.joint.result_or_abandon()
    finally:
        if is_default_group and group is not world.group:
            await group.free()


class _Search:
    def __init__(
        self,
        world: World,
        group: Group,
        model: nn.Module,
        given: tuple[Callable[[nn.Module], Any] | None, Callable[[nn.Module], Any] | None],
        soups: Sequence[str],
        loader: Iterable[Any] | None,
    ) -> None:
        self.joint: JointWork[Soup] = JointWork(world, group, "best_of_population")
        self._world = world
        self._model = model
        self._given = given
        self._soups = soups
        self._loader = loader
        self._staging: dict[torch.dtype, torch.Tensor] = {}
        self._count = 0  # number of models in the mean
        self._has_warned = False

    async def prepare(self) -> tuple[str, str]:
        """Check the arguments. Return the layout and the options, both of which must be equal on all ranks."""
        self._name, self._function, self._direction = given_metric(*self._given)
        soups: Any = self._soups
        is_list = isinstance(soups, Sequence) and not isinstance(soups, str)
        if not is_list or any(each not in SOUP_KINDS for each in soups):
            validation.refuse("soups", self._soups, f"a sequence of {' and '.join(map(repr, SOUP_KINDS))}")
        check_loader(self._loader)
        self._state = FlatState(self._model)
        self._has_loader = self._loader is not None and bool(statistics_of(self._model))
        options = {self._name: "", "soups": sorted(self._soups), "loader": self._has_loader}
        self._description = self._state.fingerprint.to_text(), json.dumps(options)
        return self._description

    def _compare(self, description: tuple[str, str], first: int) -> float:
        self.joint.check()
        layout, options = description
        if layout != self._description[0]:
            difference = first_difference(self._state.fingerprint, Fingerprint.from_text(layout))
            raise DisagreementError(
                f"the models of rank {first} and rank {self._world.rank} must have the same layout, but {difference} "
                f"(in this group: rank {self._world.rank})",
                ranks=(first, self._world.rank),
            )
        if options != self._description[1]:
            raise DisagreementError(
                f"all members must pass the same arguments, but rank {first} passes {options} and rank "
                f"{self._world.rank} passes {self._description[1]}",
                ranks=(first, self._world.rank),
            )
        return 0.0

    async def work(self, group: Group, description: tuple[str, str]) -> Soup:
        """Choose the best model or mean, together with the other members, and return the choice."""
        with self.joint.delayed_cancellation():
            self._group = group
            await self._gather(functools.partial(self._compare, description, group.ranks[0]))
            self._own = self._state.new_buffers()
            self._state.snapshot(self._own)
            try:
                return await self._choose()
            except BaseException:
                self._state.load(self._own)
                raise

    async def _choose(self) -> Soup:
        values = await self._gather(functools.partial(self._metric, is_soup=False))
        metrics = dict(zip(self._group.ranks, values, strict=True))
        greedy = GreedyChoice(metrics, self._direction)
        self._best = greedy.order[0]
        if self._group.index == 0:
            self._log_left_out(metrics)
        self._mean = self._state.new_buffers(accumulate=True)
        wanted = self._soups if len(greedy.order) > 1 else ()
        if wanted and self._group.index == 0:
            warn_without_loader(self._model, self._loader)
        tried: dict[str, float] = {}
        if "uniform" in wanted:
            await self._set_mean(greedy.order)
            tried["uniform"] = await self._trial(greedy)
        await self._set_mean(greedy.order[:1])
        if "greedy" in wanted:
            while (candidate := greedy.candidate) is not None:
                await self._show_with(candidate)
                if greedy.decide(await self._trial(greedy)):
                    await self._add(candidate)
            tried["greedy"] = greedy.metric
        soup = greedy.result(tried)
        if soup.kind == "uniform":
            await self._set_mean(greedy.order)
        self._state.load(self._mean)
        if soup.kind != "best" and self._has_loader:
            await self._share_statistics()
        return soup

    async def _gather(self, fn: Callable[[], Any]) -> list[float]:
        """Return every member's result of ``fn``, on all members."""
        return await reduce_and_broadcast(fn, list, group=self._group, world=self._world)

    async def _metric(self, *, is_soup: bool) -> float:
        """Measure the weights that are now in the model: this rank's own, or those of a soup."""
        self.joint.check()
        if is_soup:
            recompute_statistics(self._model, self._loader)
        elif has_nan(self._own.averaged().values()):
            return math.nan
        metric = await measure_async(self._model, self._name, self._function)
        self.joint.check()
        return metric

    async def _trial(self, greedy: GreedyChoice) -> float:
        """Measure the weights of a soup on all ranks. Return the metric of the rank with the best model."""
        values = await self._gather(functools.partial(self._metric, is_soup=True))
        decisive = values[self._group.ranks.index(self._best)]
        if self._group.index == 0:
            greedy.warn_of_distant_members(decisive)
            if not self._has_warned:
                self._warn_of_local_metric(values, decisive)
        return decisive

    def _warn_of_local_metric(self, values: Sequence[float], decisive: float) -> None:
        for rank, value in zip(self._group.ranks, values, strict=True):
            relative, absolute = _TOLERANCE
            are_nan = math.isnan(value) and math.isnan(decisive)
            if not are_nan and not math.isclose(value, decisive, rel_tol=relative, abs_tol=absolute):
                self._has_warned = True
                logger.warning(
                    "rank %d and rank %d have measured the %s of equal weights as %g and %g: the ranks use different "
                    "data or random numbers, so their metrics cannot be compared. Use the same held-out data on every "
                    "rank",
                    self._best,
                    rank,
                    self._name,
                    decisive,
                    value,
                )
                return

    def _log_left_out(self, metrics: dict[int, float]) -> None:
        for rank, metric in metrics.items():
            if not math.isfinite(metric):
                logger.warning("the model of rank %d has the %s %g, so it is left out", rank, self._name, metric)

    async def _set_mean(self, members: Sequence[int]) -> None:
        """Write the mean of some members' weights into the model. Integers are copied from the best member."""
        for dtype, flat in self._mean.exact().items():
            flat.copy_(self._own.tensors[dtype])
            await self._world.collectives.broadcast(flat, self._group, self._best)
        self._count = 0
        for member in members:
            await self._add(member)
        self._state.load(self._mean)

    async def _add(self, member: int) -> None:
        for dtype in self._mean.averaged():
            async for mean, _, values in self._pieces(dtype, member):
                if self._count:
                    running_mean_into(mean, mean, values, self._count)
                else:
                    mean.copy_(values)
        self._count += 1

    async def _show_with(self, member: int) -> None:
        """Write into the model the mean with one more member's weights. Do not change the stored mean."""
        self._state.load(self._mean)  # Also undoes changes that the last measurement made to buffers.
        pairs: dict[torch.dtype, list[tuple[torch.Tensor, torch.Tensor]]] = {}
        for entry, pair in zip(self._state.entries, self._state.pairs(self._mean), strict=True):
            pairs.setdefault(entry.dtype, []).append(pair)
        for dtype, flat in self._mean.averaged().items():
            bucket = Bucket(flat, pairs[dtype])
            async for mean, start, values in self._pieces(dtype, member):
                trial = torch.empty_like(mean)
                running_mean_into(trial, mean, values, self._count)
                bucket.copy_out(start, trial)
                del trial  # before the next one is allocated

    async def _pieces(self, dtype: torch.dtype, member: int) -> AsyncIterator[tuple[torch.Tensor, int, torch.Tensor]]:
        """Yield each piece of the mean, its offset, and the matching piece of a member's weights."""
        flat, own = self._mean.tensors[dtype], self._own.tensors[dtype]
        for start in range(0, len(flat), _PIECE_COUNT):
            mean = flat[start : start + _PIECE_COUNT]
            if self._world.rank == member:
                values = own[start : start + _PIECE_COUNT]
            else:
                if dtype not in self._staging:
                    self._staging[dtype] = torch.empty(min(len(flat), _PIECE_COUNT), dtype=dtype, device="cpu")
                values = self._staging[dtype][: len(mean)]
            await self._world.collectives.broadcast(values, self._group, member)
            yield mean, start, values

    async def _share_statistics(self) -> None:
        """Recompute the BatchNorm statistics of the chosen soup, and use the best member's statistics on all ranks."""

        def recompute() -> float:
            self.joint.check()
            recompute_statistics(self._model, self._loader)
            return 0.0

        await self._gather(recompute)
        for buffer in statistics_of(self._model):
            await self._world.collectives.broadcast(buffer, self._group, self._best)
