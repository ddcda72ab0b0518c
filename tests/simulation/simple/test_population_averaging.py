"""Tests PAPA, PAPA-2 and EASGD against their formulas, and their laws."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np
import pytest
import torch
from simulation.simple_scenarios import Array, Plan, check, mean_of, run
from support.seeds import in_ci
from torch import nn
from unit.test_simple_rules import GOLDEN, MASK, split_mix

import asyncdist as ad
from asyncdist.simulation import Kill, Restart, simulate
from protocols import AsyncPopulationAveragingPolicy, PopulationAveragingPolicy
from protocols.simple.population_averaging import PullToMean

#: Options of the simulated runs; the first are for exact runs.
OPTIONS: list[dict[str, Any]] = [
    {"average_every": 2, "pull": 0.25},
    {"pull": 1},
    {"average_every": 3, "pull": 0.01},
    {"average_every": 2, "pull": 0.5, "mean_of": "pairs"},
    {"average_every": 3, "pull": 1, "mean_of": "pairs", "seed": 5},
    {"average_every": 2, "pull": 0.125, "center": True},
]
PAIRS: Final[dict[str, Any]] = {"average_every": 1, "pull": 0.5, "mean_of": "pairs", "seed": 2}
CENTER: Final[dict[str, Any]] = {"average_every": 1, "pull": 0.2, "center": True}


def HAS_PARTNERS(options: Mapping[str, Any]) -> bool:  # noqa: N802
    return options.get("mean_of") == "pairs"


def formula(
    options: Mapping[str, Any], donors: Sequence[Array], own: Array, number: int, memory: dict[int, Array]
) -> Array:
    """Return own + pull * (mean - own), or own + pull * (center - own) and move the center.

    Args:
        memory: The center after each round, by the round's number; at 0 the first center.
    """
    pull = options.get("pull", 0.01)
    target = mean_of(donors)
    if options.get("center"):
        last = max(each for each in memory if each < number)
        old = memory[last]
        memory[number] = old + own.dtype.type(pull * len(donors)) * (target - old)
        target = old
    return target if pull == 1 else own + pull * (target - own)


def test_a_pull_moves_towards_the_mean() -> None:
    own, mean = torch.tensor([1.0, -2.0]), torch.tensor([2.0, 2.0])
    assert PullToMean(pull=0.25).apply(own, mean, 1).tolist() == [1.25, -1.0]
    assert PullToMean(pull=1.0).apply(own, mean, 1).tolist() == [2.0, 2.0]
    assert own.tolist() == [1.0, -2.0] and mean.tolist() == [2.0, 2.0]


def test_a_pull_keeps_the_mean_of_the_ranks() -> None:
    """The mean is exact, because all values are dyadic."""
    states = torch.arange(32.0, dtype=torch.float64).view(4, 8) ** 2
    pulled = [PullToMean(pull=0.5).apply(own, states.mean(0), 1) for own in states]
    assert torch.equal(torch.stack(pulled).mean(0), states.mean(0))


def test_runs_with_any_pull_have_the_same_mean() -> None:
    steps = (12,) * 4
    kept = [each for each in OPTIONS if "center" not in each]
    runs = [run(Plan(policy="PopulationAveragingPolicy", options=each, steps=steps))[1].weights for each in kept]
    first, *others = ([mean_of([weights[rank][-1][0] for rank in range(4)])] for weights in runs)
    for mean in others:
        np.testing.assert_allclose(mean, first, rtol=0, atol=1e-12)


@pytest.mark.parametrize("pull", [0.0, 1.5, -0.5, float("nan"), "1"])
def test_a_pull_out_of_range_is_refused(pull: Any) -> None:
    with pytest.raises(ValueError, match=r"^pull must be a number above 0 and at most 1, got"):
        PullToMean(pull=pull)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("options", "dtype"),
    in_ci(
        itertools.product([PAIRS, CENTER], [torch.float64, torch.float32]),
        *((PAIRS, torch.float32), (CENTER, torch.float64)),
    ),
    ids=["pairs-float64", "pairs-float32", "center-float64", "center-float32"],
)
def test_fifty_rounds_of_pairs_and_of_a_center_are_exact(options: dict[str, Any], dtype: torch.dtype) -> None:
    plan = Plan(policy="PopulationAveragingPolicy", options=options, dtype=dtype, steps=(50,) * 4)
    assert check(plan, run(plan)[1], 0.0) == 50


def pair_of(seed: int, number: int, rank: int, members: Sequence[int]) -> tuple[int, ...]:
    """Return a rank's pair: the members in the order of random numbers, in pairs."""
    state = split_mix((seed * GOLDEN + number) & MASK)
    keys = [split_mix((state + GOLDEN * (place + 1)) & MASK) & (MASK >> 1) for place in range(len(members))]
    order = [members[place] for place in sorted(range(len(members)), key=keys.__getitem__)]
    first = order.index(rank) // 2 * 2
    return tuple(sorted(order[first : first + 2]))


