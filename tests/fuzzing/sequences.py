"""Feeds random sequences of events, valid and invalid ones, to the state machines of the protocols.

For each machine, a function feeds about twenty events to a new instance and checks its promises: it raises nothing, its
instructions are consistent with earlier instructions, and its memory is bounded. The number of a sequence determines
the machine and all of its events.
"""

from __future__ import annotations

import contextlib
import functools
import math
import random
import types
from collections import Counter
from collections.abc import Callable, Iterable
from typing import Any, Final

import numpy as np
from support.drawing import draw_message
from support.referee import Referee

from asyncdist.collectives.agreement.absences import Absences
from asyncdist.collectives.agreement.agreements import Agreements
from asyncdist.collectives.agreement.messages import (
    AgreementKey,
    DecisionRequest,
    Gathered,
    Inquiry,
    Join,
    Meeting,
    NotHere,
    Objection,
    Reminder,
    RollCall,
    Spread,
    Undecided,
    Verdict,
    Withdraw as ReceivedWithdraw,
    runs_of,
)
from asyncdist.collectives.agreement.verdicts import LateDecisions, allows_start, judge, raise_refusal
from asyncdist.collectives.groups import Group, Lease
from asyncdist.collectives.membership import MembershipLog
from asyncdist.errors import AsyncdistError, RemoteProtocolError
from asyncdist.messaging import wire
from asyncdist.transports.rank_sets import RankSet
from protocols.one_sided.selection import REPLACEMENT_MODES, OneSidedRules, choose, must_replace
from protocols.ranking import STRATEGIES
from protocols.replay_buffer.store import ReplayStore
from protocols.selective.member import (
    AddUp,
    Apply,
    Discard,
    Instruction,
    OfferSnapshot,
    ReceiveAverage,
    Reduce,
    RequestSnapshots,
    RoundMember,
    SendToCoordinator,
    State,
    StepAction,
    StopReducing,
    TakeSnapshot,
    Withdraw,
)
from protocols.selective.messages import DONOR, REPLACER, Assign, Frozen, Report
from protocols.selective.selection import SelectiveRules
from protocols.selective.succession import Claim, Follow, Inform, Nominate, Steps, Succession, Watch

EVENT_COUNT: Final = 20
_METRICS: Final = (0.0, -0.0, 1.0, -1.0, 1e308, -1e308, 5e-324, math.nan, math.inf, -math.inf)
_COUNTS: Final = (-1, 0, 1, 2, 3, 255, 2**31, 2**32 - 1, 2**32, 2**53, 2**63 - 1, -(2**63))
_TIMES_S: Final = (0.0, 0.001, 0.1, 0.1, 1.0, 5.0, 1e4, -1.0, math.nan, math.inf, -math.inf, 1e300)


class SequenceFailure(AssertionError):
    """A sequence has broken a promise.

    Attributes:
        seed: Number of the sequence.
    """

    def __init__(self, seed: int, machine: str, error: BaseException) -> None:
        super().__init__(f"sequence {seed}, {machine}: {error!r:.1000}")
        self.seed = seed


def _metric(rng: random.Random) -> float:
    return rng.choice(_METRICS) if rng.random() < 0.2 else rng.uniform(-3.0, 3.0)


def _count(rng: random.Random, near: int = 0) -> int:
    return rng.choice(_COUNTS) if rng.random() < 0.1 else near + rng.randrange(-2, 30)


# -- selective averaging ----------------------------------------------------------------------------------------------

_EVENTS: Final = (
    *("report",) * 6,
    *("ready",) * 4,
    *("applied",) * 2,
    *("decline", "abandoned", "gone", "time", "time", "joined"),
)


