"""Scenarios: populations of ranks under policies, drawn from one seed, and the properties that must hold.

``scenario(seed)`` draws a plan: the number of ranks, the policies with their groups and options, the times at which
ranks leave, the network, the steps and the faults. It simulates the plan and checks it after every event, inside every
step, and at the end. A violated property raises an AssertionError that names seed, rank and policy.

The expected results are computed without the code under test: averages are recomputed from the states that donors and
replacers passed to ``on_event``, and weights are compared as bytes. Metrics are small integers, so decisions do not
depend on a libm.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import math
import os
import random
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, AsyncExitStack, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final, TypeAlias
from unittest import mock

import torch
from scripts.population import same_bits

import asyncdist as ad
from asyncdist.simulation import (
    Corrupt,
    Exponential,
    Fault,
    Join,
    SimReport,
    SlowLink,
    Uniform,
    simulate,
)
from asyncdist.simulation.exploration.repro_command import repeat_line
from asyncdist.simulation.faults import KILLING
from protocols import (
    AsyncSelectiveAveragingPolicy,
    AverageAllPolicy,
    coordinate,
    parameter_stream,
)
from protocols.selective import selection
from protocols.selective.rounds import RoundCoordinator
from protocols.selective.selection import decide
from simulation.population_plan import Plan, PolicyPlan, draw_plan
from simulation.population_watch import Member, Replica, Watch, reason_kind

#: No scenario takes longer than this in virtual seconds, whatever fails in it.
VIRTUAL_TIME_MAX_S: Final = 1e6


#: Seconds for which a rank that is restarted after the others have ended waits for them.
_ADMISSION_TIMEOUT_S: Final = 100.0


# -- one run ----------------------------------------------------------------------------------------------------------


async def _main(world: ad.World, watch: Watch) -> int:
    """Run one rank's main, and return its number of steps."""
    plan = watch.plan
    watch.open(world)
    rng = random.Random(f"{plan.seed} rank {world.rank}{f' again {world.incarnation}' if world.incarnation else ''}")
    if plan.streams is not None and world.rank in plan.streams:
        world.spawn(_stream(watch, world, *plan.streams), name="the user's own streams")
    groups: dict[tuple[int, ...], ad.Group] = {world.group.ranks: world.group}
    step_count = 0
    for phase in range(plan.phases):
        step_count += await _live(watch, world, phase, groups, rng)
    return step_count


_Part: TypeAlias = tuple["Member", AsyncExitStack]


async def _live(
    watch: Watch, world: ad.World, phase: int, groups: dict[tuple[int, ...], ad.Group], rng: random.Random
) -> int:
    """Start all policies of this rank, train, and end them."""
    exit_at, how = watch.plan.exits.get(world.rank, (watch.plan.steps, "end"))
    coordinators: list[asyncio.Task[None]] = []
    async with AsyncExitStack() as everything:
        mine: list[_Part] = []
        for number, plan in enumerate(watch.plan.policies):
            if world.rank == plan.reserved:
                task = world.spawn(_coordinate(watch, world, plan), name=f"coordinator of policy {number}")
                coordinators.append(task)
            elif world.rank in plan.members:
                with _starting(watch):
                    member = await _join(watch, world, number + len(watch.plan.policies) * phase, plan, groups)
                    stack = await everything.enter_async_context(AsyncExitStack())
                    await stack.enter_async_context(member.policy)
                    watch.members.append(member)
                    mine.append((member, stack))
        for step in range(_first_step(watch, mine), exit_at):
            for member, stack in list(mine):
                if member.plan.leaves.get(world.rank) == step:
                    mine.remove((member, stack))
                    await _close(member, stack)
            if not mine:
                break
            await _train(watch, world, mine, rng)
        for member, _ in mine:
            member.check_untouched("before the policy ended")
        if how == "exit":
            sys.exit(0)
    for member, _ in mine:
        member.check_untouched("while the policy ended")
        watch.members.remove(member)
        watch.past.append(member)
    if coordinators:
        await asyncio.wait(coordinators)
    return exit_at