@pytest.mark.slow
@pytest.mark.parametrize("ranks", in_ci([4, 5], 5))
def test_pairs_are_drawn_from_the_seed_and_the_round(ranks: int) -> None:
    plan = Plan(policy="PopulationAveragingPolicy", options=PAIRS, ranks=ranks, steps=(30,) * ranks)
    _, record = run(plan)
    for rank, events in record.applied.items():
        assert len(events) == 30
        for event in events:
            assert event.donors == pair_of(PAIRS["seed"], event.round, rank, range(ranks))
    assert len({event.donors for event in record.applied[0]}) > 2
    assert check(plan, record, 0.0) == 30


def test_a_pull_falls_with_the_learning_rate() -> None:
    async def main(world: ad.World) -> list[float]:
        model = nn.Linear(1, 1, bias=False, dtype=torch.float64)
        nn.init.constant_(model.weight, float(world.rank))
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
        found = []
        async with PopulationAveragingPolicy(model, optimizer, average_every=1, pull=0.5, scale_with_lr=True) as own:
            for _ in range(4):
                optimizer.step()
                schedule.step()
                await own.step()
                found.append(model.weight.item())
        return found

    results = simulate(main, ranks=3).results
    distance, wanted = 1.0, []
    for step in range(4):
        distance *= 1 - 0.5 * 0.5 ** (step + 1)
        wanted.append(distance)
    assert [[value - 1 for value in result] for result in results] == [
        [-each for each in wanted],
        [0.0] * 4,
        wanted,
    ]


def test_a_saved_first_rate_changes_no_pull_without_the_option() -> None:
    async def main(world: ad.World) -> float:
        model = nn.Linear(1, 1, bias=False, dtype=torch.float64)
        saving = PopulationAveragingPolicy(model, torch.optim.SGD(model.parameters(), lr=1.0), scale_with_lr=True)
        async with saving:
            pass
        nn.init.constant_(model.weight, float(world.rank))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        policy = PopulationAveragingPolicy(model, optimizer, average_every=1, pull=0.5)
        policy.load_state_dict(saving.state_dict())
        async with policy:
            await policy.step()
        return model.weight.item()

    assert simulate(main, ranks=3).results == (0.5, 1.0, 1.5)


def test_a_scale_needs_a_learning_rate_at_the_start() -> None:
    async def main(world: ad.World) -> None:
        model = nn.Linear(2, 2)
        policy = PopulationAveragingPolicy(model, torch.optim.SGD(model.parameters(), lr=0.0), scale_with_lr=True)
        with pytest.raises(ValueError, match=r"^the optimizer's lr must be above 0 at the start"):
            await policy.__aenter__()

    simulate(main, ranks=1)


@pytest.mark.slow
@pytest.mark.parametrize("option", ["center", "scale_with_lr"])
def test_a_saved_population_keeps_its_center_and_first_rate(option: str, tmp_path: Path) -> None:
    async def main(world: ad.World, first: int, last: int) -> Any:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Linear(6, 1))
        optimizer = torch.optim.Adam(model.parameters(), lr=0.05)
        own = PopulationAveragingPolicy(model, optimizer, average_every=2, pull=0.3, **{option: True})
        if first:
            await ad.load_population(tmp_path, model, optimizer, policy=own)
        async with own:
            for step in range(first, last):
                x = torch.randn(8, 4, generator=torch.Generator().manual_seed(100 * step + world.rank))
                optimizer.zero_grad()
                (model(x) - x[:, :1]).square().mean().backward()
                optimizer.step()
                optimizer.param_groups[0]["lr"] *= 0.9
                await own.step()
            if last == 9:
                await ad.save_population(tmp_path, model, optimizer, policy=own)
            centers = []
            if option == "center":
                async with own.anchor_weights():
                    centers = [each.tolist() for each in model.parameters()]
        return centers, [tensor.tolist() for tensor in model.state_dict().values()]

    straight = simulate(main, 0, 16, ranks=3, seed=1, strict=True).results
    simulate(main, 0, 9, ranks=3, seed=1, strict=True)
    assert simulate(main, 9, 16, ranks=3, seed=2, strict=True).results == straight
    assert straight[0][0] == straight[1][0] == straight[2][0], "the center must be equal on all ranks"


