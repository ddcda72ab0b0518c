"""Tests which processes are trusted: seals on values in a store, proofs over connections, and living ranks."""

from __future__ import annotations

import contextlib
import logging
import os
import subprocess
import sys
import threading
import time
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, strategies as st
from torch.distributed import HashStore, PrefixStore, TCPStore

from asyncdist.errors import TransportError
from asyncdist.launchers import detection
from asyncdist.launchers.variables import TorchRendezvous
from asyncdist.transports.torch_distributed import gloo_groups, transport
from asyncdist.transports.torch_distributed.meeting import rendezvous, stores
from asyncdist.transports.torch_distributed.meeting.stores import Refusals, SealedStore
from asyncdist.trust import job_secret
from asyncdist.trust.job_secret import JobSecret
from asyncdist.trust.living_ranks import LivingRank

OURS, OTHER = JobSecret(b"the secret of this job"), JobSecret(b"the secret of another one")


# -- seals ------------------------------------------------------------------------------------------------------------


@given(st.text(), st.binary(), st.text(), st.binary())
def test_a_seal_holds_for_its_name_value_and_secret_alone(name: str, value: bytes, name2: str, value2: bytes) -> None:
    sealed = OURS.seal(name, value)
    assert OURS.unseal(name, sealed) == value
    assert OTHER.unseal(name, sealed) is None and JobSecret().unseal(name, sealed) is None
    assert name2 == name or OURS.unseal(name2, sealed) is None
    assert value2 == value or OURS.unseal(name, sealed[: job_secret.SEAL_NBYTES] + value2) is None


@given(st.binary())
def test_garbage_is_never_a_sealed_value(data: bytes) -> None:
    assert OURS.unseal("newcomer/1", data) is None and JobSecret().unseal("newcomer/1", data) is None


def test_proof_holds_for_one_process_pair_on_one_connection() -> None:
    proofs = [
        secret.proof(*facts) for secret in (OURS, OTHER) for facts in (("w/0", 0, 1), ("w/0", 1, 0), ("w/1", 0, 1))
    ]
    assert len(set(proofs)) == len(proofs)


def test_no_representation_shows_a_secret() -> None:
    place = TorchRendezvous(0, 2, "127.0.0.1", 1, False, secret=OURS)
    assert "secret of this job" not in f"{OURS!r} {place!r}"


# -- stores -----------------------------------------------------------------------------------------------------------


def test_what_an_outsider_writes_counts_as_absent(caplog: pytest.LogCaptureFixture) -> None:
    """Regression: a flag or a malformed value was accepted from any process."""
    inner = HashStore()
    store = SealedStore(inner, OURS).part("asyncdist")
    outsider = SealedStore(inner, OTHER).part("asyncdist")
    inner.set("asyncdist/over", "")
    outsider.set("closed/0.0", "")
    inner.set("asyncdist/newcomer/1", "no numbers")
    assert not store.check(["over"]) and not store.check(["closed/0.0"]) and not store.check(["newcomer/1"])
    assert store.compare_set("newcomer/1", "", "1 1 ab") == b"1 1 ab", (
        "a value that is not believed must be overwritten"
    )
    assert store.compare_set("newcomer/1", "", "2 1 cd") == b"1 1 ab"
    assert [record.levelno for record in caplog.records] == [logging.WARNING], "the warning must be logged once"
    assert "'asyncdist/over'" in caplog.text
    assert outsider.compare_set("newcomer/1", "1 1 ab", "free") == b""
    assert store.get("newcomer/1") == b"1 1 ab"


def test_processes_with_one_secret_understand_each_other() -> None:
    inner = HashStore()
    one, two = (SealedStore(inner, OURS).part("asyncdist").part("world") for _ in range(2))
    one.set("size", "4")
    assert two.check(["size"]) and two.get("size") == b"4"
    assert two.compare_set("size", "4", "5") == b"5" and one.get("size") == b"5"
    assert two.compare_set("size", "4", "6") == b"5"
    two.wait(["size"], timedelta(seconds=1))
    with pytest.raises(RuntimeError, match="no values of this job for 'go'"):
        two.wait(["go"], timedelta(seconds=0))


def test_a_value_that_is_overwritten_and_restored_is_returned() -> None:
    inner = HashStore()
    store = SealedStore(inner, OURS)
    store.set("hello", "a")
    sound = bytes(inner.get("hello"))
    inner.set("hello", "garbage")
    timer = threading.Timer(0.05, inner.set, ("hello", sound))
    timer.start()
    assert store.get("hello") == b"a"
    timer.join()


