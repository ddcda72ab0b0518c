"""Agreement within a group of ranks.

Every collective starts with an agreement. Each member sends its leader what it is about to start, as named values; the
leader compares them and answers all members with one verdict; its side is
:mod:`asyncdist.collectives.agreement.led_agreements`. So a collective is entered only when all members are known to
enter it, and a program that would hang elsewhere gets an error that names the first difference or the missing ranks. A
member that cannot start, for example because of a wrong argument, objects: the others raise its exception.

Members that name different groups cannot be compared. In some starts, of groups above all, they find out that they wait
for each other in different ones (:mod:`asyncdist.collectives.agreement.rival_starts`). A rank makes only one start at a
time that blocks or takes a number (:mod:`asyncdist.collectives.start_turns`): it may ask the leader for a later turn.

A member that gives up tells the leader, and cannot know what the leader has decided meanwhile: each member that has
come gets one verdict, and if that says go, the others count on it. :mod:`asyncdist.collectives.agreed_start` therefore
sees every start to its end, also when its caller was cancelled. Where the leader is lost between two members, and what
starts goes on without it, they tell each other its verdict (:mod:`asyncdist.collectives.agreement.termination`).

Members of a large agreement come, and hear the verdict, along a tree (:mod:`asyncdist.collectives.agreement.relays`).
Where the leader leaves, its verdict may still be on its way: they ask it itself.
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

#: How much longer a member waits for the leader's verdict, so that the leader is the one that names the missing ranks.
MEMBER_PATIENCE_S: Final = 5.0
#: The reason that the other members are told when this rank was cancelled.
_CANCELLED: Final = ("CancelledError", "it was cancelled while it waited for the others")


class Agreements:
    """Carries out all agreements of one rank, over the world's system channel.

    Args:
        engine: this rank's.
        channel: sends the messages; the world receives from it and calls the ``on_`` methods.
        rank: this rank.

    Attributes:
        incarnations: of the ranks that have been started again.
        relays: carry what is said in large agreements along a tree.
        comings: what this rank has said in large ones.
        led: the agreements that this rank leads.
        rivals: finds starts in which ranks wait for each other.
        termination: ends agreements whose leader is lost.
    """

    def __init__(self, engine: Engine, channel: Channel[Any], rank: int) -> None:
        self._engine = engine
        self._channel = channel
        self._rank = rank
        self._verdicts: dict[AgreementKey, Verdict] = {}
        self._counts: Counter[AgreementKey] = Counter()  # by the key for all occurrences
        self._ahead: set[AgreementKey] = set()  # those that this rank has counted, and has not come to
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
        """Wait until all ``ranks`` are about to start the same thing.

        Args:
            ranks: all members, this rank included.
            subject: names what starts; equal on all ranks. Repetitions are counted.
            values: what must be equal on all ranks, by name. A leader that is not a member may pass none.
            timeout_s: how long the leader waits for the last member; None for no limit.
            leader: the rank that compares; the first of ``ranks`` by default.
            taken: numbers that are in use on this rank; all members get the smallest that is in use on none.
            hold_s: for how long a member polls without yielding to the loop while it waits for the verdict.
            bound_to: ranks whose loss ends it though they are no members.

        Raises:
            StartTimeoutError: some ranks did not come; it names them.
            DisagreementError: a value differs; or two members wait for each other in different agreements.
            ClosedError: a member has left the world, or withdrawn from the subject.
            RankLostError: a member has died, or a rank of ``bound_to``.
            RemoteError: a member has objected, or was cancelled in this agreement.
            CancelledError: this rank has given up (:meth:`give_up`), and the leader has let it go.

        **Cancellation**: the others get RemoteError, unless all had come: then they count on this rank. So what follows
        go is to be started by a task that only a failure of the job cancels
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

        The occurrence is counted when the start is asked for, and not when its turn comes, so that a start which is
        given up meanwhile has the same number on all ranks.
        """
        key = self._next_occurrence(self.incarnations.key_of(subject, ranks))
        leader = ranks[0] if leader is None else leader
        self._ahead.add(key)
        return Meeting(key, tuple(ranks), leader, self._engine.loop.time(), bound_to, outlives_leader)

    def second_meeting(self, meeting: Meeting) -> Meeting:
        """Return another one for the start of ``meeting``, to which all have come: none of them may stay away."""
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
        """Agree as :meth:`agree` does, for a start that was counted before. The timeout runs since it was counted.

        Args:
            meeting: of :meth:`next_meeting`.
            values, timeout_s, taken, hold_s: see :meth:`agree`.
            caller: told how far it has come.
            mark: a number that is not compared. All members get up to two different ones, and so know whether they are
                equal.

        Raises:
            AsyncdistError: as :meth:`agree`.
            Postponed: the leader has let this rank go, which is to meet again.
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
        """Ask the leader to let this rank go, which waits in ``meeting`` and is to meet again: then that one raises.

        The leader does nothing where all members have come.
        """
        key = meeting.key
        text = f"rank {self._rank} comes to another start first"
        self._object(Objection(key.text, POSTPONED, text), meeting.leader)
        self._engine.recheck()

    def object(self, ranks: Sequence[int], subject: str, error: BaseException) -> None:
        """Tell the others, in place of :meth:`agree`, that ``error`` keeps this rank from starting ``subject``."""
        key = self._next_occurrence(self.incarnations.key_of(subject, ranks))
        self._object(Objection(key.text, *words_of(error)), ranks[0])

    def stay_away(self, meeting: Meeting, error: Exception | None = None) -> None:
        """Tell the others, in place of :meth:`meet`, that this rank does not come: ``error``, or it was cancelled."""
        self._ahead.discard(meeting.key)
        self._ask_to_go(meeting, words_of(error) if error is not None else _CANCELLED)

    @contextlib.contextmanager
    def objecting(self, ranks: Sequence[int], subject: str) -> Iterator[None]:
        """Check the arguments of a collective in the body, before :meth:`agree`; an error is sent to the others too."""
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
        """Ask the leader to go on without this rank, since the caller of the start does not want it any more.

        Returns:
            Whether it is too late, since the leader has said go. Otherwise its verdict may still say so.
        """
        self._engine.poll()  # it may have come while something blocked the loop
        verdict = self._verdicts.get(meeting.key)
        if verdict is None:
            self._ask_to_go(meeting)
        return verdict is not None and is_go(verdict)

    def _ask_to_go(self, meeting: Meeting, words: tuple[str, str] = _CANCELLED) -> None:
        if not self.is_ending:
            with contextlib.suppress(AsyncdistError):  # nobody is left to be told
                self._object(Objection(meeting.key.text, *words), meeting.leader)
            self._engine.recheck()  # the leader itself waits, too

    @property
    def is_ending(self) -> bool:
        """Whether the job or this rank is failing: a start that is cancelled then need not wait for a verdict."""
        return self._engine.failure is not None or self._is_failing or self.is_interrupted()

    def on_own_failure(self) -> None:
        """Note that a task of this rank has failed and will end it; cancellations that follow are not sent."""
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
        """Drop what is known of ``subject``, which all members have said that they never start again."""
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
        """Send to ``rank``, also where it has left."""
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
        """Wait until all members have come, one of them is known never to come, or the time is up."""
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
            if is_large and has_asked:  # one that leaves answers all the same: go may be on its way
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
            with contextlib.suppress(AsyncdistError):  # a leader that cannot be asked does not listen
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
        """Return what this rank concludes of a meeting whose verdict it does not wait for any more."""
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
        """Poll for ``seconds`` without yielding: another task of this rank might take the loop, and compute."""
        deadline = time.perf_counter() + seconds
        while seconds and not is_over() and time.perf_counter() < deadline:
            self._engine.poll()

    def _has_come(self, key: AgreementKey) -> bool:
        return key.occurrence <= self._counts[key.of_all_occurrences] and key not in self._ahead

    def leave(self) -> None:
        """Send what has failed to those that may come to it yet, since this rank leads nothing any more."""
        self.relays.leave()
        self.led.leave()

    def on_verdict(self, verdict: Verdict, source: int) -> None:
        """Take the leader's decision, which another member may have passed on. Each one that has come hears one."""
        if not self.relays.carry(verdict.key):
            if self.termination.takes(verdict, source):
                self._deliver(verdict)
        elif not self.termination.excludes(verdict.key, source):
            if verdict.difference != POSTPONED:
                self.termination.keep(verdict)
            self._take(verdict)

    def on_gathered(self, gathered: Gathered) -> None:
        """Note who has come to a large agreement. Raises RemoteProtocolError."""
        (self.led if gathered.leader == self._rank else self.relays).on_gathered(gathered)
        self.rivals.on_waiting()

    def on_spread(self, spread: Spread, source: int) -> None:
        """Pass a verdict on, and take it where it is for this rank, too. Raises RemoteProtocolError."""
        ranks = self.relays.ranks_of(spread)
        if not self.termination.excludes(spread.key, source):
            self.termination.keep(spread.verdict)
            self.relays.spread(spread.verdict, spread.leader, ranks)
            if ranks >> self._rank & 1:
                self._take(spread.verdict)

    def _take(self, verdict: Verdict) -> None:
        """Take the verdict of a large agreement, which may come on several ways."""
        if self.comings.takes(verdict):
            self._deliver(verdict)

    def _deliver(self, verdict: Verdict) -> None:
        if verdict.key in self._forsaken:
            self._forsaken.discard(verdict.key)
        else:
            check_room(self._verdicts, verdict.key)
            self._verdicts[verdict.key] = verdict

    def on_decision_request(self, request: DecisionRequest, source: int) -> None:
        """Tell another member what this rank has heard of the verdict."""
        if self._rank not in self.incarnations.replaced(request.key):  # else it was the process before
            self.termination.on_request(request, source)

    def on_join(self, join: Join, source: int) -> None:
        """Note that a member has come to a meeting that this rank leads, or will lead."""
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
        """Note that ranks have left or are lost, and will come to no meeting any more."""
        self._absences.gone |= ranks
        self._absences.lost.update(ranks if is_lost else ())
        self.led.on_gone(ranks)
        self.comings.on_gone(ranks)
        self._engine.recheck()

    def on_returned(self, rank: int, incarnation: int) -> None:
        """Note that a new process has the place of ``rank``; what was agreed on with the one before is over."""
        self.incarnations.note(rank, incarnation)
        self._absences.gone.discard(rank)
        self._absences.lost.discard(rank)
        self._engine.recheck()
