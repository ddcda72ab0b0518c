"""Agreement within a group of ranks.

It is how anything collective starts: every member says what it wants to start, as named values; the leader compares,
names the first difference or whoever is missing, and answers everyone. So a collective is entered only when all members
are known to enter it, and a program that would hang elsewhere gets an error that names the rank. Whoever cannot start,
for its arguments are wrong say, objects: the others get its exception, and do not wait.

Nobody can know that members mean the same thing where they name different groups. But of what a rank starts one after
the other (``alone``), groups above all, two ranks that wait for each other in different ones will do so for ever: a
leader that has waited for a second tells the missing who waits for them, and one that sees itself so entangled says so.

A member that gives up tells the leader, and cannot know what the leader has decided meanwhile: each member that has
come gets one verdict, and if that says go, the others count on it. :mod:`asyncdist.collectives.agreed_start` therefore
sees every start to its end, also when its caller was cancelled.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final, Protocol

from asyncdist.collectives.agreement_messages import (
    Inquiry,
    Join,
    Objection,
    Reminder,
    Runs,
    Verdict,
    Withdraw,
    first_free,
    ranks_of,
    runs_of,
)
from asyncdist.errors import (
    AsyncdistError,
    BusyError,
    ClosedError,
    DisagreementError,
    RankLostError,
    StartTimeoutError,
    remote_error,
)
from asyncdist.tensors.serialization import words_of

if TYPE_CHECKING:
    from asyncdist.messaging.channels import Channel
    from asyncdist.messaging.engine import Engine

#: How much longer a member waits for the leader's word, so that it is the leader who names the missing.
MEMBER_PATIENCE_S: Final = 5.0
#: How long a leader waits for a member before it tells it so, and each time after that. Most have come long before.
REMIND_AFTER_S: Final = 1.0
#: Of thousands that are missing so many are told: one of them that sees what is wrong suffices.
_REMINDED_COUNT_MAX: Final = 16
#: Why a rank does not come, as the others are told.
_CANCELLED: Final = ("CancelledError", "it was cancelled while it waited for the others")
#: Between a subject and how often it was started.
_TIME: Final = ", time "


@dataclass(slots=True)
class _Over:
    """What has failed before everybody came: what the others are told when they come, and who they are."""

    verdict: Verdict
    absent: set[int]


@dataclass(slots=True)
class _Alone:
    """What this rank is starting, and starts nothing beside.

    Attributes:
        join: what it says.
        ranks: who is to start it.
        rival: where another one waits for this rank in another one, while this one waits for it: that subject, its
            members, and both in a sentence.
    """

    join: Join
    ranks: Sequence[int]
    rival: tuple[str, Runs, str] | None = None


@dataclass(frozen=True, slots=True, eq=False)
class Meeting:
    """One start of this rank: it is to come, or to say that it stays away.

    Attributes:
        subject: what starts, with the number of this time.
        ranks: who is to start it.
        leader: who decides.
        began_at: when the start was asked for, on the loop's clock.
    """

    subject: str
    ranks: tuple[int, ...]
    leader: int
    began_at: float

    def __str__(self) -> str:
        return repr(_without_time(self.subject))


class Caller(Protocol):
    """Is told how far a start has come, and may give it up meanwhile; see ``collectives.agreed_start.Start``."""

    def on_asked(self) -> None:
        """This rank has said that it has come, or is about to."""

    def on_time_up(self, error: StartTimeoutError) -> None:
        """The leader has not said anything in time. It is waited for all the same: it may have said go."""


@dataclass(frozen=True, slots=True)
class Agreed:
    """What came of an agreement.

    Attributes:
        number: the smallest that no member has taken.
        values: what all of them said; on a leader who said nothing, what the first member said.
        time: the how manieth time it was, failed ones included, from 1; equal on all ranks, whatever became of the
            others. What starts is to be numbered by it: who has missed a verdict would count one less than the rest.
    """

    number: int
    values: Mapping[str, str]
    time: int = field(default=1, compare=False)


class Agreements:
    """All agreements of one rank, over the world's system channel.

    Args:
        engine: this rank's.
        channel: sends :class:`Join` and :class:`Verdict`; the world receives from it and calls the ``on_`` methods.
        rank: this rank.
    """

    def __init__(self, engine: Engine, channel: Channel[Any], rank: int) -> None:
        self._engine = engine
        self._channel = channel
        self._rank = rank
        self._joins: dict[str, dict[int, Join]] = {}
        self._verdicts: dict[str, Verdict] = {}
        self._over: dict[str, _Over] = {}
        self._counts: Counter[str] = Counter()
        self._ahead: set[str] = set()  # meetings that this rank has counted, and has not come to
        self._gone: set[int] = set()
        self._lost: set[int] = set()
        self._withdrawn: dict[str, set[int]] = {}
        self._alone: _Alone | None = None
        self._forsaken: set[str] = set()
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
    ) -> Agreed:
        """Wait until all ``ranks`` are about to start the same thing.

        Args:
            ranks: everybody, this rank included.
            subject: what starts; equal on all ranks. Repetitions are told apart by counting.
            values: what must be equal on all ranks, by name. A leader who is no member may pass none.
            timeout_s: how long the leader waits for the last one; None for as long as it takes.
            leader: who compares; the first of ``ranks`` by default.
            taken: numbers that are in use here; the smallest that is in use nowhere is what everyone gets.
            hold_s: for how long a member that has come keeps its loop to itself while it waits for the verdict.

        Raises:
            StartTimeoutError: naming the ranks that did not come.
            DisagreementError: naming the first difference; or two members wait for each other in different ones.
            ClosedError: a member has left for good.
            RankLostError: a member has died.
            RemoteError: a member has objected, or was cancelled here.
            CancelledError: this rank has given up (:meth:`give_up`), and the leader has let it go.

        **Cancellation**: the others get RemoteError, unless all had come: then they count on this rank. So what follows
        go is to be started by a task that only a failure of the job cancels
        (:mod:`asyncdist.collectives.agreed_start`).
        """
        meeting = self.next_meeting(ranks, subject, leader)
        return await self.meet(meeting, values, timeout_s=timeout_s, taken=taken, hold_s=hold_s)

    def next_meeting(self, ranks: Sequence[int], subject: str, leader: int | None = None) -> Meeting:
        """Count one more start of ``subject``; :meth:`meet` or :meth:`stay_away` must follow.

        Ranks tell repetitions apart by their number. It is drawn when the start is asked for, and not when its turn
        comes, so that a start which is given up meanwhile is the same one on all ranks.
        """
        timed = self._next_time(_full(subject, ranks))
        self._ahead.add(timed)
        return Meeting(timed, tuple(ranks), ranks[0] if leader is None else leader, self._engine.loop.time())

    async def meet(
        self,
        meeting: Meeting,
        values: Mapping[str, str],
        *,
        timeout_s: float | None,
        taken: Runs = (),
        alone: bool = False,
        hold_s: float = 0.0,
        caller: Caller | None = None,
    ) -> Agreed:
        """As :meth:`agree`, for a start that was counted before. Its timeout runs from then on.

        Args:
            meeting: of :meth:`next_meeting`.
            values, timeout_s, taken, hold_s: see :meth:`agree`.
            alone: no rank starts anything else with ``alone`` meanwhile; the caller sees to that.
            caller: told how far it has come.
        """
        ranks, leader, subject = meeting.ranks, meeting.leader, _without_time(meeting.subject)
        self._ahead.discard(meeting.subject)
        join = Join(meeting.subject, tuple(sorted(values.items())), taken)
        if caller is not None:
            caller.on_asked()
        gone = _Gone(ranks, self._gone, self._withdrawn.setdefault(subject, set()))
        try:
            with self._starting_alone(join, ranks) if alone else contextlib.nullcontext() as start:
                if self._rank == leader:
                    verdict, first = await self._lead(meeting, join, gone, timeout_s)
                else:
                    verdict, first = await self._follow(meeting, join, gone, timeout_s, hold_s, caller), join
        except asyncio.CancelledError:
            if self._verdicts.pop(join.subject, None) is None:
                self._forsaken.add(join.subject)
                self._ask_to_go(meeting)
            raise
        if start is not None and start.rival is not None:
            self._object_to_rival(*start.rival, verdict)
        if verdict.objector == self._rank:
            raise asyncio.CancelledError
        _check(verdict, subject)
        return Agreed(verdict.agreed, dict(first.values), _time_of(join.subject))

    @contextlib.contextmanager
    def _starting_alone(self, join: Join, ranks: Sequence[int]) -> Iterator[_Alone]:
        assert self._alone is None, f"{join.subject} is started beside {self._alone}"
        self._alone = _Alone(join, ranks)
        try:
            yield self._alone
        finally:
            self._alone = None

    def object(self, ranks: Sequence[int], subject: str, error: BaseException) -> None:
        """In place of :meth:`agree`: this rank cannot start ``subject``, and the others are to get ``error``."""
        full = _full(subject, ranks)
        self._object(Objection(self._next_time(full), runs_of(tuple(ranks)), *words_of(error)), ranks[0])

    def stay_away(self, meeting: Meeting, error: Exception | None = None) -> None:
        """In place of :meth:`meet`: this rank does not come, because of ``error``, or since it was cancelled."""
        self._ahead.discard(meeting.subject)
        self._ask_to_go(meeting, words_of(error) if error is not None else _CANCELLED)

    @contextlib.contextmanager
    def objecting(self, ranks: Sequence[int], subject: str) -> Iterator[None]:
        """Check what is passed to a collective, before :meth:`agree`: a mistake is raised here, and told the others."""
        try:
            yield
        except Exception as error:
            self.object(ranks, subject, error)
            raise

    def _object(self, objection: Objection, leader: int) -> None:
        if leader == self._rank:
            self.on_objection(objection, leader)
        else:
            self._send(objection, leader)

    def give_up(self, meeting: Meeting) -> bool:
        """The caller of a start does not want it any more: ask the leader to go on without this rank.

        Returns:
            Whether it is too late, since the leader has said go. Else its verdict may still say so.
        """
        self._engine.poll()  # it may have come while something blocked the loop
        verdict = self._verdicts.get(meeting.subject)
        if verdict is None:
            self._ask_to_go(meeting)
        return verdict is not None and _is_go(verdict)

    def _ask_to_go(self, meeting: Meeting, words: tuple[str, str] = _CANCELLED) -> None:
        if not self.is_ending:
            with contextlib.suppress(AsyncdistError):  # nobody is left to be told
                self._object(Objection(meeting.subject, runs_of(meeting.ranks), *words), meeting.leader)
            self._engine.recheck()  # the leader itself waits, too

    @property
    def is_ending(self) -> bool:
        """Whether the job fails, or this rank does: whoever is cancelled then need not wait for anybody's word."""
        return self._engine.failure is not None or self._is_failing or self.is_interrupted()

    def on_own_failure(self) -> None:
        """A task of this rank has failed, and will end it: what is cancelled for that is no news for the others."""
        self._is_failing = True

    def withdraw(self, ranks: Sequence[int], subject: str) -> None:
        """Never agree to ``subject`` again: the other ``ranks`` get ClosedError when they try."""
        full = _full(subject, ranks)
        for rank in ranks:
            if rank != self._rank:
                self._send(Withdraw(full), rank)

    def forget(self, ranks: Sequence[int], subject: str) -> None:
        """No member starts ``subject`` any more, as all have said: nothing of it is kept."""
        full = _full(subject, ranks)
        self._counts.pop(full, None)
        self._withdrawn.pop(full, None)

    def _send(self, message: Any, rank: int) -> None:
        """Send to ``rank``, unless it has left, or was lost: of that the transport knows a little earlier."""
        if rank not in self._gone:
            with contextlib.suppress(RankLostError):
                self._channel.send_nowait(message, rank)

    def _next_time(self, subject: str) -> str:
        """The subject of this time: repetitions are told apart by counting."""
        self._counts[subject] += 1
        return f"{subject}{_TIME}{self._counts[subject]}"

    async def _lead(self, meeting: Meeting, join: Join, gone: _Gone, timeout_s: float | None) -> tuple[Verdict, Join]:
        ranks = meeting.ranks
        over = self._come_late(join.subject, self._rank)
        if over is not None:
            return over, join
        joins = self._joins.setdefault(join.subject, {})
        joins[self._rank] = join
        await self._until_all_have_come(meeting, joins, gone, timeout_s)
        over = self._verdicts.pop(join.subject, None)
        if over is not None:
            return over, join
        del self._joins[join.subject]
        missing = tuple(rank for rank in ranks if rank not in joins)
        said = [rank for rank in ranks if rank in joins and joins[rank].values] or [self._rank]
        name, refusal = _first_difference(joins, said)
        verdict = Verdict(
            subject=join.subject,
            difference=name,
            refusal="" if missing else refusal,
            missing=missing,
            waited_s=timeout_s or 0.0,
            gone=gone.ranks(),
            lost=tuple(rank for rank in gone.ranks() if rank in self._lost),
            agreed=first_free(entry.taken for entry in joins.values()),
        )
        for rank in joins:
            if rank != self._rank:
                self._send(verdict, rank)
        self._keep_for(missing, verdict)
        return verdict, joins[said[0]]

    async def _until_all_have_come(
        self, meeting: Meeting, joins: Mapping[int, Join], gone: _Gone, timeout_s: float | None
    ) -> None:
        """Or it is clear that they never will, or time is up."""
        ranks, subject = meeting.ranks, meeting.subject

        def is_over() -> bool:
            return len(joins) == len(ranks) or subject in self._verdicts or bool(gone.ranks())

        loop = self._engine.loop
        deadline = None if timeout_s is None else meeting.began_at + timeout_s
        timer: asyncio.TimerHandle | None = None

        def remind() -> None:
            nonlocal timer
            self._engine.poll()  # some may have come while something blocked the loop
            reminder = Reminder(_without_time(subject), runs_of(tuple(ranks)), runs_of(tuple(sorted(joins))))
            for rank in [rank for rank in ranks if rank not in joins][:_REMINDED_COUNT_MAX]:
                self._send(reminder, rank)
            timer = loop.call_later(REMIND_AFTER_S, remind)

        if self._alone is not None and self._alone.join.subject == subject:
            timer = loop.call_later(REMIND_AFTER_S, remind)
        try:
            await self._engine.until(is_over, f"{subject}: the other ranks", deadline=deadline)
        finally:
            if timer is not None:
                timer.cancel()

    async def _follow(
        self,
        meeting: Meeting,
        join: Join,
        gone: _Gone,
        timeout_s: float | None,
        hold_s: float,
        caller: Caller | None,
    ) -> Verdict:
        leader = meeting.leader
        deadline = None if timeout_s is None else meeting.began_at + timeout_s

        def is_over() -> bool:
            return join.subject in self._verdicts or leader in gone.ranks()

        if leader not in gone.ranks():
            self._send(join, leader)
        self._hold(is_over, hold_s)
        what = f"{join.subject}: the verdict of rank {leader}"
        is_told = await self._engine.until(is_over, what, deadline=deadline)
        if not is_told and deadline is not None and timeout_s is not None:
            with contextlib.suppress(AsyncdistError):  # a leader that cannot be asked does not listen
                self._send(Inquiry(join.subject, runs_of(meeting.ranks), timeout_s), leader)
            is_told = await self._engine.until(is_over, what, deadline=deadline + MEMBER_PATIENCE_S)
        if not is_told:
            silent = Verdict(join.subject, missing=(leader,), waited_s=timeout_s or 0.0)
            if caller is None:
                self._forsaken.add(join.subject)
                return silent
            caller.on_time_up(_missing(silent, _without_time(join.subject)))
            await self._engine.until(is_over, what)
        verdict = self._verdicts.pop(join.subject, None)
        if verdict is not None:
            return verdict
        return Verdict(join.subject, gone=(leader,), lost=(leader,) if leader in self._lost else ())

    def _hold(self, is_over: Callable[[], bool], seconds: float) -> None:
        """Poll in place for so long: another task of this rank might take the loop, and compute."""
        deadline = time.perf_counter() + seconds
        while seconds and not is_over() and time.perf_counter() < deadline:
            self._engine.poll()

    def on_join(self, join: Join, source: int) -> None:
        """A member has come to a meeting that this rank leads, or will lead."""
        if source in self._gone:
            return  # lost since it sent this
        over = self._come_late(join.subject, source)
        if over is None:
            self._joins.setdefault(join.subject, {})[source] = join
        else:  # it was decided without this member, who would wait for ever
            self._send(over, source)

    def on_inquiry(self, inquiry: Inquiry) -> None:
        """The time of a member of what this rank leads is up: all who have come are told who has not, the others later.

        It is, too, where this rank has come after that member, and would wait for longer.
        """
        joins = self._joins.get(inquiry.subject, {})
        missing = tuple(sorted(ranks_of(inquiry.members) - joins.keys()))
        if not joins or not missing:
            return  # the verdict is under way
        verdict = Verdict(inquiry.subject, missing=missing, waited_s=inquiry.waited_s)
        del self._joins[inquiry.subject]
        self._keep_for(missing, verdict)
        self._tell(joins, verdict)

    def on_objection(self, objection: Objection, source: int) -> None:
        """A member cannot start what this rank leads: all who have come are told now, the others when they come."""
        subject = objection.subject
        if self._come_late(subject, source) is not None:
            return  # another one has objected first
        if source != self._rank and self._has_led(subject):
            return  # all had come; its verdict is under way
        if objection.kind:
            verdict = Verdict(subject, difference=objection.kind, refusal=objection.text, objector=source)
        else:
            verdict = Verdict(subject, difference="ranks", refusal=objection.text)
        joins = self._joins.pop(subject, {})
        self._keep_for(ranks_of(objection.members) - joins.keys() - {source}, verdict)
        self._tell(joins, verdict)

    def _tell(self, ranks: Iterable[int], verdict: Verdict) -> None:
        for rank in ranks:
            if rank == self._rank:
                self.on_verdict(verdict)
            else:
                self._send(verdict, rank)

    def on_reminder(self, reminder: Reminder) -> None:
        """Others wait for this rank. It is in vain where this rank waits for one of them, in something else."""
        alone = self._alone
        if alone is None or alone.rival is not None or reminder.subject == _without_time(alone.join.subject):
            return
        entangled = ranks_of(reminder.present).intersection(alone.ranks)
        if entangled:
            text = (
                f"rank {min(entangled)} starts {reminder.subject!r}, rank {self._rank} "
                f"{_without_time(alone.join.subject)!r}, and each waits for the other; "
                "allowed: equal ranks, in one order, on all of them"
            )
            alone.rival = reminder.subject, reminder.members, text
            self._object(Objection(alone.join.subject, runs_of(tuple(alone.ranks)), "", text), alone.ranks[0])

    def _object_to_rival(self, subject: str, members: Runs, text: str, verdict: Verdict) -> None:
        """Tell those who wait in it too, unless what this rank has waited in came about all the same."""
        if verdict.refusal == text:
            self._object(Objection(self._next_time(subject), members, "", text), members[0][0])

    def _has_led(self, subject: str) -> bool:
        """Whether this rank has come to what it leads, and gone on."""
        is_counted = _time_of(subject) <= self._counts[_without_time(subject)] and subject not in self._ahead
        return is_counted and self._rank not in self._joins.get(subject, {})

    def _keep_for(self, absent: Iterable[int], verdict: Verdict) -> None:
        """Keep a verdict for those who have not come yet, and may."""
        coming = set(absent) - self._gone - self._withdrawn.get(_without_time(verdict.subject), set())
        if coming:
            self._over[verdict.subject] = _Over(verdict, coming)

    def _come_late(self, subject: str, rank: int) -> Verdict | None:
        """What a member is told who comes when all is over."""
        over = self._over.get(subject)
        if over is None:
            return None
        self._expect_no_more(rank, [subject])
        return over.verdict

    def _expect_no_more(self, rank: int, subjects: Iterable[str]) -> None:
        """``rank`` has come, or never will: a verdict is forgotten with the last one for whom it was kept."""
        for subject in subjects:
            over = self._over[subject]
            over.absent.discard(rank)
            if not over.absent:
                del self._over[subject]

    def leave(self) -> None:
        """This rank answers nobody any more: what has failed is told now to those who may come to it yet."""
        for over in self._over.values():
            for rank in sorted(over.absent - {self._rank}):
                with contextlib.suppress(BusyError):
                    self._send(over.verdict, rank)
        self._over.clear()

    def on_verdict(self, verdict: Verdict) -> None:
        """A leader has decided. Each member that has come hears this once."""
        if verdict.subject in self._forsaken:
            self._forsaken.discard(verdict.subject)
        else:
            self._verdicts[verdict.subject] = verdict

    def on_withdraw(self, subject: str, source: int) -> None:
        """A member will not start this again."""
        self._withdrawn.setdefault(subject, set()).add(source)
        self._expect_no_more(source, [timed for timed in self._over if _without_time(timed) == subject])

    def on_gone(self, rank: int, *, is_lost: bool) -> None:
        """``rank`` has left or is lost: it will come to no meeting any more."""
        self._gone.add(rank)
        if is_lost:
            self._lost.add(rank)
        self._expect_no_more(rank, list(self._over))
        for subject, joins in list(self._joins.items()):  # it gave up waiting
            joins.pop(rank, None)
            if not joins:
                del self._joins[subject]
        self._engine.recheck()