def test_a_value_that_an_outsider_deletes_is_awaited_in_python(monkeypatch: pytest.MonkeyPatch) -> None:
    """Regression: the wait blocked in torch's get for a minute, in which the rank handled no signal."""
    inner = TCPStore("127.0.0.1", 0, 1, True, wait_for_workers=False)
    store = SealedStore(inner, OURS)
    store.set("key", "value")
    assert store.check(["key"])
    inner.delete_key("key")
    paused: list[float] = []
    monkeypatch.setattr(stores.time, "sleep", lambda pause_s: (paused.append(pause_s), store.set("key", "again")))
    assert store.get("key") == b"again" and len(paused) == 1
    inner.delete_key("key")
    monkeypatch.setattr(stores, "_TIMEOUT_S", 0.0)
    with pytest.raises(RuntimeError, match="no value of this job for 'key'"):
        store.get("key")
    inner.set("key", stores._NOTHING)
    with pytest.raises(RuntimeError, match="no value of this job for 'key'"):
        store.get("key")


def test_refused_values_are_reported_at_a_bounded_rate(caplog: pytest.LogCaptureFixture) -> None:
    now = [0.0]
    refusals = Refusals(lambda: now[0])
    for number in range(1000):
        refusals.note(f"newcomer/{number}", b"x")
    assert len(caplog.records) == 1
    now[0] = 61.0
    refusals.note("\x1b[2J", b"x")
    refusals.note("\x1b[2J", b"x")
    assert len(caplog.records) == 2
    assert "a value and 999 more" in caplog.text and "\x1b" not in caplog.text


