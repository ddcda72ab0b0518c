"""Rank 2 starts processes that claim to be its next incarnation; they are refused, and no rank is disturbed.

Rank 2 reports the output of each process, and the others report a sum over all ranks.
"""

from __future__ import annotations

import asyncio
import os
import sys

import torch
from support.mpi import report

import asyncdist as ad

#: A rank removes its secret from the environment when its world opens, but these processes need it.
_SECRET = {name: os.environ[name] for name in ("ASYNCDIST_JOB_SECRET",) if name in os.environ}
_PROGRAM = """
import sys
from asyncdist import _version
_version.__version__ = sys.argv[1] or _version.__version__
import asyncdist as ad
async def main(world): pass
ad.run(main)
"""


async def refused(version: str = "", **variables: str) -> str:
    """Start a process with this process's variables except for these, and return its output when it ends."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-c", _PROGRAM, version),
        env={**os.environ, "ASYNCDIST_INCARNATION": "1", **_SECRET, **variables},
        stderr=asyncio.subprocess.PIPE,
    )
    _, said = await process.communicate()
    assert process.returncode == 1
    return said.decode()


async def main(world: ad.World) -> None:
    said: list[str] = []
    if world.rank == 2:
        elsewhere = {"MASTER_ADDR": "localhost"}  # hides this rank's lock, as if the process were on another host
        said = await asyncio.gather(
            refused(),
            refused(**elsewhere),
            refused(TORCHELASTIC_RUN_ID="another", ASYNCDIST_RUN_ID="another"),
            refused("0.0.0", **elsewhere),
        )
    total = await ad.all_reduce(torch.ones(1))
    report(world.rank, said or float(total))


if __name__ == "__main__":
    ad.run(main)