def coordinator(rng: random.Random) -> None:
    """Feed a coordinator with messages of members and of other ranks."""
    size = rng.randrange(1, 6)
    options = SelectiveRules(
        replacement_ratio=rng.choice((0.0, 0.25, 0.5, 1.0)),
        averaging_strategy=rng.choice(STRATEGIES),
        metric_mode=rng.choice(("max", "min")),
        threshold=rng.choice((None, None, 0.0)),
        cooldown=rng.choice((0, 50)),
        quorum=rng.choice((0.0, 0.5, 0.7, 1.0)),
        grace_s=rng.choice((None, None, 0.0, 1.0)),
        max_report_age_s=rng.choice((5.0, 600.0)),
        round_timeout_s=rng.choice((1.0, 20.0)),
        route=rng.choice(("direct", "sharded")),
    )
    referee = Referee(size, options, takes_over=rng.random() >= 0.8)
    for _ in range(rng.randrange(2 * EVENT_COUNT)):
        kind = rng.choice(_EVENTS)
        rank = rng.randrange(size) if rng.random() < 0.95 else rng.choice((size, -1, 2**31))
        back = rng.choice((0, 0, 0, 0, 1, -1)) if rng.random() < 0.95 else rng.choice(_COUNTS)
        since_s = rng.uniform(0.0, 2.0)
        if kind == "report" and rng.random() < 0.1:  # it may report any time per step
            sends = referee.coordinator.on_report(
                rank, _count(rng), _metric(rng), rng.choice(_TIMES_S), referee.now, interval_s=rng.choice(_TIMES_S)
            )
            referee.check(sends)
        else:
            referee.feed((kind, rank, back, _count(rng, 200), _metric(rng), since_s))
    referee.drain()
    kept = referee.coordinator.statistics()
    assert len(kept.abandoned) <= 33 and len(kept.left_out) <= 64 and len(kept.stragglers) <= 64
    referee.coordinator.on_stop()


def _assign(rng: random.Random) -> Assign:
    donors = tuple(sorted({rng.randrange(6) for _ in range(rng.randrange(4))}))
    role, best = rng.choice((DONOR, REPLACER)), rng.choice((-1, *donors))
    reducers = donors if rng.random() < 0.5 else ()
    part = rng.randrange(-1, len(reducers))
    sources = reducers if role == REPLACER and rng.random() < 0.3 else ()
    return Assign(role, donors, (rng.randrange(6),), _count(rng), best, reducers=reducers, part=part, sources=sources)


def _frozen(rng: random.Random) -> Frozen:
    donors = tuple(sorted({rng.randrange(6) for _ in range(rng.randrange(3))}))
    weights = tuple(rng.choice((0.0, 1.0, 1e300)) for _ in donors)
    return Frozen(donors, weights, tuple(_count(rng) for _ in donors), rng.choice((-1, *donors)), rng.uniform(0, 9))


def _tell_member(member: RoundMember, rng: random.Random, number: int) -> tuple[Instruction | StepAction, ...]:
    """Pass one event about a round to a member, as its policy would."""
    match rng.randrange(11):
        case 0 | 1 | 2:
            return member.on_assign(_assign(rng), number)
        case 3 | 4:
            return member.on_frozen(_frozen(rng), number)
        case 5:
            return member.on_end("over", number)
        case 6 | 7:
            step = member.on_step()
            if isinstance(step, Apply):
                return (step, *member.on_applied(_count(rng)))
            return () if step is None else (step,)
        case 8:
            return member.on_copied(number, _count(rng), fault="" if rng.random() < 0.8 else "odd")
        case 9:
            if rng.random() < 0.7:
                member.on_averaged(number)
                return ()
            return member.on_failed(number, "failed")
        case _:
            if rng.random() < 0.5:
                return (member.joined(rng.choice((None, Report(_count(rng), _metric(rng), 0.1, 0.1)))),)
            return member.on_coordinator_gone("is gone")


