"""Tests DiLoCo with eager outer steps: the update rule against an oracle, faults, ends, and saved states."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from scripts.population import Mixed, sgd
from support.facts import naming
from support.seeds import in_ci, seeds
from torch import nn

import asyncdist as ad
from protocols import DiLoCoPolicy, StepInfo
from protocols.diloco.eager import AnchorMean
from simulation.eager_scenarios import OUTERS, Oracle, Plan, check, draw_plan, kills, run, scenario
from simulation.training_runs import Layers, drift

RULES: dict[str, dict[str, Any]] = {
    "plain": {},
    "each step": {"every": 1},
    "fragments": {"every": 4, "fragments": 3},
    "mixing": {"mixing": 0.5, "fragments": 2},
    "saved": {"saves_at": (4, 5, 11)},
}


@pytest.mark.parametrize("dtype", in_ci([torch.float32, torch.float64], torch.float32), ids=str)
@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("outer", ["dyadic", "heavy ball"])
def test_eager_steps_equal_the_oracle_bit_for_bit(outer: str, rule: str, dtype: torch.dtype) -> None:
    """All factors are powers of two, so that each operation is rounded as in numpy."""
    plan = Plan(outer=outer, dtype=dtype, **RULES[rule])
    check(plan, run(plan)[1], is_exact=True)


@pytest.mark.slow
@pytest.mark.parametrize("rule", in_ci(["plain", "fragments"], "fragments"))
@pytest.mark.parametrize(
    "outer", [pytest.param(outer, marks=[pytest.mark.long] * (outer != "default")) for outer in OUTERS]
)
def test_fifty_eager_rounds_equal_the_oracle(outer: str, rule: str) -> None:
    plan = Plan(ranks=3, outer=outer, **RULES[rule])
    plan = dataclasses.replace(plan, steps=(50 * plan.every // plan.fragments + 1,) * 3)
    check(plan, run(plan)[1], is_exact=False)


def test_the_mean_of_the_inputs_is_that_of_the_paper() -> None:
    """The mean over the ranks of the eager input is D(t) / k + (1 - 1 / k) D(t - 1), exactly on a dyadic grid."""
    plan = Plan(outer="plain", steps=(24,) * 4)
    oracle, before = Oracle(plan), None
    for step in range(24):
        if not oracle.step(step):
            continue
        now = [np.mean([own[index] for own in oracle.differences], axis=0) for index in range(10)]
        mean = [np.mean([own[index] for own in oracle.inputs], axis=0) for index in range(10)]
        for index in range(10):
            last = 0.0 if before is None else before[index]
            assert np.array_equal(mean[index], now[index] / 4 + (1 - 1 / 4) * last)
        before = now
    check(plan, run(plan)[1], is_exact=True)


@pytest.mark.parametrize("options", [{}, {"fragments": 2}, {"mixing": 0.25}, {"outer_optimizer": torch.optim.Adam}])
def test_one_rank_alone_is_diloco_bit_for_bit(options: dict[str, Any]) -> None:
    async def main(world: ad.World, eager: bool) -> list[Any]:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 1))
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
        async with DiLoCoPolicy(model, optimizer, average_every=4, eager=eager, **options) as policy:
            for step in range(22):
                x = torch.randn(8, 4) if step != 9 else torch.full((8, 4), math.nan)
                optimizer.zero_grad()
                (model(x) - x[:, :1]).square().mean().backward()
                optimizer.step()
                info = await policy.step()
                assert bool(info) == ((step + 1) % (4 // options.get("fragments", 1)) == 0)
        return [tensor.tolist() for tensor in model.state_dict().values()]

    eager, plain = (ad.simulate(main, each, ranks=1, seed=1, strict=True).results for each in (True, False))
    assert str(eager) == str(plain)  # a rank alone cannot replace NaNs in its BatchNorm


def test_no_rank_waits_for_the_mean_of_its_own_round() -> None:
    """A step waits only for the mean of the round before, which has had ``average_every`` steps to travel."""

    async def main(world: ad.World) -> list[tuple[int, StepInfo]]:
        model = Mixed(1.0)
        infos = []
        async with DiLoCoPolicy(model, sgd(model), average_every=4, eager=True) as policy:
            for step in range(16):
                with torch.no_grad():
                    model.wide.bias.add_(world.rank + 1.0)
                await asyncio.sleep(0.01)
                infos.append((step, await policy.step()))
        return [each for each in infos if each[1]]

    network = ad.simulation.Network(link=ad.simulation.Link(latency_s=0.005))
    for rank, infos in enumerate(ad.simulate(main, ranks=3, network=network, strict=True).results):
        assert [(step, info.round, info.donors) for step, info in infos] == [
            (3, 0, (rank,)),
            (7, 1, (0, 1, 2)),
            (11, 2, (0, 1, 2)),
            (15, 3, (0, 1, 2)),
        ]
        assert [(info.staleness_steps, info.staleness_versions) for _, info in infos] == [(0, 0), *[(4, 1)] * 3]
        assert all(info.waited_s == 0.0 and not info.left_out for _, info in infos)
        assert infos[0][1].outer_norm is None and all(info.outer_norm for _, info in infos[1:])


# -- faults and ends --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", seeds(32))
def test_eager_ranks_agree_whatever_is_lost_or_restarted(seed: int) -> None:
    scenario(seed)


def test_a_late_mean_of_other_ranks_anchors_is_not_taken() -> None:
    """Regression: a rank ended early and was killed, and its round counted as the others' last one."""
    scenario(269)


