"""Trains with each training library; weights change only by averages, so that the effect of an average can be checked.

    integrations.py LIBRARY FOLDER

Rank r begins with weights r, and its loss is r, so the last rank is the worst and takes the mean of the others. The
ranks train until the last rank has announced this. Each rank reports its weights, and how the library sees the job.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from support.mpi import report
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import asyncdist as ad
from protocols import StepInfo

EVERY = 5
OPTIONS: dict[str, Any] = {"replacement_ratio": 0.34, "quorum": 1.0, "grace_s": 30.0}
"""A round waits for all, and is about one of two or three ranks."""


@dataclass(frozen=True, slots=True)
class Replaced:
    """Message to all ranks: the sender has its new weights."""


class Model(nn.Module):
    """A model whose loss is its rank."""

    def __init__(self) -> None:
        super().__init__()
        world = ad.blocking.process_world()
        self.rank = world.rank
        self.weight = nn.Parameter(torch.full((4,), float(world.rank)))
        self.replaced = world.channel(Replaced, tag=40)

    def forward(self, inputs: torch.Tensor, **_: Any) -> dict[str, torch.Tensor]:
        return {"loss": 0.0 * (self.weight * inputs).sum() + self.rank, "logits": inputs}

    def is_over(self, info: Any) -> bool:
        """Return whether the last rank has taken an average, by this rank's policy or by a message."""
        world = ad.blocking.current_world()
        if info:
            assert (world.rank, info.donors) == (world.size - 1, tuple(range(world.size - 1)))
            for dest in range(world.size):
                self.replaced.send(Replaced(), dest)
        world.sleep(0.002)
        return world.size == 1 or self.replaced.receive_nowait() is not None

    def end(self, **seen: Any) -> None:
        """Report the weights, and how the library sees the job."""
        report(self.rank, {"weights": self.weight.tolist(), **seen})


def loader() -> DataLoader[Any]:
    return DataLoader(TensorDataset(torch.ones(64, 4)), batch_size=2)


def plain(_: Path) -> None:
    from asyncdist.integrations.pytorch import SelectiveAveraging

    model = Model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    averaging = SelectiveAveraging(model, optimizer, EVERY, **OPTIONS)
    info: Any = None
    while not model.is_over(info):
        loss = model(torch.ones(4))["loss"]
        loss.backward()
        optimizer.step()
        info = averaging.step(loss=loss)
    model.end()


def accelerate(folder: Path) -> None:
    from asyncdist.integrations.accelerate import SelectiveAveraging  # isort: skip
    from accelerate import Accelerator
    from accelerate.utils import ProjectConfiguration

    naming = ProjectConfiguration(automatic_checkpoint_naming=True, logging_dir=str(folder / "logs"))
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2, project_dir=folder, project_config=naming)
    again = Accelerator(project_config=naming)  # a second one with the same configuration
    assert again.project_dir == accelerator.project_dir and Accelerator().project_dir is None
    inner = Model()
    model, optimizer, data = accelerator.prepare(inner, torch.optim.SGD(inner.parameters(), lr=0.0), loader())
    try:
        SelectiveAveraging(model, optimizer, EVERY, replica_size=2)  # type: ignore[call-arg]
    except TypeError as error:
        assert "no option 'replica_size': the Accelerator sees only one rank" in str(error)
    else:
        raise AssertionError("replica_size must be refused, as the Accelerator sees only one rank")
    averaging = SelectiveAveraging(model, optimizer, EVERY, **OPTIONS)
    is_over = False
    while not is_over:
        for (batch,) in data:
            with accelerator.accumulate(model):
                loss = model(batch)["loss"]
                accelerator.backward(loss)
                optimizer.step()
                optimizer.zero_grad()
                if not is_over:
                    is_over = inner.is_over(averaging.step(loss=loss))
    saved = [accelerator.save_state() for _ in range(2)]
    assert [Path(path).name for path in saved] == ["checkpoint_0", "checkpoint_1"] and all(map(os.path.isdir, saved))
    inner.end(
        processes=accelerator.num_processes,
        saved=[os.path.relpath(path, folder) for path in (*saved, accelerator.logging_dir)],
    )


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
        callbacks=[averaging, Stop()],
        default_root_dir=folder,
        accelerator="cpu",
        accumulate_grad_batches=2,
        enable_model_summary=False,
    )
    module = Module()
    trainer.fit(module, loader())
    assert averaging.policy is None, "the policy must be closed when the fit ends"
    told = int(trainer.callback_metrics.get("replacements", 0))
    module.net.end(processes=trainer.world_size, folders=sorted(os.listdir(folder)), replacements=told)


