"""Gives each simulated rank its own random states, as if the rank were a process.

At each switch between ranks, the states of torch's global generator and of numpy's global bit generator are swapped.
Torch's modes (:mod:`asyncdist.tensors.torch_modes`) and the module ``__main__`` are swapped, too, because each rank has
its own ``__main__`` if a script opens its world without a main function. The functions of ``random`` and
``numpy.random`` are replaced once per simulation by functions that use the running rank's generator. Replacing them at
each switch would take three times as long.

All ranks share a function that was imported from ``random`` before the simulation (``from random import random``). A
function imported from ``numpy.random`` uses the rank's generator, except for the second of a pair of normal variates,
which numpy stores elsewhere.

In a simulation, ``os.urandom``, ``secrets``, ``uuid.uuid4``, ``random.Random()``, ``random.SystemRandom``,
``random.seed()``, ``numpy.random.default_rng()``, ``numpy.random.seed()`` and ``torch.seed()`` use a generator that is
seeded with the simulation's seed and the rank. ``tempfile`` gets a new generator for names. Functions imported by name
before the simulation (``from os import urandom``) and ``torch.Generator().seed()`` still use real random bytes.
"""

from __future__ import annotations

import contextlib
import functools
import os
import random
import sys
import tempfile
from collections.abc import Callable, Collection, Iterator
from contextvars import ContextVar
from threading import get_ident
from typing import Any, Final, NamedTuple

import numpy as np
import torch
from numpy.random.bit_generator import ISeedSequence

from asyncdist.tensors.torch_modes import FRESH, RankModes

#: Generators whose initial state may be inherited from the caller.
INHERITABLE: Final = frozenset({"random", "numpy", "torch"})
_RANDOM_NAMES: Final = [
    name for name in dir(random) if getattr(getattr(random, name), "__self__", None) is random._inst
]
#: Functions of ``numpy.random``, with the methods of ``RandomState`` that they call.
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
_set_numpy_generator: Final = np.random.set_bit_generator
_get_torch_state: Final = torch.default_generator.get_state
_set_torch_state: Final = torch.default_generator.set_state
#: Module and name of each replaced function. ``random._urandom`` is included because ``secrets`` and numpy use it.
_NAMES: Final[tuple[tuple[Any, str], ...]] = (
    (os, "urandom"),
    (random, "_urandom"),
    *([(os, "getrandom")] if hasattr(os, "getrandom") else []),
)
#: Value that ``torch.seed()`` returns, for example in a replay. If None, the simulation's generator supplies it.
known_torch_seed: ContextVar[int | None] = ContextVar("asyncdist_known_torch_seed", default=None)


@contextlib.contextmanager
def entropy_from(source: Callable[[int], bytes | None]) -> Iterator[None]:
    """Replace this thread's system random bytes with bytes from ``source``, unless ``source`` returns None."""
    thread = get_ident()
    process = os.getpid()

    def drawn(count: int) -> bytes | None:
        is_ours = get_ident() == thread and os.getpid() == process
        return source(count) if is_ours else None

    with contextlib.ExitStack() as stack:

        def replace(owner: Any, name: str, by: Callable[..., Any]) -> None:
            original = getattr(owner, name)
            setattr(owner, name, functools.wraps(original)(by))
            stack.callback(setattr, owner, name, original)

        for module, name in _NAMES:
            replace(module, name, _bytes_of(getattr(module, name), drawn))
        replace(random.Random, "seed", _seeding(random.Random.seed, drawn))
        for module in (torch, torch.random):
            replace(module, "seed", _torch_seeding(module.seed, drawn))
        # The generator for names of temporary files draws its seed only once, in the first simulation of a process.
        stack.callback(setattr, tempfile, "_name_sequence", tempfile._name_sequence)  # type: ignore[attr-defined]
        tempfile._name_sequence = None  # type: ignore[attr-defined]
        yield


def _bytes_of(original: Callable[..., bytes], drawn: Callable[[int], bytes | None]) -> Callable[..., bytes]:
    def urandom(size: int, *flags: int) -> bytes:
        found = drawn(size) if type(size) is int and size >= 0 else None
        return original(size, *flags) if found is None else found

    return urandom


def _seeding(original: Callable[..., None], drawn: Callable[[int], bytes | None]) -> Callable[..., None]:
    def seed(self: random.Random, a: Any = None, version: int = 2) -> None:
        found = drawn(32) if a is None else None
        original(self, a if found is None else int.from_bytes(found, "little"), version)

    return seed


def _torch_seeding(original: Callable[[], int], drawn: Callable[[int], bytes | None]) -> Callable[[], int]:
    def seed() -> int:
        known = known_torch_seed.get()
        if known is not None:
            torch.manual_seed(known)
            return known
        found = drawn(8)
        if found is None:
            return original()
        number = int.from_bytes(found, "little") >> 1  # torch's seeds are signed 64-bit integers
        torch.manual_seed(number)
        return number

    return seed


class _Seed(ISeedSequence):
    """Generates seed words for a numpy generator, faster than ``SeedSequence``, which takes 50 us per rank."""

    def __init__(self, text: str) -> None:
        self._rng = random.Random(text)

    def generate_state(self, n_words: int, dtype: Any = np.uint32) -> Any:
        words = np.frombuffer(self._rng.randbytes(n_words * np.dtype(dtype).itemsize), dtype=dtype)
        return words.tolist()  # MT19937 reads a list in 5 us, but an array in 35 us


