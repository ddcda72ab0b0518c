"""Tests DiLoCo and its family: update rules against an oracle, faults, cancelled steps, and ends."""

from __future__ import annotations

import asyncio
import dataclasses
import functools
import itertools
from typing import Any

import pytest
import torch
from scripts.population import Mixed, clone_state, equal_states, sgd
from support.seeds import in_ci, seeds
from torch import nn

import asyncdist as ad
from asyncdist.simulation import Interrupt, Kill, Network, SlowLink, SlowRank, Stall
from protocols import AverageAllPolicy, DiLoCoPolicy, StepInfo, TopK
from simulation.diloco_scenarios import OUTERS, Plan, Record, check, exactly, run, seen_in, train, within

HALF = functools.partial(torch.optim.SGD, lr=0.5, momentum=0.5, nesterov=True)

# -- update rules -----------------------------------------------------------------------------------------------------

RULES: dict[str, dict[str, Any]] = {
    "plain": {},
    "fragments": {"every": 4, "fragments": 4},
    "fragments of unequal distance": {"every": 5, "fragments": 3},
    "overlap": {"every": 4, "overlap_steps": 3},
    "streaming": {"every": 4, "fragments": 2, "overlap_steps": 3, "mixing": 0.5},
    "mixing": {"mixing": 0.25},
    "warm-up": {"every": 4, "fragments": 3, "warmup_steps": 6, "overlap_steps": 2},
}


