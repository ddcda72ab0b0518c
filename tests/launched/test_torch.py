"""The torch transport where conformance does not look: how ranks meet, die and end, and what runs beside them."""

from __future__ import annotations

import concurrent.futures
import functools
import logging
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from support.torchrun import Result, free_port, rank_environment, run_ranks, run_source, run_torchrun, run_torchruns
from torch import distributed as dist

import asyncdist as ad
from asyncdist import environment
from asyncdist.errors import RankLostError, TransportError, TruncationError
from asyncdist.transports.base import ANY_SOURCE
from asyncdist.transports.matching import CallbackQueue, InlineMessage, LocalMessage, Matcher, Receive, Send
from asyncdist.transports.torch_distributed import gloo_mesh, rendezvous
from asyncdist.transports.torch_distributed.failures import reason
from asyncdist.transports.torch_distributed.gloo import _ENTRY, _FRAME, _MESSAGE, _RING_COUNT, Link
from asyncdist.transports.torch_distributed.rendezvous import _Gathering as Gathering

MIB = 1 << 20
VICTIM = 2
SURVIVORS = (0, 1, 3)
KILLED = -9
#: What takes hundredths of a second has gone wrong when it takes this: half of the shortest timeout inside.
LONG_S = 30.0
ENDS = "tests/scripts/torch_ends.py"


# ------------------------------------------------------------------------------------------------ a rank that is killed


@functools.cache
def loss() -> Result:
    return run_ranks(4, ENDS, "lost").check(0, 0, KILLED, 0)


@pytest.mark.parametrize("rank", SURVIVORS)
def test_what_involves_a_killed_rank_fails_and_names_it(rank: int) -> None:
    found = loss().reports[rank]
    kinds = ["receive", "large receive", "large send", *(["stream"] if rank in (0, 1) else [])]
    assert found["errors"] == {kind: ["RankLostError", VICTIM] for kind in kinds}
    assert found["text"].startswith("rank 2 is gone: its connection was closed (")
    assert "GLHF" not in found["text"] and ".cc" not in found["text"], "gloo's own words to its developers"
    assert found["later"] == ["2", "2"], "a send and a receive posted afterwards"
    assert (found["lost"], VICTIM in found["gone"]) == ([VICTIM], True)


@pytest.mark.parametrize("rank", SURVIVORS)
def test_what_a_killed_rank_has_sent_before_is_received(rank: int) -> None:
    assert loss().reports[rank]["last_words"] == "last words"


@pytest.mark.parametrize("rank", SURVIVORS)
def test_the_others_go_on_talking(rank: int) -> None:
    assert loss().reports[rank]["arrived"] == 2 * 2 * MIB


@pytest.mark.parametrize("rank", SURVIVORS)
def test_a_loss_is_known_long_before_anything_times_out(rank: int) -> None:
    """Connections tell, in a few hundredths of a second; gloo's own patience is a minute, the store's too."""
    killed_at, ended_at = loss().reports[VICTIM]["at"], loss().reports[rank]["ended_at"]
    assert len(ended_at) == len(loss().reports[rank]["errors"])
    assert all(killed_at < at < killed_at + LONG_S for at in ended_at)


def test_the_others_end_cleanly() -> None:
    assert loss().stderr == ""


def test_an_average_that_loses_a_member_on_its_way_holds_nobody() -> None:
    result = run_ranks(4, ENDS, "lost_in_an_average").check(0, 0, KILLED, 0)
    assert [result.reports[rank] for rank in SURVIVORS] == [{"lost": [2], "in step": 7}] * 3


def test_a_loss_that_nobody_waits_for_is_noticed() -> None:
    result = run_ranks(4, ENDS, "lost_at_rest").check(0, 0, KILLED, 0)
    assert result.reports[VICTIM].keys() == {"at"}
    killed_at = result.reports[VICTIM]["at"]
    for rank in SURVIVORS:
        assert result.reports[rank]["lost"] == [VICTIM]
        assert killed_at < result.reports[rank]["at"] < killed_at + LONG_S


# -------------------------------------------------------------------------------------------------------------- the end


def test_an_exception_ends_the_job_everywhere() -> None:
    result = run_ranks(3, ENDS, "raises").check(1, 1, 1)
    assert result.stderr.count("ValueError: boom-7") == 3
    assert result.stderr.count("Traceback") == 1
    for rank in (0, 2):
        assert f"asyncdist: rank {rank} stopped: rank 1 failed: ValueError: boom-7" in result.stderr


