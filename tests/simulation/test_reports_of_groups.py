"""Tests reports of jobs whose ranks differ: islands, policies on groups, replicas of several ranks."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import asyncdist as ad
from asyncdist.recording.events import Event
from asyncdist.recording.reader import Recording, read_recording
from asyncdist.report.averages import Averages
from asyncdist.report.page import render
from asyncdist.report.summary import Round, summarise
from asyncdist.report.trace import write_trace
from protocols import AsyncSelectiveAveragingPolicy, ReplicaAveragingPolicy, coordinate


def model_and_optimizer() -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    model = torch.nn.Linear(2, 2)
    return model, torch.optim.SGD(model.parameters(), lr=0.1)


def counted(recording: Recording, kind: str) -> int:
    return sum(event.kind == kind for each in recording.ranks for event in each.events())


def check_phases(rounds: list[Round]) -> None:
    applied = [each for each in rounds if each.applied_s == each.applied_s]
    assert applied
    for each in applied:
        assert each.began_s <= each.frozen_s <= each.ended_s and each.frozen_s <= each.applied_s, each


async def train_on_islands(world: ad.World) -> None:
    async with AsyncSelectiveAveragingPolicy(*model_and_optimizer(), average_every=5, islands=2) as policy:
        for _ in range(40):
            await policy.step(float(world.rank))


def test_rounds_of_islands_are_told_apart_in_a_report(tmp_path: Path) -> None:
    """Regression: each island counts its rounds from 1, and the rounds of one hid the rounds of another."""
    ad.simulate(train_on_islands, ranks=4, seed=7, record=tmp_path).value()
    recording = read_recording(tmp_path)
    summary = summarise(recording)
    assert {each.number[0] for each in summary.rounds} == {0, 2}, "rounds of both coordinators must be listed"
    assert len(summary.rounds) == counted(recording, "decided")
    check_phases(summary.rounds)
    assert f"<td>{len(summary.rounds)}, with {len(summary.applied)} replacements</td>" in render(recording)


async def train_on_two_groups(world: ad.World) -> None:
    """Ranks 0 and 1 train a generator, the others a discriminator."""
    is_first = world.rank < 2
    group = await ad.new_group([0, 1] if is_first else [2, 3])
    name = "generator" if is_first else "discriminator"
    async with AsyncSelectiveAveragingPolicy(*model_and_optimizer(), average_every=5, group=group, name=name) as policy:
        for step in range(20):
            if not is_first:
                await world.compute(lambda: None)
            await policy.step(float(world.rank) + (0 if step % 2 else 100))
    async with AsyncSelectiveAveragingPolicy(*model_and_optimizer(), average_every=5, group=group, name=name) as policy:
        for _ in range(20):
            await policy.step(float(world.rank))


def test_an_average_applied_before_contributions_has_its_group() -> None:
    """Regression: the first average of a rank that had joined counted as a round of rank 0's group."""
    averages = Averages()
    for rank in (2, 3):
        contributed = (0, 5, 0, 10, 1, 1.0, 0.5, 64, 64, 2)
        averages.add(rank, (0, 0), 1.0, Event(1.0, "contributed", contributed))
    applied = (0, 5, 10, (2, 3), (0.5, 0.5), 1, 0.1, 64, None, "", 0, 1, 0, (), (), 64, 64, 0.5, 0.5, 0.0)
    averages.add(4, (0, 0), 2.0, Event(2.0, "applied", applied))
    (found,) = averages.rounds()
    assert (found.key.group, found.applied_count) == (2, 1)


def test_policies_of_different_names_are_separate_populations(tmp_path: Path) -> None:
    """Regression: the metrics of the ranks of one group were drawn among the metrics of the other group."""
    ad.simulate(train_on_two_groups, ranks=4, seed=3, record=tmp_path).value()
    summary = summarise(read_recording(tmp_path))
    assert [each.name for each in summary.populations] == ["generator", "discriminator"]
    for rank in range(4):
        counts = [population.metrics[rank].count for population in summary.populations]
        assert counts == ([8, 0] if rank < 2 else [0, 8])
    check_phases(summary.rounds)
    assert {each.population for each in summary.applied if each.rank < 2} == {0}
    assert {each.population for each in summary.applied if each.rank >= 2} == {1}


