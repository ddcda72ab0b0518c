"""Each simulated rank's own random state, as if it had a process to itself.

torch's global generator is swapped by its state. The functions of ``random`` and of ``numpy.random`` are bound to the
rank's own instances. A name imported from ``random`` earlier (``from random import random``) stays what it was: shared.
One imported from ``numpy.random`` draws from the rank's own numbers all the same, since numpy's global generator is
swapped too; not so the second half of a pair of normal numbers, which numpy keeps elsewhere.

torch's grad mode is swapped with them: a rank that awaits under ``no_grad`` is no reason for the others to have none.
"""

from __future__ import annotations

import random
from collections.abc import Collection
from typing import Any, Final

import numpy as np
import torch

#: What may begin with the caller's state.
INHERITABLE: Final = frozenset({"random", "numpy", "torch"})
_RANDOM_NAMES: Final = [
    name for name in dir(random) if getattr(getattr(random, name), "__self__", None) is random._inst
]
#: Of ``numpy.random``, each with the method of a ``RandomState`` that it stands for.
_NUMPY_NAMES: Final = {
    **{
        name: name
        for name in dir(np.random)
        if getattr(getattr(np.random, name), "__self__", None) is np.random.mtrand._rand
    },
    "seed": "seed",
    "sample": "random_sample",
    "ranf": "random_sample",
}


class RandomStates:
    """The random states of all ranks; one of them, or the outside's, is the process's.

    Args:
        size: number of ranks.
        seed: a fresh process has random states that differ each time; here they follow from seed and rank, so that a
            simulation is a function of its arguments. What the caller has drawn or seeded does not count: a program
            that wants certain numbers seeds inside main, as it must to have different ones on each rank.
        inherited: names among ``"random"``, ``"numpy"`` and ``"torch"`` whose state every rank has from the caller all
            the same: those of a script that seeded them before it called ``run``.
    """

    def __init__(self, size: int, seed: int, inherited: Collection[str] = ()) -> None:
        entropy = [random.Random(f"{seed} random state {rank}").getrandbits(63) for rank in range(size)]
        self._torch = [torch.Generator().manual_seed(number).get_state() for number in entropy]
        self._generators: list[Any] = [np.random.MT19937(number) for number in entropy]
        numpy_states = [np.random.RandomState(generator) for generator in self._generators]
        python_states = [random.Random(number) for number in entropy]
        self._random = [{name: getattr(state, name) for name in _RANDOM_NAMES} for state in python_states]
        self._numpy = [{name: getattr(state, of) for name, of in _NUMPY_NAMES.items()} for state in numpy_states]
        if "random" in inherited:
            for python_state in python_states:
                python_state.setstate(random.getstate())
        if "numpy" in inherited:
            for numpy_state in numpy_states:
                numpy_state.set_state(np.random.get_state(legacy=False))
        if "torch" in inherited:
            self._torch = [torch.get_rng_state() for _ in entropy]
        # The last entries are the outside's.
        self._torch.append(torch.get_rng_state())
        self._grad_modes = [True] * size + [torch.is_grad_enabled()]
        self._generators.append(np.random.get_bit_generator())
        self._random.append({name: getattr(random, name) for name in _RANDOM_NAMES})
        self._numpy.append({name: getattr(np.random, name) for name in _NUMPY_NAMES})
        self._numpy_outside = np.random.mtrand._rand.get_state(legacy=False)
        self._outside = size
        self.current = size

    def switch(self, rank: int) -> None:
        """The process's random state is ``rank``'s now."""
        if rank == self.current:
            return
        self._torch[self.current] = torch.get_rng_state()
        torch.set_rng_state(self._torch[rank])
        self._grad_modes[self.current] = torch.is_grad_enabled()
        torch.set_grad_enabled(self._grad_modes[rank])
        np.random.set_bit_generator(self._generators[rank])
        np.random.__dict__.update(self._numpy[rank])
        random.__dict__.update(self._random[rank])
        self.current = rank

    def restore(self) -> None:
        """The process gets back what it had."""
        if self.current != self._outside:
            self.switch(self._outside)
            np.random.mtrand._rand.set_state(self._numpy_outside)  # with its half of a pair of normal numbers
