"""Tests code without an event loop: its calls, its errors, its limits, and its use alongside a running loop."""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextvars
import copy
import gc
import inspect
import os
import signal
import threading
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import asyncdist as ad
from protocols import AsyncSelectiveAveragingPolicy, DiLoCoPolicy


@dataclass(frozen=True, slots=True)
class Word:
    text: str


def made_policy() -> AsyncSelectiveAveragingPolicy:
    model = nn.Linear(2, 1)
    return AsyncSelectiveAveragingPolicy(model, torch.optim.SGD(model.parameters(), lr=0.1), average_every=10)


def test_error_of_a_block_keeps_the_lines_that_raised_it() -> None:
    """Regression: leaving the policy replaced the traceback by None, so the user saw no line of their code."""
    from asyncdist.integrations.pytorch import SelectiveAveraging

    def fails() -> None:
        raise ZeroDivisionError("mine")

    def main(_: ad.blocking.World) -> None:
        model = nn.Linear(2, 1)
        with SelectiveAveraging(model, torch.optim.SGD(model.parameters(), lr=0.1), average_every=10):
            fails()

    with pytest.raises(ZeroDivisionError) as raised:
        ad.run_local(ad.blocking.hosted(main), ranks=1)
    assert [frame.name for frame in traceback.extract_tb(raised.tb)][-2:] == ["main", "fails"]


def test_a_world_of_one_and_what_it_tells() -> None:
    with ad.blocking.open_world(strict=True) as world:
        assert (world.rank, world.size, world.local_rank, world.device.type) == (0, 1, 0, "cpu")
        assert not world.is_simulated and not world.awaited.is_simulated
        assert world.compute(lambda a, b: a + b, 2, b=3) == 5
        assert ad.blocking.current_world().awaited is world.awaited is ad.current_world()
        assert ad.is_main_process(), "a helper that does not block must know the world, too"
        began = world.time()
        world.sleep(0.02)
        assert world.time() - began > 0.01
        world.safe_point()
        world.progress(0.01)
        world.check()
        assert world.transport_name == "local"
        with ad.blocking.policy(made_policy()) as policy:
            assert not policy.step(1.0) and policy.iteration == 1 and policy.statistics().iteration == 1
    with pytest.raises(ad.ClosedError, match="closed"):
        world.sleep(0.0)


def test_a_restarted_rank_that_is_too_late_succeeds(capsys: pytest.CaptureFixture[str]) -> None:
    """Regression: only ``ad.run`` ended the rank as documented. Blocking code printed a traceback and failed."""
    with pytest.raises(SystemExit) as ended, ad.blocking.open_world():
        raise ad.LateError("this rank comes too late")
    assert ended.value.code == 0
    assert capsys.readouterr().err == "asyncdist: this rank comes too late, so nothing is left to do\n"


@pytest.mark.parametrize("ranks", [2, 3])
def test_helpers_channels_and_streams(ranks: int) -> None:
    def main(world: ad.blocking.World) -> Any:
        channel = world.channel(Word, tag=33)
        left, right = (world.rank - 1) % ranks, (world.rank + 1) % ranks
        channel.send(Word(f"from {world.rank}"), right)
        assert channel.receive().message == Word(f"from {left}")
        with ad.blocking.zero_first(world.rank == 0):
            pass
        with ad.blocking.zero_only() as is_main:
            assert is_main == (world.rank == 0)
        tensor = torch.full((3,), float(world.rank))
        if world.rank == 0:
            world.send_stream(tensor, 1)
        elif world.rank == 1:
            assert world.receive_stream(torch.ones(3), 0).tolist() == [0.0] * 3
        with ad.blocking.context(ad.blocking.new_group(range(ranks))) as group:
            assert group.size == ranks
        groups = [world.new_group([world.rank]), *world.new_groups([range(ranks), [world.rank]])]
        assert [group.size for group in groups] == [1, ranks, 1]
        mesh = ad.blocking.new_mesh({"POP": ranks})
        assert ad.blocking.psum(torch.tensor(1), "POP", mesh=mesh).item() == ranks
        channel.close()
        return ad.blocking.all_reduce(tensor).tolist()

    expected = [[float(sum(range(ranks)))] * 3] * ranks
    assert ad.run_local(ad.blocking.hosted(main), ranks=ranks, strict=True) == expected
    assert list(ad.simulate(ad.blocking.hosted(main), ranks=ranks, seed=3, strict=True).results) == expected
    assert ad.blocking.run(main, transport="local", ranks=ranks) == expected[0]


