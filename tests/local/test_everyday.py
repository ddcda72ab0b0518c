"""Tests helpers without a world, with one rank, and in a failing job. On many ranks: ``helpers.cases_everyday``."""

from __future__ import annotations

import builtins

import numpy as np
import pytest

import asyncdist as ad
from asyncdist.errors import RankLostError, RemoteError


def test_outside_a_world() -> None:
    assert not ad.is_distributed()
    assert ad.is_main_process()


async def test_communication_needs_a_world() -> None:
    with pytest.raises(RuntimeError, match=r"asyncdist\.run"):
        await ad.compute_and_broadcast(lambda: 1)
    with pytest.raises(RuntimeError, match=r"asyncdist\.run"):
        async with ad.zero_first(True):
            raise AssertionError("entered")


async def test_missing_world_in_a_notebook_names_the_call_for_cells(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Regression: after a cell that opened a world by hand, the next cell's error gave the advice for scripts."""
    monkeypatch.setattr(builtins, "get_ipython", lambda: None, raising=False)
    with pytest.raises(RuntimeError, match=r"no world is open .*process_world\(\) to open one for all cells"):
        await ad.barrier()


async def test_in_a_notebook() -> None:
    async with ad.open_world(transport="local"):
        assert await ad.compute_and_broadcast(lambda: 2**80) == 2**80
        assert await ad.gather_from_all_ranks(lambda: "one") == ["one"]
        async with ad.zero_only() as is_main, ad.zero_first(True):
            assert is_main and not ad.is_distributed()


def test_an_exception_that_nobody_catches_ends_the_job_as_itself() -> None:
    async def main(world: ad.World) -> None:
        await ad.compute_and_broadcast(lambda: 1 // 0)

    with pytest.raises(ZeroDivisionError):
        ad.run_local(main, ranks=3)


def test_an_interrupt_of_the_computing_rank_is_no_hang() -> None:
    """A BaseException such as KeyboardInterrupt is raised at once, and the other ranks are notified."""

    class Stop(BaseException):
        pass

    def stop() -> None:
        raise Stop

    async def main(world: ad.World) -> str:
        try:
            await ad.compute_and_broadcast(stop)
        except RemoteError as error:
            return error.kind.rpartition(".")[2]
        except Stop:
            return "here"
        return "nothing"

    assert ad.run_local(main, ranks=3, strict=True) == ["here", "Stop", "Stop"]
    assert ad.simulate(main, ranks=3, seed=1, strict=True).results == ("here", "Stop", "Stop")


def test_rank_that_dies_midway_fails_the_others_without_a_hang() -> None:
    async def main(world: ad.World) -> str:
        try:
            async with ad.zero_first(world.rank == 0):
                if world.rank == 0:
                    await world.sleep(10.0)
        except RankLostError:
            return "lost"
        return "done"

    report = ad.simulate(main, ranks=3, seed=3, faults=[ad.simulation.faults.Kill(rank=0, at_s=1.0)])
    report.check_faults()
    assert report.results[1:] == ("lost", "lost")


def test_ranks_may_be_numbers_of_numpy() -> None:
    """Those that ``argsort`` gives, say: "root is 1; the group has ranks [0, 1]", the error once said."""

    async def main(world: ad.World) -> tuple[int, tuple[int, ...]]:
        order = np.argsort([1.0, 0.0])
        found = await ad.compute_and_broadcast(lambda: world.rank, root=order[0])
        async with await ad.new_group(order) as group:
            assert all(type(rank) is int for rank in group.ranks)
            return found, group.ranks

    assert ad.run_local(main, ranks=2, strict=True) == [(1, (1, 0))] * 2