def test_a_rank_with_another_secret_than_rank_0_says_so(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Regression: a rank with a different secret waited silently, and its error did not name the secret."""
    monkeypatch.setenv("LOCAL_RANK", "1")
    served = stores.serve("127.0.0.1", 0)
    SealedStore(served, OTHER).set(rendezvous._PORT, "1")
    place = TorchRendezvous(1, 2, "127.0.0.1", served.port, False, secret=OURS)
    with pytest.raises(TransportError, match=r"another secret than this rank's: .* ASYNCDIST_JOB_SECRET_FILE"):
        rendezvous._announced_port(place, time.monotonic() + 0.5)
    assert "this rank's secret differs from the others'" in caplog.text


# -- connections ------------------------------------------------------------------------------------------------------


def connect(first: SealedStore, second: SealedStore) -> list[Any]:
    """Make gloo groups of two processes that authenticate each other, and return the outcome of each."""
    ended: list[Any] = [None, None]
    timeout = timedelta(seconds=20)

    def run(rank: int, store: SealedStore) -> None:
        groups = [gloo_groups.make_gloo_group(PrefixStore("g", meeting), "g", rank, 2, timeout, is_loopback=True)]
        try:
            gloo_groups.prove_connections(groups, rank, 2, timeout, store)
        except TransportError as error:
            ended[rank] = str(error)
        finally:
            gloo_groups.close_connections(groups[0])

    meeting = HashStore()
    threads = [threading.Thread(target=run, args=(rank, store)) for rank, store in enumerate((first, second))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return ended


@pytest.mark.parametrize("local_size, says", [(None, True), (1, True), (2, False)])
def test_rank_0_says_that_other_hosts_do_not_reach_it(
    local_size: int | None, says: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Regression: rank 0 did not report that its launcher's MASTER_ADDR=localhost keeps other hosts from connecting."""
    monkeypatch.setattr(detection, "local_size", lambda: local_size)
    monkeypatch.setattr(rendezvous._RendezvousStore, "_find", lambda *_: HashStore())
    rendezvous._store_of.cache_clear()
    place = TorchRendezvous(0, 2, "localhost", 1, False, secret=OURS, is_loopback=True)
    with pytest.raises(TransportError, match="waits for ranks \\[1\\]") as error:
        rendezvous.join_world(place, 0.05)
    assert ("since its MASTER_ADDR is localhost: if ranks are on other hosts" in str(error.value)) is says


@pytest.mark.slow
def test_connection_to_a_process_without_the_secret_is_closed() -> None:
    """The process has a rank's place in gloo: the first to connect to a port with the rank's number gets it."""
    store = HashStore()
    assert connect(SealedStore(store, OURS), SealedStore(store, OURS)) == [None, None]
    with_other = connect(SealedStore(store, OURS), SealedStore(store, OTHER))
    assert any("the process at place 1 of 2 does not know the job's secret" in text for text in with_other)
    elsewhere = connect(SealedStore(store, OURS).part("one world"), SealedStore(store, OURS).part("another"))
    assert any(elsewhere), "proofs of another world must not count"


class SlowGroup:
    """Replaces a gloo group whose processes each take 15 s, on a clock of its own, to send their valid proofs."""

    def __init__(self, store: SealedStore) -> None:
        self.now = 0.0
        self._store = store

    def monotonic(self) -> float:
        return self.now

    def send(self, *_: object) -> Any:
        return SimpleNamespace(wait=lambda timeout: None)

    def recv(self, tensors: list[torch.Tensor], peer: int, tag: int) -> Any:
        del tag

        def wait(timeout: timedelta) -> None:
            assert timeout > timedelta(0), "gloo would wait for its own timeout"
            self.now += min(15.0, timeout.total_seconds())
            if timeout < timedelta(seconds=15):
                raise RuntimeError("timed out")
            proof = self._store.secret.proof(f"{self._store.prefix}0", peer, 0)
            tensors[0].copy_(torch.frombuffer(bytearray(proof), dtype=torch.uint8))

        return SimpleNamespace(wait=wait)


@pytest.mark.parametrize(("size", "is_in_time"), [(2, True), (3, True), (4, False), (9, False)])
def test_all_proofs_together_have_one_timeout(size: int, is_in_time: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Regression: the timeout began again for each process, so that a start with slow processes took many minutes."""
    group = SlowGroup(SealedStore(HashStore(), OURS))
    monkeypatch.setattr(gloo_groups, "time", group, raising=False)
    with contextlib.nullcontext() if is_in_time else pytest.raises(TransportError, match=f"place 3 of {size} did not"):
        gloo_groups.prove_connections([group], 0, size, timedelta(seconds=40), group._store)
    assert group.now <= 40.1


# -- living ranks -----------------------------------------------------------------------------------------------------


HOLD = """
import os, sys
from asyncdist.trust.living_ranks import LivingRank
living = LivingRank("a job", 1, [sys.argv[1]])
assert living.other() is None
living.begin()
print(os.getpid(), flush=True)
if os.fork() == 0:
    sys.stdin.read()
    os._exit(0)
sys.stdin.read() if sys.argv[2] == "lives" else os._exit(9)
"""


@pytest.mark.workers
@pytest.mark.parametrize("lives", [True, False])
def test_living_rank_is_found_but_not_a_child_that_outlives_it(lives: bool, tmp_path: Path) -> None:
    """Regression: a second process with a living rank's RANK waited for an answer until the start timed out."""
    words = [sys.executable, "-c", HOLD, str(tmp_path), "lives" if lives else "ends"]
    with subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as holder:
        assert holder.stdout is not None
        pid = int(holder.stdout.readline())
        if not lives:
            os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
        second = LivingRank("a job", 1, [str(tmp_path)])
        assert second.other() == (pid if lives else None)
        assert LivingRank("a job", 2, [str(tmp_path)]).other() is None
        assert LivingRank("another job", 1, [str(tmp_path)]).other() is None
        if not lives:
            second.begin()
            second.end()
            assert not list(tmp_path.iterdir())
        holder.communicate()


@pytest.mark.workers
def test_the_files_of_killed_ranks_are_removed_later(tmp_path: Path) -> None:
    """Regression: each killed rank left a file behind forever, in a folder that may be in memory."""
    words = [sys.executable, "-c", HOLD, str(tmp_path), "lives"]
    with subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as holder:
        assert holder.stdout is not None and holder.stdout.readline()
        (living,) = tmp_path.glob("*/rank-*")
        killed, young = living.with_name("rank-0123456789abcdef.0"), living.with_name("rank-0123456789abcdef.1")
        for path in (killed, young):
            path.touch(0o600)
        for path in (killed, living):
            os.utime(path, (0, 0))
        other = LivingRank("another job", 1, [str(tmp_path)])
        other.begin()
        assert living.exists() and young.exists() and not killed.exists()
        assert LivingRank("a job", 1, [str(tmp_path)]).other() is not None
        other.end()
        holder.communicate()


@pytest.mark.workers
def test_a_process_that_comes_second_leaves_no_folder(tmp_path: Path) -> None:
    words = [sys.executable, "-c", HOLD, str(tmp_path), "lives"]
    with subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as holder:
        assert holder.stdout is not None and holder.stdout.readline()
        second = LivingRank("a job", 1, [str(tmp_path)])
        second.begin()
        assert len(list(tmp_path.iterdir())) == 1 and second.other() is not None
        second.end()
        holder.communicate()


def test_a_rank_in_another_container_is_not_named_process_0(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(LivingRank, "other", lambda _: 0)
    place = TorchRendezvous(1, 2, "127.0.0.1", 1, False, secret=OURS)
    with pytest.raises(TransportError, match="a process of another container of this host runs as that rank"):
        transport._claim(place)
