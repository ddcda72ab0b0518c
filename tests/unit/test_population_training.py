"""Tests ranges, perturbations, the writing of hyperparameters into optimizers, and refused options."""

from __future__ import annotations

import enum
import json
import math
import random
from typing import Any

import numpy as np
import pytest
import pytorch_optimizer
import schedulefree
import torch
from hypothesis import given, settings, strategies as st
from support.facts import names
from torch import nn
from torch.optim import lr_scheduler

from protocols import PopulationTrainingPolicy, Range
from protocols.population_training.exploring import (
    LineageEntry,
    donor_for,
    explored,
    extended,
    first_values,
    pack_lineage,
    unpack_lineage,
)
from protocols.population_training.hyperparameters import Choice, Sampler, space_of
from protocols.population_training.options import ExploringOptions
from protocols.population_training.settings import OptimizerSettings, load_moments
from protocols.selective.selection import SelectiveRules, decide

LAWS = settings(deadline=None, derandomize=True, max_examples=100)
metrics = st.lists(st.floats(allow_nan=True, allow_infinity=True), max_size=9).map(lambda each: dict(enumerate(each)))


# -- who copies whom --------------------------------------------------------------------------------------------------


@given(metrics=metrics, quantile=st.floats(0.01, 0.5))
@LAWS
def test_the_worst_copy_the_best_quantile(metrics: dict[int, float], quantile: float) -> None:
    rules = SelectiveRules(replacement_ratio=quantile, averaging_strategy="best_only", copies_one=True)
    decision = decide(metrics, rules)
    finite = sorted([(value, rank) for rank, value in metrics.items() if math.isfinite(value)])
    if decision is None:
        assert len(metrics) < 2 or not finite or len(finite) <= len(metrics) // 2
        return
    count = len(decision.replacers)
    assert 1 <= count <= len(metrics) // 2 and abs(count - quantile * len(metrics)) <= 1
    broken = [rank for rank, value in metrics.items() if not math.isfinite(value)]
    order = broken + sorted((rank for _, rank in finite), key=lambda rank: (metrics[rank], rank))
    assert set(decision.replacers) == set(order[:count])
    assert set(decision.donors) <= set(order[-count:]) and decision.best == order[-1]


@given(metrics=metrics)
@LAWS
def test_one_copied_rank_is_that_of_best_only(metrics: dict[int, float]) -> None:
    common = {"replacement_ratio": 0.01, "averaging_strategy": "best_only"}
    one = decide(metrics, SelectiveRules(**common, copies_one=True))  # type: ignore[arg-type]
    assert one == decide(metrics, SelectiveRules(**common))  # type: ignore[arg-type]


def test_a_donor_that_drops_out_changes_only_its_own_copies() -> None:
    for number in range(50):
        chosen = donor_for((1, 4, 6), 0, number, 7)
        for lost in (1, 4, 6):
            left = tuple(rank for rank in (1, 4, 6) if rank != lost)
            assert donor_for(left, 0, number, 7) == chosen or lost == chosen
    assert {donor_for((1, 4, 6), rank, 3, 0) for rank in range(20)} == {1, 4, 6}


# -- values -----------------------------------------------------------------------------------------------------------


def test_draws_are_within_their_limits_and_even() -> None:
    generator = random.Random(0)
    logarithmic = [Range(1e-4, 1e-2).draw(generator) for _ in range(2000)]
    assert min(logarithmic) >= 1e-4 and max(logarithmic) <= 1e-2
    assert 0.45 < sum(value < 1e-3 for value in logarithmic) / 2000 < 0.55
    even = [Range(0.0, 4.0).draw(generator) for _ in range(2000)]
    assert 0.45 < sum(value < 2.0 for value in even) / 2000 < 0.55
    assert {Range(1, 3, integer=True).draw(generator) for _ in range(100)} == {1, 2, 3}
    assert {Choice(["a", "b"]).draw(generator) for _ in range(50)} == {"a", "b"}


