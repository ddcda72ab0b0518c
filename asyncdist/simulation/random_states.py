"""Each simulated rank's own random state, as if it had a process to itself.

torch's global generator is swapped by its state; numpy's by its bit generator; the functions of Python's ``random``
module are bound to the rank's own instance (a name imported from it earlier, ``from random import random``, stays what
it was: shared).
"""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import torch


class RandomStates:
    """The random states of all ranks; one of them, or the outside's, is the process's.

    Args:
        size: number of ranks. All begin with the state that the process has now, as freshly started processes with
            equal seeds would; user code seeds by rank as it does in reality.
    """

    def __init__(self, size: int) -> None:
        self._torch = [torch.get_rng_state() for _ in range(size + 1)]
        self._numpy: list[Any] = [_copy_of_numpy() for _ in range(size)] + [np.random.get_bit_generator()]
        self._python = [random.Random() for _ in range(size)]
        for instance in self._python:
            instance.setstate(random.getstate())
        self._names = [name for name in dir(random) if getattr(getattr(random, name), "__self__", None) is random._inst]
        self._bound: list[dict[str, Any]] = [{name: getattr(i, name) for name in self._names} for i in self._python]
        self._bound.append({name: getattr(random, name) for name in self._names})
        self._outside = size
        self.current = size

    def switch(self, rank: int) -> None:
        """The process's random state is ``rank``'s now."""
        if rank == self.current:
            return
        self._torch[self.current] = torch.get_rng_state()
        torch.set_rng_state(self._torch[rank])
        np.random.set_bit_generator(self._numpy[rank])
        random.__dict__.update(self._bound[rank])
        self.current = rank

    def restore(self) -> None:
        """The process gets back what it had."""
        self.switch(self._outside)


def _copy_of_numpy() -> Any:
    own = np.random.MT19937()
    mine = np.random.get_bit_generator()
    if type(mine) is np.random.MT19937:
        own.state = mine.state
    return own