def test_the_drawn_runs_have_kills() -> None:
    assert sum(map(bool, (kills(draw_plan(seed)) for seed in range(20)))) > 10


@pytest.mark.parametrize("steps", [(12, 7, 12, 12), (3, 12, 12, 9), (12, 5, 6, 7), (1, 12, 2, 12), (10, 10, 11, 11)])
@pytest.mark.parametrize("fragments", in_ci([1, 2], 2))
def test_eager_ranks_may_end_after_different_numbers_of_steps(steps: tuple[int, ...], fragments: int) -> None:
    """Ranks that end after the same round average their anchors; the others continue without them."""
    plan = Plan(outer="plain", every=3, steps=steps, fragments=fragments)
    _, lives = run(plan)
    for (rank, _), life in lives.items():
        others = [other for other in lives.values() if other.rounds == life.rounds and life.rounds]
        for other in others:
            for mine, theirs in zip(life.anchors, other.anchors, strict=True):
                assert all(map(np.array_equal, mine, theirs)), f"rank {rank}"
        assert len(life.infos) == steps[rank]


@pytest.mark.parametrize("wire", ["bfloat16", "int8", "q4", "topk"])
def test_anchors_are_averaged_exactly_with_any_codec(wire: str) -> None:
    plan = Plan(outer="default", dtype=torch.float32, wire=wire, fragments=2, saves_at=(6,))
    with pytest.warns(UserWarning) if wire == "topk" else contextlib.nullcontext():
        _, lives = run(plan)
    for life in lives.values():
        for mine, theirs in zip(life.anchors, lives[0, 0].anchors, strict=True):
            assert all(map(np.array_equal, mine, theirs))


def test_a_settle_without_memory_can_be_repeated(monkeypatch: pytest.MonkeyPatch) -> None:
    """Regression: the second call took the failed contribution for made, and all ranks waited forever."""
    capture, count = AnchorMean.capture, 0

    def fails_once(self: AnchorMean, tensors: Any, encoded: Any) -> float:
        nonlocal count
        count += 1
        if count == 2:
            raise MemoryError
        return capture(self, tensors, encoded)

    monkeypatch.setattr(AnchorMean, "capture", fails_once)

    async def main(_: ad.World) -> tuple[int, int]:
        model, optimizer = made()
        failed_count = 0
        async with DiLoCoPolicy(model, optimizer, average_every=5, eager=True) as policy:
            for _ in range(12):
                await policy.step()
            try:
                await policy.settle()
            except MemoryError:
                failed_count += 1
                await policy.settle()
            for _ in range(12):
                await policy.step()
        return policy.iteration, failed_count

    results = ad.simulate(main, ranks=2, seed=1, until_s=100.0).results
    assert sorted(results) == [(24, 0), (24, 1)]


def test_a_rank_that_is_not_finite_takes_the_others_means() -> None:
    """It keeps no share of its own weights, recovers in the same step, and ends with the others' weights."""

    async def main(world: ad.World) -> tuple[list[StepInfo], list[Any]]:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 4))
        optimizer = torch.optim.Adam(model.parameters(), 1e-3)
        infos = []
        async with DiLoCoPolicy(model, optimizer, average_every=4, eager=True) as policy:
            for step in range(24):
                x = torch.full((8, 4), math.nan) if (world.rank, step) == (1, 5) else torch.randn(8, 4)
                optimizer.zero_grad()
                model(x).square().mean().backward()
                optimizer.step()
                infos.append(await policy.step())
                has_nan = not all(tensor.isfinite().all() for tensor in model.state_dict().values())
                assert not has_nan or (world.rank == 1 and 5 <= step < 7)
        return infos, [tensor.tolist() for tensor in model.state_dict().values()]

    results = ad.simulate(main, ranks=3, strict=True).results
    assert results[0][1] == results[1][1] == results[2][1]
    infos = [info for info in results[1][0] if info]
    assert infos[1].recovered and not any(info.recovered for info in infos[2:])
    assert [info.donors for info in infos] == [(1,), (0, 1, 2), (0, 2), *[(0, 1, 2)] * 3]


