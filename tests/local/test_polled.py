"""What a peer sent before it left, over a polled backend: it is received, however late its receiver looks."""

from __future__ import annotations

from collections import defaultdict, deque
from dataclasses import dataclass, field

import pytest

from asyncdist.errors import RankLostError
from asyncdist.transports.local import LocalHub
from asyncdist.transports.torch_distributed import pollable_backends
from asyncdist.transports.torch_distributed.pollable_exchange import INLINE_NBYTES_MAX

TAG, ENTRIES_TAG = 3, 4
NBYTES = INLINE_NBYTES_MAX + 1
DATA = (bytes(range(256)) * (NBYTES // 256 + 1))[:NBYTES]


@dataclass
class Cable:
    """Bytes between pairs of ranks, in memory: what has been sent has arrived."""

    arrived: defaultdict[tuple[int, int], deque[bytes]] = field(default_factory=lambda: defaultdict(deque))
    closed: set[int] = field(default_factory=set)


@dataclass
class Sent:
    """A send that is complete."""

    def test(self) -> bool:
        return True


@dataclass
class Awaited:
    """A receive, which copies when it is tested."""

    cable: Cable
    source: int
    dest: int
    view: memoryview

    def test(self) -> bool:
        arrived = self.cable.arrived[self.source, self.dest]
        if arrived:
            self.view[:] = arrived.popleft()
            return True
        if self.source in self.cable.closed:
            raise RuntimeError("Connection closed by peer")
        return False


@dataclass
class CablePairs:
    """Stands in for the Pairs of one rank."""

    cable: Cable
    rank: int

    def send(self, view: memoryview, dest: int) -> Sent:
        if dest in self.cable.closed:
            raise RuntimeError("Connection closed by peer")
        self.cable.arrived[self.rank, dest].append(bytes(view))
        return Sent()

    def receive(self, view: memoryview, source: int) -> Awaited:
        return Awaited(self.cable, source, self.rank, view)

    def close(self) -> None:
        self.cable.closed.add(self.rank)


@pytest.fixture(autouse=True)
def close_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pollable_backends, "GOODBYE_S", 0.0)


def two_ranks() -> tuple[pollable_backends.PolledTransport, pollable_backends.PolledTransport, tuple[Cable, Cable]]:
    cables = Cable(), Cable()
    pairs = [tuple(CablePairs(cable, rank) for cable in cables) for rank in range(2)]
    sender, receiver = (pollable_backends.PolledTransport(rank, 2, "cable", pairs[rank]) for rank in range(2))
    return sender, receiver, cables


def bulk_planes(hub: LocalHub, cable: Cable) -> list[pollable_backends.PolledBulk]:
    return [
        pollable_backends.PolledBulk(hub.transport(rank), ENTRIES_TAG, "cable", CablePairs(cable, rank))
        for rank in range(2)
    ]


@pytest.mark.parametrize("closes", [False, True])
def test_large_message_is_received_after_its_senders_goodbye(closes: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """The bytes and the goodbye come between two looks of the receiver; at the next one the sender may be gone."""
    if not closes:
        monkeypatch.setattr(CablePairs, "close", lambda _: None)
    sender, receiver, (frames, large) = two_ranks()
    buffer = bytearray(NBYTES)
    send, receive = sender.isend(DATA, 1, TAG), receiver.irecv(buffer, 0, TAG)
    assert not receive.test()  # the announcement is answered
    assert not large.arrived[0, 1]
    send.test()  # the answer is heard
    sender.close()
    assert len(large.arrived[0, 1]) == len(frames.arrived[0, 1]) == 1

    later = receiver.irecv(bytearray(1), 0, TAG)
    assert receive.test()
    assert buffer == DATA
    assert receiver.lost_ranks() == {0}
    with pytest.raises(RankLostError, match="rank 0 is gone"):
        later.test()


def test_large_message_overtaken_by_the_goodbye_is_received(monkeypatch: pytest.MonkeyPatch) -> None:
    """It takes another connection than the goodbye."""
    monkeypatch.setattr(pollable_backends, "GOODBYE_S", 3600.0)
    monkeypatch.setattr(pollable_backends.PolledTransport, "_poll_until", lambda self, _: self._poll())
    monkeypatch.setattr(CablePairs, "close", lambda _: None)
    sender, receiver, (_, large) = two_ranks()
    buffer = bytearray(NBYTES)
    send, receive = sender.isend(DATA, 1, TAG), receiver.irecv(buffer, 0, TAG)
    assert not receive.test()
    send.test()
    sender.close()
    on_its_way = large.arrived.pop((0, 1))
    assert not receive.test()
    assert not receiver.lost_ranks()
    large.arrived[0, 1] = on_its_way
    assert receive.test()
    assert buffer == DATA
    with pytest.raises(RankLostError, match="rank 0"):
        receiver.irecv(bytearray(1), 0, TAG).test()


def test_large_message_without_any_bytes_is_lost_with_its_sender(monkeypatch: pytest.MonkeyPatch) -> None:
    sender, receiver, _ = two_ranks()
    sender.isend(bytes(NBYTES), 1, TAG)
    receive = receiver.irecv(bytearray(NBYTES), 0, TAG)
    assert not receive.test()
    monkeypatch.setattr(sender, "_poll", lambda: None)  # it does not hear the answer
    sender.close()
    with pytest.raises(RankLostError, match="rank 0"):
        receive.test()


def test_bulk_message_arrives_though_control_lost_its_sender() -> None:
    hub, cable = LocalHub(2), Cable()
    sender, receiver = bulk_planes(hub, cable)
    buffer = bytearray(NBYTES)
    send, receive = sender.isend(DATA, 1, TAG), receiver.irecv(buffer, 0, TAG)
    assert not receive.test()
    send.test()
    hub.lose(0)
    later = receiver.irecv(bytearray(1), 0, TAG)
    assert receive.test()
    assert buffer == DATA
    with pytest.raises(RankLostError, match="rank 0"):
        later.test()


@pytest.mark.parametrize("asks_for_more", [False, True])
def test_bulk_message_overtaken_by_the_senders_end_is_received(
    asks_for_more: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Control loses the sender first, and a message that is sent to it then finds that out as well."""
    monkeypatch.setattr(pollable_backends, "GOODBYE_S", 3600.0)
    hub, cable = LocalHub(2), Cable()
    sender, receiver = bulk_planes(hub, cable)
    buffer = bytearray(NBYTES)
    send, receive = sender.isend(DATA, 1, TAG), receiver.irecv(buffer, 0, TAG)
    assert not receive.test()
    send.test()
    on_its_way = cable.arrived.pop((0, 1))
    hub.lose(0)
    if asks_for_more:
        with pytest.raises(RankLostError, match="rank 0"):
            receiver.isend(b"more", 0, TAG).test()
    assert not receive.test()
    assert not receiver.lost_ranks()
    cable.arrived[0, 1] = on_its_way
    assert receive.test()
    assert buffer == DATA
    with pytest.raises(RankLostError, match="rank 0"):
        receiver.irecv(bytearray(1), 0, TAG).test()
    assert receiver.lost_ranks() == {0}


def test_bulk_message_that_never_arrives_is_lost_with_its_sender() -> None:
    hub = LocalHub(2)
    sender, receiver = bulk_planes(hub, Cable())
    sender.isend(bytes(NBYTES), 1, TAG)
    receive = receiver.irecv(bytearray(NBYTES), 0, TAG)
    assert not receive.test()
    hub.lose(0)
    with pytest.raises(RankLostError, match="rank 0"):
        receive.test()


def test_reply_read_from_a_closed_peer_fails_its_send() -> None:
    """Another send finds the connection closed first, and the answer is read before the peer counts as lost."""
    sender, receiver, _ = two_ranks()
    large, receive = sender.isend(DATA, 1, TAG), receiver.irecv(bytearray(NBYTES), 0, TAG)
    assert not receive.test()
    receiver.close()
    for send in (sender.isend(b"small", 1, TAG), large):
        with pytest.raises(RankLostError, match="rank 1"):
            send.test()
