"""Tests user errors: each raises one clear error that names the value and the allowed ones, and leaves nothing behind.

The peers' message counts stay zero, which shows that the error precedes any report or weight. The errors of
``asyncdist run`` are tested in ``unit/test_launch.py``, tensors that cannot be averaged in ``unit/test_flat.py``.
"""

from __future__ import annotations

import asyncio
import functools
import gc
import math
import re
import sys
import types
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from scripts.population import Mixed, clone_state, equal_states, sgd
from support.facts import names, naming
from support.local import run
from torch import nn

import asyncdist as ad
from protocols import AsyncSelectiveAveragingPolicy, AverageAllPolicy, OneSidedSelectiveAveragingPolicy

# -- options ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "facts"),
    [
        ({"replacement_ratio": 1.5}, ["replacement_ratio", "1.5", "0", "1"]),
        ({"momentum": 1.01}, ["momentum", "1.01", "0", "1"]),
        ({"momentum": -1}, ["momentum", "-1", "0", "1"]),
        ({"momentum": math.nan}, ["momentum", "nan", "0", "1"]),
        ({"momentum": None}, ["momentum", "None", "0", "1"]),
        ({"average_every": 0}, ["average_every", "0", "1"]),
        ({"average_every": -5}, ["average_every", "-5", "1"]),
        ({"average_every": 2.0}, ["average_every", "2.0"]),
        ({"average_every": True}, ["average_every", "True"]),
        ({"averaging_strategy": "median"}, ["averaging_strategy", "'median'", "'mean'", "'reset_weights'"]),
        ({"metric_mode": "maximum"}, ["metric_mode", "'maximum'", "'max'", "'min'"]),
        ({"route": "ring"}, ["route", "'ring'", "'auto', 'direct', 'sharded'"]),
        ({"islands": 0}, ["islands", "0", "1", "None"]),
        ({"islands": 2.0}, ["islands", "2.0"]),
        ({"island_size": 1}, ["island_size", "1", "2", "None"]),
        ({"island_size": True}, ["island_size", "True"]),
        ({"islands": 2, "island_size": 4}, ["islands", "2", "island_size", "4", "only one of"]),
        ({"islands": 2, "migrate_every": 0}, ["migrate_every", "0", "1"]),
        ({"islands": 2, "migration": "star"}, ["migration", "'star'", "'ring', 'random'"]),
        ({"migrate_every": 10}, ["migrate_every", "10", "None unless islands or island_size is set"]),
        ({"migration": "ring"}, ["migration", "'ring'", "None unless"]),
        ({"islands": 2, "coordinator": 0}, ["coordinator", "0", "None with islands"]),
        ({"island_size": 2, "successors": [1]}, ["successors", "[1]", "None with"]),
        (
            {"islands": 2, "averaging_strategy": "reset_weights", "model_builder": lambda: nn.Linear(1, 1)},
            ["averaging_strategy", "'reset_weights'", "with islands"],
        ),
        ({"optimizer_state": "drop"}, ["optimizer_state", "'drop'", "'keep', 'reset'"]),
        ({"averaging_strategy": "reset_weights"}, ["reset_weights", "model_builder"]),
        ({"model_builder": 3}, ["model_builder", "3", "callable"]),
        ({"metric": 3.0}, ["metric", "3.0"]),
        ({"threshold": math.nan}, ["threshold", "nan", "finite"]),
        ({"cooldown": -1}, ["cooldown", "-1", "0"]),
        ({"quorum": 2}, ["quorum", "2", "0", "1"]),
        ({"grace_s": -1}, ["grace_s", "-1", "0"]),
        ({"max_report_age_s": 0}, ["max_report_age_s", "0"]),
        ({"round_timeout_s": 0}, ["round_timeout_s", "0"]),
        ({"start_timeout_s": 0}, ["start_timeout_s", "0"]),
        ({"start_timeout_s": math.inf}, ["start_timeout_s", "inf"]),
        ({"drain_timeout_s": -2}, ["drain_timeout_s", "-2", "0"]),
        ({"drain_timeout_s": math.inf}, ["drain_timeout_s", "inf"]),
        ({"on_event": 7}, ["on_event", "7"]),
        ({"name": 7}, ["name", "7", "string"]),
        ({"name": "x" * 70_000}, ["name", "...", "a string of up to 200 characters"]),
        ({"group": [0, 1]}, ["group", "[0, 1]", "Group"]),
        ({"group": "x"}, ["group", "'x'", "Group"]),
        ({"world": 3}, ["world", "3", "World"]),
        ({"coordinator": 1.0}, ["coordinator", "1.0", "0", "None"]),
        ({"coordinator": True}, ["coordinator", "True"]),
        ({"coordinator": "0"}, ["coordinator", "'0'"]),
        ({"coordinator": -1}, ["coordinator", "-1", "0"]),
    ],
    ids=lambda value: "-".join(f"{k}={v}" for k, v in value.items()) if isinstance(value, dict) else "",
)
def test_policy_refuses_an_option_out_of_range(options: dict[str, Any], facts: list[str]) -> None:
    model = Mixed()
    with pytest.raises((ValueError, TypeError)) as caught:
        AsyncSelectiveAveragingPolicy(model, sgd(model), **{"average_every": 1, **options})
    assert names(caught.value, *facts), caught.value