def test_the_names_are_those_of_the_helpers_that_are_awaited() -> None:
    awaited = {
        name
        for name in ad.__all__
        if inspect.iscoroutinefunction(getattr(ad, name)) or name in ("all_gather", "pmax", "zero_first", "zero_only")
    }
    assert len(awaited) > 20 and not [name for name in awaited if not hasattr(ad.blocking, name)]


def test_a_world_has_what_is_awaited_of_the_other_one() -> None:
    """A blocking world has every method of an asyncio world except those for tasks and ``do_file_work``."""
    awaited = {name for name, value in vars(ad.World).items() if inspect.iscoroutinefunction(value)} | {"progress"}
    facts = {name for name, value in vars(ad.World).items() if isinstance(value, property)} - {
        "is_computing",
        "is_in_main",
        "is_open",
    }
    found = {name for name in awaited | facts if not hasattr(ad.blocking.World, name)}
    assert len(awaited) > 7 and found == {"do_file_work", "shares_memory"}


@pytest.mark.parametrize(
    ("call", "told"),
    [
        (ad.blocking.barrier, "barrier needs an open world, but none is open: call"),
        (ad.blocking.current_world, "current_world needs an open world, but none is open: call"),
        (lambda: ad.blocking.policy(made_policy()).step(1.0), "is not open; use it inside its with block"),
    ],
)
def test_outside_of_a_world(call: Callable[[], Any], told: str) -> None:
    with pytest.raises(RuntimeError, match=told):
        call()


def test_a_call_in_a_thread_that_has_no_world_names_the_thread() -> None:
    """Regression: the error told the user to open a world, although the main thread was inside one."""
    with ad.blocking.open_world(), concurrent.futures.ThreadPoolExecutor(1, "loader") as threads:
        refused = threads.submit(ad.blocking.barrier).exception()
    assert str(refused).startswith("barrier needs an open world, but none is open in thread 'loader_0' (use the")


def test_what_a_blocking_call_is_refused_for() -> None:
    errors: list[BaseException] = []

    def elsewhere(world: ad.blocking.World) -> None:
        try:
            world.sleep(0.0)
        except ad.LocalProtocolError as error:
            errors.append(error)

    async def inside() -> None:
        ad.blocking.barrier()

    with ad.blocking.open_world() as world:
        thread = threading.Thread(target=elsewhere, args=[world])
        thread.start()
        thread.join()
        assert "in thread 'Thread" in str(errors[0])
        with pytest.raises(ad.LocalProtocolError, match=r"await asyncdist\.barrier|inside another blocking call"):
            world.call(inside)
        world.compute(elsewhere, world)
        assert "in thread" in str(errors[1]), (
            "the calling thread is in a blocking call, so the message must name the thread"
        )
        for opens in (ad.blocking.open_world().__enter__, lambda: ad.run(inside), lambda: ad.simulate(inside, ranks=2)):
            with pytest.raises((ad.LocalProtocolError, TypeError)):
                opens()
        world.safe_point()

    async def main(_: ad.World) -> None:
        with pytest.raises(
            ad.LocalProtocolError, match=r"cannot be called in a coroutine, .*: await asyncdist\.barrier instead"
        ):
            ad.blocking.barrier()
        with pytest.raises(ad.LocalProtocolError, match="<World rank 0 of 1"):
            ad.blocking.open_world().__enter__()

    ad.run(main)


