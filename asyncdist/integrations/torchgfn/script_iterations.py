"""Adapts a policy to torchgfn's scripts, which call it with their own iteration numbers.

A script's numbers may restart in each epoch and may skip iterations. The policy's iteration only increases.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import nn

from asyncdist import validation
from asyncdist.protocols.metrics import MetricSource
from asyncdist.protocols.policy import SpawnPolicy
from asyncdist.protocols.step_info import fields_of

#: Return value of a torchgfn policy: the model, the optimizer and the fields of :class:`protocols.StepInfo`.
CallResult: TypeAlias = tuple[nn.Module, torch.optim.Optimizer, dict[str, Any]]


@dataclass(slots=True)
class ScriptIterations:
    """Steps a policy, and translates a script's iteration numbers into iterations of the policy.

    An average is due at number i if (i + 1) % ``average_every`` == 0.

    Attributes:
        epoch_start: Iteration of the policy that the script numbers 0.
        short_count: Number of iterations in successive epochs that were too short for an average.
    """

    average_every: int
    epoch_start: int | None = None
    short_count: int = 0

    def translate(self, number: int, iteration: int) -> tuple[int, bool]:
        """Return the policy's iteration (>= ``iteration``) for the script's ``number``, and whether to average."""
        if self.epoch_start is None:  # a resumed policy starts at an iteration above 0
            self.epoch_start = max(0, iteration - number)
            return self.epoch_start + number, (number + 1) % self.average_every == 0
        every, expected = self.average_every, iteration - self.epoch_start
        if 0 < number == expected - 1:  # The script has repeated its last number. A repeated 0 begins a new epoch.
            self.epoch_start += 1
            return iteration, (number + 1) % every == 0
        if number < expected:  # a new epoch has begun
            self.short_count = self.short_count + expected if expected < every else 0
            self.epoch_start, expected = iteration, 0
        is_overdue = number // every > expected // every  # The script has skipped a number at which an average was due.
        if self.short_count >= every:
            self.short_count, is_overdue = 0, True
        return iteration + number - expected, is_overdue or (number + 1) % every == 0

    async def step(
        self,
        policy: SpawnPolicy,
        iteration: int,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        local_metric: MetricSource,
        group: Any,
        expose_params: bool | None,
    ) -> CallResult:
        """Take one policy step, with the arguments of :meth:`protocols.ported.Ported.__call__`."""
        if model is not policy.model or optimizer is not policy.optimizer:
            raise ValueError(
                "model and optimizer must be the objects for which this policy was made, because it changes their "
                "weights; got another model or optimizer"
            )
        if group is not None and not policy.is_own_group(group):
            validation.refuse("group", group, "None or the group that was passed to the policy's constructor")
        if expose_params not in (None, True):
            validation.refuse("expose_params", expose_params, "None or True")
        if type(iteration) is int and iteration == policy.iteration and self.epoch_start == 0:
            # If the script numbers its iterations as the policy does, no translation is needed. This path is faster.
            return model, optimizer, fields_of(await policy._guarded_step(local_metric))
        policy.check_can_step()
        if type(iteration) is not int or iteration < 0:
            iteration = validation.count("iteration", iteration, least=0)
        own_iteration, is_due = self.translate(iteration, policy.iteration)
        info = await policy.step_at(own_iteration, local_metric, is_due=is_due)
        return model, optimizer, fields_of(info)