@pytest.mark.parametrize(
    ("space", "value", "factor", "wanted"),
    [
        (Range(0.1, 1.0), 0.5, 1.25, 0.625),
        (Range(0.1, 1.0), 0.9, 1.25, 1.0),
        (Range(0.1, 1.0), 0.1, 0.8, 0.1),
        (Range(-1.0, 1.0), -0.5, 1.25, -0.625),
        (Range(1, 9, integer=True), 2, 1.25, 3),
        (Range(1, 9, integer=True), 1, 0.8, 1),
        (Range(1, 9, integer=True), 5, 1.0, 5),
        (Choice([8, 16, 32]), 8, 1.25, 16),
        (Choice([8, 16, 32]), 8, 0.8, 8),
        (Choice([8, 16, 32]), 16, 1.0, 16),
        (Choice([True, False]), True, 1.25, False),
        (Sampler(lambda generator: 1.0), 2.0, 1.25, 2.5),
        (Sampler(lambda generator: 1), 2, 1.25, 3),
        (Sampler(lambda generator: 1), 3, 0.8, 2),
        (Sampler(lambda generator: 1), 10, 1.25, 12),
        (Sampler(lambda generator: 1), -1, 1.25, -2),
    ],
)
def test_perturbed_values_stay_within_their_limits(space: Any, value: Any, factor: float, wanted: Any) -> None:
    found = space.perturbed(value, factor)
    assert found == wanted and type(found) is type(wanted)


class Size(enum.IntEnum):
    SMALL, LARGE = 1, 2


@pytest.mark.parametrize(
    ("space", "wanted"),
    [
        (Choice(list(np.array([0.5, 0.25]))), [0.5, 0.25]),
        (Choice(list(np.array([0.5, 0.25], np.float32))), [0.5, 0.25]),
        (Choice(list(np.arange(2))), [0, 1]),
        (Choice(list(Size)), [1, 2]),
        (Choice([np.str_("a"), "b"]), ["a", "b"]),
        (Range(np.int64(1), np.int64(2), integer=True), [1, 2]),
        (Range(np.float32(0.5), np.float32(1)), [0.5, 1.0]),
        (Sampler(lambda generator: np.int64(3)), [3]),
    ],
)
def test_numbers_of_numpy_travel_as_plain_values(space: Any, wanted: list[Any]) -> None:
    """A value that was sent to another rank, as JSON, must be one of that rank's values."""
    json.dumps(space.agreed())
    for value in wanted:
        found = space.clipped(json.loads(json.dumps(space.check("value", np.array(value)[()]))))
        assert found == value and type(found) is type(value)
    assert type(space.draw(random.Random(0))) is type(wanted[0])


def test_equal_arguments_draw_equal_values() -> None:
    def options(seed: int, **more: Any) -> ExploringOptions:
        return ExploringOptions(custom_hyperparameters={"lr": Range(1e-4, 1e-1), "depth": [1, 2, 3]}, seed=seed, **more)

    one, two = options(1), options(2)
    assert first_values(one, 3) == first_values(options(1), 3) != first_values(two, 3)
    assert first_values(one, 3) != first_values(one, 4)
    assert first_values(options(1, initial={"depth": 2}), 3)["depth"] == 2
    old = {"lr": 0.01, "depth": 2}
    assert explored(one, old, 3, 8) == explored(options(1), old, 3, 8)
    assert len({explored(one, old, 3, number)["lr"] for number in range(30)}) > 3


def test_a_continued_job_does_not_repeat_its_draws() -> None:
    """Rounds are numbered from 1 again in a job that continues from a saved state, but iterations are not."""
    space: dict[str, Any] = {"custom_hyperparameters": {"lr": Range(1e-4, 1e-1)}}
    made = ExploringOptions(**space, resample_probability=1.0)
    drawn = [explored(made, {"lr": 0.01}, 3, 1, iteration=iteration)["lr"] for iteration in range(0, 2000, 100)]
    assert len(set(drawn)) == 20
    made = ExploringOptions(**space, explore=lambda values, generator: {"lr": generator.uniform(1e-4, 1e-1)})
    assert len({explored(made, {"lr": 0.01}, 3, 1, iteration=iteration)["lr"] for iteration in range(20)}) == 20


