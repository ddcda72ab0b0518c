"""Tests the doorbells of ranks that share a host: several in one process, each with a board and a pipe."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import random
import signal
import tempfile
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from support.local import eventually, yields
from support.scripted import CountingInlet, ScriptedRequest, ScriptedTransport

from asyncdist.host_memory import shared_memory
from asyncdist.messaging.engine import Engine
from asyncdist.messaging.polling import DriverState, Pollable
from asyncdist.transports import doorbell
from asyncdist.transports.doorbell import HOST_NBYTES, BellAddress, Doorbell, PeerBell
from asyncdist.waits import A_CONDITION

HOST = b"one host"
NEVER_S = 3600.0


class Host:
    """Doorbells of ranks in this process, and the bells by which each rank rings the others."""

    def __init__(self, hosts: list[bytes], kind: Callable[[bytes, int], Doorbell] = Doorbell) -> None:
        self.own = [kind(host, len(hosts)) for host in hosts]
        addresses = [BellAddress.unpack(bell.address.pack()) for bell in self.own]
        self.bells = [bell.join(rank, addresses) for rank, bell in enumerate(self.own)]

    def bell(self, rank: int, dest: int) -> PeerBell:
        bell = self.bells[rank][dest]
        assert bell is not None
        return bell

    def close(self) -> None:
        for bell in self.own:
            bell.close()


@pytest.fixture
def pair() -> Iterator[Host]:
    made = Host([HOST, HOST])
    yield made
    made.close()


def rings(bell: Doorbell) -> int:
    """Remove and count the rings of a doorbell."""
    try:
        return len(os.read(bell.fileno(), 4096))
    except BlockingIOError:
        return 0


def test_only_a_rank_that_sleeps_is_rung_and_once(pair: Host) -> None:
    bell = pair.bell(0, 1)
    bell.ring_sleeper()
    assert rings(pair.own[1]) == 0, "an awake rank must not be rung"
    assert pair.own[1].arm() and not pair.own[1].arm()
    for _ in range(3):
        bell.ring_sleeper()
    assert rings(pair.own[1]) == 1
    assert pair.own[1].arm()
    pair.own[1].disarm()
    bell.ring_sleeper()
    pair.bell(1, 1).ring_sleeper()
    assert rings(pair.own[1]) == rings(pair.own[0]) == 0


def test_a_rank_that_has_ended_is_not_rung(pair: Host) -> None:
    pair.own[1].arm()
    pair.own[1].end()
    pair.bell(0, 1).ring_sleeper()
    assert rings(pair.own[1]) == 0


def test_a_ring_to_a_full_or_closed_pipe_does_nothing(pair: Host) -> None:
    pipe = pair.own[1].address.pipe
    with pytest.raises(BlockingIOError):
        while True:
            os.write(pipe, bytes(4096))
    pair.own[1].arm()
    pair.bell(0, 1).ring_sleeper()
    pair.own[1].arm()
    pair.own[1].close()
    pair.bell(0, 1).ring_sleeper()


def test_a_ring_to_a_dead_rank_raises_no_signal(pair: Host) -> None:
    """Regression: programs that restore the default of SIGPIPE were killed by it."""
    pair.own[1].arm()
    reader = pair.own[1].fileno()
    os.close(reader)  # the rank's only end for reading, as at its death
    before = signal.signal(signal.SIGPIPE, signal.SIG_DFL)
    try:
        pair.bell(0, 1).ring_sleeper()
    finally:
        signal.signal(signal.SIGPIPE, before)
        os.dup2(pair.own[1].address.pipe, reader)  # the fixture closes it


def test_a_closed_doorbell_writes_to_no_descriptor(pair: Host) -> None:
    """Regression: the number of a closed descriptor may belong to another file."""
    bell = pair.bell(0, 1)
    pair.own[1].arm()
    pair.own[0].close()
    with contextlib.ExitStack() as stack:
        files = [stack.enter_context(tempfile.TemporaryFile()) for _ in range(4)]  # they take the freed numbers
        bell.ring_sleeper()
        assert [os.fstat(file.fileno()).st_size for file in files] == [0] * 4


def test_no_rank_relies_on_the_rings_of_one_that_withdrew(pair: Host) -> None:
    pair.own[1].withdraw()
    assert not pair.own[0].is_rung_by_all()


def test_ranks_of_other_hosts_have_no_bell_and_do_not_ring() -> None:
    made = Host([HOST, b"another.", HOST])
    assert [bell is None for bell in made.bells[0]] == [False, True, False]
    assert not any(bell.is_rung_by_all() for bell in made.own)
    made.own[2].arm()
    made.bell(0, 2).ring_sleeper()
    assert [rings(bell) for bell in made.own] == [0, 0, 1]
    made.close()


def test_no_rank_relies_on_one_that_did_not_join() -> None:
    own = [Doorbell(HOST, 2) for _ in range(2)]
    addresses = [bell.address for bell in own]
    own[0].join(0, addresses)
    assert not own[0].is_rung_by_all()
    own[1].join(1, addresses)
    assert own[0].is_rung_by_all() and own[1].is_rung_by_all()
    for bell in own:
        bell.close()


def test_closed_bells_keep_no_descriptor() -> None:
    """Regression: in each world, the first rank of a host kept its board until a full garbage collection."""
    before = len(os.listdir("/proc/self/fd"))
    own = [Doorbell(HOST, 2) for _ in range(2)]
    for rank, bell in enumerate(own):
        bell.join(rank, [bell.address for bell in own])
    for bell in own:
        bell.close()
    assert len(os.listdir("/proc/self/fd")) == before


def test_a_descriptor_that_is_not_the_pipe_is_refused() -> None:
    own = [Doorbell(HOST, 2) for _ in range(2)]
    wrong = own[1].address._replace(inode=own[0].address.inode)
    with pytest.raises(FileNotFoundError):
        own[0].join(0, [own[0].address, wrong])
    for bell in own:
        bell.close()


@pytest.mark.parametrize("number", [errno.EMFILE, errno.ENOMEM])
def test_without_memory_or_descriptors_no_rank_has_a_bell(monkeypatch: pytest.MonkeyPatch, number: int) -> None:
    def fail(_: bytes) -> int:
        raise OSError(number, os.strerror(number))

    gathered = []

    def all_gather(own: bytes) -> list[bytes]:
        gathered.append(own)
        return [own, own]

    before = len(os.listdir("/proc/self/fd"))
    with monkeypatch.context() as patched:
        patched.setattr(shared_memory, "_create", fail)
        bell, bells, why = doorbell.connect_doorbells(bytes(HOST_NBYTES), 0, 2, all_gather)
        assert (bell, bells, why) == (None, [None, None], os.strerror(number))
        assert doorbell.obstacle() == os.strerror(number)
    # The other rank of the host has a board, but not this one.
    bell, bells, why = doorbell.connect_doorbells(bytes(HOST_NBYTES), 1, 2, lambda own: [gathered[0], own])
    assert bell is None and bells == [None, None] and why is not None
    assert len(os.listdir("/proc/self/fd")) == before
    assert doorbell.obstacle() is None


# ---------------------------------------------------------------------------------------------------------- the driver


class Sleeper:
    """An engine with a doorbell, which rank 1 rings, and an inlet for messages."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, kind: Callable[[bytes, int], Doorbell] = Doorbell) -> None:
        for name in ("IDLE_PERIOD_S", "SAFETY_PERIOD_S"):
            monkeypatch.setattr(f"asyncdist.messaging.polling.{name}", NEVER_S)
        self.host = Host([HOST, HOST], kind)
        transport: Any = ScriptedTransport()
        transport.doorbell = self.host.own[0]
        self.engine = Engine(transport, asyncio.get_running_loop())
        self.inlet = CountingInlet()
        self.engine.add_pollable(self.inlet)
        self.sender = self.host.bell(1, 0)

    async def __aenter__(self) -> Sleeper:
        self.engine.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        self.engine.stop()
        self.host.close()

    async def fall_asleep(self) -> int:
        """Wait until the driver sleeps; return its number of passes."""
        await eventually(lambda: self.engine._state is DriverState.ASLEEP)
        return self.engine.statistics().pass_count

    async def delivered(self) -> None:
        await eventually(lambda: not self.inlet.waiting)


