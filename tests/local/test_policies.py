"""The policies on the local transport: several ranks on one loop, everything left over is a failure (``strict``).

Ranks share the loop and take their steps in turn, so most stories here are short and repeat exactly. What only real
processes show is in ``launched/test_policies.py``.
"""

from __future__ import annotations

import asyncio
import logging
import math
import random
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from scripts.population import (
    Mixed,
    Story,
    clone_state,
    equal_states,
    fill,
    flat_state,
    identity,
    sgd,
    values,
)
from support.local import run
from torch import nn

import asyncdist as ad
import protocols
from asyncdist.messaging.streams import WINDOW_COUNT
from asyncdist.runtime import run as runtime
from asyncdist.transports import matching
from protocols import (
    AsyncSelectiveAveragingPolicy,
    AverageAllPolicy,
    SelectiveStatistics,
    SpawnPolicy,
    StepInfo,
    parameter_stream,
)
from protocols.selective import coordinator, policy as selective_averaging
from protocols.selective.messages import REPLACER, Assign

STRATEGIES = ("mean", "weighted_mean", "best_only", "reset_weights")
#: Steps within which a rank of these small populations must have been replaced; rounds take about ten.
PLENTY = 400


class Lockstep:
    """Keeps some ranks of this process at the same step, whatever each of them has to do in it."""

    def __init__(self, ranks: int) -> None:
        self._barrier = asyncio.Barrier(ranks)

    async def steps(self, count: int) -> AsyncIterator[int]:
        for step in range(count):
            yield step
            await self._barrier.wait()


@dataclass
class Member:
    """What one rank of :func:`train` saw."""

    model: nn.Module
    optimizer: torch.optim.Optimizer
    infos: list[StepInfo] = field(default_factory=list)
    statistics: SelectiveStatistics | None = None
    start: dict[str, torch.Tensor] = field(default_factory=dict)

    @property
    def replacements(self) -> list[StepInfo]:
        return [info for info in self.infos if info]


def train(
    *,
    ranks: int = 4,
    steps: int = 60,
    story: Story | None = None,
    metric: Callable[[int], Any] = float,
    value: Callable[[int], float] = float,
    **options: Any,
) -> list[Member]:
    """Ranks whose weights are constant and equal to their rank, metrics too, unless told otherwise."""
    lockstep = Lockstep(ranks)

    async def main(world: ad.World) -> Member:
        model = Mixed(value(world.rank))
        member = Member(model, sgd(model), start=clone_state(model))
        settings = {"average_every": 2, "replacement_ratio": 0.25, **options}
        if story is not None:
            settings["on_event"] = story.listener(world.rank)
        async with AsyncSelectiveAveragingPolicy(model, member.optimizer, **settings) as policy:
            async for _ in lockstep.steps(steps):
                if story is not None:
                    story.before[world.rank] = flat_state(model)
                member.infos.append(await policy.step(metric(world.rank)))
        member.statistics = policy.statistics()
        return member

    return run(main, ranks)


# -- exactness --------------------------------------------------------------------------------------------------------


def test_the_worst_of_four_becomes_exactly_the_mean_of_the_others_and_nobody_else_changes() -> None:
    story = Story()
    members = train(story=story)
    worst = members[0]
    assert len(worst.replacements) >= 3
    for event in story.applied_by(0):
        assert {float(x) for x in event.state["float32"]} == {2.0}
        assert {float(x) for x in event.state["float64"]} == {2.0}
        assert {float(x) for x in event.state["int64"]} == {3.0}
        assert {float(x) for x in event.state["int32"]} == {3.0}
        assert {bool(x) for x in event.state["bool"]} == {True}
    assert values(worst.model, floating=True) == {2.0}
    assert values(worst.model, floating=False) == {3.0, 1.0}  # bools are 1
    assert worst.model.head.weight is worst.model.embed.weight
    for member in members[1:]:
        assert not member.replacements
        assert equal_states(clone_state(member.model), member.start)
    assert story.verify() == len(worst.replacements)


def test_step_says_what_it_did_in_fields_and_in_a_sentence() -> None:
    worst = train()[0]
    info = worst.replacements[0]
    assert info.averaged_this_iteration is True and info
    assert info.round == 1 and info.donors == (1, 2, 3) and info.weights == pytest.approx((1 / 3,) * 3)
    assert info.staleness_steps >= 0 and info.seconds > 0 and info.abandoned == ""
    floating = sum(t.nbytes for n, t in flat_state(Mixed()).items() if n.startswith("float"))
    exact = sum(t.nbytes for n, t in flat_state(Mixed()).items() if not n.startswith("float"))
    assert info.nbytes == 3 * floating + exact
    age = f"{info.staleness_steps} step{'' if info.staleness_steps == 1 else 's'} old"
    assert str(info) == f"round 1: average of ranks 1, 2, 3 ({age})"
    quiet = next(info for info in worst.infos if not info)
    assert str(quiet) == "nothing changed" and quiet.round == 0 and quiet.donors == ()
    assert str(StepInfo(averaged_this_iteration=True, round=3, donors=(2,), staleness_steps=1)) == (
        "round 3: average of rank 2 (1 step old)"
    )
    assert str(StepInfo(round=3, abandoned="too late")) == "round 3: abandoned, too late"
    assert str(StepInfo(averaged_this_iteration=True, round=3)) == "round 3: fresh weights"


@pytest.mark.slow
@pytest.mark.parametrize("ranks", range(2, 9))
def test_any_number_of_ranks(ranks: int) -> None:
    story = Story()
    members = train(ranks=ranks, story=story, steps=40)
    count = max(1, min(ranks - 1, math.floor(0.25 * ranks + 0.5)))
    donors = range(count, ranks)
    for rank, member in enumerate(members):
        assert bool(member.replacements) == (rank < count), f"rank {rank}"
    assert values(members[0].model, floating=True) == {sum(donors) / len(donors)} or ranks in (4, 5, 7, 8)
    assert story.verify() == sum(len(member.replacements) for member in members) > 0
    assert all(event.donors == tuple(donors) for _, event, _ in story.applications)


