"""Runs every case on the ranks that mpirun starts, and reports each rank's outcomes as JSON."""

from __future__ import annotations

import logging
import sys
import traceback

from support.mpi import report

import asyncdist as ad
from helpers.cases import all_cases


async def main(world: ad.World, names: list[str]) -> None:
    cases = all_cases()
    outcomes: dict[str, str] = {}
    for name in names or list(cases):
        try:
            await cases[name](world)
            outcomes[name] = "passed"
        except BaseException as error:
            outcomes[name] = "".join(traceback.format_exception(error))
            report(world.rank, outcomes)
            raise  # requests left over by this case would disturb the next one
        report(world.rank, outcomes)


if __name__ == "__main__":
    logging.getLogger("asyncdist.soups").setLevel(logging.ERROR)  # a case has models with NaN, which are logged
    ad.run(main, sys.argv[1:], strict=True)
