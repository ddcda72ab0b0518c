"""Tests selective DiLoCo: its rounds against the oracle of DiLoCo under faults, trial weights, and saved states."""

from __future__ import annotations

import functools
import itertools
import logging
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from scripts.population import clone_state, equal_states, sgd
from support.facts import names
from support.seeds import in_ci, seeds
from torch import nn

import asyncdist as ad
from asyncdist.simulation import Kill, Restart
from protocols import DiLoCoPolicy, SelectiveDiLoCoPolicy, StepInfo
from simulation.diloco_scenarios import Plan, check, draw_selective_plan, gain, run, seen_in, within

STEP = functools.partial(torch.optim.SGD, lr=1.0)  # takes the mean of the donors' weights

# -- rounds against the oracle ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "rule",
    [
        {},
        {"uses_tokens": True},
        {"every": 4, "fragments": 2, "overlap_steps": 2, "mixing": 0.5},
        {"every": 4, "fragments": 3, "warmup_steps": 5},
    ],
    ids=lambda rule: ",".join(rule) or "plain",
)
def test_donors_and_weights_follow_from_the_gains(rule: dict[str, Any]) -> None:
    plan = Plan(selects=True, steps=(40,) * 4, **{"every": 3, **rule})
    _, record = run(plan)
    check(plan, record, within)
    seen = {info.donors: info for infos in record.infos.values() for info in infos if info}
    assert {len(donors) for donors in seen} >= {2, 3}, "some rounds must have fewer donors"
    for donors, info in seen.items():
        assert info.gains == tuple(gain(rank, info.round) for rank in donors)
        assert sum(info.weights) == pytest.approx(1.0) and len(info.weights) == len(donors)


@pytest.mark.parametrize("block", seeds(12))
def test_each_rank_equals_the_oracle_whatever_is_lost(block: int) -> None:
    for seed in range(block * 10, block * 10 + 10):
        try:
            seen_in(seed, draw=draw_selective_plan)
        except AssertionError as error:
            raise AssertionError(f"seed {seed}: {error}") from error


@pytest.mark.parametrize(
    "rule",
    [
        pytest.param({}, marks=pytest.mark.long, id="plain"),
        pytest.param({"fragments": 2, "overlap_steps": 1, "every": 4}, id="streaming"),
    ],
)
@pytest.mark.parametrize("lost", [(0,), pytest.param((0, 1), marks=pytest.mark.long)], ids=str)
def test_a_lost_leader_changes_no_decision_at_any_moment(lost: tuple[int, ...], rule: dict[str, Any]) -> None:
    """The leader, and then its successor, is lost at each of many moments around two rounds."""
    parted = 0
    for moment in range(30):
        at_s = 0.033 + 0.0007 * moment
        faults = tuple(Kill(rank, at_s=at_s + 0.0004 * rank) for rank in lost)
        plan = Plan(selects=True, steps=(12,) * 4, faults=faults, **{"every": 3, **rule})
        try:
            report, record = run(plan)
            check(plan, record, within)
        except AssertionError as error:
            raise AssertionError(f"at {at_s} s: {error}") from error
        assert report.faults_fired == (1,) * len(lost)
        parted += len({event.donors for event in record.applied[3]}) > 1
    assert parted


@pytest.mark.parametrize(
    "rule",
    in_ci(
        [{}, {"fragments": 2, "overlap_steps": 2, "mixing": 0.5, "every": 4}, {"warmup_steps": 5}],
        *({"fragments": 2, "overlap_steps": 2, "mixing": 0.5, "every": 4},),
    ),
)
def test_equal_gains_equal_diloco_bit_for_bit(rule: dict[str, Any]) -> None:
    async def main(world: ad.World, kind: Any, options: dict[str, Any]) -> Any:
        torch.manual_seed(1)
        model = nn.Sequential(nn.Linear(5, 7), nn.BatchNorm1d(7), nn.Linear(7, 2))
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
        generator = torch.Generator().manual_seed(world.rank)
        scores = itertools.cycle((1.0, 1.25))
        seen = []
        async with kind(model, optimizer, **options) as policy:
            for step in range(20):
                optimizer.zero_grad()
                model(torch.randn(6, 5, generator=generator)).square().mean().backward()
                optimizer.step()
                count = {"tokens": 1 + (world.rank + step) % 3}
                await (policy.step(**count) if kind is DiLoCoPolicy else policy.step(score=scores.__next__, **count))
                seen.append(clone_state(model))
        return seen

    shared = {"average_every": 4, "weights": "tokens", "wire": "int8", "error_feedback": 0.9}
    shared |= {{"every": "average_every"}.get(name, name): value for name, value in rule.items()}
    right = ad.simulate(main, DiLoCoPolicy, shared, ranks=3, strict=True).results
    found = ad.simulate(
        main, SelectiveDiLoCoPolicy, {**shared, "outlier_factor": math.inf}, ranks=3, strict=True
    ).results
    for mine, theirs in zip(found, right, strict=True):
        assert all(map(equal_states, mine, theirs))


