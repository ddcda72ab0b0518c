"""The training that the scenarios of DiLoCo, its asynchronous form and the simple policies share, with drawn faults.

Each rank trains a small model by steps that are multiples of 1/64, so that an oracle in numpy can repeat them. A run is
described by a subclass of :class:`TrainingPlan`.
"""

from __future__ import annotations

import asyncio
import functools
import math
import os
import random
import signal
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field, replace
from typing import Any, Final, Literal, TypeAlias, TypeVar

import numpy as np
import torch
from torch import nn

import asyncdist as ad
from asyncdist.simulation import (
    Compute,
    Delay,
    Exponential,
    Fault,
    Kill,
    Link,
    Network,
    Partition,
    SimReport,
    SlowLink,
    SlowRank,
    Stall,
    Uniform,
    simulate,
)
from protocols import StepInfo

Arrays: TypeAlias = list[np.ndarray[Any, Any]]
LAYER_COUNT: Final = 4
#: Virtual seconds that no run takes.
LIMIT_S: Final = 1e4


class Layers(nn.Module):
    """Four layers and a head, whose weights are equal on all ranks."""

    def __init__(self, dtype: torch.dtype = torch.float64) -> None:
        super().__init__()
        self.h = nn.ModuleList(nn.Linear(3, 2, dtype=dtype) for _ in range(LAYER_COUNT))
        self.head = nn.Linear(2, 1, dtype=dtype)
        with torch.no_grad():
            for place, parameter in enumerate(self.parameters()):
                count = torch.arange(parameter.numel(), dtype=dtype).view(parameter.shape)
                parameter.copy_((count + place) / 8)


def layer_of(place: int) -> int:
    """Return the layer of the ``place``-th parameter; the head belongs to layer 0, and therefore to fragment 0."""
    return place // 2 if place < 2 * LAYER_COUNT else 0


def drift(rank: int, step: int, place: int, shape: Sequence[int]) -> np.ndarray[Any, Any]:
    """Return one training step of a parameter, a multiple of 1/64. The caller must not change the array."""
    return _drift(rank, (rank * 7 + step * 3 + place) % 13, tuple(shape))


@functools.cache
def _drift(rank: int, offset: int, shape: tuple[int, ...]) -> np.ndarray[Any, Any]:
    count = np.arange(math.prod(shape)).reshape(shape)
    return ((count * 5 + offset) % 13 - 6 + rank) / 64.0


def weights_of(model: nn.Module) -> Arrays:
    return [parameter.detach().numpy().copy() for parameter in model.parameters()]


# -- one run ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class TrainingPlan:
    """One run.

    Attributes:
        steps: Number of steps of each rank.
        dies_at: Step before which a rank kills its process, by rank; for real jobs.
    """

    ranks: int = 4
    steps: tuple[int, ...] = ()
    dtype: torch.dtype = torch.float64
    dies_at: Mapping[int, int] = field(default_factory=dict)
    step_s: float = 0.01
    network: Network = field(default_factory=Network)
    compute: Compute = field(default_factory=Compute)
    faults: tuple[Fault, ...] = ()

    @property
    def killed(self) -> set[int]:
        return {fault.rank for fault in self.faults if isinstance(fault, Kill)} | set(self.dies_at)


P = TypeVar("P", bound=TrainingPlan)
#: How the start of a policy ended: "too late" is for a restarted rank whose policy has ended meanwhile.
Start: TypeAlias = Literal["started", "ended by a loss", "too late"]


async def advance(plan: TrainingPlan, model: nn.Module, rank: int, step: int) -> None:
    """Make one training step, which takes longer on higher ranks. A rank that ``dies_at`` this step kills itself."""
    with torch.no_grad():
        for place, parameter in enumerate(model.parameters()):
            parameter.add_(torch.from_numpy(drift(rank, step, place, parameter.shape)).to(plan.dtype))
    await asyncio.sleep(plan.step_s * (1 + 0.2 * rank))
    if plan.dies_at.get(rank) == step:
        os.kill(os.getpid(), signal.SIGKILL)


