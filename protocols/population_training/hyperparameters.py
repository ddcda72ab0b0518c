"""Defines the possible values of a hyperparameter: a range, a list of choices, or the results of a function.

All randomness comes from the caller's generator.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from numbers import Real
from typing import Any, TypeAlias

import numpy as np

from asyncdist import validation

#: Value of a hyperparameter. An optimizer's hyperparameters are numbers.
Value: TypeAlias = float | int | str | bool | None


@dataclass(frozen=True, slots=True)
class Range:
    """Defines a range of numbers from ``low`` to ``high``, both included.

    A perturbation multiplies the number by a factor, and clips the product to the range.

    Args:
        log: Whether values are drawn uniformly on a logarithmic scale; by default, true if ``low`` is above 0.
        integer: Whether the values are integers.

    Raises:
        TypeError, ValueError: A limit is not a finite number, ``low`` is not below ``high``, or ``low`` is not above 0
            with ``log=True``.
    """

    low: float
    high: float
    log: bool | None = None
    integer: bool = False

    def __post_init__(self) -> None:
        for name, value in (("low", self.low), ("high", self.high)):
            validation.real(name, value, "a finite number", low=-validation.LARGEST)
            object.__setattr__(self, name, _plain(value))
        if not self.low < self.high:
            hint = f"; write ({self.high!r}, {self.low!r})" if self.low > self.high else ""
            raise ValueError(
                f"the low end of a range must be below its high end, got ({self.low!r}, {self.high!r}){hint}"
            )
        if self.log and not self.low > 0:
            raise ValueError(f"a range with log=True must begin above 0, got ({self.low!r}, {self.high!r})")
        if self.integer and (self.low != int(self.low) or self.high != int(self.high)):
            raise ValueError(f"a range with integer=True must have integer limits, got ({self.low!r}, {self.high!r})")

    @property
    def is_log(self) -> bool:
        """True if values are drawn uniformly on a logarithmic scale."""
        return self.low > 0 if self.log is None else self.log

    def unit(self, value: float) -> float:
        """Return a value's position in the range, from 0 to 1, on the linear or logarithmic scale of the range."""
        scale = math.log if self.is_log else float
        return (scale(value) - scale(self.low)) / (scale(self.high) - scale(self.low))

    def draw(self, generator: random.Random) -> Value:
        """Return a random value from the range."""
        is_log = self.is_log
        if self.integer and not is_log:
            return generator.randint(int(self.low), int(self.high))
        if not is_log:
            return self.clipped(self.low + (self.high - self.low) * generator.random())
        low = math.log(self.low)
        return self.clipped(math.exp(low + (math.log(self.high) - low) * generator.random()))

    def perturbed(self, value: Any, factor: float) -> Value:
        """Return ``value * factor``, clipped. An integer changes by at least 1, unless it is at a limit."""
        return self.clipped(_integer_times(value, factor) if self.integer else value * factor)

    def clipped(self, value: Any) -> Value:
        """Return the nearest value in the range. Raise ValueError for NaN."""
        if value != value:
            validation.refuse("a saved or explored value", value, f"a number from {self.low!r} to {self.high!r}")
        number = round(value) if self.integer else float(value)
        return type(number)(min(max(number, self.low), self.high))

    def check(self, name: str, value: Any) -> Value:
        """Return a user's value as a number. Raise ValueError if it is outside the range."""
        kind = "an integer" if self.integer else "a number"
        number = validation.real(
            name, value, f"{kind} from {self.low!r} to {self.high!r}", low=self.low, high=self.high
        )
        if not self.integer:
            return number
        if number != int(number):
            validation.refuse(name, value, f"an integer from {self.low!r} to {self.high!r}")
        return int(number)

    def leaves(self, factor: float) -> bool:
        """Return whether multiplication by ``factor`` takes every value out of the range."""
        return self.low > 0 and (self.low * factor > self.high or self.high * factor < self.low)

    def agreed(self) -> list[Any]:
        """Return the range's limits and options as a list, on which all ranks must agree."""
        return ["range", self.low, self.high, self.log, self.integer]


@dataclass(frozen=True, slots=True)
class Choice:
    """Defines a list of values. Perturbing a value by a factor above 1 gives the next value, and below 1 the previous.

    Args:
        values: At least two different numbers, strings, bools or None, in an order in which neighbours are similar.
            NumPy numbers and enumeration members become plain numbers and strings.

    Raises:
        TypeError, ValueError: There are fewer than two values, a value repeats, or a value has another type.
    """

    values: tuple[Value, ...]

    def __init__(self, values: Sequence[Value]) -> None:
        found = tuple(map(_plain, values))
        for value in found:
            if not isinstance(value, float | int | str | bool | None):
                raise TypeError(f"a choice must be a number, a string, a bool or None, got {value!r:.80}")
            if value != value:
                raise ValueError(f"a list of choices must not have NaN, got {list(found)!r:.80}")
        if len(found) < 2 or len({repr(value) for value in found}) < len(found):
            raise ValueError(f"a list of choices must have at least two different values, got {list(found)!r:.80}")
        object.__setattr__(self, "values", found)

    def draw(self, generator: random.Random) -> Value:
        """Return a random value from the list."""
        return generator.choice(self.values)

    def perturbed(self, value: Any, factor: float) -> Value:
        """Return the next or previous value, or the same value at the end of the list or with the factor 1."""
        place = self._place_of(value) + (factor > 1.0) - (factor < 1.0)
        return self.values[min(max(place, 0), len(self.values) - 1)]

    def clipped(self, value: Any) -> Value:
        """Return the value. Raise ValueError if it is not in the list."""
        return self.check("a saved or explored value", value)

    def check(self, name: str, value: Any) -> Value:
        """Return the list's value that equals a user's value. Raise ValueError if there is none."""
        place = self._place_of(value)
        if place < 0:
            validation.refuse(name, value, f"one of {list(self.values)!r:.200}")
        return self.values[place]

    def agreed(self) -> list[Any]:
        """Return the kind and the values of the list, on which all ranks must agree."""
        return ["choice", *self.values]

    def _place_of(self, given: Any) -> int:
        value = _plain(given)
        return next(
            (place for place, each in enumerate(self.values) if type(each) is type(value) and each == value), -1
        )


