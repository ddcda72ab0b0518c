"""Tests how processes meet through the store if one of them ends or fails, all in one process."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from types import SimpleNamespace
from typing import Any, cast
from unittest.mock import MagicMock

import pytest
from torch.distributed import HashStore

from asyncdist.errors import TransportError
from asyncdist.launchers.variables import TorchRendezvous
from asyncdist.transports.matching import CallbackQueue
from asyncdist.transports.torch_distributed import gloo_groups, transport
from asyncdist.transports.torch_distributed.meeting import newcomers
from asyncdist.transports.torch_distributed.meeting.newcomers import NewcomerConnector
from asyncdist.transports.torch_distributed.meeting.stores import SealedStore
from asyncdist.trust.job_secret import JobSecret

#: A generous limit in seconds: a longer wait is a hang.
TIMEOUT_S = 60.0
#: Token of the world in the store.
RUNNING = '{"world": "world"}'
KEY = "asyncdist/running"


def entry(common: Any, store: Any, rank: int, incarnation: int, process: str, *, size: int = 2) -> Any:
    """Replaces the ``WorldEntry`` of a process."""
    place = TorchRendezvous(rank, size, "127.0.0.1", 29500, True)
    return SimpleNamespace(
        rendezvous=place, common=common, store=store, incarnation=incarnation, process=process, running=RUNNING
    )


class Process:
    """One process's connector, and the notices that it has received."""

    def __init__(self, common: Any, rank: int, incarnation: int, name: str) -> None:
        self.rank = rank
        self.callbacks = CallbackQueue()
        self.connected: list[tuple[int, int, list[Any]]] = []
        self.missed: list[tuple[int, int]] = []
        self.announced: list[tuple[int, int]] = []
        self.connector = NewcomerConnector(
            entry(common, common.part("world"), rank, incarnation, name),
            self.callbacks,
            self.announced.append,
            self.connected.append,
            self.missed.append,
        )
        self.connector.start()

    def until(self, is_true: Callable[[], object]) -> None:
        give_up_at = time.monotonic() + TIMEOUT_S
        while not is_true():
            assert time.monotonic() < give_up_at, "the newcomer did not finish in time"
            self.callbacks.empty()
            time.sleep(0.01)

    def meetings(self) -> list[threading.Thread]:
        return [thread for thread in threading.enumerate() if thread.name.startswith("asyncdist-meeting-")]


@pytest.fixture
def common() -> SealedStore:
    return SealedStore(HashStore(), JobSecret(b"the secret of a job"))


@pytest.fixture
def pair(common: SealedStore) -> Iterator[list[Process]]:
    """Return rank 0, which was there from the beginning, and rank 1, which was restarted."""
    made = [Process(common, 0, 0, "0.0"), Process(common, 1, 1, "1.1")]
    yield made
    for process in made:
        process.connector.close()
        for _, _, groups in process.connected:
            for group in groups:
                gloo_groups.close_connections(group)


