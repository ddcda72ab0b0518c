"""Tests calling and leaving a policy: ported calls, a forgotten await, wrapped models, and memory afterwards."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import pickle
import sys
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from scripts.population import Mixed, sgd
from support.facts import naming
from support.torch_groups import pretend_initialized
from torch import nn

import asyncdist as ad
from asyncdist.protocols import misuse
from asyncdist.simulation import simulate
from protocols import (
    AsyncSelectiveAveragingPolicy,
    AverageAllPolicy,
    OneSidedSelectiveAveragingPolicy,
    ReplayBuffer,
    SpawnPolicy,
)

POLICIES: dict[str, Callable[..., SpawnPolicy]] = {
    "selective": AsyncSelectiveAveragingPolicy,
    "one-sided": lambda *args, **options: OneSidedSelectiveAveragingPolicy(
        *args, replacement_mode="worst_ratio", **options
    ),
    "average-all": AverageAllPolicy,
}


@dataclass(frozen=True)
class Ask:
    """A request."""


@dataclass(frozen=True)
class Answer:
    """A reply."""


def ported(policy_of: Callable[..., SpawnPolicy], numbers: list[Any], **options: Any) -> list[int]:
    """Return, for each call, the iteration at which rank 0 of two changed its weights; the ranks step in turn."""
    barrier = asyncio.Barrier(2)

    async def main(world: ad.World) -> list[int]:
        model = Mixed(float(world.rank))
        optimizer, applied = sgd(model), []
        async with policy_of(model, optimizer, **options) as policy:
            for place, number in enumerate(numbers):
                _, _, info = await policy(number, model, optimizer, float(world.rank))
                if info["averaged_this_iteration"]:
                    applied.append(place)
                await barrier.wait()
        return applied

    return ad.run_local(main, ranks=2, strict=True)[0]


@pytest.mark.slow
@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("threshold", [None, 0.5])
def test_averaging_continues_if_iterations_restart_each_epoch(policy: str, threshold: float | None) -> None:
    """Regression: four epochs had 19, 2, 2 and 2 replacements; with a threshold they had 5, 0, 0 and 0."""
    if threshold is not None and policy != "selective":
        pytest.skip("an option of selective averaging")
    options = {} if threshold is None else {"threshold": threshold, "cooldown": 8}
    applied = ported(POLICIES[policy], [*range(60)] * 4, average_every=2, **options)
    counts = np.bincount([place // 60 for place in applied], minlength=4)
    assert min(counts) >= 0.7 * max(counts) >= 2, counts


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("kind", [np.int64, np.int32, torch.tensor])
def test_iterations_may_be_of_numpy_or_tensors(policy: str, kind: Any) -> None:
    assert ported(POLICIES[policy], [kind(number) for number in range(40)], average_every=2)


@pytest.mark.parametrize("policy", POLICIES)
def test_calls_at_multiples_of_the_cadence_are_due(policy: str) -> None:
    """Regression: iteration i is due if i + 1 is a multiple, so calls at the multiples themselves never averaged."""
    assert len(ported(POLICIES[policy], [*range(0, 400, 10)], average_every=10)) >= 5


def test_due_steps_are_unchanged_if_no_iteration_is_skipped() -> None:
    assert ported(AverageAllPolicy, [*range(10), *range(7), 6, 7, 8], average_every=4) == [3, 7, 13, 18]


def test_epochs_that_are_shorter_than_the_cadence_count_together() -> None:
    """Regression: no iteration number of a short epoch is due, so such scripts silently never averaged."""
    assert ported(AverageAllPolicy, [*range(5)] * 6, average_every=10) == [10, 20]
    assert ported(AverageAllPolicy, [*range(1, 8)] * 6, average_every=10) == [14, 28]
    assert ported(AverageAllPolicy, [*range(5), *range(12), *range(5), *range(12)], average_every=10) == [14, 31]
    assert ported(AverageAllPolicy, [0] * 35, average_every=10) == [10, 20, 30], (
        "an epoch of one batch must count as one step"
    )


def test_a_ported_call_before_the_start_is_refused_as_a_step_is() -> None:
    async def main(world: ad.World) -> None:
        model = Mixed(float(world.rank))
        optimizer = sgd(model)
        policy = AverageAllPolicy(model, optimizer, average_every=1)
        with pytest.raises(ad.ClosedError, match="AverageAllPolicy"):
            await policy(0, model, optimizer, group=world.group)

    ad.run_local(main, ranks=2, strict=True)


@pytest.mark.parametrize("number", [-1, 1.5, "3", None, True])
def test_what_is_no_iteration_is_refused(number: Any) -> None:
    with pytest.raises(ValueError, match=naming("iteration", repr(number), 0)):
        ported(AverageAllPolicy, [number], average_every=1)


@pytest.mark.parametrize("call", ["step", "ported"])
def test_policy_whose_steps_are_never_awaited_reports_the_line(call: str) -> None:
    """Regression: the run ended with exit code 0 without having averaged."""

    async def main(world: ad.World) -> None:
        model = Mixed(float(world.rank))
        optimizer = sgd(model)
        async with AsyncSelectiveAveragingPolicy(model, optimizer, average_every=1) as policy:
            for number in range(3):
                coroutine: Any = policy.step(1.0) if call == "step" else policy(number, model, optimizer, 1.0)
                coroutine.close()  # otherwise Python warns of each coroutine, too

    with pytest.warns(RuntimeWarning, match=r"no step\(\) of this policy was awaited") as caught:
        ad.run_local(main, ranks=2)
    lines = Path(__file__).read_text().splitlines()
    line = next(number for number, text in enumerate(lines, 1) if "coroutine: Any = policy" in text)
    assert {(warning.filename, warning.lineno) for warning in caught} == {(__file__, line)}


def test_a_third_step_without_await_is_refused(recwarn: pytest.WarningsRecorder) -> None:
    """Regression: the whole training ran, and then Python warned of a coroutine of asyncdist."""

    async def main(world: ad.World) -> int:
        model = Mixed(float(world.rank))
        async with AsyncSelectiveAveragingPolicy(model, sgd(model), average_every=1) as policy:
            for number in range(4):
                try:
                    policy.step(1.0)  # type: ignore[unused-coroutine]
                except TypeError as error:
                    assert f"await at line {line} of {__file__}" in str(error)
                    return number
        return -1

    lines = Path(__file__).read_text().splitlines()
    line = next(number for number, text in enumerate(lines, 1) if "unused-coroutine" in text)
    assert ad.run_local(main, ranks=2) == [2, 2]
    assert not [each for each in recwarn if "never awaited" in str(each.message)]


def test_a_step_that_is_cancelled_before_it_begins_was_used() -> None:
    async def main(world: ad.World) -> int:
        model = Mixed(float(world.rank))
        async with AsyncSelectiveAveragingPolicy(model, sgd(model), average_every=1) as policy:
            for _ in range(2):
                task = asyncio.ensure_future(policy.step(1.0))
                task.cancel()
                with pytest.raises(asyncio.CancelledError):
                    await task
            await policy.step(1.0)
            return policy.iteration

    assert ad.run_local(main, ranks=2) == [1, 1]


def test_one_step_may_fail_before_it_is_awaited() -> None:
    """For example, another argument of ``asyncio.gather`` raises an error, and the program tries again."""

    async def main(world: ad.World) -> int:
        model = Mixed(float(world.rank))
        async with AsyncSelectiveAveragingPolicy(model, sgd(model), average_every=1) as policy:
            for number in range(3):
                with contextlib.suppress(ZeroDivisionError):
                    await asyncio.gather(policy.step(1.0), asyncio.sleep(1 / number))
            return policy.iteration

    assert ad.run_local(main, ranks=2) == [2, 2]


def test_a_policy_without_any_step_warns_of_nothing() -> None:
    async def main(world: ad.World) -> None:
        model = Mixed(float(world.rank))
        async with AsyncSelectiveAveragingPolicy(model, sgd(model), average_every=1):
            pass

    ad.run_local(main, ranks=2, strict=True)


@pytest.mark.parametrize("policy", ["selective", "one-sided"])
def test_statistics_are_available_while_the_start_waits(policy: str) -> None:
    """Regression: a task that read them before the policy was entered ended the job with AttributeError."""
    asked = asyncio.Event()

    async def main(world: ad.World) -> None:
        model = nn.Linear(2, 2)
        made = POLICIES[policy](model, sgd(model), average_every=2)
        assert isinstance(made, AsyncSelectiveAveragingPolicy | OneSidedSelectiveAveragingPolicy)

        before = made.statistics()

        async def show() -> None:
            assert made._stage == "starting"
            assert made.statistics() == before
            asked.set()

        if world.rank == 0:
            world.spawn(show())
        else:
            await asked.wait()
        async with made:
            assert made.statistics().received_nbytes == 0

    ad.run_local(main, ranks=2)


@pytest.mark.slow
@pytest.mark.parametrize("policy", POLICIES)
def test_policy_that_was_left_keeps_neither_model_nor_buffers(policy: str) -> None:
    """Regression: each policy stayed in memory until the world closed, with its model, snapshots and accumulators."""

    async def use(world: ad.World) -> list[weakref.ref[Any]]:
        model = Mixed(float(world.rank))
        policy_ = POLICIES[policy](model, sgd(model), average_every=1)
        async with policy_:
            for _ in range(40):
                await policy_.step(float(world.rank))
                await world.safe_point()
        return [weakref.ref(model), weakref.ref(policy_), weakref.ref(model.embed.weight)]

    async def main(world: ad.World) -> list[bool]:
        references = await use(world)
        await ad.barrier()
        for _ in range(20):
            await world.safe_point()
        gc.collect()
        return [reference() is None for reference in references]

    assert ad.run_local(main, ranks=2, strict=True) == [[True] * 3] * 2


def test_what_a_policy_prints() -> None:
    """Regression: the repr of a blocking policy showed an object's address in nested brackets."""

    async def main(world: ad.World) -> list[str]:
        model = Mixed(float(world.rank))
        policy = AsyncSelectiveAveragingPolicy(
            model, sgd(model), average_every=2, quorum=1.0, grace_s=30.0, name="mine"
        )
        printed = [repr(policy)]
        async with policy:
            for _ in range(3):
                await policy.step(float(world.rank))
            printed.append(repr(policy))
        return [*printed, repr(ad.blocking.policy(AverageAllPolicy(model, sgd(model), average_every=2)))]

    for rank, (first, then, blocking) in enumerate(ad.run_local(main, ranks=2)):
        assert first == "<AsyncSelectiveAveragingPolicy 'mine', not started, iteration 0>"
        assert then.startswith(f"<AsyncSelectiveAveragingPolicy 'mine', rank {rank}, iteration 3")
        assert blocking == "<AverageAllPolicy, not started, iteration 0, blocking>"


