"""Starts, freezes and ends the rounds of selective averaging, and creates the messages for these transitions.

When a round is frozen, its donors no longer change. `protocols.selective.rounds` decides when each transition is due.
This module is part of the same state machine.
"""

import math
from collections import Counter, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

from asyncdist.protocols.ranking import order_worst_first
from asyncdist.protocols.selective.islands.migrants import Migrants
from asyncdist.protocols.selective.messages import End, PackedAssign, PackedFrozen, count_reason
from asyncdist.protocols.selective.plan import Freeze, Plan
from asyncdist.protocols.selective.roster import Member, Newcomers, ReportRecord, Roster, Send, sends_of
from asyncdist.protocols.selective.selection import Decision, SelectiveRules, reducers_of, sources_of
from asyncdist.protocols.selective.statistics import HISTORY_LENGTH, History, LeftOut
from asyncdist.protocols.selective.waiting import Patience

#: Maximum round number that is accepted from a member: half the 32-bit range of frame headers, so that numbers remain
#: for later rounds.
PLAUSIBLE_ROUND_MAX: Final = 2**31
#: Limit for the time to send a donor's optimizer and policy state, as a multiple of the time for its weights. Both are
#: counted in safe points (calls in which training code lets messages move).
STATE_STREAM_COUNT_MAX: Final = 20
#: Number of safe points that the stream of one part takes: `PART_CHUNK_COUNT` chunks with `WINDOW_COUNT` chunks in
#: flight.
_PART_SAFE_POINTS: Final = 8


@dataclass(slots=True)
class Round:
    """A coordinator's record of the averaging round in progress.

    Attributes:
        judged: Report on which the decision is based, for each rank with a role in the round.
        waiting_donors, waiting_replacers: Donors and replacers whose answers have not arrived.
        reducers: Reducers assigned at the start. Empty on the direct route.
        sources: For each replacer that shares parts on its host, the rank from which it requests each part.
        ready: Iteration of each ready donor's snapshot, by donor.
        released: Ranks to which an `End` was sent.
    """

    number: int
    began_at: float
    decision: Decision
    judged: dict[int, ReportRecord]
    deadline: float
    waiting_donors: set[int]
    waiting_replacers: set[int]
    reducers: tuple[int, ...] = ()
    sources: Mapping[int, tuple[int, ...]] = field(default_factory=dict)
    ready: dict[int, int] = field(default_factory=dict)
    released: set[int] = field(default_factory=set)
    frozen: bool = False
    admits: bool = False
    limit_at: float = math.inf  # time limit of a round that admits restarted ranks
    state_safe_points: int = 0  # safe points to send a donor's optimizer and policy state

    def start_messages(self, members: Mapping[int, Member]) -> list[Send]:
        """Return the messages that assign each rank its role in this round."""
        judged, named = self.judged, self.named
        iterations = tuple([judged[rank].iteration for rank in named])
        restarted = tuple([(rank, n) for rank in named if (n := members[rank].incarnation)])
        who = tuple(named), self.decision.replacers, iterations, self.decision.best
        plan = Plan(*who, self.admits, restarted, self.reducers, self.decision.parents).packed()
        if not self.sources:
            return sends_of(named, self.number, PackedAssign(plan))
        of = {each: PackedAssign(plan, each) for each in {(), *self.sources.values()}}
        return [Send(rank, self.number, of[self.sources.get(rank, ())]) for rank in named]

    def freeze_messages(self, metric_mode: str, timeouts: Mapping[int, float]) -> list[Send]:
        """Return the messages that list the final donors, for the ranks that average or adopt their weights.

        A rank that is only a donor needs no message, because it answers every request.

        Args:
            metric_mode: `"max"` or `"min"`, to find the best remaining donor.
            timeouts: Timeout in seconds of each rank that adopts the average.
        """
        weight_of = dict(zip(self.decision.donors, self.decision.weights, strict=True))
        donors = tuple(sorted(self.ready))
        weights = tuple([weight_of[rank] for rank in donors])
        iterations = tuple([self.ready[rank] for rank in donors])
        values = {rank: self.judged[rank].value for rank in donors}
        best = order_worst_first(values, metric_mode)[-1] if donors else -1
        reducers = tuple([rank for rank in self.reducers if rank in self.ready or rank in self.waiting_replacers])
        freeze, longest_s = Freeze(donors, weights, iterations, best, reducers).packed(), max(timeouts.values())
        of = {timeout_s: PackedFrozen(freeze, timeout_s) for timeout_s in {*timeouts.values()}}
        return [Send(rank, self.number, of[timeouts.get(rank, longest_s)]) for rank in sorted({*timeouts, *reducers})]

    @property
    def named(self) -> list[int]:
        """Ranks with a role in the round, in ascending order."""
        return sorted(self.decision.donors + self.decision.replacers)

    def timeouts_s(self, round_timeout_s: float, stream_safe_points: int) -> dict[int, float]:
        """Return the timeout of each rank that adopts the average, in seconds from its receipt of `Frozen`.

        The timeout is `round_timeout_s` plus the duration of the steps for which messages wait in the worst case. On
        the direct route, a replacer requests the snapshots from the donors in turn, after the freeze. Each donor reads
        the request in its next step, and the stream takes `stream_safe_points` steps of both ranks. Applying the
        average takes one more step.

        A newcomer also receives the size of the donor's optimizer and policy state, and then the state itself. It takes
        no steps of its own. If the donors have offered their state, each replacer receives it in the same way, between
        its steps.

        On the sharded route, more steps may pass before a replacer requests missing parts from the donors. A reducer
        needs one step to read `Frozen`, one to add up, and the steps of its own streams. A rank that fetches parts for
        its host needs the same steps. The stream of a part has small chunks and takes at least `_PART_SAFE_POINTS`
        steps.
        """
        count = stream_safe_points
        judged = self.judged
        donors_s = sum([judged[donor].step_s for donor in self.ready])
        others_s = (1 + count) * donors_s
        own_count = 1 + count * len(self.ready)
        if self.admits or self.state_safe_points:
            state_count = 3 + min(max(0, self.state_safe_points), STATE_STREAM_COUNT_MAX * count)
            others_s += state_count * donors_s
            own_count += 0 if self.admits else state_count
        if self.reducers:
            part_count = max(count, _PART_SAFE_POINTS)
            others_s += (2 + part_count) * max(judged[rank].step_s for rank in self.reducers)
            own_count += part_count
        if self.sources:
            others_s += (1 + count) * max(judged[rank].step_s for rank in self.sources)
            own_count += count
        shared_s = round_timeout_s + others_s
        return {rank: shared_s + own_count * judged[rank].step_s for rank in sorted(self.waiting_replacers)}


