"""Tests that after an average, an optimizer's own copy of the weights is averaged, too, under each policy.

Regression: with rank 2 at 100 and its donors at 1, fp32 masters in a state had no average take effect, Lookahead ended
at 50.5, and schedule-free optimizers at 31.4, with -10 shown by their `eval()`.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from support.facts import names
from support.weight_keepers import FlatMaster, Hidden, Lookahead, MasterList, Masters
from torch import Tensor, nn

import asyncdist as ad
from asyncdist.simulation import Kill, Network, Restart
from asyncdist.tensors.optimizers.weights import AveragedStates, OptimizerWeights
from protocols import (
    AsyncDiLoCoPolicy,
    AsyncSelectiveAveragingPolicy,
    AverageAllPolicy,
    DiLoCoPolicy,
    OneSidedSelectiveAveragingPolicy,
    ReplicaAveragingPolicy,
)

schedulefree = pytest.importorskip("schedulefree", reason="the test extra brings schedulefree")
pytorch_optimizer = pytest.importorskip("pytorch_optimizer", reason="the test extra brings pytorch-optimizer")

EVERY = 5


def selective(model: nn.Module, optimizer: Any, **options: Any) -> Any:
    return AsyncSelectiveAveragingPolicy(
        model,
        optimizer,
        average_every=EVERY,
        replacement_ratio=0.34,
        quorum=1.0,
        cooldown=10**9,
        threshold=0.0,
        **options,
    )


def one_sided(model: nn.Module, optimizer: Any, **options: Any) -> Any:
    return OneSidedSelectiveAveragingPolicy(
        model,
        optimizer,
        average_every=EVERY,
        replacement_mode="threshold",
        threshold_metric=-2.5,
        donor_count=2,
        **options,
    )


def of_all(model: nn.Module, optimizer: Any, **options: Any) -> Any:
    return AverageAllPolicy(model, optimizer, average_every=EVERY, **options)


def local_sgd(model: nn.Module, optimizer: Any, **options: Any) -> Any:
    return DiLoCoPolicy(model, optimizer, average_every=EVERY, outer_optimizer=None, **options)


def of_replicas(model: nn.Module, optimizer: Any, **options: Any) -> Any:
    return ReplicaAveragingPolicy(
        model,
        optimizer,
        replica_size=2,
        average_every=EVERY,
        replacement_ratio=0.34,
        quorum=1.0,
        cooldown=10**9,
        threshold=0.0,
        **options,
    )


#: Each policy with the number of ranks that share weights, and the donors of the last of three such ranks.
POLICIES: dict[str, tuple[Callable[..., Any], int, tuple[int, ...]]] = {
    "selective": (selective, 1, (0, 1)),
    "one-sided": (one_sided, 1, (0, 1)),
    "all": (of_all, 1, (0, 1, 2)),
    "local SGD": (local_sgd, 1, (0, 1, 2)),
    "replicas": (of_replicas, 2, (0, 1)),
}


def build(number: int) -> nn.Module:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_((1.0, 3.0, 100.0)[number])
    return model


def train(model: nn.Module, optimizer: Any, number: int) -> None:
    generator = torch.Generator().manual_seed(number)
    for _ in range(7):
        for parameter in model.parameters():
            parameter.grad = torch.randn(parameter.shape, generator=generator).to(parameter.dtype)
        optimizer.step()


def values(model: nn.Module) -> Tensor:
    return torch.cat([each.detach().float().reshape(-1) for each in model.parameters()])


async def replaced(world: ad.World, make: Callable[[nn.Module], Any], policy: str, **options: Any) -> Any:
    """Train apart, then step until the last rank has taken averages; return the optimizer and weights before that."""
    enter, size, _ = POLICIES[policy]
    number = world.rank // size
    model = build(number)
    optimizer = make(model)
    train(model, optimizer, number)
    before = values(model), copy.deepcopy(optimizer.state)
    for parameter in model.parameters():
        parameter.grad = None
    async with enter(model, optimizer, **options) as entered:
        for _ in range(60):
            await entered.step(-1.0 - number)
    return model, optimizer, before


def run(make: Callable[[nn.Module], Any], policy: str, **options: Any) -> tuple[list[Any], tuple[int, ...]]:
    async def main(world: ad.World) -> Any:
        return await replaced(world, make, policy, **options)

    _, size, donors = POLICIES[policy]
    results = ad.simulate(main, ranks=3 * size, seed=1).results
    if size > 1:
        assert torch.equal(values(results[-1][0]), values(results[-2][0])), "the ranks of a replica must be equal"
    return results[size - 1 :: size], donors


SCHEDULE_FREE: dict[str, Callable[[nn.Module], Any]] = {
    "schedulefree AdamW": lambda model: schedulefree.AdamWScheduleFree(model.parameters(), lr=0.1),
    "schedulefree SGD": lambda model: schedulefree.SGDScheduleFree(model.parameters(), lr=0.1),
    "schedulefree RAdam": lambda model: schedulefree.RAdamScheduleFree(model.parameters(), lr=0.1),
    "schedulefree wrapper": lambda model: schedulefree.ScheduleFreeWrapper(torch.optim.SGD(model.parameters(), lr=0.1)),
    "pytorch-optimizer": lambda model: pytorch_optimizer.ScheduleFreeAdamW(model.parameters(), lr=0.1),
}


def training(make: Callable[[nn.Module], Any]) -> Callable[[nn.Module], Any]:
    def make_training(model: nn.Module) -> Any:
        optimizer = make(model)
        optimizer.train()
        return optimizer

    return make_training


@pytest.mark.parametrize(
    ("kind", "policy"),
    [*((kind, "selective") for kind in SCHEDULE_FREE), *(("schedulefree AdamW", policy) for policy in POLICIES)],
)
def test_schedule_free_iterates_are_averaged_with_the_weights(kind: str, policy: str) -> None:
    """Schedule-free iterates and z are means of the donors', and so are the weights in `eval()`."""
    results, donors = run(training(SCHEDULE_FREE[kind]), policy)
    model, optimizer, _ = results[-1]
    zs = [torch.cat([state["z"].reshape(-1) for state in before[1].values()]) for *_, before in results]
    ys = [before[0] for *_, before in results]
    assert torch.allclose(values(model), sum(ys[rank] for rank in donors) / len(donors), rtol=1e-6)
    own = torch.cat([optimizer.state[each]["z"].reshape(-1) for each in model.parameters()])
    assert torch.allclose(own, sum(zs[rank] for rank in donors) / len(donors), rtol=1e-6)
    optimizer.eval()
    evaluated = values(model)
    optimizer.train()
    for own_model, own_optimizer, _ in results[:-1]:
        own_optimizer.eval()
        ys[results.index((own_model, own_optimizer, _))] = values(own_model)
    if policy not in ("all", "local SGD"):  # with these policies, the donors have the average, too
        assert torch.allclose(evaluated, sum(ys[rank] for rank in donors) / len(donors), rtol=1e-5)