def test_a_world_of_an_ended_thread_is_left_in_another() -> None:
    """Regression: a script that trained in a thread failed at its end, because it could not leave the policy."""
    from asyncdist.integrations.pytorch import SelectiveAveraging

    block = ad.blocking.open_world()

    def train() -> SelectiveAveraging:
        block.__enter__()
        model = nn.Linear(2, 1)
        averaging = SelectiveAveraging(model, torch.optim.SGD(model.parameters(), lr=0.1), average_every=1)
        averaging.step(loss=1.0)
        return averaging

    with concurrent.futures.ThreadPoolExecutor(1) as threads:
        averaging = threads.submit(train).result()
    assert averaging.policy is not None
    block.__exit__(None, None, None)
    assert averaging.policy is None


def test_a_second_thread_may_call_after_the_first_has_ended() -> None:
    """Regression: it was refused, unless the system gave it the identifier of the first thread."""
    block = ad.blocking.open_world()
    with concurrent.futures.ThreadPoolExecutor(1) as first:
        world = first.submit(block.__enter__).result()
    with concurrent.futures.ThreadPoolExecutor(1) as idle, concurrent.futures.ThreadPoolExecutor(1) as second:
        idle.submit(int).result()  # this thread probably has the identifier of the first
        second.submit(world.safe_point).result()
        assert "cannot be made in thread" in str(idle.submit(world.safe_point).exception())
    block.__exit__(None, None, None)


def test_a_policy_by_itself_opens_a_world_for_its_block() -> None:
    with ad.blocking.policy(made_policy()) as policy:
        assert not policy.step(1.0)
        assert ad.blocking.current_world().size == 1
    with pytest.raises(RuntimeError, match="open_world"):
        ad.blocking.current_world()


def test_beside_a_running_loop() -> None:
    """A blocking world also works while a loop is running, as in a notebook's cell."""

    async def cell() -> int:
        mine = asyncio.get_running_loop()
        with ad.blocking.open_world() as world:
            world.sleep(0.001)
            assert asyncio.get_running_loop() is mine
            size = int(ad.blocking.all_reduce(torch.tensor(world.size)))
        await asyncio.sleep(0)
        return size

    assert asyncio.run(cell()) == 1


def test_errors_of_the_block_are_raised_as_they_are_and_once() -> None:
    with pytest.raises(ZeroDivisionError) as caught, ad.blocking.open_world() as world:
        world.safe_point()
        raise ZeroDivisionError("mine")
    assert caught.value.args == ("mine",) and caught.value.__context__ is None

    def main(world: ad.blocking.World) -> None:
        if world.rank == 1:
            raise ZeroDivisionError("of rank 1")
        with pytest.raises(ad.RankLostError, match="of rank 1"):
            while True:
                world.safe_point()
        world.safe_point()

    with pytest.raises(ZeroDivisionError, match="of rank 1"):
        ad.run_local(ad.blocking.hosted(main), ranks=2)


@pytest.mark.parametrize("inside", [False, True], ids=["computing", "in a call"])
@pytest.mark.parametrize(
    ("number", "kind"), [(signal.SIGINT, KeyboardInterrupt), (signal.SIGTERM, SystemExit)], ids=["SIGINT", "SIGTERM"]
)
def test_a_signal_is_raised_in_the_block_where_it_is(
    number: signal.Signals, kind: type[BaseException], inside: bool
) -> None:
    before, seen = signal.getsignal(number), []
    with pytest.raises(kind), ad.blocking.open_world() as world:
        try:
            if inside:
                world.awaited.spawn(_killed(number))
                world.sleep(60.0)
            else:
                os.kill(os.getpid(), number)
                for _ in range(1000):
                    pass
            seen.append("went on")
        except kind:
            seen.append("raised")
            world.safe_point()  # cleanup at the end must still work
            raise
    assert seen == ["raised"]
    assert signal.getsignal(number) is before


