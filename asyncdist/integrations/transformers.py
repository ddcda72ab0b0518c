"""Averaging as a callback of transformers' ``Trainer``: selective averaging, or any other policy.

::

    from asyncdist.integrations.transformers import SelectiveAveraging    # before TrainingArguments are made

    trainer = Trainer(model, arguments, train_dataset=dataset, callbacks=[SelectiveAveraging(average_every=100)])
    trainer.train()                                   # asyncdist run -n 4 train.py

With another policy::

    trainer = Trainer(model, arguments, train_dataset=dataset, callbacks=[Averaging(DiLoCoPolicy, average_every=100)])

Each rank has its own trainer. The trainer sees a single process, because importing this module hides the launcher's
environment variables.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import os
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, Final, Generic, NoReturn, Self, Unpack
from urllib.parse import quote

import torch

from asyncdist import validation
from asyncdist.blocking.callers import find_caller
from asyncdist.blocking.policies import Policy
from asyncdist.blocking.world import World
from asyncdist.errors import ClosedError
from asyncdist.integrations import joining
from asyncdist.integrations.joining import PolicyT, Selective, Training
from asyncdist.integrations.metrics import RunningLoss
from asyncdist.integrations.patching import replaces
from asyncdist.integrations.random_numbers import seed_by_number, shuffle_by_number
from asyncdist.integrations.replicas import Replica, replica_of, show_replica
from asyncdist.protocols import StepInfo
from asyncdist.protocols.metrics import NOT_MEASURED
from asyncdist.protocols.options import MetricMode, SelectiveOptions
from asyncdist.tensors.optimizers.wrapped import unwrapped
from asyncdist.trust import torch_files

with validation.optional_imports(__name__, ["transformers", "accelerate"], "transformers"):
    import transformers
    from accelerate import PartialState  # type: ignore[import-untyped]
    from accelerate.utils import find_batch_size  # type: ignore[import-untyped]
    from transformers import Trainer, TrainerCallback, TrainerControl, TrainerState, TrainingArguments

joining.hide_ranks()

logger = logging.getLogger("asyncdist.integrations")

#: Prefix of the names of the files with policy states in a checkpoint.
_STATE_FILE: Final = "asyncdist_policy"


class Averaging(TrainerCallback, Generic[PolicyT]):
    """Runs a policy during training.

    Weights change after an optimizer step. If there are several ranks, each writes to a subfolder ``rank0``, ``rank1``,
    ... of ``output_dir``. Only rank 0 shows a progress bar and pushes to the Hugging Face Hub. A model made by
    ``model_init`` is equal on all ranks, because ``arguments.seed`` is. During training, each rank uses different
    random numbers for shuffling and dropout.

    Log entries contain the number of averages that the rank has adopted, under the name ``averages``. Checkpoints
    contain the policy's state, from which training resumes.

    Args:
        policy: Class of the policy, for example :class:`protocols.DiLoCoPolicy`.
        monitor: Name of the evaluation metric by which ranks are judged, if the policy judges them. By default, ranks
            are judged by the mean training loss since their last report, as the trainer logs it.
        options: Options of the policy. With ``weights="tokens"`` or ``"rate"``, tokens with a label are counted if the
            trainer counts them for its loss, and examples otherwise. ``replica_size`` works as for
            :class:`SelectiveAveraging`.

    Attributes:
        last_info: Events of the policy's last step.

    Raises:
        TypeError, ValueError: An option has a wrong type or value, or the trainer has several GPUs in one process.
    """

    _count_name = "averages"

    def __init__(self, policy: type[PolicyT], *, monitor: str | None = None, **options: Any) -> None:
        self._set_up(joining.averaging(policy, options, monitor=monitor), monitor)

    def _set_up(self, training: Training[PolicyT], monitor: str | None) -> None:
        replica_size = training.options.get("replica_size", 1)
        self._counts_tokens = training.options.get("weights", "equal") != "equal"
        self.monitor = monitor
        self.last_info: StepInfo | None = None
        self._training = training
        self._loss = RunningLoss()
        self._token_count = 0.0
        self._newest: Any = NOT_MEASURED
        self._has_losses = self._has_warned = False
        self._evaluated: set[str] = set()
        self._world = joining.join()
        self._replica = (
            Replica(self._world.rank) if replica_size == 1 else _show_replica_once(self._world, replica_size)
        )
        self._seed: int | None = None

    @property
    def policy(self) -> Policy[PolicyT] | None:
        """The open policy, or None while the trainer is not training."""
        return self._training.policy

    @property
    def awaited(self) -> PolicyT | Self | None:
        """The open policy without its blocking methods. If no policy is open, this callback or None.

        It is None if this rank trains without averages because it ran out of memory. :func:`asyncdist.save_population`
        and :func:`asyncdist.load_population` read it.
        """
        if self.policy is not None:
            return self.policy.awaited
        return None if self._training.trains_alone else self

    def state_dict(self) -> NoReturn:
        """Raise ClosedError, because there is no policy to save while the trainer is not training."""
        raise ClosedError("the trainer does not train, so no policy is open; save without policy=")

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Keep a policy's state, saved by :func:`asyncdist.save_population`, for the start of the next training run."""
        self._training.load_state_dict(state_dict)

    __copy__ = __deepcopy__ = __reduce_ex__ = joining.refuse_copy

    def on_init_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        """Set the folder to which this rank writes."""
        self._prepare(args)

    def _prepare(self, args: TrainingArguments) -> None:
        if args.n_gpu > 1:
            raise ValueError(
                f"each rank must see one GPU, but this Trainer has {args.n_gpu}: set CUDA_VISIBLE_DEVICES to one GPU "
                "on each rank, and start more ranks"
            )
        if self._seed is None:
            self._seed = args.seed
        if self._world.size == 1:
            return
        owner = getattr(args, "asyncdist_rank", self._world.rank)
        if owner != self._world.rank:
            raise ValueError(
                f"rank {self._world.rank} must have its own TrainingArguments, got those of rank {owner}, which writes "
                f"to {str(args.output_dir)!r}: make TrainingArguments inside the function that trains"
            )
        args.asyncdist_rank = owner  # type: ignore[attr-defined]
        output = str(args.output_dir)
        # An earlier trainer may have changed these arguments or their original.
        if self._replica.folder in Path(output).parts:
            return
        if args.hub_model_id is None:
            args.hub_model_id = Path(output).absolute().name  # otherwise, the repository would be named rank0
        if (logs := getattr(args, "logging_dir", None)) is not None:  # exists up to transformers 4
            args.logging_dir = _logs_of_rank(logs, output, self._replica.folder)  # type: ignore[attr-defined]
        args.output_dir = os.path.join(output, self._replica.folder)

    @contextlib.contextmanager
    def _attached(self, trainer: Trainer) -> Iterator[None]:
        """Wrap methods of the trainer during a call of its ``train``. If the call raises an error, leave the policy."""
        self._prepare(trainer.args)  # on_init_end was not called if the callback was added later
        methods: dict[str, Callable[..., Any]] = {
            "training_step": self._see_batch,
            "log": self._log_with_count,
            "save_model": self._settle_and_save,
            "_save_optimizer_and_scheduler": self._save_state_too,
            "_load_optimizer_and_scheduler": functools.partial(self._load_state_too, trainer),
            "_load_best_model": self._leave_and_load,
        }
        if self._world.size > 1:
            self._use_rank_folder_for_reporters(trainer)
            methods["_load_rng_state"] = self._load_and_vary_numbers
            if getattr(trainer, "hp_search_backend", None) is not None:
                methods["call_model_init"] = self._seed_model_init
        with _replaced(trainer, methods):
            try:
                yield
            except BaseException as error:
                self._training.end(error)
                self._training.forget_state()
                raise

    def _may_push(self) -> bool:
        """Return whether this rank may push to the Hugging Face Hub. Rank 0 warns that only it pushes."""
        if self._world.rank == 0 and self._world.size > self._replica.size:
            joining.log_once_that_rank_0_pushes()
        return self._replica.number == 0

    def _use_rank_folder_for_reporters(self, trainer: Trainer) -> None:
        """Use a separate folder for this rank below TENSORBOARD_LOGGING_DIR."""
        for callback in trainer.callback_handler.callbacks:
            given = getattr(callback, "logging_dir", None)
            if isinstance(given, str):
                callback.logging_dir = joining.below(given, self._replica.folder)

    def _load_and_vary_numbers(self, load: Callable[[str | None], None], checkpoint: str | None) -> None:
        """Let ranks use different random numbers, even after they have loaded the same checkpoint."""
        load(checkpoint)
        if checkpoint is not None and self._replica.folder not in Path(checkpoint).parts:
            seed_by_number(self._world.rank)

    def _seed_model_init(self, call_model_init: Callable[..., Any], *args: Any, **options: Any) -> Any:
        """Use the same seed in each trial and on all ranks, as transformers 5 does."""
        assert self._seed is not None, "_prepare has run"
        transformers.set_seed(self._seed)
        return call_model_init(*args, **options)

    def _settle_and_save(self, save_model: Callable[..., None], *args: Any, **options: Any) -> None:
        """Save after the averaging rounds in progress have ended, because their means change the weights."""
        self._training.settle()
        save_model(*args, **options)

    def _save_state_too(self, save: Callable[[str], None], output_dir: str) -> None:
        """Write the policy's state next to the optimizer's state."""
        save(output_dir)
        if state := self._training.state_dict():
            os.makedirs(output_dir, exist_ok=True)  # The replica's first rank may not have created the folder yet.
            torch.save(state, os.path.join(output_dir, self._state_file))

    @property
    def _state_file(self) -> str:
        """Name of this rank's file with policy state in a checkpoint. The ranks of a replica share the folder."""
        return "_".join((_STATE_FILE, self._key, *([str(self._replica.place)] if self._replica.place else []))) + ".pt"

    @property
    def _key(self) -> str:
        """The policy's class and name, which differ between the policies of a trainer."""
        name = self._training.name
        return self._training.kind.__name__ + (f"_{quote(name, safe='')}" if name else "")

    def _load_state_too(self, trainer: Trainer, load: Callable[[str | None], None], checkpoint: str | None) -> None:
        """Start the policy from its state in the checkpoint, if the checkpoint has one."""
        load(checkpoint)
        if checkpoint is not None:
            self._load_state(trainer, Path(checkpoint))

    def _load_state(self, trainer: Trainer, checkpoint: Path) -> None:
        """Load the policy's state, if necessary from the single file that earlier versions wrote for all policies."""
        old = checkpoint / (f"{_STATE_FILE}_{self._replica.place}.pt" if self._replica.place else f"{_STATE_FILE}.pt")
        if (own := checkpoint / self._state_file).exists():
            self._training.load_state_dict(torch_files.load(own))
        elif old.exists():
            state, kind = torch_files.load(old), self._training.kind
            kinds = [each._training.kind for each in _averagings_of(trainer)]
            if len(kinds) == 1 or (state.get("policy") == kind.__name__ and kinds.count(kind) == 1):
                self._training.load_state_dict(state)

    def _leave_and_load(self, load_best_model: Callable[..., None], *args: Any, **options: Any) -> None:
        """Leave the policy, which may change the weights, and then load the best model."""
        self._training.end()
        load_best_model(*args, **options)

    def _see_batch(self, training_step: Callable[..., Any], model: Any, inputs: Any, *args: Any, **options: Any) -> Any:
        """Count the batch's tokens, and add its loss."""
        if self._counts_tokens:
            self._count(inputs, args[0] if args else options.get("num_items_in_batch"))
        loss = training_step(model, inputs, *args, **options)
        if self._training.is_judged:
            self._see(loss)
        return loss

    def _see(self, loss: Any) -> None:
        """Add a batch's loss, which the trainer has divided by the number of batches per optimizer step."""
        self._has_losses = True
        self._loss.add(loss, count=0)

    def _count(self, inputs: Any, item_count: Any) -> None:
        """Add a batch's examples to this step's weight, or take ``item_count`` as the weight of the whole step."""
        if item_count is not None:
            self._token_count = float(item_count)
        else:
            self._token_count += find_batch_size(inputs) or 1

    def _log_with_count(self, log: Callable[..., None], logs: dict[str, float], *args: Any, **options: Any) -> None:
        """Add the number of adopted averages to each log entry before reporters receive it."""
        if not self._training.replacement_count:
            log(logs, *args, **options)
            return
        logged = {**logs, self._count_name: self._training.replacement_count}
        log(logged, *args, **options)
        logs.clear()  # Hyperparameter search adds up the metrics in logs, so the count is removed.
        logs.update((name, value) for name, value in logged.items() if name != self._count_name)

    def on_train_begin(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **of: Any) -> None:
        """Start the policy together with the other ranks."""
        model, optimizer = of["model"], of["optimizer"]
        self._has_losses = False
        self._loss.reset()
        self._newest = NOT_MEASURED  # The last evaluation may belong to another model.
        self._token_count = 0.0
        if self.monitor is not None and args.eval_strategy == "no":
            self._warn("eval_strategy is 'no', so only the program's own evaluations report %r", self.monitor)
        if args.disable_tqdm:
            joining.warn_of_unlabelled_lines(self._world, "with disable_tqdm=False only rank 0 prints")
        self._training.begin(model, unwrapped(optimizer))
        if self.monitor is None:
            self._training.judge_by_training_loss()
        if self._world.size > 1:
            seed = args.seed if args.data_seed is None else args.data_seed
            shuffle_by_number(
                of["train_dataloader"],
                self._replica.number,
                size=self._replica.size,
                seed=seed if self._replica.size > 1 else None,
            )
            joining.warn_of_common_rows(of["train_dataloader"], self._world)

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **of: Any) -> None:
        """Take a policy step after an optimizer step."""
        self._training.use(unwrapped(of["optimizer"]))
        self._loss.add(0.0)
        tokens = self._token_count if self._counts_tokens else None
        self._token_count = 0.0
        self.last_info = self._training.step(self._metric if self._training.is_judged else None, tokens)
        if self.last_info:
            self._loss.reset()
            self._newest = NOT_MEASURED  # the metric belongs to the replaced weights

    def _metric(self) -> Any:
        if self.monitor is None and self._has_losses:
            return self._loss()
        if self.monitor is None:
            self._warn("train() of this trainer does not call training_step(): pass monitor=")
            return NOT_MEASURED
        newest, self._newest = self._newest, NOT_MEASURED  # Each evaluation is reported once.
        return newest

    def on_evaluate(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        metrics: dict[str, float] | None = None,
        **_: Any,
    ) -> None:
        """Record the monitored metric."""
        if self.monitor is None:
            return
        found = metrics or {}
        # If every name in `found` occurred in an earlier evaluation, each evaluation dataset has been evaluated.
        if self.monitor not in found and self._evaluated.issuperset(found):
            self._warn_of_no_metric()
        self._evaluated.update(found)
        self._newest = found.get(self.monitor, self._newest)

    def _warn_of_no_metric(self) -> None:
        if self.monitor not in self._evaluated:
            given = ", ".join(sorted(self._evaluated)) or "nothing"
            self._warn("no evaluation has reported the monitored metric %r; reported: %s", self.monitor, given)

    def _warn(self, why: str, *arguments: object) -> None:
        """Warn once that this rank cannot be judged, for the reason ``why``."""
        if not self._has_warned:
            self._has_warned = True
            logger.warning(f"averaging: this rank has no metric so far, so it cannot be judged: {why}", *arguments)

    def on_train_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        """Leave the policy. The other ranks continue."""
        if self.monitor is not None:
            self._warn_of_no_metric()
        self._training.end()