# -- the trial weights ------------------------------------------------------------------------------------------------


def line(value: float = 0.0) -> nn.Module:
    """Return a model of one number and one buffer."""
    model = nn.Module()
    model.register_parameter("x", nn.Parameter(torch.full((1,), value, dtype=torch.float64)))
    model.register_parameter("y", nn.Parameter(torch.full((1,), value, dtype=torch.float64)))
    model.register_buffer("count", torch.zeros(1))
    return model


async def advance(policy: Any, model: nn.Module, by: float, evaluate: Any) -> StepInfo:
    with torch.no_grad():
        model.x.add_(by)
        model.y.add_(by)
    return await policy.step(score=evaluate)  # type: ignore[no-any-return]


@pytest.mark.parametrize(
    ("options", "share"), [({}, 0.25), ({"donor_ratio": 0.5}, 0.5), ({"averaging_strategy": "best_only"}, 1.0)]
)
def test_a_difference_is_tried_at_its_share_in_the_mean(options: dict[str, Any], share: float) -> None:
    """The metric sees the anchor and a + share (theta - a); afterwards the rank's own state is unchanged."""

    async def main(world: ad.World) -> list[tuple[float, float]]:
        model, seen = line(), []

        def evaluate() -> float:
            seen.append((model.x.item(), model.y.item()))
            model.count.add_(1.0)
            return model.x.item()

        settings = {"outer_optimizer": STEP, "overlap_steps": 1, **options}
        async with SelectiveDiLoCoPolicy(model, sgd(model), average_every=2, **settings) as policy:
            for step in range(4):
                before = (model.x + world.rank + 1.0).item()
                info = await advance(policy, model, world.rank + 1.0, evaluate)
                assert info or (model.x.item(), model.count.item()) == (before, 0.0), step
        return seen

    for rank, seen in enumerate(ad.simulate(main, ranks=4, strict=True).results):
        moved = 2.0 * (rank + 1) * share
        assert seen[:2] == [(0.0, 0.0), (moved, moved)] and len(seen) == 4


def test_a_fragments_difference_is_tried_alone_on_the_anchor() -> None:
    async def main(world: ad.World) -> list[tuple[float, float]]:
        model, seen = line(), []

        def evaluate() -> float:
            seen.append((model.x.item(), model.y.item()))
            return model.x.item() + model.y.item()

        options: dict[str, Any] = {"fragments": 2, "fragment_pattern": [["x", "count"], ["y"]], "outer_optimizer": STEP}
        async with SelectiveDiLoCoPolicy(model, sgd(model), average_every=4, **options) as policy:
            for _ in range(4):
                await advance(policy, model, 1.0, evaluate)
        return seen

    for seen in ad.simulate(main, ranks=2, strict=True).results:
        assert seen == [(0.0, 0.0), (1.0, 0.0), (2.0, 0.0), (2.0, 2.0)]


def test_an_error_of_the_metric_leaves_the_model_and_is_repeated() -> None:
    """The contribution stays due, so that the other ranks are not left waiting."""

    async def main(world: ad.World) -> tuple[int, float, tuple[int, ...]]:
        model, failures = line(), 0
        calls = itertools.count(1)

        def evaluate() -> float:
            if world.rank == 1 and next(calls) == 2:
                raise ZeroDivisionError
            return model.x.item()

        async with SelectiveDiLoCoPolicy(model, sgd(model), average_every=2, outer_optimizer=STEP) as policy:
            for _ in range(3):
                before = model.x.item() + 1.0
                try:
                    info = await advance(policy, model, 1.0, evaluate)
                except ZeroDivisionError:
                    failures += 1
                    assert model.x.item() == before
                    info = await policy.step(score=evaluate)
                if info:
                    break
        return failures, model.x.item(), info.donors

    assert ad.simulate(main, ranks=3, strict=True).results == (
        (0, 2.0, (0, 1, 2)),
        (1, 2.0, (0, 1, 2)),
        (0, 2.0, (0, 1, 2)),
    )


@pytest.mark.parametrize("mode", ["loss", "score", "min", "max"])
def test_each_way_to_pass_a_metric_has_its_direction(mode: str) -> None:
    """All ranks climb; if the passed metric falls with the climb, they are donors only if it is a loss."""

    async def main(world: ad.World) -> tuple[int, ...]:
        model = line()
        sign = (-1.0 if mode in ("loss", "min") else 1.0) * (-1.0 if world.rank == 1 else 1.0)
        options: dict[str, Any] = {"average_every": 1}

        def evaluate() -> float:
            return sign * model.x.item()

        if mode in ("min", "max"):
            options |= {"metric": evaluate, "metric_mode": mode}
        async with SelectiveDiLoCoPolicy(model, sgd(model), **options) as policy:
            with torch.no_grad():
                model.x.add_(1.0)
            info = await policy.step(**({} if "metric" in options else {mode: evaluate}))
        return info.donors

    assert set(ad.simulate(main, ranks=3, strict=True).results) == {(0, 2)}


