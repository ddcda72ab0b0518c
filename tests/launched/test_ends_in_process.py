"""Tests how ranks of one process end: errors, exits and signals leave ``run_local`` unchanged."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from support import mpi, torchrun

import asyncdist as ad
from asyncdist.runtime import run as runtime
from asyncdist.runtime.run import LoopName


class Boom(Exception):
    pass


@pytest.mark.parametrize("ranks", [1, 3])
def test_local_ranks_raise_what_the_failing_one_raised(ranks: int) -> None:
    seen: list[BaseException] = []

    async def main(world: ad.World) -> None:
        try:
            for step in range(10_000):
                if world.rank == ranks - 1 and step == 5:
                    raise Boom("here")
                await world.safe_point()
        except ad.RankLostError as error:
            seen.append(error)
            raise

    with pytest.raises(Boom, match="here") as caught:
        ad.run_local(main, ranks=ranks)
    assert getattr(caught.value, "__notes__", []) == ["rank 2 of 3 raised this error"] * (ranks > 1)
    assert len(seen) == ranks - 1
    assert all(error.rank == ranks - 1 and "Boom: here" in str(error) for error in seen)


@pytest.mark.parametrize("error", [SystemExit(3), KeyboardInterrupt(), asyncio.CancelledError()])
def test_local_exits_interrupts_and_cancellations_are_unchanged(error: BaseException) -> None:
    async def main(world: ad.World) -> None:
        if world.rank == 1:
            raise error
        while True:
            await world.safe_point()

    with pytest.raises(type(error)) as caught:
        ad.run_local(main, ranks=2)
    if isinstance(error, SystemExit):
        assert caught.value.code == 3


def test_local_exit_with_success_is_leaving_early() -> None:
    steps: list[int] = []

    async def main(world: ad.World) -> int:
        if world.rank == 1:
            sys.exit(0)
        for _ in range(50):
            await world.safe_point()
            steps.append(1)
        return 7

    with pytest.raises(SystemExit) as caught:
        ad.run_local(main, ranks=2)
    assert not caught.value.code and len(steps) == 50


@pytest.mark.parametrize("loop", ["uvloop", "asyncio"])
@pytest.mark.parametrize("how", ["task", "callback", "signal"])
@pytest.mark.parametrize("error", [SystemExit(3), SystemExit(0), KeyboardInterrupt()], ids=["3", "0", "interrupt"])
def test_an_exit_outside_main_ends_the_rank(error: BaseException, how: str, loop: LoopName) -> None:
    """Regression: it was ignored, and the rank trained on."""

    def end(*_: object) -> None:
        raise error

    async def exit_later() -> None:
        end()

    others: list[asyncio.Task[None]] = []

    async def main(world: ad.World) -> None:
        if how == "task":
            others.append(asyncio.create_task(exit_later()))
        elif how == "callback":
            asyncio.get_running_loop().call_soon(end)
        else:
            threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGUSR2)).start()
        await world.sleep(60)

    before = signal.signal(signal.SIGUSR2, end)
    try:
        with pytest.raises(type(error)) as caught:
            ad.run_local(main, ranks=1, loop=loop)
    finally:
        signal.signal(signal.SIGUSR2, before)
    assert caught.value is error


def test_an_error_in_the_cleanup_after_an_exit_is_raised() -> None:
    """Regression: it was lost, and the program ended with the exit's code, 0."""

    async def main(world: ad.World) -> None:
        asyncio.get_running_loop().call_soon(sys.exit, 0)
        try:
            await world.sleep(60)
        finally:
            raise Boom("in the cleanup")

    with pytest.raises(Boom, match="cleanup"):
        ad.run_local(main, ranks=1)


def test_local_background_tasks_are_awaited_and_fail_as_a_group() -> None:
    done: list[int] = []

    async def main(world: ad.World, fails: bool) -> None:
        async def work() -> None:
            await world.sleep(0.01)
            if fails:
                raise Boom("behind")
            done.append(world.rank)

        world.spawn(work())
        if fails:
            await world.sleep(300)

    ad.run_local(main, False, ranks=2)
    assert sorted(done) == [0, 1]
    with pytest.raises(ExceptionGroup) as caught:
        ad.run_local(main, True, ranks=1)
    assert isinstance(caught.value.exceptions[0], Boom)


def test_a_signal_during_the_end_changes_nothing() -> None:
    """Rank 0 has failed and waits for rank 1, which is not at a safe point, when the signal arrives."""

    async def main(world: ad.World) -> None:
        if world.rank == 0:
            raise Boom("here")
        for _ in range(100):
            await asyncio.sleep(0)
        assert world.services.engine.failure is not None, "rank 0 has not reported its failure yet"
        os.kill(os.getpid(), signal.SIGINT)
        await asyncio.sleep(300)

    with pytest.raises(Boom, match="here"):
        ad.run_local(main, ranks=2)


