"""Joins this process to its job, for programs that say nothing of ranks."""

from __future__ import annotations

import difflib
import inspect
import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from asyncdist import environment, validation
from asyncdist.blocking.callers import Caller, current_caller, is_in_a_rank
from asyncdist.blocking.policies import Policy
from asyncdist.blocking.process_world import process_world
from asyncdist.blocking.world import World
from asyncdist.errors import ClosedError, LocalProtocolError
from protocols import AsyncSelectiveAveragingPolicy, ReplicaAveragingPolicy, SpawnPolicy, StepInfo
from protocols.step_info import NOTHING

logger = logging.getLogger("asyncdist.integrations")

_told_alone: set[str] = set()


_chosen_from: int = 0
"""How many GPUs were seen where some of them were chosen for this rank; 0 where none were."""


def hide_ranks() -> None:
    """Let a library that is imported after this believe that it trains alone: ranks are this package's affair.

    It is given the GPU of this rank where several are seen.
    """
    global _chosen_from
    number = environment.local_rank()
    if number is not None and "CUDA_VISIBLE_DEVICES" not in environment.VARIABLES and torch.cuda.device_count() > 1:
        _chosen_from = torch.cuda.device_count()
        choose_gpus([number])
    environment.hide_ranks()


def choose_gpus(numbers: Sequence[int]) -> None:
    """Give the library the GPUs with these numbers on this host, where it is not the user who has chosen."""
    if _chosen_from:
        seen = ",".join(str(number % _chosen_from) for number in numbers)
        environment.set_variables({"CUDA_VISIBLE_DEVICES": seen})


def join() -> World:
    """Return the world of this process; say once that it trains alone, where it does."""
    if environment.is_started_by_trainer():  # for one of its devices: no launcher, so this one is alone, too
        with environment.variable_set(environment.TRANSPORT_VARIABLE, "local"):
            return process_world()
    if is_in_a_rank():
        raise LocalProtocolError(
            "SelectiveAveraging blocks, and this is a coroutine: enter a policy of protocols here, with async with, "
            "and await its step"
        )
    world = process_world()
    if world.size == 1 and "alone" not in _told_alone:
        _told_alone.add("alone")
        started = (
            "accelerate launch has started one process, as it does without --multi_gpu for any --num_processes; "
            if environment.is_started_by_accelerate()
            else ""
        )
        logger.warning(
            "selective averaging: this process trains alone, so nothing is averaged; %sasyncdist run -n 4 script.py "
            "starts four ranks",
            started,
        )
    return world


def selective_averaging(
    average_every: int, mode: str, options: Mapping[str, Any], *, named: Sequence[str] = ()
) -> Training:
    """Return a training under :class:`protocols.AsyncSelectiveAveragingPolicy`; ``mode`` is its ``metric_mode``.

    With the option ``replica_size`` it is :class:`protocols.ReplicaAveragingPolicy`.

    Args:
        average_every, mode: as of the caller.
        options: of the policy.
        named: the caller's further options, which a misspelled one may mean.

    Raises:
        TypeError, ValueError: one of the first two is not what it should be, or there is no such option; the values of
            the others are checked when it begins.
    """
    replicas = ("replica_size", "swap_every") if "replica_size" in options else ("replica_size",)
    check_options("SelectiveAveraging", options, AsyncSelectiveAveragingPolicy, (*replicas, "mode", *named))
    validation.count("average_every", average_every)
    if mode not in ("min", "max"):
        validation.refuse("mode", mode, "'min' if a smaller metric is better, 'max' if a larger one is")
    given: dict[str, Any] = {"average_every": average_every, "metric_mode": mode, **options}
    policy: Any = ReplicaAveragingPolicy if "replica_size" in given else AsyncSelectiveAveragingPolicy
    return Training(lambda model, optimizer: policy(model, optimizer, **given))


def check_options(
    called: str, options: Mapping[str, Any], policy: Callable[..., SpawnPolicy], named: Sequence[str]
) -> None:
    """Refuse what is no option of a policy, nor one of ``named``: its constructor, far below, would.

    Raises:
        TypeError: one is unknown; the nearest option there is, or all, are named.
    """
    allowed = {*inspect.signature(policy).parameters, *named} - {"model", "optimizer"}
    for name in options:
        if name not in allowed:
            near = difflib.get_close_matches(name, allowed, n=1)
            meant = f"did you mean {near[0]!r}?" if near else f"there are {', '.join(sorted(allowed))}"
            raise TypeError(f"{called} has no option {name!r}; {meant}")


class Training:
    """Is a policy for the length of one training.

    Args:
        make: makes the policy for a model and its optimizer.

    Attributes:
        policy: None before the training and after it.
        replacement_count: how often this rank has taken an average since it began.
    """

    def __init__(self, make: Callable[[nn.Module, torch.optim.Optimizer], SpawnPolicy]) -> None:
        self._make = make
        self.policy: Policy[StepInfo] | None = None
        self.replacement_count = 0
        self._caller: Caller

    def begin(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        """Start, together with all ranks. What an earlier training has left open is ended first."""
        self.end()
        join()
        policy = Policy(self._make(model, optimizer))
        policy.__enter__()
        self.policy, self.replacement_count = policy, 0
        self._caller = current_caller("a policy")
        self._caller.at_end(self.end)

    def step(self, metric: Any) -> StepInfo:
        """Make progress; weights change here alone.

        Raises:
            ClosedError: it has ended, or has not begun.
        """
        if self.policy is None:
            raise ClosedError("selective averaging has ended here, as close() or its block does it: make another one")
        info: StepInfo = self._caller.call(self.policy.awaited.step, metric)
        if info is not NOTHING:
            self.replacement_count += bool(info)
        return info

    def end(self, error: BaseException | None = None) -> None:
        """Leave the policy, if it is open. The others go on."""
        policy, self.policy = self.policy, None
        if policy is not None and self._caller.is_open:  # else the world has ended, because of an error
            self._caller.forget(self.end)
            trace = getattr(error, "__traceback__", None)  # contextlib sets what it is given as the error's own
            policy.__exit__(type(error) if error is not None else None, error, trace)
