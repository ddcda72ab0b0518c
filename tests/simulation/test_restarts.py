"""Tests ranks that are killed and restarted: they are admitted between two rounds, with all of a member's state."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from support.seeds import in_ci, seeds
from support.simulated import check
from torch import nn

import asyncdist as ad
from asyncdist.simulation import Compute, Fault, Kill, Network, Restart, SimReport, Stall, simulate
from protocols import (
    AsyncSelectiveAveragingPolicy,
    AverageAllPolicy,
    DiLoCoPolicy,
    PolicyEvent,
    SnapshotTaken,
)
from protocols.joining import state_transfer
from protocols.joining.state_transfer import StateTransfer

_LATE = "late"


class Tiny(nn.Module):
    """A model with a parameter, and a buffer that counts."""

    count: torch.Tensor

    def __init__(self, value: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.full((40,), value))
        self.register_buffer("count", torch.zeros((), dtype=torch.int64))


@dataclass
class Shared:
    """Records of all ranks of a population. ``given``: the bytes of a donor's whole state, by rank and round."""

    given: dict[tuple[int, int], list[Any]] = field(default_factory=dict)
    admitted: list[tuple[int, int, int]] = field(default_factory=list)  # rank, incarnation, iteration
    rounds: dict[int, list[int]] = field(default_factory=dict)  # rounds that changed weights, by rank
    errors: list[Exception] = field(default_factory=list)


def all_of(tiny: Tiny, optimizer: torch.optim.Optimizer, policy: AsyncSelectiveAveragingPolicy) -> list[Any]:
    momentum = optimizer.state.get(tiny.weight, {}).get("momentum_buffer")
    return [
        policy.iteration,
        *(tensor.tolist() for tensor in tiny.state_dict().values()),
        None if momentum is None else momentum.tolist(),
    ]


async def train(world: ad.World, shared: Shared, steps: int, options: dict[str, Any]) -> Any:
    """Train this number of steps, and until ``awaited`` ranks were admitted; newcomers begin with their state."""
    rng = random.Random(f"{world.rank} {world.incarnation}")
    tiny = Tiny(float(100 * world.incarnation + world.rank))
    optimizer = torch.optim.SGD([tiny.weight], lr=0.5, momentum=0.5)

    def note(event: PolicyEvent) -> None:
        if isinstance(event, SnapshotTaken):
            shared.given[world.rank, event.round] = all_of(tiny, optimizer, policy)

    known = {"grace_s": 0.001, "round_timeout_s": 0.5, "start_timeout_s": 5.0, **options}
    if world.incarnation:
        known |= known.pop("newcomer", {})
    known.pop("newcomer", None)
    awaited = known.pop("awaited", 0)
    policy = AsyncSelectiveAveragingPolicy(tiny, optimizer, average_every=3, on_event=note, **known)
    try:
        async with policy:
            if world.incarnation:
                assert all_of(tiny, optimizer, policy) in shared.given.values(), (
                    "the newcomer must begin with a donor's state"
                )
                shared.admitted.append((world.rank, world.incarnation, policy.iteration))
            while policy.iteration < steps or len(shared.admitted) < awaited:
                tiny.weight.grad = torch.full_like(tiny.weight, float(rng.randint(-3, 3)))
                optimizer.step()
                tiny.count += 1
                info = await policy.step(rng.random())
                if info:
                    shared.rounds.setdefault(world.rank, []).append(info.round)
    except (ad.ClosedError, ad.StartTimeoutError, ad.RankLostError, ad.DisagreementError) as error:
        if not world.incarnation:
            raise
        shared.errors.append(error)
        return _LATE
    return policy.statistics().epoch


def population(
    shared: Shared, faults: Sequence[Fault], *, ranks: int = 4, seed: int = 0, steps: int = 150, **options: Any
) -> SimReport:
    network = Network(loss_detection_s=1e-4)
    report = simulate(
        train, shared, steps, options, ranks=ranks, seed=seed, faults=faults, network=network, until_s=1e4, strict=True
    )
    check(report)
    return report


@pytest.mark.parametrize("rank", in_ci(range(4), 0, 2))
def test_a_restarted_rank_gets_a_members_whole_state(rank: int) -> None:
    shared = Shared()
    population(shared, [Kill(rank, at_s=0.02), Restart(rank, at_s=0.021)], seed=rank)
    ((again, incarnation, iteration),) = shared.admitted
    assert (again, incarnation) == (rank, 1)
    assert iteration > 0
    newest = max(number for _, number in shared.given)
    of_newcomer = [number for donor, number in shared.given if donor == rank] + shared.rounds[rank]
    assert newest - max(of_newcomer) < 5, "the newcomer must be donor or replacer in later rounds"


