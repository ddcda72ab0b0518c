"""Measures how much one rank's difference improves a held-out metric, with trial weights in the rank's own model.

The metric is evaluated twice: at the anchor, which is equal on all ranks, and after a *trial step*. A trial step adds a
share of this rank's change of one fragment to the anchor. With k donors, the share is 1 / k, as in their mean. A trial
step of the whole difference would be misleading. Late in a training, noise often makes each rank's own weights worse
than the anchor, although the mean of all differences improves the anchor. The harm of noise grows with the square of
the share, but the gain of progress only with the share. If the donors' noise is independent, a trial step of share 1 /
k has 1 / k of the gain of the mean.

The ranks of a replica measure together, each with trial weights in its part of the model.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence

import torch
from torch import Tensor

from asyncdist.protocols.diloco.anchored import restored
from asyncdist.protocols.exchange.fragment import Fragment
from asyncdist.protocols.exchange.layout.copies import as_written, gather, scatter


async def measure(
    fragments: Sequence[Fragment],
    chosen: int,
    tensors: Sequence[Tensor],
    share: float,
    evaluate: Callable[[], Awaitable[float]],
    complete: Callable[[Sequence[int]], Awaitable[None]],
) -> tuple[float, float]:
    """Return the metric of the anchor, and the metric after a trial step of one fragment.

    The model's parameters and buffers are restored, even after an exception.

    Args:
        fragments: All fragments of the model, with anchors.
        chosen: Index of the fragment whose difference is tried.
        share: Length of the trial step as a share of the difference.
        evaluate: Function that returns the metric of the model's current weights.
        complete: Function that receives the missing parts of fragments from the other ranks of the replica.
    """
    fragment = fragments[chosen]
    moved = _trial_weights(fragment, tensors, share)
    with restored(tensors):
        for each in fragments:
            each.restore(tensors)
        await complete(range(len(fragments)))
        at_anchor = await evaluate()
        with torch.no_grad():
            for vector, flat in zip(fragment.layout.stepped, moved, strict=True):
                scatter(vector, flat, tensors)
        await complete([chosen])
        return at_anchor, await evaluate()


@torch.no_grad()
def _trial_weights(fragment: Fragment, tensors: Sequence[Tensor], share: float) -> list[Tensor]:
    """Return anchor + share * (own - base) for each vector of parameters.

    The base is the anchor, or for a late rank the older anchor from which it has trained.
    """
    found = []
    for vector, anchor, base in zip(fragment.layout.stepped, fragment.anchors, fragment.bases, strict=True):
        own = vector.new_flat()
        gather(vector, tensors, own)
        start = as_written(vector, base, tensors)
        if start is not anchor:
            own.sub_(start).add_(anchor)
        found.append(torch.lerp(anchor, own, share, out=own))
    return found
