"""Tests how ranks on torch meet: with other process groups, under torchrun, late, missing or started twice."""

from __future__ import annotations

import concurrent.futures
import os
import re
import signal
import socket
import threading
import time
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from support.facts import names
from support.torchrun import rank_environment, run_ranks, run_source, run_torchrun, run_torchruns
from torch import distributed as dist

import asyncdist as ad
from asyncdist import cli
from asyncdist._version import describe_version
from asyncdist.errors import DisagreementError, TransportError
from asyncdist.launchers import addresses, detection, job_rendezvous
from asyncdist.launchers.variables import TorchRendezvous
from asyncdist.transports.torch_distributed.meeting import rendezvous, stores
from asyncdist.transports.torch_distributed.meeting.rendezvous import _Gathering as Gathering
from asyncdist.transports.torch_distributed.meeting.stores import SealedStore
from asyncdist.transports.torch_distributed.transport import open_transport
from asyncdist.trust.job_secret import JobSecret

# ------------------------------------------------------------------------------------------------------------ the start


BESIDE_A_GROUP = """
    import os, sys
    import torch
    from torch import distributed as dist
    from support.mpi import report
    import asyncdist as ad

    sums = []

    def users_sum():
        tensor = torch.tensor([float(os.environ["RANK"])])
        dist.all_reduce(tensor)
        sums.append(tensor.item())

    async def main(world):
        for step in ("ours", "init", "users", "ours", "destroy", "ours", "init", "users", "ours", "destroy"):
            if sys.argv[1] == "inside" and step == "init":
                dist.init_process_group("gloo")
            elif sys.argv[1] == "inside" and step == "users":
                users_sum()
            elif sys.argv[1] in ("inside", "destroyed inside") and step == "destroy" and dist.is_initialized():
                dist.destroy_process_group()
            elif step == "ours":
                tensor = await ad.all_reduce(torch.tensor([float(world.rank)]))
                sums.append(tensor.item())
        return world.describe()

    def around():
        dist.init_process_group("gloo")
        users_sum()
        ad.run(main)
        users_sum()
        dist.destroy_process_group()

    def destroyed():
        dist.init_process_group("gloo")
        users_sum()
        ad.run(main)

    def after():
        ad.run(main)
        dist.init_process_group("gloo")
        users_sum()
        ad.run(main)
        dist.destroy_process_group()
        ad.run(main)

    {"around": around, "destroyed inside": destroyed, "inside": lambda: ad.run(main), "after": after}[sys.argv[1]]()
    report(int(os.environ["RANK"]), sums)
"""
SUM_COUNTS = {"around": 6, "destroyed inside": 5, "inside": 6, "after": 13}


@pytest.mark.parametrize("order", SUM_COUNTS)
def test_beside_a_process_group_of_the_user(order: str) -> None:
    """Both use the same MASTER_PORT."""
    result = run_source(2, BESIDE_A_GROUP, order).check()
    assert result.reports == dict.fromkeys(range(2), [1.0] * SUM_COUNTS[order])


@pytest.mark.parametrize("order", ["around", "after"])
@pytest.mark.long
def test_beside_a_process_group_of_the_user_under_torchrun(order: str) -> None:
    result = run_torchrun(2, BESIDE_A_GROUP, order).check()
    assert result.reports == dict.fromkeys(range(2), [1.0] * SUM_COUNTS[order])


def test_beside_distributed_data_parallel() -> None:
    """The script computes the expected weights of both models with plain torch."""
    reports = run_ranks(3, "tests/scripts/beside_ddp.py").check().reports
    for refusals, averages, kept, off, apart, weights in reports.values():
        assert [text.partition(": ")[0] for text in refusals] == ["ValueError", "LocalProtocolError"]
        assert all("DistributedDataParallel" in text for text in refusals)
        assert averages == 3 and kept
        assert off < 1e-12 < 1e-5 < apart
        assert weights == reports[0][5]


