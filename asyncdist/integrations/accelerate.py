"""Averaging in a training loop that uses Accelerate: selective averaging, or any other policy.

::

    from asyncdist.integrations.accelerate import SelectiveAveraging      # before the Accelerator is made

    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    averaging = SelectiveAveraging(model, optimizer, average_every=100)
    for batch in loader:
        ...
        averaging.step(loss=loss)                     # asyncdist run -n 4 train.py

With another policy::

    averaging = Averaging(DiLoCoPolicy(model, optimizer, average_every=100))

Importing this module hides the launcher's environment variables, so each rank's ``Accelerator`` sees a single process.
Mixed precision and gradient accumulation work as usual, and loaders do not wait for other ranks. If there are several
ranks, each uses a subfolder ``rank0``, ``rank1``, ... of ``project_dir`` and ``logging_dir``. Paths passed to methods,
such as ``save_state("saved")``, are not changed. Pass a different path on each rank.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final, Unpack

import torch
from torch import nn

from asyncdist import current_world, validation
from asyncdist.blocking.callers import is_in_a_rank
from asyncdist.functional.seeding import RestoredNumbers
from asyncdist.integrations import joining, pytorch, random_numbers
from asyncdist.integrations.joining import PolicyT, Selective, Training
from asyncdist.integrations.patching import replaces
from asyncdist.protocols import StepInfo
from asyncdist.protocols.options import MetricMode, SelectiveOptions
from asyncdist.protocols.step_info import NOTHING

with validation.optional_imports(__name__, ["accelerate"], "accelerate"):
    import accelerate  # type: ignore[import-untyped]

joining.hide_ranks()

_REFUSED_OPTIONS: Final = {
    **joining.REFUSED_OPTIONS,
    **dict.fromkeys(
        ("replica_size", "swap_every"),
        "the Accelerator sees only one rank; for replicas under DDP, import SelectiveAveraging from "
        "asyncdist.integrations.pytorch, and wrap the model yourself",
    ),
}


@replaces(accelerate.Accelerator, "__init__")
def _use_rank_folders(make: Any, accelerator: Any, *args: Any, **options: Any) -> None:
    """Write to a separate folder for each rank."""
    make(accelerator, *args, **options)
    directories = accelerator.project_configuration
    for name in ("project_dir", "logging_dir"):
        if (given := getattr(directories, name)) is not None and (world := _world()).size > 1:
            setattr(directories, name, joining.below(given, f"rank{world.rank}"))


@replaces(accelerate.Accelerator, "prepare_data_loader")
def _shuffle_loaders_by_rank(prepare: Any, accelerator: Any, *args: Any, **options: Any) -> Any:
    """Let prepared loaders shuffle differently on each rank."""
    loader = prepare(accelerator, *args, **options)
    if accelerator.num_processes == 1 and (world := _world()).size > 1:
        random_numbers.shuffle_by_number(loader, world.rank)
        random_numbers.forget_order(loader)
    return loader


@replaces(accelerate.Accelerator, "load_state")
def _vary_loaded_states(load: Any, accelerator: Any, input_dir: Any = None, *args: Any, **options: Any) -> None:
    """Let ranks that load the same state still use different random numbers."""
    load(accelerator, input_dir, *args, **options)
    if accelerator.num_processes > 1:
        return
    world = _world()
    if input_dir is None or f"rank{world.rank}" in Path(input_dir).parts:  # the state was saved by this rank
        world.services.shared(RestoredNumbers).note()
    elif world.size > 1:
        random_numbers.seed_by_number(world.rank)
        for loader in accelerator._dataloaders:  # loading has replaced the loaders' samplers
            random_numbers.shuffle_by_number(loader, world.rank)
            if random_numbers.saves_order(loader):
                random_numbers.forget_order(loader)
            else:
                random_numbers.seed_workers_by_number(loader, world.rank)


@replaces(accelerate.Accelerator, "save_state")
def _save_settled_states(save: Any, *args: Any, **options: Any) -> Any:
    """Save a state after the averaging rounds in progress have ended."""
    joining.settle_open_trainings()
    return save(*args, **options)


@replaces(accelerate.utils.memory, "should_reduce_batch_size")
def _note_exhausted_memory(decide: Any, exception: Exception) -> bool:
    """Let training start again after it has run out of memory. ``find_executable_batch_size`` calls this function."""
    is_tried_again: bool = decide(exception)
    if is_tried_again:
        joining.note_out_of_memory()
    return is_tried_again


def _new_gradients(_: object) -> dict[str, Any]:
    """Return the state of accelerate's ``GradientState`` for one of several ranks that share a process."""
    return {}