def test_a_function_of_the_user_explores_within_the_limits() -> None:
    def options(function: Any) -> ExploringOptions:
        spaces: dict[str, Any] = {"lr": Range(1e-4, 1e-1), "depth": [1, 2, 3]}
        return ExploringOptions(custom_hyperparameters=spaces, explore=function)

    def explore(values: dict[str, Any], generator: random.Random) -> dict[str, Any]:
        return {"lr": values["lr"] * 100, "depth": generator.choice([3])}

    old = {"lr": 0.01, "depth": 1}
    assert explored(options(explore), old, 0, 1) == {"lr": 0.1, "depth": 3}
    with pytest.raises(ValueError, match="explore") as refused:
        explored(options(lambda values, generator: {**values, "lr": math.nan}), old, 0, 1)
    assert names(refused.value, "nan", "0.0001")
    for wrong in (lambda values, generator: {"lr": 1.0}, lambda values, generator: None):
        with pytest.raises(TypeError) as caught:
            explored(options(wrong), old, 0, 1)
        assert names(caught.value, "explore", "lr, depth")


def test_a_history_keeps_the_first_and_newest_entries() -> None:
    history: tuple[LineageEntry, ...] = ()
    for number in range(1200):
        history = extended(history, LineageEntry(number, 1, number, 2, {"lr": number / 7}))
    assert len(history) == 1000
    assert history[0].iteration == 0 and history[-1].iteration == 1199
    assert unpack_lineage(pack_lineage(history)) == history


# -- optimizers -------------------------------------------------------------------------------------------------------


def parameter() -> nn.Parameter:
    return nn.Parameter(torch.ones(3))


def test_groups_keep_their_ratios() -> None:
    groups = [
        {"params": [parameter()], "weight_decay": 0.0},
        {"params": [parameter()], "lr": 0.2},
        {"params": [parameter()], "lr": 0.05, "betas": (0.5, 0.9)},
    ]
    optimizer = torch.optim.AdamW(groups, lr=0.1, weight_decay=0.01)
    own = OptimizerSettings(optimizer, ["lr", "weight_decay", "betas[0]"], None)
    own.write({"lr": 0.4, "weight_decay": 0.5, "betas[0]": 0.45})
    assert [group["lr"] for group in optimizer.param_groups] == [0.4, 0.8, 0.2]
    assert [group["weight_decay"] for group in optimizer.param_groups] == [0.0, 0.5, 0.5]
    assert [group["betas"] for group in optimizer.param_groups] == [(0.45, 0.999), (0.45, 0.999), (0.25, 0.9)]


@pytest.mark.parametrize("is_scheduled", [False, True])
def test_a_group_that_is_added_later_keeps_its_ratio(is_scheduled: bool) -> None:
    """Regression: the step that replaced the rank raised ValueError. Lightning's BackboneFinetuning adds groups."""
    optimizer = torch.optim.SGD([parameter()], lr=0.1)
    scheduler = lr_scheduler.StepLR(optimizer, 9) if is_scheduled else None
    own = OptimizerSettings(optimizer, ["lr", "weight_decay"], scheduler)
    own.write({"lr": 0.2, "weight_decay": 0.5})
    optimizer.add_param_group({"params": [parameter()], "lr": 0.02, "weight_decay": 0.25})
    for factor in (1.0, 2.0, 4.0):
        own.write({"lr": 0.2 * factor, "weight_decay": 0.5 * factor})
        rates = [group["lr"] for group in optimizer.param_groups]
        assert rates == pytest.approx([0.2 * factor, 0.02 if is_scheduled else 0.02 * factor])
        assert [group["weight_decay"] for group in optimizer.param_groups] == [0.5 * factor, 0.25 * factor]