def test_a_line_stands_for_each_error_of_a_rank_that_has_heard_of_a_failure() -> None:
    """The line was printed for one error, and the other one, which main had raised, was shown as usual below it."""
    result = run_ranks(2, ENDS, "raises_in_words_of_its_own").check(1, 1)
    assert "asyncdist: rank 0 stopped: rank 1 failed: ValueError: boom-7" in result.stderr
    assert result.stderr.count("Traceback") == 1
    assert "no use without" not in result.stderr


def test_a_peer_that_cannot_listen_is_aborted() -> None:
    result = run_ranks(2, ENDS, "raises_beside_a_blocked_peer").check(1, 1)
    assert "ranks [0] did not stop within 1 s; aborting the job" in result.stderr
    assert "rank 1 aborted the job" in result.stderr


def test_an_exit_code_is_kept() -> None:
    result = run_ranks(3, ENDS, "exits").check(1, 3, 1)
    assert sorted(result.stderr.splitlines()) == [
        f"asyncdist: rank {rank} stopped: rank 1 failed: SystemExit: 3" for rank in (0, 2)
    ]


def test_messages_that_nobody_receives_do_not_hold_the_end() -> None:
    result = run_ranks(3, ENDS, "leaves_all_kinds_of_work").check()
    assert result.stderr.count("2 requests: left over") == 3


def test_closing_leaves_no_thread() -> None:
    for found in run_ranks(4, ENDS, "closes").check().reports.values():
        (took_s,) = found["took"]
        assert found["alive"] == [] and took_s < LONG_S


@dataclass
class SlowLink:
    """A link whose threads take so long to end."""

    seconds: float
    error: RankLostError | None = None
    said_goodbye: bool = True

    def say_goodbye(self) -> None:
        """Nobody hears."""

    def join(self, deadline: float) -> list[str]:
        return ["post-1"] if deadline < time.monotonic() + self.seconds else []


