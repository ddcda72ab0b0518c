"""Tests the evolution strategy against its formula in numpy, with lost and restarted ranks, and its laws."""

from __future__ import annotations

import math
import random
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support.facts import naming
from support.seeds import seeds
from torch import nn

import asyncdist as ad
from asyncdist.simulation import Fault, Kill, Restart, SlowRank, Stall, simulate
from protocols import EvolutionStrategyPolicy, StepInfo
from protocols.evolution.policy import EvolutionStrategyOptions, checksum_of_settings, coefficients
from protocols.simple.rule import drawn
from simulation.training_runs import draw_network

Array = np.ndarray[Any, Any]
RATE, SHAPES = 0.125, ((2, 3), (2,))


def made() -> tuple[nn.Module, torch.optim.Optimizer]:
    model = nn.Linear(3, 2, dtype=torch.float64)
    with torch.no_grad():
        for place, parameter in enumerate(model.parameters()):
            parameter.copy_(torch.arange(parameter.numel(), dtype=torch.float64).view(parameter.shape) / 8 + place)
    return model, torch.optim.SGD(model.parameters(), lr=RATE)


def loss_of(weights: Sequence[Array], rank: int) -> float:
    """Return a loss with a different minimum on each rank, added up in a fixed order."""
    flat = np.concatenate([each.reshape(-1) for each in weights])
    return float(sum((float(value) - rank / 4) ** 2 for value in flat.tolist()))


def flat_of(model: nn.Module) -> list[Array]:
    return [parameter.detach().numpy().copy() for parameter in model.parameters()]


def noise(seed: int, number: int, rank: int, pair: int, pairs: int) -> list[Array]:
    """Return a pair's perturbation; only the random numbers are torch's."""
    place = rank * pairs + pair
    generator = torch.Generator().manual_seed(int(drawn(seed, number, place + 1)[place]))
    return [torch.randn(shape, generator=generator, dtype=torch.float64).numpy() for shape in SHAPES]


def stepped(weights: list[Array], donors: Sequence[int], number: int, options: Mapping[str, Any]) -> list[Array]:
    """Return the weights after one step: theta - lr / (2 n sigma) * sum of (L+ - L-) eps."""
    pairs, sigma, seed = options["pairs"], options["sigma"], options.get("seed", 0)
    total = [np.zeros(shape) for shape in SHAPES]
    for rank in donors:
        for pair in range(pairs):
            eps = noise(seed, number, rank, pair, pairs)
            plus = loss_of([at + sigma * each for at, each in zip(weights, eps, strict=True)], rank)
            minus = loss_of([at - sigma * each for at, each in zip(weights, eps, strict=True)], rank)
            for place, each in enumerate(eps):
                total[place] += (plus - minus) / (2 * len(donors) * pairs * sigma) * each
    return [at - RATE * each for at, each in zip(weights, total, strict=True)]


async def train(world: ad.World, steps: int, options: Mapping[str, Any], seen: dict[int, list[Any]]) -> int:
    """Return the first iteration, or -1 if this rank was restarted after the others had left the policy."""
    model, optimizer = made()
    try:
        async with EvolutionStrategyPolicy(model, optimizer, **options) as policy:
            begun_at = policy.iteration
            while policy.iteration < steps:
                info = await policy.step(loss=lambda: loss_of(flat_of(model), world.rank))
                seen[policy.iteration].append((world.rank, info, flat_of(model), model))
    except (ad.LateError, ad.StartTimeoutError):
        assert world.incarnation
        return -1
    return begun_at


def check(seen: Mapping[int, list[tuple[int, StepInfo, list[Array], nn.Module]]], options: Mapping[str, Any]) -> None:
    """Compare the weights after each step with the formula, with the donors that the ranks have reported."""
    weights = flat_of(made()[0])
    for number in sorted(seen):
        donors = {info.donors for _, info, *_ in seen[number]}
        assert len(donors) == 1 and {info.round for _, info, *_ in seen[number]} == {number}
        weights = stepped(weights, donors.pop(), number, options)
        for rank, _, found, _ in seen[number]:
            for one, two in zip(found, weights, strict=True):
                np.testing.assert_allclose(one, two, rtol=0, atol=1e-9, err_msg=f"rank {rank}, step {number}")
        first = seen[number][0][2]
        assert all(map(np.array_equal, found, first) for _, _, found, _ in seen[number]), "the ranks differ"
        weights = first


@pytest.mark.parametrize("ranks", [1, 4])
def test_fifty_steps_equal_the_formula(ranks: int) -> None:
    options, seen = {"sigma": 0.25, "pairs": 2, "seed": 5}, defaultdict[int, list[Any]](list)
    simulate(train, 50, options, seen, ranks=ranks, strict=True)
    assert len(seen) == 50 and all(len(each) == ranks for each in seen.values())
    check(seen, options)