def test_one_rank_does_nothing_but_checks_its_input() -> None:
    async def main(world: ad.World) -> None:
        model = Mixed(1.0)
        start = clone_state(model)
        async with AsyncSelectiveAveragingPolicy(model, sgd(model), average_every=2) as policy:
            for _ in range(9):
                assert not await policy.step(0.0)
            with pytest.raises(ValueError, match="due at iteration 9"):
                await policy.step()
        assert equal_states(clone_state(model), start)
        assert policy.statistics().replacement_count == 0
        with pytest.raises(ValueError, match="replacement_ratio is 7"):
            AsyncSelectiveAveragingPolicy(model, sgd(model), average_every=2, replacement_ratio=7)

    run(main, 1)


# -- what is averaged, and how ----------------------------------------------------------------------------------------


def test_weighted_mean_favours_the_best() -> None:
    story = Story()
    members = train(story=story, averaging_strategy="weighted_mean")
    info = members[0].replacements[0]
    assert info.donors == (1, 2, 3) and info.weights == pytest.approx((1 / 6, 2 / 6, 3 / 6))
    assert story.applied_by(0)[0].weights == (1.0, 2.0, 3.0)
    assert values(members[0].model, floating=True) == {
        float(torch.tensor(14.0) / torch.tensor(6.0)),
        14.0 / 6.0,
    }
    assert story.verify() >= 3


def test_best_only_copies_the_best() -> None:
    story = Story()
    members = train(story=story, averaging_strategy="best_only")
    assert values(members[0].model, floating=True) == {3.0}
    assert all(info.donors == (3,) and info.weights == (1.0,) for info in members[0].replacements)
    assert not [key for key in story.snapshots if key[1] != 3]
    assert story.verify() >= 3


@pytest.mark.parametrize("with_optimizer", [False, True])
def test_reset_weights_copies_fresh_ones_in_and_clears_the_optimizer_in_place(with_optimizer: bool) -> None:
    def build() -> Any:
        fresh = Mixed(7.0)
        return (fresh, sgd(fresh)) if with_optimizer else fresh

    lockstep = Lockstep(4)

    async def main(world: ad.World) -> int:
        model = Mixed(float(world.rank))
        optimizer = sgd(model, momentum=0.9)
        objects, state = identity(model), optimizer.state
        replaced = 0
        async with AsyncSelectiveAveragingPolicy(
            model, optimizer, average_every=2, averaging_strategy="reset_weights", model_builder=build
        ) as policy:
            async for _ in lockstep.steps(60):
                fill_gradients(model)
                optimizer.step()
                assert optimizer.state
                info = await policy.step(float(world.rank))
                if info:
                    replaced += 1
                    assert info.donors == () and info.weights == () and info.nbytes == 0
                    assert "fresh weights" in str(info)
                    assert values(model, floating=True) == {7.0} and values(model, floating=False) == {7.0, 1.0}
                    assert optimizer.state is state and not state
                    assert identity(model) == objects
        return replaced

    replaced = run(main, 4)
    assert replaced[0] >= 3 and replaced[1:] == [0, 0, 0]


def fill_gradients(model: nn.Module) -> None:
    for parameter in model.parameters():
        parameter.grad = torch.full_like(parameter, 0.5)


@pytest.mark.parametrize("momentum", [0.25, 0.7, 1.0])
def test_momentum_mixes_with_the_weights_of_that_moment(momentum: float) -> None:
    """The replacer goes on changing its weights between the assignment and the application."""
    story = Story()

    lockstep = Lockstep(4)

    async def main(world: ad.World) -> int:
        model = Mixed(float(world.rank))
        count = 0
        async with AsyncSelectiveAveragingPolicy(
            model,
            sgd(model),
            average_every=2,
            momentum=momentum,
            on_event=story.listener(world.rank),
        ) as policy:
            async for step in lockstep.steps(60):
                with torch.no_grad():
                    for parameter in model.parameters():
                        parameter.add_(0.37 * (step + 1) / (world.rank + 3))
                story.before[world.rank] = flat_state(model)
                count += bool(await policy.step(float(world.rank)))
        return count

    counts = run(main, 4)
    assert counts[0] >= 3 and counts[1:] == [0, 0, 0]
    assert story.verify(momentum=momentum) == counts[0]


def test_ratio_zero_replaces_nobody_and_ratio_one_all_but_the_best() -> None:
    assert not any(member.replacements for member in train(replacement_ratio=0.0))
    members = train(replacement_ratio=1.0)
    assert [bool(member.replacements) for member in members] == [True, True, True, False]
    assert all(values(member.model, floating=True) == {3.0} for member in members)


def test_metric_mode_min_replaces_the_largest() -> None:
    members = train(metric_mode="min")
    assert [bool(member.replacements) for member in members] == [False, False, False, True]
    assert values(members[3].model, floating=True) == {1.0}
    assert values(members[3].model, floating=False) == {0.0}  # integers of rank 0, the best


@pytest.mark.slow
def test_threshold_and_cooldown() -> None:
    assert not any(member.replacements for member in train(threshold=-0.5))
    assert train(threshold=0.5, cooldown=0, steps=100)[0].replacements
    story = Story()
    worst = train(threshold=0.5, cooldown=30, steps=100, story=story)[0]
    applied = [event.iteration for event in story.applied_by(0)]
    assert 2 <= len(applied) <= 4, applied
    rounds = [info.round for info in worst.replacements]
    assert rounds == list(range(1, len(rounds) + 1))
    reference = [event.iteration for event in (lambda s: (train(steps=100, story=s), s.applied_by(0))[1])(Story())]
    assert len(reference) > len(applied)


