"""Tests soups of saved models, the moving average, their memory, and wrong input."""

from __future__ import annotations

import copy
import gc
import itertools
import logging
import math
import pickle
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from helpers.cases_models import Mixed, to_numpy
from helpers.cases_soups import distance, greedy, measured, model_with, running_mean, vector_of
from safetensors.torch import save_model
from support.facts import naming
from torch import nn

import asyncdist as ad
from asyncdist.functional.soups import best_of_population as streaming
from asyncdist.functional.soups.choosing import check_loader


def vectors(count: int) -> list[np.ndarray[Any, Any]]:
    return [vector_of(80 + seed) for seed in range(count)]


def states(count: int) -> list[dict[str, Any]]:
    return [model_with(vector).state_dict() for vector in vectors(count)]


def vector(model: nn.Module) -> np.ndarray[Any, Any]:
    return to_numpy(next(model.parameters())).ravel()


@pytest.fixture(params=["memory", "torch", "larger", "safetensors", "legacy"])
def sources(request: pytest.FixtureRequest, tmp_path: Path) -> Any:
    """Return five models in each form of a source."""
    if request.param == "memory":
        return states(5)
    paths = []
    for index, state in enumerate(states(5)):
        path = tmp_path / f"{index}.{'safetensors' if request.param == 'safetensors' else 'pt'}"
        if request.param == "safetensors":
            save_model(model_with(vectors(5)[index]), str(path))
        elif request.param == "larger":
            torch.save({"epoch": 3, "state_dict": state}, path)
        else:
            torch.save(state, path, _use_new_zipfile_serialization=request.param == "torch")
        paths.append(path)
    return paths


def test_a_uniform_soup_is_the_running_mean(sources: Any) -> None:
    model = model_with(np.zeros(8, np.float32))
    soup = ad.uniform_soup(model, iter(sources))
    assert (soup.kind, soup.members, soup.metric) == ("uniform", (0, 1, 2, 3, 4), None)
    assert np.array_equal(vector(model), running_mean(vectors(5)))
    exact = np.mean(np.asarray(vectors(5), np.float64), axis=0)
    assert np.abs(vector(model) - exact).max() <= 5 * np.finfo(np.float32).eps * np.abs(vectors(5)).max()


def test_a_greedy_soup_is_that_of_a_second_implementation(sources: Any) -> None:
    model = model_with(np.zeros(8, np.float32))
    soup = ad.greedy_soup(model, sources, loss=measured)
    best, ingredients = greedy(vectors(5), distance)
    assert (soup.kind, soup.metric, list(soup.members)) == ("greedy", best, ingredients)
    assert len(ingredients) in (2, 3, 4) and best < min(soup.metrics.values()) == distance(vectors(5)[ingredients[0]])
    assert np.array_equal(vector(model), running_mean([vectors(5)[each] for each in ingredients]))


@pytest.mark.parametrize("draw", range(8))
def test_greedy_soups_are_never_worse_than_their_best_member(draw: int) -> None:
    own = [vector_of(1000 + 10 * draw + index) for index in range(2 + draw % 6)]
    model = model_with(own[0])
    soup = ad.greedy_soup(model, [model_with(each).state_dict() for each in own], score=lambda m: -measured(m))
    assert (-soup.metric if soup.metric else 0.0, list(soup.members)) == greedy(own, distance)
    assert soup.metric == -measured(model) >= max(soup.metrics.values())


def test_a_metric_without_parameters_evaluates_the_given_model() -> None:
    """Regression: TypeError after the training, because step() calls evaluate() and this function evaluate(model)."""
    own = [vector_of(seed) for seed in range(5)]

    async def main(world: ad.World) -> tuple[Any, Any]:
        models = [model_with(own[world.rank]) for _ in range(2)]
        of_model = await ad.best_of_population(models[0], loss=measured)
        without = await ad.best_of_population(models[1], loss=lambda scale=1.0: scale * measured(models[1]))
        assert torch.equal(models[0].weight, models[1].weight)
        return of_model, without

    for of_model, without in ad.run_local(main, ranks=5, strict=True):
        assert of_model == without


