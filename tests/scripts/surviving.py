"""Runs ranks of a job on MPI that survives lost ranks; the first argument names the fault."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Awaitable, Callable
from typing import Any

import torch
from support.mpi import report

import asyncdist as ad
from asyncdist import _version, rank_program
from asyncdist.collectives.algorithms import by_messages

NBYTES = 256 << 20


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


async def told(call: Awaitable[Any]) -> str:
    try:
        await call
    except ad.AsyncdistError as error:
        return f"{type(error).__name__} {error.facts.get('rank')}"
    return "it came to an end"


async def dies_in_a_stream(world: ad.World, victim: int) -> None:
    """Rank 0 streams to rank 1 until ``victim`` is killed; the survivors are notified and continue with rank 2."""
    tensor = torch.zeros(NBYTES, dtype=torch.uint8)
    if world.rank == victim:
        world.spawn(kill_soon(world))
    found = None
    while world.rank != 2 and not found:
        call = world.send_stream(tensor, 1) if world.rank == 0 else world.receive_stream(tensor, 0)
        heard = await told(call)
        found = heard if heard != "it came to an end" else None
    survivors = await ad.surviving_group() if world.rank != 2 else await group_of_those_who_live(world)
    total = await ad.all_reduce(torch.tensor(float(world.rank)), group=survivors)
    report(world.rank, [found, list(survivors.ranks), total.item()])


async def kill_soon(world: ad.World) -> None:
    while not world.statistics().stream_sent_nbytes and not world.statistics().stream_received_nbytes:
        await world.progress()
    for _ in range(20):
        await world.safe_point()
    die()


async def group_of_those_who_live(world: ad.World) -> ad.Group:
    while not world.services.lost_ranks():
        await world.sleep(0.001)
    return await ad.surviving_group()


async def in_a_stream_of_its_sender(world: ad.World) -> None:
    await dies_in_a_stream(world, 0)


async def in_a_stream_of_its_receiver(world: ad.World) -> None:
    await dies_in_a_stream(world, 1)


async def fails(world: ad.World) -> None:
    """Rank 1 raises an exception; the others wait for it."""
    if world.rank == 1:
        raise ValueError("boom-7")
    await ad.barrier()


async def fails_after_a_death(world: ad.World) -> None:
    """Rank 0 is killed, and then rank 1 raises an exception."""
    if world.rank == 0:
        die()
    await group_of_those_who_live(world)
    await fails(world)


async def all_others_die(world: ad.World) -> None:
    if world.rank:
        die()
    while len(world.services.lost_ranks()) < world.size - 1:
        await world.sleep(0.001)
    report(world.rank, "alone")


async def exits(world: ad.World) -> None:
    """Rank 1 ends its process while its world is open, with an exit code."""
    if world.rank == 1:
        os._exit(3)
    await group_of_those_who_live(world)


async def interrupted(world: ad.World) -> None:
    """Rank 1 is killed, and the others wait until the user ends the job."""
    if world.rank == 1:
        die()
    await group_of_those_who_live(world)
    print("ready", flush=True)
    await world.sleep(60)


async def ends_well(world: ad.World) -> None:
    """No rank dies, and the ranks end in turn."""
    await world.sleep(0.1 * world.rank)


async def who_is_lost(world: ad.World) -> None:
    """Print the ranks that are lost when main begins, average, and agree with the others."""
    report(world.rank, sorted(world.services.lost_ranks()))
    survivors = await group_of_those_who_live(world)
    await ad.barrier(group=survivors)


def lose_in_the_handshake() -> None:
    """Rank 0 has met all others, and dies before they know this."""

    async def die_in_place_of_telling(*_: Any) -> None:
        rank_program.report_to_guardian(rank_program.IN_WORLD)  # as a rank does after it has connected to the others
        die()

    if os.environ["OMPI_COMM_WORLD_RANK"] == "0":
        by_messages.MessageCollectives.broadcast = die_in_place_of_telling  # type: ignore[method-assign, assignment]


STORIES: dict[str, Callable[[ad.World], Awaitable[None]]] = {
    story.__name__: story
    for story in (
        in_a_stream_of_its_sender,
        in_a_stream_of_its_receiver,
        fails,
        fails_after_a_death,
        all_others_die,
        exits,
        interrupted,
        ends_well,
        who_is_lost,
    )
}


if __name__ == "__main__":
    story = sys.argv[1]
    if story == "before_mpi":
        if os.environ["OMPI_COMM_WORLD_RANK"] == "1":
            die()
        story = "ends_well"
    if story == "with_mpi4py_of_its_own":
        from mpi4py import MPI

        assert MPI.COMM_WORLD.size > 1
        story = "all_others_die"
    if story == "of_another_version":
        _version.__version__ = f"version of rank {os.environ['OMPI_COMM_WORLD_RANK']}"
        story = "ends_well"
    if story == "lost_in_the_handshake":
        lose_in_the_handshake()
        story = "who_is_lost"
    ad.run(STORIES[story])  # type: ignore[arg-type]
    print("after the world")
    if story == "ends_well" and len(sys.argv) > 2:
        sys.exit(int(sys.argv[2]))
