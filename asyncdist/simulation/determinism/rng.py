"""Gives each simulated rank random states of its own, as if it were a process.

At each switch between ranks, the state of torch's global generator and numpy's global bit generator are swapped. The
functions of ``random`` and ``numpy.random`` are replaced once per simulation by functions that use the generator of the
running rank; replacing them at each switch would be three times as slow. A name imported from ``random`` before the
simulation (``from random import random``) stays the original and is shared by all ranks. A name imported from
``numpy.random`` does draw the rank's own numbers, except for the second half of a pair of normal numbers, which numpy
stores elsewhere.

torch's modes are swapped at the same time (:mod:`asyncdist.tensors.torch_modes`).
"""

from __future__ import annotations

import random
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from threading import get_ident
from typing import Any, Final, NamedTuple

import numpy as np
import torch
from numpy.random.bit_generator import ISeedSequence

from asyncdist.simulation.determinism.entropy import entropy_from
from asyncdist.tensors.torch_modes import FRESH, RankModes

#: Names of the generators that may begin with the caller's state.
INHERITABLE: Final = frozenset({"random", "numpy", "torch"})
_RANDOM_NAMES: Final = [
    name for name in dir(random) if getattr(getattr(random, name), "__self__", None) is random._inst
]
#: Maps functions of ``numpy.random`` to the methods of ``RandomState`` that they call.
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
_get_torch_state: Final = torch.default_generator.get_state
_set_torch_state: Final = torch.default_generator.set_state


class _Seed(ISeedSequence):
    """Generates the seed words of a numpy generator; numpy's own ``SeedSequence`` takes 50 us per rank."""

    def __init__(self, text: str) -> None:
        self._rng = random.Random(text)

    def generate_state(self, n_words: int, dtype: Any = np.uint32) -> Any:
        """Return ``n_words`` words."""
        words = np.frombuffer(self._rng.randbytes(n_words * np.dtype(dtype).itemsize), dtype=dtype)
        return words.tolist()  # MT19937 reads a list in 5 us, and an array in 35 us


class _States(NamedTuple):
    """Holds the random states of one process; ``numpy`` draws from ``generator``."""

    torch: torch.Tensor
    generator: Any
    numpy: np.random.RandomState
    python: random.Random


