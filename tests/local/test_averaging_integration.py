"""Tests any policy in a training loop without coroutines: its steps, its options, and its state."""

from __future__ import annotations

import contextlib
import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from support.facts import names, naming
from torch import nn

import asyncdist as ad
from asyncdist.integrations.joining import averaging, selective_averaging
from asyncdist.integrations.pytorch import Averaging, SelectiveAveraging
from protocols import (
    AsyncSelectiveAveragingPolicy,
    AverageAllPolicy,
    DiLoCoPolicy,
    GossipPolicy,
    OneSidedSelectiveAveragingPolicy,
    PopulationTrainingPolicy,
    ReplicaAveragingPolicy,
    SelectiveDiLoCoPolicy,
    SpawnPolicy,
)


def made(kind: type[SpawnPolicy] = DiLoCoPolicy, **options: Any) -> Any:
    model = nn.Linear(2, 1, bias=False)
    nn.init.ones_(model.weight)
    return kind(model, torch.optim.SGD(model.parameters(), lr=1.0), **{"average_every": 4, **options})  # type: ignore[call-arg]


def train(policy: Any, averages: Any, amount: float, **given: Any) -> Any:
    """Subtract ``amount`` from each weight, and do a step of the policy."""
    policy.optimizer.zero_grad()
    (policy.model.weight.sum() * amount).backward()
    policy.optimizer.step()
    return averages.step(**given)


@pytest.mark.parametrize("kind", [DiLoCoPolicy, AverageAllPolicy])
def test_a_policy_without_metric_needs_no_loss(kind: type[SpawnPolicy]) -> None:
    options: dict[str, Any] = {"outer_optimizer": None} if kind is DiLoCoPolicy else {}

    def main(world: ad.blocking.World) -> list[Any]:
        policy = made(kind, **options)
        with Averaging(policy) as averages:
            infos = [bool(train(policy, averages, world.rank + 1)) for _ in range(4)]
        return [infos, policy.model.weight.tolist()]

    expected = [[False, False, False, True], [[1 - 4 * 1.5] * 2]]  # ranks subtract 1 or 2 per step
    assert ad.run_local(ad.blocking.hosted(main), ranks=2, strict=True) == [expected] * 2


@pytest.mark.parametrize("kind", [AsyncSelectiveAveragingPolicy, OneSidedSelectiveAveragingPolicy])
def test_a_policy_with_metric_is_given_the_mean_loss(kind: type[SpawnPolicy]) -> None:
    def main(world: ad.blocking.World) -> float:
        policy = made(kind, metric_mode="min")
        averages = Averaging(policy)
        for step in range(4):
            averages.step(loss=float(step))
        with pytest.raises(TypeError):
            averages.step(loss=1.0, score=1.0)
        return float(policy.state_dict()["metric"])

    assert ad.run_local(ad.blocking.hosted(main), ranks=2, strict=True) == [1.5] * 2


def test_a_policy_that_evaluates_needs_a_function() -> None:
    """The training loss of a loop says nothing about the trial weights; with ``metric``, it is ignored."""

    def main(world: ad.blocking.World) -> Any:
        with pytest.raises(TypeError, match=naming("SelectiveDiLoCoPolicy", "metric=evaluate")):
            Averaging(made(SelectiveDiLoCoPolicy))
        seen = []

        def evaluate() -> float:
            seen.append(policy.model.weight.sum().item())
            return seen[-1]

        policy = made(SelectiveDiLoCoPolicy, metric=evaluate, metric_mode="min")
        with Averaging(policy) as averages:
            infos = [train(policy, averages, world.rank + 1, loss=1.0) for _ in range(4)]
        return seen, infos[-1].donors

    results = ad.run_local(ad.blocking.hosted(main), ranks=2, strict=True)
    assert results == [([2.0, 2.0 - 4 * amount], (0, 1)) for amount in (1, 2)]


def test_tokens_weight_the_mean_in_a_loop_and_blocking() -> None:
    def main(world: ad.blocking.World) -> list[Any]:
        weights = []
        for blocking in (True, False):
            policy = made(weights="tokens", outer_optimizer=None, average_every=2)
            with ad.blocking.policy(policy) if blocking else Averaging(policy) as averages:
                for _ in range(2):
                    info = train(policy, averages, world.rank + 1, tokens=1.0 + 2 * world.rank)
            assert info.weights == (0.25, 0.75)
            weights.append(policy.model.weight.tolist())
        return weights

    mean = 1 - 2 * (0.25 * 1 + 0.75 * 2)
    assert ad.run_local(ad.blocking.hosted(main), ranks=2, strict=True) == [[[[mean] * 2]] * 2] * 2


