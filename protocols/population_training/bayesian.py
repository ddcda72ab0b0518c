"""Chooses hyperparameters with a Gaussian process that models the gains of earlier choices (PB2, 2002.02518).

An observation is the gain of a rank's metric per step between two reports, together with the iteration, the earlier
metric and the hyperparameters. A rank knows its own observations, and the observations of the ranks that it has copied,
which arrive with these ranks' snapshots. No further message is needed, but no rank knows all observations.
"""

from __future__ import annotations

import json
import math
import random
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from asyncdist import validation
from asyncdist.protocols.population_training.hyperparameters import Range, Space, Value

#: Length scale at which a kernel ignores a dimension.
_IGNORED: Final = 1e6
#: Constants of the upper confidence bound: mean + sqrt(0.2 ln(0.4 n)) * deviation, with n observations.
_UCB: Final = (0.2, 0.4)


@dataclass(frozen=True, slots=True)
class Observation:
    """Records the gain of one rank's metric between two reports.

    Attributes:
        iteration: Iteration of the second report.
        metric: Metric of the first report; larger is better.
        gain: Gain of the metric per step.
    """

    rank: int
    iteration: int
    metric: float
    gain: float
    hyperparameters: Mapping[str, Any] = field(hash=False)


class Observations:
    """Keeps the newest ``count_max`` observations that a rank knows.

    Attributes:
        entries: Observations, sorted by iteration.
    """

    def __init__(
        self, count_max: int, entries: Sequence[Observation] = (), last: tuple[int, float] | None = None
    ) -> None:
        self._count_max = count_max
        self._last = last  # iteration and metric of the last report with these weights
        self.entries = self._newest(entries)

    def note(self, rank: int, iteration: int, metric: float, values: Mapping[str, Value]) -> None:
        """Record the gain since the previous report, if it is finite. A larger metric is better."""
        if self._last is not None and iteration > self._last[0]:
            gain = (metric - self._last[1]) / (iteration - self._last[0])
            if math.isfinite(gain):
                entry = Observation(rank, iteration, self._last[1], gain, dict(values))
                self.entries = self._newest([*self.entries, entry])
        self._last = (iteration, metric) if math.isfinite(metric) else None

    def inherited(self, donor: Observations, shift: int) -> Observations:
        """Return the observations of this rank and of ``donor``, whose weights this rank has copied.

        Args:
            shift: This rank's iteration minus the donor's.
        """
        last = None if donor._last is None else (donor._last[0] + shift, donor._last[1])
        known = {(each.rank, each.iteration): each for each in (*self.entries, *donor.entries)}
        return Observations(self._count_max, tuple(known.values()), last)

    def packed(self) -> str:
        """Return the observations as a string that :meth:`unpacked` reads."""
        rows = [[e.rank, e.iteration, e.metric, e.gain, dict(e.hyperparameters)] for e in self.entries]
        return json.dumps([self._last, rows])

    @classmethod
    def unpacked(cls, text: str, count_max: int) -> Observations:
        """Return the observations that :meth:`packed` has packed."""
        last, rows = json.loads(text)
        entries = [Observation(int(r), int(i), float(m), float(g), dict(h)) for r, i, m, g, h in rows]
        return cls(count_max, entries, None if last is None else (int(last[0]), float(last[1])))

    def _newest(self, entries: Sequence[Observation]) -> tuple[Observation, ...]:
        ordered = sorted(entries, key=lambda each: (each.iteration, each.rank))
        return tuple(ordered[max(0, len(ordered) - self._count_max) :])


