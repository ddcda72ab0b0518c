"""Tests that a simulation refuses real threads, processes, sockets and signals."""

from __future__ import annotations

import asyncio
import gc
import io
import itertools
import multiprocessing
import os
import random
import signal
import socket
import subprocess
import threading
import types
from collections.abc import Awaitable, Callable
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from rich.console import Console
from rich.progress import Progress
from torch.utils.tensorboard import SummaryWriter
from tqdm import tqdm
from tqdm.contrib.concurrent import thread_map

import asyncdist as ad
from asyncdist.simulation import (
    simulate,
)

# -- what a simulated rank has not ----------------------------------------------------------------------------------


async def in_executor() -> None:
    await asyncio.get_running_loop().run_in_executor(None, int)


async def in_thread() -> None:
    await asyncio.to_thread(int)


async def from_another_thread() -> None:
    asyncio.get_running_loop().call_soon_threadsafe(int)


async def connect() -> None:
    await asyncio.open_connection("localhost", 1)


async def serve() -> None:
    await asyncio.start_server(lambda reader, writer: None, "localhost", 0)


async def use_socket() -> None:
    with socket.socket() as end:
        await asyncio.get_running_loop().sock_connect(end, ("localhost", 1))


async def start_thread() -> None:
    threading.Thread(target=int).start()


async def start_timer() -> None:
    threading.Timer(0.0, int).start()


async def use_pool() -> None:
    with ThreadPoolExecutor() as pool:
        pool.submit(int)


async def open_connection() -> None:
    socket.create_connection(("127.0.0.1", 9), timeout=60)


async def watch_descriptor() -> None:
    asyncio.get_running_loop().add_reader(0, int)


async def start_process() -> None:
    await asyncio.create_subprocess_exec("true")


async def start_shell() -> None:
    await asyncio.create_subprocess_shell("true")


async def handle_signal() -> None:
    asyncio.get_running_loop().add_signal_handler(signal.SIGUSR1, int)


async def use_process_pool() -> None:
    with ProcessPoolExecutor() as pool:
        pool.submit(int)


async def use_spawning_pool() -> None:
    with ProcessPoolExecutor(mp_context=multiprocessing.get_context("spawn")) as pool:
        pool.submit(int)


async def use_multiprocessing_pool() -> None:
    with multiprocessing.Pool(1) as pool:
        pool.map(abs, [1])


async def fork_process() -> None:
    multiprocessing.get_context("fork").Process(target=int).start()


async def spawn_process() -> None:
    torch.multiprocessing.get_context("spawn").Process(target=int).start()


async def spawn_torch_processes() -> None:
    torch.multiprocessing.spawn(int)


async def fork_by_hand() -> None:
    if os.fork() == 0:
        os._exit(0)


async def run_program() -> None:
    subprocess.run(["true"], check=True)  # noqa: ASYNC221


async def run_shell() -> None:
    os.system("true")  # noqa: ASYNC221


async def make_loop() -> None:
    asyncio.new_event_loop()


@pytest.mark.parametrize(
    "use",
    [
        in_executor,
        in_thread,
        from_another_thread,
        connect,
        serve,
        use_socket,
        start_thread,
        start_timer,
        use_pool,
        open_connection,
        watch_descriptor,
        start_process,
        start_shell,
        handle_signal,
        use_process_pool,
        use_spawning_pool,
        use_multiprocessing_pool,
        fork_process,
        spawn_process,
        spawn_torch_processes,
        fork_by_hand,
        run_program,
        run_shell,
        make_loop,
    ],
)
@pytest.mark.filterwarnings("error")
def test_the_world_outside_is_refused(use: Callable[[], Awaitable[None]]) -> None:
    """They are refused before they exist: no process is left, and no object that warns when it is deleted."""

    async def main(world: ad.World) -> None:
        await use()

    with pytest.raises(ad.LocalProtocolError, match=r"world\.compute"):
        simulate(main, ranks=1).value()
    gc.collect()
    assert multiprocessing.active_children() == []


def test_the_text_of_a_refusal_follows_from_the_seed() -> None:
    """The text is sent to peers, so it is part of the digest; threads are numbered by the process, not by the run."""

    async def main(world: ad.World) -> None:
        threading.Thread(target=int).start()

    first = simulate(main, ranks=2, return_exceptions=True)
    for _ in range(10):
        threading.Thread(target=int)
    assert simulate(main, ranks=2, return_exceptions=True).trace_digest == first.trace_digest


