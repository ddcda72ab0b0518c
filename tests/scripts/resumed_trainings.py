"""Trains DiLoCo in each training library: once without interruption, and once in two halves, resumed from a checkpoint.

    resumed_trainings.py FOLDER

A round is in progress when the checkpoint is saved. In Lightning all trainings use one callback, and each training is
followed by a validation of its checkpoint. Rank 1 has batches twice as large as rank 0, and tokens are counted. Each
rank reports whether both trainings end with equal weights, the ranks' weights in the rounds, and the numbers of
averages that each library has logged in both. For Accelerate, which logs nothing, they are the policy's own counts.
"""

from __future__ import annotations

import functools
import sys
from pathlib import Path
from typing import Any

import asyncdist.integrations.accelerate as in_accelerate
import asyncdist.integrations.lightning as in_lightning
import asyncdist.integrations.transformers as in_transformers  # isort: split

import accelerate
import lightning.pytorch as pl
import torch
import transformers
from support.mpi import report
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import asyncdist as ad
from protocols import DiLoCoPolicy, StepInfo

OPTIONS: dict[str, Any] = {"average_every": 10, "overlap_steps": 6, "weights": "tokens"}
HALF, WHOLE = 32, 64
"""Numbers of steps, in whole epochs of Lightning; a round is captured after step 30, and applied after step 36."""


class Model(nn.Module):
    """Begins equal on all ranks, and returns the output that transformers expects."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.Linear(8, 2)

    def forward(self, inputs: torch.Tensor, labels: torch.Tensor | None = None, **_: Any) -> dict[str, torch.Tensor]:
        outputs = self.layer(inputs)
        loss = (outputs - (inputs[:, :2] if labels is None else labels)).square().mean()
        return {"loss": loss, "logits": outputs}


def batch_size() -> int:
    return 4 * (ad.blocking.process_world().rank + 1)


def rows() -> torch.Tensor:
    """Return the rows of 32 batches."""
    rank = ad.blocking.process_world().rank
    return torch.randn(32 * batch_size(), 8, generator=torch.Generator().manual_seed(rank))


@functools.cache
def callback() -> in_lightning.Averaging[DiLoCoPolicy]:
    return in_lightning.Averaging(DiLoCoPolicy, **OPTIONS)


def fit(folder: Path, steps: int, *, resumes: bool = False) -> tuple[torch.Tensor, list[StepInfo], int]:
    class Module(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = Model()

        def training_step(self, batch: Any, _: int) -> Any:
            return self.net(batch[0])["loss"]

        def validation_step(self, batch: Any, _: int) -> None:
            pass

        def configure_optimizers(self) -> Any:
            return torch.optim.AdamW(self.parameters(), lr=0.01)

    class Watch(pl.Callback):
        def on_train_batch_end(self, *_: Any) -> None:
            if averaging.last_info:
                infos.append(averaging.last_info)

    infos: list[StepInfo] = []
    module = Module()
    averaging = callback()
    trainer = pl.Trainer(
        max_epochs=steps // HALF,
        callbacks=[averaging, Watch()],
        default_root_dir=folder,
        accelerator="cpu",
        devices=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    path = folder / f"last{ad.blocking.process_world().rank}.ckpt"
    loader = DataLoader(TensorDataset(rows()), batch_size())
    trainer.fit(module, loader, ckpt_path=str(path) if resumes else None)
    trainer.save_checkpoint(path)  # after the policy has ended
    count = int(trainer.callback_metrics["averages"])
    trainer.validate(module, loader, ckpt_path=str(path), verbose=False)
    return module.net.layer.weight.detach(), infos, count


def train(folder: Path, steps: int, *, resumes: bool = False) -> tuple[torch.Tensor, list[StepInfo], int]:
    class Watch(transformers.TrainerCallback):
        def on_step_end(self, *_: Any, **__: Any) -> None:
            if averaging.last_info:
                infos.append(averaging.last_info)

    infos: list[StepInfo] = []
    model = Model()
    arguments = transformers.TrainingArguments(
        output_dir=str(folder),
        max_steps=steps,
        save_steps=HALF,
        gradient_accumulation_steps=2,
        per_device_train_batch_size=batch_size(),
        lr_scheduler_type="constant",
        learning_rate=0.01,
        use_cpu=True,
        report_to=[],
        disable_tqdm=True,
    )
    averaging = in_transformers.Averaging(DiLoCoPolicy, **OPTIONS)
    data = [{"inputs": row, "labels": row[:2]} for row in rows()]
    trainer = transformers.Trainer(model, arguments, train_dataset=data, callbacks=[averaging, Watch()])
    trainer.train(resume_from_checkpoint=resumes)
    return model.layer.weight.detach(), infos, int(trainer.state.log_history[-1]["averages"])


def loop(folder: Path, steps: int, *, resumes: bool = False) -> tuple[torch.Tensor, list[StepInfo], int]:
    accelerator = accelerate.Accelerator(cpu=True, gradient_accumulation_steps=2)
    inner = Model()
    loader = DataLoader(TensorDataset(rows()), batch_size())
    model, optimizer, data = accelerator.prepare(inner, torch.optim.AdamW(inner.parameters(), lr=0.01), loader)
    policy = DiLoCoPolicy(model, optimizer, **OPTIONS)
    accelerator.register_for_checkpointing(policy)
    path = str(folder / f"rank{ad.blocking.process_world().rank}")
    if resumes:
        accelerator.load_state(path)
    infos = []
    with in_accelerate.Averaging(policy) as averaging:
        while policy.iteration < steps:
            skipped = 2 * (policy.iteration % 16)
            for (batch,) in accelerator.skip_first_batches(data, skipped) if skipped else data:
                with accelerator.accumulate(model):
                    accelerator.backward(model(batch)["loss"])
                    optimizer.step()
                    optimizer.zero_grad()
                    if info := averaging.step(tokens=len(batch)):
                        infos.append(info)
                if policy.iteration == steps:
                    break
        accelerator.save_state(path)  # while the policy is open
    return inner.layer.weight.detach(), infos, policy.statistics().average_count


def main(folder: Path) -> None:
    reports = {}
    for library, run in {"lightning": fit, "transformers": train, "accelerate": loop}.items():
        whole, infos, count = run(folder / library / "whole", WHOLE)
        run(folder / library / "half", HALF)
        resumed, _, resumed_count = run(folder / library / "half", WHOLE, resumes=True)
        is_trained = not torch.equal(whole, Model().layer.weight)
        reports[library] = {
            "is_equal": torch.equal(whole, resumed) and is_trained,
            "weights": [list(info.weights) for info in infos],
            "averages": count,
            "averages_when_resumed": resumed_count,
        }
    report(ad.blocking.process_world().rank, reports)


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(Path(sys.argv[1]))
