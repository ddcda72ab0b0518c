"""dask.distributed: its messages between workers (``distributed.comm`` over TCP), with numpy arrays."""

from __future__ import annotations

import asyncio
import sys
from typing import Any

from distributed.comm import connect, listen
from distributed.protocol import to_serialize
from work import LARGE, SMALL, async_median_s, start_second, write


async def answer(address: str) -> None:
    comm = await connect(address)
    for _ in range(SMALL.total + LARGE.total):
        await comm.write(await comm.read())
    await comm.close()


async def ask() -> None:
    connected: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
    ended = asyncio.Event()

    async def serve(comm: Any) -> None:
        connected.set_result(comm)
        await ended.wait()

    async with listen("tcp://127.0.0.1", serve, deserialize=False) as listener:
        with start_second(listener.contact_address):
            comm = await connected
            message, array = {"data": bytes(SMALL.nbytes)}, {"data": to_serialize(LARGE.tensor().numpy())}

            async def echo(value: Any) -> None:
                await comm.write(value)
                await comm.read()

            small_s = await async_median_s(SMALL, lambda: echo(message))
            write(small_s=small_s, large_s=await async_median_s(LARGE, lambda: echo(array)))
            ended.set()


if __name__ == "__main__":
    asyncio.run(answer(sys.argv[2]) if len(sys.argv) > 2 else ask())
