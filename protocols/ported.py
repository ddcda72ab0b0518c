"""Lets code ported from torchgfn call a policy with torchgfn's arguments.

See :mod:`asyncdist.integrations.torchgfn.script_iterations` for the implementation.
"""

from __future__ import annotations

from collections.abc import Coroutine
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from asyncdist.protocols.metrics import MetricSource
from asyncdist.protocols.misuse import line_of_caller
from asyncdist.protocols.policy import SpawnPolicy

if TYPE_CHECKING:
    from asyncdist.integrations.torchgfn.script_iterations import ScriptIterations


class Ported(SpawnPolicy):
    """Base class of policies that can be called like torchgfn's policies."""

    _numbers: ScriptIterations | None = None

    def __call__(
        self,
        iteration: int,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        local_metric: MetricSource = None,
        *,
        group: Any = None,
        expose_params: bool | None = None,
    ) -> Coroutine[Any, Any, tuple[nn.Module, torch.optim.Optimizer, dict[str, Any]]]:
        """Perform a :meth:`step` with torchgfn's arguments and the caller's own iteration number.

        Args:
            iteration: Integer (int, numpy integer or 0-d tensor) that decides which calls are due. It may restart in
                each epoch. A call is also due if a due number was skipped since the previous call, so calls at every
                100th iteration are enough for ``average_every=100``. Iterations of epochs shorter than
                ``average_every`` are added up.
            model, optimizer: The policy's own model and optimizer.
            local_metric: See :meth:`step`.
            group: None, the group that was passed to the policy's constructor, or that group's communicator.
            expose_params: None or True. It has no effect: snapshots are published every ``average_every`` steps.

        Returns:
            The same model and optimizer, and the fields of :class:`StepInfo` as a dict.

        Raises:
            ValueError: The model, the optimizer or the group is not the policy's, or ``iteration`` is not a
                non-negative integer.
        """
        if self._numbers is None:
            # Imported here to avoid an import cycle.
            from asyncdist.integrations.torchgfn.script_iterations import ScriptIterations

            self._numbers = ScriptIterations(self.average_every)
        if self._first_call is None:
            self.note_call(line_of_caller())
        return self._numbers.step(self, iteration, model, optimizer, local_metric, group, expose_params)