async def _admitted_after_s(world: ad.World, restarted_at_s: float, steps_s: float = 40.0) -> float | None:
    model = nn.Linear(2, 2)
    began_s = world.time()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    async with AsyncSelectiveAveragingPolicy(model, optimizer, average_every=10, start_timeout_s=60.0) as policy:
        admitted_s = world.time()
        while world.time() < restarted_at_s + steps_s:
            await policy.step(random.random())
    return admitted_s - began_s if world.incarnation else None


def test_a_newcomer_is_admitted_within_a_few_long_steps() -> None:
    """Regression: its requests filled the members' channels, whose messages were 5 to 20 steps late."""
    report = simulate(
        _admitted_after_s,
        40.0,
        ranks=8,
        seed=1,
        compute=Compute(step_s=1.0),
        network=Network(loss_detection_s=2.0),
        faults=[Kill(3, at_s=25.5), Restart(3, at_s=40.0)],
    )
    assert report.results[3] < 15, "joining takes at most five messages, and each waits for a step"


def test_a_newcomer_is_admitted_if_a_step_lasts_nearly_a_round() -> None:
    """Regression: the transfers after the weights left no time for the donor's steps, and each admission failed."""
    faults = [Kill(3, at_s=510.0), Restart(3, at_s=511.0)]
    report = simulate(_admitted_after_s, 511.0, 600.0, ranks=4, compute=Compute(step_s=20.0), faults=faults)
    assert report.results[3] < 200


async def _rounds_until(world: ad.World, ends_s: float, metric: Callable[[], float]) -> int:
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    async with AsyncSelectiveAveragingPolicy(model, optimizer, average_every=10) as policy:
        while world.time() < ends_s:
            await policy.step(metric())
    return policy.statistics().last_round


@pytest.mark.slow
def test_a_newcomer_that_stops_during_admission_holds_no_rank() -> None:
    """Regression: no round was decided until the admission timed out and was retried: 68 of 286 rounds took place."""
    faults = [Kill(3, at_s=10.0), Restart(3, at_s=11.0)]
    rounds = [
        max(simulate(_rounds_until, 60.0, random.random, ranks=4, compute=Compute(step_s=0.05), faults=plan).results)
        for plan in (faults, [*faults, Stall(3, at_s=11.2, duration_s=30.0)])
    ]
    assert rounds[1] >= 0.8 * rounds[0]


def test_a_newcomer_is_admitted_where_no_metric_is_finite() -> None:
    """Regression: it waited as long as the others trained."""
    faults = [Kill(3, at_s=10.0), Restart(3, at_s=11.0)]
    report = simulate(_rounds_until, 15.0, lambda: math.nan, ranks=4, compute=Compute(step_s=0.05), faults=faults)
    assert report.results[3] == 1, "the newcomer must take part in the round of its admission"


async def _phases(world: ad.World, ends_s: Sequence[float], pauses_s: Sequence[float]) -> list[tuple[float, int]]:
    """Enter a policy with the same name in each phase; return the times and the last round. Ranks pause in between."""
    model, phases = nn.Linear(2, 2), []
    for end_s in ends_s:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        async with AsyncSelectiveAveragingPolicy(model, optimizer, average_every=10) as policy:
            entered_s = world.time()
            while world.time() < end_s:
                await policy.step(random.random())
        phases.append((entered_s, policy.statistics().last_round))
        await world.sleep(pauses_s[world.rank])
    return phases


@pytest.mark.parametrize("ranks_killed", [(1,), (1, 0, 2)])
@pytest.mark.parametrize("pauses_s", [(2.0, 0.0, 3.0), (0.0, 2.0, 0.0)])
def test_restarted_ranks_enter_the_next_policy_of_one_name(
    ranks_killed: tuple[int, ...], pauses_s: tuple[float, ...]
) -> None:
    """Regression: a rank that arrived first was refused as too late, and its error ended the job.

    The same happened if all ranks were restarted.
    """
    faults: list[Fault] = []
    for number, rank in enumerate(ranks_killed):
        faults += [Kill(rank, at_s=5.0 * (number + 1)), Restart(rank, at_s=5.0 * (number + 1) + 1.0)]
    report = simulate(_phases, (20.0, 30.0), pauses_s, ranks=3, faults=faults, compute=Compute(step_s=0.05))
    check(report)
    assert all(20.0 <= phases[1][0] < 25.0 and phases[1][1] > 5 for phases in report.results)