def test_a_tensor_is_written_in_place() -> None:
    rate = torch.tensor(0.1)
    optimizer = torch.optim.Adam([parameter()], lr=rate, foreach=False)
    OptimizerSettings(optimizer, ["lr"], None).write({"lr": 0.25})
    assert optimizer.param_groups[0]["lr"] is rate and float(rate) == 0.25


SCHEDULES: dict[str, Any] = {
    "lambda": lambda optimizer: lr_scheduler.LambdaLR(optimizer, lambda epoch: 0.5**epoch),
    "step": lambda optimizer: lr_scheduler.StepLR(optimizer, 2, 0.5),
    "cosine": lambda optimizer: lr_scheduler.CosineAnnealingLR(optimizer, 20),
    "restarts": lambda optimizer: lr_scheduler.CosineAnnealingWarmRestarts(optimizer, 4),
    "warm-up": lambda optimizer: lr_scheduler.LinearLR(optimizer, 0.25, 1.0, 8),
    "one cycle": lambda optimizer: lr_scheduler.OneCycleLR(optimizer, 0.4, total_steps=30),
    "cyclic": lambda optimizer: lr_scheduler.CyclicLR(optimizer, 0.1, 0.4, 4, cycle_momentum=False),
    "sequence": lambda optimizer: lr_scheduler.SequentialLR(
        optimizer,
        [lr_scheduler.LinearLR(optimizer, 0.25, 1.0, 4), lr_scheduler.CosineAnnealingLR(optimizer, 20)],
        [5],
    ),
    "chain": lambda optimizer: lr_scheduler.ChainedScheduler(
        [lr_scheduler.LinearLR(optimizer, 0.25, 1.0, 4), lr_scheduler.ExponentialLR(optimizer, 0.9)]
    ),
}


@pytest.mark.parametrize("kind", SCHEDULES)
def test_a_schedule_continues_with_the_new_base(kind: str) -> None:
    def made() -> tuple[torch.optim.Optimizer, Any]:
        optimizer = torch.optim.SGD(
            [{"params": [parameter()]}, {"params": [parameter()], "lr": 0.2}], lr=0.1, momentum=0.9
        )
        return optimizer, SCHEDULES[kind](optimizer)

    optimizer, scheduler = made()
    same, other = made()
    own = OptimizerSettings(optimizer, ["lr"], scheduler)
    base = optimizer.param_groups[0]["initial_lr"]
    for step in range(16):
        factor = 1.0 if step < 6 else 3.0
        if step == 6:
            own.write({"lr": 3.0 * base})
        for group, plain in zip(optimizer.param_groups, same.param_groups, strict=True):
            assert group["lr"] == pytest.approx(factor * plain["lr"], rel=1e-9), step
        for each, schedule in ((optimizer, scheduler), (same, other)):
            each.step()
            schedule.step()


@pytest.mark.parametrize("is_warmed_up", [False, True])
def test_a_new_base_keeps_the_smallest_scheduled_rate(is_warmed_up: bool) -> None:
    """Regression: with ``eta_min`` above 0, the current and all later rates were too large after a change."""

    def made(base: float) -> tuple[torch.optim.Optimizer, Any]:
        optimizer = torch.optim.SGD([{"params": [parameter()]}, {"params": [parameter()], "lr": base / 2}], lr=base)
        cosine = lr_scheduler.CosineAnnealingLR(optimizer, 20, eta_min=0.01)
        if not is_warmed_up:
            return optimizer, cosine
        return optimizer, lr_scheduler.SequentialLR(
            optimizer, [lr_scheduler.LinearLR(optimizer, 0.25, 1.0, 4), cosine], [4]
        )

    (optimizer, scheduler), (wanted, other) = made(0.1), made(0.5)
    own = OptimizerSettings(optimizer, ["lr"], scheduler)
    for step in range(20):
        if step == 15:
            own.write({"lr": 0.5})
        if step >= 15:
            rates, expected = ([group["lr"] for group in each.param_groups] for each in (optimizer, wanted))
            assert rates == pytest.approx(expected), step
        for each, schedule in ((optimizer, scheduler), (wanted, other)):
            each.step()
            schedule.step()


