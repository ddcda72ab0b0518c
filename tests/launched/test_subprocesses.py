"""Tests ``launch_subprocesses`` with its configs, process groups, parallel groups and coroutine functions."""

from __future__ import annotations

import functools
import os
import re
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support import torchrun
from support.facts import naming
from support.subprocesses import TIMEOUT_S, config, launch_here, note_rank, report, reports

import asyncdist as ad
from asyncdist import environment, local_host
from asyncdist.errors import LocalProtocolError
from asyncdist.functional.parallel_groups import ParallelLayout
from asyncdist.launch import local_ranks, process_groups, spawn
from asyncdist.launch.config import MultiprocessConfig
from asyncdist.launchers import addresses, detection
from asyncdist.launchers.variables import Launch
from asyncdist.runtime import run

# ----------------------------------------------------------------------------------------------------------- configs


def test_what_is_missing_is_filled_in(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    cfg = MultiprocessConfig().resolve()
    assert (cfg.world_size, cfg.local_world_size, cfg.rank, cfg.local_rank) == (4, 4, None, None)
    assert cfg.master_port is not None
    assert 0 < cfg.master_port < 65536
    assert MultiprocessConfig(world_size=2, rank=1, master_port=1).resolve().local_rank == 1
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
        ({"world_size": 0}, r"world_size .*\b0"),
        ({"world_size": 2.0}, r"world_size .*2\.0"),
        ({"world_size": 2, "local_world_size": 3}, "local_world_size must be <= world_size=2, got 3"),
        (
            {"world_size": 6, "model_parallelism": 4},
            r"world_size .*model_parallelism=4 .*pipeline_parallelism=1.*\b6\b",
        ),
        ({"world_size": 6, "model_parallelism": 2, "pipeline_parallelism": 2}, r"\b4\b"),
        ({"model_parallelism": 0}, r"model_parallelism .*\b0"),
        ({"pipeline_parallelism": True}, r"pipeline_parallelism .*True"),
        ({"rank": 2, "world_size": 2}, "rank must be from 0 to 1 with world_size=2, got 2"),
        ({"rank": -1}, r"rank .*-1"),
        ({"local_rank": 2, "local_world_size": 2}, "local_rank must be from 0 to 1 with local_world_size=2, got 2"),
        ({"rank": 0, "local_rank": 1}, "local_rank must be <= rank=0, got 1"),
        ({"master_port": 65536}, "master_port must be a port from 1 to 65535, got 65536"),
        ({"master_port": "http"}, "master_port .*'http'"),
        ({"master_addr": ""}, "master_addr .*''"),
        ({"master_addr": 5}, "master_addr .*5"),
        ({"master_addr": "a b"}, "master_addr .*'a b'"),
        ({"init_method": "env"}, "init_method .*'env://'.*'env'$"),
        ({"init_method": 5}, "init_method must be 'env://', 'tcp://address:port' or 'file://path', got 5"),
        ({"init_method": "udp://h:1"}, "init_method .*'udp://h:1'"),
        ({"init_method": "tcp://h"}, "init_method .*'tcp://h'"),
        ({"init_method": "tcp://h:http"}, "init_method .*'tcp://h:http'"),
        ({"init_method": "file://"}, "init_method .*'file://'"),
        (
            {"launch_method": "fork"},
            r"launch_method must be one of 'forkserver', 'spawn', got 'fork' \(threads and MPI do not",
        ),
        ({"launch_method": "thread"}, "launch_method .*'forkserver', 'spawn'.*'thread'"),
        ({"backend": "ccl"}, "backend .*torch.*'ccl'"),
        ({"backend": "cpu:gloo,gloo"}, "backend .*'cpu:gloo,gloo'"),
        ({"model_parallel_backend": "smoke"}, "model_parallel_backend .*'smoke'"),
        ({"data_parallel_backend": ""}, "data_parallel_backend .*''"),
    ],
)
def test_a_config_that_cannot_be_is_refused(options: dict[str, Any], words: str) -> None:
    with pytest.raises((TypeError, ValueError)) as caught:
        MultiprocessConfig(**options)
    assert re.search(words, str(caught.value))


