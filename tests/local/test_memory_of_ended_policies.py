"""Tests the memory of ended policies, which Python frees late because they are in reference cycles."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn

import asyncdist as ad
from asyncdist.runtime import process
from protocols import AsyncDiLoCoPolicy, AsyncSelectiveAveragingPolicy, DiLoCoPolicy

POLICIES: list[tuple[Any, dict[str, float]]] = [
    (DiLoCoPolicy, {}),
    (AsyncDiLoCoPolicy, {}),
    (AsyncSelectiveAveragingPolicy, {"loss": 1.0}),
]
Policies = list[weakref.ref[Any]]


@pytest.fixture(scope="module", autouse=True)
def imported() -> None:
    """Excludes the objects of torch's late imports, which optimizers cause, from the collections."""
    new_policy()
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def collections(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """Makes Python's own full collections too rare for the tests, and yields the list of all full collections."""
    full: list[int] = []

    def note(phase: str, info: dict[str, int]) -> None:
        if phase == "start" and info["generation"] == 2:
            full.append(len(full))

    monkeypatch.setattr(process, "_ENDED_NBYTES_MAX", 1000, raising=False)
    thresholds = gc.get_threshold()
    gc.collect()
    gc.set_threshold(1_000_000, 1000, 1000)
    gc.callbacks.append(note)
    yield full
    gc.callbacks.remove(note)
    gc.set_threshold(*thresholds)


def new_policy(kind: Any = DiLoCoPolicy, size: int = 20) -> Any:
    torch.manual_seed(0)
    model = nn.Linear(size, size)
    return kind(model, torch.optim.SGD(model.parameters(), lr=0.1), average_every=2)


def alive(policies: Policies) -> int:
    return sum(policy() is not None for policy in policies)


@pytest.mark.parametrize(("kind", "metric"), POLICIES)
def test_a_policy_frees_the_policies_that_ended_before(kind: Any, metric: dict[str, float]) -> None:
    """Regression: a search over trials ran out of memory, as Python counts the objects of a cycle but not the bytes."""

    async def trial(ended: Policies) -> int:
        policy = new_policy(kind)
        async with policy:
            count = alive(ended)
            for _ in range(4):
                await policy.step(**metric)
        ended.append(weakref.ref(policy))
        return count

    async def main(world: ad.World) -> list[int]:
        ended: Policies = []
        return [await trial(ended) for _ in range(3)]

    # A coordinator may still refer to its policy at the next start, because its task ends later.
    counts = ad.run_local(main, ranks=2, strict=True)
    assert counts == [[0, 0, 0]] * 2 or (kind is AsyncSelectiveAveragingPolicy and counts[1:] == [[0, 0, 0]])


def test_a_variable_of_the_earlier_policy_does_not_keep_it() -> None:
    """Regression: like above, for a loop whose variable refers to the ended policy until the next one is entered."""

    async def main(world: ad.World) -> list[int]:
        ended: Policies = []
        counts = []
        for _ in range(3):
            async with new_policy() as policy:
                await policy.step()
                counts.append(alive(ended))
                await policy.step()
            ended.append(weakref.ref(policy))
        return counts

    # The last rank's variable still refers to its policy when another rank of this process collects garbage.
    counts = ad.run_local(main, ranks=2, strict=True)
    assert counts[0] == [0, 0, 0] and max(counts[1]) <= 1


async def train_twice(world: ad.World, ended: Policies, size: int = 20) -> None:
    for _ in range(2):
        async with new_policy(size=size) as policy:
            await policy.step()
        ended.append(weakref.ref(policy))


def test_a_world_that_has_ended_keeps_no_policy() -> None:
    ended: Policies = []
    ad.run_local(train_twice, ended, ranks=2, strict=True)
    assert (len(ended), alive(ended)) == (4, 0)


@pytest.mark.parametrize("runs", ["small", "disabled", "simulated"])
def test_policies_that_collect_no_garbage(runs: str, collections: list[int]) -> None:
    """A full collection takes a tenth of a second. In a simulation it is done at fixed points only."""
    ended: Policies = []
    ad.run_local(train_twice, ended, ranks=2, strict=True)
    count = len(collections)
    assert count
    try:
        if runs == "small":
            ad.run_local(train_twice, ended, 2, ranks=2, strict=True)
        elif runs == "disabled":
            gc.disable()
            ad.run_local(train_twice, ended, ranks=2, strict=True)
        else:
            ad.simulate(train_twice, ended, ranks=2, seed=1, strict=True)
    finally:
        gc.enable()
    assert len(collections) == count
