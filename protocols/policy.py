"""Base class of all policies: async context managers around a training loop, with a ``step`` that may change weights.

:class:`SpawnPolicy` implements the checks before each step, the iteration count, and the joint start, in which the
members compare their policies. Subclasses implement the step.
"""

from __future__ import annotations

import abc
import asyncio
import dataclasses
import json
from collections.abc import Coroutine, Mapping
from types import TracebackType
from typing import Any, ClassVar, Final, Literal, NoReturn, Self, TypeAlias, Unpack

import torch
from torch import nn

from asyncdist import DisagreementError, Group, LocalProtocolError, World, validation
from asyncdist.collectives.agreed_start import Start, start_together
from asyncdist.collectives.agreement.messages import Agreed
from asyncdist.collectives.groups import check_open
from asyncdist.messaging.services import Services
from asyncdist.protocols.declared import with_options
from asyncdist.protocols.journal import Journal
from asyncdist.protocols.metrics import MetricSource, due_metric, given_metric, measured, negated
from asyncdist.protocols.misuse import (
    NoPlainContext,
    UnawaitedStep,
    line_of_caller,
    refuse_call,
    refuse_entry,
    warn_if_unlaunched,
    warn_of_first_weights,
    warn_of_no_step,
    warn_of_opposite_metric,
)
from asyncdist.protocols.options import CommonOptions, MeasuredOptions
from asyncdist.protocols.starting.differences import (
    BEGINS_AGAIN,
    LEFT_OUT,
    explained,
    explaining_conflicts,
    explaining_missing,
)
from asyncdist.protocols.starting.without_lost import start_without_lost
from asyncdist.protocols.step_info import NOTHING, StepInfo
from asyncdist.protocols.wrappers import check_not_inside, check_not_wrapped
from asyncdist.runtime.failing.process_ends import end_forked_child
from asyncdist.runtime.process import free_ended, note_ended
from asyncdist.runtime.world import world_to_await
from asyncdist.tensors.flat_state import FlatState
from asyncdist.tensors.model_cache import TrainedModels
from asyncdist.tensors.optimizers.recognition import has_stepped
from asyncdist.tensors.optimizers.weights import AveragedStates, OptimizerWeights

#: "evaluating" is the stage of an open policy whose model temporarily contains weights other than its own.
_Stage: TypeAlias = Literal["new", "starting", "open", "evaluating", "closed"]

#: Name of the agreement that the members, and a reserved coordinator if there is one, reach at a policy's start.
START: Final = "the start of a policy"
#: Version of the format of :meth:`SpawnPolicy.state_dict`.
_STATE_VERSION: Final = 1
_LATER_ENTRIES: Final = frozenset(("schedule",))  # entries that states saved by earlier versions lack


