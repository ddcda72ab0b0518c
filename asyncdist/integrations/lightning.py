"""Selective averaging as a callback of Lightning's ``Trainer``.

::

    from asyncdist.integrations.lightning import SelectiveAveraging

    trainer = Trainer(max_epochs=10, callbacks=[SelectiveAveraging(average_every=100)])
    trainer.fit(module, loader)                       # asyncdist run -n 4 train.py

Each rank has a trainer of its own, which knows of no other rank: it reads its own data, validates and saves for itself,
and waits for nobody.
"""

from __future__ import annotations

import functools
import logging
import os
import sys
import warnings
from typing import Any, Final, NoReturn, Unpack

import torch

from asyncdist import environment, validation
from asyncdist.blocking.policies import Policy
from asyncdist.integrations.joining import Selective, hide_ranks, join, refuse_copy, selective_averaging
from asyncdist.integrations.metrics import RunningLoss
from asyncdist.integrations.random_numbers import draw, shuffle_apart
from asyncdist.integrations.replicas import show_replica
from asyncdist.protocols import StepInfo
from asyncdist.protocols.metrics import NOT_MEASURED
from asyncdist.protocols.options import MetricMode, SelectiveOptions

with validation.optional_imports(__name__, ["lightning"], "lightning"):
    import lightning.pytorch as pl
    from lightning.fabric.utilities.warnings import PossibleUserWarning
    from lightning.pytorch.callbacks import Callback
    from lightning.pytorch.utilities import rank_zero_only

hide_ranks()

logger = logging.getLogger("asyncdist.integrations")

#: Callbacks of Lightning that average weights over time.
_AVERAGES: Final = frozenset(("StochasticWeightAveraging", "WeightAveraging"))
#: The packages in which Lightning comes, each with that of its lower half.
_LIBRARIES: Final = {"lightning.pytorch": "lightning.fabric", "pytorch_lightning": "lightning_fabric"}


