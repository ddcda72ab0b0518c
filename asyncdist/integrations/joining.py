"""Runs a policy in programs that do not know about ranks. Joins the job, and starts and ends the policy."""

from __future__ import annotations

import inspect
import logging
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import MappingProxyType
from typing import Any, Final, Generic, Literal, NoReturn, TypeAlias, TypeVar

import torch
from torch import nn
from torch.utils.data import IterableDataset

from asyncdist import environment, rank_program, validation
from asyncdist.blocking.callers import Caller, current_caller, find_caller, is_in_a_rank
from asyncdist.blocking.policies import Policy
from asyncdist.blocking.process_world import process_world
from asyncdist.blocking.world import World
from asyncdist.errors import BusyError, ClosedError, DisagreementError, LocalProtocolError, StartTimeoutError
from asyncdist.functional.seeding import RestoredNumbers
from asyncdist.integrations.metrics import warning_of_judge
from asyncdist.integrations.patching import replaces
from asyncdist.integrations.random_numbers import reads_in_order, seed_by_number
from asyncdist.launchers import child_environment, detection
from asyncdist.protocols import (
    AsyncSelectiveAveragingPolicy,
    EvolutionStrategyPolicy,
    ReplicaAveragingPolicy,
    SpawnPolicy,
    StepInfo,
)
from asyncdist.protocols.options import MetricMode, SelectiveOptions
from asyncdist.protocols.starting.differences import BEGINS_AGAIN
from asyncdist.protocols.step_info import NOTHING, fields_of

logger = logging.getLogger("asyncdist.integrations")

Selective: TypeAlias = AsyncSelectiveAveragingPolicy | ReplicaAveragingPolicy
PolicyT = TypeVar("PolicyT", bound=SpawnPolicy)

#: Reason why ``SelectiveAveraging`` lacks an option of its policy, for :func:`asyncdist.validation.names_options`.
REFUSED_OPTIONS: Final = {
    "metric": "to judge ranks by a function, use Averaging with AsyncSelectiveAveragingPolicy and metric=function"
}

_logged: set[str] = set()


_visible_gpus: list[str] = []
"""GPUs that were visible before this rank's GPUs were chosen, or an empty list if no GPUs have been chosen."""


def hide_ranks() -> None:
    """Hide the launcher's environment variables and other ranks' GPUs, so that later imports train in one process."""
    number = detection.local_rank()
    if number is not None and not _visible_gpus and (count := torch.cuda.device_count()) > 1:
        listed = environment.VARIABLES.get("CUDA_VISIBLE_DEVICES")  # lists all ranks' GPUs, for example under Slurm
        _visible_gpus[:] = map(str, range(count)) if listed is None else listed.split(",")[:count]
        choose_gpus([number])
    child_environment.hide_ranks()


def hide_ranks_from(state: Any) -> None:
    """Patch accelerate's ``PartialState`` to hide environment variables set after the integration was imported.

    ``notebook_launcher`` forks its ranks from a process that may have imported the integration. It sets the ranks'
    environment variables afterwards.
    """
    if hasattr(state.__init__, "__wrapped__"):  # another integration has patched it
        return

    @replaces(state, "__init__")
    def make_hidden(make: Any, *args: Any, **options: Any) -> None:
        if not state._shared_state:
            hide_ranks()
        make(*args, **options)


def choose_gpus(numbers: Sequence[int]) -> None:
    """Hide all but those of the visible GPUs that have these indices, unless at most one was visible."""
    if _visible_gpus:
        seen = ",".join(_visible_gpus[number % len(_visible_gpus)] for number in numbers)
        environment.set_variables({"CUDA_VISIBLE_DEVICES": seen})


def join() -> World:
    """Return this process's world. If the process trains alone, log a warning once."""
    if detection.is_started_by_trainer():  # a trainer started this process for one of its devices
        with environment.variable_set(environment.TRANSPORT_VARIABLE, "local"):
            return process_world()
    if is_in_a_rank():
        raise LocalProtocolError(
            "an integration cannot be used in a coroutine, because it blocks: enter a policy of asyncdist.protocols "
            "with async with, and await its step"
        )
    world = process_world()
    if world.size == 1 and "alone" not in _logged:
        _logged.add("alone")
        world.awaited.warns_if_alone = False  # a policy would repeat the warning
        started = (
            "without --multi_gpu, accelerate launch ignores --num_processes and starts only one process; "
            if detection.is_started_by_accelerate()
            else ""
        )
        logger.warning(
            "averaging: this process trains alone, so nothing is averaged; %sto start four ranks, use "
            "asyncdist run -n 4 script.py",
            started,
        )
    return world


