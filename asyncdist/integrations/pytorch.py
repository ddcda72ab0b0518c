"""Selective averaging in a plain training loop.

::

    from asyncdist.integrations.pytorch import SelectiveAveraging

    averaging = SelectiveAveraging(model, optimizer, average_every=100)
    for batch in loader:
        loss = train_step(model, optimizer, batch)
        averaging.step(loss=loss)                     # asyncdist run -n 4 train.py
"""

from __future__ import annotations

from types import TracebackType
from typing import Any, Self, Unpack

import torch
from torch import nn

from asyncdist import validation
from asyncdist.blocking.policies import Policy
from asyncdist.integrations import replicas
from asyncdist.integrations.joining import Selective, join, selective_averaging
from asyncdist.integrations.metrics import RunningLoss
from asyncdist.protocols import StepInfo
from asyncdist.protocols.options import MetricMode, SelectiveOptions


class SelectiveAveraging:
    """Lets the worst ranks of a population take the average of the good ones, while they train.

    It is left when the program ends, by :meth:`close`, or at the end of its block where it is a context.

    Args:
        model: see :class:`protocols.AsyncSelectiveAveragingPolicy`.
        optimizer: of that model; one that Accelerate has prepared, too.
        average_every: the cadence of reports, in calls of :meth:`step`.
        mode: ``"min"`` if a smaller metric is better, as of a loss, which is the default; ``"max"`` if a larger one is.
        replica_size, swap_every: see :class:`protocols.ReplicaAveragingPolicy`. By default each rank is a replica.
        options: others of that policy.

    Raises:
        TypeError, ValueError: an argument is not what it should be.
    """

    @validation.names_options()
    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        average_every: int,
        *,
        mode: MetricMode | None = None,
        replica_size: int = 1,
        swap_every: int | None = None,
        **options: Unpack[SelectiveOptions],
    ) -> None:
        self._loss = RunningLoss()
        self._training = selective_averaging(
            average_every, mode, options, replica_size=replica_size, swap_every=swap_every
        )
        self._training.begin(model, getattr(optimizer, "optimizer", optimizer))

    @property
    def policy(self) -> Policy[Selective] | None:
        """The policy; None after the end."""
        return self._training.policy

    def step(self, metric: Any = None, *, loss: Any = None, score: Any = None) -> StepInfo:
        """Make progress, and change the model's weights if it is time. Call it after each step of the optimizer.

        A rank is judged by the mean since its last report, or since its weights were replaced.

        Args:
            loss: The loss of this step, of which a smaller one is better, whatever ``mode`` is: a number or a tensor
                with one element.
            score: Instead of a loss, a metric of which a larger one is better.
            metric: Instead of both, a metric of which ``mode`` says that a smaller one is better, as by default, or a
                larger one.

        Returns:
            What happened; true when weights changed.

        Raises:
            ClosedError: after :meth:`close`, or the end of its block.
            TypeError, ValueError: none of the three was given, or more than one; or it is no number.
        """
        self._add(metric, loss, score)
        info = self._training.step(self._loss)
        if info:
            self._loss.reset()
        return info

    def _add(self, metric: Any, loss: Any, score: Any) -> None:
        """Note the metric of a step; nothing after the end."""
        if self.policy is not None:
            given, is_opposite = self.policy.awaited.given_metric(metric, loss, score)
            self._loss.add(given, is_negated=is_opposite)

    def close(self) -> None:
        """Leave the policy; the others go on."""
        self._training.end()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, _: type[BaseException] | None, error: BaseException | None, __: TracebackType | None) -> None:
        self._training.end(error)


def new_replica_group(replica_size: int, backend: str | None = None) -> torch.distributed.ProcessGroup:
    """Return a process group of the ranks of this rank's replica, over which DDP synchronises it.

    ::

        model = DistributedDataParallel(model, process_group=new_replica_group(2))
        averaging = SelectiveAveraging(model, optimizer, average_every=100, replica_size=2)

    All ranks call it together, under MPI too. Where torch.distributed runs already, with all ranks, it is one more
    group there; else torch.distributed is started with the replica's ranks alone, and its ``destroy_process_group()``
    ends it.

    Args:
        replica_size: how many ranks make a replica: the first so many, the next, and so on.
        backend: of torch.distributed; by default those of the devices that torch has.

    Raises:
        TypeError, ValueError: the ranks cannot be divided so.
        LocalProtocolError: torch.distributed was started with other ranks than the world's; or ranks share a process,
            as in a simulation.
    """
    return replicas.new_process_group(join(), replica_size, backend)
