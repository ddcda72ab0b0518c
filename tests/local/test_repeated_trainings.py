"""Tests a training that begins again on one rank, as after exhausted memory: whether it continues with its policy."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import asyncdist as ad
from asyncdist.integrations.pytorch import Averaging
from protocols import AsyncSelectiveAveragingPolicy, AverageAllPolicy, PopulationTrainingPolicy


def test_a_training_that_begins_again_continues_with_its_policy() -> None:
    """Regression: a rank that had run out of memory waited for a start that no other rank joined."""
    from asyncdist.integrations.pytorch import SelectiveAveraging

    def main(world: ad.blocking.World) -> int:
        model = nn.Linear(2, 1)

        def training(count: int, *, fails: bool = False) -> Any:
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            with SelectiveAveraging(model, optimizer, 4, start_timeout_s=20.0) as averaging:
                policy = averaging.policy
                assert policy is not None and policy.awaited.optimizer is optimizer
                for step in range(count):
                    averaging.step(world.rank + step)
                if fails:
                    raise RuntimeError("CUDA out of memory. Tried to allocate 2.00 GiB")
            assert averaging.policy is None
            return policy

        if world.rank == 0:
            return int(training(8).iteration)
        with pytest.raises(RuntimeError, match="out of memory"):
            training(3, fails=True)
        return int(training(5).iteration)

    assert ad.simulate(ad.blocking.hosted(main), ranks=2, seed=1, strict=True).results == (8, 8)


@pytest.mark.parametrize("other", ["model", "options"])
def test_a_training_of_something_else_starts_a_policy(other: str) -> None:
    from asyncdist.integrations.pytorch import SelectiveAveraging

    def main(_: ad.blocking.World) -> None:
        models = [nn.Linear(2, 1), nn.Linear(2, 1)]
        first, second = (
            SelectiveAveraging(model, torch.optim.SGD(model.parameters(), lr=0.1), every)
            for model, every in ((models[0], 2), (models[other == "model"], 2 + (other == "options")))
        )
        assert first.policy is not None and first.policy is not second.policy

    ad.run_local(ad.blocking.hosted(main), ranks=2, strict=True)


def test_a_training_with_another_group_starts_a_policy() -> None:
    """Regression: the second training continued to average within the group of the first one."""

    def main(world: ad.blocking.World) -> tuple[float, float]:
        model = nn.Linear(1, 1, bias=False)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        nn.init.constant_(model.weight, float(world.rank))
        half = world.new_group([0, 1] if world.rank < 2 else [2, 3])
        means = []
        for group in (half, None, world.group):
            averaging = Averaging(AverageAllPolicy(model, optimizer, average_every=1, group=group))
            averaging.step()
            means.append(model.weight.item())
            policies.add((world.rank, id(averaging.policy)))
        return means[0], means[1]

    policies: set[tuple[int, int]] = set()
    results = ad.run_local(ad.blocking.hosted(main), ranks=4, strict=True)
    assert list(results) == [(0.5, 1.5), (0.5, 1.5), (2.5, 1.5), (2.5, 1.5)]
    assert len(policies) == 8, "the group of all ranks is the default group, so that its policy continues"


@pytest.mark.parametrize("second", ["trainable", "all"])
def test_a_training_of_unfrozen_parameters_starts_a_policy(second: Any) -> None:
    """Regression: the policy of the first training continued, and refused the new parameters in its next average."""

    def main(world: ad.blocking.World) -> list[float]:
        model = nn.Sequential(nn.Linear(1, 1, bias=False), nn.Linear(1, 1, bias=False))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        first: Any = model[0]
        first.requires_grad_(False)
        nn.init.constant_(first.weight, 4.0)
        chosen: tuple[Any, Any] = ("trainable", second)
        weights = []
        for parameters in chosen:
            averaging = Averaging(AverageAllPolicy(model, optimizer, average_every=1, parameters=parameters))
            averaging.step()
            weights.append(first.weight.item())
            first.requires_grad_(True)
            nn.init.constant_(first.weight, float(world.rank))
        return weights

    assert list(ad.run_local(ad.blocking.hosted(main), ranks=2, strict=True)) == [[4.0, 0.5]] * 2


def test_a_training_that_continues_is_judged_by_its_metric(caplog: pytest.LogCaptureFixture) -> None:
    """Regression: a training that continued an open policy was judged by the metric of the earlier training."""

    def main(world: ad.blocking.World) -> list[bool]:
        model = nn.Linear(1, 1, bias=False)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        calls: list[str] = []

        def first() -> float:
            calls.append("first")
            return 1.0

        def second() -> float:
            calls.append("second")
            return 2.0

        policies = []
        for metric in (first, second):
            made = AsyncSelectiveAveragingPolicy(model, optimizer, average_every=1, metric=metric)
            averaging = Averaging(made)
            averaging.step()
            policies.append(averaging.awaited)
        assert policies[0] is policies[1]
        return [name in calls[-1:] for name in ("first", "second")]

    assert list(ad.run_local(ad.blocking.hosted(main), ranks=2, strict=True)) == [[False, True]] * 2
    texts = [record.getMessage() for record in caplog.records if record.name == "asyncdist.integrations.pytorch"]
    assert len(texts) == 2 and all("use averaging.policy" in text for text in texts), texts


def test_policy_left_open_for_lack_of_memory_ends_with_its_rank() -> None:
    from asyncdist.integrations.pytorch import SelectiveAveraging

    def main(_: ad.blocking.World) -> None:
        model = nn.Linear(2, 1)
        averaging = SelectiveAveraging(model, torch.optim.SGD(model.parameters(), lr=0.1), 2)
        with pytest.raises(MemoryError), averaging:
            raise MemoryError
        left.append(averaging)
        assert averaging.policy is not None

    left: list[SelectiveAveraging] = []
    ad.run_local(ad.blocking.hosted(main), ranks=2, strict=True)
    assert [averaging.policy for averaging in left] == [None, None]


def begins_again(kind: str) -> Callable[[ad.blocking.World], Any]:
    """Return a main whose rank 1 runs out of memory, and begins again with another model or options."""
    from asyncdist.integrations.pytorch import SelectiveAveraging

    def main(world: ad.blocking.World) -> Any:
        def made(width: int = 2) -> tuple[nn.Module, torch.optim.Optimizer]:
            torch.manual_seed(0)
            model = nn.Linear(width, 1)
            return model, torch.optim.SGD(model.parameters(), lr=0.1)

        def training(count: int, *, width: int = 2, every: int = 2, fails: bool = False) -> Any:
            with SelectiveAveraging(*made(width), every, start_timeout_s=3.0) as averaging:
                for step in range(count):
                    averaging.step(world.rank + step)
                if fails:
                    raise RuntimeError("CUDA out of memory. Tried to allocate 2.00 GiB")
                return None if averaging.policy is None else averaging.policy.iteration

        if world.rank == 0 and kind != "all":
            with SelectiveAveraging(*made(), 2) as averaging:
                world.sleep(10.0 if kind == "others train" else 0.0)
                return averaging.step(1.0) is not None
        results = []
        again: list[dict[str, Any]] = [{"fails": True}, {"width": 3, "fails": True}, {"width": 4, "every": 3}]
        for options in again:
            try:
                results.append(training(6, **options))
            except RuntimeError as error:
                results.append(str(error).partition(".")[0])
        return results

    return main


@pytest.mark.parametrize("kind", ["all", "others train", "others end"])
def test_another_model_after_exhausted_memory_loses_no_training(kind: str, caplog: pytest.LogCaptureFixture) -> None:
    """Regression: a rank that restarted with a different model ended the job after ``start_timeout_s``."""
    report = ad.simulate(ad.blocking.hosted(begins_again(kind)), ranks=2, seed=1, strict=True, until_s=100.0)
    failed = "CUDA out of memory"
    told = [record.getMessage() for record in caplog.records if record.name == "asyncdist.integrations"]
    if kind == "all":
        assert report.results == ([failed, failed, 6],) * 2
        assert not any("without averages" in text for text in told)
    else:
        assert report.results == (True, [failed, failed, None])
        (begins,) = [text for text in told if "waits up to 3 s for all ranks to do the same" in text]
        assert "different model or different options" in begins
        (apart,) = [text for text in told if "so this rank continues without averages" in text]
        assert "ranks 0-1" in apart


@pytest.mark.parametrize(
    "pauses_s", [(5.0, 5.0), (1.0, 1.0), (2.5, 4.5), (4.5, 2.5)], ids=["later", "meanwhile", "around it", "or reversed"]
)
@pytest.mark.parametrize("apart", [0, 1])
def test_all_start_again_after_one_has_trained_apart(apart: int, pauses_s: tuple[float, float]) -> None:
    """Regression: the start that no rank had joined was counted, and the next one failed on every rank.

    The next start of a different rank was compared with the first one, which was still waiting, and refused. If the
    first start timed out before all ranks had arrived, that rank got its StartTimeoutError.
    """
    from asyncdist.integrations.pytorch import SelectiveAveraging

    def main(world: ad.blocking.World) -> list[int | None]:
        def training(count: int, *, every: int = 2, fails: bool = False, pause_s: float = 0.0) -> int | None:
            torch.manual_seed(0)
            model = nn.Linear(2, 1)
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            with SelectiveAveraging(model, optimizer, every, start_timeout_s=3.0) as averaging:
                for step in range(count):
                    averaging.step(world.rank + step)
                if fails:
                    raise MemoryError
                world.sleep(pause_s)
                return None if averaging.policy is None else averaging.policy.iteration

        if world.rank != apart:
            is_last = world.rank == max({0, 1, 2} - {apart})
            return [training(4, pause_s=pauses_s[is_last]), training(6)]
        with pytest.raises(MemoryError):
            training(4, fails=True)
        return [training(4, every=3), training(6)]

    report = ad.simulate(ad.blocking.hosted(main), ranks=3, seed=1, strict=True, until_s=100.0)
    assert report.results == tuple([None if rank == apart else 4, 6] for rank in range(3))


def test_training_in_an_except_clause_continues_its_policy() -> None:
    """Regression: outside a block, exhausted memory was not noticed, and no rank joined the second start."""
    from asyncdist.integrations.pytorch import SelectiveAveraging

    def main(world: ad.blocking.World) -> int:
        def training(count: int, *, fails: bool = False) -> Any:
            torch.manual_seed(0)
            model = nn.Linear(2, 1)
            averaging = SelectiveAveraging(model, torch.optim.SGD(model.parameters(), lr=0.1), 4, start_timeout_s=3.0)
            for step in range(count):
                averaging.step(world.rank + step)
            if fails:
                raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")
            assert averaging.policy is not None
            return averaging.policy.iteration

        if world.rank == 0:
            return int(training(8))
        try:
            return int(training(3, fails=True))
        except torch.OutOfMemoryError:
            return int(training(5))

    assert ad.simulate(ad.blocking.hosted(main), ranks=2, seed=1, strict=True).results == (8, 8)


def test_a_second_start_that_no_rank_joins_names_the_open_policy() -> None:
    from asyncdist.integrations.pytorch import SelectiveAveraging

    def main(world: ad.blocking.World) -> str:
        def begin() -> None:
            model = nn.Linear(2, 1)
            SelectiveAveraging(model, torch.optim.SGD(model.parameters(), lr=0.1), 4, start_timeout_s=3.0)

        begin()
        if world.rank == 0:
            world.sleep(5.0)
            return ""
        with pytest.raises(ad.StartTimeoutError) as raised:
            begin()
        return str(raised.value)

    told = ad.simulate(ad.blocking.hosted(main), ranks=2, seed=1, strict=True).results[1]
    assert "rank 0 did not join" in told and "with SelectiveAveraging(...) as averaging" in told


@pytest.mark.parametrize("has_scheduler", [False, True])
@pytest.mark.parametrize("keeps_model", [False, True])
def test_a_new_optimizer_gets_the_hyperparameters(keeps_model: bool, has_scheduler: bool) -> None:
    """Regression: after memory ran out, the policy wrote the hyperparameters into the old optimizer.

    For the same model, it also refused the new optimizer if that had a new scheduler.
    """

    def main(world: ad.blocking.World) -> int:
        kept = nn.Linear(1, 1)

        def training(count: int, first: int = 0) -> int:
            model = kept if keeps_model else nn.Linear(1, 1)
            optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
            scheduler = torch.optim.lr_scheduler.ConstantLR(optimizer, 1.0) if has_scheduler else None
            made = PopulationTrainingPolicy(
                model, optimizer, average_every=2, hyperparameters={"lr": (1e-4, 1e-2)}, lr_scheduler=scheduler
            )
            rates = set()
            with Averaging(made) as averaging:
                policy = averaging.awaited
                assert policy is not None and policy.iteration == first
                for _ in range(count):
                    world.sleep(0.01)
                    averaging.step(loss=float(world.rank == 0))
                    rates.add(optimizer.param_groups[0]["lr"])
                    assert policy.hyperparameters["lr"] == optimizer.param_groups[0]["lr"]
                if world.rank == 0 and not first:
                    raise MemoryError
            return len(rates)

        if world.rank == 0:
            with pytest.raises(MemoryError):
                training(4)
            return training(40, 4)
        return training(44)

    results = ad.simulate(ad.blocking.hosted(main), ranks=4, seed=1).results
    assert results[0] > 1, "the hyperparameters of rank 0 must change"
