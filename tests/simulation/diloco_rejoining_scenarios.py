"""Simulates DiLoCo between replicas of several ranks that are killed, restarted, and join the running policy again.

``scenario(seed)`` simulates one run. If a rank is killed, the other ranks of its replica are killed soon afterwards, as
they kill themselves in a real job, and all of them are restarted at different times. A replica may be lost several
times, even while it joins, and the leader's replica may be lost as well. In all runs:

- either all ranks of a restarted replica join, at the same iteration, or none does;
- the ranks of a replica have equal weights after each step, and all replicas after each round;
- each mean is the mean of the weights of whole replicas, which all ranks apply in the same step;
- every rank whose last process is not killed ends its training, or finds that the policy has ended.
"""

from __future__ import annotations

import asyncio
import dataclasses
import functools
import math
import random
from collections import Counter
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import torch
from torch import Tensor

import asyncdist as ad
from asyncdist.simulation import Fault, Kill, Network, Restart, SimReport, SlowLink, SlowRank, Stall, Uniform, simulate
from protocols import AsyncDiLoCoPolicy, DiLoCoPolicy, SelectiveDiLoCoPolicy

#: Virtual seconds that no run takes.
LIMIT_S: Final = 1000.0


@dataclass(frozen=True, kw_only=True)
class Plan:
    """One run of ``replicas`` replicas with ``size`` ranks each; ``kind`` is the class of the policy."""

    replicas: int = 2
    size: int = 2
    steps: int = 24
    kind: type[DiLoCoPolicy | SelectiveDiLoCoPolicy | AsyncDiLoCoPolicy] = DiLoCoPolicy
    options: dict[str, Any] = field(default_factory=dict)
    faults: tuple[Fault, ...] = ()
    network: Network = field(default_factory=Network)

    @property
    def ranks(self) -> int:
        return self.replicas * self.size

    @property
    def is_async(self) -> bool:
        return self.kind is AsyncDiLoCoPolicy


@dataclass
class End:
    """How one process of a rank has joined and ended."""

    joined_at: int | None = None
    has_lost_mate: bool = False
    is_late: bool = False
    has_ended: bool = False


@dataclass
class Life(End):
    """Observations of one process of a rank: the weights before and after each step, and the applied rounds."""

    before: dict[int, list[Tensor]] = field(default_factory=dict)
    after: dict[int, list[Tensor]] = field(default_factory=dict)
    applied: dict[int, tuple[tuple[int, ...], int]] = field(default_factory=dict)  # by round: donors and step
    momenta: list[Tensor] = field(default_factory=list)  # of the inner optimizer, when this process has joined


Lives = dict[tuple[int, int], Life]


def weights_of(model: torch.nn.Module) -> list[Tensor]:
    return [parameter.detach().clone() for parameter in model.parameters()]


async def train(world: ad.World, plan: Plan, lives: Lives) -> None:
    """Train on one rank, and record each step."""
    life = lives.setdefault((world.rank, world.incarnation), Life())
    await ended(world, plan, life, _train(world, plan, life))


async def ended(world: ad.World, plan: Plan, life: End, training: Coroutine[Any, Any, None]) -> None:
    """Train, and record the end. A rank that has lost another rank of its replica waits until it is killed."""
    try:
        await training
    except ad.LateError:
        assert world.incarnation, "the policy had ended before the first process of this rank"
        life.is_late = True
    except (ad.RankLostError, ad.ClosedError, ad.RemoteError) as error:
        first = world.rank // plan.size * plan.size
        killed = {fault.rank for fault in plan.faults if isinstance(fault, Kill)}
        assert killed.intersection(range(first, first + plan.size)), error
        life.has_lost_mate = True
        await asyncio.sleep(LIMIT_S / 2)


async def _train(world: ad.World, plan: Plan, life: Life) -> None:
    replica = world.rank // plan.size
    model = torch.nn.Sequential(*(torch.nn.Linear(3, 3, dtype=torch.float64) for _ in range(3)))
    for parameter in model.parameters():
        torch.nn.init.constant_(parameter, 1.0)
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.5)
    async with plan.kind(model, optimizer, replica_size=plan.size, **plan.options) as policy:
        life.joined_at = policy.iteration
        life.momenta = [optimizer.state[each]["momentum_buffer"].clone() for each in optimizer.state]
        while policy.iteration < plan.steps:
            step = policy.iteration
            optimizer.zero_grad()
            for number, parameter in enumerate(model.parameters()):
                parameter.grad = torch.full_like(parameter, -(replica + 1) * (step % 5 + 1) * (number + 1) / 64)
            optimizer.step()
            await asyncio.sleep(0.01 * (1 + replica * 0.2))
            life.before[step] = weights_of(model)
            info = await policy.step(score=lambda: sum(each.sum().item() for each in model.parameters()))
            life.after[step] = weights_of(model)
            if info:
                life.applied[info.round] = info.donors, step
    life.has_ended = True