def below(path: Any, folder: str) -> str:
    """Return the path of the subfolder ``folder`` of ``path``, or ``path`` itself if it already contains that name."""
    parent: str = os.fspath(path)  # pathlib.Path would alter a URL
    return parent if folder in parent.split("/") else os.path.join(parent, folder)


def selective_averaging(
    average_every: int,
    mode: MetricMode | None,
    options: SelectiveOptions,
    *,
    replica_size: int = 1,
    swap_every: int | None = None,
    monitor: str | None = None,
    is_of_trainer: bool = False,
) -> Training[Selective]:
    """Return a :class:`Training` that runs selective averaging, or replica averaging if ``replica_size`` is above 1.

    ``mode`` is the policy's ``metric_mode``, which may be in ``options`` instead. If ``is_of_trainer`` is True and
    ``monitor`` is None, ranks are judged by their training loss. TypeError or ValueError is raised for a wrong
    argument. Other ``options`` are checked when training begins.
    """
    validation.count("average_every", average_every)
    metric_mode = options.get("metric_mode", mode)
    if mode not in (None, metric_mode):
        raise ValueError(
            f"only one of mode and metric_mode may be passed, because both mean the same, got mode={mode!r} and "
            f"metric_mode={metric_mode!r}"
        )
    if metric_mode not in (None, "min", "max"):
        validation.refuse(
            "mode", metric_mode, "'min' (smaller metrics are better) or 'max' (larger metrics are better)"
        )
    option = "metric_mode" if "metric_mode" in options else "mode"
    warning = warning_of_judge(monitor, option, metric_mode or "min") if is_of_trainer else ""
    given: dict[str, Any] = {**options, "average_every": average_every, "metric_mode": metric_mode or "min"}
    if validation.count("replica_size", replica_size) == 1:
        if swap_every is not None:
            validation.refuse("swap_every", swap_every, "None if replica_size is 1")
        return Training(AsyncSelectiveAveragingPolicy, given, warning)
    given |= {"replica_size": replica_size, "swap_every": swap_every}
    return Training(ReplicaAveragingPolicy, given, warning)


def averaging(kind: type[PolicyT], options: Mapping[str, Any], *, monitor: str | None = None) -> Training[PolicyT]:
    """Return a :class:`Training` that runs a policy of the class ``kind`` with these options.

    Unless the options have a ``metric_mode``, smaller metrics are better. If the policy judges ranks and the options
    have no ``metric``, ranks are judged by ``monitor``, or by their training loss if it is None. TypeError or
    ValueError is raised if ``kind`` is not a policy class, or lacks one of the options. Their values are checked when
    training begins.
    """
    given_kind: object = kind
    if not (isinstance(given_kind, type) and issubclass(given_kind, SpawnPolicy)):
        validation.refuse("policy", kind, "the class of a policy, such as protocols.DiLoCoPolicy", TypeError)
    if kind.keeps_replicas:
        allowed = "another policy, since SelectiveAveraging(replica_size=...) uses this one"
        validation.refuse("policy", kind, allowed)
    if issubclass(kind, EvolutionStrategyPolicy):
        allowed = (
            "a policy for models that the trainer trains, because this policy's steps train the model instead: call "
            "them in a loop of your own, with asyncdist.integrations.pytorch.Averaging"
        )
        validation.refuse("policy", kind, allowed)
    if monitor is not None and not kind.takes_metric:
        validation.refuse("monitor", monitor, f"None, because {kind.__name__} uses no metric")
    if kind.takes_metric and "mode" in options:
        raise TypeError(f"{kind.__name__} has no option 'mode'; pass metric_mode={options['mode']!r}")
    validation.check_option_names(kind, options)
    validation.count("replica_size", options.get("replica_size", 1))
    given = {"metric_mode": "min", **options} if kind.takes_metric else dict(options)
    if given.get("metric") is not None and monitor is not None:
        validation.refuse("monitor", monitor, "None, because the function metric= judges the ranks")
    is_judged = kind.takes_metric and not kind.calls_metric and given.get("metric") is None
    warning = warning_of_judge(monitor, "metric_mode", given["metric_mode"]) if is_judged else ""
    return Training(kind, given, warning)