@pytest.mark.parametrize("ranks", [1, 2])
def test_policy_refuses_a_coordinator_that_is_not_a_rank(ranks: int) -> None:
    async def main(world: ad.World) -> None:
        model = Mixed()
        policy = AsyncSelectiveAveragingPolicy(model, sgd(model), average_every=1, coordinator=ranks)
        with pytest.raises(ValueError, match=naming("coordinator", ranks, 0, ranks - 1)):
            async with policy:
                pass

    run(main, ranks)


def test_whole_numbers_of_numpy_are_counts() -> None:
    model = Mixed()
    policy = AsyncSelectiveAveragingPolicy(model, sgd(model), average_every=np.int64(5), cooldown=np.int32(7))  # type: ignore[arg-type]
    assert type(policy.average_every) is int and policy.average_every == 5
    assert ad.run(nothing, transport="local", ranks=np.int64(2)) is None  # type: ignore[arg-type]


@pytest.mark.parametrize("options", [{"average_every": 0}, {"optimizer_state": "x"}, {"start_timeout_s": -1}])
def test_the_other_policy_refuses_them_too(options: dict[str, Any]) -> None:
    model = Mixed()
    with pytest.raises(ValueError, match=naming(*options, *map(repr, options.values()))):
        AverageAllPolicy(model, sgd(model), **{"average_every": 1, **options})


def holding(tensor: torch.Tensor) -> nn.Module:
    model = nn.Linear(2, 2)
    model.register_buffer("strange", tensor)
    return model


@pytest.mark.parametrize(
    ("build", "facts"),
    [
        (nn.Identity, ["Identity", "parameters", "buffers"]),
        (lambda: [1, 2], ["model", "list", "torch.nn.Module"]),
        (lambda: holding(torch.eye(3).to_sparse()), ["'strange'", "sparse"]),
    ],
    ids=["empty", "no-module", "sparse"],
)
def test_a_model_that_cannot_be_averaged_is_refused_by_name(build: Callable[[], Any], facts: list[str]) -> None:
    optimizer = sgd(nn.Linear(1, 1))
    for policy_class in (AsyncSelectiveAveragingPolicy, AverageAllPolicy):
        with pytest.raises((TypeError, ValueError)) as caught:
            policy_class(build(), optimizer, average_every=1)
        assert names(caught.value, *facts), caught.value


def test_an_optimizer_of_another_model_is_refused() -> None:
    model, other = nn.Linear(2, 3), nn.Linear(5, 7)
    with pytest.raises(ValueError, match=naming("(7, 5)", "param_groups[0]['params'][0]")):
        AsyncSelectiveAveragingPolicy(model, sgd(other), average_every=1)
    with pytest.raises(TypeError, match=r"optimizer must be a torch\.optim\.Optimizer, got a Linear"):
        AsyncSelectiveAveragingPolicy(model, other, average_every=1)  # type: ignore[arg-type]
    AsyncSelectiveAveragingPolicy(model, torch.optim.SGD([model.bias], lr=1.0), average_every=1)  # a part of it is fine


