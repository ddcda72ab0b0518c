"""``launch_subprocesses`` and what belongs to it: configs, process groups, parallel groups; failures of every kind."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support import mpi, torchrun

import asyncdist as ad
from asyncdist import environment, local_host, rank_program
from asyncdist.errors import LocalProtocolError, RankLostError, TransportError
from asyncdist.functional.parallel_groups import ParallelLayout
from asyncdist.launch import guardians, local_ranks, process_groups, rank_process, spawn
from asyncdist.launch.config import MultiprocessConfig
from asyncdist.runtime import run

#: Generous: what hangs is a failure, what is slow is not.
TIMEOUT_S = 100.0

METHODS = ("forkserver", "spawn")


def config(world_size: int = 2, **options: Any) -> MultiprocessConfig:
    return MultiprocessConfig(world_size=world_size, **options)


def launch_here(func: Callable[..., Any], cfg: MultiprocessConfig, *args: Any, **kwargs: Any) -> None:
    ad.launch_subprocesses(func, cfg, None, 0, *args, **kwargs)


# ----------------------------------------------------------------------------------------------------------- configs


def test_what_is_missing_is_filled_in(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    cfg = MultiprocessConfig().resolve()
    assert (cfg.world_size, cfg.local_world_size, cfg.rank, cfg.local_rank) == (4, 4, None, None)
    assert cfg.master_port is not None
    assert 0 < cfg.master_port < 65536
    assert MultiprocessConfig.resolve(MultiprocessConfig(world_size=2, rank=1)).local_rank == 1
    assert MultiprocessConfig(local_world_size=3).resolve().world_size == 3
    on_the_second_host = MultiprocessConfig(world_size=8, local_world_size=4, rank=6, master_port=1).resolve()
    assert on_the_second_host.local_rank == 2
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    alone = MultiprocessConfig().resolve()
    assert (alone.world_size, alone.local_world_size, alone.rank, alone.local_rank) == (1, 1, 0, 0)


def test_resolving_changes_nothing_that_is_there() -> None:
    cfg = MultiprocessConfig(
        rank=1,
        local_rank=0,
        world_size=4,
        local_world_size=2,
        master_addr="10.0.0.1",
        master_port=29500,
        model_parallelism=2,
        backend="gloo",
        launch_method="spawn",
    )
    assert cfg.resolve() == cfg


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"world_size": 0}, "world_size is 0; allowed: a whole number of 1 or more"),
        ({"world_size": 2.0}, "world_size is 2.0; allowed: a whole number of 1 or more"),
        ({"world_size": 2, "local_world_size": 3}, "local_world_size is 3; world_size=2 is the most"),
        (
            {"world_size": 6, "model_parallelism": 4},
            "world_size is 6; model_parallelism=4 times pipeline_parallelism=1",
        ),
        ({"world_size": 6, "model_parallelism": 2, "pipeline_parallelism": 2}, "needs a multiple of 4"),
        ({"model_parallelism": 0}, "model_parallelism is 0"),
        ({"pipeline_parallelism": True}, "pipeline_parallelism is True"),
        ({"rank": 2, "world_size": 2}, "rank is 2; allowed are 0..1, since world_size=2"),
        ({"rank": -1}, "rank is -1; allowed are 0 or more"),
        ({"local_rank": 2, "local_world_size": 2}, "local_rank is 2; allowed are 0..1, since local_world_size=2"),
        ({"rank": 0, "local_rank": 1}, "local_rank is 1; rank=0 is the most"),
        ({"master_port": 65536}, "master_port is 65536; allowed are 1..65535"),
        ({"master_port": "http"}, "master_port is 'http'"),
        ({"master_addr": ""}, "master_addr is ''"),
        ({"master_addr": 5}, "master_addr is 5; it must be"),
        ({"master_addr": "a b"}, "master_addr is 'a b'; it must be"),
        ({"init_method": "env"}, "init_method is 'env'; allowed are 'env://'"),
        ({"init_method": 5}, "init_method is 5; allowed are 'env://', 'tcp://address:port' and 'file://path'"),
        ({"init_method": "udp://h:1"}, "init_method is 'udp://h:1'; allowed are"),
        ({"init_method": "tcp://h"}, "init_method is 'tcp://h'; allowed are"),
        ({"init_method": "tcp://h:http"}, "init_method is 'tcp://h:http'; allowed are"),
        ({"init_method": "file://"}, "init_method is 'file://'; allowed are"),
        (
            {"launch_method": "fork"},
            "launch_method is 'fork': threads and MPI do not survive it; allowed are 'forkserver'",
        ),
        ({"launch_method": "thread"}, "launch_method is 'thread'; allowed are 'forkserver', 'spawn'"),
        ({"backend": "ccl"}, "backend is 'ccl'; torch"),
        ({"backend": "cpu:gloo,gloo"}, "backend is 'cpu:gloo,gloo'"),
        ({"model_parallel_backend": "smoke"}, "model_parallel_backend is 'smoke'"),
        ({"data_parallel_backend": ""}, "data_parallel_backend is ''"),
    ],
)
def test_a_config_that_cannot_be_is_refused(options: dict[str, Any], words: str) -> None:
    with pytest.raises((TypeError, ValueError)) as caught:
        MultiprocessConfig(**options)
    assert words in str(caught.value)


def test_hosts_must_agree_on_a_port() -> None:
    with pytest.raises(ValueError, match="master_port is missing: 8 ranks, 4 of them on this host"):
        MultiprocessConfig(world_size=8, local_world_size=4).resolve()


def test_an_address_that_leads_to_no_host_is_named_before_anybody_waits_there() -> None:
    with pytest.raises(ValueError, match=r"master_addr='no-host\.invalid' leads to no host"):
        config(master_addr="no-host.invalid").resolve()


# ---------------------------------------------------------------------------------------------------------- backends


def test_the_backend_is_the_one_that_was_set(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("ASYNCDIST_BACKEND", raising=False)
    assert ad.default_backend() == ("nccl" if torch.cuda.is_available() and dist.is_nccl_available() else "gloo")
    assert ad.get_distributed_backend() == ad.default_backend()
    monkeypatch.setenv("ASYNCDIST_BACKEND", "")  # so that it is taken back afterwards
    ad.set_distributed_backend("CPU:gloo")
    assert ad.get_distributed_backend() == dist.Backend("cpu:gloo")


@pytest.mark.parametrize("backend", ["ccl", "", None, "gloo,nccl", "undefined"])
def test_a_backend_that_torch_does_not_have_is_named_with_those_it_has(backend: Any) -> None:
    with pytest.raises(ValueError, match=f"backend is {backend!r}; torch .*'gloo'"):
        ad.set_distributed_backend(backend)


def test_a_backend_that_somebody_registers_is_allowed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dist.Backend, "backend_list", [*dist.Backend.backend_list, "ccl"])
    assert MultiprocessConfig(backend="ccl").backend == "ccl"


# ---------------------------------------------------------------------------------------------------- parallel groups


def test_the_layout_of_8_ranks() -> None:
    layout = ParallelLayout(8, model_parallelism=2, pipeline_parallelism=2)
    assert layout.model_groups() == [[0, 1], [2, 3], [4, 5], [6, 7]]
    assert layout.pipeline_groups() == [[0, 2], [1, 3], [4, 6], [5, 7]]
    assert layout.data_groups() == [[0, 4], [1, 5], [2, 6], [3, 7]]
    assert layout.data_parallelism == 2
    assert layout.ranks_of(5) == ([4, 5], [5, 7], [1, 5])


@pytest.mark.parametrize("size", [1, 2, 6, 12, 24])
@pytest.mark.parametrize("model", [1, 2, 3])
@pytest.mark.parametrize("pipeline", [1, 2, 4])
def test_every_rank_is_in_one_group_of_each_kind(size: int, model: int, pipeline: int) -> None:
    if size % (model * pipeline):
        with pytest.raises(ValueError, match="needs a multiple of"):
            ParallelLayout(size, model, pipeline)
        return
    layout = ParallelLayout(size, model, pipeline)
    kinds = (
        (layout.model_groups(), model),
        (layout.pipeline_groups(), pipeline),
        (layout.data_groups(), layout.data_parallelism),
    )
    for groups, width in kinds:
        assert sorted(rank for group in groups for rank in group) == list(range(size))
        assert {len(group) for group in groups} == {width}
    for rank in range(size):
        shared = set.intersection(*map(set, layout.ranks_of(rank)))
        assert shared == {rank}


@pytest.mark.parametrize("rank", [-1, 8, "0"])
def test_a_rank_outside_the_layout_is_refused(rank: Any) -> None:
    with pytest.raises(ValueError, match=r"allowed are 0\.\.7"):
        ParallelLayout(8).ranks_of(rank)


async def use_groups(world: ad.World) -> None:
    groups = await ad.new_parallel_groups(2, 2)
    assert ad.parallel_groups() is groups
    expected = ParallelLayout(world.size, 2, 2).ranks_of(world.rank)
    assert [list(group.ranks) for group in (groups.model, groups.pipeline, groups.data)] == list(expected)
    for group in (groups.data, groups.model, groups.pipeline):
        total = await ad.all_reduce(torch.tensor([world.rank]), group=group)
        assert total.item() == sum(group.ranks)


def test_a_coroutine_gets_groups_of_its_world() -> None:
    ad.run_local(use_groups, ranks=8, strict=True)
    ad.simulate(use_groups, ranks=8, seed=3)
    with pytest.raises(LocalProtocolError, match="no parallel groups have been made here"):
        ad.parallel_groups()


# --------------------------------------------------------------------------------------------------------- all to all


def test_all_to_all_of_one_tensor() -> None:
    async def main(world: ad.World) -> None:
        mine = torch.arange(6).reshape(6, 1) + 10 * world.rank
        parts = await ad.all_to_all(mine)
        assert parts.tolist() == [[2 * world.rank + i + 10 * source] for source in range(3) for i in range(2)]
        listed = await ad.all_to_all(list(mine.chunk(3)))
        assert torch.equal(torch.cat(listed), parts)
        assert (await ad.all_to_all(torch.empty(0, 2))).shape == (0, 2)
        for wrong in (torch.zeros(4), torch.tensor(1.0)):
            with pytest.raises(ValueError, match="must be a multiple of 3 ranks"):
                await ad.all_to_all(wrong)
        with pytest.raises(TypeError, match=r"asyncdist\.launch\.process_groups\.all_to_all"):
            await ad.all_to_all(mine, object())  # type: ignore[call-overload]

    ad.run_local(main, ranks=3, strict=True)


def test_without_a_process_group_it_says_how_to_get_one() -> None:
    with pytest.raises(LocalProtocolError, match="init_dist"):
        process_groups.all_to_all(torch.zeros(2))
    with pytest.raises(LocalProtocolError, match="init_dist"):
        ad.init_parallel_groups()


# ------------------------------------------------------------------------------------------------- real ranks that work


def report(folder: str, value: object) -> None:
    partial = Path(folder, f"{os.getpid()}.partial")
    partial.write_text(json.dumps(value))
    partial.rename(Path(folder, f"{dist.get_rank() if dist.is_initialized() else os.environ['RANK']}.json"))


def reports(folder: Path) -> list[Any]:
    return [json.loads(path.read_text()) for path in sorted(folder.glob("*.json"))]


def use_process_groups(folder: str, *args: Any, **kwargs: Any) -> None:
    rank = dist.get_rank()
    groups = ad.parallel_groups()
    members = [dist.get_process_group_ranks(group) for group in (groups.model, groups.pipeline, groups.data)]
    assert tuple(members) == groups.layout.ranks_of(rank)
    total = torch.tensor([rank])
    dist.all_reduce(total, group=groups.data)
    mine = (torch.arange(4.0) + 10 * rank).requires_grad_()
    parts = process_groups.all_to_all(mine)
    (parts * torch.arange(4.0)).sum().backward()
    pair = process_groups.all_to_all(torch.tensor([[rank], [rank]]), groups.model)
    try:
        process_groups.all_to_all(torch.zeros(3))
        refused = "nothing"
    except ValueError as error:
        refused = str(error)
    names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR")
    values = {
        "variables": [os.environ[name] for name in names],
        "total": total.item(),
        "parts": parts.tolist(),
        "gradient": mine.grad.tolist() if mine.grad is not None else None,
        "pair": pair.flatten().tolist(),
        "refused": refused,
        "backend": dist.get_backend(),
        "given": [args, kwargs],
        "threads": torch.get_num_threads(),
    }
    report(folder, values)


@pytest.mark.parametrize("method", METHODS)
def test_a_plain_function_finds_its_process_groups(tmp_path: Path, method: str) -> None:
    cfg = config(4, model_parallelism=2, launch_method=method)
    launch_here(use_process_groups, cfg, str(tmp_path), 7, name="x")
    found = reports(tmp_path)
    assert len(found) == 4
    for rank, values in enumerate(found):
        assert values == {
            "variables": [str(rank), str(rank), "4", "4", "127.0.0.1"],
            "total": (2, 4)[rank % 2],
            "parts": [rank + 10.0 * source for source in range(4)],
            "gradient": [float(rank)] * 4,
            "pair": [rank // 2 * 2, rank // 2 * 2 + 1],
            "refused": "input has shape (3,); its first dimension must be a multiple of 4 ranks",
            "backend": ad.default_backend(),
            "given": [[7], {"name": "x"}],
            "threads": values["threads"]
            if os.environ.get("OMP_NUM_THREADS")
            else max(1, local_host.available_cores() // 4),
        }


def note_rank(folder: str) -> None:
    report(folder, [dist.get_rank(), int(os.environ["LOCAL_RANK"]), dist.get_world_size(), dist.get_backend()])


def test_two_hosts_make_one_world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two launchers, each with its offset; and a backend that was set goes to the ranks of both."""
    monkeypatch.setenv("ASYNCDIST_BACKEND", "")
    ad.set_distributed_backend("cpu:gloo")
    cfg = MultiprocessConfig(world_size=4, local_world_size=2, master_port=local_host.find_free_port())
    first = threading.Thread(target=ad.launch_subprocesses, args=(note_rank, cfg, None, 0, str(tmp_path)))
    first.start()
    ad.launch_subprocesses(note_rank, cfg, None, 2, str(tmp_path))
    first.join(TIMEOUT_S)
    assert [value[:3] for value in reports(tmp_path)] == [[0, 0, 4], [1, 1, 4], [2, 0, 4], [3, 1, 4]]
    assert {value[3] for value in reports(tmp_path)} <= {"gloo", "cpu:gloo"}


