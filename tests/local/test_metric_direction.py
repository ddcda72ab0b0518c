"""Tests the metric's direction: as an argument of ``step``, and the warning if it seems to be the wrong one."""

from __future__ import annotations

import asyncio
import inspect
import logging
import re
import warnings
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import pytest
import torch
from scripts.population import Mixed, sgd
from support.facts import names, naming

import asyncdist as ad
from asyncdist.integrations import joining, pytorch
from protocols import (
    AsyncSelectiveAveragingPolicy,
    AverageAllPolicy,
    OneSidedSelectiveAveragingPolicy,
    ReplicaAveragingPolicy,
    SpawnPolicy,
    StepInfo,
    misuse,
)
from protocols.misuse import UnawaitedStep


def made(**options: Any) -> AsyncSelectiveAveragingPolicy:
    model = Mixed(0.0)
    return AsyncSelectiveAveragingPolicy(model, sgd(model), **{"average_every": 1, **options})


# -- keywords ---------------------------------------------------------------------------------------------------------


async def replaced(world: ad.World, mode: str, given: Callable[[float], dict[str, Any]]) -> bool:
    """Return whether this rank was replaced in a round in which rank 2 has the largest metric."""
    policy = made(average_every=5, metric_mode=mode, quorum=1.0, grace_s=30.0)
    async with policy:
        for _ in range(40):
            await policy.step(**given(float(world.rank)))
    return policy.statistics().replacement_count > 0


@pytest.mark.parametrize("mode", ["max", "min"])
@pytest.mark.parametrize(
    ("given", "worst"),
    [
        (lambda number: {"loss": number}, 2),
        (lambda number: {"loss": torch.tensor(number, requires_grad=True)}, 2),
        (lambda number: {"loss": lambda: number}, 2),
        (lambda number: {"score": number}, 0),
    ],
    ids=["loss", "tensor", "callable", "score"],
)
def test_a_loss_and_a_score_mean_the_same_in_both_modes(mode: str, given: Any, worst: int) -> None:
    assert [rank for rank, was in enumerate(ad.run_local(replaced, mode, given, ranks=3, strict=True)) if was] == [
        worst
    ]


def test_a_call_has_one_metric() -> None:
    async def main(_: ad.World) -> None:
        async with made() as policy:
            with pytest.raises(
                TypeError, match=r"only one of local_metric, loss and score may be passed .*, got local_metric and loss"
            ):
                await policy.step(1.0, loss=1.0)
            with pytest.raises(TypeError, match=naming("loss", "score")):
                await policy.step(loss=1.0, score=1.0)

    ad.run_local(main, ranks=1, strict=True)


def test_a_threshold_is_not_compared_with_a_negated_loss() -> None:
    async def main(_: ad.World) -> None:
        async with made(threshold=0.5) as policy:
            with pytest.raises(
                ValueError,
                match=r"threshold=0.5 would be compared .* step\(loss=...\) .* pass metric_mode='min'",
            ):
                await policy.step(loss=1.0)
            await policy.step(score=1.0)
        async with made(threshold=0.5, metric_mode="min") as policy:
            await policy.step(loss=1.0)
            with pytest.raises(ValueError, match="pass metric_mode='max'"):
                await policy.step(score=1.0)
        model = Mixed(0.0)
        options: dict[str, Any] = {"average_every": 1, "replacement_mode": "threshold", "threshold_metric": 2.0}
        async with OneSidedSelectiveAveragingPolicy(model, sgd(model), **options) as one_sided:
            with pytest.raises(ValueError, match=r"^threshold_metric=2 would"):
                await one_sided.step(loss=1.0)

    ad.run_local(main, ranks=1, strict=True)


@pytest.mark.parametrize(
    ("mode", "given", "reported"),
    [
        (None, {"metric": 2.0}, 2.0),
        (None, {"loss": 2.0}, 2.0),
        (None, {"score": 2.0}, -2.0),
        ("max", {"loss": torch.tensor(2.0)}, -2.0),
        ("max", {"score": 2.0}, 2.0),
    ],
)
def test_an_integration_has_the_same_keywords(mode: Any, given: dict[str, Any], reported: float) -> None:
    def main(world: ad.blocking.World) -> float | None:
        model = Mixed(0.0)
        averaging = pytorch.SelectiveAveraging(model, sgd(model), 1, mode=mode)
        averaging.step(**given)
        assert averaging.policy is not None
        metric: float | None = averaging.policy.state_dict()["metric"]
        averaging.close()
        return metric

    assert ad.run_local(ad.blocking.hosted(main), ranks=1, strict=True) == [reported]


