"""Defines the models and optimizers of the grid, keyed by name."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable
from typing import Any, Final

import schedulefree  # type: ignore[import-untyped]
import torch
from support import weight_keepers
from torch import Tensor, nn

#: Fraction of a tensor's value that is added to its gradient, so that training depends on the weights.
_PULL: Final = 1 / 16


class Body(nn.Module):
    """A model of two linear layers. ``first`` determines the first weights, which may differ between ranks."""

    def __init__(self, dtype: torch.dtype, first: int, *, width: int = 3) -> None:
        super().__init__()
        self.h = nn.ModuleList(nn.Linear(width, width, dtype=dtype) for _ in range(2))
        for place, parameter in enumerate(self.parameters()):
            fill(parameter, place, first)


def fill(tensor: Tensor, place: int, first: int) -> None:
    """Fill a tensor with normally distributed values that depend on ``place`` and ``first``."""
    generator = torch.Generator().manual_seed(8 * place + first)
    with torch.no_grad():
        tensor.copy_(torch.randn(tensor.shape, generator=generator, dtype=torch.float64))


def _plain(first: int, dtype: torch.dtype = torch.float32) -> nn.Module:
    return Body(dtype, first)


def _mixed(first: int) -> nn.Module:
    model = Body(torch.float32, first)
    model.h[1].to(torch.bfloat16)
    model.scale = nn.Parameter(torch.tensor(1.5 + first, dtype=torch.float64))
    model.halved = nn.Parameter(torch.full((2,), 0.5 + first, dtype=torch.float16))
    return model


def _frozen(first: int) -> nn.Module:
    model = Body(torch.float32, first)
    for parameter in model.h[0].parameters():
        parameter.requires_grad_(False)
        fill(parameter, 0, 0)
    return model


def _tied(first: int) -> nn.Module:
    model = Body(torch.float32, first)
    model.h[1].weight = model.h[0].weight
    return model


def _empty(first: int) -> nn.Module:
    model = Body(torch.float32, first)
    model.none = nn.Parameter(torch.empty(0, 3))
    model.register_buffer("nothing", torch.empty(0))
    return model


class _Scalar(nn.Module):
    def __init__(self, first: int) -> None:
        super().__init__()
        self.x = nn.Parameter(torch.tensor(0.75 + first))


def _buffers(first: int) -> nn.Module:
    model = Body(torch.float32, first)
    model.norm = nn.BatchNorm1d(3)
    model.register_buffer("mask", torch.tensor([0.0, float("-inf"), 0.0]))
    model.register_buffer("flags", torch.tensor([True, False]))
    model.register_buffer("own", torch.full((2,), float(first)), persistent=False)
    return model


def _named(first: int) -> nn.Module:
    model = Body(torch.float32, first)
    model.embed = nn.Embedding(4, 3)
    fill(model.embed.weight, 7, first)
    model.phase = nn.Parameter(torch.tensor([1 + 2j, 0.5j]) + first)
    return model


#: Functions that create a model from the number of its first weights, keyed by name.
MODELS: Final[dict[str, Callable[[int], nn.Module]]] = {
    "float32": _plain,
    "bfloat16": functools.partial(_plain, dtype=torch.bfloat16),
    "float16": functools.partial(_plain, dtype=torch.float16),
    "float64": functools.partial(_plain, dtype=torch.float64),
    "mixed": _mixed,
    "frozen": _frozen,
    "tied": _tied,
    "empty": _empty,
    "scalar": _Scalar,
    "buffers": _buffers,
    "complex": _named,
    "large": lambda first: Body(torch.float32, first, width=200),
}


class SaysOther(torch.optim.Optimizer):
    """Subtracts the signs of averaged gradients. Its ``state_dict`` has an unusual structure."""

    def __init__(self, parameters: Any, lr: float) -> None:
        super().__init__(parameters, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    mean = self.state[parameter].setdefault("mean", torch.zeros_like(parameter))
                    mean.mul_(0.5).add_(parameter.grad)
                    parameter.sub_(mean.sgn(), alpha=group["lr"])

    def state_dict(self) -> dict[str, Any]:
        return {"groups": [group["lr"] for group in self.param_groups], "inner": super().state_dict()}

    def load_state_dict(self, state: Any) -> None:
        super().load_state_dict(state["inner"])


class _Lookahead(weight_keepers.Lookahead):
    """Lookahead with a ``state_dict`` like that of the package pytorch-optimizer."""

    def state_dict(self) -> dict[str, Any]:
        return {"fast": self.optimizer.state_dict(), "slow": list(self.state.values()), "count": self.count}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.optimizer.load_state_dict(state["fast"])
        self.count = state["count"]
        for own, saved in zip(self.state.values(), state["slow"], strict=True):
            for name, tensor in own.items():
                tensor.copy_(saved[name])


def _groups(model: nn.Module, lr: float) -> torch.optim.Optimizer:
    first, *others = model.parameters()
    groups: list[dict[str, Any]] = [{"params": [first]}, {"params": others, "lr": lr / 2, "weight_decay": 0.0}]
    return torch.optim.AdamW([each for each in groups if each["params"]], lr=lr)


def _trained(model: nn.Module) -> list[nn.Parameter]:
    return [parameter for parameter in model.parameters() if parameter.requires_grad]


def _made(kind: Callable[..., Any], **options: Any) -> Callable[[nn.Module, float], Any]:
    return lambda model, lr: kind(_trained(model), lr=lr, **options)


def _in_training(model: nn.Module, lr: float) -> Any:
    optimizer = schedulefree.AdamWScheduleFree(_trained(model), lr=lr)
    optimizer.train()
    return optimizer


_ADAMW: Final = torch.optim.AdamW
#: Functions that create an optimizer from a model and a learning rate, keyed by name.
OPTIMIZERS: Final[dict[str, Callable[[nn.Module, float], Any]]] = {
    "SGD": _made(torch.optim.SGD),
    "momentum": _made(torch.optim.SGD, momentum=0.5, nesterov=True),
    "AdamW": _made(_ADAMW),
    "foreach": _made(_ADAMW, foreach=True, amsgrad=True),
    "fused": _made(_ADAMW, fused=True),
    "tensor lr": lambda model, lr: _ADAMW(_trained(model), lr=torch.tensor(lr), foreach=False),
    "RAdam": _made(torch.optim.RAdam, decoupled_weight_decay=True),
    "Rprop": _made(torch.optim.Rprop),
    "Adagrad": _made(torch.optim.Adagrad),
    "ASGD": _made(torch.optim.ASGD),
    "Adafactor": _made(torch.optim.Adafactor),
    "LBFGS": _made(torch.optim.LBFGS, max_iter=2, history_size=3),
    "groups": _groups,
    "other state": _made(SaysOther),
    "masters": _made(weight_keepers.Masters),
    "flat master": _made(weight_keepers.FlatMaster),
    "lookahead": lambda model, lr: _Lookahead(torch.optim.SGD(_trained(model), lr=lr), every=3),
    "schedule-free": _in_training,
}


def take_step(model: nn.Module, optimizer: Any, data: int, step: int, *, moves_buffers: bool = True) -> None:
    """Take one training step. Its gradients depend on the data's number, the step and the weights."""
    places = {id(parameter): place for place, parameter in enumerate(model.parameters())}

    def closure() -> Tensor:
        for parameter in _trained(model):
            parameter.grad = _gradient(parameter, data * 7 + step * 3 + places[id(parameter)])
        return torch.tensor(1.0 / (1 + step))

    if isinstance(optimizer, torch.optim.LBFGS):
        optimizer.step(closure)  # type: ignore[no-untyped-call]
    else:
        closure()
        optimizer.step()
    for norm in _norms(model.modules()) if moves_buffers else ():
        with torch.no_grad():
            norm.running_mean.add_((data + 1) / 64)
            norm.num_batches_tracked.add_(1)