def warn_of_unlabelled_lines(world: World, cure: str) -> None:
    """Warn once, on rank 0, that printed lines do not show their rank. The warning ends with the remedy ``cure``."""
    is_labelled = environment.VARIABLES.get(rank_program.PREFIX_VARIABLE) == "1"
    if world.size > 1 and world.rank == 0 and not is_labelled and "lines" not in _logged:
        _logged.add("lines")
        is_launched = not world.awaited.services.engine.transport.capabilities.shares_process
        label = "asyncdist run --prefix begins each line with the number of its rank; " if is_launched else ""
        logger.warning("all %d ranks print the logs of their trainers: %s%s", world.size, label, cure)


def warn_of_common_rows(loader: Any, world: World) -> None:
    """Warn once, on rank 0, if all ranks may train on the same rows.

    This is the case if the loader's data set is iterable, or if its rows are read in order.
    """
    if world.rank or world.size == 1 or "rows" in _logged:
        return
    data = getattr(loader, "dataset", None)
    is_divided = getattr(data, "_distributed", None) is not None  # set by split_dataset_by_node of datasets
    if isinstance(data, IterableDataset) and not is_divided:
        _logged.add("rows")
        logger.warning(
            "averaging: the training data are an iterable data set (%s), whose order of rows the integration does not "
            "change: unless it depends on the rank, all ranks train on the same rows. With Hugging Face's datasets, "
            "call split_dataset_by_node(data, rank=world.rank, world_size=world.size), with world = "
            "asyncdist.blocking.process_world()",
            type(data).__name__,
        )
    elif not isinstance(data, IterableDataset) and reads_in_order(loader, world.size):
        _logged.add("rows")
        logger.warning(
            "averaging: the training data are read in the order of the data set (%s): unless the data set depends on "
            "the rank, all ranks train on the same rows in the same order. Pass shuffle=True to the DataLoader, or "
            "shuffle the data set with a seed that depends on asyncdist.blocking.process_world().rank",
            type(data).__name__,
        )


def log_once_that_rank_0_pushes() -> None:
    """Warn once that only rank 0 pushes its model to the Hugging Face Hub."""
    if "pushes" not in _logged:
        _logged.add("pushes")
        logger.warning(
            "averaging: only rank 0 pushes to the hub, because all ranks would push to the same repository; "
            "to push a different rank's model, call model.push_to_hub(...) on that rank"
        )


def refuse_copy(owner: object, *_: object) -> NoReturn:
    """Raise TypeError, because an object that owns a policy cannot be copied or pickled."""
    raise TypeError(
        f"{type(owner).__name__} cannot be copied, because it holds the policy of this rank's training; make another "
        "one with the same options"
    )


