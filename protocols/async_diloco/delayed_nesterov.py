"""Implements an outer optimizer for asynchronous DiLoCo: Nesterov momentum that is updated at every N-th arrival.

D is the difference of one arrival, a the anchor, and m the momentum buffer. eps, beta, N and c are ``lr``,
``momentum``, ``delay`` and ``activation``. N arrivals make a window (Liu et al., 2401.09135, algorithm 3):

    the arrivals 1 to N - 1 of a window:    a <- a - eps (c beta m + D / N)
    its last arrival:                       m <- beta m + (sum of the window's D) / N
                                            a <- a - eps ((1 - c N + c) beta m + D / N)

If all differences of a window are measured from the same anchor, the window moves the anchor like one Nesterov step
with their mean, except for rounding.

Without the delay, the momentum would last for 1 / (1 - beta) arrivals instead of windows. Single stale differences
would push the momentum in directions that no longer reduce the loss.

The paper's algorithm and ``src/halos/opt.py`` of HALoS (4b5bf73) have this formula. The published experiments
use c = 0.
"""

from __future__ import annotations

from typing import Any, Final

import torch
from torch import Tensor
from torch.optim.optimizer import ParamsT

from asyncdist import validation
from asyncdist.protocols.diloco.outer_optimizers import OuterOptimizer

_BELOW_ONE: Final = 1.0 - 2.0**-53


class DelayedNesterov(OuterOptimizer):
    """Takes a step with D / N at each arrival, and updates the momentum at every N-th arrival.

    With ``delay=1``, each step gives the same bits as ``torch.optim.SGD(lr=lr, momentum=momentum, nesterov=True,
    foreach=False)``. The momentum buffer is a sum of differences, without the factors ``lr`` and 1 - ``momentum``.

    Args:
        params: Parameters, whose gradients are the differences D.
        lr: Outer learning rate of a whole window.
        momentum: Decay of the momentum per window.
        delay: Number N of arrivals in a window. A window can count all ranks if N is a multiple of their number.
        activation: Share c of the momentum that is applied at each arrival except a window's last, 0 to 1 / ``delay``.

    Raises:
        TypeError, ValueError: An option is invalid.
    """

    def __init__(
        self, params: ParamsT, lr: float, momentum: float = 0.9, delay: int = 1, activation: float = 0.0
    ) -> None:
        delay = validation.count("delay", delay)
        options = {
            "lr": validation.real("lr", lr, "a finite number > 0", low=validation.SMALLEST),
            "momentum": validation.real("momentum", momentum, "a number >= 0 and < 1", low=0.0, high=_BELOW_ONE),
            "delay": delay,
            "activation": validation.real(
                "activation", activation, f"a number from 0 to 1 / delay ({1 / delay:.3g})", low=0.0, high=1 / delay
            ),
        }
        super().__init__(params, options)

    def _move(self, parameter: Tensor, difference: Tensor, group: dict[str, Any]) -> None:
        state, delay = self.state[parameter], group["delay"]
        state["arrivals"] = state.get("arrivals", 0) + 1
        is_last = state["arrivals"] >= delay
        if is_last:
            _update_momentum(state, difference, group)
        elif "accumulated" in state:
            state["accumulated"].add_(difference)
        else:
            state["accumulated"] = difference.clone()
        share = 1.0 - group["activation"] * (delay - 1) if is_last else group["activation"]
        change = difference if delay == 1 else difference / delay
        if share and "momentum_buffer" in state:
            change = torch.add(
                change, state["momentum_buffer"], alpha=share * group["momentum"], out=_own(change, difference)
            )
        parameter.add_(change, alpha=-group["lr"])


def _update_momentum(state: dict[str, Any], difference: Tensor, group: dict[str, Any]) -> None:
    """Update the momentum with the mean difference of the window's arrivals, and begin the next window."""
    state["arrivals"] = 0
    mean = difference
    if group["delay"] > 1:
        mean = state.pop("accumulated").add_(difference).div_(group["delay"])
    if "momentum_buffer" in state:
        state["momentum_buffer"].mul_(group["momentum"]).add_(mean)
    else:  # like torch, start with the first mean itself
        state["momentum_buffer"] = mean.clone() if mean is difference else mean


def _own(tensor: Tensor, given: Tensor) -> Tensor | None:
    """Return ``tensor`` if it may be overwritten, or None if it is the caller's difference."""
    return None if tensor is given else tensor
