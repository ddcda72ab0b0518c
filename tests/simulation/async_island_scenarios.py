"""Simulates asynchronous DiLoCo with islands and faults, and compares all weights with a numpy implementation.

The oracle takes from the run only the order of events: the donors of each version, the captures and merges of each
island, the states with which servers begin, and the step in which a rank has applied a version.
"""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import torch
from scripts.population import sgd

import asyncdist as ad
from asyncdist.protocols.async_diloco.anchor import Anchor
from asyncdist.protocols.async_diloco.arrivals import Arrival
from asyncdist.protocols.async_diloco.islands.regional import Regional
from asyncdist.protocols.async_diloco.member_store import HeldAnchor
from asyncdist.protocols.async_diloco.server import Server
from asyncdist.simulation import Compute, Fault, Kill, Restart, SimReport, simulate
from protocols import AsyncDiLoCoPolicy, AsyncDiLoCoStatistics, StepInfo
from simulation import async_diloco_scenarios as plain
from simulation.async_diloco_scenarios import OUTERS, Plan
from simulation.diloco_scenarios import Arrays, Layers, drift, weights_of


@dataclass(frozen=True, kw_only=True)
class IslandPlan:
    """One run: a plan of asynchronous DiLoCo, whose quorum and grace period apply in each island, and its islands."""

    plan: Plan
    islands: int = 2
    global_every: int = 3
    merge_weight: float = 0.25
    global_outer: str = "dyadic"

    @property
    def options(self) -> dict[str, Any]:
        outer = replace(self.plan, outer=self.global_outer).options["outer_optimizer"]
        own = {"islands": self.islands, "global_every": self.global_every, "merge_weight": self.merge_weight}
        return {**self.plan.options, **own, "global_optimizer": outer}


class Begun(NamedTuple):
    """A server has begun: of an island, or of all islands (island -1)."""

    island: int
    elected: int  # version of the elected anchor
    outer: int  # version of its outer state
    version: int  # version with which it begins
    merged: int
    has_reference: bool  # whether the anchor after the last merge was known
    given: int  # version of the global anchor with which it registered


class Made(NamedTuple):
    """A server has made a version."""

    island: int
    version: int
    donors: tuple[tuple[int, int], ...]


class Captured(NamedTuple):
    """An island's server has captured a contribution."""

    island: int
    version: int


class Merged(NamedTuple):
    """An island's server has merged a global anchor."""

    island: int
    version: int
    given: int
    merged: int


class Ended(NamedTuple):
    """A rank has left."""

    island: int
    rank: int


Event: TypeAlias = Begun | Made | Captured | Merged | Ended


@dataclass
class Life:
    """The steps of a rank."""

    first: Arrays = field(default_factory=list)
    infos: list[StepInfo] = field(default_factory=list)
    weights: list[Arrays] = field(default_factory=list)
    sequence: int = 0
    statistics: AsyncDiLoCoStatistics | None = None


@dataclass
class Record:
    """All events in the order of their times."""

    islands: Mapping[int, int]
    events: list[Event] = field(default_factory=list)
    lives: dict[int, Life] = field(default_factory=dict)
    last_global: tuple[int, Arrays] = (0, [])


@contextmanager
def noted(record: Record) -> Iterator[None]:
    """Record the events of all servers."""
    make, begin, capture, merge = Server._make_version, Server._begin, Regional.capture, Regional.merge

    def island_of(server: Server) -> int:
        return -1 if server._regional is None else server._regional._island

    async def making(self: Server, arrivals: Sequence[Arrival]) -> None:
        assert self.anchor is not None
        donors = tuple((each.rank, each.sequence) for each in arrivals)
        record.events.append(Made(island_of(self), self.anchor.version + 1, donors))
        await make(self, arrivals)
        if self._regional is None:
            record.last_global = self.anchor.version, [each.numpy().copy() for each in self.anchor._values]

    def beginning(self: Server, held: HeldAnchor, outer: Any, elected: int) -> None:
        regional, kept, given = self._regional, True, 0
        if regional is not None:
            kept, given = regional._reference is not held.block, regional._store.base.version
        outer_version = 0 if outer is None else outer[0]
        facts = elected, outer_version, held.version, held.merged, kept, given
        record.events.append(Begun(island_of(self), *facts))
        begin(self, held, outer, elected)

    def capturing(self: Regional, anchor: Anchor) -> None:
        record.events.append(Captured(self._island, anchor.version))
        capture(self, anchor)

    def merging(self: Regional, anchor: Anchor) -> None:
        assert self._store.answer is not None
        given = self._store.answer.report.version
        record.events.append(Merged(self._island, anchor.version + 1, given, self._store.sequence))
        merge(self, anchor)

    try:
        Server._make_version, Server._begin = making, beginning  # type: ignore[method-assign]
        Regional.capture, Regional.merge = capturing, merging  # type: ignore[method-assign]
        yield
    finally:
        Server._make_version, Server._begin = make, begin  # type: ignore[method-assign]
        Regional.capture, Regional.merge = capture, merge  # type: ignore[method-assign]


