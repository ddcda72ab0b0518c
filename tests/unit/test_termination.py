"""Tests an agreement whose leader is lost: its outcome reaches all surviving members or none."""

from __future__ import annotations

import asyncio
import random
from collections import deque
from collections.abc import Callable
from typing import Any

from asyncdist.collectives.agreement.messages import AgreementKey, DecisionRequest, Meeting, Undecided, Verdict
from asyncdist.collectives.agreement.termination import Termination
from asyncdist.waits import A_CONDITION, WaitId

KEY = AgreementKey.of("start", range(4))
VERDICT = Verdict(KEY.text, agreed=7)


class Engine:
    """An engine that checks the condition in each iteration of the loop."""

    async def until(self, condition: Callable[[], bool], what: WaitId, *, deadline: float | None) -> bool:
        while not condition():
            if deadline is not None:
                return False
            await asyncio.sleep(0)
        return True


class Members:
    """Members whose leader, rank 0, has died; messages wait until they are delivered, in order on each link.

    Attributes:
        told: Members that have received the decision.
        knows: Ranks that each rank knows to be dead, by rank.
    """

    def __init__(self, ranks: int) -> None:
        self.key = AgreementKey.of("start", range(ranks))
        self.meeting = Meeting(self.key, tuple(range(ranks)), 0, 0.0, (), True)
        self.links: dict[tuple[int, int], deque[Any]] = {}
        self.dead = {0}
        self.told: set[int] = set()
        self.knows: dict[int, set[int]] = {rank: set() for rank in range(1, ranks)}
        engine: Any = Engine()
        self.terminations = {rank: Termination(engine, rank, self.sender(rank)) for rank in range(1, ranks)}
        for each in self.terminations.values():
            each.expect(self.key)

    def sender(self, source: int) -> Callable[[Any, int], None]:
        return lambda message, dest: self.links.setdefault((source, dest), deque()).append(message)

    def deliver(self, source: int, dest: int) -> None:
        message = self.links[source, dest].popleft()
        termination = self.terminations[dest]
        match message:
            case Verdict():
                if termination.accepts(message, source):
                    self.told.add(dest)
            case DecisionRequest():
                termination.on_request(message, source)
            case Undecided():
                termination.on_undecided(message, source)

    async def be_member(self, rank: int) -> None:
        """Wait for the verdict; ask for it once the leader is known to be dead."""
        await Engine().until(lambda: rank in self.told or 0 in self.knows[rank], A_CONDITION, deadline=None)
        if rank not in self.told:
            await self.terminations[rank].ask(
                self.meeting, lambda: tuple(sorted(self.knows[rank])), lambda: rank in self.told, lambda _: None, None
            )

    def possible(self) -> list[tuple[str, int, int]]:
        """Return the possible next events: the delivery of a message, even of a dead rank, or the notice of a death."""
        found = [("comes", *link) for link, waiting in self.links.items() if waiting and link[1] not in self.dead]
        for rank, known in self.knows.items():
            if rank not in self.dead:
                found += [("hears", rank, lost) for lost in self.dead - known]
        return found


async def end(rng: random.Random) -> tuple[int, int]:
    """Kill the leader while it notifies members, and others as they ask; return the numbers of living and notified."""
    ranks = rng.randint(3, 6)
    members = Members(ranks)
    for rank in rng.sample(range(1, ranks), rng.randint(0, ranks - 2)):
        members.links[0, rank] = deque([Verdict(members.key.text, agreed=7)])
    tasks = {rank: asyncio.ensure_future(members.be_member(rank)) for rank in range(1, ranks)}
    deaths = rng.randint(0, ranks - 2)
    while not all(task.done() for rank, task in tasks.items() if rank not in members.dead):
        possible = members.possible()
        if deaths and (not possible or rng.random() < 0.1):
            deaths -= 1
            victim = rng.choice([rank for rank in tasks if rank not in members.dead])
            members.dead.add(victim)
            tasks[victim].cancel()
            if victim in members.told and rng.random() < 0.5:  # its last messages are lost with it
                members.links = {link: each for link, each in members.links.items() if link[0] != victim}
        elif possible:
            what, first, second = rng.choice(possible)
            members.deliver(first, second) if what == "comes" else members.knows[first].add(second)
        for _ in range(rng.choice((0, 3))):
            await asyncio.sleep(0)
    await asyncio.wait(tasks.values())
    while links := [link for link, each in members.links.items() if each and link[1] not in members.dead]:
        members.deliver(*rng.choice(links))  # messages that arrive after the decision
    living = tasks.keys() - members.dead
    return len(living), len(living & members.told)


