"""The spawn policies of torchgfn's training scripts, under their names and with their calls: change the import.

::

    from asyncdist.integrations.torchgfn import AsyncSelectiveAveragingPolicy    # in place of torchgfn's

    averaging_policy = AsyncSelectiveAveragingPolicy(model_builder=build, average_every=100, replacement_ratio=0.2)
    for iteration in range(n_iterations):
        ...
        gflownet, optimizer, info = averaging_policy(
            iteration=iteration, model=gflownet, optimizer=optimizer, local_metric=-loss, group=group
        )

The same model and optimizer come back, changed in place. A script of torchgfn's may have a process group of
torch.distributed, or communicators of MPI, of its own; the policy's messages are beside them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Generic, TypeVar, Unpack

import torch
from torch import nn

from asyncdist import validation
from asyncdist.blocking.policies import Policy
from asyncdist.integrations.joining import Training
from asyncdist.protocols import AsyncSelectiveAveragingPolicy as _Selective, AverageAllPolicy as _All, SpawnPolicy
from asyncdist.protocols.average_all import AverageAllOptions
from asyncdist.protocols.metrics import Metric
from asyncdist.protocols.options import AveragingStrategy, ModelBuilder, PopulationOptions, RoundOptions

PolicyT = TypeVar("PolicyT", bound=SpawnPolicy)


class _SelectiveOptions(RoundOptions, PopulationOptions, total=False):
    """Names the options of selective averaging that torchgfn's policy does not have."""

    metric: Callable[[], Metric] | None


class _Called(Generic[PolicyT]):
    """Is a policy that is called in each iteration; the first call starts it, with that model and optimizer.

    Args:
        make: makes the policy.
    """

    def __init__(self, make: Callable[[nn.Module, torch.optim.Optimizer], PolicyT]) -> None:
        self._training = Training(make)

    @property
    def policy(self) -> Policy[PolicyT] | None:
        """The policy that was started; None before the first call."""
        return self._training.policy

    def __call__(
        self,
        iteration: int,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        local_metric: Any = None,
        group: Any = None,
    ) -> tuple[nn.Module, torch.optim.Optimizer, dict[str, Any]]:
        """Do a step; see :meth:`protocols.SpawnPolicy.__call__`.

        Args:
            iteration, model, optimizer, local_metric: as there.
            group: all ranks, as a process group, as a communicator or as None.

        Raises:
            ValueError: ``group`` has another number of ranks than the job.
        """
        if self._training.policy is None:
            self._training.begin(model, optimizer)
        policy = self._training.policy
        assert policy is not None, "it has begun"
        size = None if group is None else _size_of(group)
        if size is not None and size != policy.world.size:
            validation.refuse("group", group, f"a group of all {policy.world.size} ranks, or None")
        called: tuple[nn.Module, torch.optim.Optimizer, dict[str, Any]] = policy(
            iteration, model, optimizer, local_metric
        )
        return called


def _size_of(group: Any) -> int | None:
    """Return the number of ranks of a process group of torch, or of a communicator of MPI."""
    size = getattr(group, "size", None) if not hasattr(group, "Get_size") else group.Get_size
    return int(size()) if callable(size) else None


class AverageAllPolicy(_Called[_All]):
    """Averages the models of all ranks, every so many iterations.

    Args:
        average_every: the cadence, in iterations.
        options: others of :class:`protocols.AverageAllPolicy`.
    """

    @validation.names_options()
    def __init__(self, average_every: int, **options: Unpack[AverageAllOptions]) -> None:
        super().__init__(lambda model, optimizer: _All(model, optimizer, average_every=average_every, **options))


class AsyncSelectiveAveragingPolicy(_Called[_Selective]):
    """Lets the worst ranks take the average of the good ones; a larger ``local_metric`` is better.

    Args:
        model_builder: returns a model, or the pair (model, optimizer); for ``"reset_weights"``.
        average_every: the cadence of reports, in iterations.
        replacement_ratio, averaging_strategy, momentum, threshold, cooldown, timing: as of
            :class:`protocols.AsyncSelectiveAveragingPolicy`.
        poll_interval_s: means nothing: no thread polls.
        options: others of that policy.
    """

    @validation.names_options()
    def __init__(
        self,
        model_builder: ModelBuilder | None,
        average_every: int,
        replacement_ratio: float = 0.2,
        averaging_strategy: AveragingStrategy = "mean",
        momentum: float = 0.0,
        poll_interval_s: float = 0.01,
        threshold: float | None = None,
        cooldown: int = 200,
        timing: dict[str, list[float]] | None = None,
        **options: Unpack[_SelectiveOptions],
    ) -> None:
        del poll_interval_s
        chosen: dict[str, Any] = {
            "average_every": average_every,
            "replacement_ratio": replacement_ratio,
            "averaging_strategy": averaging_strategy,
            "momentum": momentum,
            "threshold": threshold,
            "cooldown": cooldown,
            "timing": timing,
            "model_builder": model_builder if averaging_strategy == "reset_weights" else None,
        }
        super().__init__(lambda model, optimizer: _Selective(model, optimizer, **{**chosen, **options}))
