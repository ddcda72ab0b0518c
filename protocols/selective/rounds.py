"""State machine of the coordinator in selective averaging: decides when to judge the members, and runs each round.

`RoundCoordinator` turns events (a report, an answer, a departure, a deadline) into messages to send, without asyncio or
a clock. Assertions check these invariants: Rounds never overlap. A rank has one role in a round. Every live rank with a
role in a round receives exactly one `End`. A round always has a deadline. Unexpected messages are ignored and counted.
"""

import math
from collections.abc import Collection, Iterable, Mapping

from asyncdist.protocols.metric_trend import BlankMetrics, MetricTrend
from asyncdist.protocols.selective.lifecycle import Round, RoundLifecycle
from asyncdist.protocols.selective.messages import Admitted, Joined, Leave, Rejoin
from asyncdist.protocols.selective.roster import Departures, Member, Roster, Send, as_record, values_of
from asyncdist.protocols.selective.selection import SelectiveRules, decide
from asyncdist.protocols.selective.statistics import CoordinatorStatistics, Straggler
from asyncdist.protocols.selective.waiting import PLAUSIBLE_MAX_S, plausible_s


class RoundCoordinator:
    """State machine of the coordinator: turns reports, answers, departures and deadlines into messages to send.

    A message can cause a decision immediately, but only `on_time` checks deadlines. After a training step, the caller
    first passes on all messages that have arrived, and then calls `on_time`. A member is therefore not considered late
    merely because the coordinator was busy. `now` is the time in seconds of any monotonic clock.

    Attributes:
        migrants: Tracks the member chosen as a donor for another island, and the donors from other islands.
        departures: Finds members that have left early.
    """

    def __init__(
        self,
        members: Iterable[int],
        rules: SelectiveRules,
        *,
        stream_safe_points: int = 1,
        model_nbytes: int = 0,
        may_join: Collection[int] | None = None,
        incarnations: Mapping[int, int] | None = None,
    ) -> None:
        """Create the state machine with all members live and without reports.

        Args:
            members: Ranks of the policy that are known to take part.
            stream_safe_points: Number of safe points that sender and receiver of a snapshot each need: chunks per
                snapshot divided by chunks in flight, rounded up.
            model_nbytes: Size of a snapshot in bytes, for the choice of `route="auto"`.
            may_join: All ranks of the policy, if this coordinator replaces an earlier one. None for the first
                coordinator. Ranks that the predecessor admitted may join. A member gets no role before its `Joined` has
                arrived.
            incarnations: Number of restarts of each member's process. Missing members have 0.

        Raises:
            ValueError: ``members`` is empty or contains a rank twice, or ``stream_safe_points`` is below 1.
        """
        if stream_safe_points < 1:
            raise ValueError(f"stream_safe_points must be >= 1, got {stream_safe_points}")
        self._rules = rules
        self.roster = Roster(members, rules.quorum, have_joined=may_join is None, incarnations=incarnations or {})
        self._members = self.roster.members
        self._may_join = () if may_join is None else may_join
        self.trend = MetricTrend(rules.metric_mode)
        self.blanks = BlankMetrics()
        self.departures = Departures(rules.average_every)
        self._window_start: float | None = None  # arrival time of the first report since the last decision
        self._largest_iteration = -1
        self._acted_at_iteration: int | None = None
        self._decision_count = self._nonfinite_count = 0
        self._last_number: int | None = None  # number of the round in which the last decision was made
        lifecycle = self._lifecycle = RoundLifecycle(
            rules, self.roster, stream_safe_points=stream_safe_points, model_nbytes=model_nbytes
        )
        self._newcomers, self.migrants, self._patience = lifecycle.newcomers, lifecycle.migrants, lifecycle.patience
        history = self._history = lifecycle.history
        self._record, self._record_entry = history.record, history.record_entry
        self._ignore, self._with_events = history.ignore, history.with_events

    # ---------------------------------------------------------------- events

    def on_report(
        self, rank: int, iteration: int, value: float, step_time_s: float, now: float, *, interval_s: float = 0.0
    ) -> tuple[Send, ...]:
        """Handle a member's report, unless it was measured before the member's last average was applied."""
        member = self._members.get(rank)
        if member is None or not (member.live and member.admitted and member.joined):
            self.departures.note_report(rank, iteration)
            return self._on_strange_report(rank)
        self._record_entry(("{:.6f} rank {} reports {} at iteration {}", (now, rank, value, iteration)))
        member.report_count += 1
        # Nearly all values are plausible. They are checked here, because calling plausible_s() takes as long as ten
        # comparisons.
        step_s = step_time_s if 0.0 < step_time_s <= PLAUSIBLE_MAX_S else plausible_s(step_time_s)
        interval_s = interval_s if 0.0 < interval_s <= PLAUSIBLE_MAX_S else plausible_s(interval_s)
        member.record_report(step_s, interval_s, now)
        if not math.isfinite(value):
            self._nonfinite_count += 1
        if iteration > self._largest_iteration:
            self._largest_iteration = iteration
        if self._history.stragglers:
            self._history.note_arrival(rank, now)
        if member.applied_iteration is not None and iteration <= member.applied_iteration:
            self._ignore("Report from before the average was applied")
            return ()
        member.report = as_record((iteration, value, step_s, now))
        if member.fresh:  # an earlier report of the member is already counted
            return ()
        roster, patience = self.roster, self._patience
        member.fresh = True
        roster.fresh_count += 1
        if patience.awaited:
            patience.on_arrival(rank, now)
        if self._window_start is None:
            self._window_start = now
        # Only two reports can cause a transition: the report that reaches the quorum, and the last missing report.
        changes_nothing = roster.fresh_count < roster.quorum_count or patience.deadline is not None
        if changes_nothing and roster.fresh_count < roster.live_count and not self._newcomers:
            return ()
        return self._advance(now)

    def _on_strange_report(self, rank: int) -> tuple[Send, ...]:
        if rank not in self._members and rank in self._may_join:  # an earlier coordinator has admitted it
            return (Send(rank, 0, Rejoin()),)
        member = self._live(rank, "Report")
        if member is None or not member.admitted:
            return ()
        self._ignore("Report from a rank that has not joined")
        return (Send(rank, 0, Rejoin()),)

    def on_joined(self, rank: int, joined: Joined, now: float) -> tuple[Send, ...]:
        """Handle the state and the newest report that a member sends to a new coordinator."""
        if self.migrants.on_joined(rank, joined, now):
            self._lifecycle.continue_after(joined.last_round)
            return ()
        if rank not in self._members and rank in self._may_join:
            self.roster.add(rank)
        member = self._live(rank, "Joined")
        if member is None or not member.admitted:
            return ()
        self._record("{:.6f} rank {} joins: {}", now, rank, joined)
        member.joined, member.incarnation = True, joined.incarnation
        self._lifecycle.continue_after(joined.last_round)
        if joined.applied_iteration >= 0:
            member.applied_iteration = max(joined.applied_iteration, member.applied_iteration or 0)
        if joined.judged_iteration >= 0:
            self._acted_at_iteration = max(joined.judged_iteration, self._acted_at_iteration or 0)
        # The member may have missed messages about admissions of restarted ranks.
        admissions = tuple(Send(rank, 0, Admitted(*known)) for known in self.roster.live_members() if known[1])
        if joined.iteration < 0:
            return admissions
        facts = joined.iteration, joined.value, joined.step_time_s
        return (*admissions, *self.on_report(rank, *facts, now, interval_s=joined.interval_s))

    def members(self) -> tuple[tuple[int, int], ...]:
        """Return the rank and the number of restarts of each live member."""
        return self.roster.live_members()

    def on_newcomer(self, rank: int, incarnation: int, now: float) -> tuple[Send, ...]:
        """Handle an admission request from a restarted rank. Requests are repeated, because answers can be lost."""
        member = self._members.get(rank)
        if member is not None and member.live and member.admitted:
            member.incarnation = incarnation  # an earlier coordinator has admitted it, but the message was lost
            return (Send(rank, 0, Admitted(rank, incarnation)),)
        if member is not None and (member.live or (member.admitted and member.incarnation == incarnation)):
            return ()  # a repeated request, or an outdated request of an admitted rank that has left
        self._record("{:.6f} rank {} asks to be admitted", now, rank)
        self.roster.add_newcomer(rank, incarnation)
        self.departures.forget(rank)
        self._newcomers.add(rank)
        return self._advance(now)

    def on_ready(
        self, rank: int, round: int, iteration: int, now: float, *, state_safe_points: int = 0
    ) -> tuple[Send, ...]:
        """Record that a donor has copied its weights. Start the averaging if all donors have answered."""
        state = self._round_of(rank, round, "Ready")
        if state is None:
            return ()
        if rank not in state.waiting_donors:
            self._ignore("Ready from a rank that owes none")
            return ()
        self._record_entry(("{:.6f} round {}: donor {} is ready with iteration {}", (now, round, rank, iteration)))
        state.waiting_donors.remove(rank)
        state.ready[rank] = iteration
        state.state_safe_points = max(state.state_safe_points, state_safe_points)
        if state.waiting_donors and state.waiting_replacers:
            return ()
        return self._advance(now)

    def on_decline(self, rank: int, round: int, reason: str, now: float) -> tuple[Send, ...]:
        """Remove a rank that declines its role. A donor can be removed only before the averaging starts."""
        state = self._round_of(rank, round, "Decline")
        if state is None:
            return ()
        if rank in state.waiting_replacers:
            state.waiting_replacers.remove(rank)
        elif not self._lifecycle.leave_out(state, rank, reason):
            self._ignore("Decline from a rank that is bound or already out")
            return ()
        self._members[rank].decline_count += 1
        self._record("{:.6f} round {}: rank {} declines: {}", now, round, rank, reason)
        return self._advance(now)

    def on_applied(self, rank: int, round: int, iteration: int, now: float) -> tuple[Send, ...]:
        """Record that a rank has loaded its average, which invalidates its reports up to `iteration`.

        The reports are invalid even if the round has timed out, because the rank's weights have changed.
        """
        member = self._live(rank, "Applied")
        if member is None or not self._lifecycle.take_answer(rank, round):
            return ()
        admissions = () if member.admitted else self._admit(rank, member, now)
        self._record("{:.6f} round {}: replacer {} applied at iteration {}", now, round, rank, iteration)
        member.applied_count += 1
        member.applied_iteration = max(iteration, -1 if member.applied_iteration is None else member.applied_iteration)
        if member.report is not None and member.report.iteration <= member.applied_iteration:
            member.report = None
            self.roster.mark(member, fresh=False)
            self._patience.awaited.add(rank)
        return (*admissions, *self._advance(now))

    def on_abandoned(self, rank: int, round: int, reason: str, now: float) -> tuple[Send, ...]:
        """Record that a rank has abandoned its average. The round continues for the other ranks."""
        state = self._round_of(rank, round, "Abandoned")
        if state is None:
            return ()
        if rank not in state.waiting_replacers:
            self._ignore("Abandoned from a rank that owes nothing")
            return ()
        self._record("{:.6f} round {}: replacer {} abandons: {}", now, round, rank, reason)
        self._lifecycle.abandon(state, rank, reason)
        return self._advance(now)

    def on_leave(self, rank: int, now: float) -> tuple[Send, ...]:
        """Remove a member that has left the policy. The member ends its own streams in both directions."""
        return self._depart(rank, "left", now)

    def on_lost(self, rank: int, now: float) -> tuple[Send, ...]:
        """Remove a lost member, so that no decision or round waits for it."""
        return self._depart(rank, "was lost", now)

    def on_time(self, now: float) -> tuple[Send, ...]:
        """Carry out the transitions whose deadlines have passed. The caller must first pass on all arrived messages."""
        return self._advance(now, timers=True)

    def on_stop(self) -> tuple[Send, ...]:
        """Return the messages that notify all live members that this coordinator is stopping."""
        return tuple(Send(rank, 0, Leave()) for rank in self.roster.live_ranks())

    # ---------------------------------------------------------------- state

    def next_deadline(self) -> float | None:
        """Return the time at which :meth:`on_time` must be called, or None if only a message can cause a transition."""
        state = self._lifecycle.current
        return self._patience.deadline if state is None else state.deadline

    @property
    def finished(self) -> bool:
        """True if every member has left or is lost."""
        return self.roster.live_count == 0

    def statistics(self) -> CoordinatorStatistics:
        """Return this coordinator's counts of reports, decisions and rounds."""
        members = self.migrants.without_guests()
        return CoordinatorStatistics(
            reports={rank: member.report_count for rank, member in members.items()},
            nonfinite_report_count=self._nonfinite_count,
            decision_count=self._decision_count,
            rounds_decided=self._lifecycle.decided_count,
            rounds_ended=self._lifecycle.ended_count,
            routes=dict(self._lifecycle.routes),
            applied={rank: member.applied_count for rank, member in members.items()},
            abandoned=dict(self._history.abandoned),
            declines={rank: member.decline_count for rank, member in members.items()},
            overdue_count=self._lifecycle.overdue_count,
            left_out=tuple(self._history.left_out),
            stragglers=tuple(straggler for straggler, _ in self._history.stragglers),
            ignored=dict(self._history.ignored),
            emigrant_count=self.migrants.emigrant_count,
            guests=tuple(self._history.guests),
        )

    # ---------------------------------------------------------------- transitions

    def _advance(self, now: float, *, timers: bool = False) -> tuple[Send, ...]:
        """Carry out all due transitions, and return the messages to send. Check deadlines only if `timers` is true."""
        sends: list[Send] = []
        self._watch_quorum(now)
        while self._transition(sends, now, timers):
            self._watch_quorum(now)
        members = self._members
        for send in sends:
            member = members.get(send.dest)
            assert member is None or member.live, self._with_events(f"{send} goes to a rank that is gone")
        return tuple(sends)

    def _transition(self, sends: list[Send], now: float, timers: bool) -> bool:
        state = self._lifecycle.current
        if state is None:
            is_due, is_near = self._decision_is_due(now, timers), self._patience.deadline is not None
            admission = self._newcomers.next(self._decision_count, is_near, now) if self._newcomers else None
            if admission is not None:
                sends += self._lifecycle.start(*admission, now, admits=True)
            elif is_due:
                self._judge(sends, now)
            return is_due or admission is not None
        time_is_up = timers and now >= state.deadline
        if not state.waiting_replacers:
            self._end(sends, state, "every replacer has answered", now)
        elif not state.frozen and (time_is_up or not state.waiting_donors):
            if state.decision.donors and not state.ready:
                self._end(sends, state, "no donor was ready", now)
            else:
                sends += self._lifecycle.freeze(state, now)
        elif time_is_up:
            self._end(sends, state, "time is up", now)
        else:
            return False
        return True

    def _watch_quorum(self, now: float) -> None:
        if not self.roster.live_count or self.roster.fresh_count < self.roster.quorum_count:
            self._patience.on_no_quorum()
        elif self._patience.deadline is None:
            start = now if self._window_start is None else self._window_start
            self._patience.on_quorum(self.roster.paces_of_others(now), self.roster.cadence_s(), now - start, now)

    def _decision_is_due(self, now: float, timers: bool) -> bool:
        """Return whether all live members have reported, or enough have and the wait for the others is over."""
        deadline = self._patience.deadline
        return deadline is not None and (
            self.roster.fresh_count == self.roster.live_count or (timers and now >= deadline)
        )

    def _judge(self, sends: list[Send], now: float) -> None:
        """Judge the members' newest reports, and start an averaging round if any ranks must adopt an average."""
        self._decision_count += 1
        start = now if self._window_start is None else self._window_start
        usable = self.roster.reported_since(now - self._rules.max_report_age_s)
        members = self._members
        paces = ((rank, members[rank].pace(now)) for rank in usable)
        slowest = self.roster.slowest_pace(usable, now)
        slow = self._patience.slow_ranks(paces, self.roster.cadence_s(), now, slowest=slowest)
        late = self.roster.stragglers(slow, start, now)
        self._history.stragglers += [(Straggler(self._decision_count, rank, after_s), start) for rank, after_s in late]
        self.roster.mark_reports_judged()
        self._window_start = None
        judged = {rank: report for rank, report in usable.items() if rank not in slow} if slow else usable
        self.migrants.on_decision(self._decision_count, judged)
        self.departures.on_decision((report.iteration for report in usable.values()), now)
        self.trend.add(report.value for report in judged.values())
        self.blanks.add(report.value for report in judged.values())
        guests = self.migrants.usable(judged, now - self._rules.max_report_age_s)
        numbers = self._next_numbers()
        decision = decide(values_of(judged), self._rules, values_of(guests), numbers=numbers)
        if decision is None or self._is_cooling_down():
            self._record("{:.6f} decision {} over {}: no action", now, self._decision_count, sorted(usable))
            return
        self._acted_at_iteration = self._largest_iteration
        sends += self._lifecycle.start(decision, usable | guests if guests else usable, now)

    def _next_numbers(self) -> range:
        """Return the numbers of the rounds since the last decision.

        The numbers are computed from the reported iterations, so that they continue under the next coordinator and
        after a resume from a checkpoint. A new coordinator starts at the round number of the first report that it
        received from the member with the most reports.
        """
        number = (self._largest_iteration + 1) // self._rules.round_iterations
        last = self._last_number
        if last is None:
            last = max(0, number - max((member.report_count for member in self._members.values()), default=1))
        self._last_number = max(number, last + 1)
        return range(last + 1, self._last_number + 1)

    def _is_cooling_down(self) -> bool:
        """Return whether the fastest member has completed too few iterations since the last averaging round."""
        if self._rules.threshold is None or self._acted_at_iteration is None:
            return False
        return self._largest_iteration - self._acted_at_iteration < self._rules.cooldown

    def _end(self, sends: list[Send], state: Round, reason: str, now: float) -> None:
        sends += self._lifecycle.end(state, reason, self._decision_count, now)

    def _depart(self, rank: int, how: str, now: float) -> tuple[Send, ...]:
        self.migrants.remove(rank)
        member = self._members.get(rank)
        if member is None or not member.live:
            return ()
        self._record("{:.6f} rank {} {}", now, rank, how)
        if how == "left" and member.admitted and member.joined:
            last = max(-1 if member.report is None else member.report.iteration, member.applied_iteration or -1)
            self.departures.add(rank, last, now)
        self.roster.depart(member)
        self._patience.on_arrival(rank, now)
        self._newcomers.remove(rank)
        self._lifecycle.depart(rank, how)
        return self._advance(now)

    # ---------------------------------------------------------------- helpers

    def _admit(self, rank: int, member: Member, now: float) -> tuple[Send, ...]:
        self._record("{:.6f} rank {} is admitted", now, rank)
        self.roster.admit(member)
        self._newcomers.remove(rank)
        # Members that have not joined may already have left. They are notified when they join.
        dests = [dest for dest, other in self._members.items() if other.live and (other.joined or not other.admitted)]
        return tuple(Send(dest, 0, Admitted(rank, member.incarnation)) for dest in dests)

    def _live(self, rank: int, kind: str) -> Member | None:
        """Return the live member that sent a message. If there is none, count the message as ignored."""
        member = self._members.get(rank)
        if member is None or not member.live:
            self._ignore(f"{kind} from a rank that is {'gone' if member else 'not a member'}")
            return None
        return member

    def _round_of(self, rank: int, number: int, kind: str) -> Round | None:
        """Return the round in progress if a message belongs to it. Otherwise count the message as ignored."""
        member, state = self._members.get(rank), self._lifecycle.current
        if member is None or not member.live:
            self._live(rank, kind)  # counts the message as ignored
            return None
        if state is None or state.number != number:
            self._ignore(f"{kind} of another round")
            return None
        return state
