"""Runs a policy, helpers and a replay buffer in turn, on four ranks of several hosts.

    on_hosts.py [CASE...]

Without names, all cases of the helpers run.
"""

from __future__ import annotations

import sys

from helpers.cases import all_cases
from scripts import policies, replay
from support.mpi import report

import asyncdist as ad


async def main(world: ad.World, names: list[str]) -> None:
    policy = await policies.exactness(world)
    await replay.main(world)  # raises if an item differs from the one that was sent
    cases = all_cases()
    for name in names or list(cases):
        await cases[name](world)
    report(world.rank, {"host": world.hostname, "transport": world.transport_name, "policy": policy})


if __name__ == "__main__":
    ad.run(main, sys.argv[1:], strict=True)