def test_a_value_that_an_outsider_deletes_ends_no_admissions(
    common: SealedStore, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Regression: the thread that admits new processes ended if a value was deleted just after it was seen."""
    get, failed = SealedStore.get, []

    def fail_once(self: SealedStore, key: str) -> bytes:
        if key == "newcomer/1" and not failed:
            failed.append(key)
            raise RuntimeError("the store has no value of this job for 'newcomer/1'")
        return get(self, key)

    monkeypatch.setattr(SealedStore, "get", fail_once)
    process = Process(common, 0, 0, "0.0")
    common.set("world/newcomer/1", "1 1 0123456789abcdef")
    process.until(lambda: process.announced)
    assert failed and process.announced == [(1, 1)]
    process.connector.close()
    assert not [record for record in caplog.records if record.levelname == "WARNING"]


@pytest.mark.parametrize("change", [lambda store: store.delete_key(KEY), lambda store: store.set(KEY, "garbage")])
def test_the_name_of_the_world_is_written_again(
    change: Callable[[Any], object], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Regression: no rank could join a job after another user had deleted that value of the store."""
    monkeypatch.setattr(newcomers, "_LOOKS_PER_RENEWAL", 1)
    plain = HashStore()
    job = SealedStore(plain, JobSecret(b"the secret of a job")).part("asyncdist")
    job.set("running", RUNNING)
    process = Process(job, 0, 0, "0.0")
    job.set("world/newcomer/1", "1 1 01")
    process.until(lambda: process.announced)
    change(plain)
    process.until(lambda: job.check(["running"]))
    assert job.get("running").decode() == RUNNING
    job.set("running", "the next world")
    job.set("world/newcomer/2", "2 1 02")
    process.until(lambda: len(process.announced) == 2)
    process.connector.close()
    assert job.get("running") == b"the next world"


class CountedStore:
    """Replaces the store and the event that ends a connector's thread, and ends the thread after some reads."""

    def __init__(self, look_count: int) -> None:
        self.read_count = 0
        self.waited_s = 0.0
        self._looks_left = look_count

    def clone(self) -> CountedStore:
        return self

    def check(self, keys: list[str]) -> bool:
        del keys
        self.read_count += 1
        return False

    def compare_set(self, key: str, expected: str, desired: str) -> bytes:
        del key, expected
        self.read_count += 1
        return desired.encode()

    def wait(self, seconds: float) -> bool:
        self.waited_s += seconds
        self._looks_left -= 1
        return self._looks_left == 0

    def is_set(self) -> bool:
        return False


@pytest.mark.parametrize("size", [2, 256, 4096])
def test_the_store_can_answer_all_ranks_that_wait_for_newcomers(size: int) -> None:
    """Regression: each rank read the store 21 times a second in a world of any size; it answers 10,000 reads."""
    store = CountedStore(50)
    nothing = MagicMock()
    where = entry(store, store, 0, 0, "0.0", size=size)
    connector = NewcomerConnector(where, CallbackQueue(), nothing, nothing, nothing)
    connector._closing = cast(Any, store)
    connector._run()
    assert size * store.read_count / store.waited_s < 8000
    assert store.waited_s / 50 < 0.2 + size / 1000, "a newcomer would wait for long"


def test_nobody_goes_on_connecting_to_a_process_that_has_ended(common: SealedStore) -> None:
    """The process asked to connect, but its launcher has recorded its end: gloo would wait for minutes."""
    process = Process(common, 0, 0, "0.1")  # the process was killed before the world began
    common.set("exited/0.0", "")
    common.set("world/meeting 0.0 1.1/1", "1.1")
    process.connector.request(1, 1, welcomes=True)
    process.until(process.meetings)
    assert not process.connected and not process.missed
    common.set("exited/1.1", "")
    process.until(lambda: not process.meetings())
    assert not process.connected and not process.missed, "another process may take the place of this one"
    common.set("exited/1.2", "")
    common.set("world/meeting 0.0 1.2/1", "1.2")
    process.connector.request(1, 2, welcomes=True)
    process.until(lambda: not (process.connector._requested or process.meetings()))
    process.connector.close()


def test_leaving_the_world_ends_the_leavers_pending_meetings(common: SealedStore) -> None:
    first, second = Process(common, 0, 0, "0.0"), Process(common, 2, 0, "2.0")
    common.set("world/meeting 0.0 1.1/1", "1.1")
    common.set("world/meeting 0.0 2.0/0", "0.0")
    first.connector.request(1, 1, welcomes=True)
    second.connector.request(0, 0, welcomes=False)
    second.until(lambda: len(second.meetings()) == 2)
    first.connector.close()
    second.until(lambda: not second.meetings())
    assert not first.connected and not second.connected
    second.connector.close()


def test_what_fails_on_one_side_is_tried_again_by_both(pair: list[Process], monkeypatch: pytest.MonkeyPatch) -> None:
    make, calls = gloo_groups.make_gloo_groups, []

    def fail_first(store: Any, rank: int, size: int, timeout: timedelta, **options: Any) -> list[Any]:
        calls.append(rank)
        if calls.count(1) == 1 and rank == 1:
            raise TransportError("the first attempt fails")
        return make(store, rank, size, timeout, **options)

    monkeypatch.setattr(gloo_groups, "make_gloo_groups", fail_first)
    pair[0].connector.request(1, 1, welcomes=True)
    pair[1].connector.request(0, 0, welcomes=False)
    for process in pair:
        process.until(lambda process=process: process.connected)
    assert [process.connected[0][:2] for process in pair] == [(1, 1), (0, 0)]
    assert sorted(calls) == [0, 0, 1, 1]


def test_connection_of_a_process_lost_before_it_was_accepted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Regression: if the next process of its rank was connected, its connections stayed open."""
    closed: list[Any] = []
    monkeypatch.setattr(gloo_groups, "close_connections", closed.append)
    monkeypatch.setattr(transport, "NewcomerConnector", MagicMock())
    own = transport.TorchTransport([], 0, 2, MagicMock(late_places=(), vacant=frozenset(), incarnation=0))
    for incarnation, groups in ((1, ["control 1", "bulk 1"]), (2, ["control 2", "bulk 2"])):
        own._on_announced((1, incarnation))
        own._on_connected((1, incarnation, groups))
    assert closed == ["control 1", "bulk 1"]
    own.close()
    assert closed[2:] == ["control 2", "bulk 2"]
