"""Number of local steps per contribution, and grace period, from the ranks' step times. All functions are pure.

Ranks of different speeds finish the same number of steps at very different times, and the slow ranks' differences are
then stale. With dynamic local updates (Liu et al., 2401.09135) each rank makes a number of steps that is proportional
to its speed, so that all contribute in about the same time.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

from asyncdist import validation


def local_steps(average_every: int, step_s: float | None, fastest_step_s: float | None, *, least: int = 1) -> int:
    """Return the number of steps that a rank makes before it contributes: H v / v_max, rounded down.

    H is ``average_every``, and v is the rank's speed. The fastest rank makes H steps. The notebook of Liu et al. has 5
    as the least number.

    Args:
        average_every: Number H of steps of the fastest rank.
        step_s: Seconds per step of this rank; None if they are not known.
        fastest_step_s: Seconds per step of the fastest rank; None if they are not known.
        least: Least number of steps, which is H if it is larger than H.

    Returns:
        A number from ``least`` to ``average_every``. It is H as long as a time is not known.

    Raises:
        ValueError: ``average_every`` or ``least`` is not a positive integer, or a time is not finite and above 0.
    """
    steps = validation.count("average_every", average_every)
    least = min(validation.count("least", least), steps)
    if step_s is None or fastest_step_s is None:
        return steps
    own, fastest = validation.seconds("step_s", step_s), validation.seconds("fastest_step_s", fastest_step_s)
    return max(least, math.floor(steps * min(1.0, fastest / own)))


def fastest(step_times_s: Iterable[float | None]) -> float | None:
    """Return the smallest of the known seconds per step, or None if none is known."""
    return min((each for each in step_times_s if each is not None), default=None)


def grace_s(
    share: float, *, slack_steps: float, step_s: float, quorum_s: float, exchange_s: float, longest_s: float = math.inf
) -> float:
    """Return how long to wait for further contributions, once the quorum has arrived.

    The wait takes a share g of the time that the ranks have left: g (tau xi_step - xi_quorum - xi_sync) in Decoupled
    DiLoCo (2604.21428), from 0 to ``longest_s``. tau is the number of steps that the ranks make until they need the
    result. A wait of this length delays no rank. (The paper's formula is known from summaries only; they say that g is
    below 1.)

    Args:
        share: Share g of the time left, from 0 to 1.
        slack_steps: Number tau of steps until the ranks need the result.
        step_s: Seconds per step of the ranks.
        quorum_s: Seconds from the first arrival until the quorum was complete.
        exchange_s: Seconds that the exchange of the result takes.
        longest_s: Upper limit.

    Returns:
        Seconds, which are 0 if no time is left.

    Raises:
        ValueError: A number is out of range.
    """
    share = validation.fraction("share", share)
    allowed = "a finite number >= 0"
    slack = validation.real("slack_steps", slack_steps, allowed, low=0.0) * validation.seconds("step_s", step_s)
    used = sum(
        validation.real(name, value, allowed, low=0.0)
        for name, value in (("quorum_s", quorum_s), ("exchange_s", exchange_s))
    )
    longest = validation.real("longest_s", longest_s, ">= 0 seconds", low=0.0, high=math.inf)
    return min(max(share * (slack - used), 0.0), longest)


def is_delay_short(delay: int, mean_staleness: float) -> bool:
    """Return True if N = ``delay`` is below twice the mean staleness in versions.

    Then a window's momentum step counts differences that are older than the window, and the momentum becomes stale.
    """
    return delay < 2.0 * mean_staleness
