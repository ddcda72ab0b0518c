"""Cases for the choice of the model to deploy, compared with numpy and a second implementation of the greedy soup."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import nn

import asyncdist as ad
from asyncdist.errors import DisagreementError, RemoteError
from helpers.cases_everyday import all_but_one, refused
from helpers.cases_models import Mixed, failure, is_filled, to_numpy

Array = np.ndarray[Any, Any]


def running_mean(arrays: Sequence[Array]) -> Array:
    """Return the mean by the formula of docs/soups.md: each step is rounded once, and stays within its operands."""
    mean = arrays[0].copy()
    for count, values in enumerate(arrays[1:], 1):
        share = count / (count + 1)
        kind = mean.dtype.type
        mixed = mean * kind(share) + values * kind(1.0 - share)
        mean = np.clip(mixed, np.minimum(mean, values), np.maximum(mean, values))
    return mean


def greedy(vectors: Sequence[Array], loss: Any) -> tuple[float, list[int]]:
    """Return the greedy soup as in the paper: a list of ingredients, whose mean is computed anew for each trial."""
    order = sorted(range(len(vectors)), key=lambda rank: loss(vectors[rank]))
    ingredients, best = [order[0]], loss(vectors[order[0]])
    for rank in order[1:]:
        found = loss(running_mean([vectors[each] for each in [*ingredients, rank]]))
        if found < best:
            ingredients, best = [*ingredients, rank], found
    return best, ingredients


def vector_of(seed: int) -> Array:
    return np.random.default_rng(seed).integers(-64, 64, 8).astype(np.float32) / 8


def distance(vector: Array) -> float:
    """Return a distance that is exact in float64, so that both implementations compare the same numbers."""
    return float(np.square(vector.astype(np.float64) - 1).sum())


def model_with(vector: Array) -> nn.Linear:
    model = nn.Linear(8, 1, bias=False)
    model.weight.data.copy_(torch.from_numpy(vector))
    return model


def measured(model: nn.Module) -> float:
    return distance(to_numpy(next(model.parameters())).ravel())


async def case_the_choice_is_that_of_a_second_implementation(world: ad.World) -> None:
    counts = set()
    for draw in range(2):
        vectors = [vector_of(100 * draw + rank) for rank in range(world.size)]
        best, ingredients = greedy(vectors, distance)
        model = model_with(vectors[world.rank])
        soup = await ad.best_of_population(model, loss=measured)
        everyone = sorted(range(world.size), key=lambda rank: distance(vectors[rank]))
        uniform = distance(running_mean([vectors[rank] for rank in everyone]))
        kind, members, value = ("greedy" if len(ingredients) > 1 else "best"), ingredients, best
        if world.size > 1 and uniform < best:
            kind, members, value = "uniform", everyone, uniform
        assert (soup.kind, list(soup.members), soup.metric) == (kind, members, value)
        assert soup.metrics == {rank: distance(vector) for rank, vector in enumerate(vectors)}
        assert soup.soup_metrics == ({"uniform": uniform, "greedy": best} if world.size > 1 else {})
        assert value <= min(soup.metrics.values())
        expected = running_mean([vectors[rank] for rank in members])
        assert np.array_equal(to_numpy(model.weight).ravel(), expected)
        counts.add(len(members))
    assert world.size < 3 or (max(counts) > 1 and min(counts) < world.size), counts


async def case_the_uniform_soup_may_beat_the_greedy_one(world: ad.World) -> None:
    """Each pair is worse than the best member, but all three together are the target."""
    offsets = np.zeros((world.size, 8), np.float32)
    offsets[:3, :2] = [[-0.5, 0], [0.25, 3], [0.25, -3]][: world.size]
    model = model_with(1 + offsets[world.rank])
    soups = [await ad.best_of_population(model_with(1 + offsets[world.rank]), loss=measured, soups=["greedy"])]
    soups.append(await ad.best_of_population(model, score=lambda model: -measured(model)))
    if world.size == 3:
        assert [soup.kind for soup in soups] == ["best", "uniform"] and soups[1].metric == -measured(model) == 0.0
        assert soups[0].members == (0,) and sorted(soups[1].members) == [0, 1, 2]


async def case_a_soup_has_every_kind_of_entry(world: ad.World) -> None:
    """The entries include tied weights, several dtypes, buffers and integers."""
    model, states = Mixed(world.rank), [Mixed(rank).state_dict() for rank in range(world.size)]
    objects = {name: tensor.data_ptr() for name, tensor in model.state_dict(keep_vars=True).items()}
    soup = await ad.best_of_population(model, loss=descending(world), soups=["greedy"])
    order = list(range(world.size))
    assert list(soup.members) == order
    for name, tensor in model.state_dict(keep_vars=True).items():
        if tensor.is_complex():
            parts = [torch.view_as_real(states[rank][name]).numpy() for rank in order]
            assert np.array_equal(torch.view_as_real(tensor.detach()).numpy(), running_mean(parts)), name
        elif tensor.is_floating_point():
            expected = torch.from_numpy(np.asarray(running_mean([to_numpy(states[rank][name]) for rank in order])))
            assert torch.equal(tensor.detach(), expected.to(tensor.dtype)), name
        else:
            assert torch.equal(tensor, states[order[0]][name]), name
        assert tensor.data_ptr() == objects[name]
    assert model.tied is model.first and model.own.item() == world.rank


async def case_low_precision_is_accumulated_in_float32(world: ad.World) -> None:
    """In bfloat16, whose values near 256 differ by 2, each mean would be rounded before the next model is added."""
    values = [256.0, 258.0, 258.0, 262.0, 258.0, 260.0, 258.0, 262.0][: world.size]
    values += [258.0] * (world.size - len(values))
    model = nn.ParameterList([torch.full((3,), values[world.rank], dtype=torch.bfloat16)])
    await ad.best_of_population(model, loss=descending(world))
    expected = torch.tensor(running_mean([np.float32(value).reshape(1) for value in values])).bfloat16()
    assert torch.equal(model[0].detach(), expected.expand(3))


def descending(world: ad.World) -> Any:
    """Return a loss that orders the members by rank, and becomes better with each further call."""
    calls = iter(range(1, 1000))

    def loss(_: nn.Module) -> float:
        count = next(calls)
        return float(world.rank) if count == 1 else -float(count)

    return loss


async def case_models_with_nan_are_left_out(world: ad.World) -> None:
    """The last rank has a metric of NaN; the rank before it has a NaN in a weight that its loss does not use."""
    last = world.size - 1
    model = model_with(vector_of(world.rank))
    unused = nn.Parameter(torch.tensor(math.nan if world.rank == last - 1 else 0.0))
    model.register_parameter("unused", unused)

    def loss(_: nn.Module) -> float:
        return math.nan if world.rank == last and model.weight[0, 0] == vector_of(last)[0] else measured(model)

    usable = list(range(world.size - 2)) or ([0] if world.size == 1 else [])
    if world.size == 1:
        await refused(ad.best_of_population(model, loss=lambda _: math.nan), ValueError, "finite", "nan")
        return
    if not usable:
        await refused(ad.best_of_population(model, loss=loss), ValueError, "finite", "nan")
        return
    soup = await ad.best_of_population(model, loss=loss)
    assert set(soup.members) <= set(usable) and math.isnan(soup.metrics[last]) and math.isnan(soup.metrics[last - 1])
    assert bool(torch.isfinite(model.weight).all()) and unused.item() == 0.0


async def case_infinite_masks_and_equal_weights_stay(world: ad.World) -> None:
    model = model_with(vector_of(world.rank))
    mask = torch.tensor([-math.inf, torch.finfo(torch.float32).min, 0.1])
    model.register_buffer("mask", mask)
    before = mask.clone()
    soup = await ad.best_of_population(model, loss=descending(world))
    assert len(soup.members) == world.size and torch.equal(mask, before)


def returning(value: Any) -> Callable[[nn.Module], Any]:
    return lambda _: value


async def case_wrong_calls_leave_every_model_alone(world: ad.World) -> None:
    last = world.size - 1
    vector = vector_of(world.rank)
    model = model_with(vector)

    def fails(model: nn.Module) -> float:
        if world.rank == last:
            raise ValueError("the data is gone")
        return measured(model)

    await failure(world, last, lambda: ad.best_of_population(model, loss=fails), "the data is gone")
    for value in (None, "x", True, 1j, torch.ones(2)):
        call = functools.partial(ad.best_of_population, model, loss=returning(value if world.rank == last else 1.0))
        await failure(world, last, call, "loss must return one real number")
    lone: Any = iter([torch.ones(1)]) if world.rank == last else None
    await failure(world, last, lambda: ad.best_of_population(model, loss=measured, loader=lone), "several times")
    five: Any = 5 if world.rank == last else ()
    await failure(world, last, lambda: ad.best_of_population(model, loss=measured, soups=five), "soups")
    wrong: Any = ["median"] if world.rank == last else ["greedy"]
    await failure(world, last, lambda: ad.best_of_population(model, loss=measured, soups=wrong), "median")
    both = measured if world.rank == last else None
    await failure(world, last, lambda: ad.best_of_population(model, loss=measured, score=both), "both")
    if last:
        name = "score" if world.rank == last else "loss"
        given: Any = {name: measured}
        await refused(
            ad.best_of_population(model, **given),
            DisagreementError if world.rank == last else RemoteError,
            "score",
            "loss",
        )
        other = nn.Linear(8, 2 if world.rank == last else 1, bias=False)
        await refused(
            ad.best_of_population(other, loss=measured),
            DisagreementError if world.rank == last else RemoteError,
            "'weight'",
            (2, 8),
            (1, 8),
        )
    assert np.array_equal(to_numpy(model.weight).ravel(), vector) and model.training
    await ad.best_of_population(model, loss=measured)


async def case_a_coroutine_function_measures_in_evaluation_mode(world: ad.World) -> None:
    inner = model_with(vector_of(world.rank))
    model = nn.Sequential(nn.Dropout(0.5), inner)
    model[0].eval()
    modes = []

    async def loss(given: nn.Module) -> torch.Tensor:
        modes.append([module.training for module in given.modules()])
        await world.sleep(0.001)
        return (inner.weight - 1).square().sum()

    await ad.best_of_population(model, loss=loss)
    assert modes and not np.any(modes)
    assert [module.training for module in model.modules()] == [True, False, True]


async def case_statistics_are_recomputed_from_a_loader(world: ad.World) -> None:
    """On all ranks, the statistics are computed from the chosen soup's own activations."""
    torch.manual_seed(world.rank)
    layer, norm = nn.Linear(4, 4), nn.BatchNorm1d(4)
    model = nn.Sequential(layer, norm)
    model.register_buffer("own", torch.tensor(float(world.rank)), persistent=False)
    own_mean, own_var = norm.get_buffer("running_mean"), norm.get_buffer("running_var")
    own_mean.fill_(100.0 * (world.rank + 1))
    batches = [torch.from_numpy(np.random.default_rng(seed).standard_normal((16, 4))).float() for seed in range(3)]
    soup = await ad.best_of_population(model, loss=descending(world), loader=[[batch, "label"] for batch in batches])
    if soup.kind == "best":
        assert world.size == 1 and is_filled(own_mean, 100.0)
        return
    hidden = [layer(batch).detach() for batch in batches]
    assert torch.allclose(own_mean, torch.stack([each.mean(0) for each in hidden]).mean(0), atol=1e-5)
    assert torch.allclose(own_var, torch.stack([each.var(0) for each in hidden]).mean(0), atol=1e-5)
    assert model.get_buffer("own").item() == world.rank
    for tensor in model.state_dict().values():
        every = await ad.all_gather(tensor)
        assert all(torch.equal(each, tensor) for each in every)


async def case_a_group_chooses_among_its_own(world: ad.World) -> None:
    ranks = all_but_one(world)
    model = model_with(vector_of(world.rank))
    if world.rank in ranks:
        group = await ad.new_group(ranks)
        soup = await ad.best_of_population(model, loss=measured, group=group)
        assert set(soup.members) <= set(ranks) and set(soup.metrics) == set(ranks)
    else:
        assert np.array_equal(to_numpy(model.weight).ravel(), vector_of(world.rank))
    await ad.barrier()