def test_a_group_without_variables_is_enough() -> None:
    source = """
        import os, sys
        from torch import distributed as dist
        from support.mpi import report
        import asyncdist as ad

        rank, size = int(os.environ.pop("RANK")), int(os.environ.pop("WORLD_SIZE"))
        address = "tcp://127.0.0.1:" + os.environ.pop("MASTER_PORT")
        dist.init_process_group("gloo", init_method=address, rank=rank, world_size=size)

        async def main(world):
            await ad.barrier()
            return [world.rank, world.size, world.transport_name]

        report(rank, ad.run(main, transport="torch"))
    """
    assert run_source(2, source).check().reports == {0: [0, 2, "torch"], 1: [1, 2, "torch"]}


@pytest.mark.long
def test_a_group_of_the_users_that_no_launcher_made_is_found() -> None:
    """Regression: started by torch.multiprocessing.spawn, each rank silently trained alone."""
    source = """
        import socket, sys
        import torch
        from torch import distributed as dist
        from support.mpi import report
        import asyncdist as ad

        async def main(world):
            total = await ad.all_reduce(torch.tensor([1.0]))
            return [world.transport_name, world.rank, world.size, total.item()]

        def work(rank, address, size):
            dist.init_process_group("gloo", init_method=address, rank=rank, world_size=size)
            report(rank, ad.run(main))
            dist.destroy_process_group()

        if __name__ == "__main__":
            torch.multiprocessing.spawn(work, (sys.argv[1], 2), nprocs=2)
    """
    unset = dict.fromkeys(("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"), "")
    result = run_source(1, source, f"tcp://127.0.0.1:{addresses.find_free_port()}", env=unset).check()
    assert result.reports == {rank: ["torch", rank, 2, 2.0] for rank in range(2)}


def test_torchrun_starts_workers_again_as_another_job() -> None:
    """The first time, rank 1 dies while messages of that job are in transit."""
    source = """
        import os
        import asyncdist as ad
        from support.mpi import report

        attempt = int(os.environ["TORCHELASTIC_RESTART_COUNT"])

        async def main(world):
            await ad.barrier()
            peer = 1 - world.rank
            if attempt == 0:
                engine = world.services.engine
                for data in (b"old", bytearray(1 << 20)):
                    engine.watch(engine.transport.isend(data, peer, 1), A_CONDITION)
                if world.rank == 1:
                    os._exit(7)
                await world.services.engine.receive(bytearray(1), peer, 2)
            buffer = bytearray(3)
            await world.services.engine.send(b"new", peer, 1)
            await world.services.engine.receive(buffer, peer, 1)
            report(world.rank, [attempt, buffer.decode()])

        ad.run(main)
    """
    result = run_torchrun(2, source, options=("--max-restarts", "1")).check()
    assert result.reports == {0: [1, "new"], 1: [1, "new"]}


FAILS_ONCE = """
    import os, pathlib, sys
    import asyncdist as ad
    from support.mpi import report

    told, when = pathlib.Path(sys.argv[1]), sys.argv[2]

    def fail_once():
        if os.environ["RANK"] == "1" and not told.exists():
            told.touch()
            os._exit(7)

    async def main(world):
        await ad.barrier()
        if when == "late":
            fail_once()
        await ad.barrier()
        return world.size

    if when == "early":
        fail_once()
    values = [ad.run(main), ad.run(main)]
    report(int(os.environ["RANK"]), [os.environ["TORCHELASTIC_RESTART_COUNT"], values])
"""


@pytest.mark.parametrize(("when", "unshared"), [("early", "0"), ("late", "1")])
@pytest.mark.long
def test_two_agents_that_count_restarts_differently_meet_again(tmp_path: Path, when: str, unshared: str) -> None:
    """Regression: agents count only their own failures, 0 and 1, and ranks that used the count never connected."""
    env = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": unshared}
    told = tmp_path / "told"
    result = run_torchruns(2, FAILS_ONCE, told, when, options=("--max-restarts", "2"), **env).check()
    assert told.exists(), "rank 1 did not fail at its first start"
    if when == "early":  # otherwise both fail, or one is stopped before it fails
        assert sorted(count for count, _ in result.reports.values()) == ["0", "1"]
    assert [values for _, values in result.reports.values()] == [[2, 2], [2, 2]]