@pytest.mark.parametrize("kind", ["lambda", "step", "cosine", "warm-up"])
def test_a_base_of_zero_is_left_again(kind: str) -> None:
    """A rank that began with the learning rate 0, or copied it, follows the schedule with its next base."""
    rates = []
    for first in (0.0, 0.1):
        optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=first)
        scheduler = SCHEDULES[kind](optimizer)
        own = OptimizerSettings(optimizer, ["lr"], scheduler)
        for step in range(6):
            if step == 3:
                own.write({"lr": 0.2})
            optimizer.step()
            scheduler.step()
        rates.append(optimizer.param_groups[0]["lr"])
    assert rates[0] == pytest.approx(rates[1]) and rates[1] > 0


def test_moments_are_loaded_without_settings() -> None:
    def made(rate: float, kind: torch.dtype) -> tuple[torch.optim.Optimizer, nn.Parameter]:
        weights = nn.Parameter(torch.ones(3, dtype=kind))
        optimizer = torch.optim.Adam([weights], lr=rate)
        weights.grad = torch.full_like(weights, rate)
        optimizer.step()
        return optimizer, weights

    for kind in (torch.float32, torch.bfloat16):
        (one, _), (two, weights) = made(0.1, kind), made(0.2, kind)
        wide = one.state_dict()
        wide["state"][0]["exp_avg"] = wide["state"][0]["exp_avg"].double()
        group = two.param_groups[0]
        load_moments(two, wide)
        assert two.param_groups[0] is group and group["lr"] == 0.2
        held = two.state[weights]
        assert held["exp_avg"].dtype == torch.float64 and torch.equal(held["exp_avg"], wide["state"][0]["exp_avg"])
        assert torch.equal(held["exp_avg_sq"], wide["state"][0]["exp_avg_sq"])


def test_state_in_parameter_groups_is_loaded_without_settings() -> None:
    """Regression: moments were copied, but not the step counts and averages that optimizers store in groups."""

    def made(kind: Any, rate: float, steps: int) -> Any:
        weights = nn.Parameter(torch.ones(3))
        optimizer = kind([{"params": [weights], "own": rate}], lr=rate, weight_decay=rate)
        for _ in range(steps):
            weights.grad = torch.full_like(weights, rate)
            optimizer.step()
        return optimizer

    def schedule_free(*arguments: Any, **options: Any) -> Any:
        optimizer = schedulefree.AdamWScheduleFree(*arguments, **options)
        optimizer.train()
        return optimizer

    for kind, keys in (
        (schedule_free, ("k", "weight_sum", "lr_max")),
        (pytorch_optimizer.StableAdamW, ("step",)),
        (pytorch_optimizer.Prodigy, ("step", "d", "d_max")),
        (torch.optim.Adam, ()),
    ):
        one, two = made(kind, 0.1, 9), made(kind, 0.2, 3)
        theirs, group = one.param_groups[0], two.param_groups[0]
        assert all(group[name] != theirs[name] for name in keys), kind
        load_moments(two, one.state_dict(), ("own",))
        assert two.param_groups[0] is group and [group[name] for name in keys] == [theirs[name] for name in keys]
        assert (group["lr"], group["weight_decay"], group["own"]) == (0.2, 0.2, 0.2), kind


def test_tensors_in_parameter_groups_are_loaded_in_place() -> None:
    own, theirs = (torch.optim.SGD([{"params": [torch.ones(1)], "k": torch.tensor(n)}], lr=0.1) for n in (1.0, 2.0))
    place = own.param_groups[0]["k"]
    load_moments(own, theirs.state_dict())
    assert own.param_groups[0]["k"] is place and place == 2.0


