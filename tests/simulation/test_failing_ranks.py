"""Tests that ``simulate`` raises a rank's failure, unless the fault plan explains it or the caller wants exceptions."""

from __future__ import annotations

import asyncio
import contextlib
import sys
import time

import pytest

import asyncdist as ad
from asyncdist import Interrupt, Kill, Restart, SlowRank, simulate


async def fails_on_two(world: ad.World) -> int:
    await world.sleep(0.1)
    if world.rank == 2:
        raise ValueError("a mistake")
    await world.sleep(9.0)
    return world.rank


def test_the_failure_of_a_rank_is_raised_before_its_effects() -> None:
    with pytest.raises(ValueError, match="a mistake") as caught:
        simulate(fails_on_two, ranks=4, seed=7)
    assert caught.value.__notes__ == ["rank 2 of 4 raised this error (seed 7)"]


def test_a_fault_without_a_death_explains_no_failure() -> None:
    with pytest.raises(ValueError, match="a mistake"):
        simulate(fails_on_two, ranks=4, faults=[SlowRank(1, 0.0, 2.0)])


def test_exceptions_are_results_if_the_caller_asks_for_them() -> None:
    report = simulate(fails_on_two, ranks=3, return_exceptions=True)
    assert [type(result) for result in report.results] == [ad.RankLostError, ad.RankLostError, ValueError]
    for _ in range(2):
        with pytest.raises(ValueError, match="a mistake") as caught:
            report.check_ranks()
    assert len(caught.value.__notes__) == 1


async def waits_for_one(world: ad.World) -> int:
    if world.rank == 1:
        await world.sleep(9.0)
    await ad.barrier()
    return world.rank


def test_the_loss_of_a_killed_rank_is_a_result() -> None:
    report = simulate(waits_for_one, ranks=3, faults=[Kill(1, at_s=0.1)])
    assert [type(result) for result in report.results] == [ad.RankLostError, type(None), ad.RankLostError]


def test_a_mistake_after_a_kill_is_raised() -> None:
    async def main(world: ad.World) -> None:
        try:
            await waits_for_one(world)
        except ad.RankLostError:
            assert world.rank == 0, "rank 2 handles a loss wrongly"

    with pytest.raises(AssertionError, match="rank 2 handles a loss wrongly"):
        simulate(main, ranks=3, faults=[Kill(1, at_s=0.1)])


def test_a_loss_without_a_fault_is_raised() -> None:
    async def main(world: ad.World) -> None:
        raise ad.RankLostError("rank 1 is lost", rank=1)

    with pytest.raises(ad.RankLostError):
        simulate(main, ranks=1)
    with pytest.raises(ad.RankLostError):
        simulate(main, ranks=1, faults=[Kill(0, at_s=5.0)])  # the kill does not fire


def test_the_end_by_a_signal_of_the_plan_is_a_result() -> None:
    report = simulate(waits_for_one, ranks=3, faults=[Interrupt(1, 0.1, "SIGINT")])
    assert isinstance(report.results[1], KeyboardInterrupt)
    assert all(isinstance(report.results[rank], ad.RankLostError) for rank in (0, 2))


@pytest.mark.parametrize("code", [0, 3])
def test_an_exit_is_raised_unless_its_code_is_zero(code: int) -> None:
    async def main(world: ad.World) -> None:
        sys.exit(code)

    if code:
        with pytest.raises(SystemExit):
            simulate(main, ranks=2)
    else:
        assert simulate(main, ranks=2).value() is None


def test_a_deadlock_names_the_failure_before_it() -> None:
    async def main(world: ad.World) -> None:
        if world.rank == 1:
            raise ValueError("a mistake")
        while True:
            with contextlib.suppress(asyncio.CancelledError):
                await asyncio.Event().wait()

    with pytest.raises(ad.DeadlockError) as caught:
        simulate(main, ranks=2)
    assert isinstance(caught.value.__cause__, ValueError)


def test_a_time_limit_names_the_failure_before_it() -> None:
    async def main(world: ad.World) -> None:
        if world.rank == 1:
            raise ValueError("a mistake")
        time.sleep(100.0)  # noqa: ASYNC251
        await world.safe_point()

    with pytest.raises(ad.TimeLimitError) as caught:
        simulate(main, ranks=2, until_s=50.0)
    assert isinstance(caught.value.__cause__, ValueError)


def test_a_rank_that_restarts_too_late_is_a_result() -> None:
    async def main(world: ad.World) -> None:
        await world.sleep(1.0)
        if world.incarnation:
            raise ad.LateError("the others have ended")

    faults = [Kill(1, at_s=0.1), Restart(1, at_s=0.2)]
    assert isinstance(simulate(main, ranks=2, faults=faults).results[1], ad.LateError)

    async def without_fault(world: ad.World) -> None:
        raise ad.LateError("the others have ended")

    with pytest.raises(ad.LateError):
        simulate(without_fault, ranks=2)


@pytest.mark.parametrize("how", ["task", "callback"])
@pytest.mark.parametrize("code", [5, 0])
def test_an_exit_outside_main_ends_the_simulated_rank(how: str, code: int) -> None:
    """As on a real rank. Regression: it was ignored."""

    async def end_soon() -> None:
        sys.exit(code)

    async def main(world: ad.World) -> str:
        other = None
        if world.rank == 1 and how == "task":
            other = asyncio.create_task(end_soon())
        elif world.rank == 1:
            asyncio.get_running_loop().call_soon(sys.exit, code)
        await world.sleep(1.0)
        return f"went on beside {other}"

    report = simulate(main, ranks=2, return_exceptions=True)
    ended = report.results[1]
    assert isinstance(ended, SystemExit) and (ended.code or 0) == code
    assert isinstance(report.results[0], ad.RankLostError if code else str)


@pytest.mark.parametrize("slow", [SlowRank(0, at_s=0.0, factor=1000.0), ad.Stall(0, at_s=0.0, duration_s=0.1)])
def test_a_signal_before_the_first_turn_ends_the_rank(slow: ad.Fault) -> None:
    """Regression: the rank vanished, and the others waited for its end."""

    async def main(world: ad.World) -> None:
        await world.sleep(1.0)

    report = simulate(main, ranks=2, faults=[slow, Interrupt(0, at_s=1e-5)], return_exceptions=True)
    assert isinstance(report.results[0], SystemExit) and report.results[0].code == 143
