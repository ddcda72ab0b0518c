"""Tracks and limits a replay buffer client's unanswered requests, and creates the errors for a server's end."""

from __future__ import annotations

import asyncio
from collections import deque
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from asyncdist import AsyncdistError, ClosedError, LateError, RankLostError, RemoteError
from asyncdist.messaging.engine import Engine
from asyncdist.messaging.services import Services
from asyncdist.waits import WaitId


@dataclass(slots=True, eq=False)
class PendingCall:
    """A request that the server has not answered. It remains pending if its caller is cancelled."""

    waiter: asyncio.Future[None]
    payload: npt.NDArray[np.uint8] | None
    limit: RequestLimit
    answer: Any = None
    error: AsyncdistError | None = None


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


def ended_error(server: int, name: str, kind: str, text: str) -> RemoteError | ClosedError:
    """Return the error for a server that has reported why it ended."""
    what = f"the replay buffer {name!r} on rank {server} ended before its clients"
    if kind:
        return RemoteError(f"{what}: {kind}: {text}", rank=server, kind=kind, text=text)
    return ClosedError(f"{what}: {text}", rank=server)


def abandoned_error(services: Services, server: int, name: str) -> RankLostError | ClosedError:
    """Return the error for a server that is lost, or has left without a reason."""
    text = f"rank {server} no longer serves the replay buffer {name!r}: it "
    if server in services.lost_ranks():
        return RankLostError(f"{text}is lost", rank=server)
    return ClosedError(f"{text}has left", rank=server)


def late_error(server: int, name: str) -> LateError:
    """Return the error of a restarted client whose server has ended, or does not serve in time."""
    text = f"this rank comes too late: rank {server} no longer serves the replay buffer {name!r}"
    return LateError(text, rank=server)
