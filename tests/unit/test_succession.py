"""Tests who coordinates after a coordinator is lost: the order, the epochs, and that all ranks agree in the end."""

from __future__ import annotations

import random
from collections import deque
from typing import Any

import pytest
from hypothesis import given, settings, strategies as st

from asyncdist.messaging.wire import EPOCH_MAX
from protocols.selective.succession import (
    NOMINATION_COUNT_MAX,
    Claim,
    Follow,
    Inform,
    Nominate,
    Step,
    Steps,
    Succession,
)

ORDER = (0, 1, 2, 3)


def test_first_of_the_order_claims_and_the_others_nominate_it() -> None:
    views = {rank: Succession(rank, ORDER, 0) for rank in (1, 2, 3)}
    assert views[1].on_lost(0) == (Claim(2),)
    assert views[2].on_lost(0) == (Nominate(1),)
    assert views[2].coordinator is None
    assert views[2].on_claim(2, 1, 1) == (Follow(2, 1),)
    assert (views[2].epoch, views[2].coordinator) == (2, 1)
    assert views[3].on_claim(2, 1, 1) == (Follow(2, 1),), "the claim must be followed even before the loss is known"
    assert views[3].on_lost(0) == ()


def test_rank_that_left_the_policy_is_skipped_but_can_coordinate() -> None:
    view = Succession(2, ORDER, 0)
    assert view.on_left(0) == () and view.coordinator == 0
    assert view.on_lost(0) == (Nominate(1),)
    assert view.on_left(1) == (Claim(3),)


def test_unresponsive_rank_is_skipped_for_the_time_being() -> None:
    view = Succession(3, ORDER, 0)
    asked = [view.on_lost(0)]
    asked += [view.on_cadence() for _ in range(2 * NOMINATION_COUNT_MAX)]
    assert asked[:NOMINATION_COUNT_MAX] == [(Nominate(1),)] * NOMINATION_COUNT_MAX
    assert asked[NOMINATION_COUNT_MAX : 2 * NOMINATION_COUNT_MAX] == [(Nominate(2),)] * NOMINATION_COUNT_MAX
    assert asked[-1] == (Claim(4),)
    assert view.on_cadence() == ()
    assert view.on_claim(6, 1, 1) == (Follow(6, 1),), "a claim with a larger epoch must be followed"


def test_epochs_of_two_ranks_are_never_equal() -> None:
    epochs: dict[int, set[int]] = {rank: set() for rank in ORDER}
    for rank in ORDER:
        view = Succession(rank, ORDER, 9)
        view.on_lost(9)
        for epoch in range(60):
            view.epoch, view.coordinator = epoch, 9
            (claim,) = view.on_suspicion()
            assert isinstance(claim, Claim) and epoch < claim.epoch <= epoch + len(ORDER)
            epochs[rank].add(claim.epoch)
    assert sum(map(len, epochs.values())) == len(set.union(*epochs.values()))


def test_a_member_takes_over_from_a_coordinator_that_it_suspects() -> None:
    view = Succession(2, ORDER, 0)
    assert view.on_suspicion() == (Claim(3),)
    assert view.on_suspicion() == (), "a coordinator must not suspect itself"
    assert view.on_claim(5, 0, 0) == (Follow(5, 0),), "a claim of the suspected coordinator must be followed"
    view.leave()
    assert view.on_suspicion() == ()
    leaderless = Succession(3, ORDER, 0)
    leaderless.on_lost(0)
    assert leaderless.on_suspicion() == (), "the rank must wait for the first rank of the order, which it nominates"


def test_the_first_of_those_that_can_take_over_have_a_place() -> None:
    assert [Succession(rank, ORDER, 1).place(2) for rank in ORDER] == [0, None, 1, None]
    view = Succession(3, ORDER, 1)
    view.on_left(0)
    assert view.place(2) == 1
    view.leave()
    assert view.place(2) is None
    assert Succession(9, ORDER, 9).place(2) is None, "a reserved coordinator must have no place in the order"


def test_an_epoch_that_no_frame_can_carry_is_not_believed() -> None:
    view = Succession(2, ORDER, 0)
    assert view.on_nomination(3, EPOCH_MAX + 1) == () == view.on_claim(2**63 - 1, 1, 1)
    assert (view.epoch, view.coordinator) == (0, 0)
    assert view.on_claim(EPOCH_MAX, 1, 1) == (Follow(EPOCH_MAX, 1),), "the last possible epoch must be accepted"
    assert view.on_suspicion() == (), "after the last epoch, no rank can claim another one"


def test_a_claim_that_this_rank_has_not_made_is_not_believed() -> None:
    """Regression: the rank accepted itself as coordinator without coordinating, and took part in no further round."""
    view = Succession(2, ORDER, 0)
    assert view.on_claim(7, 2, 3) == () and (view.epoch, view.coordinator) == (0, 0)


