"""Keeps the ranks that ask to be admitted to a policy that runs, and chooses who gives each of them its state.

A newcomer is a new process in the place of a member that was lost. It is admitted by a round of its own, between two
others, in which one donor gives it all of its state. Newcomers that wait together are admitted together. Until it has
that state, a newcomer does not count: it is neither judged nor waited for.

Rounds do not overlap, so a newcomer that is slow holds up all of them. What an admission may take follows from what
rounds take, and is doubled after each one that took too long; the others' rounds have nine times as long before the
next attempt.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Final, NamedTuple

from asyncdist.protocols.ranking import order_worst_first
from asyncdist.protocols.selective.round.state import Member, ReportRecord
from asyncdist.protocols.selective.rules import Decision, SelectiveRules
from asyncdist.protocols.selective.waiting import HELD_SHARE

#: How many take the state of one donor in one round.
NEWCOMER_COUNT_MAX: Final = 8
#: What the first attempt may take: so many cadences, and so many times what rounds take.
_FIRST_CADENCES: Final = 2.0
_FIRST_ROUNDS: Final = 6.0


class _Failures(NamedTuple):
    """The attempts to admit one newcomer: how many have failed, and the decision and the time before the next one."""

    failed_count: int = 0
    after_decision: int = -1
    next_at: float = -math.inf


class Newcomers:
    """Keeps the newcomers of one coordinator.

    Args:
        members: of the coordinator, which changes them.
        rules: the options.
    """

    def __init__(self, members: Mapping[int, Member], rules: SelectiveRules) -> None:
        self._members = members
        self._rules = rules
        self._failures: dict[int, _Failures] = {}
        self._admitted_after = -1  # the decision after which the newest round for newcomers came

    def __bool__(self) -> bool:
        return bool(self._failures)

    def add(self, rank: int) -> None:
        """Note that a rank asks to be admitted."""
        self._failures[rank] = _Failures()

    def remove(self, rank: int) -> None:
        """Note that a rank has been admitted, or is gone."""
        self._failures.pop(rank, None)

    def on_round(self, ranks: Sequence[int], decision_count: int, held_s: float, now: float) -> None:
        """Note that a round has ended. The others' next decision comes before those that it has not admitted.

        Args:
            ranks: newcomers.
            decision_count: decisions so far.
            held_s: for how long it has held the others up, if it took longer than allowed.
            now: the present time.
        """
        for rank in ranks:
            if rank in self._failures:
                next_at = now + held_s * (1 / HELD_SHARE - 1)
                self._failures[rank] = _Failures(self._failures[rank].failed_count + 1, decision_count, next_at)

    def allowed_s(self, ranks: Sequence[int], cadence_s: float, round_s: float) -> float:
        """Return how long a round that admits these may hold the others up, once it is known what rounds take.

        Args:
            ranks: newcomers.
            cadence_s: the population's time between reports; 0 is not known.
            round_s: what rounds take; 0 is not known.
        """
        first_s = max(_FIRST_CADENCES * cadence_s, _FIRST_ROUNDS * round_s)
        count = max((self._failures[rank].failed_count for rank in ranks), default=0)
        return first_s * 2 ** min(count, 16) if cadence_s and round_s else math.inf

    def next(
        self, decision_count: int, is_decision_near: bool, now: float
    ) -> tuple[Decision, dict[int, ReportRecord]] | None:
        """Return the roles of a round that admits the next newcomers, and their reports; None where they have to wait.

        The best member gives, by the newest reports; after a failure the one after it. Where no metric is finite any
        member gives whose weights are. Nobody is judged by a report.
        They take turns with decisions, where the quorum for the next one is met.
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
        ranks = tuple(waiting[:NEWCOMER_COUNT_MAX])
        values = {rank: report.value for rank, report in reported.items() if math.isfinite(report.value)}
        donors = order_worst_first(values, self._rules.metric_mode)[::-1] if values else sorted(reported)
        donor = donors[self._failures[ranks[0]].failed_count % len(donors)]
        self._admitted_after = decision_count
        judged = {donor: reported[donor]._replace(iteration=-1)}
        judged |= dict.fromkeys(ranks, ReportRecord(-1, math.nan, 0.0, now))
        return Decision(donors=(donor,), replacers=ranks, weights=(1.0,), best=donor), judged
