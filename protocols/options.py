"""Holds and checks the options that policies share."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias

import torch
from torch import nn

from asyncdist import validation
from protocols.step_info import PolicyEvent

#: What takes the place of weights that are replaced.
AveragingStrategy: TypeAlias = Literal["mean", "weighted_mean", "best_only", "reset_weights"]
#: For ``"reset_weights"``: makes a model of the same layout, or the pair (model, optimizer).
ModelBuilder: TypeAlias = Callable[[], nn.Module | tuple[nn.Module, torch.optim.Optimizer]]


@dataclass(frozen=True, slots=True, kw_only=True)
class AveragingOptions:
    """Says how an average takes the place of a rank's weights, and who is told of it.

    The constructors of the policies document them. The rules of each policy check ``averaging_strategy``.

    Raises:
        TypeError, ValueError: an option is of the wrong type or out of range; it and what is allowed are named.
    """

    averaging_strategy: AveragingStrategy = "mean"
    momentum: float = 0.0
    optimizer_state: str = "keep"
    model_builder: ModelBuilder | None = None
    on_event: Callable[[PolicyEvent], None] | None = None
    timing: dict[str, list[float]] | None = None
    drain_timeout_s: float = 10.0

    def __post_init__(self) -> None:
        """Refuse bad options when the policy is made, before any member has been met."""
        validation.fraction("momentum", self.momentum)
        if self.optimizer_state not in ("keep", "reset"):
            raise ValueError(f"optimizer_state is {self.optimizer_state!r}; allowed: 'keep', 'reset'")
        if self.makes_fresh_weights and self.model_builder is None:
            raise ValueError("averaging_strategy 'reset_weights' needs model_builder, which makes the fresh weights")
        check_callable("model_builder", self.model_builder, "a callable that returns a model")
        check_callable("on_event", self.on_event, "a callable that takes one event")
        validation.seconds("drain_timeout_s", self.drain_timeout_s)

    @property
    def makes_fresh_weights(self) -> bool:
        """Whether ``model_builder`` makes the new weights, in place of an average."""
        return self.averaging_strategy == "reset_weights"

    @property
    def resets_optimizer(self) -> bool:
        """Whether the optimizer's state is cleared whenever weights are replaced."""
        return self.optimizer_state == "reset" or self.makes_fresh_weights

    def agreed(self) -> Mapping[str, Any]:
        """Return those that must be equal on all members, as JSON values."""
        return {"momentum": float(self.momentum), "resets_optimizer": self.resets_optimizer}


def check_callable(name: str, value: Any, allowed: str) -> None:
    """Raise TypeError for a value that is neither callable nor None."""
    if value is not None and not callable(value):
        raise TypeError(f"{name} is {value!r}; allowed: {allowed}")


@dataclass(slots=True)
class Timing:
    """Collects durations by name, in the form of torchgfn's ``timing`` option: name to a list of seconds."""

    seconds: dict[str, list[float]] | None = field(default=None)

    def __post_init__(self) -> None:
        if not isinstance(self.seconds, dict | None):
            raise TypeError(f"timing is {self.seconds!r:.80}; allowed: a dict, or None")

    def add(self, name: str, duration_s: float) -> None:
        """Append one duration, if the user asked for them."""
        if self.seconds is not None:
            self.seconds.setdefault(name, []).append(duration_s)
