"""Makes random numbers differ between ranks, although the program sets the same seed on all ranks.

In a program for one process, one seed determines the initial weights, the order of rows, and dropout. The initial
weights should be equal on all ranks, but everything else should differ. Otherwise, all ranks would train the same model
in the same way.

- The program's seed determines the weights, because they are initialised before training begins.
- :func:`seed_by_number` makes the global generators differ when training begins.
- :func:`shuffle_by_number` does the same for samplers with their own seed or generator, and for a loader's generator,
  which seeds its workers. The ranks of a replica keep the same order, because their library divides the rows.

Neither the clock nor the system's entropy is used, so a reproducible program remains reproducible.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any, Final

import numpy as np
import torch
from torch.utils.data import DistributedSampler, Sampler, SequentialSampler

#: Packages whose samplers are reseeded. The samplers of other packages may already divide rows among ranks.
_LIBRARIES: Final = {
    "accelerate",
    "lightning",
    "lightning_fabric",
    "pytorch_lightning",
    "sentence_transformers",
    "torch",
    "torchdata",
    "transformers",
    "trl",
}
#: Attributes through which loaders and samplers refer to other samplers.
_HOLDING: Final = ("batch_sampler", "sampler", "_sampler")
#: Attributes with the seed from which a sampler makes a generator in each epoch.
_SEEDS: Final = ("seed", "initial_seed")
#: Attributes with the number of processes among which a sampler divides rows.
_DIVIDING: Final = ("num_replicas", "num_processes", "dp_size")

#: Key of the workers' seed in the state of a StatefulDataLoader.
_WORKERS_SEED: Final = "_base_seed"


def mix(seed: int, number: int) -> int:
    """Return a 32-bit seed derived from ``seed``. Seeds for different values of ``number`` are unrelated."""
    return int(np.random.SeedSequence([seed % 2**64, number]).generate_state(1)[0])


def draw() -> int:
    """Return a random 64-bit integer from torch's global generator."""
    return int(torch.empty((), dtype=torch.int64, device="cpu").random_())


def seed_by_number(number: int) -> None:
    """Reseed :mod:`random` and the global generators of NumPy and torch, so that they differ between ranks.

    Each generator is seeded with its next number, mixed with ``number``, which must differ between ranks.
    """
    random.seed(mix(random.getrandbits(64), number))
    np.random.seed(mix(int(np.random.randint(2**32, dtype=np.uint64)), number))
    torch.manual_seed(mix(draw(), number))


def shuffle_by_number(loader: Any, number: int, *, size: int = 1, seed: int | None = None) -> None:
    """Mix ``number`` into the seeds of a loader's samplers and workers, so that replicas shuffle differently.

    A sampler that divides rows among a number of processes other than ``size`` is left unchanged, because the user has
    divided the rows among all ranks.

    Args:
        loader: ``DataLoader``, possibly wrapped by a library.
        number: Number of the replica, which is the rank if each rank is a replica.
        size: Number of ranks per replica.
        seed: Seed, equal on the ranks of a replica, for samplers that would otherwise use torch's global generator.
            None to let them use that generator.
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
    generator = getattr(loader, "generator", None)
    if isinstance(generator, torch.Generator) and not any(
        value is generator
        for sampler in _samplers_of(loader, size)
        for value in getattr(sampler, "__dict__", {}).values()  # a sampler may be a list
    ):
        generator.manual_seed(mix(generator.initial_seed(), number))


def reads_in_order(loader: Any, world_size: int) -> bool:
    """Return whether a loader reads the rows in the order of the data set, which is then the same for all replicas."""
    while (inside := getattr(loader, "batch_sampler", None)) is not None:
        loader = inside
    sampler = getattr(loader, "sampler", None)
    if isinstance(sampler, DistributedSampler):  # it divides the rows among the ranks of a replica, or among all ranks
        return not sampler.shuffle and sampler.num_replicas < world_size
    return isinstance(sampler, SequentialSampler)


def saves_order(loader: Any) -> bool:
    """Return whether the loader's state contains its order of rows, as in a shuffling StatefulDataLoader."""
    return _stateful(loader) is not None and any(
        type(sampler).__module__.startswith("torchdata.") and hasattr(sampler, "generator")
        for sampler in _samplers_of(loader, 1)
    )


def forget_order(loader: Any) -> None:
    """Let a StatefulDataLoader, possibly wrapped by Accelerate, begin its next epoch without a state.

    This drops the order of rows in a loaded state. It also drops the order that the workers have begun to draw, because
    Accelerate creates the loader's iterator early.
    """
    inner = _stateful(loader)
    if inner is None:
        return
    inner.load_state_dict({})  # also drops the iterator
    inner.next_iter_state = None
    if inner is not loader:
        loader.dl_state_dict = {}


def seed_workers_by_number(loader: Any, number: int) -> None:
    """Mix ``number`` into the seed of the workers that a StatefulDataLoader has loaded from another rank's state."""
    inner = _stateful(loader)
    if inner is not None:
        inner.next_iter_state = with_seeds_by_number(inner.next_iter_state, number)


def with_seeds_by_number(state: Any, number: int) -> Any:
    """Return a copy of a StatefulDataLoader's state, or of a container of states, with other seeds of the workers."""
    if isinstance(state, list):
        return [with_seeds_by_number(each, number) for each in state]
    if not isinstance(state, dict):
        return state
    return {
        key: mix(value, number) if key == _WORKERS_SEED else with_seeds_by_number(value, number)
        for key, value in state.items()
    }


def _stateful(loader: Any) -> Any:
    """Return a StatefulDataLoader, unwrapped, or None for another loader."""
    inner = getattr(loader, "base_dataloader", loader)
    return inner if hasattr(inner, "next_iter_state") else None


def _is_of_library(sampler: Any) -> bool:
    return type(sampler).__module__.partition(".")[0] in _LIBRARIES


def _samplers_of(loader: Any, size: int) -> Iterator[Any]:
    """Yield each sampler of a loader once, including samplers that a library's wrappers contain."""
    waiting, seen = [loader], [loader]
    while waiting:
        holder = waiting.pop()
        inside = [getattr(holder, name, None) for name in _HOLDING]
        inside += getattr(holder, "batch_samplers", ())  # sentence_transformers has a batch sampler per dataset
        if isinstance(holder, Sampler):  # Lightning wraps a sampler in a dataset, and the dataset in a sampler
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
