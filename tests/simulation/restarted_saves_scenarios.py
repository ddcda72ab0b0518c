"""Scenario: ranks are killed and restarted while they save, and new jobs resume on as many, more and fewer ranks."""

from __future__ import annotations

import contextlib
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import torch

import asyncdist as ad
from asyncdist.functional.checkpoints import manifests
from asyncdist.simulation import Fault, Kill, Network, Restart, simulate
from protocols import (
    AsyncDiLoCoPolicy,
    AsyncSelectiveAveragingPolicy,
    DiLoCoPolicy,
    GossipPolicy,
    PopulationAveragingPolicy,
    PopulationTrainingPolicy,
    SparseAveragingPolicy,
)

SAVE_EVERY, SAVED_UNTIL, END = 8, 64, 96
POLICIES: Final[tuple[tuple[Callable[..., Any], dict[str, Any]], ...]] = (
    (AsyncDiLoCoPolicy, {}),
    (AsyncSelectiveAveragingPolicy, {}),
    (DiLoCoPolicy, {}),
    (DiLoCoPolicy, {"late": "skip"}),
    (DiLoCoPolicy, {"eager": True}),
    (DiLoCoPolicy, {"fragments": 2, "overlap_steps": 2}),
    (DiLoCoPolicy, {"quorum": 2}),
    (GossipPolicy, {}),
    (PopulationAveragingPolicy, {}),
    (PopulationTrainingPolicy, {"hyperparameters": {"lr": (1e-3, 1e-1)}}),
    (SparseAveragingPolicy, {}),
)


def scenario(seed: int, folder: Path) -> None:
    """Train with faults, and resume on several numbers of ranks. Raise AssertionError or a rank's error on a fault."""
    draws = random.Random(seed)
    policy_class, options = draws.choice(POLICIES)
    count = draws.choice([3, 4] if "quorum" in options else [2, 3, 4])
    paces = [draws.choice([0.5, 1.0, 1.0, 2.0]) for _ in range(count)]
    saves_beside, keep = draws.random() < 0.4, draws.choice([None, 2])

    async def train(world: ad.World, place: Path, end: int, paces: list[float]) -> int:
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Linear(3, 2), torch.nn.Linear(2, 1))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        policy = policy_class(model, optimizer, average_every=5, **options)
        save: Any = ad.async_save_population if saves_beside else ad.save_population
        with contextlib.suppress(FileNotFoundError):
            await ad.load_population(place, model, optimizer, policy=policy)
        begun = int(policy.iteration)
        async with policy:
            while policy.iteration < end:
                await world.sleep(0.01 * paces[world.rank])
                await (policy.step(float(world.rank)) if policy.takes_metric else policy.step())
                if policy.iteration % SAVE_EVERY == 0:
                    await save(place, model, optimizer, policy=policy, keep=keep)
        return begun

    faults: list[Fault] = []
    time_s = 0.0
    for _ in range(draws.choice([1, 1, 2, 3])):
        rank, killed_s = draws.randrange(count), time_s + draws.uniform(0.05, 0.25)
        time_s = killed_s + draws.uniform(0.02, 0.15)
        faults += [Kill(rank, at_s=killed_s), Restart(rank, at_s=time_s)]
    place = folder / "first"
    place.mkdir()
    simulate(
        train, place, SAVED_UNTIL, paces, ranks=count, seed=seed, faults=faults, network=Network(), until_s=100.0
    ).value()
    is_saved = any((each / "manifest.json").exists() for each in place.iterdir())
    waiting = [each.name for each in place.iterdir() if not each.name.startswith("checkpoint-")]
    assert len(waiting) <= count, f"only states for checkpoints that were never written wait: {waiting}"
    if is_saved:
        ranks = [entry["rank"] for entry in manifests.find_newest(place)[1]["files"]]
        assert ranks == sorted(set(ranks))
    for other in sorted({count, count + 1, max(2, count - 1)}):
        shutil.copytree(place, folder / str(other))
        resumed = simulate(
            train, folder / str(other), END, [1.0] * other, ranks=other, seed=seed, strict=True, until_s=100.0
        ).results
        begun: list[Any] = list(resumed)
        assert not is_saved or all(0 < each <= SAVED_UNTIL for each in begun), f"ranks began at {begun}"
