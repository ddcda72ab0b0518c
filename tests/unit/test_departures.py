"""Tests the notices that ranks of a large world exchange when they leave: the tree and the notices sent along it."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import dataclass, field

import pytest
from hypothesis import given, strategies as st
from support.seeds import seeds

from asyncdist import RemoteProtocolError
from asyncdist.messaging import wire
from asyncdist.runtime.departing.departures import Departed, Departure, Departures, EndAcknowledged, SpanningTree, Stage


@given(st.integers(1, 70), st.randoms(use_true_random=False))
def test_the_living_ranks_are_one_tree_whatever_ranks_are_lost(size: int, rng: random.Random) -> None:
    lost = rng.sample(range(size), rng.randint(0, size - 1))
    trees = [SpanningTree(size, rank) for rank in range(size)]
    for rank in lost:
        for tree in trees:
            tree.on_lost(rank)
    living = sorted(set(range(size)) - set(lost))
    assert [rank for rank in living if trees[rank].parent is None] == living[:1]
    for rank in living:
        assert all(trees[child].parent == rank for child in trees[rank].children)
        below, reached = [rank], []
        while below:
            reached.append(below.pop())
            below += trees[reached[-1]].children
        assert sorted(reached) == [r for r in living if trees[rank].first <= r <= trees[rank].last], (
            "each rank must be reached exactly once"
        )


def test_a_tree_of_a_thousand_ranks_has_ten_levels() -> None:
    depth = Counter(len(list(_ancestors(rank))) for rank in range(1000))
    assert max(depth) == 9
    assert max(len(SpanningTree(1000, rank).children) for rank in range(1000)) == 2


def _ancestors(rank: int) -> list[int]:
    parent = SpanningTree(1000, rank).parent
    return [] if parent is None else [parent, *_ancestors(parent)]


@pytest.mark.parametrize("pair_count", [0, 200, 3200])
def test_any_number_of_long_departures_fits_into_messages(pair_count: int) -> None:
    """Regression: of 440 ranks that had sent to every second rank, no one heard that some had left."""
    size = 440
    departures = Departures(size, 1)
    told = tuple((2**31 + 2 * number, 2**31 + 2 * number) for number in range(pair_count))
    for rank in range(3, size, 2):
        departures.add(Departure.of(rank, Stage.LEFT, (), (), (*told, (rank, rank))), rank)
    codec = wire.Codec(Departed | EndAcknowledged)
    sent = [message for rank, message in departures.others() if rank == departures.tree.neighbours[0]]
    for message in sent:
        codec.encode(message)  # raises LocalProtocolError for a message above the size of a frame
    assert [rank for message in sent for each in message.departures for rank in each.ranks] == [*range(3, size, 2)]


# -- a world of departures --------------------------------------------------------------------------------------------


@dataclass
class Story:
    """Ranks that leave, end or are lost, and their messages, in an order drawn from ``rng``."""

    size: int
    rng: random.Random
    spoiled: float = 0.0
    lost: set[int] = field(default_factory=set)
    gone: set[int] = field(default_factory=set)  # ranks that have ended and receive nothing
    sent: Counter[int] = field(default_factory=Counter)

    def __post_init__(self) -> None:
        self.ranks = [Departures(self.size, rank) for rank in range(self.size)]
        self.under_way: list[tuple[int, int, Departed | EndAcknowledged]] = []
        self.untold: list[tuple[int, int]] = []  # pairs: a rank, and a lost rank of which it will be notified
        self.known: list[dict[int, int]] = [{} for _ in range(self.size)]

    @property
    def living(self) -> list[int]:
        return [rank for rank in range(self.size) if rank not in self.lost]

    def send(self, source: int, messages: list[tuple[int, Departed]]) -> None:
        self.under_way += [(source, dest, message) for dest, message in messages]
        self.sent[source] += len(messages)

    def reach(self, rank: int, stage: Stage) -> None:
        started = ((1, rank % 3),) if self.rng.random() < 0.2 else ()
        self.ranks[rank].add(Departure.of(rank, stage, started), rank)
        self.send(rank, self.ranks[rank].urgent())

    def deliver(self) -> None:
        """Deliver the first message of a drawn pair of ranks."""
        source, dest, _ = self.rng.choice(self.under_way)
        index = next(i for i, each in enumerate(self.under_way) if each[:2] == (source, dest))
        message = self.under_way.pop(index)[2]
        if dest in self.lost | self.gone or self.rng.random() < self.spoiled:
            return
        if isinstance(message, EndAcknowledged):
            self.ranks[dest].on_end_known(source)
            self.answer(dest)
            self.send(dest, self.ranks[dest].urgent())
            return
        for departure in self.ranks[dest].on_departed(message, source):
            for rank in departure.ranks:
                assert self.known[dest].get(rank, 0) < departure.stage, "a departure may be reported as new only once"
                self.known[dest][rank] = departure.stage
        self.answer(dest)
        self.send(dest, self.ranks[dest].urgent())

    def answer(self, rank: int) -> None:
        answers = self.ranks[rank].take_answers()
        self.under_way += [(rank, dest, EndAcknowledged()) for dest in answers]
        self.sent[rank] += len(answers)

    def end_ranks(self) -> None:
        """End the ranks whose work is over."""
        self.gone |= {rank for rank in self.living if self.ranks[rank].is_over}

    def lose(self, rank: int) -> None:
        self.lost.add(rank)
        self.untold += [(other, rank) for other in self.living]
        self.under_way = [each for each in self.under_way if each[0] != rank or self.rng.random() < 0.5]

    def hear_of_a_loss(self) -> None:
        rank, lost = self.untold.pop(self.rng.randrange(len(self.untold)))
        if rank in self.lost | self.gone:
            return
        self.ranks[rank].on_lost(lost)
        self.answer(rank)
        self.send(rank, self.ranks[rank].urgent())

    def tell_all(self, *, again: bool = False) -> None:
        for rank in set(self.living) - self.gone:
            if again:
                self.ranks[rank].resend_announcements()
                self.answer(rank)
                self.send(rank, self.ranks[rank].urgent())
            self.send(rank, self.ranks[rank].others())

    def settle(self) -> None:
        while self.under_way or self.untold:
            self.deliver() if self.under_way else self.hear_of_a_loss()


@pytest.mark.parametrize("seed", seeds(60))
def test_all_learn_that_all_ended_despite_losses_and_damage(seed: int) -> None:
    rng = random.Random(seed)
    story = Story(rng.choice([2, 3, 5, 17, 33]), rng, spoiled=0.2 * (seed % 4 == 3))
    to_lose = rng.sample(range(story.size), rng.randint(0, story.size // 2)) if seed % 3 == 0 else []
    to_come = {rank: [Stage.LEFT, Stage.ENDED] for rank in range(story.size)}
    while any(to_come[rank] for rank in story.living) or to_lose:
        waiting = [rank for rank in story.living if to_come[rank]]
        action = rng.random()
        if action < 0.2 and waiting:
            rank = rng.choice(waiting)
            story.reach(rank, to_come[rank].pop(0))
        elif action < 0.25 and to_lose:
            story.lose(to_lose.pop())
        elif action < 0.35 and story.untold:
            story.hear_of_a_loss()
        elif action < 0.4:
            story.tell_all()
        elif story.under_way:
            story.deliver()
        story.end_ranks()
        last = [rank for rank in story.living if to_come[rank]]
        assert not last or all(story.ranks[rank].stage < Stage.ENDED for rank in story.living), (
            "no rank may end before all ranks have arrived"
        )
    for _ in range(40):
        story.settle()
        if all(story.ranks[rank].stage >= Stage.ENDED for rank in story.living):
            return
        story.end_ranks()
        story.tell_all(again=True)
    raise AssertionError([rank for rank in story.living if story.ranks[rank].stage < Stage.ENDED])


@pytest.mark.parametrize("seed", seeds(30))
def test_who_stays_hears_of_each_that_has_left(seed: int) -> None:
    rng = random.Random(seed)
    story = Story(33, rng)
    staying = set(rng.sample(range(33), rng.randint(1, 20)))
    lost = rng.sample(range(33), rng.randint(0, 5))
    for rank in sorted(set(range(33)) - staying, key=lambda _: rng.random()):
        story.reach(rank, Stage.LEFT)
        if lost and rng.random() < 0.3:
            story.lose(lost.pop())
        story.deliver() if story.under_way else None
    for _ in range(40):
        story.settle()
        story.tell_all()
    left = set(range(33)) - staying - story.lost
    for rank in staying - story.lost:
        assert left <= story.known[rank].keys(), rank
        assert story.ranks[rank].stage == Stage.IN_MAIN or staying <= story.lost


@pytest.mark.parametrize("size", [17, 100, 300])
def test_equal_ends_cost_six_messages_and_one_fact_per_rank(size: int) -> None:
    story = Story(size, random.Random(0))
    for rank in range(size):
        story.ranks[rank].add(Departure.of(rank, Stage.LEFT), rank)
        story.ranks[rank].add(Departure.of(rank, Stage.ENDED), rank)
        story.send(rank, story.ranks[rank].urgent())
    story.settle()
    assert all(each.is_over for each in story.ranks)
    assert max(story.sent.values()) == 6, (
        "a rank may send two messages to each child, one to its parent, and one acknowledgement"
    )
    assert max(len(each._accounts) for each in story.ranks) == 1


@pytest.mark.parametrize("size", [17, 100])
def test_a_rank_is_over_when_all_have_heard_that_all_have_ended(size: int) -> None:
    story = Story(size, random.Random(0))
    for rank in range(size):
        story.reach(rank, Stage.LEFT)
        story.reach(rank, Stage.ENDED)
    while story.under_way:
        story.deliver()
        for rank in range(size):
            have_all_heard = all(each.stage >= Stage.ENDED for each in story.ranks)
            assert have_all_heard or not story.ranks[rank].is_over, "a rank must wait until all others know of the end"
    assert all(each.is_over for each in story.ranks)


@pytest.mark.parametrize("size", [17, 33])
def test_rank_that_lost_all_above_it_learns_the_end_from_others(size: int) -> None:
    story = Story(size, random.Random(0))
    orphan = size - 1
    for rank in range(size):
        story.reach(rank, Stage.LEFT)
        story.reach(rank, Stage.ENDED)
    above = [rank for rank in range(orphan) if story.ranks[rank].tree.last >= orphan]
    while story.under_way:
        _, dest, message = story.under_way[-1]
        if dest == above[1] and isinstance(message, Departed) and message.stage == Stage.ENDED:
            story.under_way.pop()
        else:
            story.deliver()
        story.end_ranks()
    for rank in above:
        story.lose(rank)
    story.settle()
    assert all(story.ranks[rank].is_over for rank in story.living)


@pytest.mark.parametrize(
    "departure",
    [
        Departure(-1, b"\1", 1),
        Departure(40, b"\1", 1),
        Departure(38, b"\4", 1),
        Departure(0, bytes(6), 1),
        Departure(0, b"", 1),
        Departure(1 << 62, b"\1", 1),
        Departure(0, b"\1", 0),
        Departure(0, b"\1", 7),
    ],
)
def test_what_cannot_be_is_refused(departure: Departure) -> None:
    ranks = Departures(40, 0)
    with pytest.raises(RemoteProtocolError, match="is not valid in a world of 40 ranks"):
        ranks.on_departed(Departed((departure,), 0), 1)
    with pytest.raises(RemoteProtocolError, match=r"stage .* must be a known one, got 9"):
        ranks.on_departed(Departed((), 9), 1)
