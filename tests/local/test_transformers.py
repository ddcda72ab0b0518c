"""Uses transformers' Trainer without a job: pushes to the Hugging Face Hub, with a fake hub, and folders of ranks."""

from __future__ import annotations

import dataclasses
import importlib
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from asyncdist.integrations import joining


class Hub:
    """Records the repositories that are created, and the uploads to them."""

    def __init__(self) -> None:
        self.created: list[str] = []
        self.uploads: list[str] = []

    def create_repo(self, name: str, **_: Any) -> Any:
        self.created.append(name)
        return SimpleNamespace(repo_id=f"me/{name}")

    def upload_folder(self, *, repo_id: str, **_: Any) -> Any:
        self.uploads.append(repo_id)
        return SimpleNamespace(done=lambda: True)


class Model(torch.nn.Module):
    """Has a forward pass, which the Trainer's constructor inspects."""

    def __init__(self) -> None:
        super().__init__()
        self.net = torch.nn.Linear(2, 1)

    def forward(self, inputs: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"loss": self.net(inputs).square().mean()}


@pytest.mark.parametrize("given", [True, False])
@pytest.mark.parametrize("rank", [0, 1])
def test_only_rank_0_of_a_trainer_pushes_to_the_hub(
    rank: int, given: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Regression: all ranks pushed to one repository, and a push after the training went to a repository "rank0"."""
    transformers = pytest.importorskip("transformers")
    monkeypatch.setattr(joining, "hide_ranks", lambda: None)  # importing the integration would hide this process's rank
    monkeypatch.setattr(joining, "_told", set())
    integration = importlib.import_module("asyncdist.integrations.transformers")
    monkeypatch.setattr(integration, "join", lambda: SimpleNamespace(rank=rank, size=2))
    progress = transformers.trainer.DEFAULT_PROGRESS_CALLBACK
    monkeypatch.setattr(transformers.trainer, "DEFAULT_PROGRESS_CALLBACK", progress)  # rank 1 replaces it
    hub = Hub()
    monkeypatch.setattr(transformers.trainer, "hf_api", lambda: hub, raising=False)
    for name in ("create_repo", "upload_folder"):  # transformers 4
        monkeypatch.setattr(transformers.trainer, name, getattr(hub, name), raising=False)

    arguments = transformers.TrainingArguments(
        output_dir=str(tmp_path / "mine"), use_cpu=True, report_to=[], push_to_hub=given
    )
    averaging = integration.SelectiveAveraging(average_every=2)
    trainer = transformers.Trainer(Model(), arguments, callbacks=[averaging])
    monkeypatch.setattr(trainer, "create_model_card", lambda **_: None)  # the hub's client would check it online
    trainer.push_to_hub()
    trainer.save_model(checkpoint := str(tmp_path / "checkpoint-1"), _internal_call=True)
    trainer._push_from_checkpoint(checkpoint)

    assert hub.created == (["mine"] if rank == 0 else [])
    assert hub.uploads == (["me/mine"] * 2 if rank == 0 else [])
    assert caplog.text.count("only rank 0 pushes") == (1 if rank == 0 else 0)


def test_arguments_belong_to_one_rank(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Regression: ranks in one process, as in a notebook, that shared arguments all wrote to one rank's folder.

    A copy of arguments that a trainer had changed got the folder rank0/rank0.
    """
    transformers = pytest.importorskip("transformers")
    monkeypatch.setattr(joining, "hide_ranks", lambda: None)
    integration = importlib.import_module("asyncdist.integrations.transformers")
    progress = transformers.trainer.DEFAULT_PROGRESS_CALLBACK
    monkeypatch.setattr(transformers.trainer, "DEFAULT_PROGRESS_CALLBACK", progress)
    arguments = transformers.TrainingArguments(output_dir=str(tmp_path / "mine"), use_cpu=True, report_to=[])

    def train(rank: int, given: Any) -> str:
        monkeypatch.setattr(integration, "join", lambda: SimpleNamespace(rank=rank, size=2))
        averaging = integration.SelectiveAveraging(average_every=2)
        return str(transformers.Trainer(Model(), given, callbacks=[averaging]).args.output_dir)

    folder = str(tmp_path / "mine" / "rank0")
    assert train(0, arguments) == folder
    assert train(0, arguments) == folder
    assert train(0, dataclasses.replace(arguments)) == folder
    with pytest.raises(ValueError, match="rank 1 must have its own TrainingArguments, got those of rank 0"):
        train(1, arguments)
