"""Tests the errors of wrong options of asynchronous DiLoCo."""

from __future__ import annotations

import asyncio
import functools
import math
from typing import Any, NoReturn

import pytest
import torch
from support.facts import naming

import asyncdist as ad
from asyncdist.simulation import Kill, Restart, simulate
from protocols import AsyncDiLoCoPolicy, StalenessWeight


def policy(**options: Any) -> AsyncDiLoCoPolicy:
    model = torch.nn.Linear(2, 2)
    torch.nn.init.constant_(model.weight, 1.0)
    torch.nn.init.constant_(model.bias, 1.0)
    return AsyncDiLoCoPolicy(model, torch.optim.SGD(model.parameters()), **{"average_every": 2, **options})


@pytest.mark.parametrize(
    ("option", "value", "allowed"),
    [
        ("quorum", 0, 1),
        ("grace_s", -1.0, 0),
        ("grace_steps", -1.0, 0),
        ("grace_steps", 3.5, 2),
        ("mirror_every", -1, 0),
        ("islands", 0, 1),
        ("island_size", 1, 2),
        ("global_every", 4, "islands"),
        ("merge_weight", 0.5, "island_size"),
        ("late", "never", "skip"),
        ("weights", 3, "rate"),
    ],
)
def test_an_option_out_of_range_is_named_with_its_range(option: str, value: Any, allowed: Any) -> None:
    with pytest.raises(ValueError, match=naming(option, value, allowed)):
        policy(**{option: value})


def test_the_outer_optimizer_must_be_a_factory() -> None:
    with pytest.raises(TypeError, match="outer_optimizer"):
        policy(outer_optimizer=0.7)


def test_a_correction_needs_an_outer_optimizer() -> None:
    """The default rule has a weight of its own, which a correction would silently replace."""
    with pytest.raises(ValueError, match=naming("correct", "StalenessWeight", "outer_optimizer")):
        policy(correct=StalenessWeight())


@pytest.mark.parametrize(
    ("name", "here"),
    [
        ("sync_every", "average_every"),
        ("delay", "protocols.DelayedNesterov"),
        ("staleness", "protocols.StalenessWeight"),
        ("min_replica_size", "quorum"),
        ("averaging_timeout", "grace_s"),
        ("grace", "grace_steps"),
        ("fragments", "DiLoCoPolicy"),
        ("tau", "DiLoCoPolicy"),
        ("outer_momentum", "outer_optimizer"),
        ("dylu", "dynamic_steps"),
        ("model_merge_weight", "merge_weight"),
    ],
)
def test_names_of_other_libraries_are_explained(name: str, here: str) -> None:
    with pytest.raises(TypeError, match=naming(name, here)):
        policy(**{name: 2})


def test_a_grace_period_is_in_seconds_or_in_steps() -> None:
    with pytest.raises(ValueError, match=naming("grace_s", 0.5, "grace_steps", 1.5)):
        policy(grace_s=0.5, grace_steps=1.5)
    with pytest.raises(ValueError, match=naming("grace_steps", 1.5, "wait", "grace_s")):
        policy(grace_steps=1.5, late="wait")


def test_options_of_islands_are_checked() -> None:
    with pytest.raises(ValueError, match=naming("islands", "island_size", 2, 3)):
        policy(islands=2, island_size=3)
    with pytest.raises(ValueError, match=naming("merge_weight", 0.0, 1)):
        policy(islands=2, merge_weight=0.0)
    with pytest.raises(TypeError, match="outer_optimizer"):
        policy(islands=2, global_optimizer=3)


@pytest.mark.parametrize("option", ["islands", "island_size"])
def test_islands_of_replicas_with_several_ranks_are_refused(option: str) -> None:
    with pytest.raises(ValueError, match=naming("replica_size", 2, 1, "islands")):
        policy(**{option: 2}, replica_size=2)


def test_ranks_that_do_not_divide_into_islands_are_refused() -> None:
    async def train(world: ad.World, options: dict[str, Any]) -> None:
        async with policy(**options):
            pass

    with pytest.raises(ValueError, match=naming("islands", 3, 2, 4)):
        ad.run_local(train, {"islands": 3}, ranks=4)
    with pytest.raises(ValueError, match=naming("quorum", 3, 2)):
        ad.run_local(train, {"islands": 2, "quorum": 3}, ranks=4)