@pytest.mark.parametrize("kind", ["float", "int", "tensor", "callable", "constructor"])
def test_every_form_of_metric(kind: str) -> None:
    calls: list[int] = []

    lockstep = Lockstep(4)

    async def main(world: ad.World) -> tuple[int, int]:
        model = Mixed(float(world.rank))
        graph = torch.full((), float(world.rank), requires_grad=True)

        def compute() -> torch.Tensor:
            calls.append(world.rank)
            return graph * 2

        forms: dict[str, Any] = {"float": float(world.rank), "int": world.rank, "callable": compute}
        options = {"metric": compute} if kind == "constructor" else {}
        async with AsyncSelectiveAveragingPolicy(model, sgd(model), average_every=3, **options) as policy:
            async for _ in lockstep.steps(60):
                if kind == "constructor":
                    await policy.step()
                else:
                    await policy.step(graph * 2 if kind == "tensor" else forms[kind])
        statistics = policy.statistics()
        return statistics.replacement_count, statistics.report_count

    results = run(main, 4)
    assert results[0][0] >= 3 and all(count == 0 for count, _ in results[1:])
    assert all(reports == 20 for _, reports in results)
    assert len(calls) == (80 if kind in ("callable", "constructor") else 0)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_a_metric_that_is_not_finite_ranks_worst_and_is_counted(bad: float) -> None:
    members = train(metric=lambda rank: bad if rank == 2 else float(rank))
    assert [bool(member.replacements) for member in members] == [False, False, True, False]
    assert values(members[2].model, floating=True) == {float(torch.tensor(4.0) / torch.tensor(3.0)), 4.0 / 3.0}
    statistics = members[2].statistics
    assert statistics is not None and statistics.nonfinite_metric_count == statistics.report_count == 30
    leader = members[0].statistics
    assert leader is not None and leader.coordinator is not None and leader.coordinator.nonfinite_report_count > 0


def test_a_donor_whose_weights_are_not_finite_declines() -> None:
    story = Story()
    members = train(story=story, value=lambda rank: math.nan if rank == 3 else float(rank))
    assert values(members[0].model, floating=True) == {1.5}
    assert values(members[0].model, floating=False) == {2.0, 1.0}  # integers of the best that gave
    assert all(info.donors == (1, 2) for info in members[0].replacements)
    declined = members[3].statistics
    assert declined is not None and list(declined.declined) == ["weights are not finite"]
    assert story.verify() >= 3


def test_all_donors_declining_changes_nothing() -> None:
    members = train(value=lambda rank: math.inf if rank else 0.0)
    assert not members[0].replacements and values(members[0].model, floating=True) == {0.0}


# -- the user's objects -----------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("optimizer_state", ["keep", "reset"])
def test_objects_keep_their_identity_and_the_optimizer_its_state(optimizer_state: str) -> None:
    """Parameters, buffers, optimizer, its state, a scheduler and an EMA of the model: all live through replacements."""
    lockstep = Lockstep(4)

    async def main(world: ad.World) -> int:
        torch.manual_seed(world.rank)
        model = Mixed(float(world.rank))
        optimizer = sgd(model, momentum=0.9)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=10, gamma=0.5)
        average = torch.optim.swa_utils.AveragedModel(model, use_buffers=False)
        objects, replaced = identity(model), 0
        async with AsyncSelectiveAveragingPolicy(
            model, optimizer, average_every=2, optimizer_state=optimizer_state
        ) as policy:
            async for _ in lockstep.steps(40):
                fill_gradients(model)
                optimizer.step()
                scheduler.step()
                average.update_parameters(model)
                moments = [optimizer.state[p]["momentum_buffer"] for p in model.parameters()]
                copies = [moment.clone() for moment in moments]
                info = await policy.step(float(world.rank))
                assert identity(model) == objects
                if info and optimizer_state == "reset":
                    assert not optimizer.state
                else:
                    kept = [optimizer.state[p]["momentum_buffer"] for p in model.parameters()]
                    assert all(one is two for one, two in zip(kept, moments, strict=True))
                    assert all(torch.equal(one, two) for one, two in zip(kept, copies, strict=True))
                if info:
                    replaced += 1
                    was = [p.detach().clone() for p in model.parameters()]
                    fill_gradients(model)
                    optimizer.step()  # still moves the weights that were just written
                    changed = zip(was, model.parameters(), strict=True)
                    assert all(not torch.equal(one, two) for one, two in changed)
        assert scheduler.get_last_lr() == [0.1 * 0.5**4] and int(average.n_averaged) == 40
        return replaced

    assert run(main, 4)[0] >= 3


def test_an_average_that_has_arrived_when_its_rank_leaves_is_counted_and_not_applied(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def main(world: ad.World) -> tuple[int, int]:
        model = Mixed(float(world.rank))
        start = clone_state(model)
        async with AsyncSelectiveAveragingPolicy(model, sgd(model), average_every=1) as policy:
            await policy.step(float(world.rank))
            if world.rank == 0:
                while policy._exchange is None or policy._exchange.average is None:
                    await world.safe_point()
            while world.rank == 1 and 0 not in world.services.left:
                await policy.step(1.0)
        assert equal_states(clone_state(model), start)
        return policy.statistics().unapplied_count, policy.statistics().replacement_count

    with caplog.at_level("INFO", logger="protocols"):
        assert run(main, 2) == [(1, 0), (0, 0)]
    assert "round 1: the average had arrived and was not applied; the policy ended" in caplog.text


@pytest.mark.slow
def test_a_compiled_model_computes_with_the_new_weights_and_is_not_compiled_again() -> None:
    lockstep = Lockstep(2)
    captured: list[torch.fx.GraphModule] = []

    def capture(graph: torch.fx.GraphModule, inputs: list[torch.Tensor]) -> Any:
        captured.append(graph)
        return graph.forward

    async def main(world: ad.World) -> int:
        torch.manual_seed(world.rank)
        model = nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 2))
        compiled = torch.compile(model, backend=capture)
        examples, count = torch.randn(4, 3), 0
        async with AsyncSelectiveAveragingPolicy(model, sgd(model), average_every=2) as policy:
            async for _ in lockstep.steps(30):
                was = compiled(examples).detach()
                if await policy.step(float(world.rank)):
                    count += 1
                    now = compiled(examples)
                    assert torch.equal(now, model(examples)) and not torch.equal(now, was)
                    now.sum().backward()
                    assert all(p.is_leaf and p.grad is not None for p in model.parameters())
                    with torch.no_grad():
                        model[0].bias += 1.0  # else the next average is equal to it
        return count

    torch._dynamo.reset()
    assert run(main, 2)[0] >= 2
    assert len(captured) <= 2, "once for each rank's model"


def test_a_backward_through_weights_that_a_step_has_changed_is_refused_by_torch() -> None:
    """It would mix old activations with new weights."""
    lockstep = Lockstep(2)

    async def main(world: ad.World) -> int:
        model = nn.Sequential(nn.Linear(3, 5), nn.Linear(5, 2))
        refused = 0
        async with AsyncSelectiveAveragingPolicy(model, sgd(model), average_every=2) as policy:
            async for _ in lockstep.steps(30):
                loss = model(torch.ones(4, 3)).sum()
                if await policy.step(float(world.rank)):
                    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
                        loss.backward()
                    refused += 1
                else:
                    loss.backward()
        return refused

    assert run(main, 2)[0] >= 2


