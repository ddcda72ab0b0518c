"""Draws a population for a seed: its ranks, network, policies, faults and ends, as data."""

from __future__ import annotations

import math
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

from asyncdist.simulation import (
    Compute,
    Corrupt,
    Delay,
    Exponential,
    Fault,
    Join,
    Kill,
    Link,
    LogNormal,
    Network,
    Partition,
    Restart,
    SlowLink,
    SlowRank,
    Stall,
    Uniform,
)
from asyncdist.simulation.faults import KILLING
from protocols.ranking import STRATEGIES

#: In a second phase, the start waits for ranks that are a hundred times slower.
_START_TIMEOUT_S: Final = 1e4


# -- the plan ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class PolicyPlan:
    """One policy: its class, members and options, and when each member leaves it."""

    kind: str
    name: str
    members: tuple[int, ...]
    options: dict[str, Any]
    reserved: int | None
    leaves: dict[int, int]


@dataclass(frozen=True, slots=True)
class Plan:
    """A scenario.

    Attributes:
        exits: (step, way) for each rank that ends before the others.
        phases: Number of times that all policies are started and ended, in turn.
        streams: (source, dest) of the user's own streams.
        habits: Further actions and awaits of the training code.
    """

    seed: int
    ranks: int
    steps: int
    policies: tuple[PolicyPlan, ...]
    exits: dict[int, tuple[int, str]]
    network: Network
    compute: Compute
    faults: tuple[Fault, ...]
    chunk_nbytes: int
    phases: int
    streams: tuple[int, int] | None
    habits: tuple[str, ...]

    @property
    def loses_nothing(self) -> bool:
        """Return whether no rank is late, dies or gets a damaged frame: then every operation must end cleanly."""
        return not any(isinstance(fault, (*KILLING, Corrupt, Join)) for fault in self.faults)


def draw_plan(seed: int) -> Plan:
    """Return all random choices of ``scenario(seed)``."""
    rng = random.Random(f"scenario {seed}")
    ranks = rng.choices((2, 3, 4, 5, 6, 8, 12, 16, 32, 64), (8, 14, 20, 16, 14, 20, 4, 2, 0.7, 0.3))[0]
    steps = rng.randint(6, 60) if ranks <= 8 else rng.randint(4, 16)
    network, step_s = _draw_network(rng)
    phases = 2 if ranks <= 8 and steps <= 30 and rng.random() < 0.3 else 1
    policies = tuple(_draw_policies(rng, ranks, steps, step_s))
    exits = _draw_exits(rng, ranks, steps, policies) if phases == 1 else {}
    plan = Plan(
        seed=seed,
        ranks=ranks,
        steps=steps,
        policies=policies,
        exits=exits,
        network=network,
        compute=replace(_draw_compute(rng, ranks, step_s), overrun_probability=_draw_overruns(seed)),
        faults=tuple(_draw_faults(rng, ranks, steps, step_s, policies, network)),
        chunk_nbytes=rng.choice((32, 64, 256, 4096)),
        phases=phases,
        streams=_pair(rng, ranks) if not exits and rng.random() < 0.2 else None,
        habits=tuple(habit for habit in ("sleep", "safe_point", "progress", "compute", "nan") if rng.random() < 0.2),
    )
    if any(isinstance(fault, Corrupt) for fault in plan.faults):
        plan = replace(plan, streams=None)  # as with a synchronous policy: the dropped frame would be awaited
    plan = replace(plan, policies=tuple(_with_route(seed, policy) for policy in plan.policies))
    return _calmed(plan) if seed % 20 == 10 else _with_joins(_with_restarts(plan))


def _with_route(seed: int, policy: PolicyPlan) -> PolicyPlan:
    """Draw the route of snapshots, with a separate generator so that other random choices do not change."""
    if policy.kind != "selective":
        return policy
    route = random.Random(f"route of scenario {seed}").choice(("sharded", "sharded", "direct", "auto"))
    return replace(policy, options={**policy.options, "route": route})


