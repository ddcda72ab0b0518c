"""Tests that a metric that is measured less often than it is due, such as a validation's, is reported once."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

import asyncdist as ad
from asyncdist.protocols.metrics import NOT_MEASURED
from asyncdist.simulation import simulate
from protocols import AsyncSelectiveAveragingPolicy, OneSidedSelectiveAveragingPolicy, ReplicaAveragingPolicy


def identity(value: Any) -> Any:
    return value


@pytest.mark.parametrize(
    ("kind", "options"),
    [(AsyncSelectiveAveragingPolicy, {}), (ReplicaAveragingPolicy, {"replica_size": 2, "swap_every": 1})],
    ids=["ranks", "replicas"],
)
def test_what_is_not_measured_is_not_reported(kind: Any, options: dict[str, Any]) -> None:
    """Rank 3, or its replica, has a bad validation in step 5, and is replaced once because of it."""

    async def main(world: ad.World) -> tuple[int, int]:
        torch.manual_seed(0)
        model = nn.Linear(2, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
        async with kind(model, optimizer, average_every=2, **options) as policy:
            for step in range(60):
                measured = float(-world.rank) if step == 5 else NOT_MEASURED
                await policy.step(partial(identity, measured))
        statistics = policy.statistics()
        return statistics.report_count, statistics.replacement_count

    results = simulate(main, ranks=4, seed=1, strict=True, until_s=1e4).results
    if kind is AsyncSelectiveAveragingPolicy:
        assert results == ((1, 0), (1, 0), (1, 0), (1, 1))
    else:
        assert results[::2] == ((1, 0), (1, 1))


@pytest.mark.parametrize(
    ("options", "published", "replaced"),
    [
        ({"replacement_mode": "age", "age_range": (20, 20)}, (1, 1, 1, 1), (2, 2, 2, 2)),
        ({"replacement_mode": "worst_ratio"}, (1, 1, 1, 1), (0, 0, 0, 1)),
        ({"replacement_mode": "threshold", "threshold_metric": -2.5}, (1, 1, 1, 1), (0, 0, 0, 1)),
    ],
    ids=["age", "worst_ratio", "threshold"],
)
def test_one_sided_ranks_publish_new_measurements(
    options: dict[str, Any], published: tuple[int, ...], replaced: tuple[int, ...]
) -> None:
    """Regression: a due step without a new measurement raised TypeError, as with ``monitor=`` in Lightning."""

    async def main(world: ad.World) -> tuple[int, int]:
        torch.manual_seed(0)
        model = nn.Linear(2, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
        measured_at = 5 + 2 * ((2 - world.rank) % 4)  # each rank is better than all earlier ranks; rank 3 is last
        async with OneSidedSelectiveAveragingPolicy(model, optimizer, average_every=2, **options) as policy:
            for step in range(60):
                await world.sleep(1.0)
                await policy.step(partial(identity, float(-world.rank) if step == measured_at else NOT_MEASURED))
        statistics = policy.statistics()
        return statistics.version, statistics.num_replacements

    results = simulate(main, ranks=4, seed=1, strict=True, until_s=1e4).results
    assert tuple(zip(*results, strict=True)) == (published, replaced)


@pytest.mark.parametrize(
    "kind",
    [
        AsyncSelectiveAveragingPolicy,
        OneSidedSelectiveAveragingPolicy,
        partial(ReplicaAveragingPolicy, replica_size=2),  # Regression: its metric was never read
    ],
    ids=["selective", "one-sided", "replicas"],
)
def test_one_rank_alone_may_have_no_measurement(kind: Any) -> None:
    async def main(_: ad.World) -> Any:
        model = nn.Linear(2, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
        async with kind(model, optimizer, average_every=1) as policy:
            await policy.step(1.0)
            await policy.step(lambda: NOT_MEASURED)
            return policy.state_dict()["metric"]

    assert ad.run_local(main, ranks=1, strict=True) == [1.0]