@pytest.mark.parametrize("world", ["local", "simulated"])
def test_a_saved_state_continues_to_the_same_bits(world: str) -> None:
    """The state is saved while a round is in flight, and contains the anchor and the outer momentum."""

    def run(policy: Any, averages: Any, steps: range, rank: int) -> None:
        for step in steps:
            train(policy, averages, 0.1 * (rank + 1) * (step % 3))

    def main(own: ad.blocking.World) -> list[Any]:
        options: dict[str, Any] = {"average_every": 4, "overlap_steps": 3}
        whole = made(**options)
        with Averaging(whole) as averages:
            run(whole, averages, range(20), own.rank)
        half = made(**options)
        with Averaging(half) as averages:
            run(half, averages, range(9), own.rank)
            state, weights = averages.state_dict(), copy.deepcopy(half.model.state_dict())
        with pytest.raises(ad.ClosedError):
            averages.state_dict()
        assert state["in_flight"], "no round was in flight, so the test tests nothing"
        other = made(**options)
        other.load_state_dict(state)
        other.model.load_state_dict(weights)
        with Averaging(other) as averages:
            assert other.iteration == 9
            run(other, averages, range(9, 20), own.rank)
        assert other.model.weight.tolist() == whole.model.weight.tolist()
        return [other.model.weight.tolist(), whole.state_dict()["iteration"]]

    hosted = ad.blocking.hosted(main)
    if world == "local":
        ad.run_local(hosted, ranks=2, strict=True)
    else:
        ad.simulate(hosted, ranks=2, seed=1, strict=True).value()


@pytest.mark.parametrize(("step_count", "is_seeded"), [(1, False), (1, True), (0, False)])
def test_a_resumed_policy_continues_with_its_random_states(step_count: int, is_seeded: bool, tmp_path: Path) -> None:
    """Regression: starting the policy gave each rank other random numbers than without an interruption."""

    def run(*, resumes: bool = False) -> tuple[list[float], list[float]]:
        """Start a policy, possibly from a checkpoint, and return numbers drawn at the beginning and the end."""
        torch.manual_seed(0)
        policy = made()
        if step_count == 0:  # the checkpoint is from before the first start, after which the ranks' numbers differ
            ad.blocking.save_population(tmp_path, policy.model, policy.optimizer, policy=policy)
        if resumes:
            ad.blocking.load_population(tmp_path, policy.model, policy.optimizer, policy=policy)
            if is_seeded:  # as in a program that seeds late
                torch.manual_seed(0)
        with Averaging(policy) as averages:
            first = torch.rand(2).tolist()
            for _ in range(step_count):
                averages.step()
                ad.blocking.save_population(tmp_path, policy.model, policy.optimizer, policy=policy)
        return first, torch.rand(2).tolist()

    def main(_: ad.blocking.World) -> list[float]:
        first, after = run()
        resumed = run(resumes=True)[0]
        assert (resumed == after) is (step_count == 1 and not is_seeded)
        assert (resumed == first) is (step_count == 0)
        return resumed

    numbers = ad.simulate(ad.blocking.hosted(main), ranks=2, seed=1, strict=True).results
    assert numbers[0] != numbers[1]


@pytest.mark.parametrize("iteration", [0, 6])
def test_a_loaded_state_replaces_the_open_policy_of_the_model(iteration: int) -> None:
    """Regression: the open policy continued, with its own anchor and iteration, as after a notebook cell ran again."""

    def main(world: ad.blocking.World) -> list[Any]:
        policy = made()
        averages = Averaging(policy)
        for _ in range(iteration):
            train(policy, averages, 0.1 * (world.rank + 1))
        state, weights = averages.state_dict(), copy.deepcopy(policy.model.state_dict())
        ends = []
        for extra in (5, 0):  # the first training continues beyond the saved state
            for _ in range(extra):
                train(policy, averages, 0.3)
            model = policy.model
            model.load_state_dict(weights)
            policy = DiLoCoPolicy(model, policy.optimizer, average_every=4)
            policy.load_state_dict(state)
            averages = Averaging(policy)
            for _ in range(10):
                train(policy, averages, 0.1 * (world.rank + 1))
            ends.append([policy.iteration, *model.weight.tolist()])
        return ends

    for first, again in ad.run_local(ad.blocking.hosted(main), ranks=2, strict=True):
        assert first[0] == iteration + 10 and first == again