@pytest.mark.parametrize("is_failed", [False, True])
def test_threads_that_end_late_are_waited_for_and_no_reason_to_fail(
    is_failed: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """32 ranks on two cores have three thousand threads. Those of a lost rank may never end, nor after a failure."""
    mesh = gloo_mesh.Mesh(lambda _: None, 0, 1, Matcher(CallbackQueue()))
    mesh.links = cast(Any, {1: SlowLink(10.0)})
    with caplog.at_level(logging.WARNING, "asyncdist"):
        mesh.close(gloo_mesh.HOPELESS_JOIN_S if is_failed else gloo_mesh.JOIN_S)
    assert ("threads that wait for gloo did not end: post-1" in caplog.text) == is_failed
    assert mesh.links == {}
    mesh.links = cast(Any, {1: SlowLink(10.0, RankLostError("rank 1 is gone", rank=1), said_goodbye=False)})
    mesh.close()
    assert "threads that wait for gloo did not end: post-1" in caplog.text


def test_a_world_after_one_that_failed() -> None:
    reports = run_ranks(3, ENDS, "caught").check().reports
    assert [reports[rank]["kind"] for rank in range(3)] == ["RankLostError", "ValueError", "RankLostError"]
    assert all(found["alive"] == [] for found in reports.values())


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
def test_beside_a_process_group_of_the_user_under_torchrun(order: str) -> None:
    result = run_torchrun(2, BESIDE_A_GROUP, order).check()
    assert result.reports == dict.fromkeys(range(2), [1.0] * SUM_COUNTS[order])


def test_beside_distributed_data_parallel() -> None:
    """The script computes with plain torch what either model must be."""
    reports = run_ranks(3, "tests/scripts/beside_ddp.py").check().reports
    for refusals, averages, kept, off, apart, weights in reports.values():
        assert refusals == [
            "ValueError: model is wrapped in DistributedDataParallel",
            "LocalProtocolError: model is inside DistributedDataParallel",
        ]
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


def test_a_group_of_the_users_that_no_launcher_made_is_found() -> None:
    """Started by torch.multiprocessing.spawn, each rank trained alone, and said nothing."""
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
    result = run_source(1, source, f"tcp://127.0.0.1:{free_port()}", env=unset).check()
    assert result.reports == {rank: ["torch", rank, 2, 2.0] for rank in range(2)}


def test_torchrun_starts_workers_again_as_another_job() -> None:
    """The first time rank 1 dies while messages of that job are under way."""
    source = """
        import os
        import asyncdist as ad
        from support.mpi import report

        attempt = int(os.environ["TORCHELASTIC_RESTART_COUNT"])

        async def main(world):
            await ad.barrier()
            peer = 1 - world.rank
            if attempt == 0:
                world.services.engine.watch(world.services.engine.transport.isend(b"old", peer, 1), "old")
                world.services.engine.watch(world.services.engine.transport.isend(bytearray(1 << 20), peer, 1), "old")
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
def test_two_agents_that_count_restarts_differently_meet_again(tmp_path: Path, when: str, unshared: str) -> None:
    """An agent counts its own failures: one said 0, the other 1, and ranks that went by that never met."""
    env = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": unshared}
    told = tmp_path / "told"
    result = run_torchruns(2, FAILS_ONCE, told, when, options=("--max-restarts", "2"), **env).check()
    assert told.exists(), "rank 1 has not failed"
    if when == "early":  # later both fail, or one is stopped before it does
        assert sorted(count for count, _ in result.reports.values()) == ["0", "1"]
    assert [values for _, values in result.reports.values()] == [[2, 2], [2, 2]]


def test_a_rank_that_comes_late_is_awaited_in_silence() -> None:
    """The store's own wait printed two lines a second."""
    source = """
        import os, time
        import asyncdist as ad

        async def main(world):
            await ad.barrier()

        if os.environ["RANK"] == "1":
            time.sleep(6)
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


def test_ranks_that_never_come_are_named() -> None:
    result = run_source(4, SHORT_START, missing=(1, 3)).check(1, 1)
    for rank in (0, 2):
        assert f"rank {rank} waits for ranks [1, 3], which did not come" in result.stderr


def test_ranks_that_never_come_are_named_by_those_who_outwait_the_store() -> None:
    """Rank 0 gave up a moment before rank 2, whose error then was the store's, not the missing ranks."""
    patient = SHORT_START.replace("= 3.0", "= 3.0 if os.environ['RANK'] == '0' else 60.0")
    result = run_source(4, "\n    import os" + patient, missing=(1, 3)).check(1, 1)
    assert "rank 0 waits for ranks [1, 3], which did not come" in result.stderr
    assert "rank 2 waits for ranks [1, 3], which did not come" in result.stderr
    assert "before the store closed: " in result.stderr


def test_a_missing_rank_0_is_named() -> None:
    result = run_source(2, SHORT_START, missing=(0,)).check(1)
    assert "rank 1 waits for rank 0, but nobody serves a store at 127.0.0.1:" in result.stderr


def test_a_port_that_is_taken_is_named() -> None:
    with socket.socket() as holder:
        holder.bind(("127.0.0.1", 0))
        holder.listen()
        port = holder.getsockname()[1]
        result = run_source(2, SHORT_START, missing=(1,), env={"MASTER_PORT": str(port)}).check(1)
    assert f"rank 0 cannot serve a store at 127.0.0.1:{port} (MASTER_ADDR, MASTER_PORT)" in result.stderr
    assert "address already in use" in result.stderr.lower()


def test_two_processes_of_one_rank_are_named() -> None:
    """They waited in silence, and then were told that another rank was missing."""
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
    assert "rank 1 has come twice: two processes were started as this rank (RANK)" in result.stderr


def test_sizes_that_differ_are_named() -> None:
    source = """
    import os
    if os.environ["RANK"] == "1":
        os.environ["WORLD_SIZE"] = os.environ["LOCAL_WORLD_SIZE"] = "2"
    """
    result = run_source(3, source + SHORT_START)
    assert result.returncodes == (1, 1, 1)
    assert "rank 1 is one of 2 ranks (WORLD_SIZE), rank 0 one of 3" in result.stderr


def test_a_store_that_has_gone_is_not_tried_for_longer_than_the_ranks_wait() -> None:
    """Two minutes passed where rank 0 failed between another rank's look for a listener and its connection."""
    port = free_port()
    place = environment.TorchRendezvous(1, 2, "127.0.0.1", port, False)
    with pytest.raises(TransportError, match=rf"rank 1 cannot use the store at 127\.0\.0\.1:{port}"):
        rendezvous._reach(place, port, deadline=time.monotonic())


def test_an_address_that_leads_to_no_host_is_named_at_once() -> None:
    """It was asked for again and again, for 300 s."""
    result = run_source(2, SHORT_START.replace("= 3.0", "= 300.0"), env={"MASTER_ADDR": "no host.invalid"}).check(1, 1)
    assert result.stderr.count("ValueError: MASTER_ADDR='no host.invalid' leads to no host (") == 2


def test_one_rank_needs_no_store() -> None:
    source = SHORT_START.replace("await ad.barrier()", "await ad.barrier(); print(world)")
    result = run_source(1, source, env={"MASTER_PORT": "1"}).check()
    assert result.stdout.startswith("<World rank 0 of 1, torch")


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        ({"MASTER_PORT": ""}, "unset: MASTER_PORT"),
        ({"RANK": "", "MASTER_ADDR": ""}, "unset: RANK, MASTER_ADDR"),
        ({"MASTER_PORT": "http"}, "MASTER_PORT='http' is not a whole number"),
        ({"MASTER_PORT": "65536"}, r"MASTER_PORT=65536 is no port; 1\.\.65535 are"),
        ({"RANK": "4"}, r"RANK=4 is outside 0\.\.3, which WORLD_SIZE=4 allows"),
        ({"WORLD_SIZE": "0"}, "WORLD_SIZE=0 is not a number of ranks"),
    ],
)
def test_variables_that_make_no_sense_are_named(changes: dict[str, str], match: str) -> None:
    environ = {**rank_environment(1, 4, 29500), **changes}
    with pytest.raises(ValueError, match=match):
        environment.torch_rendezvous(environ)


