"""Keeps the ranks that ask to be admitted to a policy that runs, and chooses who gives each of them its state.

A newcomer is a new process in the place of a member that was lost. It is admitted by a round of its own, between two
others, in which one donor gives it all of its state. Newcomers that wait together are admitted together. Until it has
that state, a newcomer does not count: it is neither judged nor waited for.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Final

from protocols.ranking import order_worst_first
from protocols.selective.round_state import Member, ReportRecord
from protocols.selective.rules import Decision, SelectiveRules

#: How many take the state of one donor in one round.
NEWCOMER_COUNT_MAX: Final = 8


class Newcomers:
    """Keeps the newcomers of one coordinator.

    Args:
        members: of the coordinator, which changes them.
        rules: the options.
    """

    def __init__(self, members: Mapping[int, Member], rules: SelectiveRules) -> None:
        self._members = members
        self._rules = rules
        self._attempts: dict[int, tuple[int, int]] = {}  # how many have failed, and after which decision
        self._admitted_after = -1  # the decision after which the newest round for newcomers came

    def __bool__(self) -> bool:
        return bool(self._attempts)

    def add(self, rank: int) -> None:
        """Note that a rank asks to be admitted."""
        self._attempts[rank] = 0, -1

    def remove(self, rank: int) -> None:
        """Note that a rank has been admitted, or is gone."""
        self._attempts.pop(rank, None)

    def on_round(self, ranks: Sequence[int], decision_count: int) -> None:
        """Note that a round has ended. The others' next decision comes before those that it has not admitted."""
        for rank in ranks:
            if rank in self._attempts:
                self._attempts[rank] = self._attempts[rank][0] + 1, decision_count

    def next(
        self, decision_count: int, is_decision_near: bool, now: float
    ) -> tuple[Decision, dict[int, ReportRecord]] | None:
        """Return the roles of a round that admits the next newcomers, and their reports; None where they have to wait.

        The best member gives, by the newest reports; after a failure the one after it. Nobody is judged by a report.
        They take turns with decisions, where the quorum for the next one is met.
        """
        if is_decision_near and self._admitted_after == decision_count:
            return None
        waiting = [rank for rank, (_, after) in self._attempts.items() if after < decision_count]
        if not waiting:
            return None
        usable = {
            rank: member.report
            for rank, member in self._members.items()
            if member.live and member.admitted and member.report is not None
            if math.isfinite(member.report.value)
            if now - member.report.received_at <= self._rules.max_report_age_s
        }
        if not usable:
            return None
        ranks = tuple(waiting[:NEWCOMER_COUNT_MAX])
        values = {rank: report.value for rank, report in usable.items()}
        donors = order_worst_first(values, self._rules.metric_mode)[::-1]
        donor = donors[self._attempts[ranks[0]][0] % len(donors)]
        self._admitted_after = decision_count
        judged = {donor: usable[donor]._replace(iteration=-1)}
        judged |= dict.fromkeys(ranks, ReportRecord(-1, math.nan, 0.0, now))
        return Decision(donors=(donor,), replacers=ranks, weights=(1.0,), best=donor), judged