@pytest.mark.long
def test_a_rank_that_comes_late_is_awaited_in_silence() -> None:
    """Regression: the store's own wait printed two lines per second."""
    source = """
        import os, time
        import asyncdist as ad

        async def main(world):
            await ad.barrier()

        if os.environ["RANK"] == "1":
            time.sleep(3)
        ad.run(main)
    """
    result = run_source(3, source).check()
    assert (result.stdout, result.stderr) == ("", "")


SHORT_START = """
    from asyncdist.transports.torch_distributed import transport as transport
    transport.START_TIMEOUT_S = 3.0
    import asyncdist as ad

    async def main(world):
        await ad.barrier()

    ad.run(main, transport="torch")
"""


@pytest.mark.long
def test_ranks_that_never_come_are_named() -> None:
    """Each rank prints the error that test_missing_ranks_are_named_before_the_start_is_abandoned raises."""
    result = run_source(4, SHORT_START, missing=(1, 3)).check(1, 1)
    for rank in (0, 2):
        assert f"rank {rank} waits for ranks [1, 3], which did not arrive" in result.stderr


@pytest.mark.long
def test_ranks_that_never_come_are_named_by_those_that_wait() -> None:
    """Regression: rank 0 gave up just before rank 2, whose error then did not name the missing ranks."""
    patient = SHORT_START.replace("= 3.0", "= 3.0 if os.environ['RANK'] == '0' else 60.0")
    result = run_source(4, "\n    import os" + patient, missing=(1, 3)).check(1, 1)
    for rank in (0, 2):
        assert re.search(rf"rank {rank} .*\[1, 3\]", result.stderr)
    assert "before the store closed: " in result.stderr


@pytest.mark.long
def test_a_missing_rank_0_is_named() -> None:
    result = run_source(2, SHORT_START, missing=(0,)).check(1)
    assert re.search(r"rank 1 .*\brank 0\b.* 127\.0\.0\.1:", result.stderr)


