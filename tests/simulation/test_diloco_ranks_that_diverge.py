"""Tests that a rank with NaNs does not affect the mean of DiLoCo's other ranks, and recovers after the next round."""

from __future__ import annotations

import asyncio
import math
from functools import partial
from typing import Any

import pytest
import torch
from scripts.population import Mixed, sgd
from support.facts import naming
from support.seeds import in_ci
from torch import nn

import asyncdist as ad
from protocols import AverageApplied, DiLoCoPolicy, PolicyEvent, StepInfo, TopK

SIZE, EVERY = 4, 4


async def train(world: ad.World, bad: int, options: dict[str, Any]) -> list[StepInfo]:
    """Train with AdamW for eight rounds; one rank's weights become NaN in the third step."""
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(SIZE, SIZE) for _ in range(4)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    torch.manual_seed(10 + world.rank)
    found = []
    async with DiLoCoPolicy(model, optimizer, average_every=EVERY, **options) as policy:
        for step in range(8 * EVERY):
            inputs = torch.randn(8, SIZE)
            loss = (model(inputs) - inputs).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            if (world.rank == bad or bad < 0) and step == 2:
                with torch.no_grad():
                    model[0].weight.fill_(math.nan)
            if info := await policy.step():
                found.append(info)
    if bad >= 0:
        assert all(parameter.isfinite().all() for parameter in model.parameters())
    return found


@pytest.mark.parametrize(
    "options",
    in_ci(
        [{}, {"outer_optimizer": None}, {"fragments": 4}, {"fragments": 2, "overlap_steps": 2, "mixing": 0.5}],
        *({"outer_optimizer": None}, {"fragments": 2, "overlap_steps": 2, "mixing": 0.5}),
    ),
    ids=lambda options: ",".join(options) or "default",
)
def test_a_rank_with_nans_trains_again_after_a_round(options: dict[str, Any]) -> None:
    """Regression: its Adam moments stayed NaN, and NaNs of other fragments spread, so it never contributed again."""
    for rank, infos in enumerate(ad.simulate(train, 1, options, ranks=3, seed=1, strict=True).results):
        # With an overlap, the rank is healed by the mean of an earlier capture, in a step in which it is due again.
        assert (0, 2) in [info.donors for info in infos]
        assert [info.donors for info in infos[-4:]] == [(0, 1, 2)] * 4
        assert [bool(info.recovered) for info in infos].count(True) == (rank == 1)


def test_a_round_without_finite_weights_returns_to_the_anchor() -> None:
    (infos, *_) = ad.simulate(train, -1, {}, ranks=2, seed=1, strict=True).results
    assert infos[0].donors == () and infos[0].recovered and str(infos[0]) == "round 1: no rank's weights were averaged"
    assert infos[-1].donors == (0, 1)


@pytest.mark.parametrize(
    "options", [{"wire": "int8", "error_feedback": 1.0}, {"wire": TopK(share=0.2), "error_feedback": 0.9}]
)
def test_the_cosine_is_unknown_if_other_vectors_are_sent(options: dict[str, Any]) -> None:
    """Regression: with error feedback, the reported cosine was 3.9."""
    for infos in ad.simulate(train, 7, options, ranks=3, seed=1, strict=True).results:
        assert {info.cosine for info in infos} == {None} and all(info.outer_norm for info in infos)


async def start(world: ad.World) -> None:
    model = nn.Linear(2, 2)
    nn.init.constant_(model.weight, float(world.rank))
    async with DiLoCoPolicy(model, torch.optim.SGD(model.parameters()), average_every=EVERY):
        pass


def test_different_first_weights_are_refused_with_a_remedy() -> None:
    with pytest.raises(ad.DisagreementError, match=naming("first weights", "torch.manual_seed(seed)")):
        ad.simulate(start, ranks=2, seed=1).value()


@pytest.mark.parametrize(
    "options",
    in_ci(
        [{}, {"outer_optimizer": None}, {"mixing": 0.5}, {"fragments": 2, "mixing": 0.5}],
        {},
        {"fragments": 2, "mixing": 0.5},
    ),
)
def test_a_rank_that_is_not_finite_contributes_nothing(options: dict[str, Any]) -> None:
    """Its weights, its optimizer's state and its own share are replaced, so that it contributes to later rounds."""

    async def main(world: ad.World) -> tuple[list[StepInfo], bool, bool]:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 4))
        optimizer = torch.optim.Adam(model.parameters(), 1e-3)
        infos = []
        async with DiLoCoPolicy(model, optimizer, average_every=4, **options) as policy:
            for step in range(24):
                x = torch.full((8, 4), math.nan) if (world.rank, step) == (1, 5) else torch.randn(8, 4)
                optimizer.zero_grad()
                model(x).square().mean().backward()
                optimizer.step()
                infos.append(await policy.step())
                has_nan = not all(tensor.isfinite().all() for tensor in model.state_dict().values())
                if world.rank != 1:
                    assert not has_nan
        return infos, has_nan, bool(optimizer.state)

    results = ad.simulate(main, ranks=3, strict=True).results
    assert not any(has_nan for _, has_nan, _ in results)
    infos = [info for info in results[1][0] if info]
    count = options.get("fragments", 1)
    assert all(info.donors == (0, 1, 2) for info in infos[:count])
    assert infos[count].donors == (0, 2) and infos[count].recovered
    assert infos[-1].donors == (0, 1, 2) and not infos[-1].recovered
    assert not any(info.recovered for info in results[0][0])