def _first_step(watch: Watch, mine: list[_Part]) -> int:
    """Return the first training step: a restarted rank continues where its donor was, with the donor's state."""
    first = 0
    for member, _ in mine:
        if member.world.incarnation:
            watch.seen["admitted"] += 1
            first = member.policy.iteration
            now = member.replica.flat()
            given = [state for (number, _, _), state in watch.snapshots.items() if number == member.number]
            known = any(all(same_bits(state[name], now[name]) for name in now) for state in given)
            watch.check(known, f"{member} was admitted with a state that no donor has given")
    return first


async def _stream(watch: Watch, world: ad.World, source: int, dest: int) -> None:
    """Send a user's stream alongside the policies' streams: with the same slots, but another scope."""
    sizes = random.Random(f"{watch.plan.seed} streams")
    try:
        for number in range(5):
            count = sizes.randint(0, 3000)
            if world.rank == source:
                await world.send_stream(torch.full((count,), float(number)), dest)
            else:
                found = await world.receive_stream(torch.empty(count), source)
                watch.check(bool((found == number).all()), f"stream {number} from {source} to {dest} is {found}")
                watch.seen["user's streams"] += 1
    except ad.AsyncdistError:
        if watch.plan.loses_nothing:
            raise


async def _coordinate(watch: Watch, world: ad.World, plan: PolicyPlan) -> None:
    with _starting(watch):
        await coordinate(plan.members, world=world, start_timeout_s=plan.options["start_timeout_s"])


@contextmanager
def _starting(watch: Watch) -> Iterator[None]:
    """Allow a loss to end the start of a policy; the rank then continues without the policy.

    The same applies if a damaged frame should have reported that a rank has arrived. That rank gives up, and requests
    its next start; the leader takes its two requests for starts in different orders.
    """
    try:
        yield
    except (ad.ClosedError, ad.RankLostError, ad.StartTimeoutError, ad.DisagreementError) as error:
        if isinstance(error, ad.DisagreementError) and not isinstance(error, ad.StartTimeoutError):
            is_spoiled = any(isinstance(fault, Corrupt) for fault in watch.plan.faults)
            if not is_spoiled or error.difference != "ranks":
                raise
        if watch.plan.loses_nothing:
            raise
        watch.seen["starts that a loss ended"] += 1


async def _join(
    watch: Watch, world: ad.World, number: int, plan: PolicyPlan, groups: dict[tuple[int, ...], ad.Group]
) -> Member:
    replica = Replica(float(world.rank))
    if plan.members not in groups:
        groups[plan.members] = await world.new_group(plan.members)
    member = Member(watch, number, plan, world.rank, replica, None, world)  # type: ignore[arg-type]
    options = {**plan.options, "name": plan.name, "group": groups[plan.members], "world": world}
    if world.incarnation:
        options["start_timeout_s"] = _ADMISSION_TIMEOUT_S
    options["on_event"] = member.on_event
    if plan.kind == "all":
        member.policy = AverageAllPolicy(replica.model, replica.optimizer, **options)
    else:
        options["coordinator"] = plan.reserved
        options["model_builder"] = member.build_fresh
        member.policy = member.selective = AsyncSelectiveAveragingPolicy(replica.model, replica.optimizer, **options)
    return member


async def _close(member: Member, stack: AsyncExitStack) -> None:
    member.check_untouched("before it left the policy")
    await stack.aclose()
    member.check_untouched("while it left the policy")


async def _train(
    watch: Watch,
    world: ad.World,
    mine: list[_Part],
    rng: random.Random,
) -> None:
    habits = watch.plan.habits
    for member, stack in list(mine):
        member.check_untouched("between its steps")
        if "compute" in habits and rng.random() < 0.1:
            await world.compute(member.train, rng)
        else:
            member.train(rng)
        if "nan" in habits and rng.random() < 0.03:
            member.replica.diverge()
            member.weights = member.replica.to_bytes()
        try:
            await member.step(_draw_metric(rng))
        except (ad.ClosedError, ad.RankLostError) as error:
            watch.check(member.plan.kind == "all", f"{member} got {error!r}")
            watch.seen["member gone from average_all"] += 1
            mine.remove((member, stack))
            await stack.aclose()
    if "sleep" in habits and rng.random() < 0.1:
        await world.sleep(rng.random() * 0.01)
    if "safe_point" in habits and rng.random() < 0.2:
        await world.safe_point()
    if "progress" in habits and rng.random() < 0.2:
        await world.progress()