class RandomStates:
    """Holds the random states of all ranks; those of one rank, or of the outside code, are active in the process.

    Args:
        size: Number of ranks.
        seed: Seed of the simulation. The initial states follow from the seed and the rank. The caller's draws and seeds
            have no effect: a program that needs certain numbers seeds inside main.
        inherited: Names among ``"random"``, ``"numpy"`` and ``"torch"``. Every rank begins with the caller's state of
            these generators, for a script that seeded them before it called ``run``.
    """

    def __init__(self, size: int, seed: int, inherited: Collection[str] = ()) -> None:
        self._seed = seed
        callers: dict[str, Callable[[], Any]] = {
            "random": random.getstate,
            "numpy": lambda: np.random.get_state(legacy=False),
            "torch": torch.get_rng_state,
        }
        self._inherited = {name: callers[name]() for name in inherited}
        fresh = [self._fresh(str(rank)) for rank in range(size)]
        self._torch = [states.torch for states in fresh]
        self._generators = [states.generator for states in fresh]
        self._numpy = [states.numpy for states in fresh]
        self._random = [states.python for states in fresh]
        # The last entries belong to the outside code.
        self._torch.append(torch.get_rng_state())
        self._modes = RankModes(size, FRESH)
        self._generators.append(np.random.get_bit_generator())
        # The process's own instance draws from the generator of the running rank, even for other threads.
        numpy_outside = np.random.RandomState(self._generators[-1])
        numpy_outside.set_state(
            np.random.mtrand._rand.get_state(legacy=False)
        )  # including the stored half of a pair of normal numbers
        self._numpy.append(numpy_outside)
        self._random.append(random._inst)
        self._entropy: dict[int, random.Random] = {}
        self._processes = [str(rank) for rank in range(size)]  # the name of each rank's process in seeds
        self._thread = get_ident()
        self._names_outside: tuple[dict[str, Any], ...] = ()
        self._outside = size
        self.current = size

    def _fresh(self, process: str) -> _States:
        """Return the initial states of a process."""
        inherited = self._inherited
        number = random.Random(f"{self._seed} random state {process}").getrandbits(63)
        seed: Any = _Seed(f"{self._seed} numpy's random state {process}")
        generator = np.random.MT19937(seed)
        states = _States(
            inherited["torch"] if "torch" in inherited else torch.Generator().manual_seed(number).get_state(),
            generator,
            np.random.RandomState(generator),
            random.Random(number),
        )
        if "random" in inherited:
            states.python.setstate(inherited["random"])
        if "numpy" in inherited:
            states.numpy.set_state(inherited["numpy"])
        return states

    def restart(self, rank: int, incarnation: int) -> None:
        """Give a new process of ``rank`` initial states that differ from those of the previous process."""
        current = self.current
        if rank == current:
            self.switch(self._outside)
        self._processes[rank] = process = f"{rank}, started again {incarnation} times"
        states = self._fresh(process)
        self._torch[rank], self._generators[rank] = states.torch, states.generator
        self._numpy[rank], self._random[rank] = states.numpy, states.python
        self._entropy.pop(rank, None)
        self._modes.reset(rank)
        self.switch(current)

    @contextmanager
    def of_this_thread(self) -> Iterator[None]:
        """Give the ranks on this thread their own random bytes of the system, until the context ends."""
        self._thread = get_ident()
        with entropy_from(self._entropy_bytes):
            yield

    def _entropy_bytes(self, count: int) -> bytes | None:
        """Draw bytes for the running rank; return None outside of all turns."""
        rank = self.current
        if rank == self._outside:
            return None
        generator = self._entropy.get(rank)
        if generator is None:
            generator = self._entropy[rank] = random.Random(f"{self._seed} entropy {self._processes[rank]}")
        return generator.randbytes(count)

    def switch(self, rank: int) -> None:
        """Activate the random states of ``rank``."""
        current = self.current
        if rank == current:
            return
        if not self._names_outside:
            self._install()
        self._torch[current] = _get_torch_state()
        _set_torch_state(self._torch[rank])
        self._modes.switch(rank)
        np.random.set_bit_generator(self._generators[rank])
        self.current = rank

    def _install(self) -> None:
        self._names_outside = (
            {name: getattr(random, name) for name in _RANDOM_NAMES},
            {name: getattr(np.random, name) for name in _NUMPY_NAMES},
        )
        random.__dict__.update({name: self._asking(self._random, name) for name in _RANDOM_NAMES})
        np.random.__dict__.update({name: self._asking(self._numpy, of) for name, of in _NUMPY_NAMES.items()})

    def _asking(self, instances: list[Any], name: str) -> Callable[..., Any]:
        """Return a function that calls the method ``name`` of the running rank's instance."""

        def ask(*args: Any, **kwargs: Any) -> Any:
            is_ours = get_ident() == self._thread  # another thread draws as without a simulation
            return getattr(instances[self.current if is_ours else self._outside], name)(*args, **kwargs)

        ask.__name__ = ask.__qualname__ = name
        ask.__doc__ = getattr(instances[-1], name).__doc__
        return ask

    def restore(self) -> None:
        """Restore the process's own random states, and the functions that were replaced."""
        if self.current != self._outside:
            self.switch(self._outside)
            np.random.mtrand._rand.set_state(self._numpy[-1].get_state(legacy=False))
        self._modes.restore()
        for module, names in zip((random, np.random), self._names_outside, strict=False):
            module.__dict__.update(names)
        self._names_outside = ()
