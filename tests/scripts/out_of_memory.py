"""Trains two ranks; rank 1 runs out of memory in its third step, and trains again with half of the batch.

    out_of_memory.py FOLDER

Each rank reports, by library, the policy's iterations where a training has ended, and the number of its policies.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from support.mpi import report
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import asyncdist as ad

ROWS, BATCH = 32, 2
OPTIONS: dict[str, Any] = {"average_every": 2, "start_timeout_s": 20.0}


class Model(nn.Module):
    """Fails with an out-of-memory error at the third batch, once, on rank 1."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(1, 1)
        self.left = 2 if ad.blocking.process_world().rank == 1 else -1
        self.iterations: list[int] = []
        self.policies: set[int] = set()

    def forward(self, row: torch.Tensor, **_: Any) -> dict[str, torch.Tensor]:
        self.left -= 1
        if self.left == -1:
            raise RuntimeError("CUDA out of memory. Tried to allocate 2.00 GiB")
        return {"loss": self.layer(row).square().mean()}

    def note(self, averaging: Any) -> None:
        """Record the policy when a training ends."""
        self.iterations.append(averaging.policy.iteration)
        self.policies.add(id(averaging.policy))


def loader(batch: int) -> DataLoader[Any]:
    return DataLoader(TensorDataset(torch.ones(ROWS, 1)), batch_size=batch)


def accelerate(_: Path) -> Model:
    from asyncdist.integrations.accelerate import SelectiveAveraging  # isort: skip
    from accelerate import Accelerator
    from accelerate.utils import find_executable_batch_size

    accelerator = Accelerator(cpu=True)
    inner = Model()

    @find_executable_batch_size(starting_batch_size=BATCH)
    def train(batch_size: int) -> None:
        accelerator.free_memory()
        model, optimizer, data = accelerator.prepare(
            inner, torch.optim.SGD(inner.parameters(), lr=0.1), loader(batch_size)
        )
        averaging = SelectiveAveraging(model, optimizer, **OPTIONS)
        try:
            for (row,) in data:
                loss = model(row)["loss"]
                accelerator.backward(loss)
                optimizer.step()
                optimizer.zero_grad()
                averaging.step(loss)
        finally:
            inner.note(averaging)
        averaging.close()

    train()
    return inner


def accelerate_model(_: Path) -> Model:
    """Make model and accelerator inside the function that is retried, as Accelerate's own examples do."""
    from asyncdist.integrations.accelerate import SelectiveAveraging  # isort: skip
    from accelerate import Accelerator
    from accelerate.utils import find_executable_batch_size

    first = Model()
    tried: list[Model] = []

    @find_executable_batch_size(starting_batch_size=BATCH)
    def train(batch_size: int) -> None:
        inner = Model()
        if tried:
            inner.left = -1  # the smaller batches fit into memory
        tried.append(inner)
        model, optimizer, data = Accelerator(cpu=True).prepare(
            inner, torch.optim.SGD(inner.parameters(), lr=0.1), loader(batch_size)
        )
        averaging = SelectiveAveraging(model, optimizer, **OPTIONS)
        try:
            for (row,) in data:
                loss = model(row)["loss"]
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                averaging.step(loss)
        finally:
            first.note(averaging)
        assert averaging.policy is not None and averaging.policy.model is inner
        averaging.close()

    train()
    return first


def lightning(_: Path) -> Model:
    import lightning.pytorch as pl

    from asyncdist.integrations.lightning import SelectiveAveraging

    class Module(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = Model()

        def training_step(self, batch: Any, _: int) -> Any:
            return self.net(batch[0])["loss"]

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=0.1)

        def on_train_end(self) -> None:
            self.net.note(averaging)

    def trainer() -> pl.Trainer:
        quiet = dict.fromkeys(("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False)
        return pl.Trainer(max_epochs=1, accelerator="cpu", devices=1, callbacks=[averaging], **quiet)  # type: ignore[arg-type]

    module = Module()
    averaging = SelectiveAveraging(**OPTIONS)
    try:
        trainer().fit(module, loader(BATCH))
    except RuntimeError:
        module.net.note(averaging)
        averaging = SelectiveAveraging(**OPTIONS)  # as in a program that creates both again
        trainer().fit(module, loader(BATCH // 2))
    return module.net


def transformers(folder: Path) -> Model:
    from asyncdist.integrations.transformers import SelectiveAveraging  # isort: skip
    from transformers import Trainer, TrainerCallback, TrainingArguments

    class Note(TrainerCallback):
        def on_train_begin(self, *_: Any, **__: Any) -> None:
            if averaging.policy.iteration:
                model.note(averaging)

        def on_epoch_end(self, *_: Any, **__: Any) -> None:
            model.note(averaging)

    model = Model()
    averaging = SelectiveAveraging(**OPTIONS)
    arguments = TrainingArguments(
        output_dir=str(folder),
        num_train_epochs=1,
        per_device_train_batch_size=BATCH,
        auto_find_batch_size=True,
        use_cpu=True,
        report_to=[],
        save_strategy="no",
        disable_tqdm=True,
    )
    rows = [{"row": torch.ones(1)}] * ROWS
    Trainer(model, arguments, train_dataset=rows, callbacks=[averaging, Note()]).train()
    assert averaging.policy is None
    return model


TRAININGS: list[Callable[[Path], Model]] = [accelerate, accelerate_model, lightning, transformers]
LIBRARIES = {each.__name__: each for each in TRAININGS}

if __name__ == "__main__":
    torch.set_num_threads(1)
    world = ad.blocking.process_world()
    found = {}
    for name, train in LIBRARIES.items():
        model = train(Path(sys.argv[1]))
        found[name] = {"iterations": model.iterations, "policies": len(model.policies)}
    report(world.rank, found)