def test_a_buffer_that_is_not_finite_is_not_averaged() -> None:
    """Regression: only parameters were checked, so one rank's NaN statistics reached all ranks."""

    async def main(world: ad.World) -> list[float]:
        model = Mixed(1.0)
        async with DiLoCoPolicy(model, sgd(model), average_every=1) as policy:
            if world.rank == 1:
                model.norm.running_mean.fill_(math.nan)
            info = await policy.step()
            assert info.donors == (0, 2) and bool(info.recovered) == (world.rank == 1)
        return model.norm.running_mean.tolist()

    assert ad.simulate(main, ranks=3, strict=True).results == ([1.0] * 4,) * 3


@pytest.mark.parametrize("ranks", [1, 3])
def test_a_population_that_is_not_finite_returns_to_its_anchor(ranks: int) -> None:
    """Regression: a rank alone moved its anchor by uninitialised memory."""

    async def main(world: ad.World) -> tuple[Any, Any]:
        model = Mixed(1.0)
        async with DiLoCoPolicy(model, sgd(model), average_every=2) as policy:
            await policy.step()
            await policy.step()
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.fill_(math.inf)
            first = await policy.step()
            info = await policy.step()
        assert not first and info and info.donors == () and info.recovered
        return {each for parameter in model.parameters() for each in parameter.flatten().tolist()}, info.outer_norm

    assert ad.simulate(main, ranks=ranks, strict=True).results == (({1.0}, None),) * ranks


def test_infinities_of_masks_are_not_a_failure() -> None:
    async def main(world: ad.World) -> tuple[int, ...]:
        model = Mixed(1.0)
        model.register_buffer("mask", torch.tensor([0.0, -math.inf]))
        async with DiLoCoPolicy(model, sgd(model), average_every=1) as policy:
            info = await policy.step()
        assert model.mask.tolist() == [0.0, -math.inf] and not info.recovered
        return info.donors

    assert ad.simulate(main, ranks=2, strict=True).results == ((0, 1),) * 2


def test_a_return_to_the_anchor_is_no_progress_for_a_late_mean() -> None:
    """Regression: weights that had returned to the anchor lost the rank's contribution to the late mean."""

    async def main(world: ad.World) -> float:
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 2))
        outer, optimizer = partial(torch.optim.SGD, lr=1.0), torch.optim.SGD(model.parameters(), lr=0.1)
        policy = DiLoCoPolicy(model, optimizer, average_every=6, fragments=2, late="skip", outer_optimizer=outer)
        gap = -1.0
        async with policy:
            for step in range(30):
                if world.rank or step < 13:  # rank 0 no longer trains
                    with torch.no_grad():
                        model[1].weight.add_(1.0 + world.rank)
                if world.rank == 0 and step == 13:  # while both fragments are in flight
                    model[0].weight.data.fill_(math.nan)
                info = await policy.step()
                if info and info.fragment == 1 and world.rank == 0 and step > 13 and gap < 0:
                    (anchor,) = policy._fragments[1].anchors
                    gap = (anchor - torch.cat([model[1].weight.flatten(), model[1].bias])).abs().max().item()
                await asyncio.sleep(0.001 * (1 + 2 * world.rank))
        return gap

    assert ad.simulate(main, ranks=2, seed=3, strict=True).results[0] == 0.0


def test_a_round_without_donors_or_anchor_is_abandoned() -> None:
    """Regression: its result was true, and an event reported an average of no ranks, although no weight changed."""

    async def main(world: ad.World) -> list[StepInfo]:
        model, events, infos = nn.Linear(1, 1), list[PolicyEvent](), []
        options: dict[str, Any] = {"outer_optimizer": None, "on_event": events.append}
        async with DiLoCoPolicy(model, sgd(model), average_every=1, **options) as policy:
            for value in (math.nan, 1.0):
                with torch.no_grad():
                    for parameter in model.parameters():
                        parameter.fill_(value)
                infos.append(await policy.step())
        assert [event.round for event in events if isinstance(event, AverageApplied)] == [2]
        return infos

    for first, second in ad.simulate(main, ranks=2, strict=True).results:
        assert not first and first.round == 1 and first.donors == () and first.abandoned and first.nbytes == 0
        assert second and second.donors == (0, 1)
