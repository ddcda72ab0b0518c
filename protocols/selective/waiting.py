"""Decides how long a coordinator waits for reports, and which ranks would delay a round too much.

The functions are pure. `Patience` stores their inputs. The *cadence* is the median of the members' times between
reports.

- **Grace.** Waiting for late reports delays nothing if the round still ends before the next reports arrive. After the
  quorum, the coordinator therefore waits at most ``max(0, cadence - quorum_time - round_time)``, and only for ranks
  whose report can be expected within that time. This is the adaptive grace window of Decoupled DiLoCo (eq. 3, ``gamma *
  max(0, tau * step - quorum_time - sync_time)``, with gamma 1). docs/grace.md compares it with other windows.
- **Roles.** Rounds do not overlap, so a rank with long steps would delay every round in which it has a role. A round
  may take 1.25 cadences, or twice its time with the median rank, at no cost. A slower rank gets a role only if its
  round exceeds this limit by at most a tenth of the time since the last delayed round.
"""

import math
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from statistics import median_low
from typing import Final, NamedTuple

#: Limit for a round: this many cadences or, if longer, this multiple of its duration with the median rank.
FREE_CADENCES: Final = 1.25
FREE_ROUNDS: Final = 2.0
#: Times that differ by fewer seconds count as equal, because busy hosts and coarse timers cause such differences.
NOISE_S: Final = 0.1
#: Maximum fraction of the total time by which slow ranks may delay rounds.
DELAY_SHARE: Final = 0.1
#: Upper limit for reported times, in seconds, so that every deadline is finite.
PLAUSIBLE_MAX_S: Final = 3600.0
#: Number of steps that a role needs in addition to the steps of its streams: one to receive the role, one to complete
#: it.
_ROLE_STEP_COUNT: Final = 2
_RECENT_ROUND_COUNT: Final = 9  # a round's expected duration is the median of this many rounds


class Pace(NamedTuple):
    """Step and report times of a member in seconds, as far as the coordinator knows them; 0 if unknown.

    Attributes:
        step_s: Duration of a step: the smaller value in the member's last two reports.
        interval_s: Time between reports: the smaller of the member's last two intervals.
        silent_s: Time since the member's newest report.
    """

    step_s: float
    interval_s: float
    silent_s: float


#: Creates a Pace from a tuple in half the time of Pace(...). Each round creates one for each member.
as_pace: Final[Callable[[tuple[float, float, float]], Pace]] = partial(tuple.__new__, Pace)


def plausible_s(claimed_s: float) -> float:
    """Return a reported time in seconds, at most `PLAUSIBLE_MAX_S`, or 0 if it is not a positive finite number."""
    if 0.0 < claimed_s <= PLAUSIBLE_MAX_S:
        return claimed_s
    return PLAUSIBLE_MAX_S if PLAUSIBLE_MAX_S < claimed_s < math.inf else 0.0


def cadence_s(intervals_s: Sequence[float]) -> float:
    """Return the median of the members' times between reports in seconds, or 0 if no interval is known."""
    known = [interval_s for interval_s in intervals_s if interval_s > 0]
    return median_low(known) if known else 0.0


def grace_s(cadence_s: float, quorum_s: float, rounds_s: Sequence[float]) -> float:
    """Return how many seconds to wait for late reports without delaying a later averaging round."""
    return max(0.0, cadence_s - quorum_s - (median_low(rounds_s) if rounds_s else 0.0))


def is_expected(pace: Pace, cadence_s: float, within_s: float) -> bool:
    """Return whether a member's next report is due within ``within_s`` seconds, or overdue by at most that time."""
    return abs((pace.interval_s or cadence_s) - pace.silent_s) <= within_s


def is_late(pace: Pace, cadence_s: float) -> bool:
    """Return whether a member has not reported for more than ``FREE_CADENCES`` times the usual report interval."""
    return pace.silent_s > FREE_CADENCES * cadence_s


def expected_round_s(pace: Pace, stream_safe_points: int) -> float:
    """Return how many seconds an averaging round with this member will take, as estimated from its step time."""
    step_s, interval_s, silent_s = pace
    overdue_s = silent_s - interval_s if 0 < interval_s < silent_s else 0.0
    return (_ROLE_STEP_COUNT + stream_safe_points) * step_s + overdue_s


def allowed_round_s(expected_s: Mapping[int, float], cadence_s: float) -> float:
    """Return how many seconds an averaging round may take without delaying the next.

    Args:
        expected_s: Estimated duration of a round with each rank (`expected_round_s`).
    """
    return max(FREE_CADENCES * cadence_s, FREE_ROUNDS * median_low(expected_s.values())) if expected_s else 0.0