def test_policy_refuses_an_optimizer_that_steps_in_hooks() -> None:
    """Regression: the error named a parameter "of shape (1, 1)", which GaLore creates internally."""
    model, dummy = nn.Linear(2, 3), sgd(nn.Linear(1, 1))
    dummy.optimizer_dict = {parameter: sgd(model) for parameter in model.parameters()}  # type: ignore[attr-defined]
    with pytest.raises(ValueError, match=r"optimizer .* SGD .* in hooks .* optim='galore_adamw' instead of"):
        AsyncSelectiveAveragingPolicy(model, dummy, average_every=1)


def test_policy_refuses_adapters_added_during_training() -> None:
    async def main(world: ad.World) -> None:
        model = nn.Sequential(nn.Linear(2, 2))
        async with AverageAllPolicy(model, sgd(model), average_every=1) as policy:
            model.add_module("adapter", nn.Linear(2, 2))
            with pytest.raises(ValueError, match=r"is new; .* leave the policy and enter a new one on all ranks"):
                await policy.step()
        async with AverageAllPolicy(model, sgd(model), average_every=1) as policy:
            assert await policy.step()

    run(main, 2)


def test_an_error_of_nest_asyncio_says_that_uvloop_was_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("uvloop")
    monkeypatch.setitem(sys.modules, "nest_asyncio", types.ModuleType("nest_asyncio"))

    async def main(world: ad.World) -> None:
        raise ValueError(f"Can't patch loop of type {type(asyncio.get_running_loop())}")  # as nest_asyncio.apply() does

    with pytest.raises(ValueError, match="Can't patch loop") as caught:
        ad.run(main, transport="local", loop="uvloop")
    assert 'asyncdist.run(main, loop="asyncio")' in "".join(caught.value.__notes__)
    with pytest.raises(ValueError, match="Can't patch loop") as caught:
        ad.run(main, transport="local", loop="asyncio")
    assert not hasattr(caught.value, "__notes__")


def test_policy_refuses_a_builder_of_another_model() -> None:
    """Regression: the builder was first called at the first replacement, hours into the run."""
    model = Mixed(0.0)
    for policy in (AsyncSelectiveAveragingPolicy, OneSidedSelectiveAveragingPolicy):
        with pytest.raises(ValueError, match=r"model_builder must return a model with the same layout .* 'counts'"):
            policy(
                model,
                sgd(model),
                average_every=1,
                averaging_strategy="reset_weights",
                model_builder=lambda: nn.Linear(2, 2),
            )
        torch.manual_seed(5)
        expected = torch.rand(3)
        torch.manual_seed(5)
        policy(model, sgd(model), average_every=1, averaging_strategy="reset_weights", model_builder=Mixed)
        assert torch.equal(torch.rand(3), expected)


def test_builder_that_later_differs_is_refused_before_any_change() -> None:
    async def main(world: ad.World) -> str:
        model = Mixed(float(world.rank))
        start, made = clone_state(model), [Mixed(), nn.Linear(2, 2)]
        async with AsyncSelectiveAveragingPolicy(
            model,
            sgd(model),
            average_every=1,
            averaging_strategy="reset_weights",
            model_builder=lambda: made.pop(0),
        ) as policy:
            try:
                while 0 not in refused:
                    await policy.step(float(world.rank))
            except ValueError as error:
                refused.append(world.rank)
                assert equal_states(clone_state(model), start)
                return str(error)
        return ""

    refused: list[int] = []
    text = run(main, 2)[0]
    assert "model_builder" in text and "'counts'" in text, text


def test_donor_whose_model_has_changed_gives_no_snapshot() -> None:
    async def main(world: ad.World) -> int:
        model = nn.Linear(4, 4)
        policy = AsyncSelectiveAveragingPolicy(model, sgd(model), average_every=1, replacement_ratio=0.4, quorum=1.0)
        refused = 0
        async with policy:
            if world.rank == 1:
                model.register_buffer("further", torch.zeros(3))
            while not over:
                try:
                    await policy.step(float(world.rank))
                except ValueError as error:
                    assert "further" in str(error)
                    refused += 1
                    assert policy._own.snapshots.in_use == 0
                if refused == 3:
                    over.append(world.rank)
        return refused

    over: list[int] = []
    assert run(main, 3) == [0, 3, 0]


