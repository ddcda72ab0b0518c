"""Decides how long a coordinator waits for reports, and which ranks a round would have to wait for too long.

Pure functions of what members say about their own time, and `Patience`, which keeps what they need. Two ideas:

- **Grace.** Waiting for late reports is free as long as the round ends before the next reports come. So, after the
  quorum, they are waited for during ``max(0, cadence - quorum_time - round_time)`` at most, which is the adaptive grace
  window of Decoupled DiLoCo (eq. 3, ``gamma * max(0, tau * step - quorum_time - sync_time)``, with gamma 1), and only
  for ranks that can be expected by then. docs/grace.md compares it with other windows.
- **Roles.** Rounds do not overlap, so a rank whose steps are long would hold up all rounds that it has a role in. A
  round may take as long as a cadence and a quarter, or twice as long as it does with the median rank, for nothing. A
  rank that needs more takes part once the time since the last round that was held up makes that a tenth of it.
"""

import math
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from statistics import median_low
from typing import Final, NamedTuple

#: A round may take so many cadences, or so many times what it takes with the median rank, and costs no other round.
FREE_CADENCES: Final = 1.25
FREE_ROUNDS: Final = 2.0
#: Times below this say little about a rank, in seconds: hosts are busy, and timers coarse.
NOISE_S: Final = 0.1
#: The part of the time by which slow ranks may hold rounds up.
HELD_SHARE: Final = 0.1
#: A longer reported time, in seconds, is not believed: every deadline stays finite.
BELIEVED_MAX_S: Final = 3600.0
#: Steps of its own that a rank needs for its role, beside those of streams: to hear of it, and to have the result.
_ROLE_STEP_COUNT: Final = 2
_RECENT_ROUND_COUNT: Final = 9  # their median time is what a round takes


class Pace(NamedTuple):
    """Holds what a coordinator knows of a member's time, in seconds; 0 is not known.

    Attributes:
        step_s: How long its steps take; of its last two reports the shorter time.
        interval_s: The time from one report to the next; of the last two the shorter one.
        silent_s: The time since its newest report.
    """

    step_s: float
    interval_s: float
    silent_s: float


#: Half the time of Pace(...), which is made for each member in a round.
as_pace: Final[Callable[[tuple[float, float, float]], Pace]] = partial(tuple.__new__, Pace)


def believed_s(claimed_s: float) -> float:
    """Return a time that deadlines can be made of: a report may claim anything. 0 is not known."""
    if 0.0 < claimed_s <= BELIEVED_MAX_S:
        return claimed_s
    return BELIEVED_MAX_S if BELIEVED_MAX_S < claimed_s < math.inf else 0.0


def cadence_s(intervals_s: Sequence[float]) -> float:
    """Return the population's time between reports, its median member's; 0 where no interval is known."""
    known = [interval_s for interval_s in intervals_s if interval_s > 0]
    return median_low(known) if known else 0.0


def grace_s(cadence_s: float, quorum_s: float, rounds_s: Sequence[float]) -> float:
    """Return how long reports may be waited for after the quorum so that no later round is delayed.

    Args:
        cadence_s: The population's time between reports.
        quorum_s: What the quorum took, from the first report.
        rounds_s: How long the latest rounds took.
    """
    return max(0.0, cadence_s - quorum_s - (median_low(rounds_s) if rounds_s else 0.0))


def is_expected(pace: Pace, cadence_s: float, within_s: float) -> bool:
    """Tell whether a member's next report can be expected within that time.

    One that is overdue for longer than that has stopped for an unknown time. One whose interval is not known is taken
    to have the population's cadence.
    """
    return abs((pace.interval_s or cadence_s) - pace.silent_s) <= within_s


def is_late(pace: Pace, cadence_s: float) -> bool:
    """Tell whether a member without a report for a decision is a straggler, and not only between two reports."""
    return pace.silent_s > FREE_CADENCES * cadence_s


def hold_s(pace: Pace, stream_safe_points: int) -> float:
    """Return how long a round takes if this member has a role in it.

    One that is overdue is taken to be away for as long again.
    """
    step_s, interval_s, silent_s = pace
    overdue_s = silent_s - interval_s if 0 < interval_s < silent_s else 0.0
    return (_ROLE_STEP_COUNT + stream_safe_points) * step_s + overdue_s


