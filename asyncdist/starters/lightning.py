"""Trains a Lightning module on several ranks; the worst ranks adopt the average weights of the good ones.

asyncdist run -n 4 train.py     each rank has its own Trainer; logs and checkpoints go to rank0, rank1, ...
python train.py                 a single rank
"""

from typing import Any

import lightning.pytorch as pl
import torch
from torch.utils.data import DataLoader, TensorDataset

import asyncdist as ad
from asyncdist.integrations.lightning import SelectiveAveraging


class Classifier(pl.LightningModule):
    """Predicts on which side of a curve a point lies."""

    def __init__(self) -> None:
        super().__init__()
        self.net = torch.nn.Sequential(torch.nn.Linear(20, 64), torch.nn.ReLU(), torch.nn.Linear(64, 2))

    def training_step(self, batch: list[torch.Tensor], _: int) -> torch.Tensor:
        """Return the loss of a batch."""
        inputs, labels = batch
        loss = torch.nn.functional.cross_entropy(self.net(inputs), labels)
        self.log("train_loss", loss)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Return the optimizer."""
        return torch.optim.Adam(self.parameters(), lr=1e-3)


class TellReplacements(pl.Callback):
    """Prints a line when this rank has adopted an average."""

    def __init__(self, averaging: SelectiveAveraging) -> None:
        self.averaging = averaging

    def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        """Print the result of the policy's step for this batch."""
        if info := self.averaging.last_info:
            world = ad.blocking.process_world()
            print(f"rank {world.rank}, epoch {trainer.current_epoch}, {info}")


def main() -> None:
    torch.manual_seed(0)  # all ranks have the same data and initial weights, but shuffle differently
    inputs = torch.randn(2048, 20)
    labels = (inputs[:, 0] * inputs[:, 1] > 0).long()
    loader = DataLoader(TensorDataset(inputs, labels), batch_size=32, shuffle=True)
    module = Classifier()
    # Ranks are compared by their mean training loss; with monitor="val_loss", by their validation loss.
    averaging = SelectiveAveraging(average_every=100, replacement_ratio=0.25)
    trainer = pl.Trainer(max_epochs=5, callbacks=[averaging, TellReplacements(averaging)])
    trainer.fit(module, loader)


if __name__ == "__main__":
    main()
