"""Tests the granted tags of the torch transport, with two endpoints in one process instead of gloo."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

import pytest
import torch

from asyncdist.errors import RankLostError
from asyncdist.transports.base import Request
from asyncdist.transports.matching import CallbackQueue, Matcher
from asyncdist.transports.torch_distributed.gloo_transfers import StreamTransfers

TAG = 8001
#: Seconds that a loaded machine may need for an operation that takes no time.
LIMIT_S = 60.0


class Work:
    def __init__(self) -> None:
        self.is_done = threading.Event()

    def wait(self, timeout: timedelta) -> None:
        del timeout
        assert self.is_done.wait(LIMIT_S)


class Wire:
    """Replaces gloo in one direction: the n-th send on a tag matches the n-th receive."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._sends: dict[int, deque[tuple[torch.Tensor, Work]]] = {}
        self._receives: dict[int, deque[tuple[torch.Tensor, Work]]] = {}

    def send(self, tensors: list[torch.Tensor], peer: int, tag: int) -> Work:
        del peer
        return self._post(self._sends, tensors[0], tag)

    def receive(self, tensors: list[torch.Tensor], peer: int, tag: int) -> Work:
        del peer
        return self._post(self._receives, tensors[0], tag)

    def _post(self, queues: dict[int, deque[tuple[torch.Tensor, Work]]], tensor: torch.Tensor, tag: int) -> Work:
        work = Work()
        with self._lock:
            queues.setdefault(tag, deque()).append((tensor, work))
            sends, receives = self._sends.get(tag), self._receives.get(tag)
            while sends and receives:
                (data, sent), (room, received) = sends.popleft(), receives.popleft()
                assert data.nbytes <= room.nbytes, "the buffer is too small; gloo would end the receiving process"
                room[: len(data)] = data
                sent.is_done.set()
                received.is_done.set()
        return work


class Bulk:
    """One end of two wires."""

    def __init__(self, out: Wire, into: Wire) -> None:
        self.send = out.send
        self.recv = into.receive


class End:
    """One endpoint, with the notices from its threads and its peer."""

    def __init__(self, bulk: Bulk, peer: int, ends: list[End]) -> None:
        self.callbacks = CallbackQueue()
        self.threads: list[threading.Thread] = []
        names: set[str] = set()

        def start(name: str, run: Callable[[], None]) -> None:
            if name not in names:
                names.add(name)
                self.threads.append(threading.Thread(target=run, daemon=True))
                self.threads[-1].start()

        self.transfers = StreamTransfers(
            TAG,
            peer,
            peer,
            bulk,
            Matcher(self.callbacks),
            start=start,
            acknowledge=lambda: ends[peer].hear(lambda transfers: transfers.on_acknowledged()),
            ask_for_empty_message=lambda number: ends[peer].hear(
                lambda transfers: transfers.on_receive_cancelled(number)
            ),
        )

    def hear(self, call: Callable[[StreamTransfers], None]) -> None:
        self.callbacks.put(call, self.transfers)


@pytest.fixture
def ends() -> Iterator[list[End]]:
    there, back = Wire(), Wire()
    made: list[End] = []
    made += [End(Bulk(there, back), 1, made), End(Bulk(back, there), 0, made)]
    yield made
    for end in made:
        end.transfers.stop()
        for thread in end.threads:
            thread.join(LIMIT_S)
            assert not thread.is_alive()


def complete(*requests: Request) -> None:
    """Test these requests, as the engine does, until all are complete."""
    deadline = time.monotonic() + LIMIT_S
    while not all(request.test() for request in requests):
        assert time.monotonic() < deadline
        time.sleep(0.0001)


def hear_all(end: End) -> None:
    deadline = time.monotonic() + LIMIT_S
    while not end.callbacks.calls:
        assert time.monotonic() < deadline
        time.sleep(0.0001)
    end.callbacks.empty()


def test_messages_match_receives_in_order_and_report_their_size(ends: list[End]) -> None:
    rooms = [bytearray(10) for _ in range(4)]
    receives = [ends[1].transfers.receive(room) for room in rooms]
    sends = [ends[0].transfers.send(memoryview(data)) for data in (b"a" * 10, b"bc", b"", b"d")]
    complete(*sends, *receives)
    assert [bytes(room[: receive.nbytes]) for room, receive in zip(rooms, receives, strict=True)] == [
        b"a" * 10,
        b"bc",
        b"",
        b"d",
    ]
    assert [(receive.source, receive.cancelled) for receive in receives] == [(0, False)] * 4


def test_a_message_may_be_sent_before_its_receive_is_posted(ends: list[End]) -> None:
    send = ends[0].transfers.send(memoryview(b"early"))
    room = bytearray(5)
    complete(ends[1].transfers.receive(room), send)
    assert room == b"early"


def test_what_is_cancelled_is_answered_with_nothing(ends: list[End]) -> None:
    receives = [ends[1].transfers.receive(bytearray(4)) for _ in range(3)]
    complete(ends[0].transfers.send(memoryview(b"last")), receives[0])
    for receive in receives[1:]:
        receive.cancel()
    hear_all(ends[0])
    complete(*receives[1:])
    assert [receive.cancelled for receive in receives] == [False, True, True]
    again, room = ends[0].transfers.send(memoryview(b"next")), bytearray(4)
    complete(ends[1].transfers.receive(room), again)
    assert room == b"next", "the tag must be usable again"


def test_nothing_comes_in_its_turn(ends: list[End]) -> None:
    """The receive before the cancelled receive still waits for its message."""
    rooms = [bytearray(1) for _ in range(3)]
    receives = [ends[1].transfers.receive(room) for room in rooms]
    receives[1].cancel()
    hear_all(ends[0])
    assert not any(receive.test() for receive in receives)
    sends = [ends[0].transfers.send(memoryview(data)) for data in (b"1", b"3")]
    complete(*sends, *receives)
    assert [receive.cancelled for receive in receives] == [False, True, False]
    assert rooms == [b"1", b"\0", b"3"]


def test_a_message_that_is_on_its_way_comes_all_the_same(ends: list[End]) -> None:
    rooms = [bytearray(1) for _ in range(2)]
    first = ends[1].transfers.receive(rooms[0])
    sends = [ends[0].transfers.send(memoryview(b"1"))]
    first.cancel()
    hear_all(ends[0])  # too late: the message has been sent
    sends.append(ends[0].transfers.send(memoryview(b"2")))
    complete(first, ends[1].transfers.receive(rooms[1]), *sends)
    assert (first.cancelled, rooms) == (False, [b"1", b"2"])


def test_a_lost_peer_fails_what_involves_it(ends: list[End]) -> None:
    requests: list[Any] = [ends[1].transfers.receive(bytearray(1)), ends[1].transfers.send(memoryview(b"x"))]
    ends[1].transfers.lose(RankLostError("rank 0 is gone", rank=0))
    for request in requests:
        with pytest.raises(RankLostError, match="rank 0 is gone"):
            request.test()
    ends[0].transfers.send(memoryview(b"y"))  # lets the threads end
    ends[0].transfers.receive(bytearray(1))
