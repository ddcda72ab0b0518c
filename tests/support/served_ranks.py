"""Serves made-up counters of many ranks from one thread, over the sockets at which ``asyncdist top`` asks ranks."""

from __future__ import annotations

import contextlib
import selectors
import socket
import threading
from collections import Counter
from collections.abc import Callable, Iterable
from pathlib import Path
from types import TracebackType

from asyncdist.live.counters import RankCounters
from asyncdist.story import sockets
from asyncdist.story.facts import to_bytes


class ServedRanks:
    """Answers requests for counters as ranks would; requests for reports get no answer.

    Attributes:
        asked: Number of requests for counters, by rank.
    """

    def __init__(self, job: str, ranks: Iterable[int], counters: Callable[[int], RankCounters]) -> None:
        self.asked: Counter[int] = Counter()
        self._counters = counters
        self._opened: dict[int, tuple[socket.socket, Path]] = {}
        self._selector = selectors.DefaultSelector()
        for rank in ranks:
            opened = sockets.listen(job, rank)
            assert opened is not None, "no folder can hold the sockets"
            self._opened[rank] = opened
            self._selector.register(opened[0], selectors.EVENT_READ, rank)
        self._wake = socket.socketpair()
        self._selector.register(self._wake[0], selectors.EVENT_READ, None)
        self._thread = threading.Thread(target=self._serve, name="served ranks", daemon=True)

    def __enter__(self) -> ServedRanks:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """End all ranks, like ranks that return from main; do nothing if they have ended."""
        if not self._opened:
            return
        self._wake[1].send(b"!")
        self._thread.join()
        for listener, path in self._opened.values():
            listener.close()
            sockets.withdraw(path)
        for each in (*self._wake, self._selector):
            each.close()
        self._opened.clear()

    def _serve(self) -> None:
        while True:
            for key, _ in self._selector.select():
                if key.data is None:
                    return
                with contextlib.suppress(OSError):
                    client, _ = self._opened[key.data][0].accept()
                    with client:
                        self._answer(client, key.data)

    def _answer(self, client: socket.socket, rank: int) -> None:
        client.settimeout(sockets.ANSWER_S)
        if client.recv(len(sockets.COUNTERS)) == sockets.COUNTERS:
            self.asked[rank] += 1
            client.sendall(to_bytes(self._counters(rank)))