async def train(world: ad.World, options: dict[str, Any], own: Plan, record: Record) -> None:
    """Train on one rank, and record each step."""
    rank = world.rank
    model, life = Layers(own.dtype), record.lives.setdefault(rank, Life())
    policy = AsyncDiLoCoPolicy(model, sgd(model), **options)
    life.first = weights_of(model)
    try:
        await policy.__aenter__()
    except ad.RankLostError:
        assert own.killed
        return
    while policy.iteration < own.steps[rank]:
        with torch.no_grad():
            for place, parameter in enumerate(model.parameters()):
                parameter.add_(torch.from_numpy(drift(rank, policy.iteration, place, parameter.shape)).to(own.dtype))
        await asyncio.sleep(own.step_s * (1 + 0.2 * rank))
        life.infos.append(await policy.step())
        life.weights.append(weights_of(model))
    await policy.__aexit__(None, None, None)
    life.sequence, life.statistics = policy._store.sequence, policy.statistics()
    record.events.append(Ended(record.islands[rank], rank))


def run(plan: IslandPlan, seed: int = 0) -> tuple[SimReport[None], Record]:
    """Simulate a plan; AssertionError if a rank fails."""
    own = plan.plan
    own = replace(own, steps=own.steps or (18,) * own.ranks)
    size = own.ranks // plan.islands
    record = Record({rank: rank // size for rank in range(own.ranks)})
    with noted(record):
        report = simulate(
            train,
            plan.options,
            own,
            record,
            ranks=own.ranks,
            seed=seed,
            network=own.network,
            compute=own.compute,
            faults=own.faults,
            strict=not own.killed,
            until_s=1e4,
        )
    for rank, result in enumerate(report.results):
        if isinstance(result, BaseException) and rank not in own.killed:
            raise AssertionError(f"rank {rank} ended with {result!r}") from result
    return report, record


class Level:
    """The anchors of one server's lineage, with the outer optimizer's momentum after each version."""

    def __init__(self, outer: str, first: Arrays) -> None:
        self.lr, self.momentum, self.nesterov = OUTERS[outer]
        self.anchors: dict[int, Arrays] = {0: first}
        self.momenta: dict[int, Arrays] = {0: []}
        self.donors: dict[int, tuple[tuple[int, int], ...]] = {}
        self.version = 0

    def begin(self, elected: int, outer: int) -> list[tuple[int, int]]:
        """Continue from a version, and return the donors of the versions that are lost."""
        self.version = elected
        self.momenta[elected] = self.momenta[outer] if outer else []
        lost = [each for version, donors in self.donors.items() if version > elected for each in donors]
        for version in [each for each in self.donors if each > elected]:
            del self.donors[version]
        return lost

    def put(self, version: int, anchor: Arrays) -> None:
        self.anchors[version], self.momenta[version] = anchor, self.momenta[self.version]
        self.version = version

    def step(self, version: int, donors: tuple[tuple[int, int], ...], differences: Sequence[Arrays]) -> None:
        assert version == self.version + 1, (version, self.version)
        scalar = self.anchors[0][0].dtype.type
        before, buffer = self.anchors[self.version], self.momenta[self.version]
        mean = [sum(each[1:], each[0]) / scalar(len(each)) for each in zip(*differences, strict=True)]
        if self.momentum:
            buffer = (
                [scalar(self.momentum) * own + new for own, new in zip(buffer, mean, strict=True)] if buffer else mean
            )
        change = mean
        if self.momentum:
            change = [new + scalar(self.momentum) * own for new, own in zip(mean, buffer, strict=True)]
        self.anchors[version] = [own - scalar(self.lr) * each for own, each in zip(before, change, strict=True)]
        self.momenta[version], self.donors[version], self.version = buffer, donors, version


class Worker:
    """One rank of the oracle with ``late="skip"``."""

    def __init__(self, plan: Plan, rank: int, life: Life, level: Level) -> None:
        self.plan, self.rank, self.life, self.level = plan, rank, life, level
        self.own = [array.copy() for array in level.anchors[0]]
        self.base = level.anchors[0]
        self.captured: Arrays = []
        self.step = self.since = self.sequence = 0
        self.is_outstanding = False
        self.found: dict[int, Arrays] = {}
        self.error = 0.0

    def contribution(self, sequence: int) -> Arrays:
        while sequence not in self.found:
            assert self.step <= len(self.life.infos), f"rank {self.rank} has not made contribution {sequence}"
            self.advance()
        return self.found[sequence]

    def finish(self) -> None:
        """Make the steps that the rank has made and that are not made yet."""
        while self.step < len(self.life.infos):
            self.advance()

    def advance(self) -> None:
        """Make one step; the last one may be that in which the rank was killed."""
        is_whole = self.step < len(self.life.infos)
        for place, array in enumerate(self.own):
            array += drift(self.rank, self.step, place, array.shape).astype(array.dtype)
        self.since += 1
        if is_whole and self.life.infos[self.step]:
            self.base, self.is_outstanding = self.level.anchors[self.life.infos[self.step].round], False
            each = zip(self.own, self.captured, self.base, strict=True)
            self.own = [own - (captured - new) for own, captured, new in each]
        if self.since >= self.plan.every and not self.is_outstanding:
            self.captured, self.since, self.is_outstanding = [array.copy() for array in self.own], 0, True
            self.sequence += 1
            self.found[self.sequence] = [base - own for base, own in zip(self.base, self.own, strict=True)]
        if is_whole:
            errors = (np.abs(a - b).max() for a, b in zip(self.life.weights[self.step], self.own, strict=True))
            self.error = max(self.error, *errors)
        self.step += 1


class Oracle:
    """Computes all anchors of all servers in the order of the events, and all weights."""

    def __init__(self, plan: IslandPlan, record: Record) -> None:
        own, first = plan.plan, weights_of(Layers(plan.plan.dtype))
        self.plan, self.record = plan, record
        self.scalar = first[0].dtype.type
        self.regions = [Level(own.outer, first) for _ in range(plan.islands)]
        self.upper = Level(plan.global_outer, first)
        self.references: list[dict[int, Arrays]] = [{0: first} for _ in range(plan.islands)]  # by number of the merge
        self.merged = [0] * plan.islands
        self.contributions: dict[tuple[int, int], Arrays] = {}
        self.snapshots: dict[tuple[int, int], Arrays] = {}
        self.behind: set[int] = set()  # islands that began without their newest anchor or its reference
        # A rank that has left cannot repeat a contribution that is lost with the server and all ranks that had it.
        self.ended: set[int] = set()
        self.left: set[tuple[int, int, int]] = set()  # by island (-1 for the global server), worker and number
        self.workers = {
            rank: Worker(own, rank, life, self.regions[record.islands[rank]]) for rank, life in record.lives.items()
        }
        for event in record.events:
            self.replay(event)
        for rank, worker in self.workers.items():
            if rank not in own.killed:
                worker.finish()

    def replay(self, event: Event) -> None:
        level = self.upper if event.island < 0 else self.regions[event.island]
        match event:
            case Made(island, version, donors):
                if island < 0:
                    level.step(version, donors, [self.contributions[each] for each in donors])
                else:
                    level.step(version, donors, [self.workers[rank].contribution(number) for rank, number in donors])
            case Captured(island, version):
                reference = self.references[island][self.merged[island]]
                change = [one - other for one, other in zip(reference, level.anchors[version], strict=True)]
                self.contributions[island, version] = change
                self.snapshots[island, version] = level.anchors[version]
            case Merged(island, version, given, merged):
                self.merge(island, version, given, merged)
            case Begun():
                self.begin(level, event)
            case Ended(_, rank):
                self.ended.add(rank)
                self.workers[rank].finish()  # now, because a later server may make versions again that this rank had

    def merge(self, island: int, version: int, given: int, merged: int) -> None:
        """Replace the part of the island's anchor that was contributed."""
        level, captured = self.regions[island], self.snapshots[island, merged]
        assert version == level.version + 1
        reference = anchor = self.mixed(captured, given)
        if level.version > merged:
            each = zip(level.anchors[level.version], captured, reference, strict=True)
            anchor = [own - (before - new) for own, before, new in each]
        level.put(version, anchor)
        self.references[island][merged], self.merged[island] = reference, merged

    def mixed(self, own: Arrays, given: int) -> Arrays:
        weight, pairs = self.scalar(self.plan.merge_weight), zip(own, self.upper.anchors[given], strict=True)
        return [np.where(mine == new, mine, (1 - weight) * mine + weight * new) for mine, new in pairs]

    def begin(self, level: Level, event: Begun) -> None:
        island = event.island
        for worker, number in level.begin(event.elected, event.outer):
            ranks = {worker} if island >= 0 else {rank for rank, own in self.record.islands.items() if own == worker}
            # An island that has merged the answer no longer has the difference.
            if ranks <= self.ended or (island < 0 and number <= self.merged[worker]):
                self.left.add((island, worker, number))
        if island < 0:
            return
        if event.version == event.elected + 1 and event.has_reference:
            self.merge(island, event.version, event.given, event.merged)
            return
        is_merge = event.elected < event.version and event.merged <= event.elected
        if event.version > event.elected:
            self.behind |= set() if is_merge else {island}
            given = self.upper.anchors[event.given]
            level.put(event.version, self.mixed(level.anchors[event.elected], event.given) if is_merge else given)
        self.merged[island] = event.merged
        if not event.has_reference:
            self.references[island][event.merged] = level.anchors[event.version]
            nothing_lost = not event.version or (is_merge and event.elected == event.merged)
            self.behind |= set() if nothing_lost else {island}


def check(plan: IslandPlan, record: Record, tolerance: float = 0.0) -> Oracle:
    """Compare all weights, and check that no contribution is applied twice and none is lost with a single kill."""
    oracle = Oracle(plan, record)
    own = plan.plan
    for level in (oracle.upper, *oracle.regions):
        counts = Counter(each for donors in level.donors.values() for each in donors)
        assert not counts or max(counts.values()) == 1, (
            f"contributions were applied more than once: {counts.most_common(3)}"
        )
    for rank, worker in oracle.workers.items():
        assert rank in own.killed or worker.error <= tolerance, (
            f"rank {rank}: the error of its weights is {worker.error}"
        )
    version, values = record.last_global
    if version:
        for mine, right in zip(values, _flat(oracle.upper.anchors[version]), strict=False):
            assert np.abs(mine - right).max() <= tolerance
    if len(own.killed) <= 1:
        check_complete(plan, record, oracle)
    return oracle


def _flat(arrays: Arrays) -> Arrays:
    return [np.concatenate([array.ravel() for array in arrays])]


def check_complete(plan: IslandPlan, record: Record, oracle: Oracle) -> None:
    """Check that each contribution of a living rank, and each island's whole progress, was applied."""
    assert plan.plan.killed or not oracle.left, f"anchors were lost although no rank was killed: {sorted(oracle.left)}"
    for island in oracle.behind:
        ranks = {rank for rank, own in record.islands.items() if own == island}
        assert plan.plan.killed & ranks and oracle.ended & ranks, f"island {island} has lost its newest anchor"
    for rank, life in record.lives.items():
        if rank in plan.plan.killed or life.statistics is None:
            continue
        level = oracle.regions[record.islands[rank]]
        applied = {number for donors in level.donors.values() for other, number in donors if other == rank}
        left = {number for island, other, number in oracle.left if island == record.islands[rank] and other == rank}
        missing = set(range(1, life.sequence + 1)) - applied - left
        if record.islands[rank] in oracle.behind:  # the island has dropped contributions, with a warning
            continue
        assert not missing, f"rank {rank}: contributions {missing} were not applied"
    for island, level in enumerate(oracle.regions):
        sent = [number for donors in oracle.upper.donors.values() for other, number in donors if other == island]
        assert sent == sorted(sent)
        if any(upper < 0 and worker == island for upper, worker, _ in oracle.left):
            continue
        after = [version for version in level.donors if version > max(sent, default=0)]
        last = {rank for rank, other in record.islands.items() if other == island}
        if not last & plan.plan.killed and after:
            raise AssertionError(f"island {island}: versions {after} are in no contribution, {sent}")


def draw_plan(seed: int) -> IslandPlan:
    """Return a run with drawn options, network and faults; half of the runs have at most one killed rank."""
    rng = random.Random(f"islands {seed}")
    size, islands = rng.choice(((2, 2), (3, 2), (2, 3), (3, 1), (4, 2)))
    ranks, steps = size * islands, rng.randint(12, 40)
    drawn = plain.draw_plan(seed)
    faults: list[Fault] = [each for each in plain._draw_faults(rng, ranks) if not isinstance(each, Restart)]
    if rng.random() < 0.5:
        kills = [each for each in faults if isinstance(each, Kill)][1:]
        faults = [each for each in faults if each not in kills]
    plan = replace(
        drawn,
        ranks=ranks,
        steps=tuple(steps if rng.random() < 0.8 else rng.randint(1, steps) for _ in range(ranks)),
        outer=rng.choice(("dyadic", "plain", "nesterov")),
        quorum=rng.randint(1, size),
        late="skip",
        uses_tokens=False,
        faults=tuple(faults),
        compute=Compute(factors={rng.randrange(ranks): rng.choice((0.1, 10.0))} if rng.random() < 0.3 else {}),
    )
    return IslandPlan(
        plan=plan,
        islands=islands,
        global_every=rng.randint(1, 6),
        merge_weight=rng.choice((0.25, 0.5, 1.0)),
        global_outer=rng.choice(("dyadic", "plain")),
    )


def seen_in(seed: int) -> tuple[SimReport[None], IslandPlan, Record, Oracle]:
    """Run one seed; AssertionError if a weight differs, a contribution is lost or applied twice, or a rank is stuck."""
    plan = draw_plan(seed)
    report, record = run(plan, seed)
    return report, plan, record, check(plan, record, 1e-9)
