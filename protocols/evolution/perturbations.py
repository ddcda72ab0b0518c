"""Draws the perturbations of an evolution strategy, and estimates the gradient from the scores.

Perturbations are never sent. Each rank draws all ranks' perturbations from the seed, the round and the ranks' numbers.
With n mirrored pairs eps, the estimated gradient of the score F at the weights theta is

    g = 1 / (2 n sigma) * sum over all pairs of (F(theta + sigma eps) - F(theta - sigma eps)) eps

(Salimans et al., 1703.03864, with mirrored sampling and, as an option, their fitness shaping by ranks.)
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final, TypeAlias

import numpy as np
import torch
from torch import Tensor

from asyncdist.protocols.evolution.options import EvolutionStrategyOptions
from asyncdist.protocols.simple.rule import drawn

#: Largest factor of a perturbation with which float32 sums of scaled perturbations are finite.
_LARGEST: Final = torch.finfo(torch.float32).max / 16

Array: TypeAlias = np.ndarray[Any, np.dtype[np.float64]]


@torch.no_grad()
def perturbation(
    tensors: Sequence[Tensor], options: EvolutionStrategyOptions, round: int, rank: int, pair: int
) -> list[Tensor]:
    """Return standard normal values with each tensor's shape, on the CPU, in float32 or wider.

    For a complex tensor, the real and the imaginary parts are standard normal.
    """
    number = rank * options.pairs + pair
    generator = torch.Generator().manual_seed(int(drawn(options.seed, round, 1, first=number)))
    found = []
    for each in tensors:
        shape = (*each.shape, 2) if each.is_complex() else each.shape
        values = torch.randn(shape, generator=generator, dtype=_wide(each).to_real(), device="cpu")
        found.append(torch.view_as_complex(values) if each.is_complex() else values)
    return found


def coefficients(scores: Mapping[int, Sequence[float]], options: EvolutionStrategyOptions) -> dict[int, list[float]]:
    """Return the factor of each perturbation in the estimated gradient, by rank and pair.

    If a score of a pair is not finite, or its factor is too large for float32, the factor is 0 and the pair is not
    counted.

    Args:
        scores: Scores by rank; larger is better. Each pair has two: with the perturbation added to the weights, then
            subtracted.
    """
    if not scores:
        return {}
    table = np.array([scores[rank] for rank in sorted(scores)], dtype=np.float64).reshape(len(scores), -1, 2)
    counts = np.isfinite(table).all(axis=2)
    if options.fitness == "rank":
        table[counts] = _centred_ranks(table[counts])
    with np.errstate(over="ignore", invalid="ignore"):
        differences = table[:, :, 0] - table[:, :, 1]
        counts &= np.abs(differences / (2 * options.sigma)) <= _LARGEST
    factors = np.zeros(table.shape[:2])
    factors[counts] = differences[counts] / (2 * max(1, np.count_nonzero(counts)) * options.sigma)
    return {rank: row.tolist() for rank, row in zip(sorted(scores), factors, strict=True)}


def _centred_ranks(values: Array) -> Array:
    """Return the rank of each value in sorted order, scaled to -0.5 to 0.5. Equal values have equal ranks."""
    _, places, counts = np.unique(values, return_inverse=True, return_counts=True)
    positions = np.cumsum(counts) - (counts + 1) / 2  # counted from 0; equal values share their mean position
    ranks: Array = positions[places].reshape(values.shape) / max(1, values.size - 1) - 0.5
    return ranks


@torch.no_grad()
def estimated_gradient(
    tensors: Sequence[Tensor], factors: Mapping[int, Sequence[float]], round: int, options: EvolutionStrategyOptions
) -> list[Tensor]:
    """Return the estimated gradient of the score for each tensor, on the CPU, in float32 or wider.

    Terms are added in the order of ``factors``, so that all ranks get the same bits.
    """
    found = [torch.zeros(each.shape, dtype=_wide(each), device="cpu") for each in tensors]
    for rank, row in factors.items():
        for pair, factor in enumerate(row):
            if factor:
                for total, values in zip(found, perturbation(tensors, options, round, rank, pair), strict=True):
                    total.add_(values, alpha=factor)
    return found


def _wide(tensor: Tensor) -> torch.dtype:
    if tensor.is_complex():
        return torch.promote_types(tensor.dtype, torch.complex64)
    return torch.float64 if tensor.dtype == torch.float64 else torch.float32
