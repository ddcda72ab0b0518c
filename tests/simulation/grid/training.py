"""Trains one rank of a case, checks each step, and makes the case's event happen in the middle.

The training loop is a generator that yields awaitables. In blocking code it yields the values that calls have returned,
so the same loop runs in coroutines, in blocking code and through an integration.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import warnings
from collections.abc import Callable, Generator, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, TypeAlias, cast

import torch
from support.odd_tensors import same
from torch import Tensor, nn

import asyncdist as ad
from asyncdist.integrations.pytorch import Averaging
from asyncdist.simulation import Fault, Kill, Link, Network, SimReport, Uniform, simulate
from protocols import StepInfo
from simulation.grid.axes import DEFAULT, Case, kind_of
from simulation.grid.models import MODELS, OPTIMIZERS, take_step

#: A training loop that yields awaitables, or the values that blocking calls have returned.
Training: TypeAlias = Generator[Any, Any, "Trace"]
END: Final = 13
#: Iteration from which the learning rate is 0 if ``lr`` is "ends", and optimizers that move weights even then.
ENDS_AT: Final = 7
MOVING_AFTERWARDS: Final = ("Rprop", "ASGD", "lookahead", "schedule-free")
#: Events in which a rank is lost.
LOSING: Final = ("killed last", "killed first", "restarted", "joined")
#: Virtual seconds within which every job must end.
LIMIT_S: Final = 3000.0


@dataclass(frozen=True)
class Job:
    """One simulated job of a case.

    Attributes:
        end: Iteration at which the ranks end.
        moment: Iteration before which the event happens.
        event: Event inside the training loop, or "".
        saves_at: Iterations after which the population is saved in ``folder``.
        is_beside: Whether training continues while files are written.
    """

    case: Case
    ranks: int
    end: int = END
    moment: int = 5
    event: str = ""
    way: str = "plain"
    network: str = "even"
    folder: Path | None = None
    is_loaded: bool = False
    saves_at: tuple[int, ...] = ()
    is_beside: bool = False
    faults: tuple[Fault, ...] = ()
    seed: int = 0


@dataclass
class Trace:
    """Stores the states and results of one process of a rank.

    Attributes:
        start, end: State of the model before the policy begins, and at the end.
        moments: Tensors of the optimizer's state at the end, in the optimizer's order.
        anchors: The anchor's parameters at the end, if there is one.
    """

    rank: int
    incarnation: int
    start: dict[str, Tensor]
    end: dict[str, Tensor] = field(default_factory=dict)
    moments: list[Tensor] = field(default_factory=list)
    anchors: dict[str, Tensor] | None = None
    infos: list[StepInfo] = field(default_factory=list)


@dataclass
class Outcome:
    """Describes how a job ended: its report, each process's trace and all warnings."""

    job: Job
    report: SimReport[Any]
    traces: list[Trace]
    warnings: list[str]


# -- what a rank trains -----------------------------------------------------------------------------------------------


def state_of(model: nn.Module) -> dict[str, Tensor]:
    """Return a copy of all parameters and buffers."""
    named = [*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)]
    return {name: tensor.detach().clone() for name, tensor in named}


def differing(one: dict[str, Tensor], two: dict[str, Tensor]) -> list[str]:
    """Return the names of the entries whose bits differ."""
    return [name for name, tensor in one.items() if not same(tensor, two[name])]


def moments_of(optimizer: Any) -> list[dict[str, Tensor]]:
    """Return copies of the tensors in the optimizer's state, in one dictionary per parameter."""
    params = [each for group in optimizer.param_groups for each in group["params"]]
    states = [optimizer.state.get(each, {}) for each in params]
    return [
        {key: value.detach().clone() for key, value in each.items() if isinstance(value, Tensor)} for each in states
    ]


