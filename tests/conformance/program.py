"""Runs every case on the ranks that mpirun starts, and reports each rank's outcomes as JSON.

program.py [CASE ...]
"""

from __future__ import annotations

import logging
import sys
import traceback

import pytest
from support.mpi import report

import asyncdist as ad
from asyncdist.messaging import streams
from conformance.cases_streams import CHUNK_NBYTES
from conformance.endpoint import all_cases, run_case


async def main(world: ad.World, names: list[str]) -> None:
    outcomes: dict[str, str] = {}
    for name in names:
        try:
            await run_case(world, name)
            outcomes[name] = "passed"
        except BaseException as error:
            outcomes[name] = "".join(traceback.format_exception(error))
            report(world.rank, outcomes)
            raise  # requests left over by this case would disturb the next one
        report(world.rank, outcomes)


if __name__ == "__main__":
    logging.getLogger("protocols.misuse").setLevel(logging.ERROR)  # the cases begin with different weights on purpose
    pytest.MonkeyPatch().setattr(streams, "USER_CHUNK_NBYTES", CHUNK_NBYTES)
    ad.run(main, sys.argv[1:] or list(all_cases()), strict=True)