# -- ranks that are left out ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("ranks", [1, 3])
def test_if_no_rank_gains_all_return_to_the_anchor(ranks: int) -> None:
    """The outer optimizer makes no step, and its momentum stays."""

    async def main(world: ad.World) -> tuple[list[float], list[str]]:
        model, found, texts = line(), [], []
        async with SelectiveDiLoCoPolicy(model, sgd(model), average_every=1, mixing=0.5) as policy:
            for by in (1.0, -8.0, 1.0):
                info = await advance(policy, model, by, lambda: model.x.item())
                found.append(model.x.item())
                texts.append(str(info))
                assert info and (info.donors == ()) == (by < 0) and info.recovered == ""
        return found, texts

    buffer, anchor, own, right = 0.0, 0.0, 0.0, []
    for by in (1.0, None, 1.0):
        if by is None:
            own = anchor
        else:
            own += by
            buffer = 0.9 * buffer + (anchor - own)
            anchor -= 0.7 * ((anchor - own) + 0.9 * buffer)
            own = 0.5 * own + 0.5 * anchor
        right.append(own)
    for found, texts in ad.simulate(main, ranks=ranks, strict=True).results:
        assert found == pytest.approx(right, rel=1e-12)
        assert texts[1] == "round 2: no rank's weights were averaged"


def test_a_rank_that_is_left_out_takes_the_new_weights_whole() -> None:
    """With mixing, it would otherwise keep a share of its bad weights, and their encoding error."""

    async def main(world: ad.World) -> list[float]:
        torch.manual_seed(0)
        model = nn.Linear(300, 1)
        options: dict[str, Any] = {"mixing": 0.5, "wire": "q4", "error_feedback": 1.0, "outer_optimizer": STEP}
        generator, found = torch.Generator().manual_seed(world.rank), []
        async with SelectiveDiLoCoPolicy(model, sgd(model), average_every=1, **options) as policy:
            for step in range(3):
                size = 1e4 if (world.rank, step) == (1, 0) else 0.01
                with torch.no_grad():
                    model.weight.add_(size * torch.randn(model.weight.shape, generator=generator))
                await policy.step(score=itertools.cycle((0.0, 1.0)).__next__)
                found.append(model.weight.abs().max().item())
        return found

    for found in ad.simulate(main, ranks=4, strict=True).results:
        assert max(found) < 0.2


def test_a_metric_that_is_never_finite_leaves_a_rank_out() -> None:
    async def main(world: ad.World) -> tuple[list[tuple[int, ...]], float]:
        model, donors = line(), []
        async with SelectiveDiLoCoPolicy(model, sgd(model), average_every=1, outer_optimizer=STEP) as policy:
            bad = (math.nan, -math.inf, math.inf)[world.rank - 1] if world.rank else None
            for _ in range(3):
                info = await advance(policy, model, 1.0 + world.rank, lambda: model.x.item() if bad is None else bad)
                donors.append(info.donors)
        return donors, model.x.item()

    assert ad.simulate(main, ranks=4, strict=True).results == (([(0,)] * 3, 3.0),) * 4


# -- joins and saved states -------------------------------------------------------------------------------------------


def test_a_restarted_rank_becomes_a_donor() -> None:
    async def main(world: ad.World) -> tuple[int, set[tuple[int, ...]], float]:
        model, donors = line(), set()
        optimizer = sgd(model)
        async with SelectiveDiLoCoPolicy(model, optimizer, average_every=2, outer_optimizer=STEP) as policy:
            while policy.iteration < 40:
                await world.sleep(0.01)
                info = await advance(policy, model, world.rank + 1.0, lambda: model.x.item())
                if info and policy.iteration > 30:
                    donors.add(info.donors)
        return world.incarnation, donors, model.x.item()

    faults = [Kill(0, at_s=0.1), Restart(0, at_s=0.15)]
    results = ad.simulate(main, ranks=3, faults=faults, until_s=100.0).results
    assert [result[:2] for result in results] == [(1, {(0, 1, 2)}), (0, {(0, 1, 2)}), (0, {(0, 1, 2)})]
    assert len({result[2] for result in results}) == 1


SAVED: dict[str, dict[str, Any]] = {
    "default": {},
    "in flight": {"fragments": 2, "overlap_steps": 2, "mixing": 0.5},
    "residuals": {"wire": "int8", "error_feedback": 0.9, "overlap_steps": 2, "donor_ratio": 0.7},
}