# -- metrics ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("metric", "facts"),
    [
        (None, ["must get a metric at iteration 2", "None", "a number or a callable"]),
        ("0.5", ["metric", "'0.5'", "a number"]),
        (object, ["metric", "<object"]),
        ([1.0], ["metric", "[1.0]"]),
        (torch.zeros(3), ["(3,)", "one real number"]),
        (torch.zeros(0), ["(0,)"]),
        (torch.tensor(1j), ["torch.complex64"]),
        (lambda: None, ["metric", "None"]),
        (10**400, ["metric", "1" + 79 * "0"]),
        (np.complex64(1j), ["metric", "1j"]),
        (np.ones(2), ["metric", "array([1., 1.])"]),
    ],
    ids=[
        "none",
        "text",
        "object",
        "list",
        "vector",
        "empty",
        "complex",
        "callable-none",
        "huge",
        "numpy-complex",
        "numpy-vector",
    ],
)
def test_metric_that_is_not_a_number_is_refused_only_when_due(metric: Any, facts: list[str]) -> None:
    async def main(world: ad.World) -> None:
        model = Mixed(float(world.rank))
        start = clone_state(model)
        async with AsyncSelectiveAveragingPolicy(model, sgd(model), average_every=3) as policy:
            for _ in range(2):
                await policy.step(metric)
            with pytest.raises((TypeError, ValueError)) as caught:
                await policy.step(metric)
            assert names(caught.value, *facts), caught.value
            assert policy.statistics().report_count == 0
        coordinator = policy.statistics().coordinator
        assert coordinator is None or set(coordinator.reports.values()) == {0}
        assert equal_states(clone_state(model), start)

    run(main, 2)
    run(main, 1)


@pytest.mark.slow
def test_a_metric_with_a_graph_is_detached() -> None:
    async def main(world: ad.World) -> None:
        model = Mixed(float(world.rank))
        async with AsyncSelectiveAveragingPolicy(model, sgd(model), average_every=1) as policy:
            hidden = torch.ones(3, requires_grad=True) * 2
            alive = weakref.ref(hidden)
            loss = (hidden * hidden).sum()
            await policy.step(loss=loss)
            del hidden, loss
            gc.collect()
            assert alive() is None, "the policy must not keep the metric's graph alive"

    run(main, 2)


# -- out of order -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("policy_class", [AsyncSelectiveAveragingPolicy, AverageAllPolicy])
@pytest.mark.parametrize("ranks", [1, 2])
def test_step_outside_async_with_and_from_two_tasks(policy_class: Any, ranks: int) -> None:
    async def main(world: ad.World) -> None:
        model = Mixed(float(world.rank))
        start = clone_state(model)
        policy = policy_class(model, sgd(model), average_every=5)
        with pytest.raises(ad.ClosedError, match=r"step\(\) must be called inside async with"):
            await policy.step(1.0)
        async with policy:
            first = asyncio.create_task(policy.step(1.0))
            await asyncio.sleep(0)
            with pytest.raises(
                ad.BusyError,
                match=r"step\(\) must be called by one task at a time, but another task .* is inside step\(\)$",
            ):
                await policy.step(1.0)
            await first
            computing = asyncio.create_task(world.compute(sum, [1, 2]))
            await asyncio.sleep(0)
            with pytest.raises(ad.BusyError, match=r"world\.compute"):
                await policy.step(1.0)
            await computing
            await policy.step(1.0)
        with pytest.raises(ad.ClosedError, match="the policy's async with block, which has ended"):
            await policy.step(1.0)
        with pytest.raises(ad.LocalProtocolError, match="make a new policy"):
            async with policy:
                pass
        assert equal_states(clone_state(model), start)

    run(main, ranks)


def test_a_policy_outside_a_world() -> None:
    async def main() -> None:
        model = Mixed()
        with pytest.raises(
            RuntimeError, match=r"no world is open in this task: call this inside asyncdist.run\(main\)"
        ):
            async with AsyncSelectiveAveragingPolicy(model, sgd(model), average_every=1):
                pass

    asyncio.run(main())


# -- channels ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Note:
    text: str


@dataclass(frozen=True)
class Number:
    value: int


