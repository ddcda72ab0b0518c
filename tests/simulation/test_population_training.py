"""Tests population based training in the simulator: exact copies of one snapshot, and its results."""

from __future__ import annotations

import asyncio
import json
import logging
from collections import Counter
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from support.facts import naming
from support.seeds import seeds
from torch import nn
from torch.optim import lr_scheduler

import asyncdist as ad
from asyncdist.recording.reader import read_recording
from asyncdist.report.figures import hyperparameter_sections
from asyncdist.report.sql import query
from asyncdist.report.summary import summarise
from asyncdist.simulation import Kill, Restart, simulate
from protocols import BayesianExplore, PopulationTrainingPolicy
from simulation.population_training_scenarios import Plan, draw_apart, draw_plan, run, scenario


@pytest.mark.parametrize("seed", seeds(60))
def test_each_copy_is_of_one_snapshot(seed: int) -> None:
    scenario(seed)


@pytest.mark.long
def test_the_seeds_contain_what_can_go_wrong() -> None:
    seen: Counter[str] = Counter()
    for seed in range(12):
        seen += run(draw_plan(seed), seed)[1].seen
    assert seen["copies"] > 50 and seen["abandoned"] and seen["drawn again"] > 20, seen


@pytest.mark.filterwarnings("ignore:Detected call of `lr_scheduler.step")
@pytest.mark.filterwarnings("ignore:The epoch parameter in `scheduler.step")
@pytest.mark.parametrize("kind", ["cosine", "sequence"])
def test_a_restarted_ranks_schedule_can_catch_up(kind: str) -> None:
    """The donor's learning rate, which belongs to its own position, must not become the start of another schedule."""
    rates: list[tuple[float, float]] = []

    def schedule(optimizer: torch.optim.Optimizer) -> lr_scheduler.LRScheduler:
        if kind == "cosine":
            return lr_scheduler.CosineAnnealingLR(optimizer, 60)
        parts: list[Any] = [lr_scheduler.LinearLR(optimizer, 0.25, 1.0, 4), lr_scheduler.ExponentialLR(optimizer, 0.9)]
        return lr_scheduler.SequentialLR(optimizer, parts, [4])

    async def main(world: ad.World) -> None:
        model = nn.Linear(1, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
        values: Any = {"lr": (1e-3, 1e-1)}
        scheduler = schedule(optimizer)
        policy = PopulationTrainingPolicy(
            model, optimizer, average_every=2, hyperparameters=values, lr_scheduler=scheduler
        )
        async with policy:
            for _ in range(policy.iteration):
                scheduler.step()
            while policy.iteration < 30:
                await policy.step(loss=float(world.rank))
                scheduler.step()
                await asyncio.sleep(0.1)
        if world.incarnation:
            same = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=policy.hyperparameters["lr"])
            other = schedule(same)
            for _ in range(30):
                other.step()
            rates.append((optimizer.param_groups[0]["lr"], same.param_groups[0]["lr"]))

    simulate(main, ranks=4, seed=1, faults=[Kill(1, 1.0), Restart(1, 1.2)])
    assert len(rates) == 1 and rates[0][0] == pytest.approx(rates[0][1])


def test_other_parameters_of_the_optimizer_are_refused() -> None:
    async def main(world: ad.World) -> None:
        model = nn.Linear(1, 1, bias=False)
        model.other = nn.Parameter(torch.ones(1, 1))
        optimizer = torch.optim.Adam([model.other if world.rank else model.weight])
        policy = PopulationTrainingPolicy(model, optimizer, average_every=2, hyperparameters={"lr": (1e-3, 1e-1)})
        with pytest.raises(ad.DisagreementError, match="parameters with the names"):
            async with policy:
                pass

    simulate(main, ranks=2, strict=True)


