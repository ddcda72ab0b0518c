"""Seeds and other values of tests with many of them: all of them for ``./tools/test --all``, few for CI."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest


def seeds(count: int) -> list[Any]:
    """Return this number of seeds for ``parametrize``.

    All except the first twelfth (at least two) are marked ``long``.
    """
    first = max(2, -(-count // 12))
    return [pytest.param(seed, marks=[pytest.mark.long] * (seed >= first)) for seed in range(count)]


def in_ci(values: Iterable[Any], *chosen: Any) -> list[Any]:
    """Return these values for ``parametrize``; a tuple has a value for each of several arguments.

    All except the chosen ones are marked ``long``.
    """
    each = list(values)
    assert all(value in each for value in chosen), "a value that CI runs is not among all values"
    return [
        pytest.param(
            *(value if isinstance(value, tuple) else (value,)), marks=[pytest.mark.long] * (value not in chosen)
        )
        for value in each
    ]
