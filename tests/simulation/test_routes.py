"""Tests the routes of selective averaging: equal results, bytes moved by each rank, and failures of a reducer."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn

import asyncdist as ad
from asyncdist.simulation import Compute, Fault, Kill, Network, SimReport, simulate
from protocols import AsyncSelectiveAveragingPolicy, SelectiveStatistics, StepInfo
from protocols.parameter_stream import messages
from protocols.parameter_stream.server import SnapshotServer
from protocols.selective import selection
from protocols.selective.roles.reducer import Reducer

SEED_COUNT = 40
LARGEST = torch.finfo(torch.float32).max


class Odd(nn.Module):
    """A model with entries of random sizes in several dtypes, with values of all magnitudes, some of them equal."""

    def __init__(self, seed: int, rank: int) -> None:
        super().__init__()
        sizes, own = random.Random(f"sizes {seed}"), torch.Generator().manual_seed(1000 * seed + rank)
        for name, dtype in (("a", torch.float32), ("b", torch.float64), ("c", torch.bfloat16), ("d", torch.complex64)):
            count = sizes.randint(0, 30)
            values = torch.randn(count, generator=own, dtype=torch.float64)
            values *= 10.0 ** torch.randint(-30, 30, (count,), generator=own)
            values[: count // 4] = 0.1
            self.register_parameter(name, nn.Parameter(values.to(dtype)))
        with torch.no_grad():
            self.a[-3:] = LARGEST
        self.register_buffer("counts", torch.randint(0, 99, (sizes.randint(1, 9),), generator=own))
        mask = torch.zeros(4)
        mask[1] = -torch.inf
        self.register_buffer("mask", mask)

    def to_bytes(self) -> list[bytes]:
        return [
            bytes(torch.view_as_real(t).numpy().data if t.is_complex() else _plain(t).numpy().data) for t in self._all()
        ]

    def _all(self) -> list[torch.Tensor]:
        return [tensor.detach().clone() for tensor in self.state_dict().values()]


def _plain(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.view(torch.int16) if tensor.dtype == torch.bfloat16 else tensor


@dataclass
class Ended:
    """The outcome of one rank."""

    weights: list[bytes]
    infos: list[StepInfo]
    statistics: SelectiveStatistics
    sent_nbytes: int
    received_nbytes: int


async def one_round(world: ad.World, model: nn.Module, steps: int, metric: float, options: dict[str, Any]) -> Ended:
    """Make exactly one round: the threshold is always exceeded, and the cooldown after the first round never ends."""
    policy = AsyncSelectiveAveragingPolicy(
        model,
        torch.optim.SGD(model.parameters(), lr=0.1),
        **{"average_every": 2, "threshold": 1e9, "cooldown": 10**9, "quorum": 1.0, "grace_s": 10.0, **options},
    )
    async with policy:
        infos = [await policy.step(metric) for _ in range(steps)]
    moved = world.statistics()
    weights = model.to_bytes() if isinstance(model, Odd) else []
    told = [info for info in infos if info or info.abandoned]
    return Ended(weights, told, policy.statistics(), moved.stream_sent_nbytes, moved.stream_received_nbytes)


def odd_population(seed: int, route: str) -> SimReport[Ended]:
    """Simulate ranks that do not train, so that their weights follow from the only round."""
    rng = random.Random(f"routes {seed}")
    ranks = rng.choice((3, 4, 5, 6, 8, 12))
    options = {
        "route": route,
        "replacement_ratio": rng.choice((0.2, 0.25, 0.5, 0.75)),
        "averaging_strategy": rng.choice(("mean", "mean", "weighted_mean", "best_only")),
        "momentum": rng.choice((0.0, 0.0, 0.3)),
        "metric_mode": rng.choice(("max", "min")),
    }
    metrics = [
        rng.uniform(-1.0, 1.0) if options["metric_mode"] == "max" else rng.uniform(2e9, 3e9) for _ in range(ranks)
    ]

    async def main(world: ad.World) -> Ended:
        return await one_round(world, Odd(seed, world.rank), 40, metrics[world.rank], options)

    network = Network(ranks_per_host=random.Random(f"hosts {seed}").randint(1, 5))
    chunk_nbytes = random.Random(f"chunks {seed}").choice((32, 64, messages.CHUNK_NBYTES))
    with (
        mock.patch.object(selection, "SHARED_NBYTES_MIN", 0),  # even if ranks of a host share parts
        mock.patch.object(messages, "CHUNK_NBYTES", chunk_nbytes),
    ):
        return simulate(main, ranks=ranks, seed=seed, network=network, strict=True)


@pytest.mark.slow
@pytest.mark.parametrize(
    "first", [0, *(pytest.param(first, marks=pytest.mark.long) for first in range(10, SEED_COUNT, 10))]
)
def test_both_routes_give_the_same_bits(first: int) -> None:
    for seed in range(first, first + 10):
        direct, sharded = odd_population(seed, "direct"), odd_population(seed, "sharded")
        for rank, (one, two) in enumerate(zip(direct.results, sharded.results, strict=True)):
            assert one.weights == two.weights, f"seed {seed}: the weights of rank {rank} depend on the route"
            assert [info.donors for info in one.infos] == [info.donors for info in two.infos]
            assert not any(info.abandoned for info in (*one.infos, *two.infos))
            assert {info.route for info in one.infos} <= {"direct"}
        replaced = [info for ended in sharded.results for info in ended.infos]
        assert replaced, f"seed {seed}: no rank was replaced"
        is_pair = len(replaced) == len(replaced[0].donors) == 1
        assert {info.route for info in replaced} == {"direct" if is_pair else "sharded"}, f"seed {seed}"
        assert not any(ended.statistics.reasked_count for ended in sharded.results)


# -- what is moved, and by whom ---------------------------------------------------------------------------------------


def plain_population(
    ranks: int, faults: Sequence[Fault] = (), *, steps: int = 60, size: int = 3000, **options: Any
) -> SimReport[Ended]:
    """Simulate ranks whose weights and metrics are their numbers."""

    async def main(world: ad.World) -> Ended:
        model = nn.Linear(size, 1, bias=False)
        nn.init.constant_(model.weight, float(world.rank))
        ended = await one_round(world, model, steps, float(world.rank), {"replacement_ratio": 0.25, **options})
        ended.weights = sorted({bytes(str(value), "ascii") for value in model.weight.flatten().tolist()})
        return ended

    compute = Compute(step_s=1e-3, overrun_probability=0.0)
    return simulate(main, ranks=ranks, seed=3, faults=faults, compute=compute, strict=True)


@pytest.mark.parametrize("ratio", [0.25, 0.5, 0.75])
def test_a_sharded_round_moves_each_model_once(ratio: float) -> None:
    """No rank moves more than two models."""
    ended = plain_population(8, route="sharded", replacement_ratio=ratio).results
    nbytes = 3000 * 4
    assert sum(one.sent_nbytes for one in ended) == sum(one.received_nbytes for one in ended) == 7 * nbytes
    assert max(max(one.sent_nbytes, one.received_nbytes) for one in ended) < 2 * nbytes
    assert sum(one.statistics.reduction_count for one in ended) == max(round(8 * ratio), 8 - round(8 * ratio))
    coordinator = ended[0].statistics.coordinator
    assert coordinator is not None and coordinator.routes == {"direct": 0, "sharded": 1}


def test_auto_takes_the_direct_route_for_a_small_model() -> None:
    ended = plain_population(8).results
    assert [info.route for one in ended for info in one.infos] == ["direct", "direct"]
    assert sum(one.sent_nbytes for one in ended) == 6 * 2 * 3000 * 4


def test_there_may_be_more_reducers_than_elements() -> None:
    ended = plain_population(8, size=2, route="sharded").results
    assert [info.route for one in ended for info in one.infos] == ["sharded", "sharded"]
    assert ended[0].weights == [b"4.5"], "the weights must be the mean of ranks 2 to 7"


def seconds_of_a_round(route: str) -> float:
    """Return the time that one replacer of four ranks on two hosts waits if a model takes 100 ms through a network."""

    async def main(world: ad.World) -> Ended:
        model = nn.Linear(1 << 16, 1, bias=False)
        return await one_round(world, model, 800, float(world.rank), {"replacement_ratio": 0.25, "route": route})

    network = Network(ranks_per_host=2, host_bandwidth_nbytes_per_s=4 * 2**16 / 0.1, eager_nbytes=1024)
    results = simulate(main, ranks=4, seed=3, network=network, compute=Compute(step_s=1e-3), strict=True).results
    ((info,),) = [ended.infos for ended in results if ended.infos]
    assert info.route == route
    return info.seconds


@pytest.mark.slow
def test_a_mean_leaves_while_the_parts_come_in(monkeypatch: pytest.MonkeyPatch) -> None:
    """On the direct route two models pass one network card, 200 ms.

    One model each way at once takes half of that, plus a lag.
    """
    monkeypatch.setattr(messages, "PART_CHUNK_NBYTES_MIN", 4096)
    direct, sharded = seconds_of_a_round("direct"), seconds_of_a_round("sharded")
    assert 0.1 < sharded < direct / 1.5 and direct > 0.2
    monkeypatch.setattr(messages, "PART_CHUNK_COUNT", 1)
    assert seconds_of_a_round("sharded") > 0.15, (
        "a part of one chunk must be received before it is sent, which takes longer"
    )


# -- what fails -------------------------------------------------------------------------------------------------------


def killed_when_frozen(monkeypatch: pytest.MonkeyPatch, victim: int, **options: Any) -> SimReport[Ended]:
    """Run until a rank is assigned to add up a part, and once more, killing it at this moment."""
    times: list[float] = []
    original = Reducer.add_up

    def noted(reducer: Reducer, frozen: Any) -> None:
        if reducer._services.rank == victim:
            times.append(reducer._services.time())
        original(reducer, frozen)

    with monkeypatch.context() as patch:
        patch.setattr(Reducer, "add_up", noted)
        plain_population(8, **options)
    assert len(times) == 1
    return plain_population(8, [Kill(victim, at_s=times[0] - 1e-9)], **options)


def test_after_a_reducing_replacer_dies_the_others_get_averages(monkeypatch: pytest.MonkeyPatch) -> None:
    """Six replacers of eight ranks reduce. The others request the dead reducer's part from the donors."""
    report = killed_when_frozen(monkeypatch, 3, route="sharded", replacement_ratio=0.75)
    report.check_faults()
    living = [ended for rank, ended in enumerate(report.results) if rank in (1, 2, 4, 5)]
    for ended in living:
        assert [(bool(info), info.route, info.donors) for info in ended.infos] == [(True, "sharded", (6, 7))]
        assert ended.weights == [b"6.5"]
        assert ended.statistics.reasked_count == 1