@pytest.mark.parametrize("first", ["sgd", "adam"])
def test_moments_of_another_class_of_optimizer_are_refused(first: str) -> None:
    """Regression: ranks that changed their optimizers at different times copied moments of the other class.

    The optimizer's next step raised KeyError, or SGD kept the moments of Adam.
    """
    moments = {"sgd": "momentum_buffer", "adam": "exp_avg"}

    async def main(world: ad.World) -> list[str]:
        model = nn.Linear(2, 1)

        def optimizer_of(kind: str) -> torch.optim.Optimizer:
            if kind == "sgd":
                return torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
            return torch.optim.Adam(model.parameters(), lr=0.01)

        kind, refused = first, []
        values: Any = {"lr": (1e-3, 1e-1)}
        policy = PopulationTrainingPolicy(model, optimizer_of(kind), average_every=5, hyperparameters=values)
        async with policy:
            while policy.iteration < 120:
                if policy.iteration == (20 if world.rank < 2 else 80):
                    kind = "adam" if first == "sgd" else "sgd"
                    policy.optimizer = optimizer_of(kind)
                model(torch.ones(2)).sum().backward()
                policy.optimizer.step()
                await asyncio.sleep(0.01)
                info = await policy.step(score=float(world.rank if policy.iteration % 20 < 10 else -world.rank))
                refused += [info.abandoned] if info.abandoned else []
                for state in policy.optimizer.state.values():
                    assert state.keys() & set(moments.values()) <= {moments[kind]}
        return refused

    refused = [reason for reasons in simulate(main, ranks=4, seed=1).results for reason in reasons]
    assert sum("class SGD" in reason for reason in refused) > 1
    assert sum("class Adam" in reason for reason in refused) > 1


@pytest.mark.parametrize("seed", seeds(8))
def test_sub_populations_keep_the_ledger_with_faults(seed: int) -> None:
    run(draw_apart(seed), seed)


@pytest.mark.slow
def test_sub_populations_exchange_migrants() -> None:
    """Hyperparameters move with a migrant only to the sub-population that evolves more often."""
    _, record = run(Plan(ranks=8, steps=(80,) * 8, options={"average_every": 2, "periods": (1, 3)}), 1)
    assert record.seen["copies"] > 20 and record.seen["perturbed"] > 5
    assert record.seen["migrants with hyperparameters"] > 3 and record.seen["migrants without"] > 1


@pytest.mark.parametrize(("ranks", "periods"), [(6, (1, 2)), (7, (1, 2)), (8, (1, 2, 3))])
def test_sub_populations_of_other_sizes_are_refused(ranks: int, periods: tuple[int, ...]) -> None:
    async def main(world: ad.World) -> None:
        model = nn.Linear(1, 1)
        policy = PopulationTrainingPolicy(
            model,
            torch.optim.SGD(model.parameters()),
            average_every=2,
            hyperparameters={"lr": (1e-3, 1e-1)},
            periods=periods,
        )
        with pytest.raises(ValueError, match=naming("periods", periods, 4, ranks)):
            await policy.__aenter__()

    simulate(main, ranks=ranks, strict=True)


def test_a_quantile_without_room_for_migrants_is_refused() -> None:
    async def main(world: ad.World) -> None:
        model = nn.Linear(1, 1)
        optimizer = torch.optim.SGD(model.parameters())
        policy = PopulationTrainingPolicy(
            model, optimizer, average_every=2, hyperparameters={"lr": (1e-3, 1e-1)}, periods=(1, 2), quantile=0.5
        )
        with pytest.raises(ValueError, match=naming("quantile", 0.5, 4)):
            await policy.__aenter__()

    simulate(main, ranks=8, strict=True)


def test_histories_follow_the_weights() -> None:
    plan = Plan(steps=(40,) * 4, options={"average_every": 2})
    _, record = run(plan)
    assert record.seen["copies"] > 5
    for history in record.histories.values():
        assert (history[0].round, history[0].donor) == (0, -1)
        for before, entry in pairwise(history):
            assert entry.donor == before.rank, "a copied history must end on the donor"
            assert entry.round > before.round