class SelectiveAveraging(Averaging[Selective]):
    """Replaces the worst ranks' weights with the average of good ranks' weights during training.

    It behaves like :class:`Averaging`, but the name of the logged number of adopted averages is ``replacements``.

    Args:
        average_every: Number of optimizer steps between two reports of a rank's metric.
        monitor: Name of the evaluation metric by which ranks are judged, for example ``"eval_loss"``. By default, ranks
            are judged by the mean training loss since their last report, as the trainer logs it.
        mode: ``"min"`` (the default) if smaller is better, ``"max"`` if larger is, which requires ``monitor``.
        replica_size: Number of consecutive ranks that form one replica under DDP, by default 1. Above 1, replicas write
            to folders ``replica0``, ``replica1``, ... Create this object before the ``TrainingArguments``, because it
            sets the ranks that they read.
        swap_every: Option of :class:`protocols.ReplicaAveragingPolicy`, only for ``replica_size`` above 1.
        options: Other options of :class:`protocols.AsyncSelectiveAveragingPolicy`.

    Raises:
        TypeError, ValueError: An option has a wrong type or value, the trainer has several GPUs in one process, or
            ``TrainingArguments`` were made before this object with ``replica_size`` > 1.
    """

    _count_name = "replacements"

    @validation.names_options(refused=joining.REFUSED_OPTIONS)
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
        training = joining.selective_averaging(
            average_every,
            mode,
            options,
            replica_size=replica_size,
            swap_every=swap_every,
            monitor=monitor,
            is_of_trainer=True,
        )
        self._set_up(training, monitor)