def transformers(folder: Path) -> None:
    from asyncdist.integrations.transformers import SelectiveAveraging  # isort: skip
    from transformers import Trainer, TrainerCallback, TrainingArguments

    class Stop(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            if not control.should_training_stop and model.is_over(averaging.last_info):
                control.should_training_stop = True

    class Reporter(TrainerCallback):  # stands before the callback, like the trainer's own callbacks
        logging_dir = str(folder / "board")  # as that of TensorBoard, with TENSORBOARD_LOGGING_DIR

        def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, float], **_: Any) -> None:
            told.update(logs)

    told: dict[str, float] = {}
    model = Model()
    arguments = TrainingArguments(
        output_dir=str(folder), max_steps=10**6, learning_rate=0.0, use_cpu=True, report_to=[], save_strategy="no"
    )
    arguments.logging_dir = str(folder / "runs" / "first")  # type: ignore[attr-defined]  # as transformers 4 does
    averaging, reporter = SelectiveAveraging(EVERY, **OPTIONS), Reporter()
    trainer = Trainer(
        model,
        arguments,
        train_dataset=[{"inputs": torch.ones(4)}] * 64,
        callbacks=[reporter, averaging, Stop()],
    )
    trainer.train()
    if (world := ad.blocking.process_world()).size > 1:
        assert reporter.logging_dir == str(folder / "board" / f"rank{world.rank}")
        assert arguments.logging_dir == str(folder / f"rank{world.rank}" / "runs" / "first")  # type: ignore[attr-defined]
    assert averaging.policy is None, "the policy must be closed when the training ends"
    assert trainer.state.log_history[-1].get("replacements") == told.get("replacements")
    trainer.save_model()

    class Fails(TrainerCallback):
        def on_step_end(self, *_: Any, **__: Any) -> None:
            raise ZeroDivisionError

    averaging = SelectiveAveraging(EVERY, **OPTIONS)
    trainer = Trainer(model, arguments, train_dataset=[{"inputs": torch.ones(4)}] * 64, callbacks=[averaging, Fails()])
    try:
        trainer.train()
    except ZeroDivisionError:
        assert averaging.policy is None, "the policy must be closed when the training raises"
    # a second trainer with the same arguments
    Trainer(model, arguments, callbacks=[SelectiveAveraging(EVERY, **OPTIONS)])
    arguments._n_gpu = 2
    try:
        Trainer(model, arguments, callbacks=[SelectiveAveraging(EVERY, **OPTIONS)])
    except ValueError as error:
        assert "GPU" in str(error) and " 2:" in str(error)
    else:
        raise AssertionError("two GPUs of one process are one replica")
    model.end(
        processes=arguments.world_size,
        folders=sorted(os.listdir(folder)),
        seed=arguments.seed,
        replacements=told.get("replacements", 0),
    )


def torchgfn(_: Path) -> None:
    from asyncdist.integrations.torchgfn import AsyncSelectiveAveragingPolicy

    model = Model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    policy = AsyncSelectiveAveragingPolicy(
        model_builder=None,
        average_every=EVERY,
        replacement_ratio=0.34,
        quorum=1.0,
        grace_s=30.0,
    )
    iteration, info = 0, StepInfo()
    while not model.is_over(info):
        same, also, told = policy(iteration, model, optimizer, local_metric=-float(model.rank), group=None)
        assert same is model and also is optimizer
        iteration, info = iteration + 1, StepInfo(**told)
    model.end()


LIBRARIES: dict[str, Callable[[Path], None]] = {
    each.__name__: each for each in (plain, accelerate, lightning, transformers, torchgfn)
}

if __name__ == "__main__":
    torch.set_num_threads(1)
    LIBRARIES[sys.argv[1]](Path(sys.argv[2]))