def _draw_metric(rng: random.Random) -> Any:
    value = rng.choice((math.nan, math.inf, -math.inf)) if rng.random() < 0.03 else float(rng.randint(-4, 8))
    form = rng.random()
    if form < 0.1:
        return torch.tensor(value)
    return (lambda: value) if form < 0.2 else value


@dataclass(frozen=True, slots=True)
class Examined:
    """A scenario's outcome: the simulator's report, and the observations."""

    report: SimReport[Any]
    seen: Counter[str] = field(repr=False)


def scenario(seed: int, faults: Sequence[Fault] | None = None) -> SimReport[Any]:
    """Run and check the scenario of ``seed``, with other faults if some are passed.

    Raises:
        AssertionError: A property that must always hold was violated.
        DeadlockError: Some rank waits forever.
    """
    return examine(seed, faults).report


def examine(seed: int, faults: Sequence[Fault] | None = None) -> Examined:
    """Run :func:`scenario`, and return its observations."""
    plan = draw_plan(seed)
    if faults is not None:
        plan = replace(plan, faults=tuple(faults))
    watch = Watch(plan)
    with _chunks_of(plan.chunk_nbytes), _sharing(), _gates_watched(watch), _no_hidden_errors(watch):
        report = simulate(
            _main,
            watch,
            ranks=plan.ranks,
            seed=seed,
            network=plan.network,
            compute=plan.compute,
            faults=plan.faults,
            strict=not any(isinstance(fault, Corrupt) for fault in plan.faults),
            until_s=VIRTUAL_TIME_MAX_S,
            after_event=watch.after_event,
            return_exceptions=True,
        )
    if watch.violation is not None:
        raise watch.violation
    _check_end(watch, report)
    if plan.loses_nothing:
        _check_accounts(watch)
    _check_that_averages_come(watch)
    _count(watch, report)
    # Errors that were accepted here are not failures for `explore` either.
    results = [None if _ends_before_an_answer(plan, result) else result for result in report.results]
    return Examined(replace(report, results=tuple(results)), watch.seen)


def _check_end(watch: Watch, report: SimReport[Any]) -> None:
    plan = watch.plan
    killed = {fault.rank for fault in plan.faults if isinstance(fault, (*KILLING, Join))}  # or it has not joined yet
    for rank, result in enumerate(report.results):
        who = f"seed {plan.seed}: rank {rank}"
        if result is None:
            assert rank in killed, f"{who} had not ended after {report.virtual_time_s} s"
        elif isinstance(result, SystemExit):
            assert plan.exits.get(rank, (0, ""))[1] == "exit" and not result.code, f"{who} exited with {result.code}"
        elif isinstance(result, BaseException):
            waits = any(policy.kind == "all" for policy in plan.policies)
            if _ends_before_an_answer(plan, result):
                continue
            if plan.loses_nothing or not waits or not isinstance(result, ad.RankLostError):
                raise AssertionError(f"{who} failed: {result!r}") from result


def _ends_before_an_answer(plan: Plan, error: Any) -> bool:
    """Return whether a grant took minutes over a slowed link; a rank waits for its answer for a limited time."""
    slowed = any(isinstance(fault, SlowLink) and fault.factor >= 1000 for fault in plan.faults)
    return slowed and isinstance(error, ad.LocalProtocolError) and "stream slots" in str(error)