def run(plan: Plan, seed: int = 0) -> tuple[SimReport[Any], Lives]:
    lives: Lives = {}
    facts: dict[str, Any] = {"seed": seed, "faults": plan.faults, "network": plan.network}
    report = simulate(train, plan, lives, ranks=plan.ranks, until_s=LIMIT_S, **facts)
    return report, lives


def check(plan: Plan, lives: Lives) -> Counter[str]:
    """Check the laws above, and return the numbers of observations."""
    seen, options = Counter[str](), plan.options
    is_plain = not any(options.get(name) for name in ("overlap_steps", "mixing", "eager"))
    is_plain = is_plain and not plan.is_async and options["fragments"] == 1
    agreed: dict[int, tuple[tuple[int, ...], int]] = {}
    for (rank, incarnation), life in lives.items():
        first = rank // plan.size * plan.size
        for mate in range(first, first + plan.size):
            other = lives.get((mate, incarnation), Life())
            for step in life.after.keys() & other.after.keys():
                assert all(map(torch.equal, life.after[step], other.after[step])), (rank, mate, incarnation, step)
            assert all(map(torch.equal, life.momenta, other.momenta)), (rank, mate, incarnation)
        has_joined = life.joined_at is not None and incarnation > 0
        assert not has_joined or not life.joined_at or len(life.momenta) == 6, (rank, incarnation)
        seen["joined"] += has_joined
        seen["contributions of a joined replica"] += has_joined and any(
            first in donors for donors, _ in life.applied.values()
        )
        if plan.is_async and not life.has_ended:
            continue  # the last versions of a lost leader may be made again from other contributions
        for number, (donors, step) in life.applied.items():
            if not number:  # with eager, the first step has no mean
                continue
            if plan.is_async and (not donors or (incarnation and donors == (first,))):
                # A new leader does not know the donors of a version that it found, and a replica that was admitted as
                # the last of the others left trains on alone.
                continue
            expected = agreed.setdefault(number, (donors, step))
            assert donors == expected[0], (
                f"round {number}: the donors are {donors} on rank {rank}.{incarnation}, {expected[0]} elsewhere"
            )
            assert step == expected[1] or options["late"] == "skip" or plan.is_async, (
                f"round {number} was applied in step {step}, elsewhere in step {expected[1]}"
            )
    for number, (donors, step) in agreed.items():
        seen["rounds"] += 1
        seen["rounds without a replica"] += len(donors) < plan.replicas
        assert options.get("eager") or all(donor % plan.size == 0 for donor in donors)
        if is_plain and options["late"] == "wait":
            _check_mean(plan, lives, number, donors, step)
    kills, restarts = (
        Counter(fault.rank for fault in plan.faults if isinstance(fault, kind)) for kind in (Kill, Restart)
    )
    for first in range(0, plan.ranks, plan.size):
        mates = range(first, first + plan.size)
        if any(kills[mate] > restarts[mate] or (mate, restarts[mate]) not in lives for mate in mates):
            continue  # not restarted, or all other ranks had ended before the last restart
        ends = [lives[mate, restarts[mate]] for mate in mates]
        assert all(life.has_ended or life.is_late for life in ends), first
        assert len({(life.joined_at, life.has_ended) for life in ends}) == 1, (first, ends[0].joined_at)
        seen["late"] += ends[0].is_late
        seen["whole replicas at the end"] += ends[0].has_ended
    return seen


def _check_mean(plan: Plan, lives: Lives, number: int, donors: tuple[int, ...], step: int) -> None:
    """All ranks have equal weights after a round, which without an outer optimizer are the mean of the donors'."""
    given = {rank: life.before[step] for (rank, _), life in sorted(lives.items()) if step in life.before}
    taken = [life.after[step] for life in lives.values() if number in life.applied]
    for after in taken:
        assert all(map(torch.equal, after, taken[0])), f"round {number}: all ranks must have equal weights"
        for place, mine in enumerate(after) if plan.options["outer_optimizer"] is None else ():
            mean = torch.stack([given[donor][place] for donor in donors]).mean(0)
            assert (mine - mean).abs().max() < 1e-12, f"round {number} of donors {donors} must apply their mean"


def losses(
    rng: random.Random, plan: Plan, replica: int, at_s: float, gaps: Sequence[float] = (0.0, 0.001, 0.02)
) -> tuple[list[Fault], float]:
    """Return the kills, ``gaps`` seconds apart, and restarts of a replica's ranks, and the time of the last restart."""
    mates = [replica * plan.size + place for place in range(plan.size)]
    rng.shuffle(mates)
    gap = rng.choice(gaps)
    kills = [at_s + place * gap for place in range(plan.size)]
    backs = [kill + rng.uniform(0.01, 0.1) for kill in kills]
    found: list[Fault] = []
    for mate, kill, back in zip(mates, kills, backs, strict=True):
        found += [Kill(mate, at_s=kill), Restart(mate, at_s=back)]
    return found, max(backs)