KEEPERS: dict[str, Callable[[nn.Module], Any]] = {
    "masters": lambda model: Masters(model.bfloat16().parameters(), lr=0.1),
    "masters in a list": lambda model: MasterList(model.bfloat16().parameters(), lr=0.1),
    "a flat master": lambda model: FlatMaster(model.bfloat16().parameters(), lr=0.1),
    "lookahead": lambda model: Lookahead(torch.optim.SGD(model.parameters(), lr=0.1)),
    "pytorch-optimizer's lookahead": lambda model: pytorch_optimizer.Lookahead(
        torch.optim.SGD(model.parameters(), lr=0.1)
    ),
    "pytorch-optimizer's Ranger": lambda model: pytorch_optimizer.Ranger(model.parameters(), lr=0.1),
}


@pytest.mark.parametrize("momentum", [0.0, 0.5])
@pytest.mark.parametrize(
    ("kind", "policy"), [*((kind, "selective") for kind in KEEPERS), *(("masters", policy) for policy in POLICIES)]
)
def test_masters_and_slow_weights_become_the_average(kind: str, policy: str, momentum: float) -> None:
    if momentum and policy in ("all", "local SGD", "one-sided"):
        pytest.skip("no such option, or applied many times")
    results, donors = run(KEEPERS[kind], policy, **({"momentum": momentum} if momentum else {}))
    model, optimizer, (own, _) = results[-1]
    mean = sum(results[rank][2][0] for rank in donors) / len(donors)
    expected = momentum * own + (1 - momentum) * mean
    is_coarse = next(model.parameters()).dtype == torch.bfloat16
    tolerance = 2.0**-8 if is_coarse else 1e-6
    assert torch.allclose(values(model), expected, rtol=tolerance)
    for group in optimizer.param_groups:
        group["lr"] = 0.0
    if isinstance(optimizer, MasterList):
        optimizer.inner.param_groups[0]["lr"] = 0.0
    for _ in range(12):
        for parameter in model.parameters():
            parameter.grad = torch.zeros_like(parameter)
        optimizer.step()
    assert torch.allclose(values(model), expected, rtol=tolerance), "the optimizer must keep the average"


