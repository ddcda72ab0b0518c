"""Agreement within a group of ranks.

Every collective starts with an agreement. Each member sends the leader a description of its intended start, as named
values. The leader (:mod:`asyncdist.collectives.agreement.led_agreements`) compares them and answers all members with
one verdict. A collective is therefore entered only if all members will enter it. A program that would hang otherwise
gets an error that names the first difference or the missing ranks. A member that cannot start, for example because of a
wrong argument, objects, and the others raise its exception.

Members that name different groups cannot be compared by one leader. For some starts, mainly of groups, ranks detect
that they wait for each other in different starts (:mod:`asyncdist.collectives.agreement.rival_starts`). A rank makes
only one start at a time that blocks or takes a number (:mod:`asyncdist.collectives.start_turns`), and may ask the
leader to join later.

A member that gives up notifies the leader, but cannot know whether the leader has already decided. Each member that has
joined gets one verdict, and if that is "go", the others count on it. Therefore
:mod:`asyncdist.collectives.agreed_start` finishes every start, even if its caller was cancelled. If the leader is lost
after it has answered only some members, they pass its verdict on to each other, provided that the started operation can
continue without the leader (:mod:`asyncdist.collectives.agreement.termination`).

Members of a large agreement join, and receive the verdict, along a tree
(:mod:`asyncdist.collectives.agreement.relays`). If the leader leaves while its verdict may be on its way, they ask the
leader directly.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final

from asyncdist.collectives.agreement.comings import Comings
from asyncdist.collectives.agreement.incarnations import Incarnations
from asyncdist.collectives.agreement.led_agreements import LedAgreements
from asyncdist.collectives.agreement.messages import (
    Agreed,
    AgreementKey,
    DecisionRequest,
    Gathered,
    Inquiry,
    Join,
    Meeting,
    Objection,
    Runs,
    Spread,
    Verdict,
    Withdraw,
)
from asyncdist.collectives.agreement.relays import Relays
from asyncdist.collectives.agreement.rival_starts import Rivals
from asyncdist.collectives.agreement.termination import Termination
from asyncdist.collectives.agreement.verdicts import (
    POSTPONED,
    Absences,
    Absentees,
    Caller,
    Postponed,
    check_room,
    is_go,
    raise_refusal,
    start_timeout_error,
)
from asyncdist.errors import AsyncdistError, ClosedError, RankLostError
from asyncdist.tensors.serialization import words_of
from asyncdist.transports.rank_sets import RankSet
from asyncdist.waits import WaitId, WaitKind

if TYPE_CHECKING:
    from asyncdist.messaging.channels import Channel
    from asyncdist.messaging.engine import Engine

#: Additional seconds that a member waits for the verdict, so that the leader times out first and names the missing
#: ranks.
MEMBER_PATIENCE_S: Final = 5.0
#: The error that the other members receive if this rank was cancelled.
_CANCELLED: Final = ("CancelledError", "it was cancelled while it waited for the others")


class Agreements:
    """Carries out all agreements of one rank, over the world's system channel.

    Args:
        engine: Engine of this rank.
        channel: Channel for sending. The world receives from it and calls the ``on_`` methods.
        rank: This rank.

    Attributes:
        incarnations: Incarnations of restarted ranks.
        relays: Relay the messages of large agreements along a tree.
        comings: This rank's own joins of large agreements.
        led: Agreements that this rank leads.
        rivals: Finds starts in which ranks wait for each other.
        termination: Ends agreements whose leader is lost.
    """

    def __init__(self, engine: Engine, channel: Channel[Any], rank: int) -> None:
        self._engine = engine
        self._channel = channel
        self._rank = rank
        self._verdicts: dict[AgreementKey, Verdict] = {}
        self._counts: Counter[AgreementKey] = Counter()  # number of starts by the key for all occurrences
        self._ahead: set[AgreementKey] = set()  # agreements that this rank has counted but not joined
        self.incarnations = Incarnations(rank, engine.transport.incarnation)
        self._absences = Absences(self.incarnations)
        self.relays = Relays(engine, rank, self._send, self._absences.gone)
        self.comings = Comings(self.relays, self._absences, self._send_anyway)
        self.led = LedAgreements(
            rank, self._send, self._send_anyway, self._deliver, self._has_come, self._absences, self.relays
        )
        self.rivals = Rivals(engine, rank, self.led.joins, self._send, self._object, self._next_occurrence)
        self.termination = Termination(engine, rank, self._send)
        self._forsaken: set[AgreementKey] = set()
        self._is_failing = False
        self.is_interrupted: Callable[[], bool] = lambda: False

    async def agree(
        self,
        ranks: Sequence[int],
        subject: str,
        values: Mapping[str, str],
        *,
        timeout_s: float | None,
        leader: int | None = None,
        taken: Runs = (),
        hold_s: float = 0.0,
        bound_to: tuple[int, ...] = (),
    ) -> Agreed:
        """Wait until all ``ranks`` are about to start the same operation.

        Args:
            ranks: All members, including this rank.
            subject: Name of the operation; equal on all ranks. Repetitions are counted.
            values: Named values that must be equal on all ranks. A leader that is not a member may pass none.
            timeout_s: Seconds that the leader waits for the last member; None for no limit.
            leader: Rank that compares the values; by default the first of ``ranks``.
            taken: Numbers that are in use on this rank. All members receive the smallest number that is unused on all.
            hold_s: Seconds for which a member polls without yielding to the loop while it waits for the verdict.
            bound_to: Further ranks whose loss ends the agreement.

        Raises:
            StartTimeoutError: Some ranks did not join in time; the error names them.
            DisagreementError: A value differs, or two members wait for each other in different agreements.
            ClosedError: A member has left the world, or has withdrawn from the subject.
            RankLostError: A member, or a rank of ``bound_to``, is lost.
            RemoteError: A member has objected, or was cancelled in this agreement.
            CancelledError: This rank has given up (:meth:`give_up`), and the leader has released it.

        **Cancellation**: the other members get RemoteError, unless all had joined, because then they count on this
        rank. Therefore the work after "go" must run in a task that only a failure of the job cancels
        (:mod:`asyncdist.collectives.agreed_start`).
        """
        meeting = self.next_meeting(ranks, subject, leader, bound_to)
        return await self.meet(meeting, values, timeout_s=timeout_s, taken=taken, hold_s=hold_s)

    def next_meeting(
        self,
        ranks: Sequence[int],
        subject: str,
        leader: int | None = None,
        bound_to: tuple[int, ...] = (),
        *,
        outlives_leader: bool = False,
    ) -> Meeting:
        """Count one more start of ``subject``; :meth:`meet` or :meth:`stay_away` must follow.

        The occurrence is counted when the start is requested, not when its turn begins, so that an abandoned start has
        the same number on all ranks.
        """
        key = self._next_occurrence(self.incarnations.key_of(subject, ranks))
        leader = ranks[0] if leader is None else leader
        self._ahead.add(key)
        return Meeting(key, tuple(ranks), leader, self._engine.loop.time(), bound_to, outlives_leader)

    def second_meeting(self, meeting: Meeting) -> Meeting:
        """Return a second meeting for the start of ``meeting``, which all members have joined; none may stay away."""
        return Meeting(
            dataclasses.replace(meeting.key, is_second=True), meeting.ranks, meeting.leader, self._engine.loop.time()
        )

    async def meet(
        self,
        meeting: Meeting,
        values: Mapping[str, str],
        *,
        timeout_s: float | None,
        taken: Runs = (),
        hold_s: float = 0.0,
        caller: Caller | None = None,
        mark: int | None = None,
    ) -> Agreed:
        """Agree as :meth:`agree` does, for a start that was counted before; the timeout began then.

        Args:
            meeting: Result of :meth:`next_meeting`.
            values, timeout_s, taken, hold_s: See :meth:`agree`.
            caller: Notified of the progress.
            mark: A number that may differ. All members receive up to two different marks, from which they know whether
                all are equal.

        Raises:
            AsyncdistError: As :meth:`agree`.
            Postponed: The leader has released this rank, which is to meet again.
        """
        key = meeting.key
        self._ahead.discard(key)
        join = Join(key.text, tuple(sorted(values.items())), taken, () if mark is None else (mark,))
        if caller is not None:
            caller.on_asked()
        gone = self._absences.of(meeting)
        if meeting.outlives_leader:
            self.termination.expect(key)
        try:
            if self._rank == meeting.leader:
                verdict, first = await self._lead(meeting, join, gone, timeout_s)
            else:
                verdict, first = await self._follow(meeting, join, gone, timeout_s, hold_s, caller), join
        except asyncio.CancelledError:
            if self._verdicts.pop(key, None) is None:
                self._forsaken.add(key)
                self._ask_to_go(meeting)
            raise
        finally:
            self.termination.expect_no_more(key)
            self.comings.end(key)
        rival = self.rivals.rival_of(key, verdict.refusal)
        if rival is not None:
            its_key = key if rival.key == key.of_all_occurrences else self._next_occurrence(rival.key)
            self._object(Objection(its_key.text, "", rival.text), rival.leader)
        if verdict.objector == self._rank:
            raise Postponed if verdict.difference == POSTPONED else asyncio.CancelledError
        raise_refusal(verdict, self._rank)
        return Agreed(verdict.agreed, dict(first.values), key.occurrence, verdict.marks)

    def postpone(self, meeting: Meeting) -> None:
        """Ask the leader to release this rank from ``meeting``, so that :meth:`meet` raises :class:`Postponed`.

        If all members have joined, the leader ignores the request.
        """
        key = meeting.key
        text = f"rank {self._rank} joins another start first"
        self._object(Objection(key.text, POSTPONED, text), meeting.leader)
        self._engine.recheck()

    def object(self, ranks: Sequence[int], subject: str, error: BaseException) -> None:
        """Notify the others, instead of :meth:`agree`, that ``error`` keeps this rank from starting ``subject``."""
        key = self._next_occurrence(self.incarnations.key_of(subject, ranks))
        self._object(Objection(key.text, *words_of(error)), ranks[0])

    def stay_away(self, meeting: Meeting, error: Exception | None = None) -> None:
        """Notify the others, instead of :meth:`meet`, that ``error`` or a cancellation keeps this rank away."""
        self._ahead.discard(meeting.key)
        self._ask_to_go(meeting, words_of(error) if error is not None else _CANCELLED)

    @contextlib.contextmanager
    def objecting(self, ranks: Sequence[int], subject: str) -> Iterator[None]:
        """Check a collective's arguments in the body, before :meth:`agree`; errors are also sent to the others."""
        try:
            yield
        except Exception as error:
            self.object(ranks, subject, error)
            raise

    def _object(self, objection: Objection, leader: int) -> None:
        if leader == self._rank:
            self.led.on_objection(objection, leader)
        else:
            self.comings.say_directly(objection.key, leader)
            self._send(objection, leader)

    def give_up(self, meeting: Meeting) -> bool:
        """Ask the leader to continue without this rank, because the caller of the start has given up.

        Returns:
            Whether the verdict "go" has already arrived. If it has not, it may still arrive.
        """
        self._engine.poll()  # the verdict may have arrived while the loop was blocked
        verdict = self._verdicts.get(meeting.key)
        if verdict is None:
            self._ask_to_go(meeting)
        return verdict is not None and is_go(verdict)

    def _ask_to_go(self, meeting: Meeting, words: tuple[str, str] = _CANCELLED) -> None:
        if not self.is_ending:
            with contextlib.suppress(AsyncdistError):  # no other rank is left
                self._object(Objection(meeting.key.text, *words), meeting.leader)
            self._engine.recheck()  # the leader itself waits, too

    @property
    def is_ending(self) -> bool:
        """Whether the job or this rank is failing, so that a cancelled start need not wait for a verdict."""
        return self._engine.failure is not None or self._is_failing or self.is_interrupted()

    def on_own_failure(self) -> None:
        """Note that a failed task will end this rank, so that the following cancellations are not sent."""
        self._is_failing = True

    def withdraw(self, ranks: Sequence[int], subject: str) -> None:
        """Never agree to ``subject`` again: the other ``ranks`` get ClosedError when they try."""
        key = self.incarnations.key_of(subject, ranks)
        if self.relays.carry(key):
            self.led.withdrawn.add(key)
        message = Withdraw(key.text, self.incarnations.losses(self._absences.lost))
        for rank in ranks:
            if rank != self._rank:
                self._send(message, rank)

    def forget(self, ranks: Sequence[int], subject: str) -> None:
        """Forget ``subject``, from which all members have withdrawn."""
        key = self.incarnations.key_of(subject, ranks)
        self._counts.pop(key, None)
        self._absences.withdrawn.pop(key, None)
        self.led.withdrawn.discard(key)

    def _send(self, message: Any, rank: int) -> None:
        """Send to ``rank``, unless it has left or was lost; the transport may know of a loss a little earlier."""
        if rank not in self._absences.gone:
            with contextlib.suppress(RankLostError):
                self._channel.send_nowait(message, rank)

    def _send_anyway(self, message: Any, rank: int) -> None:
        """Send to ``rank``, even if it has left."""
        with contextlib.suppress(RankLostError, ClosedError):
            self._channel.send_nowait(message, rank)

    def _next_occurrence(self, key: AgreementKey) -> AgreementKey:
        self._counts[key] += 1
        return AgreementKey(key.subject, key.ranks, self._counts[key])

    async def _lead(
        self, meeting: Meeting, join: Join, gone: Absentees, timeout_s: float | None
    ) -> tuple[Verdict, Join]:
        key = meeting.key
        over = self.led.over.hear(key, self._rank)
        if over is not None:
            return over, join
        joins = self.led.joins.setdefault(key, {})
        joins[self._rank] = join
        await self._until_all_have_come(meeting, joins, gone, timeout_s)
        over = self._verdicts.pop(key, None)
        return self.led.decide(meeting, gone.ranks(), timeout_s or 0.0) if over is None else (over, join)

    async def _until_all_have_come(
        self, meeting: Meeting, joins: Mapping[int, Join], gone: Absentees, timeout_s: float | None
    ) -> None:
        """Wait until all members have joined, one of them will never join, or the time is up."""
        key, ranks = meeting.key, meeting.ranks

        def is_over() -> bool:
            return len(joins) == len(ranks) or key in self._verdicts or bool(gone.ranks())

        deadline = None if timeout_s is None else meeting.began_at + timeout_s
        what = WaitId(WaitKind.OTHER_MEMBERS, name=key.text)

        def absent() -> Iterator[int]:
            return (rank for rank in ranks if rank not in joins)

        is_told = await self._engine.until(is_over, what, deadline=deadline, peers=absent)
        if not is_told and timeout_s is not None and self.relays.carry(key):
            self.led.on_inquiry(Inquiry(key.text, timeout_s))  # calls them first
            await self._engine.until(is_over, what, peers=absent)

    async def _follow(
        self,
        meeting: Meeting,
        join: Join,
        gone: Absentees,
        timeout_s: float | None,
        hold_s: float,
        caller: Caller | None,
    ) -> Verdict:
        key, leader = meeting.key, meeting.leader
        deadline = None if timeout_s is None else meeting.began_at + timeout_s
        is_large, has_asked = self.relays.carry(key), False

        def has_no_leader() -> bool:
            if is_large and has_asked:  # a leaving leader still answers, and "go" may be on its way
                return leader in self._absences.lost or self.termination.excludes(key, leader)
            return leader in gone.ranks() or self.termination.excludes(key, leader)

        def is_over() -> bool:
            return key in self._verdicts or has_no_leader() or bool(gone.lost_beside())

        def on_late(missing: tuple[int, ...]) -> None:
            if caller is not None:
                caller.on_time_up(
                    start_timeout_error(Verdict(join.subject, missing=missing, waited_s=timeout_s or 0.0))
                )

        if is_large and (key, leader) in self.relays.heard:
            self._take(self.relays.heard[key, leader])
        if not has_no_leader():
            has_asked = True
            self.comings.come(join, leader) if is_large else self._send(join, leader)
        self._hold(is_over, hold_s)
        what = WaitId(WaitKind.VERDICT, peer=leader, name=join.subject)
        is_told = await self._engine.until(is_over, what, deadline=deadline)
        if not is_told and deadline is not None and timeout_s is not None:
            with contextlib.suppress(AsyncdistError):  # the leader cannot be asked
                self.comings.say_directly(key, leader)
                self._send(Inquiry(key.text, timeout_s), leader)
            is_told = await self._engine.until(is_over, what, deadline=deadline + MEMBER_PATIENCE_S)
        if not is_told:
            if caller is None:
                self._forsaken.add(key)
                return Verdict(join.subject, missing=(leader,), waited_s=timeout_s or 0.0)
            on_late((leader,))
            await self._engine.until(is_over, what)
        if meeting.outlives_leader and has_asked and key not in self._verdicts and has_no_leader():
            late_at = None if deadline is None else deadline + MEMBER_PATIENCE_S
            await self.termination.ask(meeting, gone.ranks, lambda: key in self._verdicts, on_late, late_at)
        verdict = self._verdicts.pop(key, None)
        return verdict or self._verdict_without(meeting, gone, is_leaderless=has_no_leader())

    def _verdict_without(self, meeting: Meeting, gone: Absentees, *, is_leaderless: bool) -> Verdict:
        """Return this rank's own conclusion about a meeting for whose verdict it no longer waits."""
        key, leader = meeting.key, meeting.leader
        all_lost = self._absences.lost_to(key)
        lost = tuple(rank for rank in (*meeting.ranks, *meeting.bound_to) if rank in all_lost)
        if leader in gone.ranks():
            return Verdict(key.text, gone=(leader,), lost=lost)
        if is_leaderless:
            return Verdict(key.text, gone=(leader,), lost=(leader, *lost))
        self._forsaken.add(key)
        return Verdict(key.text, gone=lost, lost=lost)

    def _hold(self, is_over: Callable[[], bool], seconds: float) -> None:
        """Poll for ``seconds`` without yielding, because another task of this rank might compute."""
        deadline = time.perf_counter() + seconds
        while seconds and not is_over() and time.perf_counter() < deadline:
            self._engine.poll()

    def _has_come(self, key: AgreementKey) -> bool:
        return key.occurrence <= self._counts[key.of_all_occurrences] and key not in self._ahead

    def leave(self) -> None:
        """Send the verdicts of failed agreements to the members that may still join, because this rank leaves."""
        self.relays.leave()
        self.led.leave()

    def on_verdict(self, verdict: Verdict, source: int) -> None:
        """Handle the leader's verdict, possibly passed on by another member."""
        if not self.relays.carry(verdict.key):
            if self.termination.takes(verdict, source):
                self._deliver(verdict)
        elif not self.termination.excludes(verdict.key, source):
            if verdict.difference != POSTPONED:
                self.termination.keep(verdict)
            self._take(verdict)

    def on_gathered(self, gathered: Gathered) -> None:
        """Note the members that have joined a large agreement. Raises RemoteProtocolError."""
        (self.led if gathered.leader == self._rank else self.relays).on_gathered(gathered)
        self.rivals.on_waiting()

    def on_spread(self, spread: Spread, source: int) -> None:
        """Pass a verdict on, and handle it if it is also for this rank. Raises RemoteProtocolError."""
        ranks = self.relays.ranks_of(spread)
        if not self.termination.excludes(spread.key, source):
            self.termination.keep(spread.verdict)
            self.relays.spread(spread.verdict, spread.leader, ranks)
            if ranks >> self._rank & 1:
                self._take(spread.verdict)

    def _take(self, verdict: Verdict) -> None:
        """Handle the verdict of a large agreement, which may arrive on several paths."""
        if self.comings.takes(verdict):
            self._deliver(verdict)

    def _deliver(self, verdict: Verdict) -> None:
        if verdict.key in self._forsaken:
            self._forsaken.discard(verdict.key)
        else:
            check_room(self._verdicts, verdict.key)
            self._verdicts[verdict.key] = verdict

    def on_decision_request(self, request: DecisionRequest, source: int) -> None:
        """Tell another member whether this rank knows the verdict."""
        if self._rank not in self.incarnations.replaced(request.key):  # else the previous process was the member
            self.termination.on_request(request, source)

    def on_join(self, join: Join, source: int) -> None:
        """Note that a member has joined a meeting that this rank leads, or will lead."""
        self.led.on_join(join, source)
        self.rivals.on_waiting()

    def on_withdraw(self, message: Withdraw, source: int) -> None:
        """Note that a member will not start this again."""
        key, withdrawn = message.key, self._absences.withdrawn
        check_room(withdrawn, key)
        withdrawn.setdefault(key, set()).add(source)
        self.led.over.on_withdrawn(source, key)
        self.comings.on_withdrawn(source, key)

    def on_gone(self, ranks: RankSet, *, is_lost: bool) -> None:
        """Note that ranks have left or are lost, and will join no further meeting."""
        self._absences.gone |= ranks
        self._absences.lost.update(ranks if is_lost else ())
        self.led.on_gone(ranks)
        self.comings.on_gone(ranks)
        self._engine.recheck()

    def on_returned(self, rank: int, incarnation: int) -> None:
        """Note that ``rank`` was restarted; agreements with its previous process are over."""
        self.incarnations.note(rank, incarnation)
        self._absences.gone.discard(rank)
        self._absences.lost.discard(rank)
        self._engine.recheck()
