"""Averaging in a plain training loop: selective averaging, or any other policy.

::

    from asyncdist.integrations.pytorch import SelectiveAveraging

    averaging = SelectiveAveraging(model, optimizer, average_every=100)
    for batch in loader:
        loss = train_step(model, optimizer, batch)
        averaging.step(loss=loss)                     # asyncdist run -n 4 train.py

With another policy::

    from asyncdist.integrations.pytorch import Averaging
    from protocols import DiLoCoPolicy

    averaging = Averaging(DiLoCoPolicy(model, optimizer, average_every=100))
"""

from __future__ import annotations

import logging
from types import TracebackType
from typing import Any, Generic, Self, Unpack

import torch
from torch import nn

from asyncdist import validation
from asyncdist.blocking.policies import Policy
from asyncdist.integrations import joining, replicas
from asyncdist.integrations.joining import PolicyT, Selective, Training
from asyncdist.integrations.metrics import RunningLoss
from asyncdist.protocols import SpawnPolicy, StepInfo
from asyncdist.protocols.options import MetricMode, SelectiveOptions
from asyncdist.tensors.optimizers.wrapped import unwrapped

logger = logging.getLogger("asyncdist.integrations.pytorch")


class Averaging(Generic[PolicyT]):
    """Runs a policy in a training loop without coroutines.

    Averaging ends at :meth:`close`, at the end of a ``with`` block, or when the program ends.

    Args:
        policy: Policy that has not been entered. Its optimizer may have been prepared by Accelerate.

    Raises:
        TypeError: ``policy`` is not a policy.
    """

    def __init__(self, policy: PolicyT) -> None:
        given: object = policy
        if not isinstance(given, SpawnPolicy):
            allowed = "a policy, such as protocols.DiLoCoPolicy(model, optimizer, average_every=100)"
            validation.refuse("policy", policy, allowed, TypeError)
        policy.optimizer = unwrapped(policy.optimizer)
        self._begin(Training(lambda *_: policy), policy.model, policy.optimizer)
        if self.policy is not None and self.policy.awaited is not policy:
            logger.warning(
                "Averaging continues the %s that is already open on this model, with its iteration: use "
                "averaging.policy, because the policy passed to Averaging is not entered. To begin anew, call close() "
                "of the first Averaging",
                type(policy).__name__,
            )

    def _begin(self, training: Training[PolicyT], model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        self._loss = RunningLoss()
        self._training = training
        self._training.begin(model, optimizer)

    __copy__ = __deepcopy__ = __reduce_ex__ = joining.refuse_copy

    @property
    def policy(self) -> Policy[PolicyT] | None:
        """The open policy, or None after :meth:`close`.

        It is also None while this rank trains without averages, because it has run out of memory.
        """
        return self._training.policy

    @property
    def awaited(self) -> PolicyT | None:
        """The open policy without its blocking methods, or None while this rank trains without averages.

        :func:`asyncdist.save_population` reads it.

        Raises:
            ClosedError: Read after :meth:`close` or after the end of the ``with`` block.
        """
        return None if self._training.trains_alone else self._training.open_policy().awaited

    def step(self, metric: Any = None, *, loss: Any = None, score: Any = None, tokens: float | None = None) -> StepInfo:
        """Take a policy step, which may change the model's weights. Call this method after each optimizer step.

        If the policy judges ranks by a metric, pass exactly one of ``loss``, ``score`` and ``metric``: a number, or a
        tensor with one element. A rank is judged by the mean since its last report, or since its weights were replaced.
        Policies that use no metric, or have the option ``metric``, ignore all three.

        Args:
            metric: Metric of this step. ``mode`` or ``metric_mode`` says whether smaller or larger is better.
            loss: Loss of this step. Smaller is better, regardless of ``mode``.
            score: Score of this step. Larger is better, regardless of ``mode``.
            tokens: Number of tokens or examples of this step, for a policy with ``weights="tokens"``.

        Returns:
            The events of this step, truthy if the weights have changed.

        Raises:
            ClosedError: Called after :meth:`close` or after the end of the ``with`` block.
            TypeError, ValueError: The policy needs a metric but none or several were passed, a value is not a number,
                or the policy does not accept ``tokens``.
        """
        if not self._training.is_judged:
            return self._training.step(None, tokens)
        self._add(metric, loss, score)
        info = self._training.step(self._loss, tokens)
        if info:
            self._loss.reset()
        return info

    def _add(self, metric: Any, loss: Any, score: Any) -> None:
        if self.policy is not None:
            given, is_opposite = self.policy.awaited.given_metric(metric, loss, score)
            self._loss.add(given, is_negated=is_opposite)

    def state_dict(self) -> dict[str, Any]:
        """Return the policy's state, for :meth:`protocols.SpawnPolicy.load_state_dict` of a policy not yet entered.

        If averaging rounds are in progress, this method waits until this rank has received their means, which may
        change the weights. Therefore, call it before the ``state_dict()`` of the model.

        While this rank trains without averages, because it has run out of memory, the state is an empty dict, which
        must not be loaded.

        Raises:
            ClosedError: Called after :meth:`close` or after the end of the ``with`` block.
        """
        if not self._training.trains_alone:
            self._training.open_policy()
        return self._training.state_dict()

    def close(self) -> None:
        """Leave the policy. The other ranks continue."""
        self._training.end()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, _: type[BaseException] | None, error: BaseException | None, __: TracebackType | None) -> None:
        self._training.end(error)


