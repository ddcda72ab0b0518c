"""Tests replacers of one host that share the parts that one of them fetches from other hosts: traffic and failures."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import nn

import asyncdist as ad
from asyncdist.simulation import Compute, Fault, Kill, Network, SimReport, Stall, simulate
from asyncdist.tensors.flat_state import FlatState
from protocols.parameter_stream.parts import Part
from protocols.selective import selection
from protocols.selective.messages import REPLACER, Assign
from protocols.selective.roles import exchange
from protocols.selective.roles.reducer import Relay
from protocols.selective.roles.resources import ExchangeBuffers
from simulation.read_scenarios import shared_memory
from simulation.test_routes import Ended, one_round

#: Requests for parts: the requesting rank, the rank that is asked, and the part.
Asked = list[tuple[int, int, int]]
OPTIONS = {"route": "sharded", "replacement_ratio": 0.5}
COMPUTE = Compute(step_s=1e-3, overrun_probability=0.0)


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> Iterator[Asked]:
    """Let small models be shared, and record which rank requests a mean from which rank."""
    found: Asked = []
    ask = exchange.ask_for_part

    def noted(services: Any, server: Any, source: int, into: Any, part: Any, **options: Any) -> Any:
        found.append((services.rank, source, part.number))
        return ask(services, server, source, into, part, **options)

    monkeypatch.setattr(exchange, "ask_for_part", noted)
    monkeypatch.setattr(selection, "SHARED_NBYTES_MIN", 0)
    yield found


def population(
    faults: Sequence[Fault] = (), *, ranks_per_host: int = 4, steps: int = 100, **options: Any
) -> SimReport[Ended]:
    """Simulate eight ranks on two hosts.

    The four ranks of the first host are replaced; a rank's weights are its number.
    """

    async def main(world: ad.World) -> Ended:
        model = nn.Linear(3000, 1, bias=False)
        nn.init.constant_(model.weight, float(world.rank))
        ended = await one_round(world, model, steps, float(world.rank), {**OPTIONS, **options})
        ended.weights = sorted({bytes(str(value), "ascii") for value in model.weight.flatten().tolist()})
        return ended

    network = Network(ranks_per_host=ranks_per_host)
    return simulate(main, ranks=8, seed=3, faults=faults, network=network, compute=COMPUTE, strict=True)


def check_replaced(report: SimReport[Ended], ranks: Sequence[int]) -> None:
    for rank in ranks:
        ended = report.results[rank]
        assert [(bool(info), info.route) for info in ended.infos] == [(True, "sharded")], f"rank {rank}"
        assert ended.weights == [b"5.5"]
        assert ended.statistics.reasked_count == 0


def test_each_part_crosses_the_network_once(asked: Asked) -> None:
    check_replaced(population(), range(4))
    assert len(asked) == 16
    crossing = [(source, dest) for dest, source, _ in asked if source >= 4]
    assert sorted(crossing) == [(4, 0), (5, 1), (6, 2), (7, 3)]


def test_one_replacer_on_each_host_fetches_for_itself(asked: Asked) -> None:
    check_replaced(population(ranks_per_host=1), range(4))
    assert {source for _, source, _ in asked} == {4, 5, 6, 7}


@pytest.mark.parametrize("are_neighbours", [False, True])
def test_shared_parts_have_the_same_bits(asked: Asked, are_neighbours: bool) -> None:
    """The bits are also equal if parts are read in the fetching rank's memory."""

    async def main(world: ad.World, route: str) -> list[float]:
        torch.manual_seed(world.rank)
        model = nn.Linear(500, 7)
        await one_round(world, model, 100, float(world.rank), {**OPTIONS, "route": route, "momentum": 0.3})
        return [value for tensor in model.parameters() for value in tensor.flatten().tolist()]

    hosts = Network(ranks_per_host=4)
    direct = simulate(main, "direct", ranks=8, seed=1, network=hosts, strict=True)
    with shared_memory() if are_neighbours else nullcontext():
        sharded = simulate(main, "sharded", ranks=8, seed=1, network=hosts, strict=True)
    assert sharded.results == direct.results and not any(isinstance(each, Exception) for each in sharded.results)
    assert any(source < 4 for _, source, _ in asked)


