"""Polled backends of torch.distributed where conformance does not look: who is refused, who dies, and how it ends."""

from __future__ import annotations

import functools
import itertools
import re
import threading
from collections.abc import Callable
from dataclasses import dataclass, field

import pytest
import torch
from support import stand_in
from support.endings import lost_ranks, stopped_by
from support.torchrun import Result, run_ranks, run_source
from torch import distributed as dist

from asyncdist.errors import TransportError
from asyncdist.transports.torch_distributed import backend_self_test, backends
from asyncdist.transports.torch_distributed.meeting.sealed_store import SealedStore
from asyncdist.transports.torch_distributed.pollable_pairs import Pairs, Transit
from asyncdist.trust.job_secret import JobSecret

ENDS = "tests/scripts/torch_ends.py"
KILLED = -9
VICTIM = 2
SURVIVORS = (0, 1, 3)


# -------------------------------------------------------------------------------------------------------- the self-test


@dataclass
class Message:
    """A send or a receive between two threads, copied when both ends are there and the receiver looks."""

    medium: Medium
    place: tuple[int, int]
    view: memoryview
    is_send: bool
    is_done: bool = False

    def is_completed(self) -> bool:
        self.medium.match(self.place)
        lie = self.medium.lies.get("send" if self.is_send else "receive")
        return self.is_done if lie is None else lie

    def land(self) -> None:
        """It has, if it was copied."""


@dataclass
class Medium:
    """Messages between the threads of a test.

    Args:
        lies: what sends and receives say whenever they are asked.
        delivers: whether anything arrives.
    """

    lies: dict[str, bool] = field(default_factory=dict)
    delivers: bool = True
    posted: dict[tuple[int, int, bool], list[Message]] = field(default_factory=dict)
    lock: threading.Lock = field(default_factory=threading.Lock)

    def match(self, place: tuple[int, int]) -> None:
        with self.lock:
            sends, receives = (self.posted.setdefault((*place, is_send), []) for is_send in (True, False))
            while sends and receives and self.delivers:
                send, receive = sends.pop(0), receives.pop(0)
                receive.view[:] = send.view
                send.is_done = receive.is_done = True

    def post(self, source: int, dest: int, view: memoryview, is_send: bool) -> Message:
        message = Message(self, (source, dest), view, is_send)
        with self.lock:
            self.posted.setdefault((source, dest, is_send), []).append(message)
        return message


@dataclass
class Ends:
    """One rank's pairs on a medium."""

    medium: Medium
    rank: int

    def send(self, view: memoryview, dest: int) -> Message:
        return self.medium.post(self.rank, dest, view, is_send=True)

    def receive(self, view: memoryview, source: int) -> Message:
        return self.medium.post(source, self.rank, view, is_send=False)


