"""Gives each rank random numbers of its own, although the program seeds all ranks alike.

A program for one process has one seed: first weights, the order of its rows and its dropout follow from it. First
weights should be equal on all ranks, and the rest should differ, or the ranks train the same model in the same way.

- Weights are made before a training begins, so they follow from the program's seed.
- :func:`draw_apart` separates the global generators when the training begins.
- :func:`shuffle_apart` separates samplers that have a seed or a generator of their own. The ranks of one replica keep
  one order, which their library divides among them.

Nothing is drawn from the clock or the system: a program that is repeatable stays so.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any, Final

import numpy as np
import torch
from torch.utils.data import Sampler

#: Samplers of these packages are changed. A sampler that the user has written may divide rows among ranks already.
_LIBRARIES: Final = {"torch", "accelerate", "transformers", "lightning", "pytorch_lightning", "lightning_fabric"}
#: Attributes under which loaders and samplers hold other samplers.
_HOLDING: Final = ("batch_sampler", "sampler", "_sampler")
#: Attributes from which a sampler seeds a generator at the beginning of each epoch.
_SEEDS: Final = ("seed", "initial_seed")
#: Attributes that say among how many processes a sampler divides rows.
_DIVIDING: Final = ("num_replicas", "num_processes", "dp_size")


def mix(seed: int, number: int) -> int:
    """Return a seed of 32 bits that follows from both, and has nothing in common with those of other numbers."""
    return int(np.random.SeedSequence([seed % 2**64, number]).generate_state(1)[0])


def draw() -> int:
    """Return a number that torch's global generator draws."""
    return int(torch.empty((), dtype=torch.int64, device="cpu").random_())


def draw_apart(number: int) -> None:
    """Let :mod:`random`, numpy's global generator and torch draw other numbers than on ranks with another ``number``.

    Each of the three continues from its own next number, mixed with ``number``.
    """
    random.seed(mix(random.getrandbits(64), number))
    np.random.seed(mix(int(np.random.randint(2**32, dtype=np.uint64)), number))
    torch.manual_seed(mix(draw(), number))


def shuffle_apart(loader: Any, number: int, *, size: int = 1, seed: int | None = None) -> None:
    """Let a loader's samplers draw another order than those with another ``number``.

    Seeds and generators of samplers are mixed with ``number``. A sampler that divides rows among other than ``size``
    processes stays unchanged: the user has divided rows among all ranks.

    Args:
        loader: A ``DataLoader``, or a loader that a library has made of one.
        number: The number of the replica, equal on its ranks; the rank, if each rank is a replica.
        size: The number of ranks of a replica.
        seed: The seed for samplers that would draw from torch's global generator, equal on the ranks of a replica;
            None to let them do so.
    """
    for sampler in _samplers_of(loader, size):
        is_of_library = _is_of_library(sampler)
        if seed is not None and hasattr(sampler, "generator") and sampler.generator is None:
            sampler.generator = torch.Generator().manual_seed(mix(seed, number))
        elif is_of_library and isinstance(getattr(sampler, "generator", None), torch.Generator):
            sampler.generator.manual_seed(mix(sampler.generator.initial_seed(), number))
        for name in _SEEDS:
            if is_of_library and isinstance(given := getattr(sampler, name, None), int):
                setattr(sampler, name, mix(given, number))


def _is_of_library(sampler: Any) -> bool:
    return type(sampler).__module__.partition(".")[0] in _LIBRARIES


def _samplers_of(loader: Any, size: int) -> Iterator[Any]:
    """Yield a loader's samplers, each once, and those inside samplers of a library."""
    waiting, seen = [loader], [loader]
    while waiting:
        holder = waiting.pop()
        inside = [getattr(holder, name, None) for name in _HOLDING]
        if isinstance(holder, Sampler):  # Lightning wraps a sampler twice; the outer one calls the inner one a data set
            inside.append(getattr(getattr(holder, "dataset", None), "_sampler", None))
        for sampler in inside:
            if sampler is None or any(sampler is other for other in seen):
                continue
            if any(getattr(sampler, name, size) != size for name in _DIVIDING):
                continue
            seen.append(sampler)
            yield sampler
            if _is_of_library(sampler):
                waiting.append(sampler)
