"""Trains four ranks as two replicas of two under DDP, inside a library's trainer; weights change only by averages.

    trainer_replicas.py LIBRARY FOLDER

Rank r begins with weights r + 1, which DDP replaces by those of its replica's first rank, and its loss is r: the second
replica is worse. The ranks train until it has taken the weights of the first replica. Each rank reports the weights
that it has had, and how the library sees the job.

Then they train with DiLoCo for two rounds of two steps. The gradient of rank r is r, and the replica's is the mean of
its ranks' gradients. The second round begins from a checkpoint, except for a sharded model.
"""

from __future__ import annotations

import functools
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from scripts.integrations import EVERY, Replaced, loader
from support.mpi import report
from torch import nn

import asyncdist as ad
from protocols import DiLoCoPolicy

OPTIONS: dict[str, Any] = {"replica_size": 2, "replacement_ratio": 0.5, "quorum": 1.0, "grace_s": 60.0}


class Model(nn.Module):
    """A model whose loss is its rank."""

    def __init__(self) -> None:
        super().__init__()
        self.world = ad.blocking.process_world()
        self.weight = nn.Parameter(torch.full((4,), self.world.rank + 1.0))
        self.replaced = self.world.channel(Replaced, tag=40)
        self.seen: list[float] = []

    def forward(self, inputs: torch.Tensor, **_: Any) -> dict[str, torch.Tensor]:
        return {"loss": 0.0 * (self.weight * inputs).sum() + self.world.rank, "logits": inputs}

    def is_over(self, info: Any) -> bool:
        """Return whether the second replica has taken an average; a replica's first rank notifies the other."""
        (weight,) = set(self.weight.tolist())
        self.seen += [weight] if weight not in self.seen else []
        if info and self.world.rank == 2:
            for dest in (0, 2):  # the others wait for these ranks, and a send to them would wait as well
                self.replaced.send(Replaced(), dest)
        self.world.sleep(0.002)
        flag = torch.tensor(float(self.replaced.receive_nowait() is not None))
        dist.broadcast(flag, 0)  # in the default group, which is the replica's
        return bool(flag)

    def end(self, folder: Path, library_size: int, **moved: list[float]) -> None:
        """Report the results; ``moved`` are the weights after DiLoCo."""
        sizes = (library_size, dist.get_world_size())
        folders = sorted(each.name for each in folder.iterdir() if each.name.startswith("replica"))
        report(self.world.rank, {"weights": self.seen, "sizes": sizes, "folders": folders, **moved})
        dist.destroy_process_group()


class Sloped(nn.Module):
    """A model whose gradient is its rank."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(4))
        self.rank = ad.blocking.process_world().rank

    def forward(self, inputs: torch.Tensor, **_: Any) -> dict[str, torch.Tensor]:
        return {"loss": self.rank * self.weight.sum() + 0.0 * inputs.sum(), "logits": inputs}

    def values(self) -> list[float]:
        weight: Any = self.weight
        return (weight.full_tensor() if hasattr(weight, "full_tensor") else weight).tolist()  # type: ignore[no-any-return]


OUTER = functools.partial(torch.optim.SGD, lr=1.0, momentum=0.5)
DILOCO: dict[str, Any] = {"average_every": 2, "replica_size": 2, "outer_optimizer": OUTER}


def diloco_of_lightning(folder: Path, *, is_sharded: bool) -> list[float]:
    """Train for two rounds, and return the weights."""
    import lightning.pytorch as pl
    from lightning.pytorch.strategies import ModelParallelStrategy
    from torch.distributed.fsdp import fully_shard

    from asyncdist.integrations.lightning import Averaging

    class Module(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = Sloped()

        def configure_model(self) -> None:
            if is_sharded:
                fully_shard(self.net, mesh=self.device_mesh["data_parallel"])  # type: ignore[index]

        def training_step(self, batch: Any, _: int) -> Any:
            return self.net(batch[0])["loss"]

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=1.0)

    def fit(steps: int, **options: Any) -> tuple[Any, Module]:
        strategy = ModelParallelStrategy(data_parallel_size=2, tensor_parallel_size=1) if is_sharded else "ddp"
        callbacks = [Averaging(DiLoCoPolicy, **DILOCO)]
        trainer = pl.Trainer(
            max_steps=steps,
            max_epochs=-1,
            devices=2,
            strategy=strategy,
            callbacks=callbacks,
            default_root_dir=folder,
            accelerator="cpu",
            logger=False,
            enable_checkpointing=False,
        )
        module = Module()
        trainer.fit(module, loader(), **options)
        return trainer, module

    path = folder / f"{'sharded' if is_sharded else 'saved'}{ad.blocking.process_world().rank // 2}.ckpt"
    fit(2)[0].save_checkpoint(path)
    return fit(4, ckpt_path=path)[1].net.values()


def diloco_of_transformers(folder: Path) -> list[float]:
    """Train for two rounds, and return the weights."""
    from asyncdist.integrations.transformers import Averaging  # isort: skip
    from transformers import Trainer, TrainingArguments

    def fit(steps: int, **options: Any) -> Sloped:
        averaging, model = Averaging(DiLoCoPolicy, **DILOCO), Sloped()
        arguments = TrainingArguments(
            output_dir=str(folder / "diloco"),
            max_steps=steps,
            learning_rate=1.0,
            lr_scheduler_type="constant",
            optim="sgd",
            max_grad_norm=0.0,
            use_cpu=True,
            report_to=[],
            save_strategy="steps",
            save_steps=2,
        )
        data = [{"inputs": torch.ones(4)}] * 64
        Trainer(model, arguments, train_dataset=data, callbacks=[averaging]).train(**options)
        return model

    fit(2)
    return fit(4, resume_from_checkpoint=True).values()


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
    moved = {f"sharded {each}": diloco_of_lightning(folder, is_sharded=each) for each in (False, True)}
    module.net.end(folder, trainer.world_size, **moved)


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
    SelectiveAveraging(EVERY, **OPTIONS)  # regression: this was refused for a second training
    model.end(folder, arguments.world_size, **{"sharded False": diloco_of_transformers(folder)})


if __name__ == "__main__":
    torch.set_num_threads(1)
    {"lightning": lightning, "transformers": transformers}[sys.argv[1]](Path(sys.argv[2]))