async def test_all_that_live_hear_the_verdict_or_none_ever_does() -> None:
    ends = [await end(random.Random(f"termination {seed}")) for seed in range(70)]
    assert not [seed for seed, (living, told) in enumerate(ends) if told not in (0, living)]
    assert min(sum(told > 0 for _, told in ends), sum(told == 0 for _, told in ends)) > 10


async def test_late_news_forwarded_by_a_dead_rank_does_not_count() -> None:
    """The leader dies, then the only notified member, whose message to rank 2 has not been delivered yet."""
    members = Members(4)
    asking = [asyncio.ensure_future(members.be_member(rank)) for rank in (2, 3)]
    members.links[0, 1] = deque([Verdict(members.key.text, agreed=7)])
    members.deliver(0, 1)
    for rank in (2, 3):
        members.knows[rank].add(0)
    await turns()
    members.deliver(2, 1)
    assert members.links[1, 2], "rank 1 must have passed the message on"
    members.dead.add(1)
    members.deliver(3, 2)
    members.knows[3].add(1)
    await turns()
    members.deliver(2, 3)  # the rank's question
    members.deliver(2, 3)  # the rank's promise to the first question, which is not enough
    await turns()
    assert not asking[1].done()
    members.deliver(3, 2)  # the second question, which does not concern rank 1
    members.deliver(2, 3)
    await turns()
    assert asking[1].done()
    members.deliver(1, 2)
    assert members.told == {1}, "rank 2 has promised not to take the verdict from rank 1"
    members.knows[2].add(1)
    await turns()
    while not asking[0].done():
        for link in ((2, 3), (3, 2)):
            while members.links[link]:
                members.deliver(*link)
        await turns()
    assert members.told == {1}


async def turns() -> None:
    for _ in range(3):
        await asyncio.sleep(0)


def test_a_verdict_of_another_attempt_is_none_of_this_one() -> None:
    sent: list[Any] = []
    engine: Any = Engine()
    termination = Termination(engine, 1, lambda message, dest: sent.append((message, dest)))
    first, second = (AgreementKey(KEY.subject, KEY.ranks, time) for time in (1, 2))
    termination.expect(first)
    assert termination.accepts(Verdict(first.text, agreed=7), 0)
    assert not termination.accepts(Verdict(first.text, agreed=7), 2), "a verdict must be accepted only once"
    termination.stop_expecting(first)
    termination.on_request(DecisionRequest(first.text, ((0, 0),)), 2)
    termination.on_request(DecisionRequest(second.text, ((0, 0), (3, 99))), 2)
    assert sent == [(Verdict(first.text, agreed=7), 2), (Undecided(second.text, ((0, 0), (3, 3))), 2)]
    assert not termination.accepts(Verdict(second.text, agreed=7), 0) and termination.excludes(second, 0)
    assert termination.accepts(Verdict(second.text, agreed=7), 2)


def test_what_is_kept_is_bounded() -> None:
    engine: Any = Engine()
    termination = Termination(engine, 1, lambda *_: None)
    for time in range(1, 300):
        key = AgreementKey(KEY.subject, KEY.ranks, time)
        termination.on_request(DecisionRequest(key.text, ((0, 0),)), 2)
        termination.expect(key)
        termination.accepts(Verdict(key.text), 2)
        termination.stop_expecting(key)
    assert len(termination._received_verdicts) == len(termination._excluded) == 64 and not termination._open


async def test_member_without_a_timely_answer_is_named_and_awaited() -> None:
    members, late = Members(4), []
    asking = asyncio.ensure_future(
        members.terminations[1].ask(members.meeting, lambda: (0,), lambda: 1 in members.told, late.append, 0.0)
    )
    await asyncio.sleep(0)
    assert late == [(2, 3)] and not asking.done()
    for rank in (2, 3):
        members.deliver(1, rank)
        members.deliver(rank, 1)
    await asyncio.wait([asking])
    assert late == [(2, 3)] and 1 not in members.told
