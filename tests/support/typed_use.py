"""Shows what a type checker sees of a program: mypy reads this file with the package, and nothing runs it.

A misspelled or mistyped option must be an error. Each line with such an option has an ignore comment; mypy, which is
strict here, reports an ignore comment without an error.
"""

from __future__ import annotations

from typing import Any, assert_type

import torch

import asyncdist as ad
from asyncdist.blocking.policies import Policy
from asyncdist.integrations import accelerate, lightning, pytorch, torchgfn, transformers
from protocols import (
    AsyncSelectiveAveragingPolicy,
    AverageAllPolicy,
    OneSidedSelectiveAveragingPolicy,
    PopulationTrainingPolicy,
    ReplicaAveragingPolicy,
    SelectiveStatistics,
)


def misspelled(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
    AsyncSelectiveAveragingPolicy(model, optimizer, average_every=1, replace_ratio=0.5)  # type: ignore[call-arg]
    AverageAllPolicy(model, optimizer, average_every=1, optimizer_stat="reset")  # type: ignore[call-arg]
    OneSidedSelectiveAveragingPolicy(model, optimizer, average_every=1, age=(1, 2))  # type: ignore[call-arg]
    ReplicaAveragingPolicy(model, optimizer, replica_size=2, average_every=1, replace_ratio=0.5)  # type: ignore[call-arg]
    ReplicaAveragingPolicy(model, optimizer, replica_size=2, average_every=1, islands=2)  # type: ignore[call-arg]
    PopulationTrainingPolicy(model, optimizer, average_every=1, hyperparams={})  # type: ignore[call-arg]
    pytorch.SelectiveAveraging(model, optimizer, 1, replace_ratio=0.5)  # type: ignore[call-arg]
    accelerate.SelectiveAveraging(model, optimizer, 1, replica_size=2)  # type: ignore[call-arg]
    lightning.SelectiveAveraging(1, replace_ratio=0.5)  # type: ignore[call-arg]
    transformers.SelectiveAveraging(1, replace_ratio=0.5)  # type: ignore[call-arg]
    torchgfn.AsyncSelectiveAveragingPolicy(None, 1, metric_mod="min")  # type: ignore[call-arg]
    torchgfn.AverageAllPolicy(1, optimizer_stat="reset")  # type: ignore[call-arg]
    ad.blocking.run(print, rank=2)  # type: ignore[call-arg]


def mistyped(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
    ReplicaAveragingPolicy(model, optimizer, replica_size=2, average_every=1, momentum="0.5")  # type: ignore[arg-type]
    pytorch.SelectiveAveraging(model, optimizer, 1, averaging_strategy="best")  # type: ignore[arg-type]
    lightning.SelectiveAveraging(1, quorum="all")  # type: ignore[arg-type]
    transformers.SelectiveAveraging(1, metric_mode="larger")  # type: ignore[arg-type]


def well_spelled(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
    averages = pytorch.Averaging(AverageAllPolicy(model, optimizer, average_every=1))
    assert_type(averages.policy, Policy[AverageAllPolicy] | None)
    assert_type(lightning.Averaging(AverageAllPolicy, average_every=1).policy, Policy[AverageAllPolicy] | None)
    averaging = lightning.SelectiveAveraging(1, monitor="val_loss", replacement_ratio=0.5, grace_s=None, replica_size=2)
    if averaging.policy is not None:
        assert_type(averaging.policy.statistics(), SelectiveStatistics)
        assert_type(averaging.policy.awaited.iteration, int)
    with ad.blocking.policy(OneSidedSelectiveAveragingPolicy(model, optimizer, average_every=1)) as policy:
        assert_type(policy.awaited, OneSidedSelectiveAveragingPolicy)
        policy.step(1.0).donors.count(1)


async def _measure(world: ad.World) -> float:
    return float(world.rank)


def results() -> None:
    report = ad.simulate(_measure, ranks=2)
    assert_type(report, ad.SimReport[float])
    assert_type(report.results, tuple[float | Any, ...])


def facts(error: ad.RankLostError, timeout: ad.StartTimeoutError, deadlock: ad.DeadlockError) -> None:
    assert_type(error.rank, int)
    assert_type(timeout.missing, tuple[int, ...])
    assert_type(deadlock.seed, int)
