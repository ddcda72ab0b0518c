"""Tests the export of counters to Prometheus, TensorBoard, OpenTelemetry and Weights & Biases."""

from __future__ import annotations

import asyncio
import contextlib
import http.client
import math
import socket
import urllib.request
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import asyncdist as ad
from asyncdist.launchers import addresses
from asyncdist.live import address_server
from asyncdist.live.counters import PolicyCounters, RankCounters
from protocols import AsyncSelectiveAveragingPolicy

BEFORE = RankCounters(1, 2, 0, "0000abcd", 1.0, (PolicyCounters("mine", 10, None),))
AFTER = RankCounters(
    1, 2, 0, "0000abcd", 3.0, (PolicyCounters("mine", 40, 0.5, "idle", 2, 1, 0, 7),), 5, 6, 1000, 2000, 0.25
)


def page(port: int) -> str:
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=60) as answer:
        return str(answer.read().decode())


async def train(world: ad.World, port: int) -> str:
    """Return the metrics that the neighbour reads from rank 1's port after both have made nine steps."""
    model = torch.nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    async with AsyncSelectiveAveragingPolicy(model, optimizer, average_every=5, name="mine") as policy:
        for _ in range(9):
            await policy.step(-float(world.rank))
        await ad.barrier()
        told = ""
        while world.rank == 0 and not told:
            try:
                told = await asyncio.to_thread(page, port + 1)
            except OSError:  # the server is not there yet
                await world.sleep(0.01)
        await ad.barrier()
    return told


@pytest.mark.slow
def test_each_rank_serves_its_counters_at_its_port() -> None:
    pytest.importorskip("prometheus_client", reason="prometheus_client is not installed")
    from prometheus_client.parser import text_string_to_metric_families

    port = addresses.find_free_port()
    told = ad.run_local(train, port, ranks=2, metrics=port)[0]
    found = {
        sample.name: (sample.value, sample.labels)
        for family in text_string_to_metric_families(told)
        for sample in family.samples
    }
    assert found["asyncdist_steps_total"] == (9.0, {"rank": "1", "policy": "mine"})
    assert found["asyncdist_metric"] == (-1.0, {"rank": "1", "policy": "mine"})
    assert found["asyncdist_sent_messages_total"][0] > 0
    assert found["asyncdist_rank_info"][1]["size"] == "2"
    with pytest.raises(OSError):
        page(port + 1)  # nothing serves after the end


def test_reply_needs_no_name_resolution_and_its_server_stops() -> None:
    pytest.importorskip("prometheus_client", reason="prometheus_client is not installed")
    from asyncdist.live.prometheus import PrometheusServer

    port = addresses.find_free_port()
    for _ in range(2):  # the port is free again
        server = PrometheusServer(lambda: AFTER, "127.0.0.1", port)
        assert 'asyncdist_role{policy="mine",rank="1",role="idle"} 1.0' in page(port)
        server.close()


def test_who_never_completes_a_question_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("prometheus_client", reason="prometheus_client is not installed")
    from asyncdist.live import prometheus

    monkeypatch.setattr(address_server, "_IDLE_S", 0.05)
    port = addresses.find_free_port()
    server = prometheus.PrometheusServer(lambda: AFTER, "127.0.0.1", port)
    with socket.create_connection(("127.0.0.1", port), timeout=5.0) as client:
        client.sendall(b"GET /metrics HTTP/1.0\r\n")
        assert client.recv(1) == b""
    server.close()


def test_many_silent_clients_do_not_exhaust_file_descriptors() -> None:
    """Regression: each connection of another user took a descriptor of the rank, and all of them could be taken."""
    pytest.importorskip("prometheus_client", reason="prometheus_client is not installed")
    from asyncdist.live.prometheus import PrometheusServer

    port = addresses.find_free_port()
    server = PrometheusServer(lambda: AFTER, "127.0.0.1", port)
    silent = [
        socket.create_connection(("127.0.0.1", port), timeout=5.0) for _ in range(address_server.CONNECTION_COUNT_MAX)
    ]
    with socket.create_connection(("127.0.0.1", port), timeout=5.0) as client:
        assert client.recv(1) == b""
    for each in silent:
        each.close()
    while True:  # the server notices the closed connections soon
        with contextlib.suppress(OSError, http.client.HTTPException):
            assert "asyncdist_role" in page(port)
            break
    server.close()


