"""Simulates DiLoCo and its family with kills, restarts and other faults, and checks that all ranks agree on each round.

``scenario(seed)`` simulates one run: the options, the ranks that leave early, the network and the faults are drawn from
the seed. Ranks are killed and restarted several times, even while they are admitted. In all runs:

- every rank that is not killed at the end completes its training, without an exception;
- all surviving ranks apply each round in the same step with the same donors and bits, and have equal anchors;
- each rank applies every round once, in order, and the contribution of a rank that is never killed is in each mean;
- a newcomer begins with the leader's optimizer state;
- no memory of the exchange remains in use.
"""

from __future__ import annotations

import asyncio
import dataclasses
import functools
import itertools
import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import torch
from support.tokens import tokens_for
from torch import Tensor, nn

import asyncdist as ad
from asyncdist.simulation import Fault, Kill, Partition, Restart, SimReport, SlowLink, SlowRank, Stall, simulate
from protocols import AverageApplied, DiLoCoPolicy, TopK

STEP_S: Final = 0.01
LAYER_COUNT: Final = 4
#: Virtual seconds that no run takes.
LIMIT_S: Final = 1000.0


@dataclass(frozen=True, kw_only=True)
class Plan:
    """One run.

    Attributes:
        width: Number of inputs and outputs of each layer; large models take several chunks.
        steps: Number of iterations of each rank; ranks with fewer than the others leave early.
        safe: Rank that no fault kills.
    """

    ranks: int
    width: int
    dtype: torch.dtype
    steps: tuple[int, ...]
    options: dict[str, Any]
    safe: int
    faults: tuple[Fault, ...] = ()

    @property
    def killed(self) -> set[int]:
        return {fault.rank for fault in self.faults if isinstance(fault, Kill)}


@dataclass(frozen=True)
class Applied:
    """One application of a mean: its donors, its step, the fragment's parameters after it, and all anchors."""

    donors: tuple[int, ...]
    step: int
    parameters: list[Tensor]
    versions: tuple[int, ...]
    anchors: list[Tensor]


@dataclass
class Life:
    """Observations of one process of a rank."""

    joined_at: int | None = None
    rounds: list[int] = field(default_factory=list)
    applied: dict[int, Applied] = field(default_factory=dict)  # by round
    is_late: bool = False  # the policy had ended when the process asked for its admission
    has_ended: bool = False


Lives = dict[tuple[int, int], Life]


def new_model(plan: Plan) -> nn.Sequential:
    model = nn.Sequential(*(nn.Linear(plan.width, plan.width, dtype=plan.dtype) for _ in range(LAYER_COUNT)))
    for parameter in model.parameters():
        nn.init.constant_(parameter, 1.0)
    return model


async def train(world: ad.World, plan: Plan, lives: Lives) -> None:
    """Train on one rank until its last iteration, and record each application of a mean."""
    life = lives.setdefault((world.rank, world.incarnation), Life())
    try:
        await _train(world, plan, life)
    except ad.LateError:
        assert world.incarnation, "the policy had ended before the first process of this rank"
        life.is_late = True


async def _train(world: ad.World, plan: Plan, life: Life) -> None:
    model = new_model(plan)
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.5)

    def note(event: Any) -> None:
        if isinstance(event, AverageApplied):
            life.rounds.append(event.round)
            life.applied[event.round] = _applied(policy, event, model)

    async with DiLoCoPolicy(model, optimizer, on_event=note, **plan.options) as policy:
        life.joined_at = policy.iteration
        if policy.iteration:
            momenta = [optimizer.state[parameter].get("momentum_buffer") for parameter in model.parameters()]
            is_leaders = all(each is not None and bool((each == policy.iteration).all()) for each in momenta)
            assert is_leaders, f"rank {world.rank} joined in step {policy.iteration} with momenta {momenta}"
        while policy.iteration < plan.steps[world.rank]:
            step = policy.iteration
            with torch.no_grad():
                for place, parameter in enumerate(model.parameters()):
                    parameter.add_((world.rank + 1) * (step + 1) * (place + 1) / 64)
                    optimizer.state[parameter]["momentum_buffer"] = torch.full_like(parameter, step + 1)
            await asyncio.sleep(STEP_S * (1 + 0.2 * world.rank))
            await policy.step(tokens=tokens_for(policy, world.rank + 1))
    _check_that_memory_is_free(policy)
    life.has_ended = True


