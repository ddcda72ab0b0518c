"""Computes the radial-directional mean of tensors: the mean of their norms times their mean direction.

For tensors v_i with weights w_i, and phi(x) = x / |x| with phi(0) = 0 (Decoupled DiLoCo, 2604.21428):

    sum(w_i |v_i|) / sum(w_i) * phi(sum(w_i phi(v_i)) / sum(w_i))

The plain mean of k orthogonal tensors of equal norm is shorter by a factor of sqrt(k), but the radial-directional mean
keeps their norm. If the directions cancel each other out, the plain mean is used instead. Embeddings always use the
plain mean.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Final

import torch
from torch import Tensor, nn

from asyncdist.tensors.means import weighted_mean_into

#: Largest length (0 to 1) of a mean direction that counts as 0, so that float32 rounding errors are not a direction.
CANCELLED: Final = 1e-5


@torch.no_grad()
def radial_mean_into(into: Tensor, parts: Sequence[Tensor], weights: Sequence[float]) -> None:
    """Write the radial-directional mean of ``parts``, the ranks' values of one tensor, into ``into``.

    Args:
        into: Flat float32 or float64 tensor.
        parts: Flat tensors with the dtype and shape of ``into``.
        weights: Weight of each part, above 0.
    """
    if len(parts) == 1:
        into.copy_(parts[0])
        return
    largest = max(weights)  # scales the weights, as a large weight times a norm could overflow
    shares = [weight / largest for weight in weights]
    norms = [torch.linalg.vector_norm(part, dtype=torch.float64).item() for part in parts]
    total = math.fsum(shares)
    into.zero_()
    for part, share, norm in zip(parts, shares, norms, strict=True):
        if norm > 0:
            into.add_(part * (1.0 / norm), alpha=share)
    length = torch.linalg.vector_norm(into, dtype=torch.float64).item()
    if not CANCELLED * total < length < math.inf:  # infinite if the norm of a part has no reciprocal
        weighted_mean_into(into, parts, weights)
        return
    mean_norm = math.fsum(share * norm for share, norm in zip(shares, norms, strict=True)) / total
    into.mul_(mean_norm / length)


def embeddings_of(model: nn.Module) -> set[str]:
    """Return the names of the weights of all embeddings of the model, including the names of tied weights."""
    tables = {id(each.weight) for each in model.modules() if isinstance(each, nn.Embedding | nn.EmbeddingBag)}
    return {name for name, each in model.named_parameters(remove_duplicate=False) if id(each) in tables}