def _with_restarts(plan: Plan) -> Plan:
    """Restart some of the killed ranks, with a separate generator so that other random choices do not change.

    The ranks are admitted if :func:`_admits` returns True.
    """
    rng = random.Random(f"restarts of scenario {plan.seed}")
    kills = [fault for fault in plan.faults if isinstance(fault, Kill)]
    if not kills or not _admits(plan) or rng.random() < 0.2:
        return plan
    step_s = plan.compute.step_s if isinstance(plan.compute.step_s, float) else 1e-3
    restarts: list[Fault] = []
    for kill in kills:
        at_s = rng.uniform(0.0, plan.steps * step_s) if kill.at_s is None else kill.at_s
        for _ in range(rng.choice((1, 1, 2, 3))):
            at_s += rng.choice((1e-6, 0.1, 1.0, 10.0)) * step_s
            restarts.append(Restart(kill.rank, at_s=at_s))
            if rng.random() < 0.5:
                at_s += rng.choice((0.01, 0.3, 3.0, 10.0)) * step_s
                restarts.append(Kill(kill.rank, at_s=at_s))
    network = plan.network
    if rng.random() < 0.7:  # otherwise few ranks are admitted before the others have ended
        network = replace(network, loss_detection_s=rng.choice((0.0, Uniform(0.0, step_s))))
    return replace(plan, faults=(*plan.faults, *restarts), network=network, steps=plan.steps + rng.choice((0, 30)))


def _admits(plan: Plan) -> bool:
    """Return whether ranks may join later: a policy of all ranks with a member as its coordinator admits them."""
    if len(plan.policies) > 1 or plan.phases > 1 or plan.streams is not None:
        return False
    (policy,) = plan.policies
    return policy.kind == "selective" and policy.members == tuple(range(plan.ranks))


def _with_joins(plan: Plan) -> Plan:
    """Let some ranks be absent at the beginning and join later, with a separate generator."""
    rng = random.Random(f"joins of scenario {plan.seed}")
    if not _admits(plan) or rng.random() < 0.7:
        return plan
    step_s = plan.compute.step_s if isinstance(plan.compute.step_s, float) else 1e-3
    # A fault of a rank may be due before the rank has joined.
    busy = {rank for fault in plan.faults if (rank := getattr(fault, "rank", None)) is not None}
    free = [rank for rank in range(plan.ranks) if rank not in busy and rank not in plan.exits]
    count = min(len(free), rng.choice((1, 1, 2, plan.ranks - 1)), plan.ranks - 1)
    joins = [Join(rank, at_s=rng.uniform(0.0, plan.steps * step_s)) for rank in sorted(rng.sample(free, count))]
    return replace(plan, faults=(*plan.faults, *joins), steps=plan.steps + rng.choice((0, 30))) if joins else plan


def _calmed(plan: Plan) -> Plan:
    """Remove all obstacles from one population in twenty, so that averages must occur."""
    calm = {"threshold": None, "grace_s": 0.001, "round_timeout_s": 30.0, "max_report_age_s": math.inf}
    policies = tuple(
        replace(policy, leaves={}, options={**policy.options, **calm, "replacement_ratio": 0.5})
        if policy.kind == "selective"
        else policy
        for policy in plan.policies
    )
    return replace(
        plan,
        policies=policies,
        steps=max(plan.steps, 50) if plan.phases == 1 and plan.ranks <= 8 else plan.steps,
        exits={},
        network=Network(),
        compute=Compute(overrun_probability=0.0),
        faults=(),
        habits=tuple(habit for habit in plan.habits if habit != "nan"),
    )


def _pair(rng: random.Random, ranks: int) -> tuple[int, int]:
    source, dest = rng.sample(range(ranks), 2)
    return source, dest