def test_a_blocking_policy_has_the_same_keywords() -> None:
    def main(world: ad.blocking.World) -> float | None:
        with ad.blocking.policy(made()) as policy:
            policy.step(loss=2.0)
            metric: float | None = policy.state_dict()["metric"]
            return metric

    assert ad.run_local(ad.blocking.hosted(main), ranks=1, strict=True) == [-2.0]


# -- names in the call ------------------------------------------------------------------------------------------------

loss = accuracy = neg_loss = value = 1.0
losses, outputs = [1.0], {"loss": 1.0, "accuracy": 1.0}
tensor_loss = torch.tensor(1.0)


class Agent:
    loss = 1.0

    def mean_reward(self) -> float:
        return 1.0


agent = Agent()

WRONG: dict[str, list[Callable[[SpawnPolicy], Any]]] = {
    "max": [
        lambda policy: policy.step(loss),
        lambda policy: policy.step(tensor_loss.item()),
        lambda policy: policy.step(losses[-1]),
        lambda policy: policy.step(outputs["loss"]),
        lambda policy: policy.step(agent.loss),
        lambda policy: policy.step(-accuracy),
        lambda policy: policy.step(score=loss),
        lambda policy: policy.step(
            tensor_loss.detach().mean(),
        ),
        lambda policy: policy(0, policy.model, policy.optimizer, loss),
        lambda policy: policy(0, policy.model, policy.optimizer, local_metric=loss),
    ],
    "min": [
        lambda policy: policy.step(-loss),
        lambda policy: policy.step(accuracy),
        lambda policy: policy.step(float(agent.mean_reward())),
        lambda policy: policy.step(loss=-loss),
        lambda policy: policy.step(local_metric=-loss),
    ],
}
RIGHT: dict[str, list[Callable[[SpawnPolicy], Any]]] = {
    "max": [
        lambda policy: policy.step(-loss),
        lambda policy: policy.step(-tensor_loss.item()),
        lambda policy: policy.step(loss=loss),
        lambda policy: policy.step(score=accuracy),
        lambda policy: policy.step(accuracy),
        lambda policy: policy.step(neg_loss),
        lambda policy: policy.step(value),
        lambda policy: policy.step(1.0 - loss),
        lambda policy: policy.step(lambda: loss),
        lambda policy: policy.step(*losses),
        lambda policy: policy(0, policy.model, policy.optimizer, -loss),
    ],
    "min": [lambda policy: policy.step(loss), lambda policy: policy.step(-accuracy)],
}


def warnings_of(mode: str, call: Callable[[SpawnPolicy], Coroutine[Any, Any, Any]]) -> list[warnings.WarningMessage]:
    """Return the warnings of a first and of a second call."""

    async def main(_: ad.World) -> None:
        async with made(metric_mode=mode) as policy:
            await call(policy)
            if "policy(" not in inspect.getsource(call).partition("lambda policy:")[2]:
                await call(policy)

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        ad.run_local(main, ranks=1, strict=True)
    return caught


@pytest.mark.parametrize(("mode", "call"), [(mode, call) for mode, calls in WRONG.items() for call in calls])
def test_a_call_that_names_the_opposite_is_warned_of_once(mode: str, call: Any) -> None:
    (warning,) = warnings_of(mode, call)
    assert warning.filename == __file__ and warning.lineno in range(
        call.__code__.co_firstlineno, call.__code__.co_firstlineno + 3
    )
    text = str(warning.message)
    better = (
        "larger" if (mode == "max" and "score=" not in text.split(" treats")[0]) or "score=loss" in text else "smaller"
    )
    assert f"treats a {better} value as better" in text
    assert ("write step(score=" if "accuracy" in text or "reward" in text else "write step(loss=") in text


@pytest.mark.parametrize(("mode", "call"), [(mode, call) for mode, calls in RIGHT.items() for call in calls])
def test_a_call_that_names_nothing_opposite_is_not_warned_of(mode: str, call: Any) -> None:
    assert warnings_of(mode, call) == []


