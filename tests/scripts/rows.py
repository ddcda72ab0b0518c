"""Trains without an average in each training library, and reports the rows that a rank reads and its weights.

    rows.py FOLDER LIBRARY...

All ranks use the same seed, as in programs for one process. A row is its number; the model drops out half of it. Each
rank reports, by library, its first weights, the rows of its first epoch, the values that its dropout kept, and its last
weights.
"""

from __future__ import annotations

import dataclasses
import importlib
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from support.mpi import report
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import asyncdist as ad

ROWS, BATCH = 64, 4
NEVER = 10**6


class Model(nn.Module):
    """Records its inputs."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 1)
        self.dropout = nn.Dropout(0.5)
        self.first: list[float] = []
        self.rows: list[int] = []
        self.kept: list[int] = []

    def forward(self, row: torch.Tensor, **_: Any) -> dict[str, torch.Tensor]:
        row = row.flatten()
        self.first = self.first or self.layer.weight.flatten().tolist()
        kept = self.dropout(torch.ones(len(row), 8))
        self.rows += row.tolist()
        self.kept += (kept > 0).flatten().int().tolist()[: 8 * (not self.kept)]
        return {"loss": (self.layer(kept * row[:, None] / ROWS) - 1).square().mean(), "logits": kept}

    def seen(self) -> dict[str, Any]:
        last = self.layer.weight.flatten().tolist()
        return {"first": self.first, "rows": self.rows[:ROWS], "kept": self.kept, "last": last}


def dataset() -> TensorDataset:
    return TensorDataset(torch.arange(ROWS))


def loader(**options: Any) -> DataLoader[Any]:
    return DataLoader(dataset(), batch_size=BATCH, shuffle=True, **options)


def stateful_loader(**options: Any) -> Any:
    stateful = importlib.import_module("torchdata.stateful_dataloader")
    return stateful.StatefulDataLoader(dataset(), batch_size=BATCH, shuffle=True, **options)


def _on_one_rank(save: Callable[[], object]) -> None:
    """Let rank 0 save a file that all ranks load afterwards."""
    if ad.blocking.process_world().rank == 0:
        save()
    ad.blocking.barrier()


def plain(_: Path) -> Model:
    from asyncdist.integrations.pytorch import SelectiveAveraging

    torch.manual_seed(0)
    model = Model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    averaging = SelectiveAveraging(model, optimizer, NEVER)
    for (row,) in loader():
        loss = model(row)["loss"]
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        averaging.step(loss)
    averaging.close()
    return model


def fabric(_: Path) -> Model:
    from lightning.fabric import Fabric

    from asyncdist.integrations.pytorch import SelectiveAveraging

    fabric = Fabric(accelerator="cpu", devices=1)
    fabric.seed_everything(0)
    inner = Model()
    model, optimizer = fabric.setup(inner, torch.optim.SGD(inner.parameters(), lr=0.1))
    data = fabric.setup_dataloaders(loader())
    averaging = SelectiveAveraging(inner, optimizer.optimizer, NEVER)
    for (row,) in data:
        loss = model(row)["loss"]
        optimizer.zero_grad()
        fabric.backward(loss)
        optimizer.step()
        averaging.step(loss)
    averaging.close()
    return inner


def _accelerate(data: DataLoader[Any], *, shared: Path | None = None, **options: Any) -> Model:
    from asyncdist.integrations.accelerate import SelectiveAveraging  # isort: skip
    from accelerate import Accelerator, DataLoaderConfiguration
    from accelerate.utils import set_seed

    accelerator = Accelerator(cpu=True, dataloader_config=DataLoaderConfiguration(**options))
    set_seed(0)
    inner = Model()
    model, optimizer, data = accelerator.prepare(inner, torch.optim.SGD(inner.parameters(), lr=0.1), data)
    averaging = SelectiveAveraging(model, optimizer, NEVER)
    if shared is not None:
        if options.get("use_stateful_dataloader"):
            next(iter(data))  # otherwise its state is empty
        _on_one_rank(lambda: accelerator.save_state(str(shared)))
        accelerator.load_state(str(shared))
    for (row,) in data:
        loss = model(row)["loss"]
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        averaging.step(loss)
    averaging.close()
    return inner


def accelerate(_: Path) -> Model:
    return _accelerate(loader())


def accelerate_seedable(_: Path) -> Model:
    return _accelerate(loader(), use_seedable_sampler=True, data_seed=7)


def accelerate_resumed(folder: Path) -> Model:
    return _accelerate(loader(), shared=folder / "shared", use_seedable_sampler=True)


def accelerate_generator(_: Path) -> Model:
    return _accelerate(loader(generator=torch.Generator().manual_seed(1)))


def accelerate_stateful(_: Path) -> Model:
    return _accelerate(stateful_loader(), use_stateful_dataloader=True)


def accelerate_stateful_workers(_: Path) -> Model:
    data: Any = DataLoader(dataset(), batch_size=BATCH, shuffle=True, num_workers=1, multiprocessing_context="fork")
    return _accelerate(data, use_stateful_dataloader=True)


def accelerate_stateful_resumed(folder: Path) -> Model:
    return _accelerate(stateful_loader(), shared=folder / "shared_stateful", use_stateful_dataloader=True)


def _lightning(data: Any, *, is_estimated: bool = False, shared: Path | None = None, **options: Any) -> Model:
    import lightning.pytorch as pl
    from lightning.pytorch.callbacks import ModelCheckpoint

    from asyncdist.integrations.lightning import SelectiveAveraging

    class Module(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = Model()

        def on_train_epoch_start(self) -> None:
            self.net.rows.clear()

        def training_step(self, batch: Any, _: int) -> Any:
            return self.net(batch[0])["loss"]

        def configure_optimizers(self) -> Any:
            if is_estimated:
                assert self.trainer.estimated_stepping_batches > 0  # creates the loaders before the fit starts
            return torch.optim.SGD(self.parameters(), lr=0.1)

    pl.seed_everything(0, workers=True)
    module = Module()
    averaging = SelectiveAveraging(NEVER, **options)
    plain: dict[str, Any] = {
        "accelerator": "cpu",
        "logger": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        **({"devices": 2, "strategy": "ddp"} if options else {"devices": 1}),
    }
    if shared is not None:
        saving = ModelCheckpoint(shared, "{step}", every_n_train_steps=1, save_top_k=-1)
        _on_one_rank(lambda: pl.Trainer(max_epochs=1, callbacks=[saving], **plain).fit(Module(), data))
    epochs = 1 if shared is None else 2  # a resumed epoch reads the remaining rows
    trainer = pl.Trainer(max_epochs=epochs, callbacks=[averaging], enable_checkpointing=False, **plain)
    trainer.fit(module, data, ckpt_path=None if shared is None else shared / "step=3.ckpt")
    return module.net


def lightning(_: Path) -> Model:
    return _lightning(loader())


def lightning_workers(_: Path) -> Model:
    return _lightning(loader(num_workers=1, multiprocessing_context="fork"), is_estimated=True)


def lightning_generator(_: Path) -> Model:
    return _lightning(loader(generator=torch.Generator().manual_seed(1)))


def lightning_stateful_resumed(folder: Path) -> Model:
    """Resume in the middle of an epoch of a run of one process."""
    return _lightning(stateful_loader(), shared=folder / "shared_lightning")


def lightning_replicas(_: Path) -> Model:
    return _lightning(loader(), replica_size=2)


def lightning_sampler_of_replicas(_: Path) -> Model:
    """Train with a sampler that Lightning wraps."""
    sampler = torch.utils.data.SubsetRandomSampler(range(ROWS))
    data: Any = DataLoader(dataset(), batch_size=BATCH, sampler=sampler)
    return _lightning(data, replica_size=2)


def _transformers(
    folder: Path,
    *,
    search: bool = False,
    init: bool = False,
    size: int = 1,
    shared: Path | None = None,
    **options: Any,
) -> Model:
    from asyncdist.integrations.transformers import SelectiveAveraging  # isort: skip
    from transformers import Trainer, TrainingArguments

    made: list[Model] = []

    def make() -> Model:
        made.append(Model())
        return made[-1]

    averaging = SelectiveAveraging(NEVER, **({"replica_size": size} if size > 1 else {}))
    arguments = TrainingArguments(
        output_dir=str(folder),
        num_train_epochs=1,
        per_device_train_batch_size=BATCH,
        use_cpu=True,
        report_to=[],
        save_strategy="no",
        remove_unused_columns=False,
        label_names=["logits"],
        **options,
    )
    torch.manual_seed(0)
    model: dict[str, Any] = {"model_init": make} if init or search else {"model": make()}
    rows = [{"row": torch.tensor(row), "input_ids": [0] * (row // 8 + 1)} for row in range(ROWS)]
    data: dict[str, Any] = {
        "train_dataset": rows,
        "data_collator": lambda batch: {"row": torch.stack([each["row"] for each in batch])},
    }
    if shared is not None:
        saving: dict[str, Any] = {"output_dir": str(shared), "max_steps": 1, "save_strategy": "steps", "save_steps": 1}
        _on_one_rank(Trainer(Model(), dataclasses.replace(arguments, **saving), **data).train)
    trainer = Trainer(args=arguments, callbacks=[averaging], **data, **model)
    if search:
        import optuna

        optuna.logging.set_verbosity(optuna.logging.WARNING)
        trainer.evaluate = lambda *_, **__: {"eval_loss": 0.0}  # type: ignore[method-assign]
        trainer.hyperparameter_search(lambda trial: {"seed": trial.suggest_int("seed", 1, 10**6)}, n_trials=2)
    else:
        trainer.train(resume_from_checkpoint=None if shared is None else str(shared / "checkpoint-1"))
    return made[-1]


def transformers(folder: Path) -> Model:
    return _transformers(folder)


def transformers_init(folder: Path) -> Model:
    return _transformers(folder, init=True)


def transformers_resumed(folder: Path) -> Model:
    """Resume after the first step of a run of one process, with all rows left to read."""
    sampler = {"use_seedable_sampler": False}
    return _transformers(
        folder, shared=folder / "shared", max_steps=ROWS // BATCH + 1, ignore_data_skip=True, accelerator_config=sampler
    )


def transformers_data_seed(folder: Path) -> Model:
    return _transformers(folder, data_seed=7)


def transformers_search(folder: Path) -> Model:
    return _transformers(folder, search=True)


def _by_length() -> dict[str, Any]:
    """Return the option that groups rows by length; transformers 5 has renamed it."""
    from transformers import TrainingArguments

    names = {each.name for each in dataclasses.fields(TrainingArguments)}
    return {"group_by_length": True} if "group_by_length" in names else {"train_sampling_strategy": "group_by_length"}


def transformers_lengths(folder: Path) -> Model:
    return _transformers(folder, **_by_length())


def transformers_replicas(folder: Path) -> Model:
    return _transformers(folder, size=2)


def transformers_lengths_of_replicas(folder: Path) -> Model:
    return _transformers(folder, size=2, **_by_length())


LIBRARIES: dict[str, Callable[[Path], Model]] = {
    each.__name__: each
    for each in (
        *(plain, fabric, accelerate, accelerate_seedable, accelerate_generator, accelerate_resumed),
        *(accelerate_stateful, accelerate_stateful_workers, accelerate_stateful_resumed),
        *(lightning, lightning_workers, lightning_generator, lightning_replicas, lightning_sampler_of_replicas),
        lightning_stateful_resumed,
        *(transformers, transformers_init, transformers_data_seed, transformers_search, transformers_lengths),
        transformers_resumed,
        *(transformers_replicas, transformers_lengths_of_replicas),
    )
}

if __name__ == "__main__":
    torch.set_num_threads(1)
    world = ad.blocking.process_world()
    found = {}
    for library in sys.argv[2:]:
        found[library] = LIBRARIES[library](Path(sys.argv[1])).seen()
    report(world.rank, found)
