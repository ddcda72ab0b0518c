"""Samples the durations of a simulation: the latency of each message on a link, and the time of each step."""

from __future__ import annotations

import functools
import random
from collections.abc import Callable
from dataclasses import dataclass
from math import tau
from types import SimpleNamespace
from typing import Any, TypeAlias

from asyncdist import validation

try:
    import cython
except ImportError:  # Cython is needed to compile the module, not to run it
    cython = SimpleNamespace(compiled=False)

if not cython.compiled:  # compiled code calls C's math functions instead of Python's
    from math import cos, exp, log, sin, sqrt


def check_number(name: str, value: Any, *, above_zero: bool = False) -> float:
    """Return ``value``, converted to Python's float if it is another library's number, such as NumPy's.

    Raise ValueError unless it is a finite number >= 0, or > 0 if ``above_zero`` is true.
    """
    allowed = f"{'>' if above_zero else '>='} 0 and finite"
    number = validation.real(name, value, allowed, low=validation.SMALLEST if above_zero else 0.0)
    return value if type(value) is int else number


def store(model: Any, field: str, value: Any) -> None:
    """Replace a field of a frozen dataclass with its checked value."""
    object.__setattr__(model, field, value)


@dataclass(frozen=True, slots=True)
class Uniform:
    """Samples uniformly distributed durations between ``low`` and ``high`` seconds."""

    low: float
    high: float

    def __post_init__(self) -> None:
        store(self, "low", check_number("Uniform.low", self.low))
        store(self, "high", check_number("Uniform.high", self.high))
        if self.high < self.low:
            raise ValueError(f"Uniform.high must be >= low={self.low}, got {self.high}")

    def draw(self, rng: random.Random) -> float:
        """Sample one duration, in seconds."""
        return self.low + (self.high - self.low) * rng.random()


@dataclass(frozen=True, slots=True)
class Exponential:
    """Samples exponentially distributed durations with the given mean, in seconds."""

    mean: float

    def __post_init__(self) -> None:
        store(self, "mean", check_number("Exponential.mean", self.mean))

    def draw(self, rng: random.Random) -> float:
        """Sample one duration, in seconds."""
        return rng.expovariate(1.0 / self.mean) if self.mean else 0.0


@dataclass(frozen=True, slots=True)
class LogNormal:
    """Samples log-normal durations: mostly near the median, occasionally far above it, like network latencies."""

    median: float
    sigma: float = 0.5

    def __post_init__(self) -> None:
        store(self, "median", check_number("LogNormal.median", self.median))
        sigma = validation.real("LogNormal.sigma", self.sigma, "a number from 0 to 30", low=0.0, high=30.0)
        if type(self.sigma) is not int:
            store(self, "sigma", sigma)

    def draw(self, rng: random.Random) -> float:
        """Sample one duration, in seconds."""
        return self.median * exp(rng.gauss(0.0, self.sigma)) if self.median else 0.0


class LogNormalSampler:
    """Samples log-normal durations, with ``random.gauss`` inlined for speed.

    Like ``gauss``, stores the second normal variate of each pair in the generator's ``gauss_next``. ``median`` is in
    seconds. ``sigma`` is the standard deviation of the durations' logarithm.
    """

    def __init__(self, median: float, sigma: float, generator: random.Random) -> None:
        self._median = median
        self._sigma = sigma
        self._rng: Any = generator  # typeshed does not declare gauss_next
        self._uniform = generator.random

    def draw(self) -> float:
        """Sample one duration, in seconds."""
        rng = self._rng
        waiting = rng.gauss_next
        if waiting is None:
            angle = self._uniform() * tau
            radius = sqrt(-2.0 * log(1.0 - self._uniform()))
            z = cos(angle) * radius
            rng.gauss_next = sin(angle) * radius
        else:
            z = waiting
            rng.gauss_next = None
        return self._median * exp(z * self._sigma)


Duration: TypeAlias = float | int | Uniform | Exponential | LogNormal


def check_duration(name: str, value: Any) -> Duration:
    """Return ``value`` if it is a distribution, or else as a number that :func:`check_number` has checked."""
    return value if isinstance(value, (Uniform, Exponential, LogNormal)) else check_number(name, value)


def draw(duration: Duration, rng: random.Random) -> float:
    """Sample one duration, in seconds."""
    return float(duration) if isinstance(duration, (float, int)) else duration.draw(rng)


def sampler(duration: Duration, rng: random.Random) -> Callable[[], float]:
    """Return a function that samples durations, in seconds."""
    if isinstance(duration, (float, int)):
        seconds = float(duration)
        return lambda: seconds
    if isinstance(duration, LogNormal) and duration.median:  # inlined, because most links use this distribution
        return LogNormalSampler(duration.median, duration.sigma, rng).draw
    return functools.partial(duration.draw, rng)
