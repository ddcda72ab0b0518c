"""Corrects a contribution's difference, by its staleness or its direction, before the outer step.

A correction is a function ``correct(difference, momentum, staleness)`` that returns the corrected difference of one
tensor of the model:

- ``difference``: The flat difference D = anchor - weights of this tensor, which may be overwritten and returned.
- ``momentum``: The outer optimizer's momentum buffer of the same tensor, which must not be changed; None before
  the first outer step, or if the optimizer has no momentum.
- ``staleness``: Number of versions of the anchor since the version from which the difference is measured.

A correction keeps no state. Users may pass their own functions.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final, TypeAlias

import torch
from torch import Tensor

from asyncdist import validation

#: Function of a tensor's flat difference, momentum (or None) and staleness that returns the corrected difference.
Correction: TypeAlias = Callable[[Tensor, Tensor | None, int], Tensor]

_BELOW_ONE: Final = 1.0 - 2.0**-53
_finite = functools.partial(validation.real, allowed="a finite number >= 0", low=0.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class StalenessWeight:
    """Multiplies a difference by ``scale`` / (1 + staleness) ** ``power``.

    The defaults are the polynomial weight of FedAsync (Xie et al., 1903.03934). The notebook of Liu et al. (2401.09135)
    also multiplies each arrival by 1 / sqrt(k), for k ranks: ``StalenessWeight(power=0, scale=k**-0.5)`` is its
    "constant" weight, and ``StalenessWeight(scale=k**-0.5)`` its "polynomial" weight.

    Args:
        power: Exponent, at least 0; with 0, the staleness has no effect.
        scale: Weight of a difference that is not stale.
        first_round: Whether a difference from the first anchor counts as at least k / n - 1 versions old, for k ranks
            and n contributions per version. All ranks begin from this anchor, so the first contribution would otherwise
            count as much as a whole round.

    Raises:
        ValueError: An option is out of range.
    """

    power: float = 0.5
    scale: float = 1.0
    first_round: bool = False

    def __post_init__(self) -> None:
        _check(self, power=_finite, scale=_positive)

    def __call__(self, difference: Tensor, momentum: Tensor | None, staleness: int) -> Tensor:
        """Weight the difference in place, and return it."""
        del momentum
        return difference.mul_(self.weight(staleness))

    def weight(self, staleness: float) -> float:
        """Return the factor of a difference that is ``staleness`` versions old."""
        return float(self.scale * (1.0 + staleness) ** -self.power)


@dataclass(frozen=True, slots=True, kw_only=True)
class CGAD:
    """Multiplies a difference by exp(-``decay`` s) (1 + cos(pi s / ``cutoff``)) / 2, or by 0 from the cutoff on.

    s is the staleness. Cosine-Gated Adam-Decay (Shah and Sun, 2605.09126) scales differences in this way before Adam's
    moments, so combine it with ``outer_optimizer=functools.partial(torch.optim.Adam, lr=...)`` or ``FedAdam``. A
    difference that is not stale is unchanged.

    The paper's abstract describes an exponential times a cosine gate that is 0 past a cutoff. The half cosine is an
    assumption. The options have no defaults, because the abstract gives no values. The paper's experiments have delays
    of up to 8.

    Args:
        decay: Rate of the exponential per version, at least 0.
        cutoff: Staleness, above 0, from which differences are dropped.

    Raises:
        ValueError: An option is out of range.
    """

    decay: float
    cutoff: float

    def __post_init__(self) -> None:
        _check(self, decay=_finite, cutoff=_positive)

    def __call__(self, difference: Tensor, momentum: Tensor | None, staleness: int) -> Tensor:
        """Weight the difference in place, and return it."""
        del momentum
        return difference.mul_(self.weight(staleness))

    def weight(self, staleness: int) -> float:
        """Return the factor of a difference that is ``staleness`` versions old."""
        if staleness >= self.cutoff:
            return 0.0
        return math.exp(-self.decay * staleness) * (1.0 + math.cos(math.pi * staleness / self.cutoff)) / 2.0


@dataclass(frozen=True, slots=True, kw_only=True)
class HeLoCo:
    """Turns differences towards the outer momentum, and shrinks the part of a difference that opposes the momentum.

    c is the cosine between the difference D and the momentum m of a tensor, v = m / |m|, and the confidence is
    f = |D| / (|D| + kappa |m|) (Al Asif et al., 2606.00271, algorithm 2, per tensor):

    - c >= ``threshold``: D is unchanged.
    - 0 <= c < ``threshold``: D is turned towards m and keeps its norm. Its new direction is the direction of
      (1 - b) D / |D| + b v, with b = min(``turn`` (1 - c) f, 1).
    - c < 0: D - b c |D| v, with b = min(``shrink`` (-c) f, ``shrink_max``). This removes a share b of the
      opposing part.

    Without momentum, or if D or m is 0, D is unchanged, so the paper's small constant in denominators is not needed.

    The paper's momentum is a running mean, mu m + (1 - mu) D. torch's SGD and :class:`DelayedNesterov` keep a sum,
    which is 1 / (1 - mu) times as long. ``momentum`` (mu) converts the sum for the confidence.

    The formula is from ``canon/math/heloco.md`` of junaidaliop/zij (00728ec) and ``torchft/heloco.py`` of
    PanocularAI/torchft (0b0bae4), which belongs to the company of one of the authors. The defaults are torchft's. The
    paper itself was not read. According to torchft, the paper also multiplies the corrected D by 1 / sqrt(k) for k
    ranks, and sends the ranks a - lr mu m instead of the anchor a. This class does neither.

    Args:
        momentum: Momentum coefficient mu of the outer optimizer.
        threshold: Smallest cosine with which D is unchanged (c_ok).
        turn: Strength of the turn (k_d).
        shrink: Strength of the shrinkage (k_s).
        shrink_max: Largest share of the opposing part that is removed (beta_max).
        kappa: Weight of the momentum's norm in the confidence.

    Raises:
        ValueError: An option is out of range.
    """

    momentum: float = 0.9
    threshold: float = 0.2
    turn: float = 1.0
    shrink: float = 0.5
    shrink_max: float = 0.5
    kappa: float = 3.0

    def __post_init__(self) -> None:
        _check(
            self,
            momentum=functools.partial(validation.real, allowed="a number >= 0 and < 1", low=0.0, high=_BELOW_ONE),
            threshold=functools.partial(validation.real, allowed="a cosine from 0 to 1", low=0.0, high=1.0),
            turn=_finite,
            shrink=_finite,
            shrink_max=validation.fraction,
            kappa=_finite,
        )

    def __call__(self, difference: Tensor, momentum: Tensor | None, staleness: int) -> Tensor:
        """Correct the difference in place, and return it."""
        del staleness
        if momentum is None:
            return difference
        length = torch.linalg.vector_norm(difference).item()
        momentum_length = torch.linalg.vector_norm(momentum).item()
        if not length or not momentum_length:
            return difference
        cosine = torch.dot(difference, momentum).item() / (length * momentum_length)
        if not cosine < self.threshold:
            return difference  # even if the cosine is NaN
        mean_length = (1.0 - self.momentum) * momentum_length
        own, other = self.shares(cosine, length / (length + self.kappa * mean_length))
        return difference.mul_(own).add_(momentum, alpha=other * length / momentum_length)

    def shares(self, cosine: float, confidence: float) -> tuple[float, float]:
        """Return p and q of the corrected difference p D + q |D| m / |m|, for a cosine below the threshold."""
        if cosine < 0.0:
            share = min(self.shrink * -cosine * confidence, self.shrink_max)
            return 1.0, -share * cosine
        share = min(self.turn * (1.0 - cosine) * confidence, 1.0)
        norm = math.sqrt((1.0 - share) ** 2 + share**2 + 2.0 * share * (1.0 - share) * cosine)
        return (1.0 - share) / norm, share / norm


def correct_tensors(
    correct: Correction,
    difference: Tensor,
    momentum: Tensor | None,
    bounds: Sequence[tuple[int, int]],
    staleness: int,
) -> None:
    """Correct a flat difference in place, one tensor of the model at a time.

    Args:
        difference: Flat difference of several tensors.
        momentum: Flat momentum buffer of the same tensors, or None.
        bounds: First element of each tensor in the flat difference, and the element after its last.
        staleness: Number of versions since the anchor from which the difference was measured.

    Raises:
        ValueError: The correction returns a tensor of another shape.
    """
    for first, last in bounds:
        part = difference[first:last]
        found = correct(part, None if momentum is None else momentum[first:last], staleness)
        if found.shape != part.shape:
            raise ValueError(
                f"correct must return a tensor of the difference's shape {tuple(part.shape)}, got {tuple(found.shape)}"
            )
        if found is not part:
            part.copy_(found)


def _positive(name: str, value: Any) -> float:
    return validation.real(name, value, "a finite number > 0", low=validation.SMALLEST)


def _check(correction: object, **checks: Callable[[str, Any], float]) -> None:
    for name, check in checks.items():
        object.__setattr__(correction, name, check(name, getattr(correction, name)))
