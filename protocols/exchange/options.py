"""Declares the options of all policies that average in numbered rounds (exchange-based policies)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from asyncdist import validation
from asyncdist.protocols.declared import Options, function, like, option
from asyncdist.protocols.options import AveragingOptions, MemberOptions, OptimizerState
from asyncdist.protocols.step_info import PolicyEvent


class ExchangeOptionNames(MemberOptions, total=False):
    """Options of all exchange-based policies, except ``average_every``."""

    optimizer_state: OptimizerState
    on_event: Callable[[PolicyEvent], None] | None
    drain_timeout_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class ExchangeOptions(Options):
    """Options of all exchange-based policies."""

    optimizer_state: OptimizerState = like(AveragingOptions, "optimizer_state")
    on_event: Callable[[PolicyEvent], None] | None = option(
        "Callable that receives each event of this rank (`protocols.PolicyEvent`) inside `step`.",
        function("None or a callable that takes one event"),
        default=None,
    )
    drain_timeout_s: float = option(
        "Seconds to wait, when leaving, for ranks that still receive this rank's data.",
        validation.seconds,
        default=60.0,
        group="members and timeouts",
    )

    def agreed(self) -> dict[str, Any]:
        """Return the options that must be equal on all members, by name, as JSON values."""
        return {**Options.agreed(self), "optimizer_state": self.optimizer_state}

    @property
    def resets_optimizer(self) -> bool:
        """True if the optimizer's state is cleared whenever a mean is applied."""
        return self.optimizer_state == "reset"