@dataclass
class Mutable:
    value: int


@dataclass(frozen=True)
class Unsendable:
    value: dict[str, int]


def test_tags_that_collide_or_do_not_exist() -> None:
    async def main(world: ad.World) -> None:
        world.channel(Note, tag=10)
        with pytest.raises(ad.LocalProtocolError, match="got 10 for channel 'Number', which channel 'Note' uses"):
            world.channel(Number, tag=10)
        for tag in (-1, 32768, 1 << 40, 1.5, "7", None, True):
            with pytest.raises(ad.LocalProtocolError, match="tag must be an integer from 0 to 32767, got"):
                world.channel(Note, tag=tag)  # type: ignore[arg-type]
        for tag in (7001, 7002, 8000, 8001, 12096):
            with pytest.raises(
                ad.LocalProtocolError, match=f"tag must be from 0 to 7000 .*, got {tag}, which is reserved for"
            ):
                world.channel(Note, tag=tag)

    run(main, 2)


def test_messages_that_cannot_be_sent() -> None:
    async def main(world: ad.World) -> None:
        notes = world.channel(Note, tag=10)
        other = 1 - world.rank
        with pytest.raises(ad.LocalProtocolError, match=r"Note must take at most \d+ bytes, got 7\d{4}"):
            await notes.send(Note("x" * 70_000), other)
        with pytest.raises(ad.LocalProtocolError, match="must be of type Note, got Number"):
            await notes.send(Number(1), other)  # type: ignore[arg-type]
        with pytest.raises(ad.LocalProtocolError, match=r"Note\(text=5\): Expected `str`, got `int`"):
            notes.send_nowait(Note(5), other)  # type: ignore[arg-type]
        for dest in (-1, 2):
            with pytest.raises(ad.LocalProtocolError, match=naming("dest", dest, 0, 1)):
                await notes.send(Note("lost"), dest)
        with pytest.raises(TypeError, match="frozen dataclass"):
            world.channel(Mutable, tag=11)
        with pytest.raises(TypeError, match=r"the type of Unsendable.value must be bool, int, float, .*, got "):
            world.channel(Unsendable, tag=12)
        with pytest.raises(ValueError, match=r"capacity must be .*, got 0"):
            world.channel(Note, tag=13, capacity=0)
        assert notes.statistics().sent_count == 0

    run(main, 2)


def test_streams_that_do_not_fit() -> None:
    async def main(world: ad.World) -> None:
        with pytest.raises(ValueError, match="contiguous"):
            await world.send_stream(torch.zeros(4, 4).t()[1:], 1 - world.rank)
        with pytest.raises(ad.LocalProtocolError, match="rank must be from 0 to 1, got 5"):
            await world.send_stream(torch.zeros(4), 5)
        if world.rank == 0:
            with pytest.raises(
                ad.LocalProtocolError, match="the tensor must have the 12 bytes that rank 1 receives, got 16"
            ):
                await world.send_stream(torch.zeros(4), 1)
        else:
            with pytest.raises(ad.RemoteProtocolError, match="rank 0"):
                await world.receive_stream(torch.zeros(3), 0)

    run(main, 2)


# -- run --------------------------------------------------------------------------------------------------------------


async def nothing(world: ad.World) -> None:
    del world


@pytest.mark.parametrize(
    ("main", "options", "facts"),
    [
        (print, {}, ("main", "print")),
        (None, {}, ("main", "None")),
        (nothing, {"transport": "tcp"}, ("transport", "'tcp'", "'auto', 'local', 'mpi', 'torch'")),
        (nothing, {"transport": "local", "ranks": 0}, ("ranks", "0", "1")),
        (nothing, {"transport": "local", "ranks": -1}, ("ranks", "-1")),
        (nothing, {"transport": "local", "ranks": 2.0}, ("ranks", "2.0")),
        (nothing, {"transport": "local", "ranks": True}, ("ranks", "True")),
        (nothing, {"transport": "mpi", "ranks": 2}, ("ranks", "2", "'local'")),
        (nothing, {"ranks": 3}, ("ranks", "3", "'local'")),
        (nothing, {"loop": "trio"}, ("loop", "'trio'", "'uvloop' or 'asyncio'")),
        (nothing, {"grace_s": 0}, ("grace_s", "0")),
        (nothing, {"grace_s": "1"}, ("grace_s", "'1'", "0")),
        (nothing, {"grace_s": math.nan}, ("grace_s", "nan")),
        (nothing, {"watchdog_s": 0}, ("watchdog_s", "0")),
    ],
)
def test_run_refuses_what_it_cannot_do(main: Any, options: dict[str, Any], facts: tuple[str, ...]) -> None:
    with pytest.raises((TypeError, ValueError)) as caught:
        ad.run(main, **options)
    assert names(caught.value, *facts), caught.value