@pytest.mark.parametrize("local_rank", ["0", "1"])
def test_one_rank_of_each_host_says_what_it_waits_for(
    local_rank: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Regression: all ranks waited silently if MASTER_ADDR, or Slurm's first host, was not the host of rank 0."""
    monkeypatch.setenv("LOCAL_RANK", local_rank)
    monkeypatch.setattr(rendezvous, "NOTICE_S", 0.0)
    port = addresses.find_free_port()
    place = TorchRendezvous(1, 2, "127.0.0.1", port, False, why_missing="It may be elsewhere")
    with pytest.raises(TransportError, match=r"rank 1 .*\brank 0\b.*It may be elsewhere"):
        rendezvous._await_server(place, time.monotonic() + 0.1, "rank 0")
    said = (
        f"rank 1 waits for rank 0: no process serves the job's store at 127.0.0.1:{port} (MASTER_ADDR, MASTER_PORT) yet"
    )
    assert [said in text and text.endswith(". It may be elsewhere") for text in caplog.messages] == (
        [True] if local_rank == "0" else []
    )


@pytest.mark.parametrize(("rank", "local_rank"), [(0, "0"), (1, "1"), (2, "2")])
def test_missing_ranks_are_named_before_the_start_is_abandoned(
    rank: int, local_rank: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Regression: the others silently waited 300 s for a rank that had ended with exit code 0, or was lost."""
    monkeypatch.setenv("LOCAL_RANK", local_rank)
    monkeypatch.setattr(rendezvous, "MISSING_NOTICE_S", 0.0)
    with pytest.raises(TransportError, match=f"rank {rank} "):
        Gathering(SealedStore(dist.HashStore(), JobSecret()), rank, 3, time.monotonic() + 0.1).wait_for_all()
    missing = {0: [1, 2], 1: [0]}
    said = f"rank {rank} waits for ranks {missing.get(rank)}, which have not arrived at the start of the world"
    assert [said in text for text in caplog.messages] == ([True] if rank in missing else [])


def test_a_port_that_is_taken_is_named() -> None:
    with socket.socket() as holder:
        holder.bind(("127.0.0.1", 0))
        holder.listen()
        port = holder.getsockname()[1]
        result = run_source(2, SHORT_START, missing=(1,), env={"MASTER_PORT": str(port)}).check(1)
    assert f"rank 0 cannot serve the job's store at 127.0.0.1:{port} (MASTER_ADDR, MASTER_PORT)" in result.stderr
    assert "address already in use" in result.stderr.lower()


@pytest.mark.long
def test_two_processes_of_one_rank_are_named() -> None:
    """Regression: they waited silently, and then reported that another rank was missing.

    Each rank prints the error that test_two_processes_of_one_rank_are_named_by_both_and_rank_0 raises.
    """
    source = """
        import os
        if os.environ["RANK"] == "2":
            os.environ["RANK"] = "1"
        import asyncdist as ad

        async def main(world):
            await ad.barrier()

        ad.run(main)
    """
    result = run_source(3, source)
    assert result.returncodes == (1, 1, 1)
    assert re.search(r"must be started once, but two processes were started as rank 1 \(RANK\)", result.stderr)


@pytest.mark.long
def test_sizes_that_differ_are_named() -> None:
    """Each rank prints the error that test_a_rank_beyond_rank_0s_count_fails_on_both raises."""
    source = """
    import os
    if os.environ["RANK"] == "1":
        os.environ["WORLD_SIZE"] = os.environ["LOCAL_WORLD_SIZE"] = "2"
    """
    result = run_source(3, source + SHORT_START)
    assert result.returncodes == (1, 1, 1)
    assert re.search(r"WORLD_SIZE must be equal on all ranks, but it is 2 on rank 1 and 3 on rank 0", result.stderr)


def test_a_store_that_is_gone_is_not_retried_beyond_the_timeout() -> None:
    """Regression: the retries took two minutes if rank 0 failed after another rank had found its listener."""
    port = addresses.find_free_port()
    place = TorchRendezvous(1, 2, "127.0.0.1", port, False)
    with pytest.raises(TransportError, match=rf"rank 1 cannot use the job's store at 127\.0\.0\.1:{port}"):
        rendezvous._reach(place, port, deadline=time.monotonic())


def test_a_listener_that_does_not_answer_is_named(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Regression: a rank silently waited forever, and ignored Ctrl-C, if a web server listened at MASTER_PORT."""
    monkeypatch.setattr(rendezvous, "NOTICE_S", 0.0)
    monkeypatch.setattr(stores, "_MARGIN_S", 0.1)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        port = silent.getsockname()[1]
        place = TorchRendezvous(1, 2, "127.0.0.1", port, False)
        with pytest.raises(TransportError, match=f"at 127.0.0.1:{port} .* does not answer; another program may use"):
            rendezvous._reach(place, port, deadline=time.monotonic())
        assert f"the process that listens at 127.0.0.1:{port} (MASTER_ADDR, MASTER_PORT) does not answer" in caplog.text
        threading.Timer(0.1, os.kill, [os.getpid(), signal.SIGINT]).start()
        with pytest.raises(KeyboardInterrupt):
            rendezvous._reach(place, port, deadline=time.monotonic() + 3)


def test_an_address_that_leads_to_no_host_is_named_at_once() -> None:
    """Regression: the address was looked up again and again, for 300 s."""
    result = run_source(2, SHORT_START.replace("= 3.0", "= 300.0"), env={"MASTER_ADDR": "no host.invalid"}).check(1, 1)
    assert (
        result.stderr.count("ValueError: MASTER_ADDR must be a name that all hosts know, or an address, got 'no host")
        == 2
    )


def test_one_rank_needs_no_store() -> None:
    source = SHORT_START.replace("await ad.barrier()", "await ad.barrier(); print(world)")
    result = run_source(1, source, env={"MASTER_PORT": "1"}).check()
    assert result.stdout.startswith("<World rank 0 of 1, torch")


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        ({"MASTER_PORT": ""}, "not set: MASTER_PORT"),
        ({"RANK": "", "MASTER_ADDR": ""}, "not set: RANK, MASTER_ADDR"),
        ({"MASTER_PORT": "http"}, "MASTER_PORT must be an integer >= 0, got 'http'"),
        ({"MASTER_PORT": "65536"}, "MASTER_PORT must be from 1 to 65535, got 65536"),
        ({"RANK": "4"}, "RANK must be from 0 to 3 with WORLD_SIZE=4, got 4"),
        ({"WORLD_SIZE": "0"}, "WORLD_SIZE must be >= 1, got 0"),
    ],
)
def test_variables_that_make_no_sense_are_named(changes: dict[str, str], match: str) -> None:
    environ = {**rank_environment(1, 4, 29500), **changes}
    with pytest.raises(ValueError, match=match):
        job_rendezvous.torch_rendezvous(environ)