def drawn_faults(rng: random.Random, ranks: int) -> list[Fault]:
    faults: list[Fault] = []
    for rank in rng.sample(range(ranks), rng.randint(0, ranks - 1)):
        at_s = rng.uniform(0.0, 0.2)
        faults.append(Kill(rank, at_s=at_s))
        if rng.random() < 0.5:
            faults.append(Restart(rank, at_s=at_s + rng.uniform(0.01, 0.2)))
    for rank in range(ranks):
        if rng.random() < 0.2:
            faults.append(Stall(rank, at_s=rng.uniform(0.0, 0.2), duration_s=rng.uniform(0.01, 0.5)))
        elif rng.random() < 0.2:
            faults.append(SlowRank(rank, at_s=0.0, factor=rng.uniform(2.0, 20.0)))
    return faults


@pytest.mark.parametrize("seed", seeds(60))
def test_faults_change_nothing_but_the_donors(seed: int) -> None:
    rng = random.Random(f"evolution {seed}")
    ranks, options = rng.randint(2, 5), {"sigma": 0.25, "pairs": rng.randint(1, 3)}
    seen = defaultdict[int, list[Any]](list)
    network, faults = draw_network(rng), drawn_faults(rng, ranks)
    report = simulate(train, 12, options, seen, ranks=ranks, seed=seed, network=network, faults=faults, until_s=1e4)
    lost = {fault.rank for fault in faults if isinstance(fault, Kill)}
    assert all(report.results[rank] == 0 for rank in range(ranks) if rank not in lost)
    check(without_last_steps(seen, lost), options)


def test_a_member_begins_after_the_leader_was_restarted() -> None:
    """Regression: the new leader waited forever for this member, which had begun without the old leader."""
    test_faults_change_nothing_but_the_donors(634)


def without_last_steps(seen: Mapping[int, list[Any]], lost: set[int]) -> dict[int, list[Any]]:
    """Return the steps without those that killed processes made last, if the other ranks made them with other donors.

    If all processes that have made a step are killed, the others cannot know its donors, and choose again.
    """
    kept = {}
    for number, entries in seen.items():
        later = {id(entry[3]) for entry in seen.get(number + 1, [])}
        lasting = [entry for entry in entries if entry[0] not in lost or id(entry[3]) in later]
        kept[number] = lasting or entries
    return kept


def test_a_restarted_rank_counts_again() -> None:
    options, seen = {"sigma": 0.25, "pairs": 1}, defaultdict[int, list[Any]](list)
    faults = [Kill(1, at_s=0.02), Restart(1, at_s=0.03), SlowRank(0, at_s=0.0, factor=3.0)]
    report = simulate(train, 150, options, seen, ranks=3, faults=faults, until_s=1e4)
    assert report.results[0] == report.results[2] == 0 < report.results[1]
    assert {info.donors for each in seen.values() for _, info, *_ in each} == {(0, 1, 2), (0, 2)}
    check(seen, options)


@pytest.mark.parametrize("kind", ["none", "chained", "closed"])
@pytest.mark.filterwarnings("ignore:Detected call of .lr_scheduler.step:UserWarning")
def test_a_scheduler_that_begins_again_is_reported(kind: str, caplog: pytest.LogCaptureFixture) -> None:
    """Regression: a scheduler that began again on a restarted rank let its weights differ without a word.

    With the page's lines, the weights stay equal.
    """

    async def main(world: ad.World) -> list[float]:
        model, optimizer = made()
        scheduler: torch.optim.lr_scheduler.LRScheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.99)
        if kind == "closed":
            scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
        async with EvolutionStrategyPolicy(model, optimizer, sigma=0.25, pairs=1) as policy:
            if kind != "none" and world.incarnation:
                for group, rate in zip(optimizer.param_groups, scheduler.get_last_lr(), strict=True):
                    group["lr"] = rate
                for _ in range(policy.iteration):
                    scheduler.step()
            while policy.iteration < 200:
                await policy.step(loss=lambda: loss_of(flat_of(model), world.rank))
                scheduler.step()
        return torch.cat([each.detach().flatten() for each in model.parameters()]).tolist()

    faults = [Kill(1, at_s=0.01), Restart(1, at_s=0.015), SlowRank(0, at_s=0.0, factor=3.0)]
    report = simulate(main, ranks=3, faults=faults, until_s=1e4)
    assert (report.results[1] == report.results[0]) == (kind != "none")
    told = [each.getMessage() for each in caplog.records if "settings of this rank's optimizer" in each.getMessage()]
    assert len(told) == (kind == "none")
    assert kind != "none" or ("(learning rate 0.1" in told[0] and "of rank 0" in told[0])


