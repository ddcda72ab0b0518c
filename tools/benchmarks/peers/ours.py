"""asyncdist: an awaited channel, streams, and ``average_models``' reduction, on MPI or on torch."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from work import LARGE, MEAN, SMALL, async_median_s, check_mean, write

import asyncdist as ad


@dataclass(frozen=True, slots=True)
class Message:
    data: bytes


async def main(world: ad.World) -> None:
    peer = 1 - world.rank
    channel = world.channel(Message, tag=100)
    message, tensor = Message(bytes(SMALL.nbytes)), LARGE.tensor()

    async def pass_message() -> None:
        if world.rank == 0:
            await channel.send(message, peer)
            await channel.receive()
        else:
            await channel.receive()
            await channel.send(message, peer)

    async def pass_tensor() -> None:
        if world.rank == 0:
            await world.send_stream(tensor, peer)
            await world.receive_stream(tensor, peer)
        else:
            await world.receive_stream(tensor, peer)
            await world.send_stream(tensor, peer)

    model = torch.nn.ParameterDict({"all": torch.nn.Parameter(MEAN.tensor(1.0 + world.rank))})
    small_s = await async_median_s(SMALL, pass_message)
    large_s = await async_median_s(LARGE, pass_tensor)
    mean_s = await async_median_s(MEAN, lambda: ad.average_models(model))
    check_mean(model["all"].detach())
    if world.rank == 0:
        write(small_s=small_s, large_s=large_s, mean_s=mean_s)


ad.run(main)
