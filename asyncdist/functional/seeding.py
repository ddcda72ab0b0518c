"""Seeds the random states of a rank."""

from __future__ import annotations

import random

import numpy as np
import torch

from asyncdist import validation
from asyncdist.runtime.world import World, current_world


def seed_all(seed: int, *, world: World | None = None) -> int:
    """Seed :mod:`random`, numpy's global generator and torch, on all devices, differently on each rank.

    The ranks of a population should not shuffle and drop out alike. Where they are to begin with equal weights, make
    the model after ``torch.manual_seed(seed)``, and call this afterwards.

    Args:
        seed: 0 or more, equal on all ranks.
        world: the current one by default.

    Returns:
        The number that this rank's states were seeded with: drawn from ``seed`` and rank by numpy's ``SeedSequence``,
        so that those of two ranks, or of neighbouring seeds, have nothing in common.

    Raises:
        ValueError: ``seed`` is no such number.
        RuntimeError: there is no world here.
    """
    validation.count("seed", seed, least=0)
    rank = (world or current_world()).rank
    number = int(np.random.SeedSequence([seed, rank]).generate_state(1)[0])
    random.seed(number)
    np.random.seed(number)
    torch.manual_seed(number)
    return number
