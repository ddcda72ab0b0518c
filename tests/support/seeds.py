"""Seeds of randomised tests: all of them for ``./tools/test``, the first ones for CI."""

from __future__ import annotations

from typing import Any

import pytest


def seeds(count: int) -> list[Any]:
    """So many, for ``parametrize``; those behind the first quarter, and behind the first two, are marked ``long``."""
    first = max(2, -(-count // 4))
    return [pytest.param(seed, marks=[pytest.mark.long] * (seed >= first)) for seed in range(count)]
