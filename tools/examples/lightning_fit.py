"""Selective averaging as a callback of Lightning's Trainer.

asyncdist run -n 2 tools/examples/lightning_fit.py
"""

# mypy: ignore-errors

import torch
from lightning.pytorch import LightningModule, Trainer
from torch.utils.data import DataLoader, TensorDataset

from asyncdist.integrations.lightning import SelectiveAveraging


class Module(LightningModule):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(8, 1)

    def training_step(self, batch, index):
        return (self.layer(batch[0]) - batch[0].sum(1, keepdim=True)).square().mean()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.01)


torch.manual_seed(0)  # the same data and first weights on all ranks
data = DataLoader(TensorDataset(torch.randn(512, 8)), batch_size=16, shuffle=True)
module, averaging = Module(), SelectiveAveraging(average_every=20)
trainer = Trainer(max_epochs=2, devices=1, callbacks=[averaging])
trainer.fit(module, data)
print("trained")
