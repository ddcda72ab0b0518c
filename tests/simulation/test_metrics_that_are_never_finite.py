"""Tests that metrics that are NaN on all ranks, so that nothing is ever averaged, are reported once."""

from __future__ import annotations

import logging
import math
from typing import Any

import pytest
import torch
from torch import nn

import asyncdist as ad
from protocols import AsyncSelectiveAveragingPolicy, OneSidedSelectiveAveragingPolicy


def warnings_of(kind: Any, metrics: list[float], caplog: pytest.LogCaptureFixture, **options: Any) -> list[str]:
    async def main(world: ad.World) -> None:
        model = nn.Linear(2, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        async with kind(model, optimizer, average_every=5, **options) as policy:
            for _ in range(60):
                await policy.step(metrics[world.rank])

    with caplog.at_level(logging.WARNING):
        ad.simulate(main, ranks=len(metrics), seed=1)
    return [record.getMessage() for record in caplog.records if "NaN or infinite" in record.getMessage()]


def test_selective_averaging_reports_it_once(caplog: pytest.LogCaptureFixture) -> None:
    (text,) = warnings_of(AsyncSelectiveAveragingPolicy, [math.nan, math.inf, -math.inf], caplog)
    assert "the metric of every rank has been NaN or infinite 3 times in a row" in text


def test_one_finite_metric_is_enough(caplog: pytest.LogCaptureFixture) -> None:
    options = {"quorum": 1.0, "grace_s": 30.0}
    assert not warnings_of(AsyncSelectiveAveragingPolicy, [math.nan, 1.0, math.nan], caplog, **options)


def test_without_a_coordinator_each_rank_reports_its_own(caplog: pytest.LogCaptureFixture) -> None:
    texts = warnings_of(OneSidedSelectiveAveragingPolicy, [math.nan, 1.0, math.nan], caplog)
    assert len(texts) == 2 and all("this rank's metric" in text for text in texts)