def test_the_call_form_of_the_seed() -> None:
    lockstep = Lockstep(4)

    async def main(world: ad.World) -> int:
        model = Mixed(float(world.rank))
        optimizer = sgd(model)
        count = 0
        async with AsyncSelectiveAveragingPolicy(model, optimizer, average_every=5) as policy:
            async for step in lockstep.steps(60):
                model_out, optimizer_out, info = await policy(
                    step + 1, model, optimizer, float(world.rank), group=world.group, expose_params=True
                )
                assert model_out is model and optimizer_out is optimizer
                assert isinstance(info["averaged_this_iteration"], bool)
                count += info["averaged_this_iteration"]
            with pytest.raises(ValueError, match="another model or optimizer"):
                await policy(61, Mixed(), optimizer, 0.0)
            with pytest.raises(ValueError, match="group is 'others'; allowed: None, or the policy's own"):
                await policy(61, model, optimizer, 0.0, group="others")
            with pytest.raises(ValueError, match="expose_params is False; allowed: None, True"):
                await policy(61, model, optimizer, 0.0, expose_params=False)
        assert policy.statistics().report_count == 12  # iterations 4, 9, ... 59
        return count

    counts = run(main, 4)
    assert counts[0] >= 2 and counts[1:] == [0, 0, 0]


def test_statistics_of_members_and_coordinator_add_up() -> None:
    members = train()
    statistics = [member.statistics for member in members]
    floating = sum(t.nbytes for n, t in flat_state(Mixed()).items() if n.startswith("float"))
    exact = sum(t.nbytes for n, t in flat_state(Mixed()).items() if not n.startswith("float"))
    for rank, (one, member) in enumerate(zip(statistics, members, strict=True)):
        assert one is not None
        assert one.iteration == 60 and one.report_count == 30 and one.nonfinite_metric_count == 0
        assert one.replacement_count == len(member.replacements)
        assert (one.coordinator is not None) == (rank == 0)
    worst, leader = statistics[0], statistics[0].coordinator if statistics[0] else None
    assert worst is not None and leader is not None
    rounds = worst.replacement_count
    given_up = sum(worst.abandoned.values())
    heard = leader.applied[0]
    assert leader.applied == {0: heard, 1: 0, 2: 0, 3: 0}
    assert rounds - 1 <= heard <= rounds, "the coordinator may not have heard of the last one yet"
    assert heard <= leader.rounds_decided <= rounds + given_up + 1
    assert worst.received_nbytes >= rounds * (3 * floating + exact)
    assert sum(one.sent_nbytes for one in statistics if one) >= worst.received_nbytes
    assert not leader.stragglers and not leader.left_out


# -- several policies -------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_two_policies_at_once_never_mix() -> None:
    stories = Story(), Story()

    lockstep = Lockstep(4)

    async def main(world: ad.World) -> tuple[set[float], set[float]]:
        one, two = Mixed(float(world.rank)), Mixed(100.0 + world.rank)
        async with (
            AsyncSelectiveAveragingPolicy(
                one, sgd(one), average_every=2, name="ones", on_event=stories[0].listener(world.rank)
            ) as first,
            AsyncSelectiveAveragingPolicy(
                two,
                sgd(two),
                average_every=3,
                name="hundreds",
                metric_mode="min",
                on_event=stories[1].listener(world.rank),
            ) as second,
        ):
            async for _ in lockstep.steps(80):
                await first.step(float(world.rank))
                await second.step(float(world.rank))
        return values(one, floating=True), values(two, floating=True)

    results = run(main, 4)
    assert [pair[0] for pair in results] == [{2.0}, {1.0}, {2.0}, {3.0}]
    assert [pair[1] for pair in results] == [{100.0}, {101.0}, {102.0}, {101.0}]
    assert stories[0].verify() >= 3 and stories[1].verify() >= 3


def test_policies_one_after_the_other_never_mix_though_one_rank_is_late() -> None:
    stories = [Story() for _ in range(4)]

    async def main(world: ad.World) -> list[set[float]]:
        seen = []
        for number, story in enumerate(stories):
            model = Mixed(100.0 * number + world.rank)
            async with AsyncSelectiveAveragingPolicy(
                model, sgd(model), average_every=1, grace_s=0.0, on_event=story.listener(world.rank)
            ) as policy:
                while len(story.applications) < 3:
                    await policy.step(float(world.rank))
                    for _ in range(3 * (world.rank == number)):
                        await world.safe_point()
            seen.append(values(model, floating=True))
        return seen

    results = run(main, 4)
    for number, story in enumerate(stories):
        assert story.verify() >= 3
        for rank in range(4):
            assert all(100.0 * number <= value < 100.0 * number + 4 for value in results[rank][number])


def test_a_policy_on_a_sub_group() -> None:
    story = Story()

    lockstep = Lockstep(3)

    async def main(world: ad.World) -> set[float]:
        model = Mixed(float(world.rank))
        if world.rank % 2 == 0:  # 1 and 3 take no part and go on by themselves
            return values(model, floating=True)
        group = await ad.new_group([1, 3, 5])
        async with AsyncSelectiveAveragingPolicy(
            model, sgd(model), average_every=2, group=group, on_event=story.listener(world.rank)
        ) as policy:
            async for _ in lockstep.steps(60):
                await policy.step(float(world.rank))
        assert (policy.statistics().coordinator is not None) == (world.rank == 1)
        return values(model, floating=True)

    assert run(main, 6) == [{0.0}, {4.0}, {2.0}, {3.0}, {4.0}, {5.0}]
    assert story.verify() >= 3


