"""Draws the perturbations of an evolution strategy, and estimates the gradient from the scores.

Perturbations are never sent: each rank draws those of all ranks again from the seed, the round and the rank. With n
mirrored pairs, the estimated gradient of the score F at the weights theta is

    g = 1 / (2 n sigma) * sum over all pairs of (F(theta + sigma eps) - F(theta - sigma eps)) eps

(Salimans et al., 1703.03864, with mirrored sampling and, as an option, their fitness shaping by ranks.)
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import Tensor

from asyncdist.protocols.evolution.options import EvolutionStrategyOptions
from asyncdist.protocols.simple.rule import drawn

Array: TypeAlias = np.ndarray[Any, np.dtype[np.float64]]


@torch.no_grad()
def perturbation(
    tensors: Sequence[Tensor], options: EvolutionStrategyOptions, round: int, rank: int, pair: int
) -> list[Tensor]:
    """Return standard normal values of each tensor's shape, on the CPU: float64 for float64, and float32 otherwise."""
    number = rank * options.pairs + pair
    generator = torch.Generator().manual_seed(int(drawn(options.seed, round, number + 1)[number]))
    return [torch.randn(each.shape, generator=generator, dtype=_wide(each), device="cpu") for each in tensors]


def coefficients(scores: Mapping[int, Sequence[float]], options: EvolutionStrategyOptions) -> dict[int, list[float]]:
    """Return the factor of each perturbation in the estimated gradient, by rank and pair.

    A pair with a score that is not finite has the factor 0, and does not count in n.

    Args:
        scores: Scores by rank, larger is better: of each pair in turn, the plus and the minus side.
    """
    table = np.array([scores[rank] for rank in sorted(scores)], dtype=np.float64).reshape(len(scores), -1, 2)
    is_finite = np.isfinite(table).all(axis=2)
    values = table[is_finite]
    if options.fitness == "rank":
        values = _centred_ranks(values)
    factors = np.zeros(table.shape[:2])
    factors[is_finite] = (values[:, 0] - values[:, 1]) / (2 * max(1, len(values)) * options.sigma)
    return {rank: row.tolist() for rank, row in zip(sorted(scores), factors, strict=True)}


def _centred_ranks(values: Array) -> Array:
    """Return the position of each value in sorted order, scaled to -0.5 to 0.5. Equal values have equal positions."""
    _, places, counts = np.unique(values, return_inverse=True, return_counts=True)
    positions = np.cumsum(counts) - (counts + 1) / 2  # from 0; the mean position of equal values
    ranks: Array = positions[places].reshape(values.shape) / max(1, values.size - 1) - 0.5
    return ranks


@torch.no_grad()
def estimated_gradient(
    tensors: Sequence[Tensor], factors: Mapping[int, Sequence[float]], round: int, options: EvolutionStrategyOptions
) -> list[Tensor]:
    """Return the estimated gradient of the score for each tensor: float32 or float64, on the CPU.

    Terms are added in the order of ranks and pairs, so that all ranks get the same bits.
    """
    found = [torch.zeros(each.shape, dtype=_wide(each), device="cpu") for each in tensors]
    for rank, row in factors.items():
        for pair, factor in enumerate(row):
            if factor:
                for total, values in zip(found, perturbation(tensors, options, round, rank, pair), strict=True):
                    total.add_(values, alpha=factor)
    return found


def _wide(tensor: Tensor) -> torch.dtype:
    return torch.float64 if tensor.dtype == torch.float64 else torch.float32
