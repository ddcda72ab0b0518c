"""What a user can do wrong: one clear error each, naming the value and what is allowed, and nothing left behind.

"Before any report or weight is sent" is checked where there is somebody to send to: the peers' counts stay zero.
``asyncdist run``'s own errors are in ``unit/test_launch.py``; tensors that cannot be averaged, one by one, in
``unit/test_flat.py``.
"""

from __future__ import annotations

import asyncio
import functools
import gc
import math
import re
import weakref
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from scripts.population import Mixed, clone_state, equal_states, sgd
from torch import nn

import asyncdist as ad
import protocols
from protocols import AsyncSelectiveAveragingPolicy, AverageAllPolicy, OneSidedSelectiveAveragingPolicy


def run(main: Callable[..., Coroutine[Any, Any, Any]], ranks: int) -> list[Any]:
    return ad.run_local(main, ranks=ranks, strict=True)


# -- options ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"replacement_ratio": 1.5}, ["replacement_ratio is 1.5", "from 0 to 1"]),
        ({"replacement_ratio": -0.1}, ["replacement_ratio is -0.1", "from 0 to 1"]),
        ({"replacement_ratio": math.nan}, ["replacement_ratio is nan", "from 0 to 1"]),
        ({"replacement_ratio": "0.5"}, ["replacement_ratio is '0.5'", "a number"]),
        ({"momentum": 1.01}, ["momentum is 1.01", "from 0 to 1"]),
        ({"momentum": -1}, ["momentum is -1", "from 0 to 1"]),
        ({"momentum": math.nan}, ["momentum is nan", "from 0 to 1"]),
        ({"momentum": None}, ["momentum is None", "from 0 to 1"]),
        ({"average_every": 0}, ["average_every is 0", "1 or more"]),
        ({"average_every": -5}, ["average_every is -5", "1 or more"]),
        ({"average_every": 2.0}, ["average_every is 2.0", "whole number"]),
        ({"average_every": True}, ["average_every is True", "whole number"]),
        ({"averaging_strategy": "median"}, ["averaging_strategy is 'median'", "'mean'", "'reset_weights'"]),
        ({"metric_mode": "maximum"}, ["metric_mode is 'maximum'", "'max'", "'min'"]),
        ({"optimizer_state": "drop"}, ["optimizer_state is 'drop'", "'keep', 'reset'"]),
        ({"averaging_strategy": "reset_weights"}, ["reset_weights", "model_builder"]),
        ({"model_builder": 3}, ["model_builder is 3", "callable"]),
        ({"metric": 3.0}, ["metric is 3.0", "callable"]),
        ({"threshold": math.nan}, ["threshold is nan", "finite"]),
        ({"cooldown": -1}, ["cooldown is -1", "0 or more"]),
        ({"cooldown": 1.5}, ["cooldown is 1.5", "whole number"]),
        ({"quorum": 2}, ["quorum is 2", "from 0 to 1"]),
        ({"grace_s": -1}, ["grace_s is -1", "0 or more"]),
        ({"grace_s": math.inf}, ["grace_s is inf", "finite"]),
        ({"max_report_age_s": 0}, ["max_report_age_s is 0", "above 0"]),
        ({"round_timeout_s": 0}, ["round_timeout_s is 0", "above 0"]),
        ({"start_timeout_s": 0}, ["start_timeout_s is 0", "above 0"]),
        ({"start_timeout_s": math.inf}, ["start_timeout_s is inf", "finite"]),
        ({"drain_timeout_s": -2}, ["drain_timeout_s is -2", "above 0"]),
        ({"drain_timeout_s": math.inf}, ["drain_timeout_s is inf", "finite"]),
        ({"on_event": 7}, ["on_event is 7", "callable"]),
        ({"name": 7}, ["name is 7", "text"]),
        ({"name": "x" * 70_000}, ["name is 'xxx", "xxx...; allowed: a text of up to 200 characters"]),
        ({"group": [0, 1]}, ["group is [0, 1]", "a Group"]),
        ({"group": "x"}, ["group is 'x'", "a Group"]),
        ({"world": 3}, ["world is 3", "a World"]),
        ({"coordinator": 1.0}, ["coordinator is 1.0", "whole number of 0 or more, or None"]),
        ({"coordinator": True}, ["coordinator is True", "whole number"]),
        ({"coordinator": "0"}, ["coordinator is '0'", "whole number"]),
        ({"coordinator": -1}, ["coordinator is -1", "0 or more"]),
    ],
    ids=lambda value: "-".join(f"{k}={v}" for k, v in value.items()) if isinstance(value, dict) else "",
)
def test_an_option_out_of_range_is_refused_when_the_policy_is_made(options: dict[str, Any], words: list[str]) -> None:
    model = Mixed()
    with pytest.raises((ValueError, TypeError)) as caught:
        AsyncSelectiveAveragingPolicy(model, sgd(model), **{"average_every": 1, **options})
    assert all(word in str(caught.value) for word in words), caught.value


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_coordinator_that_is_no_rank_is_refused_where_the_policy_starts(ranks: int) -> None:
    async def main(world: ad.World) -> None:
        model = Mixed()
        policy = AsyncSelectiveAveragingPolicy(model, sgd(model), average_every=1, coordinator=ranks)
        with pytest.raises(ValueError, match=rf"coordinator is {ranks}; allowed: a rank from 0 to {ranks - 1}"):
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
    with pytest.raises(ValueError, match=f"{next(iter(options))} is .*; allowed: "):
        AverageAllPolicy(model, sgd(model), **{"average_every": 1, **options})