@pytest.mark.slow
@pytest.mark.parametrize(
    "rule", [pytest.param(rule, marks=[pytest.mark.long] * (rule != "streaming")) for rule in RULES]
)
@pytest.mark.parametrize("outer", in_ci(OUTERS, "default", "heavy ball"))
def test_fifty_rounds_equal_the_oracle(outer: str, rule: str) -> None:
    plan = Plan(ranks=3, outer=outer, step_s=0.0, **{"every": 3, **RULES[rule]})
    plan = dataclasses.replace(plan, steps=(50 * plan.every // plan.fragments + plan.overlap_steps,) * 3)
    oracle = check(plan, run(plan)[1], within)
    assert sum(oracle.versions) >= 50 and max(abs(array).max() for array in oracle.anchor) < 1e6


@pytest.mark.parametrize("dtype", [torch.float32, pytest.param(torch.float64, marks=pytest.mark.long)], ids=str)
@pytest.mark.parametrize(
    ("outer", "rule"),
    in_ci(
        itertools.product(["none", "dyadic", "heavy ball"], ["plain", "streaming", "warm-up"]),
        *(("none", "plain"), ("dyadic", "streaming"), ("heavy ball", "plain"), ("heavy ball", "warm-up")),
    ),
)
def test_dyadic_options_equal_the_oracle_bit_for_bit(outer: str, rule: str, dtype: torch.dtype) -> None:
    """All factors are powers of two, so that each operation is rounded as in numpy."""
    plan = Plan(outer=outer, dtype=dtype, steps=(40,) * 4, **{"every": 2, **RULES[rule]})
    check(plan, run(plan)[1], exactly)


@pytest.mark.parametrize(
    ("outer", "rule"),
    in_ci(itertools.product(["none", "default"], ["plain", "streaming"]), ("none", "plain"), ("default", "streaming")),
)
def test_float32_stays_within_the_bound_of_the_oracle(outer: str, rule: str) -> None:
    plan = Plan(outer=outer, ranks=3, dtype=torch.float32, steps=(60,) * 3, **{"every": 2, **RULES[rule]})
    check(plan, run(plan)[1], within)


@pytest.mark.parametrize("outer", ["none", "default"])
def test_weights_by_tokens_equal_the_oracle(outer: str) -> None:
    plan = Plan(outer=outer, ranks=3, steps=(30,) * 3, uses_tokens=True, every=4, fragments=2, overlap_steps=1)
    _, record = run(plan)
    check(plan, record, within)
    assert next(filter(None, record.infos[0])).weights == (1 / 6, 2 / 6, 3 / 6)


def test_a_run_with_rounds_differs_from_one_without() -> None:
    """Regression in other libraries: ``model.parameters()``, read twice, was empty, and no weight ever moved."""
    results = [run(Plan(outer="default", every=every, steps=(12,) * 4))[1].weights for every in (3, 13)]
    with_rounds, without = (weights[1][-1] for weights in results)
    assert all(abs(one - two).max() > 1e-3 for one, two in zip(with_rounds, without, strict=True))


def test_step_reports_the_round_its_age_and_its_norms() -> None:
    plan = Plan(outer="default", every=4, fragments=2, overlap_steps=3, steps=(16,) * 4)
    _, record = run(plan)
    check(plan, record, within)
    infos = [(step, info) for step, info in enumerate(record.infos[2]) if info]
    assert [(step, info.round, info.fragment, info.staleness_steps) for step, info in infos[:4]] == [
        (4, 1, 0, 3),
        (6, 2, 1, 3),
        (8, 3, 0, 3),
        (10, 4, 1, 3),
    ]
    for _, info in infos:
        assert info.donors == (0, 1, 2, 3) and info.weights == (0.25,) * 4
        assert info.outer_norm is not None and info.outer_norm > 0
        assert info.cosine is not None and -1.0 <= info.cosine <= 1.0
        assert info.wire_nbytes > 0
    assert all(record.infos[0][step].outer_norm == info.outer_norm for step, info in infos)


# -- faults -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("block", seeds(12))
def test_each_rank_equals_the_oracle_whatever_is_lost(block: int) -> None:
    for seed in range(block * 10, block * 10 + 10):
        try:
            seen_in(seed)
        except AssertionError as error:
            raise AssertionError(f"seed {seed}: {error}") from error


@pytest.mark.long
@pytest.mark.slow
def test_the_drawn_runs_have_losses_and_rounds_in_all_forms() -> None:
    """Rounds are decided again after losses, with and without the contribution of the lost rank."""
    without = with_lost = fired = 0
    for seed in range(60):
        report, plan, oracle = seen_in(seed)
        fired += sum(map(bool, report.faults_fired))
        for donors in oracle.donors.values():
            without += len(donors) < plan.ranks
            with_lost += bool(plan.killed & set(donors))
    assert fired > 60 and without > 60 and with_lost > 20


@pytest.mark.parametrize("lost", in_ci(range(4), 0, 2))
@pytest.mark.parametrize("at_s", [0.03, 0.041, 0.0485, 0.0486, 0.0488, 0.05, 0.064, 0.07])
def test_a_loss_around_a_round_leaves_equal_weights(lost: int, at_s: float) -> None:
    plan = Plan(every=3, steps=(12,) * 4, faults=(Kill(lost, at_s=at_s),))
    report, record = run(plan)
    check(plan, record, within)
    assert report.faults_fired == (1,)


def test_all_but_one_rank_are_lost() -> None:
    plan = Plan(
        every=3, steps=(30,) * 4, fragments=3, faults=tuple(Kill(rank, at_s=0.1 + rank / 50) for rank in range(3))
    )
    report, record = run(plan)
    check(plan, record, within)
    assert record.applied[3][-1].donors == (3,) and report.faults_fired == (1, 1, 1)


def test_stalls_and_slow_links_change_no_weight() -> None:
    plan = Plan(every=4, fragments=2, overlap_steps=1, mixing=0.5)
    faults = (Stall(1, 0.03, 2.0), SlowRank(2, 0.05, 50.0), SlowLink(0, 3, 0.02, 100.0))
    slow = dataclasses.replace(plan, faults=faults, network=Network(ranks_per_host=2))
    (_, one), (report, two) = run(plan), run(slow)
    check(slow, two, within)
    for rank in range(4):
        for mine, theirs in zip(one.weights[rank], two.weights[rank], strict=True):
            assert all((a == b).all() for a, b in zip(mine, theirs, strict=True))
    assert all(report.faults_fired)


@pytest.mark.parametrize("steps", [(12, 7, 12, 12), (3, 12, 12, 9), (12, 5, 6, 7), (1, 12, 2, 12)])
@pytest.mark.parametrize("rule", in_ci(["plain", "streaming", "fragments"], "plain", "streaming"))
def test_ranks_may_end_after_different_numbers_of_steps(steps: tuple[int, ...], rule: str) -> None:
    plan = Plan(steps=steps, **{"every": 3, **RULES[rule]})
    check(plan, run(plan)[1], within)


# -- a rank alone, equal forms, and other averages --------------------------------------------------------------------


def test_one_rank_alone_is_lookahead() -> None:
    plan = Plan(ranks=1, outer="dyadic", steps=(12,), every=4, fragments=2)
    check(plan, run(plan)[1], exactly)


def test_streaming_without_overlap_in_one_fragment_is_diloco() -> None:
    plan = Plan(outer="default", steps=(20,) * 4, overlap_steps=0, mixing=0.0, fragments=1, every=5)
    _, record = run(plan)
    check(plan, record, within)
    assert [info.round for info in record.infos[0] if info] == [1, 2, 3, 4]
    synced = [record.weights[rank][-1] for rank in range(4)]
    assert all((a == b).all() for own in synced for a, b in zip(own, synced[0], strict=True))


class Halved(nn.Module):
    """A bfloat16 and a float16 layer, BatchNorm, tied weights, integers, bools, a complex and an empty entry."""

    def __init__(self, value: float) -> None:
        super().__init__()
        self.mixed = Mixed(value)
        self.brain = nn.Linear(3, 3, dtype=torch.bfloat16)
        self.half = nn.Linear(3, 3, dtype=torch.float16)
        self.turn = nn.Parameter(torch.full((3,), complex(value, -value)))


async def trained(world: ad.World, policy: Any, model: nn.Module, steps: int) -> list[StepInfo]:
    generator = torch.Generator().manual_seed(world.rank)
    infos = []
    async with policy:
        for step in range(steps):
            with torch.no_grad():
                for tensor in model.state_dict().values():
                    if tensor.is_floating_point() or tensor.is_complex():
                        tensor.add_(torch.randn(tensor.shape, generator=generator).to(tensor.dtype))
                    elif tensor.dtype != torch.bool:
                        tensor.add_(world.rank + step)
                    else:
                        tensor.fill_(world.rank % 2 == 0)
            infos.append(await policy.step())
    return infos


@pytest.mark.parametrize("ranks", [2, 3])
def test_local_sgd_equals_the_average_of_all_bit_for_bit(ranks: int) -> None:
    async def main(world: ad.World, kind: Any, options: dict[str, Any]) -> Any:
        torch.manual_seed(1)
        model = Halved(1.0)
        await trained(world, kind(model, sgd(model), average_every=2, **options), model, 6)
        return clone_state(model)

    ours = ad.simulate(main, DiLoCoPolicy, {"outer_optimizer": None}, ranks=ranks, strict=True).results
    right = ad.simulate(main, AverageAllPolicy, {}, ranks=ranks, strict=True).results
    for one, two in zip(ours, right, strict=True):
        assert equal_states(one, two), [name for name in one if not torch.equal(one[name], two[name])]


def test_outer_step_moves_parameters_and_averages_buffers() -> None:
    """With lr 0.5 and D = -1.5, the parameters move by half the mean; buffers are averaged; integers are rank 0's."""

    async def main(world: ad.World) -> Any:
        model = Mixed(1.0)
        outer = functools.partial(torch.optim.SGD, lr=0.5)
        async with DiLoCoPolicy(model, sgd(model), average_every=1, outer_optimizer=outer) as policy:
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.add_(float(world.rank))
                model.norm.running_mean.add_(float(world.rank))
                model.counts.add_(world.rank + 3)
            await policy.step()
        return clone_state(model)

    for state in ad.simulate(main, ranks=4, strict=True).results:
        assert set(state["embed.weight"].flatten().tolist()) == {1.75}, "tied weights must be changed only once"
        assert set(state["wide.bias"].tolist()) == {1.75}
        assert set(state["norm.running_mean"].tolist()) == {2.5}
        assert set(state["counts"].tolist()) == {4}


# -- codecs ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("share", [0.02, 0.4])
def test_top_k_with_error_feedback_loses_no_change(share: float) -> None:
    """The anchor and the mean of the residuals contain all changes of all ranks, since the mean is exact.

    Regression: the mean was encoded like a contribution, which dropped most of its values.
    """
    wire, outer = TopK(share=share, block=64), functools.partial(torch.optim.SGD, lr=1.0)

    async def main(world: ad.World) -> tuple[torch.Tensor, torch.Tensor, StepInfo]:
        model = nn.Linear(30, 30, bias=False)
        torch.nn.init.zeros_(model.weight)
        generator, changed, info = torch.Generator().manual_seed(world.rank), torch.zeros(900), StepInfo()
        async with DiLoCoPolicy(
            model, sgd(model), average_every=2, outer_optimizer=outer, wire=wire, error_feedback=1.0
        ) as policy:
            for _ in range(24):
                change = torch.randn(30, 30, generator=generator)
                with torch.no_grad():
                    model.weight += change
                changed += change.flatten()
                info = await policy.step()
            (fragment,) = policy.state_dict()["fragments"]
        (anchor,), (residual,) = fragment["anchors"], fragment["residuals"]
        assert torch.equal(anchor, model.weight.detach().flatten())
        return anchor, changed + residual, info

    results = ad.simulate(main, ranks=4, seed=1, strict=True).results
    right = torch.stack([sent for _, sent, _ in results]).mean(0)
    for anchor, _, info in results:
        torch.testing.assert_close(anchor, right, rtol=0, atol=1e-4)
        assert info.wire_nbytes < info.nbytes <= min(4 * info.wire_nbytes, info.unencoded_nbytes)


# -- steps that are cancelled -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("options", [{}, {"fragments": 2}, {"fragments": 4, "overlap_steps": 2}, {"warmup_steps": 9}])
@pytest.mark.parametrize("timeout_s", in_ci([0.0, 1e-5, 0.004], 0.0, 0.004))
def test_a_cancelled_step_captures_its_fragment_later(timeout_s: float, options: dict[str, Any]) -> None:
    """Regression: with fragments, a cancelled step left out a round that the others awaited, forever."""
    record = Record()

    async def main(world: ad.World) -> int:
        model = Mixed(1.0)
        count = 0
        async with DiLoCoPolicy(
            model,
            sgd(model),
            average_every=4,
            on_event=functools.partial(record.see, world.rank),
            outer_optimizer=HALF,
            **{"fragment_pattern": "balanced", **options},
        ) as policy:
            for step in range(24):
                with torch.no_grad():
                    for parameter in model.parameters():
                        parameter.add_(world.rank + step)
                await asyncio.sleep(0.01 if world.rank else 0.001)
                try:
                    if world.rank == 0 and step % 3:
                        await asyncio.wait_for(policy.step(), timeout_s)
                    else:
                        await policy.step()
                except TimeoutError:
                    count += 1
        return count

    cancelled = ad.simulate(main, ranks=3, until_s=100.0).results
    assert cancelled[0] > 0 or timeout_s > 1e-3
    assert cancelled[1:] == (0, 0)
    record.donors(set())
    assert len(record.applied[1]) >= 5


# -- how jobs end -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("at_s", [0.033, 0.0605, 0.075])
@pytest.mark.parametrize("options", [{}, {"fragments": 3, "overlap_steps": 2}])
def test_ctrl_c_on_one_rank_ends_all_without_a_hang(at_s: float, options: dict[str, Any]) -> None:
    plan, record = Plan(steps=(40,) * 3, ranks=3, **{"every": 3, **options}), Record()
    faults = [Interrupt(1, at_s=at_s, signal="SIGINT")]
    results = ad.simulate(train, plan, record, ranks=3, faults=faults, until_s=50.0).results
    assert isinstance(results[1], KeyboardInterrupt)
    assert all(isinstance(results[rank], ad.RankLostError) for rank in (0, 2)), results


def test_the_last_round_in_flight_is_not_applied_after_the_end() -> None:
    """Ranks that leave with a round in flight wait for each other, so that no rank loses another's data."""
    plan = Plan(steps=(6,) * 3, ranks=3, every=6, overlap_steps=5)
    _, record = run(plan)
    check(plan, record, within)
    assert not any(record.applied.values())


def test_a_rank_waits_a_limited_time_at_its_end() -> None:
    """``drain_timeout_s`` limits the wait of a rank that has left for a rank that is too slow to take its data."""

    async def main(world: ad.World) -> tuple[float, tuple[int, ...]]:
        model = Mixed(1.0)
        options: dict[str, Any] = {"average_every": 2, "overlap_steps": 1, "drain_timeout_s": 2.0}
        donors: tuple[int, ...] = ()
        async with DiLoCoPolicy(model, sgd(model), **options) as policy:
            await policy.step()
            if world.rank == 1:
                await asyncio.sleep(30.0)
            await policy.step()
            if world.rank == 1:
                donors = (await policy.step()).donors
            began_at = world.time()
        return world.time() - began_at, donors

    (waited_s, _), (_, donors) = ad.simulate(main, ranks=2, until_s=1000.0).results
    assert waited_s == pytest.approx(2.0, abs=0.1) and donors == (1,)
