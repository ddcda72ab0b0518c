"""Tests restarted ranks: their identity, their admission, and the conversion of their whole state to bytes."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings, strategies as st
from support.selective import OpenedCoordinator

from asyncdist import LateError, RemoteProtocolError
from asyncdist.collectives.agreement.absences import Absences
from asyncdist.waits import WaitId
from protocols.joining.dispatcher import Application, NotMember, Welcome
from protocols.joining.state_transfer import packed, unpacked
from protocols.selective.messages import Admitted, Assign, Frozen, Joined
from protocols.selective.roster import Send
from protocols.selective.rounds import RoundCoordinator
from protocols.selective.selection import SelectiveRules


def rules(**options: Any) -> SelectiveRules:
    return SelectiveRules(**{"grace_s": 1.0, "round_timeout_s": 10.0, **options})


def running(values: list[float]) -> RoundCoordinator:
    """Return a coordinator whose members have all reported, and whose first round is over."""
    coordinator = OpenedCoordinator(range(len(values)), rules(replacement_ratio=0.0))
    for rank, value in enumerate(values):
        coordinator.on_report(rank, 9, value, 1.0, 0.0)
    return coordinator


def admission(coordinator: RoundCoordinator, rank: int, *, donor: int, now: float) -> int:
    """Make the round that admits a rank; return its number."""
    sends = coordinator.on_newcomer(rank, 1, now)
    assigned = [send for send in sends if isinstance(send.message, Assign)]
    assert {send.dest for send in assigned} == {rank, donor}
    assert all(send.message.admits and send.message.restarted == ((rank, 1),) for send in assigned)  # type: ignore[union-attr]
    number = assigned[0].round
    coordinator.on_ready(donor, number, 9, now)
    return number


def test_newcomer_gets_the_best_members_state_and_then_counts() -> None:
    coordinator = running([1.0, 5.0, 3.0])
    coordinator.on_lost(2, 1.0)
    number = admission(coordinator, 2, donor=1, now=2.0)
    assert coordinator.members() == ((0, 0), (1, 0)), "a newcomer must not count as a member before it has the state"
    sends = coordinator.on_applied(2, number, 9, 3.0)
    assert [send for send in sends if isinstance(send.message, Admitted)] == [
        Send(rank, 0, Admitted(2, 1)) for rank in range(3)
    ]
    assert coordinator.members() == ((0, 0), (1, 0), (2, 1))
    assert coordinator.on_newcomer(2, 1, 4.0) == (Send(2, 0, Admitted(2, 1)),), (
        "the newcomer asks again, so Admitted must be repeated"
    )
    coordinator.on_leave(2, 5.0)
    assert coordinator.on_newcomer(2, 1, 6.0) == (), "an earlier request must be ignored after the rank has left"
    for rank in range(2):
        coordinator.on_leave(rank, 7.0)
    assert coordinator.finished


def test_newcomers_of_a_round_need_not_arrive_in_order() -> None:
    """Regression: eight newcomers in descending order ended the coordinator with an IndexError, on 64 failing ranks."""
    coordinator = running([1.0] * 5 + [5.0] + [1.0] * 4)
    waiting = (9, 8, 7, 6, 4, 3, 2, 1)
    for rank in (0, *waiting):
        coordinator.on_lost(rank, 1.0)
    number = admission(coordinator, 0, donor=5, now=2.0)
    for rank in waiting:
        coordinator.on_newcomer(rank, 1, 2.5)
    sends = coordinator.on_applied(0, number, 9, 3.0)
    assert {send.dest for send in sends if isinstance(send.message, Assign)} == {5, *waiting}


def test_a_newcomer_is_neither_waited_for_nor_judged() -> None:
    coordinator = running([1.0, 5.0, 3.0])
    coordinator.on_lost(2, 1.0)
    admission(coordinator, 2, donor=1, now=2.0)
    coordinator.on_lost(2, 3.0)
    for rank in range(2):
        coordinator.on_report(rank, 19, 1.0, 1.0, 4.0)
    assert coordinator.statistics().decision_count == 2, (
        "both members that count have reported, so the round must be decided"
    )
    assert not coordinator.on_report(2, 19, 9.0, 1.0, 4.0)


def test_next_donor_gives_after_a_failure_and_a_new_decision() -> None:
    coordinator = running([1.0, 5.0, 3.0])
    coordinator.on_lost(0, 1.0)
    number = admission(coordinator, 0, donor=1, now=2.0)
    assert not any(isinstance(s.message, Assign) for s in coordinator.on_abandoned(0, number, "no", 3.0))
    coordinator.on_report(1, 19, 5.0, 1.0, 4.0)
    sends = coordinator.on_report(2, 19, 3.0, 1.0, 4.0)
    assert {s.dest for s in sends if isinstance(s.message, Assign)} == {0, 2}


def test_a_newcomer_that_waits_is_no_straggler_of_a_decision() -> None:
    coordinator = running([1.0, 5.0, 3.0])
    coordinator.on_lost(0, 1.0)
    number = admission(coordinator, 0, donor=1, now=2.0)
    coordinator.on_abandoned(0, number, "no", 3.0)
    before = coordinator.statistics()
    coordinator.on_report(1, 19, 5.0, 1.0, 4.0, interval_s=1.0)
    coordinator.on_report(2, 19, 3.0, 1.0, 4.0, interval_s=1.0)
    after = coordinator.statistics()
    assert after.decision_count == before.decision_count + 1
    assert after.stragglers == before.stragglers


def test_admission_time_covers_the_work_after_the_weights() -> None:
    coordinator = running([1.0, 5.0, 3.0])
    coordinator.on_lost(2, 1.0)
    (number,) = {send.round for send in coordinator.on_newcomer(2, 1, 2.0)}
    (send,) = coordinator.on_ready(1, number, 9, 2.0, state_safe_points=7)
    assert isinstance(send.message, Frozen)
    assert send.message.timeout_s == 10.0 + (1 + 1) * 1.0 + (3 + 7) * 1.0


def test_new_coordinator_counts_a_rank_admitted_before() -> None:
    coordinator = OpenedCoordinator([0, 1], rules(), may_join=[0, 1, 2])
    coordinator.on_joined(2, Joined(7, -1, -1, 9, 1.0, 1.0, 1.0, incarnation=3), 0.0)
    assert coordinator.members() == ((0, 0), (1, 0), (2, 3))


def test_new_coordinator_ignores_a_rank_outside_the_policy() -> None:
    coordinator = OpenedCoordinator([0, 1], rules(), may_join=[0, 1, 2])
    assert coordinator.on_joined(3, Joined(7, -1, -1, 9, 1.0, 1.0, 1.0), 0.0) == ()
    assert coordinator.on_report(3, 9, 1.0, 1.0, 0.0) == ()
    assert coordinator.members() == ((0, 0), (1, 0))
    assert coordinator.statistics().ignored == {
        "Joined from a rank that is not a member": 1,
        "Report from a rank that is not a member": 1,
    }


def test_what_is_agreed_on_after_a_restart_is_another_subject() -> None:
    known = Absences(0, 0)
    before = known.key_of("a policy's start", [0, 1, 2])
    assert not known.replaced(before)
    known.on_returned(2, 1)
    assert known.replaced(before) == (2,)
    assert known.key_of("a policy's start", [0, 1]) == Absences(0, 0).key_of("a policy's start", [0, 1])
    after = known.key_of("a policy's start", [0, 1, 2])
    assert after != before
    assert not known.replaced(after)
    assert known.replaced(type(after).parse(f"{after}, time 2")) == ()
    known.on_returned(2, 2)
    assert known.replaced(after) == (2,)
    assert known.losses([2, 1]) == ((1, 0), (2, 2))


# -- the state's bytes ------------------------------------------------------------------------------------------------


def same(one: Any, two: Any) -> bool:
    if isinstance(one, torch.Tensor):
        return one.dtype == two.dtype and one.shape == two.shape and torch.equal(one, two)
    if isinstance(one, dict):
        return one.keys() == two.keys() and all(same(one[key], two[key]) for key in one)
    if isinstance(one, (list, tuple)):
        return type(one) is type(two) and len(one) == len(two) and all(map(same, one, two))
    return type(one) is type(two) and (one == two or (one != one and two != two))


@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW])
def test_an_optimizers_state_survives_the_way_bit_by_bit(kind: Any) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4))
    options = {"momentum": 0.9} if kind is torch.optim.SGD else {"amsgrad": True}
    optimizer = kind(model.parameters(), lr=0.1, **options)
    model(torch.randn(5, 3)).sum().backward()
    optimizer.step()
    state = {"optimizer": optimizer.state_dict(), "policy": {"metric": None, "scale": math.pi}}
    assert same(unpacked(packed(state)), state)


def test_odd_tensors_survive_too() -> None:
    state = [
        torch.empty(0, 3),
        torch.tensor(2.0, dtype=torch.bfloat16),
        torch.arange(6).reshape(2, 3).T,
        torch.tensor([True]),
        (),
    ]
    assert same(unpacked(packed(state)), state)


@given(st.binary(max_size=200))
@settings(deadline=None, derandomize=True, max_examples=300)
def test_any_bytes_are_a_state_or_refused(data: bytes) -> None:
    with contextlib.suppress(RemoteProtocolError):
        unpacked(torch.frombuffer(bytearray(data.ljust(8, b"\0")), dtype=torch.uint8))


@given(st.data())
@settings(deadline=None, derandomize=True, max_examples=300)
def test_a_state_with_changed_bytes_is_a_state_or_refused(data: st.DataObject) -> None:
    state = packed({"a": torch.arange(5.0), "b": [1, torch.zeros(2, 2, dtype=torch.int64)]})
    for _ in range(data.draw(st.integers(1, 4))):
        state[data.draw(st.integers(0, state.numel() - 1))] = data.draw(st.integers(0, 255))
    with contextlib.suppress(RemoteProtocolError):
        unpacked(state)


async def test_ranks_met_together_are_all_asked_for_the_policy() -> None:
    """Regression: a new rank that connected to all others in one turn asked none, yet assumed it had asked all."""
    unmet, asked = {1, 2, 3}, []
    welcome = Welcome(0, 0, 0, 0, 0, ((1, 0), (2, 0), (3, 0)))

    async def until(is_over: Callable[[], bool], what: WaitId, *, deadline: float) -> None:
        unmet.clear()
        if asked:
            application.on_message(welcome, 2)
        assert is_over(), f"not true by {deadline}: {what}"

    engine = SimpleNamespace(until=until, recheck=lambda: None)
    services: Any = SimpleNamespace(
        rank=0,
        incarnation=1,
        gone=unmet,
        left_world=frozenset,
        time=lambda: 0.0,
        is_unmet=unmet.__contains__,
        engine=engine,
    )
    dispatcher: Any = SimpleNamespace(send=lambda _, dest: asked.append(dest))
    application = Application(services, dispatcher, (0, 1, 2, 3), {}, 60.0)
    assert await application.welcomed() == (welcome, 2)
    assert asked == [1, 2, 3]


async def test_a_newcomer_is_late_even_if_its_last_request_is_new() -> None:
    """Regression: a newcomer whose timeout ended just after a request forgot all answers and named no cause."""
    now = 0.0

    async def until(is_over: Callable[[], bool], what: WaitId, *, deadline: float) -> None:
        nonlocal now
        if now < 59.5:  # rank 1 waits for admission too, and rank 2 has left this policy
            application.on_message(NotMember(0, has_ended=False), 1)
            application.on_message(NotMember(0, has_ended=True), 2)
        now = deadline

    services: Any = SimpleNamespace(
        rank=0,
        incarnation=1,
        gone=set(),
        left_world=frozenset,
        time=lambda: now,
        is_unmet=lambda rank: False,
        engine=SimpleNamespace(until=until, recheck=lambda: None),
    )
    dispatcher: Any = SimpleNamespace(send=lambda message, dest: None)
    application = Application(services, dispatcher, (0, 1, 2), {}, 60.0)
    with pytest.raises(LateError):
        await application.welcomed()