@pytest.mark.parametrize(
    "make", [training(SCHEDULE_FREE["schedulefree SGD"]), KEEPERS["pytorch-optimizer's lookahead"]]
)
def test_a_reset_leaves_the_average_in_place(make: Callable[[nn.Module], Any]) -> None:
    results, _ = run(make, "selective", optimizer_state="reset")
    model, optimizer, _ = results[-1]
    mean = (results[0][2][0] + results[1][2][0]) / 2
    assert torch.allclose(values(model), mean, rtol=1e-6)
    for group in optimizer.param_groups:
        group["lr"] = 0.0
    for _ in range(12):
        for parameter in model.parameters():
            parameter.grad = torch.zeros_like(parameter)
        optimizer.step()
    assert torch.allclose(values(model), mean, rtol=1e-6)


def test_ranks_of_which_one_is_schedule_free_do_not_start() -> None:
    async def main(world: ad.World) -> str:
        model = build(0)
        kind = schedulefree.SGDScheduleFree if world.rank else torch.optim.SGD
        with pytest.raises(ad.DisagreementError) as caught:
            await selective(model, kind(model.parameters(), lr=0.1)).__aenter__()
        return str(caught.value)

    for text in ad.simulate(main, ranks=3, seed=1).results:
        assert "optimizer's z of 0.weight" in text


def test_evaluating_in_a_step_is_reported(caplog: pytest.LogCaptureFixture) -> None:
    async def main(world: ad.World) -> None:
        model = build(world.rank)
        optimizer = training(SCHEDULE_FREE["schedulefree SGD"])(model)
        train(model, optimizer, world.rank)
        optimizer.eval()
        async with selective(model, optimizer) as policy:
            for _ in range(40):
                await policy.step(-1.0 - world.rank)

    with caplog.at_level(logging.WARNING):
        ad.simulate(main, ranks=3, seed=1)
    texts = [record.getMessage() for record in caplog.records]
    assert len(texts) == 3 and all("Call optimizer.train() before step()" in text for text in texts)


def test_a_hidden_copy_is_reported_at_the_next_step(caplog: pytest.LogCaptureFixture) -> None:
    async def main(world: ad.World) -> None:
        model = build(world.rank)
        optimizer = Hidden(model.parameters(), lr=0.1)
        async with selective(model, optimizer) as policy:
            for _ in range(40):
                for parameter in model.parameters():
                    parameter.grad = torch.ones_like(parameter)
                optimizer.step()
                await policy.step(-1.0 - world.rank)

    with caplog.at_level(logging.WARNING):
        ad.simulate(main, ranks=3, seed=1)
    told = [record for record in caplog.records if record.name == "asyncdist.optimizers"]
    assert ["Hidden" in record.getMessage() for record in told] == [True]


def test_another_optimizer_can_be_assigned() -> None:
    """The reset affects the optimizer that trains."""

    async def main(world: ad.World) -> Any:
        model = build(world.rank)
        first, second = (torch.optim.SGD(model.parameters(), lr=0.0, momentum=0.9) for _ in range(2))
        train(model, first, world.rank)
        train(model, second, world.rank)
        async with selective(model, first, optimizer_state="reset") as policy:
            policy.optimizer = second
            with pytest.raises(ValueError, match="Sequential"):
                policy.optimizer = torch.optim.SGD(build(0).parameters(), lr=0.1)
            for _ in range(40):
                await policy.step(-1.0 - world.rank)
            assert policy.optimizer is second
        return len(first.state), len(second.state)

    assert ad.simulate(main, ranks=3, seed=1).results == ((4, 4), (4, 4), (4, 0))


