"""Seeds of randomised tests: all of them for ``./tools/test``, the first ones for CI."""

from __future__ import annotations

from typing import Any

import pytest


def seeds(count: int) -> list[Any]:
    """Return this number of seeds for ``parametrize``.

    All except the first eighth (at least two) are marked ``long``.
    """
    first = max(2, -(-count // 8))
    return [pytest.param(seed, marks=[pytest.mark.long] * (seed >= first)) for seed in range(count)]