def _applied(policy: DiLoCoPolicy, event: AverageApplied, model: nn.Module) -> Applied:
    tensors = list(model.parameters())
    chosen = policy._chosen[(event.round - 1) % len(policy._chosen)]
    parameters = [tensors[index].detach().clone() for index in chosen]
    anchors = [anchor.clone() for fragment in policy._fragments for anchor in fragment.anchors]
    versions = tuple(fragment.version for fragment in policy._fragments)
    return Applied(event.donors, event.iteration, parameters, versions, anchors)


def _check_that_memory_is_free(policy: DiLoCoPolicy) -> None:
    exchange = policy._exchange
    if exchange is not None:
        assert not exchange._rounds or exchange._is_closed, f"rounds were not removed: {sorted(exchange._rounds)}"


def run(plan: Plan, seed: int = 0) -> tuple[SimReport[Any], Lives]:
    """Simulate a plan, and check that each rank ended as it must."""
    lives: Lives = {}
    report = simulate(train, plan, lives, ranks=plan.ranks, seed=seed, faults=plan.faults, until_s=LIMIT_S)
    report.value()  # raises the exception of any rank
    for rank in set(range(plan.ranks)) - report.killed_ranks:
        newest = max(incarnation for each, incarnation in lives if each == rank)
        life = lives[rank, newest]
        assert life.has_ended or life.is_late, f"rank {rank} did not complete its training"
    return report, lives


def check(plan: Plan, lives: Lives) -> Counter[str]:
    """Compare the records of all processes that have completed their training; return the numbers of observations."""
    seen: Counter[str] = Counter()
    whole = {key: life for key, life in lives.items() if life.has_ended}
    anchors: dict[tuple[int, ...], tuple[tuple[int, int], list[Tensor]]] = {}
    agreed: dict[int, tuple[tuple[int, int], Applied]] = {}
    for key, life in whole.items():
        seen["joined"] += key[1] > 0
        _check_order(plan, key, life)
        for number, mine in life.applied.items():
            seen["applied"] += 1
            other, theirs = anchors.setdefault(mine.versions, (key, mine.anchors))
            assert _are_equal(theirs, mine.anchors), f"round {number}: the anchors of {key} and {other} differ"
            if key[0] not in plan.killed and plan.options["late"] == "wait":
                assert key[0] in mine.donors, f"round {number}: the contribution of {key} is missing from {mine.donors}"
            first, expected = agreed.setdefault(number, (key, mine))
            assert mine.donors == expected.donors, (
                f"round {number}: the donors are {mine.donors} on {key}, {expected.donors} on {first}"
            )
            if plan.options["late"] == "wait":
                assert mine.step == expected.step, (
                    f"round {number}: {key} applied it in step {mine.step}, {first} in step {expected.step}"
                )
                is_equal = plan.options["mixing"] or _are_equal(mine.parameters, expected.parameters)
                assert is_equal, f"round {number}: the weights of {key} and {first} differ"
    return seen


def _check_order(plan: Plan, key: tuple[int, int], life: Life) -> None:
    """Each round of a fragment is applied once, and in order."""
    fragments = plan.options["fragments"]
    for fragment in range(fragments):
        rounds = [number for number in life.rounds if (number - 1) % fragments == fragment]
        if rounds:
            expected = list(range(rounds[0], rounds[-1] + 1, fragments))
            assert rounds == expected, f"{key} applied rounds {rounds} of fragment {fragment}"


def _are_equal(mine: Sequence[Tensor], theirs: Sequence[Tensor]) -> bool:
    return all(map(torch.equal, mine, theirs))


def draw_plan(seed: int) -> Plan:
    """Return a run with drawn options and faults."""
    rng = random.Random(f"diloco faults {seed}")
    ranks = rng.randint(2, 5)
    every = rng.choice((1, 2, 4))
    outer: Any = rng.choice(
        (
            functools.partial(torch.optim.SGD, lr=0.7, momentum=0.9, nesterov=True),
            functools.partial(torch.optim.SGD, lr=0.5, momentum=0.5),
            None,
        )
    )
    options: dict[str, Any] = {
        "average_every": every,
        "outer_optimizer": outer,
        "fragments": rng.randint(1, every) if rng.random() < 0.4 else 1,
        "overlap_steps": rng.randrange(every) if rng.random() < 0.5 else 0,
        "mixing": rng.choice((0.0, 0.0, 0.0, 0.5)),
        "late": rng.choice(("wait", "wait", "wait", "skip")),
        "weights": rng.choice(("equal", "equal", "tokens")),
        "warmup_steps": rng.choice((0, 0, 3)),
        "drain_timeout_s": 60.0,
    }
    wire = rng.choice(("float32", "float32", "bfloat16", "int8", "q4", "topk")) if outer else "float32"
    if wire != "float32":
        options["wire"] = TopK(share=0.3) if wire == "topk" else wire
        options["error_feedback"] = 0.9
    safe = rng.randrange(ranks)
    steps = [24] * ranks
    if rng.random() < 0.3:
        steps[rng.choice([rank for rank in range(ranks) if rank != safe])] = rng.randint(1, 23)
    return Plan(
        ranks=ranks,
        width=rng.choice((3, 3, 60)),
        dtype=torch.float64 if wire == "float32" else torch.float32,
        steps=tuple(steps),
        options=options,
        safe=safe,
        faults=tuple(_draw_faults(rng, ranks, safe)),
    )


