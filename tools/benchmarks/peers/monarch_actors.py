"""Monarch: an awaited call of an actor in another process, which returns its argument."""

from __future__ import annotations

import asyncio
from typing import Any

from monarch.actor import Actor, endpoint, this_host
from work import LARGE, SMALL, async_median_s, write


class Echo(Actor):
    @endpoint
    async def echo(self, value: Any) -> Any:
        return value


async def main() -> None:
    processes = this_host().spawn_procs(per_host={"gpus": 1})
    actor = processes.spawn("echo", Echo)
    message, tensor = bytes(SMALL.nbytes), LARGE.tensor()
    small_s = await async_median_s(SMALL, lambda: actor.echo.call_one(message))
    write(small_s=small_s, large_s=await async_median_s(LARGE, lambda: actor.echo.call_one(tensor)))
    await processes.stop()


if __name__ == "__main__":
    asyncio.run(main())