class Wrapped(nn.parallel.DistributedDataParallel):
    """DDP without the process group that it usually needs."""

    def __init__(self, module: nn.Module) -> None:
        nn.Module.__init__(self)
        self.module = module


@pytest.mark.slow
@pytest.mark.parametrize(
    "policy", [pytest.param(name, marks=[pytest.mark.long] * (name != "selective")) for name in POLICIES]
)
def test_a_model_that_ddp_keeps_equal_is_refused(policy: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Regression: replicas diverged silently. DDP's inner module is refused too, as trainers wrap models silently."""
    model = nn.Sequential(nn.Linear(2, 2))
    wrapped = Wrapped(model)
    for outer in (wrapped, nn.Sequential(wrapped)):
        with pytest.raises(ValueError, match="model must not be wrapped in DistributedDataParallel"):
            POLICIES[policy](outer, sgd(model), average_every=1)
    pretend_initialized(monkeypatch)

    async def main(world: ad.World) -> None:
        inside = model if world.rank == 0 else nn.Sequential(nn.Linear(2, 2))
        async with POLICIES[policy](inside, sgd(inside), average_every=1, start_timeout_s=5.0):
            pass

    with pytest.raises(ad.LocalProtocolError, match="model must not be inside DistributedDataParallel"):
        ad.run_local(main, ranks=2)
    assert wrapped.module is model


def start_beside(model: nn.Module) -> None:
    """Start a policy on two ranks, the first of which uses this model."""

    async def main(world: ad.World) -> None:
        own = model if world.rank == 0 else nn.Linear(2, 2)
        async with AverageAllPolicy(own, sgd(own), average_every=1, start_timeout_s=5.0):
            pass

    ad.run_local(main, ranks=2)


class Trainer:
    """Wraps a model and refers to itself, as trainers with callbacks do."""

    def __init__(self, model: nn.Module) -> None:
        self.wrapped = Wrapped(nn.Sequential(model))
        self.callbacks = [self]


@pytest.mark.slow
@pytest.mark.long
def test_model_of_a_deleted_trainer_is_outside_any_wrapper(monkeypatch: pytest.MonkeyPatch) -> None:
    """Regression: a deleted trainer in a reference cycle made its model refused until the cycle was collected."""
    pretend_initialized(monkeypatch)
    model = nn.Linear(2, 2)
    gc.disable()
    try:
        trainer = Trainer(model)
        with pytest.raises(ad.LocalProtocolError, match="DistributedDataParallel"):
            start_beside(model)
        wrapped = weakref.ref(trainer.wrapped)
        del trainer
        assert wrapped() is not None, "the model must be in a reference cycle, otherwise the test tests nothing"
        start_beside(model)
    finally:
        gc.enable()


def test_a_wrapper_that_is_older_than_the_world_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """A launched rank freezes existing objects in the garbage collector, which once hid them from the search.

    Collecting the millions of objects that are frozen here would take seconds, and is not needed to find the wrapper.
    """
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(gc, "collect", lambda: 0)
    model = nn.Linear(2, 2)
    wrapped = Wrapped(model)
    gc.freeze()
    try:
        with pytest.raises(ad.LocalProtocolError, match="DistributedDataParallel"):
            start_beside(model)
    finally:
        gc.freeze()
    assert wrapped.module is model


@pytest.mark.slow
@pytest.mark.long
def test_wrappers_whose_constructor_has_not_run_are_looked_over(monkeypatch: pytest.MonkeyPatch) -> None:
    """Regression: every start of a policy raised AttributeError if a wrapper without modules existed."""
    pretend_initialized(monkeypatch)
    bare = Wrapped.__new__(Wrapped)
    half = Wrapped(nn.Linear.__new__(nn.Linear))
    start_beside(nn.Linear(2, 2))
    model = nn.Linear(2, 2)
    half.other = nn.Sequential(model)
    with pytest.raises(ad.LocalProtocolError, match="DistributedDataParallel"):
        start_beside(model)
    assert type(bare) is Wrapped


def test_the_process_is_searched_for_wrappers_once_at_each_start(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend_initialized(monkeypatch)
    searches = 0

    def search(*kinds: type) -> list[Any]:
        nonlocal searches
        searches += nn.parallel.DistributedDataParallel in kinds
        return []

    async def main(world: ad.World) -> None:
        model = nn.Linear(2, 2)
        async with AverageAllPolicy(model, sgd(model), average_every=2) as policy:
            for _ in range(6):
                await policy.step(0.0)

    monkeypatch.setattr(gc, "get_referrers", search)
    ad.run_local(main, ranks=2)
    assert searches == 2


@pytest.mark.parametrize("policy", ["selective", "one-sided"])
@pytest.mark.parametrize("callback", ["on_event", "model_builder"])
def test_averaging_continues_after_a_callbacks_caught_exception(policy: str, callback: str) -> None:
    """Regression: a round waited until its deadline for the rank whose callback raised, a one-sided average forever."""

    def build() -> nn.Module:
        return nn.Linear(2, 2)

    async def main(world: ad.World) -> tuple[int, int]:
        calls = 0

        def fail_twice(*_: Any) -> nn.Module:
            nonlocal calls
            calls += 1
            if calls in (2, 3):
                raise ArithmeticError(callback)
            return build()

        model = build()
        options: dict[str, Any] = {callback: fail_twice}
        if callback == "model_builder":
            options["averaging_strategy"] = "reset_weights"
        replaced = caught = 0
        async with POLICIES[policy](model, sgd(model), average_every=5, **options) as member:
            for _ in range(100):
                await asyncio.sleep(0.01)
                try:
                    replaced += bool(await member.step(float(world.rank)))
                except ArithmeticError:
                    caught += 1
        return replaced, caught

    results: Any = simulate(main, ranks=3, strict=True).results
    assert results[0][0] > 10, "the worst rank must be replaced in most of its 20 reports"
    assert results[0][1] == 2


def test_step_before_the_start_is_refused_at_the_call() -> None:
    """Regression: blocking code got a warning about a coroutine in a line of this package."""
    model = Mixed(0.0)
    policy = AverageAllPolicy(model, sgd(model), average_every=1)
    with pytest.raises(ad.ClosedError, match=r"with asyncdist.blocking.policy\(AverageAllPolicy\(...\)\) as policy"):
        policy.step(1.0)  # type: ignore[unused-coroutine]


def test_with_in_place_of_async_with_is_told_what_to_write() -> None:
    model = Mixed(0.0)
    policy = AverageAllPolicy(model, sgd(model), average_every=1)
    with pytest.raises(TypeError, match=r"write async with AverageAllPolicy\(...\)"), policy:
        pass


def test_a_single_step_without_await_is_told_once() -> None:
    async def main(_: ad.World) -> None:
        model = Mixed(0.0)
        async with AverageAllPolicy(model, sgd(model), average_every=1) as policy:
            policy.step(1.0)  # type: ignore[unused-coroutine]

    with pytest.warns(RuntimeWarning) as caught:
        ad.run_local(main, ranks=1)
    assert "no step" in str(caught[0].message)
    line = (
        Path(__file__).read_text().splitlines().index("            policy.step(1.0)  # type: ignore[unused-coroutine]")
    )
    assert [(warning.filename, warning.lineno) for warning in caught] == [(__file__, line + 1)]


@pytest.mark.parametrize("policy", POLICIES)
def test_leaving_what_is_not_open_does_nothing(policy: str) -> None:
    """The calls are made by hand, as in a ``finally``.

    Regression: before the start they raised AttributeError, and ValueErrors later.
    """

    async def main(world: ad.World) -> bool:
        model, calls = Mixed(0.0), ad.Calls(Ask, Answer, tag=50)
        entered, missed = (POLICIES[policy](model, sgd(model), average_every=1, start_timeout_s=0.1) for _ in range(2))
        buffer = ReplayBuffer(0, start_timeout_s=0.1)
        contexts: list[Any] = [entered, calls, buffer]
        for context in contexts:
            await context.__aexit__(None, None, None)
        for context in contexts[:2]:
            await context.__aenter__()
        for context in contexts[:2] * 2:
            await context.__aexit__(None, None, None)
        if world.rank == 0:
            for context in (missed, buffer):
                with pytest.raises((ad.ClosedError, ad.StartTimeoutError)):
                    await context.__aenter__()
                await context.__aexit__(None, None, None)
        return True

    assert simulate(main, ranks=2).results == (True, True)


@pytest.mark.parametrize("policy", POLICIES)
def test_a_main_that_is_thrown_away_touches_no_weights(policy: str) -> None:
    """At the interpreter's end torch clears tensors before main is collected.

    Regression: a replay ended with SIGABRT.
    """

    async def main(world: ad.World) -> list[str]:
        kinds: list[str] = []
        world.services.events.sink = lambda _time_s, kind, _fields: kinds.append(kind)
        model = Mixed(0.0)

        async def train() -> None:
            async with POLICIES[policy](model, sgd(model), average_every=1):
                await asyncio.Event().wait()

        training = train()
        while "policy" not in kinds:
            training.send(None)
            await asyncio.sleep(0)
        training.close()
        return kinds

    assert "closed" not in simulate(main, ranks=1).results[0]


@pytest.mark.parametrize("policy_of", [*POLICIES.values()], ids=[*POLICIES])
def test_a_policy_can_be_pickled_before_it_starts(policy_of: Callable[..., SpawnPolicy]) -> None:
    """Regression: a selective policy raised AttributeError about a WeakKeyDictionary."""

    async def main(world: ad.World) -> list[float]:
        model = Mixed(float(world.rank))
        policy = pickle.loads(pickle.dumps(policy_of(model, sgd(model), average_every=2)))
        async with policy:
            for _ in range(6):
                await (policy.step() if isinstance(policy, AverageAllPolicy) else policy.step(float(world.rank)))
            with pytest.raises(TypeError, match=r"entered .*state_dict\(\)"):
                pickle.dumps(policy)
        return [parameter.mean().item() for parameter in policy.model.parameters()]

    first, second = simulate(main, ranks=2, strict=True).results
    assert first == second and 0.0 not in first


#: Programs of one rank without a launcher. Each opens its world in a different way, and starts two policies.
UNLAUNCHED = {
    "run": "ad.run(train)",
    "partial": "ad.run(functools.partial(train))",
    "blocking.run": "ad.blocking.run(blocking_train)",
    "blocking partial": "ad.blocking.run(functools.partial(blocking_train))",
    "blocking.open_world": "with ad.blocking.open_world() as world:\n    blocking_train(world)",
    "blocking.policy": "blocking_train()",
    "open_world": "asyncio.run(open_and_train())",
}


@pytest.mark.parametrize("module, count", [("__main__", 1), ("library", 0)])
@pytest.mark.parametrize("kind", UNLAUNCHED)
def test_a_program_without_a_launcher_is_warned_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, kind: str, module: str, count: int
) -> None:
    """Regression: only ``ad.run(train)`` said that nothing is averaged."""
    program = """
import asyncio, functools
import asyncdist as ad

async def train(world):
    for _ in range(2):
        async with policy():
            pass

def blocking_train(world=None):
    for _ in range(2):
        with ad.blocking.policy(policy()):
            pass

async def open_and_train():
    async with ad.open_world() as world:
        await train(world)

"""
    model = Mixed(1.0)
    monkeypatch.setattr(misuse, "_warned", set())
    monkeypatch.setattr(sys, "argv", ["train.py"])
    names = {"__name__": module, "policy": lambda: AverageAllPolicy(model, sgd(model), average_every=1)}
    exec(program + UNLAUNCHED[kind], names)
    told = [record for record in caplog.records if "trains alone" in record.getMessage()]
    assert len(told) == count