async def _killed(number: signal.Signals) -> None:
    os.kill(os.getpid(), number)


def test_rank_killed_in_a_simulation_runs_no_further_line() -> None:
    lines: list[tuple[int, int]] = []

    def main(world: ad.blocking.World) -> int:
        for step in range(20):
            lines.append((world.rank, step))
            world.sleep(0.1)
        return world.rank

    report = ad.simulate(ad.blocking.hosted(main), ranks=3, faults=[ad.simulation.Kill(1, at_s=0.55)])
    assert report.killed_ranks == (1,) or list(report.killed_ranks) == [1]
    assert len([line for line in lines if line[0] == 1]) < 8
    assert [report.results[rank] for rank in (0, 2)] == [0, 2]


def test_modes_of_torch_are_each_ranks_own() -> None:
    def main(world: ad.blocking.World) -> list[bool]:
        seen = []
        for _ in range(3):
            with torch.set_grad_enabled(world.rank == 0):
                world.safe_point()
                seen.append(torch.is_grad_enabled())
        return seen

    expected = [[True] * 3, [False] * 3, [False] * 3]
    assert ad.run_local(ad.blocking.hosted(main), ranks=3) == expected
    assert list(ad.simulate(ad.blocking.hosted(main), ranks=3, seed=5).results) == expected


def test_an_integration_that_is_left_open_ends_with_its_rank() -> None:
    """Regression: hosted ranks waited forever for each other's policies, which were never left."""
    from asyncdist.integrations.pytorch import SelectiveAveraging

    def main(world: ad.blocking.World) -> None:
        model = nn.Linear(2, 1)
        averaging = SelectiveAveraging(model, torch.optim.SGD(model.parameters(), lr=0.1), 2)
        for step in range(5):
            averaging.step(world.rank + step)
        left.append(averaging)

    left: list[SelectiveAveraging] = []
    ad.run_local(ad.blocking.hosted(main), ranks=2, strict=True)
    with pytest.raises(TypeError, match="cannot be copied, because it holds the policy"):
        copy.deepcopy(left[0])
    ad.simulate(ad.blocking.hosted(main), ranks=2, seed=3, strict=True).value()
    assert [averaging.policy for averaging in left] == [None] * 4
    with pytest.raises(ad.ClosedError, match="this averaging has ended, with close"):  # an assertion told nothing
        left[0].step(1.0)


def test_blocking_call_in_a_coroutine_is_refused_with_the_remedy() -> None:
    from asyncdist.integrations.pytorch import SelectiveAveraging

    async def main(_: ad.World) -> None:
        with pytest.raises(ad.LocalProtocolError, match="write async with AsyncSelectiveAveragingPolicy"):
            ad.blocking.policy(made_policy()).__enter__()
        model = nn.Linear(2, 1)
        with pytest.raises(ad.LocalProtocolError, match=r"enter a policy of asyncdist\.protocols with async with"):
            SelectiveAveraging(model, torch.optim.SGD(model.parameters(), lr=0.1), 10)
        with pytest.raises(ad.LocalProtocolError, match=r"await asyncdist\.barrier"):
            ad.blocking.barrier()

    ad.run_local(main, ranks=1, strict=True)


@pytest.mark.parametrize("world", ["local", "simulated"])
def test_ranks_of_an_integration_begin_equal_and_draw_apart(world: str) -> None:
    """Regression: a training loop that sets the seed itself gave all ranks the same random numbers."""
    from asyncdist.integrations.pytorch import SelectiveAveraging

    def main(_: ad.blocking.World) -> tuple[list[float], list[int]]:
        torch.manual_seed(0)
        model = nn.Linear(8, 1)
        first = model.weight.flatten().tolist()
        with SelectiveAveraging(model, torch.optim.SGD(model.parameters(), lr=0.1), 100):
            return first, torch.randperm(64).tolist()

    hosted = ad.blocking.hosted(main)
    ran = ad.run_local(hosted, ranks=3) if world == "local" else ad.simulate(hosted, ranks=3, seed=1).results
    weights, orders = zip(*ran, strict=True)
    assert weights[0] == weights[1] == weights[2]
    assert len(set(map(tuple, orders))) == 3