async def test_a_ring_wakes_a_sleeping_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    async with Sleeper(monkeypatch) as rank:
        for _ in range(3):
            passes = await rank.fall_asleep()
            await yields(20)
            assert rank.engine.statistics().pass_count == passes, "without a ring, the engine must not make a pass"
            rank.inlet.waiting = 1
            rank.sender.ring_sleeper()
            await rank.delivered()


async def test_a_message_that_arrives_as_the_rank_arms_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """The sender reads the line just before the receiver writes to it, so it does not ring."""

    class Racing(Doorbell):
        is_late = False

        def arm(self) -> bool:
            if self.is_late:
                self.is_late = False
                rank.inlet.waiting = 1
                rank.sender.ring_sleeper()
            return super().arm()

    async with Sleeper(monkeypatch, Racing) as rank:
        for _ in range(3):
            await rank.fall_asleep()
            racing: Any = rank.host.own[0]
            racing.is_late = True
            rank.engine.wake()
            await eventually(lambda racing=racing: not racing.is_late)  # type: ignore[misc]
            await rank.delivered()


async def test_rank_with_a_transfer_under_way_keeps_testing(monkeypatch: pytest.MonkeyPatch) -> None:
    async with Sleeper(monkeypatch) as rank:
        await rank.fall_asleep()
        request = ScriptedRequest()
        rank.engine.watch(request, A_CONDITION)
        await eventually(lambda: rank.engine._state is DriverState.IDLE)
        rank.inlet.waiting = 1
        rank.sender.ring_sleeper()
        await rank.delivered()
        request.done = True
        rank.sender.ring_sleeper()
        await eventually(lambda: rank.engine.is_idle)