def test_settings_are_compared_by_what_a_step_computes() -> None:
    """The order of the groups, the types of numbers, and how a step is computed do not matter."""
    one, two = nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(3))

    def made_of(*groups: dict[str, Any], **options: Any) -> int:
        return checksum_of_settings(torch.optim.SGD(list(groups), **options))

    first = made_of({"params": [one], "lr": 0.1}, {"params": [two], "lr": 1}, foreach=True)
    assert first == made_of({"params": [two], "lr": torch.tensor(1.0)}, {"params": [one], "lr": np.float64(0.1)})
    assert first != made_of({"params": [two], "lr": 1.0}, {"params": [one], "lr": 0.2})
    assert first != made_of({"params": [two], "lr": 1.0}, {"params": [one], "lr": 0.1}, nesterov=True, momentum=0.5)


def test_a_saved_run_continues_to_the_bit(tmp_path: Path) -> None:
    async def main(world: ad.World, first: int, last: int) -> list[list[float]]:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 1))
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
        inputs = torch.randn(16, 3)
        policy = EvolutionStrategyPolicy(model, optimizer, sigma=0.1, fitness="rank")
        if first:
            await ad.load_population(tmp_path, model, optimizer, policy=policy)
        async with policy:
            for _ in range(first, last):
                await policy.step(loss=lambda: (model(inputs) - world.rank).square().mean())
            if last == 5:
                await ad.save_population(tmp_path, model, optimizer, policy=policy)
        return [tensor.tolist() for tensor in model.state_dict().values()]

    straight, half, resumed = (
        simulate(main, *steps, ranks=3, seed=1, strict=True).results for steps in ((0, 12), (0, 5), (5, 12))
    )
    assert resumed == straight != half
    assert straight[0] == straight[1] == straight[2]


def test_an_evaluation_leaves_no_trace() -> None:
    """Weights, buffers, gradients and the training mode are as before, even if the evaluation fails."""

    async def main(world: ad.World) -> None:
        model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4))
        model.register_buffer("calls", torch.zeros(()), persistent=False)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
        given = [torch.full_like(each, 7.0) for each in model.parameters()]
        for parameter, gradient in zip(model.parameters(), given, strict=True):
            parameter.grad = gradient
        before = {name: tensor.clone() for name, tensor in model.state_dict().items()}

        def fail() -> float:
            model.get_buffer("calls").add_(1)
            model(torch.randn(8, 3))
            raise RuntimeError("no score")

        async with EvolutionStrategyPolicy(model, optimizer) as policy:
            with pytest.raises(RuntimeError, match="no score"):
                await policy.step(loss=fail)
            assert await policy.step(score=lambda: model(torch.randn(8, 3)).sum())
        assert all(torch.equal(before[name], tensor) for name, tensor in model.state_dict().items())
        assert model.get_buffer("calls") == 0
        assert all(each.grad is own for each, own in zip(model.parameters(), given, strict=True))

    simulate(main, ranks=1, strict=True)


def test_pairs_that_are_not_finite_do_not_count() -> None:
    options = EvolutionStrategyOptions(sigma=0.5)
    scores = {0: [1.0, 0.0, math.nan, 1.0], 2: [math.inf, 0.0, 2.0, 5.0]}
    assert coefficients(scores, options) == {0: [0.5, 0.0], 2: [0.0, -1.5]}
    assert coefficients({1: [math.nan, 1.0]}, options) == {1: [0.0]}


def test_scores_that_differ_too_much_do_not_count() -> None:
    scores = {0: [1e308, -1e308, 1.0, 0.0], 1: [1e39, 0.0, 2.0, 5.0]}
    assert coefficients(scores, EvolutionStrategyOptions(sigma=0.5)) == {0: [0.0, 0.5], 1: [0.0, -1.5]}
    of_ranks = coefficients(scores, EvolutionStrategyOptions(sigma=0.5, fitness="rank"))
    assert all(of_ranks[rank][0] > 0 for rank in scores)


@pytest.mark.parametrize("ranks", [1, 2])
def test_weights_stay_if_no_rank_is_finite(ranks: int) -> None:
    async def main(world: ad.World) -> list[float]:
        model = nn.Linear(2, 1)
        model.register_buffer("mean", torch.zeros(1))
        nn.init.ones_(model.weight), nn.init.ones_(model.bias)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        async with EvolutionStrategyPolicy(model, optimizer) as policy:
            model.get_buffer("mean").fill_(math.nan)
            for _ in range(2):
                await policy.step(loss=lambda: model.weight.detach().square().sum())
        return model.weight.flatten().tolist()

    assert simulate(main, ranks=ranks, strict=True).results == ([1.0, 1.0],) * ranks