@with_options(MeasuredOptions, CommonOptions)
class SpawnPolicy(NoPlainContext, abc.ABC):
    """Base class of all policies, whose ``step`` may change the model's weights.

    Args:
        model: Model that this rank trains. Its parameters and persistent buffers are the policy's state.
        optimizer: Optimizer for the model or for some of its parameters.
        resets_optimizer: Whether the optimizer's state is cleared at each average. Otherwise, only copies of weights in
            the state are updated (see :mod:`asyncdist.tensors.optimizers.weights`).
        average_every, options: The options below.

    Attributes:
        optimizer: Current optimizer. Assign a different optimizer to train the model with it from now on.
        is_alone: Whether this rank is the only participant, so that the policy averages nothing. Known after the start.
        begins_again: Whether memory ran out in an earlier policy. Set it before the start, to the same value on all
            members.
        has_loaded: Whether :meth:`load_state_dict` has been called.

    Raises:
        TypeError, ValueError: An argument is invalid.
    """

    takes_metric: ClassVar[bool] = True
    #: Whether the policy calls the metric while the model contains trial weights. The metric must then be callable.
    calls_metric: ClassVar[bool] = False
    #: Whether a restarted rank may join the running policy, and a policy on all ranks may start without lost ranks.
    admits_restarted: bool = False
    #: Whether several ranks train one replica of the model, as under DDP. The model may then be wrapped or sharded.
    keeps_replicas: bool = False

    @validation.names_options()
    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        *,
        average_every: int,
        resets_optimizer: bool = False,
        **options: Unpack[MeasuredOptions],
    ) -> None:
        own = CommonOptions.of({**options, "average_every": average_every})
        self.model = model
        self.average_every, self.name = own.average_every, own.name
        self.iteration = 0
        self.start_number = 0  # equal on all ranks that train together; different for each start
        self._call_count = 0  # steps in this process; `iteration` includes those before a restart
        self._is_due = False  # whether an average is due in the current step
        self._is_unawaited = True  # whether step was never called, or its last call was not awaited
        self._first_call: tuple[str, int] | None = None
        self._unawaited: UnawaitedStep | None = None  # newest wrapped step: the first, or one after an unawaited step
        self._journal = Journal(own.name, type(self).__name__)
        self._metric, self._metric_mode = own.metric, own.metric_mode
        self._limit: tuple[str, float | None] = ("threshold", None)  # name and value of an option in the metric's unit
        states = AveragedStates(model, None if resets_optimizer else optimizer)
        self._flat = FlatState(  # raises TypeError if model is not a module
            model, takes_shards=self.keeps_replicas, trained_only=own.parameters == "trainable", states=states
        )
        check_not_wrapped(model, keeps_replicas=self.keeps_replicas)
        self._flat.check_optimizer(optimizer)
        self._weights = OptimizerWeights(model, optimizer, states, is_reset=resets_optimizer)
        self._given_group, self._given_world = own.group, own.world
        self._start_timeout_s = own.start_timeout_s
        self._stage: _Stage = "new"
        self._stepping = self._is_beginning = self.begins_again = self.has_loaded = False
        self._world: World
        self._services: Services
        self._group: Group
        self._members: tuple[int, ...]  # ranks that start together, including this rank
        self._joint_start: Start[None]
        self.is_alone: bool

    def __repr__(self) -> str:
        return f"<{self._journal.describe(self.iteration)}>"

    # -- the user's calls -------------------------------------------------------------------------------------------

    @property
    def optimizer(self) -> torch.optim.Optimizer:
        """The current optimizer."""
        optimizer: torch.optim.Optimizer = self._weights.optimizer
        return optimizer

    @optimizer.setter
    def optimizer(self, optimizer: torch.optim.Optimizer) -> None:
        """Train the model with a different optimizer from now on.

        Raises:
            TypeError, ValueError: The object is not an optimizer of this model, or only one of the old and new
                optimizers is schedule-free.
        """
        if optimizer is not self.optimizer:  # otherwise, keep what is known of it, such as its scheduler
            self._change_optimizer(optimizer)

    async def __aenter__(self) -> Self:
        """Start the policy together with all other members.

        Raises:
            StartTimeoutError: Some members did not join in time; the error names them.
            DisagreementError: Members differ in class, name, options or model; the error names the first difference.
            BusyError: Another task is entering the policy, or a cancelled start is not finished yet. If that start
                fails, the policy may be entered again.

        **Cancellation**: while members are missing, RemoteError is raised on the other members. Once all members have
        joined, this rank starts and leaves the policy before the cancellation is raised.
        """
        if self._stage != "new":
            refuse_entry(type(self).__name__, self._stage)
        self._world = world = world_to_await(self._given_world)
        self._services, self._group = world.services, self._given_group or world.group
        check_open(self._group)
        if self._world.rank not in self._group.ranks:
            raise LocalProtocolError(
                f"group must include this rank, {self._world.rank}, got the ranks {list(self._group.ranks)}"
            )
        self._members = self._choose_members()
        self.is_alone = not self._has_other_ranks()
        warn_if_unlaunched(self._world, is_alone=self.is_alone)
        if not world.is_simulated:  # the simulator decides when garbage is collected
            free_ended()
        self._prepare()
        if not self.is_alone:
            if not self.keeps_replicas:
                check_not_inside(self.model)
            self._stage = "starting"
            try:
                await self._enter()
            except BaseException:
                self._forget_start()
                raise
        self._stage = "open"
        self._weights.begin()
        nbytes, ranks = self._flat.nbytes, self._members
        self._journal.begin(self._services, type(self).__name__, self.average_every, nbytes, ranks)
        return self

    async def _enter(self) -> None:
        """Start the policy, or join it if this rank was restarted while the other ranks were running it."""
        is_of_all = self._group is self._world.group
        if is_of_all and self._world.incarnation:
            await self._join()
        elif is_of_all and self._starts_without_lost:
            await start_without_lost(self._services, self._members, self._start_with, self._start_timeout_s)
        else:
            self._world.peers.attendance.check_whole(self._group)
            await self._start_with(self._members)

    @property
    def _starts_without_lost(self) -> bool:
        """True if a start on all ranks continues without ranks that are lost meanwhile."""
        return self.admits_restarted and not self.keeps_replicas and self._services.survives_loss

    async def _start_with(self, members: tuple[int, ...]) -> None:
        self._stage = "starting"
        leader = self._choose_leader(members)
        with explaining_missing(self._world.rank):
            await start_together(
                self._services,
                self._world.agreements,
                members if leader in members else (*members, leader),
                START,
                self._begin,
                self._end,
                name=START,
                leader=leader,
                outlives_leader=self._starts_without_lost,
            )

    async def _start_among_newcomers(self) -> None:
        """Start a new policy, because all members were restarted and no policy is running."""
        await self._start_with(tuple(rank for rank in self._members if rank not in self._services.gone))
        self._services.is_admitted = True

    def _forget_start(self) -> None:
        """Allow another start after a failed start, unless :meth:`_begin` is running and will set the stage."""
        if self._stage == "starting" and not self._is_beginning:
            self._stage = "new"

    async def _begin(self, start: Start[None]) -> None:
        """Complete a start that all members have joined. This runs even if the caller was cancelled."""
        self._joint_start = start
        self._is_beginning = True
        try:
            await self._start()
        except BaseException:
            self._stage = "new"
            raise
        finally:
            self._is_beginning = False
        self._stage = "open"

    async def _end(self, _: None) -> None:
        """Leave a policy whose start was cancelled on this rank after all ranks had joined."""
        self._stage = "closed"
        await self._stop(asyncio.CancelledError())

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None
    ) -> None:
        # GeneratorExit is raised when a suspended generator is deleted.
        if self._stage not in ("open", "evaluating") or kind is GeneratorExit:
            return
        end_forked_child(self._services.process_id, error)
        self._stage = "closed"
        self._weights.end()
        if self._call_count:
            self._services.shared(TrainedModels).models.add(self.model)
        self._journal.end(self._services, self.model)
        if not self._world.is_simulated:
            note_ended(self, (*self.model.parameters(), *self.model.buffers()))
        if not self.is_alone:
            await self._stop(error)
        if error is None and self._first_call is not None and self._is_unawaited and not self._call_count:
            warn_of_no_step(self._first_call, self._unawaited)

    def step(
        self, local_metric: MetricSource = None, *, loss: MetricSource = None, score: MetricSource = None
    ) -> Coroutine[Any, Any, StepInfo]:
        """Take part in the policy once per training step. Only this call changes the model's weights.

        Call it from the task that trains: ``info = await policy.step(loss=loss)``. In due steps (see
        ``average_every``), the policy needs one of the three metrics, unless it has the option ``metric``.

        Args:
            loss: This rank's metric, if a smaller value is better: a float, a 0-d tensor, which is detached, or a
                callable that returns such a value and is called only when a report is due.
            score: This rank's metric, if a larger value is better.
            local_metric: This rank's metric, if ``metric_mode`` defines which values are better.

        Returns:
            The result of the step, which is truthy if the weights have changed.

        Raises:
            BusyError: Another task is in ``step``, or this rank's ``world.compute`` or a save of the model is in
                progress.
            ClosedError: The call is outside ``async with``.
            RankLostError: A peer is lost, and the job has failed.
            TypeError, ValueError: A due metric is not a number, more than one metric was passed, or the metric's sign
                is opposite to the sign of ``threshold``.
        """
        if loss is not None or score is not None:
            given, is_opposite = self.given_metric(local_metric, loss, score)
            local_metric = negated(given) if is_opposite else given
        if self._is_unawaited:
            if self._first_call is None:
                self.note_call(line_of_caller())
            assert self._first_call is not None, "it was noted"
            last = None if self._call_count else self._unawaited
            self._unawaited = UnawaitedStep(self._guarded_step(local_metric), last, self._first_call)
            return self._unawaited
        self._is_unawaited = True
        return self._guarded_step(local_metric)

    def note_direction(self) -> None:
        """Record that ``metric_mode`` is known to be the metrics' direction, so that no warning is needed."""
        self._journal.is_direction_named = True

    def note_call(self, line: tuple[str, int]) -> None:
        """Record the first call of ``step``, and warn if its metric seems to have the wrong direction.

        Args:
            line: File and line of the caller.

        Raises:
            ClosedError: The policy has not been entered.
        """
        if self._stage == "new":  # raised here, because some code never awaits the coroutine
            self._refuse()
        self._first_call = line
        if not self._world.is_simulated:  # until now, a variable may have referred to an ended policy
            free_ended(is_last=True)
        if self.takes_metric and self._stage == "open" and self._group.index == 0:
            warn_of_opposite_metric(self._metric_mode)

    def given_metric(
        self, local_metric: MetricSource, loss: MetricSource, score: MetricSource
    ) -> tuple[MetricSource, bool]:
        """Return the metric passed to ``step``, and whether its direction is opposite to ``metric_mode``.

        Raises:
            TypeError: More than one metric was passed.
            ValueError: A threshold is in the units of a metric with the opposite sign.
        """
        given, is_opposite = given_metric(local_metric, loss, score, self._metric_mode)
        self._journal.is_direction_named = local_metric is None
        name, limit = self._limit
        if is_opposite and limit is not None:
            word, cure = ("loss", "min") if score is None else ("score", "max")
            raise ValueError(
                f"{name}={limit:g} would be compared with the negated {word} of step({word}=...) because metric_mode "
                f"is {self._metric_mode!r}; pass metric_mode={cure!r} to compare it with the {word}"
            )
        return given, is_opposite

    async def _guarded_step(self, local_metric: MetricSource, is_due: bool | None = None) -> StepInfo:
        """Perform a step if one is allowed now. A caller that knows whether an average is due passes ``is_due``."""
        self._is_unawaited = False
        if self._stepping or self._stage != "open" or self._world.is_in_use(self.model):
            self._refuse()
        self._stepping = True
        self._is_due = (self.iteration + 1) % self.average_every == 0 if is_due is None else is_due
        try:
            if self._weights.is_watching:
                self._weights.check_kept()
            has_work = self._begin_step()
            # Most steps have no work. Awaiting another coroutine would take 5 us with cold caches.
            if not has_work and self._services.engine.try_safe_point():
                self._journal.step_count = self.iteration + 1
                return NOTHING
            began_at = self._journal.now()
            info = await self._step(local_metric)
            self._journal.note_step(self.iteration, info, began_at)
            return info
        finally:
            self._stepping = False
            self.iteration += 1
            self._call_count += 1

    _guarded_step.__qualname__ = "SpawnPolicy.step"  # for Python's warning about a coroutine that is not awaited

    def step_at(self, iteration: int, local_metric: MetricSource, *, is_due: bool) -> Coroutine[Any, Any, StepInfo]:
        """Return the coroutine of step ``iteration``, for a caller that decides which steps are due.

        The caller must call :meth:`check_can_step` first, and must await the coroutine immediately.
        """
        self.iteration = iteration
        return self._guarded_step(local_metric, is_due)

    def check_can_step(self) -> None:
        """Raise ClosedError or BusyError if a step is not possible now."""
        self._check_can("step()")

    def _check_can(self, call: str) -> None:
        """Raise ClosedError or BusyError if a call that needs the weights is not possible now."""
        if self._stepping or self._stage != "open" or self._world.is_in_use(self.model):
            self._refuse(call)

    def is_own_group(self, group: object) -> bool:
        """Return whether ``group`` is the policy's group or that group's communicator."""
        return group is self._group or group is self._group.communicator

    # -- continuing later -------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Return the policy's own state, from which a later run continues with :meth:`load_state_dict`.

        The state consists of numbers, strings, None and tuples of such values. It contains neither the weights nor the
        optimizer's state (:func:`asyncdist.save_population` saves both), and no rounds in progress or cooldown.
        """
        return {
            "policy": type(self).__name__,
            "version": _STATE_VERSION,
            "iteration": self.iteration,
            "metric": self._journal.metric,
            "metric_mode": self._options().get("metric_mode"),
            **self._own_state(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from the :meth:`state_dict` of a policy of the same class. Call this before ``async with``.

        Raises:
            LocalProtocolError: The policy has already been entered.
            ValueError: The state belongs to another class or version, lacks an entry, or is damaged.
        """
        if self._stage != "new":
            raise LocalProtocolError(
                f"load_state_dict() must be called before the policy is entered, but this {type(self).__name__} was "
                "entered before",
                state=self._stage,
            )
        own = self.state_dict()
        with validation.reading_state(own["policy"]):
            for key in ("policy", "version"):
                if state.get(key) != own[key]:
                    raise ValueError(f"the state's {key!r} must be {own[key]!r}, got {state.get(key)!r:.80}")
            missing = sorted(own.keys() - state.keys() - _LATER_ENTRIES)
            if missing:
                found = ", ".join(map(str, state))
                raise ValueError(f"the state of {own['policy']} must have the entry {missing[0]!r}, got only {found}")
            self._restore(state)
        self.has_loaded = True

    def _restore(self, state: Mapping[str, Any]) -> None:
        """Load a state that was checked, or that another member has sent."""
        iteration, metric = validation.count("iteration", state["iteration"], least=0), state["metric"]
        if type(metric) not in (int, float, type(None)):
            validation.refuse("metric", metric, "a number or None")
        self._load_own_state(state)
        self.iteration, self._journal.metric = iteration, metric

    def _own_state(self) -> dict[str, Any]:
        """Return the entries of :meth:`state_dict` that a subclass adds."""
        return {}

    def _load_own_state(self, state: Mapping[str, Any]) -> None:
        """Load the entries of :meth:`_own_state`."""
        del state

    def __getstate__(self) -> dict[str, Any]:
        if self._stage != "new":
            raise TypeError(f"an entered {type(self).__name__} cannot be copied or pickled; save its state_dict()")
        return self.__dict__

    # -- for subclasses ---------------------------------------------------------------------------------------------

    def _begin_step(self) -> bool:
        """Count a step, before its first await, and return whether the policy has work to do in it.

        Called once in each step. :meth:`_step` is not called if the result is False, no request has completed, and no
        other task can run. A policy overrides both methods together.
        """
        return True

    @abc.abstractmethod
    async def _step(self, local_metric: MetricSource) -> StepInfo:
        """Perform one step, which begins with a safe point. Called after the checks of :class:`SpawnPolicy`."""

    @abc.abstractmethod
    async def _start(self) -> None:
        """Open the channels and agree with the other members (:meth:`_agree`). Not called if this rank is alone."""

    async def _join(self) -> None:
        """Join the policy that the other ranks are running. Called on a restarted rank."""
        raise LocalProtocolError(
            f"{type(self).__name__} does not admit a restarted rank to a running policy; make a new group after the "
            "restart, and start a new policy on all its members"
        )

    @abc.abstractmethod
    async def _stop(self, error: BaseException | None) -> None:
        """Leave the policy. ``error`` is the exception that has ended its ``async with`` block, or None."""

    @abc.abstractmethod
    def _options(self) -> Mapping[str, Any]:
        """Return the options that must be equal on all members, as JSON values."""

    def _change_optimizer(self, optimizer: torch.optim.Optimizer) -> None:
        self._flat.check_optimizer(optimizer)
        self._weights.change(optimizer)

    def take_optimizer_of(self, other: SpawnPolicy) -> None:
        """From now on, use the optimizer of ``other``, a policy for the same model that was never entered."""
        self.optimizer = other.optimizer

    def take_model_of(self, other: SpawnPolicy) -> bool:
        """From now on, use the model and optimizer of ``other``, a policy that was never entered.

        Return False and change nothing if the models' layouts differ or :meth:`_can_begin_again` forbids it.
        """
        if not self.has_layout_of(other) or not self._can_begin_again():
            return False
        self._weights.follow(other.model, other.optimizer)
        self._flat.follow(other.model)
        self.model = other.model
        return True

    def has_layout_of(self, other: SpawnPolicy) -> bool:
        """Return whether the model of ``other`` has the layout of this policy's model, and no other rank shares it."""
        return not self.keeps_replicas and other._flat.fingerprint == self._flat.fingerprint

    def _can_begin_again(self) -> bool:
        """Return whether a rank may continue in this policy with a new, untrained model.

        By default, this is possible if the policy judges ranks by a metric, and so replaces bad weights.
        """
        return self.takes_metric

    def _prepare(self) -> None:
        """Prepare the state that depends on the members. Called before the start, even if this rank is alone."""

    def _choose_members(self) -> tuple[int, ...]:
        """Return the ranks that start the policy together, including this rank."""
        return self._group.ranks

    def _has_other_ranks(self) -> bool:
        return len(self._members) > 1

    def _read_metric(self, given: MetricSource) -> float:
        # A float, the most common metric, needs no conversion.
        number = given if type(given) is float else due_metric(self._metric if given is None else given, self.iteration)
        self._journal.note_metric(self.iteration, number)
        return number

    def _read_new_metric(self, given: MetricSource) -> float | None:
        """Return the metric of a due step, or None if there is no new measurement."""
        value, is_new = (given, True) if type(given) is float else measured(self._metric if given is None else given)
        return self._read_metric(value) if is_new else None

    def _choose_leader(self, members: tuple[int, ...]) -> int:
        """Return the member, or reserved coordinator, that compares all members' values at the start."""
        return members[0]

    def _agreed_values(self) -> dict[str, str]:
        return {
            **({BEGINS_AGAIN: "so"} if self.begins_again else {}),
            **({LEFT_OUT: self._flat.left_out_digest()[:16]} if self._flat.trained_only else {}),
            "class": type(self).__name__,
            "name": self.name or "(none)",
            "model": self._flat.fingerprint.digest[:16],
            **{f"option {key}": json.dumps(value) for key, value in self._options().items()},
        }

    async def _agree(self) -> Agreed:
        start = self._joint_start
        try:
            with explaining_conflicts(self._world.agreements, start.meeting):
                mark = self._start_mark()
                agreed = await start.agree(self._agreed_values(), timeout_s=self._start_timeout_s, mark=mark)
        except DisagreementError as error:
            left_s = start.left_s(self._start_timeout_s)
            raise await explained(error, self._world, self._members, self._flat.fingerprint, start, left_s) from None
        if self._world.rank == next(rank for rank in self._group.ranks if rank not in self._services.gone):
            warn_of_first_weights(agreed.marks)
        values = {name: value for name, value in agreed.values.items() if name != BEGINS_AGAIN}
        return dataclasses.replace(agreed, values=values)

    def _start_mark(self) -> int | None:
        """Return a checksum (>= 0) of the initial weights, or None if they are already trained, or are not averaged."""
        was_trained = self.model in self._services.shared(TrainedModels).models or has_stepped(self.optimizer)
        is_first = self.iteration == 0 and not was_trained
        return self._flat.sample_checksum() if is_first and self._takes_means() else None

    def _takes_means(self) -> bool:
        """Return whether the policy averages the weights of several members."""
        return True

    def _check_not_evaluating(self, call: str) -> None:
        """Raise BusyError if the model temporarily contains weights other than its own."""
        if self._stage == "evaluating":
            self._refuse(call)

    def _refuse(self, call: str = "step()") -> NoReturn:
        refuse_call(call, type(self).__name__, self._stage, is_stepping=self._stepping)
