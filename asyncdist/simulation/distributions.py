"""Makes the draws of a simulation for every message and every step.

:class:`asyncdist.simulation.models.Link` says which distribution a link's latency has, and
:mod:`asyncdist.simulation.fabric` uses what is drawn for each message. The module is compiled where that can be done;
see :mod:`asyncdist.compiled`.
"""

from __future__ import annotations

import random
from math import tau
from types import SimpleNamespace
from typing import Any

try:
    import cython
except ImportError:  # it is needed to compile, not to run
    cython = SimpleNamespace(compiled=False)

if not cython.compiled:  # else C's: the same, without a call of Python's for each
    from math import cos, exp, log, sin, sqrt


class LogNormalSampler:
    """Draws log-normal values: ``random.gauss`` written out, and its exponential.

    The second number of a pair waits where ``gauss`` leaves it: any other draw from the generator gets it.

    Args:
        median: of the values, in seconds; above 0.
        sigma: of their logarithm.
        generator: draws.
    """

    def __init__(self, median: float, sigma: float, generator: random.Random) -> None:
        self._median = median
        self._sigma = sigma
        self._rng: Any = generator  # typeshed knows no gauss_next
        self._uniform = generator.random

    def draw(self) -> float:
        """Draw one value, in seconds."""
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
