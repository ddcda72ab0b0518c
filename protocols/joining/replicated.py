"""Base class of joinable policies whose model replicas may have several ranks, under DDP or `fully_shard`."""

from __future__ import annotations

import abc
from collections.abc import Callable, Sequence
from typing import Unpack

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from asyncdist import validation
from asyncdist.protocols.exchange.replicas.group import Readiness, ReplicaGroup, new_replica
from asyncdist.protocols.joining.policy import JoinablePolicy
from asyncdist.protocols.options import MemberOptions
from asyncdist.protocols.own_state import announce_average
from asyncdist.protocols.starting.differences import LEFT_OUT
from asyncdist.protocols.step_info import PolicyEvent, StepInfo
from asyncdist.protocols.wrappers import check_replica_group, reshard
from asyncdist.tensors.flat_state import SnapshotPool


class ReplicatedPolicy(JoinablePolicy):
    """Base class of policies that restarted ranks can join, and in which several ranks may share a replica.

    Args:
        replica_size: Number of consecutive ranks that train one replica of the model together.
        average_every, resets_optimizer, options: The parameters of :class:`SpawnPolicy`.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        *,
        replica_size: int,
        average_every: int,
        resets_optimizer: bool,
        **options: Unpack[MemberOptions],
    ) -> None:
        self._replica_size = replica_size
        self.keeps_replicas = replica_size > 1
        if self.keeps_replicas and isinstance(model, DistributedDataParallel):
            model = model.module
        super().__init__(model, optimizer, average_every=average_every, resets_optimizer=resets_optimizer, **options)
        self._layout_buffers = self._flat.new_buffers(device="meta")
        self._snapshots = SnapshotPool(self._flat)  # memory for the weights in AverageApplied events
        self._replica: ReplicaGroup | None = None  # None if each rank is a replica or this rank is alone
        self._admits_replica = False  # whether the leader's replica may admit another replica after this step

    @abc.abstractmethod
    def _first_weights(self) -> dict[str, str]:
        """Return the checksum of this rank's initial weights, equal on all ranks with the same part of the model."""

    def _choose_members(self) -> tuple[int, ...]:
        ranks, size = self._group.ranks, self._replica_size
        if len(ranks) > 1 and len(ranks) % size:
            validation.refuse("replica_size", size, f"a divisor of the number of ranks ({len(ranks)})")
        return ranks

    def _holds_shards(self) -> bool:
        return bool(self._flat.mesh_ranks)

    def _reshard(self) -> None:
        """Free the parameters that `fully_shard` has gathered, before this rank's shards are read or changed."""
        if self._flat.mesh_ranks:
            reshard(self.model)

    def _takes_means(self) -> bool:
        return not self._holds_shards()  # ranks of one replica start with different shards

    def _agreed_values(self) -> dict[str, str]:
        values = super()._agreed_values()
        if self._replicas.size == 1:
            return values | self._first_weights()
        if self._holds_shards():  # the ranks of a replica have different shards
            values["model"] = "sharded"
            values.pop(LEFT_OUT, None)
        return values

    async def _join(self) -> None:
        try:
            await super()._join()
        except BaseException:
            await self._free_replica()
            raise

    async def _rejoin_replica(self) -> None:
        if self._replicas.size > 1 and self._replica is None:
            check_replica_group(self.model, self._replicas.replica_ranks(self._world.rank), self._world)
            facts = self._world, None, self._replicas, self._flat, self._start_timeout_s
            self._replica = await new_replica(*facts)
            self._services.is_admitted = False  # new_replica() has set it to True

    async def _gather_in_replica(self, own: int) -> tuple[int, ...]:
        return (own,) if self._replica is None else await self._replica.gathered(own)

    def _is_asked(self) -> bool:
        """Return whether this rank leads the policy, and can now admit a restarted replica that is waiting."""
        return self._admission is not None and self._admission.is_asked

    async def _agree_in_replica(self, replica: ReplicaGroup, own: Readiness) -> Readiness:
        """Return the joint report of the replica's ranks, and record whether the leader among them admits a replica."""
        joint = await replica.agree(own._replace(admits=not self.is_alone and self._is_asked()))
        self._admits_replica = self._admits_replica or joint.admits
        return joint

    async def _admit_replica(self, replica: ReplicaGroup) -> None:
        """Offer the states of the leader's replica to a restarted replica, if the leader has agreed to admit one.

        Do nothing if the leader admits no replica, for example because a rank was lost meanwhile.
        """
        if self._admits_replica:
            self._admits_replica, admission = False, self._opened_admission()
            own = admission.admit(self._whole_state) if admission.is_asked else 0
            number = max(await replica.gathered(own))
            if number and not own:
                await admission.offer_state(number, self._whole_state)

    async def _free_replica(self) -> None:
        replica, self._replica = self._replica, None
        if replica is not None:
            await replica.free()

    def _announce_average(
        self, on_event: Callable[[PolicyEvent], None] | None, info: StepInfo, weights: Sequence[float]
    ) -> None:
        announce_average(on_event, self._flat, self._snapshots, self.iteration, info, weights)