def test_a_newcomer_between_two_policies_enters_the_next_one() -> None:
    """Regression: it was refused as too late, and ended.

    Its second policy begins when the others have ended: it is alone.
    """
    faults = [Kill(1, at_s=15.0), Restart(1, at_s=21.0)]
    report = simulate(_phases, (20.0, 30.0), (3.0, 0.0, 3.0), ranks=3, faults=faults, compute=Compute(step_s=0.05))
    check(report)
    assert 23.0 <= report.results[1][0][0] < 25.0


def test_a_newcomer_with_other_options_is_refused_alone() -> None:
    shared = Shared()
    faults = [Kill(2, at_s=0.02), Restart(2, at_s=0.021)]
    report = population(shared, faults, newcomer={"grace_s": 0.002})
    assert report.results[2] == _LATE
    (error,) = shared.errors
    assert isinstance(error, ad.DisagreementError)
    assert (
        "option grace_s must be equal on all members: it is 0.002 on this rank and 0.001 in the running policy"
        in str(error)
    )
    assert max(number for _, number in shared.given) > 20


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("policy_class", [AsyncSelectiveAveragingPolicy, DiLoCoPolicy])
def test_a_newcomer_with_another_optimizer_is_refused_alone(policy_class: Any) -> None:
    async def main(world: ad.World) -> str:
        tiny = Tiny(1.0)
        of_class: Any = torch.optim.Adam if world.incarnation else torch.optim.SGD
        optimizer = of_class([tiny.weight], lr=0.5)
        try:
            async with policy_class(tiny, optimizer, average_every=5) as policy:
                while policy.iteration < 80:
                    tiny.weight.grad = torch.ones(40)
                    optimizer.step()
                    await world.sleep(0.01)
                    await policy.step(**({"loss": float(world.rank)} if policy_class is not DiLoCoPolicy else {}))
        except ValueError as error:
            return str(error)
        return "trained"

    faults = [Kill(1, at_s=0.1), Restart(1, at_s=0.2)]
    results = simulate(main, ranks=3, seed=0, faults=faults).results
    words = "the optimizer must have the class SGD of the optimizer whose state it loads, got Adam"
    assert results == ("trained", words, "trained")


def test_a_newcomer_is_refused_by_two_policies_of_one_name() -> None:
    """Both policies have one class and one name."""

    async def main(world: ad.World) -> str:
        tinies = Tiny(1.0), Tiny(2.0)
        policies = [
            AsyncSelectiveAveragingPolicy(tiny, torch.optim.SGD([tiny.weight], lr=0.1), average_every=3)
            for tiny in tinies
        ]
        try:
            async with policies[0], policies[1]:
                for _ in range(100):
                    for policy in policies:
                        await policy.step(0.0)
        except ad.DisagreementError as error:
            assert policies[0].statistics().report_count == 0
            return str(error)
        return ""

    faults = [Kill(2, at_s=0.02), Restart(2, at_s=0.021)]
    texts = simulate(main, ranks=3, faults=faults, network=Network(loss_detection_s=1e-4), until_s=1e4).results
    assert texts[:2] == ("", "")
    assert "is in 2 policies of this class and name" in texts[2] and "give each policy a different name=" in texts[2]


@pytest.mark.parametrize("lingers_s", [0.0, 1.0])
def test_a_newcomer_after_the_others_have_left_is_notified(lingers_s: float) -> None:
    """This also holds while the others are still in the world."""
    shared = Shared()

    async def main(world: ad.World) -> Any:
        ended = await train(world, shared, 20, {})
        await world.sleep(lingers_s)
        return ended

    faults = [Kill(2, at_s=0.015), Restart(2, at_s=0.5)]
    report = simulate(main, ranks=4, faults=faults, network=Network(loss_detection_s=1e-4), strict=True)
    check(report)
    assert report.faults_fired == ((1, 1) if lingers_s else (1, 0)), "the simulation must end with the last rank"
    assert [type(error) for error in shared.errors] == ([ad.LateError] if lingers_s else [])


def test_a_newcomer_that_comes_as_the_others_end_hears_so() -> None:
    """Regression: the others ended before any of them was connected to it; after a minute it took them for lost."""
    shared = Shared()

    async def main(world: ad.World) -> Any:
        return await train(world, shared, 20, {})

    kill, network = Kill(2, at_s=0.015), Network(loss_detection_s=1e-4)
    ends_at_s = simulate(main, ranks=4, faults=[kill], network=network, strict=True).virtual_time_s
    report = simulate(main, ranks=4, faults=[kill, Restart(2, at_s=ends_at_s - 1e-6)], network=network, strict=True)
    assert report.faults_fired == (1, 1)
    assert [type(error) for error in shared.errors] == [ad.LateError]
    assert report.virtual_time_s < ends_at_s + 2.0, (
        "a rank that is late must notice at its next request, half a second later"
    )


