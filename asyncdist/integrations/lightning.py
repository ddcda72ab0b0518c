"""Averaging as a callback of Lightning's ``Trainer``: selective averaging, or any other policy.

::

    from asyncdist.integrations.lightning import SelectiveAveraging

    trainer = Trainer(max_epochs=10, callbacks=[SelectiveAveraging(average_every=100)])
    trainer.fit(module, loader)                       # asyncdist run -n 4 train.py

With another policy::

    trainer = Trainer(max_epochs=10, callbacks=[Averaging(DiLoCoPolicy, average_every=100)])

Each rank has its own trainer, which reads its own data, and validates and saves without waiting for other ranks.
"""

from __future__ import annotations

import logging
import os
import sys
import warnings
from typing import Any, Final, Generic, NoReturn, Self, Unpack

import torch

from asyncdist import environment, validation
from asyncdist.blocking.policies import Policy
from asyncdist.integrations import joining, random_numbers
from asyncdist.integrations.joining import PolicyT, Selective, Training
from asyncdist.integrations.metrics import RunningLoss
from asyncdist.integrations.patching import replaces
from asyncdist.integrations.replicas import Replica, show_replica, state_of_rank, states_of_replica
from asyncdist.launchers import detection
from asyncdist.protocols import StepInfo
from asyncdist.protocols.metrics import NOT_MEASURED
from asyncdist.protocols.options import MetricMode, SelectiveOptions

with validation.optional_imports(__name__, ["lightning"], "lightning"):
    import lightning.pytorch as pl
    from lightning.fabric.utilities.exceptions import MisconfigurationException
    from lightning.fabric.utilities.warnings import PossibleUserWarning
    from lightning.pytorch.callbacks import Callback
    from lightning.pytorch.utilities import rank_zero_only
    from lightning.pytorch.utilities.data import extract_batch_size

joining.hide_ranks()

logger = logging.getLogger("asyncdist.integrations")

#: Lightning callbacks that average weights over time.
_AVERAGES: Final = frozenset(("StochasticWeightAveraging", "WeightAveraging"))
#: Key in a checkpoint of the number of the rank or replica that saved it.
_NUMBER: Final = "asyncdist_number"
#: Packages that contain Lightning's ``Trainer``, each with the name of its Fabric package.
_LIBRARIES: Final = {"lightning.pytorch": "lightning.fabric", "pytorch_lightning": "lightning_fabric"}