def test_the_rendezvous_is_what_torchrun_says() -> None:
    environ = rank_environment(1, 4, 29500)
    assert environment.torch_rendezvous(environ) == environment.TorchRendezvous(1, 4, "127.0.0.1", 29500, False)
    assert environment.torch_rendezvous({**environ, "TORCHELASTIC_USE_AGENT_STORE": "True"}).is_store_served


# -------------------------------------------------------------------------------------------------------- the handshake


def gather(store: Any, ranks: Sequence[int], size: int, timeout_s: float = 100.0) -> list[str]:
    """What becomes of these ranks, a thread each: the token of their world, or why there is none."""

    def come(rank: int) -> str:
        gathering = Gathering(store, rank, size, time.monotonic() + timeout_s)
        try:
            gathering.come()
            gathering.let_go()
        except TransportError as error:
            return str(error)
        return bytes(gathering.world.get("whose")).decode() if rank else whose(gathering)

    def whose(gathering: Gathering) -> str:
        token = f"{time.monotonic_ns()}"
        gathering.world.set("whose", token)
        return token

    with concurrent.futures.ThreadPoolExecutor(len(ranks)) as pool:
        return list(pool.map(come, ranks))


def test_ranks_gather_again_and_again_where_others_have_said_hello() -> None:
    store = dist.HashStore()
    for rank in range(4):
        store.set(f"asyncdist/hello/{rank}", "of somebody dead")
    worlds = [set(gather(store, range(size), size)) for size in (4, 4, 2, 3)]
    assert [len(tokens) for tokens in worlds] == [1, 1, 1, 1], "ranks of one gathering are in one world"
    assert len(set.union(*worlds)) == 4, "and not in that of another one"


def test_a_rank_that_is_started_again_while_others_gather_is_answered_again() -> None:
    store = dist.HashStore()
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        others = pool.submit(gather, store, (0, 1), 3)
        dead = dist.PrefixStore("asyncdist", store)
        dead.set("hello/2", "of somebody who is answered, and dies")
        dead.wait(["answer/of somebody who is answered, and dies"], timedelta(seconds=100))
        assert len({*gather(store, (2,), 3), *others.result()}) == 1


@pytest.mark.parametrize("ranks", [(0, 0), (0, 1, 1)])
def test_a_process_that_comes_as_a_rank_that_is_there_is_named_by_both_and_by_rank_0(ranks: tuple[int, ...]) -> None:
    for text in gather(dist.HashStore(), ranks, 3):
        assert text.startswith(f"rank {ranks[-1]} has come twice: ")


def test_a_rank_beyond_those_that_rank_0_counts_on_is_told_and_so_is_rank_0() -> None:
    store = dist.HashStore()
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        stray = pool.submit(gather, store, (3,), 4)
        told = [*gather(store, (0,), 2), *stray.result()]
    assert told == ["rank 3 is one of 4 ranks (WORLD_SIZE), rank 0 one of 2 [rank=3]"] * 2


def test_a_stray_that_is_no_more_holds_nobody_up() -> None:
    store = dist.HashStore()
    store.set("asyncdist/unanswered", "3 of somebody dead")
    assert len(set(gather(store, (0, 1), 2))) == 1


# ------------------------------------------------------------------------------------------------------------ backends


NOT_THESE = [
    ("nccl", "NCCL ignores tags"),
    ("tcp", "this torch has registered gloo, nccl"),
    ("mpi", "this torch was built without"),
]


