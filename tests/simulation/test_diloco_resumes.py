"""Tests that DiLoCo's family saves states with different rounds on each rank, and continues with other options."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from support.facts import naming
from torch import nn

import asyncdist as ad
from asyncdist.simulation import Compute
from protocols import AsyncDiLoCoPolicy, DiLoCoPolicy, GossipPolicy, PopulationAveragingPolicy

#: Steps of rank 2 take eight times as long, so that fast ranks reach a save while it is inside a step.
UNEQUAL = Compute(step_s=0.01, factors={1: 1.3, 2: 8.0})


async def train(
    world: ad.World, folder: Path, kind: type[Any], options: dict[str, Any], last: int, save_every: int, is_saved: bool
) -> dict[str, Any]:
    """Continue a training if it was saved, and return the last rounds by fragment, and the weights."""
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(3, 3) for _ in range(4)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    policy, rounds = kind(model, optimizer, **options), {}
    if is_saved:
        await ad.load_population(folder, model, optimizer, policy=policy)
    async with policy:
        while policy.iteration < last:
            generator = torch.Generator().manual_seed(100 * policy.iteration + world.rank)
            optimizer.zero_grad()
            model(torch.randn(4, 3, generator=generator)).square().mean().backward()
            optimizer.step()
            if info := await policy.step():
                rounds[info.fragment] = info.round
            if policy.iteration % save_every == 0:
                await ad.save_population(folder, model, optimizer, policy=policy, keep=1)
    return {"rounds": rounds, "weights": [parameter.tolist() for parameter in model.parameters()]}


def run(folder: Path, kind: type[Any], options: dict[str, Any], last: int, **simulated: Any) -> tuple[Any, ...]:
    facts = folder, kind, options, last, simulated.pop("save_every", last), folder.exists()
    return ad.simulate(train, *facts, **{"ranks": 3, "seed": 1, "strict": True, **simulated}).results


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        (DiLoCoPolicy, {"late": "skip"}),
        (DiLoCoPolicy, {"late": "skip", "fragments": 2, "wire": "int8", "error_feedback": 1.0}),
        (AsyncDiLoCoPolicy, {"late": "wait", "quorum": 2}),
        (AsyncDiLoCoPolicy, {"late": "wait", "quorum": 3, "grace_s": 0.1, "dynamic_steps": True}),
    ],
    ids=["skip", "skip in fragments", "quorum", "quorum and grace"],
)
def test_ranks_of_different_speeds_can_be_saved(kind: type[Any], options: dict[str, Any], tmp_path: Path) -> None:
    """Regression: fast ranks waited in the save, and the slow one for a round that needs their next step."""
    options = {"average_every": 4, **options}
    first = run(tmp_path / "saves", kind, options, 20, save_every=5, compute=UNEQUAL)
    for ranks in (3, 5):
        again = run(
            tmp_path / "saves", kind, options, 20 + 15, save_every=99, ranks=ranks, compute=Compute(step_s=0.01)
        )
        assert min(max(each["rounds"].values()) for each in again) > max(
            max(each["rounds"].values(), default=0) for each in first
        )


async def unequal(
    world: ad.World, folder: Path, step_counts: tuple[int, int], is_saved: bool, **options: Any
) -> tuple[list[int], Any]:
    """Continue a training, make different numbers of steps, and save; return the rounds and the policy's state."""
    model, rounds = nn.Linear(1, 1, bias=False), []
    nn.init.constant_(model.weight, 1.0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    policy = DiLoCoPolicy(model, optimizer, average_every=4, late="skip", **options)
    if is_saved:
        await ad.load_population(folder, model, optimizer, policy=policy)
    async with policy:
        for _ in range(step_counts[world.rank]):
            with torch.no_grad():
                model.weight.add_(1.0 + world.rank)
            if info := await policy.step():
                rounds += [info.round] * (info.donors == (0, 1))
        if not is_saved:
            await ad.save_population(folder, model, optimizer, policy=policy)
        return rounds, None if is_saved else policy.state_dict()


def test_a_contribution_without_a_mean_is_saved(tmp_path: Path) -> None:
    """Rank 1 has contributed to round 2, and rank 0, which is slower, has not made the step in which it is due."""
    options, folder = {"outer_optimizer": None, "weights": "tokens"}, tmp_path / "saves"

    def run(counts: tuple[int, int], **more: Any) -> Any:
        is_saved = folder.exists()

        async def main(world: ad.World) -> Any:
            return await unequal(world, folder, counts, is_saved, **options, **more)

        compute = Compute(step_s=0.01, factors={0: 3.0})
        return ad.simulate(main, ranks=2, seed=1, strict=True, compute=compute).results

    (_, slow), (_, fast) = run((4, 16))
    assert (slow["contributions"], list(fast["contributions"])) == ({}, [2])
    assert fast["contributions"][2]["encoded"][0].tolist() == [fast["fragments"][0]["captured"][0].item()]
    with pytest.raises(ValueError, match="contributions must be encoded as by this policy"):
        run((4, 4), wire="bfloat16")
    assert all(2 in rounds for rounds, _ in run((12, 36)))


def test_a_copied_rank_does_not_repeat_a_saved_contribution(tmp_path: Path) -> None:
    """Regression: on more ranks than were saved, the contribution of rank 1 to round 2 counted twice in the mean."""
    folder = tmp_path / "saves"

    async def first(world: ad.World) -> None:
        await unequal(world, folder, (4, 16), is_saved=False, outer_optimizer=None)

    async def second(world: ad.World) -> tuple[int, list[tuple[int, ...]]]:
        model = nn.Linear(1, 1, bias=False)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        policy = DiLoCoPolicy(model, optimizer, average_every=4, late="skip", outer_optimizer=None)
        loaded = await ad.load_population(folder, model, optimizer, policy=policy)
        async with policy:
            infos = [await policy.step() for _ in range(40)]
        return loaded.source, [info.donors for info in infos if info.round in (2, 3)]

    ad.simulate(first, ranks=2, seed=1, compute=Compute(step_s=0.01, factors={0: 3.0}))
    for rank, (source, donors) in enumerate(ad.simulate(second, ranks=4, seed=1).results):
        assert source == rank % 2
        assert donors == [(0, 1, 2), (0, 1, 2, 3)]


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ({"average_every": 10}, {"average_every": 6}),
        ({}, {"warmup_steps": 30}),
        ({"late": "skip"}, {}),
        ({}, {"late": "skip"}),
        ({"overlap_steps": 6}, {"late": "skip"}),
        ({"late": "skip", "overlap_steps": 3}, {"average_every": 7}),
    ],
    ids=str,
)
def test_other_options_may_differ_after_a_resume(before: dict[str, Any], after: dict[str, Any], tmp_path: Path) -> None:
    """Regression: another schedule captured the fragments out of turn, and all ranks waited forever."""
    common = {"average_every": 10, "fragments": 2}
    run(tmp_path / "saves", DiLoCoPolicy, {**common, **before}, 7)
    for found in run(tmp_path / "saves", DiLoCoPolicy, {**common, **after}, 60, save_every=99):
        assert min(found["rounds"].values()) >= 6 and abs(found["rounds"][0] - found["rounds"][1]) < 4
        assert torch.tensor(found["weights"][0]).isfinite().all()


