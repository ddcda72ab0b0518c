"""Computes a regional server's contributions to the global server, and merges the global anchor (HALoS, 2506.04531).

theta is the island's anchor, r the *reference* from which its progress is measured, g the global anchor, and alpha is
``merge_weight``:

    after K versions:           c <- theta, and the global server makes an outer step of g with D = r - c
    when g arrives:             r <- (1 - alpha) c + alpha g,    theta <- r + (theta - c)

HALoS sets theta <- (1 - alpha) theta + alpha g and r <- theta instead (``src/halos/simulation/exec_halos.py`` and
``ps.py``, 4b5bf73, and a second implementation on OpenDiLoCo). Both updates are equal if the island's anchor does not
change while the contribution is in flight. Otherwise, HALoS never contributes the change. (The help text of HALoS's
``--model_merge_weight`` confuses alpha and 1 - alpha.)

With error feedback, the encoding error of D, times the decay, is added to r after the merge, so that the next
difference contains the error. The error of a contribution that is dropped unapplied is dropped too, because the
contribution is then computed again.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from asyncdist.protocols.async_diloco.blocks import Block, Layouts
from asyncdist.protocols.exchange.layout.copies import norm_of
from asyncdist.protocols.exchange.layout.wire_layout import Scratch


@torch.no_grad()
def encode_difference(
    layouts: Layouts, reference: Block, own: Block, encoded: Sequence[Tensor], decay: float | None = None
) -> tuple[float, list[Tensor]]:
    """Write the contribution of an island (group of ranks) into ``encoded``.

    Args:
        reference: The island's anchor after the last merge, plus the encoding errors of the last contribution.
        own: The island's current anchor.
        decay: Decay of the error feedback; None for no error feedback.

    Returns:
        The difference's L2 norm, and the decayed encoding errors, one flat tensor for each vector with a codec. There
        are no errors without error feedback, or if the norm is not finite.
    """
    norm, errors = 0.0, list[Tensor]()
    vectors = zip(layouts.wire.vectors, reference[1], own[1], encoded, strict=True)
    for vector, before, now, into in vectors:
        flat = vector.values_of(into, Scratch())
        if vector.role != "stepped":
            flat.copy_(now)
            continue
        torch.sub(before, now, out=flat)
        norm = math.hypot(norm, norm_of(flat))
        if vector.codec is not None:
            vector.codec.encode(flat, into)
            if decay is not None:
                errors.append(flat.sub_(vector.decoded(into)).mul_(decay))
    return norm, errors if math.isfinite(norm) else []


@torch.no_grad()
def add_errors(layouts: Layouts, reference: Block, errors: Sequence[Tensor]) -> Block:
    """Return a reference with encoding errors, so that the island's next contribution contains the errors.

    Args:
        errors: Errors from :func:`encode_difference`. If empty, ``reference`` itself is returned.
    """
    if not errors:
        return reference
    block, rest = layouts.loaded_anchor(reference[1]), iter(errors)
    for vector, values in zip(layouts.wire.vectors, block[1], strict=True):
        if vector.codec is not None:
            values.add_(next(rest))
    return block


@torch.no_grad()
def merge_into(layouts: Layouts, own: Sequence[Tensor], given: Sequence[Tensor], weight: float) -> None:
    """Merge a global anchor into an island's anchor. Integer and bool buffers are unchanged.

    Args:
        own: Values of the island's anchor, which are changed.
        given: Values of the global anchor.
        weight: Weight alpha of the global anchor, from 0 to 1.
    """
    for vector, mine, other in zip(layouts.exact.vectors, own, given, strict=True):
        if vector.role == "copied":
            continue
        if weight == 1.0:
            mine.copy_(other)
        else:  # equal values are kept, because merging equal infinities may give NaN
            merged = mine.mul(1.0 - weight).add_(other, alpha=weight)
            mine.copy_(torch.where(mine == other, mine, merged))


@torch.no_grad()
def rebase(layouts: Layouts, own: Sequence[Tensor], captured: Sequence[Tensor], reference: Sequence[Tensor]) -> None:
    """Move an island's anchor by the change that a merge has made: own + (reference - captured).

    Floating buffers are copied from the reference. Integer and bool buffers are unchanged.

    Args:
        own: Values of the island's anchor, which are changed.
        captured: Values of the island's anchor when the contribution was captured.
        reference: The captured values, merged with the global anchor.
    """
    for vector, mine, before, new in zip(layouts.exact.vectors, own, captured, reference, strict=True):
        if vector.role == "averaged":
            mine.copy_(new)
        elif vector.role == "stepped":
            mine.sub_(before - new)