def _check_that_averages_come(watch: Watch) -> None:
    """Check that some rank has been replaced at the end if there were no obstacles."""
    plan = watch.plan
    compute = plan.compute
    hindered = bool(plan.faults or plan.exits or compute.factors)
    hindered = hindered or compute.pause_probability > 0 or bool(compute.overrun_probability)
    if hindered or "nan" in plan.habits or isinstance(plan.network.link.latency_s, (Uniform, Exponential)):
        return
    replaced: Counter[int] = Counter()
    for member in (*watch.past, *watch.members):
        if member.selective is not None:
            replaced[member.number % len(plan.policies)] += member.selective.statistics().replacement_count
    for number, policy in enumerate(plan.policies):
        options = policy.options
        needed = 5 * options["average_every"] + 4 * len(policy.members)
        if policy.kind == "all" or policy.leaves or len(policy.members) < 2 or plan.steps < needed:
            continue
        is_quick = options["grace_s"] <= 0.002 and options["round_timeout_s"] == 30.0
        acts = options["threshold"] is None and options["replacement_ratio"] > 0
        if is_quick and acts and options["max_report_age_s"] >= 600.0:
            watch.seen["populations in which averages had to come"] += 1
            assert replaced[number] > 0, f"seed {plan.seed}: policy {number} replaced no rank in {plan.steps} steps"


def _check_accounts(watch: Watch) -> None:
    """Check that without losses the coordinator's count of averages is the sum of its members' counts.

    A replaced coordinator may not know the last averages.
    """
    applied: Counter[tuple[int, int]] = Counter()
    counted: Counter[tuple[int, int]] = Counter()
    replaced: set[int] = set()
    for member in (*watch.past, *watch.members):
        if member.selective is None or member.selective.is_alone:
            continue
        statistics = member.selective.statistics()
        applied[member.number, member.rank] = statistics.replacement_count
        if statistics.epoch:
            replaced.add(member.number)
        coordinator = statistics.coordinator
        if coordinator is not None:
            counted.update({(member.number, rank): count for rank, count in coordinator.applied.items()})
            assert coordinator.rounds_decided - coordinator.rounds_ended in (0, 1), f"rounds overlap: {coordinator}"
    led = {number for number, _ in counted}
    for (number, rank), count in applied.items():
        known = counted[number, rank]
        assert number not in led or known == count or (number in replaced and known < count), (
            f"seed {watch.plan.seed}: policy {number}: rank {rank} applied {count} averages, but its "
            f"coordinators counted {known}"
        )


def _count(watch: Watch, report: SimReport[Any]) -> None:
    seen = watch.seen
    for fault, fired in zip(report.faults, report.faults_fired, strict=True):
        seen[f"fault {type(fault).__name__}"] += bool(fired)
    for member in (*watch.past, *watch.members):
        if not isinstance(member.policy, AsyncSelectiveAveragingPolicy) or member.policy.is_alone:
            continue
        statistics = member.policy.statistics()
        for reason, count in statistics.abandoned.items():
            seen[f"abandoned: {reason_kind(reason)}"] += count
        for reason, count in statistics.declined.items():
            seen[f"declined: {reason_kind(reason)}"] += count
        seen["parts of a mean added up"] += statistics.reduction_count
        seen["parts of a mean asked of the donors"] += statistics.reasked_count
        if statistics.coordinator is not None:
            seen["rounds"] += statistics.coordinator.rounds_decided
            if statistics.epoch:
                seen["rounds after a takeover"] += statistics.coordinator.rounds_ended
            for left in statistics.coordinator.left_out:
                seen[f"left out: {reason_kind(left.reason)}"] += 1
    for statistics_ in report.statistics:
        for why, count in (statistics_.dropped if statistics_ is not None else {}).items():
            seen[f"dropped: {why if 'CRC' in why or 'closed' in why else 'other'}"] += count


@contextmanager
def _chunks_of(nbytes: int) -> Iterator[None]:
    """Let tiny models be sent in several chunks, too."""
    with mock.patch.object(parameter_stream.messages, "CHUNK_NBYTES", nbytes):
        yield


def _sharing() -> AbstractContextManager[Any]:
    """Let replacers of one host share tiny models, too."""
    return mock.patch.object(selection, "SHARED_NBYTES_MIN", 0)


