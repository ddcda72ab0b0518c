"""Tests that two jobs that save their checkpoints in one folder do not disturb each other."""

from __future__ import annotations

import os
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from support.seeds import in_ci

import asyncdist as ad
from asyncdist.functional.checkpoints import checkpoint_files, manifests


async def save(world: ad.World, path: Path, keep: int = 1) -> str:
    return (await ad.save_population(path, torch.nn.Linear(2, 1), keep=keep)).name


def test_a_checkpoint_that_another_job_writes_is_kept(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Regression: a save with ``keep`` deleted it, and the other job ended with FileNotFoundError."""
    other = checkpoint_files.new_folder(tmp_path)
    with checkpoint_files.locked(other):
        assert ad.run_local(save, tmp_path, ranks=2) == ["checkpoint-000002"] * 2
        assert other.is_dir()
        assert f"another job is writing {other}" in caplog.text
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


def test_the_loop_runs_while_a_checkpoint_is_finished(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Regression: the manifest was written, and old checkpoints were deleted, on the thread of the event loop."""
    threads: list[threading.Thread] = []
    finish = checkpoint_files.finish

    def watched(*arguments: Any) -> None:
        threads.append(threading.current_thread())
        finish(*arguments)

    monkeypatch.setattr(checkpoint_files, "finish", watched)
    ad.run_local(save, tmp_path, ranks=2)
    assert len(threads) == 1 and threads[0] is not threading.main_thread()


def test_two_jobs_that_begin_together_take_different_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Regression: the second job ended with FileExistsError."""
    monkeypatch.setattr(manifests, "numbers", lambda place: [])
    names = [checkpoint_files.new_folder(tmp_path).name for _ in range(2)]
    assert names == ["checkpoint-000001", "checkpoint-000002"]


@pytest.mark.parametrize("keep", in_ci([1, 2, 3, 4, 5, 9], 1, 4, 5))
def test_keep_leaves_that_many_checkpoints(tmp_path: Path, keep: int) -> None:
    """Regression: from 4 on, good checkpoints were deleted while there were fewer than ``keep``."""
    names = [f"checkpoint-{number:06}" for number in range(1, 12)]
    for number, name in enumerate(names, 1):
        assert ad.run_local(save, tmp_path, keep, ranks=1) == [name]
        assert sorted(os.listdir(tmp_path)) == names[max(0, number - keep) : number]


def test_an_old_checkpoint_that_may_not_be_deleted_is_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Regression: the job ended with PermissionError, although its new checkpoint was complete."""
    (old, *_) = ad.run_local(save, tmp_path, ranks=1)
    unlink = os.unlink

    def refuse(path: str, *, dir_fd: int | None = None) -> None:
        if path == manifests.MANIFEST:
            raise PermissionError(13, "Permission denied", path)
        unlink(path, dir_fd=dir_fd)

    monkeypatch.setattr(os, "unlink", refuse)
    (new, *_) = ad.run_local(save, tmp_path, ranks=1)
    assert sorted(os.listdir(tmp_path)) == [old, new]
    assert f"cannot delete the old checkpoint {tmp_path / old} (Permission denied)" in caplog.text


def make_foreign(folder: Path, files: dict[str, str]) -> None:
    folder.mkdir(parents=True)
    for name, content in files.items():
        folder.joinpath(name).parent.mkdir(exist_ok=True)
        folder.joinpath(name).write_text(content)


@pytest.mark.parametrize(
    "files",
    [
        {"pytorch_model.bin": "weights"},
        {"rank-00000.pt": "weights", "notes.txt": "mine"},
        {"manifest.json": "{}"},
        {"manifest.json": "{}", "rank-00000.pt": "weights"},
        {"rank-00000.pt/weights": "in a folder"},
        {"rank-last.pt": "weights"},
    ],
)
def test_keep_does_not_delete_folders_of_other_programs(
    files: dict[str, str], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Regression: any folder ``checkpoint-NNNNNN`` was deleted, even the checkpoint-100000 of another library."""
    foreign = tmp_path / "checkpoint-100000"
    make_foreign(foreign, files)
    for number in (1, 2):
        assert ad.run_local(save, tmp_path, ranks=1) == [f"checkpoint-{100_000 + number}"]
    assert {str(each.relative_to(foreign)) for each in foreign.rglob("*") if each.is_file()} == set(files)
    assert sorted(os.listdir(tmp_path)) == ["checkpoint-100000", "checkpoint-100002"]
    assert sum(str(foreign) in record.getMessage() for record in caplog.records) == 1


def test_keep_deletes_a_checkpoint_to_which_files_were_added(tmp_path: Path) -> None:
    (name,) = ad.run_local(save, tmp_path, ranks=1)
    (tmp_path / name / "tokenizer.json").write_text("mine")
    ad.run_local(save, tmp_path, ranks=1)
    assert os.listdir(tmp_path) == ["checkpoint-000002"]


def test_keep_deletes_all_leftovers_of_a_killed_save(tmp_path: Path) -> None:
    files = ["rank-00000.pt", "rank-00001.safetensors", ".part-00ff/rank-00002.pt", "restarted-rank-00003/entry.json"]
    make_foreign(tmp_path / "checkpoint-000001", dict.fromkeys([*files, ".part-00ff-owner"], ""))
    ad.run_local(save, tmp_path, ranks=1)
    assert os.listdir(tmp_path) == ["checkpoint-000002"]


@pytest.mark.parametrize("content", ["{}", "[1]", '{"format": "another"}'])
def test_a_newer_manifest_of_another_program_is_skipped(
    content: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Regression: ValueError, although the folder had a complete older checkpoint."""
    (name,) = ad.run_local(save, tmp_path, ranks=1)
    foreign = tmp_path / "checkpoint-100000"
    make_foreign(foreign, {"manifest.json": content})
    assert manifests.find_newest(tmp_path)[0] == tmp_path / name
    assert [folder for folder, _ in manifests.find_last(tmp_path, 1)] == [tmp_path / name]
    assert str(foreign) in caplog.text
    with pytest.raises(ValueError, match=r"manifest\.json"):
        manifests.find_newest(foreign)