def test_a_gradient_beyond_the_dtype_changes_nothing(caplog: pytest.LogCaptureFixture) -> None:
    async def main(world: ad.World) -> list[float]:
        model = nn.Linear(2, 1).half()
        nn.init.ones_(model.weight), nn.init.ones_(model.bias)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        async with EvolutionStrategyPolicy(model, optimizer) as policy:
            await policy.step(score=lambda: 1e9 * model.weight.detach().float().sum().item())
        return model.weight.flatten().tolist()

    assert simulate(main, ranks=1, strict=True).results == ([1.0, 1.0],)
    assert "fitness='rank'" in caplog.text


@pytest.mark.parametrize("differs", ["weights", "frozen"])
def test_ranks_that_cannot_train_one_model_are_refused(differs: str) -> None:
    async def main(world: ad.World) -> None:
        model, optimizer = made()
        if world.rank and differs == "weights":
            model.get_parameter("weight").data.add_(1)
        model.get_parameter("bias").requires_grad_(not world.rank or differs == "weights")
        with pytest.raises(ad.DisagreementError, match="begin with equal weights"):
            async with EvolutionStrategyPolicy(model, optimizer):
                pass

    simulate(main, ranks=2, strict=True)


def test_both_parts_of_complex_weights_are_trained() -> None:
    async def main(world: ad.World) -> list[complex]:
        model = nn.Module()
        model.weight = nn.Parameter(torch.tensor([1 + 2j, 3 - 1j, 0.5j], dtype=torch.complex64))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        async with EvolutionStrategyPolicy(model, optimizer, sigma=0.05, pairs=8) as policy:
            for _ in range(40):
                await policy.step(loss=lambda: (model.weight.detach() - (1 + 1j)).abs().square().sum())
        return model.weight.tolist()

    results = simulate(main, ranks=2, strict=True).results
    assert results[0] == results[1] and max(abs(each - (1 + 1j)) for each in results[0]) < 0.01


def test_ranks_replace_scores_of_any_scale() -> None:
    options = EvolutionStrategyOptions(sigma=0.5, fitness="rank")
    small, large = [0.1, 0.2, 0.3, 0.2], [1e3, 2e9, 3e12, 2e9]
    assert coefficients({0: small}, options) == coefficients({0: large}, options)
    # The positions are 0, 1.5, 3 and 1.5 of 3; each pair's difference is divided by 2 * 2 pairs * sigma.
    assert coefficients({0: small}, options)[0] == pytest.approx([-0.25, 0.25])
    assert coefficients({0: [1.0, 1.0]}, options) == {0: [0.0]}


@pytest.mark.parametrize(
    ("options", "kind", "facts"),
    [
        ({"sigma": 0.0}, ValueError, ("sigma", "above 0", "0.0")),
        ({"pairs": 0}, ValueError, ("pairs", "1", "0")),
        ({"fitness": "centered"}, ValueError, ("fitness", "rank", "'centered'")),
        ({"metric": 0.5}, TypeError, ("metric", "0.5")),
        ({"popsize": 8}, TypeError, ("popsize", "pairs")),
        ({"stdev": 0.1}, TypeError, ("stdev", "sigma")),
        ({"lr": 0.1}, TypeError, ("lr", "optimizer")),
        ({"average_every": 5}, TypeError, ("average_every", "each step")),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_a_wrong_option_is_refused(options: dict[str, Any], kind: type[Exception], facts: tuple[str, ...]) -> None:
    with pytest.raises(kind, match=naming(*facts)):
        EvolutionStrategyPolicy(*made(), **options)


def test_an_optimizer_that_needs_a_closure_is_refused() -> None:
    model, _ = made()
    with pytest.raises(TypeError, match=naming("no closure", "SGD", "LBFGS")):
        EvolutionStrategyPolicy(model, torch.optim.LBFGS(model.parameters()), sigma=0.1)


@pytest.mark.parametrize(
    ("given", "kind", "facts"),
    [
        ({"loss": 0.5}, TypeError, ("loss", "0.5", "step(loss=evaluate)")),
        ({}, ValueError, ("metric", "iteration 0", "step(loss=evaluate)")),
        ({"loss": lambda: "low"}, TypeError, ("metric must be a number", "'low'")),
    ],
    ids=["number", "missing", "string"],
)
def test_a_wrong_metric_is_refused(given: dict[str, Any], kind: type[Exception], facts: tuple[str, ...]) -> None:
    async def main(world: ad.World) -> None:
        with pytest.raises(kind, match=naming(*facts)):
            async with EvolutionStrategyPolicy(*made()) as policy:
                await policy.step(**given)

    simulate(main, ranks=1, strict=True)
