"""Optimizers with their own copies of the weights, each like one from a known library."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


class Masters(torch.optim.Optimizer):
    """Plain SGD on float32 masters, which are in its state under an unknown name."""

    def __init__(self, parameters: Any, lr: float) -> None:
        super().__init__(parameters, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    finer = self.state[parameter].setdefault("finer", parameter.detach().float().clone())
                    finer.sub_(parameter.grad.float(), alpha=group["lr"])
                    parameter.copy_(finer)


class MasterList:
    """A wrapper as for mixed precision: its inner optimizer trains float32 masters that are not in any state."""

    def __init__(self, parameters: Any, lr: float) -> None:
        self.model_parameters = list(parameters)
        self.masters = [parameter.detach().float().clone() for parameter in self.model_parameters]
        self.inner = torch.optim.SGD(self.masters, lr=lr, momentum=0.9)
        self.param_groups = [{"params": self.model_parameters, "lr": lr}]

    @property
    def state(self) -> Any:
        return self.inner.state

    def step(self) -> None:
        for master, parameter in zip(self.masters, self.model_parameters, strict=True):
            master.grad = None if parameter.grad is None else parameter.grad.float()
        self.inner.step()
        with torch.no_grad():
            for master, parameter in zip(self.masters, self.model_parameters, strict=True):
                parameter.copy_(master)

    def zero_grad(self) -> None:
        for parameter in self.model_parameters:
            parameter.grad = None


class FlatMaster(torch.optim.Optimizer):
    """One flat float32 master of all parameters, as an attribute."""

    def __init__(self, parameters: Any, lr: float) -> None:
        super().__init__(parameters, {"lr": lr})
        self.flat = torch.cat([each.detach().float().reshape(-1) for each in self.param_groups[0]["params"]])

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        offset = 0
        for parameter in self.param_groups[0]["params"]:
            own = self.flat[offset : offset + parameter.numel()].view_as(parameter)
            offset += parameter.numel()
            if parameter.grad is not None:
                own.sub_(parameter.grad.float(), alpha=self.param_groups[0]["lr"])
            parameter.copy_(own)


class Hidden(torch.optim.Optimizer):
    """An optimizer whose master weights a search does not find."""

    def __init__(self, parameters: Any, lr: float) -> None:
        super().__init__(parameters, {"lr": lr})
        masters: dict[Tensor, Tensor] = {}

        def kept(parameter: Tensor) -> Tensor:
            return masters.setdefault(parameter, parameter.detach().clone())

        self.kept = kept

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                kept = self.kept(parameter)
                if parameter.grad is not None:
                    kept.sub_(group["lr"] * parameter.grad)
                parameter.copy_(kept)


class Lookahead:
    """Wraps an optimizer; its constructor makes the slow weights, as in pytorch-optimizer."""

    def __init__(self, optimizer: torch.optim.Optimizer, every: int = 5, alpha: float = 0.5) -> None:
        self.optimizer = optimizer
        self.every, self.alpha, self.count = every, alpha, 0
        self.state: dict[Tensor, dict[str, Tensor]] = {
            each: {"slow_params": each.detach().clone(), "slow_momentum": torch.ones_like(each)}
            for group in optimizer.param_groups
            for each in group["params"]
        }

    @property
    def param_groups(self) -> Any:
        return self.optimizer.param_groups

    def zero_grad(self) -> None:
        self.optimizer.zero_grad()

    @torch.no_grad()
    def step(self) -> None:
        self.optimizer.step()
        self.count += 1
        if self.count % self.every == 0:
            for parameter, state in self.state.items():
                state["slow_params"].lerp_(parameter, self.alpha)
                parameter.copy_(state["slow_params"])
