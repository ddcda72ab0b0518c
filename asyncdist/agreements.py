"""Agreement within a group of ranks.

It is how anything collective starts: every member says what it wants to start, as named values; the leader compares,
names the first difference or whoever is missing, and answers everyone. So a collective is entered only when all members
are known to enter it, and a program that would hang elsewhere gets an error that names the rank. Whoever cannot start,
for its arguments are wrong say, objects: the others get its exception, and do not wait.

Nobody can know that members mean the same thing where they name different groups. But of what a rank starts one after
the other (``alone``), groups above all, two ranks that wait for each other in different ones will do so for ever: a
leader that has waited for a second tells the missing who waits for them, and one that sees itself so entangled says so.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final, TypeAlias

from asyncdist.errors import (
    AsyncdistError,
    BusyError,
    ClosedError,
    DisagreementError,
    RankLostError,
    StartTimeoutError,
    remote_error,
)
from asyncdist.values import words_of

if TYPE_CHECKING:
    from asyncdist.channels import Channel
    from asyncdist.progress import Engine

#: How much longer a member waits for the leader's word, so that it is the leader who names the missing.
MEMBER_PATIENCE_S: Final = 5.0
#: How long a leader waits for a member before it tells it so, and each time after that. Most have come long before.
REMIND_AFTER_S: Final = 1.0
#: Of thousands that are missing so many are told: one of them that sees what is wrong suffices.
_REMINDED_COUNT_MAX: Final = 16
#: Between a subject and how often it was started.
_TIME: Final = ", time "

#: Some ranks in their order, short also where there are thousands: the first and the last of those without a gap.
Runs: TypeAlias = tuple[tuple[int, int], ...]


@dataclass(frozen=True, slots=True)
class Join:
    """Member to leader: I am about to start ``subject`` and these are my values."""

    subject: str
    values: tuple[tuple[str, str], ...]
    proposal: int


@dataclass(frozen=True, slots=True)
class Objection:
    """Member to leader: I cannot start ``subject``, since here it raised this.

    Attributes:
        members: who was to start it.
        kind: the exception's class; empty where members disagree.
        text: what it says.
    """

    subject: str
    members: Runs
    kind: str
    text: str


@dataclass(frozen=True, slots=True)
class Reminder:
    """Leader to a member that is missing: these wait for you.

    Attributes:
        subject: in which, without the time.
        members: all who are to start it.
        present: those who have come.
    """

    subject: str
    members: Runs
    present: Runs


@dataclass(frozen=True, slots=True)
class Inquiry:
    """Member to leader: my time, ``waited_s``, is up and you have not said anything. Who is missing?"""

    subject: str
    members: Runs
    waited_s: float


@dataclass(frozen=True, slots=True)
class Verdict:
    """Leader to member: go (with the agreed number), or why not.

    Attributes:
        difference: the name of what differs; of an objection, the exception's class.
        refusal: a sentence; of an objection, what the exception says.
        missing: who has not come in time.
        waited_s: for how long the one had waited whose time was up first.
        objector: the member who objected, -1 where nobody did.
    """

    subject: str
    difference: str = ""
    refusal: str = ""
    missing: tuple[int, ...] = ()
    waited_s: float = 0.0
    gone: tuple[int, ...] = ()
    agreed: int = 0
    objector: int = -1


@dataclass(slots=True)
class _Over:
    """What has failed before everybody came: what the others are told when they come, and who they are."""

    verdict: Verdict
    absent: set[int]


@dataclass(frozen=True, slots=True)
class Withdraw:
    """Member to member: I shall never start ``subject`` again."""

    subject: str


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


@dataclass(frozen=True, slots=True)
class Agreed:
    """What came of an agreement.

    Attributes:
        number: the largest proposal.
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
        self._gone: set[int] = set()
        self._withdrawn: dict[str, set[int]] = {}
        self._alone: _Alone | None = None
        self._is_failing = False

    async def agree(
        self,
        ranks: Sequence[int],
        subject: str,
        values: Mapping[str, str],
        *,
        timeout_s: float | None,
        leader: int | None = None,
        proposal: int = 0,
        alone: bool = False,
    ) -> Agreed:
        """Wait until all ``ranks`` are about to start the same thing.

        Args:
            ranks: everybody, this rank included.
            subject: what starts; equal on all ranks. Repetitions are told apart by counting.
            values: what must be equal on all ranks, by name. A leader who is no member may pass none.
            timeout_s: how long the leader waits for the last one; None for as long as it takes.
            leader: who compares; the first of ``ranks`` by default.
            proposal: a number; the largest is what everyone gets.
            alone: no rank starts anything else with ``alone`` meanwhile; the caller sees to that.

        Raises:
            StartTimeoutError: naming the ranks that did not come.
            DisagreementError: naming the first difference; or two members wait for each other in different ones.
            ClosedError: a member has left for good.
            RemoteError: a member has objected, or was cancelled here.

        **Cancellation**: the others get RemoteError, unless all had come: then they count on this rank.
        """
        leader = ranks[0] if leader is None else leader
        subject = _full(subject, ranks)
        join = Join(self._next_time(subject), tuple(sorted(values.items())), proposal)
        gone = _Gone(ranks, self._gone, self._withdrawn.setdefault(subject, set()))
        try:
            with self._starting_alone(join, ranks) if alone else contextlib.nullcontext() as start:
                if self._rank == leader:
                    verdict, first = await self._lead(ranks, join, gone, timeout_s)
                else:
                    verdict, first = await self._follow(ranks, leader, join, gone, timeout_s), join
        except asyncio.CancelledError:
            self._give_up(join, ranks, leader)
            raise
        if start is not None and start.rival is not None:
            self._object_to_rival(*start.rival, verdict)
        _check(verdict, subject)
        return Agreed(verdict.agreed, dict(first.values), int(join.subject.rpartition(_TIME)[2]))

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
        self._object(Objection(self._next_time(full), _runs(tuple(ranks)), *words_of(error)), ranks[0])

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

    def _give_up(self, join: Join, ranks: Sequence[int], leader: int) -> None:
        """The caller was cancelled while it waited for the others: they are not to count on this rank."""
        if self._verdicts.pop(join.subject, None) is not None:
            return  # it is decided, and all are told
        if self._engine.failure is None and not self._is_failing:  # else all is over, and everybody is told why
            words = "CancelledError", "it was cancelled while it waited for the others"
            with contextlib.suppress(AsyncdistError):  # nobody is left to be told
                self._object(Objection(join.subject, _runs(tuple(ranks)), *words), leader)

    def on_own_failure(self) -> None:
        """A task of this rank has failed, and will end it: what is cancelled for that is no news for the others."""
        self._is_failing = True

    def withdraw(self, ranks: Sequence[int], subject: str) -> None:
        """Never agree to ``subject`` again: the other ``ranks`` get ClosedError when they try."""
        full = _full(subject, ranks)
        for rank in ranks:
            if rank != self._rank:
                self._send(Withdraw(full), rank)

    def _send(self, message: Any, rank: int) -> None:
        """Send to ``rank``, unless it has left, or was lost: of that the transport knows a little earlier."""
        if rank not in self._gone:
            with contextlib.suppress(RankLostError):
                self._channel.send_nowait(message, rank)

    def _next_time(self, subject: str) -> str:
        """The subject of this time: repetitions are told apart by counting."""
        self._counts[subject] += 1
        return f"{subject}{_TIME}{self._counts[subject]}"

    async def _lead(
        self, ranks: Sequence[int], join: Join, gone: _Gone, timeout_s: float | None
    ) -> tuple[Verdict, Join]:
        over = self._come_late(join.subject, self._rank)
        if over is not None:
            return over, join
        joins = self._joins.setdefault(join.subject, {})
        joins[self._rank] = join
        await self._until_all_have_come(ranks, join.subject, joins, gone, timeout_s)
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
            agreed=max(entry.proposal for entry in joins.values()),
        )
        for rank in joins:
            if rank != self._rank:
                self._send(verdict, rank)
        self._keep_for(missing, verdict)
        return verdict, joins[said[0]]

    async def _until_all_have_come(
        self, ranks: Sequence[int], subject: str, joins: Mapping[int, Join], gone: _Gone, timeout_s: float | None
    ) -> None:
        """Or it is clear that they never will, or time is up."""

        def is_over() -> bool:
            return len(joins) == len(ranks) or subject in self._verdicts or bool(gone.ranks())

        loop = self._engine.loop
        deadline = None if timeout_s is None else loop.time() + timeout_s
        timer: asyncio.TimerHandle | None = None

        def remind() -> None:
            nonlocal timer
            self._engine.poll()  # some may have come while something blocked the loop
            reminder = Reminder(_without_time(subject), _runs(tuple(ranks)), _runs(tuple(sorted(joins))))
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
        self, ranks: Sequence[int], leader: int, join: Join, gone: _Gone, timeout_s: float | None
    ) -> Verdict:
        deadline = None if timeout_s is None else self._engine.loop.time() + timeout_s

        def is_over() -> bool:
            return join.subject in self._verdicts or leader in gone.ranks()

        if leader not in gone.ranks():
            self._send(join, leader)
        what = f"{join.subject}: the verdict of rank {leader}"
        is_told = await self._engine.until(is_over, what, deadline=deadline)
        if not is_told and deadline is not None and timeout_s is not None:
            with contextlib.suppress(AsyncdistError):  # a leader that cannot be asked does not listen
                self._send(Inquiry(join.subject, _runs(tuple(ranks)), timeout_s), leader)
            await self._engine.until(is_over, what, deadline=deadline + MEMBER_PATIENCE_S)
        verdict = self._verdicts.pop(join.subject, None)
        if verdict is not None:
            return verdict
        if leader in gone.ranks():
            return Verdict(join.subject, gone=(leader,))
        return Verdict(join.subject, missing=(leader,), waited_s=timeout_s or 0.0)

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
        missing = tuple(sorted(_ranks_of(inquiry.members) - joins.keys()))
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
        self._keep_for(_ranks_of(objection.members) - joins.keys() - {source}, verdict)
        # Where it was cancelled it has come, and waits no more.
        self._tell([rank for rank in joins if rank != source or not objection.kind], verdict)

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
        entangled = _ranks_of(reminder.present).intersection(alone.ranks)
        if entangled:
            text = (
                f"rank {min(entangled)} starts {reminder.subject!r}, rank {self._rank} "
                f"{_without_time(alone.join.subject)!r}, and each waits for the other; "
                "allowed: equal ranks, in one order, on all of them"
            )
            alone.rival = reminder.subject, reminder.members, text
            self._object(Objection(alone.join.subject, _runs(tuple(alone.ranks)), "", text), alone.ranks[0])

    def _object_to_rival(self, subject: str, members: Runs, text: str, verdict: Verdict) -> None:
        """Tell those who wait in it too, unless what this rank has waited in came about all the same."""
        if verdict.refusal == text:
            self._object(Objection(self._next_time(subject), members, "", text), members[0][0])

    def _has_led(self, subject: str) -> bool:
        """Whether this rank has come to what it leads, and gone on."""
        full, _, time = subject.rpartition(_TIME)
        return int(time) <= self._counts[full] and self._rank not in self._joins.get(subject, {})

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
        """A leader has decided."""
        self._verdicts[verdict.subject] = verdict

    def on_withdraw(self, subject: str, source: int) -> None:
        """A member will not start this again."""
        self._withdrawn.setdefault(subject, set()).add(source)
        self._expect_no_more(source, [timed for timed in self._over if _without_time(timed) == subject])

    def on_gone(self, rank: int) -> None:
        """``rank`` has left or is lost: it will come to no meeting any more."""
        self._gone.add(rank)
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
    return f"{subject} on ranks {_in_words(_runs(tuple(ranks)))}"


def _without_time(subject: str) -> str:
    """What all repetitions have in common."""
    return subject.rpartition(_TIME)[0]


@functools.lru_cache(64)
def _runs(ranks: tuple[int, ...]) -> Runs:
    """Ranks that follow each other as the first and the last of them."""
    runs: list[tuple[int, int]] = []
    for rank in ranks:
        if runs and rank == runs[-1][1] + 1:
            runs[-1] = (runs[-1][0], rank)
        else:
            runs.append((rank, rank))
    return tuple(runs)


def _ranks_of(runs: Runs) -> set[int]:
    return {rank for first, last in runs for rank in range(first, last + 1)}


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
    if verdict.gone:
        raise ClosedError(f"{subject}: {_name(verdict.gone)} left", ranks=verdict.gone)
    if verdict.missing:
        raise StartTimeoutError(
            f"{subject}: {_name(verdict.missing)} did not come within {verdict.waited_s:g} s", missing=verdict.missing
        )
    if verdict.refusal:
        raise DisagreementError(f"{subject}: {verdict.refusal}", difference=verdict.difference)


def _name(ranks: Sequence[int]) -> str:
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"
