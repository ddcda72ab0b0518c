"""Tests asynchronous DiLoCo against a small event loop with numpy: order, staleness, and the bits of each anchor.

All constants are powers of two, so that products are exact and torch rounds as numpy does.
"""

from __future__ import annotations

import asyncio
import functools
import heapq
from collections.abc import Callable
from itertools import pairwise
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt
import pytest
import torch

import asyncdist as ad
from asyncdist.simulation import simulate
from protocols import AsyncDiLoCoPolicy, DelayedNesterov, StalenessWeight

Array: TypeAlias = npt.NDArray[np.float32]
F = np.float32

#: Seconds of a step, by rank, chosen so that no two contributions arrive within 10 ms.
STEPS_S = (0.58, 0.75, 1.51, 3.33)
STEP_COUNT = 5  # between contributions
VERSIONS = 60
GRACE_VERSIONS = 20
MARGIN_S = 5e-3  # more than latencies add to any time
SIZE = 7


class Version(NamedTuple):
    """One version of the anchor: its number, the rank that contributed, its staleness, and the anchor's bytes."""

    number: int
    rank: int
    staleness: int
    anchor: bytes


def target(rank: int) -> Array:
    """Return the weights towards which a rank trains."""
    return np.random.default_rng(rank).standard_normal(SIZE).astype(F)


def trained(weights: Array, rank: int) -> Array:
    for _ in range(STEP_COUNT):
        weights = weights - F(0.125) * (weights - target(rank))
    return weights


class Nesterov:
    """Delayed Nesterov with learning rate and momentum 1/2."""

    def __init__(self, delay: int) -> None:
        self.delay, self.count, self.sum, self.momentum = delay, 0, np.zeros(SIZE, F), np.zeros(SIZE, F)

    def moved(self, anchor: Array, difference: Array) -> Array:
        self.sum, self.count = self.sum + difference, self.count + 1
        change = difference / F(self.delay)
        if self.count == self.delay:
            self.momentum = self.momentum * F(0.5) + self.sum / F(self.delay)
            self.sum, self.count = np.zeros(SIZE, F), 0
            change = change + F(0.5) * self.momentum
        return anchor - F(0.5) * change


class Plain:
    """Subtracts each difference."""

    def moved(self, anchor: Array, difference: Array) -> Array:
        return anchor - difference


def expected(outer: Nesterov | Plain, weight: Callable[[int], float], youngest: int = 0) -> list[Version]:
    """Return the versions of an event loop without transfer times.

    Args:
        youngest: Staleness that a difference from the first anchor has at least.
    """
    found = list[Version]()
    anchor = np.zeros(SIZE, F)
    bases = [(0, anchor) for _ in STEPS_S]
    arrivals = [(STEP_COUNT * step_s, rank) for rank, step_s in enumerate(STEPS_S)]
    heapq.heapify(arrivals)
    while len(found) < VERSIONS:
        at, rank = heapq.heappop(arrivals)
        version, base = bases[rank]
        staleness = len(found) - version
        age = staleness if version else max(staleness, youngest)
        anchor = outer.moved(anchor, (base - trained(base, rank)) * F(weight(age)))
        found.append(Version(len(found) + 1, rank, staleness, anchor.tobytes()))
        bases[rank] = len(found), anchor
        heapq.heappush(arrivals, (at + STEP_COUNT * STEPS_S[rank], rank))
    return found


async def contributions(world: ad.World, options: dict[str, Any]) -> list[Version]:
    """Return the versions to which this rank contributed, until the anchor has all of them."""
    model = torch.nn.Linear(SIZE, 1, bias=False)
    torch.nn.init.zeros_(model.weight)
    optimizer = torch.optim.SGD(model.parameters(), 0.125)
    goal = torch.tensor(target(world.rank))
    found = list[Version]()
    async with AsyncDiLoCoPolicy(
        model, optimizer, average_every=STEP_COUNT, late="wait", drain_timeout_s=1.0, **options
    ) as policy:
        await asyncio.sleep(1.0 - world.time())  # until all have started
        while not found or found[-1].number < VERSIONS:
            await asyncio.sleep(STEPS_S[world.rank])
            model.weight.grad = model.weight.detach() - goal
            optimizer.step()
            if info := await policy.step():
                weights = model.weight.detach().flatten().numpy()
                found.append(Version(info.round, world.rank, info.staleness_versions, weights.tobytes()))
    return found


