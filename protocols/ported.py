"""Lets coroutines ported from torchgfn call policies in torchgfn's form.

The calls are carried out by :mod:`asyncdist.integrations.torchgfn.calls`.
"""

from __future__ import annotations

import abc
from collections.abc import Coroutine
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from asyncdist.protocols.metrics import MetricSource
from asyncdist.protocols.misuse import line_of_caller
from asyncdist.protocols.one_sided.statistics import OneSidedStatistics
from asyncdist.protocols.policy import SpawnPolicy

if TYPE_CHECKING:
    from asyncdist.integrations.torchgfn.calls import PortedCalls


class Ported(SpawnPolicy):
    """Extends a policy by the call of torchgfn's policies."""

    _calls: PortedCalls | None = None

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
        """Do a ``step`` with the caller's own iteration number: the call of torchgfn's policies, for porting.

        Args:
            iteration: A whole number, also of numpy or a 0-d tensor. The numbers may restart at each epoch: they decide
                which calls are due, while the policy's own ``iteration`` only grows. A call that skips a due number is
                due, so calls at every 100th iteration are enough for ``average_every=100``. Epochs shorter than
                ``average_every`` count together: the first call after that many iterations is due.
            model: The policy's model.
            optimizer: The policy's optimizer.
            local_metric: This rank's metric, as for :meth:`step`.
            group: None, or the group that the policy's constructor was given, or its communicator.
            expose_params: None or True: a policy that publishes snapshots does so every ``average_every`` steps.

        Returns:
            The same model and optimizer, and the fields of :class:`StepInfo` as a dict.

        Raises:
            ValueError: The model, the optimizer or the group is not the policy's, or ``iteration`` is not a whole
                number of 0 or more.
        """
        if self._calls is None:
            from asyncdist.integrations.torchgfn.calls import PortedCalls  # which imports the policies

            self._calls = PortedCalls(self)
        if self._first_call is None:
            self.note_call(line_of_caller())
        return self._calls.step(iteration, model, optimizer, local_metric, group, expose_params)


class PortedOneSided(Ported):
    """Extends a ported policy by printing statistics, as torchgfn's one-sided policies do."""

    @abc.abstractmethod
    def statistics(self) -> OneSidedStatistics:
        """Return the statistics of this member so far."""

    def print_stats(self) -> None:
        """Print the counts of this member so far as a table."""
        self._print(self.statistics().format_counts())

    def print_time(self) -> None:
        """Print the durations of this member's work as a table."""
        self._print(self.statistics().format_times())

    def _print(self, table: str) -> None:
        print(f"{self._journal.title()}\n{table}", flush=True)
