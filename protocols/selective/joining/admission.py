"""Decides when restarted ranks are admitted to a running policy, and which member sends them its state.

A *newcomer* is the new process of a lost member. It is admitted in a separate round, in which one member sends it the
member's whole state. Rounds do not overlap, so a slow newcomer delays all other rounds. An admission therefore has a
time limit, which doubles after each failed attempt. After an attempt that exceeds its limit, the next attempt is
delayed by nine times the attempt's duration.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Final, NamedTuple

from asyncdist.protocols.ranking import order_worst_first
from asyncdist.protocols.selective.round.state import Member, ReportRecord
from asyncdist.protocols.selective.selection import Decision, SelectiveRules
from asyncdist.protocols.selective.waiting import DELAY_SHARE

#: Maximum number of restarted ranks that are admitted in one round.
NEWCOMER_COUNT_MAX: Final = 8
#: Time limit of the first attempt to admit a restarted rank: this many cadences (times between reports) or rounds,
#: whichever is longer.
_FIRST_CADENCES: Final = 2.0
_FIRST_ROUNDS: Final = 6.0


class _Failures(NamedTuple):
    """Counts failed attempts to admit a restarted rank, and defines the decision and the time after which to retry."""

    failed_count: int = 0
    after_decision: int = -1
    next_at: float = -math.inf


class Newcomers:
    """Tracks the restarted ranks that wait for admission to one policy, with their failed attempts."""

    def __init__(self, members: Mapping[int, Member], rules: SelectiveRules) -> None:
        self._members = members
        self._rules = rules
        self._failures: dict[int, _Failures] = {}
        self._admitted_after = -1  # number of the last decision before the newest admission

    def __bool__(self) -> bool:
        return bool(self._failures)

    def add(self, rank: int) -> None:
        """Add a rank that requests admission."""
        self._failures[rank] = _Failures()

    def remove(self, rank: int) -> None:
        """Remove a rank that was admitted, is lost or has left."""
        self._failures.pop(rank, None)

    def on_round(self, ranks: Sequence[int], decision_count: int, held_s: float, now: float) -> None:
        """Count a failed attempt for each restarted rank that a round should have admitted but did not.

        Args:
            decision_count: Number of decisions made. The next attempt waits for another decision.
            held_s: Duration of the round in seconds if it exceeded its time limit; otherwise 0.
        """
        for rank in ranks:
            if rank in self._failures:
                next_at = now + held_s * (1 / DELAY_SHARE - 1)
                self._failures[rank] = _Failures(self._failures[rank].failed_count + 1, decision_count, next_at)

    def allowed_s(self, ranks: Sequence[int], cadence_s: float, round_s: float) -> float:
        """Return the time limit in seconds for admitting these ranks. Infinite if ``cadence_s`` or ``round_s`` is 0."""
        first_s = max(_FIRST_CADENCES * cadence_s, _FIRST_ROUNDS * round_s)
        count = max((self._failures[rank].failed_count for rank in ranks), default=0)
        return first_s * 2 ** min(count, 16) if cadence_s and round_s else math.inf

    def next(
        self, decision_count: int, is_decision_near: bool, now: float
    ) -> tuple[Decision, dict[int, ReportRecord]] | None:
        """Return the roles and reports for a round that admits restarted ranks, or None if none can be admitted now.

        The state is sent by the member with the best metric, or the next best after each failure. If no metric is
        finite, any member that has reported can send it. While the quorum for a decision is reached, admissions and
        decisions alternate.

        Args:
            is_decision_near: Whether the quorum for the next decision is reached.
        """
        if is_decision_near and self._admitted_after == decision_count:
            return None
        waiting = [
            rank
            for rank, failures in self._failures.items()
            if failures.after_decision < decision_count and failures.next_at <= now
        ]
        reported = {
            rank: member.report
            for rank, member in self._members.items()
            if member.live and member.admitted and member.report is not None
            if now - member.report.received_at <= self._rules.max_report_age_s
        }
        if not waiting or not reported:
            return None
        first, ranks = waiting[0], tuple(sorted(waiting[:NEWCOMER_COUNT_MAX]))
        values = {rank: report.value for rank, report in reported.items() if math.isfinite(report.value)}
        donors = order_worst_first(values, self._rules.metric_mode)[::-1] if values else sorted(reported)
        donor = donors[self._failures[first].failed_count % len(donors)]
        self._admitted_after = decision_count
        judged = {donor: reported[donor]._replace(iteration=-1)}
        judged |= dict.fromkeys(ranks, ReportRecord(-1, math.nan, 0.0, now))
        return Decision(donors=(donor,), replacers=ranks, weights=(1.0,), best=donor), judged