def test_an_average_of_all_names_a_rank_that_left_earlier() -> None:
    """Regression: the error said that the rank had left the world, and proposed no solution."""

    def main(world: ad.blocking.World) -> None:
        policy = made(AverageAllPolicy)
        with Averaging(policy) as averages:
            for _ in range(8 if world.rank else 5):
                train(policy, averages, 0.1)

    with pytest.raises(ad.ClosedError) as caught:
        ad.run_local(ad.blocking.hosted(main), ranks=2, strict=True)
    assert names(caught.value, "rank 0 left the policy", "DiLoCoPolicy with outer_optimizer=None")


@pytest.mark.parametrize("overlap", [0, 3])
def test_after_an_exception_no_rank_waits_for_the_state(overlap: int, caplog: pytest.LogCaptureFixture) -> None:
    """Regression: Lightning's checkpoint of an exception did not contain the policy's state."""

    def main(world: ad.blocking.World) -> Any:
        training = averaging(DiLoCoPolicy, {"average_every": 4, "overlap_steps": overlap})
        policy = made()
        training.begin(policy.model, policy.optimizer)
        for _ in range(4 if world.rank == 0 or not overlap else 3):
            training.step(None)  # with an overlap, rank 0 then has a round in flight, for which rank 1 is not ready
        state = training.state_without_waiting()
        ad.blocking.barrier()
        return state.get("iteration")

    results = ad.run_local(ad.blocking.hosted(main), ranks=2, strict=True)
    assert results == ([None, 3] if overlap else [4, 4])
    assert ("does not contain the policy's state: await" in caplog.text) is bool(overlap)


def test_a_new_model_after_lost_memory_begins_at_the_anchor() -> None:
    """A rank that begins again with initial weights would pull the mean back to them."""

    def main(world: ad.blocking.World) -> list[float]:
        def training(count: int, *, fails: bool = False) -> Any:
            policy = made(average_every=2)
            with Averaging(policy) as averages:
                begun = policy.model.weight.tolist()
                for _ in range(count):
                    train(policy, averages, 0.5)
                if fails:
                    raise MemoryError
            return begun, policy.model.weight.tolist()

        if world.rank == 0:
            return list(training(4)[1])
        with pytest.raises(MemoryError):
            training(2, fails=True)
        begun, ended = training(2)
        assert begun != [[1.0, 1.0]]
        return list(ended)

    first, second = ad.simulate(ad.blocking.hosted(main), ranks=2, seed=1, strict=True).results
    assert first == second


def test_a_training_with_a_loaded_state_keeps_the_random_states(tmp_path: Path) -> None:
    """Regression: if a callback loaded the population, its start gave each rank other random numbers."""

    def main(_: ad.blocking.World) -> list[float]:
        policy = made()
        with Averaging(policy) as averages:
            averages.step()
            ad.blocking.save_population(tmp_path, policy.model, policy.optimizer, policy=policy)
            after = torch.rand(2).tolist()
        training, other = averaging(DiLoCoPolicy, {"average_every": 4}), made()
        ad.blocking.load_population(tmp_path, other.model, other.optimizer, policy=training)
        training.begin(other.model, other.optimizer)
        assert torch.rand(2).tolist() == after
        training.end()
        return after

    numbers = ad.simulate(ad.blocking.hosted(main), ranks=2, seed=1, strict=True).results
    assert numbers[0] != numbers[1]


def test_a_rank_that_trains_without_averages_has_an_empty_state() -> None:
    """Regression: ``state_dict()`` raised ClosedError, which ended the training that was to be saved."""

    def main(world: ad.blocking.World) -> Any:
        states = []
        for attempt in range(1 + world.rank):
            model = nn.Linear(1, 1)
            policy = AverageAllPolicy(
                model, torch.optim.SGD(model.parameters(), lr=0.1), average_every=2, start_timeout_s=1.0
            )
            with contextlib.suppress(MemoryError), Averaging(policy) as averages:
                averages.step()
                states.append(averages.state_dict())
                if attempt == 0:
                    raise MemoryError
        with pytest.raises(ad.ClosedError) if world.rank else contextlib.nullcontext():
            averages.state_dict()
        return [bool(state) for state in states]

    results = ad.simulate(ad.blocking.hosted(main), ranks=2, seed=1, strict=True).results
    assert results == ([True], [True, False])


def test_selective_averaging_refuses_a_function_as_the_metric() -> None:
    model = nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(TypeError, match=r"no option 'metric': .* use Averaging with AsyncSelectiveAveragingPolicy"):
        SelectiveAveraging(model, optimizer, 2, metric=lambda: 1.0)  # type: ignore[call-arg]


