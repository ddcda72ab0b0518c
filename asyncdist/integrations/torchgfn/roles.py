"""Replaces torchgfn's ``gfn.utils.distributed``: roles of ranks, groups and blocking collectives.

The functions work under every launcher. torchgfn's own functions see several ranks only if PMI_SIZE is set. Asyncdist
groups replace process groups and communicators.
"""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from typing import Any

import torch
from torch import nn

import asyncdist
from asyncdist import Group, blocking
from asyncdist.blocking.process_world import end_process_world
from asyncdist.integrations.joining import join

report_load_imbalance = asyncdist.report_load_imbalance
report_time_info = asyncdist.report_time_info


@dataclass
class DistributedContext:
    """The roles and groups of one rank, with the fields of torchgfn's class.

    Attributes:
        num_training_ranks: Number of training ranks, which are the first ranks.
        agent_group_size: Number of training ranks in each agent group.
        agent_groups: Groups of all agents, or None if there is only one rank.
        agent_group_id: Index of this rank's agent group, or None if this rank does not train.
        train_global_group: Group of all training ranks, or None if there is only one rank.
        assigned_buffer: Buffer rank of this training rank, or None.
        buffer_group: Group of all buffer ranks, or None if there are no buffers.
        assigned_training_ranks: Training ranks that use this buffer rank, or None on other ranks.
    """

    my_rank: int
    world_size: int
    num_training_ranks: int
    agent_group_size: int
    agent_groups: list[Group] | None = None
    agent_group_id: int | None = None
    train_global_group: Group | None = None
    assigned_buffer: int | None = None
    buffer_group: Group | None = None
    assigned_training_ranks: list[int] | None = None
    _made_of: asyncdist.DistributedContext | None = field(default=None, repr=False)

    @property
    def dc_mpi4py(self) -> DistributedContext:
        """This context, because its groups also work in code written for mpi4py."""
        return self

    def get_train_group(self, backend: str = "mpi") -> Group | None:
        """Return ``train_global_group``. ``backend`` is ignored, because a group works on every transport."""
        del backend
        return self.train_global_group

    def is_buffer_rank(self) -> bool:
        """Return whether this rank has a replay buffer."""
        return self.my_rank >= self.num_training_ranks

    def is_training_rank(self) -> bool:
        """Return whether this rank trains."""
        return self.my_rank < self.num_training_ranks

    def cleanup(self) -> None:
        """Free the groups, leave this process's world, and wait until the other ranks leave it.

        Later calls do nothing. MPI is finalized when the process ends.
        """
        made_of, self._made_of = self._made_of, None
        if made_of is not None:
            blocking.current_world().call(made_of.cleanup)
            end_process_world()


def initialize_distributed_compute(
    dist_backend: str = "gloo", num_remote_buffers: int = 0, num_agent_groups: int = 1
) -> DistributedContext:
    """Assign a role to every rank, and make the groups. All ranks must call this function.

    If no world is open, this function opens it.

    Args:
        dist_backend: Ignored, because the launcher decides between MPI and torch.distributed.
        num_remote_buffers: Number of buffer ranks, which are the last ranks. At most one per training rank.
        num_agent_groups: Number of groups of training ranks. It must divide the number of training ranks.

    Raises:
        ValueError: The arguments do not fit the number of ranks.
        DisagreementError: The ranks pass different arguments.
        StartTimeoutError: Some ranks did not join in time.
    """
    del dist_backend
    world = join()
    if world.size == 1:
        return DistributedContext(my_rank=0, world_size=1, num_training_ranks=1, agent_group_size=1)
    made = blocking.initialize_distributed_compute(num_remote_buffers, num_agent_groups)
    names = [each.name for each in fields(DistributedContext) if each.name != "_made_of"]
    return DistributedContext(**{name: getattr(made, name) for name in names}, _made_of=made)


#: Name used by code written for mpi4py. One class supports every transport.
DistributedContextmpi4py = DistributedContext


def initialize_distributed_compute_mpi4py(num_remote_buffers: int, num_agent_groups: int) -> DistributedContext:
    """Assign a role to every rank, and make the groups, like :func:`initialize_distributed_compute`."""
    return initialize_distributed_compute("mpi", num_remote_buffers, num_agent_groups)


def barrier(group: Group | None = None, backend: str = "mpi") -> None:
    """Wait until every rank of ``group``, by default all ranks, has called this function. ``backend`` is ignored."""
    del backend
    join()
    blocking.barrier(group=group)


def broadcast(tensor: torch.Tensor, src: int = 0, group: Group | None = None) -> None:
    """Copy rank ``src``'s ``tensor`` into the tensors of the other ranks of ``group``, by default all ranks.

    Shape and dtype must be equal on all of them. Replaces ``torch.distributed.broadcast``.
    """
    join()
    blocking.broadcast(tensor, src, group=group)


def average_gradients(model: nn.Module) -> None:
    """Replace each gradient with its mean over all ranks. See :func:`asyncdist.average_gradients`."""
    join()
    blocking.average_gradients(model)


def average_models(model: nn.Module, training_group: Group | None = None) -> None:
    """Replace the model's state with its mean over ``training_group``. See :func:`asyncdist.average_models`."""
    join()
    blocking.average_models(model, training_group)


def gather_distributed_data(
    local_tensor: torch.Tensor | list[Any],
    world_size: int | None = None,
    rank: int | None = None,
    training_group: Group | None = None,
) -> torch.Tensor | list[Any] | None:
    """Return all members' data, concatenated, on rank 0. See :func:`asyncdist.gather_distributed_data`."""
    join()
    return blocking.gather_distributed_data(local_tensor, world_size, rank, training_group)
