"""Seeds a rank's random number generators."""

from __future__ import annotations

import random

import numpy as np
import torch

from asyncdist import validation
from asyncdist.functional.checkpoints.random_states import numpy_text
from asyncdist.runtime.world import World, current_world


class RestoredNumbers:
    """Records whether this rank's generators are still in the states that it restored from its own checkpoint.

    An integration gives the ranks of a training different random numbers, unless these ranks continue a checkpoint.
    """

    def __init__(self, _: object) -> None:
        self._restored: int | None = None

    def note(self) -> None:
        """Record the current states of the generators, which have just been restored."""
        self._restored = _hash_of_states()

    @property
    def are_unchanged(self) -> bool:
        """Whether no number was drawn and no seed was set since the last call of :meth:`note`."""
        return self._restored is not None and self._restored == _hash_of_states()


def _hash_of_states() -> int:
    return hash((random.getstate(), numpy_text(), torch.get_rng_state().numpy().tobytes()))


def seed_all(seed: int, *, world: World | None = None) -> int:
    """Seed :mod:`random`, NumPy's global generator and torch, on all devices, with a different seed on each rank.

    Shuffling and dropout then differ between ranks. For equal initial weights, call ``torch.manual_seed(seed)``, create
    the model, and call this function afterwards.

    Args:
        seed: Integer >= 0, equal on all ranks.
        world: World of the call, by default the current one.

    Returns:
        The seed of this rank's generators, derived from ``seed`` and rank with NumPy's ``SeedSequence``. Different
        ranks and adjacent values of ``seed`` give unrelated seeds.

    Raises:
        ValueError: ``seed`` is not an integer >= 0.
        RuntimeError: There is no current world.
    """
    seed = validation.count("seed", seed, least=0)
    rank = (world or current_world()).rank
    number = int(np.random.SeedSequence([seed, rank]).generate_state(1)[0])
    random.seed(number)
    np.random.seed(number)
    torch.manual_seed(number)
    return number
