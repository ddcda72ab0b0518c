"""Selective averaging as a callback of the ``Trainer`` of transformers.

::

    from asyncdist.integrations.transformers import SelectiveAveraging    # before TrainingArguments are made

    trainer = Trainer(model, arguments, train_dataset=dataset, callbacks=[SelectiveAveraging(average_every=100)])
    trainer.train()                                   # asyncdist run -n 4 train.py

Each rank has a trainer of its own, which knows of no other rank: importing this module hides the variables by which
launchers tell of ranks.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from typing import Any, Unpack

import torch
import transformers
from accelerate import PartialState  # type: ignore[import-untyped]
from torch import nn
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from asyncdist import validation
from asyncdist.blocking.policies import Policy
from asyncdist.integrations.joining import Selective, hide_ranks, join, selective_averaging
from asyncdist.integrations.metrics import RunningLoss
from asyncdist.integrations.replicas import show_replica
from protocols import StepInfo
from protocols.options import MetricMode, SelectiveOptions

hide_ranks()

logger = logging.getLogger("asyncdist.integrations")


class SelectiveAveraging(TrainerCallback):
    """Lets the worst ranks of a population take the average of the good ones, while they train.

    Weights change after a step of the optimizer. Of several ranks each writes to a folder ``rank0``, ``rank1``, ...
    below ``output_dir``; shuffles, and drops out, by the seed ``arguments.seed + rank``; and rank 0 alone shows a
    progress bar.

    Args:
        average_every: the cadence of reports, in steps of the optimizer.
        monitor: the metric of evaluation by which ranks are judged, ``"eval_loss"`` for example. By default the mean of
            the losses that the model has returned since the last report; a trainer whose ``compute_loss`` makes the
            loss needs ``monitor``, or ``logging_steps`` below ``average_every``.
        mode: ``"min"`` if smaller is better, which is the default, ``"max"`` if larger is.
        replica_size: of so many ranks, one after the other, each trainer is one replica under DDP; they write to
            folders ``replica0``, ``replica1``, ... By default 1. It is shown to the trainer when this is made, so make
            it before the ``TrainingArguments``.
        swap_every: see :class:`protocols.ReplicaAveragingPolicy`.
        options: others of :class:`protocols.AsyncSelectiveAveragingPolicy`.

    Attributes:
        last_info: what the last step of the policy did.

    Raises:
        TypeError, ValueError: an option is not what it should be; the trainer has several GPUs in one process; with
            ``replica_size``, ``TrainingArguments`` are there already.
    """

    @validation.names_options()
    def __init__(
        self,
        average_every: int,
        *,
        monitor: str | None = None,
        mode: MetricMode | None = None,
        replica_size: int = 1,
        swap_every: int | None = None,
        **options: Unpack[SelectiveOptions],
    ) -> None:
        self.monitor = monitor
        self.last_info: StepInfo | None = None
        self._loss = RunningLoss()
        self._has_losses = False
        self._newest = float("nan")
        self._has_warned = False
        self._evaluated: set[str] = set()
        self._hook: Any = None
        self._training = selective_averaging(
            average_every, mode, options, replica_size=replica_size, swap_every=swap_every
        )
        self._world = join()
        self._folder, self._number = f"rank{self._world.rank}", self._world.rank
        if replica_size > 1:
            if PartialState._shared_state:
                raise ValueError(
                    "with replica_size=, make SelectiveAveraging before TrainingArguments, which read ranks"
                )
            self._number = show_replica(self._world, replica_size).number
            self._folder = f"replica{self._number}"
        if self._world.rank:  # made in the trainer's constructor, before any callback is asked
            transformers.trainer.DEFAULT_PROGRESS_CALLBACK = TrainerCallback  # type: ignore[assignment]

    @property
    def policy(self) -> Policy[Selective] | None:
        """The policy, while the trainer trains; None otherwise."""
        return self._training.policy

    def on_init_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        """Give this rank a folder and a seed of its own."""
        if args.n_gpu > 1:
            raise ValueError(
                f"this Trainer has {args.n_gpu} GPUs, which make one replica; SelectiveAveraging is for ranks with one "
                "device each: let each rank see one (CUDA_VISIBLE_DEVICES), and start more ranks"
            )
        if self._world.size > 1 and not hasattr(args, "asyncdist_rank"):  # a trainer before may have had the same ones
            args.asyncdist_rank = self._world.rank  # type: ignore[attr-defined]
            args.output_dir = os.path.join(str(args.output_dir), self._folder)
            args.seed += self._number

    def on_train_begin(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **of: Any) -> None:
        """Start the policy, together with all ranks."""
        model, optimizer = of["model"], of["optimizer"]
        self._loss.reset()
        if self._hook is not None:  # of a training that an error has ended
            self._hook.remove()
        self._hook = model.register_forward_hook(_outside_of_graphs(self._see, args, model))
        self._training.begin(model, getattr(optimizer, "optimizer", optimizer))

    def _see(self, model: nn.Module, _: Any, output: Any) -> None:
        """Add the loss that the model returns in training."""
        loss = output.get("loss") if isinstance(output, dict) else None
        if model.training and loss is not None:
            self._has_losses = True
            self._loss.add(loss)

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        """Do a step of the policy."""
        self.last_info = self._training.step(self._metric)
        if self.last_info:
            self._loss.reset()

    def _metric(self) -> Any:
        return self._loss() if self.monitor is None and self._has_losses else self._newest

    def on_evaluate(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        metrics: dict[str, float] | None = None,
        **_: Any,
    ) -> None:
        """Note the monitored metric."""
        if self.monitor is None:
            return
        found = metrics or {}
        if self.monitor not in found and self._evaluated.issuperset(found):  # of several datasets each was seen
            self._warn_of_no_metric()
        self._evaluated.update(found)
        self._newest = found.get(self.monitor, self._newest)

    def _warn_of_no_metric(self) -> None:
        """Say once, where evaluations have not given what is monitored, that this rank cannot be judged."""
        if self.monitor not in self._evaluated and not self._has_warned:
            self._has_warned = True
            logger.warning(
                "selective averaging: this rank has no metric to be judged by so far: no evaluation has given %r, "
                "which is monitored; given was %s",
                self.monitor,
                ", ".join(sorted(self._evaluated)) or "nothing",
            )

    def on_log(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        logs: dict[str, float] | None = None,
        **_: Any,
    ) -> None:
        """Note the loss that the trainer logs, for models that return none; tell how often there was an average."""
        if self.monitor is None:
            self._newest = (logs or {}).get("loss", self._newest)
        if logs is not None and self._training.replacement_count:
            logs["replacements"] = self._training.replacement_count

    def on_train_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        """Leave the policy; the others go on."""
        if self.monitor is not None:
            self._warn_of_no_metric()
        self._hook.remove()
        self._training.end()


def _outside_of_graphs(see: Callable[..., None], args: TrainingArguments, model: nn.Module) -> Callable[..., None]:
    """Keep a hook from being compiled with its model: it reads a number, which breaks the graph, as torch warns."""
    is_compiled = args.torch_compile or getattr(model, "_compiled_call_impl", None) is not None
    if not is_compiled:  # asking for this imports half of torch's compiler
        return see
    kept: Callable[..., None] = torch.compiler.disable(see)  # type: ignore[no-untyped-call]
    return kept
