"""Tracks the unanswered requests of a replay buffer's client, and limits their number."""

from __future__ import annotations

import asyncio
from collections import deque
from typing import Any

import numpy as np
import numpy.typing as npt

from asyncdist import AsyncdistError
from asyncdist.messaging.engine import Engine
from asyncdist.waits import WaitId


class PendingCall:
    """A request that the server has not answered. It remains pending if its caller is cancelled."""

    __slots__ = ("answer", "error", "limit", "payload", "waiter")

    def __init__(
        self, waiter: asyncio.Future[None], payload: npt.NDArray[np.uint8] | None, limit: RequestLimit
    ) -> None:
        self.waiter = waiter
        self.payload = payload
        self.limit = limit
        self.answer: Any = None
        self.error: AsyncdistError | None = None


class RequestLimit:
    """Semaphore that limits the number of unanswered requests. If the job fails, waiting tasks raise its error."""

    def __init__(self, engine: Engine, count: int) -> None:
        self._engine = engine
        self._count = count
        self._waiters: deque[asyncio.Future[None]] = deque()

    async def acquire(self, what: WaitId) -> None:
        """Wait until another request may be sent. Raise the job's error if the job fails."""
        if self._count and not self._waiters:
            self._count -= 1
            return
        waiter = self._engine.loop.create_future()
        self._waiters.append(waiter)
        try:
            await self._engine.park(waiter, what)
        except BaseException:
            if waiter in self._waiters:
                self._waiters.remove(waiter)
            elif not waiter.cancelled() and waiter.exception() is None:  # admitted just before its cancellation
                self.release()
            raise

    def release(self) -> None:
        """Admit the next waiting request, because an answer has arrived."""
        while self._waiters:
            waiter = self._waiters.popleft()
            if not waiter.done():
                waiter.set_result(None)
                return
        self._count += 1