def test_a_metric_with_other_parameters_is_refused() -> None:
    model = model_with(vector_of(0))
    with pytest.raises(TypeError, match=r"loss must be callable with the model .*\(a, b\)"):
        ad.greedy_soup(model, [model.state_dict()] * 2, loss=lambda a, b: a + b)


def test_the_models_own_weights_may_be_a_source() -> None:
    model = model_with(np.float32([1.0] * 8))
    other = model_with(np.float32([3.0] * 8)).state_dict()
    soup = ad.greedy_soup(model, [model.state_dict(), other], loss=lambda m: (m.weight - 1).square().sum())
    assert soup.members == (0,) and vector(model).tolist() == [1.0] * 8


@pytest.mark.parametrize("is_greedy", [False, True])
def test_a_soup_of_one_model_is_that_model(is_greedy: bool) -> None:
    model = model_with(np.zeros(8, np.float32))
    own: Any = (ad.greedy_soup(model, states(1), loss=measured)) if is_greedy else ad.uniform_soup(model, states(1))
    assert own.members == (0,) and np.array_equal(vector(model), vectors(1)[0])


@pytest.mark.parametrize("form", ["memory", "torch", "safetensors"])
def test_every_kind_of_entry_is_averaged(form: str, tmp_path: Path) -> None:
    members = [Mixed(seed) for seed in range(3)]
    given: list[Any] = [member.state_dict() for member in members]
    if form == "torch":
        for index, state in enumerate(given):
            torch.save(state, tmp_path / f"{index}.pt")
        given = sorted(tmp_path.iterdir())
    elif form == "safetensors":  # without complex numbers, and with a single name for tied weights
        for index, member in enumerate(members):
            del member.wave
            save_model(member, str(tmp_path / f"{index}.safetensors"))
        given = sorted(tmp_path.iterdir())
    model = Mixed(7)
    if form == "safetensors":
        del model.wave
    ad.uniform_soup(model, given)
    for name, tensor in model.state_dict().items():
        parts = [member.state_dict()[name] for member in members]
        if tensor.is_complex():
            tensor, parts = torch.view_as_real(tensor), [torch.view_as_real(part) for part in parts]
        if tensor.is_floating_point():
            expected = torch.from_numpy(np.asarray(running_mean([to_numpy(part) for part in parts])))
            assert torch.equal(tensor, expected.to(tensor.dtype)), name
        else:
            assert torch.equal(tensor, parts[0]), name
    assert model.tied is model.first


