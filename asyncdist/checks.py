"""What options must be: one form of error, ``NAME is VALUE; allowed: ...``, and one place that makes it.

Numbers of numpy, or of whatever else is registered as one, are taken for what they are, and come back as Python's own.
A bool is refused where a number is needed: it is a mistaken flag.
"""

from __future__ import annotations

import math
import operator
from numbers import Real
from typing import Any, Final, NoReturn

#: The least and the greatest finite float above zero.
SMALLEST: Final = math.ulp(0.0)
LARGEST: Final = math.nextafter(math.inf, 0.0)


def refuse(name: str, value: Any, allowed: str, kind: type[Exception] = ValueError) -> NoReturn:
    """Raise ``kind``, naming the option, its value (cut where it is very long), and what is allowed."""
    text = repr(value)
    raise kind(f"{name} is {text if len(text) <= 200 else f'{text[:200]}...'}; allowed: {allowed}")


def count(name: str, value: Any, *, least: int = 1, besides: str = "") -> int:
    """A whole number of at least ``least``, also one of another type that may index a list.

    Args:
        name: of the option.
        value: to be checked.
        least: the smallest that is allowed.
        besides: what else is, for the error, such as ``", or None"``.

    Raises:
        ValueError: it is none.
    """
    try:
        number = operator.index(value)
    except TypeError:
        number = least - 1
    if number < least or isinstance(value, bool):
        refuse(name, value, f"a whole number of {least} or more{besides}")
    return number


def real(name: str, value: Any, allowed: str, *, low: float, high: float = LARGEST) -> float:
    """A number from ``low`` to ``high``; ``allowed`` says the same in words. Raises ValueError for another."""
    is_real = isinstance(value, Real) and not isinstance(value, bool)
    if not is_real or not low <= value <= high:
        refuse(name, value, allowed)
    try:
        return float(value)
    except OverflowError:
        refuse(name, value, allowed)


def fraction(name: str, value: Any) -> float:
    """A number from 0 to 1. Raises ValueError for another."""
    return real(name, value, "a number from 0 to 1", low=0.0, high=1.0)


def seconds(name: str, value: Any) -> float:
    """A finite duration above 0. Raises ValueError for another."""
    return real(name, value, "a finite number of seconds above 0", low=SMALLEST)
