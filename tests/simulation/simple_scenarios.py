"""Simulates every simple policy with faults, and compares each rank's weights after each step with an oracle in numpy.

The policies are found among the exported ones. The oracle is the function ``formula`` of ``simple/test_NAME.py``, which
is written from the paper. Only the donors of each round are taken from the run, since they depend on the moment of a
loss.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, TypeAlias

import numpy as np
import torch
from scripts.population import sgd

import asyncdist as ad
import protocols
from asyncdist.simulation import Fault, SimReport
from protocols.simple.policy import SimplePolicy
from simulation.diloco_scenarios import Record
from simulation.training_runs import (
    Layers,
    TrainingPlan,
    advance,
    check_steps,
    draw_compute,
    draw_faults,
    draw_network,
    draw_steps,
    drift,
    entered,
    simulate_plan,
    weights_of,
    with_faults,
)

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


def has_partners(policy: str, options: Mapping[str, Any]) -> bool:
    """Return whether the ranks take different means, as the policy's test module says by ``HAS_PARTNERS``.

    ``HAS_PARTNERS`` is a bool, or a function of the options.
    """
    found = getattr(module_of(policy), "HAS_PARTNERS", False)
    return bool(found(options) if callable(found) else found)


def every_of(policy: str, options: Mapping[str, Any]) -> int:
    """Return the number of steps between rounds."""
    default = inspect.signature(POLICIES[policy]).parameters["average_every"].default
    return int(options.get("average_every", default))


@dataclass(frozen=True, kw_only=True)
class Plan(TrainingPlan):
    """One run of the policy with this name."""

    policy: str
    options: Mapping[str, Any] = field(default_factory=dict)


async def train(world: ad.World, plan: Plan, record: Record) -> None:
    """Train on one rank, and record each step."""
    model, rank = Layers(plan.dtype), world.rank
    policy = POLICIES[plan.policy](model, sgd(model), on_event=functools.partial(record.see, rank), **plan.options)
    async with entered(policy, model, plan, world) as start:
        if start != "started":
            record.without.add(rank)
            return
        for step in range(plan.steps[rank]):
            await advance(plan, model, rank, step)
            record.infos[rank].append(await policy.step())
            record.weights[rank].append(weights_of(model))


def run(plan: Plan, seed: int = 0) -> tuple[SimReport[Any], Record]:
    """Simulate a plan, in which each rank that is not killed makes all of its steps."""
    record = Record()
    report = simulate_plan(train, plan, plan, record, ranks=plan.ranks, seed=seed)
    check_steps(plan, record.infos, record.without)
    return report, record


def check(plan: Plan, record: Record, tolerance: float) -> int:
    """Compare all weights after each step with the oracle's, and return the number of rounds.

    Args:
        tolerance: Largest absolute error; 0 for equal bits.
    """
    module = module_of(plan.policy)
    taken = {rank: {event.round: event.donors for event in record.applied[rank]} for rank in range(plan.ranks)}
    in_parts = has_partners(plan.policy, plan.options)
    donors, parted = ({}, {}) if in_parts else record.donors(plan.killed)
    dtype = np.float32 if plan.dtype == torch.float32 else np.float64
    own = {rank: _flat(weights_of(Layers(plan.dtype))).astype(dtype) for rank in range(plan.ranks)}
    every = every_of(plan.policy, plan.options)
    shapes = [array.shape for array in weights_of(Layers(plan.dtype))]
    # Values that the formula keeps between rounds, if it takes them; at first, the initial weights.
    memory = {"memory": {0: own[0].copy()}} if "memory" in inspect.signature(module.formula).parameters else {}
    count = 0
    for step in range(max(plan.steps)):
        for rank, state in own.items():
            moves = [drift(rank, step, place, shape) for place, shape in enumerate(shapes)]
            own[rank] = (state + _flat(moves).astype(dtype)).astype(dtype)
        if (step + 1) % every == 0:
            count += 1
            present = {rank for rank in own if rank not in plan.killed | record.without and plan.steps[rank] > step}
            assert count not in donors or present <= set(donors[count]), f"round {count} lacks ranks {present}"
            before = dict(own)
            for rank in own:
                ranks = taken[rank].get(count, donors.get(count, ()))
                assert not in_parts or ranks or rank not in present, f"rank {rank} received nothing"
                if ranks and step < parted.get(rank, step + 1):  # a killed rank's last mean is not in the memory
                    given = [before[donor] for donor in ranks]
                    own[rank] = module.formula(plan.options, given, before[rank], count, **memory).astype(dtype)
        for rank, weights in record.weights.items():
            if step < min(len(weights), parted.get(rank, len(weights))):
                error = np.abs(_flat(weights[step]) - own[rank]).max()
                assert error <= tolerance, f"rank {rank}, step {step}: the error is {error}, allowed {tolerance}"
    return count


def _flat(arrays: Sequence[Array]) -> Array:
    return np.concatenate([array.reshape(-1) for array in arrays])


def draw_plan(policy: str, seed: int) -> Plan:
    """Return a run with drawn options, network and faults."""
    rng = random.Random(f"{policy} {seed}")
    ranks, steps = rng.randint(2, 5), rng.randint(6, 16)
    network = draw_network(rng)
    return Plan(
        policy=policy,
        options=rng.choice(module_of(policy).OPTIONS),
        ranks=ranks,
        steps=draw_steps(rng, ranks, steps),
        network=network,
        compute=draw_compute(rng, ranks),
        faults=tuple(draw_faults(rng, ranks)),
    )


def scenario(seed: int, faults: Sequence[Fault] | None = None) -> SimReport[Any]:
    """Run one seed of the policies in turn; AssertionError if a weight differs, or a rank is stuck."""
    plan = with_faults(draw_plan(sorted(POLICIES)[seed % len(POLICIES)], seed), faults)
    report, record = run(plan, seed)
    check(plan, record, 1e-9)
    return report