def test_hosts_must_agree_on_a_port() -> None:
    with pytest.raises(ValueError, match="master_port must be set, because only 4 of the 8 ranks are on this host"):
        MultiprocessConfig(world_size=8, local_world_size=4).resolve()


def test_ranks_that_start_on_their_own_must_agree_on_a_port(tmp_path: Path) -> None:
    """Regression: each process chose a port of its own, and waited there for the others for 300 s."""
    for cfg in (config(2, rank=0), config(2, rank=1, master_addr="localhost")):
        with pytest.raises(ValueError, match=naming("master_port", "None", "all ranks")):
            ad.init_and_run(note_rank, cfg, str(tmp_path))
    config(2, rank=1, init_method="tcp://127.0.0.1:1").resolve()
    config(1, rank=0).resolve()


def test_an_address_without_a_host_is_named_before_a_rank_waits() -> None:
    with pytest.raises(ValueError, match=r"master_addr must be .*, got 'no-host\.invalid'"):
        config(master_addr="no-host.invalid").resolve()


# ---------------------------------------------------------------------------------------------------------- backends


def test_the_backend_is_the_one_that_was_set(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("ASYNCDIST_BACKEND", raising=False)
    assert ad.default_backend() == ("nccl" if torch.cuda.is_available() and dist.is_nccl_available() else "gloo")
    assert ad.get_distributed_backend() == ad.default_backend()
    monkeypatch.setenv("ASYNCDIST_BACKEND", "")  # so that the variable is restored afterwards
    ad.set_distributed_backend("CPU:gloo")
    assert ad.get_distributed_backend() == dist.Backend("cpu:gloo")


@pytest.mark.parametrize("backend", ["ccl", "", None, "gloo,nccl", "undefined"])
def test_an_unknown_backend_is_named_with_the_known_ones(backend: Any) -> None:
    with pytest.raises(ValueError, match="backend") as caught:
        ad.set_distributed_backend(backend)
    assert repr(backend) in str(caught.value)
    assert "'gloo'" in str(caught.value)


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
        with pytest.raises(ValueError, match="must be a multiple of"):
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
    with pytest.raises(ValueError, match=rf"rank .*0 to 7.*{rank!r}"):
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
    with pytest.raises(LocalProtocolError, match="no parallel groups have been made"):
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
            with pytest.raises(ValueError, match="must be a multiple of the 3 ranks"):
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


@pytest.mark.long
def test_a_plain_function_finds_its_group_in_spawned_ranks(tmp_path: Path) -> None:
    launch_here(note_rank, config(2, launch_method="spawn"), str(tmp_path))
    assert reports(tmp_path) == [[rank, rank, 2, ad.default_backend()] for rank in range(2)]


def test_a_plain_function_finds_its_process_groups(tmp_path: Path) -> None:
    cfg = config(4, model_parallelism=2)
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
            "refused": "the first dimension of input must be a multiple of the 4 ranks, got shape (3,)",
            "backend": ad.default_backend(),
            "given": [[7], {"name": "x"}],
            "threads": values["threads"]
            if os.environ.get("OMP_NUM_THREADS")
            else max(1, local_host.available_cores() // 4),
        }


def test_two_hosts_make_one_world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two launchers make one world, each with its offset; a backend that was set reaches the ranks of both."""
    monkeypatch.setenv("ASYNCDIST_BACKEND", "")
    ad.set_distributed_backend("cpu:gloo")
    cfg = MultiprocessConfig(world_size=4, local_world_size=2, master_port=addresses.find_free_port())
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
        monkeypatch.setenv(name, "")  # so that the variables are restored afterwards
    cfg = MultiprocessConfig(world_size=1, init_method=f"file://{tmp_path / 'store'}")
    ad.init_and_run(note_rank, cfg, str(tmp_path))
    assert [value[:3] for value in reports(tmp_path)] == [[0, 0, 1]]
    assert not dist.is_initialized()
    with pytest.raises(LocalProtocolError, match="groups"):
        ad.parallel_groups()
    with pytest.raises(ValueError, match=r"rank must be set to this process's rank, from 0 to 1, got None"):
        ad.init_and_run(note_rank, config(2), str(tmp_path))
    with pytest.raises(ValueError, match=r"rank must be .*, got 2"):
        ad.init_dist(2, 0, 2, 2, "127.0.0.1", 1)


def test_processes_of_ones_own_make_a_process_group() -> None:
    """Other code starts the processes and sets their variables. torch's own collectives give the expected results."""
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
        addresses.find_free_port(),
    ).check()
    assert done.reports == {rank: [2 - rank, 3, "gloo", 111, str(2 - rank)] for rank in range(3)}


