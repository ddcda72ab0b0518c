"""Tests a world under the real mpirun: values, failures, and strict ends."""

from __future__ import annotations

import subprocess
import sys
import textwrap

import pytest
from support.endings import failed_ranks, stopped_by
from support.mpi import run_source


@pytest.mark.mpi
def test_mpi_returns_each_ranks_value_and_open_world_works_too() -> None:
    result = run_source(
        2,
        """
        import asyncio, gc
        import asyncdist as ad
        from support.mpi import report

        async def main(world, a):
            await ad.barrier()
            return [world.rank, world.size, a, world.transport_name]

        async def notebook():
            async with ad.open_world(strict=True) as world:
                await ad.barrier()
                return world.rank

        first = ad.run(main, "x", strict=True, loop="asyncio")
        spared = gc.get_freeze_count()
        made_between = [[] for _ in range(1000)]
        second = ad.run(main, "y", strict=True)
        assert spared >= gc.get_freeze_count() > 10_000, "what was imported is spared, what is made later is not"
        third = asyncio.run(notebook())
        alone = ad.run_local(main, "z", ranks=2, strict=True)
        report(first[0], [first, second, third, alone])
        """,
    ).check()
    for rank in (0, 1):
        alone = [[i, 2, "z", "local"] for i in (0, 1)]
        assert result.reports[rank] == [[rank, 2, "x", "mpi"], [rank, 2, "y", "mpi"], rank, alone]
    assert result.stderr == ""


@pytest.mark.mpi
@pytest.mark.long
def test_mpi_a_failure_is_printed_once_and_ends_every_rank() -> None:
    result = run_source(
        3,
        """
        import asyncdist as ad
        from support.mpi import report

        async def main(world):
            try:
                await ad.barrier()  # rank 1 may be out of it, and have failed, before the others notice its end
                if world.rank == 1:
                    raise ValueError("on purpose")
                while True:
                    await world.progress()
            except ad.RankLostError as error:
                report(world.rank, str(error))
                raise

        ad.run(main)
        """,
    ).check(returncode=None)
    assert result.stderr.count("Traceback (most recent call last)") == 1
    assert result.stderr.count("ValueError: on purpose") == 3, (
        "rank 1 must print the traceback, and each other rank one line"
    )
    assert failed_ranks(result.stderr) == [1]
    assert {*stopped_by(result.stderr, 1)} == {0, 2}
    assert all("rank 1 " in result.reports[rank] for rank in (0, 2))
    assert result.seconds < 60


@pytest.mark.mpi
def test_mpi_a_strict_end_names_leftovers_and_spares_the_others() -> None:
    result = run_source(
        2,
        """
        import asyncdist as ad
        from support.mpi import report

        async def main(world):
            if world.rank == 0:
                world.services.slots.take(1)
            return "value"

        try:
            report_of = ad.run(main, strict=True)
        except ad.LocalProtocolError as error:
            report(0, str(error))
        else:
            report(1, report_of)
        """,
    )
    assert result.reports[1] == "value" and "1 stream slots" in result.reports[0], result.output()
    assert "did not stop" not in result.stderr
    result.check()


@pytest.mark.parametrize(
    ("library", "word"), [pytest.param("triton", "collected", marks=pytest.mark.long), ("others", "")]
)
def test_objects_that_a_library_counts_at_its_end_are_collected(library: str, word: str) -> None:
    """Regression: a GPU build of torch printed 60 lines of leaks for each rank."""
    source = f"""
        import os, sys, types
        from asyncdist.runtime.process import spare_collections

        class Counted:
            def __del__(self, write=os.write):
                write(1, b"collected")

        sys.modules[{library!r}] = library = types.ModuleType({library!r})
        library.counted = Counted()
        library.counted.itself = library.counted
        spare_collections()
    """
    ended = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(source)], capture_output=True, text=True, timeout=100, check=True
    )
    assert ended.stdout + ended.stderr == word