@pytest.mark.slow
def test_recordings_and_reports_have_the_hyperparameters(tmp_path: Path) -> None:
    infos: list[tuple[int, Any]] = []

    async def main(world: ad.World) -> None:
        model = nn.Linear(1, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
        values: Any = {"lr": (1e-3, 1e-1)}
        policy = PopulationTrainingPolicy(
            model, optimizer, average_every=2, hyperparameters=values, custom_hyperparameters={"kind": ["a", "b"]}
        )
        async with policy:
            infos.append((world.rank, None))
            for _ in range(80):
                info = await policy.step(score=float(world.rank))
                infos.extend([(world.rank, info)] if info else [])

    simulate(main, ranks=4, seed=1, record=tmp_path)
    recording = read_recording(tmp_path)
    _, rows = query(recording, "SELECT rank, round, donor, inherited, chosen FROM hyperparameters ORDER BY rank, round")
    found = [(rank, *row[:2], json.loads(row[2]), json.loads(row[3])) for rank, *row in rows if row[1] >= 0]
    copies = [each for each in infos if each[1]]
    assert len(copies) > 5
    told = [(rank, each.round, *each.donors, each.inherited, each.hyperparameters) for rank, each in copies]
    assert found == sorted(told, key=lambda each: each[:2])
    sections = {title: figure for title, _, figure in hyperparameter_sections(summarise(recording))}
    assert list(sections) == ["Hyperparameter lr", "Hyperparameter kind"]
    assert len(sections["Hyperparameter lr"].data) == 4


@pytest.mark.long
def test_bayesian_exploration_learns_from_the_copied_ranks() -> None:
    explore = BayesianExplore(candidate_count=50)
    _, record = run(Plan(steps=(60,) * 4, options={"average_every": 2, "explore": explore}))
    assert record.seen["copies"] > 10 and record.seen["drawn again"] > record.seen["perturbed"]


async def toy(world: ad.World, explore: bool) -> float:
    """Climb Q with gradients of a surrogate, whose weights h are the hyperparameters (figure 2 of 1711.09846)."""
    model = nn.Linear(2, 1, bias=False)
    with torch.no_grad():
        model.weight.fill_(0.9)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)

    def score() -> float:
        return 1.2 - float(model.weight.detach().square().sum())

    first = world.rank % 2
    policy = PopulationTrainingPolicy(
        model,
        optimizer,
        average_every=4 if explore else 1000,
        custom_hyperparameters={"h0": (0.0, 1.0), "h1": (0.0, 1.0)},
        initial={"h0": 1.0 - first, "h1": float(first)},
    )
    async with policy:
        for _ in range(200):
            h = torch.tensor([[policy.hyperparameters["h0"], policy.hyperparameters["h1"]]])
            model.weight.grad = 2 * h * model.weight.detach()
            optimizer.step()
            await policy.step(score=score())
    return score()


@pytest.mark.parametrize("seed", seeds(8))
def test_the_toy_reaches_what_no_fixed_setting_can(seed: int) -> None:
    assert max(simulate(toy, True, ranks=4, seed=seed).results) >= 1.19
    assert max(simulate(toy, False, ranks=4, seed=seed).results) < 0.4


def test_a_quantile_of_zero_leaves_the_ranks_independent() -> None:
    async def main(world: ad.World) -> tuple[Any, Any]:
        model = nn.Linear(1, 1)
        policy = PopulationTrainingPolicy(
            model,
            torch.optim.SGD(model.parameters()),
            average_every=2,
            hyperparameters={"lr": (1e-3, 1e-1)},
            quantile=0,
        )
        async with policy:
            first = dict(policy.hyperparameters)
            assert not any([await policy.step(score=float(world.rank)) for _ in range(20)])
        return first, dict(policy.hyperparameters)

    found = simulate(main, ranks=3, seed=1, strict=True).results
    assert all(first == last for first, last in found) and len({str(each) for each in found}) == 3