def _draw_faults(rng: random.Random, ranks: int, safe: int) -> list[Fault]:
    found: list[Fault] = []
    for rank in range(ranks):
        at_s = 0.0
        for _ in range(0 if rank == safe else rng.choice((0, 1, 1, 2, 3))):
            at_s += rng.uniform(0.005, 0.2)
            found.append(Kill(rank, at_s=at_s))
            if rng.random() < 0.15:
                break
            at_s += rng.uniform(0.005, 0.1)
            found.append(Restart(rank, at_s=at_s))
    found += [
        Stall(rng.randrange(ranks), rng.uniform(0.0, 0.3), rng.choice((0.02, 0.2, 2.0, 20.0)))
        for _ in range(rng.choice((0, 0, 1, 2)))
    ]
    for rank, other in _draw_links(rng, ranks, rng.choice((0, 1, 2, 3))):
        at_s = rng.choice((0.0, rng.uniform(0.0, 0.1)))
        found.append(SlowLink(rank, other, at_s, rng.choice((3.0, 10.0, 100.0, 1000.0))))
    if rng.random() < 0.3:
        at_s = rng.uniform(0.0, 0.3)
        found.append(Partition((rng.randrange(ranks),), at_s, at_s + rng.choice((0.02, 0.2, 5.0))))
    if rng.random() < 0.15:
        found.append(SlowRank(rng.randrange(ranks), rng.uniform(0.0, 0.2), rng.choice((10.0, 100.0))))
    return found


def _draw_links(rng: random.Random, ranks: int, count: int) -> list[tuple[int, int]]:
    """Return up to ``count`` different links, since the factors of one link's faults multiply."""
    links = list(itertools.permutations(range(ranks), 2))
    return rng.sample(links, min(count, len(links)))


def draw_admission(seed: int) -> Plan:
    """Return a run in which the leader is killed while it admits a rank, over links of very different speeds."""
    rng = random.Random(f"diloco admission {seed}")
    plan = draw_plan(seed)
    ranks = rng.choice((3, 4))
    newcomer = ranks - 1
    kill_s = rng.uniform(0.02, 0.1)
    back_s = kill_s + rng.uniform(0.01, 0.05)
    faults: list[Fault] = [Kill(newcomer, at_s=kill_s), Restart(newcomer, at_s=back_s)]
    faults.append(Kill(0, at_s=back_s + rng.uniform(0.0, 0.08)))
    for rank, other in _draw_links(rng, ranks, rng.choice((1, 2, 3))):
        faults.append(SlowLink(rank, other, 0.0, rng.choice((100.0, 300.0, 1000.0))))
    return Plan(
        ranks=ranks,
        width=rng.choice((3, 30)),
        dtype=plan.dtype,
        steps=(24,) * ranks,
        options=plan.options,
        safe=1,
        faults=tuple(faults),
    )


def scenario(seed: int, faults: Sequence[Fault] | None = None) -> SimReport[Any]:
    """Run one seed; AssertionError if the ranks do not agree. Every third seed kills the leader while it admits."""
    report, *_ = seen_in(seed, faults)
    return report


def seen_in(seed: int, faults: Sequence[Fault] | None = None) -> tuple[SimReport[Any], Counter[str]]:
    """Run one seed, and return its report and the numbers of observations."""
    plan = draw_admission(seed) if seed % 3 == 2 else draw_plan(seed)
    if faults is not None:
        plan = dataclasses.replace(plan, faults=tuple(faults))
    report, lives = run(plan, seed)
    return report, check(plan, lives)