def member(rng: random.Random) -> None:
    """Feed a member with a coordinator's messages; it closes all that it opens, and applies only what was read."""
    told = RoundMember()
    offered: list[int] = []
    exchanging: list[int] = []
    read: set[int] = set()
    leaves_at = rng.randrange(2 * EVENT_COUNT)
    for place in range(rng.randrange(2 * EVENT_COUNT) + 1):
        number = max(0, told.round + rng.choice((0, 0, 0, 0, 1, 1, -1))) if rng.random() < 0.9 else rng.randrange(2**32)
        if place == leaves_at:
            _carry_out(told.on_leave(), offered, exchanging, read)
        _carry_out(_tell_member(told, rng, number), offered, exchanging, read)
        taken = [number for number in exchanging if number >= 0]  # rounds in which it reduces have negative numbers
        assert len(offered) + len(taken) <= 1 and -sum(exchanging) == told.reducing - sum(taken)
        assert bool(offered) == (told.state in (State.GIVING, State.LASTING))
        assert bool(taken) == (told.state in (State.ASKING, State.RECEIVING, State.COMPLETE))
    if told.state not in (State.LEAVING, State.LASTING, State.OUT):
        _carry_out(told.on_leave(), offered, exchanging, read)
    _carry_out(told.on_left(), offered, exchanging, read)
    assert not offered and not exchanging and told.state is State.OUT
    assert _tell_member(told, rng, 1) == () or told.state is State.OUT


def _carry_out(
    instructions: tuple[Instruction | StepAction, ...], offered: list[int], exchanging: list[int], read: set[int]
) -> None:
    for instruction in instructions:
        match instruction:
            case OfferSnapshot(number):
                offered.append(number)
            case Withdraw():
                offered.pop()
            case Reduce(number):
                exchanging.append(-number)
            case AddUp(number):
                assert -number in exchanging
            case StopReducing(number):
                exchanging.remove(-number)
            case RequestSnapshots(number):
                exchanging.append(number)
            case ReceiveAverage(number):
                assert [each for each in exchanging if each >= 0] == [number]
                read.add(number)
            case Apply(number, frozen):
                assert number in read or not frozen.donors, "the member applied a round that it has not read"
                exchanging.remove(number)
            case Discard(number):
                exchanging.remove(number)
            case SendToCoordinator(_, number):
                assert 0 <= number <= wire.ROUND_MAX
            case TakeSnapshot():
                assert not offered


def succession(rng: random.Random) -> None:
    """Notify a rank of coordinators that start and end."""
    size = rng.randrange(1, 7)
    order = list(range(size))
    rng.shuffle(order)
    rank = rng.randrange(size + 1)  # the last number is a reserved coordinator
    view = Succession(rank, order, rng.randrange(size + 1))
    epoch = 0
    for _ in range(rng.randrange(2 * EVENT_COUNT)):
        peer = rng.choice([other for other in range(-1, size + 2) if other != rank])
        steps: Steps = ()
        said = view.epoch + rng.randrange(-3, 9) if rng.random() < 0.9 else rng.choice(_COUNTS)
        match rng.randrange(8):
            case 0:
                steps = view.on_lost(peer)
            case 1:
                steps = view.on_left(peer)
            case 2:
                steps = view.on_cadence()
            case 3 | 4:
                steps = view.on_nomination(peer, said)
            case 5 | 6:
                steps = view.on_claim(said, rng.choice((peer, *order)), peer)
            case _:
                if rng.random() < 0.3:
                    view.leave()
                if rank < size:
                    steps = view.on_suspicion()
        assert epoch <= view.epoch <= wire.EPOCH_MAX, f"the epoch went back from {epoch} to {view.epoch}"
        epoch = view.epoch
        assert len(steps) <= 1
        for step in steps:
            match step:
                case Nominate(dest) | Inform(dest):
                    assert dest != rank
                case Claim(its_epoch):
                    assert (its_epoch, rank) == (view.epoch, view.coordinator)
                    assert view.is_available(rank) and rank in order
                case Follow(its_epoch, coordinator_rank):
                    assert (its_epoch, coordinator_rank) == (view.epoch, view.coordinator)
        place = view.place(3)
        assert place is None or 0 <= place < 3