def slow_ranks(expected_s: Mapping[int, float], allowed_s: float) -> frozenset[int]:
    """Return the ranks whose estimated round exceeds ``allowed_s``, or an empty set if fewer than two others remain."""
    slow = frozenset(rank for rank, each_s in expected_s.items() if each_s > allowed_s)
    return slow if len(expected_s) - len(slow) >= 2 else frozenset()


class Patience:
    """Decides for which late members a coordinator waits, how long, and which members are too slow for a role.

    Args:
        grace_s: Maximum wait in seconds, set by the user, both after the quorum and for a slow rank in a round. None to
            wait only until a later round would be delayed.
        stream_safe_points: Number of safe points that the sender and the receiver of one snapshot each need.

    Attributes:
        awaited: Members whose reports the decision still waits for after the quorum was reached.
    """

    def __init__(self, grace_s: float | None, stream_safe_points: int) -> None:
        self._given_s = grace_s
        self._tolerance_s = NOISE_S if grace_s is None else grace_s
        self._stream_safe_points = stream_safe_points
        self._rounds_s: deque[float] = deque(maxlen=_RECENT_ROUND_COUNT)
        self._delayed_at = math.inf  # end of the last round that a slow rank may have delayed
        self._slow_in_round: frozenset[int] = frozenset()  # slow ranks that may have a role in the next round
        self._first_quorum_at = math.inf
        self._complete_at: float | None = None  # time of the quorum, or of the last awaited report
        self._limit_at = 0.0
        self.awaited: set[int] = set()

    @property
    def round_s(self) -> float:
        """Median duration of the latest averaging rounds in seconds, or 0 before the first."""
        return median_low(self._rounds_s) if self._rounds_s else 0.0

    @property
    def deadline(self) -> float | None:
        """Time of the next decision even if reports are missing, or None before enough members have reported."""
        return self._limit_at if self.awaited and self._complete_at is not None else self._complete_at

    def on_quorum(self, others: Mapping[int, Pace], cadence_s: float, quorum_s: float, now: float) -> None:
        """Choose the late members whose reports a decision waits for, and the deadline.

        Members that have never reported are awaited only during the first cadence after the first quorum.

        Args:
            others: Step and report times of each member that has not reported.
            quorum_s: Seconds from the first report to the quorum.
        """
        self._complete_at = now
        self._first_quorum_at = min(now, self._first_quorum_at)
        if self._given_s is not None:
            self._limit_at, self.awaited = now + self._given_s, set(others)
            return
        is_start = now - self._first_quorum_at <= max(self._tolerance_s, cadence_s)
        wait_s = max(self._tolerance_s, grace_s(cadence_s, quorum_s, self._rounds_s))
        self._limit_at = now + wait_s
        self.awaited = {
            rank
            for rank, pace in others.items()
            if (is_start if pace.silent_s == math.inf else is_expected(pace, cadence_s, wait_s))
        }

    def on_no_quorum(self) -> None:
        """Stop waiting for reports, because a decision was made or too few members have reported."""
        self._complete_at = None
        self.awaited.clear()

    def on_arrival(self, rank: int, now: float) -> None:
        """Stop waiting for a member that has reported, is lost or has left."""
        if rank in self.awaited:
            self.awaited.remove(rank)
            self._complete_at = now

    def slow_ranks(
        self, paces: Iterable[tuple[int, Pace]], cadence_s: float, now: float, *, slowest: Pace | None = None
    ) -> frozenset[int]:
        """Return the judged members that are too slow for a role in a round.

        Args:
            paces: Rank, step time and report time of each judged member. Not read if `slowest` is fast enough.
            slowest: Longest step, shortest interval and longest silence of all judged members, or None if unknown.
        """
        self._delayed_at = min(now, self._delayed_at)
        if slowest is not None and expected_round_s(slowest, self._stream_safe_points) <= max(
            self._tolerance_s, FREE_CADENCES * cadence_s
        ):
            self._slow_in_round = frozenset()
            return self._slow_in_round
        expected_s = {rank: expected_round_s(pace, self._stream_safe_points) for rank, pace in paces}
        limit_s = max(self._tolerance_s, allowed_round_s(expected_s, cadence_s))
        slow = slow_ranks(expected_s, limit_s + DELAY_SHARE * (now - self._delayed_at))
        self._slow_in_round = frozenset(rank for rank, each_s in expected_s.items() if each_s > limit_s) - slow
        return slow

    def on_round(self, named: Sequence[int], took_s: float, now: float) -> None:
        """Record that an averaging round among the ranks ``named`` has taken ``took_s`` seconds."""
        self._rounds_s.append(took_s)
        if not self._slow_in_round.isdisjoint(named):
            self._delayed_at = now