def test_the_rendezvous_is_what_torchrun_says() -> None:
    environ = rank_environment(1, 4, 29500)
    assert job_rendezvous.torch_rendezvous(environ) == TorchRendezvous(
        1, 4, "127.0.0.1", 29500, False, is_loopback=True
    )
    assert job_rendezvous.torch_rendezvous({**environ, "TORCHELASTIC_USE_AGENT_STORE": "True"}).is_store_served


# -------------------------------------------------------------------------------------------------------- the handshake


def gather(
    store: Any, ranks: Sequence[int], size: int, timeout_s: float = 100.0, other_version_rank: int = -1
) -> list[str]:
    """Start these ranks, a thread each, and return the token of their world or the error of each rank."""

    def wait_for_all(rank: int) -> str:
        gathering = Gathering(store, rank, size, time.monotonic() + timeout_s)
        if rank == other_version_rank:
            gathering._facts = f"{size} asyncdist 0.0.1, frames 1"
        try:
            gathering.wait_for_all()
            gathering.release_others()
        except (TransportError, DisagreementError) as error:
            return str(error)
        return bytes(gathering.world.get("whose")).decode() if rank else whose(gathering)

    def whose(gathering: Gathering) -> str:
        token = f"{time.monotonic_ns()}"
        gathering.world.set("whose", token)
        return token

    with concurrent.futures.ThreadPoolExecutor(len(ranks)) as pool:
        return list(pool.map(wait_for_all, ranks))


def test_ranks_gather_again_after_other_processes_said_hello() -> None:
    store = SealedStore(dist.HashStore(), JobSecret())
    for rank in range(4):
        store.set(f"asyncdist/hello/{rank}", "of somebody dead")
    worlds = [set(gather(store, range(size), size)) for size in (4, 4, 2, 3)]
    assert [len(tokens) for tokens in worlds] == [1, 1, 1, 1], "the ranks of one gathering must be in one world"
    assert len(set.union(*worlds)) == 4, "each gathering must have its own world"


def test_a_rank_restarted_while_others_gather_is_answered_again() -> None:
    store = SealedStore(dist.HashStore(), JobSecret())
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        others = pool.submit(gather, store, (0, 1), 3)
        dead = store.part("asyncdist")
        dead.set("hello/2", "of somebody who is answered, and dies")
        dead.wait(["answer/of somebody who is answered, and dies"], timedelta(seconds=100))
        assert len({*gather(store, (2,), 3), *others.result()}) == 1


@pytest.mark.parametrize("ranks", [(0, 0), (0, 1, 1)])
def test_two_processes_of_one_rank_are_named_by_both_and_rank_0(ranks: tuple[int, ...]) -> None:
    for text in gather(SealedStore(dist.HashStore(), JobSecret()), ranks, 3):
        assert f"two processes were started as rank {ranks[-1]} (RANK)" in text