class Trainee:
    """Holds a rank's model, optimizer and policy."""

    def __init__(self, case: Case, replica: int, *, is_group: Any = None, name: str = "", way: str = "plain") -> None:
        first = replica if case["first"] == "different" else 0
        self.case, self.replica = case, replica
        self.model = MODELS[case["model"]](first)
        self.lr = 0.0 if case["lr"] == "zero" else 0.05
        self.optimizer: Any = OPTIMIZERS[case["optimizer"]](self.model, self.lr)
        self.group, self.name, self.way = is_group, name, way
        self.policy = self.new_policy()

    def new_policy(self) -> Any:
        """Return a new policy for the model, not yet entered."""
        kind, case = kind_of(self.case.policy), self.case
        options = case.options(self.evaluate, lambda: MODELS[case["model"]](0))
        options |= {"group": self.group} if self.group else {}
        options |= {"name": self.name} if self.name else {}
        if kind.calls_metric and self.way == "integration":
            options["metric"] = self.evaluate
        return kind(self.model, self.optimizer, **options)

    def evaluate(self) -> float:
        """Return a metric of the weights that is different on each rank."""
        with torch.no_grad():
            total = math.fsum(float(each.abs().double().square().sum()) for each in self.model.parameters())
        return total / 1024 + (0 if kind_of(self.case.policy).calls_metric else self.replica / 64)

    def said(self, step: int) -> dict[str, Any]:
        """Return the keyword arguments for ``policy.step``."""
        kind, found = type(self.policy), {}
        if self.case["weights"] in ("tokens", "rate"):
            found["tokens"] = 1 + (step + self.replica) % 3
        if kind.takes_metric and self.case["metric"] == DEFAULT:
            value: Any = self.evaluate if kind.calls_metric else ((self.replica * 5 + step * 3) % 7) / 8
            found["loss" if self.case["metric_mode"] == "min" else "score"] = value
        return found

    def train_checked(self, step: int, *, check: bool) -> None:
        """Train, and check that an optimizer with a learning rate of 0 leaves the weights unchanged."""
        ends = self.case["lr"] == "ends" and step >= ENDS_AT and self.case.policy != "PopulationTrainingPolicy"
        for group in self.optimizer.param_groups if ends else ():
            group["lr"] = group["lr"] * 0
        is_still = all(float(group["lr"]) == 0 for group in self.optimizer.param_groups)
        if not check or not is_still or self.case["optimizer"] in (MOVING_AFTERWARDS if ends else ("Rprop",)):
            return self.train(step)
        before = state_of(self.model)
        self.train(step)
        after = state_of(self.model)
        moved = [name for name in differing(before, after) if name[:5] != "norm." and is_finite([after[name]])]
        assert not moved, f"the optimizer moves {moved} with a learning rate of 0: it keeps old weights"
        return None

    def train(self, step: int) -> None:
        """Take one training step, unless the policy takes it."""
        if self.case.policy == "EvolutionStrategyPolicy":
            return
        take_step(self.model, self.optimizer, self.replica, step, moves_buffers=self.lr > 0)


def spoil(trainee: Trainee, event: str) -> None:
    """Write a NaN into the first trained weight, or into the first moment, if the event requires it."""
    found = [each.data for each in trainee.model.parameters() if each.requires_grad and each.numel()]
    if event == "moments not finite":
        moments = [tensor for state in trainee.optimizer.state.values() for tensor in _floating(state)]
        found = moments
    elif event != "weights not finite":
        return
    for tensor in found[:1]:
        tensor.view(-1)[0] = float("nan")


def _floating(state: dict[str, Any]) -> list[Tensor]:
    tensors = [each for each in state.values() if isinstance(each, Tensor) and each.is_floating_point()]
    return [each for each in tensors if each.dim() and each.numel()]


def is_finite(tensors: Iterable[Tensor]) -> bool:
    """Return whether all values are finite."""
    return all(bool(torch.isfinite(each).all()) for each in tensors)


def check_step(trainee: Trainee, before: Any, info: StepInfo) -> None:
    """Check the result of a policy's step, and that the step has changed only what it may change."""
    state, moments, grads = before
    case, after = trainee.case, state_of(trainee.model)
    changed = differing(state, after)
    assert info or not changed, f"a step that reports no average has changed {changed}: {info!r}"
    kept = ["own"]
    if case["parameters"] == "trainable":
        kept += [name for name, each in trainee.model.named_parameters() if not each.requires_grad]
    assert not set(kept) & set(changed), f"a step has changed {set(kept) & set(changed)}"
    for parameter, grad in zip(trainee.model.parameters(), grads, strict=True):
        is_same = parameter.grad is None if grad is None else parameter.grad is not None and same(parameter.grad, grad)
        assert is_same, "a step has changed a gradient"
    if not info:
        return
    for old, new in zip(moments, moments_of(trainee.optimizer), strict=True):
        for key in old.keys() & new.keys():
            assert (old[key].shape, old[key].dtype) == (new[key].shape, new[key].dtype), key
        is_known = bool(old) and is_finite((*old.values(), *state.values()))
        is_kept = is_finite(new.values()) or not is_known or case.policy == "AverageAllPolicy"  # which spreads NaNs
        assert is_kept, "a moment is not finite"
    assert str(info), "each result can be shown"
    for each in info.parts or (info,):
        assert len(each.donors) == len(each.weights) and list(each.donors) == sorted(set(each.donors)), each
        assert not each.weights or math.isclose(math.fsum(each.weights), 1.0, rel_tol=1e-6), each
        assert each.staleness_steps >= 0, each
        assert each or not each.donors or each.abandoned, each