async def test_a_rank_on_several_hosts_still_looks_by_the_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    made = Host([HOST, b"another."])
    transport: Any = ScriptedTransport()
    transport.doorbell = made.own[0]
    engine = Engine(transport, asyncio.get_running_loop())
    engine.start()
    await eventually(lambda: engine._state is DriverState.IDLE)
    passes = engine.statistics().pass_count
    await eventually(lambda: engine.statistics().pass_count >= passes + 3)
    engine.stop()
    made.close()


@pytest.mark.parametrize("seed", range(6))
async def test_lost_doubled_and_late_rings_delay_messages_only(monkeypatch: pytest.MonkeyPatch, seed: int) -> None:
    drawn = random.Random(seed)
    loop = asyncio.get_running_loop()
    seen = set()
    async with Sleeper(monkeypatch) as rank:
        monkeypatch.setattr("asyncdist.messaging.polling.SAFETY_PERIOD_S", 0.002)
        for _ in range(40):
            await yields(drawn.choice([0, 1, 3, 150]))
            rank.inlet.waiting += 1
            seen.add(fault := drawn.choice(["none", "lost", "doubled", "late"]))
            if fault in ("none", "doubled"):
                rank.sender.ring_sleeper()
            if fault == "doubled":
                os.write(rank.host.own[0].address.pipe, b"\0")
            elif fault == "late":
                loop.call_later(0.001, rank.sender.ring_sleeper)
            if drawn.random() < 0.5:
                await rank.delivered()
        await rank.delivered()
        await asyncio.sleep(0.002)  # the last late ring
    assert seen == {"none", "lost", "doubled", "late"}


async def test_a_rank_that_spins_in_vain_stops_spinning(monkeypatch: pytest.MonkeyPatch) -> None:
    """If rings come soon after the rank has gone to sleep, its spinning kept the sender from running."""
    monkeypatch.setattr("asyncdist.messaging.polling.SOON_S", NEVER_S)
    async with Sleeper(monkeypatch) as rank:

        async def passes_of_a_wait() -> int:
            before = await rank.fall_asleep()
            rank.inlet.waiting = 1
            rank.sender.ring_sleeper()
            await rank.delivered()
            return await rank.fall_asleep() - before

        found = [await passes_of_a_wait() for _ in range(30)]
        assert found[0] < 10 and min(found) == min(found[:9])
        assert [count > 100 for count in found].count(True) == 2, (
            "only two waits may poll for long: one after 8 waits, one after 16 more"
        )


async def test_a_rank_that_waits_lets_other_processes_run_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """The process that will send the awaited message may be waiting for this rank's core."""
    yielded: list[None] = []
    monkeypatch.setattr(os, "sched_yield", lambda: yielded.append(None))
    async with Sleeper(monkeypatch) as rank:
        await rank.fall_asleep()
        yielded.clear()
        rank.engine.wake()
        await rank.fall_asleep()
    assert len(yielded) == 1


async def test_rank_that_stops_spinning_finishes_its_copies(monkeypatch: pytest.MonkeyPatch) -> None:
    """Regression: a rank that skipped spinning slept for 50 ms between two pieces of a stream that it wrote."""
    monkeypatch.setattr("asyncdist.messaging.polling.SOON_S", NEVER_S)

    class Copier(Pollable):
        """Rings as long as it has more to copy, and delivers no messages."""

        def __init__(self, engine: Engine) -> None:
            self.engine = engine
            self.rest_count = 0

        def poll(self) -> int:
            if self.rest_count:
                self.rest_count -= 1
                self.engine.ring()
            return 0

    async with Sleeper(monkeypatch) as rank:
        await rank.fall_asleep()
        rank.inlet.waiting = 1
        rank.sender.ring_sleeper()  # The rank now skips spinning in its next waits.
        await rank.delivered()
        copier = Copier(rank.engine)
        rank.engine.add_pollable(copier, is_first=True)
        for _ in range(3):
            await rank.fall_asleep()
            copier.rest_count = 20
            rank.engine.ring()
            await rank.fall_asleep()
            assert copier.rest_count == 0