class _Gone:
    """Those of ``ranks`` that will not come: they have left the world, or withdrawn from the subject."""

    def __init__(self, ranks: Sequence[int], left: set[int], withdrawn: set[int]) -> None:
        self._ranks = ranks
        self._left = left
        self._withdrawn = withdrawn

    def ranks(self) -> tuple[int, ...]:
        if not self._left and not self._withdrawn:
            return ()
        return tuple(rank for rank in self._ranks if rank in self._left or rank in self._withdrawn)


def _full(subject: str, ranks: Sequence[int]) -> str:
    """The subject with its group. It travels in every message of an agreement, so runs of ranks are written short."""
    return f"{subject} on ranks {_in_words(runs_of(tuple(ranks)))}"


def _without_time(subject: str) -> str:
    """What all repetitions have in common."""
    return subject.rpartition(_TIME)[0]


def _time_of(subject: str) -> int:
    """Which of its repetitions this is."""
    return int(subject.rpartition(_TIME)[2])


@functools.lru_cache(64)
def _in_words(runs: Runs) -> str:
    """``0,2,4-9``."""
    return ",".join(f"{first}" if first == last else f"{first}-{last}" for first, last in runs)


def _first_difference(joins: Mapping[int, Join], ranks: Sequence[int]) -> tuple[str, str]:
    """What some rank says otherwise than the first one: its name, and a sentence. Both empty when they agree."""
    first = ranks[0]
    expected = dict(joins[first].values)
    for rank in ranks[1:]:
        given = dict(joins[rank].values)
        for name in sorted(expected.keys() | given.keys()):
            mine, theirs = expected.get(name, "nothing"), given.get(name, "nothing")
            if mine != theirs:
                return name, f"{name} is {mine} on rank {first} and {theirs} on rank {rank}"
    return "", ""


def _check(verdict: Verdict, subject: str) -> None:
    if verdict.objector >= 0:
        raise remote_error(verdict.objector, verdict.difference, verdict.refusal)
    if verdict.lost:
        are = "are" if len(verdict.lost) > 1 else "is"
        raise RankLostError(f"{subject}: {_name(verdict.lost)} {are} lost", rank=verdict.lost[0])
    if verdict.gone:
        raise ClosedError(f"{subject}: {_name(verdict.gone)} left", ranks=verdict.gone)
    if verdict.missing:
        raise _missing(verdict, subject)
    if verdict.refusal:
        raise DisagreementError(f"{subject}: {verdict.refusal}", difference=verdict.difference)


def _is_go(verdict: Verdict) -> bool:
    return not (verdict.refusal or verdict.missing or verdict.gone) and verdict.objector < 0


def _missing(verdict: Verdict, subject: str) -> StartTimeoutError:
    return StartTimeoutError(
        f"{subject}: {_name(verdict.missing)} did not come within {verdict.waited_s:g} s", missing=verdict.missing
    )


def _name(ranks: Sequence[int]) -> str:
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"