@asynccontextmanager
async def entered(policy: Any, model: nn.Module, plan: TrainingPlan, world: ad.World) -> AsyncIterator[Start]:
    """Enter a policy and yield whether it has started. Leaving it must not change the weights."""
    async with AsyncExitStack() as stack:
        start: Start = "started"
        try:
            await stack.enter_async_context(policy)
        except ad.RankLostError:
            assert plan.killed
            start = "ended by a loss"
        except (ad.ClosedError, ad.LateError):
            assert world.incarnation
            start = "too late"
        yield start
        before = weights_of(model)
        await stack.aclose()
    assert all(map(np.array_equal, before, weights_of(model))), "weights may only change inside step()"


def simulate_plan(main: Callable[..., Any], plan: TrainingPlan, *args: Any, ranks: int, seed: int) -> SimReport[Any]:
    """Simulate ``main(world, *args)`` on the plan's network with its faults. No rank may end with an exception."""
    report = simulate(
        main,
        *args,
        ranks=ranks,
        seed=seed,
        network=plan.network,
        compute=plan.compute,
        faults=plan.faults,
        strict=not plan.killed,
        until_s=LIMIT_S,
    )
    report.value()  # a rank must handle the loss of another rank
    return report


def check_steps(plan: TrainingPlan, infos: Mapping[int, Sequence[StepInfo]], without: set[int]) -> None:
    """Check that each rank has made all of its steps, unless it was killed or its start was ended by a loss."""
    for rank, count in enumerate(plan.steps):
        made = len(infos.get(rank, ()))
        assert made == count or rank in plan.killed | without, f"rank {rank} made {made} of {count} steps"


# -- drawn runs -------------------------------------------------------------------------------------------------------


def with_faults(plan: P, faults: Sequence[Fault] | None) -> P:
    """Return the plan with other faults, which a shrinking exploration has chosen; None keeps the plan's faults."""
    return plan if faults is None else replace(plan, faults=tuple(faults))


def draw_network(rng: random.Random) -> Network:
    return rng.choice(
        (
            Network(),
            Network(ranks_per_host=2),
            Network(link=Link(latency_s=Uniform(1e-4, 5e-3), bandwidth_nbytes_per_s=1e5)),
            Network(link=Link(latency_s=Exponential(0.02)), loss_detection_s=Uniform(0.0, 0.1)),
        )
    )


def draw_steps(rng: random.Random, ranks: int, count: int, staying: float = 0.9) -> tuple[int, ...]:
    """Return the number of steps of each rank: ``count`` with probability ``staying``, otherwise fewer."""
    return tuple(count if rng.random() < staying else rng.randint(1, count) for _ in range(ranks))


def draw_compute(rng: random.Random, ranks: int) -> Compute:
    """Return computing times that are equal, or 10 times longer or shorter on one rank."""
    return Compute(factors={rng.randrange(ranks): rng.choice((0.1, 10.0))} if rng.random() < 0.3 else {})


def draw_faults(rng: random.Random, ranks: int) -> list[Fault]:
    """Return kills of some ranks, and up to two other faults."""
    kills: list[Fault] = []
    for rank in rng.sample(range(ranks), rng.randint(0, ranks - 1)):
        at: dict[str, Any] = rng.choice(
            (
                {"at_s": rng.uniform(0.005, 0.25)},
                {"at_turn": rng.randint(10, 500)},
                {"at_message": rng.randint(10, 150)},
            )
        )
        kills.append(Kill(rank, **at))
    return kills + draw_disturbances(rng, ranks, 0.15)


def draw_disturbances(rng: random.Random, ranks: int, until_s: float) -> list[Fault]:
    """Return up to two faults that kill no rank and begin before ``until_s``."""
    found: list[Fault] = []
    for kind in rng.sample((Stall, SlowRank, SlowLink, Partition, Delay), rng.randint(0, 2)):
        rank, other = rng.sample(range(ranks), 2)
        at_s = rng.uniform(0.0, until_s)
        if kind is Stall:
            found.append(Stall(rank, at_s, rng.choice((0.01, 0.1, 1.0))))
        elif kind is SlowRank:
            found.append(SlowRank(rank, at_s, rng.choice((10.0, 100.0))))
        elif kind is SlowLink:
            found.append(SlowLink(rank, other, at_s, rng.choice((10.0, 100.0))))
        elif kind is Partition:
            found.append(Partition((rank,), at_s, at_s + rng.choice((0.01, 0.1))))
        else:
            found.append(Delay(rank, other, rng.randint(1, 60), rng.choice((0.02, 0.5))))
    return found