@pytest.mark.parametrize(
    "make",
    [
        lambda model: torch.optim.SGD(model.parameters(), lr=0.0),
        training(lambda model: schedulefree.SGDScheduleFree(model.parameters(), lr=0.0)),
    ],
    ids=["sgd", "schedule-free"],
)
@pytest.mark.parametrize("optimizer_state", ["keep", "reset"])
def test_a_new_model_takes_the_old_ones_place(make: Callable[[nn.Module], Any], optimizer_state: Any) -> None:
    """A rank that runs out of memory may create a new model, and continues alone with the open policy."""

    async def main(world: ad.World) -> Any:
        old, new = build(world.rank), build(world.rank)
        optimizers = [make(model) for model in (old, new)]
        other = nn.Linear(1, 1)
        train(old, optimizers[0], world.rank)
        train(new, optimizers[1], world.rank)
        before = [each.detach().clone() for each in old.parameters()]
        async with selective(old, optimizers[0], optimizer_state=optimizer_state) as policy:
            assert not policy.take_model_of(selective(other, torch.optim.SGD(other.parameters(), lr=0.1)))
            if world.rank == 2:
                assert policy.take_model_of(selective(new, optimizers[1], optimizer_state=optimizer_state))
            count = 0
            for _ in range(40):
                count += bool(await policy.step(-1.0 - world.rank))
        model, optimizer = policy.model, policy.optimizer
        is_old_kept = all(torch.equal(*pair) for pair in zip(before, old.parameters(), strict=True))
        is_moved = not all(torch.equal(*pair) for pair in zip(before, model.parameters(), strict=True))
        return count > 0, model is new, optimizer is optimizers[1], is_old_kept, is_moved

    stays = (False, False, False, True, False)
    assert ad.simulate(main, ranks=3, seed=1).results == (stays, stays, (True, True, True, True, True))


def test_a_schedule_free_optimizer_cannot_replace_a_plain_one() -> None:
    model = build(0)
    policy = selective(model, torch.optim.SGD(model.parameters(), lr=0.1))
    with pytest.raises(ValueError, match="schedule-free"):
        policy.optimizer = schedulefree.SGDScheduleFree(model.parameters(), lr=0.1)


@pytest.mark.parametrize("make", [local_sgd, selective])
def test_a_restarted_rank_gets_the_weights_and_their_copy(make: Callable[..., Any]) -> None:
    """Regression: MADGRAD's x0, which had come with the weights, was shifted by the change of the weights once more."""
    seen: dict[int, list[tuple[list[float], list[float]]]] = {}
    joined: list[tuple[int, tuple[list[float], list[float]]]] = []

    async def main(world: ad.World) -> None:
        torch.manual_seed(0)
        model = nn.Linear(4, 1, bias=False)
        optimizer = pytorch_optimizer.MADGRAD(model.parameters(), lr=0.05)
        draw = torch.Generator().manual_seed(world.rank)

        def state() -> tuple[list[float], list[float]]:
            origin = optimizer.state[model.weight].get("x0", model.weight)
            return model.weight.flatten().tolist(), origin.flatten().tolist()

        async with make(model, optimizer) as policy:
            if world.incarnation:
                joined.append((policy.iteration, state()))
            while policy.iteration < 150:
                inputs = torch.randn(8, 4, generator=draw)
                loss = (model(inputs) - inputs.sum(1, keepdim=True)).square().mean()
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                await policy.step(-loss)
                seen.setdefault(policy.iteration, []).append(state())
                await world.sleep(0.001)

    faults = [Kill(2, at_s=0.05), Restart(2, at_s=0.051)]
    ad.simulate(main, ranks=3, seed=0, faults=faults, network=Network(loss_detection_s=1e-4), until_s=1e4)
    ((iteration, own),) = joined
    assert iteration > 0 and own[0] != own[1]
    assert own in [*seen[iteration], *seen[iteration + 1]]