@pytest.mark.workers
@pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork:DeprecationWarning")
def test_the_workers_of_a_data_loader_are_let_through() -> None:
    """Their batches arrive in the order of the sampler, which draws from the rank's own random state."""

    async def main(world: ad.World) -> list[list[int]]:
        loader = torch.utils.data.DataLoader(range(32), batch_size=4, num_workers=2, shuffle=True)
        batches = []
        for batch in loader:
            batches.append(batch.tolist())
            await world.safe_point()
        return batches

    first, second = (simulate(main, ranks=2, seed=3) for _ in range(2))
    first.value()
    assert first.results == second.results and first.trace_digest == second.trace_digest
    assert first.results[0] != first.results[1]
    assert all(sorted(itertools.chain(*batches)) == list(range(32)) for batches in first.results)
    assert multiprocessing.active_children() == []


def test_threads_and_sockets_are_refused_in_a_simulation_alone() -> None:
    """They are refused on the simulation's own thread, while it runs."""
    asked, answered = threading.Event(), threading.Event()
    seen: list[object] = []

    def another() -> None:
        asked.wait(60)
        with socket.socket() as end:
            inner = threading.Thread(target=seen.append, args=(end.fileno() >= 0,))
            inner.start()
            inner.join()
        answered.set()

    async def main(world: ad.World) -> None:
        asked.set()
        assert answered.wait(60)

    names = threading.Thread.start, socket.socket.__init__
    beside = threading.Thread(target=another)
    beside.start()
    simulate(main, ranks=1).value()
    beside.join()
    assert seen == [True]
    assert (threading.Thread.start, socket.socket.__init__) == names


def test_threads_of_torch_and_numpy_are_theirs() -> None:
    async def main(world: ad.World) -> list[int]:
        loader = torch.utils.data.DataLoader(range(8), batch_size=4, num_workers=0, pin_memory=False)
        own = types.ModuleType("torch._of_its_own")
        exec("import threading\ndef start(target):\n    threading.Thread(target=target).start()", own.__dict__)
        started = threading.Event()
        own.start(started.set)
        assert started.wait(60)
        return [int(batch.sum()) for batch in loader]

    assert simulate(main, ranks=1).value() == [6, 22]


def test_an_interrupt_during_the_cleanup_leaves_nothing_replaced() -> None:
    """Regression: after a second Ctrl-C, the functions of random used the rank that had run last."""

    def interrupt() -> None:
        raise KeyboardInterrupt

    async def main(world: ad.World) -> None:
        try:
            await asyncio.Event().wait()
        finally:
            asyncio.get_running_loop().call_soon(interrupt)
            await asyncio.sleep(1.0)

    before = random.random, torch.get_rng_state().tolist()
    with pytest.raises(KeyboardInterrupt):
        simulate(main, ranks=2)
    assert (random.random, torch.get_rng_state().tolist()) == before


def test_threads_of_displays_and_logs_are_allowed(tmp_path: Path) -> None:
    """Regression: Lightning's trainer, and scripts that write to TensorBoard, could not be simulated."""

    async def main(world: ad.World) -> int:
        with SummaryWriter(tmp_path / f"rank{world.rank}") as writer:
            writer.add_scalar("loss", 1.0, 0)
        with Progress(console=Console(file=io.StringIO(), force_terminal=True)) as progress:
            return sum(progress.track(range(4)))

    assert simulate(main, ranks=2).value() == 6
    assert all(any(tmp_path.joinpath(f"rank{rank}").iterdir()) for rank in range(2))


@pytest.mark.filterwarnings("error::tqdm.TqdmMonitorWarning")
def test_progress_bars_have_their_thread_and_pools_are_refused() -> None:
    """Regression: without its thread, tqdm warned in each simulation, and had no thread in the process from then on."""
    tqdm.monitor, interval = None, tqdm.monitor_interval

    async def main(world: ad.World) -> int:
        return sum(tqdm(range(4), file=io.StringIO()))

    async def pooled(world: ad.World) -> list[int]:
        pooled: list[int] = thread_map(int, range(4), file=io.StringIO())
        return pooled

    assert simulate(main, ranks=2).value() == 6
    assert tqdm.monitor is not None and tqdm.monitor_interval == interval
    tqdm.monitor.exit()
    tqdm.monitor = None
    with pytest.raises(ad.LocalProtocolError, match="starting a thread cannot be used in a simulation"):
        simulate(pooled, ranks=1).value()


def test_after_event_runs_outside_loops_and_ranks_in_their_own() -> None:
    """Between two turns of one rank, the called code must not see that asyncio has not ended the first."""
    seen: set[object] = set()

    async def main(world: ad.World) -> None:
        for _ in range(5):
            await world.safe_point()
            assert asyncio.get_running_loop() is world.services.engine.loop

    ad.simulate(main, ranks=3, seed=1, after_event=lambda: seen.add(asyncio._get_running_loop())).value()
    assert seen == {None}
    assert asyncio._get_running_loop() is None