def test_a_group_of_one_rank_is_made_from_the_backend_alone(tmp_path: Path) -> None:
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


def test_a_coroutine_function_gets_a_world_on_torch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """This runs in one process, with the local transport instead of torch: it tests the variables and the call."""
    for name in local_ranks.rank_variables(0, 1, local_rank=0, local_size=1, address="", port=1, run_id=""):
        monkeypatch.setenv(name, "")
    asked = []

    def stand_in(main: Any, *args: Any, transport: str) -> None:
        asked.append((transport, detection.detect()))
        run.run_local(main, *args, ranks=1)

    monkeypatch.setattr(run, "run", stand_in)
    ad.init_and_run(coroutine, MultiprocessConfig(world_size=1, master_port=7777), str(tmp_path), name="x")
    assert asked == [("torch", Launch("torch", 1, 0, "TORCHELASTIC_RUN_ID"))]
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
        with pytest.raises(RuntimeError, match=r"(?s)rank 1 .*ValueError: story of rank 1") as caught:
            launch_here(talk, cfg, str(tmp_path), fails=True)
        text = str(caught.value)
        assert text.count("Traceback") == text.count("  File ") == 1 and ", in talk" in text, (
            "the traceback must contain only the user's frame"
        )
        assert "story of rank 1" not in capfd.readouterr().err, "an error that is raised must not be printed as well"
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


def test_the_error_names_the_failed_rank_and_not_its_peers() -> None:
    with pytest.raises(RuntimeError, match=r"(?s)^rank 1 failed:.*ValueError: story of rank 1") as caught:
        launch_here(shards, config())
    assert ", in function" in str(caught.value)


def test_a_coroutine_function_takes_no_process_group_options() -> None:
    with pytest.raises(ValueError, match="data_parallel_backend='gloo' must be omitted for a coroutine function"):
        launch_here(coroutine, config(data_parallel_backend="gloo"))
    with pytest.raises(ValueError, match="init_method='tcp://h:1'"):
        launch_here(coroutine, config(init_method="tcp://h:1"))


class Trainer:
    """Its objects are called like a coroutine function."""

    async def __call__(self, world: ad.World, folder: str) -> None:
        report(folder, [world.rank, world.transport_name])


def test_an_object_with_an_async_call_is_a_coroutine_function(tmp_path: Path) -> None:
    """Regression: the object was called as a plain function: the coroutine was never awaited, without an error."""
    launch_here(functools.partial(Trainer()), config(), str(tmp_path))
    assert reports(tmp_path) == [[0, "torch"], [1, "torch"]]


SEES = """
import os, sys
import asyncdist as ad

def tell():
    with open(sys.argv[1], "a") as file:
        print(os.environ.get("ASYNCDIST_TEST_WORD"), "PYTHONSAFEPATH" in os.environ, file=file)

if __name__ == "__main__":
    for word in ("first", "second"):
        os.environ["ASYNCDIST_TEST_WORD"] = word
        ad.launch_subprocesses(tell, ad.MultiprocessConfig(world_size=1))
"""


def test_ranks_have_the_environment_and_modules_of_the_call(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Regression: a secret that a notebook set after its first launch had no effect.

    Later ranks had the variables of the server that the first launch had started. The server also imported modules from
    the working directory.
    """
    planted = tmp_path / "folder that all users share"
    planted.mkdir()
    for name in ("asyncdist", "torch"):
        (planted / f"{name}.py").write_text("from pathlib import Path; Path(__file__).with_name('ran').touch()")
    (tmp_path / "script.py").write_text(SEES)
    monkeypatch.delenv(environment.SAFE_PATH_VARIABLE, raising=False)
    command = [sys.executable, str(tmp_path / "script.py"), str(tmp_path / "seen")]
    subprocess.run(command, cwd=planted, check=True, timeout=TIMEOUT_S)
    assert (tmp_path / "seen").read_text() == "first False\nsecond False\n"
    assert not (planted / "ran").exists()
