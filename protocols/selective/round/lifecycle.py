"""Starts, freezes and ends the rounds of selective averaging, and creates the messages for these transitions.

When a round is frozen, its donors no longer change. `protocols.selective.rounds` decides when each transition is due.
This module is part of the same state machine.
"""

import math
from collections import Counter, deque
from collections.abc import Sequence
from typing import Final

from asyncdist.protocols.selective.islands.migrants import Migrants
from asyncdist.protocols.selective.joining.admission import Newcomers
from asyncdist.protocols.selective.messages import End
from asyncdist.protocols.selective.roster import Roster
from asyncdist.protocols.selective.round.state import ReportRecord, Round, Send, sends_of
from asyncdist.protocols.selective.selection import Decision, SelectiveRules, reducers_of, sources_of
from asyncdist.protocols.selective.statistics import HISTORY_LENGTH, History, LeftOut
from asyncdist.protocols.selective.waiting import Patience

#: Maximum round number that is accepted from a member: half the 32-bit range of frame headers, so that numbers remain
#: for later rounds.
PLAUSIBLE_ROUND_MAX: Final = 2**31


class RoundLifecycle:
    """Starts, freezes and ends a coordinator's averaging rounds, one at a time, and counts them.

    Attributes:
        current: Round in progress, or None between rounds.
        decided_count: Number of rounds that have started.
        routes: Number of rounds with donors, by route.
    """

    def __init__(
        self,
        rules: SelectiveRules,
        roster: Roster,
        newcomers: Newcomers,
        migrants: Migrants,
        patience: Patience,
        history: History,
        *,
        stream_safe_points: int,
        model_nbytes: int,
    ) -> None:
        self._rules = rules
        self._roster = roster
        self._newcomers = newcomers
        self._migrants = migrants
        self._patience = patience
        self._history = history
        self._stream_safe_points = stream_safe_points
        self._model_nbytes = model_nbytes
        self._last_number = 0
        self._overdue: dict[int, deque[int]] = {}  # by replacer: rounds that timed out without its answer
        self.current: Round | None = None
        self.decided_count = self.ended_count = self.overdue_count = 0
        self.routes = Counter(direct=0, sharded=0)

    def continue_after(self, number: int) -> None:
        """Give later rounds higher numbers than ``number``, a round of an earlier coordinator."""
        self._last_number = max(self._last_number, min(number, PLAUSIBLE_ROUND_MAX))

    def start(
        self, decision: Decision, judged: dict[int, ReportRecord], now: float, admits: bool = False
    ) -> list[Send]:
        """Start a round, and return the messages that assign each rank its role.

        The donors' time limit for their snapshots is the longest step of a donor plus a quarter of the round's timeout.
        """
        with_events = self._history.with_events
        assert self.current is None, with_events("a round starts before the previous round has ended")
        assert decision.replacers, with_events(f"{decision} replaces no rank")
        assert not set(decision.donors) & set(decision.replacers), with_events(f"{decision} gives a rank two roles")
        assert sum(decision.weights) > 0 or not decision.donors, with_events(f"{decision} has no weight")
        self.decided_count += 1
        self._last_number += 1
        patience_s = max([judged[rank].step_s for rank in decision.waited_for], default=0.0)
        limit_at, hosts = math.inf, self._roster.hosts_of(decision.donors + decision.replacers)
        reducers = reducers_of(decision, self._rules.route, self._model_nbytes, self._last_number, hosts)
        sources = sources_of(decision, reducers, self._model_nbytes, hosts)
        if admits:
            times = self._roster.cadence_s(), self._patience.round_s
            limit_at, reducers, sources = now + self._newcomers.allowed_s(decision.replacers, *times), (), {}
        self.routes["sharded" if reducers else "direct"] += bool(decision.donors)
        self.current = state = Round(
            number=self._last_number,
            began_at=now,
            decision=decision,
            judged=judged,
            deadline=min(now + patience_s + self._rules.round_timeout_s / 4, limit_at),
            waiting_donors=set(decision.donors),
            waiting_replacers=set(decision.replacers),
            reducers=reducers,
            sources=sources,
            admits=admits,
            limit_at=limit_at,
        )
        self._migrants.enter(decision.guests, state.number)
        self._history.record("{:.6f} round {}: {}", now, state.number, decision)
        return state.start_messages(self._roster.members)

    def freeze(self, state: Round, now: float) -> list[Send]:
        """Remove the donors that are not ready from a round, and return the messages that start the averaging."""
        sends: list[Send] = []
        for rank in sorted(state.waiting_donors):
            self.leave_out(state, rank, "not ready in time")
        self._release(sends, state, sorted(set(state.decision.donors) - state.ready.keys()), "left out")
        state.frozen = True
        timeouts = state.timeouts_s(self._rules.round_timeout_s, self._stream_safe_points)
        sends += state.freeze_messages(self._rules.metric_mode, timeouts)
        margin_s = 2 * max([state.judged[rank].step_s for rank in timeouts]) + self._rules.round_timeout_s / 4
        state.deadline = min(now + max(timeouts.values()) + margin_s, state.limit_at)
        self._history.guests += [(state.number, rank) for rank in self._migrants.named if rank in state.ready]
        self._history.record("{:.6f} round {}: frozen with donors {}", now, state.number, sorted(state.ready))
        return sends

    def end(self, state: Round, reason: str, decision_count: int, now: float) -> list[Send]:
        """End the round, and return an `End` message for each live rank that had a role in it."""
        sends: list[Send] = []
        for rank in sorted(state.waiting_replacers):
            if state.frozen:  # the replacer may have applied the average, and its answer may be in transit
                self._overdue.setdefault(rank, deque(maxlen=HISTORY_LENGTH)).append(state.number)
                self.overdue_count += 1
            else:
                self.abandon(state, rank, reason)
        self._release(sends, state, state.named, reason)
        self.current = None
        self._migrants.leave()
        if state.admits:
            held_s = now - state.began_at if now >= state.limit_at else 0.0
            self._newcomers.on_round(state.decision.replacers, decision_count, held_s, now)
        elif state.frozen:
            self._patience.on_round(state.named, now - state.began_at, now)
        self.ended_count += 1
        assert self.ended_count == self.decided_count, self._history.with_events("rounds overlap")
        self._history.record("{:.6f} round {}: ended, {}", now, state.number, reason)
        return sends

    def take_answer(self, rank: int, number: int) -> bool:
        """Record that a rank has applied its average, even late. Return False if no such message was expected."""
        state = self.current
        if state is not None and state.number == number and state.frozen and rank in state.waiting_replacers:
            state.waiting_replacers.remove(rank)
        elif number in self._overdue.get(rank, ()):
            while self._overdue[rank].popleft() != number:
                pass  # messages arrive in order: no answer to an earlier round can follow
            self._history.ignore("Applied after the round's timeout")
        else:
            self._history.ignore("Applied from a rank that owes none")
            return False
        return True

    def depart(self, rank: int, how: str) -> None:
        """Remove a rank that is lost or has left from the round in progress."""
        self._overdue.pop(rank, None)
        state = self.current
        if state is not None and rank in state.waiting_replacers:
            self.abandon(state, rank, f"the replacer {how}")
        elif state is not None:
            self.leave_out(state, rank, how)

    def leave_out(self, state: Round, rank: int, reason: str) -> bool:
        """Remove a donor from a round. Return False if the round's donors are final, or the rank is not one of them."""
        if state.frozen or (rank not in state.waiting_donors and rank not in state.ready):
            return False
        state.waiting_donors.discard(rank)
        state.ready.pop(rank, None)
        self._history.left_out.append(LeftOut(state.number, rank, reason))
        return True

    def abandon(self, state: Round, rank: int, reason: str) -> None:
        """Stop waiting for a rank that should apply the round's average, and count the reason."""
        state.waiting_replacers.discard(rank)
        self._history.note_abandoned(reason)

    def _release(self, sends: list[Send], state: Round, ranks: Sequence[int], reason: str) -> None:
        """Append an `End` to ``sends`` for each of ``ranks`` that is live and has not been sent one."""
        end, number, members = End(reason), state.number, self._roster.members
        due = [rank for rank in ranks if rank not in state.released and members[rank].live]
        state.released.update(due)
        sends += sends_of(due, number, end)