class SelectiveAveraging(Callback):
    """Lets the worst ranks of a population take the average of the good ones, while they train.

    Weights change between two training batches, after a step of the optimizer. Of several ranks each writes its logs
    and checkpoints to a folder ``rank0``, ``rank1``, ... below the one that the trainer, its loggers, its profiler and
    its checkpoint callbacks name, and rank 0 alone shows a progress bar. How often a rank has taken an average is
    logged by it as ``replacements``. Make it before the trainer, which then knows that folder from the beginning. A
    trainer of ``pytorch_lightning`` takes it as one of ``lightning.pytorch`` does.

    Args:
        average_every: the cadence of reports, in steps of the optimizer.
        monitor: the logged metric by which ranks are judged, ``"val_loss"`` for example. By default the mean of the
            training losses since the last report.
        mode: ``"min"`` if smaller is better, which is the default, ``"max"`` if larger is.
        optimizer_index: which optimizer, where the module has several.
        replica_size: of so many ranks, one after the other, each trainer is one replica under DDP, with as many devices
            and ``strategy="ddp"``; they write to folders ``replica0``, ``replica1``, ... By default 1. It is shown to
            Lightning when this is made, so make it before the trainer.
        swap_every: see :class:`protocols.ReplicaAveragingPolicy`.
        options: others of :class:`protocols.AsyncSelectiveAveragingPolicy`.

    Attributes:
        last_info: what the last step of the policy did.

    Raises:
        TypeError, ValueError: an option is not what it should be; the trainer has other than ``replica_size`` devices,
            or the module several optimizers of which none was chosen.
    """

    @validation.names_options()
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
        self.monitor = monitor
        self.last_info: StepInfo | None = None
        self._optimizer_index = optimizer_index
        self._loss = RunningLoss()
        self._trainer: pl.Trainer
        self._log: Any = None
        self._steps: Any = None
        self._step_count = 0
        self._first_step_count = 0
        self._has_losses = self._has_warned = False
        self._spent: Any = None
        self._spent_value: float | None = None
        self._training = selective_averaging(
            average_every, mode, options, replica_size=replica_size, swap_every=swap_every, monitor=monitor
        )
        self._world = join()
        self._replica_size = replica_size
        self._folder = f"rank{self._world.rank}"
        rank_zero_only.rank = 0  # type: ignore[attr-defined]  # each rank writes for itself; one, of a replica
        self._number = self._world.rank
        if replica_size > 1:
            self._number = show_replica(self._world, self._replica_size).number
            self._folder = f"replica{self._number}"
        _hide_ranks_of_mpi()
        _write_below_from_the_beginning()
        if self._world.rank:
            for name in _LIBRARIES:
                logging.getLogger(name).setLevel(logging.WARNING)
            warnings.simplefilter("ignore", PossibleUserWarning)  # which rank 0 tells

    @property
    def policy(self) -> Policy[Selective] | None:
        """The policy, while the trainer fits; None otherwise."""
        return self._training.policy

    @property
    def log(self) -> Any:
        """The module's ``log``, which Lightning gives to its callbacks when it begins to fit."""
        return self._log

    @log.setter
    def log(self, log: Any) -> None:
        self._log = log
        self._prepare(log.__self__.trainer)  # now: loggers open their files before ``setup`` is called

    def _prepare(self, trainer: pl.Trainer) -> None:
        if trainer.world_size != self._replica_size and not (self._world.size == 1 < self._replica_size):
            if environment.is_started_by_trainer():  # as one more device of a trainer, which tells the same
                raise SystemExit(0)
            raise ValueError(self._refusal(trainer.world_size))
        self._give_folder(trainer)
        if self._world.size > 1:
            self._shuffle_loaders_apart(trainer)
        if self._world.rank:
            for callback in trainer.callbacks:  # type: ignore[attr-defined]
                if hasattr(callback, "_max_depth"):  # a ModelSummary
                    callback._max_depth = 0
            if trainer.progress_bar_callback is not None:
                trainer.progress_bar_callback.disable()

    def _shuffle_loaders_apart(self, trainer: pl.Trainer) -> None:
        """Give the training loaders of this trainer an order of this replica, before workers read the first rows."""
        strategy: Any = trainer.strategy
        if "process_dataloader" in vars(strategy):  # of an earlier fit
            return
        process = strategy.process_dataloader

        def process_for_rank(loader: Any) -> Any:
            loader = process(loader)
            if trainer.training:
                seed = draw() if self._replica_size == 1 else int(environment.VARIABLES.get("PL_GLOBAL_SEED", 0))
                shuffle_apart(loader, self._number, size=self._replica_size, seed=seed)
            return loader

        strategy.process_dataloader = process_for_rank

    def _give_folder(self, trainer: pl.Trainer) -> None:
        if self._world.size > 1:
            _write_below(trainer, self._folder)

    def _refusal(self, count: int) -> str:
        if self._replica_size > 1:
            return (
                f"this Trainer has {count} devices, and replica_size={self._replica_size}: pass "
                f"devices={self._replica_size}, strategy='ddp'"
            )
        return (
            f"this Trainer has {count} devices, which make one replica: pass devices=1, and start more ranks; or "
            f"strategy='ddp' to it, and replica_size={count} to SelectiveAveraging"
        )

    __copy__ = __deepcopy__ = refuse_copy

    def __getstate__(self) -> NoReturn:
        raise ValueError(
            "SelectiveAveraging cannot be sent to another process, as this Trainer's strategy would: pass devices=1, "
            "and start more ranks; or strategy='ddp' to it, and replica_size= to SelectiveAveraging"
        )

    def on_fit_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Start the policy, together with all ranks."""
        self._trainer = trainer
        self._has_losses = self._has_warned = False
        self._loss.reset()
        self._training.begin(pl_module, self._choose(trainer.optimizers))
        if self.monitor is None:
            self._training.judge_by_training_loss()
        self._warn_of_averages(trainer)

    def _warn_of_averages(self, trainer: pl.Trainer) -> None:
        """Say that callbacks keep an average of weights over time, which the policy does not know."""
        for callback in trainer.callbacks:  # type: ignore[attr-defined]
            if _AVERAGES.intersection(kind.__name__ for kind in type(callback).__mro__):
                logger.warning(
                    "selective averaging: the average that %s keeps is this rank's own. It still holds the weights "
                    "from before a replacement, and puts them into the model in the end",
                    type(callback).__name__,
                )

    def _choose(self, optimizers: list[torch.optim.Optimizer]) -> torch.optim.Optimizer:
        index = self._optimizer_index
        if index is None and len(optimizers) != 1:
            raise ValueError(
                f"configure_optimizers gives {len(optimizers)} optimizers; pass optimizer_index=0 or another to "
                "SelectiveAveraging: that optimizer's state is what replacements are told of"
            )
        return optimizers[index or 0]

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Note how many steps were done before, which is known once a checkpoint has been loaded."""
        self._steps = _steps_of(trainer)
        self._step_count = self._first_step_count = self._steps.completed

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Do a step of the policy, where the optimizer has done one."""
        loss = outputs.get("loss") if isinstance(outputs, dict) else outputs
        if self.monitor is None and loss is not None:
            self._has_losses = True
            if trainer.accumulate_grad_batches > 1 and pl_module.automatic_optimization:
                loss = loss * trainer.accumulate_grad_batches  # by which Lightning has divided it
            self._loss.add(loss)
        step_count = self._steps.completed
        if step_count == self._step_count:  # gradients are being accumulated
            return
        self._step_count = step_count
        self._training.use(self._choose(trainer.optimizers))
        self.last_info = self._training.step(self._metric)
        if self.last_info:
            self._loss.reset()
            if self.monitor is not None:  # it was that of weights that are gone
                self._spend(trainer.callback_metrics.get(self.monitor))
            self.log("replacements", float(self._training.replacement_count), prog_bar=True)

    def _metric(self) -> Any:
        if self.monitor is None:
            return self._loss()
        newest = self._trainer.callback_metrics.get(self.monitor)
        if self._is_spent(newest):
            return NOT_MEASURED
        self._spend(newest)
        return newest

    def _is_spent(self, metric: Any) -> bool:
        """Tell whether a logged metric was judged before: then Lightning keeps the same tensor."""
        return metric is None or (metric is self._spent and float(metric) == self._spent_value)

    def _spend(self, metric: Any) -> None:
        self._spent, self._spent_value = metric, None if metric is None else float(metric)

    def on_train_epoch_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Warn, after the first epoch, of a metric that there is not."""
        self._warn_of_no_metric(trainer)

    def _warn_of_no_metric(self, trainer: pl.Trainer) -> None:
        """Say once, if steps were done without it, that nothing is there by which this rank could be judged."""
        if self._has_warned or self._step_count == self._first_step_count:
            return
        if self.monitor is None:
            missing = "" if self._has_losses else "training_step has returned no loss; return it, or pass monitor="
        elif self.monitor in trainer.callback_metrics:
            missing = ""
        else:
            logged = ", ".join(sorted(trainer.callback_metrics)) or "nothing"
            missing = f"{self.monitor!r}, which is monitored, has not been logged; logged is {logged}"
        if missing:
            self._has_warned = True
            logger.warning("selective averaging: this rank has no metric to be judged by so far: %s", missing)

    def on_fit_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Leave the policy; the others go on."""
        self._warn_of_no_metric(trainer)
        self._training.end()

    def on_exception(self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException) -> None:
        """Leave the policy; the exception is the trainer's."""
        self._training.end(exception)