def test_malformed_requests_are_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    pytest.importorskip("prometheus_client", reason="prometheus_client is not installed")
    from asyncdist.live.prometheus import PrometheusServer

    port = addresses.find_free_port()
    server = PrometheusServer(lambda: AFTER, "127.0.0.1", port)
    for _ in range(3):
        with socket.create_connection(("127.0.0.1", port), timeout=5.0) as client:
            client.sendall(b"GET http://[::1/metrics HTTP/1.0\r\n\r\n")
            assert client.recv(1) == b""
    server.close()
    assert [record.getMessage() for record in caplog.records] == [f"a request at port {port} failed"]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_tensorboard_has_a_folder_for_each_rank(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard", reason="tensorboard is not installed")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    from asyncdist.live.writers import TensorBoardWriter

    writer = TensorBoardWriter(str(tmp_path), 1)
    writer.write(BEFORE)
    writer.write(AFTER)
    writer.close()
    read: Any = EventAccumulator(str(tmp_path / "rank00001"))  # type: ignore[no-untyped-call]
    read.Reload()
    names = set(read.Tags()["scalars"])
    assert {"asyncdist/mine/steps", "asyncdist/mine/metric", "asyncdist/waited_seconds"} < names
    assert "asyncdist/mine/role" not in names
    steps = [(event.step, event.value) for event in read.Scalars("asyncdist/mine/steps")]
    assert steps == [(10, 10.0), (40, 40.0)]
    assert [event.value for event in read.Scalars("asyncdist/mine/steps_per_second")] == [15.0]


@pytest.mark.slow
def test_opentelemetry_takes_them_by_the_provider_of_the_program(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    pytest.importorskip("opentelemetry.sdk", reason="opentelemetry-sdk is not installed")
    from opentelemetry import metrics
    from opentelemetry.sdk.metrics import MeterProvider
    from opentelemetry.sdk.metrics.export import InMemoryMetricReader

    from asyncdist.live.writers import OpenTelemetryWriter

    reader = InMemoryMetricReader()
    provider = MeterProvider([reader], shutdown_on_exit=False)
    monkeypatch.setattr(metrics, "get_meter", provider.get_meter)
    monkeypatch.setattr(metrics, "get_meter_provider", lambda: provider)
    writer = OpenTelemetryWriter()
    writer.write(BEFORE)
    writer.write(AFTER)
    writer.write(replace(AFTER, policies=(replace(AFTER.policies[0], metric=math.nan),)))
    data: Any = reader.get_metrics_data()  # before close, which flushes: an old SDK then forgets the gauges
    writer.close()
    assert not caplog.records, "a metric that is not finite must not cause warnings"
    found = {
        metric.name: (metric.unit, point.value, dict(point.attributes))
        for metric in data.resource_metrics[0].scope_metrics[0].metrics
        for point in metric.data.data_points
    }
    assert found["asyncdist.steps"] == ("1", 40, {"rank": 1, "policy": "mine"})
    assert found["asyncdist.sent_bytes"] == ("By", 1000, {"rank": 1})
    assert found["asyncdist.metric"] == ("1", 0.5, {"rank": 1, "policy": "mine"})
    provider.shutdown()


@pytest.mark.slow
def test_a_program_without_a_meter_provider_is_told_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """OpenTelemetry then drops the numbers without a message."""
    pytest.importorskip("opentelemetry.metrics", reason="opentelemetry-api is not installed")
    from opentelemetry import metrics

    from asyncdist.live.writers import OpenTelemetryWriter

    monkeypatch.setattr(metrics, "get_meter_provider", object)
    writer = OpenTelemetryWriter()
    writer.write(BEFORE)
    writer.write(AFTER)
    writer.close()
    told = [record.getMessage() for record in caplog.records]
    assert told == ["rank 1 exports no counters to opentelemetry until the program has set a meter provider"]


def test_wandb_has_a_run_for_each_rank(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A stand-in records the calls; tests/launched uses the library itself if it is installed."""
    import sys
    import types

    logged: list[Any] = []
    run = types.SimpleNamespace(log=logged.append, finish=lambda: logged.append("finished"))

    def init(**options: Any) -> Any:
        logged.append(options)
        return run

    stand_in = types.SimpleNamespace(init=init, Settings=lambda **options: options)
    monkeypatch.setitem(sys.modules, "wandb", stand_in)
    from asyncdist.live.writers import WandbWriter

    writer = WandbWriter("", BEFORE)
    writer.write(BEFORE)
    writer.write(AFTER)
    writer.close()
    options, first, second, end = logged
    assert (options["mode"], options["project"], options["name"]) == ("offline", "asyncdist", "rank 1")
    assert options["group"] == "asyncdist-0000abcd"
    assert (first["asyncdist/mine/steps"], second["asyncdist/mine/steps"], end) == (10, 40, "finished")
    assert second["asyncdist/mine/steps_per_second"] == 15.0
