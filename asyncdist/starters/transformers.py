"""Trains a small language model on several ranks, whose worst ones take the average of the good ones.

asyncdist run -n 4 train.py     each rank has a Trainer of its own; output_dir gets the folders rank0, rank1, ...
python train.py                 one rank, alone
"""

import torch
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

from asyncdist.integrations.transformers import SelectiveAveraging  # before TrainingArguments are made


def main() -> None:
    torch.manual_seed(0)
    starts = torch.randint(0, 64, (512, 1))
    texts = (starts + torch.arange(32)) % 64  # each counts on from its first number
    dataset = [{"input_ids": text, "labels": text} for text in texts]
    config = GPT2Config(vocab_size=64, n_positions=32, n_embd=64, n_layer=2, n_head=4, bos_token_id=0, eos_token_id=0)
    arguments = TrainingArguments(output_dir="trained", num_train_epochs=5, per_device_train_batch_size=8, report_to=[])
    # Ranks are judged by their mean training loss; monitor="eval_loss" judges them by evaluation.
    averaging = SelectiveAveraging(average_every=100, replacement_ratio=0.25)
    trainer = Trainer(GPT2LMHeadModel(config), arguments, train_dataset=dataset, callbacks=[averaging])
    trainer.train()


if __name__ == "__main__":
    main()