def _show_replica_once(world: World, size: int) -> Replica:
    """Set the launcher's environment variables for this rank's replica, unless the trainer has already read them.

    Raise ValueError if the trainer has read the ranks of a different replica or of the whole job.
    """
    if not PartialState._shared_state:
        return show_replica(world, size)
    replica, read = replica_of(world, size), PartialState()
    if (read.process_index, read.num_processes) != (replica.place, replica.size):
        raise ValueError(
            "the callback with replica_size= must be made before TrainingArguments, which already counted other ranks"
        )
    return replica


def _logs_of_rank(logs: str, output: str, folder: str) -> str:
    """Return the folder for a rank's logs.

    It is in the rank's subfolder of ``output`` if ``logs`` is below ``output``.
    """
    inside = os.path.relpath(logs, output)
    return os.path.join(logs, folder) if inside.startswith(os.pardir) else os.path.join(output, folder, inside)


@contextlib.contextmanager
def _replaced(trainer: Trainer, methods: Mapping[str, Callable[..., Any]]) -> Iterator[None]:
    """Replace methods of one trainer during a ``with`` block. The new methods get the originals first."""
    before = {name: vars(trainer)[name] for name in methods if name in vars(trainer)}
    for name, method in methods.items():
        replaces(trainer, name)(method)
    try:
        yield
    finally:
        for name in methods:
            delattr(trainer, name)
        vars(trainer).update(before)