def _draw_policies(rng: random.Random, ranks: int, steps: int, step_s: float) -> Iterator[PolicyPlan]:
    count = rng.choices((1, 2, 3), (75, 18, 7))[0] if ranks <= 16 else 1
    reserved = ranks - 1 if ranks > 2 and rng.random() < 0.25 else None
    trainers = tuple(rank for rank in range(ranks) if rank != reserved)
    for index in range(count):
        members = trainers
        if rng.random() < (0.15 if index == 0 else 0.5):
            members = tuple(rng.sample(trainers, rng.randint(1, len(trainers))))
            members = members if rng.random() < 0.3 else tuple(sorted(members))
        leaves = {}
        if rng.random() < 0.2:
            leaves = {rank: rng.randrange(steps) for rank in rng.sample(members, rng.randint(1, len(members)))}
        name = rng.choice(("", f"policy {index}"))
        if rng.random() < (0.1 if index == 0 else 0.3):
            options: dict[str, Any] = {"average_every": rng.randint(2, 6), "start_timeout_s": _START_TIMEOUT_S}
            options["optimizer_state"] = rng.choice(("keep", "reset"))
            yield PolicyPlan("all", name, members, options, None, leaves)
        else:
            yield PolicyPlan(
                "selective", name, members, _draw_options(rng, step_s), reserved if len(members) > 1 else None, leaves
            )


def _draw_options(rng: random.Random, step_s: float) -> dict[str, Any]:
    def some(chance: float, values: Sequence[Any], default: Any) -> Any:
        return rng.choice(values) if rng.random() < chance else default

    return {
        "average_every": rng.choice((1, 1, 2, 2, 3, 5)),
        "replacement_ratio": rng.choice((0.1, 0.25, 0.25, 0.5, 0.75, 1.0, some(0.3, (0.0,), 0.25))),
        "averaging_strategy": rng.choice(STRATEGIES),
        "momentum": some(0.4, (0.25, 0.5, 0.3, 1.0), 0.0),
        "threshold": some(0.3, (-2.0, 1.0, 3.0, 5.0), None),
        "cooldown": rng.choice((0, 2, 5, 20)),
        "metric_mode": rng.choice(("max", "min")),
        "optimizer_state": rng.choice(("keep", "reset")),
        "quorum": rng.choice((0.0, 0.25, 0.5, 0.8, 1.0)),
        "grace_s": rng.choice((0.0, 0.5, 2.0, 2.0, 10.0)) * step_s,
        "max_report_age_s": some(0.3, (1.5 * step_s, 6.0 * step_s, 600.0), math.inf),
        "round_timeout_s": rng.choice((step_s, 10 * step_s, 100 * step_s, 30.0, 30.0, 30.0)),
        "drain_timeout_s": rng.choice((5 * step_s, 1.0, 10.0)),
        "start_timeout_s": _START_TIMEOUT_S,
    }


