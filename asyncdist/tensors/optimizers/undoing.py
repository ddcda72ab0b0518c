"""Detects an optimizer that undoes averages, because it keeps a copy of the weights that no search finds.

If the optimizer keeps an average, its next step begins at the average. If it undoes the average, its next step begins
at the old weights, so the weights first go back by the whole change. The two steps differ by exactly this change, even
if a step is longer than the change. A test therefore projects the steps on the change. The second step shows how far an
ordinary step leads in this direction.

A first step that leads nearly exactly to the old weights is ambiguous, because they may be the minimum of the rank's
own loss. An example is a quadratic loss with LBFGS, or with SGD at a suitable learning rate. torch's own optimizers,
which hide no weights, are therefore not tested.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import torch
from torch import Tensor, nn

from asyncdist.tensors.model_tensors import local_part
from asyncdist.tensors.optimizers.recognition import PROOF_COUNT, sample_of

#: Log-likelihood ratio from which an optimizer is considered to undo averages.
PROOF: Final = 20.0
#: Projection of the first step on the change above which the optimizer has obviously kept the average.
_KEPT: Final = -0.25
#: Minimum ratio of the change to the weights. A smaller change may be a rounding error.
_ROUNDING: Final = 1e-5


class Replaced:
    """Samples the weights around a replacement by an average, to detect whether the optimizer undoes the average.

    A sample is taken before and after the replacement, and after each of the optimizer's next two steps.
    """

    def __init__(self, parameters: Sequence[nn.Parameter]) -> None:
        self._parameters = parameters
        self._old = self._sample()
        self._new = self._old
        self._next: Tensor | None = None  # weights after the first step, if it may have undone the average

    def note_new(self) -> None:
        """Sample the weights after they were replaced by the average."""
        self._new = self._sample()

    def have_changed_since(self) -> bool:
        """Return whether the weights have changed since they were replaced (:meth:`note_new`)."""
        return not torch.equal(self._sample(), self._new)

    def evidence(self) -> float | None:
        """Return how strongly the steps since :meth:`note_new` suggest that the optimizer undoes averages.

        Must be called after each step until the result is a number.

        Returns:
            Log-likelihood ratio, negative if the average was kept, or None if another step is necessary.
        """
        now = self._sample()
        change = self._new - self._old
        seen = change != 0.0
        change = change[seen]
        length = float(change.norm())
        if int(seen.sum()) < PROOF_COUNT or not length > _ROUNDING * float(self._new[seen].norm()):
            return 0.0
        first = (now if self._next is None else self._next)[seen] - self._new[seen]
        projection = float(first @ change) / length**2
        if self._next is None:
            if not projection < _KEPT:  # true also if the weights are not finite
                return -PROOF
            self._next = now
            return None
        second = (now - self._next)[seen]
        step = max(float(second.norm()), float((first - projection * change).norm()))
        if not second.any():  # gradients are being accumulated
            return None
        excess = projection - float(second @ change) / length**2
        # The excess is the first step's movement along the average's change, less an ordinary step's, in units of the
        # change. It is -1 if the optimizer has undone the average, and 0 if not, plus normal noise of an ordinary step.
        ratio = (0.5 - abs(excess + 1.0)) * length**2 / (2.0 * step**2)
        return max(-PROOF, min(PROOF, ratio)) if ratio == ratio else 0.0

    def _sample(self) -> Tensor:
        return sample_of([local_part(each) for each in self._parameters])