class BayesianExplore:
    """Explores with a Gaussian process (PB2): ``PopulationTrainingPolicy(..., explore=BayesianExplore())``.

    The process models the gain of the metric per step as a function of the iteration, the metric and the
    hyperparameters. Old observations count less. The new hyperparameters are the random candidate with the largest
    upper confidence bound of the gain. Only ranges are modelled. Choices and functions are perturbed. Ranges are
    perturbed as well until enough observations are known.

    The process is fitted inside ``step``, on the replaced rank only.

    Args:
        window: Number of observations that a rank keeps.
        candidate_count: Number of random candidates.

    Raises:
        ModuleNotFoundError: scikit-learn is not installed.
        ValueError: An argument is out of range.
    """

    def __init__(self, *, window: int = 200, candidate_count: int = 1000) -> None:
        self.window = validation.count("window", window, least=4)
        self.candidate_count = validation.count("candidate_count", candidate_count, least=1)
        with validation.optional_imports("BayesianExplore", ["sklearn"], "bayesian"):
            import sklearn.gaussian_process as found
        self._library: Any = found

    def __call__(self, values: dict[str, Any], generator: random.Random) -> Mapping[str, Any]:
        """Raise TypeError. The policy calls :meth:`suggest` instead."""
        raise TypeError("BayesianExplore can only be passed as the option explore")

    def suggest(
        self,
        spaces: Mapping[str, Space],
        entries: Sequence[Observation],
        iteration: int,
        metric: float | None,
        generator: random.Random,
    ) -> dict[str, Value]:
        """Return values for all ranges in ``spaces``, or {} if there are too few observations.

        Args:
            entries: Known observations.
            iteration, metric: This rank's iteration, and the metric of the copied weights; larger is better.
        """
        ranges = {name: space for name, space in spaces.items() if isinstance(space, Range)}
        if not ranges or metric is None or not math.isfinite(metric) or len(entries) < len(ranges) + 3:
            return {}
        candidates = [
            {name: space.draw(generator) for name, space in ranges.items()} for _ in range(self.candidate_count)
        ]
        points = _points([(each.iteration, each.metric, each.hyperparameters) for each in entries], ranges)
        wanted = _points([(iteration, metric, each) for each in candidates], ranges)
        bounds = self.bounds_of(points, np.array([each.gain for each in entries]), wanted)
        return candidates[int(np.argmax(bounds))]

    def bounds_of(
        self, points: NDArray[np.float64], gains: NDArray[np.float64], wanted: NDArray[np.float64]
    ) -> NDArray[np.float64]:
        """Return the upper confidence bound of the standardised gain at each point of ``wanted``.

        Args:
            points, wanted: Arrays of shape (count, 2 + number of ranges), with rows of the iteration, the metric, and
                values scaled to 0 to 1.
            gains: Gains at ``points``.
        """
        scaled = _standardised(points, wanted)
        model = self.fitted(scaled[: len(points)], (gains - gains.mean()) / (gains.std() or 1.0))
        mean, deviation = model.predict(scaled[len(points) :], return_std=True)
        factor = math.sqrt(max(0.0, _UCB[0] * math.log(_UCB[1] * len(points))))
        found: NDArray[np.float64] = mean + factor * deviation
        return found

    def fitted(self, points: NDArray[np.float64], targets: NDArray[np.float64]) -> Any:
        """Return a Gaussian process whose kernel parameters have the largest likelihood.

        The kernel is v exp(-|x - x'|^2 / 2 l^2) exp(-|t - t'| / d) plus a variance for noise. x are the metric and the
        hyperparameters, and t is the iteration. The second factor is the paper's (1 - e)^(|t - t'| / 2).
        """
        kernels, count = self._library.kernels, points.shape[1]
        ignored, free = (_IGNORED, _IGNORED), (0.05, 10.0)
        likeness = kernels.RBF([_IGNORED] + [1.0] * (count - 1), [ignored] + [free] * (count - 1))
        forgetting = kernels.Matern([1.0] + [_IGNORED] * (count - 1), [(0.1, 100.0)] + [ignored] * (count - 1), nu=0.5)
        noise = kernels.WhiteKernel(0.1, (1e-4, 1.0))
        kernel = kernels.ConstantKernel(1.0, (0.01, 10.0)) * likeness * forgetting + noise
        with np.errstate(all="ignore"), warnings.catch_warnings(action="ignore"):
            return self._library.GaussianProcessRegressor(kernel, alpha=1e-8, random_state=0).fit(points, targets)


def _points(rows: Sequence[tuple[int, float, Mapping[str, Any]]], ranges: Mapping[str, Range]) -> NDArray[np.float64]:
    """Convert rows of iteration, metric and hyperparameters to points. A resumed job may have other ranges."""

    def units(values: Mapping[str, Any]) -> list[float]:
        nearest: dict[str, Any] = {name: each.clipped(values[name]) for name, each in ranges.items()}
        return [each.unit(nearest[name]) for name, each in ranges.items()]

    return np.array([[time, metric, *units(values)] for time, metric, values in rows])


def _standardised(points: NDArray[np.float64], wanted: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return all points, with iterations scaled to 0 to 1, and metrics to mean 0 and deviation 1."""
    found = np.concatenate([points, wanted])
    first, last = found[:, 0].min(), found[:, 0].max()
    found[:, 0] = (found[:, 0] - first) / max(1.0, last - first)
    found[:, 1] = (found[:, 1] - points[:, 1].mean()) / (points[:, 1].std() or 1.0)
    return found
