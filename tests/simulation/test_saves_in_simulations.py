"""Tests that simulations and replays delete no checkpoints of real jobs."""

from __future__ import annotations

import os
from pathlib import Path

import torch

import asyncdist as ad
from asyncdist.recording.reader import read_recording
from asyncdist.simulation import simulate
from asyncdist.simulation.replay.replay import replay


async def save_three_times(world: ad.World, folder: Path) -> None:
    for _ in range(3):
        await ad.save_population(folder, torch.nn.Linear(2, 1), keep=2)


def names(*numbers: int) -> list[str]:
    return [f"checkpoint-{number:06}" for number in numbers]


def test_a_simulation_keeps_checkpoints_of_real_jobs(tmp_path: Path) -> None:
    """Regression: ``keep`` deleted the checkpoints of the real job."""
    ad.run_local(save_three_times, tmp_path, ranks=2)
    (tmp_path / "checkpoint-000001").mkdir()  # an unfinished checkpoint, which a real job would delete
    simulate(save_three_times, tmp_path, ranks=2, seed=1)
    assert sorted(os.listdir(tmp_path)) == names(1, 2, 3, 5, 6)


def test_a_simulation_deletes_its_own_checkpoints(tmp_path: Path) -> None:
    for _ in range(2):  # the second run deletes those of the first one
        simulate(save_three_times, tmp_path, ranks=2, seed=1)
    assert sorted(os.listdir(tmp_path)) == names(5, 6)


def test_a_replay_keeps_checkpoints_of_the_recorded_job(tmp_path: Path) -> None:
    """Regression: the replay's saves deleted the recorded job's checkpoints."""
    saved = tmp_path / "saved"
    ad.run_local(save_three_times, saved, ranks=2, record=tmp_path / "recorded")
    replay(save_three_times, saved, recording=read_recording(tmp_path / "recorded"))
    assert sorted(os.listdir(saved)) == names(2, 3, 5, 6)