# -- refused options --------------------------------------------------------------------------------------------------


def test_a_list_of_two_numbers_is_refused_as_a_choice() -> None:
    assert space_of("lr", Choice([32, 16])) == Choice([32, 16])
    assert space_of("kind", [True, False]) == Choice([True, False])
    assert space_of("kind", ["a", 1]) == Choice(["a", 1])
    with pytest.raises(ValueError, match="may be meant as a range"):
        space_of("size", [32, 16])


def test_ranges_and_choices_of_a_configuration_file() -> None:
    """Regression: YAML has no tuples, so a file could give neither a range nor a choice of two numbers."""
    assert space_of("lr", {"low": 0.001, "high": 0.1}) == Range(0.001, 0.1)
    assert space_of("size", {"low": 1, "high": 8, "integer": True, "log": False}) == Range(1, 8, False, True)
    assert space_of("size", {"values": [32, 16]}) == Choice([32, 16])
    with pytest.raises(ValueError, match=r"\{low: 16, high: 32\}, or \{values: \[32, 16\]\}"):
        space_of("size", [32, 16])
    for wrong in ({"low": 0.001}, {"low": 0.1, "hi": 1.0}, {"values": [1, 2], "low": 1}, {1: 2}, {}):
        with pytest.raises(TypeError, match="'lr'"):
            space_of("lr", wrong)
    with pytest.raises(ValueError, match=r"'lr'.* below"):
        space_of("lr", {"low": 1.0, "high": 0.1})


LR = {"hyperparameters": {"lr": (1e-4, 1e-1)}}


