"""Averaging policies for torchgfn's training scripts, with torchgfn's names and arguments.

::

    averaging_policy = AsyncSelectiveAveragingPolicy(model_builder=build, average_every=100, replacement_ratio=0.2)
    for iteration in range(n_iterations):
        ...
        gflownet, optimizer, info = averaging_policy(
            iteration=iteration, model=gflownet, optimizer=optimizer, local_metric=-loss, group=group
        )
    averaging_policy.shutdown()

A call changes the model and the optimizer in place and returns them. The policy's messages do not interfere with the
script's own torch.distributed process groups or MPI communicators.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Mapping
from typing import Any, Generic, TypeVar, Unpack

import torch
from torch import nn

from asyncdist import Group, validation
from asyncdist.blocking.callers import find_caller
from asyncdist.blocking.policies import Policy
from asyncdist.blocking.process_world import end_process_world
from asyncdist.blocking.world import World
from asyncdist.integrations.joining import Training, join
from asyncdist.launchers import detection
from asyncdist.protocols import (
    AsyncSelectiveAveragingPolicy as _Selective,
    AverageAllPolicy as _All,
    OneSidedSelectiveAveragingPolicy as _OneSided,
    OneSidedStatistics,
    SpawnPolicy,
)
from asyncdist.protocols.metrics import Metric
from asyncdist.protocols.options import (
    AverageAllOptions,
    AveragingStrategy,
    ModelBuilder,
    PopulationOptions,
    ReadingOptions,
    RoundOptions,
    StartOptions,
)

PolicyT = TypeVar("PolicyT", bound=SpawnPolicy)


class _SelectiveOptions(RoundOptions, PopulationOptions, total=False):
    """Options of selective averaging that torchgfn's policy lacks."""

    metric: Callable[[], Metric] | None


class _OneSidedOptions(ReadingOptions, StartOptions, total=False):
    """Options of one-sided selective averaging that torchgfn's policies lack."""


class _Ported(Generic[PolicyT]):
    """Base class for policies that a script calls in each iteration. The first call starts the policy."""

    def __init__(self, kind: type[PolicyT], options: Mapping[str, Any]) -> None:
        self._kind = kind
        self._options = options
        self._group: Any = None
        self._made_group: Group | None = None  # made for a process group or communicator
        self._training: Training[PolicyT] | None = None
        self._opens_world = False

    @property
    def policy(self) -> Policy[PolicyT] | None:
        """The open policy, or None before the first call and after ``shutdown``."""
        return None if self._training is None else self._training.policy

    @property
    def replacement_count(self) -> int:
        """Number of times that this rank's weights were averaged."""
        return 0 if self._training is None else self._training.replacement_count

    def __call__(
        self,
        iteration: int,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        local_metric: Any = None,
        group: Any = None,
    ) -> tuple[nn.Module, torch.optim.Optimizer, dict[str, Any]]:
        """Take a policy step, and return the model, the optimizer and a dict of the step's events.

        Model, optimizer and group must be the same in all calls.

        Args:
            iteration: Iteration number of the script. See :meth:`protocols.ported.Ported.__call__`.
            model: Model to train.
            optimizer: Optimizer of the model.
            local_metric: Metric of this rank. Larger is better.
            group: Asyncdist group, process group or communicator of the ranks that take part, by default all ranks.

        Raises:
            ValueError: ``group`` differs from the group of the first call, or lacks ranks of the job while no world is
                open.
            ClosedError: Called after ``shutdown``.
        """
        if self._training is None:
            self._begin(model, optimizer, group)
        elif group is not self._group:
            validation.refuse("group", group, f"the group of the first call ({self._group!r:.80})")
        assert self._training is not None, "the training has begun"
        return self._training.call(iteration, model, optimizer, local_metric)

    def _begin(self, model: nn.Module, optimizer: torch.optim.Optimizer, group: Any) -> None:
        self._opens_world = find_caller() is None
        members: Group | None = _group_of(group)
        self._made_group = None if members is group else members
        training = Training(self._kind, {"group": members, **self._options})
        try:
            training.begin(model, optimizer)
        except BaseException:
            self._free_group()
            raise
        self._training, self._group = training, group

    def _free_group(self) -> None:
        made, self._made_group = self._made_group, None
        caller = find_caller()
        if made is not None and caller is not None:
            caller.call(made.free)

    def shutdown(self) -> None:
        """Leave the policy. The other ranks continue without this rank.

        If the policy's first call opened the world, also leave the world, and wait until the other ranks have left it.
        """
        if self._training is not None:
            self._training.end()
            self._free_group()
        if self._opens_world:
            self._opens_world = False
            end_process_world()