@pytest.mark.parametrize("strategy", ["mean", "reset_weights"])
def test_a_lone_trainer_has_the_coordinator_that_it_names(strategy: Any) -> None:
    """The coordinator waited for its only member for a minute, and ended the job."""

    async def main(world: ad.World) -> Any:
        if world.rank == 1:
            return (await protocols.coordinate([0])).decision_count
        model = torch.nn.Linear(1, 1)
        policy = AsyncSelectiveAveragingPolicy(
            model,
            torch.optim.SGD(model.parameters(), lr=0.1),
            average_every=2,
            coordinator=1,
            group=await ad.new_group([0]),
            averaging_strategy=strategy,
            model_builder=lambda: torch.nn.Linear(1, 1),
        )
        async with policy:
            return [bool(await policy.step(float(i))) for i in range(20)]

    report = ad.simulate(main, ranks=2, strict=True)
    assert report.results[0] == [False] * 20
    assert 1 <= report.results[1] <= 10
    assert report.virtual_time_s < 1


def test_a_reserved_rank_coordinates_and_trains_nothing() -> None:
    story = Story()

    lockstep = Lockstep(3)

    async def main(world: ad.World) -> Any:
        if world.rank == 3:
            return await protocols.coordinate([0, 1, 2])
        group = await ad.new_group([0, 1, 2])
        model = Mixed(float(world.rank))
        async with AsyncSelectiveAveragingPolicy(
            model,
            sgd(model),
            average_every=2,
            averaging_strategy="weighted_mean",
            group=group,
            coordinator=3,
            on_event=story.listener(world.rank),
        ) as policy:
            async for _ in lockstep.steps(60):
                await policy.step(float(world.rank))
        assert policy.statistics().coordinator is None
        return values(model, floating=True)

    results = run(main, 4)
    assert results[0] == {float(torch.tensor(5.0) / torch.tensor(3.0)), 5.0 / 3.0}
    assert results[1:3] == [{1.0}, {2.0}]
    assert results[3].applied[0] == story.verify() >= 3
    assert results[3].rounds_decided == results[3].rounds_ended


def test_a_coordinator_that_is_cancelled_tells_its_members(caplog: pytest.LogCaptureFixture) -> None:
    """They reported to nobody without a word, and a donor that left waited ten seconds for the end of its round."""

    async def main(world: ad.World) -> Any:
        if world.rank == 2:
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(2):
                    await protocols.coordinate([0, 1])
            return None
        group = await ad.new_group([0, 1])
        model = Mixed(float(world.rank))
        policy = AsyncSelectiveAveragingPolicy(model, sgd(model), average_every=1, group=group, coordinator=2)
        async with policy:
            await policy.step(float(world.rank))
            await asyncio.sleep(1)
            if world.rank == 1:
                await policy.step(1.0)  # the snapshot, whose round stays open until rank 0 has taken it
            await asyncio.sleep(2)
            info = await policy.step(float(world.rank))
            left_at = world.time()
        assert world.time() - left_at < 1
        return info.abandoned

    assert ad.simulate(main, ranks=3, strict=True).results[:2] == ("the coordinator has stopped", "")
    warnings = [record.getMessage() for record in caplog.records if "trains on without averaging" in record.message]
    assert warnings == ["rank 2, the coordinator, has stopped: this rank trains on without averaging"] * 2


# -- stragglers and leavers -------------------------------------------------------------------------------------------


def paced(policy_class: Any, **options: Any) -> tuple[list[int], list[int]]:
    """Rank 1 steps about five times less often than the others; all stop when it has taken 40 steps."""
    finished: list[int] = []
    replaced = [0] * 4

    async def main(world: ad.World) -> int:
        model, steps = Mixed(float(world.rank)), 0
        async with policy_class(model, sgd(model), average_every=2, **options) as policy:
            while not finished:
                steps += 1
                try:
                    replaced[world.rank] += bool(await policy.step(0.0 if world.rank == 1 else 1.0 + world.rank))
                except ad.ClosedError:  # the synchronous baseline, when another one has finished
                    break
                for _ in range(20 if world.rank == 1 else 1):
                    await world.safe_point()
                if world.rank == 1 and steps == 40:
                    finished.append(steps)
        return steps

    return run(main, 4), replaced


@pytest.mark.slow
def test_a_straggler_is_judged_and_replaced_and_nobody_waits_for_it() -> None:
    steps, replaced = paced(AsyncSelectiveAveragingPolicy, grace_s=0.0)
    assert replaced[1] >= 2, replaced
    assert min(steps[0], steps[2], steps[3]) > 3 * steps[1], steps
    together, _ = paced(AverageAllPolicy)
    assert max(together) <= min(together) + 2, together


@pytest.mark.parametrize("leaver", ["donor", "replacer", "idle", "coordinator"])
def test_the_others_go_on_when_a_rank_leaves_early(leaver: str) -> None:
    """The donor leaves right after its snapshot, the replacer when it has been named, the coordinator's rank early."""
    story = Story()
    gone = {"donor": 3, "replacer": 1, "idle": 2, "coordinator": 0}[leaver]
    metrics = {0: 5.0, 1: 0.0, 2: 1.0, 3: 2.0}
    left_at: list[int] = []

    async def main(world: ad.World) -> tuple[int, set[float]]:
        model, steps, after = Mixed(float(world.rank)), 0, 0
        async with AsyncSelectiveAveragingPolicy(
            model, sgd(model), average_every=2, on_event=story.listener(world.rank)
        ) as policy:
            while after < 60 and steps < PLENTY:
                steps += 1
                info = await policy.step(metrics[world.rank])
                after += bool(left_at)
                if world.rank == gone:
                    statistics = policy.statistics()
                    ready = {
                        "donor": statistics.snapshot_count > 0,
                        "replacer": statistics.last_round > 0 and not info,
                        "idle": steps == 1,
                        "coordinator": steps == 7,
                    }[leaver]
                    if ready:
                        break
            if world.rank == gone:
                left_at.append(steps)
        return policy.statistics().replacement_count, values(model, floating=True)

    results = run(main, 4)
    assert left_at and left_at[0] < PLENTY
    last = story.applications[-1]
    worst = 2 if leaver == "replacer" else 1
    assert last[0] == worst and gone not in last[1].donors
    assert results[worst][0] >= 2
    assert story.verify() >= 2
    if leaver == "replacer":
        assert results[1] == (0, {1.0})