def draw_plan(seed: int) -> Plan:
    """Return a run with drawn options and faults. In every third run, the leader's replica is lost while it admits."""
    rng = random.Random(f"diloco rejoining {seed}")
    every = rng.choice((1, 2, 3, 4))
    outer = rng.choice((None, functools.partial(torch.optim.SGD, lr=0.7, momentum=0.9, nesterov=True)))
    is_eager = outer is not None and rng.random() < 0.1
    options: dict[str, Any] = {
        "average_every": every,
        "outer_optimizer": outer,
        "fragments": rng.choice((1, 1, min(2, every))),
        "overlap_steps": 0 if is_eager else rng.choice((0, 0, rng.randrange(every))),
        "mixing": rng.choice((0.0, 0.0, 0.5)),
        "late": "wait" if is_eager else rng.choice(("wait", "wait", "wait", "skip")),
        "eager": is_eager,
        "drain_timeout_s": 60.0,
    }
    if outer is not None and rng.random() < 0.3:
        options |= {"wire": "int8", "error_feedback": 0.9}
    selects = outer is not None and not is_eager and rng.random() < 0.3
    if selects:
        options |= {"overlap_steps": 0, "outlier_factor": math.inf}
        del options["eager"]
    return _with_losses(seed, rng, SelectiveDiLoCoPolicy if selects else DiLoCoPolicy, options)


def draw_async_plan(seed: int) -> Plan:
    """Return a run of asynchronous DiLoCo with the losses of :func:`draw_plan`."""
    rng = random.Random(f"asynchronous diloco rejoining {seed}")
    outer = rng.choice((None, functools.partial(torch.optim.SGD, lr=0.7, momentum=0.9, nesterov=True)))
    options: dict[str, Any] = {
        "average_every": rng.choice((1, 2, 3, 4)),
        "outer_optimizer": outer,
        "late": rng.choice(("skip", "skip", "wait")),
        "quorum": rng.choice((1, 1, 2)),
        "mirror_every": rng.choice((1, 2, None)),
        "drain_timeout_s": 60.0,
    }
    if rng.random() < 0.3:
        options |= {"wire": "int8", "error_feedback": 0.9}
    network = Network(loss_detection_s=Uniform(0.0, rng.choice((0.02, 0.02, 0.1, 0.3))))
    plan = _with_losses(seed, rng, AsyncDiLoCoPolicy, options, replicas_max=4)
    return dataclasses.replace(plan, network=network)


def _with_losses(
    seed: int,
    rng: random.Random,
    kind: type[DiLoCoPolicy | SelectiveDiLoCoPolicy | AsyncDiLoCoPolicy],
    options: dict[str, Any],
    replicas_max: int = 3,
) -> Plan:
    kills_leader = seed % 3 == 2
    plan = Plan(
        replicas=rng.randint(3, replicas_max) if kills_leader else rng.choice((2, 2, replicas_max)),
        size=rng.choice((2, 2, 3)),
        steps=rng.choice((24, 48)),
        kind=kind,
        options=options,
    )
    faults: list[Fault] = []
    if kills_leader:
        faults, back_s = losses(rng, plan, rng.choice((1, 2)), rng.uniform(0.06, 0.12))
        faults += losses(rng, plan, 0, back_s + rng.uniform(0.0, 0.08))[0]
    else:
        safe = rng.randrange(plan.replicas)
        for replica in range(plan.replicas):
            at_s = 0.06
            for _ in range(0 if replica == safe else rng.choice((1, 1, 2))):
                lost, at_s = losses(rng, plan, replica, at_s + rng.uniform(0.0, 0.12))
                faults += lost
    for _ in range(rng.choice((0, 1, 2, 3))):
        rank, other = rng.sample(range(plan.ranks), 2)
        faults.append(
            rng.choice(
                (
                    SlowLink(rank, other, 0.05, rng.choice((10.0, 100.0, 1000.0))),
                    Stall(rank, rng.uniform(0.0, 0.3), rng.choice((0.02, 0.2))),
                    SlowRank(rank, rng.uniform(0.0, 0.2), 10.0),
                )
            )
        )
    return dataclasses.replace(plan, faults=tuple({_key(fault): fault for fault in faults}.values()))


def _key(fault: Fault) -> object:
    """Return a key that is equal for two faults of one link, whose factors would multiply."""
    return (fault.source, fault.dest) if isinstance(fault, SlowLink) else fault


def scenario(seed: int, faults: Sequence[Fault] | None = None) -> SimReport[Any]:
    """Run one seed; AssertionError if a law is broken or a rank is stuck."""
    return seen_in(seed, faults)[0]


def async_scenario(seed: int, faults: Sequence[Fault] | None = None) -> SimReport[Any]:
    """Run one seed of asynchronous DiLoCo; see :func:`scenario`."""
    return seen_in(seed, faults, draw_async_plan)[0]


def seen_in(
    seed: int, faults: Sequence[Fault] | None = None, draw: Callable[[int], Plan] = draw_plan
) -> tuple[SimReport[Any], Counter[str]]:
    """Run one seed, and return its report and the numbers of observations."""
    plan = draw(seed)
    if faults is not None:
        plan = dataclasses.replace(plan, faults=tuple(faults))
    report, lives = run(plan, seed)
    return report, check(plan, lives)