class AverageAllPolicy(_Ported[_All]):
    """Averages the models of all ranks at fixed intervals.

    Args:
        average_every: Number of iterations between two averages.
        options: Other options of :class:`protocols.AverageAllPolicy`.
    """

    @validation.names_options()
    def __init__(self, average_every: int, **options: Unpack[AverageAllOptions]) -> None:
        super().__init__(_All, {"average_every": average_every, **options})


class AsyncSelectiveAveragingPolicy(_Ported[_Selective]):
    """Replaces the weights of the worst ranks with the average of the good ranks' weights.

    A larger ``local_metric`` is better.

    Args:
        model_builder: Function that returns a model, or the pair (model, optimizer), for the strategy
            ``"reset_weights"``.
        average_every: Number of iterations between two reports.
        replacement_ratio, averaging_strategy, momentum, cooldown, timing: Options of
            :class:`protocols.AsyncSelectiveAveragingPolicy`.
        poll_interval_s: Ignored, because no thread polls.
        threshold: Metric below which the worst rank must be for a round to replace weights. With ``inf``, every round
            after the cooldown replaces weights.
        options: Other options of :class:`protocols.AsyncSelectiveAveragingPolicy`.
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
        given: dict[str, Any] = {
            "average_every": average_every,
            "replacement_ratio": replacement_ratio,
            "averaging_strategy": averaging_strategy,
            "momentum": momentum,
            "threshold": _finite(threshold),
            "cooldown": cooldown,
            "timing": timing,
            "model_builder": model_builder if averaging_strategy == "reset_weights" else None,
            **options,
        }
        super().__init__(_Selective, given)


class AsyncSelectiveAveragingPolicympi4pyFast(_Ported[_OneSided]):
    """Replaces a rank's weights, at the end of a random lifetime, with the average of other, randomly chosen ranks.

    Each call publishes a snapshot of the weights, which other ranks read. The policy works on every transport.

    Args:
        model_builder: Function that returns a model, or the pair (model, optimizer), for the strategy
            ``"reset_weights"``.
        model: Ignored, because each call passes the model.
        average_every: Ignored, as in torchgfn, because each call publishes.
        threshold_metric: Ignored, as in torchgfn, unless ``replacement_mode="threshold"``.
        replacement_ratio: Ignored, as in torchgfn, unless ``replacement_mode="worst_ratio"``.
        averaging_strategy, momentum, age_range: Options of :class:`protocols.OneSidedSelectiveAveragingPolicy`.
        poll_interval_s: Ignored, because no thread polls.
        group: Asyncdist group, process group or communicator of the ranks that take part, by default all ranks.
        options: Other options of :class:`protocols.OneSidedSelectiveAveragingPolicy`.
    """

    @validation.names_options()
    def __init__(
        self,
        model_builder: ModelBuilder | None,
        model: nn.Module,
        average_every: int,
        threshold_metric: float = 0.0,
        replacement_ratio: float = 0.2,
        averaging_strategy: AveragingStrategy = "mean",
        momentum: float = 0.0,
        *,
        poll_interval_s: float = 0.01,
        age_range: tuple[int, int] = (50, 150),
        group: Any = None,
        **options: Unpack[_OneSidedOptions],
    ) -> None:
        del model, poll_interval_s
        validation.count("average_every", average_every)
        given: dict[str, Any] = {
            "average_every": 1,
            "threshold_metric": _finite(threshold_metric),
            "replacement_ratio": replacement_ratio,
            "averaging_strategy": averaging_strategy,
            "momentum": momentum,
            "age_range": age_range,
            "model_builder": model_builder if averaging_strategy == "reset_weights" else None,
            **options,
        }
        super().__init__(_OneSided, given)
        self._named_group = group
        self._one_sided: _OneSided | None = None

    def __call__(  # type: ignore[override]  # torchgfn's arguments
        self,
        iteration: int,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        local_metric: Any = None,
        expose_params: bool = True,
        group: Any = None,
    ) -> tuple[nn.Module, torch.optim.Optimizer, dict[str, Any]]:
        """Take a policy step, and return the model, the optimizer and a dict of the step's events.

        Args:
            iteration, model, optimizer, local_metric: The same as for :class:`AsyncSelectiveAveragingPolicy`.
            expose_params: True, because each call publishes the weights.
            group: None, or the group that was passed to the constructor.
        """
        if expose_params is not True:
            validation.refuse("expose_params", expose_params, "True because each call publishes the weights")
        members = self._named_group if group is None else group
        called = super().__call__(iteration, model, optimizer, local_metric, members)
        if self._one_sided is None and self.policy is not None:
            self._one_sided = self.policy.awaited
        return called

    def statistics(self) -> OneSidedStatistics:
        """Return this rank's statistics, even after ``shutdown``. Raise RuntimeError before the first step."""
        return self._started().statistics()

    def print_stats(self) -> None:
        """Print this rank's statistics as a table, even after ``shutdown``."""
        self._started().print_stats()

    def print_time(self) -> None:
        """Print a table of the time that this rank's operations took, even after ``shutdown``."""
        self._started().print_time()

    def _started(self) -> _OneSided:
        if self._one_sided is None:
            raise RuntimeError("this policy has not started yet; call the policy once before its statistics")
        return self._one_sided


