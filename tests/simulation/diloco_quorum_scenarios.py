"""Simulates DiLoCo with a quorum under faults, and compares each rank's weights after each step with an oracle.

The oracle is a second implementation in numpy. It takes from the run the donors of each round, and the steps in which
each rank captures a contribution and applies a mean, since all of them depend on timing. The k-th contribution of a
rank must count in the k-th round with this rank among the donors. The oracle checks this, because it computes the
difference of each donor itself: a contribution that counts twice or never makes the anchors differ.
"""

from __future__ import annotations

import asyncio
import functools
import itertools
import random
from collections import Counter, defaultdict
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final

import numpy as np
import torch
from scripts.population import sgd
from support.tokens import tokens_for

import asyncdist as ad
from asyncdist.protocols.step_info import NOTHING
from asyncdist.simulation import Compute, Fault, Kill, Link, Network, SlowRank, Stall, Uniform, simulate
from protocols import AverageApplied, Contributed, DiLoCoPolicy
from simulation.diloco_scenarios import LAYER_COUNT, OUTERS, Arrays, Layers, drift, layer_of, weights_of

LIMIT_S: Final = 1000.0


@dataclass(frozen=True, kw_only=True)
class Plan:
    """One run.

    Attributes:
        steps: Number of steps of each rank.
        stops: By rank: the first and the last step before which the rank sleeps, and the seconds of each sleep.
    """

    ranks: int = 4
    steps: tuple[int, ...] = (40,) * 4
    every: int = 4
    quorum: int | None = 3
    grace_s: float = 0.0
    late: str = "wait"
    fragments: int = 1
    overlap_steps: int = 0
    mixing: float = 0.0
    outer: str = "dyadic"
    uses_tokens: bool = False
    stops: dict[int, tuple[int, int, float]] = field(default_factory=dict)
    network: Network = field(default_factory=Network)
    compute: Compute = field(default_factory=Compute)
    faults: tuple[Fault, ...] = ()

    @property
    def killed(self) -> set[int]:
        return {fault.rank for fault in self.faults if isinstance(fault, Kill)}

    @property
    def options(self) -> dict[str, Any]:
        chosen = OUTERS[self.outer]
        assert chosen is not None
        lr, momentum, nesterov = chosen
        return {
            "average_every": self.every,
            "outer_optimizer": functools.partial(torch.optim.SGD, lr=lr, momentum=momentum, nesterov=nesterov),
            "quorum": self.quorum,
            "grace_s": self.grace_s,
            "late": self.late,
            "fragments": self.fragments,
            "overlap_steps": self.overlap_steps,
            "mixing": self.mixing,
            "weights": "tokens" if self.uses_tokens else "equal",
            "drain_timeout_s": 60.0,
        }


@dataclass(eq=False)
class Log:
    """Events of one rank in order, and its weights after each step.

    Attributes:
        events: ``(step,)`` for a training step, ``(step, event)`` for an event of the policy.
        donors: Donors and weights of each round whose mean this rank has received.
    """

    events: list[tuple[Any, ...]] = field(default_factory=list)
    weights: list[Arrays] = field(default_factory=list)
    donors: dict[int, tuple[tuple[int, ...], tuple[float, ...]]] = field(default_factory=dict)
    late: Counter[int] = field(default_factory=Counter)  # by rank: the number of means without it
    step_s: float = 0.0
    has_ended: bool = False  # whether the rank only waits to leave, and needs no further mean
    lost_count: int = 0  # rounds whose means were lost with all members that had them, while the rank still trained

    def as_json(self) -> dict[str, Any]:
        """Return the parts that the oracle needs as JSON values."""
        events = [(step, *map(_event_as_json, events)) for step, *events in self.events]
        weights = [[array.tolist() for array in each] for each in self.weights]
        return {"events": events, "weights": weights, "donors": [*self.donors.items()], "late": [*self.late.items()]}

    @classmethod
    def of_json(cls, found: dict[str, Any]) -> Log:
        """Return the log that a result of :meth:`as_json` describes."""
        weights = [[np.array(array) for array in each] for each in found["weights"]]
        donors = {number: (tuple(ranks), tuple(given)) for number, (ranks, given) in found["donors"]}
        events = [(step, *itertools.starmap(_event_of_json, events)) for step, *events in found["events"]]
        return cls(events, weights, donors, Counter(dict(found["late"])))


def _event_as_json(event: Any) -> tuple[int, int]:
    """Return the fragment of a contribution and -1, or the fragment and version of an average."""
    return (event.fragment, -1) if isinstance(event, Contributed) else (event.info.fragment, event.info.version)


