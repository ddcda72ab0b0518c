"""Contains ways in which a job whose ranks can be lost ends; ``test_torch.py`` runs them: ``torch_ends.py WAY``."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import os
import signal
import sys
import threading
import time
from typing import Any

import torch
from support.mpi import report

import asyncdist as ad
from asyncdist.errors import RankLostError
from asyncdist.runtime import leaving
from asyncdist.transports.base import ANY_SOURCE
from asyncdist.waits import A_CONDITION

MIB = 1 << 20
VICTIM = 2
#: Longer than any test waits: a rank that still runs then was not ended.
FOR_EVER_S = 300.0
#: Number of worlds in turn, of which the first may open files that the process keeps.
WORLD_COUNT = 4


def survivors(world: ad.World) -> list[int]:
    return [rank for rank in range(world.size) if rank != VICTIM]


async def talk(world: ad.World, tag: int, nbytes: int) -> int:
    """Send from every survivor to every other survivor; return the number of bytes that arrived."""
    others = [rank for rank in survivors(world) if rank != world.rank]
    buffers = {rank: bytearray(nbytes) for rank in others}
    work = [world.services.engine.send(bytes([world.rank]) * nbytes, rank, tag) for rank in others]
    work += [world.services.engine.receive(buffers[rank], rank, tag) for rank in others]  # type: ignore[misc]
    await asyncio.gather(*work)
    return sum(buffer.count(rank) for rank, buffer in buffers.items())


async def lost(world: ad.World) -> None:
    """The victim is killed while operations of every kind with it are in progress."""
    engine = world.services.engine
    tensor, room = torch.zeros(16 * MIB), torch.zeros(16 * MIB)
    if world.rank == VICTIM:
        sending = asyncio.ensure_future(world.send_stream(tensor, 0))  # a stream in progress, to rank 0
        receiving = asyncio.ensure_future(world.receive_stream(room, 1))
        for rank in survivors(world):
            await engine.send(b"last words", rank, 9)
        report(world.rank, {"at": time.monotonic()})
        await asyncio.sleep(0)
        assert not sending.done() and not receiving.done()
        os.kill(os.getpid(), signal.SIGKILL)
    involved: dict[str, Any] = {
        "receive": engine.receive(bytearray(10), VICTIM, 1),
        "large receive": engine.receive(bytearray(MIB), VICTIM, 2),
        "large send": engine.send(bytearray(MIB), VICTIM, 3),
    }
    if world.rank == 0:
        involved["stream"] = world.receive_stream(room, VICTIM)
    if world.rank == 1:
        involved["stream"] = world.send_stream(tensor, VICTIM)
    tasks = {name: asyncio.ensure_future(work) for name, work in involved.items()}
    for task in tasks.values():
        task.add_done_callback(lambda _: ended_at.append(time.monotonic()))
    ended_at: list[float] = []
    apart = asyncio.ensure_future(engine.receive(bytearray(10), ANY_SOURCE, 4))
    told = asyncio.ensure_future(engine.receive(bytearray(3), (world.rank + 1) % 4 if world.rank != 1 else 3, 5))
    await asyncio.wait(tasks.values())
    errors = {name: task.exception() for name, task in tasks.items()}
    assert not apart.done() and not told.done(), "a receive that does not involve the lost rank must remain pending"
    last_words = bytearray(10)
    await engine.receive(last_words, VICTIM, 9)
    later: list[str] = []
    for work in (engine.send(b"x", VICTIM, 6), engine.receive(bytearray(1), VICTIM, 6), talk(world, 7, 100)):
        try:
            await work
        except RankLostError as error:
            later.append(f"{error.rank}")
    arrived = await talk(world, 7, 2 * MIB)
    await engine.send(b"any", world.rank, 4)
    await apart
    left = {0: 3, 1: 0, 3: 1}[world.rank]
    await engine.send(b"yes", left, 5)
    await told
    report(
        world.rank,
        {
            "errors": {name: [type(error).__name__, getattr(error, "rank", None)] for name, error in errors.items()},
            "text": str(errors["receive"]),
            "ended_at": ended_at,
            "last_words": last_words.decode(),
            "later": later,
            "arrived": arrived,
            "lost": sorted(engine.transport.lost_ranks()),
            "gone": sorted(world.services.gone),
        },
    )


async def lost_at_rest(world: ad.World) -> None:
    """The victim dies while no rank waits for it; the others leave later."""
    engine = world.services.engine
    await ad.barrier()
    if world.rank == VICTIM:
        for rank in survivors(world):  # they have passed the barrier, which the death of a member would end
            await engine.receive(bytearray(4), rank, 1)
        report(world.rank, {"at": time.monotonic()})
        os.kill(os.getpid(), signal.SIGKILL)
    with contextlib.suppress(RankLostError):  # the message has arrived, and the loss may be noticed before its end
        await engine.send(b"past", VICTIM, 1)
    await engine.until(lambda: VICTIM in world.services.gone)
    report(world.rank, {"lost": sorted(engine.transport.lost_ranks()), "at": time.monotonic()})


async def lost_in_an_average(world: ad.World) -> None:
    """The victim is killed while it averages 16 MiB, and the others continue without it."""
    model = torch.nn.Linear(2048, 2048)
    await ad.average_models(model)
    if world.rank != VICTIM:
        await world.services.engine.send(b"1", VICTIM, 1)
    else:
        for rank in survivors(world):  # on a busy host, they may still be in the first average
            await world.services.engine.receive(bytearray(1), rank, 1)
        asyncio.get_running_loop().call_later(0.01, os.kill, os.getpid(), signal.SIGKILL)
    try:
        while True:
            await ad.average_models(model)
    except RankLostError:
        lost = sorted(world.services.engine.transport.lost_ranks())
    group = await ad.new_group(survivors(world))
    await ad.average_models(model, group)
    report(world.rank, {"lost": lost, "in step": await ad.compute_and_broadcast(lambda: 7, group=group)})


async def raises(world: ad.World) -> None:
    await ad.barrier()
    if world.rank == 1:
        raise ValueError("boom-7")
    await world.services.engine.receive(bytearray(1), 1, 1)


async def raises_in_words_of_its_own(world: ad.World) -> None:
    """Rank 0 raises its own error with the text of the error that it has received."""
    try:
        await raises(world)
    except RankLostError as error:
        raise RankLostError("no use without rank 1", rank=1) from error


async def raises_beside_a_blocked_peer(world: ad.World) -> None:
    """Rank 0 is blocked in a long call and cannot be notified that rank 1 has failed."""
    await ad.barrier()
    if world.rank == 0:
        time.sleep(FOR_EVER_S)  # noqa: ASYNC251 that is the point
    raise ValueError("boom-7")


async def cleans_up_long_while_blocked(world: ad.World) -> None:
    """A signal asks all ranks to stop. Rank 1 blocks, and then waits, for longer than ``grace_s``."""
    engine = world.services.engine
    try:
        await (engine.send(b"!", 0, 1) if world.rank else engine.receive(bytearray(1), 1, 1))
        os.kill(os.getpid(), signal.SIGTERM)
        await asyncio.sleep(FOR_EVER_S)
    finally:
        if world.rank == 1:
            time.sleep(2.0)  # noqa: ASYNC251 as if it saved
            await asyncio.sleep(1.5)
            report(world.rank, {"has_saved": True})


async def cleans_up_as_its_own_signal_comes(world: ad.World) -> None:
    """A signal asks all ranks to stop, and reaches rank 1 after the failure of rank 0."""
    try:
        await ad.barrier()
        if world.rank == 0:
            os.kill(os.getpid(), signal.SIGTERM)
            await asyncio.sleep(FOR_EVER_S)
        while True:
            await world.sleep(0.01)
    finally:
        if world.rank == 1:
            os.kill(os.getpid(), signal.SIGTERM)
            await asyncio.sleep(1.2)
            report(world.rank, {"has_saved": True})


async def exits(world: ad.World) -> None:
    await ad.barrier()
    if world.rank == 1:
        sys.exit(3)
    await world.services.engine.receive(bytearray(1), 1, 1)


async def leaves_all_kinds_of_work(world: ad.World) -> None:
    """Main returns while messages are in transit that no rank will receive."""
    leaving._FLUSH_S = 0.2  # type: ignore[misc]
    for peer in range(world.size):
        if peer != world.rank:
            world.services.engine.watch(world.services.engine.transport.isend(bytearray(MIB), peer, 1), A_CONDITION)
            world.services.engine.watch(world.services.engine.transport.isend(b"small", peer, 2), A_CONDITION)
    await ad.barrier()


async def quiet(world: ad.World) -> int:
    await ad.barrier()
    return world.rank


def closes() -> None:
    """Report how long the transport takes to close with all threads started, and what is left after each world.

    Also report the ranks that count as lost afterwards.
    """
    took: list[float] = []
    lost: list[int] = []

    async def main(world: ad.World) -> int:
        peer = (world.rank + 1) % world.size
        await asyncio.gather(
            world.services.engine.send(bytearray(MIB), peer, 1),
            world.services.engine.receive(bytearray(MIB), ANY_SOURCE, 1),
            world.send_stream(torch.zeros(MIB), peer),
            world.receive_stream(torch.zeros(MIB), (world.rank - 1) % world.size),
        )
        transport = world.services.engine.transport
        close = transport.close

        def timed() -> None:
            began_at = time.monotonic()
            close()
            took.append(time.monotonic() - began_at)
            lost.extend(world.services.lost_ranks())

        transport.close = timed  # type: ignore[method-assign]
        return world.rank

    gc.disable()
    left: list[list[int]] = []
    for _ in range(WORLD_COUNT):
        rank = ad.run(main)
        left.append([len(os.listdir("/proc/self/fd")), len(os.listdir("/proc/self/task"))])
    alive = [thread.name for thread in threading.enumerate() if thread.name.startswith("asyncdist")]
    report(rank, {"took": took, "alive": alive, "left": left, "lost": lost})


def caught() -> None:
    """The script survives a failure, and its next world works."""
    try:
        ad.run(raises)
    except (ValueError, RankLostError) as error:
        kind = type(error).__name__
    alive = [thread.name for thread in threading.enumerate() if thread.name.startswith("asyncdist")]
    report(ad.run(quiet), {"kind": kind, "alive": alive})


def main() -> None:
    way = sys.argv[1]
    if way in ("closes", "caught"):
        globals()[way]()
    else:
        ad.run(globals()[way], grace_s=1.0 if "blocked" in way else 20.0)


if __name__ == "__main__":
    main()