def test_a_failed_rank_throws_its_open_policies_away_in_silence(capsys: pytest.CaptureFixture[str]) -> None:
    """Regression: "Exception ignored in ... ClosedError: this world is closed" was printed below the rank's error."""
    from asyncdist.integrations.pytorch import SelectiveAveraging

    def main(world: ad.blocking.World) -> None:
        model = nn.Linear(2, 1)
        averaging = SelectiveAveraging(model, torch.optim.SGD(model.parameters(), lr=0.1), 2)
        averaging.step(1.0)
        if world.rank == 1:
            raise ZeroDivisionError("mine")
        world.sleep(100.0)

    ignored: list[str] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("sys.unraisablehook", lambda found: ignored.append(repr(found.exc_value)))
        with pytest.raises(ZeroDivisionError, match="mine"):
            ad.run_local(ad.blocking.hosted(main), ranks=2)
        gc.collect()
    assert ignored == []


@pytest.mark.parametrize("kind", [AsyncSelectiveAveragingPolicy, DiLoCoPolicy])
def test_a_population_is_saved_with_its_blocking_policy(kind: type[Any], tmp_path: Path) -> None:
    """Regression: save_population called the blocking policy's settle, which raised an error."""
    model = nn.Linear(2, 1)
    with ad.blocking.policy(kind(model, torch.optim.SGD(model.parameters(), lr=0.1), average_every=2)) as policy:
        for _ in range(3):
            policy.step(loss=1.0)
        ad.blocking.save_population(tmp_path, model, policy=policy)
        assert ad.blocking.async_save_population(tmp_path, model, policy=policy).folder.name == "checkpoint-000002"
    again = kind(model, torch.optim.SGD(model.parameters(), lr=0.1), average_every=2)
    with ad.blocking.open_world():
        ad.blocking.load_population(tmp_path, model, policy=again)
    assert again.iteration == 3