def verdicts(size: int, make_pairs: Callable[[int], backend_self_test.Pairs], patience_s: float = 60.0) -> list[str]:
    """What the self-test says on each rank, each a thread; empty where it is content."""
    store = SealedStore(dist.HashStore(), JobSecret(b"a secret of some length"))
    found = ["no verdict"] * size

    def examine(rank: int) -> None:
        try:
            backend_self_test.examine(make_pairs(rank), "some", store, rank, size, patience_s=patience_s)
            found[rank] = ""
        except TransportError as error:
            found[rank] = str(error)

    threads = [threading.Thread(target=examine, args=(rank,)) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return found


@pytest.mark.parametrize("kind", ["truthful", "orderly"])
def test_works_that_tell_the_truth_pass(kind: str) -> None:
    store = dist.HashStore()

    def make_pairs(rank: int) -> Pairs:
        make = functools.partial(stand_in.Group, rank=rank, size=3, kind=kind)
        made.append(Pairs(lambda key: make(dist.PrefixStore(key, store)), rank, torch.device("cpu")))
        return made[-1]

    made: list[Pairs] = []
    assert verdicts(3, make_pairs) == ["", "", ""]
    for pairs in made:
        pairs.close()


@pytest.mark.parametrize(
    "medium",
    [
        # Nothing need arrive for these to be found out, so that no machine is too slow for it.
        Medium({"send": True, "receive": True}, delivers=False),
        # A send that is done with its buffer before it is: what the buffer holds next arrives.
        Medium({"send": True}),
    ],
)
def test_a_lie_is_named_on_every_rank(medium: Medium) -> None:
    found = verdicts(3, functools.partial(Ends, medium))
    assert len(set(found)) == 1
    seen = "rank 1's receive from rank 0 was said to be complete, and the bytes of that rank were not there"
    assert found[0].startswith(f"torch's backend 'some' cannot be polled: {seen}. gloo needs no such promise")


def test_a_process_without_the_secret_is_no_rank() -> None:
    """Regression: the test's messages were the same in every job, so a process in a rank's place could send them."""

    class Outsider(Ends):
        def send(self, view: memoryview, dest: int) -> Message:
            if self.rank == 0:
                block = bytes([next(numbers), self.rank, dest, 255])
                view = memoryview(bytearray(block * (len(view) // len(block))))
            return super().send(view, dest)

    numbers = itertools.count(1)
    found = verdicts(2, functools.partial(Outsider, Medium({})))
    assert len(set(found)) == 1
    assert "rank 1's receive from rank 0 was said to be complete, and the bytes of that rank were not there" in found[0]


def test_a_receive_complete_before_anything_was_sent_is_a_lie() -> None:
    """The first message arrives before the receiver asks: only the second can show it."""
    medium = Medium({"receive": True})

    class Patient(Ends):
        def receive(self, view: memoryview, source: int) -> Message:
            message = super().receive(view, source)
            while view[0] == 0 and not seen:  # until the first message is here
                medium.match((source, self.rank))
            seen.append(1)
            return message

    seen: list[int] = []
    found = verdicts(2, functools.partial(Patient, medium))
    assert len(set(found)) == 1
    assert "rank 1's receive from rank 0 was said to be complete before anything was sent" in found[0]


@pytest.mark.parametrize(
    ("medium", "seen"),
    [
        (Medium({"receive": False}), "(its bytes had come) within 2 s"),
        pytest.param(Medium({}, delivers=False), "(its bytes had not come either) within 2 s", marks=pytest.mark.long),
    ],
)
def test_works_that_never_turn_complete_are_named(medium: Medium, seen: str) -> None:
    """Sends that have nothing to say against them, so that it is the receive that is found."""
    medium.lies["send"] = True
    found = verdicts(2, functools.partial(Ends, medium), patience_s=2.0)
    assert len(set(found)) == 1
    assert f"rank 1's receive from rank 0 was not said to be complete {seen}" in found[0]


@pytest.mark.parametrize(
    ("call", "seen"),
    [
        ("send", "rank 0's send to rank 1"),
        pytest.param("receive", "rank 1's receive from rank 0", marks=pytest.mark.long),
    ],
)
def test_a_call_that_blocks_forever_is_named_and_holds_no_rank(call: str, seen: str) -> None:
    class Blocking(Ends):
        pass

    def block(*_: object) -> Message:
        let_go.wait()
        raise RuntimeError("let go")

    let_go = threading.Event()
    setattr(Blocking, call, block)
    found = verdicts(2, functools.partial(Blocking, Medium({"send": True})), patience_s=3.0)
    let_go.set()
    assert len(set(found)) == 1
    assert f"{seen} blocked: the call that starts it did not return within 3 s" in found[0]


@pytest.mark.long
def test_gloo_does_not_pass() -> None:
    """The day it does, it can be polled, and most of ``torch_distributed/gloo.py`` can go."""
    source = """
        import datetime, os
        import torch
        from support.mpi import report
        from torch import distributed as dist
        from asyncdist import environment
        from asyncdist.errors import TransportError
        from asyncdist.transports.torch_distributed import backend_self_test, backends
        from asyncdist.transports.torch_distributed.meeting import rendezvous
        from asyncdist.transports.torch_distributed.pollable_pairs import Pairs

        rank = int(os.environ["RANK"])
        store = rendezvous.join_store(environment.torch_rendezvous(), rank, 2, 60.0)
        make = lambda name: backends.make_gloo_group(store, name, rank, 2, datetime.timedelta(seconds=60))
        try:
            backend_self_test.examine(Pairs(make, rank, torch.device("cpu")), "gloo", store, rank, 2, patience_s=5.0)
        except TransportError as error:
            report(rank, str(error))
        os._exit(0)  # works that nobody waits for are under way
    """
    reports = run_source(2, source).check().reports
    assert reports[0] == reports[1]
    assert re.search("'gloo' .*rank [01]'s (send|receive) .* not said to be complete", reports[0])


@pytest.mark.parametrize(
    ("backend", "seen"),
    [
        ("hasty", r"rank \d's (send|receive) (to|from) rank \d was said"),
        pytest.param(
            "mute",
            r"rank \d's (send|receive) (to|from) rank \d was not said.*\b3 s",
            marks=pytest.mark.long,
        ),
        ("broken", r"rank \d .*this backend is a ruin"),
    ],
)
@pytest.mark.parametrize("bulk", [False, pytest.param(True, marks=pytest.mark.long)])
def test_a_backend_that_fails_is_refused_by_all_ranks(backend: str, seen: str, bulk: bool) -> None:
    source = """
        import sys
        from support import stand_in
        import asyncdist as ad
        from asyncdist.transports.torch_distributed import backend_self_test

        if sys.argv[1] == "torch:mute":
            backend_self_test.examine.__kwdefaults__["patience_s"] = 3.0
        stand_in.register()

        async def main(world):
            raise AssertionError

        ad.run(main, transport=sys.argv[2] or sys.argv[1], bulk=sys.argv[1] if sys.argv[2] else None)
    """
    result = run_source(3, source, f"torch:{backend}", "torch" if bulk else "").check(1, 1, 1)
    found = re.findall(r"TransportError: (.*'\w+'.*)", result.stderr)
    assert len(found) == 3 and len(set(found)) == 1, result.output()
    assert re.search(f"'{backend}' .*{seen}", found[0])


# ---------------------------------------------------------------------------------------------------- what goes wrong


def ours(result: Result) -> list[str]:
    """What was printed, without torch's warnings that somebody was slow to reach the store."""
    return [line for line in result.stderr.splitlines() if not re.match(r"\[W.*\[c10d\]", line)]


@functools.cache
def loss() -> Result:
    return run_ranks(4, ENDS, "lost", "truthful").check(0, 0, KILLED, 0)


@pytest.mark.parametrize("rank", SURVIVORS)
def test_what_involves_a_killed_rank_fails_and_the_rest_goes_on(rank: int) -> None:
    found = loss().reports[rank]
    kinds = ["receive", "large receive", "large send", *(["stream"] if rank in (0, 1) else [])]
    assert found["errors"] == {kind: ["RankLostError", VICTIM] for kind in kinds}
    assert "rank 2 " in found["text"] and "(Connection closed by peer" in found["text"]
    assert found["later"] == ["2", "2"], "a send and a receive posted afterwards"
    assert (found["lost"], VICTIM in found["gone"]) == ([VICTIM], True)
    assert found["last_words"] == "last words", "what it had sent before"
    assert found["arrived"] == 2 * 2 * (1 << 20)


def test_the_others_end_cleanly() -> None:
    assert [lost_ranks(line) for line in ours(loss())] == [[2]]


@pytest.mark.long
def test_a_loss_that_nobody_waits_for_is_noticed() -> None:
    result = run_ranks(4, ENDS, "lost_at_rest", "truthful").check(0, 0, KILLED, 0)
    assert {rank: result.reports[rank]["lost"] for rank in SURVIVORS} == {rank: [VICTIM] for rank in SURVIVORS}


@pytest.mark.long
def test_an_exception_ends_the_job_everywhere() -> None:
    result = run_ranks(3, ENDS, "raises", "truthful").check(1, 1, 1)
    assert result.stderr.count("Traceback") == 1
    assert stopped_by(result.stderr, 1, "ValueError: boom-7") == [0, 2]


@pytest.mark.long
def test_messages_that_nobody_receives_do_not_hold_the_end() -> None:
    result = run_ranks(3, ENDS, "leaves_all_kinds_of_work", "truthful").check()
    assert "2 requests" in result.stderr


def test_a_rank_that_dies_during_a_bulk_stream_is_named() -> None:
    """Rank 1 is killed with a stream under way in each direction, over gloo and a backend that ignores tags."""
    source = """
        import asyncio, os, signal
        import torch
        from support import stand_in
        from support.mpi import report
        import asyncdist as ad

        stand_in.register()

        async def main(world):
            peer = {0: 1, 1: 0, 2: 2}[world.rank]
            await ad.barrier()
            if world.rank < 2:
                sending = asyncio.ensure_future(world.send_stream(torch.zeros(1 << 26), peer))
                receiving = asyncio.ensure_future(world.receive_stream(torch.zeros(1 << 26), peer))
                if world.rank == 1:
                    await world.services.engine.until(lambda: world.services.slots.taken_count == 1)
                    await world.services.engine.send(b"!", 0, 5)
                    os.kill(os.getpid(), signal.SIGKILL)
                await world.services.engine.receive(bytearray(1), 1, 5)
                await asyncio.wait([sending, receiving])
                errors = [sending.exception(), receiving.exception()]
                report(0, [[type(error).__name__, error.rank] for error in errors])
            await world.services.engine.until(lambda: 1 in world.services.gone)

        ad.run(main, transport="torch", bulk="torch:orderly")
    """
    result = run_source(3, source).check(0, KILLED, 0)
    assert result.reports == {0: [["RankLostError", 1]] * 2}
    assert ours(result) == []


# ------------------------------------------------------------------------------------------------------------- backends


def test_the_uses_of_backends() -> None:
    stand_in.register()
    assert backends.describe_use("gloo") == "messages and streams, waited for by threads"
    assert backends.describe_use("truthful") == "messages and streams, polled, if its works pass the test at the start"
    cuda = dist.is_nccl_available() and torch.cuda.is_available()
    assert backends.describe_use("nccl").startswith("streams alone, polled" if cuda else "unused here")
    assert backends.device_of("truthful", 3) == torch.device("cpu")


def test_a_backend_for_which_there_is_no_group_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dist, "is_backend_available", lambda name: True)
    with pytest.raises(ValueError, match="bulk is 'torch:mpi', for which nothing here can make a group"):
        backends.check_backend("mpi", what="bulk")


def test_a_group_that_cannot_be_made_says_what_torch_said() -> None:
    def refuse(*_: object) -> None:
        raise RuntimeError("[x.cc:7] no route. This is typically a stack")

    dist.Backend.register_backend("unmakeable", refuse, devices=["cpu"])
    with pytest.raises(TransportError, match=r"torch's backend 'unmakeable' made no group of 2 ranks: no route$"):
        backends.make_group("unmakeable", "k", dist.HashStore(), 0, 2, backends._FOREVER)


def test_a_backend_with_the_extended_interface_gets_it() -> None:
    def make(options: object, more: object) -> object:
        assert more is None
        return options

    dist.Backend.register_backend("extended", make, extended_api=True, devices=["cpu"])
    made = backends.make_group("extended", "k", dist.HashStore(), 1, 2, backends._FOREVER)
    assert (made.group_rank, made.group_size, made.group_id) == (1, 2, "k")


def test_a_devices_buffer_is_copied_only_when_complete() -> None:
    class Later:
        is_here = False

        def is_completed(self) -> bool:
            return self.is_here

        def wait(self) -> None:
            assert self.is_here, "a wait before that would block"

    work, device, host = Later(), torch.ones(4), torch.zeros(4)
    transit = Transit(work, device, host)
    assert not transit.test() and host.tolist() == [0.0] * 4
    work.is_here = True
    assert transit.test() and host.tolist() == [1.0] * 4
