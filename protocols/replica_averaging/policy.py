"""Selective averaging among replicas of several ranks each, as under DDP: a replica is one member of the policy.

The first rank of each replica is its leader. The leaders take part in selective averaging, and each leader copies new
weights to all ranks of its replica at the same iteration. The ranks must wait for each other at that iteration, so
weights are copied only every ``swap_every`` steps. In all other steps, the ranks train as they would without a policy.

If each rank of a replica has only a part of the model, as under `fully_shard`, each rank averages its own part
(:mod:`protocols.replica_averaging.shards`).
"""

from __future__ import annotations

import functools
import logging
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from typing import Any, Final, Unpack

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from asyncdist import Group, LateError, LocalProtocolError, compute_and_broadcast, validation
from asyncdist.collectives.groups import free_all
from asyncdist.protocols.declared import among, with_options
from asyncdist.protocols.exchange.replicas.group import ReplicaGroup, new_replica
from asyncdist.protocols.joining.replica_layout import Replicas
from asyncdist.protocols.joining.state_transfer import broadcast_bytes, cloned, packed, unpacked
from asyncdist.protocols.metrics import NOT_MEASURED, Metric, MetricSource, mean_of
from asyncdist.protocols.options import (
    AveragingOptions,
    CommonOptions,
    MeasuredOptions,
    MemberOptions,
    PopulationOptions,
    ReplicaOptions,
)
from asyncdist.protocols.ported import Ported
from asyncdist.protocols.replica_averaging.shards import ShardAveraging
from asyncdist.protocols.selective.policy import AsyncSelectiveAveragingPolicy
from asyncdist.protocols.selective.selection import SelectiveRules
from asyncdist.protocols.selective.statistics import SelectiveStatistics
from asyncdist.protocols.starting.differences import LEFT_OUT
from asyncdist.protocols.step_info import NOTHING, StepInfo
from asyncdist.protocols.wrappers import check_replica_group
from asyncdist.runtime.failing.replica_mates import ReplicaMates
from asyncdist.tensors.byte_views import new_memory
from asyncdist.tensors.optimizers.loading import load_named, named_state
from asyncdist.tensors.optimizers.reset import reset_optimizer_state

logger = logging.getLogger("protocols.replica_averaging.policy")

_NO_POPULATION: Final = "replicas are one population, whose first leader is the coordinator"

_NOT_OF_REPLICAS: Final = PopulationOptions.__annotations__.keys() - MemberOptions.__annotations__.keys()


class ReplicaPolicyOptions(ReplicaOptions, MemberOptions, total=False):
    """The ``**options`` of :class:`ReplicaAveragingPolicy`."""


class _AmongLeaders(AsyncSelectiveAveragingPolicy):
    keeps_replicas = True
    is_rejoining = False

    async def _enter(self) -> None:
        await (self._join() if self.is_rejoining else super()._enter())


