"""Jobs of three ranks that hang for different reasons: ``hangs.py NAME``. ``test_hangs.py`` reads their reports.

Lines that the report should name end with a comment, ``# NAME RANK``.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

import torch

import asyncdist as ad
from protocols import AsyncSelectiveAveragingPolicy, ReplayBuffer, serve_replay_buffer


@dataclass(frozen=True, slots=True)
class Note:
    data: bytes = b""


async def never_sent(world: ad.World) -> None:
    notes = world.channel(Note, tag=100)
    if world.rank == 0:
        await notes.receive()  # never_sent 0
    elif world.rank == 1:
        await asyncio.Event().wait()  # never_sent 1


async def wrong_tag(world: ad.World) -> None:
    notes = world.channel(Note, tag=101 if world.rank == 1 else 100)
    if world.rank == 1:
        await notes.send(Note(), dest=0)
        await notes.receive()  # wrong_tag 1
    elif world.rank == 0:
        await notes.receive()  # wrong_tag 0


async def not_joined(world: ad.World) -> None:
    for step in range(3):
        if world.rank == 2 and step == 2:
            await world.receive_stream(torch.zeros(4), 0)  # not_joined 2
        await ad.barrier()  # not_joined 0


async def no_receiver(world: ad.World) -> None:
    if world.rank == 0:
        await world.send_stream(torch.zeros(1_000_000), 1)  # no_receiver 0
    await ad.barrier()  # no_receiver 1


async def cycle(world: ad.World) -> None:
    before = (world.rank - 1) % world.size
    token = torch.zeros(1)
    await world.receive_stream(token, before)  # cycle 0
    await world.send_stream(token, (world.rank + 1) % world.size)


def load_data() -> None:
    time.sleep(1000)  # blocked_coordinator 0


async def blocked_coordinator(world: ad.World) -> None:
    model = torch.nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    async with AsyncSelectiveAveragingPolicy(model, optimizer, average_every=5) as policy:
        for step in range(20):
            if world.rank == 0 and step == 12:
                load_data()
            await policy.step(float(world.rank))


async def blocking_call(world: ad.World) -> None:
    notes = world.channel(Note, tag=100)
    if world.rank == 1:
        reader, _ = os.pipe()
        os.read(reader, 1)  # blocking_call 1
    await notes.receive()  # blocking_call 0


async def dead_rank(world: ad.World) -> None:
    notes = world.channel(Note, tag=100)
    if world.rank == 2:
        for dest in (0, 1):
            await notes.send(Note(), dest)
            await notes.receive()
        os.kill(os.getpid(), signal.SIGKILL)
    await notes.receive()
    await notes.send(Note(), 2)
    await notes.receive()  # dead_rank 0


async def full_channel(world: ad.World) -> None:
    notes = world.channel(Note, tag=100, capacity=4)
    if world.rank == 1:
        while True:
            await notes.send(Note(bytes(60_000)), dest=0)  # full_channel 1
    await ad.barrier()  # full_channel 0


async def waiting_buffer(world: ad.World) -> None:
    if world.rank == 0:
        await serve_replay_buffer([1, 2], capacity=100)  # waiting_buffer 0
        return
    async with ReplayBuffer(0) as buffer:
        await buffer.sample(8)  # waiting_buffer 1


async def stopped(world: ad.World) -> None:
    notes = world.channel(Note, tag=100)
    if world.rank != 1:
        await notes.receive()
    else:
        for dest in (0, 2):
            await notes.send(Note(), dest)
        os.kill(os.getpid(), signal.SIGSTOP)
    await ad.barrier()  # stopped 0


async def take(notes: ad.Channel[Note]) -> None:
    await notes.receive()  # gathered 2


async def gathered(world: ad.World) -> None:
    notes = world.channel(Note, tag=100)
    if world.rank == 0:
        await asyncio.gather(take(notes), take(notes), asyncio.sleep(0))  # gathered 0
    await ad.barrier()  # gathered 1


async def not_agreed(world: ad.World) -> None:
    if world.rank < 2:
        await ad.new_group([0, 1, 2])  # not_agreed 0
    await ad.barrier()  # not_agreed 2


async def not_started(world: ad.World) -> None:
    if world.rank == 1:
        load_data()
    model = torch.nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    async with AsyncSelectiveAveragingPolicy(model, optimizer, average_every=5):  # not_started 0
        pass


async def computing(world: ad.World) -> None:
    if world.rank == 1:
        await world.compute(load_data)  # computing 1
    await ad.barrier()  # computing 0


HANGS: dict[str, Callable[[ad.World], Awaitable[None]]] = {
    each.__name__: each
    for each in (
        never_sent,
        wrong_tag,
        not_joined,
        no_receiver,
        cycle,
        blocked_coordinator,
        blocking_call,
        dead_rank,
        full_channel,
        waiting_buffer,
        stopped,
        gathered,
        not_agreed,
        not_started,
        computing,
    )
}


async def main(world: ad.World) -> None:
    await HANGS[sys.argv[1]](world)


if __name__ == "__main__":
    ad.run(main)
