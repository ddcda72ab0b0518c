"""Kills ranks while a policy starts; all living ranks continue in one policy, or a single rank is left.

A seed draws three to eight ranks. Each link between two of them has its own latency, so that some ranks receive a
message to all and others do not yet. One to three ranks are killed, most often the one that decides about the start: at
a time, or with one of its messages. Ranks may also be late, stalled, disconnected for a while, or restarted.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final
from unittest import mock

import torch

import asyncdist as ad
from asyncdist.collectives.agreement.messages import Meeting
from asyncdist.collectives.agreement.termination import Termination
from asyncdist.simulation import (
    Compute,
    Fault,
    Kill,
    Link,
    Network,
    Partition,
    Restart,
    SimReport,
    Stall,
    Uniform,
    simulate,
)
from protocols import AsyncSelectiveAveragingPolicy
from protocols.selective.leadership import Leadership

#: The start is over by then; training continues for a while.
TRAINS_UNTIL_S: Final = 0.3
#: Errors that a restarted member may get if the others end without it.
_REFUSALS: Final = (ad.ClosedError, ad.StartTimeoutError, ad.RankLostError, ad.DisagreementError)


@dataclass(frozen=True)
class Trained:
    """Observations of one rank at its end.

    Attributes:
        policy: Name of the policy in which it was.
        epoch, coordinator: The last epoch and coordinator that it knows.
        last_round: The last round that it knows.
    """

    policy: int
    epoch: int
    coordinator: int | None
    last_round: int


@dataclass(frozen=True)
class Plan:
    """The random choices of a seed.

    Attributes:
        ranks: Number of ranks.
        late_s: Delay in seconds of each rank's entry into the policy.
        network: Network, with a latency for each link.
        faults: Kills, and further faults.
    """

    ranks: int
    late_s: tuple[float, ...]
    network: Network
    faults: tuple[Fault, ...]

    @classmethod
    def of(cls, seed: int) -> Plan:
        """Draw a plan."""
        rng = random.Random(f"killed in the start {seed}")
        ranks = rng.randint(3, 8)
        slowest_s = rng.choice((1e-5, 1e-4, 1e-3))
        links = {
            (source, dest): Link(latency_s=rng.choice((1e-6, rng.uniform(0.0, slowest_s), slowest_s)))
            for source in range(ranks)
            for dest in range(ranks)
            if source != dest
        }
        heard_s = rng.choice((1e-5, 1e-4, 2e-3))
        late_s = tuple(rng.choice((0.0, 0.0, rng.uniform(0.0, 2 * slowest_s))) for _ in range(ranks))
        faults: list[Fault] = []
        for place in range(rng.randint(1, min(3, ranks - 1))):
            rank = place if rng.random() < 0.8 else rng.randrange(ranks)
            if any(isinstance(fault, Kill) and fault.rank == rank for fault in faults):
                continue
            if rng.random() < 0.6:
                kill = Kill(rank, at_message=rng.randint(1, 2 * ranks))
            else:
                kill = Kill(rank, at_s=rng.uniform(0.0, 6 * slowest_s))
            faults.append(kill)
            if rng.random() < 0.2:
                faults.append(Restart(rank, at_s=rng.uniform(2.0, 20.0) * slowest_s))
        if rng.random() < 0.2:
            faults.append(Stall(rng.randrange(ranks), rng.uniform(0, 4 * slowest_s), rng.uniform(0, 8 * slowest_s)))
        if rng.random() < 0.2:
            begins_s = rng.uniform(0, 4 * slowest_s)
            cut_off = tuple(rng.sample(range(ranks), rng.randint(1, ranks - 1)))
            faults.append(Partition(cut_off, begins_s, begins_s + rng.uniform(0, 8 * slowest_s)))
        network = Network(links=links, loss_detection_s=Uniform(0.0, heard_s))
        return cls(ranks, late_s, network, tuple(faults))


async def _main(world: ad.World, late_s: Sequence[float]) -> Trained | str:
    """Train until all ranks know everything; a restarted member may learn that it is too late."""
    await world.sleep(late_s[world.rank])
    model = torch.nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    policy = AsyncSelectiveAveragingPolicy(
        model, optimizer, average_every=2, grace_s=0.002, round_timeout_s=0.1, start_timeout_s=5.0
    )
    try:
        async with policy:
            while world.time() < TRAINS_UNTIL_S:
                await world.sleep(0.005)
                await policy.step(float(world.rank))
            seen = policy.statistics()
            if policy.is_alone:
                return Trained(0, 0, world.rank, 0)
            leadership = policy._tracker
            assert isinstance(leadership, Leadership)
            return Trained(leadership._scopes.policy, seen.epoch, seen.coordinator_rank, seen.last_round)
    except _REFUSALS as error:
        if not world.incarnation:
            raise
        return f"refused: {type(error).__name__}"


def check(plan: Plan, report: SimReport[Any], seed: int) -> None:
    """Check that all living ranks are in one policy and agree on its coordinator. Raises AssertionError."""
    killed = {fault.rank for fault in plan.faults if isinstance(fault, Kill)}
    trained = {rank: found for rank, found in enumerate(report.results) if isinstance(found, Trained)}
    errors = {rank: found for rank, found in enumerate(report.results) if isinstance(found, BaseException)}
    assert not errors, f"seed {seed}: {errors}"
    missing = set(range(plan.ranks)) - killed - trained.keys()
    assert not missing, f"seed {seed}: ranks {missing} did not train: {report.results}"
    together = {(found.policy, found.epoch, found.coordinator) for found in trained.values()}
    assert len(together) == 1, f"seed {seed}: the ranks must have trained together: {trained}"
    if len(trained) > 1:
        assert min(found.last_round for found in trained.values()) > 1, (
            f"seed {seed}: each rank must have seen several rounds: {trained}"
        )


def run(seed: int) -> Counter[str]:
    """Run one seed; return how its ranks ended, and how often a rank asked for a verdict. Raises any error."""
    plan = Plan.of(seed)
    asked: Counter[str] = Counter()
    ask = Termination.ask

    async def watched(
        termination: Termination, meeting: Meeting, gone: Any, is_told: Callable[[], bool], *rest: Any
    ) -> None:
        await ask(termination, meeting, gone, is_told, *rest)
        asked["verdicts passed on" if is_told() else "verdicts lost"] += 1

    with mock.patch.object(Termination, "ask", watched):
        report: SimReport[Any] = simulate(
            _main,
            plan.late_s,
            ranks=plan.ranks,
            seed=seed,
            faults=plan.faults,
            network=plan.network,
            compute=Compute(),
            until_s=100.0,
            strict=True,
        )
    check(plan, report, seed)
    ends = Counter(found if isinstance(found, str) else type(found).__name__ for found in report.results)
    return ends + asked
