"""Tests that two jobs that save their checkpoints in one folder do not disturb each other."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

import asyncdist as ad
from asyncdist.functional.checkpoints import checkpoint_files, manifests
from asyncdist.functional.checkpoints.checkpoint_files import FolderLock


async def save(world: ad.World, path: Path) -> str:
    return (await ad.save_population(path, torch.nn.Linear(2, 1), keep=1)).name


def test_a_checkpoint_that_another_job_writes_is_kept(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Regression: a save with ``keep`` deleted it, and the other job ended with FileNotFoundError."""
    other = checkpoint_files.new_folder(tmp_path)
    lock = FolderLock(other)
    assert ad.run_local(save, tmp_path, ranks=2) == ["checkpoint-000002"] * 2
    assert other.is_dir()
    assert f"another job is writing {other}" in caplog.text
    lock.release()
    assert ad.run_local(save, tmp_path, ranks=2) == ["checkpoint-000003"] * 2
    assert sorted(os.listdir(tmp_path)) == ["checkpoint-000003"]


def test_a_save_locks_its_folder_until_it_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found: list[bool] = []
    finish = checkpoint_files.finish

    def watched(folder: Path, *arguments: object) -> None:
        found.append(checkpoint_files.is_locked(folder))
        finish(folder, *arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(checkpoint_files, "finish", watched)
    (name, _) = ad.run_local(save, tmp_path, ranks=2)
    assert found == [True]
    assert not checkpoint_files.is_locked(tmp_path / name)


def test_two_jobs_that_begin_together_take_different_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Regression: the second job ended with FileExistsError."""
    monkeypatch.setattr(manifests, "numbers", lambda place: [])
    names = [checkpoint_files.new_folder(tmp_path).name for _ in range(2)]
    assert names == ["checkpoint-000001", "checkpoint-000002"]