# -- the loop ---------------------------------------------------------------------------------------------------------


class _Plain:
    """Calls a policy as a coroutine does."""

    api: Any = ad

    def enter(self, policy: Any) -> Any:
        return policy.__aenter__()

    def leave(self, policy: Any, error: BaseException | None = None) -> Any:
        return policy.__aexit__(type(error) if error else None, error, None)

    def show(self, policy: Any, model: nn.Module) -> Any:
        async def shown() -> dict[str, Tensor]:
            async with policy.anchor_weights():
                return state_of(model)

        return shown()


class _Blocking:
    """Calls a policy as blocking code does."""

    api: Any = ad.blocking

    def enter(self, policy: Any) -> Any:
        return ad.blocking.policy(policy).__enter__()

    def leave(self, policy: Any, error: BaseException | None = None) -> Any:
        return policy.__exit__(type(error) if error else None, error, None)

    def show(self, policy: Any, model: nn.Module) -> Any:
        with _open(policy).anchor_weights():
            return state_of(model)


class _Integrated(_Blocking):
    def enter(self, policy: Any) -> Any:
        return Averaging(policy)


_WAYS: Final[dict[str, Any]] = {"plain": _Plain(), "blocking": _Blocking(), "integration": _Integrated()}


def _open(policy: Any) -> Any:
    """Return the policy itself, which an integration may have wrapped."""
    return policy.policy if isinstance(policy, Averaging) else policy


def _steps(trainee: Trainee, way: Any, world: Any, job: Job, trace: Trace, policy: Any, until: int) -> Training:
    """Train until the policy reaches the iteration ``until``."""
    while _open(policy).iteration < until:
        step = _open(policy).iteration
        trainee.train_checked(step, check=not job.event.endswith("not finite"))
        pace = 5.0 if job.network == "one rank is slow" and trainee.replica == 1 else 1 + 0.2 * world.rank
        yield world.sleep(0.01 * pace)
        if step == job.moment and trainee.replica == job.ranks // trainee.case.replica_size - 1:
            spoil(trainee, job.event)
        if step == job.moment and job.event == "new optimizer" and trainee.name == "":
            trainee.optimizer = OPTIMIZERS[trainee.case["optimizer"]](trainee.model, trainee.lr)
            _open(policy).optimizer = trainee.optimizer
        grads = [None if each.grad is None else each.grad.clone() for each in trainee.model.parameters()]
        before = state_of(trainee.model), moments_of(trainee.optimizer), grads
        if job.event == "wrong call" and step == job.moment and way is not _WAYS["integration"]:
            with contextlib.suppress(TypeError):
                yield policy.step(loss=1.0, score=2.0)
                raise AssertionError("two metrics must be refused")
        if job.event == "cancelled step" and step >= job.moment and world.rank == 1 and way is _WAYS["plain"]:
            with contextlib.suppress(TimeoutError):
                yield asyncio.wait_for(policy.step(**trainee.said(step)), 1e-5 * (1 + job.seed % 500))
        else:
            info = yield policy.step(**trainee.said(step))
            check_step(trainee, before, info)
            trace.infos.append(info)
        if step + 1 in job.saves_at and trainee.name == "":
            at = {"policy": policy, "keep": 2, "group": trainee.group}
            save = way.api.async_save_population if job.is_beside else way.api.save_population
            yield save(job.folder, trainee.model, trainee.optimizer, **at)
    return trace


