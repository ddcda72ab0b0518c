"""Describes how long user code computes in a simulation, and checks the arguments of :func:`asyncdist.simulate`."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from asyncdist import validation
from asyncdist.simulation.distributions import Duration, LogNormal, check_duration, check_number, sampler, store
from asyncdist.simulation.faults import Fault, check_plan
from asyncdist.simulation.links import Network, check_ranks

#: Maximum duration of a computation that is extended to overrun a timer, as a multiple of its normal duration.
OVERRUN_STEP_COUNT: Final = 1000
#: Maximum number of seconds between a timer and the end of a computation that overruns it.
OVERRUN_S: Final = 1e-5


@dataclass(frozen=True, slots=True, kw_only=True)
class Compute:
    """Describes how long user code computes before each safe point.

    Safe points are calls of ``policy.step``, ``progress`` and ``safe_point``.

    Attributes:
        step_s: Computing time before a safe point, in virtual seconds, on every rank.
        factors: Multipliers of ``step_s``, keyed by rank. They also slow down the rank's handling of messages, as
            :class:`SlowRank` does.
        pause_probability, pause_s: Probability of a pause at each safe point, and its duration in virtual seconds.
        overrun_probability: Probability, at each safe point, that the computation lasts until just after one of the
            rank's own timers. The rank then finds messages and an expired deadline at the same time. Timers later than
            :data:`OVERRUN_STEP_COUNT` times the computing time are ignored. None means 0 if ``step_s`` is a number;
            otherwise 0.05 in one of eight simulations, and 0 in the other simulations.
    """

    step_s: Duration = LogNormal(1e-3, 0.2)
    factors: Mapping[int, float] = field(default_factory=dict)
    pause_probability: float = 0.0
    pause_s: Duration = 1.0
    overrun_probability: float | None = None

    def __post_init__(self) -> None:
        store(self, "step_s", check_duration("step_s", self.step_s))
        store(self, "pause_s", check_duration("pause_s", self.pause_s))
        store(self, "pause_probability", validation.fraction("pause_probability", self.pause_probability))
        if self.overrun_probability is not None:
            probability = validation.fraction("overrun_probability", self.overrun_probability)
            store(self, "overrun_probability", probability)
        factors: Any = self.factors
        if not isinstance(factors, Mapping):
            validation.refuse("factors", factors, "a dict that maps ranks to factors", TypeError)
        checked = {rank: check_number(f"the compute factor of rank {rank}", factor) for rank, factor in factors.items()}
        store(self, "factors", checked)

    def check_ranks(self, size: int) -> None:
        """Raise ValueError if ``factors`` names a rank that does not exist."""
        check_ranks("Compute.factors", list(self.factors), size)

    def draw_overrun_probability(self, rng: random.Random) -> float:
        """Choose the probability that a computation in one simulation overruns a timer."""
        if self.overrun_probability is not None:
            return self.overrun_probability
        return 0.05 if not isinstance(self.step_s, (float, int)) and rng.random() < 1 / 8 else 0.0

    def sampler(self, rank: int, rng: random.Random) -> Callable[[], float]:
        """Return a function that samples the computing time of ``rank`` before a safe point, in seconds."""
        draw_step_s, draw_pause_s = sampler(self.step_s, rng), sampler(self.pause_s, rng)
        factor, probability = self.factors.get(rank, 1.0), self.pause_probability
        if not probability:
            return draw_step_s if factor == 1.0 else lambda: draw_step_s() * factor

        def draw_s() -> float:
            seconds = draw_step_s() * factor
            return seconds + draw_pause_s() if rng.random() < probability else seconds

        return draw_s


def check_arguments(
    ranks: int, seed: int, network: Network | None, compute: Compute | None, faults: Sequence[Fault]
) -> tuple[int, int, Network, Compute, tuple[Fault, ...]]:
    """Check some arguments of :func:`asyncdist.simulate`, and return them with defaults filled in.

    Raise TypeError or ValueError if an argument is invalid.
    """
    ranks = validation.count("ranks", ranks)
    seed = validation.whole("seed", seed)
    for name, value, kind in (("network", network, Network), ("compute", compute, Compute)):
        if value is not None and not isinstance(value, kind):
            raise TypeError(f"{name} must be a {kind.__name__}, got {value!r}")
    check_plan(faults, ranks)
    network, compute = network or Network(), compute or Compute()
    network.check_ranks(ranks)
    compute.check_ranks(ranks)
    return ranks, seed, network, compute, tuple(faults)
