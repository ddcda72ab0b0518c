"""ucxx: awaited sends and receives of numpy arrays between two endpoints."""

from __future__ import annotations

import asyncio
import sys
from typing import Any

import numpy as np
import ucxx
from work import LARGE, SMALL, async_median_s, start_second, write

arrays = [(part, np.zeros(part.nbytes, dtype=np.uint8)) for part in (SMALL, LARGE)]


async def answer(port: int) -> None:
    endpoint = await ucxx.create_endpoint("127.0.0.1", port)
    for part, array in arrays:
        for _ in range(part.total):
            await endpoint.recv(array)
            await endpoint.send(array)
    await endpoint.recv(arrays[0][1])  # Closing at once would discard the last answer.
    await endpoint.close()


async def ask() -> None:
    connected: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
    listener = ucxx.create_listener(connected.set_result)
    with start_second(str(listener.port)):
        endpoint = await connected

        async def echo(array: Any) -> None:
            await endpoint.send(array)
            await endpoint.recv(array)

        times_s = [await async_median_s(part, lambda array=array: echo(array)) for part, array in arrays]
        write(small_s=times_s[0], large_s=times_s[1])
        await endpoint.send(arrays[0][1])
        await endpoint.close()
    listener.close()


if __name__ == "__main__":
    asyncio.run(answer(int(sys.argv[2])) if len(sys.argv) > 2 else ask())
