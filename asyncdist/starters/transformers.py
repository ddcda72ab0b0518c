"""Trains a small language model on several ranks; the worst ranks adopt the average weights of the good ones.

asyncdist run -n 4 train.py     each rank has its own Trainer; output_dir gets the folders rank0, rank1, ...
python train.py                 a single rank
"""

from typing import Any

import torch
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainerCallback, TrainingArguments

import asyncdist as ad
from asyncdist.integrations.transformers import SelectiveAveraging  # before TrainingArguments is used


class TellReplacements(TrainerCallback):
    """Prints a line when this rank has adopted an average."""

    def __init__(self, averaging: SelectiveAveraging) -> None:
        self.averaging = averaging

    def on_step_end(self, args: TrainingArguments, state: Any, control: Any, **_: Any) -> None:
        """Print the result of the policy's step."""
        if info := self.averaging.last_info:
            world = ad.blocking.process_world()
            print(f"rank {world.rank}, step {state.global_step}, {info}")


def main() -> None:
    torch.manual_seed(0)
    starts = torch.randint(0, 64, (512, 1))
    texts = (starts + torch.arange(32)) % 64  # each sequence counts up from a random number
    dataset = [{"input_ids": text, "labels": text} for text in texts]
    config = GPT2Config(vocab_size=64, n_positions=32, n_embd=64, n_layer=2, n_head=4, bos_token_id=0, eos_token_id=0)
    arguments = TrainingArguments(output_dir="trained", num_train_epochs=5, per_device_train_batch_size=8, report_to=[])
    # Ranks are compared by their mean training loss; with monitor="eval_loss", by their evaluation loss.
    averaging = SelectiveAveraging(average_every=100, replacement_ratio=0.25)
    callbacks = [averaging, TellReplacements(averaging)]
    trainer = Trainer(GPT2LMHeadModel(config), arguments, train_dataset=dataset, callbacks=callbacks)
    trainer.train()


if __name__ == "__main__":
    main()
