"""Tests the members of a policy with a leader: succession, clean leaves, and admissions, without any policy."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import pytest

import asyncdist as ad
from asyncdist.simulation import Fault, Kill, Network, Restart, SlowLink, Uniform, simulate
from asyncdist.waits import WaitId, WaitKind
from protocols.joining.dispatcher import PolicyDispatcher
from protocols.joining.membership import Membership
from protocols.joining.messages import Waiting
from protocols.joining.replica_layout import SINGLE, Replicas
from protocols.joining.scopes import PolicyScopes

RANKS = 4
#: The last two ranks are killed and restarted.
RESTARTS: Sequence[Fault] = [fault for rank in (2, 3) for fault in (Kill(rank, at_s=0.1), Restart(rank, at_s=0.2))]


@dataclass
class MembershipListener:
    """Records the notifications of a membership."""

    lost: list[int] = field(default_factory=list)
    reachable: list[int] = field(default_factory=list)
    admitted: list[int] = field(default_factory=list)
    waiting: list[tuple[int, int, int]] = field(default_factory=list)
    followers: dict[int, tuple[tuple[int, int], ...]] = field(default_factory=dict)
    leader_count: int = 0
    settling_count: int = 0
    is_fit: bool = True

    def may_admit(self) -> bool:
        return self.is_fit

    def on_lost(self, rank: int) -> None:
        self.lost.append(rank)

    def on_new_leader(self) -> None:
        self.leader_count += 1

    def on_reachable(self, rank: int) -> None:
        self.reachable.append(rank)

    def on_admitted(self, rank: int) -> None:
        self.admitted.append(rank)

    def on_settling(self) -> None:
        self.settling_count += 1


async def until(world: ad.World, is_over: Callable[[], object]) -> None:
    """Wait until a condition is true."""
    await world.services.engine.until(lambda: bool(is_over()), WaitId(WaitKind.POLICY_ADMISSION))


def opened(
    world: ad.World, members: Sequence[int], attempt: int = 0, replicas: Replicas = SINGLE
) -> tuple[Membership, MembershipListener]:
    """Open a membership; if ``attempt`` is given, as a newcomer that joins rank 0."""
    listener = MembershipListener()
    membership = Membership(
        world.services,
        PolicyScopes(0, 0),
        members,
        known=replicas.ranks[:: replicas.size] or range(RANKS),
        leader=0 if attempt else None,
        attempt=attempt,
        replicas=replicas,
    )
    membership.open(listener)

    def note(message: Waiting, source: int) -> None:
        listener.waiting.append((source, message.incarnation, message.attempt))
        listener.followers[source] = message.followers
        world.services.engine.recheck()

    world.services.shared(PolicyDispatcher).open(0, note)
    return membership, listener


async def joined(world: ad.World, members: Sequence[int], attempt: int = 1, replicas: Replicas = SINGLE) -> Membership:
    """Join as a newcomer; the leader admits it as soon as it waits."""
    await until(world, lambda: not {0, 1} & world.services.gone)
    membership, _ = opened(world, members, attempt, replicas)
    world.services.shared(PolicyDispatcher).send(Waiting(0, *membership.identity[1:], membership.own_followers()), 0)
    await until(world, lambda: membership.admission)
    membership.complete_joining()
    return membership


async def admit(world: ad.World, membership: Membership, rank: int, attempt: int = 1) -> None:
    """Admit a newcomer that waits, and return when it has the state."""
    newcomer, ended, listener = (rank, 1, attempt), False, membership._listener
    assert isinstance(listener, MembershipListener), "the listener must be the one that a test has opened"

    def end() -> None:
        nonlocal ended
        ended = True
        world.services.engine.recheck()

    await until(world, lambda: newcomer in listener.waiting and membership.can_admit)
    membership.admit([newcomer], end, listener.followers[rank])
    assert not membership.can_admit, "only one newcomer may be admitted at a time"
    await until(world, lambda: ended)


def test_the_next_member_leads_after_a_loss_and_a_leave() -> None:
    async def main(world: ad.World) -> tuple[int, list[int], int]:
        membership, listener = opened(world, range(RANKS))
        await asyncio.sleep(0.5 if world.rank else 5.0)
        if world.rank != 1:
            await asyncio.sleep(0.5)
        membership.leave()
        return membership.leader, listener.lost, listener.leader_count

    _, one, two, three = simulate(main, ranks=RANKS, faults=[Kill(0, at_s=0.1)], until_s=10.0).results
    assert one == (1, [], 1)
    assert two == three == (2, [], 2), "the survivors must see rank 0 lost, and then rank 1 leave"


def test_newcomers_are_admitted_in_turn_and_know_each_other() -> None:
    """Regression: a newcomer could not reach an earlier newcomer, whose incarnation it did not know."""

    async def main(world: ad.World) -> list[bool]:
        if world.incarnation:
            membership = await joined(world, (0, 1) if world.rank == 2 else (0, 1, 2))
        else:
            membership, listener = opened(world, range(RANKS))
            await until(world, lambda: set(listener.lost) == {2, 3})
            if world.rank == 0:
                await admit(world, membership, 2)
                await admit(world, membership, 3)
        await until(world, lambda: membership.members() == (0, 1, 2, 3))
        await asyncio.sleep(1.0)
        reachable = [membership.is_reachable(rank) for rank in range(RANKS)]
        await asyncio.sleep(1.0)
        return reachable

    assert simulate(main, ranks=RANKS, faults=RESTARTS, until_s=10.0).results == ([True] * RANKS,) * RANKS


def test_a_newcomer_is_notified_when_all_members_know_it() -> None:
    memberships: dict[int, Membership] = {}

    async def main(world: ad.World) -> bool:
        if world.incarnation:
            await joined(world, (0, 1))
            return 2 in memberships[1].living
        memberships[world.rank], listener = opened(world, range(RANKS))
        await until(world, lambda: set(listener.lost) == {2, 3})
        if world.rank == 0:
            await admit(world, memberships[0], 2)
        await asyncio.sleep(1.0)
        return True

    slow = [Kill(3, at_s=0.1), *RESTARTS[:2], SlowLink(0, 1, at_s=0.0, factor=1000.0)]
    assert simulate(main, ranks=RANKS, faults=slow, until_s=10.0).results[:3] == (True,) * 3


def test_messages_that_arrive_before_the_start_count() -> None:
    """Regression: an admission that arrived before a slow member had started ended this member with an error."""

    async def main(world: ad.World) -> tuple[int, ...]:
        if world.incarnation:
            membership = await joined(world, (0, 1))
        else:
            await asyncio.sleep(1.0 if world.rank == 1 else 0.0)
            membership, listener = opened(world, range(RANKS))
            if world.rank == 0:
                await until(world, lambda: set(listener.lost) == {2, 3})
                await admit(world, membership, 2)
        await asyncio.sleep(1.0)
        members = membership.members()
        await asyncio.sleep(1.0)
        return members

    faults = [Kill(3, at_s=0.1), *RESTARTS[:2]]
    assert simulate(main, ranks=RANKS, faults=faults, until_s=10.0).results[:3] == ((0, 1, 2),) * 3


def test_an_outdated_request_dismisses_no_member() -> None:
    """Regression: a request that arrived after the admission, over a slow link, dismissed the member."""

    async def main(world: ad.World) -> object:
        if world.incarnation:
            await joined(world, (0, 1))
        else:
            membership, listener = opened(world, range(RANKS))
            await until(world, lambda: set(listener.lost) == {2, 3})
            if world.rank == 0:
                await admit(world, membership, 2)
                dismissals = [membership.drop_earlier_process(2, 0, 9), membership.drop_earlier_process(2, 1, 1)]
                return dismissals, membership.members(), membership.drop_earlier_process(2, 1, 2), membership.members()
        await asyncio.sleep(1.0)
        return None

    faults = [Kill(3, at_s=0.1), *RESTARTS[:2]]
    result = simulate(main, ranks=RANKS, faults=faults, until_s=10.0).value()
    assert result == ([False, False], (0, 1, 2), True, (0, 1))


def test_a_leave_of_an_earlier_attempt_does_not_count() -> None:
    """Regression: it was counted against the later attempt that had been admitted meanwhile."""

    async def main(world: ad.World) -> tuple[int, ...]:
        if world.incarnation:
            (await joined(world, (0, 1))).leave()
            membership = await joined(world, (0, 1), attempt=2)
        else:
            membership, listener = opened(world, range(RANKS))
            await until(world, lambda: set(listener.lost) >= {2, 3})
            if world.rank == 0:
                await admit(world, membership, 2)
                await until(world, lambda: listener.lost.count(2) == 2)
                await admit(world, membership, 2, attempt=2)
        await asyncio.sleep(5.0)
        members = membership.members()
        await asyncio.sleep(5.0)
        return members

    # The confirmation of the second admission takes a different link than the leave of the first attempt.
    faults = [Kill(3, at_s=0.1), *RESTARTS[:2], SlowLink(2, 1, at_s=0.0, factor=10000.0)]
    assert simulate(main, ranks=RANKS, faults=faults, until_s=20.0).results[:3] == ((0, 1, 2),) * 3


@pytest.mark.parametrize(
    ("slowness", "attempts", "notice_s"), [(1.0, 1, 0.02), (300.0, 1, 0.02), (1.0, 2, 0.02), (1.0, 1, 0.3)]
)
def test_members_confirm_a_replica_of_which_one_rank_joins(slowness: float, attempts: int, notice_s: float) -> None:
    """Regression: the confirmation was missing in three cases, so the replica waited forever.

    Its follower connected to a member after its first rank; its first rank tried twice; or a member was notified of
    the follower's loss and of its return at the same time. Ranks 0, 2 and 4 are members; rank 5 follows rank 4.
    """

    async def main(world: ad.World) -> tuple[int, ...]:
        replicas = Replicas(tuple(range(6)), 2)
        if world.rank % 2:
            await asyncio.sleep(15.0)
            return ()
        if world.incarnation:
            await until(world, lambda: not {0, 2, 5} & world.services.gone and world.services.restarted.get(5))
            membership = await joined(world, (0, 2), 1, replicas)
            if attempts == 2:
                membership.leave()
                membership = await joined(world, (0, 2), 2, replicas)
        else:
            membership, listener = opened(world, (0, 2, 4), replicas=replicas)
            await until(world, lambda: listener.lost == [4])
            if world.rank == 0:
                await admit(world, membership, 4)
            if world.rank == 0 and attempts == 2:
                await until(world, lambda: listener.lost == [4, 4])
                await asyncio.sleep(0.1)  # rank 2 has been notified, too
                await admit(world, membership, 4, 2)
        await asyncio.sleep(5.0)
        members = membership.members()
        await asyncio.sleep(5.0)
        return members

    faults: Sequence[Fault] = [
        *(Kill(rank, at_s=0.1) for rank in (4, 5)),
        *(Restart(rank, at_s=0.2) for rank in (4, 5)),
        SlowLink(5, 2, at_s=0.0, factor=slowness),
    ]
    network = Network(loss_detection_s=Uniform(0.0, notice_s))
    for seed in range(3):
        results = simulate(main, ranks=6, seed=seed, network=network, faults=faults, until_s=30.0).results
        assert results[::2] == ((0, 2, 4),) * 3


@pytest.mark.parametrize("killed", [None, 0, 3])
@pytest.mark.parametrize("kill_s", [0.05, 0.35, 1.0])
def test_members_wait_until_all_settle(killed: int | None, kill_s: float) -> None:
    async def main(world: ad.World) -> list[tuple[float, tuple[int, ...]]]:
        membership, found = opened(world, range(RANKS))[0], []
        for count in range(3):
            await asyncio.sleep(0.1 * (1 + world.rank))
            least = await membership.settle(lambda: False, (10 * count + world.rank, -world.rank))
            found.append((round(world.time(), 1), least))
        assert not membership.settling
        await asyncio.sleep(5.0)
        membership.leave()
        return found

    faults = [] if killed is None else [Kill(killed, at_s=kill_s)]
    results = simulate(main, ranks=RANKS, faults=faults, until_s=30.0).results
    living = [result for rank, result in enumerate(results) if rank != killed]
    assert all(len(found) == 3 for found in living), "all living members must continue"
    if killed is None:
        assert living == [[(0.4, (0, -3)), (0.8, (10, -3)), (1.2, (20, -3))]] * RANKS


@pytest.mark.parametrize("end", ["lost", "left", "welcomed again"])
def test_a_leader_abdicates_if_a_welcomed_rank_has_gone(end: str) -> None:
    """Regression: if the rank was lost before its admission, a slow leader never abdicated again."""

    async def main(world: ad.World) -> bool | None:
        if world.incarnation:
            await until(world, lambda: not {0, 1} & world.services.gone)
            membership, _ = opened(world, range(RANKS), attempt=1)
            await asyncio.sleep(0.2)
            if end != "lost":
                membership.leave()
            await asyncio.sleep(5.0)
            return None
        membership, _ = opened(world, range(RANKS))
        if world.rank:
            await asyncio.sleep(2.0)
            return membership.leads
        await asyncio.sleep(0.25)
        assert membership.drop_earlier_process(3, 1, 1)
        membership.abdicate()
        assert membership.leads, "the welcomed rank waits for this leader"
        await asyncio.sleep(0.75)
        if end == "welcomed again":
            assert membership.drop_earlier_process(3, 1, 2)
        membership.abdicate()
        await asyncio.sleep(1.0)
        return membership.leads

    faults = [Kill(3, at_s=0.1), Restart(3, at_s=0.2), *([Kill(3, at_s=0.5)] if end == "lost" else [])]
    leads = simulate(main, ranks=RANKS, faults=faults, until_s=30.0).results[:3]
    assert leads == ((True, False, False) if end == "welcomed again" else (False, True, False))
