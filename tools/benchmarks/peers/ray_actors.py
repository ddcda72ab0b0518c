"""Ray: an awaited call of an actor in another process, which returns its argument (numpy arrays in shared memory)."""

from __future__ import annotations

import asyncio
import logging
from typing import Any

import ray
from work import LARGE, SMALL, async_median_s, write


@ray.remote
class Echo:
    def echo(self, value: Any) -> Any:
        return value


async def main() -> None:
    actor = Echo.remote()
    message, array = bytes(SMALL.nbytes), LARGE.tensor().numpy()
    small_s = await async_median_s(SMALL, lambda: actor.echo.remote(message))
    write(small_s=small_s, large_s=await async_median_s(LARGE, lambda: actor.echo.remote(array)))


ray.init(num_cpus=2, include_dashboard=False, logging_level=logging.ERROR, log_to_driver=False)
asyncio.run(main())
ray.shutdown()