def test_the_first_member_warns_for_all() -> None:
    async def main(_: ad.World) -> None:
        async with made() as policy:
            await policy.step(loss)

    with pytest.warns(UserWarning, match=r"^policy\.step\(loss\) ") as caught:
        ad.run_local(main, ranks=3, strict=True)
    assert len(caught) == 1


def test_a_policy_that_judges_nothing_warns_of_nothing() -> None:
    async def main(_: ad.World) -> None:
        model = Mixed(0.0)
        async with AverageAllPolicy(model, sgd(model), average_every=1) as policy:
            await policy.step(loss)

    ad.run_local(main, ranks=1, strict=True)


def test_the_line_of_a_blocking_call_is_found() -> None:
    model = Mixed(0.0)
    with ad.blocking.open_world():
        policy = ad.blocking.policy(made())
        with policy, pytest.warns(UserWarning, match=r"^policy\.step\(loss\) .* write step\(loss=loss\)"):
            policy.step(loss)
        averaging = pytorch.SelectiveAveraging(model, sgd(model), 1)
        with averaging, pytest.warns(UserWarning, match=r"^averaging\.step\(accuracy\) .*score=accuracy") as caught:
            averaging.step(accuracy)
    assert caught[0].filename == __file__


def test_a_file_beside_the_policies_folder_is_the_users() -> None:
    """Regression: a script named like ``protocols_x.py``, in the folder that contains ``protocols``, was skipped."""
    path = f"{Path(misuse.__file__).parent}_x.py"
    found: dict[str, Any] = {}
    exec(compile("def call(fn):\n    return fn()", path, "exec"), found)
    frame = found["call"](lambda: misuse._frame_of_user())
    assert frame.f_code.co_filename == path


@pytest.mark.parametrize(
    ("monitor", "mode", "told"),
    [
        ("val_accuracy", None, "mode='min' means that a smaller value of 'val_accuracy' is better, .* mode='max'"),
        ("eval_loss", "max", "mode='max' means that a larger value of 'eval_loss' is better, .* mode='min'"),
        ("val_loss", None, None),
        ("val_acc", "max", None),
        ("fid", "min", None),
    ],
)
def test_a_monitored_metric_of_the_opposite_name_is_told(
    monitor: str, mode: Any, told: str | None, caplog: pytest.LogCaptureFixture
) -> None:
    def main(_: ad.blocking.World) -> None:
        training, model = joining.selective_averaging(1, mode, {}, monitor=monitor, is_of_trainer=True), Mixed(0.0)
        for _ in range(2):
            training.begin(model, sgd(model))
            training.end()

    ad.run_local(ad.blocking.hosted(main), ranks=2, strict=True)
    texts = [record.getMessage() for record in caplog.records]
    assert len(texts) == (told is not None) and all(re.search(str(told), text) for text in texts), texts


# -- the trend --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        (AsyncSelectiveAveragingPolicy, {}),
        (AsyncSelectiveAveragingPolicy, {"islands": 2}),
        (OneSidedSelectiveAveragingPolicy, {}),
    ],
    ids=["selective", "islands", "one-sided"],
)
@pytest.mark.parametrize("mode", ["max", "min"])
def test_a_best_metric_that_becomes_worse_is_told_once(
    kind: Any, options: dict[str, Any], mode: str, caplog: pytest.LogCaptureFixture
) -> None:
    async def main(world: ad.World) -> None:
        model = Mixed(0.0)
        async with kind(model, sgd(model), average_every=1, metric_mode=mode, **options) as policy:
            for step in range(200):
                await policy.step(2.0 ** -(step / 20))

    with caplog.at_level(logging.WARNING):
        ad.run_local(main, ranks=4, strict=True)
    told = [record.getMessage() for record in caplog.records if "has become worse since the start" in record.message]
    assert len(told) == (1 if mode == "max" else 0), told
    assert all(names(text, kind.__name__, "rank 0") for text in told)


def rising_in_a_policy(kind: Any, **options: Any) -> Any:
    async def main(world: ad.World) -> None:
        model = Mixed(0.0)
        async with kind(model, sgd(model), average_every=1, **options) as policy:
            for step in range(200):
                await policy.step(loss=2.0 ** (step / 20))

    return main