def test_a_diverged_rank_continues_from_the_center() -> None:
    async def main(world: ad.World) -> tuple[list[float], list[float], tuple[int, ...], bool]:
        model = nn.Linear(2, 1, bias=False, dtype=torch.float64)
        nn.init.constant_(model.weight, 1.0)
        async with PopulationAveragingPolicy(model, torch.optim.SGD(model.parameters()), **CENTER) as own:
            with torch.no_grad():
                model.weight.add_(float("nan") if world.rank == 1 else world.rank)
            info = await own.step()
            async with own.anchor_weights():
                center = model.weight.detach().flatten().tolist()
            return center, model.weight.detach().flatten().tolist(), info.donors, bool(info.recovered)

    results = simulate(main, ranks=3).results
    center = 1 + 0.2 * 2 * (2.0 - 1.0)  # the mean of ranks 0 and 2 is 2
    assert [result[0] for result in results] == [[center] * 2] * 3
    assert [result[1] for result in results] == [[1.0] * 2, [center] * 2, [3 - 0.2 * 2] * 2]
    assert [result[2:] for result in results] == [((0, 2), False), ((0, 2), True), ((0, 2), False)]


def test_a_restarted_rank_receives_the_center() -> None:
    async def main(world: ad.World) -> tuple[int, list[float]]:
        model = nn.Linear(2, 1, bias=False, dtype=torch.float64)
        nn.init.constant_(model.weight, 1.0)
        async with PopulationAveragingPolicy(model, torch.optim.SGD(model.parameters()), **CENTER) as own:
            begun_at = own.iteration
            while own.iteration < 40:
                with torch.no_grad():
                    model.weight.add_(world.rank / 8)
                await asyncio.sleep(0.01)
                await own.step()
            async with own.anchor_weights():
                return begun_at, model.weight.flatten().tolist()

    faults = [Kill(1, at_s=0.1), Restart(1, at_s=0.15)]
    results = simulate(main, ranks=3, faults=faults, until_s=100.0).results
    assert 5 < results[1][0] < 40, "the newcomer must begin in the middle of the training"
    assert results[0][1] == results[1][1] == results[2][1] != [1.0, 1.0]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"center": True, "mean_of": "pairs"}, r"^mean_of must be 'all' with center=True, which is pulled"),
        ({"center": True, "scale_with_lr": True}, r"^scale_with_lr must be False with center=True"),
        ({"mean_of": "three"}, r"^mean_of must be one of 'all', 'pairs', got 'three'$"),
        ({"seed": -1}, r"^seed must be an integer >= 0, got -1$"),
    ],
)
def test_options_that_exclude_each_other_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        PullToMean(**options)


def test_a_center_refuses_a_pull_that_passes_the_mean() -> None:
    async def main(world: ad.World) -> None:
        model = nn.Linear(2, 2)
        policy = PopulationAveragingPolicy(model, torch.optim.SGD(model.parameters()), center=True, pull=0.5)
        with pytest.raises(ValueError, match=r"^pull must be at most 1 / 3 with center=True on 3 ranks, got 0.5$"):
            await policy.__aenter__()

    simulate(main, ranks=3)


def test_only_a_center_has_anchor_weights() -> None:
    async def main(world: ad.World) -> None:
        model = nn.Linear(2, 2)
        async with PopulationAveragingPolicy(model, torch.optim.SGD(model.parameters())) as own:
            with pytest.raises(ad.LocalProtocolError, match=r"^anchor_weights\(\) needs a center"):
                async with own.anchor_weights():
                    pass

    simulate(main, ranks=2)


@pytest.mark.parametrize("kind", [PopulationAveragingPolicy, AsyncPopulationAveragingPolicy])
@pytest.mark.parametrize(
    ("dtype", "pull", "warns"), [("bfloat16", 0.01, True), ("bfloat16", 0.5, False), ("float32", 0.01, False)]
)
def test_pulls_that_are_rounded_away_are_warned_of(
    kind: Any, dtype: str, pull: float, warns: bool, caplog: pytest.LogCaptureFixture
) -> None:
    async def main(world: ad.World) -> None:
        torch.manual_seed(0)
        model = nn.Linear(2, 1, dtype=getattr(torch, dtype))
        async with kind(model, torch.optim.SGD(model.parameters(), lr=0.1), pull=pull):
            pass

    simulate(main, ranks=2, strict=True)
    assert caplog.text.count("39 %") == warns