@pytest.mark.parametrize(
    ("options", "facts"),
    [
        ({"transport": "tcp"}, ("transport", "'tcp'", "'auto', 'local', 'mpi', 'torch'")),
        ({"grace_s": -1}, ("grace_s", "-1", "0")),
        ({"grace_s": "1"}, ("grace_s", "'1'", "0")),
    ],
)
def test_open_world_refuses_what_run_refuses(options: dict[str, Any], facts: tuple[str, ...]) -> None:
    """Regression: ``open_world(grace_s=-1)`` opened a world."""

    async def open_it() -> None:
        async with ad.open_world(**options):
            raise AssertionError

    with pytest.raises(ValueError, match=naming(*facts)):
        asyncio.run(open_it())


async def no_world() -> None:
    raise AssertionError


async def configured(world: ad.World, config: dict[str, Any]) -> None:
    raise AssertionError


def plain(world: ad.World) -> None:
    raise AssertionError


def line_of(function: Any) -> str:
    return rf"{function.__name__} \({re.escape(__file__)}:{function.__code__.co_firstlineno}\)"


@pytest.mark.parametrize("start", [ad.run, lambda *a: ad.run_local(*a, ranks=2), lambda *a: ad.simulate(*a, ranks=2)])
@pytest.mark.parametrize(
    ("main", "args", "words"),
    [
        (
            no_world,
            (),
            rf"take the world .*, but {line_of(no_world)} takes no argument: write async def no_world\(world\)",
        ),
        (no_world, (1,), line_of(no_world)),
        (
            configured,
            (),
            rf"must take the world and 0 more arguments, got {line_of(configured)}: missing a req.*'co",
        ),
        (configured, (1, 2), rf"the world and 2 more arguments, got {line_of(configured)}: too many"),
        (
            functools.partial(configured, config={}),
            (1,),
            rf"the world and 1 more argument, got {line_of(configured)}: too many",
        ),
        (plain, (), rf"{line_of(plain)}: if .* call asyncdist\.blocking\.run\(main\), .*asyncdist\.blocking\.hosted"),
        (functools.partial(plain), (), line_of(plain)),
        (3, (), r"main must be a coroutine function \(async def\), got 3$"),
    ],
)
def test_a_main_that_cannot_be_called_is_named_with_its_line(start: Any, main: Any, args: Any, words: str) -> None:
    """The error contains no object's address, so that all ranks' errors are equal."""
    with pytest.raises(TypeError, match=words):
        start(main, *args)


def test_a_main_with_its_other_arguments_bound_is_one() -> None:
    async def main(world: ad.World, *, config: str) -> str:
        return config

    assert ad.run(functools.partial(main, config="bound")) == "bound"


def test_a_world_inside_a_world_is_refused() -> None:
    """Regression: each simulated rank silently got a world of one rank, and its training averaged nothing."""

    async def inner(world: ad.World) -> None:
        async with ad.open_world():
            raise AssertionError("another world")

    async def outer() -> int:
        async with ad.open_world() as first:
            with pytest.raises(ad.LocalProtocolError, match="<World rank 0 of 1, local>"):
                await inner(first)
        async with ad.open_world() as second:  # a second world after the first is allowed
            return second.size

    said = r"a world is already open, <World rank 0 of 2, local>: use it through asyncdist.current_world\(\)"
    with pytest.raises(ad.LocalProtocolError, match=said):
        ad.run_local(inner, ranks=2)
    with pytest.raises(ad.LocalProtocolError, match="<World rank 0 of 3, sim>"):
        ad.simulate(inner, ranks=3).value()
    assert asyncio.run(outer()) == 1