HALVES = [["0", "1"], ["2", "3"]]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("options", "last"),
    [({}, 8), ({"outer_optimizer": None, "overlap_steps": 2}, 9), ({"eager": True}, 9)],
    ids=["anchors", "weights in flight", "eager"],
)
def test_a_state_of_another_fragment_pattern_is_refused(options: dict[str, Any], last: int, tmp_path: Path) -> None:
    """Regression: fragments of equal sizes were loaded, and wrote the values of their layers into other layers."""
    options = {"average_every": 4, "fragments": 2, **options}
    run(tmp_path / "saves", DiLoCoPolicy, options, last)
    with pytest.raises(ValueError, match="fragment_pattern"):
        run(tmp_path / "saves", DiLoCoPolicy, {**options, "fragment_pattern": HALVES}, 20)
    run(tmp_path / "saves", DiLoCoPolicy, {**options, "fragment_pattern": [["0", "2"], ["1", "3"]]}, 20)


@pytest.mark.parametrize("is_reordered", [False, True])
@pytest.mark.parametrize(
    ("kind", "options"),
    [
        (DiLoCoPolicy, {}),
        (AsyncDiLoCoPolicy, {}),
        (PopulationAveragingPolicy, {"center": True}),
        (GossipPolicy, {"outer_lr": 0.5}),
    ],
    ids=["diloco", "async", "center", "gossip"],
)
def test_a_state_of_reordered_modules_is_refused(kind: type[Any], options: dict[str, Any], is_reordered: bool) -> None:
    """Regression: the flat tensors of a state were written into other modules of the same sizes.

    States of former versions contain no names, and are loaded.
    """

    def made(*names: str) -> Any:
        model = nn.Module()
        for name in names:
            model.add_module(name, nn.Linear(2, 2))
        model.load_state_dict({name: torch.full_like(each, len(name)) for name, each in model.state_dict().items()})
        return kind(model, torch.optim.SGD(model.parameters(), lr=0.1), average_every=2, **options)

    def without_names(state: Any) -> Any:
        if isinstance(state, dict):
            return {name: without_names(each) for name, each in state.items() if name != "names"}
        return [without_names(each) for each in state] if isinstance(state, list) else state

    async def main(world: ad.World) -> None:
        async with made("first", "second") as policy:
            await policy.step()
            await policy.settle()
            state = policy.state_dict()
        policy = made("second", "first")
        policy.load_state_dict(state if is_reordered else without_names(state))
        async with policy:
            pass

    if is_reordered:
        with pytest.raises(ValueError, match="order"):
            ad.simulate(main, ranks=2, seed=1)
    else:
        ad.simulate(main, ranks=2, seed=1)