class Averaging(Callback, Generic[PolicyT]):
    """Runs a policy during training.

    Weights change between two training batches, after an optimizer step. If there are several ranks, each writes to a
    subfolder ``rank0``, ``rank1``, ... of the folders of the trainer, its loggers, its profiler and its checkpoint
    callbacks. Create this object before the trainer, so that the trainer uses the subfolder from the beginning. Only
    rank 0 shows a progress bar.

    Each rank logs the number of averages that it has adopted, under the name ``averages``. Checkpoints contain the
    policy's state, and a fit with ``ckpt_path`` continues from it. Trainers of ``pytorch_lightning`` and
    ``lightning.pytorch`` are supported.

    Args:
        policy: Class of the policy, for example :class:`protocols.DiLoCoPolicy`.
        monitor: Name of the logged metric by which ranks are judged, if the policy judges them. By default, ranks are
            judged by the mean training loss since their last report.
        optimizer_index: Index of the optimizer to use, if the module has several.
        options: Options of the policy. With ``weights="tokens"`` or ``"rate"``, each example of a batch counts as one
            token. ``replica_size`` works as for :class:`SelectiveAveraging`.

    Attributes:
        last_info: Events of the policy's last step.

    Raises:
        TypeError, ValueError: An option has a wrong type or value, the trainer has several devices, or the module has
            several optimizers and ``optimizer_index`` is missing.
    """

    _count_name = "averages"

    def __init__(
        self,
        policy: type[PolicyT],
        *,
        monitor: str | None = None,
        optimizer_index: int | None = None,
        **options: Any,
    ) -> None:
        training = joining.averaging(policy, options, monitor=monitor)
        self._set_up(training, monitor, optimizer_index, policy.__name__)

    def _set_up(
        self, training: Training[PolicyT], monitor: str | None, optimizer_index: int | None, policy_name: str
    ) -> None:
        # These options are read here, because LightningCLI parses the constructor: it would find
        # options.get("weights", "equal"), and pass this default to every policy.
        replica_size = training.options.get("replica_size", 1)
        self._counts_examples = training.options.get("weights", "equal") != "equal"
        replicas = "" if replica_size == 1 else f"replicas of {replica_size}"
        self._policy_name = ", ".join(filter(None, (policy_name, replicas)))
        self.monitor = monitor
        self.last_info: StepInfo | None = None
        self._training = training
        if optimizer_index is not None:
            validation.whole("optimizer_index", optimizer_index)
        self._optimizer_index = optimizer_index
        self._replica_size = replica_size
        self._loss = RunningLoss()
        self._example_count = 0
        self._trainer: pl.Trainer
        self._log: Any = None
        self._steps: Any = None
        self._step_count = 0
        self._first_step_count = 0
        self._has_losses = self._has_warned = False
        self._spent: Any = None
        self._spent_value = ""
        self._last_state: dict[str, Any] = {}
        self._loads_states = True
        self._has_loaded_other = False  # whether this fit resumes from another rank's checkpoint
        self._world = joining.join()
        rank_zero_only.rank = 0  # type: ignore[attr-defined]  # so that each rank writes its own files
        self._replica = Replica(self._world.rank) if replica_size == 1 else show_replica(self._world, replica_size)
        _hide_ranks_of_mpi()
        _write_below_from_the_beginning()
        if self._world.rank:
            for name in _LIBRARIES:
                logging.getLogger(name).setLevel(logging.WARNING)
            warnings.simplefilter("ignore", PossibleUserWarning)  # rank 0 shows these warnings

    @property
    def policy(self) -> Policy[PolicyT] | None:
        """The open policy, or None outside ``fit``."""
        return self._training.policy

    @property
    def awaited(self) -> PolicyT | Self:
        """The open policy without its blocking methods, or this object outside ``fit``.

        :func:`asyncdist.save_population` reads it.
        """
        return self if self.policy is None else self.policy.awaited

    @property
    def log(self) -> Any:
        """The module's method ``log``, which Lightning sets on callbacks when fitting begins."""
        return self._log

    @log.setter
    def log(self, log: Any) -> None:
        self._log = log
        self._prepare(log.__self__.trainer)  # loggers open their files before Lightning calls ``setup``

    def _prepare(self, trainer: pl.Trainer) -> None:
        if trainer.world_size != self._replica_size and not (self._world.size == 1 < self._replica_size):
            if detection.is_started_by_trainer():  # The process that created the trainer raises the error below, too.
                raise SystemExit(0)
            raise ValueError(self._refusal(trainer.world_size))
        self._use_rank_folder(trainer)
        _settle_before_saving(trainer.strategy)
        if self._world.size > 1:
            self._shuffle_loaders_by_rank(trainer)
        if self._world.rank:
            for callback in trainer.callbacks:  # type: ignore[attr-defined]
                if hasattr(callback, "_max_depth"):  # the callback is a ModelSummary
                    callback._max_depth = 0
            if trainer.progress_bar_callback is not None:
                trainer.progress_bar_callback.disable()

    def _shuffle_loaders_by_rank(self, trainer: pl.Trainer) -> None:
        """Patch the strategy to make training loaders shuffle differently in each replica, before workers read rows."""
        strategy: Any = trainer.strategy
        if "process_dataloader" in vars(strategy):  # an earlier fit has patched the strategy
            return

        @replaces(strategy, "process_dataloader")
        def process_for_rank(process: Any, loader: Any) -> Any:
            loader = process(loader)
            if trainer.training:
                is_alone = self._replica_size == 1
                seed = random_numbers.draw() if is_alone else int(environment.VARIABLES.get("PL_GLOBAL_SEED", 0))
                random_numbers.shuffle_by_number(loader, self._replica.number, size=self._replica_size, seed=seed)
                if self._has_loaded_other:
                    loop = trainer.fit_loop
                    states = [] if random_numbers.saves_order(loader) else loop._combined_loader_states_to_load
                    loop._combined_loader_states_to_load = random_numbers.with_seeds_by_number(
                        states, self._replica.number
                    )
            return loader

    def _use_rank_folder(self, trainer: pl.Trainer) -> None:
        if self._world.size > 1:
            _write_below(trainer, self._replica.folder)

    def _refusal(self, count: int) -> str:
        if self._replica_size > 1:
            return (
                f"devices must be equal to replica_size={self._replica_size}, got {count}: pass "
                f"devices={self._replica_size}, strategy='ddp' to the Trainer"
            )
        return (
            f"devices must be 1 for each rank, got {count}: pass devices=1 to the Trainer and start more ranks. To "
            f"make the devices one replica, pass strategy='ddp' to the Trainer and replica_size={count} to "
            f"{type(self).__name__}"
        )

    __copy__ = __deepcopy__ = joining.refuse_copy

    def __getstate__(self) -> NoReturn:
        raise ValueError(
            f"{type(self).__name__} cannot be sent to another process, as this Trainer's strategy requires: pass "
            "devices=1 and start more ranks, or pass strategy='ddp' to the Trainer and replica_size= to "
            f"{type(self).__name__}"
        )

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Drop the state of the earlier fit. Lightning calls this method before it loads a checkpoint."""
        self._loads_states = stage == "fit"
        if stage == "fit":
            self._last_state = {}
            self._has_loaded_other = False

    def teardown(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Drop a state that no policy has started from, and accept a state that a program loads before the next fit."""
        if stage == "fit":
            self._training.forget_state()
        self._loads_states = True

    def on_fit_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Start the policy together with the other ranks, unless a checkpoint is loaded after this method."""
        self._trainer = trainer
        self._has_losses = self._has_warned = False
        self._loss.reset()
        self._example_count = 0
        if not self._begins_late(trainer):
            self._begin(trainer, pl_module)
        elif self._world.size > 1:
            # The policy starts only after the loaders have seeded their workers.
            random_numbers.seed_by_number(self._world.rank)

    def _begins_late(self, trainer: pl.Trainer) -> bool:
        """Return whether the policy starts in :meth:`on_train_start`, after the trainer has loaded its checkpoint.

        Some strategies, like ModelParallelStrategy, load the whole checkpoint that late. Others load the states of
        optimizers and schedulers, which must not replace the state that a restarted rank gets from a running policy.
        """
        is_restarted = self._world.incarnation > 0 and trainer.ckpt_path is not None
        return is_restarted or bool(trainer.strategy.restore_checkpoint_after_setup)

    def _begin(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._training.begin(pl_module, self._choose(trainer.optimizers))
        if self.monitor is None:
            self._training.judge_by_training_loss()
        self._warn_of_averages(trainer)

    def _warn_of_averages(self, trainer: pl.Trainer) -> None:
        """Warn about callbacks that average weights over time, because the policy does not update their averages."""
        for callback in trainer.callbacks:  # type: ignore[attr-defined]
            if _AVERAGES.intersection(kind.__name__ for kind in type(callback).__mro__):
                logger.warning(
                    "averaging: %s averages only this rank's weights. Its average still includes the weights "
                    "from before a replacement, and replaces the model's weights at the end",
                    type(callback).__name__,
                )

    def _choose(self, optimizers: list[torch.optim.Optimizer]) -> torch.optim.Optimizer:
        index = self._optimizer_index
        if index is None and len(optimizers) != 1:
            raise ValueError(
                f"optimizer_index must be set, because configure_optimizers returns {len(optimizers)} optimizers: pass "
                f"{type(self).__name__} the index of the optimizer whose state is reset when weights are replaced, "
                "such as optimizer_index=0"
            )
        if index is not None and not -len(optimizers) <= index < len(optimizers):
            validation.refuse(
                "optimizer_index", index, f"the index of one of {len(optimizers)} optimizers of configure_optimizers"
            )
        return optimizers[index or 0]

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Record the number of earlier optimizer steps, which is known only after a checkpoint has been loaded.

        If the policy begins late, also start it.
        """
        if self._begins_late(trainer):
            self._begin(trainer, pl_module)
        self._steps = _steps_of(trainer)
        self._step_count = self._first_step_count = self._steps.completed
        # Lightning's batch size finder also sets up validation loaders while trainer.training is true.
        loaders: Any = trainer.fit_loop._combined_loader
        for loader in loaders.flattened:
            joining.warn_of_common_rows(loader, self._world)

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Take a policy step if the optimizer has taken a step."""
        loss = outputs.get("loss") if isinstance(outputs, dict) else outputs
        if self._counts_examples:
            self._example_count += _size_of(batch)
        if self.monitor is None and self._training.is_judged and loss is not None:
            self._has_losses = True
            if trainer.accumulate_grad_batches > 1 and pl_module.automatic_optimization:
                loss = loss * trainer.accumulate_grad_batches  # undoes Lightning's division
            self._loss.add(loss)
        step_count = self._steps.completed
        if step_count == self._step_count:  # the batch only accumulated gradients
            return
        self._step_count = step_count
        self._training.use(self._choose(trainer.optimizers))
        tokens = self._example_count if self._counts_examples else None
        self._example_count = 0
        self.last_info = self._training.step(self._metric if self._training.is_judged else None, tokens)
        if self.last_info:
            self._loss.reset()
            if self.monitor is not None:  # the logged metric belongs to the replaced weights
                self._spend(trainer.callback_metrics.get(self.monitor))
            self.log(self._count_name, float(self._training.replacement_count), prog_bar=True)

    def _metric(self) -> Any:
        if self.monitor is None:
            return self._loss()
        newest = self._trainer.callback_metrics.get(self.monitor)
        if self._is_spent(newest):
            return NOT_MEASURED
        self._spend(newest)
        return newest

    def _is_spent(self, metric: Any) -> bool:
        """Return whether a metric is missing or was already reported.

        Lightning keeps the last logged tensor, and returns a new tensor with the same memory at each read.
        """
        are_tensors = isinstance(metric, torch.Tensor) and isinstance(self._spent, torch.Tensor)
        is_same = metric is self._spent or (are_tensors and metric.data_ptr() == self._spent.data_ptr())
        return metric is None or (is_same and repr(float(metric)) == self._spent_value)

    def _spend(self, metric: Any) -> None:
        self._spent, self._spent_value = metric, "" if metric is None else repr(float(metric))  # NaN equals itself

    def on_train_epoch_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Warn, after the first epoch, if the metric is missing."""
        self._warn_of_no_metric(trainer)

    def _warn_of_no_metric(self, trainer: pl.Trainer) -> None:
        """Warn once if the optimizer has taken steps, but this rank has no metric."""
        if self._has_warned or self._step_count == self._first_step_count or not self._training.is_judged:
            return
        if self.monitor is None:
            missing = "" if self._has_losses else "training_step has not returned a loss: return it, or pass monitor="
        elif self.monitor in trainer.callback_metrics:
            missing = ""
        else:
            logged = ", ".join(sorted(trainer.callback_metrics)) or "nothing"
            missing = f"the monitored metric {self.monitor!r} has not been logged; logged metrics: {logged}"
        if missing:
            self._has_warned = True
            logger.warning("averaging: this rank has no metric so far, so it cannot be judged: %s", missing)

    def on_fit_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Leave the policy. The other ranks continue."""
        self._warn_of_no_metric(trainer)
        self._last_state = self._training.state_dict()
        self._training.end()

    @property
    def state_key(self) -> str:
        """Key of the policy's state in checkpoints, different for each policy."""
        named = (self._policy_name, *([f"name={self._training.name!r}"] if self._training.name else []))
        return f"{type(self).__qualname__}({', '.join(filter(None, named))})"

    def state_dict(self) -> dict[str, Any]:
        """Return the policy's state for a checkpoint, even after the fit. Before the first fit, it is empty.

        All ranks of a replica must call this method. The first rank returns the states of all its ranks.
        """
        state = self._training.state_dict() or self._last_state
        if self._replica.size == 1 or not state:
            return state
        return states_of_replica(self._world, self._replica, state)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Keep a state for the next policy. Ignore a state that Lightning loads to validate, test or predict."""
        if not self._loads_states:
            return
        state = state_dict if self._replica.size == 1 else state_of_rank(self._replica, state_dict)
        self._training.load_state_dict(state)

    def on_save_checkpoint(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        """Add the number of this rank, or of its replica, to the checkpoint."""
        checkpoint[_NUMBER] = self._replica.number

    def on_load_checkpoint(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        """Record whether another rank or replica saved the checkpoint. If so, the saved order of rows is not used."""
        self._has_loaded_other = checkpoint.get(_NUMBER) != self._replica.number

    def on_exception(self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException) -> None:
        """Leave the policy, but keep its state for checkpoint callbacks, which are called after this method."""
        if self._replica.size == 1:
            self._last_state = self._training.state_without_waiting() or self._last_state
        elif self._training.policy is not None:
            logger.warning(
                "averaging: a checkpoint that is saved now does not contain the policy's state, because the other "
                "ranks of the replica may have ended"
            )
        self._training.end(exception)
        if self._loads_states:  # the fit may have loaded a state without starting a policy
            self._training.forget_state()
        self._loads_states = True


class SelectiveAveraging(Averaging[Selective]):
    """Replaces the worst ranks' weights with the average of good ranks' weights during training.

    It behaves like :class:`Averaging`, but the name of the logged number of adopted averages is ``replacements``.

    Args:
        average_every: Number of optimizer steps between two reports of a rank's metric.
        monitor: Name of the logged metric by which ranks are judged, for example ``"val_loss"``. By default, ranks are
            judged by the mean training loss since their last report.
        mode: ``"min"`` (the default) if smaller is better, ``"max"`` if larger is, which requires ``monitor``.
        optimizer_index: Index of the optimizer to use, if the module has several.
        replica_size: Number of consecutive ranks that form one replica under DDP, by default 1. Above 1, trainers need
            ``devices=replica_size`` and ``strategy="ddp"``, and write to folders ``replica0``, ``replica1``, ... Create
            this object before the trainer, because it sets the ranks that Lightning reads.
        swap_every: Option of :class:`protocols.ReplicaAveragingPolicy`, only for ``replica_size`` above 1.
        options: Other options of :class:`protocols.AsyncSelectiveAveragingPolicy`.

    Raises:
        TypeError, ValueError: An option has a wrong type or value, the trainer does not have ``replica_size`` devices,
            or the module has several optimizers and ``optimizer_index`` is missing.
    """

    _count_name = "replacements"

    @validation.names_options(refused=joining.REFUSED_OPTIONS)
    def __init__(
        self,
        average_every: int,
        *,
        monitor: str | None = None,
        mode: MetricMode | None = None,
        optimizer_index: int | None = None,
        replica_size: int = 1,
        swap_every: int | None = None,
        **options: Unpack[SelectiveOptions],
    ) -> None:
        training = joining.selective_averaging(
            average_every,
            mode,
            options,
            replica_size=replica_size,
            swap_every=swap_every,
            monitor=monitor,
            is_of_trainer=True,
        )
        self._set_up(training, monitor, optimizer_index, "")


def _size_of(batch: Any) -> int:
    """Return the number of examples of a batch, or 1 if it contains no tensors."""
    try:
        return extract_batch_size(batch)
    except MisconfigurationException:
        return 1


def _steps_of(trainer: pl.Trainer) -> Any:
    """Return the object from which the trainer reads ``global_step``, as its attribute ``completed``.

    Reading the object is faster. It is the same during a fit.
    """
    loop: Any = trainer.fit_loop.epoch_loop
    if trainer.lightning_module.automatic_optimization:
        return loop.automatic_optimization.optim_progress.optimizer.step.total
    return loop.manual_optimization.optim_step_progress.total


def _settle_before_saving(strategy: Any) -> None:
    """Patch a strategy to wait for averaging rounds in progress before it reads the weights for a checkpoint.

    Otherwise, a strategy that gathers copies of the weights would miss the changes that the rounds make.
    """
    if "lightning_module_state_dict" in vars(strategy):  # an earlier fit has patched the strategy
        return

    @replaces(strategy, "lightning_module_state_dict")
    def settle_and_read(read: Any) -> Any:
        joining.settle_open_trainings()
        return read()


def _hide_ranks_of_mpi() -> None:
    """Prevent Lightning from detecting MPI's ranks. It must see no ranks, or only its replica's ranks."""
    for name in _LIBRARIES.values():
        if environments := sys.modules.get(f"{name}.plugins.environments.mpi"):
            environments.MPIEnvironment.detect = staticmethod(lambda: False)


def _write_below_from_the_beginning() -> None:
    """Patch ``Trainer`` so that new trainers use their rank's folder before ``fit`` searches for checkpoints."""
    for name in _LIBRARIES:
        kind = getattr(sys.modules.get(name), "Trainer", None)
        if kind is not None and not hasattr(kind.__init__, "gives_folders"):
            replaces(kind, "__init__")(_make_for_rank)
            kind.__init__.gives_folders = True