def test_a_rank_that_left_by_sys_exit_answers_a_later_failure() -> None:
    worlds: list[ad.World] = []

    async def main(world: ad.World) -> None:
        if world.rank == 1:
            sys.exit(0)
        worlds.append(world)
        while 1 not in world.services.left:
            await world.safe_point()
        raise Boom("later")

    with pytest.raises(Boom, match="later"):
        ad.run_local(main, ranks=2)
    assert worlds[0].peers.answered == {1}


def test_a_local_signal_ends_every_rank() -> None:
    async def main(world: ad.World) -> None:
        if world.rank == 0:
            os.kill(os.getpid(), signal.SIGINT)
        while True:
            await world.safe_point()

    with pytest.raises(KeyboardInterrupt):
        ad.run_local(main, ranks=2)


FORKS = """
    import multiprocessing, os, signal, sys, time
    import asyncdist as ad

    forked = multiprocessing.get_context("fork")

    def idle(ready):
        ready.set()
        while True:  # Python does not see a signal that arrives just before a sleep until the sleep is over.
            time.sleep(0.1)

    def busy(number):
        pools_ready.set()
        while True:
            number += 1

    def start(**options):
        ready = forked.Event()
        process = forked.Process(target=idle, args=(ready,), **options)
        process.start()
        assert ready.wait(60)
        return process

    async def main(world):
        terminated, interrupted = start(), start()
        terminated.terminate()
        os.kill(interrupted.pid, signal.SIGINT)
        for process, code in ((terminated, -signal.SIGTERM), (interrupted, 1)):  # 1: its KeyboardInterrupt is printed
            process.join(30)
            assert process.exitcode == code, process
        with forked.Pool(2) as pool:  # leaving it terminates its workers
            pool.map_async(busy, range(2))
            assert pools_ready.wait(60)
        start(daemon=True)  # is terminated by multiprocessing when this process ends
        return world.rank

    pools_ready = forked.Event()
    print("returned", ad.run(main))
"""


def test_forked_processes_obey_signals_and_do_not_hold_the_end() -> None:
    """Regression: they had their parent's handlers, which cancel a task of its loop, and survived ``terminate()``."""
    result = torchrun.run_source(1, FORKS).check()
    assert result.stdout == "returned 0\n", result.output()


WITH_A_WORKER = """
    import asyncio, os, signal, sys
    import asyncdist as ad
    from torch.utils.data import DataLoader

    async def main(world):
        batches = iter(DataLoader(range(10**6), num_workers=1, multiprocessing_context="fork"))
        next(batches)
        os.kill(os.getpid(), signal.SIGTERM)
        try:
            await asyncio.sleep(60)
        finally:
            worker = batches._workers[0].pid
            try:  # as mpirun does; the worker takes its parent's word for an order to leave, and no error comes of it
                os.system(f"kill -TERM {worker}")
                os.waitid(os.P_PID, worker, os.WEXITED | os.WNOWAIT)
                os.getpid()  # where the handler runs
            except RuntimeError as error:
                print(error, file=sys.stderr)

    ad.run(main)
"""


def test_a_loader_worker_ended_with_its_rank_is_not_an_error() -> None:
    """Regression: torch raised an error about the killed worker, wherever the rank was at its end."""
    ended = torchrun.run_source(1, WITH_A_WORKER).check(128 + signal.SIGTERM)
    assert "DataLoader" not in ended.stderr and "Traceback" not in ended.stderr, ended.stderr


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["-n", "4"], "-n 4 is an argument of the script; asyncdist run -n 4 train.py starts 4 ranks"),
        (
            ["--lr", "1", "--nproc-per-node=2", "x"],
            "--nproc-per-node=2 is an argument of the script; asyncdist run -n 2",
        ),
        (["-n", "1"], ""),
        (["--own-n", "4"], ""),
        (["-n", "many"], ""),
    ],
)
def test_a_script_that_is_asked_for_ranks_says_that_it_is_one(
    caplog: pytest.LogCaptureFixture, words: list[str], said: str
) -> None:
    runtime._warn_if_alone(["train.py", *words])
    assert said in caplog.text and bool(said) == bool(caplog.text)


def test_python_train_py_n_4_is_told(tmp_path: Path) -> None:
    """Regression: the command silently trained one rank."""
    script = tmp_path / "train.py"
    script.write_text("import asyncdist as ad\nasync def main(world): print(world.size)\nad.run(main)\n")
    command = [sys.executable, str(script), "-n", "4"]
    ended = subprocess.run(command, env=mpi.base_environment(), capture_output=True, text=True, timeout=100, check=True)
    assert ended.stdout == "1\n" and ended.stderr.startswith("this process is the only rank, since -n 4 "), ended.stderr
