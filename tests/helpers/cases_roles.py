"""Cases for ``initialize_distributed_compute``: each rank's role, and working groups."""

from __future__ import annotations

from typing import Any

import torch

import asyncdist as ad
from asyncdist.errors import DisagreementError, LocalProtocolError, RemoteError
from helpers.cases_everyday import refused


async def case_every_plan_that_fits(world: ad.World) -> None:
    for buffers in range(world.size // 2 + 1):
        for groups in range(1, world.size - buffers + 1):
            if (world.size - buffers) % groups == 0:
                context = await ad.initialize_distributed_compute(buffers, groups)
                await check(world, context, buffers, groups)
                await context.cleanup()


async def check(world: ad.World, context: ad.DistributedContext, buffers: int, groups: int) -> None:
    """Compare with the expected arithmetic: training ranks first, buffers in turn."""
    rank, training = world.rank, world.size - buffers
    size = training // groups
    assert (context.my_rank, context.world_size) == (rank, world.size)
    assert (context.num_training_ranks, context.agent_group_size) == (training, size)
    assert [group.ranks for group in context.agent_groups] == [
        tuple(range(first, first + size)) for first in range(0, training, size)
    ]
    assert context.train_global_group.ranks == tuple(range(training))
    assert context.is_training_rank() == (rank < training) and context.is_buffer_rank() == (rank >= training)
    assert not context.is_coordinator_rank()
    if rank < training:
        assert context.agent_group_id == rank // size and context.assigned_training_ranks is None
        assert context.assigned_buffer == (training + rank % buffers if buffers else None)
        group = context.agent_group
        assert group is not None
        assert float(await ad.all_reduce(torch.tensor(float(rank)), group=group)) == sum(group.ranks)
        assert await ad.reduce_and_broadcast(lambda: rank, sum, group=context.train_global_group) == sum(
            range(training)
        )
    else:
        assert context.agent_group_id is None and context.agent_group is None and context.assigned_buffer is None
        assert context.assigned_training_ranks == [r for r in range(training) if r % buffers == rank - training]
        await refused(ad.barrier(group=context.train_global_group), LocalProtocolError, f"rank {rank}")
    if buffers:
        assert context.buffer_group is not None
        assert context.buffer_group.ranks == tuple(range(training, world.size))
        if rank >= training:
            await ad.barrier(group=context.buffer_group)
    else:
        assert context.buffer_group is None


async def case_a_reserved_coordinator(world: ad.World) -> None:
    if world.size < 2:
        return
    for reserved in range(world.size):
        context = await ad.initialize_distributed_compute(coordinator=reserved)
        trainers = tuple(rank for rank in range(world.size) if rank != reserved)
        assert context.train_global_group.ranks == trainers
        assert context.is_coordinator_rank() == (world.rank == reserved) != context.is_training_rank()
        if world.rank != reserved:
            await ad.barrier(group=context.train_global_group)
        await context.cleanup()


async def case_by_host(world: ad.World) -> None:
    """The ranks are assigned to two hosts in turn, so groups on one host are not contiguous."""
    if world.size < 3:
        context = await ad.initialize_distributed_compute(placement="host")
        assert context.train_global_group.ranks == tuple(range(world.size))
        await context.cleanup()
        return
    groups, coordinator = going_round(world.size)
    context = await ad.initialize_distributed_compute(
        0, len(groups), coordinator=coordinator, placement="host", hostname=f"host{world.rank % 2}"
    )
    assert [group.ranks for group in context.agent_groups] == groups
    await check_groups(world, context, groups)
    await context.cleanup()


async def case_a_plan_of_ones_own(world: ad.World) -> None:
    """Each group has its own order: its first rank is the root."""
    if world.size < 3:
        return
    groups, coordinator = going_round(world.size)
    groups = [tuple(reversed(group)) for group in groups]
    layout = ad.RankLayout(world.size, tuple(groups), {}, coordinator)
    context = await ad.initialize_distributed_compute(layout=layout)
    assert context.layout is layout and context.is_coordinator_rank() == (world.rank == coordinator)
    await check_groups(world, context, groups)
    await context.cleanup()


def going_round(size: int) -> tuple[list[tuple[int, ...]], int | None]:
    """Return two groups of equal size, the even and the odd ranks; a remaining rank is the coordinator.

    With three ranks, ranks 0 and 2 are the only group, so its ranks are not contiguous.
    """
    if size == 3:
        return [(0, 2)], 1
    even = size - size % 2
    return [tuple(range(0, even, 2)), tuple(range(1, even, 2))], size - 1 if size % 2 else None


async def check_groups(world: ad.World, context: ad.DistributedContext, groups: list[tuple[int, ...]]) -> None:
    """Use all groups at once: gather, reduce and average in each group, in its order."""
    number = next((number for number, ranks in enumerate(groups) if world.rank in ranks), None)
    assert context.agent_group_id == number
    group = context.agent_group
    assert (group is None) == (number is None)
    if group is None or number is None:
        return
    ranks = groups[number]
    found = await ad.gather_from_all_ranks(lambda: world.rank, group=group)
    assert found == (list(ranks) if world.rank == group.ranks[0] else None)
    assert await ad.reduce_and_broadcast(lambda: world.rank, list, group=group) == list(ranks)
    model = torch.nn.Linear(3, 2)
    torch.nn.init.constant_(model.weight, world.rank)
    await ad.average_models(model, group)
    assert bool((model.weight == sum(ranks) / len(ranks)).all())


async def case_the_backend_s_own_objects(world: ad.World) -> None:
    context = await ad.initialize_distributed_compute()
    communicator = context.train_global_group.communicator
    if world.transport_name == "mpi":
        assert context.dc_mpi4py is context
        assert (communicator.Get_rank(), communicator.Get_size()) == (world.rank, world.size)
    else:
        assert communicator is None and context.dc_mpi4py is None
    assert ad.DistributedContextmpi4py is ad.DistributedContext
    assert ad.initialize_distributed_compute_mpi4py is ad.initialize_distributed_compute
    await context.cleanup()
    await context.cleanup()
    await refused(ad.barrier(group=context.train_global_group), LocalProtocolError, f"rank {world.rank}")


async def case_plans_that_do_not_fit(world: ad.World) -> None:
    size = world.size
    for options, facts in (
        ({"num_remote_buffers": size}, ("num_remote_buffers", size, 0, size // 2)),
        ({"num_remote_buffers": -1}, ("num_remote_buffers", -1, 0)),
        ({"num_agent_groups": 0}, ("num_agent_groups", 0, 1)),
        ({"num_agent_groups": size + 1}, ("num_agent_groups", size + 1, size)),
        ({"coordinator": size}, ("coordinator", size, 0, size - 1)),
        ({"placement": "nodes"}, ("placement", "'nodes'", "'arithmetic'", "'host'")),
        (
            {"dist_backend": "ccl"},
            ("dist_backend", "'ccl'", f"this world runs on {world.transport_name}"),
        ),
        *[
            ({"dist_backend": "ccl"}, ("gloo",)),
            ({"dist_backend": "nccl"}, ("'nccl'", "gloo")),
        ][: 2 * (world.transport_name == "torch")],
        ({"layout": ad.RankLayout.arithmetic(size + 1)}, ("layout", size + 1, size)),
    ):
        await refused(ad.initialize_distributed_compute(**options), ValueError, *facts)  # type: ignore[arg-type]
    if size > 1:
        await refused(
            ad.initialize_distributed_compute(placement="host" if world.rank == size - 1 else "arithmetic"),
            DisagreementError,
            "placement",
            "arithmetic",
            "host",
            "rank 0",
            f"rank {size - 1}",
        )
    await ad.initialize_distributed_compute(dist_backend=world.transport_name)


async def case_a_plan_that_does_not_fit_on_one_rank(world: ad.World) -> None:
    """All other ranks are notified of the error at once, whichever rank leads, and the next plan works."""
    size = world.size
    for failing in sorted({0, size - 1}):
        for options, kind, facts in (
            (
                {"num_remote_buffers": size},
                ValueError,
                ("num_remote_buffers", size),
            ),
            ({"num_agent_groups": size + 1}, ValueError, ("num_agent_groups", size + 1)),
            ({"coordinator": -1}, ValueError, ("coordinator", -1)),
            ({"placement": "nodes"}, ValueError, ("placement", "'nodes'")),
            ({"dist_backend": "ccl"}, ValueError, ("dist_backend", "'ccl'")),
            ({"layout": "flat"}, TypeError, ("layout", "'flat'")),
        ):
            chosen: dict[str, Any] = options if world.rank == failing else {}
            call = ad.initialize_distributed_compute(**chosen)
            if world.rank == failing:
                await refused(call, kind, *facts)
            else:
                await refused(call, RemoteError, f"rank {failing}", kind.__name__, *facts)
    context = await ad.initialize_distributed_compute()
    assert context.train_global_group.ranks == tuple(range(size))