class _GlobalStep:
    """Counts the steps of the optimizer as the trainer does."""

    def __init__(self, trainer: pl.Trainer) -> None:
        self._trainer = trainer

    @property
    def completed(self) -> int:
        return self._trainer.global_step


def _steps_of(trainer: pl.Trainer) -> Any:
    """Return what counts the steps of the optimizer, as ``completed``.

    ``trainer.global_step`` finds it anew each time, through seven properties.
    """
    try:
        loop: Any = trainer.fit_loop.epoch_loop
        if trainer.lightning_module.automatic_optimization:
            found = loop.automatic_optimization.optim_progress.optimizer.step.total
        else:
            found = loop.manual_optimization.optim_step_progress.total
        if found.completed == trainer.global_step:
            return found
    except AttributeError:  # another version of Lightning has it elsewhere
        pass
    return _GlobalStep(trainer)


def _hide_ranks_of_mpi() -> None:
    """Keep Lightning from asking MPI for ranks: it is to see none, or those of a replica.

    A rank of torch.distributed would start MPI to answer. The shared memory of that stays where the rank is killed.
    """
    for name in _LIBRARIES.values():
        if environments := sys.modules.get(f"{name}.plugins.environments.mpi"):
            environments.MPIEnvironment.detect = staticmethod(lambda: False)


def _write_below_from_the_beginning() -> None:
    """Let trainers that are made from now on with a :class:`SelectiveAveraging` write to the folder of their rank.

    ``fit(ckpt_path="last")`` looks for a checkpoint there before any callback hears of it.
    """
    for name in _LIBRARIES:
        kind = getattr(sys.modules.get(name), "Trainer", None)
        if kind is None or hasattr(kind.__init__, "gives_folders"):
            continue
        kind.__init__ = _giving_folders(kind.__init__)


def _giving_folders(make: Any) -> Any:
    @functools.wraps(make)
    def make_for_rank(self: Any, *args: Any, **options: Any) -> None:
        make(self, *args, **options)
        for callback in self.callbacks:
            if isinstance(callback, SelectiveAveraging):
                callback._give_folder(self)

    make_for_rank.gives_folders = True  # type: ignore[attr-defined]
    return make_for_rank


def _write_below(trainer: pl.Trainer, folder: str) -> None:
    """Let a trainer's files be written to a folder below those that it was given."""

    def below(path: Any) -> str:
        parent = os.fspath(path)  # or an address, which a Path would change
        return parent if folder in parent.split("/") else os.path.join(parent, folder)

    trainer._default_root_dir = below(trainer.default_root_dir)  # type: ignore[attr-defined]
    for logger in trainer.loggers:
        for name in ("_root_dir", "_save_dir"):
            if isinstance(given := getattr(logger, name, None), str | os.PathLike):
                setattr(logger, name, below(given))
        options = getattr(logger, "_wandb_init", {})  # wandb is given its folder apart from the logger's own
        if options.get("dir") is not None:
            options["dir"] = below(options["dir"])
            os.makedirs(options["dir"], exist_ok=True)  # or wandb would write to the folder for temporary files
    writers: list[Any] = [trainer.profiler, *trainer.checkpoint_callbacks]  # type: ignore[attr-defined]
    for writer in writers:
        if getattr(writer, "dirpath", None) is not None:
            writer.dirpath = below(writer.dirpath)