def free_s(holds: Mapping[int, float], cadence_s: float) -> float:
    """Return how long a round may take and delay no other."""
    return max(FREE_CADENCES * cadence_s, FREE_ROUNDS * median_low(holds.values())) if holds else 0.0


def slow_ranks(holds: Mapping[int, float], allowed_s: float) -> frozenset[int]:
    """Return the members without which rounds take no longer than that; none if fewer than two would be left."""
    slow = frozenset(rank for rank, hold_s in holds.items() if hold_s > allowed_s)
    return slow if len(holds) - len(slow) >= 2 else frozenset()


class Patience:
    """Remembers whom a coordinator waits for and until when, and when slow ranks last held a round up.

    Args:
        grace_s: What the user allows for waiting: that long after the quorum, and in a round for a slow rank. None for
            what delays no later round.
        stream_safe_points: As for `RoundCoordinator`.

    Attributes:
        awaited: Members that the decision waits for, once the quorum is met.
    """

    def __init__(self, grace_s: float | None, stream_safe_points: int) -> None:
        self._given_s = grace_s
        self._tolerance_s = NOISE_S if grace_s is None else grace_s
        self._stream_safe_points = stream_safe_points
        self._rounds_s: deque[float] = deque(maxlen=_RECENT_ROUND_COUNT)
        self._held_at = math.inf  # when the last round that a slow rank may have held up ended
        self._holding: frozenset[int] = frozenset()  # those that may hold the next round up
        self._first_quorum_at = math.inf
        self._complete_at: float | None = None  # when the quorum was met, or the last awaited report came
        self._limit_at = 0.0
        self.awaited: set[int] = set()

    @property
    def round_s(self) -> float:
        """What the latest rounds took, in seconds; 0 where there was none."""
        return median_low(self._rounds_s) if self._rounds_s else 0.0

    @property
    def deadline(self) -> float | None:
        """When a decision is due, whether all have reported or not; None before the quorum is met."""
        return self._limit_at if self.awaited and self._complete_at is not None else self._complete_at

    def on_quorum(self, others: Mapping[int, Pace], cadence_s: float, quorum_s: float, now: float) -> None:
        """Decide which of the other members are waited for, and how long.

        A member that has never reported is expected within the first cadence after the first quorum.
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
        """Wait no more: a decision has been made, or reports went with a rank or became void."""
        self._complete_at = None
        self.awaited.clear()

    def on_arrival(self, rank: int, now: float) -> None:
        """Wait for a member no more: it has reported, or is gone."""
        if rank in self.awaited:
            self.awaited.remove(rank)
            self._complete_at = now

    def on_void(self, rank: int) -> None:
        """Wait for a member again, whose report counts no more."""
        self.awaited.add(rank)

    def slow_ranks(
        self, paces: Iterable[tuple[int, Pace]], cadence_s: float, now: float, *, slowest: Pace | None = None
    ) -> frozenset[int]:
        """Return those of the members that could be judged which get no role, since rounds would wait for them.

        Args:
            paces: Theirs, each with its rank. Where `slowest` is quick enough they are not looked at.
            cadence_s: The population's time between reports.
            now: The present time.
            slowest: The longest step, shortest interval and longest silence of all of them; None says nothing.
        """
        self._held_at = min(now, self._held_at)
        if slowest is not None and hold_s(slowest, self._stream_safe_points) <= max(
            self._tolerance_s, FREE_CADENCES * cadence_s
        ):
            self._holding = frozenset()
            return self._holding
        holds = {rank: hold_s(pace, self._stream_safe_points) for rank, pace in paces}
        limit_s = max(self._tolerance_s, free_s(holds, cadence_s))
        slow = slow_ranks(holds, limit_s + HELD_SHARE * (now - self._held_at))
        self._holding = frozenset(rank for rank, hold_s in holds.items() if hold_s > limit_s) - slow
        return slow

    def on_round(self, named: Sequence[int], took_s: float, now: float) -> None:
        """Note that a round has ended, which was frozen after all."""
        self._rounds_s.append(took_s)
        if not self._holding.isdisjoint(named):
            self._held_at = now