def watch(rng: random.Random) -> None:
    """Send reports that may or may not be answered; a rank that was never asked is never suspected."""
    told, now, is_asked = Watch(), 0.0, False
    answered = step = 0
    for _ in range(rng.randrange(2 * EVENT_COUNT)):
        now += rng.choice((0.0, 0.01, 0.3, 2.0, 1e4))
        step += rng.randrange(4)
        match rng.randrange(4):
            case 0:
                told.on_answer(step, now)
                answered += is_asked
                is_asked = False
            case 1:
                if rng.random() < 0.1:
                    told.begin()
                    is_asked, answered = False, 0
            case _:
                told.on_report(step, rng.uniform(0, 5), now)
                is_asked = True
        why = told.suspicion(rng.randrange(3))
        assert why is None or is_asked or answered >= 6


# -- one-sided averaging, replay --------------------------------------------------------------------------------------


def one_sided(rng: random.Random) -> None:
    """Judge ranks by the published metrics."""
    options = OneSidedRules(
        replacement_mode=rng.choice(REPLACEMENT_MODES),
        threshold_metric=rng.uniform(-2, 2),
        replacement_ratio=rng.choice((0.0, 0.1, 0.25, 0.5, 1.0)),
        averaging_strategy=rng.choice(STRATEGIES),
        metric_mode=rng.choice(("max", "min")),
        donor_count=rng.choice((None, 1, 5)),
        donor_ratio=rng.choice((0.1, 0.5, 1.0)),
    )
    metrics = {0: _metric(rng)}
    for _ in range(EVENT_COUNT // 2):
        metrics[rng.randrange(8)] = _metric(rng)
        must_replace(0, metrics, options)
        known = metrics if rng.random() < 0.8 else {rank: value for rank, value in metrics.items() if rank}
        choice = choose(0, known, 8, options, rng.sample)
        if choice is None:
            continue
        assert list(choice.donors) == sorted(set(choice.donors)) and 0 not in choice.donors
        assert choice.best in choice.donors or (choice.best == -1 and not choice.donors)
        assert all(math.isfinite(metrics[donor]) for donor in choice.donors)
        assert all(0.0 <= choice.weight(_metric(rng)) < math.inf for _ in range(3))
        if choice.donors:
            assert choice.weight(metrics[choice.best]) > 0.0


def replay_store(rng: random.Random) -> None:
    """Add, draw and update items; ids and priorities may have any values."""
    capacity = rng.randrange(1, 9)
    alpha = rng.choice((None, 0.0, 0.6, 2.0))
    store = ReplayStore(capacity, alpha=alpha, seed=0)
    for _ in range(EVENT_COUNT // 2):
        count = rng.randrange(0, 12)
        values = np.array([rng.choice((0.0, 1.0, 1e-300, 1e300, rng.random())) for _ in range(count)])
        match rng.randrange(3):
            case 0:
                rows = np.zeros((count, 3), np.uint8)
                try:
                    store.add(rows, values if alpha is not None and rng.random() < 0.5 else None)
                except ValueError:  # the priorities are too large to be summed
                    continue
            case 1:
                ids = np.array([_count(rng, store.added_count - 4) for _ in range(count)], np.int64)
                try:
                    stale_count = store.update(ids, values)
                except ValueError:
                    continue
                assert 0 <= stale_count <= count
            case _:
                if store.size:
                    try:
                        drawn = store.sample(1 + count, beta=rng.random())
                    except ValueError:  # no item can be drawn
                        continue
                    assert len(drawn.ids) == len(drawn.weights) == len(drawn.rows) == 1 + count
                    assert all(store.evicted_count <= id_ < store.added_count for id_ in drawn.ids.tolist())
                    assert bool((drawn.weights >= 0).all()) and bool((drawn.weights <= 1 + 1e-9).all())
        assert 0 <= store.size <= capacity


# -- agreements -------------------------------------------------------------------------------------------------------

_SUBJECTS: Final = ("barrier", "x on ranks 0-1", "")


def _key(rng: random.Random, size: int) -> AgreementKey:
    ranks = sorted(rng.sample(range(size), rng.randrange(1, size + 1)))
    return AgreementKey(rng.choice(_SUBJECTS), runs_of(tuple(ranks)), rng.randrange(3), rng.random() < 0.2)


def verdicts(rng: random.Random) -> None:
    """Judge the members' messages about an agreement, and keep verdicts for members that arrive late."""
    size = rng.randrange(1, 6)
    late = LateDecisions()
    keys = [_key(rng, size) for _ in range(3)]
    for _ in range(EVENT_COUNT // 2):
        key = rng.choice(keys)
        assert AgreementKey.parse(key.text) == key
        members = sorted(key.members())
        came = rng.sample(members, rng.randrange(1, len(members) + 1))
        joins = {rank: draw_message(Join, rng, subject=key.text) for rank in came}
        gone, lost = {rng.randrange(size)}, {rng.randrange(size)}
        absences = Absences(size, 0)
        absences.on_gone(RankSet(gone), is_lost=False)
        absences.on_gone(RankSet(lost), is_lost=True)
        absent = absences.of(Meeting(key, tuple(members), members[0], 0.0, (rng.randrange(size),)))
        missing = tuple(rank for rank in members if rank not in joins)
        verdict = judge(joins, came, missing, absent, lost, rng.choice(_TIMES_S))
        if not allows_start(verdict):
            try:
                raise_refusal(verdict, rng.randrange(size))
            except AsyncdistError:
                late.keep(verdict, set(missing))
            else:
                raise AssertionError(f"{verdict} refuses, and raises nothing")
        heard = late.decision_for(key, rng.randrange(size))
        assert heard is None or heard.key == key
        match rng.randrange(6):
            case 0:
                late.on_gone(RankSet((rng.randrange(size),)))
            case 1:
                late.on_withdrawn(rng.randrange(size), key.of_all_occurrences)
            case 2:
                late.take(rng.choice((None, key.of_all_occurrences)))
        assert len(late) <= len(keys)
    _raise_any(draw_message(Verdict, rng, subject=keys[0].text, agreed=rng.randrange(2000)), rng.randrange(size))


def _raise_any(verdict: Verdict, rank: int) -> None:
    """Raise the error that a false leader's verdict describes."""
    try:
        raise_refusal(verdict, rank)
    except AsyncdistError:
        assert not allows_start(verdict) or verdict.lost


def agreements(rng: random.Random) -> None:
    """Feed a rank's agreements with messages of peers, in the order in which the system channel handles them."""
    size = rng.randrange(2, 6)
    sent: list[tuple[Any, int]] = []
    timer = types.SimpleNamespace(cancel=lambda: None)
    now = functools.partial(rng.uniform, 0, 100)
    transport = types.SimpleNamespace(incarnation=0, may_return=False, size=size)
    engine: Any = types.SimpleNamespace(
        loop=types.SimpleNamespace(time=now),
        clock=now,
        call_later=lambda *_, **__: timer,
        recheck=lambda: None,
        poll=lambda: 0,
        failure=None,
        transport=transport,
    )
    channel: Any = types.SimpleNamespace(send_nowait=lambda message, dest: sent.append((message, dest)))
    told = Agreements(engine, channel, 0)
    keys = [_key(rng, size) for _ in range(3)]
    gone: set[int] = set()
    mine = told.next_request(sorted({0, 1, rng.randrange(size)}), "barrier", rng.choice((0, 1)))
    with told.rivals.starting(mine):
        for _ in range(EVENT_COUNT):
            if rng.random() < 0.05:
                gone.add(peer := rng.randrange(1, size))
                told.on_gone(RankSet((peer,)), is_lost=rng.random() < 0.5)
            key = rng.choice((*keys, mine.key))
            text = (
                key.text
                if rng.random() < 0.9
                else rng.choice(("", "barrier", "x on ranks 0-99999999", "x on ranks 1-0"))
            )
            try:
                _tell_agreements(told, rng, text, rng.randrange(1, size), size)
            except RemoteProtocolError:
                assert text not in (key.text, mine.key.text), f"{text} is a valid key, but was refused"
            assert all(0 < dest < size for _, dest in sent), "messages must be sent to peers only"
            assert not {dest for _, dest in sent} & gone, "no message may be sent to a rank that has gone"
            sent.clear()
            assert len(told.led.joins) <= len(keys) + 1 and len(told._verdicts) <= len(keys) + 1
    told.leave()


def _tell_agreements(told: Agreements, rng: random.Random, text: str, source: int, size: int) -> None:
    kinds = (Join, Join, Join, Objection, Objection, Inquiry, Verdict, ReceivedWithdraw, Reminder)
    kind = rng.choice((*kinds, DecisionRequest, Undecided, Gathered, Gathered, Spread, RollCall, NotHere))
    given: dict[str, Any] = {"subject": text}
    if kind is Verdict:
        given["agreed"] = rng.randrange(2000)
    elif kind is Spread:
        given = {"verdict": draw_message(Verdict, rng, subject=text, agreed=rng.randrange(2000))}
    message = draw_message(kind, rng, texts=("", "x", "(postponed)"), **given)
    message.key.check(size)
    match message:
        case Join():
            told.on_join(message, source)
        case Objection():
            told.led.on_objection(message, source)
        case Inquiry():
            told.led.on_inquiry(message)
        case Verdict():
            told.on_verdict(message, source)
        case DecisionRequest():
            told.on_decision_request(message, source)
        case Undecided():
            told.termination.on_undecided(message, source)
        case Gathered():
            with contextlib.suppress(RemoteProtocolError):  # messages of ranks that are not below this rank in the tree
                told.on_gathered(message)
        case Spread():
            with contextlib.suppress(RemoteProtocolError):
                told.on_spread(message, source)
        case RollCall():
            told.join_sender.on_roll_call(message, source)
        case NotHere():
            told.led.on_not_here(message, source)
        case Reminder():
            told.rivals.on_reminder(message, source)
        case _:
            told.on_withdraw(message, source)


def membership(rng: random.Random) -> None:
    """Start and end collectives while members leave, free groups, are lost and send arbitrary numbers."""
    log = MembershipLog()
    groups = []
    for place in range(2):
        ranks = tuple(sorted({0, *rng.sample(range(4), 2)}))
        groups.append(Group(ranks, 0, 7101 + place, None, Lease(place, place, _give_back)))
    stopped: list[AsyncdistError] = []
    under_way = []
    for _ in range(EVENT_COUNT):
        group, peer = rng.choice(groups), rng.randrange(1, 5)
        match rng.randrange(7):
            case 0 | 1 | 2:
                try:
                    number = log.begin(group)
                    log.check(group, number)
                except AsyncdistError:
                    continue
                under_way.append(log.enter(group, number, stopped.append))
            case 3:
                if under_way:
                    log.end(under_way.pop(rng.randrange(len(under_way))))
            case 4:
                log.on_left(RankSet((peer,)), ((7101, _count(rng)), (7102, _count(rng)), (_count(rng), _count(rng))))
            case 5:
                log.on_freed(group, peer, _count(rng))
            case _:
                if rng.random() < 0.2:
                    log.on_lost(peer)
        assert all(log.is_under_way(entry.group) for entry in under_way)
        assert len(stopped) == len(set(map(id, stopped))), "each object must be stopped exactly once"
    for entry in under_way:
        log.end(entry)
    assert not any(map(log.is_under_way, groups))


async def _give_back(group: Group) -> None:
    del group


# -- all of them ------------------------------------------------------------------------------------------------------

MACHINES: Final[tuple[Callable[[random.Random], None], ...]] = (
    *(coordinator, coordinator, coordinator, member, member, succession, succession, watch),
    *(one_sided, replay_store, verdicts, agreements, agreements, membership),
)


def run(seed: int) -> str:
    """Run one sequence; return the name of its machine. Raises SequenceFailure."""
    machine = MACHINES[seed % len(MACHINES)]
    try:
        machine(random.Random(seed))
    except Exception as error:
        raise SequenceFailure(seed, machine.__name__, error) from error
    return machine.__name__


def fuzz(seeds: Iterable[int]) -> Counter[str]:
    """Run many sequences; return the number of sequences of each machine. Raises SequenceFailure."""
    return Counter(map(run, seeds))