@pytest.mark.parametrize("seed", [34, 46])
def test_welcomed_newcomers_without_members_do_not_wait(seed: int) -> None:
    """Regression: neither answered the other; both waited until the timeout, and one raised StartTimeoutError."""
    shared = Shared()
    restarts = [Kill(2, at_s=0.002), Restart(2, at_s=0.004), Kill(0, at_s=0.005), Restart(0, at_s=0.0055)]
    report = population(shared, [*restarts, Kill(1, at_s=0.011)], seed=seed, steps=30)
    assert [type(error) for error in shared.errors] == [ad.LateError, ad.LateError]
    assert report.virtual_time_s < 1.5, "the newcomers must notice at their next request, half a second later"


def test_a_newcomer_that_fails_before_admission_is_lost_again() -> None:
    """The other ranks continue."""

    async def main(world: ad.World, shared: Shared) -> Any:
        if world.incarnation:
            await world.sleep(0.001)
            raise RuntimeError("bad start")
        return await train(world, shared, 100, {})

    faults = [Kill(2, at_s=0.01), Restart(2, at_s=0.011)]
    network = Network(loss_detection_s=1e-4)
    report = simulate(main, Shared(), ranks=4, faults=faults, network=network, strict=True, return_exceptions=True)
    failed = report.results[2]
    assert isinstance(failed, RuntimeError)
    assert [result for result in report.results if result is not failed] == [0, 0, 0]


def test_a_policy_of_an_earlier_group_names_the_restarted_member() -> None:
    """The group was made by the user, and its policy does not admit ranks while it runs."""

    async def main(world: ad.World) -> list[str]:
        group = None if world.incarnation else await world.new_group([0, 1, 2])
        await world.sleep(0.1)
        if group is None:
            return []
        told = []
        for kind, named in ((AsyncSelectiveAveragingPolicy, group), (AverageAllPolicy, None)):
            tiny = Tiny(0.0)
            try:
                async with kind(tiny, torch.optim.SGD([tiny.weight]), average_every=1, group=named):
                    told.append("started")
            except ad.RankLostError as error:
                told.append(str(error))
        return told

    report = simulate(main, ranks=3, faults=[Kill(2, at_s=0.02), Restart(2, at_s=0.03)], network=Network())
    check(report)
    for told in report.results[:2]:
        assert len(told) == 2
        assert all("rank 2 was restarted, and is not a member of the earlier group" in text for text in told)


@pytest.mark.parametrize("seed", seeds(12))
def test_ranks_lost_while_a_policy_starts_join_after_a_restart(seed: int) -> None:
    """The first ranks, among which the coordinator is chosen, may be lost, too; some are late, as if they read data."""
    rng = random.Random(f"lost in the start {seed}")
    ranks = rng.randint(2, 5)
    late_s = [rng.choice((0.0, 1e-5, 1e-3)) for _ in range(ranks)]
    victims = rng.sample(range(ranks), rng.randint(1, ranks - 1))
    faults: list[Fault] = []
    for rank in victims:
        at_s = rng.choice((0.0, rng.uniform(0.0, 2e-4), rng.uniform(0.0, 1.2e-3)))
        faults += [Kill(rank, at_s=at_s), Restart(rank, at_s=at_s + rng.choice((1e-5, 3e-4, 2e-3)))]
    shared = Shared()

    async def main(world: ad.World) -> Any:
        await world.sleep(late_s[world.rank])
        return await train(world, shared, 100, {"awaited": len(victims)})

    network = Network(loss_detection_s=1e-4)
    report = simulate(main, ranks=ranks, seed=seed, faults=faults, network=network, until_s=1e4, strict=True)
    check(report)
    assert _LATE not in report.results, shared.errors
    assert {rank for rank, _, _ in shared.admitted} == set(victims)


def test_a_restarted_donor_gives_its_state_once_admitted() -> None:
    """Regression: a newcomer with an older channel could not ask it, and the slot of the stream stayed taken."""

    async def main(world: ad.World) -> Any:
        services = world.services
        states = StateTransfer(services, 7)
        if world.rank == 1:
            states.offer(3, torch.arange(20, dtype=torch.uint8))
            await world.sleep(0.1)
        else:
            await services.engine.until(lambda: services.restarted.get(1) == 1)
            with pytest.raises(ad.RankLostError):
                await states.take(1, 3, nbytes_max=100, deadline=lambda: world.time() + 1)
            states.admit(1)
            return (await states.take(1, 3, nbytes_max=100, deadline=lambda: world.time() + 1)).tolist()
        return None

    faults = [Kill(1, at_s=0.01), Restart(1, at_s=0.02)]
    report = simulate(main, ranks=2, faults=faults, network=Network(loss_detection_s=1e-4), strict=True)
    check(report)
    assert report.results[0] == list(range(20))