def test_a_rank_whose_leaving_is_cut_short_still_says_that_it_has_left() -> None:
    """A donor that leaves waits for its replacer; its user's own timeout strikes during that wait."""
    story = Story()

    timed_out: list[int] = []

    async def main(world: ad.World) -> int:
        model, after = Mixed(float(world.rank)), 0
        policy = AsyncSelectiveAveragingPolicy(model, sgd(model), average_every=2, on_event=story.listener(world.rank))
        try:
            async with asyncio.timeout(None) as timeout, policy:
                while after < 60:
                    await policy.step(float(world.rank))
                    after += bool(timed_out)
                    while world.rank == 0 and policy.statistics().last_round and not timed_out:
                        await world.safe_point()  # no step, so nothing is applied and no End is sent
                    if world.rank == 3 and (1, 3) in story.snapshots:
                        timeout.reschedule(asyncio.get_running_loop().time() + 0.05)
                        break
        except TimeoutError:
            timed_out.append(world.rank)
        return policy.statistics().replacement_count

    counts = run(main, 4)
    assert timed_out == [3] and counts[0] >= 2
    assert all(3 not in event.donors for _, event, _ in story.applications[1:])


def test_a_rank_that_was_replaced_since_it_was_judged_declines() -> None:
    """The round's time was up before its Applied came, so the next decision did not know of it."""
    lockstep = Lockstep(2)

    async def main(world: ad.World) -> dict[str, int]:
        model = Mixed(float(world.rank))
        async with AsyncSelectiveAveragingPolicy(
            model, sgd(model), average_every=1, threshold=0.5, cooldown=10**9
        ) as policy:
            async for _ in lockstep.steps(30):
                info = await policy.step(float(world.rank))
                if info:
                    at = policy.iteration - 1
                    assign = Assign(REPLACER, (1,), (0,), judged_iteration=at - 1, best=1)
                    policy._carry_out(policy._member.on_assign(assign, 99))
        return dict(policy.statistics().declined)

    declined, nothing = run(main, 2)
    assert list(declined.values()) == [1] and "after the one that was judged" in next(iter(declined))
    assert not nothing


def test_a_buffer_in_which_discarded_chunks_may_land_is_not_used_again() -> None:
    async def main(world: ad.World) -> None:
        model = Mixed(float(world.rank))
        async with AsyncSelectiveAveragingPolicy(model, sgd(model), average_every=1) as policy:
            first = policy._buffers.accumulators.acquire()
            policy._buffers.release(first, world.services)
            second = policy._buffers.accumulators.acquire()
            assert second is first
            world.services.slots.discarding_count += 1  # as after a stream that was given up and is not answered yet
            policy._buffers.release(second, world.services)
            world.services.slots.discarding_count -= 1
            third = policy._buffers.accumulators.acquire()
            assert third is not first
            policy._buffers.release(third, world.services)

    run(main, 2)


def test_a_rank_that_leaves_by_an_exception_of_its_own_is_not_waited_for() -> None:
    """It catches the exception outside and goes on without the policy; the others' rounds need every live member."""
    replaced: list[int] = []

    class Enough(Exception):
        pass

    async def main(world: ad.World) -> None:
        model = Mixed(float(world.rank))
        try:
            async with AsyncSelectiveAveragingPolicy(
                model, sgd(model), average_every=1, quorum=1.0, grace_s=1000.0
            ) as policy:
                while len(replaced) < 3:
                    if await policy.step(float(world.rank)):
                        replaced.append(world.rank)
                    if world.rank == 2 and replaced:
                        raise Enough
        except Enough:
            while len(replaced) < 3:
                await world.safe_point()

    run(main, 3)
    assert replaced == [0, 0, 0]


def test_all_but_one_leave() -> None:
    async def main(world: ad.World) -> int:
        model = Mixed(float(world.rank))
        async with AsyncSelectiveAveragingPolicy(model, sgd(model), average_every=1, grace_s=0.0) as policy:
            for _ in range(5 if world.rank else 200):
                await policy.step(float(world.rank))
        return policy.iteration

    assert run(main, 4) == [200, 5, 5, 5]


def test_a_rank_that_ends_its_policy_trains_on_beside_the_others() -> None:
    lockstep = Lockstep(3)

    async def main(world: ad.World) -> int:
        model = Mixed(float(world.rank))
        async with AsyncSelectiveAveragingPolicy(model, sgd(model), average_every=2) as policy:
            if world.rank == 2:
                for _ in range(3):
                    await policy.step(float(world.rank))
            else:
                async for _ in lockstep.steps(80):
                    await policy.step(float(world.rank))
        for _ in range(200 if world.rank == 2 else 0):
            await world.safe_point()
        return policy.statistics().replacement_count

    results = run(main, 4)
    assert results[0] >= 3 and results[1:] == [0, 0, 0]