def _gradient(parameter: Tensor, offset: int) -> Tensor:
    return _pattern(parameter.shape, parameter.dtype, offset % 13).add(parameter.detach(), alpha=_PULL)


@functools.lru_cache(maxsize=256)
def _pattern(shape: torch.Size, dtype: torch.dtype, offset: int) -> Tensor:
    """Return values that are never 0, so that second moments are above 0 even in float16."""
    count = torch.arange(math.prod(shape), dtype=torch.float64).view(shape)
    return (((count * 5 + offset) % 13 - 6.5) / 8).to(dtype)


def _norms(modules: Iterable[nn.Module]) -> list[Any]:
    return [module for module in modules if isinstance(module, nn.BatchNorm1d)]


@functools.cache
def can_train(model: str, optimizer: str) -> bool:
    """Return whether torch can train the model with the optimizer, and all values stay finite.

    An optimizer cannot keep float32 copies of wider weights, and a policy cannot recognise the copy of a single number.
    Second moments may become 0 in float16.
    """
    if model == "float16" and optimizer not in (
        "SGD",
        "momentum",
        "masters",
        "flat master",
        "other state",
        "lookahead",
    ):
        return False
    if "master" in optimizer and model in ("float64", "complex", "mixed", "scalar"):
        return False
    try:
        made = MODELS[model](0)
        trainer = OPTIMIZERS[optimizer](made, 0.05)
        for step in range(14):
            take_step(made, trainer, 1, step)
    except (RuntimeError, ZeroDivisionError, ValueError, TypeError):
        return False
    return all(bool(torch.isfinite(each).all()) for each in made.parameters())