def rising_in_a_loop(keyword: str) -> Any:
    def main(world: ad.blocking.World) -> None:
        model = Mixed(0.0)
        with pytorch.SelectiveAveraging(model, sgd(model), 1) as averaging:
            for step in range(200):
                averaging.step(**{keyword: 2.0 ** (step / 20)})

    return ad.blocking.hosted(main)


def rising_under_a_trainer(mode: Any) -> Any:
    def main(world: ad.blocking.World) -> None:
        model = Mixed(0.0)
        training = joining.selective_averaging(1, mode, {})
        training.begin(model, sgd(model))
        training.judge_by_training_loss()
        sign = -1.0 if mode == "max" else 1.0
        for step in range(200):
            training.step(sign * 2.0 ** (step / 20))
        training.end()

    return ad.blocking.hosted(main)


@pytest.mark.parametrize(
    ("main", "count"),
    [
        (rising_in_a_policy(AsyncSelectiveAveragingPolicy), 0),
        (rising_in_a_policy(AsyncSelectiveAveragingPolicy, islands=2), 0),
        (rising_in_a_policy(OneSidedSelectiveAveragingPolicy), 0),
        (rising_in_a_policy(ReplicaAveragingPolicy, replica_size=2), 0),
        (rising_in_a_loop("loss"), 0),
        (rising_in_a_loop("metric"), 1),
        (rising_under_a_trainer(None), 0),
        (rising_under_a_trainer("max"), 1),
    ],
    ids=["selective", "islands", "one-sided", "replicas", "loop", "loop, no name", "trainer", "trainer, max"],
)
def test_a_named_loss_may_rise(main: Any, count: int, caplog: pytest.LogCaptureFixture) -> None:
    """Regression: the warning advised step(loss=...) to a script that already called it so."""
    with caplog.at_level(logging.WARNING):
        ad.run_local(main, ranks=4, strict=True)
    assert sum("has become worse since the start" in record.message for record in caplog.records) == count


# -- a step that is not awaited ---------------------------------------------------------------------------------------


def test_a_step_that_is_not_awaited_is_no_condition() -> None:
    async def main(_: ad.World) -> None:
        async with made() as policy:
            info: Any = policy.step(1.0)
            with pytest.raises(TypeError, match=r"step\(\) must be awaited, .* write info = await"):
                bool(info)
            with pytest.raises(TypeError, match="must be awaited"):
                policy.step(1.0).donors  # type: ignore[attr-defined, unused-coroutine]  # noqa: B018
            assert not await policy.step(1.0)

    ad.run_local(main, ranks=1, strict=True)


def test_second_step_that_is_not_awaited_refuses_bool() -> None:
    """The first one after awaited steps is a plain coroutine, which is true; the next one raises."""

    async def main(_: ad.World) -> None:
        async with made() as policy:
            for _ in range(3):
                await policy.step(1.0)
            forgotten = policy.step(1.0)
            forgotten.close()
            with pytest.raises(TypeError, match="await"):
                bool(policy.step(1.0))
            await policy.step(1.0)
            last = policy.step(1.0)
            assert inspect.iscoroutine(last), "after an awaited step, step() must return a plain coroutine"
            await last

    ad.run_local(main, ranks=1, strict=True)


@pytest.mark.parametrize("place", ["first", "later"])
def test_a_step_is_a_coroutine_to_asyncio(place: str) -> None:
    async def main(_: ad.World) -> list[StepInfo]:
        async with made() as policy:
            infos = [] if place == "first" else [await policy.step(1.0)]

            def step() -> Coroutine[Any, Any, StepInfo]:
                policy._is_unawaited = place == "first"
                made = policy.step(1.0)
                assert isinstance(made, UnawaitedStep) is (place == "first")
                return made

            infos.append(await step())
            infos.append(await asyncio.wait_for(step(), 1))
            infos.append(await asyncio.create_task(step()))
            infos.append(await asyncio.shield(step()))
            infos += await asyncio.gather(step())
            async with asyncio.TaskGroup() as group, asyncio.timeout(1):
                infos.append(await group.create_task(step()))
            task = asyncio.create_task(step())
            assert "SpawnPolicy.step" in repr(task)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
        return infos

    ((*infos,),) = ad.run_local(main, ranks=1, strict=True)
    assert len(infos) == 6 + (place == "later") and not any(infos)