def _make_for_rank(make: Any, trainer: Any, *args: Any, **options: Any) -> None:
    make(trainer, *args, **options)
    for callback in trainer.callbacks:
        if isinstance(callback, Averaging):
            callback._use_rank_folder(trainer)


def _write_below(trainer: pl.Trainer, folder: str) -> None:
    """Make a trainer write its files to the subfolder ``folder`` of each of its folders."""
    trainer._default_root_dir = joining.below(trainer.default_root_dir, folder)  # type: ignore[attr-defined]
    for logger in trainer.loggers:
        for name in ("_root_dir", "_save_dir"):
            if isinstance(given := getattr(logger, name, None), str | os.PathLike):
                setattr(logger, name, joining.below(given, folder))
        options = getattr(logger, "_wandb_init", None)  # wandb has a second folder, with a separate option
        # With fast_dev_run, ``options`` is not a dict, because a dummy logger returns a method for any attribute name.
        if isinstance(options, dict) and options.get("dir") is not None:
            options["dir"] = joining.below(options["dir"], folder)
            os.makedirs(options["dir"], exist_ok=True)  # wandb would use a temporary folder if this one is missing
    writers: list[Any] = [trainer.profiler, *trainer.checkpoint_callbacks]  # type: ignore[attr-defined]
    for writer in writers:
        if getattr(writer, "dirpath", None) is not None:
            writer.dirpath = joining.below(writer.dirpath, folder)
