"""Selective averaging as a callback of the Trainer of transformers.

asyncdist run -n 2 tools/examples/transformers_train.py
"""

# mypy: ignore-errors

import torch
from transformers import Trainer, TrainingArguments

from asyncdist.integrations.transformers import SelectiveAveraging


class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(8, 1)

    def forward(self, inputs, labels):
        outputs = self.layer(inputs)
        return {"loss": (outputs - labels).square().mean(), "logits": outputs}


torch.manual_seed(0)  # the same data and first weights on all ranks; the Trainer shuffles by a seed of each rank
data = [{"inputs": row, "labels": row.sum(0, keepdim=True)} for row in torch.randn(512, 8)]
arguments = TrainingArguments(output_dir="runs", num_train_epochs=1, report_to=[], save_strategy="no")
trainer = Trainer(Model(), arguments, train_dataset=data, callbacks=[SelectiveAveraging(average_every=20)])
trainer.train()
print("trained")