async def train_and_save(
    world: ad.World, folder: Path, options: dict[str, Any], saves: list[tuple[int, int]], slowness: float = 1.0
) -> tuple[int, ...]:
    """Continue a training if it was saved, save it at some steps of each rank, and return the completed rounds."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    policy = DiLoCoPolicy(model, optimizer, **options)
    if len(saves) > 1:
        await ad.load_population(folder, model, optimizer, policy=policy)
    async with policy:
        for last in saves:
            while policy.iteration < last[world.rank]:
                await policy.step()
                await world.sleep(0.01 * (slowness if world.rank else 1.0))
            await ad.save_population(folder, model, optimizer, policy=policy, keep=1)
        return policy.completed_rounds


@pytest.mark.slow
@pytest.mark.parametrize(
    ("before", "after", "saved_at"),
    [
        ({"average_every": 4}, {"average_every": 6}, 23),
        ({"average_every": 4, "fragments": 2}, {"average_every": 4, "fragments": 2}, 23),
        ({"average_every": 4, "overlap_steps": 2}, {"average_every": 6, "overlap_steps": 4}, 23),
    ],
    ids=["one fragment", "two fragments", "overlap"],
)
def test_late_rounds_resume_with_waiting_steps(
    before: dict[str, Any], after: dict[str, Any], saved_at: int, tmp_path: Path
) -> None:
    """Regression: a rank that had contributed to one round more waited for it, and the other rank never made it."""
    facts = tmp_path / "saves", {"late": "skip", **before}, [(saved_at, saved_at)], 3.0
    ad.simulate(train_and_save, *facts, ranks=2, seed=1, strict=True)
    saves = [(last, last) for last in range(saved_at, saved_at + 14, 3)]
    first, second = ad.simulate(train_and_save, tmp_path / "saves", after, saves, ranks=2, seed=1, strict=True).results
    assert first == second


@pytest.mark.slow
@pytest.mark.parametrize("other", [{"average_every": 4}, {"warmup_steps": 47}], ids=["interval", "warm-up"])
def test_ranks_at_different_steps_keep_their_schedule(other: dict[str, Any], tmp_path: Path) -> None:
    """Regression: each rank counted the rounds that were due by its own step, so one waited for the other's."""
    options = {"average_every": 10}
    ad.simulate(train_and_save, tmp_path / "saves", options, [(48, 46)], ranks=2, seed=1, strict=True)
    saves = [(last, last) for last in (49, 55, 62)]
    with pytest.raises(ad.DisagreementError, match=naming("steps before the resume", 48, 46, "average_every")):
        ad.simulate(train_and_save, tmp_path / "saves", {**options, **other}, saves, ranks=2, seed=1, strict=True)
    for changed in ({}, {"late": "skip", **other}):
        ad.simulate(train_and_save, tmp_path / "saves", {**options, **changed}, saves, ranks=2, seed=1, strict=True)


@pytest.mark.slow
def test_ranks_at_different_steps_keep_late(tmp_path: Path) -> None:
    """Regression: a fast rank contributed to rounds to which no rank had contributed, which halved the means."""
    facts = tmp_path / "saves", {"average_every": 4, "late": "skip"}, [(80, 20)], 4.0
    ad.simulate(train_and_save, *facts, ranks=2, seed=1, strict=True)
    saves = [(84, 84), (90, 90)]
    with pytest.raises(ad.DisagreementError, match=naming("steps before the resume", 80, 20, "late")):
        ad.simulate(train_and_save, tmp_path / "saves", {"average_every": 4}, saves, ranks=2, seed=1, strict=True)


def test_a_state_of_an_earlier_checkout_is_loaded() -> None:
    """Such states do not contain the schedule with which they were saved."""

    async def main(world: ad.World) -> None:
        model = nn.Linear(2, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        saved = DiLoCoPolicy(model, optimizer, average_every=4).state_dict()
        del saved["schedule"]
        DiLoCoPolicy(model, optimizer, average_every=4).load_state_dict(saved)
        del saved["captured"]
        with pytest.raises(ValueError, match="captured"):
            DiLoCoPolicy(model, optimizer, average_every=4).load_state_dict(saved)

    ad.simulate(main, ranks=1)


@pytest.mark.slow
def test_an_eager_state_is_refused_without_eager(tmp_path: Path) -> None:
    """Regression: the state was loaded without the share of the last mean that the anchor does not contain yet."""
    run(tmp_path / "saves", DiLoCoPolicy, {"average_every": 4, "eager": True}, 9)
    with pytest.raises(ValueError, match=naming("eager", False, True)):
        run(tmp_path / "saves", DiLoCoPolicy, {"average_every": 4}, 20)