def test_a_new_model_is_named_as_the_reason(caplog: pytest.LogCaptureFixture) -> None:
    """Regression: the warning said that the model or the options were of a different kind."""

    def main(world: ad.blocking.World) -> None:
        for _ in range(1 + world.rank):
            model = nn.Linear(1, 1)
            policy = AverageAllPolicy(
                model, torch.optim.SGD(model.parameters(), lr=0.1), average_every=2, start_timeout_s=1.0
            )
            with contextlib.suppress(MemoryError), Averaging(policy):
                raise MemoryError

    ad.simulate(ad.blocking.hosted(main), ranks=2, seed=1, strict=True)
    (told,) = [record.getMessage() for record in caplog.records if "has run out of memory" in record.getMessage()]
    assert "begins again with a different model" in told
    assert "the open AverageAllPolicy cannot use" in told
    assert "make the model outside the function" in told


@pytest.mark.parametrize(
    ("kind", "options", "error", "words"),
    [
        (DiLoCoPolicy, {"sync_every": 2}, TypeError, "DiLoCoPolicy has no option 'sync_every': here average_every"),
        (DiLoCoPolicy, {"fragmens": 2}, TypeError, "DiLoCoPolicy has no option 'fragmens'; .*fragments"),
        (AverageAllPolicy, {"replacement_ratio": 1}, TypeError, "AverageAllPolicy has no option 'replacement_ratio'"),
        (DiLoCoPolicy, {"monitor": "val_loss"}, ValueError, "monitor must be None, .* DiLoCoPolicy .* got 'val_loss'"),
        (ReplicaAveragingPolicy, {}, ValueError, "policy must be .*replica_size"),
        (AverageAllPolicy, {"replica_size": 2}, TypeError, "AverageAllPolicy has no option 'replica_size'"),
        (DiLoCoPolicy, {"replica_size": 0}, ValueError, "replica_size must be .*1.* got 0"),
        (nn.Linear, {}, TypeError, "policy must be the class of a policy"),
        (GossipPolicy, {"mode": "max"}, TypeError, "GossipPolicy has no option 'mode'; the names are"),
        (AsyncSelectiveAveragingPolicy, {"mode": "max"}, TypeError, "no option 'mode'; pass metric_mode='max'"),
        (AsyncSelectiveAveragingPolicy, {"monitor": 3}, TypeError, "monitor must be None or the name .* got 3"),
        (AsyncSelectiveAveragingPolicy, {"metric_mode": "max"}, ValueError, "metric_mode must be 'min' .* got 'max'"),
        (
            AsyncSelectiveAveragingPolicy,
            {"metric": float, "monitor": "val_loss"},
            ValueError,
            "monitor must be None, .* metric.* got 'val_loss'",
        ),
    ],
)
def test_a_trainers_policy_is_checked_at_once(kind: Any, options: Any, error: type[Exception], words: str) -> None:
    monitor = options.pop("monitor", None)
    with pytest.raises(error, match=words):
        averaging(kind, options, monitor=monitor)


def test_a_trainers_loss_is_not_maximised() -> None:
    """Regression: with ``mode="max"`` and without ``monitor``, ranks with large losses replaced the others."""
    variants: tuple[tuple[str, Any, Any], ...] = (("mode", "max", {}), ("metric_mode", None, {"metric_mode": "max"}))
    for option, mode, options in variants:
        selective_averaging(1, mode, options, monitor="val_accuracy", is_of_trainer=True)
        selective_averaging(1, mode, options)  # a loop of the user passes its own score
        with pytest.raises(ValueError, match=f"^{option} must be 'min' .* monitor=.* got 'max'$"):
            selective_averaging(1, mode, options, is_of_trainer=True)
    averaging(AsyncSelectiveAveragingPolicy, {"metric_mode": "max", "metric": float})
    averaging(AsyncSelectiveAveragingPolicy, {"metric_mode": "max"}, monitor="val_accuracy")


def test_a_class_is_not_a_policy_of_a_loop() -> None:
    with pytest.raises(TypeError, match="policy must be a policy, such as"):
        Averaging(DiLoCoPolicy)  # type: ignore[type-var]


def test_tokens_of_a_policy_without_weights_are_refused() -> None:
    """Regression: the error named an internal method, and not the option that is missing."""

    def main(world: ad.blocking.World) -> None:
        model = nn.Linear(2, 1)
        averaging = SelectiveAveraging(model, torch.optim.SGD(model.parameters(), lr=0.1), average_every=2)
        with pytest.raises(TypeError, match=r"^tokens must be None, because AsyncSelectiveAveragingPolicy .*got 4$"):
            averaging.step(loss=1.0, tokens=4)

    ad.run_local(ad.blocking.hosted(main), ranks=1)


