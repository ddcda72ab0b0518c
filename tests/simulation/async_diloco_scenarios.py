"""Simulates asynchronous DiLoCo with faults, and compares each rank's weights after each step with an oracle.

The oracle is a second implementation in numpy. It takes from the run only the order of events: the donors of each
version, and the step in which a rank has applied a version. It computes all weights itself.
"""

from __future__ import annotations

import functools
import random
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence, Set
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, Final

import numpy as np
import torch
from scripts.population import sgd
from support.tokens import tokens_for

import asyncdist as ad
from asyncdist.protocols.async_diloco.arrivals import Arrival
from asyncdist.protocols.async_diloco.member_store import HeldAnchor, MemberStore
from asyncdist.protocols.async_diloco.server import Server
from asyncdist.protocols.step_info import NOTHING
from asyncdist.simulation import Fault, Kill, Restart, SimReport
from protocols import AsyncDiLoCoPolicy, AsyncDiLoCoStatistics, StepInfo
from simulation.training_runs import (
    Arrays,
    Layers,
    TrainingPlan,
    advance,
    draw_compute,
    draw_disturbances,
    draw_network,
    draw_steps,
    drift,
    entered,
    simulate_plan,
    weights_of,
    with_faults,
)

#: Learning rate, momentum and Nesterov of each outer optimizer. Products with the dyadic ones are exact.
OUTERS: Final[dict[str, tuple[float, float, bool]]] = {
    "nesterov": (0.07, 0.9, True),
    "dyadic": (0.5, 0.5, True),
    "plain": (0.25, 0.0, False),
}


@dataclass(frozen=True, kw_only=True)
class Plan(TrainingPlan):
    """One run, in which each rank ends at iteration 18 by default.

    Attributes:
        uses_tokens: Whether rank r reports r + 1 tokens per step, as weights.
    """

    every: int = 3
    outer: str = "dyadic"
    quorum: int = 1
    grace_s: float = 0.0
    grace_steps: float = 0.0
    late: str = "skip"
    mirror_every: int | None = None
    uses_tokens: bool = False

    @property
    def options(self) -> dict[str, Any]:
        lr, momentum, nesterov = OUTERS[self.outer]
        return {
            "average_every": self.every,
            "outer_optimizer": functools.partial(torch.optim.SGD, lr=lr, momentum=momentum, nesterov=nesterov),
            "quorum": self.quorum,
            "grace_s": self.grace_s,
            "grace_steps": self.grace_steps,
            "late": self.late,
            "mirror_every": self.mirror_every,
            "weights": "tokens" if self.uses_tokens else "equal",
        }


@dataclass
class Life:
    """The steps of one process of a rank.

    Attributes:
        first: Iteration, and weights, at which the process has begun.
        infos, weights: Result of each step, and the weights after it.
        version: Version of the anchor from which it has begun.
        first_sequence: Number of contributions of this rank before it has begun.
        store: The policy's state, whose sequence number is that of the last contribution.
    """

    first: tuple[int, Arrays] = (0, [])
    infos: list[StepInfo] = field(default_factory=list)
    weights: list[Arrays] = field(default_factory=list)
    version: int = 0
    first_sequence: int = 0
    store: MemberStore | None = None
    statistics: AsyncDiLoCoStatistics | None = None

    @property
    def sequences(self) -> tuple[int, int]:
        return self.first_sequence, 0 if self.store is None else self.store.sequence