@contextmanager
def _gates_watched(watch: Watch) -> Iterator[None]:
    """Count how often each gate of the decision made a difference."""
    judge, end = RoundCoordinator._judge, RoundCoordinator._end
    ended_at: dict[RoundCoordinator, float] = {}

    def watched(self: RoundCoordinator, sends: list[Any], now: float) -> None:
        options, seen = self._rules, watch.seen
        live = [self._members[rank] for rank in self.roster.live_ranks()]
        known = {r: m.report for r, m in self._members.items() if m.live and m.report is not None}
        metrics = {r: e.value for r, e in known.items() if now - e.received_at <= options.max_report_age_s}
        seen["gate max_report_age_s"] += len(metrics) < len(known)
        seen["gate grace_s"] += not all(member.fresh for member in live)
        seen["gate quorum"] += 0 < options.quorum < 1 and not all(member.fresh for member in live)
        decision = decide(metrics, options)
        if options.threshold is not None:
            seen["gate threshold"] += decision is None and decide(metrics, replace(options, threshold=None)) is not None
            seen["gate cooldown"] += decision is not None and self._is_cooling_down()
        watch.check(self._lifecycle.current is None, "a round was decided while another one was in progress")
        if (deadline := self._patience.deadline) is not None:
            due_at = max(deadline, ended_at.get(self, 0.0))
            watch.check_in_time(due_at, now, "a decision")
        decided = self._lifecycle.decided_count
        judge(self, sends, now)
        watch.check(
            self._lifecycle.decided_count == decided or self._lifecycle.current is not None,
            "a round was counted but did not begin",
        )

    def end_watched(self: RoundCoordinator, sends: list[Any], state: Any, reason: str, now: float) -> None:
        ended_at[self] = now
        watch.check_in_time(state.deadline, now, f"round {state.number} ended, {reason},")
        end(self, sends, state, reason, now)

    RoundCoordinator._judge = watched  # type: ignore[method-assign]
    RoundCoordinator._end = end_watched  # type: ignore[method-assign]
    try:
        yield
    finally:
        RoundCoordinator._judge = judge  # type: ignore[method-assign]
        RoundCoordinator._end = end  # type: ignore[method-assign]


class _Listener(logging.Handler):
    def __init__(self, watch: Watch) -> None:
        super().__init__(logging.ERROR)
        self._watch = watch

    def emit(self, record: logging.LogRecord) -> None:
        with contextlib.suppress(AssertionError):
            self._watch.check(False, f"an error that no task awaits: {record.getMessage()}: {record.exc_info}")


@contextmanager
def _no_hidden_errors(watch: Watch) -> Iterator[None]:
    """Check that a loop has logged no error, such as the exception of a task that no code retrieved."""
    errors, listener = logging.getLogger("asyncdist.simulation"), _Listener(watch)
    quiet = [logging.getLogger(name) for name in ("asyncdist", "protocols")]
    levels = [logger.level for logger in quiet]
    errors.addHandler(listener)
    for logger in quiet:
        logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        errors.removeHandler(listener)
        for logger, level in zip(quiet, levels, strict=True):
            logger.setLevel(level)


@dataclass(frozen=True, slots=True)
class Recorder:
    """A scenario for ``explore`` that records its observations: one line of JSON per seed, one file per process.

    Attributes:
        folder: Folder of the files.
    """

    folder: str

    def __call__(self, seed: int, faults: Sequence[Fault] | None = None) -> SimReport[Any]:
        """Run :func:`scenario`."""
        examined = examine(seed, faults)
        if faults is None:
            with (Path(self.folder) / f"{os.getpid()}.jsonl").open("a") as file:
                file.write(json.dumps({"seed": seed, **examined.seen}) + "\n")
        return examined.report

    def repeat_line(self, seed: int, faults: Sequence[Fault] | None) -> str:
        """Return the command that repeats a seed without this recorder."""
        return repeat_line(scenario, seed, faults)

    def seen(self) -> Counter[str]:
        """Return the sum of the observations of all seeds so far."""
        total: Counter[str] = Counter()
        for path in Path(self.folder).glob("*.jsonl"):
            for line in path.read_text().splitlines():
                total.update({key: count for key, count in json.loads(line).items() if key != "seed"})
        return total
