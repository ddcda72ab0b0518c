"""Simulates every simple policy with faults, and compares each rank's weights after each step with an oracle in numpy.

The policies are found among the exported ones. The oracle is the function ``formula`` of ``simple/test_NAME.py``, which
is written from the paper. Only the donors of each round are taken from the run, since they depend on the moment of a
loss.
"""

from __future__ import annotations

import asyncio
import functools
import importlib
import inspect
import os
import random
import signal
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, TypeAlias

import numpy as np
import torch
from scripts.population import sgd

import asyncdist as ad
import protocols
from asyncdist.simulation import Compute, Exponential, Fault, Kill, Link, Network, SimReport, Uniform, simulate
from protocols.simple.policy import SimplePolicy
from simulation.diloco_scenarios import Layers, Record, draw_faults, drift, weights_of

Array: TypeAlias = np.ndarray[Any, Any]


def mean_of(states: Sequence[Array]) -> Array:
    """Return the mean, added up in the order of ranks."""
    total = np.zeros_like(states[0])
    for state in states:
        total = total + state
    return total / len(states)


POLICIES: Final[dict[str, Any]] = {
    name: kind for name, kind in vars(protocols).items() if isinstance(kind, type) and issubclass(kind, SimplePolicy)
}


def module_of(policy: str) -> Any:
    """Return the test module of a policy, with ``OPTIONS`` and the function ``formula``."""
    name = POLICIES[policy].__module__.rpartition(".")[2]
    return importlib.import_module(f"simulation.simple.test_{name}")


def has_partners(policy: str) -> bool:
    """Return whether the ranks take different means, as the policy's test module says by ``HAS_PARTNERS``."""
    return getattr(module_of(policy), "HAS_PARTNERS", False)


@dataclass(frozen=True, kw_only=True)
class Plan:
    """One run; the fields are those of DiLoCo's plans."""

    policy: str
    options: Mapping[str, Any] = field(default_factory=dict)
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


async def train(world: ad.World, plan: Plan, record: Record) -> None:
    """Train on one rank, and record each step."""
    model, rank = Layers(plan.dtype), world.rank
    policy = POLICIES[plan.policy](model, sgd(model), on_event=functools.partial(record.see, rank), **plan.options)
    try:
        await policy.__aenter__()
    except ad.RankLostError:
        assert plan.killed
        record.without.add(rank)
        return
    for step in range(plan.steps[rank]):
        with torch.no_grad():
            for place, parameter in enumerate(model.parameters()):
                parameter.add_(torch.from_numpy(drift(rank, step, place, parameter.shape)))
        await asyncio.sleep(plan.step_s * (1 + 0.2 * rank))
        if plan.dies_at.get(rank) == step:
            os.kill(os.getpid(), signal.SIGKILL)
        record.infos[rank].append(await policy.step())
        record.weights[rank].append(weights_of(model))
    before = weights_of(model)
    await policy.__aexit__(None, None, None)
    assert all(map(np.array_equal, before, weights_of(model))), "the weights changed outside step"


def run(plan: Plan, seed: int = 0) -> tuple[SimReport, Record]:
    """Simulate a plan, in which each rank that is not killed makes all of its steps."""
    record = Record()
    report = simulate(
        train,
        plan,
        record,
        ranks=plan.ranks,
        seed=seed,
        network=plan.network,
        compute=plan.compute,
        faults=plan.faults,
        strict=not plan.killed,
        until_s=1e4,
    )
    for rank, result in enumerate(report.results):
        if isinstance(result, BaseException) and rank not in plan.killed:
            raise AssertionError(f"rank {rank} ended with {result!r}") from result
        is_whole = len(record.infos[rank]) == plan.steps[rank]
        assert is_whole or rank in plan.killed | record.without, f"rank {rank} made {len(record.infos[rank])} steps"
    return report, record


def check(plan: Plan, record: Record, tolerance: float) -> int:
    """Compare all weights after each step with the oracle's, and return the number of rounds.

    Args:
        tolerance: Largest absolute error; 0 for equal bits.
    """
    module = module_of(plan.policy)
    taken = {rank: {event.round: event.donors for event in record.applied[rank]} for rank in range(plan.ranks)}
    donors, parted = ({}, {}) if has_partners(plan.policy) else record.donors(plan.killed)
    dtype = np.float32 if plan.dtype == torch.float32 else np.float64
    own = {rank: _flat(weights_of(Layers(plan.dtype))).astype(dtype) for rank in range(plan.ranks)}
    every = plan.options.get(
        "average_every", inspect.signature(POLICIES[plan.policy]).parameters["average_every"].default
    )
    shapes = [array.shape for array in weights_of(Layers(plan.dtype))]
    count = 0
    for step in range(max(plan.steps)):
        for rank, state in own.items():
            moves = [drift(rank, step, place, shape) for place, shape in enumerate(shapes)]
            own[rank] = (state + _flat(moves).astype(dtype)).astype(dtype)
        if (step + 1) % every == 0:
            count += 1
            present = {rank for rank in own if rank not in plan.killed | record.without and plan.steps[rank] > step}
            assert count not in donors or present <= set(donors[count]), f"round {count} was without {present}"
            before = dict(own)
            for rank in own:
                ranks = taken[rank].get(count, donors.get(count, ()))
                assert not has_partners(plan.policy) or ranks or rank not in present, f"rank {rank} took nothing"
                if ranks:
                    given = [before[donor] for donor in ranks]
                    own[rank] = module.formula(plan.options, given, before[rank], count).astype(dtype)
        for rank, weights in record.weights.items():
            if step < min(len(weights), parted.get(rank, len(weights))):
                error = np.abs(_flat(weights[step]) - own[rank]).max()
                assert error <= tolerance, f"rank {rank}, step {step}: {error} > {tolerance}"
    return count


def _flat(arrays: Sequence[Array]) -> Array:
    return np.concatenate([array.reshape(-1) for array in arrays])


def draw_plan(policy: str, seed: int) -> Plan:
    """Return a run with drawn options, network and faults."""
    rng = random.Random(f"{policy} {seed}")
    ranks, steps = rng.randint(2, 5), rng.randint(6, 16)
    network = rng.choice(
        (
            Network(),
            Network(ranks_per_host=2),
            Network(link=Link(latency_s=Uniform(1e-4, 5e-3), bandwidth_nbytes_per_s=1e5)),
            Network(link=Link(latency_s=Exponential(0.02)), loss_detection_s=Uniform(0.0, 0.1)),
        )
    )
    return Plan(
        policy=policy,
        options=rng.choice(module_of(policy).OPTIONS),
        ranks=ranks,
        steps=tuple(steps if rng.random() < 0.9 else rng.randint(1, steps) for _ in range(ranks)),
        network=network,
        compute=Compute(factors={rng.randrange(ranks): rng.choice((0.1, 10.0))} if rng.random() < 0.3 else {}),
        faults=tuple(draw_faults(rng, ranks)),
    )