def _averagings_of(trainer: Trainer) -> list[Averaging[Any]]:
    return [each for each in trainer.callback_handler.callbacks if isinstance(each, Averaging)]


@replaces(Trainer, "train")
def _train_with_averages(train: Any, trainer: Trainer, *args: Any, **options: Any) -> Any:
    """Pass the trainer to its :class:`Averaging` callbacks. They cannot find it themselves."""
    with contextlib.ExitStack() as attached:
        for averaging in _averagings_of(trainer):
            attached.enter_context(averaging._attached(trainer))
        return train(trainer, *args, **options)


@replaces(Trainer, "add_callback")
def _show_progress_only_on_rank_0(add: Any, trainer: Trainer, callback: Any) -> None:
    """Add no progress bar on ranks other than 0. The constructor calls this method.

    The rank is determined for each trainer, because ranks may share a process, and the process may later run another
    job.
    """
    caller = find_caller()
    is_other_rank = caller is not None and caller.world.rank > 0
    if not (is_other_rank and callback is transformers.trainer.DEFAULT_PROGRESS_CALLBACK):
        add(trainer, callback)


def _push_if_allowed(push: Any, trainer: Trainer, *args: Any, **options: Any) -> Any:
    """Do nothing on ranks that may not push to the hub.

    The class is patched, because the trainer's constructor creates the repository before it calls any callback.
    """
    may_push = all(averaging._may_push() for averaging in _averagings_of(trainer))
    return push(trainer, *args, **options) if may_push else None


joining.hide_ranks_from(PartialState)
for _name in ("init_hf_repo", "_push_from_checkpoint", "push_to_hub"):
    replaces(Trainer, _name)(_push_if_allowed)