def _event_of_json(fragment: int, version: int) -> Contributed | AverageApplied:
    if version < 0:
        return Contributed(0, fragment, 0, 0, 1.0, 1.0, 0, 0)
    return AverageApplied(0, (), (), -1, 0, {}, info=replace(NOTHING, fragment=fragment, version=version))


def watch(policy: DiLoCoPolicy, log: Log) -> None:
    """Record the donors of each mean when this rank merges it."""
    for place, fragment in enumerate(policy._fragments):
        count, merge = len(policy._fragments), fragment.merge

        noted = functools.partial(note_merge, log, fragment, count, place, merge)
        lost = functools.partial(note_lost, log, fragment, fragment.count_lost)
        fragment.merge, fragment.count_lost = noted, lost  # type: ignore[method-assign]


def note_merge(log: Log, fragment: Any, count: int, place: int, merge: Any, verdict: Any, encoded: Any) -> None:
    log.donors[fragment.version * count + place + 1] = verdict.donors, verdict.weights
    log.late.update(verdict.late)
    merge(verdict, encoded)


def note_lost(log: Log, fragment: Any, count_lost: Any, version: int) -> None:
    if not log.has_ended:
        log.lost_count += version - fragment.version
    count_lost(version)


async def train(
    world: ad.World, plan: Plan, logs: dict[int, Log], before_step: Callable[[int], Awaitable[None]] | None = None
) -> None:
    """Train on one rank, and record each step. ``before_step`` is called with the number of each step."""
    model, log, rank = Layers(), logs[world.rank], world.rank
    step = 0

    def note(event: Any) -> None:
        if isinstance(event, Contributed | AverageApplied):
            log.events.append((step, event))

    policy = DiLoCoPolicy(model, sgd(model), on_event=note, **plan.options)
    try:
        await policy.__aenter__()
    except ad.RankLostError:
        assert plan.killed
        return
    watch(policy, log)
    began_at = world.time()
    while step < plan.steps[rank]:
        with torch.no_grad():
            for place, parameter in enumerate(model.parameters()):
                parameter.add_(torch.from_numpy(drift(rank, step, place, parameter.shape)))
        log.events.append((step,))
        if before_step is not None:
            await before_step(step)
        first, last, stop_s = plan.stops.get(rank, (1, 0, 0.0))
        await asyncio.sleep(stop_s if first <= step <= last else 0.01 * (1 + 0.02 * rank))
        await policy.step(tokens=tokens_for(policy, rank + 1))
        log.weights.append(weights_of(model))
        step += 1
    log.step_s = (world.time() - began_at) / max(1, step)
    before, log.has_ended = weights_of(model), True
    await policy.__aexit__(None, None, None)
    assert all(map(np.array_equal, before, weights_of(model))), "weights may only change inside step()"
    exchange = policy._exchange
    assert exchange is None or not exchange._rounds, f"rounds were not removed: {sorted(exchange._rounds)}"


