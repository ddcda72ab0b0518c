"""Defines the settings of the benchmark ``value``: how the four ranks differ, or which rank fails.

A step computes for ``STEP_S`` virtual seconds, log-normal with a deviation of 10 %, times the rank's factor. Messages
between two ranks take microseconds, except in the setting with slow links. The evaluation of a metric takes no virtual
time.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

from asyncdist.simulation import Compute, Fault, Kill, Link, LogNormal, Network, Restart

RANK_COUNT: Final = 4
#: The rank that is slow, fails or diverges.
ODD_RANK: Final = RANK_COUNT - 1
#: Virtual seconds of a step of an ordinary rank: median, and deviation of its logarithm.
STEP_S: Final = 1.0
STEP_SPREAD: Final = 0.1
#: Training begins at this virtual time, after the collective start.
START_S: Final = 100.0
#: Size of the model, in bytes, that is imagined in the setting with slow links: 30 million parameters.
IMAGINED_NBYTES: Final = 4 * 30e6
SLOW_LINK_NBYTES_PER_S: Final = 50e6 / 8


@dataclass(frozen=True, slots=True)
class Setting:
    """Describes how the ranks differ, or which rank fails.

    Attributes:
        title: The heading of its charts and tables.
        speeds: Factor on the duration of a step, keyed by rank.
        rates: Factor on the learning rate, keyed by rank.
        shards: Name of the ranks' shares of the data.
        has_slow_links: Whether each rank's interface carries 50 Mbit/s of a model of 30 million parameters.
        loses_odd_rank: Whether the odd rank's process is killed after a third of the time, and restarted after two.
        mtbf_share: Mean time between two failures of a rank, as a share of the training time; None without failures.
    """

    title: str
    speeds: Mapping[int, float] = field(default_factory=dict)
    rates: Mapping[int, float] = field(default_factory=dict)
    shards: str = "iid"
    has_slow_links: bool = False
    loses_odd_rank: bool = False
    mtbf_share: float | None = None

    @property
    def has_failures(self) -> bool:
        """Whether ranks are killed."""
        return self.loses_odd_rank or self.mtbf_share is not None

    def compute(self, rank_count: int) -> Compute:
        """Return the computing time of the first ``rank_count`` ranks."""
        factors = {rank: factor for rank, factor in self.speeds.items() if rank < rank_count}
        return Compute(step_s=LogNormal(STEP_S, STEP_SPREAD), factors=factors, overrun_probability=0.0)

    def network(self, model_nbytes: int) -> Network:
        """Return the links: between ranks on one host, or between hosts whose bandwidth is scaled to the model."""
        if not self.has_slow_links:
            return Network()
        rate = SLOW_LINK_NBYTES_PER_S * model_nbytes / IMAGINED_NBYTES
        fast = Link(latency_s=1e-3, bandwidth_nbytes_per_s=1e9)
        return Network(cross_link=fast, ranks_per_host=1, host_bandwidth_nbytes_per_s=rate)

    def away_s(self, train_s: float, seed: int) -> float:
        """Return the seconds in which a rank is away, and a training that needs all ranks stands still."""
        if self.loses_odd_rank:
            return train_s / 3
        return RECOVERY_S * sum(isinstance(fault, Kill) for fault in self.faults(train_s, seed))

    def faults(self, train_s: float, seed: int) -> Sequence[Fault]:
        """Return the kills and restarts of a run."""
        if self.loses_odd_rank:
            return [Kill(ODD_RANK, START_S + train_s / 3), Restart(ODD_RANK, START_S + 2 * train_s / 3)]
        if self.mtbf_share is None:
            return []
        return _random_faults(random.Random(f"failures {seed}"), train_s, self.mtbf_share * train_s)


#: Seconds between the death of a rank and its new process, in the setting with random failures.
RECOVERY_S: Final = 20.0


def _random_faults(rng: random.Random, train_s: float, mtbf_s: float) -> Sequence[Fault]:
    """Draw the deaths of each rank, each with a new process; at most one rank is dead at any time."""
    faults: list[Fault] = []
    now_s = rng.expovariate(RANK_COUNT / mtbf_s)
    while now_s < train_s - 2 * RECOVERY_S:
        rank = rng.randrange(RANK_COUNT)
        faults += [Kill(rank, START_S + now_s), Restart(rank, START_S + now_s + RECOVERY_S)]
        now_s += RECOVERY_S + rng.expovariate(RANK_COUNT / mtbf_s)
    return faults


#: Slowdowns of the odd rank in the chart of times.
SLOWDOWNS: Final = (1, 2, 5, 10, 30, 100)


def slowdown(factor: float) -> str:
    """Return the name of the setting in which the odd rank is slower by the factor."""
    return "equal" if factor == 1 else f"slow {factor:g}"


SETTINGS: Final[dict[str, Setting]] = {
    "equal": Setting("equal ranks"),
    "speeds": Setting("speeds 1, 1.3, 2.6, 5.7", speeds=dict(enumerate((1.0, 1.3, 2.6, 5.7)))),
    **{
        slowdown(factor): Setting(f"one rank {factor} times slower", speeds={ODD_RANK: float(factor)})
        for factor in SLOWDOWNS[1:]
    },
    "links": Setting("50 Mbit/s, 30 million parameters", has_slow_links=True),
    "lost": Setting("one rank lost, then back", loses_odd_rank=True),
    "diverges": Setting("one rank's learning rate x 10", rates={ODD_RANK: 10.0}),
    "slow and diverging": Setting(
        "one rank 10 times slower, one with learning rate x 10", speeds={ODD_RANK: 10.0}, rates={ODD_RANK - 1: 10.0}
    ),
    "dirichlet 0.1": Setting("data: Dirichlet 0.1", shards="dirichlet 0.1"),
    "one class": Setting("data: one class a rank", shards="one class"),
    "failures": Setting("random failures", mtbf_share=1.0),
}