def _draw_exits(
    rng: random.Random, ranks: int, steps: int, policies: Sequence[PolicyPlan]
) -> dict[int, tuple[int, str]]:
    trainers = sorted({rank for policy in policies for rank in policy.members})
    if rng.random() < 0.7 or ranks < 2:
        return {}
    leavers = rng.sample(trainers, rng.randint(1, max(1, len(trainers) // 2)))
    return {rank: (rng.randrange(steps), rng.choice(("return", "exit"))) for rank in leavers}


def _draw_network(rng: random.Random) -> tuple[Network, float]:
    """Draw the network, and the duration of a step, which is between far above and far below the latencies."""
    detection = rng.choice((0.0, Uniform(0.0, 0.02), Uniform(0.0, 1.0)))
    kind = rng.choice(("fast", "fast", "hosts", "hosts", "slow", "wide", "instant"))
    if kind == "hosts":
        return Network(ranks_per_host=rng.randint(1, 4), loss_detection_s=detection), 1e-3
    links = {
        "fast": Link(),
        "slow": Link(latency_s=Uniform(1e-4, 5e-3), bandwidth_nbytes_per_s=1e7),
        "wide": Link(latency_s=Exponential(0.02), bandwidth_nbytes_per_s=1e6),
        "instant": Link(latency_s=0.0),
    }
    step_s = {"slow": rng.choice((1e-3, 0.01)), "wide": rng.choice((1e-3, 0.02, 0.1))}.get(kind, 1e-3)
    return Network(link=links[kind], loss_detection_s=detection), step_s


def _draw_compute(rng: random.Random, ranks: int, step_s: float) -> Compute:
    duration = rng.choice((LogNormal(step_s, 0.2), Uniform(0.0, 2 * step_s), step_s, LogNormal(step_s, 1.0)))
    factors = {}
    if rng.random() < 0.35:
        factors = {rank: rng.choice((0.1, 3.0, 10.0, 50.0)) for rank in rng.sample(range(ranks), rng.randint(1, 2))}
    return Compute(
        step_s=duration,
        factors=factors,
        pause_probability=rng.choice((0.005, 0.05)) if rng.random() < 0.2 else 0.0,
        pause_s=rng.choice((50 * step_s, Exponential(500 * step_s))),
    )


def _draw_overruns(seed: int) -> float:
    """Draw overruns, with a separate generator so that other random choices do not change."""
    return random.Random(f"overruns of scenario {seed}").choice((0.0, 0.0, 0.0, 0.05))


def _draw_faults(
    rng: random.Random, ranks: int, steps: int, step_s: float, policies: Sequence[PolicyPlan], network: Network
) -> Iterator[Fault]:
    """Return no faults in two of five scenarios, otherwise up to three.

    No message takes so long that a rank ends without it, because an ending rank waits only some seconds.
    """
    is_slow = isinstance(network.link.latency_s, (Uniform, Exponential))
    if rng.random() < 0.4:
        return
    kinds: tuple[type, ...] = (Kill, Kill, Stall, SlowRank, SlowLink, Partition, Delay)
    if all(policy.kind == "selective" for policy in policies):
        # A damaged frame is dropped, and a synchronous policy would wait for it: this hang is known.
        kinds = (*kinds, Corrupt, Corrupt)
    span_s = 1.2 * steps * step_s
    for kind in rng.sample(kinds, rng.randint(1, 3)):
        at_s = rng.random() * span_s
        source, dest = _pair(rng, ranks)
        lead = [policy.reserved if policy.reserved is not None else policy.members[0] for policy in policies]
        if kind is Kill:
            victim = rng.choice((source, source, rng.choice(lead)))
            at = rng.choice(("at_s", "at_turn", "at_message", "at_message"))
            when: dict[str, Any] = {
                "at_s": at_s,
                "at_turn": rng.randint(1, 20 * steps),
                "at_message": rng.randint(1, 8 * steps),
            }
            yield Kill(victim, **{at: when[at]})
        elif kind is Stall:
            yield Stall(source, at_s, rng.choice((5, 50, 500)) * step_s)
        elif kind is SlowRank:
            yield SlowRank(source, at_s, rng.choice((2.0, 10.0, 100.0)))
        elif kind is SlowLink:
            yield SlowLink(source, dest, at_s, rng.choice((3.0, 10.0) if is_slow else (10.0, 1000.0)))
        elif kind is Partition:
            cut = tuple(rng.sample(range(ranks), rng.randint(1, max(1, ranks // 2))))
            yield Partition(cut, at_s, at_s + rng.choice((2, 20, 200)) * step_s)
        elif kind is Delay:
            dest = rng.choice([rank for rank in (dest, rng.choice(lead)) if rank != source])
            yield Delay(source, dest, rng.randint(1, 60), min(2.0, rng.choice((2, 20, 500)) * step_s))
        else:
            dest = rng.choice([rank for rank in {dest, *lead} if rank != source] or [dest])
            yield Corrupt(source, dest, rng.randint(1, 2 * steps), rng.randrange(64))