@pytest.mark.parametrize(
    ("call", "wanted"),
    [
        (lambda _: ad.all_reduce(torch.ones(1)), "asyncdist.blocking.all_reduce(...)"),
        (lambda _: ad.all_gather(torch.ones(1)), "asyncdist.blocking.all_gather(...)"),
        (lambda _: ad.barrier(), "asyncdist.blocking.barrier(...)"),
        (lambda _: ad.new_group([0]), "asyncdist.blocking.new_group(...)"),
        (lambda _: ad.surviving_group(), "asyncdist.blocking.surviving_group(...)"),
        (lambda _: ad.new_mesh({"x": 1}), "asyncdist.blocking.new_mesh(...)"),
        (lambda _: ad.average_models(nn.Linear(2, 1)), "asyncdist.blocking.average_models(...)"),
        (lambda _: ad.compute_and_broadcast(int), "asyncdist.blocking.compute_and_broadcast(...)"),
        (lambda _: ad.save_population("unused", nn.Linear(2, 1)), "asyncdist.blocking.save_population(...)"),
        (
            lambda _: ad.async_save_population("unused", nn.Linear(2, 1)),
            "asyncdist.blocking.async_save_population(...)",
        ),
        (lambda _: ad.load_population("unused", nn.Linear(2, 1)), "asyncdist.blocking.load_population(...)"),
        (lambda _: ad.best_of_population(nn.Linear(2, 1), score=1.0), "asyncdist.blocking.best_of_population(...)"),
        (lambda _: ad.new_parallel_groups(1, 1), "asyncdist.blocking.new_parallel_groups(...)"),
        (lambda _: ad.zero_first(True).__aenter__(), "asyncdist.blocking.zero_first(...)"),
        (lambda world: world.compute(int), "asyncdist.blocking.current_world().compute(...)"),
        (lambda world: world.new_group([0]), "asyncdist.blocking.current_world().new_group(...)"),
        (lambda world: world.channel(Word, tag=1).receive(), "through asyncdist.blocking"),
        (lambda _: made_policy().__aenter__(), "asyncdist.blocking.policy(...)"),
    ],
)
def test_awaiting_in_another_loop_names_the_blocking_call(
    call: Callable[[ad.World], Any], wanted: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Regression: in a notebook's cell or asyncio.run, the call waited forever or raised an obscure RuntimeError."""
    monkeypatch.chdir(tmp_path)

    async def cell(world: ad.World) -> Any:
        return await asyncio.wait_for(call(world), 5)

    with ad.blocking.open_world() as world:
        with pytest.raises(ad.LocalProtocolError) as refused:
            asyncio.run(cell(world.awaited))
        assert wanted in str(refused.value) and "asyncdist.blocking.current_world().call(" in str(refused.value)
        ad.blocking.barrier()
    assert not list(tmp_path.iterdir())


def test_awaiting_an_asyncio_world_in_another_loop() -> None:
    async def main(world: ad.World) -> None:
        with pytest.raises(ad.LocalProtocolError, match=r"^barrier cannot .*: await it in the rank's main"):
            await world.compute(contextvars.copy_context().run, asyncio.run, ad.barrier())

    ad.run(main)


def test_callbacks_of_a_policy_can_use_the_world() -> None:
    """Regression: in a block of ``open_world``, a callback that asked for the world got an error."""

    def metric() -> float:
        ranks.append(ad.blocking.current_world().rank)
        return 0.0

    ranks: list[int] = []
    model = nn.Linear(1, 1)
    policy = AsyncSelectiveAveragingPolicy(
        model, torch.optim.SGD(model.parameters(), lr=0.1), average_every=1, metric=metric
    )
    with ad.blocking.open_world(), ad.blocking.policy(policy) as opened:
        opened.step()
    assert ranks == [0]


@pytest.mark.parametrize("ranks", [0, 2])
def test_a_mesh_and_parallel_groups_of_blocking_code_count(ranks: int) -> None:
    """Regression: if the rank had its own process, its calls did not see the mesh and could not set the groups."""

    def main(world: ad.blocking.World) -> list[float]:
        mesh, found = ad.blocking.new_mesh({"DP": world.size}), list[float]()
        with mesh:
            found.append(ad.blocking.psum(torch.ones(1), "DP").item())
            weight = torch.ones(1, requires_grad=True)
            update = ad.gradient_update(lambda _: (weight**2).sum(), torch.optim.SGD([weight], lr=0.25), "DP")
            world.call(update, None, weight)
            found.append(weight.item())
        with pytest.raises(ad.LocalProtocolError, match="no mesh is open"):
            ad.blocking.psum(torch.ones(1), "DP")
        with pytest.raises(ad.LocalProtocolError, match="no parallel groups"):
            ad.parallel_groups()
        groups = ad.blocking.new_parallel_groups()
        world.sleep(0.0)
        assert ad.parallel_groups() is groups
        return found

    if ranks:
        assert ad.run_local(ad.blocking.hosted(main), ranks=ranks) == [[2.0, 0.5]] * ranks
        return

    def alone() -> list[float]:
        with ad.blocking.open_world() as world:
            return main(world)

    assert contextvars.copy_context().run(alone) == [1.0, 0.5]
    with pytest.raises(ad.LocalProtocolError, match="no parallel groups"):
        ad.parallel_groups()


def test_wrapped_objects_can_be_copied() -> None:
    """Regression: RecursionError, because the copy looked for its wrapped object in the object itself."""
    with ad.blocking.open_world() as world:
        channel = world.channel(Word, tag=60)
        copied = copy.copy(channel)
        copied.send(Word("copied"), 0)
        assert channel.receive().message == Word("copied")
        channel.close()