class Record:
    """The lives of all processes, by rank and incarnation, and the lineage of the anchor's versions.

    Args:
        size: Number of ranks of a replica. If it is above 1, "rank" below means the number of a replica.
        lost: Replicas that a fault may end. The others may continue while a rank of such a replica still leads itself.

    Attributes:
        lineage: For each version from 1, the rank and the sequence number of each contribution.
        left: Contributions of ranks that had left, in versions that were lost with all their holders.
        lost_count: Number of versions that were lost with all their holders.
        leading: The newest leader. An earlier one whose replica has lost a rank may still make versions for itself.
        outers: For each version with which a leader has begun, the version of the outer state.
    """

    def __init__(self, size: int = 1, lost: Set[int] = frozenset()) -> None:
        self.size = size
        self.lost = lost
        self.lives: dict[tuple[int, int], Life] = defaultdict(Life)
        self.without: set[int] = set()  # ranks whose start was ended by a loss
        self.late: set[int] = set()  # restarted ranks that found no running policy
        self.lineage: list[list[tuple[int, int]]] = []
        self.outers: dict[int, int] = {}
        self.left: set[tuple[int, int]] = set()
        self.lost_count = 0
        self.leading: Server | None = None

    def is_parted(self, server: Server) -> bool:
        """Return whether a server belongs to a lost replica, while one of a sound replica leads the others."""
        leading = self.leading
        if leading is None or leading._membership._is_closed:
            return False
        of_new, of_old = (each._services.rank // self.size for each in (server, leading))
        return of_new in self.lost and of_old not in self.lost

    def truncate(self, version: int, outer: int) -> None:
        """Note that a new leader continues from a version, since all ranks with later versions are lost."""
        for rank, sequence in [each for donors in self.lineage[version:] for each in donors]:
            if any(life.statistics is not None for (other, _), life in self.lives.items() if other == rank):
                self.left.add((rank, sequence))  # the rank has left, so it cannot repeat the contribution
        self.lost_count += len(self.lineage) - version
        del self.lineage[version:]
        self.outers = {begun: found for begun, found in self.outers.items() if begun <= version}
        if outer < version or version not in self.outers:  # otherwise the copy is of the last leader's first state
            self.outers[version] = outer

    def note(self, version: int, arrivals: Sequence[Arrival]) -> None:
        assert version == len(self.lineage) + 1, "a new leader must continue from the newest anchor"
        ranks = [each.rank for each in arrivals]
        assert ranks == sorted(ranks), f"version {version} must add up contributions in rank order, got {ranks}"
        self.lineage.append([(rank // self.size, each.sequence) for rank, each in zip(ranks, arrivals, strict=True)])


@contextmanager
def noted_steps(record: Record) -> Iterator[None]:
    """Record the versions that any rank makes as the leader, and the states with which leaders begin."""
    make, begin = Server._make_version, Server._begin

    async def making(self: Server, arrivals: Sequence[Arrival]) -> None:
        assert self.anchor is not None
        if record.leading is self:
            record.note(self.anchor.version + 1, arrivals)
        await make(self, arrivals)

    def beginning(self: Server, held: HeldAnchor, outer: tuple[int, torch.Tensor] | None, elected: int) -> None:
        if not record.is_parted(self):
            assert held.version <= len(record.lineage)
            record.leading = self
            record.truncate(held.version, 0 if outer is None else outer[0])
        begin(self, held, outer, elected)

    try:
        Server._make_version, Server._begin = making, beginning  # type: ignore[method-assign]
        yield
    finally:
        Server._make_version, Server._begin = make, begin  # type: ignore[method-assign]


async def train(world: ad.World, plan: Plan, record: Record) -> None:
    """Train on one rank, and record each step."""
    model, rank = Layers(plan.dtype), world.rank
    life = record.lives[rank, world.incarnation]
    policy = AsyncDiLoCoPolicy(model, sgd(model), **plan.options)
    async with entered(policy, model, plan, world) as start:
        if start != "started":
            (record.without if start == "ended by a loss" else record.late).add(rank)
            return
        life.first, life.version = (policy.iteration, weights_of(model)), policy.statistics().version
        life.first_sequence, life.store = policy._store.sequence, policy._store
        while policy.iteration < plan.steps[rank]:
            await advance(plan, model, rank, policy.iteration)
            info = await policy.step(tokens=tokens_for(policy, rank + 1))
            life.infos.append(info)
            life.weights.append(weights_of(model))
    life.statistics = policy.statistics()


class Worker:
    """The oracle's copy of one process: it trains, captures its differences, and applies the versions that it gets."""

    def __init__(self, oracle: Oracle, key: tuple[int, int], life: Life) -> None:
        self.oracle, self.key, self.rank, self.life = oracle, key, key[0], life
        self.sequence = life.sequences[0]
        self.version = life.version  # of the base
        self.base = oracle.anchors[life.version]
        self.own = [array.copy() for array in (self.base if life.version else oracle.anchors[0])]
        self.captured: Arrays = []
        self.captured_at, self.base_version = -1, 0
        self.step, self.since, self.tokens = 0, 0, 0.0
        self.is_outstanding = False

    def contribution(self, sequence: int) -> tuple[Arrays, float]:
        """Train up to the next capture; return the difference and the number of tokens."""
        while self.step < len(self.life.infos):
            found = self.next_step()
            if found is not None:
                assert self.sequence == sequence
                return found
        if self.rank in self.oracle.plan.killed and self.sequence + 1 == sequence:  # killed while its step waited
            found = self.next_step()
            assert found is not None
            return found
        raise AssertionError(f"rank {self.rank} has made no further contribution")

    def next_step(self) -> tuple[Arrays, float] | None:
        """Make one step, and compare the weights; return the contribution if there is one."""
        plan, iteration = self.oracle.plan, self.life.first[0] + self.step
        info = self.life.infos[self.step] if self.step < len(self.life.infos) else NOTHING
        for place, array in enumerate(self.own):
            array += drift(self.rank, iteration, place, array.shape).astype(array.dtype)
        self.since += 1
        self.tokens += self.rank + 1
        found = None
        if info and self.is_outstanding:
            self.apply(info.round, iteration)
            info = NOTHING
        elif self.step >= len(self.life.infos) and self.is_outstanding and self.life.store is not None:
            self.apply(self.life.store.base.version, iteration)  # in a step that a lost mate has interrupted
        if self.since >= plan.every and not self.is_outstanding:
            self.captured, self.captured_at = [array.copy() for array in self.own], iteration
            self.base_version = self.version
            found = [base - own for base, own in zip(self.base, self.own, strict=True)], self.tokens
            self.since, self.tokens, self.is_outstanding = 0, 0.0, True
            self.sequence += 1
        if info:  # with late="wait", the version contains the contribution that was just captured
            assert found is not None, (
                f"rank {self.rank}, step {iteration}: applied version {info.round} without a contribution"
            )
            return self.later(info.round, iteration, found)
        self.compare(iteration)
        self.step += 1
        return found

    def later(self, version: int, iteration: int, found: tuple[Arrays, float]) -> tuple[Arrays, float]:
        """Apply the version when it is known."""
        self.oracle.later[self.key] = version, iteration
        return found

    def complete(self) -> None:
        """Apply a version that has become known."""
        version, iteration = self.oracle.later.pop(self.key)
        self.apply(version, iteration)
        self.compare(iteration)
        self.step += 1

    def apply(self, version: int, iteration: int) -> None:
        if self.step < len(self.life.infos):
            self.check_staleness(version, self.life.infos[self.step].staleness_versions)
        self.base, self.version, self.is_outstanding = self.oracle.anchors[version], version, False
        if self.captured_at == iteration:
            self.own = [array.copy() for array in self.base]
        else:
            self.own = [
                own - (captured - new) for own, captured, new in zip(self.own, self.captured, self.base, strict=True)
            ]

    def check_staleness(self, version: int, reported: int | None) -> None:
        """Check the number of versions since the base; a new leader reports 0 for a version of its predecessor."""
        donors = self.oracle.record.lineage[version - 1]
        expected = version - 1 - self.base_version
        if (self.rank, self.sequence) in donors and reported:
            assert reported == expected, f"rank {self.rank}, version {version}: staleness {reported}, not {expected}"

    def compare(self, iteration: int) -> None:
        weights = self.life.weights[self.step] if self.step < len(self.life.weights) else self.own
        for place, (mine, right) in enumerate(zip(weights, self.own, strict=True)):
            error = np.abs(mine - right).max()
            allowed = self.oracle.tolerance
            assert error <= allowed, (
                f"rank {self.rank}, step {iteration}, parameter {place}: the error is {error}, allowed {allowed}"
            )


class Oracle:
    """Computes all anchors in the order of their versions, and all weights."""

    def __init__(self, plan: Plan, record: Record, tolerance: float) -> None:
        self.plan, self.tolerance = plan, tolerance
        self.anchors: list[Arrays] = [weights_of(Layers(plan.dtype))]
        self.buffer: Arrays = []
        self.applied: list[Arrays] = []  # all differences
        self.later: dict[tuple[int, int], tuple[int, int]] = {}
        self.momenta: list[Arrays] = [[]]  # after each version
        self.workers: dict[tuple[int, int], Worker] = {}
        self.record = record
        self.let_begin()
        for donors in record.lineage:
            if len(self.anchors) - 1 in record.outers:
                self.buffer = self.momenta[-1] = self.momenta[record.outers[len(self.anchors) - 1]]
            self.make_version(donors)
            self.momenta.append(self.buffer)
            for key in list(self.later):
                if self.later[key][0] < len(self.anchors):
                    self.workers[key].complete()
            self.let_begin()
        ended = plan.killed | {rank for rank, _ in record.left}  # may have applied versions that were lost
        for (rank, _), worker in self.workers.items():
            while worker.step < len(worker.life.infos) and rank not in ended:
                worker.next_step()

    def let_begin(self) -> None:
        """Begin the processes whose first anchor is known."""
        for key, life in self.record.lives.items():
            if key not in self.workers and life.store is not None and life.version < len(self.anchors):
                self.workers[key] = Worker(self, key, life)

    def worker_of(self, rank: int, sequence: int) -> Worker:
        """Return the process that has made a contribution.

        A restarted rank repeats the number of a contribution that was lost with the leader and its former process.
        """
        lives = self.record.lives.items()
        return self.workers[
            max(key for key, life in lives if key[0] == rank and life.sequences[0] < sequence <= life.sequences[1])
        ]

    def make_version(self, donors: Sequence[tuple[int, int]]) -> None:
        given = [self.worker_of(rank, sequence).contribution(sequence) for rank, sequence in donors]
        self.applied += [difference for difference, _ in given]
        if not given:
            self.anchors.append(self.anchors[-1])
            return
        lr, momentum, nesterov = OUTERS[self.plan.outer]
        scalar = self.anchors[0][0].dtype.type
        weights = [scalar(tokens if self.plan.uses_tokens else 1.0) for _, tokens in given]
        mean = []
        for place in range(len(self.anchors[0])):
            total: Any = scalar(0)
            for (difference, _), weight in zip(given, weights, strict=True):
                total = total + weight * difference[place]
            mean.append(total / scalar(sum(weights)))
        if not self.buffer:
            self.buffer = mean
        else:
            self.buffer = [scalar(momentum) * own + new for own, new in zip(self.buffer, mean, strict=True)]
        if not momentum:
            change = mean
        elif nesterov:
            change = [new + scalar(momentum) * own for new, own in zip(mean, self.buffer, strict=True)]
        else:
            change = self.buffer
        self.anchors.append([own - scalar(lr) * each for own, each in zip(self.anchors[-1], change, strict=True)])


def run(plan: Plan, seed: int = 0) -> tuple[SimReport[Any], Record]:
    """Simulate a plan, and check that each contribution of a rank that was not killed is applied exactly once."""
    plan = replace(plan, steps=plan.steps or (18,) * plan.ranks)
    record = Record()
    with noted_steps(record):
        report = simulate_plan(train, plan, plan, record, ranks=plan.ranks, seed=seed)
    assert plan.killed or not record.lost_count, f"{record.lost_count} versions were lost although no rank was killed"
    counts = Counter(each for donors in record.lineage for each in donors)
    assert not counts or max(counts.values()) == 1, (
        f"contributions were applied more than once: {counts.most_common(3)}"
    )
    for (rank, _), life in record.lives.items():
        if rank not in plan.killed | record.without:
            assert life.statistics is not None, f"rank {rank} has not ended"
            assert life.first[0] + len(life.infos) == plan.steps[rank]
            first, last = life.sequences
            lost = [each for each in range(first + 1, last + 1) if (rank, each) not in counts.keys() | record.left]
            assert not lost, f"rank {rank}: contributions {lost} of {last} were not applied"
    return report, record


def check(plan: Plan, record: Record, tolerance: float = 0.0) -> Oracle:
    """Compare all weights after each step with the oracle's."""
    return Oracle(replace(plan, steps=plan.steps or (18,) * plan.ranks), record, tolerance)


def draw_plan(seed: int) -> Plan:
    """Return a run with drawn options, network and faults."""
    rng = random.Random(f"async diloco {seed}")
    ranks, steps = rng.randint(2, 5), rng.randint(12, 40)
    network = draw_network(rng)
    plan = Plan(
        ranks=ranks,
        steps=draw_steps(rng, ranks, steps, staying=0.8),
        every=rng.randint(1, 6),
        outer=rng.choice(tuple(OUTERS)),
        quorum=rng.choice((1, 1, rng.randint(1, ranks), ranks)),
        grace_s=rng.choice((0.0, 0.0, 0.01, 0.1)),
        late=rng.choice(("skip", "skip", "wait")),
        mirror_every=rng.choice((None, 0, 1, 3)),
        uses_tokens=rng.random() < 0.2,
        network=network,
        compute=draw_compute(rng, ranks),
        faults=tuple(_draw_faults(rng, ranks)),
    )
    return _with_grace_in_steps(plan, seed)


def _with_grace_in_steps(plan: Plan, seed: int) -> Plan:
    """Give some runs a grace period in steps, drawn apart so that other runs keep their seeds."""
    rng = random.Random(f"grace of async diloco {seed}")
    if plan.late == "wait" or plan.grace_s or rng.random() < 0.5:
        return plan
    return replace(plan, grace_steps=rng.uniform(0.1, plan.every))


def _draw_faults(rng: random.Random, ranks: int) -> list[Fault]:
    found: list[Fault] = []
    restarts = rng.random() < 0.5
    for rank in rng.sample(range(ranks), rng.randint(0, ranks - 1)):
        at_s = rng.uniform(0.005, 0.4)
        ways: list[dict[str, Any]] = [{"at_s": at_s}]
        if not restarts:
            ways += [{"at_turn": rng.randint(10, 700)}, {"at_message": rng.randint(5, 200)}]
        found.append(Kill(rank, **rng.choice(ways)))
        if restarts and rng.random() < 0.8:
            found.append(Restart(rank, at_s=at_s + rng.uniform(0.01, 0.2)))
    return found + draw_disturbances(rng, ranks, 0.3)


def scenario(seed: int, faults: Sequence[Fault] | None = None) -> SimReport[Any]:
    """Run one seed; AssertionError if a weight differs, a contribution is lost or applied twice, or a rank is stuck."""
    report, *_ = seen_in(seed, faults)
    return report


def seen_in(seed: int, faults: Sequence[Fault] | None = None) -> tuple[SimReport[Any], Plan, Record]:
    """Run one seed, and return its counts for the test of coverage."""
    plan = with_faults(draw_plan(seed), faults)
    report, record = run(plan, seed)
    check(plan, record, 1e-9)
    return report, plan, record
