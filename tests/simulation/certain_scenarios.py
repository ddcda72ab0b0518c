"""Simulates moments that random runs rarely reach: each run is built for its moment, and checks that it has occurred.

The seed draws the timing within bounds that keep the moment possible.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Final

from unit import test_exchange_replicas, test_round_memory

import asyncdist as ad
from asyncdist.protocols.async_diloco.arrivals import Arrival, Arrivals, Handling
from asyncdist.protocols.exchange.ledger import Instruction, Ledger
from asyncdist.simulation import Fault, Kill, Link, Network, SimReport, Uniform, simulate
from simulation import async_diloco_scenarios as asynchronous, diloco_scenarios as diloco
from simulation.training_runs import with_faults

#: Largest number of runs of one scenario; each run has the moment with a probability of about a fifth.
TRIAL_COUNT: Final = 60


@contextmanager
def replaced(owner: type, name: str, new: Callable[..., Any]) -> Iterator[None]:
    """Replace a method within the context."""
    old = getattr(owner, name)
    setattr(owner, name, new)
    try:
        yield
    finally:
        setattr(owner, name, old)


def repeated(seed: int, faults: Sequence[Fault] | None = None) -> SimReport[Any]:
    """Kill the leader of asynchronous DiLoCo when only one of two donors has the version with both contributions.

    The other donor repeats its contribution to the next leader, which must answer it and not apply it again.
    """
    rng = random.Random(f"repeated {seed}")
    latency_s = rng.uniform(0.12, 0.2)  # from the leader to rank 2: of the request for data, then of the answer
    plan = asynchronous.Plan(
        ranks=3,
        steps=(40,) * 3,
        quorum=3,
        mirror_every=1,
        network=Network(links={(0, 2): Link(latency_s=latency_s)}),
        faults=(Kill(0, at_s=2 * latency_s + rng.uniform(0.11, 0.14)),),
    )
    found: list[Handling] = []
    arrive = Arrivals.on_arrived

    def arriving(self: Arrivals, arrival: Arrival, now: float) -> Handling:
        found.append(arrive(self, arrival, now))
        return found[-1]

    with replaced(Arrivals, "on_arrived", arriving):
        report, record = asynchronous.run(with_faults(plan, faults), seed)
    asynchronous.check(plan, record)
    assert faults is not None or Handling.ANSWER in found, "no contribution was sent twice, so the seed tests nothing"
    return report


def mirrored(seed: int, faults: Sequence[Fault] | None = None) -> SimReport[Any]:
    """Kill the leader of asynchronous DiLoCo, which sends the outer state with each version.

    The next leader must continue with the momentum of the newest version.
    """
    rng = random.Random(f"mirrored {seed}")
    kill = Kill(0, at_s=rng.uniform(0.12, 0.3))
    plan = asynchronous.Plan(steps=(40,) * 4, mirror_every=1, quorum=4, late="wait", faults=(kill,))
    report, record = asynchronous.run(with_faults(plan, faults), seed)
    asynchronous.check(plan, record)
    outers = {begun: outer for begun, outer in record.outers.items() if begun}
    assert outers or faults is not None, "no leader was lost, so the seed tests nothing"
    assert all(begun == outer for begun, outer in outers.items()), f"a momentum was lost: {outers}"
    return report


def half_merged(seed: int, faults: Sequence[Fault] | None = None) -> SimReport[Any]:
    """Kill a donor of DiLoCo when one of the two other ranks has the mean of the first round.

    The leader must take a census (collect the state of each member's rounds), so that the other rank receives the mean.
    The time of the kill is drawn until it hits such a moment.
    """
    rng = random.Random(f"half merged {seed}")
    network = Network(link=Link(latency_s=Uniform(1e-3, 2e-2)), loss_detection_s=1e-3)
    found: list[bool] = []
    leave = Ledger.on_gone

    def leaving(self: Ledger, rank: int) -> list[Instruction]:
        rounds = self._rounds.values()
        found.append(any(each.needs(rank) and each.merged - {rank} for each in rounds))
        return leave(self, rank)

    with replaced(Ledger, "on_gone", leaving):
        while True:
            plan = diloco.Plan(ranks=3, steps=(6,) * 3, network=network, faults=(Kill(2, at_s=rng.uniform(0.05, 0.2)),))
            report, record = diloco.run(with_faults(plan, faults), seed)
            diloco.check(plan, record, diloco.within)
            if any(found) or faults is not None:
                return report
            assert len(found) < TRIAL_COUNT, "in all trials, no rank died while a round was partly merged"


# -- the leader's decisions and a member's memory, without messages ---------------------------------------------------


async def nothing(world: ad.World) -> None:
    """Make one step without a policy."""
    await world.safe_point()


def half_reported(seed: int, faults: Sequence[Fault] | None = None) -> SimReport[Any]:
    """Lose the only rank that has not reported, of a replica of two ranks."""
    test_exchange_replicas.test_a_lost_mate_leaves_no_half_replica_as_donor()
    return simulate(nothing, ranks=1, seed=seed, faults=faults or ())


def read_memory(seed: int, faults: Sequence[Fault] | None = None) -> SimReport[Any]:
    """Retire a round whose contribution is still being sent."""
    test_round_memory.test_memory_is_reused_when_the_last_stream_has_ended()
    return simulate(nothing, ranks=1, seed=seed, faults=faults or ())
