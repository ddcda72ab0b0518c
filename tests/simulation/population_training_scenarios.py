"""Simulates population based training with drawn options, optimizers and faults.

The oracle is a ledger of all snapshots: a donor's weights, optimizer state and hyperparameters at one moment. Each
replacement, and each admission of a restarted rank, must equal one entry of the ledger to the bit, as a whole. Ranks of
real jobs report their parts of the ledger.
"""

from __future__ import annotations

import hashlib
import random
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeAlias

import torch
from torch import nn

import asyncdist as ad
from asyncdist.simulation import Fault, Kill, Restart, SimReport
from protocols import AverageApplied, PolicyEvent, PopulationTrainingPolicy, SnapshotTaken, StepInfo
from simulation.training_runs import (
    TrainingPlan,
    advance,
    check_steps,
    draw_compute,
    draw_faults,
    draw_network,
    draw_steps,
    entered,
    simulate_plan,
    with_faults,
)

#: SHA-1 of each tensor, by name.
Bits: TypeAlias = dict[str, str]


class WideMomentum(torch.optim.Optimizer):
    """SGD with float32 momentum for weights of low precision."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 0.1, "weight_decay": 0.0})

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                held = self.state[parameter].setdefault("momentum", torch.zeros(parameter.shape))
                held.mul_(0.9).add_(parameter.grad.float() + group["weight_decay"] * parameter.float())
                parameter.sub_((group["lr"] * held).to(parameter.dtype))


OPTIMIZERS: dict[str, Any] = {
    "adam": lambda parameters: torch.optim.Adam(parameters, betas=(0.9, 0.99)),
    "adamw": lambda parameters: torch.optim.AdamW(parameters, amsgrad=True),
    "tensor lr": lambda parameters: torch.optim.Adam(parameters, lr=torch.tensor(0.01), foreach=False),
    "wide": WideMomentum,
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.5),
}
RANGES = {"lr": (1e-3, 1e-1), "weight_decay": (0.0, 0.1)}
CUSTOM: dict[str, Any] = {"noise": [0, 1, 2, 4], "coefficient": (0.5, 2.0)}


@dataclass(frozen=True, kw_only=True)
class Plan(TrainingPlan):
    """One run with this optimizer."""

    optimizer: str = "adam"
    options: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Snapshot:
    """A rank at one moment: weights, optimizer state and hyperparameters."""

    weights: Bits
    moments: Bits
    hyperparameters: dict[str, Any]


@dataclass(frozen=True)
class Copy:
    """A replaced rank after its step; ``inherited`` are the hyperparameters that it has got from its donor."""

    rank: int
    round: int
    donor: int
    now: Snapshot
    inherited: dict[str, Any]


@dataclass
class Record:
    """The ledger of a run, or of one rank of a real job, and the observations of it."""

    snapshots: dict[tuple[int, int], Snapshot] = field(default_factory=dict)  # by round and donor
    copies: list[Copy] = field(default_factory=list)
    admitted: list[Snapshot] = field(default_factory=list)
    infos: dict[int, list[StepInfo]] = field(default_factory=lambda: defaultdict(list))
    without: set[int] = field(default_factory=set)
    seen: Counter[str] = field(default_factory=Counter)
    histories: dict[int, Any] = field(default_factory=dict)


class Small(nn.Module):
    """Two parameters and a counter."""

    count: torch.Tensor

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.one = nn.Parameter(torch.arange(6.0).view(2, 3).to(dtype))
        self.two = nn.Parameter(torch.ones(5, dtype=dtype))
        self.register_buffer("count", torch.zeros((), dtype=torch.int64))


def bits_of(tensors: Mapping[str, Any]) -> Bits:
    def digest(tensor: torch.Tensor) -> str:
        return hashlib.sha1(tensor.detach().reshape(-1).contiguous().view(torch.uint8).numpy().tobytes()).hexdigest()

    return {name: digest(value) for name, value in tensors.items()}


def moments_of(optimizer: torch.optim.Optimizer) -> Bits:
    held = optimizer.state_dict()["state"]
    return bits_of(
        {
            f"{place} {name} {value.dtype}": value
            for place, each in held.items()
            for name, value in each.items()
            if isinstance(value, torch.Tensor)
        }
    )


class Observer:
    """Compares the events of one rank's policy with the ledger."""

    def __init__(self, world: ad.World, model: nn.Module, optimizer: torch.optim.Optimizer, record: Record) -> None:
        self._rank = world.rank
        self._model, self._optimizer, self._record = model, optimizer, record
        self.policy: Any = None
        self.before: Snapshot | None = None  # before the current step
        self.places: tuple[int, tuple[int, ...]] = (world.size, (1,))  # size of the sub-populations, and periods

    def now(self) -> Snapshot:
        weights = bits_of(self._model.state_dict())
        return Snapshot(weights, moments_of(self._optimizer), dict(self.policy.hyperparameters))

    def see(self, event: PolicyEvent) -> None:
        if isinstance(event, SnapshotTaken):
            self._record.snapshots[event.round, self._rank] = self.now()
        elif isinstance(event, AverageApplied):
            self._check_copy(event)

    def _check_copy(self, event: AverageApplied) -> None:
        info, now, (donor,) = event.info, self.now(), event.donors
        assert donor != self._rank
        self._record.copies.append(Copy(self._rank, event.round, donor, now, dict(info.inherited)))
        assert info.hyperparameters == now.hyperparameters
        if not self._is_migrant(donor, info.inherited, info.hyperparameters):
            self._check_explored(info.inherited, info.hyperparameters)
        self.check_written()
        assert event.iteration == self.policy.iteration
        last = self.policy.lineage()[-1]
        assert (last.rank, last.round, last.donor, last.iteration) == (self._rank, event.round, donor, event.iteration)
        assert last.hyperparameters == now.hyperparameters
        self._record.seen["copies"] += 1

    def _is_migrant(self, donor: int, inherited: Mapping[str, Any], new: Mapping[str, Any]) -> bool:
        """Return whether the donor is of another sub-population, and check the hyperparameters in this case."""
        size, periods = self.places
        own, other = periods[self._rank // size], periods[donor // size]
        if self._rank // size == donor // size:
            return False
        assert self.before is not None
        assert new == (inherited if other > own else self.before.hyperparameters)
        self._record.seen["migrants with hyperparameters" if other > own else "migrants without"] += 1
        return True

    def _check_explored(self, old: Mapping[str, Any], new: Mapping[str, Any]) -> None:
        for name, (low, high) in {**RANGES, "coefficient": CUSTOM["coefficient"]}.items():
            assert low <= new[name] <= high
            if new[name] in [min(max(old[name] * factor, low), high) for factor in (0.8, 1.25)]:
                self._record.seen["perturbed"] += 1
            else:
                self._record.seen["drawn again"] += 1
        assert new["noise"] in CUSTOM["noise"]

    def check_written(self) -> None:
        """Check that the optimizer trains with the policy's values."""
        for group in self._optimizer.param_groups:
            for name in RANGES:
                wanted = self.policy.hyperparameters[name]
                if isinstance(group[name], torch.Tensor):
                    wanted = float(torch.tensor(wanted))
                assert float(group[name]) == wanted, name


async def train(world: ad.World, plan: Plan, record: Record) -> None:
    """Train on one rank. A rank that is restarted while the last others leave may find no coordinator."""
    try:
        await _train(world, plan, record)
    except ad.StartTimeoutError:
        assert world.incarnation and plan.killed
        record.without.add(world.rank)


async def _train(world: ad.World, plan: Plan, record: Record) -> None:
    model = Small(plan.dtype)
    optimizer = OPTIMIZERS[plan.optimizer](model.parameters())
    observer = Observer(world, model, optimizer, record)
    observer.policy = policy = PopulationTrainingPolicy(
        model,
        optimizer,
        hyperparameters=RANGES,
        custom_hyperparameters=CUSTOM,
        on_event=observer.see,
        **{"average_every": 2, "start_timeout_s": 100.0, **plan.options},
    )
    async with entered(policy, nn.Module(), plan, world) as start:
        if start != "started":
            record.without.add(world.rank)
            return
        observer.check_written()
        if periods := plan.options.get("periods"):
            observer.places = world.size // len(periods), periods
        if policy.iteration:
            record.seen["admitted"] += 1
            record.admitted.append(observer.now())
        first, noise = policy.iteration, random.Random(f"{world.rank} {world.incarnation}")
        for step in range(first, max(first, plan.steps[world.rank])):
            with torch.no_grad():
                model.count.add_(1)
            for parameter in model.parameters():
                parameter.grad = torch.full_like(parameter, noise.randint(-8, 8) / 8)
            optimizer.step()
            await advance(plan, nn.Module(), world.rank, step)
            before = observer.before = observer.now()
            score = float("nan") if noise.random() < 0.03 else noise.randint(0, 9)
            info = await policy.step(score=score)
            record.infos[world.rank].append(info)
            assert info or observer.now() == before, "the model changed although step() did not report it"
    observer.check_written()
    record.histories[world.rank] = policy.lineage()


def run(plan: Plan, seed: int = 0) -> tuple[SimReport[Any], Record]:
    """Simulate a plan, in which each rank that is not killed makes all of its steps."""
    record = Record()
    report = simulate_plan(train, plan, plan, record, ranks=plan.ranks, seed=seed)
    check_steps(plan, record.infos, record.without)
    check_ledger([record])
    for infos in record.infos.values():
        for info in infos:
            record.seen["abandoned"] += bool(info.abandoned)
    return report, record


def check_ledger(records: Sequence[Record]) -> int:
    """Check that each copy equals its donor's snapshot as a whole, and return the number of copies."""
    snapshots = {key: each for record in records for key, each in record.snapshots.items()}
    copies = [each for record in records for each in record.copies]
    for copy in copies:
        given = snapshots[copy.round, copy.donor]
        assert copy.now.weights == given.weights, (
            f"rank {copy.rank}, round {copy.round}: the weights are not the donor's"
        )
        assert copy.now.moments == given.moments, (
            f"rank {copy.rank}, round {copy.round}: the optimizer moments are not the donor's"
        )
        assert copy.inherited == given.hyperparameters, (
            f"rank {copy.rank}, round {copy.round}: the hyperparameters are not the donor's"
        )
    for record in records:
        for state in record.admitted:
            assert state in snapshots.values(), "the newcomer was admitted with a state that no member had"
    return len(copies)


def draw_plan(seed: int) -> Plan:
    """Return a run with drawn options, optimizer, network and faults."""
    rng = random.Random(f"population training {seed}")
    ranks, steps = rng.randint(2, 7), rng.randint(10, 60)
    network = draw_network(rng)
    faults = draw_faults(rng, ranks) if rng.random() < 0.7 else []
    for fault in [each for each in faults if isinstance(each, Kill) and each.at_s is not None]:
        if rng.random() < 0.6:
            faults.append(Restart(fault.rank, at_s=(fault.at_s or 0.0) + rng.uniform(0.01, 0.3)))
    dtype = rng.choice((torch.float32, torch.float32, torch.bfloat16))
    optimizer = rng.choice([name for name in OPTIMIZERS if dtype == torch.float32 or name != "tensor lr"])
    return Plan(
        optimizer=optimizer,
        dtype=dtype,
        options={
            "average_every": rng.randint(1, 3),
            "quantile": rng.choice((0.25, 0.5)),
            "seed": seed,
            "round_timeout_s": rng.choice((0.05, 30.0)),
        },
        ranks=ranks,
        steps=draw_steps(rng, ranks, steps),
        network=network,
        compute=draw_compute(rng, ranks),
        faults=tuple(faults),
    )


def draw_apart(seed: int) -> Plan:
    """Return a run of sub-populations with drawn periods."""
    plan, rng = draw_plan(seed), random.Random(f"sub-populations {seed}")
    periods = rng.choice(((1, 3), (2, 1), (1, 2, 4), (1, 1)))
    ranks = 4 * len(periods)
    faults = draw_faults(rng, ranks) if rng.random() < 0.6 else []
    for fault in [each for each in faults if isinstance(each, Kill) and each.at_s is not None]:
        if rng.random() < 0.6:
            faults.append(Restart(fault.rank, at_s=(fault.at_s or 0.0) + rng.uniform(0.01, 0.3)))
    return replace(
        plan,
        ranks=ranks,
        steps=draw_steps(rng, ranks, rng.randint(10, 40)),
        compute=draw_compute(rng, ranks),
        faults=tuple(faults),
        options={**plan.options, "quantile": 0.25, "periods": periods},
    )


def scenario(seed: int, faults: Sequence[Fault] | None = None) -> SimReport[Any]:
    """Run one seed; AssertionError if a copy differs from its donor's snapshot, or a rank is stuck."""
    return run(with_faults(draw_plan(seed), faults), seed)[0]