@pytest.mark.parametrize(("backend", "words"), NOT_THESE)
def test_a_backend_that_carries_no_messages_is_refused(
    backend: str, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def main(world: ad.World) -> None:
        raise AssertionError

    with pytest.raises(ValueError, match=f"transport is 'torch:{backend}'.*{words}.*messages is gloo") as caught:
        ad.run(main, transport=cast("Any", f"torch:{backend}"))
    monkeypatch.setenv("ASYNCDIST_TRANSPORT", f"torch:{backend}")
    with pytest.raises(ValueError, match=words) as by_variable:
        ad.run(main)
    assert str(by_variable.value) == str(caught.value)


@pytest.mark.parametrize(("backend", "words"), NOT_THESE)
def test_the_command_refuses_it_before_anything_starts(backend: str, words: str) -> None:
    command = [sys.executable, "-m", "asyncdist", "run", "--transport", f"torch:{backend}", "-n", "2", "missing.py"]
    result = subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)
    assert (result.returncode, result.stdout) == (2, "")
    assert words in result.stderr and len(result.stderr.splitlines()) == 1


@pytest.mark.parametrize(
    ("name", "launched"), [("torch", "torch"), ("torch:gloo", "torch"), ("mpi", "mpi"), ("local", "local")]
)
def test_torch_means_gloo(name: str, launched: str) -> None:
    for found in (environment.detect({}, wanted=name), environment.detect({environment.TRANSPORT_VARIABLE: name})):
        assert (found.transport, found.backend) == (launched, "gloo")


@pytest.mark.parametrize("name", ["torch:", "mpi:gloo", "local:gloo", ":gloo"])
def test_a_backend_of_nothing_is_refused(name: str) -> None:
    with pytest.raises(ValueError, match=f"transport is '{name}'; allowed are"):
        environment.detect({}, wanted=name)


# ------------------------------------------------------------------------------------------------------------- matching


@pytest.fixture
def matcher() -> Matcher:
    return Matcher(CallbackQueue())


def inline(source: int, tag: int, data: bytes) -> InlineMessage:
    return InlineMessage(source, tag, memoryview(data))


def post(matcher: Matcher, nbytes: int, source: int, tag: int) -> tuple[Receive, bytearray]:
    buffer = bytearray(nbytes)
    receive = Receive(matcher, buffer, source, tag)
    matcher.post(receive)
    return receive, buffer


def test_the_first_receive_that_fits_takes_the_message(matcher: Matcher) -> None:
    other_tag, _ = post(matcher, 1, 1, 6)
    other_source, _ = post(matcher, 1, 2, 5)
    anybody, buffer = post(matcher, 1, ANY_SOURCE, 5)
    late, _ = post(matcher, 1, 1, 5)
    matcher.deliver(inline(1, 5, b"x"))
    assert [r.test() for r in (other_tag, other_source, anybody, late)] == [False, False, True, False]
    assert (anybody.source, anybody.nbytes, buffer) == (1, 1, b"x")


def test_the_first_message_that_fits_is_taken(matcher: Matcher) -> None:
    for source, data in ((1, b"a"), (2, b"b"), (1, b"c")):
        matcher.deliver(inline(source, 5, data))
    found = [post(matcher, 1, source, 5)[1] for source in (2, ANY_SOURCE, 1)]
    assert found == [b"b", b"a", b"c"]


def test_a_message_above_its_buffer_names_both_sizes(matcher: Matcher) -> None:
    receive, buffer = post(matcher, 3, ANY_SOURCE, 5)
    matcher.deliver(inline(7, 5, b"four"))
    with pytest.raises(TruncationError, match="4 bytes arrived for a buffer of 3 bytes"):
        receive.test()
    assert buffer == bytes(3)


def test_a_large_message_to_oneself_is_sent_when_it_is_received(matcher: Matcher) -> None:
    rung: list[None] = []
    matcher.callbacks.set_bell(lambda: rung.append(None))
    data = bytearray(b"y" * 100_000)
    send = Send(matcher.callbacks, len(data))
    matcher.deliver(LocalMessage(matcher.callbacks, send, 0, 5, memoryview(data)))
    assert not send.test() and not rung
    receive, buffer = post(matcher, 100_000, 0, 5)
    assert receive.test() and send.test() and rung and buffer == data