#: Names used by code written for mpi4py. One class supports every transport and any mix of dtypes.
AsyncSelectiveAveragingPolicympi4pyGeneral = AsyncSelectiveAveragingPolicympi4pyFast
AverageAllPolicympi4py = AverageAllPolicy


def _finite(threshold: float | None) -> float | None:
    """Return ``threshold``, or the largest finite number of the same sign if it is infinite."""
    if isinstance(threshold, float) and math.isinf(threshold):
        return math.copysign(sys.float_info.max, threshold)
    return threshold


def _group_of(group: Any) -> Group | None:
    """Return the asyncdist group with the ranks of ``group``, or None for all ranks. All members must call this.

    If no world is open, this function opens it, so all ranks of the job must call it. ``group`` may be an asyncdist
    group, a torch.distributed process group, an MPI communicator, or None.

    Raises:
        TypeError: ``group`` has a different type.
        ValueError: The ranks of ``group`` are unknown, or it lacks ranks of the job while no world is open.
    """
    if group is None or isinstance(group, Group):
        join()
        return group
    size = _size_of(group)
    if find_caller() is None:
        _check_is_of_all(group, size)
    world = join()
    if size == world.size:
        return None
    return world.new_group(_ranks_of(group, size, world))


def _check_is_of_all(group: Any, size: int) -> None:
    """Raise ValueError if ``group`` lacks ranks of the job. Opening the world would wait for them forever."""
    is_torchs = torch.distributed.is_available() and torch.distributed.is_initialized()
    found = (torch.distributed.get_rank(), torch.distributed.get_world_size()) if is_torchs else None
    job_size = detection.detect(group=found).expected_size or 1
    if size < job_size:
        raise ValueError(
            f"group must have all {job_size} ranks of the job when the world is opened, got {group!r:.80} with {size} "
            "ranks. Make the groups with initialize_distributed_compute of asyncdist.integrations.torchgfn instead of "
            "torchgfn's, or first call asyncdist.blocking.process_world() on all ranks"
        )


def _size_of(group: Any) -> int:
    size = getattr(group, "Get_size", None) or getattr(group, "size", None)
    if not callable(size):
        allowed = "an asyncdist group, a torch process group, an MPI communicator or None"
        validation.refuse("group", group, allowed, TypeError)
    return int(size())


def _ranks_of(group: Any, size: int, world: World) -> list[int]:
    """Return the world ranks of the members of a process group or a communicator."""
    if not hasattr(group, "Get_group"):
        return list(torch.distributed.get_process_group_ranks(group))
    everybody = world.group.communicator
    if not hasattr(everybody, "Get_group"):
        allowed = f"a group of asyncdist or torch with the transport {world.transport_name!r}"
        validation.refuse("group", group, allowed)
    members = group.Get_group()
    ranks: list[int] = type(members).Translate_ranks(members, range(size), everybody.Get_group())
    return list(ranks)