def test_ranks_with_different_versions_fail_on_both() -> None:
    """Regression: with ``--restarts``, no rank noticed the difference."""
    told = gather(SealedStore(dist.HashStore(), JobSecret()), (0, 1), 2, other_version_rank=1)
    assert len(set(told)) == 1
    assert names(told[0], "rank 0", "rank 1", "asyncdist 0.0.1, frames 1", describe_version())


def test_a_rank_beyond_rank_0s_count_fails_on_both() -> None:
    store = SealedStore(dist.HashStore(), JobSecret())
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        stray = pool.submit(gather, store, (3,), 4)
        told = [*gather(store, (0,), 2), *stray.result()]
    assert told == ["WORLD_SIZE must be equal on all ranks, but it is 4 on rank 3 and 2 on rank 0 [rank=3]"] * 2


def test_a_stray_that_is_no_more_holds_nobody_up() -> None:
    store = SealedStore(dist.HashStore(), JobSecret())
    store.set("asyncdist/unanswered", "3 of somebody dead")
    assert len(set(gather(store, (0, 1), 2))) == 1


# ------------------------------------------------------------------------------------------------------------ backends


@pytest.mark.parametrize("backend", ["nccl", "gloo"])
def test_a_transport_with_a_backend_is_refused(
    backend: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    async def main(world: ad.World) -> None:
        raise AssertionError

    name = f"torch:{backend}"
    with pytest.raises(ValueError, match=f"transport must be one of .*'torch'.*, got '{name}'.* over gloo"):
        ad.run(main, transport=name)
    monkeypatch.setenv("ASYNCDIST_TRANSPORT", name)
    with pytest.raises(ValueError, match=f"ASYNCDIST_TRANSPORT must be .*, got '{name}'"):
        ad.run(main)
    capsys.readouterr()
    with pytest.raises(SystemExit, match="2"):
        cli.main(["run", "--transport", name, "-n", "2", __file__])
    printed = capsys.readouterr().err
    assert f", got '{name}'" in printed and "--transport must be one of" in printed and len(printed.splitlines()) == 1


def test_streams_have_no_transport_of_their_own() -> None:
    async def main(world: ad.World) -> None:
        raise AssertionError

    with pytest.raises(TypeError, match="unexpected keyword argument 'bulk'"):
        ad.run(main, bulk="torch")  # type: ignore[call-arg]


def test_the_users_group_may_have_any_backend(monkeypatch: pytest.MonkeyPatch) -> None:
    """The rank takes its number and the store from the default group, and makes its own gloo groups."""

    class NcclGroup:
        """The default group of a program that called ``init_process_group("nccl")``; nothing is sent over it."""

    store = dist.HashStore()
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    monkeypatch.setattr(dist.distributed_c10d, "_get_default_group", NcclGroup)
    monkeypatch.setattr(dist.distributed_c10d, "_get_default_store", lambda: store)
    monkeypatch.setattr(dist, "get_backend", lambda *_: "nccl")
    monkeypatch.setattr(dist, "get_world_size", lambda: 2)
    places = threading.local()
    monkeypatch.setattr(dist, "get_rank", lambda: places.rank)

    def talk(rank: int) -> str:
        places.rank = rank
        transport = open_transport(None)
        buffer = bytearray(1)
        requests = [transport.irecv(buffer, 1 - rank, 5), transport.isend(bytes([rank]), 1 - rank, 5)]
        while requests:
            requests = [request for request in requests if not request.test()]
        transport.close()
        return f"{buffer[0]} by {transport.describe().partition(' of')[0]}"

    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        assert list(pool.map(talk, range(2))) == ["1 by torch: gloo", "0 by torch: gloo"]


@pytest.mark.parametrize("name", ["torch:", "mpi:gloo", "local:gloo", ":gloo", "Torch", ""])
def test_a_name_that_is_not_a_transport_is_refused(name: str) -> None:
    with pytest.raises(ValueError, match=f"transport must be one of .*, got '{name}'"):
        detection.detect({}, wanted=name)
