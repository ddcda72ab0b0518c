"""Tests selective averaging on the local transport, in strict runs, where anything left over is a failure.

Ranks share the loop and step in turn, so most tests are short and repeat exactly. Behaviour that needs real processes
is tested in ``launched/test_policies.py``, ranks that join and leave in ``test_policy_members.py``.
"""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from scripts.population import (
    Mixed,
    Story,
    clone_state,
    equal_states,
    flat_state,
    identity,
    sgd,
    values,
)
from support.facts import naming
from support.local import run
from support.policies import Lockstep, fill_gradients, train
from torch import nn

import asyncdist as ad
from protocols import (
    AsyncSelectiveAveragingPolicy,
    StepInfo,
)

# -- exactness --------------------------------------------------------------------------------------------------------


def test_only_the_worst_of_four_takes_the_exact_mean_of_the_rest() -> None:
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
            with pytest.raises(ValueError, match=naming(9)):
                await policy.step()
        assert equal_states(clone_state(model), start)
        assert policy.statistics().replacement_count == 0
        with pytest.raises(ValueError, match=naming("replacement_ratio", 7)):
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
def test_reset_copies_fresh_weights_and_clears_the_optimizer(with_optimizer: bool) -> None:
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
                    assert values(model, floating=True) == {7.0} and values(model, floating=False) == {7.0, 1.0}
                    assert optimizer.state is state and not state
                    assert identity(model) == objects
        return replaced

    replaced = run(main, 4)
    assert replaced[0] >= 3 and replaced[1:] == [0, 0, 0]


@pytest.mark.parametrize("momentum", [0.25, 0.7, 1.0])
def test_momentum_mixes_with_the_weights_of_that_moment(momentum: float) -> None:
    """The replacer's weights change between its assignment and the application of the average."""
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


def test_ratio_zero_replaces_no_rank_and_ratio_one_all_but_best() -> None:
    assert not any(member.replacements for member in train(replacement_ratio=0.0))
    members = train(replacement_ratio=1.0)
    assert [bool(member.replacements) for member in members] == [True, True, True, False]
    assert all(values(member.model, floating=True) == {3.0} for member in members)


def test_metric_mode_min_replaces_the_largest() -> None:
    members = train(metric_mode="min")
    assert [bool(member.replacements) for member in members] == [False, False, False, True]
    assert values(members[3].model, floating=True) == {1.0}
    assert values(members[3].model, floating=False) == {0.0}  # the integers of rank 0, the best rank


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


ALWAYS_TOLD = {"iteration", "metrics reported", "snapshots given", "averages applied"}


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
        title, *lines = str(statistics).splitlines()
        assert title == f"AsyncSelectiveAveragingPolicy, rank {world.rank}"
        told = {name.strip(): value for name, value in (line.rsplit("  ", 1) for line in lines)}
        assert int(told["metrics reported"]) == statistics.report_count
        assert "0" not in [told[name] for name in told.keys() - ALWAYS_TOLD], (
            "events that have not happened must have no line"
        )
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
    assert values(members[0].model, floating=False) == {2.0, 1.0}  # the integers of the best donor
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
    """Parameters, buffers, optimizer, its state, a scheduler and an EMA model remain the same objects."""
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
                    optimizer.step()  # the optimizer still changes the weights that were just written
                    changed = zip(was, model.parameters(), strict=True)
                    assert all(not torch.equal(one, two) for one, two in changed)
        assert scheduler.get_last_lr() == [0.1 * 0.5**4] and int(average.n_averaged) == 40
        return replaced

    assert run(main, 4)[0] >= 3


def test_average_that_arrives_as_its_rank_leaves_is_not_applied(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def main(world: ad.World) -> tuple[int, int]:
        model = Mixed(float(world.rank))
        start = clone_state(model)
        async with AsyncSelectiveAveragingPolicy(model, sgd(model), average_every=1) as policy:
            await policy.step(float(world.rank))
            if world.rank == 0:
                replacer = policy._opened.replacer
                while replacer.exchange is None or replacer.exchange.average is None:
                    await world.safe_point()
            while world.rank == 1 and 0 not in world.services.left:
                await policy.step(1.0)
        assert equal_states(clone_state(model), start)
        return policy.statistics().unapplied_count, policy.statistics().replacement_count

    with caplog.at_level("INFO", logger="protocols"):
        assert run(main, 2) == [(1, 0), (0, 0)]
    assert "round 1: the policy ended before the complete average was applied" in caplog.text


@pytest.mark.slow
def test_compiled_model_uses_new_weights_without_recompiling() -> None:
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
                        model[0].bias += 1.0  # otherwise the next average would be equal to the weights
        return count

    torch._dynamo.reset()
    assert run(main, 2)[0] >= 2
    assert len(captured) <= 2, "each rank's model may be captured only once"


def test_backward_through_weights_changed_by_a_step_is_refused() -> None:
    """The backward pass would mix old activations with new weights."""
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
            with pytest.raises(ValueError, match=r"group must be None or the group that was passed .*, got 'others'"):
                await policy(61, model, optimizer, 0.0, group="others")
            with pytest.raises(ValueError, match="expose_params must be None or True, got False"):
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
    assert rounds - 1 <= heard <= rounds, "the coordinator may miss only the last report"
    assert heard <= leader.rounds_decided <= rounds + given_up + 1
    assert worst.received_nbytes >= rounds * (3 * floating + exact)
    assert sum(one.sent_nbytes for one in statistics if one) >= worst.received_nbytes
    assert not leader.stragglers and not leader.left_out
