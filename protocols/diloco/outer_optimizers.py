"""DiLoCo's default outer optimizer, and federated learning's adaptive optimizers, which torch does not have.

Other methods use ``torch.optim.SGD`` as the outer optimizer, or none. In this table, a is the anchor, and D is the
anchor minus the mean of the ranks' weights. m is the momentum buffer, and lr and b are the options ``lr`` and
``momentum``.

============== ============================================= ================================
method         ``outer_optimizer=``                          update
============== ============================================= ================================
DiLoCo         ``partial(SGD, lr=0.7, momentum=0.9,          m <- b m + D; a <- a - lr (D + b m)
               nesterov=True)``
MuLoCo         ``partial(SGD, lr=0.9, momentum=0.8,          the same, and the ranks train with Muon
               nesterov=True)``
MuLoCo, 1 rank ``partial(SGD, lr=0.7, momentum=0.6,          the same, every 30 steps
               nesterov=True)``
SlowMo         ``partial(SGD, lr=1.0, momentum=0.5)``        m <- b m + D; a <- a - lr m
Lookahead      ``partial(SGD, lr=0.5)``                      a <- a - lr D, on one rank, every 5 steps
LocalSGD       ``None``                                      a <- mean of the ranks' weights
============== ============================================= ================================

- SlowMo (Wang et al., ICLR 2020) divides D by the inner learning rate, and multiplies the step by it. This equals the
  update above only while the inner learning rate is constant.
- MuLoCo's one-rank code (Therien et al., 2025) has lr inside its buffer: m <- b m + lr D; a <- a - b m - lr D. This
  equals the update above only while the outer lr is constant.
- ``SGD(lr=1.0)`` is not bit for bit equal to LocalSGD, because a - (a - mean) is rounded.
"""

from __future__ import annotations

import functools
from abc import abstractmethod
from collections.abc import Callable
from typing import Any, Final

import numpy as np
import torch
from torch import Tensor
from torch.optim.optimizer import ParamsT

from asyncdist import validation

#: Outer optimizer of the DiLoCo paper.
NESTEROV: Final = functools.partial(torch.optim.SGD, lr=0.7, momentum=0.9, nesterov=True)
_BELOW_ONE: Final = 1.0 - 2.0**-53


class OuterOptimizer(torch.optim.Optimizer):
    """Base class of optimizers that move one parameter at a time, in :meth:`_move`."""

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Move all parameters that have a gradient.

        Return the result of ``closure``, which computes the gradients, or None.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._move(parameter, parameter.grad, group)
        return loss

    @abstractmethod
    def _move(self, parameter: Tensor, difference: Tensor, group: dict[str, Any]) -> None:
        """Update one parameter in place, with the options of its parameter group."""


class _FedOptimizer(OuterOptimizer):
    """Base class of optimizers with a first moment m and a second moment v: a <- a - lr m / (sqrt(v) + tau).

    As in algorithm 2 of Reddi et al. (ICLR 2021), the moments have no bias correction, and v starts at tau ** 2. (The
    optimizers of TensorFlow Federated, and FedAdam in later versions of Flower, correct the bias.) Each operation is
    rounded separately and correctly, so that the bits do not depend on the processor.
    """

    def __init__(self, params: ParamsT, options: dict[str, Any]) -> None:
        for name in ("lr", "tau"):
            options[name] = validation.real(name, options[name], "a finite number > 0", low=validation.SMALLEST)
        if "betas" in options:
            first, second = options["betas"]
            for beta in (first, second):
                validation.real("betas", beta, "two numbers >= 0 and < 1", low=0.0, high=_BELOW_ONE)
        super().__init__(params, options)

    def _move(self, parameter: Tensor, difference: Tensor, group: dict[str, Any]) -> None:
        state = self.state[parameter]
        if not state:
            state["v"] = torch.full_like(parameter, group["tau"] ** 2)
        spare = torch.empty_like(parameter)
        self._update_v(state["v"], difference, group, spare)
        first = self._first_moment(state, difference, group, spare)
        _sqrt(state["v"], spare).add_(group["tau"])
        torch.div(first, spare, out=spare).mul_(group["lr"])
        parameter.sub_(spare)

    def _first_moment(
        self, state: dict[str, Tensor], difference: Tensor, group: dict[str, Any], spare: Tensor
    ) -> Tensor:
        """Return the first moment m after m <- beta1 m + (1 - beta1) D. ``spare`` is overwritten."""
        if "m" not in state:
            state["m"] = torch.zeros_like(difference)
        beta = group["betas"][0]
        return state["m"].mul_(beta).add_(torch.mul(difference, 1.0 - beta, out=spare))

    @abstractmethod
    def _update_v(self, v: Tensor, difference: Tensor, group: dict[str, Any], spare: Tensor) -> None:
        """Update the second moment v in place. ``spare`` is overwritten."""


