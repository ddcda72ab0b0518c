"""The outer optimizer of asynchronous DiLoCo: Nesterov momentum that is updated at every N-th arrival.

With D for the difference of one arrival, a for the anchor, eps, beta, N and c for ``lr``, ``momentum``, ``delay`` and
``activation``, the arrivals are counted in windows of N (Liu et al., 2401.09135, algorithm 3):

    the arrivals 1 to N - 1 of a window:    a <- a - eps (c beta m + D / N)
    its last arrival:                       m <- beta m + (sum of the window's D) / N
                                            a <- a - eps ((1 - c N + c) beta m + D / N)

If all D of a window were measured from the same anchor, the window moves the anchor like one Nesterov step with their
mean, except for rounding.

Without the delay, each of N arrivals multiplies m by beta and adds a difference that may be old. The momentum then
lasts for 1 / (1 - beta) arrivals instead of windows, and stale differences push it in directions that no longer
reduce the loss.

The formula is that of the paper's algorithm and of ``src/halos/opt.py`` in HALoS (4b5bf73). The published experiments
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
    """Steps at each arrival with D / N, and updates the momentum at every N-th arrival.

    With ``delay=1`` it makes the same operations as ``torch.optim.SGD(lr=lr, momentum=momentum, nesterov=True)`` with
    ``foreach=False``, and gives the same bits. The learning rate is outside the momentum buffer. The buffer is a sum of
    differences, which is not multiplied by 1 - ``momentum``.

    Args:
        params: Parameters, whose gradients are the differences D.
        lr: Outer learning rate of a whole window.
        momentum: Decay of the momentum per window.
        delay: Number N of arrivals of a window. A multiple of the number of ranks counts all of them.
        activation: Share c of the momentum that is applied at each arrival except a window's last, 0 to 1 / ``delay``.

    Raises:
        TypeError, ValueError: An option has the wrong type or is out of range.
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
        """Step one parameter, with one temporary tensor of its size."""
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
    """Update m with the mean of the window, and begin the next window."""
    state["arrivals"] = 0
    mean = difference
    if group["delay"] > 1:
        mean = state.pop("accumulated").add_(difference).div_(group["delay"])
    if "momentum_buffer" in state:
        state["momentum_buffer"].mul_(group["momentum"]).add_(mean)
    else:  # torch begins with the first gradient as well, instead of 0 times the decay plus it
        state["momentum_buffer"] = mean.clone() if mean is difference else mean


def _own(tensor: Tensor, given: Tensor) -> Tensor | None:
    """Return the tensor if it may be overwritten: None if it is the given difference."""
    return None if tensor is given else tensor