class Training(Generic[PolicyT]):
    """Owns a policy for the duration of one training run.

    Args:
        kind: Class of the policy, or another callable that takes a model and its optimizer and returns the policy.
        options: Options of the policy.
        warning: Warning that rank 0 logs when training begins, or "" for no warning.

    Attributes:
        kind: The argument ``kind``.
        options: The argument ``options``.
        name: The policy's option ``name``, or "" if it has none.
        policy: The open policy, or None before and after training.
        is_judged: Whether the policy's steps need this rank's metric. Policies that use no metric, or have the option
            ``metric``, do not.
        replacement_count: Number of averages that this rank has adopted, including those before a resume.
        is_interrupted: Whether memory ran out while the policy was open, so that training may start again.
        trains_alone: Whether this rank ran out of memory and now trains alone, because the other ranks did not start a
            new policy with it.
    """

    def __init__(
        self, kind: Callable[..., PolicyT], options: Mapping[str, Any] = MappingProxyType({}), warning: str = ""
    ) -> None:
        self.kind = kind
        self.name = str(options.get("name", ""))
        self.options = options
        self._warning = warning
        self.is_judged = True
        self._saved: Mapping[str, Any] | None = None
        self.policy: Policy[PolicyT] | None = None
        self.replacement_count = 0
        self.is_interrupted = self.trains_alone = False
        self._caller: Caller

    __copy__ = __deepcopy__ = refuse_copy

    def begin(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        """Start the policy together with the other ranks, and make this rank's random numbers differ from theirs.

        If this rank has just restored its random states from a checkpoint of a policy that had completed steps, it
        keeps these states, because they already differ between ranks.

        A trainer that ran out of memory may start again with smaller batches while the other ranks continue training.
        This rank therefore continues with an open policy that has equal options and the same model or, after memory ran
        out, the same layout. Otherwise, the open policies of this object and of interrupted training runs are ended,
        and a new policy is started. If memory ran out and the other ranks do not join, this rank trains without a
        policy. Unless memory ran out, a policy with a loaded state replaces an open policy on the model.
        """
        world = join()
        are_restored = world.awaited.services.shared(RestoredNumbers).are_unchanged
        if self._warning and world.rank == 0:
            logger.warning("%s", self._warning)
        self._warning = ""
        # A user may start training again in the except clause that handles the out-of-memory error.
        if (error := sys.exception()) is not None and is_out_of_memory(error):
            note_out_of_memory()
        made = self.kind(model, optimizer, **self.options)
        self.is_judged = made.takes_metric and made._metric is None
        if self.is_judged and made.calls_metric:
            raise TypeError(
                f"{type(made).__name__} must get metric=evaluate, a callable that evaluates the model on held-out "
                "data, got None: the policy calls it with trial weights in the model"
            )
        saved, self._saved = self._saved, None
        continues_numbers = are_restored and bool((saved or {}).get("iteration") or made.iteration)
        if not self._continue(made):
            if saved is not None:
                made.load_state_dict(saved)
            count = validation.count("replacement_count", (saved or {}).get("replacement_count", 0), least=0)
            interrupted = [owner for owner in _open_trainings() if owner.is_interrupted]
            trained_alone = any(owner.trains_alone for owner in interrupted)
            replaced = [owner for owner in _open_trainings() if made.has_loaded and owner._is_on_model_of(made)]
            for owner in (*interrupted, *replaced, self):
                owner.end()
            if trained_alone:
                self._keep(None, 0)
            else:
                if interrupted:
                    _warn_of_new_policy(made)
                self._start(made, is_again=bool(interrupted))
            self.replacement_count = count
        if world.size > 1 and not continues_numbers:
            seed_by_number(world.rank)

    def _start(self, made: PolicyT, *, is_again: bool) -> None:
        """Start a policy with the other ranks. If ``is_again`` is true and they do not join, go without a policy."""
        others = [owner.policy.awaited for owner in _open_trainings() if owner.policy is not None]
        made.begins_again = is_again
        policy = Policy(made)
        try:
            with _advising_about_open(others, made):
                _enter_with_all(policy)
        except (DisagreementError, ClosedError) as error:
            is_alone = isinstance(error, (StartTimeoutError, ClosedError)) or _is_of_two_kinds(error)
            if not (is_again and is_alone and current_caller("a policy").is_open):
                raise
            logger.warning(
                "averaging: the other ranks have not started a new policy, so this rank continues without "
                "averages, and the others continue without this rank: %s",
                error,
            )
            self._keep(None, 0)
        else:
            self._keep(policy, 0)

    def _continue(self, made: PolicyT) -> bool:
        """If an open policy has the type and options of ``made``, continue with it and return True."""
        owners = [(owner, owner.policy) for owner in _open_trainings() if owner.policy is not None]
        for owner, policy in owners:
            may_continue = owner.is_interrupted or not made.has_loaded
            if may_continue and owner._is_on_model_of(made):
                policy.awaited.take_optimizer_of(made)
                return self._take_over(owner, policy, made)
        for owner, policy in owners:
            if owner.is_interrupted and _is_equal(policy.awaited, made) and policy.awaited.take_model_of(made):
                return self._take_over(owner, policy, made)
        return False

    def _is_on_model_of(self, made: SpawnPolicy) -> bool:
        """Return whether this object's policy is open, and has the same model and options as ``made``."""
        if self.policy is None or made.model is not self.policy.awaited.model:
            return False
        # With parameters="trainable", different parameters may be trainable now.
        open_policy = self.policy.awaited
        return made._flat.fingerprint == open_policy._flat.fingerprint and _is_equal(open_policy, made)

    def _take_over(self, owner: Training[PolicyT], policy: Policy[PolicyT], made: PolicyT) -> Literal[True]:
        policy.awaited._metric = made._metric  # it need not be equal on all ranks
        owner._release()
        self._keep(policy, owner.replacement_count)
        return True

    def _keep(self, policy: Policy[PolicyT] | None, replacement_count: int) -> None:
        self.policy, self.replacement_count, self.is_interrupted = policy, replacement_count, False
        self.trains_alone = policy is None
        self._takes_tokens = policy is not None and "tokens" in inspect.signature(policy.awaited.step).parameters
        self._caller = current_caller("a policy")
        self._caller.ends.append(self.end)

    def _release(self) -> None:
        self.policy, self.trains_alone = None, False
        if self.end in self._caller.ends:
            self._caller.ends.remove(self.end)

    def judge_by_training_loss(self) -> None:
        """Declare that the metric is the training loss, so that a rising loss causes no warning about ``"min"``."""
        if self.policy is not None and self.policy.awaited._metric_mode == "min":
            self.policy.awaited.note_direction()

    def use(self, optimizer: torch.optim.Optimizer) -> None:
        """Give the open policy the trainer's current optimizer, which the trainer may have replaced."""
        if self.policy is not None and self.policy.awaited.optimizer is not optimizer:
            self.policy.awaited.optimizer = optimizer

    def state_dict(self, *, settles: bool = True) -> dict[str, Any]:
        """Wait for averaging rounds in progress, and return the policy's state, or {} if no policy is open."""
        if settles:
            self.settle()
        if self.policy is None:
            return {}
        return {**self.policy.awaited.state_dict(), "replacement_count": self.replacement_count}

    def state_without_waiting(self) -> dict[str, Any]:
        """Return the open policy's state. Return {} if no policy is open, or if an averaging round is in progress.

        After an exception, a wait for a round could last forever, because the other ranks may have ended.
        """
        try:
            return self.state_dict(settles=False)
        except BusyError as error:
            logger.warning("averaging: a checkpoint that is saved now does not contain the policy's state: %s", error)
            return {}

    def settle(self) -> None:
        """Wait until the policy's averaging rounds in progress have ended, so that its state can be saved."""
        settle = None if self.policy is None else getattr(self.policy.awaited, "settle", None)
        if settle is not None:
            self._caller.call(settle)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Start the next policy from a result of :meth:`state_dict`. If a policy is open, ignore the state.

        A trainer that searches for a learning rate loads a state while a policy is open.
        """
        if self.policy is None:
            self._saved = state

    def forget_state(self) -> None:
        """Drop a loaded state that no policy has started from."""
        self._saved = None

    def step(self, metric: Any, tokens: float | None = None) -> StepInfo:
        """Take a policy step, which may change the model's weights. Raise ClosedError if no policy is open.

        Args:
            metric: This rank's metric, or None if the policy uses no metric.
            tokens: Number of tokens or examples since the last step, if the policy's ``step`` accepts it.
        """
        if self.trains_alone:
            self._caller.call(self._caller.world.safe_point)  # raises the error of a failed job
            return NOTHING
        size = {} if tokens is None else {"tokens": tokens}
        policy = self.open_policy().awaited
        if size and not self._takes_tokens:
            kind = type(policy).__name__
            raise TypeError(f"tokens must be None, because {kind} has no weights='tokens', got {tokens!r:.80}")
        info: StepInfo = self._caller.call(policy.step, metric, **size)
        if info is not NOTHING:
            self.replacement_count += bool(info)
        return info

    def call(
        self, iteration: int, model: nn.Module, optimizer: torch.optim.Optimizer, metric: Any
    ) -> tuple[nn.Module, torch.optim.Optimizer, dict[str, Any]]:
        """Take a policy step, with the arguments and result of :meth:`protocols.ported.Ported.__call__`."""
        if self.trains_alone:
            return model, optimizer, fields_of(self.step(metric))
        called: tuple[nn.Module, torch.optim.Optimizer, dict[str, Any]]
        called = self.open_policy()(iteration, model, optimizer, metric)
        self.replacement_count += called[2]["averaged_this_iteration"]
        return called

    def open_policy(self) -> Policy[PolicyT]:
        """Return the open policy. Raise ClosedError if training has not begun or has ended."""
        if self.policy is None:
            raise ClosedError("this averaging has ended, with close() or with its block; create a new one")
        return self.policy

    def end(self, error: BaseException | None = None) -> None:
        """Leave the policy if it is open.

        If ``error`` means that memory ran out, keep the policy open, because training may start again.
        """
        policy = self.policy
        if policy is None and not self.trains_alone:
            return
        if error is not None and is_out_of_memory(error):
            self.is_interrupted = True
            return
        self._release()
        if policy is not None and self._caller.is_open:  # the world may have ended with an error
            trace = getattr(error, "__traceback__", None)  # Without ``trace``, the error would lose its traceback.
            policy.__exit__(type(error) if error is not None else None, error, trace)


def _open_trainings() -> list[Training[Any]]:
    """Return this rank's unfinished training runs, oldest first."""
    owners = [getattr(end, "__self__", None) for end in current_caller("a policy").ends]
    return [owner for owner in owners if isinstance(owner, Training)]


def settle_open_trainings() -> None:
    """Wait until this rank's averaging rounds in progress have ended, so that policy states can be saved."""
    if find_caller() is not None:
        for training in _open_trainings():
            training.settle()


def note_out_of_memory() -> None:
    """Allow this rank's open training runs to start again, even with new models, because memory ran out."""
    if find_caller() is not None:
        for training in _open_trainings():
            training.is_interrupted = True


def _warn_of_new_policy(made: SpawnPolicy) -> None:
    """Warn that this rank starts a new policy after running out of memory, and say how it could keep the open one."""
    logger.warning(
        "averaging: this rank has run out of memory and begins again with a different model or different options, "
        "which the open %s cannot use, so it starts a new policy and waits up to %g s for all ranks to do the same. To "
        "continue in the open policy instead, make the model outside the function that begins again, and make the "
        "options, including average_every, independent of the batch size",
        type(made).__name__,
        made._start_timeout_s,
    )


@contextmanager
def _advising_about_open(others: Sequence[SpawnPolicy], made: SpawnPolicy) -> Iterator[None]:
    """If starting ``made`` in the block times out while an equal policy is open, add advice to the error."""
    try:
        yield
    except StartTimeoutError as error:
        if not any(_is_equal(each, made) for each in others):
            raise
        raise StartTimeoutError(
            f"{error.message}. An equal policy is still open on this rank. If its training has ended, call close() of "
            "its Averaging or SelectiveAveraging first, because the other ranks may still wait for this rank in it. To "
            "continue with it after memory was exhausted, put the training inside with SelectiveAveraging(...) as "
            "averaging, or restart the training inside the except clause",
            **error.facts,
        ) from None


def _enter_with_all(policy: Policy[Any]) -> None:
    """Start a policy. Try again after a collision with a rank that starts again after running out of memory.

    That rank waits alone until a timeout, and then trains without a policy. The other ranks are notified of its start
    only when they start their next policy, and must then start again. If the timeout passes first, the ranks
    that have joined get a StartTimeoutError with the difference :data:`BEGINS_AGAIN`.
    """
    while True:
        try:
            policy.__enter__()
            return
        except DisagreementError as error:
            is_late = current_caller("a policy").world.rank in error.facts.get("missing", ())
            if not is_late and (policy.awaited.begins_again or not _is_of_two_kinds(error)):
                raise


def _is_of_two_kinds(error: DisagreementError) -> bool:
    """Return whether ``error`` says that only some of the starting ranks have run out of memory before."""
    return error.facts.get("difference") == BEGINS_AGAIN


def _is_equal(one: SpawnPolicy, other: SpawnPolicy) -> bool:
    return _traits_of(one) == _traits_of(other)


def _traits_of(policy: SpawnPolicy) -> tuple[Any, ...]:
    """Return all traits, except the model, that two policies must share for one to continue the other."""
    group = policy._given_group or current_caller("a policy").world.group
    options = policy._options()
    return type(policy), policy.name, policy.average_every, group.ranks, policy._flat.trained_only, options


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether an error means that a device or the host has run out of memory."""
    if isinstance(error, RuntimeError):
        words = ("out of memory", "can't allocate memory", "CUDNN_STATUS_NOT_SUPPORTED")
        return any(part in str(error) for part in words)
    return isinstance(error, MemoryError)