class FedAdam(_FedOptimizer):
    """Adam as an outer optimizer: v <- beta2 v + (1 - beta2) D ** 2.

    Args:
        params: Parameters, whose gradients are the differences D.
        lr: Outer learning rate. If D is much larger than ``tau``, the anchor moves by about ``lr`` per round.
        betas: Decay of m and of v per round.
        tau: Smallest denominator. A large ``tau`` makes the steps less adaptive.

    Raises:
        ValueError: An option is out of range.
    """

    def __init__(self, params: ParamsT, lr: float, betas: tuple[float, float] = (0.9, 0.99), tau: float = 1e-3) -> None:
        super().__init__(params, {"lr": lr, "betas": betas, "tau": tau})

    def _update_v(self, v: Tensor, difference: Tensor, group: dict[str, Any], spare: Tensor) -> None:
        beta = group["betas"][1]
        v.mul_(beta).add_(torch.mul(difference, difference, out=spare).mul_(1.0 - beta))


class FedYogi(_FedOptimizer):
    """Yogi as an outer optimizer: v <- v - (1 - beta2) D ** 2 sign(v - D ** 2).

    After a large D, v falls more slowly than with :class:`FedAdam`, so steps do not suddenly become large.

    Args:
        params, lr, tau: See :class:`FedAdam`.
        betas: Decay of m per round, and one minus the share of D ** 2 by which v changes.

    Raises:
        ValueError: An option is out of range.
    """

    def __init__(self, params: ParamsT, lr: float, betas: tuple[float, float] = (0.9, 0.99), tau: float = 1e-3) -> None:
        super().__init__(params, {"lr": lr, "betas": betas, "tau": tau})

    def _update_v(self, v: Tensor, difference: Tensor, group: dict[str, Any], spare: Tensor) -> None:
        squares = difference * difference
        torch.sub(v, squares, out=spare).sign_().mul_(squares.mul_(1.0 - group["betas"][1]))
        v.sub_(spare)


class FedAdagrad(_FedOptimizer):
    """Adagrad as an outer optimizer: v <- v + D ** 2, and no momentum: m = D.

    Args:
        params, tau: See :class:`FedAdam`.
        lr: Outer learning rate. The steps shrink with the number of rounds.

    Raises:
        ValueError: An option is out of range.
    """

    def __init__(self, params: ParamsT, lr: float, tau: float = 1e-3) -> None:
        super().__init__(params, {"lr": lr, "tau": tau})

    def _update_v(self, v: Tensor, difference: Tensor, group: dict[str, Any], spare: Tensor) -> None:
        v.add_(torch.mul(difference, difference, out=spare))

    def _first_moment(
        self, state: dict[str, Tensor], difference: Tensor, group: dict[str, Any], spare: Tensor
    ) -> Tensor:
        return difference


def _sqrt(values: Tensor, out: Tensor) -> Tensor:
    """Write the correctly rounded square roots of ``values`` into ``out``, and return ``out``.

    numpy is used on CPUs, where torch's square roots depend on the processor. MKL rounded 0.6 % of float32 square roots
    incorrectly.
    """
    if values.device.type == "cpu":
        np.sqrt(values.numpy(), out=out.numpy())
        return out
    return torch.sqrt(values, out=out)