def test_who_has_missed_a_claim_is_told() -> None:
    view = Succession(1, ORDER, 0)
    view.on_lost(0)
    assert view.on_nomination(3, 0) == (Inform(3),)
    assert view.on_claim(1, 0, 0) == (Inform(0),), "a slow coordinator must be informed of the newer epoch"
    assert view.on_nomination(3, 2) == ()
    leaderless = Succession(3, ORDER, 0)
    leaderless.on_lost(0)
    assert leaderless.on_nomination(2, 0) == ()


def test_a_coordinator_that_died_after_its_claim_is_not_followed() -> None:
    view = Succession(2, ORDER, 0)
    view.on_lost(1)
    assert view.on_claim(2, 1, 1) == (Nominate(0),)
    first = Succession(0, ORDER, 0)
    assert first.on_nomination(2, 2) == (Claim(5),), "the rank does not know of the claim, and must still coordinate"
    assert view.on_claim(5, 0, 0) == (Follow(5, 0),)


def test_a_reserved_coordinator_that_was_replaced_seeks_none() -> None:
    view = Succession(9, ORDER, 9)
    assert view.on_claim(1, 0, 0) == (Follow(1, 0),)


def test_a_rank_that_has_left_the_policy_claims_nothing() -> None:
    """A rank that still coordinates is notified that a later coordinator was lost."""
    view = Succession(0, ORDER, 0)
    view.leave()
    assert view.coordinator == 0
    assert view.on_nomination(3, 2) == (Nominate(1),)


def test_a_rank_that_knows_of_no_other_seeks_no_more() -> None:
    view = Succession(9, (0,), 9)
    view.on_lost(0)
    assert view.on_claim(1, 0, 0) == (), "a reserved coordinator whose only member died must not answer a claim"
    assert view.on_cadence() == () == view.on_cadence() == view.on_cadence()


class Population:
    """Ranks whose messages arrive in order between each two of them, and otherwise at any time."""

    def __init__(self, size: int, seed: int) -> None:
        self.rng = random.Random(seed)
        self.size = size
        self.views = {rank: Succession(rank, range(size), 0) for rank in range(size)}
        self.links: dict[tuple[int, int], deque[tuple[str, tuple[Any, ...]]]] = {}
        self.dead: set[int] = set()
        self.claims: list[tuple[int, int]] = []

    def send(self, source: int, dest: int, kind: str, *facts: Any) -> None:
        self.links.setdefault((source, dest), deque()).append((kind, facts))

    def carry_out(self, rank: int, steps: Steps) -> None:
        for step in steps:
            self._carry_out(rank, step)

    def _carry_out(self, rank: int, step: Step) -> None:
        view = self.views[rank]
        match step:
            case Nominate(dest):
                self.send(rank, dest, "nomination", view.epoch)
            case Inform(dest):
                self.send(rank, dest, "claim", view.epoch, view.coordinator)
            case Claim(epoch):
                self.claims.append((epoch, rank))
                for other in range(self.size):
                    if other != rank:
                        self.send(rank, other, "claim", epoch, rank)
            case Follow(epoch, coordinator):
                assert (view.epoch, view.coordinator) == (epoch, coordinator)

    def kill(self, rank: int) -> None:
        self.dead.add(rank)
        for other in range(self.size):
            self.send(rank, other, "loss", rank)  # after all earlier messages, like the end of a connection

    def deliver_one(self) -> bool:
        links = sorted(link for link, waiting in self.links.items() if waiting)
        if not links:
            return False
        source, dest = self.rng.choice(links)
        kind, facts = self.links[source, dest].popleft()
        if dest in self.dead:
            return True
        view = self.views[dest]
        match kind:
            case "loss":
                steps = view.on_lost(*facts)
            case "nomination":
                steps = view.on_nomination(source, *facts)
            case _:
                steps = view.on_claim(*facts, source)
        self.carry_out(dest, steps)
        return True

    def settle(self) -> None:
        while True:
            while self.deliver_one():
                pass
            living = [rank for rank in self.views if rank not in self.dead]
            leaderless = [rank for rank in living if self.views[rank].coordinator is None]
            if not leaderless:
                return
            rank = self.rng.choice(leaderless)
            self.carry_out(rank, self.views[rank].on_cadence())


@settings(max_examples=300, deadline=None)
@given(st.integers(2, 7), st.integers(0, 2**32), st.data())
def test_after_any_losses_all_who_live_follow_one_of_them(size: int, seed: int, data: st.DataObject) -> None:
    population = Population(size, seed)
    for rank in data.draw(st.permutations(range(size)))[: data.draw(st.integers(1, size - 1))]:
        population.kill(rank)
        for _ in range(data.draw(st.integers(0, 6))):
            population.deliver_one()
    population.settle()
    living = [view for rank, view in population.views.items() if rank not in population.dead]
    assert len({(view.epoch, view.coordinator) for view in living}) == 1
    assert living[0].coordinator not in population.dead
    assert len({epoch for epoch, _ in population.claims}) == len(population.claims), "an epoch was claimed twice"


@pytest.mark.parametrize("size", [2, 33])
def test_one_loss_costs_a_nomination_and_a_claim_for_each_rank(size: int) -> None:
    population = Population(size, 1)
    population.kill(0)
    population.settle()
    assert [rank for _, rank in population.claims] == [1]