async def trained(world: ad.World, folder: Path, first: int, last: int) -> Any:
    """Train from iteration ``first`` to ``last``; load and save the population in between."""
    torch.manual_seed(0)
    model = nn.Linear(4, 1)
    optimizer = torch.optim.AdamW(model.parameters())
    policy = PopulationTrainingPolicy(model, optimizer, average_every=5, hyperparameters={"lr": (1e-3, 1e-1)})
    if first:
        await ad.load_population(folder, model, optimizer, policy=policy)
    async with policy:
        for step in range(first, last):
            x = torch.randn(8, 4, generator=torch.Generator().manual_seed(100 * step + world.rank))
            optimizer.zero_grad()
            loss = (model(x) - x[:, :1]).square().mean()
            loss.backward()
            optimizer.step()
            await asyncio.sleep(0.01)
            await policy.step(loss=loss.item())
        if last == 22:
            await ad.save_population(folder, model, optimizer, policy=policy)
    lineage = [(each.iteration, each.rank, each.donor, dict(each.hyperparameters)) for each in policy.lineage()]
    rate = optimizer.param_groups[0]["lr"]
    return [tensor.tolist() for tensor in model.state_dict().values()], rate, dict(policy.hyperparameters), lineage


@pytest.mark.slow
def test_a_saved_population_keeps_its_hyperparameters(tmp_path: Path) -> None:
    half = simulate(trained, tmp_path, 0, 22, ranks=4, seed=1).results
    resumed = simulate(trained, tmp_path, 22, 23, ranks=4, seed=2).results
    for before, after in zip(half, resumed, strict=True):
        assert before[1:] == after[1:] and before[2]["lr"] == before[1]
        assert before[0] != after[0], "the training must change the weights"
    assert any(len(each[3]) > 1 for each in half), "some hyperparameters must have been copied"


def test_ranks_that_train_alone_draw_their_values_too() -> None:
    async def main(world: ad.World) -> tuple[float, float]:
        model = nn.Linear(1, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
        policy = PopulationTrainingPolicy(model, optimizer, average_every=1, hyperparameters={"lr": (1e-3, 1e-1)})
        async with policy:
            assert not await policy.step(loss=1.0)
        return policy.hyperparameters["lr"], optimizer.param_groups[0]["lr"]

    ((value, written),) = simulate(main, ranks=1).results
    assert value == written != 0.5 and 1e-3 <= value <= 1e-1


def test_a_training_loss_as_metric_is_warned_of_once(caplog: pytest.LogCaptureFixture) -> None:
    async def main(world: ad.World) -> None:
        model = nn.Linear(1, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
        policy = PopulationTrainingPolicy(model, optimizer, average_every=1, hyperparameters={"lr": (1e-3, 1e-1)})
        async with policy:
            for _ in range(3):
                await policy.step(loss=model(torch.ones(1)).square().sum())
            await policy.step(loss=lambda: 1.0)

    with caplog.at_level(logging.WARNING, "protocols.population_training"):
        simulate(main, ranks=2)
    assert len([each for each in caplog.records if "training loss" in each.getMessage()]) == 2, (
        "each rank must warn once"
    )


def test_ranks_with_other_ranges_or_optimizers_are_refused() -> None:
    async def main(world: ad.World, kinds: Any, ranges: Any) -> str:
        model = nn.Linear(1, 1)
        optimizer = kinds[world.rank](model.parameters(), lr=0.1)
        policy = PopulationTrainingPolicy(model, optimizer, average_every=1, hyperparameters={"lr": ranges[world.rank]})
        with pytest.raises(ad.DisagreementError) as caught:
            async with policy:
                pass
        return str(caught.value)

    sgd, adam = torch.optim.SGD, torch.optim.Adam
    for kinds, ranges, name in (
        ((sgd, adam), ((0.1, 1.0),) * 2, "optimizer"),
        ((sgd, sgd), ((0.1, 1.0), (0.1, 2.0)), "hyperparameters"),
    ):
        assert all(name in text for text in simulate(main, kinds, ranges, ranks=2).results)
