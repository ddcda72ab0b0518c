"""A transport, requests and a receiver that a test controls, for an engine without ranks."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

from asyncdist.messaging.engine import Engine
from asyncdist.messaging.polling import Pollable
from asyncdist.transports.base import ANY_SOURCE, Capabilities
from support.local import yields


class ScriptedRequest:
    """A request that completes when the test says so, and counts its polls."""

    def __init__(self, *, done: bool = False, error: BaseException | None = None) -> None:
        self.done = done
        self.error = error
        self.cancelled = False
        self.cancel_calls = 0
        self.source = ANY_SOURCE
        self.nbytes = 0
        self.test_count = 0

    def test(self) -> bool:
        self.test_count += 1
        if self.error is not None:
            raise self.error
        return self.done

    def cancel(self) -> None:
        self.cancel_calls += 1

    def arrive(self, source: int, nbytes: int) -> None:
        self.source, self.nbytes, self.done = source, nbytes, True


class ScriptedTransport:
    """Returns scripted requests; by default it does not ring a doorbell when a message arrives, like MPI."""

    def __init__(self, *, wakes: bool = False) -> None:
        self.rank, self.size, self.name = 0, 4, "scripted"
        self.capabilities = Capabilities(native_collectives=False, survives_rank_loss=True, wakes=wakes, tag_max=32767)
        self.doorbell = None
        self.posted: list[tuple[Any, ScriptedRequest]] = []
        self.ring: Callable[[], None] = lambda: None

    def irecv(self, buffer: Any, source: int, tag: int) -> ScriptedRequest:
        request = ScriptedRequest()
        self.posted.append((buffer, request))
        return request

    isend = irecv

    def is_sending(self) -> bool:
        return False

    def set_arrival_callback(self, ring: Callable[[], None]) -> None:
        self.ring = ring

    def lost_ranks(self) -> frozenset[int]:
        return frozenset()


class CountingInlet(Pollable):
    """Delivers the given messages, one for each poll."""

    def __init__(self) -> None:
        self.waiting = 0
        self.polls = 0

    def poll(self) -> int:
        self.polls += 1
        if self.waiting:
            self.waiting -= 1
            return 1
        return 0


async def abandon(engine: Engine, buffer: bytearray, source: int = 1, tag: int = 5) -> None:
    task = asyncio.ensure_future(engine.receive(buffer, source, tag))
    await yields(1)
    task.cancel()
    await asyncio.wait([task])
    assert task.cancelled()