def overlapping() -> nn.Module:
    model = nn.Module()
    memory = torch.zeros(6)
    model.register_buffer("one", memory[:4])
    model.register_buffer("two", memory[2:])
    return model


def holding(tensor: torch.Tensor) -> nn.Module:
    model = nn.Linear(2, 2)
    model.register_buffer("strange", tensor)
    return model


@pytest.mark.filterwarnings("ignore:.*[Qq]uantiz:UserWarning", "ignore:.*[Qq]uantiz:DeprecationWarning")
@pytest.mark.parametrize(
    ("build", "words"),
    [
        (nn.Identity, ["Identity has neither parameters nor persistent buffers"]),
        (lambda: [1, 2], ["model is a list", "torch.nn.Module"]),
        (lambda: nn.Linear(2, 2, device="meta"), ["'weight'", "meta device"]),
        (lambda: holding(torch.eye(3).to_sparse()), ["'strange'", "sparse"]),
        (lambda: holding(torch.quantize_per_tensor(torch.ones(3), 0.1, 0, torch.qint8)), ["'strange'", "quantised"]),
        (overlapping, ["'two'", "'one'", "overlap"]),
        (lambda: holding(torch.zeros(1).expand(4)), ["'strange'", "overlaps itself"]),
        (lambda: nn.LazyLinear(3), ["'weight'", "not initialised"]),
    ],
    ids=["empty", "no-module", "meta", "sparse", "quantised", "overlapping", "expanded", "lazy"],
)
def test_a_model_that_cannot_be_averaged_is_refused_by_name(build: Callable[[], Any], words: list[str]) -> None:
    optimizer = sgd(nn.Linear(1, 1))
    for policy_class in (AsyncSelectiveAveragingPolicy, AverageAllPolicy):
        with pytest.raises((TypeError, ValueError)) as caught:
            policy_class(build(), optimizer, average_every=1)
        assert all(word in str(caught.value) for word in words), caught.value


def test_an_optimizer_of_another_model_is_refused() -> None:
    model, other = nn.Linear(2, 3), nn.Linear(5, 7)
    with pytest.raises(ValueError, match=r"parameter 0 of the optimizer's group 0, of shape \(7, 5\), is not in this"):
        AsyncSelectiveAveragingPolicy(model, sgd(other), average_every=1)
    with pytest.raises(TypeError, match=r"optimizer is a Linear; allowed: a torch\.optim\.Optimizer"):
        AsyncSelectiveAveragingPolicy(model, other, average_every=1)  # type: ignore[arg-type]
    AsyncSelectiveAveragingPolicy(model, torch.optim.SGD([model.bias], lr=1.0), average_every=1)  # a part of it is fine