@with_options(ReplicaPolicyOptions, CommonOptions, SelectiveRules, AveragingOptions)
class ReplicaAveragingPolicy(Ported):
    """Trains with selective averaging of replicas: the worst replicas adopt the average of the best replicas.

    ::

        model = DistributedDataParallel(module, process_group=of_my_replica)
        async with ReplicaAveragingPolicy(module, optimizer, replica_size=2, average_every=100) as policy:
            for batch in data:
                loss = train_step(model, optimizer, batch)
                info = await policy.step(loss=loss)

    All ranks of a replica must call ``step`` equally often. A rank that leaves the policy waits for the other ranks of
    its replica, and warns if they do not leave. If a rank is lost, ``step`` raises RankLostError on the other ranks of
    its replica. With ``asyncdist run --restarts``, the replica's ranks are restarted, and join the running policy with
    the same code, except under ``fully_shard``. Without restarts, see docs/failures.md.

    Under ``fully_shard``, each rank averages its shards with the ranks of other replicas that have the same shards.
    Events, ``nbytes`` and statistics then refer to the rank's own shards.

    Args:
        model: A module, which may be wrapped in DDP or contain DDP, as ``torch.compile(ddp)`` does. Alternatively, a
            module that ``fully_shard`` has sharded over exactly the ranks of the replica, in the same way in all
            replicas. Unless the model is sharded, the replica's first rank copies its weights to the other ranks at the
            start.
        optimizer: Optimizer of the model on this rank.
        replica_size: Number of ranks in a replica. Replicas are consecutive ranks of the group.
        swap_every: Number of steps between possible changes of the weights; a divisor of ``average_every``. By default,
            the largest divisor up to a tenth of ``average_every``.
        average_every, metric, options: The options below. A replica's metric is the mean over its ranks. Sharded
            replicas do not support ``averaging_strategy="reset_weights"``.

    Attributes:
        is_sharded: Whether each rank has only a part of its replica's model.

    Raises:
        TypeError, ValueError: An argument is invalid, the number of ranks is not a multiple of ``replica_size``, or
            ``fully_shard`` or DDP spans ranks other than the replica's.
    """

    keeps_replicas = True

    @validation.names_options(refused=dict.fromkeys(_NOT_OF_REPLICAS, _NO_POPULATION))
    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        *,
        replica_size: int,
        average_every: int,
        swap_every: int | None = None,
        metric: Callable[[], Metric] | None = None,
        **options: Unpack[ReplicaPolicyOptions],
    ) -> None:
        model = model.module if isinstance(model, DistributedDataParallel) else model
        averaging = AveragingOptions.of(options)
        super().__init__(
            model,
            optimizer,
            average_every=average_every,
            metric=metric,
            resets_optimizer=averaging.resets_optimizer,
            **among(options, MeasuredOptions),
        )
        self.replica_size = validation.count("replica_size", replica_size, least=2)
        self.swap_every = (
            _largest_divisor(self.average_every) if swap_every is None else validation.count("swap_every", swap_every)
        )
        if self.average_every % self.swap_every:
            validation.refuse("swap_every", swap_every, f"a divisor of average_every={average_every}")
        self.is_sharded = self._holds_shards()
        if self.is_sharded and averaging.makes_fresh_weights:
            validation.refuse(
                "averaging_strategy", "reset_weights", "'mean', 'weighted_mean' or 'best_only' if replicas are sharded"
            )
        kind = ShardAveraging if self.is_sharded else _AmongLeaders
        inner: dict[str, Any] = {**options, "name": f"leaders of {self.name}"[:200], "group": None, "world": None}
        self._inner = kind(model, optimizer, average_every=self.average_every, **inner)
        self._limit = self._inner._limit
        self._journal.include(self._inner._journal)
        self._replica: ReplicaGroup
        self._others: Group | None = None  # this rank, and the ranks of other replicas with which it averages
        self._groups: list[Group] = []

    def statistics(self) -> SelectiveStatistics:
        """Return this replica's counts. Except for the iteration, they are 0 on all ranks except the first.

        If the replica is sharded, each rank counts the transfers of its own shards.
        """
        return replace(self._inner.statistics(), iteration=self.iteration, title=self._journal.title())

    def _holds_shards(self) -> bool:
        return bool(self._flat.mesh_ranks)

    def _options(self) -> Mapping[str, Any]:
        own = {"replica_size": self.replica_size, "swap_every": self.swap_every}
        given = {**self._inner._options(), **own}
        if self.is_sharded:
            del given["model_nbytes"]
        return given

    def _agreed_values(self) -> dict[str, str]:
        values = super()._agreed_values()
        if self.is_sharded:  # only ranks with the same shards have equal models
            values["model"] = "sharded"
            values.pop(LEFT_OUT, None)
        return values

    def _takes_means(self) -> bool:
        return False  # ``self._inner`` compares the initial weights

    def _change_optimizer(self, optimizer: torch.optim.Optimizer) -> None:
        super()._change_optimizer(optimizer)
        self._inner.optimizer = optimizer

    def _own_state(self) -> dict[str, Any]:
        return {"replica_size": self.replica_size}

    def _choose_members(self) -> tuple[int, ...]:
        size = self._group.size
        if size > 1 and size % self.replica_size:
            validation.refuse("replica_size", self.replica_size, f"a divisor of the number of ranks ({size})")
        return self._group.ranks

    # -- starting and leaving ---------------------------------------------------------------------------------------

    async def _start(self) -> None:
        self._replicas = Replicas(self._group.ranks, self.replica_size)
        check_replica_group(self.model, self._replicas.replica_ranks(self._world.rank), self._world)
        await self._agree()
        try:
            await self._start_among_groups()
        except BaseException:
            await self._free_groups()
            raise

    async def _start_among_groups(self) -> None:
        ranks, size, world = self._group.ranks, self.replica_size, self._world
        if size == len(ranks) and self._group.index == 0:
            logger.warning(
                "all %d ranks are one replica, so nothing is averaged; two replicas need %d ranks", size, 2 * size
            )
        self._inner.iteration = self.iteration
        left_s = self._joint_start.left_s(self._start_timeout_s)
        facts = world, self._joint_start, self._replicas, self._flat, left_s
        self._replica = await new_replica(*facts, is_sharded=self.is_sharded)
        self._groups.append(self._replica.group)
        self._services.shared(ReplicaMates).ranks = frozenset(self._replica.ranks) - {world.rank}
        if isinstance(self._inner, ShardAveraging):
            self._others = await self._new_group(self._replicas.counterparts(world.rank))
            self._inner.place(world, self._replica.group, self._others, ranks[::size])
            await self._inner.__aenter__()
            return
        self._buffers = self._flat.new_buffers()
        await self._copy_from_leader()
        if world.rank == self._replica.ranks[0]:
            self._others = await self._new_group(ranks[::size])
            self._inner._given_group, self._inner._given_world = self._others, self._world
            await self._inner.__aenter__()

    # -- joining a running policy -----------------------------------------------------------------------------------

    async def _join(self) -> None:
        """Join the running policy together with the other ranks of this replica, which were restarted as well.

        The leader joins as a single rank would, and copies its weights and its optimizer's state to the other ranks.
        """
        if self.is_sharded:
            raise LocalProtocolError(
                f"{type(self).__name__} does not admit a restarted replica with a sharded model to a running policy; "
                "the other replicas continue without it. To train with all replicas again, end the job, and start it "
                "from its last checkpoint"
            )
        world, ranks = self._world, self._group.ranks
        replicas = Replicas(ranks, self.replica_size)
        check_replica_group(self.model, replicas.replica_ranks(world.rank), world)
        was_admitted = self._services.is_admitted
        try:
            self._replica = await new_replica(world, None, replicas, self._flat, self._start_timeout_s)
            self._groups.append(self._replica.group)
            self._services.is_admitted = was_admitted  # creating the group has set it to True
            self._buffers = self._flat.new_buffers()
            state = await compute_and_broadcast(self._join_as_leader, group=self._replica.group, world=world)
            if isinstance(state, str):
                raise LateError(state)
            if world.rank != self._replica.ranks[0]:
                self._restore(state)
            await self._copy_optimizer_from_leader()
            await self._copy_from_leader(has_new_state=True)
        except BaseException as error:
            self._stage = "closed"
            try:
                await self._inner.__aexit__(type(error), error, None)  # does nothing unless the leader has joined
            finally:
                await self._free_groups()
            raise
        self._services.is_admitted = True

    async def _join_as_leader(self) -> dict[str, Any] | str:
        """Join the leaders' policy. Return this policy's state, or the reason why this replica is too late."""
        leaders = self._group.ranks[:: self.replica_size]
        # A restarted rank cannot create a group with ranks that are already running. The policy needs only the group's
        # ranks.
        self._others = Group(leaders, leaders.index(self._world.rank), -1, None)
        self._inner._given_group, self._inner._given_world = self._others, self._world
        assert isinstance(self._inner, _AmongLeaders)
        self._inner.is_rejoining = True
        try:
            await self._inner.__aenter__()
        except LateError as error:
            return str(error)
        self.iteration = self._inner.iteration
        return self.state_dict()

    async def _copy_optimizer_from_leader(self) -> None:
        is_leader = self._others is not None
        own = packed({"optimizer": named_state(self.model, self.optimizer)}) if is_leader else new_memory(0)
        state = await broadcast_bytes(self._world, own, self._replica.group, self._replica.ranks[0])
        if not is_leader:
            load_named(self.model, self.optimizer, cloned(unpacked(state)["optimizer"]))

    async def _new_group(self, ranks: Sequence[int]) -> Group:
        left_s = self._joint_start.left_s(self._start_timeout_s)
        self._groups.append(await self._world.peers.groups.new_group(ranks, left_s, part_of=self._joint_start))
        return self._groups[-1]

    async def _stop(self, error: BaseException | None) -> None:
        try:
            if error is None:
                await self._replica.leave(self.iteration)
        finally:
            try:
                if self._others is not None:
                    await self._inner.__aexit__(None if error is None else type(error), error, None)
            finally:
                await self._free_groups()

    async def _free_groups(self) -> None:
        groups, self._groups = self._groups[::-1], []
        await free_all(groups)

    # -- steps ------------------------------------------------------------------------------------------------------

    def _begin_step(self) -> bool:
        return self._is_due or (not self.is_alone and (self.iteration + 1) % self.swap_every == 0)

    async def _step(self, local_metric: MetricSource) -> StepInfo:
        is_due = self._is_due
        if self.is_alone or not (is_due or (self.iteration + 1) % self.swap_every == 0):
            if is_due:
                self._read_new_metric(local_metric)
            await self._world.safe_point()
            return NOTHING
        with self._replica.step():
            return await self._swap(local_metric, is_due)

    async def _swap(self, local_metric: MetricSource, is_due: bool) -> StepInfo:
        """Let the leader take a step of the leaders' policy, and copy its new weights, together with the replica."""
        if isinstance(self._inner, ShardAveraging):
            read: Any = functools.partial(self._read_new_metric, local_metric)  # may return None, unlike a metric
            return await self._inner.step_at(self.iteration, read, is_due=is_due)
        metric = await self._metric_of_replica(local_metric) if is_due else None

        async def step_of_leader() -> dict[str, Any]:
            return asdict(await self._inner.step_at(self.iteration, metric, is_due=is_due))

        info = StepInfo(**await compute_and_broadcast(step_of_leader, group=self._replica.group, world=self._world))
        if info:
            await self._copy_from_leader()
            if self._others is None and (self._inner._averaging.resets_optimizer or info.recovered):
                reset_optimizer_state(self.optimizer)
        return info

    async def _metric_of_replica(self, local_metric: MetricSource) -> MetricSource:
        """Return the replica's mean metric on its leader; None on other ranks.

        Without a new measurement on the leader, return a callable that returns `NOT_MEASURED`.
        """
        value = self._read_new_metric(local_metric)
        own = torch.tensor([math.nan if value is None else value], dtype=torch.float64, device="cpu")
        metrics = await self._world.collectives.gather(own, self._replica.group, self._replica.ranks[0])
        if metrics is None:
            return None
        return mean_of([float(each) for each in metrics]) if value is not None else lambda: NOT_MEASURED

    async def _copy_from_leader(self, *, has_new_state: bool = False) -> None:
        """Copy the weights of the replica's first rank to its other ranks. All ranks of the replica must call this.

        If ``has_new_state``, the other ranks already have the optimizer's state of the first rank.
        """
        is_leader = self._world.rank == self._replica.ranks[0]
        if is_leader:
            self._flat.snapshot(self._buffers)
        for tensor in self._buffers.tensors.values():
            await self._world.collectives.broadcast(tensor, self._replica.group, self._replica.ranks[0])
        if not is_leader:
            with self._weights.following(has_new_state=has_new_state):
                self._flat.load(self._buffers)


def _largest_divisor(average_every: int) -> int:
    """Return the largest divisor of ``average_every`` up to a tenth of it; 1 if there is none."""
    return next(each for each in range(max(1, average_every // 10), 0, -1) if average_every % each == 0)