@pytest.mark.parametrize(("copies", "result"), [(20, "admitted"), (40, "at most 1280000 bytes")])
def test_a_state_of_up_to_32_models_admits_a_rank(copies: int, result: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Regression: the limit was 16 models, and above it the restarted rank asked again until the others had left."""

    async def main(world: ad.World) -> str:
        model = nn.Linear(10_000, 1, bias=False)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        if not world.incarnation:
            optimizer.state[model.weight] = {"history": torch.zeros(copies, 10_000)}
        try:
            async with AsyncSelectiveAveragingPolicy(model, optimizer, average_every=3) as policy:
                while policy.iteration < 200:
                    await policy.step(float(world.rank))
        except ad.RemoteProtocolError as error:
            return str(error)
        return "admitted" if world.incarnation else ""

    monkeypatch.setattr(state_transfer, "_STATE_NBYTES_MAX", 0)
    faults = [Kill(2, at_s=0.02), Restart(2, at_s=0.021)]
    report = simulate(
        main, ranks=3, faults=faults, network=Network(loss_detection_s=1e-4), compute=Compute(step_s=0.01)
    )
    assert report.results[:2] == ("", "")
    assert result in str(report.results[2])


def test_a_donor_of_weights_that_are_not_finite_keeps_no_copies() -> None:
    """The donor keeps no copy of its other state."""

    async def main(world: ad.World) -> Any:
        tiny = Tiny(0.0)
        optimizer = torch.optim.SGD([tiny.weight], lr=0.1)
        async with AsyncSelectiveAveragingPolicy(tiny, optimizer, average_every=3, replacement_ratio=0.0) as policy:
            if world.rank == 1:
                tiny.weight.data.fill_(math.nan)
            for _ in range(100):
                await policy.step(float(world.rank))
            kept = policy._states._offered
        declined = policy.statistics().declined
        return world.incarnation, kept, [("finite" in why, count) for why, count in declined.items()]

    faults = [Kill(2, at_s=0.02), Restart(2, at_s=0.021)]
    report = simulate(main, ranks=3, faults=faults, network=Network(loss_detection_s=1e-4), strict=True)
    check(report)
    assert report.results == ((0, None, []), (0, None, [(True, 1)]), (1, None, []))


def test_a_request_of_the_process_before_admits_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    """Regression: within a long step, the coordinator took the old process's request for one of the new process."""
    admitted: list[tuple[int, int]] = []

    async def main(world: ad.World) -> None:
        tiny = Tiny(0.0)
        optimizer = torch.optim.SGD([tiny.weight], lr=0.1)
        async with AsyncSelectiveAveragingPolicy(tiny, optimizer, average_every=1, round_timeout_s=5.0) as policy:
            roles = policy._opened
            note = roles.admit
            monkeypatch.setattr(roles, "admit", lambda *of: (admitted.append(of), note(*of))[1])
            while world.time() < 60.0:
                await policy.step(random.random())

    faults = [Kill(2, at_s=5.1), Restart(2, at_s=5.2), Kill(2, at_s=6.5), Restart(2, at_s=6.6)]
    network = Network(loss_detection_s=1e-3)
    report = simulate(main, ranks=3, faults=faults, network=network, compute=Compute(step_s=1.0), strict=True)
    check(report)
    assert set(admitted) == {(2, 2)}


@pytest.mark.parametrize("seed", seeds(12))
def test_any_ranks_killed_and_started_again_at_any_time(seed: int) -> None:
    rng = random.Random(f"restarts {seed}")
    ranks = rng.randint(2, 6)
    faults: list[Fault] = []
    for rank in rng.sample(range(ranks), rng.randint(1, max(1, ranks // 2))):
        at_s = rng.uniform(5e-4, 0.02)
        for _ in range(rng.randint(1, 3)):
            faults.append(Kill(rank, at_s=at_s))
            at_s += rng.choice((1e-5, 1e-3, 5e-3))
            faults.append(Restart(rank, at_s=at_s))
            at_s += rng.choice((1e-5, 2e-4, 3e-3, 1e-2))
    if rng.random() < 0.3:
        faults.append(Stall(rng.randrange(ranks), rng.uniform(0, 0.02), rng.uniform(0, 0.02)))
    population(Shared(), faults, ranks=ranks, seed=seed, steps=100)
