"""Trains with Accelerate, with ranks in one process."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

import asyncdist as ad
from asyncdist import environment
from asyncdist.integrations import joining
from asyncdist.launchers import child_environment, detection
from protocols import AverageAllPolicy, DiLoCoPolicy, PopulationTrainingPolicy


@pytest.fixture
def integration(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Import the integration without hiding this process's rank."""
    pytest.importorskip("accelerate")
    monkeypatch.setattr(joining, "hide_ranks", lambda: None)
    return importlib.import_module("asyncdist.integrations.accelerate")


def train(
    integration: Any, kind: Any, epochs: int, folder: Path | None = None, *, resumes: bool = False, **of: Any
) -> Any:
    """Train for some epochs of 5 batches, from and to a checkpoint in ``folder``, and return the policy."""
    import accelerate  # type: ignore[import-untyped]

    accelerator = accelerate.Accelerator(cpu=True, **of)
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Dropout(0.5), torch.nn.Linear(2, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loader = DataLoader(TensorDataset(torch.randn(10, 2)), batch_size=2, shuffle=True)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    policy = kind(model, optimizer, average_every=1)
    accelerator.register_for_checkpointing(policy)
    if resumes:
        accelerator.load_state(str(folder))
    averaging = integration.Averaging(policy)
    for _ in range(epochs):
        for (inputs,) in loader:
            with accelerator.accumulate(model):
                accelerator.backward(model(inputs).square().mean())
                optimizer.step()
                optimizer.zero_grad()
                averaging.step()
    if folder is not None:
        accelerator.save_state(str(folder))
    averaging.close()
    return policy


def test_variables_that_a_launcher_sets_later_are_hidden(monkeypatch: pytest.MonkeyPatch) -> None:
    """Regression: in the ranks of notebook_launcher, which sets them after the import, Accelerate saw all ranks."""
    monkeypatch.setattr(child_environment, "hidden", {})
    monkeypatch.setattr(child_environment, "_shown", {})

    class State:
        _shared_state: ClassVar[dict[str, Any]] = {}

        def __init__(self) -> None:
            self.size = environment.VARIABLES.get("WORLD_SIZE")

    joining.hide_ranks_from(State)
    joining.hide_ranks_from(State)
    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.setenv(name, "2")
    assert State().size is None
    child_environment.show_as_ranks({"RANK": "0", "WORLD_SIZE": "2"})  # of a replica
    assert State().size == "2"


@pytest.mark.parametrize(
    "listed, count, seen, seen_by_replica",
    [
        (None, 4, "1", "2,3"),
        ("4,5,6,7", 4, "5", "6,7"),  # of all ranks on the host
        ("4,5,-1,6", 2, "5", "4,5"),  # CUDA ignores all GPUs after the first invalid one
        ("GPU-8a,GPU-9b", 2, "GPU-9b", "GPU-8a,GPU-9b"),
        ("6", 1, "6", "6"),  # of this rank alone
        (None, 0, None, None),
    ],
)
def test_a_rank_sees_one_of_the_visible_gpus(
    monkeypatch: pytest.MonkeyPatch, listed: str | None, count: int, seen: str | None, seen_by_replica: str | None
) -> None:
    """Regression: if CUDA_VISIBLE_DEVICES listed the GPUs of all ranks, as under Slurm, all ranks used the first."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", listed or "")
    if listed is None:
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    monkeypatch.setattr(joining, "_visible_gpus", [])
    monkeypatch.setattr(detection, "local_rank", lambda: 1)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: count)
    monkeypatch.setattr(child_environment, "hide_ranks", lambda: None)
    joining.hide_ranks()
    assert environment.VARIABLES.get("CUDA_VISIBLE_DEVICES") == seen
    joining.choose_gpus([2, 3])
    joining.hide_ranks()  # as before the Accelerator of each trainer
    assert environment.VARIABLES.get("CUDA_VISIBLE_DEVICES") == seen_by_replica


@pytest.mark.slow  # imports accelerate
def test_a_population_has_a_prepared_scheduler(integration: Any) -> None:
    """Regression: the policy refused a scheduler that was prepared, or whose optimizer was."""
    import accelerate

    def main(world: ad.blocking.World) -> tuple[float, float]:
        accelerator = accelerate.Accelerator(cpu=True)
        model = torch.nn.Linear(2, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        inner = torch.optim.lr_scheduler.StepLR(optimizer, 2)
        model, optimizer, scheduler = accelerator.prepare(model, optimizer, inner)
        policy = PopulationTrainingPolicy(
            model, optimizer, average_every=2, hyperparameters={"lr": (0.1, 1.0)}, lr_scheduler=scheduler
        )
        with integration.Averaging(policy) as averages:
            for step in range(4):
                optimizer.step()
                scheduler.step()
                averages.step(loss=float(step + world.rank))
        return policy.hyperparameters["lr"], inner.base_lrs[0]

    ranks = ad.run_local(ad.blocking.hosted(main), ranks=2, strict=True)
    assert all(own == base != 0.1 for own, base in ranks)


@pytest.mark.slow  # imports accelerate
def test_ranks_of_a_process_accumulate_gradients_apart(integration: Any) -> None:
    """Regression: at the end of a rank's loader, its optimizer made no step while another rank's loader was open."""

    def main(_: ad.blocking.World) -> int:
        return int(train(integration, AverageAllPolicy, 2, gradient_accumulation_steps=3).iteration)

    assert ad.run_local(ad.blocking.hosted(main), ranks=3, strict=True) == [4] * 3, (
        "each epoch of 5 batches must have 2 updates, after batches 3 and 5"
    )


@pytest.mark.slow  # imports accelerate
def test_a_rank_continues_with_its_own_random_state(integration: Any, tmp_path: Path) -> None:
    """Regression: starting the policy after loading a state drew other rows and other dropout than without a pause."""

    def main(world: ad.blocking.World) -> list[float]:
        def weights(epochs: int, name: str, *, resumes: bool = False) -> list[float]:
            folder = tmp_path / name / f"rank{world.rank}"
            policy = train(integration, DiLoCoPolicy, epochs, folder, resumes=resumes)
            return torch.nn.utils.parameters_to_vector(policy.model.parameters()).tolist()

        whole = weights(2, "whole")
        weights(1, "half")
        assert weights(1, "half", resumes=True) == whole
        return torch.rand(2).tolist()

    numbers = ad.simulate(ad.blocking.hosted(main), ranks=2, seed=1, strict=True).results
    assert numbers[0] != numbers[1]