@pytest.mark.parametrize("is_weighted", [False, True])
@pytest.mark.parametrize("delay", [1, 4])
def test_versions_are_those_of_an_event_loop(delay: int, *, is_weighted: bool) -> None:
    correct = StalenessWeight() if is_weighted else None
    outer = functools.partial(DelayedNesterov, lr=0.5, momentum=0.5, delay=delay)
    options: dict[str, Any] = {"outer_optimizer": outer, "correct": correct, "dynamic_steps": False}
    report = simulate(contributions, options, ranks=len(STEPS_S))
    found = sorted(version for rank in report.results for version in rank if version.number <= VERSIONS)
    wanted = expected(Nesterov(delay), correct.weight if correct else lambda _: 1.0)
    assert [each[:3] for each in found] == [each[:3] for each in wanted]
    assert found == wanted
    assert max(each.staleness for each in wanted) > 8, "the slowest rank must have high staleness"


def test_by_default_a_difference_is_divided_by_its_age() -> None:
    report = simulate(contributions, {}, ranks=len(STEPS_S))
    found = sorted(version for rank in report.results for version in rank if version.number <= VERSIONS)
    assert found == expected(Plain(), lambda staleness: 1 / (1 + staleness), youngest=len(STEPS_S) - 1)


def test_by_default_the_agreement_of_contributions_is_known() -> None:
    async def train(world: ad.World) -> list[float | None]:
        model = torch.nn.Linear(2, 1, bias=False)
        optimizer = torch.optim.SGD(model.parameters(), 1.0)
        torch.nn.init.zeros_(model.weight)
        async with AsyncDiLoCoPolicy(model, optimizer, average_every=1, quorum=2, late="wait") as policy:
            model.weight.grad = torch.tensor([[3.0, 4.0 if world.rank else -4.0]])
            optimizer.step()
            return [(await policy.step()).cosine]

    assert list(simulate(train, ranks=2).results) == [[pytest.approx(-7 / 25)]] * 2


@pytest.mark.parametrize("late", ["wait", "skip"])
def test_dynamic_steps_are_in_proportion_to_the_speed(late: str) -> None:
    """The waits of ``late="wait"`` do not count. With H = 20, the slowest rank makes 3 steps per contribution."""

    async def intervals(world: ad.World) -> list[int]:
        model = torch.nn.Linear(SIZE, 1)
        torch.nn.init.zeros_(model.weight)
        torch.nn.init.zeros_(model.bias)
        optimizer = torch.optim.SGD(model.parameters(), 0.125)
        options: Any = {"average_every": 20, "dynamic_steps": True, "late": late, "drain_timeout_s": 1.0}
        captured_at = list[int]()
        async with AsyncDiLoCoPolicy(model, optimizer, **options) as policy:
            while world.time() < 200:
                await asyncio.sleep(STEPS_S[world.rank])
                if info := await policy.step():
                    captured_at.append(policy.iteration - info.staleness_steps)
        return [after - before for before, after in pairwise(captured_at)]

    found = simulate(intervals, ranks=len(STEPS_S)).results
    assert [rank[-1] for rank in found] == [20, 15, 7, 3]
    assert all(set(rank[2:]) == {rank[-1]} for rank in found), (
        "from the third round on, the intervals must be constant, as all speeds are known"
    )
    counts = [len(rank) for rank in found]
    assert max(counts) < 1.5 * min(counts), "all ranks must contribute about equally often"


class Trainer:
    """One rank of the event loop with ``late="skip"``: it continues to train while its contribution is applied."""

    def __init__(self, rank: int, anchor: Array) -> None:
        self.rank, self.version, self.base, self.own = rank, 0, anchor, anchor
        self.steps, self.captured = 0, anchor
        self.is_outstanding = False
        self.answer: tuple[int, Array] | None = None

    def step(self) -> Array | None:
        """Make one step, and apply the anchor that has arrived; return the difference that is due."""
        self.own = self.own - F(0.125) * (self.own - target(self.rank))
        self.steps += 1
        if self.answer is not None:
            (self.version, self.base), self.answer = self.answer, None
            self.own = self.own - (self.captured - self.base)
        if self.steps < STEP_COUNT or self.is_outstanding:
            return None
        self.captured, self.steps, self.is_outstanding = self.own, 0, True
        return self.base - self.own