@pytest.mark.parametrize("is_integration", [True, False])
def test_an_assigned_optimizer_is_that_of_the_policy(is_integration: bool) -> None:
    """Regression: only the blocking wrapper had it, so averages reset the old optimizer."""

    def main(world: ad.blocking.World) -> tuple[bool, int]:
        made_policy = made(outer_optimizer=None, optimizer_state="reset")
        with contextlib.ExitStack() as block:
            if is_integration:
                averages: Any = block.enter_context(Averaging(made_policy))
                policy = averages.policy
            else:
                averages = policy = block.enter_context(ad.blocking.policy(made_policy))
            new = policy.optimizer = torch.optim.Adam(made_policy.model.parameters())
            for _ in range(4):
                train(made_policy, averages, 1.0)
        return made_policy.optimizer is new, len(new.state)

    assert ad.run_local(ad.blocking.hosted(main), ranks=2, strict=True) == [(True, 0)] * 2


@pytest.mark.parametrize("chooses_policy", [True, False])
@pytest.mark.parametrize("wrapper", ["Lookahead", "ScheduleFreeWrapper"])
def test_a_wrapper_that_keeps_weights_is_the_optimizer(wrapper: str, chooses_policy: bool) -> None:
    """Regression: its inner optimizer was given to the policy, so slow weights and z undid a part of each average."""
    pytorch_optimizer = pytest.importorskip("pytorch_optimizer", reason="the test extra brings pytorch-optimizer")

    def main(world: ad.blocking.World) -> list[float]:
        model = nn.Linear(1, 1, bias=False)
        nn.init.ones_(model.weight)
        optimizer = getattr(pytorch_optimizer, wrapper)(torch.optim.SGD(model.parameters(), lr=0.1))
        if wrapper == "ScheduleFreeWrapper":
            optimizer.train()
        if chooses_policy:
            averages: Any = SelectiveAveraging(model, optimizer, average_every=100)
            assert averages.policy.awaited.optimizer is optimizer
            return []
        averages = Averaging(AverageAllPolicy(model, optimizer, average_every=4))
        for step in range(15):  # Lookahead mixes its slow weights in after steps 5, 10 and 15
            optimizer.zero_grad()
            (model.weight.sum() * (world.rank + 1 if step < 8 else 0)).backward()
            optimizer.step()
            averages.step()
        return model.weight.flatten().tolist()

    ranks = ad.run_local(ad.blocking.hosted(main), ranks=2, strict=True)
    assert ranks[0] == ranks[1]


def test_a_scheduled_population_trains_in_a_plain_loop() -> None:
    """Regression: the policy was given its optimizer again, and then raised that it had no scheduler."""

    def main(world: ad.blocking.World) -> tuple[float, float]:
        model = nn.Linear(2, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2)
        policy = PopulationTrainingPolicy(
            model, optimizer, average_every=2, hyperparameters={"lr": (0.1, 1.0)}, lr_scheduler=scheduler
        )
        with Averaging(policy) as averages:
            for step in range(4):
                optimizer.step()
                scheduler.step()
                averages.step(loss=float(step + world.rank))
        return policy.hyperparameters["lr"], scheduler.base_lrs[0]

    ranks = ad.run_local(ad.blocking.hosted(main), ranks=2, strict=True)
    assert all(own == base != 0.1 for own, base in ranks)


def test_an_averaging_is_saved_like_its_policy(tmp_path: Path) -> None:
    """Regression: the save raised LocalProtocolError, because the state of ``Averaging`` waits in a blocking call."""

    def main(world: ad.blocking.World) -> list[Any]:
        policy = made()
        with Averaging(policy) as averages:
            for _ in range(6):
                train(policy, averages, 1.0)
            ad.blocking.save_population(tmp_path, policy.model, policy.optimizer, policy=averages)
            other = made()
            ad.blocking.load_population(tmp_path, other.model, other.optimizer, policy=other)
        with pytest.raises(ad.ClosedError, match="this averaging has ended"):
            ad.blocking.save_population(tmp_path, policy.model, policy.optimizer, policy=averages)
        return [other.iteration, torch.equal(other.model.weight, policy.model.weight)]

    assert ad.run_local(ad.blocking.hosted(main), ranks=2, strict=True) == [[6, True]] * 2