class Oracle:
    """Computes the anchors round by round, and replays each rank's log as far as the anchors are known."""

    def __init__(self, plan: Plan, logs: dict[int, Log]) -> None:
        self.plan, self.logs = plan, logs
        self.parted: dict[tuple[int, int], int] = {}  # version that only this rank still has, by rank and fragment
        self.donors: dict[int, tuple[tuple[int, ...], tuple[float, ...]]] = {}
        for rank in sorted(logs, key=lambda rank: rank in plan.killed):
            for number, given in logs[rank].donors.items():
                expected = self.donors.setdefault(number, given)
                assert given == expected or rank in plan.killed, (
                    f"rank {rank}, round {number}: contributed {given}, expected {expected}"
                )
                if given != expected:  # the rank has died before another rank had this mean
                    self.parted.setdefault((rank, (number - 1) % plan.fragments), (number - 1) // plan.fragments)
        first = weights_of(Layers())
        self.anchors = {fragment: {0: [first[place] for place in self.places(fragment)]} for fragment in self.fragments}
        self.buffers: dict[int, Arrays | None] = dict.fromkeys(self.fragments)
        self.given: dict[tuple[int, int], list[tuple[Arrays, float]]] = defaultdict(list)  # by rank and fragment
        self.used: Counter[tuple[int, int]] = Counter()
        self.replays = {rank: self.replay(rank) for rank in logs}
        waits_for = {rank: self.advance(rank) for rank in logs}
        while True:
            made = [self.make(fragment) for fragment in self.fragments]
            if not any(made):
                break
            waits_for = {rank: self.advance(rank) for rank in logs}
        assert set(waits_for.values()) == {""}, waits_for
        newest = {fragment: max(self.anchors[fragment]) for fragment in self.fragments}
        for number in self.donors:
            version, fragment = divmod(number - 1, plan.fragments)
            assert version < newest[fragment], f"no rank decided round {number}"

    def advance(self, rank: int) -> str:
        """Replay a rank's log until its next mean is not known; return this mean, or "" at the end."""
        return next(filter(None, self.replays[rank]), "")

    @property
    def fragments(self) -> range:
        return range(self.plan.fragments)

    def places(self, fragment: int) -> list[int]:
        return [place for place in range(2 * LAYER_COUNT + 2) if layer_of(place) % self.plan.fragments == fragment]

    def make(self, fragment: int) -> bool:
        """Compute a fragment's next anchor; return False if a contribution is not known yet."""
        version = max(self.anchors[fragment])
        number = version * self.plan.fragments + fragment + 1
        if number not in self.donors:
            return False
        donors, weights = self.donors[number]
        anchor, given = self.anchors[fragment][version], []
        if any(len(self.given[rank, fragment]) <= self.used[rank, fragment] for rank in donors):
            return False
        for rank, weight in zip(donors, weights, strict=True):
            place = rank, fragment
            difference, tokens = self.given[place][self.used[place]]
            self.used[place] += 1
            assert weight == (tokens if self.plan.uses_tokens else 1.0), (
                f"round {number}: rank {rank} has weight {weight}"
            )
            given.append([each * weight for each in difference])
        if given:
            mean = [mean_of(list(each), weights) for each in zip(*given, strict=True)]
            anchor = self.outer(fragment, anchor, mean)
        self.anchors[fragment][version + 1] = anchor
        return True

    def outer(self, fragment: int, anchor: Arrays, mean: Arrays) -> Arrays:
        chosen = OUTERS[self.plan.outer]
        assert chosen is not None
        lr, momentum, nesterov = chosen
        before = self.buffers[fragment]
        buffer = mean if before is None else [momentum * old + new for old, new in zip(before, mean, strict=True)]
        self.buffers[fragment] = buffer
        moves = [new + momentum * old if nesterov else old for new, old in zip(mean, buffer, strict=True)]
        return [old - lr * move for old, move in zip(anchor, moves, strict=True)]

    def replay(self, rank: int) -> Iterator[str | None]:
        """Replay a rank's log; yields the anchor that is not known yet, or None after a contribution."""
        own, captured = weights_of(Layers()), {}
        base = dict.fromkeys(self.fragments, 0)
        tokens = dict.fromkeys(self.fragments, 0.0)
        due: dict[int, int] = {}
        log, last = self.logs[rank], -1
        for step, *events in log.events:
            if step > last >= 0:
                self.compare(rank, last, own)
            last = step
            if not events:
                for place, array in enumerate(own):
                    array += drift(rank, step, place, array.shape)
                tokens = {fragment: count + rank + 1 for fragment, count in tokens.items()}
                continue
            (event,) = events
            fragment = event.fragment if isinstance(event, Contributed) else event.info.fragment
            places = self.places(fragment)
            if isinstance(event, Contributed):
                captured[fragment] = [own[place].copy() for place in places]
                anchor = self.anchors[fragment][base[fragment]]
                difference = [old - new for old, new in zip(anchor, captured[fragment], strict=True)]
                self.given[rank, fragment].append((difference, tokens[fragment]))
                due[fragment], tokens[fragment] = step + self.plan.overlap_steps, 0.0
                yield None
                continue
            base[fragment] = version = event.info.version
            if version > self.parted.get((rank, fragment), version):
                return
            while version not in self.anchors[fragment]:
                yield f"version {version} of fragment {fragment}"
            is_late = self.plan.late == "skip" and step > due[fragment]
            for index, place in enumerate(places):
                new, alpha = self.anchors[fragment][version][index], self.plan.mixing
                if is_late:
                    own[place] = own[place] - (captured[fragment][index] - new)
                else:
                    own[place] = alpha * own[place] + (1.0 - alpha) * new
        if last >= 0:
            self.compare(rank, last, own)

    def compare(self, rank: int, step: int, own: Arrays) -> None:
        if step >= len(self.logs[rank].weights):
            return  # the rank was killed in this step
        exact = OUTERS[self.plan.outer] == OUTERS["dyadic"] and not self.plan.uses_tokens
        for place, (mine, right) in enumerate(zip(self.logs[rank].weights[step], own, strict=True)):
            error = np.abs(mine - right).max()
            assert error <= (0.0 if exact else 1e-9), (
                f"rank {rank}, step {step}, parameter {place}: the error is {error}"
            )


def mean_of(products: Arrays, weights: Sequence[float]) -> Any:
    """Return the weighted mean of arrays that were multiplied by their weights.

    Without weights, an element that equals the rounded mean of copies of the last array takes the last array's value:
    see :mod:`asyncdist.tensors.means`.
    """
    mean = sum(products) / sum(weights)
    if set(weights) != {1.0}:
        return mean
    return np.where(mean == sum([products[-1]] * len(products)) / sum(weights), products[-1], mean)


def run(plan: Plan, seed: int = 0) -> tuple[dict[int, Log], Oracle | None]:
    """Simulate a plan, and compare the weights with the oracle's, unless means were lost with the ranks."""
    logs = {rank: Log() for rank in range(plan.ranks)}
    report = simulate(
        train,
        plan,
        logs,
        ranks=plan.ranks,
        seed=seed,
        network=plan.network,
        compute=plan.compute,
        faults=plan.faults,
        strict=not plan.killed,
        until_s=LIMIT_S,
    )
    for rank, result in enumerate(report.results):
        if isinstance(result, BaseException) and rank not in plan.killed:
            raise AssertionError(f"rank {rank} ended with {result!r}") from result
    if any(log.lost_count for log in logs.values()):
        assert plan.killed, "means were lost although no rank was killed"
        return logs, None
    return logs, Oracle(plan, logs)


def draw_plan(seed: int) -> Plan:
    """Return a run with drawn options, network and faults."""
    rng = random.Random(f"diloco quorum {seed}")
    ranks = rng.randint(2, 5)
    every = rng.randint(1, 5)
    overlap = rng.choice((0, 0, rng.randrange(every)))
    steps = rng.randint(10, 40)
    faults: list[Fault] = [
        Stall(rng.randrange(ranks), rng.uniform(0.0, 0.3), rng.choice((0.02, 0.1, 0.5, 5.0)))
        for _ in range(rng.randint(0, 3))
    ]
    if rng.random() < 0.3:
        faults.append(SlowRank(rng.randrange(ranks), rng.uniform(0.0, 0.2), rng.choice((3.0, 10.0))))
    lost = rng.sample(range(ranks), rng.choice((0, 0, 1, ranks - 1)))
    faults += [Kill(rank, at_s=rng.uniform(0.01, 0.4)) for rank in lost]
    return Plan(
        ranks=ranks,
        steps=tuple(steps if rng.random() < 0.8 else rng.randint(1, steps) for _ in range(ranks)),
        every=every,
        quorum=rng.randint(1, ranks),
        grace_s=rng.choice((0.0, 0.0, 0.003, 0.05)),
        late=rng.choice(("wait", "skip")),
        fragments=rng.choice((1, 1, rng.randint(1, min(LAYER_COUNT, every)))),
        overlap_steps=overlap,
        mixing=rng.choice((0.0, 0.0, 0.5)),
        outer=rng.choice(("default", "dyadic", "heavy ball")),
        uses_tokens=rng.random() < 0.3,
        stops={rng.randrange(ranks): (rng.randint(0, 9), rng.randint(0, 30), rng.choice((0.02, 0.2, 1.0)))},
        network=rng.choice((Network(), Network(ranks_per_host=2), Network(link=Link(latency_s=Uniform(1e-4, 5e-3))))),
        compute=Compute(factors={rng.randrange(ranks): rng.choice((0.1, 10.0))} if rng.random() < 0.3 else {}),
        faults=tuple(faults),
    )


def draw_slow_leader_plan(seed: int) -> Plan:
    """Return the drawn run of a seed whose first rank, and possibly the second one, is slow."""
    rng, plan = random.Random(f"slow leader {seed}"), draw_plan(seed)
    factors = {0: rng.choice((5.0, 30.0, 100.0))}
    if rng.random() < 0.4:
        factors[1] = rng.choice((5.0, 50.0))
    stops = {0: (0, 100, rng.choice((0.05, 0.2, 0.5)))} if rng.random() < 0.6 else plan.stops
    quorum = rng.randint(1, max(1, plan.ranks - 1))
    return replace(plan, compute=Compute(step_s=2e-3, factors=factors), quorum=quorum, stops=stops)


def scenario(seed: int) -> tuple[dict[int, Log], Oracle | None]:
    """Run one seed."""
    return run(draw_plan(seed), seed)
