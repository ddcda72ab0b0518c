"""Divides ranks into model, pipeline and data parallel groups.

The ranks form an array with the axes data, pipeline and model, of which model varies fastest, as in Megatron-LM. Ranks
that split a layer communicate most, so they have adjacent numbers, usually on one host. With 8 ranks, model parallelism
2 and pipeline parallelism 2::

    model     [0 1] [2 3] [4 5] [6 7]       ranks that share the layers of one stage
    pipeline  [0 2] [1 3] [4 6] [5 7]       ranks that pass activations on, first stage first
    data      [0 4] [1 5] [2 6] [3 7]       ranks that hold the same weights and see different data

A coroutine gets groups of its world from :func:`new_parallel_groups`. A plain function gets torch.distributed process
groups from :func:`asyncdist.launch.process_groups.init_parallel_groups`.
"""

from __future__ import annotations

from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, Final, Generic, TypeVar

from asyncdist import validation
from asyncdist.collectives.agreed_start import Start, start_together
from asyncdist.collectives.groups import Group, free_all
from asyncdist.errors import LocalProtocolError
from asyncdist.runtime.world import World, world_to_await

G = TypeVar("G")

_TIMEOUT_S: Final = 60.0
_SUBJECT: Final = "parallel groups"


@dataclass(frozen=True, slots=True)
class ParallelLayout:
    """Computes which ranks form the model, pipeline and data parallel groups.

    Attributes:
        model_parallelism: Number of ranks that share one stage of a model.
        pipeline_parallelism: Number of stages of a model.

    Raises:
        ValueError: A number is not a positive integer, or the parallelisms do not divide the world size.
    """

    world_size: int
    model_parallelism: int = 1
    pipeline_parallelism: int = 1

    def __post_init__(self) -> None:
        for name in ("world_size", "model_parallelism", "pipeline_parallelism"):
            object.__setattr__(self, name, validation.count(name, getattr(self, name)))
        replica_size = self.model_parallelism * self.pipeline_parallelism
        if self.world_size % replica_size:
            raise ValueError(
                f"world_size must be a multiple of {replica_size}, model_parallelism={self.model_parallelism} times "
                f"pipeline_parallelism={self.pipeline_parallelism}, got {self.world_size}"
            )

    @property
    def data_parallelism(self) -> int:
        """Number of copies of the whole model."""
        return self.world_size // (self.model_parallelism * self.pipeline_parallelism)

    def model_groups(self) -> list[list[int]]:
        """Return the ranks that share a stage, one list for each stage of each copy."""
        width = self.model_parallelism
        return [list(range(first, first + width)) for first in range(0, self.world_size, width)]

    def pipeline_groups(self) -> list[list[int]]:
        """Return the ranks of each pipeline, first stage first, one list for each shard of each copy."""
        replica_size = self.model_parallelism * self.pipeline_parallelism
        return [
            list(range(copy + shard, copy + replica_size, self.model_parallelism))
            for copy in range(0, self.world_size, replica_size)
            for shard in range(self.model_parallelism)
        ]

    def data_groups(self) -> list[list[int]]:
        """Return the ranks that have the same weights, one list for each shard of each stage."""
        replica_size = self.model_parallelism * self.pipeline_parallelism
        return [list(range(place, self.world_size, replica_size)) for place in range(replica_size)]

    def ranks_of(self, rank: int) -> tuple[list[int], list[int], list[int]]:
        """Return the model, pipeline and data groups that contain ``rank``."""
        if type(rank) is not int or not 0 <= rank < self.world_size:
            raise ValueError(f"rank must be from 0 to {self.world_size - 1}, got {rank!r}")
        model, pipeline, data = (
            next(ranks for ranks in groups if rank in ranks)
            for groups in (self.model_groups(), self.pipeline_groups(), self.data_groups())
        )
        return model, pipeline, data


@dataclass(frozen=True, slots=True)
class ParallelGroups(Generic[G]):
    """The three parallel groups that contain one rank.

    Attributes:
        model: Group of the ranks that share a stage with this rank.
        pipeline: Group of the ranks with the stages of this rank's copy of the model, first stage first.
        data: Group of the ranks with the same weights.
    """

    layout: ParallelLayout
    model: G
    pipeline: G
    data: G


#: Groups that :func:`parallel_groups` returns in the current task, or None.
current_groups: ContextVar[ParallelGroups[Any] | None] = ContextVar("current_groups", default=None)


async def new_parallel_groups(
    model_parallelism: int = 1, pipeline_parallelism: int = 1, *, world: World | None = None
) -> ParallelGroups[Group]:
    """Make the model, pipeline and data groups of this rank. All ranks of the world must call this function.

    In this task, :func:`parallel_groups` returns the same groups from now on.

    Args:
        model_parallelism: Number of ranks that share one stage of a model.
        pipeline_parallelism: Number of stages of a model.
        world: World of the call, by default the current one.

    Raises:
        ValueError: A number is not a positive integer, or their product does not divide the world size. The other ranks
            get RemoteError.
        DisagreementError: Ranks pass different numbers. The error names the first difference.
        StartTimeoutError: Some ranks did not join in time.
    """
    world = world_to_await(world)
    everybody = world.group.ranks
    with world.agreements.objecting(everybody, _SUBJECT):
        layout = ParallelLayout(world.size, model_parallelism, pipeline_parallelism)
    numbers = {name: str(getattr(layout, name)) for name in ("model_parallelism", "pipeline_parallelism")}

    async def make(start: Start[list[Group]]) -> list[Group]:
        await start.agree(numbers, timeout_s=_TIMEOUT_S)
        # All ranks make their three groups in the same order, so that no two ranks wait for each other.
        lists = layout.ranks_of(world.rank)
        return await world.peers.groups.new_groups(lists, start.left_s(_TIMEOUT_S), part_of=start)

    model, pipeline, data = await start_together(
        world.services, world.agreements, everybody, _SUBJECT, make, free_all, name=_SUBJECT
    )
    groups = ParallelGroups(layout, model, pipeline, data)
    current_groups.set(groups)
    return groups


def parallel_groups() -> ParallelGroups[Any]:
    """Return this rank's parallel groups: groups of the world in a coroutine, process groups in a plain function.

    Raises:
        LocalProtocolError: No groups have been made.
    """
    groups = current_groups.get()
    if groups is None:
        raise LocalProtocolError(
            "no parallel groups have been made: await asyncdist.new_parallel_groups(...), or start with "
            "asyncdist.launch_subprocesses"
        )
    return groups
