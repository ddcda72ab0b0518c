"""Four ranks as two replicas of two under DDP, inside a library's trainer; weights stand still but for averages.

    trainer_replicas.py LIBRARY FOLDER

Rank r begins with weights r + 1, which its replica's first rank replaces by its own, and its loss is r: the second
replica is the worse one. They train until it has taken the weights of the first one. What is reported of each rank:
the weights that it has had, and what the library has seen of the job.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from scripts.integrations import EVERY, Replaced, loader
from support.mpi import report
from torch import nn

import asyncdist as ad

OPTIONS: dict[str, Any] = {"replica_size": 2, "replacement_ratio": 0.5, "quorum": 1.0, "grace_s": 60.0}


class Model(nn.Module):
    """Its loss is its rank."""

    def __init__(self) -> None:
        super().__init__()
        self.world = ad.blocking.process_world()
        self.weight = nn.Parameter(torch.full((4,), self.world.rank + 1.0))
        self.replaced = self.world.channel(Replaced, tag=40)
        self.seen: list[float] = []

    def forward(self, inputs: torch.Tensor, **_: Any) -> dict[str, torch.Tensor]:
        return {"loss": 0.0 * (self.weight * inputs).sum() + self.world.rank, "logits": inputs}

    def is_over(self, info: Any) -> bool:
        """Whether the second replica has taken an average; the first rank of a replica tells the other one."""
        (weight,) = set(self.weight.tolist())
        self.seen += [weight] if weight not in self.seen else []
        if info and self.world.rank == 2:
            for dest in (0, 2):  # the others wait for these, and so would a send to them
                self.replaced.send(Replaced(), dest)
        self.world.sleep(0.002)
        flag = torch.tensor(float(self.replaced.receive_nowait() is not None))
        dist.broadcast(flag, 0)  # of the default group, which is the replica's
        return bool(flag)

    def end(self, folder: Path, library_size: int) -> None:
        """Report."""
        sizes = (library_size, dist.get_world_size())
        report(self.world.rank, {"weights": self.seen, "sizes": sizes, "folders": sorted(os.listdir(folder))})
        dist.destroy_process_group()


def lightning(folder: Path) -> None:
    import lightning.pytorch as pl

    from asyncdist.integrations.lightning import SelectiveAveraging

    class Module(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = Model()

        def training_step(self, batch: Any, _: int) -> Any:
            return self.net(batch[0])["loss"]

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=0.0)

    class Stop(pl.Callback):
        def on_train_batch_end(self, trainer: pl.Trainer, module: Any, *_: Any) -> None:
            if not trainer.should_stop and module.net.is_over(averaging.last_info):
                trainer.should_stop = True

    averaging = SelectiveAveraging(EVERY, **OPTIONS)
    trainer = pl.Trainer(
        max_epochs=-1,
        devices=2,
        strategy="ddp",
        callbacks=[averaging, Stop()],
        default_root_dir=folder,
        accelerator="cpu",
    )
    module = Module()
    trainer.fit(module, loader())
    module.net.end(folder, trainer.world_size)


def transformers(folder: Path) -> None:
    from asyncdist.integrations.transformers import SelectiveAveraging  # isort: skip
    from transformers import Trainer, TrainerCallback, TrainingArguments

    class Stop(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            if not control.should_training_stop and model.is_over(averaging.last_info):
                control.should_training_stop = True

    averaging = SelectiveAveraging(EVERY, **OPTIONS)
    model = Model()
    arguments = TrainingArguments(
        output_dir=str(folder), max_steps=10**6, learning_rate=0.0, use_cpu=True, report_to=[], save_strategy="no"
    )
    data = [{"inputs": torch.ones(4)}] * 64
    trainer = Trainer(model, arguments, train_dataset=data, callbacks=[averaging, Stop()])
    trainer.train()
    trainer.save_model()
    SelectiveAveraging(EVERY, **OPTIONS)  # regression: for a second training it was refused
    model.end(folder, arguments.world_size)


if __name__ == "__main__":
    torch.set_num_threads(1)
    {"lightning": lightning, "transformers": transformers}[sys.argv[1]](Path(sys.argv[2]))
