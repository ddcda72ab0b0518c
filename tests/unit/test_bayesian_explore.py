"""Tests the Gaussian process of PB2 against its formula in numpy, and its suggestions."""

from __future__ import annotations

import dataclasses
import math
import random
import sys
from typing import Any

import numpy as np
import pytest
from support.facts import names

from protocols import BayesianExplore, Range
from protocols.population_training.bayesian import Observation, Observations
from protocols.population_training.hyperparameters import Choice

LR = {"lr": Range(1e-4, 1.0)}


def observed(count: int, best: float, seed: int = 0, begin: int = 0) -> list[Observation]:
    """Return observations whose gain is largest at a learning rate of 10 ** best."""
    generator = random.Random(seed)
    found = []
    for number in range(count):
        rate = LR["lr"].draw(generator)
        gain = -((math.log10(rate) - best) ** 2) + generator.gauss(0.0, 0.05)  # type: ignore[arg-type]
        found.append(Observation(number % 4, begin + 10 * (number // 4), generator.random(), gain, {"lr": rate}))
    return found


@pytest.mark.slow
def test_the_process_is_that_of_the_formula() -> None:
    explore, generator = BayesianExplore(), np.random.default_rng(0)
    points, wanted = generator.random((12, 4)), generator.random((5, 4))
    gains = np.sin(3 * points[:, 2]) + points[:, 3]
    model = explore.fitted(points, gains)
    parameters = model.kernel_.get_params()
    variance = parameters["k1__k1__k1__constant_value"]
    length = np.array(parameters["k1__k1__k2__length_scale"])[1:]
    forgetting = parameters["k1__k2__length_scale"][0]
    noise = parameters["k2__noise_level"]

    def kernel(one: Any, two: Any) -> Any:
        near = (((one[:, None, 1:] - two[None, :, 1:]) / length) ** 2).sum(-1)
        return variance * np.exp(-near / 2) * np.exp(-np.abs(one[:, None, 0] - two[None, :, 0]) / forgetting)

    inverse = np.linalg.inv(kernel(points, points) + (noise + 1e-8) * np.eye(12))
    mean = kernel(wanted, points) @ inverse @ gains
    cross = kernel(wanted, points)
    deviation = np.sqrt(variance + noise - np.einsum("ij,jk,ik->i", cross, inverse, cross))
    found = model.predict(wanted, return_std=True)
    np.testing.assert_allclose(found[0], mean, rtol=1e-6, atol=1e-8)
    np.testing.assert_allclose(found[1], deviation, rtol=1e-6, atol=1e-8)


@pytest.mark.long
def test_suggestions_are_near_the_largest_gain() -> None:
    explore = BayesianExplore(candidate_count=300)
    for best in (-3.0, -1.0):
        found = explore.suggest(LR, observed(60, best), 160, 0.5, random.Random(1))
        assert abs(math.log10(found["lr"]) - best) < 0.4, found  # type: ignore[arg-type]


@pytest.mark.long
def test_old_observations_count_less() -> None:
    both = observed(40, -3.0) + observed(40, -1.0, seed=1, begin=2000)
    found = BayesianExplore(candidate_count=300).suggest(LR, both, 2100, 0.5, random.Random(1))
    assert math.log10(found["lr"]) > -2.0  # type: ignore[arg-type]


def test_little_knowledge_suggests_nothing() -> None:
    explore = BayesianExplore()
    assert explore.suggest(LR, observed(3, -1.0), 10, 0.5, random.Random(0)) == {}
    assert explore.suggest(LR, observed(20, -1.0), 10, None, random.Random(0)) == {}
    assert explore.suggest({"depth": Choice([1, 2])}, observed(20, -1.0), 10, 0.5, random.Random(0)) == {}


def test_gains_are_measured_between_reports() -> None:
    mine = Observations(3)
    for iteration, metric in ((10, 1.0), (20, 2.0), (30, math.nan), (40, 4.0), (60, 3.0)):
        mine.note(5, iteration, metric, {"lr": 0.1})
    assert [(each.iteration, each.metric, each.gain) for each in mine.entries] == [(20, 1.0, 0.1), (60, 4.0, -0.05)]
    theirs = Observations(3)
    theirs.note(6, 100, 7.0, {"lr": 0.2})
    theirs.note(6, 110, 8.0, {"lr": 0.2})
    copy = mine.inherited(Observations.unpacked(theirs.packed(), 3), shift=-45)
    copy.note(5, 70, 9.0, {"lr": 0.3})  # the donor's last report was at 65 of this rank's iterations
    assert [(each.rank, each.iteration) for each in copy.entries] == [(5, 60), (5, 70), (6, 110)]
    assert copy.entries[1].gain == pytest.approx(0.2) and copy.entries[1].metric == 8.0


def test_a_missing_library_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "sklearn", None)
    monkeypatch.setitem(sys.modules, "sklearn.gaussian_process", None)
    with pytest.raises(ModuleNotFoundError) as caught:
        BayesianExplore()
    assert names(caught.value, "BayesianExplore", "sklearn", "asyncdist[bayesian]")


@pytest.mark.parametrize("options", [{"window": 1}, {"candidate_count": 0}])
def test_wrong_arguments_are_refused(options: dict[str, int]) -> None:
    (name,) = options
    with pytest.raises(ValueError) as caught:
        BayesianExplore(**options)
    assert names(caught.value, name)


def test_observations_outside_a_changed_range_are_clipped() -> None:
    """Regression: a resumed job with another range raised ValueError, as for the logarithm of 0."""
    entries = [
        dataclasses.replace(each, hyperparameters={"lr": 0.0 if index % 2 else 5.0})
        for index, each in enumerate(observed(9, -1.0))
    ]
    found = BayesianExplore(candidate_count=9).suggest(LR, entries, 160, 0.5, random.Random(1))
    assert found["lr"] == LR["lr"].clipped(found["lr"])