@dataclass(frozen=True, slots=True)
class Sampler:
    """Wraps a function that draws numbers without limits. A perturbation multiplies a number by a factor.

    Args:
        function: Callable that gets a ``random.Random`` and returns a finite number.
    """

    function: Callable[[random.Random], float]

    def draw(self, generator: random.Random) -> Value:
        """Draw a value by calling the user's function."""
        return self.check("the result of a hyperparameter's function", self.function(generator))

    def perturbed(self, value: Any, factor: float) -> Value:
        """Return ``value * factor``. An integer remains an integer, and changes by at least 1."""
        return _integer_times(value, factor) if isinstance(value, int) else float(value * factor)

    def clipped(self, value: Any) -> Value:
        """Return the value. Raise ValueError if it is not a finite number."""
        return self.check("a saved or explored value", value)

    def check(self, name: str, value: Any) -> Value:
        """Return a user's value as a number. Raise ValueError if it is not finite."""
        number = validation.real(name, value, "a finite number", low=-validation.LARGEST)
        return int(number) if isinstance(_plain(value), int) else number

    def agreed(self) -> list[Any]:
        """Return a constant, because functions of different ranks cannot be compared."""
        return ["function"]


def _plain(value: Any) -> Any:
    """Convert a NumPy scalar or an enumeration member to a plain Python value, which can be sent to other ranks."""
    if isinstance(value, np.generic):
        return value.item()
    as_string = str.__str__(value) if isinstance(value, str) else value
    return next((kind(value) for kind in (bool, int, float) if isinstance(value, kind)), as_string)


def is_number(value: Any) -> bool:
    """Return whether a plain value is a number, and not a bool."""
    return isinstance(value, int | float) and not isinstance(value, bool)


def _integer_times(value: int, factor: float) -> int:
    """Return the rounded product. Unless the factor is 1, it differs from the value by at least 1."""
    found = round(value * factor)
    if found == value and factor != 1.0:
        found += 1 if (factor > 1.0) == (value >= 0) else -1
    return found


def _check_not_range(values: Sequence[Value]) -> None:
    """Raise ValueError for two numbers, which may be meant as a range."""
    if len(values) == 2 and all(map(is_number, values)):
        low, high = sorted(values)  # type: ignore[type-var]
        raise ValueError(
            f"a list of two numbers may be meant as a range, got {list(values)!r}; write ({low!r}, {high!r}) for the "
            f"range, or protocols.Choice({list(values)!r}) for these two values alone (in YAML: {{low: {low!r}, high: "
            f"{high!r}}}, or {{values: {list(values)!r}}})"
        )


Space: TypeAlias = Range | Choice | Sampler
#: Ways in which the user can write a hyperparameter's values.
Given: TypeAlias = (
    Range | Choice | tuple[float, float] | list[Any] | Mapping[str, Any] | Callable[[random.Random], float]
)


def space_of(name: str, given: Any) -> Space:
    """Convert the values that the user has passed for a hyperparameter to an object.

    Raises:
        TypeError, ValueError: The values are not a range, a list or a callable, or they are invalid.
    """
    try:
        if isinstance(given, Range | Choice):
            return given
        if isinstance(given, tuple) and len(given) == 2 and all(isinstance(each, Real) for each in given):
            return Range(*given)
        if isinstance(given, list):
            found = Choice(given)
            _check_not_range(found.values)
            return found
        if isinstance(given, Mapping):  # the arguments of Range or Choice by name, as in a YAML file
            return (Choice if "values" in given else Range)(**given)
    except (TypeError, ValueError) as error:
        raise type(error)(f"the values of hyperparameter {name!r} are wrong: {error}") from None
    if callable(given):
        return Sampler(given)
    raise TypeError(
        f"the values of hyperparameter {name!r} must be a range (low, high), a list of choices, Range(...), "
        "Choice(...), a dict of their arguments, or a callable that takes a random.Random and returns a number, got "
        f"{given!r:.80}"
    )


def spaces_of(option: str, given: Any) -> dict[str, Space]:
    """Return the space of values of each hyperparameter in the dict that was passed as ``option``.

    Raises:
        TypeError, ValueError: The dict, or the space of one hyperparameter, is invalid.
    """
    if not isinstance(given, Mapping) or not all(isinstance(name, str) and name for name in given):
        validation.refuse(
            option,
            given,
            'a dict such as {"lr": (1e-4, 1e-1)}, which maps names to ranges, lists or callables',
            TypeError,
        )
    return {name: space_of(name, values) for name, values in given.items()}