async def train_beside_a_reserved_rank(world: ad.World) -> None:
    members = [1, 2, 3]
    if world.rank == 0:
        await coordinate(members)
        return
    group = await ad.new_group(members)
    first = AsyncSelectiveAveragingPolicy(*model_and_optimizer(), average_every=5, group=group)
    async with first:  # with another number than the reserved rank's policy
        await first.step(0.0)
    async with AsyncSelectiveAveragingPolicy(
        *model_and_optimizer(), average_every=5, group=group, coordinator=0
    ) as policy:
        for _ in range(40):
            await policy.step(float(world.rank))


def test_rounds_that_a_reserved_rank_decides_are_recorded(tmp_path: Path) -> None:
    """Regression: a report showed the replacements, but none of the rounds that caused them."""
    ad.simulate(train_beside_a_reserved_rank, ranks=4, seed=3, record=tmp_path).value()
    recording = read_recording(tmp_path)
    summary = summarise(recording)
    assert summary.applied and {each.coordinator for each in summary.applied} == {0}
    replaced = {(each.number[0], each.number[2]) for each in summary.rounds if each.applied_s == each.applied_s}
    assert replaced == {(0, each.round) for each in summary.applied}
    check_phases(summary.rounds)
    assert counted(recording, "heard") and counted(recording, "policy") == 6, (
        "only the ranks of the group may record a policy"
    )


async def train_replicas(world: ad.World) -> int:
    policy = ReplicaAveragingPolicy(*model_and_optimizer(), replica_size=2, average_every=10)
    async with policy:
        for _ in range(40):
            await policy.step(float(world.rank))
    return policy.iteration


def test_replicas_are_recorded_as_one_policy(tmp_path: Path) -> None:
    """Regression: messages among the leaders of replicas counted as steps, and as a separate population."""
    report = ad.simulate(train_replicas, ranks=4, seed=3, record=tmp_path, strict=True)
    recording = read_recording(tmp_path)
    summary = summarise(recording)
    assert [rank.step_seconds.count for rank in summary.ranks] == list(report.results) == [40] * 4
    (population,) = summary.populations
    assert population.name == "ReplicaAveragingPolicy"
    assert [metric.count for metric in population.metrics] == [4] * 4
    assert counted(recording, "policy") == counted(recording, "closed") == counted(recording, "weights") == 4
    numbers = {(event.kind, event.get("policy")) for each in recording.ranks for event in each.events()}
    assert {number for kind, number in numbers if kind in ("step", "role", "decided", "ended", "applied")} == {0}
    check_phases(summary.rounds)


async def train_on(world: ad.World) -> None:
    async with AsyncSelectiveAveragingPolicy(*model_and_optimizer(), average_every=5) as policy:
        while policy.iteration < 200:
            await policy.step(float(world.rank))


def test_a_restarted_process_has_the_weights_of_its_donor(tmp_path: Path) -> None:
    """Regression: a report said that its weights were those with which the previous process had begun."""
    faults = (ad.Kill(rank=2, at_s=0.02), ad.Restart(rank=2, at_s=0.04))
    ad.simulate(train_on, ranks=3, seed=1, record=tmp_path, faults=faults, until_s=60.0)
    recording = read_recording(tmp_path)
    (joined,) = [event for each in recording.ranks for event in each.events() if event.kind == "joined"]
    summary = summarise(recording)
    assert [each.donor for each in summary.begun] == [2, joined.get("donor")], (
        "rank 2 must begin with its own weights, and then with the donor's"
    )
    assert not [each for each in summary.applied if each.rank == 2], "rank 2 is the best, and must never be replaced"
    (population,) = summary.populations
    assert joined.get("donor") == 1 and list(population.shares[2]) == [0.0, 1.0, 0.0], (
        "the weights of rank 2 must come from the donor, once reported as its own"
    )
    write_trace(recording, tmp_path / "trace.json")
    assert '"name":"joined"' in (tmp_path / "trace.json").read_text()


@pytest.mark.parametrize("main", [train_on_islands, train_beside_a_reserved_rank, train_replicas])
def test_they_are_replayed(tmp_path: Path, main: object) -> None:
    """The parts that a report needs do not differ in a replay."""
    ad.simulate(main, ranks=4, seed=2, record=tmp_path)  # type: ignore[arg-type]
    replayed = ad.simulation.replay(main, recording=read_recording(tmp_path))  # type: ignore[arg-type]
    assert replayed.decision_count and not replayed.left_count