async def train_replica(world: ad.World, size: int, options: dict[str, Any]) -> list[Any]:
    """Train a replica of ``size`` ranks, whose ranks make equal steps, and return the weights after each step."""
    model, found = Layers(), []
    async with DiLoCoPolicy(model, sgd(model), average_every=3, eager=True, replica_size=size, **options) as policy:
        for step in range(15):
            with torch.no_grad():
                for place, parameter in enumerate(model.parameters()):
                    parameter.add_(torch.from_numpy(drift(world.rank // size, step, place, parameter.shape)))
            info = await policy.step()
            found.append([(info.round, info.staleness_steps), *(each.tolist() for each in model.parameters())])
    return [*found, [each.tolist() for each in model.parameters()]]


@pytest.mark.parametrize("options", [{}, {"fragments": 2}, {"merge": "radial"}], ids=str)
def test_eager_replicas_equal_ranks_bit_for_bit(options: dict[str, Any]) -> None:
    """Under DDP each rank of a replica exchanges a part of the model, and a part of the anchor."""
    ranks = ad.simulate(train_replica, 1, options, ranks=3, seed=1, strict=True).results
    replicas = ad.simulate(train_replica, 2, options, ranks=6, seed=2, strict=True).results
    for rank, found in enumerate(replicas):
        assert found == ranks[rank // 2]
    # With several fragments, the first ones have trained since their last outer step.
    assert "fragments" in options or ranks[0][-1] == ranks[1][-1] == ranks[2][-1]


# -- saved states -----------------------------------------------------------------------------------------------------

SAVED: dict[str, dict[str, Any]] = {
    "default": {},
    "fragments": {"fragments": 2, "mixing": 0.5},
    "residuals": {"wire": "int8", "error_feedback": 0.9},
}


def made() -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Linear(6, 1))
    return model, torch.optim.AdamW(model.parameters(), lr=0.05)


async def advance(policy: Any, model: nn.Module, optimizer: Any, steps: range, rank: int) -> None:
    for step in steps:
        generator = torch.Generator().manual_seed(100 * step + rank)
        x = torch.randn(8, 4, generator=generator)
        optimizer.zero_grad()
        (model(x) - x[:, :1]).square().mean().backward()
        optimizer.step()
        await policy.step()


@pytest.mark.parametrize("at", in_ci([7, 10], 7))
@pytest.mark.parametrize("kind", SAVED)
def test_an_eager_population_continues_to_the_bit(kind: str, at: int, tmp_path: Path) -> None:
    """A run that saves and a run that is resumed from the checkpoint are equal, and the saved anchors are common."""
    options = {"average_every": 5, "eager": True, **SAVED[kind]}

    async def main(world: ad.World, first: int, last: int) -> Any:
        model, optimizer = made()
        policy = DiLoCoPolicy(model, optimizer, **options)
        if first:
            await ad.load_population(tmp_path, model, optimizer, policy=policy)
        anchors: list[Any] = []
        async with policy:
            for begin, end in ((first, at), (at, last)):
                await advance(policy, model, optimizer, range(begin, end), world.rank)
                if end == at > first:
                    await ad.save_population(tmp_path, model, optimizer, policy=policy)
                    anchors = [each.tolist() for own in policy._fragments for each in own.anchors]
        return anchors, [tensor.tolist() for tensor in model.state_dict().values()]

    straight = ad.simulate(main, 0, 20, ranks=3, seed=1, strict=True).results
    resumed = ad.simulate(main, at, 20, ranks=3, seed=2, strict=True).results
    assert [weights for _, weights in resumed] == [weights for _, weights in straight]
    assert straight[0][0] == straight[1][0] == straight[2][0]


def test_a_state_without_eager_steps_is_refused() -> None:
    model, optimizer = made()
    state = DiLoCoPolicy(model, optimizer, average_every=5).state_dict()
    with pytest.raises(ValueError, match=naming("settled_at")):
        DiLoCoPolicy(model, optimizer, average_every=5, eager=True).load_state_dict(state)


@pytest.mark.parametrize(
    ("options", "name"),
    [
        ({"outer_optimizer": None}, "outer_optimizer"),
        ({"overlap_steps": 1}, "overlap_steps"),
        ({"warmup_steps": 2}, "warmup_steps"),
        ({"late": "skip"}, "late"),
        ({"weights": "tokens"}, "weights"),
    ],
)
def test_options_that_contradict_eager_steps_are_refused(options: dict[str, Any], name: str) -> None:
    model, optimizer = made()
    with pytest.raises(ValueError, match=naming(name, "eager")):
        DiLoCoPolicy(model, optimizer, average_every=5, eager=True, **options)