class SelectiveAveraging(Averaging[Selective]):
    """Replaces the worst ranks' weights with the average of good ranks' weights during training.

    Averaging ends at :meth:`close`, at the end of a ``with`` block, or when the program ends.

    Args:
        model: Model to train. See :class:`protocols.AsyncSelectiveAveragingPolicy`.
        optimizer: Optimizer for the model, possibly prepared by Accelerate.
        average_every: Number of :meth:`step` calls between two reports of a rank's metric.
        mode: ``"min"`` (the default) if a smaller metric is better, such as a loss. ``"max"`` if a larger metric is.
        replica_size: Number of ranks per replica for :class:`protocols.ReplicaAveragingPolicy`, by default 1.
        swap_every: Option of :class:`protocols.ReplicaAveragingPolicy`, only for ``replica_size`` above 1.
        options: Other options of the policy.

    Raises:
        TypeError, ValueError: An argument has a wrong type or value.
    """

    @validation.names_options(refused=joining.REFUSED_OPTIONS)
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
        training = joining.selective_averaging(
            average_every, mode, options, replica_size=replica_size, swap_every=swap_every
        )
        self._begin(training, model, unwrapped(optimizer))


def new_replica_group(replica_size: int, backend: str | None = None) -> torch.distributed.ProcessGroup:
    """Return a torch.distributed process group of the ranks of this rank's replica, for DDP.

    ::

        model = DistributedDataParallel(model, process_group=new_replica_group(2))
        averaging = SelectiveAveraging(model, optimizer, average_every=100, replica_size=2)

    This also works under MPI. If torch.distributed is already initialized with all ranks, all ranks must call this
    function, and the group is added to torch.distributed. Otherwise, only the replica's ranks must call it, and
    torch.distributed is initialized with them. Shut it down with ``torch.distributed.destroy_process_group()``. Each
    later call returns a further group of the same ranks.

    Args:
        replica_size: Number of consecutive ranks that form a replica.
        backend: The torch.distributed backend, by default one for each device type that torch supports.

    Raises:
        TypeError, ValueError: ``replica_size`` is not an int >= 2, or does not divide the number of ranks.
        LocalProtocolError: torch.distributed has different ranks than the world, or ranks share a process, as in a
            simulation.
    """
    return replicas.new_process_group(joining.join(), replica_size, backend)
