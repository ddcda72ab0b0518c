"""Gives each simulated rank its own random state, as if it had a process to itself.

torch's global generator is swapped by its state, numpy's by its bit generator. The functions of ``random`` and of
``numpy.random`` are replaced once, for as long as the simulation lasts, by ones that ask the instance of the rank whose
turn it is: putting the names of each rank in their place at each switch took twice as long as all the rest of it. A
name imported from ``random`` before the simulation (``from random import random``) stays the original: shared. One
imported from ``numpy.random`` draws from the rank's own numbers all the same, since numpy's global generator is
swapped; not so the second half of a pair of normal numbers, which numpy keeps elsewhere.

torch's modes are swapped with them (:mod:`asyncdist.tensors.torch_modes`).
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

#: The states that may begin with the caller's.
INHERITABLE: Final = frozenset({"random", "numpy", "torch"})
_RANDOM_NAMES: Final = [
    name for name in dir(random) if getattr(getattr(random, name), "__self__", None) is random._inst
]
#: Functions of ``numpy.random``, each with the method of a ``RandomState`` that it stands for.
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
    """Makes the words that seed a generator of numpy's; its own ``SeedSequence`` takes 50 us for one rank."""

    def __init__(self, text: str) -> None:
        self._rng = random.Random(text)

    def generate_state(self, n_words: int, dtype: Any = np.uint32) -> Any:
        """Return ``n_words`` words."""
        words = np.frombuffer(self._rng.randbytes(n_words * np.dtype(dtype).itemsize), dtype=dtype)
        return words.tolist()  # MT19937 takes them one by one: of a list in 5 us, of an array in 35


class _States(NamedTuple):
    """Holds the random states of one process; ``numpy`` draws from ``generator``."""

    torch: torch.Tensor
    generator: Any
    numpy: np.random.RandomState
    python: random.Random


class RandomStates:
    """Holds the random states of all ranks; one of them, or that of the code outside, is the process's.

    Args:
        size: the number of ranks.
        seed: a fresh process has random states that differ each time; here they follow from seed and rank, so a
            simulation is a function of its arguments. The caller's draws and seeds do not count: a program that wants
            certain numbers seeds inside main, as it must to have different ones on each rank.
        inherited: names among ``"random"``, ``"numpy"`` and ``"torch"`` whose state every rank gets from the caller
            all the same: those of a script that seeded them before it called ``run``.
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
        # The last entries are the outside's.
        self._torch.append(torch.get_rng_state())
        self._modes = RankModes(size, FRESH)
        self._generators.append(np.random.get_bit_generator())
        # The process's own one draws from the generator of the rank whose turn it is, also for other threads.
        numpy_outside = np.random.RandomState(self._generators[-1])
        numpy_outside.set_state(np.random.mtrand._rand.get_state(legacy=False))  # with its half of a pair of numbers
        self._numpy.append(numpy_outside)
        self._random.append(random._inst)
        self._entropy: dict[int, random.Random] = {}
        self._processes = [str(rank) for rank in range(size)]  # the words that stand for each in what is drawn
        self._thread = get_ident()
        self._names_outside: tuple[dict[str, Any], ...] = ()
        self._outside = size
        self.current = size

    def _fresh(self, process: str) -> _States:
        """Return the states with which a process begins."""
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
        """Let a new process of ``rank`` begin, with states that differ from those of the one before."""
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
        """Let the ranks run on this thread, with random bytes of the system of their own, until the context ends."""
        self._thread = get_ident()
        with entropy_from(self._entropy_bytes):
            yield

    def _entropy_bytes(self, count: int) -> bytes | None:
        """Draw bytes for the rank whose turn it is; return None outside of all turns."""
        rank = self.current
        if rank == self._outside:
            return None
        generator = self._entropy.get(rank)
        if generator is None:
            generator = self._entropy[rank] = random.Random(f"{self._seed} entropy {self._processes[rank]}")
        return generator.randbytes(count)

    def switch(self, rank: int) -> None:
        """Make ``rank``'s random state the process's."""
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
        """Return a function that calls that method of the instance whose turn it is."""

        def ask(*args: Any, **kwargs: Any) -> Any:
            is_ours = get_ident() == self._thread  # another thread draws what it would draw without a simulation
            return getattr(instances[self.current if is_ours else self._outside], name)(*args, **kwargs)

        ask.__name__ = ask.__qualname__ = name
        ask.__doc__ = getattr(instances[-1], name).__doc__
        return ask

    def restore(self) -> None:
        """Give the process back its own random state and functions."""
        if self.current != self._outside:
            self.switch(self._outside)
            np.random.mtrand._rand.set_state(self._numpy[-1].get_state(legacy=False))
        self._modes.restore()
        for module, names in zip((random, np.random), self._names_outside, strict=False):
            module.__dict__.update(names)
        self._names_outside = ()