def test_a_reducing_donors_death_ends_the_round_of_its_replacers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Six donors of eight ranks reduce. No other rank has the weights of the one that dies."""
    report = killed_when_frozen(monkeypatch, 4, route="sharded")
    report.check_faults()
    for rank in (0, 1):
        ended = report.results[rank]
        assert isinstance(ended, Ended)
        (info,) = ended.infos
        if info:
            assert ended.weights == [b"4.5"]
        else:
            assert "rank 4" in info.abandoned and ended.weights == [f"{float(rank)}".encode()]


@pytest.mark.parametrize("victim", [3, 7])
def test_donors_finish_the_mean_of_a_reducer_that_gives_up(monkeypatch: pytest.MonkeyPatch, victim: int) -> None:
    """The reducer gives up when half of its mean has been sent; the donors then send all of it."""
    monkeypatch.setattr(messages, "CHUNK_NBYTES", 64)
    ratio, replacers = (0.75, (1, 2, 4, 5)) if victim == 3 else (0.25, (0, 1))
    times: list[float] = []
    mark_ready = SnapshotServer.mark_ready

    def noted(server: SnapshotServer, offer: Any, ready_count: int | None) -> None:
        mark_ready(server, offer, ready_count)
        if server._services.rank == victim and ready_count == len(offer.mean_chunks()) // 2:
            times.append(server._services.time())
            if len(times) == 2:
                raise ad.BusyError("as if a donor had been lost", rank=victim)

    monkeypatch.setattr(SnapshotServer, "mark_ready", noted)
    options = {"route": "sharded", "replacement_ratio": ratio}
    plain_population(8, **options)
    assert len(times) == 1
    ended = plain_population(8, **options).results
    for rank in replacers:
        (info,) = ended[rank].infos
        assert info and info.route == "sharded"
        assert ended[rank].weights == ([b"6.5"] if ratio == 0.75 else [b"4.5"])
        assert ended[rank].statistics.reasked_count == 1


def test_a_donor_left_out_is_replaced_by_the_next_best() -> None:
    """The best of six donors has diverged: its part is requested from the others, and its integers are not copied."""

    async def main(world: ad.World) -> tuple[Ended, list[float]]:
        model = nn.BatchNorm1d(64)
        for tensor in model.state_dict().values():
            tensor.fill_(world.rank)
        if world.rank == 7:
            model.weight.data.fill_(torch.nan)
        ended = await one_round(world, model, 60, float(world.rank), {"replacement_ratio": 0.25, "route": "sharded"})
        return ended, [float(tensor.flatten()[0]) for tensor in model.state_dict().values()]

    results = simulate(main, ranks=8, seed=3, strict=True).results
    for ended, values in results[:2]:
        (info,) = ended.infos
        assert info and info.donors == (2, 3, 4, 5, 6)
        assert values == [4.0, 4.0, 4.0, 4.0, 6.0], (
            "the weights must be the mean of ranks 2 to 6, the counter that of the best rank"
        )
        assert ended.statistics.reasked_count == 1


def test_opposite_infinities_give_no_average_on_either_route() -> None:
    """Infinities known at the start do not prevent donating, but different infinities have no mean."""

    async def main(world: ad.World, route: str) -> Ended:
        model = nn.Linear(64, 1, bias=False)
        nn.init.constant_(model.weight, 1.0)
        mask = torch.zeros(8)
        mask[world.rank] = -torch.inf
        model.register_buffer("mask", mask)
        return await one_round(world, model, 60, float(world.rank), {"replacement_ratio": 0.25, "route": route})

    told = []
    for route in ("direct", "sharded"):
        results = simulate(main, route, ranks=8, seed=3, strict=True).results
        told.append([info.abandoned for ended in results for info in ended.infos])
    assert told[0] == told[1] and len(told[0]) == 2
    assert all("infinite" in why and "'mask'" in why for why in told[0])