class RoundLifecycle:
    """Starts, freezes and ends a coordinator's averaging rounds, one at a time, and counts them.

    Attributes:
        current: Round in progress, or None between rounds.
        decided_count: Number of rounds that have started.
        routes: Number of rounds with donors, by route.
    """

    def __init__(self, rules: SelectiveRules, roster: Roster, *, stream_safe_points: int, model_nbytes: int) -> None:
        self._rules = rules
        self._roster = roster
        self._stream_safe_points = stream_safe_points
        self._model_nbytes = model_nbytes
        self.newcomers = Newcomers(roster.members, rules)
        self.migrants = Migrants(roster.members, rules.migrate_every, rules.metric_mode)
        self.patience = Patience(rules.grace_s, stream_safe_points)
        self.history = History()
        self._last_number = 0
        self._overdue: dict[int, deque[int]] = {}  # by replacer: rounds that timed out without an answer from it
        self.current: Round | None = None
        self.decided_count = self.ended_count = self.overdue_count = 0
        self.routes = Counter(direct=0, sharded=0)

    def continue_after(self, number: int) -> None:
        """Give later rounds numbers above ``number``, the number of an earlier coordinator's round."""
        self._last_number = max(self._last_number, min(number, PLAUSIBLE_ROUND_MAX))

    def start(
        self, decision: Decision, judged: dict[int, ReportRecord], now: float, admits: bool = False
    ) -> list[Send]:
        """Start a round, and return the messages that assign each rank its role.

        The donors' time limit for their snapshots is the longest step of a donor plus a quarter of the round's timeout.
        """
        with_events = self.history.with_events
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
            times = self._roster.cadence_s(), self.patience.round_s
            limit_at, reducers, sources = now + self.newcomers.allowed_s(decision.replacers, *times), (), {}
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
        self.migrants.enter(decision.guests, state.number)
        self.history.record("{:.6f} round {}: {}", now, state.number, decision)
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
        self.history.guests += [(state.number, rank) for rank in self.migrants.named if rank in state.ready]
        self.history.record("{:.6f} round {}: frozen with donors {}", now, state.number, sorted(state.ready))
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
        self.migrants.leave()
        if state.admits:
            held_s = now - state.began_at if now >= state.limit_at else 0.0
            self.newcomers.on_round(state.decision.replacers, decision_count, held_s, now)
        elif state.frozen:
            self.patience.on_round(state.named, now - state.began_at, now)
        self.ended_count += 1
        assert self.ended_count == self.decided_count, self.history.with_events("rounds overlap")
        self.history.record("{:.6f} round {}: ended, {}", now, state.number, reason)
        return sends

    def take_answer(self, rank: int, number: int) -> bool:
        """Record that a rank has applied its average, perhaps late. Return False if no such message was expected."""
        state = self.current
        if state is not None and state.number == number and state.frozen and rank in state.waiting_replacers:
            state.waiting_replacers.remove(rank)
        elif number in self._overdue.get(rank, ()):
            while self._overdue[rank].popleft() != number:
                pass  # messages arrive in order: no answer to an earlier round can follow
            self.history.ignore("Applied after the round's timeout")
        else:
            self.history.ignore("Applied from a rank that owes none")
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
        self.history.left_out.append(LeftOut(state.number, rank, reason))
        return True

    def abandon(self, state: Round, rank: int, reason: str) -> None:
        """Stop waiting for a rank that should apply the round's average, and count the reason."""
        state.waiting_replacers.discard(rank)
        count_reason(self.history.abandoned, reason)

    def _release(self, sends: list[Send], state: Round, ranks: Sequence[int], reason: str) -> None:
        """Append an `End` to ``sends`` for each of ``ranks`` that is live and has not been sent one."""
        end, number, members = End(reason), state.number, self._roster.members
        due = [rank for rank in ranks if rank not in state.released and members[rank].live]
        state.released.update(due)
        sends += sends_of(due, number, end)