def test_setup_runs_here_before_anything_is_started(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail() -> None:
        raise OSError("no data here")

    monkeypatch.setattr(spawn, "_start_all", lambda *_: pytest.fail("a rank was started"))
    with pytest.raises(OSError, match="no data here"):
        ad.launch_subprocesses(note_rank, config(), fail, 0, str(tmp_path))


def test_init_and_run_is_one_rank_of_this_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in local_ranks.rank_variables(0, 1, local_rank=0, local_size=1, address="", port=1, run_id=""):
        monkeypatch.setenv(name, "")  # so that they are taken back afterwards
    cfg = MultiprocessConfig(world_size=1, init_method=f"file://{tmp_path / 'store'}")
    ad.init_and_run(note_rank, cfg, str(tmp_path))
    assert [value[:3] for value in reports(tmp_path)] == [[0, 0, 1]]
    assert not dist.is_initialized()
    with pytest.raises(LocalProtocolError, match="no parallel groups"):
        ad.parallel_groups()
    with pytest.raises(ValueError, match=r"rank is missing; allowed are 0\.\.1"):
        ad.init_and_run(note_rank, config(2), str(tmp_path))
    with pytest.raises(ValueError, match=r"rank is 2; allowed are 0\.\.1"):
        ad.init_dist(2, 0, 2, 2, "127.0.0.1", 1)


def test_processes_of_ones_own_make_a_process_group() -> None:
    """Started by somebody else, who says who they are; what torch's own collectives then come to is the oracle."""
    done = torchrun.run_source(
        3,
        """
        import os, sys
        import torch
        import torch.distributed as dist
        import asyncdist as ad
        from support.mpi import report

        rank, port = int(os.environ["RANK"]), int(sys.argv[1])
        ad.init_dist(2 - rank, rank, 3, 3, "127.0.0.1", port, backend="gloo")
        total = torch.tensor([10 ** dist.get_rank()])
        dist.all_reduce(total)
        report(rank, [dist.get_rank(), dist.get_world_size(), dist.get_backend(), total.item(), os.environ["RANK"]])
        dist.destroy_process_group()
        """,
        torchrun.free_port(),
    ).check()
    assert done.reports == {rank: [2 - rank, 3, "gloo", 111, str(2 - rank)] for rank in range(3)}


def test_a_process_group_of_one_rank_is_made_from_the_backend_alone(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no_such_backend"):
        ad.init_process_group_from_backend("no_such_backend")
    ad.init_process_group_from_backend("gloo", init_method=f"file://{tmp_path / 'store'}", rank=0, world_size=1)
    try:
        assert dist.get_backend() == "gloo"
        assert ad.get_distributed_backend() == "gloo"
        tensor = torch.ones(2)
        dist.all_reduce(tensor)
        assert tensor.tolist() == [1.0, 1.0]
    finally:
        dist.destroy_process_group()


# -------------------------------------------------------------------------------------------------- coroutine functions


async def coroutine(world: Any, folder: str, *, name: str) -> None:
    groups = ad.parallel_groups()
    names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "TORCHELASTIC_USE_AGENT_STORE")
    report(folder, [name, world.rank, list(groups.model.ranks), *(os.environ[one] for one in names)])


def test_a_coroutine_function_is_run_with_a_world_on_the_torch_transport(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In this process, with the local transport in place of torch's: the variables and the call are what is shown."""
    for name in local_ranks.rank_variables(0, 1, local_rank=0, local_size=1, address="", port=1, run_id=""):
        monkeypatch.setenv(name, "")
    asked = []

    def stand_in(main: Any, *args: Any, transport: str) -> None:
        asked.append((transport, environment.detect()))
        run.run_local(main, *args, ranks=1)

    monkeypatch.setattr(run, "run", stand_in)
    ad.init_and_run(coroutine, MultiprocessConfig(world_size=1, master_port=7777), str(tmp_path), name="x")
    assert asked == [("torch", environment.Launch("torch", 1, 0, "TORCHELASTIC_RUN_ID"))]
    assert reports(tmp_path) == [["x", 0, [0], "0", "0", "1", "1", "127.0.0.1", "False"]]


async def talk(world: ad.World, folder: str, *, fails: bool) -> None:
    total = await ad.all_reduce(torch.tensor([world.rank]), group=ad.parallel_groups().data)
    report(folder, [world.rank, world.size, total.item()])
    await ad.barrier()
    if fails and world.rank == 1:
        raise ValueError("story of rank 1")
    await ad.barrier()


@pytest.mark.parametrize("fails", [False, True])
def test_ranks_that_are_coroutines_talk(tmp_path: Path, fails: bool, capfd: pytest.CaptureFixture[str]) -> None:
    cfg = config(4, model_parallelism=2)
    if fails:
        with pytest.raises(RuntimeError, match=r"(?s)rank 1 failed:.*ValueError: story of rank 1") as caught:
            launch_here(talk, cfg, str(tmp_path), fails=True)
        text = str(caught.value)
        assert text.count("Traceback") == text.count("  File ") == 1 and ", in talk" in text, "the user's frame alone"
        assert "story of rank 1" not in capfd.readouterr().err, "what is raised here is not printed there"
    else:
        launch_here(talk, cfg, str(tmp_path), fails=False)
    assert reports(tmp_path) == [[0, 4, 2], [1, 4, 4], [2, 4, 2], [3, 4, 4]]


async def shards(world: ad.World) -> None:
    mesh = await ad.new_mesh({"POP": world.size})

    def function(row: torch.Tensor) -> torch.Tensor:
        if world.rank == 1:
            raise ValueError("story of rank 1")
        return row

    await ad.shmap_map(function, mesh, "POP", "POP")(torch.ones(world.size))


def test_the_rank_whose_function_failed_is_the_error_not_those_that_heard_of_it() -> None:
    with pytest.raises(RuntimeError, match=r"(?s)^rank 1 failed:.*ValueError: story of rank 1") as caught:
        launch_here(shards, config())
    assert ", in function" in str(caught.value)


def test_a_coroutine_function_has_no_process_group_to_choose_a_backend_for() -> None:
    with pytest.raises(ValueError, match="data_parallel_backend='gloo': a coroutine function is given a world"):
        launch_here(coroutine, config(data_parallel_backend="gloo"))
    with pytest.raises(ValueError, match="init_method='tcp://h:1': a coroutine function is given a world"):
        launch_here(coroutine, config(init_method="tcp://h:1"))


class Trainer:
    """Its objects are called like a coroutine function."""

    async def __call__(self, world: ad.World, folder: str) -> None:
        report(folder, [world.rank, world.transport_name])


def test_an_object_with_an_async_call_is_a_coroutine_function(tmp_path: Path) -> None:
    """It was called as a plain function: the coroutine was never awaited, and all seemed well."""
    launch_here(functools.partial(Trainer()), config(), str(tmp_path))
    assert reports(tmp_path) == [[0, "torch"], [1, "torch"]]


# ------------------------------------------------------------------------------------------------------------ failures


def note_pid(folder: str) -> None:
    Path(folder, f"{os.getpid()}.pid").touch()


def fail_on_rank_1(folder: str, how: str) -> None:
    note_pid(folder)
    dist.barrier()
    if dist.get_rank() == 1:
        if how == "raise":
            raise RuntimeError("story of rank 1")
        if how == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        sys.exit(7)
    if how == "raise":
        dist.barrier()  # fails, for rank 1 has gone: not the story that the caller needs
    time.sleep(600)


def is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except FileNotFoundError:
        return False


def wait_gone(pids: list[int]) -> None:
    deadline = time.monotonic() + TIMEOUT_S
    while left := [pid for pid in pids if is_alive(pid)]:
        assert time.monotonic() < deadline, f"{left} are left"
        time.sleep(0.02)


def pids_in(folder: Path, count: int) -> list[int]:
    deadline = time.monotonic() + TIMEOUT_S
    while len(found := list(folder.glob("*.pid"))) < count:
        assert time.monotonic() < deadline, f"{len(found)} of {count} ranks have started"
        time.sleep(0.02)
    return [int(path.stem) for path in found]


@pytest.mark.parametrize(
    ("method", "how", "words"),
    [
        ("forkserver", "raise", ["rank 1 failed:", "story of rank 1", "in fail_on_rank_1"]),
        ("spawn", "raise", ["rank 1 failed:", "story of rank 1", "in fail_on_rank_1"]),
        ("forkserver", "kill", ["rank 1 was killed by SIGKILL"]),
        ("spawn", "kill", ["rank 1 was killed by SIGKILL"]),
        ("forkserver", "exit", ["rank 1 exited with code 7"]),
    ],
)
def test_a_failing_rank_is_the_error_and_the_others_are_stopped(
    tmp_path: Path, method: str, how: str, words: list[str]
) -> None:
    ranks = 2 if method == "spawn" else 3  # each rank that is spawned imports torch
    with pytest.raises(RuntimeError) as caught:
        launch_here(fail_on_rank_1, config(ranks, launch_method=method), str(tmp_path), how)
    assert [word for word in words if word not in str(caught.value)] == []
    assert [pid for pid in pids_in(tmp_path, ranks) if is_alive(pid)] == []


class Stop(BaseException):
    """Derives from BaseException alone, as asyncio.CancelledError does."""


def stop(code: int | None) -> None:
    if code is not None:
        sys.exit(code)
    raise Stop("story")


@pytest.mark.parametrize(("code", "words"), [(None, "Stop: story"), (256, "rank 0 exited with 256")])
def test_an_end_that_is_no_exception_or_looks_like_success_is_told(code: int | None, words: str) -> None:
    """It was "exited with code 1" in place of the traceback, and 256 is 0 to the system."""
    with pytest.raises(RuntimeError, match=words):
        launch_here(stop, config(1), code)


@pytest.mark.parametrize(("code", "expected"), [(None, 0), (0, 0), (3, 3), (256, 1), (-1, 255), (2**40, 1), ("no", 1)])
def test_no_exit_code_of_a_failure_is_0(code: object, expected: int) -> None:
    assert rank_program.exit_code(code) == expected


def start_children(folder: str, how: str) -> None:
    """Two that live on: in the rank's process group, where it holds all its files, and in a session of its own."""
    if os.fork() == 0:
        note_pid(folder)
        time.sleep(600)
    Path(folder, f"{subprocess.Popen(['sleep', '600'], start_new_session=True).pid}.pid").touch()
    pids_in(Path(folder), 2)
    if how == "raise":
        raise ValueError("story")


@pytest.mark.skipif(not guardians.ARE_HERE, reason="elsewhere only its process group ends with a rank")
@pytest.mark.parametrize(("method", "how"), [("forkserver", "return"), ("spawn", "raise")])
def test_what_a_rank_has_started_ends_with_it(tmp_path: Path, method: str, how: str) -> None:
    launching = pytest.raises(RuntimeError, match="story") if how == "raise" else contextlib.nullcontext()
    with launching:
        launch_here(start_children, config(1, launch_method=method), str(tmp_path), how)
    assert [pid for pid in pids_in(tmp_path, 2) if is_alive(pid)] == []


def die_beside_a_child(folder: str) -> None:
    if os.fork() == 0:
        note_pid(folder)
        time.sleep(600)
    pids_in(Path(folder), 1)
    os.kill(os.getpid(), 9)


def test_a_killed_rank_is_told_though_its_child_lives(tmp_path: Path) -> None:
    """With "spawn" the child held what tells of the rank's end, and the launcher waited for it."""
    with pytest.raises(RuntimeError, match="rank 0 was killed by SIGKILL"):
        launch_here(die_beside_a_child, config(1, launch_method="spawn"), str(tmp_path))
    wait_gone(pids_in(tmp_path, 1))


def vanish(folder: str) -> None:
    note_pid(folder)
    dist.barrier()
    if dist.get_rank() == 1:
        os._exit(0)
    dist.barrier()


async def vanish_from_a_world(world: ad.World, folder: str) -> None:
    note_pid(folder)
    await ad.barrier()
    if world.rank == 1:
        os._exit(0)
    await ad.barrier()


def test_a_rank_that_failed_is_told_where_sigchld_is_ignored() -> None:
    """With "spawn" the launcher waited for ever: the kernel keeps no exit codes then."""
    before = signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    try:
        with pytest.raises(RuntimeError, match="rank 0 exited with code 3"):
            launch_here(os._exit, config(1, launch_method="spawn"), 3)
        assert signal.getsignal(signal.SIGCHLD) is signal.SIG_IGN
        with pytest.raises(RuntimeError, match="SIGCHLD is ignored in this process"):
            asyncio.run(asyncio.to_thread(launch_here, os._exit, config(1), 3))
    finally:
        signal.signal(signal.SIGCHLD, before)


@pytest.mark.parametrize("func", [vanish, vanish_from_a_world])
def test_a_rank_that_left_with_0_is_named_by_whom_its_absence_ends(tmp_path: Path, func: Callable[..., Any]) -> None:
    """What the others say of it was the error, "connection reset by peer": the launcher knows which peer.

    What comes from torch is told too, since it may have another cause; that a world has lost the rank is not.
    """
    with pytest.raises(RuntimeError, match=r"^rank 1 ended with exit code 0 before its function had ret") as caught:
        launch_here(func, config(3), str(tmp_path))
    told = str(caught.value).partition(" returned")[2]
    if func is vanish:
        assert re.match(r"; rank [02] failed:\n.*Error: .*gloo", told, re.DOTALL), told
    else:
        assert told == ""
    assert [pid for pid in pids_in(tmp_path, 3) if is_alive(pid)] == []


def leave_early(folder: str) -> None:
    note_pid(folder)
    if dist.get_rank() == 1:
        sys.exit(0)


def test_a_rank_that_calls_exit_with_0_has_returned(tmp_path: Path) -> None:
    launch_here(leave_early, config(2), str(tmp_path))
    assert len(pids_in(tmp_path, 2)) == 2


def lose(folder: str) -> None:
    """Rank 0 tells first that it lost rank 1, which tells why later."""
    note_pid(folder)
    if dist.get_rank() == 0:
        raise RankLostError("rank 1 is lost", rank=1)
    pids_in(Path(folder), 2)
    time.sleep(0.5)
    raise ValueError("the cause")


def test_the_rank_that_failed_by_itself_is_named_and_not_one_that_lost_it(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match=r"(?s)rank 1 failed:.*ValueError: the cause"):
        launch_here(lose, config(), str(tmp_path))


def die(folder: str, how: str) -> None:
    """Rank 1 dies; rank 0 hears of it from gloo, and tells that first."""
    note_pid(folder)
    dist.barrier()
    if dist.get_rank() == 1:
        pids_in(Path(folder), 3)
        if how == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        sys.exit("no data here")
    Path(folder, f"{-1 - dist.get_rank()}.pid").touch()
    raise RuntimeError("Connection closed by peer")


@pytest.mark.parametrize(("how", "words"), [("kill", "was killed by SIGKILL"), ("exit", "exited with 'no data here'")])
def test_the_rank_that_died_is_named_and_not_one_that_lost_its_connection(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, how: str, words: str
) -> None:
    monkeypatch.setitem(spawn._PATIENCE_S, spawn.PERHAPS, TIMEOUT_S)
    with pytest.raises(RuntimeError, match=f"^rank 1 {words}$"):
        launch_here(die, config(), str(tmp_path), how)


def nothing() -> None:
    raise AssertionError("it was called")


def test_a_host_of_rank_0_that_does_not_answer_is_named_in_time(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """Torch's own patience is half an hour."""
    for name in local_ranks.rank_variables(0, 1, local_rank=0, local_size=1, address="", port=1, run_id=""):
        monkeypatch.setenv(name, "")
    monkeypatch.setattr(rank_process, "START_TIMEOUT_S", 1.0)
    port = local_host.find_free_port()
    cfg = MultiprocessConfig(rank=1, world_size=2, local_world_size=1, master_port=port)
    with pytest.raises(TransportError, match=f"rank 1 did not meet the other 1 at 127.0.0.1:{port} within 1 s: "):
        ad.init_and_run(nothing, cfg)
    assert not dist.is_initialized()
    assert capfd.readouterr().err == "", "torch prints the stack of each try"
    with pytest.raises(ValueError, match="timeout_s is 0; it must be above 0 seconds"):
        ad.init_dist(0, 0, 1, 1, "127.0.0.1", port, timeout_s=0)


def test_a_master_port_that_is_taken_is_named_before_a_rank_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(spawn, "_start_all", lambda *_: pytest.fail("a rank was started"))
    with socket.socket() as holder:
        holder.bind(("127.0.0.1", 0))
        holder.listen()
        port = holder.getsockname()[1]
        with pytest.raises(ValueError, match=f"master_port is {port}, where rank 0 of this host cannot listen"):
            launch_here(note_rank, config(master_port=port), "folder")
    local_host.probe_port(port)


def ignore_signals(folder: str) -> None:
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, signal.SIG_IGN)
    note_pid(folder)
    if dist.get_rank() == 0:
        pids_in(Path(folder), 2)
        raise ValueError("story")
    time.sleep(600)


def test_a_rank_that_does_not_stop_is_killed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(spawn, "STOP_S", 0.2)
    with pytest.raises(RuntimeError, match="story"):
        launch_here(ignore_signals, config(), str(tmp_path))
    assert [pid for pid in pids_in(tmp_path, 2) if is_alive(pid)] == []


@pytest.mark.parametrize("method", METHODS)
def test_what_cannot_travel_is_refused_before_a_rank_starts(method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(spawn, "_wait_for_all", lambda *_: pytest.fail("a rank was started"))
    with pytest.raises(TypeError, match=r"<lambda>.*must be taken to another process.*can be imported by name"):
        launch_here(lambda: None, config(launch_method=method))
    with pytest.raises(TypeError, match=r"note_rank.*must be taken to another process.*arguments that can be pickled"):
        launch_here(note_rank, config(launch_method=method), threading.Lock())


@pytest.mark.parametrize(
    ("func", "cfg", "offset", "words"),
    [
        ("name", config(), 0, "func is 'name'; it must be a function"),
        (note_rank, config(rank=1), 0, "rank is 1; every child is given its own"),
        (note_rank, config(), 1, "rank_offset is 1; with world_size=2 and local_world_size=2 allowed are 0..0"),
        (note_rank, config(), -1, "rank_offset is -1"),
        (note_rank, config(), 0.0, "rank_offset is 0.0"),
        (note_rank, 4, 0, "cfg is 4; it must be a MultiprocessConfig"),
        (note_rank, {"world_size": 2}, 0, "cfg is {'world_size': 2}; it must be a MultiprocessConfig"),
    ],
)
def test_a_launch_that_cannot_be_is_refused(func: Any, cfg: MultiprocessConfig, offset: Any, words: str) -> None:
    with pytest.raises((TypeError, ValueError)) as caught:
        ad.launch_subprocesses(func, cfg, None, offset)
    assert words in str(caught.value)


def test_arguments_in_the_place_of_setup_are_told_where_they_belong() -> None:
    with pytest.raises(TypeError, match=r"setup is 100; .* what is for func comes after setup and rank_offset"):
        ad.launch_subprocesses(note_rank, config(), 100)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("func", "cfg", "words"),
    [(note_rank, None, "cfg is None; it must be a MultiprocessConfig"), ("x", config(), "func is 'x'; it must be")],
)
def test_a_rank_that_cannot_be_is_refused(func: Any, cfg: Any, words: str) -> None:
    with pytest.raises(TypeError, match=words):
        ad.init_and_run(func, cfg)


# -------------------------------------------------------------------------------------------- from a script of its own

SCRIPT = """
import pathlib, os, subprocess, sys, time
import asyncdist as ad
from asyncdist.launch import spawn

{top}

def work(folder):
    inside = subprocess.Popen(["sleep", "600"]).pid
    outside = subprocess.Popen(["sleep", "600"], start_new_session=True).pid
    for name in (f"{{inside}}.pid", f"{{outside}}.session", f"{{os.getpid()}}.pid"):
        pathlib.Path(folder, name).touch()
    time.sleep(600)

{guard}
    spawn.START_TIMEOUT_S = {timeout_s}
    ad.launch_subprocesses(work, ad.MultiprocessConfig(world_size=2, launch_method={method!r}), None, 0, sys.argv[1])
"""
GUARD = 'if __name__ == "__main__":'


def start_script(
    tmp_path: Path, *, top: str = "", guard: str = GUARD, timeout_s: float = 300.0, method: str = "forkserver"
) -> subprocess.Popen[str]:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT.format(top=top, guard=guard, timeout_s=timeout_s, method=method))
    root = str(Path(ad.__file__).resolve().parents[1])
    return subprocess.Popen(
        [sys.executable, str(script), str(tmp_path)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": root},
        start_new_session=True,
    )


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("to", ["terminal", "launcher", "launcher, killed"])
def test_no_rank_outlives_its_launcher(tmp_path: Path, method: str, to: str) -> None:
    """Nor does what it has started. Ctrl-C reaches all in the terminal's foreground, or the launcher alone."""
    process = start_script(tmp_path, method=method)
    try:
        pids = pids_in(tmp_path, 4)
        outside = [int(path.stem) for path in tmp_path.glob("*.session")]
        if to == "terminal":
            os.killpg(process.pid, signal.SIGINT)
        else:
            process.send_signal(signal.SIGKILL if "killed" in to else signal.SIGINT)
        if "killed" in to:
            wait_gone(pids)
            for pid in outside:  # nothing is left that knows of them
                os.kill(pid, signal.SIGKILL)
        _, error = process.communicate(timeout=TIMEOUT_S)
        assert process.returncode != 0
        assert "killed" in to or "KeyboardInterrupt" in error
        wait_gone(pids + outside)
    finally:
        mpi._kill_session(process.pid)
        process.communicate(timeout=TIMEOUT_S)


def test_a_function_under_the_main_guard_is_refused(tmp_path: Path) -> None:
    """No child found it, and the launcher asked whether it was itself called under such a guard."""
    guard = f"{GUARD}\n    def inside():\n        pass\n\n    ad.launch_subprocesses(inside)\n"
    _, error = start_script(tmp_path, guard=guard).communicate(timeout=TIMEOUT_S)
    assert 'is defined under if __name__ == "__main__":, where no other process finds it: define it above' in error


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"top": "if __name__ != '__main__': time.sleep(600)", "timeout_s": 1.0}, "rank 0, 1 did not start within 1 s"),
        ({"top": "if __name__ != '__main__': sys.exit(3)"}, "exited with code 3 before it ran"),
        ({"guard": "if True:"}, "exited with code 1 before it ran: is launch_subprocesses called under if __name__"),
    ],
    ids=["hangs", "exits", "no guard"],
)
def test_a_rank_that_never_starts_is_explained(tmp_path: Path, options: dict[str, Any], words: str) -> None:
    process = start_script(tmp_path, method="spawn", **options)
    try:
        _, error = process.communicate(timeout=TIMEOUT_S)
    finally:
        process.kill()
    assert process.returncode == 1
    assert words in error


