"""Resumes trainings of Lightning within an epoch, with ranks in one process."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import TensorDataset

import asyncdist as ad

ROWS, BATCH, SAVED_AFTER = 16, 2, 3


@pytest.fixture(autouse=True)
def settings() -> Iterator[None]:
    """Restore the settings of the process that callbacks of ranks other than 0 change."""
    logger = logging.getLogger("lightning.pytorch")
    level = logger.level
    with warnings.catch_warnings():
        yield
    logger.setLevel(level)


def rows_read(folder: Path, checkpoint: Path | None) -> list[int]:
    """Train two epochs, possibly from a checkpoint, and return the rows in the order of reading."""
    import lightning.pytorch as pl
    from lightning.pytorch.callbacks import ModelCheckpoint

    from asyncdist.integrations.lightning import SelectiveAveraging

    stateful = pytest.importorskip("torchdata.stateful_dataloader")
    read: list[int] = []

    class Module(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = torch.nn.Linear(1, 1)

        def training_step(self, batch: Any, _: int) -> Any:
            read.extend(batch[0].tolist())
            return self.net(batch[0][:, None].float()).square().mean()

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=1e-4)

    torch.manual_seed(0)
    saving = ModelCheckpoint(folder, "{step}", every_n_train_steps=SAVED_AFTER, save_top_k=-1)
    trainer = pl.Trainer(
        max_epochs=2,
        devices=1,
        accelerator="cpu",
        callbacks=[SelectiveAveraging(average_every=1000), saving],
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    data: Any = stateful.StatefulDataLoader(TensorDataset(torch.arange(ROWS)), batch_size=BATCH, shuffle=True)
    trainer.fit(Module(), data, ckpt_path=checkpoint)
    return read


@pytest.mark.filterwarnings("ignore")  # Lightning and torchdata warn of their own calls
def test_only_the_own_checkpoint_has_the_order_of_rows(tmp_path: Path) -> None:
    """Regression: ranks that resumed from one checkpoint read the same rows, with StatefulDataLoader."""
    pytest.importorskip("lightning.pytorch")

    def train(world: ad.blocking.World) -> tuple[list[int], list[int], list[int]]:
        name = f"step={SAVED_AFTER}.ckpt"
        whole = rows_read(tmp_path / "whole", None)
        own = rows_read(tmp_path / "own", tmp_path / "whole" / f"rank{world.rank}" / name)
        ad.blocking.barrier()
        return whole, own, rows_read(tmp_path / "shared", tmp_path / "whole" / "rank0" / name)

    ranks = ad.run_local(ad.blocking.hosted(train), ranks=2)
    for whole, own, shared in ranks:
        assert own == whole[SAVED_AFTER * BATCH :]
        assert sorted(shared[-ROWS:]) == list(range(ROWS))
    (_, _, first), (_, _, second) = ranks
    assert first[:-ROWS] != second[:-ROWS]
    assert first[-ROWS:] != second[-ROWS:]