def test_islands_must_be_equal_on_all_ranks() -> None:
    async def train(world: ad.World) -> None:
        async with policy(islands=2, global_every=2 + world.rank // 2):
            pass

    with pytest.raises(ad.DisagreementError, match="global_every"):
        ad.run_local(train, ranks=4)


def test_a_quorum_larger_than_the_group_is_refused() -> None:
    async def train(world: ad.World) -> None:
        async with policy(quorum=3):
            pass

    with pytest.raises(ValueError, match=naming("quorum", 3, 2)):
        ad.run_local(train, ranks=2)


def test_topk_without_error_feedback_warns() -> None:
    with pytest.warns(UserWarning, match="error_feedback"):
        policy(wire="topk")


def test_a_diverged_rank_gets_the_anchor_and_harms_no_other() -> None:
    async def train(world: ad.World) -> tuple[bool, int]:
        own, recovered = policy(quorum=2, late="wait"), 0
        async with own:
            for step in range(6):
                with torch.no_grad():
                    own.model.weight.add_(float("nan") if world.rank == 1 and step == 2 else 0.5)
                info = await own.step()
                recovered += bool(info.recovered)
        return bool(torch.isfinite(own.model.weight).all()), recovered

    assert ad.run_local(train, ranks=2) == [(True, 0), (True, 1)]


def test_weights_that_are_finite_again_become_the_anchor() -> None:
    """Regression: the answer added the progress since an older contribution, which the anchor already contained."""

    async def train(world: ad.World) -> float:
        own = policy(average_every=1, outer_optimizer=functools.partial(torch.optim.SGD, lr=1.0))
        async with own:
            if world.rank == 1:
                torch.nn.init.constant_(own.model.weight, math.nan)
            await own.step()
            torch.nn.init.constant_(own.model.weight, 1.5)
            await world.sleep(1.0)
            await own.step()
            return own.model.weight[0, 0].item()

    assert simulate(train, ranks=2, seed=1).results[1] == 1.0


def test_a_rank_alone_steps_its_own_anchor() -> None:
    async def train(world: ad.World) -> float:
        own = policy(outer_optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.5))
        async with own:
            for _ in range(4):
                with torch.no_grad():
                    own.model.weight.add_(1.0)
                await own.step()
        return own.model.weight[0, 0].item()

    assert ad.run_local(train, ranks=1) == [3.0]


@pytest.mark.parametrize("staleness", [0, 1])
def test_a_rank_alone_may_repeat_a_cancelled_step(staleness: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Regression: the repeated step halved the difference, and counted two versions."""

    def cancelled() -> NoReturn:
        raise asyncio.CancelledError

    async def train(world: ad.World, is_cancelled: bool) -> tuple[float, int]:
        outer = functools.partial(torch.optim.SGD, lr=0.5)
        own = policy(outer_optimizer=outer, correct=StalenessWeight(power=1.0))
        async with own:
            assert own._alone is not None
            own._alone.version += staleness  # as in a checkpoint of several ranks
            for step in range(2):
                with torch.no_grad():
                    own.model.weight.add_(1.0)
                if is_cancelled and step == 1:
                    with monkeypatch.context() as patch, pytest.raises(asyncio.CancelledError):
                        patch.setattr("asyncdist.protocols.async_diloco.anchor._YIELD_NBYTES", 0)
                        patch.setattr("asyncdist.protocols.async_diloco.anchor.yield_to_loop", cancelled)
                        await own.step()
                await own.step()
            return own.model.weight[0, 0].item(), own.statistics().version

    whole, repeated = (ad.run_local(train, is_cancelled, ranks=1) for is_cancelled in (False, True))
    assert repeated == whole == [(1.5 if staleness else 2.0, 1 + staleness)]


def test_a_run_with_the_former_default_names_it() -> None:
    former = functools.partial(torch.optim.SGD, lr=0.07, momentum=0.9, nesterov=True)

    async def save(world: ad.World) -> dict[str, Any]:
        async with policy(outer_optimizer=former) as saved:
            for _ in range(4):
                await saved.step()
        return saved.state_dict()

    state = ad.run_local(save, ranks=1)[0]
    policy(outer_optimizer=former).load_state_dict(state)
    with pytest.raises(ValueError, match=naming("outer_optimizer", "lr=0.07, momentum=0.9, nesterov=True")):
        policy().load_state_dict(state)


def test_islands_refuse_a_restarted_rank_by_their_name() -> None:
    refusals: list[str] = []

    async def train(world: ad.World) -> None:
        try:
            async with policy(islands=2) as training:
                while training.iteration < 40:
                    await training.step()
                    await world.sleep(0.1)
        except ad.LocalProtocolError as error:
            refusals.append(str(error))

    simulate(train, ranks=4, seed=1, faults=[Kill(3, 1.0), Restart(3, 1.5)])
    assert len(refusals) == 1 and "AsyncDiLoCoPolicy with islands does not admit a restarted rank" in refusals[0]