def test_nothing_of_this_is_imported_with_the_package() -> None:
    source = (
        "import sys, asyncdist as ad\n"
        "heavy = {'torch', 'multiprocessing', 'asyncdist.launch.spawn', 'asyncdist.launch.rank_process'}\n"
        "print(sorted(heavy & set(sys.modules)), 'launch_subprocesses' in dir(ad))"
    )
    ended = subprocess.run(
        [sys.executable, "-c", source], capture_output=True, text=True, timeout=TIMEOUT_S, check=True
    )
    assert ended.stdout == "[] True\n"


def test_a_function_of_an_interactive_session_is_refused() -> None:
    source = (
        "import asyncdist as ad\n"
        "def work(): pass\n"
        "try: ad.launch_subprocesses(work, ad.MultiprocessConfig(world_size=2))\n"
        "except TypeError as error: print(error)\n"
    )
    ended = subprocess.run(
        [sys.executable, "-"], input=source, capture_output=True, text=True, timeout=TIMEOUT_S, check=True
    )
    assert "was defined in an interactive session" in ended.stdout


def test_an_event_loop_may_run_while_ranks_do(tmp_path: Path) -> None:
    """From a thread of a running program, where no signal arrives."""

    async def main() -> None:
        await asyncio.to_thread(ad.launch_subprocesses, note_rank, config(), None, 0, str(tmp_path))

    asyncio.run(main())
    assert len(reports(tmp_path)) == 2