class _GradientsOfRank:
    """Gives each rank its own state of accelerate's ``GradientState``, which has one state per process.

    With a common state, one rank's batches would determine when another rank's optimizer takes a step. Rank 0 has the
    state of the process, which a simulated script may use before it opens its world.
    """

    def __init__(self, of_process: dict[str, Any]) -> None:
        self._of_process = of_process

    def __get__(self, _: object, __: type | None = None) -> dict[str, Any]:
        try:
            world = current_world()
        except RuntimeError:
            return self._of_process
        is_first = world.rank == world.incarnation == 0
        if is_first or not world.services.engine.transport.capabilities.shares_process:
            return self._of_process
        return world.services.shared(_new_gradients)


def _world() -> Any:
    return current_world() if is_in_a_rank() else joining.join().awaited


joining.hide_ranks_from(accelerate.state.PartialState)
accelerate.state.GradientState._shared_state = _GradientsOfRank(accelerate.state.GradientState._shared_state)


class Averaging(pytorch.Averaging[PolicyT]):
    """Runs a policy in a loop that uses Accelerate. See :class:`asyncdist.integrations.pytorch.Averaging`.

    ``average_every`` counts optimizer steps. While ``accelerator.accumulate(model)`` accumulates gradients,
    ``optimizer.step()`` does nothing, and :meth:`step` only records the metric and the tokens.
    """

    def _begin(self, training: Training[PolicyT], model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        self._gradients = accelerate.state.GradientState()  # all GradientState instances of a rank share one state
        self._tokens: float | None = None
        self._has_seen_loader = False
        super()._begin(training, model, optimizer)

    def step(self, metric: Any = None, *, loss: Any = None, score: Any = None, tokens: float | None = None) -> StepInfo:
        """Take a policy step, with the arguments of :meth:`asyncdist.integrations.pytorch.Averaging.step`."""
        if not self._has_seen_loader:  # only now, because a program also prepares loaders for evaluation
            self._has_seen_loader = True
            joining.warn_of_common_rows(self._gradients.active_dataloader, joining.join())
        if tokens is not None:
            self._tokens = tokens + (self._tokens or 0)
        if self._gradients.sync_gradients or self.policy is None:
            tokens, self._tokens = self._tokens, None
            return super().step(metric, loss=loss, score=score, tokens=tokens)
        if self._training.is_judged:
            self._add(metric, loss, score)
        return NOTHING


class SelectiveAveraging(Averaging[Selective], pytorch.SelectiveAveraging):
    """Replaces the worst ranks' weights with the average of good ranks' weights, in a loop that uses Accelerate.

    The arguments are the same as for :class:`asyncdist.integrations.pytorch.SelectiveAveraging`, except that
    ``replica_size`` raises TypeError. Steps work as in :class:`Averaging`.
    """

    @validation.names_options(refused=_REFUSED_OPTIONS)
    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        average_every: int,
        *,
        mode: MetricMode | None = None,
        **options: Unpack[SelectiveOptions],
    ) -> None:
        pytorch.SelectiveAveraging.__init__(self, model, optimizer, average_every, mode=mode, **options)