@pytest.mark.parametrize(
    ("options", "facts"),
    [
        ({}, ["hyperparameters", "lr"]),
        (
            {"hyperparameters": {"rate": (0.1, 1.0)}},
            ["'rate'", "Adam", "lr, betas[0], betas[1]", "custom_hyperparameters"],
        ),
        ({"hyperparameters": {"betas": (0.1, 1.0)}}, ["'betas'", "betas[0]"]),
        ({"hyperparameters": {"momentum": (0.1, 1.0)}}, ["'momentum'", "betas[0]"]),
        ({"hyperparameters": {"lr": (0.1, 0.001)}}, ["'lr'", "(0.1, 0.001)", "(0.001, 0.1)"]),
        ({"hyperparameters": {"lr": (0.1, 0.1)}}, ["'lr'", "(0.1, 0.1)"]),
        ({"hyperparameters": {"lr": (0.1, math.inf)}}, ["'lr'", "inf", "finite"]),
        ({"hyperparameters": {"lr": 0.1}}, ["'lr'", "0.1", "(low, high)"]),
        ({"hyperparameters": {"lr": [0.1]}}, ["'lr'", "[0.1]", "two"]),
        ({"hyperparameters": {"lr": [0.1, 0.1]}}, ["'lr'", "different"]),
        ({"hyperparameters": ["lr"]}, ["hyperparameters", "['lr']", "dict"]),
        ({**LR, "custom_hyperparameters": {"lr": (0.1, 1.0)}}, ["custom_hyperparameters", "'lr'"]),
        ({**LR, "initial": {"lr": 1.0}}, ["initial['lr']", "1.0", "0.0001", "0.1"]),
        ({**LR, "initial": {"l": 1.0}}, ["initial", "'l'", "lr"]),
        ({**LR, "initial": 0.1}, ["initial", "0.1", "dict"]),
        ({"hyperparameters": {"lr": (0.1, 0.15)}, "perturb": (0.9, 2.0)}, ["perturb", "2.0", "'lr'", "(0.1, 0.15)"]),
        ({**LR, "perturb": (0.0, 1.2)}, ["perturb", "0.0", "above 0"]),
        ({**LR, "perturb": 1.2}, ["perturb", "1.2"]),
        ({**LR, "perturb": ()}, ["perturb", "()"]),
        ({**LR, "quantile": -0.1}, ["quantile", "-0.1", "0.5"]),
        ({"hyperparameters": {"lr": [1e-4, 1e-1]}}, ["lr", "(0.0001, 0.1)", "protocols.Choice([0.0001, 0.1])"]),
        ({**LR, "quantile": 0.6}, ["quantile", "0.6", "0.5"]),
        ({**LR, "resample_probability": 1.5}, ["resample_probability", "1.5", "0", "1"]),
        ({**LR, "explore": 3}, ["explore", "3"]),
        ({**LR, "seed": 0.5}, ["seed", "0.5", "integer"]),
        ({"hyperparameters": {"lr": [0.1, "0.2"]}}, ["'lr'", "numbers", "'0.2'"]),
        ({"hyperparameters": {"lr": [None, 0.2]}}, ["'lr'", "numbers", "None"]),
        ({"custom_hyperparameters": {"n": [1.0, math.nan]}}, ["'n'", "NaN"]),
        ({**LR, "lr_scheduler": "cosine"}, ["lr_scheduler", "'cosine'", "base_lrs"]),
        ({**LR, "perturbation_interval": 4}, ["perturbation_interval", "average_every"]),
        ({**LR, "hyperparam_mutations": {}}, ["hyperparam_mutations", "hyperparameters"]),
        ({**LR, "quantile_fraction": 0.2}, ["quantile_fraction", "quantile"]),
        ({**LR, "custom_explore_fn": None}, ["custom_explore_fn", "explore"]),
        ({**LR, "synch": True}, ["synch", "no rank waits"]),
        ({**LR, "mode": "max"}, ["mode", "metric_mode"]),
        ({**LR, "frequencies": [1, 10]}, ["frequencies", "periods"]),
        ({**LR, "periods": 3}, ["periods", "3", "(1, 10, 25, 50)"]),
        ({**LR, "periods": (1, 0)}, ["periods", "(1, 0)", "(1, 10, 25, 50)"]),
        ({**LR, "islands": 2}, ["islands", "group"]),
        ({**LR, "averaging_strategy": "mean"}, ["averaging_strategy", "copies"]),
    ],
    ids=lambda value: "-".join(map(str, value)) if isinstance(value, dict) else "",
)
def test_wrong_options_are_refused(options: dict[str, Any], facts: list[str]) -> None:
    model = nn.Linear(1, 1)
    with pytest.raises((TypeError, ValueError)) as caught:
        PopulationTrainingPolicy(model, torch.optim.Adam(model.parameters()), **{"average_every": 1, **options})
    assert names(caught.value, *facts), caught.value


def test_a_scheduled_learning_rate_needs_its_scheduler() -> None:
    model = nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scheduler = lr_scheduler.StepLR(optimizer, 2)
    with pytest.raises(ValueError) as caught:
        PopulationTrainingPolicy(model, optimizer, average_every=1, hyperparameters={"lr": (0.1, 1.0)})
    assert names(caught.value, "lr_scheduler", "None")
    PopulationTrainingPolicy(
        model, optimizer, average_every=1, hyperparameters={"lr": (0.1, 1.0)}, lr_scheduler=scheduler
    )
    with pytest.raises(TypeError) as wrong:
        PopulationTrainingPolicy(
            model,
            optimizer,
            average_every=1,
            hyperparameters={"lr": (0.1, 1.0)},
            lr_scheduler=lr_scheduler.ReduceLROnPlateau(optimizer),
        )
    assert names(wrong.value, "lr_scheduler", "base_lrs", "ReduceLROnPlateau", "do not pass it")


@pytest.mark.parametrize("given", [Range(1, 4), [1, 2, 4], (1, 2), lambda generator: 1.0])
def test_values_can_be_written_in_four_ways(given: Any) -> None:
    assert space_of("lr", given).draw(random.Random(1)) is not None