def expected_with_grace(grace_steps: float) -> list[tuple[tuple[int, ...], float, Array]]:
    """Return the donors, the grace period and the anchor of each version, in an event loop without latencies."""
    outer, found = Nesterov(1), list[tuple[tuple[int, ...], float, Array]]()
    trainers = [Trainer(rank, np.zeros(SIZE, F)) for rank in range(len(STEPS_S))]
    events = [(step_s, rank) for rank, step_s in enumerate(STEPS_S)]
    heapq.heapify(events)
    waiting: dict[int, Array] = {}
    met_at = deadline = np.inf
    anchor = np.zeros(SIZE, F)
    while len(found) < GRACE_VERSIONS:
        now, rank = events[0]
        assert abs(now - deadline) > MARGIN_S, "the deadline is so close to an event that latencies decide the order"
        if deadline < now or len(waiting) == len(trainers):
            decided_at = min(deadline, now)
            mean = sum((waiting[each] for each in sorted(waiting)), np.zeros(SIZE, F)) / F(len(waiting))
            anchor = outer.moved(anchor, mean)
            found.append((tuple(sorted(waiting)), decided_at - met_at, anchor))
            for each in waiting:
                trainers[each].answer, trainers[each].is_outstanding = (len(found), anchor), False
            waiting, deadline = {}, np.inf
            continue
        heapq.heapreplace(events, (now + STEPS_S[rank], rank))
        difference = trainers[rank].step()
        if difference is not None:
            if not waiting:
                met_at, deadline = now, now + 0.9 * grace_steps * min(STEPS_S)
            waiting[rank] = difference
            if len(waiting) == len(trainers):
                deadline = now
    return found


@pytest.mark.parametrize("grace_steps", [0.5, 2, 5])
def test_grace_in_steps_costs_no_rank_a_step(grace_steps: float) -> None:
    """Quorum, grace period and anchors are as in an event loop, and no contribution is postponed."""

    async def versions(world: ad.World) -> tuple[dict[int, tuple[Any, ...]], int, float]:
        model = torch.nn.Linear(SIZE, 1, bias=False)
        torch.nn.init.zeros_(model.weight)
        optimizer = torch.optim.SGD(model.parameters(), 0.125)
        outer = functools.partial(torch.optim.SGD, lr=0.5, momentum=0.5, nesterov=True)
        goal, found = torch.tensor(target(world.rank)), dict[int, tuple[Any, ...]]()
        options: Any = {"outer_optimizer": outer, "grace_steps": grace_steps, "drain_timeout_s": 1.0}
        async with AsyncDiLoCoPolicy(model, optimizer, average_every=STEP_COUNT, **options) as policy:
            at = 1.0  # all have started by then
            while max(found, default=0) < GRACE_VERSIONS:
                at += STEPS_S[world.rank]
                await asyncio.sleep(at - world.time())
                model.weight.grad = model.weight.detach() - goal
                optimizer.step()
                if info := await policy.step():
                    anchor = policy._store.base.block[1][0].clone()
                    found[info.round] = info.donors, info.grace_s, anchor.numpy()
            counts = policy.statistics()
        return found, counts.postponed_count, counts.mean_grace_s

    results = simulate(versions, ranks=len(STEPS_S)).results
    found = {number: version for ranks, *_ in results for number, version in ranks.items()}
    wanted = expected_with_grace(grace_steps)
    for number, (donors, grace_s, anchor) in enumerate(wanted, start=1):
        assert found[number][0] == donors, number
        assert found[number][1] == pytest.approx(grace_s, abs=MARGIN_S), number
        assert np.abs(found[number][2] - anchor).max() <= np.finfo(F).eps * np.abs(anchor).max(), number
    assert [postponed for _, postponed, _ in results] == [0] * len(STEPS_S)
    assert results[0][2] == pytest.approx(np.mean([grace_s for _, grace_s, _ in wanted]), rel=0.1)
    assert {len(donors) for donors, *_ in wanted} > {1}, "the grace period must have added donors"
