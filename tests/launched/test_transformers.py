"""Tests selective averaging in the Trainer of transformers: the losses and metrics by which a rank is judged."""

from __future__ import annotations

import textwrap
from pathlib import Path

import pytest
from support import torchrun

TRANSFORMERS_METRICS = """
    from asyncdist.integrations.transformers import SelectiveAveraging
    import torch
    from transformers import Trainer, TrainerControl, TrainerState, TrainingArguments

    for monitor in "eval_b_loss", "eval_los":
        averaging = SelectiveAveraging(2, monitor=monitor)
        for name in "eval_a_loss", "eval_b_loss", "eval_a_loss", "eval_b_loss":
            averaging.on_evaluate(None, TrainerState(), TrainerControl(), metrics={name: 1.0, "epoch": 1})

    class Model(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.net = torch.nn.Linear(2, 1)

        def forward(self, inputs, **_):
            return {"loss": self.net(inputs).square().mean()}

    averaging = SelectiveAveraging(2, monitor="eval_never")
    arguments = TrainingArguments(output_dir="unused", max_steps=2, use_cpu=True, report_to=[], save_strategy="no")
    Trainer(Model(), arguments, train_dataset=[{"inputs": torch.ones(2)}] * 8, callbacks=[averaging]).train()
"""


TRANSFORMERS_COMPILED = """
    from asyncdist.integrations.transformers import SelectiveAveraging
    import torch
    from transformers import Trainer, TrainerCallback, TrainingArguments

    class Model(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.net = torch.nn.Linear(2, 1)

        def forward(self, inputs, **_):
            return {"loss": self.net(inputs).square().mean()}

    class Count(TrainerCallback):
        def on_step_end(self, args, state, control, **_):
            seen.append(averaging._loss._count)
            averaging._loss.reset()

    data = [{"inputs": torch.ones(2)}] * 8
    for options in (dict(torch_compile=True, torch_compile_backend="eager"), {}):
        torch.compiler.reset()
        seen = []
        model = Model()
        if not options:
            model.compile(backend="eager")
        arguments = TrainingArguments(output_dir="unused", max_steps=6, use_cpu=True, report_to=[], disable_tqdm=True,
            save_strategy="no", logging_strategy="no", **options)
        averaging = SelectiveAveraging(100)
        Trainer(model, arguments, train_dataset=data, callbacks=[averaging, Count()]).train()
        print("seen", seen)
"""


@pytest.mark.mpi
@pytest.mark.long
def test_a_loss_observer_in_transformers_is_not_compiled(tmp_path: Path) -> None:
    """Regression: the observer broke the model's graph, for which torch printed a warning of 13 lines on each rank."""
    script = tmp_path / "program.py"
    script.write_text(textwrap.dedent(TRANSFORMERS_COMPILED))
    ended = torchrun.run_alone(script).check()
    told = [line for line in ended.stdout.splitlines() if line.startswith("seen")]
    assert told == ["seen [1, 1, 1, 1, 1, 1]"] * 2, ended.output()
    assert "Graph break" not in ended.stderr and "metrics.py" not in ended.stderr, ended.stderr


TRANSFORMERS_LOSSES = """
    from asyncdist.integrations.transformers import SelectiveAveraging
    from asyncdist.protocols.metrics import NOT_MEASURED
    import torch
    from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

    class Judged(SelectiveAveraging):
        def _metric(self):
            judged.append(super()._metric())
            return judged[-1]

    class Own(Trainer):
        def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
            return model(**inputs).logits.square().mean()

        loss_is_scaled_for_ga = False

    torch.manual_seed(0)
    model = GPT2LMHeadModel(GPT2Config(n_layer=1, n_head=2, n_embd=16, vocab_size=50, n_positions=16))
    rows = [{"input_ids": row, "labels": row} for row in torch.randint(0, 50, (64, 8))]
    cases = {"one batch": (Trainer, {}), "accumulated": (Trainer, {"gradient_accumulation_steps": 4}),
        "smoothed": (Trainer, {"gradient_accumulation_steps": 2, "label_smoothing_factor": 0.1}),
        "own loss": (Own, {"gradient_accumulation_steps": 2})}
    for name, (kind, options) in cases.items():
        judged = []
        arguments = TrainingArguments(output_dir="unused", max_steps=4, logging_steps=2, use_cpu=True,
            learning_rate=0.0, report_to=[], disable_tqdm=True, save_strategy="no", per_device_train_batch_size=2,
            **options)
        trainer = kind(model, arguments, train_dataset=rows, callbacks=[Judged(2)])
        trainer.train()
        logged = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
        assert len(logged) == 2, logged
        # transformers 4 logs four decimals.
        assert torch.allclose(torch.tensor(judged), torch.tensor(logged), rtol=1e-3, atol=6e-5), (judged, logged)
        print("agree", name)

    class Elsewhere(Trainer):
        def train(self):
            self.create_optimizer_and_scheduler(4)
            handler = self.callback_handler
            handler.optimizer, handler.train_dataloader = self.optimizer, self.get_train_dataloader()
            handler.on_train_begin(self.args, self.state, self.control)
            for _ in range(4):
                handler.on_step_end(self.args, self.state, self.control)
            handler.on_train_end(self.args, self.state, self.control)

    judged = []
    Elsewhere(model, arguments, train_dataset=rows, callbacks=[Judged(2)]).train()
    assert judged == [NOT_MEASURED] * 2, judged
"""


@pytest.mark.mpi
def test_transformers_judges_a_rank_by_the_loss_that_it_logs(tmp_path: Path) -> None:
    """Regression: accumulation divided the loss, and with label smoothing or a custom loss a rank had no metric.

    With a trainer that overrides train(), each rank silently had the metric 0.0, and ranks were replaced because of it.
    """
    script = tmp_path / "program.py"
    script.write_text(textwrap.dedent(TRANSFORMERS_LOSSES))
    ended = torchrun.run_alone(script).check()
    told = [line for line in ended.stdout.splitlines() if line.startswith("agree")]
    assert told == ["agree one batch", "agree accumulated", "agree smoothed", "agree own loss"], ended.output()
    assert ended.stderr.count("train() of this trainer does not call training_step()") == 1, ended.output()


@pytest.mark.long
@pytest.mark.mpi
def test_a_metric_that_transformers_has_not_is_warned_of_once(tmp_path: Path) -> None:
    script = tmp_path / "program.py"
    script.write_text(textwrap.dedent(TRANSFORMERS_METRICS))
    ended = torchrun.run_alone(script).check()
    assert ended.stderr.count("no metric") == 2, ended.output()
    assert "eval_strategy is 'no', so only the program's own evaluations report 'eval_never'" in ended.stderr
    assert (
        "no evaluation has reported the monitored metric 'eval_los'" in ended.stderr
        and "epoch, eval_a_loss, eval_b_loss" in ended.stderr
    )