@pytest.fixture(params=["torch", "safetensors"])
def population(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """Return a folder with four checkpoints of two ranks: rank r has the vector 10 * checkpoint + r."""

    async def main(world: ad.World) -> None:
        model = model_with(vector_of(0))
        optimizer = torch.optim.Adam(model.parameters())
        for checkpoint in range(4):
            model.weight.data.copy_(torch.from_numpy(vector_of(10 * checkpoint + world.rank)))
            await ad.save_population(tmp_path / "saved", model, optimizer, format=request.param)

    ad.run_local(main, ranks=2, strict=True)
    return tmp_path / "saved"


def test_folders_of_save_population_are_sources(population: Path) -> None:
    model = model_with(np.zeros(8, np.float32))

    def mean(*numbers: int) -> np.ndarray[Any, Any]:
        return running_mean([vector_of(number) for number in numbers])

    ad.uniform_soup(model, population)
    assert np.array_equal(vector(model), mean(30, 31))
    ad.uniform_soup(model, [population / "checkpoint-000002", population])
    assert np.array_equal(vector(model), mean(10, 11, 30, 31))
    ad.lawa(model, population, last=3, rank=1)
    assert np.array_equal(vector(model), mean(11, 21, 31))
    assert ad.lawa(model, population).members == tuple(range(8))
    assert np.array_equal(vector(model), mean(0, 1, 10, 11, 20, 21, 30, 31))
    ad.lawa(model, states(9), last=2)
    assert np.array_equal(vector(model), mean(87, 88))
    (population / "checkpoint-000004" / "manifest.json").unlink()  # as after a save that was killed
    ad.lawa(model, population, last=2, rank=0)
    assert np.array_equal(vector(model), mean(10, 20))
    with pytest.raises(ValueError, match=r"rank must be one of \[0, 1\], .* got 2"):
        ad.lawa(model, population, rank=2)


def test_lawa_counts_checkpoints_in_a_list_of_folders(population: Path) -> None:
    """Regression: ``last`` counted the models of all ranks, and ``rank`` was refused for a list of folders."""
    model = model_with(np.zeros(8, np.float32))

    def mean(*numbers: int) -> np.ndarray[Any, Any]:
        return running_mean([vector_of(number) for number in numbers])

    folders = sorted(population.iterdir())
    assert ad.lawa(model, folders, last=2).members == (0, 1, 2, 3)
    assert np.array_equal(vector(model), mean(20, 21, 30, 31))
    ad.lawa(model, iter(folders[:3]), last=2, rank=1)
    assert np.array_equal(vector(model), mean(11, 21))
    with pytest.raises(ValueError, match=naming("rank", "0", "folder")):
        ad.lawa(model, [*folders, states(1)[0]], rank=0)
    with pytest.raises(TypeError, match=naming("sources[4]", "int")):
        ad.lawa(model, [*folders, 5], last=2)  # type: ignore[list-item]


def test_models_with_nan_are_left_out_and_logged(caplog: pytest.LogCaptureFixture) -> None:
    given = states(4)
    given[1]["weight"][0, 3] = math.nan
    model = model_with(np.zeros(8, np.float32))
    assert ad.uniform_soup(model, given).members == (0, 2, 3)
    own = ad.greedy_soup(model, given, loss=lambda m: math.inf if vector(m)[0] == vectors(4)[2][0] else measured(m))
    assert not {1, 2} & set(own.members) and math.isnan(own.metrics[1]) and own.metrics[2] == math.inf
    assert all(f"sources[{index}]" in caplog.text for index in (1, 2))


def test_a_soup_that_is_far_worse_is_warned_of(caplog: pytest.LogCaptureFixture) -> None:
    """The two networks are equal except for the order of their hidden units, as if they had different trajectories."""

    async def main(world: ad.World) -> str:
        model = model_with(np.float32([1, 5, 1, 5, 1, 5, 1, 5]) if world.rank else np.float32([5, 1] * 4))
        soup = await ad.best_of_population(model, loss=lambda m: -m.weight.square().sum())
        return soup.kind

    assert ad.run_local(main, ranks=2, strict=True) == ["best", "best"]
    assert caplog.text.count("trajectory") == 1
    given = [model_with(np.float32([5, 1] * 4)).state_dict(), model_with(np.float32([1, 5] * 4)).state_dict()]
    ad.greedy_soup(model_with(vector_of(0)), given, score=lambda m: m.weight.square().sum())
    assert caplog.text.count("trajectory") == 2


def test_a_metric_of_local_data_is_warned_of(caplog: pytest.LogCaptureFixture) -> None:
    async def main(world: ad.World, share: float) -> None:
        model = model_with(vector_of(world.rank))
        await ad.best_of_population(model, loss=lambda m: (1 + share * world.rank) * measured(m))

    ad.run_local(main, 0.001, ranks=3, strict=True)
    assert "data" not in caplog.text
    ad.run_local(main, 0.5, ranks=3, strict=True)
    assert caplog.text.count("same held-out data") == 1


def test_a_rank_that_alone_measures_nan_is_warned_of(caplog: pytest.LogCaptureFixture) -> None:
    """Regression: a finite number and NaN, measured for equal weights, counted as equal."""

    async def main(world: ad.World) -> None:
        model, count = model_with(vector_of(world.rank)), 0

        def loss(of: nn.Module) -> float:
            nonlocal count
            count += 1
            return math.nan if world.rank == 1 and count > 1 else float(measured(of))

        await ad.best_of_population(model, loss=loss)

    ad.run_local(main, ranks=3, strict=True)
    assert caplog.text.count("same held-out data") == 1


def test_missing_statistics_are_warned_of(caplog: pytest.LogCaptureFixture) -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    given = [copy.deepcopy(model.state_dict()) for _ in range(2)]
    ad.uniform_soup(model, given, loader=[torch.randn(4, 2)])
    assert "BatchNorm" not in caplog.text and model[1].num_batches_tracked == 1
    ad.uniform_soup(model, given)
    assert "BatchNorm" in caplog.text and model.training


def tensors_nbytes(folder: Path | None = None) -> int:
    """Return the bytes of all tensors in memory, except tensors that are mapped from files in a folder."""
    gc.collect()  # frees tensors of other tests, which would otherwise be freed during this test
    lines = Path("/proc/self/maps").read_text().splitlines() if folder else []
    mapped = [line.split()[0].split("-") for line in lines if str(folder) in line]
    spans = [(int(first, 16), int(end, 16)) for first, end in mapped]
    storages = {}
    for each in gc.get_objects():
        if type(each) in (torch.Tensor, nn.Parameter) and each.layout == torch.strided:  # other tensors have no storage
            place = each.untyped_storage().data_ptr()
            if not any(first <= place < end for first, end in spans):
                storages[place] = each.untyped_storage().nbytes()
    return sum(storages.values())


@pytest.mark.slow
def test_no_soup_keeps_several_models_in_memory(tmp_path: Path) -> None:
    """In addition to the model, memory contains its own weights, the mean, and one of its tensors."""
    size = 500_000
    nbytes = 4 * 4 * size
    for index in range(6):
        torch.save(
            nn.ParameterList(torch.full((size,), float(index)) for _ in range(4)).state_dict(), tmp_path / f"{index}"
        )
    model = nn.ParameterList(torch.zeros(size) for _ in range(4))
    before = tensors_nbytes()
    peaks: list[int] = []
    counts = itertools.count()

    def loss(_: nn.Module) -> float:
        count = next(counts)
        if count in (2, 8, 10):  # examining all objects takes a while
            peaks.append(tensors_nbytes(tmp_path) - before)
        return -float(count)

    assert len(ad.greedy_soup(model, sorted(tmp_path.iterdir()), loss=loss).members) == 6
    assert nbytes < max(peaks) <= 2 * nbytes + 4 * size


@pytest.mark.slow
def test_a_population_keeps_two_models_in_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """In addition to the model, memory contains its own weights, the mean, and one piece."""
    size, ranks, piece = 500_000, 5, 50_000
    before = tensors_nbytes()
    nbytes = 4 * size
    monkeypatch.setattr(streaming, "_PIECE_COUNT", piece)
    peaks: list[int] = []
    add, turns = streaming.running_mean_into, itertools.count()

    def noting(*args: Any) -> None:
        if next(turns) % 101 == 0:  # examining all objects takes a while
            peaks.append(tensors_nbytes() - before)
        add(*args)

    async def main(world: ad.World) -> int:
        model = nn.ParameterList([torch.full((size,), float(world.rank))])
        calls = iter(range(100))
        soup = await ad.best_of_population(model, loss=lambda _: -float(next(calls)))
        return len(soup.members)

    monkeypatch.setattr(streaming, "running_mean_into", noting)
    assert ad.run_local(main, ranks=ranks, strict=True) == [ranks] * ranks
    assert len(peaks) > 3 and 2 * ranks * nbytes < max(peaks) < 3.2 * ranks * nbytes


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_ema_is_the_bias_corrected_average(dtype: torch.dtype) -> None:
    decay, steps = 0.9, 40
    model = nn.Sequential(nn.Linear(1, 1), nn.BatchNorm1d(1)).to(dtype)
    averaged = ad.ema(model, decay)
    values = []
    for step in range(steps):
        for tensor in model.state_dict().values():
            tensor.fill_(step * step % 13)
        values.append(float(step * step % 13))
        averaged = pickle.loads(pickle.dumps(averaged)) if step == 20 else averaged
        averaged.update_parameters(model)
        weights = decay ** np.arange(step, -1, -1)
        expected = float(np.dot(weights, values) / weights.sum())
        for name, tensor in averaged.module.state_dict().items():
            if tensor.is_floating_point():
                assert tensor.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
                assert float(tensor.flatten()[0]) == pytest.approx(
                    expected, rel=1e-12 if dtype == torch.float64 else 1e-5
                ), name
            else:
                assert int(tensor) == values[-1]
    model.load_state_dict(averaged.module.state_dict())
    assert next(model.parameters()).dtype == dtype


def test_ema_of_small_updates_moves_in_low_precision() -> None:
    """An average in bfloat16 would stay at 256 forever: an update of 0.1 % of a difference of 2 is rounded away."""
    model = nn.ParameterList([torch.tensor([256.0], dtype=torch.bfloat16)])
    averaged = ad.ema(model, 0.99)
    averaged.update_parameters(model)
    model[0].data += 2
    for _ in range(1000):
        averaged.update_parameters(model)
    assert averaged.module[0].item() == pytest.approx(258.0, abs=0.01)


@pytest.mark.parametrize("decay", [0.0, 0.9])
def test_ema_of_infinities_and_of_the_largest_values(decay: float) -> None:
    model = nn.Module()
    largest = torch.finfo(torch.float32).max
    model.register_buffer("mask", torch.tensor([0.0, -math.inf, math.inf, largest, largest]))
    averaged = ad.ema(model, decay)
    for last in (largest, -largest, -largest):
        model.get_buffer("mask")[4] = last
        averaged.update_parameters(model)
    found = averaged.module.get_buffer("mask")
    assert found[:4].tolist() == [0.0, -math.inf, math.inf, largest] and -largest <= found[4] < largest / 2


def test_tied_weights_stay_tied_in_an_average() -> None:
    averaged = ad.ema(Mixed(0), 0.0)
    assert averaged.module.tied is averaged.module.first
    averaged.update_parameters(Mixed(1))
    averaged.update_parameters(Mixed(2))
    assert torch.equal(averaged.module.first, Mixed(2).first)


MODEL = nn.Linear(2, 1)
OTHER = nn.Linear(3, 1).state_dict()


@pytest.mark.parametrize(
    ("call", "kind", "facts"),
    [
        (lambda: ad.uniform_soup(MODEL, []), ValueError, ("sources", "at least one")),
        (lambda: ad.uniform_soup(MODEL, [OTHER]), ValueError, ("sources[0]", "'weight'", "(1, 2)", "(1, 3)")),
        (lambda: ad.greedy_soup(MODEL, [MODEL.state_dict(), OTHER], loss=lambda _: 1), ValueError, ("sources[1]",)),
        (lambda: ad.uniform_soup(MODEL, [{}]), ValueError, ("sources[0]", "'weight'")),
        (lambda: ad.uniform_soup(MODEL, MODEL.state_dict()), TypeError, ("sources", "sequence")),
        (lambda: ad.uniform_soup(MODEL, [MODEL]), TypeError, ("sources[0]", "Linear", "state dict")),  # type: ignore[list-item]
        (lambda: ad.uniform_soup(MODEL, 5), TypeError, ("sources", "int")),  # type: ignore[arg-type]
        (lambda: ad.uniform_soup(MODEL, ["missing.pt"]), FileNotFoundError, ("missing.pt",)),
        (lambda: ad.uniform_soup("x", []), ValueError, ("sources",)),  # type: ignore[arg-type]
        (lambda: ad.uniform_soup("x", [OTHER]), TypeError, ("model", "str")),  # type: ignore[arg-type]
        (lambda: ad.uniform_soup(MODEL, [OTHER], loader=iter([])), TypeError, ("loader", "several times")),
        (lambda: ad.greedy_soup(MODEL, [MODEL.state_dict()]), TypeError, ("loss", "score", "neither")),
        (lambda: ad.greedy_soup(MODEL, [MODEL.state_dict()], loss=5), TypeError, ("loss", "5")),  # type: ignore[arg-type]
        (lambda: ad.greedy_soup(MODEL, [MODEL.state_dict()], loss=lambda _: None), TypeError, ("loss", "None")),
        (lambda: ad.greedy_soup(MODEL, [MODEL.state_dict()], score=lambda _: math.nan), ValueError, ("finite", "nan")),
        (lambda: ad.lawa(MODEL, [MODEL.state_dict()], last=0), ValueError, ("last", "0")),
        (lambda: ad.lawa(MODEL, [MODEL.state_dict()], rank=0), ValueError, ("rank", "0")),
        (lambda: ad.lawa(MODEL, [MODEL.state_dict()], rank=True), ValueError, ("rank", "True", "integer")),
        (lambda: ad.ema(MODEL, 1.0), ValueError, ("decay", "1.0", "below 1")),
        (lambda: ad.ema(MODEL, -0.1), ValueError, ("decay", "-0.1")),
        (lambda: ad.ema(MODEL, math.nan), ValueError, ("decay", "nan")),
        (lambda: ad.ema("x"), TypeError, ("model", "str")),  # type: ignore[arg-type]
    ],
)
def test_wrong_input_is_named_and_changes_nothing(
    call: Callable[[], Any], kind: type[Exception], facts: tuple[str, ...]
) -> None:
    before = copy.deepcopy(MODEL.state_dict())
    with pytest.raises(kind, match=naming(*facts)):
        call()
    assert all(torch.equal(tensor, before[name]) for name, tensor in MODEL.state_dict().items()) and MODEL.training


def test_a_file_with_other_content_is_named(tmp_path: Path) -> None:
    (tmp_path / "noise.pt").write_bytes(b"noise")
    torch.save(torch.ones(2), tmp_path / "tensor.pt")
    (tmp_path / "noise.safetensors").write_bytes(b"noise")
    for path in tmp_path.iterdir():
        with pytest.raises(ValueError, match=naming(str(path))):
            ad.uniform_soup(MODEL, [path])
    with pytest.raises(FileNotFoundError, match=naming(str(tmp_path))):
        ad.uniform_soup(MODEL, tmp_path)


def test_the_refused_content_of_a_file_is_named(tmp_path: Path) -> None:
    """Regression: the error ended within torch's advice to pass weights_only=False, and contained raw escapes."""
    torch.save(MODEL, tmp_path / "model.pt")
    with pytest.raises(ValueError, match=r"UnpicklingError: torch.load\(weights_only=True\) refuses torch.nn\."):
        ad.uniform_soup(MODEL, [tmp_path / "model.pt"])
    header = b'{"w":{"dtype":"F\\u001b[31m","shape":[2],"data_offsets":[0,8]}}'
    (tmp_path / "escapes.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + bytes(8))
    with pytest.raises(ValueError, match=r"SafetensorError: .*F\\x1b\[31m"):
        ad.uniform_soup(MODEL, [tmp_path / "escapes.safetensors"])


def test_an_empty_loader_would_leave_no_statistics() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    model[1].running_mean.fill_(3.0)
    given = [copy.deepcopy(model.state_dict()) for _ in range(2)]
    with pytest.raises(ValueError, match=naming("loader", "at least one batch")):
        ad.uniform_soup(model, given, loader=[])
    assert (model[1].running_mean == 3.0).all()


def test_an_unfit_batch_leaves_the_momenta_of_batchnorm() -> None:
    """Regression: BatchNorm.momentum was None afterwards, so that training used cumulative averages."""
    model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2, momentum=0.3), nn.BatchNorm1d(2, momentum=None))
    given = [copy.deepcopy(model.state_dict()) for _ in range(2)]
    with pytest.raises(RuntimeError):
        ad.uniform_soup(model, given, loader=[torch.randn(4, 2), torch.randn(4, 5)])
    assert [layer.momentum for layer in model[1:]] == [0.3, None] and model.training


def test_a_check_of_a_loader_does_not_begin_to_read_it() -> None:
    """Regression: it started the loader's workers, and drew from torch's generator."""
    before = torch.get_rng_state()
    check_loader(torch.utils.data.DataLoader([1, 2], shuffle=True))  # type: ignore[arg-type]
    check_loader([1, 2])
    assert torch.equal(before, torch.get_rng_state())
    for wrong in (iter([1, 2]), (each for each in [1]), 3):
        with pytest.raises(TypeError, match=naming("loader")):
            check_loader(wrong)


def test_the_blocking_face_chooses_too() -> None:
    def main(world: ad.blocking.World) -> Any:
        model = model_with(vector_of(world.rank))
        soup = ad.blocking.best_of_population(model, loss=measured)
        return soup, measured(model)

    own = ad.run_local(ad.blocking.hosted(main), ranks=3)
    assert own[0] == own[1] == own[2] and own[0][0].metric == own[0][1]


@pytest.fixture(autouse=True)
def _logs(caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    with caplog.at_level(logging.WARNING, "asyncdist.soups"):
        yield