class _States(NamedTuple):
    """Stores the random states of one process. ``numpy`` is a ``RandomState`` that uses ``generator``."""

    torch: torch.Tensor
    generator: Any
    numpy: np.random.RandomState
    python: random.Random


class RandomStates:
    """Stores the random states of each rank and of the code outside the ranks, and activates one of them at a time.

    The initial states are derived from the seed and the rank. Only the ``inherited`` generators, which a script may
    seed before it calls ``run``, begin with the caller's states on every rank.
    """

    def __init__(self, size: int, seed: int, inherited: Collection[str] = ()) -> None:
        self._seed = seed
        callers: dict[str, Callable[[], Any]] = {
            "random": random.getstate,
            "numpy": lambda: np.random.get_state(legacy=False),
            "torch": torch.get_rng_state,
        }
        self._inherited_kind = type(np.random.get_bit_generator())
        self._inherited = {name: callers[name]() for name in inherited}
        fresh = [self._fresh(str(rank)) for rank in range(size)]
        self._torch = [states.torch for states in fresh]
        self._generators = [states.generator for states in fresh]
        self._numpy = [states.numpy for states in fresh]
        self._random = [states.python for states in fresh]
        # The last entry of each list is the state of the code outside all ranks.
        self._torch.append(torch.get_rng_state())
        self._modes = RankModes(size, FRESH)
        self._programs = [sys.modules["__main__"]] * (size + 1)
        self._generators.append(np.random.get_bit_generator())
        # numpy's global instance uses the running rank's generator, even in other threads. Code outside the ranks
        # therefore has its own instance.
        numpy_outside = np.random.RandomState(self._generators[-1])
        numpy_outside.set_state(
            np.random.mtrand._rand.get_state(legacy=False)
        )  # the state includes the stored second variate of a normal pair
        self._numpy.append(numpy_outside)
        self._random.append(random._inst)
        self._entropy: dict[int, random.Random] = {}
        self._processes = [str(rank) for rank in range(size)]
        self._thread = get_ident()
        self._names_outside: tuple[dict[str, Any], ...] = ()
        self._outside = size
        self.current = size

    def _fresh(self, process: str) -> _States:
        """Return a process's initial random states: inherited, or derived from the seed and the process's name."""
        inherited = self._inherited
        number = random.Random(f"{self._seed} random state {process}").getrandbits(63)
        seed: Any = _Seed(f"{self._seed} numpy's random state {process}")
        kind: Any = self._inherited_kind if "numpy" in inherited else np.random.MT19937
        generator = kind(seed if kind is np.random.MT19937 else 0)
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
        """Initialise the random states for a new process of ``rank``."""
        current = self.current
        if rank == current:
            self.switch(self._outside)
        self._processes[rank] = process = f"{rank}, started again {incarnation} times"
        states = self._fresh(process)
        self._torch[rank], self._generators[rank] = states.torch, states.generator
        self._numpy[rank], self._random[rank] = states.numpy, states.python
        self._entropy.pop(rank, None)
        self._modes.reset(rank)
        self._programs[rank] = self._programs[self._outside]
        self.switch(current)

    @contextlib.contextmanager
    def of_this_thread(self) -> Iterator[None]:
        """Replace this thread's system random bytes with per-rank deterministic bytes until the context ends."""
        self._thread = get_ident()
        with entropy_from(self._entropy_bytes):
            yield

    def _entropy_bytes(self, count: int) -> bytes | None:
        """Return random bytes for the running rank, or None if no rank is running."""
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
        modules = sys.modules
        self._programs[current], modules["__main__"] = modules["__main__"], self._programs[rank]
        _set_numpy_generator(self._generators[rank])
        self.current = rank

    def _install(self) -> None:
        self._names_outside = (
            {name: getattr(random, name) for name in _RANDOM_NAMES},
            {name: getattr(np.random, name) for name in [*_NUMPY_NAMES, "set_bit_generator"]},
        )
        random.__dict__.update({name: self._asking(self._random, name) for name in _RANDOM_NAMES})
        np.random.__dict__.update({name: self._asking(self._numpy, of) for name, of in _NUMPY_NAMES.items()})
        np.random.__dict__["set_bit_generator"] = self._replace_numpy

    @functools.wraps(_set_numpy_generator)
    def _replace_numpy(self, bitgen: Any) -> None:
        _set_numpy_generator(bitgen)
        self._generators[self.current] = generator = np.random.get_bit_generator()
        self._numpy[self.current] = np.random.RandomState(generator)

    def _asking(self, instances: list[Any], name: str) -> Callable[..., Any]:
        """Return a function that calls the method ``name`` of the running rank's generator."""

        def ask(*args: Any, **kwargs: Any) -> Any:
            is_ours = get_ident() == self._thread  # other threads use the process's own instance
            return getattr(instances[self.current if is_ours else self._outside], name)(*args, **kwargs)

        ask.__name__ = ask.__qualname__ = name
        ask.__doc__ = getattr(instances[-1], name).__doc__
        return ask

    def restore(self) -> None:
        """Restore the process's own random states and the replaced functions."""
        if self.current != self._outside:
            self.switch(self._outside)
            np.random.mtrand._rand.set_state(self._numpy[-1].get_state(legacy=False))
        self._modes.restore()
        for module, names in zip((random, np.random), self._names_outside, strict=False):
            module.__dict__.update(names)
        self._names_outside = ()