def _train(world: Any, job: Job, traces: list[Trace]) -> Training:
    case, way = job.case, _WAYS[job.way]
    replica = world.rank // case.replica_size
    group = None
    if job.event == "of a group":
        ranks = range(job.ranks - case.replica_size)
        if world.rank not in ranks:
            return Trace(world.rank, world.incarnation, {})
        group = yield way.api.new_group(ranks)
    trainee = Trainee(case, replica, is_group=group, way=job.way)
    trace = Trace(world.rank, world.incarnation, state_of(trainee.model))
    traces.append(trace)
    if job.is_loaded:
        try:
            at = {"policy": trainee.policy, "group": group}
            yield way.api.load_population(job.folder, trainee.model, trainee.optimizer, **at)
        except FileNotFoundError:
            assert world.incarnation, "the checkpoint must be found"
    policy = yield way.enter(trainee.policy)
    end = job.end
    if job.event == "one ends early" and replica == job.ranks // case.replica_size - 1:
        end = job.moment
    if job.event in ("policy after policy", "error between steps", "resumed in memory", "settled", "anchors shown"):
        yield from _steps(trainee, way, world, job, trace, policy, job.moment)
        if job.event != "policy after policy" and hasattr(trainee.policy, "settle"):
            yield _open(policy).settle()
            yield way.api.barrier()
        if job.event == "anchors shown" and case.has_anchor:
            trace.anchors = yield way.show(policy, trainee.model)
        if job.event not in ("settled", "anchors shown"):
            state = policy.state_dict() if job.event == "resumed in memory" else None
            error = RuntimeError("between steps") if job.event == "error between steps" else None
            yield way.leave(policy, error)
            if state is None and case.has_anchor:  # all ranks must begin with equal weights
                yield way.api.average_models(trainee.model)
            trainee.policy = trainee.new_policy()
            if state is not None:
                trainee.policy.load_state_dict(state)
            policy = yield way.enter(trainee.policy)
    if job.event == "policies side by side":
        other = Trainee(case, replica, name="other", way=job.way)
        beside = yield way.enter(other.policy)
        for until in range(1, end + 1):
            yield from _steps(other, way, world, job, trace, beside, until)
            yield from _steps(trainee, way, world, job, trace, policy, until)
        yield way.leave(beside)
    yield from _steps(trainee, way, world, job, trace, policy, end)
    if case.has_anchor and end == job.end:
        yield _open(policy).settle()
        trace.anchors = yield way.show(policy, trainee.model)
        if case["late"] == "skip" and job.event not in ("of a group", "one ends early", *LOSING):
            yield way.api.barrier()  # the end of a rank completes rounds on other ranks
    assert str(_open(policy).statistics()) and repr(trainee.policy)
    yield way.leave(policy)
    trace.end = state_of(trainee.model)
    trace.moments = [each for found in moments_of(trainee.optimizer) for each in found.values()]
    return trace


async def _main(world: ad.World, job: Job, traces: list[Trace]) -> Trace:
    training, answer, error = _train(world, job, traces), None, None
    while True:
        try:
            found = training.throw(error) if error is not None else training.send(answer)
        except StopIteration as stopped:
            return cast(Trace, stopped.value)
        error, answer = None, found
        if hasattr(found, "__await__"):
            try:
                answer = await found
            except BaseException as raised:
                error = raised


def _blocking_main(world: Any, job: Job, traces: list[Trace]) -> Trace:
    training, answer = _train(world, job, traces), None
    while True:
        try:
            answer = training.send(answer)
        except StopIteration as stopped:
            return cast(Trace, stopped.value)


_NETWORKS: Final = {
    "slow": Network(link=Link(latency_s=0.02, bandwidth_nbytes_per_s=1e5)),
    "hosts": Network(ranks_per_host=2, link=Link(latency_s=Uniform(1e-4, 5e-3))),
}


class _Heard(logging.Handler):
    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.texts: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.texts.append(f"{record.name}: {record.getMessage()}")


@contextlib.contextmanager
def heard_warnings() -> Iterator[list[str]]:
    """Collect all Python warnings and all warnings of loggers."""
    handler, root = _Heard(), logging.getLogger()
    root.addHandler(handler)
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            yield handler.texts
        handler.texts += [f"{each.category.__name__}: {each.message}" for each in caught]
    finally:
        root.removeHandler(handler)


def run(job: Job) -> Outcome:
    """Simulate a job. The outcome's report contains the ranks' exceptions."""
    traces: list[Trace] = []
    main: Callable[..., Any] = _main if job.way == "plain" else ad.blocking.hosted(_blocking_main)
    is_killing = any(isinstance(fault, Kill) for fault in job.faults)
    with heard_warnings() as heard:
        report = simulate(
            main,
            job,
            traces,
            ranks=job.ranks,
            seed=job.seed,
            faults=job.faults,
            strict=not is_killing,
            until_s=LIMIT_S,
            network=_NETWORKS.get(job.network),
            return_exceptions=True,
        )
    return Outcome(job, report, traces, heard)
