"""Exports the counters of a rank to Prometheus, from a thread that sleeps until a request arrives."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Callable, Iterator

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, InfoMetricFamily
from prometheus_client.exposition import MetricsHandler
from prometheus_client.registry import Collector, CollectorRegistry

from asyncdist.live.address_server import AddressServer
from asyncdist.live.counters import EXPORTED, RankCounters, samples
from asyncdist.live.writers import Writer

_LABELS = ("rank", "policy", "role")


class PrometheusServer(Writer, Collector):
    """Serves the counters of a rank until closed. Raises OSError if it cannot listen on the address."""

    def __init__(self, read: Callable[[], RankCounters], host: str, port: int) -> None:
        self._read = read
        registry = CollectorRegistry(auto_describe=False)
        registry.register(self)
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
        server = type("_ServerOfFamily", (AddressServer,), {"address_family": family})
        self._server: AddressServer = server((host, port), MetricsHandler.factory(registry))
        self._thread = threading.Thread(target=self._server.serve_forever, name="asyncdist prometheus", daemon=True)
        self._thread.start()

    def collect(self) -> Iterator[CounterMetricFamily | GaugeMetricFamily | InfoMetricFamily]:
        """Yield one metric family for each name. Called in a separate thread when a request arrives."""
        counters = self._read()
        families: dict[str, CounterMetricFamily | GaugeMetricFamily] = {}
        for sample in samples(counters):
            kind, meaning = EXPORTED[sample.name]
            labels = {"rank": str(counters.rank), **sample.labels}
            family = families.get(sample.name)
            if family is None:
                make = CounterMetricFamily if kind == "counter" else GaugeMetricFamily
                names = [name for name in _LABELS if name in labels]
                family = families[sample.name] = make(f"asyncdist_{sample.name}", meaning, labels=names)
            family.add_metric([labels[name] for name in _LABELS if name in labels], sample.value)
        yield from families.values()
        info = InfoMetricFamily("asyncdist_rank", "The rank and its job.", labels=["rank"])
        facts = {"job": counters.job, "size": str(counters.size), "incarnation": str(counters.incarnation)}
        info.add_metric([str(counters.rank)], facts)
        yield info

    def write(self, _: RankCounters) -> None:
        """Do nothing, because counters are read when a request arrives."""

    def close(self) -> None:
        """Stop the server."""
        with contextlib.suppress(OSError):
            # This wakes the thread, which otherwise checks for the shutdown every half second.
            self._server.socket.shutdown(socket.SHUT_RDWR)
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()
