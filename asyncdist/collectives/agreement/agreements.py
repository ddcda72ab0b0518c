"""Agreements: the ranks of a group check that all of them are about to start the same operation.

Each member *joins* the agreement by sending its leader, one of the ranks, a description of the operation as named
values. The leader (:mod:`asyncdist.collectives.agreement.led_agreements`) compares the values and sends all members its
*decision*: "go", or a refusal that names the first difference or the missing ranks. A program with mismatched calls
therefore gets an error instead of hanging. A member that cannot start, for example because of a wrong argument,
*objects*, and the other members raise its exception.

Other modules handle special cases:

- :mod:`asyncdist.collectives.agreement.rival_starts`: members are waiting for each other in agreements with different
  leaders.
- :class:`asyncdist.collectives.agreed_start.Turns`: starts must not overlap.
- :mod:`asyncdist.collectives.agreed_start`: members give up.
- :mod:`asyncdist.collectives.agreement.termination`: a leader is lost after it has notified only some members.
- :mod:`asyncdist.collectives.agreement.relays`: the messages of large groups are relayed along a tree.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import functools
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final

from asyncdist.collectives.agreement.absences import Absences
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
from asyncdist.collectives.agreement.relays import JoinSender, Relays
from asyncdist.collectives.agreement.rival_starts import Rivals
from asyncdist.collectives.agreement.termination import Termination
from asyncdist.collectives.agreement.verdicts import (
    POSTPONED,
    Postponed,
    allows_start,
    check_room,
    raise_refusal,
    start_timeout_error,
)
from asyncdist.errors import AsyncdistError, ClosedError, RankLostError, StartTimeoutError
from asyncdist.tensors.serialization import name_and_message
from asyncdist.transports.rank_sets import RankSet
from asyncdist.waits import WaitId, WaitKind

if TYPE_CHECKING:
    from asyncdist.messaging.channels import Channel
    from asyncdist.messaging.engine import Engine

#: Seconds that a member waits after its timeout for the leader's decision, which names the missing ranks.
MEMBER_PATIENCE_S: Final = 5.0
#: Class name and message of the error that the other members receive if this rank is cancelled.
_CANCELLED: Final = ("CancelledError", "it was cancelled while it waited for the other ranks")


class Agreements:
    """Lets the ranks of a group check that all are about to start the same operation, by exchanging messages.

    Args:
        channel: System channel to send on. The world receives the channel's messages and passes them to the ``on_``
            methods.

    Attributes:
        absences: Record of the ranks that cannot join agreements.
        join_sender: Sender of the messages with which this rank joins agreements of large groups.
        rivals: Detector of ranks that are waiting for each other in different starts.
    """

    def __init__(self, engine: Engine, channel: Channel[Any], rank: int) -> None:
        self._engine = engine
        self._channel = channel
        self._rank = rank
        self._verdicts: dict[AgreementKey, Verdict] = {}
        self._counts: Counter[AgreementKey] = Counter()  # number of requested starts of each operation
        self._ahead: set[AgreementKey] = set()  # agreements that this rank has requested but not yet joined
        self.absences = Absences(rank, engine.transport.incarnation)
        self.relays = Relays(engine, rank, self._send, self.absences.gone)
        self.join_sender = JoinSender(self.relays, self.absences, self._send_anyway)
        self.led = LedAgreements(
            rank, self._send, self._send_anyway, self._deliver, self._has_joined, self.absences, self.relays
        )
        self.rivals = Rivals(engine, rank, self.led.joins, self._send, self._object, self._next_occurrence)
        self.termination = Termination(engine, rank, self._send)
        self._forsaken: set[AgreementKey] = set()
        self._is_failing = False
        self.is_interrupted: Callable[[], bool] = lambda: False
        self.is_unmet: Callable[[int], bool] = lambda _: False  # see :meth:`Services.is_unmet`

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
            subject: Name of the operation, equal on all ranks. It may be started repeatedly.
            values: Named values that must be equal on all ranks. A leader that is not a member may pass an empty
                mapping.
            timeout_s: Seconds that the leader waits for the last member, or None for no limit.
            leader: Rank that compares the values, by default the first of ``ranks``.
            taken: Resource numbers, such as group tags, in use on this rank. The members agree on the smallest number
                that none of them uses.
            hold_s: Seconds for which a member polls for the decision without yielding to its loop.
            bound_to: Further ranks whose loss ends the agreement.

        Raises:
            StartTimeoutError: Some ranks did not join in time.
            DisagreementError: A value differs, or two members are waiting for each other in different agreements.
            ClosedError: A member has left the world, or never starts this operation again.
            RankLostError: A member, or a rank of ``bound_to``, is lost.
            RemoteError: A member could not start, or was cancelled while it was waiting.
            CancelledError: This rank has given up (:meth:`give_up`), and the leader has released it.

        **Cancellation**: the other members get RemoteError, unless all members had joined. After "go", they depend on
        this rank, so the work must run in a task that only a failure of the job cancels
        (:mod:`asyncdist.collectives.agreed_start`).
        """
        meeting = self.next_request(ranks, subject, leader, bound_to)
        return await self.meet(meeting, values, timeout_s=timeout_s, taken=taken, hold_s=hold_s)

    def next_request(
        self,
        ranks: Sequence[int],
        subject: str,
        leader: int | None = None,
        bound_to: tuple[int, ...] = (),
        *,
        outlives_leader: bool = False,
    ) -> Meeting:
        """Request the next agreement to start the operation ``subject``.

        The caller must then await :meth:`meet` or call :meth:`decline`. The start is counted now rather than when
        this rank joins, so that abandoned starts are counted equally on all ranks.
        """
        key = self._next_occurrence(self.absences.key_of(subject, ranks))
        leader = ranks[0] if leader is None else leader
        self._ahead.add(key)
        return Meeting(key, tuple(ranks), leader, self._engine.loop.time(), bound_to, outlives_leader)

    def second_meeting(self, meeting: Meeting) -> Meeting:
        """Return the agreement that members join after ``meeting``, when they are ready to start its operation."""
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
        on_late: Callable[[StartTimeoutError], None] | None = None,
        mark: int | None = None,
    ) -> Agreed:
        """Wait until all members of ``meeting`` are about to start its operation.

        The arguments that are not listed, and the errors, are the same as for :meth:`agree`.

        Args:
            meeting: Result of :meth:`next_request`. The timeout began with that call.
            on_late: Function called if the leader has not sent its decision in time. This rank then continues to wait,
                because the decision may be "go".
            mark: Number that may differ between members. Every member receives up to two of the different marks, and
                therefore knows whether all marks are equal.

        Raises:
            Postponed: The leader has released this rank, which must call this method again later.
        """
        key = meeting.key
        self._ahead.discard(key)
        join = Join(key.text, tuple(sorted(values.items())), taken, () if mark is None else (mark,))
        if meeting.outlives_leader:
            self.termination.expect(key)
        try:
            if self._rank == meeting.leader:
                verdict, first = await self._lead(meeting, join, timeout_s)
            else:
                verdict, first = await self._follow(meeting, join, timeout_s, hold_s, on_late), join
        except asyncio.CancelledError:
            if self._verdicts.pop(key, None) is None:
                self._forsaken.add(key)
                self._send_objection(meeting)
            raise
        finally:
            self.termination.stop_expecting(key)
            self.join_sender.end(key)
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

        The leader ignores the request if all members have joined.
        """
        key = meeting.key
        text = f"rank {self._rank} joins another start first"
        self._object(Objection(key.text, POSTPONED, text), meeting.leader)
        self._engine.recheck()

    def object(self, ranks: Sequence[int], subject: str, error: BaseException) -> None:
        """Notify the other members that ``error`` prevents this rank from starting the operation ``subject``."""
        key = self._next_occurrence(self.absences.key_of(subject, ranks))
        self._object(Objection(key.text, *name_and_message(error)), ranks[0])

    def decline(self, meeting: Meeting, error: Exception | None = None) -> None:
        """Notify the other members that ``error``, or a cancellation, prevents this rank from joining ``meeting``."""
        self._ahead.discard(meeting.key)
        self._send_objection(meeting, name_and_message(error) if error is not None else _CANCELLED)

    @contextlib.contextmanager
    def objecting(self, ranks: Sequence[int], subject: str) -> Iterator[None]:
        """Enter a block that checks a collective's arguments.

        If the block raises an exception, raise it on all members.
        """
        try:
            yield
        except Exception as error:
            self.object(ranks, subject, error)
            raise

    def _object(self, objection: Objection, leader: int) -> None:
        if leader == self._rank:
            self.led.on_objection(objection, leader)
        else:
            self.join_sender.send_directly(objection.key, leader)
            self._send(objection, leader)

    def give_up(self, meeting: Meeting) -> bool:
        """Ask the leader to start without this rank, because the caller of the start has given up.

        Returns:
            Whether the decision "go" has already arrived. If not, it may still arrive.
        """
        self._engine.poll()  # Receive a decision that has arrived while the loop was blocked.
        verdict = self._verdicts.get(meeting.key)
        if verdict is None:
            self._send_objection(meeting)
        return verdict is not None and allows_start(verdict)

    def _send_objection(self, meeting: Meeting, words: tuple[str, str] = _CANCELLED) -> None:
        if not self.is_ending:
            with contextlib.suppress(AsyncdistError):  # Raised if no other rank is left.
                self._object(Objection(meeting.key.text, *words), meeting.leader)
            self._engine.recheck()  # Wakes this rank's own wait if this rank is the leader.

    @property
    def is_ending(self) -> bool:
        """Whether the job or this rank is failing, so that a cancelled start need not wait for a decision."""
        return self._engine.failure is not None or self._is_failing or self.is_interrupted()

    def on_own_failure(self) -> None:
        """Record that a failed task will end this rank, so that the resulting cancellations are not sent."""
        self._is_failing = True

    def withdraw(self, ranks: Sequence[int], subject: str) -> None:
        """Announce that this rank never starts the operation ``subject`` again.

        Later agreements of the other ``ranks`` to start it raise ClosedError.
        """
        key = self.absences.key_of(subject, ranks)
        self.led.withdrawn.add(key)
        self.led.send_stored(key)  # Sent first, so that members that join later raise the refusal, not ClosedError.
        lost = (rank for rank in self.absences.lost if not self.is_unmet(rank))
        message = Withdraw(key.text, self.absences.losses(lost))
        for rank in ranks:
            if rank != self._rank:
                self._send(message, rank)

    def forget(self, ranks: Sequence[int], subject: str) -> None:
        """Remove the state of the operation ``subject``, which no member will start again."""
        key = self.absences.key_of(subject, ranks)
        self._counts.pop(key, None)
        self.absences.withdrawn.pop(key, None)
        self.led.withdrawn.discard(key)
        for unread in [each for each in self._verdicts if each.of_all_occurrences == key]:
            del self._verdicts[unread]

    def _send(self, message: Any, rank: int) -> None:
        if rank not in self.absences.gone:
            with contextlib.suppress(RankLostError):
                self._channel.send_nowait(message, rank)

    def _send_anyway(self, message: Any, rank: int) -> None:
        with contextlib.suppress(RankLostError, ClosedError):
            self._channel.send_nowait(message, rank)

    def _next_occurrence(self, key: AgreementKey) -> AgreementKey:
        self._counts[key] += 1
        return AgreementKey(key.subject, key.ranks, self._counts[key])

    async def _lead(self, meeting: Meeting, join: Join, timeout_s: float | None) -> tuple[Verdict, Join]:
        key = meeting.key
        over = self.led.over.decision_for(key, self._rank)
        if over is not None:
            return over, join
        joins = self.led.joins.setdefault(key, {})
        joins[self._rank] = join
        await self._until_all_have_joined(meeting, joins, timeout_s)
        over = self._verdicts.pop(key, None)
        return self.led.decide(meeting, timeout_s or 0.0) if over is None else (over, join)

    async def _until_all_have_joined(
        self, meeting: Meeting, joins: Mapping[int, Join], timeout_s: float | None
    ) -> None:
        key, ranks = meeting.key, meeting.ranks

        def is_over() -> bool:
            return len(joins) == len(ranks) or key in self._verdicts or bool(self.absences.of(meeting))

        deadline = None if timeout_s is None else meeting.began_at + timeout_s
        what = WaitId(WaitKind.OTHER_MEMBERS, name=key.text)

        def absent() -> Iterator[int]:
            return (rank for rank in ranks if rank not in joins)

        is_decided = await self._engine.until(is_over, what, deadline=deadline, peers=absent)
        if not is_decided and timeout_s is not None and self.relays.carry(key):
            # Before the leader refuses the start, it asks missing members whether they have joined.
            self.led.on_inquiry(Inquiry(key.text, timeout_s))
            await self._engine.until(is_over, what, peers=absent)

    async def _follow(
        self,
        meeting: Meeting,
        join: Join,
        timeout_s: float | None,
        hold_s: float,
        on_late: Callable[[StartTimeoutError], None] | None,
    ) -> Verdict:
        key, leader = meeting.key, meeting.leader
        deadline = None if timeout_s is None else meeting.began_at + timeout_s
        is_large, has_asked = self.relays.carry(key), False

        def has_no_leader() -> bool:
            if is_large and has_asked:  # A leader that has left still answers a join, and its "go" may be in transit.
                return leader in self.absences.lost or self.termination.excludes(key, leader)
            return leader in self.absences.of(meeting) or self.termination.excludes(key, leader)

        def is_over() -> bool:
            return key in self._verdicts or has_no_leader() or bool(self.absences.lost_bound_ranks(meeting))

        def note_late(missing: tuple[int, ...]) -> None:
            if on_late is not None:
                on_late(start_timeout_error(Verdict(join.subject, missing=missing, waited_s=timeout_s or 0.0)))

        if is_large and (key, leader) in self.relays.decisions:
            self._handle_verdict(self.relays.decisions[key, leader])
        if not has_no_leader():
            has_asked = True
            self.join_sender.join(join, leader) if is_large else self._send(join, leader)
        self._poll_without_yielding(is_over, hold_s)
        what = WaitId(WaitKind.VERDICT, peer=leader, name=join.subject)
        is_decided = await self._engine.until(is_over, what, deadline=deadline)
        if not is_decided and deadline is not None and timeout_s is not None:
            with contextlib.suppress(AsyncdistError):  # Raised if nothing can be sent to the leader.
                self.join_sender.send_directly(key, leader)
                self._send(Inquiry(key.text, timeout_s), leader)
            is_decided = await self._engine.until(is_over, what, deadline=deadline + MEMBER_PATIENCE_S)
        if not is_decided:
            if on_late is None:
                self._forsaken.add(key)
                return Verdict(join.subject, missing=(leader,), waited_s=timeout_s or 0.0)
            note_late((leader,))
            await self._engine.until(is_over, what)
        if meeting.outlives_leader and has_asked and key not in self._verdicts and has_no_leader():
            late_at = None if deadline is None else deadline + MEMBER_PATIENCE_S
            gone = functools.partial(self.absences.of, meeting)
            await self.termination.ask(meeting, gone, lambda: key in self._verdicts, note_late, late_at)
        verdict = self._verdicts.pop(key, None)
        return verdict or self._verdict_without(meeting, is_leaderless=has_no_leader())

    def _verdict_without(self, meeting: Meeting, *, is_leaderless: bool) -> Verdict:
        """Return the refusal of an agreement whose leader, or another required rank, is lost or has left the world."""
        key, leader = meeting.key, meeting.leader
        all_lost = self.absences.lost_to(key)
        lost = tuple(rank for rank in (*meeting.ranks, *meeting.bound_to) if rank in all_lost)
        if leader in self.absences.of(meeting):
            return Verdict(key.text, gone=(leader,), lost=lost)
        if is_leaderless:
            return Verdict(key.text, gone=(leader,), lost=(leader, *lost))
        self._forsaken.add(key)
        return Verdict(key.text, gone=lost, lost=lost)

    def _poll_without_yielding(self, is_over: Callable[[], bool], seconds: float) -> None:
        """Poll for ``seconds``, or until ``is_over()`` is true, without yielding to tasks that might compute."""
        deadline = time.perf_counter() + seconds
        while seconds and not is_over() and time.perf_counter() < deadline:
            self._engine.poll()

    def _has_joined(self, key: AgreementKey) -> bool:
        return key.occurrence <= self._counts[key.of_all_occurrences] and key not in self._ahead

    def leave(self) -> None:
        """Send the decisions of failed agreements to the members that may still join.

        Called before this rank leaves.
        """
        self.relays.leave()
        self.led.leave()

    def on_verdict(self, verdict: Verdict, source: int) -> None:
        """Handle a leader's decision, received from the leader or from a member that relays it."""
        if not self.relays.carry(verdict.key):
            if self.termination.accepts(verdict, source):
                self._deliver(verdict)
        elif not self.termination.excludes(verdict.key, source):
            if verdict.difference != POSTPONED:
                self.termination.keep(verdict)
            self._handle_verdict(verdict)

    def on_gathered(self, gathered: Gathered) -> None:
        """Record which members of a large group have joined an agreement.

        Raise RemoteProtocolError for an invalid message.
        """
        (self.led if gathered.leader == self._rank else self.relays).on_gathered(gathered)
        self.rivals.on_waiting()

    def on_spread(self, spread: Spread, source: int) -> None:
        """Relay a decision, which may also be for this rank. Raise RemoteProtocolError for invalid ranks."""
        ranks = self.relays.ranks_of(spread)
        if not self.termination.excludes(spread.key, source):
            self.termination.keep(spread.verdict)
            self.relays.spread(spread.verdict, spread.leader, ranks)
            if self._rank in ranks:
                self._handle_verdict(spread.verdict)

    def _handle_verdict(self, verdict: Verdict) -> None:
        """Handle a large group's decision once, even if several copies of it arrive."""
        if self.join_sender.is_first_copy(verdict):
            self._deliver(verdict)

    def _deliver(self, verdict: Verdict) -> None:
        if verdict.key in self._forsaken:
            self._forsaken.discard(verdict.key)
        else:
            check_room(self._verdicts, verdict.key)
            self._verdicts[verdict.key] = verdict

    def on_decision_request(self, request: DecisionRequest, source: int) -> None:
        """Answer another member that asks for the decision of a lost leader."""
        # A restarted rank cannot answer, because the member was its previous process.
        if self._rank not in self.absences.replaced(request.key):
            self.termination.on_request(request, source)

    def on_join(self, join: Join, source: int) -> None:
        """Record that a member has joined an agreement that this rank leads, or will lead."""
        self.led.on_join(join, source)
        self.rivals.on_waiting()

    def on_withdraw(self, message: Withdraw, source: int) -> None:
        """Record that a member will never start the operation in ``message`` again."""
        key, withdrawn = message.key, self.absences.withdrawn
        check_room(withdrawn, key)
        withdrawn.setdefault(key, set()).add(source)
        self.led.over.on_withdrawn(source, key)
        self.join_sender.on_withdrawn(source, key)

    def on_gone(self, ranks: RankSet, *, is_lost: bool) -> None:
        """Record that ranks have left or are lost, and end the agreements that are waiting for them."""
        self.absences.on_gone(ranks, is_lost=is_lost)
        self.led.on_gone(ranks)
        self.join_sender.on_gone(ranks)
        self._engine.recheck()

    def on_returned(self, rank: int, incarnation: int) -> None:
        """Record the restart of ``rank``, which ends agreements with its previous process."""
        self.absences.on_returned(rank, incarnation)
        self._engine.recheck()