@pytest.mark.parametrize("where", ["coordinator", "member"])
def test_a_defect_inside_a_policys_own_task_ends_the_job_with_its_traceback(
    where: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody awaits these tasks: their failure must not end the averaging in silence."""

    def broken(*_: Any, **__: Any) -> None:
        raise AssertionError("invariant 42")

    if where == "coordinator":
        monkeypatch.setattr(coordinator.RoundCoordinator, "on_ready", broken)
    else:
        monkeypatch.setattr(selective_averaging.RoundMember, "on_frozen", broken)
    with pytest.raises(AssertionError, match="invariant 42"):
        train(steps=300)


# -- losses, where the transport survives them ------------------------------------------------------------------------


class Died(Exception):
    """What a rank that was lost raises, to be out of the way."""


def lose(world: ad.World, rank: int) -> None:
    world._transport._hub.lose(rank)  # type: ignore[attr-defined]


@pytest.fixture
def short_grace(monkeypatch: pytest.MonkeyPatch) -> None:
    """A lost rank of this process waits for peers that cannot hear it; not for long."""
    monkeypatch.setattr(runtime, "GRACE_S", 0.2)


@pytest.mark.usefixtures("short_grace")
def test_a_lost_coordinator_is_reported_once_to_each_member_which_trains_on(caplog: pytest.LogCaptureFixture) -> None:
    iterations = [0] * 4

    async def main(world: ad.World) -> None:
        model = Mixed(float(world.rank))
        async with AsyncSelectiveAveragingPolicy(model, sgd(model), average_every=2) as policy:
            for step in range(200):
                if step == 20 and world.rank == 0:
                    lose(world, 0)
                    raise Died
                await policy.step(float(world.rank))
                iterations[world.rank] += 1

    with caplog.at_level(logging.WARNING, "protocols"), pytest.raises((Died, ad.RankLostError)):
        run(main, 4)
    assert iterations == [20, 200, 200, 200]
    warnings = [record.getMessage() for record in caplog.records if "the coordinator, is gone" in record.getMessage()]
    assert len(warnings) == 3 and all("rank 0" in text for text in warnings)


@pytest.mark.usefixtures("short_grace")
def test_a_donor_lost_before_the_freeze_is_left_out(caplog: pytest.LogCaptureFixture) -> None:
    story = Story()
    applied: list[StepInfo] = []
    lost: list[int] = []

    async def main(world: ad.World) -> None:
        model = Mixed(float(world.rank))
        async with AsyncSelectiveAveragingPolicy(
            model, sgd(model), average_every=2, round_timeout_s=0.4, on_event=story.listener(world.rank)
        ) as policy:
            while len(applied) < 3:
                if world.rank == 3 and policy.statistics().last_round > 0:
                    lose(world, 3)
                    lost.append(policy.statistics().snapshot_count)
                    raise Died
                info = await policy.step(float(world.rank))
                if world.rank == 3:  # named by a message that came between two steps
                    while not policy.statistics().last_round and policy.iteration > 2:
                        await world.safe_point()
                if info:
                    applied.append(info)

    with pytest.raises((Died, ad.RankLostError)):
        run(main, 4)
    assert lost == [0]
    assert all(info.donors == (1, 2) for info in applied)
    assert story.verify() >= 3


@pytest.mark.slow
@pytest.mark.usefixtures("short_grace")
def test_a_donor_lost_in_mid_stream_leaves_the_replacer_with_its_own_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    """Chunks of 64 bytes, each sent only when the receiver takes it: the stream is long, and 3 dies inside it.

    More than the two windows hold leaves only when the round is frozen, so it cannot go on without 3.
    """
    monkeypatch.setattr(parameter_stream, "CHUNK_NBYTES", 64)
    monkeypatch.setattr(matching, "EAGER_NBYTES", 16)
    abandoned: list[StepInfo] = []
    states: list[set[float]] = []

    def is_streaming(policy: AsyncSelectiveAveragingPolicy) -> bool:
        sent = [stream.sent_nbytes for offer in policy._snapshot_server._offers for stream in offer.streams]
        return max(sent, default=0) > 2 * WINDOW_COUNT * 64

    async def main(world: ad.World) -> None:
        model = Mixed(float(world.rank), width=4096)
        async with AsyncSelectiveAveragingPolicy(
            model, sgd(model), average_every=2, averaging_strategy="best_only"
        ) as policy:
            while not abandoned and policy.iteration < PLENTY:
                if world.rank == 3 and is_streaming(policy):
                    lose(world, 3)
                    raise Died
                info = await policy.step(float(world.rank))
                if world.rank == 0 and (info.abandoned or info):
                    states.append(values(model, floating=True))
                    abandoned.append(info)
                while world.rank == 3 and policy._snapshot_server._offers and not is_streaming(policy):
                    await world.safe_point()

    with pytest.raises((Died, ad.RankLostError)):
        run(main, 4)
    assert states == [{0.0}]
    assert abandoned[0].abandoned.startswith("the stream from rank 3 did not complete: rank 3 is gone")


# -- a random walk through everything ---------------------------------------------------------------------------------


@dataclass
class Walk:
    """One random population, drawn from a seed."""

    seed: int
    strategy: str

    def __post_init__(self) -> None:
        draw = random.Random(f"{self.seed} {self.strategy}")
        self.ranks = draw.randint(2, 6)
        self.width = draw.choice([1, 4, 40])
        self.momentum = draw.choice([0.0, 0.0, 0.3])
        self.pace = [draw.choice([0, 0, 1, 3, 12]) for _ in range(self.ranks)]
        self.steps = [draw.choice([120, 120, 120, draw.randint(1, 90)]) for _ in range(self.ranks)]
        self.seconds = draw.random() < 0.3
        self.options: dict[str, Any] = {
            "average_every": draw.randint(1, 4),
            "replacement_ratio": draw.choice([0.2, 0.5, 0.8, 1.0]),
            "averaging_strategy": self.strategy,
            "momentum": self.momentum,
            "metric_mode": draw.choice(["max", "min"]),
            "optimizer_state": draw.choice(["keep", "reset"]),
            "quorum": draw.choice([0.0, 0.3, 0.5, 1.0]),
            "grace_s": draw.choice([0.0, 0.0, 0.002]),
            "round_timeout_s": draw.choice([30.0, 30.0, 0.002, 0.0001]),
            "max_report_age_s": draw.choice([600.0, 0.01]),
            "threshold": draw.choice([None, None, 0.0]),
            "cooldown": draw.choice([0, 7]),
        }
        self.chunk_nbytes = draw.choice([64, 256, 4 << 20])
        self.eager_nbytes = draw.choice([0, 200, 65536])


async def walk_rank(world: ad.World, walk: Walk, story: Story, walked: list[int]) -> int:
    draw = random.Random(f"{walk.seed} {world.rank}")
    torch.manual_seed(walk.seed * 100 + world.rank)
    model = Mixed(float(world.rank), width=walk.width)
    builder = (lambda: Mixed(9.0, width=walk.width)) if walk.strategy == "reset_weights" else None
    objects = identity(model)
    async with AsyncSelectiveAveragingPolicy(
        model, sgd(model), model_builder=builder, on_event=story.listener(world.rank), **walk.options
    ) as policy:
        for _ in range(walk.steps[world.rank]):
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.add_(torch.randn_like(parameter))
                model.counts += 1
            if draw.random() < 0.02:
                with torch.no_grad():
                    model.embed.weight[0, 0] = draw.choice([math.nan, math.inf])
            elif draw.random() < 0.1:
                model.embed.weight.data.nan_to_num_(0.5, 0.5, 0.5)
            before = flat_state(model)
            story.before[world.rank] = before
            info = await policy.step(draw.choice([math.nan, *(draw.gauss(0, 1) for _ in range(8))]))
            if not info:
                after = flat_state(model)
                assert all(torch.equal(before[n].view(torch.uint8), after[n].view(torch.uint8)) for n in before)
            walked[world.rank] += 1
            for _ in range(draw.randint(0, walk.pace[world.rank])):
                await world.safe_point()
    assert identity(model) == objects
    return policy.statistics().replacement_count


def check_walk(seed: int, strategy: str, monkeypatch: pytest.MonkeyPatch) -> int:
    walk, story = Walk(seed, strategy), Story()
    monkeypatch.setattr(parameter_stream, "CHUNK_NBYTES", walk.chunk_nbytes)
    monkeypatch.setattr(matching, "EAGER_NBYTES", walk.eager_nbytes)
    walked = [0] * walk.ranks

    async def main(world: ad.World) -> int:
        async with asyncio.timeout(60):  # a hang names its seed
            return await walk_rank(world, walk, story, walked)

    try:
        counts = run(main, walk.ranks)
        assert walked == walk.steps
        assert story.verify(momentum=walk.momentum) == sum(counts)
    except BaseException as error:
        error.add_note(f"seed {seed}, strategy {strategy!r}: {walk}, walked {walked}")
        raise
    return sum(counts)


@pytest.mark.slow
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_random_walks_keep_every_promise(strategy: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Random rates, metrics, weights, deadlines, early leaves: every average is the one of its donors' snapshots."""
    applied = [check_walk(seed, strategy, monkeypatch) for seed in range(6)]
    assert sum(applied) > 25, applied


# -- AverageAllPolicy -------------------------------------------------------------------------------------------------


def test_average_all_gives_everybody_the_mean_and_the_first_ones_integers() -> None:
    events: list[Any] = []

    async def main(world: ad.World) -> tuple[set[float], set[float], list[StepInfo]]:
        model = Mixed(float(world.rank + 1))
        optimizer = sgd(model, momentum=0.9)
        objects = identity(model)
        infos = []
        async with AverageAllPolicy(
            model, optimizer, average_every=3, on_event=events.append if world.rank == 1 else None
        ) as policy:
            infos += [await policy.step(world.rank) for _ in range(9)]
        assert identity(model) == objects
        return values(model, floating=True), values(model, floating=False), infos

    results = run(main, 4)
    for floating, integers, infos in results:
        assert floating == {2.5} and integers == {1.0}
        assert [bool(info) for info in infos] == [False, False, True] * 3
        assert infos[2].donors == (0, 1, 2, 3) and infos[2].weights == (0.25,) * 4 and infos[2].round == 1
    assert [event.round for event in events] == [1, 2, 3] and events[0].best == 0


def test_average_all_on_a_sub_group_divides_by_its_size() -> None:
    async def main(world: ad.World) -> set[float]:
        model = Mixed(float(world.rank))
        if world.rank in (1, 2, 4):
            group = await ad.new_group([1, 2, 4])
            async with AverageAllPolicy(model, sgd(model), average_every=1, group=group) as policy:
                await policy.step()
        return values(model, floating=True)

    third = {float(torch.tensor(7.0) / torch.tensor(3.0)), 7.0 / 3.0}
    assert run(main, 5) == [{0.0}, third, third, {3.0}, third]


@pytest.mark.parametrize("leaver", range(3))
def test_average_all_tells_the_others_who_has_left(leaver: int) -> None:
    async def main(world: ad.World) -> str:
        model = Mixed(float(world.rank))
        async with AverageAllPolicy(model, sgd(model), average_every=1) as policy:
            for _ in range(2 if world.rank == leaver else 5):
                try:
                    await policy.step()
                except ad.ClosedError as error:
                    return str(error)
        return ""

    texts = run(main, 3)
    assert texts[leaver] == ""
    heard = [text for rank, text in enumerate(texts) if rank != leaver]
    assert f"rank {leaver} left" in heard[0] and all("left" in text for text in heard), heard


def test_average_all_tells_the_others_who_has_left_it_though_that_rank_trains_on() -> None:
    heard: list[str] = []

    async def main(world: ad.World) -> None:
        model = Mixed(float(world.rank))
        async with AverageAllPolicy(model, sgd(model), average_every=1) as policy:
            await policy.step()
            if world.rank != 1:
                with pytest.raises(ad.ClosedError) as caught:
                    await policy.step()
                heard.append(str(caught.value))
        while len(heard) < 2:
            await world.safe_point()

    run(main, 3)
    assert any("rank 1 left" in text for text in heard) and all("left" in text for text in heard)


def test_average_all_resets_the_optimizer_if_told_to_and_one_rank_does_nothing() -> None:
    async def main(world: ad.World) -> None:
        model = Mixed(1.0)
        optimizer = sgd(model, momentum=0.9)
        async with AverageAllPolicy(model, optimizer, average_every=1, optimizer_state="reset") as policy:
            fill_gradients(model)
            optimizer.step()
            start = clone_state(model)
            info = await policy.step()
            assert bool(info) == (world.size > 1)
            assert bool(optimizer.state) == (world.size == 1)
            assert equal_states(clone_state(model), start)

    run(main, 2)
    run(main, 1)


# -- SpawnPolicy ------------------------------------------------------------------------------------------------------


class CountingPolicy(SpawnPolicy):
    """The least that a policy can be."""

    opened = closed = 0

    async def _step(self, local_metric: Any) -> StepInfo:
        await self._world.safe_point()
        return StepInfo()

    async def _start(self) -> None:
        self.opened += 1

    async def _stop(self, error: BaseException | None) -> None:
        self.closed += 1

    def _options(self) -> dict[str, Any]:
        return {}


def test_spawn_policy_counts_steps_and_guards_them() -> None:
    async def main(world: ad.World) -> None:
        model = fill(Mixed(), 1.0)
        policy = CountingPolicy(model, sgd(model), average_every=1)
        with pytest.raises(ad.ClosedError, match="before async with"):
            await policy.step()
        async with policy:
            await policy.step()
            first = asyncio.create_task(policy.step())
            await asyncio.sleep(0)
            with pytest.raises(ad.BusyError, match="one task trains a model"):
                await policy.step()
            await first
            assert policy.iteration == 2
        with pytest.raises(ad.ClosedError, match="has ended"):
            await policy.step()
        with pytest.raises(ad.LocalProtocolError, match="entered before"):
            async with policy:
                pass
        assert (policy.opened, policy.closed) == (1, 1)
        with pytest.raises(TypeError):
            SpawnPolicy(model, sgd(model), average_every=1)  # type: ignore[abstract]

    run(main, 2)