def test_a_lost_rank_fails_its_receives_alone_and_keeps_what_came_whole(matcher: Matcher) -> None:
    matcher.deliver(inline(1, 5, b"z"))
    mine, others, anybodys = (post(matcher, 1, source, 6)[0] for source in (1, 2, ANY_SOURCE))
    matcher.lose(1, RankLostError("rank 1 is gone", rank=1))
    with pytest.raises(RankLostError, match="rank 1 is gone"):
        mine.test()
    assert not others.test() and not anybodys.test()
    assert post(matcher, 1, 1, 5)[1] == b"z"
    with pytest.raises(RankLostError):
        post(matcher, 1, 1, 5)[0].test()


def test_a_matched_receive_cannot_be_withdrawn(matcher: Matcher) -> None:
    receive, _ = post(matcher, 1, 1, 5)
    receive.cancel()
    assert receive.test() and receive.cancelled
    matcher.deliver(inline(1, 5, b"k"))
    receive, buffer = post(matcher, 1, 1, 5)
    receive.cancel()
    assert receive.test() and not receive.cancelled and buffer == b"k"


def test_the_inbox_rings_once_for_all_that_came_and_again_after_a_look() -> None:
    inbox, rung, seen = CallbackQueue(), list[None](), list[int]()
    inbox.put(seen.append, 1)  # before anybody listens
    inbox.set_bell(lambda: rung.append(None))
    inbox.put(seen.append, 2)
    assert (len(rung), seen) == (1, [])
    inbox.empty()
    inbox.put(seen.append, 3)
    assert (len(rung), seen) == (2, [1, 2])


def test_a_look_between_a_call_and_its_bell_does_not_silence_the_next_one() -> None:
    """It did: a rank slept for ever with a message in its inbox."""
    inbox, rung, seen = CallbackQueue(), list[None](), list[int]()

    def look_then_ring() -> None:
        inbox.empty()
        rung.append(None)

    inbox.set_bell(look_then_ring)
    for number in range(3):
        inbox.put(seen.append, number)
    assert (len(rung), seen) == (3, [0, 1, 2])


def test_what_gloo_says_is_cut_to_the_fact() -> None:
    text = "[/gloo/pair.cc:7] Read error [127.0.0.1]:51409: Connection reset by peer. This is typically caused by\nx"
    assert reason(RuntimeError(text)) == "Read error [127.0.0.1]:51409: Connection reset by peer"
    assert reason(RuntimeError("plain")) == "plain"


# --------------------------------------------------------------------------------------------------------------- links


class DyingPeer:
    """In place of gloo's group: the peer has sent some frames and died before any of them was looked at."""

    def __init__(self, frames: Sequence[bytes]) -> None:
        self._frames = list(frames)
        self._room_count = _RING_COUNT

    def recv(self, tensors: list[torch.Tensor], peer: int, tag: int) -> Any:
        del peer, tag
        if not self._room_count:
            raise RuntimeError("Connection closed by peer")
        self._room_count -= 1
        frame = self._frames.pop(0) if self._frames else None
        if frame is not None:
            tensors[0][: len(frame)] = torch.frombuffer(bytearray(frame), dtype=torch.uint8)

        def wait(timeout: timedelta) -> None:
            del timeout
            if frame is None:
                raise RuntimeError("Connection closed by peer")

        return SimpleNamespace(wait=wait)

    def send(self, *_: object) -> Any:
        raise RuntimeError("Connection closed by peer")


@pytest.mark.parametrize("count", [0, 1, 4, 8, 9, _RING_COUNT])
def test_all_frames_of_a_peer_that_has_died_since_are_taken_before_its_loss_is_told(
    matcher: Matcher, count: int
) -> None:
    """Some receives of the ring are posted again meanwhile, which gloo refuses: the others have come all the same."""
    entries = [_ENTRY.pack(_MESSAGE, 7, 0, 1) + bytes([number]) for number in range(count)]
    control = DyingPeer([_FRAME.pack(0, _FRAME.size + len(entry)) + entry for entry in entries])
    lost: list[str] = []
    rung = threading.Event()
    matcher.callbacks.set_bell(rung.set)
    receives = [post(matcher, 1, 3, 7) for _ in range(count)]
    Link(3, control, DyingPeer([]), matcher, lambda rank, error: lost.append(f"{rank}: {error}"))
    while not lost:
        assert rung.wait(LONG_S)
        rung.clear()
        matcher.callbacks.empty()
    assert [list(buffer) for receive, buffer in receives if receive.done] == [[number] for number in range(count)]
    assert lost == ["3: rank 3 is gone: its connection was closed (Connection closed by peer) [rank=3]"]