@pytest.mark.parametrize(
    ("policy", "options", "warns"),
    [
        (DiLoCoPolicy, {}, False),
        (DiLoCoPolicy, {"eager": True}, True),
        (DiLoCoPolicy, {"late": "skip"}, True),
        (AsyncDiLoCoPolicy, {}, True),
        (AsyncDiLoCoPolicy, {"late": "wait", "quorum": 2}, False),
    ],
)
@pytest.mark.parametrize("kind", ["schedule-free", "sgd"])
def test_z_that_loses_progress_is_reported(
    kind: str, policy: Any, options: dict[str, Any], warns: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """Regression: a mean that is older than the weights replaced z, without a warning."""
    make = {"schedule-free": schedulefree.SGDScheduleFree, "sgd": torch.optim.SGD}[kind]

    async def main(world: ad.World) -> None:
        model = build(0)
        async with policy(model, make(model.parameters(), lr=0.1), average_every=2, **options):
            pass

    with caplog.at_level(logging.WARNING, "protocols.diloco"):
        ad.simulate(main, ranks=2, seed=1)
    texts = [record.getMessage() for record in caplog.records if record.name == "protocols.diloco"]
    assert len(texts) == (2 if warns and kind != "sgd" else 0)
    assert all(names(text, "schedule-free", "z") for text in texts)


@pytest.mark.parametrize("make", [local_sgd, selective])
def test_a_copy_outside_the_state_follows_a_restarted_rank(make: Callable[..., Any]) -> None:
    """Regression: a flat master that no ``state_dict`` has kept the first weights, and the next step restored them."""
    kept: list[bool] = []

    async def main(world: ad.World) -> None:
        torch.manual_seed(0)
        model = nn.Linear(4, 1, bias=False)
        optimizer = FlatMaster(model.parameters(), lr=0.01)
        draw = torch.Generator().manual_seed(world.rank)
        async with make(model, optimizer) as policy:
            if world.incarnation:
                received = model.weight.detach().clone()
                optimizer.step()  # without gradients
                kept.append(torch.allclose(model.weight, received))
            while policy.iteration < 100:
                inputs = torch.randn(8, 4, generator=draw)
                loss = (model(inputs) - inputs.sum(1, keepdim=True)).square().mean()
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                await policy.step(-loss)
                await world.sleep(0.001)

    faults = [Kill(2, at_s=0.05), Restart(2, at_s=0.051)]
    ad.simulate(main, ranks=3, seed=0, faults=faults, network=Network(loss_detection_s=1e-4), until_s=1e4)
    assert kept == [True]


class AdamWithMaster(torch.optim.Adam):
    """Adam on a flat copy of the weights, which its ``state_dict`` does not contain."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__(model.parameters(), lr=0.01)
        self.flat = nn.utils.parameters_to_vector(model.parameters()).detach().clone()

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        (group,) = self.param_groups
        nn.utils.vector_to_parameters(self.flat, group["params"])
        super().step(closure)
        self.flat = nn.utils.parameters_to_vector(group["params"]).detach().clone()


def test_a_zero_of_a_copy_is_no_zero_of_another_state() -> None:
    """Regression: a bias in a master was not updated, because an equal moment of another bias was loaded."""

    def made() -> tuple[nn.Module, AdamWithMaster]:
        model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
        nn.init.zeros_(model[0].bias)
        return model, AdamWithMaster(model)

    (trained, theirs), (model, own) = made(), made()
    trained(torch.ones(2, 3)).sum().backward()
    trained[1].bias.grad.zero_()  # its moments are zero
    theirs.step()
    own.load_state_dict(copy.deepcopy(theirs.state_dict()))
    weights = OptimizerWeights(model, own, AveragedStates(model, own))
    with weights.following(has_new_state=True), torch.no_grad():
        for parameter, given in zip(model.parameters(), trained.parameters(), strict=True):
            parameter.copy_(given)
    own.step()  # without gradients
    assert all(map(torch.equal, model.parameters(), trained.parameters()))


def test_weights_outside_a_state_dict_are_loaded_as_well(tmp_path: Path) -> None:
    """Regression: the first step after load_population restored the optimizer's own weights, those of its creation."""

    async def main(world: ad.World, is_loaded: bool) -> list[float]:
        model = nn.Linear(4, 2)
        with torch.no_grad():
            model.weight.copy_(torch.arange(8.0).view(2, 4) / (4 if is_loaded else 1))
        optimizer = FlatMaster(model.parameters(), lr=0.5)
        if is_loaded:
            await ad.load_population(tmp_path, model, optimizer)
        for parameter in model.parameters():
            parameter.grad = torch.ones_like(parameter)
        optimizer.step()
        if not is_loaded:
            await ad.save_population(tmp_path, model, optimizer)
        return model.weight.flatten().tolist()

    assert ad.simulate(main, False, ranks=1).value() == [each - 0.5 for each in range(8)]
    assert ad.simulate(main, True, ranks=1).value() == [each - 1.0 for each in range(8)]
