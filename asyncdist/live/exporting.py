"""Exports the counters of a running rank from a separate thread, which only reads them.

A failed export neither ends nor delays the run. One warning is logged.
"""

from __future__ import annotations

import errno
import logging
import threading
from collections.abc import Callable, Sequence
from typing import Final

from asyncdist.live.counters import RankCounters
from asyncdist.live.destinations import Destination, missing
from asyncdist.live.writers import OpenTelemetryWriter, TensorBoardWriter, WandbWriter, Writer

logger = logging.getLogger("asyncdist.live.exporting")

#: Seconds between two writes to sinks other than Prometheus.
PERIOD_S: Final = 5.0
#: Maximum number of seconds to wait for the last write at the end of a run.
END_S: Final = 5.0


class Exporter:
    """Exports the counters of one rank to its destinations every ``period_s`` seconds, in a separate thread.

    ``local_rank``, the rank's number on its host, is added to a destination's port.
    """

    def __init__(
        self,
        destinations: Sequence[Destination],
        read: Callable[[], RankCounters],
        local_rank: int,
        period_s: float = PERIOD_S,
    ) -> None:
        self._destinations = destinations
        self._read = read
        self._local_rank = local_rank
        self._period_s = period_s
        self._is_over = threading.Event()
        self._writers: list[tuple[Destination, Writer]] = []
        self._thread = threading.Thread(target=self._export, name="asyncdist metrics", daemon=True)

    def begin(self) -> None:
        """Start the thread if there are destinations. The thread imports the libraries, which may take seconds."""
        if not self._destinations:
            return
        try:
            self._thread.start()
        except RuntimeError as error:  # The user runs too many threads.
            logger.warning("rank %d exports no counters: %s; the run continues", self._read().rank, error)

    def end(self) -> None:
        """Write the counters a last time, and stop the thread. Wait at most END_S seconds for it."""
        if self._thread.is_alive():
            self._is_over.set()
            self._thread.join(END_S)

    def _export(self) -> None:
        for destination in self._destinations:
            self._guarded(destination, self._open, destination)
        is_over = False
        while not is_over:
            is_over = self._is_over.wait(self._period_s)
            counters = self._read()
            for destination, writer in list(self._writers):
                if not self._guarded(destination, writer.write, counters):
                    self._writers.remove((destination, writer))
        for destination, writer in self._writers:
            self._guarded(destination, writer.close)

    def _open(self, destination: Destination) -> None:
        self._writers.append((destination, self._writer(destination)))

    def _writer(self, destination: Destination) -> Writer:
        lacking = missing(destination)
        if lacking is not None:
            raise ImportError(lacking)
        if destination.sink == "tensorboard":
            return TensorBoardWriter(destination.where, self._read().rank)
        if destination.sink == "wandb":
            return WandbWriter(destination.where, self._read())
        if destination.sink == "opentelemetry":
            return OpenTelemetryWriter()
        from asyncdist.live.prometheus import PrometheusServer  # imports prometheus_client, which may not be installed

        port = destination.port + self._local_rank
        if port > 65535:
            raise ValueError(
                f"port {destination.port} plus {self._local_rank} (this rank's number on its host) must be <= 65535; "
                "choose a lower port"
            )
        return PrometheusServer(self._read, destination.where, port)

    def _guarded(self, destination: Destination, act: Callable[..., object], *args: object) -> bool:
        """Call ``act``, log a warning if it raises, and return whether it succeeded."""
        try:
            act(*args)
        except Exception as error:  # libraries and the system may raise anything
            why: object = error
            if destination.sink == "prometheus" and getattr(error, "errno", None) == errno.EADDRINUSE:
                why = f"port {destination.port + self._local_rank} of {destination.where} is already in use"
            rank = self._read().rank
            logger.warning("rank %d exports no counters to %s: %s; the run continues", rank, destination.sink, why)
            return False
        return True