def test_a_builder_of_another_model_is_refused_when_the_policy_is_made() -> None:
    """It was called at the first replacement, hours later. What training draws is the same as without that look."""
    model = Mixed(0.0)
    for policy in (AsyncSelectiveAveragingPolicy, OneSidedSelectiveAveragingPolicy):
        with pytest.raises(ValueError, match=r"model_builder made another model .* 'counts'"):
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


def test_a_builder_that_later_makes_another_model_is_refused_before_a_weight_has_changed() -> None:
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


# -- metrics ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("metric", "words"),
    [
        (None, ["due at iteration 2", "None", "a number or a callable"]),
        ("0.5", ["metric is '0.5'", "a number"]),
        (object, ["metric is <object", "a number"]),
        ([1.0], ["metric is [1.0]", "a number"]),
        (torch.zeros(3), ["shape (3,)", "one real number"]),
        (torch.zeros(0), ["shape (0,)", "one real number"]),
        (torch.tensor(1j), ["complex64", "one real number"]),
        (lambda: None, ["metric is None", "a number"]),
        (10**400, ["metric is 1000", "a number"]),
        (np.complex64(1j), ["metric is", "1j", "a number"]),
        (np.ones(2), ["metric is array([1., 1.])", "a number"]),
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
def test_a_metric_that_is_no_number_is_refused_when_it_is_due_and_not_before(metric: Any, words: list[str]) -> None:
    async def main(world: ad.World) -> None:
        model = Mixed(float(world.rank))
        start = clone_state(model)
        async with AsyncSelectiveAveragingPolicy(model, sgd(model), average_every=3) as policy:
            for _ in range(2):
                await policy.step(metric)
            with pytest.raises((TypeError, ValueError)) as caught:
                await policy.step(metric)
            assert all(word in str(caught.value) for word in words), caught.value
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
            await policy.step(loss)
            del hidden, loss
            gc.collect()
            assert alive() is None, "the policy keeps the metric's graph"

    run(main, 2)


# -- out of order -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("policy_class", [AsyncSelectiveAveragingPolicy, AverageAllPolicy])
@pytest.mark.parametrize("ranks", [1, 2])
def test_step_outside_async_with_and_from_two_tasks(policy_class: Any, ranks: int) -> None:
    async def main(world: ad.World) -> None:
        model = Mixed(float(world.rank))
        start = clone_state(model)
        policy = policy_class(model, sgd(model), average_every=5)
        with pytest.raises(ad.ClosedError, match=r"step\(\) before async with"):
            await policy.step(1.0)
        async with policy:
            first = asyncio.create_task(policy.step(1.0))
            await asyncio.sleep(0)
            with pytest.raises(ad.BusyError, match=r"another task .* is inside step\(\); one task trains a model$"):
                await policy.step(1.0)
            await first
            computing = asyncio.create_task(world.compute(sum, [1, 2]))
            await asyncio.sleep(0)
            with pytest.raises(ad.BusyError, match=r"world\.compute"):
                await policy.step(1.0)
            await computing
            await policy.step(1.0)
        with pytest.raises(ad.ClosedError, match="after the policy's async with block has ended"):
            await policy.step(1.0)
        with pytest.raises(ad.LocalProtocolError, match="make a new one"):
            async with policy:
                pass
        assert equal_states(clone_state(model), start)

    run(main, ranks)


def test_a_policy_outside_a_world() -> None:
    async def main() -> None:
        model = Mixed()
        with pytest.raises(RuntimeError, match=r"no world here: call this inside asyncdist.run\(main\)"):
            async with AsyncSelectiveAveragingPolicy(model, sgd(model), average_every=1):
                pass

    asyncio.run(main())


# -- ranks that disagree ----------------------------------------------------------------------------------------------


async def start(world: ad.World, policy: protocols.SpawnPolicy) -> str:
    """The error of a start that must fail; nobody has reported anything."""
    try:
        async with policy:
            raise AssertionError("it started")
    except ad.DisagreementError as error:
        return str(error)
    finally:
        assert world.statistics().stream_sent_nbytes == 0


def disagree(make: Callable[[int], Any], ranks: int = 3) -> list[str]:
    """Every rank's error when rank r starts what ``make(r)`` returns: a policy class, its options and a model."""

    async def main(world: ad.World) -> str:
        policy_class, options, model = make(world.rank)
        return await start(world, policy_class(model, sgd(model), **{"average_every": 2, **options}))

    return run(main, ranks)


@pytest.mark.parametrize(
    ("odd", "words"),
    [
        ({"average_every": 3}, "option average_every is 2 on rank 0 and 3 on rank 2"),
        ({"replacement_ratio": 0.5}, "option replacement_ratio is 0.2 on rank 0 and 0.5 on rank 2"),
        ({"momentum": 0.5}, "option momentum is 0.0 on rank 0 and 0.5 on rank 2"),
        ({"metric_mode": "min"}, 'option metric_mode is "max" on rank 0 and "min" on rank 2'),
        ({"threshold": 1.0}, "option threshold is null on rank 0 and 1.0 on rank 2"),
        ({"optimizer_state": "reset"}, "option resets_optimizer is false on rank 0 and true on rank 2"),
        ({"grace_s": 2.0}, "option grace_s is 1.0 on rank 0 and 2.0 on rank 2"),
        ({"name": "other"}, "name is (none) on rank 0 and other on rank 2"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_policies_that_differ_in_an_option_are_refused_everywhere(odd: dict[str, Any], words: str) -> None:
    for text in disagree(lambda rank: (AsyncSelectiveAveragingPolicy, odd if rank == 2 else {}, Mixed())):
        assert "the start of a policy" in text and words in text, text


def test_policies_of_different_classes_are_refused_everywhere() -> None:
    for text in disagree(lambda rank: (AsyncSelectiveAveragingPolicy if rank else AverageAllPolicy, {}, Mixed())):
        assert "class is AverageAllPolicy on rank 0 and AsyncSelectiveAveragingPolicy on rank 1" in text, text


def narrow(rank: int) -> nn.Module:
    return nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 3 if rank == 1 else 4))


def double(rank: int) -> nn.Module:
    return nn.Linear(2, 2, dtype=torch.float64 if rank == 2 else torch.float32)


def longer(rank: int) -> nn.Module:
    return nn.Sequential(nn.Linear(2, 2), *([nn.Linear(2, 2)] if rank == 1 else []))


def untied(rank: int) -> nn.Module:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    if rank != 1:
        model[1].weight = model[0].weight
    return model


@pytest.mark.parametrize(
    ("build", "words"),
    [
        (narrow, ["'1.weight'", "(3, 2)", "(4, 2)", "rank 1"]),
        (double, ["'weight'", "float64", "float32", "rank 2"]),
        (longer, ["'1.weight'", "rank 1"]),
        (untied, ["weight'", "rank 1"]),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
@pytest.mark.parametrize("policy_class", [AsyncSelectiveAveragingPolicy, AverageAllPolicy])
def test_models_that_differ_are_refused_everywhere_and_the_first_difference_is_named(
    policy_class: Any, build: Callable[[int], nn.Module], words: list[str]
) -> None:
    for text in disagree(lambda rank: (policy_class, {}, build(rank))):
        assert "the models differ" in text and all(word in text for word in words), text


def test_models_that_differ_under_a_reserved_coordinator() -> None:
    async def main(world: ad.World) -> str:
        if world.rank == 2:
            with pytest.raises(ad.DisagreementError) as caught:
                await protocols.coordinate([0, 1])
            return str(caught.value)
        group = await ad.new_group([0, 1])
        model = narrow(world.rank)
        policy = AsyncSelectiveAveragingPolicy(model, sgd(model), average_every=1, coordinator=2, group=group)
        return await start(world, policy)

    texts = run(main, 3)
    assert all("'1.weight'" in text for text in texts[:2]), texts
    assert "model is " in texts[2], texts


@pytest.mark.parametrize("timeout_s", [None, 0, -1.0, math.inf, math.nan, "3"])
def test_a_timeout_that_is_no_duration_is_refused_by_each_start(timeout_s: Any) -> None:
    async def main(world: ad.World) -> None:
        words = re.escape(f"timeout_s is {timeout_s!r}; allowed: a finite number of seconds above 0")
        with pytest.raises(ValueError, match=words):
            await world.new_group([0, 1], timeout_s=timeout_s)
        with pytest.raises(ValueError, match=words):
            await ad.new_mesh({"DP": 2}, timeout_s=timeout_s)

    run(main, 2)


def test_members_that_cannot_be_coordinated_are_refused_before_anything_is_sent() -> None:
    """No member was a KeyError, and others came to a timeout after a minute."""
    wrong: list[tuple[Any, type[Exception]]] = [
        *(([], ValueError), ([0, 0], ValueError), ([0, 2], ValueError), ([0, -1], ValueError), ([0, 1], ValueError)),
        *((["0"], ValueError), ([0.0], ValueError), (0, TypeError), ("0", TypeError), (None, TypeError)),
    ]

    async def main(world: ad.World) -> None:
        if world.rank == 1:
            for members, kind in wrong:
                words = f"members is {members!r}; allowed: the ranks of a policy's group, from 0 to 1, each once and "
                with pytest.raises(kind, match=re.escape(f"{words}without rank 1")):
                    await protocols.coordinate(members)
            with pytest.raises(ValueError, match="start_timeout_s is -1"):
                await protocols.coordinate([0], start_timeout_s=-1)
            assert not world.statistics().sent_count
        await ad.barrier()

    run(main, 2)


@pytest.mark.parametrize("kind", [AsyncSelectiveAveragingPolicy, AverageAllPolicy])
@pytest.mark.parametrize("who", [0, 2])
@pytest.mark.parametrize("is_caught", [False, True])
def test_a_policy_that_cannot_be_made_on_one_rank_holds_the_others_no_longer_than_this_one_lives(
    kind: type[protocols.SpawnPolicy], who: int, is_caught: bool
) -> None:
    async def main(world: ad.World) -> None:
        model = Mixed()
        if world.rank == who and not is_caught:
            kind(model, sgd(model), average_every=0)
        if world.rank == who:
            with pytest.raises(ValueError, match="average_every is 0"):
                kind(model, sgd(model), average_every=0)
            return
        error, word = (ad.ClosedError, "left") if is_caught else (ad.RankLostError, "average_every is 0")
        with pytest.raises(error, match=rf"rank {who} .*{word}"):
            async with kind(model, sgd(model), average_every=1):
                raise AssertionError("it started")

    for seed in range(10):
        report = ad.simulate(main, ranks=3, seed=seed)
        assert report.virtual_time_s < 5
        for rank, result in enumerate(report.results):
            assert type(result) is (type(None) if is_caught else ValueError if rank == who else ad.RankLostError)


@pytest.mark.parametrize("missing", [{0}, {1, 3}, {0, 1}, {0, 1, 3}], ids=str)
def test_a_policy_made_on_some_ranks_only_names_the_missing_ones(missing: set[int]) -> None:
    waiting: set[int] = set(range(4)) - missing

    async def main(world: ad.World) -> ad.StartTimeoutError | None:
        if world.rank in missing:
            while waiting:
                await world.safe_point()
            return None
        model = Mixed()
        policy = AsyncSelectiveAveragingPolicy(model, sgd(model), average_every=1, start_timeout_s=0.2)
        try:
            async with policy:
                raise AssertionError("it started")
        except ad.StartTimeoutError as error:
            return error
        finally:
            waiting.discard(world.rank)

    errors = [error for error in run(main, 4) if error is not None]
    assert len(errors) == 4 - len(missing)
    names = f"rank{'s' if len(missing) > 1 else ''} {', '.join(map(str, sorted(missing)))}"
    for error in errors:
        assert error.missing == tuple(sorted(missing)) and f"{names} did not come within 0.2 s" in str(error)
        assert isinstance(error, TimeoutError)


def test_a_leader_that_comes_after_the_others_have_given_up_is_told_so() -> None:
    async def main(world: ad.World) -> tuple[int, ...]:
        model = Mixed()
        if world.rank == 0:
            await asyncio.sleep(2.0)
        policy = AsyncSelectiveAveragingPolicy(model, sgd(model), average_every=1, start_timeout_s=0.2)
        with pytest.raises(ad.StartTimeoutError, match=r"rank 0 did not come") as caught:
            async with policy:
                raise AssertionError("it started")
        await ad.barrier()
        return caught.value.missing

    assert ad.simulate(main, ranks=3, seed=1).results == ((0,),) * 3


def test_a_late_joiner_is_waited_for() -> None:
    async def main(world: ad.World) -> int:
        model = Mixed()
        for _ in range(200 if world.rank == 1 else 0):
            await world.safe_point()
        async with AsyncSelectiveAveragingPolicy(model, sgd(model), average_every=1) as policy:
            await policy.step(1.0)
        return policy.iteration

    assert run(main, 3) == [1, 1, 1]


def test_a_rank_that_has_ended_is_named_at_once_by_those_that_start_a_policy_with_it() -> None:
    async def main(world: ad.World) -> str:
        if world.rank == 1:
            return ""
        model = Mixed()
        with pytest.raises(ad.ClosedError) as caught:
            async with AsyncSelectiveAveragingPolicy(model, sgd(model), average_every=1, start_timeout_s=1000):
                pass
        return str(caught.value)

    texts = run(main, 3)
    assert all("the start of a policy" in text and "rank 1 left" in text for text in (texts[0], texts[2])), texts


def test_a_group_without_this_rank_and_a_coordinator_that_does_not_exist() -> None:
    async def main(world: ad.World) -> None:
        model = Mixed()
        group = await ad.new_group([world.rank])
        elsewhere = ad.Group((1 - world.rank,), 0, group.tag, None)
        with pytest.raises(ad.LocalProtocolError, match=rf"rank {world.rank} is not in the policy's group"):
            async with AsyncSelectiveAveragingPolicy(model, sgd(model), average_every=1, group=elsewhere):
                pass
        with pytest.raises(ValueError, match="coordinator is 9; allowed: a rank from 0 to 1"):
            async with AsyncSelectiveAveragingPolicy(model, sgd(model), average_every=1, coordinator=9):
                pass

    run(main, 2)


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
        with pytest.raises(ad.LocalProtocolError, match="tag 10 belongs to channel 'Note'; channel 'Number' must"):
            world.channel(Number, tag=10)
        for tag in (-1, 32768, 1 << 40, 1.5, True):
            with pytest.raises(ad.LocalProtocolError, match=r"a tag is an int from 0 to 32767, not"):
                world.channel(Note, tag=tag)  # type: ignore[arg-type]
        for tag in (7001, 7002, 8000, 8001, 12096):
            with pytest.raises(ad.LocalProtocolError, match=f"tag {tag} is reserved for .*choose one from 0 to 7000"):
                world.channel(Note, tag=tag)

    run(main, 2)


def test_messages_that_cannot_be_sent() -> None:
    async def main(world: ad.World) -> None:
        notes = world.channel(Note, tag=10)
        other = 1 - world.rank
        with pytest.raises(ad.LocalProtocolError, match=r"Note takes 7\d{4} bytes; a message may have \d+"):
            await notes.send(Note("x" * 70_000), other)
        with pytest.raises(ad.LocalProtocolError, match="this channel carries Note, not Number"):
            await notes.send(Number(1), other)  # type: ignore[arg-type]
        with pytest.raises(ad.LocalProtocolError, match=r"Note\(text=5\): Expected `str`, got `int`"):
            notes.send_nowait(Note(5), other)  # type: ignore[arg-type]
        for dest in (-1, 2):
            with pytest.raises(ad.LocalProtocolError, match=rf"dest is {dest}; ranks go from 0 to 1"):
                await notes.send(Note("lost"), dest)
        with pytest.raises(TypeError, match="frozen dataclass"):
            world.channel(Mutable, tag=11)
        with pytest.raises(
            TypeError, match=r"Unsendable.value: .* cannot travel in a message; allowed: bool, int, float, "
        ):
            world.channel(Unsendable, tag=12)
        with pytest.raises(ValueError, match="capacity is 0"):
            world.channel(Note, tag=13, capacity=0)
        assert notes.statistics().sent_count == 0

    run(main, 2)


def test_streams_that_do_not_fit() -> None:
    async def main(world: ad.World) -> None:
        with pytest.raises(ValueError, match="contiguous"):
            await world.send_stream(torch.zeros(4, 4).t()[1:], 1 - world.rank)
        with pytest.raises(ad.LocalProtocolError, match="rank 5 does not exist; ranks go from 0 to 1"):
            await world.send_stream(torch.zeros(4), 5)
        if world.rank == 0:
            with pytest.raises(ad.LocalProtocolError, match="rank 1 receives 12 bytes, this rank sends 16"):
                await world.send_stream(torch.zeros(4), 1)
        else:
            with pytest.raises(ad.RemoteProtocolError, match="rank 0 gave up"):
                await world.receive_stream(torch.zeros(3), 0)

    run(main, 2)


# -- run --------------------------------------------------------------------------------------------------------------


async def nothing(world: ad.World) -> None:
    del world


@pytest.mark.parametrize(
    ("main", "options", "words"),
    [
        (print, {}, "main must be a coroutine function"),
        (nothing, {"transport": "tcp"}, "transport is 'tcp'; allowed are 'auto', 'local', 'mpi', 'torch'"),
        (nothing, {"transport": "local", "ranks": 0}, "ranks is 0; allowed: a whole number of 1 or more"),
        (nothing, {"ranks": 3}, "ranks=3 needs transport='local'"),
        (nothing, {"loop": "trio"}, "loop is 'trio'; allowed are 'uvloop', 'asyncio'"),
        (nothing, {"grace_s": 0}, "grace_s is 0; allowed: a number of seconds above 0"),
        (nothing, {"grace_s": "1"}, "grace_s is '1'; allowed: a number of seconds above 0"),
        (nothing, {"watchdog_s": 0}, "watchdog_s is 0; allowed: a number of seconds above 0"),
    ],
    ids=["main", "transport", "ranks", "ranks-elsewhere", "loop", "grace", "grace-text", "watchdog"],
)
def test_run_refuses_what_it_cannot_do(main: Any, options: dict[str, Any], words: str) -> None:
    with pytest.raises((TypeError, ValueError)) as caught:
        ad.run(main, **options)
    assert words in str(caught.value)


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
            rf"given the world, and {line_of(no_world)} takes no argument: write async def no_world\(world\)",
        ),
        (no_world, (1,), rf"given the world, and {line_of(no_world)} takes no argument"),
        (
            configured,
            (),
            rf"the world and 0 more arguments, which does not fit {line_of(configured)}: missing a req.*'co",
        ),
        (configured, (1, 2), rf"the world and 2 more arguments, which does not fit {line_of(configured)}: too many"),
        (
            functools.partial(configured, config={}),
            (1,),
            rf"the world and 1 more argument, which does not fit {line_of(configured)}: too many",
        ),
        (plain, (), rf"main must be a coroutine function \(async def\); got {line_of(plain)}"),
        (functools.partial(plain), (), rf"main must be a coroutine function .*; got {line_of(plain)}"),
        (3, (), r"main must be a coroutine function \(async def\); got 3"),
    ],
)
def test_a_main_that_cannot_be_called_is_named_with_its_line(start: Any, main: Any, args: Any, words: str) -> None:
    """Ranks compare what they say: no address of an object is in it."""
    with pytest.raises(TypeError, match=words):
        start(main, *args)


def test_a_main_with_its_other_arguments_bound_is_one() -> None:
    async def main(world: ad.World, *, config: str) -> str:
        return config

    assert ad.run(functools.partial(main, config="bound")) == "bound"


def test_a_world_inside_a_world_is_refused() -> None:
    """It gave each simulated rank a world of one rank, in which everything went on, to no purpose."""

    async def inner(world: ad.World) -> None:
        async with ad.open_world():
            raise AssertionError("another world")

    async def outer() -> int:
        async with ad.open_world() as first:
            with pytest.raises(ad.LocalProtocolError, match="open here already"):
                await inner(first)
        async with ad.open_world() as second:  # one after the other is fine
            return second.size

    said = r"a world is open here already, <World rank 0 of 2, local>: use that one, as asyncdist.current_world\(\)"
    with pytest.raises(ad.LocalProtocolError, match=said):
        ad.run_local(inner, ranks=2)
    with pytest.raises(ad.LocalProtocolError, match="<World rank 0 of 3, sim>"):
        ad.simulate(inner, ranks=3).value()
    assert asyncio.run(outer()) == 1


# -- a user's own protocols.py ----------------------------------------------------------------------------------------