@pytest.mark.slow
@pytest.mark.parametrize("at", in_ci([7, 11], 7))
@pytest.mark.parametrize("kind", SAVED)
def test_a_saved_population_continues_to_the_bit(kind: str, at: int, tmp_path: Path) -> None:
    async def main(world: ad.World, first: int, last: int) -> Any:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Linear(6, 1))
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
        held_out = torch.randn(32, 4, generator=torch.Generator().manual_seed(9))

        def evaluate() -> float:
            with torch.no_grad():
                return (model(held_out) - held_out[:, :1]).square().mean().item()

        policy = SelectiveDiLoCoPolicy(model, optimizer, average_every=5, **SAVED[kind])
        donors = []
        if first:
            await ad.load_population(tmp_path, model, optimizer, policy=policy)
        async with policy:
            for step in range(first, last):
                x = torch.randn(8, 4, generator=torch.Generator().manual_seed(100 * step + world.rank))
                optimizer.zero_grad()
                (model(x) - x[:, :1]).square().mean().backward()
                optimizer.step()
                donors.append((await policy.step(loss=evaluate)).donors)
            if last == at:
                await ad.save_population(tmp_path, model, optimizer, policy=policy)
        return donors, [tensor.tolist() for tensor in model.state_dict().values()]

    straight = ad.simulate(main, 0, 25, ranks=3, seed=1, strict=True).results
    half = ad.simulate(main, 0, at, ranks=3, seed=1, strict=True).results
    resumed = ad.simulate(main, at, 25, ranks=3, seed=2, strict=True).results
    assert [result[1] for result in resumed] == [result[1] for result in straight]
    assert [result[0] for result in resumed] == [result[0][at:] for result in straight]
    assert [result[1] for result in half] != [result[1] for result in straight]


# -- ranks that differ ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "options",
    [
        {"averaging_strategy": "mean"},
        {"donor_ratio": 0.5},
        {"outlier_factor": 2.0},
        {"metric_mode": "min"},
        {"mixing": 0.5},
    ],
    ids=lambda options: next(iter(options)),
)
def test_options_that_differ_are_named_before_any_data(options: dict[str, Any]) -> None:
    async def main(world: ad.World) -> str:
        model = line()
        policy = SelectiveDiLoCoPolicy(model, sgd(model), average_every=4, **(options if world.rank == 1 else {}))
        with pytest.raises(ad.DisagreementError) as caught:
            async with policy:
                pass
        return str(caught.value)

    for text in ad.simulate(main, ranks=3).results:
        assert names(text, next(iter(options))), text


@pytest.mark.parametrize("is_common", [True, False])
def test_a_metric_of_each_ranks_own_data_is_warned_about(is_common: bool, caplog: pytest.LogCaptureFixture) -> None:
    async def main(world: ad.World) -> None:
        model = line()
        target = 5.0 if is_common else 5.0 + world.rank
        async with SelectiveDiLoCoPolicy(model, sgd(model), average_every=1) as policy:
            for _ in range(6):
                await advance(policy, model, 0.1, lambda: -abs(model.x.item() - target))

    with caplog.at_level(logging.WARNING, "protocols.selective_diloco"):
        ad.simulate(main, ranks=3, strict=True)
    found = [record.getMessage() for record in caplog.records if record.name == "protocols.selective_diloco"]
    assert len(found) == (0 if is_common else 1)
    assert is_common or names(found[0], "SelectiveDiLoCoPolicy", "same held-out data", "easy data")


def test_a_fragment_of_buffers_alone_is_averaged() -> None:
    """Regression: a trial step changes no buffer, so that no rank had a gain, and the buffers were never averaged."""

    async def train(world: ad.World) -> tuple[float, set[tuple[int, tuple[int, ...]]]]:
        model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2, affine=False))
        with torch.no_grad():
            for each in model.parameters():
                each.zero_()
            model[1].running_mean.fill_(float(world.rank))
        donors = set[tuple[int, tuple[int, ...]]]()

        def score() -> float:
            return float(model[0].weight.detach().sum())

        options: dict[str, Any] = {"fragments": 2, "fragment_pattern": [["0"], ["1"]], "outer_optimizer": STEP}
        async with SelectiveDiLoCoPolicy(model, sgd(model), average_every=2, **options) as policy:
            for _ in range(4):
                with torch.no_grad():
                    model[0].weight += 1.0 if world.rank < 2 else -1.0
                info = await policy.step(score=score)
                donors |= {(info.fragment, info.donors)} if info else set()
        return model[1].running_mean[0].item(), donors

    for mean, donors in ad.simulate(train, ranks=3, seed=1).results:
        assert mean == 1.0
        assert donors == {(0, (0, 1)), (1, (0, 1, 2))}