def when_shared(monkeypatch: pytest.MonkeyPatch, victim: int) -> float:
    """Return when a rank begins to fetch for others."""
    times: list[float] = []
    begin = Relay.begin

    def noted(relay: Relay, round: int, assign: Any) -> None:
        if relay._rank == victim:
            times.append(ad.current_world().time())
        begin(relay, round, assign)

    with monkeypatch.context() as patch:
        patch.setattr(Relay, "begin", noted)
        population()
    return times[0]


def test_if_the_fetching_rank_dies_the_others_ask_the_reducer(asked: Asked, monkeypatch: pytest.MonkeyPatch) -> None:
    at_s = when_shared(monkeypatch, 2)
    asked.clear()
    report = population([Kill(2, at_s=at_s + 1e-6)])
    report.check_faults()
    check_replaced(report, (0, 1, 3))
    assert {(dest, source) for dest, source, part in asked if part == 2 and source == 6} >= {(0, 6), (1, 6), (3, 6)}


def test_if_the_fetching_rank_gives_up_others_ask_the_reducer(asked: Asked, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank 1 refuses to fetch its parts."""
    run = exchange.MeanReceiver.run

    async def failing(self: Any, *args: Any, **options: Any) -> None:
        if self._services.rank == 1:
            self.close()
            raise TimeoutError("as if it had taken too long")
        await run(self, *args, **options)

    monkeypatch.setattr(exchange.MeanReceiver, "run", failing)
    report = population()
    check_replaced(report, (0, 2, 3))
    assert [info.abandoned != "" for info in report.results[1].infos] == [True]


@pytest.mark.slow
def test_a_slow_fetching_rank_delays_others_by_at_most_a_round(asked: Asked, monkeypatch: pytest.MonkeyPatch) -> None:
    at_s = when_shared(monkeypatch, 2)
    report = population([Stall(2, at_s=at_s + 1e-6, duration_s=60.0)], steps=3000, round_timeout_s=1.0)
    report.check_faults()
    for rank in (0, 1, 3):
        (info,) = report.results[rank].infos
        assert "rank 2" in info.abandoned
        assert report.results[rank].weights == [f"{float(rank)}".encode()]


class Server:
    """Stores offers without sending them."""

    def __init__(self) -> None:
        self.on_free: list[Any] = []
        self.refused: list[tuple[int, Part]] = []

    def offer(self, offer: Any) -> Any:
        self.on_free.append(offer.on_free)
        return offer.on_free

    def withdraw(self, offer: Any) -> None:
        """Withdraw the offer; a stream from it frees its memory later."""

    def end_mean(self, round: int, part: Part) -> None:
        self.refused.append((round, part))


def test_what_is_shared_is_lent_until_nothing_leaves_from_it() -> None:
    buffers, server = ExchangeBuffers(FlatState(nn.Linear(4, 1))), Server()
    relay, accumulator = Relay(0, server), buffers.acquire()  # type: ignore[arg-type]
    relay.begin(5, Assign(REPLACER, (2, 3), (0, 1), 1, 3, reducers=(2, 3), sources=(0, 0)))
    relay.share(5, Part(0, 2), accumulator)
    relay.share(4, Part(1, 2), accumulator)  # the part belongs to another round
    buffers.release(accumulator, is_clean=True)  # the average is in place
    assert buffers.in_use == 1 and buffers.acquire().buffers is not accumulator.buffers
    relay.stop()
    assert server.refused == [(5, Part(1, 2))]
    assert buffers.in_use == 2, "both buffers must be in use while the part is being sent"
    server.on_free[0](None)
    assert buffers.in_use == 1 and relay.shared_count == 1
